// quire.engine.step_counts: counts what an engine's steps do, and tells the scheduler what moves and tokens cost. **Owns** the counters.
export module quire.engine.step_counts;

import quire.core.base;
export import quire.engine.files.disk_requests; // SegmentStats
import quire.schedule.scheduler;
import quire.step.plan;

export namespace quire {

// Counters since the start, for timings and tests.
struct EngineStats {
    std::uint64_t   steps          = 0;
    std::uint64_t   planned_ahead  = 0; // of these, planned while the previous one ran
    std::uint64_t   prefill_tokens = 0; // prompt tokens computed (not found in the cache)
    std::uint64_t   cached_tokens  = 0; // prompt tokens found in the cache
    std::uint64_t   loaded_tokens  = 0; // of these, tokens that were in host memory
    std::uint64_t   decode_tokens  = 0;
    std::uint64_t   preemptions    = 0;
    SchedulerStats  memory; // forks, copies, swaps, sharing
    PreemptionCosts costs;  // as measured
    double          move_seconds = 0, compute_seconds = 0;
    std::uint64_t   swapped_out = 0, swapped_in = 0; // blocks
    // After the last step.
    int           running = 0, waiting = 0, swapped = 0; // requests; swapped: of the waiting ones
    int           blocks_used = 0, blocks_cached = 0, blocks_pinned = 0, swap_used = 0;
    int           host_cached = 0; // blocks of the prefix cache in host memory
    HostTierStats host;            // since the start
    SegmentStats  disk;            // since the start
    std::uint64_t disk_tokens = 0; // of the loaded ones, prompt tokens that files had
    std::uint64_t disk_bytes  = 0; // of the files
    int           step_tokens = 0; // of the last step
};

class StepCounts {
public:
    // The scheduler outlives this object.
    explicit StepCounts(Scheduler& scheduler) : scheduler_(scheduler) {}

    // Before the first step: a block takes so long to be swapped, one way.
    void begin(double seconds_per_block);
    void add_planned_ahead() { stats_.planned_ahead++; }
    // `seconds`: of starting the moves; `complete`: and of the moves themselves.
    void add_moves(const BlockMoves& moves, double seconds, bool complete);
    // Before commit(): a step of n_tokens tokens has run these items. Returns whether it had nothing but decoding.
    bool add_step(std::span<const Scheduled> items, int n_tokens, double seconds);
    // After each step: reads how things stand. `step_tokens`: of the last one; `files`: null: there are none.
    void sample(int step_tokens, const DiskRequests* files);

    const EngineStats& stats() const { return stats_; }

private:
    Scheduler&  scheduler_;
    EngineStats stats_;
};

} // namespace quire

module :private;

namespace quire {

// A measured rate that follows slow changes and forgives a single slow step.
void track(double& average, double sample) { average = average > 0 ? 0.9 * average + 0.1 * sample : sample; }

void StepCounts::begin(double seconds_per_block) {
    stats_.costs.seconds_per_block = seconds_per_block;
    scheduler_.set_costs(stats_.costs);
}

void StepCounts::add_moves(const BlockMoves& moves, double seconds, bool complete) {
    stats_.move_seconds += seconds;
    stats_.swapped_out += moves.swap_out.size();
    stats_.swapped_in += moves.swap_in.size();
    if (const std::size_t n = moves.swap_out.size() + moves.swap_in.size(); n >= 4 && moves.copies.empty() && complete)
        track(stats_.costs.seconds_per_block, seconds / double(n));
}

bool StepCounts::add_step(std::span<const Scheduled> items, int n_tokens, double seconds) {
    int  prefill = 0;
    bool decode  = true; // the step has nothing else
    for (const Scheduled& item : items) {
        const SequenceGroup& g = *item.group;
        if (!g.prompt_done && g.n_preempted == 0 && item.first == g.n_cached)
            stats_.cached_tokens += std::uint64_t(g.n_cached), stats_.loaded_tokens += std::uint64_t(g.n_loaded),
                stats_.disk_tokens += std::uint64_t(std::min(g.n_from_disk, g.n_loaded));
        const int  known   = item.n_tokens - item.n_drafts;
        const bool decodes = g.prompt_done && known <= item.sequence->n_new;
        (decodes ? stats_.decode_tokens : stats_.prefill_tokens) += std::uint64_t(known);
        decode = decode && decodes;
        if (!decodes && item.n_tokens > 1) prefill += item.n_tokens;
    }
    stats_.steps++;
    stats_.compute_seconds += seconds;
    // A step that is mostly prefill shows the cost of computing a token again.
    if (prefill >= 16 && 4 * prefill >= 3 * n_tokens) {
        track(stats_.costs.seconds_per_token, seconds / n_tokens);
        scheduler_.set_costs(stats_.costs);
    }
    return decode;
}

void StepCounts::sample(int step_tokens, const DiskRequests* files) {
    const BlockManager& b = scheduler_.blocks();
    stats_.memory         = scheduler_.stats();
    stats_.preemptions    = stats_.memory.preemptions;
    stats_.running        = scheduler_.n_running();
    stats_.waiting        = scheduler_.n_waiting();
    stats_.swapped        = stats_.waiting > 0 ? scheduler_.n_swapped() : 0;
    stats_.blocks_used    = b.n_used();
    stats_.blocks_cached  = b.n_cached_free();
    stats_.blocks_pinned  = b.n_pinned();
    stats_.swap_used      = b.n_swap() - b.n_swap_free();
    stats_.host_cached    = b.n_on_host();
    stats_.host           = b.host_stats();
    stats_.step_tokens    = step_tokens;
    if (!files) return;
    stats_.disk       = files->tier().stats();
    stats_.disk_bytes = files->tier().bytes();
    stats_.waiting += files->n_waiting();
}

} // namespace quire
