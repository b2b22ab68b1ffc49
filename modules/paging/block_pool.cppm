// quire.paging.block_pool: the blocks of one pool: reference counts, the free lists, and each block's entry in the prefix cache.
// **Owns** this metadata. The block manager has two pools: the device's, and the host pool in host memory.
export module quire.paging.block_pool;

import quire.core.base;
import quire.core.std;
import quire.paging.block;
import quire.paging.block_hash;

export namespace quire {

// Which of the free blocks is taken first. FIFO makes eviction from the prefix cache least recently used.
enum class FreeOrder : std::uint8_t { fifo, lifo };

// The bundles of a pool with one lane: of one block each.
inline constexpr std::array one_block{1};

// An entry of a table is a bundle of blocks; all bundles of a lane have equally many. A bundle has the id of its first block, which
// has the lane, the reference count and the cache entry of the bundle. A bundle of no blocks is a marker: it has an id and a cache
// entry, but no memory. A bundle is free exactly when its reference count is 0 and it is not held; its blocks are on the free list one
// by one unless it is cached. The functions that the block manager calls for every entry of a table are `inline`: a module does not
// make them so.
class BlockPool {
public:
    // `order`: in which the blocks are taken at first, each id once; empty: 0, 1, 2, … `bundles`: blocks of a bundle, by lane.
    // Markers have the ids from n_blocks on.
    BlockPool(int n_blocks, int block_size, FreeOrder reuse, std::vector<BlockId> order = {},
              std::span<const int> bundles = one_block, int n_markers = 0);

    inline int  size() const { return n_blocks_; }
    inline int  n_ids() const { return int(blocks_.size()); } // blocks and markers
    inline int  block_size() const { return block_size_; }
    inline int  n_free() const { return n_free_; } // blocks, including cached ones
    inline int  n_cached_free() const { return n_cached_free_; }
    inline int  n_held() const { return n_held_; } // blocks
    inline bool is_free(BlockId block) const { return at(block).ref_count == 0 && !at(block).held; }

    inline int lane(BlockId block) const { return at(block).lane; }
    inline int n_blocks(BlockId block) const { return bundles_[at(block).lane]; } // of its bundle
    inline int blocks_of_lane(int lane) const { return bundles_[std::size_t(lane)]; }
    // The cache group of a lane: a first lane of markers is none.
    inline int group_of_lane(int lane) const { return lane - (bundles_[0] == 0); }
    // The block behind this one in its bundle, or -1.
    inline BlockId next_of(BlockId block) const { return rest_.empty() ? -1 : rest_[std::size_t(block)]; }
    // The bundle that a block is in, or the block itself.
    inline BlockId bundle_of(BlockId block) const {
        return first_.empty() || first_[std::size_t(block)] < 0 ? block : first_[std::size_t(block)];
    }

    // -- reference counts

    inline int ref_count(BlockId block) const { return at(block).ref_count; }
    // Takes a bundle for a lane; its reference count is 1. If no uncached block is free, a lane of single blocks gets the first cached block,
    // if that is a bundle of one block, too: the caller then evicts its entry and sets its lane. -1: no bundle is free without an eviction.
    BlockId take(int lane = 0);
    // The new lane has bundles of equally many blocks.
    inline void set_lane(BlockId block, int lane) { at(block).lane = std::uint8_t(lane); }
    // One more reference to a bundle. A bundle that was free leaves its free list; its content stays.
    void acquire(BlockId block);
    // One reference less; at 0 the bundle goes to a free list, unless it is held. To release a free bundle stops the program.
    void release(BlockId block);
    // Keeps a block from being taken until release_held(): it is the source of a copy that has not run.
    void hold(BlockId block);
    void release_held();

    // -- entries of the prefix cache

    inline const CacheEntry& entry(BlockId block) const { return at(block).entry; }
    inline HashState         state(BlockId block) const { return at(block).entry.state; }
    std::span<const Token>   tokens(BlockId block) const; // [block_size] valid as far as the entry says
    // Gives a bundle an entry, in place of the one that it has, and the entry's tokens, which only the first lane needs. A free bundle
    // moves to the free list of the new state.
    void set_entry(BlockId block, const CacheEntry& entry, std::span<const Token> tokens);
    // Changes the state of the entry only; a free bundle moves likewise.
    void set_state(BlockId block, HashState state);
    // Takes the entry away: the bundle can no longer be found. If it is free, its blocks become free one by one.
    void           clear_entry(BlockId block);
    inline BlockId first_cached_free() const { return free_[1].head; }   // the next to lose its entry, or -1
    inline BlockId first_cached_marker() const { return free_[3].head; } // likewise

    // Whether so many markers are free, or can be evicted.
    bool has_markers(int n) const;

    // `references`: how many table entries refer to each block.
    void check_invariants(std::span<const int> references) const;

private:
    struct Block {
        std::int32_t ref_count = 0;
        bool         held      = false;
        std::uint8_t lane      = 0;
        BlockId      prev = -1, next = -1; // neighbours in the free list
        CacheEntry   entry;
    };
    struct FreeList {
        BlockId head = -1, tail = -1;
    };

    inline Block&       at(BlockId block) { return blocks_[std::size_t(block)]; }
    inline const Block& at(BlockId block) const { return blocks_[std::size_t(block)]; }
    // The free list that a block joins (sign 1) or leaves (-1), and counts it.
    inline FreeList& counted_list(const Block& block, int sign) {
        const int  n      = bundles_[block.lane];
        const bool cached = block.entry.state == HashState::cached;
        n_free_ += sign * n;
        n_cached_free_ += cached ? sign * n : 0;
        return free_[(n == 0 ? 2 : 0) + cached];
    }
    void        push_back(BlockId block);
    void        push_front(BlockId block);
    inline void push_one(BlockId block) { reuse_ == FreeOrder::fifo ? push_back(block) : push_front(block); }
    inline void push_free(BlockId block);
    void        part(BlockId block); // a bundle becomes free blocks
    inline void unlink(FreeList& list, Block& block);
    inline void unlink(BlockId block) { unlink(counted_list(at(block), -1), at(block)); }
    BlockId     take_bundle(int lane);

    int                  n_blocks_, block_size_;
    FreeOrder            reuse_;
    std::array<int, 8>   bundles_{}; // blocks of a bundle, by lane
    std::vector<Block>   blocks_;    // [n_ids]
    std::vector<BlockId> rest_;      // [n_blocks] see next_of(); empty where bundles have one block
    std::vector<BlockId> first_;     // [n_ids] the first block of its bundle, or -1 if it is that; empty as rest_
    std::vector<Token>   tokens_;    // [n_ids × block_size] guards against collisions of hashes
    std::array<FreeList, 4>
                         free_; // free blocks that are not cached, cached free blocks; then the free markers, likewise
    std::vector<BlockId> held_; // in the order in which they were held
    int                  n_free_ = 0, n_cached_free_ = 0, n_held_ = 0;
    std::uint8_t         one_block_ = 0; // the lane of free blocks, whose bundles have one block
};

inline void BlockPool::push_back(BlockId id) {
    Block&    block                                   = at(id);
    FreeList& list                                    = counted_list(block, 1);
    block.prev                                        = list.tail;
    block.next                                        = -1;
    (list.tail >= 0 ? at(list.tail).next : list.head) = id;
    list.tail                                         = id;
}

inline void BlockPool::push_front(BlockId id) {
    Block&    block                                   = at(id);
    FreeList& list                                    = counted_list(block, 1);
    block.prev                                        = -1;
    block.next                                        = list.head;
    (list.head >= 0 ? at(list.head).prev : list.tail) = id;
    list.head                                         = id;
}

inline void BlockPool::unlink(FreeList& list, Block& block) {
    (block.prev >= 0 ? at(block.prev).next : list.head) = block.next;
    (block.next >= 0 ? at(block.next).prev : list.tail) = block.prev;
    block.prev = block.next = -1;
}

inline void BlockPool::push_free(BlockId id) {
    const Block& block = at(id);
    if (bundles_[block.lane] > 1 && block.entry.state != HashState::cached) return part(id);
    push_one(id);
}

inline BlockId BlockPool::take(int lane) {
    if (bundles_[std::size_t(lane)] != 1) return take_bundle(lane);
    const bool    cached = free_[0].head < 0;
    const BlockId id     = free_[cached].head;
    if (cached && (id < 0 || n_blocks(id) != 1)) return -1;
    Block& block = at(id);
    n_free_--;
    n_cached_free_ -= cached;
    unlink(free_[cached], block);
    block.ref_count = 1;
    if (!cached) block.lane = std::uint8_t(lane);
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

// Notes the copies of an entry, block by block.
inline void add_copy(std::vector<BlockCopy>& list, const BlockPool& from_pool, BlockId from, const BlockPool& to_pool,
                     BlockId to) {
    for (; from >= 0 && to >= 0; from = from_pool.next_of(from), to = to_pool.next_of(to)) list.push_back({from, to});
}

} // namespace quire

module :private;

namespace quire {

BlockPool::BlockPool(int n_blocks, int block_size, FreeOrder reuse, std::vector<BlockId> order,
                     std::span<const int> bundles, int n_markers)
    : n_blocks_(n_blocks), block_size_(block_size), reuse_(reuse), blocks_(std::size_t(n_blocks + n_markers)),
      tokens_(blocks_.size() * std::size_t(block_size)) {
    if (order.empty()) {
        order.resize(std::size_t(n_blocks));
        std::iota(order.begin(), order.end(), 0);
    }
    check(order.size() == std::size_t(n_blocks), "free_order does not name every block once");
    check(bundles.size() < bundles_.size(), "more lanes than a pool has");
    std::ranges::copy(bundles, bundles_.begin());
    if (std::ranges::any_of(bundles, [](int n) { return n > 1; }))
        first_ = rest_ = std::vector<BlockId>(blocks_.size(), -1);
    one_block_           = std::uint8_t(bundles.size());
    bundles_[one_block_] = 1;
    for (BlockId block : order) {
        at(block).lane = one_block_;
        push_back(block);
    }
    const auto marker = std::ranges::find(bundles, 0) - bundles.begin();
    for (BlockId id = n_blocks; id < n_ids(); id++) {
        at(id).lane = std::uint8_t(marker);
        push_back(id);
    }
    held_.reserve(blocks_.size());
}

BlockId BlockPool::take_bundle(int lane) {
    const int     n  = bundles_[std::size_t(lane)];
    FreeList&     of = free_[n == 0 ? 2 : 0];
    const BlockId id = of.head;
    if (id < 0 || (n > 0 && n_free_ - n_cached_free_ < n)) return -1;
    unlink(id);
    for (BlockId i = 1, last = id; i < n; i++) {
        const BlockId next = of.head;
        unlink(next);
        first_[std::size_t(next)] = id;
        rest_[std::size_t(last)]  = next;
        last                      = next;
    }
    at(id).ref_count = 1;
    at(id).lane      = std::uint8_t(lane);
    return id;
}

void BlockPool::part(BlockId id) {
    for (BlockId block = id; block >= 0;) {
        const BlockId next         = std::exchange(rest_[std::size_t(block)], -1);
        first_[std::size_t(block)] = -1;
        at(block).lane             = one_block_;
        push_one(block);
        block = next;
    }
}

void BlockPool::hold(BlockId id) {
    Block& block = at(id);
    if (block.held) return;
    if (block.ref_count == 0) unlink(id);
    block.held = true;
    n_held_ += n_blocks(id);
    held_.push_back(id);
}

void BlockPool::release_held() {
    for (BlockId id : held_) {
        at(id).held = false;
        if (at(id).ref_count == 0) push_free(id);
    }
    held_.clear();
    n_held_ = 0;
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

bool BlockPool::has_markers(int n) const {
    for (const FreeList& list : {free_[2], free_[3]})
        for (BlockId id = list.head; id >= 0 && n > 0; id = at(id).next) n--;
    return n <= 0;
}

void BlockPool::check_invariants(std::span<const int> references) const {
    std::vector<bool> listed(blocks_.size());
    int               n_listed = 0, n_free = 0, n_cached = 0, n_held = 0;
    for (const FreeList& list : free_) {
        const auto which = &list - free_.data();
        BlockId    prev  = -1;
        for (BlockId id = list.head; id >= 0; prev = id, id = at(id).next) {
            const bool cached = at(id).entry.state == HashState::cached;
            check(at(id).prev == prev, "the free list's links disagree");
            check(cached == (which % 2 == 1) && (id >= n_blocks_) == (which >= 2), "a free block is in the wrong part");
            check(cached || n_blocks(id) <= 1, "a bundle without an entry was not parted");
            check(++n_listed <= n_ids(), "the free list has a cycle");
            listed[std::size_t(id)] = true;
            n_free += n_blocks(id);
            n_cached += cached ? n_blocks(id) : 0;
        }
        check(list.tail == prev, "the free list's tail is wrong");
    }
    int n_used = 0;
    for (BlockId id = 0; id < n_ids(); id++) {
        check(at(id).ref_count == references[std::size_t(id)], "a reference count is not the number of table entries");
        if (bundle_of(id) != id) {
            check(!listed[std::size_t(id)] && at(id).ref_count == 0, "a block is in a bundle, and free");
            continue;
        }
        check(listed[std::size_t(id)] == is_free(id), "a block is free exactly when its count is 0");
        check((n_blocks(id) == 0) == (id >= n_blocks_), "a marker is a block");
        int n = id < n_blocks_;
        for (BlockId rest = id < n_blocks_ ? next_of(id) : -1; rest >= 0; rest = next_of(rest), n++)
            check(bundle_of(rest) == id, "a block is in two bundles");
        check(n == n_blocks(id), "a bundle has not the blocks of its lane");
        n_held += at(id).held ? n : 0;
        n_used += is_free(id) ? 0 : n;
    }
    check(n_free == n_free_ && n_cached == n_cached_free_ && n_free + n_used == n_blocks_,
          "free + used is not the total");
    check(n_held == n_held_, "held blocks are miscounted");
}

} // namespace quire
