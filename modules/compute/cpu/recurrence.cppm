// quire.compute.cpu.recurrence: how the threads share the convolutions and recurrences of layers that keep a state: by sequences, heads and
// columns, never by tokens. **Owns** the decays of the current operation.
export module quire.compute.cpu.recurrence;

import quire.compute.cpu.kernel_table;
import quire.compute.cpu.workers;
import quire.core.base;

export namespace quire {

class CpuRecurrence {
public:
    CpuRecurrence(const CpuKernels& kernels, Workers& workers) : kernels_(kernels), workers_(workers) {}

    // The plan outlives the step's calls of run().
    void begin_step(const StepPlan& plan) { plan_ = &plan; }
    // A tensor that the operation does not have is without data. weight, bias: of CausalConv, or null.
    void run(const CausalConv& op, const float* weight, const float* bias, const Tensor& x, const Tensor& factor,
             const Tensor& gate, const Tensor& out, const StateLayer& layer);
    // Vectors [heads]; skip: or null. Norms q and k in x.
    struct Heads {
        const float *step_bias, *decay, *skip;
    };
    void run(const Recurrence& op, const Heads& heads, const Tensor& x, const Tensor& step, const Tensor& write,
             const Tensor& out, const StateLayer& layer);

private:
    // The tokens of a sequence in this step, and its state units before and after them.
    struct Run {
        std::int64_t   first, n;
        const BlockId *from, *to; // null: zeros
    };
    Run  run_of(int sequence, const StateLayer& layer) const;
    void prepare_token(const Recurrence& op, const Heads& heads, std::int64_t t, const Tensor& x, const Tensor& step,
                       const Tensor& write);

    const CpuKernels&  kernels_;
    Workers&           workers_;
    const StepPlan*    plan_ = nullptr;
    std::vector<float> decays_, writes_; // [heads][tokens]
    std::vector<float> q_scale_, k_scale_;
};

} // namespace quire

module :private;

namespace quire {

// A part of a state, some rows of equal length and distance, in pieces that lie in one block each: body(piece, row, column, n).
template <class Body>
void each_piece(const StateLayer& layer, const BlockId* blocks, std::int64_t first, std::int64_t rows,
                std::int64_t row_stride, std::int64_t columns, const Body& body) {
    const std::size_t B = layer.block_bytes / sizeof(float), start = layer.offset / sizeof(float) + std::size_t(first);
    std::size_t       block = start / B, at = start % B;
    for (std::int64_t row = 0; row < rows; row++) {
        std::size_t b = block, in = at;
        for (std::int64_t column = 0; column < columns;) {
            const auto n = std::min(columns - column, std::int64_t(B - in));
            body(reinterpret_cast<float*>(layer.memory + std::size_t(blocks[b]) * layer.block_bytes) + in, row, column,
                 n);
            column += n;
            b++, in = 0;
        }
        for (at += std::size_t(row_stride); at >= B; at -= B) block++;
    }
}

// Copies a part of a state to or from rows of `to_stride` floats; no state unit means zeros.
void load_state(const StateLayer& layer, const BlockId* blocks, std::int64_t first, std::int64_t rows,
                std::int64_t row_stride, std::int64_t columns, float* to, std::int64_t to_stride) {
    if (blocks == nullptr) {
        std::fill_n(to, rows * to_stride, 0.0f);
        return;
    }
    each_piece(layer, blocks, first, rows, row_stride, columns,
               [&](const float* piece, std::int64_t row, std::int64_t column, std::int64_t n) {
                   std::copy_n(piece, n, to + row * to_stride + column);
               });
    if (columns < to_stride)
        for (std::int64_t row = 0; row < rows; row++)
            std::fill_n(to + row * to_stride + columns, to_stride - columns, 0.0f);
}

void store_state(const StateLayer& layer, const BlockId* blocks, std::int64_t first, std::int64_t rows,
                 std::int64_t row_stride, std::int64_t columns, const float* from, std::int64_t from_stride) {
    each_piece(layer, blocks, first, rows, row_stride, columns,
               [&](float* piece, std::int64_t row, std::int64_t column, std::int64_t n) {
                   std::copy_n(from + row * from_stride + column, n, piece);
               });
}

CpuRecurrence::Run CpuRecurrence::run_of(int sequence, const StateLayer& layer) const {
    const GroupPlan&  group  = plan_->groups[std::size_t(layer.group)];
    const auto        s      = std::size_t(sequence);
    const std::size_t blocks = group.state_to.size() / std::size_t(plan_->n_seqs());
    const BlockId*    from   = group.state_from.data() + s * blocks;
    return {plan_->token_start[s], plan_->token_start[s + 1] - plan_->token_start[s], *from < 0 ? nullptr : from,
            group.state_to.data() + s * blocks};
}

void CpuRecurrence::run(const CausalConv& op, const float* weight, const float* bias, const Tensor& x,
                        const Tensor& factor, const Tensor& gate, const Tensor& out, const StateLayer& layer) {
    const std::int64_t taps = op.weight.cols, channels = x.cols, pieces = (channels + conv_columns - 1) / conv_columns;
    check(taps <= max_taps && op.weight.rows == channels, "causal_conv: shapes");
    const auto one = [&](int item) {
        const Run          run   = run_of(int(item / pieces), layer);
        const std::int64_t first = item % pieces * conv_columns, at = run.first * channels + first;
        std::array<float, std::size_t(max_taps * conv_columns)> past;
        ConvTask                                                task;
        task.x        = floats(x) + at;
        task.factor   = factor.data ? floats(factor) + at : nullptr;
        task.gate     = gate.data ? floats(gate) + at : nullptr;
        task.out      = floats(out) + at;
        task.stride   = channels;
        task.weight   = weight + first * taps;
        task.bias     = bias ? bias + first : nullptr;
        task.past     = past.data();
        task.n_tokens = int(run.n);
        task.taps     = int(taps);
        task.columns  = int(std::min<std::int64_t>(conv_columns, channels - first));
        load_state(layer, run.from, first, taps - 1, channels, task.columns, task.past, conv_columns);
        kernels_.convolve(task);
        store_state(layer, run.to, first, taps - 1, channels, task.columns, task.past, conv_columns);
    };
    const auto items = int(plan_->n_seqs() * pieces);
    if (x.rows * channels * taps < worth_threads)
        for (int item = 0; item < items; item++) one(item);
    else workers_.run(items, [&](int item, int) { one(item); });
}

// log(1 + exp(x))
static float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

// The decays and what is written of each head; the norms of q and k.
void CpuRecurrence::prepare_token(const Recurrence& op, const Heads& heads, std::int64_t t, const Tensor& x,
                                  const Tensor& step, const Tensor& write) {
    const std::int64_t H = op.n_heads, of_group = H / op.n_groups;
    const float*       steps  = floats(step) + t * step.cols;
    const float*       writes = write.data ? floats(write) + t * write.cols : steps;
    for (std::int64_t h = 0; h < H; h++) {
        const bool         both = op.delta && op.grouped; // of each group first what is written, then the steps
        const std::int64_t at   = both ? h / of_group * 2 * of_group + h % of_group : h;
        const float        size = softplus(steps[both ? at + of_group : at] + heads.step_bias[h]);
        decays_[std::size_t(h * x.rows + t)] = std::exp(heads.decay[h] * size);
        writes_[std::size_t(h * x.rows + t)] = op.delta ? 1 / (1 + std::exp(-writes[at])) : size;
    }
    if (!op.delta) return;
    constexpr float eps = 1e-6f;
    for (int part = 0; part < 2 * op.n_groups; part++) {
        float* const at = floats(x) + t * x.cols + std::int64_t(part) * op.key_dim;
        kernels_.norm(at, nullptr, (part < op.n_groups ? q_scale_ : k_scale_).data(), eps / float(op.key_dim), at,
                      op.key_dim);
    }
}

void CpuRecurrence::run(const Recurrence& op, const Heads& heads, const Tensor& x, const Tensor& step,
                        const Tensor& write, const Tensor& out, const StateLayer& layer) {
    const std::int64_t H = op.n_heads, N = op.key_dim, d = op.value_dim, keys = op.n_groups * N,
                       tiles = (d + recurrence_columns - 1) / recurrence_columns;
    check(x.cols == 2 * keys + H * d && out.cols == H * d, "recurrence: shapes");
    decays_.resize(std::size_t(H * x.rows));
    writes_.resize(std::size_t(H * x.rows));
    if (op.delta) { // a norm divides by the root of the mean of the squares, not of their sum
        q_scale_.assign(std::size_t(N), 1 / float(N));
        k_scale_.assign(std::size_t(N), 1 / std::sqrt(float(N)));
    }
    const bool alone = x.rows * H * N * d < worth_threads;
    workers_.split(x.rows, alone ? x.rows : 8, [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t t = first; t < last; t++) prepare_token(op, heads, t, x, step, write);
    });
    const auto one = [&](int item, int thread) {
        const Run          run = run_of(int(item / (H * tiles)), layer);
        const std::int64_t h = item / tiles % H, first = item % tiles * recurrence_columns,
                           group = op.grouped ? h / (H / op.n_groups) : h % op.n_groups;
        const float* const row   = floats(x) + run.first * x.cols;
        RecurrenceTask     task;
        // q, k, v or v, k, q
        task.q                = row + (op.delta ? 0 : H * d + keys) + group * N;
        task.k                = row + (op.delta ? keys : H * d) + group * N;
        task.v                = row + (op.delta ? 2 * keys : 0) + h * d + first;
        task.stride           = x.cols;
        task.decay            = decays_.data() + h * x.rows + run.first;
        task.write            = writes_.data() + h * x.rows + run.first;
        task.out              = floats(out) + run.first * out.cols + h * d + first;
        task.out_stride       = out.cols;
        task.state            = workers_.scratch(thread, std::size_t(N * recurrence_columns));
        task.skip             = heads.skip ? heads.skip[h] : 0;
        task.n_tokens         = int(run.n);
        task.key_dim          = int(N);
        task.columns          = int(std::min<std::int64_t>(recurrence_columns, d - first));
        task.delta            = op.delta;
        const std::int64_t at = op.state_at + h * N * d + first;
        load_state(layer, run.from, at, N, d, task.columns, task.state, recurrence_columns);
        kernels_.recur(task);
        store_state(layer, run.to, at, N, d, task.columns, task.state, recurrence_columns);
    };
    const auto items = int(plan_->n_seqs() * H * tiles);
    if (alone)
        for (int item = 0; item < items; item++) one(item, 0);
    else workers_.run(items, one);
}

} // namespace quire
