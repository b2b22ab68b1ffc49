// quire.constraint.grammar.mask_walk: which tokens go on with a text behind the end of a lexeme: the tokens' bytes, through lexer and grammar.
// **Owns** the stack of a walk.
export module quire.constraint.grammar.mask_walk;

import quire.constraint.grammar.recogniser;
import quire.constraint.grammar.token_trie;
import quire.core.base;

export namespace quire {

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
            if (node.token >= 0) trie_.allow(node.token, bits_);
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
        if (n.token >= 0) trie_.allow(n.token, bits_);
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

} // namespace quire
