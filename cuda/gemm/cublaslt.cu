// GEMMs with many rows, by cuBLASLt. The library is loaded when it is first needed, so that the programs start on machines
// without it. Its algorithms are tried before the first step, for some numbers of rows: no step waits for that.
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

// TunedGemm of one shape, with the algorithms for its numbers of rows.
struct TunedGemm {
    cublasLtMatmulDesc_t                desc{};
    cublasLtMatrixLayout_t              weight{}, x{}, out{};
    std::array<Algorithm, n_cublaslt_m> tried;
    std::map<std::int64_t, Algorithm>   guessed; // for other numbers of rows, or where what was tried fails
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

    // The number of rows of x, and how far matrices are apart.
    bool set(std::int64_t n, const CublasltShape& shape) const {
        const Library& lib    = library();
        const auto     n_cols = std::uint64_t(n);
        const auto     far    = [&](cublasLtMatrixLayout_t layout, const std::int64_t& apart) {
            return good(lib.set_layout(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &apart, sizeof apart));
        };
        const std::int64_t none = 0;
        return usable && good(lib.set_layout(x, CUBLASLT_MATRIX_LAYOUT_COLS, &n_cols, sizeof n_cols)) &&
               good(lib.set_layout(out, CUBLASLT_MATRIX_LAYOUT_COLS, &n_cols, sizeof n_cols)) &&
               far(weight, shape.weight_stride) && far(x, none) && far(out, shape.out_stride);
    }
};

} // namespace

struct Cublaslt {
    cublasLtHandle_t                                 handle    = nullptr;
    void*                                            workspace = nullptr;
    std::map<std::array<std::int64_t, 4>, TunedGemm> all;

    TunedGemm& gemm_of(const CublasltShape& s) {
        return all.try_emplace({s.n, s.k, s.out_is_float, s.n_matrices}, s).first->second;
    }
    // Up to `most` of the library's guesses, the likeliest first; returns how many.
    int guess(const TunedGemm& p, int most, cublasLtMatmulHeuristicResult_t* found) const {
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
    bool run(const TunedGemm& p, const Algorithm& with, const Half* x, const Half* weight, void* out,
             cudaStream_t stream) const {
        const float one = 1, zero = 0;
        return with.usable && good(library().matmul(handle, p.desc, &one, weight, p.weight, x, p.x, &zero, out, p.out,
                                                    out, p.out, &with.algo, workspace, workspace_bytes, stream));
    }
};

void close_cublaslt(Cublaslt* all) {
    if (all == nullptr) return;
    all->all.clear();
    if (all->handle != nullptr) library().destroy(all->handle);
    release(all->workspace);
    delete all;
}

const char* open_cublaslt(Context& gpu) {
    const Library& lib = library();
    if (lib.error != nullptr || gpu.cublaslt != nullptr) return lib.error;
    auto* blas = new Cublaslt;
    if (good(lib.create(&blas->handle)) && (blas->workspace = gpu.take(workspace_bytes)) != nullptr) {
        gpu.cublaslt = blas;
        return nullptr;
    }
    const bool started = blas->handle != nullptr;
    close_cublaslt(blas);
    return started ? "no memory for libcublasLt's workspace" : "libcublasLt does not start";
}

bool tune_cublaslt(const CublasltShape& shape, const Half* weight, std::int64_t least_rows, std::int64_t most_rows,
                   Context& gpu) {
    if (gpu.cublaslt == nullptr) return false;
    if (least_rows > most_rows) return true;
    Cublaslt&  blas = *gpu.cublaslt;
    TunedGemm& p    = blas.gemm_of(shape);
    // From the one that serves least_rows to the one that serves most_rows, or the last one below.
    int first = 0, n_tried = 1;
    while (first + 1 < n_cublaslt_m && cublaslt_m[first] < least_rows) first++;
    while (n_tried < n_cublaslt_m && cublaslt_m[n_tried] <= std::max<std::int64_t>(most_rows, 8)) n_tried++;
    if (n_tried < n_cublaslt_m && most_rows <= 256) n_tried = std::max(n_tried, cublaslt_bucket(most_rows) + 1);
    // x is some of the weights: products of zeros are quicker than others.
    const auto    n_x = std::int64_t(cublaslt_m[n_tried - 1]) * shape.k, n_out = cublaslt_m[n_tried - 1] * shape.n;
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
    for (int at = first; ready && at < n_tried; at++) {
        trial.out_stride = cublaslt_m[at] * shape.n;
        if (!p.set(cublaslt_m[at], trial)) continue;
        constexpr int                   most = 8, rounds = 3;
        cublasLtMatmulHeuristicResult_t found[most]{};
        const int                       n    = blas.guess(p, most, found);
        float                           best = 1e30f;
        for (int i = 0; i < n; i++) {
            const Algorithm with{found[i].algo, true};
            for (int round = 0; round < rounds; round++) {
                // In a step the weights are not in the second-level cache, either.
                if (is_large) gpu.note(cudaMemsetAsync(blas.workspace, 0, workspace_bytes, gpu.stream));
                float ms = 1e30f;
                gpu.note(cudaEventRecord(begin, gpu.stream));
                const bool ok = blas.run(p, with, x, weight, out, gpu.stream);
                gpu.note(cudaEventRecord(end, gpu.stream));
                gpu.note(cudaEventSynchronize(end));
                if (!ok || cudaEventElapsedTime(&ms, begin, end) != cudaSuccess) {
                    cudaGetLastError(); // one that is not taken
                    break;
                }
                if (round > 0 && ms < best) best = ms, p.tried[std::size_t(at)] = with; // the first one loads its code
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
    Cublaslt&  blas = *gpu.cublaslt;
    TunedGemm& p    = blas.gemm_of(shape);
    if (!p.set(n, shape)) return false;
    const int at = cublaslt_bucket(n);
    if (at < n_cublaslt_m && blas.run(p, p.tried[std::size_t(at)], x, weight, out, gpu.stream)) return true;
    if (p.guessed.size() > 1024) p.guessed.clear();
    const auto [found, is_new] = p.guessed.try_emplace(n);
    if (is_new) {
        cublasLtMatmulHeuristicResult_t first{};
        if (blas.guess(p, 1, &first) > 0) found->second = {first.algo, true};
    }
    const bool ok = blas.run(p, found->second, x, weight, out, gpu.stream);
    if (!ok) cudaGetLastError(); // the caller has other ways
    return ok;
}

} // namespace quire::cuda
