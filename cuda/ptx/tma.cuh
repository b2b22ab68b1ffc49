// Hopper's asynchronous bulk copies from global to shared memory: one thread starts a copy, and a barrier reports its end.
// (PTX ISA: cp.async.bulk, mbarrier.)
#pragma once

#include <cstdint>

namespace quire::cuda {

#if __CUDA_ARCH__ >= 900

__device__ inline unsigned shared_address(const void* p) { return unsigned(__cvta_generic_to_shared(p)); }

__device__ inline void barrier_init(std::uint64_t* b, unsigned count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(count) : "memory");
}
// After the last barrier_init, before the first copy.
__device__ inline void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void barrier_arrive(std::uint64_t* b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}
// Arrives; the phase also waits for so many bytes of copies.
__device__ inline void barrier_expect(std::uint64_t* b, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes)
                 : "memory");
}
// Waits until the phase of that parity is complete.
__device__ inline void barrier_wait(std::uint64_t* b, unsigned parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::
            "r"(shared_address(b)),
        "r"(parity)
        : "memory");
}
// Whether it is, without waiting.
__device__ inline bool barrier_passed(std::uint64_t* b, unsigned parity) {
    unsigned done;
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(shared_address(b)), "r"(parity)
                 : "memory");
    return done != 0;
}
// What is read once only, as weights are in a step, should not push other things out of the second-level cache.
__device__ inline std::uint64_t read_once() {
    std::uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ inline void copy_bulk(void* to, const void* from, unsigned bytes, std::uint64_t* b, std::uint64_t policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(b)), "l"(policy)
        : "memory");
}
// Addresses and bytes are multiples of 16.
__device__ inline void copy_bulk(void* to, const void* from, unsigned bytes, std::uint64_t* b) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(b))
                 : "memory");
}

#endif

} // namespace quire::cuda
