// How a warp makes fp16 of quantised weights in shared memory, as the operand of wgmma (or mma) that lives in registers: 16 rows by
// 16 columns, of which a lane has rows lane / 4 and lane / 4 + 8, and columns 2q, 2q + 1, 2q + 8 and 2q + 9, q = lane % 4.
//
// A byte or a nibble in the low bits of an fp16 is a subnormal number, q · 2⁻²⁴, so one fma with the scale makes the weight, with
// one rounding: q · 2⁻²⁴ · (scale · 2^shift). The shift is the matrix's: its largest scale becomes at most 2¹⁵, so that small scales are
// no subnormal numbers. Sums are multiplied by unscale = 2^(24 - shift) in the end, which is exact.
#pragma once

#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "../kernels.h"
#include "../ptx/mma.cuh"
#include "../warp.cuh"
#include "gemv.cuh"

namespace quire::cuda {

// The shift of a matrix, and the factor of its sums.
inline int   shift_of(const Weight& w) { return 15 - w.scale_exponent; }
inline float unscale_of(const Weight& w) { return std::ldexp(1.0f, 24 - shift_of(w)); }

// Bytes of a row in a stage of shared memory, and the 64-column chunks in it. int8: 128 columns in the 128-byte swizzle; Q4_K: a
// superblock.
constexpr __host__ __device__ int stage_row_bytes(Kind kind) { return kind == kind_q4_k ? 144 : 128; }
constexpr __host__ __device__ int stage_chunks(Kind kind) { return kind == kind_q4_k ? 4 : 2; }

// Scales and minima of two rows of a matrix, from the first column on. Q4_K has them in its superblocks.
struct ScaleRows {
    const void *scales[2], *mins[2];
    float       shift[2]; // 2^shift
    int         cols;     // of int8 without minima a multiple of 64, else of a stage
};

namespace {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

__device__ inline std::uint32_t load_pair(unsigned address) { // two bytes
    std::uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address));
    return v;
}
__device__ inline __half2       half2_of(std::uint32_t v) { return *reinterpret_cast<const __half2*>(&v); }
__device__ inline std::uint32_t word_of(__half2 v) { return *reinterpret_cast<const std::uint32_t*>(&v); }

// Two rows of a kind of weights. begin(): once for some rows. fetch(): the scales of a stage, if they are not among the weights; there is
// room for two stages, 0 and 1. stage(): when a stage has come; `stage` is the address of the warp's 16 rows. For each chunk of it, 64
// columns: load() its bytes, and when those of the chunk before are used, scale(), then words(), the operand of each step of 16 columns.
template <Kind K>
struct Unpack;

template <int Group, bool FloatScales, bool Mins>
struct UnpackI8 {
    static constexpr int groups = 128 / Group, pairs = groups / 2; // of a stage

    // Scales and minima of a stage: as in memory.
    struct Loaded {
        std::uint32_t scales[2][FloatScales ? groups : pairs], mins[2][Mins ? groups : 1];
    };
    const char*   scales[2];
    const char*   mins[2];
    float         shift[2];
    int           row_groups;
    Loaded        of_stage[2];                          // this one and the next
    __half2       by[2][pairs / 2], plus[2][pairs / 2]; // of a chunk, two groups each
    std::uint32_t bytes[2][8];

    __device__ void begin(const ScaleRows& rows) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            scales[r] = static_cast<const char*>(rows.scales[r]);
            if (Mins) mins[r] = static_cast<const char*>(rows.mins[r]);
            shift[r] = rows.shift[r];
        }
        row_groups = rows.cols / Group;
    }
    // left: groups of the row from these on. Those behind its end have the scale 0.
    template <int N>
    __device__ void fetch_words(std::uint32_t (&to)[N], const char* from, int left) const {
        if constexpr (N == 2) {
            if (row_groups % 4 == 0) {
                const uint2 v = __ldg(reinterpret_cast<const uint2*>(from));
                to[0] = v.x, to[1] = v.y;
            } else { // rows of half stages
                to[0] = __ldg(reinterpret_cast<const std::uint32_t*>(from));
                to[1] = left > 2 ? __ldg(reinterpret_cast<const std::uint32_t*>(from) + 1) : 0;
            }
        } else {
#pragma unroll
            for (int i = 0; i < N; i += 4) {
                uint4 v = make_uint4(0, 0, 0, 0);
                if (i == 0 || i < left) v = __ldg(reinterpret_cast<const uint4*>(from) + i / 4);
                to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
            }
        }
    }
    template <int To>
    __device__ void fetch(int stage) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int left = row_groups - stage * groups;
            fetch_words(of_stage[To].scales[r], scales[r] + stage * groups * (FloatScales ? 4 : 2), left);
            if constexpr (Mins) fetch_words(of_stage[To].mins[r], mins[r] + stage * groups * 4, left);
        }
    }
    __device__ void stage(unsigned, int) {}
    __device__ void load(unsigned stage, int chunk, int lane) {
        const unsigned row  = stage + unsigned(lane / 4 * 128 + lane % 4 * 2),
                       word = unsigned(chunk * 4) ^ unsigned(lane / 4);
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int s = 0; s < 4; s++)
#pragma unroll
                for (int h = 0; h < 2; h++)
                    bytes[r][s * 2 + h] = load_pair(row + ((word ^ unsigned(s)) << 4) + unsigned(r * 8 * 128 + h * 8));
    }
    template <int Stage>
    __device__ void scale(int chunk) {
        const Loaded& now     = of_stage[Stage];
        const auto    pair_of = [&](const std::uint32_t(&words)[FloatScales ? groups : pairs], int pair, float by) {
            if constexpr (FloatScales)
                return __floats2half2_rn(__uint_as_float(words[pair * 2]) * by,
                                            __uint_as_float(words[pair * 2 + 1]) * by);
            else {
                const float2 both = as_float2(words[pair]);
                return __floats2half2_rn(both.x * by, both.y * by);
            }
        };
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int i = 0; i < pairs / 2; i++) {
                const int pair = chunk * pairs / 2 + i;
                by[r][i]       = pair_of(now.scales[r], pair, shift[r]);
                if constexpr (Mins)
                    plus[r][i] = __floats2half2_rn(-0x1p-24f * shift[r] * __uint_as_float(now.mins[r][pair * 2]),
                                                   -0x1p-24f * shift[r] * __uint_as_float(now.mins[r][pair * 2 + 1]));
                else plus[r][i] = __hmul2(by[r][i], half2_of(0x80808080u)); // the 128 that a byte has too much
            }
    }
    // Where there are minima, there are no negative numbers.
    __device__ void words(int step, std::uint32_t (&a)[4]) const {
        const int g = step * 16 / Group; // of the chunk
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int           r    = i % 2;
            const std::uint32_t both = __byte_perm(bytes[r][step * 2 + i / 2], 0, 0x4140) ^ (Mins ? 0 : 0x00800080u);
            const __half2       s    = g % 2 == 0 ? __low2half2(by[r][g / 2]) : __high2half2(by[r][g / 2]),
                          p          = g % 2 == 0 ? __low2half2(plus[r][g / 2]) : __high2half2(plus[r][g / 2]);
            a[i]                     = word_of(__hfma2(half2_of(both), s, p));
        }
    }
};
template <>
struct Unpack<kind_i8> : UnpackI8<32, false, false> {};
template <>
struct Unpack<kind_i8_float> : UnpackI8<16, true, false> {};
template <>
struct Unpack<kind_i8_float_min> : UnpackI8<32, true, true> {};

// The four lanes of a row compute the scales of two sub-blocks each.
template <>
struct Unpack<kind_q4_k> {
    float         shift[2];
    std::uint32_t own[2][2];            // scale, and minus the minimum, of sub-blocks 2q and 2q + 1
    __half2       by[2][2], plus[2][2]; // of the chunk's two sub-blocks
    std::uint32_t bytes[2][4];

    __device__ void begin(const ScaleRows& rows) { shift[0] = rows.shift[0], shift[1] = rows.shift[1]; }
    template <int>
    __device__ void fetch(int) {}
    __device__ void stage(unsigned stage, int lane) {
        const int q = lane % 4;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            uint4 head;
            asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                         : "=r"(head.x), "=r"(head.y), "=r"(head.z), "=r"(head.w)
                         : "r"(stage + unsigned(lane / 4 + r * 8) * 144));
            const float2 d = as_float2(head.x);
            // Scales and minima of four sub-blocks, a byte each.
            const std::uint32_t scales =
                                    q < 2 ? head.y & 0x3f3f3f3fu : (head.w & 0x0f0f0f0fu) | (head.y >> 2 & 0x30303030u),
                                mins = q < 2 ? head.z & 0x3f3f3f3fu
                                             : (head.w >> 4 & 0x0f0f0f0fu) | (head.z >> 2 & 0x30303030u);
#pragma unroll
            for (int i = 0; i < 2; i++) { // the second one's nibbles are the high ones, 16 times as large
                const int at = q % 2 * 16 + i * 8;
                own[r][i]    = pack(d.x * shift[r] * (i == 0 ? 1.0f : 0x1p-4f) * float(scales >> at & 255),
                                    -d.y * shift[r] * 0x1p-24f * float(mins >> at & 255));
            }
        }
    }
    __device__ void load(unsigned stage, int chunk, int lane) {
        const unsigned row = stage + unsigned(lane / 4 * 144 + 16 + chunk * 32 + lane % 4 * 2);
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int i = 0; i < 4; i++) bytes[r][i] = load_pair(row + unsigned(r * 8 * 144 + i * 8));
    }
    template <int>
    __device__ void scale(int chunk) {
        const int lane = int(threadIdx.x) % 32;
#pragma unroll
        for (int r = 0; r < 2; r++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const __half2 both = half2_of(__shfl_sync(~0u, own[r][i], lane / 4 * 4 + chunk));
                by[r][i] = __low2half2(both), plus[r][i] = __high2half2(both);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) bytes[r][i] = __byte_perm(bytes[r][i], 0, 0x4140);
        }
    }
    __device__ void words(int step, std::uint32_t (&a)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int r = i % 2;
            a[i] = word_of(__hfma2(half2_of(bytes[r][step % 2 * 2 + i / 2] & (step < 2 ? 0x000f000fu : 0x00f000f0u)),
                                   by[r][step / 2], plus[r][step / 2]));
        }
    }
};

#endif

} // namespace

} // namespace quire::cuda
