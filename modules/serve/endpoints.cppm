// quire.serve.endpoints: the table of HTTP routes; before a handler runs, the request is admitted and gets memory. Runs on the
// connection's worker thread. **Owns** the ApiContext that the handlers share, and the limit on the memory of bodies that are being parsed.
export module quire.serve.endpoints;

import quire.core.base;
import quire.serve.anthropic.api;
import quire.serve.api.access;
import quire.serve.api.error;
export import quire.serve.api.context;
import quire.serve.http.server;
import quire.serve.llama_cpp.adapters_api;
import quire.serve.llama_cpp.api;
import quire.serve.memory_semaphore;
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

// The answer to every request while the model is loaded; `loaded`: the fraction of it that is.
void answer_loading(HttpExchange& e, double loaded);

class Endpoints {
public:
    Endpoints(Service& service, EndpointOptions options);

    // Adds every route. The server must not outlive this.
    void add_to(HttpServer& server);
    // Answers a POST of a batch, without keys; in_batches(): whether `path` is one that batches have. Any thread.
    void        answer(HttpExchange& e);
    static bool in_batches(std::string_view path);
    // Other API keys, from the next request on. Any thread.
    void set_keys(std::vector<std::string> keys) { access_.set_keys(std::move(keys)); }

private:
    using Handler = void (*)(ApiContext&, HttpExchange&);

    void add(HttpServer& server, const char* method, const std::string& path, Handler handler, bool open = false);
    bool reserve_memory(HttpExchange& e);

    ApiContext            api_;
    Access                access_;
    MemorySemaphore       working_; // bytes of memory for bodies that are being parsed
    std::set<std::string> paths_;   // that have a route for OPTIONS
    std::vector<ApiRoute> routes_;
};

} // namespace quire

module :private;

namespace quire {

Endpoints::Endpoints(Service& service, EndpointOptions options)
    : api_(service, std::move(options)),
      access_(api_.options.api_keys, api_.options.cors_origins, api_.options.local_only),
      working_(api_.options.working_bytes) {}

void Endpoints::add(HttpServer& server, const char* method, const std::string& path, Handler handler, bool open) {
    routes_.push_back({method, path});
    server.route(method, path, [this, handler, open, post = method == std::string_view("POST")](HttpExchange& e) {
        access_.allow_origin(e);
        if (!open)
            if (const auto error = access_.check(e)) return api_.refuse(e, *error);
        if (post && !reserve_memory(e)) return;
        handler(api_, e);
    });
    if (!access_.has_cors() || !paths_.insert(path).second) return;
    server.route("OPTIONS", path, [this](HttpExchange& e) {
        if (const auto error = access_.preflight(e)) api_.refuse(e, *error);
    });
}

// The pages need no key: they request their contents with the user's key.
void add_pages(HttpServer& server) {
    for (const Page& page : pages())
        server.route("GET", std::string(page.path), [page](HttpExchange& e) {
            e.response.type = page.type;
            e.response.body = page.body;
            e.response.headers.emplace_back("Content-Security-Policy", page.policy);
            e.response.headers.emplace_back("X-Content-Type-Options", "nosniff");
            e.response.headers.emplace_back("Referrer-Policy", "no-referrer");
            e.response.headers.emplace_back("Cache-Control", page.kept);
        });
}

void answer_openapi(ApiContext& api, HttpExchange& e) { e.response.body = api.openapi; }

// The process answers: there is no need to restart it.
void answer_live(HttpExchange& e) { e.response.body = R"({"status":"ok"})"; }

void answer_loading(HttpExchange& e, double loaded) {
    if (e.request.path == "/health/live") return answer_live(e);
    const ErrorForm form = error_form(e.request.path);
    // llama.cpp's words, which its clients recognise.
    Json body = Json::parse(error_body(ApiError{503, "Loading model", "", "loading_model"}, form));
    if (form == ErrorForm::openai) body["progress"] = int(loaded * 100) / 100.0;
    e.response.status = 503;
    e.response.body   = json_dump(body);
    e.response.headers.emplace_back("Retry-After", "1");
}

void Endpoints::add_to(HttpServer& server) {
    api_.server     = &server;
    const auto open = [&](const char* method, const std::string& path, Handler handler) {
        add(server, method, path, handler, true);
    };
    const auto versioned = [&](const char* method, const std::string& path, Handler handler) {
        add(server, method, "/v1" + path, handler);
        add(server, method, path, handler); // as in llama.cpp
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
    for (const std::string& name : api_.options.limits.models) add(server, "GET", "/v1/models/" + name, answer_model);
    add(server, "GET", "/lora-adapters", answer_adapters);
    add(server, "POST", "/lora-adapters", answer_set_adapters);
    open("GET", "/health", answer_health);
    open("GET", "/v1/health", answer_health);
    open("GET", "/health/ready", answer_health);
    server.route("GET", "/health/live", answer_live);
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
    api_.openapi = openapi_text(api_.options.limits, routes_);
    if (api_.options.pages) add_pages(server);
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
    if (reserve_memory(e)) route->handler(api_, e);
    e.held.reset();
}

// Waits until there is memory to parse and tokenize a body beside the others. It takes at most 20 times its bytes (JSON values,
// copies, tokens), and the tokenizer 100 times the bytes of the piece it works on, which is at most a MiB.
bool Endpoints::reserve_memory(HttpExchange& e) {
    constexpr double  timeout = 30; // seconds
    const std::size_t bytes   = e.request.body.size();
    const std::size_t room    = bytes * 20 + std::min(bytes, std::size_t(1) << 20) * 100;
    auto              pass    = working_.enter(room, timeout, [&] { return e.peer->gone(); });
    if (pass) {
        e.held = std::make_shared<MemorySemaphore::Pass>(std::move(*pass));
        return true;
    }
    if (e.peer->gone()) api_.refuse(e, ApiError{499, "the client has gone", "", ""});
    else api_.refuse_too_large(e);
    return false;
}

} // namespace quire
