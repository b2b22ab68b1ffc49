// quire.compute.cpu.stacked_gemms: GEMMs with stacks of matrices: those of the experts, each with the rows that chose it, and those of latent
// attention's heads. **Owns** the order of a step's rows by expert, and the memory of gathered rows.
export module quire.compute.cpu.stacked_gemms;

import quire.compute.cpu.gemms;
import quire.compute.cpu.weights;
import quire.compute.routing;
import quire.core.base;

export namespace quire {

// The operations of quire.compute.program, with their values in this step.
class StackedGemms {
public:
    StackedGemms(Workers& workers, const CpuWeights& weights, Gemms& gemms)
        : workers_(workers), weights_(weights), gemms_(gemms) {}

    void heads(const HeadGemm& op, const Tensor& x, const Tensor& out);
    void route(const Route& op, const Tensor& x, const Tensor& out);
    // combine() takes the rows in the order in which gated() has left them.
    void gated(const ExpertGatedGemm& op, const Tensor& x, const Tensor& routes, const Tensor& gate, const Tensor& up);
    void combine(const ExpertCombineGemm& op, const Tensor& x, const Tensor& routes, const Tensor& out);

private:
    void group_by_expert(const Tensor& routes, int n_experts, int n_used);
    // A matrix of each expert: of its `of_expert` neighbours in the stack the one at `place`.
    struct ExpertOutput {
        const Projection* stack;
        float*            out;
        int               place = 0, of_expert = 1;
    };
    // out [rows × width] = x [rows × cols] · the expert's matrix of each stack, for the rows of every expert.
    void run_experts(int n_experts, float* x, std::int64_t cols, std::initializer_list<ExpertOutput> outputs,
                     std::int64_t width);

    Workers&               workers_;
    const CpuWeights&      weights_;
    Gemms&                 gemms_;
    std::vector<GemmGroup> groups_;
    // The rows of a step in the order of the experts that they chose: where the rows of each expert begin; the row of each (token, slot).
    std::vector<std::int32_t> expert_begin_, slot_row_;
    std::vector<float>        scores_, gathered_, outputs_;
};

} // namespace quire

module :private;

namespace quire {

void StackedGemms::heads(const HeadGemm& op, const Tensor& x, const Tensor& out) {
    const std::int64_t n = op.n_heads, T = x.rows, in = op.weight.cols, rows = op.weight.rows / n, x_dim = x.cols / n,
                       out_dim = out.cols / n;
    check(out_dim - rows == x_dim - in, "head_gemm: shapes");
    float* inputs  = grown(gathered_, std::size_t(T * n * in));
    float* outputs = grown(outputs_, std::size_t(T * n * rows));
    groups_.resize(std::size_t(n));
    workers_.split(n, 1, [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t h = first; h < last; h++)
            for (std::int64_t t = 0; t < T; t++)
                std::memcpy(inputs + (h * T + t) * in, floats(x) + t * x.cols + h * x_dim,
                            std::size_t(in) * sizeof(float));
    });
    for (std::int64_t h = 0; h < n; h++) {
        GemmGroup& g = groups_[std::size_t(h)];
        g.x          = {inputs + h * T * in, T, in, DType::F32};
        g.outputs[0] = {weights_.for_gemm(op.weight, n, h), nullptr, {outputs + h * T * rows, T, rows, DType::F32}};
        g.n_outputs  = 1;
    }
    gemms_.run(groups_);
    workers_.split(n, 1, [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t h = first; h < last; h++)
            for (std::int64_t t = 0; t < T; t++) {
                float* to = floats(out) + t * out.cols + h * out_dim;
                std::memcpy(to, outputs + (h * T + t) * rows, std::size_t(rows) * sizeof(float));
                std::memcpy(to + rows, floats(x) + t * x.cols + h * x_dim + in,
                            std::size_t(x_dim - in) * sizeof(float));
            }
    });
}

void StackedGemms::route(const Route& op, const Tensor& x, const Tensor& out) {
    const std::int64_t n = op.weight.rows, k = op.n_used;
    const Tensor       scores{grown(scores_, std::size_t(x.rows * n)), x.rows, n, DType::F32};
    check(op.score_scale == 1 || !op.bias, "route: scaled scores have no bias");
    gemms_.run(x, std::array{gemms_.output({op.weight, op.bias, none}, scores)});
    if (op.score_scale != 1) gemms_.multiply(scores, op.score_scale);
    workers_.split(x.rows, 16, [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t t = first; t < last; t++)
            quire::route(op, weights_.vector(op.choice_bias), floats(scores) + t * n,
                         reinterpret_cast<std::int32_t*>(floats(out) + t * 2 * k), floats(out) + t * 2 * k + k,
                         weights_.vector(op.expert_scale));
    });
}

// The rows of a step in the order of the experts that they chose, those of one expert in their own order.
void StackedGemms::group_by_expert(const Tensor& routes, int n_experts, int n_used) {
    const std::int64_t n    = routes.rows * n_used;
    const auto         each = [&](auto&& body) { // (token, slot) by (token, slot)
        for (std::int64_t i = 0; i < n; i++)
            body(i, reinterpret_cast<const std::int32_t*>(floats(routes) + i / n_used * 2 * n_used)[i % n_used]);
    };
    expert_begin_.assign(std::size_t(n_experts) + 1, 0);
    slot_row_.resize(std::size_t(n));
    each([&](std::int64_t, std::int32_t expert) { expert_begin_[std::size_t(expert) + 1]++; });
    for (std::size_t e = 0; e < std::size_t(n_experts); e++) expert_begin_[e + 1] += expert_begin_[e];
    each(
        [&](std::int64_t i, std::int32_t expert) { slot_row_[std::size_t(i)] = expert_begin_[std::size_t(expert)]++; });
    for (auto e = std::size_t(n_experts); e > 0; e--)
        expert_begin_[e] = expert_begin_[e - 1]; // the loop moved each to the next
    expert_begin_[0] = 0;
}

void StackedGemms::run_experts(int n_experts, float* x, std::int64_t cols, std::initializer_list<ExpertOutput> outputs,
                               std::int64_t width) {
    groups_.clear();
    for (int e = 0; e < n_experts; e++) {
        const std::int64_t first = expert_begin_[std::size_t(e)], n = expert_begin_[std::size_t(e) + 1] - first;
        if (n == 0) continue;
        GemmGroup& g = groups_.emplace_back();
        g.x          = {x + first * cols, n, cols, DType::F32};
        for (const auto& [stack, out, place, of_expert] : outputs) {
            const float* biases      = weights_.vector(stack->bias);
            g.outputs[g.n_outputs++] = {weights_.for_gemm(stack->weight, n_experts * of_expert, e * of_expert + place),
                                        biases ? biases + e * stack->bias.cols : nullptr,
                                        {out + first * width, n, width, DType::F32}};
        }
    }
    gemms_.run(groups_);
}

void StackedGemms::gated(const ExpertGatedGemm& op, const Tensor& x, const Tensor& routes, const Tensor& gate,
                         const Tensor& up) {
    const int          of_expert = op.alternating ? 2 : 1;
    const std::int64_t hidden = x.cols, ff = op.gate.weight.rows / (op.n_experts * of_expert), k = op.n_used;
    check(!op.alternating || (!op.gate.bias && !op.up.bias), "expert_gated: an alternating stack has no biases");
    group_by_expert(routes, op.n_experts, op.n_used);
    const std::int64_t rows   = x.rows * k;
    float*             inputs = grown(gathered_, std::size_t(rows * hidden));
    workers_.split(rows, 16, [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t i = first; i < last; i++) { // (token, slot) by (token, slot)
            const float* from   = floats(x) + i / k * hidden;
            float*       to     = inputs + slot_row_[std::size_t(i)] * hidden;
            const float  weight = floats(routes)[i / k * 2 * k + k + i % k];
            if (op.weighs_x)
                for (std::int64_t c = 0; c < hidden; c++) to[c] = weight * from[c];
            else std::memcpy(to, from, std::size_t(hidden) * sizeof(float));
        }
    });
    const ExpertOutput stack{&op.gate, floats(gate), 0, of_expert}, other{&op.up, floats(up), of_expert - 1, of_expert};
    const bool         two = bool(op.up.weight);
    if (two) run_experts(op.n_experts, inputs, hidden, {stack, other}, ff);
    else run_experts(op.n_experts, inputs, hidden, {stack}, ff);
    gemms_.activate(op.activation, {gate.data, rows, ff, DType::F32}, two ? floats(up) : nullptr);
}

void StackedGemms::combine(const ExpertCombineGemm& op, const Tensor& x, const Tensor& routes, const Tensor& out) {
    const std::int64_t hidden = out.cols, ff = op.down.weight.cols, k = op.n_used;
    float*             parts = grown(outputs_, std::size_t(out.rows * k * hidden));
    run_experts(op.n_experts, floats(x), ff, {{.stack = &op.down, .out = parts}}, hidden);
    workers_.split(out.rows, std::max<std::int64_t>(1, 8192 / (hidden * k)),
                   [&](std::int64_t first, std::int64_t last) {
                       for (std::int64_t t = first; t < last; t++) {
                           const float* weights = floats(routes) + t * 2 * k + k;
                           float*       to      = floats(out) + t * hidden;
                           for (std::int64_t s = 0; s < k; s++) {
                               const float* part   = parts + slot_row_[std::size_t(t * k + s)] * hidden;
                               const float  weight = op.weighted ? weights[s] : 1.0f;
                               for (std::int64_t i = 0; i < hidden; i++) {
                                   const float term = weight * part[i];
                                   to[i]            = s == 0 ? term : to[i] + term;
                               }
                           }
                       }
                   });
    if (op.scale != 1) gemms_.multiply(out, op.scale);
}

} // namespace quire
