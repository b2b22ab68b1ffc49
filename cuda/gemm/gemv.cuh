// GEMV, shared parts: several projections of one x as one matrix, and the forms of weights.
#pragma once

#include <cuda_fp16.h>

#include "../kernels.h"

namespace quire::cuda {

// Up to Most projections of the same x with weights of one form: their rows are numbered consecutively. first_row is constant from n on.
template <int Most>
struct ProjectionsUpTo {
    Projection projection[Most];
    int        first_row[Most + 1];
    int        n;

    __device__ int which(int row) const {
        int k = 0;
#pragma unroll
        for (int i = 1; i < Most; i++) k += row >= first_row[i];
        return k;
    }
};
using Projections = ProjectionsUpTo<max_projections>;
// The projections of two GEMMs of one x, which a GEMV of one token reads together.
using JoinedProjections = ProjectionsUpTo<max_projections + 1>;

enum Kind { kind_f16, kind_i8, kind_i8_float, kind_i8_float_min, kind_q4_k };

inline Kind kind_of(const Weight& w) {
    if (w.form == WeightForm::f16) return kind_f16;
    if (w.form == WeightForm::q4_k) return kind_q4_k;
    return !w.float_scales ? kind_i8 : w.mins ? kind_i8_float_min : kind_i8_float;
}

__device__ inline uint4 load_once(const void* p) { // weights are read once in a step: kept out of L1
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

// Takes projections of one form from the front of a list; returns how many.
template <int Most>
int take_same_form(const Projection* projections, int n, ProjectionsUpTo<Most>& all) {
    for (all.n = 0; all.n < n && all.n < Most && kind_of(projections[all.n].weight) == kind_of(projections[0].weight);
         all.n++) {
        all.projection[all.n]    = projections[all.n];
        all.first_row[all.n + 1] = all.first_row[all.n] + int(projections[all.n].weight.rows);
    }
    for (int k = all.n + 1; k <= Most; k++) all.first_row[k] = all.first_row[all.n];
    return all.n;
}

// gemv_tma.cu: one token, on Hopper. False: not these projections, or not this GPU.
bool gemv_tma(Kind kind, const __half* x, int cols, const JoinedProjections& all, Context& gpu);

} // namespace quire::cuda
