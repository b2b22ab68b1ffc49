// How a warp reads 16 rows of weights of any form as operands of mma.m16n8k16: from memory straight into registers, one unit of
// columns at a time. A lane loads 16 bytes of a row of the weights, and the same columns of x. In which order an mma takes the
// columns does not matter, as long as both operands agree.
#pragma once

#include <cuda_fp16.h>

#include "../kernels.h"
#include "../warp.cuh"
#include "gemv.cuh"

namespace quire::cuda {

namespace {

// Columns of a unit.
constexpr __host__ __device__ int unit_cols(Kind kind) { return kind == kind_q4_k ? 256 : 128; }

__device__ inline __half2       as_half2(std::uint32_t v) { return *reinterpret_cast<const __half2*>(&v); }
__device__ inline std::uint32_t as_word(__half2 v) { return *reinterpret_cast<const std::uint32_t*>(&v); }
__device__ inline std::uint32_t word_of(const uint4& v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Two rows of weights, of one matrix or of two matrices of one form.
struct RowPair {
    const Weight* w[2];
    std::int64_t  row[2];
    __device__    RowPair(const Weight& both, std::int64_t a, std::int64_t b) : w{&both, &both}, row{a, b} {}
    __device__ RowPair(const Weight& wa, std::int64_t a, const Weight& wb, std::int64_t b) : w{&wa, &wb}, row{a, b} {}
};

// A lane's weights of one unit: of rows lane / 4 and lane / 4 + 8 of the warp's 16. A step is two mma instructions: column()
// says where the lane's 8 values of x begin, words() has the weights of either row as fp16. Tail: the unit may end after the last
// column; weights beyond it are 0.
template <Kind K, bool Tail = false>
struct Fragment;

template <bool Tail>
struct Fragment<kind_f16, Tail> {
    static constexpr int steps = 4;
    uint4                v[2][4];
    __device__ void      load(const RowPair& rows, int col, int lane) {
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int g = 0; g < 4; g++) {
                const Weight& w = *rows.w[r];
                const int     c = col + g * 32 + lane % 4 * 8;
                if (Tail && c >= w.cols) v[r][g] = make_uint4(0, 0, 0, 0);
                else v[r][g] = load_once(static_cast<const __half*>(w.data) + rows.row[r] * w.cols + c);
            }
    }
    static __device__ int column(int step, int lane) { return step * 32 + lane % 4 * 8; }
    __device__ void       words(int r, int step, std::uint32_t (&out)[4]) const {
        const uint4& q = v[r][step];
        out[0] = q.x, out[1] = q.y, out[2] = q.z, out[3] = q.w;
    }
};

// Four unsigned bytes → two pairs of fp16: (byte - offset) · scale + shift.
__device__ inline void scaled(std::uint32_t bytes, __half2 offset, __half2 scale, __half2 shift, std::uint32_t& a,
                              std::uint32_t& b) {
    a = as_word(__hfma2(__hsub2(as_half2(__byte_perm(bytes, 0x64646464u, 0x4140)), offset), scale, shift));
    b = as_word(__hfma2(__hsub2(as_half2(__byte_perm(bytes, 0x64646464u, 0x4342)), offset), scale, shift));
}

template <int Group, bool FloatScales, bool Mins, bool Tail>
struct FragmentI8 {
    static constexpr int steps = 4;
    uint4                v[2][2];
    __half               scale[2][2], shift[2][2];
    __device__ void      load(const RowPair& rows, int col, int lane) {
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int g = 0; g < 2; g++) {
                const Weight& w = *rows.w[r];
                const int     c = col + g * 64 + lane % 4 * 16;
                if (Tail && c >= w.cols) {
                    v[r][g]     = make_uint4(0, 0, 0, 0);
                    scale[r][g] = shift[r][g] = __ushort_as_half(0);
                    continue;
                }
                const std::int64_t at = rows.row[r] * w.cols + c;
                v[r][g]               = load_once(static_cast<const std::int8_t*>(w.data) + at);
                scale[r][g]           = FloatScales ? __float2half(static_cast<const float*>(w.scales)[at / Group])
                                                    : static_cast<const __half*>(w.scales)[at / Group];
                shift[r][g] = Mins ? __float2half(-static_cast<const float*>(w.mins)[at / Group]) : __ushort_as_half(0);
            }
    }
    static __device__ int column(int step, int lane) { return step / 2 * 64 + lane % 4 * 16 + step % 2 * 8; }
    __device__ void       words(int r, int step, std::uint32_t (&out)[4]) const {
        const __half2 offset = as_half2(0x64806480u); // 1024 + 128
        const __half2 by = __half2half2(scale[r][step / 2]), plus = __half2half2(shift[r][step / 2]);
        scaled(word_of(v[r][step / 2], step % 2 * 2) ^ 0x80808080u, offset, by, plus, out[0], out[1]);
        scaled(word_of(v[r][step / 2], step % 2 * 2 + 1) ^ 0x80808080u, offset, by, plus, out[2], out[3]);
    }
};
template <bool Tail>
struct Fragment<kind_i8, Tail> : FragmentI8<32, false, false, Tail> {};
template <bool Tail>
struct Fragment<kind_i8_float, Tail> : FragmentI8<16, true, false, Tail> {};
template <bool Tail>
struct Fragment<kind_i8_float_min, Tail> : FragmentI8<32, true, true, Tail> {};

// A lane has 64 neighbouring weights of a superblock in 32 bytes: low nibbles are the first 32, high nibbles the others.
template <bool Tail>
struct Fragment<kind_q4_k, Tail> { // rows are whole units
    static constexpr int steps = 8;
    uint4                v[2][2], head[2];
    __device__ void      load(const RowPair& rows, int col, int lane) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const Weight& w = *rows.w[r];
            const auto*   tile =
                static_cast<const unsigned char*>(w.data) + (rows.row[r] * (w.cols / 256) + col / 256) * 144;
            head[r] = *reinterpret_cast<const uint4*>(tile);
#pragma unroll
            for (int h = 0; h < 2; h++) v[r][h] = load_once(tile + 16 + lane % 4 * 32 + h * 16);
        }
    }
    // step: sub-block, half of it, half of that
    static __device__ int column(int step, int lane) { return lane % 4 * 64 + step * 8; }
    __device__ void       words(int r, int step, std::uint32_t (&out)[4]) const {
        const int           high = step / 4, h = step / 2 % 2, lane = threadIdx.x % 32, sub = lane % 4 * 2 + high;
        const float2        d = __half22float2(as_half2(head[r].x));
        const std::uint32_t a = head[r].y, b = head[r].z, c = head[r].w; // scales 0..3, 4..7, 8..11
        const int           at    = 8 * (sub % 4);
        const int           scale = sub < 4 ? a >> at & 63 : (c >> at & 15) | (a >> (at + 6) & 3) << 4,
                  min             = sub < 4 ? b >> at & 63 : (c >> (at + 4) & 15) | (b >> (at + 6) & 3) << 4;
        const __half2 offset = as_half2(0x64006400u), by = __float2half2_rn(d.x * float(scale)),
                      plus = __float2half2_rn(-d.y * float(min));
        const auto nibbles = [&](int i) { return word_of(v[r][h], i) >> (4 * high) & 0x0f0f0f0fu; };
        scaled(nibbles(step % 2 * 2), offset, by, plus, out[0], out[1]);
        scaled(nibbles(step % 2 * 2 + 1), offset, by, plus, out[2], out[3]);
    }
};

// Where column c of a token of x is in shared memory, in fp16 values: padded against bank conflicts.
template <Kind K>
__device__ inline int padded(int c) {
    return K == kind_q4_k ? c + c / 64 * 8 : c;
}
constexpr __host__ __device__ int row_stride(Kind kind) {
    return kind == kind_f16 ? 128 + 32 : kind == kind_q4_k ? 256 + 4 * 8 : 128 + 8;
}

} // namespace

} // namespace quire::cuda
