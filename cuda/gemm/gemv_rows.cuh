// How a warp multiplies rows of weights of any form with a few tokens on CUDA cores, in 16-byte words that are read once.
#pragma once

#include <cuda_fp16.h>

#include "../kernels.h"
#include "../warp.cuh"
#include "gemv.cuh"
#include "quantised_x.cuh"

namespace quire::cuda {

namespace {

// Four bytes of int8, offset by 128 → floats: 0x4b000000 | u is 2^23 + u.
__device__ inline void as_floats(std::uint32_t q, float* f) {
    const std::uint32_t u = q ^ 0x80808080u;
    f[0]                  = __uint_as_float(__byte_perm(u, 0x4b000000u, 0x7440)) - 8388736.0f;
    f[1]                  = __uint_as_float(__byte_perm(u, 0x4b000000u, 0x7441)) - 8388736.0f;
    f[2]                  = __uint_as_float(__byte_perm(u, 0x4b000000u, 0x7442)) - 8388736.0f;
    f[3]                  = __uint_as_float(__byte_perm(u, 0x4b000000u, 0x7443)) - 8388736.0f;
}

// Register pipeline of a warp for R neighbouring rows: `ahead` words of each row are in flight. load(u) loads word u of the
// `step` columns from `base` on, add(u) multiplies it with x into sum[r][t], t a token; then the word `step` columns further is
// loaded in its place. Lanes take neighbouring words; the R rows share the words of x, read and converted once. Columns are ints: no
// 64-bit arithmetic in the loops. With x as integers a word takes a third of the instructions.

template <int NT, int R>
struct RowsF16 {
    static constexpr int ahead = NT <= 2 ? 4 : 2, step = 256 * ahead;
    uint4                v[R][ahead];

    __device__ static int column(int base, int u) { return base + u * 256 + int(threadIdx.x) % 32 * 8; }
    __device__ void       load(const Weight& w, std::int64_t row, int base, int cols, int u) {
        const int c = column(base, u);
        if (c >= cols) return;
        const auto* from = static_cast<const __half*>(w.data) + row * cols + c;
#pragma unroll
        for (int r = 0; r < R; r++) v[r][u] = load_once(from + r * cols);
    }
    __device__ void add(const __half* x, int base, int cols, int u, float (&sum)[R][NT]) const {
        const int c = column(base, u);
        if (c >= cols) return;
#pragma unroll
        for (int t = 0; t < NT; t++) {
            const uint4  xs = *reinterpret_cast<const uint4*>(x + t * cols + c);
            const float2 p = as_float2(xs.x), q = as_float2(xs.y), m = as_float2(xs.z), n = as_float2(xs.w);
#pragma unroll
            for (int r = 0; r < R; r++) {
                const float2 a = as_float2(v[r][u].x), b = as_float2(v[r][u].y), d = as_float2(v[r][u].z),
                             e = as_float2(v[r][u].w);
                sum[r][t] +=
                    a.x * p.x + a.y * p.y + b.x * q.x + b.y * q.y + d.x * m.x + d.y * m.y + e.x * n.x + e.y * n.y;
            }
        }
    }
};

template <int NT, int R, int Group, bool FloatScales, bool Mins>
struct RowsI8 {
    static constexpr int ahead = NT <= 2 && R < 4 ? 4 / R : 1, step = 512 * ahead;
    uint4                v[R][ahead];
    float                scale[R][ahead], min[R][ahead];

    __device__ static int column(int base, int u) { return base + u * 512 + int(threadIdx.x) % 32 * 16; }
    __device__ void       load(const Weight& w, std::int64_t row, int base, int cols, int u) {
        const int c = column(base, u), groups = cols / Group;
        if (c >= cols) return;
        const auto* from = static_cast<const std::int8_t*>(w.data) + row * cols + c;
#pragma unroll
        for (int r = 0; r < R; r++) {
            v[r][u]              = load_once(from + r * cols);
            const std::int64_t g = (row + r) * groups + c / Group;
            scale[r][u]          = FloatScales ? static_cast<const float*>(w.scales)[g]
                                               : __half2float(static_cast<const __half*>(w.scales)[g]);
            min[r][u]            = Mins ? static_cast<const float*>(w.mins)[g] : 0.0f;
        }
    }
    __device__ void add(const __half* x, int base, int cols, int u, float (&sum)[R][NT]) const {
        const int c = column(base, u);
        if (c >= cols) return;
#pragma unroll
        for (int t = 0; t < NT; t++) {
            const uint4*        at = reinterpret_cast<const uint4*>(x + t * cols + c);
            const uint4         xa = at[0], xb = at[1];
            const std::uint32_t words[8] = {xa.x, xa.y, xa.z, xa.w, xb.x, xb.y, xb.z, xb.w};
            float               xs[16], all = 0;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float2 p = as_float2(words[i]);
                xs[2 * i] = p.x, xs[2 * i + 1] = p.y;
                if (Mins) all += p.x + p.y;
            }
#pragma unroll
            for (int r = 0; r < R; r++) {
                const std::uint32_t qs[4] = {v[r][u].x, v[r][u].y, v[r][u].z, v[r][u].w};
                float               part  = 0;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float q[4];
                    as_floats(qs[i], q);
                    part += q[0] * xs[4 * i] + q[1] * xs[4 * i + 1] + q[2] * xs[4 * i + 2] + q[3] * xs[4 * i + 3];
                }
                sum[r][t] += scale[r][u] * part - (Mins ? min[r][u] * all : 0.0f);
            }
        }
    }
    __device__ void add(const QuantisedX& x, int base, int cols, int u, float (&sum)[R][1]) const {
        const int c = column(base, u);
        if (c >= cols) return;
        const XOfI8 words(x, c);
#pragma unroll
        for (int r = 0; r < R; r++) sum[r][0] += words.times<Mins>(v[r][u], scale[r][u], min[r][u]);
    }
};

// Eight lanes share a superblock; each has 16 bytes of it: 16 weights of an even sub-block in the low nibbles, 16 of the odd
// one after it in the high ones.
template <int NT, int R>
struct RowsQ4K {
    static constexpr int ahead = NT <= 1 && R < 4 ? 4 / R : 1, step = 4 * 256 * ahead;
    uint4                head[R][ahead], v[R][ahead];

    __device__ static int superblock(int base, int u) { return base / 256 + int(threadIdx.x) % 32 / 8 + u * 4; }
    __device__ void       load(const Weight& w, std::int64_t row, int base, int cols, int u) {
        const int s = superblock(base, u), n = cols / 256;
        if (s >= n) return;
        const auto* from = static_cast<const unsigned char*>(w.data) + (row * n + s) * 144;
#pragma unroll
        for (int r = 0; r < R; r++) {
            v[r][u]    = load_once(from + r * n * 144 + 16 + threadIdx.x % 8 * 16);
            head[r][u] = *reinterpret_cast<const uint4*>(from + r * n * 144);
        }
    }
    __device__ void add(const __half* x, int base, int cols, int u, float (&sum)[R][NT]) const {
        const int     part = threadIdx.x % 8, chunk = part / 2, s = superblock(base, u);
        const __half2 magic = __half2(__ushort_as_half(0x6400), __ushort_as_half(0x6400)); // 1024
        if (s >= cols / 256) return;
        {
            float scale[R][2], min[R][2];
#pragma unroll
            for (int r = 0; r < R; r++) {
                const float2        d = as_float2(head[r][u].x);                          // d, dmin
                const std::uint32_t a = head[r][u].y, b = head[r][u].z, c = head[r][u].w; // scales 0..3, 4..7, 8..11
                const int           at = 8 * (2 * chunk % 4); // of the even sub-block in a word
                int                 s0, s1, m0, m1;
                if (chunk < 2) {
                    s0 = a >> at & 63, s1 = a >> (at + 8) & 63;
                    m0 = b >> at & 63, m1 = b >> (at + 8) & 63;
                } else {
                    s0 = (c >> at & 15) | (a >> (at + 6) & 3) << 4;
                    s1 = (c >> (at + 8) & 15) | (a >> (at + 14) & 3) << 4;
                    m0 = (c >> (at + 4) & 15) | (b >> (at + 6) & 3) << 4;
                    m1 = (c >> (at + 12) & 15) | (b >> (at + 14) & 3) << 4;
                }
                scale[r][0] = d.x * float(s0), scale[r][1] = d.x * float(s1);
                min[r][0] = d.y * float(m0), min[r][1] = d.y * float(m1);
            }
            const int c0 = s * 256 + chunk * 64 + part % 2 * 16;
#pragma unroll
            for (int t = 0; t < NT; t++) {
#pragma unroll
                for (int high = 0; high < 2; high++) {
                    const uint4*        at = reinterpret_cast<const uint4*>(x + t * cols + c0 + high * 32);
                    const uint4         xa = at[0], xb = at[1];
                    const std::uint32_t xs[8] = {xa.x, xa.y, xa.z, xa.w, xb.x, xb.y, xb.z, xb.w};
                    // Nibbles of bytes 0 and 2, then of 1 and 3, as fp16 1024 + q; x is paired the same way.
                    __half2 pairs[8], all = __half2(__ushort_as_half(0), __ushort_as_half(0));
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const std::uint32_t x0 = __byte_perm(xs[2 * i], xs[2 * i + 1], 0x5410),
                                            x1 = __byte_perm(xs[2 * i], xs[2 * i + 1], 0x7632);
                        pairs[2 * i]           = *reinterpret_cast<const __half2*>(&x0);
                        pairs[2 * i + 1]       = *reinterpret_cast<const __half2*>(&x1);
                        all                    = __hadd2(all, __hadd2(pairs[2 * i], pairs[2 * i + 1]));
                    }
                    const float2 a = __half22float2(all);
#pragma unroll
                    for (int r = 0; r < R; r++) {
                        const std::uint32_t qs[4]       = {v[r][u].x, v[r][u].y, v[r][u].z, v[r][u].w};
                        __half2             projections = __half2(__ushort_as_half(0), __ushort_as_half(0));
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                            const std::uint32_t q  = qs[i] >> (high * 4);
                            std::uint32_t       q0 = (q & 0x000f000fu) | 0x64006400u,
                                          q1       = (q >> 8 & 0x000f000fu) | 0x64006400u;
                            projections =
                                __hfma2(__hsub2(*reinterpret_cast<__half2*>(&q0), magic), pairs[2 * i], projections);
                            projections = __hfma2(__hsub2(*reinterpret_cast<__half2*>(&q1), magic), pairs[2 * i + 1],
                                                  projections);
                        }
                        const float2 p = __half22float2(projections);
                        sum[r][t] += scale[r][high] * (p.x + p.y) - min[r][high] * (a.x + a.y);
                    }
                }
            }
        }
    }
    __device__ void add(const QuantisedX& x, int base, int cols, int u, float (&sum)[R][1]) const {
        const int s = superblock(base, u);
        if (s >= cols / 256) return;
        const XOfQ4K words(x, s * 256, threadIdx.x % 8);
#pragma unroll
        for (int r = 0; r < R; r++) sum[r][0] += words.times(head[r][u], v[r][u]);
    }
};

template <int NT, Kind K, int R>
struct RowsOf;
template <int NT, int R>
struct RowsOf<NT, kind_f16, R> : RowsF16<NT, R> {};
template <int NT, int R>
struct RowsOf<NT, kind_i8, R> : RowsI8<NT, R, 32, false, false> {};
template <int NT, int R>
struct RowsOf<NT, kind_i8_float, R> : RowsI8<NT, R, 16, true, false> {};
template <int NT, int R>
struct RowsOf<NT, kind_i8_float_min, R> : RowsI8<NT, R, 32, true, true> {};
template <int NT, int R>
struct RowsOf<NT, kind_q4_k, R> : RowsQ4K<NT, R> {};

} // namespace

} // namespace quire::cuda
