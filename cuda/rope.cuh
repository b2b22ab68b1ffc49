// RoPE: rotates pairs of dimensions of q and k by an angle that grows with the position. NeoX pairs are half a head apart,
// (i, i + n_pairs); interleaved pairs are neighbours, (2i, 2i + 1).
#pragma once

#include <cuda_runtime.h>

#include "kernels.h"

namespace quire::cuda {

// Sine and cosine of position · frequency. The angle is first reduced to one period, by 2π in two parts: then the fast
// functions are good to 2^-21.
__device__ inline void rope_angle(float position, float frequency, float& sine, float& cosine) {
    const float angle = position * frequency, periods = rintf(angle * 0.15915494309f);
    const float rest = fmaf(-periods, -1.7484556e-7f, fmaf(-periods, 6.2831855f, angle));
    sine = __sinf(rest), cosine = __cosf(rest);
}

__device__ inline float2 rotate_pair(float x, float y, float sine, float cosine) {
    return {x * cosine - y * sine, x * sine + y * cosine};
}

// Whether `rope` rotates the results of this GEMM, which are q, k and v as they are, in all dimensions of their heads.
inline bool rotates_results(const RopeStore& rope, const Operation& gemm) {
    return gemm.kind == Operation::gemm && gemm.n_projections == 3 && gemm.projection[0].out == rope.q &&
           gemm.projection[1].out == rope.k && gemm.projection[2].out == rope.v && rope.n_pairs * 2 == rope.head_dim &&
           rope.q_dim == rope.head_dim && rope.q_first == 0 && rope.cache_v != nullptr &&
           gemm.projection[0].scale == 1 && gemm.projection[1].scale == 1 && gemm.projection[2].scale == 1;
}

} // namespace quire::cuda
