// The epilogues of the prefill GEMMs: what is done with the float32 sums of a tile, as wgmma lays them over the threads, and where the results
// go. Results are fp16; RoPE is on all of a head's 64 or 128 dimensions.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "../epilogue.cuh"
#include "../kernels.h"
#include "../paged_kv.cuh"
#include "../rope.cuh"
#include "../warp.cuh"

namespace quire::cuda {

// The last tile along M where the tokens do not fill it: its first token (-1: there is none), and how many rows of x are loaded for it, a
// multiple of 8, as the swizzle has 8 rows. Rows beyond, which TMA would fill with zeros, cost more time than rows that it reads.
struct RestOfTokens {
    int first_m, rows;
};
inline RestOfTokens rest_of(std::int64_t m, int tile) {
    const int rest = int(m % tile);
    return rest == 0 ? RestOfTokens{-1, tile} : RestOfTokens{int(m) - rest, (rest + 7) / 8 * 8};
}

struct PrefillResults {
    __half*             out[max_projections];
    const float*        bias[max_projections];
    float               scale[max_projections]; // of results
    int                 rows[max_projections];  // of the weights: N
    int                 m;                      // tokens
    RopeStore           rope;
    const std::int32_t *positions, *slots;
};

// Of ops[0], a GEMM or a gated one, and with fused_rope of ops[1], the RoPE and KV store of its results.
inline PrefillResults results_of(const Operation* ops, bool fused_rope, const Plan& plan) {
    PrefillResults results{};
    results.m = int(ops[0].rows);
    for (int k = 0; k < max_projections; k++) {
        const Projection& p = ops[0].projection[k];
        results.out[k]      = static_cast<__half*>(p.out);
        results.bias[k]     = p.bias;
        results.scale[k]    = p.scale;
        results.rows[k]     = int(p.weight.rows);
    }
    if (fused_rope) {
        results.rope      = ops[1].rope;
        results.positions = plan.positions;
        results.slots     = plan.slots;
    }
    return results;
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// RoPE of whole heads of D, on Width columns of tokens `row` and row + 8 as wgmma lays them over the lanes.
template <int D, int Width, int Size>
__device__ void rotate(float (&sum)[Size], const PrefillResults& results, int row) {
    static_assert(Width % D == 0 && Width / 2 <= Size);
    const RopeStore& a    = results.rope;
    const int        lane = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float position = float(results.positions[min(row + 8 * r, results.m - 1)]);
        const auto  each     = [&](int pair, int one, int other) {
            float sine, cosine;
            rope_angle(position, a.inv_freq[pair], sine, cosine);
            sine *= a.scale, cosine *= a.scale;
#pragma unroll
            for (int head = 0; head < Width / 2; head += D / 2) {
                float &      x = sum[head + one], &y = sum[head + other];
                const float2 rotated = rotate_pair(x, y, sine, cosine);
                x = rotated.x, y = rotated.y;
            }
        };
        if (a.neox) {
#pragma unroll
            for (int j = 0; j < D / 8; j++) // two columns of each eight
                each(j / 2 * 8 + lane * 2 + j % 2, j / 2 * 4 + 2 * r + j % 2, D / 4 + j / 2 * 4 + 2 * r + j % 2);
        } else {
#pragma unroll
            for (int j = 0; j < D / 8; j++) each(j * 4 + lane, j * 4 + 2 * r, j * 4 + 2 * r + 1);
        }
    }
}

// Stores 32 neighbouring results from `to` on: each of four lanes has two of each of four groups of 8.
__device__ inline void store_row(__half* to, int n, const std::uint32_t (&words)[4]) {
    const uint4 eight = transpose_quad(words);
    const int   at    = int(threadIdx.x) % 4 * 8;
    if (to != nullptr && at < n) *reinterpret_cast<uint4*>(to + at) = eight;
}

// The sums of tokens `row` and row + 8, of Width columns: those of `projection` from first_n on; if gated, half of them of gate and half of
// up. D: head_dim of RoPE.
template <Epilogue E, int D, int Width, int Size>
__device__ void finish_tile(float (&sum)[Size], const PrefillResults& results, int projection, int first_n, int row) {
    const int                 n = results.rows[projection], lane = int(threadIdx.x) % 32;
    const std::int32_t* const slots = results.slots + (projection == 2 ? results.rope.v_slots : 0);
    if (const float* bias = results.bias[projection]; !is_gated(E) && bias != nullptr)
#pragma unroll
        for (int i = 0; i < Width / 2; i++)
            if (const int col = first_n + i / 4 * 8 + lane % 4 * 2 + i % 2; col < n) sum[i] += bias[col];
    if (const float scale = results.scale[projection]; E == Epilogue::store && scale != 1)
#pragma unroll
        for (int i = 0; i < Width / 2; i++) sum[i] *= scale;
    if constexpr (E == Epilogue::rope_store)
        if (projection < 2) rotate<D, Width>(sum, results, row);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const bool is_row = row + 8 * r < results.m;
        const int  slot   = E == Epilogue::rope_store && is_row ? slots[row + 8 * r] : -1;
        const auto place  = [&](int col) -> __half* { // of the results
            if (!is_row) return nullptr;
            if (E != Epilogue::rope_store || projection == 0)
                return results.out[projection] + std::int64_t(row + 8 * r) * n + col;
            // Tokens that only fill up a graph have no slot.
            const RopeStore& a = results.rope;
            if (slot < 0) return nullptr;
            return reinterpret_cast<__half*>(projection == 1 ? a.cache_k : a.cache_v) +
                   kv_row_of_slot(slot, col / D, a.block_rows, a.block_size) * D + col % D;
        };
#pragma unroll
        for (int c = 0; c < (is_gated(E) ? Width / 2 : Width); c += 32) {
            std::uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float both[2];
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const int k = (c / 8 + i) * 4 + 2 * r + j;
                    both[j]     = sum[k];
                    if constexpr (E == Epilogue::swiglu) both[j] = swiglu(sum[k], sum[Width / 4 + k]);
                    if constexpr (E == Epilogue::geglu) both[j] = geglu(sum[k], sum[Width / 4 + k]);
                }
                words[i] = pack_finite(both[0], both[1]);
            }
            store_row(place(first_n + c), n - first_n - c, words);
        }
    }
}

#endif

} // namespace quire::cuda
