// x of a GEMV as integers: int16-quantised activations in shared memory, and their dot products with the weights of a lane.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "../warp.cuh"
#include "gemv.cuh"

namespace quire::cuda {

constexpr __host__ __device__ int x_bytes(Kind k, int cols) { // int16 values, scales, sums
    return k == kind_f16 ? cols * 2 : cols * 2 + (k == kind_q4_k ? cols / 64 : cols / 32) * 4 + cols / 16 * 4;
}

struct QuantisedX {
    unsigned char *high, *low; // [cols]
    float*         scale;      // [cols / 32], or of 64 for Q4_K
    int*           total;      // [cols / 16]: Σ of 16 neighbours
};

__device__ inline QuantisedX quantised_x_in(unsigned char* memory, Kind kind, int cols) {
    QuantisedX to;
    to.high  = memory;
    to.low   = memory + cols;
    to.scale = reinterpret_cast<float*>(memory + 2 * cols);
    to.total = reinterpret_cast<int*>(to.scale + (kind == kind_q4_k ? cols / 64 : cols / 32));
    return to;
}

// use(g, read(g)) for the 16-byte words of x, by all threads of a team. Four loads of a thread are in flight at once: one after
// another they would take as long as a short GEMV.
template <class Team = WholeCta, class Read, class Use>
__device__ inline void for_each_word(const Read& read, int n, const Use& use) {
    constexpr int in_flight = 4;
    for (int first = threadIdx.x; first < n; first += in_flight * Team::size()) {
        uint4 v[in_flight];
#pragma unroll
        for (int k = 0; k < in_flight; k++) {
            const int g = first + k * Team::size();
            v[k]        = g < n ? read(g) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int k = 0; k < in_flight; k++)
            if (const int g = first + k * Team::size(); g < n) use(g, v[k]);
    }
}

// Quantises word g of x, 8 fp16 values, to int16 with a scale; by whole warps with neighbouring g. High and low bytes are
// stored apart, for dp4a. For Q4_K the 16 values that lane i of eight multiplies with low nibbles are at 16·i of a superblock's
// 256, those for the high ones at 128 + 16·i: no bank conflicts.
template <Kind K>
__device__ inline void quantise_x(int g, const uint4& v, const QuantisedX& to) {
    constexpr int       lanes    = K == kind_q4_k ? 8 : 4; // that share a scale, 8 values each
    const std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
    float               f[8], most = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const float2 pair = as_float2(words[k]);
        f[2 * k] = pair.x, f[2 * k + 1] = pair.y;
        most = max_or_nan(most, max_or_nan(fabsf(pair.x), fabsf(pair.y)));
    }
#pragma unroll
    for (int step = 1; step < lanes; step *= 2) most = max_or_nan(most, __shfl_xor_sync(~0u, most, step));
    const float inverse = most > 0 ? __fdividef(32512.0f, most) : 0.0f; // so that the high byte stays below 128
    // Rounds by adding a number so large that the fraction is lost: the integer is in the low 16 bits.
    constexpr float large = 12582912.0f; // 1.5 * 2^23
    std::uint32_t   n[8], h[2], l[2];
    std::uint32_t   total_bits = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        n[k] = __float_as_uint(fmaf(f[k], inverse, large));
        total_bits += n[k];
    }
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const std::uint32_t front = __byte_perm(n[4 * k], n[4 * k + 1], 0x5410),
                            back  = __byte_perm(n[4 * k + 2], n[4 * k + 3], 0x5410);
        h[k]                      = __byte_perm(front, back, 0x7531);
        l[k]                      = __byte_perm(front, back, 0x6420);
    }
    int sum = int(total_bits - 8u * 0x4b400000u);
    sum += __shfl_xor_sync(~0u, sum, 1);
    int at = g * 8, total = g / 2;
    if (K == kind_q4_k) {
        const int in = at % 256, part = in / 64 * 2 + in % 32 / 16, high = in % 64 / 32;
        at    = at / 256 * 256 + high * 128 + part * 16 + in % 16;
        total = g / 32 * 16 + part * 2 + high;
    }
    *reinterpret_cast<uint2*>(to.high + at) = make_uint2(h[0], h[1]);
    *reinterpret_cast<uint2*>(to.low + at)  = make_uint2(l[0], l[1]);
    if (g % lanes == 0) to.scale[g / lanes] = most * (1 / 32512.0f);
    if (g % 2 == 0) to.total[total] = sum;
}

__device__ inline int dot4(std::uint32_t weights, std::uint32_t x, int sum) {
    return __dp4a(int(weights), int(x), sum);
}
__device__ inline int dot4_unsigned(std::uint32_t weights, std::uint32_t x, int sum) { // signed weights, unsigned x
    int out;
    asm("dp4a.s32.u32 %0, %1, %2, %3;" : "=r"(out) : "r"(weights), "r"(x), "r"(sum));
    return out;
}
__device__ inline int dot16(const uint4& w, const uint4& high, const uint4& low) {
    const int h = dot4(w.w, high.w, dot4(w.z, high.z, dot4(w.y, high.y, dot4(w.x, high.x, 0))));
    const int l =
        dot4_unsigned(w.w, low.w, dot4_unsigned(w.z, low.z, dot4_unsigned(w.y, low.y, dot4_unsigned(w.x, low.x, 0))));
    return h * 256 + l;
}
__device__ inline uint4 masked(const uint4& v, std::uint32_t mask) {
    return make_uint4(v.x & mask, v.y & mask, v.z & mask, v.w & mask);
}
// The dot product for unsigned weights.
__device__ inline int dot16_unsigned(const uint4& w, const uint4& high, const uint4& low) {
    const auto signed_x = [](std::uint32_t weights, std::uint32_t x, int sum) {
        int out;
        asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(out) : "r"(weights), "r"(x), "r"(sum));
        return out;
    };
    const int h = signed_x(w.w, high.w, signed_x(w.z, high.z, signed_x(w.y, high.y, signed_x(w.x, high.x, 0))));
    const std::uint32_t l = __dp4a(w.w, low.w, __dp4a(w.z, low.z, __dp4a(w.y, low.y, __dp4a(w.x, low.x, 0u))));
    return h * 256 + int(l);
}
__device__ inline uint4 word_at(const void* p) { return *static_cast<const uint4*>(p); }

// A lane's part of a superblock's columns: 16 that meet the low nibbles of a word, 16 that meet the high ones.
struct XOfQ4K {
    uint4 h0, h1, l0, l1;
    int2  total;
    float scale;
    bool  late; // the scales of its sub-blocks have 4 bits in one word and 2 in another
    int   shift;

    // part: which of eight, of the superblock that begins at `column`
    __device__ XOfQ4K(const QuantisedX& x, int column, int part) {
        const int at = column + part * 16;
        h0 = word_at(x.high + at), h1 = word_at(x.high + at + 128), l0 = word_at(x.low + at),
        l1    = word_at(x.low + at + 128);
        total = *reinterpret_cast<const int2*>(x.total + column / 16 + part * 2);
        scale = x.scale[column / 64 + part / 2];
        late = part >= 4, shift = 16 * (part / 2 % 2);
    }
    // head: the first 16 bytes of the superblock; w: the nibbles.
    __device__ float times(const uint4& head, const uint4& w) const {
        const float2 d = as_float2(head.x);
        // Two bytes of each word: scales and minima of the even and the odd sub-block.
        const std::uint32_t a = head.y >> shift, b = head.z >> shift, e = head.w >> shift;
        const std::uint32_t sc = late ? (e & 0x0f0f) | (a >> 2 & 0x3030) : a & 0x3f3f;
        const std::uint32_t mi = late ? (e >> 4 & 0x0f0f) | (b >> 2 & 0x3030) : b & 0x3f3f;
        // High nibbles are used in place, so count 16 times.
        const int i = dot16_unsigned(masked(w, 0x0f0f0f0f), h0, l0) * int(sc & 255) +
                      (dot16_unsigned(masked(w, 0xf0f0f0f0), h1, l1) >> 4) * int(sc >> 8),
                  m = total.x * int(mi & 255) + total.y * int(mi >> 8);
        return scale * (d.x * float(i) - d.y * float(m));
    }
};

// 16 columns from `at` on.
struct XOfI8 {
    uint4 h, l;
    float scale;
    int   total;

    __device__ XOfI8(const QuantisedX& x, int at)
        : h(word_at(x.high + at)), l(word_at(x.low + at)), scale(x.scale[at / 32]), total(x.total[at / 16]) {}
    // by: the scale of the 16 weights; min: what all of them lack, or 0.
    template <bool Mins>
    __device__ float times(const uint4& w, float by, float min) const {
        const float value = by * float(dot16(w, h, l));
        return scale * (Mins ? value - min * float(total) : value);
    }
};

} // namespace quire::cuda
