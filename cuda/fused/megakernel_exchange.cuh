// The exchange between the CTAs of the decode megakernel, without a full grid barrier. Every value that CTAs exchange is an
// fp16 at an address of its own for each instruction, in one buffer for even and one for odd steps. A step empties the buffer
// of the next step (empty_fp16), so a reader sees for every value whether it is there yet, and polls for the missing values.
// The CTAs' common progress counter only says when to look: it needs no fence, so no CTA waits until all earlier writes are
// visible.
#pragma once

#include <cuda_fp16.h>

#include "../epilogue.cuh"
#include "megakernel_program.cuh"

namespace quire::cuda::megakernel {

#if __CUDA_ARCH__ >= 900

namespace {

__device__ bool  has_empty(std::uint32_t pair) { return (~pair - 0x00010001u) & pair & 0x80008000u; }
__device__ uint4 load_relaxed(const void* p) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}
// v, which was read from p; reads again until it is complete.
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
__device__ void store_relaxed_fp16(void* values, int at, float v) {
    asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(static_cast<__half*>(values) + at),
                 "h"(__half_as_ushort(to_finite(v)))
                 : "memory");
}

} // namespace

#endif

} // namespace quire::cuda::megakernel
