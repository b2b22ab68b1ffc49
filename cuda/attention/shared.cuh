// Decode attention over positions that several sequences share (kernels.h, SharedTile): their queries, and all heads of a KV head's group, are
// the rows of one tile, so that K and V are read once for all of them. mma.m16n8k16, K and V double-buffered by cp.async. The results are
// splits of split-KV, like those of the sequences' own positions.
#pragma once

#include "../paged_kv.cuh"
#include "../ptx/cp_async.cuh"
#include "codes.cuh"
#include "decode.cuh"

namespace quire::cuda {

template <int D>
struct SharedAttention {
    static constexpr int  warps = 4, M = warps * 16;         // rows of a tile
    static constexpr int  N = 32, stages = D <= 128 ? 3 : 2; // positions of a tile of K and V; tiles in shared memory
    static constexpr bool q_in_registers = D <= 128;         // it comes through the last stage's memory
    static constexpr int  stride         = D + 8;            // of rows in shared memory: ldmatrix has no bank conflicts
    static constexpr int  bytes          = (stages * 2 * N + (q_in_registers ? 0 : M)) * stride * 2;
    static_assert(M == 2 * N);
};

// By all threads of a CTA; waits for the inputs. Row r of the tile is head r % group of query r / group. `memory`:
// SharedAttention::bytes.
template <int D, bool Coded>
__device__ void attend_shared(const Attention& a, const Plan& plan, int nth_tile, int kv_head, __half* memory,
                              float* partial) {
    using Shape     = SharedAttention<D>;
    constexpr int M = Shape::M, N = Shape::N, stages = Shape::stages, stride = Shape::stride, words = D / 8,
                  threads         = Shape::warps * 32;
    __half* const          q_tile = memory + (Shape::q_in_registers ? stages - 1 : stages) * 2 * N * stride;
    __shared__ SharedQuery queries[M];
    const SharedTile       tile = plan.items.shared.list[nth_tile];
    if (tile.n == 0) return wait_for_inputs();
    const int group = a.n_heads / a.n_kv_heads, n_rows = tile.n * group, n_tiles = (tile.end - tile.begin + N - 1) / N;
    const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
    const BlockOf block_of{a.block_size};
    TableSegment  segment(plan.block_tables + tile.table, tile.begin, tile.end, a);
    for (int i = int(threadIdx.x); i < tile.n; i += threads) queries[i] = plan.items.shared.queries[tile.first + i];

    const auto k_of = [&](int t) { return memory + t % stages * 2 * N * stride; }; // V stands behind K
    const auto load = [&](int t) {
        __half* const k = k_of(t);
        segment.move_to(tile.begin + t * N);
        for (int i = int(threadIdx.x); i < N * words; i += threads) {
            const int  n = i / words, w = i % words, position = tile.begin + t * N + n;
            const bool valid = position < tile.end;
            const int  block = valid ? block_of(position) : 0;
            if constexpr (Coded) {
                const auto eight = [&](const KvArray& array, bool v) {
                    if (!valid) return make_uint4(0, 0, 0, 0);
                    return KvRow(array, v ? segment.v(block) : segment[block], kv_head, position - block * a.block_size,
                                 a.block_size, D)
                        .eight(w * 8);
                };
                *reinterpret_cast<uint4*>(k + n * stride + w * 8)       = eight(a.k_array, false);
                *reinterpret_cast<uint4*>(k + (N + n) * stride + w * 8) = eight(a.v_array, true);
                continue;
            }
            const auto at_in = [&](int id) {
                return kv_row_of_position(position, block, id, kv_head, a.block_rows, a.block_size) * D + w * 8;
            };
            const std::int64_t at   = valid ? at_in(segment[block]) : 0,
                               v_at = valid && a.v_tables != 0 ? at_in(segment.v(block)) : at;
            cp_async(k + n * stride + w * 8, reinterpret_cast<const __half*>(a.cache_k) + at, valid);
            cp_async(k + (N + n) * stride + w * 8, reinterpret_cast<const __half*>(a.cache_v) + v_at, valid);
        }
    };
    segment.move_to(tile.begin);
    if (!tile.readable) wait_for_inputs();
    for (int t = 0; t < stages - 1; t++) {
        if (t < n_tiles) load(t);
        cp_async_commit();
    }
    if (tile.readable) wait_for_inputs();
    __syncthreads();
    for (int i = int(threadIdx.x); i < M * words; i += threads) {
        const int  r = i / words, w = i % words;
        const bool valid = r < n_rows;
        const auto row   = std::int64_t(valid ? queries[r / group].row : 0) * a.n_heads + kv_head * group + r % group;
        cp_async(q_tile + r * stride + w * 8, reinterpret_cast<const __half*>(a.q) + row * D + w * 8, valid);
    }
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    const auto q_of = [&](int d, std::uint32_t(&q)[4]) { // 16 rows and columns
        ldmatrix_x4(q, q_tile + (warp * 16 + lane % 16) * stride + d * 16 + lane / 16 * 8);
    };
    std::uint32_t kept[Shape::q_in_registers ? D / 16 : 1][4];
    if constexpr (Shape::q_in_registers) {
#pragma unroll
        for (int d = 0; d < D / 16; d++) q_of(d, kept[d]);
        __syncthreads(); // the next tile goes there
    }

    constexpr float log2e         = 1.4426950408889634f; // exp2 instead of exp
    float           out[D / 8][4] = {}, row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {};
    for (int t = 0; t < n_tiles; t++) {
        if (t + stages - 1 < n_tiles) load(t + stages - 1);
        cp_async_commit();
        const __half *k = k_of(t), *v = k + N * stride;
        if (warp * 16 < n_rows) {
            float s[N / 8][4] = {};
#pragma unroll
            for (int d = 0; d < D / 16; d++) {
                std::uint32_t q[4];
                if constexpr (!Shape::q_in_registers) q_of(d, q);
                const auto& of_q = [&]() -> const std::uint32_t(&)[4] {
                    if constexpr (Shape::q_in_registers) return kept[d];
                    else return q;
                }();
#pragma unroll
                for (int n = 0; n < N / 16; n++) {
                    std::uint32_t b[4];
                    ldmatrix_x4(b, k + (n * 16 + lane % 8 + lane / 16 * 8) * stride + d * 16 + lane / 8 % 2 * 8);
                    mma_m16n8k16(s[2 * n], of_q, b[0], b[1]);
                    mma_m16n8k16(s[2 * n + 1], of_q, b[2], b[3]);
                }
            }
            const int end = tile.end - tile.begin - t * N; // of the positions in this tile
#pragma unroll
            for (int n = 0; n < N / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float x = s[n][i] * a.scale * log2e;
                    if (a.softcap > 0) x = a.softcap * log2e * tanhf(s[n][i] * a.scale / a.softcap);
                    s[n][i] = n * 8 + lane % 4 * 2 + i % 2 < end ? x : -INFINITY;
                }
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float new_max = row_max[r];
#pragma unroll
                for (int n = 0; n < N / 8; n++) new_max = fmaxf(new_max, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
                new_max             = fmaxf(new_max, __shfl_xor_sync(~0u, new_max, 1));
                new_max             = fmaxf(new_max, __shfl_xor_sync(~0u, new_max, 2));
                const float base    = new_max == -INFINITY ? 0.0f : new_max; // scores that overflowed
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
                for (int d = 0; d < D / 8; d++) out[d][2 * r] *= rescale, out[d][2 * r + 1] *= rescale;
            }
#pragma unroll
            for (int n = 0; n < N / 16; n++) {
                const std::uint32_t p[4] = {pack(s[2 * n][0], s[2 * n][1]), pack(s[2 * n][2], s[2 * n][3]),
                                            pack(s[2 * n + 1][0], s[2 * n + 1][1]),
                                            pack(s[2 * n + 1][2], s[2 * n + 1][3])};
#pragma unroll
                for (int d = 0; d < D / 16; d++) {
                    std::uint32_t b[4];
                    ldmatrix_x4_transposed(b, v + (n * 16 + lane % 16) * stride + d * 16 + lane / 16 * 8);
                    mma_m16n8k16(out[2 * d], p, b[0], b[1]);
                    mma_m16n8k16(out[2 * d + 1], p, b[2], b[3]);
                }
            }
        }
        cp_async_wait<stages - 2>(); // the next tile is there
        __syncthreads();             // for all, and all have read this one
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        row_sum[r] += __shfl_xor_sync(~0u, row_sum[r], 1);
        row_sum[r] += __shfl_xor_sync(~0u, row_sum[r], 2);
        const int in_tile = warp * 16 + lane / 4 + 8 * r;
        if (in_tile >= n_rows) continue;
        const std::int64_t split = queries[in_tile / group].result + tile.split;
        float*             to    = partial + (split * a.n_heads + kv_head * group + in_tile % group) * (D + 2);
#pragma unroll
        for (int d = 0; d < D / 8; d++)
            *reinterpret_cast<float2*>(to + d * 8 + lane % 4 * 2) = {out[d][2 * r], out[d][2 * r + 1]};
        if (lane % 4 == 0) *reinterpret_cast<float2*>(to + D) = {row_max[r] / log2e, row_sum[r]};
    }
}

// shared.cu: the same as a kernel of its own; and the kernel that adds up the splits of plan.items.shared.queries.
void attend_shared(const Attention& a, const Plan& plan, float* partial, Context& gpu);
void combine_splits(const Attention& a, const Plan& plan, const float* partial, Context& gpu);

} // namespace quire::cuda
