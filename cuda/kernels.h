// The interface between the modules and nvcc: plain types, one launch function per operation. Implemented by cuda/*.cu, or by
// cuda/none.cpp in a build without CUDA; the linker chooses. All pointers are device memory unless said; every launch goes
// to the context's stream and returns at once. Activations are IEEE halves, the residual and logits float32.
#pragma once

#include <cstddef>
#include <cstdint>

namespace quire::cuda {

using Half = std::uint16_t;

// -- device.cu: the device, its memory, copies, graphs

struct DeviceInfo {
    char        name[256]    = "";
    int         n_processors = 0;
    int         major = 0, minor = 0; // compute capability
    std::size_t total = 0, free = 0;  // bytes
};

// Null, or why there is no device to use. It is the calling thread's from here on.
const char* open_device(int index, DeviceInfo& info);

// What one engine has of a GPU: a stream, and all that its kernels leave to one another: workspaces, tickets, counters,
// algorithms. Launches with one context are in order, and one thread at a time makes them; two contexts share nothing.
struct Context;

// A context on an open device. Null: `why` says why there is none.
Context* create_context(int index, const char*& why);
void     destroy_context(Context* gpu); // waits for what runs
// Bytes of device memory that the context holds for itself.
std::size_t bytes_of(const Context& gpu);
// Makes the context's device the calling thread's.
void use(Context& gpu);
// Around the launches of a step. Returns whether no other context of this process is on the device until the step has run:
// create_context() waits for that. Then, and only then, blocks of a kernel can wait for one another though something else may
// be on the device already, as all that ends by itself; beside another context such launches are cooperative, which costs
// the time that a launch otherwise overlaps with the one before.
bool begin_launches(Context& gpu);
void end_launches(Context& gpu);
// The first error of any call or launch since the last time it was asked, or null. Does not wait.
const char* last_error(Context& gpu);

void* allocate(Context& gpu, std::size_t bytes); // zeroed; null when there is not enough
void  release(void* memory);
void* allocate_host(std::size_t bytes); // pinned
void  release_host(void* memory);

void synchronize(Context& gpu);
void copy_to_device(void* to, const void* from_host, std::size_t bytes, Context& gpu);
void copy_to_host(void* to_host, const void* from, std::size_t bytes, Context& gpu);
// From pageable memory, as a mapped file is; much of it by several threads through pinned buffers. Returns when it is done;
// last_error() knows of what went wrong in any of them.
void upload(void* to, const void* from_host, std::size_t bytes, Context& gpu);
// Gives back the buffers that upload() keeps.
void end_uploads(Context& gpu);

void  begin_capture(Context& gpu);
void* end_capture(Context& gpu); // an executable graph, or null
void  launch_graph(void* graph, Context& gpu);
void  destroy_graph(void* graph);

// Timing on the device.
void*  create_event();
void   destroy_event(void* event);
void   record_event(void* event, Context& gpu);
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
void to_f16(std::uint32_t type, const void* blocks, Half* out, std::int64_t n, Context& gpu); // F32, BF16, F16
void to_i8(std::uint32_t type, const void* blocks, std::int8_t* q, void* scales, float* mins, std::int64_t n,
           Context& gpu);
// What to_i8 needs for a type: the group, whether scales are float32, whether there are mins.
void i8_layout(std::uint32_t type, int& group, bool& float_scales, bool& has_mins);
// Any form → halves, for products with many rows.
void dequantize(const Weight& weight, Half* out, Context& gpu);

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
           Context& gpu);
// x may be halves or float32; residual float32 or null; out halves (or float32 for the residual's own norm).
// These take any number of rows and columns; what is not of the usual shape takes a plain, slower kernel.
void norm(const void* x, bool x_is_float, const float* weight, const float* bias, float eps, float* residual, Half* out,
          std::int64_t rows, std::int64_t cols, Context& gpu);
void silu_mul(Half* gate, const Half* up, std::int64_t n, Context& gpu);
void gelu(Half* x, std::int64_t n, Context& gpu);
void add(float* x, const Half* y, std::int64_t n, Context& gpu);
void add_bias(Half* x, const float* bias, std::int64_t rows, std::int64_t cols, Context& gpu);
void select_rows(const float* x, const std::int32_t* rows, float* out, std::int64_t n_rows, std::int64_t cols,
                 Context& gpu);
// Rotates q in place and k on its way into the cache, with v. Cache: [block][kv_head][offset][head_dim] halves.
struct RopeStore {
    Half *       q = nullptr, *k = nullptr, *v = nullptr; // [T × heads·D], [T × kv_heads·D]
    Half *       cache_k = nullptr, *cache_v = nullptr;
    const float* inv_freq = nullptr; // [half]
    int          half = 0, n_heads = 0, n_kv_heads = 0, head_dim = 0, block_size = 0;
    float        scale  = 1;
    bool         halves = false; // pairs (i, i + half); else (2i, 2i + 1)
};
void rope_and_store(const RopeStore& args, const Plan& plan, std::int64_t n_tokens, Context& gpu);
// n_copies pairs (from, to) on the device; one launch copies all of them in all layers. Pools may be pinned host memory.
struct BlockPools {
    const void* const* from        = nullptr; // [2 · layers] arrays, device memory
    void* const*       to          = nullptr;
    int                n_arrays    = 0;
    std::size_t        block_bytes = 0; // of one array
};
void copy_blocks(const BlockPools& pools, const std::int32_t* pairs, int n_copies, Context& gpu);
// The lowest id among the largest of each row; -1 for a row with NaN or +infinity in it, or nothing but -infinity.
void argmax(const float* logits, std::int32_t* out, std::int64_t rows, std::int64_t cols, Context& gpu);

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
// All tokens of an answer are -1 where the row has NaN or +infinity in it, or nothing but -infinity; a draw is where no token
// can come.
constexpr int most_top = 256;
// Each task has a row of its own, which its edits change. draws: random numbers in [0, 1).
void sample(float* logits, std::int64_t vocab, const SampleTask* tasks, int n_tasks, LogitEdit* edits,
            const double* draws, std::int32_t* out, Context& gpu);

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
DecodeChunks decode_chunks(const Context& gpu, int head_dim, std::int64_t work);
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
void attention_decode(const Attention& args, const Plan& plan, float* partial, std::int32_t* tickets, Context& gpu);
// The fastest tile of queries for a head_dim; 0: only the plain kernel can.
int prefill_tile(const Context& gpu, int head_dim);
struct PrefillTile {
    std::int32_t sequence, first_row, n_rows; // neighbouring tokens of one sequence
};
// attention_hopper.cu: the tile there, or 0 where this GPU or head_dim has no such kernel.
int  prefill_tile_hopper(const Context& gpu, int head_dim);
void attention_prefill_hopper(const Attention& args, const Plan& plan, const PrefillTile* tiles, int n_tiles,
                              Context& gpu);
void attention_prefill(const Attention& args, const Plan& plan, const PrefillTile* tiles, int n_tiles, Context& gpu);

// -- matmul.cu, matmul_batch.cu, blas.cu

// out[t][r] = Σ x[t][c] weight[r][c] (+ bias[r]); out halves, or float32.
struct Product {
    Weight       weight;
    const float* bias         = nullptr;
    void*        out          = nullptr;
    bool         out_is_float = false;
};
// Whether the kernels below can multiply with it, which read 16 bytes at a time; matmul_plain() can with any.
bool is_regular(const Weight& weight);
void matmul_plain(const Half* x, std::int64_t n_rows, std::int64_t cols, const Product* products, int n_products,
                  Context& gpu);
// Few rows of x (1 .. most_vector_rows): reads each weight once, all products in one launch. invariant: a row's bits do not
// depend on how many there are.
constexpr int most_vector_rows = 8;
constexpr int most_products    = 3;
void          matmul_vector(const Half* x, int n_rows, std::int64_t cols, const Product* products, int n_products,
                            bool invariant, Context& gpu);
// One row of x: out[r] = silu(Σ x[c] gate[r][c]) · Σ x[c] up[r][c], halves. False: not on this GPU, or not these weights.
bool matmul_gated(const Half* x, const Weight& gate, const Weight& up, Half* out, Context& gpu);
// matmul_batch.cu: some rows of x (up to most_batch_rows) on tensor cores, weights in any form read once. x has room for
// n_rows rounded up to 8, 16, 32, 64.
constexpr int most_batch_rows = 64;
bool          can_batch(const Context& gpu, const Weight& weight);
void matmul_batch(const Half* x, int n_rows, std::int64_t cols, const Product* products, int n_products, Context& gpu);
// Many rows of x: tensor cores by cuBLASLt, weights as halves. Null, or why there is no cuBLASLt.
const char* open_blas(Context& gpu);
// n_matrices of one shape, `weight_stride` and `out_stride` elements apart, are multiplied with the same x.
struct BlasShape {
    std::int64_t rows = 0, cols = 0; // of a matrix
    bool         out_is_float  = false;
    int          n_matrices    = 1;
    std::int64_t weight_stride = 0, out_stride = 0;
};
// Tries the library's algorithms for products of that shape with least_rows to most_rows rows of x, and keeps the fastest for
// some numbers of rows; `weight` is that many values, whatever they are. False: no memory to try them with. What was not
// tried takes the library's first guess.
bool tune_blas(const BlasShape& shape, const Half* weight, std::int64_t least_rows, std::int64_t most_rows,
               Context& gpu);
// False: the library cannot, and has done nothing.
bool matmul_blas(const Half* x, std::int64_t n_rows, const Half* weight, const BlasShape& shape, void* out,
                 Context& gpu);
// The numbers of rows that algorithms are tried for, ascending. A product with up to 256 takes that of the first one that is
// not smaller; with more, one that suits some rows more is often slower than the library's guess.
constexpr int blas_rows[] = {8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512, 1024, 2048};
constexpr int n_blas_rows = int(sizeof blas_rows / sizeof *blas_rows);
// Its place in the list; n_blas_rows: none of these.
constexpr int blas_bucket(std::int64_t n_rows) {
    int at = 0;
    while (at < n_blas_rows && (n_rows <= 256 ? blas_rows[at] < n_rows : blas_rows[at] != n_rows)) at++;
    return at;
}

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
void* make_tape(const TapeOp* ops, int n_ops, Context& gpu);
// `partial`, `tickets`: as for attention_decode(). False: not begun, as something else has some of the GPU's processors.
bool run_tape(void* tape, const Plan& plan, float* partial, std::int32_t* tickets, Context& gpu);
void destroy_tape(void* tape);

// -- dense.cu: what stands between two attentions of a step of 2 to 128 tokens, as a single kernel

// Runs products (weights of halves), gated ones, norms that follow a product and add its result to the residual, and rotation
// and store of three products' results: at most four times products, each of what those before made. What a norm or the
// rotation takes from a product is not written in between. Returns how many of the operations were run, from the first on: 0
// where this GPU cannot, or they are none of these.
// prepare_dense() takes the memory for it, once; bytes. Its blocks wait for one another: a cooperative launch but where begin_launches() said true.
constexpr int most_dense_rows = 128;
std::size_t   prepare_dense(Context& gpu);
int           run_dense(const TapeOp* ops, int n_ops, int n_tokens, const Plan& plan, Context& gpu);

// -- prompt.cu: products with the many rows of a prompt

// Whether it can run these products on this GPU, once their weights are halves.
bool can_prompt(const Context& gpu, const TapeOp& op);
// Runs the first operation, and the second where that rotates and stores the three results. Returns how many it ran. A row's bits
// do not depend on how many rows there are.
int run_prompt(const TapeOp* ops, int n_ops, const Plan& plan, Context& gpu);

} // namespace quire::cuda
