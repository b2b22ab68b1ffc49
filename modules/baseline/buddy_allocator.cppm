// quire.baseline.buddy_allocator: contiguous runs of blocks whose lengths are powers of two, as systems before PagedAttention allocate
// KV memory (Orca; the paper, section 6.1). **Owns** the lists of free runs; knows no tables.
export module quire.baseline.buddy_allocator;

import quire.core.base;
import quire.paging.block;

export namespace quire {

class BuddyAllocator {
public:
    // Of any number of blocks: one that is no power of two is cut into a run for each of its bits, the longest first.
    explicit BuddyAllocator(int n_blocks);

    // The first free run of the smallest order that holds `n` ≥ 1 blocks; a longer one is split. Nothing: there is none, however
    // many blocks are free.
    std::optional<BlockRun> take(int n);
    // Joins the run with its buddy (the run of the same order at first XOR size) while that is free.
    void give_back(BlockRun run);

    int n_free() const { return n_free_; }
    // How many runs for `n` blocks an empty pool has.
    int most_runs(int n) const { return n_blocks_ >> order_for(n); }
    // The order of the shortest run that holds `n` blocks.
    static int order_for(int n) { return int(std::bit_width(unsigned(n) - 1)); }

private:
    std::vector<std::set<BlockId>> free_; // [order] the first blocks of free runs
    int                            n_blocks_ = 0, n_free_ = 0;
};

} // namespace quire

module :private;

namespace quire {

BuddyAllocator::BuddyAllocator(int n_blocks)
    : free_(std::size_t(std::bit_width(unsigned(n_blocks)))), n_blocks_(n_blocks), n_free_(n_blocks) {
    check(n_blocks > 0, "a buddy allocator without blocks");
    BlockId first = 0;
    for (std::size_t order = free_.size(); order-- > 0;)
        if (n_blocks >> order & 1) {
            free_[order].insert(first);
            first += BlockId(1) << order;
        }
}

std::optional<BlockRun> BuddyAllocator::take(int n) {
    check(n >= 1, "a run without blocks was asked for");
    const auto  wanted = std::size_t(order_for(n));
    std::size_t order  = wanted;
    while (order < free_.size() && free_[order].empty()) order++;
    if (order >= free_.size()) return std::nullopt;
    const BlockId first = *free_[order].begin();
    free_[order].erase(free_[order].begin());
    while (order > wanted) { // the upper half stays free
        order--;
        free_[order].insert(first + (BlockId(1) << order));
    }
    n_free_ -= 1 << wanted;
    return BlockRun{first, int(wanted)};
}

void BuddyAllocator::give_back(BlockRun run) {
    n_free_ += run.size();
    auto order = std::size_t(run.order);
    // A buddy beyond the end of the pool, or one that belongs to a shorter piece of it, is never free at this order.
    while (free_[order].erase(run.first ^ (BlockId(1) << order)) > 0) {
        run.first &= ~(BlockId(1) << order);
        order++;
    }
    check(order < free_.size() && free_[order].insert(run.first).second, "a run was given back twice");
}

} // namespace quire
