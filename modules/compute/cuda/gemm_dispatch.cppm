// quire.compute.cuda.gemm_dispatch: which kernel runs a GEMM: GEMV, skinny GEMM, our prefill GEMM or cuBLASLt, by M and the form of
// the weights. Owns nothing; the workspace for dequantised weights is the backend's.
module;

#include "../../../cuda/kernels.h"

export module quire.compute.cuda.gemm_dispatch;

import quire.compute.cuda.fusion;
import quire.compute.cuda.weights;
import quire.core.base;

export namespace quire {

class GemmDispatch {
public:
    GemmDispatch(cuda::Context& gpu, bool deterministic)
        : gpu_(gpu), deterministic_(deterministic), library_error_(deterministic ? nullptr : cuda::open_cublaslt(gpu)),
          has_cublaslt_(!deterministic && library_error_ == nullptr) {}

    // Why cuBLASLt cannot be used; null: it can, or is not wanted.
    const char* library_error() const { return library_error_; }

    // A weight of GEMMs, in the order of the file; it stays where it is.
    void        add(cuda::Weight& weight);
    int         n_weights() const { return int(weights_.size()); }
    std::size_t workspace_bytes() const { return std::size_t(dequantized_size_) * sizeof(cuda::Half); }
    void        set_workspace(void* memory) { dequantized_ = static_cast<cuda::Half*>(memory); }

    // After the workspace: gives the weights but those of `vocab_size` rows their copies in e4m3, with which run_prefill() multiplies from then
    // on. False: there is no memory for it.
    bool make_fp8(int max_tokens, int vocab_size, DeviceMemory& memory);
    // Has the library's algorithms tried for the GEMMs that it will be asked for: those of each shape, and of neighbours of
    // one shape together. max_tokens, max_logit_rows: of a step; vocab_size: the rows of the output matrix.
    void tune(int max_tokens, int max_logit_rows, int vocab_size, bool has_layer_kernel);

    // op: a gemm or a gated_gemm.
    void run(const cuda::Operation& op);
    // A gemm. Whether its results lack their biases: those of the library's kernels do.
    bool run_without_biases(const cuda::Operation& op) { return gemm(op, false); }
    void run(const cuda::HeadGemm& op, std::int64_t n_tokens);
    // Two gemms of one x, a row of it.
    void run_joined(const cuda::Operation& a, const cuda::Operation& b);
    // Operations that the prefill GEMM matches: in e4m3 after make_fp8(), else their weights dequantised first. False: no room for these
    // weights.
    bool run_prefill(std::span<const cuda::Operation> ops, const cuda::Plan& plan);
    // Of run_prefill(): whether this GEMM is in e4m3; the room for its x; and its second half, when x stands there.
    static bool            in_fp8(const cuda::Operation& op);
    const cuda::Fp8Matrix& fp8_x() const { return fp8_x_; }
    void                   run_fp8(std::span<const cuda::Operation> ops, const cuda::Plan& plan);
    // "GEMV to 4, skinny GEMM to 7, cuBLASLt": the last M of each kernel, up to most.
    std::string explain(const cuda::Operation& op, int least, int most) const;

private:
    using Half = cuda::Half;
    struct Limits {
        int gemv, skinny, layer; // the last M of each
    };
    static bool is_fp16(const cuda::Weight& w) { return w.form == cuda::WeightForm::f16; }
    static bool is_quantised(const cuda::Weight& w) { return !is_fp16(w) && w.form != cuda::WeightForm::f32; }
    Limits      limits(std::span<const cuda::Projection> projections) const;
    bool        gemm(const cuda::Operation& op, bool biases = true);
    bool        by_layer_kernel(const cuda::Operation& op);
    void        gemv(const cuda::Operation& op, std::span<const cuda::Projection> projections, int max_m);
    bool        cublaslt(const cuda::Operation& op, std::span<const cuda::Projection> projections, bool biases);

    // The weight in fp16; a quantised one in the workspace.
    const Half* in_fp16(const cuda::Weight& weight) {
        if (is_fp16(weight)) return static_cast<const Half*>(weight.data);
        cuda::dequantize(weight, dequantized_, gpu_);
        return dequantized_;
    }

    cuda::Context&             gpu_;
    bool                       deterministic_;
    const char*                library_error_;
    bool                       has_cublaslt_;
    std::vector<cuda::Weight*> weights_;
    Half*                      dequantized_      = nullptr;
    std::int64_t               dequantized_size_ = 0; // elements: the largest quantised weight
    cuda::Fp8Matrix            fp8_x_{};              // room for the x of a step
};

} // namespace quire

module :private;

namespace quire {

void GemmDispatch::add(cuda::Weight& w) {
    if (is_quantised(w)) dequantized_size_ = std::max(dequantized_size_, w.rows * w.cols);
    if (cuda::is_regular(w)) weights_.push_back(&w);
}

bool GemmDispatch::make_fp8(int max_tokens, int vocab_size, DeviceMemory& memory) {
    const auto   take      = [&](std::int64_t bytes) { return memory.take(std::size_t(bytes)); };
    const auto   blocks    = [](std::int64_t n) { return (n + cuda::fp8_block - 1) / cuda::fp8_block; };
    std::int64_t most_cols = 0;
    for (cuda::Weight* const w : weights_) {
        if (w->rows == vocab_size || w->rows == 1 || !cuda::can_be_fp8(w->rows, w->cols)) continue;
        w->fp8.codes  = static_cast<std::uint8_t*>(take(w->rows * w->cols));
        w->fp8.scales = static_cast<float*>(take(blocks(w->rows) * blocks(w->cols) * 4));
        if (!w->fp8.codes || !w->fp8.scales) return false;
        cuda::weight_to_fp8(in_fp16(*w), w->rows, w->cols, w->fp8, gpu_);
        most_cols = std::max(most_cols, w->cols);
    }
    fp8_x_ = {static_cast<std::uint8_t*>(take(most_cols * max_tokens)), static_cast<float*>(take(max_tokens * 4))};
    return fp8_x_.codes && fp8_x_.scales;
}

void GemmDispatch::tune(int max_tokens, int max_logit_rows, int vocab_size, bool has_layer_kernel) {
    if (!has_cublaslt_) return;
    std::set<std::array<std::int64_t, 3>> done; // N, K, matrices
    const auto                            tune = [&](const cuda::Weight& w, int count, std::int64_t stride) {
        if (!done.insert({w.rows, w.cols, count}).second) return;
        const bool logits = w.rows == vocab_size;
        // Fewer rows, and many, have kernels of our own.
        cuda::Operation op;
        op.kind          = cuda::Operation::gemm;
        op.cols          = w.cols;
        op.projection[0] = {w};
        op.n_projections = 1;
        int min_m = 1, max_m = logits ? max_logit_rows : max_tokens;
        if (!logits && is_fp16(w) && has_layer_kernel) min_m = cuda::max_layer_kernel_rows + 1;
        if (!is_fp16(w) && cuda::can_skinny_gemm(gpu_, w)) min_m = cuda::max_skinny_rows + 1;
        if (cuda::can_layer_gemm(gpu_, w)) min_m = cuda::max_quantised_layer_rows + 1;
        if (!logits && cuda::match_prefill_gemm(&op, 1, gpu_) > 0) max_m = std::min(max_m, min_prefill_rows - 1);
        if (min_m > max_m) return;
        cuda::tune_cublaslt({w.rows, w.cols, logits, count, stride, 0}, in_fp16(w), min_m, max_m, gpu_);
    };
    const auto apart = [&](std::size_t i) { // of a matrix and the next, where they may go together; else 0
        if (i + 1 >= weights_.size()) return std::ptrdiff_t(0);
        const cuda::Weight &a = *weights_[i], &b = *weights_[i + 1];
        const bool          alike = is_fp16(a) && is_fp16(b) && a.rows == b.rows && a.cols == b.cols;
        return alike ? static_cast<const Half*>(b.data) - static_cast<const Half*>(a.data) : 0;
    };
    for (std::size_t i = 0; i < weights_.size(); i++) {
        tune(*weights_[i], 1, 0);
        if (apart(i) <= 0 || (i > 0 && apart(i - 1) == apart(i))) continue;
        tune(*weights_[i], apart(i + 1) == apart(i) ? 3 : 2, apart(i));
    }
}

void GemmDispatch::run(const cuda::Operation& op) {
    if (op.kind == cuda::Operation::gemm) {
        gemm(op);
        return;
    }
    const cuda::Projection &gate = op.projection[0], &up = op.projection[1];
    auto*                   out = static_cast<Half*>(gate.out);
    if (op.rows == 1 && !deterministic_ &&
        cuda::gemv_gated(static_cast<const Half*>(op.x), gate, up, op.activation, gpu_))
        return;
    if (by_layer_kernel(op)) return;
    gemm(op);
    cuda::activate(op.activation, out, static_cast<const Half*>(up.out), op.rows * gate.weight.rows, gpu_);
}

void GemmDispatch::run(const cuda::HeadGemm& op, std::int64_t n_tokens) {
    cuda::HeadGemm in_fp16 = op;
    // For few tokens reading quantised weights once is faster.
    if (!deterministic_ && n_tokens > cuda::max_gemv_rows && is_quantised(op.weight) &&
        op.weight.rows * op.weight.cols <= dequantized_size_) {
        cuda::dequantize(op.weight, dequantized_, gpu_);
        in_fp16.weight.data = dequantized_, in_fp16.weight.form = cuda::WeightForm::f16;
    }
    cuda::head_gemm(in_fp16, n_tokens, gpu_);
}

// Where weights have different forms, the small matrices come first: what follows the large ones can begin while they are read.
void GemmDispatch::run_joined(const cuda::Operation& a, const cuda::Operation& b) {
    const bool             small_first = a.projection[0].weight.rows < b.projection[0].weight.rows;
    const cuda::Operation &first = small_first ? a : b, &second = small_first ? b : a;
    std::array<cuda::Projection, std::size_t(2 * cuda::max_projections)> all;
    std::copy_n(second.projection, second.n_projections,
                std::copy_n(first.projection, first.n_projections, all.begin()));
    cuda::gemv(static_cast<const Half*>(a.x), 1, a.cols, all.data(), a.n_projections + b.n_projections, false, gpu_);
}

bool GemmDispatch::in_fp8(const cuda::Operation& op) {
    return std::ranges::all_of(std::span(op.projection).first(std::size_t(op.n_projections)),
                               [](const cuda::Projection& p) { return p.weight.fp8.codes != nullptr; });
}

void GemmDispatch::run_fp8(std::span<const cuda::Operation> ops, const cuda::Plan& plan) {
    const int ran = cuda::run_fp8_gemm(ops.data(), int(ops.size()), fp8_x_, plan, gpu_);
    check(ran == int(ops.size()), "an fp8 GEMM that ran other operations than it matched");
}

bool GemmDispatch::run_prefill(std::span<const cuda::Operation> ops, const cuda::Plan& plan) {
    if (const cuda::Operation& op = ops[0]; in_fp8(op)) {
        cuda::rows_to_fp8(static_cast<const Half*>(op.x), op.rows, op.cols, fp8_x_, gpu_);
        run_fp8(ops, plan);
        return true;
    }
    std::array<cuda::Operation, 2> in_fp16;
    check(ops.size() <= in_fp16.size(), "more operations than a prefill GEMM runs");
    std::ranges::copy(ops, in_fp16.begin());
    std::int64_t used = 0;
    for (cuda::Projection& p : std::span(in_fp16[0].projection).first(std::size_t(ops[0].n_projections))) {
        cuda::Weight& w = p.weight;
        if (is_fp16(w)) continue;
        if (used + w.rows * w.cols > dequantized_size_) return false;
        cuda::dequantize(w, dequantized_ + used, gpu_);
        w.data = dequantized_ + used, w.form = cuda::WeightForm::f16;
        used += w.rows * w.cols;
    }
    const int ran = cuda::run_prefill_gemm(in_fp16.data(), int(ops.size()), plan, gpu_);
    check(ran == int(ops.size()), "a prefill GEMM that ran other operations than it matched");
    return true;
}

GemmDispatch::Limits GemmDispatch::limits(std::span<const cuda::Projection> projections) const {
    if (deterministic_) return {cuda::max_gemv_rows, 0, 0};
    const bool skinny = std::ranges::all_of(
        projections, [&](const cuda::Projection& p) { return cuda::can_skinny_gemm(gpu_, p.weight); });
    const bool layer = std::ranges::all_of(
        projections, [&](const cuda::Projection& p) { return cuda::can_layer_gemm(gpu_, p.weight); });
    const bool cublaslt = has_cublaslt_ && is_fp16(projections[0].weight);
    return {skinny     ? 1
            : cublaslt ? 4
                       : cuda::max_gemv_rows,
            !skinny    ? 0
            : cublaslt ? 7 // the library is better from 8 on
                       : cuda::max_skinny_rows,
            layer ? cuda::max_quantised_layer_rows : 0};
}

std::string GemmDispatch::explain(const cuda::Operation& op, int least, int most) const {
    const std::span projections(op.projection, std::size_t(op.n_projections));
    if (!std::ranges::all_of(projections, [](const cuda::Projection& p) { return cuda::is_regular(p.weight); }))
        return "plain GEMM";
    const auto [gemv, skinny, layer] = limits(projections);
    std::string text;
    int         from = least;
    const auto  say  = [&](std::string_view kernel, int last) {
        if (last < from || from > most) return;
        text += cat(text.empty() ? "" : ", ", kernel, last < most ? cat(" to ", last) : std::string());
        from = last + 1;
    };
    say("GEMV", has_cublaslt_ || skinny > 0 ? gemv : most);
    if (layer > 0) say("layer kernel", layer);
    else say("skinny GEMM", skinny);
    say(has_cublaslt_ ? "cuBLASLt" : "GEMV", std::numeric_limits<int>::max());
    return text;
}

// Whether the layer kernel has run the operation. It unpacks quantised weights faster than the skinny GEMM, and reading them again for every
// 256 rows costs less than making fp16 of them in memory.
bool GemmDispatch::by_layer_kernel(const cuda::Operation& op) {
    const Limits most = limits(std::span(op.projection, std::size_t(op.n_projections)));
    return op.rows > 1 && op.rows <= most.layer && cuda::run_layer_kernel(&op, 1, int(op.rows), {}, gpu_) == 1;
}

bool GemmDispatch::gemm(const cuda::Operation& op, bool biases) {
    const auto*                             x = static_cast<const Half*>(op.x);
    const std::span<const cuda::Projection> projections(op.projection, std::size_t(op.n_projections));
    if (!std::ranges::all_of(projections, [](const cuda::Projection& p) { return cuda::is_regular(p.weight); })) {
        cuda::gemm_plain(x, op.rows, op.cols, op.projection, op.n_projections, gpu_);
        return false;
    }
    if (op.kind == cuda::Operation::gemm && by_layer_kernel(op)) return false;
    const Limits most = limits(projections);
    if (op.rows > most.gemv && op.rows <= most.skinny)
        cuda::skinny_gemm(x, int(op.rows), op.cols, op.projection, op.n_projections, gpu_);
    else if (op.rows <= most.gemv || !has_cublaslt_) gemv(op, projections, cuda::max_gemv_rows);
    else return cublaslt(op, projections, biases);
    return false;
}

// max_m rows at a time.
void GemmDispatch::gemv(const cuda::Operation& op, std::span<const cuda::Projection> projections, int max_m) {
    const auto* x = static_cast<const Half*>(op.x);
    for (std::int64_t row = 0; row < op.rows; row += max_m) {
        cuda::Projection some[cuda::max_projections];
        int              n = 0;
        for (cuda::Projection p : projections) {
            p.out     = static_cast<std::byte*>(p.out) + row * p.weight.rows * (p.out_is_float ? 4 : 2);
            some[n++] = p;
        }
        cuda::gemv(x + row * op.cols, int(std::min<std::int64_t>(max_m, op.rows - row)), op.cols, some, n,
                   deterministic_, gpu_);
    }
}

// Returns whether the biases are left to the caller: not if `biases`, nor if another kernel had to run one of the GEMMs.
bool GemmDispatch::cublaslt(const cuda::Operation& op, std::span<const cuda::Projection> projections, bool biases) {
    const auto*                             x = static_cast<const Half*>(op.x);
    std::array<bool, cuda::max_projections> lacks{}; // its bias
    for (std::size_t i = 0, count = 1; i < projections.size(); i += count) {
        const cuda::Projection& p = projections[i];
        // Neighbours of one shape, weights and results as far from one another, are one batched GEMM.
        std::int64_t weight_stride = 0, out_stride = 0;
        for (count = 1; is_fp16(p.weight) && i + count < projections.size(); count++) {
            const cuda::Projection &before = projections[i + count - 1], &next = projections[i + count];
            const std::int64_t      apart =
                static_cast<const Half*>(next.weight.data) - static_cast<const Half*>(before.weight.data);
            const std::int64_t out_apart = static_cast<const Half*>(next.out) - static_cast<const Half*>(before.out);
            if (!is_fp16(next.weight) || next.weight.rows != p.weight.rows || next.out_is_float || p.out_is_float ||
                apart <= 0 || out_apart <= 0 || (count > 1 && (apart != weight_stride || out_apart != out_stride)))
                break;
            weight_stride = apart;
            out_stride    = out_apart;
        }
        const Half* const                       values = in_fp16(p.weight);
        const std::span<const cuda::Projection> some   = projections.subspan(i, count);
        if (!cuda::cublaslt_gemm(
                x, op.rows, values,
                {p.weight.rows, p.weight.cols, p.out_is_float, int(count), weight_stride, out_stride, p.scale}, p.out,
                gpu_)) {
            gemv(op, some, cuda::max_gemv_rows);
            biases = true;
            continue;
        }
        std::fill_n(lacks.begin() + std::ptrdiff_t(i), count, true);
    }
    if (!biases) return true;
    for (std::size_t i = 0; i < projections.size(); i++)
        if (const cuda::Projection& p = projections[i]; lacks[i] && p.bias)
            cuda::add_bias(p.out, p.out_is_float, p.bias, p.scale, op.rows, p.weight.rows, gpu_);
    return false;
}

} // namespace quire
