// GEMV (one token) on Hopper, limited by reading the weights: each warp has a multistage pipeline of its own in shared memory,
// filled by TMA bulk copies that its first lane starts some stages ahead. A stage is the same range of columns of two
// consecutive rows. The pipelines are filled before x is ready (programmatic dependent launch): memory time lost while small
// kernels run cannot be recovered.
//
// x stays fp16 for fp16 weights. For int8 and Q4_K weights it is quantised to int16 with a scale, stored as two bytes, so that
// dp4a multiplies four weights at once: the dot products are exact, and x loses less precision than fp16 does.
//
// Limits: every matrix has an even number of rows (Gated: both the same); cols is a multiple of 8 (fp16) or 256; pointers of
// 16.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "../epilogue.cuh"
#include "../kernels.h"
#include "../pipeline.cuh"
#include "../ptx/tma.cuh"
#include "../warp.cuh"
#include "gemv.cuh"
#include "gemv_tma.cuh"

namespace quire::cuda {

namespace {

constexpr int stages        = 4;
constexpr int shared_budget = 200 * 1024; // leaves room on an SM for the small kernels beside it

// `slice`: columns of a stage.
// Gated: a pair is one row of gate and one of up; the epilogue is the activation.
template <Kind K, bool Gated>
__global__ void __launch_bounds__(warps_of(K) * 32, 1)
    gemv_tma_kernel(const __half* x, int cols, int slice, JoinedProjections all, Activation activation) {
#if __CUDA_ARCH__ >= 900
    constexpr int     warps = warps_of(K);
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ std::uint64_t ready[warps][stages];
    reads_early(); // weights
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, stage_bytes = 2 * row_bytes(K, slice);
    // Pairs of rows, the same number for each CTA but for one; its warps take them in turn.
    const int      n_pairs  = all.first_row[all.n] / 2;
    const auto     begin_of = [&](unsigned block) { return int(std::int64_t(n_pairs) * block / gridDim.x); };
    const int      end = begin_of(blockIdx.x + 1), first = begin_of(blockIdx.x) + warp;
    unsigned char* pipeline = memory + warp * stages * stage_bytes;
    unsigned char* xs       = memory + warps * stages * stage_bytes;
    if (lane == 0) {
        for (int s = 0; s < stages; s++) mbarrier_init(&ready[warp][s], 1);
        mbarrier_init_fence();
    }
    __syncwarp();

    struct Place {
        const Projection& projection;
        std::int64_t      row;
    };
    const auto place_of = [&](int pair, int r) {
        if (Gated) return Place{all.projection[r], pair};
        const int which = all.which(pair * 2);
        return Place{all.projection[which], pair * 2 - all.first_row[which] + r};
    };
    // The next stage to load; the first lane starts the copies.
    int        next_pair = first, next_base = 0;
    const auto load_stage = [&](int stage) {
        if (next_pair >= end) return;
        if (lane == 0) {
            const int      n  = min(slice, cols - next_base);
            unsigned char* to = pipeline + stage * stage_bytes;
            std::uint64_t* b  = &ready[warp][stage];
            mbarrier_arrive_expect_tx(b, unsigned(2 * row_bytes(K, n)));
            const Place of[2] = {place_of(next_pair, 0), place_of(next_pair, 1)};
            const auto  copy  = [&](const void* const Weight::* from, int (*bytes)(Kind, int)) {
                if (bytes(K, 256) == 0) return;
                for (int r = 0; r < 2; r++, to += bytes(K, slice))
                    tma_copy_bulk(to,
                                    static_cast<const unsigned char*>(of[r].projection.weight.*from) +
                                        of[r].row * bytes(K, cols) + bytes(K, next_base),
                                    unsigned(bytes(K, n)), b);
            };
            copy(&Weight::data, data_bytes);
            copy(&Weight::scales, scale_bytes);
            copy(&Weight::mins, min_bytes);
        }
        next_base += slice;
        if (next_base >= cols) next_base = 0, next_pair += warps;
    };
    for (int s = 0; s < stages; s++) load_stage(s);
    wait_for_inputs();
    QuantisedX quantised{};
    const auto read = [&](int g) { return reinterpret_cast<const uint4*>(x)[g]; };
    if constexpr (K == kind_f16) {
        for_each_word(read, cols / 8, [&](int g, const uint4& v) { reinterpret_cast<uint4*>(xs)[g] = v; });
    } else {
        quantised = quantised_x_in(xs, K, cols);
        for_each_word(read, cols / 8, [&](int g, const uint4& v) { quantise_x<K>(g, v, quantised); });
    }
    __syncthreads();

    PipelineState<stages> at;
    for (int pair = first; pair < end; pair += warps) {
        float sum[2] = {};
        for (int base = 0; base < cols; base += slice) {
            mbarrier_wait(&ready[warp][at.stage], at.phase);
            accumulate_stage<K, 2>(pipeline + at.stage * stage_bytes, slice, xs, quantised, base,
                                   min(slice, cols - base), sum);
            __syncwarp(); // all lanes have read it
            load_stage(at.stage);
            at.advance();
        }
        float value[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const Place of = place_of(pair, r);
            value[r]       = warp_sum(sum[r]) + (of.projection.bias ? of.projection.bias[of.row] : 0.0f);
            if (Gated || lane != 0) continue;
            store_result(of.projection, of.row, value[r]);
        }
        if (Gated && lane == 0)
            static_cast<__half*>(all.projection[0].out)[pair] = to_finite(gated(activation, value[0], value[1]));
    }
#endif
}

template <Kind K>
bool launch(const __half* x, int cols, const JoinedProjections& all, bool gated, Activation activation, Context& gpu) {
    const int room      = shared_budget - x_bytes(K, cols);
    const int max_slice = room / (warps_of(K) * stages * 2 * row_bytes(K, unit_cols(K))) * unit_cols(K);
    if (max_slice <= 0) return false;
    const int n_slices = (cols + max_slice - 1) / max_slice, unit = unit_cols(K),
              slice   = ((cols + n_slices - 1) / n_slices + unit - 1) / unit * unit,
              bytes   = warps_of(K) * stages * 2 * row_bytes(K, slice) + x_bytes(K, cols);
    const auto kernel = gated ? gemv_tma_kernel<K, true> : gemv_tma_kernel<K, false>;
    prepare_kernel(gpu, kernel, warps_of(K) * 32, shared_budget);
    run_kernel(kernel, dim3(unsigned(std::min(gpu.n_sms, all.first_row[all.n] / 2))), unsigned(warps_of(K) * 32),
               std::size_t(bytes), gpu, x, cols, slice, all, activation);
    return true;
}

bool launch_kind(Kind kind, const __half* x, int cols, const JoinedProjections& all, bool gated, Activation activation,
                 Context& gpu) {
    if (!gpu.sm90 || cols % (kind == kind_f16 ? 8 : 256) != 0) return false;
    switch (kind) {
        case kind_f16: return launch<kind_f16>(x, cols, all, gated, activation, gpu);
        case kind_i8: return launch<kind_i8>(x, cols, all, gated, activation, gpu);
        case kind_i8_float: return launch<kind_i8_float>(x, cols, all, gated, activation, gpu);
        case kind_i8_float_min: return launch<kind_i8_float_min>(x, cols, all, gated, activation, gpu);
        case kind_q4_k: return launch<kind_q4_k>(x, cols, all, gated, activation, gpu);
    }
    return false;
}

} // namespace

bool gemv_tma(Kind kind, const __half* x, int cols, const JoinedProjections& all, Context& gpu) {
    for (int k = 0; k < all.n; k++)
        if (all.projection[k].weight.rows % 2 != 0) return false;
    return launch_kind(kind, x, cols, all, false, Activation::silu, gpu);
}

bool gemv_gated(const Half* x, const Projection& gate, const Projection& up, Activation activation, Context& gpu) {
    const Projection  list[2] = {gate, up};
    const Weight&     w       = gate.weight;
    JoinedProjections all{};
    return is_regular(w) && is_regular(up.weight) && w.rows == up.weight.rows && take_same_form(list, 2, all) == 2 &&
           launch_kind(kind_of(w), reinterpret_cast<const __half*>(x), int(w.cols), all, true, activation, gpu);
}

} // namespace quire::cuda
