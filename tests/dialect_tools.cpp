// The functions of dialect_tools.h, compiled once for all tests.
#include <catch2/catch_test_macros.hpp>

#include "server_process.h"

import quire.core.base;
import quire.core.json;
import quire.core.std;
import quire.serve.api.answer;
import quire.serve.api.limits;

#include "dialect_tools.h"

namespace quire::testing {

ApiLimits limits(bool strict) {
    ApiLimits l;
    l.models       = {"tiny"};
    l.strict_model = strict;
    l.vocab_size   = 100;
    l.context      = 64;
    return l;
}

Json json_of(const std::string& text) {
    Result<Json> json = json_parse(text);
    INFO(text);
    REQUIRE(json.has_value());
    return *json;
}

std::vector<Event> events_of(const std::string& body) {
    std::vector<Event> out;
    for (std::size_t at = 0; at < body.size();) {
        const std::size_t end = body.find("\n\n", at);
        REQUIRE(end != std::string::npos);
        std::string text = body.substr(at, end - at);
        at               = end + 2;
        if (text.starts_with(":")) continue;
        Event& e = out.emplace_back();
        if (text.starts_with("event: ")) {
            const std::size_t line = text.find('\n');
            e.name                 = text.substr(7, line - 7);
            text.erase(0, line + 1);
        }
        REQUIRE(text.starts_with("data: "));
        e.data = json_of(text.substr(6));
    }
    return out;
}

Choice piece_of(std::vector<AnswerPart> parts, const std::string& finish) {
    Choice c;
    c.parts         = std::move(parts);
    c.finish_reason = finish;
    return c;
}
AnswerPart text_part(const std::string& text) { return {AnswerPart::Kind::content, text, {}}; }
AnswerPart thought(const std::string& text) { return {AnswerPart::Kind::reasoning, text, {}}; }
AnswerPart call(const std::string& name, const std::string& arguments) {
    return {AnswerPart::Kind::call, "", {name, arguments}};
}
AnswerPart more(const std::string& arguments) {
    AnswerPart part = call("", arguments);
    part.call.more  = true;
    return part;
}

Both both(const std::function<std::unique_ptr<AnswerRenderer>()>& make, std::vector<Choice> pieces,
          const Usage& usage) {
    Both        out;
    Choice      all;
    const auto  stream = make();
    std::string text   = stream->begin(usage);
    for (Choice& c : pieces) {
        append(all, c);
        text += stream->piece(std::move(c), usage);
    }
    text += stream->end(usage);
    out.events = events_of(text);
    out.whole  = json_of(make()->response({all}, usage));
    return out;
}

Server& dialect_server() {
    static Server server({"--tool-format", "hermes"});
    return server;
}

} // namespace quire::testing
