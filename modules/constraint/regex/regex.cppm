// quire.constraint.regex.regex: regular expressions over bytes as hash-consed values, and their derivatives. **Owns** the expressions
// of one grammar.
//
// The derivative of a language by a byte has the texts that may follow that byte (Brzozowski, "Derivatives of Regular Expressions", 1964). With
// them intersection and complement cost no more than union, and an automaton is built only where a text leads.
export module quire.constraint.regex.regex;

export import quire.constraint.work;
import quire.core.base;
import quire.core.hash;

export namespace quire {

using RegexId = std::uint32_t;

// A set of bytes.
struct ByteSet {
    std::array<std::uint64_t, 4> words{};

    static ByteSet range(int first, int last);
    bool           has(int b) const { return words[std::size_t(b >> 6)] >> (b & 63) & 1; }
    void           add(int b) { words[std::size_t(b >> 6)] |= std::uint64_t(1) << (b & 63); }
    void           remove(int b) { words[std::size_t(b >> 6)] &= ~(std::uint64_t(1) << (b & 63)); }
    int            count() const;
    bool           operator==(const ByteSet&) const = default;
};

// The magnitude of a decimal number: digits before the point, without leading zeros but for a single 0; digits behind it, without
// zeros at the end.
struct Magnitude {
    std::string whole = "0", fraction;
};

class RegexPool {
public:
    static constexpr RegexId       nothing = 0; // no text
    static constexpr RegexId       blank   = 1; // the empty text
    static constexpr std::uint32_t endless = 0xffffffff;

    RegexPool();

    RegexId bytes(const ByteSet& set);
    RegexId literal(std::string_view text);
    RegexId concat(RegexId a, RegexId b);
    RegexId any_of(std::vector<RegexId> parts); // union
    RegexId all_of(std::vector<RegexId> parts); // intersection
    RegexId negate(RegexId a);                  // all texts but these
    RegexId repeat(RegexId a, std::uint32_t min, std::uint32_t max);
    RegexId minus(RegexId a, RegexId b) { return all_of({a, negate(b)}); }

    // The decimal magnitudes ("12", "0.5") that are not below (not above) `bound`; with `with_bound` also `bound` itself.
    RegexId at_least(const Magnitude& bound, bool with_bound);
    RegexId at_most(const Magnitude& bound, bool with_bound);
    // The decimal magnitudes that are multiples of divisor / 10^decimals. 0 < divisor <= 10^9, decimals <= 9.
    RegexId multiple_of(std::uint64_t divisor, int decimals);

    bool    nullable(RegexId a) const { return nodes_[a].nullable; }
    RegexId derive(RegexId a, int byte);
    // Whether no text matches. After `most_steps` derivatives without an answer, or `most_number_steps` with numbers: false.
    bool is_void(RegexId a);
    // Bytes with which a text may begin; a few more may be among them.
    ByteSet first_bytes(RegexId a);
    // A text is made of these (characters) in one way only: counts of them can be intersected.
    void add_unit(RegexId a) { units_.push_back(a); }
    bool is_unit(RegexId a) const { return std::ranges::find(units_, a) != units_.end(); }

    enum class Kind : std::uint8_t { nothing, blank, bytes, concat, any_of, all_of, negate, repeat, compare, multiple };
    // How an expression is made up. concat: of a, then b. any_of, all_of: of a list. negate: of a. repeat: of a, b to c times. Holds
    // until the next expression is made.
    struct View {
        Kind                     kind;
        RegexId                  a, b;
        std::uint32_t            c;
        std::span<const RegexId> list;
    };
    View view(RegexId id) const {
        const Node& n = nodes_[id];
        return {n.kind, n.a, n.b, n.c, list(n)};
    }

    // Bytes that no expression tells apart have the same class.
    int class_of(int byte) const { return class_of_[std::size_t(byte)]; }
    int n_classes() const { return n_classes_; }
    // Any byte of a class.
    int byte_of(int byte_class) const { return byte_of_[std::size_t(byte_class)]; }

    std::size_t size() const { return nodes_.size(); }
    // The expressions were nested too deep for derivatives: none of the results holds. Not once it is sealed.
    bool too_deep() const { return too_deep_; }

    // While an Under lives, work with the pool is counted and may throw WorkEnded; the pool then keeps its expressions, and perhaps new ones.
    class Under {
    public:
        Under(RegexPool& pool, WorkBudget& budget) : pool_(pool), before_(std::exchange(pool.budget_, &budget)) {}
        ~Under() { pool_.budget_ = before_; }
        Under(const Under&)            = delete;
        Under& operator=(const Under&) = delete;

    private:
        RegexPool&  pool_;
        WorkBudget* before_;
    };
    // Count the work of other modules in this budget: so many units; a function that calls itself.
    void spend(std::size_t units) {
        if (budget_) budget_->spend(units);
    }
    void enter() {
        if (budget_) budget_->enter();
    }
    WorkBudget* budget() const { return budget_; }
    // The bytes of the pool, with the bytes of other modules that charge() has counted.
    std::size_t bytes() const;
    void        charge(std::size_t bytes) { charged_ += bytes; }

    // seal(): the expressions made so far are the grammar's. reset() forgets the expressions that were made after seal().
    void seal();
    void reset();

private:
    struct Node {
        Kind          kind     = Kind::nothing;
        bool          nullable = false;
        bool          plain    = true;  // cannot be void, if it is not `nothing`
        bool          number   = false; // has a comparison or a multiple in it
        std::int8_t   is_void  = -1;    // 0, 1; -1: not known; 2: searched in vain
        std::uint16_t depth    = 1;     // of calls for a derivative
        std::uint32_t a = 0, b = 0, c = 0;
    };
    // bytes: a = set. concat: a, b. any_of, all_of: lists_[a .. a + b). negate: a. repeat: a, b times to c times.
    // compare: a = bound, b = state, c = bit 0 at least, bit 1 with the bound. multiple: a = divisor, b = rest, c = state.

    struct Divisor {
        std::uint64_t divisor;
        int           decimals;
        bool          operator==(const Divisor&) const = default;
    };
    struct Derivative {
        std::uint64_t key = 0; // expression, class
        RegexId       to  = none;
    };
    static constexpr RegexId       none         = 0xffffffff;
    static constexpr std::uint32_t state_digits = 1u << 28; // in b of compare: position below it, relation above
    static constexpr int           most_depth   = 800; // of expressions before seal(); later the stack is the limit
    static constexpr int           most_steps   = 20000;
    // As many as it takes to see that none of the numbers up to the next multiple is within bounds: those have some 35,000 beginnings,
    // and each is tried with eleven bytes.
    static constexpr int most_number_steps = 500'000;

    RegexId                  add(Node node, std::span<const RegexId> list = {});
    RegexId                  list_of(Kind kind, std::vector<RegexId> parts);
    RegexId                  compare(const Magnitude& bound, bool at_least, bool with_bound);
    RegexId                  derive_compare(Node n, int byte);
    RegexId                  derive_multiple(Node n, int byte);
    bool                     compare_ends(const Node& n) const;
    RegexId                  decided(const Node& n, int relation);
    RegexId                  find_derivative(RegexId a, int byte);
    RegexId                  known_derivative(std::uint64_t key) const;
    void                     keep_derivative(std::uint64_t key, RegexId to);
    void                     index_all(std::size_t places);
    bool                     search_void(RegexId a);
    void                     split_classes(const ByteSet& set);
    std::uint64_t            hash_of(const Node& n, std::span<const RegexId> list) const;
    bool                     same(RegexId id, const Node& n, std::span<const RegexId> list) const;
    std::span<const RegexId> list(const Node& n) const {
        return n.kind == Kind::any_of || n.kind == Kind::all_of ? std::span(lists_).subspan(n.a, n.b)
                                                                : std::span<const RegexId>();
    }

    std::vector<Node>             nodes_;
    std::vector<RegexId>          lists_;
    std::vector<ByteSet>          sets_;
    std::vector<Magnitude>        bounds_;
    std::vector<Divisor>          divisors_;
    std::vector<RegexId>          index_;       // by hash, open addressing; 0: free
    std::vector<Derivative>       derivatives_; // by hash, open addressing; to: none where it is free
    std::size_t                   n_derivatives_ = 0;
    std::array<std::uint8_t, 256> class_of_{};
    std::vector<int>              byte_of_{0};
    int                           n_classes_ = 1;
    std::vector<RegexId>          units_;
    bool                          too_deep_ = false, sealed_ = false;
    WorkBudget*                   budget_  = nullptr; // none: nothing is counted
    std::size_t                   charged_ = 0;
    struct {
        std::size_t nodes = 0, lists = 0, sets = 0;
    } grammar_; // when it was sealed
};

} // namespace quire

module :private;

namespace quire {

ByteSet ByteSet::range(int first, int last) {
    ByteSet s;
    for (int b = first; b <= last; b++) s.add(b);
    return s;
}

int ByteSet::count() const {
    int n = 0;
    for (std::uint64_t w : words) n += std::popcount(w);
    return n;
}

RegexPool::RegexPool() {
    nodes_.push_back({.kind = Kind::nothing, .is_void = 1});
    nodes_.push_back({.kind = Kind::blank, .nullable = true, .is_void = 0});
}

void RegexPool::split_classes(const ByteSet& set) {
    std::array<int, 256> inside{}, outside{};
    inside.fill(-1);
    outside.fill(-1);
    int n = 0;
    byte_of_.clear();
    std::array<std::uint8_t, 256> next{};
    for (int b = 0; b < 256; b++) {
        int& to = (set.has(b) ? inside : outside)[class_of_[std::size_t(b)]];
        if (to < 0) {
            to = n++;
            byte_of_.push_back(b);
        }
        next[std::size_t(b)] = std::uint8_t(to);
    }
    if (n == n_classes_) return; // numbered in the order of their first bytes, as before
    class_of_  = next;
    n_classes_ = n;
    derivatives_.clear();
    n_derivatives_ = 0;
}

std::uint64_t RegexPool::hash_of(const Node& n, std::span<const RegexId> list) const {
    const std::array<std::uint32_t, 3> own{n.a, n.b, n.c};
    const std::span<const RegexId>     all =
        n.kind == Kind::any_of || n.kind == Kind::all_of ? list : std::span<const RegexId>(own);
    return hash_bytes(all.data(), all.size_bytes(), std::uint64_t(n.kind));
}

bool RegexPool::same(RegexId id, const Node& n, std::span<const RegexId> wanted) const {
    const Node& m = nodes_[id];
    if (m.kind != n.kind) return false;
    if (n.kind == Kind::any_of || n.kind == Kind::all_of) return std::ranges::equal(list(m), wanted);
    return m.a == n.a && m.b == n.b && m.c == n.c;
}

void RegexPool::index_all(std::size_t places) {
    std::vector<RegexId> index(places);
    for (RegexId id = 2; id < nodes_.size(); id++) {
        std::size_t at = std::size_t(hash_of(nodes_[id], list(nodes_[id]))) & (places - 1);
        while (index[at] != 0) at = (at + 1) & (places - 1);
        index[at] = id;
    }
    index_ = std::move(index);
}

std::size_t RegexPool::bytes() const {
    return nodes_.capacity() * sizeof(Node) +
           (lists_.capacity() + index_.capacity() + units_.capacity()) * sizeof(RegexId) +
           sets_.capacity() * sizeof(ByteSet) + derivatives_.capacity() * sizeof(Derivative) + charged_;
}

void RegexPool::seal() {
    sealed_  = true;
    charged_ = 0;
    grammar_ = {nodes_.size(), lists_.size(), sets_.size()};
}

void RegexPool::reset() {
    check(sealed_, "expressions of a grammar that is not complete");
    const auto cut = [](auto& list, std::size_t n) { list = {list.begin(), list.begin() + std::ptrdiff_t(n)}; };
    cut(nodes_, grammar_.nodes);
    cut(lists_, grammar_.lists);
    cut(sets_, grammar_.sets);
    derivatives_   = {};
    n_derivatives_ = 0;
    index_all(std::bit_ceil(std::max<std::size_t>(1024, 4 * nodes_.size())));
}

RegexId RegexPool::add(Node node, std::span<const RegexId> list) {
    spend(1 + list.size());
    if (2 * nodes_.size() >= index_.size()) index_all(std::max<std::size_t>(1024, 2 * index_.size()));
    std::size_t at = std::size_t(hash_of(node, list)) & (index_.size() - 1);
    for (; index_[at] != 0; at = (at + 1) & (index_.size() - 1))
        if (same(index_[at], node, list)) return index_[at];
    if (node.kind == Kind::any_of || node.kind == Kind::all_of) {
        node.a = std::uint32_t(lists_.size());
        node.b = std::uint32_t(list.size());
        lists_.insert(lists_.end(), list.begin(), list.end());
    }
    if (node.depth > most_depth) {
        if (budget_ && !sealed_) throw WorkEnded{WorkEnded::Why::depth};
        too_deep_  = too_deep_ || !sealed_;
        node.depth = most_depth;
    }
    if (node.plain) node.is_void = 0;
    nodes_.push_back(node);
    return index_[at] = RegexId(nodes_.size() - 1);
}

RegexId RegexPool::bytes(const ByteSet& set) {
    if (set == ByteSet{}) return nothing;
    spend(1 + sets_.size() / 8);
    auto at = std::ranges::find(sets_, set);
    if (at == sets_.end()) {
        split_classes(set);
        sets_.push_back(set);
        at = sets_.end() - 1;
    }
    return add({.kind = Kind::bytes, .a = std::uint32_t(at - sets_.begin())});
}

RegexId RegexPool::literal(std::string_view text) {
    RegexId all = blank;
    for (std::size_t i = text.size(); i-- > 0;) {
        const int b = static_cast<unsigned char>(text[i]);
        all         = concat(bytes(ByteSet::range(b, b)), all);
    }
    return all;
}

RegexId RegexPool::concat(RegexId a, RegexId b) {
    if (a == nothing || b == nothing) return nothing;
    if (a == blank) return b;
    if (b == blank) return a;
    // To the right: the derivative looks at the left end.
    std::vector<RegexId> parts;
    while (nodes_[a].kind == Kind::concat) {
        parts.push_back(nodes_[a].a);
        a = nodes_[a].b;
    }
    parts.push_back(a);
    for (std::size_t i = parts.size(); i-- > 0;) {
        const Node &l = nodes_[parts[i]], &r = nodes_[b];
        const int   depth = 1 + std::max<int>(l.depth, l.nullable ? r.depth : 0);
        b                 = add({.kind     = Kind::concat,
                                 .nullable = l.nullable && r.nullable,
                                 .plain    = l.plain && r.plain,
                                 .number   = l.number || r.number,
                                 .depth    = std::uint16_t(std::min(depth, most_depth + 1)),
                                 .a        = parts[i],
                                 .b        = b});
    }
    return b;
}

// Flat, sorted, each once; sets of bytes in one.
RegexId RegexPool::list_of(Kind kind, std::vector<RegexId> parts) {
    const bool           any = kind == Kind::any_of;
    std::vector<RegexId> flat;
    ByteSet              set;
    bool                 has_set = false;
    const auto           take    = [&](RegexId id) {
        const Node& n = nodes_[id];
        if (n.kind != Kind::bytes) {
            flat.push_back(id);
            return;
        }
        const ByteSet& s = sets_[n.a];
        for (std::size_t w = 0; w < 4; w++)
            set.words[w] = !has_set ? s.words[w] : any ? set.words[w] | s.words[w] : set.words[w] & s.words[w];
        has_set = true;
    };
    for (RegexId id : parts)
        if (nodes_[id].kind == kind) {
            spend(nodes_[id].b);
            for (RegexId inner : list(nodes_[id])) take(inner);
        } else take(id);
    spend(1 + flat.size());
    if (has_set) flat.push_back(bytes(set));
    std::sort(flat.begin(), flat.end());
    flat.erase(std::unique(flat.begin(), flat.end()), flat.end());
    const RegexId all = negate(nothing);
    if (any) {
        std::erase_if(flat, [](RegexId id) { return id == nothing; });
        if (std::ranges::find(flat, all) != flat.end()) return all;
        if (flat.empty()) return nothing;
    } else {
        if (!flat.empty() && flat[0] == nothing) return nothing;
        std::erase_if(flat, [&](RegexId id) { return id == all; });
        if (flat.empty()) return all;
        // Several repetitions of one unit become one repetition, with the counts of all.
        for (RegexId unit : units_) {
            std::uint32_t min = 0, max = endless;
            std::size_t   n = 0;
            for (RegexId id : flat)
                if (nodes_[id].kind == Kind::repeat && nodes_[id].a == unit)
                    min = std::max(min, nodes_[id].b), max = std::min(max, nodes_[id].c), n++;
            if (n < 2) continue;
            if (min > max) return nothing;
            std::erase_if(flat, [&](RegexId id) { return nodes_[id].kind == Kind::repeat && nodes_[id].a == unit; });
            flat.push_back(repeat(unit, min, max));
            std::sort(flat.begin(), flat.end());
        }
        if (flat[0] == blank)
            return std::ranges::all_of(flat, [&](RegexId id) { return nullable(id); }) ? blank : nothing;
    }
    if (flat.size() == 1) return flat[0];
    Node node{.kind = kind, .nullable = !any, .plain = any};
    int  depth = 0;
    for (RegexId id : flat) {
        const Node& n = nodes_[id];
        if (kind == Kind::any_of) node.nullable |= n.nullable, node.plain &= n.plain;
        else node.nullable &= n.nullable;
        depth = std::max<int>(depth, n.depth);
        node.number |= n.number;
        if (kind == Kind::all_of) { // x and not x
            const Node& inner = n;
            if (inner.kind == Kind::negate && std::binary_search(flat.begin(), flat.end(), inner.a)) return nothing;
        }
    }
    node.depth = std::uint16_t(std::min(depth + 1, most_depth + 1));
    return add(node, flat);
}

RegexId RegexPool::any_of(std::vector<RegexId> parts) { return list_of(Kind::any_of, std::move(parts)); }
RegexId RegexPool::all_of(std::vector<RegexId> parts) { return list_of(Kind::all_of, std::move(parts)); }

RegexId RegexPool::negate(RegexId a) {
    const Node& n = nodes_[a];
    if (n.kind == Kind::negate) return n.a;
    return add({.kind     = Kind::negate,
                .nullable = !n.nullable,
                .plain    = a == nothing,
                .number   = n.number,
                .depth    = std::uint16_t(n.depth + 1),
                .a        = a});
}

RegexId RegexPool::repeat(RegexId a, std::uint32_t min, std::uint32_t max) {
    if (max == 0 || a == blank) return blank;
    if (a == nothing) return min == 0 ? blank : nothing;
    if (min == 1 && max == 1) return a;
    const Node& n = nodes_[a];
    if (n.nullable) min = 0;
    if (n.kind == Kind::repeat && n.b <= 1 && n.c == endless && max == endless)
        return repeat(n.a, std::min(n.b, min), endless);
    return add({.kind     = Kind::repeat,
                .nullable = min == 0,
                .plain    = n.plain || min == 0,
                .number   = n.number,
                .depth    = std::uint16_t(n.depth + 1),
                .a        = a,
                .b        = min,
                .c        = max});
}

// -- decimal numbers
//
// A number is compared with a bound digit by digit. While the number goes on, the count of its digits decides; so the state is
// the position, and how the digits so far compare: 0 equal, 1 less, 2 greater. Positions behind the bound's whole part belong to
// the fraction.

RegexId RegexPool::at_least(const Magnitude& bound, bool with_bound) { return compare(bound, true, with_bound); }
RegexId RegexPool::at_most(const Magnitude& bound, bool with_bound) { return compare(bound, false, with_bound); }

RegexId RegexPool::compare(const Magnitude& bound, bool at_least, bool with_bound) {
    (void)bytes([] {
        ByteSet point;
        point.add('.');
        return point;
    }());
    for (int d = '0'; d <= '9'; d++) (void)bytes(ByteSet::range(d, d));
    std::size_t at = 0;
    while (at < bounds_.size() && (bounds_[at].whole != bound.whole || bounds_[at].fraction != bound.fraction)) at++;
    if (at == bounds_.size()) bounds_.push_back(bound);
    Node n{.kind   = Kind::compare,
           .plain  = false,
           .number = true,
           .a      = std::uint32_t(at),
           .c      = std::uint32_t(at_least) | std::uint32_t(with_bound) << 1};
    n.nullable = compare_ends(n);
    return add(n);
}

// Whether a number that ends here is within the bound.
bool RegexPool::compare_ends(const Node& n) const {
    const Magnitude&    bound    = bounds_[n.a];
    const std::uint32_t at       = n.b % state_digits;
    int                 relation = int(n.b / state_digits);
    const auto          whole = std::uint32_t(bound.whole.size()), all = whole + std::uint32_t(bound.fraction.size());
    if (at < whole) relation = 1;
    else if (relation == 0 && at == whole) relation = bound.fraction.empty() ? 0 : 1;
    else if (relation == 0) relation = at - 1 < all ? 1 : 0; // one further, for the point
    return relation == 0 ? (n.c & 2) != 0 : (relation == 2) == ((n.c & 1) != 0);
}

// The number is greater or less, whatever follows.
RegexId RegexPool::decided(const Node& n, int relation) {
    if ((relation == 2) != ((n.c & 1) != 0)) return nothing;
    ByteSet rest = ByteSet::range('0', '9');
    rest.add('.');
    return repeat(bytes(rest), 0, endless);
}

RegexId RegexPool::derive_compare(Node n, int byte) {
    const Magnitude&    bound    = bounds_[n.a];
    const std::uint32_t at       = n.b % state_digits;
    int                 relation = int(n.b / state_digits);
    const auto          whole    = std::uint32_t(bound.whole.size());
    const bool          behind   = at > whole; // the point
    std::uint32_t       next     = at + 1;
    if (byte == '.') {
        if (behind) return nothing;
        if (at < whole) return decided(n, 1);
        if (relation != 0) return decided(n, relation);
    } else if (byte < '0' || byte > '9') {
        return nothing;
    } else if (!behind) {
        if (at >= whole) return decided(n, 2);
        if (relation == 0) relation = byte < bound.whole[at] ? 1 : byte > bound.whole[at] ? 2 : 0;
    } else {
        const std::uint32_t i = at - whole - 1;
        const int           d = i < bound.fraction.size() ? bound.fraction[i] : '0';
        if (byte != d) return decided(n, byte < d ? 1 : 2);
        if (i >= bound.fraction.size()) next = at;
    }
    n.b        = next + std::uint32_t(relation) * state_digits;
    n.is_void  = -1;
    n.nullable = compare_ends(n);
    return add(n);
}

// The rest of the digits so far by the divisor; c: 0 before the point, then 1 + the number of decimals.
RegexId RegexPool::multiple_of(std::uint64_t divisor, int decimals) {
    (void)at_least({}, true); // tells the digits apart
    const Divisor wanted{divisor, decimals};
    auto          at = std::ranges::find(divisors_, wanted);
    if (at == divisors_.end()) at = divisors_.insert(divisors_.end(), wanted);
    return add({.kind = Kind::multiple, .nullable = true, .number = true, .a = std::uint32_t(at - divisors_.begin())});
}

RegexId RegexPool::derive_multiple(Node n, int byte) {
    const Divisor& by       = divisors_[n.a];
    const auto     decimals = std::uint32_t(by.decimals);
    if (byte == '.') {
        if (n.c > 0) return nothing;
        n.c = 1;
    } else if (byte < '0' || byte > '9') {
        return nothing;
    } else if (n.c > decimals) {
        if (byte != '0') return nothing;
    } else {
        n.b = std::uint32_t((std::uint64_t(n.b) * 10 + std::uint64_t(byte - '0')) % by.divisor);
        if (n.c > 0) n.c++;
    }
    std::uint64_t rest = n.b, more = 1; // with zeros for the digits to come, of which there are so many
    for (std::uint32_t i = n.c > 0 ? n.c - 1 : 0; i < decimals; i++) {
        rest = rest * 10 % by.divisor;
        more *= 10;
    }
    // Behind the point those digits have to make up for what is missing. Before it as many digits as it takes may come.
    if (n.c > 0 && rest > 0 && by.divisor - rest >= more) return nothing;
    n.nullable = rest == 0;
    return add(n);
}

// -- derivatives

RegexId RegexPool::derive(RegexId a, int byte) {
    const Kind kind = nodes_[a].kind;
    if (kind == Kind::nothing || kind == Kind::blank || too_deep_) return nothing;
    if (kind == Kind::bytes) return sets_[nodes_[a].a].has(byte) ? blank : nothing;
    spend(1);
    const auto key = [&] { return std::uint64_t(a) << 8 | std::uint64_t(class_of(byte)); };
    if (const RegexId known = known_derivative(key()); known != none) return known;
    const RegexId found = find_derivative(a, byte);
    keep_derivative(key(), found); // classes of bytes may have changed
    return found;
}

std::size_t place_of(std::uint64_t key, std::size_t places) {
    key *= 0x9e3779b97f4a7c15ull;
    return std::size_t(key ^ key >> 32) & (places - 1);
}

RegexId RegexPool::known_derivative(std::uint64_t key) const {
    if (derivatives_.empty()) return none;
    std::size_t at = place_of(key, derivatives_.size());
    while (derivatives_[at].to != none && derivatives_[at].key != key) at = (at + 1) & (derivatives_.size() - 1);
    return derivatives_[at].to;
}

void RegexPool::keep_derivative(std::uint64_t key, RegexId to) {
    const auto put = [](std::vector<Derivative>& all, const Derivative& d) {
        std::size_t at = place_of(d.key, all.size());
        while (all[at].to != none) at = (at + 1) & (all.size() - 1);
        all[at] = d;
    };
    if (2 * (n_derivatives_ + 1) > derivatives_.size()) {
        std::vector<Derivative> more(std::max<std::size_t>(256, 2 * derivatives_.size()));
        for (const Derivative& d : derivatives_)
            if (d.to != none) put(more, d);
        derivatives_ = std::move(more);
    }
    put(derivatives_, {key, to});
    n_derivatives_++;
}

RegexId RegexPool::find_derivative(RegexId a, int byte) {
    enter();
    const Node n = nodes_[a]; // nodes_ grows
    switch (n.kind) {
        case Kind::concat: {
            const RegexId first = concat(derive(n.a, byte), n.b);
            return nullable(n.a) ? any_of({first, derive(n.b, byte)}) : first;
        }
        case Kind::any_of:
        case Kind::all_of: {
            std::vector<RegexId> parts;
            parts.reserve(n.b);
            for (std::uint32_t i = 0; i < n.b; i++) {
                const RegexId d = derive(lists_[n.a + i], byte);
                if (d == nothing && n.kind == Kind::all_of) return nothing;
                if (d != nothing) parts.push_back(d);
            }
            return list_of(n.kind, std::move(parts));
        }
        case Kind::negate: return negate(derive(n.a, byte));
        case Kind::repeat:
            return concat(derive(n.a, byte), repeat(n.a, n.b > 0 ? n.b - 1 : 0, n.c == endless ? endless : n.c - 1));
        case Kind::compare: return derive_compare(n, byte);
        case Kind::multiple: return derive_multiple(n, byte);
        default: return nothing;
    }
}

bool RegexPool::is_void(RegexId a) {
    const Node n = nodes_[a];
    if (n.is_void >= 0) return n.is_void == 1;
    enter();
    bool found = false;
    switch (n.kind) {        // of the parts, where they say it
        case Kind::concat: { // a chain to the right
            RegexId rest = a;
            for (; !found && nodes_[rest].kind == Kind::concat; rest = nodes_[rest].b) found = is_void(nodes_[rest].a);
            found = found || is_void(rest);
            break;
        }
        case Kind::repeat: found = is_void(n.a); break;
        case Kind::any_of:
            found = true;
            for (std::uint32_t i = 0; i < n.b && found; i++) found = is_void(lists_[n.a + i]);
            break;
        default: return n.nullable ? false : search_void(a);
    }
    nodes_[a].is_void = found ? 1 : 0;
    return found;
}

// Of an intersection, a complement or a number: looks for a text, depth first; the way to one is not void either.
bool RegexPool::search_void(RegexId a) {
    struct Visit {
        RegexId id;
        ByteSet bytes;    // of numbers, with which a text may go on: few
        int     next = 0; // class
    };
    const auto visit = [&](RegexId id) {
        return Visit{.id = id, .bytes = nodes_[id].number ? first_bytes(id) : ByteSet::range(0, 255)};
    };
    const int                   most = nodes_[a].number ? most_number_steps : most_steps;
    std::vector<Visit>          way{visit(a)};
    std::unordered_set<RegexId> seen{a};
    for (int steps = 0; !way.empty();) {
        Visit& top = way.back();
        if (steps > most) {
            nodes_[a].is_void = 2; // so that it is not searched again
            return false;
        }
        if (top.next == n_classes_) {
            way.pop_back();
            continue;
        }
        const int byte = byte_of(top.next++);
        if (!top.bytes.has(byte)) continue;
        const RegexId d = derive(top.id, byte);
        steps++;
        if (nodes_[d].is_void == 1) continue;
        const Kind kind     = nodes_[d].kind;
        const bool searched = kind == Kind::all_of || kind == Kind::negate || kind == Kind::compare;
        if (nodes_[d].nullable || nodes_[d].is_void == 0 || (!searched && !is_void(d))) {
            for (const Visit& v : way) nodes_[v.id].is_void = 0;
            return false;
        }
        if (searched && seen.insert(d).second) way.push_back(visit(d));
    }
    for (RegexId id : seen) nodes_[id].is_void = 1;
    return true;
}

ByteSet RegexPool::first_bytes(RegexId a) {
    enter();
    const Node n = nodes_[a];
    switch (n.kind) {
        case Kind::nothing:
        case Kind::blank: return {};
        case Kind::bytes: return sets_[n.a];
        case Kind::repeat: return first_bytes(n.a);
        case Kind::concat: { // a chain to the right
            ByteSet first;
            for (RegexId rest = a;; rest = nodes_[rest].b) {
                const bool    chain = nodes_[rest].kind == Kind::concat;
                const ByteSet more  = first_bytes(chain ? nodes_[rest].a : rest);
                for (std::size_t w = 0; w < 4; w++) first.words[w] |= more.words[w];
                if (!chain || !nodes_[nodes_[rest].a].nullable) return first;
            }
        }
        case Kind::any_of:
        case Kind::all_of: {
            const bool any = n.kind == Kind::any_of;
            ByteSet    all = any ? ByteSet{} : ByteSet::range(0, 255);
            for (RegexId id : list(n)) {
                const ByteSet one = first_bytes(id);
                for (std::size_t w = 0; w < 4; w++)
                    all.words[w] = any ? all.words[w] | one.words[w] : all.words[w] & one.words[w];
            }
            return all;
        }
        case Kind::negate: return ByteSet::range(0, 255);
        case Kind::compare:
        case Kind::multiple: break;
    }
    ByteSet number = ByteSet::range('0', '9');
    number.add('.');
    return number;
}

} // namespace quire
