// quire.text.jinja.text_methods: what Python's str can do: its methods, % and format(). Every piece of a result keeps the mark of the text it
// came from. Owns nothing.
export module quire.text.jinja.text_methods;

import quire.core.base;
import quire.core.std;
import quire.core.unicode;
import quire.text.jinja.value;
import quire.text.marked_text;

export namespace quire::jinja {

bool  is_text_method(std::string_view name);
Value call_text_method(Runtime& runtime, const TextRef& self, std::string_view name, const Arguments& arguments);

// `format % values`: a tuple, a dict or one value.
Value format_percent(Runtime& runtime, const Text& format, const Value& values);

// Bytes [begin, end) of the characters [from, to).
TextSpan   characters(std::string_view text, std::size_t from, std::size_t to);
MarkedText upper(const Text& text);
MarkedText lower(const Text& text);
MarkedText capitalize(const Text& text);
// Without the characters of `set` (blanks when null) at the ends that are wanted.
MarkedText         strip(const Text& text, const std::string* set, bool left, bool right);
MarkedText         replace(Runtime& runtime, const Text& text, const Text& from, const Text& to, std::int64_t most);
std::vector<Value> split_lines(const Text& text, bool keep_ends);
MarkedText         join(Runtime& runtime, const Text& separator, const std::vector<Value>& items);

} // namespace quire::jinja

module :private;

namespace quire::jinja {

constexpr std::array<std::string_view, 41> method_names{
    "capitalize", "casefold",  "center",     "count",        "endswith",     "expandtabs", "find",
    "format",     "index",     "isalnum",    "isalpha",      "isascii",      "isdecimal",  "isdigit",
    "islower",    "isnumeric", "isspace",    "istitle",      "isupper",      "join",       "ljust",
    "lower",      "lstrip",    "partition",  "removeprefix", "removesuffix", "replace",    "rfind",
    "rindex",     "rjust",     "rpartition", "rsplit",       "rstrip",       "split",      "splitlines",
    "startswith", "strip",     "swapcase",   "title",        "upper",        "zfill"};

bool is_text_method(std::string_view name) { return std::ranges::find(method_names, name) != method_names.end(); }

TextSpan characters(std::string_view text, std::size_t from, std::size_t to) {
    TextSpan    out{text.size(), text.size()};
    std::size_t at = 0;
    for (std::size_t i = 0; i <= to; i++) {
        if (i == from) out.begin = at;
        if (i == to) out.end = at;
        if (at >= text.size()) break;
        at += std::size_t(utf8_next(text, at).bytes);
    }
    return out;
}

// f(character, out) for every character, in the parts' marks.
template <class F>
MarkedText mapped(const Text& text, const F& f) {
    MarkedText out;
    text.for_each_part([&](std::string_view part, bool is_input) {
        std::string made;
        for (std::size_t at = 0; at < part.size();) {
            const CodePoint c = utf8_next(part, at);
            if (c.valid) f(c.value, made);
            else made += part.substr(at, std::size_t(c.bytes));
            at += std::size_t(c.bytes);
        }
        out.append(made, is_input);
    });
    return out;
}

void append_upper(char32_t c, std::string& out) { out += c == 0xdf ? "SS" : utf8_encode(upper_case(c)); }
void append_title(char32_t c, std::string& out) { out += c == 0xdf ? "Ss" : utf8_encode(title_case(c)); }
void append_lower(char32_t c, std::string& out) { out += utf8_encode(lower_case(c)); }
bool is_cased(char32_t c) { return upper_case(c) != c || lower_case(c) != c; }

MarkedText upper(const Text& text) { return mapped(text, append_upper); }
MarkedText lower(const Text& text) { return mapped(text, append_lower); }
MarkedText capitalize(const Text& text) {
    bool first = true;
    return mapped(text, [&](char32_t c, std::string& out) {
        std::exchange(first, false) ? append_title(c, out) : append_lower(c, out);
    });
}
MarkedText title(const Text& text) {
    bool inside = false;
    return mapped(text, [&](char32_t c, std::string& out) {
        inside ? append_lower(c, out) : append_title(c, out);
        inside = is_cased(c);
    });
}

MarkedText strip(const Text& text, const std::string* set, bool left, bool right) {
    const std::string_view s  = text.bytes;
    auto                   in = [&](std::size_t at, std::size_t n) {
        return set ? set->find(s.substr(at, n)) != std::string::npos : is_blank(utf8_next(s, at).value);
    };
    std::size_t begin = 0, end = s.size();
    while (left && begin < end) {
        const auto n = std::size_t(utf8_next(s, begin).bytes);
        if (!in(begin, n)) break;
        begin += n;
    }
    while (right && end > begin) {
        std::size_t at = end - 1;
        while (at > begin && (static_cast<unsigned char>(s[at]) & 0xc0) == 0x80) at--;
        if (!in(at, end - at)) break;
        end = at;
    }
    return text.slice(begin, end);
}

MarkedText replace(Runtime& runtime, const Text& text, const Text& from, const Text& to, std::int64_t most) {
    MarkedText             out;
    const std::string_view s = text.bytes, f = from.bytes;
    std::size_t            at  = 0;
    auto                   put = [&](const MarkedText& piece, std::size_t begin, std::size_t end) {
        if (out.bytes.size() + (end - begin) > runtime.budget.longest)
            fault("a text becomes longer than ", runtime.budget.longest, " bytes");
        out.append(piece, begin, end);
    };
    if (f.empty()) {
        for (; most != 0; most--) {
            put(to, 0, to.bytes.size());
            if (at >= s.size()) break;
            const auto n = std::size_t(utf8_next(s, at).bytes);
            put(text, at, at + n);
            at += n;
        }
    } else {
        for (std::size_t found; most != 0 && (found = s.find(f, at)) != std::string_view::npos; most--) {
            put(text, at, found);
            put(to, 0, to.bytes.size());
            at = found + f.size();
        }
    }
    put(text, at, s.size());
    runtime.budget.text(out.bytes.size());
    return out;
}

bool is_line_break(char32_t c) {
    return (c >= 10 && c <= 13) || (c >= 28 && c <= 30) || c == 0x85 || c == 0x2028 || c == 0x2029;
}

std::vector<Value> split_lines(const Text& text, bool keep_ends) {
    std::vector<Value> out;
    std::size_t        begin = 0;
    for (std::size_t at = 0; at < text.bytes.size();) {
        const CodePoint c    = utf8_next(text.bytes, at);
        std::size_t     next = at + std::size_t(c.bytes);
        if (is_line_break(c.value)) {
            if (c.value == '\r' && next < text.bytes.size() && text.bytes[next] == '\n') next++;
            out.emplace_back(text.slice(begin, keep_ends ? next : at));
            begin = next;
        }
        at = next;
    }
    if (begin < text.bytes.size()) out.emplace_back(text.slice(begin, text.bytes.size()));
    return out;
}

MarkedText join(Runtime& runtime, const Text& separator, const std::vector<Value>& items) {
    MarkedText out;
    for (std::size_t i = 0; i < items.size(); i++) {
        if (i) out.append(separator);
        append_str(runtime, out, items[i]);
        if (out.bytes.size() > runtime.budget.longest)
            fault("a text becomes longer than ", runtime.budget.longest, " bytes");
    }
    runtime.budget.text(out.bytes.size());
    return out;
}

// -- splitting

std::vector<Value> split_blanks(const Text& text, std::int64_t most, bool from_right) {
    std::vector<TextSpan>  words;
    const std::string_view s = text.bytes;
    for (std::size_t at = 0; at < s.size();) {
        const CodePoint c = utf8_next(s, at);
        const auto      n = std::size_t(c.bytes);
        if (!is_blank(c.value)) {
            if (!words.empty() && words.back().end == at) words.back().end += n;
            else words.push_back({at, at + n});
        }
        at += n;
    }
    if (most >= 0 && std::int64_t(words.size()) > most + 1) {
        const auto m = std::size_t(most);
        if (from_right) { // the first words stay together, with what stands before them
            const std::size_t first = words.size() - m - 1;
            words.erase(words.begin(), words.begin() + std::ptrdiff_t(first));
            words[0].begin = 0;
        } else {
            words.resize(m + 1);
            words[m].end = s.size();
        }
    }
    std::vector<Value> out;
    for (const TextSpan& w : words) out.emplace_back(text.slice(w.begin, w.end));
    return out;
}

std::vector<Value> split(const Text& text, const Text& by, std::int64_t most, bool from_right) {
    if (by.bytes.empty()) fault("empty separator");
    const std::string_view s = text.bytes, f = by.bytes;
    std::vector<TextSpan>  parts;
    if (from_right) {
        std::size_t end = s.size();
        for (; most != 0 && end >= f.size(); most--) {
            const std::size_t found = s.rfind(f, end - f.size());
            if (found == std::string_view::npos) break;
            parts.push_back({found + f.size(), end});
            end = found;
        }
        parts.push_back({0, end});
        std::reverse(parts.begin(), parts.end());
    } else {
        std::size_t at = 0;
        for (std::size_t found; most != 0 && (found = s.find(f, at)) != std::string_view::npos; most--) {
            parts.push_back({at, found});
            at = found + f.size();
        }
        parts.push_back({at, s.size()});
    }
    std::vector<Value> out;
    for (const TextSpan& p : parts) out.emplace_back(text.slice(p.begin, p.end));
    return out;
}

// -- format specifications

struct Spec {
    std::string fill  = " ";
    char        align = 0, sign = '-', type = 0, group = 0;
    bool        alternate = false, zero = false;
    std::size_t width     = 0;
    int         precision = -1;
};

constexpr std::size_t widest = 10'000; // a field

std::string grouped(std::string_view digits, char group) {
    std::string out;
    for (std::size_t i = 0; i < digits.size(); i++) {
        if (i && (digits.size() - i) % 3 == 0) out += group;
        out += digits[i];
    }
    return out;
}

// The digits of a number without its sign.
std::string digits_of(const Value& v, const Spec& spec, bool& negative) {
    const char type = spec.type;
    if (const auto i = v.integer(); i && (type == 0 || type == 'd' || type == 'i' || type == 'u' || type == 'x' ||
                                          type == 'X' || type == 'o' || type == 'b')) {
        negative                      = *i < 0;
        const std::uint64_t magnitude = negative ? 0 - std::uint64_t(*i) : std::uint64_t(*i);
        const int           base      = type == 'x' || type == 'X' ? 16 : type == 'o' ? 8 : type == 'b' ? 2 : 10;
        char                buffer[72];
        std::string         out(buffer,
                                std::size_t(std::to_chars(buffer, buffer + sizeof buffer, magnitude, base).ptr - buffer));
        if (type == 'X')
            for (char& c : out) c = c >= 'a' ? char(c - 32) : c;
        if (spec.group) out = grouped(out, spec.group);
        if (spec.alternate && base != 10) out = cat('0', type, out);
        return out;
    }
    if (!v.number()) fault("a number is required for the format '", type ? type : 's', "', not ", type_name(v));
    double d = *v.number();
    negative = std::signbit(d) && !std::isnan(d);
    d        = std::fabs(d);
    if (type == 'd' || type == 'i' || type == 'u') {
        Spec whole   = spec;
        bool ignored = false;
        if (d >= 9e18) fault("a float is too large for an integer");
        return digits_of(std::int64_t(d), whole, ignored);
    }
    if (std::isnan(d) || std::isinf(d)) return std::isnan(d) ? "nan" : "inf";
    if (type == 0 && spec.precision < 0) return float_repr(d);
    const int  precision = std::min(spec.precision < 0 ? 6 : spec.precision, 1000);
    const char form      = type == '%' ? 'f' : type == 0 ? 'g' : type;
    if (!std::string_view("eEfFgG").contains(form)) fault("unknown format code '", type, "'");
    const std::string used = cat("%", spec.alternate ? "#" : "", ".*", form);
    std::string       out(std::size_t(precision) + 400, '\0');
    out.resize(std::size_t(std::snprintf(out.data(), out.size(), used.c_str(), precision,
                                         type == '%' ? d * 100 : d))); // NOLINT: one of six formats
    if (spec.group) {
        const std::size_t point = std::min(out.find('.'), out.size());
        out                     = grouped(std::string_view(out).substr(0, point), spec.group) + out.substr(point);
    }
    return type == '%' ? out + '%' : out;
}

// Fills up to the width; `sign` and prefix stand before zeros.
MarkedText padded(MarkedText body, const std::string& sign, const Spec& spec, char align) {
    const std::size_t size = count_characters(sign) + count_characters(body.bytes);
    const std::size_t more = spec.width > size ? spec.width - size : 0;
    std::size_t       left = align == '>' ? more : align == '^' ? more / 2 : 0;
    MarkedText        out;
    auto              fill = [&](std::size_t n) {
        std::string text;
        for (std::size_t i = 0; i < n; i++) text += spec.fill;
        out.append(text, false);
    };
    if (align == '=') out.append(sign, false), fill(more), out.append(body);
    else fill(left), out.append(sign, false), out.append(body), fill(align == '=' ? 0 : more - left);
    return out;
}

MarkedText number_field(const Value& v, const Spec& spec, char default_align) {
    bool       negative = false;
    MarkedText body;
    body.append(digits_of(v, spec, negative), false);
    const std::string sign = negative ? "-" : spec.sign == '+' ? "+" : spec.sign == ' ' ? " " : "";
    return padded(std::move(body), sign, spec, spec.align ? spec.align : spec.zero ? '=' : default_align);
}

Value format_percent(Runtime& runtime, const Text& format, const Value& values) {
    MarkedText             out;
    const std::string_view s     = format.bytes;
    const List*            tuple = values.list() && values.list()->form == List::Form::tuple ? values.list() : nullptr;
    std::size_t            used  = 0;
    auto                   next  = [&]() -> const Value& {
        if (tuple ? used >= tuple->items.size() : used > 0) fault("not enough arguments for format string");
        used++;
        return tuple ? tuple->items[used - 1] : values;
    };
    for (std::size_t at = 0; at < s.size();) {
        const std::size_t percent = std::min(s.find('%', at), s.size());
        out.append(format, at, percent);
        at = percent;
        if (at >= s.size()) break;
        at++;
        const Value* value = nullptr;
        if (s.substr(at, 1) == "(") {
            const std::size_t end = s.find(')', at);
            if (end == std::string_view::npos || !values.dict())
                fault(values.dict() ? "incomplete format key" : "format requires a mapping");
            value = values.dict()->find(s.substr(at + 1, end - at - 1));
            if (!value) fault("the format names a key that the dict has not: ", quote(s.substr(at + 1, end - at - 1)));
            used = 1;
            at   = end + 1;
        }
        Spec spec;
        for (; at < s.size() && std::string_view("-+ 0#").contains(s[at]); at++) {
            if (s[at] == '-') spec.align = '<';
            else if (s[at] == '0') spec.zero = true;
            else if (s[at] == '#') spec.alternate = true;
            else if (spec.sign != '+') spec.sign = s[at];
        }
        auto count = [&](bool& given) {
            std::size_t n = 0;
            given         = false;
            if (at < s.size() && s[at] == '*') {
                at++;
                const auto i = next().integer();
                if (!i || *i < 0) fault("* wants int");
                n = std::size_t(*i), given = true;
            }
            for (; at < s.size() && s[at] >= '0' && s[at] <= '9' && n <= widest; at++)
                n = n * 10 + std::size_t(s[at] - '0'), given = true;
            if (n > widest) fault("a format's width is more than ", widest);
            return n;
        };
        bool given = false;
        spec.width = count(given);
        if (at < s.size() && s[at] == '.') {
            at++;
            spec.precision = int(count(given));
        }
        while (at < s.size() && std::string_view("hlL").contains(s[at])) at++;
        if (at >= s.size()) fault("incomplete format");
        const char type = s[at++];
        if (type == '%') {
            out.append("%", false);
            continue;
        }
        if (!value) value = &next();
        if (spec.align == '<') spec.zero = false;
        if (spec.zero) spec.fill = "0";
        if (type == 's' || type == 'r' || type == 'a' || type == 'c') {
            MarkedText body;
            if (type == 'c' && value->integer()) {
                const std::int64_t c = *value->integer();
                if (c < 0 || c > 0x10ffff || (c >= 0xd800 && c < 0xe000)) fault("%c arg not in range");
                body.append(utf8_encode(char32_t(c)), false);
            } else if (type == 'r' || type == 'a') append_repr(runtime, body, *value);
            else append_str(runtime, body, *value);
            if (spec.precision >= 0) {
                const TextSpan keep = characters(body.bytes, 0, std::size_t(spec.precision));
                body                = body.slice(keep.begin, keep.end);
            }
            spec.fill = " ";
            out.append(padded(std::move(body), "", spec, spec.align ? spec.align : '>'));
        } else if (std::string_view("diuxXoeEfFgG").contains(type)) {
            spec.type = type;
            if (!value->number()) fault("%", type, " format: a real number is required, not ", type_name(*value));
            if (!value->integer() && std::string_view("xXo").contains(type))
                fault("%", type, " format: an integer is required, not float");
            if (std::string_view("eEfFgG").contains(type) && spec.precision < 0) spec.precision = 6;
            out.append(number_field(*value, spec, '>'));
        } else {
            fault("unsupported format character '", type, "'");
        }
    }
    if (!values.dict() && (tuple ? used < tuple->items.size() : used == 0 && !values.list()))
        fault("not all arguments converted during string formatting");
    runtime.budget.text(out.bytes.size());
    return out;
}

MarkedText format_value(Runtime& runtime, const Value& v, const std::string& text) {
    Spec             spec;
    std::string_view s = text;
    std::size_t      n = s.empty() ? 0 : std::size_t(utf8_next(s, 0).bytes);
    if (n && s.size() > n && std::string_view("<>=^").contains(s[n])) {
        spec.fill = s.substr(0, n), spec.align = s[n];
        s.remove_prefix(n + 1);
    } else if (!s.empty() && std::string_view("<>=^").contains(s[0])) {
        spec.align = s[0];
        s.remove_prefix(1);
    }
    auto take = [&](std::string_view any) {
        return !s.empty() && any.contains(s[0]) ? (n = std::size_t(s[0]), s.remove_prefix(1), char(n)) : char(0);
    };
    auto count = [&] {
        std::size_t number = 0;
        while (!s.empty() && s[0] >= '0' && s[0] <= '9' && number <= widest)
            number = number * 10 + std::size_t(s[0] - '0'), s.remove_prefix(1);
        if (number > widest) fault("a format's width is more than ", widest);
        return number;
    };
    if (const char sign = take("+- ")) spec.sign = sign;
    spec.alternate = take("#");
    if (take("0") && !spec.align) spec.zero = true, spec.fill = "0";
    spec.width = count();
    spec.group = take(",_");
    if (take(".")) spec.precision = int(count());
    spec.type = take("bcdeEfFgGnosxX%");
    if (!s.empty()) fault("invalid format specifier ", quote(text));
    if (v.number() && !v.get<bool>()) return number_field(v, spec, '>');
    MarkedText body;
    append_str(runtime, body, v);
    if (text.empty()) return body;
    if ((spec.type && spec.type != 's') || (!v.text() && !v.get<bool>()))
        fault("unsupported format specifier ", quote(text), " for ", type_name(v));
    if (spec.precision >= 0) {
        const TextSpan keep = characters(body.bytes, 0, std::size_t(spec.precision));
        body                = body.slice(keep.begin, keep.end);
    }
    return padded(std::move(body), "", spec, spec.align && spec.align != '=' ? spec.align : '<');
}

// A field's name with its .attributes and [items].
Value format_field(std::string_view name, const Arguments& arguments, std::size_t& next) {
    const std::size_t      end  = std::min(name.find_first_of(".["), name.size());
    const std::string_view head = name.substr(0, end);
    Value                  v;
    std::size_t            place = next;
    const bool numbered = !head.empty() && std::ranges::all_of(head, [](char c) { return c >= '0' && c <= '9'; });
    if (head.empty()) next++;
    if (numbered) std::from_chars(head.data(), head.data() + head.size(), place);
    if (head.empty() || numbered) {
        if (place >= arguments.positional.size()) fault("format() has no argument ", place);
        v = arguments.positional[place];
    } else {
        const Value* found = arguments.get(std::numeric_limits<std::size_t>::max(), head);
        if (!found) fault("format() has no argument ", quote(head));
        v = *found;
    }
    for (name.remove_prefix(end); !name.empty();) {
        const bool        item = name[0] == '[';
        const std::size_t stop = item ? name.find(']') : std::min(name.find_first_of(".[", 1), name.size());
        if (stop == std::string_view::npos) fault("a format field lacks ']'");
        const std::string_view key   = name.substr(1, stop - 1);
        std::size_t            index = 0;
        const bool is_index = std::from_chars(key.data(), key.data() + key.size(), index).ec == std::errc() && v.list();
        if (is_index && item && index < v.list()->items.size()) v = Value(v.list()->items[index]);
        else if (const Value* found = v.dict() && item ? v.dict()->find(key) : nullptr) v = Value(*found);
        else fault("a format field names ", quote(key), ", which is not there");
        name.remove_prefix(stop + (item ? 1 : 0));
    }
    return v;
}

Value format_braces(Runtime& runtime, const Text& format, const Arguments& arguments) {
    MarkedText             out;
    const std::string_view s    = format.bytes;
    std::size_t            next = 0;
    for (std::size_t at = 0; at < s.size();) {
        const std::size_t brace = std::min(s.find_first_of("{}", at), s.size());
        out.append(format, at, brace);
        at = brace;
        if (at >= s.size()) break;
        if (at + 1 < s.size() && s[at + 1] == s[at]) {
            out.append(format, at, at + 1);
            at += 2;
            continue;
        }
        if (s[at] == '}') fault("single '}' encountered in format string");
        const std::size_t end = s.find('}', at);
        if (end == std::string_view::npos) fault("expected '}' before end of string");
        std::string_view  field = s.substr(at + 1, end - at - 1);
        const std::size_t colon = std::min(field.find(':'), field.size());
        const std::string spec(colon < field.size() ? field.substr(colon + 1) : std::string_view());
        if (spec.contains('{')) fault("fields in format specifiers are not supported");
        field                        = field.substr(0, colon);
        const std::size_t conversion = field.find('!');
        Value             v          = format_field(field.substr(0, conversion), arguments, next);
        if (conversion != std::string_view::npos) {
            MarkedText text;
            if (field.substr(conversion) == "!s") append_str(runtime, text, v);
            else append_repr(runtime, text, v);
            v = Value(std::move(text));
        }
        out.append(format_value(runtime, v, spec));
        if (out.bytes.size() > runtime.budget.longest)
            fault("a text becomes longer than ", runtime.budget.longest, " bytes");
        at = end + 1;
    }
    runtime.budget.text(out.bytes.size());
    return out;
}

// -- methods

const Text& text_argument(const Arguments& a, std::size_t place, std::string_view name, std::string_view method) {
    const Value* v = a.get(place, name);
    if (!v) fault(method, "() takes at least ", place + 1, " argument");
    if (!v->text()) fault(method, "() argument must be str, not ", type_name(*v));
    return *v->text();
}

std::int64_t integer_argument(const Arguments& a, std::size_t place, std::string_view name, std::int64_t fallback) {
    const Value* v = a.get(place, name);
    if (!v || v->none()) return fallback;
    if (!v->integer()) fault("'", type_name(*v), "' object cannot be interpreted as an integer");
    return *v->integer();
}

// Python's [start:end] of the text in bytes, by the arguments at 1 and 2.
TextSpan window(const Text& t, const Arguments& a) {
    if (a.positional.size() < 2) return {0, t.bytes.size()};
    const auto n     = std::int64_t(count_characters(t.bytes));
    auto       bound = [&](std::int64_t i) { return std::size_t(std::clamp<std::int64_t>(i < 0 ? i + n : i, 0, n)); };
    const std::int64_t start = integer_argument(a, 1, "", 0);
    if (start > n) return {t.bytes.size() + 1, t.bytes.size()};
    return characters(t.bytes, bound(start), std::max(bound(start), bound(integer_argument(a, 2, "", n))));
}

bool starts_or_ends(const Text& t, const Arguments& a, bool start, std::string_view name) {
    const TextSpan w = window(t, a);
    if (w.begin > w.end) return false;
    const std::string_view s     = std::string_view(t.bytes).substr(w.begin, w.end - w.begin);
    auto                   holds = [&](const Value& v) {
        if (!v.text()) fault(name, " first arg must be str or a tuple of str, not ", type_name(v));
        return start ? s.starts_with(v.text()->bytes) : s.ends_with(v.text()->bytes);
    };
    if (a.positional.empty()) fault(name, "() takes at least 1 argument (0 given)");
    const Value& what = a.positional[0];
    if (what.list() && what.list()->form == List::Form::tuple) return std::ranges::any_of(what.list()->items, holds);
    return holds(what);
}

Value find_text(const Text& t, const Arguments& a, bool last, bool must, std::string_view name) {
    const Text&    what = text_argument(a, 0, "", name);
    const TextSpan w    = window(t, a);
    std::size_t    at   = std::string::npos;
    if (w.begin <= w.end) {
        const std::string_view s = std::string_view(t.bytes).substr(w.begin, w.end - w.begin);
        at                       = last ? s.rfind(what.bytes) : s.find(what.bytes);
    }
    if (at == std::string::npos) {
        if (must) fault("substring not found");
        return std::int64_t(-1);
    }
    return std::int64_t(count_characters(std::string_view(t.bytes).substr(0, w.begin + at)));
}

Value aligned(Runtime& runtime, const Text& t, const Arguments& a, char align) {
    const std::int64_t width = integer_argument(a, 0, "width", 0);
    const auto         n     = std::int64_t(count_characters(t.bytes));
    if (width <= n) return t.slice(0, t.bytes.size());
    const std::string fill = a.get(1, "fillchar") ? text_argument(a, 1, "fillchar", "center").bytes : " ";
    if (count_characters(fill) != 1) fault("The fill character must be exactly one character long");
    const auto more = std::size_t(width - n);
    runtime.budget.text(std::min(more, std::numeric_limits<std::size_t>::max() / 8) * fill.size() + t.bytes.size());
    const std::size_t left = align == '>' ? more : align == '<' ? 0 : more / 2 + (more & std::size_t(width) & 1);
    MarkedText        out;
    std::string       spaces;
    for (std::size_t i = 0; i < more; i++) spaces += fill;
    out.append(std::string_view(spaces).substr(0, left * fill.size()), false);
    out.append(t);
    out.append(std::string_view(spaces).substr(left * fill.size()), false);
    return out;
}

template <class F>
bool all_characters(const Text& t, const F& f) {
    for (std::size_t at = 0; at < t.bytes.size();) {
        const CodePoint c = utf8_next(t.bytes, at);
        if (!f(c.value)) return false;
        at += std::size_t(c.bytes);
    }
    return !t.bytes.empty();
}

Value partition(Runtime& runtime, const Text& t, const Arguments& a, bool last) {
    const Text& by = text_argument(a, 0, "sep", "partition");
    if (by.bytes.empty()) fault("empty separator");
    const std::size_t  at  = last ? t.bytes.rfind(by.bytes) : t.bytes.find(by.bytes);
    const Value        all = t.slice(0, t.bytes.size());
    std::vector<Value> out;
    if (at != std::string::npos)
        out = {t.slice(0, at), t.slice(at, at + by.bytes.size()), t.slice(at + by.bytes.size(), t.bytes.size())};
    else if (last) out = {Value(""), Value(""), all};
    else out = {all, Value(""), Value("")};
    return make_list(runtime, std::move(out), List::Form::tuple);
}

Value call_text_method(Runtime& runtime, const TextRef& self, std::string_view name, const Arguments& a) {
    const Text& t = *self;
    runtime.budget.text(std::min(t.bytes.size(), runtime.budget.longest));
    if (name == "strip" || name == "lstrip" || name == "rstrip") {
        const Value* set = a.get(0, "chars");
        return strip(t, set && !set->none() ? &text_argument(a, 0, "chars", name).bytes : nullptr, name[0] != 'r',
                     name[0] != 'l');
    }
    if (name == "split" || name == "rsplit") {
        const Value*       by   = a.get(0, "sep");
        const std::int64_t most = integer_argument(a, 1, "maxsplit", -1);
        return make_list(runtime, !by || by->none() ? split_blanks(t, most, name[0] == 'r')
                                                    : split(t, text_argument(a, 0, "sep", name), most, name[0] == 'r'));
    }
    if (name == "replace")
        return replace(runtime, t, text_argument(a, 0, "old", name), text_argument(a, 1, "new", name),
                       integer_argument(a, 2, "count", -1));
    if (name == "startswith" || name == "endswith") return starts_or_ends(t, a, name[0] == 's', name);
    if (name == "upper") return upper(t);
    if (name == "lower" || name == "casefold") return lower(t);
    if (name == "title") return title(t);
    if (name == "capitalize") return capitalize(t);
    if (name == "swapcase")
        return mapped(
            t, [](char32_t c, std::string& out) { lower_case(c) != c ? append_lower(c, out) : append_upper(c, out); });
    if (name == "splitlines")
        return make_list(runtime, split_lines(t, a.get(0, "keepends") && truth(*a.get(0, "keepends"))));
    if (name == "join") {
        if (!a.get(0, "")) fault("join() takes exactly one argument (0 given)");
        const std::vector<Value> items = iterate(runtime, *a.get(0, ""));
        for (std::size_t i = 0; i < items.size(); i++)
            if (!items[i].text())
                fault("sequence item ", i, ": expected str instance, ", type_name(items[i]), " found");
        return join(runtime, t, items);
    }
    if (name == "format") return format_braces(runtime, t, a);
    if (name == "find" || name == "index") return find_text(t, a, false, name == "index", name);
    if (name == "rfind" || name == "rindex") return find_text(t, a, true, name == "rindex", name);
    if (name == "count") {
        const std::string& what = text_argument(a, 0, "", name).bytes;
        const TextSpan     w    = window(t, a);
        if (w.begin > w.end) return std::int64_t(0);
        const std::string_view s = std::string_view(t.bytes).substr(w.begin, w.end - w.begin);
        if (what.empty()) return std::int64_t(count_characters(s)) + 1;
        std::int64_t n = 0;
        for (std::size_t at = 0; (at = s.find(what, at)) != std::string_view::npos; at += what.size()) n++;
        return n;
    }
    if (name == "removeprefix" || name == "removesuffix") {
        const std::string& what = text_argument(a, 0, "", name).bytes;
        const std::size_t  n    = t.bytes.size();
        if (name == "removeprefix") return t.slice(t.bytes.starts_with(what) ? what.size() : 0, n);
        return t.slice(0, t.bytes.ends_with(what) ? n - what.size() : n);
    }
    if (name == "partition" || name == "rpartition") return partition(runtime, t, a, name[0] == 'r');
    if (name == "ljust") return aligned(runtime, t, a, '<');
    if (name == "rjust") return aligned(runtime, t, a, '>');
    if (name == "center") return aligned(runtime, t, a, '^');
    if (name == "zfill") {
        const bool signed_ = t.bytes.starts_with('-') || t.bytes.starts_with('+');
        Arguments  width{{a.get(0, "width") ? *a.get(0, "width") : Value()}, {}};
        width.positional.emplace_back("0");
        if (!signed_) return aligned(runtime, t, width, '>');
        if (!width.positional[0].integer()) fault("zfill() takes an integer");
        width.positional[0] = Value(std::max<std::int64_t>(*width.positional[0].integer(), 1) - 1);
        MarkedText out      = t.slice(0, 1);
        out.append(*aligned(runtime, Text{t.slice(1, t.bytes.size()), false}, width, '>').text());
        return out;
    }
    if (name == "expandtabs") {
        const std::int64_t size = integer_argument(a, 0, "tabsize", 8);
        if (size > std::int64_t(widest)) fault("a tab is wider than ", widest);
        std::int64_t column = 0;
        MarkedText   out    = mapped(t, [&](char32_t c, std::string& made) {
            if (c == '\t') {
                if (made.size() > runtime.budget.longest)
                    fault("a text becomes longer than ", runtime.budget.longest, " bytes");
                const std::int64_t n = size > 0 ? size - column % size : 0;
                made.append(std::size_t(n), ' ');
                column += n;
            } else {
                made += utf8_encode(c);
                column = c == '\n' || c == '\r' ? 0 : column + 1;
            }
        });
        runtime.budget.text(out.bytes.size());
        return out;
    }
    if (name == "isspace") return all_characters(t, [](char32_t c) { return is_blank(c); });
    if (name == "isalpha") return all_characters(t, [](char32_t c) { return (char_class(c) & class_letter) != 0; });
    if (name == "isalnum")
        return all_characters(t, [](char32_t c) { return (char_class(c) & (class_letter | class_number)) != 0; });
    if (name == "isdigit" || name == "isdecimal" || name == "isnumeric")
        return all_characters(
            t, [](char32_t c) { return c < 128 ? c >= '0' && c <= '9' : (char_class(c) & class_number) != 0; });
    if (name == "isascii") return std::ranges::all_of(t.bytes, [](char c) { return !(c & 0x80); });
    if (name == "isupper" || name == "islower" || name == "istitle") {
        bool any = false, right = true, inside = false;
        (void)all_characters(t, [&](char32_t c) {
            const bool up = lower_case(c) != c, low = !up && upper_case(c) != c;
            any |= up || low;
            if (name == "isupper" && low) right = false;
            if (name == "islower" && up) right = false;
            if (name == "istitle" && ((up && inside) || (low && !inside))) right = false;
            inside = up || low;
            return true;
        });
        return any && right;
    }
    fault("'str object' has no attribute '", name, "'");
}

} // namespace quire::jinja
