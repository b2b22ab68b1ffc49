// quire.schedule.reservation: the interface to memory that gives each sequence, before it starts, one contiguous chunk of KV slots for all
// tokens that it may ever have (quire.baseline.systems); and how the slots of the pool are used. Owns nothing.
export module quire.schedule.reservation;

import quire.core.base;
export import quire.paging.block_manager;
import quire.paging.cache_layout;
export import quire.schedule.request;
import quire.schedule.sequence;

export namespace quire {

// How many slots of the pool are used for what (the paper, Fig. 2). The sum is all slots.
struct MemoryUse {
    std::int64_t tokens      = 0; // known tokens of running sequences; shared ones count once
    std::int64_t reservation = 0; // their sequence will fill these
    std::int64_t internal    = 0; // asked for and never filled
    std::int64_t other       = 0; // rounding, pieces too small for any request, free blocks
};

// Memory in which requests get chunks in place of blocks on demand. Requests never overtake one another, are never preempted, and share
// nothing.
class Reservations {
public:
    virtual ~Reservations() = default;

    // Error: why a request can never run.
    virtual Result<void> check_request(const Request& request) const = 0;
    // A chunk for each sequence that the request will have, or none (false).
    virtual bool reserve(SequenceGroup& group) = 0;
    // Gives back the chunks of a group.
    virtual void release(SequenceGroup& group) = 0;
    // An empty table begins in the first chunk of its group.
    virtual void place_first(SequenceGroup& group, BlockManager& blocks) const = 0;
    // Sequences that were forked move to a chunk of their own: their KV is copied, as nothing can be shared.
    virtual void place_forks(SequenceGroup& group, BlockManager& blocks) const = 0;
    // Whether a request may start while others run.
    virtual bool joins() const = 0;

    // How many slots of the pool have which use, while these groups run.
    virtual MemoryUse memory_use(std::span<const std::unique_ptr<SequenceGroup>> running) const = 0;
};

// `context`: the longest sequence. An empty function: blocks on demand.
using MakeReservations = std::function<std::unique_ptr<Reservations>(int n_blocks, int block_size, int context)>;

// With blocks on demand: a slot without a token is `other`. A block that several sequences share counts once. So does a block of a pinned
// prefix.
MemoryUse memory_use(std::span<const std::unique_ptr<SequenceGroup>> running,
                     std::span<const std::unique_ptr<SequenceGroup>> pinned, const BlockManager& blocks);

} // namespace quire

module :private;

namespace quire {

MemoryUse memory_use(std::span<const std::unique_ptr<SequenceGroup>> running,
                     std::span<const std::unique_ptr<SequenceGroup>> pinned, const BlockManager& blocks) {
    // Blocks fill from left to right: only the last one of a table has free slots.
    std::int64_t                         free_slots = 0;
    std::vector<std::pair<BlockId, int>> shared; // last blocks of several tables, and their free slots
    for (const auto groups : {running, pinned})
        for (const auto& group : groups)
            for (const auto& s : group->sequences) {
                if (s->table < 0 || blocks.blocks(s->table).empty()) continue;
                const std::span<const BlockId> table = blocks.blocks(s->table);
                const int n = std::max(int(table.size()) * blocks.block_size() - int(s->tokens.size()), 0) *
                              blocks.layout().blocks_per_entry();
                if (n == 0 || table.back() == released_block) continue;
                if (blocks.ref_count(table.back()) > 1) shared.emplace_back(table.back(), n);
                else free_slots += n;
            }
    std::ranges::sort(shared); // of each block the least: a slot that one of the sharers has filled is not free
    for (std::size_t i = 0; i < shared.size(); i++)
        if (i == 0 || shared[i - 1].first != shared[i].first) free_slots += shared[i].second;
    MemoryUse use;
    use.tokens = std::int64_t(blocks.n_used()) * blocks.block_size() - free_slots;
    use.other  = std::int64_t(blocks.n_blocks()) * blocks.block_size() - use.tokens;
    return use;
}

} // namespace quire
