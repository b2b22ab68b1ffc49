// quire.compute.backend: the interface to a compute device: memory, weights, block moves, and a program that it compiles and runs.
// The executor chooses the device behind it once.
export module quire.compute.backend;

export import quire.compute.memory;
export import quire.compute.program;
import quire.core.base;
export import quire.core.tensor;
export import quire.paging.block;
export import quire.step.plan;

export namespace quire {

// How the operations read a weight.
enum class WeightUse : std::uint8_t {
    plain,        // in a GEMM, an embedding or a norm
    stack,        // some matrices of one shape of several that stand one after the other
    f32,          // in float32: a small matrix, of the router or of the experts' biases
    lookup,       // only in Embed, a row at a time
    adapter,      // in LoraAdd: a matrix of an adapter
    adapter_rows, // in LoraAdd, a row at a time: that of the embedding
};

// A value of the program in a step: a row-major matrix in device memory.
struct Tensor {
    void*        data = nullptr;
    std::int64_t rows = 0;
    std::int64_t cols = 0;
    DType        type = DType::F32; // F32, or the backend's activation type
};

// The paged K and V of one layer. Both arrays: [block][kv_head][offset in block][head_dim], so that the part of a
// block that one head reads is contiguous. From a block to the next one there are `stride` bytes. A latent cache (DeepSeek-V2, section 2.1)
// has no V: the first value_dim numbers of K's row are the value.
//
// Codes (has_scales()) have scales, [block][kv_head][offset in block], with the same stride; a latent row has two, of the value and of the rest.
// K's rows of codes are rotated before they are quantised: each `rotation()` numbers are multiplied by a Hadamard matrix, which spreads the
// largest of them over all. Queries are rotated likewise.
struct KvLayer {
    void* k        = nullptr;
    void* v        = nullptr;    // latent: null
    DType type     = DType::F16; // of K: F32, F16, BF16, I8 or F8; on a GPU F16, I8 or F8
    int   n_blocks = 0, block_size = 0, n_kv_heads = 0, head_dim = 0;
    int   value_dim = 0;       // head_dim, unless latent
    int   group = 0, part = 0; // which of a plan's block tables and slots lead to the layer's blocks (GroupPlan::parts)
    int   v_part         = 0;  // the part whose tables and slots lead to V and its scales: `part`, or the next one
    std::size_t stride   = 0;  // on a GPU a multiple of 256 and of a row of every array
    DType       v_type   = DType::F16;
    std::byte * k_scales = nullptr, *v_scales = nullptr; // float32, not aligned; null: numbers

    bool latent() const { return v == nullptr; }
    // The largest power of two up to 256 that divides head_dim; 1: nothing is rotated, because the value is a part of K's row.
    int rotation() const { return latent() ? 1 : std::min(256, 1 << std::countr_zero(unsigned(head_dim))); }
    // Of K in a block.
    std::size_t block_bytes() const { return std::size_t(n_kv_heads * block_size) * row_bytes(type, head_dim); }
};

// Into so many arrays at most a pool is cut whose blocks are contiguous.
inline constexpr int most_block_pieces = 16;

// A part of every block of a pool, for copies of blocks: `bytes` bytes, from one block to the next `stride`.
struct BlockArray {
    std::byte*  data  = nullptr; // of block 0
    std::size_t bytes = 0, stride = 0;
    bool        on_host = false; // the swap pool
};

// Where the recurrent state of one layer lies. The state of a sequence in all layers of its group is a unit: a row of bytes that is cut into
// blocks of the pool, byte e of it in block unit[e / block_bytes] at e % block_bytes. The arrays of a layer are float32 and begin at `offset`:
// StateShape (quire.model_file.config) says which they are.
struct StateLayer {
    std::byte*  memory      = nullptr; // of the pool: block b begins at b * block_bytes; null: the layer has no state
    std::size_t block_bytes = 0;       // a multiple of 256
    int         group       = 0;       // of the plan, whose state_from and state_to name the units
    std::size_t offset      = 0;       // in a unit, a multiple of 256
    std::size_t bytes       = 0;

    // Bytes of one block.
    struct Piece {
        std::byte*  data = nullptr;
        std::size_t n    = 0;
    };
    // The bytes of the layer from `first` on, up to `n`, that lie in one block of a unit.
    Piece piece(std::span<const BlockId> unit, std::size_t first, std::size_t n) const {
        const std::size_t at = offset + first, in_block = at % block_bytes;
        return {memory + std::size_t(unit[at / block_bytes]) * block_bytes + in_block,
                std::min(n, block_bytes - in_block)};
    }
    // Copies bytes first .. first + n of the layer out of a unit, or into it.
    void read(std::span<const BlockId> unit, std::size_t first, std::size_t n, void* to) const;
    void write(std::span<const BlockId> unit, std::size_t first, std::size_t n, const void* from) const;
};

// Upper bounds of an engine's steps; memory for them is allocated once.
struct StepLimits {
    int max_tokens = 0, max_logit_rows = 0, max_sequences = 0, max_blocks_per_sequence = 0, context = 0, block_size = 0;
    int n_layers = 0, n_heads = 0, n_kv_heads = 0, value_dim = 0, vocab_size = 0;
    int n_attentions           = 1;   // that differ in their window or in the number or size of their KV heads
    std::vector<int> parts     = {1}; // of each cache group: GroupPlan::parts
    int              unit      = 0;   // blocks of a recurrent state, of the group without parts; 0: there is none
    int              n_experts = 0, experts_used = 0, hidden_size = 0;
    int recurrent_heads = 0, recurrent_groups = 0, key_dim = 0; // of a layer's recurrence; 0: there is none
    int coded_cols =
        0; // numbers of a token's K, and of its V, in a layer, at most, where they are codes; 0: they are not
    int n_ranks = 1, rank_vocab = 0; // of the model; rows of this rank's part of the logits' matrix
};

// Rows of a step's tensors: the plan's, or more if the device rounds the number up. The contents of additional rows do not
// affect the others.
struct StepShape {
    int tokens = 0, logit_rows = 0;
};

class Backend;

// The values of a program in device memory, with room for the largest step. **Owns** that memory.
class Activations {
public:
    // Error: there is not enough memory.
    static Result<Activations> create(Backend& backend, const Program& program, int max_tokens, int max_logit_rows);

    // The value in a step of this shape.
    Tensor      at(ValueId id, StepShape shape) const;
    StepShape   most() const { return most_; }
    std::size_t bytes() const { return memory_.bytes(); }

private:
    struct Place {
        std::size_t  offset     = 0;
        std::int64_t cols       = 0;
        DType        type       = DType::F32;
        bool         logit_rows = false;
    };
    Buffer             memory_;
    std::vector<Place> places_; // by ValueId
    StepShape          most_;
};

// One step is run(plan), sample(), results(). run(), sample() and copy_blocks() may return before the device is done; the device does them in
// order. results() is the one wait of a step, and comes before the next run() or copy_blocks(). The operations take tokens, positions, slots,
// block tables and lengths from the plan.
class Backend {
public:
    virtual ~Backend() = default;

    virtual std::string describe() const = 0; // one line for a person: device, instruction set, threads
    virtual std::string numerics() const = 0; // the part of describe() on which the bits of the results depend

    // The choices that were made by measuring on this machine, for a person; empty if there are none.
    virtual std::string tuning() const { return {}; }

    // -- memory
    virtual Result<Buffer> allocate(std::size_t bytes) = 0;
    // Host memory that the device can copy to and from at full speed (pinned).
    virtual Result<Buffer> allocate_host(std::size_t bytes) = 0;
    // Bytes that can still be allocated.
    virtual std::size_t memory_available() const = 0;
    // The part of memory_available() that KV blocks may use by default; asked after the weights are loaded.
    virtual std::size_t memory_for_cache() const = 0;
    // Bytes allocated so far: weights that are not used directly from the file, buffers, workspaces.
    virtual std::size_t memory_taken() const = 0;
    // Bytes a second that the device reads from its memory; the call measures it, in some 50 ms.
    virtual double read_bandwidth() = 0;
    // Bytes a second that the threads of a step read in a plain sum over the prepared weights, the best of four passes. 0: the weights fit
    // into a cache, or the device is no CPU.
    virtual double weight_bandwidth() { return 0; }
    // The type of values that are not float32.
    virtual DType activation_type() const = 0;

    // -- weights
    // Whether prepare() copies every tensor, so that the tensor's memory can be freed.
    virtual bool copies_weights() const { return false; }
    // Makes a tensor of the file ready for `use`. `n`: the number of matrices of a stack. The tensor stays valid, unless copies_weights().
    virtual Result<WeightHandle> prepare(const TensorView& tensor, WeightUse use, int n) = 0;
    // After the last prepare(): gives back the memory that only prepare() needed.
    virtual void end_weights() {}

    // -- the program
    // Before the first step, after the weights.
    virtual Result<void> prepare_steps(const StepLimits& limits) = 0;
    // Sets the program of every step, its values, and the KV cache and the state of each layer. All four outlive the last step. Layers
    // in different parts of an entry have the same arrays. `states`: by layer, or empty where no layer has a state.
    virtual void compile(const Program& program, const Activations& values, std::span<const KvLayer> layers,
                         std::span<const StateLayer> states) = 0;
    // How the steps run, for a person: a line for each operation or kernel.
    virtual std::string explain() const = 0;

    // -- a step
    virtual void run(const StepPlan& plan) = 0;
    // The limits of sample() in one step.
    virtual SamplingLimits sampling_limits() const { return {}; }
    // Runs the sampling tasks of the plan on the step's logits.
    virtual void sample(const StepPlan&) {}
    // Waits for the step. `best` is Argmax's result, `sampled` sample()'s; both are empty where the host reads the logits itself.
    virtual StepResults results() { return {}; }
    // Rows of float32 in memory that the host can read, valid until the next call.
    virtual std::span<const float> to_host(const Tensor& tensor) = 0;
    // Copies whole blocks, as if one after the other. `from` and `to` are the arrays of a pool, all of one size: for copy-on-write the
    // device's pool twice, for swapping the device's pool and the swap pool.
    virtual void copy_blocks(std::span<const BlockCopy> copies, std::span<const BlockArray> from,
                             std::span<const BlockArray> to) = 0;
    // Waits for the copies that copy_blocks() has begun.
    virtual void finish_copies() {}
};

} // namespace quire

module :private;

namespace quire {

void StateLayer::read(std::span<const BlockId> unit, std::size_t first, std::size_t n, void* to) const {
    for (auto* out = static_cast<std::byte*>(to); n > 0;) {
        const Piece p = piece(unit, first, n);
        std::memcpy(out, p.data, p.n);
        out += p.n, first += p.n, n -= p.n;
    }
}

void StateLayer::write(std::span<const BlockId> unit, std::size_t first, std::size_t n, const void* from) const {
    for (const auto* in = static_cast<const std::byte*>(from); n > 0;) {
        const Piece p = piece(unit, first, n);
        std::memcpy(p.data, in, p.n);
        in += p.n, first += p.n, n -= p.n;
    }
}

Result<Activations> Activations::create(Backend& backend, const Program& program, int max_tokens, int max_logit_rows) {
    Activations values;
    values.most_      = {max_tokens, max_logit_rows};
    std::size_t total = 0;
    for (const Value& v : program.values) {
        const DType type = v.f32 ? DType::F32 : backend.activation_type();
        values.places_.push_back({total, v.cols, type, v.logit_rows});
        const auto rows = std::size_t(v.logit_rows ? max_logit_rows : max_tokens);
        total += (rows * row_bytes(type, v.cols) + 255) / 256 * 256; // each on a line of 256 bytes
    }
    Result<Buffer> memory = backend.allocate(total);
    if (!memory) return std::unexpected(memory.error());
    values.memory_ = std::move(*memory);
    return values;
}

Tensor Activations::at(ValueId id, StepShape shape) const {
    const Place& place = places_[std::size_t(id)];
    return {static_cast<std::byte*>(memory_.data()) + place.offset, place.logit_rows ? shape.logit_rows : shape.tokens,
            place.cols, place.type};
}

} // namespace quire
