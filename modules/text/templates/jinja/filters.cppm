// quire.text.templates.jinja.filters: the filters that can stand after `|`: Jinja's filters, with tojson as chat templates know it. Owns nothing.
export module quire.text.templates.jinja.filters;

import quire.core.base;
import quire.core.json;
import quire.core.unicode;
import quire.text.templates.jinja.access;
import quire.text.templates.jinja.ast;
import quire.text.templates.jinja.json_text;
import quire.text.templates.jinja.tests;
import quire.text.templates.jinja.text_format;
import quire.text.templates.jinja.text_methods;
import quire.text.templates.jinja.value_text;

export namespace quire::jinja {

bool  is_filter(std::string_view name);
Value apply_filter(Runtime& runtime, std::string_view name, const Value& value, const Arguments& arguments);

} // namespace quire::jinja

module :private;

namespace quire::jinja {

using Filter = Value (*)(Runtime& runtime, const Value& value, const Arguments& arguments);

bool flag(const Arguments& a, std::size_t place, std::string_view name, bool fallback = false) {
    const Value* v = a.get(place, name);
    return v ? truth(*v) : fallback;
}

std::int64_t whole(const Arguments& a, std::size_t place, std::string_view name, std::int64_t fallback) {
    const Value* v = a.get(place, name);
    if (!v) return fallback;
    must_be_defined(*v);
    if (!v->integer()) fault("the filter's argument '", name, "' is no int but ", type_name(*v));
    return *v->integer();
}

// The items of an iterator, as a list that behaves like one of Python's generators.
Value iterator(Runtime& runtime, std::vector<Value> items) {
    return make_list(runtime, std::move(items), List::Form::iterator);
}

Value lower_key(Runtime& runtime, const Value& v, bool case_sensitive) {
    if (case_sensitive || !v.text()) return v;
    runtime.budget.text(v.text()->bytes.size());
    return lower(runtime, *v.text());
}

// Sorted by `key` of each item; stable. Items without an order are an error.
template <class Key>
void sort_by(Runtime& runtime, std::vector<Value>& items, bool reverse, const Key& key) {
    runtime.budget.list(items.size() * 8);
    std::vector<std::pair<Value, std::size_t>> keys;
    for (std::size_t i = 0; i < items.size(); i++) keys.emplace_back(key(items[i]), i);
    std::stable_sort(keys.begin(), keys.end(), [&](const auto& a, const auto& b) {
        runtime.budget.step();
        return order(runtime.budget, (reverse ? b : a).first, (reverse ? a : b).first, "<") < 0;
    });
    std::vector<Value> out;
    for (const auto& [k, i] : keys) out.push_back(std::move(items[i]));
    items = std::move(out);
}

Value attribute_or_default(Runtime& runtime, const Value& item, const Value& path, const Value* fallback) {
    Value v = get_path(runtime, item, path);
    return v.undefined() && fallback ? *fallback : v;
}

// select, reject, selectattr, rejectattr.
Value chosen(Runtime& runtime, const Value& v, const Arguments& a, bool by_attribute, bool wanted) {
    std::vector<Value> out;
    const std::size_t  skip = by_attribute ? 1 : 0;
    if (a.positional.size() < skip) fault("Missing parameter for attribute name");
    std::string test;
    Arguments   rest;
    if (a.positional.size() > skip) {
        test            = to_str(runtime, a.positional[skip]).bytes;
        rest.positional = {a.positional.begin() + std::ptrdiff_t(skip) + 1, a.positional.end()};
        rest.named      = a.named;
        if (!is_test(test)) fault("no test named ", quote(test));
    }
    if (!truth(v)) return iterator(runtime, {}); // None too, as Jinja has it
    for (const Value& item : iterate(runtime, v)) {
        const Value tested = by_attribute ? get_path(runtime, item, a.positional[0]) : item;
        if ((test.empty() ? truth(tested) : apply_test(runtime, test, tested, rest, is_filter)) == wanted)
            out.push_back(item);
    }
    return iterator(runtime, std::move(out));
}

Value map_filter(Runtime& runtime, const Value& v, const Arguments& a) {
    if (!truth(v)) return iterator(runtime, {});
    std::vector<Value> out;
    if (a.positional.empty()) {
        const Value* attribute = a.get(0, "attribute");
        if (!attribute) fault("map requires a filter argument");
        for (const Value& item : iterate(runtime, v))
            out.push_back(attribute_or_default(runtime, item, *attribute, a.get(9, "default")));
    } else {
        const std::string name = to_str(runtime, a.positional[0]).bytes;
        Arguments         rest{{a.positional.begin() + 1, a.positional.end()}, a.named};
        if (--runtime.budget.recursion < 0) fault("filters in filters are nested too deep");
        for (const Value& item : iterate(runtime, v)) out.push_back(apply_filter(runtime, name, item, rest));
        runtime.budget.recursion++;
    }
    return iterator(runtime, std::move(out));
}

Value default_filter(Runtime&, const Value& v, const Arguments& a) {
    const Value* fallback = a.get(0, "default_value");
    if (!v.undefined() && !(flag(a, 1, "boolean") && !truth(v))) return v;
    return fallback ? *fallback : Value("");
}

Value tojson(Runtime& runtime, const Value& v, const Arguments& a) {
    a.only("tojson", {"ensure_ascii", "indent", "separators", "sort_keys"});
    JsonStyle style;
    style.ensure_ascii = flag(a, 0, "ensure_ascii");
    style.sort_keys    = flag(a, 3, "sort_keys");
    if (const Value* indent = a.get(1, "indent"); indent && !indent->none()) {
        if (indent->text()) style.indent = indent->text()->bytes;
        else style.indent = std::string(std::size_t(std::clamp<std::int64_t>(whole(a, 1, "indent", 0), 0, 1000)), ' ');
        style.item_separator = ",";
    }
    if (const Value* separators = a.get(2, "separators"); separators && !separators->none()) {
        const List* pair = separators->list();
        if (!pair || pair->items.size() != 2 || !pair->items[0].text() || !pair->items[1].text())
            fault("tojson's separators are no pair of texts");
        style.item_separator = pair->items[0].text()->bytes;
        style.key_separator  = pair->items[1].text()->bytes;
    }
    return to_json(runtime, v, style);
}

Value indent(Runtime& runtime, const Value& v, const Arguments& a) {
    const TextRef text = as_text(runtime, v);
    MarkedText    margin;
    if (const Value* width = a.get(0, "width"); width && width->text()) margin = *width->text();
    else
        margin.append(std::string(std::size_t(std::clamp<std::int64_t>(whole(a, 0, "width", 4), 0, 10'000)), ' '),
                      false);
    const bool first = flag(a, 1, "first"), blank = flag(a, 2, "blank");
    MarkedText with_end; // Jinja adds a line break before it splits into lines
    with_end.append(*text);
    with_end.append("\n", false);
    std::vector<Value> lines = split_lines(runtime, Text{std::move(with_end), false}, false);
    MarkedText         out;
    for (std::size_t i = 0; i < lines.size(); i++) {
        const Text& line = *lines[i].text();
        if (i) out.append("\n", false);
        if (i == 0 ? first : blank || !line.bytes.empty()) out.append(margin);
        out.append(line);
        runtime.budget.growing(out.bytes.size());
    }
    runtime.budget.text(out.bytes.size());
    return out;
}

Value join_filter(Runtime& runtime, const Value& v, const Arguments& a) {
    std::vector<Value> items = iterate(runtime, v);
    if (const Value* attribute = a.get(1, "attribute"); attribute && !attribute->none())
        for (Value& item : items) item = get_path(runtime, item, *attribute);
    const Value* by = a.get(0, "d");
    return join(runtime, *as_text(runtime, by ? *by : Value("")), items);
}

Value items_filter(Runtime& runtime, const Value& v, const Arguments&) {
    if (v.undefined()) return iterator(runtime, {});
    if (!v.dict()) fault("Can only get item pairs from a mapping.");
    return iterator(runtime, iterate(runtime, call_method(runtime, v, "items", {})));
}

Value dictsort(Runtime& runtime, const Value& v, const Arguments& a) {
    must_be_defined(v);
    if (!v.dict()) fault("'", type_name(v), " object' has no attribute 'items'");
    const bool   sensitive = flag(a, 0, "case_sensitive");
    const Value* by        = a.get(1, "by");
    const bool   by_value  = by && by->text() && by->text()->bytes == "value";
    if (by && !by_value && !(by->text() && by->text()->bytes == "key"))
        fault("You can only sort by either \"key\" or \"value\"");
    std::vector<Value> items = iterate(runtime, call_method(runtime, v, "items", {}));
    sort_by(runtime, items, flag(a, 2, "reverse"),
            [&](const Value& item) { return lower_key(runtime, item.list()->items[by_value ? 1 : 0], sensitive); });
    return make_list(runtime, std::move(items));
}

Value sort_filter(Runtime& runtime, const Value& v, const Arguments& a) {
    std::vector<Value> items     = iterate(runtime, v);
    const bool         sensitive = flag(a, 1, "case_sensitive");
    const Value*       attribute = a.get(2, "attribute");
    sort_by(runtime, items, flag(a, 0, "reverse"), [&](const Value& item) -> Value {
        if (!attribute || attribute->none()) return lower_key(runtime, item, sensitive);
        if (!attribute->text()) return lower_key(runtime, get_path(runtime, item, *attribute), sensitive);
        std::vector<Value> keys;
        for (std::string_view path : split(attribute->text()->bytes, ','))
            keys.push_back(lower_key(runtime, get_path(runtime, item, Value(path)), sensitive));
        return make_list(runtime, std::move(keys));
    });
    return make_list(runtime, std::move(items));
}

Value unique_filter(Runtime& runtime, const Value& v, const Arguments& a) {
    std::vector<Value> out, seen;
    const Value*       attribute = a.get(1, "attribute");
    for (const Value& item : iterate(runtime, v)) {
        const Value key =
            lower_key(runtime, attribute && !attribute->none() ? get_path(runtime, item, *attribute) : item,
                      flag(a, 0, "case_sensitive"));
        if (std::ranges::any_of(seen, [&](const Value& s) { return equal(runtime.budget, s, key); })) continue;
        seen.push_back(key);
        out.push_back(item);
    }
    return iterator(runtime, std::move(out));
}

Value extreme(Runtime& runtime, const Value& v, const Arguments& a, int sign) {
    const Value*       attribute = a.get(1, "attribute");
    std::vector<Value> items     = iterate(runtime, v);
    if (items.empty()) return undefined("No aggregated item, sequence was empty.");
    auto key = [&](const Value& item) {
        return lower_key(runtime, attribute && !attribute->none() ? get_path(runtime, item, *attribute) : item,
                         flag(a, 0, "case_sensitive"));
    };
    std::size_t best = 0;
    for (std::size_t i = 1; i < items.size(); i++)
        if (order(runtime.budget, key(items[i]), key(items[best]), sign < 0 ? "<" : ">") * sign > 0) best = i;
    return items[best];
}

Value sum_filter(Runtime& runtime, const Value& v, const Arguments& a) {
    const Value* attribute = a.get(0, "attribute");
    const Value* start     = a.get(1, "start");
    Value        total     = start ? *start : Value(std::int64_t(0));
    if (total.text()) fault("sum() can't sum strings [use ''.join(seq) instead]");
    for (const Value& item : iterate(runtime, v))
        total = arithmetic(runtime, NodeKind::add, total,
                           attribute && !attribute->none() ? get_path(runtime, item, *attribute) : item);
    return total;
}

Value groupby(Runtime& runtime, const Value& v, const Arguments& a) {
    const Value* attribute = a.get(0, "attribute");
    if (!attribute) fault("groupby() needs an attribute");
    std::vector<Value> items = iterate(runtime, v), out;
    auto raw = [&](const Value& item) { return attribute_or_default(runtime, item, *attribute, a.get(1, "default")); };
    auto key = [&](const Value& item) { return lower_key(runtime, raw(item), flag(a, 2, "case_sensitive")); };
    sort_by(runtime, items, false, key);
    for (std::size_t begin = 0, end; begin < items.size(); begin = end) {
        const Value k = key(items[begin]);
        for (end = begin + 1; end < items.size() && equal(runtime.budget, key(items[end]), k);) end++;
        Value group = make_list(runtime, {items.begin() + std::ptrdiff_t(begin), items.begin() + std::ptrdiff_t(end)});
        out.push_back(make_list(runtime, {raw(items[begin]), std::move(group)}, List::Form::tuple));
    }
    return make_list(runtime, std::move(out));
}

Value batch(Runtime& runtime, const Value& v, const Arguments& a) {
    const std::int64_t size = whole(a, 0, "linecount", 0);
    const Value*       fill = a.get(1, "fill_with");
    if (size <= 0 || size > 100'000) fault("batch() needs a size from 1 to 100000");
    std::vector<Value> out, row;
    for (const Value& item : iterate(runtime, v)) {
        if (std::int64_t(row.size()) == size) out.push_back(make_list(runtime, std::exchange(row, {})));
        row.push_back(item);
    }
    if (!row.empty()) {
        while (fill && !fill->none() && std::int64_t(row.size()) < size) row.push_back(*fill);
        out.push_back(make_list(runtime, std::move(row)));
    }
    return iterator(runtime, std::move(out));
}

Value slice_filter(Runtime& runtime, const Value& v, const Arguments& a) {
    const std::int64_t n    = whole(a, 0, "slices", 0);
    const Value*       fill = a.get(1, "fill_with");
    if (n <= 0 || n > 100'000) fault("slice() needs a number from 1 to 100000");
    const std::vector<Value> items = iterate(runtime, v);
    const auto               per = std::int64_t(items.size()) / n, more = std::int64_t(items.size()) % n;
    std::vector<Value>       out;
    for (std::int64_t i = 0, at = 0; i < n; i++) {
        const std::int64_t size = per + (i < more ? 1 : 0);
        std::vector<Value> row(items.begin() + at, items.begin() + at + size);
        if (fill && !fill->none() && i >= more) row.push_back(*fill);
        out.push_back(make_list(runtime, std::move(row)));
        at += size;
    }
    return iterator(runtime, std::move(out));
}

Value int_filter(Runtime& runtime, const Value& v, const Arguments& a) {
    const Value* fallback = a.get(0, "default");
    const Value  failed   = fallback ? *fallback : Value(std::int64_t(0));
    must_be_defined(v);
    const std::int64_t base = whole(a, 1, "base", 10);
    if (v.integer()) return *v.integer();
    if (const auto d = v.number())
        return std::isfinite(*d) && std::fabs(*d) < 9.2e18 ? Value(std::int64_t(*d)) : failed;
    if (!v.text()) return failed;
    runtime.budget.text(v.text()->bytes.size());
    std::string s        = strip(runtime, *v.text(), nullptr, true, true).bytes;
    const bool  negative = s.starts_with('-');
    if (negative || s.starts_with('+')) s.erase(0, 1);
    std::string digits;
    for (std::size_t i = 0; i < s.size(); i++)
        if (s[i] != '_' || i == 0 || i + 1 == s.size() || s[i - 1] == '_') digits += s[i];
    std::string_view body = digits;
    if ((base == 16 && (body.starts_with("0x") || body.starts_with("0X"))) ||
        (base == 8 && (body.starts_with("0o") || body.starts_with("0O"))) ||
        (base == 2 && (body.starts_with("0b") || body.starts_with("0B"))))
        body.remove_prefix(2);
    if (base < 2 || base > 36) return failed;
    const auto value = to_number<std::uint64_t>(body, int(base));
    if (value && *value <= std::uint64_t(std::numeric_limits<std::int64_t>::max()))
        return negative ? -std::int64_t(*value) : std::int64_t(*value);
    char*        stop = nullptr; // int(float(text)), as Jinja tries next
    const double d    = std::strtod(digits.c_str(), &stop);
    const bool   hex  = digits.find_first_of("xXpP") != std::string::npos;
    if (digits.empty() || hex || stop != digits.c_str() + digits.size() || !std::isfinite(d) || std::fabs(d) >= 9.2e18)
        return failed;
    return std::int64_t(negative ? -d : d);
}

Value float_filter(Runtime& runtime, const Value& v, const Arguments& a) {
    const Value* fallback = a.get(0, "default");
    const Value  failed   = fallback ? *fallback : Value(0.0);
    must_be_defined(v);
    if (v.number()) return *v.number();
    if (!v.text()) return failed;
    runtime.budget.text(v.text()->bytes.size());
    const std::string s    = strip(runtime, *v.text(), nullptr, true, true).bytes;
    char*             stop = nullptr;
    const double      d    = std::strtod(s.c_str(), &stop);
    if (s.empty() || s.find_first_of("xXpP(") != std::string::npos || stop != s.c_str() + s.size()) return failed;
    return d;
}

Value round_filter(Runtime&, const Value& v, const Arguments& a) {
    must_be_defined(v);
    const std::int64_t digits = std::clamp<std::int64_t>(whole(a, 0, "precision", 0), -300, 300);
    const Value*       method = a.get(1, "method");
    const std::string  how    = method && method->text() ? method->text()->bytes : "common";
    if (!v.number()) fault("type ", type_name(v), " doesn't define __round__ method");
    if (how == "common" && v.integer()) {
        if (digits >= 0) return *v.integer();
        if (digits < -18) return std::int64_t(0);
        std::int64_t unit = 1;
        for (std::int64_t i = 0; i < -digits; i++) unit *= 10;
        const std::int64_t n = *v.integer(), down = (n / unit - (n % unit < 0 ? 1 : 0)) * unit, rest = n - down;
        const bool         up = rest > unit - rest || (rest == unit - rest && (down / unit) % 2 != 0);
        return down + (up ? unit : 0);
    }
    const double d = *v.number();
    if (how == "common") {
        if (!std::isfinite(d)) return d;
        if (digits < 0) {
            const double unit = std::pow(10.0, double(-digits));
            return std::nearbyint(d / unit) * unit;
        }
        char buffer[800];
        std::snprintf(buffer, sizeof buffer, "%.*f", int(digits), d); // correctly rounded, ties to even
        return std::strtod(buffer, nullptr);
    }
    if (how != "ceil" && how != "floor") fault("method must be common, ceil or floor");
    const double unit = std::pow(10.0, double(digits));
    return (how == "ceil" ? std::ceil(d * unit) : std::floor(d * unit)) / unit;
}

Value reverse_filter(Runtime& runtime, const Value& v, const Arguments&) {
    std::vector<Value> items = iterate(runtime, v);
    std::reverse(items.begin(), items.end());
    if (v.text()) return join(runtime, Text{}, items);
    return iterator(runtime, std::move(items));
}

Value title_filter(Runtime& runtime, const Value& v, const Arguments&) {
    const TextRef text = as_text(runtime, v);
    runtime.budget.text(text->bytes.size());
    runtime.budget.look_up(text->bytes.size());
    bool       start = true; // of a word: the beginning, after blanks, hyphens and opening brackets
    MarkedText out;
    text->for_each_part([&](std::string_view part, bool is_input) {
        std::string made;
        for (std::size_t at = 0; at < part.size();) {
            const CodePoint c = utf8_next(part, at);
            made += utf8_encode(start ? upper_case(c.value) : lower_case(c.value));
            start = is_blank(c.value) || (c.value < 128 && std::string_view("-({[<").contains(char(c.value)));
            at += std::size_t(c.bytes);
        }
        out.append(made, is_input);
    });
    return out;
}

Value truncate(Runtime& runtime, const Value& v, const Arguments& a) {
    const TextRef      text   = as_text(runtime, v);
    const std::int64_t length = std::clamp<std::int64_t>(whole(a, 0, "length", 255), 0, 1 << 30);
    const bool         kill   = flag(a, 1, "killwords");
    const std::string  end    = a.get(2, "end") ? to_str(runtime, *a.get(2, "end")).bytes : "...";
    const std::int64_t leeway = a.get(3, "leeway") && !a.get(3, "leeway")->none() ? whole(a, 3, "leeway", 5) : 5;
    const auto         tail   = std::int64_t(count_characters(end));
    runtime.budget.look(text->bytes.size());
    if (length < tail) fault("expected length >= ", tail, ", got ", length);
    if (std::int64_t(count_characters(text->bytes)) <= length + leeway) return text;
    const TextSpan keep = characters(text->bytes, 0, std::size_t(length - tail));
    std::size_t    stop = keep.end;
    if (!kill)
        if (const std::size_t space = text->bytes.rfind(' ', stop ? stop - 1 : 0); space < stop) stop = space;
    MarkedText out = text->slice(0, stop);
    out.append(end, false);
    return out;
}

Value from_json_filter(Runtime& runtime, const Value& v, const Arguments&) {
    const TextRef text = as_text(runtime, v);
    runtime.budget.look_up(text->bytes.size());
    Result<Json> json = json_parse(text->bytes, {.bytes = runtime.budget.longest, .values = 100'000});
    if (!json) fault("from_json: ", json.error().message);
    runtime.budget.text(text->bytes.size());
    return from_json(*json, !text->input.empty());
}

Value urlencode(Runtime& runtime, const Value& v, const Arguments&) {
    const TextRef text = as_text(runtime, v);
    runtime.budget.step(std::int64_t(text->bytes.size() / 8));
    MarkedText out;
    text->for_each_part([&](std::string_view part, bool is_input) {
        std::string made;
        for (char c : part) {
            const bool plain = is_alphanumeric(c) || std::string_view("_.-~/").contains(c);
            char       hex[4];
            std::snprintf(hex, sizeof hex, "%%%02X", unsigned(static_cast<unsigned char>(c)));
            made += plain ? std::string(1, c) : std::string(hex);
        }
        out.append(made, is_input);
    });
    runtime.budget.text(out.bytes.size());
    return out;
}

Value first_filter(Runtime& runtime, const Value& v, const Arguments&) {
    if (const List* l = v.list()) {
        if (l->taken >= l->items.size()) return undefined("No first item, sequence was empty.");
        const Value& item = l->items[l->taken];
        if (l->form == List::Form::iterator) l->taken++;
        return item;
    }
    std::vector<Value> items = iterate(runtime, v);
    return items.empty() ? undefined("No first item, sequence was empty.") : items.front();
}

Value last_filter(Runtime& runtime, const Value& v, const Arguments&) {
    if (v.list() && v.list()->form == List::Form::iterator) fault("'generator' object is not reversible");
    std::vector<Value> items = iterate(runtime, v);
    return items.empty() ? undefined("No last item, sequence was empty.") : items.back();
}

template <MarkedText (*make)(Runtime&, const Text&)>
Value filter_of_text(Runtime& runtime, const Value& v, const Arguments&) {
    const TextRef text = as_text(runtime, v);
    runtime.budget.text(text->bytes.size());
    return make(runtime, *text);
}

Value escape(Runtime& runtime, const Value& v, const Arguments&) {
    const TextRef text = as_text(runtime, v);
    return text->safe ? Value(text) : Value(Text{escape_html(runtime, *text), true});
}

Value abs_filter(Runtime&, const Value& v, const Arguments&) {
    must_be_defined(v);
    if (!v.number()) fault("bad operand type for abs(): '", type_name(v), "'");
    return (v.integer() ? *v.integer() < 0 : std::signbit(*v.number())) ? negate(v) : v;
}

Value attr_filter(Runtime& runtime, const Value& v, const Arguments& a) {
    const Value* name = a.get(0, "name");
    if (!name || !name->text()) fault("attr() needs a name");
    const Value found = get_attribute(runtime, v, name->text()->bytes);
    const bool  item  = v.dict() && v.dict()->find(runtime.budget, *name) && !found.object();
    return item ? undefined(cat("'dict object' has no attribute '", name->text()->bytes, "'")) : found;
}

Value center_filter(Runtime& runtime, const Value& v, const Arguments& a) {
    const Arguments width{{a.get(0, "width") ? *a.get(0, "width") : Value(std::int64_t(80))}, {}};
    return call_method(runtime, Value(as_text(runtime, v)), "center", width);
}

Value format_filter(Runtime& runtime, const Value& v, const Arguments& a) {
    const TextRef format = as_text(runtime, v);
    if (a.named.empty()) return format_percent(runtime, *format, make_list(runtime, a.positional, List::Form::tuple));
    Dict values;
    for (const auto& [name, value] : a.named) values.set(runtime.budget, Value(std::string_view(name)), value);
    return format_percent(runtime, *format, make_dict(runtime, std::move(values)));
}

Value pprint_filter(Runtime& runtime, const Value& v, const Arguments&) {
    MarkedText out;
    append_repr(runtime, out, v);
    runtime.budget.text(out.bytes.size());
    return out;
}

Value replace_filter(Runtime& runtime, const Value& v, const Arguments& a) {
    const Value *from = a.get(0, "old"), *to = a.get(1, "new"), *most = a.get(2, "count");
    if (!from || !to) fault("replace() needs two texts");
    return replace(runtime, *as_text(runtime, v), *as_text(runtime, *from), *as_text(runtime, *to),
                   most && !most->none() ? whole(a, 2, "count", -1) : -1);
}

Value trim_filter(Runtime& runtime, const Value& v, const Arguments& a) {
    const Value*  set  = a.get(0, "chars");
    const TextRef text = as_text(runtime, v);
    runtime.budget.text(text->bytes.size());
    return strip(runtime, *text, set && set->text() ? &set->text()->bytes : nullptr, true, true);
}

const std::unordered_map<std::string_view, Filter>& filters() {
    using R = Runtime;
    using V = Value;
    using A = Arguments;
    static const std::unordered_map<std::string_view, Filter> table{
        {"abs", abs_filter},
        {"attr", attr_filter},
        {"batch", batch},
        {"capitalize", filter_of_text<capitalize>},
        {"center", center_filter},
        {"count", [](R& r, const V& v, const A&) -> V { return std::int64_t(length(r.budget, v)); }},
        {"d", default_filter},
        {"default", default_filter},
        {"dictsort", dictsort},
        {"e", escape},
        {"escape", escape},
        {"first", first_filter},
        {"float", float_filter},
        {"forceescape", [](R& r, const V& v, const A&) -> V { return Text{escape_html(r, *as_text(r, v)), true}; }},
        {"format", format_filter},
        {"from_json", from_json_filter},
        {"groupby", groupby},
        {"indent", indent},
        {"int", int_filter},
        {"items", items_filter},
        {"join", join_filter},
        {"last", last_filter},
        {"length", [](R& r, const V& v, const A&) -> V { return std::int64_t(length(r.budget, v)); }},
        {"list", [](R& r, const V& v, const A&) -> V { return make_list(r, iterate(r, v)); }},
        {"lower", filter_of_text<lower>},
        {"map", map_filter},
        {"max", [](R& r, const V& v, const A& a) { return extreme(r, v, a, 1); }},
        {"min", [](R& r, const V& v, const A& a) { return extreme(r, v, a, -1); }},
        {"pprint", pprint_filter},
        {"reject", [](R& r, const V& v, const A& a) { return chosen(r, v, a, false, false); }},
        {"rejectattr", [](R& r, const V& v, const A& a) { return chosen(r, v, a, true, false); }},
        {"replace", replace_filter},
        {"reverse", reverse_filter},
        {"round", round_filter},
        {"safe",
         [](R& r, const V& v, const A&) -> V {
             const TextRef text = as_text(r, v);
             r.budget.text(text->bytes.size());
             return Text{MarkedText(*text), true};
         }},
        {"select", [](R& r, const V& v, const A& a) { return chosen(r, v, a, false, true); }},
        {"selectattr", [](R& r, const V& v, const A& a) { return chosen(r, v, a, true, true); }},
        {"slice", slice_filter},
        {"sort", sort_filter},
        {"string", [](R& r, const V& v, const A&) -> V { return as_text(r, v); }},
        {"sum", sum_filter},
        {"title", title_filter},
        {"tojson", tojson},
        {"trim", trim_filter},
        {"truncate", truncate},
        {"unique", unique_filter},
        {"upper", filter_of_text<upper>},
        {"urlencode", urlencode},
        {"wordcount",
         [](R& r, const V& v, const A&) -> V {
             return std::int64_t(length(r.budget, call_method(r, V(as_text(r, v)), "split", {})));
         }},
    };
    return table;
}

bool is_filter(std::string_view name) { return filters().contains(name); }

Value apply_filter(Runtime& runtime, std::string_view name, const Value& value, const Arguments& arguments) {
    runtime.budget.step();
    const auto at = filters().find(name);
    if (at == filters().end()) fault("no filter named ", quote(name));
    return at->second(runtime, value, arguments);
}

} // namespace quire::jinja
