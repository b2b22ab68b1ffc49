// Sequences of tokens in a block manager, and the step that a scheduler would run. Included behind the imports of the block manager.
#pragma once

namespace quire::testing {

std::vector<Token>   text(int n, Token first = 0);
std::vector<BlockId> table_of(const BlockManager& m, TableId t);

// Runs the step that a scheduler would: the moves go out, everything announced is written.
std::vector<BlockCopy> step(BlockManager& m);

// A sequence as the scheduler would keep it, its prompt written in one step.
TableId filled(BlockManager& m, std::span<const Token> tokens, const CacheNamespace& space = {});

// The leading tokens that a new sequence would find.
int found(BlockManager& m, std::span<const Token> tokens, const CacheNamespace& space = {});

} // namespace quire::testing
