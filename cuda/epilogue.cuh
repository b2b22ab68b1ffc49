// Epilogues of GEMMs and GEMVs: what becomes of the float32 sums before they are stored.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "kernels.h"

namespace quire::cuda {

// store: as they are, with bias; swiglu: of gate and up; add_norm: added to the residual, whose RMS norm is stored; rope_store:
// q, k and v rotated, K and V into the cache.
enum class Epilogue : int { store, swiglu, add_norm, rope_store };

__device__ inline float swiglu(float gate, float up) { return __fdividef(gate, 1 + __expf(-gate)) * up; }

// One result, in the type of the projection.
__device__ inline void store_result(const Projection& p, std::int64_t at, float value) {
    if (p.out_is_float) static_cast<float*>(p.out)[at] = value;
    else static_cast<__half*>(p.out)[at] = __float2half(value);
}

} // namespace quire::cuda
