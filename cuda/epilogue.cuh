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
// (1 + tanh x) / 2 is the sigmoid of 2x, which is cheaper.
__device__ inline float geglu(float gate, float up) {
    return __fdividef(gate, 1 + __expf(-1.5957691216057308f * (gate + 0.044715f * gate * gate * gate))) * up;
}
// activation(gate) · up.
__device__ inline float gated(Activation activation, float gate, float up) {
    switch (activation) {
        case Activation::silu: return swiglu(gate, up);
        case Activation::gelu_tanh: return geglu(gate, up);
        case Activation::gelu_erf: return 0.5f * gate * (1 + erff(gate * 0.7071067811865476f)) * up;
        case Activation::relu: return (gate < 0 ? 0.0f : gate) * up; // NaN stays NaN
        case Activation::clamped_swiglu: {
            const float g = gate > 7 ? 7.0f : gate, u = up > 7 ? 7.0f : up < -7 ? -7.0f : up;
            return __fdividef(g, 1 + __expf(-1.702f * g)) * (u + 1);
        }
    }
    return 0;
}

// One result, in the type of the projection.
__device__ inline void store_result(const Projection& p, std::int64_t at, float value) {
    if (p.out_is_float) static_cast<float*>(p.out)[at] = value;
    else static_cast<__half*>(p.out)[at] = __float2half(value);
}

} // namespace quire::cuda
