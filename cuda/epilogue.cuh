// Epilogues of GEMMs and GEMVs: the arithmetic on the float32 sums before they are stored.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "kernels.h"

namespace quire::cuda {

// store: as they are, with bias; swiglu, geglu: of gate and up, with silu or gelu_tanh; add_norm: added to the residual, whose
// RMS norm is stored; rope_store: q, k and v rotated, K and V into the cache.
enum class Epilogue : int { store, swiglu, geglu, add_norm, rope_store };
constexpr __host__ __device__ bool is_gated(Epilogue e) { return e == Epilogue::swiglu || e == Epilogue::geglu; }

__device__ inline float swiglu(float gate, float up) { return __fdividef(gate, 1 + __expf(-gate)) * up; }
// (1 + tanh x) / 2 is the sigmoid of 2x, which is cheaper.
__device__ inline float geglu(float gate, float up) {
    return __fdividef(gate, 1 + __expf(-1.5957691216057308f * (gate + 0.044715f * gate * gate * gate))) * up;
}

__device__ inline float activated(Activation activation, float v) {
    switch (activation) {
        case Activation::gelu_tanh: return 0.5f * v * (1 + tanhf(0.7978845608028654f * (v + 0.044715f * v * v * v)));
        case Activation::gelu_erf: return 0.5f * v * (1 + erff(v * 0.7071067811865476f));
        case Activation::relu: return v < 0 ? 0.0f : v; // NaN stays NaN
        case Activation::relu_squared: return v < 0 ? 0.0f : v * v;
        case Activation::sigmoid: return __fdividef(1, 1 + __expf(-v));
        default: return __fdividef(v, 1 + __expf(-v));
    }
}
// activation(gate) · up.
__device__ inline float gated(Activation activation, float gate, float up) {
    switch (activation) {
        case Activation::silu: return swiglu(gate, up);
        case Activation::gelu_tanh: return geglu(gate, up);
        case Activation::clamped_swiglu: {
            const float g = gate > 7 ? 7.0f : gate, u = up > 7 ? 7.0f : up < -7 ? -7.0f : up;
            return __fdividef(g, 1 + __expf(-1.702f * g)) * (u + 1);
        }
        default: return activated(activation, gate) * up;
    }
}

// Two floats as fp16 in one word, and one: the largest fp16 instead of infinity, as trained models may have larger values than
// fp16 has. NaN stays NaN.
__device__ inline std::uint32_t pack_finite(float a, float b) {
    std::uint32_t word;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(b), "f"(a));
    return word;
}
__device__ inline __half to_finite(float a) {
    std::uint16_t h;
    asm("cvt.rn.satfinite.f16.f32 %0, %1;" : "=h"(h) : "f"(a));
    return __ushort_as_half(h);
}

// One result, in the type of the projection.
__device__ inline void store_result(const Projection& p, std::int64_t at, float value) {
    value *= p.scale;
    if (p.out_is_float) static_cast<float*>(p.out)[at] = value;
    else static_cast<__half*>(p.out)[at] = to_finite(value);
}

} // namespace quire::cuda
