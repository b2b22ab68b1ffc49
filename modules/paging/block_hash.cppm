// quire.paging.block_hash: how the prefix cache identifies a full block: by a hash of its tokens and of all tokens before them,
// chained from block to block within a namespace. Plain values, owns nothing.
module;

#define XXH_INLINE_ALL // header only: nothing to link
#include <xxhash.h>

export module quire.paging.block_hash;

import quire.core.base;
import quire.core.std;
import quire.paging.block;

export namespace quire {

using BlockHash = std::uint64_t;

// Blocks are shared inside a namespace only. The namespace of zeros is that of all requests without a salt and adapters.
struct CacheNamespace {
    std::uint64_t low = 0, high = 0;
    bool          operator==(const CacheNamespace&) const = default;

    // The namespace of one request: nothing finds its blocks when that has ended.
    static CacheNamespace temporary(std::uint64_t request) { return {request, ~std::uint64_t(0)}; }
    bool                  is_temporary() const { return high == ~std::uint64_t(0); }
};

// The namespace of a salt: 128 bits of it and of a secret of this process, so that no client can aim at that of another client.
// The empty salt is the shared namespace.
CacheNamespace cache_namespace(std::string_view salt);

// The part of a namespace in which K and V are those of a model with adapters. `adapters`: bytes that identify the adapters, the same in every process;
// none: the namespace itself.
CacheNamespace with_adapters(const CacheNamespace& space, std::string_view adapters);

// The parent hash of the first blocks of a namespace.
std::optional<BlockHash> chain_root(const CacheNamespace& space);

// xxHash64, seed 0, of [the parent's hash, 8 bytes little-endian; nothing for the first block] and the token ids as
// int32 little-endian. Equal tokens after different prefixes get different hashes: their KV differs.
BlockHash chain_hash(std::optional<BlockHash> parent, std::span<const Token> block);
using ChainHash = decltype(&chain_hash);

// The entry that a block follows. The hash says where to look; the serial, which no other entry ever gets, says which entry it is. So an
// entry that refers to its parent's serial identifies all tokens before it, whatever hashes collide.
struct Prefix {
    std::optional<BlockHash> hash;       // chained up to its last block; at the beginning of a namespace chain_root()
    std::uint64_t            serial = 0; // of the entry of its last block; 0: the beginning of a namespace
    bool                     operator==(const Prefix&) const = default;
};

// Where something of the prefix cache is.
enum class Medium : std::uint8_t { device, host, files };

// The memory of a cache group for a full block of the shared namespace, or the recurrent state at its end, that can be found from now on, or no
// longer: for routers.
struct CacheChange {
    bool                     stored = false;
    BlockHash                hash   = 0;
    std::optional<BlockHash> parent;     // stored: of the block before it; none: it begins a prompt
    std::vector<Token>       tokens;     // stored: its own
    int                      group  = 0; // of CacheLayout::groups
    int                      window = 0; // positions that the group's layers see; 0: all
    bool                     state  = false;
    Medium                   medium = Medium::device;
};

// The state of a block's hash. From `reserved` on the block can be shared. Its K and V can be read when it is cached, and by
// sequences later in the same step when it is in flight.
enum class HashState : std::uint8_t {
    none,      // the block is not full, or its tokens are not known yet
    reserved,  // its tokens are known, and no step computes them yet
    in_flight, // the step at hand writes K and V
    cached,    // K and V are written
};

// The entry of a block in the prefix cache: enough to compare the block with a prompt, and to find it again after a swap.
struct CacheEntry {
    HashState    state    = HashState::none;
    std::int16_t n_tokens = 0; // block_size; fewer: the last block of a pinned prefix, which has no hash
    // Of an entry in another lane than the first: the block of the first lane that it belongs to, whose hash and serial it has.
    BlockId        owner = -1;
    BlockHash      hash  = 0;
    Prefix         parent;
    CacheNamespace space;
    std::uint64_t  serial = 0; // from 1, in the order in which entries are made
    std::int32_t   depth  = 0; // blocks of the text before this one
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

CacheNamespace with_adapters(const CacheNamespace& space, std::string_view adapters) {
    if (adapters.empty()) return space;
    std::string bytes(reinterpret_cast<const char*>(&space), sizeof space);
    bytes += adapters;
    const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
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

} // namespace quire
