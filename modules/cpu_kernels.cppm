// quire.cpu_kernels: the inner loops of the CPU backend, one source compiled for three instruction sets.
//
// Each loop is an always-inline function over vectors of 16 floats; at the end of the file it is inlined into functions
// that carry a target (none, AVX2, AVX-512), and the compiler lowers the vectors to what that target has. So the plain
// path is the reference of the wide ones, and the program starts on any x86-64.
//
// Determinism: an output element is computed in one order that depends on nothing but its own row: products are
// added in the order that matmul_tiles.h says, k ascending; attention walks positions in absolute chunks of 64. Tiles over rows
// and tokens only choose which elements are computed together.
export module quire.cpu_kernels;

import quire.base;
import quire.quants;
import quire.std;
import quire.tensor;

export namespace quire {

// Types whose products are sums of integers. They are interleaved at load (matmul_tiles.h).
bool integer_products(DType type);

// The input of such a product: n rows rounded to 16 bits, with a scale for each 32 places: 256 times finer than the 8 bits
// that are usual, so that the products are those of floats for all that matters.
struct RoundedRows {
    std::int64_t  n = 0, cols = 0;
    std::int16_t* integers = nullptr; // [cols / 32][n][32], each 4 places in the order 0 2 1 3
    float*        scales   = nullptr; // [cols / 32][n]
    float*        sums     = nullptr; // likewise, of the integers, times the scale
};

// Rows first .. last-1 of out = x · weightᵀ + bias. x [n × cols], out [n × weight.rows], bias [weight.rows] or null.
struct MatmulTask {
    const TensorView*  weight  = nullptr; // interleaved, if the products are of integers
    const float*       bias    = nullptr;
    const float*       x       = nullptr;
    const RoundedRows* rounded = nullptr; // x, for products of integers
    float*             out     = nullptr;
    std::int64_t       n       = 0;
    std::int64_t       first = 0, last = 0; // `first` a multiple of 16; `last` too, or all the rows
    float*             scratch = nullptr;   // matmul_scratch floats
};
inline constexpr std::int64_t panel_width    = 512; // places of a row that are floats at one time
inline constexpr std::int64_t most_rows      = 6;
inline constexpr std::int64_t tokens_at_once = 128;
inline constexpr std::size_t  matmul_scratch = std::size_t(most_rows * (panel_width + 16 * tokens_at_once));

// Queries of one sequence that share a kv head, over the paged cache.
struct AttentionTask {
    const float*        q          = nullptr; // first query token's row; the heads of this kv head start here
    float*              out        = nullptr; // likewise
    std::int64_t        row_stride = 0;       // floats from one token to the next, in q and out
    int                 n_tokens = 0, n_heads = 0, head_dim = 0;
    int                 first_position = 0; // of the first query token
    int                 window         = 0; // 0: all
    float               scale          = 1;
    const std::byte*    k              = nullptr; // this kv head's part of block 0
    const std::byte*    v              = nullptr;
    std::size_t         block_stride   = 0; // bytes from a block's part to the next block's
    int                 block_size     = 0;
    DType               kv_type        = DType::F16;
    const std::int32_t* table          = nullptr; // the sequence's blocks
    float*              scratch        = nullptr; // attention_scratch() floats
};
inline constexpr int attention_chunk = 64; // positions
std::size_t          attention_scratch(int n_queries, int head_dim);

struct CpuKernels {
    const char* name;
    // Groups of 16 rows first .. last-1 of a weight of integer products; out takes whole groups, 16 · row_bytes each.
    void (*interleave)(const TensorView& weight, std::byte* out, std::int64_t first, std::int64_t last);
    // Tokens first .. last-1 of x [n × cols].
    void (*round_rows)(const float* x, const RoundedRows& to, std::int64_t first, std::int64_t last);
    void (*matmul)(const MatmulTask&);
    void (*attention)(const AttentionTask&);
    // One row: residual += x if there is a residual, then out = rmsnorm(residual or x) * weight. All [n].
    void (*norm)(const float* x, float* residual, const float* weight, float eps, float* out, std::int64_t n);
    void (*silu_mul)(float* gate, const float* up, std::int64_t n); // gate = silu(gate) * up
    void (*add)(float* x, const float* y, std::int64_t n);
    void (*store_f16)(const float* x, std::uint16_t* out, std::int64_t n);
};

// By name ("plain", "avx2", "avx512"), or the widest that processor and operating system grant for "".
// Null: no such name, or not granted here.
const CpuKernels* cpu_kernels(std::string_view name = "");

} // namespace quire

module :private;

namespace quire {

typedef float         f32x16 __attribute__((vector_size(64)));
typedef std::int32_t  i32x4 __attribute__((vector_size(16)));
typedef std::int32_t  i32x8 __attribute__((vector_size(32)));
typedef std::int32_t  i32x16 __attribute__((vector_size(64)));
typedef std::uint32_t u32x16 __attribute__((vector_size(64)));
typedef std::int16_t  i16x16 __attribute__((vector_size(32)));
typedef std::int16_t  i16x32 __attribute__((vector_size(64)));
typedef std::uint16_t u16x16 __attribute__((vector_size(32)));
typedef std::uint16_t u16x32 __attribute__((vector_size(64)));
typedef _Float16      f16x16 __attribute__((vector_size(32)));

// Vectors never cross a call: their ABI depends on the target. So helpers are macros or take pointers.
#define LOAD16(v, p) __builtin_memcpy(&(v), (p), sizeof(v))
#define STORE16(p, v) __builtin_memcpy((p), &(v), sizeof(v))
#define INLINE [[gnu::always_inline]] inline

bool integer_products(DType type) {
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

// What a block of such a type is made of.
struct Piece {
    std::size_t offset, bytes;
};
std::vector<Piece> pieces_of(DType type) {
    const auto sixteens = [](std::vector<Piece> pieces, std::size_t from, std::size_t n) {
        for (std::size_t i = 0; i < n; i++) pieces.push_back({from + 16 * i, 16});
        return pieces;
    };
    switch (type) {
        case DType::Q4_0: return sixteens({{0, 2}}, 2, 1);
        case DType::Q4_1: return sixteens({{0, 2}, {2, 2}}, 4, 1);
        case DType::Q5_0: return sixteens({{0, 2}, {2, 4}}, 6, 1);
        case DType::Q5_1: return sixteens({{0, 2}, {2, 2}, {4, 4}}, 8, 1);
        case DType::Q8_0: return sixteens({{0, 2}}, 2, 2);
        case DType::Q4_K: return sixteens({}, 0, 9);
        case DType::Q5_K: return sixteens({}, 0, 11);
        case DType::Q6_K: return sixteens({{208, 2}}, 0, 13);
        default: return {};
    }
}

std::size_t attention_scratch(int n_queries, int head_dim) {
    // K and V of a chunk, an accumulator per query, its maximum and sum, the chunk's scores
    const auto d = std::size_t(head_dim + 15) / 16 * 16;
    return 2 * attention_chunk * d + std::size_t(n_queries) * (d + 2) + attention_chunk;
}

// The 16 lanes added pairwise, always in this order.
INLINE float sum_lanes(const float* lane) {
    float s8[8], s4[4];
    for (int i = 0; i < 8; i++) s8[i] = lane[i] + lane[i + 8];
    for (int i = 0; i < 4; i++) s4[i] = s8[i] + s8[i + 4];
    return (s4[0] + s4[2]) + (s4[1] + s4[3]);
}

template <bool Fma>
INLINE float multiply_add(float a, float b, float c) {
    if constexpr (Fma) return __builtin_fmaf(a, b, c);
    else return a * b + c;
}

// out[i] = exp(in[i]) for 16 values; relative error below 2e-7. in may be out.
// exp(x) = 2^n · exp(r), n = round(x / ln 2), r in [-0.347, 0.347]: Taylor to the 7th power.
template <bool Fma>
INLINE void exp16(const float* in, float* out) {
    f32x16 x;
    LOAD16(x, in);
    const f32x16 low = f32x16{} - 87.0f, high = f32x16{} + 88.0f;
    x        = __builtin_elementwise_min(__builtin_elementwise_max(x, low), high);
    f32x16 n = __builtin_elementwise_roundeven(x * 1.44269504f);
    f32x16 r = x - n * 0.693359375f; // ln 2 in two parts: the first is exact times n
    r        = r - n * -2.12194440e-4f;
    f32x16 p = f32x16{} + 1.0f / 5040;
    for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
        f32x16 term = f32x16{} + c;
        if constexpr (Fma) p = __builtin_elementwise_fma(p, r, term);
        else p = p * r + term;
    }
    i32x16 power = (__builtin_convertvector(n, i32x16) + 127) << 23;
    f32x16 scale;
    __builtin_memcpy(&scale, &power, sizeof scale);
    p *= scale;
    STORE16(out, p);
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

// -- attention: online softmax (running maximum, sum and weighted V; rescaled when the maximum grows)

template <bool Fma>
INLINE float dot(const float* a, const float* b, int n) { // n is a multiple of 16
    f32x16 sum{};
    for (int i = 0; i < n; i += 16) {
        f32x16 x, y;
        LOAD16(x, a + i);
        LOAD16(y, b + i);
        if constexpr (Fma) sum = __builtin_elementwise_fma(x, y, sum);
        else sum += x * y;
    }
    float lane[16];
    STORE16(lane, sum);
    return sum_lanes(lane);
}

template <bool Fma>
INLINE void attention_body(const AttentionTask& task) {
    const int         D = task.head_dim, padded = (D + 15) / 16 * 16;
    const int         n_queries = task.n_tokens * task.n_heads;
    const auto        width     = std::size_t(padded);
    const std::size_t row_size  = row_bytes(task.kv_type, D);
    float*            k_rows    = task.scratch;                         // [chunk × padded]
    float*            v_rows    = k_rows + attention_chunk * width;     // [chunk × padded]
    float*            acc       = v_rows + attention_chunk * width;     // [n_queries × padded]
    float*            top       = acc + std::size_t(n_queries) * width; // [n_queries]
    float*            sum       = top + n_queries;                      // [n_queries]
    float*            score     = sum + n_queries;                      // [chunk]
    const float       never     = -std::numeric_limits<float>::infinity();
    std::fill(acc, top, 0.0f);
    std::fill(top, sum, never);
    std::fill(sum, score, 0.0f);
    if (padded != D) std::fill(k_rows, acc, 0.0f); // the padding of every row stays zero

    const int last  = task.first_position + task.n_tokens; // one past the last visible position of the last query
    const int begin = task.window > 0 ? std::max(task.first_position - task.window + 1, 0) : 0;
    for (int chunk = begin / attention_chunk * attention_chunk; chunk < last; chunk += attention_chunk) {
        const int from = std::max(chunk, begin), to = std::min(chunk + attention_chunk, last);
        for (int p = from; p < to; p++) {
            const std::size_t at = std::size_t(task.table[p / task.block_size]) * task.block_stride +
                                   std::size_t(p % task.block_size) * row_size;
            widen_row<Fma>(task.kv_type, task.k + at, k_rows + std::size_t(p - chunk) * width, D);
            widen_row<Fma>(task.kv_type, task.v + at, v_rows + std::size_t(p - chunk) * width, D);
        }
        for (int t = 0; t < task.n_tokens; t++) {
            const int position = task.first_position + t;
            const int a        = (task.window > 0 ? std::max(from, position - task.window + 1) : from) - chunk;
            const int b        = std::min(to, position + 1) - chunk;
            if (a >= b) continue;
            for (int h = 0; h < task.n_heads; h++) {
                const int    i = t * task.n_heads + h;
                const float* q = task.q + t * task.row_stride + h * D;
                float        q_padded[512];
                if (padded != D) {
                    std::fill(q_padded, q_padded + padded, 0.0f);
                    std::copy(q, q + D, q_padded);
                    q = q_padded;
                }
                float best = top[i];
                for (int j = a; j < b; j++) {
                    score[j] = dot<Fma>(q, k_rows + std::size_t(j) * width, padded) * task.scale;
                    best     = score[j] > best ? score[j] : best;
                }
                // Lanes outside [a, b) are computed too, on whatever is there, and not used.
                for (int j = a; j < b; j++) score[j] -= best;
                for (int j = a / 16 * 16; j < b; j += 16) exp16<Fma>(score + j, score + j);
                float*      o     = acc + std::size_t(i) * width;
                const float shift = top[i] == best ? 1.0f : std::exp(top[i] - best);
                float       total = sum[i] * shift;
                for (int j = a; j < b; j++) total += score[j];
                top[i] = best;
                sum[i] = total;
                for (int d = 0; d < padded; d += 16) {
                    f32x16 x;
                    LOAD16(x, o + d);
                    x *= shift;
                    for (int j = a; j < b; j++) {
                        f32x16 v;
                        LOAD16(v, v_rows + std::size_t(j) * width + d);
                        const f32x16 w = f32x16{} + score[j];
                        if constexpr (Fma) x = __builtin_elementwise_fma(w, v, x);
                        else x += w * v;
                    }
                    STORE16(o + d, x);
                }
            }
        }
    }
    for (int t = 0; t < task.n_tokens; t++)
        for (int h = 0; h < task.n_heads; h++) {
            const int i = t * task.n_heads + h;
            for (int d = 0; d < D; d++)
                task.out[t * task.row_stride + h * D + d] = acc[std::size_t(i) * width + std::size_t(d)] / sum[i];
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
        if constexpr (Fma) sum = __builtin_elementwise_fma(v, v, sum);
        else sum += v * v;
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
        float     e[16] = {}, g[16] = {};
        const int m = int(std::min<std::int64_t>(16, n - i));
        for (int j = 0; j < m; j++) g[j] = gate[i + j];
        for (int j = 0; j < 16; j++) e[j] = -g[j];
        exp16<Fma>(e, e);
        for (int j = 0; j < m; j++) gate[i + j] = g[j] / (1 + e[j]) * up[i + j];
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

// -- one set of functions per target; the includes see different DOTs

#define SET(NAME, FMA_)                                                                                             \
    void matmul_##NAME(const MatmulTask& task) { NAME::matmul_body(task); }                                         \
    void interleave_##NAME(const TensorView& w, std::byte* out, std::int64_t first, std::int64_t last) {            \
        NAME::interleave_body(w, out, first, last);                                                                 \
    }                                                                                                               \
    void round_rows_##NAME(const float* x, const RoundedRows& to, std::int64_t first, std::int64_t last) {          \
        NAME::round_rows_body(x, to, first, last);                                                                  \
    }                                                                                                               \
    void attention_##NAME(const AttentionTask& task) { attention_body<FMA_>(task); }                                \
    void norm_##NAME(const float* x, float* residual, const float* weight, float eps, float* out, std::int64_t n) { \
        norm_body<FMA_>(x, residual, weight, eps, out, n);                                                          \
    }                                                                                                               \
    void silu_mul_##NAME(float* gate, const float* up, std::int64_t n) { silu_mul_body<FMA_>(gate, up, n); }        \
    void add_##NAME(float* x, const float* y, std::int64_t n) { add_body(x, y, n); }                                \
    void store_f16_##NAME(const float* x, std::uint16_t* out, std::int64_t n) { store_f16_body<FMA_>(x, out, n); }

#define TABLE(NAME, SPOKEN)                                                                \
    const CpuKernels NAME##_kernels{SPOKEN,          interleave_##NAME, round_rows_##NAME, \
                                    matmul_##NAME,   attention_##NAME,  norm_##NAME,       \
                                    silu_mul_##NAME, add_##NAME,        store_f16_##NAME};

#define FMA(a, b, c) ((a) * (b) + (c))
#define FUSED false
#define FLOAT_ROWS 2
#define FLOAT_TOKENS 1
#define FROM_HALVES(out, h)                                                                                   \
    do {                                                                                                      \
        const u16x16 halves_ = (h);                                                                           \
        for (int r_ = 0; r_ < 16; r_++) {                                                                     \
            const std::uint8_t bytes_[2] = {std::uint8_t(halves_[r_] & 255), std::uint8_t(halves_[r_] >> 8)}; \
            (out)[r_]                    = half_at(bytes_);                                                   \
        }                                                                                                     \
    } while (0)
#define DOT(sum, w, x) \
    for (int r_ = 0; r_ < 16; r_++) (sum)[r_] += (w)[2 * r_] * (x)[0] + (w)[2 * r_ + 1] * (x)[1]
namespace plain {
#include "matmul_tiles.h"
}
SET(plain, false)
TABLE(plain, "plain")
#undef FMA
#undef FUSED
#undef FLOAT_ROWS
#undef FLOAT_TOKENS
#undef FROM_HALVES
#undef DOT

#define FMA(a, b, c) __builtin_elementwise_fma(a, b, c)
#define FUSED true
#define FLOAT_ROWS 2
#define FLOAT_TOKENS 2
#define FROM_HALVES(out, h) ((out) = __builtin_convertvector((f16x16)(h), f32x16))
// Two int16 of x in every 32 bits of a vector.
#define BOTH(x) ((i32x16{} + std::bit_cast<std::int32_t>(std::array{(x)[0], (x)[1]})))

#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#define DOT(sum, w, x) dot_by_halves(sum, w, BOTH(x))
INLINE void dot_by_halves(i32x16& sum, const i16x32& w, const i32x16& x) {
    typedef short i16x16_ __attribute__((vector_size(32)));
    i16x16_       a[2], b[2];
    i32x8         s[2];
    __builtin_memcpy(a, &w, 64);
    __builtin_memcpy(b, &x, 64);
    for (int i = 0; i < 2; i++) s[i] = (i32x8)__builtin_ia32_pmaddwd256(a[i], b[i]);
    sum += __builtin_shufflevector(s[0], s[1], 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
namespace avx2 {
#include "matmul_tiles.h"
}
SET(avx2, true)
#pragma clang attribute pop
TABLE(avx2, "avx2")
#undef DOT
#undef FLOAT_ROWS
#undef FLOAT_TOKENS
#define FLOAT_ROWS 6
#define FLOAT_TOKENS 4

#define AVX512 "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
#pragma clang attribute push(__attribute__((target(AVX512))), apply_to = function)
#define DOT(sum, w, x) sum += (i32x16)__builtin_ia32_pmaddwd512(w, (i16x32)BOTH(x))
namespace avx512 {
#include "matmul_tiles.h"
}
SET(avx512, true)
#pragma clang attribute pop
TABLE(avx512, "avx512")
#undef DOT

#pragma clang attribute push(__attribute__((target(AVX512 ",avx512vnni"))), apply_to = function)
#define DOT(sum, w, x) sum = (i32x16)__builtin_ia32_vpdpwssd512(sum, (i32x16)(w), BOTH(x))
namespace avx512vnni {
#include "matmul_tiles.h"
}
SET(avx512vnni, true)
#pragma clang attribute pop
TABLE(avx512vnni, "avx512, vnni")

const CpuKernels* cpu_kernels(std::string_view name) {
    // cpuid and xgetbv: the processor has it, and the operating system saves its registers.
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
    if (vnni && (name.empty() || name == "avx512vnni")) return &avx512vnni_kernels;
    if (avx512 && (name.empty() || name == "avx512")) return &avx512_kernels;
    if (avx2 && (name.empty() || name == "avx2")) return &avx2_kernels;
    if (name.empty() || name == "plain") return &plain_kernels;
    return nullptr;
}

} // namespace quire
