// quire.text.grammar.json_schema: JSON Schema (2020-12, and drafts 4 to 7) → a grammar of exactly the JSON texts that satisfy it.
// Owns nothing.
//
// A schema is a set of JSON values. Scalars become expressions, where intersection and complement are exact; arrays and objects
// become alternatives. The symbols of the grammar are sets of terms, so that `allOf`, references and recursion need nothing more.
// Where `not` and `oneOf` would need arrays or objects that no alternative can express, fewer texts are accepted, never more.
export module quire.text.grammar.json_schema;

import quire.core.base;
import quire.core.json;
import quire.core.std;
import quire.text.grammar.grammar;
import quire.text.grammar.json_text;
import quire.text.grammar.regex;
import quire.text.grammar.regex_parser;
import quire.text.grammar.schema_references;
import quire.text.grammar.schema_values;

export namespace quire {

struct SchemaOptions {
    // Members come in the order of `properties`, as the model was told them; else in any order.
    bool ordered = true;
    // Integers, and the numbers of an `enum`, are written as 12 only, not as 12.0 also, which a schema does not tell from it.
    bool plain_numbers = true;
    // Where a schema names members and says nothing about others (additionalProperties, patternProperties), there are no others: a
    // model does not invent members.
    bool          closed = true;
    GrammarLimits limits{};
};

// Adds the texts that satisfy a schema to a grammar; the schema is not needed any more afterwards. Error: a keyword that constrains and
// is not supported, by its name and place; a reference to nowhere; a limit.
Result<GrammarSymbol> add_json_schema(Grammar& grammar, const Json& schema, const SchemaOptions& options = {});

} // namespace quire

module :private;

namespace quire {

constexpr int         most_references = 64; // of schemas that refer to one another without an array or object between
constexpr std::size_t most_terms      = 20000;   // sets of terms
constexpr std::size_t most_steps      = 200'000; // of intersections
constexpr std::size_t most_classes    = 64;      // of keys that no schema names

bool is_scalar(const Json& v) { return !v.is_array() && !v.is_object(); }

class SchemaCompiler {
public:
    SchemaCompiler(const Json& schema, const SchemaOptions& options, Grammar& grammar)
        : root_(&schema), references_(schema), options_(options), g_(grammar), pool_(grammar.pool),
          shapes_(JsonShapes::make(pool_, references_.draft() > 4)) {
        pool_.add_unit(shapes_.character);
        pool_.add_unit(shapes_.any_character);
    }

    Result<GrammarSymbol> compile() {
        references_.read();
        g_.use_json();
        const Result<GrammarSymbol> start = symbol_of({{root_, false}});
        if (!start) return start;
        while (!open_.empty()) {
            const auto [terms, symbol] = open_.back();
            open_.pop_back();
            if (auto ok = define(terms, symbol); !ok) return std::unexpected(ok.error());
            if (g_.symbols.size() > options_.limits.symbols || pool_.size() > options_.limits.expressions)
                return fail_with(ErrorKind::limit, "the schema needs more than ", options_.limits.symbols, " rules or ",
                                 options_.limits.expressions, " expressions");
        }
        return start;
    }

private:
    // -- sets of values

    std::unexpected<Error> wrong(const Json& schema, std::string_view keyword, std::string_view what) const {
        return fail(references_.place_of(schema), keyword, ": ", what);
    }

    Result<ValueSet> values(const Terms& terms) {
        if (const auto known = values_.find(terms); known != values_.end()) return known->second;
        if (values_.size() > most_terms || pool_.size() > options_.limits.expressions)
            return fail_with(ErrorKind::limit, "the schema has too many combinations");
        ValueSet all = ValueSet::any(shapes_);
        for (const Term& t : terms) {
            Result<ValueSet> one = values_of(t);
            if (!one) return one;
            Result<ValueSet> cut = meet(all, *one);
            if (!cut) return cut;
            all = std::move(*cut);
        }
        values_.emplace(terms, all);
        return all;
    }

    // Intersection; where it makes several alternatives, without those that nothing satisfies.
    Result<ValueSet> meet(const ValueSet& a, const ValueSet& b) {
        steps_ += 1 + a.objects.size() * b.objects.size() + a.arrays.size() * b.arrays.size();
        if (steps_ > most_steps)
            return fail_with(ErrorKind::limit, "the schema has too many combinations of alternatives");
        Result<ValueSet> c = intersect(pool_, shapes_, a, b);
        if (!c || (a.objects.size() <= 1 && b.objects.size() <= 1 && a.arrays.size() <= 1 && b.arrays.size() <= 1))
            return c;
        if (auto ok = prune(*c); !ok) return std::unexpected(ok.error());
        return c;
    }

    Result<void> prune(ValueSet& v) {
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

    // Whether no value has these terms; false also where that is not known.
    Result<bool> is_void(const Terms& terms) {
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

    Result<bool> is_void(const ObjectTerms& o) {
        for (const std::string& name : o.required) {
            Result<Terms> terms = member_terms(o, name);
            if (!terms) return std::unexpected(terms.error());
            Result<bool> empty = is_void(*terms);
            if (!empty || *empty) return empty;
        }
        return false;
    }

    Result<ValueSet> values_of(const Term& t) {
        if (t.schema->is_boolean()) return t.schema->get<bool>() != t.negated ? ValueSet::any(shapes_) : ValueSet{};
        if (!t.schema->is_object())
            return fail(references_.place_of(*t.schema), "a schema is an object, true or false");
        const auto same = std::ranges::find(active_, t);
        if (depth_ >= most_references || same != active_.end()) {
            meets_outside_ = same != active_.end() ? std::size_t(same - active_.begin()) < outside_ : outside_ > 0;
            return fail(references_.place_of(*t.schema),
                        "the schema refers to itself without an array or object between");
        }
        depth_++;
        active_.push_back(t);
        Result<ValueSet> v = t.negated ? refused(*t.schema) : accepted(*t.schema);
        active_.pop_back();
        depth_--;
        return v;
    }

    Result<ValueSet> accepted(const Json& schema) {
        ValueSet   all = ValueSet::any(shapes_);
        const auto cut = [&](Result<ValueSet> by) -> Result<void> {
            if (!by) return std::unexpected(by.error());
            Result<ValueSet> c = meet(all, *by);
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

    // What does not satisfy the schema: what breaks one of its keywords.
    Result<ValueSet> refused(const Json& schema) {
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
                if (!value.is_object()) return wrong(schema, key, "is not an object");
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

    // -- keywords

    ValueSet any_but_numbers(RegexId numbers) {
        ValueSet v       = ValueSet::any(shapes_);
        v.scalars.number = numbers;
        return v;
    }
    ValueSet numbers_only(RegexId numbers) {
        ValueSet v;
        v.scalars.number = numbers;
        return v;
    }
    // `only`, or all other numbers.
    ValueSet number_rule(RegexId only, bool negated) {
        return negated ? numbers_only(pool_.minus(shapes_.plain_number, only)) : any_but_numbers(only);
    }
    ValueSet text_rule(RegexId only, bool negated) {
        ValueSet v     = negated ? ValueSet{} : ValueSet::any(shapes_);
        v.scalars.text = negated ? pool_.minus(shapes_.text, only) : only;
        return v;
    }

    // Nothing: the keyword asks for nothing.
    Result<std::optional<ValueSet>> keyword(const Json& schema, const std::string& key, const Json& value,
                                            bool negated) {
        using Set        = std::optional<ValueSet>;
        const auto term  = [&](const Json& sub, bool not_it) { return values_of({&sub, not_it != negated}); };
        const auto given = [](Result<ValueSet> v) -> Result<Set> {
            if (!v) return std::unexpected(v.error());
            return Set(std::move(*v));
        };
        const auto count = [&]() -> Result<std::uint32_t> {
            if (!value.is_number() || value.get<double>() < 0 || value.get<double>() != std::floor(value.get<double>()))
                return wrong(schema, key, "is not a number of 0 or more");
            return std::uint32_t(std::min(value.get<double>(), 1e9));
        };
        if (key == "type") return given(type(schema, value, negated));
        if (key == "const") return given(one_of_values(Json::array({value}), negated));
        if (key == "enum") {
            if (!value.is_array()) return wrong(schema, key, "is not an array");
            return given(one_of_values(value, negated));
        }
        if (key == "allOf" || key == "anyOf" || key == "oneOf") {
            if (!value.is_array() || value.empty()) return wrong(schema, key, "is not an array of schemas");
            if (key == "oneOf") return given(one_of(value, negated));
            return given(combined(value, (key == "allOf") != negated, negated));
        }
        if (key == "not") return given(term(value, true));
        if (key == "if") return given(conditional(schema, negated));
        if (key == "minimum" || key == "maximum" || key == "exclusiveMinimum" || key == "exclusiveMaximum") {
            if (value.is_boolean()) return Set(); // draft 4: of the keyword beside it
            if (!value.is_number()) return wrong(schema, key, "is not a number");
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
            if (!value.is_number()) return wrong(schema, key, "is not a number");
            Result<RegexId> only = number_multiple(pool_, shapes_, value);
            if (!only) return wrong(schema, key, only.error().message);
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
            if (!value.is_string()) return wrong(schema, key, "is not a string");
            Result<RegexId> only = parse_regex(pool_, value.get_ref<const std::string&>(), TextSpelling::json, false);
            if (!only) return wrong(schema, key, only.error().message);
            return Set(text_rule(*only, negated));
        }
        if (key == "format") {
            if (!value.is_string()) return Set();
            Result<std::optional<RegexId>> only = string_format(pool_, value.get_ref<const std::string&>());
            if (!only) return wrong(schema, key, only.error().message);
            if (!*only) return Set();
            return Set(text_rule(**only, negated));
        }
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
            if (!value.is_array()) return wrong(schema, key, "is not an array");
            return given(required(schema, value, negated));
        }
        if (key == "dependencies" || key == "dependentRequired" || key == "dependentSchemas")
            return given(dependencies(schema, key, value, negated));
        if (key == "propertyNames") {
            if (negated) return Set(); // fewer are accepted
            Result<ValueSet> names = values_of({&value, false});
            if (!names) return std::unexpected(names.error());
            ValueSet v         = ValueSet::any(shapes_);
            v.objects[0].names = {names->scalars.text};
            return Set(std::move(v));
        }
        if (key == "uniqueItems") {
            if (value.is_boolean() && !value.get<bool>()) return Set();
            const auto most = schema.find("maxItems");
            if (!negated && most != schema.end() && most->is_number() && most->get<double>() <= 1) return Set();
            return wrong(schema, key, "is not supported");
        }
        if (key == "contains" || key == "minContains" || key == "maxContains") {
            if (key != "contains" && !schema.contains("contains")) return Set();
            return wrong(schema, key, "is not supported");
        }
        if (key == "unevaluatedProperties" || key == "unevaluatedItems") {
            if (value.is_boolean() && value.get<bool>()) return Set();
            return wrong(schema, key, "is not supported");
        }
        if (key == "$dynamicRef" || key == "$recursiveRef" || key == "extends" || key == "disallow")
            return wrong(schema, key, "is not supported");
        return Set();
    }

    Result<ValueSet> type(const Json& schema, const Json& value, bool negated) {
        ValueSet   v;
        const bool plain = options_.plain_numbers && !negated;
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
            else return wrong(schema, "type", cat(quote(json_dump(name)), " is not a type"));
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

    // enum and const.
    Result<ValueSet> one_of_values(const Json& list, bool negated) {
        ValueSet             v;
        std::vector<RegexId> numbers, texts;
        std::vector<Term>    others;
        for (const Json& one : list) {
            if (one.is_null()) v.scalars.null = true;
            else if (one.is_boolean()) (one.get<bool>() ? v.scalars.yes : v.scalars.no) = true;
            else if (one.is_number()) {
                const Decimal d = decimal_of(one);
                numbers.push_back(options_.plain_numbers && !negated
                                      ? pool_.literal(d.text())
                                      : number_in(pool_, shapes_, {.low = d, .high = d}));
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
            Result<ValueSet> cut = meet(v, *one);
            if (!cut) return cut;
            v = std::move(*cut);
        }
        return v;
    }

    // All (any) of the schemas, each negated or not.
    Result<ValueSet> combined(const Json& list, bool all, bool negated) {
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
            Result<ValueSet> cut = meet(v, *one);
            if (!cut) return cut;
            v = std::move(*cut);
        }
        return v;
    }

    Result<bool> overlap(const ValueSet& a, const ValueSet& b) {
        Result<ValueSet> common = intersect(pool_, shapes_, a, b);
        if (!common) return std::unexpected(common.error());
        if (!pool_.is_void(scalar_text(pool_, common->scalars))) return true;
        if (auto ok = prune(*common); !ok) return std::unexpected(ok.error());
        return !common->only_scalars();
    }

    // Each schema without the others that have something in common with it. Negated: none of them, or two at once.
    Result<ValueSet> one_of(const Json& list, bool negated) {
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
                Result<ValueSet> cut   = other ? meet(negated ? in[i] : own, *other) : other;
                if (!cut) return cut;
                if (negated) unite(pool_, v, std::move(*cut));
                else own = std::move(*cut);
            }
            if (!negated) unite(pool_, v, std::move(own));
        }
        return v;
    }

    // if, then, else.
    Result<ValueSet> conditional(const Json& schema, bool negated) {
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
            Result<ValueSet> cut     = follows ? meet(*part, *follows) : follows;
            if (!cut) return cut;
            unite(pool_, v, std::move(*cut));
        }
        return v;
    }

    Result<ValueSet> required(const Json& schema, const Json& list, bool negated) {
        ValueSet v = negated ? ValueSet{} : ValueSet::any(shapes_);
        for (const Json& name : list) {
            if (!name.is_string()) return wrong(schema, "required", "is not an array of names");
            if (negated) v.objects.push_back({.forbidden = {name.get<std::string>()}});
            else v.objects[0].required.push_back(name.get<std::string>());
        }
        return v;
    }

    // Where a member is there, others are, or the whole satisfies a schema.
    Result<ValueSet> dependencies(const Json& schema, const std::string& key, const Json& value, bool negated) {
        if (!value.is_object()) return wrong(schema, key, "is not an object");
        ValueSet v = negated ? ValueSet{} : ValueSet::any(shapes_);
        for (const auto& [name, needs] : members(value)) {
            ValueSet there, absent = ValueSet::any(shapes_);
            there.objects         = {{.required = {name}}};
            absent.objects[0]     = {.forbidden = {name}};
            Result<ValueSet> then = needs.is_array()    ? required(schema, needs, negated)
                                    : needs.is_string() ? required(schema, Json::array({needs}), negated)
                                                        : values_of({&needs, negated});
            if (!then) return then;
            Result<ValueSet> both = meet(there, *then);
            if (!both) return both;
            if (negated) {
                unite(pool_, v, std::move(*both));
                continue;
            }
            unite(pool_, *both, std::move(absent));
            Result<ValueSet> cut = meet(v, *both);
            if (!cut) return cut;
            v = std::move(*cut);
        }
        return v;
    }

    Result<void> check_object(const Json& schema) {
        for (const char* key : {"properties", "patternProperties"})
            if (const auto at = schema.find(key); at != schema.end() && !at->is_object())
                return wrong(schema, key, "is not an object");
        return {};
    }

    Result<void> check_array(const Json& schema) {
        if (const auto at = schema.find("prefixItems"); at != schema.end() && !at->is_array())
            return wrong(schema, "prefixItems", "is not an array");
        return {};
    }

    // -- members and elements

    Result<RegexId> pattern_of(const Json& schema, const std::string& pattern) {
        if (const auto known = patterns_.find(pattern); known != patterns_.end()) return known->second;
        Result<RegexId> made = parse_regex(pool_, pattern, TextSpelling::json, false);
        if (!made) return wrong(schema, "patternProperties", made.error().message);
        patterns_.emplace(pattern, *made);
        return made;
    }

    bool matches(RegexId regex, std::string_view name) {
        // A character has one spelling here, which is the expression of the name itself.
        return !pool_.is_void(pool_.all_of({regex, text_of(pool_, name, TextSpelling::json)}));
    }

    // What the value of a member must satisfy; {false} where the name is not allowed.
    Result<Terms> member_terms(const ObjectTerms& o, const std::string& name) {
        Terms terms;
        for (const Json* layer : o.layers) {
            bool       named = false;
            const auto props = layer->find("properties");
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
        std::erase_if(terms,
                      [](const Term& t) { return t.schema->is_boolean() && t.schema->get<bool>() != t.negated; });
        return both({}, terms);
    }

    Terms element_terms(const ArrayTerms& a, std::uint32_t i) {
        Terms terms;
        for (const Json* layer : a.layers)
            if (const Json* sub = references_.element(*layer, i)) terms.push_back({sub, false});
        for (const auto& [at, own] : a.at)
            if (at == i) terms.insert(terms.end(), own.begin(), own.end());
        std::erase_if(terms,
                      [](const Term& t) { return t.schema->is_boolean() && t.schema->get<bool>() != t.negated; });
        return both({}, terms);
    }

    // The names that the schemas have, in their order.
    std::vector<std::string> names_of(const ObjectTerms& o) {
        std::vector<std::string>        names;
        std::unordered_set<std::string> seen;
        const auto                      add = [&](const std::string& name) {
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

    // -- the grammar

    Result<GrammarSymbol> symbol_of(const Terms& terms) {
        if (const auto known = symbols_.find(terms); known != symbols_.end()) return known->second;
        Result<ValueSet> v = values(terms);
        if (!v) return std::unexpected(v.error());
        GrammarSymbol s;
        if (v->only_scalars()) {
            s = GrammarSymbol::lexeme(scalar_text(pool_, v->scalars));
        } else {
            s = g_.add_empty();
            open_.push_back({terms, s});
        }
        symbols_.emplace(terms, s);
        return s;
    }

    Result<void> define(const Terms& terms, GrammarSymbol symbol) {
        Result<ValueSet> v = values(terms);
        if (!v) return std::unexpected(v.error());
        std::vector<std::vector<GrammarSymbol>> rules;
        const RegexId                           scalars = scalar_text(pool_, v->scalars);
        if (!pool_.is_void(scalars)) rules.push_back({GrammarSymbol::lexeme(scalars)});
        for (const ArrayTerms& a : v->arrays) {
            Result<ArrayShape> shape = array_shape(a);
            if (!shape) return std::unexpected(shape.error());
            rules.push_back({g_.add_array(std::move(*shape))});
        }
        for (const ObjectTerms& o : v->objects)
            if (auto ok = add_object(o, rules); !ok) return ok;
        g_.symbols[symbol.index()].rules = std::move(rules);
        return {};
    }

    Result<ArrayShape> array_shape(const ArrayTerms& a) {
        ArrayShape  shape{.first = {}, .rest = {}, .min = a.min, .max = a.max};
        std::size_t n = 0;
        for (const Json* layer : a.layers) n = std::max(n, references_.n_first(*layer));
        for (const auto& [at, terms] : a.at) n = std::max<std::size_t>(n, at + 1);
        n = std::min<std::size_t>(n, a.max);
        for (std::uint32_t i = 0; i <= n; i++) {
            Result<GrammarSymbol> s = symbol_of(element_terms(a, i));
            if (!s) return std::unexpected(s.error());
            if (i < n) shape.first.push_back(*s);
            else shape.rest = *s;
        }
        return shape;
    }

    RegexId key(RegexId name) {
        const RegexId quote = pool_.literal("\"");
        return pool_.concat(
            quote, pool_.concat(name, pool_.concat(pool_.literal("\":"), pool_.repeat(pool_.literal(" "), 0, 1))));
    }

    Result<void> add_object(const ObjectTerms& o, std::vector<std::vector<GrammarSymbol>>& rules) {
        if (!o.breaches.empty()) return add_breaches(o, rules);
        ObjectShape shape{.members = {}, .others = {}, .min = o.min, .max = o.max, .ordered = options_.ordered};
        std::vector<RegexId>                  named;
        const std::vector<std::string>        names = names_of(o);
        const std::unordered_set<std::string> required(o.required.begin(), o.required.end());
        for (const std::string& name : names) {
            Result<Terms> terms = member_terms(o, name);
            if (!terms) return std::unexpected(terms.error());
            const RegexId text = text_of(pool_, name, TextSpelling::json);
            named.push_back(text);
            Result<GrammarSymbol> value = symbol_of(*terms);
            if (!value) return std::unexpected(value.error());
            shape.members.push_back({key(text), *value, required.contains(name)});
        }
        // All other keys, by the patterns that they match.
        struct Class {
            RegexId names;
            Terms   terms;
        };
        std::vector<RegexId> of_all = o.names;
        of_all.push_back(shapes_.text);
        if (!named.empty()) of_all.push_back(pool_.negate(pool_.any_of(named)));
        std::vector<Class> classes{{pool_.all_of(of_all), {}}};
        for (const Json* layer : o.layers) {
            struct Split {
                Class one;
                bool  named;
            };
            std::vector<Split> split;
            for (Class& c : classes) split.push_back({std::move(c), false});
            if (const auto all = layer->find("patternProperties"); all != layer->end())
                for (const auto& [pattern, sub] : members(*all)) {
                    Result<RegexId> regex = pattern_of(*layer, pattern);
                    if (!regex) return std::unexpected(regex.error());
                    std::vector<Split> next;
                    for (Split& s : split) {
                        const RegexId in  = pool_.all_of({s.one.names, *regex});
                        const RegexId out = pool_.minus(s.one.names, *regex);
                        if (!pool_.is_void(in)) next.push_back({{in, both(s.one.terms, {{&sub, false}})}, true});
                        if (!pool_.is_void(out)) next.push_back({{out, s.one.terms}, s.named});
                    }
                    split = std::move(next);
                    if (split.size() > most_classes)
                        return wrong(*layer, "patternProperties",
                                     "more patterns that match the same names than are supported");
                }
            const auto more = layer->find("additionalProperties");
            classes.clear();
            for (Split& s : split) {
                if (!s.named && more != layer->end() && !(more->is_boolean() && more->get<bool>()))
                    s.one.terms = both(s.one.terms, {{&*more, false}});
                classes.push_back(std::move(s.one));
            }
        }
        const auto speaks_of_others = [](const Json* layer) {
            return layer->contains("additionalProperties") || layer->contains("patternProperties");
        };
        if (options_.closed && !names.empty() && o.names.empty() && o.min <= names.size() &&
            !std::ranges::any_of(o.layers, speaks_of_others))
            classes.clear();
        for (const Class& c : classes) {
            if (pool_.is_void(c.names)) continue;
            Result<bool> empty = is_void(c.terms);
            if (!empty) return std::unexpected(empty.error());
            if (*empty) continue;
            Result<GrammarSymbol> value = symbol_of(c.terms);
            if (!value) return std::unexpected(value.error());
            shape.others.push_back({key(c.names), *value, false});
        }
        rules.push_back({g_.add_object(std::move(shape))});
        return {};
    }

    // One of the members that are named must break a schema's rule for those that it does not name.
    Result<void> add_breaches(ObjectTerms o, std::vector<std::vector<GrammarSymbol>>& rules) {
        const ObjectTerms::Breach      breach = o.breaches.back();
        const std::vector<std::string> names  = names_of(o);
        o.breaches.pop_back();
        for (const std::string& name : names) {
            const ObjectTerms own{.layers = {breach.schema}};
            Result<Terms>     terms = member_terms(own, name);
            if (!terms) return std::unexpected(terms.error());
            const auto props = breach.schema->find("properties");
            if (props != breach.schema->end() && props->contains(name)) continue;
            for (const Term& t : *terms) {
                const auto more = breach.schema->find("additionalProperties");
                if ((more != breach.schema->end() && t.schema == &*more) != breach.additional) continue;
                ObjectTerms with = o;
                if (std::ranges::find(with.required, name) == with.required.end()) with.required.push_back(name);
                with.members.push_back({name, {{t.schema, true}}});
                Result<bool> empty = is_void(with);
                if (!empty) return std::unexpected(empty.error());
                if (*empty) continue;
                if (rules.size() > most_alternatives)
                    return fail_with(ErrorKind::limit, "the schema has too many alternatives");
                if (auto ok = add_object(with, rules); !ok) return ok;
            }
        }
        return {};
    }

    const Json*       root_;
    SchemaReferences  references_;
    SchemaOptions     options_;
    Grammar&          g_;
    RegexPool&        pool_;
    JsonShapes        shapes_;
    std::size_t       steps_ = 0; // alternatives that were intersected
    int               depth_ = 0;
    std::vector<Term> active_; // whose values are being made
    // Of active_ those for which a member or element is looked at, by is_void: that one of them comes again in there is no fault of
    // the schema.
    std::size_t                                  outside_       = 0;
    bool                                         meets_outside_ = false;
    std::map<Terms, ValueSet>                    values_;
    std::map<Terms, bool>                        void_;
    std::map<Terms, GrammarSymbol>               symbols_;
    std::unordered_map<std::string, RegexId>     patterns_;
    std::vector<std::pair<Terms, GrammarSymbol>> open_;
};

Result<GrammarSymbol> add_json_schema(Grammar& grammar, const Json& schema, const SchemaOptions& options) {
    Result<GrammarSymbol> start = SchemaCompiler(schema, options, grammar).compile();
    if (start && grammar.pool.too_deep())
        return fail_with(ErrorKind::limit, "the schema's expressions are nested too deep");
    return start;
}

} // namespace quire
