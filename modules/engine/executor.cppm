// quire.engine.executor: the seam between engine and compute: run this plan, give its results. Behind it is a device of this
// process, or a set of ranks that run the same plan. Owns nothing.
export module quire.engine.executor;

import quire.core.base;
import quire.engine.options;
import quire.model_file.config;
export import quire.paging.block;
export import quire.step.plan;

export namespace quire {

// Bytes on the device.
struct ExecutorMemory {
    std::size_t weights = 0, workspaces = 0, kv = 0;
};

// One step is launch(plan), sample(plan), results(). launch() and sample() return before the device is done; results() is the one
// wait, and comes before the next launch().
class Executor {
public:
    virtual ~Executor() = default;

    // When no step runs: starts block moves, which run after all earlier moves. The steps of launch() that have the ticket run after these
    // moves, and wait_for_moves() returns when they are done.
    virtual MoveTicket move_blocks(const BlockMoves& moves) = 0;
    virtual void       wait_for_moves(MoveTicket ticket)    = 0;
    // Starts the model on the plan's tokens, after the moves of its ticket.
    virtual void launch(const StepPlan& plan) = 0;
    // The most that sample() can do in one step; zeros: the host reads the logits.
    virtual SamplingLimits sampling_limits() const = 0;
    // Starts the plan's sampling tasks on the logits of the step. This part of the plan depends on the last tokens, so it is made while the
    // model runs.
    virtual void sample(const StepPlan& plan) = 0;
    // Waits for the step. The results are valid until the next step.
    virtual StepResults results() = 0;
    // For when no step runs: throws std::runtime_error if one of several processes is gone. Does not wait.
    virtual void check_peers() {}

    // The memory of a block of the host pool, in pieces, of all ranks of this process. Any thread; to read and to write while no
    // moves use the block.
    virtual std::vector<std::span<std::byte>> host_block(BlockId block) const = 0;

    virtual ExecutorMemory memory() const     = 0;
    virtual std::string    tuning() const     = 0; // the choices made by measuring on this machine; empty: none
    virtual double         weight_bandwidth() = 0; // see Backend::weight_bandwidth(); 0 for several ranks
    virtual std::string    describe() const   = 0; // one line: device, instruction set, threads
    virtual std::string    numerics() const   = 0; // see Backend::numerics()
    virtual std::string    explain() const    = 0; // the program, and how it runs: see Backend::explain()
};

// Makes another executor in place of the local one, for tests. Fills in the options that are left open, as make_local_executor() does. May
// change the windows of the config's layers.
using MakeExecutor = std::function<Result<std::unique_ptr<Executor>>(EngineOptions& options, ModelConfig& config)>;

} // namespace quire
