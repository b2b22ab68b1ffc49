// Any bytes as the body of any endpoint, as headers and as chunks: each is parsed within its limits or gives an error
// message, and every parsed request can be answered in JSON.
#include <cstddef>
#include <cstdint>

import quire.core.base;
import quire.core.json;
import quire.core.std;
import quire.schedule.request;
import quire.serve.anthropic.request;
import quire.serve.api.answer;
import quire.serve.api.error;
import quire.serve.api.generation_request;
import quire.serve.api.limits;
import quire.serve.http.exchange;
import quire.serve.http.parser;
import quire.serve.openai.embeddings;
import quire.serve.openai.request;
import quire.serve.openai.response;
import quire.serve.openai.responses_request;
import quire.serve.status.text_request;

using namespace quire;

namespace {

const ApiLimits& limits() {
    static const ApiLimits l = [] {
        ApiLimits made;
        made.models     = {"tiny"};
        made.vocab_size = 1000;
        made.context    = 128;
        return made;
    }();
    return l;
}

void look(const Parsed<GenerationRequest>& r) {
    if (!r) {
        check(r.error().status >= 400 && r.error().status < 500 && !r.error().message.empty(),
              "an error without a reason");
        check(json_parse(error_body(r.error())).has_value(), "an error that is no JSON");
        return;
    }
    const Request& q = r->request;
    check(q.n >= 1 && q.n <= limits().n && q.width() <= limits().best_of, "a number of answers beyond its limit");
    check(q.sampling.temperature >= 0 && q.sampling.top_p > 0 && q.sampling.top_p <= 1, "a parameter beyond its range");
    for (Token t : q.stop_tokens) check(t >= 0 && t < limits().vocab_size, "a token outside the vocabulary");
    for (const Prompt& prompt : r->prompts)
        for (const PromptPart& part : prompt)
            if (const auto* ids = std::get_if<std::vector<Token>>(&part))
                for (Token t : *ids) check(t >= 0 && t < limits().vocab_size, "a token outside the vocabulary");
    for (const std::string& stop : r->stop) check(!stop.empty(), "an empty stop string");
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string_view text(reinterpret_cast<const char*>(data), size);
    look(parse_completion_request(text, limits()));
    look(parse_chat_request(text, limits()));
    look(parse_messages_request(text, limits(), false));
    look(parse_messages_request(text, limits(), true));
    if (Parsed<ResponsesRequest> r = parse_responses_request(text, limits())) look(std::move(r->generation));
    else look(std::unexpected(r.error()));
    (void)parse_embedding_request(text, limits());
    (void)parse_text_request(text, limits());
    (void)parse_detokenize_request(text, limits());
    (void)parse_id_request(text, limits());

    HttpLimits http;
    http.body_bytes = 1000;
    (void)parse_http_head(text, http);
    std::string  whole, pieces, rest;
    std::size_t  at = 0;
    ChunkDecoder one, many;
    const auto   at_once = one.feed(text, at, whole, http);
    for (char c : text) { // byte by byte it is the same
        rest += c;
        std::size_t from = 0;
        const auto  done = many.feed(rest, from, pieces, http);
        rest.erase(0, from);
        if (!done || *done) break;
    }
    check(whole.size() <= http.body_bytes && pieces.size() <= http.body_bytes, "a body beyond its limit");
    if (at_once && *at_once) check(whole == pieces, "a body that depends on how it came");
    return 0;
}
