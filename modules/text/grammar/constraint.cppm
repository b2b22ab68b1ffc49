// quire.text.grammar.constraint: what a text may be, compiled (Constraint, shared), and how far one text has come (ConstraintState,
// a value that is copied where a sequence forks): which tokens may come next, as bits.
export module quire.text.grammar.constraint;

import quire.core.base;
import quire.core.std;
import quire.text.grammar.grammar;
import quire.text.grammar.lexer;
import quire.text.grammar.recogniser;
import quire.text.grammar.regex;
import quire.text.grammar.short_texts;
export import quire.text.grammar.token_trie;

export namespace quire {

// **Owns** the grammar with its automata, and masks that come again. Any thread may use it; one at a time works in it.
class Constraint {
public:
    // The grammar is finish()ed.
    Constraint(Grammar grammar, const GrammarLimits& limits = {});

private:
    friend class ConstraintState;
    // What tokens make of what is left of one lexeme: those that stay within it, and the nodes of trees where it ends.
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

    SharedMask mask_of(const TokenTrie& trie, RegexId left, bool long_ones, std::size_t& work);
    void walk_all(const TokenTrie& trie, const TokenTree& tree, LexerState start, LexemeMask& mask, std::size_t& work);
    void walk_difference(const TokenTrie& trie, LexerState start, LexerState near, LexemeMask& mask, std::size_t& work);
    LexerState usual_next(const TokenTrie& trie, LexerState start);
    LexerState near_state(const TokenTrie& trie, LexerState start);
    // Whole masks that took much work, as those of free text do, where a lexeme may end anywhere.
    static constexpr std::size_t much_work = 4096, most_whole_bytes = std::size_t(8) << 20;
    // Steps that a new state of the lexer counts as: its derivatives take as long as going to some hundred known ones.
    static constexpr std::size_t work_of_state = 200;

    Machine                                       machine_;
    ShortTexts                                    short_texts_;
    std::unordered_map<std::uint64_t, SharedMask> masks_;
    std::size_t                                   mask_bytes_ = 0;
    std::uint64_t                                 masks_of_   = 0; // the trie's address: they are of one
    std::unordered_map<StateKey, std::vector<std::uint64_t>, StateKeyHash> whole_;
};

// One text under a constraint. Depends on the tokens alone that were accepted.
class ConstraintState {
public:
    ConstraintState() = default; // unconstrained: nothing below may be called
    ConstraintState(std::shared_ptr<Constraint> constraint, std::shared_ptr<const TokenTrie> tokens);

    explicit operator bool() const { return constraint_ != nullptr; }

    // One bit for each token of the vocabulary, in `words()` words: whether it may come next. The tokens that end the text are
    // among them where it may end. Error: no token may come, or a limit of work is exceeded; then all bits are 0.
    Result<void>     mask(std::span<std::uint64_t> bits);
    std::size_t      words() const { return tokens_->words(); }
    const TokenTrie& tokens() const { return *tokens_; }
    // Both work in the same Constraint, so one waits for the other.
    bool shares_with(const ConstraintState& other) const { return constraint_ == other.constraint_; }
    // Goes on by a token, or by bytes. False, and as it was: that is not allowed. An end token ends the text.
    bool accept(Token token);
    // The same for a token that mask() allowed, later: when the next mask is made, which is while a step runs.
    void push(Token token) {
        read_pushed();
        pushed_ = token;
    }
    bool accept_bytes(std::string_view bytes);
    // Whether the text is complete as it is; whether an end token came. What was pushed since the last mask does not count.
    bool may_end() const { return may_end_; }
    bool ended() const { return ended_; }
    // The bytes that must come next, as there is no choice; at most `most`.
    std::string forced_bytes(std::size_t most = 256);
    // Index of the byte at which accept_bytes refused.
    std::size_t refused_at() const { return refused_at_; }
    // That are kept of the text so far: for tests of bounds.
    std::size_t rows() const { return rows_.size(); }

private:
    void read_pushed() {
        if (const Token token = std::exchange(pushed_, -1); token >= 0) (void)accept(token);
    }

    std::shared_ptr<Constraint>      constraint_;
    std::shared_ptr<const TokenTrie> tokens_;
    Rows                             rows_;
    std::vector<Thread>              threads_;
    bool                             may_end_ = false, ended_ = false;
    Token                            pushed_     = -1; // not read yet
    std::size_t                      refused_at_ = 0, compact_at_ = 4096;
};

} // namespace quire

module :private;

namespace quire {

Constraint::Constraint(Grammar grammar, const GrammarLimits& limits)
    : machine_(std::move(grammar), limits), short_texts_(machine_.pool(), TokenTrie::plain_character(machine_.pool())) {
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

Constraint::SharedMask Constraint::mask_of(const TokenTrie& trie, RegexId left, bool long_ones, std::size_t& work) {
    if (masks_of_ != std::bit_cast<std::uint64_t>(&trie)) {
        masks_.clear();
        whole_.clear();
        mask_bytes_ = 0;
        masks_of_   = std::bit_cast<std::uint64_t>(&trie);
    }
    left                    = short_texts_.relaxed(left, long_ones ? trie.longest() : TokenTrie::short_bytes);
    const std::uint64_t key = std::uint64_t(left) << 1 | std::uint64_t(long_ones);
    if (auto known = masks_.find(key); known != masks_.end()) return known->second;

    auto             mask  = std::make_shared<LexemeMask>();
    const LexerState start = machine_.lexer().only({any_lexeme, left});
    if (start == GrammarLexer::dead) return mask; // no room: the lexer says so
    if (long_ones) {
        walk_all(trie, trie.long_ones(), start, *mask, work);
    } else {
        const ShortTexts::PlainRun run = short_texts_.plain_run(left);
        const bool exact = std::min(run.least, TokenTrie::short_bytes) == std::min(run.most, TokenTrie::short_bytes);
        if (exact && run.least > 0) mask->bits.assign(trie.plain(run.least).begin(), trie.plain(run.least).end());
        const LexerState near = exact ? GrammarLexer::dead : near_state(trie, start);
        if (near != GrammarLexer::dead) walk_difference(trie, start, near, *mask, work);
        else walk_all(trie, exact ? trie.not_plain() : trie.short_ones(), start, *mask, work);
    }
    if (machine_.lexer().full() || work > machine_.limits().work) return mask; // not all of it
    const std::size_t bytes =
        mask->bits.size() * 8 + mask->tokens.size() * sizeof(Token) + mask->exits.size() * sizeof(LexemeMask::Exit);
    if (mask_bytes_ + bytes > most_mask_bytes) {
        masks_.clear();
        mask_bytes_ = 0;
    }
    mask_bytes_ += bytes;
    masks_.emplace(key, mask);
    return mask;
}

void Constraint::walk_all(const TokenTrie& trie, const TokenTree& tree, LexerState start, LexemeMask& mask,
                          std::size_t& work) {
    GrammarLexer&               lexer = machine_.lexer();
    std::array<LexerState, 257> way{};
    way[0]             = start;
    const auto& nodes  = tree.nodes;
    std::size_t states = lexer.size();
    for (std::size_t n = 0; n < nodes.size() && work <= machine_.limits().work;) {
        const TokenTree::Node& node = nodes[n];
        const LexerState       next = lexer.step(way[node.depth - 1u], node.byte);
        work += 1 + work_of_state * (lexer.size() - std::exchange(states, lexer.size()));
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

// The same, if its own mask is there, or is made without another's: plain text may follow, or most tokens lead back to it.
LexerState Constraint::near_state(const TokenTrie& trie, LexerState start) {
    const auto left_of = [&](LexerState state) {
        return short_texts_.relaxed(machine_.lexer().pairs(state)[0].left, TokenTrie::short_bytes);
    };
    const LexerState near = usual_next(trie, start);
    if (near == GrammarLexer::dead) return near;
    const RegexId left = left_of(near);
    if (left == left_of(start)) return GrammarLexer::dead;
    const LexerState same = machine_.lexer().only({any_lexeme, left});
    if (same == GrammarLexer::dead || masks_.contains(std::uint64_t(left) << 1)) return same;
    if (short_texts_.plain_run(left).least >= TokenTrie::short_bytes) return same;
    const LexerState next = usual_next(trie, same);
    return next != GrammarLexer::dead && left_of(next) == left ? same : GrammarLexer::dead;
}

// The mask of `start` from that of `near`, by a walk where the two differ: below a node at which both come to the same state, the
// same tokens are allowed.
void Constraint::walk_difference(const TokenTrie& trie, LexerState start, LexerState near, LexemeMask& mask,
                                 std::size_t& work) {
    constexpr LexerState        none  = GrammarLexer::dead; // of near: it has nothing to say below
    GrammarLexer&               lexer = machine_.lexer();
    const SharedMask            known = mask_of(trie, lexer.pairs(near)[0].left, false, work);
    const TokenTree&            tree  = trie.short_ones();
    std::array<LexerState, 257> way{}, near_way{};
    struct Range {
        std::uint32_t first, last;
    };
    std::vector<Range> changed; // where the exits of near do not hold
    mask.bits = known->bits;
    mask.bits.resize(trie.words());
    for (Token t : known->tokens) allow(trie, t, mask.bits);
    way[0]             = start;
    near_way[0]        = near;
    std::size_t states = lexer.size();
    for (std::uint32_t n = 0; n < tree.nodes.size() && work <= machine_.limits().work;) {
        const TokenTree::Node& node = tree.nodes[n];
        const LexerState       s = way[node.depth - 1u], f = near_way[node.depth - 1u];
        const LexerState       to = lexer.step(s, node.byte), near_to = f == none ? none : lexer.step(f, node.byte);
        work += 1 + work_of_state * (lexer.size() - std::exchange(states, lexer.size()));
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

ConstraintState::ConstraintState(std::shared_ptr<Constraint> constraint, std::shared_ptr<const TokenTrie> tokens)
    : constraint_(std::move(constraint)), tokens_(std::move(tokens)) {
    std::scoped_lock lock(constraint_->machine_.mutex());
    threads_ = rows_.begin(constraint_->machine_);
    may_end_ = rows_.ends(0);
}

// One mask: a walk over the trie, with rows at the end of the state's own. **Owns** its stack.
class MaskWalk {
public:
    MaskWalk(Machine& machine, Rows& rows, const TokenTrie& trie, std::span<std::uint64_t> bits)
        : machine_(machine), rows_(rows), trie_(trie), bits_(bits), most_work_(machine.limits().work) {}

    std::size_t work = 0;

    bool exhausted() const { return work > most_work_ || rows_.size() > machine_.limits().rows; }

    // The nodes first..last of a tree, whose parents were walked to `threads`.
    void walk(const TokenTree& tree, std::uint32_t first, std::uint32_t last, std::span<const Thread> threads) {
        if (first == last) return;
        const std::uint32_t top = tree.nodes[first].depth - 1u;
        stack_.assign(threads.begin(), threads.end());
        from_[top] = 0, to_[top] = std::uint32_t(stack_.size());
        for (std::uint32_t n = first; n < last && !exhausted();) {
            const TokenTree::Node& node = tree.nodes[n];
            const std::uint32_t    up = from_[node.depth - 1u], end = to_[node.depth - 1u];
            work++;
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

    // A node where a lexeme that began in a row ends, and those below it.
    void exit(const TokenTree& tree, std::uint32_t node, std::int32_t row, RegexId lexeme, RegexId left) {
        if (exhausted()) return;
        if (row != row_ || !(ended_ == GrammarLexer::Pair{lexeme, left})) { // most end with the same left
            const LexerState state = machine_.lexer().only({lexeme, left});
            if (state == GrammarLexer::dead) return; // no room: the lexer says so
            row_   = row;
            ended_ = {lexeme, left};
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
    // Pushes what goes on; the row behind the lexemes is made once. False: nothing follows, and the text cannot end.
    bool end_lexemes(Thread ended) {
        const std::int32_t row     = row_behind({&ended, 1});
        const Thread       begun   = rows_.start_of(row);
        const bool         goes_on = machine_.lexer().goes_on(ended.state);
        if (goes_on) stack_.push_back(ended);
        if (begun.state != GrammarLexer::dead) stack_.push_back(begun);
        return goes_on || begun.state != GrammarLexer::dead || rows_.ends(row);
    }
    // The row behind lexemes that end together, made once: texts of very many tokens come to the same few.
    std::int32_t row_behind(std::span<const Thread> ended) {
        StateKey key;
        for (const Thread& t : ended) key.add(std::uint64_t(std::uint32_t(t.row)) << 32 | std::uint32_t(t.state));
        const auto [known, added] = behind_.try_emplace(key, 0);
        if (added) {
            known->second = rows_.row_after(machine_, ended);
            work += rows_.take_work();
        }
        return known->second;
    }

    Machine&                                                 machine_;
    Rows&                                                    rows_;
    const TokenTrie&                                         trie_;
    std::span<std::uint64_t>                                 bits_;
    std::size_t                                              most_work_;
    std::vector<Thread>                                      stack_, next_, all_ended_, behind_threads_;
    std::int32_t                                             row_ = -1; // of the last exit
    GrammarLexer::Pair                                       ended_{};
    bool                                                     follows_ = false;
    std::array<std::uint32_t, 257>                           from_, to_; // of the stack, for each depth
    std::unordered_map<StateKey, std::int32_t, StateKeyHash> behind_;
};

Result<void> ConstraintState::mask(std::span<std::uint64_t> bits) {
    read_pushed();
    std::ranges::fill(bits, 0);
    const auto end = [&] {
        for (Token t : tokens_->ends()) bits[std::size_t(t) / 64] |= std::uint64_t(1) << (t % 64);
    };
    if (ended_) return end(), Result<void>();
    Machine&          m = constraint_->machine_;
    std::scoped_lock  lock(m.mutex());
    const std::size_t n_rows = rows_.size();
    StateKey          key;
    key.add(may_end_);
    for (const Thread& t : threads_) {
        const StateKey row = rows_.key(t.row);
        key.add(row.a), key.add(row.b), key.add(std::uint64_t(t.state));
    }
    if (constraint_->masks_of_ == std::bit_cast<std::uint64_t>(tokens_.get()))
        if (const auto known = constraint_->whole_.find(key); known != constraint_->whole_.end()) {
            std::ranges::copy(known->second, bits.begin());
            return {};
        }
    MaskWalk walk(m, rows_, *tokens_, bits);
    // What one lexeme allows does not depend on the others: a mask is the union of theirs.
    std::vector<Constraint::SharedMask> used;
    std::vector<GrammarLexer::Pair>     pairs;
    for (const Thread& t : threads_) {
        const auto of_thread = m.lexer().pairs(t.state);
        pairs.assign(of_thread.begin(), of_thread.end());
        for (const GrammarLexer::Pair& p : pairs)
            for (const bool long_ones : {false, true}) {
                if (walk.exhausted() || m.lexer().full()) break;
                Constraint::SharedMask mask = constraint_->mask_of(*tokens_, p.left, long_ones, walk.work);
                if (std::ranges::find(used, mask) == used.end()) {
                    for (std::size_t w = 0; w < mask->bits.size(); w++) bits[w] |= mask->bits[w];
                    for (Token token : mask->tokens) allow(*tokens_, token, bits);
                }
                for (const auto& exit : mask->exits) walk.exit(*exit.tree, exit.node, t.row, p.lexeme, exit.left);
                used.push_back(std::move(mask));
            }
    }
    const bool exhausted = walk.exhausted() || m.lexer().full() || m.pool().size() > m.limits().expressions;
    rows_.cut(n_rows);
    if (may_end_) end();
    if (exhausted) {
        std::ranges::fill(bits, 0);
        return fail_with(ErrorKind::limit, "the constraint takes more work for one token than is allowed (",
                         m.limits().work, " steps, ", m.limits().rows, " rows, ", m.limits().lexer_states,
                         " lexer states, ", m.limits().expressions, " expressions)");
    }
    if (std::ranges::all_of(bits, [](std::uint64_t w) { return w == 0; }))
        return fail("no token of the vocabulary can go on with the text that the constraint asks for");
    if (walk.work > Constraint::much_work) {
        auto& whole = constraint_->whole_;
        if (whole.size() * bits.size_bytes() > Constraint::most_whole_bytes) whole.clear();
        whole.emplace(key, std::vector<std::uint64_t>(bits.begin(), bits.end()));
    }
    return {};
}

bool ConstraintState::accept(Token token) {
    read_pushed();
    if (std::ranges::find(tokens_->ends(), token) != tokens_->ends().end()) {
        if (!may_end_) return false;
        ended_ = true;
        threads_.clear();
        return true;
    }
    const std::string_view bytes = token >= 0 && token < tokens_->vocab_size() ? tokens_->bytes(token) : "";
    return !bytes.empty() && accept_bytes(bytes);
}

bool ConstraintState::accept_bytes(std::string_view bytes) {
    read_pushed();
    if (ended_) return bytes.empty();
    Machine&            m = constraint_->machine_;
    std::scoped_lock    lock(m.mutex());
    const std::size_t   n_rows  = rows_.size();
    std::vector<Thread> threads = threads_, next;
    bool                ends    = may_end_;
    for (std::size_t i = 0; i < bytes.size(); i++) {
        rows_.step(m, threads, static_cast<unsigned char>(bytes[i]), next, ends);
        if (next.empty() && !ends) {
            rows_.cut(n_rows);
            refused_at_ = i;
            return false;
        }
        std::swap(threads, next);
        if (rows_.items() > compact_at_) {
            // Rows before this call are needed where it fails: only then they cannot be forgotten.
            if (i + 1 < bytes.size()) continue;
            rows_.compact(threads);
            compact_at_ = std::max<std::size_t>(4096, 2 * rows_.items());
        }
    }
    (void)rows_.take_work();
    threads_ = std::move(threads);
    may_end_ = ends;
    return true;
}

std::string ConstraintState::forced_bytes(std::size_t most) {
    std::string forced;
    read_pushed();
    if (ended_) return forced;
    Machine&            m = constraint_->machine_;
    std::scoped_lock    lock(m.mutex());
    const std::size_t   n_rows  = rows_.size();
    std::vector<Thread> threads = threads_, next;
    bool                ends    = may_end_;
    while (!ends && forced.size() < most) {
        int only = -1;
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
    rows_.cut(n_rows);
    (void)rows_.take_work();
    return forced;
}

} // namespace quire
