// quire.paging.prefix_cache: maps the name of a full block (a hash of its tokens and of all tokens before them) to the block, and finds the
// blocks that continue it. **Owns** hash tables of fixed size. Knows neither tokens nor reference counts: the caller
// that finds a block compares the tokens.
module;

#define XXH_INLINE_ALL // header only: nothing to link
#include <xxhash.h>

export module quire.paging.prefix_cache;

import quire.core.base;
import quire.paging.block;
import quire.core.std;

export namespace quire {

using BlockHash = std::uint64_t;

// Blocks are shared inside a namespace only. The one of zeros is shared by all who do not ask for their own.
struct CacheNamespace {
    std::uint64_t low = 0, high = 0;
    bool          operator==(const CacheNamespace&) const = default;
};

// The namespace of a salt: 128 bits of it and of a secret of this process, so that nobody can aim at another's.
// The empty salt is the shared namespace.
CacheNamespace cache_namespace(std::string_view salt);

// What the first block of a namespace follows.
std::optional<BlockHash> chain_root(const CacheNamespace& space);

// xxHash64, seed 0, of [the parent's hash, 8 bytes little-endian; nothing for the first block] and the token ids as
// int32 little-endian. Equal tokens after different prefixes get different names: their KV differs.
BlockHash chain_hash(std::optional<BlockHash> parent, std::span<const Token> block);
using ChainHash = decltype(&chain_hash);

// What a block follows. A hash is where to look; which entry it is says the serial, which is never given to another one. So
// an entry that names its parent's serial names all tokens before it, whatever hashes collide.
struct Prefix {
    std::optional<BlockHash> hash;       // chained up to its last block; at the beginning of a namespace chain_root()
    std::uint64_t            serial = 0; // of its entry; 0: the beginning of a namespace
};

// hash → block, open addressing with linear probing at a load of at most one half: no allocation after construction.
class BlockIndex {
public:
    explicit BlockIndex(int capacity); // at most that many entries

    BlockId find(BlockHash hash) const; // or -1
    // Keeps an entry that is there already: the first block registered under a hash stays. True if it was inserted.
    bool insert(BlockHash hash, BlockId block);
    void assign(BlockHash hash, BlockId block); // another block under a hash that is there
    void erase(BlockHash hash);                 // a hash without an entry is a broken invariant
    int  size() const { return size_; }

private:
    struct Entry {
        BlockHash hash  = 0;
        BlockId   block = -1; // -1: empty
    };
    std::size_t        home(BlockHash hash) const;
    std::size_t        position(BlockHash hash) const; // of the entry, which must be there
    std::vector<Entry> entries_;                       // a power of two
    int                size_ = 0, capacity_ = 0;
};

class PrefixCache {
public:
    explicit PrefixCache(int n_blocks);

    // -- names: the chained hash of a full block → the one block that is found by it
    BlockId find(BlockHash name) const { return names_.find(name); }
    bool    add_name(BlockHash name, BlockId block) { return names_.insert(name, block); }
    void    remove_name(BlockHash name) { names_.erase(name); }
    int     n_names() const { return names_.size(); }

    // -- continuations: the blocks that follow a prefix, the latest first; for prompts that share a part of one
    void    add_child(const Prefix& parent, BlockId block);
    void    remove_child(const Prefix& parent, BlockId block);
    BlockId first_child(const Prefix& parent) const; // or -1
    BlockId next_sibling(BlockId block) const { return siblings_[std::size_t(block)].next; }

private:
    struct Siblings {
        BlockId prev = -1, next = -1;
    };
    BlockIndex            names_, children_; // children_: a prefix → its first continuation
    std::vector<Siblings> siblings_;         // [n_blocks]
};

} // namespace quire

module :private;

namespace quire {

CacheNamespace cache_namespace(std::string_view salt) {
    if (salt.empty()) return {};
    static const std::uint64_t secret = [] {
        std::random_device random;
        return (std::uint64_t(random()) << 32) | random();
    }();
    const XXH128_hash_t hash = XXH3_128bits_withSeed(salt.data(), salt.size(), secret);
    return {hash.low64, hash.high64 | 1}; // never the shared one
}

std::optional<BlockHash> chain_root(const CacheNamespace& space) {
    if (space == CacheNamespace{}) return std::nullopt;
    return space.low ^ (space.high * 0x9e3779b97f4a7c15ull);
}

BlockHash chain_hash(std::optional<BlockHash> parent, std::span<const Token> block) {
    static_assert(std::endian::native == std::endian::little, "the hash is defined on little-endian bytes");
    XXH64_state_t state;
    XXH64_reset(&state, 0);
    if (parent) XXH64_update(&state, &*parent, sizeof *parent);
    XXH64_update(&state, block.data(), block.size_bytes());
    return XXH64_digest(&state);
}

BlockIndex::BlockIndex(int capacity)
    : entries_(std::bit_ceil(std::size_t(std::max(capacity, 1)) * 2)), capacity_(capacity) {}

std::size_t BlockIndex::home(BlockHash hash) const { return std::size_t(hash) & (entries_.size() - 1); }

BlockId BlockIndex::find(BlockHash hash) const {
    for (std::size_t i = home(hash);; i = (i + 1) & (entries_.size() - 1)) {
        if (entries_[i].block < 0) return -1;
        if (entries_[i].hash == hash) return entries_[i].block;
    }
}

bool BlockIndex::insert(BlockHash hash, BlockId block) {
    std::size_t i = home(hash);
    for (; entries_[i].block >= 0; i = (i + 1) & (entries_.size() - 1))
        if (entries_[i].hash == hash) return false;
    check(size_ < capacity_, "more cached blocks than blocks");
    entries_[i] = {hash, block};
    size_++;
    return true;
}

std::size_t BlockIndex::position(BlockHash hash) const {
    std::size_t i = home(hash);
    while (entries_[i].block >= 0 && entries_[i].hash != hash) i = (i + 1) & (entries_.size() - 1);
    check(entries_[i].block >= 0, "a hash that is not in the prefix cache was looked for");
    return i;
}

void BlockIndex::assign(BlockHash hash, BlockId block) { entries_[position(hash)].block = block; }

void BlockIndex::erase(BlockHash hash) {
    const std::size_t mask = entries_.size() - 1;
    std::size_t       hole = position(hash);
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

PrefixCache::PrefixCache(int n_blocks) : names_(n_blocks), children_(n_blocks), siblings_(std::size_t(n_blocks)) {}

// Its serial; the beginnings of namespaces stand apart from them, and two of these may meet in one list.
std::uint64_t child_key(const Prefix& parent) {
    return parent.serial > 0 ? parent.serial : parent.hash.value_or(0) | std::uint64_t(1) << 63;
}

void PrefixCache::add_child(const Prefix& parent, BlockId block) {
    const std::uint64_t key = child_key(parent);
    Siblings&           own = siblings_[std::size_t(block)];
    own                     = {-1, children_.find(key)};
    if (own.next < 0) {
        children_.insert(key, block);
        return;
    }
    siblings_[std::size_t(own.next)].prev = block;
    children_.assign(key, block);
}

void PrefixCache::remove_child(const Prefix& parent, BlockId block) {
    const Siblings own = std::exchange(siblings_[std::size_t(block)], {});
    if (own.next >= 0) siblings_[std::size_t(own.next)].prev = own.prev;
    if (own.prev >= 0) siblings_[std::size_t(own.prev)].next = own.next;
    else if (own.next >= 0) children_.assign(child_key(parent), own.next);
    else children_.erase(child_key(parent));
}

BlockId PrefixCache::first_child(const Prefix& parent) const { return children_.find(child_key(parent)); }

} // namespace quire
