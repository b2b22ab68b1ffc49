// quire.compute.cpu.isa.avx512gfni: the integer GEMM for AVX-512 VNNI and GFNI, whose products of bytes and bit matrices move bits in
// one instruction; every processor since Ice Lake and Zen 4 has both. And the one for AMX, which Sapphire Rapids and later ones have. Owns nothing.
export module quire.compute.cpu.isa.avx512gfni;

import quire.compute.cpu.kernel_table;
import quire.core.base;
import quire.model_file.quants;
import quire.model_file.quants.lattices;

export namespace quire {

// With the float kernels of avx512. Pairs: prompts by Winograd's inner product.
CpuKernels avx512gfni_kernels(CpuKernels avx512, bool pairs);
CpuKernels amx_kernels(CpuKernels avx512);

} // namespace quire

module :private;

namespace quire::avx512gfni {

#include "../vectors.h"

// The compiler uses AMX only where the code names an instruction of it.
#pragma clang attribute push(                                                                                      \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,gfni,amx-tile,amx-int8,avx2,fma,f16c"))), \
    apply_to = function)
#include "registers512.h"
#define DOT(sum, w, x) sum = (i32x16)__builtin_ia32_vpdpwssd512(sum, (i32x16)(w), (i32x16)(x))
#define BYTE_DOT(sum, u, s) sum = (i32x16)__builtin_ia32_vpdpbusd512(sum, (i32x16)(u), (i32x16)(s))
#define TWO_BITS(v, at) __builtin_ia32_vgf2p8affineqb_v64qi((i8x64_)(v), (i8x64_)two_bits[(at) / 4], 0)
typedef char i8x64_ __attribute__((vector_size(64)));
// Each byte of a matrix is a row, the row of bit 7 first: the bits of the source whose sum is a bit of the result.
constexpr std::uint64_t bits_to_4_and_5(int at) { return std::uint64_t(1 << at) << 24 | std::uint64_t(2 << at) << 16; }
constexpr u64x8         two_bits_at(int at) {
    const std::uint64_t first = bits_to_4_and_5(at), last = bits_to_4_and_5(at + 2);
    return u64x8{first, first, first, first, last, last, last, last};
}
constexpr u64x8 two_bits[2] = {two_bits_at(0), two_bits_at(4)};
#define SPLIT_BYTES 1
#define FLOAT_KERNELS 0
#include "../kernels.h"

#include "../gemm_amx.h"
#pragma clang attribute pop
#include "../table.h"

} // namespace quire::avx512gfni

namespace quire {

CpuKernels avx512gfni_kernels(CpuKernels avx512, bool pairs) {
    avx512.name = "avx512, vnni, gfni";
    if (pairs) avx512gfni::use_integer_kernels<true>(avx512);
    else avx512gfni::use_integer_kernels<false>(avx512);
    return avx512;
}

CpuKernels amx_kernels(CpuKernels avx512) {
    CpuKernels kernels    = avx512gfni_kernels(avx512, false);
    kernels.name          = "avx512, vnni, gfni, amx";
    kernels.quantise_rows = avx512gfni::quantise_rows_amx;
    kernels.integer_gemm  = avx512gfni::integer_gemm_amx;
    return kernels;
}

} // namespace quire
