// mbarrier: Hopper's barriers in shared memory, on which asynchronous copies report their bytes. (PTX ISA: mbarrier.)
#pragma once

#include <cstdint>

namespace quire::cuda {

#if __CUDA_ARCH__ >= 900

__device__ inline unsigned shared_address(const void* p) { return unsigned(__cvta_generic_to_shared(p)); }

__device__ inline void mbarrier_init(std::uint64_t* b, unsigned count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(count) : "memory");
}
// Makes the initialised barriers visible to TMA: after the last mbarrier_init(), before the first copy.
__device__ inline void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void mbarrier_arrive(std::uint64_t* b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}
// Arrives; the phase completes only when that many bytes have been copied, too.
__device__ inline void mbarrier_arrive_expect_tx(std::uint64_t* b, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes)
                 : "memory");
}
// Waits until the phase of that parity is complete.
__device__ inline void mbarrier_wait(std::uint64_t* b, unsigned parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::
            "r"(shared_address(b)),
        "r"(parity)
        : "memory");
}

#endif

} // namespace quire::cuda
