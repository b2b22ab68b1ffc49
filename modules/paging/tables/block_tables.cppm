// quire.paging.tables.block_tables: block tables, and the pool, the prefix cache and the pending copies behind their entries.
// **Owns** all of these. The parts of the block manager work on it.
//
// A sequence has a table for each cache group (quire.paging.cache_layout). Inside, a table is a list of lanes, one for each group, of
// which the first one keeps all positions, because the prefix cache is indexed by it; where no group does, that lane has markers:
// entries without memory.
export module quire.paging.tables.block_tables;

import quire.core.base;
import quire.core.std;
import quire.paging.block;
import quire.paging.block_hash;
import quire.paging.block_pool;
import quire.paging.cache_layout;
import quire.paging.host_tier;
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
    int n_swap     = 0;  // blocks of the host pool, for swapped requests
    // The order in which free blocks are first allocated; empty: 0, 1, 2, …
    std::vector<BlockId> free_order = {};
    // Tests set another one. Collisions may cost hits but never cause a wrong one.
    ChainHash   hash   = chain_hash;
    CacheLayout layout = {};
    // Markers, where no group keeps all positions: for the entries of all tables, and more for the prefix cache. A sequence that gets
    // no marker is not found by others. 0: some for each block.
    int n_markers = 0;
    int n_tier    = 0; // more blocks of the host pool, for what leaves the device's prefix cache; 0: that is forgotten
    ForFiles for_files = ForFiles::none;
};

// BlockManagerOptions::n_markers where so many sequences run at once, each of at most `context` tokens: one for each entry of their tables and
// of their forks' and two for each block; of very long contexts fewer, since a marker takes some 300 bytes.
int markers_for(int n_blocks, int block_size, int max_sequences, int context);

struct LaneTable {
    std::vector<BlockId> blocks;         // all lanes of a table have as many
    int                  n_released = 0; // leading entries that are released_block

    // The entries that are blocks, or markers.
    inline std::span<BlockId>       held() { return std::span(blocks).subspan(std::size_t(n_released)); }
    inline std::span<const BlockId> held() const { return std::span(blocks).subspan(std::size_t(n_released)); }
};

struct BlockTable {
    bool                              in_use = false, hashable = true, swapped = false, pinned = false;
    int                               n_found      = 0;  // leading entries that the prefix cache had for a prompt
    int                               n_loaded     = 0;  // of these, entries that were in host memory
    int                               n_hashed     = 0;  // leading full blocks whose hashes are in the chain
    int                               copied_until = 0;  // position up to which a copied block came filled
    BlockId                           placed       = -1; // the first block, where the table is contiguous
    std::array<LaneTable, most_lanes> lanes;
    // Where layers have a recurrent state: the state unit after the first state_at tokens, -1 for none, which is zeros; and the state unit that
    // the next step writes, -1 for the same one. A state unit that others can find or share is not written.
    BlockId state = -1, next_state = -1;
    int     state_at = 0;
    // The state unit after the first last_at tokens, which becomes a checkpoint when the table is closed; it can be `state`. -1: there is none.
    BlockId last_state = -1;
    int     last_at    = 0;
    // The state that the step after the next one writes, if that step is planned and writes to another unit than the next one.
    BlockId        later_state = -1;
    Prefix         prefix; // of these n_hashed blocks
    CacheNamespace space;

    inline int n_entries() const { return int(lanes[0].blocks.size()); }
    void       forget_units() {
        state = next_state = last_state = later_state = -1;
        state_at = last_at = 0;
    }
    // The state units that the table holds, with a reference for each; -1: none.
    std::array<BlockId, 4> units() const { return {state, next_state, last_state, later_state}; }
};

struct BlockTables {
    explicit BlockTables(const BlockManagerOptions& options);
    BlockTables(const BlockTables&)            = delete;
    BlockTables& operator=(const BlockTables&) = delete;

    CacheLayout               layout;
    std::vector<Lane>         lanes;       // of tables
    std::vector<Lane>         cache_lanes; // these and, behind them, that of the states
    int                       n_lanes;
    int                       blocks_per_entry, blocks_per_unit;
    BlockMoves                moves; // pending
    BlockPool                 pool;  // on the device
    HostTier                  host;  // what has left it
    PrefixCache               cache; // of both
    std::vector<std::int32_t> pins;  // [n_ids] pinned tables that a block is in
    int                       n_pinned = 0;
    std::vector<BlockTable>   all;
    std::vector<TableId>      closed;         // to be used again, with the memory of their vectors
    std::vector<BlockId>      partly_written; // shared blocks that the step at hand begins and does not fill
    std::vector<MemoryEvent>* log = nullptr;  // where evictions are recorded

    inline int         block_size() const { return pool.block_size(); }
    inline int         entries_for(int n_tokens) const { return (n_tokens + block_size() - 1) / block_size(); }
    inline bool        has_memory(std::size_t lane) const { return cache_lanes[lane].blocks > 0; }
    inline bool        keeps_state() const { return blocks_per_unit > 0; }
    inline std::size_t state_lane() const { return lanes.size(); }
    // The lanes of a table that are in use; the others are empty.
    inline std::span<LaneTable>       of(BlockTable& table) const { return std::span(table.lanes).first(lanes.size()); }
    inline std::span<const LaneTable> of(const BlockTable& table) const {
        return std::span(table.lanes).first(lanes.size());
    }

    inline BlockTable& at(TableId table) {
        if (std::size_t(table) >= all.size() || !all[std::size_t(table)].in_use) [[unlikely]]
            check(false, "no such block table"); // called in this case only, because check() is not inline
        return all[std::size_t(table)];
    }
    inline const BlockTable& at(TableId table) const { return const_cast<BlockTables*>(this)->at(table); }
    inline HashState         chain_state(const BlockTable& table, int entry) const { // of the first lane's
        const BlockId id = table.lanes[0].blocks[std::size_t(entry)];
        return id < 0 ? HashState::none : pool.state(id);
    }

    // BlockManager's functions; close() is for a table whose entries were given back by clear(), or by TableSwaps.
    TableId open(const CacheNamespace& space);
    TableId fork(TableId table);
    void    clear(BlockTable& table, bool uncache);
    void    close(TableId table);
    int     release_behind(TableId table, int next);
    void    advance(TableId table, int n_tokens);
    void    note_last(TableId table);
    bool    drop_last();
    bool    take_next(TableId table);
    void    truncate(TableId table, int n_entries);
    void    place(TableId table, BlockId first);

    // -- entries

    // An entry for new content, evicted from the prefix cache if it is there. Where a marker is wanted and there is none:
    // released_block.
    inline BlockId take(std::size_t lane) {
        const BlockId id = pool.take(int(lane));
        return id >= 0 && pool.state(id) != HashState::cached ? id : evict_for(lane, id);
    }
    [[gnu::always_inline]] inline void append(BlockTable& table) { // the next entry, in all lanes
        if (table.placed >= 0) [[unlikely]]
            return append_placed(table);
        for (std::size_t lane = 0, n = std::size_t(n_lanes); lane < n; lane++) {
            const BlockId id = take(lane);
            if (id < 0) table.hashable = false;
            table.lanes[lane].blocks.push_back(id);
        }
    }
    inline void release(BlockId block) {
        const HashState state = pool.state(block);
        if (pool.ref_count(block) == 1 && (state == HashState::reserved || state == HashState::in_flight))
            cache.evict(block); // no sequence will write it any more
        pool.release(block);
    }
    // The table's blocks of the other lanes enter the prefix cache, attached to `owner`, an entry of the first lane with the same
    // tokens.
    void attach_own(const BlockTable& table, std::size_t entry, BlockId owner, HashState state);

    void check_invariants() const;

private:
    BlockId evict_for(std::size_t lane, BlockId taken); // the rest of take(), where something is cached
    void    append_placed(BlockTable& table);
};

// The blocks of an entry, by lane.
std::array<int, most_lanes> bundles_of(std::span<const Lane> lanes);

} // namespace quire

module :private;

namespace quire {

std::vector<Lane> lanes_of(const CacheLayout& layout) {
    check(!layout.groups.empty() && int(layout.groups.size()) <= most_cache_groups, "more cache groups than lanes");
    std::vector<Lane> lanes;
    if (!layout.keeps_all()) lanes.push_back({0, 0});
    for (const CacheGroup& g : layout.tables()) lanes.push_back({g.window, g.blocks});
    return lanes;
}

std::vector<Lane> cache_lanes_of(const CacheLayout& layout) {
    std::vector<Lane> lanes = lanes_of(layout);
    if (layout.keeps_state()) lanes.push_back({2, layout.blocks_per_unit(), true});
    return lanes;
}

std::array<int, most_lanes> bundles_of(std::span<const Lane> lanes) {
    std::array<int, most_lanes> bundles;
    bundles.fill(1);
    for (std::size_t i = 0; i < lanes.size(); i++) bundles[i] = lanes[i].blocks;
    return bundles;
}

int markers_for(int n_blocks, int block_size, int max_sequences, int context) {
    constexpr std::int64_t most = 1 << 18; // of the running sequences
    return int(std::min(most, std::int64_t(2) * max_sequences * (context / block_size + 2))) + 2 * n_blocks;
}

int markers_of(const BlockManagerOptions& o) {
    if (o.layout.keeps_all()) return 0;
    return o.n_markers > 0 ? o.n_markers : 8 * o.n_blocks + 1024;
}

BlockTables::BlockTables(const BlockManagerOptions& options)
    : layout(options.layout), lanes(lanes_of(layout)), cache_lanes(cache_lanes_of(layout)), n_lanes(int(lanes.size())),
      blocks_per_entry(layout.blocks_per_entry()), blocks_per_unit(layout.blocks_per_unit()),
      pool(options.n_blocks, options.block_size, FreeOrder::fifo, options.free_order, bundles_of(cache_lanes),
           markers_of(options)),
      host({options.n_swap + options.n_tier, options.block_size, layout.keeps_all() ? 0 : 2 * options.n_tier + 64,
            options.n_tier > 0, options.for_files, layout.keeps_state()},
           bundles_of(cache_lanes), moves.swap_out),
      cache(pool, options.hash, cache_lanes, host), pins(std::size_t(pool.n_ids())) {
    check(options.n_blocks > 0 && options.block_size > 0 && options.n_swap >= 0 && options.n_tier >= 0,
          "an empty block pool");
    // The lists of a step never need more room than this.
    for (auto* list : {&moves.copies, &moves.swap_out, &moves.swap_in}) list->reserve(pins.size());
}

// -- entries

BlockId BlockTables::evict_for(std::size_t lane, BlockId id) {
    const auto evict = [&](BlockId cached) {
        if (log && cached < pool.size()) log->push_back({MemoryEventKind::evict, 0, 0, cached, -1});
        cache.evict(cached);
    };
    for (; id < 0; id = pool.take(int(lane))) {
        const BlockId next = has_memory(lane) ? pool.first_cached_free() : pool.first_cached_marker();
        check(next >= 0 || !has_memory(lane), "a block was taken from an empty pool");
        if (next < 0) return released_block;
        evict(next);
    }
    if (pool.state(id) == HashState::cached) {
        evict(id);
        pool.set_lane(id, int(lane));
    }
    return id;
}

void BlockTables::append_placed(BlockTable& table) {
    std::vector<BlockId>& blocks = table.lanes[0].blocks;
    const BlockId         id     = table.placed + BlockId(blocks.size());
    check(id < pool.size() && pool.ref_count(id) == 0 && pool.state(id) == HashState::none,
          "a contiguous table met a block that is in use");
    pool.acquire(id);
    blocks.push_back(id);
}

void BlockTables::attach_own(const BlockTable& table, std::size_t entry, BlockId owner, HashState state) {
    for (std::size_t lane = 1; lane < lanes.size(); lane++) {
        const BlockId own = table.lanes[lane].blocks[entry];
        if (own >= 0 && pool.state(own) == HashState::none && cache.attached(owner, int(lane)) < 0)
            cache.attach(owner, own, state);
    }
}

// -- tables

TableId BlockTables::open(const CacheNamespace& space) {
    if (closed.empty()) {
        closed.push_back(TableId(all.size()));
        all.emplace_back();
    }
    TableId id = closed.back();
    closed.pop_back();
    BlockTable& table = all[std::size_t(id)];
    table.space       = space;
    table.in_use      = true;
    table.hashable    = true;
    table.placed      = -1;
    table.n_hashed = table.copied_until = table.n_found = table.n_loaded = 0;
    table.forget_units();
    table.prefix = {chain_root(space)};
    return id;
}

TableId BlockTables::fork(TableId id) {
    check(!at(id).swapped, "a swapped table was forked"); // before its number could be given to the child
    TableId           child_id = open({});
    const BlockTable& parent   = at(id);
    BlockTable&       child    = at(child_id);
    for (std::size_t l = 0; l < lanes.size(); l++) {
        child.lanes[l].blocks.assign(parent.lanes[l].blocks.begin(), parent.lanes[l].blocks.end());
        child.lanes[l].n_released = parent.lanes[l].n_released;
        for (BlockId block : child.lanes[l].held())
            if (block >= 0) pool.acquire(block);
    }
    child.space        = parent.space;
    child.n_hashed     = parent.n_hashed;
    child.prefix       = parent.prefix;
    child.hashable     = parent.hashable;
    child.copied_until = parent.copied_until;
    child.state        = parent.state;
    child.state_at     = parent.state_at;
    if (child.state >= 0) pool.acquire(child.state);
    return child_id;
}

void BlockTables::clear(BlockTable& table, bool uncache) {
    const auto give_back = [&](BlockId block) {
        if (table.pinned && --pins[std::size_t(block)] == 0) n_pinned -= pool.n_blocks(block);
        if (pool.ref_count(block) == 1) {
            const CacheEntry& entry = pool.entry(block);
            const bool        tail  = entry.n_tokens < block_size(); // of no use without its pin
            if (entry.state == HashState::cached && (tail || uncache)) cache.evict(block);
            // A copy into it that is still pending is of no use any more.
            if (table.copied_until > 0)
                std::erase_if(moves.copies, [&](const BlockCopy& copy) { return pool.bundle_of(copy.to) == block; });
        }
        release(block);
    };
    for (BlockId& unit : std::array{std::ref(table.later_state), std::ref(table.next_state), std::ref(table.last_state),
                                    std::ref(table.state)})
        if (unit >= 0) give_back(std::exchange(unit, -1));
    table.last_at = 0;
    // The lanes side by side: what is left of a prefix has its windows.
    for (std::size_t i = table.lanes[0].blocks.size(); i-- > 0;)
        for (std::size_t l = 0, n = std::size_t(n_lanes); l < n; l++)
            if (const BlockId block = table.lanes[l].blocks[i]; block >= 0) give_back(block);
}

void BlockTables::close(TableId id) {
    BlockTable& table = at(id);
    for (LaneTable& lane : of(table)) {
        lane.blocks.clear();
        lane.n_released = 0;
    }
    table.in_use = table.swapped = table.pinned = false;
    table.forget_units();
    closed.push_back(id);
}

int BlockTables::release_behind(TableId id, int next) {
    BlockTable& table = at(id);
    check(!table.swapped && !table.pinned, "blocks of a table that is swapped or pinned were given back");
    int n = 0;
    for (std::size_t l = 0; l < lanes.size(); l++) {
        if (lanes[l].window == 0) continue;
        LaneTable& lane = table.lanes[l];
        const int  end =
            std::min(CacheLayout::first_entry_seen(lanes[l].window, next, block_size()), int(lane.blocks.size()));
        for (; lane.n_released < end; lane.n_released++, n += lanes[l].blocks)
            release(std::exchange(lane.blocks[std::size_t(lane.n_released)], released_block));
    }
    return n;
}

void BlockTables::truncate(TableId id, int n_entries) {
    BlockTable& table = at(id);
    while (table.n_entries() > n_entries)
        for (LaneTable& lane : of(table)) {
            if (lane.blocks.back() >= 0) release(lane.blocks.back());
            lane.blocks.pop_back();
        }
}

// The state is that of n_tokens tokens now, in the state unit that the step has written.
void BlockTables::advance(TableId id, int n_tokens) {
    BlockTable& table = at(id);
    if (table.next_state >= 0) {
        if (table.state >= 0) release(table.state);
        table.state = std::exchange(table.next_state, -1);
    }
    check(table.state >= 0 && n_tokens > table.state_at, "a state that no step has written");
    table.state_at   = n_tokens;
    table.next_state = std::exchange(table.later_state, -1);
}

void BlockTables::note_last(TableId id) {
    BlockTable& table = at(id);
    check(table.state >= 0 && table.state_at % block_size() == 0, "a state within a block was noted");
    if (table.last_state >= 0) release(table.last_state);
    table.last_state = table.state;
    table.last_at    = table.state_at;
    pool.acquire(table.state);
}

bool BlockTables::drop_last() {
    bool some = false;
    for (BlockTable& table : all) {
        if (table.last_state < 0 || table.last_state == table.state) continue;
        release(std::exchange(table.last_state, -1));
        table.last_at = 0;
        some          = true;
    }
    return some;
}

// The noted state is about to give way to a later one, and no step reads or writes it: its unit is taken first.
bool BlockTables::take_next(TableId id) {
    BlockTable& table = at(id);
    if (table.later_state >= 0) return true;
    if (table.last_state >= 0 && table.last_state != table.state && pool.ref_count(table.last_state) == 1) {
        table.later_state = std::exchange(table.last_state, -1);
        table.last_at     = 0;
        return true;
    }
    if (pool.n_free() < blocks_per_unit) return false;
    table.later_state = take(state_lane());
    return true;
}

void BlockTables::place(TableId id, BlockId first) {
    BlockTable& table = at(id);
    table.placed      = first;
    table.hashable    = false;
    check(n_lanes == 1 && blocks_per_entry == 1 && !keeps_state(), "contiguous memory is for one group");
    check(!table.swapped && !table.pinned && table.n_hashed == 0,
          "a table that is hashed, pinned or swapped cannot be made contiguous");
    std::vector<BlockId>& blocks = table.lanes[0].blocks;
    for (BlockId& entry : blocks) {
        const BlockId to = first + BlockId(&entry - blocks.data());
        if (entry == to) continue;
        check(to < pool.size() && pool.ref_count(to) == 0, "a contiguous table met a block that is in use");
        pool.hold(entry);
        pool.acquire(to);
        moves.copies.push_back({entry, to});
        release(std::exchange(entry, to));
    }
}

void BlockTables::check_invariants() const {
    std::vector<int> references(pins.size(), 0), pinned(references);
    for (const BlockTable& table : all) {
        check((table.state >= 0) == (table.state_at > 0), "a state of no tokens, or tokens without a state");
        check((table.last_state >= 0) == (table.last_at > 0), "a last state of no tokens, or tokens without a state");
        check(table.last_at <= table.state_at, "the last state of a table is behind its state");
        for (BlockId unit : table.units()) {
            check(unit < 0 || (table.in_use && keeps_state()), "a table holds a state that it cannot have");
            if (unit < 0 || table.swapped) continue;
            check(pool.n_blocks(unit) == blocks_per_unit, "a state has not the blocks of its group");
            references.at(std::size_t(unit))++;
            if (table.pinned) pinned[std::size_t(unit)]++;
        }
        for (std::size_t l = 0; l < lanes.size(); l++) {
            const LaneTable& lane = table.lanes[l];
            check(table.in_use || lane.blocks.empty(), "a closed table holds blocks");
            check(lane.blocks.size() == table.lanes[0].blocks.size(), "the lanes of a table are not of one length");
            for (std::size_t i = 0; i < lane.blocks.size(); i++) {
                const BlockId block = lane.blocks[i];
                check((block < 0) == (int(i) < lane.n_released) || !has_memory(l), "an entry is missing");
                if (block < 0 || table.swapped) continue;
                check(table.placed < 0 || block == table.placed + BlockId(i), "a contiguous table is not contiguous");
                check(pool.n_blocks(block) == lanes[l].blocks, "an entry has not the blocks of its group");
                references.at(std::size_t(block))++;
                if (table.pinned) pinned[std::size_t(block)]++;
            }
        }
        for (BlockId unit : {table.next_state, table.later_state})
            check(unit < 0 || table.swapped || (pool.ref_count(unit) == 1 && pool.state(unit) == HashState::none),
                  "the state that a step writes can be read by others");
    }
    pool.check_invariants(references);
    host.check_invariants();
    cache.check_invariants();
    int n = 0;
    for (BlockId id = 0; id < pool.n_ids(); id++) {
        const CacheEntry& entry = pool.entry(id);
        const bool        is    = pins[std::size_t(id)] > 0;
        check(pins[std::size_t(id)] == pinned[std::size_t(id)], "a pin is not a pinned table's");
        check(is || entry.state == HashState::none || entry.n_tokens == block_size(),
              "a part of a block is cached, but not pinned");
        n += is ? pool.n_blocks(id) : 0;
    }
    check(n == n_pinned, "pinned blocks are miscounted");
}

} // namespace quire
