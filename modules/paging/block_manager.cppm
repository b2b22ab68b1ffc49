// quire.paging.block_manager: which physical KV block holds which tokens of which sequence (the paper, sections 4.2 to 4.5): block
// tables, copy-on-write, swapping. **Owns** all block metadata: tables, the device's pool, the host pool, prefix cache. Handles no tensors.
export module quire.paging.block_manager;

import quire.core.base;
import quire.core.std;
import quire.paging.block;
import quire.paging.block_hash;
import quire.paging.block_pool;
import quire.paging.cache_layout;
export import quire.paging.host_tier;    // HostTier
export import quire.paging.prefix_cache; // Lane
import quire.paging.snapshot;
export import quire.paging.tables.block_tables; // TableId, BlockManagerOptions
import quire.paging.tables.counts;
import quire.paging.tables.prompts;
import quire.paging.tables.swaps;
export import quire.paging.tables.writes; // Write

export namespace quire {

class BlockManager {
public:
    explicit BlockManager(const BlockManagerOptions& options);

    inline int                n_blocks() const { return tables_.pool.size(); }
    inline int                block_size() const { return tables_.block_size(); }
    inline const CacheLayout& layout() const { return tables_.layout; }
    inline int                n_groups() const { return int(layout().groups.size()); }
    inline int                n_free() const { return tables_.pool.n_free(); } // in no table, including cached ones
    int                       n_used() const { return n_blocks() - n_free(); }
    int n_cached_free() const { return tables_.pool.n_cached_free(); } // in no table, but still in the prefix cache
    // Blocks that pinned tables hold.
    int n_pinned() const { return tables_.n_pinned; }
    int n_copies() const { return int(tables_.moves.copies.size()); } // waiting for take_moves()
    // Blocks of the host pool, for swapped requests and for units that have left the device's prefix cache.
    int n_swap() const { return swaps_.pool().size(); }
    int n_swap_free() const { return swaps_.pool().n_free() + tables_.host.n_away(); } // of no swapped request
    int n_on_host() const { return tables_.host.n_cached(); }                          // of the prefix cache
    const HostTierStats& host_stats() const { return tables_.host.stats(); }

    // -- for files behind the prefix cache; see HostTier and PrefixCache

    HostTier&             host() { return tables_.host; }
    std::span<const Lane> lanes() const { return tables_.cache_lanes; }
    void                  begin_serials(std::uint64_t first) { tables_.cache.begin_serials(first); }
    KnownText             known(const CacheNamespace& space, std::span<const Token> tokens) const {
        return tables_.cache.known(space, tokens);
    }
    // Saves the units of these blocks in host memory, and for files that lack them.
    void save(const CacheNamespace& space, std::span<const Token> tokens) { tables_.cache.save(space, tokens); }
    // The hash of the prefix that is `parent` and a block of these tokens.
    BlockHash hash_of(const Prefix& parent, std::span<const Token> tokens) const {
        return tables_.cache.hash_of(parent, tokens);
    }

    // Entries of a table for `n_tokens` tokens, and the blocks of such entries of all groups.
    inline int entries_for(int n_tokens) const { return tables_.entries_for(n_tokens); }
    inline int blocks_for(int n_tokens) const { return entries_for(n_tokens) * tables_.blocks_per_entry; }
    inline int blocks_per_unit() const { return tables_.blocks_per_unit; } // of a recurrent state; 0: there are none

    // -- a sequence's table

    TableId open_table(const CacheNamespace& space = {}) { return tables_.open(space); }
    // Fills an empty table with blocks for all of `tokens`, or returns false and changes nothing if fewer than `keep_free` blocks
    // would stay free. With `read_cache`, cached blocks with the same beginning are shared, and a block that matches only in
    // part is copied. The last token is always left to compute, because its logits are needed. Groups with a window get no blocks
    // for what lies behind it already; `whole`: they do.
    bool allocate(TableId table, std::span<const Token> tokens, int keep_free = 0, bool read_cache = true,
                  bool whole = false) {
        return allocate_table(tables_, table, tokens, keep_free, read_cache, whole);
    }
    // Blocks that allocate() takes from the free list for all sequences of a request. `closing`, here and below: as if these tables
    // were closed. `most_entries`: a group with a window holds no more entries at once.
    int blocks_to_allocate(const CacheNamespace& space, std::span<const std::span<const Token>> sequences,
                           std::span<const TableId> closing = {}, bool whole = false,
                           int most_entries = std::numeric_limits<int>::max()) const {
        return counts_.blocks_to_allocate(space, sequences, closing, whole, most_entries);
    }
    int blocks_to_allocate(const CacheNamespace& space, std::span<const Token> tokens) const {
        return blocks_to_allocate(space, std::array{tokens});
    }
    int n_free(std::span<const TableId> closing) const { return counts_.n_free(closing); }
    // Appends blocks, shared as by allocate(), to a table that holds a beginning of `tokens`, up to position `end` or until no block is free.
    // Gives back the blocks that position p does not see. Returns p: the first position from `from` on that is not written; without
    // `read_cache`, `from` itself.
    int grow(TableId table, std::span<const Token> tokens, int from, int end, bool read_cache = true) {
        return grow_table(tables_, table, tokens, from, end, read_cache);
    }
    // The first position, of n_tokens known tokens and at or after `from`, that the sequence has to compute itself. Tokens that
    // others have written, or write in this step, are skipped, but never the last token.
    inline int next_unwritten(TableId table, int from, int n_tokens) const {
        return quire::next_unwritten(tables_, table, from, n_tokens);
    }
    // How many leading positions, of the first n, were written before this step and are not written again in it, at least: a shared
    // block that a sharer may write in this step ends the count.
    inline int n_readable(TableId table, int n) const { return quire::n_readable(tables_, table, n); }
    // Whether the last token's slot is in a block that is in flight, which cannot be copied yet.
    inline bool must_wait(TableId table, int n_tokens) const { return quire::must_wait(tables_, table, n_tokens); }
    // Slots for all `writes`, or for none (false): appends blocks as needed and replaces a shared block by a copy
    // (copy-on-write). Of n sharers the first n - 1 copy, the last one writes in place. `may_copy` false: none if a copy is needed.
    inline bool allocate_slots(std::span<const Write> writes, bool may_copy = true) {
        return quire::allocate_slots(tables_, counts_, writes, may_copy);
    }
    // Most blocks that allocate_slots() takes from the free list.
    int blocks_to_write(std::span<const Write> writes) const {
        return quire::blocks_to_write(tables_, counts_, writes);
    }
    inline bool allocate_slots(TableId table, int first, int n) {
        return allocate_slots(std::array{Write{table, first, n}});
    }
    // This step will write those positions; sequences scheduled later in the step can rely on it.
    inline void will_write(const Write& write) { quire::will_write(tables_, write); }
    // Whether a sequence that was scheduled earlier in this step writes a part of the block of that position. The rest of the block,
    // which the two share, comes in the next steps.
    inline bool is_partly_written(TableId table, int position) const {
        return quire::is_partly_written(tables_, table, position);
    }
    // The step has run: everything announced by will_write() is written, and all moves are done.
    void commit() {
        tables_.cache.commit();
        tables_.partly_written.clear();
    }
    // Where layers have a recurrent state. advance(): a step has computed it up to n_tokens; each step that runs tokens of a sequence is
    // followed by it, unless the same tokens are to run again. A step from the end of the state on reads the state unit state_from(), -1 for
    // zeros, and writes state_to(), which allocate_slots() chose.
    void           advance(TableId table, int n_tokens) { tables_.advance(table, n_tokens); }
    inline BlockId state_from(TableId table) const { return tables_.at(table).state; }
    inline BlockId state_to(TableId table) const {
        const BlockTable& t = tables_.at(table);
        return t.next_state >= 0 ? t.next_state : t.state;
    }
    // The block of the state that the step after the running one writes: state_to(), or the one that take_next() has taken.
    inline BlockId state_after(TableId table) const {
        const BlockTable& t = tables_.at(table);
        return t.later_state >= 0 ? t.later_state : state_to(table);
    }
    inline int state_at(TableId table) const { return tables_.at(table).state_at; } // tokens that it has seen
    // Lets others find the state, if it stands at the end of a block that they can find. False: it does not.
    bool keep_state(TableId table, std::span<const Token> tokens) { return quire::keep_state(tables_, table, tokens); }
    // note_last(): the table keeps its present state, which stands at the end of a block, until the next note_last(). Later steps write to other
    // units. keep_last() lets others find the kept state, before the table is closed; false: there is none, or others find it already, or the block
    // before it cannot be found.
    void note_last(TableId table) { tables_.note_last(table); }
    bool keep_last(TableId table, std::span<const Token> tokens) { return quire::keep_last(tables_, table, tokens); }
    // Gives back these states of all tables, but not a state that is its table's state still. False: there is none.
    bool drop_last() { return tables_.drop_last(); }
    // While a step runs behind which note_last() will come: a state unit for the step after it. False: there is no room for one.
    bool take_next(TableId table) { return tables_.take_next(table); }
    // The blocks that can be found in the prefix cache from now on, or no longer; off at first.
    void log_cache(bool on) {
        tables_.cache.log_changes(on);
        tables_.host.log_changes(on);
    }
    // The changes since the last call, of the device, host memory and files, while log_cache() is on.
    std::vector<CacheChange> take_cache_changes();
    // Reports that positions 0 .. n_written-1 hold the KV of `tokens`; blocks that became full enter the prefix cache.
    inline void publish(TableId table, std::span<const Token> tokens, int n_written) {
        publish_table(tables_, table, tokens, n_written);
    }
    // Sliding windows: `next` is the sequence's next position. Gives back the blocks that lie wholly behind the window of their group;
    // they stay in the prefix cache until their memory is needed. Returns how many.
    int release_behind(TableId table, int next) { return tables_.release_behind(table, next); }
    // Gives back the entries behind those for n_tokens tokens. No other table has these entries: they hold only K and V of draft tokens.
    void truncate(TableId table, int n_tokens) { tables_.truncate(table, entries_for(n_tokens)); }
    // Contiguous memory: entry i of the table is block first + i from now on. The caller knows that these blocks are free. The blocks
    // that the table has are copied there. Such a table is not in the prefix cache.
    void    place(TableId table, BlockId first) { tables_.place(table, first); }
    BlockId placed_at(TableId table) const { return tables_.at(table).placed; } // or -1
    // A second table with the same blocks, in no place of its own. Nothing is copied until one of the two writes.
    TableId fork_table(TableId table) { return tables_.fork(table); }
    // Frees all blocks, the last one first, so that a prefix's first blocks stay cached longest.
    // `uncache`: also removes them from the prefix cache.
    void close_table(TableId table, bool uncache = false);
    // Pins the table's blocks, which hold `tokens`, until it is closed; a partly filled last block enters the cache too.
    void pin_table(TableId table, std::span<const Token> tokens) { quire::pin_table(tables_, table, tokens); }

    // -- swapping (section 4.5): all tables of a request together; a block that they share is moved once

    // False, with nothing changed, if the host pool has too few free blocks.
    bool swap_out(std::span<const TableId> tables) { return swaps_.swap_out(tables); }
    // Most blocks that swap_in() takes from the free list.
    int blocks_to_swap_in(std::span<const TableId> tables, std::span<const TableId> closing = {}) const {
        return swaps_.blocks_to_swap_in(tables, closing);
    }
    // The physical blocks differ from before; blocks that are still in the prefix cache are shared instead of copied.
    bool swap_in(std::span<const TableId> tables, int keep_free = 0) { return swaps_.swap_in(tables, keep_free); }
    bool is_swapped(TableId table) const { return tables_.at(table).swapped; }

    // The entries of a group's table: the first block of each, or released_block in front. Ids of the host pool while the table is swapped.
    inline std::span<const BlockId> blocks(TableId table, int group = 0) const { return lane_of(table, group).blocks; }
    inline int                      n_entries(TableId table) const { return tables_.at(table).n_entries(); }
    inline int n_released(TableId table, int group = 0) const { return lane_of(table, group).n_released; }
    // Blocks that the table holds, of all groups.
    inline int n_held(TableId table) const;
    // The block behind one in its entry, of a table that is not swapped.
    BlockId next_of(BlockId block) const { return tables_.pool.next_of(block); }
    // Leading entries that allocate() found in the prefix cache; and how many of them were in host memory.
    inline int n_found(TableId table) const { return tables_.at(table).n_found; }
    int        n_loaded(TableId table) const { return tables_.at(table).n_loaded; }
    int        slot(TableId table, int position) const; // of the first group: block * block_size + offset
    int        distinct_blocks(std::span<const TableId> tables) const { return counts_.distinct_blocks(tables); }

    // Appends the pending block copies, which must run before the step, to `moves`.
    void take_moves(BlockMoves& moves);

    int  ref_count(BlockId block) const;
    bool is_cached(BlockId block) const; // in the prefix cache, its KV written

    // Removes all blocks from the prefix cache that are in no table.
    void drop_cache();
    // Removes about `most` blocks on the device from the prefix cache, the longest unused ones first; host memory keeps them, as far as it has
    // room. False: the device has no more. The moves have to run before the next call.
    bool move_to_host(int most);
    // The state of each block, for display. `filled` is left to the scheduler, which knows the sequences' lengths.
    void view(Snapshot& snapshot) const;
    // Where to record evictions from now on; null: nowhere.
    void log_to(std::vector<MemoryEvent>* log) { tables_.log = log; }
    // Checks everything; stops with a message at the first broken invariant. For tests and debugging, not for the step loop.
    void check_invariants() const;

private:
    inline std::size_t lane_of(int group) const {
        return std::size_t(group + tables_.n_lanes - int(layout().tables().size()));
    }
    inline const LaneTable& lane_of(TableId table, int group) const { return tables_.at(table).lanes[lane_of(group)]; }

    BlockTables         tables_;
    mutable BlockCounts counts_;
    TableSwaps          swaps_;
};

inline int BlockManager::n_held(TableId id) const {
    const BlockTable& table = tables_.at(id);
    int               n     = 0;
    for (std::size_t l = 0; l < std::size_t(tables_.n_lanes); l++)
        n += (int(table.lanes[l].blocks.size()) - table.lanes[l].n_released) * tables_.lanes[l].blocks;
    if (!tables_.keeps_state()) return n;
    for (BlockId unit : table.units()) n += int(unit >= 0) * tables_.blocks_per_unit;
    if (table.last_state >= 0 && table.last_state == table.state) n -= tables_.blocks_per_unit;
    return n;
}

} // namespace quire

module :private;

namespace quire {

BlockManager::BlockManager(const BlockManagerOptions& options)
    : tables_(options), counts_(tables_), swaps_(tables_, counts_) {
    check_invariants();
}

void BlockManager::close_table(TableId id, bool uncache) {
    BlockTable& table = tables_.at(id);
    if (table.swapped) swaps_.clear(table);
    else tables_.clear(table, uncache);
    tables_.close(id);
}

int BlockManager::slot(TableId table, int position) const {
    std::span<const BlockId> ids = blocks(table);
    check(position >= 0 && position / block_size() < int(ids.size()), "a position without a block");
    return ids[std::size_t(position / block_size())] * block_size() + position % block_size();
}

void BlockManager::take_moves(BlockMoves& moves) {
    const auto append = [](std::vector<BlockCopy>& to, const std::vector<BlockCopy>& from) {
        to.insert(to.end(), from.begin(), from.end());
    };
    append(moves.swap_out, tables_.moves.swap_out);
    append(moves.swap_in, tables_.moves.swap_in);
    append(moves.copies, tables_.moves.copies);
    tables_.moves.clear();
    tables_.pool.release_held();
    swaps_.release_held();
}

std::vector<CacheChange> BlockManager::take_cache_changes() {
    std::vector<CacheChange> changes = tables_.cache.take_changes();
    for (CacheChange& change : tables_.host.take_changes()) changes.push_back(std::move(change));
    for (CacheChange& change : changes) change.window = layout().groups[std::size_t(change.group)].window;
    return changes;
}

int BlockManager::ref_count(BlockId block) const {
    check(block >= 0 && block < n_blocks(), "no such block");
    return tables_.pool.ref_count(tables_.pool.bundle_of(block));
}

bool BlockManager::is_cached(BlockId block) const {
    check(block >= 0 && block < n_blocks(), "no such block");
    return tables_.pool.state(tables_.pool.bundle_of(block)) == HashState::cached;
}

void BlockManager::drop_cache() {
    const BlockPool& pool = tables_.pool;
    tables_.host.pause(true);
    while (pool.first_cached_free() >= 0) tables_.cache.evict(pool.first_cached_free());
    while (pool.first_cached_marker() >= 0) tables_.cache.evict(pool.first_cached_marker());
    tables_.host.clear();
    tables_.host.pause(false);
}

bool BlockManager::move_to_host(int most) {
    const BlockPool& pool = tables_.pool;
    // Of more than host memory holds the rest is forgotten.
    tables_.host.pause(true);
    while (pool.n_cached_free() > n_swap()) tables_.cache.evict(pool.first_cached_free());
    tables_.host.pause(false);
    const int until = pool.n_cached_free() - most;
    while (pool.first_cached_free() >= 0 && pool.n_cached_free() > until) tables_.cache.evict(pool.first_cached_free());
    if (pool.first_cached_free() >= 0) return true;
    while (pool.first_cached_marker() >= 0) tables_.cache.evict(pool.first_cached_marker());
    return false;
}

void BlockManager::view(Snapshot& snapshot) const {
    snapshot.block_size    = block_size();
    snapshot.n_swap_blocks = n_swap();
    snapshot.n_swap_used   = std::max(n_swap() - n_swap_free() - swaps_.pool().n_held(), 0);
    snapshot.n_host_cached = n_on_host();
    snapshot.blocks.clear();
    for (BlockId id = 0; id < n_blocks(); id++) {
        const BlockId     of    = tables_.pool.bundle_of(id);
        const CacheEntry& entry = tables_.pool.entry(of);
        BlockView&        v     = snapshot.blocks.emplace_back();
        v.ref_count             = tables_.pool.ref_count(of);
        v.pinned                = tables_.pins[std::size_t(of)] > 0;
        v.cached                = entry.state == HashState::cached && entry.n_tokens == block_size();
        if (v.ref_count > 0 || v.cached)
            v.group = std::clamp(tables_.pool.lane(of) - int(lane_of(0)), 0, n_groups() - 1);
        v.first  = of == id ? -1 : of;
        v.hash   = v.cached ? entry.hash : 0;
        v.state  = layout().keeps_state() && v.group == n_groups() - 1 && (v.ref_count > 0 || v.cached);
        v.filled = v.state ? block_size() : entry.state == HashState::cached ? entry.n_tokens : 0;
    }
}

void BlockManager::check_invariants() const {
    tables_.check_invariants();
    swaps_.check_invariants();
    counts_.check_invariants();
}

} // namespace quire
