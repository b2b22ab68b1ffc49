// Everything between two attention operations of a step with several tokens, as one persistent kernel: the GEMMs with weights of
// halves alternate with what follows them (residual and norm, SwiGLU, RoPE and KV store). While the CTAs wait for each other, the
// weights of the next GEMMs are already being loaded into a ring buffer in shared memory, so the memory is always busy. CTAs that
// wait for each other have to be on the GPU at the same time: beside another engine this is a cooperative launch.
//
// A GEMM is cut into tiles of 128 rows of weights, and these into steps of 64 columns, which are distributed evenly and in order over
// the CTAs (stream-K). If several CTAs share a tile, the one that begins it adds the others' partial sums in the order of the
// columns and finishes it. Only before a norm, which needs whole rows, all sums are left in memory. So the sums of a row depend
// only on the number of SMs.
//
// A tile consists of 8 times 8 pairs of rows that belong together: consecutive rows, gate and up, or the two rows of a RoPE pair. The
// TMA loads them in an order that gives both sums of a pair to the same thread.
//
// The warps of a CTA: two warpgroups multiply (wgmma: 64 rows of weights by all tokens), one warp loads weights, one loads
// x, one signals partial sums to other CTAs, one waits for such signals; the other warps, and some of these, compute norms.
//
// Limits: Hopper; up to 128 tokens; weights of halves, cols a multiple of 8, rows of 16 (gate and up: of 8); RMS norms of up to
// 8,192 columns; head_dim 16 to 128, a power of two, RoPE on all of it.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "../paged_kv.cuh"
#include "../pipeline.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/wgmma.cuh"
#include "../rope.cuh"
#include "../warp.cuh"
#include "layer_program.cuh"

namespace quire::cuda::layer_kernel {

namespace {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

__device__ int product_of(const Part& part, int tile) {
    int which = 0;
    while (tile >= part.first_tile[which + 1]) which++;
    return which;
}

// The steps of all tiles are numbered through and dealt out to as many blocks as there can be, so that each of these has some:
// where a block's share begins, and whose a step is.
__device__ int      n_steps(const Part& part) { return part.first_tile[part.n_projections] * part.n_steps; }
__device__ unsigned sharing(const Part& part) { return min(gridDim.x, unsigned(n_steps(part))); }
__device__ int      begin_of(const Part& part, unsigned block) {
    return int(unsigned(n_steps(part)) * min(block, sharing(part)) / sharing(part));
}
__device__ int owner_of(const Part& part, int step) {
    return int((unsigned(step + 1) * sharing(part) - 1) / unsigned(n_steps(part)));
}

struct Share {
    int begin, end, of_tile;

    __device__ Share(const Part& part)
        : begin(begin_of(part, blockIdx.x)), end(begin_of(part, blockIdx.x + 1)), of_tile(part.n_steps) {}
    __device__ bool empty() const { return begin == end; }
    __device__ int  first_tile() const { return begin / of_tile; }
    __device__ int  last_tile() const { return (end - 1) / of_tile; }
    __device__ bool begins(int tile) const { return tile * of_tile >= begin; }
    __device__ bool ends(int tile) const { return (tile + 1) * of_tile <= end; }
    // Whether the block leaves its sums of its first tile to another one; whether others do of its last.
    __device__ bool leaves() const { return !begins(first_tile()); }
    __device__ bool awaits() const { return begins(last_tile()) && !ends(last_tile()); }
};

// What other blocks wrote in this kernel is not looked for in the first-level cache.
__device__ float4 shared_sums(const float* p) { return __ldcg(reinterpret_cast<const float4*>(p)); }
__device__ void   add_up(float4& v, float4 w) { v.x += w.x, v.y += w.y, v.z += w.z, v.w += w.w; }
__device__ uint2  as_halves(float4 v) {
    const __half2 a = __floats2half2_rn(v.x, v.y), b = __floats2half2_rn(v.z, v.w);
    return {reinterpret_cast<const std::uint32_t&>(a), reinterpret_cast<const std::uint32_t&>(b)};
}
// Counts one up, after what was written before; waits until so many are counted.
__device__ void tell(unsigned* counter) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ void hear(const unsigned* counter, unsigned n) {
    unsigned seen;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    while (seen < n);
}

struct Team {
    static __device__ void          sync() { asm volatile("bar.sync 1, %0;" ::"n"(team) : "memory"); }
    static __device__ constexpr int size() { return team; }
};

// All blocks wait for one another.
struct Meeting {
    unsigned* counter;

    __device__ void arrive() const { // by the team
        Team::sync();
        if (threadIdx.x == 0) tell(counter);
    }
    __device__ void wait(unsigned round) const { hear(counter, round * gridDim.x); } // until all have arrived so often
    __device__ void wait_all(unsigned round) const {                                 // by the team
        if (threadIdx.x == 0) wait(round);
        Team::sync();
    }
};

template <int N>
__device__ void bring_weights(const Parts& parts, const Pipeline<weight_stages(N)>& ring) {
    for (int p = 0; p < parts.n_parts; p++)
        for (int k = 0; k < parts.part[p].n_projections; k++) tma_prefetch(parts.part[p].weight[k]);
    const std::uint64_t             policy = l2_evict_first();
    PipelineState<weight_stages(N)> at     = ring.producer_start();
    for (int p = 0; p < parts.n_parts; p++) {
        const Part& part = parts.part[p];
        const Share share(part);
        int         tile = share.begin / part.n_steps, step = share.begin % part.n_steps;
        for (int i = share.begin; i < share.end; i++) {
            const int which = product_of(part, tile), place = (tile - part.first_tile[which]) * part.apart[which];
            ring.producer_acquire(at);
            mbarrier_arrive_expect_tx(ring.full + at.stage, weight_bytes);
            tma_copy_5d(ring.memory + at.stage * weight_bytes, part.weight[which], step * tile_k,
                        part.along[which] == 3 ? place : 0, part.along[which] == 4 ? place : 0, ring.full + at.stage,
                        policy);
            at.advance();
            if (++step == part.n_steps) step = 0, tile++;
        }
    }
}

template <int N>
__device__ void bring_x(const Parts& parts, const Pipeline<x_stages(N)>& ring, const Meeting& meeting) {
    for (int p = 0; p < parts.n_parts; p++) tma_prefetch(parts.part[p].x);
    wait_for_inputs();
    PipelineState<x_stages(N)> at    = ring.producer_start();
    unsigned                   round = 0;
    for (int p = 0; p < parts.n_parts; p++) {
        const Part& part = parts.part[p];
        const Share share(part);
        if (p > 0 && !share.empty()) {
            meeting.wait(round);
            fence_async_global();
        }
        int step = share.begin % part.n_steps;
        for (int i = share.begin; i < share.end; i++) {
            ring.producer_acquire(at);
            mbarrier_arrive_expect_tx(ring.full + at.stage, x_bytes(N));
            tma_copy_2d(ring.memory + at.stage * x_bytes(N), part.x, step * tile_k, 0, ring.full + at.stage);
            at.advance();
            if (++step == part.n_steps) step = 0;
        }
        round += part.epilogue == Epilogue::add_norm ? 2 : 1;
    }
}

// At the end of a tile a thread has the sums of one of its 64 pairs and N / 4 tokens: what(token, first, second) for each.
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

// The tokens of the step, worked out once: where in the cache they are, of head 0 (-1: nowhere), and their positions.
struct Tokens {
    std::int64_t place[most_tokens];
    float        position[most_tokens];

    __device__ void learn(const Parts& parts) { // by the team
        const RopeStore& a = parts.rope;
        const int        t = int(threadIdx.x);
        if (t < parts.n_tokens && a.block_size > 0) {
            const int          slot = parts.plan.slots[t];
            const std::int64_t at   = kv_row_of_slot(slot, 0, a.n_kv_heads, a.block_size) * a.head_dim;
            place[t]                = slot < 0 ? -1 : at;
            position[t]             = float(parts.plan.positions[t]);
        }
        Team::sync();
    }
};

// q is rotated, and k on its way into the cache, with v.
template <int N>
__device__ void finish_rope(const Part& part, const Parts& parts, const Tokens& tokens, int which, int pair,
                            const float (&d)[N / 2]) {
    const Result&    r     = part.result[which];
    const RopeStore& a     = parts.rope;
    const bool       turns = which < 2, apart = turns && a.neox; // two rows that are half a head apart
    const int        D = a.head_dim, head = pair / (D / 2), in_head = pair % (D / 2);
    const int        one = apart ? in_head : 2 * in_head, other = apart ? in_head + D / 2 : 2 * in_head + 1;
    const float bias = r.bias ? r.bias[head * D + one] : 0.0f, other_bias = r.bias ? r.bias[head * D + other] : 0.0f;
    const float frequency = turns ? a.inv_freq[in_head] : 0.0f;
    auto*       to        = reinterpret_cast<__half*>(which == 0   ? a.q
                                                      : which == 1 ? a.cache_k
                                                                   : a.cache_v) +
               std::int64_t(head) * (which == 0 ? 1 : kv_head_stride(a.block_size)) * D + one;
    for_each_token<N>(d, parts.n_tokens, [&](int token, float v, float u) {
        const std::int64_t at = which == 0 ? std::int64_t(token) * r.rows : tokens.place[token];
        if (at < 0) return; // only fills up a graph
        float sine = 0, cosine = 1;
        if (turns) {
            rope_angle(tokens.position[token], frequency, sine, cosine);
            sine *= a.scale, cosine *= a.scale;
        }
        v += bias, u += other_bias;
        const float2 rotated = rotate_pair(v, u, sine, cosine);
        if (apart) to[at] = __float2half(rotated.x), to[at + D / 2] = __float2half(rotated.y);
        else *reinterpret_cast<__half2*>(to + at) = __floats2half2_rn(rotated.x, rotated.y);
    });
}

// What becomes of a tile whose sums are complete.
template <int N>
__device__ void finish(const Part& part, const Parts& parts, const Tokens& tokens, int tile, const float (&d)[N / 2]) {
    const int     which  = product_of(part, tile);
    const Result& r      = part.result[which];
    const int     pair   = (tile - part.first_tile[which]) * (tile_rows / 2) + pair_of_thread();
    auto*         halves = static_cast<__half*>(r.to);
    if (pair * (part.epilogue == Epilogue::swiglu ? 1 : 2) >= r.rows) return;
    if (part.epilogue == Epilogue::rope_store) {
        finish_rope<N>(part, parts, tokens, which, pair, d);
    } else if (part.epilogue == Epilogue::swiglu) {
        for_each_token<N>(d, parts.n_tokens, [&](int token, float v, float u) {
            const float gate = part.up_first ? u : v, up = part.up_first ? v : u;
            halves[std::int64_t(token) * r.rows + pair] = __float2half(swiglu(gate, up));
        });
    } else {
        const float2 bias = r.bias ? reinterpret_cast<const float2*>(r.bias)[pair] : float2{0, 0};
        for_each_token<N>(d, parts.n_tokens, [&](int token, float v, float u) {
            const std::int64_t at = std::int64_t(token) * r.rows / 2 + pair;
            if (r.is_float) static_cast<float2*>(r.to)[at] = {v + bias.x, u + bias.y};
            else reinterpret_cast<__half2*>(halves)[at] = __floats2half2_rn(v + bias.x, u + bias.y);
        });
    }
}

// Between the warps that multiply and those that speak with other blocks: sums are left; those of others are there.
struct Talk {
    std::uint64_t *left, *there;
    unsigned       left_parity = 0, there_parity = 0;
};

// Where a block of threads is in both rings.
template <int N>
struct Position {
    PipelineState<weight_stages(N)> w;
    PipelineState<x_stages(N)>      x;
};

// The block's share of a part's products.
template <int N>
__device__ void multiply(const Part& part, const Parts& parts, const Tokens& tokens,
                         const Pipeline<weight_stages(N)>& weights, const Pipeline<x_stages(N)>& xs, Position<N>& at,
                         Talk& talk) {
    constexpr int       words = N / 8, of_block = words * multiplying * 32; // of what is left
    const int           group  = uniform(int(threadIdx.x) / 128);
    const bool          leader = threadIdx.x % 128 == 0;
    const Share         share(part);
    const std::uint64_t w0 = matrix_descriptor(shared_address(weights.memory) + unsigned(group) * weight_bytes / 2, 16,
                                               1024),
                        x0 = matrix_descriptor(shared_address(xs.memory), 16, 1024);
    float d[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) d[i] = 0;
    int        old_w = 0, old_x = 0; // places that the products before these read
    const auto free = [&] {
        if (leader) weights.consumer_release(old_w), xs.consumer_release(old_x);
    };
    for (int unit = share.begin, tile = share.first_tile(); unit < share.end; tile++) {
        const int n = min(share.end, (tile + 1) * part.n_steps) - unit;
        for (int i = 0; i < n; i++) {
            weights.consumer_wait(at.w);
            xs.consumer_wait(at.x);
            const std::uint64_t w = advance(w0, unsigned(uniform(at.w.stage)) * weight_bytes),
                                x = advance(x0, unsigned(uniform(at.x.stage)) * x_bytes(N));
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < tile_k / 16; k++)
                wgmma_ss<N>(d, advance(w, unsigned(k) * 32), advance(x, unsigned(k) * 32), k > 0 || i > 0);
            wgmma_commit();
            if (i > 0) {
                wgmma_wait<1>();
                free();
            }
            old_w = at.w.stage, old_x = at.x.stage;
            at.w.advance(), at.x.advance();
        }
        wgmma_wait<0>();
        wgmma_pin(d);
        free();
        unit += n;
        if (part.epilogue == Epilogue::add_norm) {
            float* to = parts.sums + std::int64_t(int(blockIdx.x) + tile) * parts.n_tokens * tile_rows;
            for_each_token<N>(d, parts.n_tokens, [&](int token, float v, float u) {
                reinterpret_cast<float2*>(to + token * tile_rows)[pair_of_thread()] = {v, u};
            });
        } else if (!share.begins(tile)) {
            float4* to = parts.left + std::int64_t(blockIdx.x) * of_block + threadIdx.x;
#pragma unroll
            for (int i = 0; i < words; i++)
                to[i * multiplying * 32] = {d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]};
            __syncwarp();
            if (threadIdx.x % 32 == 0) mbarrier_arrive(talk.left);
        } else {
            if (!share.ends(tile)) {
                mbarrier_wait(talk.there, talk.there_parity);
                talk.there_parity ^= 1;
                const int last = owner_of(part, (tile + 1) * part.n_steps - 1);
#pragma unroll 1
                for (int b = int(blockIdx.x) + 1; b <= last; b++) {
                    const float4* from = parts.left + std::int64_t(b) * of_block + threadIdx.x;
                    float4        v[words];
#pragma unroll
                    for (int i = 0; i < words; i++) v[i] = __ldcg(from + i * multiplying * 32);
#pragma unroll
                    for (int i = 0; i < words; i++)
                        d[4 * i] += v[i].x, d[4 * i + 1] += v[i].y, d[4 * i + 2] += v[i].z, d[4 * i + 3] += v[i].w;
                }
            }
            finish<N>(part, parts, tokens, tile, d);
        }
    }
}

// Beside those that multiply, by a warp each.
__device__ void tell_others(const Part& part, const Parts& parts, Talk& talk) {
    const Share share(part);
    if (part.epilogue == Epilogue::add_norm || !share.leaves()) return;
    mbarrier_wait(talk.left, talk.left_parity);
    talk.left_parity ^= 1;
    if (threadIdx.x % 32 == 0) tell(parts.arrived + share.first_tile());
}
__device__ void hear_others(const Part& part, const Parts& parts, const Talk& talk) {
    const Share share(part);
    if (part.epilogue == Epilogue::add_norm || !share.awaits() || threadIdx.x % 32 != 0) return;
    const int tile = share.last_tile();
    hear(parts.arrived + tile, unsigned(owner_of(part, (tile + 1) * part.n_steps - 1)) - blockIdx.x);
    parts.arrived[tile] = 0; // for the next part
    mbarrier_arrive(talk.there);
}

// The sums of a tile for one token: so many parts of 128 floats, `stride` floats apart.
struct Sums {
    const float* first;
    int          n;
};
__device__ Sums sums_of(const Part& part, const Parts& parts, int tile, int token) {
    const int begin = tile * part.n_steps, b0 = owner_of(part, begin), b1 = owner_of(part, begin + part.n_steps - 1);
    return {parts.sums + (std::int64_t(b0 + tile) * parts.n_tokens + token) * tile_rows, b1 - b0 + 1};
}

// residual += sums, and its norm: a token for a block. `Most` times four columns a thread.
template <int Most>
__device__ void combine_norm(const Part& part, const Parts& parts, const Meeting& meeting, unsigned round,
                             float* scratch) {
    const int  cols = part.result[0].rows, stride = parts.n_tokens * tile_rows;
    bool       waited = false;
    const auto wait   = [&] {
        if (!waited) meeting.wait_all(round);
        waited = true;
    };
    for (int t = int(blockIdx.x); t < parts.n_tokens; t += int(gridDim.x)) {
        float4 v[Most], w[Most];
        Sums   from[Most];
        int    most = 0;
#pragma unroll
        for (int i = 0; i < Most; i++) {
            const int c = (int(threadIdx.x) + i * team) * 4;
            from[i]     = {nullptr, 0};
            v[i] = w[i] = {0, 0, 0, 0};
            if (c >= cols) continue;
            from[i] = sums_of(part, parts, c / tile_rows, t);
            from[i].first += c % tile_rows;
            most = max(most, from[i].n);
            w[i] = *reinterpret_cast<const float4*>(part.norm_weight + c);
            v[i] = shared_sums(part.residual + std::int64_t(t) * cols + c);
            if (part.result[0].bias) add_up(v[i], *reinterpret_cast<const float4*>(part.result[0].bias + c));
        }
        wait();
        for (int p = 0; p < most; p += 3) { // many loads under way
            float4 u[3][Most];
#pragma unroll
            for (int q = 0; q < 3; q++)
#pragma unroll
                for (int i = 0; i < Most; i++)
                    u[q][i] = p + q < from[i].n ? shared_sums(from[i].first + std::int64_t(p + q) * stride)
                                                : float4{0, 0, 0, 0};
#pragma unroll
            for (int q = 0; q < 3; q++)
#pragma unroll
                for (int i = 0; i < Most; i++) add_up(v[i], u[q][i]);
        }
        float squares = 0;
#pragma unroll
        for (int i = 0; i < Most; i++) squares += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
        const float scale = rsqrtf(cta_sum<Team>(squares, scratch) / float(cols) + part.eps);
#pragma unroll
        for (int i = 0; i < Most; i++) {
            const int c = (int(threadIdx.x) + i * team) * 4;
            if (c >= cols) continue;
            const std::int64_t at                                                   = std::int64_t(t) * cols + c;
            *reinterpret_cast<float4*>(part.residual + at)                          = v[i];
            *reinterpret_cast<uint2*>(static_cast<__half*>(part.result[0].to) + at) = as_halves(
                {v[i].x * scale * w[i].x, v[i].y * scale * w[i].y, v[i].z * scale * w[i].z, v[i].w * scale * w[i].w});
        }
    }
    wait();
}

#endif

template <int N>
__global__ void __launch_bounds__(threads, 1) dense_kernel(const __grid_constant__ Parts parts) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char memory[];
    __shared__ std::uint64_t         barriers[2 * (weight_stages(N) + x_stages(N))], talks[2];
    __shared__ float                 scratch[32];
    __shared__ Tokens                tokens;
    const Pipeline<weight_stages(N)> weights{memory, barriers, barriers + weight_stages(N)};
    const Pipeline<x_stages(N)>      xs{memory + weight_stages(N) * weight_bytes, barriers + 2 * weight_stages(N),
                                   barriers + 2 * weight_stages(N) + x_stages(N)};
    const Meeting                    meeting{parts.counter};
    const int                        warp = uniform(int(threadIdx.x) / 32);
    if (threadIdx.x == 0) {
        weights.init(1, 2), xs.init(1, 2);
        mbarrier_init(talks, multiplying), mbarrier_init(talks + 1, 1);
        mbarrier_init_fence();
    }
    __syncthreads();
    if (warp >= weight_warp) {
        if (threadIdx.x % 32 != 0) return;
        if (warp == weight_warp) bring_weights<N>(parts, weights);
        else bring_x<N>(parts, xs, meeting);
        return;
    }
    wait_for_inputs();
    tokens.learn(parts);
    Position<N> at;
    Talk        talk{talks, talks + 1};
    unsigned    round = 0; // of meetings
    for (int p = 0; p < parts.n_parts; p++) {
        const Part& part = parts.part[p];
        if (Share(part).empty()) meeting.wait_all(round);
        else if (warp < multiplying) multiply<N>(part, parts, tokens, weights, xs, at, talk);
        else if (warp == telling_warp) tell_others(part, parts, talk);
        else if (warp == hearing_warp) hear_others(part, parts, talk);
        if (part.epilogue == Epilogue::add_norm) {
            meeting.arrive();
            round++;
            if (part.result[0].rows <= 3 * team * 4) combine_norm<3>(part, parts, meeting, round, scratch);
            else combine_norm<4>(part, parts, meeting, round, scratch);
        }
        if (p + 1 == parts.n_parts) break;
        fence_async_global();
        meeting.arrive();
        round++;
    }
    // The last one to leave makes the counters ready for the next launch.
    if (threadIdx.x == 0 && atomicAdd(parts.counter + 1, 1) == gridDim.x - 1) parts.counter[0] = parts.counter[1] = 0;
#endif
}

// False: something else has some of the GPU's processors for itself, so that not all blocks can run at once.
template <int N>
bool launch(const Parts& parts, Context& gpu) {
    if (prepare_kernel(gpu, dense_kernel<N>, threads, shared_bytes(N)) < 1) return false;
    // Alone on the device its blocks meet in any case: what comes before it in the stream ends by itself.
    const cudaError_t status =
        launch_kernel(gpu.alone_in_step ? Launch::programmatic : Launch::cooperative, dense_kernel<N>,
                      dim3(unsigned(gpu.n_sms)), threads, shared_bytes(N), gpu, parts);
    if (status == cudaErrorCooperativeLaunchTooLarge) {
        cudaGetLastError(); // it has been dealt with
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
    constexpr std::size_t tile   = std::size_t(most_tokens) * tile_rows * sizeof(float);
    const std::size_t     before = gpu.bytes;
    gpu.layer.partial_sums       = static_cast<float*>(gpu.take(std::size_t(gpu.n_sms + most_tiles) * tile));
    gpu.layer.fix_up             = static_cast<float4*>(gpu.take(std::size_t(gpu.n_sms) * tile));
    gpu.layer.fix_up_arrivals    = static_cast<unsigned*>(gpu.take(most_tiles * sizeof(unsigned)));
    gpu.layer.grid_barrier       = static_cast<unsigned*>(gpu.take(256));
    return gpu.bytes - before;
}

int run_layer_kernel(const Operation* ops, int n_ops, int n_tokens, const Plan& plan, Context& gpu) {
    if (n_tokens < 1 || n_tokens > most_tokens) return 0;
    Parts     parts{};
    const int done = compile(ops, n_ops, n_tokens, gpu, parts);
    if (done == 0) return 0;
    const auto& room = gpu.layer;
    parts.plan       = plan;
    parts.n_tokens   = n_tokens;
    parts.sums       = room.partial_sums;
    parts.left       = room.fix_up;
    parts.arrived    = room.fix_up_arrivals;
    parts.counter    = room.grid_barrier;
    const auto run   = [&] {
        switch (rounded(n_tokens)) {
            case 8: return launch<8>(parts, gpu);
            case 16: return launch<16>(parts, gpu);
            case 32: return launch<32>(parts, gpu);
            case 64: return launch<64>(parts, gpu);
            default: return launch<128>(parts, gpu);
        }
    };
    return run() ? done : 0;
}

} // namespace quire::cuda
