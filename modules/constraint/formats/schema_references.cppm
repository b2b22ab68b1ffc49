// quire.constraint.formats.schema_references: where the schemas of one JSON Schema document are: $ref, $id, $anchor; which draft it is written
// in; and schemas made from values. **Owns** the schemas made from values.
export module quire.constraint.formats.schema_references;

import quire.core.base;
export import quire.core.json;

export namespace quire {

// Of an object.
const Json::object_t& members(const Json& object);

class SchemaReferences {
public:
    // The role of a value by its place: the value of an unknown keyword is no schema, unless a reference leads to it.
    enum class Role : std::uint8_t { schema, schemas, other };
    static Role role_of(const std::string& keyword);

    explicit SchemaReferences(const Json& root);

    // Notes all $id and $anchor.
    void read() { read(*root_, "", "#", 0, Role::schema); }
    // Values that were read.
    std::size_t size() const { return places_.size(); }
    // Error: $schema names a dialect other than the drafts: its keywords may mean anything.
    Result<void> check_dialect() const;

    int draft() const { return draft_; } // 3, 4, 6, 7; 8: 2019-09; 9: 2020-12, also where none is named
    // Of a schema with "$ref". Error: it names nothing in this document.
    Result<const Json*> target(const Json& schema) const;
    // For messages: "at #/properties/a: ".
    std::string place_of(const Json& schema) const;
    // That a keyword of a schema is wrong, with the place.
    std::unexpected<Error> wrong(const Json& schema, std::string_view keyword, std::string_view what) const {
        return fail(place_of(schema), keyword, ": ", what);
    }

    // The schema of an array's element, or null; and how many have one of their own.
    const Json* element(const Json& schema, std::uint32_t index) const;
    std::size_t n_first(const Json& schema) const;

    // A schema that only this array or object satisfies.
    const Json& literal(const Json& value);
    const Json& never() const { return never_; }

private:
    void        read(const Json& schema, const std::string& base, const std::string& place, int depth, Role role);
    const Json* pointer(const Json& from, std::string_view path) const;

    const Json*                                  root_;
    int                                          draft_ = 9;
    std::unordered_map<std::string, const Json*> ids_, loose_ids_; // loose: within unknown keywords
    std::unordered_map<const Json*, std::string> places_, bases_;
    std::deque<Json>                             made_;
    std::map<std::string, const Json*>           literals_;
    Json                                         never_ = false;
};

} // namespace quire

module :private;

namespace quire {

const Json::object_t& members(const Json& object) { return object.get_ref<const Json::object_t&>(); }

SchemaReferences::SchemaReferences(const Json& root) : root_(&root) {
    if (!root.is_object()) return;
    const auto at = root.find("$schema");
    if (at == root.end() || !at->is_string()) return;
    const std::string& uri = at->get_ref<const std::string&>();
    for (auto [name, draft] :
         {std::pair{"draft-03", 3}, {"draft-04", 4}, {"draft-06", 6}, {"draft-07", 7}, {"2019-09", 8}})
        if (uri.find(name) != uri.npos) draft_ = draft;
}

// As RFC 3986 resolves it, without dots in paths.
std::string join(const std::string& base, const std::string& uri) {
    const auto scheme = uri.find(':'), slash = uri.find_first_of("/?#");
    if (scheme != uri.npos && (slash == uri.npos || scheme < slash)) return uri;
    const std::string plain = base.substr(0, base.find('#'));
    if (uri.empty() || uri[0] == '#') return plain + uri;
    const auto authority = plain.find("://");
    const auto path = authority == plain.npos ? std::size_t(0) : std::min(plain.find('/', authority + 3), plain.size());
    if (uri[0] == '/') return plain.substr(0, path) + uri;
    const auto last = plain.rfind('/');
    return (last == plain.npos || last < path ? (path > 0 ? plain.substr(0, path) + "/" : "")
                                              : plain.substr(0, last + 1)) +
           uri;
}

Result<void> SchemaReferences::check_dialect() const {
    if (!root_->is_object()) return {};
    const auto at = root_->find("$schema");
    if (at == root_->end() || !at->is_string()) return {};
    const std::string& uri = at->get_ref<const std::string&>();
    if (!uri.starts_with("http") || uri.find("json-schema.org") != uri.npos) return {};
    return wrong(*root_, "$schema", cat(quote(uri, 200), " is not a draft of JSON Schema"));
}

SchemaReferences::Role SchemaReferences::role_of(const std::string& keyword) {
    static const std::vector<std::string_view> schema = split(
        "additionalItems additionalProperties contains contentSchema else extends disallow if items not propertyNames "
        "then unevaluatedItems unevaluatedProperties");
    static const std::vector<std::string_view> schemas = split(
        "$defs allOf anyOf definitions dependencies dependentSchemas oneOf patternProperties prefixItems properties "
        "type");
    const auto is_in = [&](const auto& names) { return std::ranges::find(names, keyword) != names.end(); };
    return is_in(schema) ? Role::schema : is_in(schemas) ? Role::schemas : Role::other;
}

void SchemaReferences::read(const Json& schema, const std::string& base_, const std::string& place, int depth,
                            Role role) {
    if (depth > 200) return; // deeper than JSON texts may be
    std::string base = base_;
    places_.emplace(&schema, place);
    const Role inner = role == Role::other ? Role::other : Role::schema;
    if (schema.is_array()) {
        for (std::size_t i = 0; i < schema.size(); i++) read(schema[i], base, cat(place, "/", i), depth + 1, inner);
        return;
    }
    if (!schema.is_object()) return;
    if (role == Role::schemas) {
        for (const auto& [key, value] : members(schema)) read(value, base, cat(place, "/", key), depth + 1, inner);
        return;
    }
    auto&      ids     = role == Role::other ? loose_ids_ : ids_;
    const bool ignored = draft_ < 8 && schema.contains("$ref");
    for (const char* key : {"$id", "id"}) {
        const auto at = schema.find(key);
        if (ignored || at == schema.end() || !at->is_string() || (key[0] == 'i' && draft_ > 4 && draft_ != 9)) continue;
        const std::string& id = at->get_ref<const std::string&>();
        if (!id.starts_with('#')) base = join(base, id);
        std::string full = join(base_, id);
        if (full.ends_with('#')) full.pop_back();
        ids.emplace(full, &schema);
        break;
    }
    for (const char* key : {"$anchor", "$dynamicAnchor"})
        if (const auto at = schema.find(key); at != schema.end() && at->is_string())
            ids.emplace(base.substr(0, base.find('#')) + "#" + at->get_ref<const std::string&>(), &schema);
    bases_.emplace(&schema, base);
    for (const auto& [key, value] : members(schema))
        if (key != "enum" && key != "const" && key != "default" && key != "examples")
            read(value, base, cat(place, "/", key), depth + 1, role == Role::other ? Role::other : role_of(key));
}

std::string SchemaReferences::place_of(const Json& schema) const {
    const auto at = places_.find(&schema);
    return at == places_.end() ? std::string() : cat("at ", quote(at->second, 200), ": ");
}

const Json* SchemaReferences::pointer(const Json& from, std::string_view path) const {
    const Json* at = &from;
    while (!path.empty()) {
        if (path[0] != '/') return nullptr;
        path.remove_prefix(1);
        const auto  end = std::min(path.find('/'), path.size());
        std::string name;
        for (std::size_t i = 0; i < end; i++) {
            unsigned value = 0;
            if (path[i] == '%' && i + 2 < end + 0 + 1 && i + 2 < path.size() &&
                std::from_chars(path.data() + i + 1, path.data() + i + 3, value, 16).ptr == path.data() + i + 3) {
                name += char(value);
                i += 2;
            } else {
                name += path[i];
            }
        }
        for (std::size_t i = 0; (i = name.find('~', i)) != name.npos && i + 1 < name.size(); i++)
            if (name[i + 1] == '1') name.replace(i, 2, "/");
            else if (name[i + 1] == '0') name.replace(i, 2, "~");
        path.remove_prefix(end);
        if (at->is_object()) {
            const auto member = at->find(name);
            if (member == at->end()) return nullptr;
            at = &*member;
        } else if (at->is_array()) {
            const auto index = to_number<std::size_t>(name);
            if (!index || *index >= at->size()) return nullptr;
            at = &(*at)[*index];
        } else {
            return nullptr;
        }
    }
    return at;
}

Result<const Json*> SchemaReferences::target(const Json& schema) const {
    const Json& ref = schema["$ref"];
    if (!ref.is_string()) return fail(place_of(schema), "$ref: is not a string");
    const std::string& uri      = ref.get_ref<const std::string&>();
    const auto         base     = bases_.find(&schema);
    const std::string  own      = base == bases_.end() ? std::string() : base->second;
    const std::string  full     = join(own, uri);
    const auto         hash     = std::min(full.find('#'), full.size());
    const std::string  document = full.substr(0, hash), fragment = hash < full.size() ? full.substr(hash + 1) : "";
    const Json*        found = nullptr;
    for (const auto* ids : {&ids_, &loose_ids_}) {
        if (found) break;
        if (const auto at = ids->find(fragment.empty() ? document : full); at != ids->end()) found = at->second;
        if (found || (!fragment.empty() && fragment[0] != '/')) continue;
        if (const auto at = ids->find(document); at != ids->end()) found = pointer(*at->second, fragment);
        else if (document.empty()) found = pointer(*root_, fragment);
    }
    // Many documents name no base, or a wrong one.
    if (!found && uri.starts_with('#') && (uri.size() == 1 || uri[1] == '/'))
        found = pointer(*root_, std::string_view(uri).substr(1));
    if (!found) return fail(place_of(schema), "$ref: ", quote(uri, 200), " is not in this document");
    if (!found->is_object() && !found->is_boolean())
        return fail(place_of(schema), "$ref: ", quote(uri, 200), " is not a schema");
    return found;
}

const Json* SchemaReferences::element(const Json& schema, std::uint32_t index) const {
    const auto find = [&](const char* key) -> const Json* {
        const auto at = schema.find(key);
        return at == schema.end() ? nullptr : &*at;
    };
    const Json *first = find("prefixItems"), *rest = find("items");
    if (rest && rest->is_array()) first = rest, rest = find("additionalItems");
    if (first && first->is_array() && index < first->size()) return &(*first)[index];
    return rest;
}

std::size_t SchemaReferences::n_first(const Json& schema) const {
    const auto prefix = schema.find("prefixItems"), items = schema.find("items");
    if (items != schema.end() && items->is_array()) return items->size();
    return prefix != schema.end() && prefix->is_array() ? prefix->size() : 0;
}

const Json& SchemaReferences::literal(const Json& value) {
    const Json*& made = literals_[json_dump(value)];
    if (made) return *made;
    Json parts = Json::array();
    Json schema;
    if (value.is_array()) {
        for (const Json& v : value) parts.push_back(Json{{"const", v}});
        schema = Json{{"type", "array"},
                      {"minItems", value.size()},
                      {"maxItems", value.size()},
                      {"prefixItems", std::move(parts)}};
    } else {
        Json own = Json::object();
        for (const auto& [name, v] : members(value)) {
            own[name] = Json{{"const", v}};
            parts.push_back(name);
        }
        schema = Json{{"type", "object"},
                      {"properties", std::move(own)},
                      {"required", std::move(parts)},
                      {"additionalProperties", false}};
    }
    made_.push_back(std::move(schema));
    return *(made = &made_.back());
}

} // namespace quire
