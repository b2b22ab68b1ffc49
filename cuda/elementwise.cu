// Embedding, norms, activations, rotation and store, block copies: all bound by the bytes they move.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "kernels.h"
#include "warp.cuh"

namespace quire::cuda {

namespace {

cudaStream_t raw(Stream stream) { return static_cast<cudaStream_t>(stream); }
int          blocks_for(std::int64_t n, int threads) { return int((n + threads - 1) / threads); }

// -- embedding: one block for each token

__device__ float weight_at(const Weight& w, std::int64_t row, std::int64_t col) {
    switch (w.form) {
        case WeightForm::f16: return __half2float(static_cast<const __half*>(w.data)[row * w.cols + col]);
        case WeightForm::f32: return static_cast<const float*>(w.data)[row * w.cols + col];
        case WeightForm::i8: {
            const std::int64_t at = row * w.cols + col, g = at / w.group;
            const float        scale = w.float_scales ? static_cast<const float*>(w.scales)[g]
                                                      : __half2float(static_cast<const __half*>(w.scales)[g]);
            const float        min   = w.mins ? static_cast<const float*>(w.mins)[g] : 0.0f;
            return scale * static_cast<const std::int8_t*>(w.data)[at] - min;
        }
        case WeightForm::q4_k:
            return q4_k_at(static_cast<const unsigned char*>(w.data) + row * (w.cols / 256) * 144, int(col));
    }
    return 0;
}

__global__ void embed_kernel(Weight weight, Weight positions, bool has_positions, Plan plan, float* out) {
    wait_for_inputs();
    const std::int64_t t = blockIdx.x, token = plan.tokens[t];
    for (std::int64_t c = threadIdx.x; c < weight.cols; c += blockDim.x) {
        float v = weight_at(weight, token, c);
        if (has_positions) v += weight_at(positions, plan.positions[t], c);
        out[t * weight.cols + c] = v;
    }
}

// -- norms: one block for each row

// Two neighbours a thread; cols is even.
template <bool Float, bool Layer>
__global__ void norm_kernel(const void* x, const float* weight, const float* bias, float eps, float* residual,
                            __half* out, int cols) {
    wait_for_inputs();
    extern __shared__ float2 row[];
    __shared__ float         sums[32];
    const std::int64_t       at  = std::int64_t(blockIdx.x) * cols / 2;
    const int                n   = cols / 2;
    float                    sum = 0, squares = 0;
    for (int c = threadIdx.x; c < n; c += blockDim.x) {
        float2 v =
            Float ? static_cast<const float2*>(x)[at + c] : __half22float2(static_cast<const __half2*>(x)[at + c]);
        if (residual) {
            const float2 r = reinterpret_cast<const float2*>(residual)[at + c];
            v.x += r.x, v.y += r.y;
            reinterpret_cast<float2*>(residual)[at + c] = v;
        }
        row[c] = v;
        sum += v.x + v.y;
        squares += v.x * v.x + v.y * v.y;
    }
    float mean = 0;
    if (Layer) {
        mean    = block_sum(sum, sums) / cols;
        squares = 0;
        for (int c = threadIdx.x; c < n; c += blockDim.x) {
            const float2 v = row[c];
            squares += (v.x - mean) * (v.x - mean) + (v.y - mean) * (v.y - mean);
        }
    }
    const float scale = rsqrtf(block_sum(squares, sums) / cols + eps);
    for (int c = threadIdx.x; c < n; c += blockDim.x) {
        const float2 v = row[c], w = reinterpret_cast<const float2*>(weight)[c],
                     b = Layer ? reinterpret_cast<const float2*>(bias)[c] : float2{0, 0};
        reinterpret_cast<__half2*>(out)[at + c] =
            __floats2half2_rn((v.x - mean) * scale * w.x + b.x, (v.y - mean) * scale * w.y + b.y);
    }
}

// -- activations

__global__ void silu_mul_kernel(__half2* gate, const __half2* up, std::int64_t n) {
    wait_for_inputs();
    const std::int64_t i = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float2 g = __half22float2(gate[i]), u = __half22float2(up[i]);
    gate[i] = __floats2half2_rn(g.x / (1 + __expf(-g.x)) * u.x, g.y / (1 + __expf(-g.y)) * u.y);
}

__global__ void gelu_kernel(__half* x, std::int64_t n) {
    wait_for_inputs();
    const std::int64_t i = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float v = __half2float(x[i]);
    x[i]          = __float2half(0.5f * v * (1 + tanhf(0.7978845608028654f * (v + 0.044715f * v * v * v))));
}

__global__ void add_kernel(float* x, const __half* y, std::int64_t n) {
    wait_for_inputs();
    const std::int64_t i = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) x[i] += __half2float(y[i]);
}

__global__ void add_bias_kernel(__half* x, const float* bias, std::int64_t n, int cols) {
    wait_for_inputs();
    const std::int64_t i = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) x[i] = __float2half(__half2float(x[i]) + bias[i % cols]);
}

__global__ void select_rows_kernel(const float* x, const std::int32_t* rows, float* out, int cols) {
    wait_for_inputs();
    const std::int64_t from = std::int64_t(rows[blockIdx.x]) * cols, to = std::int64_t(blockIdx.x) * cols;
    for (int c = threadIdx.x; c < cols; c += blockDim.x) out[to + c] = x[from + c];
}

// -- rotation and store: a block for each token and four heads, of q, k and v; a warp for each head, a lane for each pair

constexpr int rope_heads = 4;

__global__ void rope_store_kernel(RopeStore a, Plan plan) {
    wait_for_inputs();
    const std::int64_t t = blockIdx.x;
    const int          D = a.head_dim, slot = plan.slots[t], lane = threadIdx.x % 32;
    const int          head = int(blockIdx.y) * rope_heads + int(threadIdx.x) / 32; // q's, then k's, then v's
    const int          kv   = head - a.n_heads;
    if (kv >= 2 * a.n_kv_heads || (kv >= 0 && slot < 0)) return;
    // Head h of the block that holds this slot begins there.
    const auto place = [&](void* cache, int h) {
        return static_cast<__half*>(cache) +
               ((std::int64_t(slot / a.block_size) * a.n_kv_heads + h) * a.block_size + slot % a.block_size) * D;
    };
    if (kv >= a.n_kv_heads) {
        const int   h    = kv - a.n_kv_heads;
        const auto* from = reinterpret_cast<const __half*>(a.v) + (t * a.n_kv_heads + h) * D;
        for (int d = lane; d < D; d += 32) place(a.cache_v, h)[d] = from[d];
        return;
    }
    const __half* from = kv < 0 ? reinterpret_cast<const __half*>(a.q) + (t * a.n_heads + head) * D
                                : reinterpret_cast<const __half*>(a.k) + (t * a.n_kv_heads + kv) * D;
    __half*       to   = kv < 0 ? reinterpret_cast<__half*>(a.q) + (t * a.n_heads + head) * D : place(a.cache_k, kv);
    const float   position = float(plan.positions[t]);
    for (int pair = lane; pair < a.half; pair += 32) {
        float sine, cosine;
        sincosf(position * a.inv_freq[pair], &sine, &cosine);
        sine *= a.scale;
        cosine *= a.scale;
        const int   first = a.halves ? pair : 2 * pair, second = a.halves ? pair + a.half : first + 1;
        const float x = __half2float(from[first]), y = __half2float(from[second]);
        to[first]  = __float2half(x * cosine - y * sine);
        to[second] = __float2half(x * sine + y * cosine);
    }
    if (kv >= 0) // what is not rotated
        for (int d = 2 * a.half + lane; d < D; d += 32) to[d] = from[d];
}

// -- block copies: every pair in every array, 16 bytes a thread

__global__ void copy_blocks_kernel(BlockPools pools, const std::int32_t* pairs) {
    const int   array = blockIdx.y, copy = blockIdx.x;
    const auto* from = static_cast<const char*>(pools.from[array]) + pairs[2 * copy] * pools.block_bytes;
    auto*       to   = static_cast<char*>(pools.to[array]) + pairs[2 * copy + 1] * pools.block_bytes;
    for (std::size_t i = threadIdx.x * 16; i < pools.block_bytes; i += blockDim.x * 16)
        *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from + i);
}

// -- argmax: one block for each row

__global__ void argmax_kernel(const float* logits, std::int32_t* out, std::int64_t cols) {
    wait_for_inputs();
    const float* row  = logits + blockIdx.x * cols;
    float        best = -INFINITY;
    int          at   = 0x7fffffff;
    for (int c = threadIdx.x; c < cols; c += blockDim.x)
        if (row[c] > best) {
            best = row[c];
            at   = c;
        }
    __shared__ float values[32];
    __shared__ int   ids[32];
    const auto       better = [](float a, int i, float b, int j) { return a > b || (a == b && i < j); };
    for (int step = 16; step > 0; step /= 2) {
        const float other = __shfl_xor_sync(~0u, best, step);
        const int   id    = __shfl_xor_sync(~0u, at, step);
        if (better(other, id, best, at)) best = other, at = id;
    }
    if (threadIdx.x % 32 == 0) values[threadIdx.x / 32] = best, ids[threadIdx.x / 32] = at;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < int(blockDim.x) / 32; w++)
            if (better(values[w], ids[w], best, at)) best = values[w], at = ids[w];
        out[blockIdx.x] = at == 0x7fffffff ? 0 : at;
    }
}

} // namespace

void embed(const Weight& weight, const Weight* positions, const Plan& plan, float* out, std::int64_t n, Stream stream) {
    run_kernel(embed_kernel, dim3(unsigned(int(n))), unsigned(256), 0, raw(stream), weight,
               positions ? *positions : Weight{}, positions != nullptr, plan, out);
}

void norm(const void* x, bool x_is_float, const float* weight, const float* bias, float eps, float* residual, Half* out,
          std::int64_t rows, std::int64_t cols, Stream stream) {
    const int    threads = cols >= 4096 ? 512 : cols >= 512 ? 256 : 64;
    const size_t shared  = std::size_t(cols) * sizeof(float);
    auto         kernel  = x_is_float ? (bias ? norm_kernel<true, true> : norm_kernel<true, false>)
                                      : (bias ? norm_kernel<false, true> : norm_kernel<false, false>);
    if (shared > 48 * 1024) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared));
    run_kernel(kernel, dim3(unsigned(int(rows))), unsigned(threads), shared, raw(stream), x, weight, bias, eps,
               residual, reinterpret_cast<__half*>(out), int(cols));
}

void silu_mul(Half* gate, const Half* up, std::int64_t n, Stream stream) {
    run_kernel(silu_mul_kernel, dim3(unsigned(blocks_for(n / 2, 256))), unsigned(256), 0, raw(stream),
               reinterpret_cast<__half2*>(gate), reinterpret_cast<const __half2*>(up), n / 2);
}

void gelu(Half* x, std::int64_t n, Stream stream) {
    run_kernel(gelu_kernel, dim3(unsigned(blocks_for(n, 256))), unsigned(256), 0, raw(stream),
               reinterpret_cast<__half*>(x), n);
}

void add(float* x, const Half* y, std::int64_t n, Stream stream) {
    run_kernel(add_kernel, dim3(unsigned(blocks_for(n, 256))), unsigned(256), 0, raw(stream), x,
               reinterpret_cast<const __half*>(y), n);
}

void add_bias(Half* x, const float* bias, std::int64_t rows, std::int64_t cols, Stream stream) {
    run_kernel(add_bias_kernel, dim3(unsigned(blocks_for(rows * cols, 256))), unsigned(256), 0, raw(stream),
               reinterpret_cast<__half*>(x), bias, rows * cols, int(cols));
}

void select_rows(const float* x, const std::int32_t* rows, float* out, std::int64_t n_rows, std::int64_t cols,
                 Stream stream) {
    run_kernel(select_rows_kernel, dim3(unsigned(int(n_rows))), unsigned(256), 0, raw(stream), x, rows, out, int(cols));
}

void rope_and_store(const RopeStore& args, const Plan& plan, std::int64_t n, Stream stream) {
    const int heads = args.n_heads + 2 * args.n_kv_heads;
    run_kernel(rope_store_kernel, dim3(unsigned(n), unsigned((heads + rope_heads - 1) / rope_heads)), rope_heads * 32,
               0, raw(stream), args, plan);
}

void copy_blocks(const BlockPools& pools, const std::int32_t* pairs, int n_copies, Stream stream) {
    if (n_copies > 0)
        copy_blocks_kernel<<<dim3(unsigned(n_copies), unsigned(pools.n_arrays)), 256, 0, raw(stream)>>>(pools, pairs);
}

void argmax(const float* logits, std::int32_t* out, std::int64_t rows, std::int64_t cols, Stream stream) {
    run_kernel(argmax_kernel, dim3(unsigned(int(rows))), unsigned(1024), 0, raw(stream), logits, out, cols);
}

} // namespace quire::cuda
