// The executor of the simulator: its K and V are hashes in simulated memory, read through the plan's block tables. **Owns** the memory and
// the virtual clock.
#pragma once

#include "hashes.h"
#include "scenario.h"

import quire.engine.executor;

namespace quire::simulation {

using TimePoint = std::chrono::steady_clock::time_point;

// Time that passes only when the device computes or moves.
struct Clock {
    // Years from now: patience that is measured by the machine's clock does not end. So masks are there in time.
    TimePoint now = std::chrono::steady_clock::now() + std::chrono::seconds(1'000'000'000);
    void      pass(double seconds) {
        now += std::chrono::duration_cast<TimePoint::duration>(std::chrono::duration<double>(seconds));
    }
};

struct SimOptions {
    CacheLayout        layout;
    std::vector<Lane>  lanes; // by layer
    int                block_size = 16, n_blocks = 0, n_swap = 0;
    int                vocab = 0;
    std::vector<Token> ends;
    bool               late_moves = false, reordered_moves = false, late = false, best = false;
    std::uint64_t      seed          = 0; // of the order of moves
    double             token_seconds = 0, block_seconds = 0;
    int                first_step = 0; // the number before that of the first step
};

// The next faults of the device. Each is cleared when it has happened.
struct Trouble {
    bool not_finite = false, move = false, torn_move = false, launch = false, results = false;
};

class SimExecutor final : public Executor {
public:
    SimExecutor(SimOptions options, std::shared_ptr<Clock> clock);

    MoveTicket                        move_blocks(const BlockMoves& moves) override;
    void                              wait_for_moves(MoveTicket ticket) override;
    void                              launch(const StepPlan& plan) override;
    SamplingLimits                    sampling_limits() const override { return {}; }
    void                              sample(const StepPlan&) override {}
    StepResults                       results() override;
    ExecutorMemory                    memory() const override { return {}; }
    std::string                       tuning() const override { return {}; }
    double                            weight_bandwidth() override { return 0; }
    std::string                       describe() const override { return "simulated"; }
    std::string                       numerics() const override { return "simulated"; }
    std::vector<std::span<std::byte>> host_block(BlockId block) const override;
    std::string                       explain() const override { return "hashes"; }

    int steps() const { return step_; } // numbers of steps go on from those of an earlier device: they stand in files
    // The first impossible plan that the device met; empty: none.
    const std::string& broken() const { return broken_; }
    void               set_ends(std::vector<Token> ends) { o_.ends = std::move(ends); }
    // Overwrites a block that nobody is to read any more.
    void    scribble(BlockId block);
    Trouble trouble;
    bool    trace = false; // prints plans
    // Called first by each launch, on the engine's thread; it may wait.
    std::function<void()> before_launch;
    int                   n_not_finite  = 0; // rows
    int                   n_early_moves = 0, n_torn_moves = 0;
    int                   n_moves = 0, n_far_tables = 0, n_same_step = 0, n_states_kept = 0;

private:
    struct Cell {
        std::array<std::uint64_t, n_rounds> value{};
        int                                 step = -1; // that wrote it; -1: none, -2: scribbled
    };
    // A block of a unit: of each state there the same value, in each block and round scrambled in its own way.
    struct StateBlock {
        std::vector<std::uint64_t> value; // [states][n_rounds]
        int                        step = -1;
    };
    void          compute();
    void          check_states();
    std::uint64_t read_state(const GroupPlan& group, int sequence, const Lane& lane, int round);
    void          write_state(const GroupPlan& group, int sequence, const Lane& lane, int round, std::uint64_t value);
    void          print() const;
    void          fault(const std::string& what);
    Cell&         cell(std::vector<Cell>& memory, int lane, std::int64_t slot) {
        return memory[std::size_t(slot) * std::size_t(n_cells_) + std::size_t(o_.lanes[std::size_t(lane)].place)];
    }
    void                     copy(bool from_swap, bool to_swap, std::span<const BlockCopy> list);
    void                     make_some_moves();
    void                     tear(const BlockMoves& moves);
    std::vector<Cell>&       cells(bool swap) { return swap ? swap_ : device_; }
    std::vector<StateBlock>& states(bool swap) { return swap ? swap_states_ : states_; }

    SimOptions                 o_;
    std::shared_ptr<Clock>     clock_;
    int                        n_cells_;
    std::vector<Cell>          device_, swap_;
    std::vector<StateBlock>    states_, swap_states_;  // the same memory
    std::deque<BlockMoves>     waiting_;               // moves that were not made yet
    MoveTicket                 moved_ = 0, asked_ = 0; // the last ticket whose moves are made; the last one
    Random                     order_;                 // of moves
    StepPlan                   plan_;
    bool                       computed_ = true;
    int                        step_     = 0;
    std::vector<std::uint64_t> state_, next_; // [T]
    std::vector<std::uint64_t> running_;      // [lanes] the states of a sequence
    std::vector<float>         logits_;
    std::vector<Token>         best_;
    std::string                broken_;
};

} // namespace quire::simulation
