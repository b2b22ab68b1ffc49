// quire.text.templates.jinja.text_methods: the methods of Python's str. Every piece of a result keeps the mark of the text it
// came from. Owns nothing.
export module quire.text.templates.jinja.text_methods;

import quire.core.base;
import quire.core.unicode;
import quire.core.unicode_data;
import quire.text.templates.jinja.text_format;
import quire.text.templates.jinja.value_text;

export namespace quire::jinja {

bool  is_text_method(std::string_view name);
Value call_text_method(Runtime& runtime, const TextRef& self, std::string_view name, const Arguments& arguments);

MarkedText upper(Runtime& runtime, const Text& text);
MarkedText lower(Runtime& runtime, const Text& text);
MarkedText capitalize(Runtime& runtime, const Text& text);
// Without the characters of `set` (blanks when null) at the ends that are wanted.
MarkedText         strip(Runtime& runtime, const Text& text, const std::string* set, bool left, bool right);
MarkedText         replace(Runtime& runtime, const Text& text, const Text& from, const Text& to, std::int64_t most);
std::vector<Value> split_lines(Runtime& runtime, const Text& text, bool keep_ends);
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

// f(character, out) for every character, in the parts' marks.
template <class F>
MarkedText mapped(Runtime& runtime, const Text& text, const F& f) {
    runtime.budget.look_up(text.bytes.size());
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

MarkedText upper(Runtime& runtime, const Text& text) { return mapped(runtime, text, append_upper); }
MarkedText lower(Runtime& runtime, const Text& text) { return mapped(runtime, text, append_lower); }
MarkedText capitalize(Runtime& runtime, const Text& text) {
    bool first = true;
    return mapped(runtime, text, [&](char32_t c, std::string& out) {
        std::exchange(first, false) ? append_title(c, out) : append_lower(c, out);
    });
}
MarkedText title(Runtime& runtime, const Text& text) {
    bool inside = false;
    return mapped(runtime, text, [&](char32_t c, std::string& out) {
        inside ? append_lower(c, out) : append_title(c, out);
        inside = is_cased(c);
    });
}

MarkedText strip(Runtime& runtime, const Text& text, const std::string* set, bool left, bool right) {
    std::unordered_set<std::string_view> characters;
    if (set) {
        runtime.budget.look_up(set->size());
        for (std::size_t at = 0, n; at < set->size(); at += n) {
            n = std::size_t(utf8_next(*set, at).bytes);
            characters.insert(std::string_view(*set).substr(at, n));
        }
    }
    const std::string_view s  = text.bytes;
    auto                   in = [&](std::size_t at, std::size_t n) {
        return set ? characters.contains(s.substr(at, n)) : is_blank(utf8_next(s, at).value);
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
    std::size_t            at     = 0;
    std::size_t            pieces = 0;
    auto                   put    = [&](const MarkedText& piece, std::size_t begin, std::size_t end) {
        if (++pieces % 16 == 0) runtime.budget.step();
        runtime.budget.growing(out.bytes.size() + (end - begin));
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
        for (std::size_t found; most != 0 && (found = find(runtime.budget, s, f, at)) != std::string_view::npos;
             most--) {
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

std::vector<Value> split_lines(Runtime& runtime, const Text& text, bool keep_ends) {
    std::vector<Value> out;
    std::size_t        begin = 0;
    for (std::size_t at = 0; at < text.bytes.size();) {
        const CodePoint c    = utf8_next(text.bytes, at);
        std::size_t     next = at + std::size_t(c.bytes);
        if (is_line_break(c.value)) {
            if (c.value == '\r' && next < text.bytes.size() && text.bytes[next] == '\n') next++;
            out.emplace_back(text.slice(begin, keep_ends ? next : at));
            runtime.budget.piece(out.size());
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
        runtime.budget.growing(out.bytes.size());
    }
    runtime.budget.text(out.bytes.size());
    return out;
}

// -- splitting

std::vector<Value> split_blanks(Runtime& runtime, const Text& text, std::int64_t most, bool from_right) {
    std::vector<TextSpan>  words;
    const std::string_view s = text.bytes;
    for (std::size_t at = 0; at < s.size();) {
        const CodePoint c = utf8_next(s, at);
        const auto      n = std::size_t(c.bytes);
        if (!is_blank(c.value)) {
            if (!words.empty() && words.back().end == at) words.back().end += n;
            else words.push_back({at, at + n}), runtime.budget.piece(words.size());
        }
        at += n;
    }
    if (most >= 0 && std::int64_t(words.size()) > most + 1) {
        const auto m = std::size_t(most);
        if (from_right) { // the first words stay together, with the text before them
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

std::vector<Value> split(Runtime& runtime, const Text& text, const Text& by, std::int64_t most, bool from_right) {
    if (by.bytes.empty()) fault("empty separator");
    const std::string_view s = text.bytes, f = by.bytes;
    std::vector<TextSpan>  parts;
    if (from_right) {
        std::size_t end = s.size();
        for (; most != 0 && end >= f.size(); most--) {
            const std::size_t found = rfind(runtime.budget, s, f, end - f.size());
            if (found == std::string_view::npos) break;
            parts.push_back({found + f.size(), end});
            runtime.budget.piece(parts.size());
            end = found;
        }
        parts.push_back({0, end});
        std::reverse(parts.begin(), parts.end());
    } else {
        std::size_t at = 0;
        for (std::size_t found; most != 0 && (found = find(runtime.budget, s, f, at)) != std::string_view::npos;
             most--) {
            parts.push_back({at, found});
            runtime.budget.piece(parts.size());
            at = found + f.size();
        }
        parts.push_back({at, s.size()});
    }
    std::vector<Value> out;
    for (const TextSpan& p : parts) out.emplace_back(text.slice(p.begin, p.end));
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

Value find_text(Runtime& runtime, const Text& t, const Arguments& a, bool last, bool must, std::string_view name) {
    const Text&    what = text_argument(a, 0, "", name);
    const TextSpan w    = window(t, a);
    std::size_t    at   = std::string::npos;
    if (w.begin <= w.end) {
        const std::string_view s = std::string_view(t.bytes).substr(w.begin, w.end - w.begin);
        at                       = last ? rfind(runtime.budget, s, what.bytes) : find(runtime.budget, s, what.bytes);
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
bool all_characters(Runtime& runtime, const Text& t, const F& f) {
    runtime.budget.look_up(t.bytes.size());
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
    const std::size_t  at  = last ? rfind(runtime.budget, t.bytes, by.bytes) : find(runtime.budget, t.bytes, by.bytes);
    const Value        all = t.slice(0, t.bytes.size());
    std::vector<Value> out;
    if (at != std::string::npos)
        out = {t.slice(0, at), t.slice(at, at + by.bytes.size()), t.slice(at + by.bytes.size(), t.bytes.size())};
    else if (last) out = {Value(""), Value(""), all};
    else out = {all, Value(""), Value("")};
    return make_list(runtime, std::move(out), List::Form::tuple);
}

Value call_text_method(Runtime& runtime, const TextRef& self, std::string_view name, const Arguments& a) {
    static const Categories letters = categories_named("L"), numbers = categories_named("N");
    const Text&             t = *self;
    runtime.budget.text(std::min(t.bytes.size(), runtime.budget.longest));
    if (name == "strip" || name == "lstrip" || name == "rstrip") {
        const Value* set = a.get(0, "chars");
        return strip(runtime, t, set && !set->none() ? &text_argument(a, 0, "chars", name).bytes : nullptr,
                     name[0] != 'r', name[0] != 'l');
    }
    if (name == "split" || name == "rsplit") {
        const Value*       by    = a.get(0, "sep");
        const std::int64_t most  = integer_argument(a, 1, "maxsplit", -1);
        const bool         right = name[0] == 'r';
        return make_list(runtime, !by || by->none() ? split_blanks(runtime, t, most, right)
                                                    : split(runtime, t, text_argument(a, 0, "sep", name), most, right));
    }
    if (name == "replace")
        return replace(runtime, t, text_argument(a, 0, "old", name), text_argument(a, 1, "new", name),
                       integer_argument(a, 2, "count", -1));
    if (name == "startswith" || name == "endswith") return starts_or_ends(t, a, name[0] == 's', name);
    if (name == "upper") return upper(runtime, t);
    if (name == "lower" || name == "casefold") return lower(runtime, t);
    if (name == "title") return title(runtime, t);
    if (name == "capitalize") return capitalize(runtime, t);
    if (name == "swapcase")
        return mapped(runtime, t, [](char32_t c, std::string& out) {
            lower_case(c) != c ? append_lower(c, out) : append_upper(c, out);
        });
    if (name == "splitlines")
        return make_list(runtime, split_lines(runtime, t, a.get(0, "keepends") && truth(*a.get(0, "keepends"))));
    if (name == "join") {
        if (!a.get(0, "")) fault("join() takes exactly one argument (0 given)");
        const std::vector<Value> items = iterate(runtime, *a.get(0, ""));
        for (std::size_t i = 0; i < items.size(); i++)
            if (!items[i].text())
                fault("sequence item ", i, ": expected str instance, ", type_name(items[i]), " found");
        return join(runtime, t, items);
    }
    if (name == "format") return format_braces(runtime, t, a);
    if (name == "find" || name == "index") return find_text(runtime, t, a, false, name == "index", name);
    if (name == "rfind" || name == "rindex") return find_text(runtime, t, a, true, name == "rindex", name);
    if (name == "count") {
        const std::string& what = text_argument(a, 0, "", name).bytes;
        const TextSpan     w    = window(t, a);
        if (w.begin > w.end) return std::int64_t(0);
        const std::string_view s = std::string_view(t.bytes).substr(w.begin, w.end - w.begin);
        if (what.empty()) return std::int64_t(count_characters(s)) + 1;
        std::int64_t n = 0;
        for (std::size_t at = 0; (at = find(runtime.budget, s, what, at)) != std::string_view::npos; at += what.size())
            if (++n % 16 == 0) runtime.budget.step();
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
        MarkedText   out    = mapped(runtime, t, [&](char32_t c, std::string& made) {
            if (c == '\t') {
                runtime.budget.growing(made.size());
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
    if (name == "isspace") return all_characters(runtime, t, [](char32_t c) { return is_blank(c); });
    if (name == "isalpha") return all_characters(runtime, t, [](char32_t c) { return is_in(letters, c); });
    if (name == "isalnum")
        return all_characters(runtime, t, [](char32_t c) { return is_in(letters, c) || is_in(numbers, c); });
    if (name == "isdigit" || name == "isdecimal" || name == "isnumeric")
        return all_characters(runtime, t,
                              [](char32_t c) { return c < 128 ? c >= '0' && c <= '9' : is_in(numbers, c); });
    if (name == "isascii") return std::ranges::all_of(t.bytes, [](char c) { return !(c & 0x80); });
    if (name == "isupper" || name == "islower" || name == "istitle") {
        bool any = false, right = true, inside = false;
        (void)all_characters(runtime, t, [&](char32_t c) {
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
