// quire.compute.cpu.kernels: GEMM, GEMV, attention, norm and element-wise kernels of the CPU backend, one source compiled for
// each instruction set.
//
// The kernels are always-inline functions over vectors of 16 floats, in the headers beside this file: gemm.h (integer and float
// GEMM), attention.h, elementwise.h. At the end of this file they are inlined into functions with a target attribute (none,
// AVX2, AVX-512), and the compiler translates the vectors to what that target has. So the plain path is the reference for the
// wide ones, and the program starts on any x86-64.
//
// Determinism: the order in which an output element is summed depends only on its own row. GEMM adds with ascending k, in the
// order given in gemm.h; attention processes positions in chunks of 64, counted from the start of the sequence. Register tiles
// over rows and tokens only decide which elements are computed together.
//
// A GEMM is out [M × N] = x [M × K] · weightᵀ + bias: M tokens, N rows of the weight, K columns.
export module quire.compute.cpu.kernels;

import quire.core.base;
import quire.model_file.family;
import quire.model_file.quants;
import quire.model_file.quants.lattices;
import quire.core.std;
import quire.core.tensor;

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

// Those whose weights are repacked at load: 16 rows interleaved. The others are read in the file's order, and repacked at each
// use where several tokens share the cost: their blocks take longer to come from memory than to repack.
constexpr bool repacked_at_load(DType type) {
    return uses_integer_gemm(type) && type != DType::Q8_0 && type != DType::Q6_K;
}

// Those that unpack to integers of 14 bits, which include the sub-block's scale, instead of at most 8 bits.
constexpr bool wide_integers(DType type) { return type == DType::Q6_K || type == DType::IQ2_XS; }

// The largest int16 that activations are quantised to: the sum of a weight and an activation must fit 16 bits (add_winograd).
// NaN and infinity are passed on by the scale.
constexpr std::int32_t max_activation(bool wide_weights) { return wide_weights ? 32767 - 4096 : 32767 - 128; }

// int16-quantised activations: m tokens × k columns with a scale for each 32 columns; 256 times finer than the usual 8 bits,
// because log-probabilities have to match those of float activations.
struct QuantisedRows {
    std::int64_t  m = 0, k = 0;
    std::int16_t* integers = nullptr; // [k / 32][m][32], each 4 columns in the order 0 2 1 3
    float*        scales   = nullptr; // [k / 32][m]
    float*        sums     = nullptr; // likewise: scale · Σ integers, for formats with a minimum
    std::int32_t* products = nullptr; // likewise: - Σ x[2i] · x[2i + 1], for Winograd's inner product
    bool          for_wide = false;   // any of the weights has wide_integers()
};

// Weight rows first .. last-1 of out = x · weightᵀ + bias. x [m × weight.cols], out [m × weight.rows], bias [weight.rows] or null.
struct GemmTask {
    const TensorView*    weight    = nullptr; // repacked, if repacked_at_load()
    const float*         bias      = nullptr;
    const float*         x         = nullptr;
    const QuantisedRows* quantised = nullptr; // x, for the integer GEMM
    const float*         packed    = nullptr; // x as pack_panels orders it, for the float GEMM
    float*               out       = nullptr;
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
    const std::int32_t* table = nullptr; // the sequence's blocks
    int                 last  = -1;      // the last position that every token sees; -1: its own
};

// Queries of some sequences that share a kv head. Where the sequences begin with the same blocks, these are read once.
struct AttentionTask {
    std::span<const AttentionPart> parts;
    int              shared   = 0; // leading positions in the same blocks: whole chunks, seen by all queries
    std::int64_t     q_stride = 0, out_stride = 0; // floats from one token to the next
    int              n_heads = 0, head_dim = 0, value_dim = 0;
    int              window       = 0; // 0: all; else nothing is shared
    float            scale        = 1;
    float            softcap      = 0;       // 0: none
    const float*     sinks        = nullptr; // a score of each head that has no value, or null
    const std::byte* k            = nullptr; // this kv head's part of block 0
    const std::byte* v            = nullptr; // likewise; value_dim numbers of rows as long as those of k
    std::size_t      block_stride = 0;       // bytes from a block's part to the next block's
    int              block_size   = 0;
    DType            kv_type      = DType::F16;
    float*           scratch      = nullptr; // attention_scratch() floats
};
inline constexpr int attention_chunk = 64; // positions
std::size_t          attention_scratch(int n_queries, int head_dim);

struct CpuKernels {
    const char* name;
    // Repacks groups of 16 weight rows, first .. last-1, for the integer GEMM; out takes whole groups, 16 · row_bytes each.
    void (*repack)(const TensorView& weight, std::byte* out, std::int64_t first, std::int64_t last);
    // Quantises tokens first .. last-1 of x [m × k] to int16.
    void (*quantise_rows)(const float* x, const QuantisedRows& to, std::int64_t first, std::int64_t last);
    // Panel packing: x [n × cols] in the order in which the float GEMM reads it, to out [n · cols]; tiles of tokens
    // first .. last-1 of the token_tiles(n).
    std::int64_t (*token_tiles)(std::int64_t n);
    void (*pack_panels)(const float* x, std::int64_t n, std::int64_t cols, float* out, std::int64_t first,
                        std::int64_t last);
    void (*gemm)(const GemmTask&);
    void (*attention)(const AttentionTask&);
    // One row: residual += x if there is a residual, then out = rmsnorm(residual or x) * weight. All [n].
    void (*norm)(const float* x, float* residual, const float* weight, float eps, float* out, std::int64_t n);
    // gate = activation(gate), times `up` if there is one. [n]
    void (*activate)(Activation activation, float* gate, const float* up, std::int64_t n);
    void (*softcap)(float* x, float cap, std::int64_t n); // x = cap · tanh(x / cap)
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
typedef std::uint8_t  u8x16 __attribute__((vector_size(16)));
typedef std::int8_t   i8x64 __attribute__((vector_size(64)));
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
// The large parts of a GEMM: inlined, as a call costs 6 to 17 %, except under a sanitizer, whose checks would make such
// functions take a quarter of an hour to compile.
#if __has_feature(address_sanitizer)
#define INLINE_PARTS [[gnu::noinline]]
#else
#define INLINE_PARTS INLINE
#endif
// A float in every lane. (f32x16{} + x costs an addition, as -0 would become 0.)
#define ALL(x) ((f32x16)(i32x16{} + std::bit_cast<std::int32_t>(x)))

// a · b + c of vectors, rounded once. Targets without FMA compute it in double, which gives the same bits except where rounding twice
// makes a difference. So the plain path can be the reference for the others.
#define AS_DOUBLE(v) __builtin_convertvector(v, f64x16)
#define PLAIN_FMA(a, b, c) __builtin_convertvector(AS_DOUBLE(a) * AS_DOUBLE(b) + AS_DOUBLE(c), f32x16)
#define VECTOR_FMA(out, a, b, c)                                       \
    do {                                                               \
        if constexpr (Fma) (out) = __builtin_elementwise_fma(a, b, c); \
        else (out) = PLAIN_FMA(a, b, c);                               \
    } while (0)

// Up to this many tokens the float GEMM uses the register tile FEW, beyond it MANY.
constexpr std::int64_t few_tokens = 32;

// What a block of a quantised type consists of, for repacking: pieces of 16 bytes from byte `at` on, and smaller ones.
struct Piece {
    std::size_t offset, bytes;
};
struct Pieces {
    std::size_t          at, sixteens;
    std::array<Piece, 3> small{};
};

// The tables of types whose elements are indices, as the kernels read them: 16 signed bytes, or points of 4 or 8 of them.
constexpr auto bytes_of = [](const std::array<float, 16>& values) {
    std::array<std::int8_t, 16> out{};
    for (std::size_t i = 0; i < 16; i++) out[i] = std::int8_t(values[i]);
    return out;
};
constexpr auto iq4_bytes = bytes_of(iq4_values), e2m1_bytes = bytes_of(e2m1_values);

template <std::size_t Length, std::size_t N>
consteval auto words_of(const std::array<std::array<std::int8_t, Length>, N>& points) {
    std::array<std::uint32_t, N * Length / 4> out{};
    for (std::size_t i = 0; i < N * Length; i++)
        out[i / 4] |= std::uint32_t(std::uint8_t(points[i / Length][i % Length])) << (i % 4 * 8);
    return out;
}
constexpr auto iq3_xxs_table = words_of(iq3_xxs_lattice);
constexpr auto iq2_xs_table  = words_of(iq2_xs_lattice);
// By four bits: 4 bytes, all ones where the bit is set.
constexpr auto sign_masks = [] {
    std::array<std::uint32_t, 16> out{};
    for (std::uint32_t i = 0; i < 64; i++)
        if (i / 4 >> (i % 4) & 1) out[i / 4] |= 255u << (i % 4 * 8);
    return out;
}();

#include "vector_math.h"

#include "elementwise.h"

#include "attention.h"

// -- the kernels of each target: gemm.h is included once for each, with the macros that it lists. The integer GEMM has more
// variants than the rest, so two sets of kernels can share their float kernels.

#define FLOAT_KERNELS(NAME, FMA_)                                                                                   \
    void float_gemm_##NAME(const GemmTask& task) { NAME::float_gemm(task); }                                        \
    void pack_panels_##NAME(const float* x, std::int64_t n, std::int64_t cols, float* out, std::int64_t first,      \
                            std::int64_t last) {                                                                    \
        NAME::pack_panels_body(x, n, cols, out, first, last);                                                       \
    }                                                                                                               \
    std::int64_t token_tiles_##NAME(std::int64_t n) { return NAME::token_tiles_body(n); }                           \
    void         attention_##NAME(const AttentionTask& task) { attention_body<FMA_, ATTENTION_TILE>(task); }        \
    void norm_##NAME(const float* x, float* residual, const float* weight, float eps, float* out, std::int64_t n) { \
        norm_body<FMA_>(x, residual, weight, eps, out, n);                                                          \
    }                                                                                                               \
    void activate_##NAME(Activation activation, float* gate, const float* up, std::int64_t n) {                     \
        activate_body<FMA_>(activation, gate, up, n);                                                               \
    }                                                                                                               \
    void softcap_##NAME(float* x, float cap, std::int64_t n) { softcap_body<FMA_>(x, cap, n); }                     \
    void add_##NAME(float* x, const float* y, std::int64_t n) { add_body(x, y, n); }                                \
    void store_f16_##NAME(const float* x, std::uint16_t* out, std::int64_t n) { store_f16_body<FMA_>(x, out, n); }

#define INTEGER_KERNELS(NAME, FLOAT_SET)                                                                        \
    void gemm_##NAME(const GemmTask& task) {                                                                    \
        if (uses_integer_gemm(task.weight->type)) NAME::integer_gemm(task);                                     \
        else float_gemm_##FLOAT_SET(task);                                                                      \
    }                                                                                                           \
    void repack_##NAME(const TensorView& w, std::byte* out, std::int64_t first, std::int64_t last) {            \
        NAME::repack_body(w, out, first, last);                                                                 \
    }                                                                                                           \
    void quantise_rows_##NAME(const float* x, const QuantisedRows& to, std::int64_t first, std::int64_t last) { \
        NAME::quantise_rows_body(x, to, first, last);                                                           \
    }

#define KERNEL_TABLE(NAME, FLOAT_SET, LABEL)                 \
    const CpuKernels NAME##_kernels{LABEL,                   \
                                    repack_##NAME,           \
                                    quantise_rows_##NAME,    \
                                    token_tiles_##FLOAT_SET, \
                                    pack_panels_##FLOAT_SET, \
                                    gemm_##NAME,             \
                                    attention_##FLOAT_SET,   \
                                    norm_##FLOAT_SET,        \
                                    activate_##FLOAT_SET,    \
                                    softcap_##FLOAT_SET,     \
                                    add_##FLOAT_SET,         \
                                    store_f16_##FLOAT_SET};

// Two int16 in every 32 bits of a vector.
#define PAIR(x) ((i16x32)(i32x16{} + std::bit_cast<std::int32_t>(std::array{(x)[0], (x)[1]})))
#define PLAIN_BYTE_DOT(sum, u, s)                                                      \
    do {                                                                               \
        DOT(sum, (i16x32)((u16x32)(u) & 255), (i16x32)(s) << 8 >> 8); /* even bytes */ \
        DOT(sum, (i16x32)((u16x32)(u) >> 8), (i16x32)(s) >> 8);                        \
    } while (0)

#define BYTE_DOT(sum, u, s) PLAIN_BYTE_DOT(sum, u, s)
#define LOOK_UP(out, table, v)                                      \
    do {                                                            \
        const u8x64 v_ = (u8x64)(v);                                \
        i8x64       out_;                                           \
        for (int r_ = 0; r_ < 64; r_++) out_[r_] = (table)[v_[r_]]; \
        (out) = (i32x16)out_;                                       \
    } while (0)
#define SPLIT_BYTES 0
#define WINOGRAD 0
#define ANY_NEGATIVE(v) (__builtin_reduce_or(v) < 0)

#define FMA(a, b, c) PLAIN_FMA(a, b, c)
#define FUSED false
#define DOT_TOKENS 1
#define FEW 2, 1, 512
#define MANY 2, 1, 512
#define ATTENTION_TILE 1, 2
#define FROM_FP16(out, h)                                                                                 \
    do {                                                                                                  \
        const u16x16 fp16_ = (h);                                                                         \
        for (int r_ = 0; r_ < 16; r_++) {                                                                 \
            const std::uint8_t bytes_[2] = {std::uint8_t(fp16_[r_] & 255), std::uint8_t(fp16_[r_] >> 8)}; \
            (out)[r_]                    = fp16_at(bytes_);                                               \
        }                                                                                                 \
    } while (0)
#define DOT(sum, w, x)                                                                                          \
    do {                                                                                                        \
        const i16x32 w_ = (w), x_ = (x);                                                                        \
        for (int r_ = 0; r_ < 16; r_++) (sum)[r_] += w_[2 * r_] * x_[2 * r_] + w_[2 * r_ + 1] * x_[2 * r_ + 1]; \
    } while (0)
namespace plain {
using Lanes = f32x16;
#include "gemm.h"
} // namespace plain
FLOAT_KERNELS(plain, false)
INTEGER_KERNELS(plain, plain)
KERNEL_TABLE(plain, plain, "plain")
#undef FMA
#undef FUSED
#undef DOT_TOKENS
#undef FEW
#undef MANY
#undef ATTENTION_TILE
#undef FROM_FP16
#undef DOT

#define FMA(a, b, c) __builtin_elementwise_fma(a, b, c)
#define FUSED true
#define DOT_TOKENS 4
#define FEW 3, 4, 512
#define MANY 3, 4, 1024
#define ATTENTION_TILE 2, 2
#define FROM_FP16(out, h) ((out) = __builtin_convertvector((f16x16)(h), f32x16))
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#undef LOOK_UP
#define LOOK_UP(out, table, v)              \
    do {                                    \
        const i32x16 v_ = (v);              \
        look_up_avx2(&(out), (table), &v_); \
    } while (0)
INLINE void look_up_avx2(void* out, const std::int8_t* table, const void* v) {
    typedef char i8x32_ __attribute__((vector_size(32)));
    i8x32_       both, part[2];
    __builtin_memcpy(&both, table, 16);
    __builtin_memcpy(reinterpret_cast<std::byte*>(&both) + 16, table, 16);
    __builtin_memcpy(part, v, 64);
    for (int i = 0; i < 2; i++) part[i] = (i8x32_)__builtin_ia32_pshufb256(both, part[i]);
    __builtin_memcpy(out, part, 64);
}
#define DOT(sum, w, x) dot_avx2(sum, w, x)
INLINE void dot_avx2(i32x16& sum, const i16x32& w, const i16x32& x) {
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
#include "gemm.h"
} // namespace avx2
FLOAT_KERNELS(avx2, true)
INTEGER_KERNELS(avx2, avx2)
#pragma clang attribute pop
KERNEL_TABLE(avx2, avx2, "avx2")
#undef DOT

// AVX-VNNI: the instructions of AVX-512 VNNI on registers of 256 bits (processors of laptops).
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avxvnni"))), apply_to = function)
#define TWO_REGISTERS(name, instruction)                                                                 \
    INLINE void name(i32x16& sum, const void* w, const void* x) {                                        \
        i32x8 a[2], b[2], s[2];                                                                          \
        __builtin_memcpy(a, w, 64);                                                                      \
        __builtin_memcpy(b, x, 64);                                                                      \
        __builtin_memcpy(s, &sum, 64);                                                                   \
        for (int i = 0; i < 2; i++) s[i] = instruction(s[i], a[i], b[i]);                                \
        sum = __builtin_shufflevector(s[0], s[1], 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); \
    }
TWO_REGISTERS(dot_vnni, __builtin_ia32_vpdpwssd256)
TWO_REGISTERS(byte_dot_vnni, __builtin_ia32_vpdpbusd256)
#undef TWO_REGISTERS
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
#include "gemm.h"
} // namespace avxvnni
INTEGER_KERNELS(avxvnni, avx2)
#pragma clang attribute pop
KERNEL_TABLE(avxvnni, avx2, "avx2, vnni")
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
#undef LOOK_UP
#define LOOK_UP(out, table, v)                                                                                         \
    do {                                                                                                               \
        typedef char i8x64_ __attribute__((vector_size(64)));                                                          \
        i8x64_       table_;                                                                                           \
        for (int i_ = 0; i_ < 4; i_++) __builtin_memcpy(reinterpret_cast<std::byte*>(&table_) + 16 * i_, (table), 16); \
        (out) = (i32x16)__builtin_ia32_pshufb512(table_, (i8x64_)(v));                                                 \
    } while (0)
#define DOT(sum, w, x) sum += (i32x16)__builtin_ia32_pmaddwd512(w, x)
namespace avx512 {
using Lanes = f32x16;
#include "gemm.h"
} // namespace avx512
FLOAT_KERNELS(avx512, true)
INTEGER_KERNELS(avx512, avx512)
#pragma clang attribute pop
KERNEL_TABLE(avx512, avx512, "avx512")
#undef DOT

#pragma clang attribute push(__attribute__((target(AVX512 ",avx512vnni"))), apply_to = function)
#define DOT(sum, w, x) sum = (i32x16)__builtin_ia32_vpdpwssd512(sum, (i32x16)(w), (i32x16)(x))
#undef BYTE_DOT
#define BYTE_DOT(sum, u, s) sum = (i32x16)__builtin_ia32_vpdpbusd512(sum, (i32x16)(u), (i32x16)(s))
#undef SPLIT_BYTES
#define SPLIT_BYTES 1
namespace avx512vnni {
using Lanes = f32x16;
#include "gemm.h"
} // namespace avx512vnni
INTEGER_KERNELS(avx512vnni, avx512)
KERNEL_TABLE(avx512vnni, avx512, "avx512, vnni")
#undef WINOGRAD
#define WINOGRAD 1
namespace avx512pairs {
using Lanes = f32x16;
#include "gemm.h"
} // namespace avx512pairs
INTEGER_KERNELS(avx512pairs, avx512)
#pragma clang attribute pop
KERNEL_TABLE(avx512pairs, avx512, "avx512, vnni")

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
