// quire.text.grammar.lexer: an automaton for sets of lexemes, built where texts lead. **Owns** its states.
export module quire.text.grammar.lexer;

import quire.core.base;
import quire.core.std;
import quire.text.grammar.regex;

export namespace quire {

using LexerState = std::int32_t;

// A state is a set of lexemes that have begun together, each with what is left of it.
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

    // Where the lexemes (ascending, each once) begin. `dead` when there are none, or when there is no room: see full().
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
    bool        full() const { return full_; }
    std::size_t size() const { return states_.size(); }

private:
    static constexpr LexerState unknown = -2;
    enum : std::uint8_t { ends_here = 1, goes_further = 2 };
    struct State {
        std::uint32_t first = 0, n = 0, first_end = 0, n_ends = 0;
    };

    LexerState build(LexerState state, int byte_class);
    LexerState add(std::span<const Pair> pairs);

    RegexPool*                                                 pool_;
    std::size_t                                                max_states_;
    std::size_t                                                width_ = 0; // classes of bytes
    std::array<std::uint8_t, 256>                              class_of_{};
    std::vector<State>                                         states_;
    std::vector<std::uint8_t>                                  flags_; // of states
    std::vector<Pair>                                          pairs_;
    std::vector<RegexId>                                       ends_;
    std::vector<LexerState>                                    next_; // [states × width]
    std::unordered_map<std::uint64_t, std::vector<LexerState>> index_;
    std::vector<Pair>                                          made_; // scratch
    bool                                                       full_ = false;
};

} // namespace quire

module :private;

namespace quire {

LexerState GrammarLexer::add(std::span<const Pair> pairs) {
    if (pairs.empty()) return dead;
    std::uint64_t h = 0;
    for (const Pair& p : pairs) {
        h = (h ^ (std::uint64_t(p.lexeme) << 32 | p.left)) * 0x9e3779b97f4a7c15ull;
        h ^= h >> 29;
    }
    std::vector<LexerState>& same = index_[h];
    for (LexerState s : same) {
        const State& state = states_[std::size_t(s)];
        if (std::ranges::equal(std::span(pairs_).subspan(state.first, state.n), pairs)) return s;
    }
    if (states_.size() >= max_states_) {
        full_ = true;
        return dead;
    }
    if (width_ == 0) {
        width_ = std::size_t(pool_->n_classes());
        for (int b = 0; b < 256; b++) class_of_[std::size_t(b)] = std::uint8_t(pool_->class_of(b));
    }
    check(width_ == std::size_t(pool_->n_classes()), "a lexer's classes of bytes changed");
    State state;
    state.first           = std::uint32_t(pairs_.size());
    state.n               = std::uint32_t(pairs.size());
    state.first_end       = std::uint32_t(ends_.size());
    std::uint8_t flags    = 0;
    ByteSet      can_come = {};
    for (const Pair& p : pairs) {
        pairs_.push_back(p);
        if (pool_->nullable(p.left)) ends_.push_back(p.lexeme), flags |= ends_here;
        if (p.left != RegexPool::blank) flags |= goes_further;
        const ByteSet first = pool_->first_bytes(p.left);
        for (std::size_t w = 0; w < 4; w++) can_come.words[w] |= first.words[w];
    }
    state.n_ends = std::uint32_t(ends_.size()) - state.first_end;
    states_.push_back(state);
    flags_.push_back(flags);
    next_.resize(states_.size() * width_, dead);
    for (std::size_t c = 0; c < width_; c++)
        if (can_come.has(pool_->byte_of(int(c)))) next_[(states_.size() - 1) * width_ + c] = unknown;
    same.push_back(LexerState(states_.size() - 1));
    return same.back();
}

LexerState GrammarLexer::start(std::span<const RegexId> lexemes) {
    made_.clear();
    for (RegexId id : lexemes)
        if (!pool_->is_void(id)) made_.push_back({id, id});
    return add(made_);
}

LexerState GrammarLexer::build(LexerState from, int byte_class) {
    const State state = states_[std::size_t(from)];
    const int   byte  = pool_->byte_of(byte_class);
    made_.clear();
    for (std::uint32_t i = 0; i < state.n; i++) {
        const Pair    p    = pairs_[state.first + i];
        const RegexId left = pool_->derive(p.left, byte);
        if (!pool_->is_void(left)) made_.push_back({p.lexeme, left});
    }
    const LexerState to = add(made_);
    if (!full_) next_[std::size_t(from) * width_ + std::size_t(byte_class)] = to;
    return to;
}

} // namespace quire
