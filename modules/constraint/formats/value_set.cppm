// quire.constraint.formats.value_set: the JSON values that a JSON Schema allows, as a union: scalars as expressions, arrays and objects as
// alternatives whose parts are terms that are resolved later. Plain values, and the arithmetic of sets on them.
// Owns nothing.
export module quire.constraint.formats.value_set;

export import quire.constraint.formats.json_scalars;
export import quire.constraint.regex.regex;
import quire.core.base;
export import quire.core.json;

export namespace quire {

// A schema, or all that it refuses.
struct Term {
    const Json* schema                         = nullptr;
    bool        negated                        = false;
    auto        operator<=>(const Term&) const = default;
    bool        operator==(const Term&) const  = default;
};

// All of these terms hold, each stands once; members come in this order. None: any value.
using Terms = std::vector<Term>;
Terms both(const Terms& a, const Terms& b);

struct Scalars {
    bool    null = false, no = false, yes = false;
    RegexId number = RegexPool::nothing;
    RegexId text   = RegexPool::nothing; // between the quotes
};

struct ArrayTerms {
    std::vector<const Json*>                     layers{}; // schemas with prefixItems, items; all of them hold
    std::vector<std::pair<std::uint32_t, Terms>> at{};     // of single elements, in addition
    std::uint32_t                                min = 0, max = RegexPool::endless;
};

struct ObjectTerms {
    // A member that some schema's properties and patterns (additional: not even these) name must break that schema.
    struct Breach {
        const Json* schema;
        bool        additional;
    };
    std::vector<const Json*> layers{}; // schemas with properties, patternProperties, additionalProperties
    std::vector<std::pair<std::string, Terms>> members{}; // of single members, in addition
    std::vector<std::string>                   required{}, forbidden{};
    std::vector<RegexId>                       names{}; // expressions that every key must match
    std::vector<Breach>                        breaches{};
    std::uint32_t                              min = 0, max = RegexPool::endless;
};

struct ValueSet {
    Scalars                  scalars;
    std::vector<ArrayTerms>  arrays;
    std::vector<ObjectTerms> objects;

    static ValueSet any(const JsonShapes& shapes);
    bool            only_scalars() const { return arrays.empty() && objects.empty(); }
};

constexpr std::size_t most_alternatives = 1024;

// Error: more alternatives than are allowed.
Result<ValueSet> intersect(RegexPool& pool, const JsonShapes& shapes, const ValueSet& a, const ValueSet& b);
void             unite(RegexPool& pool, ValueSet& a, ValueSet b);
// The text of all of them, as it stands in JSON.
RegexId scalar_text(RegexPool& pool, const Scalars& s);

} // namespace quire

module :private;

namespace quire {

Terms both(const Terms& a, const Terms& b) {
    Terms all = a;
    for (const Term& t : b)
        if (std::ranges::find(all, t) == all.end()) all.push_back(t);
    return all;
}

ValueSet ValueSet::any(const JsonShapes& shapes) {
    return {{true, true, true, shapes.number, shapes.any_text}, {ArrayTerms{}}, {ObjectTerms{}}};
}

template <class T>
void append(std::vector<T>& a, const std::vector<T>& b) {
    a.insert(a.end(), b.begin(), b.end());
}

void append_new(std::vector<std::string>& a, const std::vector<std::string>& b) {
    for (const std::string& s : b)
        if (std::ranges::find(a, s) == a.end()) a.push_back(s);
}

Result<ValueSet> intersect(RegexPool& pool, const JsonShapes& shapes, const ValueSet& a, const ValueSet& b) {
    ValueSet   c;
    const auto each = [&](RegexId x, RegexId y, RegexId all) {
        return x == all ? y : y == all ? x : pool.all_of({x, y});
    };
    c.scalars = {a.scalars.null && b.scalars.null, a.scalars.no && b.scalars.no, a.scalars.yes && b.scalars.yes,
                 each(a.scalars.number, b.scalars.number, shapes.number),
                 each(a.scalars.text, b.scalars.text, shapes.any_text)};
    if (a.arrays.size() * b.arrays.size() > most_alternatives ||
        a.objects.size() * b.objects.size() > most_alternatives)
        return fail_with(ErrorKind::limit, "the schema has too many combinations of alternatives");
    for (const ArrayTerms& x : a.arrays)
        for (const ArrayTerms& y : b.arrays) {
            ArrayTerms z = x;
            append(z.layers, y.layers);
            append(z.at, y.at);
            z.min = std::max(x.min, y.min);
            z.max = std::min(x.max, y.max);
            if (z.min <= z.max) c.arrays.push_back(std::move(z));
        }
    for (const ObjectTerms& x : a.objects)
        for (const ObjectTerms& y : b.objects) {
            ObjectTerms z = x;
            append(z.layers, y.layers);
            append(z.members, y.members);
            append_new(z.required, y.required);
            append_new(z.forbidden, y.forbidden);
            append(z.names, y.names);
            append(z.breaches, y.breaches);
            z.min           = std::max(x.min, y.min);
            z.max           = std::min(x.max, y.max);
            const bool torn = std::ranges::any_of(z.required, [&](const auto& name) {
                return std::ranges::find(z.forbidden, name) != z.forbidden.end();
            });
            if (z.min <= z.max && z.required.size() <= z.max && !torn) c.objects.push_back(std::move(z));
        }
    return c;
}

void unite(RegexPool& pool, ValueSet& a, ValueSet b) {
    a.scalars = {a.scalars.null || b.scalars.null, a.scalars.no || b.scalars.no, a.scalars.yes || b.scalars.yes,
                 pool.any_of({a.scalars.number, b.scalars.number}), pool.any_of({a.scalars.text, b.scalars.text})};
    append(a.arrays, b.arrays);
    append(a.objects, b.objects);
}

RegexId scalar_text(RegexPool& pool, const Scalars& s) {
    const RegexId        quote = pool.literal("\"");
    std::vector<RegexId> all{s.number, pool.concat(quote, pool.concat(s.text, quote))};
    if (s.null) all.push_back(pool.literal("null"));
    if (s.no) all.push_back(pool.literal("false"));
    if (s.yes) all.push_back(pool.literal("true"));
    return pool.any_of(std::move(all));
}

} // namespace quire
