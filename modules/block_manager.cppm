// quire.block_manager: which physical KV block holds which tokens of which sequence (the paper's section 4.2 to 4.4).
// **Owns** all block metadata: reference counts, the free list, block tables, the prefix cache. Knows no tensors.
export module quire.block_manager;

import quire.base;
import quire.prefix_cache;
import quire.request;
import quire.std;

export namespace quire {

// A block table is named by a small number from open_table() until close_table().
using TableId = std::int32_t;

struct BlockManagerOptions {
    int  n_blocks     = 0;
    int  block_size   = 16;   // tokens, 1..256
    bool prefix_cache = true; // find full blocks again by their hash
    // The order in which the free blocks are handed out at first; empty: 0, 1, 2, …
    std::vector<BlockId> free_order;
};

class BlockManager {
public:
    explicit BlockManager(BlockManagerOptions options);

    int n_blocks() const { return int(blocks_.size()); }
    int block_size() const { return block_size_; }
    int n_free() const { return n_free_; }            // nobody's, findable ones included
    int n_used() const { return n_blocks() - n_free_; }
    int n_cached_free() const { return n_cached_free_; } // nobody's, but found again by their hash
    int n_copies() const { return int(copies_.size()); } // waiting for take_copies()

    // Blocks that `n_tokens` tokens occupy.
    int blocks_for(int n_tokens) const { return (n_tokens + block_size_ - 1) / block_size_; }

    // -- a sequence's table

    TableId open_table();
    // Maps cached blocks to the front of an empty table, as many as match `tokens` from the first on without a gap,
    // but never all tokens: the last one has to be computed, for its logits. Returns the tokens mapped.
    int attach_cached(TableId table, std::span<const Token> tokens);
    // As attach_cached(), but changes nothing. `from_free`: the hit blocks that would leave the free list.
    struct Hit {
        int n_blocks = 0, from_free = 0;
    };
    Hit find_cached(std::span<const Token> tokens) const;
    // Makes room to write positions `first` to `first + n - 1`, all or nothing: blocks are appended as needed, and a
    // shared block in that range is replaced by a copy (copy-on-write). False, and nothing changed, without blocks.
    bool reserve(TableId table, int first, int n);
    // Tells that positions 0 .. n_written-1 hold `tokens`' KV: blocks that became full can be found from now on.
    void publish(TableId table, std::span<const Token> tokens, int n_written);
    // A second table on the same blocks. Nothing is copied until one of the two writes.
    TableId fork_table(TableId table);
    // Gives every block back, the last one first, so that the head of a prefix outlives its tail in the cache.
    void close_table(TableId table);

    std::span<const BlockId> blocks(TableId table) const;
    int slot(TableId table, int position) const; // block * block_size + offset

    // Appends the copies that reserve() asked for to `out`. They have to run before the step that writes.
    void take_copies(std::vector<BlockCopy>& out);

    int  ref_count(BlockId block) const;
    bool is_findable(BlockId block) const; // has a hash in the prefix cache

    // Forgets every cached block that nobody uses.
    void drop_cache();
    // Walks everything; stops with a message at the first broken invariant. For tests and debugging, not the step loop.
    void check_invariants() const;

private:
    struct Block {
        std::int32_t ref_count = 0;
        bool         hashed    = false; // `hash` is its key in the prefix cache
        BlockHash    hash      = 0;
        BlockId      prev = -1, next = -1; // neighbours in the free list
    };
    struct Table {
        std::vector<BlockId> blocks;
        int                  n_published = 0; // leading blocks offered to the cache
        BlockHash            last_hash   = 0; // of block n_published - 1
        bool                 in_use = false, publishable = true;
    };
    // The free blocks without a hash come first, then the cached ones, least recently used first: one list, two parts.
    struct FreeList {
        BlockId head = -1, tail = -1;
    };

    Table&                   table_at(TableId table);
    const Table&             table_at(TableId table) const;
    std::span<Token>         block_tokens(BlockId block);
    std::span<const Token>   block_tokens(BlockId block) const;
    FreeList&                list_of(const Block& block) { return block.hashed ? free_cached_ : free_plain_; }
    void                     push_free(BlockId block);
    void                     unlink_free(BlockId block);
    BlockId                  take_free();
    void                     acquire(BlockId block);
    void                     release(BlockId block);

    int                    block_size_;
    bool                   caching_;
    std::vector<Block>     blocks_;
    std::vector<Token>     tokens_; // [n_blocks × block_size] what a hashed block holds: the guard against collisions
    PrefixCache            cache_;
    FreeList               free_plain_, free_cached_;
    int                    n_free_ = 0, n_cached_free_ = 0;
    std::vector<Table>     tables_;
    std::vector<TableId>   closed_tables_; // to be used again, with the memory of their vectors
    std::vector<BlockCopy> copies_;
};

} // namespace quire

module :private;

namespace quire {

BlockManager::BlockManager(BlockManagerOptions options)
    : block_size_(options.block_size), caching_(options.prefix_cache), blocks_(std::size_t(options.n_blocks)),
      tokens_(std::size_t(options.n_blocks) * std::size_t(options.block_size)), cache_(options.n_blocks) {
    check(options.n_blocks > 0 && options.block_size > 0, "an empty block pool");
    if (options.free_order.empty()) {
        options.free_order.resize(blocks_.size());
        std::iota(options.free_order.begin(), options.free_order.end(), 0);
    }
    check(options.free_order.size() == blocks_.size(), "free_order does not name every block once");
    for (BlockId block : options.free_order) push_free(block);
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

// -- the free list

void BlockManager::push_free(BlockId id) {
    Block&    block = blocks_[std::size_t(id)];
    FreeList& list  = list_of(block);
    block.prev      = list.tail;
    block.next      = -1;
    (list.tail >= 0 ? blocks_[std::size_t(list.tail)].next : list.head) = id;
    list.tail = id;
    n_free_++;
    n_cached_free_ += block.hashed;
}

void BlockManager::unlink_free(BlockId id) {
    Block&    block = blocks_[std::size_t(id)];
    FreeList& list  = list_of(block);
    (block.prev >= 0 ? blocks_[std::size_t(block.prev)].next : list.head) = block.next;
    (block.next >= 0 ? blocks_[std::size_t(block.next)].prev : list.tail) = block.prev;
    block.prev = block.next = -1;
    n_free_--;
    n_cached_free_ -= block.hashed;
}

// A block for new content: one without a hash if there is any, else the cached one that was left alone for longest.
BlockId BlockManager::take_free() {
    check(n_free_ > 0, "a block was taken from an empty pool");
    BlockId id = free_plain_.head >= 0 ? free_plain_.head : free_cached_.head;
    unlink_free(id);
    Block& block = blocks_[std::size_t(id)];
    if (block.hashed) {
        cache_.erase(block.hash);
        block.hashed = false;
    }
    block.ref_count = 1;
    return id;
}

void BlockManager::acquire(BlockId id) {
    if (blocks_[std::size_t(id)].ref_count == 0) unlink_free(id);
    blocks_[std::size_t(id)].ref_count++;
}

void BlockManager::release(BlockId id) {
    Block& block = blocks_[std::size_t(id)];
    check(block.ref_count > 0, "a free block was freed");
    if (--block.ref_count == 0) push_free(id);
}

// -- tables

TableId BlockManager::open_table() {
    if (closed_tables_.empty()) {
        closed_tables_.push_back(TableId(tables_.size()));
        tables_.emplace_back();
    }
    TableId id = closed_tables_.back();
    closed_tables_.pop_back();
    Table& table      = tables_[std::size_t(id)];
    table.in_use      = true;
    table.publishable = caching_;
    table.n_published = 0;
    return id;
}

BlockManager::Hit BlockManager::find_cached(std::span<const Token> tokens) const {
    Hit hit;
    if (!caching_ || tokens.empty()) return hit;
    std::optional<BlockHash> parent;
    const auto               size = std::size_t(block_size_);
    for (std::size_t at = 0; at + size < tokens.size(); at += size) { // `<`: one token is left to compute
        std::span<const Token> want = tokens.subspan(at, size);
        parent                      = chain_hash(parent, want);
        BlockId id                  = cache_.find(*parent);
        if (id < 0 || !std::ranges::equal(block_tokens(id), want)) break;
        hit.n_blocks++;
        hit.from_free += blocks_[std::size_t(id)].ref_count == 0;
    }
    return hit;
}

int BlockManager::attach_cached(TableId id, std::span<const Token> tokens) {
    Table& table = table_at(id);
    check(table.blocks.empty(), "cached blocks go to the front of a table");
    Hit                      hit = find_cached(tokens);
    std::optional<BlockHash> parent;
    for (int i = 0; i < hit.n_blocks; i++) {
        parent = chain_hash(parent, tokens.subspan(std::size_t(i) * std::size_t(block_size_), std::size_t(block_size_)));
        table.blocks.push_back(cache_.find(*parent));
        acquire(table.blocks.back());
        table.last_hash = *parent;
    }
    table.n_published = hit.n_blocks;
    return hit.n_blocks * block_size_;
}

bool BlockManager::reserve(TableId id, int first, int n) {
    Table&    table = table_at(id);
    const int have  = int(table.blocks.size());
    const int need  = blocks_for(first + n);
    int       fresh = std::max(need - have, 0);
    const int begin = first / block_size_, end = std::min(need, have);
    for (int i = begin; i < end; i++) fresh += blocks_[std::size_t(table.blocks[std::size_t(i)])].ref_count > 1;
    if (fresh > n_free_) return false;
    for (int i = begin; i < end; i++) {
        BlockId& entry = table.blocks[std::size_t(i)];
        if (blocks_[std::size_t(entry)].ref_count == 1) continue; // the last sharer writes in place
        BlockId copy = take_free();
        copies_.push_back({entry, copy});
        release(entry);
        entry = copy;
    }
    while (int(table.blocks.size()) < need) table.blocks.push_back(take_free());
    return true;
}

void BlockManager::publish(TableId id, std::span<const Token> tokens, int n_written) {
    Table& table = table_at(id);
    check(n_written <= int(tokens.size()) && blocks_for(n_written) <= int(table.blocks.size()), "publish past the end");
    const auto size = std::size_t(block_size_);
    while (table.publishable && (table.n_published + 1) * block_size_ <= n_written) {
        const auto               i      = std::size_t(table.n_published);
        std::span<const Token>   want   = tokens.subspan(i * size, size);
        std::optional<BlockHash> parent = i > 0 ? std::optional(table.last_hash) : std::nullopt;
        BlockHash                hash   = chain_hash(parent, want);
        BlockId                  holder = cache_.find(hash);
        if (holder < 0) {
            BlockId id_block = table.blocks[i];
            Block&  block    = blocks_[std::size_t(id_block)];
            check(!block.hashed, "a block was published twice");
            std::ranges::copy(want, block_tokens(id_block).begin());
            block.hash   = hash;
            block.hashed = true;
            cache_.insert(hash, id_block);
        } else if (!std::ranges::equal(block_tokens(holder), want)) {
            // Another text with the same hash. Whatever follows must not be found under this name.
            table.publishable = false;
            return;
        }
        table.last_hash = hash;
        table.n_published++;
    }
}

TableId BlockManager::fork_table(TableId id) {
    TableId child_id = open_table();
    Table&  parent   = table_at(id);
    Table&  child    = table_at(child_id);
    child.blocks     = parent.blocks;
    child.n_published = parent.n_published;
    child.last_hash   = parent.last_hash;
    child.publishable = parent.publishable;
    for (BlockId block : child.blocks) acquire(block);
    return child_id;
}

void BlockManager::close_table(TableId id) {
    Table& table = table_at(id);
    for (std::size_t i = table.blocks.size(); i-- > 0;) release(table.blocks[i]);
    table.blocks.clear();
    table.in_use = false;
    closed_tables_.push_back(id);
}

std::span<const BlockId> BlockManager::blocks(TableId table) const { return table_at(table).blocks; }

int BlockManager::slot(TableId table, int position) const {
    std::span<const BlockId> ids = blocks(table);
    check(position >= 0 && position / block_size_ < int(ids.size()), "a position without a block");
    return ids[std::size_t(position / block_size_)] * block_size_ + position % block_size_;
}

void BlockManager::take_copies(std::vector<BlockCopy>& out) {
    out.insert(out.end(), copies_.begin(), copies_.end());
    copies_.clear();
}

int BlockManager::ref_count(BlockId block) const { return blocks_.at(std::size_t(block)).ref_count; }

bool BlockManager::is_findable(BlockId block) const { return blocks_.at(std::size_t(block)).hashed; }

void BlockManager::drop_cache() {
    while (free_cached_.head >= 0) {
        BlockId id = free_cached_.head;
        unlink_free(id);
        cache_.erase(blocks_[std::size_t(id)].hash);
        blocks_[std::size_t(id)].hashed = false;
        push_free(id);
    }
}

void BlockManager::check_invariants() const {
    std::vector<int> entries(blocks_.size(), 0), listed(blocks_.size(), 0);
    for (const Table& table : tables_)
        for (BlockId block : table.blocks) {
            check(table.in_use, "a closed table holds blocks");
            entries.at(std::size_t(block))++;
        }
    int n_listed = 0, n_hashed = 0;
    for (const FreeList* list : {&free_plain_, &free_cached_}) {
        BlockId prev = -1;
        for (BlockId id = list->head; id >= 0; prev = id, id = blocks_[std::size_t(id)].next) {
            check(blocks_[std::size_t(id)].prev == prev, "the free list's links disagree");
            check(blocks_[std::size_t(id)].hashed == (list == &free_cached_), "a free block is in the wrong part");
            listed[std::size_t(id)]++;
            check(++n_listed <= n_blocks(), "the free list has a cycle");
        }
        check(list->tail == prev, "the free list's tail is wrong");
    }
    for (std::size_t i = 0; i < blocks_.size(); i++) {
        const Block& block = blocks_[i];
        check(block.ref_count == entries[i], "a reference count is not the number of table entries");
        check(listed[i] == (block.ref_count == 0), "a block is free exactly when its count is 0");
        n_hashed += block.hashed;
        if (block.hashed) {
            check(cache_.find(block.hash) == BlockId(i), "a hash does not lead to its block");
        }
    }
    check(n_listed == n_free_, "free + used is not the total");
    check(n_hashed == cache_.size(), "the prefix cache holds a block that does not know of it");
}

} // namespace quire
