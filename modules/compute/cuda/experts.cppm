// quire.compute.cuda.experts: which kernels run a mixture of experts, by the step's tokens and the form of the weights. Owns nothing;
// the workspace is the backend's.
module;

#include "../../../cuda/kernels.h"

export module quire.compute.cuda.experts;

import quire.compute.backend;
import quire.compute.cuda.fusion;
import quire.compute.cuda.weights;
import quire.core.base;

export namespace quire {

class ExpertDispatch {
public:
    ExpertDispatch(cuda::Context& gpu, bool deterministic) : gpu_(gpu), deterministic_(deterministic) {}

    // Takes the workspace for the largest step. Error: no memory, or more experts than the kernels know.
    Result<void> prepare(const StepLimits& limits, DeviceMemory& memory);
    // Chooses for a program that is lowered: the operations of one mixture run by tiles where the weights of both GEMMs can.
    void compile(std::span<LoweredOperation> operations) const;

    void route(const LoweredOperation& op, std::int64_t n_tokens, const std::int32_t* slots) const;
    void gated(const LoweredOperation& op, std::int64_t n_tokens) const;
    void combine(const LoweredOperation& op, std::int64_t n_tokens) const;
    // "GEMV to 2, tiles"
    std::string explain(const LoweredOperation& op, int least, int most) const;

private:
    int tile(const LoweredOperation& op, std::int64_t n_tokens) const;

    cuda::Context&        gpu_;
    bool                  deterministic_;
    cuda::ExpertWorkspace work_;
};

// The operations as the kernels take them; `at` gives a value's address.
cuda::Route      lower_route(const Route& op, const DeviceWeights& weights, const std::function<void*(ValueId)>& at);
cuda::ExpertGemm lower_experts(const ExpertGatedGemm& op, const DeviceWeights& weights,
                               const std::function<void*(ValueId)>& at);
cuda::ExpertGemm lower_experts(const ExpertCombineGemm& op, const DeviceWeights& weights,
                               const std::function<void*(ValueId)>& at);

} // namespace quire

module :private;

namespace quire {

Result<void> ExpertDispatch::prepare(const StepLimits& l, DeviceMemory& memory) {
    if (l.n_experts == 0) return {};
    if (l.n_experts > cuda::most_experts || l.experts_used > cuda::most_experts_used)
        return fail_with(ErrorKind::input, "the GPU's kernels know ", cuda::most_experts, " experts of which ",
                         cuda::most_experts_used, " are used, not ", l.n_experts, " and ", l.experts_used);
    const auto T = std::size_t(std::max(l.max_tokens, 8)), n = std::size_t(l.n_experts),
               pairs = T * std::size_t(l.experts_used);
    const auto ints  = [&](std::size_t count) { return static_cast<std::int32_t*>(memory.take(count * 4)); };
    work_.scores     = static_cast<float*>(memory.take(T * n * 4));
    work_.arrivals   = ints(T + 1);
    work_.pairs      = ints(pairs);
    work_.tiles      = ints(1 + 3 * std::size_t(cuda::expert_tiles(std::int64_t(pairs), l.n_experts, 8)));
    work_.parts      = static_cast<cuda::Half*>(memory.take(pairs * std::size_t(l.hidden_size) * sizeof(cuda::Half)));
    if (!work_.scores || !work_.arrivals || !work_.pairs || !work_.tiles || !work_.parts)
        return fail_with(ErrorKind::system, "the GPU has no memory left for the experts of a step");
    return {};
}

void ExpertDispatch::compile(std::span<LoweredOperation> operations) const {
    LoweredOperation* route = nullptr; // of the mixture that is being looked at
    for (LoweredOperation& op : operations) {
        const cuda::ExpertGemm& e = op.experts;
        if (op.route.x != nullptr) route = &op, route->grouped = route->fp16_experts = route->wgmma_experts = true;
        if (e.x == nullptr || route == nullptr) continue;
        for (const cuda::Projection* p : {&e.gate, &e.up}) {
            const cuda::Weight &w = p->weight, &first = e.gate.weight;
            if (w.data == nullptr) continue;
            route->fp16_experts  = route->fp16_experts && w.form == cuda::WeightForm::f16;
            const int n_matrices = e.alternating ? 2 * e.n_experts : e.n_experts;
            route->grouped       = route->grouped && cuda::can_group(w, n_matrices) && w.form == first.form &&
                             w.group == first.group && w.float_scales == first.float_scales;
        }
        route->wgmma_experts = route->wgmma_experts && cuda::can_group_sm90(e, gpu_);
    }
    route = nullptr;
    for (LoweredOperation& op : operations) {
        if (op.route.x != nullptr) route = &op;
        if (route == nullptr) continue;
        op.route.in_order = deterministic_;
        op.grouped = route->grouped, op.fp16_experts = route->fp16_experts;
        op.wgmma_experts = op.experts.on_wgmma = route->grouped && route->wgmma_experts;
    }
}

int ExpertDispatch::tile(const LoweredOperation& op, std::int64_t n_tokens) const {
    const int n = op.route.x != nullptr ? op.route.n_experts : op.experts.n_experts,
              k = op.route.x != nullptr ? op.route.n_used : op.experts.n_used;
    if (!op.grouped) return 0;
    // A sum of a tile's kernel does not depend on the tile, but differs from that of a GEMV.
    const int wanted = cuda::expert_tile(n_tokens, n, k, op.fp16_experts, op.wgmma_experts);
    return deterministic_ ? std::max(wanted, 8) : wanted;
}

void ExpertDispatch::route(const LoweredOperation& op, std::int64_t n_tokens, const std::int32_t* slots) const {
    cuda::route(op.route, n_tokens, slots, tile(op, n_tokens), work_, gpu_);
}
void ExpertDispatch::gated(const LoweredOperation& op, std::int64_t n_tokens) const {
    cuda::expert_gated(op.experts, n_tokens, tile(op, n_tokens), work_, gpu_);
}
void ExpertDispatch::combine(const LoweredOperation& op, std::int64_t n_tokens) const {
    cuda::expert_combine(op.experts, n_tokens, tile(op, n_tokens), work_, gpu_);
}

std::string ExpertDispatch::explain(const LoweredOperation& op, int least, int most) const {
    if (op.experts.x == nullptr) return "router";
    if (tile(op, most) == 0) return "expert GEMV";
    int first = least; // the first step that runs in tiles
    while (tile(op, first) == 0) first++;
    return first > least ? cat("expert GEMV to ", first - 1, ", grouped GEMM") : std::string("grouped GEMM");
}

cuda::Projection lower(const Projection& p, const DeviceWeights& weights, const std::function<void*(ValueId)>& at) {
    if (!p.weight) return {};
    return {weights.of(p.weight), weights.vector(p.bias), at(p.out)};
}

cuda::Route lower_route(const Route& op, const DeviceWeights& weights, const std::function<void*(ValueId)>& at) {
    check(weights.of(op.weight).form == cuda::WeightForm::f32, "route: weights that are not float32");
    cuda::Route to;
    to.x           = static_cast<const cuda::Half*>(at(op.x));
    to.out         = static_cast<float*>(at(op.out));
    to.weight      = weights.vector(op.weight);
    to.bias        = weights.vector(op.bias);
    to.choice_bias = weights.vector(op.choice_bias);
    to.n_experts   = int(op.weight.rows);
    to.n_used      = op.n_used;
    to.cols        = int(op.weight.cols);
    to.gating      = cuda::Gating(int(op.gating));
    to.normalised  = op.normalised;
    to.scale       = op.scale;
    to.n_groups = op.n_groups, to.n_groups_used = op.n_groups_used;
    to.score_scale  = op.score_scale;
    to.expert_scale = weights.vector(op.expert_scale);
    to.best_alone   = op.best_alone;
    return to;
}

cuda::ExpertGemm lower_experts(const ExpertGatedGemm& op, const DeviceWeights& weights,
                               const std::function<void*(ValueId)>& at) {
    cuda::ExpertGemm to;
    to.x           = static_cast<const cuda::Half*>(at(op.x));
    to.routes      = static_cast<const float*>(at(op.routes));
    to.gate        = lower(op.gate, weights, at);
    to.up          = lower(op.up, weights, at);
    to.n_experts   = op.n_experts;
    to.n_used      = op.n_used;
    to.activation  = cuda::Activation(int(op.activation));
    to.alternating = op.alternating;
    to.weighs_x    = op.weighs_x;
    return to;
}

cuda::ExpertGemm lower_experts(const ExpertCombineGemm& op, const DeviceWeights& weights,
                               const std::function<void*(ValueId)>& at) {
    cuda::ExpertGemm to;
    to.x         = static_cast<const cuda::Half*>(at(op.x));
    to.routes    = static_cast<const float*>(at(op.routes));
    to.gate      = lower(op.down, weights, at);
    to.n_experts = op.n_experts;
    to.n_used    = op.n_used;
    to.scale     = op.scale;
    to.weighs_x  = !op.weighted;
    return to;
}

} // namespace quire
