// quire.serve.http.parser: the bytes of an HTTP/1.x request → its head and its body, within limits. Uses no sockets. Owns nothing.
export module quire.serve.http.parser;

import quire.core.base;
export import quire.serve.http.exchange;

export namespace quire {

struct HttpLimits {
    std::size_t target_bytes = 4096;                  // of the request's target: 414
    std::size_t head_bytes   = 32768;                 // request line and headers: 431
    int         headers      = 100;                   // 431
    std::size_t body_bytes   = std::size_t(16) << 20; // 413
    std::size_t buffered_bytes =
        std::size_t(256) << 20; // that all requests hold together, until they are answered: 503; small ones go beyond
    int    connections     = 4096; // further ones take the place of an idle or incomplete one, or get a 503
    int    threads         = 4096; // requests that are answered at once; others wait
    double idle_seconds    = 75;   // between two requests
    double request_seconds = 30;   // from the first to the last byte of a request: 408
    double write_seconds   = 30;   // without progress: the reader is cut off
};

struct HttpError {
    int         status = 400;
    std::string message;
};

std::unexpected<HttpError> http_error(int status, std::string message) {
    return std::unexpected(HttpError{status, std::move(message)});
}

struct HttpHead {
    std::string method, target;
    int         minor = 1; // of HTTP/1.x
    HttpFields  headers;
    std::size_t length     = 0; // of the body, if has_length
    bool        has_length = false;
    bool        chunked = false, keep_alive = true, expects_continue = false;
};

// A request's head, up to and with the empty line. Refuses a head that a proxy could read in another way (request smuggling).
std::expected<HttpHead, HttpError> parse_http_head(std::string_view text, const HttpLimits& limits);

// Decodes a chunked body as it is received.
class ChunkDecoder {
public:
    // Moves the complete parts of `in`, from `at` on, to `body`. True at the end of the body.
    std::expected<bool, HttpError> feed(std::string_view in, std::size_t& at, std::string& body,
                                        const HttpLimits& limits);

private:
    enum class State { size, data, data_end, trailer } state_ = State::size;
    std::size_t remaining_ = 0, trailer_bytes_ = 0;
    std::size_t searched_ = 0; // bytes of a line's beginning without its end
};

} // namespace quire

module :private;

namespace quire {

bool is_token_char(char c) {
    return is_alphanumeric(c) || std::string_view("!#$%&'*+-.^_`|~").find(c) != std::string_view::npos;
}

bool is_token(std::string_view text) { return !text.empty() && std::ranges::all_of(text, is_token_char); }

std::string_view trim(std::string_view text) {
    const std::size_t first = text.find_first_not_of(" \t");
    return first == std::string_view::npos ? "" : text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

std::size_t count_fields(const HttpFields& fields, std::string_view name) {
    return std::size_t(std::ranges::count_if(fields, [&](const auto& field) { return field.first == name; }));
}

// A Host: a name or address, maybe a port; empty where a target has none.
bool is_authority(std::string_view text) {
    return std::ranges::all_of(text, [](char c) {
        return is_alphanumeric(c) || std::string_view("-._~!$&'()*+,;=%:[]").find(c) != std::string_view::npos;
    });
}

// A target in absolute form, as proxies get it, becomes a path; the host in it, which counts in place of the header's, is returned.
std::expected<std::optional<std::string>, HttpError> take_authority(std::string& target) {
    const std::string scheme = lower(std::string_view(target).substr(0, 8));
    const std::size_t begin  = scheme.starts_with("http://") ? 7 : scheme == "https://" ? 8 : 0;
    if (begin == 0) return std::nullopt;
    const std::size_t end       = std::min(target.find_first_of("/?", begin), target.size());
    std::string       authority = target.substr(begin, end - begin);
    if (authority.empty() || !is_authority(authority))
        return http_error(400, "the target has no host that can be read");
    target.erase(0, end);
    if (!target.starts_with('/')) target.insert(0, 1, '/');
    return authority;
}

// Body and connection, as all headers together define them.
std::expected<void, HttpError> interpret(HttpHead& head, const HttpLimits& limits) {
    for (const char* once : {"host", "content-length", "transfer-encoding", "content-type", "authorization", "origin"})
        if (count_fields(head.headers, once) > 1) return http_error(400, cat("more than one ", once, " header"));
    if (head.minor == 1 && count_fields(head.headers, "host") == 0)
        return http_error(400, "a request of HTTP/1.1 has no Host header");
    if (!is_authority(find_field(head.headers, "host")))
        return http_error(400, "the Host header is not a name with or without a port");
    const std::string_view length   = find_field(head.headers, "content-length");
    const std::string      encoding = lower(find_field(head.headers, "transfer-encoding"));
    if (count_fields(head.headers, "content-length") > 0) {
        const auto value = to_number<std::size_t>(length);
        if (!value || length.size() > 18) return http_error(400, "the content-length is not a number");
        if (*value > limits.body_bytes)
            return http_error(413, cat("the body has ", *value, " bytes; ", limits.body_bytes, " are allowed"));
        head.length     = *value;
        head.has_length = true;
    }
    if (count_fields(head.headers, "transfer-encoding") > 0) {
        if (head.has_length) return http_error(400, "both a content-length and a transfer-encoding");
        if (head.minor == 0) return http_error(400, "a transfer-encoding in HTTP/1.0");
        if (encoding != "chunked") return http_error(501, "the only transfer-encoding known here is chunked");
        head.chunked = true;
    }
    const std::string packed = lower(find_field(head.headers, "content-encoding"));
    if (!packed.empty() && packed != "identity") return http_error(415, "compressed bodies are not accepted");
    const std::string expect = lower(find_field(head.headers, "expect"));
    if (!expect.empty() && expect != "100-continue")
        return http_error(417, "the only expectation known is 100-continue");
    head.expects_continue        = !expect.empty();
    const std::string connection = lower(find_field(head.headers, "connection"));
    head.keep_alive              = head.minor == 1 ? connection.find("close") == std::string::npos
                                                   : connection.find("keep-alive") != std::string::npos;
    return {};
}

std::expected<HttpHead, HttpError> parse_http_head(std::string_view text, const HttpLimits& limits) {
    if (text.size() > limits.head_bytes)
        return http_error(431, cat("the head has more than ", limits.head_bytes, " bytes"));
    const auto next_line = [&]() -> std::optional<std::string_view> {
        const std::size_t end = text.find("\r\n");
        if (end == std::string_view::npos) return std::nullopt;
        const std::string_view line = text.substr(0, end);
        text.remove_prefix(end + 2);
        return line;
    };
    HttpHead   head;
    const auto first = next_line();
    if (!first) return http_error(400, "no request line");
    const std::size_t space = first->find(' '), last = first->rfind(' ');
    if (space == std::string_view::npos || space == last)
        return http_error(400, "the request line has not three parts");
    head.method                    = first->substr(0, space);
    head.target                    = first->substr(space + 1, last - space - 1);
    const std::string_view version = first->substr(last + 1);
    if (head.method.size() > 16 || !is_token(head.method)) return http_error(400, "no such method");
    if (head.target.size() > limits.target_bytes)
        return http_error(414, cat("the target has more than ", limits.target_bytes, " bytes"));
    const auto authority = take_authority(head.target);
    if (!authority) return std::unexpected(authority.error());
    if (head.target.empty() || (head.target[0] != '/' && head.target != "*") ||
        !std::ranges::all_of(head.target, [](char c) { return c > 0x20 && c < 0x7f; }))
        return http_error(400, "the target is not a path of printable ASCII");
    if (!version.starts_with("HTTP/")) return http_error(400, "the request line does not end in an HTTP version");
    if (version != "HTTP/1.1" && version != "HTTP/1.0") return http_error(505, "HTTP/1.1 and HTTP/1.0 are spoken here");
    head.minor = version.back() - '0';

    while (const auto line = next_line()) {
        if (line->empty()) {
            if (auto ok = interpret(head, limits); !ok) return std::unexpected(ok.error());
            if (*authority)
                for (auto& [name, value] : head.headers)
                    if (name == "host") value = **authority;
            return head;
        }
        if (int(head.headers.size()) >= limits.headers)
            return http_error(431, cat("more than ", limits.headers, " headers"));
        const std::size_t colon = line->find(':');
        if (colon == std::string_view::npos || !is_token(line->substr(0, colon)))
            return http_error(400, "a header line does not begin with a name and a colon");
        const std::string_view value = trim(line->substr(colon + 1));
        if (!std::ranges::all_of(
                value, [](char c) { return (static_cast<unsigned char>(c) >= 0x20 && c != 0x7f) || c == '\t'; }))
            return http_error(400, "a header has a control character in its value");
        head.headers.emplace_back(lower(line->substr(0, colon)), value);
    }
    return http_error(400, "the head has no end");
}

std::expected<bool, HttpError> ChunkDecoder::feed(std::string_view in, std::size_t& at, std::string& body,
                                                  const HttpLimits& limits) {
    constexpr std::size_t longest_line = 256; // a size and its extensions
    while (true) {
        if (state_ == State::data) {
            const std::size_t n = std::min(remaining_, in.size() - at);
            body.append(in.substr(at, n));
            at += n;
            remaining_ -= n;
            if (remaining_ > 0) return false;
            state_ = State::data_end;
        }
        const std::size_t end = in.find("\r\n", at + searched_);
        if (end == std::string_view::npos) {
            searched_ = in.size() - at - (in.size() > at && in.back() == '\r');
            if (in.size() - at > (state_ == State::trailer ? limits.head_bytes : longest_line))
                return http_error(400, "a line of a chunked body has no end");
            if (state_ == State::data_end && in.size() - at >= 2)
                return http_error(400, "a chunk is longer than its size");
            return false;
        }
        const std::string_view line = in.substr(at, end - at);
        at                          = end + 2;
        searched_                   = 0;
        // A proxy may take a lone LF or CR for the end of the line, and so see another request behind it.
        const auto control = [](char c) { return c != '\t' && (static_cast<unsigned char>(c) < 0x20 || c == 0x7f); };
        if (std::ranges::any_of(line, control))
            return http_error(400, "a line of a chunked body holds a control character");
        if (state_ == State::data_end) {
            if (!line.empty()) return http_error(400, "a chunk is longer than its size");
            state_ = State::size;
        } else if (state_ == State::trailer) {
            if (line.empty()) return true;
            trailer_bytes_ += line.size() + 2;
            if (trailer_bytes_ > limits.head_bytes) return http_error(431, "the trailers are too long");
        } else {
            const std::string_view digits = line.substr(0, line.find_first_of("; \t"));
            std::size_t            size   = 0;
            const auto [stop, wrong]      = std::from_chars(digits.data(), digits.data() + digits.size(), size, 16);
            const std::string_view behind = trim(line.substr(digits.size()));
            if (digits.empty() || digits[0] == '-' || !(behind.empty() || behind[0] == ';') ||
                stop != digits.data() + digits.size() ||
                (wrong != std::errc{} && wrong != std::errc::result_out_of_range) || line.size() > longest_line)
                return http_error(400, "the size of a chunk is not a hexadecimal number");
            if (wrong == std::errc::result_out_of_range || size > limits.body_bytes - body.size())
                return http_error(413, cat("the body has more than ", limits.body_bytes, " bytes"));
            remaining_ = size;
            state_     = size == 0 ? State::trailer : State::data;
        }
    }
}

} // namespace quire
