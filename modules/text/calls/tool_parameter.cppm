// quire.text.calls.tool_parameter: a tool's schema of one parameter, where models write the value as plain text and not as JSON. Owns
// nothing.
export module quire.text.calls.tool_parameter;

import quire.core.base;
export import quire.core.json;

export namespace quire {

// Types of JSON values.
enum class JsonKind : std::uint8_t { null, boolean, integer, number, string, array, object };

class JsonKinds {
public:
    static JsonKinds all() { return JsonKinds(0x7f); }
    JsonKinds() = default;

    bool has(JsonKind k) const { return (bits_ >> int(k) & 1) != 0; }
    void add(JsonKind k) { bits_ = std::uint8_t(bits_ | 1 << int(k)); }
    void add(JsonKinds k) { bits_ = std::uint8_t(bits_ | k.bits_); }
    void keep(JsonKinds k) { bits_ = std::uint8_t(bits_ & k.bits_); }
    bool empty() const { return bits_ == 0; }
    // Whether a value is of one of them.
    bool has(const Json& value) const;

private:
    explicit JsonKinds(std::uint8_t bits) : bits_(bits) {}
    std::uint8_t bits_ = 0;
};

// Of a definition, as `function` of OpenAI's tools has it: the schema of a parameter; null: it names none.
const Json* parameter_schema(const Json& function, std::string_view name);
// The schema to which a schema within `root` refers; null: none, or one outside `root`.
const Json* referred(const Json& root, const Json& schema);
// The kinds of values that a schema within `root` allows; all where it does not say.
JsonKinds kinds_of(const Json& root, const Json& schema);

} // namespace quire

module :private;

namespace quire {

constexpr int deepest    = 16;     // references and alternatives in one another
constexpr int most_looks = 10'000; // at schemas, for one: alternatives of references of alternatives are many

const Json* member(const Json& object, std::string_view name) {
    if (!object.is_object()) return nullptr;
    const auto at = object.find(std::string(name));
    return at == object.end() ? nullptr : &*at;
}

JsonKind kind_of(const Json& value) {
    if (value.is_null()) return JsonKind::null;
    if (value.is_boolean()) return JsonKind::boolean;
    if (value.is_number_integer()) return JsonKind::integer;
    if (value.is_number()) return JsonKind::number;
    if (value.is_string()) return JsonKind::string;
    return value.is_array() ? JsonKind::array : JsonKind::object;
}

JsonKinds named(const Json& type) {
    static constexpr std::array<std::pair<std::string_view, JsonKind>, 7> names{{{"null", JsonKind::null},
                                                                                 {"boolean", JsonKind::boolean},
                                                                                 {"integer", JsonKind::integer},
                                                                                 {"number", JsonKind::number},
                                                                                 {"string", JsonKind::string},
                                                                                 {"array", JsonKind::array},
                                                                                 {"object", JsonKind::object}}};
    JsonKinds                                                             out;
    for (const auto& [name, kind] : names)
        if (type == name) out.add(kind);
    if (out.has(JsonKind::number)) out.add(JsonKind::integer);
    return out;
}

JsonKinds kinds_of(const Json& root, const Json& schema, int depth, int& looks) {
    JsonKinds out = JsonKinds::all();
    if (!schema.is_object() || depth > deepest || ++looks > most_looks) return out;
    if (const Json* to = referred(root, schema)) out.keep(kinds_of(root, *to, depth + 1, looks));
    if (const Json* type = member(schema, "type")) {
        JsonKinds kinds;
        if (type->is_array())
            for (const Json& one : *type) kinds.add(named(one));
        else kinds = named(*type);
        out.keep(kinds);
    }
    if (const Json* value = member(schema, "const")) {
        JsonKinds kinds;
        kinds.add(kind_of(*value));
        out.keep(kinds);
    }
    if (const Json* list = member(schema, "enum"); list && list->is_array()) {
        JsonKinds kinds;
        for (const Json& one : *list) kinds.add(kind_of(one));
        out.keep(kinds);
    }
    for (const char* key : {"anyOf", "oneOf"})
        if (const Json* list = member(schema, key); list && list->is_array()) {
            JsonKinds kinds;
            for (const Json& one : *list) kinds.add(kinds_of(root, one, depth + 1, looks));
            out.keep(kinds);
        }
    if (const Json* list = member(schema, "allOf"); list && list->is_array())
        for (const Json& one : *list) out.keep(kinds_of(root, one, depth + 1, looks));
    return out;
}

bool JsonKinds::has(const Json& value) const {
    const JsonKind kind = kind_of(value);
    if (has(kind)) return true;
    if (kind == JsonKind::integer) return has(JsonKind::number);
    // 2.0 is an integer, too.
    return kind == JsonKind::number && has(JsonKind::integer) && std::trunc(value.get<double>()) == value.get<double>();
}

const Json* parameter_schema(const Json& function, std::string_view name) {
    const Json* parameters = member(function, "parameters");
    const Json* properties = parameters ? member(*parameters, "properties") : nullptr;
    return properties ? member(*properties, name) : nullptr;
}

const Json* referred(const Json& root, const Json& schema) {
    const Json* ref = member(schema, "$ref");
    if (!ref || !ref->is_string() || !ref->get_ref<const std::string&>().starts_with('#')) return nullptr;
    const Json* at = &root;
    for (const auto part : std::views::split(std::string_view(ref->get_ref<const std::string&>()).substr(1), '/')) {
        std::string name;
        for (std::size_t i = 0; i < part.size(); i++)
            if (part[i] != '~' || i + 1 == part.size()) name += part[i];
            else name += part[++i] == '1' ? '/' : '~';
        if (name.empty() && at == &root) continue; // before the first /
        at = member(*at, name);
        if (!at) return nullptr;
    }
    return at;
}

JsonKinds kinds_of(const Json& root, const Json& schema) {
    int looks = 0;
    return kinds_of(root, schema, 0, looks);
}

} // namespace quire
