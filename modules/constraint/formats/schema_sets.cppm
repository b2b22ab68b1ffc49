// quire.constraint.formats.schema_sets: JSON Schemas as sets of JSON values: intersections, unions and complements of the keywords' sets, and the
// sets of members and elements. **Owns** the sets that were found, so that each is found once.
export module quire.constraint.formats.schema_sets;

import quire.constraint.formats.schema_keywords;
import quire.constraint.formats.schema_references;
import quire.constraint.formats.value_set;
import quire.constraint.grammar.grammar;
import quire.constraint.regex.parser;
import quire.core.base;

export namespace quire {

class SchemaSets {
public:
    // plain_numbers: integers, and the numbers of an `enum`, are written as 12 only. The schema and the pool are kept by reference.
    SchemaSets(const Json& schema, RegexPool& pool, const GrammarLimits& limits, bool plain_numbers);
    SchemaSets(const SchemaSets&)            = delete;
    SchemaSets& operator=(const SchemaSets&) = delete;

    SchemaReferences& references() { return references_; }
    const JsonShapes& shapes() const { return shapes_; }

    // The values that satisfy all terms. Error: a keyword that constrains and is not supported, by its name and place; a reference to
    // nowhere; a limit.
    Result<ValueSet> values(const Terms& terms);
    // Whether no value has these terms; false also where that is not known.
    Result<bool> is_void(const Terms& terms);
    Result<bool> is_void(const ObjectTerms& o);
    // The terms that the value of a member must satisfy; {false} where the name is not allowed.
    Result<Terms> member_terms(const ObjectTerms& o, const std::string& name);
    Terms         element_terms(const ArrayTerms& a, std::uint32_t i) const;
    // The names that the schemas have, in their order.
    std::vector<std::string> names_of(const ObjectTerms& o) const;
    // A key of patternProperties.
    Result<RegexId> pattern_of(const Json& schema, const std::string& pattern);

private:
    Result<ValueSet> intersection(const ValueSet& a, const ValueSet& b);
    Result<void>     prune(ValueSet& v);
    Result<ValueSet> values_of(const Term& t);
    Result<ValueSet> accepted(const Json& schema);
    Result<ValueSet> refused(const Json& schema);
    Result<ValueSet> one_of_values(const Json& list, bool negated);
    Result<ValueSet> combined(const Json& list, bool all, bool negated);
    Result<bool>     overlap(const ValueSet& a, const ValueSet& b);
    Result<ValueSet> one_of(const Json& list, bool negated);
    Result<ValueSet> conditional(const Json& schema, bool negated);
    Result<ValueSet> dependencies(const Json& schema, const std::string& key, const Json& value, bool negated);
    Result<void>     check_object(const Json& schema);
    Result<void>     check_array(const Json& schema);
    bool             matches(RegexId regex, std::string_view name);
    Result<std::optional<ValueSet>> keyword(const Json& schema, const std::string& key, const Json& value,
                                            bool negated);

    RegexPool&        pool_;
    GrammarLimits     limits_;
    bool              plain_numbers_;
    SchemaReferences  references_;
    JsonShapes        shapes_;
    SchemaKeywords    keywords_;
    std::size_t       steps_ = 0; // alternatives that were intersected
    int               depth_ = 0;
    std::vector<Term> active_; // terms whose values are being made
    // How many of active_ is_void() has left behind to look at a member or element: a term that comes again in there is no fault of the
    // schema.
    std::size_t                    outside_       = 0;
    bool                           meets_outside_ = false;
    std::map<Terms, ValueSet>      values_;
    std::map<Terms, bool>          void_;
    std::map<std::string, RegexId> patterns_;
};

} // namespace quire

module :private;

namespace quire {

constexpr int         most_references = 64; // of schemas that refer to one another without an array or object between
constexpr std::size_t most_terms      = 20000;   // sets of terms
constexpr std::size_t most_steps      = 200'000; // of intersections

SchemaSets::SchemaSets(const Json& schema, RegexPool& pool, const GrammarLimits& limits, bool plain_numbers)
    : pool_(pool), limits_(limits), plain_numbers_(plain_numbers), references_(schema),
      shapes_(JsonShapes::make(pool_, references_.draft() > 4, plain_numbers)),
      keywords_(pool_, shapes_, references_, plain_numbers) {
    pool_.add_unit(shapes_.character);
    pool_.add_unit(shapes_.any_character);
}

// The cost of a set of values, in units of work; a unit takes some 16 bytes of memory.
std::size_t cost(const ValueSet& v) {
    std::size_t n = 1;
    for (const ArrayTerms& a : v.arrays) {
        n += 8 + a.layers.size();
        for (const auto& [at, terms] : a.at) n += 4 + terms.size();
    }
    for (const ObjectTerms& o : v.objects) {
        n += 16 + o.layers.size() + 4 * (o.required.size() + o.forbidden.size()) + o.names.size() + o.breaches.size();
        for (const auto& [name, terms] : o.members) n += 6 + terms.size();
    }
    return n;
}

Result<ValueSet> SchemaSets::values(const Terms& terms) {
    pool_.spend(1 + terms.size());
    if (const auto known = values_.find(terms); known != values_.end()) return known->second;
    if (values_.size() > most_terms || pool_.size() > limits_.expressions)
        return fail_with(ErrorKind::limit, "the schema has too many combinations");
    ValueSet all = ValueSet::any(shapes_);
    for (const Term& t : terms) {
        Result<ValueSet> one = values_of(t);
        if (!one) return one;
        Result<ValueSet> cut = intersection(all, *one);
        if (!cut) return cut;
        all = std::move(*cut);
    }
    pool_.charge((cost(all) + terms.size() + 16) * 16);
    pool_.spend(cost(all));
    values_.emplace(terms, all);
    return all;
}

// The intersection; if it has several alternatives, without the ones that no value satisfies.
Result<ValueSet> SchemaSets::intersection(const ValueSet& a, const ValueSet& b) {
    pool_.spend(1 + cost(a) * (1 + b.objects.size() + b.arrays.size()) +
                cost(b) * (1 + a.objects.size() + a.arrays.size()));
    steps_ += 1 + a.objects.size() * b.objects.size() + a.arrays.size() * b.arrays.size();
    if (steps_ > most_steps) return fail_with(ErrorKind::limit, "the schema has too many combinations of alternatives");
    Result<ValueSet> c = intersect(pool_, shapes_, a, b);
    if (!c || (a.objects.size() <= 1 && b.objects.size() <= 1 && a.arrays.size() <= 1 && b.arrays.size() <= 1))
        return c;
    if (auto ok = prune(*c); !ok) return std::unexpected(ok.error());
    return c;
}

Result<void> SchemaSets::prune(ValueSet& v) {
    std::vector<ObjectTerms> kept;
    for (ObjectTerms& o : v.objects) {
        Result<bool> empty = is_void(o);
        if (!empty) return std::unexpected(empty.error());
        if (!*empty) kept.push_back(std::move(o));
    }
    v.objects = std::move(kept);
    std::vector<ArrayTerms> arrays;
    for (ArrayTerms& a : v.arrays) {
        bool empty = false;
        for (std::uint32_t i = 0; i < std::min(a.min, 8u) && !empty; i++) {
            Result<bool> one = is_void(element_terms(a, i));
            if (!one) return std::unexpected(one.error());
            empty = *one;
        }
        if (!empty) arrays.push_back(std::move(a));
    }
    v.arrays = std::move(arrays);
    return {};
}

Result<bool> SchemaSets::is_void(const Terms& terms) {
    if (terms.empty()) return false;
    const auto [known, added] = void_.try_emplace(terms, false);
    if (!added) return known->second;
    if (depth_ > most_references) return false;
    const std::size_t outside = std::exchange(outside_, active_.size());
    Result<ValueSet>  v       = values(terms);
    outside_                  = outside;
    if (!v && std::exchange(meets_outside_, false)) return false;
    if (!v) return std::unexpected(v.error());
    bool empty = pool_.is_void(scalar_text(pool_, v->scalars));
    if (empty) {
        if (auto ok = prune(*v); !ok) return std::unexpected(ok.error());
        empty = v->only_scalars();
    }
    return void_[terms] = empty;
}

Result<bool> SchemaSets::is_void(const ObjectTerms& o) {
    pool_.enter();
    for (const std::string& name : o.required) {
        Result<Terms> terms = member_terms(o, name);
        if (!terms) return std::unexpected(terms.error());
        Result<bool> empty = is_void(*terms);
        if (!empty || *empty) return empty;
    }
    return false;
}

Result<ValueSet> SchemaSets::values_of(const Term& t) {
    pool_.enter();
    if (t.schema->is_boolean()) return t.schema->get<bool>() != t.negated ? ValueSet::any(shapes_) : ValueSet{};
    if (!t.schema->is_object()) return fail(references_.place_of(*t.schema), "a schema is an object, true or false");
    const auto same = std::ranges::find(active_, t);
    if (depth_ >= most_references || same != active_.end()) {
        const bool again = same != active_.end();
        meets_outside_   = again ? std::size_t(same - active_.begin()) < outside_ : outside_ > 0;
        return fail(
            references_.place_of(*t.schema),
            again ? std::string("the schema refers to itself without an array or object between")
                  : cat("more than ", most_references,
                        " schemas stand in one another, or refer to one another, without an array or object between"));
    }
    depth_++;
    active_.push_back(t);
    Result<ValueSet> v = t.negated ? refused(*t.schema) : accepted(*t.schema);
    active_.pop_back();
    depth_--;
    return v;
}

Result<ValueSet> SchemaSets::accepted(const Json& schema) {
    ValueSet   all = ValueSet::any(shapes_);
    const auto cut = [&](Result<ValueSet> by) -> Result<void> {
        if (!by) return std::unexpected(by.error());
        Result<ValueSet> c = intersection(all, *by);
        if (!c) return std::unexpected(c.error());
        all = std::move(*c);
        return {};
    };
    if (schema.contains("$ref")) {
        Result<const Json*> target = references_.target(schema);
        if (!target) return std::unexpected(target.error());
        if (auto ok = cut(values_of({*target, false})); !ok) return std::unexpected(ok.error());
        if (references_.draft() < 8) return all; // its siblings say nothing
    }
    bool object = false, array = false;
    for (const auto& [key, value] : members(schema)) {
        if (key == "properties" || key == "patternProperties" || key == "additionalProperties") {
            if (!object) {
                ValueSet v   = ValueSet::any(shapes_);
                v.objects[0] = {.layers = {&schema}};
                if (auto ok = check_object(schema); !ok) return std::unexpected(ok.error());
                if (auto ok = cut(std::move(v)); !ok) return std::unexpected(ok.error());
            }
            object = true;
        } else if (key == "items" || key == "prefixItems" || key == "additionalItems") {
            if (!array) {
                ValueSet v  = ValueSet::any(shapes_);
                v.arrays[0] = {.layers = {&schema}};
                if (auto ok = check_array(schema); !ok) return std::unexpected(ok.error());
                if (auto ok = cut(std::move(v)); !ok) return std::unexpected(ok.error());
            }
            array = true;
        } else {
            Result<std::optional<ValueSet>> by = keyword(schema, key, value, false);
            if (!by) return std::unexpected(by.error());
            if (*by)
                if (auto ok = cut(std::move(**by)); !ok) return std::unexpected(ok.error());
        }
    }
    return all;
}

// The values that do not satisfy the schema: they break one of its keywords.
Result<ValueSet> SchemaSets::refused(const Json& schema) {
    ValueSet all;
    if (schema.contains("$ref")) {
        Result<const Json*> target = references_.target(schema);
        if (!target) return std::unexpected(target.error());
        Result<ValueSet> v = values_of({*target, true});
        if (!v || references_.draft() < 8) return v;
        unite(pool_, all, std::move(*v));
    }
    for (const auto& [key, value] : members(schema)) {
        if (key == "properties") {
            if (!value.is_object()) return references_.wrong(schema, key, "is not an object");
            for (const auto& [name, sub] : members(value)) {
                ObjectTerms o;
                o.required = {name};
                o.members  = {{name, {{&sub, true}}}};
                all.objects.push_back(std::move(o));
            }
        } else if (key == "additionalProperties" || key == "patternProperties") {
            if (auto ok = check_object(schema); !ok) return std::unexpected(ok.error());
            if (value == Json(true)) continue;
            ObjectTerms o;
            o.breaches = {{&schema, key == "additionalProperties"}};
            all.objects.push_back(std::move(o));
        } else if (key == "items" || key == "prefixItems" || key == "additionalItems") {
            if (auto ok = check_array(schema); !ok) return std::unexpected(ok.error());
            for (std::uint32_t i = 0; i < 4; i++) { // one of the first four
                const Json* sub = references_.element(schema, i);
                if (!sub || (sub->is_boolean() && sub->get<bool>())) continue;
                ArrayTerms a;
                a.min = i + 1;
                a.at  = {{i, {{sub, true}}}};
                all.arrays.push_back(std::move(a));
            }
        } else {
            Result<std::optional<ValueSet>> by = keyword(schema, key, value, true);
            if (!by) return std::unexpected(by.error());
            if (*by) unite(pool_, all, std::move(**by));
        }
    }
    if (auto ok = prune(all); !ok) return std::unexpected(ok.error());
    return all;
}

// -- keywords that name other schemas

// Nothing: the keyword asks for nothing.
Result<std::optional<ValueSet>> SchemaSets::keyword(const Json& schema, const std::string& key, const Json& value,
                                                    bool negated) {
    using Set       = std::optional<ValueSet>;
    const auto term = [&](const Json& sub, bool not_it) { return values_of({&sub, not_it != negated}); };
    if (key == "const") return one_of_values(Json::array({value}), negated);
    if (key == "enum") {
        if (!value.is_array()) return references_.wrong(schema, key, "is not an array");
        return one_of_values(value, negated);
    }
    if (key == "allOf" || key == "anyOf" || key == "oneOf") {
        if (!value.is_array() || value.empty()) return references_.wrong(schema, key, "is not an array of schemas");
        if (key == "oneOf") return one_of(value, negated);
        return combined(value, (key == "allOf") != negated, negated);
    }
    if (key == "not") return term(value, true);
    if (key == "if") return conditional(schema, negated);
    if (key == "dependencies" || key == "dependentRequired" || key == "dependentSchemas")
        return dependencies(schema, key, value, negated);
    if (key == "propertyNames") {
        if (negated) return Set(); // fewer are accepted
        Result<ValueSet> names = values_of({&value, false});
        if (!names) return std::unexpected(names.error());
        ValueSet v         = ValueSet::any(shapes_);
        v.objects[0].names = {names->scalars.text};
        return Set(std::move(v));
    }
    return keywords_.values(schema, key, value, negated);
}

// enum and const.
Result<ValueSet> SchemaSets::one_of_values(const Json& list, bool negated) {
    ValueSet             v;
    std::vector<RegexId> numbers, texts;
    std::vector<Term>    others;
    for (const Json& one : list) {
        if (one.is_null()) v.scalars.null = true;
        else if (one.is_boolean()) (one.get<bool>() ? v.scalars.yes : v.scalars.no) = true;
        else if (one.is_number()) {
            const Decimal d = decimal_of(one);
            numbers.push_back(plain_numbers_ && !negated ? pool_.literal(d.text()) : number_text(pool_, d));
        } else if (one.is_string())
            texts.push_back(text_of(pool_, one.get_ref<const std::string&>(), TextSpelling::json));
        else others.push_back({&references_.literal(one), negated});
    }
    v.scalars.number = pool_.any_of(std::move(numbers));
    v.scalars.text   = pool_.any_of(std::move(texts));
    if (negated) {
        ValueSet rest     = ValueSet::any(shapes_);
        rest.scalars.null = !v.scalars.null;
        rest.scalars.no   = !v.scalars.no;
        rest.scalars.yes  = !v.scalars.yes;
        if (v.scalars.number != RegexPool::nothing)
            rest.scalars.number = pool_.minus(shapes_.plain_number, v.scalars.number);
        if (v.scalars.text != RegexPool::nothing) rest.scalars.text = pool_.minus(shapes_.text, v.scalars.text);
        v = std::move(rest);
    }
    for (const Term& t : others) {
        Result<ValueSet> one = values_of(t);
        if (!one) return one;
        if (!negated) {
            unite(pool_, v, std::move(*one));
            continue;
        }
        Result<ValueSet> cut = intersection(v, *one);
        if (!cut) return cut;
        v = std::move(*cut);
    }
    return v;
}

// All (any) of the schemas, each negated or not.
Result<ValueSet> SchemaSets::combined(const Json& list, bool all, bool negated) {
    ValueSet v = all ? ValueSet::any(shapes_) : ValueSet{};
    for (const Json& sub : list) {
        Result<ValueSet> one = values_of({&sub, negated});
        if (!one) return one;
        if (!all) {
            unite(pool_, v, std::move(*one));
            if (v.objects.size() > most_alternatives || v.arrays.size() > most_alternatives)
                return fail_with(ErrorKind::limit, "the schema has too many alternatives");
            continue;
        }
        Result<ValueSet> cut = intersection(v, *one);
        if (!cut) return cut;
        v = std::move(*cut);
    }
    return v;
}

Result<bool> SchemaSets::overlap(const ValueSet& a, const ValueSet& b) {
    pool_.spend(cost(a) * (1 + b.objects.size() + b.arrays.size()) +
                cost(b) * (1 + a.objects.size() + a.arrays.size()));
    Result<ValueSet> common = intersect(pool_, shapes_, a, b);
    if (!common) return std::unexpected(common.error());
    if (!pool_.is_void(scalar_text(pool_, common->scalars))) return true;
    if (auto ok = prune(*common); !ok) return std::unexpected(ok.error());
    return !common->only_scalars();
}

// Each schema without the others that have something in common with it. Negated: none of them, or two at once.
Result<ValueSet> SchemaSets::one_of(const Json& list, bool negated) {
    std::vector<ValueSet> in;
    for (const Json& sub : list) {
        Result<ValueSet> one = values_of({&sub, false});
        if (!one) return one;
        in.push_back(std::move(*one));
    }
    ValueSet v;
    if (negated) {
        Result<ValueSet> none = combined(list, true, true);
        if (!none) return none;
        v = std::move(*none);
    }
    for (std::size_t i = 0; i < in.size(); i++) {
        ValueSet own = in[i];
        for (std::size_t k = negated ? i + 1 : 0; k < in.size(); k++) {
            if (k == i) continue;
            Result<bool> common = overlap(in[i], in[k]);
            if (!common) return std::unexpected(common.error());
            if (!*common) continue;
            Result<ValueSet> other = negated ? Result<ValueSet>(in[k]) : values_of({&list[k], true});
            Result<ValueSet> cut   = other ? intersection(negated ? in[i] : own, *other) : other;
            if (!cut) return cut;
            if (negated) unite(pool_, v, std::move(*cut));
            else own = std::move(*cut);
        }
        if (!negated) unite(pool_, v, std::move(own));
    }
    return v;
}

// if, then, else.
Result<ValueSet> SchemaSets::conditional(const Json& schema, bool negated) {
    ValueSet v;
    for (const bool holds : {true, false}) {
        Result<ValueSet> part = values_of({&schema["if"], !holds});
        if (!part) return part;
        const auto then = schema.find(holds ? "then" : "else");
        if (then == schema.end()) {
            if (!negated) unite(pool_, v, std::move(*part));
            continue;
        }
        Result<ValueSet> follows = values_of({&*then, negated});
        Result<ValueSet> cut     = follows ? intersection(*part, *follows) : follows;
        if (!cut) return cut;
        unite(pool_, v, std::move(*cut));
    }
    return v;
}

// Where a member is there, others are, or the whole satisfies a schema.
Result<ValueSet> SchemaSets::dependencies(const Json& schema, const std::string& key, const Json& value, bool negated) {
    if (!value.is_object()) return references_.wrong(schema, key, "is not an object");
    ValueSet v = negated ? ValueSet{} : ValueSet::any(shapes_);
    for (const auto& [name, needs] : members(value)) {
        ValueSet there, absent = ValueSet::any(shapes_);
        there.objects         = {{.required = {name}}};
        absent.objects[0]     = {.forbidden = {name}};
        Result<ValueSet> then = needs.is_array()    ? keywords_.required(schema, needs, negated)
                                : needs.is_string() ? keywords_.required(schema, Json::array({needs}), negated)
                                                    : values_of({&needs, negated});
        if (!then) return then;
        Result<ValueSet> both = intersection(there, *then);
        if (!both) return both;
        if (negated) {
            unite(pool_, v, std::move(*both));
            continue;
        }
        unite(pool_, *both, std::move(absent));
        Result<ValueSet> cut = intersection(v, *both);
        if (!cut) return cut;
        v = std::move(*cut);
    }
    return v;
}

Result<void> SchemaSets::check_object(const Json& schema) {
    for (const char* key : {"properties", "patternProperties"})
        if (const auto at = schema.find(key); at != schema.end() && !at->is_object())
            return references_.wrong(schema, key, "is not an object");
    return {};
}

Result<void> SchemaSets::check_array(const Json& schema) {
    if (const auto at = schema.find("prefixItems"); at != schema.end() && !at->is_array())
        return references_.wrong(schema, "prefixItems", "is not an array");
    return {};
}

// -- members and elements

Result<RegexId> SchemaSets::pattern_of(const Json& schema, const std::string& pattern) {
    if (const auto known = patterns_.find(pattern); known != patterns_.end()) return known->second;
    Result<RegexId> made = parse_regex(pool_, pattern, TextSpelling::json, false);
    if (!made) return references_.wrong(schema, "patternProperties", made.error().message);
    patterns_.emplace(pattern, *made);
    return made;
}

bool SchemaSets::matches(RegexId regex, std::string_view name) {
    // A character has one spelling here, which is the expression of the name itself.
    return !pool_.is_void(pool_.all_of({regex, text_of(pool_, name, TextSpelling::json)}));
}

Result<Terms> SchemaSets::member_terms(const ObjectTerms& o, const std::string& name) {
    Terms terms;
    for (const Json* layer : o.layers) {
        bool       named = false;
        const auto props = layer->find("properties");
        if (props != layer->end()) pool_.spend(1 + props->size() / 4);
        if (props != layer->end())
            if (const auto at = props->find(name); at != props->end()) {
                terms.push_back({&*at, false});
                named = true;
            }
        if (const auto all = layer->find("patternProperties"); all != layer->end())
            for (const auto& [pattern, sub] : members(*all)) {
                Result<RegexId> regex = pattern_of(*layer, pattern);
                if (!regex) return std::unexpected(regex.error());
                if (!matches(*regex, name)) continue;
                terms.push_back({&sub, false});
                named = true;
            }
        if (const auto more = layer->find("additionalProperties"); !named && more != layer->end())
            terms.push_back({&*more, false});
    }
    for (const auto& [member, own] : o.members)
        if (member == name) terms.insert(terms.end(), own.begin(), own.end());
    bool allowed = std::ranges::find(o.forbidden, name) == o.forbidden.end();
    for (RegexId names : o.names) allowed = allowed && matches(names, name);
    if (!allowed) terms.push_back({&references_.never(), false});
    std::erase_if(terms, [](const Term& t) { return t.schema->is_boolean() && t.schema->get<bool>() != t.negated; });
    return both({}, terms);
}

Terms SchemaSets::element_terms(const ArrayTerms& a, std::uint32_t i) const {
    Terms terms;
    for (const Json* layer : a.layers)
        if (const Json* sub = references_.element(*layer, i)) terms.push_back({sub, false});
    for (const auto& [at, own] : a.at)
        if (at == i) terms.insert(terms.end(), own.begin(), own.end());
    std::erase_if(terms, [](const Term& t) { return t.schema->is_boolean() && t.schema->get<bool>() != t.negated; });
    return both({}, terms);
}

std::vector<std::string> SchemaSets::names_of(const ObjectTerms& o) const {
    std::vector<std::string>        names;
    std::unordered_set<std::string> seen;
    const auto                      add = [&](const std::string& name) {
        pool_.spend(4);
        if (seen.insert(name).second) names.push_back(name);
    };
    for (const Json* layer : o.layers)
        if (const auto props = layer->find("properties"); props != layer->end())
            for (const auto& [name, sub] : members(*props)) add(name);
    for (const auto& [name, terms] : o.members) add(name);
    for (const std::string& name : o.required) add(name);
    for (const std::string& name : o.forbidden) add(name);
    return names;
}

} // namespace quire
