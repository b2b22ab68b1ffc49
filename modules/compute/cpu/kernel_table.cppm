// quire.compute.cpu.kernel_table: the interface between the CPU backend and its kernels: the kernels' arguments, and the table of functions
// that each instruction set fills (isa/). Owns nothing.
//
// A GEMM is out [M × N] = x [M × K] · weightᵀ + bias: M tokens, N rows of the weight, K columns.
export module quire.compute.cpu.kernel_table;

import quire.core.base;
export import quire.model_file.family;
import quire.model_file.quants;
export import quire.core.tensor;

export namespace quire {

// Types that the integer GEMM multiplies: quantised weights × int16-quantised activations (gemm_integer.h). The other types go
// through the float GEMM.
constexpr bool uses_integer_gemm(DType type) {
    switch (type) {
        case DType::Q4_0:
        case DType::Q4_1:
        case DType::Q5_0:
        case DType::Q5_1:
        case DType::Q8_0:
        case DType::Q4_K:
        case DType::Q5_K:
        case DType::Q6_K:
        case DType::IQ4_NL:
        case DType::IQ4_XS:
        case DType::MXFP4:
        case DType::IQ3_XXS:
        case DType::IQ2_XS: return true;
        default: return false;
    }
}

// Types whose weights are repacked at load: 16 rows interleaved. Weights of other types are read in the file's order, and repacked at each
// use where several tokens share the cost: their blocks take longer to come from memory than to repack.
constexpr bool repacked_at_load(DType type) {
    return uses_integer_gemm(type) && type != DType::Q8_0 && type != DType::Q6_K;
}

// Types that unpack to integers of 14 bits, which include the sub-block's scale, instead of at most 8 bits.
constexpr bool wide_integers(DType type) { return type == DType::Q6_K || type == DType::IQ2_XS; }

// The largest int16 that activations are quantised to: the sum of a weight and an activation must fit 16 bits (add_winograd).
// NaN and infinity are passed on by the scale.
constexpr std::int32_t max_activation(bool wide_weights) { return wide_weights ? 32767 - 4096 : 32767 - 128; }

// int16-quantised activations: m tokens × k columns with a scale for each 32 columns; 256 times finer than the usual 8 bits,
// because log-probabilities have to match the ones of float activations.
struct QuantisedRows {
    std::int64_t  m = 0, k = 0;
    std::int16_t* integers = nullptr; // [k / 32][m][32], each 4 columns in the order 0 2 1 3
    float*        scales   = nullptr; // [k / 32][m]
    float*        sums     = nullptr; // [k / 32][m]: scale · Σ integers, for formats with a minimum
    std::int32_t* products = nullptr; // [k / 32][m]: - Σ x[2i] · x[2i + 1], for Winograd's inner product
    bool          for_wide = false;   // any of the weights has wide_integers()
};

// The cache that weights are prefetched into. A prefetch into the L1 waits for one of its few line buffers, a prefetch into the L2 for
// one of many more; which of the two keeps more lines on their way depends on the processor. The results are the same.
enum class Prefetch : std::uint8_t { l1, l2 };

// Weight rows first .. last-1 of out = x · weightᵀ + bias. x [m × weight.cols], out [m × weight.rows], bias [weight.rows] or null.
struct GemmTask {
    const TensorView*    weight    = nullptr; // repacked, if repacked_at_load()
    const float*         bias      = nullptr;
    const float*         x         = nullptr;
    const QuantisedRows* quantised = nullptr; // x, for the integer GEMM
    const float*         packed    = nullptr; // x as pack_panels orders it, for the float GEMM
    float*               out       = nullptr;
    Prefetch             prefetch  = Prefetch::l2;
    std::int64_t         m         = 0;
    std::int64_t         first = 0, last = 0; // `first` a multiple of 16; `last` too, or all the rows
    float*               scratch = nullptr;   // gemm_scratch floats
};
inline constexpr std::int64_t max_tokens_per_pass = 256; // of the integer GEMM
// Blocking of the float GEMM for the caches: columns and rows of a panel of weights, and tokens whose sums are kept.
inline constexpr std::int64_t max_k_block = 1024, row_block = 48, token_block = 64;
inline constexpr std::size_t  gemm_scratch = std::size_t(row_block * (token_block * 16 + max_k_block));

// Neighbouring tokens of one sequence, over the paged cache.
struct AttentionPart {
    const float*        q        = nullptr; // first token's row; the heads that share the task's kv head start here
    float*              out      = nullptr; // likewise
    int                 n_tokens = 0, first_position = 0;
    const std::int32_t *table = nullptr, *v_table = nullptr; // the sequence's blocks: of K; of V
    int                 last = -1;                           // the last position that every token sees; -1: its own
};

// K or V of a kv head: rows of head_dim numbers, or of codes with a scale each.
struct KvRows {
    const std::byte* data   = nullptr; // of block 0
    DType            type   = DType::F16;
    const std::byte* scales = nullptr; // float32, of block 0; null: numbers
};

// Queries of some sequences that share a kv head. Blocks with which all sequences begin are read once.
struct AttentionTask {
    std::span<const AttentionPart> parts;
    int          shared   = 0; // leading positions in the same blocks: whole chunks, seen by all queries
    std::int64_t q_stride = 0, out_stride = 0; // floats from one token to the next
    int          n_heads = 0, head_dim = 0, value_dim = 0;
    int          window  = 0;     // 0: all; else nothing is shared
    bool         chunked = false; // Attention::chunked
    float        scale   = 1;
    float        softcap = 0;       // 0: none
    const float* sinks   = nullptr; // a score of each head that has no value, or null
    KvRows       k, v;              // of v value_dim numbers count
    // The rows of v are the first value_dim numbers of those of k. Each has two scales: of these numbers, and of the rest.
    bool        latent       = false;
    std::size_t block_stride = 0; // bytes from a block's part to the next block's, of rows and of scales
    int         block_size   = 0;
    float*      scratch      = nullptr; // attention_scratch() floats
};
inline constexpr int attention_chunk        = 64; // positions
inline constexpr int attention_query_floats = 4;  // floats that attention keeps for a query
// Floats for K and V of a chunk, 16 rows, the scores of some queries; for each query an accumulator, its row max and row sum.
constexpr std::size_t attention_scratch(int n_queries, int head_dim) {
    const auto d = std::size_t(head_dim + 15) / 16 * 16;
    return (2 * attention_chunk + 16) * d + 8 * attention_chunk +
           std::size_t(n_queries) * (d + 2 + attention_query_floats);
}

// One token's queries, worked on in three passes, each in any number of pieces, instead of by attention() alone; the same bits. The
// chunks have `attention_chunk` positions each, from the first position that the token sees.
struct SplitAttention {
    int    n_chunks = 0;
    float* scores   = nullptr; // [n_heads][n_chunks × attention_chunk] then weights
    float* highest  = nullptr; // [n_heads][n_chunks] the largest score of each chunk
    float* sums     = nullptr; // [n_heads][n_chunks] the sum of each chunk's weights
    float* rescale  = nullptr; // [n_heads][n_chunks] the factor for the sums of the chunks before
};
// Floats for the four arrays, and the number of chunks.
constexpr std::size_t split_attention_floats(int n_heads, int n_chunks) {
    return std::size_t(n_heads) * std::size_t(n_chunks) * std::size_t(attention_chunk + 3);
}
// The first position that a token at `position` sees.
constexpr int first_seen(const AttentionTask& task, int position) {
    return task.window == 0 || position < task.window ? 0
           : task.chunked                             ? position / task.window * task.window
                                                      : position - task.window + 1;
}
constexpr int attention_chunks(const AttentionTask& task, int position) {
    return position / attention_chunk - first_seen(task, position) / attention_chunk + 1;
}

// A causal convolution over neighbouring tokens of one sequence, of some columns (CausalConv). Rows of x, factor, gate and out are `stride`
// floats apart.
struct ConvTask {
    const float* x      = nullptr;
    const float* factor = nullptr; // or null
    const float* gate   = nullptr; // or null: silu of the sum
    float*       out    = nullptr;
    std::int64_t stride = 0;
    const float* weight = nullptr; // [columns × taps]
    const float* bias   = nullptr; // [columns], or null
    float* past = nullptr; // [taps - 1][conv_columns] the inputs before the first token; then those before the next one
    int    n_tokens = 0, taps = 0, columns = 0;
};
inline constexpr int conv_columns = 64, max_taps = 16;

// A head's recurrence over neighbouring tokens of one sequence, of some columns of its matrix (Recurrence). Rows of q, k and v are `stride`
// floats apart, those of out `out_stride`.
struct RecurrenceTask {
    const float *q = nullptr, *k = nullptr, *v = nullptr;
    std::int64_t stride = 0;
    const float *decay = nullptr, *write = nullptr; // [n_tokens] g; β or Δ
    float*       out        = nullptr;
    std::int64_t out_stride = 0;
    float*       state      = nullptr; // [key_dim][recurrence_columns], changed; columns from `columns` on are 0
    float        skip       = 0;
    int          n_tokens = 0, key_dim = 0, columns = 0;
    bool         delta = false;
};
inline constexpr int recurrence_columns = 32;

// The kernels of one instruction set.
struct CpuKernels {
    const char* name = nullptr;
    // Repacks groups of 16 weight rows, first .. last-1, for the integer GEMM; out takes whole groups, 16 · row_bytes each.
    void (*repack)(const TensorView& weight, std::byte* out, std::int64_t first, std::int64_t last) = nullptr;
    // Quantises tokens first .. last-1 of x [m × k] to int16.
    void (*quantise_rows)(const float* x, const QuantisedRows& to, std::int64_t first, std::int64_t last) = nullptr;
    // Panel packing: x [n × cols] in the order in which the float GEMM reads it, to out [n · cols]; tiles of tokens
    // first .. last-1 of the token_tiles(n).
    std::int64_t (*token_tiles)(std::int64_t n) = nullptr;
    void (*pack_panels)(const float* x, std::int64_t n, std::int64_t cols, float* out, std::int64_t first,
                        std::int64_t last)      = nullptr;
    void (*integer_gemm)(const GemmTask&)       = nullptr;
    void (*float_gemm)(const GemmTask&)         = nullptr;
    void (*attention)(const AttentionTask&)     = nullptr;
    // The passes over a task with one part of one token, whose last position is its own: scores of chunks first .. last-1; their weights;
    // the output's columns first .. last-1 of each head, `first` a multiple of 16.
    void (*attention_scores)(const AttentionTask&, const SplitAttention&, int first, int last)  = nullptr;
    void (*attention_weights)(const AttentionTask&, const SplitAttention&, int first, int last) = nullptr;
    void (*attention_values)(const AttentionTask&, const SplitAttention&, int first, int last)  = nullptr;
    // One row: residual += x if there is a residual, then out = rmsnorm(residual or x) * weight (null: ones). All [n].
    void (*norm)(const float* x, float* residual, const float* weight, float eps, float* out, std::int64_t n) = nullptr;
    // gate = activation(gate), times `up` if there is one. [n]
    void (*activate)(Activation activation, float* gate, const float* up, std::int64_t n) = nullptr;
    void (*convolve)(const ConvTask&)                                                     = nullptr;
    void (*recur)(const RecurrenceTask&)                                                  = nullptr;
    void (*softcap)(float* x, float cap, std::int64_t n)  = nullptr; // x = cap · tanh(x / cap)
    void (*add)(float* x, const float* y, std::int64_t n) = nullptr;
    // A row of K or V in a type of the cache; of codes also its scale. A row with a NaN or an infinity becomes NaN, one whose numbers are all
    // below 1e-30 zero.
    void (*store_kv)(const float* x, DType type, std::byte* out, std::byte* scale, std::int64_t n) = nullptr;
    // Each `size` numbers of x [n], a power of two, times the Hadamard matrix of that size over √size, its own inverse.
    void (*rotate)(float* x, std::int64_t n, int size) = nullptr;

    void gemm(const GemmTask& task) const { (uses_integer_gemm(task.weight->type) ? integer_gemm : float_gemm)(task); }
};

} // namespace quire
