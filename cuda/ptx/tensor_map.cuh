// Tensor maps, which describe arrays to Hopper's TMA: the driver function that makes them, and tiles of matrices.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "tma.cuh"

namespace quire::cuda {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// Asked for by name: the program starts without a driver, too. Null where it has none.
inline Encode encoder() {
    static const Encode found = [] {
        void*                           function = nullptr;
        cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
#else
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result);
#endif
        return result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
    }();
    return found;
}

// A matrix [rows × cols] of halves in tiles of `box_rows` × 64; beyond its edges there are zeros. cols is a multiple of 8.
constexpr int tile_cols = 64;
inline bool   encode_tiles(CUtensorMap& map, const void* data, std::int64_t rows, std::int64_t cols, int box_rows) {
    const cuuint64_t sizes[2] = {cuuint64_t(cols), cuuint64_t(rows)}, stride = cuuint64_t(cols) * 2;
    const cuuint32_t box[2] = {tile_cols, cuuint32_t(box_rows)}, steps[2] = {1, 1};
    return encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, const_cast<void*>(data), sizes, &stride, box, steps,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                     CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

#if __CUDA_ARCH__ >= 900

__device__ inline void prefetch_map(const CUtensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
__device__ inline void copy_tile(void* to, const CUtensorMap& map, int col, int row, std::uint64_t* b) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            shared_address(to)),
        "l"(&map), "r"(col), "r"(row), "r"(shared_address(b))
        : "memory");
}
__device__ inline void copy_tile(void* to, const CUtensorMap& map, int col, int row, std::uint64_t* b,
                                 std::uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, "
        "%3}], [%4], %5;" ::"r"(shared_address(to)),
        "l"(&map), "r"(col), "r"(row), "r"(shared_address(b)), "l"(policy)
        : "memory");
}

#endif

} // namespace quire::cuda
