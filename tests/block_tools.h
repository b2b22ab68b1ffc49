// Sequences of tokens in a block manager, and the step that a scheduler would run. Included behind the imports of the block manager.
#pragma once

namespace quire::testing {

inline std::vector<Token> text(int n, Token first = 0) {
    std::vector<Token> tokens(static_cast<std::size_t>(n));
    std::iota(tokens.begin(), tokens.end(), first);
    return tokens;
}

inline std::vector<BlockId> table_of(const BlockManager& m, TableId t) {
    auto ids = m.blocks(t);
    return {ids.begin(), ids.end()};
}

// Runs the step that a scheduler would: the moves go out, everything announced is written.
inline std::vector<BlockCopy> step(BlockManager& m) {
    BlockMoves moves;
    m.take_moves(moves);
    m.commit();
    m.check_invariants();
    return moves.copies;
}

// A sequence as the scheduler would keep it, its prompt written in one step.
inline TableId filled(BlockManager& m, std::span<const Token> tokens, const CacheNamespace& space = {}) {
    const TableId t = m.open_table(space);
    REQUIRE(m.allocate(t, tokens));
    const int n = int(tokens.size()), first = m.next_unwritten(t, 0, n);
    REQUIRE(m.allocate_slots(t, n - 1, 1));
    m.will_write({t, first, n - first});
    step(m);
    m.publish(t, tokens, n);
    return t;
}

// The leading tokens that a new sequence would find.
inline int found(BlockManager& m, std::span<const Token> tokens, const CacheNamespace& space = {}) {
    const TableId t = m.open_table(space);
    REQUIRE(m.allocate(t, tokens));
    const int n = m.next_unwritten(t, 0, int(tokens.size()));
    step(m);
    m.close_table(t);
    return n;
}

} // namespace quire::testing
