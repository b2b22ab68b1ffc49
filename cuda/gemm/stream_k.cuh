// Shared by both GEMM kernels for few rows of x: the work is cut into units of 128 rows of weights × some columns, and distributed
// evenly over as many CTAs as run at once, row block by row block (stream-K). If several CTAs share a row block, they write
// partial sums to the Context's workspace, and the last one adds them in the order of the columns.
#pragma once

#include "../epilogue.cuh"
#include "../warp.cuh"
#include "gemv.cuh"

namespace quire::cuda {

// Of 128 rows, one product after another.
struct Blocks {
    Projection projection[max_projections];
    int        first_block[max_projections + 1];
    int        n;
};

// matmul_hopper.cu: halves. False: not on this GPU, or not of this shape.
bool skinny_gemm_sm90(const __half* x, int n_rows, int cols, const Blocks& all, Context& gpu);

namespace {

constexpr int warps = 8, unit_rows = warps * 16;

// Of `total` units, `per_block` for a row block, the share of one of n blocks of threads. total · n fits 32 bits.
struct Share {
    int self, n, total, per_block;

    __device__ int begin_of(int block) const { return int(unsigned(total) * unsigned(block) / unsigned(n)); }
};

// What a warp has summed up of the units first .. end of a row block: of its 16 rows (weights) and NT · 8 tokens, as mma lays
// results out. sync: of the 8 warps.
template <int NT, class Sync>
__device__ void finish(float (&acc)[NT][4], const Share& share, int first, int end, const Blocks& all, int n_rows,
                       float4* partial, std::int32_t* arrivals, bool& is_last, const Sync& sync) {
    const int  thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int  block = first / share.per_block, from = block * share.per_block, to = from + share.per_block;
    const bool whole = first == from && end == to;
    bool       mine  = true;
    if (!whole) {
        float4* own =
            partial + (std::int64_t(share.self) * 2 + (share.begin_of(share.self) < from)) * NT * warps * 32 + thread;
#pragma unroll
        for (int t = 0; t < NT; t++) own[t * warps * 32] = make_float4(acc[t][0], acc[t][1], acc[t][2], acc[t][3]);
        int b0 = int(unsigned(from) * unsigned(share.n) / unsigned(share.total)); // who has the row block's first unit
        while (share.begin_of(b0 + 1) <= from) b0++;
        while (share.begin_of(b0) > from) b0--;
        int b1 = b0 + 1;
        while (b1 < share.n && share.begin_of(b1) < to) b1++;
        sync();
        if (thread == 0) { // one thread's fence is enough: what the others wrote is older than the barrier
            __threadfence();
            is_last = atomicAdd(arrivals + block, 1) == b1 - b0 - 1;
            if (is_last) arrivals[block] = 0; // for the next launch
            __threadfence();
        }
        sync();
        mine = is_last;
        if (mine) {
#pragma unroll
            for (int t = 0; t < NT; t++) acc[t][0] = acc[t][1] = acc[t][2] = acc[t][3] = 0;
#pragma unroll 2
            for (int b = b0; b < b1; b++) {
                const float4* theirs =
                    partial + (std::int64_t(b) * 2 + (share.begin_of(b) < from)) * NT * warps * 32 + thread;
#pragma unroll
                for (int t = 0; t < NT; t++) {
                    const float4 v = __ldcg(theirs + t * warps * 32);
                    acc[t][0] += v.x, acc[t][1] += v.y, acc[t][2] += v.z, acc[t][3] += v.w;
                }
            }
        }
    }
    if (mine) {
        int which = 0;
        while (block >= all.first_block[which + 1]) which++;
        const Projection& p = all.projection[which];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = (block - all.first_block[which]) * unit_rows + warp * 16 + lane / 4 + 8 * r;
            if (row >= int(p.weight.rows)) continue;
            const float bias = p.bias ? p.bias[row] : 0.0f;
#pragma unroll
            for (int t = 0; t < NT; t++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int token = t * 8 + lane % 4 * 2 + i;
                    if (token >= n_rows) continue;
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
