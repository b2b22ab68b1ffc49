// quire.serve.openai.unsupported_fields: the fields of OpenAI, vLLM and llama.cpp that quire knows and does not implement. Owns nothing.
export module quire.serve.openai.unsupported_fields;

import quire.core.base;
import quire.serve.api.json_fields;

export namespace quire {

// Sets an error for a field whose value asks for a function that quire lacks. `reasoning_effort`: the chat template takes that field;
// `tools`: the endpoint takes tools and tool_choice, and no suffix.
void refuse_unsupported(JsonFields& f, bool reasoning_effort, bool tools);

} // namespace quire

module :private;

namespace quire {

// Fields that quire does not implement, and the values that are accepted: because they ask for nothing, or because clients send them
// unasked and an answer without their effect is as good.
struct Unsupported {
    const char* name;
    const char* accepted; // a JSON list
};

constexpr Unsupported unsupported[] = {
    // OpenAI
    {"suffix", R"([""])"},
    {"tools", "[[]]"},
    {"tool_choice", R"(["none","auto"])"},
    {"functions", "[[]]"},
    {"function_call", R"(["none"])"},
    {"modalities", R"([["text"],[]])"},
    {"audio", "[]"},
    {"prediction", "[]"},
    {"web_search_options", "[]"},
    {"reasoning_effort", R"(["none","minimal","low","medium","high","xhigh","max"])"},
    {"verbosity", R"(["low","medium","high"])"},
    {"store", "[true,false]"},
    {"service_tier", R"(["auto","default"])"},
    {"moderation", "[]"},
    // vLLM
    {"guided_decoding_backend", "[]"},
    {"guided_whitespace_pattern", "[]"},
    {"structural_tag", "[]"},
    {"mm_processor_kwargs", "[{}]"},
    {"media_io_kwargs", "[{}]"},
    {"prompt_embeds", "[]"},
    {"logits_processors", "[[]]"},
    {"kv_transfer_params", "[{}]"},
    {"vllm_xargs", "[{}]"},
    {"repetition_detection", "[]"},
    {"spaces_between_special_tokens", "[true]"},
    {"include_reasoning", "[true,false]"},
    {"logprob_token_ids", "[]"},
    {"bad_words_ids", "[]"},
    // llama.cpp
    {"grammar_lazy", "[false]"},
    {"grammar_triggers", "[[]]"},
    {"adaptive_target", "[-1]"},
    {"min_keep", "[0]"},
    {"t_max_predict_ms", "[0,-1]"},
    {"n_indent", "[0]"},
    {"image_data", "[[]]"},
    {"n_cmpl", "[1]"},
    {"input_prefix", R"([""])"},
    {"input_suffix", R"([""])"},
    {"input_extra", "[[]]"},
};

// Fields that have no effect here, whatever their value: names of users, settings of samplers that are off, labels, what
// /completion alone reads.
constexpr std::string_view idle =
    "user metadata safety_identifier prompt_cache_key adaptive_decay parallel_tool_calls prompt_cache_retention "
    "response_fields reasoning_format preserved_tokens generation_prompt";

std::string listed(const Json& accepted) {
    std::string list;
    for (const Json& value : accepted) list += cat(list.empty() ? "" : " or ", json_dump(value));
    return list.empty() ? list : cat(" here; only ", list, " is accepted");
}

void refuse_unsupported(JsonFields& f, bool reasoning_effort, bool tools) {
    for (const Unsupported& u : unsupported) {
        if (reasoning_effort && std::string_view(u.name) == "reasoning_effort") continue;
        if (tools && std::string_view(u.name).starts_with("tool")) continue;
        if (!tools && std::string_view(u.name) == "suffix") continue;
        const Json* v = f.find(u.name);
        if (f.recording()) f.describe(u.name, cat(R"({"enum":)", u.accepted, "}"));
        if (!v) continue;
        const Json accepted = Json::parse(u.accepted);
        if (std::ranges::find(accepted, *v) == accepted.end())
            f.fail(u.name, cat(u.name, " is not supported", listed(accepted)));
    }
    for (std::string_view name : split(idle)) (void)f.find(std::string(name));
}

} // namespace quire
