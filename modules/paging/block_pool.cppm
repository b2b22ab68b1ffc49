// quire.paging.block_pool: the blocks of one pool: reference counts, the free list, and each block's entry in the prefix cache.
// **Owns** this metadata. The block manager has two pools: the device's, and the swap pool in host memory.
export module quire.paging.block_pool;

import quire.core.base;
import quire.core.std;
import quire.paging.block;
import quire.paging.block_hash;

export namespace quire {

// Which of the free blocks is taken first. FIFO makes eviction from the prefix cache least recently used.
enum class FreeOrder : std::uint8_t { fifo, lifo };

// A block is free, and on the free list, exactly when its reference count is 0 and it is not held. The block manager calls the
// `inline` functions for every block of a table (in a module no others are).
class BlockPool {
public:
    // `order`: in which the blocks are taken at first, each id once; empty: 0, 1, 2, …
    BlockPool(int n_blocks, int block_size, FreeOrder reuse, std::vector<BlockId> order = {});

    inline int  size() const { return int(blocks_.size()); }
    inline int  block_size() const { return block_size_; }
    inline int  n_free() const { return n_free_; } // including cached ones
    inline int  n_cached_free() const { return n_cached_free_; }
    inline int  n_held() const { return int(held_.size()); }
    inline bool is_free(BlockId block) const { return at(block).ref_count == 0 && !at(block).held; }

    // -- reference counts

    inline int ref_count(BlockId block) const { return at(block).ref_count; }
    // A block with a reference count of 1: one without an entry if there is any, else the cached one that comes first. The
    // entry of a cached one is still there, for the caller to remove.
    BlockId take();
    void    acquire(BlockId block);
    void    release(BlockId block);
    // Keeps a block from being taken until release_held(): it is the source of a copy that has not run.
    void hold(BlockId block);
    void release_held();

    // -- entries of the prefix cache

    inline const CacheEntry& entry(BlockId block) const { return at(block).entry; }
    inline HashState         state(BlockId block) const { return at(block).entry.state; }
    std::span<const Token>   tokens(BlockId block) const; // [block_size] valid as far as the entry says
    void                     set_entry(BlockId block, const CacheEntry& entry, std::span<const Token> tokens);
    void                     set_state(BlockId block, HashState state);
    void                     clear_entry(BlockId block);
    inline BlockId           first_cached_free() const { return free_[1].head; } // or -1

    // `references`: how many table entries refer to each block.
    void check_invariants(std::span<const int> references) const;

private:
    struct Block {
        std::int32_t ref_count = 0;
        bool         held      = false;
        BlockId      prev = -1, next = -1; // neighbours in the free list
        CacheEntry   entry;
    };
    struct FreeList {
        BlockId head = -1, tail = -1;
    };

    inline Block&       at(BlockId block) { return blocks_[std::size_t(block)]; }
    inline const Block& at(BlockId block) const { return blocks_[std::size_t(block)]; }
    inline FreeList&    list_of(const Block& block) { return free_[block.entry.state == HashState::cached]; }
    void                push_back(BlockId block);
    void                push_front(BlockId block);
    inline void         push_free(BlockId block) { reuse_ == FreeOrder::fifo ? push_back(block) : push_front(block); }
    void                unlink(BlockId block);

    int                     block_size_;
    FreeOrder               reuse_;
    std::vector<Block>      blocks_;
    std::vector<Token>      tokens_; // [n_blocks × block_size] guards against collisions of hashes
    std::array<FreeList, 2> free_;   // free blocks that are not cached, and those that are
    std::vector<BlockId>    held_;   // in the order in which they were held
    int                     n_free_ = 0, n_cached_free_ = 0;
};

inline void BlockPool::push_back(BlockId id) {
    Block&    block                                   = at(id);
    FreeList& list                                    = list_of(block);
    block.prev                                        = list.tail;
    block.next                                        = -1;
    (list.tail >= 0 ? at(list.tail).next : list.head) = id;
    list.tail                                         = id;
    n_free_++;
    n_cached_free_ += block.entry.state == HashState::cached;
}

inline void BlockPool::push_front(BlockId id) {
    Block&    block                                   = at(id);
    FreeList& list                                    = list_of(block);
    block.prev                                        = -1;
    block.next                                        = list.head;
    (list.head >= 0 ? at(list.head).prev : list.tail) = id;
    list.head                                         = id;
    n_free_++;
    n_cached_free_ += block.entry.state == HashState::cached;
}

inline void BlockPool::unlink(BlockId id) {
    Block&    block                                     = at(id);
    FreeList& list                                      = list_of(block);
    (block.prev >= 0 ? at(block.prev).next : list.head) = block.next;
    (block.next >= 0 ? at(block.next).prev : list.tail) = block.prev;
    block.prev = block.next = -1;
    n_free_--;
    n_cached_free_ -= block.entry.state == HashState::cached;
}

inline BlockId BlockPool::take() {
    check(n_free_ > 0, "a block was taken from an empty pool");
    const BlockId id = free_[0].head >= 0 ? free_[0].head : free_[1].head;
    unlink(id);
    at(id).ref_count = 1;
    return id;
}

inline void BlockPool::acquire(BlockId id) {
    Block& block = at(id);
    if (block.ref_count++ == 0 && !block.held) unlink(id);
}

inline void BlockPool::release(BlockId id) {
    Block& block = at(id);
    if (--block.ref_count > 0) return;
    check(block.ref_count == 0, "a free block was freed");
    if (!block.held) push_free(id);
}

inline std::span<const Token> BlockPool::tokens(BlockId block) const {
    return std::span(tokens_).subspan(std::size_t(block) * std::size_t(block_size_), std::size_t(block_size_));
}

} // namespace quire

module :private;

namespace quire {

BlockPool::BlockPool(int n_blocks, int block_size, FreeOrder reuse, std::vector<BlockId> order)
    : block_size_(block_size), reuse_(reuse), blocks_(std::size_t(n_blocks)),
      tokens_(std::size_t(n_blocks) * std::size_t(block_size)) {
    if (order.empty()) {
        order.resize(blocks_.size());
        std::iota(order.begin(), order.end(), 0);
    }
    check(order.size() == blocks_.size(), "free_order does not name every block once");
    for (BlockId block : order) push_back(block);
    held_.reserve(blocks_.size());
}

void BlockPool::hold(BlockId id) {
    Block& block = at(id);
    if (block.held) return;
    if (block.ref_count == 0) unlink(id);
    block.held = true;
    held_.push_back(id);
}

void BlockPool::release_held() {
    for (BlockId id : held_) {
        at(id).held = false;
        if (at(id).ref_count == 0) push_free(id);
    }
    held_.clear();
}

void BlockPool::set_entry(BlockId id, const CacheEntry& entry, std::span<const Token> tokens) {
    const bool listed = is_free(id);
    if (listed) unlink(id);
    at(id).entry = entry;
    std::ranges::copy(tokens, tokens_.begin() + std::ptrdiff_t(id) * block_size_);
    if (listed) push_free(id);
}

void BlockPool::set_state(BlockId id, HashState state) {
    const bool listed = is_free(id);
    if (listed) unlink(id);
    at(id).entry.state = state;
    if (listed) push_free(id);
}

void BlockPool::clear_entry(BlockId id) { set_entry(id, {}, {}); }

void BlockPool::check_invariants(std::span<const int> references) const {
    std::vector<bool> listed(blocks_.size());
    int               n_listed = 0, n_cached = 0, n_held = 0;
    for (const FreeList& list : free_) {
        BlockId prev = -1;
        for (BlockId id = list.head; id >= 0; prev = id, id = at(id).next) {
            const bool cached = at(id).entry.state == HashState::cached;
            check(at(id).prev == prev, "the free list's links disagree");
            check(cached == (&list == &free_[1]), "a free block is in the wrong part");
            check(++n_listed <= size(), "the free list has a cycle");
            listed[std::size_t(id)] = true;
            n_cached += cached;
        }
        check(list.tail == prev, "the free list's tail is wrong");
    }
    for (BlockId id = 0; id < size(); id++) {
        check(at(id).ref_count == references[std::size_t(id)], "a reference count is not the number of table entries");
        check(listed[std::size_t(id)] == is_free(id), "a block is free exactly when its count is 0");
        n_held += at(id).held;
    }
    check(n_listed == n_free_ && n_cached == n_cached_free_, "free + used is not the total");
    check(n_held == int(held_.size()), "held blocks are miscounted");
}

} // namespace quire
