// quire.serve.openai.api: the routes /v1/completions and /v1/chat/completions. Owns nothing.
export module quire.serve.openai.api;

import quire.core.base;
import quire.serve.api.generate;
import quire.serve.openai.request;
import quire.serve.openai.response;

export namespace quire {

void answer_completion(ApiContext& api, HttpExchange& e);
void answer_chat(ApiContext& api, HttpExchange& e);
// /chat/completions/input_tokens: how many tokens the prompt of that chat has, as in llama.cpp.
void answer_chat_tokens(ApiContext& api, HttpExchange& e);
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

void answer_chat(ApiContext& api, HttpExchange& e) {
    generate(api, e, parse_chat_request(e.request.body, api.options.limits), "messages", render);
}

} // namespace quire
