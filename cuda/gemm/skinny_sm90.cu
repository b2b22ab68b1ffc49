// GEMMs of halves with few rows of x on Hopper. One warp loads weights and x by TMA as tiles of 64 columns, many tiles ahead;
// eight other warps each multiply 16 of a tile's 128 rows of weights with 8 rows of x at a time (mma.m16n8k16). The TMA swizzles what
// it writes: the 16-byte word w of a row of 128 bytes is stored at w ^ (row % 8).
//
// Limits: cols is a multiple of 64; x has room for n_rows rounded up to 8, 16, 32 or 64.
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

constexpr int                     weight_bytes = unit_rows * tile_k * 2, shared_budget = 200 * 1024;
constexpr __host__ __device__ int tile_bytes(int n_tokens) { return weight_bytes + n_tokens * tile_k * 2; }
constexpr __host__ __device__ int stages_for(int n_tokens) { return shared_budget / tile_bytes(n_tokens); }

struct Maps {
    CUtensorMap weight[max_projections], x;
};

// NT: groups of 8 rows of x.
template <int NT>
__global__ void __launch_bounds__((warps + 1) * 32, 1)
    tile_kernel(const __grid_constant__ Maps maps, int n_rows, int cols, const __grid_constant__ Blocks all,
                float4* partial, std::int32_t* arrivals) {
#if __CUDA_ARCH__ >= 900
    constexpr int     stages = stages_for(NT * 8), bytes = tile_bytes(NT * 8);
    extern __shared__ __align__(1024) unsigned char memory[];
    __shared__ std::uint64_t full[stages], empty[stages];
    __shared__ bool          is_last;
    const int                warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int                per_block = cols / tile_k;
    const Share              share{int(blockIdx.x), int(gridDim.x), all.first_block[all.n] * per_block, per_block};
    const int                begin = share.begin_of(share.self), end = share.begin_of(share.self + 1);
    const Pipeline<stages>   pipeline{memory, full, empty};
    if (threadIdx.x == 0) {
        pipeline.init(1, warps);
        mbarrier_init_fence();
    }
    __syncthreads();

    if (warp == warps) { // brings tiles
        if (lane != 0) return;
        for (int k = 0; k < all.n; k++) tma_prefetch(maps.weight[k]);
        tma_prefetch(maps.x);
        const auto bring_weight = [&](int unit, int stage) {
            const int block = unit / per_block;
            int       which = 0;
            while (block >= all.first_block[which + 1]) which++;
            mbarrier_arrive_expect_tx(&full[stage], bytes);
            tma_copy_2d(memory + stage * bytes, maps.weight[which], unit % per_block * tile_k,
                        (block - all.first_block[which]) * unit_rows, &full[stage]);
        };
        const auto bring_x = [&](int unit, int stage) {
            tma_copy_2d(memory + stage * bytes + weight_bytes, maps.x, unit % per_block * tile_k, 0, &full[stage]);
        };
        for (int u = begin; u < min(end, begin + stages); u++) bring_weight(u, u - begin); // weights depend on nobody
        wait_for_inputs();
        for (int u = begin; u < min(end, begin + stages); u++) bring_x(u, u - begin);
        PipelineState<stages> at; // the second time round
        for (int u = begin + stages; u < end; u++) {
            pipeline.producer_acquire(at);
            bring_weight(u, at.stage);
            bring_x(u, at.stage);
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
        if (unit + 1 < end && (unit + 1) / per_block == unit / per_block) continue;
        finish<NT>(acc, share, first, unit + 1, all, n_rows, partial, arrivals, is_last, [] {
            asm volatile("bar.sync 1, %0;" ::"n"(warps * 32) : "memory");
        });
        first = unit + 1;
    }
#endif
}

template <int NT>
bool launch(const __half* x, int n_rows, int cols, const Blocks& all, Context& gpu) {
    Maps maps;
    for (int k = 0; k < all.n; k++)
        if (const Weight& w = all.projection[k].weight; !encode_matrix(maps.weight[k], w.data, w.rows, cols, unit_rows))
            return false;
    if (!encode_matrix(maps.x, x, NT * 8, cols, NT * 8)) return false;
    constexpr int shared = stages_for(NT * 8) * tile_bytes(NT * 8) + 1024;
    prepare_kernel(gpu, tile_kernel<NT>, (warps + 1) * 32, shared);
    const int units = all.first_block[all.n] * (cols / tile_k);
    run_kernel(tile_kernel<NT>, dim3(unsigned(std::min(gpu.n_sms, units))), (warps + 1) * 32, shared, gpu, maps, n_rows,
               cols, all, gpu.tile_partial, gpu.tile_arrivals);
    return true;
}

} // namespace

bool skinny_gemm_sm90(const __half* x, int n_rows, int cols, const Blocks& all, Context& gpu) {
    if (!gpu.sm90 || cols % tile_k != 0 || tensor_map_encoder() == nullptr) return false;
    if (n_rows <= 8) return launch<1>(x, n_rows, cols, all, gpu);
    if (n_rows <= 16) return launch<2>(x, n_rows, cols, all, gpu);
    if (n_rows <= 32) return launch<4>(x, n_rows, cols, all, gpu);
    return launch<8>(x, n_rows, cols, all, gpu);
}

} // namespace quire::cuda
