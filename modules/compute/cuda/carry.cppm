// quire.compute.cuda.carry: hidden states from step to step, for a layer that guesses the next tokens. **Owns** the pinned list of the rows that
// a step keeps and reads; its place on the device is the backend's.
module;

#include "../../../cuda/guesses.h"

export module quire.compute.cuda.carry;

import quire.compute.backend;
import quire.compute.cuda.pinned_memory;
import quire.compute.cuda.weights;
import quire.core.base;

export namespace quire {

class DeviceCarry {
public:
    explicit DeviceCarry(cuda::Context& gpu) : gpu_(gpu) {}

    // Takes memory for the lists, if the program carries states. False: there is not enough.
    bool compile(const Program& program, const StepLimits& limits, DeviceMemory& memory, PinnedMemory& pinned);
    // Sends up the plan's rows. `n_tokens`: rows of the step, with the rows that fill up a graph.
    void send(const StepPlan& plan, int n_tokens);
    void run(const cuda::Carry& op, std::int64_t n_tokens) const;

private:
    cuda::Context& gpu_;
    int            most_rows_   = 0; // of memory; 0: the program carries nothing
    std::size_t    most_tokens_ = 0;
    // The number of rows that are kept, the source of each token, the rows that are kept.
    std::int32_t *host_ = nullptr, *device_ = nullptr;
};

} // namespace quire

module :private;

namespace quire {

bool DeviceCarry::compile(const Program& program, const StepLimits& limits, DeviceMemory& memory,
                          PinnedMemory& pinned) {
    if (!std::ranges::any_of(program.operations, [](const Operation& o) { return std::holds_alternative<Carry>(o); }))
        return true;
    most_rows_              = mtp_states * limits.max_logit_rows;
    most_tokens_            = std::size_t(limits.max_tokens);
    const std::size_t bytes = (1 + most_tokens_) * 4 + std::size_t(most_rows_) * sizeof(cuda::KeptRow);
    host_                   = static_cast<std::int32_t*>(pinned.take(bytes));
    device_                 = static_cast<std::int32_t*>(memory.take(bytes));
    return host_ && device_;
}

void DeviceCarry::send(const StepPlan& plan, int n_tokens) {
    if (most_rows_ == 0) return;
    const auto n = plan.kept.size(), T = std::size_t(n_tokens);
    check(T <= most_tokens_ && n <= std::size_t(most_rows_), "carry: more rows than announced");
    host_[0]       = std::int32_t(n);
    const auto row = [&](std::int32_t i, int most) {
        check(i >= 0 && i < most, "carry: a row that there is not");
        return i;
    };
    std::int32_t* const from = host_ + 1;
    std::fill_n(from, T, plan.guesses ? cuda::CarryStep::zeros : cuda::CarryStep::row_before);
    for (std::size_t s = 0; s < std::size_t(plan.n_seqs()); s++) {
        const std::int32_t at = plan.carried.empty() ? -1 : plan.carried[s];
        if (plan.token_start[s] < plan.token_start[s + 1])
            from[plan.token_start[s]] = at < 0 ? cuda::CarryStep::zeros : row(at, most_rows_);
    }
    std::fill(from + plan.n_tokens(), from + T, cuda::CarryStep::zeros); // rows that fill up a graph
    for (std::size_t i = 0; i < n; i++) {
        const StepPlan::KeptRow& k = plan.kept[i];
        const cuda::KeptRow      to{row(k.row, most_rows_ / mtp_states), row(k.to, most_rows_), k.guessed};
        std::memcpy(from + most_tokens_ + 3 * i, &to, sizeof to);
    }
    cuda::copy_to_device(device_, host_, (1 + T) * 4, gpu_);
    const std::size_t kept_at = 1 + most_tokens_;
    if (n > 0) cuda::copy_to_device(device_ + kept_at, host_ + kept_at, n * sizeof(cuda::KeptRow), gpu_);
}

void DeviceCarry::run(const cuda::Carry& op, std::int64_t n_tokens) const {
    cuda::carry(op, {device_ + 1, device_, reinterpret_cast<const cuda::KeptRow*>(device_ + 1 + most_tokens_)},
                n_tokens, gpu_);
}

} // namespace quire
