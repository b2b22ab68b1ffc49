// GEMMs with many rows, by cuBLASLt. The library is loaded when it is first needed, so that the programs start on machines
// without it.
#include <cublasLt.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <map>

#include "kernels.h"

namespace quire::cuda {

namespace {

constexpr std::size_t workspace_bytes = std::size_t(64) << 20;

struct Library {
    decltype(&cublasLtCreate)                       create;
    decltype(&cublasLtMatmul)                       matmul;
    decltype(&cublasLtMatmulDescCreate)             describe;
    decltype(&cublasLtMatmulDescSetAttribute)       set;
    decltype(&cublasLtMatrixLayoutCreate)           layout;
    decltype(&cublasLtMatrixLayoutSetAttribute)     set_layout;
    decltype(&cublasLtMatmulPreferenceCreate)       prefer;
    decltype(&cublasLtMatmulPreferenceSetAttribute) set_preference;
    decltype(&cublasLtMatmulAlgoGetHeuristic)       heuristic;
    cublasLtHandle_t                                handle    = nullptr;
    void*                                           workspace = nullptr;
    const char*                                     error     = nullptr;

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
        find(matmul, "cublasLtMatmul");
        find(describe, "cublasLtMatmulDescCreate");
        find(set, "cublasLtMatmulDescSetAttribute");
        find(layout, "cublasLtMatrixLayoutCreate");
        find(set_layout, "cublasLtMatrixLayoutSetAttribute");
        find(prefer, "cublasLtMatmulPreferenceCreate");
        find(set_preference, "cublasLtMatmulPreferenceSetAttribute");
        find(heuristic, "cublasLtMatmulAlgoGetHeuristic");
        if (error == nullptr && create(&handle) != CUBLAS_STATUS_SUCCESS) error = "libcublasLt does not start";
        if (error == nullptr && (workspace = allocate(workspace_bytes)) == nullptr)
            error = "no memory for libcublasLt's workspace";
    }
};

Library& library() {
    static Library one;
    return one;
}

// One product's shape, with the algorithm that was chosen for it: the same one each time.
struct Shape {
    cublasLtMatmulDesc_t   desc{};
    cublasLtMatrixLayout_t weight{}, x{}, out{};
    cublasLtMatmulAlgo_t   algo{};
    bool                   usable = false;
};

} // namespace

const char* open_blas() { return library().error; }

// Row-major out [n × rows] = x [n × cols] · weightᵀ is, column by column, outᵀ = weight · xᵀ.
void matmul_blas(const Half* x, std::int64_t n, const Half* weight, std::int64_t rows, std::int64_t cols, void* out,
                 bool out_is_float, Stream stream, int n_matrices, std::int64_t weight_stride,
                 std::int64_t out_stride) {
    static std::map<std::array<std::int64_t, 7>, Shape> shapes;
    Library&                                            lib = library();
    auto [found, is_new] = shapes.try_emplace({n, rows, cols, out_is_float, n_matrices, weight_stride, out_stride});
    Shape& s             = found->second;
    if (is_new) {
        const cublasOperation_t transpose = CUBLAS_OP_T;
        lib.describe(&s.desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
        lib.set(s.desc, CUBLASLT_MATMUL_DESC_TRANSA, &transpose, sizeof transpose);
        lib.layout(&s.weight, CUDA_R_16F, std::uint64_t(cols), std::uint64_t(rows), cols);
        lib.layout(&s.x, CUDA_R_16F, std::uint64_t(cols), std::uint64_t(n), cols);
        lib.layout(&s.out, out_is_float ? CUDA_R_32F : CUDA_R_16F, std::uint64_t(rows), std::uint64_t(n), rows);
        if (n_matrices > 1) {
            const std::int64_t no_stride = 0;
            const auto         several   = [&](cublasLtMatrixLayout_t layout, const std::int64_t& stride) {
                lib.set_layout(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &n_matrices, sizeof n_matrices);
                lib.set_layout(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride);
            };
            several(s.weight, weight_stride);
            several(s.x, no_stride);
            several(s.out, out_stride);
        }
        cublasLtMatmulPreference_t preference{};
        lib.prefer(&preference);
        lib.set_preference(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes,
                           sizeof workspace_bytes);
        constexpr int                   most = 32;
        cublasLtMatmulHeuristicResult_t found_algos[most]{};
        int                             n_found = 0;
        lib.heuristic(lib.handle, s.desc, s.weight, s.x, s.out, s.out, preference, most, found_algos, &n_found);
        s.usable = n_found > 0;
        s.algo   = found_algos[0].algo;
        // The library's first guess is often not the fastest for few rows. Sizes that come again and again are tried.
        if (n <= 256 || n % 256 == 0) {
            auto        raw  = static_cast<cudaStream_t>(stream);
            const float one_ = 1, zero_ = 0;
            cudaEvent_t begin = nullptr, end = nullptr;
            cudaEventCreate(&begin);
            cudaEventCreate(&end);
            float         best   = 1e30f;
            constexpr int rounds = 7;
            for (int i = 0; i < n_found; i++) {
                std::array<float, rounds> times{};
                for (float& ms : times) {
                    // In a step the weights are not in the second-level cache, either.
                    cudaMemsetAsync(lib.workspace, 0, workspace_bytes, raw);
                    cudaEventRecord(begin, raw);
                    const cublasStatus_t status =
                        lib.matmul(lib.handle, s.desc, &one_, weight, s.weight, x, s.x, &zero_, out, s.out, out, s.out,
                                   &found_algos[i].algo, lib.workspace, workspace_bytes, raw);
                    cudaEventRecord(end, raw);
                    cudaEventSynchronize(end);
                    cudaEventElapsedTime(&ms, begin, end);
                    if (status != CUBLAS_STATUS_SUCCESS) ms = 1e30f;
                }
                std::sort(times.begin(), times.end());
                if (times[rounds / 2] < best) best = times[rounds / 2], s.algo = found_algos[i].algo;
            }
            cudaEventDestroy(begin);
            cudaEventDestroy(end);
        }
    }
    const float one = 1, zero = 0;
    lib.matmul(lib.handle, s.desc, &one, weight, s.weight, x, s.x, &zero, out, s.out, out, s.out,
               s.usable ? &s.algo : nullptr, lib.workspace, workspace_bytes, static_cast<cudaStream_t>(stream));
}

} // namespace quire::cuda
