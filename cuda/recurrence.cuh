// Shared by the kernels of layers that keep a state: where the tokens, the columns and the states of a sequence are.
#pragma once

#include "kernels.h"

namespace quire::cuda {

// The tokens of a sequence in this step, and its states.
struct Run {
    std::int64_t        first;
    int                 n;
    const std::int32_t *from, *to; // blocks; from: null where the sequence begins with zeros
};
__device__ inline Run run_of(const States& s, int sequence) {
    const std::int32_t *from = s.from + std::int64_t(sequence) * s.unit, *to = s.to + std::int64_t(sequence) * s.unit;
    const int           first = s.token_start[sequence];
    return {first, s.token_start[sequence + 1] - first, s.from[std::int64_t(sequence) * s.unit] < 0 ? nullptr : from,
            to};
}
// Float i of a layer's state.
__device__ inline float* float_of(const States& s, const std::int32_t* unit, std::int64_t i) {
    const unsigned at = unsigned(s.offset + i), block = at / unsigned(s.block_floats);
    return s.memory + unit[block] * s.block_floats + (at - block * unsigned(s.block_floats));
}

// A head's matrix in a state, n floats from float `at` on.
struct HeadMatrix {
    const States&       states;
    const std::int32_t* unit;
    std::int64_t        first;
    bool                in_two_blocks; // at most
    int                 boundary = 0;  // the first float in the second one
    float *             one = nullptr, *other = nullptr;

    __device__ HeadMatrix(const States& s, const std::int32_t* blocks, std::int64_t at, int n)
        : states(s), unit(blocks), first(at) {
        const std::int64_t from = s.offset + at, block = from / s.block_floats, last = (from + n - 1) / s.block_floats;
        in_two_blocks = last <= block + 1;
        boundary      = int(min((block + 1) * s.block_floats - from, std::int64_t(n)));
        one           = float_of(s, unit, at);
        other         = last > block ? float_of(s, unit, at + boundary) - boundary : one;
    }
    __device__ float* near(int i) const { return (i < boundary ? one : other) + i; }
    __device__ float* any(int i) const { return float_of(states, unit, first + i); }
};

// Where a row of a recurrence has the numbers of head h. x: q, k, v (delta rule), or v, k, q.
struct Columns {
    int          group, columns, q, k, v; // columns: of x
    int          step_columns, step, write;
    const float* writes;

    __device__ Columns(const Recurrence& a, int h, bool delta) {
        const int  of_group = a.n_heads / a.n_groups, keys = a.n_groups * a.key_dim, values = a.n_heads * a.value_dim;
        const bool both = delta && a.grouped; // a row of `step` also has what is written
        group           = a.grouped ? h / of_group : h % a.n_groups;
        columns         = 2 * keys + values;
        q               = (delta ? 0 : values + keys) + group * a.key_dim;
        k               = (delta ? keys : values) + group * a.key_dim;
        v               = (delta ? 2 * keys : 0) + h * a.value_dim;
        step_columns    = both ? 2 * a.n_heads : a.n_heads;
        write           = both ? h / of_group * 2 * of_group + h % of_group : h;
        step            = both ? write + of_group : h;
        writes          = both ? a.step : a.write;
    }
};

// log(1 + exp(x))
__device__ inline float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

// recurrence_chunks.cu: the sequences with at least that many tokens in the step.
constexpr int least_chunked = 32;
void          recurrence_in_chunks(const Recurrence& op, const States& states, Context& gpu);

} // namespace quire::cuda
