// The GEMM loops of quire.compute.cpu.kernels. This file is included once for each instruction set, in its own namespace and with its own
// target attribute. The includer defines
//   DOT(sum, w, x)  sum[lane] += w[2·lane] · x[2·lane] + w[2·lane + 1] · x[2·lane + 1], of int16
//   BYTE_DOT(sum, u, s)  the same with four bytes per lane: u unsigned, s signed
//   ANY_NEGATIVE(v) whether any lane of int32 is negative
//   SPLIT_BYTES     whether BYTE_DOT is one instruction, so that 8 bits times the bytes of 16 bits is faster than 16 bits times 16
//   PAIRED_PLACES   whether additions are so much cheaper than products that half the products are replaced (add_pairs)
//   DOT_TOKENS      tokens multiplied together with a tile of integers; more than one where the tile's 16 vectors are in memory
//   FMA(a, b, c)    a · b + c, fused if the target can
//   FUSED           whether it is fused
//   FEW, MANY       rows, tokens and columns of a FloatTile for few and for many tokens
//   Lanes           the vector of floats that fits into a register: 16, or 8 of them
//   FROM_HALVES(out, h)  out = 16 half floats, given as u16x16, as floats
//
// Integer products need 16 consecutive rows interleaved: for each piece of their blocks (a scale, 16 bytes of elements) the pieces of
// all 16 rows are stored together, so that a vector holds one column of 16 rows and sums never cross lanes. The bytes are those of
// the file in another order. Some types are interleaved when a model is loaded, others at each use, a few columns at a time
// (interleaved_at_load). A tile is 16 rows × 32 columns, unpacked to int16 in 16 registers; all tokens use it, which spreads
// the cost of interleaving and unpacking.
//
// Float weights stay in the order of the file: a vector holds 16 columns of one row.

#include "gemm_formats.h"

#include "gemm_quantise.h"

#include "gemm_integer.h"

#include "gemm_float.h"
