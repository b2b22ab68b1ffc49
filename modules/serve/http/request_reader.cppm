// quire.serve.http.request_reader: the bytes that a connection has received → a complete request, within limits. Owns nothing.
export module quire.serve.http.request_reader;

import quire.core.base;
import quire.serve.http.connection;

export namespace quire {

// Appends n received bytes to the connection's bytes that are not parsed yet.
void append_received(Connection& c, const char* bytes, std::size_t n);
// Parses as much as has been received. Returns whether the request is complete. Error: the response that refuses it.
std::expected<bool, HttpError> read_request(Connection& c, const HttpLimits& limits);
// Sends the line that a client with `Expect: 100-continue` waits for, if no part of its body has come.
void say_continue(Connection& c);

} // namespace quire

module :private;

namespace quire {

void append_received(Connection& c, const char* bytes, std::size_t n) {
    if (c.phase == Phase::body && c.in.size() + n > c.in.capacity()) { // no more than the body needs
        std::string wider;
        wider.reserve(std::max(c.in.size() + n, std::min(c.in.capacity() * 2, c.head.length)));
        c.in.swap(wider.append(c.in));
    }
    c.in.append(bytes, n);
}

void say_continue(Connection& c) {
    if (!c.head.expects_continue || !c.in.empty() || !c.body.empty()) return;
    constexpr std::string_view text = "HTTP/1.1 100 Continue\r\n\r\n";
    (void)c.transmit(text.data(), text.size());
}

// Moves the phase on where the head is complete.
std::expected<void, HttpError> look_for_head(Connection& c, const HttpLimits& limits) {
    constexpr std::size_t most_blank = 16; // some clients send one after a body
    std::string&          in         = c.in;
    if (c.searched == 0) {
        std::size_t at = 0;
        while (in.compare(at, 2, "\r\n") == 0) at += 2;
        in.erase(0, at);
        c.blank += at / 2;
        if (c.blank > most_blank)
            return http_error(400, cat("more than ", most_blank, " empty lines before a request"));
    }
    if (in == "\r") return {}; // the first half of another
    if (!c.begun && !in.empty()) {
        c.begun = true;
        c.since = Clock::now();
    }
    // Only CR LF ends a line: a proxy in between could see another request if a lone LF did, too.
    for (std::size_t i = c.searched; i < in.size(); i++)
        if (in[i] == '\0' || (in[i] == '\n' && (i == 0 || in[i - 1] != '\r')))
            return http_error(400, "a line of the head does not end in CR LF");
        else if (in[i] == '\n' && i >= 3 && in[i - 2] == '\n') {
            const std::size_t end    = i + 1;
            auto              parsed = parse_http_head(std::string_view(in).substr(0, end), limits);
            if (!parsed) return std::unexpected(parsed.error());
            c.head = std::move(*parsed);
            in.erase(0, end);
            c.searched = 0;
            c.body.clear();
            c.chunks = {};
            c.phase  = c.head.chunked ? Phase::chunks : Phase::body;
            return {};
        }
    c.searched = in.size();
    if (in.size() > limits.head_bytes) {
        const bool line = in.find("\r\n") == std::string::npos;
        return http_error(line ? 414 : 431, cat("the head has more than ", limits.head_bytes, " bytes"));
    }
    return {};
}

std::expected<bool, HttpError> read_request(Connection& c, const HttpLimits& limits) {
    if (c.phase == Phase::head)
        if (auto ok = look_for_head(c, limits); !ok) return std::unexpected(ok.error());
    bool whole = false;
    if (c.phase == Phase::body && c.in.size() >= c.head.length) {
        c.body = c.in.substr(c.head.length); // of the next request
        c.in.resize(c.head.length);
        c.body.swap(c.in);
        whole = true;
    } else if (c.phase == Phase::chunks) {
        std::size_t at   = 0;
        const auto  done = c.chunks.feed(c.in, at, c.body, limits);
        c.in.erase(0, at);
        if (!done) return std::unexpected(done.error());
        whole = *done;
    }
    return whole;
}

} // namespace quire
