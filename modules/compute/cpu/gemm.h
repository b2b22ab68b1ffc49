// GEMM and GEMV kernels. Each instruction set (isa/) defines
//   DOT(sum, w, x)      sum[lane] += w[2·lane] · x[2·lane] + w[2·lane + 1] · x[2·lane + 1], of int16
//   BYTE_DOT(sum, u, s) sum[lane] += the dot product of four bytes: u unsigned, s signed
//   LOOK_UP(out, table, v)  the entries of a table of 16 signed bytes at the 64 indices in v
//   ANY_NEGATIVE(v)     whether any lane of int32 is negative
//   TWO_BITS(v, at)     bits at, at + 1 of 64 bytes, of the last 32 bits at + 2, at + 3, as bits 4 and 5 (vectors.h)
//   SPLIT_BYTES         whether BYTE_DOT is one instruction: then bytes of weights × the low and high bytes of int16 activations
//                       are faster than int16 × int16
//   DOT_TOKENS          tokens in the integer register tile; more than one where the 16 vectors of weights do not fit the registers
//   FMA(a, b, c)        a · b + c, fused if the target can
//   FUSED               whether FMA is fused
//   FEW, MANY           the float GEMM's register tile and K block (RegisterTile) for few and for many tokens
//   Lanes               the vector of floats that fits a register: 16 or 8 of them
//   FROM_FP16(out, h)   out = 16 fp16 numbers, given as u16x16, as floats
//
// Integer GEMM: weights are repacked, 16 rows interleaved: for each piece of their blocks (a scale, 16 bytes of elements) the pieces
// of all 16 rows are stored together, so that a vector holds one column of 16 rows and sums never cross lanes. The bytes are those
// of the file in another order. Some types are repacked when a model is loaded, others at each use, a few columns at a time
// (repacked_at_load). A tile of 16 rows × 32 columns is unpacked to int16 in 16 registers and used for all tokens, which share the
// cost of repacking and unpacking.
//
// Float GEMM: weights stay in the order of the file, a vector holds 16 columns of one row.

#include "gemm_formats.h"

#include "gemm_quantise.h"

#include "gemm_integer.h"

#if FLOAT_KERNELS
#include "gemm_float.h"
#endif
