// Attention over paged K and V. Cache: [block][kv_head][offset][head_dim] halves, so what one head reads of one block is one
// run of bytes. Scores and sums are float32, the softmax is online (running maximum, sum and weighted values).
//   decode:  one query a sequence; a block of threads takes one chunk of positions of one kv head, all query heads of its
//            group together, so that K and V are read once. Bound by bytes.
//   prefill: tiles of neighbouring queries, tensor cores (mma.m16n8k16), K and V through shared memory by cp.async.
//   plain:   any head_dim, a warp for each query and head. The fallback.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "kernels.h"
#include "warp.cuh"

namespace quire::cuda {

namespace {

__device__ float2 as_float2(std::uint32_t h) { return __half22float2(*reinterpret_cast<const __half2*>(&h)); }

__device__ float capped(float score, float softcap) { return softcap > 0 ? softcap * tanhf(score / softcap) : score; }

// -- decode

constexpr int decode_warps = 4;

__host__ __device__ constexpr int power_of_two(int n) {
    int p = 1;
    while (p < n) p *= 2;
    return p;
}

// The running sums of a block's parts become one, in a fixed order; then, by the last block of a sequence to get here, its
// chunks. tops and sums: [parts][G], values: [parts][G][D], in shared memory.
template <int D, int G, int Parts>
__device__ void combine(const Attention& a, const DecodeItem& item, int head0, int n_heads, const float* tops,
                        const float* sums, const float* values, float* partial, std::int32_t* tickets) {
    __syncthreads();
    const bool alone = item.n_chunks == 1;
    for (int i = threadIdx.x; i < n_heads * D; i += blockDim.x) {
        const int g = i / D, d = i % D, head = head0 + g;
        float     limit = -INFINITY, total = 0, value = 0;
        for (int part = 0; part < Parts; part++) limit = fmaxf(limit, tops[part * G + g]);
        for (int part = 0; part < Parts; part++) {
            const float w = tops[part * G + g] == -INFINITY ? 0.0f : __expf(tops[part * G + g] - limit);
            total += w * sums[part * G + g];
            value += w * values[(part * G + g) * D + d];
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
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        std::int32_t* ticket = tickets + std::int64_t(item.row) * gridDim.y + blockIdx.y;
        is_last              = atomicAdd(ticket, 1) == item.n_chunks - 1;
        if (is_last) *ticket = 0; // for the next launch
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    const std::int64_t first_item = std::int64_t(blockIdx.x) - item.index;
    for (int i = threadIdx.x; i < n_heads * D; i += blockDim.x) {
        const int          g = i / D, d = i % D, head = head0 + g;
        const float*       from  = partial + (first_item * a.n_heads + head) * (D + 2);
        const std::int64_t step  = std::int64_t(a.n_heads) * (D + 2);
        float              limit = -INFINITY, total = 0, value = 0;
        for (int c = 0; c < item.n_chunks; c++) limit = fmaxf(limit, __ldcg(from + c * step + D));
        for (int c = 0; c < item.n_chunks; c++) {
            const float top_c = __ldcg(from + c * step + D), w = top_c == -INFINITY ? 0.0f : __expf(top_c - limit);
            total += w * __ldcg(from + c * step + D + 1);
            value += w * __ldcg(from + c * step + d);
        }
        reinterpret_cast<__half*>(a.out)[(std::int64_t(item.row) * a.n_heads + head) * D + d] =
            __float2half(total > 0 ? value / total : 0.0f);
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
    const int  last   = plan.positions[item.row];
    const int  begin  = a.window > 0 ? max(item.first, last - a.window + 1) : item.first;
    const int  end    = min(item.first + attention_chunk, last + 1);

    // The chunk's block ids, once.
    __shared__ std::int32_t ids[attention_chunk + 1];
    const std::int32_t*     table       = plan.block_tables + plan.table_start[item.sequence];
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
    for (int start = item.first; start < end; start += parts * ahead) {
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
    combine<D, G, parts>(a, item, head0, n_heads, &tops[0][0], &sums[0][0], &values_of[0][0][0], partial, tickets);
}

__device__ void multiply(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1);

// The same with tensor cores, for up to 8 query heads of a kv head together, and no shared memory: scores are K·Qᵀ (16
// positions × 8 heads), the result Vᵀ·Pᵀ (dimensions × 8 heads). Which dimension an mma calls k or m is free, so each lane
// (i, j) = (lane / 4, lane % 4) is given those that it can load in whole words. K: dimensions j·D/4 .. of positions i and
// i + 8. V: dimensions i·D/8 .. of positions 2j, 2j + 1, 2j + 8, 2j + 9. A lane keeps the sums of heads 2j and 2j + 1.
template <int D>
__global__ void __launch_bounds__(decode_warps * 32, D <= 128 ? 4 : 2)
    decode_mma_kernel(Attention a, Plan plan, const DecodeItem* items, float* partial, std::int32_t* tickets) {
    wait_for_inputs();
    constexpr int    G = 8, k_words = D / 32, v_words = D / 64; // 16-byte words a lane has of a position
    const DecodeItem item = items[blockIdx.x];
    if (item.row < 0) return;
    const int group_size = a.n_heads / a.n_kv_heads, per_kv = (group_size + G - 1) / G;
    const int kv_head = int(blockIdx.y) / per_kv, head0 = kv_head * group_size + int(blockIdx.y) % per_kv * G;
    const int n_heads = min(G, kv_head * group_size + group_size - head0);
    const int warp = threadIdx.x / 32, i = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
    const int last  = plan.positions[item.row];
    const int begin = a.window > 0 ? max(item.first, last - a.window + 1) : item.first;
    const int end   = min(item.first + attention_chunk, last + 1);

    __shared__ std::int32_t ids[attention_chunk + 1];
    const std::int32_t*     table       = plan.block_tables + plan.table_start[item.sequence];
    const int               first_block = begin / a.block_size;
    for (int b = threadIdx.x; b <= (end - 1) / a.block_size - first_block; b += blockDim.x)
        ids[b] = table[first_block + b];

    std::uint32_t q[D / 8]; // head i's dimensions j·D/4 ..
    {
        const auto* from =
            reinterpret_cast<const __half*>(a.q) + (std::int64_t(item.row) * a.n_heads + head0 + i) * D + j * (D / 4);
#pragma unroll
        for (int w = 0; w < k_words; w++) {
            const uint4 v = i < n_heads ? *reinterpret_cast<const uint4*>(from + w * 8) : make_uint4(0, 0, 0, 0);
            q[4 * w] = v.x, q[4 * w + 1] = v.y, q[4 * w + 2] = v.z, q[4 * w + 3] = v.w;
        }
    }
    __syncthreads();
    const int  shift = 31 - __clz(a.block_size);
    const bool power = (a.block_size & (a.block_size - 1)) == 0;
    const auto place = [&](int position) { // of this kv head's row, in halves
        const int block = power ? position >> shift : position / a.block_size;
        return ((std::int64_t(ids[block - first_block]) * a.n_kv_heads + kv_head) * a.block_size + position -
                block * a.block_size) *
               D;
    };
    const auto* keys           = reinterpret_cast<const __half*>(a.cache_k);
    const auto* values         = reinterpret_cast<const __half*>(a.cache_v);
    const uint4 zero           = make_uint4(0, 0, 0, 0);
    float       out[D / 16][4] = {}, top[2] = {-INFINITY, -INFINITY}, sum[2] = {};
    const float scale = a.scale * 1.4426950408889634f;
    for (int from = item.first + warp * 16; from < end; from += decode_warps * 16) {
        uint4 k[2][k_words], v[4][v_words];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int  position = from + i + 8 * h;
            const bool valid    = position >= begin && position < end;
            const auto at       = valid ? place(position) + j * (D / 4) : 0;
#pragma unroll
            for (int w = 0; w < k_words; w++)
                k[h][w] = valid ? *reinterpret_cast<const uint4*>(keys + at + w * 8) : zero;
        }
#pragma unroll
        for (int h = 0; h < 4; h++) {
            const int  position = from + 2 * j + h % 2 + h / 2 * 8;
            const bool valid    = position >= begin && position < end;
            const auto at       = valid ? place(position) + i * (D / 8) : 0;
#pragma unroll
            for (int w = 0; w < v_words; w++)
                v[h][w] = valid ? *reinterpret_cast<const uint4*>(values + at + w * 8) : zero;
        }
        float score[4] = {}; // position i: heads 2j, 2j + 1; position i + 8: the same
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
                const int position = from + i + 8 * r;
                float     x        = score[2 * r + h] * scale;
                if (a.softcap > 0) x = a.softcap * 1.4426950408889634f * tanhf(score[2 * r + h] * a.scale / a.softcap);
                p[2 * r + h] = position >= begin && position < end ? x : -INFINITY;
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
    __shared__ float tops[decode_warps][G], sums[decode_warps][G], values_of[decode_warps][G][D];
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2) sum[h] += __shfl_xor_sync(~0u, sum[h], step);
        if (i == 0) {
            tops[warp][2 * j + h] = top[h] * 0.6931471805599453f; // back from exp2's scale
            sums[warp][2 * j + h] = sum[h];
        }
#pragma unroll
        for (int m = 0; m < D / 16; m++) {
            values_of[warp][2 * j + h][i * (D / 8) + 2 * m]     = out[m][h];
            values_of[warp][2 * j + h][i * (D / 8) + 2 * m + 1] = out[m][2 + h];
        }
    }
    combine<D, G, decode_warps>(a, item, head0, n_heads, &tops[0][0], &sums[0][0], &values_of[0][0][0], partial,
                                tickets);
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
    if constexpr (D == 64 || D == 128 || D == 256)
        if (group > 1) {
            const int per_kv = (group + 7) / 8;
            run_kernel(decode_mma_kernel<D>, dim3(unsigned(n), unsigned(a.n_kv_heads * per_kv)), decode_warps * 32, 0,
                       stream, a, plan, items, partial, tickets);
            return;
        }
    if (group == 1) launch_decode<D, 1>(a, plan, items, n, partial, tickets, stream);
    else if (group == 2) launch_decode<D, 2>(a, plan, items, n, partial, tickets, stream);
    else launch_decode<D, 4>(a, plan, items, n, partial, tickets, stream);
}

// -- plain: a warp for each row and head; lanes share the dimensions, positions one after another

__global__ void plain_kernel(Attention a, Plan plan, const PrefillTile* tiles) {
    wait_for_inputs();
    const PrefillTile tile = tiles[blockIdx.x];
    const int   lane = threadIdx.x % 32, D = a.head_dim, head = blockIdx.y, kv_head = head / (a.n_heads / a.n_kv_heads);
    const auto* table = plan.block_tables + plan.table_start[tile.sequence];
    extern __shared__ float memory[]; // per warp: q, then acc
    float *                 q = memory + threadIdx.x / 32 * 2 * D, *acc = q + D;
    for (int r = threadIdx.x / 32; r < tile.n_rows; r += blockDim.x / 32) {
        const std::int64_t row  = tile.first_row + r;
        const int          last = plan.positions[row];
        for (int d = lane; d < D; d += 32) {
            q[d]   = __half2float(reinterpret_cast<const __half*>(a.q)[(row * a.n_heads + head) * D + d]) * a.scale;
            acc[d] = 0;
        }
        __syncwarp();
        float top = -INFINITY, sum = 0;
        for (int position = a.window > 0 ? max(0, last - a.window + 1) : 0; position <= last; position++) {
            const std::int64_t at =
                ((std::int64_t(table[position / a.block_size]) * a.n_kv_heads + kv_head) * a.block_size +
                 position % a.block_size) *
                D;
            float score = 0;
            for (int d = lane; d < D; d += 32)
                score += q[d] * __half2float(reinterpret_cast<const __half*>(a.cache_k)[at + d]);
            score             = capped(warp_sum(score), a.softcap);
            const float limit = fmaxf(top, score), shrink = __expf(top - limit), p = __expf(score - limit);
            top = limit;
            sum = sum * shrink + p;
            for (int d = lane; d < D; d += 32)
                acc[d] = acc[d] * shrink + p * __half2float(reinterpret_cast<const __half*>(a.cache_v)[at + d]);
        }
        for (int d = lane; d < D; d += 32)
            reinterpret_cast<__half*>(a.out)[(row * a.n_heads + head) * D + d] = __float2half(acc[d] / sum);
        __syncwarp();
    }
}

// -- prefill

__device__ void copy_async(void* to, const void* from, bool valid) { // 16 bytes; zeros where not valid
    const auto address = unsigned(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(valid ? 16 : 0));
}
__device__ void commit_copies() { asm volatile("cp.async.commit_group;"); }
template <int N>
__device__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N));
}

__device__ void load_matrices(std::uint32_t (&r)[4], const __half* p) {
    const auto address = unsigned(__cvta_generic_to_shared(p));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}
__device__ void load_matrices_transposed(std::uint32_t (&r)[4], const __half* p) {
    const auto address = unsigned(__cvta_generic_to_shared(p));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}
__device__ void multiply(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ std::uint32_t pack(float a, float b) {
    const __half2 h = __floats2half2_rn(a, b);
    return *reinterpret_cast<const std::uint32_t*>(&h);
}

// A block of Warps × 16 queries of one head against tiles of N positions. Rows in shared memory are padded by 16 bytes, so
// that ldmatrix meets no bank twice.
template <int D, int Warps, int N>
__global__ void __launch_bounds__(Warps * 32) prefill_kernel(Attention a, Plan plan, const PrefillTile* tiles) {
    wait_for_inputs();
    constexpr int     stride = D + 8, M = Warps * 16;
    extern __shared__ __align__(16) __half shared[];
    __half *          q_tile = shared, *k_tile = q_tile + M * stride, *v_tile = k_tile + 2 * N * stride;
    const PrefillTile tile = tiles[gridDim.x - 1 - blockIdx.x]; // long contexts, which come last, first
    const int         head = blockIdx.y, kv_head = head / (a.n_heads / a.n_kv_heads);
    const int         warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const auto*       table = plan.block_tables + plan.table_start[tile.sequence];
    const int         first = plan.positions[tile.first_row], last = first + tile.n_rows - 1; // positions of the tile
    const int         begin   = a.window > 0 ? max(0, first - a.window + 1) / N * N : 0;
    const int         n_tiles = (last - begin) / N + 1;

    const int  shift = 31 - __clz(a.block_size);
    const bool power = (a.block_size & (a.block_size - 1)) == 0;
    const auto load  = [&](int t) { // K and V of one tile of positions
        constexpr int words = D / 8;
        __half *      k = k_tile + (t & 1) * N * stride, *v = v_tile + (t & 1) * N * stride;
        for (int i = threadIdx.x; i < N * words; i += Warps * 32) {
            const int          n = i / words, w = i % words, position = begin + t * N + n;
            const bool         valid = position <= last;
            const int          block = !valid ? 0 : power ? position >> shift : position / a.block_size;
            const std::int64_t at    = valid ? ((std::int64_t(table[block]) * a.n_kv_heads + kv_head) * a.block_size +
                                             position - block * a.block_size) *
                                                    D +
                                                w * 8
                                              : 0;
            copy_async(k + n * stride + w * 8, reinterpret_cast<const __half*>(a.cache_k) + at, valid);
            copy_async(v + n * stride + w * 8, reinterpret_cast<const __half*>(a.cache_v) + at, valid);
        }
    };
    for (int i = threadIdx.x; i < M * (D / 8); i += Warps * 32) {
        const int  r = i / (D / 8), w = i % (D / 8);
        const bool valid = r < tile.n_rows;
        copy_async(q_tile + r * stride + w * 8,
                   reinterpret_cast<const __half*>(a.q) +
                       (std::int64_t(tile.first_row + (valid ? r : 0)) * a.n_heads + head) * D + w * 8,
                   valid);
    }
    load(0);
    commit_copies();

    float       out[D / 8][4] = {}, top[2] = {-INFINITY, -INFINITY}, sum[2] = {};
    const int   row[2] = {first + warp * 16 + lane / 4,
                          first + warp * 16 + lane / 4 + 8}; // positions of this lane's rows
    const float scale  = a.scale * 1.4426950408889634f;      // exp2 instead of exp
    for (int t = 0; t < n_tiles; t++) {
        if (t + 1 < n_tiles) load(t + 1);
        commit_copies();
        wait_copies<1>();
        __syncthreads();
        const __half *k = k_tile + (t & 1) * N * stride, *v = v_tile + (t & 1) * N * stride;
        const int     from = begin + t * N;
        // Rows of this warp that see nothing of this tile have nothing to do.
        if (from <= first + warp * 16 + 15 && warp * 16 < tile.n_rows) {
            float s[N / 8][4] = {};
#pragma unroll
            for (int d = 0; d < D / 16; d++) {
                std::uint32_t q[4];
                load_matrices(q, q_tile + (warp * 16 + lane % 16) * stride + d * 16 + lane / 16 * 8);
#pragma unroll
                for (int n = 0; n < N / 16; n++) {
                    std::uint32_t b[4];
                    load_matrices(b, k + (n * 16 + lane % 8 + lane / 16 * 8) * stride + d * 16 + lane / 8 % 2 * 8);
                    multiply(s[2 * n], q, b[0], b[1]);
                    multiply(s[2 * n + 1], q, b[2], b[3]);
                }
            }
            const bool edge = from + N - 1 > first + warp * 16 || a.window > 0;
#pragma unroll
            for (int n = 0; n < N / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float x = s[n][i] * scale;
                    if (a.softcap > 0) x = a.softcap * 1.4426950408889634f * tanhf(s[n][i] * a.scale / a.softcap);
                    if (edge) {
                        const int position = from + n * 8 + lane % 4 * 2 + i % 2, mine = row[i / 2];
                        if (position > mine || (a.window > 0 && position <= mine - a.window)) x = -INFINITY;
                    }
                    s[n][i] = x;
                }
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float limit = top[r];
#pragma unroll
                for (int n = 0; n < N / 8; n++) limit = fmaxf(limit, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
                limit              = fmaxf(limit, __shfl_xor_sync(~0u, limit, 1));
                limit              = fmaxf(limit, __shfl_xor_sync(~0u, limit, 2));
                const float base   = limit == -INFINITY ? 0.0f : limit; // a row that has seen nothing yet
                const float shrink = exp2f(top[r] - base);
                top[r]             = limit;
                float part         = 0;
#pragma unroll
                for (int n = 0; n < N / 8; n++) {
                    s[n][2 * r]     = exp2f(s[n][2 * r] - base);
                    s[n][2 * r + 1] = exp2f(s[n][2 * r + 1] - base);
                    part += s[n][2 * r] + s[n][2 * r + 1];
                }
                sum[r] = sum[r] * shrink + part;
#pragma unroll
                for (int d = 0; d < D / 8; d++) out[d][2 * r] *= shrink, out[d][2 * r + 1] *= shrink;
            }
#pragma unroll
            for (int n = 0; n < N / 16; n++) {
                const std::uint32_t p[4] = {pack(s[2 * n][0], s[2 * n][1]), pack(s[2 * n][2], s[2 * n][3]),
                                            pack(s[2 * n + 1][0], s[2 * n + 1][1]),
                                            pack(s[2 * n + 1][2], s[2 * n + 1][3])};
#pragma unroll
                for (int d = 0; d < D / 16; d++) {
                    std::uint32_t b[4];
                    load_matrices_transposed(b, v + (n * 16 + lane % 16) * stride + d * 16 + lane / 16 * 8);
                    multiply(out[2 * d], p, b[0], b[1]);
                    multiply(out[2 * d + 1], p, b[2], b[3]);
                }
            }
        }
        __syncthreads(); // the other buffer is loaded next
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
        sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
        const int in_tile = warp * 16 + lane / 4 + 8 * r;
        if (in_tile >= tile.n_rows) continue;
        const float inverse = sum[r] > 0 ? 1 / sum[r] : 0.0f;
        auto* to = reinterpret_cast<__half*>(a.out) + (std::int64_t(tile.first_row + in_tile) * a.n_heads + head) * D;
#pragma unroll
        for (int d = 0; d < D / 8; d++)
            *reinterpret_cast<std::uint32_t*>(to + d * 8 + lane % 4 * 2) =
                pack(out[d][2 * r] * inverse, out[d][2 * r + 1] * inverse);
    }
}

template <int D, int Warps, int N>
void launch_prefill(const Attention& a, const Plan& plan, const PrefillTile* tiles, int n, cudaStream_t stream) {
    constexpr int            shared = (Warps * 16 + 4 * N) * (D + 8) * 2;
    static const cudaError_t once =
        cudaFuncSetAttribute(prefill_kernel<D, Warps, N>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    (void)once;
    run_kernel(prefill_kernel<D, Warps, N>, dim3(unsigned(n), unsigned(a.n_heads)), Warps * 32, shared, stream, a, plan,
               tiles);
}

} // namespace

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

// As many rows as the kernels below take: warps × 16.
int prefill_tile(int head_dim) {
    if (const int rows = prefill_tile_hopper(head_dim)) return rows;
    switch (head_dim) {
        case 16:
        case 32:
        case 64:
        case 80:
        case 96: return 128;
        case 128:
        case 256: return 64;
        default: return 0;
    }
}

void attention_prefill(const Attention& a, const Plan& plan, const PrefillTile* tiles, int n, Stream stream) {
    auto s = static_cast<cudaStream_t>(stream);
    if (n == 0) return;
    if (prefill_tile_hopper(a.head_dim) > 0) {
        attention_prefill_hopper(a, plan, tiles, n, stream);
        return;
    }
    switch (a.head_dim) {
        case 16: launch_prefill<16, 8, 64>(a, plan, tiles, n, s); break;
        case 32: launch_prefill<32, 8, 64>(a, plan, tiles, n, s); break;
        case 64: launch_prefill<64, 8, 64>(a, plan, tiles, n, s); break;
        case 80: launch_prefill<80, 8, 64>(a, plan, tiles, n, s); break;
        case 96: launch_prefill<96, 8, 64>(a, plan, tiles, n, s); break;
        case 128: launch_prefill<128, 4, 64>(a, plan, tiles, n, s); break;
        case 256: launch_prefill<256, 4, 32>(a, plan, tiles, n, s); break;
        default: {
            const std::size_t shared = std::size_t(4) * 2 * std::size_t(a.head_dim) * sizeof(float);
            run_kernel(plain_kernel, dim3(unsigned(n), unsigned(a.n_heads)), unsigned(128), shared, s, a, plan, tiles);
        }
    }
}

} // namespace quire::cuda
