// Sums over the ranks, in one shot and in two, and gathering; see ranks.h. x of each rank [rows × cols] → the sum on every rank.
// One shot is limited by latency: a write over NVLink and a poll of local memory. Two shots are limited by the links: each rank reads
// and writes (n - 1) / n of the message.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "../epilogue.cuh"
#include "../warp.cuh"
#include "nccl.cuh"
#include "rank.cuh"

namespace quire::cuda {

namespace {

// The largest fp16 in place of an infinity that a library made of a larger value.
__device__ float finite_half(unsigned short bits) {
    const float v = __half2float(__ushort_as_half(bits));
    return v > 65504.0f ? 65504.0f : v < -65504.0f ? -65504.0f : v; // NaN stays NaN
}

// A packet's two words as values: two of float32, or four of fp16.
template <bool Float>
struct Packet {
    static constexpr int n = Float ? 2 : 4;
    float                v[n];
    __device__ explicit Packet(uint2 words) {
        if constexpr (Float) {
            v[0] = __uint_as_float(words.x), v[1] = __uint_as_float(words.y);
        } else {
            v[0] = finite_half(words.x & 0xffff), v[1] = finite_half(words.x >> 16);
            v[2] = finite_half(words.y & 0xffff), v[3] = finite_half(words.y >> 16);
        }
    }
};

// One shot. A CTA sends its row to all ranks, and adds up this row of all ranks. At most 4 packets a thread.
template <bool Float, int N>
__global__ void __launch_bounds__(1024)
    one_shot_kernel(const void* x, void* out, bool out_is_float, int cols, RankView rank) {
    constexpr int per = Packet<Float>::n, most = 4;
    wait_for_inputs();
    const unsigned     number  = next_message(rank, one_shots);
    const int          packets = cols / per;
    const std::int64_t row = blockIdx.x, at = row * packets;
    const auto*        mine = static_cast<const uint2*>(x) + at;
    const std::int64_t turn = std::int64_t(number & 1) * rank.n;
    uint2              own[most];
#pragma unroll
    for (int i = 0; i < most; i++) {
        const int c = int(threadIdx.x + i * blockDim.x);
        if (c >= packets) continue;
        own[i] = mine[c];
#pragma unroll
        for (int p = 0; p < N; p++)
            if (p != rank.index)
                send_packet(rank.inbox_of[p] + (turn + rank.index) * rank.room + at + c, own[i].x, own[i].y, number);
    }
#pragma unroll
    for (int i = 0; i < most; i++) {
        const int c = int(threadIdx.x + i * blockDim.x);
        if (c >= packets) continue;
        float all[per][N];
#pragma unroll
        for (int p = 0; p < N; p++) {
            const uint2 words =
                p == rank.index
                    ? own[i]
                    : receive_packet(rank, rank.inbox_of[rank.index] + (turn + p) * rank.room + at + c, number);
            const Packet<Float> packet(words);
#pragma unroll
            for (int k = 0; k < per; k++) all[k][p] = packet.v[k];
        }
#pragma unroll
        for (int k = 0; k < per; k++) {
            const float        total = tree_sum<N>(all[k]);
            const std::int64_t e     = row * cols + c * per + k;
            if (out_is_float) static_cast<float*>(out)[e] = total;
            else static_cast<__half*>(out)[e] = to_finite(total);
        }
    }
    count_message(rank, one_shots);
}

// Two shots: rank r adds up piece r of all ranks' x, and writes the sum to all ranks' `out`. Vectors of 4 elements, then single elements.
template <bool Float, bool OutFloat, int N>
__global__ void __launch_bounds__(512) two_shot_kernel(RankArrays x, RankArrays out, std::int64_t n, RankView rank) {
    wait_for_inputs();
    const unsigned number = next_message(rank, two_shots);
    barrier(rank, 0, number);
    const std::int64_t vectors = n / 4, piece = (vectors + N - 1) / N, first = piece * rank.index,
                       last = min(vectors, first + piece);
    for (std::int64_t i = first + blockIdx.x * blockDim.x + threadIdx.x; i < last; i += gridDim.x * blockDim.x) {
        float all[4][N];
#pragma unroll
        for (int p = 0; p < N; p++) {
            if constexpr (Float) {
                const float4 v = static_cast<const float4*>(x.of[p])[i];
                all[0][p] = v.x, all[1][p] = v.y, all[2][p] = v.z, all[3][p] = v.w;
            } else {
                const Packet<false> v(static_cast<const uint2*>(x.of[p])[i]);
#pragma unroll
                for (int k = 0; k < 4; k++) all[k][p] = v.v[k];
            }
        }
        const float4 sum{tree_sum<N>(all[0]), tree_sum<N>(all[1]), tree_sum<N>(all[2]), tree_sum<N>(all[3])};
#pragma unroll
        for (int p = 0; p < N; p++) {
            if constexpr (OutFloat) static_cast<float4*>(out.of[p])[i] = sum;
            else static_cast<uint2*>(out.of[p])[i] = {pack_finite(sum.x, sum.y), pack_finite(sum.z, sum.w)};
        }
    }
    if (rank.index == 0 && blockIdx.x == 0 && threadIdx.x < n % 4) {
        const std::int64_t i = vectors * 4 + threadIdx.x;
        float              all[N];
#pragma unroll
        for (int p = 0; p < N; p++)
            all[p] = Float ? static_cast<const float*>(x.of[p])[i]
                           : finite_half(static_cast<const unsigned short*>(x.of[p])[i]);
        const float sum = tree_sum<N>(all);
#pragma unroll
        for (int p = 0; p < N; p++) {
            if (OutFloat) static_cast<float*>(out.of[p])[i] = sum;
            else static_cast<__half*>(out.of[p])[i] = to_finite(sum);
        }
    }
    barrier(rank, 1, number);
    count_message(rank, two_shots);
}

// Each rank copies its columns into the rows of all ranks. T: as wide as the columns allow.
template <class T>
__global__ void __launch_bounds__(512)
    gather_kernel(const T* x, std::int64_t cols, RankArrays out, std::int64_t out_cols, std::int64_t first,
                  std::int64_t rows, RankView rank) {
    wait_for_inputs();
    const unsigned number = next_message(rank, two_shots);
    barrier(rank, 0, number); // no rank reads the `out` of the step before any more
    for (std::int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < rows * cols; i += gridDim.x * blockDim.x) {
        const T            value = x[i];
        const std::int64_t at    = i / cols * out_cols + first + i % cols;
        for (int p = 0; p < rank.n; p++) static_cast<T*>(out.of[p])[at] = value;
    }
    barrier(rank, 1, number);
    count_message(rank, two_shots);
}

// The values that NCCL has gathered, n of each rank, one rank after the other → their sums, with one_shot_kernel's bits.
template <bool Float, bool OutFloat, int N>
__global__ void sum_gathered_kernel(const void* all, void* out, std::int64_t n) {
    wait_for_inputs();
    const std::int64_t i = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float v[N];
#pragma unroll
    for (int p = 0; p < N; p++)
        v[p] = Float ? static_cast<const float*>(all)[p * n + i]
                     : finite_half(static_cast<const unsigned short*>(all)[p * n + i]);
    const float sum = tree_sum<N>(v);
    if (OutFloat) static_cast<float*>(out)[i] = sum;
    else static_cast<__half*>(out)[i] = to_finite(sum);
}

// x [rows × cols] → columns first .. of out.
template <class T>
__global__ void put_kernel(const T* x, std::int64_t cols, T* out, std::int64_t out_cols, std::int64_t first,
                           std::int64_t n) {
    wait_for_inputs();
    const std::int64_t i = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) out[i / cols * out_cols + first + i % cols] = x[i];
}

template <class T>
__global__ void take_kernel(const T* x, std::int64_t x_cols, std::int64_t first, T* out, std::int64_t cols,
                            std::int64_t n) {
    wait_for_inputs();
    const std::int64_t i = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i / cols * x_cols + first + i % cols];
}

// The tree of sums over n <= 2^Levels parts, some of which are null. A template, since a recursion needs a stack of unknown size.
template <int Levels>
__device__ bool sum_some(const Parts& parts, int first, int n, std::int64_t i, float& sum) {
    if (n == 1) {
        const void* x = parts.of[first];
        if (x == nullptr) return false;
        sum = parts.is_float ? static_cast<const float*>(x)[i] : finite_half(static_cast<const unsigned short*>(x)[i]);
        return true;
    }
    if constexpr (Levels > 0) {
        const int  half = (n + 1) / 2;
        float      other;
        const bool left = sum_some<Levels - 1>(parts, first, half, i, sum);
        if (!sum_some<Levels - 1>(parts, first + half, n - half, i, other)) return left;
        sum = left ? sum + other : other;
        return true;
    }
    return false;
}

template <bool OutFloat>
__global__ void sum_parts_kernel(Parts parts, void* out, std::int64_t n) {
    wait_for_inputs();
    const std::int64_t i = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float sum = 0;
    static_assert(max_parts <= 8);
    sum_some<3>(parts, 0, parts.n, i, sum);
    if (OutFloat) static_cast<float*>(out)[i] = sum;
    else static_cast<__half*>(out)[i] = to_finite(sum);
}

__global__ void embed_part_kernel(Weight weight, int first, Weight positions, bool has_positions, float scale,
                                  int offset, Plan plan, float* out) {
    wait_for_inputs();
    const std::int64_t t = blockIdx.x, token = plan.tokens[t] - first;
    const bool         mine = token >= 0 && token < weight.rows;
    for (std::int64_t c = threadIdx.x; c < weight.cols; c += blockDim.x) {
        float v = 0;
        if (mine) {
            v = weight_at(weight, token, c) * scale;
            if (has_positions) v += weight_at(positions, plan.positions[t] + offset, c);
        }
        out[t * weight.cols + c] = v;
    }
}

unsigned ctas_for(std::int64_t n, int threads) { return unsigned((n + threads - 1) / threads); }

// f(a constant for n): the kernels are compiled for the usual numbers of GPUs.
template <class F>
bool with_ranks(int n, const F& f) {
    switch (n) {
        case 2: f(std::integral_constant<int, 2>()); return true;
        case 3: f(std::integral_constant<int, 3>()); return true;
        case 4: f(std::integral_constant<int, 4>()); return true;
        case 5: f(std::integral_constant<int, 5>()); return true;
        case 6: f(std::integral_constant<int, 6>()); return true;
        case 7: f(std::integral_constant<int, 7>()); return true;
        case 8: f(std::integral_constant<int, 8>()); return true;
        case 10: f(std::integral_constant<int, 10>()); return true;
        case 12: f(std::integral_constant<int, 12>()); return true;
        case 16: f(std::integral_constant<int, 16>()); return true;
        default: return false;
    }
}

bool one_shot(const AllReduce& args, std::int64_t rows, std::int64_t cols, Rank& rank, Context& gpu) {
    const int          per     = args.x_is_float ? 2 : 4;
    const std::int64_t packets = cols / per;
    if (cols % per != 0 || packets > 4096 || rows * packets > rank.view.room || rows > rank.most_rows) return false;
    const auto threads = unsigned(std::clamp<std::int64_t>((packets + 31) / 32 * 32, 64, 1024));
    const int  me      = rank.view.index;
    return with_ranks(rank.view.n, [&](auto n) {
        run_kernel(args.x_is_float ? one_shot_kernel<true, n.value> : one_shot_kernel<false, n.value>,
                   dim3(unsigned(rows)), threads, 0, gpu, static_cast<const void*>(args.x.of[me]), args.out.of[me],
                   args.out_is_float, int(cols), rank.view);
    });
}

} // namespace

bool can_reduce(int n) {
    return with_ranks(n, [](auto) {});
}

namespace {

void sum_over_processes(const AllReduce& args, std::int64_t n, Rank& rank, Context& gpu) {
    if (!args.exact && nccl_all_reduce(args, n, rank, gpu)) return;
    const int         me = rank.view.index, size = args.x_is_float ? 4 : 2, out_size = args.out_is_float ? 4 : 2;
    const auto        most = std::int64_t(piece_bytes(rank)) / size;
    const auto* const x    = static_cast<const char*>(args.x.of[me]);
    auto* const       out  = static_cast<char*>(args.out.of[me]);
    for (std::int64_t first = 0; first < n; first += most) {
        const std::int64_t count = std::min(most, n - first);
        const void* const  all   = gather_pieces(x + first * size, std::size_t(count * size), rank, gpu);
        with_ranks(rank.view.n, [&](auto n_ranks) {
            const auto kernel = args.x_is_float ? (args.out_is_float ? sum_gathered_kernel<true, true, n_ranks.value>
                                                                     : sum_gathered_kernel<true, false, n_ranks.value>)
                                : args.out_is_float ? sum_gathered_kernel<false, true, n_ranks.value>
                                                    : sum_gathered_kernel<false, false, n_ranks.value>;
            run_kernel(kernel, dim3(ctas_for(count, 256)), 256, 0, gpu, all, static_cast<void*>(out + first * out_size),
                       count);
        });
    }
}

template <class T>
void gather_over_processes(const void* x, const RankColumns& columns, T* out, std::int64_t out_cols, std::int64_t rows,
                           Rank& rank, Context& gpu) {
    const int          n = rank.view.n, me = rank.view.index;
    const std::int64_t widest = *std::max_element(columns.n, columns.n + n);
    const auto         most   = std::int64_t(piece_bytes(rank) / (std::size_t(widest) * sizeof(T))); // rows
    if (most == 0) return gpu.note(cudaErrorInvalidValue);
    for (std::int64_t first = 0; first < rows; first += most) {
        const std::int64_t count = std::min(most, rows - first);
        std::size_t        bytes[max_ranks];
        for (int p = 0; p < n; p++) bytes[p] = std::size_t(count * columns.n[p]) * sizeof(T);
        const auto* const all =
            static_cast<const char*>(gather_pieces(static_cast<const T*>(x) + first * columns.n[me], bytes, rank, gpu));
        for (int p = 0; p < n; p++)
            if (columns.n[p] > 0)
                run_kernel(put_kernel<T>, dim3(ctas_for(count * columns.n[p], 256)), 256, 0, gpu,
                           reinterpret_cast<const T*>(all + std::size_t(p) * piece_bytes(rank)), columns.n[p],
                           out + first * out_cols, out_cols, columns.first[p], count * columns.n[p]);
    }
}

} // namespace

void all_reduce(const AllReduce& args, std::int64_t rows, std::int64_t cols, Rank& rank, Context& gpu) {
    if (piece_bytes(rank) > 0) return sum_over_processes(args, rows * cols, rank, gpu);
    if (one_shot(args, rows, cols, rank, gpu)) return;
    if (!args.exact && nccl_all_reduce(args, rows * cols, rank, gpu)) return;
    with_ranks(rank.view.n, [&](auto n) {
        const auto kernel =
            args.x_is_float
                ? (args.out_is_float ? two_shot_kernel<true, true, n.value> : two_shot_kernel<true, false, n.value>)
            : args.out_is_float ? two_shot_kernel<false, true, n.value>
                                : two_shot_kernel<false, false, n.value>;
        run_kernel(kernel, dim3(unsigned(rank.view.ctas)), 512, 0, gpu, args.x, args.out, rows * cols, rank.view);
    });
}

void all_gather(const void* x, const RankColumns& columns, const RankArrays& out, std::int64_t out_cols,
                std::int64_t rows, int element, Rank& rank, Context& gpu) {
    const int          me   = rank.view.index;
    const std::int64_t cols = columns.n[me], first = columns.first[me];
    if (piece_bytes(rank) > 0) {
        if (element == 4)
            gather_over_processes(x, columns, static_cast<std::uint32_t*>(out.of[me]), out_cols, rows, rank, gpu);
        else gather_over_processes(x, columns, static_cast<std::uint16_t*>(out.of[me]), out_cols, rows, rank, gpu);
        return;
    }
    if (element == 4)
        run_kernel(gather_kernel<std::uint32_t>, dim3(unsigned(rank.view.ctas)), 512, 0, gpu,
                   static_cast<const std::uint32_t*>(x), cols, out, out_cols, first, rows, rank.view);
    else
        run_kernel(gather_kernel<std::uint16_t>, dim3(unsigned(rank.view.ctas)), 512, 0, gpu,
                   static_cast<const std::uint16_t*>(x), cols, out, out_cols, first, rows, rank.view);
}

void take_columns(const void* x, std::int64_t x_cols, std::int64_t first, void* out, std::int64_t cols,
                  std::int64_t rows, int element, Context& gpu) {
    const std::int64_t n = rows * cols;
    if (element == 4)
        run_kernel(take_kernel<std::uint32_t>, dim3(ctas_for(n, 256)), 256, 0, gpu,
                   static_cast<const std::uint32_t*>(x), x_cols, first, static_cast<std::uint32_t*>(out), cols, n);
    else
        run_kernel(take_kernel<std::uint16_t>, dim3(ctas_for(n, 256)), 256, 0, gpu,
                   static_cast<const std::uint16_t*>(x), x_cols, first, static_cast<std::uint16_t*>(out), cols, n);
}

void sum_parts(const Parts& parts, void* out, bool out_is_float, std::int64_t n, Context& gpu) {
    run_kernel(out_is_float ? sum_parts_kernel<true> : sum_parts_kernel<false>, dim3(ctas_for(n, 256)), 256, 0, gpu,
               parts, out, n);
}

void embed_part(const Weight& weight, std::int32_t first, const Weight* positions, float scale, int offset,
                const Plan& plan, float* out, std::int64_t n_tokens, Context& gpu) {
    run_kernel(embed_part_kernel, dim3(unsigned(n_tokens)), 256, 0, gpu, weight, first, positions ? *positions : weight,
               positions != nullptr, scale, offset, plan, out);
}

} // namespace quire::cuda
