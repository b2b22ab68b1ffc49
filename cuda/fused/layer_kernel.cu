// The layer kernel: everything between two attention operations of a step with 2 to 128 tokens, as one persistent,
// warp-specialised kernel with wgmma and TMA. GEMMs (stream-K) alternate with their epilogues: residual and RMS norm, SwiGLU or GeGLU,
// RoPE and KV store. A grid barrier separates the phases; while the CTAs wait there, the weights of the next GEMM
// are already being loaded into the shared-memory pipeline, so memory is always busy. With a grid barrier all CTAs have to run
// at once: beside another engine this is a cooperative launch.
//
// Stream-K: a GEMM has output tiles of 128 rows of the weights (N) by all tokens (M); the tiles are cut along K into units of
// 64 columns (of quantised weights 256), which are dealt out evenly and in order over the CTAs. If several CTAs share a tile, the one that has its first
// unit does the fix-up: it adds the others' partial sums in the order of K, and runs the epilogue. Only before a norm, which
// needs whole rows, all partial sums are left in memory. So the sums of a token depend only on the number of SMs.
//
// A tile consists of 8 times 8 pairs of rows that belong together: consecutive rows, gate and up, or the two rows of a RoPE
// pair. TMA loads them in an order that gives both sums of a pair to the same thread.
//
// The warps of a CTA: two warpgroups multiply (wgmma: 64 rows of the weights by all tokens), one warp loads weights, one loads
// x, one signals partial sums to other CTAs, one waits for such signals. fp16 weights are an operand in shared memory, and all warps but the
// two producers compute norms. Quantised weights come as they are in memory; the warps that multiply make fp16 of them in registers
// (unpack.cuh), the other operand of wgmma. That takes more registers, so that only these eight warps compute norms.
//
// Limits: Hopper; all weights in fp16, K a multiple of 8, up to 128 tokens, or all quantised, K of 128 (Q4_K: of 256), up to 256; N of 16 (gate and
// up: of 8); RMS norms of up to 8,192 columns; head_dim 16 to 128, a power of two, RoPE on all of it.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "../gemm/multiply.cuh"
#include "../gemm/stream_k_range.cuh"
#include "../paged_kv.cuh"
#include "../pipeline.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/wgmma.cuh"
#include "../rope.cuh"
#include "../signal.cuh"
#include "../warp.cuh"
#include "layer_program.cuh"

namespace quire::cuda::layer_kernel {

namespace {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

__device__ int projection_of(const Phase& phase, int tile) {
    int which = 0;
    while (tile >= phase.first_tile[which + 1]) which++;
    return which;
}

__device__ StreamK stream_k_of(const Phase& phase) { return {phase.first_tile[phase.n_projections], phase.k_tiles}; }

// A load past the L1, for memory that other CTAs write in this kernel.
__device__ float4 load_cg(const float* p) { return __ldcg(reinterpret_cast<const float4*>(p)); }
__device__ void   add(float4& v, float4 w, float by) {
    v.x += w.x * by, v.y += w.y * by, v.z += w.z * by, v.w += w.w * by;
}
__device__ uint2 as_fp16(float4 v) { return {pack_finite(v.x, v.y), pack_finite(v.z, v.w)}; }
__device__ void  wait_for(const unsigned* counter, unsigned n) {
    wait_until([&] { return read_acquire(counter) >= n; });
}

template <class L>
using Team = FirstThreads<L::team>;

// The grid barrier: all CTAs wait for each other. Arriving and waiting are separate, as work can be done in between.
template <class L>
struct GridBarrier {
    unsigned* counter;

    __device__ void arrive() const { // by the team
        Team<L>::sync();
        if (threadIdx.x == 0) signal(counter);
    }
    // Until all have arrived that often: by one thread; by the team.
    __device__ void wait(unsigned round) const { wait_for(counter, round * gridDim.x); }
    __device__ void wait_all(unsigned round) const {
        if (threadIdx.x == 0) wait(round);
        Team<L>::sync();
    }
};

template <class L>
__device__ void load_weights(const Params& params, const Pipeline<L::weight_stages>& pipeline) {
    for (int p = 0; p < params.n_phases; p++)
        for (int k = 0; k < params.phase[p].n_projections; k++) tma_prefetch(params.phase[p].weight[k]);
    const std::uint64_t             policy = l2_evict_first();
    PipelineState<L::weight_stages> at     = pipeline.producer_start();
    for (int p = 0; p < params.n_phases; p++) {
        const Phase&       phase = params.phase[p];
        const StreamKRange range = stream_k_of(phase);
        int                tile = range.begin / phase.k_tiles, step = range.begin % phase.k_tiles;
        for (int i = range.begin; i < range.end; i++) {
            const int which      = projection_of(phase, tile),
                      coordinate = (tile - phase.first_tile[which]) * phase.tile_step[which];
            const auto load      = [&](int first, int row_bytes) { // the columns from `first` on
                pipeline.producer_acquire(at);
                mbarrier_arrive_expect_tx(pipeline.full + at.stage, unsigned(tile_n * row_bytes));
                tma_copy_5d(pipeline.memory + at.stage * L::weight_bytes, phase.weight[which], first,
                            phase.tile_dim[which] == 3 ? coordinate : 0, phase.tile_dim[which] == 4 ? coordinate : 0,
                                 pipeline.full + at.stage, policy);
                at.advance();
            };
            if (!L::quantised) load(step * tile_k, tile_k * 2);
            else if (phase.quantised[which].kind == kind_q4_k) load(step * 144, 144);
            else
                for (int half = 0; half < 2; half++) load(step * 256 + half * 128, 128);
            if (++step == phase.k_tiles) step = 0, tile++;
        }
    }
}

template <class L>
__device__ void load_x(const Params& params, const Pipeline<L::x_stages>& pipeline,
                       const GridBarrier<L>& grid_barrier) {
    for (int p = 0; p < params.n_phases; p++) tma_prefetch(params.phase[p].x);
    wait_for_inputs();
    PipelineState<L::x_stages> at    = pipeline.producer_start();
    unsigned                   round = 0;
    for (int p = 0; p < params.n_phases; p++) {
        const Phase&       phase = params.phase[p];
        const StreamKRange range = stream_k_of(phase);
        if (p > 0 && !range.empty()) {
            grid_barrier.wait(round);
            fence_async_global();
        }
        int step = range.begin % phase.k_tiles;
        for (int i = range.begin; i < range.end; i++) {
            for (int c = 0; c < L::chunks; c++) {
                pipeline.producer_acquire(at);
                mbarrier_arrive_expect_tx(pipeline.full + at.stage, params.x_bytes);
                tma_copy_2d(pipeline.memory + at.stage * L::x_bytes, phase.x, (step * L::chunks + c) * tile_k, 0,
                            pipeline.full + at.stage);
                at.advance();
            }
            if (++step == phase.k_tiles) step = 0;
        }
        round += phase.epilogue == Epilogue::add_norm ? 2 : 1;
    }
}

// A thread has the sums of one of a tile's 64 pairs and N / 4 tokens: what(token, first, second) for each.
__device__ int pair_of_thread() { return int(threadIdx.x / 32 * 8 + threadIdx.x % 32 / 4); }
template <int N, class What>
__device__ void for_each_token(const float (&d)[N / 2], int n_tokens, const What& what) {
#pragma unroll
    for (int i = 0; i < N / 8; i++)
#pragma unroll
        for (int j = 0; j < 2; j++)
            if (const int token = i * 8 + int(threadIdx.x % 4) * 2 + j; token < n_tokens)
                what(token, d[4 * i + j], d[4 * i + 2 + j]);
}

// The tokens of the step, looked up once: where the rows of KV head 0 are in the cache, of K and of V (-1: nowhere), and the position.
template <class L>
struct StepTokens {
    int   row[2][L::tokens];
    float position[L::tokens];

    __device__ void init(const Params& params) { // by the team
        const RopeStore& a = params.rope;
        const int        t = int(threadIdx.x);
        if (t < params.n_tokens && a.block_size > 0) {
            const std::int32_t* const slot   = params.plan.slots + t;
            const auto                row_of = [&](int slot) {
                return slot < 0 ? -1 : int(kv_row_of_slot(slot, 0, a.block_rows, a.block_size));
            };
            row[0][t]   = row_of(*slot);
            row[1][t]   = a.v_slots == 0 ? row[0][t] : row_of(slot[a.v_slots]);
            position[t] = float(params.plan.positions[t]);
        }
        Team<L>::sync();
    }
};

// Epilogue of q, k and v: RoPE; k and v go to the cache.
template <class L>
__device__ void rope_epilogue(const Phase& phase, const Params& params, const StepTokens<L>& tokens, int which,
                              int pair, const float (&d)[L::tokens / 2]) {
    const Result&    r       = phase.result[which];
    const RopeStore& a       = params.rope;
    const bool       rotated = which < 2, neox = rotated && a.neox; // the two rows of a pair are half a head apart
    const int        D = a.head_dim, head = pair / (D / 2), in_head = pair % (D / 2);
    const int        one = neox ? in_head : 2 * in_head, other = neox ? in_head + D / 2 : 2 * in_head + 1;
    const float bias = r.bias ? r.bias[head * D + one] : 0.0f, other_bias = r.bias ? r.bias[head * D + other] : 0.0f;
    const float frequency = rotated ? a.inv_freq[in_head] : 0.0f;
    auto*       to        = reinterpret_cast<__half*>(which == 0   ? a.q
                                                      : which == 1 ? a.cache_k
                                                                   : a.cache_v) +
               std::int64_t(head) * (which == 0 ? 1 : kv_head_stride(a.block_size)) * D + one;
    for_each_token<L::tokens>(d, params.n_tokens, [&](int token, float v, float u) {
        const std::int64_t at =
            which == 0 ? std::int64_t(token) * r.rows : std::int64_t(tokens.row[which - 1][token]) * D;
        if (at < 0) return; // the token only fills up a graph
        float sine = 0, cosine = 1;
        if (rotated) {
            rope_angle(tokens.position[token], frequency, sine, cosine);
            sine *= a.scale, cosine *= a.scale;
        }
        v += bias, u += other_bias;
        const float2 xy = rotate_pair(v, u, sine, cosine);
        if (neox) to[at] = __float2half(xy.x), to[at + D / 2] = __float2half(xy.y);
        else *reinterpret_cast<__half2*>(to + at) = __floats2half2_rn(xy.x, xy.y);
    });
}

// The epilogue of a tile whose sums are complete.
template <class L>
__device__ void epilogue(const Phase& phase, const Params& params, const StepTokens<L>& tokens, int tile,
                         const float (&d)[L::tokens / 2]) {
    const int     which = projection_of(phase, tile);
    const Result& r     = phase.result[which];
    const int     pair  = (tile - phase.first_tile[which]) * (tile_n / 2) + pair_of_thread();
    auto*         fp16  = static_cast<__half*>(r.to);
    if (pair * (is_gated(phase.epilogue) ? 1 : 2) >= r.rows) return;
    if (phase.epilogue == Epilogue::rope_store) {
        rope_epilogue<L>(phase, params, tokens, which, pair, d);
    } else if (phase.epilogue == Epilogue::swiglu) {
        for_each_token<L::tokens>(d, params.n_tokens, [&](int token, float v, float u) {
            const float gate = phase.up_first ? u : v, up = phase.up_first ? v : u;
            fp16[std::int64_t(token) * r.rows + pair] = to_finite(swiglu(gate, up));
        });
    } else if (phase.epilogue == Epilogue::geglu) {
        for_each_token<L::tokens>(d, params.n_tokens, [&](int token, float v, float u) {
            const float gate = phase.up_first ? u : v, up = phase.up_first ? v : u;
            fp16[std::int64_t(token) * r.rows + pair] = to_finite(geglu(gate, up));
        });
    } else {
        const float2 bias = r.bias ? reinterpret_cast<const float2*>(r.bias)[pair] : float2{0, 0};
        for_each_token<L::tokens>(d, params.n_tokens, [&](int token, float v, float u) {
            const std::int64_t at   = std::int64_t(token) * r.rows / 2 + pair;
            const float2       both = {(v + bias.x) * r.scale, (u + bias.y) * r.scale};
            if (r.is_float) static_cast<float2*>(r.to)[at] = both;
            else reinterpret_cast<std::uint32_t*>(fp16)[at] = pack_finite(both.x, both.y);
        });
    }
}

// Barriers of the stream-K fix-up within a CTA, between the wgmma warps and the two warps that signal to other CTAs and wait for them:
// this CTA's partial sums are written; the other CTAs' partial sums are ready.
struct FixUp {
    std::uint64_t *written, *ready;
    unsigned       written_phase = 0, ready_phase = 0;
};

// The sums of a tile of quantised weights: `n` units from unit `first` of the tile on.
template <class L, Kind K>
__device__ void multiply_quantised(const Phase& phase, int tile, int first, int n,
                                   const Pipeline<L::weight_stages>& weights, const Pipeline<L::x_stages>& xs,
                                   PipelinePosition<L>& at, float (&d)[L::tokens / 2]) {
    const int        which   = projection_of(phase, tile);
    const Quantised& q       = phase.quantised[which];
    const int        n_pairs = phase.result[which].rows / (is_gated(phase.epilogue) ? 1 : 2),
              pair           = min((tile - phase.first_tile[which]) * (tile_n / 2) + pair_of_thread(), n_pairs - 1);
    const std::int64_t group = (pair / q.half * 2 * q.half + pair % q.half) * std::int64_t(q.row_groups);
    ScaleRows          rows;
#pragma unroll
    for (int i = 0; i < 2; i++)
        rows.scales[i] = static_cast<const char*>(q.scales[i]) + group * (K == kind_i8 ? 2 : 4),
        rows.mins[i] = static_cast<const char*>(q.mins[i]) + group * 4, rows.shift[i] = q.shift[i];
    rows.cols = phase.cols;
    multiply_quantised<L::tokens, L, K>(rows, first, n, weights, xs, at, d);
#pragma unroll
    for (int i = 0; i < L::tokens / 2; i++) d[i] *= q.unscale[i / 2 % 2];
}

// The CTA's range of a phase's GEMM.
template <class L>
__device__ void gemm(const Phase& phase, const Params& params, const StepTokens<L>& tokens,
                     const Pipeline<L::weight_stages>& weights, const Pipeline<L::x_stages>& xs,
                     PipelinePosition<L>& at, FixUp& fix_up_barriers) {
    constexpr int      N = L::tokens, words = N / 8, cta_stride = words * mma_warps * 32; // of a CTA's partial sums
    const StreamKRange range = stream_k_of(phase);
    float              d[N / 2];
    for (int unit = range.begin, tile = range.first_tile(); unit < range.end; tile++) {
        const int n = min(range.end, (tile + 1) * phase.k_tiles) - unit;
#pragma unroll
        for (int i = 0; i < N / 2; i++) d[i] = 0;
        if constexpr (L::quantised) {
            const int first = unit - tile * phase.k_tiles;
            switch (phase.quantised[projection_of(phase, tile)].kind) {
                case kind_i8: multiply_quantised<L, kind_i8>(phase, tile, first, n, weights, xs, at, d); break;
                case kind_i8_float:
                    multiply_quantised<L, kind_i8_float>(phase, tile, first, n, weights, xs, at, d);
                    break;
                case kind_i8_float_min:
                    multiply_quantised<L, kind_i8_float_min>(phase, tile, first, n, weights, xs, at, d);
                    break;
                default: multiply_quantised<L, kind_q4_k>(phase, tile, first, n, weights, xs, at, d); break;
            }
        } else multiply<L::tokens, L>(n, weights, xs, at, d);
        unit += n;
        if (phase.epilogue == Epilogue::add_norm) {
            float* to = params.partial_sums + std::int64_t(int(blockIdx.x) + tile) * params.n_tokens * tile_n;
            for_each_token<N>(d, params.n_tokens, [&](int token, float v, float u) {
                reinterpret_cast<float2*>(to + token * tile_n)[pair_of_thread()] = {v, u};
            });
        } else if (!range.begins(tile)) {
            float4* to = params.fix_up + std::int64_t(blockIdx.x) * cta_stride + threadIdx.x;
#pragma unroll
            for (int i = 0; i < words; i++)
                to[i * mma_warps * 32] = {d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]};
            __syncwarp();
            if (threadIdx.x % 32 == 0) mbarrier_arrive(fix_up_barriers.written);
        } else {
            if (!range.ends(tile)) {
                mbarrier_wait(fix_up_barriers.ready, fix_up_barriers.ready_phase);
                fix_up_barriers.ready_phase ^= 1;
                const int last = stream_k_of(phase).last_cta(tile);
#pragma unroll 1
                for (int cta = int(blockIdx.x) + 1; cta <= last; cta++) {
                    const float4* from    = params.fix_up + std::int64_t(cta) * cta_stride + threadIdx.x;
                    constexpr int at_once = words % 16 == 0 ? 16 : words % 12 == 0 ? 12 : words;
#pragma unroll
                    for (int first = 0; first < words; first += at_once) {
                        float4 v[at_once];
#pragma unroll
                        for (int i = 0; i < at_once; i++) v[i] = __ldcg(from + (first + i) * mma_warps * 32);
#pragma unroll
                        for (int i = 0; i < at_once; i++) {
                            float* to = d + 4 * (first + i);
                            to[0] += v[i].x, to[1] += v[i].y, to[2] += v[i].z, to[3] += v[i].w;
                        }
                    }
                }
            }
            epilogue<L>(phase, params, tokens, tile, d);
        }
    }
}

// Beside the wgmma warps, by a warp each. Where these warps compute no norms, nothing holds them at the grid barrier, so that they come to a
// phase while other CTAs are still in the one before: each phase has counters of its own.
__device__ unsigned* fix_up_arrivals_of(const Params& params, int phase) {
    return params.fix_up_arrivals + phase * max_tiles;
}
__device__ void signal_fix_up(const Params& params, int p, FixUp& fix_up_barriers) {
    const Phase&       phase = params.phase[p];
    const StreamKRange range = stream_k_of(phase);
    if (range.empty() || phase.epilogue == Epilogue::add_norm || range.begins(range.first_tile())) return;
    mbarrier_wait(fix_up_barriers.written, fix_up_barriers.written_phase);
    fix_up_barriers.written_phase ^= 1;
    if (threadIdx.x % 32 == 0) signal(fix_up_arrivals_of(params, p) + range.first_tile());
}
__device__ void await_fix_up(const Params& params, int p, const FixUp& fix_up_barriers) {
    const Phase&       phase = params.phase[p];
    const StreamKRange range = stream_k_of(phase);
    if (range.empty() || phase.epilogue == Epilogue::add_norm || threadIdx.x % 32 != 0) return;
    const int tile = range.last_tile();
    if (!range.begins(tile) || range.ends(tile)) return;
    unsigned* const arrivals = fix_up_arrivals_of(params, p) + tile;
    wait_for(arrivals, unsigned(stream_k_of(phase).last_cta(tile)) - blockIdx.x);
    *arrivals = 0; // for the next launch
    mbarrier_arrive(fix_up_barriers.ready);
}

// The partial sums of a tile for one token: n times 128 floats.
struct PartialSums {
    const float* first;
    int          n;
};
__device__ PartialSums partial_sums_of(const StreamK& stream_k, const Params& params, int tile, int token) {
    const int first_cta = stream_k.first_cta(tile);
    return {params.partial_sums + (std::int64_t(first_cta + tile) * params.n_tokens + token) * tile_n,
            stream_k.last_cta(tile) - first_cta + 1};
}

// Epilogue add_norm: residual += scale · partial sums, and its RMS norm. A CTA per token, PerThread times four columns a thread.
template <class L, int PerThread>
__device__ void add_norm(const Phase& phase, const Params& params, const GridBarrier<L>& grid_barrier, unsigned round,
                         float* scratch) {
    const int   cols = phase.result[0].rows, stride = params.n_tokens * tile_n;
    const float by     = phase.result[0].scale;
    bool        waited = false;
    const auto  wait   = [&] {
        if (!waited) grid_barrier.wait_all(round);
        waited = true;
    };
    for (int t = int(blockIdx.x); t < params.n_tokens; t += int(gridDim.x)) {
        float4      v[PerThread], w[PerThread];
        PartialSums from[PerThread];
        int         n_parts = 0;
#pragma unroll
        for (int i = 0; i < PerThread; i++) {
            const int c = (int(threadIdx.x) + i * L::team) * 4;
            from[i]     = {nullptr, 0};
            v[i] = w[i] = {0, 0, 0, 0};
            if (c >= cols) continue;
            from[i] = partial_sums_of(stream_k_of(phase), params, c / tile_n, t);
            from[i].first += c % tile_n;
            n_parts = max(n_parts, from[i].n);
            w[i]    = *reinterpret_cast<const float4*>(phase.norm_weight + c);
            v[i]    = load_cg(phase.residual + std::int64_t(t) * cols + c);
            if (phase.result[0].bias) add(v[i], *reinterpret_cast<const float4*>(phase.result[0].bias + c), by);
        }
        wait();
        constexpr int at_once = PerThread <= 4 ? 3 : 1; // many loads in flight
        for (int p = 0; p < n_parts; p += at_once) {
            float4 u[at_once][PerThread];
#pragma unroll
            for (int q = 0; q < at_once; q++)
#pragma unroll
                for (int i = 0; i < PerThread; i++)
                    u[q][i] =
                        p + q < from[i].n ? load_cg(from[i].first + std::int64_t(p + q) * stride) : float4{0, 0, 0, 0};
#pragma unroll
            for (int q = 0; q < at_once; q++)
#pragma unroll
                for (int i = 0; i < PerThread; i++) add(v[i], u[q][i], by);
        }
        float squares = 0;
#pragma unroll
        for (int i = 0; i < PerThread; i++)
            squares += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
        const float scale = rsqrtf(cta_sum<Team<L>>(squares, scratch) / float(cols) + phase.eps);
#pragma unroll
        for (int i = 0; i < PerThread; i++) {
            const int c = (int(threadIdx.x) + i * L::team) * 4;
            if (c >= cols) continue;
            const std::int64_t at                                                    = std::int64_t(t) * cols + c;
            *reinterpret_cast<float4*>(phase.residual + at)                          = v[i];
            *reinterpret_cast<uint2*>(static_cast<__half*>(phase.result[0].to) + at) = as_fp16(
                {v[i].x * scale * w[i].x, v[i].y * scale * w[i].y, v[i].z * scale * w[i].z, v[i].w * scale * w[i].w});
        }
    }
    wait();
}

#endif

template <int N, bool Q>
__global__ void __launch_bounds__(Layout<N, Q>::threads, 1) layer_kernel(const __grid_constant__ Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using L = Layout<N, Q>;
    extern __shared__ __align__(1024) unsigned char memory[];
    __shared__ std::uint64_t barriers[2 * (L::weight_stages + L::x_stages)], fix_up_memory[2];
    __shared__ float         scratch[32];
    __shared__ StepTokens<L> tokens;
    reads_early(); // weights
    const Pipeline<L::weight_stages> weights{memory, barriers, barriers + L::weight_stages};
    const Pipeline<L::x_stages>      xs{memory + L::weight_stages * L::weight_bytes, barriers + 2 * L::weight_stages,
                                   barriers + 2 * L::weight_stages + L::x_stages};
    const GridBarrier<L>             grid_barrier{params.grid_barrier};
    const int                        warp = uniform(int(threadIdx.x) / 32);
    if (threadIdx.x == 0) {
        weights.init(1, Q ? mma_warps : 2), xs.init(1, 2);
        mbarrier_init(fix_up_memory, mma_warps), mbarrier_init(fix_up_memory + 1, 1);
        mbarrier_init_fence();
    }
    __syncthreads();
    FixUp fix_up_barriers{fix_up_memory, fix_up_memory + 1};
    if (warp * 32 >= L::team) { // what computes no norms
        // 40 + 2 · 232 are the 3 · 168 registers of the launch.
        if constexpr (Q) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp >= L::weight_warp) {
            if (threadIdx.x % 32 != 0) return;
            if (warp == L::weight_warp) load_weights<L>(params, weights);
            else load_x<L>(params, xs, grid_barrier);
            return;
        }
        wait_for_inputs();
        for (int p = 0; p < params.n_phases; p++)
            if (warp == signal_warp) signal_fix_up(params, p, fix_up_barriers);
            else await_fix_up(params, p, fix_up_barriers);
        return;
    }
    if constexpr (Q) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    wait_for_inputs();
    tokens.init(params);
    PipelinePosition<L> at;
    unsigned            round = 0; // of the grid barrier
    for (int p = 0; p < params.n_phases; p++) {
        const Phase& phase = params.phase[p];
        if (StreamKRange(stream_k_of(phase)).empty()) grid_barrier.wait_all(round);
        else if (warp < mma_warps) gemm<L>(phase, params, tokens, weights, xs, at, fix_up_barriers);
        else if (warp == signal_warp) signal_fix_up(params, p, fix_up_barriers);
        else if (warp == fix_up_warp) await_fix_up(params, p, fix_up_barriers);
        if (phase.epilogue == Epilogue::add_norm) {
            grid_barrier.arrive();
            round++;
            constexpr int most = max_norm_cols / L::team / 4;
            if (phase.result[0].rows <= most / 2 * L::team * 4)
                add_norm<L, most / 2>(phase, params, grid_barrier, round, scratch);
            else if (phase.result[0].rows <= most * 3 / 4 * L::team * 4)
                add_norm<L, most * 3 / 4>(phase, params, grid_barrier, round, scratch);
            else add_norm<L, most>(phase, params, grid_barrier, round, scratch);
        }
        if (p + 1 == params.n_phases) break;
        fence_async_global();
        grid_barrier.arrive();
        round++;
    }
    // The last CTA resets the counters for the next launch.
    if (threadIdx.x == 0 && atomicAdd(params.grid_barrier + 1, 1) == gridDim.x - 1)
        params.grid_barrier[0] = params.grid_barrier[1] = 0;
#endif
}

// False: something else holds some of the SMs, so that not all CTAs can run at once.
template <int N, bool Q>
bool launch(const Params& params, Context& gpu) {
    using L = Layout<N, Q>;
    if (prepare_kernel(gpu, layer_kernel<N, Q>, L::threads, L::shared_bytes) < 1) return false;
    // Alone on the device all CTAs will run in any case: the kernels before this one in the stream end by themselves.
    const cudaError_t status =
        launch_kernel(gpu.alone_in_step ? Launch::programmatic : Launch::cooperative, layer_kernel<N, Q>,
                      dim3(unsigned(gpu.n_sms)), L::threads, L::shared_bytes, gpu, params);
    if (status == cudaErrorCooperativeLaunchTooLarge) {
        cudaGetLastError(); // the caller falls back
        return false;
    }
    gpu.note(status);
    return true;
}

} // namespace

} // namespace quire::cuda::layer_kernel

namespace quire::cuda {

using namespace layer_kernel;

std::size_t prepare_layer_kernel(Context& gpu) {
    if (!gpu.sm90 || !gpu.cooperative || gpu.layer.grid_barrier != nullptr) return 0;
    constexpr std::size_t tile   = std::size_t(max_tokens) * tile_n * sizeof(float);
    const std::size_t     before = gpu.bytes;
    gpu.layer.partial_sums    = static_cast<float*>(gpu.take(std::size_t(gpu.n_sms + max_norm_cols / tile_n) * tile));
    gpu.layer.fix_up          = static_cast<float4*>(gpu.take(std::size_t(gpu.n_sms) * tile));
    gpu.layer.fix_up_arrivals = static_cast<unsigned*>(gpu.take(max_phases * max_tiles * sizeof(unsigned)));
    gpu.layer.grid_barrier    = static_cast<unsigned*>(gpu.take(256));
    return gpu.bytes - before;
}

namespace {

// The operation on the tokens from `first` on.
Operation from_token(Operation op, int first) {
    const auto move = [&](auto*& at, std::int64_t bytes) {
        if (at != nullptr)
            at = reinterpret_cast<std::remove_reference_t<decltype(at)>>(std::intptr_t(at) + first * bytes);
    };
    move(op.x, op.cols * (op.x_is_float ? 4 : 2));
    move(op.residual, op.cols * 4);
    move(op.out, op.cols * 2);
    for (Projection& p : op.projection) move(p.out, p.weight.rows * (p.out_is_float ? 4 : 2));
    move(op.rope.q, op.rope.n_heads * op.rope.q_dim * 2);
    move(op.rope.k, op.rope.n_kv_heads * op.rope.head_dim * 2);
    move(op.rope.v, op.rope.n_kv_heads * op.rope.value_dim * 2);
    return op;
}

int run_pass(const Operation* ops, int n_ops, int n_tokens, const Plan& plan, Context& gpu) {
    Params    params{};
    const int done = compile(ops, n_ops, n_tokens, gpu, params);
    if (done == 0) return 0;
    const auto& room       = gpu.layer;
    params.plan            = plan;
    params.n_tokens        = n_tokens;
    params.partial_sums    = room.partial_sums;
    params.fix_up          = room.fix_up;
    params.fix_up_arrivals = room.fix_up_arrivals;
    params.grid_barrier    = room.grid_barrier;
    const auto run         = [&]<bool Q>(std::bool_constant<Q>) {
        switch (rounded(n_tokens)) {
            case 8: return launch<8, Q>(params, gpu);
            case 16: return launch<16, Q>(params, gpu);
            case 32: return launch<32, Q>(params, gpu);
            case 64: return launch<64, Q>(params, gpu);
            case 128: return launch<128, Q>(params, gpu);
            case 192: return launch<192, true>(params, gpu);
            default: return launch<256, true>(params, gpu);
        }
    };
    const bool ran = params.quantised ? run(std::true_type{}) : run(std::false_type{});
    return ran ? done : 0;
}

} // namespace

int run_layer_kernel(const Operation* ops, int n_ops, int n_tokens, const Plan& plan, Context& gpu) {
    if (n_tokens < 1) return 0;
    if (n_tokens <= max_tokens) return run_pass(ops, n_ops, n_tokens, plan, gpu);
    // All passes or none: beside another engine the launch of a later one could be impossible.
    if (n_tokens > max_quantised_layer_rows || !gpu.alone_in_step) return 0;
    constexpr int most_ops = 2 * max_phases; // of a launch
    const int     n_passes = (n_tokens + max_tokens - 1) / max_tokens, some = std::min(n_ops, most_ops),
              each = (n_tokens + 8 * n_passes - 1) / (8 * n_passes) * 8;
    int done       = 0;
    for (int first = 0; first < n_tokens; first += each) {
        Operation rows[most_ops];
        for (int i = 0; i < some; i++) rows[i] = from_token(ops[i], first);
        Plan rest = plan;
        if (rest.positions != nullptr) rest.positions += first;
        if (rest.slots != nullptr) rest.slots += first;
        const int ran = run_pass(rows, some, std::min(each, n_tokens - first), rest, gpu);
        if (first == 0) done = ran;
        else if (ran != done) gpu.note(cudaErrorLaunchFailure);
        if (ran == 0) break;
    }
    return done;
}

} // namespace quire::cuda
