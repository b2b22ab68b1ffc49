// Prefill attention for Hopper (head_dim 64, 128, 256 and 512): a persistent, warp-specialised kernel with wgmma and TMA, like
// FlashAttention-3. A CTA per SM processes tiles of 128 consecutive queries of one head. Two consumer warpgroups take 64
// queries each (Q, K and V from shared memory, the probabilities from registers), in ping-pong: while one computes its softmax,
// the tensor cores work for the other. The four warps of the third warpgroup are producers: one loads K by TMA and one V, in
// tiles of 128 positions (64 with head_dim 256, 32 with 512), one loads Q, one is the dynamic tile scheduler: it takes the next query
// tile, longest contexts first. They run ahead across the end of a query tile.
//
// With head_dim 512 the sums of 64 queries do not fit the registers of a warpgroup: a work tile computes half of the columns, and
// the scores are computed for each half.
//
// Shared memory holds rows of 64 fp16 in the 128-byte swizzle (ptx/wgmma.cuh). Tiles are [eight rows][64 dimensions][row], so
// that one TMA copy (see encode_cache()) loads the part of a tile that is contiguous in the cache.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <numeric>
#include <type_traits>

#include "../kernels.h"
#include "../paged_kv.cuh"
#include "../pipeline.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/wgmma.cuh"
#include "../warp.cuh"

namespace quire::cuda {

namespace {

constexpr int M = 128; // queries of a tile
// Positions of a tile, and stages of the pipeline, each of one K and one V tile: what the shared memory and the registers hold.
template <int D>
constexpr int positions_of = D > 256   ? 32
                             : D > 128 ? 64
                                       : 128;
template <int D>
constexpr int stages_of = D > 128 ? 2 : 3;
// Columns of V, and of the output, that a work tile computes: a part of the head.
template <int D>
constexpr int columns_of = D > 256 ? 256 : D;
template <int D>
constexpr int parts_of = D / columns_of<D>;

[[maybe_unused]] constexpr int headroom = 8; // lazy rescale: the row max is kept while probabilities stay below 2^8
// Where fewer rows than this are contiguous in the cache, threads copy them by cp.async: TMA would take longer.
constexpr int          min_tma_rows = 8;
constexpr std::int64_t l2_bytes     = 40 << 20; // of K and V: heads are scheduled so that the ones in use fit

struct CacheMaps {
    CUtensorMap k, v[2]; // of the parts of a head
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

__device__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// cp.async of 32 rows of D columns by a warp: lane n names row n of those that begin every `row_words` 16-byte words (negative: zeros).
// Neighbouring lanes copy neighbouring words. A pool that all layers share may have more than 2^31 words.
template <int D>
__device__ void copy_rows(unsigned char* to, const void* base, int from, int row_words) {
    constexpr int words = columns_of<D> / 8, step = 32 / words; // rows of one instruction
    const int     lane = threadIdx.x % 32;
#pragma unroll 4
    for (int i = 0; i < words * parts_of<D>; i++) {
        const int w = i / words * words + lane % words, row = i % words * step + lane / words;
        const int source = __shfl_sync(~0u, from, row);
        cp_async(to + row / 8 * D * 16 + w / 8 * 1024 + row % 8 * 128 + (((w ^ row) % 8) << 4),
                 static_cast<const uint4*>(base) + w + std::int64_t(max(source, 0)) * row_words, source >= 0);
    }
}

// A work tile of the dynamic scheduler: consecutive queries of one head.
struct QueryTile {
    int part; // of a head, counted over all heads; -1: no more
    int sequence, first_row, n_rows;
    int first; // position of the first query
};
template <int stages>
struct Barriers {
    std::uint64_t tile_full, tile_empty;
    std::uint64_t q_full[2], q_empty[2]; // of the consumer warpgroups
    std::uint64_t k_full[stages], v_full[stages], k_empty[stages], v_empty[stages];
};

#endif

// tma_rows: rows of a tile that are contiguous in the cache, at least; n_together: parts of heads that are scheduled together.
template <int D, bool Capped>
__global__ void __launch_bounds__(384, 1)
    prefill_wgmma(Attention a, Plan plan, const PrefillTile* tiles, int n_tiles, const __grid_constant__ CacheMaps maps,
                  int tma_rows, int n_together, unsigned* next_tile) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    constexpr int N = positions_of<D>, stages = stages_of<D>, E = columns_of<D>, parts = parts_of<D>;
    constexpr int row_bytes = D * 2, v_row_bytes = E * 2, k_bytes = N * row_bytes,
                  stage_bytes                  = k_bytes + N * v_row_bytes;
    constexpr bool                  has_halves = N == 128; // of a tile: the last one may need its first half only
    extern __shared__ unsigned char memory[];
    auto* q_tile   = reinterpret_cast<unsigned char*>((reinterpret_cast<std::uintptr_t>(memory) + 1023) / 1024 * 1024);
    auto* kv_tiles = q_tile + M * row_bytes;
    __shared__ Barriers<stages> barriers;
    __shared__ QueryTile        next_work;
    reads_early(); // nothing: barriers are made
    const int  group = uniform(int(threadIdx.x) / 128), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const bool by_tma = tma_rows >= min_tma_rows; // K and V
    if (threadIdx.x == 0) {
        mbarrier_init(&barriers.tile_full, 1);
        mbarrier_init(&barriers.tile_empty, 11 * 32); // all lanes of the warps that read it
        for (int g = 0; g < 2; g++) {
            mbarrier_init(&barriers.q_full[g], 32);
            mbarrier_init(&barriers.q_empty[g], 1);
        }
        for (int s = 0; s < stages; s++) {
            mbarrier_init(&barriers.k_full[s], by_tma ? 1 : 32);
            mbarrier_init(&barriers.v_full[s], by_tma ? 1 : 32);
            mbarrier_init(&barriers.k_empty[s], 2);
            mbarrier_init(&barriers.v_empty[s], 2);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    wait_for_inputs();

    // Tiles of K and V begin at multiples of N.
    const auto first_position = [&](const QueryTile& w) {
        return a.chunk > 0 ? w.first / a.chunk * a.chunk : a.window > 0 ? max(0, w.first - a.window + 1) / N * N : 0;
    };
    const auto last_position = [&](const QueryTile& w) { return w.first + w.n_rows - 1; };
    const auto for_each_tile = [&](const auto& job) {
        for (unsigned parity = 0;; parity ^= 1) {
            mbarrier_wait(&barriers.tile_full, parity);
            const QueryTile w{uniform(next_work.part), uniform(next_work.sequence), uniform(next_work.first_row),
                              uniform(next_work.n_rows), uniform(next_work.first)};
            mbarrier_arrive(&barriers.tile_empty);
            if (w.part < 0) return;
            job(w);
        }
    };

    if (group == 2) {
        // 56 + 2 · 224 are the 3 · 168 registers of the launch; with one more, setmaxnreg.inc would wait forever.
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        if (warp == 3) { // the tile scheduler
            if (lane != 0) return;
            const int n_parts = a.n_heads * parts, n_items = n_tiles * n_parts;
            // Some parts of heads at a time, so that their K and V stay in L2; of those the longest contexts, which are listed last,
            // first.
            const auto item = [&](int i) {
                if (i >= n_items) return QueryTile{-1, 0, 0, 0, 0};
                const int round = i / (n_together * n_tiles), left = min(n_together, n_parts - round * n_together);
                const int in           = i - round * n_together * n_tiles;
                const PrefillTile tile = tiles[n_tiles - 1 - in / left];
                return QueryTile{round * n_together + in % left, tile.sequence, tile.first_row, tile.n_rows,
                                 plan.positions[tile.first_row]};
            };
            QueryTile w = item(int(blockIdx.x));
            for (unsigned parity = 0;; parity ^= 1) {
                next_work = w;
                mbarrier_arrive(&barriers.tile_full);
                if (w.part < 0) break;
                // Only when all warps have begun with it: a CTA that took more ahead could keep it from an idle one.
                mbarrier_wait(&barriers.tile_empty, parity);
                // All CTAs together count up as often as there are items, which leaves zero for the next launch.
                w = item(int(gridDim.x + atomicInc(next_tile, unsigned(n_items - 1))));
            }
        } else if (warp == 2) {    // producer of Q
            unsigned parities = 3; // of the groups
            for_each_tile([&](const QueryTile& w) {
                for (int to = 0; to * 64 < w.n_rows; to++) {
                    mbarrier_wait(&barriers.q_empty[to], parities >> to & 1);
                    parities ^= 1u << to;
                    for (int row = to * 64; row < to * 64 + 64; row += 32)
                        copy_rows<D>(
                            q_tile + row * row_bytes, a.q,
                            row + lane < w.n_rows ? (w.first_row + row + lane) * a.n_heads + w.part / parts : -1,
                            D / 8);
                    cp_async_mbarrier_arrive(&barriers.q_full[to]);
                }
            });
        } else { // producer of K, or of V
            const Pipeline<stages> pipeline{kv_tiles + warp * k_bytes, warp == 0 ? barriers.k_full : barriers.v_full,
                                            warp == 0 ? barriers.k_empty : barriers.v_empty};
            PipelineState<stages>  at    = pipeline.producer_start();
            const int              bytes = warp == 0 ? row_bytes : v_row_bytes; // of a row of the tile
            if (lane == 0) tma_prefetch(warp == 0 ? maps.k : maps.v[0]);
            for_each_tile([&](const QueryTile& w) {
                const CUtensorMap& map = warp == 0 ? maps.k : maps.v[w.part % parts];
                const auto* table = plan.block_tables + plan.table_start[w.sequence] + (warp == 0 ? 0 : a.v_tables);
                const int   head = w.part / parts / (a.n_heads / a.n_kv_heads), last = last_position(w);
                const auto  row_of = [&](int position) { // in the cache; -1: the block is gone, below the window
                    const int block = position / a.block_size;
                    return table[block] < 0 ? -1
                                             : kv_row<int>(table[block], head, position - block * a.block_size,
                                                           a.block_rows, a.block_size);
                };
                for (int from = first_position(w); from <= last; from += N) {
                    unsigned char* tile = pipeline.memory + at.stage * stage_bytes;
                    const int      n    = min(N, last - from + tma_rows) / tma_rows; // TMA copies
                    const int      row =
                        by_tma && lane < n ? row_of(from + lane * tma_rows) : 0; // the table is read before the wait
                    pipeline.producer_acquire(at);
                    std::uint64_t* full = pipeline.full + at.stage;
                    if (by_tma) {
                        if (lane == 0) mbarrier_arrive_expect_tx(full, unsigned(n * tma_rows * bytes));
                        __syncwarp();
                        if (lane < n) // outside the tensor: zeros
                            tma_copy_4d(tile + lane * tma_rows * bytes, map, 0, row < 0 ? 0 : row % 8,
                                        row < 0 ? -(1 << 16) : row / 8, full);
                    } else {
                        for (int i = 0; i < N; i += 32) {
                            const int position = from + i + lane;
                            const int source   = position <= last ? row_of(position) : -1;
                            if (warp == 0) copy_rows<D>(tile + i * row_bytes, a.cache_k, source, D / 8);
                            else copy_rows<E>(tile + i * v_row_bytes, a.cache_v + w.part % parts * E, source, D / 8);
                        }
                        cp_async_mbarrier_arrive(full);
                    }
                    at.advance();
                }
            });
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        const bool  leader = threadIdx.x % 128 == 0;
        const float log2e = 1.4426950408889634f, scale = Capped ? log2e : a.scale * log2e;
        const float cap_scale = Capped ? 2 * log2e * a.scale / a.softcap : 0;
        // Descriptors of the first 16 columns of the group's Q and of the first stage's K, and of the first 16 positions of its
        // V.
        const unsigned      kv_at = shared_address(kv_tiles);
        const std::uint64_t q0    = matrix_descriptor(shared_address(q_tile) + unsigned(group) * 64 * row_bytes, 16,
                                                      8 * row_bytes),
                            k0    = matrix_descriptor(kv_at, 16, 8 * row_bytes),
                            v0    = matrix_descriptor(kv_at + k_bytes, 1024, 8 * v_row_bytes);
        float         out[E / 2], s[N / 2], row_max[2], row_sum[2], rescale[2];
        std::uint32_t p[N / 16][4];
        unsigned      q_parity = 0, done = 0; // tiles of K and V

        // Starts s = Q · Kᵀ with the first Columns positions of a tile.
        const auto scores = [&]<int Columns>(std::integral_constant<int, Columns>, unsigned t) {
            const std::uint64_t k_tile = advance(k0, t % stages * stage_bytes);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < D / 16; k++) {
                const unsigned at = unsigned(k / 4) * 1024 + unsigned(k % 4) * 32;
                if (k == 0) wgmma_ss<Columns, false>(s, advance(q0, at), advance(k_tile, at));
                else wgmma_ss<Columns, true>(s, advance(q0, at), advance(k_tile, at));
            }
            wgmma_commit();
        };
        // Starts out += P · V with the first Rows positions of a tile.
        const auto values = [&]<int Rows>(std::integral_constant<int, Rows>, unsigned t) {
            const std::uint64_t v_tile = advance(v0, t % stages * stage_bytes);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < Rows / 16; k++) wgmma_rs(out, p[k], advance(v_tile, unsigned(k) * 16 * v_row_bytes));
            wgmma_commit();
        };
        const auto probabilities = [&] {
#pragma unroll
            for (int k = 0; k < N / 16; k++)
#pragma unroll
                for (int i = 0; i < 4; i++) p[k][i] = pack(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
        };
        const auto free_tile = [&](std::uint64_t* empty, unsigned t) {
            if (leader) mbarrier_arrive(empty + t % stages);
        };
        const auto wait_for = [&](std::uint64_t* full, unsigned t) {
            mbarrier_wait(full + t % stages, t / stages & 1);
            if (!by_tma) fence_async_shared();
        };
        using All   = std::integral_constant<int, N>;
        using First = std::integral_constant<int, has_halves ? N / 2 : N>;

        // Ping-pong: the softmax of one warpgroup overlaps the wgmma of the other.
        const auto acquire_tensor_cores = [&] { asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory"); };
        const auto release_tensor_cores = [&] { asm volatile("bar.arrive %0, 256;" ::"r"(2 - group) : "memory"); };
        if (group == 1) release_tensor_cores();

        for_each_tile([&](const QueryTile& w) {
            const int begin = first_position(w), last = last_position(w), n = (last - begin) / N + 1;
            const int row0      = w.first + group * 64,
                      last_row  = min(last, row0 + 63); // positions of this warpgroup's queries
            const int mine[2]   = {row0 + warp * 16 + lane / 4, row0 + warp * 16 + lane / 4 + 8};
            const int n_visible = row0 > last ? 0 : (last_row - begin) / N + 1; // tiles with a visible position
            // The last one: only its first half is visible.
            const bool half_tile = has_halves && last_row - (begin + (n_visible - 1) * N) < N / 2;
            // One step of the online softmax: s → probabilities, row max, row sum, and the rescale of older sums.
            const auto softmax = [&]<int Columns>(std::integral_constant<int, Columns>, int t) {
                const int  from = begin + t * N;
                const bool edge = from + Columns - 1 > row0 || (a.window > 0 && from <= last_row - a.window);
                if constexpr (Capped)
#pragma unroll
                    for (int i = 0; i < Columns / 2; i++) // tanh, by 1 - 2 / (e^2x + 1)
                        s[i] = a.softcap - __fdividef(2 * a.softcap, exp2_fast(s[i] * cap_scale) + 1);
                if (edge)
#pragma unroll
                    for (int i = 0; i < Columns / 2; i++) {
                        const int position = from + i / 4 * 8 + lane % 4 * 2 + i % 2, row = mine[i / 2 % 2];
                        if (position > row || (a.window > 0 && position <= row - a.window)) s[i] = -INFINITY;
                    }
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    float new_max = row_max[r];
#pragma unroll
                    for (int i = 0; i < Columns / 8; i++)
                        new_max = fmaxf(new_max, fmaxf(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]));
                    new_max = fmaxf(new_max, __shfl_xor_sync(~0u, new_max, 1));
                    new_max = fmaxf(new_max, __shfl_xor_sync(~0u, new_max, 2));
                    if ((new_max - row_max[r]) * scale <= headroom) new_max = row_max[r];
                    const float base = new_max == -INFINITY ? 0.0f : new_max * scale; // no visible position yet
                    rescale[r]       = exp2_fast(row_max[r] * scale - base);
                    row_max[r]       = new_max;
                    float part       = 0;
#pragma unroll
                    for (int i = 0; i < Columns / 8; i++) {
                        const float x    = exp2_fast(s[4 * i + 2 * r] * scale - base),
                                    y    = exp2_fast(s[4 * i + 2 * r + 1] * scale - base);
                        s[4 * i + 2 * r] = x, s[4 * i + 2 * r + 1] = y;
                        part += x + y;
                    }
                    row_sum[r] = row_sum[r] * rescale[r] + part;
                }
            };
            const auto step = [&](auto columns, int t) { // the scores of tile t with the values of tile t - 1
                wait_for(barriers.k_full, done + t);
                acquire_tensor_cores();
                scores(columns, done + t);
                values(All{}, done + t - 1);
                release_tensor_cores();
                wgmma_wait<1>();
                wgmma_pin(s);
                free_tile(barriers.k_empty, done + t);
                softmax(columns, t);
                // This wait stands here because its loop is a branch, above which the compiler cannot move the uses of the
                // values.
                wait_for(barriers.v_full, done + t);
                wgmma_wait<0>();
                wgmma_pin(out);
                free_tile(barriers.v_empty, done + t - 1);
                if (__any_sync(~0u, rescale[0] < 1 || rescale[1] < 1))
#pragma unroll
                    for (int i = 0; i < E / 2; i++) out[i] *= rescale[i / 2 % 2];
                probabilities();
            };
#pragma unroll
            for (int i = 0; i < E / 2; i++) out[i] = 0;
            row_max[0] = row_max[1] = -INFINITY, row_sum[0] = row_sum[1] = 0;
            if (a.sinks) { // a first score; of the four lanes that share a row one counts it
                row_max[0] = row_max[1] = a.sinks[w.part / parts] / (Capped ? 1.0f : a.scale);
                row_sum[0] = row_sum[1] = lane % 4 == 0 && row_max[0] > -INFINITY ? 1 : 0;
            }

            if (n_visible > 0) {
                mbarrier_wait(&barriers.q_full[group], q_parity);
                q_parity ^= 1;
                fence_async_shared();
                wait_for(barriers.k_full, done);
                scores(All{}, done);
                wgmma_wait<0>();
                wgmma_pin(s);
                free_tile(barriers.k_empty, done);
                softmax(All{}, 0);
                probabilities();
                wait_for(barriers.v_full, done);
                const int whole = half_tile ? n_visible - 1 : n_visible;
                for (int t = 1; t < whole; t++) step(All{}, t);
                if (half_tile && n_visible > 1) step(First{}, n_visible - 1);
                if (leader) mbarrier_arrive(&barriers.q_empty[group]);
                const unsigned t    = done + unsigned(n_visible) - 1;
                const int      left = last + 1 - (begin + (n_visible - 1) * N); // positions of the last tile
                if (left <
                    N) { // the positions behind belong to no sequence or to another one: a NaN in them would spread
                    const int      row = threadIdx.x % 128;
                    unsigned char* at =
                        kv_tiles + t % stages * stage_bytes + k_bytes + row / 8 * 8 * v_row_bytes + row % 8 * 128;
                    if (row >= left && row < N)
                        for (int i = 0; i < E / 8; i++) reinterpret_cast<uint4*>(at + i / 8 * 1024)[i % 8] = uint4{};
                    fence_async_shared();
                    asm volatile("bar.sync %0, 128;" ::"r"(3 + group) : "memory");
                }
                if (half_tile) values(First{}, t);
                else values(All{}, t);
                wgmma_wait<0>();
                wgmma_pin(out);
                free_tile(barriers.v_empty, t);
            }
            for (int t = n_visible; t < n; t++) { // tiles that only the other warpgroup sees
                if (t > 0) {
                    acquire_tensor_cores();
                    release_tensor_cores();
                }
                wait_for(barriers.k_full, done + t);
                wait_for(barriers.v_full, done + t);
                // Elsewhere wgmma keeps a warpgroup together. Here the leader could free a tile that another warp still waits for: when it is full
                // twice, its parity is the old one, and that warp waits for ever.
                asm volatile("bar.sync %0, 128;" ::"r"(3 + group) : "memory");
                free_tile(barriers.k_empty, done + t);
                free_tile(barriers.v_empty, done + t);
            }
            done += n;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                row_sum[r] += __shfl_xor_sync(~0u, row_sum[r], 1);
                row_sum[r] += __shfl_xor_sync(~0u, row_sum[r], 2);
                const int   in_tile = group * 64 + warp * 16 + lane / 4 + 8 * r;
                const float inverse = row_sum[r] > 0 ? 1 / row_sum[r] : 0.0f;
                auto*       to      = reinterpret_cast<__half*>(a.out) +
                           (std::int64_t(w.first_row + in_tile) * a.n_heads * parts + w.part) * E;
#pragma unroll
                for (int d = 0; d < E / 8; d += 4) {
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

// The first `columns` of a layer's cache, [rows × D] fp16, as [rows / 8][columns / 64][8][64], contiguous from the right. A copy may begin at
// any row: then it reads eight rows from there on, so that the dimension of 8 counts more. The number of rows is left open: block tables only
// name blocks that exist.
bool encode_cache(CUtensorMap& map, const Half* cache, int D, int columns, int tma_rows) {
    return encode_tensor_map<4>(map, cache, {64, 16, columns / 64, std::int64_t(1) << 31}, {D, 64, 8 * D},
                                {64, 8, columns / 64, std::max(tma_rows, min_tma_rows) / 8});
}

template <int D, bool Capped>
void launch(const Attention& a, const Plan& plan, const PrefillTile* tiles, int n, Context& gpu) {
    constexpr int N = positions_of<D>, E = columns_of<D>, parts = parts_of<D>;
    constexpr int shared = (M * D + stages_of<D> * N * (D + E)) * 2 + 1024;
    prepare_kernel(gpu, prefill_wgmma<D, Capped>, 384, shared);
    const int tma_rows = std::gcd(a.block_size, N);
    CacheMaps maps;
    bool      ok = encode_cache(maps.k, a.cache_k, D, D, tma_rows);
    for (int part = 0; part < parts; part++)
        ok = ok && encode_cache(maps.v[part], a.cache_v + part * E, D, E, tma_rows);
    // How many heads' K and V fit the L2; some in any case, so that all SMs have work. Their parts are next to each other.
    const std::int64_t bytes = std::int64_t(n) * M * D * 4, fit = l2_bytes / bytes * (a.n_heads / a.n_kv_heads);
    const int          n_together = int(std::clamp<std::int64_t>(fit, std::min(8, a.n_heads), a.n_heads)) * parts;
    const unsigned     grid       = unsigned(std::min(gpu.n_sms, n * a.n_heads * parts));
    // Without tensor maps an invalid launch, which last_error() reports.
    run_kernel(prefill_wgmma<D, Capped>, dim3(ok ? grid : 0), 384, shared, gpu, a, plan, tiles, n, maps, tma_rows,
               n_together, gpu.next_tile);
}

} // namespace

int prefill_tile_sm90(const Context& gpu, int head_dim) {
    const bool fits = head_dim == 64 || head_dim == 128 || head_dim == 256 || head_dim == 512;
    return gpu.sm90 && fits && tensor_map_encoder() != nullptr ? M : 0;
}

void attention_prefill_sm90(const Attention& a, const Plan& plan, const PrefillTile* tiles, int n, Context& gpu) {
    const auto run = a.head_dim == 64    ? (a.softcap > 0 ? launch<64, true> : launch<64, false>)
                     : a.head_dim == 128 ? (a.softcap > 0 ? launch<128, true> : launch<128, false>)
                     : a.head_dim == 256 ? (a.softcap > 0 ? launch<256, true> : launch<256, false>)
                                         : (a.softcap > 0 ? launch<512, true> : launch<512, false>);
    run(a, plan, tiles, n, gpu);
}

} // namespace quire::cuda
