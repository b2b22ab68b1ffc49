// quire.serve.models.models_api: the routes about the models that a server offers: their list in OpenAI's form with llama.cpp's status, loading
// and unloading, changes of status as a stream. Owns nothing.
export module quire.serve.models.models_api;

import quire.core.base;
import quire.serve.api.context;
import quire.serve.api.json_fields;
import quire.serve.api.request_fields;
export import quire.serve.models.model_pool;

export namespace quire {

void answer_models(ModelPool& pool, HttpExchange& e);
// /v1/models/NAME and /models/NAME
void answer_model(ModelPool& pool, HttpExchange& e);
// The body of /models/load and /models/unload: a model's name.
Parsed<std::string> parse_model_request(std::string_view json, const ApiLimits& limits);
void                answer_load_model(ModelPool& pool, HttpExchange& e);
void                answer_unload_model(ModelPool& pool, HttpExchange& e);
void                answer_model_events(ModelPool& pool, HttpExchange& e);

} // namespace quire

module :private;

namespace quire {

// `card`: of the model; null: its file cannot be read.
Json model_json(ModelPool& pool, const ModelView& view, const ModelCard* card, const std::string& name) {
    const std::int64_t started = pool.shared().started;
    Json               out{{"id", name},          {"object", "model"}, {"created", started},
                           {"owned_by", "quire"}, {"root", view.id},   {"parent", nullptr}};
    // Anthropic's members of a model.
    out["type"]          = "model";
    out["display_name"]  = name;
    out["created_at"]    = time_text(started * 1'000'000);
    out["max_model_len"] = card ? Json(card->context) : Json();
    auto adapter         = view.adapters.find(name);
    if (adapter == view.adapters.end() && std::ranges::find(view.names, name) == view.names.end())
        adapter = view.adapters.find(without_latest(name));
    if (adapter != view.adapters.end())
        out["root"] = std::filesystem::path(adapter->second).filename().string(), out["parent"] = view.id;
    return out;
}

Json status_json(const ModelView& view) {
    Json status{{"value", name_of(view.status)}};
    if (view.status == ModelStatus::unloaded && !view.failure.empty())
        status["failed"] = true, status["error"] = view.failure;
    return status;
}

// A link on a page of another site leads a browser to an address; it may show the list, and change nothing.
bool is_foreign_link(const HttpRequest& r) {
    const std::string_view site = r.header("sec-fetch-site");
    return r.header("sec-fetch-mode") == "navigate" && (site == "cross-site" || site == "same-site");
}

void answer_models(ModelPool& pool, HttpExchange& e) {
    const std::string_view reload = find_field(e.request.query, "reload");
    if (pool.many() && (reload == "1" || reload == "true") && !is_foreign_link(e.request))
        if (const auto error = pool.reload([&e] { return e.peer->gone(); })) return refuse(e, *error);
    Json                  data = Json::array();
    std::set<std::string> adapters; // that are listed; of several models' adapters with one name the first answers
    for (const ModelView& view : pool.views()) {
        const std::shared_ptr<const ModelCard> card = pool.card(view.id);
        for (const std::string& name : view.names) {
            const bool adapter = view.adapters.contains(name);
            if (adapter && !adapters.insert(name).second) continue;
            if (pool.many() && !adapter && name != view.id) continue; // as llama.cpp lists them
            Json model          = model_json(pool, view, card.get(), name);
            model["permission"] = Json::array();
            model["status"]     = status_json(view);
            if (pool.many()) {
                model["aliases"] = Json::array();
                for (const std::string& other : view.names)
                    if (!adapter && other != view.id && !view.adapters.contains(other))
                        model["aliases"].push_back(other);
                model["path"]         = view.file;
                const char* const out = card && card->encodes ? "embeddings" : "text";
                model["architecture"] = {{"input_modalities", {"text"}}, {"output_modalities", {out}}};
            }
            if (card)
                model["meta"] = {
                    {"architecture", card->architecture}, {"n_vocab", card->vocab_size}, {"n_ctx", card->context},
                    {"n_ctx_train", card->trained},       {"n_embd", card->hidden_size}, {"n_layer", card->n_layers}};
            data.push_back(std::move(model));
        }
    }
    answer_json(e, Json{{"object", "list"}, {"has_more", false}, {"data", std::move(data)}});
}

void answer_model(ModelPool& pool, HttpExchange& e) {
    constexpr std::string_view before = "/models/";
    const std::string          name   = e.request.path.substr(e.request.path.find(before) + before.size());
    const auto                 view   = pool.view(name);
    if (!view) return refuse(e, pool.unknown(name));
    Json model      = model_json(pool, *view, pool.card(view->id).get(), name);
    model["status"] = status_json(*view);
    answer_json(e, std::move(model));
}

Parsed<std::string> parse_model_request(std::string_view json, const ApiLimits& limits) {
    Parsed<JsonDocument> body = parse_object(json, limits);
    if (!body) return std::unexpected(body.error());
    JsonFields  f(*body);
    std::string name = f.text("model", 1024);
    if (name.empty()) f.fail("model", "model is missing");
    if (f.failed()) return f.error();
    return name;
}

void change_model(ModelPool& pool, HttpExchange& e, std::optional<ApiError> (ModelPool::*change)(const std::string&)) {
    const Parsed<std::string> name = parse_model_request(e.request.body, {});
    if (!name) return refuse(e, name.error());
    if (const auto error = (pool.*change)(*name)) return refuse(e, *error);
    answer_json(e, Json{{"success", true}});
}

void answer_load_model(ModelPool& pool, HttpExchange& e) { change_model(pool, e, &ModelPool::load); }

void answer_unload_model(ModelPool& pool, HttpExchange& e) { change_model(pool, e, &ModelPool::unload); }

void answer_model_events(ModelPool& pool, HttpExchange& e) {
    if (!pool.events().listen()) return refuse(e, ApiError{503, "too many listen to the events of the models", "", ""});
    const std::shared_ptr<void> listening(nullptr, [&pool](void*) { pool.events().unlisten(); });
    e.response.type = "text/event-stream";
    e.response.headers.emplace_back("Cache-Control", "no-cache");
    e.response.stream = [&pool, &e, listening, serial = pool.events().last()](const HttpWrite& write) mutable {
        constexpr double ping   = 15; // seconds of silence
        double           silent = 0;
        for (bool open = write(comment_event); open && !e.peer->gone() && !pool.draining();) {
            const std::vector<std::string> events = pool.events().next(serial, 0.5);
            silent                                = events.empty() ? silent + 0.5 : 0;
            for (const std::string& one : events) open = open && write(event(one));
            if (open && silent >= ping) open = write(comment_event), silent = 0;
        }
    };
}

} // namespace quire
