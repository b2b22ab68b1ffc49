// quire.paging.prefix_cache: finds the blocks that hold the beginning of a prompt. **Owns** the index from hashes to blocks, of
// fixed size; the entries themselves stand with the blocks in their pool. A hit is compared token by token.
//
// A block gets its hash as soon as its tokens are known, so that a request with the same beginning can share it at once:
//
//      none ──insert()──► reserved ──begin_write()──► in flight ──commit()──► cached
//        └───────────────── insert(), for generated tokens ──────────────────────┘
//
// The first sharer that runs writes a reserved block; the others wait for it. If that sharer goes away, another one writes.
//
// Where a sequence has tables in several lanes (quire.paging.block_manager), the entries of the first lane are the index: they have
// the hashes, and are kept in order. A block of another lane is attached to the entry of the same tokens. It can be evicted alone if
// its lane has a window, because later tokens do not see it; else the entry goes with it.
//
// A checkpoint, the recurrent state at the end of an entry, is attached in the same way, in the last lane. Most entries have none.
export module quire.paging.prefix_cache;

import quire.core.base;
import quire.core.std;
import quire.paging.block;
import quire.paging.block_hash;
import quire.paging.block_index;
import quire.paging.block_pool;
import quire.paging.cache_layout;
import quire.paging.host_tier;

export namespace quire {

// An entry of a lane is a bundle of `blocks` blocks. A lane with a window gives back entries behind its last `window` positions; 0: it keeps all.
// A token needs one state, at the end of the entry before it; so the lane of states has a window of 2.
struct Lane {
    int  window = 0, blocks = 1;
    bool state = false;
};
inline constexpr int most_lanes = most_cache_groups + 1;

// Where a unit is: its block on the device, else its unit in host memory; -1: not there.
struct FoundUnit {
    BlockId block = -1, on_host = -1;
};

// The units that the cache has for a prompt.
struct CacheHit {
    std::span<const FoundUnit>  entries;                  // of the first lane; valid until the next match()
    bool                        from_host        = false; // some units are in host memory
    int                         n_free           = 0;  // blocks to be taken from the free list for them, in all lanes
    BlockId                     partial          = -1; // the entry that begins with the prompt's next tokens, or -1
    int                         n_partial_tokens = 0;
    std::array<int, most_lanes> first{}; // by lane: the first entry that is needed; it and all behind it are there

    int n_entries() const { return int(entries.size()); }
};

// The leading whole blocks of a text that are written, on the device or in host memory.
struct KnownText {
    std::vector<Prefix> texts    = {}; // the texts that end with each of them
    std::vector<bool>   units    = {}; // [texts × lanes] which of their units are there
    int                 n_usable = 0;  // the blocks behind which a prompt can go on with these units

    int n_blocks() const { return int(texts.size()); }
};

// The largest m <= n such that a text can go on behind its first m entries: each lane has the entries that the next token sees. `has(entry, lane)`
// says which units are there; those of the first lane are.
template <class Has>
int most_usable(std::span<const Lane> lanes, int block_size, int n, Has&& has) {
    std::array<int, most_lanes> there{}; // of each lane: from here on all are there
    int                         most = 0;
    for (int i = 0; i < n; i++) {
        bool all = true;
        for (int lane = 1; lane < int(lanes.size()); lane++) {
            const auto l = std::size_t(lane);
            if (!has(i, lane)) there[l] = i + 1;
            all = all && there[l] <= CacheLayout::first_entry_seen(lanes[l].window, (i + 1) * block_size, block_size);
        }
        if (all) most = i + 1;
    }
    return most;
}

class PrefixCache {
public:
    // `pool`, of the device, and `host` outlive the cache. The first lane has no window.
    PrefixCache(BlockPool& pool, ChainHash hash, std::span<const Lane> lanes, HostTier& host);

    // Finds the longest beginning of a prompt in whole entries, then the entry with the most of the next tokens. The last token is left to
    // compute. Let p be the first token that is not written: a lane with a window needs the entries that p sees. `whole`: every lane needs
    // all entries. In a model with states the beginning ends at a checkpoint. `with_host`: units in host memory count too, up to p.
    CacheHit  match(const CacheNamespace& space, std::span<const Token> tokens, bool whole = false,
                    bool with_host = false) const;
    BlockHash hash_of(const Prefix& parent, std::span<const Token> tokens) const { return hash_(parent.hash, tokens); }
    BlockId   find(BlockHash hash) const { return index_.find(hash); } // or -1; the caller compares with holds()
    // Whether a block holds these tokens, and all of the prefix before them.
    bool   holds(BlockId block, const Prefix& parent, const CacheNamespace& space, std::span<const Token> tokens) const;
    Prefix prefix_of(BlockId block) const { return {pool_.entry(block).hash, pool_.entry(block).serial}; }
    Prefix prefix_of(const FoundUnit& entry) const {
        return entry.block >= 0 ? prefix_of(entry.block) : host_.prefix_of(entry.on_host);
    }
    // The unit of `lane` that belongs to a found entry of the first lane.
    FoundUnit unit_of(const FoundUnit& entry, int lane) const;
    // The block at the end of a prefix, or -1.
    BlockId block_of(const Prefix& prefix) const;
    // Whether a block can continue the prefix: it is the beginning of a namespace, or the entry at its end is there.
    bool is_known(const Prefix& prefix) const { return prefix.serial == 0 || block_of(prefix) >= 0; }

    KnownText known(const CacheNamespace& space, std::span<const Token> tokens) const;
    // Saves the units of these blocks in host memory. Units that the files may lack are saved for the files, too.
    void save(const CacheNamespace& space, std::span<const Token> tokens);
    // The serials from here on are new.
    void begin_serials(std::uint64_t first) { last_serial_ = std::max(last_serial_, first - 1); }

    // Gives an entry to a block without one. An entry without a serial gets one: that of the same text in host memory, else a new one. The
    // hash of a full block must not be in the index.
    void insert(BlockId block, CacheEntry entry, std::span<const Token> tokens);
    // The block of a lane behind the first that holds the tokens of `owner`, an entry of the first lane; or -1.
    BlockId attached(BlockId owner, int lane) const {
        return attached_[std::size_t(owner) * (lanes_.size() - 1) + std::size_t(lane) - 1];
    }
    // The block of any lane with the tokens of `owner`; or -1.
    BlockId in_lane(BlockId owner, int lane) const { return lane == 0 ? owner : attached(owner, lane); }
    // A block without an entry holds the tokens of `owner`, which has no block in its lane yet.
    void attach(BlockId owner, BlockId block, HashState state);
    // A reserved block of the first lane and the blocks attached to it are in flight.
    void begin_write(BlockId block);
    void commit(); // all in flight → cached
    // Removes a block's entry, and the entries of all blocks that continue it or are attached to it: no prompt leads to them any more.
    void evict(BlockId block);

    // take_changes() returns the changes since its last call, while they are logged.
    void                     log_changes(bool on);
    std::vector<CacheChange> take_changes() { return std::exchange(changes_, {}); }

    void check_invariants() const;

private:
    struct Siblings {
        BlockId prev = -1, next = -1;
    };
    // Calls `visit` with each block of the first lane that known() finds.
    template <class Visit>
    void walk(const CacheNamespace& space, std::span<const Token> tokens, Visit&& visit) const;

    void set_cached(BlockId block);
    void log(BlockId block, bool stored);
    void remove(BlockId block);
    void detach(BlockId block);
    int  first_needed(int lane, int position) const {
        const int window = lanes_[std::size_t(lane)].window;
        return CacheLayout::first_entry_seen(window, position, pool_.block_size());
    }
    void    add_child(const Prefix& parent, BlockId block);
    void    remove_child(const Prefix& parent, BlockId block);
    BlockId first_child(const Prefix& parent) const; // or -1

    BlockPool&                     pool_;
    HostTier&                      host_;
    ChainHash                      hash_;
    std::uint64_t                  last_serial_ = 0;
    BlockIndex                     index_;
    BlockIndex                     children_; // a prefix → the cached block that continues it, the latest
    std::vector<Siblings>          siblings_; // [n_blocks] the other continuations, from the latest to the first
    std::vector<BlockId>           in_flight_;
    std::vector<Lane>              lanes_;
    std::vector<BlockId>           attached_; // [n_ids × lanes behind the first] see attached()
    mutable std::vector<FoundUnit> found_;    // by the last match()

    bool                     logging_ = false;
    std::vector<CacheChange> changes_;
    bool                     is_published(const CacheEntry& entry) const {
        return logging_ && entry.n_tokens == pool_.block_size() && entry.space == CacheNamespace{};
    }
};

} // namespace quire

module :private;

namespace quire {

// -- finding

PrefixCache::PrefixCache(BlockPool& pool, ChainHash hash, std::span<const Lane> lanes, HostTier& host)
    : pool_(pool), host_(host), hash_(hash), index_(pool.n_ids()), children_(pool.n_ids()),
      siblings_(std::size_t(pool.n_ids())), lanes_(lanes.begin(), lanes.end()),
      attached_(siblings_.size() * (lanes.size() - 1), -1) {
    check(lanes[0].window == 0, "a prefix cache whose index would have gaps");
    in_flight_.reserve(siblings_.size());
    found_.reserve(siblings_.size());
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

FoundUnit PrefixCache::unit_of(const FoundUnit& entry, int lane) const {
    if (lane == 0) return entry;
    const BlockId block = entry.block >= 0 ? attached(entry.block, lane) : -1;
    return block >= 0 ? FoundUnit{block} : FoundUnit{-1, host_.find(prefix_of(entry), lane)};
}

CacheHit PrefixCache::match(const CacheNamespace& space, std::span<const Token> tokens, bool whole,
                            bool with_host) const {
    constexpr int               most_siblings = 64; // so that a prefix with many continuations costs no more than this
    CacheHit                    hit;
    const auto                  size    = std::size_t(pool_.block_size());
    const int                   n_lanes = int(lanes_.size());
    Prefix                      here{chain_root(space)}, parent = here; // the entries looked at, and of these the hit
    std::size_t                 n_hit     = 0;
    int                         n_written = -1; // leading entries that are cached; -1: all so far
    std::array<int, most_lanes> there{};        // of each lane: from here on all are attached
    found_.clear();
    for (int n = 1; std::size_t(n) * size <= tokens.size(); n++) {
        std::span<const Token> want = tokens.subspan(std::size_t(n - 1) * size, size);
        const BlockHash        hash = hash_of(here, want);
        FoundUnit              at{index_.find(hash)};
        if (at.block >= 0 && !holds(at.block, here, space, want)) break;
        if (at.block < 0 && with_host && n_written < 0) at.on_host = host_.find(hash, here, space, want);
        if (at.block < 0 && at.on_host < 0) break;
        const bool written = at.block < 0 || pool_.state(at.block) == HashState::cached;
        // A cached block up to the very end would leave nothing to compute: a part of it will do.
        if (std::size_t(n) * size == tokens.size() && written) break;
        if (lanes_.back().state && !written) break; // its state comes with its end
        here = prefix_of(at);
        found_.push_back(at);
        if (n_written < 0 && !written) n_written = n - 1;
        bool                        whole_window = true;
        std::array<int, most_lanes> first{};
        for (int lane = 1; lane < n_lanes; lane++) {
            const auto l         = std::size_t(lane);
            const bool on_device = at.block >= 0 && attached(at.block, lane) >= 0;
            if (!on_device && (!with_host || n_written >= 0 || host_.find(here, lane) < 0)) there[l] = n;
            first[l] = whole && !lanes_[l].state ? 0 : first_needed(lane, (n_written < 0 ? n : n_written) * int(size));
            whole_window = whole_window && there[l] <= first[l];
        }
        if (!whole_window) continue;
        n_hit     = std::size_t(n);
        hit.first = first;
        parent    = here;
    }
    hit.entries = std::span(found_).first(n_hit);
    for (std::size_t i = 0; i < n_hit; i++)
        for (int lane = 0; lane < n_lanes; lane++)
            if (int(i) >= hit.first[std::size_t(lane)]) {
                const FoundUnit unit = unit_of(found_[i], lane);
                hit.from_host        = hit.from_host || unit.block < 0;
                if (unit.block < 0 || pool_.is_free(unit.block)) hit.n_free += pool_.blocks_of_lane(lane);
            }
    const std::span<const Token> rest = tokens.subspan(n_hit * size);
    const std::size_t            most = rest.empty() || lanes_.back().state ? 0 : std::min(rest.size() - 1, size);
    int                          seen = 0;
    for (BlockId id = first_child(parent); id >= 0 && most > 0 && seen < most_siblings;
         id         = siblings_[std::size_t(id)].next, seen++) {
        const CacheEntry& entry = pool_.entry(id);
        if (entry.space != space) continue; // two namespaces that begin alike
        bool all_lanes = true;
        for (int lane = 1; lane < n_lanes; lane++) all_lanes = all_lanes && attached(id, lane) >= 0;
        if (!all_lanes) continue;
        const std::span<const Token> have = pool_.tokens(id).first(std::min(most, std::size_t(entry.n_tokens)));
        const int n = int(std::mismatch(have.begin(), have.end(), rest.begin()).first - have.begin());
        if (n > hit.n_partial_tokens) {
            hit.partial          = id;
            hit.n_partial_tokens = n;
        }
    }
    return hit;
}

template <class Visit>
void PrefixCache::walk(const CacheNamespace& space, std::span<const Token> tokens, Visit&& visit) const {
    const auto size = std::size_t(pool_.block_size());
    Prefix     here{chain_root(space)};
    for (; tokens.size() >= size; tokens = tokens.subspan(size)) {
        const std::span<const Token> want = tokens.first(size);
        const BlockHash              hash = hash_of(here, want);
        FoundUnit                    at{index_.find(hash)};
        if (at.block >= 0 && (!holds(at.block, here, space, want) || pool_.state(at.block) != HashState::cached)) break;
        if (at.block < 0) at.on_host = host_.find(hash, here, space, want);
        if (at.block < 0 && at.on_host < 0) break;
        here = prefix_of(at);
        visit(at);
    }
}

KnownText PrefixCache::known(const CacheNamespace& space, std::span<const Token> tokens) const {
    KnownText         known;
    const std::size_t n_lanes = lanes_.size();
    walk(space, tokens, [&](const FoundUnit& at) {
        known.texts.push_back(prefix_of(at));
        for (int lane = 0; lane < int(n_lanes); lane++) {
            const FoundUnit unit = unit_of(at, lane);
            known.units.push_back(unit.block >= 0 || unit.on_host >= 0);
        }
    });
    known.n_usable = most_usable(lanes_, pool_.block_size(), known.n_blocks(), [&](int i, int lane) {
        return known.units[std::size_t(i) * n_lanes + std::size_t(lane)];
    });
    return known;
}

void PrefixCache::save(const CacheNamespace& space, std::span<const Token> tokens) {
    std::vector<std::pair<FoundUnit, int>> units; // with their lanes; saving one may make host memory forget another
    walk(space, tokens, [&](const FoundUnit& at) {
        for (int lane = 0; lane < int(lanes_.size()); lane++) units.emplace_back(unit_of(at, lane), lane);
    });
    for (const auto& [unit, lane] : units) // what is here already first: it becomes the last to be forgotten
        if (unit.block < 0 && unit.on_host >= 0) host_.save_again(unit.on_host);
    for (const auto& [unit, lane] : units)
        if (unit.block >= 0 && pool_.state(unit.block) == HashState::cached)
            host_.save(pool_, unit.block, lane == 0 ? pool_.tokens(unit.block) : std::span<const Token>{});
}

// -- entries

void PrefixCache::insert(BlockId id, CacheEntry entry, std::span<const Token> tokens) {
    check(pool_.state(id) == HashState::none, "a block got a second hash");
    if (entry.n_tokens == pool_.block_size()) index_.insert(entry.hash, id);
    if (entry.serial == 0 && host_.keeps() && entry.n_tokens == pool_.block_size())
        if (const BlockId same = host_.find(entry.hash, entry.parent, entry.space, tokens); same >= 0)
            entry.serial = host_.prefix_of(same).serial;
    if (entry.serial == 0) entry.serial = ++last_serial_;
    if (const BlockId before = block_of(entry.parent); before >= 0) entry.depth = pool_.entry(before).depth + 1;
    const bool cached = entry.state == HashState::cached;
    if (cached) entry.state = HashState::in_flight;
    pool_.set_entry(id, entry, tokens);
    if (cached) set_cached(id);
    else if (entry.state == HashState::in_flight) in_flight_.push_back(id);
}

void PrefixCache::attach(BlockId owner, BlockId block, HashState state) {
    const CacheEntry& of   = pool_.entry(owner);
    const int         lane = pool_.lane(block);
    check(pool_.state(block) == HashState::none && attached(owner, lane) < 0, "an entry got a second block of a lane");
    pool_.set_entry(block, {state, of.n_tokens, owner, of.hash, of.parent, of.space, of.serial, of.depth}, {});
    attached_[std::size_t(owner) * (lanes_.size() - 1) + std::size_t(lane) - 1] = block;
    if (state == HashState::in_flight) in_flight_.push_back(block);
    if (state == HashState::cached) log(block, true);
    if (state == HashState::cached && host_.at_once()) host_.save(pool_, block, {});
}

// A bundle of any lane that can be found, or no longer. A marker is not told: it stays when the memory of its tokens goes.
void PrefixCache::log(BlockId id, bool stored) {
    const CacheEntry& entry = pool_.entry(id);
    if (!is_published(entry) || pool_.n_blocks(id) == 0) return;
    CacheChange& change = changes_.emplace_back(stored, entry.hash);
    change.group        = pool_.group_of_lane(pool_.lane(id));
    change.state        = lanes_[std::size_t(pool_.lane(id))].state;
    if (!stored) return;
    const std::span<const Token> tokens = pool_.tokens(entry.owner >= 0 ? entry.owner : id);
    change.parent                       = entry.parent.hash;
    change.tokens.assign(tokens.begin(), tokens.end());
}

void PrefixCache::detach(BlockId id) {
    if (pool_.state(id) == HashState::cached) log(id, false);
    host_.save(pool_, id, {});
    const BlockId owner                                                                   = pool_.entry(id).owner;
    attached_[std::size_t(owner) * (lanes_.size() - 1) + std::size_t(pool_.lane(id)) - 1] = -1;
    pool_.clear_entry(id);
}

void PrefixCache::begin_write(BlockId id) {
    const auto begin = [&](BlockId block) {
        if (pool_.state(block) != HashState::reserved) return;
        pool_.set_state(block, HashState::in_flight);
        in_flight_.push_back(block);
    };
    begin(id);
    if (pool_.state(id) == HashState::none) return;
    for (int lane = 1; lane < int(lanes_.size()); lane++)
        if (const BlockId block = attached(id, lane); block >= 0) begin(block);
}

void PrefixCache::commit() {
    for (BlockId id : in_flight_) {
        if (pool_.state(id) != HashState::in_flight) continue;
        if (pool_.entry(id).owner < 0) set_cached(id);
        else {
            pool_.set_state(id, HashState::cached);
            log(id, true);
            if (host_.at_once()) host_.save(pool_, id, {});
        }
    }
    in_flight_.clear();
}

void PrefixCache::set_cached(BlockId id) {
    const Prefix parent = pool_.entry(id).parent;
    if (!is_known(parent)) return evict(id); // evicted meanwhile: no prompt would lead here
    pool_.set_state(id, HashState::cached);
    add_child(parent, id);
    if (host_.at_once()) host_.save(pool_, id, pool_.tokens(id));
    log(id, true);
}

void PrefixCache::remove(BlockId id) {
    const CacheEntry& entry = pool_.entry(id);
    if (entry.state == HashState::cached) {
        remove_child(entry.parent, id);
        log(id, false);
    }
    host_.save(pool_, id, pool_.tokens(id));
    if (entry.n_tokens == pool_.block_size()) index_.erase(entry.hash);
    for (int lane = 1; lane < int(lanes_.size()); lane++)
        if (const BlockId block = attached(id, lane); block >= 0) detach(block);
    pool_.clear_entry(id);
}

void PrefixCache::log_changes(bool on) {
    logging_ = on;
    changes_.clear();
}

// Down to the end of each chain, and back.
void PrefixCache::evict(BlockId id) {
    if (const BlockId owner = pool_.entry(id).owner; owner >= 0) {
        if (lanes_[std::size_t(pool_.lane(id))].window > 0) return detach(id);
        id = owner;
    }
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
    for (BlockId id = 0; id < pool_.n_ids(); id++) {
        const CacheEntry& entry = pool_.entry(id);
        if (entry.state == HashState::none) continue;
        check(entry.state == HashState::cached || pool_.ref_count(id) > 0,
              "a block that no sequence will write has a hash");
        if (entry.owner >= 0) {
            check(pool_.lane(id) > 0 && attached(entry.owner, pool_.lane(id)) == id,
                  "a block is attached to another entry");
            check(pool_.entry(entry.owner).serial == entry.serial, "a block outlived the entry it is attached to");
            check(entry.state != HashState::cached || pool_.state(entry.owner) == HashState::cached,
                  "a block is attached to an entry that is not written");
            continue;
        }
        for (int lane = 1; lane < int(lanes_.size()); lane++) {
            const BlockId a = attached(id, lane);
            check(a < 0 || pool_.entry(a).owner == id, "an attached block does not know its entry");
            check(a >= 0 || entry.state != HashState::reserved || lanes_[std::size_t(lane)].state,
                  "a reserved entry has no block in a lane");
            check(a >= 0 || lanes_[std::size_t(lane)].window > 0, "a lane that keeps all has a gap");
        }
        check(entry.state != HashState::cached || is_known(entry.parent), "a cached block outlived the one before it");
        check(entry.state != HashState::cached || entry.parent.serial == 0 ||
                  pool_.state(block_of(entry.parent)) == HashState::cached,
              "a block is cached, and the one before it is not");
        check(serials.insert(entry.serial).second, "two entries have one serial");
        if (entry.n_tokens != pool_.block_size()) continue;
        n_hashes++;
        check(index_.find(entry.hash) == id, "a hash does not lead to its block");
        check(hash_of(entry.parent, pool_.tokens(id)) == entry.hash, "a hash is not that of its tokens");
    }
    check(n_hashes == index_.size(), "the prefix cache holds a block that does not know of it");
}

} // namespace quire
