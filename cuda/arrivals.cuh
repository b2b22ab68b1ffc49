// How the CTAs of a launch find out that all of them, or all of a group, are done: each arrives at a counter.
#pragma once

#include <cstdint>

namespace quire::cuda {

// Whether this CTA is the last of n to arrive; the last one sees all earlier writes of the others. By all threads of a CTA. The counter is zero
// before and after a launch.
__device__ inline bool is_last_cta(std::int32_t* arrivals, unsigned n) {
    __shared__ bool is_last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        is_last = unsigned(atomicAdd(arrivals, 1)) == n - 1;
        if (is_last) *arrivals = 0; // for the next launch
        __threadfence();
    }
    __syncthreads();
    return is_last;
}

} // namespace quire::cuda
