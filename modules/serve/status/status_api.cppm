// quire.serve.status.status_api: the routes about the server itself: health, load, settings, metrics. Owns nothing.
export module quire.serve.status.status_api;

import quire.core.base;
import quire.core.version;
import quire.serve.api.context;
export import quire.serve.models.model_pool;
import quire.serve.status.metrics_text;

export namespace quire {

void answer_health(ModelPool& pool, HttpExchange& e);
void answer_load(ModelPool& pool, HttpExchange& e);
void answer_props(ModelPool& pool, HttpExchange& e);
void answer_version(ModelPool& pool, HttpExchange& e);
void answer_metrics(ModelPool& pool, HttpExchange& e);

// The answer of /props about a model, as it is given while the model sleeps.
std::string props_asleep(const ApiContext& api);

// The value of the parameter `model` in the request's address; "": there is none.
std::string model_parameter(const HttpExchange& e);

} // namespace quire

module :private;

namespace quire {

std::string model_parameter(const HttpExchange& e) { return std::string(find_field(e.request.query, "model")); }

// The loaded models that the request is about: the one that ?model= names, or all. Nothing: the request was refused.
std::optional<std::vector<ModelPool::Lease>> models_of(ModelPool& pool, HttpExchange& e) {
    const std::string             name = model_parameter(e);
    std::vector<ModelPool::Lease> all  = pool.loaded();
    if (!pool.many() || name.empty()) return all;
    const auto view = pool.view(name);
    if (!view) return refuse(e, pool.unknown(name)), std::nullopt;
    std::vector<ModelPool::Lease> one;
    for (ModelPool::Lease& lease : all)
        if (lease.id() == view->id) one.push_back(std::move(lease));
    if (one.empty() && view->status != ModelStatus::sleeping)
        return refuse(e,
                      ApiError{503, cat("the model ", quote(view->id), " is not loaded"), "model", "model_not_loaded"}),
               std::nullopt;
    return one;
}

// A model that sleeps is well.
void answer_health(ModelPool& pool, HttpExchange& e) {
    if (pool.draining()) return refuse(e, ApiError{503, "the server is shutting down", "", ""});
    const auto models = models_of(pool, e);
    if (!models) return;
    for (const ModelPool::Lease& model : *models)
        if (!model.host().service().healthy()) return refuse(e, ApiError{503, "the engine takes no steps", "", ""});
    answer_json(e, Json{{"status", "ok"}});
}

// Requests that wait or run, as in vLLM.
void answer_load(ModelPool& pool, HttpExchange& e) {
    const auto models = models_of(pool, e);
    if (!models) return;
    int n = 0;
    for (const ModelPool::Lease& model : *models) n += model.host().service().in_flight();
    answer_json(e, Json{{"server_load", n}});
}

Json props_json(const ApiContext& api, bool sleeps) {
    const EngineOptions& o = api.service.engine_options();
    const Tokenizer&     t = api.service.tokenizer();
    const ApiLimits&     l = api.options.limits;
    GenerationRequest    usual; // a request without any field
    usual.request.sampling = l.samplers.params;
    usual.dry_breakers     = l.samplers.dry_breakers;
    if (l.default_tokens >= 0) usual.max_tokens = l.default_tokens;
    Json params    = settings_json(usual);
    params["seed"] = l.seed; // -1: another one for each request
    return {{"default_generation_settings", {{"n_ctx", o.context}, {"params", std::move(params)}}},
            {"total_slots", o.max_sequences},
            {"model_alias", api.options.aliases[0]},
            {"model_path", api.options.model_file},
            {"chat_template", api.options.chat_template.source()},
            {"chat_form", api.options.chat_template.name()},
            {"chat_templates", api.options.chat_template.names()},
            {"chat_template_missing", api.options.chat_template.is_fallback()},
            {"modalities", {{"vision", false}, {"audio", false}}},
            {"build_info", cat("quire ", quire_version)},
            {"is_sleeping", sleeps},
            {"bos_token", t.bos() >= 0 ? Json(std::string(t.piece(t.bos()))) : Json()},
            {"eos_token", t.eos() >= 0 ? Json(std::string(t.piece(t.eos()))) : Json()},
            {"engine",
             {{"device", o.device},
              {"description", api.service.engine().describe()},
              {"block_size", o.block_size},
              {"kv_blocks", o.kv_blocks},
              {"swap_blocks", o.swap_blocks},
              {"tier_blocks", o.tier_blocks},
              {"prefix_cache", o.prefix_cache}}}};
}

std::string props_asleep(const ApiContext& api) { return json_dump(props_json(api, true)); }

// llama.cpp's, of a server of many models.
Json router_props(const ModelPool& pool) {
    return {{"role", "router"},
            {"max_instances", pool.options().most},
            {"models_autoload", pool.options().autoload},
            {"model_alias", "quire"},
            {"model_path", "none"},
            {"default_generation_settings", {{"params", Json::object()}, {"n_ctx", 0}}},
            {"build_info", cat("quire ", quire_version)}};
}

// The settings of a model that sleeps are those from before.
void answer_props(ModelPool& pool, HttpExchange& e) {
    const std::string name = model_parameter(e);
    if (pool.many() && name.empty()) return answer_json(e, router_props(pool));
    ModelWanted wanted;
    wanted.name     = pool.many() ? name : "";
    const auto view = pool.view(wanted.name);
    if (view && view->status == ModelStatus::sleeping) {
        e.response.body = view->asleep;
        return;
    }
    const std::string_view autoload = find_field(e.request.query, "autoload");
    wanted.answers                  = false;
    wanted.autoload  = autoload.empty() ? pool.options().autoload : autoload == "true" || autoload == "1";
    wanted.gone      = [&e] { return e.peer->gone(); };
    const auto model = pool.acquire(wanted);
    if (!model) return refuse(e, model.error());
    answer_json(e, props_json(model->host().api(), false));
}

void answer_version(ModelPool&, HttpExchange& e) { answer_json(e, Json{{"version", quire_version}}); }

void answer_metrics(ModelPool& pool, HttpExchange& e) {
    const auto models = models_of(pool, e);
    if (!models) return;
    std::vector<MeasuredModel> measured;
    for (const ModelPool::Lease& model : *models) measured.push_back({&model.host().service(), model.id()});
    const auto& dropped = pool.shared().dropped_log_lines;
    e.response.type     = "text/plain; version=0.0.4; charset=utf-8";
    e.response.headers.emplace_back("Process-Start-Time-Unix", cat(pool.shared().started)); // as llama-server sends it
    e.response.body = metrics_text(measured, *pool.shared().server, dropped ? dropped() : 0);
}

} // namespace quire
