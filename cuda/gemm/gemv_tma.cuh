// GEMV with weights in shared memory: the layout of a pipeline stage, int16-quantised activations, and the dot products.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "../warp.cuh"
#include "gemv.cuh"

namespace quire::cuda {

// Columns that a warp takes at a time.
constexpr __host__ __device__ int unit_cols(Kind k) { return k == kind_f16 ? 256 : k == kind_q4_k ? 1024 : 512; }
constexpr __host__ __device__ int warps_of(Kind k) { return k == kind_q4_k ? 16 : 8; }
// Bytes of some columns of a row.
constexpr __host__ __device__ int data_bytes(Kind k, int cols) {
    return k == kind_f16 ? cols * 2 : k == kind_q4_k ? cols / 256 * 144 : cols;
}
constexpr __host__ __device__ int scale_bytes(Kind k, int cols) {
    return k == kind_i8 ? cols / 16 : k == kind_i8_float ? cols / 4 : k == kind_i8_float_min ? cols / 8 : 0;
}
constexpr __host__ __device__ int min_bytes(Kind k, int cols) { return k == kind_i8_float_min ? cols / 8 : 0; }
constexpr __host__ __device__ int row_bytes(Kind k, int cols) {
    return data_bytes(k, cols) + scale_bytes(k, cols) + min_bytes(k, cols);
}
constexpr int x_bytes(Kind k, int cols) { // int16 values, scales, sums
    return k == kind_f16 ? cols * 2 : cols * 2 + (k == kind_q4_k ? cols / 64 : cols / 32) * 4 + cols / 16 * 4;
}

#if __CUDA_ARCH__ >= 900

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

// sum[r] += weights of one stage · columns base .. base + n of x, which is fp16 or quantised. `from`: the data of R rows, then
// their scales, then their minima.
template <Kind K, int R>
__device__ inline void accumulate_stage(const unsigned char* from, int full, const unsigned char* x,
                                        const QuantisedX& quantised, int base, int n, float (&sum)[R]) {
    const int            lane   = threadIdx.x % 32;
    const int            data   = data_bytes(K, full);
    const unsigned char* scales = from + R * data;
    const unsigned char* mins   = scales + R * scale_bytes(K, full);
    if constexpr (K == kind_f16) {
#pragma unroll 4
        for (int c = lane * 8; c < n; c += 256) {
            const uint4  xs = word_at(x + (base + c) * 2);
            const float2 p = as_float2(xs.x), q = as_float2(xs.y), s = as_float2(xs.z), t = as_float2(xs.w);
#pragma unroll
            for (int r = 0; r < R; r++) {
                const uint4  w = word_at(from + r * data + c * 2);
                const float2 a = as_float2(w.x), b = as_float2(w.y), d = as_float2(w.z), e = as_float2(w.w);
                sum[r] += a.x * p.x + a.y * p.y + b.x * q.x + b.y * q.y + d.x * s.x + d.y * s.y + e.x * t.x + e.y * t.y;
            }
        }
    } else if constexpr (K == kind_q4_k) {
        const int part = lane % 8, chunk = part / 2, shift = 8 * (2 * chunk % 4);
#pragma unroll 2
        for (int s = lane / 8; s < n / 256; s += 4) {
            const int   at = base + s * 256 + part * 16;
            const uint4 h0 = word_at(quantised.high + at), h1 = word_at(quantised.high + at + 128),
                        l0 = word_at(quantised.low + at), l1 = word_at(quantised.low + at + 128);
            const int2  t  = *reinterpret_cast<const int2*>(quantised.total + (base / 16 + s * 16) + part * 2);
            const float by = quantised.scale[base / 64 + s * 4 + chunk];
#pragma unroll
            for (int r = 0; r < R; r++) {
                const unsigned char* block = from + r * data + s * 144;
                const uint4          head = word_at(block), w = word_at(block + 16 + part * 16);
                const float2         d = as_float2(head.x);
                // Two bytes of each word: scales and minima of the even and the odd sub-block.
                const std::uint32_t a = head.y >> shift, b = head.z >> shift, e = head.w >> shift;
                const std::uint32_t sc = chunk < 2 ? a & 0x3f3f : (e & 0x0f0f) | (a >> 2 & 0x3030);
                const std::uint32_t mi = chunk < 2 ? b & 0x3f3f : (e >> 4 & 0x0f0f) | (b >> 2 & 0x3030);
                // High nibbles are used in place, so count 16 times.
                const int i = dot16_unsigned(masked(w, 0x0f0f0f0f), h0, l0) * int(sc & 255) +
                              (dot16_unsigned(masked(w, 0xf0f0f0f0), h1, l1) >> 4) * int(sc >> 8),
                          m = t.x * int(mi & 255) + t.y * int(mi >> 8);
                sum[r] += by * (d.x * float(i) - d.y * float(m));
            }
        }
    } else {
        constexpr int group = K == kind_i8_float ? 16 : 32;
#pragma unroll 2
        for (int c = lane * 16; c < n; c += 512) {
            const int   at = base + c;
            const uint4 h = word_at(quantised.high + at), l = word_at(quantised.low + at);
            const float by = quantised.scale[at / 32];
#pragma unroll
            for (int r = 0; r < R; r++) {
                const unsigned char* s     = scales + r * scale_bytes(K, full);
                const float          scale = K == kind_i8 ? __half2float(reinterpret_cast<const __half*>(s)[c / group])
                                                          : reinterpret_cast<const float*>(s)[c / group];
                float                value = scale * float(dot16(word_at(from + r * data + c), h, l));
                if (K == kind_i8_float_min)
                    value -= reinterpret_cast<const float*>(mins + r * min_bytes(K, full))[c / group] *
                             float(quantised.total[at / 16]);
                sum[r] += by * value;
            }
        }
    }
}

#endif

} // namespace quire::cuda
