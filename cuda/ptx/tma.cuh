// TMA, Hopper's asynchronous copies from global to shared memory: bulk copies of bytes, and tiles of arrays that a tensor map
// describes. One thread starts a copy; an mbarrier reports its end. (PTX ISA: cp.async.bulk.)
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "mbarrier.cuh"

namespace quire::cuda {

// -- tensor maps, on the host

using TensorMapEncoder = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                      const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                      CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's function, looked up by name, because the program also starts without a driver. Null where it has none.
inline TensorMapEncoder tensor_map_encoder() {
    static const TensorMapEncoder found = [] {
        void*                           function = nullptr;
        cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
#else
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result);
#endif
        return result == cudaDriverEntryPointSuccess ? reinterpret_cast<TensorMapEncoder>(function) : nullptr;
    }();
    return found;
}

// An array of Rank dimensions, the first one contiguous, in boxes; zeros beyond its edges. Strides, of the other dimensions, are in bytes.
// swizzle: how the boxes arrive in shared memory. False: not possible, as of an unaligned array.
template <int Rank>
bool encode_tensor_map(CUtensorMap& map, const void* data, CUtensorMapDataType type, const std::int64_t (&sizes)[Rank],
                       const std::int64_t (&strides)[Rank - 1], const int (&box)[Rank], CUtensorMapSwizzle swizzle) {
    cuuint64_t n[Rank], bytes[Rank - 1];
    cuuint32_t of_box[Rank], steps[Rank];
    for (int i = 0; i < Rank; i++) n[i] = cuuint64_t(sizes[i]), of_box[i] = cuuint32_t(box[i]), steps[i] = 1;
    for (int i = 0; i < Rank - 1; i++) bytes[i] = cuuint64_t(strides[i]);
    return tensor_map_encoder()(&map, type, Rank, const_cast<void*>(data), n, bytes, of_box, steps,
                                CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}
// An fp16 array in boxes that arrive in the 128-byte swizzle (see wgmma.cuh); strides are in elements.
template <int Rank>
bool encode_tensor_map(CUtensorMap& map, const void* data, const std::int64_t (&sizes)[Rank],
                       const std::int64_t (&strides)[Rank - 1], const int (&box)[Rank]) {
    std::int64_t bytes[Rank - 1];
    for (int i = 0; i < Rank - 1; i++) bytes[i] = strides[i] * 2;
    return encode_tensor_map<Rank>(map, data, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, sizes, bytes, box,
                                   CU_TENSOR_MAP_SWIZZLE_128B);
}

// A matrix [rows × cols] in tiles of box_rows × 64, the K of one pipeline stage. cols is a multiple of 8.
constexpr int tile_k = 64;
inline bool   encode_matrix(CUtensorMap& map, const void* data, std::int64_t rows, std::int64_t cols, int box_rows) {
    return encode_tensor_map<2>(map, data, {cols, rows}, {cols}, {tile_k, box_rows});
}

#if __CUDA_ARCH__ >= 900

// -- copies

// L2 policy for data that a step reads only once, such as weights: these data should not evict any others.
__device__ inline std::uint64_t l2_evict_first() {
    std::uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Bytes: addresses and sizes are multiples of 16.
__device__ inline void tma_copy_bulk(void* to, const void* from, unsigned bytes, std::uint64_t* b,
                                     std::uint64_t policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(b)), "l"(policy)
        : "memory");
}
__device__ inline void tma_copy_bulk(void* to, const void* from, unsigned bytes, std::uint64_t* b) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(b))
                 : "memory");
}

// Boxes of tensor maps, from the given coordinates on.
__device__ inline void tma_prefetch(const CUtensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
__device__ inline void tma_copy_2d(void* to, const CUtensorMap& map, int c0, int c1, std::uint64_t* b) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            shared_address(to)),
        "l"(&map), "r"(c0), "r"(c1), "r"(shared_address(b))
        : "memory");
}
// The third coordinate is that of the first: 0.
__device__ inline void tma_copy_4d(void* to, const CUtensorMap& map, int c0, int c1, int c3, std::uint64_t* b) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %2, %4}], "
        "[%5];" ::"r"(shared_address(to)),
        "l"(&map), "r"(c0), "r"(c1), "r"(c3), "r"(shared_address(b))
        : "memory");
}
// The second and third coordinates are 0.
__device__ inline void tma_copy_5d(void* to, const CUtensorMap& map, int c0, int c3, int c4, std::uint64_t* b,
                                   std::uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, "
        "%3, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(to)),
        "l"(&map), "r"(c0), "r"(0), "r"(c3), "r"(c4), "r"(shared_address(b)), "l"(policy)
        : "memory");
}

// -- fences between ordinary accesses and the asynchronous ones of TMA and wgmma

// Makes threads' earlier writes to global memory visible to later TMA copies.
__device__ inline void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
// Makes threads' earlier writes to shared memory visible to wgmma issued after this.
__device__ inline void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#endif

} // namespace quire::cuda
