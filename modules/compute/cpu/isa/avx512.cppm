// quire.compute.cpu.isa.avx512: the CPU kernels for AVX-512 with the extensions BW, DQ and VL. Owns nothing.
export module quire.compute.cpu.isa.avx512;

import quire.compute.cpu.kernel_table;
import quire.core.base;
import quire.model_file.quants;
import quire.model_file.quants.lattices;

export namespace quire {
CpuKernels avx512_kernels();
}

module :private;

namespace quire::avx512 {

#include "../vectors.h"

#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
                             apply_to = function)
#include "registers512.h"
#define DOT(sum, w, x) sum += (i32x16)__builtin_ia32_pmaddwd512(w, x)
#define BYTE_DOT(sum, u, s) PLAIN_BYTE_DOT(sum, u, s)
#define TWO_BITS(v, at) PLAIN_TWO_BITS(v, at)
#define SPLIT_BYTES 0
#define FEW 3, 8, 768
#define MANY 4, 6, 1024
#define ATTENTION_TILE 6, 4
#define FLOAT_KERNELS 1
#include "../kernels.h"
#pragma clang attribute pop
#include "../table.h"

} // namespace quire::avx512

namespace quire {

CpuKernels avx512_kernels() {
    CpuKernels kernels;
    kernels.name = "avx512";
    avx512::use_float_kernels(kernels);
    avx512::use_integer_kernels<false>(kernels);
    return kernels;
}

} // namespace quire
