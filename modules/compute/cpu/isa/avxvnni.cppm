// quire.compute.cpu.isa.avxvnni: the integer GEMM for AVX-VNNI, the instructions of AVX-512 VNNI on registers of 256 bits (processors of
// laptops). Owns nothing.
export module quire.compute.cpu.isa.avxvnni;

import quire.compute.cpu.kernel_table;
import quire.core.base;
import quire.model_file.quants;
import quire.model_file.quants.lattices;

export namespace quire {
CpuKernels avxvnni_kernels(CpuKernels avx2); // with the float kernels of avx2
}

module :private;

namespace quire::avxvnni {

#include "../vectors.h"

#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avxvnni"))), apply_to = function)
#include "registers256.h"
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
#define FLOAT_KERNELS 0
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
