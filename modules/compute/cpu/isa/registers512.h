// The macros of gemm.h that all instruction sets with registers of 512 bits define alike. Included within the target attribute.
#define LOOK_UP(out, table, v)                                                                                         \
    do {                                                                                                               \
        typedef char i8x64_ __attribute__((vector_size(64)));                                                          \
        i8x64_       table_;                                                                                           \
        for (int i_ = 0; i_ < 4; i_++) __builtin_memcpy(reinterpret_cast<std::byte*>(&table_) + 16 * i_, (table), 16); \
        (out) = (i32x16)__builtin_ia32_pshufb512(table_, (i8x64_)(v));                                                 \
    } while (0)
#define ANY_NEGATIVE(v) (__builtin_ia32_cvtd2mask512(v) != 0)
#define FMA(a, b, c) __builtin_elementwise_fma(a, b, c)
#define FROM_FP16(out, h) ((out) = __builtin_convertvector((f16x16)(h), f32x16))
#define FUSED true
#define DOT_TOKENS 1
using Lanes = f32x16;
