// quire.serve.openai_api: the routes /v1/completions and /v1/chat/completions. Owns nothing.
export module quire.serve.openai_api;

import quire.core.base;
import quire.core.std;
import quire.serve.answer;
import quire.serve.api_context;
import quire.serve.generate;
import quire.serve.http_exchange;
import quire.serve.openai_request;
import quire.serve.openai_response;

export namespace quire {

void answer_completion(ApiContext& api, HttpExchange& e);
void answer_chat(ApiContext& api, HttpExchange& e);

} // namespace quire

module :private;

namespace quire {

namespace {

std::unique_ptr<AnswerRenderer> render(const ResponseHead& head, const GenerationRequest&,
                                       const std::vector<std::string>&) {
    return openai_renderer(head);
}

} // namespace

void answer_completion(ApiContext& api, HttpExchange& e) {
    generate(api, e, parse_completion_request(e.request.body, api.options.limits), "prompt", render);
}

void answer_chat(ApiContext& api, HttpExchange& e) {
    generate(api, e, parse_chat_request(e.request.body, api.options.limits), "messages", render);
}

} // namespace quire
