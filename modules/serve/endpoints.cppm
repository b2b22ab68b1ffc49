// quire.serve.endpoints: the HTTP routes: each handler validates its request, passes it to the service or answers it from what the
// service knows, and makes the response. Runs on the connection's worker thread. **Owns** its settings and the limit on the
// memory that bodies take while they are parsed.
export module quire.serve.endpoints;

import quire.core.base;
import quire.core.json;
import quire.core.std;
import quire.engine.engine;
import quire.model_file.config;
import quire.paging.snapshot;
import quire.schedule.request;
import quire.serve.access;
import quire.serve.api_error;
import quire.serve.constraint_cache;
import quire.serve.gate;
import quire.serve.generation;
import quire.serve.http_exchange;
import quire.serve.http_server;
import quire.serve.metrics_text;
import quire.serve.openai_request;
import quire.serve.openai_response;
import quire.serve.pages;
import quire.serve.prompt_encoder;
import quire.serve.service;
import quire.serve.snapshot_json;
import quire.text.chat_template;
import quire.text.grammar.compile;
import quire.text.marked_text;
import quire.text.tool_calls;
import quire.text.tool_form;
import quire.text.tokenizer;

export namespace quire {

struct EndpointOptions {
    ApiLimits                limits; // models, vocabulary and context are filled in
    std::vector<std::string> aliases;
    ChatTemplate             chat_template;
    ToolForm                 tool_form = ToolForm::none; // of the template, or as the user says
    bool                     reasoning = true;           // split it off where the template has <think>
    std::string              now;                        // of the templates' clock; "": the machine's
    std::string              model_file;                 // its name, without the folder
    std::vector<std::string> api_keys;                   // any of them admits; none: everybody may enter
    std::vector<std::string> cors_origins;               // of pages that may use this server; "*": all
    double                   ping_seconds = 15;          // of silence in a stream, until a comment keeps it alive
    bool                     pages        = true;        // the chat and the block pool for a browser
    // For a server without keys that only this machine can reach: browsers that use another name than the machine's own are
    // refused. A web page could have made its own name lead to 127.0.0.1 (DNS rebinding).
    bool local_only = false;
    // Memory for all bodies that are being parsed and tokenized.
    std::size_t working_bytes = std::size_t(512) << 20;
    // Where KV events and those of the past are sent; "": nowhere.
    std::string kv_events, kv_replay;
};

class Endpoints {
public:
    Endpoints(Service& service, EndpointOptions options);

    // Adds every route. The server must not outlive this.
    void add_to(HttpServer& server);

private:
    using Method = void (Endpoints::*)(HttpExchange&);

    void add(HttpServer& server, const char* method, const std::string& path, Method handler, bool open = false);
    bool reserve_memory(HttpExchange& e);
    bool hold(HttpExchange& e, std::size_t bytes) const;
    void refuse_too_large(HttpExchange& e) const;
    void refuse(HttpExchange& e, const ApiError& error) const;
    void refuse(HttpExchange& e, const Refusal& refusal, const std::string& param) const;
    void generate(HttpExchange& e, bool chat);

    bool reasons() const; // whether answers may begin with reasoning

    struct EncodedPrompts {
        std::vector<std::vector<Token>> tokens;
        std::vector<std::string>        echoes;               // the text of each, where the response repeats it
        bool                            in_reasoning = false; // the chat's text ends with <think>
    };
    Parsed<EncodedPrompts> encode_prompts(const GenerationRequest& r, const std::string& param, int completion) const;

    void constrain_answer(GenerationRequest& r, bool in_reasoning) const;

    void completions(HttpExchange& e) { generate(e, false); }
    void chat(HttpExchange& e) { generate(e, true); }
    void models(HttpExchange& e);
    void model(HttpExchange& e);
    void embeddings(HttpExchange& e);
    void rerank(HttpExchange& e);
    bool embed(HttpExchange& e, std::vector<Request> requests, int n_tokens, std::vector<std::vector<float>>& vectors);
    void tokenize(HttpExchange& e);
    void detokenize(HttpExchange& e);
    void tokenizer_info(HttpExchange& e);
    void apply_template(HttpExchange& e);
    void health(HttpExchange& e);
    void metrics(HttpExchange& e);
    void kv_event_sources(HttpExchange& e);
    void props(HttpExchange& e);
    void blocks(HttpExchange& e);
    void block_events(HttpExchange& e);
    void version(HttpExchange& e);
    void pin(HttpExchange& e);
    void unpin(HttpExchange& e);
    void pins(HttpExchange& e);

    Service&              service_;
    EndpointOptions       options_;
    Access                access_;
    PromptEncoder         encoder_;
    ConstraintCache       constraints_;
    std::int64_t          started_;
    const HttpServer*     server_ = nullptr;
    Gate                  working_; // bytes of memory for bodies that are being parsed
    std::set<std::string> paths_;   // that have a route for OPTIONS
};

constexpr std::string_view quire_version = "0.1";

} // namespace quire

module :private;

namespace quire {

namespace {

std::int64_t unix_seconds() {
    return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch())
        .count();
}

void answer_json(HttpExchange& e, Json body) { e.response.body = json_dump(std::move(body)); }

} // namespace

// -- routes

Endpoints::Endpoints(Service& service, EndpointOptions options)
    : service_(service), options_(std::move(options)),
      access_(options_.api_keys, options_.cors_origins, options_.local_only),
      encoder_(service.tokenizer(), service.engine_options(), options_.chat_template, options_.now),
      started_(unix_seconds()), working_(options_.working_bytes) {
    options_.limits.models           = options_.aliases;
    options_.limits.templates        = options_.chat_template.names();
    options_.limits.reasoning_effort = options_.chat_template.uses("reasoning_effort");
    options_.limits.vocab_size       = service.config().vocab_size;
    options_.limits.context          = service.engine_options().context;
}

void Endpoints::add(HttpServer& server, const char* method, const std::string& path, Method handler, bool open) {
    server.route(method, path, [this, handler, open, post = method == std::string_view("POST")](HttpExchange& e) {
        access_.allow_origin(e);
        if (!open)
            if (const auto error = access_.check(e)) return refuse(e, *error);
        if (post && !reserve_memory(e)) return;
        (this->*handler)(e);
    });
    if (!access_.has_cors() || !paths_.insert(path).second) return;
    server.route("OPTIONS", path, [this](HttpExchange& e) {
        if (const auto error = access_.preflight(e)) refuse(e, *error);
    });
}

namespace {

// The pages need no key: they request what they show, with the user's key.
void add_pages(HttpServer& server) {
    for (const Page& page : pages())
        server.route("GET", std::string(page.path), [page](HttpExchange& e) {
            e.response.type = "text/html; charset=utf-8";
            e.response.body = page.html;
            e.response.headers.emplace_back("Content-Security-Policy", page.policy);
            e.response.headers.emplace_back("X-Content-Type-Options", "nosniff");
            e.response.headers.emplace_back("Referrer-Policy", "no-referrer");
            e.response.headers.emplace_back("Cache-Control", "no-cache");
        });
}

} // namespace

void Endpoints::add_to(HttpServer& server) {
    server_           = &server;
    using E           = Endpoints;
    const auto openai = [&](const char* method, const std::string& path, Method handler) {
        add(server, method, "/v1" + path, handler);
        add(server, method, path, handler); // as in llama.cpp
    };
    openai("POST", "/completions", &E::completions);
    openai("POST", "/chat/completions", &E::chat);
    openai("POST", "/embeddings", &E::embeddings);
    openai("POST", "/rerank", &E::rerank);
    openai("GET", "/models", &E::models);
    for (const std::string& alias : options_.aliases) add(server, "GET", "/v1/models/" + alias, &E::model);
    add(server, "GET", "/health", &E::health, true);
    add(server, "GET", "/v1/health", &E::health, true);
    for (const char* prefix : {"", "/v1"}) {
        add(server, "POST", cat(prefix, "/tokenize"), &E::tokenize);
        add(server, "POST", cat(prefix, "/detokenize"), &E::detokenize);
        add(server, "GET", cat(prefix, "/tokenizer_info"), &E::tokenizer_info);
    }
    add(server, "POST", "/apply-template", &E::apply_template);
    add(server, "GET", "/metrics", &E::metrics);
    add(server, "GET", "/kv_event_sources", &E::kv_event_sources);
    add(server, "GET", "/props", &E::props);
    add(server, "GET", "/blocks", &E::blocks);
    add(server, "GET", "/blocks/events", &E::block_events);
    add(server, "GET", "/version", &E::version);
    add(server, "POST", "/pin", &E::pin);
    add(server, "POST", "/unpin", &E::unpin);
    add(server, "GET", "/pins", &E::pins);
    if (options_.pages) add_pages(server);
}

// -- memory and errors

// Waits until there is memory to parse and tokenize a body beside the others. It takes at most 20 times its bytes (JSON values,
// copies, tokens), and the tokenizer 100 times the bytes of the piece it works on, which is at most a MiB.
bool Endpoints::reserve_memory(HttpExchange& e) {
    constexpr double  patience = 30; // seconds
    const std::size_t bytes    = e.request.body.size();
    const std::size_t room     = bytes * 20 + std::min(bytes, std::size_t(1) << 20) * 100;
    auto              pass     = working_.enter(room, patience, [&] { return e.peer->gone(); });
    if (pass) {
        e.held = std::make_shared<Gate::Pass>(std::move(*pass));
        return true;
    }
    if (e.peer->gone()) refuse(e, ApiError{499, "the client has gone", "", ""});
    else refuse_too_large(e);
    return false;
}

void Endpoints::refuse_too_large(HttpExchange& e) const {
    e.response.headers.emplace_back("Retry-After", "1");
    refuse(e, ApiError{503, "too many large requests at once", "", "no_room"});
}

// Counts the memory of a request while it is answered; false: too much, and the request is refused.
bool Endpoints::hold(HttpExchange& e, std::size_t bytes) const {
    if (e.peer->hold(bytes)) return true;
    refuse_too_large(e);
    return false;
}

void Endpoints::refuse(HttpExchange& e, const ApiError& error) const {
    e.response.status = error.status;
    e.response.body   = error_body(error);
    e.notes.emplace_back("error", error.message);
}

void Endpoints::refuse(HttpExchange& e, const Refusal& refusal, const std::string& param) const {
    ApiError error{400, refusal.error.message, param, ""};
    switch (refusal.why) {
        case Refused::invalid: break;
        case Refused::full:
            error = {429, refusal.error.message, "", "queue_full"};
            e.response.headers.emplace_back("Retry-After", "1");
            break;
        case Refused::draining: error = {503, refusal.error.message, "", "shutting_down"}; break;
        case Refused::broken: error = {500, refusal.error.message, "", ""}; break;
    }
    refuse(e, error);
}

// -- completions and chats

// The prompts of a request, truncated where it asks for that. `completion`: tokens asked for.
Parsed<Endpoints::EncodedPrompts> Endpoints::encode_prompts(const GenerationRequest& r, const std::string& param,
                                                            int completion) const {
    const auto check = [&](std::size_t bytes) {
        return r.truncate_prompt == 0 ? encoder_.check_size(bytes, completion, param)
                                      : encoder_.check_split(bytes, param);
    };
    EncodedPrompts out;
    if (r.chat) {
        Parsed<MarkedText> text = encoder_.render(r.conversation);
        if (!text) return std::unexpected(text.error());
        if (auto ok = check(text->bytes.size()); !ok) return std::unexpected(ok.error());
        out.tokens.push_back(encoder_.encode_rendered(*text, r.add_special_tokens));
        const std::string_view bytes = text->bytes;
        out.in_reasoning             = bytes.substr(0, bytes.find_last_not_of(" \t\r\n") + 1).ends_with("<think>");
        out.echoes.emplace_back();
    }
    for (const Prompt& prompt : r.prompts) {
        if (auto ok = check(text_bytes(prompt)); !ok) return std::unexpected(ok.error());
        Parsed<std::vector<Token>> ids = encoder_.encode(prompt, r.add_special_tokens, param);
        if (!ids) return std::unexpected(ids.error());
        const bool plain = prompt.size() == 1 && std::holds_alternative<std::string>(prompt[0]);
        out.echoes.push_back(!r.echo ? ""
                             : plain ? std::get<std::string>(prompt[0])
                                     : service_.tokenizer().decode(*ids));
        out.tokens.push_back(std::move(*ids));
    }
    if (r.truncate_prompt == 0) return out;
    const int  most = options_.limits.context - (r.max_tokens == 0 ? 0 : 1);
    const auto keep = std::size_t(r.truncate_prompt > 0 ? r.truncate_prompt : most);
    for (std::size_t i = 0; i < out.tokens.size(); i++) {
        std::vector<Token>& ids = out.tokens[i];
        if (ids.size() <= keep) continue;
        ids.erase(ids.begin(), ids.end() - std::ptrdiff_t(keep));
        if (r.echo) out.echoes[i] = service_.tokenizer().decode(ids);
    }
    return out;
}

bool Endpoints::reasons() const { return options_.reasoning && options_.chat_template.source().contains("<think>"); }

// What is asked of a chat's text holds behind its reasoning, and calls of tools follow their schemas.
void Endpoints::constrain_answer(GenerationRequest& r, bool in_reasoning) const {
    const bool marked = reasons() || options_.tool_form == ToolForm::harmony;
    if (r.tool_use.tools.empty() && !(r.constraint && marked)) return;
    if (!r.constraint) r.constraint.emplace().param = "tools";
    AnswerRules& rules = r.constraint->spec.answer.emplace();
    rules.form         = options_.tool_form;
    rules.tools        = r.tool_use.tools;
    rules.required     = r.tool_use.required;
    rules.parallel     = r.tool_use.parallel;
    rules.may_reason   = reasons();
    rules.in_reasoning = reasons() && in_reasoning;
    find_controls(service_.tokenizer(), rules);
}

void Endpoints::generate(HttpExchange& e, bool chat) {
    Parsed<GenerationRequest> parsed = chat ? parse_chat_request(e.request.body, options_.limits)
                                            : parse_completion_request(e.request.body, options_.limits);
    e.request.body                   = {};
    if (!parsed) return refuse(e, parsed.error());
    GenerationRequest& r = *parsed;
    for (const std::string& name : r.unknown) e.notes.emplace_back("unknown_field", name);
    if (!r.tool_use.tools.empty() && (options_.tool_form == ToolForm::none || options_.tool_form == ToolForm::other))
        return refuse(e, ApiError{400,
                                  "the model's chat template writes no calls of tools in a form that is known here "
                                  "(the server's flag --tool-format names one)",
                                  "tools", ""});
    const std::string param      = chat ? "messages" : "prompt";
    const int         completion = r.max_tokens.value_or(1); // tokens asked for

    Parsed<EncodedPrompts> encoded = encode_prompts(r, param, completion);
    if (!encoded) return refuse(e, encoded.error());
    auto& [prompts, texts, in_reasoning] = *encoded;

    std::size_t held = 0; // 16 bytes a token: here and in the engine, as ids and in tables
    for (std::size_t i = 0; i < prompts.size(); i++) held += prompts[i].size() * 16 + texts[i].size();
    if (!hold(e, held)) return;

    Request& q = r.request;
    if (const int most = service_.engine_options().max_sequences; q.width() > most)
        return refuse(e, ApiError{400, cat("the request needs ", q.width(), " sequences at once; ", most, " can run"),
                                  q.beam_width > q.n ? "beam_width"
                                  : q.best_of > q.n  ? "best_of"
                                                     : "n",
                                  ""});
    if (!r.has_seed) q.sampling.seed = std::random_device{}() + (std::uint64_t(std::random_device{}()) << 32);
    for (const std::string& word : r.bad_words)
        for (const std::string& variant : {word, " " + word}) {
            std::vector<Token> ids = encoder_.encode_inside(variant);
            if (!ids.empty()) q.sampling.bad_words.push_back(std::move(ids));
        }
    for (const auto& [text, bias] : r.text_bias)
        for (Token id : encoder_.encode_inside(text)) q.sampling.logit_bias.emplace_back(id, bias);
    if (completion > 0 && q.beam_width == 0 && !service_.engine().can_draw(q))
        return refuse(e, ApiError{400, "allowed_token_ids, logit_bias, bad_words and min_tokens leave no token to draw",
                                  !q.sampling.allowed_tokens.empty() ? "allowed_token_ids"
                                  : !q.sampling.logit_bias.empty()   ? "logit_bias"
                                                                     : "bad_words",
                                  ""});
    if (chat) constrain_answer(r, in_reasoning);
    if (r.constraint) {
        const Result<std::shared_ptr<Constraint>> made = constraints_.get(r.constraint->spec);
        if (!made)
            return refuse(e,
                          ApiError{400, cat(r.constraint->param, ": ", made.error().message), r.constraint->param, ""});
        q.constraint = ConstraintState(*made, service_.engine().token_trie());
    }
    if (!r.cache_prompt) q.cache_salt = cat(q.cache_salt, '\0', e.request.id, '\0', q.sampling.seed);
    q.prompt_logprobs = r.prompt_logprobs;
    if (r.echo && r.logprobs) q.prompt_logprobs = std::max(q.prompt_logprobs, q.sampling.logprobs);

    ResponseHead head;
    head.chat             = chat;
    head.id               = cat(chat ? "chatcmpl-" : "cmpl-", r.id.empty() ? e.request.id : r.id);
    head.model            = options_.aliases[0];
    head.created          = unix_seconds();
    head.logprobs         = r.logprobs;
    head.token_ids        = r.return_token_ids;
    head.prompt_logprobs  = r.prompt_logprobs >= 0;
    head.tokens_as_ids    = r.tokens_as_ids;
    head.include_usage    = r.include_usage;
    head.continuous_usage = r.continuous_usage;

    AnswerFormat format;
    if (chat) {
        if (!r.tool_use.tools.empty() || options_.tool_form == ToolForm::harmony) format.form = options_.tool_form;
        format.one_call     = !r.tool_use.parallel;
        format.tools        = std::move(r.tool_use.tools);
        format.reasoning    = reasons();
        format.in_reasoning = format.reasoning && in_reasoning;
        head.short_call_ids = format.form == ToolForm::mistral;
    }
    const bool stream = r.stream;
    auto generation   = std::make_shared<Generation>(service_, std::move(r), std::move(head), std::move(texts), format);
    std::vector<Request> requests = generation->requests(std::move(prompts));
    for (const Request& request : requests)
        if (auto ok = encoder_.check_length(request.prompt.size(), completion, request.width(), param); !ok)
            return refuse(e, ok.error());
    auto handle = service_.submit(std::move(requests));
    if (!handle) return refuse(e, handle.error(), param);
    e.peer->when_gone((*handle)->when_gone());
    generation->begin(std::move(*handle));
    e.held.reset(); // generating takes long, and little memory
    if (!stream) {
        std::optional<ApiError> error = generation->respond(e.response.body);
        generation->record(e.notes);
        if (error) refuse(e, *error);
        return;
    }
    // As long as nothing has been sent, an error can have its own status.
    if (auto error = generation->wait_for_first(options_.ping_seconds)) {
        generation->record(e.notes);
        return refuse(e, *error);
    }
    e.response.type = "text/event-stream";
    e.response.headers.emplace_back("Cache-Control", "no-cache");
    e.response.headers.emplace_back("X-Accel-Buffering", "no");
    e.response.stream = [this, generation, &e](const HttpWrite& write) {
        try {
            generation->stream(write, options_.ping_seconds);
        } catch (const std::bad_alloc&) {
            generation->abort();
            write(
                "data: {\"error\":{\"message\":\"there is no memory for this request "
                "now\",\"type\":\"unavailable_error\","
                "\"param\":null,\"code\":null}}\n\ndata: [DONE]\n\n");
        }
        generation->record(e.notes);
    };
}

// -- the other endpoints

void Endpoints::models(HttpExchange& e) {
    const ModelConfig& c    = service_.config();
    Json               data = Json::array();
    for (const std::string& alias : options_.aliases)
        data.push_back({{"id", alias},
                        {"object", "model"},
                        {"created", started_},
                        {"owned_by", "quire"},
                        {"root", options_.aliases[0]},
                        {"parent", nullptr},
                        {"max_model_len", options_.limits.context},
                        {"permission", Json::array()},
                        {"meta",
                         {{"architecture", c.architecture_name},
                          {"n_vocab", c.vocab_size},
                          {"n_ctx", options_.limits.context},
                          {"n_ctx_train", c.context_length},
                          {"n_embd", c.hidden_size},
                          {"n_layer", c.n_layers}}}});
    if (e.request.path.ends_with("/models")) answer_json(e, Json{{"object", "list"}, {"data", std::move(data)}});
}

void Endpoints::model(HttpExchange& e) {
    const std::string id = e.request.path.substr(std::string_view("/v1/models/").size());
    answer_json(e, Json{{"id", id},
                        {"object", "model"},
                        {"created", started_},
                        {"owned_by", "quire"},
                        {"root", options_.aliases[0]},
                        {"parent", nullptr},
                        {"max_model_len", options_.limits.context}});
}

void Endpoints::embeddings(HttpExchange& e) {
    Parsed<EmbeddingRequest> parsed = parse_embedding_request(e.request.body, options_.limits);
    e.request.body                  = {};
    if (!parsed) return refuse(e, parsed.error());
    if (service_.config().pooling == Pooling::rank)
        return refuse(e, ApiError{400, "this model is a reranker: POST /v1/rerank", "model", ""});
    const int hidden = service_.config().hidden_size;
    if (const int wanted = parsed->dimensions.value_or(hidden); wanted != hidden)
        return refuse(e, ApiError{400, cat("dimensions is ", wanted, "; the embeddings of this model have ", hidden),
                                  "dimensions", ""});
    std::vector<Request> requests;
    int                  n_tokens = 0;
    for (const Prompt& input : parsed->inputs) {
        if (auto ok = encoder_.check_size(text_bytes(input), 0, "input"); !ok) return refuse(e, ok.error());
        Parsed<std::vector<Token>> ids = encoder_.encode(input, parsed->add_special_tokens, "input");
        if (!ids) return refuse(e, ids.error());
        n_tokens += int(ids->size());
        Request& q   = requests.emplace_back();
        q.prompt     = std::move(*ids);
        q.embed      = true;
        q.cache_salt = parsed->cache_salt;
        if (auto ok = encoder_.check_length(q.prompt.size(), 0, 1, "input"); !ok) return refuse(e, ok.error());
    }
    std::vector<std::vector<float>> vectors;
    if (!embed(e, std::move(requests), n_tokens, vectors)) return;
    e.response.body = render_embeddings(options_.aliases[0], vectors, parsed->base64, n_tokens);
}

// Runs the requests, and gives their vectors in order. False: it was refused.
bool Endpoints::embed(HttpExchange& e, std::vector<Request> requests, int n_tokens,
                      std::vector<std::vector<float>>& vectors) {
    if (!hold(e, std::size_t(n_tokens) * 16 +
                     requests.size() * std::size_t(service_.config().hidden_size) * sizeof(float)))
        return false;
    vectors.resize(requests.size());
    auto handle = service_.submit(std::move(requests));
    if (!handle) return refuse(e, handle.error(), "input"), false;
    e.peer->when_gone((*handle)->when_gone());
    e.held.reset();
    std::vector<OutputDelta> deltas;
    while ((*handle)->wait(1, deltas))
        for (OutputDelta& d : deltas) {
            if (d.finish == FinishReason::failed) return refuse(e, ApiError{500, d.message, "", "model_failed"}), false;
            if (d.finish != FinishReason::stop)
                return refuse(e, ApiError{503, d.message.empty() ? "the server is shutting down" : d.message, "", ""}),
                       false;
            vectors[std::size_t(d.prompt)] = std::move(d.embedding);
        }
    if ((*handle)->gone()) return refuse(e, ApiError{499, "the client has gone", "", ""}), false;
    service_.metrics.prompt += std::uint64_t(n_tokens);
    e.notes.emplace_back("prompt_tokens", cat(n_tokens));
    return true;
}

// A query and a document stand in one text, as the reranker was trained.
void Endpoints::rerank(HttpExchange& e) {
    Parsed<RerankRequest> parsed = parse_rerank_request(e.request.body, options_.limits);
    e.request.body               = {};
    if (!parsed) return refuse(e, parsed.error());
    if (service_.config().pooling != Pooling::rank)
        return refuse(e, ApiError{400, "this model is no reranker: its file says no pooling_type 4", "model", ""});
    if (auto ok = encoder_.check_size(parsed->query.size(), 0, "query"); !ok) return refuse(e, ok.error());
    std::vector<Request> requests;
    int                  n_tokens = 0;
    for (const std::string& document : parsed->documents) {
        if (auto ok = encoder_.check_size(document.size(), 0, "documents"); !ok) return refuse(e, ok.error());
        Parsed<std::vector<Token>> ids =
            encoder_.encode_ranked(parsed->query, document, !service_.config().family->encoder);
        if (!ids) return refuse(e, ids.error());
        Request& q = requests.emplace_back();
        q.prompt   = std::move(*ids);
        q.embed    = true;
        n_tokens += int(q.prompt.size());
        if (auto ok = encoder_.check_length(q.prompt.size(), 0, 1, "documents"); !ok) return refuse(e, ok.error());
    }
    std::vector<std::vector<float>> vectors;
    if (!embed(e, std::move(requests), n_tokens, vectors)) return;
    std::vector<float> scores;
    for (const std::vector<float>& v : vectors) scores.push_back(v.empty() ? 0.0f : v[0]);
    e.response.body = render_rerank(options_.aliases[0], scores, parsed->documents, parsed->top_n,
                                    parsed->return_documents, n_tokens);
}

void Endpoints::tokenize(HttpExchange& e) {
    Parsed<TextRequest> parsed = parse_text_request(e.request.body, options_.limits);
    if (!parsed) return refuse(e, parsed.error());
    Parsed<std::vector<Token>> ids = encoder_.encode(*parsed);
    if (!ids) return refuse(e, ids.error());
    // Written directly: as JSON values the tokens of a long text would take many times the memory.
    const auto list = [&](std::string_view name, const auto& write) {
        std::string& out = e.response.body;
        out += cat(",\"", name, "\":[");
        for (std::size_t i = 0; i < ids->size(); i++) {
            if (i > 0) out += ',';
            write(out, (*ids)[i]);
        }
        out += ']';
    };
    e.response.body = cat("{\"count\":", ids->size(), ",\"max_model_len\":", options_.limits.context);
    if (parsed->with_pieces)
        list("tokens", [&](std::string& out, Token id) {
            const std::string piece = service_.tokenizer().bytes(id, true);
            Detokenizer       whole(service_.tokenizer(), false, true);
            const std::string text  = whole.push(id);
            Json              shown = text == piece ? Json(piece) : Json::array();
            if (text != piece)
                for (char c : piece) shown.push_back(int(static_cast<unsigned char>(c)));
            out += json_dump(Json{{"id", id}, {"piece", std::move(shown)}});
        });
    else list("tokens", [](std::string& out, Token id) { out += cat(id); });
    if (parsed->token_strings)
        list("token_strs",
             [&](std::string& out, Token id) { out += json_dump(Json(std::string(service_.tokenizer().piece(id)))); });
    e.response.body += '}';
}

void Endpoints::detokenize(HttpExchange& e) {
    Parsed<std::vector<Token>> ids = parse_detokenize_request(e.request.body, options_.limits);
    if (!ids) return refuse(e, ids.error());
    const auto most = std::max(std::size_t(1) << 16, std::size_t(options_.limits.context));
    if (ids->size() > most)
        return refuse(e, ApiError{400, cat("tokens has ", ids->size(), " ids; ", most, " are turned into text at once"),
                                  "tokens", "context_length_exceeded"});
    const std::string text = json_dump(Json(service_.tokenizer().decode(*ids, true)));
    e.response.body        = cat("{\"prompt\":", text, ",\"content\":", text, '}');
}

void Endpoints::apply_template(HttpExchange& e) {
    Parsed<TextRequest> parsed = parse_text_request(e.request.body, options_.limits);
    if (!parsed) return refuse(e, parsed.error());
    const auto& conversation = parsed->conversation;
    if (!conversation) return refuse(e, ApiError{400, "messages is missing", "messages", ""});
    Parsed<MarkedText> text = encoder_.render(*conversation);
    if (!text) return refuse(e, text.error());
    answer_json(e, Json{{"prompt", text->bytes}});
}

void Endpoints::health(HttpExchange& e) {
    const bool well   = service_.healthy() && !service_.draining();
    e.response.status = well ? 200 : 503;
    answer_json(
        e, well
               ? Json{{"status", "ok"}}
               : Json::parse(error_body(ApiError{
                     503, service_.draining() ? "the server is shutting down" : "the engine takes no steps", "", ""})));
}

void Endpoints::props(HttpExchange& e) {
    const EngineOptions& o = service_.engine_options();
    const Tokenizer&     t = service_.tokenizer();
    const ApiLimits&     l = options_.limits;
    answer_json(e, Json{{"default_generation_settings",
                         {{"n_ctx", o.context},
                          {"params",
                           {{"temperature", l.temperature},
                            {"top_p", l.top_p},
                            {"top_k", l.top_k},
                            {"min_p", l.min_p},
                            {"n_predict", l.default_tokens}}}}},
                        {"total_slots", o.max_sequences},
                        {"model_alias", options_.aliases[0]},
                        {"model_path", options_.model_file},
                        {"chat_template", options_.chat_template.source()},
                        {"chat_form", options_.chat_template.name()},
                        {"chat_templates", options_.chat_template.names()},
                        {"chat_template_missing", options_.chat_template.is_fallback()},
                        {"modalities", {{"vision", false}, {"audio", false}}},
                        {"build_info", cat("quire ", quire_version)},
                        {"bos_token", t.bos() >= 0 ? Json(std::string(t.piece(t.bos()))) : Json()},
                        {"eos_token", t.eos() >= 0 ? Json(std::string(t.piece(t.eos()))) : Json()},
                        {"engine",
                         {{"device", o.device},
                          {"description", service_.engine().describe()},
                          {"block_size", o.block_size},
                          {"kv_blocks", o.kv_blocks},
                          {"swap_blocks", o.swap_blocks},
                          {"prefix_cache", o.prefix_cache}}}});
}

// What a client needs to tokenize by /tokenize, as in vLLM.
void Endpoints::tokenizer_info(HttpExchange& e) {
    const Tokenizer& t     = service_.tokenizer();
    const auto       piece = [&](Token id) { return id >= 0 ? Json(std::string(t.piece(id))) : Json(); };
    answer_json(e, Json{{"tokenizer_class", "quire"},
                        {"bos_token", piece(t.bos())},
                        {"eos_token", piece(t.eos())},
                        {"chat_template", options_.chat_template.source()},
                        {"model_max_length", service_.engine_options().context},
                        {"vocab_size", t.vocab_size()}});
}

void Endpoints::version(HttpExchange& e) { answer_json(e, Json{{"version", quire_version}}); }

void Endpoints::blocks(HttpExchange& e) {
    const std::shared_ptr<const Snapshot> s = service_.snapshot();
    if (!s) return refuse(e, ApiError{503, "the engine takes no steps", "", ""});
    answer_json(e, to_json(*s));
}

// With ?changes=1 an event after the first holds only the blocks that changed, which are few in a large pool.
void Endpoints::block_events(HttpExchange& e) {
    const bool changes = std::ranges::find(e.request.query, std::pair<std::string, std::string>("changes", "1")) !=
                         e.request.query.end();
    if (!service_.listen()) return refuse(e, ApiError{503, "too many listen to the block events", "", ""});
    const std::shared_ptr<void> listening(nullptr, [this](void*) { service_.unlisten(); });
    e.response.type = "text/event-stream";
    e.response.headers.emplace_back("Cache-Control", "no-cache");
    e.response.stream = [this, &e, listening, changes](const HttpWrite& write) {
        std::shared_ptr<const Snapshot> before;
        std::uint64_t                   serial = 0;
        double                          silent = 0;
        for (bool open = true; open && !e.peer->gone() && !service_.draining();) {
            const std::shared_ptr<const Snapshot> s = service_.next_snapshot(serial, 0.5);
            silent                                  = s ? 0 : silent + 0.5;
            if (s) open = write(event(json_dump(before ? changes_to_json(*before, *s) : to_json(*s))));
            else if (silent >= options_.ping_seconds) open = write(":\n\n"), silent = 0;
            if (s && changes) before = s;
        }
    };
}

void Endpoints::pin(HttpExchange& e) {
    Parsed<TextRequest> parsed = parse_text_request(e.request.body, options_.limits);
    if (!parsed) return refuse(e, parsed.error());
    if (auto& conversation = parsed->conversation) conversation->input.add_generation_prompt = false;
    Parsed<std::vector<Token>> ids = encoder_.encode(*parsed);
    if (!ids) return refuse(e, ids.error());
    const std::string param = parsed->conversation ? "messages" : "prompt";
    if (auto ok = encoder_.check_length(ids->size(), 0, 1, param); !ok) return refuse(e, ok.error());
    if (!hold(e, ids->size() * 16)) return;
    parsed->text = {};
    e.held.reset();
    const auto pin = service_.pin(std::move(*ids), parsed->cache_salt);
    if (!pin) return refuse(e, pin.error(), param);
    answer_json(e, Json{{"id", pin->id}, {"object", "pin"}, {"tokens", pin->n_tokens}, {"blocks", pin->n_blocks}});
}

void Endpoints::unpin(HttpExchange& e) {
    Parsed<std::string> id = parse_id_request(e.request.body, options_.limits);
    if (!id) return refuse(e, id.error());
    if (!service_.unpin(*id)) return refuse(e, ApiError{404, cat("there is no pin ", quote(*id)), "id", ""});
    answer_json(e, Json{{"id", *id}, {"object", "pin"}, {"deleted", true}});
}

void Endpoints::pins(HttpExchange& e) {
    Json data = Json::array();
    for (const Pin& p : service_.pins())
        data.push_back({{"id", p.id}, {"object", "pin"}, {"tokens", p.n_tokens}, {"blocks", p.n_blocks}});
    answer_json(e, Json{{"object", "list"}, {"data", std::move(data)}});
}

// As vLLM has it: a source for each engine, here one.
void Endpoints::kv_event_sources(HttpExchange& e) {
    Json sources = Json::object();
    if (!options_.kv_events.empty()) {
        Json replay  = options_.kv_replay.empty() ? Json(nullptr) : Json(options_.kv_replay);
        sources["0"] = {{"enable_kv_cache_events", true}, {"publisher", "zmq"},
                        {"endpoint", options_.kv_events}, {"replay_endpoint", replay},
                        {"buffer_steps", 10'000},         {"hwm", 100'000},
                        {"max_queue_size", 100'000},      {"topic", ""}};
    }
    answer_json(e, std::move(sources));
}

void Endpoints::metrics(HttpExchange& e) {
    e.response.type = "text/plain; version=0.0.4; charset=utf-8";
    e.response.body = metrics_text(service_, *server_, options_.aliases[0]);
}

} // namespace quire
