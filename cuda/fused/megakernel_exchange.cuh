// What CTAs of the decode megakernel hand one another.
#pragma once

#include <cuda_fp16.h>

#include "megakernel_program.cuh"

namespace quire::cuda::megakernel {

#if __CUDA_ARCH__ >= 900

namespace {

// What blocks tell one another in this kernel are halves, each at an address of its own for each operation and for every other
// step. A step clears those of the next to what no result is; so who reads a half sees whether it is there yet, and nobody needs
// to wait until all that was written before the blocks' counter can be seen, too. The counter only says when to look.
__device__ bool  has_empty(std::uint32_t pair) { return (~pair - 0x00010001u) & pair & 0x80008000u; }
__device__ uint4 load_relaxed(const void* p) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}
// v, which was read from there, once it is complete.
__device__ uint4 poll(uint4 v, const void* p) {
    while (has_empty(v.x) || has_empty(v.y) || has_empty(v.z) || has_empty(v.w)) v = load_relaxed(p);
    return v;
}
__device__ Half load_relaxed_fp16(const Half* p) {
    Half v;
    asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
    return v;
}
__device__ __half poll_fp16(Half v, const Half* p) {
    while (v == empty_fp16) v = load_relaxed_fp16(p);
    return __ushort_as_half(v);
}
__device__ void store_relaxed_fp16(void* halves, int at, float v) {
    asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(static_cast<__half*>(halves) + at),
                 "h"(__half_as_ushort(__float2half(v)))
                 : "memory");
}

} // namespace

#endif

} // namespace quire::cuda::megakernel
