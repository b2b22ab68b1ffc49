// The layer kernel's program: the phases, each a GEMM with its epilogue, that one launch runs. The host fills it by matching
// operations.
#pragma once

#include <cuda.h>

#include "../epilogue.cuh"
#include "../kernels.h"
#include "../ptx/tma.cuh"

namespace quire::cuda::layer_kernel {

constexpr int                  max_phases = 4, max_tokens = max_layer_kernel_rows, max_tiles = 1024;
constexpr int                  tile_n = 128, weight_bytes = tile_n * tile_k * 2;
constexpr int                  team = 16 * 32, threads = team + 64; // the threads that compute norms, and all threads
[[maybe_unused]] constexpr int mma_warps   = 8;
[[maybe_unused]] constexpr int signal_warp = 8, fix_up_warp = 9, weight_warp = 16, x_warp = 17;

// Bytes and numbers of pipeline stages, for N tokens.
constexpr __host__ __device__ int x_bytes(int N) { return N * tile_k * 2; }
constexpr __host__ __device__ int x_stages(int N) { return N == 128 ? 4 : N == 64 ? 6 : 8; }
constexpr __host__ __device__ int weight_stages(int N) { return N <= 16 ? 13 : N <= 32 ? 12 : N <= 64 ? 11 : 9; }
constexpr int shared_bytes(int N) { return weight_stages(N) * weight_bytes + x_stages(N) * x_bytes(N); }

struct Result {
    const float* bias;
    void*        to; // [tokens × rows]
    int          rows;
    bool         is_float;
    float        scale;
};

// A phase: the GEMM of some projections of one x, and its epilogue.
struct Phase {
    CUtensorMap weight[max_projections], x; // tiles of 128 rows, in pairs; of all tokens
    int         tile_dim[max_projections],
        tile_step[max_projections];       // along which dimension of a map the tiles follow, and by which step
    Result       result[max_projections]; // add_norm: the first one's `to` gets the norm
    int          first_tile[max_projections + 1], n_projections, k_tiles; // of a tile
    Epilogue     epilogue;
    bool         up_first; // up comes before gate in memory
    const float* norm_weight;
    float        eps;
    float*       residual;
};

struct Params {
    Phase     phase[max_phases];
    RopeStore rope;
    Plan      plan;
    int       n_phases, n_tokens;
    float*    partial_sums;    // add_norm: of a CTA's part of a tile, [tokens × 128], at CTA + tile
    float4*   fix_up;          // of a CTA's first tile, for the CTA that does the fix-up; as the threads hold them
    unsigned* fix_up_arrivals; // of each tile, how many have written there; zero before and after
    unsigned* grid_barrier;    // arrivals at the grid barrier, and CTAs that are done; zero before and after
};

constexpr int rounded(int n_tokens) {
    return n_tokens <= 8 ? 8 : n_tokens <= 16 ? 16 : n_tokens <= 32 ? 32 : n_tokens <= 64 ? 64 : 128;
}

// Matches as many operations as one launch runs, from the first one on; returns how many, 0: none.
int compile(const Operation* ops, int n_ops, int n_tokens, const Context& gpu, Params& params);

} // namespace quire::cuda::layer_kernel
