// Experts for few tokens: a GEMV for each pair of a token and an expert that it chose, which reads the expert's number from memory.
// Gate, up and the activation are one kernel; down and the sum over a token's experts another.
//
// Bytes of a token, for k of the experts: gate and up 2 · k · ff · hidden weights, down k · hidden · ff: 50 and 25 MB in fp16, 14
// and 7 MB in Q4_K for Qwen3-30B-A3B (k 8, ff 768, hidden 2048). Nothing can be read before the router has chosen, so that all
// loads of a CTA are in flight at once instead.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "../gemm/gemv_rows.cuh"
#include "../kernels.h"
#include "../warp.cuh"
#include "experts.cuh"

namespace quire::cuda {

namespace {

constexpr int warps = 8; // of a CTA

// Rows of gate, and as many of up, that a warp takes; and of down. Few CTAs with many loads each are all on the device at once.
constexpr __host__ __device__ int gated_rows(Kind k) { return k == kind_f16 ? 1 : 2; }
constexpr __host__ __device__ int combined_rows(Kind k) { return k == kind_f16 ? 2 : 8; }

// Shared memory of prepared_x(): whole warps quantise it.
constexpr __host__ __device__ int padded(int cols) { return (cols + 255) / 256 * 256; }
constexpr __host__ __device__ int prepared_bytes(Kind k, int cols) {
    return k == kind_f16 ? 0 : x_bytes(k, padded(cols));
}
constexpr int most_prepared_bytes = 36 << 10; // with static shared memory less than a kernel has unasked

// x as it is multiplied with rows of K: fp16, or quantised into `memory` by n threads, of which this is thread i.
template <Kind K>
__device__ auto prepared_x(const __half* x, int cols, unsigned char* memory, int i, int n) {
    if constexpr (K == kind_f16) return x;
    else {
        const QuantisedX to = quantised_x_in(memory, K, padded(cols));
        for (int g = i; g < padded(cols) / 8; g += n)
            quantise_x<K>(g, 8 * g < cols ? reinterpret_cast<const uint4*>(x)[g] : make_uint4(0, 0, 0, 0), to);
        return to;
    }
}

// activation(gate) · up, or activation(gate) where there is no up.
__device__ float activated_pair(const ExpertGemm& op, float gate, float up) {
    return op.up.weight.data ? gated(op.activation, gate, up) : activated(op.activation, gate);
}

// Grid: pairs, so that neighbours that chose the same expert read the same rows; then rows.
template <Kind K>
__global__ void __launch_bounds__(warps * 32, K == kind_f16 ? 4 : 2) gated_kernel(ExpertGemm op, int rows) {
    constexpr int R = gated_rows(K);
    using Rows      = RowsOf<1, K, R>;
    extern __shared__ __align__(16) unsigned char xs[];
    wait_for_inputs();
    const std::int64_t pair = blockIdx.x, t = pair / op.n_used;
    const int e = expert_of(op, t, int(pair % op.n_used)), row = (int(blockIdx.y) * warps + int(threadIdx.x) / 32) * R;
    if (e < 0) return;
    const int          cols = row < rows ? int(op.gate.weight.cols) : 0; // 0: nothing to multiply
    const std::int64_t at = first_row_of_gate(op, e, rows) + row, up_at = first_row_of_up(op, e, rows) + row;
    float              g[R][1] = {}, u[R][1] = {};
    Rows               gate, up;
    const bool         two = op.up.weight.data != nullptr;
#pragma unroll
    for (int i = 0; i < Rows::ahead; i++) {
        gate.load(op.gate.weight, at, 0, cols, i);
        if (two) up.load(op.up.weight, up_at, 0, cols, i);
    }
    const int  x_cols = int(op.gate.weight.cols);
    const auto x      = prepared_x<K>(reinterpret_cast<const __half*>(op.x) + t * x_cols, x_cols, xs, int(threadIdx.x),
                                      int(blockDim.x));
    __syncthreads();
    for (int base = 0; base < cols; base += Rows::step)
#pragma unroll
        for (int i = 0; i < Rows::ahead; i++) {
            gate.add(x, base, cols, i, g);
            gate.load(op.gate.weight, at, base + Rows::step, cols, i);
            if (!two) continue;
            up.add(x, base, cols, i, u);
            up.load(op.up.weight, up_at, base + Rows::step, cols, i);
        }
    if (cols == 0) return;
    const float weight = weight_of_x(op, t, int(pair % op.n_used));
#pragma unroll
    for (int r = 0; r < R; r++) {
        const float a = warp_sum(g[r][0]) * weight + (op.gate.bias ? op.gate.bias[at + r] : 0.0f),
                    b = warp_sum(u[r][0]) * weight + (op.up.bias ? op.up.bias[at + r] : 0.0f);
        if (threadIdx.x % 32 == 0)
            static_cast<__half*>(op.gate.out)[pair * rows + row + r] = to_finite(activated_pair(op, a, b));
    }
}

// A CTA's warps divide its rows and a token's slots: `at_once` warps take the slots of the same R rows in turn. Their sums meet in
// shared memory and are added in the order of the slots.
template <Kind K>
__global__ void __launch_bounds__(warps * 32, K == kind_f16 ? 3 : 2)
    combine_kernel(ExpertGemm op, int rows, int at_once) {
    constexpr int R = combined_rows(K);
    using Rows      = RowsOf<1, K, R>;
    extern __shared__ __align__(16) unsigned char xs[]; // of at_once slots
    __shared__ float                              sums[warps][most_experts_used][R];
    wait_for_inputs();
    const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, group = warp / at_once, mine = warp % at_once;
    const std::int64_t t   = blockIdx.x;
    const int          row = (int(blockIdx.y) * (warps / at_once) + group) * R, k = op.n_used;
    if (expert_of(op, t, 0) < 0) { // the token only fills up a step
        if (mine == 0 && row < rows && lane < R)
            static_cast<__half*>(op.gate.out)[t * rows + row + lane] = __half(0.0f);
        return;
    }
    const int x_cols = int(op.gate.weight.cols), bytes = prepared_bytes(K, x_cols);
    for (int first = 0; first < k; first += at_once) {
        const int          slot = min(first + mine, k - 1), e = expert_of(op, t, slot);
        const int          cols      = first + mine < k && row < rows ? x_cols : 0; // 0: nothing to multiply
        const std::int64_t at        = std::int64_t(e) * rows + row;
        float              sum[R][1] = {};
        Rows               down;
#pragma unroll
        for (int i = 0; i < Rows::ahead; i++) down.load(op.gate.weight, at, 0, cols, i);
        const auto x = prepared_x<K>(reinterpret_cast<const __half*>(op.x) + (t * k + slot) * x_cols, x_cols,
                                     xs + mine * bytes, group * 32 + lane, warps / at_once * 32);
        __syncthreads();
        for (int base = 0; base < cols; base += Rows::step)
#pragma unroll
            for (int i = 0; i < Rows::ahead; i++) {
                down.add(x, base, cols, i, sum);
                down.load(op.gate.weight, at, base + Rows::step, cols, i);
            }
#pragma unroll
        for (int r = 0; r < R; r++) {
            const float all = warp_sum(sum[r][0]);
            if (cols == 0 || lane != 0) continue;
            sums[group][slot][r] = weight_of(op, t, slot) * (all + (op.gate.bias ? op.gate.bias[at + r] : 0.0f));
        }
        __syncthreads(); // x may be replaced, and all sums are there
    }
    if (row >= rows || mine != 0 || lane >= R) return;
    float total = 0;
    for (int slot = 0; slot < k; slot++) total += sums[group][slot][lane];
    static_cast<__half*>(op.gate.out)[t * rows + row + lane] = to_finite(total * op.scale);
}

// -- any shape and form, one weight a lane at a time

__device__ float plain_dot(const Weight& w, std::int64_t row, const __half* x) {
    float sum = 0;
    for (int c = int(threadIdx.x) % 32; c < w.cols; c += 32) sum += weight_at(w, row, c) * __half2float(x[c]);
    return warp_sum(sum);
}

__global__ void __launch_bounds__(warps * 32) gated_plain_kernel(ExpertGemm op, int rows) {
    wait_for_inputs();
    const std::int64_t pair = blockIdx.x, t = pair / op.n_used;
    const int e = expert_of(op, t, int(pair % op.n_used)), row = int(blockIdx.y) * warps + int(threadIdx.x) / 32;
    if (e < 0 || row >= rows) return;
    const std::int64_t at = first_row_of_gate(op, e, rows) + row, up_at = first_row_of_up(op, e, rows) + row;
    const auto*        x      = reinterpret_cast<const __half*>(op.x) + t * op.gate.weight.cols;
    const float        weight = weight_of_x(op, t, int(pair % op.n_used)),
                a             = plain_dot(op.gate.weight, at, x) * weight + (op.gate.bias ? op.gate.bias[at] : 0.0f),
                b             = op.up.weight.data
                                    ? plain_dot(op.up.weight, up_at, x) * weight + (op.up.bias ? op.up.bias[at] : 0.0f)
                                    : 0;
    if (threadIdx.x % 32 == 0)
        static_cast<__half*>(op.gate.out)[pair * rows + row] = to_finite(activated_pair(op, a, b));
}

__global__ void __launch_bounds__(warps * 32) combine_plain_kernel(ExpertGemm op, int rows) {
    wait_for_inputs();
    const std::int64_t t   = blockIdx.x;
    const int          row = int(blockIdx.y) * warps + int(threadIdx.x) / 32;
    if (row >= rows) return;
    float total = 0;
    for (int slot = 0; slot < op.n_used; slot++) {
        const int e = expert_of(op, t, slot);
        if (e < 0) continue;
        const std::int64_t at = std::int64_t(e) * rows + row;
        const auto*        x  = reinterpret_cast<const __half*>(op.x) + (t * op.n_used + slot) * op.gate.weight.cols;
        total += weight_of(op, t, slot) * (plain_dot(op.gate.weight, at, x) + (op.gate.bias ? op.gate.bias[at] : 0.0f));
    }
    if (threadIdx.x % 32 == 0) static_cast<__half*>(op.gate.out)[t * rows + row] = to_finite(total * op.scale);
}

template <class Launch>
void with_kind(Kind kind, const Launch& launch) {
    switch (kind) {
        case kind_f16: launch.template operator()<kind_f16>(); break;
        case kind_i8: launch.template operator()<kind_i8>(); break;
        case kind_i8_float: launch.template operator()<kind_i8_float>(); break;
        case kind_i8_float_min: launch.template operator()<kind_i8_float_min>(); break;
        case kind_q4_k: launch.template operator()<kind_q4_k>(); break;
    }
}

} // namespace

void expert_gated_gemv(const ExpertGemm& op, std::int64_t n_tokens, Context& gpu) {
    const int      rows  = rows_of_expert(op);
    const unsigned pairs = unsigned(n_tokens * op.n_used);
    const auto     grid  = [&](int of_cta) { return dim3(pairs, unsigned((rows + of_cta - 1) / of_cta)); };
    const Weight & gate = op.gate.weight, &up = op.up.weight.data ? op.up.weight : gate;
    const Kind     kind  = kind_of(gate);
    const int      bytes = prepared_bytes(kind, int(gate.cols));
    if (rows % gated_rows(kind) != 0 || !is_regular(gate) || !is_regular(up) || kind != kind_of(up) ||
        bytes > most_prepared_bytes) {
        run_kernel(gated_plain_kernel, grid(warps), warps * 32, 0, gpu, op, rows);
        return;
    }
    with_kind(kind, [&]<Kind K>() {
        run_kernel(gated_kernel<K>, grid(warps * gated_rows(K)), warps * 32, std::size_t(bytes), gpu, op, rows);
    });
}

void expert_combine_gemv(const ExpertGemm& op, std::int64_t n_tokens, Context& gpu) {
    const int  rows  = int(op.gate.weight.rows / op.n_experts);
    const auto grid  = [&](int of_cta) { return dim3(unsigned(n_tokens), unsigned((rows + of_cta - 1) / of_cta)); };
    const Kind kind  = kind_of(op.gate.weight);
    const int  bytes = prepared_bytes(kind, int(op.gate.weight.cols)); // of a slot
    if (rows % combined_rows(kind) != 0 || !is_regular(op.gate.weight) || bytes > most_prepared_bytes) {
        run_kernel(combine_plain_kernel, grid(warps), warps * 32, 0, gpu, op, rows);
        return;
    }
    int at_once = op.n_used >= 8 ? 8 : op.n_used >= 4 ? 4 : op.n_used >= 2 ? 2 : 1;
    while (at_once * bytes > most_prepared_bytes) at_once /= 2;
    with_kind(kind, [&]<Kind K>() {
        run_kernel(combine_kernel<K>, grid(warps / at_once * combined_rows(K)), warps * 32,
                   std::size_t(at_once * bytes), gpu, op, rows, at_once);
    });
}

} // namespace quire::cuda
