// quire.constraint.regex.lexer: an automaton for sets of lexemes, built where texts lead. **Owns** its states.
export module quire.constraint.regex.lexer;

export import quire.constraint.regex.regex;
import quire.core.base;
import quire.core.hash;

export namespace quire {

using LexerState = std::int32_t;

// A state is a set of lexemes that have begun together, each with the expression for the rest of it.
class GrammarLexer {
public:
    static constexpr LexerState dead = -1;
    struct Pair {
        RegexId lexeme, left;
        bool    operator==(const Pair&) const  = default;
        auto    operator<=>(const Pair&) const = default;
    };

    // The pool stays where it is; no more expressions are made from outside.
    GrammarLexer(RegexPool& pool, std::size_t max_states) : pool_(&pool), max_states_(max_states) {}

    // Where the lexemes (ascending, each once) begin. `dead` when there are none. Throws WorkEnded here and below.
    LexerState start(std::span<const RegexId> lexemes);
    // A state of one lexeme of which `left` is left.
    LexerState        only(Pair pair) { return add({&pair, 1}); }
    inline LexerState step(LexerState state, int byte) {
        const std::size_t byte_class = class_of_[std::size_t(byte)];
        const LexerState  next       = next_[std::size_t(state) * width_ + byte_class];
        return next != unknown ? next : build(state, int(byte_class));
    }
    std::span<const Pair> pairs(LexerState s) const {
        const State& state = states_[std::size_t(s)];
        return std::span(pairs_).subspan(state.first, state.n);
    }
    // Lexemes that end here.
    std::span<const RegexId> ends(LexerState s) const {
        const State& state = states_[std::size_t(s)];
        return std::span(ends_).subspan(state.first_end, state.n_ends);
    }
    inline bool has_ends(LexerState s) const { return (flags_[std::size_t(s)] & ends_here) != 0; }
    // Whether one of them can go on.
    inline bool goes_on(LexerState s) const { return (flags_[std::size_t(s)] & goes_further) != 0; }
    std::size_t size() const { return states_.size(); }
    std::size_t bytes() const; // that it takes
    // Forgets all states.
    void reset();

private:
    static constexpr LexerState unknown = -2;
    enum : std::uint8_t { ends_here = 1, goes_further = 2 };
    struct State {
        std::uint32_t first = 0, n = 0, first_end = 0, n_ends = 0;
    };

    LexerState           build(LexerState state, int byte_class);
    LexerState           add(std::span<const Pair> pairs);
    static std::uint64_t hash_of(std::span<const Pair> pairs) { return hash_bytes(pairs.data(), pairs.size_bytes()); }

    RegexPool*                    pool_;
    std::size_t                   max_states_;
    std::size_t                   width_ = 0; // classes of bytes
    std::array<std::uint8_t, 256> class_of_{};
    std::vector<State>            states_;
    std::vector<std::uint8_t>     flags_; // of states
    std::vector<Pair>             pairs_;
    std::vector<RegexId>          ends_;
    std::vector<LexerState>       next_;  // [states × width]
    std::vector<LexerState>       index_; // by hash of the pairs, open addressing; dead: free
    std::vector<Pair>             made_;  // scratch
};

} // namespace quire

module :private;

namespace quire {

std::size_t GrammarLexer::bytes() const {
    return states_.capacity() * sizeof(State) + flags_.capacity() +
           (pairs_.capacity() + made_.capacity()) * sizeof(Pair) + ends_.capacity() * sizeof(RegexId) +
           (next_.capacity() + index_.capacity()) * sizeof(LexerState);
}

void GrammarLexer::reset() {
    width_  = 0;
    states_ = {}, flags_ = {}, pairs_ = {}, ends_ = {}, next_ = {}, index_ = {}, made_ = {};
}

LexerState GrammarLexer::add(std::span<const Pair> pairs) {
    if (pairs.empty()) return dead;
    pool_->spend(1 + pairs.size());
    if (2 * (states_.size() + 1) > index_.size()) {
        std::vector<LexerState> index(std::max<std::size_t>(64, 2 * index_.size()), dead);
        for (LexerState s = 0; s < LexerState(states_.size()); s++) {
            std::size_t at = std::size_t(hash_of(this->pairs(s))) & (index.size() - 1);
            while (index[at] != dead) at = (at + 1) & (index.size() - 1);
            index[at] = s;
        }
        index_ = std::move(index);
    }
    std::size_t at = std::size_t(hash_of(pairs)) & (index_.size() - 1);
    for (; index_[at] != dead; at = (at + 1) & (index_.size() - 1))
        if (std::ranges::equal(this->pairs(index_[at]), pairs)) return index_[at];
    if (states_.size() >= max_states_) throw WorkEnded{WorkEnded::Why::memory};
    if (width_ == 0) {
        width_ = std::size_t(pool_->n_classes());
        for (int b = 0; b < 256; b++) class_of_[std::size_t(b)] = std::uint8_t(pool_->class_of(b));
    }
    check(width_ == std::size_t(pool_->n_classes()), "a lexer's classes of bytes changed");
    ByteSet can_come = {};
    for (const Pair& p : pairs) {
        const ByteSet first = pool_->first_bytes(p.left);
        for (std::size_t w = 0; w < 4; w++) can_come.words[w] |= first.words[w];
    }
    pool_->spend(1 + width_ / 8);
    State state;
    state.first        = std::uint32_t(pairs_.size());
    state.n            = std::uint32_t(pairs.size());
    state.first_end    = std::uint32_t(ends_.size());
    std::uint8_t flags = 0;
    for (const Pair& p : pairs) {
        pairs_.push_back(p);
        if (pool_->nullable(p.left)) ends_.push_back(p.lexeme), flags |= ends_here;
        if (p.left != RegexPool::blank) flags |= goes_further;
    }
    state.n_ends = std::uint32_t(ends_.size()) - state.first_end;
    states_.push_back(state);
    flags_.push_back(flags);
    next_.resize(states_.size() * width_, dead);
    for (std::size_t c = 0; c < width_; c++)
        if (can_come.has(pool_->byte_of(int(c)))) next_[(states_.size() - 1) * width_ + c] = unknown;
    return index_[at] = LexerState(states_.size() - 1);
}

LexerState GrammarLexer::start(std::span<const RegexId> lexemes) {
    made_.clear();
    pool_->spend(lexemes.size());
    for (RegexId id : lexemes)
        if (!pool_->is_void(id)) made_.push_back({id, id});
    return add(made_);
}

LexerState GrammarLexer::build(LexerState from, int byte_class) {
    const State state = states_[std::size_t(from)];
    const int   byte  = pool_->byte_of(byte_class);
    made_.clear();
    pool_->spend(1 + state.n);
    for (std::uint32_t i = 0; i < state.n; i++) {
        const Pair    p    = pairs_[state.first + i];
        const RegexId left = pool_->derive(p.left, byte);
        if (!pool_->is_void(left)) made_.push_back({p.lexeme, left});
    }
    const LexerState to                                                = add(made_);
    return next_[std::size_t(from) * width_ + std::size_t(byte_class)] = to;
}

} // namespace quire
