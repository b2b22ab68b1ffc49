// Numbers as codes of e4m3 with a scale: the largest magnitude becomes the largest code.
#pragma once

#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace quire::cuda {

struct Fp8Scale {
    static constexpr float top_code = 448;
    float                  scale, inverse; // a code's unit, and codes in a unit

    // An infinity or NaN makes all numbers NaN.
    __device__ explicit Fp8Scale(float most) : scale(most / top_code), inverse(most > 0 ? top_code / most : 0.0f) {
        if (!(most < INFINITY)) scale = inverse = NAN;
    }
    // Two codes, the first one in the low byte.
    __device__ std::uint32_t codes(float2 v) const {
        return __nv_cvt_float2_to_fp8x2(make_float2(v.x * inverse, v.y * inverse), __NV_SATFINITE, __NV_E4M3);
    }
    __device__ std::uint8_t code(float v) const {
        return __nv_cvt_float_to_fp8(v * inverse, __NV_SATFINITE, __NV_E4M3);
    }
};

} // namespace quire::cuda
