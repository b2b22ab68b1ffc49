// quire.engine.trials: measures what moves of blocks and steps cost, before the first request, while all pools are empty. Owns nothing.
export module quire.engine.trials;

import quire.core.base;
export import quire.decode.drafting; // StepCost
export import quire.engine.executor;
export import quire.schedule.scheduler;

export namespace quire {

// The seconds that a block takes to be swapped, one way: from moving a few between pools of so many blocks. 0: a pool has none.
double time_moves(Executor& executor, int n_blocks, int n_host_blocks,
                  const std::function<std::chrono::steady_clock::time_point()>& now);

// Adds to `cost` the times of steps of 1, 2, 4 .. rows, of up to `most_rows`.
void time_steps(Executor& executor, Scheduler& scheduler, int most_rows, StepCost& cost,
                const std::function<std::chrono::steady_clock::time_point()>& now);

} // namespace quire

module :private;

namespace quire {

double seconds_between(std::chrono::steady_clock::time_point from, std::chrono::steady_clock::time_point to) {
    return std::chrono::duration<double>(to - from).count();
}

double time_moves(Executor& executor, int n_blocks, int n_host_blocks,
                  const std::function<std::chrono::steady_clock::time_point()>& now) {
    constexpr int most = 8;
    BlockMoves    trial;
    for (BlockId i = 0; i < std::min({most, n_blocks, n_host_blocks}); i++) trial.swap_out.push_back({i, i});
    trial.swap_in = trial.swap_out;
    if (trial.swap_out.empty()) return 0;
    executor.wait_for_moves(executor.move_blocks(trial)); // the first time also brings the memory
    const auto start = now();
    executor.wait_for_moves(executor.move_blocks(trial));
    return seconds_between(start, now()) / double(2 * trial.swap_out.size());
}

void time_steps(Executor& executor, Scheduler& scheduler, int most_rows, StepCost& cost,
                const std::function<std::chrono::steady_clock::time_point()>& now) {
    constexpr double long_step = 0.5; // seconds: the steps of a large model. Larger ones are judged by these.
    double           seconds   = 0;
    StepPlan         plan;
    for (int n = 1; n <= most_rows && seconds < long_step; n *= 2)
        for (int i = n == 1 ? -1 : 0; i < 3; i++) { // the first step of all also brings the weights
            if (!scheduler.plan_trial(n, plan)) return;
            const auto start = now();
            executor.launch(plan);
            executor.results();
            seconds = seconds_between(start, now());
            if (i >= 0) cost.add_trial(n, seconds);
        }
}

} // namespace quire
