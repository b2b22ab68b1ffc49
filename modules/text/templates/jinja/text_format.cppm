// quire.text.templates.jinja.text_format: Python's `format % values` and str.format(). Every piece of a result keeps the mark of the text it came
// from. Owns nothing.
export module quire.text.templates.jinja.text_format;

import quire.core.base;
import quire.core.unicode;
export import quire.text.marked_text;
export import quire.text.templates.jinja.value;
import quire.text.templates.jinja.value_text;

export namespace quire::jinja {

// `format % values`: a tuple, a dict or one value.
Value format_percent(Runtime& runtime, const Text& format, const Value& values);
// format.format(arguments).
Value format_braces(Runtime& runtime, const Text& format, const Arguments& arguments);

inline constexpr std::size_t widest = 10'000; // characters of a field

// Bytes [begin, end) of the characters [from, to).
TextSpan characters(std::string_view text, std::size_t from, std::size_t to);

} // namespace quire::jinja

module :private;

namespace quire::jinja {

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

struct Spec {
    std::string fill  = " ";
    char        align = 0, sign = '-', type = 0, group = 0;
    bool        alternate = false, zero = false;
    std::size_t width     = 0;
    int         precision = -1;
};

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
        runtime.budget.growing(out.bytes.size());
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

// How the fields of a format name their arguments: {} or {0}, of which there may be one kind.
struct Numbering {
    std::size_t next      = 0;
    bool        automatic = false, manual = false;
};

// A field's name with its .attributes and [items].
Value format_field(std::string_view name, const Arguments& arguments, Numbering& numbering) {
    const std::size_t      end  = std::min(name.find_first_of(".["), name.size());
    const std::string_view head = name.substr(0, end);
    Value                  v;
    std::size_t            place = numbering.next;
    const bool numbered = !head.empty() && std::ranges::all_of(head, [](char c) { return c >= '0' && c <= '9'; });
    if (head.empty()) numbering.next++, numbering.automatic = true;
    if (numbered) std::from_chars(head.data(), head.data() + head.size(), place), numbering.manual = true;
    if (numbering.automatic && numbering.manual)
        fault(head.empty() ? "cannot switch from manual field specification to automatic field numbering"
                           : "cannot switch from automatic field numbering to manual field specification");
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

// `depth`: fields may stand in specifications so deep.
MarkedText expand_braces(Runtime& runtime, const Text& format, const Arguments& arguments, Numbering& numbering,
                         int depth) {
    if (depth < 0) fault("Max string recursion exceeded");
    MarkedText             out;
    const std::string_view s = format.bytes;
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
        std::size_t end = at + 1;
        for (int open = 1; end < s.size() && (open += (s[end] == '{') - (s[end] == '}')) > 0;) end++;
        if (end >= s.size()) fault("expected '}' before end of string");
        std::string_view  field = s.substr(at + 1, end - at - 1);
        const std::size_t colon = std::min(field.find(':'), field.size());
        std::string       spec(colon < field.size() ? field.substr(colon + 1) : std::string_view());
        field                        = field.substr(0, colon);
        const std::size_t conversion = field.find('!');
        Value             v          = format_field(field.substr(0, conversion), arguments, numbering);
        if (conversion != std::string_view::npos) {
            MarkedText text;
            if (field.substr(conversion) == "!s") append_str(runtime, text, v);
            else append_repr(runtime, text, v);
            v = Value(std::move(text));
        }
        if (spec.contains('{') || spec.contains('}'))
            spec = expand_braces(runtime, Text{format.slice(end - spec.size(), end), false}, arguments, numbering,
                                 depth - 1)
                       .bytes;
        out.append(format_value(runtime, v, spec));
        runtime.budget.growing(out.bytes.size());
        at = end + 1;
    }
    runtime.budget.text(out.bytes.size());
    return out;
}

Value format_braces(Runtime& runtime, const Text& format, const Arguments& arguments) {
    Numbering numbering;
    return expand_braces(runtime, format, arguments, numbering, 1);
}

} // namespace quire::jinja
