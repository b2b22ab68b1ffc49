// quire.compute.cpu.isa.avx2: the CPU kernels for AVX2 with FMA and F16C: a vector is two registers. Owns nothing.
export module quire.compute.cpu.isa.avx2;

import quire.compute.cpu.kernel_table;
import quire.core.base;
import quire.model_file.quants;
import quire.model_file.quants.lattices;

export namespace quire {
CpuKernels avx2_kernels();
}

module :private;

namespace quire::avx2 {

#include "../vectors.h"

#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#include "registers256.h"
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
#define BYTE_DOT(sum, u, s) PLAIN_BYTE_DOT(sum, u, s)
#define TWO_BITS(v, at) PLAIN_TWO_BITS(v, at)
#define SPLIT_BYTES 0
#define FEW 3, 4, 512
#define MANY 3, 4, 1024
#define ATTENTION_TILE 2, 2
#define FLOAT_KERNELS 1
#include "../kernels.h"
#pragma clang attribute pop
#include "../table.h"

} // namespace quire::avx2

namespace quire {

CpuKernels avx2_kernels() {
    CpuKernels kernels;
    kernels.name = "avx2";
    avx2::use_float_kernels(kernels);
    avx2::use_integer_kernels<false>(kernels);
    return kernels;
}

} // namespace quire
