// quire.constraint.formats.schema_keywords: the JSON values that the keywords of JSON Schema without inner schemas allow: types, numbers, texts,
// counts; and which keywords are not supported. Owns nothing.
export module quire.constraint.formats.schema_keywords;

import quire.constraint.formats.schema_references;
import quire.constraint.formats.value_set;
import quire.constraint.regex.parser;
import quire.core.base;

export namespace quire {

class SchemaKeywords {
public:
    // plain_numbers: integers are written as 12 only. The others are kept by reference.
    SchemaKeywords(RegexPool& pool, const JsonShapes& shapes, const SchemaReferences& references, bool plain_numbers)
        : pool_(pool), shapes_(shapes), references_(references), plain_numbers_(plain_numbers) {}

    // The values that satisfy a keyword of `schema`, or (negated) do not. Nothing: it asks for nothing. Error: its value is none, or it
    // constrains and is not supported.
    Result<std::optional<ValueSet>> values(const Json& schema, const std::string& key, const Json& value,
                                           bool negated) const;
    // Of the keyword `required`.
    Result<ValueSet> required(const Json& schema, const Json& list, bool negated) const;

private:
    ValueSet         number_rule(RegexId only, bool negated) const;
    ValueSet         text_rule(RegexId only, bool negated) const;
    Result<ValueSet> type(const Json& schema, const Json& value, bool negated) const;

    RegexPool&                                            pool_;
    const JsonShapes&                                     shapes_;
    const SchemaReferences&                               references_;
    bool                                                  plain_numbers_;
    mutable std::map<std::string, std::optional<RegexId>> formats_; // that were used before
};

} // namespace quire

module :private;

namespace quire {

// `only`, or all other numbers.
ValueSet SchemaKeywords::number_rule(RegexId only, bool negated) const {
    ValueSet v       = negated ? ValueSet{} : ValueSet::any(shapes_);
    v.scalars.number = negated ? pool_.minus(shapes_.plain_number, only) : only;
    return v;
}

ValueSet SchemaKeywords::text_rule(RegexId only, bool negated) const {
    ValueSet v     = negated ? ValueSet{} : ValueSet::any(shapes_);
    v.scalars.text = negated ? pool_.minus(shapes_.text, only) : only;
    return v;
}

Result<std::optional<ValueSet>> SchemaKeywords::values(const Json& schema, const std::string& key, const Json& value,
                                                       bool negated) const {
    using Set        = std::optional<ValueSet>;
    const auto count = [&]() -> Result<std::uint32_t> {
        if (!value.is_number() || value.get<double>() < 0 || value.get<double>() != std::floor(value.get<double>()))
            return references_.wrong(schema, key, "is not a number of 0 or more");
        return std::uint32_t(std::min(value.get<double>(), 1e9));
    };
    if (key == "type") return type(schema, value, negated);
    if (key == "minimum" || key == "maximum" || key == "exclusiveMinimum" || key == "exclusiveMaximum") {
        if (value.is_boolean()) return Set(); // draft 4: of the keyword beside it
        if (!value.is_number()) return references_.wrong(schema, key, "is not a number");
        const bool low    = key == "minimum" || key == "exclusiveMinimum";
        const auto beside = schema.find(low ? "exclusiveMinimum" : "exclusiveMaximum");
        const bool without =
            key.starts_with("excl") || (beside != schema.end() && beside->is_boolean() && beside->get<bool>());
        NumberRange range;
        (low ? range.low : range.high)           = decimal_of(value);
        (low ? range.with_low : range.with_high) = !without;
        return Set(number_rule(number_in(pool_, shapes_, range), negated));
    }
    if (key == "multipleOf" || (key == "divisibleBy" && references_.draft() < 4)) {
        if (!value.is_number()) return references_.wrong(schema, key, "is not a number");
        Result<RegexId> only = number_multiple(pool_, shapes_, value);
        if (!only) return references_.wrong(schema, key, only.error().message);
        return Set(number_rule(*only, negated));
    }
    if (key == "minLength" || key == "maxLength") {
        Result<std::uint32_t> n = count();
        if (!n) return std::unexpected(n.error());
        const bool    least = key == "minLength";
        const RegexId one   = negated ? shapes_.character : shapes_.any_character;
        if (least && *n == 0 && !negated) return Set();
        return Set(text_rule(pool_.repeat(one, least ? *n : 0, least ? RegexPool::endless : *n), negated));
    }
    if (key == "pattern") {
        if (!value.is_string()) return references_.wrong(schema, key, "is not a string");
        Result<RegexId> only = parse_regex(pool_, value.get_ref<const std::string&>(), TextSpelling::json, false);
        if (!only) return references_.wrong(schema, key, only.error().message);
        return Set(text_rule(*only, negated));
    }
    if (key == "format") {
        if (!value.is_string()) return Set();
        const std::string& name  = value.get_ref<const std::string&>();
        auto               known = formats_.find(name);
        if (known == formats_.end()) {
            Result<std::optional<RegexId>> only = string_format(pool_, name);
            if (!only) return references_.wrong(schema, key, only.error().message);
            known = formats_.emplace(name, *only).first;
        }
        if (!known->second) return Set();
        return Set(text_rule(*known->second, negated));
    }
    if (key == "contentEncoding" && references_.draft() == 7 && value == "base64") { // later an annotation
        Result<RegexId> only =
            parse_regex(pool_, "([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?", TextSpelling::json, true);
        if (!only) return references_.wrong(schema, key, only.error().message);
        return Set(text_rule(*only, negated));
    }
    if (key == "contentMediaType" && references_.draft() == 7 && value == "application/json")
        return references_.wrong(schema, key, "is not supported in draft 7");
    if (key == "minItems" || key == "maxItems" || key == "minProperties" || key == "maxProperties") {
        Result<std::uint32_t> n = count();
        if (!n) return std::unexpected(n.error());
        bool          least = key.starts_with("min");
        std::uint32_t bound = *n;
        ValueSet      v     = negated ? ValueSet{} : ValueSet::any(shapes_);
        if (negated) {
            if (least && bound == 0) return Set();
            bound += least ? -1u : 1u;
            least = !least;
        }
        const std::uint32_t min = least ? bound : 0, max = least ? RegexPool::endless : bound;
        if (key.ends_with("Items")) v.arrays = {{.min = min, .max = max}};
        else v.objects = {{.min = min, .max = max}};
        return Set(std::move(v));
    }
    if (key == "required") {
        if (value.is_boolean()) return Set(); // draft 3: of the member
        if (!value.is_array()) return references_.wrong(schema, key, "is not an array");
        return required(schema, value, negated);
    }
    if (key == "uniqueItems") {
        if (value.is_boolean() && !value.get<bool>()) return Set();
        const auto most = schema.find("maxItems");
        if (!negated && most != schema.end() && most->is_number() && most->get<double>() <= 1) return Set();
        return references_.wrong(schema, key, "is not supported");
    }
    if (key == "contains" || key == "minContains" || key == "maxContains") {
        if (key != "contains" && !schema.contains("contains")) return Set();
        return references_.wrong(schema, key, "is not supported");
    }
    if (key == "unevaluatedProperties" || key == "unevaluatedItems") {
        if (value.is_boolean() && value.get<bool>()) return Set();
        return references_.wrong(schema, key, "is not supported");
    }
    if (key == "$dynamicRef" || key == "$recursiveRef" || key == "extends" || key == "disallow")
        return references_.wrong(schema, key, "is not supported");
    return Set();
}

Result<ValueSet> SchemaKeywords::type(const Json& schema, const Json& value, bool negated) const {
    ValueSet   v;
    const bool plain = plain_numbers_ && !negated;
    const auto add   = [&](const Json& name) -> Result<void> {
        const std::string n = name.is_string() ? name.get<std::string>() : "";
        if (n == "null") v.scalars.null = true;
        else if (n == "boolean") v.scalars.no = v.scalars.yes = true;
        else if (n == "number") v.scalars.number = shapes_.number;
        else if (n == "integer")
            v.scalars.number = pool_.any_of({v.scalars.number, plain ? shapes_.plain_integer : shapes_.integer});
        else if (n == "string") v.scalars.text = shapes_.any_text;
        else if (n == "array") v.arrays = {ArrayTerms{}};
        else if (n == "object") v.objects = {ObjectTerms{}};
        else if (n == "any" && references_.draft() < 4) v = ValueSet::any(shapes_);
        else return references_.wrong(schema, "type", cat(quote(json_dump(name)), " is not a type"));
        return {};
    };
    if (value.is_array()) {
        for (const Json& name : value)
            if (auto ok = add(name); !ok) return std::unexpected(ok.error());
    } else if (auto ok = add(value); !ok) return std::unexpected(ok.error());
    if (!negated) return v;
    const Scalars& s = v.scalars;
    ValueSet       rest;
    rest.scalars = {!s.null, !s.no, !s.yes,
                    s.number == RegexPool::nothing ? shapes_.number
                    : s.number == shapes_.number   ? RegexPool::nothing
                                                   : pool_.minus(shapes_.plain_number, s.number),
                    s.text == RegexPool::nothing ? shapes_.any_text : RegexPool::nothing};
    if (v.arrays.empty()) rest.arrays = {ArrayTerms{}};
    if (v.objects.empty()) rest.objects = {ObjectTerms{}};
    return rest;
}

Result<ValueSet> SchemaKeywords::required(const Json& schema, const Json& list, bool negated) const {
    ValueSet v = negated ? ValueSet{} : ValueSet::any(shapes_);
    for (const Json& name : list) {
        if (!name.is_string()) return references_.wrong(schema, "required", "is not an array of names");
        if (negated) v.objects.push_back({.forbidden = {name.get<std::string>()}});
        else v.objects[0].required.push_back(name.get<std::string>());
    }
    return v;
}

} // namespace quire
