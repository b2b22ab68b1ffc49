// quire.engine.ranks.process_executors: the executors of several processes that run one model. The leading process sends each plan, the other
// processes run it. Each **owns** the executor of its own ranks.
export module quire.engine.ranks.process_executors;

import quire.core.base;
import quire.engine.executor;
import quire.engine.ranks.process_group;
import quire.step.message;

export namespace quire {

// An executor that runs every plan in this process and, by a message with the plan's differences, in all other processes. A step throws
// std::runtime_error when one of them is lost. The executor's destructor ends the other processes.
std::unique_ptr<Executor> lead(std::unique_ptr<Executor> own, std::shared_ptr<ProcessGroup> processes, int block_size);

// Runs the messages of rank 0 until rank 0 ends. Error: rank 0 is lost, or has sent a message that cannot be.
Result<void> follow(Executor& own, ProcessGroup& processes, const StepMessageLimits& limits);

} // namespace quire

module :private;

namespace quire {

class LeadingExecutor final : public Executor {
public:
    LeadingExecutor(std::unique_ptr<Executor> own, std::shared_ptr<ProcessGroup> processes, int block_size)
        : own_(std::move(own)), processes_(std::move(processes)), sender_(block_size) {}
    ~LeadingExecutor() override { processes_->end(); }

    MoveTicket move_blocks(const BlockMoves& moves) override {
        message_.clear();
        write_moves(moves, message_);
        tell(ProcessGroup::Kind::moves);
        return own_->move_blocks(moves);
    }
    void wait_for_moves(MoveTicket ticket) override { own_->wait_for_moves(ticket); }
    void launch(const StepPlan& plan) override {
        message_.clear();
        sender_.write(plan, message_);
        tell(ProcessGroup::Kind::step);
        own_->launch(plan);
    }
    SamplingLimits sampling_limits() const override { return own_->sampling_limits(); }
    void           sample(const StepPlan& plan) override { own_->sample(plan); }
    StepResults    results() override { return own_->results(); }
    void           check_peers() override {
        if (const auto lost = processes_->lost_peer())
            throw std::runtime_error(cat("rank ", lost->process, ": ", lost->why));
    }
    ExecutorMemory                    memory() const override { return own_->memory(); }
    std::string                       tuning() const override { return own_->tuning(); }
    double                            weight_bandwidth() override { return 0; }
    std::string                       explain() const override { return own_->explain(); }
    std::string                       numerics() const override { return own_->numerics(); }
    std::vector<std::span<std::byte>> host_block(BlockId block) const override { return own_->host_block(block); }
    std::string describe() const override { return cat(processes_->n(), " processes of ", own_->describe()); }

private:
    void tell(ProcessGroup::Kind kind) {
        if (auto ok = processes_->tell(kind, message_); !ok) throw std::runtime_error(ok.error().message);
    }

    std::unique_ptr<Executor>     own_;
    std::shared_ptr<ProcessGroup> processes_;
    StepSender                    sender_;
    std::vector<std::byte>        message_;
};

std::unique_ptr<Executor> lead(std::unique_ptr<Executor> own, std::shared_ptr<ProcessGroup> processes, int block_size) {
    return std::make_unique<LeadingExecutor>(std::move(own), std::move(processes), block_size);
}

Result<void> follow(Executor& own, ProcessGroup& processes, const StepMessageLimits& limits) try {
    StepReceiver receiver(limits);
    StepPlan     plan;
    MoveTicket   moved = 0;
    for (;;) {
        const Result<ProcessGroup::Message> message = processes.receive_command();
        if (!message) return std::unexpected(message.error());
        switch (message->kind) {
            case ProcessGroup::Kind::end: processes.end(); return {};
            case ProcessGroup::Kind::moves:
                if (auto ok = read_moves(message->content, limits, plan.moves); !ok) return ok;
                moved = own.move_blocks(plan.moves);
                break;
            case ProcessGroup::Kind::step:
                if (auto ok = receiver.read(message->content, plan); !ok) return ok;
                plan.after = moved;
                own.launch(plan);
                (void)own.results();
                break;
            default: return fail_with(ErrorKind::system, "rank 0: it is out of step");
        }
    }
} catch (const std::runtime_error& e) { // a rank is lost
    return fail_with(ErrorKind::system, e.what());
}

} // namespace quire
