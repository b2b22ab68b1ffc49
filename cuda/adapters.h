// LoRA adapters on a GPU: what they add to the results of GEMMs. Plain types, as in kernels.h; cuda/none.cpp stands in where there is no CUDA.
#pragma once

#include "kernels.h"

namespace quire::cuda {

// The matrices of one adapter for one weight, in float32.
struct LoraPair {
    const float *a = nullptr,
                *b = nullptr; // [rank × in], [out × rank]; for the embedding a has a row for each token, [vocab × rank]
    int   rank = 0, adapter = 0;
    float scale = 1;
    int   first = 0; // of its columns in LoraAdd::low
};
// The operation LoraAdd of quire.compute.program.
struct LoraAdd {
    const LoraPair*     pairs   = nullptr;      // in device memory
    int                 n_pairs = 0, ranks = 0; // ranks: the sum of the pairs'
    const Half*         x            = nullptr; // [rows × in]; null: the rows are those of `tokens`
    const std::int32_t* tokens       = nullptr;
    void*               out          = nullptr; // [rows × cols], fp16 or float32
    bool                out_is_float = false;
    std::int64_t        in = 0, cols = 0;
    float*              low = nullptr; // [rows × ranks], scratch
};
// The factors of a step: of each adapter, for each sequence. All arrays are in device memory, sent up before the step.
struct LoraStep {
    const float*        factors    = nullptr; // [sequences × n_adapters]; 0: without that adapter
    const std::int32_t* sequences  = nullptr; // of each row of the operation
    int                 n_adapters = 0;
};
// Two launches; each waits for its inputs first: x and out are the results of kernels of this step, and low is that of the first launch.
// A row's bits depend on that row, its factors and the shapes alone; a row without adapters is not touched.
void lora_add(const LoraAdd& op, const LoraStep& step, std::int64_t rows, Context& gpu);

} // namespace quire::cuda
