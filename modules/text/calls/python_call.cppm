// quire.text.calls.python_call: a list of calls as Python writes it, [f(a=1), g(b="x")] → names and arguments. Owns nothing.
export module quire.text.calls.python_call;

import quire.core.base;
import quire.core.json;
import quire.core.unicode;

export namespace quire {

struct PythonCalls {
    std::size_t                               size       = 0;     // bytes of the list; 0: there is none
    bool                                      unfinished = false; // more text may make it one
    std::vector<std::pair<std::string, Json>> calls;              // names, and arguments as objects
};

// The list at the beginning of the text. Values are strings, numbers, True, False, None, lists and dicts, at most 64 in one another.
PythonCalls read_python_calls(std::string_view text);

} // namespace quire

module :private;

namespace quire {

constexpr int deepest = 64;

class PythonReader {
public:
    explicit PythonReader(std::string_view text) : text_(text) {}

    PythonCalls calls() {
        PythonCalls out;
        bool        ok = take('[');
        while (ok) {
            std::string name;
            Json        arguments = Json::object();
            ok                    = word(name) && take('(') && members(arguments, ')', '=', 0);
            if (!ok) break;
            out.calls.emplace_back(std::move(name), std::move(arguments));
            if (next_is(',')) continue;
            ok = take(']');
            break;
        }
        if (ok) out.size = at_;
        else out.unfinished = unfinished_;
        return out;
    }

private:
    bool wrong() {
        unfinished_ = at_ >= text_.size();
        return false;
    }
    void skip_white() { at_ = std::min(text_.find_first_not_of(" \t\r\n", at_), text_.size()); }
    bool next_is(char c) {
        skip_white();
        if (at_ >= text_.size() || text_[at_] != c) return false;
        at_++;
        return true;
    }
    bool take(char c) { return next_is(c) || wrong(); }
    bool word(std::string& out) {
        skip_white();
        const auto part = [](char c) { return is_alphanumeric(c) || c == '_' || c == '.' || c == '-'; };
        while (at_ < text_.size() && part(text_[at_])) out += text_[at_++];
        return (!out.empty() && at_ < text_.size()) || wrong();
    }
    // KEY SEPARATOR VALUE, …, up to `close`: of a call or of a dict.
    bool members(Json& out, char close, char separator, int depth) {
        while (!next_is(close)) {
            std::string key;
            Json        value;
            skip_white();
            if (!(separator == '=' ? word(key) : string(key)) || !take(separator) || !read(value, depth)) return false;
            out[key] = std::move(value);
            if (out.size() > 4096) return wrong();
            if (!next_is(',')) return take(close);
        }
        return true;
    }
    bool list(Json& out, int depth) {
        out = Json::array();
        while (!next_is(']')) {
            Json value;
            if (!read(value, depth)) return false;
            out.push_back(std::move(value));
            if (!next_is(',')) return take(']');
        }
        return true;
    }
    // Four hexadecimal digits behind \u, and the second half of a surrogate pair; `at_` is at the u, and stays at the last digit.
    bool unicode(std::string& out) {
        const auto four = [&](char32_t& c) {
            if (at_ + 4 >= text_.size()) return at_ = text_.size(), false;
            unsigned    value   = 0;
            const char* begin   = text_.data() + at_ + 1;
            const auto [end, e] = std::from_chars(begin, begin + 4, value, 16);
            c                   = value;
            at_ += 4;
            return e == std::errc{} && end == begin + 4;
        };
        char32_t c = 0, second = 0;
        if (!four(c)) return wrong();
        if (c >= 0xd800 && c < 0xdc00) {
            if (text_.substr(at_ + 1, 2) != "\\u") return wrong();
            at_ += 2;
            if (!four(second) || second < 0xdc00 || second > 0xdfff) return wrong();
            c = 0x10000 + ((c - 0xd800) << 10) + (second - 0xdc00);
        } else if (c >= 0xdc00 && c < 0xe000) return wrong();
        out += utf8_encode(c);
        return true;
    }
    bool string(std::string& out) {
        if (at_ >= text_.size() || (text_[at_] != '"' && text_[at_] != '\'')) return wrong();
        const char quote = text_[at_++];
        for (; at_ < text_.size(); at_++) {
            const char c = text_[at_];
            if (c == quote) return at_++, true;
            if (c != '\\') {
                out += c;
                continue;
            }
            if (++at_ == text_.size()) break;
            const char escaped = text_[at_];
            if (escaped == 'n') out += '\n';
            else if (escaped == 't') out += '\t';
            else if (escaped == 'r') out += '\r';
            else if (escaped == 'b') out += '\b';
            else if (escaped == 'f') out += '\f';
            else if (std::string_view("\\\"'/").contains(escaped)) out += escaped;
            else if (escaped == 'u') {
                if (!unicode(out)) return false;
            } else {
                out += '\\';
                out += escaped;
            }
        }
        return wrong();
    }
    bool read(Json& out, int depth) {
        skip_white();
        if (at_ >= text_.size() || depth >= deepest) return wrong();
        const char c = text_[at_];
        if (c == '"' || c == '\'') {
            std::string text;
            if (!string(text)) return false;
            out = std::move(text);
            return true;
        }
        if (next_is('[')) return list(out, depth + 1);
        if (next_is('{')) return out = Json::object(), members(out, '}', ':', depth + 1);
        const std::size_t end = text_.find_first_of(",)]} \t\r\n", at_);
        if (end == std::string_view::npos) return at_ = text_.size(), wrong();
        const std::string_view name = text_.substr(at_, end - at_);
        if (name == "True" || name == "true") out = true;
        else if (name == "False" || name == "false") out = false;
        else if (name == "None" || name == "null") out = nullptr;
        else {
            Result<Json> number = json_parse(name);
            if (!number || !number->is_number()) return wrong();
            out = std::move(*number);
        }
        at_ = end;
        return true;
    }

    std::string_view text_;
    std::size_t      at_         = 0;
    bool             unfinished_ = false;
};

PythonCalls read_python_calls(std::string_view text) { return PythonReader(text).calls(); }

} // namespace quire
