// quire.tools.server.server_log: the server's log: on standard output a line for each request, without keys and texts; on standard error
// sentences about the server. No thread of the server waits for the reader of the log. **Owns** the threads that write the lines.
module;

#include <unistd.h>
#include <ctime>

export module quire.tools.server.server_log;

import quire.core.base;
import quire.core.json;
import quire.core.line_writer;
import quire.serve.http.exchange;

export namespace quire {

// Any thread.
class ServerLog {
public:
    // `json`: the lines of requests are JSON.
    explicit ServerLog(bool json);

    // A request that was answered.
    void add(const HttpExchange& exchange, double seconds, std::size_t bytes);
    void say(const std::string& sentence);
    // Waits until all lines are written, as long as a reader takes them.
    void flush();

    std::uint64_t dropped() const { return out_.dropped() + err_.dropped(); }

private:
    bool       json_;
    LineWriter out_, err_;
};

// The line of a request, without its line break. Values of the client's are cut.
std::string log_line(const HttpExchange& exchange, double seconds, std::size_t bytes, bool json);

} // namespace quire

module :private;

namespace quire {

constexpr std::size_t longest_value = 200; // bytes

std::string clock_text() {
    const std::time_t now = std::time(nullptr);
    std::tm           parts{};
    gmtime_r(&now, &parts);
    char text[32];
    std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
    return text;
}

// A value in quotes where a reader could take it for several values or lines.
std::string log_value(std::string_view text) {
    std::string out(text.substr(0, longest_value));
    for (char& c : out)
        if (c < 0x20 || c > 0x7e) c = '?';
    return out.find_first_of(" \"\\") == std::string::npos ? out : json_dump(Json(out));
}

bool is_number(const std::string& text) { return to_number<double>(text).has_value(); }

std::string dropped_line(std::uint64_t n, bool json) {
    if (json) return json_dump(Json{{"time", clock_text()}, {"dropped_lines", n}});
    return cat(clock_text(), " - dropped_lines=", n);
}

std::string log_line(const HttpExchange& e, double seconds, std::size_t bytes, bool json) {
    const HttpRequest& r = e.request;
    if (json) {
        Json record{{"time", clock_text()},
                    {"id", r.id},
                    {"remote", r.remote},
                    {"method", cut_short(r.method, longest_value)},
                    {"path", cut_short(r.path, longest_value)},
                    {"status", e.response.status},
                    {"seconds", seconds},
                    {"bytes", bytes}};
        for (const auto& [key, value] : e.notes) {
            const std::string shown = cut_short(value, longest_value);
            if (key == "unknown_field") record["unknown_fields"].push_back(shown);
            else if (is_number(value)) record[key] = std::strtod(value.c_str(), nullptr);
            else record[key] = shown;
        }
        return json_dump(record);
    }
    char time[32];
    std::snprintf(time, sizeof time, "%.3f", seconds);
    std::string line = cat(clock_text(), ' ', r.id.empty() ? "-" : r.id, ' ', r.remote, ' ',
                           r.method.empty() ? "-" : log_value(r.method), ' ', r.path.empty() ? "-" : log_value(r.path),
                           ' ', e.response.status, ' ', static_cast<const char*>(time), "s");
    for (const auto& [key, value] : e.notes) line += cat(' ', key, '=', log_value(value));
    return line;
}

ServerLog::ServerLog(bool json)
    : json_(json), out_(STDOUT_FILENO, [json](std::uint64_t n) { return dropped_line(n, json); }),
      err_(STDERR_FILENO, [](std::uint64_t n) { return cat("server: ", n, " lines were dropped here"); }) {}

void ServerLog::add(const HttpExchange& e, double seconds, std::size_t bytes) {
    out_.write(log_line(e, seconds, bytes, json_));
}

void ServerLog::say(const std::string& sentence) { err_.write(cat("server: ", sentence)); }

void ServerLog::flush() {
    out_.flush();
    err_.flush();
}

} // namespace quire
