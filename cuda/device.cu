// The device: opening it, memory, copies, graphs, and how errors come out.
#include <cuda_runtime.h>
#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "kernels.h"
#include "warp.cuh"

namespace quire::cuda {

namespace {

cudaError_t first_error = cudaSuccess;

void note(cudaError_t error) {
    if (error != cudaSuccess && first_error == cudaSuccess) first_error = error;
}

cudaStream_t raw(Stream stream) { return static_cast<cudaStream_t>(stream); }

// What the kernels that this device runs were compiled for: a build may lack the device's own code, and run that of an older one.
struct Compiled {
    int arch, hopper;
};
__global__ void tell_compiled([[maybe_unused]] Compiled* out) {
#ifdef __CUDA_ARCH__
    out->arch = __CUDA_ARCH__;
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    out->hopper = 1;
#endif
#endif
}

} // namespace

static DeviceInfo open; // the one that is
static Compiled   compiled{};

bool launches_overlap() { return compiled.arch >= 900; }
bool is_hopper() { return compiled.hopper != 0; }
int  n_processors() { return open.n_processors; }

const char* open_device(int index, DeviceInfo& info) {
    int n = 0;
    if (const cudaError_t error = cudaGetDeviceCount(&n); error != cudaSuccess) {
        cudaGetLastError();
        // With no driver at all the runtime speaks of an old one.
        return error == cudaErrorInsufficientDriver ? "no NVIDIA driver, or one too old" : cudaGetErrorString(error);
    }
    if (index >= n) return "no such GPU";
    cudaDeviceProp properties{};
    if (const cudaError_t error = cudaSetDevice(index); error != cudaSuccess) return cudaGetErrorString(error);
    if (const cudaError_t error = cudaGetDeviceProperties(&properties, index); error != cudaSuccess)
        return cudaGetErrorString(error);
    std::strncpy(info.name, properties.name, sizeof info.name - 1);
    info.n_processors = properties.multiProcessorCount;
    info.major        = properties.major;
    info.minor        = properties.minor;
    if (properties.major < 8) return "the GPU is older than compute capability 8.0";
    if (const cudaError_t error = cudaMemGetInfo(&info.free, &info.total); error != cudaSuccess)
        return cudaGetErrorString(error);
    open = info;
    if (compiled.arch == 0)
        if (auto* there = static_cast<Compiled*>(allocate(sizeof(Compiled)))) {
            tell_compiled<<<1, 1>>>(there);
            const cudaError_t error = cudaMemcpy(&compiled, there, sizeof compiled, cudaMemcpyDeviceToHost);
            release(there);
            if (error != cudaSuccess) return cudaGetErrorString(error); // no code for this device
        }
    return nullptr;
}

const char* last_error() {
    note(cudaGetLastError());
    if (first_error == cudaSuccess) return nullptr;
    const char* text = cudaGetErrorString(first_error);
    first_error      = cudaSuccess;
    return text;
}

void* allocate(std::size_t bytes) {
    void* memory = nullptr;
    if (cudaMalloc(&memory, std::max<std::size_t>(bytes, 256)) != cudaSuccess) {
        cudaGetLastError(); // the caller says what it was for
        return nullptr;
    }
    note(cudaMemset(memory, 0, std::max<std::size_t>(bytes, 256)));
    note(cudaDeviceSynchronize()); // the zeros come before what other streams write
    return memory;
}

void release(void* memory) { note(cudaFree(memory)); }

void* allocate_host(std::size_t bytes) {
    void* memory = nullptr;
    if (cudaMallocHost(&memory, std::max<std::size_t>(bytes, 256)) != cudaSuccess) {
        cudaGetLastError();
        return nullptr;
    }
    std::memset(memory, 0, bytes);
    return memory;
}

void release_host(void* memory) { note(cudaFreeHost(memory)); }

Stream create_stream() {
    cudaStream_t stream = nullptr;
    note(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}

void destroy_stream(Stream stream) { note(cudaStreamDestroy(raw(stream))); }
void synchronize(Stream stream) { note(cudaStreamSynchronize(raw(stream))); }

void copy_to_device(void* to, const void* from_host, std::size_t bytes, Stream stream) {
    note(cudaMemcpyAsync(to, from_host, bytes, cudaMemcpyHostToDevice, raw(stream)));
}

void copy_to_host(void* to_host, const void* from, std::size_t bytes, Stream stream) {
    note(cudaMemcpyAsync(to_host, from, bytes, cudaMemcpyDeviceToHost, raw(stream)));
}

namespace {

// Pinned buffers that live as long as the process loads something: taking them costs more than a small copy.
struct Lane {
    static constexpr std::size_t bytes  = std::size_t(8) << 20;
    cudaStream_t                 stream = nullptr;
    void*                        buffer[2]{};
    cudaEvent_t                  done[2]{};
};

std::vector<Lane>& lanes() {
    static std::vector<Lane> all = [] {
        std::vector<Lane> made(std::clamp(std::thread::hardware_concurrency() / 2, 1u, 8u));
        for (Lane& lane : made) {
            note(cudaStreamCreateWithFlags(&lane.stream, cudaStreamNonBlocking));
            for (int i = 0; i < 2; i++) {
                note(cudaMallocHost(&lane.buffer[i], Lane::bytes));
                note(cudaEventCreateWithFlags(&lane.done[i], cudaEventDisableTiming));
            }
        }
        return made;
    }();
    return all;
}

} // namespace

void upload(void* to, const void* from_host, std::size_t bytes) {
    std::vector<Lane>& all    = lanes();
    int                device = 0;
    note(cudaGetDevice(&device));
    const auto work = [&](std::size_t which) {
        Lane& lane = all[which];
        cudaSetDevice(device);
        std::size_t turn = 0;
        for (std::size_t at = which * Lane::bytes; at < bytes; at += all.size() * Lane::bytes, turn++) {
            const std::size_t n = std::min(Lane::bytes, bytes - at);
            cudaEventSynchronize(lane.done[turn % 2]); // its last copy out of this buffer
            std::memcpy(lane.buffer[turn % 2], static_cast<const char*>(from_host) + at, n);
            cudaMemcpyAsync(static_cast<char*>(to) + at, lane.buffer[turn % 2], n, cudaMemcpyHostToDevice, lane.stream);
            cudaEventRecord(lane.done[turn % 2], lane.stream);
        }
        cudaStreamSynchronize(lane.stream);
    };
    const std::size_t        n = std::min(all.size(), (bytes + Lane::bytes - 1) / Lane::bytes);
    std::vector<std::thread> threads;
    for (std::size_t i = 1; i < n; i++) threads.emplace_back(work, i);
    if (n > 0) work(0);
    for (std::thread& thread : threads) thread.join();
    note(cudaGetLastError());
}

void begin_capture(Stream stream) { note(cudaStreamBeginCapture(raw(stream), cudaStreamCaptureModeThreadLocal)); }

void* end_capture(Stream stream) {
    cudaGraph_t     graph = nullptr;
    cudaGraphExec_t exec  = nullptr;
    note(cudaStreamEndCapture(raw(stream), &graph));
    if (graph == nullptr) return nullptr;
    note(cudaGraphInstantiate(&exec, graph, 0));
    note(cudaGraphDestroy(graph));
    return exec;
}

void launch_graph(void* graph, Stream stream) {
    note(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), raw(stream)));
}

void destroy_graph(void* graph) { note(cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph))); }

void* create_event() {
    cudaEvent_t event = nullptr;
    note(cudaEventCreate(&event));
    return event;
}

void record_event(void* event, Stream stream) { note(cudaEventRecord(static_cast<cudaEvent_t>(event), raw(stream))); }

double seconds_between(void* first, void* second) {
    float milliseconds = 0;
    note(cudaEventSynchronize(static_cast<cudaEvent_t>(second)));
    note(cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(first), static_cast<cudaEvent_t>(second)));
    return double(milliseconds) * 1e-3;
}

} // namespace quire::cuda
