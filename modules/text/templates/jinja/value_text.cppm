// quire.text.templates.jinja.value_text: how values are written, as Python's str() and repr() write them. Owns nothing.
export module quire.text.templates.jinja.value_text;

import quire.core.base;
import quire.core.unicode;
export import quire.text.marked_text;
export import quire.text.templates.jinja.value;

export namespace quire::jinja {

// str() and repr(), at the end of `out`.
void       append_str(Runtime& runtime, MarkedText& out, const Value& value);
void       append_repr(Runtime& runtime, MarkedText& out, const Value& value, int depth = 0);
MarkedText to_str(Runtime& runtime, const Value& value);
// The text's own, without a copy, or str().
TextRef     as_text(Runtime& runtime, const Value& value);
std::string float_repr(double value);

} // namespace quire::jinja

module :private;

namespace quire::jinja {

std::string float_repr(double v) {
    if (std::isnan(v)) return "nan";
    if (std::isinf(v)) return v < 0 ? "-inf" : "inf";
    // The shortest digits that give this number back, whatever form they come in: 123.25, 1e-05, 2.5e+20.
    char                   buffer[400];
    const std::string_view shortest(
        buffer, std::size_t(std::to_chars(buffer, buffer + sizeof buffer, std::fabs(v)).ptr - buffer));
    const std::size_t e     = std::min(shortest.find('e'), shortest.size());
    const std::size_t point = std::min(shortest.find('.'), e);
    std::string digits = cat(shortest.substr(0, point), point < e ? shortest.substr(point + 1, e - point - 1) : "");
    const std::size_t zeros = std::min(digits.find_first_not_of('0'), digits.size() - 1);
    const int         exponent =
        (e < shortest.size() ? std::stoi(std::string(shortest.substr(e + 1))) : 0) + int(point) - 1 - int(zeros);
    digits.erase(0, zeros);
    while (digits.size() > 1 && digits.back() == '0') digits.pop_back();
    if (v == 0) return std::signbit(v) ? "-0.0" : "0.0";
    std::string out = std::signbit(v) ? "-" : "";
    if (exponent < -4 || exponent >= 16) {
        out += digits[0];
        if (digits.size() > 1) out += "." + digits.substr(1);
        const std::string size = std::to_string(exponent < 0 ? -exponent : exponent);
        return out + (exponent < 0 ? "e-" : "e+") + (size.size() < 2 ? "0" : "") + size;
    }
    if (exponent < 0) return out + "0." + std::string(std::size_t(-exponent - 1), '0') + digits;
    if (digits.size() <= std::size_t(exponent) + 1)
        return out + digits + std::string(std::size_t(exponent) + 1 - digits.size(), '0') + ".0";
    return out + digits.substr(0, std::size_t(exponent) + 1) + "." + digits.substr(std::size_t(exponent) + 1);
}

void append_text_repr(MarkedText& out, const Text& text) {
    const bool only_single = text.bytes.contains('\'') && !text.bytes.contains('"');
    const char mark        = only_single ? '"' : '\'';
    out.append(std::string_view(&mark, 1), false);
    text.for_each_part([&](std::string_view part, bool is_input) {
        std::string spelled;
        for (std::size_t at = 0, n; at < part.size(); at += n) {
            const CodePoint c = utf8_next(part, at);
            n                 = std::size_t(c.bytes);
            char hex[16];
            if (c.value == char32_t(mark) || c.value == '\\') spelled += {'\\', char(c.value)};
            else if (c.value == '\n') spelled += "\\n";
            else if (c.value == '\r') spelled += "\\r";
            else if (c.value == '\t') spelled += "\\t";
            else if (is_printable(c.value)) spelled += part.substr(at, n);
            else {
                std::snprintf(hex, sizeof hex,
                              c.value < 256       ? "\\x%02x"
                              : c.value < 0x10000 ? "\\u%04x"
                                                  : "\\U%08x",
                              unsigned(c.value));
                spelled += hex;
            }
        }
        out.append(spelled, is_input);
    });
    out.append(std::string_view(&mark, 1), false);
}

void append_repr(Runtime& runtime, MarkedText& out, const Value& v, int depth) {
    if (depth > deepest) fault("values are nested too deep to be written");
    runtime.budget.step();
    runtime.budget.growing(out.bytes.size());
    if (v.undefined()) out.append("Undefined", false);
    else if (v.none()) out.append("None", false);
    else if (const auto* b = v.get<bool>()) out.append(*b ? "True" : "False", false);
    else if (const auto* i = v.get<std::int64_t>()) out.append(std::to_string(*i), false);
    else if (const auto* d = v.get<double>()) out.append(float_repr(*d), false);
    else if (const Text* t = v.text()) runtime.budget.look_up(t->bytes.size()), append_text_repr(out, *t);
    else if (const List* l = v.list()) {
        using enum List::Form;
        if (l->form == iterator) return out.append("<generator object>", false);
        if (l->form == range) {
            const std::int64_t n     = std::int64_t(l->items.size());
            const std::int64_t first = n ? *l->items.front().integer() : 0;
            const std::int64_t step  = n > 1 ? *l->items[1].integer() - first : 1;
            out.append(cat("range(", first, ", ", n ? *l->items.back().integer() + step : 0), false);
            return out.append(step == 1 ? ")" : cat(", ", step, ")"), false);
        }
        const bool view = l->form == dict_keys || l->form == dict_values || l->form == dict_items;
        if (view) out.append(cat(type_name(v), "("), false);
        out.append(l->form == tuple ? "(" : "[", false);
        for (std::size_t i = 0; i < l->items.size(); i++) {
            if (i) out.append(", ", false);
            append_repr(runtime, out, l->items[i], depth + 1);
        }
        out.append(l->form == tuple ? l->items.size() == 1 ? ",)" : ")" : "]", false);
        if (view) out.append(")", false);
    } else if (const Dict* m = v.dict()) {
        out.append("{", false);
        for (std::size_t i = 0; i < m->items.size(); i++) {
            if (i) out.append(", ", false);
            append_repr(runtime, out, m->items[i].first, depth + 1);
            out.append(": ", false);
            append_repr(runtime, out, m->items[i].second, depth + 1);
        }
        out.append("}", false);
    } else if (auto* ns = dynamic_cast<Namespace*>(v.object())) {
        out.append("<Namespace {", false);
        for (std::size_t i = 0; i < ns->items.size(); i++) {
            if (i) out.append(", ", false);
            append_repr(runtime, out, Value(std::string_view(ns->items[i].first)), depth + 1);
            out.append(": ", false);
            append_repr(runtime, out, ns->items[i].second, depth + 1);
        }
        out.append("}>", false);
    } else {
        out.append(cat("<", type_name(v), ">"), false);
    }
}

void append_str(Runtime& runtime, MarkedText& out, const Value& v) {
    if (const Text* t = v.text()) out.append(*t);
    else if (!v.undefined()) append_repr(runtime, out, v);
}

MarkedText to_str(Runtime& runtime, const Value& v) {
    MarkedText out;
    append_str(runtime, out, v);
    runtime.budget.text(out.bytes.size());
    return out;
}

TextRef as_text(Runtime& runtime, const Value& v) {
    if (const auto* t = v.get<TextRef>()) return *t;
    return std::make_shared<const Text>(Text{to_str(runtime, v), false});
}

} // namespace quire::jinja
