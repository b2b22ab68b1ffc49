// The interface between the modules and nvcc: plain types, one launch function per operation. Implemented by cuda/*.cu, or by
// cuda/none.cpp in a build without CUDA; the linker chooses. All pointers are device memory unless said; every launch goes
// to `stream` and returns at once. Activations are IEEE halves, the residual and logits float32.
#pragma once

#include <cstddef>
#include <cstdint>

namespace quire::cuda {

using Stream = void*; // cudaStream_t
using Half   = std::uint16_t;

// -- device.cu: the device, its memory, copies, graphs

struct DeviceInfo {
    char        name[256]    = "";
    int         n_processors = 0;
    int         major = 0, minor = 0; // compute capability
    std::size_t total = 0, free = 0;  // bytes
};

// Null, or why there is no device to use.
const char* open_device(int index, DeviceInfo& info);
// The first error of any call or launch since the last time it was asked, or null. Does not wait.
const char* last_error();

void* allocate(std::size_t bytes); // zeroed; null when there is not enough
void  release(void* memory);
void* allocate_host(std::size_t bytes); // pinned
void  release_host(void* memory);

Stream create_stream();
void   destroy_stream(Stream stream);
void   synchronize(Stream stream);
void   copy_to_device(void* to, const void* from_host, std::size_t bytes, Stream stream);
void   copy_to_host(void* to_host, const void* from, std::size_t bytes, Stream stream);
// From pageable memory, as a mapped file is, by several threads through pinned buffers. Returns when it is done.
void upload(void* to, const void* from_host, std::size_t bytes);

void  begin_capture(Stream stream);
void* end_capture(Stream stream); // an executable graph, or null
void  launch_graph(void* graph, Stream stream);
void  destroy_graph(void* graph);

// Timing on the device.
void*  create_event();
void   record_event(void* event, Stream stream);
double seconds_between(void* first, void* second); // waits for the second

// -- weights

// How a matrix of GGUF lies on the device. Rows are outputs, the inner dimension is contiguous.
enum class WeightForm : int {
    f16,  // [rows × cols] halves
    i8,   // [rows × cols] int8; `scales` and, if any, `mins` per group: value = scale * q - min
    q4_k, // GGUF's own 144-byte superblocks of 256
    f32,  // vectors and tables that are read as they are
};

struct Weight {
    WeightForm   form = WeightForm::f16;
    std::int64_t rows = 0, cols = 0;
    const void*  data         = nullptr;
    const void*  scales       = nullptr; // i8: [rows × cols / group], halves or float32
    const void*  mins         = nullptr; // i8: float32, or null
    int          group        = 32;      // i8: 16 or 32
    bool         float_scales = false;
};

// -- convert.cu: GGUF's blocks → the forms above. `type` is ggml_type's number.
bool convertible(std::uint32_t type);
void to_f16(std::uint32_t type, const void* blocks, Half* out, std::int64_t n, Stream stream); // F32, BF16, F16
void to_i8(std::uint32_t type, const void* blocks, std::int8_t* q, void* scales, float* mins, std::int64_t n,
           Stream stream);
// What to_i8 needs for a type: the group, whether scales are float32, whether there are mins.
void i8_layout(std::uint32_t type, int& group, bool& float_scales, bool& has_mins);
// Any form → halves, for products with many rows.
void dequantize(const Weight& weight, Half* out, Stream stream);

// -- elementwise.cu

// Decoding's attention: one token for each sequence, a sequence cut into chunks, so that few long ones keep the GPU busy, too.
// The items of a sequence stand together.
struct DecodeItem {
    std::int32_t row   = -1;         // of q; -1: nothing to do
    std::int32_t table = 0;          // where the sequence's blocks begin in Plan::block_tables
    std::int32_t begin = 0, end = 0; // positions of the chunk
    std::int32_t n_chunks = 1;       // of the sequence
    std::int32_t index    = 0;       // which of them
    std::int32_t old      = 0;       // positions below it were in the cache before this step
};
struct DecodeItems {
    const DecodeItem* list = nullptr;
    int               n    = 0;
    int n_short = 0; // behind them, the same cut shorter: for the last heads, so that all processors end together
};

// The step's plan on the device. Entries beyond a step's own (graphs are captured for rounded sizes) have slot -1.
struct Plan {
    const std::int32_t* tokens       = nullptr; // [T]
    const std::int32_t* positions    = nullptr; // [T]
    const std::int32_t* slots        = nullptr; // [T]
    const std::int32_t* logit_rows   = nullptr; // [L]
    const std::int32_t* table_start  = nullptr; // [S]
    const std::int32_t* block_tables = nullptr;
    DecodeItems         items;
};

void embed(const Weight& weight, const Weight* positions, const Plan& plan, float* out, std::int64_t n_tokens,
           Stream stream);
// x may be halves or float32; residual float32 or null; out halves (or float32 for the residual's own norm).
void norm(const void* x, bool x_is_float, const float* weight, const float* bias, float eps, float* residual, Half* out,
          std::int64_t rows, std::int64_t cols, Stream stream);
void silu_mul(Half* gate, const Half* up, std::int64_t n, Stream stream);
void gelu(Half* x, std::int64_t n, Stream stream);
void add(float* x, const Half* y, std::int64_t n, Stream stream);
void add_bias(Half* x, const float* bias, std::int64_t rows, std::int64_t cols, Stream stream);
void select_rows(const float* x, const std::int32_t* rows, float* out, std::int64_t n_rows, std::int64_t cols,
                 Stream stream);
// Rotates q in place and k on its way into the cache, with v. Cache: [block][kv_head][offset][head_dim] halves.
struct RopeStore {
    Half *       q = nullptr, *k = nullptr, *v = nullptr; // [T × heads·D], [T × kv_heads·D]
    Half *       cache_k = nullptr, *cache_v = nullptr;
    const float* inv_freq = nullptr; // [half]
    int          half = 0, n_heads = 0, n_kv_heads = 0, head_dim = 0, block_size = 0;
    float        scale  = 1;
    bool         halves = false; // pairs (i, i + half); else (2i, 2i + 1)
};
void rope_and_store(const RopeStore& args, const Plan& plan, std::int64_t n_tokens, Stream stream);
// n_copies pairs (from, to) on the device; one launch copies all of them in all layers. Pools may be pinned host memory.
struct BlockPools {
    const void* const* from        = nullptr; // [2 · layers] arrays, device memory
    void* const*       to          = nullptr;
    int                n_arrays    = 0;
    std::size_t        block_bytes = 0; // of one array, a multiple of 16
};
void copy_blocks(const BlockPools& pools, const std::int32_t* pairs, int n_copies, Stream stream);
// The lowest id among the largest of each row.
void argmax(const float* logits, std::int32_t* out, std::int64_t rows, std::int64_t cols, Stream stream);

// -- sampling.cu

// A token whose logit is changed before sampling: x / divide (x · divide where x is negative) - subtract + add.
struct LogitEdit {
    std::int32_t token  = 0;
    float        divide = 1, subtract = 0, add = 0;
    float        raw = 0; // what it was: scratch
};

// What is wanted of one logit row. The answer is pairs of a token and its log-probability in the row as it was: one for each
// draw (or `chosen`), then the n_top best ones, best first.
struct SampleTask {
    std::int32_t row        = 0;
    std::int32_t chosen     = -1; // nothing is drawn, this token's log-probability is wanted (n_draws is 1)
    std::int32_t first_edit = 0, n_edits = 0, first_draw = 0, n_draws = 0;
    std::int32_t n_top          = 0; // at most most_top
    std::int32_t first_out      = 0; // in words
    std::int32_t wants_logprobs = 0; // else those of the answer mean nothing
    std::int32_t top_k          = 0; // 0: all
    float        temperature = 1, top_p = 1, min_p = 0;
    std::int32_t only_edited = 0; // no token without an edit can be drawn
};
constexpr int most_top = 256;
// Each task has a row of its own, which its edits change. draws: random numbers in [0, 1).
void sample(float* logits, std::int64_t vocab, const SampleTask* tasks, int n_tasks, LogitEdit* edits,
            const double* draws, std::int32_t* out, Stream stream);

// -- attention.cu: paged attention, causal, over positions up to each token's own

struct Attention {
    const Half *q = nullptr, *cache_k = nullptr, *cache_v = nullptr;
    Half*       out     = nullptr; // as q: [T × heads·D]
    int         n_heads = 0, n_kv_heads = 0, head_dim = 0, block_size = 0;
    float       scale   = 1;
    int         window  = 0; // of prefill; 0: all. Items begin where it does
    float       softcap = 0; // 0: none
};

// The lengths of chunks that suit a step: `work` is the number of positions to be attended to by all kv heads of all rows.
// attention_chunk is always possible, and gives a row the same sums in any step.
constexpr int attention_chunk = 256;
struct DecodeChunks {
    int length       = attention_chunk;
    int short_length = 0; // of DecodeItems::n_short; 0: there are none
};
DecodeChunks decode_chunks(int head_dim, std::int64_t work);
// Some positions, cut into chunks of equal length (but for the last) that is about `chunk`.
struct Chunks {
    int n, length;
};
inline Chunks chunks_of(int positions, int chunk) {
    int n            = (positions + (chunk == attention_chunk ? chunk - 1 : chunk / 2)) / chunk;
    n                = n > 0 ? n : 1;
    const int length = ((positions + n - 1) / n + 15) / 16 * 16;
    return {(positions + length - 1) / length, length};
}
// `partial`: [items × heads × (D + 2)] float32; `tickets`: [T × heads] int, zero before and after.
void attention_decode(const Attention& args, const Plan& plan, float* partial, std::int32_t* tickets, Stream stream);
// The fastest tile of queries for a head_dim; 0: only the plain kernel can.
int prefill_tile(int head_dim);
struct PrefillTile {
    std::int32_t sequence, first_row, n_rows; // neighbouring tokens of one sequence
};
// attention_hopper.cu: the tile there, or 0 where this GPU or head_dim has no such kernel.
int  prefill_tile_hopper(int head_dim);
void attention_prefill_hopper(const Attention& args, const Plan& plan, const PrefillTile* tiles, int n_tiles,
                              Stream stream);
void attention_prefill(const Attention& args, const Plan& plan, const PrefillTile* tiles, int n_tiles, Stream stream);

// -- matmul.cu, matmul_batch.cu, blas.cu

// out[t][r] = Σ x[t][c] weight[r][c] (+ bias[r]); out halves, or float32.
struct Product {
    Weight       weight;
    const float* bias         = nullptr;
    void*        out          = nullptr;
    bool         out_is_float = false;
};
// Few rows of x (1 .. most_vector_rows): reads each weight once, all products in one launch. invariant: a row's bits do not
// depend on how many there are.
constexpr int most_vector_rows = 8;
constexpr int most_products    = 3;
void          matmul_vector(const Half* x, int n_rows, std::int64_t cols, const Product* products, int n_products,
                            bool invariant, Stream stream);
// One row of x: out[r] = silu(Σ x[c] gate[r][c]) · Σ x[c] up[r][c], halves. False: not on this GPU, or not these weights.
bool matmul_gated(const Half* x, const Weight& gate, const Weight& up, Half* out, Stream stream);
// matmul_batch.cu: some rows of x (up to most_batch_rows) on tensor cores, weights in any form read once. x has room for
// n_rows rounded up to 8, 16, 32, 64.
constexpr int most_batch_rows = 64;
bool          can_batch(const Weight& weight);
void matmul_batch(const Half* x, int n_rows, std::int64_t cols, const Product* products, int n_products, Stream stream);
// Many rows of x: tensor cores by cuBLASLt, weights as halves. Null, or why there is no cuBLASLt.
const char* open_blas();
// n_matrices of one shape, `weight_stride` and `out_stride` elements apart, are multiplied with the same x.
void matmul_blas(const Half* x, std::int64_t n_rows, const Half* weight, std::int64_t rows, std::int64_t cols,
                 void* out, bool out_is_float, Stream stream, int n_matrices = 1, std::int64_t weight_stride = 0,
                 std::int64_t out_stride = 0);

// -- tape.cu: a step of one token as a single kernel

// A recorded call of one of the launch functions above.
struct TapeOp {
    enum Kind { embed, norm, products, gated, rope_and_store, attention, add, select };
    Kind         kind = embed;
    Weight       weight;                // embed
    const void*  x           = nullptr; // norm, products, gated; add: what is added; select: the source
    float*       residual    = nullptr; // norm, add; embed, select: the result
    const float* norm_weight = nullptr;
    float        eps         = 0;
    void*        out         = nullptr;  // norm
    bool         x_is_float  = false;    // norm
    std::int64_t rows = 0, cols = 0;     // of x
    Product      product[most_products]; // gated: gate and up
    int          n_products = 0;
    RopeStore    rope;
    Attention    attend;
};
// The operations of a step of one token with one row of logits, told once, as a kernel for all such steps. Null: not on this
// GPU, or these operations are not those of a model that it knows.
void* make_tape(const TapeOp* ops, int n_ops);
// `partial`, `tickets`: as for attention_decode(). False: not begun, as something else has some of the GPU's processors.
bool run_tape(void* tape, const Plan& plan, float* partial, std::int32_t* tickets, Stream stream);
void destroy_tape(void* tape);

// -- dense.cu: what stands between two attentions of a step of 2 to 128 tokens, as a single kernel

// Runs products (weights of halves), gated ones, norms that follow a product and add its result to the residual, and rotation
// and store of three products' results: at most four times products, each of what those before made. What a norm or the
// rotation takes from a product is not written in between. Returns how many of the operations were run, from the first on: 0
// where this GPU cannot, or they are none of these.
// prepare_dense() takes the memory for it, once; bytes.
constexpr int most_dense_rows = 128;
std::size_t   prepare_dense();
int           run_dense(const TapeOp* ops, int n_ops, int n_tokens, const Plan& plan, Stream stream);

// -- prompt.cu: products with the many rows of a prompt

// Whether it can run these products on this GPU, once their weights are halves.
bool can_prompt(const TapeOp& op);
// Runs the first operation, and the second where that rotates and stores the three results. Returns how many it ran. A row's bits
// do not depend on how many rows there are.
int run_prompt(const TapeOp* ops, int n_ops, const Plan& plan, Stream stream);

} // namespace quire::cuda
