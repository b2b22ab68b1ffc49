// The device: opening it, contexts, memory, copies, graphs, and how errors come out.
#include <cuda_runtime.h>
#include <algorithm>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "context.cuh"
#include "kernels.h"

namespace quire::cuda {

namespace {

// The architecture of the kernels' code that this device runs: a build may lack the device's own code, and run an older
// device's code.
struct Compiled {
    int arch, sm90;
};
__global__ void report_compiled([[maybe_unused]] Compiled* out) {
#ifdef __CUDA_ARCH__
    out->arch = __CUDA_ARCH__;
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    out->sm90 = 1;
#endif
#endif
}

// The contexts of this process: a kernel with a grid barrier needs to know whether there are others on its device.
struct Contexts {
    std::mutex            mutex;
    std::vector<Context*> all;

    static Contexts& of_process() {
        static Contexts one;
        return one;
    }
    // Other processes are time-sliced with this one, unless MPS runs them at once.
    static bool may_be_alone(int device) {
        int shared = 0;
        return cudaDeviceGetAttribute(&shared, cudaDevAttrMpsEnabled, device) == cudaSuccess && shared == 0;
    }
    void add(Context& gpu) {
        const std::lock_guard lock(mutex);
        bool                  alone = may_be_alone(gpu.device);
        for (Context* other : all) {
            if (other->device != gpu.device) continue;
            alone = false;
            begin_launches(*other); // it begins no step meanwhile, and captures none
            if (std::exchange(other->alone, false)) gpu.note(cudaStreamSynchronize(other->stream));
            end_launches(*other);
        }
        gpu.alone = alone;
        all.push_back(&gpu);
    }
    void remove(Context& gpu) {
        const std::lock_guard lock(mutex);
        std::erase(all, &gpu);
        const auto beside = [&](const Context* other) { return other->device == gpu.device; };
        if (std::count_if(all.begin(), all.end(), beside) != 1) return;
        Context& last_one = **std::find_if(all.begin(), all.end(), beside);
        begin_launches(last_one);
        last_one.alone = may_be_alone(gpu.device);
        end_launches(last_one);
    }
};

} // namespace

int n_devices() {
    int n = 0;
    if (cudaGetDeviceCount(&n) == cudaSuccess) return n;
    cudaGetLastError();
    return 0;
}

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
    info.n_sms = properties.multiProcessorCount;
    info.major = properties.major;
    info.minor = properties.minor;
    if (properties.major < 8) return "the GPU is older than compute capability 8.0";
    if (const cudaError_t error = cudaMemGetInfo(&info.free, &info.total); error != cudaSuccess)
        return cudaGetErrorString(error);
    return nullptr;
}

// -- contexts

Context* create_context(int index, const char*& why) {
    DeviceInfo info;
    why = open_device(index, info);
    if (why != nullptr) return nullptr;
    auto* gpu   = new Context;
    gpu->device = index;
    gpu->n_sms  = info.n_sms;
    gpu->note(cudaStreamCreateWithFlags(&gpu->stream, cudaStreamNonBlocking));
    gpu->note(cudaStreamCreateWithFlags(&gpu->beside, cudaStreamNonBlocking));
    gpu->note(cudaEventCreateWithFlags(&gpu->copied, cudaEventDisableTiming));
    int cooperative = 0;
    gpu->note(cudaDeviceGetAttribute(&cooperative, cudaDevAttrCooperativeLaunch, index));
    gpu->cooperative = cooperative != 0;
    Compiled compiled{};
    if (auto* there = static_cast<Compiled*>(allocate(*gpu, sizeof compiled))) {
        run_in_order(report_compiled, dim3(1), 1, 0, *gpu, there);
        copy_to_host(&compiled, there, sizeof compiled, *gpu);
        synchronize(*gpu);
        release(there);
    }
    gpu->launches_overlap = compiled.arch >= 900;
    gpu->sm90             = compiled.sm90 != 0;
    gpu->tile_partial     = static_cast<float4*>(gpu->take(tile_partial_bytes(gpu->n_sms)));
    gpu->tile_arrivals    = static_cast<std::int32_t*>(gpu->take(max_stream_k_tiles * sizeof(std::int32_t)));
    gpu->next_tile        = static_cast<unsigned*>(gpu->take(sizeof(unsigned)));
    why                   = last_error(*gpu); // no code for this device, say
    if (why == nullptr && (!gpu->tile_partial || !gpu->tile_arrivals || !gpu->next_tile)) why = "its memory is full";
    if (why == nullptr) {
        Contexts::of_process().add(*gpu);
        return gpu;
    }
    destroy_context(gpu);
    return nullptr;
}

void destroy_context(Context* gpu) {
    use(*gpu);
    synchronize(*gpu);
    Contexts::of_process().remove(*gpu);
    end_uploads(*gpu);
    close_cublaslt(gpu->cublaslt);
    for (void* memory : {static_cast<void*>(gpu->tile_partial), static_cast<void*>(gpu->tile_arrivals),
                         static_cast<void*>(gpu->next_tile), static_cast<void*>(gpu->layer.partial_sums),
                         static_cast<void*>(gpu->layer.fix_up), static_cast<void*>(gpu->layer.fix_up_arrivals),
                         static_cast<void*>(gpu->layer.grid_barrier)})
        release(memory);
    gpu->note(cudaStreamDestroy(gpu->stream));
    gpu->note(cudaStreamDestroy(gpu->beside));
    gpu->note(cudaEventDestroy(gpu->copied));
    delete gpu;
}

std::size_t bytes_of(const Context& gpu) { return gpu.bytes; }

void use(Context& gpu) { gpu.note(cudaSetDevice(gpu.device)); }

bool begin_launches(Context& gpu) {
    while (gpu.launching.exchange(true)) std::this_thread::yield(); // until a context that comes or goes has been
    return gpu.alone_in_step = gpu.alone;
}

void end_launches(Context& gpu) {
    gpu.alone_in_step = false;
    gpu.launching     = false;
}

const char* last_error(Context& gpu) {
    gpu.note(cudaGetLastError());
    if (gpu.error == cudaSuccess) return nullptr;
    const char* text = cudaGetErrorString(gpu.error);
    gpu.error        = cudaSuccess;
    return text;
}

// -- memory

// Waits for this context's stream alone: another engine may be capturing a graph, or busy.
void* allocate(Context& gpu, std::size_t bytes) {
    void* memory = nullptr;
    bytes        = std::max<std::size_t>(bytes, 256);
    if (cudaMalloc(&memory, bytes) != cudaSuccess) {
        cudaGetLastError(); // the caller reports the error with its purpose
        return nullptr;
    }
    gpu.note(cudaMemsetAsync(memory, 0, bytes, gpu.stream));
    gpu.note(cudaStreamSynchronize(gpu.stream)); // the zeros come before the writes of other streams
    return memory;
}

void release(void* memory) { cudaFree(memory); }

void* allocate_host(std::size_t bytes) {
    void* memory = nullptr;
    if (cudaMallocHost(&memory, std::max<std::size_t>(bytes, 256)) != cudaSuccess) {
        cudaGetLastError();
        return nullptr;
    }
    std::memset(memory, 0, bytes);
    return memory;
}

void release_host(void* memory) { cudaFreeHost(memory); }

void synchronize(Context& gpu) { gpu.note(cudaStreamSynchronize(gpu.stream)); }

bool is_idle(Context& gpu) {
    const cudaError_t status = cudaStreamQuery(gpu.stream);
    if (status == cudaErrorNotReady) return false;
    gpu.note(status);
    return true;
}

void copy_to_device(void* to, const void* from_host, std::size_t bytes, Context& gpu) {
    gpu.note(cudaMemcpyAsync(to, from_host, bytes, cudaMemcpyHostToDevice, gpu.stream));
}

void copy_to_device_beside(void* to, const void* from_host, std::size_t bytes, Context& gpu) {
    gpu.note(cudaMemcpyAsync(to, from_host, bytes, cudaMemcpyHostToDevice, gpu.beside));
    gpu.note(cudaEventRecord(gpu.copied, gpu.beside));
    gpu.note(cudaStreamWaitEvent(gpu.stream, gpu.copied, 0));
}

void copy_to_host(void* to_host, const void* from, std::size_t bytes, Context& gpu) {
    gpu.note(cudaMemcpyAsync(to_host, from, bytes, cudaMemcpyDeviceToHost, gpu.stream));
}

namespace {

// Taking pinned buffers costs more than a small copy: they stay until end_uploads().
cudaError_t open_upload_lane(UploadLane& lane) {
    cudaError_t error = cudaStreamCreateWithFlags(&lane.stream, cudaStreamNonBlocking);
    for (int i = 0; i < 2 && error == cudaSuccess; i++) {
        error = cudaMallocHost(&lane.buffer[i], UploadLane::bytes);
        if (error == cudaSuccess) error = cudaEventCreateWithFlags(&lane.done[i], cudaEventDisableTiming);
    }
    return error;
}

void close_upload_lane(UploadLane& lane) {
    for (int i = 0; i < 2; i++) {
        if (lane.done[i] != nullptr) cudaEventDestroy(lane.done[i]);
        cudaFreeHost(lane.buffer[i]);
    }
    if (lane.stream != nullptr) cudaStreamDestroy(lane.stream);
}

} // namespace

void upload(void* to, const void* from_host, std::size_t bytes, Context& gpu) {
    constexpr std::size_t small = std::size_t(1) << 20;
    if (bytes <= small) { // the driver has buffers for that
        copy_to_device(to, from_host, bytes, gpu);
        synchronize(gpu);
        return;
    }
    const std::size_t most = std::clamp(std::thread::hardware_concurrency() / 2, 1u, 8u);
    const std::size_t n    = std::min(most, (bytes + UploadLane::bytes - 1) / UploadLane::bytes);
    while (gpu.lanes.size() < n) {
        const cudaError_t error = open_upload_lane(gpu.lanes.emplace_back());
        if (error == cudaSuccess) continue;
        close_upload_lane(gpu.lanes.back());
        gpu.lanes.pop_back();
        return gpu.note(error);
    }
    std::vector<cudaError_t> errors(n, cudaSuccess); // of each lane, the first one
    const auto               work = [&](std::size_t which) {
        UploadLane& lane = gpu.lanes[which];
        const auto  ok   = [&](cudaError_t status) {
            if (errors[which] == cudaSuccess) errors[which] = status;
            return errors[which] == cudaSuccess;
        };
        ok(cudaSetDevice(gpu.device));
        std::size_t round = 0;
        for (std::size_t at = which * UploadLane::bytes; at < bytes && errors[which] == cudaSuccess;
             at += n * UploadLane::bytes, round++) {
            const std::size_t piece = std::min(UploadLane::bytes, bytes - at);
            if (!ok(cudaEventSynchronize(lane.done[round % 2]))) break; // its last copy out of this buffer
            std::memcpy(lane.buffer[round % 2], static_cast<const char*>(from_host) + at, piece);
            ok(cudaMemcpyAsync(static_cast<char*>(to) + at, lane.buffer[round % 2], piece, cudaMemcpyHostToDevice,
                                             lane.stream));
            ok(cudaEventRecord(lane.done[round % 2], lane.stream));
        }
        ok(cudaStreamSynchronize(lane.stream));
    };
    std::vector<std::thread> threads;
    for (std::size_t i = 1; i < n; i++) threads.emplace_back(work, i);
    work(0);
    for (std::thread& thread : threads) thread.join();
    for (const cudaError_t error : errors) gpu.note(error);
}

void end_uploads(Context& gpu) {
    for (UploadLane& lane : gpu.lanes) close_upload_lane(lane);
    gpu.lanes.clear();
}

// -- graphs

void begin_capture(Context& gpu) { gpu.note(cudaStreamBeginCapture(gpu.stream, cudaStreamCaptureModeThreadLocal)); }

void* end_capture(Context& gpu) {
    cudaGraph_t     graph = nullptr;
    cudaGraphExec_t exec  = nullptr;
    gpu.note(cudaStreamEndCapture(gpu.stream, &graph));
    if (graph == nullptr) return nullptr;
    gpu.note(cudaGraphInstantiate(&exec, graph, 0));
    gpu.note(cudaGraphDestroy(graph));
    return exec;
}

void launch_graph(void* graph, Context& gpu) {
    gpu.note(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), gpu.stream));
}

void destroy_graph(void* graph) { cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)); }

// -- events

void* create_event() {
    cudaEvent_t event = nullptr;
    cudaEventCreate(&event);
    return event;
}

void destroy_event(void* event) { cudaEventDestroy(static_cast<cudaEvent_t>(event)); }

void record_event(void* event, Context& gpu) { gpu.note(cudaEventRecord(static_cast<cudaEvent_t>(event), gpu.stream)); }

double seconds_between(void* first, void* second) {
    float milliseconds = 0;
    cudaEventSynchronize(static_cast<cudaEvent_t>(second));
    cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(first), static_cast<cudaEvent_t>(second));
    return double(milliseconds) * 1e-3;
}

} // namespace quire::cuda
