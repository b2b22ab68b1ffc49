// All CPU kernels for one instruction set: a file in isa/ defines the macros that gemm.h lists, ATTENTION_TILE (queries and
// vectors in attention's register tile) and FLOAT_KERNELS, and includes this within its target attribute. If FLOAT_KERNELS is 0,
// only the integer GEMM is compiled; the rest comes from another instruction set.

#include "vector_math.h"

#if FLOAT_KERNELS
#include "elementwise.h"

#include "attention.h"
#include "recurrence.h"
#endif

#include "gemm.h"

void repack(const TensorView& w, std::byte* out, std::int64_t first, std::int64_t last) {
    repack_body(w, out, first, last);
}
template <bool Pairs>
void quantise_rows(const float* x, const QuantisedRows& to, std::int64_t first, std::int64_t last) {
    quantise_rows_body<Pairs>(x, to, first, last);
}

#if FLOAT_KERNELS
std::int64_t token_tiles(std::int64_t n) { return token_tiles_body(n); }
void pack_panels(const float* x, std::int64_t n, std::int64_t cols, float* out, std::int64_t first, std::int64_t last) {
    pack_panels_body(x, n, cols, out, first, last);
}
void attention(const AttentionTask& task) { attention_body<FUSED, ATTENTION_TILE>(task); }
void attention_scores(const AttentionTask& task, const SplitAttention& split, int first, int last) {
    attention_scores_body<FUSED, ATTENTION_TILE>(task, split, first, last);
}
void attention_weights(const AttentionTask& task, const SplitAttention& split, int first, int last) {
    attention_weights_body<FUSED>(task, split, first, last);
}
void attention_values(const AttentionTask& task, const SplitAttention& split, int first, int last) {
    attention_values_body<FUSED, ATTENTION_TILE>(task, split, first, last);
}
void norm(const float* x, float* residual, const float* weight, float eps, float* out, std::int64_t n) {
    norm_body<FUSED>(x, residual, weight, eps, out, n);
}
void activate(Activation activation, float* gate, const float* up, std::int64_t n) {
    activate_body<FUSED>(activation, gate, up, n);
}
void convolve(const ConvTask& task) { convolve_body<FUSED>(task); }
void recur(const RecurrenceTask& task) { recur_body<FUSED>(task); }
void softcap(float* x, float cap, std::int64_t n) { softcap_body<FUSED>(x, cap, n); }
void add(float* x, const float* y, std::int64_t n) { add_body(x, y, n); }
void store_kv(const float* x, DType type, std::byte* out, std::byte* scale, std::int64_t n) {
    store_kv_body<FUSED>(x, type, out, scale, n);
}
void rotate(float* x, std::int64_t n, int size) { rotate_body(x, n, size); }
#endif
