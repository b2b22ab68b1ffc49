// quire.constraint.grammar.lexeme_masks: which tokens may follow within one lexeme, whatever the rest of the grammar says: the parts of which
// the mask of a text is made. **Owns** the masks, and the simpler expressions that they are made for.
export module quire.constraint.grammar.lexeme_masks;

import quire.constraint.grammar.recogniser;
import quire.constraint.grammar.short_texts;
import quire.constraint.grammar.token_trie;
import quire.core.base;

export namespace quire {

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

// Of one machine, which must outlive it and under whose lock it is used.
class LexemeMasks {
public:
    using Shared = std::shared_ptr<const LexemeMask>;

    explicit LexemeMasks(Machine& machine)
        : machine_(machine), short_texts_(machine.pool(), TokenTrie::plain_character(machine.pool())) {}

    // All masks belong to this trie from now on. Returns whether those of another one were forgotten.
    bool use(const TokenTrie& trie);
    // The expression that stands for the rest `left` of a lexeme: it allows the same short tokens, or the same long ones.
    RegexId relaxed(const TokenTrie& trie, RegexId left, bool long_ones);
    // The mask of a lexeme; `left`: the relaxed() expression for the rest of it.
    Shared mask_of(const TokenTrie& trie, RegexId left, bool long_ones);
    // A name for that mask.
    static inline std::uint64_t key_of(RegexId relaxed, bool long_ones) {
        return std::uint64_t(relaxed) << 1 | std::uint64_t(long_ones);
    }
    std::size_t bytes() const;
    void        reset(); // forgets all

private:
    static constexpr std::size_t most_mask_bytes = std::size_t(16) << 20;

    void       walk_all(const TokenTrie& trie, const TokenTree& tree, LexerState start, LexemeMask& mask);
    void       walk_difference(const TokenTrie& trie, LexerState start, LexerState near, LexemeMask& mask);
    LexerState usual_next(const TokenTrie& trie, LexerState start);
    LexerState near_state(const TokenTrie& trie, LexerState start);

    Machine&                                  machine_;
    ShortTexts                                short_texts_;
    std::unordered_map<std::uint64_t, Shared> masks_;
    std::size_t                               mask_bytes_ = 0;
    std::uint64_t                             masks_of_   = 0; // id of the trie that all masks belong to
};

} // namespace quire

module :private;

namespace quire {

// A lexeme's tokens do not depend on which lexeme it is: its masks are made with this in its place.
constexpr RegexId any_lexeme = RegexPool::nothing;

bool LexemeMasks::use(const TokenTrie& trie) {
    if (masks_of_ == trie.id()) return false;
    masks_.clear();
    mask_bytes_ = 0;
    masks_of_   = trie.id();
    return true;
}

std::size_t LexemeMasks::bytes() const { return short_texts_.bytes() + mask_bytes_ + masks_.size() * 96; }

void LexemeMasks::reset() {
    short_texts_.reset();
    masks_      = {};
    mask_bytes_ = 0;
}

RegexId LexemeMasks::relaxed(const TokenTrie& trie, RegexId left, bool long_ones) {
    return short_texts_.relaxed(left, long_ones ? trie.longest() : TokenTrie::short_bytes);
}

LexemeMasks::Shared LexemeMasks::mask_of(const TokenTrie& trie, RegexId left, bool long_ones) {
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

void LexemeMasks::walk_all(const TokenTrie& trie, const TokenTree& tree, LexerState start, LexemeMask& mask) {
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
    for (Token t : mask.tokens) trie.allow(t, mask.bits);
    mask.tokens.clear();
}

// The state in which more than half of all tokens' first bytes end, if any.
LexerState LexemeMasks::usual_next(const TokenTrie& trie, LexerState start) {
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
LexerState LexemeMasks::near_state(const TokenTrie& trie, LexerState start) {
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
void LexemeMasks::walk_difference(const TokenTrie& trie, LexerState start, LexerState near, LexemeMask& mask) {
    constexpr LexerState none  = GrammarLexer::dead; // of near: no token below the node
    GrammarLexer&        lexer = machine_.lexer();
    machine_.pool().enter();
    const Shared                known = mask_of(trie, relaxed(trie, lexer.pairs(near)[0].left, false), false);
    const TokenTree&            tree  = trie.short_ones();
    std::array<LexerState, 257> way{}, near_way{};
    struct Range {
        std::uint32_t first, last;
    };
    std::vector<Range> changed; // where the exits of near do not hold
    mask.bits = known->bits;
    mask.bits.resize(trie.words());
    for (Token t : known->tokens) trie.allow(t, mask.bits);
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
                if (tree.nodes[n].token >= 0) trie.forbid(tree.nodes[n].token, mask.bits);
            continue;
        }
        changed.push_back({n, n + 1});
        if (node.token >= 0) trie.allow(node.token, mask.bits);
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

} // namespace quire
