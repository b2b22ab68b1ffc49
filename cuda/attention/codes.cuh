// Rows of K and V that are codes (KvArray in kernels.h): what the codes are worth, and numbers as codes.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "../epilogue.cuh"
#include "../kernels.h"
#include "../paged_kv.cuh"
#include "../warp.cuh"

namespace quire::cuda {

// Four codes without their scale: two pairs of fp16, which hold each code exactly. A byte b in the low bits of the fp16 1024 makes 1024 + b of
// it; int8 codes are stored with 128 added.
template <KvType Type>
__device__ inline uint2 as_fp16(std::uint32_t codes) {
    uint2 pairs;
    if constexpr (Type == KvType::e4m3) {
        const __half2_raw low  = __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t(codes & 0xffff), __NV_E4M3),
                          high = __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t(codes >> 16), __NV_E4M3);
        pairs                  = {low.x | std::uint32_t(low.y) << 16, high.x | std::uint32_t(high.y) << 16};
    } else {
        pairs = {__byte_perm(codes, 0x64646464u, 0x4140), __byte_perm(codes, 0x64646464u, 0x4342)};
        for (std::uint32_t* pair : {&pairs.x, &pairs.y}) {
            auto& numbers = *reinterpret_cast<__half2*>(pair);
            numbers       = __hsub2(numbers, __float2half2_rn(1152));
        }
    }
    return pairs;
}
__device__ inline uint2 as_fp16(std::uint32_t codes, KvType type) {
    return type == KvType::e4m3 ? as_fp16<KvType::e4m3>(codes) : as_fp16<KvType::i8>(codes);
}

// Four codes as fp16, of int8 those that are stored, from 0 to 255, times 2^-24.
template <KvType Type>
__device__ inline uint2 tiny_fp16(std::uint32_t codes) {
    if constexpr (Type == KvType::i8) return {__byte_perm(codes, 0, 0x4140), __byte_perm(codes, 0, 0x4342)};
    else return as_fp16<Type>(codes);
}

// A scale's unit: the largest code.
__host__ __device__ constexpr float top_code(KvType type) { return type == KvType::e4m3 ? 448.0f : 127.0f; }

// How numbers of a row become codes, by their largest magnitude, which becomes the largest code. A row with an infinity or NaN becomes NaN.
struct RowCode {
    float  scale, inverse;
    KvType type;

    __device__ RowCode(float most, KvType type) : type(type) {
        const float top   = top_code(type);
        const bool  usual = most >= 1e-30f && most < INFINITY;
        inverse           = usual ? top / most : 0.0f;
        scale             = usual ? most / top : most < 1e-30f ? 0.0f : NAN;
    }
    __device__ unsigned char of(float x) const {
        const float v = inverse == 0 ? 0.0f : x * inverse;
        return type == KvType::e4m3 ? __nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E4M3)
                                    : static_cast<unsigned char>(__float2int_rn(v) + 128);
    }
};

// x times the Hadamard matrix of that size, a power of two up to 32 · N, over its root. Number lane + 32 r of a row is x[r].
template <int N>
__device__ inline void spread_lanes(float (&x)[N], int size, int lane) {
    if (size == 1) return;
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2)
#pragma unroll
        for (int r = 0; r < N; r++) {
            const float other = __shfl_xor_sync(~0u, x[r], apart);
            if (apart < size) x[r] = lane & apart ? other - x[r] : x[r] + other;
        }
#pragma unroll
    for (int apart = 1; apart < N; apart *= 2)
#pragma unroll
        for (int r = 0; r < N; r++)
            if (!(r & apart) && 32 * apart < size) {
                const float a = x[r], b = x[r + apart];
                x[r] = a + b, x[r + apart] = a - b;
            }
    const float factor = rsqrtf(float(size));
#pragma unroll
    for (int r = 0; r < N; r++) x[r] *= factor;
}

// A row of K or V, of one position and KV head, in an array of rows of `cols` numbers.
struct KvRow {
    const unsigned char* row;
    const float*         scales; // null: fp16
    KvType               type;

    __device__ KvRow(const KvArray& a, int block, int kv_head, int offset, int block_size, int cols)
        : row(static_cast<const unsigned char*>(a.rows) +
              kv_row(block, kv_head, offset, a.block_rows, block_size) * cols * (a.scales ? 1 : 2)),
          scales(a.scales ? a.scales + kv_row(block, kv_head, offset, a.block_scales, block_size) * a.parts : nullptr),
          type(a.type) {}

    // Eight numbers as fp16, from `first` on, a multiple of eight. `part`: which scale is theirs.
    __device__ uint4 eight(int first, int part = 0) const {
        if (!scales) return *reinterpret_cast<const uint4*>(row + 2 * first);
        const uint2 codes = *reinterpret_cast<const uint2*>(row + first);
        const uint2 a = as_fp16(codes.x, type), b = as_fp16(codes.y, type);
        const float scale  = scales[part];
        const auto  scaled = [&](std::uint32_t pair) {
            const float2 f = as_float2(pair);
            return pack_finite(f.x * scale, f.y * scale);
        };
        return {scaled(a.x), scaled(a.y), scaled(b.x), scaled(b.y)};
    }
    __device__ float number(int d, int part = 0) const {
        if (!scales) return __half2float(reinterpret_cast<const __half*>(row)[d]);
        return as_float2(as_fp16(row[d], type).x).x * scales[part];
    }
};

} // namespace quire::cuda
