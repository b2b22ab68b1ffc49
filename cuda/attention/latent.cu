// Attention over a latent cache (DeepSeek-V2, section 2.1), on tensor cores (mma.m16n8k16): a token has one row of 576 numbers for all
// query heads; the first 512 of them are also the value. So a CTA takes many heads of one token, or some
// tokens of 16 heads, and reads a row once for all of them. Rows come in tiles of 64, double-buffered by cp.async.
//
// Each of eight warps has 16 queries and some positions of a tile for the scores, and 64 columns of all queries for the values;
// row max, rescale and probabilities go through shared memory in between. Scores and sums are float32, the softmax is online.
//   decode:  an item of split-KV (decode.cu) for some heads; another kernel, with many CTAs, reduces the splits
//   prefill: some tokens of a tile
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "../epilogue.cuh"
#include "../paged_kv.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/mma.cuh"
#include "codes.cuh"
#include "decode.cuh"
#include "latent.cuh"

namespace quire::cuda {

namespace {

constexpr int D = 576, V = 512;       // of a row; of its value
constexpr int N = 64, stride = D + 8; // positions of a tile; of a row in shared memory: no bank conflicts
constexpr int p_stride = N + 8, warps = 8, tile_tokens = 16;

// Groups: of 16 queries.
constexpr int shared_bytes(int groups) { return ((2 * N + groups * 16) * stride + groups * 16 * p_stride) * 2; }

// tiles: of prefill; null: decode. A query of the CTA is a token and a head; heads of a token are neighbours.
template <int Groups, bool Coded>
__global__ void __launch_bounds__(warps * 32, 1)
    latent_kernel(Attention a, Plan plan, const PrefillTile* tiles, float* partial) {
    wait_for_inputs();
    constexpr int     Q = Groups * 16, parts = warps / Groups, columns = N / parts; // positions of a warp
    extern __shared__ __align__(16) __half shared[];
    __half *                               kv = shared, *q = kv + 2 * N * stride, *probabilities = q + Q * stride;
    __shared__ float                       of_parts[parts][Q], rescales[Q], row_maxes[Q];
    SplitKvItem                            item;
    int                                    per_token = Q, tokens = 1;
    if (tiles == nullptr) {
        item = plan.items.list[blockIdx.x];
        if (item.row < 0) return;
    } else { // the longest contexts, which are listed last, start first
        const PrefillTile tile = tiles[gridDim.x - 1 - blockIdx.x];
        if (a.n_heads <= 16) per_token = 16;
        const int begin = int(blockIdx.z) * (Q / per_token);
        if (begin >= tile.n_rows) return;
        tokens     = min(Q / per_token, tile.n_rows - begin);
        item.row   = tile.first_row + begin;
        item.table = plan.table_start[tile.sequence];
        item.end   = plan.positions[item.row + tokens - 1] + 1;
        item.begin = a.window > 0 ? max(0, plan.positions[item.row] - a.window + 1) : 0;
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / parts, part = warp % parts;
    const int head0 = int(blockIdx.y) * per_token, n_heads = min(per_token, a.n_heads - head0);
    const int first = item.begin / N * N, n_tiles = (item.end - first + N - 1) / N;

    const BlockOf block_of{a.block_size};
    const auto    load = [&](int t) { // a row a warp
        for (int n = warp; n < N; n += warps) {
            const int  position = first + t * N + n;
            const bool valid    = position >= item.begin && position < item.end;
            const int  block    = valid ? block_of(position) : 0;
            if constexpr (Coded) {
                for (int w = lane; w < D / 8; w += 32)
                    *reinterpret_cast<uint4*>(kv + (t % 2 * N + n) * stride + w * 8) =
                        valid ? KvRow(a.k_array, plan.block_tables[item.table + block], 0,
                                         position - block * a.block_size, a.block_size, D)
                                    .eight(w * 8, w * 8 < V ? 0 : 1)
                                 : make_uint4(0, 0, 0, 0);
                continue;
            }
            const std::int64_t at = valid ? kv_row_of_position(position, block, plan.block_tables[item.table + block],
                                                                  0, a.block_rows, a.block_size) *
                                                D
                                             : 0;
            for (int w = lane; w < D / 8; w += 32)
                cp_async(kv + (t % 2 * N + n) * stride + w * 8, reinterpret_cast<const __half*>(a.cache_k) + at + w * 8,
                            valid);
        }
    };
    for (int r = warp; r < Q; r += warps) {
        const int          token = r / per_token, head = r % per_token;
        const bool         valid = token < tokens && head < n_heads;
        const std::int64_t at    = valid ? (std::int64_t(item.row + token) * a.n_heads + head0 + head) * D : 0;
        for (int w = lane; w < D / 8; w += 32)
            cp_async(q + r * stride + w * 8, reinterpret_cast<const __half*>(a.q) + at + w * 8, valid);
    }
    load(0);
    cp_async_commit();

    // The positions that this lane's two queries see.
    int from[2], to[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int token = min((group * 16 + lane / 4 + 8 * h) / per_token, tokens - 1);
        to[h]           = tiles ? plan.positions[item.row + token] + 1 : item.end;
        from[h]         = tiles && a.window > 0 ? to[h] - a.window : item.begin;
    }
    std::uint32_t query[D / 16][4]; // of the warp's 16 queries
    float         out[Groups][8][4] = {}, row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {};
    const float   log2e = 1.4426950408889634f, scale = a.scale * log2e; // exp2 instead of exp
    for (int t = 0; t < n_tiles; t++) {
        if (t + 1 < n_tiles) load(t + 1);
        cp_async_commit();
        cp_async_wait<1>();
        __syncthreads();
        const __half* tile = kv + t % 2 * N * stride;
        if (t == 0)
#pragma unroll
            for (int d = 0; d < D / 16; d++)
                ldmatrix_x4(query[d], q + (group * 16 + lane % 16) * stride + d * 16 + lane / 16 * 8);
        // Four sums at a time: an mma waits for the one before it in the same sum.
        constexpr int chains = 4 / (columns / 8);
        float         s[columns / 8][4], sums[chains][columns / 8][4] = {};
#pragma unroll
        for (int d = 0; d < D / 32; d++)
#pragma unroll
            for (int n = 0; n < columns / 8; n++) {
                std::uint32_t b[4];
                ldmatrix_x4(b, tile + (part * columns + n * 8 + lane % 8) * stride + d * 32 + lane / 8 * 8);
                mma_m16n8k16(sums[2 * d % chains][n], query[2 * d], b[0], b[1]);
                mma_m16n8k16(sums[(2 * d + 1) % chains][n], query[2 * d + 1], b[2], b[3]);
            }
#pragma unroll
        for (int n = 0; n < columns / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                s[n][i] = sums[0][n][i];
#pragma unroll
                for (int c = 1; c < chains; c++) s[n][i] += sums[c][n][i];
            }
        float most[2] = {-INFINITY, -INFINITY};
#pragma unroll
        for (int n = 0; n < columns / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int position = first + t * N + part * columns + n * 8 + lane % 4 * 2 + i % 2;
                float     x        = s[n][i] * scale;
                if (a.softcap > 0) x = a.softcap * log2e * tanhf(s[n][i] * a.scale / a.softcap);
                s[n][i]     = position >= from[i / 2] && position < to[i / 2] ? x : -INFINITY;
                most[i / 2] = fmaxf(most[i / 2], s[n][i]);
            }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            most[h] = fmaxf(most[h], __shfl_xor_sync(~0u, most[h], 1));
            most[h] = fmaxf(most[h], __shfl_xor_sync(~0u, most[h], 2));
            if (lane % 4 == 0) of_parts[part][group * 16 + lane / 4 + 8 * h] = most[h];
        }
        __syncthreads();
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int r       = group * 16 + lane / 4 + 8 * h;
            float     new_max = row_max[h], sum = 0;
#pragma unroll
            for (int k = 0; k < parts; k++) new_max = fmaxf(new_max, of_parts[k][r]);
            const float base = new_max == -INFINITY ? 0.0f : new_max, rescale = exp2f(row_max[h] - base);
            row_max[h] = new_max;
            if (part == 0 && lane % 4 == 0) rescales[r] = rescale;
#pragma unroll
            for (int n = 0; n < columns / 8; n++) {
                const float x = exp2f(s[n][2 * h] - base), y = exp2f(s[n][2 * h + 1] - base);
                sum += x + y;
                *reinterpret_cast<std::uint32_t*>(probabilities + r * p_stride + part * columns + n * 8 +
                                                  lane % 4 * 2) = pack(x, y);
            }
            row_sum[h] = row_sum[h] * rescale + sum;
        }
        __syncthreads();
#pragma unroll
        for (int g = 0; g < Groups; g++) {
            const float low = rescales[g * 16 + lane / 4], high = rescales[g * 16 + lane / 4 + 8];
#pragma unroll
            for (int d = 0; d < 8; d++)
                out[g][d][0] *= low, out[g][d][1] *= low, out[g][d][2] *= high, out[g][d][3] *= high;
        }
#pragma unroll
        for (int n = 0; n < N; n += 16) {
            std::uint32_t p[Groups][4];
#pragma unroll
            for (int g = 0; g < Groups; g++)
                ldmatrix_x4(p[g], probabilities + (g * 16 + lane % 16) * p_stride + n + lane / 16 * 8);
#pragma unroll
            for (int d = 0; d < 4; d++) {
                std::uint32_t b[4];
                ldmatrix_x4_transposed(b, tile + (n + lane % 16) * stride + warp * 64 + d * 16 + lane / 16 * 8);
#pragma unroll
                for (int g = 0; g < Groups; g++) {
                    mma_m16n8k16(out[g][2 * d], p[g], b[0], b[1]);
                    mma_m16n8k16(out[g][2 * d + 1], p[g], b[2], b[3]);
                }
            }
        }
        __syncthreads(); // the other buffer is loaded next
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int r = group * 16 + lane / 4 + 8 * h;
        row_sum[h] += __shfl_xor_sync(~0u, row_sum[h], 1);
        row_sum[h] += __shfl_xor_sync(~0u, row_sum[h], 2);
        if (lane % 4 == 0) of_parts[part][r] = row_sum[h];
        if (part == 0 && lane % 4 == 0) row_maxes[r] = row_max[h] / log2e;
    }
    __syncthreads();
    if (threadIdx.x < Q) {
        const int r     = int(threadIdx.x);
        float     total = 0;
        for (int k = 0; k < parts; k++) total += of_parts[k][r];
        if (item.n_splits == 1 && a.sinks && r % per_token < n_heads) { // else the reduction adds it
            const float sink = a.sinks[head0 + r % per_token], new_max = fmaxf(row_maxes[r], sink);
            rescales[r] = __fdividef(rescale_of(row_maxes[r], new_max),
                                     total * rescale_of(row_maxes[r], new_max) + rescale_of(sink, new_max));
        } else {
            rescales[r] = total > 0 ? 1 / total : 0.0f;
        }
        if (item.n_splits > 1 && r < n_heads) {
            float* to = partial + (std::int64_t(blockIdx.x) * a.n_heads + head0 + r) * (V + 2) + V;
            to[0] = row_maxes[r], to[1] = total;
        }
    }
    if (item.n_splits > 1) {
#pragma unroll
        for (int g = 0; g < Groups; g++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int r = g * 16 + lane / 4 + 8 * h;
                if (r >= n_heads) continue;
                float* to =
                    partial + (std::int64_t(blockIdx.x) * a.n_heads + head0 + r) * (V + 2) + warp * 64 + lane % 4 * 2;
#pragma unroll
                for (int d = 0; d < 8; d++)
                    *reinterpret_cast<float2*>(to + d * 8) = {out[g][d][2 * h], out[g][d][2 * h + 1]};
            }
        return;
    }
    __syncthreads();
#pragma unroll
    for (int g = 0; g < Groups; g++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int r = g * 16 + lane / 4 + 8 * h, token = r / per_token, head = r % per_token;
            if (token >= tokens || head >= n_heads) continue;
            const float by = rescales[r];
            auto*       at = reinterpret_cast<__half*>(a.out) +
                       (std::int64_t(item.row + token) * a.n_heads + head0 + head) * V + warp * 64 + lane % 4 * 2;
#pragma unroll
            for (int d = 0; d < 8; d++)
                *reinterpret_cast<std::uint32_t*>(at + d * 8) = pack(out[g][d][2 * h] * by, out[g][d][2 * h + 1] * by);
        }
}

// The reduction of a sequence's splits: a CTA for a head of the sequence whose first split is item blockIdx.x.
constexpr int reduce_threads = V / 2;

__global__ void __launch_bounds__(reduce_threads) latent_reduce_kernel(Attention a, Plan plan, const float* partial) {
    wait_for_inputs();
    const SplitKvItem item = plan.items.list[blockIdx.x];
    if (item.row < 0 || item.split != 0 || item.n_splits == 1) return;
    const int          head    = int(blockIdx.y);
    const std::int64_t apart   = std::int64_t(a.n_heads) * (V + 2);
    const float*       from    = partial + (std::int64_t(blockIdx.x) * a.n_heads + head) * (V + 2);
    float              new_max = sink_of(a, head), total = 0;
#pragma unroll 8
    for (int c = 0; c < item.n_splits; c++) new_max = fmaxf(new_max, from[c * apart + V]);
    if (a.sinks) total = rescale_of(a.sinks[head], new_max);
    float2 value{};
#pragma unroll 8
    for (int c = 0; c < item.n_splits; c++) {
        const float  weight = rescale_of(from[c * apart + V], new_max);
        const float2 v      = *reinterpret_cast<const float2*>(from + c * apart + threadIdx.x * 2);
        total += weight * from[c * apart + V + 1];
        value.x += weight * v.x, value.y += weight * v.y;
    }
    const float by = total > 0 ? 1 / total : 0.0f;
    reinterpret_cast<std::uint32_t*>(a.out)[((std::int64_t(item.row) * a.n_heads + head) * V) / 2 + threadIdx.x] =
        pack(value.x * by, value.y * by);
}

template <int Groups>
void launch(dim3 grid, const Attention& a, const Plan& plan, const PrefillTile* tiles, float* partial, Context& gpu) {
    const auto run = [&](auto kernel) {
        prepare_kernel(gpu, kernel, warps * 32, shared_bytes(Groups));
        run_kernel(kernel, grid, warps * 32, shared_bytes(Groups), gpu, a, plan, tiles, partial);
    };
    if (a.coded) run(latent_kernel<Groups, true>);
    else run(latent_kernel<Groups, false>);
}

} // namespace

// Hopper, for the shared memory.
int latent_tile(const Context& gpu, int head_dim, int value_dim) {
    return gpu.sm90 && head_dim == D && value_dim == V ? tile_tokens : 0;
}

SplitLengths latent_split_lengths(const Context& gpu, int head_dim, int value_dim, std::int64_t work) {
    SplitLengths lengths;
    if (latent_tile(gpu, head_dim, value_dim) == 0) return lengths;
    // A split for each SM, in whole tiles; longer ones where there are several for each.
    const std::int64_t each = (work / gpu.n_sms + N - 1) / N * N;
    lengths.length          = int(std::clamp<std::int64_t>(each, N, fixed_split_length));
    while (lengths.length < 1024 && work / (2 * lengths.length) >= 2 * gpu.n_sms) lengths.length *= 2;
    return lengths;
}

void latent_decode(const Attention& a, const Plan& plan, float* partial, Context& gpu) {
    const auto run = [&](auto groups) {
        constexpr int heads = decltype(groups)::value * 16;
        launch<heads / 16>(dim3(unsigned(plan.items.n), unsigned((a.n_heads + heads - 1) / heads)), a, plan, nullptr,
                           partial, gpu);
    };
    if (a.n_heads <= 16) run(std::integral_constant<int, 1>{});
    else run(std::integral_constant<int, 2>{});
    run_kernel(latent_reduce_kernel, dim3(unsigned(plan.items.n), unsigned(a.n_heads)), reduce_threads, 0, gpu, a, plan,
               static_cast<const float*>(partial));
}

void latent_prefill(const Attention& a, const Plan& plan, const PrefillTile* tiles, int n, Context& gpu) {
    const int      per_token = a.n_heads <= 16 ? 16 : 32;
    const unsigned heads     = unsigned((a.n_heads + per_token - 1) / per_token),
                   parts     = unsigned(tile_tokens * per_token / 32);
    launch<2>(dim3(unsigned(n), heads, parts), a, plan, tiles, nullptr, gpu);
}

} // namespace quire::cuda
