// GEMMs of a warpgroup on Hopper's tensor cores (wgmma), with operands in shared memory in the hardware's layout: rows
// of 64 halves (128 bytes), swizzled: the 16-byte word w of row r is stored at w ^ (r % 8). (PTX ISA, matrix descriptors.)
#pragma once

#include <cuda_fp16.h>

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

#define F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(d, i) F4(d, i), F4(d, i + 4), F4(d, i + 8), F4(d, i + 12)
#define D32                                                                                                      \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28," \
    "%29,%30,%31"
#define D64                                                                                                     \
    D32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56," \
        "%57,%58,%59,%60,%61,%62,%63"
#define D128                                                                                                   \
    D64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88" \
        ",%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110"  \
        ",%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define F64(d, i) F16(d, i), F16(d, i + 16), F16(d, i + 32), F16(d, i + 48)

// d [64 × N] = A [64 × 16] · B [N × 16]ᵀ, both in shared memory; with `add` it is added. In the first N / 2 of a thread's sums.
template <int N, int Size>
__device__ void multiply_tile(float (&d)[Size], std::uint64_t a, std::uint64_t b, int add) {
    if constexpr (N == 8)
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, %6, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0,%1,%2,%3}, %4, %5, p, 1, 1, 0, 0;}\n"
            : F4(d, 0)
            : "l"(a), "l"(b), "r"(add));
    else if constexpr (N == 16)
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, %10, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, p, 1, 1, 0, "
            "0;}\n"
            : F4(d, 0), F4(d, 4)
            : "l"(a), "l"(b), "r"(add));
    else if constexpr (N == 32)
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, %18, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
            "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, p, 1, 1, 0, 0;}\n"
            : F16(d, 0)
            : "l"(a), "l"(b), "r"(add));
    else if constexpr (N == 64)
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, %34, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" D32 "}, %32, %33, p, 1, 1, 0, 0;}\n"
            : F16(d, 0), F16(d, 16)
            : "l"(a), "l"(b), "r"(add));
    else if constexpr (N == 128)
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, %66, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" D64 "}, %64, %65, p, 1, 1, 0, 0;}\n"
            : F64(d, 0)
            : "l"(a), "l"(b), "r"(add));
    else
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, %130, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" D128 "}, %128, %129, p, 1, 1, 0, 0;}\n"
            : F64(d, 0), F64(d, 64)
            : "l"(a), "l"(b), "r"(add));
}

#undef D32
#undef D64
#undef D128
#undef F64
#undef F4
#undef F16

// Results, as wgmma lays them over the lanes: neighbouring columns of a row in four lanes.
__device__ inline std::uint32_t pack(float a, float b) {
    const __half2 h = __floats2half2_rn(a, b);
    return *reinterpret_cast<const std::uint32_t*>(&h);
}

// Word i of lane j of four neighbouring ones → word j of lane i.
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

#endif

} // namespace quire::cuda
