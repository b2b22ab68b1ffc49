// quire.serve.ollama.api: Ollama's routes under /api, and the form of their responses and streams, which are lines of JSON
// (https://docs.ollama.com/api). Owns nothing.
export module quire.serve.ollama.api;

import quire.core.base;
import quire.core.hash;
import quire.serve.api.answer_blocks;
import quire.serve.api.generate;
import quire.serve.api.request_fields;
import quire.serve.ollama.request;
export import quire.serve.models.model_pool;
import quire.serve.openai.embeddings;
import quire.serve.status.embedding_api;

export namespace quire {

// Answers a request that wants a model to leave, if the model is not loaded: nothing is loaded for it. False: it is another request.
bool answer_unloaded(ModelPool& pool, HttpExchange& e);
void answer_ollama_chat(ApiContext& api, HttpExchange& e);
void answer_ollama_generate(ApiContext& api, HttpExchange& e);
void answer_ollama_embed(ApiContext& api, HttpExchange& e);      // /api/embed
void answer_ollama_embeddings(ApiContext& api, HttpExchange& e); // /api/embeddings, for one text
void answer_ollama_tags(ModelPool& pool, HttpExchange& e);
void answer_ollama_show(ModelPool& pool, HttpExchange& e);
void answer_ollama_ps(ModelPool& pool, HttpExchange& e);
void answer_ollama_version(ModelPool& pool, HttpExchange& e);

// `messages`: of /api/chat; else the text stands alone, as in /api/generate.
std::unique_ptr<AnswerRenderer> ollama_renderer(ResponseHead head, bool messages);

} // namespace quire

module :private;

namespace quire {

// The version of Ollama whose API this is: clients ask for at least some version.
constexpr std::string_view api_version = "0.12.11";

std::int64_t now_microseconds() {
    return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::system_clock::now().time_since_epoch())
        .count();
}

std::string now_text() { return time_text(now_microseconds()); }

// When a model leaves memory if no request asks it.
std::string expiry_text(std::optional<double> seconds) {
    if (!seconds || *seconds > 1e9) return "2999-12-31T00:00:00Z"; // it stays
    return time_text(now_microseconds() + std::int64_t(std::max(*seconds, 0.0) * 1e6));
}

std::int64_t nanoseconds(double milliseconds) { return std::int64_t(milliseconds * 1e6); }

class OllamaRenderer : public AnswerRenderer {
public:
    OllamaRenderer(ResponseHead head, bool messages) : head_(std::move(head)), messages_(messages) {}

    std::string response(std::vector<Choice> choices, const Usage& usage) override {
        Choice&     c = choices[0];
        std::string text, thoughts;
        Json        calls = Json::array();
        take(blocks_.push(std::move(c.parts)), text, thoughts, calls);
        take(blocks_.finish(), text, thoughts, calls);
        if (head_.logprobs) add_logprobs(c);
        Json body = frame(text, thoughts, std::move(calls));
        close(body, c, usage);
        return json_dump(std::move(body));
    }

    std::string piece(Choice c, const Usage&) override {
        std::string out;
        if (head_.logprobs) add_logprobs(c);
        out += lines(blocks_.push(std::move(c.parts)));
        if (c.finish_reason.empty()) return out;
        last_ = std::move(c);
        return out + lines(blocks_.finish());
    }

    std::string end(const Usage& usage) override {
        Json body = frame("", "", Json::array());
        close(body, last_, usage);
        return line(std::move(body));
    }

    std::string failure(const ApiError& error) override { return error_body(error, ErrorForm::ollama) + "\n"; }

    std::string_view out_of_memory() const override {
        return "{\"error\":\"there is no memory for this request now\"}\n";
    }

    std::string      ping() override { return {}; } // a line of JSON would be a piece of the answer
    std::string_view type() const override { return "application/x-ndjson"; }

private:
    static std::string line(Json body) { return json_dump(std::move(body)) + "\n"; }

    // A line with nothing but text, which is in a message beside its empty content where it is reasoning.
    std::string text_line(std::string_view name, std::string_view text) const {
        const bool  is_thought = name == "thinking";
        std::string own        = is_thought ? cat('"', messages_ ? "content" : "response", R"(":"",)") : std::string();
        own += cat('"', name, R"(":)", json_quoted(text));
        return cat(R"({"model":)", json_quoted(head_.model), R"(,"created_at":")", now_text(), R"(",)",
                   messages_ ? R"("message":{"role":"assistant",)" : "", own, messages_ ? "}" : "",
                   ",\"done\":false}\n");
    }

    Json frame(const std::string& text, const std::string& thoughts, Json calls) {
        Json body{{"model", head_.model}, {"created_at", now_text()}};
        Json own{{messages_ ? "content" : "response", text}};
        if (!thoughts.empty()) own["thinking"] = thoughts;
        if (!calls.empty()) own["tool_calls"] = std::move(calls);
        if (messages_) {
            body["message"] = {{"role", "assistant"}};
            body["message"].update(own);
        } else body.update(own);
        body["done"] = false;
        if (!logprobs_.empty()) body["logprobs"] = std::exchange(logprobs_, Json::array());
        return body;
    }

    void close(Json& body, const Choice& c, const Usage& usage) const {
        const Timings t              = c.timings.value_or(Timings{});
        body["done"]                 = true;
        body["done_reason"]          = c.finish_reason == "length" ? "length" : "stop";
        body["total_duration"]       = nanoseconds(watch_.seconds() * 1e3);
        body["load_duration"]        = 0;
        body["prompt_eval_count"]    = usage.prompt_tokens;
        body["prompt_eval_duration"] = nanoseconds(t.prompt_ms);
        body["eval_count"]           = usage.completion_tokens;
        body["eval_duration"]        = nanoseconds(t.generated_ms);
    }

    // A call is shown as a whole, when it has ended.
    void take(const std::vector<BlockEvent>& events, std::string& text, std::string& thoughts, Json& calls) {
        for (const BlockEvent& b : events) {
            const bool is_call = b.kind == AnswerPart::Kind::call;
            if (b.what == BlockEvent::What::begin && is_call) call_ = b.call;
            else if (b.what == BlockEvent::What::text)
                (is_call ? call_.arguments : b.kind == AnswerPart::Kind::reasoning ? thoughts : text) += b.text;
            else if (b.what == BlockEvent::What::end && is_call) calls.push_back(finished_call());
        }
    }

    // The arguments of a call that was cut off are no JSON: the object is empty then.
    Json finished_call() {
        Result<Json> arguments = json_parse(call_.arguments);
        const bool   whole     = arguments && arguments->is_object();
        Json function{{"index", n_calls_}, {"name", call_.name}, {"arguments", whole ? *arguments : Json::object()}};
        return {{"id", call_id(head_, 0, n_calls_++)}, {"function", std::move(function)}};
    }

    std::string lines(const std::vector<BlockEvent>& events) {
        std::string out;
        for (const BlockEvent& b : events) {
            std::string text, thoughts;
            Json        calls = Json::array();
            take({b}, text, thoughts, calls);
            if (calls.empty() && logprobs_.empty() && text.empty() != thoughts.empty())
                out += text_line(text.empty() ? "thinking" : messages_ ? "content" : "response", text + thoughts);
            else if (!text.empty() || !thoughts.empty() || !calls.empty())
                out += line(frame(text, thoughts, std::move(calls)));
        }
        return out;
    }

    void add_logprobs(const Choice& c) {
        const auto one = [](const SpelledLogprob& t) {
            return Json{{"token", t.bytes}, {"logprob", finite_logprob(t.logprob)}, {"bytes", bytes_json(t.bytes)}};
        };
        for (Json& item : logprobs_json(c.logprobs, one)) logprobs_.push_back(std::move(item));
    }

    ResponseHead head_;
    bool         messages_;
    AnswerBlocks blocks_;
    Stopwatch    watch_;
    ToolCall     call_; // that has not ended yet
    int          n_calls_  = 0;
    Json         logprobs_ = Json::array(); // of tokens that no line has had yet
    Choice       last_;                     // the piece that ended the answer
};

std::unique_ptr<AnswerRenderer> ollama_renderer(ResponseHead head, bool messages) {
    return std::make_unique<OllamaRenderer>(std::move(head), messages);
}

// -- routes

void answer_without_text(HttpExchange& e, const std::string& model, bool messages, const char* reason) {
    Json body{{"model", model}, {"created_at", now_text()}};
    if (messages) body["message"] = {{"role", "assistant"}, {"content", ""}};
    else body["response"] = "";
    body["done"]        = true;
    body["done_reason"] = reason;
    answer_json(e, std::move(body));
}

bool answer_unloaded(ModelPool& pool, HttpExchange& e) {
    constexpr std::size_t longest  = 4096; // bytes of a body without a text
    const bool            messages = e.request.path == "/api/chat";
    if (e.request.body.size() > longest || (!messages && e.request.path != "/api/generate")) return false;
    const Parsed<OllamaRequest> parsed =
        messages ? parse_ollama_chat(e.request.body, {}) : parse_ollama_generate(e.request.body, {});
    if (!parsed || !parsed->empty || parsed->keep_alive != 0) return false;
    const std::optional<ModelView> view = pool.view(parsed->model);
    if (!view || (view->status != ModelStatus::unloaded && view->status != ModelStatus::sleeping)) return false;
    answer_without_text(e, parsed->model, messages, "unload");
    return true;
}

void keep_model(const HttpExchange& e, std::optional<double> seconds) {
    if (seconds && e.keep_model) e.keep_model(*seconds);
}

void answer_generation(ApiContext& api, HttpExchange& e, Parsed<OllamaRequest> parsed, bool messages) {
    if (!parsed) return api.refuse(e, parsed.error());
    keep_model(e, parsed->keep_alive);
    if (parsed->empty)
        return answer_without_text(e, api.model_name(parsed->model), messages,
                                   parsed->keep_alive == 0 && e.keep_model ? "unload" : "load");
    generate(api, e, std::move(parsed->generation), messages ? "messages" : "prompt",
             [&](ResponseHead head, const GenerationRequest&, const std::vector<std::string>&) {
                 head.model = api.model_name(parsed->model);
                 return ollama_renderer(std::move(head), messages);
             });
}

void answer_ollama_chat(ApiContext& api, HttpExchange& e) {
    answer_generation(api, e, parse_ollama_chat(e.request.body, api.options.limits), true);
}

void answer_ollama_generate(ApiContext& api, HttpExchange& e) {
    answer_generation(api, e, parse_ollama_generate(e.request.body, api.options.limits), false);
}

// The vectors of the texts in the field `param`. False: the request was refused.
bool embed_field(ApiContext& api, HttpExchange& e, const std::string& param, std::string& model, Embedded& out) {
    const Parsed<OllamaEmbedding> parsed =
        parse_ollama_embed(std::exchange(e.request.body, {}), param, api.options.limits);
    if (!parsed) return api.refuse(e, parsed.error()), false;
    keep_model(e, parsed->keep_alive);
    model = api.model_name(parsed->request.model);
    return embed_inputs(api, e, parsed->request, param, out);
}

void answer_ollama_embed(ApiContext& api, HttpExchange& e) {
    const Stopwatch watch;
    std::string     model;
    Embedded        embedded;
    if (!embed_field(api, e, "input", model, embedded)) return;
    answer_json(e, Json{{"model", model},
                        {"embeddings", embedded.vectors},
                        {"total_duration", nanoseconds(watch.seconds() * 1e3)},
                        {"load_duration", 0},
                        {"prompt_eval_count", embedded.n_tokens}});
}

void answer_ollama_embeddings(ApiContext& api, HttpExchange& e) {
    std::string model;
    Embedded    embedded;
    if (!embed_field(api, e, "prompt", model, embedded)) return;
    answer_json(e, Json{{"embedding", embedded.vectors.at(0)}});
}

std::string count_text(std::uint64_t n) {
    char text[32];
    if (n >= 1'000'000'000) std::snprintf(text, sizeof text, "%.1fB", double(n) / 1e9);
    else std::snprintf(text, sizeof text, "%.2fM", double(n) / 1e6);
    return text;
}

// `card`: null where the file cannot be read.
Json details_json(const ModelCard* card) {
    const std::string family = card ? card->architecture : "";
    return {{"parent_model", ""},
            {"format", "gguf"},
            {"family", family},
            {"families", Json::array({family})},
            {"parameter_size", count_text(card ? card->facts.parameters : 0)},
            {"quantization_level", card ? card->facts.type : ""}};
}

Json listed_model(ModelPool& pool, const ModelView& view, const std::string& alias) {
    const std::shared_ptr<const ModelCard> card  = pool.card(view.id);
    const std::uint64_t                    bytes = card ? card->facts.bytes : 0;
    const std::string                      name  = alias.contains(':') ? alias : alias + ":latest";
    char                                   digest[80];
    std::snprintf(digest, sizeof digest, "%064llx",
                  static_cast<unsigned long long>(hash_bytes(cat(view.file, '/', bytes))));
    return {{"name", name},
            {"model", name},
            {"modified_at", time_text(pool.shared().started * 1'000'000)},
            {"size", bytes},
            {"digest", digest}, // tells files apart; it is no sum of the content
            {"details", details_json(card.get())}};
}

void answer_ollama_tags(ModelPool& pool, HttpExchange& e) {
    Json models = Json::array();
    for (const ModelView& view : pool.views())
        for (const std::string& alias : view.names) models.push_back(listed_model(pool, view, alias));
    answer_json(e, Json{{"models", std::move(models)}});
}

void answer_ollama_ps(ModelPool& pool, HttpExchange& e) {
    Json models = Json::array();
    for (const ModelView& view : pool.views()) {
        if (view.status != ModelStatus::loaded || !view.card) continue;
        Json model              = listed_model(pool, view, view.id);
        model["expires_at"]     = expiry_text(view.sleeps_in);
        model["size_vram"]      = view.device == "cuda" ? view.card->facts.bytes : 0;
        model["context_length"] = view.card->context;
        models.push_back(std::move(model));
    }
    answer_json(e, Json{{"models", std::move(models)}});
}

// With or without Ollama's tag.
bool has_name(const ModelView& view, std::string_view name) {
    constexpr std::string_view tag = ":latest";
    if (std::ranges::find(view.names, name) != view.names.end()) return true;
    if (name.ends_with(tag)) name.remove_suffix(tag.size());
    return std::ranges::find(view.names, name) != view.names.end();
}

void answer_ollama_show(ModelPool& pool, HttpExchange& e) {
    const Parsed<std::string> asked = parse_ollama_show(std::exchange(e.request.body, {}), {});
    if (!asked) return refuse(e, asked.error());
    const std::optional<ModelView> view = pool.view(*asked);
    // One model answers to any name, but is shown under its own: clients ask whether a model is here.
    if (!view || !(pool.many() || asked->empty() || has_name(*view, *asked))) return refuse(e, pool.unknown(*asked));
    const std::shared_ptr<const ModelCard> card = pool.card(view->id);
    if (!card) return refuse(e, ApiError{500, cat("the file of ", quote(view->id), " cannot be read"), "", ""});
    const std::string& a            = card->architecture;
    Json               capabilities = Json::array();
    if (card->encodes) capabilities.push_back("embedding");
    else {
        capabilities.push_back("completion");
        capabilities.push_back("tools");
        if (card->reasons) capabilities.push_back("thinking");
    }
    const SamplingParams& p = card->sampling;
    answer_json(e, Json{{"modelfile", cat("FROM ", card->file)},
                        {"parameters", cat("temperature ", p.temperature, "\ntop_k ", p.top_k, "\ntop_p ", p.top_p,
                                           "\nmin_p ", p.min_p)},
                        {"template", card->chat_template},
                        {"license", ""},
                        {"details", details_json(card.get())},
                        {"model_info",
                         {{"general.architecture", a},
                          {"general.parameter_count", card->facts.parameters},
                          {a + ".context_length", card->context},
                          {a + ".embedding_length", card->hidden_size},
                          {a + ".block_count", card->n_layers},
                          {a + ".attention.head_count", card->n_heads},
                          {a + ".attention.head_count_kv", card->n_kv_heads}}},
                        {"capabilities", std::move(capabilities)},
                        {"modified_at", time_text(pool.shared().started * 1'000'000)}});
}

void answer_ollama_version(ModelPool&, HttpExchange& e) { answer_json(e, Json{{"version", api_version}}); }

} // namespace quire
