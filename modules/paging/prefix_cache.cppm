// quire.paging.prefix_cache: finds the blocks that hold the beginning of a prompt. **Owns** the index from hashes to blocks, of
// fixed size; the entries themselves stand with the blocks in their pool. A hit is compared token by token.
//
// A block gets its hash as soon as its tokens are known, so that a request with the same beginning can share it at once:
//
//      none ──insert()──► reserved ──begin_write()──► in flight ──commit()──► cached
//        └───────────────── insert(), for generated tokens ──────────────────────┘
//
// The first sharer that runs writes a reserved block; the others wait for it. If that sharer goes away, another one writes.
export module quire.paging.prefix_cache;

import quire.core.base;
import quire.core.std;
import quire.paging.block;
import quire.paging.block_hash;
import quire.paging.block_pool;

export namespace quire {

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

// What the cache has for a prompt.
struct CacheHit {
    int     n_blocks = 0, n_free = 0; // whole blocks; those of them that are on the free list
    BlockId partial          = -1;    // a block to copy for the first tokens of the next
    int     n_partial_tokens = 0;
};

class PrefixCache {
public:
    // `pool` outlives the cache.
    PrefixCache(BlockPool& pool, ChainHash hash);

    // How much of a prompt is there: whole blocks without a gap, then the longest part of a block that continues them. The last
    // token is always left to compute.
    CacheHit  match(const CacheNamespace& space, std::span<const Token> tokens) const;
    BlockHash hash_of(const Prefix& parent, std::span<const Token> tokens) const { return hash_(parent.hash, tokens); }
    BlockId   find(BlockHash hash) const { return index_.find(hash); } // or -1; the caller compares with holds()
    // Whether a block holds these tokens, and all of the prefix before them.
    bool   holds(BlockId block, const Prefix& parent, const CacheNamespace& space, std::span<const Token> tokens) const;
    Prefix prefix_of(BlockId block) const { return {pool_.entry(block).hash, pool_.entry(block).serial}; }
    // The block that a prefix ends with, or -1.
    BlockId block_of(const Prefix& prefix) const;
    bool    is_known(const Prefix& prefix) const { return prefix.serial == 0 || block_of(prefix) >= 0; }

    // Gives a block without an entry one, and a serial if it had none before a swap. A full block's hash must not be in the index.
    void insert(BlockId block, CacheEntry entry, std::span<const Token> tokens);
    void begin_write(BlockId block); // reserved → in flight; otherwise nothing
    void commit();                   // all in flight → cached
    // Removes a block's entry, and those of all blocks that continue it, which nobody could find any more.
    void evict(BlockId block);

    // Whether it notes what changes, and what has changed since the last call.
    void                     log_changes(bool on);
    std::vector<CacheChange> take_changes() { return std::exchange(changes_, {}); }

    void check_invariants() const;

private:
    struct Siblings {
        BlockId prev = -1, next = -1;
    };
    void    set_cached(BlockId block);
    void    remove(BlockId block);
    void    add_child(const Prefix& parent, BlockId block);
    void    remove_child(const Prefix& parent, BlockId block);
    BlockId first_child(const Prefix& parent) const; // or -1

    BlockPool&            pool_;
    ChainHash             hash_;
    std::uint64_t         last_serial_ = 0;
    BlockIndex            index_;
    BlockIndex            children_; // a prefix → the cached block that continues it, the latest
    std::vector<Siblings> siblings_; // [n_blocks] the other continuations, from the latest to the first
    std::vector<BlockId>  in_flight_;

    bool                     logging_ = false;
    std::vector<CacheChange> changes_;
    bool                     is_told(const CacheEntry& entry) const {
        return logging_ && entry.n_tokens == pool_.block_size() && entry.space == CacheNamespace{};
    }
};

} // namespace quire

module :private;

namespace quire {

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

// -- finding

PrefixCache::PrefixCache(BlockPool& pool, ChainHash hash)
    : pool_(pool), hash_(hash), index_(pool.size()), children_(pool.size()), siblings_(std::size_t(pool.size())) {
    in_flight_.reserve(std::size_t(pool.size()));
}

bool PrefixCache::holds(BlockId id, const Prefix& parent, const CacheNamespace& space,
                        std::span<const Token> tokens) const {
    const CacheEntry& entry = pool_.entry(id);
    return entry.parent.serial == parent.serial && entry.space == space && entry.n_tokens >= int(tokens.size()) &&
           std::ranges::equal(pool_.tokens(id).first(tokens.size()), tokens);
}

BlockId PrefixCache::block_of(const Prefix& prefix) const {
    const BlockId id = prefix.hash ? index_.find(*prefix.hash) : -1;
    return id >= 0 && pool_.entry(id).serial == prefix.serial ? id : -1;
}

CacheHit PrefixCache::match(const CacheNamespace& space, std::span<const Token> tokens) const {
    constexpr int most_siblings = 64; // so that a prefix with many continuations costs no more than this
    CacheHit      hit;
    const auto    size = std::size_t(pool_.block_size());
    Prefix        parent{chain_root(space)};
    std::size_t   done = 0;
    for (; done + size <= tokens.size(); done += size) {
        std::span<const Token> want = tokens.subspan(done, size);
        const BlockId          id   = index_.find(hash_of(parent, want));
        if (id < 0 || !holds(id, parent, space, want)) break;
        // A cached block up to the very end would leave nothing to compute: a part of it will do.
        if (done + size == tokens.size() && pool_.state(id) == HashState::cached) break;
        hit.n_blocks++;
        hit.n_free += pool_.is_free(id);
        parent = prefix_of(id);
    }
    const std::span<const Token> rest = tokens.subspan(done);
    const std::size_t            most = rest.empty() ? 0 : std::min(rest.size() - 1, size);
    int                          seen = 0;
    for (BlockId id = first_child(parent); id >= 0 && most > 0 && seen < most_siblings;
         id         = siblings_[std::size_t(id)].next, seen++) {
        const CacheEntry& entry = pool_.entry(id);
        if (entry.space != space) continue; // two namespaces that begin alike
        const std::span<const Token> have = pool_.tokens(id).first(std::min(most, std::size_t(entry.n_tokens)));
        const int n = int(std::mismatch(have.begin(), have.end(), rest.begin()).first - have.begin());
        if (n > hit.n_partial_tokens) {
            hit.partial          = id;
            hit.n_partial_tokens = n;
        }
    }
    return hit;
}

// -- entries

void PrefixCache::insert(BlockId id, CacheEntry entry, std::span<const Token> tokens) {
    check(pool_.state(id) == HashState::none, "a block got a second hash");
    if (entry.n_tokens == pool_.block_size()) index_.insert(entry.hash, id);
    if (entry.serial == 0) entry.serial = ++last_serial_;
    const bool cached = entry.state == HashState::cached;
    if (cached) entry.state = HashState::in_flight;
    pool_.set_entry(id, entry, tokens);
    if (cached) set_cached(id);
    else if (entry.state == HashState::in_flight) in_flight_.push_back(id);
}

void PrefixCache::begin_write(BlockId id) {
    if (pool_.state(id) != HashState::reserved) return;
    pool_.set_state(id, HashState::in_flight);
    in_flight_.push_back(id);
}

void PrefixCache::commit() {
    for (BlockId id : in_flight_)
        if (pool_.state(id) == HashState::in_flight) set_cached(id);
    in_flight_.clear();
}

void PrefixCache::set_cached(BlockId id) {
    const Prefix parent = pool_.entry(id).parent;
    if (!is_known(parent)) return evict(id); // evicted meanwhile: nobody would come this way
    pool_.set_state(id, HashState::cached);
    add_child(parent, id);
    if (const CacheEntry& entry = pool_.entry(id); is_told(entry)) {
        const std::span<const Token> tokens = pool_.tokens(id);
        changes_.push_back({true, entry.hash, entry.parent.hash, {tokens.begin(), tokens.end()}});
    }
}

void PrefixCache::remove(BlockId id) {
    const CacheEntry& entry = pool_.entry(id);
    if (entry.state == HashState::cached) {
        remove_child(entry.parent, id);
        if (is_told(entry)) changes_.push_back({false, entry.hash, {}, {}});
    }
    if (entry.n_tokens == pool_.block_size()) index_.erase(entry.hash);
    pool_.clear_entry(id);
}

void PrefixCache::log_changes(bool on) {
    logging_ = on;
    changes_.clear();
}

// Down to the end of each chain, and back.
void PrefixCache::evict(BlockId id) {
    for (BlockId here = id;;) {
        if (const BlockId child = first_child(prefix_of(here)); child >= 0) {
            here = child;
            continue;
        }
        if (here == id) return remove(id);
        const BlockId parent = block_of(pool_.entry(here).parent);
        remove(here);
        here = parent;
    }
}

// -- the blocks that continue a prefix, the latest first; for prompts that share a part of one

// Its serial; the beginnings of namespaces stand apart from them, and two of these can have one list.
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

void PrefixCache::check_invariants() const {
    int                               n_hashes = 0;
    std::unordered_set<std::uint64_t> serials;
    for (BlockId id = 0; id < pool_.size(); id++) {
        const CacheEntry& entry = pool_.entry(id);
        if (entry.state == HashState::none) continue;
        check(entry.state == HashState::cached || pool_.ref_count(id) > 0, "a block that nobody will write has a hash");
        check(entry.state != HashState::cached || is_known(entry.parent), "a cached block outlived the one before it");
        check(serials.insert(entry.serial).second, "two entries have one serial");
        if (entry.n_tokens != pool_.block_size()) continue;
        n_hashes++;
        check(index_.find(entry.hash) == id, "a hash does not lead to its block");
        check(hash_of(entry.parent, pool_.tokens(id)) == entry.hash, "a hash is not that of its tokens");
    }
    check(n_hashes == index_.size(), "the prefix cache holds a block that does not know of it");
}

} // namespace quire
