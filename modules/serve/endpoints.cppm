// quire.serve.endpoints: the table of HTTP routes; before a handler runs, the request is admitted, gets its model and memory. Runs on the
// connection's worker thread. **Owns** the limit on the memory of bodies that are being parsed.
export module quire.serve.endpoints;

import quire.core.base;
import quire.serve.anthropic.api;
import quire.serve.api.access;
import quire.serve.api.error;
import quire.serve.api.request_fields;
export import quire.serve.api.context;
import quire.serve.http.server;
import quire.serve.llama_cpp.adapters_api;
import quire.serve.llama_cpp.api;
import quire.serve.memory_semaphore;
import quire.serve.models.model_field;
import quire.serve.models.models_api;
export import quire.serve.models.model_pool;
import quire.serve.ollama.api;
import quire.serve.openai.api;
import quire.serve.openai.responses_api;
import quire.serve.openapi;
import quire.serve.pages.pages;
import quire.serve.status.embedding_api;
import quire.serve.status.memory_api;
import quire.serve.status.status_api;
import quire.serve.status.text_api;

export namespace quire {

// The answer to every request while the model is loaded; `loaded`: the fraction of it that is. A browser gets a page, if there are `pages`.
void answer_loading(HttpExchange& e, double loaded, bool pages);

class Endpoints {
public:
    // `options`: of the server; those of each model are its own. `pool` outlives this.
    Endpoints(ModelPool& pool, EndpointOptions options);

    // Adds every route. The server must not outlive this.
    void add_to(HttpServer& server);
    // Answers a POST of a batch, without keys; in_batches(): whether `path` is one that batches have. Any thread.
    void        answer(HttpExchange& e);
    static bool in_batches(std::string_view path);
    // Other API keys, from the next request on. Any thread.
    void set_keys(std::vector<std::string> keys) { access_.set_keys(std::move(keys)); }

private:
    using Handler       = void (*)(ApiContext&, HttpExchange&);    // for one model
    using PoolHandler   = void (*)(ModelPool&, HttpExchange&);     // for the models
    using SharedHandler = void (*)(SharedContext&, HttpExchange&); // for none
    using Route         = std::variant<Handler, PoolHandler, SharedHandler>;

    void add(HttpServer& server, const char* method, const std::string& path, Route route, bool open = false);
    void answer(HttpExchange& e, const Route& route);
    bool reserve_memory(HttpExchange& e);

    ModelPool&      pool_;
    EndpointOptions options_;
    Access          access_;
    MemorySemaphore working_, small_working_; // bytes of memory for bodies that are being parsed: large and small ones
    std::set<std::string> paths_;             // that have a route for OPTIONS
    std::vector<ApiRoute> routes_;
};

} // namespace quire

module :private;

namespace quire {

Endpoints::Endpoints(ModelPool& pool, EndpointOptions options)
    : pool_(pool), options_(std::move(options)), access_(options_.api_keys, options_.cors_origins, options_.local_only),
      working_(options_.working_bytes - options_.working_bytes / 4), small_working_(options_.working_bytes / 4) {}

bool no_body(HttpExchange&) { return false; }

void Endpoints::add(HttpServer& server, const char* method, const std::string& path, Route route, bool open) {
    routes_.push_back({method, path, pool_.many() && std::holds_alternative<Handler>(route)});
    const HttpHandler handler = [this, route, open](HttpExchange& e) {
        access_.allow_origin(e);
        if (!open)
            if (const auto error = access_.check(e)) return refuse(e, *error);
        answer(e, route);
    };
    // A client without a key uploads nothing.
    server.route(method, path, handler,
                 [this, open](HttpExchange& e) { return !open && e.request.method == "POST" && !access_.check(e); });
    if (!access_.has_cors() || !paths_.insert(path).second) return;
    const HttpHandler preflight = [this](HttpExchange& e) {
        if (const auto error = access_.preflight(e)) refuse(e, *error);
    };
    server.route("OPTIONS", path, preflight, no_body);
}

void Endpoints::answer(HttpExchange& e, const Route& route) {
    const bool posted = e.request.method == "POST";
    if (!std::holds_alternative<Handler>(route)) {
        if (posted && !reserve_memory(e)) return;
        if (const auto* handler = std::get_if<PoolHandler>(&route)) return (*handler)(pool_, e);
        return std::get<SharedHandler>(route)(pool_.shared(), e);
    }
    ModelWanted wanted;
    wanted.answers = posted; // a request that looks at a model does not keep it
    wanted.gone    = [&e] { return e.peer->gone(); };
    wanted.peer    = e.peer;
    if (pool_.many()) {
        if (posted && answer_unloaded(pool_, e)) return;
        const std::string_view autoload = find_field(e.request.query, "autoload");
        wanted.autoload = autoload.empty() ? pool_.options().autoload : autoload == "true" || autoload == "1";
        if (posted) wanted.name = model_field(e.request.body);
        const bool in_body = !wanted.name.empty();
        if (!in_body) wanted.name = model_parameter(e);
        // No model is loaded for a body that is no JSON.
        if (posted && (wanted.name.empty() || (in_body && !pool_.is_loaded(wanted.name)))) {
            if (!reserve_memory(e)) return;
            if (const auto body = parse_object(e.request.body, options_.limits); !body) return refuse(e, body.error());
            e.held.reset();
        }
    }
    Parsed<ModelPool::Lease> model = pool_.acquire(wanted);
    if (!model) {
        if (model.error().status == 429 || model.error().status == 503)
            e.response.headers.emplace_back("Retry-After", "1");
        return refuse(e, model.error());
    }
    if (pool_.many()) e.notes.emplace_back("model", model->id());
    ApiContext& api   = model->host().api();
    const auto  lease = std::make_shared<ModelPool::Lease>(std::move(*model));
    e.model           = lease;
    if (pool_.many()) e.keep_model = [&lease = *lease](double seconds) { lease.keep(seconds); };
    if (posted && !reserve_memory(e)) return;
    std::get<Handler>(route)(api, e);
    if (posted || e.response.stream) return;
    e.keep_model = {};
    e.model.reset(); // the client may read slowly
}

void answer_page(HttpExchange& e, const Page& page) {
    e.response.type = page.type;
    e.response.body = page.body;
    e.response.headers.emplace_back("Content-Security-Policy", page.policy);
    e.response.headers.emplace_back("X-Content-Type-Options", "nosniff");
    e.response.headers.emplace_back("Referrer-Policy", "no-referrer");
    e.response.headers.emplace_back("Cache-Control", page.kept);
}

// The pages need no key: they request their contents with the user's key.
void add_pages(HttpServer& server) {
    for (const Page& page : pages())
        server.route("GET", std::string(page.path), [page](HttpExchange& e) { answer_page(e, page); }, no_body);
}

void answer_openapi(SharedContext& shared, HttpExchange& e) { e.response.body = shared.openapi; }

// The process answers: there is no need to restart it.
void answer_live(HttpExchange& e) { e.response.body = R"({"status":"ok"})"; }

void answer_alive(SharedContext&, HttpExchange& e) { answer_live(e); }

void answer_loading(HttpExchange& e, double loaded, bool pages) {
    const HttpRequest& r = e.request;
    if (r.path == "/health/live") return answer_live(e);
    loaded            = std::min(loaded, 0.99); // behind the weights come the cache and pinned prefixes
    e.response.status = 503;
    e.response.headers.emplace_back("Retry-After", "1");
    const bool wanted =
        r.method == "GET" && (r.path == "/" || r.path == "/blocks.html") && r.header("accept").contains("text/html");
    if (pages && wanted) return answer_page(e, loading_page(loaded));
    const ErrorForm form = error_form(e.request.path);
    // llama.cpp's words, which its clients recognise.
    Json body = Json::parse(error_body(ApiError{503, "Loading model", "", "loading_model"}, form));
    if (form == ErrorForm::openai) body["progress"] = int(loaded * 100) / 100.0;
    e.response.body = json_dump(body);
}

void Endpoints::add_to(HttpServer& server) {
    pool_.shared().server = &server;
    const auto open       = [&](const char* method, const std::string& path, PoolHandler handler) {
        add(server, method, path, handler, true);
    };
    const auto versioned = [&](const char* method, const std::string& path, Route route) {
        add(server, method, "/v1" + path, route);
        add(server, method, path, route); // as in llama.cpp
    };
    add(server, "POST", "/v1/completions", answer_completion);
    add(server, "POST", "/completions", answer_either_completion);
    versioned("POST", "/chat/completions", answer_chat);
    versioned("POST", "/chat/completions/input_tokens", answer_chat_tokens);
    versioned("POST", "/chat/completions/control", answer_chat_control);
    add(server, "POST", "/completion", answer_native_completion);
    add(server, "POST", "/infill", answer_infill);
    add(server, "GET", "/slots", answer_slots);
    add(server, "POST", "/slots/*", answer_slot_action);
    versioned("POST", "/responses", answer_responses);
    versioned("POST", "/responses/input_tokens", answer_responses_tokens);
    versioned("GET", "/responses/*", answer_stored_response);
    versioned("DELETE", "/responses/*", delete_stored_response);
    versioned("GET", "/responses/*/input_items", answer_stored_items);
    add(server, "POST", "/v1/messages", answer_messages);
    add(server, "POST", "/v1/messages/count_tokens", answer_count_tokens);
    add(server, "POST", "/api/chat", answer_ollama_chat);
    add(server, "POST", "/api/generate", answer_ollama_generate);
    add(server, "POST", "/api/embed", answer_ollama_embed);
    add(server, "POST", "/api/embeddings", answer_ollama_embeddings);
    add(server, "GET", "/api/tags", answer_ollama_tags);
    add(server, "POST", "/api/show", answer_ollama_show);
    add(server, "GET", "/api/ps", answer_ollama_ps);
    add(server, "GET", "/api/version", answer_ollama_version);
    versioned("POST", "/embeddings", answer_embeddings);
    versioned("POST", "/rerank", answer_rerank);
    versioned("GET", "/models", answer_models);
    if (pool_.many()) versioned("GET", "/models/**", answer_model); // names come and go, and may have slashes
    else
        for (const std::string& name : pool_.names()) versioned("GET", "/models/" + name, answer_model);
    add(server, "GET", "/lora-adapters", answer_adapters);
    add(server, "POST", "/lora-adapters", answer_set_adapters);
    if (pool_.many()) {
        add(server, "POST", "/models/load", answer_load_model);
        add(server, "POST", "/models/unload", answer_unload_model);
        add(server, "GET", "/models/sse", answer_model_events);
    }
    open("GET", "/health", answer_health);
    open("GET", "/v1/health", answer_health);
    open("GET", "/health/ready", answer_health);
    add(server, "GET", "/health/live", answer_alive, true);
    open("GET", "/ping", answer_health); // as SageMaker asks
    open("POST", "/ping", answer_health);
    add(server, "GET", "/load", answer_load);
    versioned("POST", "/tokenize", answer_tokenize);
    versioned("POST", "/detokenize", answer_detokenize);
    versioned("GET", "/tokenizer_info", answer_tokenizer_info);
    add(server, "POST", "/apply-template", answer_apply_template);
    add(server, "GET", "/metrics", answer_metrics);
    add(server, "GET", "/kv_event_sources", answer_kv_event_sources);
    add(server, "GET", "/props", answer_props);
    add(server, "GET", "/blocks", answer_blocks);
    add(server, "GET", "/blocks/events", answer_block_events);
    add(server, "GET", "/version", answer_version);
    add(server, "POST", "/pin", answer_pin);
    add(server, "POST", "/unpin", answer_unpin);
    add(server, "GET", "/pins", answer_pins);
    add(server, "GET", "/openapi.json", answer_openapi);
    pool_.shared().openapi = openapi_text(options_.limits, routes_);
    if (options_.pages) add_pages(server);
}

struct BatchRoute {
    std::string_view path;
    void (*handler)(ApiContext&, HttpExchange&);
};
constexpr BatchRoute batch_routes[] = {{"/v1/chat/completions", answer_chat},
                                       {"/v1/completions", answer_completion},
                                       {"/v1/embeddings", answer_embeddings},
                                       {"/v1/responses", answer_responses},
                                       {"/v1/rerank", answer_rerank}};

bool Endpoints::in_batches(std::string_view path) {
    return std::ranges::find(batch_routes, path, &BatchRoute::path) != std::end(batch_routes);
}

void Endpoints::answer(HttpExchange& e) {
    const auto route = std::ranges::find(batch_routes, e.request.path, &BatchRoute::path);
    check(route != std::end(batch_routes), "a route that no batch has");
    answer(e, Route(route->handler));
    e.held.reset();
}

// Waits until there is memory to parse and tokenize a body beside the others. It takes at most 20 times its bytes (JSON values,
// copies, tokens), and the tokenizer 100 times the bytes of the piece it works on, which is at most a MiB. Small bodies wait for small ones only.
bool Endpoints::reserve_memory(HttpExchange& e) {
    constexpr double  timeout = 30; // seconds
    const std::size_t bytes   = e.request.body.size();
    const std::size_t room    = bytes * 20 + std::min(bytes, std::size_t(1) << 20) * 100;
    auto&             lane    = bytes <= small_body ? small_working_ : working_;
    auto              pass    = lane.enter(room, timeout, [&] { return e.peer->gone(); });
    if (pass) {
        e.held = std::make_shared<MemorySemaphore::Pass>(std::move(*pass));
        return true;
    }
    if (e.peer->gone()) refuse(e, ApiError{499, "the client has gone", "", ""});
    else refuse_too_large(e);
    return false;
}

} // namespace quire
