// quire.serve.http.server_sent_events: one event of a stream as text. Owns nothing.
export module quire.serve.http.server_sent_events;

import quire.core.base;

export namespace quire {

std::string event(std::string_view data);
std::string event(std::string_view name, std::string_view data);
// A comment, which clients skip: the connection lives.
constexpr std::string_view comment_event = ":\n\n";

} // namespace quire

module :private;

namespace quire {

std::string event(std::string_view data) { return cat("data: ", data, "\n\n"); }
std::string event(std::string_view name, std::string_view data) {
    return cat("event: ", name, "\ndata: ", data, "\n\n");
}

} // namespace quire
