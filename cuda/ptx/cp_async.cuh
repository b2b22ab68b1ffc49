// cp.async: asynchronous copies of 16 or 4 bytes from global to shared memory, started by every thread for itself (Ampere and
// later).
#pragma once

#include <cstdint>

#include "mbarrier.cuh"

namespace quire::cuda {

__device__ inline void cp_async(void* to, const void* from) {
    const auto address = unsigned(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
}
__device__ inline void cp_async_word(void* to, const void* from) { // 4 bytes
    const auto address = unsigned(__cvta_generic_to_shared(to));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address), "l"(from) : "memory");
}
// Zeros where not valid.
__device__ inline void cp_async(void* to, const void* from, bool valid) {
    const auto address = unsigned(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(valid ? 16 : 0));
}
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most N of the committed groups are still on their way.
template <int N>
__device__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

#if __CUDA_ARCH__ >= 900

// Arrives once all copies that the thread has started are complete.
__device__ inline void cp_async_mbarrier_arrive(std::uint64_t* b) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(b)) : "memory");
}

#endif

} // namespace quire::cuda
