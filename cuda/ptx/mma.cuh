// mma.sync: tensor cores as a warp uses them (Ampere and later), and the loads that lay matrices out for them.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace quire::cuda {

// c += a · b: [16 × 16] · [16 × 8] in fp16, sums in float32, laid out over the lanes as the PTX ISA shows (mma.m16n8k16).
__device__ inline void mma_m16n8k16(float (&c)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,
                                    std::uint32_t a3, std::uint32_t b0, std::uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ inline void mma_m16n8k16(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
    mma_m16n8k16(c, a[0], a[1], a[2], a[3], b0, b1);
}

// c += a · b: [16 × 32] unsigned · [32 × 8] signed int8, sums in int32, laid out as the PTX ISA shows (mma.m16n8k32).
__device__ inline void mma_m16n8k32(std::int32_t (&c)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,
                                    std::uint32_t a3, std::uint32_t b0, std::uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Four 8 × 8 matrices of fp16 from shared memory; each lane gives the address of a row: lanes 0 to 7 of the first matrix, and
// so on.
__device__ inline void ldmatrix_x4(std::uint32_t (&r)[4], unsigned shared_address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address)
                 : "memory");
}
__device__ inline void ldmatrix_x4(std::uint32_t (&r)[4], const __half* p) {
    ldmatrix_x4(r, unsigned(__cvta_generic_to_shared(p)));
}
__device__ inline void ldmatrix_x4_transposed(std::uint32_t (&r)[4], const __half* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(unsigned(__cvta_generic_to_shared(p)))
                 : "memory");
}
// Transposes an 8 × 8 matrix of fp16 in the registers of a warp.
__device__ inline std::uint32_t movmatrix(std::uint32_t v) {
    std::uint32_t out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(v));
    return out;
}

// Two floats as fp16 in one word.
__device__ inline std::uint32_t pack(float a, float b) {
    const __half2 h = __floats2half2_rn(a, b);
    return *reinterpret_cast<const std::uint32_t*>(&h);
}

// Transposes 4 × 4 words of four neighbouring lanes: word i of lane j → word j of lane i. An accumulator has neighbouring
// columns in neighbouring lanes; after this each lane has 16 contiguous bytes to store.
__device__ inline uint4 transpose_quad(const std::uint32_t (&word)[4]) {
    const bool    odd = threadIdx.x & 1, high = threadIdx.x & 2;
    std::uint32_t a[2], b[2]; // of the even and the odd lane: word 0 or 1, and word 2 or 3
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const std::uint32_t other = __shfl_xor_sync(~0u, odd ? word[2 * i] : word[2 * i + 1], 1);
        a[i] = odd ? other : word[2 * i], b[i] = odd ? word[2 * i + 1] : other;
    }
    const std::uint32_t x = __shfl_xor_sync(~0u, high ? a[0] : a[1], 2),
                        y = __shfl_xor_sync(~0u, high ? b[0] : b[1], 2);
    return high ? uint4{x, y, a[1], b[1]} : uint4{a[0], b[0], x, y};
}

} // namespace quire::cuda
