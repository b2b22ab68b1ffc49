// The functions of block_tools.h, compiled once for all tests.
#include <catch2/catch_test_macros.hpp>

import quire.core.base;
import quire.core.std;
import quire.paging.block;
import quire.paging.block_hash;
import quire.paging.block_manager;

#include "block_tools.h"

namespace quire::testing {

std::vector<Token> text(int n, Token first) {
    std::vector<Token> tokens(static_cast<std::size_t>(n));
    std::iota(tokens.begin(), tokens.end(), first);
    return tokens;
}

std::vector<BlockId> table_of(const BlockManager& m, TableId t) {
    auto ids = m.blocks(t);
    return {ids.begin(), ids.end()};
}

std::vector<BlockCopy> step(BlockManager& m) {
    BlockMoves moves;
    m.take_moves(moves);
    m.commit();
    m.check_invariants();
    return moves.copies;
}

TableId filled(BlockManager& m, std::span<const Token> tokens, const CacheNamespace& space) {
    const TableId t = m.open_table(space);
    REQUIRE(m.allocate(t, tokens));
    const int n = int(tokens.size()), first = m.next_unwritten(t, 0, n);
    REQUIRE(m.allocate_slots(t, n - 1, 1));
    m.will_write({t, first, n - first});
    step(m);
    m.publish(t, tokens, n);
    return t;
}

int found(BlockManager& m, std::span<const Token> tokens, const CacheNamespace& space) {
    const TableId t = m.open_table(space);
    REQUIRE(m.allocate(t, tokens));
    const int n = m.next_unwritten(t, 0, int(tokens.size()));
    step(m);
    m.close_table(t);
    return n;
}

} // namespace quire::testing
