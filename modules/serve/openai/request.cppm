// quire.serve.openai.request: the bodies of requests, JSON text → values, with the field names of OpenAI, vLLM and llama.cpp. Uses no
// sockets, no engine and no tokenizer. Owns nothing.
export module quire.serve.openai.request;

import quire.core.base;
import quire.core.json;
import quire.core.std;
import quire.engine.sampling_defaults;
import quire.schedule.request;
import quire.serve.api.error;
import quire.serve.api.json_fields;
import quire.serve.openai.constraint_fields;
import quire.serve.openai.sampler_fields;
import quire.serve.openai.tool_request;
import quire.serve.openai.unsupported_fields;
import quire.text.templates.chat_template;

export namespace quire {

struct ApiLimits {
    std::vector<std::string> models;            // names that a request may use; the first is the one in responses
    bool                     any_model = false; // a request may use any name, and its response repeats it
    std::vector<std::string> templates;         // names of chat templates that a request may choose
    bool                     reasoning_effort = false; // the template asks for it
    int                      vocab_size       = 0;
    int                      context          = 0;
    int                      n = 128, best_of = 128; // answers; beams
    int                      max_tokens     = 0;     // that a request may ask for; 0: any number, cut at the context
    int                      default_tokens = -1;   // where a request sets none; -1: OpenAI's 16, for chats the context
    int                      stops          = 64;   // strings; as many bad words
    int                      stop_bytes     = 512;  // of each
    int                      prompts        = 1024; // of one request
    int                      messages       = 4096;
    int                      logprobs       = 20;
    int                      logit_bias     = 1024;    // entries
    SamplerChoice            samplers;                 // where a request says nothing
    int                      reasoning_budget = -1;    // tokens; -1: none
    bool                     trim_chats       = false; // unless a request says otherwise
    bool                     context_shift    = false;
    JsonLimits               json;
};

// Text and token ids in a row; the ids stand for themselves.
using PromptPart = std::variant<std::string, std::vector<Token>>;
using Prompt     = std::vector<PromptPart>;

// A conversation, and how it becomes a prompt.
struct Conversation {
    ChatInput input;
    bool      continue_final = false; // the last message is the beginning of the answer
};

// A request of /v1/completions or /v1/chat/completions.
struct GenerationRequest {
    bool                                       chat = false;
    std::vector<Prompt>                        prompts; // of completions
    Conversation                               conversation;
    ToolUse                                    tool_use; // of chats
    bool                                       add_special_tokens = true;
    Request                                    request;    // all but the prompt and max_tokens
    std::optional<int>                         max_tokens; // 0: nothing is generated; absent: up to the context
    bool                                       has_seed = false;
    std::vector<std::string>                   stop, bad_words;
    std::vector<std::string>                   dry_breakers;
    int                                        reasoning_budget = -1; // of chats, in tokens; -1: none
    bool                                       trim     = false; // a chat that is too long loses its oldest messages
    bool                                       has_keep = false; // the request says how much a context shift keeps
    std::vector<std::pair<std::string, float>> text_bias;        // logit_bias of all tokens of a text
    bool                                       include_stop = false, skip_special_tokens = true;
    bool                                       stream = false, include_usage = false, continuous_usage = false;
    bool        echo = false, logprobs = false, return_token_ids = false, tokens_as_ids = false;
    int         prompt_logprobs = -1; // as the field asks, in vLLM's shape
    int         truncate_prompt = 0;  // keep so many last tokens; -1: as many as the context holds; 0: all
    bool        cache_prompt    = true;
    std::string id;    // request_id, if it is a plain word
    std::string model; // the name that was asked for, where the response repeats it
    bool        timings_per_token = false;
    bool        show_prompt       = false;     // the response holds the text of the prompts
    std::optional<ConstraintField> constraint; // of the text
    std::vector<std::string>       unknown;    // unknown fields, for the log
};

Parsed<GenerationRequest> parse_completion_request(std::string_view json, const ApiLimits& limits);
Parsed<GenerationRequest> parse_chat_request(std::string_view json, const ApiLimits& limits);
// These functions for parsed bodies; other APIs' requests are translated into such bodies.
Parsed<GenerationRequest> read_completion_request(const Json& body, const ApiLimits& limits);
Parsed<GenerationRequest> read_chat_request(const Json& body, const ApiLimits& limits);
// A body as an object.
Parsed<JsonDocument> parse_object(std::string_view text, const ApiLimits& limits);
// Sets max_tokens and min_tokens of an engine request with one of the prompts: as `from` asks, at most as many as the context has room
// for.
void limit_tokens(const GenerationRequest& from, int context, Request& request);

struct EmbeddingRequest {
    std::vector<Prompt>      inputs;
    bool                     base64             = false;
    bool                     add_special_tokens = true;
    std::string              cache_salt;
    std::optional<int>       dimensions;
    std::string              model; // as in GenerationRequest
    std::vector<std::string> unknown;
};
Parsed<EmbeddingRequest> parse_embedding_request(std::string_view json, const ApiLimits& limits);

// /rerank, /v1/rerank: Jina's and Cohere's fields.
struct RerankRequest {
    std::string              query;
    std::vector<std::string> documents;
    int                      top_n            = 0; // 0: all
    bool                     return_documents = false;
    std::string              model; // as in GenerationRequest
    std::vector<std::string> unknown;
};
Parsed<RerankRequest> parse_rerank_request(std::string_view json, const ApiLimits& limits);

// /tokenize, /apply-template, /pin: a text or a conversation.
struct TextRequest {
    std::optional<std::string>  text;
    std::optional<Conversation> conversation;
    bool                        add_special = true, parse_special = true, with_pieces = false, token_strings = false;
    std::string                 cache_salt;
};
Parsed<TextRequest> parse_text_request(std::string_view json, const ApiLimits& limits);

// /detokenize.
Parsed<std::vector<Token>> parse_detokenize_request(std::string_view json, const ApiLimits& limits);
// {"id": "…"} of /unpin.
Parsed<std::string> parse_id_request(std::string_view json, const ApiLimits& limits);

} // namespace quire

module :private;

namespace quire {

namespace {

std::unexpected<ApiError> refuse(std::string param, std::string message, int status = 400, std::string code = "") {
    return std::unexpected(ApiError{status, std::move(message), std::move(param), std::move(code)});
}

} // namespace

Parsed<JsonDocument> parse_object(std::string_view text, const ApiLimits& limits) {
    Result<JsonDocument> json = json_document(text, limits.json);
    if (!json) return refuse("", cat("the body cannot be used: ", json.error().message));
    if (!(*json)->is_object()) return refuse("", cat("the body is ", type_name(*json), "; it has to be a JSON object"));
    return std::move(*json);
}

namespace {

void parse_model(JsonFields& f, const ApiLimits& limits, std::string* asked = nullptr) {
    constexpr std::size_t longest = 256;
    const Json*           v       = f.find("model");
    if (!v) return;
    if (!v->is_string()) return f.fail("model", cat("model is ", type_name(*v), "; it has to be a string"));
    const auto& name = v->get_ref<const std::string&>();
    if (limits.any_model && name.size() > longest)
        return f.fail("model", cat("model has more than ", longest, " bytes"));
    if (limits.any_model && asked) *asked = name;
    if (limits.any_model || name.empty() || std::ranges::find(limits.models, name) != limits.models.end()) return;
    f.fail(ApiError{404, cat("the model ", quote(name), " does not exist; the one here is ", quote(limits.models[0])),
                    "model", "model_not_found"});
}

void parse_bias(JsonFields& f, GenerationRequest& out, const ApiLimits& limits) {
    const Json* v = f.find("logit_bias");
    if (!v) return;
    if (!v->is_object() && !v->is_array())
        return f.fail("logit_bias", cat("logit_bias is ", type_name(*v), "; it has to be an object of token ids"));
    if (v->size() > std::size_t(limits.logit_bias))
        return f.fail("logit_bias", cat("logit_bias has ", v->size(), " entries; ", limits.logit_bias, " are allowed"));
    const auto add = [&](const Json& key, const Json& bias) {
        float value = 0;
        if (bias.is_boolean() && !bias.get<bool>()) value = -std::numeric_limits<float>::infinity(); // never
        else if (bias.is_number() && std::abs(bias.get<double>()) <= 100) value = bias.get<float>();
        else return f.fail("logit_bias", "a bias has to be a number in -100..100");
        std::optional<std::int64_t> id;
        if (key.is_string()) {
            const auto&  text       = key.get_ref<const std::string&>();
            std::int64_t n          = 0;
            const auto [end, wrong] = std::from_chars(text.data(), text.data() + text.size(), n);
            if (wrong == std::errc{} && end == text.data() + text.size()) id = n;
            else if (wrong == std::errc{} || text.empty() || wrong == std::errc::result_out_of_range ||
                     text.size() > std::size_t(limits.stop_bytes))
                return f.fail("logit_bias", cat("logit_bias has the key ", quote(text), ", which is no token id"));
            else return void(out.text_bias.emplace_back(text, value));
        } else {
            id = JsonFields::integer_of(key);
        }
        if (!id || *id < 0 || *id >= limits.vocab_size)
            return f.fail("logit_bias", cat("logit_bias names ",
                                            key.is_string() ? quote(key.get<std::string>()) : JsonFields::shown(key),
                                            ", which is no token id in 0..", limits.vocab_size - 1));
        out.request.sampling.logit_bias.emplace_back(Token(*id), value);
    };
    if (v->is_object()) {
        for (auto at = v->begin(); at != v->end(); ++at) add(Json(at.key()), at.value());
        return;
    }
    for (const Json& pair : *v)
        if (pair.is_array() && pair.size() == 2) add(pair[0], pair[1]);
        else return f.fail("logit_bias", "a list of logit_bias has pairs of a token and a bias");
}

void parse_sampling(JsonFields& f, GenerationRequest& out, const ApiLimits& limits) {
    SamplingParams& s    = out.request.sampling;
    out.dry_breakers     = parse_samplers(f, limits.samplers, limits.stops, s);
    s.top_p              = std::max(s.top_p, std::numeric_limits<float>::min());
    s.typical_p          = std::max(s.typical_p, std::numeric_limits<float>::min());
    s.repetition_penalty = std::max(s.repetition_penalty, 1e-6f);
    if (const auto seed =
            f.integer("seed", std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::int64_t>::max());
        seed && *seed != -1) {
        s.seed       = std::uint64_t(*seed);
        out.has_seed = true;
    }
    s.allowed_tokens = f.tokens("allowed_token_ids", limits.vocab_size);
    if (const Json* v = f.find("allowed_token_ids"); v && v->is_array() && v->empty())
        f.fail("allowed_token_ids", "allowed_token_ids is empty: no token could come");
    out.bad_words = f.texts("bad_words", limits.stops, limits.stop_bytes);
    parse_bias(f, out, limits);
}

void parse_beams(JsonFields& f, GenerationRequest& out, const ApiLimits& limits) {
    Request&   r       = out.request;
    const bool beams   = f.boolean("use_beam_search", false);
    const int  width   = f.integer("beam_width", 0, limits.best_of, 0);
    const auto penalty = f.number("length_penalty", -100, 100, 1);
    r.length_penalty   = float(penalty);
    if (const Json* v = f.find("early_stopping")) {
        if (v->is_boolean()) r.early_stopping = v->get<bool>() ? EarlyStopping::yes : EarlyStopping::no;
        else if (*v == "never") r.early_stopping = EarlyStopping::never;
        else f.fail("early_stopping", "early_stopping has to be true, false or \"never\"");
    }
    if (!beams && width == 0) {
        if (penalty != 1) f.fail("length_penalty", "length_penalty needs use_beam_search");
        if (r.early_stopping != EarlyStopping::no) f.fail("early_stopping", "early_stopping needs use_beam_search");
        return;
    }
    if (!beams) return f.fail("beam_width", "beam_width needs use_beam_search");
    r.beam_width = width > 0 ? width : std::max(r.best_of, r.n);
    r.best_of    = 0;
    if (r.beam_width < r.n)
        f.fail("beam_width", cat("beam_width is ", r.beam_width, ", less than the ", r.n, " answers wanted"));
    // Beams follow the model's own distribution.
    const SamplingParams& s = r.sampling;
    if (!s.logit_bias.empty() || !out.text_bias.empty())
        f.fail("logit_bias", "logit_bias does not go with beam search");
    if (f.has("allowed_token_ids")) f.fail("allowed_token_ids", "allowed_token_ids does not go with beam search");
    if (!out.bad_words.empty()) f.fail("bad_words", "bad_words does not go with beam search");
    if (r.min_tokens > 0) f.fail("min_tokens", "min_tokens does not go with beam search");
    refuse_samplers(f, r.sampling);
}

void parse_stream(JsonFields& f, GenerationRequest& out) {
    out.stream          = f.boolean("stream", false);
    const Json* options = f.find("stream_options");
    if (!options) return;
    if (!options->is_object()) return f.fail("stream_options", "stream_options has to be an object");
    JsonFields o(*options);
    out.include_usage    = o.boolean("include_usage", false);
    out.continuous_usage = o.boolean("continuous_usage_stats", false);
    if (!out.stream && (out.include_usage || out.continuous_usage))
        return f.fail("stream_options", "stream_options needs stream");
    if (o.boolean("include_obfuscation", false)) o.fail("include_obfuscation", "include_obfuscation is not supported");
    if (o.failed()) f.fail("stream_options", o.error().error().message);
    for (const std::string& name : o.unknown()) out.unknown.push_back("stream_options." + name);
}

// Answers' lengths: under three names, with a default and a limit of the server. limit_tokens() applies the result.
void parse_max_tokens(JsonFields& f, GenerationRequest& out, const ApiLimits& limits) {
    constexpr int huge = std::numeric_limits<int>::max();
    Request&      r    = out.request;
    const char*   name = f.has("max_completion_tokens") ? "max_completion_tokens"
                         : f.has("max_tokens")          ? "max_tokens"
                                                        : "n_predict";
    for (const char* other : {"max_completion_tokens", "max_tokens", "n_predict"})
        if (const auto n = f.integer(other, -1, huge); n && other == std::string_view(name) && *n >= 0)
            out.max_tokens = int(*n);
    if (!f.has(name) && (limits.default_tokens >= 0 || !out.chat))
        out.max_tokens = limits.default_tokens >= 0 ? limits.default_tokens : 16;
    if (limits.max_tokens > 0) {
        const int asked = out.max_tokens.value_or(limits.max_tokens);
        if (asked > limits.max_tokens && f.has(name))
            f.fail(name, cat(name, " is ", asked, "; this server allows ", limits.max_tokens));
        out.max_tokens = std::min(asked, limits.max_tokens);
    }
    r.min_tokens = f.integer("min_tokens", 0, huge, 0);
    if (out.max_tokens && r.min_tokens > *out.max_tokens)
        f.fail("min_tokens", cat("min_tokens is ", r.min_tokens, ", more than the ", *out.max_tokens, " of ",
                                 f.has(name) ? name : "max_tokens"));
}

// Reasoning budgets under the names of llama.cpp and vLLM; the fields for chats and answers that are too long for the context.
void parse_lengths(JsonFields& f, GenerationRequest& out, const ApiLimits& limits) {
    constexpr int huge   = std::numeric_limits<int>::max();
    Request&      r      = out.request;
    int           budget = limits.reasoning_budget;
    for (const char* name :
         {"reasoning_budget", "reasoning_budget_tokens", "thinking_budget_tokens", "thinking_token_budget"}) {
        if (!f.has(name)) continue;
        budget = f.integer(name, -1, huge, -1);
        if (budget >= 0 && !out.chat) f.fail(name, cat(name, " belongs to /v1/chat/completions"));
        if (budget >= 0 && r.beam_width > 0) f.fail(name, cat(name, " does not go with beam search"));
    }
    if (out.chat && r.beam_width == 0) out.reasoning_budget = budget;
    const std::string truncation = f.text("truncation", 64, limits.trim_chats && out.chat ? "auto" : "disabled");
    if (truncation != "auto" && truncation != "disabled")
        f.fail("truncation", cat("truncation is ", quote(truncation), "; it has to be auto or disabled"));
    if (truncation == "auto" && !out.chat) f.fail("truncation", "truncation belongs to /v1/chat/completions");
    out.trim        = truncation == "auto";
    r.context_shift = limits.context_shift;
    out.has_keep    = f.has("n_keep");
    r.n_keep        = f.integer("n_keep", -1, huge, 0);
    r.n_discard     = f.integer("n_discard", 0, huge, 0);
    if (!r.context_shift)
        for (auto [name, given] : {std::pair("n_keep", r.n_keep > 0), std::pair("n_discard", r.n_discard > 0)})
            if (given) f.fail(name, cat(name, " needs a server that was started with --context-shift"));
}

// The fields that completions and chats share.
void parse_common(JsonFields& f, GenerationRequest& out, const ApiLimits& limits) {
    constexpr int huge = std::numeric_limits<int>::max();
    Request&      r    = out.request;
    parse_model(f, limits, &out.model);
    out.constraint = parse_constraint(f);
    r.n            = f.integer("n", 1, limits.n, 1);
    r.best_of      = f.integer("best_of", 1, limits.best_of, r.n);
    if (r.best_of < r.n)
        f.fail("best_of", cat("best_of is ", r.best_of, ", less than the ", r.n, " answers that n wants"));

    parse_max_tokens(f, out, limits);
    r.ignore_end  = f.boolean("ignore_eos", false);
    r.stop_tokens = f.tokens("stop_token_ids", limits.vocab_size);
    if (r.stop_tokens.size() > std::size_t(limits.stops) * 16)
        f.fail("stop_token_ids",
               cat("stop_token_ids has ", r.stop_tokens.size(), " ids; ", limits.stops * 16, " are allowed"));
    out.stop                = f.texts("stop", limits.stops, limits.stop_bytes);
    out.include_stop        = f.boolean("include_stop_str_in_output", false);
    out.skip_special_tokens = f.boolean("skip_special_tokens", true);

    parse_sampling(f, out, limits);
    parse_beams(f, out, limits);
    parse_lengths(f, out, limits);
    parse_stream(f, out);
    r.priority           = f.integer("priority", -1'000'000, 1'000'000, 0);
    r.cache_salt         = f.text("cache_salt", 1024);
    out.cache_prompt     = f.boolean("cache_prompt", true);
    out.return_token_ids = f.boolean("return_token_ids", false) || f.boolean("return_tokens", false);
    out.tokens_as_ids    = f.boolean("return_tokens_as_token_ids", false);
    out.truncate_prompt  = f.integer("truncate_prompt_tokens", -1, huge, 0);
    out.prompt_logprobs  = f.integer("prompt_logprobs", 0, limits.logprobs, -1);
    if (out.prompt_logprobs >= 0 && out.stream) f.fail("prompt_logprobs", "prompt_logprobs does not go with stream");
    if (out.stream && r.beam_width == 0 && r.best_of > r.n)
        f.fail("best_of", "best_of above n does not go with stream: the best is known at the end");
    r.return_progress     = f.boolean("return_progress", false) && out.stream;
    out.timings_per_token = f.boolean("timings_per_token", false);
    if (const std::string id = f.text("request_id", 1024); is_plain_word(id)) out.id = id; // as of X-Request-Id
    refuse_unsupported(f, out.chat && limits.reasoning_effort, out.chat);
}

// Text and ids in one list, as in llama.cpp.
bool parse_mixed(JsonFields& f, const std::string& param, const Json& list, const ApiLimits& limits, Prompt& out) {
    for (const Json& item : list) {
        if (item.is_string()) {
            out.emplace_back(item.get<std::string>());
            continue;
        }
        const std::optional<Token> id = JsonFields::token_of(item, limits.vocab_size);
        if (!id) {
            f.fail(param, cat(param, ": ", JsonFields::shown(item), " is neither a text nor a token id in 0..",
                              limits.vocab_size - 1));
            return false;
        }
        if (out.empty() || !std::holds_alternative<std::vector<Token>>(out.back()))
            out.emplace_back(std::vector<Token>());
        std::get<std::vector<Token>>(out.back()).push_back(*id);
    }
    return true;
}

std::vector<Prompt> parse_prompts(JsonFields& f, const std::string& param, const ApiLimits& limits) {
    std::vector<Prompt> prompts;
    const Json*         v = f.find(param);
    if (!v) {
        f.fail(param, cat(param, " is missing"));
        return prompts;
    }
    if (v->is_string()) {
        prompts.push_back({v->get<std::string>()});
        return prompts;
    }
    if (!v->is_array() || v->empty()) {
        f.fail(param, v->is_array() ? cat(param, " is empty")
                                    : cat(param, " is ", type_name(*v), "; it has to be a string or a list"));
        return prompts;
    }
    const bool nested = std::ranges::any_of(*v, [](const Json& item) { return item.is_array(); });
    const bool texts  = std::ranges::all_of(*v, [](const Json& item) { return item.is_string(); });
    if (!nested && !texts) {
        if (Prompt one; parse_mixed(f, param, *v, limits, one)) prompts.push_back(std::move(one));
        return prompts;
    }
    if (v->size() > std::size_t(limits.prompts)) {
        f.fail(param, cat(param, " has ", v->size(), " prompts; ", limits.prompts, " are allowed"));
        return prompts;
    }
    for (const Json& item : *v) {
        Prompt one;
        if (item.is_string()) one.emplace_back(item.get<std::string>());
        else if (!item.is_array() || item.empty()) {
            f.fail(param, cat(param, " is a list with ", item.is_array() ? "an empty list" : type_name(item),
                              " among its prompts"));
            break;
        } else if (!parse_mixed(f, param, item, limits, one)) break;
        prompts.push_back(std::move(one));
    }
    return prompts;
}

// Checks the content of a message: a string, or parts of type text; an answer that only calls tools has none.
bool check_content(JsonFields& f, const Json& message, const std::string& where) {
    const auto at = message.find("content");
    if (at == message.end() || at->is_null()) {
        if (message["role"] == "assistant" && message.contains("tool_calls") && message["tool_calls"].is_array() &&
            !message["tool_calls"].empty())
            return true;
        f.fail("messages", cat(where, " has no content"));
        return false;
    }
    if (at->is_string()) return true;
    if (!at->is_array()) {
        f.fail("messages", cat("the content of ", where, " is ", type_name(*at), "; it has to be a string or parts"));
        return false;
    }
    for (const Json& part : *at) {
        const bool is_text = part.is_object() && part.contains("type") && part["type"] == "text" &&
                             part.contains("text") && part["text"].is_string();
        if (!is_text) {
            f.fail("messages", cat("the content of ", where, " has a part that is not text"));
            return false;
        }
    }
    return true;
}

Conversation parse_conversation(JsonFields& f, const ApiLimits& limits) {
    Conversation out;
    const Json*  v = f.find("messages");
    if (!v || !v->is_array() || v->empty()) {
        f.fail("messages", !v               ? "messages is missing"
                           : !v->is_array() ? cat("messages is ", type_name(*v), "; it has to be a list")
                                            : std::string("messages is empty"));
        return out;
    }
    if (v->size() > std::size_t(limits.messages)) {
        f.fail("messages", cat("messages has ", v->size(), " of them; ", limits.messages, " are allowed"));
        return out;
    }
    for (std::size_t i = 0; i < v->size(); i++) {
        const Json&       m     = (*v)[i];
        const std::string where = cat("message ", i);
        if (!m.is_object())
            return f.fail("messages", cat(where, " is ", type_name(m), "; it has to be an object")), out;
        if (!m.contains("role") || !m["role"].is_string()) return f.fail("messages", cat(where, " has no role")), out;
        const std::string role = m["role"].get<std::string>();
        if (role != "system" && role != "developer" && role != "user" && role != "assistant" && role != "tool")
            return f.fail("messages", cat(where, " has the role ", quote(role),
                                          "; system, developer, user, assistant and tool are known")),
                   out;
        for (const char* calls : {"function_call", "audio"})
            if (m.contains(calls) && !m[calls].is_null() && !m[calls].empty())
                return f.fail("messages", cat(where, " has ", calls, ", which are not supported")), out;
        if (!check_content(f, m, where)) return out;
        out.input.messages.push_back(m);
    }
    check_tool_messages(f, out.input.messages);
    if (f.failed()) return out;
    if (const Json* variables = f.find("chat_template_kwargs")) {
        if (!variables->is_object())
            return f.fail("chat_template_kwargs",
                          cat("chat_template_kwargs is ", type_name(*variables), "; it has to be an object")),
                   out;
        out.input.variables = *variables;
    }
    if (const Json* name = f.find("chat_template")) {
        const auto& known = limits.templates;
        if (!name->is_string() || std::ranges::find(known, name->get_ref<const std::string&>()) == known.end()) {
            std::string names;
            for (const std::string& one : known) names += cat(names.empty() ? "" : ", ", one);
            return f.fail("chat_template", cat("chat_template has to name a template of the model: ", names,
                                               "; a template's text is not taken from requests")),
                   out;
        }
        out.input.template_name = name->get<std::string>();
    }
    if (const Json* effort = f.find("reasoning_effort"); effort && *effort == "none" && !limits.reasoning_effort)
        out.input.variables["enable_thinking"] = false;
    if (limits.reasoning_effort)
        if (const std::string effort = f.text("reasoning_effort", 64); !effort.empty())
            out.input.variables["reasoning_effort"] = effort;
    if (f.has("enable_thinking")) out.input.variables["enable_thinking"] = f.boolean("enable_thinking", true);
    for (auto [name, list] : {std::pair("tools", &out.input.tools), std::pair("documents", &out.input.documents)})
        if (const Json* given = f.find(name)) {
            if (!given->is_array())
                return f.fail(name, cat(name, " is ", type_name(*given), "; it has to be a list")), out;
            *list = *given;
        }
    // The last message may be the beginning of the answer: as requested, or because it is by the assistant (as in llama.cpp).
    const std::vector<Json>& messages = out.input.messages;
    const bool last_is_answer         = messages.back()["role"] == "assistant" && messages.back().contains("content") &&
                                messages.back()["content"].is_string() &&
                                (!messages.back().contains("tool_calls") || messages.back()["tool_calls"].empty());
    const bool add     = f.boolean("add_generation_prompt", true);
    out.continue_final = f.boolean("continue_final_message", last_is_answer && !f.has("add_generation_prompt"));
    out.input.add_generation_prompt = add;
    if (out.continue_final && f.has("add_generation_prompt") && add)
        f.fail("continue_final_message", "continue_final_message and add_generation_prompt exclude each other");
    if (out.continue_final && !last_is_answer)
        f.fail("continue_final_message", "continue_final_message needs a last message by the assistant");
    if (out.continue_final && messages.size() > 1 && messages[messages.size() - 2]["role"] == "assistant")
        f.fail("messages", "there are two assistant messages at the end");
    return out;
}

// llama.cpp's name for log-probabilities; 0 is none.
int parse_n_probs(JsonFields& f, const ApiLimits& limits) { return f.integer("n_probs", 0, limits.logprobs, 0); }

} // namespace

Parsed<GenerationRequest> parse_completion_request(std::string_view text, const ApiLimits& limits) {
    Parsed<JsonDocument> json = parse_object(text, limits);
    return json ? read_completion_request(*json, limits) : std::unexpected(json.error());
}

Parsed<GenerationRequest> read_completion_request(const Json& body, const ApiLimits& limits) {
    JsonFields        f(body);
    GenerationRequest out;
    parse_common(f, out, limits);
    out.prompts            = parse_prompts(f, "prompt", limits);
    out.add_special_tokens = f.boolean("add_special_tokens", true);
    out.echo               = f.boolean("echo", false);
    int logprobs           = -1;
    if (const int n = parse_n_probs(f, limits); n > 0) logprobs = n;
    logprobs                      = f.integer("logprobs", 0, limits.logprobs, logprobs);
    out.logprobs                  = logprobs >= 0;
    out.request.sampling.logprobs = logprobs;
    if (f.integer("top_logprobs", 0, limits.logprobs, 0) > 0)
        f.fail("top_logprobs", "top_logprobs belongs to /v1/chat/completions");
    for (const char* name : {"messages", "chat_template"})
        if (f.has(name)) f.fail(name, cat(name, " belongs to /v1/chat/completions"));
    for (const std::string& name : f.unknown()) out.unknown.push_back(name);
    if (f.failed()) return f.error();
    return out;
}

Parsed<GenerationRequest> parse_chat_request(std::string_view text, const ApiLimits& limits) {
    Parsed<JsonDocument> json = parse_object(text, limits);
    return json ? read_chat_request(*json, limits) : std::unexpected(json.error());
}

Parsed<GenerationRequest> read_chat_request(const Json& body, const ApiLimits& limits) {
    JsonFields        f(body);
    GenerationRequest out;
    out.chat         = true;
    out.conversation = parse_conversation(f, limits);
    out.tool_use     = parse_tool_use(f);
    parse_common(f, out, limits);
    out.add_special_tokens = f.boolean("add_special_tokens", false); // templates write them
    if (f.boolean("echo", false)) f.fail("echo", "echo belongs to /v1/completions");
    if (f.has("prompt")) f.fail("prompt", "prompt belongs to /v1/completions");
    const int n_probs = parse_n_probs(f, limits);
    out.logprobs      = f.boolean("logprobs", n_probs > 0);
    const int top     = f.integer("top_logprobs", 0, limits.logprobs, n_probs);
    if (n_probs > 0 && !out.logprobs) f.fail("n_probs", "n_probs needs logprobs, which is false");
    if (top > 0 && !out.logprobs) f.fail("top_logprobs", "top_logprobs needs logprobs");
    if (out.logprobs) out.request.sampling.logprobs = top;
    for (const std::string& name : f.unknown()) out.unknown.push_back(name);
    if (f.failed()) return f.error();
    return out;
}

void limit_tokens(const GenerationRequest& from, int context, Request& request) {
    const int prompt   = int(std::min<std::size_t>(request.prompt.size(), std::size_t(context) - 1));
    request.max_tokens = from.max_tokens.value_or(context);
    if (!request.can_shift())
        request.max_tokens = std::min(request.max_tokens, context - prompt); // room for at least 1
    request.min_tokens = std::min(request.min_tokens, request.max_tokens);
}

Parsed<EmbeddingRequest> parse_embedding_request(std::string_view text, const ApiLimits& limits) {
    Parsed<JsonDocument> json = parse_object(text, limits);
    if (!json) return std::unexpected(json.error());
    JsonFields       f(*json);
    EmbeddingRequest out;
    parse_model(f, limits, &out.model);
    out.inputs             = parse_prompts(f, f.has("input") || !f.has("content") ? "input" : "content", limits);
    out.add_special_tokens = f.boolean("add_special_tokens", true);
    out.cache_salt         = f.text("cache_salt", 1024);
    const std::string form = f.text("encoding_format", 64, "float");
    if (form != "float" && form != "base64")
        f.fail("encoding_format", cat("encoding_format is ", quote(form), "; it has to be float or base64"));
    out.base64 = form == "base64";
    if (const auto n = f.integer("dimensions", 1, std::numeric_limits<int>::max())) out.dimensions = int(*n);
    (void)f.find("user");
    out.unknown = f.unknown();
    if (f.failed()) return f.error();
    return out;
}

Parsed<RerankRequest> parse_rerank_request(std::string_view text, const ApiLimits& limits) {
    Parsed<JsonDocument> json = parse_object(text, limits);
    if (!json) return std::unexpected(json.error());
    JsonFields    f(*json);
    RerankRequest out;
    parse_model(f, limits, &out.model);
    if (!f.has("query")) f.fail("query", "query is missing");
    out.query        = f.text("query", limits.json.bytes);
    const Json* list = f.find("documents");
    if (!list || !list->is_array() || list->empty()) f.fail("documents", "documents has to be a list of texts");
    else if (list->size() > std::size_t(limits.prompts))
        f.fail("documents", cat("documents has ", list->size(), " texts; ", limits.prompts, " are allowed"));
    else
        for (const Json& item : *list) {
            const Json* one = item.is_object() && item.contains("text") ? &item["text"] : &item;
            if (one->is_string()) out.documents.push_back(one->get<std::string>());
            else
                f.fail("documents",
                       cat("documents[", out.documents.size(), "] is ", type_name(*one), "; it has to be a text"));
            if (f.failed()) break;
        }
    out.top_n            = int(f.integer("top_n", 1, std::numeric_limits<int>::max()).value_or(0));
    out.return_documents = f.boolean("return_documents", false);
    (void)f.find("user");
    out.unknown = f.unknown();
    if (f.failed()) return f.error();
    return out;
}

Parsed<TextRequest> parse_text_request(std::string_view text, const ApiLimits& limits) {
    Parsed<JsonDocument> json = parse_object(text, limits);
    if (!json) return std::unexpected(json.error());
    JsonFields  f(*json);
    TextRequest out;
    parse_model(f, limits);
    const int given = int(f.has("prompt")) + int(f.has("content")) + int(f.has("messages"));
    if (given != 1) f.fail(given == 0 ? "prompt" : "messages", "one of prompt, content and messages is needed");
    const bool by_content = f.has("content");
    if (f.has("messages")) out.conversation = parse_conversation(f, limits);
    else out.text = f.text(by_content ? "content" : "prompt", limits.json.bytes);
    // vLLM's names and defaults, or llama.cpp's.
    out.add_special   = f.boolean("add_special", !by_content && !out.conversation);
    out.add_special   = f.boolean("add_special_tokens", out.add_special);
    out.parse_special = f.boolean("parse_special", true);
    out.with_pieces   = f.boolean("with_pieces", false);
    out.token_strings = f.boolean("return_token_strs", false);
    out.cache_salt    = f.text("cache_salt", 1024);
    if (!out.conversation && f.has("chat_template")) f.fail("chat_template", "chat_template needs messages");
    if (f.failed()) return f.error();
    return out;
}

Parsed<std::vector<Token>> parse_detokenize_request(std::string_view text, const ApiLimits& limits) {
    Parsed<JsonDocument> json = parse_object(text, limits);
    if (!json) return std::unexpected(json.error());
    JsonFields f(*json);
    parse_model(f, limits);
    const Json* v = f.find("tokens");
    if (!v || !v->is_array()) f.fail("tokens", "tokens has to be a list of token ids");
    std::vector<Token> ids;
    if (v && v->is_array())
        for (const Json& item : *v) {
            const std::optional<Token> id = JsonFields::token_of(item, limits.vocab_size);
            if (!id) {
                f.fail("tokens",
                       cat("tokens: ", JsonFields::shown(item), " is no token id in 0..", limits.vocab_size - 1));
                break;
            }
            ids.push_back(*id);
        }
    if (f.failed()) return f.error();
    return ids;
}

Parsed<std::string> parse_id_request(std::string_view text, const ApiLimits& limits) {
    Parsed<JsonDocument> json = parse_object(text, limits);
    if (!json) return std::unexpected(json.error());
    JsonFields  f(*json);
    std::string id = f.text("id", 128);
    if (id.empty()) f.fail("id", "id is missing");
    if (f.failed()) return f.error();
    return id;
}

} // namespace quire
