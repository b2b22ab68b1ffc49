// quire.schedule.preemption: a running request gives up all of its blocks, which are swapped or computed again (the paper, section 4.5).
// Owns nothing.
export module quire.schedule.preemption;

import quire.core.base;
import quire.paging.cache_layout;
import quire.schedule.sequence;

export namespace quire {

// How a preempted request gets its KV back. `automatic`: the faster way according to PreemptionCosts.
enum class PreemptionMode : std::uint8_t { automatic, swap, recompute };

// Measured by the engine; 0: not yet.
struct PreemptionCosts {
    double seconds_per_block = 0; // copy of a block between the device's pool and the host pool, one way
    double seconds_per_token = 0; // prefill
};

struct PreemptionStats {
    std::uint64_t preemptions = 0, swaps_out = 0, swaps_in = 0, recomputations = 0;
    std::uint64_t priority_preemptions = 0; // for a waiting request of better priority
    std::uint64_t swapped_blocks       = 0; // in both directions
    std::uint64_t recomputed_tokens    = 0; // tokens whose KV was dropped; computed again unless still in the cache
};

// Whether a running request can be preempted for a waiting one: of strictly worse priority, later in the order, and not
// preempted this way too often already.
bool can_preempt(const SequenceGroup& waiting, const SequenceGroup& running);

// Takes all blocks of all sequences of a group. Its status says how: swapped, or preempted for recomputation. `keep`: dropped
// blocks stay in the prefix cache until their memory is needed.
void preempt(SequenceGroup& group, BlockManager& blocks, PreemptionMode mode, const PreemptionCosts& costs, bool keep,
             PreemptionStats& stats);

} // namespace quire

module :private;

namespace quire {

bool can_preempt(const SequenceGroup& waiting, const SequenceGroup& running) {
    constexpr int most_times = 3;
    return waiting.request.priority < running.request.priority && waiting.key < running.key &&
           running.n_priority_preempted < most_times;
}

// Swapping moves each block twice; recomputing runs once every token that is not in the cache any more.
bool prefers_swap(const SequenceGroup& group, PreemptionMode mode, const PreemptionCosts& costs,
                  const BlockManager& blocks) {
    if (mode == PreemptionMode::recompute) return false;
    // A partly computed prompt is not swapped: its full blocks are in the cache.
    for (const auto& s : group.sequences)
        if (s->n_computed + 1 != int(s->tokens.size())) return false;
    if (mode == PreemptionMode::swap || costs.seconds_per_block <= 0 || costs.seconds_per_token <= 0) return true;
    const double per_entry = costs.seconds_per_token * blocks.block_size();
    if (blocks.blocks_per_unit() == 0)
        return 2 * costs.seconds_per_block * blocks.layout().blocks_per_entry() < per_entry;
    double moves = 0, computes = 0; // a short sequence has a state as large as a long one
    for (const auto& s : group.sequences) {
        moves += 2 * costs.seconds_per_block * blocks.n_held(s->table);
        computes += costs.seconds_per_token * s->n_computed;
    }
    return moves < computes;
}

void preempt(SequenceGroup& group, BlockManager& blocks, PreemptionMode mode, const PreemptionCosts& costs, bool keep,
             PreemptionStats& stats) {
    group.n_preempted++;
    stats.preemptions++;
    const int n_swap_free = blocks.n_swap_free();
    if (prefers_swap(group, mode, costs, blocks) && blocks.swap_out(group.block_tables())) {
        group.status = GroupStatus::swapped;
        stats.swaps_out++;
        stats.swapped_blocks += std::uint64_t(n_swap_free - blocks.n_swap_free());
        return;
    }
    group.status = GroupStatus::preempted;
    stats.recomputations++;
    for (auto& s : group.sequences) {
        group.n_recomputed += s->n_computed;
        stats.recomputed_tokens += std::uint64_t(s->n_computed);
        if (keep) blocks.keep_last(s->table, s->tokens); // it goes on from there
        blocks.close_table(std::exchange(s->table, -1), !keep);
        s->n_computed = 0;
    }
}

} // namespace quire
