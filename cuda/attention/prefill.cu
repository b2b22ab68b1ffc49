// Prefill attention over a paged KV cache. Scores and sums are float32, the softmax is online (row max, row sum, rescale).
//   prefill_kernel:  tiles of consecutive queries on tensor cores (mma.m16n8k16), K and V double-buffered by cp.async
//   fallback_kernel: any head_dim, latent or not; a warp per query and head
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "../kernels.h"
#include "../paged_kv.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/mma.cuh"
#include "../warp.cuh"
#include "codes.cuh"
#include "latent.cuh"

namespace quire::cuda {

namespace {

// The first position that the token at `position` sees; with chunks all tokens of a tile see the same.
__device__ int first_seen(const Attention& a, int position) {
    return a.chunk > 0 ? position / a.chunk * a.chunk : a.window > 0 ? max(0, position - a.window + 1) : 0;
}

// -- fallback: a warp for each query and head; lanes share the dimensions, positions one after another

__global__ void fallback_kernel(Attention a, Plan plan, const PrefillTile* tiles) {
    wait_for_inputs();
    const PrefillTile tile = tiles[blockIdx.y];
    const int         lane = threadIdx.x % 32, D = a.head_dim, V = a.value_dim, head = blockIdx.x,
              kv_head   = head / (a.n_heads / a.n_kv_heads);
    const auto*   table = plan.block_tables + plan.table_start[tile.sequence];
    const KvArray fp16_k{const_cast<Half*>(a.cache_k), nullptr, KvType::f16, a.block_rows},
        fp16_v{const_cast<Half*>(a.cache_v), nullptr, KvType::f16, a.block_rows};
    const KvArray &         k_array = a.coded ? a.k_array : fp16_k, &v_array = a.coded ? a.v_array : fp16_v;
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
        float row_max = a.sinks ? a.sinks[head] : -INFINITY, row_sum = row_max > -INFINITY ? 1 : 0;
        for (int position = first_seen(a, last); position <= last; position++) {
            const int   nth = position / a.block_size, block = table[nth], offset = position % a.block_size;
            const int   v_block = a.v_tables == 0 ? block : table[nth + a.v_tables];
            const KvRow k(k_array, block, kv_head, offset, a.block_size, D);
            const KvRow v     = v_array.rows ? KvRow(v_array, v_block, kv_head, offset, a.block_size, D) : k;
            float       score = 0;
            for (int d = lane; d < D; d += 32) score += q[d] * k.number(d, d >= V ? k_array.parts - 1 : 0);
            score               = softcapped(warp_sum(score), a.softcap);
            const float new_max = fmaxf(row_max, score),
                        base    = new_max == -INFINITY ? 0.0f : new_max; // NaN stays NaN
            const float rescale = __expf(row_max - base), p = __expf(score - base);
            row_max = new_max;
            row_sum = row_sum * rescale + p;
            for (int d = lane; d < V; d += 32) acc[d] = acc[d] * rescale + p * v.number(d);
        }
        for (int d = lane; d < V; d += 32)
            reinterpret_cast<__half*>(a.out)[(row * a.n_heads + head) * V + d] = __float2half(acc[d] / row_sum);
        __syncwarp();
    }
}

// -- prefill

// A CTA takes Warps × 16 queries of one head, and V of the columns of V; K and V come in tiles of N positions. Rows in shared memory are
// padded by 16 bytes, so that ldmatrix has no bank conflicts.
template <int D, int V, int Warps, int N>
__global__ void __launch_bounds__(Warps * 32) prefill_kernel(Attention a, Plan plan, const PrefillTile* tiles) {
    wait_for_inputs();
    constexpr int     stride = D + 8, v_stride = V + 8, M = Warps * 16;
    extern __shared__ __align__(16) __half shared[];
    __half *          q_tile = shared, *k_tile = q_tile + M * stride, *v_tile = k_tile + 2 * N * stride;
    const int         v_first = int(blockIdx.z) * V;
    const PrefillTile tile =
        tiles[gridDim.x - 1 - blockIdx.x]; // the longest contexts, which are listed last, start first
    const int   head = blockIdx.y, kv_head = head / (a.n_heads / a.n_kv_heads);
    const int   warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const auto* table = plan.block_tables + plan.table_start[tile.sequence];
    const int   first = plan.positions[tile.first_row], last = first + tile.n_rows - 1; // positions of the tile
    const int   low     = first_seen(a, first);                                         // blocks below it may be gone
    const int   begin   = low / N * N;
    const int   n_tiles = (last - begin) / N + 1;

    const BlockOf block_of{a.block_size};
    const auto    load = [&](int t) { // K and V of one tile of positions
        constexpr int words = D / 8;
        __half *      k = k_tile + (t & 1) * N * stride, *v = v_tile + (t & 1) * N * v_stride;
        for (int i = threadIdx.x; i < N * words; i += Warps * 32) {
            const int  n = i / words, w = i % words, position = begin + t * N + n;
            const bool valid = position <= last && position >= low;
            const int  block = valid ? block_of(position) : 0;
            const auto at_in = [&](int id) {
                return kv_row_of_position(position, block, id, kv_head, a.block_rows, a.block_size) * D + w * 8;
            };
            const std::int64_t at   = valid ? at_in(table[block]) : 0,
                               v_at = valid && a.v_tables != 0 ? at_in(table[block + a.v_tables]) : at;
            cp_async(k + n * stride + w * 8, reinterpret_cast<const __half*>(a.cache_k) + at, valid);
            if (const int c = w * 8 - v_first; V == D || (c >= 0 && c < V))
                cp_async(v + n * v_stride + c, reinterpret_cast<const __half*>(a.cache_v) + v_at, valid);
        }
    };
    for (int i = threadIdx.x; i < M * (D / 8); i += Warps * 32) {
        const int  r = i / (D / 8), w = i % (D / 8);
        const bool valid = r < tile.n_rows;
        cp_async(q_tile + r * stride + w * 8,
                 reinterpret_cast<const __half*>(a.q) +
                     (std::int64_t(tile.first_row + (valid ? r : 0)) * a.n_heads + head) * D + w * 8,
                 valid);
    }
    load(0);
    cp_async_commit();

    float       out[V / 8][4] = {}, row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {};
    const int   row[2] = {first + warp * 16 + lane / 4,
                          first + warp * 16 + lane / 4 + 8}; // positions of this lane's rows
    const float scale  = a.scale * 1.4426950408889634f;      // exp2 instead of exp
    if (a.sinks) { // a first score; of the four lanes that share a row one counts it
        row_max[0] = row_max[1] = a.sinks[head] * 1.4426950408889634f;
        row_sum[0] = row_sum[1] = lane % 4 == 0 && row_max[0] > -INFINITY ? 1 : 0;
    }
    for (int t = 0; t < n_tiles; t++) {
        if (t + 1 < n_tiles) load(t + 1);
        cp_async_commit();
        cp_async_wait<1>();
        __syncthreads();
        const __half *k = k_tile + (t & 1) * N * stride, *v = v_tile + (t & 1) * N * v_stride;
        const int     from = begin + t * N;
        // Nothing to do where no query of this warp sees a position of this tile.
        if (from <= first + warp * 16 + 15 && warp * 16 < tile.n_rows) {
            float s[N / 8][4] = {};
#pragma unroll
            for (int d = 0; d < D / 16; d++) {
                std::uint32_t q[4];
                ldmatrix_x4(q, q_tile + (warp * 16 + lane % 16) * stride + d * 16 + lane / 16 * 8);
#pragma unroll
                for (int n = 0; n < N / 16; n++) {
                    std::uint32_t b[4];
                    ldmatrix_x4(b, k + (n * 16 + lane % 8 + lane / 16 * 8) * stride + d * 16 + lane / 8 % 2 * 8);
                    mma_m16n8k16(s[2 * n], q, b[0], b[1]);
                    mma_m16n8k16(s[2 * n + 1], q, b[2], b[3]);
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
                float new_max = row_max[r];
#pragma unroll
                for (int n = 0; n < N / 8; n++) new_max = fmaxf(new_max, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
                new_max             = fmaxf(new_max, __shfl_xor_sync(~0u, new_max, 1));
                new_max             = fmaxf(new_max, __shfl_xor_sync(~0u, new_max, 2));
                const float base    = new_max == -INFINITY ? 0.0f : new_max; // no visible position yet
                const float rescale = exp2f(row_max[r] - base);
                row_max[r]          = new_max;
                float part          = 0;
#pragma unroll
                for (int n = 0; n < N / 8; n++) {
                    s[n][2 * r]     = exp2f(s[n][2 * r] - base);
                    s[n][2 * r + 1] = exp2f(s[n][2 * r + 1] - base);
                    part += s[n][2 * r] + s[n][2 * r + 1];
                }
                row_sum[r] = row_sum[r] * rescale + part;
#pragma unroll
                for (int d = 0; d < V / 8; d++) out[d][2 * r] *= rescale, out[d][2 * r + 1] *= rescale;
            }
#pragma unroll
            for (int n = 0; n < N / 16; n++) {
                const std::uint32_t p[4] = {pack(s[2 * n][0], s[2 * n][1]), pack(s[2 * n][2], s[2 * n][3]),
                                            pack(s[2 * n + 1][0], s[2 * n + 1][1]),
                                            pack(s[2 * n + 1][2], s[2 * n + 1][3])};
#pragma unroll
                for (int d = 0; d < V / 16; d++) {
                    std::uint32_t b[4];
                    ldmatrix_x4_transposed(b, v + (n * 16 + lane % 16) * v_stride + d * 16 + lane / 16 * 8);
                    mma_m16n8k16(out[2 * d], p, b[0], b[1]);
                    mma_m16n8k16(out[2 * d + 1], p, b[2], b[3]);
                }
            }
        }
        __syncthreads(); // the other buffer is loaded next
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        row_sum[r] += __shfl_xor_sync(~0u, row_sum[r], 1);
        row_sum[r] += __shfl_xor_sync(~0u, row_sum[r], 2);
        const int in_tile = warp * 16 + lane / 4 + 8 * r;
        if (in_tile >= tile.n_rows) continue;
        const float inverse = row_sum[r] > 0 ? 1 / row_sum[r] : 0.0f;
        auto* to = reinterpret_cast<__half*>(a.out) + (std::int64_t(tile.first_row + in_tile) * a.n_heads + head) * D +
                   v_first;
#pragma unroll
        for (int d = 0; d < V / 8; d++)
            *reinterpret_cast<std::uint32_t*>(to + d * 8 + lane % 4 * 2) =
                pack(out[d][2 * r] * inverse, out[d][2 * r + 1] * inverse);
    }
}

template <int D, int Warps, int N, int V = D>
void launch_prefill(const Attention& a, const Plan& plan, const PrefillTile* tiles, int n, Context& gpu) {
    constexpr int shared = ((Warps * 16 + 2 * N) * (D + 8) + 2 * N * (V + 8)) * 2;
    prepare_kernel(gpu, prefill_kernel<D, V, Warps, N>, Warps * 32, shared);
    run_kernel(prefill_kernel<D, V, Warps, N>, dim3(unsigned(n), unsigned(a.n_heads), D / V), Warps * 32, shared, gpu,
               a, plan, tiles);
}

void run_fallback(const Attention& a, const Plan& plan, const PrefillTile* tiles, int n, Context& gpu) {
    const std::size_t shared = std::size_t(4) * 2 * std::size_t(a.head_dim) * sizeof(float);
    run_kernel(fallback_kernel, dim3(unsigned(a.n_heads), unsigned(n)), unsigned(128), shared, gpu, a, plan, tiles);
}

} // namespace

// As many rows as the kernels below take: warps × 16.
int prefill_tile(const Context& gpu, int head_dim, int value_dim) {
    if (value_dim != head_dim) return latent_tile(gpu, head_dim, value_dim);
    if (const int rows = prefill_tile_sm90(gpu, head_dim)) return rows;
    switch (head_dim) {
        case 16:
        case 32:
        case 64:
        case 80:
        case 96:
        case 112: return 128;
        case 128:
        case 160:
        case 192:
        case 256:
        case 512: return 64;
        default: return 0;
    }
}

void attention_prefill(const Attention& a, const Plan& plan, const PrefillTile* tiles, int n, Context& gpu) {
    if (n == 0) return;
    if (a.latent())
        return latent_tile(gpu, a.head_dim, a.value_dim) > 0 ? latent_prefill(a, plan, tiles, n, gpu)
                                                             : run_fallback(a, plan, tiles, n, gpu);
    if (prefill_tile_sm90(gpu, a.head_dim) > 0) {
        attention_prefill_sm90(a, plan, tiles, n, gpu);
        return;
    }
    switch (a.head_dim) {
        case 16: launch_prefill<16, 8, 64>(a, plan, tiles, n, gpu); break;
        case 32: launch_prefill<32, 8, 64>(a, plan, tiles, n, gpu); break;
        case 64: launch_prefill<64, 8, 64>(a, plan, tiles, n, gpu); break;
        case 80: launch_prefill<80, 8, 64>(a, plan, tiles, n, gpu); break;
        case 96: launch_prefill<96, 8, 64>(a, plan, tiles, n, gpu); break;
        case 112: launch_prefill<112, 8, 64>(a, plan, tiles, n, gpu); break;
        case 128: launch_prefill<128, 4, 64>(a, plan, tiles, n, gpu); break;
        case 160: launch_prefill<160, 4, 64>(a, plan, tiles, n, gpu); break;
        case 192: launch_prefill<192, 4, 32>(a, plan, tiles, n, gpu); break;
        case 256: launch_prefill<256, 4, 32>(a, plan, tiles, n, gpu); break;
        case 512:
            launch_prefill<512, 4, 32, 256>(a, plan, tiles, n, gpu);
            break; // Gemma 4; its registers hold half of V
        default: run_fallback(a, plan, tiles, n, gpu);
    }
}

} // namespace quire::cuda
