// Prefill GEMM for Hopper (fp16 weights, the many tokens of a prompt): a persistent, warp-specialised kernel with wgmma and
// TMA, fused with its epilogue: the activation of gate · up, or RoPE and KV store. One CTA per SM takes tiles of 128 tokens × 256 rows of the
// weights, in steps of 64 columns. Two consumer warpgroups multiply 64 tokens each; a producer warp loads x and weights, four
// stages ahead. CTAs that run at the same time use the same few weights, which stay in the L2 cache.
//
// Wave quantisation: the number of tiles is seldom a multiple of the number of CTAs, and 28 remaining tiles would take 132 CTAs
// as long as 132 tiles. So the last tiles, too few for all CTAs, are cut into strips with fewer rows of the weights, which take
// a half or a quarter of the time.
//
// A tile of gate and up has 128 rows of each, so that one thread has both sums of a result; likewise both of a RoPE pair. A sum
// is bit-identical whatever the tile and M.
//
// Limits: N and K are multiples of 8, results are fp16; RoPE on all of a head's 64 or 128 dimensions.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "../kernels.h"
#include "../pipeline.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/wgmma.cuh"
#include "../warp.cuh"
#include "prefill_epilogue.cuh"

namespace quire::cuda {

namespace {

constexpr int M = 128, N = 256, stages = 4;          // tokens and rows of the weights of a tile; of the pipeline
constexpr int row_bytes                = tile_k * 2; // bytes of a tile's row in shared memory
[[maybe_unused]] constexpr int x_bytes = M * row_bytes, stage_bytes = (M + N) * row_bytes;

struct Maps {
    CUtensorMap x, rest;
    CUtensorMap weight[max_projections], strip[max_projections]; // half the rows of a tile, or of a strip
};

struct Params {
    PrefillResults results;
    int            first_tile_n[max_projections + 1]; // tiles along N: of projections one after another
    int            k_tiles;                           // steps of 64 columns
    int            tiles_m;                           // tiles along M
    RestOfTokens   rest;
    int            n_whole, n_all; // whole tiles; and with strips
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

struct Tile {
    int projection, first_n; // of its weights; of gate and of up
    int first_m;
};
template <Epilogue E, int Strips>
__device__ Tile tile_of(const Params& params, int i) {
    constexpr int rows   = is_gated(E) ? N / 2 : N;
    const int     strip  = i < params.n_whole ? 0 : (i - params.n_whole) % Strips,
              whole      = i < params.n_whole ? i : params.n_whole + (i - params.n_whole) / Strips,
              tile_n     = whole / params.tiles_m;
    const int projection = tile_n < params.first_tile_n[1] ? 0 : tile_n < params.first_tile_n[2] ? 1 : 2;
    return {projection, (tile_n - params.first_tile_n[projection]) * rows + strip * (rows / Strips),
            whole % params.tiles_m * M};
}

#endif

// Strips: into how many the last tiles are cut. D: head_dim of RoPE.
template <Epilogue E, int Strips, int D>
__global__ void __launch_bounds__(384, 1)
    prefill_gemm_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ unsigned char memory[];
    auto*                           stage_memory =
        reinterpret_cast<unsigned char*>((reinterpret_cast<std::uintptr_t>(memory) + 1023) / 1024 * 1024);
    __shared__ std::uint64_t full[stages], empty[stages];
    reads_early(); // nothing: barriers are made
    const Pipeline<stages> pipeline{stage_memory, full, empty};
    const int              group = uniform(int(threadIdx.x) / 128);
    if (threadIdx.x == 0) {
        pipeline.init(1, 2);
        mbarrier_init_fence();
    }
    __syncthreads();
    wait_for_inputs();
    const int first = int(blockIdx.x), step = int(gridDim.x);

    if (group == 2) {
        // 40 + 2 · 232 are the 3 · 168 registers of the launch.
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x != 256) return;
        PipelineState<stages> at = pipeline.producer_start();
        for (int i = first; i < params.n_all; i += step) {
            const Tile         t     = tile_of<E, Strips>(params, i);
            const bool         whole = i < params.n_whole;
            const CUtensorMap* map   = whole ? maps.weight : maps.strip;
            const int          half  = whole ? N / 2 : N / 2 / Strips; // of the rows of the weights
            const bool         rest  = t.first_m == params.rest.first_m;
            const CUtensorMap& x_map = rest ? maps.rest : maps.x;
            const int          bytes = (rest ? params.rest.rows * row_bytes : x_bytes) + 2 * half * row_bytes;
            for (int k = 0; k < params.k_tiles; k++) {
                pipeline.producer_acquire(at);
                mbarrier_arrive_expect_tx(&full[at.stage], unsigned(bytes));
                unsigned char *x = pipeline.memory + at.stage * stage_bytes, *w = x + x_bytes;
                tma_copy_2d(x, x_map, k * tile_k, t.first_m, &full[at.stage]);
                tma_copy_2d(w, map[t.projection], k * tile_k, t.first_n, &full[at.stage]);
                if (is_gated(E)) tma_copy_2d(w + half * row_bytes, map[1], k * tile_k, t.first_n, &full[at.stage]);
                else
                    tma_copy_2d(w + half * row_bytes, map[t.projection], k * tile_k, t.first_n + half, &full[at.stage]);
                at.advance();
            }
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int           lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
    const unsigned      at           = shared_address(stage_memory);
    const std::uint64_t x0           = matrix_descriptor(at + unsigned(group) * 64 * row_bytes, 16, 8 * row_bytes),
                        w0           = matrix_descriptor(at + x_bytes, 16, 8 * row_bytes);
    float                 sum[N / 2] = {};
    PipelineState<stages> now;
    const auto            release = [&](int s) {
        if (threadIdx.x % 128 == 0) pipeline.consumer_release(s);
    };
    const auto compute_tile = [&]<int Width>(std::integral_constant<int, Width>, const Tile& t) {
        int before = 0;
        for (int k = 0; k < params.k_tiles; k++) {
            pipeline.consumer_wait(now);
            const std::uint64_t x = advance(x0, unsigned(now.stage * stage_bytes)),
                                w = advance(w0, unsigned(now.stage * stage_bytes));
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < tile_k / 16; j++)
                wgmma_ss<Width>(sum, advance(x, unsigned(j) * 32), advance(w, unsigned(j) * 32), k + j);
            wgmma_commit();
            wgmma_wait<1>();
            if (k > 0) release(before);
            before = now.stage;
            now.advance();
        }
        wgmma_wait<0>();
        wgmma_pin(sum);
        release(before);

        finish_tile<E, D, Width>(sum, params.results, t.projection, t.first_n, t.first_m + warp * 16 + lane / 4);
    };
    for (int i = first; i < params.n_all; i += step) {
        const Tile t = tile_of<E, Strips>(params, i);
        if (i < params.n_whole) compute_tile(std::integral_constant<int, N>{}, t);
        else compute_tile(std::integral_constant<int, N / Strips>{}, t);
    }
#endif
}

template <Epilogue E, int Strips, int D = N>
void launch(const Maps& maps, const Params& params, int n_ctas, Context& gpu) {
    constexpr int shared = stages * (M + N) * row_bytes + 1024;
    prepare_kernel(gpu, prefill_gemm_kernel<E, Strips, D>, 384, shared);
    run_kernel(prefill_gemm_kernel<E, Strips, D>, dim3(unsigned(n_ctas)), 384, shared, gpu, maps, params);
}

} // namespace

int match_prefill_gemm(const Operation* ops, int n_ops, const Context& gpu) {
    if (n_ops < 1 || !gpu.sm90 || tensor_map_encoder() == nullptr) return 0;
    const Operation& op    = ops[0];
    const bool       gated = op.kind == Operation::gated_gemm;
    if ((op.kind != Operation::gemm && !gated) || op.cols % 8 != 0) return 0;
    if (gated && op.activation != Activation::silu && op.activation != Activation::gelu_tanh) return 0;
    for (int i = 0; i < op.n_projections; i++) {
        const Projection& p = op.projection[i];
        if (p.weight.rows % 8 != 0 || p.out_is_float) return 0;
        if (gated && (p.bias || p.weight.rows != op.projection[0].weight.rows)) return 0;
    }
    return n_ops > 1 && ops[1].kind == Operation::rope_and_store && rotates_results(ops[1].rope, op) &&
                   (ops[1].rope.head_dim == 64 || ops[1].rope.head_dim == 128)
               ? 2
               : 1;
}

int run_prefill_gemm(const Operation* ops, int n_ops, const Plan& plan, Context& gpu) {
    const Operation& op         = ops[0];
    const bool       gated      = op.kind == Operation::gated_gemm;
    const bool       fused_rope = n_ops > 1 && match_prefill_gemm(ops, n_ops, gpu) == 2;
    const int        rows       = gated ? N / 2 : N; // of a tile's weights
    Params           params{};
    Maps             maps;
    params.results = results_of(ops, fused_rope, plan);
    params.k_tiles = int((op.cols + tile_k - 1) / tile_k);
    params.tiles_m = int((op.rows + M - 1) / M);
    for (int k = 0; k < max_projections; k++) {
        const bool begins          = k < (gated ? 1 : op.n_projections);
        params.first_tile_n[k + 1] = params.first_tile_n[k] + (begins ? (params.results.rows[k] + rows - 1) / rows : 0);
    }
    // The last wave in whole tiles, in halves or in quarters, whichever takes the shortest time. A half takes more than half the
    // time.
    const int  n = params.first_tile_n[max_projections] * params.tiles_m, ctas = gpu.n_sms, last_wave = n % ctas;
    const auto time     = [&](int strips, double each) { return (last_wave * strips + ctas - 1) / ctas * each; };
    const int  D        = fused_rope ? params.results.rope.head_dim : 0;
    const bool quarters = D == 64 || (D == 0 && time(4, 0.33) < time(2, 0.55));
    const int  strips   = quarters ? 4 : 2;
    const bool cut      = time(strips, quarters ? 0.33 : 0.55) < time(1, 1);
    params.n_whole      = cut ? n - last_wave : n;
    params.n_all        = cut ? n - last_wave + last_wave * strips : n;
    params.rest         = rest_of(op.rows, M);
    bool ok             = encode_matrix(maps.x, op.x, op.rows, op.cols, M) &&
              encode_matrix(maps.rest, op.x, op.rows, op.cols, params.rest.rows);
    for (int k = 0; k < op.n_projections; k++) {
        const Weight& w = op.projection[k].weight;
        ok              = ok && encode_matrix(maps.weight[k], w.data, w.rows, op.cols, N / 2) &&
             encode_matrix(maps.strip[k], w.data, w.rows, op.cols, N / 2 / strips);
    }
    const auto run = D == 64    ? launch<Epilogue::rope_store, 4, 64>
                     : D == 128 ? launch<Epilogue::rope_store, 2, 128>
                     : gated && op.activation == Activation::gelu_tanh
                         ? (quarters ? launch<Epilogue::geglu, 4> : launch<Epilogue::geglu, 2>)
                     : gated ? (quarters ? launch<Epilogue::swiglu, 4> : launch<Epilogue::swiglu, 2>)
                             : (quarters ? launch<Epilogue::store, 4> : launch<Epilogue::store, 2>);
    // Without tensor maps an invalid launch, which last_error() reports.
    run(maps, params, ok ? std::min(ctas, params.n_all) : 0, gpu);
    return fused_rope ? 2 : 1;
}

} // namespace quire::cuda
