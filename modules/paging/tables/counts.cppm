// quire.paging.tables.counts: how many blocks tables hold together, and how many would be free or taken if some of them were closed.
// Owns scratch memory only.
export module quire.paging.tables.counts;

import quire.core.base;
import quire.core.std;
import quire.paging.block;
import quire.paging.block_hash;
import quire.paging.cache_layout;
import quire.paging.host_tier;
import quire.paging.prefix_cache;
import quire.paging.tables.block_tables;

export namespace quire {

// The first three are BlockManager's functions.
class BlockCounts {
public:
    explicit BlockCounts(const BlockTables& tables);

    int n_free(std::span<const TableId> closing);
    int distinct_blocks(std::span<const TableId> tables);
    int blocks_to_allocate(const CacheNamespace& space, std::span<const std::span<const Token>> sequences,
                           std::span<const TableId> closing, bool whole, int most_entries);

    // -- for counts of other parts

    void begin(std::span<const TableId> closing); // a count for which these tables are gone
    void end();                                   // the count ends: no table and no sharer is gone
    // One more sharer of a block is gone.
    inline void leave(BlockId block) {
        if (leaving_[std::size_t(block)]++ == 0) touched_.push_back(block);
    }
    inline int n_leaving(BlockId block) const { return leaving_[std::size_t(block)]; }
    bool       is_free(BlockId block) const; // or would be, without the sharers that are gone
    // True once for each block of a count.
    inline bool is_new(BlockId block) { return std::exchange(seen_[std::size_t(block)], now_) != now_; }

    void check_invariants() const;

private:
    // A whole block of some sequences of a count, which have the same tokens before it.
    struct Block {
        std::span<const Token> tokens;
        int                    next  = -1; // another one behind the same tokens
        int                    first = -1; // one that follows this block
    };

    std::size_t add_blocks(std::span<const Token> tokens);
    int         to_allocate(const CacheNamespace& space, std::span<const std::span<const Token>> sequences,
                            std::span<const TableId> closing, bool whole, int most_entries, bool& host);

    const BlockTables&   tables_;
    std::vector<int>     seen_;         // [n_ids of either pool] the last count that met a block
    std::vector<int>     seen_on_host_; // [n_ids of the host pool] the same for units that are found there
    int                  now_ = 0;
    std::vector<int>     leaving_; // [n_ids] sharers that are gone
    std::vector<BlockId> touched_; // blocks that some sharers have left
    std::vector<Block>   blocks_;  // of the sequences so far, from 1 on; 0: the beginning before their first blocks
};

} // namespace quire

module :private;

namespace quire {

BlockCounts::BlockCounts(const BlockTables& tables)
    : tables_(tables), seen_(std::size_t(std::max(tables.pool.n_ids(), tables.host.pool().n_ids()))),
      seen_on_host_(tables.host.keeps() ? std::size_t(tables.host.pool().n_ids()) : 0),
      leaving_(std::size_t(tables.pool.n_ids())) {
    touched_.reserve(leaving_.size());
}

void BlockCounts::begin(std::span<const TableId> closing) {
    now_++;
    for (TableId id : closing) {
        if (tables_.at(id).swapped) continue;
        for (const LaneTable& lane : tables_.of(tables_.at(id)))
            for (BlockId block : lane.held())
                if (block >= 0) leave(block);
        for (BlockId unit : tables_.at(id).units())
            if (unit >= 0) leave(unit);
    }
}

void BlockCounts::end() {
    for (BlockId block : touched_) leaving_[std::size_t(block)] = 0;
    touched_.clear();
}

bool BlockCounts::is_free(BlockId block) const {
    const int n = leaving_[std::size_t(block)];
    return tables_.pool.is_free(block) || (n > 0 && n == tables_.pool.ref_count(block));
}

int BlockCounts::n_free(std::span<const TableId> closing) {
    begin(closing);
    int n = tables_.pool.n_free();
    for (BlockId block : touched_) n += is_free(block) ? tables_.pool.n_blocks(block) : 0;
    end();
    return n;
}

int BlockCounts::distinct_blocks(std::span<const TableId> tables) {
    now_++;
    int n = 0;
    for (TableId id : tables) {
        for (std::size_t l = 0; l < tables_.lanes.size(); l++)
            for (BlockId block : tables_.at(id).lanes[l].held())
                if (block >= 0 && is_new(block)) n += tables_.lanes[l].blocks;
        for (BlockId unit : tables_.at(id).units())
            if (unit >= 0 && is_new(unit)) n += tables_.blocks_per_unit;
    }
    return n;
}

int BlockCounts::blocks_to_allocate(const CacheNamespace& space, std::span<const std::span<const Token>> sequences,
                                    std::span<const TableId> closing, bool whole, int most_entries) {
    bool      host = tables_.host.keeps();
    const int n    = to_allocate(space, sequences, closing, whole, most_entries, host);
    if (!host) return n;
    host = false; // allocate() leaves in host memory what would take more room than to compute it
    return std::min(n, to_allocate(space, sequences, closing, whole, most_entries, host));
}

// Adds a sequence to the sequences of a count. Returns the most whole blocks that it has in common with one sequence before it. Each block is
// compared once, and once more for each sequence that parts from this one there: a long prompt of many sequences costs little.
std::size_t BlockCounts::add_blocks(std::span<const Token> tokens) {
    const auto  size   = std::size_t(tables_.block_size());
    std::size_t shared = 0, at = 0;
    for (; tokens.size() >= size; tokens = tokens.subspan(size)) {
        const std::span<const Token> block = tokens.first(size);
        int                          next  = blocks_[at].first;
        while (next >= 0 && !std::ranges::equal(blocks_[std::size_t(next)].tokens, block))
            next = blocks_[std::size_t(next)].next;
        if (next >= 0) {
            shared++;
        } else {
            next = int(blocks_.size());
            blocks_.push_back({block, std::exchange(blocks_[at].first, next)});
        }
        at = std::size_t(next);
    }
    return shared;
}

// `host`: with what is in host memory; afterwards whether something there was found.
int BlockCounts::to_allocate(const CacheNamespace& space, std::span<const std::span<const Token>> sequences,
                             std::span<const TableId> closing, bool whole, int most_entries, bool& host) {
    const bool         with_host = std::exchange(host, false);
    const PrefixCache& cache     = tables_.cache;
    const auto         size      = std::size_t(tables_.block_size());
    int                n         = 0;
    begin(closing);
    blocks_.assign(1, {});
    for (std::span<const Token> tokens : sequences) {
        std::size_t    shared = sequences.size() > 1 ? add_blocks(tokens) : 0; // with one of the sequences before it
        const CacheHit hit    = cache.match(space, tokens, whole, with_host);
        host                  = host || hit.from_host;
        const auto found      = hit.entries.size();
        for (std::size_t entry = 0; entry < found; entry++)
            for (int lane = 0; lane < int(tables_.cache_lanes.size()); lane++) {
                if (int(entry) < hit.first[std::size_t(lane)]) continue;
                const FoundUnit unit  = cache.unit_of(hit.entries[entry], lane);
                const bool      takes = unit.block >= 0
                                            ? is_free(unit.block) && is_new(unit.block)
                                            : std::exchange(seen_on_host_[std::size_t(unit.on_host)], now_) != now_;
                if (takes) n += tables_.pool.blocks_of_lane(lane);
            }
        // Blocks that are cached behind the hit are not shared: they would leave nothing to compute, or have gaps in some lane.
        if ((found + 1) * size <= tokens.size()) {
            const Prefix parent = found > 0 ? cache.prefix_of(hit.entries.back()) : Prefix{chain_root(space)};
            if (tables_.keeps_state() || cache.find(cache.hash_of(parent, tokens.subspan(found * size, size))) >= 0)
                shared = std::min(shared, found);
        }
        const int fresh = tables_.entries_for(int(tokens.size())) - int(std::max(found, shared));
        for (const Lane& lane : tables_.lanes)
            n += (lane.window > 0 && !whole ? std::min(fresh, most_entries) : fresh) * lane.blocks;
        n += tables_.blocks_per_unit; // that its first step writes
    }
    end();
    return n;
}

void BlockCounts::check_invariants() const {
    check(touched_.empty() && std::ranges::all_of(leaving_, [](int n) { return n == 0; }),
          "a sharer was counted and not taken back");
}

} // namespace quire
