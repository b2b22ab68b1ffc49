// quire.tools.quantize.search: the types whose quantisation is a search: K types, IQ4_NL, IQ4_XS, and with an importance matrix also
// Q4_0, Q4_1, Q5_0, Q5_1. Owns nothing.
//
// Minimises Σ weight · (x - the block's value of x)² of each block. A part of 16 or 32 elements that shares a scale is fitted alone
// first: with several scales around the one of its largest value the elements are rounded, and the best scale for these roundings follows
// by least squares. Where scales are integers times a scale of the superblock, these integers and that scale are then improved in turns.
// Vectors of 8 floats; the order of the sums does not depend on the machine, nor do the bits.
export module quire.tools.quantize.search;

import quire.core.base;
import quire.model_file.quants;

export namespace quire {

bool has_search(DType type);

// out = x[0 .. n) as `type`; weights [n] say how much the error of each element counts, none is negative; null: all equally.
void quantize_search(DType type, const float* x, const float* weights, std::byte* out, std::int64_t n);

} // namespace quire

module :private;

namespace quire {

#define INLINE [[gnu::always_inline]] inline
using F8  = float __attribute__((vector_size(32)));
using I8  = std::int32_t __attribute__((vector_size(32)));
using Out = std::uint8_t*;

namespace plain {
#include "search_rows.h"
} // namespace plain

// The search for wider registers. Nothing is fused (-ffp-contract=off), so both give the same bits.
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
namespace avx2 {
#include "search_rows.h"
} // namespace avx2
#pragma clang attribute pop

bool has_search(DType type) {
    switch (type) {
        case DType::Q4_0:
        case DType::Q4_1:
        case DType::Q5_0:
        case DType::Q5_1:
        case DType::Q2_K:
        case DType::Q3_K:
        case DType::Q4_K:
        case DType::Q5_K:
        case DType::Q6_K:
        case DType::IQ4_NL:
        case DType::IQ4_XS: return true;
        default: return false;
    }
}

void quantize_search(DType type, const float* x, const float* weights, std::byte* out, std::int64_t n) {
    if (__builtin_cpu_supports("avx2")) avx2::quantize_rows(type, x, weights, out, n);
    else plain::quantize_rows(type, x, weights, out, n);
}

} // namespace quire
