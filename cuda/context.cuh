// The Context, as the kernels see it: device, stream, and the workspaces that a launch leaves for later launches. And how kernels are
// launched: overlapping by programmatic dependent launch, or cooperatively.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "kernels.h"

namespace quire::cuda {

struct Cublaslt;                    // gemm/cublaslt.cu
void close_cublaslt(Cublaslt* all); // takes null, too

// A thread of upload(): its stream and two pinned buffers, one being filled while the other is copied.
struct UploadLane {
    static constexpr std::size_t bytes  = std::size_t(8) << 20;
    cudaStream_t                 stream = nullptr;
    void*                        buffer[2]{};
    cudaEvent_t                  done[2]{};
};

// Stream-K of the skinny GEMMs (gemm/stream_k.cuh): output tiles and CTAs per SM, at most; and the room for the partial sums of
// the two tiles that a CTA may share with others.
constexpr int         max_stream_k_tiles = 1 << 16, max_ctas_per_sm = 3;
constexpr std::size_t tile_partial_bytes(int n_sms) {
    return std::size_t(n_sms) * max_ctas_per_sm * 2 * 8 * 256 * sizeof(float4);
}

struct Context {
    int                        device = 0, n_sms = 0;
    bool                       launches_overlap = false; // the device knows programmatic dependent launch
    bool                       sm90             = false; // the device runs code compiled for sm_90a
    bool                       cooperative      = false; // the device knows cooperative launches
    bool                       is_rank          = false; // its kernels wait for other GPUs: see announce_ranks()
    cudaStream_t               stream           = nullptr;
    cudaStream_t               beside           = nullptr; // of copy_to_device_beside(), with its event
    cudaEvent_t                copied           = nullptr;
    cudaError_t                error            = cudaSuccess; // the first one since last_error()
    std::size_t                bytes            = 0;           // of device memory that is held below
    std::vector<UploadLane>    lanes;
    std::map<const void*, int> prepared; // kernels, with their CTAs per SM

    // Workspaces. Launches run in order, so there is one of each; counters are zero before and after a launch.
    float4*       tile_partial  = nullptr; // skinny GEMM: partial sums of the tiles that several CTAs share
    std::int32_t* tile_arrivals = nullptr; // .. of each tile, how many of these CTAs are done
    unsigned*     next_tile     = nullptr; // prefill attention: the dynamic tile scheduler's counter
    struct {                               // layer kernel
        float*    partial_sums    = nullptr;
        float4*   fix_up          = nullptr;
        unsigned *fix_up_arrivals = nullptr, *grid_barrier = nullptr;
    } layer;
    Cublaslt* cublaslt = nullptr;

    // Whether no other context is on the device: now, and in the step that is being launched. Guarded by `launching`.
    bool              alone         = false;
    std::atomic<bool> launching     = false;
    bool              alone_in_step = false;

    // Remembers an error that the caller does not handle.
    void note(cudaError_t status) {
        if (status == cudaSuccess) return;
        cudaGetLastError(); // reported here
        if (error == cudaSuccess) error = status;
    }
    // Memory for the members above; null when there is not enough.
    void* take(std::size_t n) {
        void* memory = allocate(*this, n);
        if (memory != nullptr) bytes += n;
        return memory;
    }
};

// Once for each kernel that needs more than 48 KiB of shared memory: allows it `bytes`. Returns its CTAs per SM.
template <class Kernel>
int prepare_kernel(Context& gpu, Kernel* kernel, int threads, int bytes) {
    const auto [found, is_new] = gpu.prepared.try_emplace(reinterpret_cast<const void*>(kernel), 0);
    if (is_new) {
        gpu.note(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
        gpu.note(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&found->second, kernel, threads, std::size_t(bytes)));
    }
    return found->second;
}

enum class Launch {
    in_order, // begins when the kernel before has ended
    programmatic, // programmatic dependent launch: begins while that one ends, where the device can; calls wait_for_inputs()
    cooperative, // in order; all CTAs run at once, whatever else is on the device, or the launch fails
};

template <class... Parameters, class... Arguments>
cudaError_t launch_kernel(Launch how, void (*kernel)(Parameters...), dim3 grid, unsigned threads, std::size_t shared,
                          Context& gpu, const Arguments&... arguments) {
    cudaLaunchAttribute attributes[2]{};
    cudaLaunchConfig_t  config{};
    config.gridDim          = grid;
    config.blockDim         = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.stream           = gpu.stream;
    config.attrs            = attributes;
    if (how == Launch::cooperative) {
        attributes[config.numAttrs].id                = cudaLaunchAttributeCooperative;
        attributes[config.numAttrs++].val.cooperative = 1;
    }
    if (how == Launch::programmatic && gpu.launches_overlap) {
        attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

// The launch of most kernels: programmatic; an error is remembered.
template <class... Parameters, class... Arguments>
void run_kernel(void (*kernel)(Parameters...), dim3 grid, unsigned threads, std::size_t shared, Context& gpu,
                const Arguments&... arguments) {
    gpu.note(launch_kernel(Launch::programmatic, kernel, grid, threads, shared, gpu, arguments...));
}
template <class... Parameters, class... Arguments>
void run_in_order(void (*kernel)(Parameters...), dim3 grid, unsigned threads, std::size_t shared, Context& gpu,
                  const Arguments&... arguments) {
    gpu.note(launch_kernel(Launch::in_order, kernel, grid, threads, shared, gpu, arguments...));
}

} // namespace quire::cuda
