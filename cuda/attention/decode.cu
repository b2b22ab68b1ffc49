// Decode attention over a paged KV cache, split-KV: one query per item. A CTA takes one split of the positions of one KV
// head for all query heads of its group, so that K and V are read once; the last CTA of a sequence to arrive reduces its
// splits. Limited by memory bandwidth. Scores and sums are float32, the softmax is online. head_dim: see attention_decode();
// any block size.
//   decode_kernel:     CUDA cores; any group size
//   decode_mma_kernel: tensor cores (mma.m16n8k16)
//   decode_tma_kernel: tensor cores on Hopper, K and V through a TMA pipeline in shared memory
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "../kernels.h"
#include "../paged_kv.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/tma.cuh"
#include "../warp.cuh"
#include "codes.cuh"
#include "decode.cuh"
#include "latent.cuh"
#include "shared.cuh"

namespace quire::cuda {

namespace {

constexpr int decode_warps = 4;

__host__ __device__ constexpr int power_of_two(int n) {
    int p = 1;
    while (p < n) p *= 2;
    return p;
}

// D: head_dim, a multiple of 8; G: query heads of a KV head that a CTA takes; Coded: K or V are codes.
template <int D, int G, bool Coded>
__global__ void __launch_bounds__(decode_warps * 32)
    decode_kernel(Attention a, Plan plan, float* partial, std::int32_t* arrivals) {
    wait_for_inputs();
    // The lanes that share a position have `words` words of 16 bytes each; D / 8 / words of them are active.
    constexpr int     lanes = power_of_two(D / 8) < 32 ? power_of_two(D / 8) : 32, words = (D / 8 + lanes - 1) / lanes;
    constexpr int     groups = 32 / lanes;            // positions that a warp reads at once
    constexpr int     ahead  = 4 / words;             // positions of a group in flight
    constexpr int     parts  = decode_warps * groups; // partial results of the CTA
    const SplitKvItem item   = plan.items.list[blockIdx.x];
    if (item.row < 0) return;
    const int  group_size = a.n_heads / a.n_kv_heads, per_kv = (group_size + G - 1) / G;
    const int  kv_head = int(blockIdx.y) / per_kv, head0 = kv_head * group_size + int(blockIdx.y) % per_kv * G;
    const int  n_heads = min(G, kv_head * group_size + group_size - head0);
    const int  warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / lanes, in = lane % lanes;
    const bool active = in < D / 8 / words;
    const int  begin = item.begin, end = item.end, first = begin / 16 * 16;

    TableSegment segment(plan.block_tables + item.table, begin, end, a);
    float        q[G][8 * words], acc[G][8 * words], row_max[G], row_sum[G];
#pragma unroll
    for (int g = 0; g < G; g++) {
        row_max[g] = -INFINITY;
        row_sum[g] = 0;
#pragma unroll
        for (int w = 0; w < words; w++) {
            uint4 v = make_uint4(0, 0, 0, 0);
            if (active && g < n_heads)
                v = *reinterpret_cast<const uint4*>(reinterpret_cast<const __half*>(a.q) +
                                                    (std::int64_t(item.row) * a.n_heads + head0 + g) * D +
                                                    (w * lanes + in) * 8);
            const std::uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float2 f  = as_float2(pairs[i]);
                const int    at = 8 * w + 2 * i;
                q[g][at] = f.x * a.scale, q[g][at + 1] = f.y * a.scale;
                acc[g][at] = acc[g][at + 1] = 0;
            }
        }
    }
    const auto* keys   = reinterpret_cast<const __half*>(a.cache_k);
    const auto* values = reinterpret_cast<const __half*>(a.cache_v);
    // Which positions a warp takes depends on their place in the split, not on where the window begins: the same sums in any
    // batch.
    for (int start = first; start < end; start += parts * ahead) {
        segment.move_to(start);
        const int base = start + warp * groups + group;
        uint4     k[ahead][words], v[ahead][words];
        bool      valid[ahead];
#pragma unroll
        for (int u = 0; u < ahead; u++) {
            const int position = base + u * parts;
            valid[u]           = position >= begin && position < end;
#pragma unroll
            for (int w = 0; w < words; w++) k[u][w] = v[u][w] = make_uint4(0, 0, 0, 0);
            if (Coded && valid[u] && active) {
                const int   block = position / a.block_size, offset = position - block * a.block_size;
                const KvRow k_row(a.k_array, segment[block], kv_head, offset, a.block_size, D),
                    v_row(a.v_array, segment.v(block), kv_head, offset, a.block_size, D);
#pragma unroll
                for (int w = 0; w < words; w++) {
                    k[u][w] = k_row.eight((w * lanes + in) * 8);
                    v[u][w] = v_row.eight((w * lanes + in) * 8);
                }
            } else if (valid[u] && active) {
                const int  block = position / a.block_size;
                const auto at_in = [&](int id) {
                    return kv_row_of_position(position, block, id, kv_head, a.block_rows, a.block_size) * D + in * 8;
                };
                const std::int64_t at = at_in(segment[block]), v_at = a.v_tables == 0 ? at : at_in(segment.v(block));
#pragma unroll
                for (int w = 0; w < words; w++) {
                    k[u][w] = *reinterpret_cast<const uint4*>(keys + at + w * lanes * 8);
                    v[u][w] = *reinterpret_cast<const uint4*>(values + v_at + w * lanes * 8);
                }
            }
        }
        float score[G][ahead];
#pragma unroll
        for (int u = 0; u < ahead; u++) {
#pragma unroll
            for (int g = 0; g < G; g++) {
                float s = 0;
#pragma unroll
                for (int w = 0; w < words; w++) {
                    const float2 k0 = as_float2(k[u][w].x), k1 = as_float2(k[u][w].y), k2 = as_float2(k[u][w].z),
                                 k3 = as_float2(k[u][w].w);
                    const float* x  = q[g] + 8 * w;
                    const float  t = x[0] * k0.x + x[1] * k0.y + x[2] * k1.x + x[3] * k1.y + x[4] * k2.x + x[5] * k2.y +
                                    x[6] * k3.x + x[7] * k3.y;
                    s = w == 0 ? t : s + t;
                }
#pragma unroll
                for (int step = lanes / 2; step > 0; step /= 2) s += __shfl_xor_sync(~0u, s, step);
                score[g][u] = valid[u] ? softcapped(s, a.softcap) : -INFINITY;
            }
        }
#pragma unroll
        for (int g = 0; g < G; g++) {
            float new_max = row_max[g];
#pragma unroll
            for (int u = 0; u < ahead; u++) new_max = fmaxf(new_max, score[g][u]);
            const float base    = new_max == -INFINITY ? 0.0f : new_max; // no visible position yet
            const float rescale = __expf(row_max[g] - base);
            row_max[g]          = new_max;
            row_sum[g] *= rescale;
#pragma unroll
            for (int i = 0; i < 8 * words; i++) acc[g][i] *= rescale;
#pragma unroll
            for (int u = 0; u < ahead; u++) {
                const float p = __expf(score[g][u] - base);
                row_sum[g] += p;
#pragma unroll
                for (int w = 0; w < words; w++) {
                    const float2 v0 = as_float2(v[u][w].x), v1 = as_float2(v[u][w].y), v2 = as_float2(v[u][w].z),
                                 v3 = as_float2(v[u][w].w);
                    float* to       = acc[g] + 8 * w;
                    to[0] += p * v0.x, to[1] += p * v0.y, to[2] += p * v1.x, to[3] += p * v1.y;
                    to[4] += p * v2.x, to[5] += p * v2.y, to[6] += p * v3.x, to[7] += p * v3.y;
                }
            }
        }
    }

    // The partial results of the CTA become one, in a fixed order.
    __shared__ float row_maxes[parts][G], row_sums[parts][G], values_of[parts][G][D];
    if (active)
#pragma unroll
        for (int g = 0; g < G; g++) {
            const int at = warp * groups + group;
            if (in == 0) row_maxes[at][g] = row_max[g], row_sums[at][g] = row_sum[g];
#pragma unroll
            for (int i = 0; i < 8 * words; i++) values_of[at][g][(i / 8 * lanes + in) * 8 + i % 8] = acc[g][i];
        }
    reduce_splits<D, G>(a, item, {int(blockIdx.x), int(blockIdx.y), int(gridDim.y)}, head0, n_heads, parts,
                        &row_maxes[0][0], &row_sums[0][0], &values_of[0][0][0], G * D, partial, arrivals);
}

// decode_kernel on tensor cores (decode.cuh).

template <int D>
__device__ const __half* query_of(const Attention& a, const SplitKvItem& item, int head0) {
    return reinterpret_cast<const __half*>(a.q) + (std::int64_t(item.row) * a.n_heads + head0) * D;
}

template <int D>
__global__ void __launch_bounds__(decode_warps * 32, D <= 128 ? 4 : 2)
    decode_mma_kernel(Attention a, Plan plan, float* partial, std::int32_t* arrivals) {
    wait_for_inputs();
    constexpr int     G    = max_heads;
    const SplitKvItem item = plan.items.list[blockIdx.x];
    if (item.row < 0) return;
    const int group_size = a.n_heads / a.n_kv_heads, per_kv = (group_size + G - 1) / G;
    const int kv_head = int(blockIdx.y) / per_kv, head0 = kv_head * group_size + int(blockIdx.y) % per_kv * G;
    const int n_heads = min(G, kv_head * group_size + group_size - head0);
    const int warp = threadIdx.x / 32, i = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
    const int begin = item.begin, end = item.end, first = begin / 16 * 16;

    TableSegment               segment(plan.block_tables + item.table, begin, end, a);
    QueryHeads<D, KvType::f16> q;
    q.load(query_of<D>(a, item, head0), n_heads);
    const BlockOf block_of{a.block_size};
    const auto    row_of = [&](int position, bool v) { // of this KV head
        const int block = block_of(position);
        return kv_row_of_position(position, block, v ? segment.v(block) : segment[block], kv_head, a.block_rows,
                                     a.block_size);
    };
    const auto* keys   = reinterpret_cast<const __half*>(a.cache_k);
    const auto* values = reinterpret_cast<const __half*>(a.cache_v);
    const uint4 zero   = make_uint4(0, 0, 0, 0);
    MmaHeads<D> heads;
    for (int start = first; start < end; start += decode_warps * 16) {
        segment.move_to(start);
        const int from = start + warp * 16;
        if (from >= end) continue;
        const auto seen = [&](int position) { return position >= begin && position < end; };
        uint4      k[2][MmaHeads<D>::k_words], v[4][MmaHeads<D>::v_words];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int  position = from + i + 8 * h;
            const auto at       = seen(position) ? row_of(position, false) * D : 0;
#pragma unroll
            for (int w = 0; w < MmaHeads<D>::k_words; w++)
                k[h][w] = seen(position) ? *reinterpret_cast<const uint4*>(keys + at + (j + 4 * w) * 8) : zero;
        }
#pragma unroll
        for (int h = 0; h < 4; h++) {
            const int  position = from + 2 * j + h % 2 + h / 2 * 8;
            const auto at       = seen(position) ? row_of(position, true) * D + i * (D / 8) : 0;
#pragma unroll
            for (int w = 0; w < MmaHeads<D>::v_words; w++)
                v[h][w] = seen(position) ? *reinterpret_cast<const uint4*>(values + at + w * 8) : zero;
        }
        heads.add(a, q, k, v, seen(from + i), seen(from + i + 8));
    }
    __shared__ float row_maxes[decode_warps][G], row_sums[decode_warps][G], values_of[decode_warps][G][D];
    heads.store(n_heads, row_maxes[warp], row_sums[warp], values_of[warp][0]);
    reduce_splits<D, G>(a, item, {int(blockIdx.x), int(blockIdx.y), int(gridDim.y)}, head0, n_heads, decode_warps,
                        &row_maxes[0][0], &row_sums[0][0], &values_of[0][0][0], G * D, partial, arrivals);
}

// decode_mma_kernel on Hopper: each warp has a multistage pipeline of its own in shared memory, filled by TMA bulk copies, in tiles of
// 16 positions, one copy per block of the cache. Splits may have any length.

#if __CUDA_ARCH__ >= 900

// A CTA's item and heads: first all long items, for the first `long_slots` groups of heads, then the short ones for the others.
__device__ CtaWork work_of(const SplitKvItems& items, int long_slots, int cta, int n_slots) {
    const int rest = cta - items.n * long_slots;
    return rest < 0 ? CtaWork{cta % items.n, cta / items.n, n_slots}
                    : CtaWork{items.n + rest % items.n_short, long_slots + rest / items.n_short, n_slots};
}

#endif

// Coded: K and V are codes.
template <int D, bool Coded>
struct KvTiles {
    static constexpr int row_bytes = Coded ? D : 2 * D;
    static constexpr int parts = Coded ? 2 : 1, positions = 16 * parts;      // of a tile; a part: what an mma takes
    static constexpr int v_at = positions * row_bytes, scales_at = 2 * v_at; // K, then V, then their scales
    static constexpr int tile_bytes  = scales_at + (Coded ? 2 * positions * int(sizeof(float)) : 0);
    static constexpr int stages      = 2;
    static constexpr int ctas_per_sm = D <= 64 ? 5 : D <= 128 ? 3 : 1; // CTAs per SM
    static constexpr int warp_bytes  = stages * tile_bytes;            // at the end, the outputs of the warp's heads
};

// OneWarp: an item is a whole sequence, and each warp of a CTA has an item and a KV head of its own (SplitKvItems::one_warp).
// Type: of K and V.
template <int D, bool OneWarp, KvType Type>
__global__ void __launch_bounds__(decode_warps * 32, KvTiles<D, Type != KvType::f16>::ctas_per_sm)
    decode_tma_kernel(Attention a, Plan plan, int long_slots, int n_slots, float* partial, std::int32_t* arrivals) {
#if __CUDA_ARCH__ >= 900
    constexpr bool Coded = Type != KvType::f16;
    using Tiles          = KvTiles<D, Coded>;
    constexpr int G = max_heads, P = Tiles::positions,
                  step = OneWarp ? P : decode_warps * P; // from a tile of a warp to its next one
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ std::uint64_t ready[decode_warps][Tiles::stages];
    __shared__ float         row_maxes[decode_warps][G], row_sums[decode_warps][G];
    reads_early(); // the plan, and K and V of readable positions
    const int shared_ctas = plan.items.shared.n * a.n_kv_heads, cta = int(blockIdx.x) - shared_ctas;
    if (cta < 0) { // the first CTAs have the positions that sequences share
        static_assert(SharedAttention<D>::bytes <= decode_warps * Tiles::warp_bytes &&
                      SharedAttention<D>::warps == decode_warps);
        attend_shared<D, Coded>(a, plan, int(blockIdx.x) % plan.items.shared.n, int(blockIdx.x) / plan.items.shared.n,
                                reinterpret_cast<__half*>(memory), partial);
        return;
    }
    const int         warp = threadIdx.x / 32, lane = threadIdx.x % 32, i = lane / 4, j = lane % 4;
    unsigned char*    tiles = memory + warp * Tiles::warp_bytes;
    const int         pair  = cta * decode_warps + warp; // OneWarp: an item and a group of heads
    const CtaWork     work  = OneWarp ? CtaWork{min(pair / n_slots, plan.items.n - 1), pair % n_slots, n_slots}
                                      : work_of(plan.items, long_slots, cta, n_slots);
    const SplitKvItem item  = plan.items.list[work.item];
    if (item.row < 0 || (OneWarp && pair >= plan.items.n * n_slots)) {
        wait_for_inputs();
        return;
    }
    const int group_size = a.n_heads / a.n_kv_heads, per_kv = (group_size + G - 1) / G;
    const int kv_head = work.slot / per_kv, head0 = kv_head * group_size + work.slot % per_kv * G;
    const int n_heads = min(G, kv_head * group_size + group_size - head0);
    const int start   = item.begin / P * P + (OneWarp ? 0 : warp * P);
    const int n_tiles = max(0, item.end - start + step - 1) / step;

    const BlockOf block_of{a.block_size};
    const auto seen = [&](int position) { return unsigned(position - item.begin) < unsigned(item.end - item.begin); };
    // A warp holds the block ids of one tile of codes. Of fp16 half a warp holds the ids of an even tile, the other half the ids of the odd tile
    // after it.
    constexpr int at_once = 32 / P;
    const auto    id_of   = [&](int t) {
        const int position = start + (t + lane / P) * step + lane % P;
        return seen(position) ? plan.block_tables[item.table + block_of(position)] : 0;
    };
    std::int32_t block = id_of(0), next_block = id_of(at_once);
    if (lane == 0) {
        for (int s = 0; s < Tiles::stages; s++) mbarrier_init(&ready[warp][s], Coded ? 1 + 32 : 1);
        mbarrier_init_fence();
    }
    __syncwarp();
    const auto rows_of = [&](const KvArray& array, const Half* fp16) {
        return Coded ? HeadRows(array.rows, kv_head, array.block_rows, a.block_size, Tiles::row_bytes)
                     : HeadRows(fp16, kv_head, a.block_rows, a.block_size, Tiles::row_bytes);
    };
    const auto scales_of = [&](const KvArray& array) {
        return HeadRows(array.scales, kv_head, array.block_scales, a.block_size, sizeof(float));
    };
    const HeadRows k_rows = rows_of(a.k_array, a.cache_k), v_rows = rows_of(a.v_array, a.cache_v),
                   k_scales = scales_of(a.k_array), v_scales = scales_of(a.v_array);
    const std::uint64_t policy    = l2_evict_first();
    const auto          load_tile = [&](int t) {
        if (t >= n_tiles) return;
        const int      from = start + t * step, low = max(from, item.begin), high = min(from + P, item.end);
        std::uint64_t* b = &ready[warp][t % Tiles::stages];
        if (lane == 0) mbarrier_arrive_expect_tx(b, unsigned(high - low) * Tiles::row_bytes * 2);
        __syncwarp();
        const int      position = from + lane % P, offset = block_of.offset(position);
        unsigned char* tile = tiles + t % Tiles::stages * Tiles::tile_bytes;
        const bool     mine = lane / P == t % at_once && seen(position);
        // Few layers have V in other blocks than K: registers do not hold its ids ahead.
        const std::int32_t v_block =
            a.v_tables != 0 && mine ? plan.block_tables[item.table + a.v_tables + block_of(position)] : block;
        if constexpr (Coded) { // by each lane: a bulk copy of 64 bytes costs as much as one of 2 KB
            auto* scale = reinterpret_cast<float*>(tile + Tiles::scales_at) + lane % P;
            if (mine)
                cp_async_word(scale, k_scales.at(block, offset)),
                    cp_async_word(scale + P, v_scales.at(v_block, offset));
            cp_async_mbarrier_arrive(b);
        }
        if (mine && (position == low || offset == 0)) {
            const unsigned bytes = unsigned(min(high - position, a.block_size - offset)) * Tiles::row_bytes;
            unsigned char* to    = tile + lane % P * Tiles::row_bytes;
            tma_copy_bulk(to, k_rows.at(block, offset), bytes, b, policy);
            tma_copy_bulk(to + Tiles::v_at, v_rows.at(v_block, offset), bytes, b, policy);
        }
        if (t % at_once == at_once - 1) block = next_block, next_block = id_of(t + 1 + at_once);
    };
    int loaded = 0;
    while (loaded < Tiles::stages && min(start + loaded * step + P, item.end) <= item.readable) load_tile(loaded++);
    wait_for_inputs();
    for (; loaded < Tiles::stages; loaded++) load_tile(loaded);
    constexpr int       parts = Tiles::parts;
    QueryHeads<D, Type> q;
    q.load(query_of<D>(a, item, head0), n_heads);
    MmaHeads<D, Type> heads;
    for (int t = 0; t < n_tiles; t++) {
        const int            from       = start + t * step;
        const unsigned char* tile       = tiles + t % Tiles::stages * Tiles::tile_bytes;
        const auto           v_position = [&](int n, int h) { return 16 * n + 2 * j + h % 2 + h / 2 * 8; };
        const auto v_row = [&](int n, int h) { // where this lane's part of V begins in its four rows of a part
            return tile + Tiles::v_at + v_position(n, h) * Tiles::row_bytes + i * (Tiles::row_bytes / 8);
        };
        mbarrier_wait(&ready[warp][t % Tiles::stages], unsigned(t / Tiles::stages) & 1);
        if constexpr (Type == KvType::f16) {
            uint4 k[2][MmaHeads<D>::k_words], v[4][MmaHeads<D>::v_words];
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int w = 0; w < MmaHeads<D>::k_words; w++)
                    k[h][w] = *reinterpret_cast<const uint4*>(tile + (i + 8 * h) * D * 2 + (j + 4 * w) * 16);
#pragma unroll
            for (int h = 0; h < 4; h++)
#pragma unroll
                for (int w = 0; w < MmaHeads<D>::v_words; w++)
                    v[h][w] = seen(from + v_position(0, h)) ? *reinterpret_cast<const uint4*>(v_row(0, h) + w * 16)
                                                            : make_uint4(0, 0, 0, 0);
            heads.add(a, q, k, v, seen(from + i), seen(from + i + 8));
        } else {
            KvScales      scales[parts];
            std::uint32_t p[parts][2];
            float         score[parts][4];
            bool          visible[parts][2];
#pragma unroll
            for (int n = 0; n < parts; n++) {
                uint4 k[2][MmaHeads<D, Type>::k_words];
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int   row   = 16 * n + 8 * h + i;
                    const auto* scale = reinterpret_cast<const float*>(tile + Tiles::scales_at) + row;
                    visible[n][h]     = seen(from + row);
                    scales[n].k[h]    = scale[0];
                    scales[n].v[h]    = visible[n][h] ? scale[P] * top_code(Type) : 0.0f; // else not written
#pragma unroll
                    for (int w = 0; w < MmaHeads<D, Type>::k_words; w++)
                        k[h][w] = *reinterpret_cast<const uint4*>(tile + row * D + (j + 4 * w) * 16);
                }
                q.scores(k, score[n]);
            }
            heads.template softmax<parts>(a, score, visible, p, scales);
#pragma unroll
            for (int n = 0; n < parts; n++) {
                uint2 v[4][MmaHeads<D>::v_words];
#pragma unroll
                for (int h = 0; h < 4; h++) {
                    // Of other positions there may be anything: an int8 code is finite, and its weight 0.
                    const bool there = Type == KvType::i8 || seen(from + v_position(n, h));
#pragma unroll
                    for (int w = 0; w < MmaHeads<D>::v_words; w++)
                        v[h][w] = there ? *reinterpret_cast<const uint2*>(v_row(n, h) + w * 8) : uint2{};
                }
                heads.accumulate_codes(p[n], v);
            }
        }
        __syncwarp(); // all have read the tile
        load_tile(t + Tiles::stages);
    }
    heads.store(n_heads, row_maxes[warp], row_sums[warp], reinterpret_cast<float*>(tiles));
    if constexpr (OneWarp) {
        __syncwarp();
        float* const to = partial + ((std::int64_t(work.item) + item.moved) * a.n_heads + head0) * (D + 2);
        for (int at = lane; at < n_heads * D; at += 32) {
            const int   g     = at / D;
            const float value = reinterpret_cast<const float*>(tiles)[at];
            if (item.n_shared > 0) { // combine_splits() does the rest
                to[g * (D + 2) + at % D] = value;
                if (at % D == 0) to[g * (D + 2) + D] = row_maxes[warp][g], to[g * (D + 2) + D + 1] = row_sums[warp][g];
                continue;
            }
            const float sink = sink_of(a, head0 + g), row_max = row_maxes[warp][g], new_max = fmaxf(row_max, sink);
            const float rescale = rescale_of(row_max, new_max);
            const float sum     = rescale * row_sums[warp][g] + (a.sinks ? rescale_of(sink, new_max) : 0);
            reinterpret_cast<__half*>(a.out)[(std::int64_t(item.row) * a.n_heads + head0) * D + at] =
                __float2half(sum == 0 ? 0.0f : __fdividef(rescale * value, sum));
        }
    } else {
        reduce_splits<D, G>(a, item, work, head0, n_heads, decode_warps, &row_maxes[0][0], &row_sums[0][0],
                            reinterpret_cast<float*>(memory), Tiles::warp_bytes / 4, partial, arrivals);
    }
#endif
}

template <int D, int G, bool Coded>
void launch_decode(const Attention& a, const Plan& plan, float* partial, std::int32_t* arrivals, Context& gpu) {
    const int per_kv = (a.n_heads / a.n_kv_heads + G - 1) / G;
    run_kernel(decode_kernel<D, G, Coded>, dim3(unsigned(plan.items.n), unsigned(a.n_kv_heads * per_kv)),
               decode_warps * 32, 0, gpu, a, plan, partial, arrivals);
}

// With shared positions.
template <int D, KvType Type>
void launch_tma(const Attention& a, const Plan& plan, int slots, float* partial, std::int32_t* arrivals, Context& gpu) {
    constexpr int bytes       = decode_warps * KvTiles < D, Type != KvType::f16 > ::warp_bytes;
    const int     shared_ctas = plan.items.shared.n * a.n_kv_heads, n = plan.items.n, n_short = plan.items.n_short;
    if (plan.items.one_warp) {
        prepare_kernel(gpu, decode_tma_kernel<D, true, Type>, decode_warps * 32, bytes);
        return run_kernel(decode_tma_kernel<D, true, Type>,
                          dim3(unsigned(shared_ctas + (n * slots + decode_warps - 1) / decode_warps)),
                          decode_warps * 32, bytes, gpu, a, plan, 0, slots, partial, arrivals);
    }
    prepare_kernel(gpu, decode_tma_kernel<D, false, Type>, decode_warps * 32, bytes);
    // The last CTAs get shorter splits, so that all SMs finish together: about a third of a wave, and only where there
    // are more than two waves. Where one group of heads has more CTAs than that, it pays if a short split is a quarter of a long one.
    const int ctas  = gpu.n_sms * KvTiles < D, Type != KvType::f16 > ::ctas_per_sm;
    const int least = n <= ctas && n_short >= 4 * n ? 1 : 0;
    const int short_slots =
        n_short == 0 || n * slots < 2 * ctas ? 0 : std::clamp((ctas * 3 / 10 + n / 2) / n, least, slots);
    return run_kernel(decode_tma_kernel<D, false, Type>,
                      dim3(unsigned(n * (slots - short_slots) + n_short * short_slots + shared_ctas)),
                      decode_warps * 32, bytes, gpu, a, plan, slots - short_slots, slots, partial, arrivals);
}

template <int D>
void launch_decode_for(const Attention& a, const Plan& plan, float* partial, std::int32_t* arrivals, Context& gpu) {
    const int group = a.n_heads / a.n_kv_heads;
    if constexpr (D == 64 || D == 128 || D == 192 || D == 256) {
        const int slots = a.n_kv_heads * ((group + max_heads - 1) / max_heads);
        if (gpu.sm90 && !a.coded) return launch_tma<D, KvType::f16>(a, plan, slots, partial, arrivals, gpu);
        if (gpu.sm90 && a.k_array.type == a.v_array.type && a.k_array.type != KvType::f16)
            return a.k_array.type == KvType::i8 ? launch_tma<D, KvType::i8>(a, plan, slots, partial, arrivals, gpu)
                                                : launch_tma<D, KvType::e4m3>(a, plan, slots, partial, arrivals, gpu);
        if (group > 1 && !a.coded) {
            if (plan.items.shared.n > 0) attend_shared(a, plan, partial, gpu);
            return run_kernel(decode_mma_kernel<D>, dim3(unsigned(plan.items.n), unsigned(slots)), decode_warps * 32, 0,
                              gpu, a, plan, partial, arrivals);
        }
    }
    if (plan.items.shared.n > 0) attend_shared(a, plan, partial, gpu);
    if (a.coded) launch_decode<D, 4, true>(a, plan, partial, arrivals, gpu);
    else if (group == 1) launch_decode<D, 1, false>(a, plan, partial, arrivals, gpu);
    else if (group == 2) launch_decode<D, 2, false>(a, plan, partial, arrivals, gpu);
    else launch_decode<D, 4, false>(a, plan, partial, arrivals, gpu);
}

} // namespace

int most_splits(const Context& gpu) { return 16 * gpu.n_sms; }

SplitLengths split_lengths(const Context& gpu, int head_dim, int value_dim, std::int64_t work, bool coded) {
    SplitLengths lengths;
    if (value_dim != head_dim) return latent_split_lengths(gpu, head_dim, value_dim, work);
    if (!gpu.sm90 || (head_dim != 64 && head_dim != 128 && head_dim != 192 && head_dim != 256)) return lengths;
    // Start and end of a split cost a CTA as much as 500 positions, or 1000 of codes: splits as long as they can be with work for all SMs.
    const int most = coded ? 2048 : 1024;
    while (lengths.length < most && work / (2 * lengths.length) >= std::int64_t(gpu.n_sms) * 15 / 8)
        lengths.length *= 2;
    if (lengths.length > fixed_split_length) lengths.short_length = fixed_split_length;
    return lengths;
}

bool one_warp_each(const Context& gpu, int head_dim, int value_dim, int n_kv_heads, int n_sequences,
                   std::int64_t positions, int longest, bool shared) {
    if (!gpu.sm90 || value_dim != head_dim || n_sequences == 0) return false;
    const int ctas = head_dim == 64                       ? KvTiles<64, false>::ctas_per_sm
                     : head_dim == 128                    ? KvTiles<128, false>::ctas_per_sm
                     : head_dim == 192 || head_dim == 256 ? 1
                                                          : 0;
    // At least two waves of warps, or a warp for each SM where CTAs of shared positions keep the SMs busy, too; and no sequence so
    // long that all others would wait for its end.
    const std::int64_t warps = shared ? gpu.n_sms : 2 * std::int64_t(gpu.n_sms) * ctas * decode_warps,
                       mean  = positions / n_sequences;
    return ctas > 0 && std::int64_t(n_sequences) * n_kv_heads >= warps && mean <= 256 &&
           longest <= 4 * std::max<std::int64_t>(mean, 64);
}

void attention_decode(const Attention& a, const Plan& plan, float* partial, std::int32_t* arrivals, Context& gpu) {
    if (plan.items.n == 0) return;
    if (a.latent()) return latent_decode(a, plan, partial, gpu);
    switch (a.head_dim) {
        case 16: launch_decode_for<16>(a, plan, partial, arrivals, gpu); break;
        case 32: launch_decode_for<32>(a, plan, partial, arrivals, gpu); break;
        case 64: launch_decode_for<64>(a, plan, partial, arrivals, gpu); break;
        case 80: launch_decode_for<80>(a, plan, partial, arrivals, gpu); break;
        case 96: launch_decode_for<96>(a, plan, partial, arrivals, gpu); break;
        case 112: launch_decode_for<112>(a, plan, partial, arrivals, gpu); break;
        case 128: launch_decode_for<128>(a, plan, partial, arrivals, gpu); break;
        case 160: launch_decode_for<160>(a, plan, partial, arrivals, gpu); break;
        case 192: launch_decode_for<192>(a, plan, partial, arrivals, gpu); break;
        case 256: launch_decode_for<256>(a, plan, partial, arrivals, gpu); break;
        case 512: launch_decode_for<512>(a, plan, partial, arrivals, gpu); break;
        default: break; // prefill_tile() is 0 for it: the caller makes it a prefill tile of one row
    }
    if (plan.items.shared.n > 0) combine_splits(a, plan, partial, gpu);
}

} // namespace quire::cuda
