// Prefill attention by Hopper's own instructions, for head_dim 64 and 128. A block of threads takes 128 neighbouring queries
// of one head: two groups of four warps multiply 64 of them each (wgmma, K and V out of shared memory, the probabilities out
// of registers), a third brings K and V, block by block of the cache, into a ring of tiles of 128 positions. While a
// group's softmax runs, the tensor cores work on its next scores, on its last values, and for the other group.
//
// Shared memory holds rows of 64 halves, 128 bytes, swizzled as the hardware wants it: the 16-byte word w of row r stands at
// w ^ (r % 8) (PTX ISA, matrix descriptors, 128-byte swizzling).
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "bulk.cuh"
#include "kernels.h"
#include "warp.cuh"

namespace quire::cuda {

namespace {

constexpr int                  M = 128, N = 128;  // queries and positions of a tile
[[maybe_unused]] constexpr int stages        = 2; // of the ring, each of one K and one V tile
[[maybe_unused]] constexpr int heads_at_once = 8;
[[maybe_unused]] constexpr int slab_bytes    = N * 128; // 64 dimensions of a tile

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

__device__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Left>
__device__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Left) : "memory");
}
// The compiler must not move uses of the accumulators across a wait.
template <int Count>
__device__ void keep(float (&r)[Count]) {
#pragma unroll
    for (int i = 0; i < Count; i++) asm volatile("" : "+f"(r[i])::"memory");
}

// 128-byte swizzle; `stride`: bytes between groups of eight rows, `leading`: between slabs of 64 where the slab is the
// wide side.
__device__ std::uint64_t descriptor(unsigned address, unsigned leading, unsigned stride) {
    return std::uint64_t((address & 0x3ffff) >> 4) | std::uint64_t(leading >> 4) << 16 |
           std::uint64_t(stride >> 4) << 32 | std::uint64_t(1) << 62;
}

#define R8(d, i)                                                                                                \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define W8(d, i)                                                                                                \
    "=f"(d[i]), "=f"(d[i + 1]), "=f"(d[i + 2]), "=f"(d[i + 3]), "=f"(d[i + 4]), "=f"(d[i + 5]), "=f"(d[i + 6]), \
        "=f"(d[i + 7])
#define W32(d, i) W8(d, i), W8(d, i + 8), W8(d, i + 16), W8(d, i + 24)
#define R32(d, i) R8(d, i), R8(d, i + 8), R8(d, i + 16), R8(d, i + 24)

// d [64 × 128] = A [64 × 16] · B [128 × 16]ᵀ, both in shared memory; then the same, added.
__device__ void begin_scores(float (&d)[64], std::uint64_t a, std::uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
        "{"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,"
        "%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,"
        "%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
        "}, %64, %65, 0, 1, 1, 0, 0;\n"
        : W32(d, 0), W32(d, 32)
        : "l"(a), "l"(b));
}
__device__ void add_scores(float (&d)[64], std::uint64_t a, std::uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
        "{"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,"
        "%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,"
        "%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
        "}, %64, %65, 1, 1, 1, 0, 0;\n"
        : R32(d, 0), R32(d, 32)
        : "l"(a), "l"(b));
}
// d [64 × 128] += A [64 × 16] in registers · B [16 × 128] in shared memory
__device__ void multiply_values(float (&d)[64], const std::uint32_t (&a)[4], std::uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%"
        "29,"
        "%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,"
        "%57,%58,%59,%60,%61,%62,%63}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;\n"
        : R32(d, 0), R32(d, 32)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// The same with 64 columns.
__device__ void multiply_values(float (&d)[32], const std::uint32_t (&a)[4], std::uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,"
        "%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;\n"
        : R32(d, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#undef R8
#undef R32
#undef W8
#undef W32

__device__ std::uint32_t pack(float a, float b) {
    const __half2 h = __floats2half2_rn(a, b);
    return *reinterpret_cast<const std::uint32_t*>(&h);
}

__device__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

struct Barriers {
    std::uint64_t q_full, k_full[stages], v_full[stages], k_empty[stages], v_empty[stages];
};

// Brings 32 rows, each lane's own from its 16-byte word `at` on (zeros where that is negative). Neighbouring lanes take
// neighbouring words.
template <int D>
__device__ void copy_rows(unsigned char* tile, int rows, int first_row, const void* base, int at) {
    constexpr int words = D / 8, step = 32 / words; // rows of one instruction
    const int     lane = threadIdx.x % 32, w = lane % words;
    const auto*   from = static_cast<const uint4*>(base) + w;
    const auto    to   = tile + w / 8 * rows * 128 + (first_row + lane / words) * 128;
#pragma unroll
    for (int i = 0; i < words; i++) {
        const int word = __shfl_sync(~0u, at, i * step + lane / words);
        copy_async(to + i * step * 128 + (((w % 8) ^ ((i * step + lane / words) % 8)) << 4), from + max(word, 0),
                   word >= 0);
    }
}

#endif

template <int D, bool Capped>
__global__ void __launch_bounds__(384, 1) prefill_wgmma(Attention a, Plan plan, const PrefillTile* tiles) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    wait_for_inputs();
    extern __shared__ unsigned char memory[];
    auto* q_tile   = reinterpret_cast<unsigned char*>((reinterpret_cast<std::uintptr_t>(memory) + 1023) / 1024 * 1024);
    auto* kv_tiles = q_tile + M * D * 2;
    constexpr int       tile_bytes = N * D * 2;
    __shared__ Barriers barriers;
    // Some heads at a time, so that their K and V stay in L2; of those the long contexts, which come last, first.
    const int         n_tiles = int(gridDim.x) / a.n_heads, heads = min(heads_at_once, a.n_heads);
    const int         round = int(blockIdx.x) / (heads * n_tiles), left = min(heads, a.n_heads - round * heads);
    const int         in   = int(blockIdx.x) - round * heads * n_tiles;
    const PrefillTile tile = tiles[n_tiles - 1 - in / left];
    const int head = round * heads + in % left, kv_head = head / (a.n_heads / a.n_kv_heads), group = threadIdx.x / 128;
    const int first = plan.positions[tile.first_row], last = first + tile.n_rows - 1; // positions of the tile
    const int begin = a.window > 0 ? max(0, first - a.window + 1) / N * N : 0;
    const int n     = (last - begin) / N + 1;
    if (threadIdx.x == 0) {
        barrier_init(&barriers.q_full, 128);
        for (int s = 0; s < stages; s++) {
            barrier_init(&barriers.k_full[s], 128);
            barrier_init(&barriers.v_full[s], 128);
            barrier_init(&barriers.k_empty[s], 2);
            barrier_init(&barriers.v_empty[s], 2);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    if (group == 2) { // brings Q, then K and V tile by tile; a thread has one row
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        const int me = threadIdx.x % 128, warp_row = me / 32 * 32;
        copy_rows<D>(q_tile, M, warp_row, a.q,
                     me < tile.n_rows ? ((tile.first_row + me) * a.n_heads + head) * (D / 8) : -1);
        arrive_when_copied(&barriers.q_full);
        const auto* table = plan.block_tables + plan.table_start[tile.sequence];
        const auto  place = [&](int t) { // of this thread's position, in words
            const int position = begin + t * N + me, block = position / a.block_size;
            return position > last
                        ? -1
                        : ((table[block] * a.n_kv_heads + kv_head) * a.block_size + position - block * a.block_size) *
                             (D / 8);
        };
        int next = place(0);
        for (int t = 0; t < n; t++) {
            const int      s = t % stages, at = next;
            const unsigned parity = (t / stages & 1) ^ 1;
            unsigned char* tile_k = kv_tiles + s * 2 * tile_bytes;
            if (t + 1 < n) next = place(t + 1); // the table is read while this waits
            barrier_wait(&barriers.k_empty[s], parity);
            copy_rows<D>(tile_k, N, warp_row, a.cache_k, at);
            arrive_when_copied(&barriers.k_full[s]);
            barrier_wait(&barriers.v_empty[s], parity);
            copy_rows<D>(tile_k + tile_bytes, N, warp_row, a.cache_v, at);
            arrive_when_copied(&barriers.v_full[s]);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        const int      warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        const int      row0 = first + group * 64, top_row = min(last, row0 + 63); // positions of the group
        const int      mine[2] = {row0 + warp * 16 + lane / 4, row0 + warp * 16 + lane / 4 + 8};
        const int      own     = row0 > last ? 0 : (top_row - begin) / N + 1; // tiles that this group sees something of
        const bool     leader  = threadIdx.x % 128 == 0;
        const float    log2e = 1.4426950408889634f, scale = Capped ? log2e : a.scale * log2e;
        const float    squeeze    = Capped ? 2 * log2e * a.scale / a.softcap : 0;
        float          out[D / 2] = {}, s[N / 2], top[2] = {-INFINITY, -INFINITY}, sum[2] = {};
        std::uint32_t  p[N / 16][4];
        const unsigned q_at = shared_address(q_tile) + unsigned(group) * 64 * 128;

        const auto scores = [&](int t) { // begins s = Q · Kᵀ of tile t
            const unsigned k_at = shared_address(kv_tiles + (t % stages) * 2 * tile_bytes);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < D / 16; k++) {
                const unsigned      in = unsigned(k % 4) * 32;
                const std::uint64_t q  = descriptor(q_at + unsigned(k / 4) * M * 128 + in, 16, 1024),
                                    b  = descriptor(k_at + unsigned(k / 4) * slab_bytes + in, 16, 1024);
                if (k == 0) begin_scores(s, q, b);
                else add_scores(s, q, b);
            }
            wgmma_commit();
        };
        const auto values = [&](int t) { // begins out += P · V of tile t
            const unsigned v_at = shared_address(kv_tiles + ((t % stages) * 2 + 1) * tile_bytes);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < N / 16; k++)
                multiply_values(out, p[k], descriptor(v_at + unsigned(k) * 2048, slab_bytes, 1024));
            wgmma_commit();
        };
        float      shrink[2];
        const auto softmax = [&](int t) { // s → probabilities, top, sum; what older sums are to be multiplied with
            const int  from = begin + t * N;
            const bool edge = from + N - 1 > row0 || a.window > 0;
            if constexpr (Capped)
#pragma unroll
                for (int i = 0; i < N / 2; i++) // tanh, by 1 - 2 / (e^2x + 1)
                    s[i] = a.softcap - __fdividef(2 * a.softcap, exp2_fast(s[i] * squeeze) + 1);
            if (edge)
#pragma unroll
                for (int i = 0; i < N / 2; i++) {
                    const int position = from + i / 4 * 8 + lane % 4 * 2 + i % 2, row = mine[i / 2 % 2];
                    if (position > row || (a.window > 0 && position <= row - a.window)) s[i] = -INFINITY;
                }
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float limit = top[r];
#pragma unroll
                for (int i = 0; i < N / 8; i++) limit = fmaxf(limit, fmaxf(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]));
                limit            = fmaxf(limit, __shfl_xor_sync(~0u, limit, 1));
                limit            = fmaxf(limit, __shfl_xor_sync(~0u, limit, 2));
                const float base = limit == -INFINITY ? 0.0f : limit * scale; // a row that has seen nothing yet
                shrink[r]        = exp2_fast(top[r] * scale - base);
                top[r]           = limit;
                float part       = 0;
#pragma unroll
                for (int i = 0; i < N / 8; i++) {
                    const float x    = exp2_fast(s[4 * i + 2 * r] * scale - base),
                                y    = exp2_fast(s[4 * i + 2 * r + 1] * scale - base);
                    s[4 * i + 2 * r] = x, s[4 * i + 2 * r + 1] = y;
                    part += x + y;
                }
                sum[r] = sum[r] * shrink[r] + part;
            }
        };
        const auto probabilities = [&] {
#pragma unroll
            for (int k = 0; k < N / 16; k++)
#pragma unroll
                for (int i = 0; i < 4; i++) p[k][i] = pack(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
        };
        const auto free_tile = [&](std::uint64_t* empty) {
            if (leader) barrier_arrive(empty);
        };
        const auto wait_for = [&](std::uint64_t* full, int t) {
            barrier_wait(full + t % stages, unsigned(t / stages & 1));
            show_tensor_cores();
        };

        // The groups take turns at the tensor cores: one's softmax runs while they work for the other.
        const auto my_turn   = [&] { asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory"); };
        const auto your_turn = [&] { asm volatile("bar.arrive %0, 256;" ::"r"(2 - group) : "memory"); };
        if (group == 1) your_turn();

        if (own > 0) {
            barrier_wait(&barriers.q_full, 0);
            wait_for(barriers.k_full, 0);
            scores(0);
            wgmma_wait<0>();
            keep(s);
            free_tile(&barriers.k_empty[0]);
            softmax(0);
            probabilities();
            for (int t = 1; t < own; t++) {
                wait_for(barriers.k_full, t);
                wait_for(barriers.v_full, t - 1);
                my_turn();
                scores(t);
                values(t - 1);
                your_turn();
                wgmma_wait<1>();
                keep(s);
                free_tile(&barriers.k_empty[t % stages]);
                softmax(t);
                wgmma_wait<0>();
                keep(out);
                free_tile(&barriers.v_empty[(t - 1) % stages]);
#pragma unroll
                for (int i = 0; i < D / 2; i++) out[i] *= shrink[i / 2 % 2];
                probabilities();
            }
            wait_for(barriers.v_full, own - 1);
            values(own - 1);
            wgmma_wait<0>();
            keep(out);
            free_tile(&barriers.v_empty[(own - 1) % stages]);
        }
        for (int t = own; t < n; t++) { // what only the other group sees
            if (t > 0) {
                my_turn();
                your_turn();
            }
            wait_for(barriers.k_full, t);
            free_tile(&barriers.k_empty[t % stages]);
            wait_for(barriers.v_full, t);
            free_tile(&barriers.v_empty[t % stages]);
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
            sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
            const int in_tile = group * 64 + warp * 16 + lane / 4 + 8 * r;
            if (in_tile >= tile.n_rows) continue;
            const float inverse = sum[r] > 0 ? 1 / sum[r] : 0.0f;
            auto*       to =
                reinterpret_cast<__half*>(a.out) + (std::int64_t(tile.first_row + in_tile) * a.n_heads + head) * D;
#pragma unroll
            for (int d = 0; d < D / 8; d++)
                *reinterpret_cast<std::uint32_t*>(to + d * 8 + lane % 4 * 2) =
                    pack(out[4 * d + 2 * r] * inverse, out[4 * d + 2 * r + 1] * inverse);
        }
    }
#endif
}

template <int D, bool Capped>
void launch(const Attention& a, const Plan& plan, const PrefillTile* tiles, int n, cudaStream_t stream) {
    constexpr int            shared = M * D * 2 + stages * 2 * N * D * 2 + 1024;
    static const cudaError_t once =
        cudaFuncSetAttribute(prefill_wgmma<D, Capped>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    (void)once;
    run_kernel(prefill_wgmma<D, Capped>, dim3(unsigned(n * a.n_heads)), 384, shared, stream, a, plan, tiles);
}

} // namespace

int prefill_tile_hopper(int head_dim) { return is_hopper() && (head_dim == 64 || head_dim == 128) ? M : 0; }

void attention_prefill_hopper(const Attention& a, const Plan& plan, const PrefillTile* tiles, int n, Stream stream) {
    auto       s   = static_cast<cudaStream_t>(stream);
    const auto run = a.head_dim == 64 ? (a.softcap > 0 ? launch<64, true> : launch<64, false>)
                                      : (a.softcap > 0 ? launch<128, true> : launch<128, false>);
    run(a, plan, tiles, n, s);
}

} // namespace quire::cuda
