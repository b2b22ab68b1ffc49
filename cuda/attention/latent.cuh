// Attention over a latent cache (DeepSeek-V2, section 2.1), for decode.cu and prefill.cu.
#pragma once

#include "../context.cuh"
#include "../kernels.h"

namespace quire::cuda {

// Tokens of a prefill tile; 0: only the plain kernel knows this shape, or this GPU has too little shared memory.
int          latent_tile(const Context& gpu, int head_dim, int value_dim);
SplitLengths latent_split_lengths(const Context& gpu, int head_dim, int value_dim, std::int64_t work);
void         latent_decode(const Attention& a, const Plan& plan, float* partial, Context& gpu);
void         latent_prefill(const Attention& a, const Plan& plan, const PrefillTile* tiles, int n_tiles, Context& gpu);

} // namespace quire::cuda
