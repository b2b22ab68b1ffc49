// What stands between two attentions of a step of some tokens, as one kernel that stays on all processors: products of weights
// of halves, and what becomes of their results (the residual and its norm, SwiGLU, rotation and store), by turns. The weights of the products to come are on their
// way into a ring in shared memory while all blocks wait for one another, so that the memory is busy all the time.
//
// A product is cut into tiles of 128 rows of weights and these into steps of 64 columns, dealt out evenly, in order, to the blocks.
// A block leaves its sums of a tile (or of the part that it has) in memory, token by token; whoever needs results adds up a
// tile's parts, in the order of the columns. So a row's sums depend on the number of processors only.
//
// The warps of a block: two groups of four multiply (wgmma: 64 rows of weights by all tokens), one warp brings weights, one brings
// x; those that multiply and eight more combine.
//
// Limits: Hopper; up to 64 tokens; weights of halves, cols a multiple of 8, rows of 4; RMS norms of up to 8,192 columns.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "bulk.cuh"
#include "kernels.h"
#include "tensor_map.cuh"
#include "warp.cuh"
#include "wgmma.cuh"

namespace quire::cuda {

namespace {

constexpr int                  most_parts = 4, most_tokens = 64, most_tiles = 1024;
constexpr int                  tile_rows = 128, weight_bytes = tile_rows * tile_cols * 2;
constexpr int                  team = 16 * 32, threads = team + 64; // those that multiply and combine, and all
[[maybe_unused]] constexpr int weight_warp = 16, x_warp = 17;

// Stages of the rings of weights and of x, N tokens.
constexpr __host__ __device__ int x_bytes(int N) { return N * tile_cols * 2; }
constexpr __host__ __device__ int x_stages(int N) { return N == 64 ? 4 : 8; }
constexpr __host__ __device__ int weight_stages(int N) { return N <= 16 ? 13 : 12; }
constexpr int shared_bytes(int N) { return weight_stages(N) * weight_bytes + x_stages(N) * x_bytes(N); }

// What becomes of a product's sums.
enum class Then : int { write, swiglu, norm, rope };

struct Result {
    const float* bias;
    void*        to; // [tokens × rows]
    int          rows;
    bool         is_float;
};

// Products of one x, and what follows.
struct Part {
    CUtensorMap  weight[most_products], x; // tiles of 64 rows; of all tokens
    Result       result[most_products];    // of the norm: the first one's `to` gets the normed rows
    int          first_tile[most_products + 1], n_products, n_steps; // of a tile
    Then         then;
    const float* norm_weight;
    float        eps;
    float*       residual;
};

struct Parts {
    Part      part[most_parts];
    RopeStore rope;
    Plan      plan;
    int       n_parts, n_tokens;
    float*    sums;    // of a block's part of a tile, [tokens × 128], at block + tile
    unsigned* counter; // how often a block arrived, and how many are done; zero before and after
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

__device__ int n_tiles(const Part& part) { return part.first_tile[part.n_products]; }
// The steps of all tiles are numbered through and dealt out to as many blocks as there can be, so that each of these has some:
// where a block's share begins, and whose a step is.
__device__ unsigned sharing(const Part& part) { return min(gridDim.x, unsigned(n_tiles(part) * part.n_steps)); }
__device__ int      begin_of(const Part& part, unsigned block) {
    return int(unsigned(n_tiles(part) * part.n_steps) * min(block, sharing(part)) / sharing(part));
}
__device__ int owner_of(const Part& part, int step) {
    return int((unsigned(step + 1) * sharing(part) - 1) / unsigned(n_tiles(part) * part.n_steps));
}
__device__ int product_of(const Part& part, int tile) {
    int which = 0;
    while (tile >= part.first_tile[which + 1]) which++;
    return which;
}

#define F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(d, i) F4(d, i), F4(d, i + 4), F4(d, i + 8), F4(d, i + 12)

// d [64 × N] (+)= A [64 × 16] · B [N × 16]ᵀ, both in shared memory.
template <int N>
__device__ void multiply_tile(float (&d)[N / 2], std::uint64_t a, std::uint64_t b, int add) {
    if constexpr (N == 8)
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, %6, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0,%1,%2,%3}, %4, %5, p, 1, 1, 0, 0;}\n"
            : F4(d, 0)
            : "l"(a), "l"(b), "r"(add));
    else if constexpr (N == 16)
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, %10, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, p, 1, 1, 0, "
            "0;}\n"
            : F4(d, 0), F4(d, 4)
            : "l"(a), "l"(b), "r"(add));
    else if constexpr (N == 32)
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, %18, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
            "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, p, 1, 1, 0, 0;}\n"
            : F16(d, 0)
            : "l"(a), "l"(b), "r"(add));
    else
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, %34, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
            "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,"
            "%28,%29,%30,%31}, %32, %33, p, 1, 1, 0, 0;}\n"
            : F16(d, 0), F16(d, 16)
            : "l"(a), "l"(b), "r"(add));
}

#undef F4
#undef F16

// What other blocks wrote in this kernel is not looked for in the first-level cache.
__device__ float4 shared_sums(const float* p) { return __ldcg(reinterpret_cast<const float4*>(p)); }
__device__ void   add_up(float4& v, float4 w) { v.x += w.x, v.y += w.y, v.z += w.z, v.w += w.w; }
__device__ uint2  as_halves(float4 v) {
    const __half2 a = __floats2half2_rn(v.x, v.y), b = __floats2half2_rn(v.z, v.w);
    return {reinterpret_cast<const std::uint32_t&>(a), reinterpret_cast<const std::uint32_t&>(b)};
}
// What threads wrote, the copy engine sees, once it is known of.
__device__ void show_copy_engine() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

struct Team {
    static __device__ void          sync() { asm volatile("bar.sync 1, %0;" ::"n"(team) : "memory"); }
    static __device__ constexpr int size() { return team; }
};

// All blocks wait for one another.
struct Meeting {
    unsigned* counter;

    __device__ void arrive() const { // by the team
        Team::sync();
        if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
    }
    __device__ void wait(unsigned round) const { // by a thread, until all have arrived so often
        unsigned seen;
        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
        while (seen < round * gridDim.x);
    }
    __device__ void wait_all(unsigned round) const { // by the team
        if (threadIdx.x == 0) wait(round);
        Team::sync();
    }
};

struct Ring {
    unsigned char* memory;
    std::uint64_t *full, *empty;
};

// A place of a ring, and how often it has been used.
template <int Stages>
struct At {
    int      stage  = 0;
    unsigned parity = 0;

    __device__ void next() {
        if (++stage == Stages) stage = 0, parity ^= 1;
    }
    // Waits until what was in the place has been used; the first time there was nothing.
    __device__ void wait_free(const Ring& ring) const { barrier_wait(ring.empty + stage, parity ^ 1); }
    __device__ void wait_full(const Ring& ring) const { barrier_wait(ring.full + stage, parity); }
};

template <int N>
__device__ void bring_weights(const Parts& parts, const Ring& ring) {
    for (int p = 0; p < parts.n_parts; p++)
        for (int k = 0; k < parts.part[p].n_products; k++) prefetch_map(parts.part[p].weight[k]);
    const std::uint64_t  policy = read_once();
    At<weight_stages(N)> at;
    for (int p = 0; p < parts.n_parts; p++) {
        const Part& part = parts.part[p];
        const int   end  = begin_of(part, blockIdx.x + 1);
        int         unit = begin_of(part, blockIdx.x), tile = unit / part.n_steps, step = unit % part.n_steps;
        for (; unit < end; unit++) {
            const int      which = part.then == Then::swiglu ? 0 : product_of(part, tile);
            const bool     pairs = part.then == Then::swiglu; // 64 rows of the gate, then those of up
            const int      row   = pairs ? tile * 64 : (tile - part.first_tile[which]) * tile_rows;
            unsigned char* to    = ring.memory + at.stage * weight_bytes;
            at.wait_free(ring);
            barrier_expect(ring.full + at.stage, weight_bytes);
            copy_tile(to, part.weight[which], step * tile_cols, row, ring.full + at.stage, policy);
            copy_tile(to + weight_bytes / 2, part.weight[pairs ? 1 : which], step * tile_cols, pairs ? row : row + 64,
                      ring.full + at.stage, policy);
            at.next();
            if (++step == part.n_steps) step = 0, tile++;
        }
    }
}

template <int N>
__device__ void bring_x(const Parts& parts, const Ring& ring, const Meeting& meeting) {
    for (int p = 0; p < parts.n_parts; p++) prefetch_map(parts.part[p].x);
    wait_for_inputs();
    At<x_stages(N)> at;
    for (int p = 0; p < parts.n_parts; p++) {
        const Part& part = parts.part[p];
        const int   end  = begin_of(part, blockIdx.x + 1);
        int         unit = begin_of(part, blockIdx.x), step = unit % part.n_steps;
        if (p > 0 && unit < end) {
            meeting.wait(unsigned(2 * p));
            show_copy_engine();
        }
        for (; unit < end; unit++) {
            at.wait_free(ring);
            barrier_expect(ring.full + at.stage, x_bytes(N));
            copy_tile(ring.memory + at.stage * x_bytes(N), part.x, step * tile_cols, 0, ring.full + at.stage);
            at.next();
            if (++step == part.n_steps) step = 0;
        }
    }
}

// Where a block of threads is in both rings.
template <int N>
struct Position {
    At<weight_stages(N)> w;
    At<x_stages(N)>      x;
};

// The block's share of a part's products.
template <int N>
__device__ void multiply(const Part& part, int n_tokens, float* sums, const Ring& weights, const Ring& xs,
                         Position<N>& at) {
    const int           group = uniform(int(threadIdx.x) / 128), lane = int(threadIdx.x % 32);
    const bool          leader = threadIdx.x % 128 == 0;
    const int           end    = begin_of(part, blockIdx.x + 1);
    int                 unit = begin_of(part, blockIdx.x), tile = unit / part.n_steps, step = unit % part.n_steps;
    const std::uint64_t w0 = descriptor(shared_address(weights.memory) + unsigned(group) * weight_bytes / 2, 16, 1024),
                        x0 = descriptor(shared_address(xs.memory), 16, 1024);
    float d[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) d[i] = 0;
    int        old_w = 0, old_x = 0; // places that the products before these read
    const auto free = [&] {
        if (leader) barrier_arrive(weights.empty + old_w), barrier_arrive(xs.empty + old_x);
    };
    for (; unit < end; tile++, step = 0) {
        const int n = min(end - unit, part.n_steps - step);
        for (int i = 0; i < n; i++) {
            at.w.wait_full(weights);
            at.x.wait_full(xs);
            const std::uint64_t w = further(w0, unsigned(uniform(at.w.stage)) * weight_bytes),
                                x = further(x0, unsigned(uniform(at.x.stage)) * x_bytes(N));
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < tile_cols / 16; k++)
                multiply_tile<N>(d, further(w, unsigned(k) * 32), further(x, unsigned(k) * 32), k > 0 || i > 0);
            wgmma_commit();
            if (i > 0) {
                wgmma_wait<1>();
                free();
            }
            old_w = at.w.stage, old_x = at.x.stage;
            at.w.next(), at.x.next();
        }
        wgmma_wait<0>();
        keep(d);
        free();
        unit += n;
        float* to =
            sums + std::int64_t(int(blockIdx.x) + tile) * n_tokens * tile_rows + int(threadIdx.x) / 32 * 16 + lane / 4;
#pragma unroll
        for (int i = 0; i < N / 8; i++)
#pragma unroll
            for (int j = 0; j < 2; j++)
                if (const int token = i * 8 + lane % 4 * 2 + j; token < n_tokens) {
                    to[token * tile_rows]     = d[4 * i + j];
                    to[token * tile_rows + 8] = d[4 * i + 2 + j];
                }
    }
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
        const float scale = rsqrtf(block_sum<Team>(squares, scratch) / float(cols) + part.eps);
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

// A loop over small pieces of work by all threads of all blocks: warps that are neighbours in the work are in different blocks.
__device__ unsigned first_piece() { return (threadIdx.x / 32 * gridDim.x + blockIdx.x) * 32 + threadIdx.x % 32; }
__device__ unsigned more_pieces() { return gridDim.x * team; }

// The sums, or silu(gate) · up: four rows of a token for a thread at a time.
__device__ void combine_rows(const Part& part, const Parts& parts) {
    const bool     pairs = part.then == Then::swiglu;
    const unsigned quads = pairs ? tile_rows / 8 : tile_rows / 4, n_tokens = unsigned(parts.n_tokens);
    const unsigned n      = unsigned(n_tiles(part)) * n_tokens * quads;
    const int      stride = parts.n_tokens * tile_rows;
    for (unsigned i = first_piece(); i < n; i += more_pieces()) {
        const int     quad = int(i % quads), token = int(i / quads % n_tokens), tile = int(i / quads / n_tokens);
        const int     which = pairs ? 0 : product_of(part, tile);
        const Result& r     = part.result[which];
        const int     row   = (tile - part.first_tile[which]) * int(quads) * 4 + quad * 4;
        if (row >= r.rows) continue;
        Sums from = sums_of(part, parts, tile, token);
        from.first += quad * 4;
        float4 v = {0, 0, 0, 0}, u = v;
#pragma unroll 4
        for (int p = 0; p < from.n; p++) {
            add_up(v, shared_sums(from.first + std::int64_t(p) * stride));
            if (pairs) add_up(u, shared_sums(from.first + std::int64_t(p) * stride + tile_rows / 2));
        }
        if (r.bias) add_up(v, *reinterpret_cast<const float4*>(r.bias + row));
        const auto swiglu = [](float g, float up) { return __fdividef(g, 1 + __expf(-g)) * up; };
        if (pairs) v = {swiglu(v.x, u.x), swiglu(v.y, u.y), swiglu(v.z, u.z), swiglu(v.w, u.w)};
        const std::int64_t at = std::int64_t(token) * r.rows + row;
        if (r.is_float) *reinterpret_cast<float4*>(static_cast<float*>(r.to) + at) = v;
        else *reinterpret_cast<uint2*>(static_cast<__half*>(r.to) + at) = as_halves(v);
    }
}

// Rotates q, and k on its way into the cache, with v: eight dimensions of a head for a thread at a time, two times four that
// are half a head apart, or neighbours.
__device__ void combine_rope(const Part& part, const Parts& parts, const Meeting& meeting, unsigned round) {
    const RopeStore& a = parts.rope;
    const int        D = a.head_dim, stored = a.n_heads + a.n_kv_heads, stride = parts.n_tokens * tile_rows;
    const unsigned   eights = unsigned(D / 8), heads = unsigned(stored + a.n_kv_heads);
    const unsigned   n = unsigned(parts.n_tokens) * heads * eights;
    for (unsigned i = first_piece(), first = i;; i += more_pieces()) {
        // What depends on nobody, before the sums are there.
        const unsigned in    = min(i, n - 1);
        const int      eight = int(in % eights), head = int(in / eights % heads), token = int(in / eights / heads);
        const int      which = head < a.n_heads ? 0 : head < stored ? 1 : 2;
        const int      of    = head - (which == 0 ? 0 : which == 1 ? a.n_heads : stored); // of q's, k's or v's heads
        const int      d[2]  = {eight * (a.halves ? 4 : 8), eight * (a.halves ? 4 : 8) + (a.halves ? a.half : 4)};
        const int      slot  = parts.plan.slots[token];
        Sums           from[2];
        float4         v[2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int row = of * D + d[k];
            from[k]       = sums_of(part, parts, part.first_tile[which] + row / tile_rows, token);
            from[k].first += row % tile_rows;
            v[k] = part.result[which].bias ? *reinterpret_cast<const float4*>(part.result[which].bias + row)
                                           : float4{0, 0, 0, 0};
        }
        float sine[4] = {0, 0, 0, 0}, cosine[4] = {1, 1, 1, 1};
        if (which < 2) {
            const float4 frequencies = reinterpret_cast<const float4*>(a.inv_freq)[eight];
            const float  position    = float(parts.plan.positions[token]);
            turn(position, frequencies.x, sine[0], cosine[0]);
            turn(position, frequencies.y, sine[1], cosine[1]);
            turn(position, frequencies.z, sine[2], cosine[2]);
            turn(position, frequencies.w, sine[3], cosine[3]);
#pragma unroll
            for (int w = 0; w < 4; w++) sine[w] *= a.scale, cosine[w] *= a.scale;
        }
        if (i == first) meeting.wait_all(round);
        if (i >= n) return;
#pragma unroll 4
        for (int p = 0; p < max(from[0].n, from[1].n); p++)
#pragma unroll
            for (int k = 0; k < 2; k++)
                if (p < from[k].n) add_up(v[k], shared_sums(from[k].first + std::int64_t(p) * stride));
        const auto rotate = [&](float& x, float& y, int w) {
            const float turned = x * cosine[w] - y * sine[w];
            y                  = x * sine[w] + y * cosine[w];
            x                  = turned;
        };
        if (a.halves) {
            rotate(v[0].x, v[1].x, 0), rotate(v[0].y, v[1].y, 1), rotate(v[0].z, v[1].z, 2), rotate(v[0].w, v[1].w, 3);
        } else {
            rotate(v[0].x, v[0].y, 0), rotate(v[0].z, v[0].w, 1), rotate(v[1].x, v[1].y, 2), rotate(v[1].z, v[1].w, 3);
        }
        if (which > 0 && slot < 0) continue; // only fills up a graph
        Half* to =
            which == 0
                ? a.q + (std::int64_t(token) * a.n_heads + of) * D
                : (which == 1 ? a.cache_k : a.cache_v) +
                      ((std::int64_t(slot / a.block_size) * a.n_kv_heads + of) * a.block_size + slot % a.block_size) *
                          D;
#pragma unroll
        for (int k = 0; k < 2; k++) *reinterpret_cast<uint2*>(to + d[k]) = as_halves(v[k]);
    }
}

#endif

template <int N>
__global__ void __launch_bounds__(threads, 1) dense_kernel(const __grid_constant__ Parts parts) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char memory[];
    __shared__ std::uint64_t barriers[2 * (weight_stages(N) + x_stages(N))];
    __shared__ float         scratch[32];
    const Ring               weights{memory, barriers, barriers + weight_stages(N)};
    const Ring               xs{memory + weight_stages(N) * weight_bytes, barriers + 2 * weight_stages(N),
                  barriers + 2 * weight_stages(N) + x_stages(N)};
    const Meeting            meeting{parts.counter};
    const int                warp = uniform(int(threadIdx.x) / 32);
    if (threadIdx.x == 0) {
        for (int s = 0; s < weight_stages(N); s++)
            barrier_init(weights.full + s, 1), barrier_init(weights.empty + s, 2);
        for (int s = 0; s < x_stages(N); s++) barrier_init(xs.full + s, 1), barrier_init(xs.empty + s, 2);
        barriers_ready();
    }
    __syncthreads();
    if (warp >= weight_warp) {
        if (threadIdx.x % 32 != 0) return;
        if (warp == weight_warp) bring_weights<N>(parts, weights);
        else bring_x<N>(parts, xs, meeting);
        return;
    }
    wait_for_inputs();
    Position<N> at;
    for (int p = 0; p < parts.n_parts; p++) {
        const Part& part = parts.part[p];
        if (begin_of(part, blockIdx.x) == begin_of(part, blockIdx.x + 1)) meeting.wait_all(unsigned(2 * p)); // no share
        else if (warp < 8) multiply<N>(part, parts.n_tokens, parts.sums, weights, xs, at);
        meeting.arrive();
        if (part.then == Then::norm) {
            if (part.result[0].rows <= 3 * team * 4)
                combine_norm<3>(part, parts, meeting, unsigned(2 * p + 1), scratch);
            else combine_norm<4>(part, parts, meeting, unsigned(2 * p + 1), scratch);
        } else if (part.then == Then::rope) {
            combine_rope(part, parts, meeting, unsigned(2 * p + 1));
        } else {
            meeting.wait_all(unsigned(2 * p + 1));
            combine_rows(part, parts);
        }
        if (p + 1 == parts.n_parts) break;
        show_copy_engine();
        meeting.arrive();
    }
    // The last one to leave makes the counters ready for the next launch.
    if (threadIdx.x == 0 && atomicAdd(parts.counter + 1, 1) == gridDim.x - 1) parts.counter[0] = parts.counter[1] = 0;
#endif
}

// Of the sums of all blocks, and the counters.
struct Room {
    float*             sums    = nullptr;
    unsigned*          counter = nullptr;
    static const Room& one() {
        static const Room room;
        return room;
    }
    Room() {
        sums    = static_cast<float*>(allocate(std::size_t(n_processors() + most_tiles) * most_tokens * tile_rows * 4));
        counter = static_cast<unsigned*>(allocate(256));
    }
};

template <int N>
void launch(const Parts& parts, Stream stream) {
    static const cudaError_t once =
        cudaFuncSetAttribute(dense_kernel<N>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes(N));
    (void)once;
    run_kernel(dense_kernel<N>, dim3(unsigned(n_processors())), threads, shared_bytes(N),
               static_cast<cudaStream_t>(stream), parts);
}

constexpr int rounded(int n_tokens) { return n_tokens <= 8 ? 8 : n_tokens <= 16 ? 16 : n_tokens <= 32 ? 32 : 64; }

// The products of `op`, followed by `next` if that is their norm.
bool understand(const TapeOp& op, const TapeOp* next, int n_tokens, Part& part) {
    const bool pairs = op.kind == TapeOp::gated;
    if (op.cols % 8 != 0 || (op.kind != TapeOp::products && !pairs)) return false;
    part.n_products    = op.n_products;
    part.n_steps       = int((op.cols + tile_cols - 1) / tile_cols);
    part.then          = pairs ? Then::swiglu : Then::write;
    part.first_tile[0] = 0;
    if (!encode_tiles(part.x, op.x, n_tokens, op.cols, rounded(n_tokens))) return false;
    for (int k = 0; k < op.n_products; k++) {
        const Product& p = op.product[k];
        if (p.weight.form != WeightForm::f16 || p.weight.cols != op.cols || p.weight.rows % 4 != 0) return false;
        if (!encode_tiles(part.weight[k], p.weight.data, p.weight.rows, op.cols, 64)) return false;
        part.result[k]         = {p.bias, p.out, int(p.weight.rows), p.out_is_float};
        part.first_tile[k + 1] = part.first_tile[k] + int((p.weight.rows + tile_rows - 1) / tile_rows);
    }
    if (pairs) {
        const Product &gate = op.product[0], &up = op.product[1];
        if (op.n_products != 2 || gate.weight.rows != up.weight.rows || gate.bias || up.bias || gate.out_is_float)
            return false;
        part.first_tile[1] = part.first_tile[2] = int((gate.weight.rows + 63) / 64);
    }
    if (next) {
        if (pairs || op.n_products != 1 || next->x != op.product[0].out || op.product[0].out_is_float ||
            next->residual == nullptr || next->cols != op.product[0].weight.rows || next->cols > 4 * team * 4)
            return false;
        part.then         = Then::norm;
        part.norm_weight  = next->norm_weight;
        part.eps          = next->eps;
        part.residual     = next->residual;
        part.result[0].to = next->out;
    }
    return part.first_tile[part.n_products] <= most_tiles;
}

// Whether `rope` turns the three results of these products, whole heads of them.
bool turns(const RopeStore& rope, const Part& part) {
    return part.then == Then::write && part.n_products == 3 && part.result[0].to == rope.q &&
           part.result[1].to == rope.k && part.result[2].to == rope.v && rope.half * 2 == rope.head_dim &&
           rope.head_dim % 8 == 0 && !part.result[0].is_float;
}

} // namespace

int run_dense(const TapeOp* ops, int n_ops, int n_tokens, const Plan& plan, Stream stream) {
    if (n_ops < 2 || !is_hopper() || encoder() == nullptr || n_tokens < 1 || n_tokens > most_tokens) return 0;
    Parts parts{};
    int   done = 0;
    while (done < n_ops && parts.n_parts < most_parts) {
        Part&         part = parts.part[parts.n_parts];
        const TapeOp* next = done + 1 < n_ops ? &ops[done + 1] : nullptr;
        const bool    norm = next && next->kind == TapeOp::norm;
        if (!understand(ops[done], norm ? next : nullptr, n_tokens, part)) break;
        parts.n_parts++;
        done += norm ? 2 : 1;
        if (next && next->kind == TapeOp::rope_and_store) {
            if (!turns(next->rope, part)) break;
            part.then  = Then::rope;
            parts.rope = next->rope;
            done++;
            break;
        }
    }
    const Room& room = Room::one();
    if (done < 2 || !room.sums || !room.counter) return 0;
    parts.plan     = plan;
    parts.n_tokens = n_tokens;
    parts.sums     = room.sums;
    parts.counter  = room.counter;
    switch (rounded(n_tokens)) {
        case 8: launch<8>(parts, stream); break;
        case 16: launch<16>(parts, stream); break;
        case 32: launch<32>(parts, stream); break;
        default: launch<64>(parts, stream); break;
    }
    return done;
}

} // namespace quire::cuda
