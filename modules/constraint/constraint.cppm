// quire.constraint.constraint: a compiled constraint of texts (Constraint, shared), and the state of one text under it (ConstraintState,
// a value that is copied where a sequence forks): which tokens may come next, as bits.
export module quire.constraint.constraint;

import quire.constraint.forced_tokens;
import quire.constraint.grammar.grammar;
import quire.constraint.grammar.recogniser;
import quire.constraint.grammar.short_texts;
export import quire.constraint.grammar.token_trie;
import quire.constraint.memory;
import quire.constraint.regex.lexer;
import quire.constraint.regex.regex;
export import quire.constraint.work;
import quire.core.base;
import quire.core.std;
export import quire.schedule.token_filter;

export namespace quire {

// **Owns** the grammar with its automata, and masks that come again. Any thread may use it; one at a time works in it. Automata and masks grow
// with the texts. When they take more than the limits allow, they are forgotten, and the present texts make them again as they go on: no
// text fails because of another.
class Constraint final : public ConstraintMemory::Holder {
public:
    // The grammar is finish()ed.
    Constraint(Grammar grammar, const GrammarLimits& limits = {});
    ~Constraint() { leave(); }

private:
    friend class ConstraintState;
    // The tokens that may follow within one lexeme, and the nodes of the token trees at which the lexeme ends.
    struct LexemeMask {
        struct Exit {
            const TokenTree* tree;
            std::uint32_t    node;
            RegexId          left; // behind the node
        };
        std::vector<std::uint64_t> bits;   // where they are many
        std::vector<Token>         tokens; // the first of several with the same bytes
        std::vector<Exit>          exits;
    };
    using SharedMask                             = std::shared_ptr<const LexemeMask>;
    static constexpr std::size_t most_mask_bytes = std::size_t(16) << 20;

    bool        give_back() override;
    void        reset();
    std::size_t bytes() const;
    void        count(const Effort& effort);

    static std::uint64_t key_of(RegexId relaxed, bool long_ones) {
        return std::uint64_t(relaxed) << 1 | std::uint64_t(long_ones);
    }
    void       use(const TokenTrie& trie);
    RegexId    relaxed(const TokenTrie& trie, RegexId left, bool long_ones);
    SharedMask mask_of(const TokenTrie& trie, RegexId relaxed, bool long_ones);
    void       walk_all(const TokenTrie& trie, const TokenTree& tree, LexerState start, LexemeMask& mask);
    void       walk_difference(const TokenTrie& trie, LexerState start, LexerState near, LexemeMask& mask);
    LexerState usual_next(const TokenTrie& trie, LexerState start);
    LexerState near_state(const TokenTrie& trie, LexerState start);
    // Whole masks that took much work, such as masks of free text, where a lexeme may end anywhere.
    static constexpr std::size_t much_work = 16'384, most_whole_bytes = std::size_t(8) << 20;

    Machine                                       machine_;
    ShortTexts                                    short_texts_;
    std::unordered_map<std::uint64_t, SharedMask> masks_;
    std::size_t                                   mask_bytes_ = 0;
    std::uint64_t                                 masks_of_   = 0; // id of the trie that all masks belong to
    std::unordered_map<StateKey, std::vector<std::uint64_t>, StateKeyHash> whole_;
    std::size_t                                                            whole_bytes_ = 0;
    std::uint64_t                             epoch_ = 1; // how often the automata began anew
    std::shared_ptr<std::atomic<std::size_t>> state_bytes_ =
        std::make_shared<std::atomic<std::size_t>>(0); // that texts take
};

// One text under a constraint. Depends only on the accepted tokens.
class ConstraintState final : public TokenFilter {
public:
    ConstraintState(std::shared_ptr<Constraint> constraint, std::shared_ptr<const TokenTrie> tokens);

    void push(Token token) override {
        pushed_.push_back(token);
        ahead_ = {};
    }
    Result<bool>                      mask(std::span<std::uint64_t> bits, const Effort& effort) override;
    Result<void>                      mask(std::span<std::uint64_t> bits);
    std::size_t                       words() const override { return tokens_->words(); }
    Result<bool>                      prepare(bool forced, const Effort& effort) override;
    std::optional<std::vector<Token>> forced_tokens(const Effort& effort) override;
    const void*                       shared() const override { return constraint_.get(); }
    const TokenTrie&                  tokens() const { return *tokens_; }
    // Goes on by a token, or by bytes. False: not allowed, or too much work; the state is unchanged. An end token ends the text.
    bool accept(Token token);
    bool accept_bytes(std::string_view bytes);
    // Whether the text is complete as it is; whether an end token came. Tokens pushed since the last mask do not count.
    bool may_end() const { return may_end_; }
    bool ended() const { return ended_; }
    // The bytes that must come next, at most `most_forced`. None: ended early by `effort`.
    static constexpr std::size_t most_forced = 256;
    std::optional<std::string>   forced_bytes(const Effort& effort);
    std::string                  forced_bytes() { return forced_bytes({}).value_or(""); }
    // Index of the byte at which accept_bytes refused.
    std::size_t refused_at() const { return refused_at_; }
    // The rows that are kept of the text so far, for tests of bounds.
    std::size_t rows() const { return rows_.size(); }

private:
    // The bytes of a text; they are counted with its constraint, once for each copy.
    class Counted {
    public:
        Counted() = default;
        explicit Counted(std::shared_ptr<std::atomic<std::size_t>> sum) : sum_(std::move(sum)) {}
        Counted(const Counted& other) : sum_(other.sum_) { set(other.bytes_); }
        Counted(Counted&& other) noexcept : sum_(std::move(other.sum_)), bytes_(std::exchange(other.bytes_, 0)) {}
        Counted& operator=(Counted other) noexcept {
            std::swap(sum_, other.sum_);
            std::swap(bytes_, other.bytes_);
            return *this;
        }
        ~Counted() { set(0); }
        void set(std::size_t bytes) {
            if (sum_) *sum_ += bytes - bytes_; // modulo 2^64
            bytes_ = bytes;
        }

    private:
        std::shared_ptr<std::atomic<std::size_t>> sum_;
        std::size_t                               bytes_ = 0;
    };
    // The results of prepare().
    struct Ahead {
        std::optional<std::string>                                forced;
        std::shared_ptr<const Result<std::vector<std::uint64_t>>> mask;
    };

    template <class Body>
    Result<bool> work(const Effort& effort, const Body& body);
    void         begin_again();
    void         read_pushed();
    bool         go_on(std::string_view bytes);
    bool         take(Token token);
    void         make_mask(std::span<std::uint64_t> bits);
    std::string  find_forced();

    std::shared_ptr<Constraint>      constraint_;
    std::shared_ptr<const TokenTrie> tokens_;
    Rows                             rows_;
    std::vector<Thread>              threads_;
    std::string                      text_; // so far: when the automata begin anew, the text goes through them again
    bool                             may_end_ = false, ended_ = false;
    std::vector<Token>               pushed_;    // not read yet
    std::uint64_t                    epoch_ = 0; // of the automata of rows and threads; 0: none yet
    Ahead                            ahead_;
    Counted                          counted_;
    std::size_t                      refused_at_ = 0, compact_at_ = 4096;
};

} // namespace quire

module :private;

namespace quire {

// Of a mutex; one that does not wait may have none.
class Lock {
public:
    Lock(std::mutex& mutex, bool waits) : mutex_(mutex), has_(!waits && mutex.try_lock()) {
        if (!waits) return;
        mutex.lock();
        has_ = true;
    }
    ~Lock() {
        if (has_) mutex_.unlock();
    }
    Lock(const Lock&)               = delete;
    Lock&    operator=(const Lock&) = delete;
    explicit operator bool() const { return has_; }

private:
    std::mutex& mutex_;
    bool        has_;
};

Constraint::Constraint(Grammar grammar, const GrammarLimits& limits)
    : machine_(std::move(grammar), limits), short_texts_(machine_.pool(), TokenTrie::plain_character(machine_.pool())) {
    used();
    holds(bytes());
    join();
}

// Without the texts.
std::size_t Constraint::bytes() const {
    return machine_.bytes() + short_texts_.bytes() + mask_bytes_ + masks_.size() * 96 + whole_bytes_;
}

// Under the lock.
void Constraint::reset() {
    epoch_++;
    short_texts_.reset();
    masks_ = {}, whole_ = {};
    mask_bytes_ = whole_bytes_ = 0;
    machine_.reset();
    holds(bytes() + *state_bytes_);
}

bool Constraint::give_back() {
    const Lock lock(machine_.mutex(), false);
    if (!lock) return false;
    reset();
    return true;
}

// Under the lock, while work goes on.
void Constraint::count(const Effort& effort) {
    using Why                = WorkEnded::Why;
    ConstraintMemory& memory = ConstraintMemory::all();
    const std::size_t own    = bytes();
    holds(own + *state_bytes_);
    if (own > machine_.limits().bytes) throw WorkEnded{Why::memory};
    if (!memory.over()) return;
    if (effort.until) {
        if (own <= memory.share()) return; // others make room
        throw WorkEnded{Why::interrupted};
    }
    if (!memory.make_room(*this, own)) throw WorkEnded{Why::memory};
}

// All tokens with these bytes.
void allow(const TokenTrie& trie, Token token, std::span<std::uint64_t> bits) {
    for (; token >= 0; token = trie.next_same(token)) bits[std::size_t(token) / 64] |= std::uint64_t(1) << (token % 64);
}

void forbid(const TokenTrie& trie, Token token, std::span<std::uint64_t> bits) {
    for (; token >= 0; token = trie.next_same(token))
        bits[std::size_t(token) / 64] &= ~(std::uint64_t(1) << (token % 64));
}

// A lexeme's tokens do not depend on which lexeme it is: its masks are made with this in its place.
constexpr RegexId any_lexeme = RegexPool::nothing;

void Constraint::use(const TokenTrie& trie) {
    if (masks_of_ == trie.id()) return;
    masks_.clear();
    whole_.clear();
    mask_bytes_ = whole_bytes_ = 0;
    masks_of_                  = trie.id();
}

RegexId Constraint::relaxed(const TokenTrie& trie, RegexId left, bool long_ones) {
    return short_texts_.relaxed(left, long_ones ? trie.longest() : TokenTrie::short_bytes);
}

// The mask of a lexeme; `left`: the relaxed() expression for the rest of it.
Constraint::SharedMask Constraint::mask_of(const TokenTrie& trie, RegexId left, bool long_ones) {
    if (auto known = masks_.find(key_of(left, long_ones)); known != masks_.end()) return known->second;

    auto             mask  = std::make_shared<LexemeMask>();
    const LexerState start = machine_.lexer().only({any_lexeme, left});
    if (start == GrammarLexer::dead) return mask;
    if (long_ones) {
        walk_all(trie, trie.long_ones(), start, *mask);
    } else {
        const ShortTexts::PlainRun run = short_texts_.plain_run(left);
        const bool exact = std::min(run.least, TokenTrie::short_bytes) == std::min(run.most, TokenTrie::short_bytes);
        if (exact && run.least > 0) mask->bits.assign(trie.plain(run.least).begin(), trie.plain(run.least).end());
        const LexerState near = exact ? GrammarLexer::dead : near_state(trie, start);
        if (near != GrammarLexer::dead) walk_difference(trie, start, near, *mask);
        else walk_all(trie, exact ? trie.not_plain() : trie.short_ones(), start, *mask);
    }
    const std::size_t bytes =
        mask->bits.size() * 8 + mask->tokens.size() * sizeof(Token) + mask->exits.size() * sizeof(LexemeMask::Exit);
    if (mask_bytes_ + bytes > most_mask_bytes) {
        masks_.clear();
        mask_bytes_ = 0;
    }
    mask_bytes_ += bytes;
    masks_.emplace(key_of(left, long_ones), mask);
    return mask;
}

void Constraint::walk_all(const TokenTrie& trie, const TokenTree& tree, LexerState start, LexemeMask& mask) {
    GrammarLexer&               lexer = machine_.lexer();
    std::array<LexerState, 257> way{};
    way[0]            = start;
    const auto& nodes = tree.nodes;
    for (std::size_t n = 0; n < nodes.size();) {
        const TokenTree::Node& node = nodes[n];
        machine_.pool().spend(1);
        const LexerState next = lexer.step(way[node.depth - 1u], node.byte);
        if (next == GrammarLexer::dead) {
            n += node.size;
        } else if (lexer.has_ends(next)) {
            mask.exits.push_back({&tree, std::uint32_t(n), lexer.pairs(next)[0].left});
            n += node.size;
        } else {
            if (node.token >= 0) mask.tokens.push_back(node.token);
            way[node.depth] = next;
            n++;
        }
    }
    if (mask.bits.empty() && mask.tokens.size() * 16 < trie.words()) return;
    mask.bits.resize(trie.words());
    for (Token t : mask.tokens) allow(trie, t, mask.bits);
    mask.tokens.clear();
}

// The state in which more than half of all tokens' first bytes end, if any.
LexerState Constraint::usual_next(const TokenTrie& trie, LexerState start) {
    GrammarLexer&                                     lexer = machine_.lexer();
    const auto&                                       nodes = trie.short_ones().nodes;
    std::vector<std::pair<LexerState, std::uint32_t>> found;
    for (std::uint32_t n = 0; n < nodes.size(); n += nodes[n].size) {
        machine_.pool().spend(1);
        const LexerState next = lexer.step(start, nodes[n].byte);
        if (next == GrammarLexer::dead || lexer.has_ends(next)) continue;
        auto at = std::ranges::find(found, next, &std::pair<LexerState, std::uint32_t>::first);
        if (at == found.end()) at = found.insert(at, {next, 0});
        at->second += nodes[n].size;
    }
    for (const auto& [state, n] : found)
        if (n > nodes.size() / 2) return state;
    return GrammarLexer::dead;
}

// usual_next(), if the mask of that state exists already, or can be made without a third state's mask: because plain text may follow the
// state, or most tokens lead back to it.
LexerState Constraint::near_state(const TokenTrie& trie, LexerState start) {
    const auto left_of = [&](LexerState state) { return relaxed(trie, machine_.lexer().pairs(state)[0].left, false); };
    const LexerState near = usual_next(trie, start);
    if (near == GrammarLexer::dead) return near;
    const RegexId left = left_of(near);
    if (left == left_of(start)) return GrammarLexer::dead;
    const LexerState same = machine_.lexer().only({any_lexeme, left});
    if (same == GrammarLexer::dead || masks_.contains(key_of(left, false))) return same;
    if (short_texts_.plain_run(left).least >= TokenTrie::short_bytes) return same;
    const LexerState next = usual_next(trie, same);
    return next != GrammarLexer::dead && left_of(next) == left ? same : GrammarLexer::dead;
}

// The mask of `start` from the mask of `near`, by a walk where the two differ: below a node at which both come to one state, both allow the
// same tokens.
void Constraint::walk_difference(const TokenTrie& trie, LexerState start, LexerState near, LexemeMask& mask) {
    constexpr LexerState none  = GrammarLexer::dead; // of near: no token below the node
    GrammarLexer&        lexer = machine_.lexer();
    machine_.pool().enter();
    const SharedMask            known = mask_of(trie, relaxed(trie, lexer.pairs(near)[0].left, false), false);
    const TokenTree&            tree  = trie.short_ones();
    std::array<LexerState, 257> way{}, near_way{};
    struct Range {
        std::uint32_t first, last;
    };
    std::vector<Range> changed; // where the exits of near do not hold
    mask.bits = known->bits;
    mask.bits.resize(trie.words());
    for (Token t : known->tokens) allow(trie, t, mask.bits);
    way[0]      = start;
    near_way[0] = near;
    for (std::uint32_t n = 0; n < tree.nodes.size();) {
        const TokenTree::Node& node = tree.nodes[n];
        machine_.pool().spend(2);
        const LexerState s = way[node.depth - 1u], f = near_way[node.depth - 1u];
        const LexerState to = lexer.step(s, node.byte), near_to = f == none ? none : lexer.step(f, node.byte);
        if (f != none && to == near_to) {
            n += node.size;
            continue;
        }
        if (to == GrammarLexer::dead || lexer.has_ends(to)) {
            changed.push_back({n, n + node.size});
            if (to != GrammarLexer::dead) mask.exits.push_back({&tree, n, lexer.pairs(to)[0].left});
            for (const std::uint32_t end = n + node.size; n < end; n++)
                if (tree.nodes[n].token >= 0) forbid(trie, tree.nodes[n].token, mask.bits);
            continue;
        }
        changed.push_back({n, n + 1});
        if (node.token >= 0) allow(trie, node.token, mask.bits);
        way[node.depth]      = to;
        near_way[node.depth] = near_to == none || lexer.has_ends(near_to) ? none : near_to;
        n++;
    }
    const auto place = [&](const LexemeMask::Exit& e) { return e.tree == &tree ? e.node : trie.places()[e.node]; };
    auto       range = changed.begin();
    for (const LexemeMask::Exit& e : known->exits) {
        while (range != changed.end() && range->last <= place(e)) range++;
        if (range == changed.end() || place(e) < range->first) mask.exits.push_back(e);
    }
}

// One mask: a walk over the trie, with rows at the end of the state's own. **Owns** its stack.
class MaskWalk {
public:
    MaskWalk(Machine& machine, Rows& rows, const TokenTrie& trie, std::span<std::uint64_t> bits)
        : machine_(machine), rows_(rows), trie_(trie), bits_(bits) {}

    // Walks the nodes first..last of a tree; `threads`: the threads behind the nodes' parents.
    void walk(const TokenTree& tree, std::uint32_t first, std::uint32_t last, std::span<const Thread> threads) {
        if (first == last) return;
        const std::uint32_t top = tree.nodes[first].depth - 1u;
        stack_.assign(threads.begin(), threads.end());
        from_[top] = 0, to_[top] = std::uint32_t(stack_.size());
        for (std::uint32_t n = first; n < last;) {
            const TokenTree::Node& node = tree.nodes[n];
            const std::uint32_t    up = from_[node.depth - 1u], end = to_[node.depth - 1u];
            machine_.pool().spend(1 + end - up);
            stack_.resize(end);
            bool alive = false;
            if (end - up == 1) { // the usual case
                const Thread     t = stack_[up];
                const LexerState s = machine_.lexer().step(t.state, node.byte);
                if (s != GrammarLexer::dead && !machine_.lexer().has_ends(s)) {
                    stack_.push_back({t.row, s});
                    alive = true;
                } else if (s != GrammarLexer::dead) {
                    alive = end_lexemes({t.row, s});
                }
            } else {
                next_.clear();
                all_ended_.clear();
                for (const Thread& t : std::span(stack_).subspan(up, end - up)) {
                    const LexerState s = machine_.lexer().step(t.state, node.byte);
                    if (s == GrammarLexer::dead) continue;
                    if (machine_.lexer().goes_on(s)) next_.push_back({t.row, s});
                    if (machine_.lexer().has_ends(s)) all_ended_.push_back({t.row, s});
                }
                bool ends = false;
                if (!all_ended_.empty()) {
                    const std::int32_t row   = row_behind(all_ended_);
                    const Thread       begun = rows_.start_of(row);
                    ends                     = rows_.ends(row);
                    if (begun.state != GrammarLexer::dead && std::ranges::find(next_, begun) == next_.end())
                        next_.push_back(begun);
                }
                stack_.insert(stack_.end(), next_.begin(), next_.end());
                alive = ends || !next_.empty();
            }
            if (!alive) {
                n += node.size;
                continue;
            }
            if (node.token >= 0) allow(trie_, node.token, bits_);
            from_[node.depth] = end;
            to_[node.depth]   = std::uint32_t(stack_.size());
            n += stack_.size() == end ? node.size : 1;
        }
    }

    // Walks a node where a lexeme that began in row `row` ends, and the nodes below it.
    void exit(const TokenTree& tree, std::uint32_t node, std::int32_t row, RegexId lexeme, RegexId left) {
        machine_.pool().spend(1);
        if (row != row_ || !(ended_ == GrammarLexer::Pair{lexeme, left})) { // most calls have one lexeme and rest
            const LexerState state = machine_.lexer().only({lexeme, left});
            row_                   = row;
            ended_                 = {lexeme, left};
            stack_.clear();
            follows_ = end_lexemes({row, state});
            behind_threads_.assign(stack_.begin(), stack_.end());
        }
        if (!follows_) return;
        const TokenTree::Node& n = tree.nodes[node];
        if (n.token >= 0) allow(trie_, n.token, bits_);
        if (n.size > 1 && !behind_threads_.empty()) walk(tree, node + 1, node + n.size, behind_threads_);
    }

private:
    // Pushes the threads that go on behind ended lexemes. False: nothing follows, and the text cannot end.
    bool end_lexemes(Thread ended) {
        const std::int32_t row     = row_behind({&ended, 1});
        const Thread       begun   = rows_.start_of(row);
        const bool         goes_on = machine_.lexer().goes_on(ended.state);
        if (goes_on) stack_.push_back(ended);
        if (begun.state != GrammarLexer::dead) stack_.push_back(begun);
        return goes_on || begun.state != GrammarLexer::dead || rows_.ends(row);
    }
    // The row behind lexemes that end together, made once: very many tokens lead to a few such rows.
    std::int32_t row_behind(std::span<const Thread> ended) {
        StateKey key;
        for (const Thread& t : ended) key.add(std::uint64_t(std::uint32_t(t.row)) << 32 | std::uint32_t(t.state));
        if (const auto known = behind_.find(key); known != behind_.end()) return known->second;
        const std::int32_t row = rows_.row_after(machine_, ended);
        behind_.emplace(key, row);
        return row;
    }

    Machine&                                                 machine_;
    Rows&                                                    rows_;
    const TokenTrie&                                         trie_;
    std::span<std::uint64_t>                                 bits_;
    std::vector<Thread>                                      stack_, next_, all_ended_, behind_threads_;
    std::int32_t                                             row_ = -1; // of the last exit
    GrammarLexer::Pair                                       ended_{};
    bool                                                     follows_ = false;
    std::array<std::uint32_t, 257>                           from_, to_; // of the stack, for each depth
    std::unordered_map<StateKey, std::int32_t, StateKeyHash> behind_;
};

// -- the state of a text

ConstraintState::ConstraintState(std::shared_ptr<Constraint> constraint, std::shared_ptr<const TokenTrie> tokens)
    : constraint_(std::move(constraint)), tokens_(std::move(tokens)), counted_(constraint_->state_bytes_) {
    (void)work({}, [] {}); // where that takes too much, the first mask says so
}

std::string sentence(WorkEnded::Why why, const GrammarLimits& limits) {
    using Why = WorkEnded::Why;
    if (why == Why::depth) return "the constraint's expressions are nested too deep";
    if (why == Why::memory)
        return cat("the constraint takes more memory than is allowed (", limits.bytes >> 20, " MiB, ",
                   limits.lexer_states, " lexer states, ", limits.items, " items for one token, ", limits.kept_items,
                   " for a text)");
    return cat("the constraint takes more work for one token than is allowed (", limits.work, " steps, ", limits.rows,
               " rows)");
}

// Runs `body` with the automata of this state. If `body` throws, the rows that it began are forgotten. False: ended early by `effort`.
template <class Body>
Result<bool> ConstraintState::work(const Effort& effort, const Body& body) {
    Constraint& c = *constraint_;
    const Lock  lock(c.machine_.mutex(), !effort.until);
    if (!lock) return false;
    c.used();
    for (bool again = false;; again = true) {
        WorkBudget             budget(c.machine_.limits().work, effort, [&] { c.count(effort); });
        const RegexPool::Under under(c.machine_.pool(), budget);
        const bool             fresh = c.machine_.lexer().size() <= 2; // no text has added states
        std::string            why;
        try {
            if (epoch_ != c.epoch_) {
                budget.allow(text_.size() * 4096); // this work was counted before
                begin_again();
            }
            body();
            rows_.shrink();
            counted_.set(rows_.bytes() + text_.capacity());
            c.holds(c.bytes() + *c.state_bytes_);
            return true;
        } catch (const WorkEnded& e) {
            rows_.shrink();
            if (e.why == WorkEnded::Why::interrupted || (e.why == WorkEnded::Why::memory && effort.until)) return false;
            why = sentence(e.why, c.machine_.limits());
            if (e.why != WorkEnded::Why::memory) return fail_with(ErrorKind::limit, why);
        } catch (const std::bad_alloc&) {
            if (effort.until) return false;
            why = "there is no memory for the constraint";
        }
        // Others may have filled the automata: once more with empty ones.
        c.reset();
        if (again || fresh) return fail_with(ErrorKind::limit, why);
    }
}

// From the beginning, in automata that know nothing of the text.
void ConstraintState::begin_again() {
    Machine&            m = constraint_->machine_;
    Rows                rows;
    std::vector<Thread> threads = rows.begin(m), next;
    bool                ends    = rows.ends(0);
    std::size_t         compact = 4096;
    for (char c : text_) {
        rows.step(m, threads, static_cast<unsigned char>(c), next, ends);
        if (next.empty() && !ends)
            throw WorkEnded{WorkEnded::Why::work}; // the search for void expressions ended early this time
        std::swap(threads, next);
        if (rows.items() <= compact) continue;
        rows.compact(threads);
        compact = std::max<std::size_t>(4096, 2 * rows.items());
    }
    rows_       = std::move(rows);
    threads_    = std::move(threads);
    compact_at_ = compact;
    may_end_    = ends;
    epoch_      = constraint_->epoch_;
    if (ended_) threads_.clear();
}

// One step for as many bytes, or as it was. The rows before it are needed where it fails: only then they cannot be forgotten.
bool ConstraintState::go_on(std::string_view bytes) {
    Machine&            m       = constraint_->machine_;
    const std::size_t   n_rows  = rows_.size();
    std::vector<Thread> threads = threads_, next;
    bool                ends    = may_end_;
    try {
        text_.reserve(text_.size() + bytes.size());
        for (std::size_t i = 0; i < bytes.size(); i++) {
            rows_.step(m, threads, static_cast<unsigned char>(bytes[i]), next, ends);
            if (next.empty() && !ends) {
                rows_.cut(n_rows);
                refused_at_ = i;
                return false;
            }
            std::swap(threads, next);
        }
        if (rows_.items() > compact_at_) {
            rows_.compact(threads);
            compact_at_ = std::max<std::size_t>(4096, 2 * rows_.items());
            if (rows_.items() > m.limits().kept_items) throw WorkEnded{WorkEnded::Why::memory};
        }
    } catch (...) {
        rows_.abandon(n_rows);
        throw;
    }
    threads_ = std::move(threads);
    may_end_ = ends;
    text_ += bytes;
    ahead_ = {};
    return true;
}

bool ConstraintState::take(Token token) {
    if (ended_) return false;
    if (std::ranges::find(tokens_->ends(), token) != tokens_->ends().end()) {
        if (!may_end_) return false;
        ended_ = true;
        threads_.clear();
        ahead_ = {};
        return true;
    }
    const std::string_view bytes = token >= 0 && token < tokens_->vocab_size() ? tokens_->bytes(token) : "";
    return !bytes.empty() && go_on(bytes);
}

void ConstraintState::read_pushed() {
    while (!pushed_.empty()) {
        (void)take(pushed_.front());
        pushed_.erase(pushed_.begin());
    }
}

void ConstraintState::make_mask(std::span<std::uint64_t> bits) {
    Constraint& c = *constraint_;
    Machine&    m = c.machine_;
    std::ranges::fill(bits, 0);
    const auto end = [&] {
        for (Token t : tokens_->ends()) bits[std::size_t(t) / 64] |= std::uint64_t(1) << (t % 64);
    };
    if (ended_) return end();
    c.use(*tokens_);
    const std::size_t n_rows = rows_.size(), before = m.pool().budget()->spent();
    try {
        StateKey key;
        key.add(may_end_);
        for (const Thread& t : threads_) {
            const StateKey row = rows_.key(t.row);
            key.add(row.a), key.add(row.b), key.add(std::uint64_t(t.state));
        }
        if (const auto known = c.whole_.find(key); known != c.whole_.end()) {
            std::ranges::copy(known->second, bits.begin());
            return;
        }
        MaskWalk walk(m, rows_, *tokens_, bits);
        // The mask of one lexeme does not depend on other lexemes: a mask is the union of the lexemes' masks.
        std::vector<std::uint64_t>      used; // masks
        std::vector<GrammarLexer::Pair> pairs;
        for (const Thread& t : threads_) {
            const auto of_thread = m.lexer().pairs(t.state);
            pairs.assign(of_thread.begin(), of_thread.end());
            for (const GrammarLexer::Pair& p : pairs)
                for (const bool long_ones : {false, true}) {
                    const RegexId                left = c.relaxed(*tokens_, p.left, long_ones);
                    const Constraint::SharedMask mask = c.mask_of(*tokens_, left, long_ones);
                    m.pool().spend(1 + used.size() / 8);
                    if (std::ranges::find(used, Constraint::key_of(left, long_ones)) == used.end()) {
                        for (std::size_t w = 0; w < mask->bits.size(); w++) bits[w] |= mask->bits[w];
                        for (Token token : mask->tokens) allow(*tokens_, token, bits);
                        m.pool().spend(1 + mask->bits.size() / 16 + mask->tokens.size());
                        used.push_back(Constraint::key_of(left, long_ones));
                    }
                    for (const auto& exit : mask->exits) walk.exit(*exit.tree, exit.node, t.row, p.lexeme, exit.left);
                }
        }
        rows_.cut(n_rows);
        if (may_end_) end();
        if (m.pool().budget()->spent() - before > Constraint::much_work) {
            const std::size_t bytes = bits.size_bytes() + 96;
            if (c.whole_bytes_ + bytes > Constraint::most_whole_bytes) c.whole_ = {}, c.whole_bytes_ = 0;
            if (c.whole_.emplace(key, std::vector<std::uint64_t>(bits.begin(), bits.end())).second)
                c.whole_bytes_ += bytes;
        }
    } catch (...) {
        rows_.abandon(n_rows);
        throw;
    }
}

Result<bool> ConstraintState::mask(std::span<std::uint64_t> bits, const Effort& effort) {
    if (ahead_.mask) {
        const Result<std::vector<std::uint64_t>>& made = *ahead_.mask;
        std::ranges::fill(bits, 0);
        if (!made) return std::unexpected(made.error());
        std::ranges::copy(*made, bits.begin());
        return true;
    }
    Result<bool> made = work(effort, [&] {
        read_pushed();
        make_mask(bits);
    });
    if (!made || !*made) {
        std::ranges::fill(bits, 0);
        return made;
    }
    if (std::ranges::all_of(bits, [](std::uint64_t w) { return w == 0; }))
        return fail("no token of the vocabulary can go on with the text that the constraint asks for");
    return true;
}

Result<void> ConstraintState::mask(std::span<std::uint64_t> bits) {
    if (Result<bool> made = mask(bits, {}); !made) return std::unexpected(made.error());
    return {};
}

Result<bool> ConstraintState::prepare(bool forced, const Effort& effort) {
    if (forced) {
        ahead_.forced = forced_bytes(effort);
        if (!ahead_.forced || !ahead_.forced->empty()) return ahead_.forced.has_value();
    }
    std::vector<std::uint64_t> bits(words());
    Result<bool>               made = mask(bits, effort);
    if (made && !*made) return false;
    ahead_.mask = std::make_shared<const Result<std::vector<std::uint64_t>>>(
        made ? Result<std::vector<std::uint64_t>>(std::move(bits)) : std::unexpected(made.error()));
    return made;
}

bool ConstraintState::accept(Token token) {
    bool went = false;
    return work({},
                [&] {
                    read_pushed();
                    went = take(token);
                }) &&
           went;
}

bool ConstraintState::accept_bytes(std::string_view bytes) {
    bool went = false;
    return work({},
                [&] {
                    read_pushed();
                    went = ended_ ? bytes.empty() : go_on(bytes);
                }) &&
           went;
}

std::string ConstraintState::find_forced() {
    std::string         forced;
    Machine&            m       = constraint_->machine_;
    const std::size_t   n_rows  = rows_.size();
    std::vector<Thread> threads = threads_, next;
    bool                ends    = may_end_;
    try {
        while (!ends && !ended_ && forced.size() < most_forced) {
            int only = -1;
            m.pool().spend(64);
            for (int b = 0; b < 256 && only != -2; b++)
                for (const Thread& t : threads)
                    if (m.lexer().step(t.state, b) != GrammarLexer::dead) {
                        only = only == -1 ? b : -2;
                        break;
                    }
            if (only < 0) break;
            rows_.step(m, threads, only, next, ends);
            if (next.empty() && !ends) break;
            std::swap(threads, next);
            forced += char(only);
        }
    } catch (...) {
        rows_.abandon(n_rows);
        throw;
    }
    rows_.cut(n_rows);
    return forced;
}

// Where it takes too much nothing is forced: the mask will say so.
std::optional<std::string> ConstraintState::forced_bytes(const Effort& effort) {
    if (ahead_.forced) return ahead_.forced;
    std::string        forced;
    const Result<bool> found = work(effort, [&] {
        read_pushed();
        forced = find_forced();
    });
    if (found && !*found) return std::nullopt;
    return forced;
}

std::optional<std::vector<Token>> ConstraintState::forced_tokens(const Effort& effort) {
    const std::optional<std::string> forced = forced_bytes(effort);
    if (!forced) return std::nullopt;
    return tokens_of_forced(*forced, *tokens_);
}

} // namespace quire
