// The macros of gemm.h that all instruction sets with registers of 256 bits define alike. Included within the target attribute.
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
#define ANY_NEGATIVE(v) any_negative(v)
INLINE bool any_negative(const i32x16& v) {
    f32x8 half[2];
    __builtin_memcpy(half, &v, sizeof v);
    return __builtin_ia32_movmskps256((f32x8)((i32x8)half[0] | (i32x8)half[1])) != 0;
}
#define FMA(a, b, c) __builtin_elementwise_fma(a, b, c)
#define FROM_FP16(out, h) ((out) = __builtin_convertvector((f16x16)(h), f32x16))
#define FUSED true
#define DOT_TOKENS 4
using Lanes = f32x8;
