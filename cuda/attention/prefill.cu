// Prefill attention over paged K and V. Cache layout: [block][kv_head][offset][head_dim] halves, so what one head reads of one block
// is contiguous. Scores and sums are float32, the softmax is online (running maximum, sum and weighted values).
//   prefill: tiles of consecutive queries, tensor cores (mma.m16n8k16), K and V through shared memory by cp.async.
//   plain:   any head_dim, one warp per query and head. The fallback.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "../kernels.h"
#include "../warp.cuh"

namespace quire::cuda {

namespace {

// -- plain: a warp for each row and head; lanes share the dimensions, positions one after another

__global__ void plain_kernel(Attention a, Plan plan, const PrefillTile* tiles) {
    wait_for_inputs();
    const PrefillTile tile = tiles[blockIdx.y];
    const int   lane = threadIdx.x % 32, D = a.head_dim, head = blockIdx.x, kv_head = head / (a.n_heads / a.n_kv_heads);
    const auto* table = plan.block_tables + plan.table_start[tile.sequence];
    extern __shared__ float memory[]; // per warp: q, then acc
    float *                 q = memory + threadIdx.x / 32 * 2 * D, *acc = q + D;
    for (int r = threadIdx.x / 32; r < tile.n_rows; r += blockDim.x / 32) {
        const std::int64_t row  = tile.first_row + r;
        const int          last = plan.positions[row];
        for (int d = lane; d < D; d += 32) {
            q[d]   = __half2float(reinterpret_cast<const __half*>(a.q)[(row * a.n_heads + head) * D + d]) * a.scale;
            acc[d] = 0;
        }
        __syncwarp();
        float top = -INFINITY, sum = 0;
        for (int position = a.window > 0 ? max(0, last - a.window + 1) : 0; position <= last; position++) {
            const std::int64_t at =
                ((std::int64_t(table[position / a.block_size]) * a.n_kv_heads + kv_head) * a.block_size +
                 position % a.block_size) *
                D;
            float score = 0;
            for (int d = lane; d < D; d += 32)
                score += q[d] * __half2float(reinterpret_cast<const __half*>(a.cache_k)[at + d]);
            score              = capped(warp_sum(score), a.softcap);
            const float limit  = fmaxf(top, score),
                        base   = limit == -INFINITY ? 0.0f : limit; // NaN: the sum shall be, too
            const float shrink = __expf(top - base), p = __expf(score - base);
            top = limit;
            sum = sum * shrink + p;
            for (int d = lane; d < D; d += 32)
                acc[d] = acc[d] * shrink + p * __half2float(reinterpret_cast<const __half*>(a.cache_v)[at + d]);
        }
        for (int d = lane; d < D; d += 32)
            reinterpret_cast<__half*>(a.out)[(row * a.n_heads + head) * D + d] = __float2half(acc[d] / sum);
        __syncwarp();
    }
}

// -- prefill

__device__ void copy_async(void* to, const void* from, bool valid) { // 16 bytes; zeros where not valid
    const auto address = unsigned(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(valid ? 16 : 0));
}
__device__ void commit_copies() { asm volatile("cp.async.commit_group;"); }
template <int N>
__device__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N));
}

__device__ void load_matrices(std::uint32_t (&r)[4], const __half* p) {
    const auto address = unsigned(__cvta_generic_to_shared(p));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}
__device__ void load_matrices_transposed(std::uint32_t (&r)[4], const __half* p) {
    const auto address = unsigned(__cvta_generic_to_shared(p));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}
__device__ std::uint32_t pack(float a, float b) {
    const __half2 h = __floats2half2_rn(a, b);
    return *reinterpret_cast<const std::uint32_t*>(&h);
}

// A block of Warps × 16 queries of one head against tiles of N positions. Rows in shared memory are padded by 16 bytes, so
// that ldmatrix meets no bank twice.
template <int D, int Warps, int N>
__global__ void __launch_bounds__(Warps * 32) prefill_kernel(Attention a, Plan plan, const PrefillTile* tiles) {
    wait_for_inputs();
    constexpr int     stride = D + 8, M = Warps * 16;
    extern __shared__ __align__(16) __half shared[];
    __half *          q_tile = shared, *k_tile = q_tile + M * stride, *v_tile = k_tile + 2 * N * stride;
    const PrefillTile tile = tiles[gridDim.x - 1 - blockIdx.x]; // long contexts, which come last, first
    const int         head = blockIdx.y, kv_head = head / (a.n_heads / a.n_kv_heads);
    const int         warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const auto*       table = plan.block_tables + plan.table_start[tile.sequence];
    const int         first = plan.positions[tile.first_row], last = first + tile.n_rows - 1; // positions of the tile
    const int         begin   = a.window > 0 ? max(0, first - a.window + 1) / N * N : 0;
    const int         n_tiles = (last - begin) / N + 1;

    const int  shift = 31 - __clz(a.block_size);
    const bool power = (a.block_size & (a.block_size - 1)) == 0;
    const auto load  = [&](int t) { // K and V of one tile of positions
        constexpr int words = D / 8;
        __half *      k = k_tile + (t & 1) * N * stride, *v = v_tile + (t & 1) * N * stride;
        for (int i = threadIdx.x; i < N * words; i += Warps * 32) {
            const int          n = i / words, w = i % words, position = begin + t * N + n;
            const bool         valid = position <= last;
            const int          block = !valid ? 0 : power ? position >> shift : position / a.block_size;
            const std::int64_t at    = valid ? ((std::int64_t(table[block]) * a.n_kv_heads + kv_head) * a.block_size +
                                             position - block * a.block_size) *
                                                    D +
                                                w * 8
                                              : 0;
            copy_async(k + n * stride + w * 8, reinterpret_cast<const __half*>(a.cache_k) + at, valid);
            copy_async(v + n * stride + w * 8, reinterpret_cast<const __half*>(a.cache_v) + at, valid);
        }
    };
    for (int i = threadIdx.x; i < M * (D / 8); i += Warps * 32) {
        const int  r = i / (D / 8), w = i % (D / 8);
        const bool valid = r < tile.n_rows;
        copy_async(q_tile + r * stride + w * 8,
                   reinterpret_cast<const __half*>(a.q) +
                       (std::int64_t(tile.first_row + (valid ? r : 0)) * a.n_heads + head) * D + w * 8,
                   valid);
    }
    load(0);
    commit_copies();

    float       out[D / 8][4] = {}, top[2] = {-INFINITY, -INFINITY}, sum[2] = {};
    const int   row[2] = {first + warp * 16 + lane / 4,
                          first + warp * 16 + lane / 4 + 8}; // positions of this lane's rows
    const float scale  = a.scale * 1.4426950408889634f;      // exp2 instead of exp
    for (int t = 0; t < n_tiles; t++) {
        if (t + 1 < n_tiles) load(t + 1);
        commit_copies();
        wait_copies<1>();
        __syncthreads();
        const __half *k = k_tile + (t & 1) * N * stride, *v = v_tile + (t & 1) * N * stride;
        const int     from = begin + t * N;
        // Rows of this warp that see nothing of this tile have nothing to do.
        if (from <= first + warp * 16 + 15 && warp * 16 < tile.n_rows) {
            float s[N / 8][4] = {};
#pragma unroll
            for (int d = 0; d < D / 16; d++) {
                std::uint32_t q[4];
                load_matrices(q, q_tile + (warp * 16 + lane % 16) * stride + d * 16 + lane / 16 * 8);
#pragma unroll
                for (int n = 0; n < N / 16; n++) {
                    std::uint32_t b[4];
                    load_matrices(b, k + (n * 16 + lane % 8 + lane / 16 * 8) * stride + d * 16 + lane / 8 % 2 * 8);
                    multiply(s[2 * n], q, b[0], b[1]);
                    multiply(s[2 * n + 1], q, b[2], b[3]);
                }
            }
            const bool edge = from + N - 1 > first + warp * 16 || a.window > 0;
#pragma unroll
            for (int n = 0; n < N / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float x = s[n][i] * scale;
                    if (a.softcap > 0) x = a.softcap * 1.4426950408889634f * tanhf(s[n][i] * a.scale / a.softcap);
                    if (edge) {
                        const int position = from + n * 8 + lane % 4 * 2 + i % 2, mine = row[i / 2];
                        if (position > mine || (a.window > 0 && position <= mine - a.window)) x = -INFINITY;
                    }
                    s[n][i] = x;
                }
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float limit = top[r];
#pragma unroll
                for (int n = 0; n < N / 8; n++) limit = fmaxf(limit, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
                limit              = fmaxf(limit, __shfl_xor_sync(~0u, limit, 1));
                limit              = fmaxf(limit, __shfl_xor_sync(~0u, limit, 2));
                const float base   = limit == -INFINITY ? 0.0f : limit; // a row that has seen nothing yet
                const float shrink = exp2f(top[r] - base);
                top[r]             = limit;
                float part         = 0;
#pragma unroll
                for (int n = 0; n < N / 8; n++) {
                    s[n][2 * r]     = exp2f(s[n][2 * r] - base);
                    s[n][2 * r + 1] = exp2f(s[n][2 * r + 1] - base);
                    part += s[n][2 * r] + s[n][2 * r + 1];
                }
                sum[r] = sum[r] * shrink + part;
#pragma unroll
                for (int d = 0; d < D / 8; d++) out[d][2 * r] *= shrink, out[d][2 * r + 1] *= shrink;
            }
#pragma unroll
            for (int n = 0; n < N / 16; n++) {
                const std::uint32_t p[4] = {pack(s[2 * n][0], s[2 * n][1]), pack(s[2 * n][2], s[2 * n][3]),
                                            pack(s[2 * n + 1][0], s[2 * n + 1][1]),
                                            pack(s[2 * n + 1][2], s[2 * n + 1][3])};
#pragma unroll
                for (int d = 0; d < D / 16; d++) {
                    std::uint32_t b[4];
                    load_matrices_transposed(b, v + (n * 16 + lane % 16) * stride + d * 16 + lane / 16 * 8);
                    multiply(out[2 * d], p, b[0], b[1]);
                    multiply(out[2 * d + 1], p, b[2], b[3]);
                }
            }
        }
        __syncthreads(); // the other buffer is loaded next
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
        sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
        const int in_tile = warp * 16 + lane / 4 + 8 * r;
        if (in_tile >= tile.n_rows) continue;
        const float inverse = sum[r] > 0 ? 1 / sum[r] : 0.0f;
        auto* to = reinterpret_cast<__half*>(a.out) + (std::int64_t(tile.first_row + in_tile) * a.n_heads + head) * D;
#pragma unroll
        for (int d = 0; d < D / 8; d++)
            *reinterpret_cast<std::uint32_t*>(to + d * 8 + lane % 4 * 2) =
                pack(out[d][2 * r] * inverse, out[d][2 * r + 1] * inverse);
    }
}

template <int D, int Warps, int N>
void launch_prefill(const Attention& a, const Plan& plan, const PrefillTile* tiles, int n, Context& gpu) {
    constexpr int shared = (Warps * 16 + 4 * N) * (D + 8) * 2;
    prepare_kernel(gpu, prefill_kernel<D, Warps, N>, Warps * 32, shared);
    run_kernel(prefill_kernel<D, Warps, N>, dim3(unsigned(n), unsigned(a.n_heads)), Warps * 32, shared, gpu, a, plan,
               tiles);
}

} // namespace

// As many rows as the kernels below take: warps × 16.
int prefill_tile(const Context& gpu, int head_dim) {
    if (const int rows = prefill_tile_sm90(gpu, head_dim)) return rows;
    switch (head_dim) {
        case 16:
        case 32:
        case 64:
        case 80:
        case 96: return 128;
        case 128:
        case 256: return 64;
        default: return 0;
    }
}

void attention_prefill(const Attention& a, const Plan& plan, const PrefillTile* tiles, int n, Context& gpu) {
    if (n == 0) return;
    if (prefill_tile_sm90(gpu, a.head_dim) > 0) {
        attention_prefill_sm90(a, plan, tiles, n, gpu);
        return;
    }
    switch (a.head_dim) {
        case 16: launch_prefill<16, 8, 64>(a, plan, tiles, n, gpu); break;
        case 32: launch_prefill<32, 8, 64>(a, plan, tiles, n, gpu); break;
        case 64: launch_prefill<64, 8, 64>(a, plan, tiles, n, gpu); break;
        case 80: launch_prefill<80, 8, 64>(a, plan, tiles, n, gpu); break;
        case 96: launch_prefill<96, 8, 64>(a, plan, tiles, n, gpu); break;
        case 128: launch_prefill<128, 4, 64>(a, plan, tiles, n, gpu); break;
        case 256: launch_prefill<256, 4, 32>(a, plan, tiles, n, gpu); break;
        default: {
            const std::size_t shared = std::size_t(4) * 2 * std::size_t(a.head_dim) * sizeof(float);
            run_kernel(plain_kernel, dim3(unsigned(a.n_heads), unsigned(n)), unsigned(128), shared, gpu, a, plan,
                       tiles);
        }
    }
}

} // namespace quire::cuda
