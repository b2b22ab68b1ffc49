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
            const float w = tops[part * G + g] == -INFINITY ? 0.0f : __expf(tops[part * G + g] - limit);
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
    combine<D, G, parts>(a, item, head0, n_heads, &tops[0][0], &sums[0][0], &values_of[0][0][0], G * D, partial,
                         tickets);
}

// The same with tensor cores, for up to 8 query heads of a kv head together: scores are K·Qᵀ (16 positions × 8 heads), the
// result Vᵀ·Pᵀ (dimensions × 8 heads). Which dimension an mma calls k or m is free, so each lane (i, j) = (lane / 4, lane % 4)
// is given those that it can load in whole words. K: words j, j + 4, .. of positions i and i + 8. V: dimensions i·D/8 .. of
// positions 2j, 2j + 1, 2j + 8, 2j + 9. A lane keeps the sums of heads 2j and 2j + 1.
// Bulk (Hopper): K and V come through a ring in shared memory that each warp fills for itself, a tile of 16 positions at a
// time, block by block of the cache; else straight into registers.
template <int D, bool Bulk>
struct MmaShape {
    static constexpr int tile_bytes = 16 * D * 2 * 2; // K and V of 16 positions
    static constexpr int stages     = 2;
    static constexpr int warp_bytes = Bulk ? stages * tile_bytes : 8 * D * 4;       // in the end: 8 heads' values
    static constexpr int at_once    = Bulk ? (D <= 128 ? 3 : 1) : D <= 128 ? 4 : 2; // blocks of threads on a processor
};

template <int D, bool Bulk>
__global__ void __launch_bounds__(decode_warps * 32, MmaShape<D, Bulk>::at_once)
    decode_mma_kernel(Attention a, Plan plan, const DecodeItem* items, float* partial, std::int32_t* tickets) {
    using Shape = MmaShape<D, Bulk>;
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ std::int32_t ids[Bulk ? 1 : attention_chunk + 1];
    constexpr int           G = 8, k_words = D / 32, v_words = D / 64; // 16-byte words a lane has of a position
    const int               warp = threadIdx.x / 32, lane = threadIdx.x % 32, i = lane / 4, j = lane % 4;
    unsigned char*          own = memory + warp * Shape::warp_bytes;
#if __CUDA_ARCH__ >= 900
    __shared__ std::uint64_t ready[decode_warps][Shape::stages];
    if (Bulk && lane == 0) {
        for (int s = 0; s < Shape::stages; s++) barrier_init(&ready[warp][s], 1);
        barriers_ready();
    }
#endif
    wait_for_inputs();
    const DecodeItem item = items[blockIdx.x];
    if (item.row < 0) return;
    const int     group_size = a.n_heads / a.n_kv_heads, per_kv = (group_size + G - 1) / G;
    const int     kv_head = int(blockIdx.y) / per_kv, head0 = kv_head * group_size + int(blockIdx.y) % per_kv * G;
    const int     n_heads = min(G, kv_head * group_size + group_size - head0);
    const int     last    = plan.positions[item.row];
    const int     begin   = a.window > 0 ? max(item.first, last - a.window + 1) : item.first;
    const int     end     = min(item.first + attention_chunk, last + 1);
    const int     start   = item.first + warp * 16; // of the warp's first tile; the next ones are `step` apart
    constexpr int step    = decode_warps * 16;

    const auto*         keys        = reinterpret_cast<const __half*>(a.cache_k);
    const auto*         values      = reinterpret_cast<const __half*>(a.cache_v);
    const std::int32_t* table       = plan.block_tables + plan.table_start[item.sequence];
    const int           first_block = begin / a.block_size;

    // Tiles t0 .. t1 have something. Bulk: half a warp knows the blocks of the even ones, the other half of the odd ones.
    const int    t0 = max(0, begin - start - 15 + step - 1) / step, t1 = max(0, end - start + step - 1) / step;
    std::int32_t id[2] = {};
    const auto   bring = [&](int t) {
#if __CUDA_ARCH__ >= 900
        if (t >= t1) return;
        const int      from = start + t * step, low = max(from, begin), high = min(from + 16, end);
        std::uint64_t* b = &ready[warp][(t - t0) % Shape::stages];
        if (lane == 0) barrier_expect(b, unsigned(high - low) * D * 4);
        __syncwarp();
        const int position = from + lane % 16, offset = position % a.block_size;
        if (lane / 16 != t % 2 || position < low || position >= high || (position > low && offset > 0)) return;
        const unsigned bytes = unsigned(min(high - position, a.block_size - offset)) * D * 2;
        const auto at = ((std::int64_t(t < 2 ? id[0] : id[1]) * a.n_kv_heads + kv_head) * a.block_size + offset) * D;
        unsigned char* to = own + (t - t0) % Shape::stages * Shape::tile_bytes + (position - from) * D * 2;
        copy_bulk(to, keys + at, bytes, b);
        copy_bulk(to + 16 * D * 2, values + at, bytes, b);
#endif
    };
    if constexpr (Bulk) {
        static_assert(attention_chunk / step <= 4, "two ids a lane");
#pragma unroll
        for (int u = 0; u < 2; u++) {
            const int position = start + (2 * u + lane / 16) * step + lane % 16;
            id[u]              = position >= begin && position < end ? table[position / a.block_size] : 0;
        }
        for (int s = 0; s < Shape::stages; s++) bring(t0 + s);
    } else {
        for (int b = threadIdx.x; b <= (end - 1) / a.block_size - first_block; b += blockDim.x)
            ids[b] = table[first_block + b];
    }

    std::uint32_t q[D / 8]; // of head i, the words that K's are multiplied with
    {
        const auto* from = reinterpret_cast<const __half*>(a.q) + (std::int64_t(item.row) * a.n_heads + head0 + i) * D;
#pragma unroll
        for (int w = 0; w < k_words; w++) {
            const uint4 v =
                i < n_heads ? *reinterpret_cast<const uint4*>(from + (j + 4 * w) * 8) : make_uint4(0, 0, 0, 0);
            q[4 * w] = v.x, q[4 * w + 1] = v.y, q[4 * w + 2] = v.z, q[4 * w + 3] = v.w;
        }
    }
    if (!Bulk) __syncthreads();
    const int  shift = 31 - __clz(a.block_size);
    const bool power = (a.block_size & (a.block_size - 1)) == 0;
    const auto place = [&](int position) { // of this kv head's row, in halves
        const int block = power ? position >> shift : position / a.block_size;
        return ((std::int64_t(ids[block - first_block]) * a.n_kv_heads + kv_head) * a.block_size + position -
                block * a.block_size) *
               D;
    };
    const uint4 zero           = make_uint4(0, 0, 0, 0);
    float       out[D / 16][4] = {}, top[2] = {-INFINITY, -INFINITY}, sum[2] = {};
    const float scale = a.scale * 1.4426950408889634f;
    for (int t = t0; t < t1; t++) {
        const int            from = start + t * step;
        const unsigned char* tile = own + (t - t0) % Shape::stages * Shape::tile_bytes;
        const auto           seen = [&](int position) { return position >= begin && position < end; };
        uint4                k[2][k_words], v[4][v_words];
#if __CUDA_ARCH__ >= 900
        if (Bulk) barrier_wait(&ready[warp][(t - t0) % Shape::stages], unsigned((t - t0) / Shape::stages) & 1);
#endif
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = i + 8 * h;
            if constexpr (Bulk) { // what is not seen is left out of the scores
#pragma unroll
                for (int w = 0; w < k_words; w++)
                    k[h][w] = *reinterpret_cast<const uint4*>(tile + row * D * 2 + (j + 4 * w) * 16);
            } else {
                const auto at = seen(from + row) ? place(from + row) : 0;
#pragma unroll
                for (int w = 0; w < k_words; w++)
                    k[h][w] = seen(from + row) ? *reinterpret_cast<const uint4*>(keys + at + (j + 4 * w) * 8) : zero;
            }
        }
#pragma unroll
        for (int h = 0; h < 4; h++) {
            const int  row = 2 * j + h % 2 + h / 2 * 8;
            const auto at  = !Bulk && seen(from + row) ? place(from + row) + i * (D / 8) : 0;
#pragma unroll
            for (int w = 0; w < v_words; w++)
                v[h][w] = !seen(from + row) ? zero
                          : Bulk ? *reinterpret_cast<const uint4*>(tile + (16 + row) * D * 2 + i * (D / 4) + w * 16)
                                 : *reinterpret_cast<const uint4*>(values + at + w * 8);
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
                const bool valid = seen(from + i + 8 * r);
                float      x     = score[2 * r + h] * scale;
                if (a.softcap > 0) x = a.softcap * 1.4426950408889634f * tanhf(score[2 * r + h] * a.scale / a.softcap);
                p[2 * r + h] = valid ? x : -INFINITY;
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
        if (Bulk) {
            __syncwarp(); // all have read the tile
            bring(t + Shape::stages);
        }
    }
    // The warp's ring is of no use any more: its values stand there.
    __shared__ float tops[decode_warps][G], sums[decode_warps][G];
    auto*            values_of = reinterpret_cast<float*>(own);
    __syncwarp();
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
            values_of[(2 * j + h) * D + i * (D / 8) + 2 * m]     = out[m][h];
            values_of[(2 * j + h) * D + i * (D / 8) + 2 * m + 1] = out[m][2 + h];
        }
    }
    combine<D, G, decode_warps>(a, item, head0, n_heads, &tops[0][0], &sums[0][0], reinterpret_cast<float*>(memory),
                                Shape::warp_bytes / 4, partial, tickets);
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
        const auto run = [&](auto kernel, int warp_bytes) {
            static const cudaError_t once =
                cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, decode_warps * warp_bytes);
            (void)once;
            const int per_kv = (group + 7) / 8;
            run_kernel(kernel, dim3(unsigned(n), unsigned(a.n_kv_heads * per_kv)), decode_warps * 32,
                       std::size_t(decode_warps * warp_bytes), stream, a, plan, items, partial, tickets);
        };
        if (is_hopper()) return run(decode_mma_kernel<D, true>, MmaShape<D, true>::warp_bytes);
        if (group > 1) return run(decode_mma_kernel<D, false>, MmaShape<D, false>::warp_bytes);
    }
    if (group == 1) launch_decode<D, 1>(a, plan, items, n, partial, tickets, stream);
    else if (group == 2) launch_decode<D, 2>(a, plan, items, n, partial, tickets, stream);
    else launch_decode<D, 4>(a, plan, items, n, partial, tickets, stream);
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

} // namespace quire::cuda
