// quire.paging.block_manager: which physical KV block holds which tokens of which sequence (the paper, sections 4.2 to 4.5): block
// tables, copy-on-write, swapping. **Owns** all block metadata: tables, device pool, swap pool, prefix cache. Handles no tensors.
export module quire.paging.block_manager;

import quire.core.base;
import quire.core.std;
import quire.paging.block;
import quire.paging.block_hash;
import quire.paging.block_pool;
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
    ChainHash hash = chain_hash;
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

    int n_blocks() const { return pool_.size(); }
    int block_size() const { return pool_.block_size(); }
    int n_free() const { return pool_.n_free(); } // in no table, including cached ones
    int n_used() const { return n_blocks() - n_free(); }
    int n_cached_free() const { return pool_.n_cached_free(); } // in no table, but still in the prefix cache
    int n_pinned() const { return n_pinned_; }
    int n_copies() const { return int(moves_.copies.size()); } // waiting for take_moves()
    int n_swap() const { return swap_.size(); }
    int n_swap_free() const { return swap_.n_free(); }

    // Number of blocks for `n_tokens` tokens.
    int blocks_for(int n_tokens) const { return (n_tokens + block_size() - 1) / block_size(); }

    // -- a sequence's table

    TableId open_table(const CacheNamespace& space = {});
    // Fills an empty table with blocks for all of `tokens`, or returns false and changes nothing if fewer than `keep_free` blocks
    // would stay free. With `read_cache`, cached blocks with the same beginning are shared, and a block that matches only in
    // part is copied. The last token is always left to compute, because its logits are needed.
    bool allocate(TableId table, std::span<const Token> tokens, int keep_free = 0, bool read_cache = true);
    // Blocks that allocate() takes from the free list for the sequences of one request together, one after the other. As in all
    // functions with `closing`: once these tables are closed, and nothing else has changed.
    int blocks_to_allocate(const CacheNamespace& space, std::span<const std::span<const Token>> sequences,
                           std::span<const TableId> closing = {}) const;
    int blocks_to_allocate(const CacheNamespace& space, std::span<const Token> tokens) const {
        return blocks_to_allocate(space, std::array{tokens});
    }
    int n_free(std::span<const TableId> closing) const;
    // Sliding windows: a table that holds a beginning of `tokens` gets the blocks before `end`, as allocate() would; those that lie
    // behind the window of the first position that is not written yet, of those from `from` on, are given back as it goes. It ends
    // earlier where no block is free. Returns that position.
    int grow(TableId table, std::span<const Token> tokens, int from, int end, int window, bool read_cache = true);
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
    // Sliding windows: nobody reads this sequence's positions below `first` any more. Gives back the blocks that lie wholly below it;
    // they stay in the prefix cache until their memory is needed. Returns how many.
    int release_before(TableId table, int first);
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

    std::span<const BlockId> blocks(
        TableId table) const; // of the swap pool while swapped; the first ones may be released_block
    int n_released(TableId table) const { return table_at(table).n_released; }
    int n_found(TableId table) const {
        return table_at(table).n_found;
    } // leading blocks that allocate() did not have to take
    int slot(TableId table, int position) const; // block * block_size + offset
    int distinct_blocks(std::span<const TableId> tables) const;

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
    struct Table {
        std::vector<BlockId> blocks;
        CacheNamespace       space;
        int                  n_released   = 0;  // leading entries that are released_block
        int                  n_found      = 0;  // see n_found()
        int                  n_hashed     = 0;  // leading full blocks whose hashes are in the chain
        int                  copied_until = 0;  // position up to which a copied block came filled
        BlockId              placed       = -1; // the first block, where the table is contiguous
        Prefix               prefix;            // of these n_hashed blocks
        bool                 in_use = false, hashable = true, swapped = false, pinned = false;
    };

    // The entries of a table that are blocks.
    static std::span<BlockId> held(Table& table) {
        return std::span(table.blocks).subspan(std::size_t(table.n_released));
    }
    static std::span<const BlockId> held(const Table& table) {
        return std::span(table.blocks).subspan(std::size_t(table.n_released));
    }
    Table&       table_at(TableId table);
    const Table& table_at(TableId table) const;
    BlockId      take_block();
    BlockId      take_block(const Table& table);
    bool         take_known(Table& table, std::span<const Token> tokens);
    void         release(BlockId block);
    void         release_swap(BlockId block);
    bool         needs_copy(BlockId block, int n_leaving) const;
    bool         can_evict(BlockId block, int n_leaving) const;
    BlockId      resident(BlockId swapped) const;
    void         count_leaving(std::span<const TableId> closing) const;
    void         forget_leaving() const;
    bool         is_free_now(BlockId block) const; // or would be, without the tables that were counted as leaving
    struct SlotCount {
        int fresh = 0, avoidable = 0; // blocks; avoidable: copies of what only the prefix cache could find
        int copies = 0;
    };
    SlotCount count_slots(std::span<const Write> writes) const;

    BlockPool                 pool_, swap_; // on the device; in host memory
    PrefixCache               cache_;       // of pool_
    std::vector<std::int32_t> pins_;        // [n_blocks] pinned tables that a block is in
    int                       n_pinned_ = 0;
    std::vector<Table>        tables_;
    std::vector<TableId>      closed_tables_;  // to be used again, with the memory of their vectors
    BlockMoves                moves_;          // pending
    std::vector<BlockId>      partly_written_; // in this step
    // Scratch, [n_blocks or n_swap] by block.
    mutable std::vector<int>     seen_; // when a count met it last
    mutable int                  now_ = 0;
    mutable std::vector<int>     leaving_;     // how many of its sharers a count takes for gone
    std::vector<BlockId>         destination_; // where a swap at hand moves it, or -1
    mutable std::vector<BlockId> touched_;     // the blocks to reset in one of the last two
    std::vector<MemoryEvent>*    log_ = nullptr;
};

} // namespace quire

module :private;

namespace quire {

BlockManager::BlockManager(BlockManagerOptions options)
    : pool_(options.n_blocks, options.block_size, FreeOrder::fifo, std::move(options.free_order)),
      swap_(options.n_swap, options.block_size, FreeOrder::lifo), cache_(pool_, options.hash),
      pins_(std::size_t(options.n_blocks)), seen_(std::size_t(std::max(options.n_blocks, options.n_swap))),
      leaving_(std::size_t(options.n_blocks)), destination_(seen_.size(), -1) {
    check(options.n_blocks > 0 && options.block_size > 0 && options.n_swap >= 0, "an empty block pool");
    // The lists of a step never need more room than this.
    for (auto* list : {&moves_.copies, &moves_.swap_out, &moves_.swap_in}) list->reserve(pins_.size());
    touched_.reserve(seen_.size());
    check_invariants();
}

BlockManager::Table& BlockManager::table_at(TableId table) {
    check(table >= 0 && table < TableId(tables_.size()) && tables_[std::size_t(table)].in_use, "no such block table");
    return tables_[std::size_t(table)];
}

const BlockManager::Table& BlockManager::table_at(TableId table) const {
    return const_cast<BlockManager*>(this)->table_at(table);
}

// A block for new content, evicted from the prefix cache if it is there.
BlockId BlockManager::take_block() {
    const BlockId id = pool_.take();
    if (pool_.state(id) == HashState::cached) {
        if (log_) log_->push_back({MemoryEventKind::evict, 0, 0, id, -1});
        cache_.evict(id);
    }
    return id;
}

// The next block of a table.
BlockId BlockManager::take_block(const Table& table) {
    if (table.placed < 0) return take_block();
    const BlockId id = table.placed + BlockId(table.blocks.size());
    check(id < n_blocks() && pool_.ref_count(id) == 0 && pool_.state(id) == HashState::none,
          "a contiguous table met a block that is in use");
    pool_.acquire(id);
    return id;
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
    table.n_hashed = table.copied_until = table.n_released = table.n_found = 0;
    table.prefix                                                           = {chain_root(space)};
    return id;
}

void BlockManager::count_leaving(std::span<const TableId> closing) const {
    for (TableId id : closing) {
        if (table_at(id).swapped) continue;
        for (BlockId block : held(table_at(id)))
            if (leaving_[std::size_t(block)]++ == 0) touched_.push_back(block);
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
    for (BlockId block : touched_) n += is_free_now(block);
    forget_leaving();
    return n;
}

int BlockManager::blocks_to_allocate(const CacheNamespace& space, std::span<const std::span<const Token>> sequences,
                                     std::span<const TableId> closing) const {
    count_leaving(closing);
    now_++;
    const auto size = std::size_t(block_size());
    int        n    = 0;
    for (std::size_t i = 0; i < sequences.size(); i++) {
        const std::span<const Token> tokens = sequences[i];
        std::size_t                  shared = 0; // whole blocks with one of the sequences before it
        for (std::span<const Token> other : sequences.first(i)) {
            const auto same =
                std::mismatch(tokens.begin(), tokens.end(), other.begin(), other.end()).first - tokens.begin();
            shared = std::max(shared, std::size_t(same) / size);
        }
        Prefix      parent{chain_root(space)};
        std::size_t found = 0;
        for (; (found + 1) * size <= tokens.size(); found++) {
            const std::span<const Token> want = tokens.subspan(found * size, size);
            const BlockId                here = cache_.find(cache_.hash_of(parent, want));
            if (here < 0 || !cache_.holds(here, parent, space, want)) break;
            if ((found + 1) * size == tokens.size() && pool_.state(here) == HashState::cached) { // as in match()
                shared = std::min(shared, found);
                break;
            }
            n += is_free_now(here) && std::exchange(seen_[std::size_t(here)], now_) != now_;
            parent = cache_.prefix_of(here);
        }
        n += blocks_for(int(tokens.size())) - int(std::max(found, shared));
    }
    forget_leaving();
    return n;
}

bool BlockManager::allocate(TableId id, std::span<const Token> tokens, int keep_free, bool read_cache) {
    Table& table = table_at(id);
    check(table.blocks.empty(), "blocks for a prompt go into an empty table");
    CacheHit  hit  = read_cache ? cache_.match(table.space, tokens) : CacheHit{};
    const int need = blocks_for(int(tokens.size())) - hit.n_blocks + hit.n_free;
    // The block to copy has to stay what it is beside the copy. Where that is too much, its tokens are computed.
    const bool partial_is_free = hit.partial >= 0 && pool_.is_free(hit.partial);
    if (partial_is_free && need + 1 + keep_free > n_free()) hit.partial = -1;
    if (need + keep_free > n_free()) return false;

    const auto size = std::size_t(block_size());
    const auto full = tokens.size() / size;
    table.n_found   = hit.n_blocks;
    table.blocks.reserve(std::size_t(blocks_for(int(tokens.size()))));
    for (std::size_t i = 0; i < full && read_cache; i++) {
        const std::span<const Token> want = tokens.subspan(i * size, size);
        const BlockHash              hash = cache_.hash_of(table.prefix, want);
        BlockId                      here = cache_.find(hash);
        if (int(i) < hit.n_blocks) {
            pool_.acquire(here);
            table.blocks.push_back(here);
        } else {
            if (int(i) == hit.n_blocks && hit.partial >= 0) pool_.hold(hit.partial);
            table.blocks.push_back(take_block());
            here = cache_.find(hash); // taking a block may have evicted it
            if (here < 0) {
                here = table.blocks.back();
                cache_.insert(here, {HashState::reserved, block_size(), hash, table.prefix, table.space}, want);
            } else if (!cache_.holds(here, table.prefix, table.space, want)) {
                table.hashable = false; // another text with the same hash: whatever follows must not be found by it
                break;
            }
        }
        table.prefix   = cache_.prefix_of(here);
        table.n_hashed = int(i) + 1;
    }
    if (hit.partial >= 0 && int(table.blocks.size()) == hit.n_blocks) pool_.hold(hit.partial);
    while (int(table.blocks.size()) < blocks_for(int(tokens.size()))) table.blocks.push_back(take_block(table));
    table.copied_until = 0;
    if (hit.partial >= 0) {
        moves_.copies.push_back({hit.partial, table.blocks[std::size_t(hit.n_blocks)]});
        table.copied_until = hit.n_blocks * block_size() + hit.n_partial_tokens;
    }
    return true;
}

// The next block of a table, which is full with `tokens`: one that holds the same, or that another sequence will write, if there is
// any, else a free one, which others can find from now on. False: there is none.
bool BlockManager::take_known(Table& table, std::span<const Token> tokens) {
    const auto size = std::size_t(block_size()), i = table.blocks.size();
    const auto want  = tokens.subspan(i * size, size);
    const auto hash  = cache_.hash_of(table.prefix, want);
    const auto holds = [&](BlockId here) { return cache_.holds(here, table.prefix, table.space, want); };
    BlockId    here  = cache_.find(hash);
    // The last token is computed, because its logits are needed.
    const bool is_end = (i + 1) * size == tokens.size();
    if (here >= 0 && holds(here) && !(is_end && pool_.state(here) == HashState::cached)) {
        pool_.acquire(here);
        table.blocks.push_back(here);
    } else {
        if (n_free() == 0) return false;
        table.blocks.push_back(take_block());
        here = cache_.find(hash);                        // taking a block may have evicted it,
        if (!cache_.is_known(table.prefix)) return true; // or what stands before it, which the table has given back
        if (here < 0) {
            here = table.blocks.back();
            cache_.insert(here, {HashState::reserved, block_size(), hash, table.prefix, table.space}, want);
        } else if (!holds(here)) {
            table.hashable = false; // another text with the same hash: whatever follows must not be found by it
            return true;
        }
    }
    table.prefix = cache_.prefix_of(here);
    table.n_hashed++;
    return true;
}

int BlockManager::grow(TableId id, std::span<const Token> tokens, int from, int end, int window, bool read_cache) {
    Table&     table   = table_at(id);
    const auto held_to = [&] { return int(table.blocks.size()) * block_size(); };
    check(end <= int(tokens.size()), "a table was grown past the end");
    for (;;) {
        if (read_cache) from = next_unwritten(id, from, std::min(held_to() + 1, int(tokens.size())));
        release_before(id, from - window + 1);
        if (held_to() >= end) return from;
        const bool known = read_cache && table.hashable && table.n_hashed == int(table.blocks.size()) &&
                           held_to() + block_size() <= int(tokens.size()) && cache_.is_known(table.prefix);
        if (known) {
            if (!take_known(table, tokens)) return from;
        } else {
            if (n_free() == 0) return from;
            table.blocks.push_back(take_block());
        }
    }
}

int BlockManager::next_unwritten(TableId id, int from, int n_tokens) const {
    const Table& table = table_at(id);
    while (from < n_tokens - 1) {
        const int i = from / block_size();
        if (table.copied_until > from && (table.copied_until - 1) / block_size() == i) from = table.copied_until;
        if (i >= table.n_hashed || pool_.state(table.blocks[std::size_t(i)]) < HashState::in_flight) break;
        from = (i + 1) * block_size();
    }
    return std::min(from, n_tokens - 1);
}

int BlockManager::n_readable(TableId id, int n) const {
    const Table& table    = table_at(id);
    int          readable = n;
    // Only blocks with a hash have several writers, and a block is not written before those in front of it: the first one from the end
    // that nobody writes is the last look.
    for (int i = std::min(table.n_hashed, blocks_for(n)) - 1; i >= table.n_released; i--) {
        const BlockId   id    = table.blocks[std::size_t(i)];
        const HashState state = pool_.state(id);
        if (state == HashState::cached || state == HashState::none) break;
        if (state == HashState::in_flight || pool_.ref_count(id) > 1) readable = i * block_size();
    }
    return std::min(readable, n);
}

bool BlockManager::must_wait(TableId id, int n_tokens) const {
    const Table& table = table_at(id);
    const auto   i     = std::size_t((n_tokens - 1) / block_size());
    return i < table.blocks.size() && pool_.state(table.blocks[i]) == HashState::in_flight;
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

template <class Body>
void each_entry(const Write& w, int block_size, auto& entries, Body&& body) {
    const int end = std::min((w.first + w.n + block_size - 1) / block_size, int(entries.size()));
    for (int i = w.first / block_size; i < end; i++) body(entries[std::size_t(i)]);
}

// As the writes would happen: each copy takes a sharer away from its block.
BlockManager::SlotCount BlockManager::count_slots(std::span<const Write> writes) const {
    SlotCount count;
    for (const Write& w : writes) {
        const std::vector<BlockId>& entries = table_at(w.table).blocks;
        each_entry(w, block_size(), entries, [&](BlockId id) {
            int& n_leaving = leaving_[std::size_t(id)];
            if (!needs_copy(id, n_leaving)) return;
            (can_evict(id, n_leaving) ? count.avoidable : count.fresh)++;
            count.copies++;
            n_leaving++;
            touched_.push_back(id);
        });
        count.fresh += std::max(blocks_for(w.first + w.n) - int(entries.size()), 0);
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
    if (fresh > n_free() || (copies > 0 && !may_copy)) return false;
    const bool in_place = fresh + avoidable > n_free();
    for (const Write& w : writes) {
        Table& table = table_at(w.table);
        each_entry(w, block_size(), table.blocks, [&](BlockId& entry) {
            if (!needs_copy(entry, 0)) return;
            table.copied_until = w.first; // what stands before is there, in the copy as well
            if (in_place && can_evict(entry, 0)) {
                cache_.evict(entry);
                return;
            }
            pool_.hold(entry);
            const BlockId copy = take_block();
            moves_.copies.push_back({entry, copy});
            release(entry);
            entry = copy;
        });
        while (int(table.blocks.size()) < blocks_for(w.first + w.n)) table.blocks.push_back(take_block(table));
    }
    return true;
}

void BlockManager::place(TableId id, BlockId first) {
    Table& table   = table_at(id);
    table.placed   = first;
    table.hashable = false;
    check(!table.swapped && !table.pinned && table.n_released == 0 && table.n_hashed == 0,
          "a table that is hashed, pinned or swapped cannot be made contiguous");
    for (BlockId& entry : table.blocks) {
        const BlockId to = first + BlockId(&entry - table.blocks.data());
        if (entry == to) continue;
        check(to < n_blocks() && pool_.ref_count(to) == 0, "a contiguous table met a block that is in use");
        pool_.hold(entry);
        pool_.acquire(to);
        moves_.copies.push_back({entry, to});
        release(std::exchange(entry, to));
    }
}

void BlockManager::will_write(const Write& w) {
    const Table& table = table_at(w.table);
    for (int i = w.first / block_size(); i < table.n_hashed && (i + 1) * block_size() <= w.first + w.n; i++)
        cache_.begin_write(table.blocks[std::size_t(i)]);
    const int end = w.first + w.n, last = end / block_size();
    if (w.n > 0 && end % block_size() != 0 && last < table.n_hashed) {
        const BlockId id = table.blocks[std::size_t(last)];
        if (pool_.state(id) == HashState::reserved && pool_.ref_count(id) > 1) partly_written_.push_back(id);
    }
}

bool BlockManager::is_partly_written(TableId id, int position) const {
    const Table& table = table_at(id);
    const auto   i     = std::size_t(position / block_size());
    return i < table.blocks.size() && std::ranges::find(partly_written_, table.blocks[i]) != partly_written_.end();
}

void BlockManager::publish(TableId id, std::span<const Token> tokens, int n_written) {
    Table& table = table_at(id);
    check(n_written <= int(tokens.size()) && blocks_for(n_written) <= int(table.blocks.size()), "publish past the end");
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
        const BlockId                here = cache_.find(hash), own = table.blocks[i];
        if (here < 0 && own != released_block && pool_.state(own) == HashState::none) {
            cache_.insert(own, {HashState::cached, block_size(), hash, table.prefix, table.space}, want);
        } else if (here < 0 || !cache_.holds(here, table.prefix, table.space, want)) {
            table.hashable = false; // another text with the same hash: whatever follows must not be found by it
            return;
        }
        table.prefix = cache_.prefix_of(here < 0 ? own : here);
        table.n_hashed++;
    }
}

int BlockManager::release_before(TableId id, int first) {
    Table&    table = table_at(id);
    const int end = std::min(first / block_size(), int(table.blocks.size())), before = table.n_released;
    check(!table.swapped && !table.pinned, "blocks of a table that is swapped or pinned were given back");
    for (int i = before; i < end; i++) release(std::exchange(table.blocks[std::size_t(i)], released_block));
    table.n_released = std::max(before, end);
    return table.n_released - before;
}

TableId BlockManager::fork_table(TableId id) {
    check(!table_at(id).swapped, "a swapped table was forked"); // before its number could be given to the child
    TableId      child_id = open_table();
    const Table& parent   = table_at(id);
    Table&       child    = table_at(child_id);
    child.blocks.assign(parent.blocks.begin(), parent.blocks.end());
    child.space        = parent.space;
    child.n_released   = parent.n_released;
    child.n_hashed     = parent.n_hashed;
    child.prefix       = parent.prefix;
    child.hashable     = parent.hashable;
    child.copied_until = parent.copied_until;
    for (BlockId block : held(child)) pool_.acquire(block);
    return child_id;
}

void BlockManager::close_table(TableId id, bool uncache) {
    Table& table = table_at(id);
    for (std::size_t i = table.blocks.size(); i-- > std::size_t(table.n_released);) {
        const BlockId block = table.blocks[i];
        if (table.swapped) {
            release_swap(block);
            continue;
        }
        if (table.pinned && --pins_[std::size_t(block)] == 0) n_pinned_--;
        if (pool_.ref_count(block) == 1) {
            const CacheEntry& entry = pool_.entry(block);
            const bool        tail  = entry.n_tokens < block_size(); // of no use without its pin
            if (entry.state == HashState::cached && (tail || uncache)) cache_.evict(block);
            // A copy into it that is still pending is of no use any more.
            if (table.copied_until > 0)
                std::erase_if(moves_.copies, [&](const BlockCopy& copy) { return copy.to == block; });
        }
        release(block);
    }
    table.blocks.clear();
    table.n_released = 0;
    table.in_use = table.swapped = table.pinned = false;
    closed_tables_.push_back(id);
}

void BlockManager::pin_table(TableId id, std::span<const Token> tokens) {
    Table& table = table_at(id);
    check(!table.swapped && !table.pinned && table.n_released == 0 &&
              int(table.blocks.size()) == blocks_for(int(tokens.size())),
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
        if (here == table.blocks[i]) continue;
        pool_.acquire(here);
        release(std::exchange(table.blocks[i], here));
    }
    const std::span<const Token> rest = tokens.subspan(full * size);
    if (found && !rest.empty() && pool_.state(table.blocks.back()) == HashState::none)
        cache_.insert(table.blocks.back(), {HashState::cached, int(rest.size()), 0, parent, table.space}, rest);
    for (BlockId block : table.blocks)
        if (pins_[std::size_t(block)]++ == 0) n_pinned_++;
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
        for (BlockId entry : held(table_at(id))) {
            BlockId& to = destination_[std::size_t(entry)];
            if (to >= 0) {
                swap_.acquire(to);
                continue;
            }
            to = swap_.take();
            swap_.set_entry(to, pool_.entry(entry), pool_.tokens(entry));
            moves_.swap_out.push_back({entry, to});
            touched_.push_back(entry);
        }
    for (TableId id : tables) {
        Table& table = table_at(id);
        for (std::size_t i = table.blocks.size(); i-- > std::size_t(table.n_released);) {
            BlockId& entry = table.blocks[i];
            release(entry);
            entry = destination_[std::size_t(entry)];
        }
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
        for (BlockId entry : held(table_at(id))) {
            if (std::exchange(seen_[std::size_t(entry)], now_) == now_) continue;
            const BlockId here = resident(entry);
            n += here < 0 || is_free_now(here);
        }
    forget_leaving();
    return n;
}

// The block on the device that holds the same as one of the swap pool, if there still is one.
BlockId BlockManager::resident(BlockId swapped) const {
    const CacheEntry& entry = swap_.entry(swapped);
    if (entry.state != HashState::cached || entry.n_tokens < block_size()) return -1;
    const BlockId here = cache_.block_of({entry.hash, entry.serial});
    return here >= 0 && pool_.state(here) == HashState::cached ? here : -1;
}

bool BlockManager::swap_in(std::span<const TableId> tables, int keep_free) {
    if (blocks_to_swap_in(tables) + keep_free > n_free()) return false;
    // What is still there first, before a fresh block can take its place.
    for (const bool fresh : {false, true})
        for (TableId id : tables) {
            check(table_at(id).swapped, "a table that is not swapped out was swapped in");
            for (BlockId from : held(table_at(id))) {
                BlockId& to = destination_[std::size_t(from)];
                if (to >= 0) continue;
                if (!fresh) {
                    to = resident(from);
                    if (to < 0) continue;
                    pool_.acquire(to);
                    touched_.push_back(from);
                    continue;
                }
                to = take_block();
                touched_.push_back(from);
                moves_.swap_in.push_back({from, to});
                CacheEntry entry = swap_.entry(from);
                if (entry.state != HashState::cached || entry.n_tokens < block_size() || cache_.find(entry.hash) >= 0 ||
                    !cache_.is_known(entry.parent))
                    continue;
                entry.state = HashState::in_flight;
                cache_.insert(to, entry, swap_.tokens(from));
            }
        }
    for (TableId id : tables) {
        Table& table = table_at(id);
        for (BlockId& entry : held(table)) {
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

std::span<const BlockId> BlockManager::blocks(TableId table) const { return table_at(table).blocks; }

int BlockManager::slot(TableId table, int position) const {
    std::span<const BlockId> ids = blocks(table);
    check(position >= 0 && position / block_size() < int(ids.size()), "a position without a block");
    return ids[std::size_t(position / block_size())] * block_size() + position % block_size();
}

int BlockManager::distinct_blocks(std::span<const TableId> tables) const {
    now_++;
    int n = 0;
    for (TableId id : tables)
        for (BlockId block : held(table_at(id))) n += std::exchange(seen_[std::size_t(block)], now_) != now_;
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
    return pool_.ref_count(block);
}

bool BlockManager::is_cached(BlockId block) const {
    check(block >= 0 && block < n_blocks(), "no such block");
    return pool_.state(block) == HashState::cached;
}

void BlockManager::drop_cache() {
    while (pool_.first_cached_free() >= 0) cache_.evict(pool_.first_cached_free());
}

void BlockManager::view(Snapshot& snapshot) const {
    snapshot.block_size    = block_size();
    snapshot.n_swap_blocks = n_swap();
    snapshot.n_swap_used   = n_swap() - n_swap_free() - swap_.n_held();
    snapshot.blocks.clear();
    for (BlockId id = 0; id < n_blocks(); id++) {
        const CacheEntry& entry = pool_.entry(id);
        BlockView&        v     = snapshot.blocks.emplace_back();
        v.ref_count             = pool_.ref_count(id);
        v.pinned                = pins_[std::size_t(id)] > 0;
        v.cached                = entry.state == HashState::cached && entry.n_tokens == block_size();
        v.hash                  = v.cached ? entry.hash : 0;
        v.filled                = entry.state == HashState::cached ? entry.n_tokens : 0;
    }
}

void BlockManager::check_invariants() const {
    std::vector<int> on_device(std::size_t(n_blocks()), 0), swapped(std::size_t(n_swap()), 0), pins(on_device);
    for (const Table& table : tables_)
        for (const BlockId& block : held(table)) {
            check(table.in_use, "a closed table holds blocks");
            check(table.placed < 0 || block == table.placed + BlockId(&block - table.blocks.data()),
                  "a contiguous table is not contiguous");
            (table.swapped ? swapped : on_device).at(std::size_t(block))++;
            if (!table.swapped && table.pinned) pins[std::size_t(block)]++;
        }
    pool_.check_invariants(on_device);
    swap_.check_invariants(swapped);
    cache_.check_invariants();
    int n_pinned = 0;
    for (BlockId id = 0; id < n_blocks(); id++) {
        const CacheEntry& entry = pool_.entry(id);
        const int         n     = pins_[std::size_t(id)];
        check(n == pins[std::size_t(id)], "a pin is not a pinned table's");
        check(n > 0 || entry.state == HashState::none || entry.n_tokens == block_size(),
              "a part of a block is cached, but not pinned");
        n_pinned += n > 0;
    }
    check(n_pinned == n_pinned_, "pinned blocks are miscounted");
    check(std::ranges::all_of(destination_, [](BlockId id) { return id < 0; }), "a swap left a destination behind");
    check(std::ranges::all_of(leaving_, [](int n) { return n == 0; }), "a sharer was counted and not taken back");
}

} // namespace quire
