// quire.core.result: Token, RequestId, Error and Result, check(), cat(), split(), Stopwatch. Owns nothing.
export module quire.core.result;

import quire.core.std;
import quire.core.unicode;

export namespace quire {

using Token     = std::int32_t;
using RequestId = std::uint64_t;

// The kind of a failure; tools turn it into an exit code, the server into a status.
enum class ErrorKind {
    input,  // a file, flag or request that cannot be used as it is
    limit,  // valid, but more than this process was configured to hold
    system, // the machine refused: no such file, no memory, no device
};

// A failure that the caller can act on: one sentence naming what and where.
struct Error {
    ErrorKind   kind = ErrorKind::input;
    std::string message;
};

template <class T>
using Result = std::expected<T, Error>;

// `return fail("block_count is ", n, ", but …")`: every argument is text, a character or a number.
template <class... Parts>
std::unexpected<Error> fail(const Parts&... parts);
template <class... Parts>
std::unexpected<Error> fail_with(ErrorKind kind, const Parts&... parts);

// Concatenates its arguments as text; floating point with up to six significant digits.
template <class... Parts>
std::string cat(const Parts&... parts);

// A broken invariant is a bug in quire, never in its input: say where and stop, in every build.
[[noreturn]] void broken(std::string_view what, const std::source_location& at);
inline void       check(bool ok, std::string_view what, std::source_location at = std::source_location::current()) {
    if (!ok) broken(what, at);
}

// Text from outside, made safe for one line of a message: what is no printable character of UTF-8 as \xNN, at most `max` bytes, no character
// cut, and "…" where there was more.
std::string quote(std::string_view text, std::size_t max = 64);
// A text unchanged, without quotes: at most `max` bytes, no character of UTF-8 cut, and "…" where there was more.
std::string cut_short(std::string_view text, std::size_t max = 64);
// Whether an id from outside can be echoed and logged unchanged: at most 128 letters, digits and - _ . :
bool is_plain_word(std::string_view text);
// Letters and digits of ASCII.
constexpr bool is_alphanumeric(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
}

// The parts between the characters `at`, one more than there are of these; between blanks, a list of words.
std::vector<std::string_view> split(std::string_view text, char at = ' ');
// The number that is the whole text, as from_chars() reads it; nothing if there is more or less, or it does not fit.
template <class Number, std::same_as<int>... Base>
std::optional<Number> to_number(std::string_view text, Base... base) {
    Number     value{};
    const auto read = std::from_chars(text.data(), text.data() + text.size(), value, base...);
    if (read.ec != std::errc{} || read.ptr != text.data() + text.size()) return std::nullopt;
    return value;
}

// Seconds since construction or the last restart, on the monotonic clock.
class Stopwatch {
public:
    Stopwatch() : start_(std::chrono::steady_clock::now()) {}
    double seconds() const;
    void   restart() { start_ = std::chrono::steady_clock::now(); }

private:
    std::chrono::steady_clock::time_point start_;
};

// -- bodies that importers must see

inline void cat_one(std::string& out, std::string_view s) { out += s; }
inline void cat_one(std::string& out, const char* s) { out += s; }
inline void cat_one(std::string& out, const std::string& s) { out += s; }
inline void cat_one(std::string& out, char c) { out += c; }
inline void cat_one(std::string& out, double v) {
    char text[32];
    out.append(text, std::size_t(std::snprintf(text, sizeof text, "%g", v)));
}
inline void cat_one(std::string& out, float v) { cat_one(out, double(v)); }
template <std::integral I>
void cat_one(std::string& out, I v) {
    out += std::to_string(v);
}

template <class... Parts>
std::string cat(const Parts&... parts) {
    std::string out;
    (cat_one(out, parts), ...);
    return out;
}

template <class... Parts>
std::unexpected<Error> fail(const Parts&... parts) {
    return std::unexpected<Error>(Error{ErrorKind::input, cat(parts...)});
}

template <class... Parts>
std::unexpected<Error> fail_with(ErrorKind kind, const Parts&... parts) {
    return std::unexpected<Error>(Error{kind, cat(parts...)});
}

} // namespace quire

module :private;

namespace quire {

void broken(std::string_view what, const std::source_location& at) {
    std::fprintf(stderr, "quire: broken invariant at %s:%u: %.*s\n", at.file_name(), unsigned(at.line()),
                 int(what.size()), what.data());
    std::abort();
}

// Bytes of it, at most `max`, that cut no character of UTF-8.
std::size_t whole_characters(std::string_view text, std::size_t max) {
    if (text.size() <= max) return text.size();
    std::size_t n = max;
    while (n > 0 && n + 3 > max && (static_cast<unsigned char>(text[n]) & 0xc0) == 0x80) n--;
    return (static_cast<unsigned char>(text[n]) & 0xc0) == 0x80 ? max : n; // no UTF-8
}

std::string cut_short(std::string_view text, std::size_t max) {
    const std::size_t n = whole_characters(text, max);
    return cat(text.substr(0, n), n < text.size() ? "…" : "");
}

std::string quote(std::string_view text, std::size_t max) {
    std::string out = "'";
    max             = whole_characters(text, max);
    for (std::size_t i = 0; i < max;) {
        if (const CodePoint c = utf8_next(text.substr(0, max), i); c.valid && is_printable(c.value)) {
            out += text.substr(i, std::size_t(c.bytes));
            i += std::size_t(c.bytes);
        } else {
            char hex[5];
            std::snprintf(hex, sizeof hex, "\\x%02x", unsigned(static_cast<unsigned char>(text[i++])));
            out += hex;
        }
    }
    return out + (text.size() > max ? "…'" : "'");
}

bool is_plain_word(std::string_view text) {
    return !text.empty() && text.size() <= 128 && std::ranges::all_of(text, [](char c) {
        return is_alphanumeric(c) || c == '-' || c == '_' || c == '.' || c == ':';
    });
}

std::vector<std::string_view> split(std::string_view text, char at) {
    std::vector<std::string_view> parts;
    for (std::size_t end = 0; (end = text.find(at)) != text.npos; text.remove_prefix(end + 1))
        parts.push_back(text.substr(0, end));
    parts.push_back(text);
    return parts;
}

double Stopwatch::seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

} // namespace quire
