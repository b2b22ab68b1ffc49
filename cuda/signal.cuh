// Counters by which the CTAs of a kernel, or the ranks, signal to each other, and the loop in which a thread waits.
#pragma once

#include <cuda_runtime.h>

namespace quire::cuda {

// Counts one up, with release.
__device__ inline void signal(unsigned* counter) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ inline unsigned read_acquire(const unsigned* counter) {
    unsigned n;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(n) : "l"(counter) : "memory");
    return n;
}
__device__ inline unsigned read_relaxed(const unsigned* counter) {
    unsigned n;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(n) : "l"(counter) : "memory");
    return n;
}

// Waits until ready(). gives_up(n) is asked after the n-th time that it was not; true ends the waiting.
template <class Ready, class GivesUp>
__device__ inline void wait_until(const Ready& ready, const GivesUp& gives_up) {
    for (int n = 1; !ready(); n++)
        if (gives_up(n)) return;
}
template <class Ready>
__device__ inline void wait_until(const Ready& ready) {
    wait_until(ready, [](int) { return false; });
}

} // namespace quire::cuda
