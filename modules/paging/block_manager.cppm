// quire.paging.block_manager: which physical KV block holds which tokens of which sequence (the paper, sections 4.2 to 4.5): block
// tables, copy-on-write, swapping. **Owns** all block metadata: tables, device pool, swap pool, prefix cache. Handles no tensors.
//
// A sequence has a table for each cache group (quire.paging.cache_layout). Inside, a table is a list of lanes, one for each group, of
// which the first one keeps all positions, because the prefix cache is indexed by it; where no group does, that lane has markers:
// entries without memory.
export module quire.paging.block_manager;

import quire.core.base;
import quire.core.std;
import quire.paging.block;
import quire.paging.block_hash;
import quire.paging.block_pool;
import quire.paging.cache_layout;
import quire.paging.prefix_cache;
import quire.paging.snapshot;

export namespace quire {

// A block table is known by a small number from open_table() until close_table().
using TableId = std::int32_t;

// In a table: a block that was given back because no layer sees its positions any more.
inline constexpr BlockId released_block = -1;

struct BlockManagerOptions {
    int n_blocks   = 0;
    int block_size = 16; // tokens, 1..256
    int n_swap     = 0;  // blocks of the swap pool, in host memory
    // The order in which free blocks are first allocated; empty: 0, 1, 2, …
    std::vector<BlockId> free_order = {};
    // Tests set another one. Collisions may cost hits but never cause a wrong one.
    ChainHash   hash   = chain_hash;
    CacheLayout layout = {};
    // Entries without memory, where no group keeps all positions: as many as tables have together, and some for the prefix cache. A
    // sequence for which there is none is not found by others. 0: some for each block.
    int n_markers = 0;
};

// Positions `first` .. `first + n - 1` of a sequence are about to be written.
struct Write {
    TableId table = -1;
    int     first = 0, n = 0;
};

class BlockManager {
public:
    explicit BlockManager(BlockManagerOptions options);
    BlockManager(const BlockManager&)            = delete;
    BlockManager& operator=(const BlockManager&) = delete;

    inline int                n_blocks() const { return pool_.size(); }
    inline int                block_size() const { return pool_.block_size(); }
    inline const CacheLayout& layout() const { return layout_; }
    inline int                n_groups() const { return int(layout_.groups.size()); }
    inline int                n_free() const { return pool_.n_free(); } // in no table, including cached ones
    int                       n_used() const { return n_blocks() - n_free(); }
    int n_cached_free() const { return pool_.n_cached_free(); } // in no table, but still in the prefix cache
    int n_pinned() const { return n_pinned_; }
    int n_copies() const { return int(moves_.copies.size()); } // waiting for take_moves()
    int n_swap() const { return swap_.size(); }
    int n_swap_free() const { return swap_.n_free(); }

    // Entries of a table for `n_tokens` tokens, and the blocks of such entries of all groups.
    inline int entries_for(int n_tokens) const { return (n_tokens + block_size() - 1) / block_size(); }
    inline int blocks_for(int n_tokens) const { return entries_for(n_tokens) * blocks_per_entry_; }

    // -- a sequence's table

    TableId open_table(const CacheNamespace& space = {});
    // Fills an empty table with blocks for all of `tokens`, or returns false and changes nothing if fewer than `keep_free` blocks
    // would stay free. With `read_cache`, cached blocks with the same beginning are shared, and a block that matches only in
    // part is copied. The last token is always left to compute, because its logits are needed. Groups with a window get no blocks
    // for what lies behind it already; `whole`: they do.
    bool allocate(TableId table, std::span<const Token> tokens, int keep_free = 0, bool read_cache = true,
                  bool whole = false);
    // Blocks that allocate() takes from the free list for the sequences of one request together, one after the other. As in all
    // functions with `closing`: once these tables are closed, and nothing else has changed. `most_entries`: so many at once, of groups
    // with a window.
    int blocks_to_allocate(const CacheNamespace& space, std::span<const std::span<const Token>> sequences,
                           std::span<const TableId> closing = {}, bool whole = false,
                           int most_entries = std::numeric_limits<int>::max()) const;
    int blocks_to_allocate(const CacheNamespace& space, std::span<const Token> tokens) const {
        return blocks_to_allocate(space, std::array{tokens});
    }
    int n_free(std::span<const TableId> closing) const;
    // Sliding windows: a table that holds a beginning of `tokens` gets the blocks before `end`, as allocate() would; those that lie
    // behind the windows of the first position that is not written yet, of those from `from` on, are given back as it goes. It ends
    // earlier where no block is free. Returns that position.
    int grow(TableId table, std::span<const Token> tokens, int from, int end, bool read_cache = true);
    // The first position, of n_tokens known tokens and at or after `from`, that the sequence has to compute itself. Tokens that
    // others have written, or write in this step, are skipped, but never the last token.
    int next_unwritten(TableId table, int from, int n_tokens) const;
    // Of the sequence's first n positions: how many leading ones were written before this step, and are not written again in it. At
    // least these: a shared block that a sharer may write in this step ends the count.
    int n_readable(TableId table, int n) const;
    // True if the last token's slot is in a block that is in flight, which cannot be copied yet.
    bool must_wait(TableId table, int n_tokens) const;
    // Slots for all `writes`, or for none (false): appends blocks as needed and replaces a shared block by a copy
    // (copy-on-write). Of n sharers the first n - 1 copy, the last one writes in place. `may_copy` false: nor where that takes a copy.
    bool allocate_slots(std::span<const Write> writes, bool may_copy = true);
    int  blocks_to_write(std::span<const Write> writes) const; // most that allocate_slots() takes from the free list
    bool allocate_slots(TableId table, int first, int n) { return allocate_slots(std::array{Write{table, first, n}}); }
    // This step will write those positions; sequences scheduled later in the step can rely on it.
    void will_write(const Write& write);
    // Whether a sequence that was scheduled earlier in the step writes a part of the block of that position: the rest of it, which this
    // one shares, comes in the next steps.
    bool is_partly_written(TableId table, int position) const;
    // The step has run: everything announced by will_write() is written, and all moves are done.
    void commit() {
        cache_.commit();
        partly_written_.clear();
    }
    // What can be found in the prefix cache from now on, and what no longer; off at first.
    void                     log_cache(bool on) { cache_.log_changes(on); }
    std::vector<CacheChange> take_cache_changes() { return cache_.take_changes(); }
    // Reports that positions 0 .. n_written-1 hold the KV of `tokens`; blocks that became full enter the prefix cache.
    void publish(TableId table, std::span<const Token> tokens, int n_written);
    // Sliding windows: `next` is the sequence's next position. Gives back the blocks that lie wholly behind the window of their group;
    // they stay in the prefix cache until their memory is needed. Returns how many.
    int release_behind(TableId table, int next);
    // Contiguous memory: entry i of the table is block first + i from now on, which the caller knows to be free; blocks that the
    // table has are copied there. It is not in the prefix cache.
    void    place(TableId table, BlockId first);
    BlockId placed_at(TableId table) const { return table_at(table).placed; } // or -1
    // A second table with the same blocks, in no place of its own. Nothing is copied until one of the two writes.
    TableId fork_table(TableId table);
    // Frees all blocks, the last one first, so that a prefix's first blocks stay cached longest.
    // `uncache`: also removes them from the prefix cache.
    void close_table(TableId table, bool uncache = false);
    // Pins the table's blocks, which hold `tokens`, until it is closed; a partly filled last block enters the cache too.
    void pin_table(TableId table, std::span<const Token> tokens);

    // -- swapping (section 4.5): all tables of a request together; a block that they share is moved once

    // False, with nothing changed, if the swap pool has too few free blocks.
    bool swap_out(std::span<const TableId> tables);
    // Most blocks that swap_in() takes from the free list.
    int blocks_to_swap_in(std::span<const TableId> tables, std::span<const TableId> closing = {}) const;
    // The physical blocks differ from before; blocks that are still in the prefix cache are shared instead of copied.
    bool swap_in(std::span<const TableId> tables, int keep_free = 0);
    bool is_swapped(TableId table) const { return table_at(table).swapped; }

    // The entries of a group's table: the first block of each. Those of the swap pool while it is swapped; the first ones may be
    // released_block.
    inline std::span<const BlockId> blocks(TableId table, int group = 0) const {
        return lane_of(table_at(table), group).blocks;
    }
    inline int n_entries(TableId table) const { return int(table_at(table).lanes[0].blocks.size()); }
    inline int n_released(TableId table, int group = 0) const { return lane_of(table_at(table), group).n_released; }
    // Blocks that the table holds, of all groups.
    inline int n_held(TableId table) const;
    // The block behind one in its entry, of a table that is not swapped.
    BlockId next_of(BlockId block) const { return pool_.next_of(block); }
    // Leading entries that allocate() did not have to take.
    inline int n_found(TableId table) const { return table_at(table).n_found; }
    int        slot(TableId table, int position) const; // of the first group: block * block_size + offset
    int        distinct_blocks(std::span<const TableId> tables) const;

    // Appends the pending block copies, which must run before the step, to `moves`.
    void take_moves(BlockMoves& moves);

    int  ref_count(BlockId block) const;
    bool is_cached(BlockId block) const; // in the prefix cache, its KV written

    // Removes all blocks from the prefix cache that are in no table.
    void drop_cache();
    // The state of each block, for display. `filled` is left to the scheduler, which knows the sequences' lengths.
    void view(Snapshot& snapshot) const;
    // Where to record evictions from now on; null: nowhere.
    void log_to(std::vector<MemoryEvent>* log) { log_ = log; }
    // Checks everything; stops with a message at the first broken invariant. For tests and debugging, not for the step loop.
    void check_invariants() const;

private:
    struct LaneTable {
        std::vector<BlockId> blocks;         // all lanes of a table have as many
        int                  n_released = 0; // leading entries that are released_block
    };
    struct Table {
        bool                              in_use = false, hashable = true, swapped = false, pinned = false;
        int                               n_found      = 0;  // see n_found()
        int                               n_hashed     = 0;  // leading full blocks whose hashes are in the chain
        int                               copied_until = 0;  // position up to which a copied block came filled
        BlockId                           placed       = -1; // the first block, where the table is contiguous
        std::array<LaneTable, most_lanes> lanes;
        Prefix                            prefix; // of these n_hashed blocks
        CacheNamespace                    space;
    };

    // The entries of a lane that are blocks, or markers.
    static std::span<BlockId> held(LaneTable& lane) {
        return std::span(lane.blocks).subspan(std::size_t(lane.n_released));
    }
    static std::span<const BlockId> held(const LaneTable& lane) {
        return std::span(lane.blocks).subspan(std::size_t(lane.n_released));
    }
    std::span<LaneTable>       lanes(Table& table) const { return std::span(table.lanes).first(std::size_t(n_lanes_)); }
    std::span<const LaneTable> lanes(const Table& table) const {
        return std::span(table.lanes).first(std::size_t(n_lanes_));
    }
    inline int              lane_of(int group) const { return group + n_lanes_ - n_groups(); }
    inline const LaneTable& lane_of(const Table& table, int group) const {
        return table.lanes[std::size_t(lane_of(group))];
    }
    HashState chain_state(const Table& table, int entry) const { // of the first lane's
        const BlockId id = table.lanes[0].blocks[std::size_t(entry)];
        return id < 0 ? HashState::none : pool_.state(id);
    }
    bool          has_memory(int lane) const { return lanes_[std::size_t(lane)].blocks > 0; }
    inline Table& table_at(TableId table) {
        if (std::size_t(table) >= tables_.size() || !tables_[std::size_t(table)].in_use) [[unlikely]]
            check(false, "no such block table"); // called in this case only, because check() is not inline
        return tables_[std::size_t(table)];
    }
    inline const Table& table_at(TableId table) const { return const_cast<BlockManager*>(this)->table_at(table); }
    BlockId             take_block(int lane);
    BlockId             evict_for(int lane, BlockId taken); // the rest of take_block(), where something is cached
    void                append(Table& table);
    void                append_placed(Table& table);
    void                adopt(Table& table, const CacheHit& hit);
    bool                take_known(Table& table, std::span<const Token> tokens);
    static CacheEntry   new_entry(const Table& table, HashState state, int n_tokens, BlockHash hash) {
        return {state, std::int16_t(n_tokens), -1, hash, table.prefix, table.space, 0};
    }
    void        attach_own(const Table& table, std::size_t entry, BlockId owner, HashState state);
    static void add_copy(std::vector<BlockCopy>& list, const BlockPool& from_pool, BlockId from,
                         const BlockPool& to_pool, BlockId to);
    void        release(BlockId block);
    void        release_swap(BlockId block);
    bool        needs_copy(BlockId block, int n_leaving) const;
    bool        can_evict(BlockId block, int n_leaving) const;
    BlockId     resident(BlockId swapped, int lane) const;
    void        count_leaving(std::span<const TableId> closing) const;
    void        forget_leaving() const;
    bool        is_free_now(BlockId block) const; // or would be, without the tables that were counted as leaving
    struct SlotCount {
        int fresh = 0, avoidable = 0; // blocks; avoidable: copies of what only the prefix cache could find
        int copies = 0;
    };
    SlotCount count_slots(std::span<const Write> writes) const;

    CacheLayout               layout_;
    std::vector<Lane>         lanes_;
    int                       n_lanes_;
    int                       blocks_per_entry_;
    BlockPool                 pool_, swap_; // on the device; in host memory
    PrefixCache               cache_;       // of pool_
    std::vector<std::int32_t> pins_;        // [n_ids] pinned tables that a block is in
    int                       n_pinned_ = 0;
    std::vector<Table>        tables_;
    std::vector<TableId>      closed_tables_;  // to be used again, with the memory of their vectors
    BlockMoves                moves_;          // pending
    std::vector<BlockId>      partly_written_; // in this step
    // Scratch, [n_ids or n_swap] by block.
    mutable std::vector<int>     seen_; // when a count met it last
    mutable int                  now_ = 0;
    mutable std::vector<int>     leaving_;     // how many of its sharers a count takes for gone
    std::vector<BlockId>         destination_; // where a swap at hand moves it, or -1
    mutable std::vector<BlockId> touched_;     // the blocks to reset in one of the last two
    std::vector<MemoryEvent>*    log_ = nullptr;
};

inline int BlockManager::n_held(TableId id) const {
    const Table& table = table_at(id);
    int          n     = 0;
    for (std::size_t l = 0; l < std::size_t(n_lanes_); l++)
        n += (int(table.lanes[l].blocks.size()) - table.lanes[l].n_released) * lanes_[l].blocks;
    return n;
}

} // namespace quire

module :private;

namespace quire {

std::vector<Lane> lanes_of(const CacheLayout& layout) {
    check(!layout.groups.empty() && int(layout.groups.size()) <= most_cache_groups, "more cache groups than lanes");
    std::vector<Lane> lanes;
    if (!layout.keeps_all()) lanes.push_back({0, 0});
    for (const CacheGroup& g : layout.groups) lanes.push_back({g.window, g.blocks});
    return lanes;
}

std::array<int, most_lanes> bundles_of(std::span<const Lane> lanes) {
    std::array<int, most_lanes> bundles;
    bundles.fill(1);
    for (std::size_t i = 0; i < lanes.size(); i++) bundles[i] = lanes[i].blocks;
    return bundles;
}

int markers_of(const BlockManagerOptions& o) {
    if (o.layout.keeps_all()) return 0;
    return o.n_markers > 0 ? o.n_markers : 8 * o.n_blocks + 1024;
}

BlockManager::BlockManager(BlockManagerOptions options)
    : layout_(options.layout), lanes_(lanes_of(layout_)), n_lanes_(int(lanes_.size())),
      blocks_per_entry_(layout_.blocks_per_entry()),
      pool_(options.n_blocks, options.block_size, FreeOrder::fifo, std::move(options.free_order), bundles_of(lanes_),
            markers_of(options)),
      swap_(options.n_swap, options.block_size, FreeOrder::lifo, {}, bundles_of(lanes_)),
      cache_(pool_, options.hash, lanes_), pins_(std::size_t(pool_.n_ids())),
      seen_(std::size_t(std::max(pool_.n_ids(), options.n_swap))), leaving_(pins_.size()),
      destination_(seen_.size(), -1) {
    check(options.n_blocks > 0 && options.block_size > 0 && options.n_swap >= 0, "an empty block pool");
    // The lists of a step never need more room than this.
    for (auto* list : {&moves_.copies, &moves_.swap_out, &moves_.swap_in}) list->reserve(pins_.size());
    touched_.reserve(seen_.size());
    check_invariants();
}

// An entry for new content, evicted from the prefix cache if it is there. Where a marker is wanted and there is none: released_block.
BlockId BlockManager::take_block(int lane) {
    const BlockId id = pool_.take(lane);
    return id >= 0 && pool_.state(id) != HashState::cached ? id : evict_for(lane, id);
}

BlockId BlockManager::evict_for(int lane, BlockId id) {
    const auto evict = [&](BlockId cached) {
        if (log_ && cached < n_blocks()) log_->push_back({MemoryEventKind::evict, 0, 0, cached, -1});
        cache_.evict(cached);
    };
    for (; id < 0; id = pool_.take(lane)) {
        const BlockId next = has_memory(lane) ? pool_.first_cached_free() : pool_.first_cached_marker();
        check(next >= 0 || !has_memory(lane), "a block was taken from an empty pool");
        if (next < 0) return released_block;
        evict(next);
    }
    if (pool_.state(id) == HashState::cached) {
        evict(id);
        pool_.set_lane(id, lane);
    }
    return id;
}

// Adds the next entry to a table, in all lanes.
void BlockManager::append(Table& table) {
    if (table.placed >= 0) return append_placed(table);
    for (std::size_t lane = 0, n = std::size_t(n_lanes_); lane < n; lane++) {
        const BlockId id = take_block(int(lane));
        if (id < 0) table.hashable = false;
        table.lanes[lane].blocks.push_back(id);
    }
}

void BlockManager::append_placed(Table& table) {
    std::vector<BlockId>& blocks = table.lanes[0].blocks;
    const BlockId         id     = table.placed + BlockId(blocks.size());
    check(id < n_blocks() && pool_.ref_count(id) == 0 && pool_.state(id) == HashState::none,
          "a contiguous table met a block that is in use");
    pool_.acquire(id);
    blocks.push_back(id);
}

// A copy of an entry, block by block.
void BlockManager::add_copy(std::vector<BlockCopy>& list, const BlockPool& from_pool, BlockId from,
                            const BlockPool& to_pool, BlockId to) {
    for (; from >= 0 && to >= 0; from = from_pool.next_of(from), to = to_pool.next_of(to)) list.push_back({from, to});
}

// The table's blocks of the other lanes enter the prefix cache, attached to `owner`, an entry of the first lane with the same tokens.
void BlockManager::attach_own(const Table& table, std::size_t entry, BlockId owner, HashState state) {
    for (std::size_t lane = 1; lane < std::size_t(n_lanes_); lane++) {
        const BlockId own = table.lanes[lane].blocks[entry];
        if (own >= 0 && pool_.state(own) == HashState::none && cache_.attached(owner, int(lane)) < 0)
            cache_.attach(owner, own, state);
    }
}

void BlockManager::release(BlockId id) {
    const HashState state = pool_.state(id);
    if (pool_.ref_count(id) == 1 && (state == HashState::reserved || state == HashState::in_flight))
        cache_.evict(id); // nobody will write it any more
    pool_.release(id);
}

// -- tables

TableId BlockManager::open_table(const CacheNamespace& space) {
    if (closed_tables_.empty()) {
        closed_tables_.push_back(TableId(tables_.size()));
        tables_.emplace_back();
    }
    TableId id = closed_tables_.back();
    closed_tables_.pop_back();
    Table& table   = tables_[std::size_t(id)];
    table.space    = space;
    table.in_use   = true;
    table.hashable = true;
    table.placed   = -1;
    table.n_hashed = table.copied_until = table.n_found = 0;
    table.prefix                                        = {chain_root(space)};
    return id;
}

void BlockManager::count_leaving(std::span<const TableId> closing) const {
    for (TableId id : closing) {
        if (table_at(id).swapped) continue;
        for (const LaneTable& lane : lanes(table_at(id)))
            for (BlockId block : held(lane))
                if (block >= 0 && leaving_[std::size_t(block)]++ == 0) touched_.push_back(block);
    }
}

void BlockManager::forget_leaving() const {
    for (BlockId block : touched_) leaving_[std::size_t(block)] = 0;
    touched_.clear();
}

bool BlockManager::is_free_now(BlockId block) const {
    const int n_leaving = leaving_[std::size_t(block)];
    return pool_.is_free(block) || (n_leaving > 0 && n_leaving == pool_.ref_count(block));
}

int BlockManager::n_free(std::span<const TableId> closing) const {
    count_leaving(closing);
    int n = pool_.n_free();
    for (BlockId block : touched_) n += is_free_now(block) ? pool_.n_blocks(block) : 0;
    forget_leaving();
    return n;
}

int BlockManager::blocks_to_allocate(const CacheNamespace& space, std::span<const std::span<const Token>> sequences,
                                     std::span<const TableId> closing, bool whole, int most_entries) const {
    count_leaving(closing);
    now_++;
    const auto size = std::size_t(block_size());
    int        n    = 0;
    const auto take = [&](BlockId id) { // one that was found
        if (is_free_now(id) && std::exchange(seen_[std::size_t(id)], now_) != now_) n += pool_.n_blocks(id);
    };
    for (std::size_t i = 0; i < sequences.size(); i++) {
        const std::span<const Token> tokens = sequences[i];
        std::size_t                  shared = 0; // whole blocks with one of the sequences before it
        for (std::span<const Token> other : sequences.first(i)) {
            const auto same =
                std::mismatch(tokens.begin(), tokens.end(), other.begin(), other.end()).first - tokens.begin();
            shared = std::max(shared, std::size_t(same) / size);
        }
        const CacheHit hit   = cache_.match(space, tokens, whole);
        const auto     found = hit.entries.size();
        for (std::size_t entry = 0; entry < found; entry++)
            for (int lane = 0; lane < n_lanes_; lane++)
                if (int(entry) >= hit.first[std::size_t(lane)]) take(cache_.in_lane(hit.entries[entry], lane));
        // What is cached behind the hit is not shared: it would leave nothing to compute, or has gaps in some lane.
        if ((found + 1) * size <= tokens.size()) {
            const Prefix parent = found > 0 ? cache_.prefix_of(hit.entries.back()) : Prefix{chain_root(space)};
            if (cache_.find(cache_.hash_of(parent, tokens.subspan(found * size, size))) >= 0)
                shared = std::min(shared, found);
        }
        const int fresh = entries_for(int(tokens.size())) - int(std::max(found, shared));
        for (const Lane& lane : lanes_)
            n += (lane.window > 0 && !whole ? std::min(fresh, most_entries) : fresh) * lane.blocks;
    }
    forget_leaving();
    return n;
}

// The entries of a hit, in an empty table.
void BlockManager::adopt(Table& table, const CacheHit& hit) {
    for (int i = 0; i < hit.n_entries(); i++)
        for (int lane = 0; lane < n_lanes_; lane++) {
            LaneTable& to = table.lanes[std::size_t(lane)];
            if (i < hit.first[std::size_t(lane)]) {
                to.blocks.push_back(released_block);
                to.n_released++;
                continue;
            }
            to.blocks.push_back(cache_.in_lane(hit.entries[std::size_t(i)], lane));
            pool_.acquire(to.blocks.back());
        }
    if (!hit.entries.empty()) table.prefix = cache_.prefix_of(hit.entries.back());
    table.n_found = table.n_hashed = hit.n_entries();
}

bool BlockManager::allocate(TableId id, std::span<const Token> tokens, int keep_free, bool read_cache, bool whole) {
    Table&                table  = table_at(id);
    std::vector<BlockId>& blocks = table.lanes[0].blocks;
    check(blocks.empty(), "blocks for a prompt go into an empty table");
    CacheHit  hit  = read_cache ? cache_.match(table.space, tokens, whole) : CacheHit{};
    const int need = blocks_for(int(tokens.size())) - hit.n_entries() * blocks_per_entry_ + hit.n_free;
    // The entry to copy has to stay what it is beside the copy. Where that is too much, its tokens are computed.
    std::array<BlockId, most_lanes> partial{};
    int                             partial_free = 0;
    for (int lane = 0; lane < n_lanes_ && hit.partial >= 0; lane++) {
        const BlockId from         = cache_.in_lane(hit.partial, lane);
        partial[std::size_t(lane)] = from;
        partial_free += pool_.is_free(from) ? pool_.n_blocks(from) : 0;
    }
    if (partial_free > 0 && need + partial_free + keep_free > n_free()) hit.partial = -1;
    if (need + keep_free > n_free()) return false;

    const auto size = std::size_t(block_size());
    const int  full = int(tokens.size() / size), all = entries_for(int(tokens.size()));
    for (LaneTable& lane : lanes(table)) lane.blocks.reserve(std::size_t(all));
    adopt(table, hit);
    for (std::size_t lane = 0; lane < std::size_t(n_lanes_) && hit.partial >= 0; lane++) pool_.hold(partial[lane]);
    for (int i = hit.n_entries(); i < full && read_cache; i++) {
        const std::span<const Token> want = tokens.subspan(std::size_t(i) * size, size);
        const BlockHash              hash = cache_.hash_of(table.prefix, want);
        append(table);
        if (!table.hashable) break;
        BlockId here = cache_.find(hash); // after the append, which may have evicted it
        if (here < 0) {
            here = blocks.back();
            cache_.insert(here, new_entry(table, HashState::reserved, block_size(), hash), want);
            attach_own(table, std::size_t(i), here, HashState::reserved);
        } else if (!cache_.holds(here, table.prefix, table.space, want)) {
            table.hashable = false; // another text with the same hash: whatever follows must not be found by it
            break;
        } else if (n_lanes_ > 1) { // what it has in other lanes is not enough: publish() adds ours
            break;
        }
        table.prefix   = cache_.prefix_of(here);
        table.n_hashed = i + 1;
    }
    while (int(blocks.size()) < all) append(table);
    table.copied_until = 0;
    if (hit.partial >= 0) {
        for (std::size_t lane = 0; lane < std::size_t(n_lanes_); lane++)
            if (has_memory(int(lane)))
                add_copy(moves_.copies, pool_, partial[lane], pool_,
                         table.lanes[lane].blocks[std::size_t(hit.n_entries())]);
        table.copied_until = hit.n_entries() * block_size() + hit.n_partial_tokens;
    }
    return true;
}

// The next entry of a table, which is full with `tokens`: one that holds the same, or that another sequence will write, if there is
// any, else a free one, which others can find from now on. False: there is none.
bool BlockManager::take_known(Table& table, std::span<const Token> tokens) {
    const auto size = std::size_t(block_size()), i = table.lanes[0].blocks.size();
    const auto want  = tokens.subspan(i * size, size);
    const auto hash  = cache_.hash_of(table.prefix, want);
    const auto holds = [&](BlockId here) { return cache_.holds(here, table.prefix, table.space, want); };
    BlockId    here  = cache_.find(hash);
    // The last token is computed, because its logits are needed.
    const bool is_end = (i + 1) * size == tokens.size();
    bool       known  = here >= 0 && holds(here) && !(is_end && pool_.state(here) == HashState::cached);
    for (int lane = 1; lane < n_lanes_ && known; lane++) known = cache_.attached(here, lane) >= 0;
    if (known) {
        for (int lane = 0; lane < n_lanes_; lane++) {
            const BlockId block = cache_.in_lane(here, lane);
            pool_.acquire(block);
            table.lanes[std::size_t(lane)].blocks.push_back(block);
        }
    } else {
        if (n_free() < blocks_per_entry_) return false;
        append(table);
        here = cache_.find(hash);                                           // that may have evicted it,
        if (!table.hashable || !cache_.is_known(table.prefix)) return true; // or what stands before it
        if (here < 0) {
            here = table.lanes[0].blocks.back();
            cache_.insert(here, new_entry(table, HashState::reserved, block_size(), hash), want);
            attach_own(table, i, here, HashState::reserved);
        } else if (!holds(here)) {
            table.hashable = false; // another text with the same hash: whatever follows must not be found by it
            return true;
        } else if (n_lanes_ > 1) { // as in allocate()
            return true;
        }
    }
    table.prefix = cache_.prefix_of(here);
    table.n_hashed++;
    return true;
}

int BlockManager::grow(TableId id, std::span<const Token> tokens, int from, int end, bool read_cache) {
    Table&      table   = table_at(id);
    const auto& blocks  = table.lanes[0].blocks;
    const auto  held_to = [&] { return int(blocks.size()) * block_size(); };
    check(end <= int(tokens.size()), "a table was grown past the end");
    if (read_cache && blocks.empty()) adopt(table, cache_.match(table.space, tokens));
    for (;;) {
        if (read_cache) from = next_unwritten(id, from, std::min(held_to() + 1, int(tokens.size())));
        release_behind(id, from);
        if (held_to() >= end) return from;
        const bool known = read_cache && table.hashable && table.n_hashed == int(blocks.size()) &&
                           held_to() + block_size() <= int(tokens.size()) && cache_.is_known(table.prefix);
        if (known) {
            if (!take_known(table, tokens)) return from;
        } else {
            if (n_free() < blocks_per_entry_) return from;
            append(table);
        }
    }
}

int BlockManager::next_unwritten(TableId id, int from, int n_tokens) const {
    const Table& table = table_at(id);
    while (from < n_tokens - 1) {
        const int i = from / block_size();
        if (table.copied_until > from && (table.copied_until - 1) / block_size() == i) from = table.copied_until;
        if (i >= table.n_hashed || chain_state(table, i) < HashState::in_flight) break;
        from = (i + 1) * block_size();
    }
    return std::min(from, n_tokens - 1);
}

int BlockManager::n_readable(TableId id, int n) const {
    const Table& table    = table_at(id);
    int          readable = n;
    // Only blocks with a hash have several writers, and a block is not written before those in front of it: the first one from the end
    // that nobody writes is the last look.
    for (int i = std::min(table.n_hashed, entries_for(n)) - 1; i >= table.lanes[0].n_released; i--) {
        const BlockId   id    = table.lanes[0].blocks[std::size_t(i)];
        const HashState state = pool_.state(id);
        if (state == HashState::cached || state == HashState::none) break;
        if (state == HashState::in_flight || pool_.ref_count(id) > 1) readable = i * block_size();
    }
    return std::min(readable, n);
}

bool BlockManager::must_wait(TableId id, int n_tokens) const {
    const Table& table = table_at(id);
    const auto   i     = std::size_t((n_tokens - 1) / block_size());
    return i < table.lanes[0].blocks.size() && chain_state(table, int(i)) == HashState::in_flight;
}

// Whether somebody else could read what is in a block once n_leaving of its sharers have copies. Sharers of a reserved block all
// write the same there, and none of them has read it.
bool BlockManager::needs_copy(BlockId id, int n_leaving) const {
    const HashState state = pool_.state(id);
    return state == HashState::cached || (state == HashState::none && pool_.ref_count(id) - n_leaving > 1);
}

// Found by nobody but through the prefix cache, which may lose it where there is no room for a copy.
bool BlockManager::can_evict(BlockId id, int n_leaving) const {
    return pool_.ref_count(id) - n_leaving == 1 && pins_[std::size_t(id)] == 0;
}

// The entries of a lane that a write reaches and the lane has: from `first` to before `end`.
template <class Body>
void each_entry(int first, int end, auto& entries, Body&& body) {
    for (const int last = std::min(end, int(entries.size())); first < last; first++)
        if (entries[std::size_t(first)] >= 0) body(entries[std::size_t(first)]);
}

// As the writes would happen: each copy takes a sharer away from its entry.
BlockManager::SlotCount BlockManager::count_slots(std::span<const Write> writes) const {
    SlotCount count;
    for (const Write& w : writes) {
        const Table& table = table_at(w.table);
        const int    first = w.first / block_size(), end = entries_for(w.first + w.n);
        for (const LaneTable& lane : lanes(table))
            each_entry(first, end, lane.blocks, [&](BlockId id) {
                if (!needs_copy(id, 0)) return; // most are their sequence's own
                int& n_leaving = leaving_[std::size_t(id)];
                if (!needs_copy(id, n_leaving)) return;
                (can_evict(id, n_leaving) ? count.avoidable : count.fresh) += pool_.n_blocks(id);
                count.copies++;
                n_leaving++;
                touched_.push_back(id);
            });
        count.fresh += std::max(end - int(table.lanes[0].blocks.size()), 0) * blocks_per_entry_;
    }
    forget_leaving();
    return count;
}

int BlockManager::blocks_to_write(std::span<const Write> writes) const {
    const SlotCount count = count_slots(writes);
    return count.fresh + count.avoidable;
}

bool BlockManager::allocate_slots(std::span<const Write> writes, bool may_copy) {
    const auto [fresh, avoidable, copies] = count_slots(writes);
    if (fresh == 0 && copies == 0) return true;
    if (fresh > n_free() || (copies > 0 && !may_copy)) return false;
    const bool in_place = fresh + avoidable > n_free();
    for (const Write& w : writes) {
        Table&    table = table_at(w.table);
        const int first = w.first / block_size(), end = entries_for(w.first + w.n);
        for (int i = 0; i < n_lanes_; i++)
            each_entry(first, end, table.lanes[std::size_t(i)].blocks, [&](BlockId& entry) {
                if (!needs_copy(entry, 0)) return;
                table.copied_until = w.first; // what stands before is there, in the copy as well
                if (in_place && can_evict(entry, 0)) {
                    cache_.evict(entry);
                    return;
                }
                pool_.hold(entry);
                const BlockId copy = take_block(i);
                if (has_memory(i)) add_copy(moves_.copies, pool_, entry, pool_, copy);
                release(entry);
                entry = copy;
            });
        while (int(table.lanes[0].blocks.size()) < end) append(table);
    }
    return true;
}

void BlockManager::place(TableId id, BlockId first) {
    Table& table   = table_at(id);
    table.placed   = first;
    table.hashable = false;
    check(n_lanes_ == 1 && blocks_per_entry_ == 1, "contiguous memory is for one group");
    check(!table.swapped && !table.pinned && table.n_hashed == 0,
          "a table that is hashed, pinned or swapped cannot be made contiguous");
    std::vector<BlockId>& blocks = table.lanes[0].blocks;
    for (BlockId& entry : blocks) {
        const BlockId to = first + BlockId(&entry - blocks.data());
        if (entry == to) continue;
        check(to < n_blocks() && pool_.ref_count(to) == 0, "a contiguous table met a block that is in use");
        pool_.hold(entry);
        pool_.acquire(to);
        moves_.copies.push_back({entry, to});
        release(std::exchange(entry, to));
    }
}

void BlockManager::will_write(const Write& w) {
    const Table&                table  = table_at(w.table);
    const std::vector<BlockId>& blocks = table.lanes[0].blocks;
    for (int i = w.first / block_size(); i < table.n_hashed && (i + 1) * block_size() <= w.first + w.n; i++)
        if (const BlockId id = blocks[std::size_t(i)]; id >= 0) cache_.begin_write(id);
    const int end = w.first + w.n, last = end / block_size();
    if (w.n > 0 && end % block_size() != 0 && last < table.n_hashed) {
        const BlockId id = blocks[std::size_t(last)];
        if (id >= 0 && pool_.state(id) == HashState::reserved && pool_.ref_count(id) > 1) partly_written_.push_back(id);
    }
}

bool BlockManager::is_partly_written(TableId id, int position) const {
    const std::vector<BlockId>& blocks = table_at(id).lanes[0].blocks;
    const auto                  i      = std::size_t(position / block_size());
    return i < blocks.size() && std::ranges::find(partly_written_, blocks[i]) != partly_written_.end();
}

void BlockManager::publish(TableId id, std::span<const Token> tokens, int n_written) {
    Table& table = table_at(id);
    check(n_written <= int(tokens.size()) && entries_for(n_written) <= n_entries(id), "publish past the end");
    const auto size = std::size_t(block_size());
    while (table.hashable && (table.n_hashed + 1) * block_size() <= n_written) {
        if (!cache_.is_known(table.prefix)) {
            // Another's equal block, or evicted before a swap: once more from the beginning.
            table.prefix   = {chain_root(table.space)};
            table.n_hashed = 0;
            continue;
        }
        const auto                   i    = std::size_t(table.n_hashed);
        const std::span<const Token> want = tokens.subspan(i * size, size);
        const BlockHash              hash = cache_.hash_of(table.prefix, want);
        const BlockId                here = cache_.find(hash), own = table.lanes[0].blocks[i];
        if (here < 0 && own != released_block && pool_.state(own) == HashState::none) {
            cache_.insert(own, new_entry(table, HashState::cached, block_size(), hash), want);
            attach_own(table, i, own, HashState::cached);
        } else if (here < 0 || !cache_.holds(here, table.prefix, table.space, want)) {
            table.hashable = false; // another text with the same hash: whatever follows must not be found by it
            return;
        } else if (pool_.state(here) != HashState::cached) {
            return; // another sequence has yet to write it: a block is not found before those in front of it are written
        } else if (n_lanes_ > 1) {
            attach_own(table, i, here, HashState::cached);
        }
        table.prefix = cache_.prefix_of(here < 0 ? own : here);
        table.n_hashed++;
    }
}

int BlockManager::release_behind(TableId id, int next) {
    Table& table = table_at(id);
    check(!table.swapped && !table.pinned, "blocks of a table that is swapped or pinned were given back");
    int n = 0;
    for (std::size_t l = 0; l < std::size_t(n_lanes_); l++) {
        if (lanes_[l].window == 0) continue;
        LaneTable& lane = table.lanes[l];
        const int  end =
            std::min(CacheLayout::first_entry_seen(lanes_[l].window, next, block_size()), int(lane.blocks.size()));
        for (; lane.n_released < end; lane.n_released++, n += lanes_[l].blocks)
            release(std::exchange(lane.blocks[std::size_t(lane.n_released)], released_block));
    }
    return n;
}

TableId BlockManager::fork_table(TableId id) {
    check(!table_at(id).swapped, "a swapped table was forked"); // before its number could be given to the child
    TableId      child_id = open_table();
    const Table& parent   = table_at(id);
    Table&       child    = table_at(child_id);
    for (std::size_t l = 0; l < std::size_t(n_lanes_); l++) {
        child.lanes[l].blocks.assign(parent.lanes[l].blocks.begin(), parent.lanes[l].blocks.end());
        child.lanes[l].n_released = parent.lanes[l].n_released;
        for (BlockId block : held(child.lanes[l]))
            if (block >= 0) pool_.acquire(block);
    }
    child.space        = parent.space;
    child.n_hashed     = parent.n_hashed;
    child.prefix       = parent.prefix;
    child.hashable     = parent.hashable;
    child.copied_until = parent.copied_until;
    return child_id;
}

void BlockManager::close_table(TableId id, bool uncache) {
    Table&     table = table_at(id);
    const auto close = [&](BlockId block) {
        if (table.pinned && --pins_[std::size_t(block)] == 0) n_pinned_ -= pool_.n_blocks(block);
        if (pool_.ref_count(block) == 1) {
            const CacheEntry& entry = pool_.entry(block);
            const bool        tail  = entry.n_tokens < block_size(); // of no use without its pin
            if (entry.state == HashState::cached && (tail || uncache)) cache_.evict(block);
            // A copy into it that is still pending is of no use any more.
            if (table.copied_until > 0)
                std::erase_if(moves_.copies, [&](const BlockCopy& copy) { return pool_.bundle_of(copy.to) == block; });
        }
        release(block);
    };
    // The lanes side by side: what is left of a prefix has its windows.
    for (std::size_t i = table.lanes[0].blocks.size(); i-- > 0;)
        for (std::size_t l = 0; l < std::size_t(n_lanes_); l++) {
            const BlockId block = table.lanes[l].blocks[i];
            if (block < 0) continue;
            if (table.swapped) release_swap(block);
            else close(block);
        }
    for (LaneTable& lane : lanes(table)) {
        lane.blocks.clear();
        lane.n_released = 0;
    }
    table.in_use = table.swapped = table.pinned = false;
    closed_tables_.push_back(id);
}

void BlockManager::pin_table(TableId id, std::span<const Token> tokens) {
    Table& table = table_at(id);
    check(!table.swapped && !table.pinned && n_entries(id) == entries_for(int(tokens.size())) &&
              std::ranges::all_of(lanes(table).last(std::size_t(n_groups())),
                                  [](const LaneTable& lane) { return lane.n_released == 0; }),
          "a table that does not hold the prefix was pinned");
    const auto size = std::size_t(block_size()), full = tokens.size() / size;
    Prefix     parent{chain_root(table.space)};
    bool       found = true;
    for (std::size_t i = 0; i < full && found; i++) {
        // Where an equal block was there first, that is the one that will be found: keep it instead of ours.
        const std::span<const Token> want = tokens.subspan(i * size, size);
        const BlockId                here = cache_.find(cache_.hash_of(parent, want));
        found                             = here >= 0 && cache_.holds(here, parent, table.space, want);
        if (!found) break;
        parent = cache_.prefix_of(here);
        if (pool_.state(here) == HashState::cached) attach_own(table, i, here, HashState::cached);
        for (int lane = 0; lane < n_lanes_; lane++) {
            BlockId&      entry = table.lanes[std::size_t(lane)].blocks[i];
            const BlockId kept  = cache_.in_lane(here, lane);
            if (kept < 0 || entry < 0 || kept == entry) continue;
            pool_.acquire(kept);
            release(std::exchange(entry, kept));
        }
    }
    const std::span<const Token> rest = tokens.subspan(full * size);
    const BlockId                last = table.lanes[0].blocks.back();
    // As everywhere, nothing is cached behind a block that another sequence has yet to write.
    const BlockId before  = full > 0 ? cache_.block_of(parent) : -1;
    const bool    written = full == 0 || (before >= 0 && pool_.state(before) == HashState::cached);
    if (found && written && !rest.empty() && last >= 0 && pool_.state(last) == HashState::none) {
        cache_.insert(last, {HashState::cached, std::int16_t(rest.size()), -1, 0, parent, table.space, 0}, rest);
        if (pool_.state(last) == HashState::cached) attach_own(table, full, last, HashState::cached);
    }
    for (const LaneTable& lane : lanes(table))
        for (BlockId block : lane.blocks)
            if (block >= 0 && pins_[std::size_t(block)]++ == 0) n_pinned_ += pool_.n_blocks(block);
    table.pinned = true;
}

// -- swapping

void BlockManager::release_swap(BlockId id) {
    if (swap_.ref_count(id) == 1) {
        swap_.clear_entry(id);
        swap_.hold(id); // a copy back to the device may still have to read it
    }
    swap_.release(id);
}

bool BlockManager::swap_out(std::span<const TableId> tables) {
    if (distinct_blocks(tables) > n_swap_free()) return false;
    for (TableId id : tables) check(!table_at(id).swapped && !table_at(id).pinned, "a table was swapped out twice");
    for (TableId id : tables)
        for (int l = 0; l < n_lanes_; l++) {
            if (!has_memory(l)) continue;
            for (BlockId entry : held(table_at(id).lanes[std::size_t(l)])) {
                BlockId& to = destination_[std::size_t(entry)];
                if (to >= 0) {
                    swap_.acquire(to);
                    continue;
                }
                to = swap_.take(l);
                swap_.set_entry(to, pool_.entry(entry), pool_.tokens(entry));
                add_copy(moves_.swap_out, pool_, entry, swap_, to);
                touched_.push_back(entry);
            }
        }
    for (TableId id : tables) {
        Table& table = table_at(id);
        for (std::size_t i = table.lanes[0].blocks.size(); i-- > 0;)
            for (int l = 0; l < n_lanes_; l++) {
                BlockId& entry = table.lanes[std::size_t(l)].blocks[i];
                if (entry < 0) continue;
                release(entry);
                entry = has_memory(l) ? destination_[std::size_t(entry)] : released_block; // a marker is not missed
            }
        if (!has_memory(0)) table.lanes[0].n_released = n_entries(id);
        table.swapped = true;
    }
    for (BlockId entry : touched_) destination_[std::size_t(entry)] = -1;
    touched_.clear();
    return true;
}

int BlockManager::blocks_to_swap_in(std::span<const TableId> tables, std::span<const TableId> closing) const {
    count_leaving(closing);
    now_++;
    int n = 0;
    for (TableId id : tables)
        for (int l = 0; l < n_lanes_; l++)
            for (BlockId entry : held(table_at(id).lanes[std::size_t(l)])) {
                if (std::exchange(seen_[std::size_t(entry)], now_) == now_) continue;
                const BlockId here = resident(entry, l);
                n += here < 0 || is_free_now(here) ? swap_.n_blocks(entry) : 0;
            }
    forget_leaving();
    return n;
}

// The block on the device that still holds the tokens of a swapped one, or -1.
BlockId BlockManager::resident(BlockId swapped, int lane) const {
    const CacheEntry& entry = swap_.entry(swapped);
    if (entry.state != HashState::cached || entry.n_tokens < block_size()) return -1;
    const BlockId owner = cache_.block_of({entry.hash, entry.serial});
    const BlockId here  = owner < 0 ? -1 : cache_.in_lane(owner, lane);
    return here >= 0 && pool_.state(here) == HashState::cached ? here : -1;
}

bool BlockManager::swap_in(std::span<const TableId> tables, int keep_free) {
    if (blocks_to_swap_in(tables) + keep_free > n_free()) return false;
    // Blocks that are still on the device come first, before a fresh block can take their place; the first lane comes before the lanes
    // that are attached to it.
    for (const bool fresh : {false, true})
        for (int l = 0; l < n_lanes_; l++)
            for (TableId id : tables) {
                check(table_at(id).swapped, "a table that is not swapped out was swapped in");
                for (BlockId from : held(table_at(id).lanes[std::size_t(l)])) {
                    BlockId& to = destination_[std::size_t(from)];
                    if (to >= 0) continue;
                    if (!fresh) {
                        to = resident(from, l);
                        if (to < 0) continue;
                        pool_.acquire(to);
                        touched_.push_back(from);
                        continue;
                    }
                    to = take_block(l);
                    touched_.push_back(from);
                    add_copy(moves_.swap_in, swap_, from, pool_, to);
                    CacheEntry entry = swap_.entry(from);
                    if (entry.state != HashState::cached || entry.n_tokens < block_size()) continue;
                    if (l > 0) {
                        const BlockId owner = cache_.block_of({entry.hash, entry.serial});
                        if (owner >= 0 && cache_.attached(owner, l) < 0) cache_.attach(owner, to, HashState::in_flight);
                    } else if (cache_.find(entry.hash) < 0 && cache_.is_known(entry.parent)) {
                        entry.state = HashState::in_flight;
                        cache_.insert(to, entry, swap_.tokens(from));
                    }
                }
            }
    for (TableId id : tables) {
        Table& table = table_at(id);
        for (LaneTable& lane : lanes(table))
            for (BlockId& entry : held(lane)) {
                const BlockId to = destination_[std::size_t(entry)];
                pool_.acquire(to);
                release_swap(entry);
                entry = to;
            }
        table.swapped = false;
    }
    // Every table has its own reference now.
    for (BlockId from : touched_) pool_.release(std::exchange(destination_[std::size_t(from)], -1));
    touched_.clear();
    return true;
}

int BlockManager::slot(TableId table, int position) const {
    std::span<const BlockId> ids = blocks(table);
    check(position >= 0 && position / block_size() < int(ids.size()), "a position without a block");
    return ids[std::size_t(position / block_size())] * block_size() + position % block_size();
}

int BlockManager::distinct_blocks(std::span<const TableId> tables) const {
    now_++;
    int n = 0;
    for (TableId id : tables)
        for (std::size_t l = 0; l < std::size_t(n_lanes_); l++)
            for (BlockId block : held(table_at(id).lanes[l]))
                if (block >= 0 && std::exchange(seen_[std::size_t(block)], now_) != now_) n += lanes_[l].blocks;
    return n;
}

void BlockManager::take_moves(BlockMoves& moves) {
    const auto append = [](std::vector<BlockCopy>& to, const std::vector<BlockCopy>& from) {
        to.insert(to.end(), from.begin(), from.end());
    };
    append(moves.swap_out, moves_.swap_out);
    append(moves.swap_in, moves_.swap_in);
    append(moves.copies, moves_.copies);
    moves_.clear();
    pool_.release_held();
    swap_.release_held();
}

int BlockManager::ref_count(BlockId block) const {
    check(block >= 0 && block < n_blocks(), "no such block");
    return pool_.ref_count(pool_.bundle_of(block));
}

bool BlockManager::is_cached(BlockId block) const {
    check(block >= 0 && block < n_blocks(), "no such block");
    return pool_.state(pool_.bundle_of(block)) == HashState::cached;
}

void BlockManager::drop_cache() {
    while (pool_.first_cached_free() >= 0) cache_.evict(pool_.first_cached_free());
    while (pool_.first_cached_marker() >= 0) cache_.evict(pool_.first_cached_marker());
}

void BlockManager::view(Snapshot& snapshot) const {
    snapshot.block_size    = block_size();
    snapshot.n_swap_blocks = n_swap();
    snapshot.n_swap_used   = n_swap() - n_swap_free() - swap_.n_held();
    snapshot.blocks.clear();
    for (BlockId id = 0; id < n_blocks(); id++) {
        const BlockId     of    = pool_.bundle_of(id);
        const CacheEntry& entry = pool_.entry(of);
        BlockView&        v     = snapshot.blocks.emplace_back();
        v.ref_count             = pool_.ref_count(of);
        v.pinned                = pins_[std::size_t(of)] > 0;
        v.cached                = entry.state == HashState::cached && entry.n_tokens == block_size();
        v.group  = v.ref_count > 0 || v.cached ? std::clamp(pool_.lane(of) - lane_of(0), 0, n_groups() - 1) : 0;
        v.hash   = v.cached ? entry.hash : 0;
        v.filled = entry.state == HashState::cached ? entry.n_tokens : 0;
    }
}

void BlockManager::check_invariants() const {
    std::vector<int> on_device(pins_.size(), 0), swapped(std::size_t(n_swap()), 0), pins(on_device);
    for (const Table& table : tables_)
        for (std::size_t l = 0; l < std::size_t(n_lanes_); l++) {
            const LaneTable& lane = table.lanes[l];
            check(table.in_use || lane.blocks.empty(), "a closed table holds blocks");
            check(lane.blocks.size() == table.lanes[0].blocks.size(), "the lanes of a table are not of one length");
            for (std::size_t i = 0; i < lane.blocks.size(); i++) {
                const BlockId block = lane.blocks[i];
                check((block < 0) == (int(i) < lane.n_released) || !has_memory(int(l)), "an entry is missing");
                if (block < 0) continue;
                check(table.placed < 0 || block == table.placed + BlockId(i), "a contiguous table is not contiguous");
                (table.swapped ? swapped : on_device).at(std::size_t(block))++;
                check((table.swapped ? swap_ : pool_).n_blocks(block) == lanes_[l].blocks,
                      "an entry has not the blocks of its group");
                if (!table.swapped && table.pinned) pins[std::size_t(block)]++;
            }
        }
    pool_.check_invariants(on_device);
    swap_.check_invariants(swapped);
    cache_.check_invariants();
    int n_pinned = 0;
    for (BlockId id = 0; id < pool_.n_ids(); id++) {
        const CacheEntry& entry = pool_.entry(id);
        const int         n     = pins_[std::size_t(id)];
        check(n == pins[std::size_t(id)], "a pin is not a pinned table's");
        check(n > 0 || entry.state == HashState::none || entry.n_tokens == block_size(),
              "a part of a block is cached, but not pinned");
        n_pinned += n > 0 ? pool_.n_blocks(id) : 0;
    }
    check(n_pinned == n_pinned_, "pinned blocks are miscounted");
    check(std::ranges::all_of(destination_, [](BlockId id) { return id < 0; }), "a swap left a destination behind");
    check(std::ranges::all_of(leaving_, [](int n) { return n == 0; }), "a sharer was counted and not taken back");
}

} // namespace quire
