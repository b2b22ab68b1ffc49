// Stream-K of both skinny GEMMs: an output tile is 128 rows of the weights (N) by all tokens (M). The work of all tiles is cut
// along K into units, which are dealt out evenly and in order over as many CTAs as run at once. CTAs that share a tile write
// partial sums to a workspace, and the last one to arrive does the fix-up: it adds them in the order of K.
#pragma once

#include "../epilogue.cuh"
#include "../warp.cuh"
#include "gemv.cuh"
#include "stream_k_range.cuh"

namespace quire::cuda {

// Of all projections, one after another.
struct OutputTiles {
    Projection projection[max_projections];
    int        first_tile[max_projections + 1];
    int        n;
};

// skinny_sm90.cu: fp16 weights. False: not on this GPU, or not of this shape.
bool skinny_gemm_sm90(const __half* x, int m, int cols, const OutputTiles& all, Context& gpu);

namespace {

constexpr int warps = 8, tile_n = warps * 16;

// Fix-up and epilogue of the units first .. end of a tile. acc: a warp's sums of its 16 rows by NT · 8 tokens, as mma lays them
// out; zero afterwards. sync: of the 8 warps.
template <int NT, class Sync>
__device__ void fix_up_and_store(float (&acc)[NT][4], const StreamK& stream_k, int first, int end,
                                 const OutputTiles& all, int m, float4* partial, std::int32_t* arrivals, bool& is_last,
                                 const Sync& sync) {
    const int  thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int  tile = first / stream_k.units_per_tile, from = tile * stream_k.units_per_tile;
    const bool whole  = first == from && end == from + stream_k.units_per_tile;
    bool       stores = true;
    if (!whole) {
        float4* own = partial +
                      (std::int64_t(blockIdx.x) * 2 + (stream_k.begin_of(blockIdx.x) < from)) * NT * warps * 32 +
                      thread;
#pragma unroll
        for (int t = 0; t < NT; t++) own[t * warps * 32] = make_float4(acc[t][0], acc[t][1], acc[t][2], acc[t][3]);
        const int first_cta = stream_k.first_cta(tile), end_cta = stream_k.last_cta(tile) + 1;
        sync();
        if (thread == 0) { // one thread's fence is enough: the others wrote before the barrier
            __threadfence();
            is_last = atomicAdd(arrivals + tile, 1) == end_cta - first_cta - 1;
            if (is_last) arrivals[tile] = 0; // for the next launch
            __threadfence();
        }
        sync();
        stores = is_last;
        if (stores) {
#pragma unroll
            for (int t = 0; t < NT; t++) acc[t][0] = acc[t][1] = acc[t][2] = acc[t][3] = 0;
#pragma unroll 2
            for (int cta = first_cta; cta < end_cta; cta++) {
                const float4* theirs =
                    partial + (std::int64_t(cta) * 2 + (stream_k.begin_of(unsigned(cta)) < from)) * NT * warps * 32 +
                    thread;
#pragma unroll
                for (int t = 0; t < NT; t++) {
                    const float4 v = __ldcg(theirs + t * warps * 32);
                    acc[t][0] += v.x, acc[t][1] += v.y, acc[t][2] += v.z, acc[t][3] += v.w;
                }
            }
        }
    }
    if (stores) {
        int which = 0;
        while (tile >= all.first_tile[which + 1]) which++;
        const Projection& p = all.projection[which];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = (tile - all.first_tile[which]) * tile_n + warp * 16 + lane / 4 + 8 * r;
            if (row >= int(p.weight.rows)) continue;
            const float bias = p.bias ? p.bias[row] : 0.0f;
#pragma unroll
            for (int t = 0; t < NT; t++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int token = t * 8 + lane % 4 * 2 + i;
                    if (token >= m) continue;
                    const float        value = acc[t][2 * r + i] + bias;
                    const std::int64_t at    = token * p.weight.rows + row;
                    store_result(p, at, value);
                }
        }
    }
#pragma unroll
    for (int t = 0; t < NT; t++) acc[t][0] = acc[t][1] = acc[t][2] = acc[t][3] = 0;
}

} // namespace

} // namespace quire::cuda
