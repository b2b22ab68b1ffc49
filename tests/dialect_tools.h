// Requests and streams of the server's APIs. Included behind the imports of their modules, and behind server_process.h.
#pragma once

namespace quire::testing {

// `strict`: requests have to name the model.
inline ApiLimits limits(bool strict = false) {
    ApiLimits l;
    l.models       = {"tiny"};
    l.strict_model = strict;
    l.vocab_size   = 100;
    l.context      = 64;
    return l;
}

inline Json json_of(const std::string& text) {
    Result<Json> json = json_parse(text);
    INFO(text);
    REQUIRE(json.has_value());
    return *json;
}

struct Event {
    std::string name;
    Json        data;
};
inline std::vector<Event> events_of(const std::string& body) {
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

inline Choice piece_of(std::vector<AnswerPart> parts, const std::string& finish = "") {
    Choice c;
    c.parts         = std::move(parts);
    c.finish_reason = finish;
    return c;
}
inline AnswerPart text_part(const std::string& text) { return {AnswerPart::Kind::content, text, {}}; }
inline AnswerPart thought(const std::string& text) { return {AnswerPart::Kind::reasoning, text, {}}; }
inline AnswerPart call(const std::string& name, const std::string& arguments) {
    return {AnswerPart::Kind::call, "", {name, arguments}};
}
inline AnswerPart more(const std::string& arguments) { // of the call before
    AnswerPart part = call("", arguments);
    part.call.more  = true;
    return part;
}

// The stream of an answer whose parts come in these pieces, and the same parts as a whole answer.
struct Both {
    std::vector<Event> events;
    Json               whole;
};
inline Both both(const std::function<std::unique_ptr<AnswerRenderer>()>& make, std::vector<Choice> pieces,
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

inline Server& dialect_server() {
    static Server server({"--tool-format", "hermes"});
    return server;
}

} // namespace quire::testing
