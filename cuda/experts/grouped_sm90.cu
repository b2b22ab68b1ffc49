// Experts for many tokens on Hopper: a grouped GEMM over tiles of pairs with one expert, as grouped.cu, with wgmma and TMA. A persistent
// kernel, a CTA per SM: an item is a tile and 128 rows of the weights, or 64 of gate and 64 of up. Some warps load weights and x, ahead
// of two warpgroups that multiply, across items, too. The weights of an item are unpacked once for all its pairs (multiply.cuh), up to 256;
// a tile with fewer takes a narrower wgmma.
//
// TMA takes some 60 cycles for each copy, also of a single row. So in large steps a kernel of its own first brings x into the order of the
// tiles; the gated results stand in that order anyway. A thread has the sums of gate and up of a row, or of two neighbouring rows. The sum of a result does not depend on the tile it is in, nor on how large tiles are.
//
// Bytes: as grouped.cu; x comes once for each item, from the L2.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "../gemm/multiply.cuh"
#include "../kernels.h"
#include "../warp.cuh"
#include "experts.cuh"

namespace quire::cuda {

namespace {

constexpr int                  rows_of_item = 128, row_bytes = tile_k * 2; // of the weights; of a row of x in a stage
[[maybe_unused]] constexpr int mma_warps = 8, weight_warp = 8, x_warp = 9, threads = 12 * 32;

// Wide: tiles of up to 256 pairs, else of up to 64.
template <Kind K, bool Wide>
struct Layout {
    static constexpr bool quantised = K != kind_f16;
    static constexpr int  pairs = Wide ? 256 : 64, chunks = quantised ? 4 : 1, x_bytes = pairs * row_bytes,
                         weight_bytes = rows_of_item * stage_row_bytes(K), x_stages = Wide ? 4 : 8,
                         weight_stages = Wide ? 5 : 8, shared_bytes = weight_stages * weight_bytes + x_stages * x_bytes;
    static_assert(chunks % stage_chunks(K) == 0 || !quantised);
};

struct Params {
    CUtensorMap         weight, x;
    ExpertGemm          op;
    __half*             out; // of gated and activated results in the order of the tiles, else of the pairs
    const std::int32_t *pairs, *tiles;
    int                 rows, cols; // of one expert's matrix
    int box; // rows of x that a copy fetches; 1: x has a row for each token, else for each pair in the order of the tiles
    bool  is_gated;             // gate and up
    bool  activates;            // one matrix alone: its results are activated
    bool  up_first;             // up comes before gate in memory
    float shift[2], unscale[2]; // of quantised weights: see unpack.cuh; of gate and up
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The tile of an item.
struct Tile {
    int        expert, first, n;
    __device__ Tile(const Params& p, int i)
        : expert(p.tiles[1 + 3 * i]), first(p.tiles[2 + 3 * i]), n(p.tiles[3 + 3 * i]) {}
};

struct Items {
    int n_blocks, n;
    __device__ explicit Items(const Params& p)
        : n_blocks((p.rows + (p.is_gated ? 64 : 128) - 1) / (p.is_gated ? 64 : 128)), n(p.tiles[0] * n_blocks) {}
    template <class What>
    __device__ void each(const Params& p, const What& what) const {
        for (int i = int(blockIdx.x); i < n; i += int(gridDim.x)) what(Tile(p, i / n_blocks), i % n_blocks);
    }
};

__device__ float bias_of(const Projection& of, const Tile& tile, int rows, int row) {
    return of.bias ? of.bias[std::int64_t(tile.expert) * rows + min(row, rows - 1)] : 0.0f;
}

template <class L>
__device__ int units_of(int cols) {
    return (cols + tile_k * L::chunks - 1) / (tile_k * L::chunks);
}

template <Kind K, class L>
__device__ void load_weights(const Params& p, const Items& items, const Pipeline<L::weight_stages>& pipeline) {
    constexpr int stage_cols               = K == kind_q4_k  ? 144
                                             : K == kind_f16 ? 64
                                                             : 128, // as the tensor map counts them
        of_unit                            = K == kind_q4_k || K == kind_f16 ? 1 : 2;
    const std::uint64_t             policy = l2_evict_first();
    PipelineState<L::weight_stages> at     = pipeline.producer_start();
    items.each(p, [&](const Tile& tile, int block) {
        for (int i = 0; i < units_of<L>(p.cols) * of_unit; i++) {
            pipeline.producer_acquire(at);
            mbarrier_arrive_expect_tx(pipeline.full + at.stage, unsigned(L::weight_bytes));
            tma_copy_5d(pipeline.memory + at.stage * L::weight_bytes, p.weight, i * stage_cols, block * 8, tile.expert,
                        pipeline.full + at.stage, policy);
            at.advance();
        }
    });
}

// By a warp, a lane for each copy, which may fetch rows behind the tile, whose sums nobody stores.
template <class L>
__device__ void load_x(const Params& p, const Items& items, const Pipeline<L::x_stages>& pipeline) {
    const int                  lane = int(threadIdx.x) % 32;
    PipelineState<L::x_stages> at   = pipeline.producer_start();
    items.each(p, [&](const Tile& tile, int) {
        const int  n_copies = (tile.n + p.box - 1) / p.box;
        const bool copies   = lane < n_copies;
        const int row = !copies ? 0 : p.box == 1 ? p.pairs[tile.first + lane] / p.op.n_used : tile.first + lane * p.box;
        for (int c = 0; c < units_of<L>(p.cols) * L::chunks; c++) {
            pipeline.producer_acquire(at);
            if (lane == 0) mbarrier_arrive_expect_tx(pipeline.full + at.stage, unsigned(n_copies * p.box * row_bytes));
            __syncwarp();
            if (copies)
                tma_copy_2d(pipeline.memory + at.stage * L::x_bytes + lane * p.box * row_bytes, p.x, c * tile_k, row,
                            pipeline.full + at.stage);
            at.advance();
        }
    });
}

// The scales of the two rows of this thread's pair of rows, gate and up or neighbours.
template <Kind K>
__device__ ScaleRows scale_rows(const Params& p, int expert, int pair) {
    ScaleRows rows{};
    rows.cols = p.cols;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const bool         is_up = p.is_gated && (i == 1) != p.up_first;
        const Weight&      w     = is_up ? p.op.up.weight : p.op.gate.weight;
        const std::int64_t row =
            p.is_gated ? (is_up ? first_row_of_up(p.op, expert, p.rows) : first_row_of_gate(p.op, expert, p.rows)) +
                             min(pair, p.rows - 1)
                       : std::int64_t(expert) * p.rows + min(2 * pair + i, p.rows - 1);
        rows.shift[i] = p.shift[is_up];
        if constexpr (K == kind_q4_k || K == kind_f16) continue;
        const std::int64_t group = row * (p.cols / w.group);
        rows.scales[i]           = static_cast<const char*>(w.scales) + group * (w.float_scales ? 4 : 2);
        rows.mins[i]             = static_cast<const char*>(w.mins) + group * 4;
    }
    return rows;
}

// The results of an item: `pair` is the thread's pair of rows. What(one, other): of two sums, gate and up or of two neighbouring rows.
template <int N, class What>
__device__ void store_gated(const Params& p, const Tile& tile, int pair, const float (&d)[N / 2], const What& what) {
    const int   lane = int(threadIdx.x) % 32, row = pair - lane / 4 + lane % 4 * 2;
    const float gate_bias = bias_of(p.op.gate, tile, p.rows, pair), up_bias = bias_of(p.op.up, tile, p.rows, pair);
#pragma unroll
    for (int i = 0; i < N / 8; i++) {
        float v[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float weight = 1;
            if (p.op.weighs_x) {
                const int at = __ldg(p.pairs + tile.first + min(i * 8 + lane % 4 * 2 + j, tile.n - 1));
                weight       = weight_of_x(p.op, at / p.op.n_used, at % p.op.n_used);
            }
            const float a = d[4 * i + j], b = d[4 * i + 2 + j];
            v[j] = what((p.up_first ? b : a) * p.unscale[0] * weight + gate_bias,
                        (p.up_first ? a : b) * p.unscale[1] * weight + up_bias);
        }
        // After the transposition a lane has two neighbouring rows of one pair.
        const std::uint32_t two  = movmatrix(pack_finite(v[0], v[1]));
        const int           slot = i * 8 + lane / 4;
        if (slot < tile.n && row < p.rows)
            *reinterpret_cast<std::uint32_t*>(p.out + std::int64_t(tile.first + slot) * p.rows + row) = two;
    }
}
template <int N, class What>
__device__ void store_rows(const Params& p, const Tile& tile, int pair, const float (&d)[N / 2], const What& what) {
    const int lane = int(threadIdx.x) % 32, row = 2 * pair;
    if (row >= p.rows) return;
    const float one_bias   = bias_of(p.op.gate, tile, p.rows, row),
                other_bias = bias_of(p.op.gate, tile, p.rows, row + 1);
    constexpr int at_once =
        N >= 64 ? 8 : N / 8; // pairs are looked up without branches, so that the look-ups do not wait for each other
#pragma unroll
    for (int begin = 0; begin < N / 8; begin += at_once) {
        std::int32_t at[at_once][2];
#pragma unroll
        for (int i = 0; i < at_once; i++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int slot = tile.first + min((begin + i) * 8 + lane % 4 * 2 + j, tile.n - 1);
                at[i][j]       = p.activates ? slot : __ldg(p.pairs + slot);
            }
#pragma unroll
        for (int i = 0; i < at_once; i++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const float*        from = d + 4 * (begin + i) + j;
                const std::uint32_t two =
                    pack_finite(what(from[0] * p.unscale[0] + one_bias), what(from[2] * p.unscale[0] + other_bias));
                if ((begin + i) * 8 + lane % 4 * 2 + j < tile.n)
                    *reinterpret_cast<std::uint32_t*>(p.out + std::int64_t(at[i][j]) * p.rows + row) = two;
            }
    }
}
// Each activation has a loop of its own: all of them in one would not fit the instruction cache.
template <int N>
__device__ void store(const Params& p, const Tile& tile, int pair, const float (&d)[N / 2]) {
    if (!p.is_gated) {
        if (!p.activates) store_rows<N>(p, tile, pair, d, [](float v) { return v; });
        else
            store_rows<N>(p, tile, pair, d, [is_silu = p.op.activation == Activation::silu](float v) {
                return is_silu ? activated(Activation::silu, v) : activated(Activation::relu_squared, v);
            });
    } else if (p.op.activation == Activation::silu)
        store_gated<N>(p, tile, pair, d, [](float gate, float up) { return swiglu(gate, up); });
    else if (p.op.activation == Activation::gelu_tanh)
        store_gated<N>(p, tile, pair, d, [](float gate, float up) { return geglu(gate, up); });
    else
        store_gated<N>(p, tile, pair, d,
                       [](float gate, float up) { return gated(Activation::clamped_swiglu, gate, up); });
}

template <int N, Kind K, class L>
__device__ void run_item(const Params& p, const Tile& tile, int block, const Pipeline<L::weight_stages>& weights,
                         const Pipeline<L::x_stages>& xs, PipelinePosition<L>& at) {
    const int pair     = block * 64 + int(threadIdx.x) / 32 * 8 + int(threadIdx.x) % 32 / 4;
    float     d[N / 2] = {};
    if constexpr (L::quantised)
        multiply_quantised<N, L, K>(scale_rows<K>(p, tile.expert, pair), 0, units_of<L>(p.cols), weights, xs, at, d);
    else multiply<N, L>(units_of<L>(p.cols), weights, xs, at, d);
    store<N>(p, tile, pair, d);
}

#endif

template <Kind K, bool Wide>
__global__ void __launch_bounds__(threads, 1) grouped_sm90_kernel(const __grid_constant__ Params p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using L = Layout<K, Wide>;
    extern __shared__ __align__(1024) unsigned char memory[];
    __shared__ std::uint64_t barriers[2 * (L::weight_stages + L::x_stages)];
    reads_early(); // nothing: barriers are made
    const Pipeline<L::weight_stages> weights{memory, barriers, barriers + L::weight_stages};
    const Pipeline<L::x_stages>      xs{memory + L::weight_stages * L::weight_bytes, barriers + 2 * L::weight_stages,
                                   barriers + 2 * L::weight_stages + L::x_stages};
    const int                        warp = uniform(int(threadIdx.x) / 32);
    if (threadIdx.x == 0) {
        weights.init(1, L::quantised ? mma_warps : 2), xs.init(1, 2);
        mbarrier_init_fence();
    }
    __syncthreads();
    wait_for_inputs();
    const Items items(p);
    if (warp >= mma_warps) {
        // 40 + 2 · 232 are the 3 · 168 registers of the launch.
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp == weight_warp && threadIdx.x % 32 == 0) load_weights<K, L>(p, items, weights);
        if (warp == x_warp) load_x<L>(p, items, xs);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    PipelinePosition<L> at;
    items.each(p, [&](const Tile& tile, int block) {
        const auto run = [&]<int N>() { run_item<N, K, L>(p, tile, block, weights, xs, at); };
        if constexpr (Wide) {
            if (tile.n <= 128) run.template operator()<128>();
            else if (tile.n <= 192) run.template operator()<192>();
            else run.template operator()<256>();
        } else {
            if (tile.n <= 16) run.template operator()<16>();
            else run.template operator()<64>();
        }
    });
#endif
}

// x of each pair of the tiles, one after the other. A warp for each; blockIdx.x: the tile.
__global__ void __launch_bounds__(256)
    gather_kernel(ExpertGemm op, const std::int32_t* pairs, const std::int32_t* tiles, __half* out) {
    wait_for_inputs();
    const std::int32_t* const tile    = tiles + 1 + 3 * blockIdx.x;
    const int                 in_tile = int(blockIdx.y * 8 + threadIdx.x / 32), words = int(op.gate.weight.cols) / 8;
    if (int(blockIdx.x) >= tiles[0] || in_tile >= tile[2]) return;
    const int   at   = tile[1] + in_tile;
    const auto* from = reinterpret_cast<const uint4*>(op.x) + std::int64_t(pairs[at] / op.n_used) * words;
    auto*       to   = reinterpret_cast<uint4*>(out) + std::int64_t(at) * words;
#pragma unroll 8
    for (int i = int(threadIdx.x) % 32; i < words; i += 32) to[i] = from[i];
}

template <Kind K, bool Wide>
void launch(const Params& p, int n_ctas, Context& gpu) {
    constexpr int shared = Layout<K, Wide>::shared_bytes;
    prepare_kernel(gpu, grouped_sm90_kernel<K, Wide>, threads, shared);
    run_kernel(grouped_sm90_kernel<K, Wide>, dim3(unsigned(n_ctas)), threads, shared, gpu, p);
}

template <bool Wide>
void launch_kind(const Params& p, int n_ctas, Context& gpu) {
    switch (kind_of(p.op.gate.weight)) {
        case kind_f16: launch<kind_f16, Wide>(p, n_ctas, gpu); break;
        case kind_i8: launch<kind_i8, Wide>(p, n_ctas, gpu); break;
        case kind_i8_float: launch<kind_i8_float, Wide>(p, n_ctas, gpu); break;
        case kind_i8_float_min: launch<kind_i8_float_min, Wide>(p, n_ctas, gpu); break;
        case kind_q4_k: launch<kind_q4_k, Wide>(p, n_ctas, gpu); break;
    }
}

// A tensor map of the experts' weights in tiles of 128 rows in pairs: [the columns of a stage][8 rows][2, `pair` bytes apart][groups of
// rows][experts, `expert` bytes apart].
bool encode_experts(CUtensorMap& map, const Weight& w, const void* data, std::int64_t row, std::int64_t pair,
                    std::int64_t n_groups, std::int64_t group, std::int64_t n_experts, std::int64_t expert) {
    const bool fp16 = w.form == WeightForm::f16;
    return encode_tensor_map<5>(map, data, fp16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8,
                                {fp16                         ? w.cols
                                 : w.form == WeightForm::q4_k ? w.cols / 256 * 144
                                                              : w.cols,
                                 8, 2, n_groups, n_experts},
                                {row, pair, group, expert}, {fp16 ? tile_k : stage_row_bytes(kind_of(w)), 8, 2, 8, 1},
                                w.form == WeightForm::q4_k ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B);
}

} // namespace

bool can_group_sm90(const ExpertGemm& op, const Context& gpu) {
    const bool is_gated = op.up.weight.data != nullptr;
    if (!gpu.sm90 || tensor_map_encoder() == nullptr) return false;
    if (is_gated ? op.activation != Activation::silu && op.activation != Activation::gelu_tanh &&
                       op.activation != Activation::clamped_swiglu
                 : op.activation != Activation::silu && op.activation != Activation::relu_squared)
        return false;
    if (is_gated && kind_of(op.gate.weight) != kind_of(op.up.weight)) return false;
    const int n_matrices = op.alternating ? 2 * op.n_experts : op.n_experts;
    for (const Weight* w : {&op.gate.weight, is_gated ? &op.up.weight : &op.gate.weight}) {
        const int unit = w->form == WeightForm::f16         ? 8
                         : w->form == WeightForm::q4_k      ? 256
                         : kind_of(*w) != kind_i8_float_min ? 64
                                                            : 128;
        if (!can_group(*w, n_matrices) || w->cols % unit != 0 || w->rows / n_matrices % 16 != 0) return false;
    }
    return true;
}

void expert_grouped_sm90(const ExpertGemm& op, bool first, Half* out, std::int64_t n_tokens, int tile,
                         const ExpertWorkspace& work, Context& gpu) {
    const Weight &gate = op.gate.weight, &up = op.up.weight;
    Params        p{};
    p.op = op, p.out = reinterpret_cast<__half*>(out), p.pairs = work.pairs, p.tiles = work.tiles;
    p.rows = rows_of_expert(op), p.cols = int(gate.cols);
    p.is_gated = first && up.data != nullptr, p.activates = first && !p.is_gated;
    const std::int64_t row = gate.form == WeightForm::f16    ? gate.cols * 2
                             : gate.form == WeightForm::q4_k ? gate.cols / 256 * 144
                                                             : gate.cols,
                       all = p.rows * row; // of a matrix
    const auto pairs       = n_tokens * op.n_used;
    // Few rows are fetched one by one: a tile has at most n_tokens of them.
    const bool by_token = first && n_tokens <= 16, wide = tile > 64;
    p.box   = by_token ? 1 : wide ? 64 : 16;
    bool ok = encode_matrix(p.x, first && !by_token ? work.parts : op.x, by_token ? n_tokens : pairs, gate.cols, p.box);
    if (p.is_gated) {
        const std::int64_t distance =
            op.alternating ? all : static_cast<const char*>(up.data) - static_cast<const char*>(gate.data);
        p.up_first = distance < 0;
        ok = ok && encode_experts(p.weight, gate, p.up_first ? up.data : gate.data, row, std::abs(distance), p.rows / 8,
                                  8 * row, op.n_experts, op.alternating ? 2 * all : all);
    } else ok = ok && encode_experts(p.weight, gate, gate.data, 2 * row, row, p.rows / 16, 16 * row, op.n_experts, all);
    for (int i = 0; i < 2; i++) {
        const Weight& w = i == 1 && p.is_gated ? up : gate;
        p.shift[i]      = std::ldexp(1.0f, shift_of(w));
        p.unscale[i]    = gate.form == WeightForm::f16 ? 1.0f : unscale_of(w);
    }
    const int  of_item = p.is_gated ? 64 : 128;
    const auto most    = expert_tiles(pairs, op.n_experts, tile) * ((p.rows + of_item - 1) / of_item); // items
    // Without tensor maps an invalid launch, which last_error() reports.
    if (first && !by_token)
        run_kernel(gather_kernel, dim3(unsigned(expert_tiles(pairs, op.n_experts, tile)), unsigned((tile + 7) / 8)),
                   256, 0, gpu, op, work.pairs, work.tiles, reinterpret_cast<__half*>(work.parts));
    const int n_ctas = ok ? int(std::min<std::int64_t>(gpu.n_sms, most)) : 0;
    if (wide) launch_kind<true>(p, n_ctas, gpu);
    else launch_kind<false>(p, n_ctas, gpu);
}

} // namespace quire::cuda
