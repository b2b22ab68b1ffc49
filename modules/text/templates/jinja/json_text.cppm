// quire.text.templates.jinja.json_text: values as JSON text, as Python's json.dumps writes them. Owns nothing.
export module quire.text.templates.jinja.json_text;

import quire.core.base;
import quire.core.unicode;
import quire.text.templates.jinja.value_text;

export namespace quire::jinja {

struct JsonStyle {
    bool                       ensure_ascii = false, sort_keys = false;
    std::optional<std::string> indent; // of one level; nothing: on one line
    std::string                item_separator = ", ", key_separator = ": ";
};

MarkedText to_json(Runtime& runtime, const Value& value, const JsonStyle& style);

} // namespace quire::jinja

module :private;

namespace quire::jinja {

class JsonWriter {
public:
    JsonWriter(Runtime& runtime, const JsonStyle& style) : runtime_(runtime), style_(style) {}

    void write(const Value& v, int depth) {
        runtime_.budget.step();
        if (depth > 200) fault("values are nested too deep for JSON");
        runtime_.budget.growing(out.bytes.size());
        if (const Text* t = v.text()) return text(*t);
        if (const Dict* d = v.dict()) return object(*d, depth);
        if (const List* l = v.list(); l && (l->form == List::Form::list || l->form == List::Form::tuple)) {
            if (l->items.empty()) return out.append("[]", false);
            out.append("[", false);
            for (std::size_t i = 0; i < l->items.size(); i++) {
                separate(i == 0, depth + 1);
                write(l->items[i], depth + 1);
            }
            line(depth);
            return out.append("]", false);
        }
        const std::string plain = scalar(v);
        if (plain.empty()) fault("Object of type ", type_name(v), " is not JSON serializable");
        out.append(plain, false);
    }

    MarkedText out;

private:
    static std::string scalar(const Value& v) {
        if (v.none()) return "null";
        if (const auto* b = v.get<bool>()) return *b ? "true" : "false";
        if (const auto* i = v.get<std::int64_t>()) return std::to_string(*i);
        if (const auto* d = v.get<double>())
            return std::isnan(*d) ? "NaN" : std::isinf(*d) ? *d < 0 ? "-Infinity" : "Infinity" : float_repr(*d);
        return "";
    }
    void line(int depth) {
        if (!style_.indent) return;
        runtime_.budget.growing(out.bytes.size() + style_.indent->size() * std::size_t(depth));
        std::string text = "\n";
        for (int i = 0; i < depth; i++) text += *style_.indent;
        out.append(text, false);
    }
    void separate(bool first, int depth) {
        if (!first) out.append(style_.item_separator, false);
        line(depth);
    }
    void object(const Dict& d, int depth) {
        if (d.items.empty()) return out.append("{}", false);
        std::vector<const std::pair<Value, Value>*> items;
        for (const auto& item : d.items) items.push_back(&item);
        if (style_.sort_keys)
            std::stable_sort(items.begin(), items.end(), [&](const auto* a, const auto* b) {
                return order(runtime_.budget, a->first, b->first, "<") < 0;
            });
        out.append("{", false);
        for (std::size_t i = 0; i < items.size(); i++) {
            separate(i == 0, depth + 1);
            const Value& key = items[i]->first;
            if (const Text* t = key.text()) {
                text(*t);
            } else {
                const std::string plain = scalar(key);
                if (plain.empty()) fault("keys must be str, int, float, bool or None, not ", type_name(key));
                out.append(cat('"', plain, '"'), false);
            }
            out.append(style_.key_separator, false);
            write(items[i]->second, depth + 1);
        }
        line(depth);
        out.append("}", false);
    }
    void text(const Text& t) {
        if (style_.ensure_ascii) runtime_.budget.look_up(t.bytes.size());
        out.append("\"", false);
        t.for_each_part([&](std::string_view part, bool is_input) {
            std::string made;
            made.reserve(part.size());
            auto unit = [&](unsigned u) {
                char hex[8];
                std::snprintf(hex, sizeof hex, "\\u%04x", u);
                made += hex;
            };
            for (std::size_t at = 0; at < part.size();) {
                const auto b = static_cast<unsigned char>(part[at]);
                if (b >= 0x80) {
                    const CodePoint c = utf8_next(part, at);
                    if (!style_.ensure_ascii) made += part.substr(at, std::size_t(c.bytes));
                    else if (c.value < 0x10000) unit(c.value);
                    else unit(0xd800 + ((c.value - 0x10000) >> 10)), unit(0xdc00 + ((c.value - 0x10000) & 0x3ff));
                    at += std::size_t(c.bytes);
                    continue;
                }
                at++;
                switch (b) {
                    case '"': made += "\\\""; break;
                    case '\\': made += "\\\\"; break;
                    case '\n': made += "\\n"; break;
                    case '\r': made += "\\r"; break;
                    case '\t': made += "\\t"; break;
                    case '\f': made += "\\f"; break;
                    case '\b': made += "\\b"; break;
                    default:
                        if (b < 0x20 || (b == 0x7f && style_.ensure_ascii)) unit(b);
                        else made += char(b);
                }
            }
            out.append(made, is_input);
        });
        out.append("\"", false);
    }

    Runtime&         runtime_;
    const JsonStyle& style_;
};

MarkedText to_json(Runtime& runtime, const Value& value, const JsonStyle& style) {
    JsonWriter writer(runtime, style);
    writer.write(value, 0);
    runtime.budget.text(writer.out.bytes.size());
    return std::move(writer.out);
}

} // namespace quire::jinja
