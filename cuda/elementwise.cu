// Elementwise operations, each limited by memory bandwidth: embedding, norms, activations, RoPE and KV store, copies of KV
// blocks, argmax.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cfloat>
#include <type_traits>

#include "arrivals.cuh"
#include "epilogue.cuh"
#include "fp8.cuh"
#include "kernels.h"
#include "paged_kv.cuh"
#include "rope.cuh"
#include "warp.cuh"

namespace quire::cuda {

namespace {

int ctas_for(std::int64_t n, int threads) { return int((n + threads - 1) / threads); }

// -- embedding: a CTA for each token

__global__ void embed_kernel(Weight weight, Weight positions, bool has_positions, float scale, int offset, Plan plan,
                             float* out) {
    wait_for_inputs();
    const std::int64_t t = blockIdx.x, token = plan.tokens[t];
#pragma unroll 4
    for (std::int64_t c = threadIdx.x; c < weight.cols; c += blockDim.x) {
        float v = weight_at(weight, token, c) * scale;
        if (has_positions) v += weight_at(positions, plan.positions[t] + offset, c);
        out[t * weight.cols + c] = v;
    }
}

// -- norms: a CTA for each row

// The largest fp16 in place of an infinity that a library made of a larger value.
__device__ float2 finite(__half2 v) {
    const __half2 most = __half2half2(__ushort_as_half(0x7bff)), least = __half2half2(__ushort_as_half(0xfbff));
    return __half22float2(__hmin2_nan(__hmax2_nan(v, least), most));
}
__device__ float finite(__half v) { return finite(__half2half2(v)).x; }

// RMS norm or LayerNorm (Layer); Beside: with what NormBeside says. Two neighbours at a time, PerThread times a thread: all loads in flight at once, all values in
// registers; cols is even.
template <bool Float, bool Layer, int PerThread, bool Beside>
__global__ void __launch_bounds__(1024)
    norm_kernel(const void* x, Bias x_bias, const float* weight, const float* bias, float eps, float* residual,
                __half* out, int cols, int weights, Fp8Matrix fp8, NormBeside beside) {
    __shared__ float sums[32];
    reads_early(); // weights
    weight += blockIdx.x % unsigned(weights) * cols;
    auto*              residual2 = reinterpret_cast<float2*>(residual);
    const std::int64_t at        = std::int64_t(blockIdx.x) * cols / 2;
    const int          n         = cols / 2;
    float2             v[PerThread], w[PerThread];
#pragma unroll
    for (int i = 0; i < PerThread; i++)
        if (const int c = int(threadIdx.x + i * blockDim.x); c < n)
            w[i] = weight ? reinterpret_cast<const float2*>(weight)[c] : float2{1, 1};
    // Of a Beside: all loads are in flight at once, too.
    constexpr int N = Beside ? PerThread : 1;
    float2        first_w[N], gate_w[N];
    __half2       more[N], gate[N];
    if (Beside) {
#pragma unroll
        for (int i = 0; i < N; i++)
            if (const int c = int(threadIdx.x + i * blockDim.x); c < n) {
                if (beside.first_weight) first_w[i] = reinterpret_cast<const float2*>(beside.first_weight)[c];
                if (beside.gate_weight) gate_w[i] = reinterpret_cast<const float2*>(beside.gate_weight)[c];
            }
    }
    wait_for_inputs();
#pragma unroll
    for (int i = 0; i < PerThread; i++) {
        const int c = int(threadIdx.x + i * blockDim.x);
        v[i]        = {0, 0};
        if (c < n)
            v[i] = Float ? static_cast<const float2*>(x)[at + c] : finite(static_cast<const __half2*>(x)[at + c]);
    }
    if (Beside) {
#pragma unroll
        for (int i = 0; i < N; i++)
            if (const int c = int(threadIdx.x + i * blockDim.x); c < n) {
                if (beside.more) more[i] = reinterpret_cast<const __half2*>(beside.more)[at + c];
                if (beside.gate_weight) gate[i] = reinterpret_cast<const __half2*>(beside.gate)[at + c];
                if (beside.gates) gate[i] = reinterpret_cast<const __half2*>(out)[at + c];
            }
    }
    if (Beside && beside.first_weight) {
        float squares = 0;
#pragma unroll
        for (int i = 0; i < N; i++) squares += v[i].x * v[i].x + v[i].y * v[i].y;
        const float scale = rsqrtf(cta_sum(squares, sums) / cols + beside.first_eps);
#pragma unroll
        for (int i = 0; i < N; i++)
            if (int(threadIdx.x + i * blockDim.x) < n) v[i].x *= scale * first_w[i].x, v[i].y *= scale * first_w[i].y;
    }
    if (Beside && beside.more) {
        float factor = 1;
        if (beside.gate_weight) {
            float sum = 0;
#pragma unroll
            for (int i = 0; i < N; i++)
                if (int(threadIdx.x + i * blockDim.x) < n) {
                    const float2 g = __half22float2(gate[i]);
                    sum += g.x * gate_w[i].x + g.y * gate_w[i].y;
                }
            factor = 1 / (1 + expf(-cta_sum(sum, sums)));
        }
#pragma unroll
        for (int i = 0; i < N; i++)
            if (int(threadIdx.x + i * blockDim.x) < n) {
                const float2 m = finite(more[i]);
                v[i].x += m.x * factor, v[i].y += m.y * factor;
            }
    }
    if (x_bias.values) {
#pragma unroll
        for (int i = 0; i < PerThread; i++)
            if (const int c = int(threadIdx.x + i * blockDim.x); c < n) {
                const float2 b = reinterpret_cast<const float2*>(x_bias.values)[c];
                v[i].x += b.x * x_bias.scale, v[i].y += b.y * x_bias.scale;
            }
    }
    if (residual) {
#pragma unroll
        for (int i = 0; i < PerThread; i++)
            if (const int c = int(threadIdx.x + i * blockDim.x); c < n) {
                const float2 r = residual2[at + c];
                v[i].x += r.x, v[i].y += r.y;
            }
#pragma unroll
        for (int i = 0; i < PerThread; i++)
            if (const int c = int(threadIdx.x + i * blockDim.x); c < n) residual2[at + c] = v[i];
    }
    float sum = 0, squares = 0, mean = 0;
#pragma unroll
    for (int i = 0; i < PerThread; i++) {
        sum += v[i].x + v[i].y;
        squares += v[i].x * v[i].x + v[i].y * v[i].y;
    }
    if (Layer) {
        mean    = cta_sum(sum, sums) / cols;
        squares = 0;
#pragma unroll
        for (int i = 0; i < PerThread; i++)
            if (int(threadIdx.x + i * blockDim.x) < n)
                squares += (v[i].x - mean) * (v[i].x - mean) + (v[i].y - mean) * (v[i].y - mean);
    }
    const float scale = rsqrtf(cta_sum(squares, sums) / cols + eps);
    float       most  = 0;
#pragma unroll
    for (int i = 0; i < PerThread; i++) {
        const int c = int(threadIdx.x + i * blockDim.x);
        if (c >= n) continue;
        const float2 b      = Layer && bias ? reinterpret_cast<const float2*>(bias)[c] : float2{0, 0};
        float2       normed = {(v[i].x - mean) * scale * w[i].x + b.x, (v[i].y - mean) * scale * w[i].y + b.y};
        if (Beside && beside.gates) {
            const float2 g = __half22float2(gate[Beside ? i : 0]);
            normed         = {gated(Activation::silu, g.x, normed.x), gated(Activation::silu, g.y, normed.y)};
        }
        const std::uint32_t h = pack_finite(normed.x, normed.y);
        if (!fp8.codes) reinterpret_cast<std::uint32_t*>(out)[at + c] = h;
        v[i] = as_float2(h);
        most = max_or_nan(most, max_or_nan(fabsf(v[i].x), fabsf(v[i].y)));
    }
    if (!fp8.codes) return;
    const Fp8Scale by(cta_max_or_nan(most, sums));
    if (threadIdx.x == 0) fp8.scales[blockIdx.x] = by.scale;
#pragma unroll
    for (int i = 0; i < PerThread; i++)
        if (const int c = int(threadIdx.x + i * blockDim.x); c < n)
            reinterpret_cast<std::uint16_t*>(fp8.codes)[at + c] = std::uint16_t(by.codes(v[i]));
}

// RMS norms of many rows of up to 256 columns, such as those of heads: a warp for each row, four rows one after the other. A lane has the numbers
// that a thread of norm_kernel has, so the bits are its bits.
constexpr int short_norm_cols = 256, short_norm_warps = 8, short_norm_rows = 4;

template <bool Float, bool Gates>
__global__ void __launch_bounds__(short_norm_warps * 32)
    short_norm_kernel(const void* x, const float* weight, float eps, __half* out, std::int64_t rows, int cols,
                      int weights) {
    wait_for_inputs();
    constexpr int      per_lane = short_norm_cols / 64;
    const int          lane = int(threadIdx.x) % 32, n = cols / 2;
    const std::int64_t first = (std::int64_t(blockIdx.x) * short_norm_warps + int(threadIdx.x) / 32) * short_norm_rows;
    float2             v[short_norm_rows][per_lane];
#pragma unroll
    for (int r = 0; r < short_norm_rows; r++)
#pragma unroll
        for (int i = 0; i < per_lane; i++) {
            const int          c  = lane + i * 32;
            const std::int64_t at = (first + r) * n + c;
            v[r][i]               = {0, 0};
            if (c < n && first + r < rows)
                v[r][i] = Float ? static_cast<const float2*>(x)[at] : finite(static_cast<const __half2*>(x)[at]);
        }
#pragma unroll
    for (int r = 0; r < short_norm_rows; r++) {
        if (first + r >= rows) return;
        float squares = 0;
#pragma unroll
        for (int i = 0; i < per_lane; i++) squares += v[r][i].x * v[r][i].x + v[r][i].y * v[r][i].y;
        const float scale = rsqrtf(warp_sum(squares) / cols + eps);
        const auto* by    = reinterpret_cast<const float2*>(weight + (first + r) % weights * cols);
#pragma unroll
        for (int i = 0; i < per_lane; i++)
            if (const int c = lane + i * 32; c < n) {
                const float2 w      = weight ? by[c] : float2{1, 1};
                float2       normed = {v[r][i].x * scale * w.x, v[r][i].y * scale * w.y};
                auto* const  to     = reinterpret_cast<std::uint32_t*>(out) + (first + r) * n + c;
                if (Gates) {
                    const float2 g = as_float2(*to);
                    normed         = {gated(Activation::silu, g.x, normed.x), gated(Activation::silu, g.y, normed.y)};
                }
                *to = pack_finite(normed.x, normed.y);
            }
    }
}

// Of any number of columns: the row is read twice.
template <bool Float, bool Layer>
__global__ void norm_any_kernel(const void* x, Bias x_bias, const float* weight, const float* bias, float eps,
                                float* residual, __half* out, int cols, int weights, Fp8Matrix, NormBeside) {
    wait_for_inputs();
    weight += blockIdx.x % unsigned(weights) * cols;
    __shared__ float   sums[32];
    const std::int64_t at    = std::int64_t(blockIdx.x) * cols;
    const auto         given = [&](int c) {
        const float v = Float ? static_cast<const float*>(x)[at + c] : finite(static_cast<const __half*>(x)[at + c]);
        return x_bias.values ? v + x_bias.values[c] * x_bias.scale : v;
    };
    const auto value = [&](int c) { // of the new residual, after the residual was written
        return residual ? residual[at + c] : given(c);
    };
    float sum = 0, squares = 0;
    for (int c = int(threadIdx.x); c < cols; c += int(blockDim.x)) {
        if (residual) residual[at + c] += given(c);
        sum += value(c);
        if (!Layer) squares += value(c) * value(c);
    }
    const float mean = Layer ? cta_sum(sum, sums) / cols : 0;
    for (int c = int(threadIdx.x); Layer && c < cols; c += int(blockDim.x))
        squares += (value(c) - mean) * (value(c) - mean);
    const float scale = rsqrtf(cta_sum(squares, sums) / cols + eps);
    for (int c = int(threadIdx.x); c < cols; c += int(blockDim.x))
        out[at + c] =
            to_finite((value(c) - mean) * scale * (weight ? weight[c] : 1.0f) + (Layer && bias ? bias[c] : 0.0f));
}

// NormKind::none: one value a thread.
template <bool Float>
__global__ void no_norm_kernel(const void* x, Bias x_bias, float* residual, __half* out, std::int64_t n, int cols) {
    wait_for_inputs();
    const std::int64_t i = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float v = Float ? static_cast<const float*>(x)[i] : finite(static_cast<const __half*>(x)[i]);
    if (x_bias.values) v += x_bias.values[i % cols] * x_bias.scale;
    if (residual) residual[i] = v += residual[i];
    out[i] = to_finite(v);
}

// -- activations

// N times eight neighbours a thread, all loads in flight at once.
template <Activation A, bool Gated, int N>
__global__ void activate_kernel(uint4* gate, const uint4* up, std::int64_t n) {
    wait_for_inputs();
    const std::int64_t first = std::int64_t(blockIdx.x) * blockDim.x * N + threadIdx.x;
    const auto         one   = [](std::uint32_t g_, std::uint32_t u_) {
        const float2 g = as_float2(g_), u = as_float2(u_);
        return Gated ? pack_finite(gated(A, g.x, u.x), gated(A, g.y, u.y))
                               : pack_finite(activated(A, g.x), activated(A, g.y));
    };
    uint4 g[N], u[N];
#pragma unroll
    for (int k = 0; k < N; k++) {
        const std::int64_t i = min(first + k * blockDim.x, n - 1);
        g[k] = gate[i], u[k] = Gated ? up[i] : uint4{};
    }
#pragma unroll
    for (int k = 0; k < N; k++)
        if (const std::int64_t i = first + k * blockDim.x; i < n)
            gate[i] = make_uint4(one(g[k].x, u[k].x), one(g[k].y, u[k].y), one(g[k].z, u[k].z), one(g[k].w, u[k].w));
}

// Eight neighbours of a row, as fp16, and as many of a bias.
__device__ void add_bias(uint4& x, const float* bias, float scale) {
    const float4 low = reinterpret_cast<const float4*>(bias)[0], high = reinterpret_cast<const float4*>(bias)[1];
    const auto   add = [&](std::uint32_t two, float a, float b) {
        const float2 v = as_float2(two);
        return pack_finite(v.x + a * scale, v.y + b * scale);
    };
    x = make_uint4(add(x.x, low.x, low.y), add(x.y, low.z, low.w), add(x.z, high.x, high.y), add(x.w, high.z, high.w));
}

// blockIdx.x: the row; eight neighbours a thread.
__global__ void activate_biased_kernel(Activation activation, uint4* x, Bias bias, int words) {
    wait_for_inputs();
    const int w = int(blockIdx.y * blockDim.x + threadIdx.x);
    if (w >= words) return;
    const std::int64_t at  = std::int64_t(blockIdx.x) * words + w;
    uint4              v   = x[at];
    const auto         one = [&](std::uint32_t two, float a, float b) {
        const float2 f = as_float2(two);
        return pack_finite(activated(activation, f.x + a * bias.scale), activated(activation, f.y + b * bias.scale));
    };
    const float4 low  = reinterpret_cast<const float4*>(bias.values)[2 * w],
                 high = reinterpret_cast<const float4*>(bias.values)[2 * w + 1];
    x[at] =
        make_uint4(one(v.x, low.x, low.y), one(v.y, low.z, low.w), one(v.z, high.x, high.y), one(v.w, high.z, high.w));
}

// Any n: one value a thread.
__global__ void activate_any_kernel(Activation activation, __half* gate, const __half* up, std::int64_t n) {
    wait_for_inputs();
    const std::int64_t i = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float v = __half2float(gate[i]);
    gate[i]       = to_finite(up ? gated(activation, v, __half2float(up[i])) : activated(activation, v));
}

// gate = activation(gate) · x. PerThread neighbours a thread.
template <bool Float, int PerThread>
__global__ void gate_kernel(Activation activation, __half* gate, const void* x, std::int64_t n) {
    wait_for_inputs();
    const std::int64_t i = (std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * PerThread;
    if (i >= n) return;
    if constexpr (PerThread == 1) {
        const float v = Float ? static_cast<const float*>(x)[i] : __half2float(static_cast<const __half*>(x)[i]);
        gate[i]       = to_finite(gated(activation, __half2float(gate[i]), v));
    } else {
        auto* const words = reinterpret_cast<uint2*>(gate + i);
        const uint2 g     = *words;
        float4      v;
        if constexpr (Float) v = *reinterpret_cast<const float4*>(static_cast<const float*>(x) + i);
        else {
            const uint2  h = *reinterpret_cast<const uint2*>(static_cast<const __half*>(x) + i);
            const float2 a = as_float2(h.x), b = as_float2(h.y);
            v = {a.x, a.y, b.x, b.y};
        }
        const float2 a = as_float2(g.x), b = as_float2(g.y);
        *words = {pack_finite(gated(activation, a.x, v.x), gated(activation, a.y, v.y)),
                  pack_finite(gated(activation, b.x, v.z), gated(activation, b.y, v.w))};
    }
}

__global__ void soft_cap_kernel(float* x, float cap, std::int64_t n) {
    wait_for_inputs();
    const std::int64_t i = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) x[i] = softcapped(x[i], cap);
}

// blockIdx.x: the row.
__global__ void activate_times_kernel(Activation activation, __half* x, int cols, const float* times,
                                      std::int64_t apart) {
    wait_for_inputs();
    const int c = int(blockIdx.y * blockDim.x + threadIdx.x);
    if (c >= cols) return;
    __half* at = x + std::int64_t(blockIdx.x) * cols + c;
    *at        = to_finite(activated(activation, __half2float(*at)) * times[blockIdx.x * apart + c]);
}

template <bool Float>
__global__ void add_kernel(void* x, const __half* y, float scale, std::int64_t n) {
    wait_for_inputs();
    const std::int64_t i = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    if (Float) static_cast<float*>(x)[i] = (static_cast<float*>(x)[i] + finite(y[i])) * scale;
    else static_cast<__half*>(x)[i] = to_finite((finite(static_cast<__half*>(x)[i]) + finite(y[i])) * scale);
}

// blockIdx.x: the row.
__global__ void scale_by_position_kernel(__half* x, int cols, float scale, int period, int offset, Plan plan) {
    wait_for_inputs();
    const int c = int(blockIdx.y * blockDim.x + threadIdx.x), periods = (plan.positions[blockIdx.x] + offset) / period;
    if (c >= cols || periods == 0) return;
    __half* at = x + std::int64_t(blockIdx.x) * cols + c;
    *at        = to_finite(__half2float(*at) * (1 + scale * logf(float(1 + periods))));
}

template <bool Float>
__global__ void add_bias_kernel(void* x, const float* bias, float scale, std::int64_t n, int cols) {
    wait_for_inputs();
    const std::int64_t i = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float more = bias[i % cols] * scale;
    if (Float) static_cast<float*>(x)[i] += more;
    else static_cast<__half*>(x)[i] = to_finite(__half2float(static_cast<__half*>(x)[i]) + more);
}

// add_bias for fp16 rows of 8 · `words` columns: blockIdx.x is the row.
__global__ void add_bias_words_kernel(uint4* x, Bias bias, int words) {
    wait_for_inputs();
    const int w = int(blockIdx.y * blockDim.x + threadIdx.x);
    if (w >= words) return;
    const std::int64_t at = std::int64_t(blockIdx.x) * words + w;
    uint4              v  = x[at];
    add_bias(v, bias.values + 8 * w, bias.scale);
    x[at] = v;
}

// Word: the type of a load; a row has `words` of them.
template <class Word>
__global__ void select_rows_kernel(const Word* x, const std::int32_t* rows, Word* out, int words) {
    wait_for_inputs();
    const std::int64_t from = std::int64_t(rows[blockIdx.x]) * words, to = std::int64_t(blockIdx.x) * words;
    for (int c = threadIdx.x; c < words; c += blockDim.x) out[to + c] = x[from + c];
}

// -- RoPE and KV store: a warp takes some neighbouring heads of one token, of q, then k, then v; a lane computes the angle of a
// pair once for all heads. All loads are issued before the first store, as a load could not pass a store.

constexpr int rope_warps = 4; // of a CTA

// W neighbouring pairs a lane: 2, or 1 where their number is odd. H: heads of a warp. Word: the type of a copy of v. Latent: a
// cache row is v, then k.
template <int W, int H, class Word, bool Latent = false>
__global__ void __launch_bounds__(rope_warps * 32) rope_store_kernel(RopeStore a, Plan plan) {
    wait_for_inputs();
    const std::int64_t t = blockIdx.x;
    const int          D = a.head_dim, slot = plan.slots[t], lane = int(threadIdx.x % 32);
    const int          v_dim = Latent ? a.value_dim : D, k_dim = Latent ? D - v_dim : D; // of a head in k and v
    const int          first  = (int(blockIdx.y) * rope_warps + int(threadIdx.x / 32)) * H;
    const int          stored = a.n_heads + a.n_kv_heads, all = stored + a.n_kv_heads; // where v begins, and ends
    // Tokens that only fill up a graph have no slot, and are not stored.
    const int rotated = slot < 0 ? a.n_heads : stored;
    const int v_slot  = a.v_slots == 0 ? slot : plan.slots[t + a.v_slots];
    // Where K or V of head h goes.
    const auto cache_row = [&](void* cache, int slot, int h) {
        return static_cast<__half*>(cache) + kv_row_of_slot(slot, h, a.block_rows, a.block_size) * D;
    };
    const auto source = [&](int head) {
        return head < a.n_heads ? reinterpret_cast<__half*>(a.q) + (t * a.n_heads + head) * a.q_dim + a.q_first
               : head < stored  ? reinterpret_cast<__half*>(a.k) + (t * a.n_kv_heads + head - a.n_heads) * k_dim
                                : reinterpret_cast<__half*>(a.v) + (t * a.n_kv_heads + head - stored) * v_dim;
    };
    const auto target = [&](int head) {
        return head < a.n_heads ? source(head)
               : head < stored  ? cache_row(a.cache_k, slot, head - a.n_heads) + (Latent ? v_dim : 0)
                                : cache_row(Latent ? a.cache_k : a.cache_v, v_slot, head - stored);
    };
    const float position = float(plan.positions[t]);
    for (int pair = lane * W; pair < a.n_pairs && first < rotated; pair += 32 * W) {
        // Loads hold x x' | y y' of two NeoX pairs, x y | x' y' of two interleaved ones.
        const int one = a.neox ? pair : 2 * pair, other = a.neox ? pair + a.n_pairs : 2 * pair + W;
        __half    v[H][2 * W];
#pragma unroll
        for (int h = 0; h < H; h++) {
            const __half* from = source(min(first + h, rotated - 1));
            if constexpr (W == 2) {
                *reinterpret_cast<__half2*>(v[h])     = *reinterpret_cast<const __half2*>(from + one);
                *reinterpret_cast<__half2*>(v[h] + 2) = *reinterpret_cast<const __half2*>(from + other);
            } else {
                v[h][0] = from[one], v[h][1] = from[other];
            }
        }
        float sine[W], cosine[W];
#pragma unroll
        for (int w = 0; w < W; w++) {
            rope_angle(position, a.inv_freq[pair + w], sine[w], cosine[w]);
            sine[w] *= a.scale, cosine[w] *= a.scale;
        }
#pragma unroll
        for (int h = 0; h < H; h++) {
            if (first + h >= rotated) break;
            __half*    to          = target(first + h);
            const auto swap_middle = [&] {
                const __half middle = v[h][1];
                v[h][1] = v[h][W], v[h][W] = middle;
            };
            if (W == 2 && !a.neox) swap_middle();
#pragma unroll
            for (int w = 0; w < W; w++) {
                const float  x = __half2float(v[h][w]), y = __half2float(v[h][W + w]);
                const float2 rotated = rotate_pair(x, y, sine[w], cosine[w]);
                v[h][w] = __float2half(rotated.x), v[h][W + w] = __float2half(rotated.y);
            }
            if (W == 2 && !a.neox) swap_middle();
            if constexpr (W == 2) {
                *reinterpret_cast<__half2*>(to + one)   = *reinterpret_cast<const __half2*>(v[h]);
                *reinterpret_cast<__half2*>(to + other) = *reinterpret_cast<const __half2*>(v[h] + 2);
            } else {
                to[one] = v[h][0], to[other] = v[h][1];
            }
        }
    }
    if (slot < 0) return;
    for (int head = max(first, a.n_heads); head < min(first + H, stored); head++) // dimensions that are not rotated
        for (int d = 2 * a.n_pairs + lane; d < k_dim; d += 32) target(head)[d] = source(head)[d];
    if (const int begin = max(first, stored); begin < min(first + H, all)) { // v
        constexpr int of_word = int(sizeof(Word) / sizeof(__half)), n_loads = H > 1 ? 4 : 1;
        const int     words = v_dim / of_word, n = (min(first + H, all) - begin) * words;
        const auto*   from = reinterpret_cast<const Word*>(source(begin));
        for (int w = lane; w < n; w += 32 * n_loads) {
            Word copied[n_loads];
#pragma unroll
            for (int i = 0; i < n_loads; i++) copied[i] = from[min(w + 32 * i, n - 1)];
#pragma unroll
            for (int i = 0; i < n_loads; i++)
                if (const int at = w + 32 * i; at < n)
                    reinterpret_cast<Word*>(target(begin + at / words))[at % words] = copied[i];
        }
    }
}

// Without RoPE: k and v go into the cache. Adds the biases that the GEMM has left to this kernel. blockIdx.x is the token; a thread takes
// eight neighbours of q (if q has a bias), k or v.
__global__ void store_kernel(RopeStore a, Plan plan) {
    wait_for_inputs();
    const std::int64_t t    = blockIdx.x;
    const int          slot = plan.slots[t], D = a.head_dim;
    const int          q_words = a.n_heads * D / 8, kv_words = a.n_kv_heads * D / 8;
    int                w = int(blockIdx.y * blockDim.x + threadIdx.x) + (a.q_bias ? 0 : q_words);
    if (w < q_words) {
        auto* q = reinterpret_cast<uint4*>(a.q) + t * q_words + w;
        uint4 v = *q;
        add_bias(v, a.q_bias + 8 * w, 1);
        *q = v;
        return;
    }
    w -= q_words;
    if (w >= 2 * kv_words || slot < 0) return;
    const bool is_k   = w < kv_words;
    w                 = is_k ? w : w - kv_words;
    uint4        v    = reinterpret_cast<const uint4*>(is_k ? a.k : a.v)[t * kv_words + w];
    const float* bias = is_k ? a.k_bias : a.v_bias;
    if (bias) add_bias(v, bias + 8 * w, 1);
    const int head = 8 * w / D;
    auto*     row =
        reinterpret_cast<__half*>(is_k ? a.cache_k : a.cache_v) +
        kv_row_of_slot(is_k || a.v_slots == 0 ? slot : plan.slots[t + a.v_slots], head, a.block_rows, a.block_size) * D;
    *reinterpret_cast<uint4*>(row + (8 * w - head * D)) = v;
}

// -- copies of KV blocks: every pair in every array, a Word a thread

template <class Word>
__global__ void copy_blocks_kernel(BlockPools pools, const std::int32_t* pairs) {
    const int   array = blockIdx.y, copy = blockIdx.x;
    const auto* from = static_cast<const char*>(pools.from[array]) + pairs[2 * copy] * pools.stride;
    auto*       to   = static_cast<char*>(pools.to[array]) + pairs[2 * copy + 1] * pools.stride;
    for (std::size_t i = threadIdx.x * sizeof(Word); i < pools.bytes; i += blockDim.x * sizeof(Word))
        *reinterpret_cast<Word*>(to + i) = *reinterpret_cast<const Word*>(from + i);
}

// -- argmax: the CTAs of a row look for the best token of a part each; the last one to arrive compares these

constexpr int no_token = 0x7fffffff;

struct Best {
    float value = -INFINITY;
    int   id    = no_token;
    bool  bad   = false; // a logit is no number

    __device__ void take(float v, int at) { // of equal ones the lowest
        if (v > value || (v == value && at < id)) value = v, id = at;
    }
};

// The best of a CTA's threads; the first thread has it.
__device__ Best best_of_cta(Best mine) {
    __shared__ float values[32];
    __shared__ int   ids[32];
    for (int step = 16; step > 0; step /= 2) {
        const float value = __shfl_xor_sync(~0u, mine.value, step);
        const int   id    = __shfl_xor_sync(~0u, mine.id, step);
        mine.take(value, id);
    }
    if (threadIdx.x % 32 == 0) values[threadIdx.x / 32] = mine.value, ids[threadIdx.x / 32] = mine.id;
    mine.bad = __syncthreads_or(mine.bad);
    if (threadIdx.x == 0)
        for (int w = 1; w < int(blockDim.x) / 32; w++) mine.take(values[w], ids[w]);
    return mine;
}

// blockIdx.x: the row. candidates: the best of each CTA, value and id, of a bad part id -1.
__global__ void argmax_kernel(const float* logits, std::int32_t* out, int cols, float2* candidates,
                              std::int32_t* arrivals) {
    wait_for_inputs();
    const float*   row = logits + std::int64_t(blockIdx.x) * cols;
    const unsigned n   = gridDim.y;
    Best           best;
#pragma unroll 8
    for (int c = int(blockIdx.y * blockDim.x + threadIdx.x); c < cols; c += int(n * blockDim.x)) {
        const float v = row[c];
        best.bad |= !(v <= FLT_MAX); // NaN is not
        if (v > best.value) best.value = v, best.id = c;
    }
    best = best_of_cta(best);
    if (n > 1) {
        float2* const of_row = candidates + blockIdx.x * n;
        if (threadIdx.x == 0) of_row[blockIdx.y] = {best.value, __int_as_float(best.bad ? -1 : best.id)};
        if (!is_last_cta(arrivals + blockIdx.x, n)) return;
        best = {};
        for (unsigned i = threadIdx.x; i < n; i += blockDim.x) {
            const float2 v  = __ldcg(of_row + i);
            const int    id = __float_as_int(v.y);
            best.bad |= id < 0;
            best.take(v.x, id);
        }
        best = best_of_cta(best);
    }
    if (threadIdx.x == 0) out[blockIdx.x] = best.bad || best.id == no_token ? -1 : best.id;
}

} // namespace

void embed(const Weight& weight, const Weight* positions, float scale, int offset, const Plan& plan, float* out,
           std::int64_t n, Context& gpu) {
    run_kernel(embed_kernel, dim3(unsigned(int(n))), unsigned(1024), 0, gpu, weight, positions ? *positions : Weight{},
               positions != nullptr, scale, offset, plan, out);
}

void norm(const void* x, bool x_is_float, Bias x_bias, NormKind kind, const float* weight, const float* bias, float eps,
          float* residual, Half* out, std::int64_t rows, std::int64_t cols, Context& gpu, int weights,
          const Fp8Matrix& fp8, const NormBeside& beside) {
    if (fp8.codes && (kind == NormKind::none || cols % 2 != 0 || cols > 32768)) { // in two steps
        norm(x, x_is_float, x_bias, kind, weight, bias, eps, residual, out, rows, cols, gpu, weights);
        rows_to_fp8(out, rows, cols, fp8, gpu);
        return;
    }
    if (kind == NormKind::none) {
        run_kernel(x_is_float ? no_norm_kernel<true> : no_norm_kernel<false>,
                   dim3(unsigned(ctas_for(rows * cols, 256))), unsigned(256), 0, gpu, x, x_bias, residual,
                   reinterpret_cast<__half*>(out), rows * cols, int(cols));
        return;
    }
    const bool layer = kind == NormKind::layer;
    if (!layer && rows >= 512 && cols <= short_norm_cols && cols % 2 == 0 && !x_bias.values && !residual &&
        !fp8.codes && !beside.first_weight) {
        constexpr int each = short_norm_warps * short_norm_rows;
        const auto    run  = [&](auto kernel) {
            run_kernel(kernel, dim3(unsigned((rows + each - 1) / each)), short_norm_warps * 32, 0, gpu, x, weight, eps,
                           reinterpret_cast<__half*>(out), rows, int(cols), weights);
        };
        if (x_is_float) beside.gates ? run(short_norm_kernel<true, true>) : run(short_norm_kernel<true, false>);
        else beside.gates ? run(short_norm_kernel<false, true>) : run(short_norm_kernel<false, false>);
        return;
    }
    // A row in the registers of a CTA, four or sixteen pairs a thread: up to 32768 columns. Wider rows take the kernel for any width.
    const int  pairs   = int(cols / 2);
    const int  threads = std::min(1024, std::max(32, (pairs / 4 + 31) / 32 * 32));
    const auto run     = [&](auto kernel) {
        run_kernel(kernel, dim3(unsigned(rows)), unsigned(threads), 0, gpu, x, x_bias, weight, bias, eps, residual,
                       reinterpret_cast<__half*>(out), int(cols), weights, fp8, beside);
    };
    if (cols % 2 != 0 || cols > 32768) {
        if (x_is_float) layer ? run(norm_any_kernel<true, true>) : run(norm_any_kernel<true, false>);
        else layer ? run(norm_any_kernel<false, true>) : run(norm_any_kernel<false, false>);
        return;
    }
    if (beside.first_weight || beside.more || beside.gates) {
        run(x_is_float ? norm_kernel<true, false, 4, true> : norm_kernel<false, false, 4, true>);
        return;
    }
    const auto choose = [&]<int N>(std::integral_constant<int, N>) {
        if (x_is_float) layer ? run(norm_kernel<true, true, N, false>) : run(norm_kernel<true, false, N, false>);
        else layer ? run(norm_kernel<false, true, N, false>) : run(norm_kernel<false, false, N, false>);
    };
    if (pairs <= 4 * threads) choose(std::integral_constant<int, 4>{});
    else choose(std::integral_constant<int, 16>{});
}

void activate(Activation activation, Half* gate, const Half* up, std::int64_t n, Context& gpu) {
    const auto run = [&](auto kernel, int n_loads) {
        run_kernel(kernel, dim3(unsigned(ctas_for(n / 8, 256 * n_loads))), unsigned(256), 0, gpu,
                   reinterpret_cast<uint4*>(gate), reinterpret_cast<const uint4*>(up), n / 8);
    };
    const auto choose = [&]<Activation A>() {
        const bool few = n < 1 << 22;
        if (up) few ? run(activate_kernel<A, true, 1>, 1) : run(activate_kernel<A, true, 4>, 4);
        else few ? run(activate_kernel<A, false, 1>, 1) : run(activate_kernel<A, false, 4>, 4);
    };
    if (n % 8 != 0)
        run_kernel(activate_any_kernel, dim3(unsigned(ctas_for(n, 256))), unsigned(256), 0, gpu, activation,
                   reinterpret_cast<__half*>(gate), reinterpret_cast<const __half*>(up), n);
    else switch (activation) {
            case Activation::silu: choose.template operator()<Activation::silu>(); break;
            case Activation::gelu_tanh: choose.template operator()<Activation::gelu_tanh>(); break;
            case Activation::gelu_erf: choose.template operator()<Activation::gelu_erf>(); break;
            case Activation::relu: choose.template operator()<Activation::relu>(); break;
            case Activation::clamped_swiglu: choose.template operator()<Activation::clamped_swiglu>(); break;
            case Activation::relu_squared: choose.template operator()<Activation::relu_squared>(); break;
            case Activation::sigmoid: choose.template operator()<Activation::sigmoid>(); break;
        }
}

void activate_biased(Activation activation, Half* x, Bias bias, std::int64_t rows, std::int64_t cols, Context& gpu) {
    run_kernel(activate_biased_kernel, dim3(unsigned(rows), unsigned(ctas_for(cols / 8, 256))), 256, 0, gpu, activation,
               reinterpret_cast<uint4*>(x), bias, int(cols / 8));
}

void gate(Activation activation, Half* gate, const void* x, bool x_is_float, std::int64_t n, Context& gpu) {
    const auto run = [&](auto kernel, int per_thread) {
        run_kernel(kernel, dim3(unsigned(ctas_for(n / per_thread, 256))), 256, 0, gpu, activation,
                   reinterpret_cast<__half*>(gate), x, n);
    };
    if (n % 4 == 0) x_is_float ? run(gate_kernel<true, 4>, 4) : run(gate_kernel<false, 4>, 4);
    else x_is_float ? run(gate_kernel<true, 1>, 1) : run(gate_kernel<false, 1>, 1);
}

void soft_cap(float* x, float cap, std::int64_t n, Context& gpu) {
    run_kernel(soft_cap_kernel, dim3(unsigned(ctas_for(n, 256))), unsigned(256), 0, gpu, x, cap, n);
}

void activate_times(Activation activation, Half* x, std::int64_t rows, std::int64_t cols, const float* times,
                    std::int64_t apart, Context& gpu) {
    run_kernel(activate_times_kernel, dim3(unsigned(rows), unsigned(ctas_for(cols, 256))), 256, 0, gpu, activation,
               reinterpret_cast<__half*>(x), int(cols), times, apart);
}

void add(void* x, bool x_is_float, const Half* y, float scale, std::int64_t n, Context& gpu) {
    run_kernel(x_is_float ? add_kernel<true> : add_kernel<false>, dim3(unsigned(ctas_for(n, 256))), unsigned(256), 0,
               gpu, x, reinterpret_cast<const __half*>(y), scale, n);
}

void scale_by_position(Half* x, std::int64_t rows, std::int64_t cols, float scale, int period, int offset,
                       const Plan& plan, Context& gpu) {
    run_kernel(scale_by_position_kernel, dim3(unsigned(rows), unsigned(ctas_for(cols, 256))), 256, 0, gpu,
               reinterpret_cast<__half*>(x), int(cols), scale, period, offset, plan);
}

void add_bias(void* x, bool x_is_float, const float* bias, float scale, std::int64_t rows, std::int64_t cols,
              Context& gpu) {
    if (!x_is_float && cols % 8 == 0) {
        run_kernel(add_bias_words_kernel, dim3(unsigned(rows), unsigned(ctas_for(cols / 8, 256))), 256, 0, gpu,
                   static_cast<uint4*>(x), Bias{bias, scale}, int(cols / 8));
        return;
    }
    run_kernel(x_is_float ? add_bias_kernel<true> : add_bias_kernel<false>, dim3(unsigned(ctas_for(rows * cols, 256))),
               unsigned(256), 0, gpu, x, bias, scale, rows * cols, int(cols));
}

void select_rows(const float* x, const std::int32_t* rows, float* out, std::int64_t n_rows, std::int64_t cols,
                 Context& gpu) {
    const auto run = [&]<class Word>(const Word* from, Word* to) {
        run_kernel(select_rows_kernel<Word>, dim3(unsigned(int(n_rows))), unsigned(1024), 0, gpu, from, rows, to,
                   int(cols * sizeof(float) / sizeof(Word)));
    };
    if (cols % 2 == 0) run(reinterpret_cast<const float2*>(x), reinterpret_cast<float2*>(out));
    else run(x, out);
}

void rope_and_store(const RopeStore& args, const Plan& plan, std::int64_t n, Context& gpu) {
    if (args.coded) return rope_and_store_codes(args, plan, n, gpu);
    if (can_add_biases(args)) {
        const int words = ((args.q_bias ? args.n_heads : 0) + 2 * args.n_kv_heads) * args.head_dim / 8;
        run_kernel(store_kernel, dim3(unsigned(n), unsigned(ctas_for(words, 256))), 256, 0, gpu, args, plan);
        return;
    }
    // Few tokens: a warp per head; many: fewer angles, and more loads in flight.
    const int  heads = args.n_heads + 2 * args.n_kv_heads;
    const auto run   = [&](auto kernel, int of_warp) {
        const int of_block = rope_warps * of_warp;
        run_kernel(kernel, dim3(unsigned(n), unsigned((heads + of_block - 1) / of_block)), rope_warps * 32, 0, gpu,
                     args, plan);
    };
    if (args.cache_v == nullptr) {
        const bool odd = args.n_pairs % 2 != 0 || args.head_dim % 8 != 0 || args.value_dim % 8 != 0 ||
                         args.q_dim % 2 != 0 || args.q_first % 2 != 0;
        if (odd) run(rope_store_kernel<1, 1, __half, true>, 1);
        else run(rope_store_kernel<2, 1, uint4, true>, 1);
    } else if (args.n_pairs % 2 != 0 || args.head_dim % 8 != 0) run(rope_store_kernel<1, 1, __half>, 1);
    else if (n < 32) run(rope_store_kernel<2, 1, uint4>, 1);
    else run(rope_store_kernel<2, 8, uint4>, 8);
}

void copy_blocks(const BlockPools& pools, const std::int32_t* pairs, int n_copies, Context& gpu) {
    if (n_copies == 0) return;
    run_in_order(pools.bytes % 16 == 0 ? copy_blocks_kernel<uint4> : copy_blocks_kernel<__half>,
                 dim3(unsigned(n_copies), unsigned(pools.n_arrays)), 256, 0, gpu, pools, pairs);
}

void argmax(const float* logits, std::int32_t* out, std::int64_t rows, std::int64_t cols, Context& gpu) {
    // Two CTAs on each SM, where that leaves each at least `least` logits.
    constexpr std::int64_t least = 2048;
    const std::int64_t     parts =
        std::clamp<std::int64_t>(2 * gpu.n_sms / std::max<std::int64_t>(rows, 1), 1, (cols + least - 1) / least);
    run_kernel(argmax_kernel, dim3(unsigned(rows), unsigned(parts)), parts > 1 ? 256u : 1024u, 0, gpu, logits, out,
               int(cols), reinterpret_cast<float2*>(gpu.tile_partial), gpu.tile_arrivals);
}

} // namespace quire::cuda
