// quire.constraint.formats.string_set: the strings that a JSON Schema allows, as the text that they are and not as JSON. Owns nothing.
export module quire.constraint.formats.string_set;

import quire.constraint.formats.json_scalars;
import quire.constraint.regex.parser;
import quire.core.base;
import quire.text.calls.tool_parameter;

export namespace quire {

// Of a schema within `root`. Exact: alternatives, negations and conditions are sets. Error: a pattern or a format that is not supported,
// a reference to nowhere, or too many of them in one another.
Result<RegexId> strings_of(RegexPool& pool, const Json& root, const Json& schema);

} // namespace quire

module :private;

namespace quire {

class StringSet {
public:
    StringSet(RegexPool& pool, const Json& root) : pool_(pool), root_(root) {}

    Result<RegexId> of(const Json& schema, int depth) {
        pool_.enter();
        if (depth > 16) return fail("references and alternatives are nested too deep");
        if (!schema.is_object()) return schema == Json(false) ? RegexPool::nothing : all();
        sets_.push_back({all()});
        Result<void> ok = own(schema);
        for (auto at = schema.begin(); ok && at != schema.end(); ++at)
            ok = combined(schema, at.key(), at.value(), depth + 1);
        std::vector<RegexId> sets = std::move(sets_.back());
        sets_.pop_back();
        if (!ok) return std::unexpected(ok.error());
        return pool_.all_of(std::move(sets));
    }

private:
    RegexId all() { return pool_.negate(RegexPool::nothing); }
    void    keep(RegexId set) { sets_.back().push_back(set); }

    // The schema's own rules for strings.
    Result<void> own(const Json& schema) {
        if (const auto type = schema.find("type"); type != schema.end()) {
            const bool named =
                type->is_array() ? std::ranges::find(*type, Json("string")) != type->end() : *type == Json("string");
            if (!named) keep(RegexPool::nothing);
        }
        if (const auto one = schema.find("const"); one != schema.end()) keep(literal(*one));
        if (const auto list = schema.find("enum"); list != schema.end() && list->is_array()) {
            std::vector<RegexId> any;
            for (const Json& one : *list) any.push_back(literal(one));
            keep(pool_.any_of(std::move(any)));
        }
        const auto bound = [&](const char* key, std::uint32_t otherwise) {
            const auto at = schema.find(key);
            return at != schema.end() && at->is_number_unsigned()
                       ? std::uint32_t(std::min<std::uint64_t>(at->get<std::uint64_t>(), 100'000))
                       : otherwise;
        };
        if (schema.contains("minLength") || schema.contains("maxLength"))
            keep(pool_.repeat(character(pool_, all_but({}), TextSpelling::utf8), bound("minLength", 0),
                              bound("maxLength", RegexPool::endless)));
        if (const auto at = schema.find("pattern"); at != schema.end() && at->is_string()) {
            const auto made = parse_regex(pool_, at->get_ref<const std::string&>(), TextSpelling::utf8, false);
            if (!made) return std::unexpected(made.error());
            keep(*made);
        }
        if (const auto at = schema.find("format"); at != schema.end() && at->is_string()) {
            const auto made = string_format(pool_, at->get_ref<const std::string&>());
            if (!made) return std::unexpected(made.error());
            // Without the characters that JSON would write with a backslash, in JSON and in plain text.
            if (const std::optional<RegexId>& set = *made; set) {
                keep(*set);
                keep(pool_.negate(pool_.concat(all(), pool_.concat(pool_.literal("\\"), all()))));
            }
        }
        return {};
    }

    // The rules of the schemas within the schema.
    Result<void> combined(const Json& schema, const std::string& key, const Json& value, int depth) {
        const auto with = [&](const Json& other, bool negated = false) -> Result<void> {
            const Result<RegexId> set = of(other, depth);
            if (!set) return std::unexpected(set.error());
            keep(negated ? pool_.negate(*set) : *set);
            return {};
        };
        if (key == "$ref") {
            const Json* to = referred(root_, schema);
            if (!to)
                return fail("the reference ", quote(value.is_string() ? value.get_ref<const std::string&>() : ""),
                            " leads nowhere");
            return with(*to);
        }
        if (key == "not") return with(value, true);
        if (key == "if") {
            const Result<RegexId> condition = of(value, depth);
            if (!condition) return std::unexpected(condition.error());
            for (const bool holds : {true, false}) {
                const auto branch = schema.find(holds ? "then" : "else");
                if (branch == schema.end()) continue;
                const Result<RegexId> set = of(*branch, depth);
                if (!set) return std::unexpected(set.error());
                keep(pool_.any_of({*set, holds ? pool_.negate(*condition) : *condition}));
            }
            return {};
        }
        if ((key != "anyOf" && key != "oneOf" && key != "allOf") || !value.is_array()) return {};
        std::vector<RegexId> parts;
        for (const Json& one : value) {
            const Result<RegexId> set = of(one, depth);
            if (!set) return std::unexpected(set.error());
            parts.push_back(*set);
        }
        if (key == "allOf") return keep(pool_.all_of(std::move(parts))), Result<void>();
        if (key == "oneOf") { // of each schema the strings that no other one allows
            std::vector<RegexId> alone;
            for (std::size_t i = 0; i < parts.size(); i++) {
                std::vector<RegexId> others = parts;
                others.erase(others.begin() + std::ptrdiff_t(i));
                alone.push_back(pool_.minus(parts[i], pool_.any_of(std::move(others))));
            }
            parts = std::move(alone);
        }
        keep(pool_.any_of(std::move(parts)));
        return {};
    }

    RegexId literal(const Json& value) {
        return value.is_string() ? pool_.literal(value.get_ref<const std::string&>()) : RegexPool::nothing;
    }

    RegexPool&                        pool_;
    const Json&                       root_;
    std::vector<std::vector<RegexId>> sets_; // that are intersected, of each schema at hand
};

Result<RegexId> strings_of(RegexPool& pool, const Json& root, const Json& schema) {
    return StringSet(pool, root).of(schema, 0);
}

} // namespace quire
