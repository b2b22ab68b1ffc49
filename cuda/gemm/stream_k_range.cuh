// Stream-K: the output tiles of a GEMM are cut along K into units. The units of all tiles are numbered in order and dealt out
// evenly to the CTAs of the grid, or to as many CTAs as there are units.
#pragma once

#include <cuda_runtime.h>

namespace quire::cuda {

// Which CTA has which units. Units times CTAs fit 32 bits.
struct StreamK {
    unsigned total, n; // units of all tiles; CTAs that have any
    int      units_per_tile;

    __device__ StreamK(int n_tiles, int per_tile)
        : total(unsigned(n_tiles * per_tile)), n(min(gridDim.x, total)), units_per_tile(per_tile) {}
    __device__ int begin_of(unsigned cta) const { return int(total * min(cta, n) / n); }
    __device__ int cta_of(int unit) const { return int((unsigned(unit + 1) * n - 1) / total); }
    __device__ int first_cta(int tile) const { return cta_of(tile * units_per_tile); }
    __device__ int last_cta(int tile) const { return cta_of((tile + 1) * units_per_tile - 1); }
};

// The units of this CTA.
struct StreamKRange {
    int begin, end, units_per_tile;

    __device__ StreamKRange(const StreamK& all)
        : begin(all.begin_of(blockIdx.x)), end(all.begin_of(blockIdx.x + 1)), units_per_tile(all.units_per_tile) {}
    __device__ bool empty() const { return begin == end; }
    __device__ int  first_tile() const { return begin / units_per_tile; }
    __device__ int  last_tile() const { return (end - 1) / units_per_tile; }
    // Whether this CTA has the tile's first unit, and its last one.
    __device__ bool begins(int tile) const { return tile * units_per_tile >= begin; }
    __device__ bool ends(int tile) const { return (tile + 1) * units_per_tile <= end; }
};

} // namespace quire::cuda
