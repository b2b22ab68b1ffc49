// The layer kernel's program: the phases, each a GEMM with its epilogue, that one launch runs. The host fills it by matching
// operations.
#pragma once

#include <cuda.h>

#include "../epilogue.cuh"
#include "../gemm/unpack.cuh"
#include "../kernels.h"
#include "../ptx/tma.cuh"

namespace quire::cuda::layer_kernel {

constexpr int                  max_phases = 4, max_tokens = 256, max_tiles = 4096; // tokens: with quantised weights
constexpr int                  tile_n = 128, max_norm_cols = 8192;
[[maybe_unused]] constexpr int mma_warps = 8, signal_warp = 8, fix_up_warp = 9;

// How a launch for N tokens uses a CTA: with weights in fp16, or with quantised ones, which need more registers and so fewer threads.
template <int N, bool Quantised>
struct Layout {
    static constexpr int  tokens    = N;
    static constexpr bool quantised = Quantised;
    // Stages of the pipelines, and their bytes. A stage of x has 64 columns, and so has one of fp16 weights; one of quantised weights has
    // 128 or 256.
    static constexpr int x_bytes = N * tile_k * 2, weight_bytes = tile_n * (Quantised ? 144 : tile_k * 2);
    static constexpr int x_stages      = N == 256   ? 3
                                         : N == 192 ? 4
                                         : N == 128 ? (Quantised ? 5 : 4)
                                         : N == 64  ? 6
                                                    : (N == 8 && Quantised ? 16 : 8),
                         weight_stages = Quantised ? (N <= 16    ? 11
                                                      : N <= 32  ? 10
                                                      : N <= 64  ? 9
                                                      : N <= 192 ? 7
                                                                 : 6)
                                                   : (N <= 16   ? 13
                                                      : N <= 32 ? 12
                                                      : N <= 64 ? 11
                                                                : 9);
    static constexpr int shared_bytes  = weight_stages * weight_bytes + x_stages * x_bytes;
    static constexpr int chunks        = Quantised ? 4 : 1; // of 64 columns, of a unit of stream-K
    // The threads that compute norms, and all threads.
    static constexpr int team = Quantised ? 8 * 32 : 16 * 32, weight_warp = Quantised ? 10 : 16,
                         x_warp = weight_warp + 1, threads = (x_warp + 1) * 32;
};

struct Result {
    const float* bias;
    void*        to; // [tokens × rows]
    int          rows;
    bool         is_float;
    float        scale;
};

// The scales of a projection's quantised weights. Those of row i of pair p begin behind scales[i] by so many rows: p / half · 2 · half +
// p % half. unpack.cuh says what shift and unscale are.
struct Quantised {
    Kind        kind;
    const void *scales[2], *mins[2];
    int         row_groups, half; // groups of a row
    float       shift[2], unscale[2];
};

// A phase: the GEMM of some projections of one x, and its epilogue.
struct Phase {
    CUtensorMap weight[max_projections], x; // tiles of 128 rows, in pairs; of all tokens
    int         tile_dim[max_projections],
        tile_step[max_projections];       // along which dimension of a map the tiles follow, and by which step
    Result       result[max_projections]; // add_norm: the first one's `to` gets the norm
    Quantised    quantised[max_projections];
    int          first_tile[max_projections + 1], n_projections, k_tiles; // units of a tile
    int          cols;
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
    unsigned  x_bytes;   // of the tokens' rows in a stage of x; what TMA loads beyond them would cost more than they do
    bool      quantised; // all weights, or none
    float*    partial_sums;    // add_norm: of a CTA's part of a tile, [tokens × 128], at CTA + tile
    float4*   fix_up;          // of a CTA's first tile, for the CTA that does the fix-up; as the threads hold them
    unsigned* fix_up_arrivals; // [phases × max_tiles] how many have written there; zero before and after
    unsigned* grid_barrier;    // arrivals at the grid barrier, and CTAs that are done; zero before and after
};

constexpr int rounded(int n_tokens) {
    return n_tokens <= 8     ? 8
           : n_tokens <= 16  ? 16
           : n_tokens <= 32  ? 32
           : n_tokens <= 64  ? 64
           : n_tokens <= 128 ? 128
           : n_tokens <= 192 ? 192
                             : 256;
}

// Matches as many operations as one launch runs, from the first one on; returns how many, 0: none. One alone only where n_ops is 1.
int compile(const Operation* ops, int n_ops, int n_tokens, const Context& gpu, Params& params);

} // namespace quire::cuda::layer_kernel
