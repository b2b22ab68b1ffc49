// quire.core.unicode: decodes UTF-8 step by step, and has the character classes that pre-tokenizers need (utf8proc's tables). Owns
// nothing.
module;

#include <utf8proc.h>

export module quire.core.unicode;

import quire.core.std;

export namespace quire {

struct CodePoint {
    char32_t value = 0; // U+FFFD when the bytes are not UTF-8
    int      bytes = 1; // consumed, at least 1
    bool     valid = true;
};

// The character at text[at]; at < text.size(). Overlong forms, surrogates and values above U+10FFFF are invalid.
CodePoint   utf8_next(std::string_view text, std::size_t at);
std::string utf8_encode(char32_t c);
bool        utf8_valid(std::string_view text);
// `text` with each maximal invalid part replaced by U+FFFD, as browsers do.
std::string utf8_repair(std::string_view text);
// Bytes at the end of `text` that are the beginning of a character and could still become valid: 0..3.
int utf8_incomplete(std::string_view text);

// The character's other case, itself when it has none; simple mappings only (no character becomes two).
char32_t upper_case(char32_t c);
char32_t lower_case(char32_t c);
char32_t title_case(char32_t c);
// Whether Python prints the character as it is: no control, format, private, unassigned character and no separator but the space.
bool is_printable(char32_t c);

// Columns that a terminal gives the character: 0 (it joins the one before), 1 or 2.
int char_width(char32_t c);

} // namespace quire

module :private;

namespace quire {

CodePoint utf8_next(std::string_view text, std::size_t at) {
    constexpr CodePoint bad{0xfffd, 1, false};
    auto                byte = [&](std::size_t i) {
        return at + i < text.size() ? unsigned(static_cast<unsigned char>(text[at + i])) : 0u;
    };
    auto           tail = [&](std::size_t i) { return (byte(i) & 0xc0) == 0x80; };
    const unsigned b    = byte(0);
    if (b < 0x80) return {char32_t(b), 1, true};
    if (b >= 0xc2 && b < 0xe0 && tail(1)) return {char32_t((b & 31) << 6 | (byte(1) & 63)), 2, true};
    if (b >= 0xe0 && b < 0xf0 && tail(1) && tail(2)) {
        const unsigned c = (b & 15) << 12 | (byte(1) & 63) << 6 | (byte(2) & 63);
        return c < 0x800 || (c >= 0xd800 && c < 0xe000) ? bad : CodePoint{char32_t(c), 3, true};
    }
    if (b >= 0xf0 && b < 0xf5 && tail(1) && tail(2) && tail(3)) {
        const unsigned c = (b & 7) << 18 | (byte(1) & 63) << 12 | (byte(2) & 63) << 6 | (byte(3) & 63);
        return c < 0x10000 || c > 0x10ffff ? bad : CodePoint{char32_t(c), 4, true};
    }
    return bad;
}

std::string utf8_encode(char32_t c) {
    std::string out;
    if (c < 0x80) return out += char(c), out;
    if (c < 0x800) return out += char(0xc0 | c >> 6), out += char(0x80 | (c & 63)), out;
    if (c < 0x10000)
        return out += char(0xe0 | c >> 12), out += char(0x80 | (c >> 6 & 63)), out += char(0x80 | (c & 63)), out;
    return out += char(0xf0 | c >> 18), out += char(0x80 | (c >> 12 & 63)), out += char(0x80 | (c >> 6 & 63)),
           out += char(0x80 | (c & 63)), out;
}

bool utf8_valid(std::string_view text) {
    for (std::size_t at = 0; at < text.size();) {
        const CodePoint c = utf8_next(text, at);
        if (!c.valid) return false;
        at += std::size_t(c.bytes);
    }
    return true;
}

// How many bytes at `at` are a proper beginning of a character that does not go on as it should; at least 1.
std::size_t invalid_length(std::string_view text, std::size_t at) {
    const auto b = static_cast<unsigned char>(text[at]);
    if (b < 0xc2 || b > 0xf4) return 1;
    const std::size_t want = b < 0xe0 ? 2 : b < 0xf0 ? 3 : 4;
    std::size_t       n    = 1;
    for (; n < want && at + n < text.size(); n++) {
        const auto     c    = static_cast<unsigned char>(text[at + n]);
        const unsigned low  = n == 1 && b == 0xe0 ? 0xa0 : n == 1 && b == 0xf0 ? 0x90 : 0x80; // no overlong forms
        const unsigned high = n == 1 && b == 0xed   ? 0x9f
                              : n == 1 && b == 0xf4 ? 0x8f
                                                    : 0xbf; // no surrogates, no more than 10ffff
        if (c < low || c > high) break;
    }
    return n;
}

std::string utf8_repair(std::string_view text) {
    std::string out;
    out.reserve(text.size());
    for (std::size_t at = 0; at < text.size();) {
        const CodePoint   c = utf8_next(text, at);
        const std::size_t n = c.valid ? std::size_t(c.bytes) : invalid_length(text, at);
        if (c.valid) out += text.substr(at, n);
        else out += "\xef\xbf\xbd";
        at += n;
    }
    return out;
}

int utf8_incomplete(std::string_view text) {
    for (std::size_t n = 1; n <= 3 && n <= text.size(); n++) {
        const std::size_t at = text.size() - n;
        const auto        b  = static_cast<unsigned char>(text[at]);
        if ((b & 0xc0) == 0x80) continue; // in the middle of one
        const std::size_t want = b < 0xc2 || b > 0xf4 ? 1 : b < 0xe0 ? 2 : b < 0xf0 ? 3 : 4;
        return want > n && invalid_length(text, at) == n ? int(n) : 0;
    }
    return 0;
}

char32_t upper_case(char32_t c) { return char32_t(utf8proc_toupper(utf8proc_int32_t(c))); }
char32_t lower_case(char32_t c) { return char32_t(utf8proc_tolower(utf8proc_int32_t(c))); }
char32_t title_case(char32_t c) { return char32_t(utf8proc_totitle(utf8proc_int32_t(c))); }

bool is_printable(char32_t c) {
    if (c == ' ') return true;
    const auto category = utf8proc_category(utf8proc_int32_t(c));
    return category != UTF8PROC_CATEGORY_CN && !(category >= UTF8PROC_CATEGORY_ZS && category <= UTF8PROC_CATEGORY_CO);
}

int char_width(char32_t c) { return c < 0x110000 ? utf8proc_charwidth(utf8proc_int32_t(c)) : 1; }

} // namespace quire
