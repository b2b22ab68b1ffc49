// Skinny GEMM (up to 64 tokens, weights of any form), stream-K: still limited by reading the weights, but with too many
// multiplications for CUDA cores. On tensor cores (mma.m16n8k16: 16 rows of the weights, 8 tokens). Weights go from memory
// straight into registers (fragment.cuh).
//
// Limits: cols (K) is a multiple of unit_cols(); x has room for m rounded up to 8, 16, 32 or 64.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "../kernels.h"
#include "../ptx/cp_async.cuh"
#include "../ptx/mma.cuh"
#include "../warp.cuh"
#include "fragment.cuh"
#include "stream_k.cuh"

namespace quire::cuda {

namespace {

// NT: groups of 8 tokens.
template <Kind K, int NT>
__global__ void __launch_bounds__(warps * 32, 2)
    skinny_gemm_kernel(const __half* x, int m, int cols, OutputTiles all, float4* partial, std::int32_t* arrivals) {
    constexpr int     stride = row_stride(K), width = unit_cols(K);
    extern __shared__ __align__(16) __half x_stages[]; // three of [NT · 8][stride]
    __shared__ bool                        is_last;
    reads_early(); // weights
    const int          warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int          units_per_tile = cols / width;
    const StreamK      stream_k(all.first_tile[all.n], units_per_tile);
    const StreamKRange range(stream_k);
    const int          begin = range.begin, end = range.end;
    Fragment<K>        weights[2]; // of this unit and the next: loaded two units ahead

    const auto load_weights = [&](Fragment<K>& to, int unit) { // weights, into registers
        if (unit >= end) return;
        const int tile  = unit / units_per_tile;
        int       which = 0;
        while (tile >= all.first_tile[which + 1]) which++;
        const Weight& w    = all.projection[which].weight;
        const int     row  = (tile - all.first_tile[which]) * tile_n + warp * 16 + lane / 4;
        const int     last = int(w.rows) - 1;
        to.load(RowPair(w, min(row, last), min(row + 8, last)), unit % units_per_tile * width, lane);
    };
    const auto load_x = [&](int unit) { // x, into shared memory
        constexpr int words = width / 8;
        if (unit < end) {
            __half*       to   = x_stages + unit % 3 * NT * 8 * stride;
            const __half* from = x + unit % units_per_tile * width;
#pragma unroll
            for (int i = threadIdx.x; i < NT * 8 * words; i += warps * 32) {
                const int t = i / words, c = i % words * 8;
                cp_async(to + t * stride + padded<K>(c), from + std::int64_t(t) * cols + c);
            }
        }
        cp_async_commit();
    };
    load_weights(weights[0], begin);
    load_weights(weights[1], begin + 1);
    wait_for_inputs();
    if (begin >= end) return;
    load_x(begin);
    load_x(begin + 1);

    float      acc[NT][4] = {};
    int        first      = begin; // the first unit that this CTA has of the current tile
    const auto work       = [&](Fragment<K>& now, int unit) {
        cp_async_wait<1>();
        __syncthreads(); // this unit's x has arrived, and all are done with the unit before
        load_x(unit + 2);
        const __half* xs = x_stages + unit % 3 * NT * 8 * stride + lane / 4 * stride;
#pragma unroll
        for (int step = 0; step < Fragment<K>::steps; step++) {
            std::uint32_t lower[4], upper[4];
            now.words(0, step, lower);
            now.words(1, step, upper);
            const __half* at = xs + padded<K>(Fragment<K>::column(step, lane));
#pragma unroll
            for (int t = 0; t < NT; t++) {
                const uint4 b = *reinterpret_cast<const uint4*>(at + t * 8 * stride);
                mma_m16n8k16(acc[t], lower[0], upper[0], lower[1], upper[1], b.x, b.y);
                mma_m16n8k16(acc[t], lower[2], upper[2], lower[3], upper[3], b.z, b.w);
            }
        }
        load_weights(now, unit + 2);
        const int tile = unit / units_per_tile;
        if (unit + 1 < end && (unit + 1) / units_per_tile == tile) return;

        fix_up_and_store<NT>(acc, stream_k, first, unit + 1, all, m, partial, arrivals, is_last, WholeCta::sync);
        first = unit + 1;
    };
    for (int unit = begin; unit < end; unit += 2) {
        work(weights[0], unit);
        if (unit + 1 < end) work(weights[1], unit + 1);
    }
}

template <Kind K, int NT>
void launch(const __half* x, int m, int cols, const OutputTiles& all, Context& gpu) {
    constexpr int shared = 3 * NT * 8 * row_stride(K) * 2;
    const int ctas = std::clamp(prepare_kernel(gpu, skinny_gemm_kernel<K, NT>, warps * 32, shared), 1, max_ctas_per_sm);
    const int units = all.first_tile[all.n] * (cols / unit_cols(K));
    const int grid  = std::min(gpu.n_sms * ctas, units);
    // Not a programmatic launch, as others are: loads in flight to registers are held in the L1, of which an SM has little
    // while it still runs a kernel with much shared memory. Decoding 8 sequences took a quarter longer.
    run_in_order(skinny_gemm_kernel<K, NT>, dim3(unsigned(grid)), warps * 32, shared, gpu, x, m, cols, all,
                 gpu.tile_partial, gpu.tile_arrivals);
}

template <int NT>
void launch_kind(Kind kind, const __half* x, int m, int cols, const OutputTiles& all, Context& gpu) {
    switch (kind) {
        case kind_f16: launch<kind_f16, NT>(x, m, cols, all, gpu); break;
        case kind_i8: launch<kind_i8, NT>(x, m, cols, all, gpu); break;
        case kind_i8_float: launch<kind_i8_float, NT>(x, m, cols, all, gpu); break;
        case kind_i8_float_min: launch<kind_i8_float_min, NT>(x, m, cols, all, gpu); break;
        case kind_q4_k: launch<kind_q4_k, NT>(x, m, cols, all, gpu); break;
    }
}

} // namespace

bool can_skinny_gemm(const Context& gpu, const Weight& weight) {
    return weight.form != WeightForm::f32 && weight.cols % unit_cols(kind_of(weight)) == 0 &&
           weight.rows <= std::int64_t(max_stream_k_tiles) * tile_n / max_projections &&
           weight.rows / tile_n * (weight.cols / 64) * max_projections * gpu.n_sms * max_ctas_per_sm < std::int64_t(1)
                                                                                                           << 32;
}

void skinny_gemm(const Half* x_, int m, std::int64_t cols, const Projection* projections, int n_projections,
                 Context& gpu) {
    const auto* x = reinterpret_cast<const __half*>(x_);
    for (int i = 0; i < n_projections;) {
        OutputTiles all{};
        const Kind  kind = kind_of(projections[i].weight);
        for (; i < n_projections && all.n < max_projections && kind_of(projections[i].weight) == kind; i++) {
            all.projection[all.n]     = projections[i];
            all.first_tile[all.n + 1] = all.first_tile[all.n] + int((projections[i].weight.rows + tile_n - 1) / tile_n);
            all.n++;
        }
        for (int k = all.n + 1; k <= max_projections; k++) all.first_tile[k] = all.first_tile[all.n];
        const int c = int(cols);
        if (kind == kind_f16 && skinny_gemm_sm90(x, m, c, all, gpu)) continue;
        if (m <= 8) launch_kind<1>(kind, x, m, c, all, gpu);
        else if (m <= 16) launch_kind<2>(kind, x, m, c, all, gpu);
        else if (m <= 32) launch_kind<4>(kind, x, m, c, all, gpu);
        else launch_kind<8>(kind, x, m, c, all, gpu);
    }
}

} // namespace quire::cuda
