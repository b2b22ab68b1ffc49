// Attention of decoding over paged K and V: one query a sequence; a block of threads takes one chunk of positions of one kv
// head, all query heads of its group together, so that K and V are read once. Bound by bytes. Cache: [block][kv_head][offset]
// [head_dim] halves, so what one head reads of one block is one run of bytes. Scores and sums are float32, the softmax is online
// (running maximum, sum and weighted values). head_dim: a multiple of 16 from the list below; any block size.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "bulk.cuh"
#include "kernels.h"
#include "warp.cuh"

namespace quire::cuda {

namespace {

constexpr int decode_warps = 4;

__host__ __device__ constexpr int power_of_two(int n) {
    int p = 1;
    while (p < n) p *= 2;
    return p;
}

__device__ float weight_of(float top, float limit) { return top == -INFINITY ? 0.0f : __expf(top - limit); }

// The running sums of a block's parts become one, in a fixed order; then, by the last block of a sequence to get here, its
// chunks. tops and sums: [parts][G], values: [parts][G][D], the parts `stride` floats apart, in shared memory.
template <int D, int G, int Parts>
__device__ void combine(const Attention& a, const DecodeItem& item, int head0, int n_heads, const float* tops,
                        const float* sums, const float* values, int stride, float* partial, std::int32_t* tickets) {
    __syncthreads();
    const bool alone = item.n_chunks == 1;
    for (int i = threadIdx.x; i < n_heads * D; i += blockDim.x) {
        const int g = i / D, d = i % D, head = head0 + g;
        float     limit = -INFINITY, total = 0, value = 0;
        for (int part = 0; part < Parts; part++) limit = fmaxf(limit, tops[part * G + g]);
        for (int part = 0; part < Parts; part++) {
            const float w = weight_of(tops[part * G + g], limit);
            total += w * sums[part * G + g];
            value += w * values[part * stride + g * D + d];
        }
        if (alone) {
            reinterpret_cast<__half*>(a.out)[(std::int64_t(item.row) * a.n_heads + head) * D + d] =
                __float2half(total > 0 ? value / total : 0.0f);
            continue;
        }
        float* to = partial + (std::int64_t(blockIdx.x) * a.n_heads + head) * (D + 2);
        to[d]     = value;
        if (d == 0) to[D] = limit, to[D + 1] = total;
    }
    if (alone) return;
    __shared__ bool is_last;
    __syncthreads();
    if (threadIdx.x ==
        blockDim.x - 1) { // one thread's fence is enough: what the others wrote is older than the barrier
        __threadfence();
        std::int32_t* ticket = tickets + std::int64_t(item.row) * gridDim.y + blockIdx.y;
        is_last              = atomicAdd(ticket, 1) == item.n_chunks - 1;
        if (is_last) *ticket = 0; // for the next launch
        __threadfence();
    }
    __syncthreads();
    if (!is_last) return;
    // Of each head the largest score and the sum over all chunks, by a warp; then the values, eight chunks at a time.
    __shared__ float   limits[G], totals[G];
    const std::int64_t first_item = std::int64_t(blockIdx.x) - item.index, apart = std::int64_t(a.n_heads) * (D + 2);
    const float*       all = partial + (first_item * a.n_heads + head0) * (D + 2);
    for (int g = threadIdx.x / 32; g < n_heads; g += int(blockDim.x) / 32) {
        const float* from  = all + g * (D + 2) + D;
        float        limit = -INFINITY, total = 0;
        for (int c = threadIdx.x % 32; c < item.n_chunks; c += 32) limit = fmaxf(limit, __ldcg(from + c * apart));
#pragma unroll
        for (int step = 16; step > 0; step /= 2) limit = fmaxf(limit, __shfl_xor_sync(~0u, limit, step));
        for (int c = threadIdx.x % 32; c < item.n_chunks; c += 32)
            total += weight_of(__ldcg(from + c * apart), limit) * __ldcg(from + c * apart + 1);
        total = warp_sum(total);
        if (threadIdx.x % 32 == 0) limits[g] = limit, totals[g] = total;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n_heads * D; i += blockDim.x) {
        const int    g = i / D, d = i % D;
        const float* from  = all + g * (D + 2);
        float        value = 0;
        for (int c0 = 0; c0 < item.n_chunks; c0 += 8) {
            float top[8], v[8];
#pragma unroll
            for (int c = 0; c < 8; c++) {
                const float* at = from + min(c0 + c, item.n_chunks - 1) * apart;
                top[c] = __ldcg(at + D), v[c] = __ldcg(at + d);
            }
#pragma unroll
            for (int c = 0; c < 8; c++)
                if (c0 + c < item.n_chunks) value += weight_of(top[c], limits[g]) * v[c];
        }
        reinterpret_cast<__half*>(a.out)[(std::int64_t(item.row) * a.n_heads + head0 + g) * D + d] =
            __float2half(totals[g] > 0 ? value / totals[g] : 0.0f);
    }
}

// D: head_dim, a multiple of 8; G: query heads of a kv head that a block takes.
template <int D, int G>
__global__ void __launch_bounds__(decode_warps * 32)
    decode_kernel(Attention a, Plan plan, const DecodeItem* items, float* partial, std::int32_t* tickets) {
    wait_for_inputs();
    constexpr int    lanes = power_of_two(D / 8); // that share a position, 16 bytes each; of those D / 8 have something
    constexpr int    groups = 32 / lanes;         // positions that a warp reads at once
    constexpr int    ahead  = 4;                  // positions of a group in flight
    constexpr int    parts  = decode_warps * groups; // running sums of the block
    const DecodeItem item   = items[blockIdx.x];
    if (item.row < 0) return;
    const int  group_size = a.n_heads / a.n_kv_heads, per_kv = (group_size + G - 1) / G;
    const int  kv_head = int(blockIdx.y) / per_kv, head0 = kv_head * group_size + int(blockIdx.y) % per_kv * G;
    const int  n_heads = min(G, kv_head * group_size + group_size - head0);
    const int  warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / lanes, in = lane % lanes;
    const bool active = in < D / 8;
    const int  begin = item.begin, end = item.end, first = begin / 16 * 16;

    // The chunk's block ids, once.
    __shared__ std::int32_t ids[attention_chunk + 1];
    const std::int32_t*     table       = plan.block_tables + item.table;
    const int               first_block = begin / a.block_size;
    for (int i = threadIdx.x; i <= (end - 1) / a.block_size - first_block; i += blockDim.x)
        ids[i] = table[first_block + i];
    __syncthreads();

    float q[G][8], acc[G][8], top[G], sum[G];
#pragma unroll
    for (int g = 0; g < G; g++) {
        top[g]  = -INFINITY;
        sum[g]  = 0;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (active && g < n_heads)
            v = *reinterpret_cast<const uint4*>(reinterpret_cast<const __half*>(a.q) +
                                                (std::int64_t(item.row) * a.n_heads + head0 + g) * D + in * 8);
        const std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 f = as_float2(words[i]);
            q[g][2 * i] = f.x * a.scale, q[g][2 * i + 1] = f.y * a.scale;
            acc[g][2 * i] = acc[g][2 * i + 1] = 0;
        }
    }
    const auto* keys   = reinterpret_cast<const __half*>(a.cache_k);
    const auto* values = reinterpret_cast<const __half*>(a.cache_v);
    // Positions are dealt out by their place in the chunk, not by where the window begins: the same sums in any batch.
    for (int start = first; start < end; start += parts * ahead) {
        const int base = start + warp * groups + group;
        uint4     k[ahead], v[ahead];
        bool      valid[ahead];
#pragma unroll
        for (int u = 0; u < ahead; u++) {
            const int position = base + u * parts;
            valid[u]           = position >= begin && position < end;
            k[u] = v[u] = make_uint4(0, 0, 0, 0);
            if (valid[u] && active) {
                const int          block = position / a.block_size;
                const std::int64_t at =
                    ((std::int64_t(ids[block - first_block]) * a.n_kv_heads + kv_head) * a.block_size + position -
                     block * a.block_size) *
                        D +
                    in * 8;
                k[u] = *reinterpret_cast<const uint4*>(keys + at);
                v[u] = *reinterpret_cast<const uint4*>(values + at);
            }
        }
        float score[G][ahead];
#pragma unroll
        for (int u = 0; u < ahead; u++) {
            const float2 k0 = as_float2(k[u].x), k1 = as_float2(k[u].y), k2 = as_float2(k[u].z), k3 = as_float2(k[u].w);
#pragma unroll
            for (int g = 0; g < G; g++) {
                float s = q[g][0] * k0.x + q[g][1] * k0.y + q[g][2] * k1.x + q[g][3] * k1.y + q[g][4] * k2.x +
                          q[g][5] * k2.y + q[g][6] * k3.x + q[g][7] * k3.y;
#pragma unroll
                for (int step = lanes / 2; step > 0; step /= 2) s += __shfl_xor_sync(~0u, s, step);
                score[g][u] = valid[u] ? capped(s, a.softcap) : -INFINITY;
            }
        }
#pragma unroll
        for (int g = 0; g < G; g++) {
            float limit = top[g];
#pragma unroll
            for (int u = 0; u < ahead; u++) limit = fmaxf(limit, score[g][u]);
            if (limit == -INFINITY) continue; // nothing seen yet
            const float shrink = __expf(top[g] - limit);
            top[g]             = limit;
            sum[g] *= shrink;
#pragma unroll
            for (int i = 0; i < 8; i++) acc[g][i] *= shrink;
#pragma unroll
            for (int u = 0; u < ahead; u++) {
                const float p = __expf(score[g][u] - limit);
                sum[g] += p;
                const float2 v0 = as_float2(v[u].x), v1 = as_float2(v[u].y), v2 = as_float2(v[u].z),
                             v3 = as_float2(v[u].w);
                acc[g][0] += p * v0.x, acc[g][1] += p * v0.y, acc[g][2] += p * v1.x, acc[g][3] += p * v1.y;
                acc[g][4] += p * v2.x, acc[g][5] += p * v2.y, acc[g][6] += p * v3.x, acc[g][7] += p * v3.y;
            }
        }
    }

    // The block's running sums become one, in a fixed order.
    __shared__ float tops[parts][G], sums[parts][G], values_of[parts][G][D];
    if (active)
#pragma unroll
        for (int g = 0; g < G; g++) {
            const int at = warp * groups + group;
            if (in == 0) tops[at][g] = top[g], sums[at][g] = sum[g];
#pragma unroll
            for (int i = 0; i < 8; i++) values_of[at][g][in * 8 + i] = acc[g][i];
        }
    combine<D, G, parts>(a, item, head0, n_heads, &tops[0][0], &sums[0][0], &values_of[0][0][0], G * D, partial,
                         tickets);
}

// The same with tensor cores, for up to 8 query heads of a kv head together: scores are K·Qᵀ (16 positions × 8 heads), the
// result Vᵀ·Pᵀ (dimensions × 8 heads). Which dimension an mma calls k or m is free, so each lane (i, j) = (lane / 4, lane % 4)
// is given those that it can load in whole words. K: words j, j + 4, .. of positions i and i + 8. V: dimensions i·D/8 .. of
// positions 2j, 2j + 1, 2j + 8, 2j + 9. A lane keeps the sums of heads 2j and 2j + 1.

constexpr int most_heads = 8;

template <int D>
struct Heads {
    static constexpr int k_words = D / 32, v_words = D / 64; // 16-byte words a lane has of a position
    float                out[D / 16][4] = {}, top[2] = {-INFINITY, -INFINITY}, sum[2] = {};

    // Of head i, the words that K's are multiplied with.
    static __device__ void load_q(const Attention& a, int row, int head0, int n_heads, std::uint32_t (&q)[D / 8]) {
        const int   i = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
        const auto* from = reinterpret_cast<const __half*>(a.q) + (std::int64_t(row) * a.n_heads + head0 + i) * D;
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
        std::uint32_t weights[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const __half2 pair = __floats2half2_rn(p[2 * r], p[2 * r + 1]);
            asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;"
                : "=r"(weights[r])
                : "r"(*reinterpret_cast<const std::uint32_t*>(&pair)));
        }
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

template <int D>
__global__ void __launch_bounds__(decode_warps * 32, D <= 128 ? 4 : 2)
    decode_mma_kernel(Attention a, Plan plan, const DecodeItem* items, float* partial, std::int32_t* tickets) {
    wait_for_inputs();
    constexpr int    G    = most_heads;
    const DecodeItem item = items[blockIdx.x];
    if (item.row < 0) return;
    const int group_size = a.n_heads / a.n_kv_heads, per_kv = (group_size + G - 1) / G;
    const int kv_head = int(blockIdx.y) / per_kv, head0 = kv_head * group_size + int(blockIdx.y) % per_kv * G;
    const int n_heads = min(G, kv_head * group_size + group_size - head0);
    const int warp = threadIdx.x / 32, i = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
    const int begin = item.begin, end = item.end, first = begin / 16 * 16;

    __shared__ std::int32_t ids[attention_chunk + 1];
    const int               first_block = begin / a.block_size;
    for (int b = threadIdx.x; b <= (end - 1) / a.block_size - first_block; b += blockDim.x)
        ids[b] = plan.block_tables[item.table + first_block + b];
    std::uint32_t q[D / 8];
    Heads<D>::load_q(a, item.row, head0, n_heads, q);
    __syncthreads();
    const int  shift = 31 - __clz(a.block_size);
    const bool power = (a.block_size & (a.block_size - 1)) == 0;
    const auto place = [&](int position) { // of this kv head's row, in halves
        const int block = power ? position >> shift : position / a.block_size;
        return ((std::int64_t(ids[block - first_block]) * a.n_kv_heads + kv_head) * a.block_size + position -
                block * a.block_size) *
               D;
    };
    const auto* keys   = reinterpret_cast<const __half*>(a.cache_k);
    const auto* values = reinterpret_cast<const __half*>(a.cache_v);
    const uint4 zero   = make_uint4(0, 0, 0, 0);
    Heads<D>    heads;
    for (int from = first + warp * 16; from < end; from += decode_warps * 16) {
        const auto seen = [&](int position) { return position >= begin && position < end; };
        uint4      k[2][Heads<D>::k_words], v[4][Heads<D>::v_words];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int  position = from + i + 8 * h;
            const auto at       = seen(position) ? place(position) : 0;
#pragma unroll
            for (int w = 0; w < Heads<D>::k_words; w++)
                k[h][w] = seen(position) ? *reinterpret_cast<const uint4*>(keys + at + (j + 4 * w) * 8) : zero;
        }
#pragma unroll
        for (int h = 0; h < 4; h++) {
            const int  position = from + 2 * j + h % 2 + h / 2 * 8;
            const auto at       = seen(position) ? place(position) + i * (D / 8) : 0;
#pragma unroll
            for (int w = 0; w < Heads<D>::v_words; w++)
                v[h][w] = seen(position) ? *reinterpret_cast<const uint4*>(values + at + w * 8) : zero;
        }
        heads.add(a, q, k, v, seen(from + i), seen(from + i + 8));
    }
    __shared__ float tops[decode_warps][G], sums[decode_warps][G], values_of[decode_warps][G][D];
    heads.store(n_heads, tops[warp], sums[warp], values_of[warp][0]);
    combine<D, G, decode_warps>(a, item, head0, n_heads, &tops[0][0], &sums[0][0], &values_of[0][0][0], G * D, partial,
                                tickets);
}

// The same on Hopper: K and V come by bulk copies into rings in shared memory, one a warp, tiles of 16 positions block by block
// of the cache. Chunks may be of any length.

template <int D>
struct Ring {
    static constexpr int tile_bytes = 16 * D * 2 * 2; // K, then V, of 16 positions
    static constexpr int stages     = 2;
    static constexpr int at_once    = D <= 64 ? 5 : D <= 128 ? 3 : 1; // blocks of threads on a processor
    static constexpr int warp_bytes = stages * tile_bytes;            // at the end, the values of the warp's heads
};

template <int D>
__global__ void __launch_bounds__(decode_warps * 32, Ring<D>::at_once)
    decode_stream_kernel(Attention a, Plan plan, const DecodeItem* items, float* partial, std::int32_t* tickets) {
#if __CUDA_ARCH__ >= 900
    using R             = Ring<D>;
    constexpr int     G = most_heads, step = decode_warps * 16; // from a warp's tile to its next
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ std::uint64_t ready[decode_warps][R::stages];
    __shared__ float         tops[decode_warps][G], sums[decode_warps][G];
    const int                warp = threadIdx.x / 32, lane = threadIdx.x % 32, i = lane / 4, j = lane % 4;
    unsigned char*           ring = memory + warp * R::warp_bytes;
    const DecodeItem         item = items[blockIdx.x]; // the plan is older than the kernel before this one
    if (item.row < 0) {
        wait_for_inputs();
        return;
    }
    const int group_size = a.n_heads / a.n_kv_heads, per_kv = (group_size + G - 1) / G;
    const int kv_head = int(blockIdx.y) / per_kv, head0 = kv_head * group_size + int(blockIdx.y) % per_kv * G;
    const int n_heads = min(G, kv_head * group_size + group_size - head0);
    const int start = item.begin / 16 * 16 + warp * 16, n_tiles = max(0, item.end - start + step - 1) / step;

    // Half a warp knows the blocks of an even tile, the other half those of the odd one after it.
    const auto block_of = [&](int t) {
        const int position = start + (t + lane / 16) * step + lane % 16;
        return position >= item.begin && position < item.end ? plan.block_tables[item.table + position / a.block_size]
                                                             : 0;
    };
    std::int32_t block = block_of(0), next_block = block_of(2);
    if (lane == 0) {
        for (int s = 0; s < R::stages; s++) barrier_init(&ready[warp][s], 1);
        barriers_ready();
    }
    __syncwarp();
    const auto bring = [&](int t) {
        if (t >= n_tiles) return;
        const int      from = start + t * step, low = max(from, item.begin), high = min(from + 16, item.end);
        std::uint64_t* b = &ready[warp][t % R::stages];
        if (lane == 0) barrier_expect(b, unsigned(high - low) * D * 4);
        __syncwarp();
        const int position = from + lane % 16, offset = position % a.block_size;
        if (lane / 16 == t % 2 && position >= low && position < high && (position == low || offset == 0)) {
            const unsigned bytes = unsigned(min(high - position, a.block_size - offset)) * D * 2;
            const auto     at    = ((std::int64_t(block) * a.n_kv_heads + kv_head) * a.block_size + offset) * D;
            unsigned char* to    = ring + t % R::stages * R::tile_bytes + (position - from) * D * 2;
            copy_bulk(to, reinterpret_cast<const __half*>(a.cache_k) + at, bytes, b);
            copy_bulk(to + 16 * D * 2, reinterpret_cast<const __half*>(a.cache_v) + at, bytes, b);
        }
        if (t % 2 == 1) block = next_block, next_block = block_of(t + 3);
    };
    wait_for_inputs();
    for (int t = 0; t < R::stages; t++) bring(t);
    std::uint32_t q[D / 8];
    Heads<D>::load_q(a, item.row, head0, n_heads, q);
    Heads<D> heads;
    for (int t = 0; t < n_tiles; t++) {
        const int            from = start + t * step;
        const unsigned char* tile = ring + t % R::stages * R::tile_bytes;
        const auto           seen = [&](int position) { return position >= item.begin && position < item.end; };
        uint4                k[2][Heads<D>::k_words], v[4][Heads<D>::v_words];
        barrier_wait(&ready[warp][t % R::stages], unsigned(t / R::stages) & 1);
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int w = 0; w < Heads<D>::k_words; w++)
                k[h][w] = *reinterpret_cast<const uint4*>(tile + (i + 8 * h) * D * 2 + (j + 4 * w) * 16);
#pragma unroll
        for (int h = 0; h < 4; h++) {
            const int row = 2 * j + h % 2 + h / 2 * 8;
#pragma unroll
            for (int w = 0; w < Heads<D>::v_words; w++)
                v[h][w] = seen(from + row)
                              ? *reinterpret_cast<const uint4*>(tile + (16 + row) * D * 2 + i * (D / 4) + w * 16)
                              : make_uint4(0, 0, 0, 0);
        }
        heads.add(a, q, k, v, seen(from + i), seen(from + i + 8));
        __syncwarp(); // all have read the tile
        bring(t + R::stages);
    }
    heads.store(n_heads, tops[warp], sums[warp], reinterpret_cast<float*>(ring));
    combine<D, G, decode_warps>(a, item, head0, n_heads, &tops[0][0], &sums[0][0], reinterpret_cast<float*>(memory),
                                R::warp_bytes / 4, partial, tickets);
#endif
}

template <int D, int G>
void launch_decode(const Attention& a, const Plan& plan, const DecodeItem* items, int n, float* partial,
                   std::int32_t* tickets, cudaStream_t stream) {
    const int per_kv = (a.n_heads / a.n_kv_heads + G - 1) / G;
    run_kernel(decode_kernel<D, G>, dim3(unsigned(n), unsigned(a.n_kv_heads * per_kv)), decode_warps * 32, 0, stream, a,
               plan, items, partial, tickets);
}

template <int D>
void launch_decode_for(const Attention& a, const Plan& plan, const DecodeItem* items, int n, float* partial,
                       std::int32_t* tickets, cudaStream_t stream) {
    const int group = a.n_heads / a.n_kv_heads;
    if constexpr (D == 64 || D == 128 || D == 256) {
        const unsigned slots = unsigned(a.n_kv_heads * ((group + most_heads - 1) / most_heads));
        if (is_hopper()) {
            constexpr int            bytes = decode_warps * Ring<D>::warp_bytes;
            static const cudaError_t once =
                cudaFuncSetAttribute(decode_stream_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
            (void)once;
            return run_kernel(decode_stream_kernel<D>, dim3(unsigned(n), slots), decode_warps * 32, bytes, stream, a,
                              plan, items, partial, tickets);
        }
        if (group > 1)
            return run_kernel(decode_mma_kernel<D>, dim3(unsigned(n), slots), decode_warps * 32, 0, stream, a, plan,
                              items, partial, tickets);
    }
    if (group == 1) launch_decode<D, 1>(a, plan, items, n, partial, tickets, stream);
    else if (group == 2) launch_decode<D, 2>(a, plan, items, n, partial, tickets, stream);
    else launch_decode<D, 4>(a, plan, items, n, partial, tickets, stream);
}

} // namespace

int decode_chunk(int head_dim, std::int64_t work) {
    if (!is_hopper() || (head_dim != 64 && head_dim != 128 && head_dim != 256)) return attention_chunk;
    // What a block of threads does at the beginning and the end of a chunk takes as long as 500 positions: chunks as long as
    // they can be for all processors to have some.
    int chunk = attention_chunk;
    while (chunk < 1024 && work / (2 * chunk) >= std::int64_t(n_processors()) * 15 / 8) chunk *= 2;
    return chunk;
}

void attention_decode(const Attention& a, const Plan& plan, const DecodeItem* items, int n_items, float* partial,
                      std::int32_t* tickets, Stream stream) {
    auto s = static_cast<cudaStream_t>(stream);
    if (n_items == 0) return;
    switch (a.head_dim) {
        case 16: launch_decode_for<16>(a, plan, items, n_items, partial, tickets, s); break;
        case 32: launch_decode_for<32>(a, plan, items, n_items, partial, tickets, s); break;
        case 64: launch_decode_for<64>(a, plan, items, n_items, partial, tickets, s); break;
        case 80: launch_decode_for<80>(a, plan, items, n_items, partial, tickets, s); break;
        case 96: launch_decode_for<96>(a, plan, items, n_items, partial, tickets, s); break;
        case 128: launch_decode_for<128>(a, plan, items, n_items, partial, tickets, s); break;
        case 256: launch_decode_for<256>(a, plan, items, n_items, partial, tickets, s); break;
        default: break; // prefill_tile() is 0 for it: the caller makes it a tile of one row
    }
}

} // namespace quire::cuda
