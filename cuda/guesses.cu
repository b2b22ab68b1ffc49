// Hidden states from step to step, and the columns of a layer that guesses: copies of rows, bound by memory.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <limits>

#include "epilogue.cuh"
#include "guesses.h"
#include "warp.cuh"

namespace quire::cuda {

namespace {

constexpr int copy_threads = 256, keep_ctas = 64;

template <class Word>
__device__ void copy_row(void* to, std::int64_t to_row, const void* from, std::int64_t from_row, int words) {
    Word* const       out = static_cast<Word*>(to) + to_row * words;
    const Word* const in  = static_cast<const Word*>(from) + from_row * words;
    for (int i = int(threadIdx.x); i < words; i += copy_threads) out[i] = in[i];
}

// No row is kept twice, and none is read that is kept: the sources are not the memory.
template <class Word>
__global__ void __launch_bounds__(copy_threads) keep_rows_kernel(Carry op, CarryStep step, int words) {
    wait_for_inputs();
    const int n = *step.n;
    for (int i = int(blockIdx.x); i < n; i += keep_ctas) {
        const KeptRow kept = step.kept[i];
        copy_row<Word>(op.memory, kept.to, kept.guessed ? op.guesses : op.steps, kept.row, words);
    }
}

template <class Word>
__global__ void __launch_bounds__(copy_threads) carry_kernel(Carry op, CarryStep step, int words) {
    wait_for_inputs();
    const std::int64_t t    = blockIdx.x;
    const std::int32_t from = step.from[t];
    if (from >= 0) return copy_row<Word>(op.out, t, op.memory, from, words);
    if (from == CarryStep::row_before) return copy_row<Word>(op.out, t, op.x, t - 1, words);
    for (int i = int(threadIdx.x); i < words; i += copy_threads) static_cast<Word*>(op.out)[t * words + i] = Word{};
}

__device__ float as_float(float v) { return v; }
__device__ float as_float(__half v) { return __half2float(v); }
__device__ void  set(float& to, float v) { to = v; }
__device__ void  set(__half& to, float v) { to = to_finite(v); }

// A CTA for some columns of a row.
template <class X, class Out>
__global__ void __launch_bounds__(copy_threads)
    put_columns_kernel(const X* x, Out* out, std::int64_t cols, std::int64_t out_cols) {
    wait_for_inputs();
    const std::int64_t row = blockIdx.x, column = std::int64_t(blockIdx.y) * copy_threads + threadIdx.x;
    if (column < cols) set(out[row * out_cols + column], as_float(x[row * cols + column]));
}

__global__ void __launch_bounds__(copy_threads)
    gather_columns_kernel(const float* x, std::int64_t cols, const std::int32_t* columns, float* out,
                          std::int64_t out_cols) {
    wait_for_inputs();
    const std::int64_t row = blockIdx.x, column = std::int64_t(blockIdx.y) * copy_threads + threadIdx.x;
    if (column >= out_cols) return;
    const std::int32_t from      = columns[column];
    out[row * out_cols + column] = from >= 0 ? x[row * cols + from] : -INFINITY;
}

dim3 grid_of(std::int64_t rows, std::int64_t cols) {
    return {unsigned(rows), unsigned((cols + copy_threads - 1) / copy_threads)};
}

} // namespace

void carry(const Carry& op, const CarryStep& step, std::int64_t n_tokens, Context& gpu) {
    if (n_tokens == 0) return;
    const auto run = [&]<class Word>(Word) {
        const int words = int(op.bytes / std::int64_t(sizeof(Word)));
        run_kernel(keep_rows_kernel<Word>, dim3(keep_ctas), copy_threads, 0, gpu, op, step, words);
        run_kernel(carry_kernel<Word>, dim3(unsigned(n_tokens)), copy_threads, 0, gpu, op, step, words);
    };
    if (op.bytes % 16 == 0) run(uint4{});
    else run(std::uint16_t{});
}

void put_columns(const void* x, bool x_is_float, std::int64_t rows, std::int64_t cols, void* out, bool out_is_float,
                 std::int64_t out_cols, Context& gpu) {
    if (rows == 0) return;
    const auto run = [&]<class X, class Out>(const X* from, Out* to) {
        run_kernel(put_columns_kernel<X, Out>, grid_of(rows, cols), copy_threads, 0, gpu, from, to, cols, out_cols);
    };
    auto* const       to   = static_cast<__half*>(out);
    const auto* const from = static_cast<const __half*>(x);
    if (x_is_float && out_is_float) run(static_cast<const float*>(x), static_cast<float*>(out));
    else if (x_is_float) run(static_cast<const float*>(x), to);
    else if (out_is_float) run(from, static_cast<float*>(out));
    else run(from, to);
}

void gather_columns(const float* x, std::int64_t rows, std::int64_t cols, const std::int32_t* columns, float* out,
                    std::int64_t out_cols, Context& gpu) {
    if (rows == 0) return;
    run_kernel(gather_columns_kernel, grid_of(rows, out_cols), copy_threads, 0, gpu, x, cols, columns, out, out_cols);
}

} // namespace quire::cuda
