// A router's scores of many tokens, on tensor cores: x · weightᵀ, of fp16 and float32. A weight is the sum of two fp16 numbers, the second one
// times 2048, so that 22 bits of it count, and the sums are float32. A CTA has 64 tokens and 64 experts; a warp all of the tokens and 16
// of the experts, whose weights it splits.
//
// Bytes: x once for 64 experts, the weights once for 64 tokens, from the L2.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "../ptx/cp_async.cuh"
#include "../ptx/mma.cuh"
#include "experts.cuh"

namespace quire::cuda {

namespace {

constexpr int tile_tokens = 64, tile_experts = 64, tile_cols = 64, score_warps = 4, stages = 3;
constexpr int x_pitch = tile_cols + 8, weight_pitch = tile_cols + 8;

struct Stage {
    __half x[tile_tokens * x_pitch];
    float  weight[tile_experts * weight_pitch];
};

// Two neighbouring weights as two fp16 each: what is rounded, and 2048 times the rest.
__device__ void split(float2 w, std::uint32_t& high, std::uint32_t& low) {
    high               = pack_finite(w.x, w.y);
    const float2 taken = as_float2(high);
    low                = pack_finite((w.x - taken.x) * 2048, (w.y - taken.y) * 2048);
}

__global__ void __launch_bounds__(score_warps * 32) scores_kernel(Route op, int n_tokens, float* scores) {
    extern __shared__ __align__(16) unsigned char memory[];
    wait_for_inputs();
    auto*      all  = reinterpret_cast<Stage*>(memory);
    const int  lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, cols = op.cols;
    const int  first_token = int(blockIdx.x) * tile_tokens, first_expert = int(blockIdx.y) * tile_experts;
    const auto load = [&](int step) {
        if (step * tile_cols < cols) {
            Stage& to = all[step % stages];
            for (int i = int(threadIdx.x); i < tile_tokens * tile_cols / 8; i += score_warps * 32) {
                const int row = i / (tile_cols / 8), col = i % (tile_cols / 8) * 8,
                          t = min(first_token + row, n_tokens - 1);
                cp_async(to.x + row * x_pitch + col,
                         reinterpret_cast<const __half*>(op.x) + std::int64_t(t) * cols + step * tile_cols + col);
            }
            for (int i = int(threadIdx.x); i < tile_experts * tile_cols / 4; i += score_warps * 32) {
                const int row = i / (tile_cols / 4), col = i % (tile_cols / 4) * 4,
                          e = min(first_expert + row, op.n_experts - 1);
                cp_async(to.weight + row * weight_pitch + col,
                         op.weight + std::int64_t(e) * cols + step * tile_cols + col);
            }
        }
        cp_async_commit();
    };
    float high[4][2][4] = {}, low[4][2][4] = {}; // [16 tokens][8 experts]
    for (int step = 0; step < stages - 1; step++) load(step);
    for (int step = 0; step * tile_cols < cols; step++) {
        cp_async_wait<stages - 2>();
        __syncthreads();
        load(step + stages - 1); // into the stage that was used before
        const Stage& from = all[step % stages];
#pragma unroll
        for (int k = 0; k < tile_cols; k += 16) {
            std::uint32_t b_high[2][2], b_low[2][2];
#pragma unroll
            for (int j = 0; j < 2; j++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    split(*reinterpret_cast<const float2*>(from.weight + (warp * 16 + j * 8 + lane / 4) * weight_pitch +
                                                           k + half * 8 + lane % 4 * 2),
                          b_high[j][half], b_low[j][half]);
#pragma unroll
            for (int m = 0; m < 4; m++) {
                std::uint32_t a[4];
                ldmatrix_x4(a, from.x + (m * 16 + lane % 16) * x_pitch + k + lane / 16 * 8);
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    mma_m16n8k16(high[m][j], a, b_high[j][0], b_high[j][1]);
                    mma_m16n8k16(low[m][j], a, b_low[j][0], b_low[j][1]);
                }
            }
        }
    }
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int t = first_token + m * 16 + lane / 4 + i / 2 * 8,
                          e = first_expert + warp * 16 + j * 8 + lane % 4 * 2 + i % 2;
                if (t < n_tokens && e < op.n_experts)
                    scores[std::int64_t(t) * op.n_experts + e] =
                        (high[m][j][i] + low[m][j][i] / 2048) * op.score_scale + (op.bias ? op.bias[e] : 0.0f);
            }
}

} // namespace

bool can_score_tiles(const Route& op, std::int64_t n_tokens) {
    return !op.in_order && n_tokens >= 256 && op.cols % tile_cols == 0;
}

void score_tiles(const Route& op, std::int64_t n_tokens, float* scores, Context& gpu) {
    constexpr int bytes  = stages * sizeof(Stage);
    const auto    blocks = [](std::int64_t n, int each) { return unsigned((n + each - 1) / each); };
    prepare_kernel(gpu, scores_kernel, score_warps * 32, bytes);
    run_kernel(scores_kernel, dim3(blocks(n_tokens, tile_tokens), blocks(op.n_experts, tile_experts)), score_warps * 32,
               bytes, gpu, op, int(n_tokens), scores);
}

} // namespace quire::cuda
