// quire.constraint.grammar.recogniser: Earley's algorithm over lexemes: which texts a grammar allows to go on with, byte by byte.
// **Owns** the grammar with its lexer (Machine), and the rows of a text (Rows).
//
// A row is made at each byte where lexemes end; it is a set of items: how far a rule, object or array has come, and the row in
// which it began (Earley, "An efficient context-free parsing algorithm", 1970). Between rows only the lexer moves. Where a lexeme
// can end and go on as well ("12" and "123"), both are followed, so that exactly the grammar's texts are accepted.
export module quire.constraint.grammar.recogniser;

import quire.constraint.grammar.grammar;
export import quire.constraint.regex.lexer;
export import quire.constraint.regex.regex;
import quire.core.base;
import quire.core.hash;

export namespace quire {

// A set of lexemes that began in one row, and how far they have come.
struct Thread {
    std::int32_t row                             = 0;
    LexerState   state                           = GrammarLexer::dead;
    bool         operator==(const Thread&) const = default;
};

// A grammar made ready. **Owns** the grammar, its lexer and the sets of keys that objects have seen: they grow with the texts, so
// one thread at a time uses it: see mutex().
class Machine {
public:
    Machine(Grammar grammar, const GrammarLimits& limits);
    Machine(const Machine&)            = delete;
    Machine& operator=(const Machine&) = delete;

    std::mutex&          mutex() { return mutex_; }
    GrammarLexer&        lexer() { return lexer_; }
    RegexPool&           pool() { return grammar_.pool; }
    const GrammarLimits& limits() const { return limits_; }

    std::size_t bytes() const; // that the machine takes
    // Forgets the states that texts added: the rows of all texts become invalid.
    void reset();

private:
    friend class Rows;

    // The next thing that an item expects, by the item's code.
    struct Place {
        enum class Kind : std::uint8_t {
            done,    // of a rule
            lexeme,  // of a rule
            symbol,  // of a rule
            open,    // { or [
            first,   // the first member, or the end
            after,   // a comma, or the end
            key,     // a key
            element, // an element
            value,   // of a member
        } kind               = Kind::done;
        bool          object = false;
        std::uint32_t owner  = 0; // symbol
        GrammarSymbol next;       // lexeme, symbol, value
        std::uint32_t index = 0;  // value: of the member; of others behind the members
    };
    // The members that an object has already: which ones (in order: how far), and how many in all.
    struct Seen {
        std::vector<std::uint64_t> bits;
        std::uint32_t              next = 0, count = 0;
        bool                       operator==(const Seen&) const = default;
    };
    enum : std::uint32_t { at_open, at_first, at_after, at_key, at_value };

    std::uint32_t               intern(Seen seen);
    const std::vector<RegexId>& keys(std::uint32_t symbol, std::uint32_t seen);
    bool                        may_close(std::uint32_t symbol, std::uint32_t seen);
    bool                        may_take(const ObjectShape& o, const Seen& seen, std::uint32_t member);

    Grammar                                                       grammar_;
    GrammarLimits                                                 limits_;
    GrammarLexer                                                  lexer_;
    std::mutex                                                    mutex_;
    std::vector<Place>                                            places_;
    std::vector<std::vector<std::uint32_t>>                       starts_; // of each symbol: codes of its first items
    std::vector<std::uint32_t>                                    base_; // of each object and array: code of its `open`
    std::vector<std::unordered_map<RegexId, std::uint32_t>>       member_of_; // of each object: key → index
    std::vector<Seen>                                             seen_;
    std::unordered_map<std::uint64_t, std::vector<std::uint32_t>> seen_index_;
    std::unordered_map<std::uint64_t, std::vector<RegexId>>       keys_; // of (symbol, seen)
    std::size_t own_bytes_ = 0, learnt_bytes_ = 0;                       // beside pool and lexer
};

// Identifies the texts that can follow, by a hash of 128 bits: equal where these texts are equal, different elsewhere (no collision was ever
// seen).
struct StateKey {
    std::uint64_t a = 0, b = 0;
    bool          operator==(const StateKey&) const = default;
    void          add(std::uint64_t value);
};
struct StateKeyHash {
    std::size_t operator()(const StateKey& key) const { return std::size_t(key.a); }
};

// The rows of one text: a value that can be copied.
class Rows {
public:
    // Begins the text. The machine is locked in this function and in all below.
    std::vector<Thread> begin(Machine& m);
    // One byte: `to` gets the threads that go on, and the thread of a new row if lexemes end here. `ends`: whether the text can end here.
    // `to` is empty and `ends` is false: the byte is not allowed.
    void step(Machine& m, std::span<const Thread> from, int byte, std::vector<Thread>& to, bool& ends);
    // Begins the row behind the lexemes of `ended`, which end here, and returns its number.
    std::int32_t row_after(Machine& m, std::span<const Thread> ended);
    Thread       start_of(std::int32_t row) const { return {row, rows_[std::size_t(row)].start}; }
    bool         ends(std::int32_t row) const { return rows_[std::size_t(row)].ends; }
    // The key of a row: of its items, and of the rows in which they began.
    StateKey key(std::int32_t row);

    std::size_t size() const { return rows_.size(); }
    std::size_t bytes() const {
        return items_.capacity() * sizeof(Item) + rows_.capacity() * sizeof(Row) + keys_.capacity() * sizeof(StateKey);
    }
    // After an exception in the middle of a row: forgets the rows from n_rows on.
    void abandon(std::size_t n_rows);
    // Gives back the memory that making a mask took.
    void shrink();
    // Forgets the rows from n_rows on.
    void cut(std::size_t n_rows);
    // Forgets the rows that no thread can come back to. Their numbers change.
    void        compact(std::span<Thread> threads);
    std::size_t items() const { return items_.size(); }

private:
    struct Item {
        std::uint32_t code  = 0,
                      param = 0; // param: of an object the number of its Seen; of an array the number of elements
        std::int32_t origin = 0;
        bool         operator==(const Item&) const = default;
    };
    struct Row {
        std::uint32_t first = 0, n = 0;
        LexerState    start = GrammarLexer::dead;
        bool          ends  = false;
    };

    void          add(Machine& m, Item item);
    void          complete(Machine& m, std::uint32_t symbol, std::int32_t origin);
    void          follow_completed(Machine& m);
    void          predict(Machine& m, GrammarSymbol symbol);
    void          advance(Machine& m, const Item& item); // over the symbol it waits for
    void          advance_over(Machine& m, const Item& item, RegexId lexeme);
    bool          waits_for(const Machine& m, const Item& item, std::uint32_t symbol) const;
    GrammarSymbol waited(const Machine& m, const Item& item) const;
    std::int32_t  close_row(Machine& m);

    std::vector<Item>     items_;
    std::vector<Row>      rows_;
    std::vector<StateKey> keys_; // of the first rows, as far as they were asked for
    // scratch of the row that is made
    std::vector<std::uint32_t>                          table_;     // of items by hash: index + 1 into items_
    std::vector<std::pair<std::uint32_t, std::int32_t>> completed_; // symbol and origin: still to be followed
    std::vector<bool>                                   predicted_;
    std::vector<std::uint32_t>                          predicted_list_;
    std::vector<RegexId>                                lexemes_;
    std::vector<Thread>                                 ended_;
    bool                                                row_ends_ = false;
};

} // namespace quire

module :private;

namespace quire {

Machine::Machine(Grammar grammar, const GrammarLimits& limits)
    : grammar_(std::move(grammar)), limits_(limits), lexer_(grammar_.pool, limits.lexer_states) {
    using Kind          = Place::Kind;
    const std::size_t n = grammar_.symbols.size();
    starts_.resize(n);
    base_.resize(n);
    member_of_.resize(n);
    for (std::uint32_t s = 0; s < n; s++) {
        const Grammar::Definition& d = grammar_.symbols[s];
        if (d.kind == Grammar::Kind::rules) {
            for (const std::vector<GrammarSymbol>& rule : d.rules) {
                starts_[s].push_back(std::uint32_t(places_.size()));
                for (GrammarSymbol next : rule)
                    places_.push_back({next.is_lexeme() ? Kind::lexeme : Kind::symbol, false, s, next});
                places_.push_back({Kind::done, false, s, {}});
            }
            continue;
        }
        const bool object = d.kind == Grammar::Kind::object;
        base_[s]          = std::uint32_t(places_.size());
        starts_[s].push_back(base_[s]);
        places_.push_back({Kind::open, object, s, {}});
        places_.push_back({Kind::first, object, s, {}});
        places_.push_back({Kind::after, object, s, {}});
        places_.push_back({object ? Kind::key : Kind::element, object, s, {}});
        if (!object) continue;
        const ObjectShape& o = grammar_.objects[d.shape];
        std::uint32_t      i = 0;
        for (const auto* list : {&o.members, &o.others})
            for (const ObjectShape::Member& m : *list) {
                member_of_[s].emplace(m.key, i);
                places_.push_back({Kind::value, true, s, m.value, i++});
            }
    }
    constexpr std::size_t of_symbol =
        sizeof(Grammar::Definition) + sizeof(starts_[0]) + sizeof(base_[0]) + 2 * sizeof(member_of_[0]);
    own_bytes_ =
        grammar_.symbols.size() * of_symbol + places_.size() * (sizeof(Place) + 64); // rules and members likewise
    grammar_.pool.seal();
}

std::size_t Machine::bytes() const { return grammar_.pool.bytes() + lexer_.bytes() + own_bytes_ + learnt_bytes_; }

void Machine::reset() {
    grammar_.pool.reset();
    lexer_.reset();
    seen_ = {}, seen_index_ = {}, keys_ = {};
    learnt_bytes_ = 0;
}

std::uint32_t Machine::intern(Seen seen) {
    std::vector<std::uint32_t>& same = seen_index_[hash_bytes(seen.bits.data(), seen.bits.size() * sizeof seen.bits[0],
                                                              std::uint64_t(seen.next) << 32 | seen.count)];
    for (std::uint32_t id : same)
        if (seen_[id] == seen) return id;
    const std::size_t bytes = sizeof(Seen) + seen.bits.size() * 8 + 96;
    pool().spend(bytes / 8);
    seen_.push_back(std::move(seen));
    learnt_bytes_ += bytes;
    same.push_back(std::uint32_t(seen_.size() - 1));
    return same.back();
}

// Whether, with this member, the object can still be completed.
bool Machine::may_take(const ObjectShape& o, const Seen& seen, std::uint32_t index) {
    const auto          n      = std::uint32_t(o.members.size());
    const std::uint32_t i      = std::min(index, n);
    std::uint32_t       needed = 0, available = 0; // of the members that would be left
    const auto          has = [&](std::uint32_t k) {
        return o.ordered ? k < seen.next : (seen.bits[k / 64] >> (k % 64) & 1) != 0;
    };
    if (i < n && has(i)) return false;
    if (o.min == 0 && o.max == RegexPool::endless && !o.ordered) return true;
    pool().spend(1 + n / 4);
    for (std::uint32_t k = o.ordered ? seen.next : 0; k < n; k++) {
        if (k == i || has(k)) continue;
        if (o.ordered && k < i) {
            if (o.members[k].required) return false; // it would be left out
            continue;
        }
        available++;
        needed += o.members[k].required;
    }
    const std::uint64_t count = std::uint64_t(seen.count) + 1;
    if (count + needed > o.max) return false;
    return count >= o.min || !o.others.empty() || count + available >= o.min;
}

bool Machine::may_close(std::uint32_t symbol, std::uint32_t id) {
    const ObjectShape& o    = grammar_.objects[grammar_.symbols[symbol].shape];
    const Seen&        seen = seen_[id];
    if (seen.count < o.min) return false;
    pool().spend(1 + o.members.size() / 4);
    for (std::uint32_t k = o.ordered ? seen.next : 0; k < o.members.size(); k++)
        if (o.members[k].required && (o.ordered || (seen.bits[k / 64] >> (k % 64) & 1) == 0)) return false;
    return true;
}

const std::vector<RegexId>& Machine::keys(std::uint32_t symbol, std::uint32_t id) {
    const std::uint64_t at = std::uint64_t(symbol) << 32 | id;
    if (auto known = keys_.find(at); known != keys_.end()) return known->second;
    const ObjectShape&   o    = grammar_.objects[grammar_.symbols[symbol].shape];
    const Seen&          seen = seen_[id];
    const auto           n    = std::uint32_t(o.members.size());
    std::vector<RegexId> all;
    const bool           any_number = o.min == 0 && o.max == RegexPool::endless;
    for (std::uint32_t i = o.ordered ? seen.next : 0; i < n; i++) {
        if ((o.ordered && any_number) || may_take(o, seen, i)) all.push_back(o.members[i].key);
        if (o.ordered && o.members[i].required) break; // none behind it before it
    }
    if (!o.others.empty() && may_take(o, seen, n))
        for (const ObjectShape::Member& m : o.others) all.push_back(m.key);
    pool().spend(1 + n);
    learnt_bytes_ += all.capacity() * sizeof(RegexId) + 64;
    return keys_.emplace(at, std::move(all)).first->second;
}

// -- rows

std::vector<Thread> Rows::begin(Machine& m) {
    items_.clear();
    rows_.clear();
    rows_.emplace_back();
    const GrammarSymbol start = m.grammar_.start;
    check(!start.is_lexeme(), "a grammar starts with a symbol");
    predict(m, start);
    if (m.grammar_.symbols[start.index()].nullable) row_ends_ = true;
    const Thread first = start_of(close_row(m));
    if (first.state == GrammarLexer::dead) return {};
    return {first};
}

GrammarSymbol Rows::waited(const Machine& m, const Item& item) const {
    const Machine::Place& p = m.places_[item.code];
    if (p.kind != Machine::Place::Kind::first && p.kind != Machine::Place::Kind::element) return p.next;
    const ArrayShape& a = m.grammar_.arrays[m.grammar_.symbols[p.owner].shape];
    if (item.param >= a.max) return GrammarSymbol::lexeme(RegexPool::nothing);
    if (item.param < a.first.size()) return a.first[item.param];
    return a.rest ? *a.rest : GrammarSymbol::lexeme(RegexPool::nothing);
}

bool Rows::waits_for(const Machine& m, const Item& item, std::uint32_t symbol) const {
    using Kind       = Machine::Place::Kind;
    const auto& p    = m.places_[item.code];
    const bool  some = p.kind == Kind::symbol || p.kind == Kind::value || p.kind == Kind::element ||
                      (p.kind == Kind::first && !p.object);
    return some && waited(m, item) == GrammarSymbol::symbol(symbol);
}

// Adds an item to the row that is being made; notes it if its rule is complete.
void Rows::add(Machine& m, Item item) {
    using Kind = Machine::Place::Kind;
    m.pool().spend(1);
    const Machine::Place& p   = m.places_[item.code];
    Row&                  row = rows_.back();
    if (std::size_t(row.n + 1) * 2 > table_.size()) {
        table_.assign(std::max<std::size_t>(64, table_.size() * 2), 0);
        for (std::uint32_t i = 0; i < row.n; i++) {
            const Item&   it = items_[row.first + i];
            std::uint64_t h  = (std::uint64_t(it.code) << 32 | it.param) * 0x9e3779b97f4a7c15ull +
                              std::uint64_t(it.origin) * 0xff51afd7ed558ccdull;
            std::size_t at = std::size_t(h >> 20) & (table_.size() - 1);
            while (table_[at] != 0) at = (at + 1) & (table_.size() - 1);
            table_[at] = i + 1;
        }
    }
    std::uint64_t h = (std::uint64_t(item.code) << 32 | item.param) * 0x9e3779b97f4a7c15ull +
                      std::uint64_t(item.origin) * 0xff51afd7ed558ccdull;
    std::size_t at = std::size_t(h >> 20) & (table_.size() - 1);
    for (; table_[at] != 0; at = (at + 1) & (table_.size() - 1))
        if (items_[row.first + table_[at] - 1] == item) return;
    if (items_.size() >= m.limits_.items) throw WorkEnded{WorkEnded::Why::memory};
    items_.push_back(item);
    table_[at] = ++row.n;
    if (p.kind == Kind::done) completed_.push_back({p.owner, item.origin});
}

// Adds the items that follow from completed symbols. A rule can come back to itself without a byte (s ::= s s | ""), and rules end within
// rules as deep as a text is long: so each symbol is done once, without recursion.
void Rows::follow_completed(Machine& m) {
    while (!completed_.empty()) {
        const auto [symbol, origin] = completed_.back();
        completed_.pop_back();
        complete(m, symbol, origin);
    }
}

void Rows::complete(Machine& m, std::uint32_t symbol, std::int32_t origin) {
    if (origin == 0 && m.grammar_.start == GrammarSymbol::symbol(symbol)) row_ends_ = true;
    if (std::size_t(origin) + 1 == rows_.size()) return; // the empty text: seen when it was predicted
    const Row row = rows_[std::size_t(origin)];
    m.pool().spend(row.n);
    for (std::uint32_t i = 0; i < row.n; i++) {
        const Item item = items_[row.first + i];
        if (waits_for(m, item, symbol)) advance(m, item);
    }
}

void Rows::advance(Machine& m, const Item& item) {
    using Kind              = Machine::Place::Kind;
    const Machine::Place& p = m.places_[item.code];
    if (p.kind == Kind::symbol || p.kind == Kind::lexeme) return add(m, {item.code + 1, item.param, item.origin});
    const std::uint32_t after = m.base_[p.owner] + Machine::at_after;
    if (p.object) return add(m, {after, item.param, item.origin});
    const ArrayShape&   a = m.grammar_.arrays[m.grammar_.symbols[p.owner].shape];
    const std::uint64_t most =
        std::max<std::uint64_t>({a.first.size(), a.min, a.max == RegexPool::endless ? 0 : a.max});
    add(m, {after, std::uint32_t(std::min<std::uint64_t>(item.param + 1, most)), item.origin});
}

void Rows::advance_over(Machine& m, const Item& item, RegexId lexeme) {
    using Kind                 = Machine::Place::Kind;
    const Grammar&        g    = m.grammar_;
    const Machine::Place& p    = m.places_[item.code];
    const std::uint32_t   base = m.base_[p.owner];
    switch (p.kind) {
        case Kind::lexeme:
            if (p.next.index() == lexeme) advance(m, item);
            return;
        case Kind::value:
            if (p.next == GrammarSymbol::lexeme(lexeme)) advance(m, item);
            return;
        case Kind::open:
            if (lexeme == (p.object ? g.object_open : g.array_open))
                add(m, {base + Machine::at_first, item.param, item.origin});
            return;
        case Kind::first:
        case Kind::after:
        case Kind::key:
        case Kind::element: break;
        default: return;
    }
    if (p.kind != Kind::key && p.kind != Kind::element && lexeme == (p.object ? g.object_close : g.array_close)) {
        const bool ok =
            p.object ? m.may_close(p.owner, item.param) : item.param >= g.arrays[g.symbols[p.owner].shape].min;
        if (ok) completed_.push_back({p.owner, item.origin});
        return;
    }
    if (p.kind == Kind::after) {
        if (lexeme == g.comma) {
            const bool more = p.object ? !m.keys(p.owner, item.param).empty()
                                       : waited(m, {base + Machine::at_key, item.param, item.origin}) !=
                                             GrammarSymbol::lexeme(RegexPool::nothing);
            if (more) add(m, {base + Machine::at_key, item.param, item.origin});
        }
        return;
    }
    if (!p.object) {
        if (waited(m, item) == GrammarSymbol::lexeme(lexeme)) advance(m, item);
        return;
    }
    const auto key = m.member_of_[p.owner].find(lexeme);
    if (key == m.member_of_[p.owner].end()) return;
    const std::vector<RegexId>& keys = m.keys(p.owner, item.param);
    m.pool().spend(keys.size() / 8);
    if (std::ranges::find(keys, lexeme) == keys.end()) return;
    const ObjectShape& o    = g.objects[g.symbols[p.owner].shape];
    Machine::Seen      seen = m.seen_[item.param];
    const auto         n    = std::uint32_t(o.members.size());
    if (o.ordered) seen.next = key->second < n ? key->second + 1 : n;
    else if (key->second < n) seen.bits[key->second / 64] |= std::uint64_t(1) << (key->second % 64);
    const bool counts = o.min > 0 || o.max != RegexPool::endless;
    if (counts) seen.count = std::min(seen.count + 1, o.max == RegexPool::endless ? o.min : o.max);
    add(m, {base + Machine::at_value + key->second, m.intern(std::move(seen)), item.origin});
}

void Rows::predict(Machine& m, GrammarSymbol symbol) {
    if (symbol.is_lexeme()) return;
    const std::uint32_t s = symbol.index();
    if (predicted_.size() < m.grammar_.symbols.size()) predicted_.resize(m.grammar_.symbols.size());
    if (predicted_[s]) return;
    predicted_list_.push_back(s);
    predicted_[s]                    = true;
    const auto                 here  = std::int32_t(rows_.size() - 1);
    const Grammar::Definition& d     = m.grammar_.symbols[s];
    std::uint32_t              param = 0;
    if (d.kind == Grammar::Kind::object) {
        const ObjectShape& o = m.grammar_.objects[d.shape];
        Machine::Seen      seen;
        if (!o.ordered) seen.bits.resize((o.members.size() + 63) / 64);
        param = m.intern(std::move(seen));
    }
    for (std::uint32_t code : m.starts_[s]) add(m, {code, param, here});
}

// Adds all items that follow from the items of the last row; then collects the lexemes that they expect.
std::int32_t Rows::close_row(Machine& m) {
    using Kind           = Machine::Place::Kind;
    const Grammar& g     = m.grammar_;
    const auto     index = rows_.size() - 1;
    lexemes_.clear();
    follow_completed(m);
    for (std::uint32_t i = 0; i < rows_[index].n; i++) {
        const Item            item = items_[rows_[index].first + i];
        const Machine::Place& p    = m.places_[item.code];
        GrammarSymbol         next = p.next;
        switch (p.kind) {
            case Kind::open: next = GrammarSymbol::lexeme(p.object ? g.object_open : g.array_open); break;
            case Kind::first:
            case Kind::after: {
                const bool close =
                    p.object ? m.may_close(p.owner, item.param) : item.param >= g.arrays[g.symbols[p.owner].shape].min;
                if (close) lexemes_.push_back(p.object ? g.object_close : g.array_close);
                if (p.kind == Kind::after) {
                    const GrammarSymbol more =
                        p.object
                            ? GrammarSymbol::lexeme(m.keys(p.owner, item.param).empty() ? RegexPool::nothing : g.comma)
                            : waited(m, {m.base_[p.owner] + Machine::at_key, item.param, item.origin});
                    next = more == GrammarSymbol::lexeme(RegexPool::nothing) ? more : GrammarSymbol::lexeme(g.comma);
                    break;
                }
                [[fallthrough]];
            }
            case Kind::key:
            case Kind::element:
                if (p.object) {
                    const std::vector<RegexId>& keys = m.keys(p.owner, item.param);
                    m.pool().spend(keys.size());
                    lexemes_.insert(lexemes_.end(), keys.begin(), keys.end());
                    next = GrammarSymbol::lexeme(RegexPool::nothing);
                } else {
                    next = waited(m, item);
                }
                break;
            default: break;
        }
        if (next.is_lexeme()) {
            if (next.index() != RegexPool::nothing) lexemes_.push_back(next.index());
        } else {
            predict(m, next);
            if (g.symbols[next.index()].nullable) advance(m, item);
        }
        follow_completed(m);
        m.pool().spend(1);
    }
    for (std::uint32_t s : predicted_list_) predicted_[s] = false;
    predicted_list_.clear();
    m.pool().spend((table_.size() + lexemes_.size()) / 16);
    std::fill(table_.begin(), table_.end(), 0);
    std::sort(lexemes_.begin(), lexemes_.end());
    lexemes_.erase(std::unique(lexemes_.begin(), lexemes_.end()), lexemes_.end());
    rows_[index].start = m.lexer_.start(lexemes_);
    rows_[index].ends  = std::exchange(row_ends_, false);
    return std::int32_t(index);
}

std::int32_t Rows::row_after(Machine& m, std::span<const Thread> ended) {
    if (rows_.size() >= m.limits_.rows) throw WorkEnded{WorkEnded::Why::work};
    rows_.push_back({.first = std::uint32_t(items_.size())});
    for (const Thread& t : ended)
        for (RegexId lexeme : m.lexer_.ends(t.state)) {
            const Row from = rows_[std::size_t(t.row)];
            m.pool().spend(from.n);
            for (std::uint32_t i = 0; i < from.n; i++) {
                const Item item = items_[from.first + i];
                advance_over(m, item, lexeme);
            }
        }
    return close_row(m);
}

void Rows::step(Machine& m, std::span<const Thread> from, int byte, std::vector<Thread>& to, bool& ends) {
    to.clear();
    ended_.clear();
    ends = false;
    for (const Thread& t : from) {
        const LexerState next = m.lexer_.step(t.state, byte);
        if (next == GrammarLexer::dead) continue;
        if (m.lexer_.goes_on(next)) to.push_back({t.row, next});
        if (m.lexer_.has_ends(next)) ended_.push_back({t.row, next});
    }
    if (ended_.empty()) return;
    const std::int32_t row = row_after(m, ended_);
    ends                   = rows_[std::size_t(row)].ends;
    if (rows_[std::size_t(row)].start != GrammarLexer::dead) to.push_back(start_of(row));
}

void StateKey::add(std::uint64_t value) {
    a = (a ^ value) * 0x9e3779b97f4a7c15ull;
    a ^= a >> 32;
    b = (b + value) * 0xff51afd7ed558ccdull + 1;
    b ^= b >> 29;
}

StateKey Rows::key(std::int32_t row) {
    while (keys_.size() <= std::size_t(row)) {
        const auto r = keys_.size();
        StateKey   key;
        key.add(r == 0); // the text can end where the start symbol does that began there
        for (std::uint32_t i = 0; i < rows_[r].n; i++) {
            const Item& item = items_[rows_[r].first + i];
            key.add(std::uint64_t(item.code) << 32 | item.param);
            const bool here = std::size_t(item.origin) == r;
            key.add(here ? 1 : keys_[std::size_t(item.origin)].a);
            key.add(here ? 1 : keys_[std::size_t(item.origin)].b);
        }
        keys_.push_back(key);
    }
    return keys_[std::size_t(row)];
}

void Rows::cut(std::size_t n_rows) {
    if (n_rows >= rows_.size()) return;
    items_.resize(rows_[n_rows].first);
    rows_.resize(n_rows);
    keys_.resize(std::min(keys_.size(), n_rows));
}

void Rows::abandon(std::size_t n_rows) {
    cut(n_rows);
    completed_.clear();
    for (std::uint32_t s : predicted_list_)
        if (s < predicted_.size()) predicted_[s] = false;
    predicted_list_.clear();
    std::fill(table_.begin(), table_.end(), 0);
    row_ends_ = false;
}

void Rows::shrink() {
    constexpr std::size_t much = 16'384;
    const auto            cut  = [](auto& list) {
        if (list.capacity() > much && list.capacity() / 4 > list.size()) list.shrink_to_fit();
    };
    cut(items_), cut(rows_), cut(keys_);
    if (table_.size() > much) table_ = {};
}

void Rows::compact(std::span<Thread> threads) {
    std::vector<std::int32_t> to(rows_.size(), -1); // -1: not needed; 0: needed
    for (const Thread& t : threads) to[std::size_t(t.row)] = 0;
    for (std::size_t r = rows_.size(); r-- > 0;)
        if (to[r] == 0)
            for (std::uint32_t i = 0; i < rows_[r].n; i++) to[std::size_t(items_[rows_[r].first + i].origin)] = 0;
    to[0] = 0; // row 0 is where the start symbol began
    std::vector<Item> items;
    std::vector<Row>  rows;
    for (std::size_t r = 0; r < rows_.size(); r++) {
        if (to[r] < 0) continue;
        to[r]            = std::int32_t(rows.size());
        Row        row   = rows_[r];
        const auto first = std::uint32_t(items.size());
        for (std::uint32_t i = 0; i < row.n; i++) {
            Item item   = items_[row.first + i];
            item.origin = to[std::size_t(item.origin)];
            items.push_back(item);
        }
        row.first = first;
        rows.push_back(row);
    }
    for (Thread& t : threads) t.row = to[std::size_t(t.row)];
    items_ = std::move(items);
    rows_  = std::move(rows);
    keys_.clear();
}

} // namespace quire
