// The operations of a layer that guesses the next tokens on a GPU: an MTP layer, or a draft of EAGLE-3. Plain types, as in kernels.h; cuda/none.cpp
// stands in where there is no CUDA.
#pragma once

#include "kernels.h"

namespace quire::cuda {

// A row of hidden states that is kept: from the last step's logit rows, or from those of the last guesses.
struct KeptRow {
    std::int32_t row = 0, to = 0, guessed = 0;
};
// The operation Carry of quire.compute.program. All rows have `bytes` bytes, a multiple of 2.
struct Carry {
    const void * x = nullptr, *steps = nullptr, *guesses = nullptr; // x: or null
    void *       memory = nullptr, *out = nullptr;
    std::int64_t bytes = 0;
};
// The rows of a step, in device memory, sent up before the step.
struct CarryStep {
    static constexpr std::int32_t zeros = -1, row_before = -2;
    const std::int32_t*           from = nullptr; // [T] a row of memory for each token; or zeros, or row_before: of x
    const std::int32_t*           n    = nullptr; // the number of rows that are kept
    const KeptRow*                kept = nullptr;
};
// Two launches: the rows that are kept, then out. Each waits for its inputs first: steps and guesses are results of earlier steps or of kernels of
// this step, memory is that of the first launch.
void carry(const Carry& op, const CarryStep& step, std::int64_t n_tokens, Context& gpu);

// The first columns of out, whose rows have out_cols columns, = x; each of both is fp16 or float32. A float32 that fp16 does not hold becomes the
// largest that it holds.
void put_columns(const void* x, bool x_is_float, std::int64_t rows, std::int64_t cols, void* out, bool out_is_float,
                 std::int64_t out_cols, Context& gpu);
// out [rows × out_cols] = x [rows × cols], its column columns[i] for each i, or -infinity where that is -1.
void gather_columns(const float* x, std::int64_t rows, std::int64_t cols, const std::int32_t* columns, float* out,
                    std::int64_t out_cols, Context& gpu);

} // namespace quire::cuda
