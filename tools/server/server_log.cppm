// quire.tools.server.server_log: the server's log: on standard output a line for each request, without keys and texts; on standard error
// sentences about the server; or all of them in a file. No thread of the server waits for the reader of the log. **Owns** the threads that
// write the lines, and the file.
module;

#include <fcntl.h>
#include <unistd.h>
#include <cerrno>
#include <ctime>

export module quire.tools.server.server_log;

import quire.core.base;
import quire.core.json;
import quire.core.line_writer;
import quire.serve.http.exchange;

export namespace quire {

enum class LogLevel : std::uint8_t { error, warning, info, debug };

struct LogOptions {
    bool        json = false; // all lines are JSON
    LogLevel    most = LogLevel::info;
    std::string file; // where all lines go, appended; sentences go to standard error as well
};

// Any thread.
class ServerLog {
public:
    // Error: a file that cannot be opened.
    static Result<std::unique_ptr<ServerLog>> open(LogOptions options);
    ServerLog(const ServerLog&)            = delete;
    ServerLog& operator=(const ServerLog&) = delete;

    // A request that was answered; a probe of the server's health at the level `debug` only.
    void add(const HttpExchange& exchange, double seconds, std::size_t bytes);
    void say(const std::string& sentence, LogLevel level = LogLevel::info);
    // The lines to come go to the file that has the file's name now. Error: it cannot be opened, and the old one stays.
    Result<void> reopen();
    // Waits until all lines are written, as long as a reader takes them.
    void flush();

    std::uint64_t dropped() const { return out_.dropped() + err_.dropped(); }

private:
    ServerLog(LogOptions options, int file);

    LogOptions options_;
    int        file_; // or -1; never closed: a writer that hangs may outlive the log
    LineWriter out_, err_;
};

// Whether a request for this path probes the server's health.
bool is_probe(std::string_view path);

// The line of a request, without its line break. Values of the client's are cut.
std::string log_line(const HttpExchange& exchange, double seconds, std::size_t bytes, bool json);
// The line of a sentence about the server, likewise.
std::string sentence_line(std::string_view sentence, LogLevel level, bool json);

} // namespace quire

module :private;

namespace quire {

constexpr std::size_t longest_value = 200; // bytes

std::string_view name_of(LogLevel level) {
    constexpr std::string_view names[] = {"error", "warning", "info", "debug"};
    return names[int(level)];
}

// UTC, with milliseconds.
std::string clock_text() {
    std::timespec now{};
    std::timespec_get(&now, TIME_UTC);
    std::tm parts{};
    gmtime_r(&now.tv_sec, &parts);
    char text[40];
    std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &parts);
    std::snprintf(text + std::strlen(text), 8, ".%03dZ", int(now.tv_nsec / 1'000'000));
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

// A number as the note writes it, so that integers stay integers; another value as text.
Json note_value(const std::string& value) {
    if (is_number(value))
        if (const Result<Json> number = json_parse(value); number && number->is_number()) return *number;
    return cut_short(value, longest_value);
}

std::string dropped_line(std::uint64_t n, bool json) {
    if (json) return json_dump(Json{{"time", clock_text()}, {"level", "warning"}, {"dropped_lines", n}});
    return cat(clock_text(), " warning - dropped_lines=", n);
}

bool is_probe(std::string_view path) { return path == "/ping" || path.starts_with("/health") || path == "/v1/health"; }

LogLevel level_of(const HttpExchange& e) { return is_probe(e.request.path) ? LogLevel::debug : LogLevel::info; }

std::string sentence_line(std::string_view sentence, LogLevel level, bool json) {
    constexpr std::string_view warning = "warning: "; // other programs have no level beside the sentence
    if (level == LogLevel::warning && sentence.starts_with(warning)) sentence.remove_prefix(warning.size());
    const std::string time = clock_text();
    if (json) return json_dump(Json{{"time", time}, {"level", name_of(level)}, {"message", sentence}});
    return cat(time, ' ', name_of(level), " server: ", sentence);
}

std::string log_line(const HttpExchange& e, double seconds, std::size_t bytes, bool json) {
    const HttpRequest&     r     = e.request;
    const std::string_view level = name_of(level_of(e));
    if (json) {
        Json record{{"time", clock_text()},
                    {"level", level},
                    {"id", r.id},
                    {"remote", r.remote},
                    {"method", cut_short(r.method, longest_value)},
                    {"path", cut_short(r.path, longest_value)},
                    {"status", e.response.status},
                    {"seconds", seconds},
                    {"bytes", bytes}};
        for (const auto& [key, value] : e.notes) {
            if (key == "unknown_field") record["unknown_fields"].push_back(cut_short(value, longest_value));
            else record[key] = note_value(value);
        }
        return json_dump(record);
    }
    char time[32];
    std::snprintf(time, sizeof time, "%.3f", seconds);
    std::string line = cat(clock_text(), ' ', level, ' ', r.id.empty() ? "-" : r.id, ' ', r.remote, ' ',
                           r.method.empty() ? "-" : log_value(r.method), ' ', r.path.empty() ? "-" : log_value(r.path),
                           ' ', e.response.status, ' ', static_cast<const char*>(time), "s");
    for (const auto& [key, value] : e.notes) line += cat(' ', key, '=', log_value(value));
    return line;
}

Result<int> open_log(const std::string& path) {
    const int fd = ::open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0640);
    if (fd < 0) return fail_with(ErrorKind::system, "cannot write the log ", quote(path), ": ", std::strerror(errno));
    return fd;
}

ServerLog::ServerLog(LogOptions options, int file)
    : options_(std::move(options)), file_(file),
      out_(file >= 0 ? file : STDOUT_FILENO, [json = options_.json](std::uint64_t n) { return dropped_line(n, json); }),
      err_(STDERR_FILENO, [json = options_.json](std::uint64_t n) { return dropped_line(n, json); }) {}

Result<std::unique_ptr<ServerLog>> ServerLog::open(LogOptions options) {
    int file = -1;
    if (!options.file.empty()) {
        const Result<int> opened = open_log(options.file);
        if (!opened) return std::unexpected(opened.error());
        file = *opened;
    }
    return std::unique_ptr<ServerLog>(new ServerLog(std::move(options), file));
}

Result<void> ServerLog::reopen() {
    if (file_ < 0) return {};
    const Result<int> fresh = open_log(options_.file);
    if (!fresh) return std::unexpected(fresh.error());
    dup3(*fresh, file_, O_CLOEXEC); // the writer's descriptor leads to the new file
    close(*fresh);
    return {};
}

void ServerLog::add(const HttpExchange& e, double seconds, std::size_t bytes) {
    if (level_of(e) > options_.most) return;
    out_.write(log_line(e, seconds, bytes, options_.json));
}

void ServerLog::say(const std::string& sentence, LogLevel level) {
    if (level > options_.most) return;
    const std::string line = sentence_line(sentence, level, options_.json);
    err_.write(line);
    if (file_ >= 0) out_.write(line);
}

void ServerLog::flush() {
    out_.flush();
    err_.flush();
}

} // namespace quire
