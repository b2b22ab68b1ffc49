// Shared by the kernels of a mixture of experts: the choice of a pair, and the launches.
#pragma once

#include "../epilogue.cuh"
#include "../kernels.h"
#include "../warp.cuh"

namespace quire::cuda {

// The expert of a pair, -1 for none; the factors of its input and of its result.
__device__ inline int expert_of(const ExpertGemm& op, std::int64_t t, int slot) {
    return reinterpret_cast<const std::int32_t*>(op.routes)[t * 2 * op.n_used + slot];
}
__device__ inline float weight_of_x(const ExpertGemm& op, std::int64_t t, int slot) {
    return op.weighs_x ? op.routes[t * 2 * op.n_used + op.n_used + slot] : 1.0f;
}
__device__ inline float weight_of(const ExpertGemm& op, std::int64_t t, int slot) {
    return op.weighs_x ? 1.0f : op.routes[t * 2 * op.n_used + op.n_used + slot];
}
// Rows of one expert's matrix, and where the expert's gate and up begin in their stacks.
inline int rows_of_expert(const ExpertGemm& op) {
    return int(op.gate.weight.rows / (op.alternating ? 2 * op.n_experts : op.n_experts));
}
__device__ inline std::int64_t first_row_of_gate(const ExpertGemm& op, int expert, int rows) {
    return std::int64_t(op.alternating ? 2 * expert : expert) * rows;
}
__device__ inline std::int64_t first_row_of_up(const ExpertGemm& op, int expert, int rows) {
    return std::int64_t(op.alternating ? 2 * expert + 1 : expert) * rows;
}

// scores.cu: scores [n_tokens × experts] of many tokens, by tiles of both
bool can_score_tiles(const Route& op, std::int64_t n_tokens);
void score_tiles(const Route& op, std::int64_t n_tokens, float* scores, Context& gpu);
// gemv.cu: each pair for itself
void expert_gated_gemv(const ExpertGemm& op, std::int64_t n_tokens, Context& gpu);
void expert_combine_gemv(const ExpertGemm& op, std::int64_t n_tokens, Context& gpu);
// grouped.cu: tiles. Gated: gate and up, to gate.out; else gate, to `out`, without the pairs' weights. x: a row for each token, or
// for each pair.
void expert_grouped(const ExpertGemm& op, bool is_gated, Half* out, std::int64_t n_tokens, int tile,
                    const ExpertWorkspace& work, Context& gpu);
// grouped_sm90.cu: likewise; gate.out, and the x of the second GEMM, stand in the order of the tiles.
void expert_grouped_sm90(const ExpertGemm& op, bool first, Half* out, std::int64_t n_tokens, int tile,
                         const ExpertWorkspace& work, Context& gpu);

} // namespace quire::cuda
