// Experts for many tokens: a grouped GEMM on tensor cores over tiles of pairs with one expert, so that each weight is read once for a
// tile, quantised or not (fragment.cuh). A persistent kernel: an item is a tile and 128 rows of the weights, or 64 of gate and 64 of
// up, in units of columns. CTAs take items in turn; weights and x of the next two units are on their way, across items, too.
//
// A warp has 16 rows of the weights; of gate and up 8 rows each, so that a thread has both sums of a result. The sum of a result
// does not depend on the tile it is in, nor on how large tiles are.
//
// Bytes: the weights of the experts that some token chose, n · (1 - (1 - k/n)^T) of n for T tokens, once for each of their tiles:
// for Qwen3-30B-A3B 51 of 128 experts for 8 tokens, 112 for 32, all from 128 on; 9.4 MB each in fp16, 2.7 MB in Q4_K. x and the
// results are some percent of that up to 128 tokens.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "../gemm/fragment.cuh"
#include "../kernels.h"
#include "../ptx/cp_async.cuh"
#include "../ptx/mma.cuh"
#include "../warp.cuh"
#include "experts.cuh"

namespace quire::cuda {

namespace {

constexpr int warps = 8, stages = 3;

struct Params {
    ExpertGemm          op;
    __half*             out; // [pairs × rows]
    const std::int32_t *pairs, *tiles;
    int                 rows, cols;   // of one expert's matrix
    bool                row_of_token; // x has a row for each token, else for each pair
    bool                activates;    // one matrix alone: its results are activated
};

// One item of a CTA, and how far in it.
struct Cursor {
    int item, unit; // unit: of `cols`
    int expert, first, n, block;

    __device__ void find(const Params& p, int n_blocks, int n_items) {
        if (item >= n_items) return;
        const std::int32_t* tile = p.tiles + 1 + 3 * (item / n_blocks);
        expert = tile[0], first = tile[1], n = tile[2], block = item % n_blocks;
    }
    __device__ void advance(const Params& p, int n_units, int n_blocks, int n_items) {
        if (++unit < n_units) return;
        unit = 0, item += int(gridDim.x);
        find(p, n_blocks, n_items);
    }
};

// NT: groups of 8 pairs of a tile.
template <Kind K, int NT, bool Gated, bool Tail>
__global__ void __launch_bounds__(warps * 32, 2) grouped_kernel(const __grid_constant__ Params p) {
    constexpr int     stride = row_stride(K), width = unit_cols(K), rows_of_item = Gated ? warps * 8 : warps * 16;
    extern __shared__ __align__(16) __half x_stages[]; // [stages][NT · 8][stride]
    wait_for_inputs();
    const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
    const int n_blocks = (p.rows + rows_of_item - 1) / rows_of_item, n_items = p.tiles[0] * n_blocks,
              n_units = (p.cols + width - 1) / width;
    Cursor ahead{int(blockIdx.x), 0, 0, 0, 0, 0};
    ahead.find(p, n_blocks, n_items);
    Cursor now = ahead;

    Fragment<K, Tail> weights[2];
    const auto        load_weights = [&](Fragment<K, Tail>& to) {
        if (ahead.item >= n_items) return;
        const std::int64_t matrix = first_row_of_gate(p.op, ahead.expert, p.rows);
        const int          row = ahead.block * rows_of_item + warp * (Gated ? 8 : 16) + lane / 4, last = p.rows - 1;
        if (Gated)
            to.load(RowPair(p.op.gate.weight, matrix + min(row, last), p.op.up.weight,
                                   first_row_of_up(p.op, ahead.expert, p.rows) + min(row, last)),
                           ahead.unit * width, lane);
        else
            to.load(RowPair(p.op.gate.weight, matrix + min(row, last), matrix + min(row + 8, last)), ahead.unit * width,
                           lane);
    };
    const auto load_x = [&](int stage) {
        constexpr int words = width / 8;
        if (ahead.item < n_items) {
            __half* to = x_stages + stage * NT * 8 * stride;
#pragma unroll
            for (int i = int(threadIdx.x); i < NT * 8 * words; i += warps * 32) {
                const int t = i / words, c = i % words * 8, col = ahead.unit * width + c;
                const int pair   = p.pairs[ahead.first + min(t, ahead.n - 1)],
                          row    = p.row_of_token ? pair / p.op.n_used : pair;
                const auto* from = reinterpret_cast<const __half*>(p.op.x) + std::int64_t(row) * p.cols;
                if (Tail) cp_async(to + t * stride + padded<K>(c), from + min(col, p.cols - 8), col < p.cols);
                else cp_async(to + t * stride + padded<K>(c), from + col);
            }
        }
        cp_async_commit();
    };
    const auto load_both = [&](Fragment<K, Tail>& to, int stage) {
        load_weights(to);
        load_x(stage);
        ahead.advance(p, n_units, n_blocks, n_items);
    };
    load_both(weights[0], 0);
    load_both(weights[1], 1);

    float      acc[NT][4] = {};
    const auto store      = [&] { // the item is complete
        const int  row           = now.block * rows_of_item + warp * (Gated ? 8 : 16);
        const auto value_of_bias = [&](const Projection& of, int r) {
            return of.bias ? of.bias[std::int64_t(now.expert) * p.rows + min(r, p.rows - 1)] : 0.0f;
        };
        const float first_bias = value_of_bias(p.op.gate, row + lane / 4),
                    other_bias = value_of_bias(Gated ? p.op.up : p.op.gate, row + lane / 4 + (Gated ? 0 : 8));
#pragma unroll
        for (int t = 0; t < NT; t++) {
            float weight[2] = {1, 1}; // of the pairs of acc's columns
            if (Gated && p.op.weighs_x)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int pair = p.pairs[now.first + min(t * 8 + lane % 4 * 2 + i, now.n - 1)];
                    weight[i]      = weight_of_x(p.op, pair / p.op.n_used, pair % p.op.n_used);
                }
            float v[4] = {acc[t][0] * weight[0] + first_bias, acc[t][1] * weight[1] + first_bias,
                          acc[t][2] * weight[0] + other_bias, acc[t][3] * weight[1] + other_bias};
            if (Gated) v[0] = gated(p.op.activation, v[0], v[2]), v[1] = gated(p.op.activation, v[1], v[3]);
            else if (p.activates)
                for (float& one : v) one = activated(p.op.activation, one);
            const int slot = t * 8 + lane / 4; // after the transposition a lane has two neighbouring rows of one pair
#pragma unroll
            for (int half = 0; half < (Gated ? 1 : 2); half++) {
                const std::uint32_t two = movmatrix(pack_finite(v[2 * half], v[2 * half + 1]));
                const int           r   = row + half * 8 + lane % 4 * 2;
                if (slot < now.n && r < p.rows)
                    *reinterpret_cast<std::uint32_t*>(p.out + std::int64_t(p.pairs[now.first + slot]) * p.rows + r) =
                        two;
            }
#pragma unroll
            for (int i = 0; i < 4; i++) acc[t][i] = 0;
        }
    };
    int        stage = 0;
    const auto work  = [&](Fragment<K, Tail>& mine) {
        cp_async_wait<1>();
        __syncthreads(); // this unit's x has arrived, and all are done with the unit before
        load_x(stage == 0 ? 2 : stage - 1);
        const __half* xs = x_stages + stage * NT * 8 * stride + lane / 4 * stride;
#pragma unroll
        for (int step = 0; step < Fragment<K, Tail>::steps; step++) {
            std::uint32_t lower[4], upper[4];
            mine.words(0, step, lower);
            mine.words(1, step, upper);
            const __half* at = xs + padded<K>(Fragment<K, Tail>::column(step, lane));
#pragma unroll
            for (int t = 0; t < NT; t++) {
                const uint4 b = *reinterpret_cast<const uint4*>(at + t * 8 * stride);
                mma_m16n8k16(acc[t], lower[0], upper[0], lower[1], upper[1], b.x, b.y);
                mma_m16n8k16(acc[t], lower[2], upper[2], lower[3], upper[3], b.z, b.w);
            }
        }
        load_weights(mine);
        ahead.advance(p, n_units, n_blocks, n_items);
        if (now.unit + 1 == n_units) store();
        now.advance(p, n_units, n_blocks, n_items);
        stage = stage == stages - 1 ? 0 : stage + 1;
    };
    while (now.item < n_items) {
        work(weights[0]);
        if (now.item < n_items) work(weights[1]);
    }
}

template <Kind K, int NT, bool Gated>
void launch(const Params& p, int n_items, Context& gpu) {
    constexpr int  shared  = stages * NT * 8 * row_stride(K) * 2;
    constexpr bool may_end = K != kind_q4_k; // within a unit
    const auto     kernel =
        p.cols % unit_cols(K) == 0 ? grouped_kernel<K, NT, Gated, false> : grouped_kernel<K, NT, Gated, may_end>;
    const int ctas = std::max(prepare_kernel(gpu, kernel, warps * 32, shared), 1);
    // In order, as the skinny GEMM: loads in flight to registers are held in the L1.
    run_in_order(kernel, dim3(unsigned(std::min(gpu.n_sms * ctas, n_items))), warps * 32, shared, gpu, p);
}

template <int NT, bool Gated>
void launch_kind(const Params& p, int n_items, Context& gpu) {
    if (kind_of(p.op.gate.weight) == kind_f16) launch<kind_f16, NT, Gated>(p, n_items, gpu);
    if constexpr (NT <= 4) // larger tiles of quantised weights are slower
        switch (kind_of(p.op.gate.weight)) {
            case kind_f16: break;
            case kind_i8: launch<kind_i8, NT, Gated>(p, n_items, gpu); break;
            case kind_i8_float: launch<kind_i8_float, NT, Gated>(p, n_items, gpu); break;
            case kind_i8_float_min: launch<kind_i8_float_min, NT, Gated>(p, n_items, gpu); break;
            case kind_q4_k: launch<kind_q4_k, NT, Gated>(p, n_items, gpu); break;
        }
}

// The sum of each token's pairs, 8 columns a thread.
__global__ void __launch_bounds__(256)
    combine_parts_kernel(ExpertGemm op, const __half* parts, std::int64_t n, int rows) {
    wait_for_inputs();
    const std::int64_t i = (std::int64_t(blockIdx.x) * 256 + threadIdx.x) * 8;
    if (i >= n) return;
    const std::int64_t t = i / rows, c = i % rows;
    float              sum[8] = {};
    if (expert_of(op, t, 0) >= 0)
#pragma unroll 8
        for (int slot = 0; slot < op.n_used; slot++) {
            const float         w        = weight_of(op, t, slot);
            const uint4         v        = *reinterpret_cast<const uint4*>(parts + (t * op.n_used + slot) * rows + c);
            const std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float2 two = as_float2(words[j]);
                sum[2 * j] += w * two.x, sum[2 * j + 1] += w * two.y;
            }
        }
    std::uint32_t out[4];
#pragma unroll
    for (int j = 0; j < 4; j++) out[j] = pack_finite(sum[2 * j] * op.scale, sum[2 * j + 1] * op.scale);
    *reinterpret_cast<uint4*>(static_cast<__half*>(op.gate.out) + i) = make_uint4(out[0], out[1], out[2], out[3]);
}

} // namespace

bool can_group(const Weight& w, int n_matrices) {
    const std::int64_t rows = w.rows / n_matrices;
    return rows % 8 == 0 &&
           w.cols % (w.form == WeightForm::q4_k ? 256
                     : w.form == WeightForm::i8 ? 32
                                                : 8) ==
               0 &&
           w.form != WeightForm::f32;
}

// `first`: of the two GEMMs of an expert.
void expert_grouped(const ExpertGemm& op, bool first, Half* out, std::int64_t n_tokens, int tile,
                    const ExpertWorkspace& work, Context& gpu) {
    if (op.on_wgmma) {
        expert_grouped_sm90(op, first, out, n_tokens, tile, work, gpu);
        return;
    }
    const bool is_gated = first && op.up.weight.data != nullptr;
    Params     p;
    p.op = op, p.out = reinterpret_cast<__half*>(out), p.pairs = work.pairs, p.tiles = work.tiles;
    p.rows = rows_of_expert(op), p.cols = int(op.gate.weight.cols), p.row_of_token = first,
    p.activates        = first && !is_gated;
    const int  of_item = is_gated ? warps * 8 : warps * 16;
    const auto most =
        expert_tiles(n_tokens * op.n_used, op.n_experts, tile) * ((p.rows + of_item - 1) / of_item); // items
    const int  n_items = int(std::min<std::int64_t>(most, 1 << 30));
    const auto run     = [&]<int NT>() {
        if (is_gated) launch_kind<NT, true>(p, n_items, gpu);
        else launch_kind<NT, false>(p, n_items, gpu);
    };
    if (tile == 8) run.template operator()<1>();
    else if (tile == 16) run.template operator()<2>();
    else if (tile == 32) run.template operator()<4>();
    else run.template operator()<8>();
}

void expert_gated(const ExpertGemm& op, std::int64_t n_tokens, int tile, const ExpertWorkspace& work, Context& gpu) {
    if (tile > 0) expert_grouped(op, true, static_cast<Half*>(op.gate.out), n_tokens, tile, work, gpu);
    else expert_gated_gemv(op, n_tokens, gpu);
}

void expert_combine(const ExpertGemm& op, std::int64_t n_tokens, int tile, const ExpertWorkspace& work, Context& gpu) {
    if (tile == 0) {
        expert_combine_gemv(op, n_tokens, gpu);
        return;
    }
    expert_grouped(op, false, work.parts, n_tokens, tile, work, gpu);
    const int          rows = int(op.gate.weight.rows / op.n_experts);
    const std::int64_t n    = n_tokens * rows;
    run_kernel(combine_parts_kernel, dim3(unsigned((n / 8 + 255) / 256)), 256, 0, gpu, op,
               reinterpret_cast<const __half*>(work.parts), n, rows);
}

} // namespace quire::cuda
