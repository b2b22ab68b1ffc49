// The interface between the modules and nvcc: plain types, one launch function per operation. Implemented by cuda/*/*.cu, or by
// cuda/none.cpp in a build without CUDA; the linker chooses. All pointers are device memory unless said; every launch goes
// to the context's stream and returns at once. Activations are fp16, the residual and logits float32.
//
// GEMM: out [M × N] = x [M × K] · weightᵀ, weight [N × K]. M is the number of tokens, N of outputs, K the inner dimension.
#pragma once

#include <cstddef>
#include <cstdint>

namespace quire::cuda {

using Half = std::uint16_t; // an fp16 value

// -- device.cu: the device, its memory, copies, graphs

struct DeviceInfo {
    char        name[256] = "";
    int         n_sms     = 0;
    int         major = 0, minor = 0; // compute capability
    std::size_t total = 0, free = 0;  // bytes
};

int n_devices(); // 0: also where there is no driver
// Null, or why there is no device to use. It is the calling thread's from here on.
const char* open_device(int index, DeviceInfo& info);

// One engine's part of a GPU: a stream, and the state that a launch leaves for later launches: workspaces, arrival counters, tuned
// algorithms. Launches with one context run in order and are made by one thread at a time; two contexts share nothing.
struct Context;

// A context on an open device. Null: `why` says why there is none.
Context* create_context(int index, const char*& why);
void     destroy_context(Context* gpu); // waits for the launches that still run
// Bytes of device memory that the context holds for itself.
std::size_t bytes_of(const Context& gpu);
// Makes the context's device the calling thread's.
void use(Context& gpu);
// Around the launches of a step. Returns whether no other context of this process is on the device until the step has run;
// create_context() waits for the step's end. Only then is a kernel with a grid barrier launched like any other kernel: the kernels that are
// still on the device end by themselves, so all CTAs of the new kernel will run. Beside another context such a launch is cooperative,
// which costs the overlap with the launch before.
bool begin_launches(Context& gpu);
void end_launches(Context& gpu);
// The first error of any call or launch since the last time it was asked, or null. Does not wait.
const char* last_error(Context& gpu);

void* allocate(Context& gpu, std::size_t bytes); // zeroed; null when there is not enough
void  release(void* memory);
void* allocate_host(std::size_t bytes); // pinned
void  release_host(void* memory);

void synchronize(Context& gpu);
bool is_idle(Context& gpu); // nothing runs, and nothing waits to
void copy_to_device(void* to, const void* from_host, std::size_t bytes, Context& gpu);
void copy_to_host(void* to_host, const void* from, std::size_t bytes, Context& gpu);
// From pageable memory, such as a mapped file; large ones by several threads through pinned buffers. Returns when it is done;
// an error of any thread is last_error()'s.
void upload(void* to, const void* from_host, std::size_t bytes, Context& gpu);
// Copies beside the kernels that were launched before; kernels that are launched later wait for the copy. No running kernel uses `to`;
// `from_host` is pinned.
void copy_to_device_beside(void* to, const void* from_host, std::size_t bytes, Context& gpu);
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

// How a matrix of GGUF lies on the device: N rows of K columns, K contiguous.
enum class WeightForm : int {
    f16,
    i8,   // int8; `scales` and, if any, `mins` per group of a row: value = scale * q - min
    q4_k, // GGUF's own 144-byte superblocks of 256
    f32,  // vectors and tables
};

// A matrix of GEMMs in e4m3, K a multiple of 16. Weights have a scale for each 128 × 128 block, [⌈N / 128⌉ × ⌈K / 128⌉]; x has one for each row.
// value = scale · code.
struct Fp8Matrix {
    std::uint8_t* codes  = nullptr;
    float*        scales = nullptr;
};
constexpr int fp8_block = 128;

struct Weight {
    WeightForm   form = WeightForm::f16;
    std::int64_t rows = 0, cols = 0; // N, K
    const void*  data           = nullptr;
    const void*  scales         = nullptr; // i8: [rows × cols / group], fp16 or float32
    const void*  mins           = nullptr; // i8: float32, or null
    int          group          = 32;      // i8: 16 or 32
    bool         float_scales   = false;
    int          scale_exponent = 0; // i8, q4_k: all scales are below 2^scale_exponent
    Fp8Matrix    fp8;                // the same matrix again, for prompts; or null
};

// -- convert.cu: GGUF's blocks → the forms above. `type` is ggml_type's number.
bool convertible(std::uint32_t type);
void to_f16(std::uint32_t type, const void* blocks, Half* out, std::int64_t n, Context& gpu); // F32, BF16, F16
// `points`, on the device: the vectors of 8 or 4 that blocks of IQ2_XS and IQ3_XXS choose from; else null.
void to_i8(std::uint32_t type, const void* blocks, const std::int8_t* points, std::int8_t* q, void* scales, float* mins,
           std::int64_t n, Context& gpu);
// The layout that to_i8() makes of a type: the group, whether scales are float32, whether there are mins.
void i8_layout(std::uint32_t type, int& group, bool& float_scales, bool& has_mins);
// The least exponent for Weight::scale_exponent; waits for the launches before.
int scale_exponent_of(const Weight& weight, Context& gpu);
// Any form → fp16, for GEMMs with many tokens.
void dequantize(const Weight& weight, Half* out, Context& gpu);

// -- the step

// Split-KV: the attention of one query over a long sequence is split over its positions, so that a few long sequences keep all
// SMs busy, too. An item is one split; a reduction adds the splits of a query up. The items of a sequence stand together.
struct SplitKvItem {
    std::int32_t row   = -1; // of q; -1: nothing to do
    std::int32_t table = 0;  // where the sequence's first block would stand in Plan::block_tables; can be negative
    std::int32_t begin = 0, end = 0; // positions of the split
    std::int32_t n_splits = 1;       // of the sequence
    std::int32_t split    = 0;       // which of them
    std::int32_t readable = 0;       // K and V of positions below it were written before this step
    std::int32_t n_shared = 0;       // the first splits, which SharedTiles have; they are no items
    std::int32_t moved    = 0;       // from the place of the item to the place of its result among those of the launch
};
// Sequences that begin with the same blocks: their queries read K and V of the common positions together. A tile is some of these
// queries and one split of these positions, which is split `split` of each of the sequences.
struct SharedTile {
    std::int32_t first = 0, n = 0; // of SharedTiles::queries; n = 0: nothing to do
    std::int32_t table = 0;        // as SplitKvItem::table, of one of the sequences
    std::int32_t begin = 0, end = 0, split = 0;
    std::int32_t readable = 0; // 1: K and V of all these positions were written before this step
};
struct SharedQuery {
    std::int32_t row      = 0; // of q
    std::int32_t result   = 0; // where the results of the sequence's splits begin
    std::int32_t n_splits = 0; // of the sequence, shared ones and others; below 2: there is nothing to add up
};
struct SharedTiles {
    const SharedTile*  list    = nullptr;
    const SharedQuery* queries = nullptr; // all sequences of one query
    int                n = 0, n_queries = 0;
};
struct SplitKvItems {
    const SplitKvItem* list = nullptr;
    int                n    = 0;
    // Behind them, the same sequences in shorter splits: for the last heads, so that all SMs finish together.
    int n_short = 0;
    // Each item is a whole sequence, they are short, and there are many: a warp for each of its KV heads instead of a CTA.
    bool        one_warp = false;
    SharedTiles shared;
};

// The step's plan on the device. Entries beyond a step's own (graphs are captured for rounded sizes) have slot -1.
struct Plan {
    const std::int32_t* tokens    = nullptr; // [T]
    const std::int32_t* positions = nullptr; // [T]
    // Slots, and the tables further down, belong to the layers that a kernel runs: each cache group has its own, and in it each block
    // of an entry.
    const std::int32_t* slots        = nullptr; // [T]
    const std::int32_t* logit_rows   = nullptr; // [L]
    const std::int32_t* table_start  = nullptr; // [S] SplitKvItem::table
    const std::int32_t* block_tables = nullptr; // blocks behind a layer's window may be missing, but for 256 positions
    SplitKvItems        items;
    // Recurrent states; null where the model has none. Sequences that only fill up a step to the size of its graph have no tokens.
    const std::int32_t* token_start = nullptr; // [S+1] the rows of each sequence
    const std::int32_t* state_from  = nullptr; // [S][unit] blocks of the state before the step; the first is -1: zeros
    const std::int32_t* state_to    = nullptr; // [S][unit] blocks of the state after it
    int                 unit        = 0;
};

// -- elementwise.cu

// out = scale · row of `weight`, plus row position + offset of `positions`, unless null.
void embed(const Weight& weight, const Weight* positions, float scale, int offset, const Plan& plan, float* out,
           std::int64_t n_tokens, Context& gpu);
enum class NormKind : int { rms, layer, none }; // none: the values themselves
// The bias of the GEMM before, if that GEMM leaves the addition to this operation: scale · values is added to each row of the
// operation's input first. Null: nothing to add.
struct Bias {
    const float* values = nullptr;
    float        scale  = 1;
};
// The operations before and after a norm that its kernel runs with it. All rows have `cols` columns, as the norm; pointers may be null.
struct NormBeside {
    const float* first_weight = nullptr; // x is normed (RMS) with this one before all else
    float        first_eps    = 0;
    const Half*  more         = nullptr; // is added to the residual as well
    const Half*  gate =
        nullptr; // .. times the sigmoid of a row's dot product with gate_weight, as many columns as x has
    const float* gate_weight = nullptr;
    bool         gates       = false; // the result is silu(out) · norm
};
// Whether norm() takes a NormBeside for rows of so many columns.
constexpr bool can_norm_beside(NormKind kind, std::int64_t cols) {
    return kind == NormKind::rms && cols % 2 == 0 && cols <= 8192;
}
// residual += x if there is a residual; out = norm of that, or of x, which it may replace. x is fp16 or float32. `bias` or null.
// All these take any number of rows and columns; unusual shapes run in a slower kernel. No weight: ones.
// `weights`: the number of weights [cols], one after the other, that the rows take in turn. `fp8`: where `out` goes as rows_to_fp8() makes
// it; `out` is then undefined.
void norm(const void* x, bool x_is_float, Bias x_bias, NormKind kind, const float* weight, const float* bias, float eps,
          float* residual, Half* out, std::int64_t rows, std::int64_t cols, Context& gpu, int weights = 1,
          const Fp8Matrix& fp8 = {}, const NormBeside& beside = {});
// Of a feed-forward network. clamped_swiglu (gpt-oss): g = min(gate, 7), u = clamp(up, -7, 7); g · sigmoid(1.702 g) · (u + 1).
enum class Activation : int { silu, gelu_tanh, gelu_erf, relu, clamped_swiglu, relu_squared, sigmoid };
// gate = activation(gate) · up, or without `up` activation(gate).
void activate(Activation activation, Half* gate, const Half* up, std::int64_t n, Context& gpu);
// gate = activation(gate) · x, in one kernel for any n; x is fp16 or float32.
void gate(Activation activation, Half* gate, const void* x, bool x_is_float, std::int64_t n, Context& gpu);
// x = activation(x + bias); cols is a multiple of 8.
void activate_biased(Activation activation, Half* x, Bias bias, std::int64_t rows, std::int64_t cols, Context& gpu);
// x [rows × cols] = activation(x) · times, whose rows are `apart` columns apart.
void activate_times(Activation activation, Half* x, std::int64_t rows, std::int64_t cols, const float* times,
                    std::int64_t apart, Context& gpu);
void soft_cap(float* x, float cap, std::int64_t n, Context& gpu); // x = cap · tanh(x / cap)
// x = scale · (x + y); x is fp16 or float32.
void add(void* x, bool x_is_float, const Half* y, float scale, std::int64_t n, Context& gpu);
// Row t of x times 1 + scale · ln(1 + n), n the whole periods in positions[t] + offset.
void scale_by_position(Half* x, std::int64_t rows, std::int64_t cols, float scale, int period, int offset,
                       const Plan& plan, Context& gpu);
// x += scale · bias; x is fp16 or float32.
void add_bias(void* x, bool x_is_float, const float* bias, float scale, std::int64_t rows, std::int64_t cols,
              Context& gpu);
void select_rows(const float* x, const std::int32_t* rows, float* out, std::int64_t n_rows, std::int64_t cols,
                 Context& gpu);
// RoPE and KV store: rotates q in place, from dimension q_first of each head on, and k on its way into the cache, where v goes
// as it is. Cache: paged_kv.cuh. A latent cache has no V: a token's row is v, then k. Without KV heads only q is rotated.
// The content of a row of K or V: fp16 numbers; or codes, int8 with 128 added or e4m3, which a float32 scale is multiplied with.
enum class KvType : int { f16, i8, e4m3 };
// K or V of a layer where some of them are codes. `rows` as paged_kv.cuh says; scales: [block][kv_head][offset][parts]. A latent row has two
// parts: its first value_dim numbers, and the rest.
struct KvArray {
    void*  rows       = nullptr;
    float* scales     = nullptr; // null: fp16
    KvType type       = KvType::f16;
    int    block_rows = 0, block_scales = 0; // from a block to the next, in rows; in `parts` scales
    int    parts = 1;
};

struct RopeStore {
    Half *q = nullptr, *k = nullptr, *v = nullptr; // [T × heads·q_dim], [T × kv_heads·D]; latent: v [T × value_dim]
    Half *cache_k = nullptr, *cache_v = nullptr;   // latent: cache_v is null
    const float* inv_freq = nullptr;               // [n_pairs]
    int          n_pairs = 0, n_heads = 0, n_kv_heads = 0, head_dim = 0, block_size = 0;
    int          block_rows = 0; // paged_kv.cuh; n_kv_heads · block_size where a block has no other arrays
    int          v_slots    = 0; // from Plan::slots, which are those of K, to those of V; 0: one block has both
    int          q_dim = 0, q_first = 0, value_dim = 0;
    float        scale = 1;
    bool         neox  = false; // pairs (i, i + n_pairs); else interleaved: (2i, 2i + 1)
    // K and V have codes: these are their arrays, in place of cache_k and cache_v (latent: v_array has no rows). Each `rotation` numbers of q
    // and k, a power of two, are multiplied by a Hadamard matrix over its root.
    bool    coded = false;
    KvArray k_array, v_array;
    int     rotation = 1;
    // Added to q, k and v first; only where can_add_biases().
    const float *q_bias = nullptr, *k_bias = nullptr, *v_bias = nullptr;
};
inline bool can_add_biases(const RopeStore& args) {
    return !args.coded && args.n_pairs == 0 && args.cache_v != nullptr && args.head_dim % 8 == 0 &&
           args.q_dim == args.head_dim && args.q_first == 0;
}
void rope_and_store(const RopeStore& args, const Plan& plan, std::int64_t n_tokens, Context& gpu);
void rope_and_store_codes(const RopeStore& args, const Plan& plan, std::int64_t n_tokens, Context& gpu); // codes.cu
// Copies of KV blocks: `pairs` (from, to), on the device; one launch makes all of them in all layers. Pools may be pinned host
// memory.
struct BlockPools {
    const void* const* from     = nullptr; // [n_arrays] where block 0 begins, device memory
    void* const*       to       = nullptr;
    int                n_arrays = 0;
    std::size_t        bytes    = 0; // of a block in one array
    std::size_t        stride   = 0; // bytes from a block to the next one
};
void copy_blocks(const BlockPools& pools, const std::int32_t* pairs, int n_copies, Context& gpu);
// The lowest id among the largest of each row; -1 for a row with NaN or +infinity in it, or nothing but -infinity.
void argmax(const float* logits, std::int32_t* out, std::int64_t rows, std::int64_t cols, Context& gpu);

// -- recurrence.cu: layers that keep a state of fixed size for a sequence

// The states of a layer. That of a sequence is a row of floats, cut into the blocks of its unit: float i of it is float
// (offset + i) % block_floats of block (offset + i) / block_floats.
struct States {
    float*              memory       = nullptr; // of the pool: block b begins at b · block_floats
    std::int64_t        block_floats = 0;       // a multiple of 64
    std::int64_t        offset       = 0;       // of the layer in a unit, a multiple of 64
    int                 unit         = 0;       // blocks of a unit
    const std::int32_t* token_start  = nullptr; // [S+1] the rows of each sequence; it may have none
    // [S × unit] the states before and after the step's tokens, which may be the same; from -1: zeros.
    const std::int32_t *from = nullptr, *to = nullptr;
    int                 n_sequences = 0, most_tokens = 0; // of a sequence, in this step
};
// The operation CausalConv of quire.compute.program, for up to max_conv_taps taps. The last taps - 1 inputs, [taps - 1 × columns] from float 0
// of the state on.
constexpr int max_conv_taps = 16;
struct CausalConv {
    const Half * x = nullptr, *factor = nullptr, *gate = nullptr; // [T × columns]; factor and gate: or null
    Half*        out    = nullptr;
    const float *weight = nullptr, *bias = nullptr; // [columns × taps], [columns] or null
    int          taps = 0, columns = 0;
};
void causal_conv(const CausalConv& op, const States& states, Context& gpu);
// The operation Recurrence of quire.compute.program, for a key_dim of up to max_key_dim. The matrices, [n_heads × key_dim × value_dim], begin
// at float state_at of the state, a multiple of 64.
constexpr int max_key_dim = 256;
struct Recurrence {
    const Half*  x         = nullptr; // [T × columns]
    const float *step      = nullptr,
                *write     = nullptr; // [T × n_heads]; grouped delta rule: step [T × 2·n_heads]; write: or null
    float*       out       = nullptr; // [T × n_heads·value_dim]
    const float *step_bias = nullptr, *decay = nullptr, *skip = nullptr; // [n_heads]; skip: or null
    int          n_heads = 0, n_groups = 0, key_dim = 0, value_dim = 0;
    std::int64_t state_at = 0;
    bool         delta = false, grouped = false;
    // Room of recurrence_chunks_bytes(): sequences with many tokens in the step run in chunks on tensor cores, and their sums depend on where a
    // prompt was cut. Null: no sequence does.
    void* chunks = nullptr;
};
void recurrence(const Recurrence& op, const States& states, Context& gpu);
// 0: a recurrence of this shape does not run in chunks.
constexpr int max_chunked_keys = 128;
std::size_t   recurrence_chunks_bytes(int n_heads, int n_groups, int key_dim, int max_tokens);

// -- sampling.cu

// A token whose logit is changed before sampling: x / divide (x · divide where x is negative) - subtract + add.
struct LogitEdit {
    std::int32_t token  = 0;
    float        divide = 1, subtract = 0, add = 0;
    float        raw = 0; // scratch: the logit before the change
};

// The task of sampling from one row of logits. The answer is a list of pairs: a token, and its log-probability in the unchanged row. First
// comes one pair for each draw (or for `chosen`), then the n_top best tokens, best first. With mirostat each drawn token follows again,
// with its surprise in bits among the tokens that the samplers left.
struct SampleTask {
    std::int32_t row        = 0;
    std::int32_t chosen     = -1; // nothing is drawn, this token's log-probability is wanted (n_draws is 1)
    std::int32_t first_edit = 0, n_edits = 0, first_draw = 0, n_draws = 0;
    std::int32_t n_top          = 0;  // at most max_top
    std::int32_t first_out      = 0;  // in words
    std::int32_t wants_logprobs = 0;  // 0: the answer's log-probabilities are not valid
    std::int32_t only_edited    = 0;  // no token without an edit can be drawn
    std::int32_t first_mask     = -1; // words: tokens whose bit is 0 have a logit of -infinity in the row; -1: none
    // The samplers, in this order (docs/sampling.md); mirostat replaces all but the temperature.
    float        top_n_sigma = 0; // 0: all
    std::int32_t top_k       = 0; // 0: all
    float        typical_p = 1, top_p = 1, min_p = 0;
    float        xtc_threshold = 1; // above 0.5: nothing is left out
    float        temperature = 1, dynatemp_range = 0, dynatemp_exponent = 1;
    std::int32_t mirostat = 0; // its version
    float        mu       = 0; // its state
};
// All tokens of an answer are -1 if the row has NaN or +infinity in it, or only -infinity. A draw is -1 if no token can be drawn.
constexpr int max_top = 256;
// Each task has a row of its own, which its mask and its edits change. uniforms: random numbers in [0, 1), one for each draw.
// masks: a bit for each token, from the lowest bit of a word on.
void sample(float* logits, std::int64_t vocab, const SampleTask* tasks, int n_tasks, LogitEdit* edits,
            const double* uniforms, const std::uint32_t* masks, std::int32_t* out, Context& gpu);

// -- attention/: causal paged attention, each token over the positions up to its own

struct Attention {
    const Half *q = nullptr, *cache_k = nullptr,
               *cache_v  = nullptr; // latent: cache_v is null, the value begins K's row
    Half*        out     = nullptr; // [T × heads·value_dim]
    int          n_heads = 0, n_kv_heads = 0, head_dim = 0, value_dim = 0, block_size = 0;
    int          block_rows = 0; // paged_kv.cuh; n_kv_heads · block_size where a block has no other arrays
    int          v_tables   = 0; // from Plan::block_tables, which lead to K, to those of V; 0: one block has both
    float        scale      = 1;
    int          window     = 0;       // sliding window of prefill; 0: none. In decoding the items begin where it does
    int          chunk      = 0;       // prefill sees only the chunk of so many positions that a tile lies in; 0: all
    float        softcap    = 0;       // 0: none
    const float* sinks      = nullptr; // [heads] scores without a value that take part in the softmax, or null
    bool         coded      = false;   // K and V have codes: k_array and v_array in place of cache_k and cache_v
    KvArray      k_array, v_array;
    bool         latent() const { return coded ? v_array.rows == nullptr : cache_v == nullptr; }
};

// Split lengths that suit a step: `work` is the number of positions times KV heads that its queries attend to. With
// fixed_split_length, which is always possible, a query has the same sums in any step.
constexpr int fixed_split_length = 256;
struct SplitLengths {
    int length       = fixed_split_length;
    int short_length = 0; // of SplitKvItems::n_short; 0: there are none
};
// The number of splits of a launch, beyond one for each sequence, that keeps all SMs busy whatever the shape. The workspace has room for
// so many; longer contexts get longer splits.
int most_splits(const Context& gpu);
// value_dim: less than head_dim in a latent cache. coded: K and V are codes.
SplitLengths split_lengths(const Context& gpu, int head_dim, int value_dim, std::int64_t work, bool coded = false);
// Whether SplitKvItems::one_warp suits a step with so many sequences of one query, each in one split; `positions`: of all together.
// shared: SharedTiles have their other positions.
bool one_warp_each(const Context& gpu, int head_dim, int value_dim, int n_kv_heads, int n_sequences,
                   std::int64_t positions, int longest, bool shared);
// Some positions in splits of equal length (but for the last one) of about `wanted`.
struct Splits {
    int n, length;
};
inline Splits splits_of(int positions, int wanted) {
    int n            = (positions + (wanted == fixed_split_length ? wanted - 1 : wanted / 2)) / wanted;
    n                = n > 0 ? n : 1;
    const int length = ((positions + n - 1) / n + 15) / 16 * 16;
    return {(positions + length - 1) / length, length};
}
// One query per item, and SharedTiles before. `partial`: [splits × heads × (value_dim + 2)] float32, for the reduction; `arrivals`: [T × heads] counters of the
// splits that are done, zero before and after.
void attention_decode(const Attention& args, const Plan& plan, float* partial, std::int32_t* arrivals, Context& gpu);
// How many queries of a KV head a SharedTile takes, times the heads of a group; 0: there is no kernel for this head_dim.
int shared_tile_rows(int head_dim, int value_dim);
// Positions of a SharedTile that suit a step; `work`: the number of positions times tiles of queries times KV heads.
int shared_split_length(const Context& gpu, std::int64_t work);
// The fastest number of queries for a tile of this head_dim; 0: there is only the plain kernel.
int prefill_tile(const Context& gpu, int head_dim, int value_dim);
struct PrefillTile {
    std::int32_t sequence, first_row, n_rows; // consecutive tokens of one sequence
};
// Prompts read K and V in many tiles of queries, so codes are first made into fp16, once for all. Item i: `n` entries of a sequence's block
// table, from `first` on, become blocks `at` .. of k and v [block][kv_head][offset][head_dim].
struct UnpackedBlocks {
    std::int32_t sequence, first, n, at;
};
void unpack_codes(const Attention& args, const Plan& plan, const UnpackedBlocks* items, int n_items, int most_entries,
                  Half* k, Half* v, Context& gpu);
// Of codes only latent rows: the others are unpacked before.
void attention_prefill(const Attention& args, const Plan& plan, const PrefillTile* tiles, int n_tiles, Context& gpu);
// prefill_tile() and attention_prefill() for Hopper; a tile of 0: not on this GPU, or not for this head_dim.
int  prefill_tile_sm90(const Context& gpu, int head_dim);
void attention_prefill_sm90(const Attention& args, const Plan& plan, const PrefillTile* tiles, int n_tiles,
                            Context& gpu);

// -- gemm/

// One of the GEMMs that share an x: out [M × N] = scale · (x · weightᵀ + bias), in fp16 or float32.
struct Projection {
    Weight       weight;
    const float* bias         = nullptr;
    void*        out          = nullptr;
    bool         out_is_float = false;
    float        scale        = 1;
};
constexpr int max_projections = 3;
// Whether the kernels below can read `weight`, 16 bytes at a time; gemm_plain() can read any weights.
bool is_regular(const Weight& weight);
void gemm_plain(const Half* x, std::int64_t m, std::int64_t k, const Projection* projections, int n_projections,
                Context& gpu);
// GEMV for up to max_gemv_rows tokens: reads each weight once, all projections in one launch. invariant: the bits of a token's
// results do not depend on M.
constexpr int max_gemv_rows = 8;
void gemv(const Half* x, int m, std::int64_t k, const Projection* projections, int n_projections, bool invariant,
          Context& gpu);
// GEMV of gate and up with the activation as its epilogue: gate.out[n] = activation(gate[n] · x) * (up[n] · x), fp16. False: not
// on this GPU, or not these weights.
bool gemv_gated(const Half* x, const Projection& gate, const Projection& up, Activation activation, Context& gpu);
// Skinny GEMM: up to max_skinny_rows tokens on tensor cores, weights of any form, read once. x has room for m rounded up to 8,
// 16, 32 or 64.
constexpr int max_skinny_rows = 64;
bool          can_skinny_gemm(const Context& gpu, const Weight& weight);
void skinny_gemm(const Half* x, int m, std::int64_t k, const Projection* projections, int n_projections, Context& gpu);
// GEMM with many tokens by cuBLASLt, weights in fp16. Null, or why there is no cuBLASLt.
const char* open_cublaslt(Context& gpu);
// A batch of n_matrices GEMMs of one shape with the same x, `weight_stride` and `out_stride` elements apart.
struct CublasltShape {
    std::int64_t n = 0, k = 0; // of a matrix
    bool         out_is_float  = false;
    int          n_matrices    = 1;
    std::int64_t weight_stride = 0, out_stride = 0;
    float        scale = 1; // of the results
};
// Times the library's algorithms for M from min_m to max_m, and keeps the fastest for some values of M; `weight` is that many
// values, whatever they are. False: no memory for the trial. A GEMM that was not tuned takes the library's heuristic.
bool tune_cublaslt(const CublasltShape& shape, const Half* weight, std::int64_t min_m, std::int64_t max_m,
                   Context& gpu);
// False: the library cannot, and has done nothing.
bool cublaslt_gemm(const Half* x, std::int64_t m, const Half* weight, const CublasltShape& shape, void* out,
                   Context& gpu);
// The values of M that are tuned, ascending. A GEMM with M up to 256 takes the algorithm of the first value that is not
// smaller; above, an algorithm that suits one M is often slower for another than the library's heuristic.
constexpr int cublaslt_m[] = {8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512, 1024, 2048};
constexpr int n_cublaslt_m = int(sizeof cublaslt_m / sizeof *cublaslt_m);
// The place in that list that serves m; n_cublaslt_m: none.
constexpr int cublaslt_bucket(std::int64_t m) {
    int at = 0;
    while (at < n_cublaslt_m && (m <= 256 ? cublaslt_m[at] < m : cublaslt_m[at] != m)) at++;
    return at;
}

// A GEMM for each of n_heads heads: of x's head [T × n_heads·x_dim] the first `cols` columns · weight_headᵀ, then the head's other
// columns as they are. weight: the matrices of all heads one after the other, [n_heads·rows × cols].
struct HeadGemm {
    const Half* x   = nullptr;
    Half*       out = nullptr;
    Weight      weight;
    int         n_heads = 0, x_dim = 0;
};
// Whether the tensor cores can: weights in fp16, of a regular shape. Others are for a slow kernel that reads any form.
bool is_regular(const HeadGemm& op);
void head_gemm(const HeadGemm& op, std::int64_t n_tokens, Context& gpu);

// -- experts/: mixtures of experts. T tokens choose k of n experts each; a pair is a token and one of its choices: t · k + slot.

// How a router's scores become the weights of the experts it chose: softmax over all, sigmoid of each, softmax over the chosen.
enum class Gating : int { softmax, sigmoid, softmax_chosen };
constexpr int most_experts = 2048, most_experts_used = 32;

// The workspace of the kernels of one mixture. For many tokens the pairs stand in the order of their experts, cut into
// tiles of pairs with one expert, so that an expert's weights are read once for a tile.
struct ExpertWorkspace {
    float*        scores   = nullptr; // [T × n]
    std::int32_t* arrivals = nullptr; // [T + 1] zero before and after
    std::int32_t* pairs    = nullptr; // [T · k]
    std::int32_t* tiles =
        nullptr; // [1 + 3 · expert_tiles()]: their number; expert, first of `pairs` and number of pairs of each
    Half* parts = nullptr; // [T · k × hidden]; on_wgmma: before that, x of each pair in the order of the tiles
};
// The fastest number of pairs of a tile; 0: each pair for itself. All operations of a mixture in a step have the same number.
// on_wgmma: of ExpertGemm.
int expert_tile(std::int64_t n_tokens, int n_experts, int n_used, bool is_fp16, bool on_wgmma);
// Tiles, at most.
constexpr std::int64_t expert_tiles(std::int64_t n_pairs, int n_experts, int tile) {
    return n_pairs / tile + (n_pairs < n_experts ? n_pairs : n_experts);
}
// The operation Route of quire.compute.program. out [T × 2k]: the experts as int32, then their weights. A token whose slot is below 0
// chooses no expert: its experts are -1. Makes the workspace's tiles, too.
struct Route {
    const Half*  x      = nullptr;                                          // [T × cols]
    const float *weight = nullptr, *bias = nullptr, *choice_bias = nullptr; // [n × cols], [n] or null
    float*       out       = nullptr;
    int          n_experts = 0, n_used = 0, cols = 0;
    Gating       gating     = Gating::softmax;
    bool         normalised = false;
    bool         in_order   = false; // the bits of a score do not depend on the number of tokens
    float        scale      = 1;
    int          n_groups = 1, n_groups_used = 1;
    float        score_scale  = 1;
    const float* expert_scale = nullptr; // [n] or null
    bool         best_alone   = false;   // of groups: their best expert counts, not their two best
};
void route(const Route& op, std::int64_t n_tokens, const std::int32_t* slots, int tile, const ExpertWorkspace& work,
           Context& gpu);
// Weights and biases of all experts stand one after the other; weight.rows is n times the rows of one expert.
struct ExpertGemm {
    const Half*  x      = nullptr;
    const float* routes = nullptr; // Route's out
    Projection   gate, up;         // gate.out is the result; down stands in `gate`
    int          n_experts = 0, n_used = 0;
    Activation   activation  = Activation::silu;
    float        scale       = 1;
    bool         alternating = false; // gate and up are one stack of 2n matrices in turn, without biases
    bool         weighs_x    = false; // the weight of a pair multiplies the x of gate and up, not the result of down
    bool         on_wgmma    = false; // tiles run in the kernel for Hopper: in both operations of a mixture, or in none
};
// Whether tiles can be multiplied with these weights, n_matrices in a stack; else a step's tile has to be 0.
bool can_group(const Weight& weight, int n_matrices);
// Whether the kernel for Hopper can run one of the two operations in tiles.
bool can_group_sm90(const ExpertGemm& op, const Context& gpu);
// gate.out [T · k × rows] = activation(gate) · up of each pair; on_wgmma: in the order of the tiles
void expert_gated(const ExpertGemm& op, std::int64_t n_tokens, int tile, const ExpertWorkspace& work, Context& gpu);
// out [T × rows] = scale · Σ over a token's pairs, in order, of weight · (x [T · k × cols], the gated results, · downᵀ + bias)
void expert_combine(const ExpertGemm& op, std::int64_t n_tokens, int tile, const ExpertWorkspace& work, Context& gpu);
// Rows of x times the sigmoid of gate · weight.
void gate_rows(Half* x, std::int64_t rows, std::int64_t cols, const Half* gate, std::int64_t gate_cols,
               const float* weight, Context& gpu);

// -- operations, as the fused kernels take them

// One operation of a program, lowered to device addresses.
struct Operation {
    enum Kind { embed, norm, gemm, gated_gemm, rope_and_store, attention, add, select_rows, put_columns };
    Kind         kind = embed;
    Weight       weight;                // embed
    const void*  x           = nullptr; // norm, gemm, gated_gemm: the input; add: the summand; select_rows: the source
    float*       residual    = nullptr; // norm, add; embed, select_rows: the result
    Activation   activation  = Activation::silu; // gated_gemm
    const float* norm_weight = nullptr;
    float        eps         = 0;
    void*        out         = nullptr;       // norm; put_columns: the first column that it writes
    bool         x_is_float  = false;         // norm
    std::int64_t rows = 0, cols = 0;          // of x: M, K
    Projection   projection[max_projections]; // gemm; gated_gemm: gate and up
    int          n_projections = 0;
    RopeStore    rope;
    Attention    attend;
};

// -- gemm/prefill_sm90.cu: GEMM with the many tokens of a prompt

// How many of these operations, from the first one on, one launch runs, once the weights are fp16: 0: none, 1: the GEMM or
// gated GEMM, 2: the GEMM of q, k and v with RoPE and KV store as its epilogue.
int match_prefill_gemm(const Operation* ops, int n_ops, const Context& gpu);
// Runs that many of them; match_prefill_gemm() has said that it can. The bits of a token's results do not depend on M.
int run_prefill_gemm(const Operation* ops, int n_ops, const Plan& plan, Context& gpu);

// -- gemm/prefill_fp8.cu: the same with x and weights in e4m3, twice as fast, not exact

bool has_fp8_gemm(const Context& gpu); // as Hopper GPUs have
// Whether weights of this shape can be multiplied so.
constexpr bool can_be_fp8(std::int64_t rows, std::int64_t cols) { return rows % 8 == 0 && cols % 16 == 0; }
// The largest magnitude of a block, or of a row, becomes the largest code.
void weight_to_fp8(const Half* weight, std::int64_t rows, std::int64_t cols, const Fp8Matrix& out, Context& gpu);
void rows_to_fp8(const Half* x, std::int64_t rows, std::int64_t cols, const Fp8Matrix& out, Context& gpu);
// run_prefill_gemm() with `x` in place of the operation's and Weight::fp8 of all its weights. A sum's products are added in the order of
// the blocks of K, each block by the tensor cores, which keep some 14 bits.
int run_fp8_gemm(const Operation* ops, int n_ops, const Fp8Matrix& x, const Plan& plan, Context& gpu);

// -- fused/layer_kernel.cu: all operations between two attentions of a step of 2 to 128 tokens, as one persistent kernel

// At most four GEMMs (all weights in fp16, or all quantised), each of which reads the result of the one before, with their epilogues: RMS
// norms that add a GEMM's result to the residual, SwiGLU, RoPE and KV store. A result that only an epilogue reads is not written to memory.
constexpr int max_layer_kernel_rows = 128;
// With quantised weights a step of more tokens runs in passes of up to 256: reading the weights again costs less than making fp16 of
// them in memory.
constexpr int max_quantised_layer_rows = 768;
// Takes the workspace, once; its bytes, 0 where this GPU has no such kernel. The kernel has grid barriers: it is launched
// cooperatively but where begin_launches() said true.
std::size_t prepare_layer_kernel(Context& gpu);
// How many of these operations, from the first one on, the kernel runs in a step of 2 to n_tokens tokens; 0: none. Launches nothing.
int match_layer_kernel(const Operation* ops, int n_ops, int n_tokens, const Context& gpu);
// Whether it also runs a GEMM of this weight that stands alone.
bool can_layer_gemm(const Context& gpu, const Weight& weight);
// Runs the operations that match_layer_kernel() counts, or one GEMM of weights for which can_layer_gemm() is true, and returns their
// number, or 0 where the launch is impossible now.
int run_layer_kernel(const Operation* ops, int n_ops, int n_tokens, const Plan& plan, Context& gpu);

// -- fused/decode_megakernel.cu: a step of one token as one persistent kernel

// Compiles the operations of a step of one token with one row of logits into the kernel's program. Null: not on this GPU, or
// not the operations of a model that it knows.
void* make_decode_megakernel(const Operation* ops, int n_ops, Context& gpu);
// Into how many splits a long sequence is cut for it: each CTA, one of each SM, then has one, for the heads that it takes together.
int megakernel_splits(const Context& gpu, int n_heads, int n_kv_heads);
// `partial`, `arrivals`: as for attention_decode(). False: not launched, as something else holds some of the SMs.
bool run_decode_megakernel(void* megakernel, const Plan& plan, float* partial, std::int32_t* arrivals, Context& gpu);
void destroy_decode_megakernel(void* megakernel);

} // namespace quire::cuda
