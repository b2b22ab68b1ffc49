// quire.constraint.grammar.grammar: a context-free grammar whose terminals are expressions over bytes (lexemes). Beside rules it has JSON's
// objects and arrays as symbols of their own: the rest of an object is a number, not a thousand rules. A plain value.
export module quire.constraint.grammar.grammar;

export import quire.constraint.regex.regex;
import quire.core.base;

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
    std::optional<GrammarSymbol> rest{};  // of all further elements; none: there are none
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
    // Removes rules that can never be completed; finds the symbols that can be empty. A lexeme that can be empty must not be used as it is:
    // `optional` gives a symbol for it. Error: the start symbol itself has no text.
    Result<void>  finish();
    GrammarSymbol optional(RegexId lexeme);
    // Sets the punctuation of JSON's objects and arrays: a space may follow a comma and a colon.
    void use_json();
};

struct GrammarLimits {
    std::size_t symbols = 50'000, expressions = 1'000'000, lexer_states = 250'000;
    std::size_t kept_items = 200'000;              // of a text
    std::size_t rows = 200'000, items = 2'000'000; // including rows of the tokens that a mask looks at
    // Of one constraint, in units of WorkBudget: to compile it; for the mask of one token; and bytes in all.
    std::size_t compile_work = 25'000'000, work = 25'000'000, bytes = std::size_t(64) << 20;
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

// A symbol holds when all of these hold, and `also` says so.
struct Clause {
    std::uint32_t              head = 0;
    std::vector<GrammarSymbol> body{};
    bool                       also = false;
    std::size_t                next = 0; // of body: all symbols before it hold
};

// Least fixed point: marks in `holds` the symbols that follow from the clauses. Each clause waits for one symbol at a time, so that the time
// is linear (Dowling and Gallier 1984), except for clauses with `also`, which are looked at whenever one of `watched` is marked.
void follow(std::vector<Clause>& clauses, std::vector<bool>& holds,
            const std::function<bool(GrammarSymbol)>& lexeme_holds, const std::function<bool(std::uint32_t)>& also,
            const std::vector<std::vector<std::uint32_t>>& watched) {
    std::vector<std::vector<std::uint32_t>> waiting = watched; // clauses, of each symbol
    std::vector<std::uint32_t>              marked;
    const auto                              look = [&](std::uint32_t index) {
        Clause& c = clauses[index];
        if (holds[c.head]) return;
        for (; c.next < c.body.size(); c.next++) {
            const GrammarSymbol s = c.body[c.next];
            if (s.is_lexeme() ? lexeme_holds(s) : bool(holds[s.index()])) continue;
            if (!s.is_lexeme()) waiting[s.index()].push_back(index);
            return;
        }
        if (c.also && !also(c.head)) return;
        holds[c.head] = true;
        marked.push_back(c.head);
    };
    for (std::uint32_t i = 0; i < clauses.size(); i++) look(i);
    while (!marked.empty()) {
        const std::vector<std::uint32_t> ready = std::move(waiting[marked.back()]);
        marked.pop_back();
        for (std::uint32_t i : ready) look(i);
    }
}

Result<void> Grammar::finish() {
    // The symbols that can be completed at all, and the symbols that the empty text completes.
    std::vector<bool>                       complete(symbols.size()), nullable(symbols.size());
    std::vector<Clause>                     completing, emptying;
    std::vector<std::vector<std::uint32_t>> watched(symbols.size());
    const auto                              lexeme_works = [&](GrammarSymbol s) { return !pool.is_void(s.index()); };
    const auto works = [&](GrammarSymbol s) { return s.is_lexeme() ? lexeme_works(s) : bool(complete[s.index()]); };
    for (std::uint32_t i = 0; i < symbols.size(); i++) {
        const Definition& d = symbols[i];
        for (const auto& rule : d.rules) {
            completing.push_back({.head = i, .body = rule});
            emptying.push_back({.head = i, .body = rule});
        }
        if (d.kind == Kind::array) {
            const ArrayShape& a = arrays[d.shape];
            Clause            c{.head = i,
                                .body = {a.first.begin(),
                                         a.first.begin() + std::ptrdiff_t(std::min<std::size_t>(a.first.size(), a.min))}};
            if (a.min > a.first.size()) c.body.push_back(a.rest ? *a.rest : GrammarSymbol::lexeme(RegexPool::nothing));
            if (a.min <= a.max) completing.push_back(std::move(c));
        }
        if (d.kind == Kind::object) {
            const ObjectShape& o = objects[d.shape];
            Clause             c{.head = i};
            for (const ObjectShape::Member& m : o.members)
                if (m.required) c.body.push_back(m.value);
            c.also = c.body.size() < o.min;
            if (c.also)
                for (const auto* list : {&o.members, &o.others})
                    for (const ObjectShape::Member& m : *list)
                        if (!m.value.is_lexeme()) watched[m.value.index()].push_back(std::uint32_t(completing.size()));
            if (c.body.size() <= o.max && o.min <= o.max) completing.push_back(std::move(c));
        }
    }
    const auto enough_members = [&](std::uint32_t symbol) {
        const ObjectShape& o    = objects[symbols[symbol].shape];
        const auto         able = [&](const ObjectShape::Member& m) { return works(m.value); };
        return std::ranges::any_of(o.others, able) || std::ranges::count_if(o.members, able) >= std::ptrdiff_t(o.min);
    };
    follow(completing, complete, lexeme_works, enough_members, watched);
    if (!works(start)) return fail("no text that can be generated satisfies it");
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
    const auto never = [](auto) { return false; };
    follow(emptying, nullable, never, never, std::vector<std::vector<std::uint32_t>>(symbols.size()));
    for (std::size_t i = 0; i < symbols.size(); i++) symbols[i].nullable = nullable[i];
    return {};
}

} // namespace quire
