// Shared by several kernels: programmatic dependent launch, sums over a warp or a CTA, and reading weights of any form.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "context.cuh"
#include "kernels.h"

namespace quire::cuda {

// Programmatic dependent launch (Hopper and later): a kernel begins while the kernels before it still run. That can be several kernels,
// because each lets the next one begin before it waits itself. wait_for_inputs() returns when all kernels before this one have ended and
// their results are visible.
//
// The rule: before wait_for_inputs() a kernel
//   - reads only memory that no other kernel of the step writes: weights, the step's plan, the recurrent state of its own layer, and K and V of
//     positions that the plan calls readable (StepPlan::readable: a table may also lead to blocks that another sequence writes in the same step);
//   - writes nothing but its own shared memory and registers;
// In every kernel at least one thread of each CTA calls wait_for_inputs(); else the next kernel would not wait for the kernels before.
// A kernel's first statement is wait_for_inputs(), or reads_early() if the kernel reads something before (tests/kernels.sh checks).
__device__ inline void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
    cudaGridDependencySynchronize();
#endif
}

// In a build with QUIRE_WAIT_FIRST nothing is read early: every result must have the same bits as without.
__device__ inline void reads_early() {
#ifdef QUIRE_WAIT_FIRST
    wait_for_inputs();
#endif
}

__device__ inline float2 as_float2(std::uint32_t h) { return __half22float2(*reinterpret_cast<const __half2*>(&h)); }

__device__ inline float softcapped(float score, float softcap) {
    return softcap > 0 ? softcap * tanhf(score / softcap) : score;
}

__device__ inline float warp_sum(float v) {
    for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(~0u, v, step);
    return v;
}
__device__ inline float warp_max(float v) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, step));
    return v;
}

// NaN if one of them is: a value scaled by it stays NaN, so that a broken model is noticed.
__device__ inline float max_or_nan(float a, float b) {
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
    return most;
}
__device__ inline float warp_max_or_nan(float v) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) v = max_or_nan(v, __shfl_xor_sync(~0u, v, step));
    return v;
}

// The threads that sum or synchronise together: all threads of a CTA, or the first ones of a warp-specialised kernel's CTA.
struct WholeCta {
    static __device__ void sync() { __syncthreads(); }
    static __device__ int  size() { return int(blockDim.x); }
};
template <int N>
struct FirstThreads {
    static __device__ void          sync() { asm volatile("bar.sync 1, %0;" ::"n"(N) : "memory"); }
    static __device__ constexpr int size() { return N; }
};

// `sums`: 32 floats of shared memory. All threads of the team get the result; the order of the sum is fixed.
template <class Team = WholeCta>
__device__ inline float cta_sum(float v, float* sums) {
    v = warp_sum(v);
    Team::sync(); // the last use of `sums` is over
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = v;
    Team::sync();
    return warp_sum(int(threadIdx.x) % 32 < Team::size() / 32 ? sums[threadIdx.x % 32] : 0.0f);
}

// The largest of all threads of a CTA, NaN if one of them is; `most`: 32 floats of shared memory.
__device__ inline float cta_max_or_nan(float v, float* most) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) v = max_or_nan(v, __shfl_xor_sync(~0u, v, step));
    __syncthreads(); // the last use of `most` is over
    if (threadIdx.x % 32 == 0) most[threadIdx.x / 32] = v;
    __syncthreads();
    v = most[0];
    for (unsigned w = 1; w < blockDim.x / 32; w++) v = max_or_nan(v, most[w]);
    return v;
}

// Sub-block j (32 weights) of a Q4_K superblock: value = d * scale * q - dmin * min. 12 bytes hold eight pairs of 6 bits.
__device__ inline void q4_k_scale(const unsigned char* scales, int j, int& scale, int& min) {
    if (j < 4) {
        scale = scales[j] & 63;
        min   = scales[j + 4] & 63;
    } else {
        scale = (scales[j + 4] & 15) | ((scales[j - 4] >> 6) << 4);
        min   = (scales[j + 4] >> 4) | ((scales[j] >> 6) << 4);
    }
}

// Element `col` of a row of superblocks: fp16 d and dmin, scales[12], 128 bytes of nibbles (64 weights in 32 bytes).
__device__ inline float q4_k_at(const unsigned char* row, int col) {
    const unsigned char* block = row + col / 256 * 144;
    const int            in = col % 256, chunk = in / 64, high = in % 64 / 32;
    int                  scale, min;
    q4_k_scale(block + 4, in / 32, scale, min);
    const unsigned char byte = block[16 + chunk * 32 + in % 32];
    const float         d    = __half2float(*reinterpret_cast<const __half*>(block)),
                dmin         = __half2float(*reinterpret_cast<const __half*>(block + 2));
    return d * float(scale) * float(high ? byte >> 4 : byte & 15) - dmin * float(min);
}

// One weight of any form.
__device__ inline float weight_at(const Weight& w, std::int64_t row, std::int64_t col) {
    switch (w.form) {
        case WeightForm::f16: return __half2float(static_cast<const __half*>(w.data)[row * w.cols + col]);
        case WeightForm::f32: return static_cast<const float*>(w.data)[row * w.cols + col];
        case WeightForm::i8: {
            const std::int64_t at = row * w.cols + col, g = at / w.group;
            const float        scale = w.float_scales ? static_cast<const float*>(w.scales)[g]
                                                      : __half2float(static_cast<const __half*>(w.scales)[g]);
            const float        min   = w.mins ? static_cast<const float*>(w.mins)[g] : 0.0f;
            return scale * static_cast<const std::int8_t*>(w.data)[at] - min;
        }
        case WeightForm::q4_k:
            return q4_k_at(static_cast<const unsigned char*>(w.data) + row * (w.cols / 256) * 144, int(col));
    }
    return 0;
}

} // namespace quire::cuda
