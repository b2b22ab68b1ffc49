// LoRA adapters: out += Σ factor · scale · (x · aᵀ) · bᵀ over the adapters of a row's sequence, in two launches: x · aᵀ for all ranks of all
// pairs, then the product with b. A CTA has some rows, so that a matrix is read once for all of them; a row that runs without the adapter is
// left out.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "adapters.h"
#include "epilogue.cuh"
#include "warp.cuh"

namespace quire::cuda {

namespace {

constexpr int lora_rows = 8, lora_warps = 8, lora_threads = 32 * lora_warps;
constexpr int lora_ranks = 64; // of a pair that stand in shared memory at a time

__device__ float factor_of(const LoraStep& step, std::int64_t row, std::int64_t rows, int adapter) {
    return row < rows ? step.factors[std::int64_t(step.sequences[row]) * step.n_adapters + adapter] : 0.0f;
}

// A warp for each rank.
__global__ void __launch_bounds__(lora_threads) lora_down_kernel(LoraAdd op, LoraStep step, std::int64_t rows) {
    wait_for_inputs();
    const int rank = int(blockIdx.y * lora_warps + threadIdx.x / 32), lane = int(threadIdx.x % 32);
    if (rank >= op.ranks) return;
    int p = 0;
    while (p + 1 < op.n_pairs && op.pairs[p + 1].first <= rank) p++;
    const LoraPair     pair = op.pairs[p];
    const std::int64_t row  = std::int64_t(blockIdx.x) * lora_rows;
    bool               used[lora_rows], any = false;
#pragma unroll
    for (int i = 0; i < lora_rows; i++) any |= used[i] = factor_of(step, row + i, rows, pair.adapter) != 0;
    if (!any) return;
    const int of_pair = rank - pair.first;
    if (op.x == nullptr) {
#pragma unroll
        for (int i = 0; i < lora_rows; i++)
            if (used[i] && lane == i)
                op.low[(row + i) * op.ranks + rank] = pair.a[std::int64_t(op.tokens[row + i]) * pair.rank + of_pair];
        return;
    }
    const float* const a              = pair.a + std::int64_t(of_pair) * op.in;
    const auto* const  x              = reinterpret_cast<const __half*>(op.x) + row * op.in;
    float              sum[lora_rows] = {};
    if (op.in % 4 == 0) {
        for (std::int64_t k = 4 * lane; k < op.in; k += 128) {
            const float4 w = *reinterpret_cast<const float4*>(a + k);
#pragma unroll
            for (int i = 0; i < lora_rows; i++) {
                if (!used[i]) continue;
                const uint2  four = *reinterpret_cast<const uint2*>(x + i * op.in + k);
                const float2 low = as_float2(four.x), high = as_float2(four.y);
                sum[i] = fmaf(low.x, w.x, fmaf(low.y, w.y, fmaf(high.x, w.z, fmaf(high.y, w.w, sum[i]))));
            }
        }
    } else {
        for (std::int64_t k = lane; k < op.in; k += 32)
#pragma unroll
            for (int i = 0; i < lora_rows; i++)
                if (used[i]) sum[i] = fmaf(__half2float(x[i * op.in + k]), a[k], sum[i]);
    }
#pragma unroll
    for (int i = 0; i < lora_rows; i++) {
        const float all = warp_sum(sum[i]);
        if (used[i] && lane == 0) op.low[(row + i) * op.ranks + rank] = all;
    }
}

// A thread for each column.
__global__ void __launch_bounds__(lora_threads) lora_up_kernel(LoraAdd op, LoraStep step, std::int64_t rows) {
    wait_for_inputs();
    __shared__ float   low[lora_rows][lora_ranks];
    const std::int64_t row    = std::int64_t(blockIdx.x) * lora_rows,
                       column = std::int64_t(blockIdx.y) * lora_threads + threadIdx.x;
    float add[lora_rows]      = {};
    bool  touched[lora_rows]  = {};
    for (int p = 0; p < op.n_pairs; p++) {
        const LoraPair pair = op.pairs[p];
        float          factor[lora_rows];
        bool           any = false;
#pragma unroll
        for (int i = 0; i < lora_rows; i++) {
            factor[i] = factor_of(step, row + i, rows, pair.adapter);
            any |= factor[i] != 0, touched[i] |= factor[i] != 0;
        }
        if (!any) continue; // all threads of the CTA
        float sum[lora_rows] = {};
        for (int first = 0; first < pair.rank; first += lora_ranks) {
            const int n = min(lora_ranks, pair.rank - first);
            __syncthreads(); // all are done with the ranks before
            for (int j = int(threadIdx.x); j < lora_rows * n; j += lora_threads) {
                const std::int64_t from = row + j / n;
                low[j / n][j % n]       = factor_of(step, from, rows, pair.adapter) != 0
                                              ? op.low[from * op.ranks + pair.first + first + j % n]
                                              : 0.0f;
            }
            __syncthreads();
            if (column >= op.cols) continue;
            const float* const b = pair.b + column * pair.rank + first;
            for (int r = 0; r < n; r++)
#pragma unroll
                for (int i = 0; i < lora_rows; i++) sum[i] = fmaf(low[i][r], b[r], sum[i]);
        }
#pragma unroll
        for (int i = 0; i < lora_rows; i++)
            if (factor[i] != 0) add[i] = fmaf(factor[i] * pair.scale, sum[i], add[i]);
    }
    if (column >= op.cols) return;
#pragma unroll
    for (int i = 0; i < lora_rows; i++) {
        if (!touched[i]) continue;
        const std::int64_t at = (row + i) * op.cols + column;
        if (op.out_is_float) static_cast<float*>(op.out)[at] += add[i];
        else {
            __half* const to = static_cast<__half*>(op.out) + at;
            *to              = to_finite(__half2float(*to) + add[i]);
        }
    }
}

} // namespace

void lora_add(const LoraAdd& op, const LoraStep& step, std::int64_t rows, Context& gpu) {
    if (rows == 0 || op.ranks == 0) return;
    const auto tiles = [](std::int64_t n, int tile) { return unsigned((n + tile - 1) / tile); };
    run_kernel(lora_down_kernel, dim3(tiles(rows, lora_rows), tiles(op.ranks, lora_warps)), lora_threads, 0, gpu, op,
               step, rows);
    run_kernel(lora_up_kernel, dim3(tiles(rows, lora_rows), tiles(op.cols, lora_threads)), lora_threads, 0, gpu, op,
               step, rows);
}

} // namespace quire::cuda
