// quire.serve.openai.api: the routes /v1/completions and /v1/chat/completions. Owns nothing.
export module quire.serve.openai.api;

import quire.core.base;
import quire.serve.api.access;
import quire.serve.api.generate;
import quire.serve.api.request_fields;
import quire.serve.openai.request;
import quire.serve.openai.response;

export namespace quire {

void answer_completion(ApiContext& api, HttpExchange& e);
void answer_chat(ApiContext& api, HttpExchange& e);
// /chat/completions/input_tokens: how many tokens the prompt of that chat has, as in llama.cpp.
void answer_chat_tokens(ApiContext& api, HttpExchange& e);
// /chat/completions/control: ends the reasoning of a chat's answer that runs, as in llama.cpp. An answer of another API key is as one that does
// not run.
Parsed<std::string> parse_control_request(std::string_view json, const ApiLimits& limits); // the answer's id
void                answer_chat_control(ApiContext& api, HttpExchange& e);
// Answers with the number of tokens of a request's whole prompt. `param`: the field with the prompt.
void answer_input_tokens(ApiContext& api, HttpExchange& e, Parsed<GenerationRequest> parsed, const std::string& param);

} // namespace quire

module :private;

namespace quire {

std::unique_ptr<AnswerRenderer> render(const ResponseHead& head, const GenerationRequest&,
                                       const std::vector<std::string>&) {
    return openai_renderer(head);
}

void answer_completion(ApiContext& api, HttpExchange& e) {
    generate(api, e, parse_completion_request(e.request.body, api.options.limits), "prompt", render);
}

void answer_input_tokens(ApiContext& api, HttpExchange& e, Parsed<GenerationRequest> parsed, const std::string& param) {
    if (!parsed) return api.refuse(e, parsed.error());
    parsed->trim                         = false;
    const Parsed<EncodedPrompts> encoded = encode_prompts(api, *parsed, param, 0);
    if (!encoded) return api.refuse(e, encoded.error());
    answer_json(e, Json{{"object", "response.input_tokens"}, {"input_tokens", encoded->tokens[0].size()}});
}

void answer_chat_tokens(ApiContext& api, HttpExchange& e) {
    answer_input_tokens(api, e, parse_chat_request(e.request.body, api.options.limits), "messages");
}

Parsed<std::string> parse_control_request(std::string_view text, const ApiLimits& limits) {
    Parsed<JsonDocument> json = parse_object(text, limits);
    if (!json) return std::unexpected(json.error());
    JsonFields f(*json);
    parse_model(f, limits);
    std::string       id     = f.text("id", 1024);
    const std::string action = f.choice("action", {"reasoning_end"}, "");
    if (id.empty()) f.fail("id", "id is missing");
    if (action.empty()) f.fail("action", "action is missing");
    if (f.failed()) return f.error();
    return id;
}

void answer_chat_control(ApiContext& api, HttpExchange& e) {
    Parsed<std::string> id = parse_control_request(e.request.body, api.options.limits);
    if (!id) return api.refuse(e, id.error());
    constexpr std::string_view prefix = "chatcmpl-"; // of the id in responses
    if (id->starts_with(prefix)) id->erase(0, prefix.size());
    if (api.reasoning.stop(std::string(given_key(e.request)), *id)) return answer_json(e, Json{{"success", true}});
    answer_json(
        e, Json{{"success", false}, {"message", "no answer with this id runs whose request has reasoning_control"}});
}

void answer_chat(ApiContext& api, HttpExchange& e) {
    generate(api, e, parse_chat_request(e.request.body, api.options.limits), "messages", render);
}

} // namespace quire
