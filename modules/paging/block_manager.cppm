// quire.paging.block_manager: which physical KV block holds which tokens of which sequence (the paper, sections 4.2 to 4.5).
// **Owns** all block metadata: reference counts, free lists, block tables, the prefix cache, the swap pool. Handles no tensors.
//
// A full block has a *name*: the hash of its tokens and of all tokens before them. The block gets its name as soon as its tokens
// are known, so that a request with the same beginning can share it at once. Its K and V may be read when it is *written*:
//
//      unnamed ──allocate()──► promised ──will_write()──► coming ──commit()──► written
//         └──────────────────── publish(), for generated tokens ─────────────────┘
//
// The first sharer that runs writes the block; the others wait for it. If that sharer goes away, another one writes.
export module quire.paging.block_manager;

import quire.core.base;
import quire.paging.prefix_cache;
import quire.paging.block;
import quire.paging.snapshot;
import quire.core.std;

export namespace quire {

// A block table is named by a small number from open_table() until close_table().
using TableId = std::int32_t;

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

    int n_blocks() const { return int(blocks_.size()); }
    int block_size() const { return block_size_; }
    int n_free() const { return n_free_; } // in no table, including cached ones
    int n_used() const { return n_blocks() - n_free_; }
    int n_cached_free() const { return n_cached_free_; } // in no table, but still in the cache
    int n_pinned() const { return n_pinned_; }
    int n_copies() const { return int(moves_.copies.size()); } // waiting for take_moves()
    int n_swap() const { return int(swap_.size()); }
    int n_swap_free() const { return int(swap_free_.size()); }

    // Number of blocks for `n_tokens` tokens.
    int blocks_for(int n_tokens) const { return (n_tokens + block_size_ - 1) / block_size_; }

    // -- a sequence's table

    TableId open_table(const CacheNamespace& space = {});
    // Fills an empty table with blocks for all of `tokens`, or returns false and changes nothing if fewer than `spare` blocks
    // would stay free. With `read_cache`, cached blocks with the same beginning are shared, and a block that matches only in
    // part is copied. The last token is always left to compute, because its logits are needed.
    bool allocate(TableId table, std::span<const Token> tokens, int spare = 0, bool read_cache = true);
    // Most blocks that allocate() would take from the free list.
    int room_for(const CacheNamespace& space, std::span<const Token> tokens) const;
    // The first position, of n_tokens known tokens and at or after `from`, that the sequence has to compute itself. Tokens that
    // others have written, or will write in this step, are skipped, but never the last token.
    int next_unwritten(TableId table, int from, int n_tokens) const;
    // True if the last token's slot is in a block that another sequence completes in this step, so it cannot be copied yet.
    bool must_wait(TableId table, int n_tokens) const;
    // Makes room for all `writes`, or for none (false): appends blocks as needed and replaces a shared block by a copy
    // (copy-on-write). Of n sharers the first n - 1 copy, the last one writes in place.
    bool reserve(std::span<const Write> writes);
    bool reserve(TableId table, int first, int n) { return reserve(std::array{Write{table, first, n}}); }
    // This step will write those positions; sequences scheduled later in the step can rely on it.
    void will_write(const Write& write);
    // The step has run: everything announced by will_write() is written, and all moves are done.
    void commit();
    // Reports that positions 0 .. n_written-1 hold the KV of `tokens`; blocks that became full enter the cache.
    void publish(TableId table, std::span<const Token> tokens, int n_written);
    // A second table with the same blocks. Nothing is copied until one of the two writes.
    TableId fork_table(TableId table);
    // Frees all blocks, the last one first, so that a prefix's first blocks stay cached longest.
    // `forget`: also removes them from the cache.
    void close_table(TableId table, bool forget = false);
    // Pins the table's blocks, which hold `tokens`, until it is closed; a partly filled last block enters the cache too.
    void pin_table(TableId table, std::span<const Token> tokens);

    // -- swapping (section 4.5): all tables of a request together; a block that they share is moved once

    // False, with nothing changed, if the swap pool has too few free blocks.
    bool swap_out(std::span<const TableId> tables);
    int  swap_in_room(std::span<const TableId> tables) const; // most blocks that swap_in() takes from the free list
    // The physical blocks differ from before; blocks that are still in the cache are shared instead of copied.
    bool swap_in(std::span<const TableId> tables, int spare = 0);
    bool is_swapped(TableId table) const { return table_at(table).swapped; }

    std::span<const BlockId> blocks(TableId table) const;             // of the swap pool while swapped
    int                      slot(TableId table, int position) const; // block * block_size + offset
    int                      distinct_blocks(std::span<const TableId> tables) const;

    // Appends the pending block copies, which must run before the step, to `moves`.
    void take_moves(BlockMoves& moves);

    int  ref_count(BlockId block) const;
    bool is_findable(BlockId block) const; // is in the cache with its KV written

    // Removes all blocks from the cache that are in no table.
    void drop_cache();
    // The state of each block, for display. `filled` is left to the scheduler, which knows the sequences' lengths.
    void view(Snapshot& snapshot) const;
    // Where to record evictions from now on; null: nowhere.
    void log_to(std::vector<MemoryEvent>* log) { log_ = log; }
    // Checks everything; stops with a message at the first broken invariant. For tests and debugging, not for the step loop.
    void check_invariants() const;

private:
    enum class State : std::uint8_t { unnamed, promised, coming, written };
    // What a block is known by: enough to compare it with a prompt, and to give it back its name after a swap.
    struct Name {
        State          state    = State::unnamed;
        int            n_tokens = 0; // block_size; fewer: the last block of a pinned prefix, without a hash
        BlockHash      hash     = 0;
        Prefix         parent;
        CacheNamespace space;
        std::uint64_t  serial = 0; // from 1, in the order in which names are given
    };
    struct Block {
        std::int32_t ref_count = 0;
        std::int32_t pins      = 0;
        bool         held      = false; // source of a copy that has not run: not to be handed out before
        Name         name;
        BlockId      prev = -1, next = -1; // neighbours in the free list
    };
    struct SwapBlock {
        std::int32_t ref_count = 0;
        Name         name; // as it was on the device
    };
    struct Table {
        std::vector<BlockId> blocks;
        CacheNamespace       space;
        int                  n_named      = 0; // leading full blocks whose names are in the chain
        int                  copied_until = 0; // position up to which a copied block came filled
        Prefix               last;             // the name of block n_named - 1
        bool                 in_use = false, nameable = true, swapped = false, pinned = false;
    };
    // The free blocks without a name come first, then the cached ones, least recently used first: one list, two parts.
    struct FreeList {
        BlockId head = -1, tail = -1;
    };
    // What the cache has for a prompt.
    struct Hit {
        int     n_blocks = 0, from_free = 0; // whole blocks; those of them that would leave the free list
        BlockId partial          = -1;       // a block to copy for the first tokens of the next
        int     n_partial_tokens = 0;
    };

    Table&                 table_at(TableId table);
    const Table&           table_at(TableId table) const;
    Block&                 at(BlockId block) { return blocks_[std::size_t(block)]; }
    const Block&           at(BlockId block) const { return blocks_[std::size_t(block)]; }
    std::span<Token>       block_tokens(BlockId block);
    std::span<const Token> block_tokens(BlockId block) const;
    std::span<Token>       swap_tokens(BlockId block);
    bool   holds(BlockId block, const Prefix& parent, const CacheNamespace& space, std::span<const Token> tokens) const;
    Prefix prefix_at(BlockId block) const { return {at(block).name.hash, at(block).name.serial}; }
    BlockId   end_of(const Prefix& prefix) const;
    bool      is_known(const Prefix& prefix) const { return prefix.serial == 0 || end_of(prefix) >= 0; }
    Hit       find(const CacheNamespace& space, std::span<const Token> tokens) const;
    void      give_name(BlockId block, Name name, std::span<const Token> tokens);
    void      set_written(BlockId block);
    void      forget(BlockId block);
    void      drop_name(BlockId block);
    FreeList& list_of(const Block& block) { return block.name.state == State::written ? free_cached_ : free_plain_; }
    void      push_free(BlockId block);
    void      unlink_free(BlockId block);
    BlockId   take_free();
    void      acquire(BlockId block);
    void      release(BlockId block);
    void      hold(BlockId block);
    void      release_swap(BlockId block);
    bool      needs_copy(const Block& block) const;
    BlockId   resident(BlockId swapped) const;

    int                      block_size_;
    ChainHash                hash_;
    std::uint64_t            last_serial_ = 0;
    std::vector<Block>       blocks_;
    std::vector<Token>       tokens_; // [n_blocks × block_size] what a named block holds: the guard against collisions
    PrefixCache              cache_;
    FreeList                 free_plain_, free_cached_;
    int                      n_free_ = 0, n_cached_free_ = 0, n_pinned_ = 0;
    std::vector<Table>       tables_;
    std::vector<TableId>     closed_tables_;             // to be used again, with the memory of their vectors
    BlockMoves               moves_;                     // pending
    std::vector<BlockId>     held_, coming_, left_swap_; // to be looked at when the step's moves are taken, or have run
    std::vector<SwapBlock>   swap_;
    std::vector<Token>       swap_tokens_; // [n_swap × block_size]
    std::vector<BlockId>     swap_free_;   // a stack
    mutable std::vector<int> stamp_;       // [n_blocks or n_swap] scratch of distinct_blocks()
    mutable int              now_ = 0;
    std::vector<BlockId>     counted_, moving_; // scratch of reserve() and swap_in()
    std::vector<BlockId>     moved_; // [n_blocks or n_swap] scratch: where a block went in the swap at hand, or -1
    std::vector<MemoryEvent>* log_ = nullptr;
};

} // namespace quire

module :private;

namespace quire {

BlockManager::BlockManager(BlockManagerOptions options)
    : block_size_(options.block_size), hash_(options.hash), blocks_(std::size_t(options.n_blocks)),
      tokens_(std::size_t(options.n_blocks) * std::size_t(options.block_size)), cache_(options.n_blocks),
      swap_(std::size_t(options.n_swap)), swap_tokens_(std::size_t(options.n_swap) * std::size_t(options.block_size)),
      stamp_(std::size_t(std::max(options.n_blocks, options.n_swap))), moved_(stamp_.size(), -1) {
    check(options.n_blocks > 0 && options.block_size > 0 && options.n_swap >= 0, "an empty block pool");
    if (options.free_order.empty()) {
        options.free_order.resize(blocks_.size());
        std::iota(options.free_order.begin(), options.free_order.end(), 0);
    }
    check(options.free_order.size() == blocks_.size(), "free_order does not name every block once");
    for (BlockId block : options.free_order) push_free(block);
    for (BlockId block = options.n_swap; block-- > 0;) swap_free_.push_back(block);
    // The lists of a step never need more room than this.
    for (auto* list : {&moves_.copies, &moves_.swap_out, &moves_.swap_in}) list->reserve(blocks_.size());
    for (auto* list : {&held_, &coming_, &counted_, &moving_}) list->reserve(blocks_.size());
    left_swap_.reserve(swap_.size());
    check_invariants();
}

BlockManager::Table& BlockManager::table_at(TableId table) {
    check(table >= 0 && table < TableId(tables_.size()) && tables_[std::size_t(table)].in_use, "no such block table");
    return tables_[std::size_t(table)];
}

const BlockManager::Table& BlockManager::table_at(TableId table) const {
    return const_cast<BlockManager*>(this)->table_at(table);
}

std::span<Token> BlockManager::block_tokens(BlockId block) {
    return std::span(tokens_).subspan(std::size_t(block) * std::size_t(block_size_), std::size_t(block_size_));
}

std::span<const Token> BlockManager::block_tokens(BlockId block) const {
    return const_cast<BlockManager*>(this)->block_tokens(block);
}

std::span<Token> BlockManager::swap_tokens(BlockId block) {
    return std::span(swap_tokens_).subspan(std::size_t(block) * std::size_t(block_size_), std::size_t(block_size_));
}

// -- the free list

void BlockManager::push_free(BlockId id) {
    Block&    block                                   = at(id);
    FreeList& list                                    = list_of(block);
    block.prev                                        = list.tail;
    block.next                                        = -1;
    (list.tail >= 0 ? at(list.tail).next : list.head) = id;
    list.tail                                         = id;
    n_free_++;
    n_cached_free_ += block.name.state == State::written;
}

void BlockManager::unlink_free(BlockId id) {
    Block&    block                                     = at(id);
    FreeList& list                                      = list_of(block);
    (block.prev >= 0 ? at(block.prev).next : list.head) = block.next;
    (block.next >= 0 ? at(block.next).prev : list.tail) = block.prev;
    block.prev = block.next = -1;
    n_free_--;
    n_cached_free_ -= block.name.state == State::written;
}

// A block for new content: one without a name if there is any, else the cached one that was left alone for longest.
BlockId BlockManager::take_free() {
    check(n_free_ > 0, "a block was taken from an empty pool");
    BlockId id = free_plain_.head >= 0 ? free_plain_.head : free_cached_.head;
    unlink_free(id);
    if (at(id).name.state == State::written) {
        if (log_) log_->push_back({MemoryEventKind::evict, 0, 0, id, -1});
        forget(id);
    }
    at(id).ref_count = 1;
    return id;
}

void BlockManager::acquire(BlockId id) {
    Block& block = at(id);
    if (block.ref_count++ == 0 && !block.held) unlink_free(id);
}

void BlockManager::release(BlockId id) {
    Block& block = at(id);
    check(block.ref_count > 0, "a free block was freed");
    if (--block.ref_count > 0) return;
    if (block.name.state != State::written && block.name.state != State::unnamed) forget(id); // never written
    if (!block.held) push_free(id);
}

// Keeps a source of a copy as it is until the copy has been handed over.
void BlockManager::hold(BlockId id) {
    Block& block = at(id);
    if (block.held) return;
    if (block.ref_count == 0) unlink_free(id);
    block.held = true;
    held_.push_back(id);
}

// -- names

// These tokens, and all of the prefix before them.
bool BlockManager::holds(BlockId id, const Prefix& parent, const CacheNamespace& space,
                         std::span<const Token> tokens) const {
    const Name& name = at(id).name;
    return name.parent.serial == parent.serial && name.space == space && name.n_tokens >= int(tokens.size()) &&
           std::ranges::equal(block_tokens(id).first(tokens.size()), tokens);
}

// The block that has the name of a prefix, or -1.
BlockId BlockManager::end_of(const Prefix& prefix) const {
    const BlockId id = prefix.hash ? cache_.find(*prefix.hash) : -1;
    return id >= 0 && at(id).name.serial == prefix.serial ? id : -1;
}

void BlockManager::give_name(BlockId id, Name name, std::span<const Token> tokens) {
    check(at(id).name.state == State::unnamed, "a block was named twice");
    std::ranges::copy(tokens, block_tokens(id).begin());
    const bool written = name.state == State::written;
    if (name.serial == 0) name.serial = ++last_serial_; // else it had one before a swap
    at(id).name = name;
    if (!written) return;
    at(id).name.state = State::coming;
    set_written(id);
}

void BlockManager::set_written(BlockId id) {
    Name& name = at(id).name;
    if (!is_known(name.parent)) return forget(id); // since it was promised: nobody would come this way
    name.state = State::written;
    cache_.add_child(name.parent, id);
}

void BlockManager::drop_name(BlockId id) {
    Name& name = at(id).name;
    if (name.state == State::written) cache_.remove_child(name.parent, id);
    if (name.n_tokens == block_size_) cache_.remove_name(name.hash);
    name = {};
}

// With all that continues it, which nobody could find any more: down to the end of each chain, and back.
void BlockManager::forget(BlockId id) {
    for (BlockId here = id;;) {
        if (const BlockId child = cache_.first_child(prefix_at(here)); child >= 0) {
            here = child;
            continue;
        }
        if (here == id) return drop_name(id);
        const BlockId parent = end_of(at(here).name.parent);
        const bool    listed = at(here).ref_count == 0 && !at(here).held;
        if (listed) unlink_free(here);
        drop_name(here);
        if (listed) push_free(here);
        here = parent;
    }
}

// How much of a prompt is there: whole blocks without a gap, then the longest part of a block that continues them.
BlockManager::Hit BlockManager::find(const CacheNamespace& space, std::span<const Token> tokens) const {
    constexpr int most_siblings = 64; // so that a prefix with many continuations costs no more than this
    Hit           hit;
    const auto    size = std::size_t(block_size_);
    Prefix        parent{chain_root(space)};
    std::size_t   done = 0;
    for (; done + size <= tokens.size(); done += size) {
        std::span<const Token> want = tokens.subspan(done, size);
        const BlockId          id   = cache_.find(hash_(parent.hash, want));
        if (id < 0 || !holds(id, parent, space, want)) break;
        // A written block up to the very end would leave nothing to compute: a part of it will do.
        if (done + size == tokens.size() && at(id).name.state == State::written) break;
        hit.n_blocks++;
        hit.from_free += at(id).ref_count == 0 && !at(id).held;
        parent = prefix_at(id);
    }
    const std::span<const Token> rest = tokens.subspan(done);
    const std::size_t            most = rest.empty() ? 0 : std::min(rest.size() - 1, size);
    int                          seen = 0;
    for (BlockId id = cache_.first_child(parent); id >= 0 && most > 0 && seen < most_siblings;
         id         = cache_.next_sibling(id), seen++) {
        const Name& name = at(id).name;
        if (name.space != space) continue; // two namespaces that begin alike
        const std::span<const Token> have = block_tokens(id).first(std::min(most, std::size_t(name.n_tokens)));
        const int n = int(std::mismatch(have.begin(), have.end(), rest.begin()).first - have.begin());
        if (n > hit.n_partial_tokens) {
            hit.partial          = id;
            hit.n_partial_tokens = n;
        }
    }
    return hit;
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
    table.nameable = true;
    table.n_named = table.copied_until = 0;
    table.last                         = {chain_root(space)};
    return id;
}

int BlockManager::room_for(const CacheNamespace& space, std::span<const Token> tokens) const {
    const Hit hit = find(space, tokens);
    return blocks_for(int(tokens.size())) - hit.n_blocks + hit.from_free;
}

bool BlockManager::allocate(TableId id, std::span<const Token> tokens, int spare, bool read_cache) {
    Table& table = table_at(id);
    check(table.blocks.empty(), "blocks for a prompt go into an empty table");
    Hit       hit  = read_cache ? find(table.space, tokens) : Hit{};
    const int need = blocks_for(int(tokens.size())) - hit.n_blocks + hit.from_free;
    // The block to copy has to stay what it is beside the copy. Where that is too much, its tokens are computed.
    const bool partial_is_free = hit.partial >= 0 && at(hit.partial).ref_count == 0 && !at(hit.partial).held;
    if (partial_is_free && need + 1 + spare > n_free_) hit.partial = -1;
    if (need + spare > n_free_) return false;

    const auto size = std::size_t(block_size_);
    const auto full = tokens.size() / size;
    table.blocks.reserve(std::size_t(blocks_for(int(tokens.size()))));
    for (std::size_t i = 0; i < full && read_cache; i++) {
        const std::span<const Token> want = tokens.subspan(i * size, size);
        const BlockHash              hash = hash_(table.last.hash, want);
        BlockId                      here = cache_.find(hash);
        if (int(i) < hit.n_blocks) {
            acquire(here);
            table.blocks.push_back(here);
        } else {
            if (int(i) == hit.n_blocks && hit.partial >= 0) hold(hit.partial);
            table.blocks.push_back(take_free());
            here = cache_.find(hash); // taking a block may have evicted it
            if (here < 0) {
                here = table.blocks.back();
                cache_.add_name(hash, here);
                give_name(here, {State::promised, block_size_, hash, table.last, table.space}, want);
            } else if (!holds(here, table.last, table.space, want)) {
                table.nameable = false; // another text with the same hash: whatever follows must not be found by it
                break;
            }
        }
        table.last    = prefix_at(here);
        table.n_named = int(i) + 1;
    }
    if (hit.partial >= 0 && int(table.blocks.size()) == hit.n_blocks) hold(hit.partial);
    while (int(table.blocks.size()) < blocks_for(int(tokens.size()))) table.blocks.push_back(take_free());
    table.copied_until = 0;
    if (hit.partial >= 0) {
        moves_.copies.push_back({hit.partial, table.blocks[std::size_t(hit.n_blocks)]});
        table.copied_until = hit.n_blocks * block_size_ + hit.n_partial_tokens;
    }
    return true;
}

int BlockManager::next_unwritten(TableId id, int from, int n_tokens) const {
    const Table& table = table_at(id);
    while (from < n_tokens - 1) {
        const int i = from / block_size_;
        if (table.copied_until > from && (table.copied_until - 1) / block_size_ == i) from = table.copied_until;
        if (i >= table.n_named || at(table.blocks[std::size_t(i)]).name.state < State::coming) break;
        from = (i + 1) * block_size_;
    }
    return std::min(from, n_tokens - 1);
}

bool BlockManager::must_wait(TableId id, int n_tokens) const {
    const Table& table = table_at(id);
    const auto   i     = std::size_t((n_tokens - 1) / block_size_);
    return i < table.blocks.size() && at(table.blocks[i]).name.state == State::coming;
}

// Somebody else could read what is in it. Sharers of a promised block all write the same there, none of them has read it.
bool BlockManager::needs_copy(const Block& block) const {
    return block.name.state == State::written || (block.name.state == State::unnamed && block.ref_count > 1);
}

bool BlockManager::reserve(std::span<const Write> writes) {
    // Count first, as the writes would happen: each copy takes a sharer away from its block.
    int        fresh = 0, avoidable = 0;
    const auto each_entry = [&](const Write& w, auto&& body) {
        std::vector<BlockId>& entries = table_at(w.table).blocks;
        const int             end     = std::min(blocks_for(w.first + w.n), int(entries.size()));
        for (int i = w.first / block_size_; i < end; i++) body(entries[std::size_t(i)]);
    };
    // Found by nobody but through the cache, which may lose it where there is no room for a copy.
    const auto can_forget = [](const Block& block) { return block.ref_count == 1 && block.pins == 0; };
    for (const Write& w : writes) {
        each_entry(w, [&](BlockId id) {
            if (!needs_copy(at(id))) return;
            (can_forget(at(id)) ? avoidable : fresh)++;
            at(id).ref_count--;
            counted_.push_back(id);
        });
        fresh += std::max(blocks_for(w.first + w.n) - int(table_at(w.table).blocks.size()), 0);
    }
    for (BlockId id : counted_) at(id).ref_count++;
    counted_.clear();
    if (fresh > n_free_) return false;
    const bool in_place = fresh + avoidable > n_free_;
    for (const Write& w : writes) {
        each_entry(w, [&](BlockId& entry) {
            if (!needs_copy(at(entry))) return;
            table_at(w.table).copied_until = w.first; // what stands before is there, in the copy as well
            if (in_place && can_forget(at(entry))) {
                forget(entry);
                return;
            }
            hold(entry);
            const BlockId copy = take_free();
            moves_.copies.push_back({entry, copy});
            release(entry);
            entry = copy;
        });
        std::vector<BlockId>& entries = table_at(w.table).blocks;
        while (int(entries.size()) < blocks_for(w.first + w.n)) entries.push_back(take_free());
    }
    return true;
}

void BlockManager::will_write(const Write& w) {
    const Table& table = table_at(w.table);
    for (int i = w.first / block_size_; i < table.n_named && (i + 1) * block_size_ <= w.first + w.n; i++) {
        const BlockId id = table.blocks[std::size_t(i)];
        if (at(id).name.state != State::promised) continue;
        at(id).name.state = State::coming;
        coming_.push_back(id);
    }
}

void BlockManager::commit() {
    for (BlockId id : coming_)
        if (at(id).name.state == State::coming) set_written(id);
    coming_.clear();
}

void BlockManager::publish(TableId id, std::span<const Token> tokens, int n_written) {
    Table& table = table_at(id);
    check(n_written <= int(tokens.size()) && blocks_for(n_written) <= int(table.blocks.size()), "publish past the end");
    const auto size = std::size_t(block_size_);
    while (table.nameable && (table.n_named + 1) * block_size_ <= n_written) {
        if (!is_known(
                table.last)) { // another's equal block, or of the time before a swap: once more from the beginning
            table.last    = {chain_root(table.space)};
            table.n_named = 0;
            continue;
        }
        const auto                   i    = std::size_t(table.n_named);
        const std::span<const Token> want = tokens.subspan(i * size, size);
        const BlockHash              hash = hash_(table.last.hash, want);
        const BlockId                here = cache_.find(hash), own = table.blocks[i];
        if (here < 0 && at(own).name.state == State::unnamed) {
            cache_.add_name(hash, own);
            give_name(own, {State::written, block_size_, hash, table.last, table.space}, want);
        } else if (here < 0 || !holds(here, table.last, table.space, want)) {
            table.nameable = false; // another text with the same hash: whatever follows must not be found by it
            return;
        }
        table.last = prefix_at(here < 0 ? own : here);
        table.n_named++;
    }
}

TableId BlockManager::fork_table(TableId id) {
    check(!table_at(id).swapped, "a swapped table was forked"); // before its number could be given to the child
    TableId      child_id = open_table();
    const Table& parent   = table_at(id);
    Table&       child    = table_at(child_id);
    child.blocks.assign(parent.blocks.begin(), parent.blocks.end());
    child.space        = parent.space;
    child.n_named      = parent.n_named;
    child.last         = parent.last;
    child.nameable     = parent.nameable;
    child.copied_until = parent.copied_until;
    for (BlockId block : child.blocks) acquire(block);
    return child_id;
}

void BlockManager::close_table(TableId id, bool forget_names) {
    Table& table = table_at(id);
    for (std::size_t i = table.blocks.size(); i-- > 0;) {
        const BlockId block = table.blocks[i];
        if (table.swapped) {
            release_swap(block);
            continue;
        }
        if (table.pinned && --at(block).pins == 0) n_pinned_--;
        const Name& name = at(block).name;
        const bool  tail = name.state == State::written && name.n_tokens < block_size_; // no use without its pin
        if (at(block).ref_count == 1 && (tail || (forget_names && name.state == State::written))) forget(block);
        // A copy that was asked for in this very step has lost its purpose.
        if (table.copied_until > 0 && at(block).ref_count == 1)
            std::erase_if(moves_.copies, [&](const BlockCopy& copy) { return copy.to == block; });
        release(block);
    }
    table.blocks.clear();
    table.in_use = table.swapped = table.pinned = false;
    closed_tables_.push_back(id);
}

void BlockManager::pin_table(TableId id, std::span<const Token> tokens) {
    Table& table = table_at(id);
    check(!table.swapped && !table.pinned && int(table.blocks.size()) == blocks_for(int(tokens.size())),
          "a table that does not hold the prefix was pinned");
    const auto size = std::size_t(block_size_), full = tokens.size() / size;
    Prefix     parent{chain_root(table.space)};
    bool       named = true;
    for (std::size_t i = 0; i < full && named; i++) {
        // Where an equal block was there first, that is the one that will be found: keep it instead of ours.
        const std::span<const Token> want = tokens.subspan(i * size, size);
        const BlockId                here = cache_.find(hash_(parent.hash, want));
        named                             = here >= 0 && holds(here, parent, table.space, want);
        if (!named) break;
        parent = prefix_at(here);
        if (here == table.blocks[i]) continue;
        acquire(here);
        release(std::exchange(table.blocks[i], here));
    }
    const std::span<const Token> rest = tokens.subspan(full * size);
    if (named && !rest.empty() && at(table.blocks.back()).name.state == State::unnamed)
        give_name(table.blocks.back(), {State::written, int(rest.size()), 0, parent, table.space}, rest);
    for (BlockId block : table.blocks)
        if (at(block).pins++ == 0) n_pinned_++;
    table.pinned = true;
}

// -- swapping

void BlockManager::release_swap(BlockId id) {
    SwapBlock& block = swap_[std::size_t(id)];
    check(block.ref_count > 0, "a free block of the swap pool was freed");
    // A copy back to the device may still have to read it: free only when the step's moves have been handed over.
    if (--block.ref_count == 0) left_swap_.push_back(id);
}

bool BlockManager::swap_out(std::span<const TableId> tables) {
    if (distinct_blocks(tables) > n_swap_free()) return false;
    for (TableId id : tables) check(!table_at(id).swapped && !table_at(id).pinned, "a table was swapped out twice");
    for (TableId id : tables)
        for (BlockId& entry : table_at(id).blocks) {
            BlockId& to = moved_[std::size_t(entry)];
            if (to < 0) {
                to = swap_free_.back();
                swap_free_.pop_back();
                swap_[std::size_t(to)].name = at(entry).name;
                std::ranges::copy(block_tokens(entry), swap_tokens(to).begin());
                moves_.swap_out.push_back({entry, to});
            }
            swap_[std::size_t(to)].ref_count++;
        }
    for (TableId id : tables) {
        Table& table = table_at(id);
        for (std::size_t i = table.blocks.size(); i-- > 0;) {
            BlockId& entry = table.blocks[i];
            release(entry);
            entry = moved_[std::size_t(entry)];
        }
        table.swapped = true;
    }
    for (const BlockCopy& move : moves_.swap_out) moved_[std::size_t(move.from)] = -1;
    return true;
}

int BlockManager::swap_in_room(std::span<const TableId> tables) const {
    now_++;
    int room = 0;
    for (TableId id : tables)
        for (BlockId entry : table_at(id).blocks) {
            if (std::exchange(stamp_[std::size_t(entry)], now_) == now_) continue;
            const BlockId here = resident(entry);
            room += here < 0 || (at(here).ref_count == 0 && !at(here).held);
        }
    return room;
}

// The block on the device that holds the same as one of the swap pool, if there still is one.
BlockId BlockManager::resident(BlockId swapped) const {
    const Name& name = swap_[std::size_t(swapped)].name;
    if (name.state != State::written || name.n_tokens < block_size_) return -1;
    const BlockId here = end_of({name.hash, name.serial});
    return here >= 0 && at(here).name.state == State::written ? here : -1;
}

bool BlockManager::swap_in(std::span<const TableId> tables, int spare) {
    if (swap_in_room(tables) + spare > n_free_) return false;
    // What is still there first, before a fresh block can take its place.
    for (const bool fresh : {false, true})
        for (TableId id : tables) {
            check(table_at(id).swapped, "a table that is not swapped out was swapped in");
            for (BlockId entry : table_at(id).blocks) {
                BlockId& to = moved_[std::size_t(entry)];
                if (to >= 0) continue;
                if (!fresh) {
                    to = resident(entry);
                    if (to >= 0) acquire(to);
                    if (to >= 0) moving_.push_back(entry);
                    continue;
                }
                to         = take_free();
                Name& name = swap_[std::size_t(entry)].name;
                moves_.swap_in.push_back({entry, to});
                moving_.push_back(entry);
                if (name.state != State::written || name.n_tokens < block_size_ || cache_.find(name.hash) >= 0 ||
                    !is_known(name.parent))
                    continue;
                cache_.add_name(name.hash, to);
                name.state = State::coming;
                give_name(to, name, swap_tokens(entry));
                coming_.push_back(to);
            }
        }
    // One reference came with the move, the other sharers add theirs.
    for (BlockId entry : moving_) at(moved_[std::size_t(entry)]).ref_count--;
    for (TableId id : tables) {
        Table& table = table_at(id);
        for (BlockId& entry : table.blocks) {
            const BlockId to = moved_[std::size_t(entry)];
            at(to).ref_count++;
            release_swap(entry);
            entry = to;
        }
        table.swapped = false;
    }
    for (BlockId entry : moving_) moved_[std::size_t(entry)] = -1;
    moving_.clear();
    return true;
}

std::span<const BlockId> BlockManager::blocks(TableId table) const { return table_at(table).blocks; }

int BlockManager::slot(TableId table, int position) const {
    std::span<const BlockId> ids = blocks(table);
    check(position >= 0 && position / block_size_ < int(ids.size()), "a position without a block");
    return ids[std::size_t(position / block_size_)] * block_size_ + position % block_size_;
}

int BlockManager::distinct_blocks(std::span<const TableId> tables) const {
    now_++;
    int n = 0;
    for (TableId id : tables)
        for (BlockId block : table_at(id).blocks) n += std::exchange(stamp_[std::size_t(block)], now_) != now_;
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
    for (BlockId id : held_) {
        at(id).held = false;
        if (at(id).ref_count == 0) push_free(id);
    }
    held_.clear();
    swap_free_.insert(swap_free_.end(), left_swap_.begin(), left_swap_.end());
    left_swap_.clear();
}

int BlockManager::ref_count(BlockId block) const {
    check(block >= 0 && block < n_blocks(), "no such block");
    return at(block).ref_count;
}

bool BlockManager::is_findable(BlockId block) const {
    check(block >= 0 && block < n_blocks(), "no such block");
    return at(block).name.state == State::written;
}

void BlockManager::drop_cache() {
    while (free_cached_.head >= 0) {
        BlockId id = free_cached_.head;
        unlink_free(id);
        forget(id);
        push_free(id);
    }
}

void BlockManager::view(Snapshot& snapshot) const {
    snapshot.block_size    = block_size_;
    snapshot.n_swap_blocks = n_swap();
    snapshot.n_swap_used   = n_swap() - n_swap_free() - int(left_swap_.size());
    snapshot.blocks.clear();
    for (const Block& block : blocks_) {
        BlockView& v = snapshot.blocks.emplace_back();
        v.ref_count  = block.ref_count;
        v.pinned     = block.pins > 0;
        v.findable   = block.name.state == State::written && block.name.n_tokens == block_size_;
        v.hash       = v.findable ? block.name.hash : 0;
        v.filled     = block.name.state == State::written ? block.name.n_tokens : 0;
    }
}

void BlockManager::check_invariants() const {
    std::vector<int> entries(blocks_.size(), 0), listed(blocks_.size(), 0), pins(blocks_.size(), 0),
        swapped(swap_.size(), 0);
    for (const Table& table : tables_)
        for (BlockId block : table.blocks) {
            check(table.in_use, "a closed table holds blocks");
            (table.swapped ? swapped : entries).at(std::size_t(block))++;
            if (!table.swapped && table.pinned) pins[std::size_t(block)]++;
        }
    int                               n_listed = 0, n_named = 0, n_held = 0, n_pinned = 0;
    std::unordered_set<std::uint64_t> serials;
    for (const FreeList* list : {&free_plain_, &free_cached_}) {
        BlockId prev = -1;
        for (BlockId id = list->head; id >= 0; prev = id, id = at(id).next) {
            check(at(id).prev == prev, "the free list's links disagree");
            check((at(id).name.state == State::written) == (list == &free_cached_),
                  "a free block is in the wrong part");
            listed[std::size_t(id)]++;
            check(++n_listed <= n_blocks(), "the free list has a cycle");
        }
        check(list->tail == prev, "the free list's tail is wrong");
    }
    for (std::size_t i = 0; i < blocks_.size(); i++) {
        const Block& block = blocks_[i];
        const Name&  name  = block.name;
        check(block.ref_count == entries[i], "a reference count is not the number of table entries");
        check(block.pins == pins[i], "a pin is not a pinned table's");
        check(listed[i] == (block.ref_count == 0 && !block.held), "a block is free exactly when its count is 0");
        n_held += block.held;
        n_pinned += block.pins > 0;
        if (name.state == State::unnamed) continue;
        check(name.state == State::written || block.ref_count > 0, "a block that nobody will write has a name");
        check(name.state != State::written || is_known(name.parent), "a cached block outlived the one before it");
        check(serials.insert(name.serial).second, "two names have one serial");
        if (name.n_tokens == block_size_) {
            n_named++;
            check(cache_.find(name.hash) == BlockId(i), "a hash does not lead to its block");
            check(hash_(name.parent.hash, block_tokens(BlockId(i))) == name.hash, "a hash is not that of its tokens");
        } else {
            check(block.pins > 0, "a part of a block is findable, but not pinned");
        }
    }
    check(n_listed == n_free_, "free + used is not the total");
    check(n_named == cache_.n_names(), "the prefix cache holds a block that does not know of it");
    check(n_held == int(held_.size()) && n_pinned == n_pinned_, "held or pinned blocks are miscounted");
    int n_swap_used = 0;
    for (std::size_t i = 0; i < swap_.size(); i++) {
        check(swap_[i].ref_count == swapped[i], "a swap block's reference count is not the number of table entries");
        n_swap_used += swap_[i].ref_count > 0;
    }
    check(n_swap_used + n_swap_free() + int(left_swap_.size()) == n_swap(),
          "the swap pool's free + used is not its size");
    for (BlockId id : moved_) check(id < 0, "a swap left its notes behind");
}

} // namespace quire
