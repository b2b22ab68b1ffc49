// Shared by the kernels for few rows of x: which matrix a row belongs to, and the layout of its weights.
#pragma once

#include <cuda_fp16.h>

#include "../kernels.h"

namespace quire::cuda {

// Projections of one form, with the same x: their rows are numbered through. Beyond n, first_row stays what it was at n.
struct Projections {
    Projection projection[max_projections];
    int        first_row[max_projections + 1];
    int        n;

    __device__ int which(int row) const { return row < first_row[1] ? 0 : row < first_row[2] ? 1 : 2; }
};

enum Kind { kind_f16, kind_i8, kind_i8_float, kind_i8_float_min, kind_q4_k };

inline Kind kind_of(const Weight& w) {
    if (w.form == WeightForm::f16) return kind_f16;
    if (w.form == WeightForm::q4_k) return kind_q4_k;
    return !w.float_scales ? kind_i8 : w.mins ? kind_i8_float_min : kind_i8_float;
}

__device__ inline uint4 load_once(const void* p) { // weights are not read again in this step: keep them out of L1
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

// Takes products of one form from the front of a list; returns how many.
inline int gather(const Projection* products, int n, Projections& all) {
    for (all.n = 0;
         all.n < n && all.n < max_projections && kind_of(products[all.n].weight) == kind_of(products[0].weight);
         all.n++) {
        all.projection[all.n]    = products[all.n];
        all.first_row[all.n + 1] = all.first_row[all.n] + int(products[all.n].weight.rows);
    }
    for (int k = all.n + 1; k <= max_projections; k++) all.first_row[k] = all.first_row[all.n];
    return all.n;
}

// matmul_stream.cu: one row of x, on Hopper. False: not these products, or not this GPU.
bool gemv_tma(Kind kind, const __half* x, int cols, const Projections& all, Context& gpu);

} // namespace quire::cuda
