// What a Context is to the kernels: the device, the stream, what launches leave to later ones; and how kernels are launched.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "kernels.h"

namespace quire::cuda {

struct Cublaslt;                    // blas.cu
void close_cublaslt(Cublaslt* all); // takes null, too

// A thread's way up: pinned buffers, used by turns.
struct Lane {
    static constexpr std::size_t bytes  = std::size_t(8) << 20;
    cudaStream_t                 stream = nullptr;
    void*                        buffer[2]{};
    cudaEvent_t                  done[2]{};
};

// Of products that share row blocks: tickets, and blocks of threads that a processor runs at once, at most.
constexpr int         most_tickets = 1 << 16, most_at_once = 3;
constexpr std::size_t partial_bytes(int n_sms) {
    return std::size_t(n_sms) * most_at_once * 2 * 8 * 256 * sizeof(float4);
}

struct Context {
    int               device = 0, n_sms = 0;
    bool              launches_overlap = false; // whether the device can
    bool              sm90             = false; // whether it runs what is compiled for sm_90a
    bool              cooperative      = false; // whether it can start all blocks of a launch at once, or not at all
    cudaStream_t      stream           = nullptr;
    cudaError_t       error            = cudaSuccess; // the first since it was asked for
    std::size_t       bytes            = 0;           // of device memory that is held below
    std::vector<Lane> lanes;
    std::map<const void*, int> prepared; // kernels, with how many blocks of theirs a processor holds at once

    // What launches leave to one another. They are in order, so there is one of each.
    float4*       partial = nullptr; // matmul_blocks.cuh: sums of blocks that share a row block
    std::int32_t* tickets = nullptr; // .. of each row block, how many are done; zero before and after
    unsigned*     turn    = nullptr; // attention_hopper.cu: the next of the queries; zero before and after
    struct {                         // dense.cu
        float*    sums    = nullptr;
        float4*   left    = nullptr;
        unsigned *arrived = nullptr, *counter = nullptr;
    } dense;
    Cublaslt* blas = nullptr;

    // Whether no other context is on the device, as of now, and in the step that is being launched. Only who has set
    // `launching` looks or changes it.
    bool              alone         = false;
    std::atomic<bool> launching     = false;
    bool              alone_in_step = false;

    // Remembers an error that is not the caller's to handle.
    void note(cudaError_t status) {
        if (status == cudaSuccess) return;
        cudaGetLastError(); // it has been told
        if (error == cudaSuccess) error = status;
    }
    // Memory for the members above; null when there is not enough.
    void* take(std::size_t n) {
        void* memory = allocate(*this, n);
        if (memory != nullptr) bytes += n;
        return memory;
    }
};

// Once for each kernel that wants more than 48 KiB of shared memory: lets it have up to `bytes`. Returns how many blocks a
// processor holds at once.
template <class Kernel>
int prepare_kernel(Context& gpu, Kernel* kernel, int threads, int bytes) {
    const auto [found, is_new] = gpu.prepared.try_emplace(reinterpret_cast<const void*>(kernel), 0);
    if (is_new) {
        gpu.note(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
        gpu.note(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&found->second, kernel, threads, std::size_t(bytes)));
    }
    return found->second;
}

// How a launch stands to the one before it, and its blocks to one another.
enum class Launch {
    in_order, // begins when the one before has ended
    early,    // begins while that one ends, where the device can: the kernel calls wait_for_inputs()
    together, // in order; all its blocks run at once, whatever else is on the device
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
    if (how == Launch::together) {
        attributes[config.numAttrs].id                = cudaLaunchAttributeCooperative;
        attributes[config.numAttrs++].val.cooperative = 1;
    }
    if (how == Launch::early && gpu.launches_overlap) {
        attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

// Most kernels' launch: early, and an error is remembered.
template <class... Parameters, class... Arguments>
void run_kernel(void (*kernel)(Parameters...), dim3 grid, unsigned threads, std::size_t shared, Context& gpu,
                const Arguments&... arguments) {
    gpu.note(launch_kernel(Launch::early, kernel, grid, threads, shared, gpu, arguments...));
}
template <class... Parameters, class... Arguments>
void run_in_order(void (*kernel)(Parameters...), dim3 grid, unsigned threads, std::size_t shared, Context& gpu,
                  const Arguments&... arguments) {
    gpu.note(launch_kernel(Launch::in_order, kernel, grid, threads, shared, gpu, arguments...));
}

} // namespace quire::cuda
