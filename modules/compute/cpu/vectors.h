// Vectors of 16 numbers and the constant tables of the kernels, the same for every instruction set (isa/).

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
typedef std::uint64_t u64x8 __attribute__((vector_size(64)));
typedef std::int8_t   i8x16 __attribute__((vector_size(16)));
typedef std::uint8_t  u8x16 __attribute__((vector_size(16)));
typedef std::int8_t   i8x64 __attribute__((vector_size(64)));
typedef std::int8_t   i8x32 __attribute__((vector_size(32)));
typedef std::uint8_t  u8x32 __attribute__((vector_size(32)));
typedef std::uint8_t  u8x64 __attribute__((vector_size(64)));
typedef std::uint16_t u16x32 __attribute__((vector_size(64)));
typedef _Float16      f16x8 __attribute__((vector_size(16)));
typedef _Float16      f16x16 __attribute__((vector_size(32)));

// Before a loop over the registers of a tile. Such loops are unrolled whatever the level of optimisation.
// With a sanitizer their checks would be unrolled, too: the compiler would take several times as long.
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define UNROLLED
#else
#define UNROLLED _Pragma("clang loop unroll(full)")
#endif

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

// The parts of a quantised type's block, for repacking: pieces of 16 bytes from byte `at` on, and smaller ones.
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

// 32 numbers: of each four the second and the third change places.
#define SWAP_MIDDLE(v)                                                                                              \
    __builtin_shufflevector(v, v, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15, 16, 18, 17, 19, 20, 22, 21, \
                            23, 24, 26, 25, 27, 28, 30, 29, 31)
// Two int16 in every 32 bits of a vector.
#define PAIR(x) ((i16x32)(i32x16{} + std::bit_cast<std::int32_t>(std::array{(x)[0], (x)[1]})))
// A product of bytes by two of int16, for targets without one.
#define PLAIN_BYTE_DOT(sum, u, s)                                                      \
    do {                                                                               \
        DOT(sum, (i16x32)((u16x32)(u) & 255), (i16x32)(s) << 8 >> 8); /* even bytes */ \
        DOT(sum, (i16x32)((u16x32)(u) >> 8), (i16x32)(s) >> 8);                        \
    } while (0)
// Bits at, at + 1 (0 or 4) of each of 64 bytes, of the last 32 bytes bits at + 2, at + 3, as their bits 4 and 5.
constexpr u16x32 second_half_by_2 = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                                     2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2};
#define PLAIN_TWO_BITS(v, at) \
    (((at) == 0 ? (u16x32)(v) << (4 - second_half_by_2) : (u16x32)(v) >> second_half_by_2) & 0x3030)
