// quire.paging.tables.swaps: tables whose blocks are in host memory (the paper, section 4.5), in the host pool (quire.paging.host_tier). Owns
// scratch memory only.
export module quire.paging.tables.swaps;

import quire.core.base;
import quire.core.std;
import quire.paging.block;
import quire.paging.block_hash;
import quire.paging.block_pool;
import quire.paging.host_tier;
import quire.paging.prefix_cache;
import quire.paging.tables.block_tables;
import quire.paging.tables.counts;

export namespace quire {

// The functions of BlockManager with the same names.
class TableSwaps {
public:
    TableSwaps(BlockTables& tables, BlockCounts& counts);

    const BlockPool& pool() const { return pool_; }
    bool             swap_out(std::span<const TableId> tables);
    int              blocks_to_swap_in(std::span<const TableId> tables, std::span<const TableId> closing) const;
    bool             swap_in(std::span<const TableId> tables, int keep_free);
    // Gives back all entries of a table that is swapped out.
    void clear(const BlockTable& table);
    void release_held() { pool_.release_held(); } // the pending copies are done
    void check_invariants() const;

private:
    void    release(BlockId block);
    BlockId resident(BlockId swapped, std::size_t lane) const;
    template <class Body>
    void each_entry(BlockTable& table, Body&& body) const;

    BlockTables&         tables_;
    BlockCounts&         counts_;
    BlockPool&           pool_;        // of tables_.host
    std::vector<BlockId> destination_; // [n_ids or n_swap] where a swap at hand moves a block, or -1
    std::vector<BlockId> moved_;       // the blocks that have one
};

} // namespace quire

module :private;

namespace quire {

TableSwaps::TableSwaps(BlockTables& tables, BlockCounts& counts)
    : tables_(tables), counts_(counts), pool_(tables.host.pool()),
      destination_(std::size_t(std::max(tables.pool.n_ids(), pool_.n_ids())), -1) {
    moved_.reserve(destination_.size());
}

void TableSwaps::release(BlockId id) {
    if (pool_.ref_count(id) == 1) {
        pool_.clear_entry(id);
        pool_.hold(id); // a copy back to the device may still have to read it
    }
    pool_.release(id);
}

void TableSwaps::clear(const BlockTable& table) {
    for (std::size_t i = table.lanes[0].blocks.size(); i-- > 0;)
        for (const LaneTable& lane : tables_.of(table))
            if (lane.blocks[i] >= 0) release(lane.blocks[i]);
    if (table.state >= 0) release(table.state);
}

// Calls body(lane, entry) for every entry of a table and for its state.
template <class Body>
void TableSwaps::each_entry(BlockTable& table, Body&& body) const {
    for (std::size_t l = 0; l < tables_.lanes.size(); l++)
        for (BlockId& entry : table.lanes[l].held()) body(l, entry);
    if (table.state >= 0) body(tables_.state_lane(), table.state);
}

bool TableSwaps::swap_out(std::span<const TableId> tables) {
    int n = 0; // blocks that move
    counts_.begin({});
    for (TableId id : tables) {
        BlockTable& table = tables_.at(id);
        check(!table.swapped && !table.pinned, "a table was swapped out twice");
        each_entry(table, [&](std::size_t, BlockId entry) {
            if (entry >= 0 && counts_.is_new(entry)) n += tables_.pool.n_blocks(entry);
        });
    }
    counts_.end();
    if (n > pool_.n_free()) return false;
    for (TableId id : tables) { // what no step has written does not move
        BlockTable& table = tables_.at(id);
        for (BlockId* unit : {&table.next_state, &table.later_state, &table.last_state})
            if (*unit >= 0) tables_.release(std::exchange(*unit, -1));
        table.last_at = 0;
    }
    for (TableId id : tables)
        each_entry(tables_.at(id), [&](std::size_t l, BlockId entry) {
            if (!tables_.has_memory(l)) return;
            BlockId& to = destination_[std::size_t(entry)];
            if (to >= 0) return pool_.acquire(to);
            to = tables_.host.take(int(l));
            pool_.set_entry(to, tables_.pool.entry(entry), tables_.pool.tokens(entry));
            add_copy(tables_.moves.swap_out, tables_.pool, entry, pool_, to);
            moved_.push_back(entry);
        });
    const auto move = [&](std::size_t l, BlockId& entry) {
        tables_.release(entry);
        entry = tables_.has_memory(l) ? destination_[std::size_t(entry)] : released_block; // a marker is not missed
    };
    for (TableId id : tables) {
        BlockTable& table = tables_.at(id);
        for (std::size_t i = table.lanes[0].blocks.size(); i-- > 0;)
            for (std::size_t l = 0; l < tables_.lanes.size(); l++)
                if (BlockId& entry = table.lanes[l].blocks[i]; entry >= 0) move(l, entry);
        if (table.state >= 0) move(tables_.state_lane(), table.state);
        if (!tables_.has_memory(0)) table.lanes[0].n_released = table.n_entries();
        table.swapped = true;
    }
    for (BlockId entry : moved_) destination_[std::size_t(entry)] = -1;
    moved_.clear();
    return true;
}

int TableSwaps::blocks_to_swap_in(std::span<const TableId> tables, std::span<const TableId> closing) const {
    counts_.begin(closing);
    int n = 0;
    for (TableId id : tables)
        each_entry(tables_.at(id), [&](std::size_t l, BlockId entry) {
            if (!counts_.is_new(entry)) return;
            const BlockId here = resident(entry, l);
            n += here < 0 || counts_.is_free(here) ? pool_.n_blocks(entry) : 0;
        });
    counts_.end();
    return n;
}

// The block on the device that still holds the tokens of a swapped one, or -1.
BlockId TableSwaps::resident(BlockId swapped, std::size_t lane) const {
    const CacheEntry& entry = pool_.entry(swapped);
    if (entry.state != HashState::cached || entry.n_tokens < pool_.block_size()) return -1;
    const BlockId owner = tables_.cache.block_of({entry.hash, entry.serial});
    const BlockId here  = owner < 0 ? -1 : tables_.cache.in_lane(owner, int(lane));
    return here >= 0 && tables_.pool.state(here) == HashState::cached ? here : -1;
}

bool TableSwaps::swap_in(std::span<const TableId> tables, int keep_free) {
    if (blocks_to_swap_in(tables, {}) + keep_free > tables_.pool.n_free()) return false;
    PrefixCache& cache = tables_.cache;
    // Evicted while its text stayed in host memory, an entry keeps its serial when another sequence enters it once more. Until that sequence
    // writes it, nothing is cached behind it. A block in flight is cached by the commit that caches the blocks behind it.
    const auto will_be_cached = [&](BlockId block) {
        return block >= 0 && tables_.pool.state(block) >= HashState::in_flight;
    };
    // Blocks that are still on the device come first, before a fresh block can take their place; the first lane comes before the lanes
    // that are attached to it.
    const auto bring = [&](std::size_t l, BlockId from, bool fresh) {
        BlockId& to = destination_[std::size_t(from)];
        if (to >= 0) return;
        if (!fresh) {
            to = resident(from, l);
            if (to < 0) return;
            tables_.pool.acquire(to);
            moved_.push_back(from);
            return;
        }
        to = tables_.take(l);
        moved_.push_back(from);
        add_copy(tables_.moves.swap_in, pool_, from, tables_.pool, to);
        CacheEntry entry = pool_.entry(from);
        if (entry.state != HashState::cached || entry.n_tokens < pool_.block_size()) return;
        if (l > 0) {
            const BlockId owner = cache.block_of({entry.hash, entry.serial});
            if (will_be_cached(owner) && cache.attached(owner, int(l)) < 0)
                cache.attach(owner, to, HashState::in_flight);
        } else if (cache.find(entry.hash) < 0 &&
                   (entry.parent.serial == 0 || will_be_cached(cache.block_of(entry.parent)))) {
            entry.state = HashState::in_flight;
            cache.insert(to, entry, pool_.tokens(from));
        }
    };
    for (TableId id : tables) check(tables_.at(id).swapped, "a table that is not swapped out was swapped in");
    for (const bool fresh : {false, true})
        for (std::size_t l = 0; l < tables_.cache_lanes.size(); l++)
            for (TableId id : tables)
                each_entry(tables_.at(id), [&](std::size_t lane, BlockId from) {
                    if (lane == l) bring(l, from, fresh);
                });
    for (TableId id : tables) {
        each_entry(tables_.at(id), [&](std::size_t, BlockId& entry) {
            const BlockId to = destination_[std::size_t(entry)];
            tables_.pool.acquire(to);
            release(entry);
            entry = to;
        });
        tables_.at(id).swapped = false;
    }
    // Every table has its own reference now.
    for (BlockId from : moved_) tables_.pool.release(std::exchange(destination_[std::size_t(from)], -1));
    moved_.clear();
    return true;
}

void TableSwaps::check_invariants() const {
    std::vector<int> references(std::size_t(pool_.n_ids()));
    for (BlockId unit : tables_.host.lent()) references[std::size_t(unit)]++;
    for (BlockId unit = 0; unit < pool_.n_ids(); unit++) references[std::size_t(unit)] += tables_.host.n_kept_for(unit);
    for (BlockTable& table : tables_.all)
        if (table.swapped)
            each_entry(table, [&](std::size_t l, BlockId block) {
                references.at(std::size_t(block))++;
                check(pool_.n_blocks(block) == tables_.cache_lanes[l].blocks,
                      "an entry has not the blocks of its group");
            });
    pool_.check_invariants(references);
    check(std::ranges::all_of(destination_, [](BlockId id) { return id < 0; }), "a swap left a destination behind");
}

} // namespace quire
