// GEMV, and GEMM with up to 8 tokens, on CUDA cores, limited by reading the weights: each weight is read once, in 16-byte
// words. A warp computes one or two rows of the weights for all tokens; the order of the sum is fixed. Weights: fp16, int8 with
// group scales, or Q4_K superblocks. cols (K) is a multiple of 8 (fp16), 32 (int8), 256 (Q4_K); gemm_plain() takes any other
// matrix.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "../epilogue.cuh"
#include "../kernels.h"
#include "../warp.cuh"
#include "gemv.cuh"
#include "gemv_rows.cuh"

namespace quire::cuda {

namespace {

constexpr int warps = 8; // of a CTA

// R neighbouring rows a warp; projections have a multiple of R rows. Deep: twice as many loads in flight, for matrices of so
// few rows that all CTAs run in one wave.
template <int NT, Kind K, int R, bool Deep>
__global__ void __launch_bounds__(warps * 32, NT > 1          ? 2
                                              : K == kind_f16 ? 5
                                              : Deep          ? 3
                                                              : 4)
    gemv_kernel(const __half* x, int m, int cols, JoinedProjections all) {
    using Rows = RowsOf<NT, K, R>;
    reads_early(); // weights
    const int row = (int(blockIdx.x) * warps + int(threadIdx.x) / 32) * R;
    if (row >= all.first_row[all.n]) {
        wait_for_inputs();
        return;
    }
    const int          which      = all.which(row);
    const Projection&  p          = all.projection[which];
    const std::int64_t r0         = row - all.first_row[which];
    float              sum[R][NT] = {};
    Rows               rows;
#pragma unroll
    for (int u = 0; u < Rows::ahead; u++) rows.load(p.weight, r0, 0, cols, u);
    wait_for_inputs();
    for (int base = 0; base < cols; base += Rows::step)
        if constexpr (Deep) {
            const Rows now = rows;
#pragma unroll
            for (int u = 0; u < Rows::ahead; u++) rows.load(p.weight, r0, base + Rows::step, cols, u);
#pragma unroll
            for (int u = 0; u < Rows::ahead; u++) now.add(x, base, cols, u, sum);
        } else if constexpr (K == kind_f16) { // long bursts of reads are fastest
#pragma unroll
            for (int u = 0; u < Rows::ahead; u++) rows.add(x, base, cols, u, sum);
#pragma unroll
            for (int u = 0; u < Rows::ahead; u++) rows.load(p.weight, r0, base + Rows::step, cols, u);
        } else { // more arithmetic per word: each register is refilled at once
#pragma unroll
            for (int u = 0; u < Rows::ahead; u++) {
                rows.add(x, base, cols, u, sum);
                rows.load(p.weight, r0, base + Rows::step, cols, u);
            }
        }
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int t = 0; t < NT; t++) {
            const float total = warp_sum(sum[r][t]) + (p.bias ? p.bias[r0 + r] : 0.0f);
            if (threadIdx.x % 32 != 0 || t >= m) continue;
            const std::int64_t at = t * p.weight.rows + r0 + r;
            store_result(p, at, total);
        }
}

template <int NT, int R>
void launch(Kind kind, const __half* x, int m, int cols, const JoinedProjections& all, Context& gpu) {
    const unsigned ctas = unsigned((all.first_row[all.n] / R + warps - 1) / warps);
    const auto     run  = [&](auto kernel) {
        // With several tokens so many loads are held in the L1 that the launch does not overlap kernels that leave little of it
        // (see skinny.cu).
        if (NT > 1) run_in_order(kernel, dim3(ctas), warps * 32, 0, gpu, x, m, cols, all);
        else run_kernel(kernel, dim3(ctas), warps * 32, 0, gpu, x, m, cols, all);
    };
    const auto choose = [&]<Kind K>() {
        if (NT == 1 && K != kind_f16 && int(ctas) < 4 * gpu.n_sms)
            run(gemv_kernel < NT, K, R, NT == 1 && K != kind_f16 >);
        else run(gemv_kernel<NT, K, R, false>);
    };
    switch (kind) {
        case kind_f16: choose.template operator()<kind_f16>(); break;
        case kind_i8: choose.template operator()<kind_i8>(); break;
        case kind_i8_float: choose.template operator()<kind_i8_float>(); break;
        case kind_i8_float_min: choose.template operator()<kind_i8_float_min>(); break;
        case kind_q4_k: choose.template operator()<kind_q4_k>(); break;
    }
}

// -- gemm_plain: any shape and form; a warp for each row of the weights and eight tokens, one weight a lane at a time

constexpr int plain_tokens = 8;

__global__ void __launch_bounds__(warps * 32) gemm_plain_kernel(const __half* x, int m, int cols, Projection p) {
    wait_for_inputs();
    const std::int64_t row   = std::int64_t(blockIdx.x) * warps + threadIdx.x / 32;
    const int          first = int(blockIdx.y) * plain_tokens, n = min(plain_tokens, m - first);
    if (row >= p.weight.rows) return;
    float sum[plain_tokens] = {};
    for (int c = int(threadIdx.x % 32); c < cols; c += 32) {
        const float w = weight_at(p.weight, row, c);
#pragma unroll
        for (int t = 0; t < plain_tokens; t++)
            if (t < n) sum[t] += w * __half2float(x[std::int64_t(first + t) * cols + c]);
    }
#pragma unroll
    for (int t = 0; t < plain_tokens; t++) {
        const float total = warp_sum(sum[t]) + (p.bias ? p.bias[row] : 0.0f);
        if (t >= n || threadIdx.x % 32 != 0) continue;
        const std::int64_t at = std::int64_t(first + t) * p.weight.rows + row;
        store_result(p, at, total);
    }
}

} // namespace

bool is_regular(const Weight& weight) {
    return weight.form != WeightForm::f32 && (weight.form != WeightForm::f16 || weight.cols % 8 == 0);
}

void gemm_plain(const Half* x, std::int64_t m, std::int64_t cols, const Projection* projections, int n_projections,
                Context& gpu) {
    for (int k = 0; k < n_projections; k++)
        run_kernel(gemm_plain_kernel,
                   dim3(unsigned((projections[k].weight.rows + warps - 1) / warps),
                        unsigned((m + plain_tokens - 1) / plain_tokens)),
                   warps * 32, 0, gpu, reinterpret_cast<const __half*>(x), int(m), int(cols), projections[k]);
}

// x has room for m rounded up to 1, 2, 4 or 8; the values of tokens beyond m do not matter.
void gemv(const Half* x_, int m, std::int64_t cols, const Projection* projections, int n_projections, bool invariant,
          Context& gpu) {
    const auto* x = reinterpret_cast<const __half*>(x_);
    for (int i = 0, count = 0; i < n_projections; i += count) {
        JoinedProjections all{}; // neighbours of one form in one launch
        count           = take_same_form(projections + i, n_projections - i, all);
        const Kind kind = kind_of(projections[i].weight);
        const int  c    = int(cols);
        if (m <= 1 && !invariant && gemv_tma(kind, x, c, all, gpu)) continue;
        bool even = kind != kind_f16; // two rows of a warp share the conversions of x
        for (int k = 0; k < all.n; k++) even = even && all.projection[k].weight.rows % 2 == 0;
        if (m <= 1) even ? launch<1, 2>(kind, x, m, c, all, gpu) : launch<1, 1>(kind, x, m, c, all, gpu);
        else if (m <= 2) even ? launch<2, 2>(kind, x, m, c, all, gpu) : launch<2, 1>(kind, x, m, c, all, gpu);
        else if (m <= 4) even ? launch<4, 2>(kind, x, m, c, all, gpu) : launch<4, 1>(kind, x, m, c, all, gpu);
        else even ? launch<8, 2>(kind, x, m, c, all, gpu) : launch<8, 1>(kind, x, m, c, all, gpu);
    }
}

} // namespace quire::cuda
