// quire.serve.ollama.request: the bodies of Ollama's /api/chat and /api/generate → the request that a chat, or for a raw prompt a completion,
// with the same content makes (https://docs.ollama.com/api). Owns nothing.
export module quire.serve.ollama.request;

import quire.core.base;
import quire.serve.api.request_fields;
import quire.serve.openai.embeddings;
import quire.serve.openai.request;
import quire.serve.openai.tool_request;
import quire.serve.openai.translated_fields;

export namespace quire {

struct OllamaRequest {
    GenerationRequest generation;
    bool              empty = false; // nothing is asked: the client wants the model loaded, or unloaded
    std::string       model;         // the name that was asked for
    // Seconds without a request that the model stays loaded; < 0: for ever. Nothing: as the server has it.
    std::optional<double> keep_alive;
};

struct OllamaEmbedding {
    EmbeddingRequest      request;
    std::optional<double> keep_alive; // as OllamaRequest has it
};

Parsed<OllamaRequest> parse_ollama_chat(std::string_view json, const ApiLimits& limits);
Parsed<OllamaRequest> parse_ollama_generate(std::string_view json, const ApiLimits& limits);

// The body of /api/embed, with its texts in `input`, or of /api/embeddings, with a text in `prompt`. `field`: which of them.
Parsed<OllamaEmbedding> parse_ollama_embed(std::string_view json, const std::string& field, const ApiLimits& limits);
// The body of /api/show: the model's name.
Parsed<std::string> parse_ollama_show(std::string_view json, const ApiLimits& limits);
// The server's name for a model that a request names: Ollama adds the tag ":latest".
std::string without_tag(const std::string& name, const ApiLimits& limits);

} // namespace quire

module :private;

namespace quire {

std::string without_tag(const std::string& name, const ApiLimits& limits) {
    constexpr std::string_view tag  = ":latest";
    const std::string          bare = name.substr(0, name.size() - (name.ends_with(tag) ? tag.size() : 0));
    return std::ranges::find(limits.models, bare) != limits.models.end() ? bare : name;
}

constexpr std::size_t longest_model = 256; // bytes of a name

// A duration as Go writes them: "5m", "1h30m", "-1s", "0". Nothing: it is none.
std::optional<double> seconds_of(std::string_view text) {
    constexpr std::pair<std::string_view, double> units[]  = {{"ns", 1e-9}, {"us", 1e-6}, {"µs", 1e-6}, {"ms", 1e-3},
                                                              {"s", 1},     {"m", 60},    {"h", 3600}};
    const bool                                    negative = text.starts_with('-');
    if (negative || text.starts_with('+')) text.remove_prefix(1);
    if (text == "0") return 0;
    if (text.empty()) return std::nullopt;
    double seconds = 0;
    while (!text.empty()) {
        const std::size_t           digits = std::min(text.find_first_not_of("0123456789."), text.size());
        const std::optional<double> number = to_number<double>(text.substr(0, digits));
        text.remove_prefix(digits);
        const std::string_view unit = text.substr(0, std::min(text.find_first_of("0123456789."), text.size()));
        const auto*            of   = std::ranges::find(units, unit, &std::pair<std::string_view, double>::first);
        if (!number || of == std::end(units)) return std::nullopt;
        seconds += *number * of->second;
        text.remove_prefix(unit.size());
    }
    return negative ? -seconds : seconds;
}

std::optional<double> read_keep_alive(JsonFields& f) {
    const Json* keep = f.find("keep_alive");
    f.describe("keep_alive", R"({"type":["number","string"]})");
    if (!keep || *keep == "") return std::nullopt;
    const std::optional<double> seconds = keep->is_number()   ? std::optional(keep->get<double>())
                                          : keep->is_string() ? seconds_of(keep->get_ref<const std::string&>())
                                                              : std::nullopt;
    if (!seconds || !std::isfinite(*seconds))
        f.fail("keep_alive", "keep_alive has to be a number of seconds or a duration such as \"5m\"");
    return seconds;
}

class OllamaReader {
public:
    OllamaReader(const Json& body, const ApiLimits& limits) : limits_(limits), f_(body) {}

    Parsed<OllamaRequest> chat() {
        const Json* messages = f_.find("messages");
        f_.describe("messages", R"({"type":"array","items":{"type":"object","required":["role"],"properties":{
            "role":{"enum":["system","developer","user","assistant","tool"]},"content":{"type":["string","null"]}}}})");
        out_.empty       = !messages || (messages->is_array() && messages->empty());
        const Json& list = objects_of(f_, "messages", limits_.messages);
        for (std::size_t i = 0; i < list.size() && !f_.failed(); i++) read_message(list[i], cat("messages[", i, "]"));
        return finish(true);
    }

    Parsed<OllamaRequest> generate() {
        std::string       prompt = f_.text("prompt", limits_.json.bytes);
        const std::string system = f_.text("system", limits_.json.bytes);
        out_.empty               = prompt.empty();
        f_.describe("images", R"({"type":["array","object"],"maxItems":0,"maxProperties":0})");
        refuse_images(f_.find("images"), "images");
        for (const char* name : {"suffix", "template"})
            if (!f_.text(name, limits_.json.bytes).empty()) f_.fail(name, cat(name, " is not supported"));
        (void)f_.find("context"); // of answers before: the prefix cache has what they left
        if (f_.boolean("raw", false)) {
            request_["prompt"] = std::move(prompt);
            return finish(false);
        }
        if (!system.empty()) messages_.push_back({{"role", "system"}, {"content", system}});
        messages_.push_back({{"role", "user"}, {"content", std::move(prompt)}});
        return finish(true);
    }

private:
    struct Open {
        std::string id, name;
    };

    void refuse_images(const Json* images, const std::string& where) {
        if (images && !images->empty()) f_.fail(where, cat(where, " is not supported: quire reads text alone"));
    }

    // Ollama's calls have no ids: results stand for the calls of the same name, in their order.
    void read_message(const Json& m, const std::string& where) {
        const std::string role = text_in(m, "role");
        if (const auto images = m.find("images"); images != m.end() && !images->is_null())
            refuse_images(&*images, where + ".images");
        Json out{{"role", role}, {"content", m.contains("content") ? m["content"] : Json("")}};
        if (const std::string thoughts = text_in(m, "thinking"); !thoughts.empty()) out["reasoning_content"] = thoughts;
        if (const auto calls = m.find("tool_calls"); calls != m.end() && calls->is_array() && !calls->empty()) {
            if (const std::size_t n = open_.size() + calls->size(); n > most_calls)
                return f_.fail("messages", cat("up to ", where, " there are ", n, " calls of tools without a result; ",
                                               most_calls, " are allowed"));
            out["tool_calls"] = Json::array();
            for (const Json& call : *calls) {
                if (!call.is_object() || !call.contains("function") || !call["function"].is_object())
                    return f_.fail("messages", cat(where, ".tool_calls has a call without a function"));
                const Json&       function  = call["function"];
                const auto        given     = function.find("arguments");
                const Json        arguments = given == function.end() || given->is_null() ? Json::object() : *given;
                const std::string id = cat("call_", n_calls_++), name = text_in(function, "name");
                out["tool_calls"].push_back(
                    {{"id", id},
                     {"type", "function"},
                     {"function",
                      {{"name", name},
                       {"arguments", arguments.is_string() ? arguments : Json(json_dump(arguments))}}}});
                open_.push_back({id, name});
            }
        }
        if (role == "tool") {
            const std::string name = text_in(m, "tool_name");
            auto              at   = std::ranges::find(open_, name, &Open::name);
            if (at == open_.end()) at = open_.begin();
            if (at == open_.end())
                return f_.fail("messages", cat(where, " is the result of a tool that no message before has called"));
            out["tool_call_id"] = at->id;
            out["name"]         = at->name;
            open_.erase(at);
        }
        messages_.push_back(std::move(out));
    }

    void read_options() {
        const Json* options = f_.object("options");
        if (!options) return;
        static const std::set<std::string_view> same{"temperature",
                                                     "top_k",
                                                     "top_p",
                                                     "min_p",
                                                     "typical_p",
                                                     "repeat_penalty",
                                                     "seed",
                                                     "repeat_last_n",
                                                     "presence_penalty",
                                                     "frequency_penalty",
                                                     "mirostat",
                                                     "stop",
                                                     "mirostat_tau",
                                                     "mirostat_eta"};
        // Of memory, threads and samplers that are not here: without an effect.
        static const std::set<std::string_view> idle{"num_ctx",        "num_batch", "num_gpu",    "main_gpu",
                                                     "low_vram",       "use_mmap",  "use_mlock",  "num_thread",
                                                     "num_keep",       "numa",      "f16_kv",     "logits_all",
                                                     "embedding_only", "tfs_z",     "vocab_only", "penalize_newline"};
        for (auto at = options->begin(); at != options->end(); ++at) {
            if (at->is_null() || idle.contains(at.key())) continue;
            if (same.contains(at.key())) request_[at.key()] = *at;
            else if (at.key() == "num_predict") read_length(*at);
            else if (unknown_.size() < 16) unknown_.push_back("options." + cut_short(at.key()));
        }
        if (request_.contains("stop") && request_["stop"] == "") request_.erase("stop");
    }

    // -1 and -2: as long as the context is.
    void read_length(const Json& n) {
        const std::optional<std::int64_t> length = JsonFields::integer_of(n);
        if (!length || *length < -2 || *length > std::numeric_limits<int>::max())
            return f_.fail("options.num_predict", "options.num_predict has to be an integer of at least -2");
        if (*length >= 0) request_["max_tokens"] = *length;
    }

    void read_format() {
        const Json* format = f_.find("format");
        f_.describe("format", R"({"anyOf":[{"enum":["json",""]},{"type":"object"}]})");
        if (!format || *format == "") return;
        if (*format == "json") request_["response_format"] = {{"type", "json_object"}};
        else if (format->is_object())
            request_["response_format"] = {{"type", "json_schema"},
                                           {"json_schema", {{"name", "format"}, {"schema", *format}}}};
        else f_.fail("format", "format has to be \"json\" or a JSON Schema");
    }

    void read_think() {
        const Json* think = f_.find("think");
        f_.describe("think", R"({"type":["boolean","string"]})");
        if (!think) return;
        if (!think->is_boolean() && !think->is_string())
            return f_.fail("think", "think has to be true, false, or how much: low, medium, high");
        request_["enable_thinking"] = think->is_string() || think->get<bool>();
        if (think->is_string() && limits_.reasoning_effort) request_["reasoning_effort"] = *think;
    }

    Parsed<OllamaRequest> finish(bool chat) {
        out_.model = f_.text("model", longest_model);
        if (!out_.model.empty()) request_["model"] = without_tag(out_.model, limits_);
        request_["stream"] = f_.boolean("stream", true);
        read_options();
        read_format();
        if (chat) {
            read_think();
            const Json& tools = objects_of(f_, "tools", 1024);
            if (!tools.empty()) request_["tools"] = tools;
            if (f_.boolean("truncate", true)) request_["truncation"] = "auto";
        }
        if (!chat && !request_.contains("max_tokens") && limits_.default_tokens < 0) request_["max_tokens"] = -1;
        if (f_.boolean("logprobs", false)) {
            const int top = f_.integer("top_logprobs", 0, limits_.logprobs, 0);
            if (chat) request_["logprobs"] = true, request_["top_logprobs"] = top;
            else request_["logprobs"] = top;
        }
        out_.keep_alive = read_keep_alive(f_);
        for (const char* name : {"top_logprobs", "shift"}) (void)f_.find(name);
        for (const std::string& name : f_.unknown()) unknown_.push_back(name);
        if (f_.failed()) return f_.error();
        if (out_.empty) { // only the model's name is looked at
            JsonFields named(request_);
            parse_model(named, limits_);
            if (named.failed()) return named.error();
            return std::move(out_);
        }
        if (chat) request_["messages"] = std::move(messages_);
        Parsed<GenerationRequest> generation =
            chat ? read_chat_request(request_, limits_) : read_completion_request(request_, limits_);
        if (!generation) return std::unexpected(generation.error());
        out_.generation         = std::move(*generation);
        out_.generation.unknown = std::move(unknown_);
        return std::move(out_);
    }

    const ApiLimits&         limits_;
    JsonFields               f_;
    OllamaRequest            out_;
    Json                     request_  = Json::object(); // the chat, or the completion
    Json                     messages_ = Json::array();
    std::vector<Open>        open_; // calls without a result so far
    int                      n_calls_ = 0;
    std::vector<std::string> unknown_;
};

Parsed<OllamaRequest> parse_ollama_chat(std::string_view text, const ApiLimits& limits) {
    Parsed<JsonDocument> body = parse_object(text, limits);
    if (!body) return std::unexpected(body.error());
    return OllamaReader(*body, limits).chat();
}

Parsed<OllamaRequest> parse_ollama_generate(std::string_view text, const ApiLimits& limits) {
    Parsed<JsonDocument> body = parse_object(text, limits);
    if (!body) return std::unexpected(body.error());
    return OllamaReader(*body, limits).generate();
}

Parsed<OllamaEmbedding> parse_ollama_embed(std::string_view text, const std::string& field, const ApiLimits& limits) {
    Parsed<JsonDocument> body = parse_object(text, limits);
    if (!body) return std::unexpected(body.error());
    JsonFields        f(*body);
    OllamaEmbedding   ollama;
    EmbeddingRequest& out = ollama.request;
    out.model             = f.text("model", longest_model);
    const Json name{{"model", without_tag(out.model, limits)}};
    JsonFields named(name);
    parse_model(named, limits);
    out.inputs   = parse_prompts(f, field, limits);
    out.truncate = f.boolean("truncate", true);
    if (const auto n = f.integer("dimensions", 1, std::numeric_limits<int>::max())) out.dimensions = int(*n);
    ollama.keep_alive = read_keep_alive(f);
    if (named.failed()) return named.error();
    if (f.failed()) return f.error();
    return ollama;
}

Parsed<std::string> parse_ollama_show(std::string_view text, const ApiLimits& limits) {
    Parsed<JsonDocument> body = parse_object(text, limits);
    if (!body) return std::unexpected(body.error());
    JsonFields        f(*body);
    const std::string older = f.text("name", longest_model), name = f.text("model", longest_model, older);
    if (f.failed()) return f.error();
    return name;
}

} // namespace quire
