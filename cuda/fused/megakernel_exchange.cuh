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
__device__ bool  is_missing(std::uint32_t pair) { return (~pair - 0x00010001u) & pair & 0x80008000u; }
__device__ uint4 shared_word(const void* p) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}
// v, which was read from there, once it is complete.
__device__ uint4 complete(uint4 v, const void* p) {
    while (is_missing(v.x) || is_missing(v.y) || is_missing(v.z) || is_missing(v.w)) v = shared_word(p);
    return v;
}
__device__ Half shared_half(const Half* p) {
    Half v;
    asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
    return v;
}
__device__ __half complete_half(Half v, const Half* p) {
    while (v == cleared_half) v = shared_half(p);
    return __ushort_as_half(v);
}
__device__ void put_half(void* halves, int at, float v) {
    asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(static_cast<__half*>(halves) + at),
                 "h"(__half_as_ushort(__float2half(v)))
                 : "memory");
}

} // namespace

#endif

} // namespace quire::cuda::megakernel
