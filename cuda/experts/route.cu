// Route: the scores of all experts, the choice of each token, and for many tokens the tiles of pairs, in one launch. CTAs divide
// experts and tokens among themselves; the last one to arrive of some tokens chooses for them, a warp for each token, and the last
// of all makes the tiles.
//
// Bytes: the router's weights, float32, once for 8 tokens: 128 × 2048 × 4 = 1 MiB for Qwen3-30B-A3B.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "../arrivals.cuh"
#include "experts.cuh"

namespace quire::cuda {

namespace {

constexpr int warps = 8; // of a CTA: experts, then tokens

// A float as an integer of the same order; never 0 but for one NaN. -0 is 0.
__device__ std::uint32_t ordered(float v) {
    const std::uint32_t bits = __float_as_uint(v + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ float unordered(std::uint32_t rank) {
    return __uint_as_float(rank & 0x80000000u ? rank & 0x7fffffffu : ~rank);
}

// The groups of which experts are chosen, a bit for each. rank: of the experts of this lane.
template <int PerLane>
__device__ std::uint64_t best_groups(const Route& op, const std::uint32_t (&rank)[PerLane]) {
    const int   lane = threadIdx.x % 32, size = op.n_experts / op.n_groups;
    const float infinity = __int_as_float(0x7f800000);
    float       value[2] = {-infinity, -infinity}; // of groups lane and lane + 32
    for (int g = 0; g < op.n_groups; g++) {
        std::uint32_t first = 0, second = 0; // the two highest ranks
#pragma unroll
        for (int i = 0; i < PerLane; i++) {
            const std::uint32_t r = (lane + 32 * i) / size == g && lane + 32 * i < op.n_experts ? rank[i] : 0;
            second = max(second, min(first, r)), first = max(first, r);
        }
        const std::uint32_t best  = __reduce_max_sync(~0u, first);
        const unsigned      lanes = __ballot_sync(~0u, first == best);
        const std::uint32_t next =
            __reduce_max_sync(~0u, first == best && lane == __ffs(int(lanes)) - 1 ? second : first);
        if (lane == g % 32)
            value[g / 32] = size > 1 && !op.best_alone ? unordered(best) + unordered(next) : unordered(best);
    }
    std::uint64_t kept = 0;
    for (int j = 0; j < op.n_groups_used; j++) {
        std::uint32_t mine[2], best = 0;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int g = lane + 32 * i;
            mine[i]     = g < op.n_groups && (kept >> g & 1) == 0 ? ordered(value[i]) : 0;
            best        = max(best, mine[i]);
        }
        best                 = __reduce_max_sync(~0u, best);
        const unsigned group = __reduce_min_sync(~0u, mine[0] == best   ? unsigned(lane)
                                                      : mine[1] == best ? unsigned(lane + 32)
                                                                        : ~0u); // the lowest
        kept |= std::uint64_t(1) << (group % 64);
    }
    return kept;
}

// The choice of one token by a warp. Expert e is with lane e % 32; PerLane · 32 are enough for all.
template <int PerLane>
__device__ void choose(const Route& op, const float* scores, float* out, bool none) {
    const int     lane = threadIdx.x % 32, n = op.n_experts, k = op.n_used;
    const float   infinity = __int_as_float(0x7f800000);
    auto*         experts  = reinterpret_cast<std::int32_t*>(out);
    float         gated[PerLane];
    std::uint32_t rank[PerLane]; // 0: chosen
#pragma unroll
    for (int i = 0; i < PerLane; i++) gated[i] = lane + 32 * i < n ? __ldcg(scores + lane + 32 * i) : -infinity;
    if (none) {
        for (int i = lane; i < k; i += 32) experts[i] = -1, out[k + i] = 0;
        return;
    }
    if (op.gating == Gating::softmax) {
        float best = -infinity, sum = 0;
#pragma unroll
        for (int i = 0; i < PerLane; i++) best = fmaxf(best, gated[i]);
        best = warp_max(best);
#pragma unroll
        for (int i = 0; i < PerLane; i++)
            if (lane + 32 * i < n) sum += gated[i] = expf(gated[i] - best);
        sum = warp_sum(sum);
#pragma unroll
        for (int i = 0; i < PerLane; i++) gated[i] /= sum;
    }
    if (op.gating == Gating::sigmoid) {
#pragma unroll
        for (int i = 0; i < PerLane; i++) gated[i] = 1 / (1 + expf(-gated[i]));
    }
#pragma unroll
    for (int i = 0; i < PerLane; i++) {
        const int   e = lane + 32 * i;
        const float v = gated[i] + (op.choice_bias && e < n ? op.choice_bias[e] : 0.0f);
        rank[i]       = e >= n ? 0 : ordered(isnan(v) ? -infinity : v);
    }
    if (op.n_groups > 1) {
        const std::uint64_t groups = best_groups<PerLane>(op, rank);
#pragma unroll
        for (int i = 0; i < PerLane; i++)
            if (const int e = lane + 32 * i; e < n && (groups >> (e / (n / op.n_groups)) & 1) == 0) rank[i] = 0;
    }
    float        weight = 0; // lane i: of the i-th choice
    std::int32_t mine   = 0;
    for (int j = 0; j < k; j++) {
        std::uint32_t best = 0;
#pragma unroll
        for (int i = 0; i < PerLane; i++) best = max(best, rank[i]);
        best       = __reduce_max_sync(~0u, best);
        unsigned e = ~0u; // the lowest with that rank
#pragma unroll
        for (int i = PerLane - 1; i >= 0; i--)
            if (rank[i] == best) e = unsigned(lane + 32 * i);
        e           = __reduce_min_sync(~0u, e);
        float value = 0;
#pragma unroll
        for (int i = 0; i < PerLane; i++)
            if (unsigned(lane + 32 * i) == e) rank[i] = 0, value = gated[i];
        value = __shfl_sync(~0u, value, int(e % 32));
        if (lane == j) weight = value, mine = std::int32_t(e);
    }
    const bool is_one = lane < k;
    if (op.gating == Gating::softmax_chosen) {
        const float best = warp_max(is_one ? weight : -infinity);
        weight           = is_one ? expf(weight - best) : 0.0f;
        weight /= warp_sum(weight);
    }
    if (op.normalised) {
        const float sum = warp_sum(is_one ? weight : 0.0f);
        weight /= sum < 6.103515625e-5f ? 6.103515625e-5f : sum; // as quire.compute.routing
    }
    if (is_one)
        experts[lane] = mine, out[k + lane] = weight * op.scale * (op.expert_scale ? op.expert_scale[mine] : 1.0f);
}

// By a warp.
__device__ void choose_for(const Route& op, std::int64_t token, const std::int32_t* slots,
                           const ExpertWorkspace& work) {
    const float* scores = work.scores + token * op.n_experts;
    float*       out    = op.out + token * 2 * op.n_used;
    const bool   none   = slots != nullptr && slots[token] < 0;
    if (op.n_experts <= 128) choose<4>(op, scores, out, none);
    else if (op.n_experts <= 256) choose<8>(op, scores, out, none);
    else if (op.n_experts <= 512) choose<16>(op, scores, out, none);
    else choose<most_experts / 32>(op, scores, out, none);
}

// By all threads of a CTA.
__device__ void make_tiles(const Route& op, int n_pairs, int tile, const ExpertWorkspace& work) {
    __shared__ std::int32_t place[most_experts]; // pairs of an expert; then where the next of them goes
    const int               n = op.n_experts, k = op.n_used;
    const auto              each = [&](auto use) {
        constexpr int at_once = 8; // loads in flight
        for (int base = int(threadIdx.x); base < n_pairs; base += at_once * int(blockDim.x)) {
            int e[at_once];
#pragma unroll
            for (int i = 0; i < at_once; i++) {
                const int p = base + i * int(blockDim.x);
                e[i]        = p < n_pairs ? __float_as_int(__ldcg(op.out + std::int64_t(p / k) * 2 * k + p % k)) : -1;
            }
#pragma unroll
            for (int i = 0; i < at_once; i++)
                if (e[i] >= 0) use(base + i * int(blockDim.x), e[i]);
        }
    };
    for (int e = int(threadIdx.x); e < n; e += int(blockDim.x)) place[e] = 0;
    __syncthreads();
    each([&](int, int e) { atomicAdd(place + e, 1); });
    __syncthreads();
    // Large tiles with many pairs come first, by quarters: persistent CTAs take them in turn, and so end together.
    if (threadIdx.x < 32) {
        const int classes    = tile > 64 ? 4 : 1;
        int       first_tile = 0;
        for (int c = classes; c > 0; c--) {
            int first = 0;
            for (int base = 0; base < n; base += 32) {
                const int e = base + int(threadIdx.x), count = e < n ? place[e] : 0, full = count / tile,
                          rest  = count % tile,
                          tiles = (c == classes ? full : 0) + (rest > 0 && (rest * classes + tile - 1) / tile == c);
                int end = count, end_tile = tiles; // inclusive sums
#pragma unroll
                for (int step = 1; step < 32; step *= 2) {
                    const int a = __shfl_up_sync(~0u, end, step), b = __shfl_up_sync(~0u, end_tile, step);
                    if (int(threadIdx.x) >= step) end += a, end_tile += b;
                }
                for (int i = 0; i < tiles; i++) {
                    const int     at = c == classes ? i : full; // of the expert's tiles
                    std::int32_t* to = work.tiles + 1 + 3 * (first_tile + end_tile - tiles + i);
                    to[0] = e, to[1] = first + end - count + at * tile, to[2] = min(tile, count - at * tile);
                }
                if (c == 1 && e < n) place[e] = first + end - count;
                first += __shfl_sync(~0u, end, 31), first_tile += __shfl_sync(~0u, end_tile, 31);
            }
        }
        if (threadIdx.x == 0) work.tiles[0] = first_tile;
    }
    __syncthreads();
    each([&](int p, int e) { work.pairs[atomicAdd(place + e, 1)] = p; });
}

// NT: tokens of a CTA. R: experts of a warp. Ahead: loads of a row of weights in flight.
template <int NT, int R, int Ahead>
__global__ void __launch_bounds__(warps * 32, Ahead > 4 ? 1
                                              : R == 1  ? 3
                                                        : 2)
    route_kernel(Route op, int n_tokens, const std::int32_t* slots, int tile, ExpertWorkspace work) {
    reads_early(); // weights
    const int    warp = threadIdx.x / 32, lane = threadIdx.x % 32, cols = op.cols;
    const int    first = int(blockIdx.y) * NT, n = min(NT, n_tokens - first), e = (int(blockIdx.x) * warps + warp) * R;
    const auto*  x = reinterpret_cast<const __half*>(op.x) + std::int64_t(first) * cols;
    const float* w[R];
#pragma unroll
    for (int r = 0; r < R; r++) w[r] = op.weight + std::int64_t(min(e + r, op.n_experts - 1)) * cols;
    float sum[R][NT] = {};
    if (cols % 4 == 0) {
        float4     next[Ahead][R];
        uint2      next_x[NT];
        const auto load = [&](int u, int c) {
            if (c >= cols) return;
#pragma unroll
            for (int r = 0; r < R; r++) next[u][r] = *reinterpret_cast<const float4*>(w[r] + c);
        };
        const auto x_at = [&](int t, int c) {
            return *reinterpret_cast<const uint2*>(x + std::int64_t(min(t, n - 1)) * cols + c);
        };
        const auto load_x = [&](int c) { // ahead only where it is used for several experts
            if (c >= cols) return;
#pragma unroll
            for (int t = 0; t < NT; t++) next_x[t] = x_at(t, c);
        };
#pragma unroll
        for (int u = 0; u < Ahead; u++) load(u, u * 128 + lane * 4);
        wait_for_inputs();
        if (R > 1) load_x(lane * 4);
        for (int base = 0; base < cols; base += Ahead * 128) {
#pragma unroll
            for (int u = 0; u < Ahead; u++) {
                const int c = base + u * 128 + lane * 4;
                float4    v[R];
                uint2     xs[NT];
#pragma unroll
                for (int r = 0; r < R; r++) v[r] = next[u][r];
                load(u, c + Ahead * 128);
                if constexpr (R > 1) {
#pragma unroll
                    for (int t = 0; t < NT; t++) xs[t] = next_x[t];
                    load_x(c + 128);
                }
                if (c >= cols) continue;
#pragma unroll
                for (int t = 0; t < NT; t++) {
                    const uint2  two = R > 1 ? xs[t] : x_at(t, c);
                    const float2 a = as_float2(two.x), b = as_float2(two.y);
#pragma unroll
                    for (int r = 0; r < R; r++) sum[r][t] += v[r].x * a.x + v[r].y * a.y + v[r].z * b.x + v[r].w * b.y;
                }
            }
        }
    } else {
        wait_for_inputs();
        for (int c = lane; c < cols; c += 32)
#pragma unroll
            for (int t = 0; t < NT; t++) {
                const float v = __half2float(x[std::int64_t(min(t, n - 1)) * cols + c]);
#pragma unroll
                for (int r = 0; r < R; r++) sum[r][t] += w[r][c] * v;
            }
    }
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int t = 0; t < NT; t++) {
            const bool  is_one = t < n && e + r < op.n_experts;
            const float total =
                warp_sum(sum[r][t]) * op.score_scale + (op.bias && e + r < op.n_experts ? op.bias[e + r] : 0.0f);
            if (lane == 0 && is_one) work.scores[std::int64_t(first + t) * op.n_experts + e + r] = total;
        }
    if (!is_last_cta(work.arrivals + blockIdx.y, gridDim.x)) return;
    for (int i = warp; i < n; i += warps) choose_for(op, first + i, slots, work);
    if (tile > 0 && is_last_cta(work.arrivals + gridDim.y, gridDim.y)) make_tiles(op, n_tokens * op.n_used, tile, work);
}

// Behind score_tiles(): the choice, a warp for each token; the last CTA makes the tiles.
constexpr int choosers = 16; // warps of a CTA

__global__ void __launch_bounds__(choosers * 32)
    choose_kernel(Route op, int n_tokens, const std::int32_t* slots, int tile, ExpertWorkspace work) {
    wait_for_inputs();
    const int t = int(blockIdx.x) * choosers + int(threadIdx.x) / 32;
    if (t < n_tokens) choose_for(op, t, slots, work);
    if (tile > 0 && is_last_cta(work.arrivals, gridDim.x)) make_tiles(op, n_tokens * op.n_used, tile, work);
}

// A CTA for each row.
__global__ void __launch_bounds__(256)
    gate_rows_kernel(__half* x, int cols, const __half* gate, int gate_cols, const float* weight) {
    __shared__ float sums[32];
    wait_for_inputs();
    const __half* from = gate + std::int64_t(blockIdx.x) * gate_cols;
    float         sum  = 0;
    for (int c = int(threadIdx.x); c < gate_cols; c += 256) sum += __half2float(from[c]) * weight[c];
    const float factor = 1 / (1 + expf(-cta_sum(sum, sums)));
    __half*     row    = x + std::int64_t(blockIdx.x) * cols;
    for (int c = int(threadIdx.x); c < cols; c += 256) row[c] = to_finite(__half2float(row[c]) * factor);
}

} // namespace

// Measured on an H100 with the shapes of Qwen3-30B-A3B.
int expert_tile(std::int64_t n_tokens, int n_experts, int n_used, bool is_fp16, bool on_wgmma) {
    const std::int64_t mean = n_tokens * n_used / n_experts; // pairs of an expert
    if (on_wgmma) return n_tokens <= 2 ? 0 : mean < 48 ? 64 : 256;
    if (n_tokens <= (is_fp16 ? 8 : 4)) return 0;
    return mean < 5 ? 8 : mean < 20 ? 16 : mean < 32 || !is_fp16 ? 32 : 64;
}

void route(const Route& op, std::int64_t n_tokens, const std::int32_t* slots, int tile, const ExpertWorkspace& work,
           Context& gpu) {
    if (can_score_tiles(op, n_tokens)) {
        score_tiles(op, n_tokens, work.scores, gpu);
        run_kernel(choose_kernel, dim3(unsigned((n_tokens + choosers - 1) / choosers)), choosers * 32, 0, gpu, op,
                   int(n_tokens), slots, tile, work);
        return;
    }
    const auto run = [&]<int NT, int R, int Ahead>() {
        const auto blocks = [](std::int64_t n, int each) { return unsigned((n + each - 1) / each); };
        run_kernel(route_kernel<NT, R, Ahead>, dim3(blocks(op.n_experts, warps * R), blocks(n_tokens, NT)), warps * 32,
                   0, gpu, op, int(n_tokens), slots, tile, work);
    };
    // Of few tokens the weights come from the L2 again for each, by more CTAs; of very few all weights come before the input does.
    if (n_tokens <= 4) run.template operator()<1, 1, 16>();
    else if (n_tokens <= 32) run.template operator()<1, 1, 4>();
    else if (n_tokens < 1024) run.template operator()<8, 1, 4>();
    else run.template operator()<8, 4, 1>();
}

void gate_rows(Half* x, std::int64_t rows, std::int64_t cols, const Half* gate, std::int64_t gate_cols,
               const float* weight, Context& gpu) {
    run_kernel(gate_rows_kernel, dim3(unsigned(rows)), 256, 0, gpu, reinterpret_cast<__half*>(x), int(cols),
               reinterpret_cast<const __half*>(gate), int(gate_cols), weight);
}

} // namespace quire::cuda
