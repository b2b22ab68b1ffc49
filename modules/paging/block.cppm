// quire.paging.block: the id of a physical KV block, and copies of whole blocks. Plain values. Owns nothing.
export module quire.paging.block;

import quire.core.std;

export namespace quire {

using BlockId = std::int32_t;

// Whole-block copies inside the device pool (copy-on-write) or between the pools (swap).
struct BlockCopy {
    BlockId from = 0, to = 0;
};

} // namespace quire
