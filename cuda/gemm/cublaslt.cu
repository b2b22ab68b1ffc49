// GEMM with many tokens by cuBLASLt. The library is loaded when it is first needed, so that the programs start on machines
// without it. Its algorithms are timed before the first step for some values of M: no step waits for that.
#include <cublasLt.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <map>

#include "../context.cuh"
#include "../kernels.h"

namespace quire::cuda {

namespace {

constexpr std::size_t workspace_bytes = std::size_t(64) << 20;

// The library's functions: the same for all contexts.
struct Library {
    decltype(&cublasLtCreate)                       create;
    decltype(&cublasLtDestroy)                      destroy;
    decltype(&cublasLtMatmul)                       matmul;
    decltype(&cublasLtMatmulDescCreate)             describe;
    decltype(&cublasLtMatmulDescDestroy)            forget;
    decltype(&cublasLtMatmulDescSetAttribute)       set;
    decltype(&cublasLtMatrixLayoutCreate)           layout;
    decltype(&cublasLtMatrixLayoutDestroy)          forget_layout;
    decltype(&cublasLtMatrixLayoutSetAttribute)     set_layout;
    decltype(&cublasLtMatmulPreferenceCreate)       prefer;
    decltype(&cublasLtMatmulPreferenceDestroy)      forget_preference;
    decltype(&cublasLtMatmulPreferenceSetAttribute) set_preference;
    decltype(&cublasLtMatmulAlgoGetHeuristic)       heuristic;
    const char*                                     error = nullptr;

    Library() {
        void* so = nullptr;
        for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"})
            if ((so = dlopen(name, RTLD_NOW | RTLD_LOCAL)) != nullptr) break;
        if (so == nullptr) {
            error = "libcublasLt is not installed";
            return;
        }
        const auto find = [&](auto& function, const char* name) {
            function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(so, name));
            if (function == nullptr) error = "libcublasLt lacks a function";
        };
        find(create, "cublasLtCreate");
        find(destroy, "cublasLtDestroy");
        find(matmul, "cublasLtMatmul");
        find(describe, "cublasLtMatmulDescCreate");
        find(forget, "cublasLtMatmulDescDestroy");
        find(set, "cublasLtMatmulDescSetAttribute");
        find(layout, "cublasLtMatrixLayoutCreate");
        find(forget_layout, "cublasLtMatrixLayoutDestroy");
        find(set_layout, "cublasLtMatrixLayoutSetAttribute");
        find(prefer, "cublasLtMatmulPreferenceCreate");
        find(forget_preference, "cublasLtMatmulPreferenceDestroy");
        find(set_preference, "cublasLtMatmulPreferenceSetAttribute");
        find(heuristic, "cublasLtMatmulAlgoGetHeuristic");
    }
};

const Library& library() {
    static const Library one;
    return one;
}

bool good(cublasStatus_t status) { return status == CUBLAS_STATUS_SUCCESS; }

struct Algorithm {
    cublasLtMatmulAlgo_t algo{};
    bool                 usable = false;
};

// GEMMs of one shape, with the algorithms for some values of M.
struct TunedGemm {
    cublasLtMatmulDesc_t                desc{};
    cublasLtMatrixLayout_t              weight{}, x{}, out{};
    std::array<Algorithm, n_cublaslt_m> tuned;
    std::map<std::int64_t, Algorithm>   untuned; // for other values of M, or where a tuned one fails
    bool                                usable = false;

    TunedGemm() = default;
    explicit TunedGemm(const CublasltShape& shape) {
        const Library&          lib       = library();
        const cublasOperation_t transpose = CUBLAS_OP_T;
        const auto              cols = std::uint64_t(shape.k), rows = std::uint64_t(shape.n);
        usable = good(lib.describe(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F)) &&
                 good(lib.set(desc, CUBLASLT_MATMUL_DESC_TRANSA, &transpose, sizeof transpose)) &&
                 good(lib.layout(&weight, CUDA_R_16F, cols, rows, shape.k)) &&
                 good(lib.layout(&x, CUDA_R_16F, cols, 1, shape.k)) &&
                 good(lib.layout(&out, shape.out_is_float ? CUDA_R_32F : CUDA_R_16F, rows, 1, shape.n));
        for (cublasLtMatrixLayout_t each : {weight, x, out})
            usable = usable && good(lib.set_layout(each, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &shape.n_matrices,
                                                   sizeof shape.n_matrices));
    }
    TunedGemm(const TunedGemm&)            = delete;
    TunedGemm& operator=(const TunedGemm&) = delete;
    ~TunedGemm() {
        for (cublasLtMatrixLayout_t each : {weight, x, out})
            if (each != nullptr) library().forget_layout(each);
        if (desc != nullptr) library().forget(desc);
    }

    // Sets M and the strides of the batch.
    bool set(std::int64_t n, const CublasltShape& shape) const {
        const Library& lib        = library();
        const auto     n_cols     = std::uint64_t(n);
        const auto     set_stride = [&](cublasLtMatrixLayout_t layout, const std::int64_t& stride) {
            return good(lib.set_layout(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride));
        };
        const std::int64_t none = 0;
        return usable && good(lib.set_layout(x, CUBLASLT_MATRIX_LAYOUT_COLS, &n_cols, sizeof n_cols)) &&
               good(lib.set_layout(out, CUBLASLT_MATRIX_LAYOUT_COLS, &n_cols, sizeof n_cols)) &&
               set_stride(weight, shape.weight_stride) && set_stride(x, none) && set_stride(out, shape.out_stride);
    }
};

} // namespace

struct Cublaslt {
    cublasLtHandle_t                                 handle    = nullptr;
    void*                                            workspace = nullptr;
    std::map<std::array<std::int64_t, 4>, TunedGemm> gemms;

    TunedGemm& gemm_of(const CublasltShape& s) {
        return gemms.try_emplace({s.n, s.k, s.out_is_float, s.n_matrices}, s).first->second;
    }
    // Up to `most` of the library's heuristics, the best first; returns how many.
    int heuristics(const TunedGemm& p, int most, cublasLtMatmulHeuristicResult_t* found) const {
        const Library&             lib = library();
        cublasLtMatmulPreference_t preference{};
        int                        n = 0;
        if (!good(lib.prefer(&preference))) return 0;
        const bool ok = good(lib.set_preference(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes,
                                                sizeof workspace_bytes)) &&
                        good(lib.heuristic(handle, p.desc, p.weight, p.x, p.out, p.out, preference, most, found, &n));
        lib.forget_preference(preference);
        return ok ? int(std::remove_if(found, found + n, [](const auto& f) { return !good(f.state); }) - found) : 0;
    }
    // Row-major out [n × rows] = x [n × cols] · weightᵀ is, column by column, outᵀ = weight · xᵀ.
    bool run(const TunedGemm& p, const Algorithm& with, const Half* x, const Half* weight, float scale, void* out,
             cudaStream_t stream) const {
        const float zero = 0;
        return with.usable && good(library().matmul(handle, p.desc, &scale, weight, p.weight, x, p.x, &zero, out, p.out,
                                                    out, p.out, &with.algo, workspace, workspace_bytes, stream));
    }
};

void close_cublaslt(Cublaslt* lt) {
    if (lt == nullptr) return;
    lt->gemms.clear();
    if (lt->handle != nullptr) library().destroy(lt->handle);
    release(lt->workspace);
    delete lt;
}

const char* open_cublaslt(Context& gpu) {
    const Library& lib = library();
    if (lib.error != nullptr || gpu.cublaslt != nullptr) return lib.error;
    auto* lt = new Cublaslt;
    if (good(lib.create(&lt->handle)) && (lt->workspace = gpu.take(workspace_bytes)) != nullptr) {
        gpu.cublaslt = lt;
        return nullptr;
    }
    const bool started = lt->handle != nullptr;
    close_cublaslt(lt);
    return started ? "no memory for libcublasLt's workspace" : "libcublasLt does not start";
}

bool tune_cublaslt(const CublasltShape& shape, const Half* weight, std::int64_t min_m, std::int64_t max_m,
                   Context& gpu) {
    if (gpu.cublaslt == nullptr) return false;
    if (min_m > max_m) return true;
    Cublaslt&  lt = *gpu.cublaslt;
    TunedGemm& p  = lt.gemm_of(shape);
    // From the value that serves min_m to the one that serves max_m, or the last one below.
    int first = 0, n_tuned = 1;
    while (first + 1 < n_cublaslt_m && cublaslt_m[first] < min_m) first++;
    while (n_tuned < n_cublaslt_m && cublaslt_m[n_tuned] <= std::max<std::int64_t>(max_m, 8)) n_tuned++;
    if (n_tuned < n_cublaslt_m && max_m <= 256) n_tuned = std::max(n_tuned, cublaslt_bucket(max_m) + 1);
    // x is some of the weights: zeros would be multiplied faster than other values.
    const auto    n_x = std::int64_t(cublaslt_m[n_tuned - 1]) * shape.k, n_out = cublaslt_m[n_tuned - 1] * shape.n;
    CublasltShape trial = shape;
    auto*         x     = static_cast<Half*>(allocate(gpu, std::size_t(n_x) * sizeof(Half)));
    void*         out   = allocate(gpu, std::size_t(n_out * shape.n_matrices) * (shape.out_is_float ? 4 : 2));
    cudaEvent_t   begin = nullptr, end = nullptr;
    const auto events = [&] { return cudaEventCreate(&begin) == cudaSuccess && cudaEventCreate(&end) == cudaSuccess; };
    const bool ready  = x != nullptr && out != nullptr && events();
    const auto n_weights = shape.n * shape.k;
    const bool is_large  = n_weights * 2 > std::int64_t(4) << 20;
    if (ready)
        gpu.note(cudaMemcpyAsync(x, weight, std::size_t(std::min(n_x, n_weights)) * sizeof(Half),
                                 cudaMemcpyDeviceToDevice, gpu.stream));
    for (int at = first; ready && at < n_tuned; at++) {
        trial.out_stride = cublaslt_m[at] * shape.n;
        if (!p.set(cublaslt_m[at], trial)) continue;
        constexpr int                   most = 8, rounds = 3;
        cublasLtMatmulHeuristicResult_t found[most]{};
        const int                       n    = lt.heuristics(p, most, found);
        float                           best = 1e30f;
        for (int i = 0; i < n; i++) {
            const Algorithm with{found[i].algo, true};
            for (int round = 0; round < rounds; round++) {
                // In a step the weights are not in the L2, either.
                if (is_large) gpu.note(cudaMemsetAsync(lt.workspace, 0, workspace_bytes, gpu.stream));
                float ms = 1e30f;
                gpu.note(cudaEventRecord(begin, gpu.stream));
                const bool ok = lt.run(p, with, x, weight, 1, out, gpu.stream);
                gpu.note(cudaEventRecord(end, gpu.stream));
                gpu.note(cudaEventSynchronize(end));
                if (!ok || cudaEventElapsedTime(&ms, begin, end) != cudaSuccess) {
                    cudaGetLastError(); // the library refuses this one
                    break;
                }
                if (round > 0 && ms < best) best = ms, p.tuned[std::size_t(at)] = with; // the first run loads its code
            }
        }
    }
    if (begin != nullptr) cudaEventDestroy(begin);
    if (end != nullptr) cudaEventDestroy(end);
    release(x);
    release(out);
    return ready;
}

bool cublaslt_gemm(const Half* x, std::int64_t n, const Half* weight, const CublasltShape& shape, void* out,
                   Context& gpu) {
    if (gpu.cublaslt == nullptr) return false;
    Cublaslt&  lt = *gpu.cublaslt;
    TunedGemm& p  = lt.gemm_of(shape);
    if (!p.set(n, shape)) return false;
    const int at = cublaslt_bucket(n);
    if (at < n_cublaslt_m && lt.run(p, p.tuned[std::size_t(at)], x, weight, shape.scale, out, gpu.stream)) return true;
    if (gpu.is_rank) { // loading code now might wait for this GPU, which waits for another rank; the code of tuned algorithms is loaded
        int above = 0;
        while (above < n_cublaslt_m && cublaslt_m[above] < n) above++;
        for (int i = above; i < n_cublaslt_m; i++)
            if (lt.run(p, p.tuned[std::size_t(i)], x, weight, shape.scale, out, gpu.stream)) return true;
        for (int i = above - 1; i >= 0; i--)
            if (lt.run(p, p.tuned[std::size_t(i)], x, weight, shape.scale, out, gpu.stream)) return true;
        cudaGetLastError();
        return false; // the caller falls back
    }
    if (p.untuned.size() > 1024) p.untuned.clear();
    const auto [found, is_new] = p.untuned.try_emplace(n);
    if (is_new) {
        cublasLtMatmulHeuristicResult_t first{};
        if (lt.heuristics(p, 1, &first) > 0) found->second = {first.algo, true};
    }
    const bool ok = lt.run(p, found->second, x, weight, shape.scale, out, gpu.stream);
    if (!ok) cudaGetLastError(); // the caller falls back
    return ok;
}

} // namespace quire::cuda
