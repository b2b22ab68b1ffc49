// Prefill attention with Hopper's instructions, for head_dim 64 and 128; a persistent, warp-specialised kernel. A CTA processes 128
// consecutive queries of one head at a time: two warpgroups multiply 64 of them each (wgmma; Q, K and V from shared memory, the
// probabilities from registers). While one group computes its softmax, the tensor cores work on its previous values and for the other
// group. The four warps of a third warpgroup are producers: one loads K by TMA and another one V, in tiles of 128 positions; one loads
// Q; one picks the next queries, longest contexts first. They run ahead of the multiplying groups, also across the end of a query
// tile: there are as many CTAs as SMs.
//
// Shared memory holds rows of 64 halves (128 bytes) in the hardware's swizzle: the 16-byte word w of row r is stored at
// w ^ (r % 8) (PTX ISA, matrix descriptors, 128-byte swizzling). Tiles are [eight rows][64 dimensions][row], so that one copy
// (see encode()) loads the part of a tile that is in one cache block.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <numeric>
#include <type_traits>

#include "../kernels.h"
#include "../ptx/tensor_map.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/wgmma.cuh"
#include "../warp.cuh"

namespace quire::cuda {

namespace {

constexpr int                  M = 128, N = 128; // queries and positions of a tile
[[maybe_unused]] constexpr int stages   = 3;     // of the ring, each of one K and one V tile
[[maybe_unused]] constexpr int headroom = 8;     // probabilities grow to 2^8 before the sums are scaled anew
// Chunks with fewer rows are copied by threads: the copy engine would take longer.
constexpr int          least_chunk = 8;
constexpr std::int64_t l2_bytes    = 40 << 20; // K and V of as many heads are worked on at a time

struct Maps {
    CUtensorMap k, v;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

__device__ void copy_async(void* to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(valid ? 16 : 0));
}
// Once all copies that the thread has begun are there.
__device__ void arrive_when_copied(std::uint64_t* b) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(b)) : "memory");
}
// What ordinary copies wrote, and the thread knows of, is seen by the wgmma that it issues next.
__device__ void show_tensor_cores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#define R8(d, i)                                                                                                \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define W8(d, i)                                                                                                \
    "=f"(d[i]), "=f"(d[i + 1]), "=f"(d[i + 2]), "=f"(d[i + 3]), "=f"(d[i + 4]), "=f"(d[i + 5]), "=f"(d[i + 6]), \
        "=f"(d[i + 7])
#define W32(d, i) W8(d, i), W8(d, i + 8), W8(d, i + 16), W8(d, i + 24)
#define R32(d, i) R8(d, i), R8(d, i + 8), R8(d, i + 16), R8(d, i + 24)

#define D32                                                                                                      \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28," \
    "%29,%30,%31"
#define D64                                                                                                     \
    D32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56," \
        "%57,%58,%59,%60,%61,%62,%63"

// d [64 × Columns] = A [64 × 16] · B [Columns × 16]ᵀ, both in shared memory; or the same, added.
template <int Columns, bool Add>
__device__ void multiply_scores(float (&d)[N / 2], std::uint64_t a, std::uint64_t b) {
    if constexpr (Columns == 128 && Add)
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" D64 "}, %64, %65, 1, 1, 1, 0, 0;\n"
                     : R32(d, 0), R32(d, 32)
                     : "l"(a), "l"(b));
    else if constexpr (Columns == 128)
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" D64 "}, %64, %65, 0, 1, 1, 0, 0;\n"
                     : W32(d, 0), W32(d, 32)
                     : "l"(a), "l"(b));
    else if constexpr (Add)
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" D32 "}, %32, %33, 1, 1, 1, 0, 0;\n"
                     : R32(d, 0)
                     : "l"(a), "l"(b));
    else
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" D32 "}, %32, %33, 0, 1, 1, 0, 0;\n"
                     : W32(d, 0)
                     : "l"(a), "l"(b));
}
// d [64 × head_dim] += A [64 × 16] in registers · B [16 × head_dim] in shared memory
__device__ void multiply_values(float (&d)[64], const std::uint32_t (&a)[4], std::uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" D64 "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;\n"
                 : R32(d, 0), R32(d, 32)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ void multiply_values(float (&d)[32], const std::uint32_t (&a)[4], std::uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" D32 "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;\n"
                 : R32(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#undef R8
#undef R32
#undef W8
#undef W32
#undef D32
#undef D64

__device__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// A chunk: rows that are neighbours in the cache and in a tile. `row`: the first, in the cache.
__device__ void copy_chunk(void* to, const CUtensorMap& map, int row, std::uint64_t* b) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %2, %4}], "
        "[%5];" ::"r"(shared_address(to)),
        "l"(&map), "r"(0), "r"(row % 8), "r"(row / 8), "r"(shared_address(b))
        : "memory");
}

// A warp brings 32 rows, each lane's own from its 16-byte word `at` on (zeros where that is negative). Neighbouring lanes
// take neighbouring words.
template <int D>
__device__ void copy_rows(unsigned char* to, const void* base, int at) {
    constexpr int words = D / 8, step = 32 / words; // rows of one instruction
    const int     lane = threadIdx.x % 32, w = lane % words;
    const auto*   from = static_cast<const uint4*>(base) + w;
#pragma unroll 4
    for (int i = 0; i < words; i++) {
        const int row = i * step + lane / words, word = __shfl_sync(~0u, at, row);
        copy_async(to + row / 8 * D * 16 + w / 8 * 1024 + row % 8 * 128 + (((w ^ row) % 8) << 4), from + max(word, 0),
                   word >= 0);
    }
}

// What a block of threads works on next: queries of a head.
struct Work {
    int head; // -1: nothing more
    int sequence, first_row, n_rows;
    int first; // position of the first query
};
struct Barriers {
    std::uint64_t work_full, work_empty;
    std::uint64_t q_full[2], q_empty[2]; // of the groups
    std::uint64_t k_full[stages], v_full[stages], k_empty[stages], v_empty[stages];
};

#endif

// `chunk`: rows of a tile that stand together in the cache, at least; `heads` are worked on at a time.
template <int D, bool Capped>
__global__ void __launch_bounds__(384, 1)
    prefill_wgmma(Attention a, Plan plan, const PrefillTile* tiles, int n_tiles, const __grid_constant__ Maps maps,
                  int chunk, int heads, unsigned* turn) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    constexpr int                   row_bytes = D * 2, tile_bytes = N * row_bytes;
    extern __shared__ unsigned char memory[];
    auto* q_tile   = reinterpret_cast<unsigned char*>((reinterpret_cast<std::uintptr_t>(memory) + 1023) / 1024 * 1024);
    auto* kv_tiles = q_tile + M * row_bytes;
    __shared__ Barriers barriers;
    __shared__ Work     next;
    const int           group = uniform(int(threadIdx.x) / 128), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const bool          by_engine = chunk >= least_chunk; // K and V
    if (threadIdx.x == 0) {
        barrier_init(&barriers.work_full, 1);
        barrier_init(&barriers.work_empty, 11 * 32); // all lanes of the warps that are told
        for (int g = 0; g < 2; g++) {
            barrier_init(&barriers.q_full[g], 32);
            barrier_init(&barriers.q_empty[g], 1);
        }
        for (int s = 0; s < stages; s++) {
            barrier_init(&barriers.k_full[s], by_engine ? 1 : 32);
            barrier_init(&barriers.v_full[s], by_engine ? 1 : 32);
            barrier_init(&barriers.k_empty[s], 2);
            barrier_init(&barriers.v_empty[s], 2);
        }
        barriers_ready();
    }
    __syncthreads();
    wait_for_inputs();

    // Tiles of K and V begin at multiples of N.
    const auto begin_of = [&](const Work& w) { return a.window > 0 ? max(0, w.first - a.window + 1) / N * N : 0; };
    const auto last_of  = [&](const Work& w) { return w.first + w.n_rows - 1; };
    const auto each     = [&](const auto& job) {
        for (unsigned parity = 0;; parity ^= 1) {
            barrier_wait(&barriers.work_full, parity);
            const Work w{uniform(next.head), uniform(next.sequence), uniform(next.first_row), uniform(next.n_rows),
                         uniform(next.first)};
            barrier_arrive(&barriers.work_empty);
            if (w.head < 0) return;
            job(w);
        }
    };

    if (group == 2) {
        // 56 + 2 · 224 are the 3 · 168 registers of the launch; with one more the others would wait forever.
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        if (warp == 3) { // says what is next
            if (lane != 0) return;
            const int n_items = n_tiles * a.n_heads;
            // Some heads at a time, so that their K and V stay in L2; of those the long contexts, which come last, first.
            const auto item = [&](int i) {
                if (i >= n_items) return Work{-1, 0, 0, 0, 0};
                const int         round = i / (heads * n_tiles), left = min(heads, a.n_heads - round * heads);
                const int         in   = i - round * heads * n_tiles;
                const PrefillTile tile = tiles[n_tiles - 1 - in / left];
                return Work{round * heads + in % left, tile.sequence, tile.first_row, tile.n_rows,
                            plan.positions[tile.first_row]};
            };
            Work w = item(int(blockIdx.x));
            for (unsigned parity = 0;; parity ^= 1) {
                next = w;
                barrier_arrive(&barriers.work_full);
                if (w.head < 0) break;
                // Once all work on it: who takes more than one ahead may keep it from a block that has nothing to do.
                barrier_wait(&barriers.work_empty, parity);
                // All blocks together ask as often as there are items, and leave zero: launches do not run at the same time.
                w = item(int(gridDim.x + atomicInc(turn, unsigned(n_items - 1))));
            }
        } else if (warp == 2) {    // brings Q
            unsigned parities = 3; // of the groups
            each([&](const Work& w) {
                for (int to = 0; to * 64 < w.n_rows; to++) {
                    barrier_wait(&barriers.q_empty[to], parities >> to & 1);
                    parities ^= 1u << to;
                    for (int row = to * 64; row < to * 64 + 64; row += 32)
                        copy_rows<D>(
                            q_tile + row * row_bytes, a.q,
                            row + lane < w.n_rows ? ((w.first_row + row + lane) * a.n_heads + w.head) * (D / 8) : -1);
                    arrive_when_copied(&barriers.q_full[to]);
                }
            });
        } else { // brings K, or V
            const CUtensorMap& map   = warp == 0 ? maps.k : maps.v;
            const Half*        cache = warp == 0 ? a.cache_k : a.cache_v;
            std::uint64_t *    full  = warp == 0 ? barriers.k_full : barriers.v_full,
                          *empty     = warp == 0 ? barriers.k_empty : barriers.v_empty;
            int      stage           = 0;
            unsigned parity          = 1;
            if (lane == 0) prefetch_map(map);
            each([&](const Work& w) {
                const auto* table = plan.block_tables + plan.table_start[w.sequence];
                const int   head = w.head / (a.n_heads / a.n_kv_heads), last = last_of(w);
                const auto  row_of = [&](int position) { // in the cache
                    const int block = position / a.block_size;
                    return (table[block] * a.n_kv_heads + head) * a.block_size + position - block * a.block_size;
                };
                for (int from = begin_of(w); from <= last; from += N) {
                    unsigned char* tile = kv_tiles + (stage * 2 + warp) * tile_bytes;
                    const int      n    = min(N, last - from + chunk) / chunk;               // chunks
                    const int row = by_engine && lane < n ? row_of(from + lane * chunk) : 0; // read before the wait
                    barrier_wait(empty + stage, parity);
                    if (by_engine) {
                        if (lane == 0) barrier_expect(full + stage, unsigned(n * chunk * row_bytes));
                        __syncwarp();
                        if (lane < n) copy_chunk(tile + lane * chunk * row_bytes, map, row, full + stage);
                    } else {
                        for (int i = 0; i < N; i += 32) {
                            const int position = from + i + lane;
                            copy_rows<D>(tile + i * row_bytes, cache,
                                         position <= last ? row_of(position) * (D / 8) : -1);
                        }
                        arrive_when_copied(full + stage);
                    }
                    if (++stage == stages) stage = 0, parity ^= 1;
                }
            });
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        const bool  leader = threadIdx.x % 128 == 0;
        const float log2e = 1.4426950408889634f, scale = Capped ? log2e : a.scale * log2e;
        const float squeeze = Capped ? 2 * log2e * a.scale / a.softcap : 0;
        // Of the first 16 columns of the group's Q and the first K, of the first 16 positions of the first V.
        const unsigned      kv_at = shared_address(kv_tiles);
        const std::uint64_t q0    = descriptor(shared_address(q_tile) + unsigned(group) * 64 * row_bytes, 16,
                                               8 * row_bytes),
                            k0    = descriptor(kv_at, 16, 8 * row_bytes),
                            v0    = descriptor(kv_at + tile_bytes, 1024, 8 * row_bytes);
        float         out[D / 2], s[N / 2], top[2], sum[2], shrink[2];
        std::uint32_t p[N / 16][4];
        unsigned      q_parity = 0, done = 0; // tiles of K and V

        // Begins s = Q · Kᵀ of the first Columns positions of a tile.
        const auto scores = [&]<int Columns>(std::integral_constant<int, Columns>, unsigned t) {
            const std::uint64_t k_tile = further(k0, t % stages * 2 * tile_bytes);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < D / 16; k++) {
                const unsigned at = unsigned(k / 4) * 1024 + unsigned(k % 4) * 32;
                if (k == 0) multiply_scores<Columns, false>(s, further(q0, at), further(k_tile, at));
                else multiply_scores<Columns, true>(s, further(q0, at), further(k_tile, at));
            }
            wgmma_commit();
        };
        // Begins out += P · V of the first Rows positions of a tile.
        const auto values = [&]<int Rows>(std::integral_constant<int, Rows>, unsigned t) {
            const std::uint64_t v_tile = further(v0, t % stages * 2 * tile_bytes);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < Rows / 16; k++)
                multiply_values(out, p[k], further(v_tile, unsigned(k) * 16 * row_bytes));
            wgmma_commit();
        };
        const auto probabilities = [&] {
#pragma unroll
            for (int k = 0; k < N / 16; k++)
#pragma unroll
                for (int i = 0; i < 4; i++) p[k][i] = pack(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
        };
        const auto free_tile = [&](std::uint64_t* empty, unsigned t) {
            if (leader) barrier_arrive(empty + t % stages);
        };
        const auto wait_for = [&](std::uint64_t* full, unsigned t) {
            barrier_wait(full + t % stages, t / stages & 1);
            if (!by_engine) show_tensor_cores();
        };
        using All   = std::integral_constant<int, N>;
        using First = std::integral_constant<int, N / 2>;

        // The groups take turns at the tensor cores: one's softmax runs while they work for the other.
        const auto my_turn   = [&] { asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory"); };
        const auto your_turn = [&] { asm volatile("bar.arrive %0, 256;" ::"r"(2 - group) : "memory"); };
        if (group == 1) your_turn();

        each([&](const Work& w) {
            const int  begin = begin_of(w), last = last_of(w), n = (last - begin) / N + 1;
            const int  row0 = w.first + group * 64, top_row = min(last, row0 + 63); // positions of the group
            const int  mine[2] = {row0 + warp * 16 + lane / 4, row0 + warp * 16 + lane / 4 + 8};
            const int  own     = row0 > last ? 0 : (top_row - begin) / N + 1; // tiles that this group sees something of
            const bool half    = top_row - (begin + (own - 1) * N) < N / 2;   // of the last one no more than that
            // s → probabilities, top, sum; what older sums are to be multiplied with.
            const auto softmax = [&]<int Columns>(std::integral_constant<int, Columns>, int t) {
                const int  from = begin + t * N;
                const bool edge = from + Columns - 1 > row0 || (a.window > 0 && from <= top_row - a.window);
                if constexpr (Capped)
#pragma unroll
                    for (int i = 0; i < Columns / 2; i++) // tanh, by 1 - 2 / (e^2x + 1)
                        s[i] = a.softcap - __fdividef(2 * a.softcap, exp2_fast(s[i] * squeeze) + 1);
                if (edge)
#pragma unroll
                    for (int i = 0; i < Columns / 2; i++) {
                        const int position = from + i / 4 * 8 + lane % 4 * 2 + i % 2, row = mine[i / 2 % 2];
                        if (position > row || (a.window > 0 && position <= row - a.window)) s[i] = -INFINITY;
                    }
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    float limit = top[r];
#pragma unroll
                    for (int i = 0; i < Columns / 8; i++)
                        limit = fmaxf(limit, fmaxf(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]));
                    limit = fmaxf(limit, __shfl_xor_sync(~0u, limit, 1));
                    limit = fmaxf(limit, __shfl_xor_sync(~0u, limit, 2));
                    if ((limit - top[r]) * scale <= headroom) limit = top[r];
                    const float base = limit == -INFINITY ? 0.0f : limit * scale; // a row that has seen nothing yet
                    shrink[r]        = exp2_fast(top[r] * scale - base);
                    top[r]           = limit;
                    float part       = 0;
#pragma unroll
                    for (int i = 0; i < Columns / 8; i++) {
                        const float x    = exp2_fast(s[4 * i + 2 * r] * scale - base),
                                    y    = exp2_fast(s[4 * i + 2 * r + 1] * scale - base);
                        s[4 * i + 2 * r] = x, s[4 * i + 2 * r + 1] = y;
                        part += x + y;
                    }
                    sum[r] = sum[r] * shrink[r] + part;
                }
            };
            const auto step = [&](auto columns, int t) { // from tile t - 1 to t
                wait_for(barriers.k_full, done + t);
                my_turn();
                scores(columns, done + t);
                values(All{}, done + t - 1);
                your_turn();
                wgmma_wait<1>();
                keep(s);
                free_tile(barriers.k_empty, done + t);
                softmax(columns, t);
                // Stands here for its loop: the compiler moves what waits for the values up to the last branch before it.
                wait_for(barriers.v_full, done + t);
                wgmma_wait<0>();
                keep(out);
                free_tile(barriers.v_empty, done + t - 1);
                if (__any_sync(~0u, shrink[0] < 1 || shrink[1] < 1))
#pragma unroll
                    for (int i = 0; i < D / 2; i++) out[i] *= shrink[i / 2 % 2];
                probabilities();
            };
#pragma unroll
            for (int i = 0; i < D / 2; i++) out[i] = 0;
            top[0] = top[1] = -INFINITY, sum[0] = sum[1] = 0;

            if (own > 0) {
                barrier_wait(&barriers.q_full[group], q_parity);
                q_parity ^= 1;
                show_tensor_cores();
                wait_for(barriers.k_full, done);
                scores(All{}, done);
                wgmma_wait<0>();
                keep(s);
                free_tile(barriers.k_empty, done);
                softmax(All{}, 0);
                probabilities();
                wait_for(barriers.v_full, done);
                const int whole = half ? own - 1 : own;
                for (int t = 1; t < whole; t++) step(All{}, t);
                if (half && own > 1) step(First{}, own - 1);
                if (leader) barrier_arrive(&barriers.q_empty[group]);
                const unsigned t    = done + unsigned(own) - 1;
                const int      left = last + 1 - (begin + (own - 1) * N); // positions of the last tile
                if (left < N) { // what follows is nobody's, or another sequence's: a NaN there would spread
                    const int      row = threadIdx.x % 128;
                    unsigned char* at =
                        kv_tiles + (t % stages * 2 + 1) * tile_bytes + row / 8 * 8 * row_bytes + row % 8 * 128;
                    if (row >= left)
                        for (int i = 0; i < D / 8; i++) reinterpret_cast<uint4*>(at + i / 8 * 1024)[i % 8] = uint4{};
                    show_tensor_cores();
                    asm volatile("bar.sync %0, 128;" ::"r"(3 + group) : "memory");
                }
                if (half) values(First{}, t);
                else values(All{}, t);
                wgmma_wait<0>();
                keep(out);
                free_tile(barriers.v_empty, t);
            }
            for (int t = own; t < n; t++) { // what only the other group sees
                if (t > 0) {
                    my_turn();
                    your_turn();
                }
                wait_for(barriers.k_full, done + t);
                free_tile(barriers.k_empty, done + t);
                wait_for(barriers.v_full, done + t);
                free_tile(barriers.v_empty, done + t);
            }
            done += n;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
                sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
                const int   in_tile = group * 64 + warp * 16 + lane / 4 + 8 * r;
                const float inverse = sum[r] > 0 ? 1 / sum[r] : 0.0f;
                auto*       to =
                    reinterpret_cast<__half*>(a.out) + (std::int64_t(w.first_row + in_tile) * a.n_heads + w.head) * D;
#pragma unroll
                for (int d = 0; d < D / 8; d += 4) {
                    std::uint32_t word[4];
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        word[i] = pack(out[4 * (d + i) + 2 * r] * inverse, out[4 * (d + i) + 2 * r + 1] * inverse);
                    const uint4 eight = transpose_quad(word);
                    if (in_tile < w.n_rows) *reinterpret_cast<uint4*>(to + (d + lane % 4) * 8) = eight;
                }
            }
        });
    }
#endif
}

// A layer's cache, [rows × D] halves, as [rows / 8][D / 64][8][64], the last number running fastest. How many rows there are
// nobody says here: the block tables name only those that exist.
bool encode(CUtensorMap& map, const Half* cache, int D, int chunk) {
    const auto       row      = cuuint64_t(D) * 2;
    const cuuint64_t sizes[4] = {64, 8, cuuint64_t(D) / 64, cuuint64_t(1) << 31}, strides[3] = {row, 128, 8 * row};
    const cuuint32_t box[4]   = {64, 8, cuuint32_t(D) / 64, cuuint32_t(std::max(chunk, least_chunk)) / 8},
                     steps[4] = {1, 1, 1, 1};
    return encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4, const_cast<Half*>(cache), sizes, strides, box, steps,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                     CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <int D, bool Capped>
void launch(const Attention& a, const Plan& plan, const PrefillTile* tiles, int n, Context& gpu) {
    constexpr int shared = (M + stages * 2 * N) * D * 2 + 1024;
    prepare_kernel(gpu, prefill_wgmma<D, Capped>, 384, shared);
    const int  chunk = std::gcd(a.block_size, N);
    Maps       maps;
    const bool ok = encode(maps.k, a.cache_k, D, chunk) && encode(maps.v, a.cache_v, D, chunk);
    // How many heads' K and V the L2 holds, if all of it is of these queries; some in any case, for the processors' sake.
    const std::int64_t bytes = std::int64_t(n) * N * D * 4, fit = l2_bytes / bytes * (a.n_heads / a.n_kv_heads);
    const int          heads = int(std::clamp<std::int64_t>(fit, std::min(8, a.n_heads), a.n_heads));
    const unsigned     grid  = unsigned(std::min(gpu.n_sms, n * a.n_heads));
    // Without maps a launch that fails, so that last_error() tells.
    run_kernel(prefill_wgmma<D, Capped>, dim3(ok ? grid : 0), 384, shared, gpu, a, plan, tiles, n, maps, chunk, heads,
               gpu.turn);
}

} // namespace

int prefill_tile_sm90(const Context& gpu, int head_dim) {
    return gpu.sm90 && (head_dim == 64 || head_dim == 128) && encoder() != nullptr ? M : 0;
}

void attention_prefill_sm90(const Attention& a, const Plan& plan, const PrefillTile* tiles, int n, Context& gpu) {
    const auto run = a.head_dim == 64 ? (a.softcap > 0 ? launch<64, true> : launch<64, false>)
                                      : (a.softcap > 0 ? launch<128, true> : launch<128, false>);
    run(a, plan, tiles, n, gpu);
}

} // namespace quire::cuda
