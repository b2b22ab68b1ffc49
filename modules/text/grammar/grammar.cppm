// quire.text.grammar.grammar: a context-free grammar whose terminals are expressions over bytes (lexemes). Beside rules it has JSON's
// objects and arrays as symbols of their own, so that what is left to come in one is a number, not a thousand rules. A plain value.
export module quire.text.grammar.grammar;

import quire.core.base;
import quire.core.std;
import quire.text.grammar.regex;

export namespace quire {

// A lexeme, or a symbol of the grammar.
struct GrammarSymbol {
    static constexpr std::uint32_t symbol_bit = 1u << 31;

    std::uint32_t code = 0;

    static GrammarSymbol lexeme(RegexId id) { return {id}; }
    static GrammarSymbol symbol(std::uint32_t index) { return {index | symbol_bit}; }
    bool                 is_lexeme() const { return (code & symbol_bit) == 0; }
    std::uint32_t        index() const { return code & ~symbol_bit; }
    bool                 operator==(const GrammarSymbol&) const = default;
};

// "{" members "}". A key's lexeme goes up to the value: "name":
struct ObjectShape {
    struct Member {
        RegexId       key = RegexPool::nothing;
        GrammarSymbol value;
        bool          required = false;
    };
    std::vector<Member> members{};                         // each at most once
    std::vector<Member> others{};                          // keys that are not named, any number of each
    std::uint32_t       min = 0, max = RegexPool::endless; // of all members
    bool                ordered = true;                    // the members in this order, then the others
};

// "[" elements "]"
struct ArrayShape {
    std::vector<GrammarSymbol>   first{}; // of the first elements
    std::optional<GrammarSymbol> rest{};  // of those behind them; none: there are none
    std::uint32_t                min = 0, max = RegexPool::endless;
};

struct Grammar {
    enum class Kind : std::uint8_t { rules, object, array };
    struct Definition {
        Kind                                    kind = Kind::rules;
        std::vector<std::vector<GrammarSymbol>> rules{}; // alternatives
        std::uint32_t                           shape    = 0;
        bool                                    nullable = false;
    };

    RegexPool                pool;
    std::vector<Definition>  symbols;
    std::vector<ObjectShape> objects;
    std::vector<ArrayShape>  arrays;
    GrammarSymbol            start;
    RegexId object_open = 0, object_close = 0, array_open = 0, array_close = 0, comma = 0; // where there are such

    GrammarSymbol add_rules(std::vector<std::vector<GrammarSymbol>> rules);
    GrammarSymbol add_object(ObjectShape shape);
    GrammarSymbol add_array(ArrayShape shape);
    GrammarSymbol add_empty(); // to be filled in
    // Removes what can never be completed; says which symbols can be empty. A lexeme that can be empty must not be used as it is:
    // `optional` gives a symbol for it. Error: the start symbol itself has no text.
    Result<void>  finish();
    GrammarSymbol optional(RegexId lexeme);
    // What JSON's objects and arrays are written with: a space may follow a comma and a colon.
    void use_json();
};

struct GrammarLimits {
    std::size_t symbols = 50'000, expressions = 1'000'000, lexer_states = 250'000, rows = 200'000, work = 2'000'000;
};

} // namespace quire

module :private;

namespace quire {

GrammarSymbol Grammar::add_empty() {
    symbols.emplace_back();
    return GrammarSymbol::symbol(std::uint32_t(symbols.size() - 1));
}

GrammarSymbol Grammar::add_rules(std::vector<std::vector<GrammarSymbol>> rules) {
    symbols.push_back({.rules = std::move(rules)});
    return GrammarSymbol::symbol(std::uint32_t(symbols.size() - 1));
}

GrammarSymbol Grammar::add_object(ObjectShape shape) {
    objects.push_back(std::move(shape));
    symbols.push_back({.kind = Kind::object, .rules = {}, .shape = std::uint32_t(objects.size() - 1)});
    return GrammarSymbol::symbol(std::uint32_t(symbols.size() - 1));
}

GrammarSymbol Grammar::add_array(ArrayShape shape) {
    arrays.push_back(std::move(shape));
    symbols.push_back({.kind = Kind::array, .rules = {}, .shape = std::uint32_t(arrays.size() - 1)});
    return GrammarSymbol::symbol(std::uint32_t(symbols.size() - 1));
}

GrammarSymbol Grammar::optional(RegexId lexeme) {
    if (!pool.nullable(lexeme)) return GrammarSymbol::lexeme(lexeme);
    const RegexId some = pool.minus(lexeme, RegexPool::blank);
    if (some == RegexPool::nothing) return add_rules({{}});
    return add_rules({{}, {GrammarSymbol::lexeme(some)}});
}

void Grammar::use_json() {
    object_open  = pool.literal("{");
    object_close = pool.literal("}");
    array_open   = pool.literal("[");
    array_close  = pool.literal("]");
    comma        = pool.concat(pool.literal(","), pool.repeat(pool.literal(" "), 0, 1));
}

Result<void> Grammar::finish() {
    // Least fixed points: what can be completed at all, and what by the empty text.
    std::vector<bool> complete(symbols.size());
    const auto        works = [&](GrammarSymbol s) {
        return s.is_lexeme() ? !pool.is_void(s.index()) : bool(complete[s.index()]);
    };
    const auto can = [&](const Definition& d) {
        if (d.kind == Kind::object) {
            const ObjectShape& o         = objects[d.shape];
            std::uint64_t      available = 0, required = 0;
            for (const ObjectShape::Member& m : o.members) {
                const bool ok = works(m.value);
                if (m.required && !ok) return false;
                available += ok;
                required += m.required;
            }
            const bool more = std::ranges::any_of(o.others, [&](const auto& m) { return works(m.value); });
            return required <= o.max && o.min <= o.max && (more || available >= o.min);
        }
        if (d.kind == Kind::array) {
            const ArrayShape& a = arrays[d.shape];
            for (std::size_t i = 0; i < a.first.size() && i < a.min; i++)
                if (!works(a.first[i])) return false;
            return a.min <= a.max && (a.min <= a.first.size() || (a.rest && works(*a.rest)));
        }
        return std::ranges::any_of(d.rules, [&](const auto& rule) { return std::ranges::all_of(rule, works); });
    };
    for (bool more = true; more;) {
        more = false;
        for (std::size_t i = symbols.size(); i-- > 0;)
            if (!complete[i] && can(symbols[i])) complete[i] = more = true;
    }
    if (!works(start)) return fail("no text satisfies it");
    for (Definition& d : symbols)
        std::erase_if(d.rules, [&](const auto& rule) { return !std::ranges::all_of(rule, works); });
    for (ObjectShape& o : objects) {
        std::erase_if(o.members, [&](const auto& m) { return !works(m.value); });
        std::erase_if(o.others, [&](const auto& m) { return !works(m.value) || pool.is_void(m.key); });
    }
    for (ArrayShape& a : arrays) {
        if (a.rest && !works(*a.rest)) a.rest.reset();
        for (std::size_t i = 0; i < a.first.size(); i++)
            if (!works(a.first[i])) {
                a.first.resize(i);
                a.rest.reset();
            }
        if (!a.rest) a.max = std::uint32_t(std::min<std::size_t>(a.max, a.first.size()));
    }
    const auto empty = [&](GrammarSymbol s) { return !s.is_lexeme() && symbols[s.index()].nullable; };
    for (bool more = true; more;) {
        more = false;
        for (std::size_t i = symbols.size(); i-- > 0;) {
            Definition& d = symbols[i];
            if (d.nullable || d.kind != Kind::rules) continue;
            if (std::ranges::any_of(d.rules, [&](const auto& rule) { return std::ranges::all_of(rule, empty); }))
                d.nullable = more = true;
        }
    }
    return {};
}

} // namespace quire
