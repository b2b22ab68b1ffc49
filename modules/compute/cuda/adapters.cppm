// quire.compute.cuda.adapters: what LoRA adapters add to the results of GEMMs, for the rows of the sequences that run with them. **Owns** the pinned
// list of a step's adapters; the lists' place on the device is the backend's.
module;

#include "../../../cuda/adapters.h"

export module quire.compute.cuda.adapters;

import quire.compute.backend;
import quire.compute.cuda.fusion;
import quire.compute.cuda.pinned_memory;
import quire.compute.cuda.weights;
import quire.core.base;

export namespace quire {

class DeviceAdapters {
public:
    explicit DeviceAdapters(cuda::Context& gpu) : gpu_(gpu) {}

    // Takes the matrices of the program's LoraAdds, and memory for them. `lowered`: the operations, of which the producers of a LoraAdd's x
    // are run by themselves from now on, so that it stands in memory. False: there is not enough memory.
    bool compile(const Program& program, const StepLimits& limits, const DeviceWeights& weights,
                 const Activations& values, std::vector<LoweredOperation>& lowered, DeviceMemory& memory,
                 PinnedMemory& pinned);
    // Sends up what the plan's sequences run with. `shape`: the step's rows, with the rows that fill up a graph.
    void send(const StepPlan& plan, StepShape shape);
    // Whether a sequence of the step that was sent runs with an adapter.
    bool in_use() const { return in_use_; }
    // `tokens`: of the step's rows.
    void run(const LoweredOperation& op, const std::int32_t* tokens) const;

private:
    cuda::LoraPair* pairs_of(const LoraAdd& op, const DeviceWeights& weights, int& ranks, DeviceMemory& memory);

    cuda::Context& gpu_;
    int            n_adapters_ = 0; // 0: the program has none
    bool           in_use_     = false;
    // [max_sequences + 1 × n_adapters] factors, those behind the last sequence of the step 0; then the sequence of each token, and of each
    // logit row.
    float *     host_ = nullptr, *device_ = nullptr, *low_ = nullptr;
    std::size_t at_tokens_ = 0, at_logits_ = 0, size_ = 0;
};

} // namespace quire

module :private;

namespace quire {

// Null: there is not enough memory.
cuda::LoraPair* DeviceAdapters::pairs_of(const LoraAdd& op, const DeviceWeights& weights, int& ranks,
                                         DeviceMemory& memory) {
    std::vector<cuda::LoraPair> pairs;
    for (const LoraPair& pair : op.pairs) {
        cuda::LoraPair to;
        to.a       = weights.vector(pair.a);
        to.b       = weights.vector(pair.b);
        to.rank    = int(pair.b.cols);
        to.adapter = pair.adapter;
        to.scale   = pair.scale;
        to.first   = ranks;
        ranks += to.rank;
        n_adapters_ = std::max(n_adapters_, pair.adapter + 1);
        pairs.push_back(to);
    }
    const std::size_t bytes = pairs.size() * sizeof(cuda::LoraPair);
    auto* const       there = static_cast<cuda::LoraPair*>(memory.take(bytes));
    if (there) cuda::upload(there, pairs.data(), bytes, gpu_);
    return there;
}

bool DeviceAdapters::compile(const Program& program, const StepLimits& limits, const DeviceWeights& weights,
                             const Activations& values, std::vector<LoweredOperation>& lowered, DeviceMemory& memory,
                             PinnedMemory& pinned) {
    int  most      = 0; // ranks of an operation
    bool no_memory = false;
    for (std::size_t i = 0; i < lowered.size(); i++) {
        const auto* op = std::get_if<LoraAdd>(&program.operations[i]);
        if (!op) continue;
        cuda::LoraAdd& to = lowered[i].lora;
        to.pairs          = pairs_of(*op, weights, to.ranks, memory);
        to.n_pairs        = int(op->pairs.size());
        to.x              = op->x == none ? nullptr : static_cast<const cuda::Half*>(values.at(op->x, {}).data);
        to.in             = op->x == none ? 0 : program[op->x].cols;
        to.out            = values.at(op->out, {}).data;
        to.out_is_float   = program[op->out].f32;
        to.cols           = program[op->out].cols;
        most              = std::max(most, to.ranks);
        no_memory         = no_memory || !to.pairs;
        check(op->x == none || !program[op->x].f32, "lora_add: x is what a GEMM reads");
        for (std::size_t j = i; j-- > 0;)
            if (const ValueAccess access = access_of(program.operations[j]);
                std::ranges::find(access.writes, op->x) != access.writes.end()) {
                lowered[j].fusible = false;
                break;
            }
    }
    if (n_adapters_ == 0) return true;
    const auto T = std::size_t(limits.max_tokens), L = std::max(T, std::size_t(limits.max_logit_rows));
    at_tokens_ = (std::size_t(limits.max_sequences) + 1) * std::size_t(n_adapters_);
    at_logits_ = at_tokens_ + T;
    size_      = at_logits_ + L;
    host_      = static_cast<float*>(pinned.take(size_ * sizeof(float)));
    device_    = static_cast<float*>(memory.take(size_ * sizeof(float)));
    low_       = static_cast<float*>(memory.take(L * std::size_t(most) * sizeof(float)));
    return !no_memory && host_ && device_ && low_;
}

void DeviceAdapters::send(const StepPlan& plan, StepShape shape) {
    in_use_ = n_adapters_ > 0 && !plan.adapters.empty();
    if (!in_use_) return;
    const auto n = std::size_t(n_adapters_), S = std::size_t(plan.n_seqs());
    std::fill_n(host_, (S + 1) * n, 0.0f);
    auto* const tokens = reinterpret_cast<std::int32_t*>(host_ + at_tokens_);
    auto* const logits = reinterpret_cast<std::int32_t*>(host_ + at_logits_);
    for (std::size_t s = 0; s < S; s++) {
        for (auto u = std::size_t(plan.adapter_start[s]); u < std::size_t(plan.adapter_start[s + 1]); u++)
            if (const AdapterUse& use = plan.adapters[u]; std::size_t(use.adapter) < n)
                host_[s * n + std::size_t(use.adapter)] = use.scale;
        std::fill(tokens + plan.token_start[s], tokens + plan.token_start[s + 1], std::int32_t(s));
    }
    std::fill(tokens + plan.n_tokens(), tokens + shape.tokens, std::int32_t(S)); // rows that fill up a graph
    for (std::size_t l = 0; l < std::size_t(shape.logit_rows); l++)
        logits[l] = l < plan.logit_rows.size() ? tokens[plan.logit_rows[l]] : std::int32_t(S);
    cuda::copy_to_device(device_, host_, size_ * sizeof(float), gpu_);
}

void DeviceAdapters::run(const LoweredOperation& op, const std::int32_t* tokens) const {
    if (!in_use_) return;
    cuda::LoraAdd lora           = op.lora;
    lora.tokens                  = tokens;
    lora.low                     = low_;
    const float* const sequences = device_ + (op.logit_rows ? at_logits_ : at_tokens_);
    cuda::lora_add(lora, {device_, reinterpret_cast<const std::int32_t*>(sequences), n_adapters_}, op.device.rows,
                   gpu_);
}

} // namespace quire
