// quire.serve.openai.api: the routes /v1/completions and /v1/chat/completions. Owns nothing.
export module quire.serve.openai.api;

import quire.core.base;
import quire.serve.api.generate;
import quire.serve.openai.request;
import quire.serve.openai.response;

export namespace quire {

void answer_completion(ApiContext& api, HttpExchange& e);
void answer_chat(ApiContext& api, HttpExchange& e);

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

void answer_chat(ApiContext& api, HttpExchange& e) {
    generate(api, e, parse_chat_request(e.request.body, api.options.limits), "messages", render);
}

} // namespace quire
