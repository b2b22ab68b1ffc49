// quire.serve.status.status_api: the routes about the server itself: models, health, load, settings, metrics. Owns nothing.
export module quire.serve.status.status_api;

import quire.core.base;
import quire.serve.api.context;
import quire.serve.status.metrics_text;

export namespace quire {

void answer_models(ApiContext& api, HttpExchange& e);
void answer_model(ApiContext& api, HttpExchange& e);
void answer_health(ApiContext& api, HttpExchange& e);
void answer_load(ApiContext& api, HttpExchange& e);
void answer_props(ApiContext& api, HttpExchange& e);
void answer_version(ApiContext& api, HttpExchange& e);
void answer_metrics(ApiContext& api, HttpExchange& e);

} // namespace quire

module :private;

namespace quire {

Json model_json(const ApiContext& api, const std::string& id) {
    Json       model{{"id", id},
                     {"object", "model"},
                     {"created", api.started},
                     {"owned_by", "quire"},
                     {"root", api.options.aliases[0]},
                     {"parent", nullptr},
                     {"max_model_len", api.options.limits.context}};
    const auto adapter = api.adapters_of(id);
    if (!adapter) return model;
    model["root"]   = api.service.engine_options().adapters[std::size_t((*adapter)[0].adapter)].path;
    model["parent"] = api.options.aliases[0];
    return model;
}

void answer_models(ApiContext& api, HttpExchange& e) {
    const ModelConfig& c    = api.service.config();
    Json               data = Json::array();
    for (const std::string& alias : api.options.aliases) {
        Json model          = model_json(api, alias);
        model["permission"] = Json::array();
        model["meta"]       = {
            {"architecture", c.architecture_name}, {"n_vocab", c.vocab_size}, {"n_ctx", api.options.limits.context},
            {"n_ctx_train", c.context_length},     {"n_embd", c.hidden_size}, {"n_layer", c.n_layers}};
        data.push_back(std::move(model));
    }
    for (const AdapterOption& adapter : api.service.engine_options().adapters)
        if (api.adapters_of(adapter.name)) data.push_back(model_json(api, adapter.name));
    answer_json(e, Json{{"object", "list"}, {"data", std::move(data)}});
}

void answer_model(ApiContext& api, HttpExchange& e) {
    answer_json(e, model_json(api, e.request.path.substr(std::string_view("/v1/models/").size())));
}

void answer_health(ApiContext& api, HttpExchange& e) {
    const bool well   = api.service.healthy() && !api.service.draining();
    e.response.status = well ? 200 : 503;
    answer_json(e, well ? Json{{"status", "ok"}}
                        : Json::parse(error_body(ApiError{
                              503, api.service.draining() ? "the server is shutting down" : "the engine takes no steps",
                              "", ""})));
}

// Requests that wait or run, as in vLLM.
void answer_load(ApiContext& api, HttpExchange& e) { answer_json(e, Json{{"server_load", api.service.in_flight()}}); }

void answer_props(ApiContext& api, HttpExchange& e) {
    const EngineOptions& o = api.service.engine_options();
    const Tokenizer&     t = api.service.tokenizer();
    const ApiLimits&     l = api.options.limits;
    GenerationRequest    usual; // a request without any field
    usual.request.sampling = l.samplers.params;
    usual.dry_breakers     = l.samplers.dry_breakers;
    if (l.default_tokens >= 0) usual.max_tokens = l.default_tokens;
    Json params    = settings_json(usual);
    params["seed"] = l.seed; // -1: another one for each request
    answer_json(e, Json{{"default_generation_settings", {{"n_ctx", o.context}, {"params", std::move(params)}}},
                        {"total_slots", o.max_sequences},
                        {"model_alias", api.options.aliases[0]},
                        {"model_path", api.options.model_file},
                        {"chat_template", api.options.chat_template.source()},
                        {"chat_form", api.options.chat_template.name()},
                        {"chat_templates", api.options.chat_template.names()},
                        {"chat_template_missing", api.options.chat_template.is_fallback()},
                        {"modalities", {{"vision", false}, {"audio", false}}},
                        {"build_info", cat("quire ", quire_version)},
                        {"bos_token", t.bos() >= 0 ? Json(std::string(t.piece(t.bos()))) : Json()},
                        {"eos_token", t.eos() >= 0 ? Json(std::string(t.piece(t.eos()))) : Json()},
                        {"engine",
                         {{"device", o.device},
                          {"description", api.service.engine().describe()},
                          {"block_size", o.block_size},
                          {"kv_blocks", o.kv_blocks},
                          {"swap_blocks", o.swap_blocks},
                          {"tier_blocks", o.tier_blocks},
                          {"prefix_cache", o.prefix_cache}}}});
}

void answer_version(ApiContext&, HttpExchange& e) { answer_json(e, Json{{"version", quire_version}}); }

void answer_metrics(ApiContext& api, HttpExchange& e) {
    e.response.type     = "text/plain; version=0.0.4; charset=utf-8";
    const auto& dropped = api.options.dropped_log_lines;
    e.response.body     = metrics_text(api.service, *api.server, dropped ? dropped() : 0, api.options.aliases[0]);
}

} // namespace quire
