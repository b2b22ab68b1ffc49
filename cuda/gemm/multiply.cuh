// How two warpgroups multiply a tile of 128 rows of weights by N rows of x, on Hopper: both come through pipelines in shared memory, x in
// stages of 64 columns. fp16 weights are an operand of wgmma there; quantised ones come as they are in memory and become fp16 in
// registers (unpack.cuh). A warp has 16 of the rows, a thread the sums of two: rows lane / 4 and lane / 4 + 8.
//
// A layout L says what the pipelines hold: weight_stages and x_stages, weight_bytes and x_bytes of a stage, and chunks, the stages of x
// in a unit of columns: 1 with fp16 weights, 4 with quantised ones.
#pragma once

#include "../pipeline.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/wgmma.cuh"
#include "unpack.cuh"

namespace quire::cuda {

namespace {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The state of both pipelines.
template <class L>
struct PipelinePosition {
    PipelineState<L::weight_stages> w;
    PipelineState<L::x_stages>      x;
};

// `n` units of fp16 weights: d = x · weightsᵀ.
template <int N, class L>
__device__ void multiply(int n, const Pipeline<L::weight_stages>& weights, const Pipeline<L::x_stages>& xs,
                         PipelinePosition<L>& at, float (&d)[N / 2]) {
    const int           group  = uniform(int(threadIdx.x) / 128);
    const bool          leader = threadIdx.x % 128 == 0;
    const std::uint64_t w0 = matrix_descriptor(shared_address(weights.memory) + unsigned(group) * L::weight_bytes / 2,
                                               16, 1024),
                        x0 = matrix_descriptor(shared_address(xs.memory), 16, 1024);
    int        released_w = 0, released_x = 0; // stages that the previous wgmma reads
    const auto free = [&] {
        if (leader) weights.consumer_release(released_w), xs.consumer_release(released_x);
    };
    for (int i = 0; i < n; i++) {
        weights.consumer_wait(at.w);
        xs.consumer_wait(at.x);
        const std::uint64_t w = advance(w0, unsigned(uniform(at.w.stage)) * L::weight_bytes),
                            x = advance(x0, unsigned(uniform(at.x.stage)) * L::x_bytes);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < tile_k / 16; k++)
            wgmma_ss<N>(d, advance(w, unsigned(k) * 32), advance(x, unsigned(k) * 32), k > 0 || i > 0);
        wgmma_commit();
        if (i > 0) {
            wgmma_wait<1>();
            free();
        }
        released_w = at.w.stage, released_x = at.x.stage;
        at.w.advance(), at.x.advance();
    }
    wgmma_wait<0>();
    wgmma_pin(d);
    free();
}

// `n` units of quantised weights from unit `first` on: d += x · weightsᵀ, still to be multiplied by unscale. The weights become fp16 while
// the tensor cores multiply the columns before.
template <int N, class L, Kind K>
__device__ void multiply_quantised(const ScaleRows& rows, int first, int n, const Pipeline<L::weight_stages>& weights,
                                   const Pipeline<L::x_stages>& xs, PipelinePosition<L>& at, float (&d)[N / 2]) {
    constexpr int       batch = N >= 64 ? 1 : 4, chunks = stage_chunks(K), stages = L::chunks / chunks; // of a unit
    const int           warp = uniform(int(threadIdx.x) / 32), lane = int(threadIdx.x) % 32;
    const bool          leader     = threadIdx.x % 128 == 0;
    const unsigned      w0         = shared_address(weights.memory) + unsigned(warp * 16) * stage_row_bytes(K);
    const std::uint64_t x0         = matrix_descriptor(shared_address(xs.memory), 16, 1024);
    const int           last_stage = (rows.cols - 1) / (64 * chunks); // beyond it the weights are 0
    Unpack<K>           unpack;
    unpack.begin(rows);
    unpack.template fetch<0>(first * stages);
    std::uint32_t a[2][batch][4];
    int           released = -1; // the stage of x that the wgmma before read
    // The next stage of weights, `stage` of its unit, and the scales of the one after it.
    const auto begin_stage = [&]<int Stage>(std::integral_constant<int, Stage>, int following) {
        weights.consumer_wait(at.w);
        const unsigned address = w0 + unsigned(at.w.stage) * L::weight_bytes;
        unpack.stage(address, lane);
        unpack.load(address, 0, lane);
        unpack.template fetch<(Stage + 1) % stages>(min(following, last_stage));
    };
    const auto multiply_stage = [&]<int Stage>(std::integral_constant<int, Stage>, int unit) {
#pragma unroll
        for (int c = 0; c < chunks; c++) {
            unpack.template scale<Stage>(c);
            xs.consumer_wait(at.x);
            const std::uint64_t x = advance(x0, unsigned(uniform(at.x.stage)) * L::x_bytes);
#pragma unroll
            for (int s = 0; s < 4; s += batch) {
                auto& now = a[(c * 4 + s) / batch % 2];
#pragma unroll
                for (int i = 0; i < batch; i++) unpack.words(s + i, now[i]);
                if (s + batch == 4) { // the chunk's bytes are used: the next chunk's
                    if (c + 1 < chunks) unpack.load(w0 + unsigned(at.w.stage) * L::weight_bytes, c + 1, lane);
                    else {
                        __syncwarp();
                        if (lane == 0) weights.consumer_release(at.w.stage);
                        at.w.advance();
                        if (Stage + 1 < stages || unit + 1 < first + n)
                            begin_stage(std::integral_constant<int, (Stage + 1) % stages>{}, unit * stages + Stage + 2);
                    }
                }
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < batch; i++) wgmma_rs_rows<N>(d, now[i], advance(x, unsigned(s + i) * 32));
                wgmma_commit();
                wgmma_wait<1>();
                if (s == 0 && released >= 0 && leader) xs.consumer_release(released);
            }
            released = at.x.stage;
            at.x.advance();
        }
    };
    begin_stage(std::integral_constant<int, 0>{}, first * stages + 1);
    for (int unit = first; unit < first + n; unit++) {
        multiply_stage(std::integral_constant<int, 0>{}, unit);
        if constexpr (stages == 2) multiply_stage(std::integral_constant<int, 1>{}, unit);
    }
    wgmma_wait<0>();
    wgmma_pin(d);
    if (leader) xs.consumer_release(released);
}

#endif

} // namespace

} // namespace quire::cuda
