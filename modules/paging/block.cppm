// quire.paging.block: physical KV blocks by number, and the copies of whole blocks that a step needs. Plain values, owns nothing.
export module quire.paging.block;

import quire.core.std;

export namespace quire {

using BlockId = std::int32_t;

// A copy of a whole block, K and V of every layer.
struct BlockCopy {
    BlockId from = 0, to = 0;
};

// The copies that must be done before a step, in this order: `swap_out` (device → host pool), `swap_in` (host pool → device), then
// `copies` inside the device's pool (copy-on-write). Each list runs in order: a block can be the target of a copy after it
// was the source of an earlier one.
struct BlockMoves {
    std::vector<BlockCopy> swap_out, swap_in, copies;

    bool empty() const { return swap_out.empty() && swap_in.empty() && copies.empty(); }
    void clear();
};

// Stands for moves that were started and all moves before them, to wait for them. 0: none.
using MoveTicket = std::uint64_t;

// 2^order blocks with consecutive ids.
struct BlockRun {
    BlockId first = -1;
    int     order = 0;

    int  size() const { return 1 << order; }
    bool operator==(const BlockRun&) const = default;
};

} // namespace quire

module :private;

namespace quire {

void BlockMoves::clear() {
    for (auto* list : {&swap_out, &swap_in, &copies}) list->clear();
}

} // namespace quire
