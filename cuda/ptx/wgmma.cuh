// wgmma: Hopper's tensor cores as a warpgroup uses them, with operands in shared memory in the 128-byte swizzle: rows of 64
// fp16 (128 bytes), in which the 16-byte word w of row r is stored at w ^ (r % 8). (PTX ISA: wgmma, matrix descriptors.)
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "mma.cuh"

namespace quire::cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most N of the committed groups are still running.
template <int N>
__device__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// Keeps the compiler from moving uses of the accumulators across a wait.
template <int Count>
__device__ void wgmma_pin(float (&r)[Count]) {
#pragma unroll
    for (int i = 0; i < Count; i++) asm volatile("" : "+f"(r[i])::"memory");
}

// A value that is the same in all lanes, made known as such to the compiler: descriptors made of such values live in uniform
// registers. Others are moved there one by one between the wgmma instructions, which then wait.
__device__ inline int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// A matrix in shared memory: `stride` bytes between groups of eight rows, `leading` between slabs of 64 columns where the
// operand is wider than that.
__device__ inline std::uint64_t matrix_descriptor(unsigned address, unsigned leading, unsigned stride) {
    return std::uint64_t(1 << 30 | stride >> 4) << 32 | (address >> 4 | leading << 12);
}
__device__ inline std::uint64_t advance(std::uint64_t descriptor, unsigned bytes) {
    return descriptor >> 32 << 32 | unsigned(descriptor) + (bytes >> 4);
}

#define F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(d, i) F4(d, i), F4(d, i + 4), F4(d, i + 8), F4(d, i + 12)
#define W4(d, i) "=f"(d[i]), "=f"(d[i + 1]), "=f"(d[i + 2]), "=f"(d[i + 3])
#define W16(d, i) W4(d, i), W4(d, i + 4), W4(d, i + 8), W4(d, i + 12)
#define D32                                                                                                      \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28," \
    "%29,%30,%31"
#define D64                                                                                                     \
    D32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56," \
        "%57,%58,%59,%60,%61,%62,%63"
#define D96                                                                                                    \
    D64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88" \
        ",%89,%90,%91,%92,%93,%94,%95"
#define D128                                                                                                   \
    D64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88" \
        ",%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110"  \
        ",%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define F64(d, i) F16(d, i), F16(d, i + 16), F16(d, i + 32), F16(d, i + 48)

// d [64 × N] = A [64 × 16] · B [N × 16]ᵀ, both in shared memory; d += where `add`. A thread's accumulators are the first N / 2
// of d.
template <int N, int Size>
__device__ void wgmma_ss(float (&d)[Size], std::uint64_t a, std::uint64_t b, int add) {
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
    else if constexpr (N == 192)
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, %98, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n192k16.f32.f16.f16 {" D96 "}, %96, %97, p, 1, 1, 0, 0;}\n"
            : F64(d, 0), F16(d, 64), F16(d, 80)
            : "l"(a), "l"(b), "r"(add));
    else
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, %130, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" D128 "}, %128, %129, p, 1, 1, 0, 0;}\n"
            : F64(d, 0), F64(d, 64)
            : "l"(a), "l"(b), "r"(add));
}

// This wgmma with the choice between = and += at compile time; N is 32, 64 or 128.
template <int N, bool Add, int Size>
__device__ void wgmma_ss(float (&d)[Size], std::uint64_t a, std::uint64_t b) {
    if constexpr (N == 128 && Add)
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" D64 "}, %64, %65, 1, 1, 1, 0, 0;\n"
                     : F64(d, 0)
                     : "l"(a), "l"(b));
    else if constexpr (N == 128)
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" D64 "}, %64, %65, 0, 1, 1, 0, 0;\n"
                     : W16(d, 0), W16(d, 16), W16(d, 32), W16(d, 48)
                     : "l"(a), "l"(b));
    else if constexpr (N == 32 && Add)
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
            "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, 1, 1, 1, 0, 0;\n"
            : F16(d, 0)
            : "l"(a), "l"(b));
    else if constexpr (N == 32)
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
            "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, 0, 1, 1, 0, 0;\n"
            : W16(d, 0)
            : "l"(a), "l"(b));
    else if constexpr (Add)
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" D32 "}, %32, %33, 1, 1, 1, 0, 0;\n"
                     : F16(d, 0), F16(d, 16)
                     : "l"(a), "l"(b));
    else
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" D32 "}, %32, %33, 0, 1, 1, 0, 0;\n"
                     : W16(d, 0), W16(d, 16)
                     : "l"(a), "l"(b));
}
// d [64 × 128] = A [64 × 32] · B [128 × 32]ᵀ in e4m3, both in shared memory, rows of 128 codes (128 bytes); d += where Add.
template <bool Add>
__device__ void wgmma_e4m3(float (&d)[64], std::uint64_t a, std::uint64_t b) {
    if constexpr (Add)
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" D64 "}, %64, %65, 1, 1, 1;\n"
                     : F64(d, 0)
                     : "l"(a), "l"(b));
    else
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" D64 "}, %64, %65, 0, 1, 1;\n"
                     : W16(d, 0), W16(d, 16), W16(d, 32), W16(d, 48)
                     : "l"(a), "l"(b));
}
// d [64 × 2 · Size] += A [64 × 16] in registers · B [16 × 2 · Size] in shared memory
__device__ inline void wgmma_rs(float (&d)[128], const std::uint32_t (&a)[4], std::uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" D128
                 "}, {%128,%129,%130,%131}, %132, 1, 1, 1, 1;\n"
                 : F64(d, 0), F64(d, 64)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ inline void wgmma_rs(float (&d)[64], const std::uint32_t (&a)[4], std::uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" D64 "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;\n"
                 : F64(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ inline void wgmma_rs(float (&d)[32], const std::uint32_t (&a)[4], std::uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" D32 "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;\n"
                 : F16(d, 0), F16(d, 16)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// d [64 × N] += A [64 × 16] in registers · B [N × 16]ᵀ in shared memory.
template <int N>
__device__ void wgmma_rs_rows(float (&d)[N / 2], const std::uint32_t (&a)[4], std::uint64_t b) {
    if constexpr (N == 8)
        asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, 1, 1, 1, 0;\n"
                     : F4(d, 0)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    else if constexpr (N == 16)
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, 1, 1, "
            "1, 0;\n"
            : F4(d, 0), F4(d, 4)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    else if constexpr (N == 32)
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
            "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, 1, 1, 1, 0;\n"
            : F16(d, 0)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    else if constexpr (N == 64)
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" D32
                     "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 0;\n"
                     : F16(d, 0), F16(d, 16)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    else if constexpr (N == 128)
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" D64
                     "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 0;\n"
                     : F64(d, 0)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    else if constexpr (N == 192)
        asm volatile("wgmma.mma_async.sync.aligned.m64n192k16.f32.f16.f16 {" D96
                     "}, {%96,%97,%98,%99}, %100, 1, 1, 1, 0;\n"
                     : F64(d, 0), F16(d, 64), F16(d, 80)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    else
        asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" D128
                     "}, {%128,%129,%130,%131}, %132, 1, 1, 1, 0;\n"
                     : F64(d, 0), F64(d, 64)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#undef D32
#undef D64
#undef D96
#undef D128
#undef F64
#undef F4
#undef F16
#undef W4
#undef W16

#endif

} // namespace quire::cuda
