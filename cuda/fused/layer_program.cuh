// The layer kernel's program: shared by the host, which matches operations, and the kernel.
#pragma once

#include <cuda.h>

#include "../epilogue.cuh"
#include "../kernels.h"
#include "../ptx/tma.cuh"

namespace quire::cuda::layer_kernel {

constexpr int                  most_parts = 4, most_tokens = max_layer_kernel_rows, most_tiles = 1024;
constexpr int                  tile_rows = 128, weight_bytes = tile_rows * tile_k * 2;
constexpr int                  team = 16 * 32, threads = team + 64; // those that norm, and all
[[maybe_unused]] constexpr int multiplying  = 8;                    // warps
[[maybe_unused]] constexpr int telling_warp = 8, hearing_warp = 9, weight_warp = 16, x_warp = 17;

// Stages of the rings of weights and of x, N tokens.
constexpr __host__ __device__ int x_bytes(int N) { return N * tile_k * 2; }
constexpr __host__ __device__ int x_stages(int N) { return N == 128 ? 4 : N == 64 ? 6 : 8; }
constexpr __host__ __device__ int weight_stages(int N) { return N <= 16 ? 13 : N <= 32 ? 12 : N <= 64 ? 11 : 9; }
constexpr int shared_bytes(int N) { return weight_stages(N) * weight_bytes + x_stages(N) * x_bytes(N); }

struct Result {
    const float* bias;
    void*        to; // [tokens × rows]
    int          rows;
    bool         is_float;
};

// Products of one x, and what follows.
struct Part {
    CUtensorMap weight[max_projections], x;                // tiles of 128 rows, by pairs; of all tokens
    int    along[max_projections], apart[max_projections]; // the dimension in which a map's tiles follow, how far apart
    Result result[max_projections];                        // of the norm: the first one's `to` gets the normed rows
    int    first_tile[max_projections + 1], n_projections, n_steps; // of a tile
    Epilogue     epilogue;
    bool         up_first; // of gate and up, in memory
    const float* norm_weight;
    float        eps;
    float*       residual;
};

struct Parts {
    Part      part[most_parts];
    RopeStore rope;
    Plan      plan;
    int       n_parts, n_tokens;
    float*    sums;    // for norms: of a block's part of a tile, [tokens × 128], at block + tile
    float4*   left;    // what a block left to the one that finishes its first tile, as the threads have it
    unsigned* arrived; // how many have left something of a tile; zero before and after
    unsigned* counter; // how often a block arrived, and how many are done; zero before and after
};

constexpr int rounded(int n_tokens) {
    return n_tokens <= 8 ? 8 : n_tokens <= 16 ? 16 : n_tokens <= 32 ? 32 : n_tokens <= 64 ? 64 : 128;
}

int compile(const Operation* ops, int n_ops, int n_tokens, const Context& gpu, Parts& parts);

} // namespace quire::cuda::layer_kernel
