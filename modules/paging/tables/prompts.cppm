// quire.paging.tables.prompts: tables for tokens that are known: what the prefix cache has of them, and what others find there from now
// on. Owns nothing.
export module quire.paging.tables.prompts;

import quire.core.base;
import quire.core.std;
import quire.paging.block;
import quire.paging.block_hash;
import quire.paging.block_pool;
import quire.paging.host_tier;
import quire.paging.prefix_cache;
import quire.paging.tables.block_tables;
import quire.paging.tables.writes;

export namespace quire {

// BlockManager's allocate(), grow(), publish() and pin_table().
bool allocate_table(BlockTables& tables, TableId table, std::span<const Token> tokens, int keep_free, bool read_cache,
                    bool whole);
int  grow_table(BlockTables& tables, TableId table, std::span<const Token> tokens, int from, int end, bool read_cache);
void publish_table(BlockTables& tables, TableId table, std::span<const Token> tokens, int n_written);
void pin_table(BlockTables& tables, TableId table, std::span<const Token> tokens);
bool keep_state(BlockTables& tables, TableId table, std::span<const Token> tokens);
bool keep_last(BlockTables& tables, TableId table, std::span<const Token> tokens);

} // namespace quire

module :private;

namespace quire {

// The tokens of an entry.
std::span<const Token> tokens_of(const BlockTables& tables, std::size_t entry, std::span<const Token> tokens) {
    const auto size = std::size_t(tables.block_size());
    return tokens.subspan(entry * size, size);
}

// The next entry of a table in the prefix cache, with its blocks of all lanes.
void enter(BlockTables& tables, BlockTable& table, BlockId block, std::size_t entry, HashState state, BlockHash hash,
           std::span<const Token> want) {
    tables.cache.insert(block, {state, std::int16_t(want.size()), -1, hash, table.prefix, table.space, 0}, want);
    tables.attach_own(table, entry, block, state);
}

// The last entry of a table, which is full with `want`, can be found by others from now on. False: the entries behind it cannot.
bool reserve_last(BlockTables& tables, BlockTable& table, std::span<const Token> want, BlockHash hash) {
    if (!table.hashable) return false;
    BlockId here = tables.cache.find(hash);
    if (here < 0) {
        here = table.lanes[0].blocks.back();
        enter(tables, table, here, std::size_t(table.n_entries() - 1), HashState::reserved, hash, want);
    } else if (!tables.cache.holds(here, table.prefix, table.space, want)) {
        table.hashable = false; // another text with the same hash: whatever follows must not be found by it
        return false;
    } else if (tables.n_lanes > 1 || tables.keeps_state()) {
        return false; // what it has in other lanes is not enough: publish_table() adds ours
    }
    table.prefix = tables.cache.prefix_of(here);
    table.n_hashed++;
    return true;
}

// The units that the cache has for a prompt; units in host memory only if the device has room for all of them.
CacheHit match(const BlockTables& tables, const BlockTable& table, std::span<const Token> tokens, bool whole) {
    const CacheHit hit = tables.cache.match(table.space, tokens, whole, tables.host.keeps());
    // The entries that are on the device do not need a marker, but they are few where others have left it.
    const bool room =
        hit.n_free <= tables.pool.n_free() && (tables.has_memory(0) || tables.pool.has_markers(hit.n_entries()));
    return room || !hit.from_host ? hit : tables.cache.match(table.space, tokens, whole);
}

// Brings back a unit from host memory, in the moves before the step; it is cached at once. `owner`: of the first lane, or -1: this is it.
BlockId load(BlockTables& tables, BlockId from, int lane, BlockId owner) {
    const BlockId to = tables.take(std::size_t(lane));
    if (tables.has_memory(std::size_t(lane))) add_copy(tables.moves.swap_in, tables.host.pool(), from, tables.pool, to);
    const BlockPool& host = tables.host.pool();
    if (owner < 0) tables.cache.insert(to, host.entry(from), host.tokens(from));
    else tables.cache.attach(owner, to, HashState::cached);
    tables.pool.hold(to); // until it is there, whatever comes of the table
    return to;
}

// The entries of a hit, in an empty table.
void adopt(BlockTables& tables, BlockTable& table, const CacheHit& hit) {
    PrefixCache& cache   = tables.cache;
    const int    n       = hit.n_entries();
    const auto   is_seen = [&](int i, int lane) {
        if (lane == int(tables.state_lane())) return tables.keeps_state() && i == n - 1;
        return lane < tables.n_lanes && i >= hit.first[std::size_t(lane)];
    };
    // Everything stays that is there, on the device and in host memory, before blocks are taken for what comes back. The first entries
    // are held last: so they stay in host memory longest.
    for (int i = n; i-- > 0;)
        for (int lane = 0; lane < int(tables.cache_lanes.size()); lane++) {
            if (!is_seen(i, lane)) continue;
            const FoundUnit unit = cache.unit_of(hit.entries[std::size_t(i)], lane);
            if (unit.block >= 0) tables.pool.acquire(unit.block);
            else tables.host.load(unit.on_host);
        }
    for (int i = 0; i < n; i++) {
        const FoundUnit found = hit.entries[std::size_t(i)];
        BlockId         owner = -1;
        bool            came  = false;
        for (int lane = 0; lane < int(tables.cache_lanes.size()); lane++) {
            if (is_seen(i, lane)) {
                const FoundUnit unit  = cache.unit_of(found, lane);
                const BlockId   block = unit.block >= 0 ? unit.block : load(tables, unit.on_host, lane, owner);
                came                  = came || unit.block < 0;
                if (lane == 0) owner = block;
                if (lane == tables.n_lanes) table.state = block;
                else table.lanes[std::size_t(lane)].blocks.push_back(block);
            } else if (lane < tables.n_lanes) {
                table.lanes[std::size_t(lane)].blocks.push_back(released_block);
                table.lanes[std::size_t(lane)].n_released++;
            }
        }
        table.n_loaded += came;
        table.prefix = cache.prefix_of(owner);
    }
    table.n_found = table.n_hashed = n;
    if (table.state >= 0) table.state_at = n * tables.block_size();
}

bool allocate_table(BlockTables& tables, TableId id, std::span<const Token> tokens, int keep_free, bool read_cache,
                    bool whole) {
    BlockTable& table = tables.at(id);
    BlockPool&  pool  = tables.pool;
    check(table.n_entries() == 0, "blocks for a prompt go into an empty table");
    CacheHit   hit     = read_cache ? match(tables, table, tokens, whole) : CacheHit{};
    const int  all     = tables.entries_for(int(tokens.size()));
    const auto need_of = [&](const CacheHit& h) {
        return (all - h.n_entries()) * tables.blocks_per_entry + tables.blocks_per_unit + h.n_free;
    };
    // A chain from host memory can take more room than its tokens to compute: a state besides the one that the first step writes.
    if (hit.from_host && need_of(hit) + keep_free > pool.n_free()) hit = tables.cache.match(table.space, tokens, whole);
    const int n_hit = hit.n_entries(), need = need_of(hit);
    // The entry to copy has to stay what it is beside the copy. Where that is too much, its tokens are computed.
    std::array<BlockId, most_lanes> partial{};
    int                             partial_free = 0;
    for (int lane = 0; lane < tables.n_lanes && hit.partial >= 0; lane++) {
        const BlockId from         = tables.cache.in_lane(hit.partial, lane);
        partial[std::size_t(lane)] = from;
        partial_free += pool.is_free(from) ? pool.n_blocks(from) : 0;
    }
    if (partial_free > 0 && need + partial_free + keep_free > pool.n_free()) hit.partial = -1;
    if (need + keep_free > pool.n_free()) return false;

    for (LaneTable& lane : tables.of(table)) lane.blocks.reserve(std::size_t(all));
    for (std::size_t lane = 0; lane < tables.lanes.size() && hit.partial >= 0; lane++) pool.hold(partial[lane]);
    adopt(tables, table, hit);
    if (tables.keeps_state()) table.next_state = tables.take(tables.state_lane());
    const auto full = tokens.size() / std::size_t(tables.block_size());
    for (auto i = std::size_t(n_hit); i < full && read_cache; i++) {
        const std::span<const Token> want = tokens_of(tables, i, tokens);
        const BlockHash              hash = tables.cache.hash_of(table.prefix, want);
        tables.append(table);
        if (!reserve_last(tables, table, want, hash)) break;
    }
    while (table.n_entries() < all) tables.append(table);
    table.copied_until = 0;
    if (hit.partial >= 0) {
        for (std::size_t lane = 0; lane < tables.lanes.size(); lane++)
            if (tables.has_memory(lane))
                add_copy(tables.moves.copies, pool, partial[lane], pool, table.lanes[lane].blocks[std::size_t(n_hit)]);
        table.copied_until = n_hit * tables.block_size() + hit.n_partial_tokens;
    }
    return true;
}

// The next entry of a table, which is full with `tokens`: one that holds the same, or that another sequence will write, if there is
// any, else a free one, which others can find from now on. False: there is none.
bool take_known(BlockTables& tables, BlockTable& table, std::span<const Token> tokens) {
    PrefixCache& cache = tables.cache;
    const auto   want  = tokens_of(tables, std::size_t(table.n_entries()), tokens);
    const auto   hash  = cache.hash_of(table.prefix, want);
    BlockId      here  = cache.find(hash);
    // The last token is computed, because its logits are needed.
    const bool is_end = &want.back() == &tokens.back();
    bool       known  = !tables.keeps_state() && here >= 0 && cache.holds(here, table.prefix, table.space, want) &&
                 !(is_end && tables.pool.state(here) == HashState::cached);
    for (int lane = 1; lane < tables.n_lanes && known; lane++) known = cache.attached(here, lane) >= 0;
    if (!known) {
        if (tables.pool.n_free() < tables.blocks_per_entry) return false;
        tables.append(table);
        // That may have evicted what stands before it.
        if (cache.is_known(table.prefix)) reserve_last(tables, table, want, hash);
        return true;
    }
    for (int lane = 0; lane < tables.n_lanes; lane++) {
        const BlockId block = cache.in_lane(here, lane);
        tables.pool.acquire(block);
        table.lanes[std::size_t(lane)].blocks.push_back(block);
    }
    table.prefix = cache.prefix_of(here);
    table.n_hashed++;
    return true;
}

int grow_table(BlockTables& tables, TableId id, std::span<const Token> tokens, int from, int end, bool read_cache) {
    BlockTable& table   = tables.at(id);
    const int   size    = tables.block_size();
    const auto  held_to = [&] { return table.n_entries() * size; };
    check(end <= int(tokens.size()), "a table was grown past the end");
    if (read_cache && table.n_entries() == 0) adopt(tables, table, match(tables, table, tokens, false));
    for (;;) {
        if (read_cache) from = next_unwritten(tables, id, from, std::min(held_to() + 1, int(tokens.size())));
        tables.release_behind(id, from);
        if (held_to() >= end) return from;
        const bool known = read_cache && table.hashable && table.n_hashed == table.n_entries() &&
                           held_to() + size <= int(tokens.size()) && tables.cache.is_known(table.prefix);
        if (known) {
            if (!take_known(tables, table, tokens)) return from;
        } else {
            if (tables.pool.n_free() < tables.blocks_per_entry) return from;
            tables.append(table);
        }
    }
}

void publish_table(BlockTables& tables, TableId id, std::span<const Token> tokens, int n_written) {
    BlockTable&  table = tables.at(id);
    PrefixCache& cache = tables.cache;
    check(n_written <= int(tokens.size()) && tables.entries_for(n_written) <= table.n_entries(),
          "publish past the end");
    while (table.hashable && (table.n_hashed + 1) * tables.block_size() <= n_written) {
        if (!cache.is_known(table.prefix)) {
            // Another's equal block, or evicted before a swap: once more from the beginning.
            table.prefix   = {chain_root(table.space)};
            table.n_hashed = 0;
            continue;
        }
        // Evicted, and entered once more by another sequence, which has yet to write it: a text in host memory keeps its serial.
        if (const BlockId before = cache.block_of(table.prefix);
            before >= 0 && tables.pool.state(before) != HashState::cached)
            return;
        const auto                   i    = std::size_t(table.n_hashed);
        const std::span<const Token> want = tokens_of(tables, i, tokens);
        const BlockHash              hash = cache.hash_of(table.prefix, want);
        const BlockId                here = cache.find(hash), own = table.lanes[0].blocks[i];
        if (here < 0 && own != released_block && tables.pool.state(own) == HashState::none) {
            enter(tables, table, own, i, HashState::cached, hash, want);
        } else if (here < 0 || !cache.holds(here, table.prefix, table.space, want)) {
            table.hashable = false; // another text with the same hash: whatever follows must not be found by it
            return;
        } else if (tables.pool.state(here) != HashState::cached) {
            return; // another sequence has yet to write it: a block is not found before those in front of it are written
        } else if (tables.n_lanes > 1) {
            tables.attach_own(table, i, here, HashState::cached);
        }
        table.prefix = cache.prefix_of(here < 0 ? own : here);
        table.n_hashed++;
    }
}

// The table has the last checkpoint of its tokens in place of its own state, which no request could find.
void pin_state(BlockTables& tables, BlockTable& table, std::span<const Token> tokens) {
    const CacheHit hit = tables.cache.match(table.space, tokens);
    for (BlockId* unit : {&table.state, &table.next_state, &table.last_state, &table.later_state})
        if (*unit >= 0) tables.release(std::exchange(*unit, -1));
    table.last_at  = 0;
    table.state_at = hit.n_entries() * tables.block_size();
    if (hit.entries.empty()) return;
    table.state = tables.cache.in_lane(hit.entries.back().block, int(tables.state_lane()));
    tables.pool.acquire(table.state);
}

void pin_table(BlockTables& tables, TableId id, std::span<const Token> tokens) {
    BlockTable&  table = tables.at(id);
    PrefixCache& cache = tables.cache;
    check(!table.swapped && !table.pinned && table.n_entries() == tables.entries_for(int(tokens.size())) &&
              std::ranges::all_of(tables.of(table).last(tables.layout.tables().size()),
                                  [](const LaneTable& lane) { return lane.n_released == 0; }),
          "a table that does not hold the prefix was pinned");
    const auto full = tokens.size() / std::size_t(tables.block_size());
    Prefix     parent{chain_root(table.space)};
    bool       found = true;
    for (std::size_t i = 0; i < full && found; i++) {
        // Where an equal block was there first, that is the one that will be found: keep it instead of ours.
        const std::span<const Token> want = tokens_of(tables, i, tokens);
        const BlockId                here = cache.find(cache.hash_of(parent, want));
        found                             = here >= 0 && cache.holds(here, parent, table.space, want);
        if (!found) break;
        parent = cache.prefix_of(here);
        if (tables.pool.state(here) == HashState::cached) tables.attach_own(table, i, here, HashState::cached);
        for (int lane = 0; lane < tables.n_lanes; lane++) {
            BlockId&      entry = table.lanes[std::size_t(lane)].blocks[i];
            const BlockId kept  = cache.in_lane(here, lane);
            if (kept < 0 || entry < 0 || kept == entry) continue;
            tables.pool.acquire(kept);
            tables.release(std::exchange(entry, kept));
        }
    }
    const std::span<const Token> rest = tokens.subspan(full * std::size_t(tables.block_size()));
    const BlockId                last = table.lanes[0].blocks.back();
    // As everywhere, nothing is cached behind a block that another sequence has yet to write.
    const BlockId before  = full > 0 ? cache.block_of(parent) : -1;
    const bool    written = full == 0 || (before >= 0 && tables.pool.state(before) == HashState::cached);
    if (found && written && !rest.empty() && last >= 0 && tables.pool.state(last) == HashState::none) {
        cache.insert(last, {HashState::cached, std::int16_t(rest.size()), -1, 0, parent, table.space, 0}, rest);
        if (tables.pool.state(last) == HashState::cached) tables.attach_own(table, full, last, HashState::cached);
    }
    if (tables.keeps_state()) pin_state(tables, table, tokens);
    const auto pin = [&](BlockId block) {
        if (block >= 0 && tables.pins[std::size_t(block)]++ == 0) tables.n_pinned += tables.pool.n_blocks(block);
    };
    for (const LaneTable& lane : tables.of(table))
        for (BlockId block : lane.blocks) pin(block);
    for (BlockId unit : table.units()) pin(unit);
    table.pinned = true;
}

// The entry of the prefix cache that ends with these tokens, whole blocks; or -1.
BlockId entry_of(const BlockTables& tables, const BlockTable& table, std::span<const Token> tokens) {
    const PrefixCache& cache = tables.cache;
    // The table may know it: of a long text, without hashing it from its beginning.
    if (std::size_t(table.n_hashed) * std::size_t(tables.block_size()) == tokens.size())
        if (const BlockId end = cache.block_of(table.prefix); end >= 0) return end;
    Prefix  parent{chain_root(table.space)};
    BlockId here = -1;
    for (std::size_t i = 0; (i + 1) * std::size_t(tables.block_size()) <= tokens.size(); i++) {
        const std::span<const Token> want = tokens_of(tables, i, tokens);
        here                              = cache.find(cache.hash_of(parent, want));
        if (here < 0 || !cache.holds(here, parent, table.space, want)) return -1;
        parent = cache.prefix_of(here);
    }
    return here;
}

bool keep_state(BlockTables& tables, TableId id, std::span<const Token> tokens) {
    const BlockTable& table = tables.at(id);
    if (table.state_at == 0 || table.state_at % tables.block_size() != 0) return false;
    const BlockId owner = entry_of(tables, table, tokens.first(std::size_t(table.state_at)));
    if (owner < 0 || tables.pool.state(owner) != HashState::cached) return false;
    if (tables.cache.attached(owner, int(tables.state_lane())) >= 0) return true;
    if (tables.pool.state(table.state) != HashState::none || tables.pool.ref_count(table.state) > 1) return false;
    tables.cache.attach(owner, table.state, HashState::cached);
    return true;
}

bool keep_last(BlockTables& tables, TableId id, std::span<const Token> tokens) {
    const BlockTable& table = tables.at(id);
    if (table.swapped || table.last_state < 0 || tables.pool.state(table.last_state) != HashState::none) return false;
    const BlockId owner = entry_of(tables, table, tokens.first(std::size_t(table.last_at)));
    if (owner < 0 || tables.pool.state(owner) != HashState::cached ||
        tables.cache.attached(owner, int(tables.state_lane())) >= 0)
        return false;
    tables.cache.attach(owner, table.last_state, HashState::cached);
    return true;
}

} // namespace quire
