// GEMV with weights in shared memory: the layout of a pipeline stage, and its dot products.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "../warp.cuh"
#include "gemv.cuh"
#include "quantised_x.cuh"

namespace quire::cuda {

// Columns that a warp takes at a time.
constexpr __host__ __device__ int unit_cols(Kind k) { return k == kind_f16 ? 256 : k == kind_q4_k ? 1024 : 512; }
constexpr __host__ __device__ int warps_of(Kind k) { return k == kind_q4_k ? 16 : 8; }
// Bytes of some columns of a row.
constexpr __host__ __device__ int data_bytes(Kind k, int cols) {
    return k == kind_f16 ? cols * 2 : k == kind_q4_k ? cols / 256 * 144 : cols;
}
constexpr __host__ __device__ int scale_bytes(Kind k, int cols) {
    return k == kind_i8 ? cols / 16 : k == kind_i8_float ? cols / 4 : k == kind_i8_float_min ? cols / 8 : 0;
}
constexpr __host__ __device__ int min_bytes(Kind k, int cols) { return k == kind_i8_float_min ? cols / 8 : 0; }
constexpr __host__ __device__ int row_bytes(Kind k, int cols) {
    return data_bytes(k, cols) + scale_bytes(k, cols) + min_bytes(k, cols);
}

#if __CUDA_ARCH__ >= 900

// sum[r] += weights of one stage · columns base .. base + n of x, which is fp16 or quantised. `from`: the data of R rows, then
// their scales, then their minima.
template <Kind K, int R>
__device__ inline void accumulate_stage(const unsigned char* from, int full, const unsigned char* x,
                                        const QuantisedX& quantised, int base, int n, float (&sum)[R]) {
    const int            lane   = threadIdx.x % 32;
    const int            data   = data_bytes(K, full);
    const unsigned char* scales = from + R * data;
    const unsigned char* mins   = scales + R * scale_bytes(K, full);
    if constexpr (K == kind_f16) {
#pragma unroll 4
        for (int c = lane * 8; c < n; c += 256) {
            const uint4  xs = word_at(x + (base + c) * 2);
            const float2 p = as_float2(xs.x), q = as_float2(xs.y), s = as_float2(xs.z), t = as_float2(xs.w);
#pragma unroll
            for (int r = 0; r < R; r++) {
                const uint4  w = word_at(from + r * data + c * 2);
                const float2 a = as_float2(w.x), b = as_float2(w.y), d = as_float2(w.z), e = as_float2(w.w);
                sum[r] += a.x * p.x + a.y * p.y + b.x * q.x + b.y * q.y + d.x * s.x + d.y * s.y + e.x * t.x + e.y * t.y;
            }
        }
    } else if constexpr (K == kind_q4_k) {
        const int part = lane % 8;
#pragma unroll 2
        for (int s = lane / 8; s < n / 256; s += 4) {
            const XOfQ4K words(quantised, base + s * 256, part);
#pragma unroll
            for (int r = 0; r < R; r++) {
                const unsigned char* block = from + r * data + s * 144;
                sum[r] += words.times(word_at(block), word_at(block + 16 + part * 16));
            }
        }
    } else {
        constexpr int  group    = K == kind_i8_float ? 16 : 32;
        constexpr bool has_mins = K == kind_i8_float_min;
#pragma unroll 2
        for (int c = lane * 16; c < n; c += 512) {
            const XOfI8 words(quantised, base + c);
#pragma unroll
            for (int r = 0; r < R; r++) {
                const unsigned char* s     = scales + r * scale_bytes(K, full);
                const float          scale = K == kind_i8 ? __half2float(reinterpret_cast<const __half*>(s)[c / group])
                                                          : reinterpret_cast<const float*>(s)[c / group];
                const float          min =
                    has_mins ? reinterpret_cast<const float*>(mins + r * min_bytes(K, full))[c / group] : 0.0f;
                sum[r] += words.times<has_mins>(word_at(from + r * data + c), scale, min);
            }
        }
    }
}

#endif

} // namespace quire::cuda
