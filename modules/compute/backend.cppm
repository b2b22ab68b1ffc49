// quire.compute.backend: the interface to a compute device: memory, copies, and the dozen operations of a transformer.
// The model uses only this interface; the engine chooses the device behind it once.
export module quire.compute.backend;

import quire.core.base;
import quire.paging.block;
import quire.schedule.request;
import quire.schedule.step_plan;
import quire.core.std;
import quire.core.tensor;

export namespace quire {

// Device memory, zeroed, aligned to 64 bytes, freed with its owner. On a CPU it can be read directly.
class Buffer {
public:
    using Free = void (*)(void*, std::size_t);
    Buffer()   = default;
    Buffer(void* data, std::size_t bytes, Free free) : data_(data), bytes_(bytes), free_(free) {}
    Buffer(Buffer&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)), free_(other.free_) {}
    Buffer& operator=(Buffer&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        std::swap(free_, other.free_);
        return *this;
    }
    ~Buffer() {
        if (data_) free_(data_, bytes_);
    }
    void*       data() const { return data_; }
    std::size_t bytes() const { return bytes_; }

private:
    void*       data_  = nullptr;
    std::size_t bytes_ = 0;
    Free        free_  = nullptr;
};

// Activations: a row-major matrix in device memory, one row per token.
struct Tensor {
    void*        data = nullptr;
    std::int64_t rows = 0;
    std::int64_t cols = 0;
    DType        type = DType::F32; // F32, or the backend's activation type
};

// One of several matrices that are multiplied with the same input.
struct Projection {
    const TensorView* weight = nullptr; // [out × in]
    const TensorView* bias   = nullptr; // [out], or null or empty
    Tensor            out;              // [n × out]
};

// The paged K and V of one layer. Both arrays: [block][kv_head][offset in block][head_dim], so that the part of a
// block that one head reads is contiguous.
struct KvLayer {
    void* k        = nullptr;
    void* v        = nullptr;
    DType type     = DType::F16; // or F32
    int   n_blocks = 0, block_size = 0, n_kv_heads = 0, head_dim = 0;
    bool  on_host = false; // the swap pool

    std::size_t block_bytes() const {
        return std::size_t(n_kv_heads) * std::size_t(block_size) * row_bytes(type, head_dim);
    }
};

// RoPE: pair i of a head is rotated by position * inv_freq[i]; cosine and sine are multiplied by `scale`.
struct Rope {
    std::span<const float> inv_freq; // [rope_dim / 2]; dimensions from rope_dim on are left alone
    float                  scale  = 1;
    bool                   halves = false; // pairs (i, i + rope_dim/2); else (2i, 2i + 1)
};

struct AttentionParams {
    int   n_heads = 0;
    float scale   = 1; // of q·k, before the soft cap
    int   window  = 0; // position i sees i-window+1 .. i; 0: all before it
};

enum class Activation : std::uint8_t { silu, gelu_tanh };

// Upper bounds of an engine's steps; memory for them is allocated once.
struct StepLimits {
    int max_tokens = 0, max_logit_rows = 0, max_sequences = 0, max_blocks_per_sequence = 0, context = 0;
    int n_layers = 0, n_heads = 0, n_kv_heads = 0, head_dim = 0, vocab_size = 0, window = 0;
};

// Rows of a step's tensors: the plan's, or more if the device rounds the number up. The contents of additional rows do not
// affect the others.
struct StepShape {
    int tokens = 0, logit_rows = 0;
};

// One step is: begin_step(plan), then, unless replay_step() did it all, the operations and end_step(), then sample() and
// results(). The tokens, positions, slots, block tables and lengths that the operations speak of are the plan's; a device
// backend sends them up once, in begin_step(). All of it may return before it is done; results() is the one wait, and comes
// before the next begin_step() or copy_blocks().
// T: tokens of the plan. `out` never overlaps an input unless said. Shapes are the caller's duty (checked).
class Backend {
public:
    virtual ~Backend() = default;

    virtual std::string describe() const = 0; // one line for a person: device, instruction set, threads

    // -- memory
    virtual Result<Buffer> allocate(std::size_t bytes) = 0;
    // Host memory that the device can copy to and from at full speed (pinned).
    virtual Result<Buffer> allocate_host(std::size_t bytes) = 0;
    // Bytes that can still be allocated.
    virtual std::size_t memory_available() const = 0;
    // The part of these that KV blocks may use by default; asked after the weights are loaded.
    virtual std::size_t memory_for_cache() const = 0;
    // Bytes allocated so far: weights that are not used directly from the file, buffers, workspaces.
    virtual std::size_t memory_taken() const = 0;
    // What is handed from one operation to the next; the residual and the logits are always float32.
    virtual DType activation_type() const = 0;
    // A weight of the file, made ready for matmul(), embed() or norm(). The view it came from stays valid.
    virtual Result<TensorView> prepare(const TensorView& weight) = 0;
    // The same for one that embed() alone reads, a row at a time.
    virtual Result<TensorView> prepare_lookup(const TensorView& weight) { return prepare(weight); }
    // After the last prepare(): gives back what only that needed.
    virtual void end_weights() {}
    // Before the first step, after the weights.
    virtual Result<void> prepare_steps(const StepLimits& limits) = 0;
    // Rows of float32 in memory that the host can read, valid until the next operation.
    virtual std::span<const float> to_host(const Tensor& tensor) = 0;

    // -- the operations
    virtual StepShape begin_step(const StepPlan& plan) = 0;
    // Runs the whole step as it was recorded for this shape. False: the caller has to call the operations.
    virtual bool replay_step() { return false; }
    virtual void end_step() {}
    // out[t] = row tokens[t] of weight [vocab × hidden] (+ row positions[t] of `positions`, if any); out [T × hidden] float32
    virtual void embed(const TensorView& weight, const TensorView& positions, Tensor out) = 0;
    // RMSNorm of each row of x, times weight [cols]; with a bias LayerNorm: the mean is taken out, the bias added.
    // With `residual` (float32): residual += x first, and the norm is that of the sum. out may be x. A row may be one
    // head: x [T·heads × head_dim].
    virtual void norm(Tensor x, const TensorView& weight, const TensorView& bias, float eps, Tensor* residual,
                      Tensor out) = 0;
    // out = x · weightᵀ (+ bias) for each projection, x [n × in]
    virtual void matmul(Tensor x, std::span<const Projection> projections) = 0;
    // Applies RoPE to q [T × heads·head_dim] in place, and stores k [T × kv_heads·head_dim], with RoPE, and v in the cache at
    // the plan's slots.
    virtual void rope_and_store(Tensor q, Tensor k, Tensor v, const Rope& rope, const KvLayer& cache) = 0;
    // out [T × heads·head_dim]: each query over its sequence's cached positions up to its own. Prefill and decode alike.
    virtual void attention(Tensor q, const KvLayer& cache, const AttentionParams& params, Tensor out) = 0;
    // x = activation(x) (* up, element by element, if there is one)
    virtual void activate(Activation activation, Tensor x, const Tensor* up) = 0;
    // gate.out = silu(x · gateᵀ) · (x · upᵀ); what is in up.out afterwards does not matter. No biases.
    virtual void gated(Tensor x, const Projection& gate, const Projection& up) {
        matmul(x, std::array{gate, up});
        activate(Activation::silu, gate.out, &up.out);
    }
    // x += y; x float32
    virtual void add(Tensor x, Tensor y) = 0;
    // out[i] = x[rows[i]], the plan's logit rows
    virtual void select_logit_rows(Tensor x, Tensor out) = 0;
    // For results(): the most likely token of each row of logits, of several the lowest id; -1 where StepResults says so. The CPU
    // does nothing here.
    virtual void choose_best(Tensor) {}
    // What sample() supports in one step.
    virtual SamplingLimits sampling_limits() const { return {}; }
    // Runs the plan's sampling tasks on the logits; after end_step().
    virtual void sample(Tensor) {}
    // Waits for the step: `best` and `sampled` as choose_best() and sample() found them, empty where these are left out.
    virtual StepResults results() { return {}; }
    // Copies whole blocks, K and V of every layer, all of the list in one call, with the result of doing them in order. For
    // copy-on-write `from` and `to` are the device's layers; for swapping one of them is the swap pool's.
    virtual void copy_blocks(std::span<const BlockCopy> copies, std::span<const KvLayer> from,
                             std::span<const KvLayer> to) = 0;
};

} // namespace quire
