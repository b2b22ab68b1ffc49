// Skinny GEMM for Hopper (fp16 weights, up to 64 tokens), stream-K, warp-specialised: one producer warp loads weights and x by
// TMA, in tiles of 64 columns, many stages ahead; each of eight consumer warps multiplies 16 of a tile's 128 rows of the
// weights with 8 tokens at a time (mma.m16n8k16). Tiles arrive in the 128-byte swizzle: the 16-byte word w of a row is stored
// at w ^ (row % 8).
//
// Limits: cols (K) is a multiple of 64; x has room for m rounded up to 8, 16, 32 or 64.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "../kernels.h"
#include "../pipeline.cuh"
#include "../ptx/mma.cuh"
#include "../ptx/tma.cuh"
#include "stream_k.cuh"

namespace quire::cuda {

namespace {

constexpr int                     weight_bytes = tile_n * tile_k * 2, shared_budget = 200 * 1024;
constexpr __host__ __device__ int tile_bytes(int n_tokens) { return weight_bytes + n_tokens * tile_k * 2; }
constexpr __host__ __device__ int stages_for(int n_tokens) { return shared_budget / tile_bytes(n_tokens); }

struct Maps {
    CUtensorMap weight[max_projections], x;
};

// NT: groups of 8 tokens.
template <int NT>
__global__ void __launch_bounds__((warps + 1) * 32, 1)
    skinny_gemm_tma_kernel(const __grid_constant__ Maps maps, int m, int cols, const __grid_constant__ OutputTiles all,
                           float4* partial, std::int32_t* arrivals) {
#if __CUDA_ARCH__ >= 900
    constexpr int     stages = stages_for(NT * 8), bytes = tile_bytes(NT * 8);
    extern __shared__ __align__(1024) unsigned char memory[];
    __shared__ std::uint64_t full[stages], empty[stages];
    __shared__ bool          is_last;
    reads_early(); // weights
    const int              warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int              units_per_tile = cols / tile_k;
    const StreamK          stream_k(all.first_tile[all.n], units_per_tile);
    const StreamKRange     range(stream_k);
    const int              begin = range.begin, end = range.end;
    const Pipeline<stages> pipeline{memory, full, empty};
    if (threadIdx.x == 0) {
        pipeline.init(1, warps);
        mbarrier_init_fence();
    }
    __syncthreads();

    if (warp == warps) { // the producer
        if (lane != 0) return;
        for (int k = 0; k < all.n; k++) tma_prefetch(maps.weight[k]);
        tma_prefetch(maps.x);
        const auto load_weight = [&](int unit, int stage) {
            const int tile  = unit / units_per_tile;
            int       which = 0;
            while (tile >= all.first_tile[which + 1]) which++;
            mbarrier_arrive_expect_tx(&full[stage], bytes);
            tma_copy_2d(memory + stage * bytes, maps.weight[which], unit % units_per_tile * tile_k,
                        (tile - all.first_tile[which]) * tile_n, &full[stage]);
        };
        const auto load_x = [&](int unit, int stage) {
            tma_copy_2d(memory + stage * bytes + weight_bytes, maps.x, unit % units_per_tile * tile_k, 0, &full[stage]);
        };
        for (int u = begin; u < min(end, begin + stages); u++) load_weight(u, u - begin);
        wait_for_inputs();
        for (int u = begin; u < min(end, begin + stages); u++) load_x(u, u - begin);
        PipelineState<stages> at; // the second time round
        for (int u = begin + stages; u < end; u++) {
            pipeline.producer_acquire(at);
            load_weight(u, at.stage);
            load_x(u, at.stage);
            at.advance();
        }
        return;
    }
    wait_for_inputs(); // before anything is written
    // Rows of the matrices that ldmatrix takes: of weights rows 0..7 and 8..15, columns 0..7, then columns 8..15 of both; of x
    // columns 0..7 and 8..15 of eight rows, then of the next eight, or of the next 16 columns where there are no more.
    const int a_row = warp * 16 + lane % 16, a_word = lane / 16;
    const int b_row = lane % 8 + (NT > 1 ? lane / 16 * 8 : 0), b_word = lane / 8 % 2 + (NT > 1 ? 0 : lane / 16 * 2);
    float     acc[NT][4] = {};
    int       first      = begin;
    PipelineState<stages> at;
    for (int unit = begin; unit < end; unit++) {
        pipeline.consumer_wait(at);
        const unsigned weights = shared_address(memory + at.stage * bytes), xs = weights + weight_bytes;
#pragma unroll
        for (int k = 0; k < 4; k++) { // 16 columns each
            std::uint32_t a[4], b[4];
            ldmatrix_x4(a, weights + a_row * 128 + ((2 * k + a_word) ^ a_row % 8) * 16);
            if constexpr (NT == 1) {
                if (k % 2 == 0) ldmatrix_x4(b, xs + b_row * 128 + ((2 * k + b_word) ^ b_row % 8) * 16);
                mma_m16n8k16(acc[0], a, b[k % 2 * 2], b[k % 2 * 2 + 1]);
            } else {
#pragma unroll
                for (int t = 0; t < NT; t += 2) {
                    ldmatrix_x4(b, xs + (t * 8 + b_row) * 128 + ((2 * k + b_word) ^ b_row % 8) * 16);
                    mma_m16n8k16(acc[t], a, b[0], b[1]);
                    mma_m16n8k16(acc[t + 1], a, b[2], b[3]);
                }
            }
        }
        __syncwarp(); // all have read the tile
        if (lane == 0) pipeline.consumer_release(at.stage);
        at.advance();
        if (unit + 1 < end && (unit + 1) / units_per_tile == unit / units_per_tile) continue;
        fix_up_and_store<NT>(acc, stream_k, first, unit + 1, all, m, partial, arrivals, is_last,
                             FirstThreads<warps * 32>::sync);
        first = unit + 1;
    }
#endif
}

template <int NT>
bool launch(const __half* x, int m, int cols, const OutputTiles& all, Context& gpu) {
    Maps maps;
    for (int k = 0; k < all.n; k++)
        if (const Weight& w = all.projection[k].weight; !encode_matrix(maps.weight[k], w.data, w.rows, cols, tile_n))
            return false;
    if (!encode_matrix(maps.x, x, NT * 8, cols, NT * 8)) return false;
    constexpr int shared = stages_for(NT * 8) * tile_bytes(NT * 8) + 1024;
    prepare_kernel(gpu, skinny_gemm_tma_kernel<NT>, (warps + 1) * 32, shared);
    const int units = all.first_tile[all.n] * (cols / tile_k);
    run_kernel(skinny_gemm_tma_kernel<NT>, dim3(unsigned(std::min(gpu.n_sms, units))), (warps + 1) * 32, shared, gpu,
               maps, m, cols, all, gpu.tile_partial, gpu.tile_arrivals);
    return true;
}

} // namespace

bool skinny_gemm_sm90(const __half* x, int m, int cols, const OutputTiles& all, Context& gpu) {
    if (!gpu.sm90 || cols % tile_k != 0 || tensor_map_encoder() == nullptr) return false;
    if (m <= 8) return launch<1>(x, m, cols, all, gpu);
    if (m <= 16) return launch<2>(x, m, cols, all, gpu);
    if (m <= 32) return launch<4>(x, m, cols, all, gpu);
    return launch<8>(x, m, cols, all, gpu);
}

} // namespace quire::cuda
