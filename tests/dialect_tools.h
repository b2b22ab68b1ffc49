// Requests and streams of the server's APIs. Included behind the imports of their modules, and behind server_process.h.
#pragma once

namespace quire::testing {

// `strict`: requests have to name the model.
ApiLimits limits(bool strict = false);

Json json_of(const std::string& text);

struct Event {
    std::string name;
    Json        data;
};
std::vector<Event> events_of(const std::string& body);

Choice     piece_of(std::vector<AnswerPart> parts, const std::string& finish = "");
AnswerPart text_part(const std::string& text);
AnswerPart thought(const std::string& text);
AnswerPart call(const std::string& name, const std::string& arguments);
AnswerPart more(const std::string& arguments); // of the call before

// The stream of an answer whose parts come in these pieces, and the same parts as a whole answer.
struct Both {
    std::vector<Event> events;
    Json               whole;
};
Both both(const std::function<std::unique_ptr<AnswerRenderer>()>& make, std::vector<Choice> pieces, const Usage& usage);

Server& dialect_server();

} // namespace quire::testing
