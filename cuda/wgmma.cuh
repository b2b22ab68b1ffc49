// Products of a group of four warps by Hopper's tensor cores (wgmma), operands in shared memory as the hardware wants them: rows
// of 64 halves, 128 bytes, swizzled: the 16-byte word w of row r stands at w ^ (r % 8). (PTX ISA, matrix descriptors.)
#pragma once

#include <cstdint>

namespace quire::cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Left>
__device__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Left) : "memory");
}
// The compiler must not move uses of the accumulators across a wait.
template <int Count>
__device__ void keep(float (&r)[Count]) {
#pragma unroll
    for (int i = 0; i < Count; i++) asm volatile("" : "+f"(r[i])::"memory");
}

// Tells the compiler that all lanes have the same value. Descriptors made of such values stand in uniform registers; others
// are moved there one by one between the products, which then wait.
__device__ inline int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// What stands at `address`, `stride` bytes between groups of eight rows, `leading` between slabs of 64 where the slab is the
// wide side. 128-byte swizzle.
__device__ inline std::uint64_t descriptor(unsigned address, unsigned leading, unsigned stride) {
    return std::uint64_t(1 << 30 | stride >> 4) << 32 | (address >> 4 | leading << 12);
}
__device__ inline std::uint64_t further(std::uint64_t descriptor, unsigned bytes) {
    return descriptor >> 32 << 32 | unsigned(descriptor) + (bytes >> 4);
}

#endif

} // namespace quire::cuda
