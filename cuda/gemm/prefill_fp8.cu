// Prefill GEMM in e4m3 for Hopper: prefill_sm90.cu with tiles of 256 tokens × 128 rows of the weights, in steps of 128 columns. Two consumer
// warpgroups have 128 tokens each, as two halves of 64, whose products of a step go into fresh accumulators; these are then scaled by the
// block of the weights and added to the sums in float32, because the tensor cores would keep only some 14 bits of a long sum. While one
// warpgroup adds, the other one multiplies. The scale of a token is the epilogue's.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "../context.cuh"
#include "../fp8.cuh"
#include "../kernels.h"
#include "../pipeline.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/wgmma.cuh"
#include "../warp.cuh"
#include "prefill_epilogue.cuh"

namespace quire::cuda {

namespace {

constexpr int M = 256, N = fp8_block, K = fp8_block, stages = 4; // of a tile, and a step; of the pipeline
[[maybe_unused]] constexpr int x_bytes = M * K, stage_bytes = (M + N) * K;

struct Maps {
    CUtensorMap x, rest, weight[max_projections];
};

struct Params {
    PrefillResults results;
    const float *  x_scales, *weight_scales[max_projections];
    int            first_tile_n[max_projections + 1]; // tiles along N: of projections one after another
    int            k_tiles, tiles_m, n_tiles;         // steps; tiles along M; all tiles
    RestOfTokens   rest;
};

// A CTA for a 128 × 128 block.
__global__ void weight_to_fp8_kernel(const __half* weight, int rows, int cols, Fp8Matrix out) {
    wait_for_inputs();
    __shared__ float shared[32];
    const int        first_row = int(blockIdx.y) * fp8_block, first_col = int(blockIdx.x) * fp8_block,
              n_cols = min(fp8_block, cols - first_col), n = min(fp8_block, rows - first_row) * n_cols;
    const auto at   = [&](int i) { return std::int64_t(first_row + i / n_cols) * cols + first_col + i % n_cols; };
    float      most = 0;
    for (int i = int(threadIdx.x); i < n; i += int(blockDim.x))
        most = max_or_nan(most, fabsf(__half2float(weight[at(i)])));
    const Fp8Scale scale(cta_max_or_nan(most, shared));
    if (threadIdx.x == 0) out.scales[blockIdx.y * gridDim.x + blockIdx.x] = scale.scale;
    for (int i = int(threadIdx.x); i < n; i += int(blockDim.x))
        out.codes[at(i)] = scale.code(__half2float(weight[at(i)]));
}

// A CTA for a row.
__global__ void rows_to_fp8_kernel(const uint4* x, int words, Fp8Matrix out) {
    wait_for_inputs();
    __shared__ float   shared[32];
    const std::int64_t first = std::int64_t(blockIdx.x) * words;
    float              most  = 0;
    const auto         each  = [&](const auto& visit) {
        for (int i = int(threadIdx.x); i < words; i += int(blockDim.x)) {
            const uint4  w        = x[first + i];
            const float2 pairs[4] = {as_float2(w.x), as_float2(w.y), as_float2(w.z), as_float2(w.w)};
            visit(i, pairs);
        }
    };
    each([&](int, const float2(&pairs)[4]) {
#pragma unroll
        for (const float2& p : pairs) most = max_or_nan(most, max_or_nan(fabsf(p.x), fabsf(p.y)));
    });
    const Fp8Scale scale(cta_max_or_nan(most, shared));
    if (threadIdx.x == 0) out.scales[blockIdx.x] = scale.scale;
    each([&](int i, const float2(&pairs)[4]) {
        reinterpret_cast<uint2*>(out.codes)[first + i] = {scale.codes(pairs[0]) | scale.codes(pairs[1]) << 16,
                                                          scale.codes(pairs[2]) | scale.codes(pairs[3]) << 16};
    });
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

struct Tile {
    int projection, first_n, first_m; // first_n: of its weights; of gate and of up
};
template <Epilogue E>
__device__ Tile tile_of(const Params& params, int i) {
    constexpr int rows       = is_gated(E) ? N / 2 : N;
    const int     tile_n     = i / params.tiles_m;
    const int     projection = tile_n < params.first_tile_n[1] ? 0 : tile_n < params.first_tile_n[2] ? 1 : 2;
    return {projection, (tile_n - params.first_tile_n[projection]) * rows, i % params.tiles_m * M};
}

#endif

// D: head_dim of RoPE.
template <Epilogue E, int D>
__global__ void __launch_bounds__(384, 1)
    prefill_fp8_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Params params) {
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
        for (int i = first; i < params.n_tiles; i += step) {
            const Tile         t     = tile_of<E>(params, i);
            const bool         rest  = t.first_m == params.rest.first_m;
            const CUtensorMap& x_map = rest ? maps.rest : maps.x;
            const int          bytes = stage_bytes - (rest ? x_bytes - params.rest.rows * K : 0);
            for (int k = 0; k < params.k_tiles; k++) {
                pipeline.producer_acquire(at);
                mbarrier_arrive_expect_tx(&full[at.stage], unsigned(bytes));
                unsigned char *x = pipeline.memory + at.stage * stage_bytes, *w = x + x_bytes;
                tma_copy_2d(x, x_map, k * K, t.first_m, &full[at.stage]);
                tma_copy_2d(w, maps.weight[t.projection], k * K, t.first_n, &full[at.stage]);
                if (is_gated(E)) tma_copy_2d(w + N / 2 * K, maps.weight[1], k * K, t.first_n, &full[at.stage]);
                at.advance();
            }
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int           lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) % 128 / 32;
    const unsigned      at = shared_address(stage_memory);
    const std::uint64_t x0 = matrix_descriptor(at + unsigned(group) * (M / 2) * K, 16, 8 * K),
                        w0 = matrix_descriptor(at + x_bytes, 16, 8 * K);
    PipelineState<stages> now;
    for (int i = first; i < params.n_tiles; i += step) {
        const Tile   t          = tile_of<E>(params, i);
        const float* scale      = params.weight_scales[t.projection] + t.first_n / fp8_block * params.k_tiles;
        const float* up_scale   = params.weight_scales[1] + t.first_n / fp8_block * params.k_tiles;
        float        sum[2][64] = {};
        for (int k = 0; k < params.k_tiles; k++) {
            const float one = scale[k], other = is_gated(E) ? up_scale[k] : one;
            pipeline.consumer_wait(now);
            const std::uint64_t w = advance(w0, unsigned(now.stage * stage_bytes));
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const std::uint64_t x = advance(x0, unsigned(now.stage * stage_bytes + half * 64 * K));
                float               some[64];
                wgmma_fence();
                wgmma_e4m3<false>(some, x, w);
#pragma unroll
                for (int j = 1; j < K / 32; j++)
                    wgmma_e4m3<true>(some, advance(x, unsigned(j) * 32), advance(w, unsigned(j) * 32));
                wgmma_commit();
                wgmma_wait<0>();
                wgmma_pin(some);
                if (half == 1 && threadIdx.x % 128 == 0) pipeline.consumer_release(now.stage);
#pragma unroll
                for (int r = 0; r < 64; r++) sum[half][r] += some[r] * (r < 32 ? one : other);
            }
            now.advance();
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int   row  = t.first_m + group * (M / 2) + half * 64 + warp * 16 + lane / 4; // and row + 8
            const float low  = row < params.results.m ? params.x_scales[row] : 0,
                        high = row + 8 < params.results.m ? params.x_scales[row + 8] : 0;
#pragma unroll
            for (int r = 0; r < 64; r++) sum[half][r] *= r % 4 < 2 ? low : high;
            finish_tile<E, D, N>(sum[half], params.results, t.projection, t.first_n, row);
        }
    }
#endif
}

template <Epilogue E, int D = N>
void launch(const Maps& maps, const Params& params, int n_ctas, Context& gpu) {
    constexpr int shared = stages * (M + N) * K + 1024;
    prepare_kernel(gpu, prefill_fp8_kernel<E, D>, 384, shared);
    run_kernel(prefill_fp8_kernel<E, D>, dim3(unsigned(n_ctas)), 384, shared, gpu, maps, params);
}

bool encode(CUtensorMap& map, const std::uint8_t* codes, std::int64_t rows, std::int64_t cols, int box_rows) {
    return encode_tensor_map<2>(map, codes, CU_TENSOR_MAP_DATA_TYPE_UINT8, {cols, rows}, {cols}, {K, box_rows},
                                CU_TENSOR_MAP_SWIZZLE_128B);
}

} // namespace

bool has_fp8_gemm(const Context& gpu) { return gpu.sm90 && tensor_map_encoder() != nullptr; }

void weight_to_fp8(const Half* weight, std::int64_t rows, std::int64_t cols, const Fp8Matrix& out, Context& gpu) {
    const auto blocks = [](std::int64_t n) { return unsigned((n + fp8_block - 1) / fp8_block); };
    run_kernel(weight_to_fp8_kernel, dim3(blocks(cols), blocks(rows)), 256, 0, gpu,
               reinterpret_cast<const __half*>(weight), int(rows), int(cols), out);
}

void rows_to_fp8(const Half* x, std::int64_t rows, std::int64_t cols, const Fp8Matrix& out, Context& gpu) {
    run_kernel(rows_to_fp8_kernel, dim3(unsigned(rows)), 256, 0, gpu, reinterpret_cast<const uint4*>(x), int(cols / 8),
               out);
}

int run_fp8_gemm(const Operation* ops, int n_ops, const Fp8Matrix& x, const Plan& plan, Context& gpu) {
    const Operation& op         = ops[0];
    const bool       gated      = op.kind == Operation::gated_gemm;
    const bool       fused_rope = n_ops > 1 && match_prefill_gemm(ops, n_ops, gpu) == 2;
    const int        rows       = gated ? N / 2 : N; // of a tile's weights
    Params           params{};
    Maps             maps;
    params.results  = results_of(ops, fused_rope, plan);
    params.x_scales = x.scales;
    params.k_tiles  = int((op.cols + K - 1) / K);
    params.tiles_m  = int((op.rows + M - 1) / M);
    params.rest     = rest_of(op.rows, M);
    bool ok =
        encode(maps.x, x.codes, op.rows, op.cols, M) && encode(maps.rest, x.codes, op.rows, op.cols, params.rest.rows);
    for (int k = 0; k < max_projections; k++) {
        const Weight& w            = op.projection[k].weight;
        const bool    begins       = k < (gated ? 1 : op.n_projections);
        params.first_tile_n[k + 1] = params.first_tile_n[k] + (begins ? int((w.rows + rows - 1) / rows) : 0);
        params.weight_scales[k]    = w.fp8.scales;
        if (k < op.n_projections) ok = ok && encode(maps.weight[k], w.fp8.codes, w.rows, op.cols, rows);
    }
    params.n_tiles = params.first_tile_n[max_projections] * params.tiles_m;
    const auto run = fused_rope && params.results.rope.head_dim == 64  ? launch<Epilogue::rope_store, 64>
                     : fused_rope                                      ? launch<Epilogue::rope_store, 128>
                     : gated && op.activation == Activation::gelu_tanh ? launch<Epilogue::geglu>
                     : gated                                           ? launch<Epilogue::swiglu>
                                                                       : launch<Epilogue::store>;
    // Without tensor maps an invalid launch, which last_error() reports.
    run(maps, params, ok ? std::min(gpu.n_sms, params.n_tiles) : 0, gpu);
    return fused_rope ? 2 : 1;
}

} // namespace quire::cuda
