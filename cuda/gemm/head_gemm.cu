// GEMMs of the heads of latent attention: each head multiplies a part of its columns with a matrix of its own, and keeps the
// others. On tensor cores (mma.m16n8k16): a CTA takes 64 rows of one head's weights and 16 or 64 tokens, in steps of 64 columns,
// double-buffered by cp.async. Few tokens are limited by reading the weights, which are small.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "../epilogue.cuh"
#include "../kernels.h"
#include "../ptx/cp_async.cuh"
#include "../ptx/mma.cuh"
#include "../warp.cuh"

namespace quire::cuda {

namespace {

constexpr int N = 64, K = 64, stride = K + 8; // rows of the weights and columns of a step; no bank conflicts

// M: tokens, 16 or 64.
template <int M>
__global__ void __launch_bounds__(128) head_gemm_kernel(HeadGemm op, int n_tokens) {
    wait_for_inputs();
    constexpr int tiles = M == 64 ? N / 8 : N / 32; // of 8 rows of the weights, for a warp
    __shared__ __align__(16) __half xs[2][M * stride], ws[2][N * stride];
    const int cols = int(op.weight.cols), rows = int(op.weight.rows) / op.n_heads, kept = op.x_dim - cols,
              out_dim = rows + kept;
    const int head = blockIdx.y, n0 = int(blockIdx.x) * N, m0 = int(blockIdx.z) * M;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, m = M == 64 ? warp * 16 : 0,
              n        = M == 64 ? 0 : warp * 16;
    const auto* x      = reinterpret_cast<const __half*>(op.x) + head * op.x_dim;
    auto*       out    = reinterpret_cast<__half*>(op.out) + head * out_dim;
    const auto* weight = static_cast<const __half*>(op.weight.data) + std::int64_t(head) * rows * cols;
    const auto  load   = [&](int k) {
        for (int i = threadIdx.x; i < (M + N) * (K / 8); i += 128) {
            const int r = i / (K / 8), c = i % (K / 8) * 8, col = k * K + c;
            if (r < M) {
                const bool valid = m0 + r < n_tokens && col < cols;
                cp_async(&xs[k % 2][r * stride + c],
                            x + (valid ? std::int64_t(m0 + r) * op.n_heads * op.x_dim + col : 0), valid);
            } else {
                const bool valid = n0 + r - M < rows && col < cols;
                cp_async(&ws[k % 2][(r - M) * stride + c], weight + (valid ? std::int64_t(n0 + r - M) * cols + col : 0),
                            valid);
            }
        }
    };
    const int steps         = (cols + K - 1) / K;
    float     sum[tiles][4] = {};
    load(0);
    cp_async_commit();
    for (int k = 0; k < steps; k++) {
        if (k + 1 < steps) load(k + 1);
        cp_async_commit();
        cp_async_wait<1>();
        __syncthreads();
#pragma unroll
        for (int c = 0; c < K; c += 32) {
            std::uint32_t low[4], high[4];
            const __half* at = &xs[k % 2][(m + lane % 16) * stride + c + lane / 16 * 8];
            ldmatrix_x4(low, at);
            ldmatrix_x4(high, at + 16);
#pragma unroll
            for (int t = 0; t < tiles; t++) {
                std::uint32_t b[4];
                ldmatrix_x4(b, &ws[k % 2][(n + t * 8 + lane % 8) * stride + c + lane / 8 * 8]);
                mma_m16n8k16(sum[t], low, b[0], b[1]);
                mma_m16n8k16(sum[t], high, b[2], b[3]);
            }
        }
        __syncthreads(); // the other buffer is loaded next
    }
    const std::int64_t row_stride = std::int64_t(op.n_heads) * out_dim;
#pragma unroll
    for (int t = 0; t < tiles; t++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int token = m0 + m + lane / 4 + 8 * h, row = n0 + n + t * 8 + lane % 4 * 2;
            if (token < n_tokens && row < rows)
                *reinterpret_cast<std::uint32_t*>(out + token * row_stride + row) =
                    pack_finite(sum[t][2 * h], sum[t][2 * h + 1]);
        }
    if (blockIdx.x == 0)
        for (int i = threadIdx.x; i < min(M, n_tokens - m0) * kept; i += 128) {
            const int token = m0 + i / kept, c = i % kept;
            out[token * row_stride + rows + c] = x[std::int64_t(token) * op.n_heads * op.x_dim + cols + c];
        }
}

// Weights of any form and shape: a warp for each row of a head and eight tokens.
constexpr int plain_tokens = 8, plain_warps = 8;

__global__ void __launch_bounds__(plain_warps * 32) head_gemm_plain_kernel(HeadGemm op, int n_tokens) {
    wait_for_inputs();
    const int cols = int(op.weight.cols), rows = int(op.weight.rows) / op.n_heads, kept = op.x_dim - cols,
              out_dim = rows + kept, lane = threadIdx.x % 32;
    const int head = blockIdx.y, row = int(blockIdx.x) * plain_warps + int(threadIdx.x) / 32,
              first = int(blockIdx.z) * plain_tokens, n = min(plain_tokens, n_tokens - first);
    const auto* x   = reinterpret_cast<const __half*>(op.x) + (std::int64_t(first) * op.n_heads + head) * op.x_dim;
    auto*       out = reinterpret_cast<__half*>(op.out) + (std::int64_t(first) * op.n_heads + head) * out_dim;
    if (row >= out_dim) return;
    if (row >= rows) { // is kept
        if (lane < n)
            out[std::int64_t(lane) * op.n_heads * out_dim + row] =
                x[std::int64_t(lane) * op.n_heads * op.x_dim + cols + row - rows];
        return;
    }
    float sum[plain_tokens] = {};
    for (int c = lane; c < cols; c += 32) {
        const float w = weight_at(op.weight, std::int64_t(head) * rows + row, c);
#pragma unroll
        for (int t = 0; t < plain_tokens; t++)
            if (t < n) sum[t] += w * __half2float(x[std::int64_t(t) * op.n_heads * op.x_dim + c]);
    }
#pragma unroll
    for (int t = 0; t < plain_tokens; t++) {
        const float total = warp_sum(sum[t]);
        if (t < n && lane == 0) out[std::int64_t(t) * op.n_heads * out_dim + row] = to_finite(total);
    }
}

} // namespace

bool is_regular(const HeadGemm& op) {
    const std::int64_t rows = op.weight.rows / op.n_heads;
    return op.weight.form == WeightForm::f16 && op.weight.cols % 8 == 0 && op.x_dim % 8 == 0 && rows % 2 == 0;
}

void head_gemm(const HeadGemm& op, std::int64_t n, Context& gpu) {
    const int  rows = int(op.weight.rows) / op.n_heads, out_dim = rows + op.x_dim - int(op.weight.cols);
    const auto grid = [&](int per_cta, int all_rows, int tokens) {
        return dim3(unsigned((all_rows + per_cta - 1) / per_cta), unsigned(op.n_heads),
                    unsigned((n + tokens - 1) / tokens));
    };
    if (!is_regular(op))
        run_kernel(head_gemm_plain_kernel, grid(plain_warps, out_dim, plain_tokens), plain_warps * 32, 0, gpu, op,
                   int(n));
    else if (n <= 16) run_kernel(head_gemm_kernel<16>, grid(N, rows, 16), 128, 0, gpu, op, int(n));
    else run_kernel(head_gemm_kernel<64>, grid(N, rows, 64), 128, 0, gpu, op, int(n));
}

} // namespace quire::cuda
