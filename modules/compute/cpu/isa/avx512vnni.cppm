// quire.compute.cpu.isa.avx512vnni: the integer GEMM for AVX-512 VNNI. Owns nothing.
export module quire.compute.cpu.isa.avx512vnni;

import quire.compute.cpu.kernel_table;
import quire.core.base;
import quire.model_file.quants;
import quire.model_file.quants.lattices;

export namespace quire {

// With the float kernels of avx512.
CpuKernels avx512vnni_kernels(CpuKernels avx512);

} // namespace quire

module :private;

namespace quire::avx512vnni {

#include "../vectors.h"

#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"))), \
                             apply_to = function)
#include "registers512.h"
#define DOT(sum, w, x) sum = (i32x16)__builtin_ia32_vpdpwssd512(sum, (i32x16)(w), (i32x16)(x))
#define BYTE_DOT(sum, u, s) sum = (i32x16)__builtin_ia32_vpdpbusd512(sum, (i32x16)(u), (i32x16)(s))
#define TWO_BITS(v, at) PLAIN_TWO_BITS(v, at)
#define SPLIT_BYTES 1
#define FLOAT_KERNELS 0
#include "../kernels.h"
#pragma clang attribute pop
#include "../table.h"

} // namespace quire::avx512vnni

namespace quire {

CpuKernels avx512vnni_kernels(CpuKernels avx512) {
    avx512.name = "avx512, vnni";
    avx512vnni::use_integer_kernels<false>(avx512);
    return avx512;
}

} // namespace quire
