// quire.paging.tables.writes: what a step writes: slots for its tokens, copy-on-write, and which positions are written. Owns
// nothing.
export module quire.paging.tables.writes;

import quire.core.base;
import quire.core.std;
import quire.paging.block;
import quire.paging.block_hash;
import quire.paging.block_pool;
import quire.paging.prefix_cache;
import quire.paging.tables.block_tables;
import quire.paging.tables.counts;

export namespace quire {

// Positions `first` .. `first + n - 1` of a sequence are about to be written. With keep_state the recurrent state before them stays, because
// they may be computed once more, or others are to find it.
struct Write {
    TableId table = -1;
    int     first = 0, n = 0;
    bool    keep_state = false;
};

// The functions of BlockManager with the same names.
bool allocate_slots(BlockTables& tables, BlockCounts& counts, std::span<const Write> writes, bool may_copy);
int  blocks_to_write(const BlockTables& tables, BlockCounts& counts, std::span<const Write> writes);
void will_write(BlockTables& tables, const Write& write);
bool is_partly_written(const BlockTables& tables, TableId table, int position);
bool must_wait(const BlockTables& tables, TableId table, int n_tokens);
int  next_unwritten(const BlockTables& tables, TableId table, int from, int n_tokens);
int  n_readable(const BlockTables& tables, TableId table, int n);

} // namespace quire

module :private;

namespace quire {

int next_unwritten(const BlockTables& tables, TableId id, int from, int n_tokens) {
    const BlockTable& table = tables.at(id);
    const int         size  = tables.block_size();
    if (tables.keeps_state()) return std::min(std::max(from, table.state_at), n_tokens - 1); // no token can be left out
    while (from < n_tokens - 1) {
        const int i = from / size;
        if (table.copied_until > from && (table.copied_until - 1) / size == i) from = table.copied_until;
        if (i >= table.n_hashed || tables.chain_state(table, i) < HashState::in_flight) break;
        from = (i + 1) * size;
    }
    return std::min(from, n_tokens - 1);
}

int n_readable(const BlockTables& tables, TableId id, int n) {
    const BlockTable& table    = tables.at(id);
    int               readable = n;
    // Only blocks with a hash have several writers, and a block is not written before those in front of it. So the search goes back from
    // the end, to the first block that no sequence writes.
    for (int i = std::min(table.n_hashed, tables.entries_for(n)) - 1; i >= table.lanes[0].n_released; i--) {
        const BlockId   block = table.lanes[0].blocks[std::size_t(i)];
        const HashState state = tables.pool.state(block);
        if (state == HashState::cached || state == HashState::none) break;
        if (state == HashState::in_flight || tables.pool.ref_count(block) > 1) readable = i * tables.block_size();
    }
    return std::min(readable, n);
}

bool must_wait(const BlockTables& tables, TableId id, int n_tokens) {
    const BlockTable& table = tables.at(id);
    const int         i     = (n_tokens - 1) / tables.block_size();
    return i < table.n_entries() && tables.chain_state(table, i) == HashState::in_flight;
}

// Whether another sequence could read the block once n_leaving of its sharers have copies. Sharers of a reserved block all write the same
// numbers there, and none of them has read it.
bool needs_copy(const BlockTables& tables, BlockId id, int n_leaving) {
    const HashState state = tables.pool.state(id);
    return state == HashState::cached || (state == HashState::none && tables.pool.ref_count(id) - n_leaving > 1);
}

// Whether only the prefix cache leads to the block, which may lose it where there is no room for a copy.
bool can_evict(const BlockTables& tables, BlockId id, int n_leaving) {
    return tables.pool.ref_count(id) - n_leaving == 1 && tables.pins[std::size_t(id)] == 0;
}

// The entries of a lane that a write reaches and the lane has: from `first` to before `end`.
template <class Body>
void each_entry(int first, int end, auto& entries, Body&& body) {
    for (const int last = std::min(end, int(entries.size())); first < last; first++)
        if (entries[std::size_t(first)] >= 0) body(entries[std::size_t(first)]);
}

// Whether the next step has to write its state to another state unit than the one with the state before it. No sharer writes in place,
// because the others read the state unit in the same step.
bool needs_unit(const BlockTables& tables, const BlockTable& table, bool keep) {
    if (!tables.keeps_state() || table.next_state >= 0) return false;
    return keep || table.state < 0 || tables.pool.ref_count(table.state) > 1 ||
           tables.pool.state(table.state) != HashState::none;
}

// Where there is no room for another state unit: whether the state may be written over, because only the prefix cache could find it.
// A noted state (BlockTable::last_state) is for the prefix cache, too.
bool can_evict_state(const BlockTables& tables, const BlockTable& table, bool keep) {
    return !keep && table.state >= 0 && can_evict(tables, table.state, int(table.last_state == table.state));
}

void evict_state(BlockTables& tables, BlockTable& table) {
    if (tables.pool.state(table.state) != HashState::none) tables.cache.evict(table.state);
    if (table.last_state != table.state) return;
    tables.release(std::exchange(table.last_state, -1));
    table.last_at = 0;
}

struct SlotCount {
    int fresh = 0, avoidable = 0; // blocks; avoidable: copies of what only the prefix cache could find
    int copies  = 0;              // and new state units
    int entries = 0;              // that tables get; in some models they have no blocks
};

// As the writes would happen: each copy takes a sharer away from its entry.
SlotCount count_slots(const BlockTables& tables, BlockCounts& counts, std::span<const Write> writes) {
    SlotCount  count;
    const bool states = tables.keeps_state();
    for (const Write& w : writes) {
        const BlockTable& table = tables.at(w.table);
        const int         first = w.first / tables.block_size(), end = tables.entries_for(w.first + w.n);
        if (states && needs_unit(tables, table, w.keep_state)) {
            (can_evict_state(tables, table, w.keep_state) ? count.avoidable : count.fresh) += tables.blocks_per_unit;
            count.copies++;
        }
        if (w.n == 0) continue;
        for (const LaneTable& lane : tables.of(table))
            each_entry(first, end, lane.blocks, [&](BlockId id) {
                if (!needs_copy(tables, id, 0)) return; // most are their sequence's own
                const int n_leaving = counts.n_leaving(id);
                if (!needs_copy(tables, id, n_leaving)) return;
                (can_evict(tables, id, n_leaving) ? count.avoidable : count.fresh) += tables.pool.n_blocks(id);
                count.copies++;
                counts.leave(id);
            });
        const int entries = std::max(end - table.n_entries(), 0);
        count.entries += entries;
        count.fresh += entries * tables.blocks_per_entry;
    }
    counts.end();
    return count;
}

int blocks_to_write(const BlockTables& tables, BlockCounts& counts, std::span<const Write> writes) {
    const SlotCount count = count_slots(tables, counts, writes);
    return count.fresh + count.avoidable;
}

bool allocate_slots(BlockTables& tables, BlockCounts& counts, std::span<const Write> writes, bool may_copy) {
    BlockPool& pool                                = tables.pool;
    const auto [fresh, avoidable, copies, entries] = count_slots(tables, counts, writes);
    if (entries == 0 && copies == 0) return true;
    if (fresh > pool.n_free() || (copies > 0 && !may_copy)) return false;
    const bool in_place = fresh + avoidable > pool.n_free();
    for (const Write& w : writes) {
        BlockTable& table = tables.at(w.table);
        const int   first = w.first / tables.block_size(), end = tables.entries_for(w.first + w.n);
        if (needs_unit(tables, table, w.keep_state)) {
            if (in_place && can_evict_state(tables, table, w.keep_state)) evict_state(tables, table);
            else table.next_state = tables.take(tables.state_lane());
        }
        if (w.n == 0) continue;
        for (std::size_t lane = 0; lane < tables.lanes.size(); lane++)
            each_entry(first, end, table.lanes[lane].blocks, [&](BlockId& entry) {
                if (!needs_copy(tables, entry, 0)) return;
                table.copied_until = w.first; // what stands before is there, in the copy as well
                if (in_place && can_evict(tables, entry, 0)) {
                    tables.cache.evict(entry);
                    return;
                }
                pool.hold(entry);
                const BlockId copy = tables.take(lane);
                if (tables.has_memory(lane)) add_copy(tables.moves.copies, pool, entry, pool, copy);
                tables.release(entry);
                entry = copy;
            });
        while (table.n_entries() < end) tables.append(table);
    }
    return true;
}

void will_write(BlockTables& tables, const Write& w) {
    const BlockTable&           table  = tables.at(w.table);
    const std::vector<BlockId>& blocks = table.lanes[0].blocks;
    const int                   size = tables.block_size(), end = w.first + w.n, last = end / size;
    for (int i = w.first / size; i < table.n_hashed && (i + 1) * size <= end; i++)
        if (const BlockId id = blocks[std::size_t(i)]; id >= 0) tables.cache.begin_write(id);
    if (w.n > 0 && end % size != 0 && last < table.n_hashed) {
        const BlockId id = blocks[std::size_t(last)];
        if (id >= 0 && tables.pool.state(id) == HashState::reserved && tables.pool.ref_count(id) > 1)
            tables.partly_written.push_back(id);
    }
}

bool is_partly_written(const BlockTables& tables, TableId id, int position) {
    const std::vector<BlockId>& blocks = tables.at(id).lanes[0].blocks;
    const auto                  i      = std::size_t(position / tables.block_size());
    return i < blocks.size() && std::ranges::find(tables.partly_written, blocks[i]) != tables.partly_written.end();
}

} // namespace quire
