// quire.constraint.formats.canonical_schema: a JSON Schema as a text, in which schemas with one meaning are equal: without annotations, and with
// keywords in a fixed order where their order has no meaning. Owns nothing.
export module quire.constraint.formats.canonical_schema;

import quire.constraint.formats.schema_references;
import quire.core.base;

export namespace quire {

// `ordered`: the order of members counts. Schemas with equal texts make equal constraints; schemas with different texts may, too.
std::string canonical_schema(const Json& schema, bool ordered);

} // namespace quire

module :private;

namespace quire {

using Role = SchemaReferences::Role;

constexpr std::array<std::string_view, 8> annotations{"$comment", "default",  "deprecated", "description",
                                                      "examples", "readOnly", "title",      "writeOnly"};
// Keywords whose place has no meaning for the order of members.
constexpr std::array<std::string_view, 22> unordered{
    "$id",           "$schema",   "const",         "enum",           "exclusiveMaximum", "exclusiveMinimum",
    "format",        "id",        "maxItems",      "maxLength",      "maxProperties",    "maximum",
    "minItems",      "minLength", "minProperties", "minimum",        "multipleOf",       "pattern",
    "propertyNames", "type",      "uniqueItems",   "contentEncoding"};

bool is_annotation(const std::string& key, const Json& value) {
    if (std::ranges::find(annotations, key) == annotations.end()) return false;
    return value.is_string() || (key != "title" && key != "description" && key != "$comment");
}

// Whether a reference could lead into an annotation.
bool refers_to_annotations(const Json& value) {
    if (value.is_array()) return std::ranges::any_of(value, refers_to_annotations);
    if (!value.is_object()) return false;
    for (const auto& [key, inner] : members(value)) {
        if (key.ends_with("Ref") || key == "$ref") {
            const std::string uri = inner.is_string() ? inner.get<std::string>() : "";
            if (uri.contains('%') ||
                std::ranges::any_of(annotations, [&](std::string_view a) { return uri.contains(cat('/', a)); }))
                return true;
        }
        if (refers_to_annotations(inner)) return true;
    }
    return false;
}

class Writer {
public:
    Writer(bool ordered, bool strip) : ordered_(ordered), strip_(strip) {}

    std::string out;

    void write(const Json& value, Role role) {
        if (role == Role::other || (!value.is_array() && !value.is_object())) {
            out += json_dump(value);
            return;
        }
        if (value.is_array()) {
            out += '[';
            for (const Json& one : value) {
                write(one, Role::schema);
                out += ',';
            }
            out += ']';
            return;
        }
        std::vector<const Json::object_t::value_type*> first, then;
        for (const auto& member : members(value)) {
            const bool keyword = role == Role::schema;
            if (keyword && strip_ && is_annotation(member.first, member.second)) continue;
            const bool moves = !ordered_ || (keyword && std::ranges::find(unordered, member.first) != unordered.end());
            (moves ? first : then).push_back(&member);
        }
        std::sort(first.begin(), first.end(), [](const auto* a, const auto* b) { return a->first < b->first; });
        out += '{';
        for (const auto* list : {&first, &then})
            for (const auto* member : *list) {
                out += json_dump(Json(member->first));
                out += ':';
                write(member->second, role == Role::schemas ? Role::schema : SchemaReferences::role_of(member->first));
                out += ',';
            }
        out += '}';
    }

private:
    bool ordered_, strip_;
};

std::string canonical_schema(const Json& schema, bool ordered) {
    Writer writer(ordered, !refers_to_annotations(schema));
    writer.write(schema, Role::schema);
    return std::move(writer.out);
}

} // namespace quire
