// quire.text.templates.jinja.lexer: a template's source as tokens, with white space removed as trim_blocks and lstrip_blocks say. Owns nothing: tokens
// point into the source.
export module quire.text.templates.jinja.lexer;

import quire.core.base;
import quire.core.unicode;
import quire.text.templates.jinja.value;

export namespace quire::jinja {

enum class TokenKind { data, variable_begin, variable_end, block_begin, block_end, name, text, integer, real, op, end };

struct Lexeme {
    TokenKind    kind   = TokenKind::end;
    std::size_t  offset = 0;
    std::string  text; // of data, names, operators; of literals their value
    std::int64_t integer = 0;
    double       real    = 0;
};

// A fault at a place of the source.
struct SyntaxFault {
    std::string message;
    std::size_t offset = 0;
};

// The source with every line break as \n, and without the last one.
std::string normalised(std::string_view source);
// Of a normalised source. Throws SyntaxFault.
std::vector<Lexeme> lex(std::string_view source);
// "line 3, column 7", both from 1; columns in characters.
std::string place(std::string_view source, std::size_t offset);

} // namespace quire::jinja

module :private;

namespace quire::jinja {

std::string normalised(std::string_view source) {
    std::string out;
    out.reserve(source.size());
    for (std::size_t i = 0; i < source.size(); i++) {
        if (source[i] == '\r') {
            out += '\n';
            if (i + 1 < source.size() && source[i + 1] == '\n') i++;
        } else {
            out += source[i];
        }
    }
    if (out.ends_with('\n')) out.pop_back();
    return out;
}

std::string place(std::string_view source, std::size_t offset) {
    const std::string_view before = source.substr(0, std::min(offset, source.size()));
    const std::size_t      line   = before.rfind('\n');
    return cat("line ", 1 + std::count(before.begin(), before.end(), '\n'), ", column ",
               1 + count_characters(line == std::string_view::npos ? before : before.substr(line + 1)));
}

bool is_name_start(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || (c & 0x80); }
bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_name(char c) { return is_name_start(c) || is_digit(c); }

std::size_t after_blanks(std::string_view s, std::size_t at) {
    while (at < s.size()) {
        const CodePoint c = utf8_next(s, at);
        if (!is_blank(c.value)) break;
        at += std::size_t(c.bytes);
    }
    return at;
}

std::string_view without_last_blanks(std::string_view s) {
    while (!s.empty()) {
        std::size_t at = s.size() - 1;
        while (at > 0 && (static_cast<unsigned char>(s[at]) & 0xc0) == 0x80) at--;
        if (!is_blank(utf8_next(s, at).value)) break;
        s = s.substr(0, at);
    }
    return s;
}

class Lexer {
public:
    explicit Lexer(std::string_view source) : s_(source) {}

    std::vector<Lexeme> run() {
        while (at_ < s_.size()) {
            std::size_t open = at_;
            while (open < s_.size() &&
                   !(s_[open] == '{' && open + 1 < s_.size() && std::string_view("{%#").contains(s_[open + 1])))
                open++;
            if (open >= s_.size()) {
                data(s_.substr(at_));
                at_ = s_.size();
                break;
            }
            const char kind = s_[open + 1];
            char       sign = open + 2 < s_.size() ? s_[open + 2] : 0;
            if (sign != '-' && sign != '+') sign = 0;
            if (kind == '{' && sign == '+') sign = 0; // the plus of a number
            const std::size_t inside = open + 2 + (sign ? 1 : 0);
            std::string_view  text   = s_.substr(at_, open - at_);
            if (sign == '-') {
                text = without_last_blanks(text);
            } else if (sign != '+' && kind != '{') {
                const std::size_t line = text.rfind('\n') + 1; // 0 when there is none
                if ((line > 0 || line_start_) && line < text.size() && after_blanks(text, line) == text.size())
                    text = text.substr(0, line);
            }
            data(text);
            at_ = inside;
            if (kind == '#') comment(open);
            else if (kind == '%' && raw_begin(open)) continue;
            else tag(open, kind == '{');
        }
        add(TokenKind::end, s_.size());
        return std::move(out_);
    }

private:
    [[noreturn]] void fail(std::string message, std::size_t offset) const {
        throw SyntaxFault{std::move(message), offset};
    }

    Lexeme& add(TokenKind kind, std::size_t offset, std::string_view text = {}) {
        out_.push_back({kind, offset, std::string(text), 0, 0});
        return out_.back();
    }
    void data(std::string_view text) {
        if (!text.empty()) add(TokenKind::data, std::size_t(text.data() - s_.data()), text);
    }
    // The text behind a tag's end: `sign` - removes blanks, + removes nothing, no sign removes a line break if `trims`.
    void finish(char sign, bool trims) {
        const std::size_t begin = at_;
        if (sign == '-') at_ = after_blanks(s_, at_);
        else if (sign != '+' && trims && at_ < s_.size() && s_[at_] == '\n') at_++;
        line_start_ = at_ > begin && s_[at_ - 1] == '\n';
    }

    void comment(std::size_t open) {
        const std::size_t close = s_.find("#}", at_);
        if (close == std::string_view::npos) fail("a comment does not end", open);
        const char sign = close > at_ && (s_[close - 1] == '-' || s_[close - 1] == '+') ? s_[close - 1] : char(0);
        at_             = close + 2;
        finish(sign, true);
    }

    // {% raw %} and everything up to {% endraw %}.
    bool raw_begin(std::size_t open) {
        std::size_t at = after_blanks(s_, at_);
        if (s_.substr(at, 3) != "raw") return false;
        at                = after_blanks(s_, at + 3);
        const bool strips = s_.substr(at, 1) == "-";
        if (strips) at++;
        if (s_.substr(at, 2) != "%}") return false;
        const std::size_t begin = strips ? after_blanks(s_, at + 2) : at + 2;
        for (std::size_t close = begin; (close = s_.find("{%", close)) != std::string_view::npos; close += 2) {
            std::size_t in   = close + 2;
            const char  sign = in < s_.size() ? s_[in] : char(0);
            if (sign == '-' || sign == '+') in++;
            in = after_blanks(s_, in);
            if (s_.substr(in, 6) != "endraw") continue;
            in              = after_blanks(s_, in + 6);
            const char last = in < s_.size() && (s_[in] == '-' || s_[in] == '+') ? s_[in] : char(0);
            if (last) in++;
            if (s_.substr(in, 2) != "%}") continue;
            std::string_view text = s_.substr(begin, close - begin);
            if (sign == '-') {
                text = without_last_blanks(text);
            } else if (sign != '+') {
                const std::size_t line = text.rfind('\n') + 1;
                if (line > 0 && line < text.size() && after_blanks(text, line) == text.size())
                    text = text.substr(0, line);
            }
            data(text);
            at_ = in + 2;
            finish(last, true);
            return true;
        }
        fail("a raw block does not end", open);
    }

    void tag(std::size_t open, bool variable) {
        add(variable ? TokenKind::variable_begin : TokenKind::block_begin, open);
        const std::string_view close = variable ? "}}" : "%}";
        std::string            brackets;
        for (;;) {
            at_ = after_blanks(s_, at_);
            if (at_ >= s_.size())
                fail(variable ? "an expression {{ does not end" : "a statement {% does not end", open);
            const std::string_view rest = s_.substr(at_);
            if (brackets.empty()) {
                const char sign = rest[0] == '-' || (rest[0] == '+' && !variable) ? rest[0] : char(0);
                if (rest.substr(sign ? 1 : 0).starts_with(close)) {
                    add(variable ? TokenKind::variable_end : TokenKind::block_end, at_);
                    at_ += close.size() + (sign ? 1 : 0);
                    return finish(sign, !variable);
                }
            }
            const char c = rest[0];
            if (c == '\'' || c == '"') text_literal();
            else if (is_digit(c)) number();
            else if (is_name_start(c)) {
                std::size_t n = 1;
                while (n < rest.size() && is_name(rest[n])) n++;
                if (n > 1000) fail("a name has more than 1000 bytes", at_);
                add(TokenKind::name, at_, rest.substr(0, n));
                at_ += n;
            } else {
                op(rest, brackets);
            }
        }
    }

    void op(std::string_view rest, std::string& brackets) {
        for (std::string_view two : {"**", "//", "==", "!=", ">=", "<="})
            if (rest.starts_with(two)) {
                add(TokenKind::op, at_, two);
                at_ += 2;
                return;
            }
        const char c = rest[0];
        if (!std::string_view("+-/*%~[](){}><=.:|,;").contains(c))
            fail(cat("unexpected ", quote(rest.substr(0, 1))), at_);
        if (c == '(' || c == '[' || c == '{') brackets += c;
        if (c == ')' || c == ']' || c == '}') {
            const char expected = c == ')' ? '(' : c == ']' ? '[' : '{';
            if (brackets.empty() || brackets.back() != expected) fail(cat("unexpected '", c, "'"), at_);
            brackets.pop_back();
        }
        add(TokenKind::op, at_, rest.substr(0, 1));
        at_++;
    }

    void number() {
        const std::size_t begin     = at_;
        const bool        after_dot = !out_.empty() && out_.back().kind == TokenKind::op && out_.back().text == "." &&
                               begin > 0 && s_[begin - 1] == '.';
        std::string digits;
        auto        take = [&](auto&& ok) {
            while (at_ < s_.size() &&
                   (ok(s_[at_]) || (s_[at_] == '_' && !digits.empty() && at_ + 1 < s_.size() && ok(s_[at_ + 1])))) {
                if (s_[at_] != '_') digits += s_[at_];
                at_++;
            }
        };
        int        base   = 10;
        const char letter = s_[at_] == '0' && at_ + 1 < s_.size() ? char(s_[at_ + 1] | 0x20) : char(0);
        if (letter == 'x' || letter == 'o' || letter == 'b') {
            base = letter == 'x' ? 16 : letter == 'o' ? 8 : 2;
            at_ += 2;
            take([&](char c) {
                return base == 16 ? is_digit(c) || ((c | 0x20) >= 'a' && (c | 0x20) <= 'f')
                                  : is_digit(c) && c < '0' + base;
            });
        } else {
            take(is_digit);
            bool real = false;
            if (!after_dot && at_ + 1 < s_.size() && s_[at_] == '.' && is_digit(s_[at_ + 1])) {
                real = true;
                digits += s_[at_++];
                take(is_digit);
            }
            if (!after_dot && at_ < s_.size() && (s_[at_] | 0x20) == 'e') {
                const std::size_t sign = at_ + 1 < s_.size() && (s_[at_ + 1] == '+' || s_[at_ + 1] == '-') ? 1 : 0;
                if (at_ + 1 + sign < s_.size() && is_digit(s_[at_ + 1 + sign])) {
                    real = true;
                    digits += s_.substr(at_, 1 + sign);
                    at_ += 1 + sign;
                    take(is_digit);
                }
            }
            if (real) {
                add(TokenKind::real, begin).real = std::strtod(digits.c_str(), nullptr);
                return;
            }
        }
        const auto value = to_number<std::int64_t>(digits, base);
        if (!value) fail("this number is no integer of 64 bits", begin);
        add(TokenKind::integer, begin).integer = *value;
    }

    void text_literal() {
        const std::size_t begin = at_;
        const char        mark  = s_[at_++];
        std::string       out;
        auto              digits = [&](std::size_t most, int base) {
            std::uint32_t     value = 0;
            const std::size_t have  = std::min(most, s_.size() - at_);
            auto [end, error] = std::from_chars(s_.data() + at_, s_.data() + at_ + have, value, base);
            const auto n      = std::size_t(end - s_.data()) - at_;
            if (error != std::errc() || (base == 16 && n != most) || value > 0x10ffff ||
                (value >= 0xd800 && value < 0xe000))
                fail("a wrong escape in a text", at_);
            at_ += n;
            out += utf8_encode(char32_t(value));
        };
        for (;;) {
            if (at_ >= s_.size()) fail("a text does not end", begin);
            const char c = s_[at_++];
            if (c == mark) break;
            if (c != '\\' || at_ >= s_.size()) {
                out += c;
                continue;
            }
            const char                 e     = s_[at_++];
            constexpr std::string_view plain = "nrtabfv\\'\"", stands_for = "\n\r\t\a\b\f\v\\'\"";
            if (const auto i = plain.find(e); i != std::string_view::npos) out += stands_for[i];
            else if (e == 'x') digits(2, 16);
            else if (e == 'u') digits(4, 16);
            else if (e == 'U') digits(8, 16);
            else if (e >= '0' && e <= '7') at_--, digits(3, 8);
            else if (e != '\n') out += {'\\', e};
        }
        add(TokenKind::text, begin, out);
    }

    std::string_view    s_;
    std::size_t         at_         = 0;
    bool                line_start_ = true; // the last tag ended with a line break, or there was none yet
    std::vector<Lexeme> out_;
};

std::vector<Lexeme> lex(std::string_view source) { return Lexer(source).run(); }

} // namespace quire::jinja
