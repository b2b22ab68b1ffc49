// The input x of the decode megakernel's GEMVs, in shared memory: an earlier result, or the RMS norm of the residual; as fp16,
// or quantised to int16 for weights of int8 and Q4_K.
#pragma once

#include "../gemm/gemv_tma.cuh"
#include "../warp.cuh"
#include "megakernel_exchange.cuh"
#include "megakernel_pipeline.cuh"

namespace quire::cuda::megakernel {

#if __CUDA_ARCH__ >= 900

namespace {

// int16-quantised x, a scale for the columns of each task (of a lane). Word k (eight values) of all tasks comes before word k +
// 1 of any, so that neighbouring lanes read neighbouring words.

struct QuantisedX {
    uint4* words;
    float* scale; // [tasks]
    int*   total; // [cols / 32]: Σ of 32 neighbours
    int    tasks;

    __device__ QuantisedX(unsigned char* memory, Kind kind, int cols) : tasks(cols / task_cols(kind)) {
        words = reinterpret_cast<uint4*>(memory);
        scale = reinterpret_cast<float*>(memory + 2 * cols);
        total = reinterpret_cast<int*>(scale + tasks);
    }
};

// Stores values 8·g .. 8·g + 7 of x; by whole warps with neighbouring g.
template <Kind K>
__device__ void store_x(int g, const float (&f)[8], unsigned char* xs, int cols) {
    if constexpr (K == kind_f16) {
        std::uint32_t h[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const __half2 pair = __floats2half2_rn(f[2 * k], f[2 * k + 1]);
            h[k]               = *reinterpret_cast<const std::uint32_t*>(&pair);
        }
        reinterpret_cast<uint4*>(xs)[g] = make_uint4(h[0], h[1], h[2], h[3]);
    } else {
        constexpr int    lanes = task_cols(K) / 8; // that share a scale
        const QuantisedX to(xs, K, cols);
        float            most = 0;
#pragma unroll
        for (int k = 0; k < 8; k++) most = max_or_nan(most, fabsf(f[k]));
#pragma unroll
        for (int step = 1; step < lanes; step *= 2) most = max_or_nan(most, __shfl_xor_sync(~0u, most, step));
        const float inverse = most > 0 ? __fdividef(32767.0f, most) : 0.0f;
        // Rounds by adding a number so large that the fraction is lost: the integer is in the low 16 bits.
        constexpr float large = 12582912.0f; // 1.5 * 2^23
        std::uint32_t   n[8], bits = 0;
#pragma unroll
        for (int k = 0; k < 8; k++) {
            n[k] = __float_as_uint(fmaf(f[k], inverse, large));
            bits += n[k];
        }
        int sum = int(bits - 8u * 0x4b400000u);
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const int task = g / lanes;
        to.words[g % lanes * to.tasks + task] =
            make_uint4(__byte_perm(n[0], n[1], 0x5410), __byte_perm(n[2], n[3], 0x5410),
                       __byte_perm(n[4], n[5], 0x5410), __byte_perm(n[6], n[7], 0x5410));
        if (g % lanes == 0) to.scale[task] = most * (1 / 32767.0f);
        if (g % 4 == 0) to.total[g / 4] = sum;
    }
}

// -- where x comes from

// The result of an earlier instruction.
template <Kind K, class Wait>
__device__ void load_x(const Instruction& op, unsigned char* xs, const Wait& wait) {
    wait();
    const auto* x = reinterpret_cast<const uint4*>(op.x);
    for_each_word<Team>([&](int g) { return load_relaxed(x + g); }, op.cols / 8,
                        [&](int g, const uint4& read) {
                            const uint4  v = poll(read, x + g);
                            const float2 a = as_float2(v.x), b = as_float2(v.y), c = as_float2(v.z), d = as_float2(v.w);
                            const float  f[8] = {a.x, a.y, b.x, b.y, c.x, c.y, d.x, d.y};
                            store_x<K>(g, f, xs, op.cols);
                        });
}

// The RMS norm of the residual, after the latest result was added: every CTA does this for itself. Quantised x is made before
// the sum of squares is known: the sums of the warps go to `squares`, and the GEMV's results are scaled instead.
template <Kind K, class Wait>
__device__ void norm_of_residual(const Instruction& op, int hidden, float4* residual, unsigned char* xs, float* squares,
                                 const Wait& wait) {
    constexpr int most = (max_hidden / 8 + Team::size() - 1) / Team::size(); // words of eight that a thread has
    float4        f[most][2], by[most][2];
#pragma unroll
    for (int n = 0; n < most; n++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int  g    = int(threadIdx.x) + n * Team::size();
            const bool used = g < hidden / 8;
            by[n][h]        = used ? reinterpret_cast<const float4*>(op.norm)[2 * g + h] : float4{};
            f[n][h]         = used ? residual[2 * g + h] : float4{};
        }
    wait();
    if (op.add) {
        uint4 more[most];
#pragma unroll
        for (int n = 0; n < most; n++) {
            const int g = int(threadIdx.x) + n * Team::size();
            more[n]     = g < hidden / 8 ? load_relaxed(reinterpret_cast<const uint4*>(op.add) + g) : uint4{};
        }
#pragma unroll
        for (int n = 0; n < most; n++) {
            if (const int g = int(threadIdx.x) + n * Team::size(); g < hidden / 8)
                more[n] = poll(more[n], reinterpret_cast<const uint4*>(op.add) + g);
            const float2 a = as_float2(more[n].x), b = as_float2(more[n].y), c = as_float2(more[n].z),
                         d = as_float2(more[n].w);
            f[n][0].x += a.x, f[n][0].y += a.y, f[n][0].z += b.x, f[n][0].w += b.y;
            f[n][1].x += c.x, f[n][1].y += c.y, f[n][1].z += d.x, f[n][1].w += d.y;
        }
    }
    const auto put = [&](int g, const float4& a, const float4& b, const float4& p, const float4& q, float scale) {
        const float v[8] = {a.x * p.x * scale, a.y * p.y * scale, a.z * p.z * scale, a.w * p.w * scale,
                            b.x * q.x * scale, b.y * q.y * scale, b.z * q.z * scale, b.w * q.w * scale};
        store_x<K>(g, v, xs, op.cols);
    };
    float sum = 0;
#pragma unroll
    for (int n = 0; n < most; n++)
        if (const int g = int(threadIdx.x) + n * Team::size(); g < hidden / 8) {
            const float4 a = f[n][0], b = f[n][1];
            if constexpr (K != kind_f16) put(g, a, b, by[n][0], by[n][1], 1);
            sum += a.x * a.x + a.y * a.y + a.z * a.z + a.w * a.w + b.x * b.x + b.y * b.y + b.z * b.z + b.w * b.w;
            residual[2 * g] = a, residual[2 * g + 1] = b;
            if (op.residual && blockIdx.x == 0) {
                reinterpret_cast<float4*>(op.residual)[2 * g]     = a;
                reinterpret_cast<float4*>(op.residual)[2 * g + 1] = b;
            }
            if (op.columns && blockIdx.x == 0) {
                const auto pair = [](float low, float high) {
                    return __half_as_ushort(to_finite(low)) | std::uint32_t(__half_as_ushort(to_finite(high))) << 16;
                };
                reinterpret_cast<uint4*>(op.columns)[g] =
                    make_uint4(pair(a.x, a.y), pair(a.z, a.w), pair(b.x, b.y), pair(b.z, b.w));
            }
        }
    if constexpr (K != kind_f16) {
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = sum;
    } else {
        const float scale = rsqrtf(__fdividef(cta_sum<Team>(sum, squares), float(hidden)) + op.eps);
#pragma unroll
        for (int n = 0; n < most; n++)
            if (const int g = int(threadIdx.x) + n * Team::size(); g < hidden / 8)
                put(g, f[n][0], f[n][1], by[n][0], by[n][1], scale);
    }
}

template <Kind K, class Wait>
__device__ void make_x(const Instruction& op, int hidden, float* residual, unsigned char* xs, float* squares,
                       const Wait& wait) {
    if (op.norm) norm_of_residual<K>(op, hidden, reinterpret_cast<float4*>(residual), xs, squares, wait);
    else load_x<K>(op, xs, wait);
    Team::sync();
}

} // namespace

#endif

} // namespace quire::cuda::megakernel
