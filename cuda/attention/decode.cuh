// Shared by the decode attention kernels: tile products on tensor cores, and combining the partial results of chunks.
#pragma once

#include <cuda_fp16.h>

#include "../kernels.h"
#include "../warp.cuh"

namespace quire::cuda {

__device__ inline float weight_of(float top, float limit) { return top == -INFINITY ? 0.0f : __expf(top - limit); }

// What a block works on: an item of the step's list, and which heads of it.
struct Share {
    int item, slot, n_slots;
};

// The running sums of a block's parts become one, in a fixed order; then, by the last block of a sequence to get here, its
// chunks. tops and sums: [parts][G], values: [parts][G][D], the parts `stride` floats apart, in shared memory.
template <int D, int G, class Team = Block>
__device__ void combine(const Attention& a, const SplitKvItem& item, const Share& share, int head0, int n_heads,
                        int n_parts, const float* tops, const float* sums, const float* values, int stride,
                        float* partial, std::int32_t* tickets) {
    Team::sync();
    const bool alone = item.n_splits == 1;
    for (int i = threadIdx.x; i < n_heads * D; i += Team::size()) {
        const int g = i / D, d = i % D, head = head0 + g;
        float     limit = -INFINITY, total = 0, value = 0;
        for (int part = 0; part < n_parts; part++) limit = fmaxf(limit, tops[part * G + g]);
        for (int part = 0; part < n_parts; part++) {
            const float w = weight_of(tops[part * G + g], limit);
            total += w * sums[part * G + g];
            value += w * values[part * stride + g * D + d];
        }
        if (alone) {
            reinterpret_cast<__half*>(a.out)[(std::int64_t(item.row) * a.n_heads + head) * D + d] =
                __float2half(total == 0 ? 0.0f : __fdividef(value, total));
            continue;
        }
        float* to = partial + (std::int64_t(share.item) * a.n_heads + head) * (D + 2);
        to[d]     = value;
        if (d == 0) to[D] = limit, to[D + 1] = total;
    }
    if (alone) return;
    __shared__ bool is_last;
    Team::sync();
    if (int(threadIdx.x) ==
        Team::size() - 1) { // one thread's fence is enough: what the others wrote is older than the barrier
        __threadfence();
        std::int32_t* ticket = tickets + std::int64_t(item.row) * share.n_slots + share.slot;
        is_last              = atomicAdd(ticket, 1) == item.n_splits - 1;
        if (is_last) *ticket = 0; // for the next launch
        __threadfence();
    }
    Team::sync();
    if (!is_last) return;
    // Of each head the largest score and the sum over all chunks, by a warp; then the values, eight chunks at a time.
    __shared__ float   limits[G], totals[G];
    const std::int64_t first_item = std::int64_t(share.item) - item.split, apart = std::int64_t(a.n_heads) * (D + 2);
    const float*       all = partial + (first_item * a.n_heads + head0) * (D + 2);
    for (int g = threadIdx.x / 32; g < n_heads; g += Team::size() / 32) {
        const float* from  = all + g * (D + 2) + D;
        float        limit = -INFINITY, total = 0;
        for (int c = threadIdx.x % 32; c < item.n_splits; c += 32) limit = fmaxf(limit, __ldcg(from + c * apart));
#pragma unroll
        for (int step = 16; step > 0; step /= 2) limit = fmaxf(limit, __shfl_xor_sync(~0u, limit, step));
        for (int c = threadIdx.x % 32; c < item.n_splits; c += 32)
            total += weight_of(__ldcg(from + c * apart), limit) * __ldcg(from + c * apart + 1);
        total = warp_sum(total);
        if (threadIdx.x % 32 == 0) limits[g] = limit, totals[g] = total;
    }
    Team::sync();
    for (int i = threadIdx.x; i < n_heads * D; i += Team::size()) {
        const int    g = i / D, d = i % D;
        const float* from  = all + g * (D + 2);
        float        value = 0;
        for (int c0 = 0; c0 < item.n_splits; c0 += 8) {
            float top[8], v[8];
#pragma unroll
            for (int c = 0; c < 8; c++) {
                const float* at = from + min(c0 + c, item.n_splits - 1) * apart;
                top[c] = __ldcg(at + D), v[c] = __ldcg(at + d);
            }
#pragma unroll
            for (int c = 0; c < 8; c++)
                if (c0 + c < item.n_splits) value += weight_of(top[c], limits[g]) * v[c];
        }
        reinterpret_cast<__half*>(a.out)[(std::int64_t(item.row) * a.n_heads + head0 + g) * D + d] =
            __float2half(totals[g] == 0 ? 0.0f : __fdividef(value, totals[g]));
    }
}

// Attention of decoding by tensor cores, for up to 8 query heads of a kv head together: scores are K·Qᵀ (16 positions × 8
// heads), the result Vᵀ·Pᵀ (dimensions × 8 heads). Which dimension an mma calls k or m is free, so each lane (i, j) = (lane / 4,
// lane % 4) is given those that it can load in whole words. K: words j, j + 4, .. of positions i and i + 8. V: dimensions i·D/8 ..
// of positions 2j, 2j + 1, 2j + 8, 2j + 9. A lane keeps the sums of heads 2j and 2j + 1.
constexpr int most_heads = 8;

template <int D>
struct Heads {
    static constexpr int k_words = D / 32, v_words = D / 64; // 16-byte words a lane has of a position
    float                out[D / 16][4] = {}, top[2] = {-INFINITY, -INFINITY}, sum[2] = {};

    // heads: [n_heads][D]. Of head i, the words that K's are multiplied with.
    static __device__ void load_q(const __half* heads, int n_heads, std::uint32_t (&q)[D / 8]) {
        const int   i = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
        const auto* from = heads + i * D;
#pragma unroll
        for (int w = 0; w < k_words; w++) {
            const uint4 v =
                i < n_heads ? *reinterpret_cast<const uint4*>(from + (j + 4 * w) * 8) : make_uint4(0, 0, 0, 0);
            q[4 * w] = v.x, q[4 * w + 1] = v.y, q[4 * w + 2] = v.z, q[4 * w + 3] = v.w;
        }
    }

    // 16 positions more. seen0, seen8: whether positions i and i + 8 count; the values of those that do not are zeros.
    __device__ void add(const Attention& a, const std::uint32_t (&q)[D / 8], const uint4 (&k)[2][k_words],
                        const uint4 (&v)[4][v_words], bool seen0, bool seen8) {
        std::uint32_t weights[2];
        weigh(a, q, k, seen0, seen8, weights);
        add_values(weights, v);
    }

    // Its first half: what the values of the positions weigh.
    __device__ void weigh(const Attention& a, const std::uint32_t (&q)[D / 8], const uint4 (&k)[2][k_words], bool seen0,
                          bool seen8, std::uint32_t (&weights)[2]) {
        const float scale    = a.scale * 1.4426950408889634f;
        float       score[4] = {}; // position i: heads 2j, 2j + 1; position i + 8: the same
#pragma unroll
        for (int w = 0; w < k_words; w++) {
            const std::uint32_t first[4]  = {k[0][w].x, k[1][w].x, k[0][w].y, k[1][w].y};
            const std::uint32_t second[4] = {k[0][w].z, k[1][w].z, k[0][w].w, k[1][w].w};
            multiply(score, first, q[4 * w], q[4 * w + 1]);
            multiply(score, second, q[4 * w + 2], q[4 * w + 3]);
        }
        float p[4];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float limit = top[h];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float x = score[2 * r + h] * scale;
                if (a.softcap > 0) x = a.softcap * 1.4426950408889634f * tanhf(score[2 * r + h] * a.scale / a.softcap);
                p[2 * r + h] = (r == 0 ? seen0 : seen8) ? x : -INFINITY;
                limit        = fmaxf(limit, p[2 * r + h]);
            }
#pragma unroll
            for (int step = 4; step < 32; step *= 2) limit = fmaxf(limit, __shfl_xor_sync(~0u, limit, step));
            const float base   = limit == -INFINITY ? 0.0f : limit;
            const float shrink = exp2f(top[h] - base);
            top[h]             = limit;
            p[h]               = exp2f(p[h] - base);
            p[2 + h]           = exp2f(p[2 + h] - base);
            sum[h]             = sum[h] * shrink + (p[h] + p[2 + h]);
#pragma unroll
            for (int m = 0; m < D / 16; m++) out[m][h] *= shrink, out[m][2 + h] *= shrink;
        }
        // Pᵀ has positions in its rows; the product wants heads there.
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const __half2 pair = __floats2half2_rn(p[2 * r], p[2 * r + 1]);
            asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;"
                : "=r"(weights[r])
                : "r"(*reinterpret_cast<const std::uint32_t*>(&pair)));
        }
    }

    __device__ void add_values(const std::uint32_t (&weights)[2], const uint4 (&v)[4][v_words]) {
#pragma unroll
        for (int w = 0; w < v_words; w++) {
            const std::uint32_t words[4][4] = {{v[0][w].x, v[0][w].y, v[0][w].z, v[0][w].w},
                                               {v[1][w].x, v[1][w].y, v[1][w].z, v[1][w].w},
                                               {v[2][w].x, v[2][w].y, v[2][w].z, v[2][w].w},
                                               {v[3][w].x, v[3][w].y, v[3][w].z, v[3][w].w}};
#pragma unroll
            for (int e = 0; e < 4; e++) { // dimensions 2e and 2e + 1 of the word are rows i and i + 8 of a tile
                const std::uint32_t pairs[4] = {
                    __byte_perm(words[0][e], words[1][e], 0x5410), __byte_perm(words[0][e], words[1][e], 0x7632),
                    __byte_perm(words[2][e], words[3][e], 0x5410), __byte_perm(words[2][e], words[3][e], 0x7632)};
                multiply(out[4 * w + e], pairs, weights[0], weights[1]);
            }
        }
    }

    // tops and sums: [most_heads], values: [n_heads][D], in shared memory.
    __device__ void store(int n_heads, float* tops, float* sums, float* values) {
        const int i = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int step = 4; step < 32; step *= 2) sum[h] += __shfl_xor_sync(~0u, sum[h], step);
            if (i == 0) {
                tops[2 * j + h] = top[h] * 0.6931471805599453f; // back from exp2's scale
                sums[2 * j + h] = sum[h];
            }
            if (2 * j + h >= n_heads) continue;
#pragma unroll
            for (int m = 0; m < D / 16; m++) {
                values[(2 * j + h) * D + i * (D / 8) + 2 * m]     = out[m][h];
                values[(2 * j + h) * D + i * (D / 8) + 2 * m + 1] = out[m][2 + h];
            }
        }
    }
};

} // namespace quire::cuda
