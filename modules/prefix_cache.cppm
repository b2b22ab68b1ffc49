// quire.prefix_cache: the name of a full block (a hash of it and of everything before it) and who holds it.
// **Owns** the hash table, of a size fixed at construction. Knows neither tokens nor reference counts.
module;

#define XXH_INLINE_ALL // header only: nothing to link
#include <xxhash.h>

export module quire.prefix_cache;

import quire.base;
import quire.request;
import quire.std;

export namespace quire {

using BlockHash = std::uint64_t;

// xxHash64, seed 0, of [the parent's hash, 8 bytes little-endian; nothing for the first block] and the token ids as
// int32 little-endian. Equal tokens after different prefixes get different names: their KV differs.
BlockHash chain_hash(std::optional<BlockHash> parent, std::span<const Token> block);

// hash → block, open addressing with linear probing at a load of at most one half: no allocation after construction.
class PrefixCache {
public:
    explicit PrefixCache(int n_blocks); // at most that many entries

    BlockId find(BlockHash hash) const; // or -1
    // Keeps an entry that is there already: the first block registered under a hash stays. True if it was inserted.
    bool insert(BlockHash hash, BlockId block);
    void erase(BlockHash hash); // a hash without an entry is a broken invariant
    int  size() const { return size_; }

private:
    struct Entry {
        BlockHash hash  = 0;
        BlockId   block = -1; // -1: empty
    };
    std::size_t        home(BlockHash hash) const;
    std::vector<Entry> entries_; // a power of two
    int                size_ = 0, capacity_ = 0;
};

} // namespace quire

module :private;

namespace quire {

BlockHash chain_hash(std::optional<BlockHash> parent, std::span<const Token> block) {
    static_assert(std::endian::native == std::endian::little, "the hash is defined on little-endian bytes");
    XXH64_state_t state;
    XXH64_reset(&state, 0);
    if (parent) XXH64_update(&state, &*parent, sizeof *parent);
    XXH64_update(&state, block.data(), block.size_bytes());
    return XXH64_digest(&state);
}

PrefixCache::PrefixCache(int n_blocks)
    : entries_(std::bit_ceil(std::size_t(std::max(n_blocks, 1)) * 2)), capacity_(n_blocks) {}

std::size_t PrefixCache::home(BlockHash hash) const { return std::size_t(hash) & (entries_.size() - 1); }

BlockId PrefixCache::find(BlockHash hash) const {
    for (std::size_t i = home(hash);; i = (i + 1) & (entries_.size() - 1)) {
        if (entries_[i].block < 0) return -1;
        if (entries_[i].hash == hash) return entries_[i].block;
    }
}

bool PrefixCache::insert(BlockHash hash, BlockId block) {
    std::size_t i = home(hash);
    for (; entries_[i].block >= 0; i = (i + 1) & (entries_.size() - 1))
        if (entries_[i].hash == hash) return false;
    check(size_ < capacity_, "more cached blocks than blocks");
    entries_[i] = {hash, block};
    size_++;
    return true;
}

void PrefixCache::erase(BlockHash hash) {
    const std::size_t mask = entries_.size() - 1;
    std::size_t       hole = home(hash);
    while (entries_[hole].block >= 0 && entries_[hole].hash != hash) hole = (hole + 1) & mask;
    check(entries_[hole].block >= 0, "a hash that is not in the prefix cache was erased");
    // Close the gap: move back each later entry of the run that may stand in the hole.
    for (std::size_t i = (hole + 1) & mask; entries_[i].block >= 0; i = (i + 1) & mask) {
        std::size_t distance = (i - home(entries_[i].hash)) & mask;
        if (distance >= ((i - hole) & mask)) {
            entries_[hole] = entries_[i];
            hole           = i;
        }
    }
    entries_[hole] = {};
    size_--;
}

} // namespace quire
