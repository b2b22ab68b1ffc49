// quire.compute.cpu.isa.avxvnni: the integer GEMM for AVX-VNNI, the instructions of AVX-512 VNNI on registers of 256 bits (processors of laptops).
export module quire.compute.cpu.isa.avxvnni;

import quire.compute.cpu.kernel_table;
import quire.core.base;
import quire.core.std;
import quire.core.tensor;
import quire.model_file.family;
import quire.model_file.quants;
import quire.model_file.quants.lattices;

export namespace quire {
CpuKernels avxvnni_kernels(CpuKernels avx2); // with the float kernels of avx2
}

module :private;

namespace quire::avxvnni {

#include "../vectors.h"

#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avxvnni"))), apply_to = function)
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
#define BYTE_DOT(sum, u, s)                           \
    do {                                              \
        const u8x64 u_ = (u8x64)(u), s_ = (u8x64)(s); \
        byte_dot_vnni(sum, &u_, &s_);                 \
    } while (0)
#define TWO_BITS(v, at) PLAIN_TWO_BITS(v, at)
#define SPLIT_BYTES 1
#define FMA(a, b, c) __builtin_elementwise_fma(a, b, c)
#define FROM_FP16(out, h) ((out) = __builtin_convertvector((f16x16)(h), f32x16))
#define FUSED true
#define DOT_TOKENS 4
#define FLOAT_KERNELS 0
using Lanes = f32x8;
#include "../kernels.h"
#pragma clang attribute pop
#include "../table.h"

} // namespace quire::avxvnni

namespace quire {

CpuKernels avxvnni_kernels(CpuKernels avx2) {
    avx2.name = "avx2, vnni";
    avxvnni::use_integer_kernels<false>(avx2);
    return avx2;
}

} // namespace quire
