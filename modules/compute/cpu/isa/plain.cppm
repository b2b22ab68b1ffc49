// quire.compute.cpu.isa.plain: the CPU kernels for any x86-64, the reference for the other instruction sets. Owns nothing.
export module quire.compute.cpu.isa.plain;

import quire.compute.cpu.kernel_table;
import quire.core.base;
import quire.model_file.quants;
import quire.model_file.quants.lattices;

export namespace quire {
CpuKernels plain_kernels();
}

module :private;

namespace quire::plain {

#include "../vectors.h"

#define LOOK_UP(out, table, v)                                      \
    do {                                                            \
        const u8x64 v_ = (u8x64)(v);                                \
        i8x64       out_;                                           \
        for (int r_ = 0; r_ < 64; r_++) out_[r_] = (table)[v_[r_]]; \
        (out) = (i32x16)out_;                                       \
    } while (0)
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
#define BYTE_DOT(sum, u, s) PLAIN_BYTE_DOT(sum, u, s)
#define ANY_NEGATIVE(v) (__builtin_reduce_or(v) < 0)
#define TWO_BITS(v, at) PLAIN_TWO_BITS(v, at)
#define SPLIT_BYTES 0
#define FMA(a, b, c) PLAIN_FMA(a, b, c)
#define FUSED false
#define DOT_TOKENS 1
#define FEW 2, 1, 512
#define MANY 2, 1, 512
#define ATTENTION_TILE 1, 2
#define FLOAT_KERNELS 1
using Lanes = f32x16;
#include "../kernels.h"

#include "../table.h"

} // namespace quire::plain

namespace quire {

CpuKernels plain_kernels() {
    CpuKernels kernels;
    kernels.name = "plain";
    plain::use_float_kernels(kernels);
    plain::use_integer_kernels<false>(kernels);
    return kernels;
}

} // namespace quire
