// quire.compute.cpu.kernels: the inner loops of the CPU backend, one source compiled for each instruction set.
//
// Each loop is an always-inline function over vectors of 16 floats. At the end of the file it is inlined into functions with
// a target attribute (none, AVX2, AVX-512), and the compiler translates the vectors to what that target has. So the plain
// path is the reference for the wide ones, and the program starts on any x86-64.
//
// Determinism: the order in which an output element is computed depends only on its own row. Products are added in
// the order given in matmul_tiles.h, with ascending k; attention processes positions in chunks of 64, counted from the start of
// the sequence. Tiles over rows and tokens only decide which elements are computed together.
export module quire.compute.cpu.kernels;

import quire.core.base;
import quire.model_file.quants;
import quire.core.std;
import quire.core.tensor;

export namespace quire {

// Types whose products are sums of integers, of 16 rows interleaved (matmul_tiles.h).
constexpr bool integer_products(DType type) {
    switch (type) {
        case DType::Q4_0:
        case DType::Q4_1:
        case DType::Q5_0:
        case DType::Q5_1:
        case DType::Q8_0:
        case DType::Q4_K:
        case DType::Q5_K:
        case DType::Q6_K: return true;
        default: return false;
    }
}

// Those that the products want interleaved beforehand. The others' blocks take longer to come from memory than to turn, and
// are read as they stand in the file.
constexpr bool interleaved_at_load(DType type) {
    return integer_products(type) && type != DType::Q8_0 && type != DType::Q6_K;
}

// Those whose whole numbers have 14 bits, with a scale in them, instead of at most 8.
constexpr bool large_integers(DType type) { return type == DType::Q6_K; }

// The largest whole number that x is rounded to: a weight's beside it still fits 16 bits. NaN and infinity come back through
// the scale.
constexpr std::int32_t largest_integer(bool large_weights) { return large_weights ? 32767 - 4096 : 32767 - 128; }

// The input of such a product: n rows rounded to 16 bits, with a scale for each 32 places: 256 times finer than the 8 bits
// that are usual, so that the products are those of floats for all that matters.
struct RoundedRows {
    std::int64_t  n = 0, cols = 0;
    std::int16_t* integers  = nullptr; // [cols / 32][n][32], each 4 places in the order 0 2 1 3
    float*        scales    = nullptr; // [cols / 32][n]
    float*        sums      = nullptr; // likewise, of the integers, times the scale
    std::int32_t* products  = nullptr; // likewise, - Σ of the products of neighbours, for kernels that use them
    bool          for_large = false;   // any of the weights has large_integers()
};

// Rows first .. last-1 of out = x · weightᵀ + bias. x [n × cols], out [n × weight.rows], bias [weight.rows] or null.
struct MatmulTask {
    const TensorView*  weight  = nullptr; // interleaved, if interleaved_at_load()
    const float*       bias    = nullptr;
    const float*       x       = nullptr;
    const RoundedRows* rounded = nullptr; // x, for products of integers
    const float*       packed  = nullptr; // x as pack_rows orders it, for products of floats
    float*             out     = nullptr;
    std::int64_t       n       = 0;
    std::int64_t       first = 0, last = 0; // `first` a multiple of 16; `last` too, or all the rows
    float*             scratch = nullptr;   // matmul_scratch floats
};
inline constexpr std::int64_t tokens_at_once = 256; // at most, of products of integers
// Of products of floats: places and rows whose weights, and tokens whose sums stay in the caches.
inline constexpr std::int64_t widest_panel = 1024, float_block = 48, float_tokens = 64;
inline constexpr std::size_t  matmul_scratch = std::size_t(float_block * (float_tokens * 16 + widest_panel));

// Neighbouring tokens of one sequence, over the paged cache.
struct AttentionPart {
    const float*        q        = nullptr; // first token's row; the heads that share the task's kv head start here
    float*              out      = nullptr; // likewise
    int                 n_tokens = 0, first_position = 0;
    const std::int32_t* table = nullptr; // the sequence's blocks
};

// Queries of some sequences that share a kv head. Where the sequences begin with the same blocks, these are read once.
struct AttentionTask {
    std::span<const AttentionPart> parts;
    int              shared     = 0; // leading positions in the same blocks: whole chunks, seen by all queries
    std::int64_t     row_stride = 0; // floats from one token to the next, in q and out
    int              n_heads = 0, head_dim = 0;
    int              window       = 0; // 0: all; else nothing is shared
    float            scale        = 1;
    const std::byte* k            = nullptr; // this kv head's part of block 0
    const std::byte* v            = nullptr;
    std::size_t      block_stride = 0; // bytes from a block's part to the next block's
    int              block_size   = 0;
    DType            kv_type      = DType::F16;
    float*           scratch      = nullptr; // attention_scratch() floats
};
inline constexpr int attention_chunk = 64; // positions
std::size_t          attention_scratch(int n_queries, int head_dim);

struct CpuKernels {
    const char* name;
    // Groups of 16 rows first .. last-1 of a weight of integer products; out takes whole groups, 16 · row_bytes each.
    void (*interleave)(const TensorView& weight, std::byte* out, std::int64_t first, std::int64_t last);
    // Tokens first .. last-1 of x [n × cols].
    void (*round_rows)(const float* x, const RoundedRows& to, std::int64_t first, std::int64_t last);
    // x [n × cols] in the order in which products of floats read it, to out [n · cols]: tiles of tokens first .. last-1 of
    // the float_tiles(n).
    std::int64_t (*float_tiles)(std::int64_t n);
    void (*pack_rows)(const float* x, std::int64_t n, std::int64_t cols, float* out, std::int64_t first,
                      std::int64_t last);
    void (*matmul)(const MatmulTask&);
    void (*attention)(const AttentionTask&);
    // One row: residual += x if there is a residual, then out = rmsnorm(residual or x) * weight. All [n].
    void (*norm)(const float* x, float* residual, const float* weight, float eps, float* out, std::int64_t n);
    void (*silu_mul)(float* gate, const float* up, std::int64_t n); // gate = silu(gate) * up
    void (*add)(float* x, const float* y, std::int64_t n);
    void (*store_f16)(const float* x, std::uint16_t* out, std::int64_t n);
};

// By name ("plain", "avx2", "avxvnni", "avx512"), or the widest that processor and operating system grant for "".
// Null: no such name, or not granted here.
const CpuKernels* cpu_kernels(std::string_view name = "");

} // namespace quire

module :private;

namespace quire {

typedef float         f32x8 __attribute__((vector_size(32)));
typedef float         f32x16 __attribute__((vector_size(64)));
typedef double        f64x16 __attribute__((vector_size(128)));
typedef std::int32_t  i32x4 __attribute__((vector_size(16)));
typedef std::int32_t  i32x8 __attribute__((vector_size(32)));
typedef std::int32_t  i32x16 __attribute__((vector_size(64)));
typedef std::uint32_t u32x8 __attribute__((vector_size(32)));
typedef std::uint32_t u32x16 __attribute__((vector_size(64)));
typedef std::int16_t  i16x16 __attribute__((vector_size(32)));
typedef std::int16_t  i16x32 __attribute__((vector_size(64)));
typedef std::uint16_t u16x8 __attribute__((vector_size(16)));
typedef std::uint16_t u16x16 __attribute__((vector_size(32)));
typedef std::int8_t   i8x16 __attribute__((vector_size(16)));
typedef std::int8_t   i8x32 __attribute__((vector_size(32)));
typedef std::uint8_t  u8x32 __attribute__((vector_size(32)));
typedef std::uint8_t  u8x64 __attribute__((vector_size(64)));
typedef std::uint16_t u16x32 __attribute__((vector_size(64)));
typedef _Float16      f16x8 __attribute__((vector_size(16)));
typedef _Float16      f16x16 __attribute__((vector_size(32)));

// Vectors never cross a call: their ABI depends on the target. So helpers are macros or take pointers.
#define LOAD16(v, p) __builtin_memcpy(&(v), (p), sizeof(v))
#define STORE16(p, v) __builtin_memcpy((p), &(v), sizeof(v))
#define INLINE [[gnu::always_inline]] inline
// The large parts of a product, in one function: but for the checks of a sanitizer, with which such functions take a quarter of
// an hour to compile. (A call costs 6 to 17 %.)
#if __has_feature(address_sanitizer)
#define INLINE_PARTS [[gnu::noinline]]
#else
#define INLINE_PARTS INLINE
#endif
// A float in every lane. (f32x16{} + x costs an addition, as -0 would become 0.)
#define ALL(x) ((f32x16)(i32x16{} + std::bit_cast<std::int32_t>(x)))

// a · b + c of vectors, rounded once. Without an instruction for it in double, which gives the same bits but where the
// result is rounded twice in a row to the other side: the plain path is the reference of the others.
#define AS_DOUBLE(v) __builtin_convertvector(v, f64x16)
#define PLAIN_FMA(a, b, c) __builtin_convertvector(AS_DOUBLE(a) * AS_DOUBLE(b) + AS_DOUBLE(c), f32x16)
#define EITHER_FMA(out, a, b, c)                                       \
    do {                                                               \
        if constexpr (Fma) (out) = __builtin_elementwise_fma(a, b, c); \
        else (out) = PLAIN_FMA(a, b, c);                               \
    } while (0)

// Of products of floats: more tokens than these are many.
constexpr std::int64_t few_tokens = 32;

// What a block of such a type is made of: pieces of 16 bytes from byte `at` on, and smaller ones.
struct Piece {
    std::size_t offset, bytes;
};
struct Pieces {
    std::size_t          at, sixteens;
    std::array<Piece, 3> small{};
};

// One token's head.
struct Query {
    const float* q;
    std::int64_t position;
};

std::size_t attention_scratch(int n_queries, int head_dim) {
    // K and V of a chunk, 16 rows, the scores of some queries; an accumulator per query, its maximum and sum, and a Query
    const auto d = std::size_t(head_dim + 15) / 16 * 16;
    return (2 * attention_chunk + 16) * d + 8 * attention_chunk +
           std::size_t(n_queries) * (d + 2 + sizeof(Query) / sizeof(float));
}

// The 16 lanes added pairwise, always in this order.
INLINE float sum_lanes(const float* lane) {
    float s8[8], s4[4];
    for (int i = 0; i < 8; i++) s8[i] = lane[i] + lane[i + 8];
    for (int i = 0; i < 4; i++) s4[i] = s8[i] + s8[i + 4];
    return (s4[0] + s4[2]) + (s4[1] + s4[3]);
}

// (What the compiler makes of its own reduction looks after NaN lane by lane.)
INLINE float largest_lane(const f32x16& lanes) {
#define TURNED(v, ...) __builtin_shufflevector(v, v, __VA_ARGS__)
    f32x16 v = lanes, other;
    other    = TURNED(v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    v        = v > other ? v : other;
    other    = TURNED(v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    v        = v > other ? v : other;
    other    = TURNED(v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    v        = v > other ? v : other;
    return v[0] > v[1] ? v[0] : v[1];
#undef TURNED
}

template <bool Fma>
INLINE float multiply_add(float a, float b, float c) {
    if constexpr (Fma) return __builtin_fmaf(a, b, c);
    else return float(double(a) * double(b) + double(c));
}

// out[i] = exp(in[i]) for 16 values; relative error below 2e-7. in may be out.
// exp(x) = 2^n · exp(r), n = round(x / ln 2), r in [-0.347, 0.347]: Taylor to the 7th power. NaN stays NaN.
template <bool Fma>
INLINE void exp16(const float* in, float* out) {
    f32x16 x;
    LOAD16(x, in);
    const i32x16 a_number = x == x;
    const f32x16 low = f32x16{} - 87.0f, high = f32x16{} + 88.0f;
    x        = __builtin_elementwise_min(__builtin_elementwise_max(x, low), high);
    f32x16 n = __builtin_elementwise_roundeven(x * 1.44269504f);
    f32x16 r = x - n * 0.693359375f; // ln 2 in two parts: the first is exact times n
    r        = r - n * -2.12194440e-4f;
    f32x16 p = f32x16{} + 1.0f / 5040;
    for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
        f32x16 term = f32x16{} + c;
        EITHER_FMA(p, p, r, term);
    }
    i32x16 power = (__builtin_convertvector(n, i32x16) + 127) << 23;
    f32x16 scale;
    __builtin_memcpy(&scale, &power, sizeof scale);
    p *= scale;
    p = (f32x16)((i32x16)p | ~a_number); // all bits set: a NaN
    STORE16(out, p);
}

// d[j], lane r: the j-th 4 bytes at p + r · stride
INLINE void turn(const std::byte* p, std::size_t stride, i32x16* d) {
    i32x16 v[4];
    for (std::size_t i = 0; i < 4; i++) { // 128-bit lane l holds row 4l + i
        i32x4 a, b, c, e;
        LOAD16(a, p + i * stride);
        LOAD16(b, p + (i + 4) * stride);
        LOAD16(c, p + (i + 8) * stride);
        LOAD16(e, p + (i + 12) * stride);
        const i32x8 low  = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7),
                    high = __builtin_shufflevector(c, e, 0, 1, 2, 3, 4, 5, 6, 7);
        v[i]             = __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    }
#define LOW(x, y) __builtin_shufflevector(x, y, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
#define HIGH(x, y) __builtin_shufflevector(x, y, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31)
#define LOW2(x, y) __builtin_shufflevector(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define HIGH2(x, y) __builtin_shufflevector(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
    const i32x16 ab_low = LOW(v[0], v[1]), ce_low = LOW(v[2], v[3]), ab_high = HIGH(v[0], v[1]),
                 ce_high = HIGH(v[2], v[3]);
    d[0]                 = LOW2(ab_low, ce_low);
    d[1]                 = HIGH2(ab_low, ce_low);
    d[2]                 = LOW2(ab_high, ce_high);
    d[3]                 = HIGH2(ab_high, ce_high);
#undef LOW
#undef HIGH
#undef LOW2
#undef HIGH2
}

// out[0 .. cols) = one row of any type as floats
template <bool Wide>
INLINE void widen_row(DType type, const std::byte* row, float* out, std::int64_t cols) {
    std::int64_t k = 0;
    if (Wide && type == DType::F16) { // there is an instruction for this
        for (; k + 16 <= cols; k += 16) {
            f16x16 h;
            LOAD16(h, row + 2 * k);
            f32x16 f = __builtin_convertvector(h, f32x16);
            STORE16(out + k, f);
        }
        row += 2 * k;
    }
    dequantize_inline(type, row, out + k, cols - k);
}

// -- attention: online softmax (running maximum, sum and weighted V; rescaled when the maximum grows), over chunks of 64
// positions. Places beyond a query's own positions weigh exactly nothing, so that they may be computed beside the others;
// but where there is a NaN or an infinity, which nothing can weigh to nothing, each query looks at its own places alone.

// One chunk as floats: K by dimension, so that a vector holds 16 positions, and V by position.
struct Chunk {
    float* k;    // [head_dim × 64]
    float* v;    // [64 × padded]
    float* rows; // [16 × padded], on the way to k
    int    padded;
};

template <bool Fma>
INLINE void load_chunk(const AttentionTask& task, const std::int32_t* table, int chunk, int from, int to,
                       const Chunk& c) {
    const int         D        = task.head_dim;
    const auto        width    = std::size_t(c.padded);
    const std::size_t row_size = row_bytes(task.kv_type, D);
    const auto        place    = [&](int p) __attribute__((always_inline)) {
        return std::size_t(table[p / task.block_size]) * task.block_stride +
               std::size_t(p % task.block_size) * row_size;
    };
    for (int p = from; p < to; p++)
        widen_row<Fma>(task.kv_type, task.v + place(p), c.v + std::size_t(p - chunk) * width, D);
    for (int first = from / 16 * 16; first < to; first += 16) {
        for (int p = std::max(first, from); p < std::min(first + 16, to); p++)
            widen_row<Fma>(task.kv_type, task.k + place(p), c.rows + std::size_t(p - first) * width, D);
        for (int d = 0; d < c.padded; d += 4) {
            i32x16 turned[4];
            turn(reinterpret_cast<const std::byte*>(c.rows + d), width * sizeof(float), turned);
            for (int i = 0; i < 4; i++) STORE16(c.k + (d + i) * attention_chunk + (first - chunk), turned[i]);
        }
    }
}

// Whether V of places a .. b-1 is finite.
INLINE bool finite_values(const Chunk& c, int a, int b) {
    i32x16 special{};
    for (int i = a * c.padded; i < b * c.padded; i += 16) {
        i32x16 v;
        LOAD16(v, c.v + i);
        special |= (v & 0x7f800000) == 0x7f800000;
    }
    return __builtin_reduce_or(special) == 0;
}

// out[i][16 · V] = out[i][16 · V] · grow[i] (0 without grow) + Σ over steps first .. last-1 of a[i][step] · b[step][16 · V], for Q rows:
// scores of 16 · V positions (steps are dimensions), and sums of 16 · V dimensions (steps are positions).
template <bool Fma, int Q, int V>
INLINE void weighted_sums(const float* const* a, const float* b, std::int64_t b_width, int first, int last,
                          const float* grow, float* const* out) {
    f32x16 sum[Q][V];
    for (int i = 0; i < Q; i++)
        for (int j = 0; j < V; j++) sum[i][j] = f32x16{};
    for (int step = first; step < last; step++) {
        f32x16 v[V];
        for (int j = 0; j < V; j++) LOAD16(v[j], b + step * b_width + 16 * j);
        for (int i = 0; i < Q; i++) {
            const f32x16 w = ALL(a[i][step]);
            for (int j = 0; j < V; j++) EITHER_FMA(sum[i][j], w, v[j], sum[i][j]);
        }
    }
    for (int i = 0; i < Q; i++)
        for (int j = 0; j < V; j++) {
            f32x16 old{};
            if (grow) LOAD16(old, out[i] + 16 * j);
            if (grow) sum[i][j] += old * grow[i];
            STORE16(out[i] + 16 * j, sum[i][j]);
        }
}

// One query's scores of a chunk, of which it sees places a .. b-1, become weights. Returns what its earlier sums shrink by.
template <bool Fma>
INLINE float soften(float* score, int a, int b, float scale, float* top, float* sum) {
    i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    f32x16 best = f32x16{} - std::numeric_limits<float>::infinity(), hidden = best, total{};
    for (int j = 0; j < attention_chunk; j += 16) {
        f32x16       s;
        const i32x16 seen = (lane + j >= a) & (lane + j < b);
        LOAD16(s, score + j);
        s    = (f32x16)(((i32x16)(s * scale) & seen) | ((i32x16)hidden & ~seen));
        best = __builtin_elementwise_max(best, s);
        STORE16(score + j, s);
    }
    const float highest = std::max(*top, largest_lane(best));
    for (int j = 0; j < attention_chunk; j += 16) {
        f32x16       s;
        const i32x16 seen = (lane + j >= a) & (lane + j < b);
        LOAD16(s, score + j);
        s -= highest;
        STORE16(score + j, s);
        exp16<Fma>(score + j, score + j);
        LOAD16(s, score + j);
        s = (f32x16)((i32x16)s & seen);
        total += s;
        STORE16(score + j, s);
    }
    float lanes[16];
    STORE16(lanes, total);
    const float shrink = *top == highest ? 1.0f : std::exp(*top - highest);
    *top               = highest;
    *sum               = *sum * shrink + sum_lanes(lanes);
    return shrink;
}

// Queries first .. first + Q - 1 over a chunk, of which `from` .. `to` are there.
template <bool Fma, int Q, int V>
INLINE void chunk_queries(const AttentionTask& task, const Query* query, const Chunk& c, int chunk, int from, int to,
                          int first, float* acc, float* top, float* sum, float* scores) {
    const float* q[Q];
    float *      row[Q], *out[Q], grow[Q], ones[Q];
    int          low = attention_chunk, high = 0; // what any of them sees
    for (int i = 0; i < Q; i++) {
        q[i]    = query[first + i].q;
        row[i]  = scores + i * attention_chunk;
        ones[i] = 1;
    }
    for (int j = 0; j < attention_chunk; j += 16 * V) {
        for (int i = 0; i < Q; i++) out[i] = row[i] + j;
        for (int d = 0; d < task.head_dim; d += 32) // sums of sums: shorter chains round less
            weighted_sums<Fma, Q, V>(q, c.k + j, attention_chunk, d, std::min(d + 32, task.head_dim),
                                     d > 0 ? ones : nullptr, out);
    }
    for (int i = 0; i < Q; i++) {
        const int position = int(query[first + i].position);
        const int a        = (task.window > 0 ? std::max(from, position - task.window + 1) : from) - chunk;
        const int b        = std::min(to, position + 1) - chunk;
        grow[i]            = 1;
        if (a < b) {
            grow[i] = soften<Fma>(row[i], a, b, task.scale, top + first + i, sum + first + i);
            low = std::min(low, a), high = std::max(high, b);
        } else {
            std::fill(row[i], row[i] + attention_chunk, 0.0f);
        }
    }
    int d = 0;
    for (; d + 16 * V <= c.padded; d += 16 * V) {
        for (int i = 0; i < Q; i++) out[i] = acc + (first + i) * c.padded + d;
        weighted_sums<Fma, Q, V>(row, c.v + d, c.padded, low, high, grow, out);
    }
    for (; d < c.padded; d += 16) {
        for (int i = 0; i < Q; i++) out[i] = acc + (first + i) * c.padded + d;
        weighted_sums<Fma, Q, 1>(row, c.v + d, c.padded, low, high, grow, out);
    }
}

template <bool Fma, int Q, int V>
INLINE void attention_body(const AttentionTask& task) {
    const int D = task.head_dim, padded = (D + 15) / 16 * 16;
    int       n_queries = 0;
    for (const AttentionPart& part : task.parts) n_queries += part.n_tokens * task.n_heads;
    float* at   = task.scratch;
    auto   take = [&](int n) __attribute__((always_inline)) {
        float* begin = at;
        at += n;
        return begin;
    };
    const Chunk c{take(padded * attention_chunk), take(attention_chunk * padded), take(16 * padded), padded};
    float *     scores = take(Q * attention_chunk), *acc = take(n_queries * padded);
    auto*       query = reinterpret_cast<Query*>(take(n_queries * int(sizeof(Query) / sizeof(float))));
    float *     top = take(n_queries), *sum = take(n_queries);
    std::fill(acc, acc + n_queries * padded, 0.0f);
    std::fill(top, top + n_queries, -std::numeric_limits<float>::infinity());
    std::fill(sum, sum + n_queries, 0.0f);
    for (int p = 0; p < attention_chunk && D < padded; p++) // the padding of V's rows stays zero
        std::fill(c.v + p * padded + D, c.v + (p + 1) * padded, 0.0f);
    int next = 0;
    for (const AttentionPart& part : task.parts)
        for (int t = 0; t < part.n_tokens; t++)
            for (int h = 0; h < task.n_heads; h++)
                query[next++] = {part.q + t * task.row_stride + h * D, part.first_position + t};

    const auto pass = [&](int chunk, int from, int to, int first, int last, bool apart) __attribute__((always_inline)) {
        int i = first;
        for (; !apart && i + Q <= last; i += Q)
            chunk_queries<Fma, Q, V>(task, query, c, chunk, from, to, i, acc, top, sum, scores);
        for (; i < last; i++) chunk_queries<Fma, 1, V>(task, query, c, chunk, from, to, i, acc, top, sum, scores);
    };
    // What all share first, then each part alone: every query sees its chunks in the same order as without the others.
    const int n_shared_chunks = task.shared / attention_chunk;
    int       first           = 0;
    for (int p = -1; p < int(task.parts.size()); p++) {
        const AttentionPart& part  = task.parts[std::size_t(std::max(p, 0))];
        const int            end   = p < 0 ? task.shared : part.first_position + part.n_tokens; // of what is visible
        const int            begin = task.window > 0 ? std::max(part.first_position - task.window + 1, 0) : 0;
        const int            last  = p < 0 ? n_queries : first + part.n_tokens * task.n_heads;
        for (int i = p < 0 ? 0 : std::max(n_shared_chunks, begin / attention_chunk); i * attention_chunk < end; i++) {
            const int chunk = i * attention_chunk, from = std::max(chunk, begin),
                      to = std::min(chunk + attention_chunk, end);
            load_chunk<Fma>(task, part.table, chunk, from, to, c);
            const bool all_see = p < 0 || part.n_tokens == 1 || (task.window == 0 && to <= part.first_position + 1);
            pass(chunk, from, to, first, last, !all_see && !finite_values(c, from - chunk, to - chunk));
        }
        if (p >= 0) first = last;
    }
    next = 0;
    for (const AttentionPart& part : task.parts)
        for (int t = 0; t < part.n_tokens; t++)
            for (int h = 0; h < task.n_heads; h++, next++) {
                float* out = part.out + t * task.row_stride + h * D;
                for (int d = 0; d < D; d++) out[d] = acc[next * padded + d] / sum[next];
            }
}

// -- the small ones

template <bool Fma>
INLINE void norm_body(const float* x, float* residual, const float* weight, float eps, float* out, std::int64_t n) {
    if (residual) {
        for (std::int64_t i = 0; i < n; i++) residual[i] += x[i];
        x = residual;
    }
    f32x16       sum{};
    std::int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        f32x16 v;
        LOAD16(v, x + i);
        EITHER_FMA(sum, v, v, sum);
    }
    float lane[16];
    STORE16(lane, sum);
    float total = sum_lanes(lane);
    for (; i < n; i++) total = multiply_add<Fma>(x[i], x[i], total);
    const float scale = 1 / std::sqrt(total / float(n) + eps);
    for (i = 0; i < n; i++) out[i] = x[i] * scale * weight[i];
}

template <bool Fma>
INLINE void silu_mul_body(float* gate, const float* up, std::int64_t n) {
    for (std::int64_t i = 0; i < n; i += 16) {
        const auto bytes = std::size_t(std::min<std::int64_t>(16, n - i)) * sizeof(float);
        f32x16     g{}, u{}, e;
        if (bytes == sizeof g) { // of a size the compiler knows
            LOAD16(g, gate + i);
            LOAD16(u, up + i);
        } else {
            __builtin_memcpy(&g, gate + i, bytes);
            __builtin_memcpy(&u, up + i, bytes);
        }
        float negative[16];
        e = -g;
        STORE16(negative, e);
        exp16<Fma>(negative, negative);
        LOAD16(e, negative);
        g = g / (1 + e) * u;
        if (bytes == sizeof g) STORE16(gate + i, g);
        else __builtin_memcpy(gate + i, &g, bytes);
    }
}

INLINE void add_body(float* x, const float* y, std::int64_t n) {
    for (std::int64_t i = 0; i < n; i++) x[i] += y[i];
}

template <bool Wide>
INLINE void store_f16_body(const float* x, std::uint16_t* out, std::int64_t n) {
    std::int64_t i = 0;
    for (; Wide && i + 16 <= n; i += 16) {
        f32x16 f;
        LOAD16(f, x + i);
        f16x16 h = __builtin_convertvector(f, f16x16);
        STORE16(out + i, h);
    }
    for (; i < n; i++) out[i] = f32_to_f16(x[i]);
}

// -- sets of functions per target; the includes see different DOTs. Products of integers come in more ways than all else.

#define FLOATS(NAME, FMA_)                                                                                          \
    void float_matmul_##NAME(const MatmulTask& task) { NAME::float_matmul(task); }                                  \
    void pack_rows_##NAME(const float* x, std::int64_t n, std::int64_t cols, float* out, std::int64_t first,        \
                          std::int64_t last) {                                                                      \
        NAME::pack_rows_body(x, n, cols, out, first, last);                                                         \
    }                                                                                                               \
    std::int64_t float_tiles_##NAME(std::int64_t n) { return NAME::float_tiles_body(n); }                           \
    void         attention_##NAME(const AttentionTask& task) { attention_body<FMA_, ATTENTION_TILE>(task); }        \
    void norm_##NAME(const float* x, float* residual, const float* weight, float eps, float* out, std::int64_t n) { \
        norm_body<FMA_>(x, residual, weight, eps, out, n);                                                          \
    }                                                                                                               \
    void silu_mul_##NAME(float* gate, const float* up, std::int64_t n) { silu_mul_body<FMA_>(gate, up, n); }        \
    void add_##NAME(float* x, const float* y, std::int64_t n) { add_body(x, y, n); }                                \
    void store_f16_##NAME(const float* x, std::uint16_t* out, std::int64_t n) { store_f16_body<FMA_>(x, out, n); }

#define INTEGERS(NAME, FLOATS_OF)                                                                          \
    void matmul_##NAME(const MatmulTask& task) {                                                           \
        if (integer_products(task.weight->type)) NAME::integer_matmul(task);                               \
        else float_matmul_##FLOATS_OF(task);                                                               \
    }                                                                                                      \
    void interleave_##NAME(const TensorView& w, std::byte* out, std::int64_t first, std::int64_t last) {   \
        NAME::interleave_body(w, out, first, last);                                                        \
    }                                                                                                      \
    void round_rows_##NAME(const float* x, const RoundedRows& to, std::int64_t first, std::int64_t last) { \
        NAME::round_rows_body(x, to, first, last);                                                         \
    }

#define TABLE(NAME, FLOATS_OF, SPOKEN)                       \
    const CpuKernels NAME##_kernels{SPOKEN,                  \
                                    interleave_##NAME,       \
                                    round_rows_##NAME,       \
                                    float_tiles_##FLOATS_OF, \
                                    pack_rows_##FLOATS_OF,   \
                                    matmul_##NAME,           \
                                    attention_##FLOATS_OF,   \
                                    norm_##FLOATS_OF,        \
                                    silu_mul_##FLOATS_OF,    \
                                    add_##FLOATS_OF,         \
                                    store_f16_##FLOATS_OF};

// Two int16 in every 32 bits of a vector.
#define PAIR(x) ((i16x32)(i32x16{} + std::bit_cast<std::int32_t>(std::array{(x)[0], (x)[1]})))
#define PLAIN_BYTE_DOT(sum, u, s)                                                      \
    do {                                                                               \
        DOT(sum, (i16x32)((u16x32)(u) & 255), (i16x32)(s) << 8 >> 8); /* even bytes */ \
        DOT(sum, (i16x32)((u16x32)(u) >> 8), (i16x32)(s) >> 8);                        \
    } while (0)

#define BYTE_DOT(sum, u, s) PLAIN_BYTE_DOT(sum, u, s)
#define SPLIT_BYTES 0
#define PAIRED_PLACES 0
#define ANY_NEGATIVE(v) (__builtin_reduce_or(v) < 0)

#define FMA(a, b, c) PLAIN_FMA(a, b, c)
#define FUSED false
#define DOT_TOKENS 1
#define FEW 2, 1, 512
#define MANY 2, 1, 512
#define ATTENTION_TILE 1, 2
#define FROM_HALVES(out, h)                                                                                   \
    do {                                                                                                      \
        const u16x16 halves_ = (h);                                                                           \
        for (int r_ = 0; r_ < 16; r_++) {                                                                     \
            const std::uint8_t bytes_[2] = {std::uint8_t(halves_[r_] & 255), std::uint8_t(halves_[r_] >> 8)}; \
            (out)[r_]                    = half_at(bytes_);                                                   \
        }                                                                                                     \
    } while (0)
#define DOT(sum, w, x)                                                                                          \
    do {                                                                                                        \
        const i16x32 w_ = (w), x_ = (x);                                                                        \
        for (int r_ = 0; r_ < 16; r_++) (sum)[r_] += w_[2 * r_] * x_[2 * r_] + w_[2 * r_ + 1] * x_[2 * r_ + 1]; \
    } while (0)
namespace plain {
using Lanes = f32x16;
#include "matmul_tiles.h"
} // namespace plain
FLOATS(plain, false)
INTEGERS(plain, plain)
TABLE(plain, plain, "plain")
#undef FMA
#undef FUSED
#undef DOT_TOKENS
#undef FEW
#undef MANY
#undef ATTENTION_TILE
#undef FROM_HALVES
#undef DOT

#define FMA(a, b, c) __builtin_elementwise_fma(a, b, c)
#define FUSED true
#define DOT_TOKENS 4
#define FEW 3, 4, 512
#define MANY 3, 4, 1024
#define ATTENTION_TILE 2, 2
#define FROM_HALVES(out, h) ((out) = __builtin_convertvector((f16x16)(h), f32x16))
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#define DOT(sum, w, x) dot_by_halves(sum, w, x)
INLINE void dot_by_halves(i32x16& sum, const i16x32& w, const i16x32& x) {
    typedef short i16x16_ __attribute__((vector_size(32)));
    i16x16_       a[2], b[2];
    i32x8         s[2];
    __builtin_memcpy(a, &w, 64);
    __builtin_memcpy(b, &x, 64);
    for (int i = 0; i < 2; i++) s[i] = (i32x8)__builtin_ia32_pmaddwd256(a[i], b[i]);
    sum += __builtin_shufflevector(s[0], s[1], 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
#undef ANY_NEGATIVE
#define ANY_NEGATIVE(v) any_negative(v)
INLINE bool any_negative(const i32x16& v) {
    f32x8 half[2];
    __builtin_memcpy(half, &v, sizeof v);
    return __builtin_ia32_movmskps256((f32x8)((i32x8)half[0] | (i32x8)half[1])) != 0;
}
namespace avx2 {
using Lanes = f32x8;
#include "matmul_tiles.h"
} // namespace avx2
FLOATS(avx2, true)
INTEGERS(avx2, avx2)
#pragma clang attribute pop
TABLE(avx2, avx2, "avx2")
#undef DOT

// As AVX-512's, in halves: processors of laptops.
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avxvnni"))), apply_to = function)
#define BOTH_HALVES(name, instruction)                                                                   \
    INLINE void name(i32x16& sum, const void* w, const void* x) {                                        \
        i32x8 a[2], b[2], s[2];                                                                          \
        __builtin_memcpy(a, w, 64);                                                                      \
        __builtin_memcpy(b, x, 64);                                                                      \
        __builtin_memcpy(s, &sum, 64);                                                                   \
        for (int i = 0; i < 2; i++) s[i] = instruction(s[i], a[i], b[i]);                                \
        sum = __builtin_shufflevector(s[0], s[1], 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); \
    }
BOTH_HALVES(dot_vnni, __builtin_ia32_vpdpwssd256)
BOTH_HALVES(byte_dot_vnni, __builtin_ia32_vpdpbusd256)
#undef BOTH_HALVES
#define DOT(sum, w, x)                   \
    do {                                 \
        const i16x32 w_ = (w), x_ = (x); \
        dot_vnni(sum, &w_, &x_);         \
    } while (0)
#undef BYTE_DOT
#define BYTE_DOT(sum, u, s)                           \
    do {                                              \
        const u8x64 u_ = (u8x64)(u), s_ = (u8x64)(s); \
        byte_dot_vnni(sum, &u_, &s_);                 \
    } while (0)
#undef SPLIT_BYTES
#define SPLIT_BYTES 1
namespace avxvnni {
using Lanes = f32x8;
#include "matmul_tiles.h"
} // namespace avxvnni
INTEGERS(avxvnni, avx2)
#pragma clang attribute pop
TABLE(avxvnni, avx2, "avx2, vnni")
#undef DOT
#undef BYTE_DOT
#define BYTE_DOT(sum, u, s) PLAIN_BYTE_DOT(sum, u, s)
#undef SPLIT_BYTES
#define SPLIT_BYTES 0
#undef DOT_TOKENS
#undef FEW
#undef MANY
#undef ATTENTION_TILE
#define DOT_TOKENS 1
#define FEW 3, 8, 768
#define MANY 4, 6, 1024
#define ATTENTION_TILE 6, 4

#undef ANY_NEGATIVE
#define ANY_NEGATIVE(v) (__builtin_ia32_cvtd2mask512(v) != 0)
#define AVX512 "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
#pragma clang attribute push(__attribute__((target(AVX512))), apply_to = function)
#define DOT(sum, w, x) sum += (i32x16)__builtin_ia32_pmaddwd512(w, x)
namespace avx512 {
using Lanes = f32x16;
#include "matmul_tiles.h"
} // namespace avx512
FLOATS(avx512, true)
INTEGERS(avx512, avx512)
#pragma clang attribute pop
TABLE(avx512, avx512, "avx512")
#undef DOT

#pragma clang attribute push(__attribute__((target(AVX512 ",avx512vnni"))), apply_to = function)
#define DOT(sum, w, x) sum = (i32x16)__builtin_ia32_vpdpwssd512(sum, (i32x16)(w), (i32x16)(x))
#undef BYTE_DOT
#define BYTE_DOT(sum, u, s) sum = (i32x16)__builtin_ia32_vpdpbusd512(sum, (i32x16)(u), (i32x16)(s))
#undef SPLIT_BYTES
#define SPLIT_BYTES 1
namespace avx512vnni {
using Lanes = f32x16;
#include "matmul_tiles.h"
} // namespace avx512vnni
INTEGERS(avx512vnni, avx512)
TABLE(avx512vnni, avx512, "avx512, vnni")
#undef PAIRED_PLACES
#define PAIRED_PLACES 1
namespace avx512pairs {
using Lanes = f32x16;
#include "matmul_tiles.h"
} // namespace avx512pairs
INTEGERS(avx512pairs, avx512)
#pragma clang attribute pop
TABLE(avx512pairs, avx512, "avx512, vnni")

const CpuKernels* cpu_kernels(std::string_view name) {
    // cpuid and xgetbv: the processor has it, and the operating system saves its registers.
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    const bool avxvnni = avx2 && __builtin_cpu_supports("avxvnni");
    const bool vnni    = avx512 && __builtin_cpu_supports("avx512vnni");
    // AMD's add in four units and multiply in two of them; Intel's do both in the same two.
    if (vnni && (name == "avx512pairs" || (name.empty() && __builtin_cpu_is("amd")))) return &avx512pairs_kernels;
    if (vnni && (name.empty() || name == "avx512vnni")) return &avx512vnni_kernels;
    if (avx512 && (name.empty() || name == "avx512")) return &avx512_kernels;
    if (avxvnni && (name.empty() || name == "avxvnni")) return &avxvnni_kernels;
    if (avx2 && (name.empty() || name == "avx2")) return &avx2_kernels;
    if (name.empty() || name == "plain") return &plain_kernels;
    return nullptr;
}

} // namespace quire
