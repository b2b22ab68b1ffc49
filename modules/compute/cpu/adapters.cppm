// quire.compute.cpu.adapters: what LoRA adapters add to the result of a GEMM, for the rows of the sequences that run with them. Each row is
// computed by itself, so its bits do not depend on the other rows of the step. **Owns** the memory of the rows at hand.
export module quire.compute.cpu.adapters;

import quire.compute.cpu.gemms;
import quire.compute.cpu.weights;
import quire.core.base;
import quire.model_file.quants;

export namespace quire {

class CpuAdapters {
public:
    CpuAdapters(Workers& workers, const CpuWeights& weights, Gemms& gemms)
        : workers_(workers), weights_(weights), gemms_(gemms) {}

    // The plan stays as it is until the step is done.
    void begin_step(const StepPlan& plan);
    // `x`: empty for the embedding. `logit_rows`: `out` has a row for each logit row of the step, else for each token.
    void run(const LoraAdd& op, const Tensor& x, const Tensor& out, bool logit_rows);

private:
    // The rows of a step that run with one adapter.
    struct Rows {
        std::vector<std::int64_t> at; // ascending
        std::vector<float>        scales;
    };
    using Factors = std::span<const float>;
    void         add_rows(const LoraPair& pair, const Tensor& x, const Tensor& out, std::span<const std::int64_t> rows,
                          Factors scales);
    const float* gather(const Tensor& x, std::span<const std::int64_t> rows);

    Workers&           workers_;
    const CpuWeights&  weights_;
    Gemms&             gemms_;
    const StepPlan*    plan_ = nullptr;
    std::vector<Rows>  tokens_, logits_; // by adapter
    std::vector<float> gathered_, low_, high_;
};

} // namespace quire

module :private;

namespace quire {

void CpuAdapters::begin_step(const StepPlan& plan) {
    plan_ = &plan;
    for (auto* all : {&tokens_, &logits_})
        for (Rows& rows : *all) rows.at.clear(), rows.scales.clear();
    if (plan.adapters.empty()) return;
    const auto add = [&](std::vector<Rows>& all, std::size_t sequence, std::int64_t row) {
        for (auto u = std::size_t(plan.adapter_start[sequence]); u < std::size_t(plan.adapter_start[sequence + 1]);
             u++) {
            const AdapterUse& use = plan.adapters[u];
            if (all.size() <= std::size_t(use.adapter)) all.resize(std::size_t(use.adapter) + 1);
            all[std::size_t(use.adapter)].at.push_back(row);
            all[std::size_t(use.adapter)].scales.push_back(use.scale);
        }
    };
    std::size_t logit = 0;
    for (std::size_t s = 0; s < std::size_t(plan.n_seqs()); s++)
        for (std::int32_t t = plan.token_start[s]; t < plan.token_start[s + 1]; t++) {
            add(tokens_, s, t);
            if (logit < plan.logit_rows.size() && plan.logit_rows[logit] == t) add(logits_, s, std::int64_t(logit++));
        }
}

void CpuAdapters::run(const LoraAdd& op, const Tensor& x, const Tensor& out, bool logit_rows) {
    for (const LoraPair& pair : op.pairs) {
        const std::vector<Rows>& all = logit_rows ? logits_ : tokens_;
        if (std::size_t(pair.adapter) >= all.size()) continue;
        const Rows& rows = all[std::size_t(pair.adapter)];
        // A part of the rows at a time, so that their memory stays small.
        const auto at_once = std::size_t(std::clamp<std::int64_t>((1 << 20) / (x.cols + out.cols), 1, 256));
        for (std::size_t first = 0; first < rows.at.size(); first += at_once) {
            const std::size_t n = std::min(at_once, rows.at.size() - first);
            add_rows(pair, x, out, std::span(rows.at).subspan(first, n), Factors(rows.scales).subspan(first, n));
        }
    }
}

// The rows one after the other: where they stand if they do so there.
const float* CpuAdapters::gather(const Tensor& x, std::span<const std::int64_t> rows) {
    if (rows.back() - rows.front() + 1 == std::int64_t(rows.size())) return floats(x) + rows.front() * x.cols;
    float* const to = grown(gathered_, rows.size() * std::size_t(x.cols));
    for (std::size_t i = 0; i < rows.size(); i++)
        std::memcpy(to + i * std::size_t(x.cols), floats(x) + rows[i] * x.cols, std::size_t(x.cols) * sizeof(float));
    return to;
}

void CpuAdapters::add_rows(const LoraPair& pair, const Tensor& x, const Tensor& out, std::span<const std::int64_t> rows,
                           Factors scales) {
    const auto   n = std::int64_t(rows.size());
    const Tensor low{grown(low_, std::size_t(n * pair.b.cols)), n, pair.b.cols, DType::F32};
    const Tensor high{grown(high_, std::size_t(n * out.cols)), n, out.cols, DType::F32};
    check(pair.b.rows == out.cols, "lora_add: shapes");
    if (x.data) {
        const Tensor from{const_cast<float*>(gather(x, rows)), n, x.cols, DType::F32};
        gemms_.run(from, std::array{GemmOutput{weights_.for_gemm(pair.a), nullptr, low}});
    } else {
        const TensorView& table = weights_.rows(pair.a);
        for (std::int64_t i = 0; i < n; i++) {
            const std::int64_t token = plan_->tokens[std::size_t(rows[std::size_t(i)])];
            check(token >= 0 && token < table.rows, "a token outside the vocabulary of an adapter");
            dequantize(
                table.type,
                static_cast<const std::byte*>(table.data) + std::size_t(token) * row_bytes(table.type, table.cols),
                floats(low) + i * low.cols, low.cols);
        }
    }
    gemms_.run(low, std::array{GemmOutput{weights_.for_gemm(pair.b), nullptr, high}});
    workers_.split(n, std::max<std::int64_t>(1, 16384 / out.cols), [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t i = first; i < last; i++) {
            const float        factor = scales[std::size_t(i)] * pair.scale;
            const float* const from   = floats(high) + i * out.cols;
            float* const       to     = floats(out) + rows[std::size_t(i)] * out.cols;
            for (std::int64_t c = 0; c < out.cols; c++) to[c] += factor * from[c];
        }
    });
}

} // namespace quire
