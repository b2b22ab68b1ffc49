// Decode attention over shared positions: the kernel where that of the sequences' own positions does not do it on the way (shared.cuh), and
// the one that adds up the results of both.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "shared.cuh"

namespace quire::cuda {

namespace {

template <int D, bool Coded>
__global__ void __launch_bounds__(SharedAttention<D>::warps * 32)
    shared_kernel(Attention a, Plan plan, float* partial) {
    reads_early(); // the plan, and K and V of readable positions; attend_shared() calls wait_for_inputs()
    extern __shared__ __align__(16) __half memory[];
    attend_shared<D, Coded>(a, plan, int(blockIdx.x), int(blockIdx.y), memory, partial);
}

// Adds up the splits of a query, for some heads. A thread has two numbers of a head.
constexpr int combine_threads = 128;

template <int D>
__global__ void __launch_bounds__(combine_threads)
    combine_kernel(Attention a, SharedTiles shared, const float* partial) {
    wait_for_inputs();
    const SharedQuery query = shared.queries[blockIdx.x];
    const int at = int(blockIdx.y) * combine_threads + int(threadIdx.x), head = at / (D / 2), d = at % (D / 2) * 2;
    if (query.n_splits < 2 || head >= a.n_heads) return;
    const std::int64_t apart   = std::int64_t(a.n_heads) * (D + 2);
    const float*       from    = partial + query.result * apart + head * (D + 2);
    const float        sink    = sink_of(a, head);
    float              new_max = sink;
#pragma unroll 8
    for (int c = 0; c < query.n_splits; c++) new_max = fmaxf(new_max, from[c * apart + D]);
    float  total = rescale_of(sink, new_max);
    float2 value{};
#pragma unroll 8
    for (int c = 0; c < query.n_splits; c++) {
        const float2 v     = *reinterpret_cast<const float2*>(from + c * apart + d),
                     sums  = *reinterpret_cast<const float2*>(from + c * apart + D); // row max, row sum
        const float weight = rescale_of(sums.x, new_max);
        total += weight * sums.y;
        value.x += weight * v.x, value.y += weight * v.y;
    }
    const float by = total == 0 ? 0.0f : __fdividef(1, total);
    *reinterpret_cast<std::uint32_t*>(reinterpret_cast<__half*>(a.out) +
                                      (std::int64_t(query.row) * a.n_heads + head) * D + d) =
        pack(value.x * by, value.y * by);
}

// Calls run(head_dim as a type), where the kernels know it.
template <class Run>
void with_head_dim(int head_dim, const Run& run) {
    switch (head_dim) {
        case 64: return run(std::integral_constant<int, 64>{});
        case 80: return run(std::integral_constant<int, 80>{});
        case 96: return run(std::integral_constant<int, 96>{});
        case 128: return run(std::integral_constant<int, 128>{});
        case 192: return run(std::integral_constant<int, 192>{});
        case 256: return run(std::integral_constant<int, 256>{});
        default: return; // shared_tile_rows() is 0 for it
    }
}

} // namespace

int shared_tile_rows(int head_dim, int value_dim) {
    const bool has =
        head_dim == 64 || head_dim == 80 || head_dim == 96 || head_dim == 128 || head_dim == 192 || head_dim == 256;
    return has && value_dim == head_dim ? 64 : 0;
}

// Two CTAs for each SM. A split has some positions at least, because its result, a float32 for each number, is written and read again.
int shared_split_length(const Context& gpu, std::int64_t work) {
    constexpr std::int64_t least = 256, unit = 64;
    return int((std::max(work / (2 * gpu.n_sms), least) + unit - 1) / unit * unit);
}

void attend_shared(const Attention& a, const Plan& plan, float* partial, Context& gpu) {
    with_head_dim(a.head_dim, [&]<int D>(std::integral_constant<int, D>) {
        constexpr int bytes = SharedAttention<D>::bytes, threads = SharedAttention<D>::warps * 32;
        const auto    run = [&](auto kernel) {
            prepare_kernel(gpu, kernel, threads, bytes);
            run_kernel(kernel, dim3(unsigned(plan.items.shared.n), unsigned(a.n_kv_heads)), threads, bytes, gpu, a,
                          plan, partial);
        };
        if (a.coded) run(shared_kernel<D, true>);
        else run(shared_kernel<D, false>);
    });
}

void combine_splits(const Attention& a, const Plan& plan, const float* partial, Context& gpu) {
    with_head_dim(a.head_dim, [&]<int D>(std::integral_constant<int, D>) {
        const unsigned parts = unsigned((a.n_heads * (D / 2) + combine_threads - 1) / combine_threads);
        run_kernel(combine_kernel<D>, dim3(unsigned(plan.items.shared.n_queries), parts), combine_threads, 0, gpu, a,
                   plan.items.shared, partial);
    });
}

} // namespace quire::cuda
