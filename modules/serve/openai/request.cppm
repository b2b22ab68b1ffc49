// quire.serve.openai.request: the bodies of /v1/completions and /v1/chat/completions, JSON text → values, with the field names of OpenAI,
// vLLM and llama.cpp. Uses no sockets, no engine and no tokenizer. Owns nothing.
export module quire.serve.openai.request;

import quire.core.base;
export import quire.core.json;
export import quire.serve.api.error;
export import quire.serve.api.generation_request;
export import quire.serve.api.limits;
import quire.serve.api.request_fields;
import quire.serve.openai.constraint_fields;
import quire.serve.openai.conversation_fields;
import quire.serve.openai.sampler_fields;
import quire.serve.openai.tool_request;
import quire.serve.openai.unsupported_fields;

export namespace quire {

Parsed<GenerationRequest> parse_completion_request(std::string_view json, const ApiLimits& limits);
Parsed<GenerationRequest> parse_chat_request(std::string_view json, const ApiLimits& limits);
// These functions for parsed bodies; other APIs' requests are translated into such bodies. `native`: llama.cpp's form of completions.
Parsed<GenerationRequest> read_completion_request(const Json& body, const ApiLimits& limits, bool native = false);
Parsed<GenerationRequest> read_chat_request(const Json& body, const ApiLimits& limits);

// A field of /v1/completions that llama.cpp's form of completions lacks. `idle`: the values that ask for nothing, a list in JSON.
struct CompletionField {
    const char *name, *idle;
};
constexpr CompletionField of_completions[] = {
    {"echo", "[false]"}, {"best_of", "[1]"}, {"use_beam_search", "[false]"}, {"prompt_logprobs", "[]"}};

} // namespace quire

module :private;

namespace quire {

void parse_stream(JsonFields& f, GenerationRequest& out) {
    out.stream          = f.boolean("stream", false);
    const Json* options = f.object("stream_options");
    if (!options) return;
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
        if (!out.chat) f.describe(name, R"({"enum":[-1]})");
        const int given = f.integer(name, -1, huge, -1);
        if (!f.has(name)) continue;
        budget = given;
        if (budget >= 0 && !out.chat) f.fail(name, cat(name, " belongs to /v1/chat/completions"));
        if (budget >= 0 && r.beam_width > 0) f.fail(name, cat(name, " does not go with beam search"));
    }
    if (out.chat && r.beam_width == 0) out.reasoning_budget = budget;
    out.reasoning_control = f.boolean("reasoning_control", false) && out.chat && r.beam_width == 0;
    if (!out.chat) f.describe("truncation", R"({"enum":["disabled"]})");
    const std::string truncation =
        f.choice("truncation", {"auto", "disabled"}, limits.trim_chats && out.chat ? "auto" : "disabled");
    if (truncation == "auto" && !out.chat) f.fail("truncation", "truncation belongs to /v1/chat/completions");
    out.trim        = truncation == "auto";
    r.context_shift = limits.context_shift;
    out.has_keep    = f.has("n_keep");
    r.n_keep        = f.integer("n_keep", -1, huge, 0);
    r.n_discard     = f.integer("n_discard", 0, huge, 0);
    r.most_drafts   = f.integer("speculative.n_max", 0, huge, -1); // its absence: as the server says
    r.least_drafts  = f.integer("speculative.n_min", 0, huge, -1);
    if (r.most_drafts >= 0) r.least_drafts = std::min(r.least_drafts, r.most_drafts); // as in llama.cpp
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
    f.describe("lora", R"({"type":"array","items":{"type":"object"}})");
    if (const Json* lora = f.find("lora"); lora && *lora != Json::array()) {
        Parsed<std::vector<AdapterUse>> uses = adapter_uses(*lora, "lora");
        if (!uses) f.fail(uses.error());
        else r.adapters = std::move(*uses);
    }
    r.priority       = f.integer("priority", -1'000'000, 1'000'000, 0);
    r.cache_salt     = f.text("cache_salt", 1024);
    out.cache_prompt = f.boolean("cache_prompt", true);
    (void)f.find("id_slot");
    if (limits.slots > 0)
        if (const int slot = f.integer("id_slot", -1, limits.slots - 1, -1); slot >= 0) out.slot = slot;
    out.return_token_ids = f.boolean("return_token_ids", false) || f.boolean("return_tokens", false);
    out.tokens_as_ids    = f.boolean("return_tokens_as_token_ids", false);
    out.truncate_prompt  = f.integer("truncate_prompt_tokens", -1, huge, 0);
    out.prompt_logprobs  = f.integer("prompt_logprobs", 0, limits.logprobs, -1);
    if (out.prompt_logprobs >= 0 && out.stream) f.fail("prompt_logprobs", "prompt_logprobs does not go with stream");
    if (out.stream && r.beam_width == 0 && r.best_of > r.n)
        f.fail("best_of", "best_of above n does not go with stream: the best is known at the end");
    r.return_progress     = f.boolean("return_progress", false) && out.stream;
    out.timings_per_token = f.boolean("timings_per_token", false);
    out.verbose           = f.boolean("verbose", limits.verbose);
    out.show_prompt       = out.verbose;
    if (const std::string id = f.text("request_id", 1024); is_plain_word(id)) out.id = id; // as of X-Request-Id
    refuse_unsupported(f, out.chat && limits.reasoning_effort, out.chat);
}

// llama.cpp's wish for probabilities after the samplers, in place of log-probabilities before them.
void parse_after_samplers(JsonFields& f, GenerationRequest& out) {
    SamplingParams& p = out.request.sampling;
    p.after_samplers  = f.boolean("post_sampling_probs", false);
    if (p.after_samplers && out.request.beam_width > 0)
        f.fail("post_sampling_probs", "post_sampling_probs does not go with beam search");
}

// llama.cpp's name for log-probabilities; 0 is none.
int parse_n_probs(JsonFields& f, const ApiLimits& limits) {
    return f.integer("n_probs", 0, std::max(limits.logprobs, limits.probs), 0);
}

Parsed<GenerationRequest> parse_completion_request(std::string_view text, const ApiLimits& limits) {
    Parsed<JsonDocument> json = parse_object(text, limits);
    return json ? read_completion_request(*json, limits) : std::unexpected(json.error());
}

Parsed<GenerationRequest> read_completion_request(const Json& body, const ApiLimits& limits, bool native) {
    JsonFields        f(body);
    GenerationRequest out;
    f.describe("top_logprobs", R"({"enum":[0]})");
    for (const char* name : {"messages", "chat_template"}) f.describe(name, R"({"enum":[]})");
    if (!native) f.describe("post_sampling_probs", R"({"enum":[false]})");
    for (const auto& [name, idle] : of_completions)
        if (native && f.recording()) f.describe(name, cat(R"({"enum":)", idle, "}"));
    parse_common(f, out, limits);
    out.prompts            = parse_prompts(f, "prompt", limits);
    out.add_special_tokens = f.boolean("add_special_tokens", true);
    out.echo               = f.boolean("echo", false);
    if (const std::string suffix = f.text("suffix", limits.json.bytes); !suffix.empty())
        out.infill.emplace().suffix = suffix;
    if (out.infill && out.echo) f.fail("suffix", "suffix does not go with echo");
    int logprobs = -1;
    if (const int n = parse_n_probs(f, limits); n > 0) logprobs = n;
    logprobs                      = f.integer("logprobs", 0, limits.logprobs, logprobs);
    out.logprobs                  = logprobs >= 0;
    out.request.sampling.logprobs = logprobs;
    if (f.integer("top_logprobs", 0, limits.logprobs, 0) > 0)
        f.fail("top_logprobs", "top_logprobs belongs to /v1/chat/completions");
    parse_after_samplers(f, out);
    if (out.request.sampling.after_samplers && !native)
        f.fail("post_sampling_probs", "post_sampling_probs belongs to /completion and /v1/chat/completions");
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
    out.chat = true;
    f.describe("echo", R"({"enum":[false]})");
    f.describe("prompt", R"({"enum":[]})");
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
    parse_after_samplers(f, out);
    for (const std::string& name : f.unknown()) out.unknown.push_back(name);
    if (f.failed()) return f.error();
    return out;
}

} // namespace quire
