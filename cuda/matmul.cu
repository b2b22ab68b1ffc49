// Products with few rows of x (decoding): bound by the bytes of the weights, so each is read once, in 16-byte words, and
// what is between is kept small. A warp computes one output row for all rows of x; the sum's order is fixed.
// Weights: halves, int8 with group scales, or Q4_K superblocks. cols is a multiple of 8 (halves), 32 (int8), 256 (Q4_K).
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "kernels.h"
#include "warp.cuh"

namespace quire::cuda {

namespace {

constexpr int warps = 8; // of a block

struct Products {
    Product product[most_products];
    int     first_row[most_products + 1]; // of the outputs, one product after another
    int     n;
};

__device__ uint4 load_once(const void* p) { // weights are not read again in this step: keep them out of L1
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

__device__ float2 as_float2(std::uint32_t h) { return __half22float2(*reinterpret_cast<const __half2*>(&h)); }

// Four bytes of int8, offset by 128 → floats: 0x4b000000 | u is 2^23 + u.
__device__ void as_floats(std::uint32_t q, float* f) {
    const std::uint32_t u = q ^ 0x80808080u;
    f[0]                  = __uint_as_float(__byte_perm(u, 0x4b000000u, 0x7440)) - 8388736.0f;
    f[1]                  = __uint_as_float(__byte_perm(u, 0x4b000000u, 0x7441)) - 8388736.0f;
    f[2]                  = __uint_as_float(__byte_perm(u, 0x4b000000u, 0x7442)) - 8388736.0f;
    f[3]                  = __uint_as_float(__byte_perm(u, 0x4b000000u, 0x7443)) - 8388736.0f;
}

template <int NT>
__device__ void dot_f16(const Weight& w, std::int64_t row, const __half* x, std::int64_t cols, float* sum) {
    const int     lane  = threadIdx.x % 32;
    const auto*   from  = static_cast<const __half*>(w.data) + row * cols;
    constexpr int ahead = NT <= 2 ? 4 : 2;
    for (std::int64_t base = lane * 8; base < cols; base += 256 * ahead) {
        uint4 v[ahead];
#pragma unroll
        for (int u = 0; u < ahead; u++)
            if (base + u * 256 < cols) v[u] = load_once(from + base + u * 256);
#pragma unroll
        for (int u = 0; u < ahead; u++) {
            const std::int64_t c = base + u * 256;
            if (c >= cols) break;
            const float2 a = as_float2(v[u].x), b = as_float2(v[u].y), d = as_float2(v[u].z), e = as_float2(v[u].w);
#pragma unroll
            for (int t = 0; t < NT; t++) {
                const uint4  xs = *reinterpret_cast<const uint4*>(x + t * cols + c);
                const float2 p = as_float2(xs.x), q = as_float2(xs.y), r = as_float2(xs.z), s = as_float2(xs.w);
                sum[t] += a.x * p.x + a.y * p.y + b.x * q.x + b.y * q.y + d.x * r.x + d.y * r.y + e.x * s.x + e.y * s.y;
            }
        }
    }
}

template <int NT, bool FloatScales, bool Mins>
__device__ void dot_i8(const Weight& w, std::int64_t row, const __half* x, std::int64_t cols, float* sum) {
    const int          lane   = threadIdx.x % 32;
    const auto*        from   = static_cast<const std::int8_t*>(w.data) + row * cols;
    const std::int64_t groups = cols / w.group, g0 = row * groups;
    constexpr int      ahead = NT <= 2 ? 4 : 2;
    for (std::int64_t base = lane * 16; base < cols; base += 512 * ahead) {
        uint4 v[ahead];
        float scale[ahead], min[ahead];
#pragma unroll
        for (int u = 0; u < ahead; u++) {
            const std::int64_t c = base + u * 512;
            if (c >= cols) break;
            v[u]                 = load_once(from + c);
            const std::int64_t g = g0 + c / w.group;
            scale[u]             = FloatScales ? static_cast<const float*>(w.scales)[g]
                                               : __half2float(static_cast<const __half*>(w.scales)[g]);
            min[u]               = Mins ? static_cast<const float*>(w.mins)[g] : 0.0f;
        }
#pragma unroll
        for (int u = 0; u < ahead; u++) {
            const std::int64_t c = base + u * 512;
            if (c >= cols) break;
            float q[16];
            as_floats(v[u].x, q);
            as_floats(v[u].y, q + 4);
            as_floats(v[u].z, q + 8);
            as_floats(v[u].w, q + 12);
#pragma unroll
            for (int t = 0; t < NT; t++) {
                const uint4*        at = reinterpret_cast<const uint4*>(x + t * cols + c);
                const uint4         xa = at[0], xb = at[1];
                const std::uint32_t words[8] = {xa.x, xa.y, xa.z, xa.w, xb.x, xb.y, xb.z, xb.w};
                float               part = 0, all = 0;
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const float2 p = as_float2(words[i]);
                    part += q[2 * i] * p.x + q[2 * i + 1] * p.y;
                    if (Mins) all += p.x + p.y;
                }
                sum[t] += scale[u] * part - (Mins ? min[u] * all : 0.0f);
            }
        }
    }
}

// Eight lanes share a superblock; lane i of them has 16 bytes: 16 weights of an even sub-block in the low nibbles, 16 of the
// odd one after it in the high ones.
template <int NT>
__device__ void dot_q4_k(const Weight& w, std::int64_t row, const __half* x, std::int64_t cols, float* sum) {
    const int          lane = threadIdx.x % 32, part = lane % 8, chunk = part / 2;
    const auto*        from  = static_cast<const unsigned char*>(w.data) + row * (cols / 256) * 144;
    const std::int64_t n     = cols / 256;
    constexpr int      ahead = 2;
    const __half2      magic = __half2(__ushort_as_half(0x6400), __ushort_as_half(0x6400)); // 1024
    for (std::int64_t base = lane / 8; base < n; base += 4 * ahead) {
        uint4 head[ahead], v[ahead];
#pragma unroll
        for (int u = 0; u < ahead; u++) {
            const std::int64_t s = base + u * 4;
            if (s >= n) break;
            head[u] = *reinterpret_cast<const uint4*>(from + s * 144);
            v[u]    = load_once(from + s * 144 + 16 + part * 16);
        }
#pragma unroll
        for (int u = 0; u < ahead; u++) {
            const std::int64_t s = base + u * 4;
            if (s >= n) break;
            const float2 d = as_float2(head[u].x); // d, dmin
            int          scale[2], min[2];
            {
                const std::uint32_t a = head[u].y, b = head[u].z, c = head[u].w; // scales 0..3, 4..7, 8..11
                const int           at = 8 * (2 * chunk % 4);                    // of the even sub-block in a word
                if (chunk < 2) {
                    scale[0] = a >> at & 63, scale[1] = a >> (at + 8) & 63;
                    min[0] = b >> at & 63, min[1] = b >> (at + 8) & 63;
                } else {
                    scale[0] = (c >> at & 15) | (a >> (at + 6) & 3) << 4;
                    scale[1] = (c >> (at + 8) & 15) | (a >> (at + 14) & 3) << 4;
                    min[0]   = (c >> (at + 4) & 15) | (b >> (at + 6) & 3) << 4;
                    min[1]   = (c >> (at + 12) & 15) | (b >> (at + 14) & 3) << 4;
                }
            }
            const std::uint32_t words[4] = {v[u].x, v[u].y, v[u].z, v[u].w};
            const std::int64_t  c0       = s * 256 + chunk * 64 + part % 2 * 16;
#pragma unroll
            for (int t = 0; t < NT; t++) {
#pragma unroll
                for (int high = 0; high < 2; high++) {
                    const uint4*        at = reinterpret_cast<const uint4*>(x + t * cols + c0 + high * 32);
                    const uint4         xa = at[0], xb = at[1];
                    const std::uint32_t xs[8] = {xa.x, xa.y, xa.z, xa.w, xb.x, xb.y, xb.z, xb.w};
                    // Nibbles of bytes 0 and 2, then of 1 and 3, as halves 1024 + q: x is paired the same way.
                    __half2 products = __half2(__ushort_as_half(0), __ushort_as_half(0)), all = products;
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const std::uint32_t q = words[i] >> (high * 4);
                        std::uint32_t q0 = (q & 0x000f000fu) | 0x64006400u, q1 = (q >> 8 & 0x000f000fu) | 0x64006400u;
                        const std::uint32_t x0 = __byte_perm(xs[2 * i], xs[2 * i + 1], 0x5410),
                                            x1 = __byte_perm(xs[2 * i], xs[2 * i + 1], 0x7632);
                        const __half2 h0       = *reinterpret_cast<const __half2*>(&x0),
                                      h1       = *reinterpret_cast<const __half2*>(&x1);
                        products = __hfma2(__hsub2(*reinterpret_cast<__half2*>(&q0), magic), h0, products);
                        products = __hfma2(__hsub2(*reinterpret_cast<__half2*>(&q1), magic), h1, products);
                        all      = __hadd2(all, __hadd2(h0, h1));
                    }
                    const float2 p = __half22float2(products), a = __half22float2(all);
                    sum[t] += d.x * float(scale[high]) * (p.x + p.y) - d.y * float(min[high]) * (a.x + a.y);
                }
            }
        }
    }
}

enum Kind { kind_f16, kind_i8, kind_i8_float, kind_i8_float_min, kind_q4_k };

template <int NT, Kind K>
__global__ void __launch_bounds__(warps * 32)
    vector_kernel(const __half* x, int n_rows, std::int64_t cols, Products all) {
    const int row = int(blockIdx.x) * warps + int(threadIdx.x) / 32;
    if (row >= all.first_row[all.n]) return;
    int which = 0;
    while (row >= all.first_row[which + 1]) which++;
    const Product&     p       = all.product[which];
    const std::int64_t r       = row - all.first_row[which];
    float              sum[NT] = {};
    if constexpr (K == kind_f16) dot_f16<NT>(p.weight, r, x, cols, sum);
    if constexpr (K == kind_i8) dot_i8<NT, false, false>(p.weight, r, x, cols, sum);
    if constexpr (K == kind_i8_float) dot_i8<NT, true, false>(p.weight, r, x, cols, sum);
    if constexpr (K == kind_i8_float_min) dot_i8<NT, true, true>(p.weight, r, x, cols, sum);
    if constexpr (K == kind_q4_k) dot_q4_k<NT>(p.weight, r, x, cols, sum);
#pragma unroll
    for (int t = 0; t < NT; t++) {
        const float total = warp_sum(sum[t]) + (p.bias ? p.bias[r] : 0.0f);
        if (threadIdx.x % 32 != 0 || t >= n_rows) continue;
        const std::int64_t at = t * p.weight.rows + r;
        if (p.out_is_float) static_cast<float*>(p.out)[at] = total;
        else static_cast<__half*>(p.out)[at] = __float2half(total);
    }
}

Kind kind_of(const Weight& w) {
    if (w.form == WeightForm::f16) return kind_f16;
    if (w.form == WeightForm::q4_k) return kind_q4_k;
    return !w.float_scales ? kind_i8 : w.mins ? kind_i8_float_min : kind_i8_float;
}

template <int NT>
void launch(Kind kind, const __half* x, int n_rows, std::int64_t cols, const Products& all, cudaStream_t stream) {
    const unsigned blocks = unsigned((all.first_row[all.n] + warps - 1) / warps);
    switch (kind) {
        case kind_f16: vector_kernel<NT, kind_f16><<<blocks, warps * 32, 0, stream>>>(x, n_rows, cols, all); break;
        case kind_i8: vector_kernel<NT, kind_i8><<<blocks, warps * 32, 0, stream>>>(x, n_rows, cols, all); break;
        case kind_i8_float:
            vector_kernel<NT, kind_i8_float><<<blocks, warps * 32, 0, stream>>>(x, n_rows, cols, all);
            break;
        case kind_i8_float_min:
            vector_kernel<NT, kind_i8_float_min><<<blocks, warps * 32, 0, stream>>>(x, n_rows, cols, all);
            break;
        case kind_q4_k: vector_kernel<NT, kind_q4_k><<<blocks, warps * 32, 0, stream>>>(x, n_rows, cols, all); break;
    }
}

} // namespace

// x has room for n_rows rounded up to 1, 2, 4 or 8 rows; what is in those beyond n_rows does not matter.
void matmul_vector(const Half* x_, int n_rows, std::int64_t cols, const Product* products, int n_products,
                   Stream stream) {
    const auto* x = reinterpret_cast<const __half*>(x_);
    for (int i = 0; i < n_products;) {
        // Neighbours of one form go together.
        Products   all{};
        const Kind kind = kind_of(products[i].weight);
        for (; i < n_products && all.n < most_products && kind_of(products[i].weight) == kind; i++) {
            all.product[all.n]       = products[i];
            all.first_row[all.n + 1] = all.first_row[all.n] + int(products[i].weight.rows);
            all.n++;
        }
        auto s = static_cast<cudaStream_t>(stream);
        if (n_rows <= 1) launch<1>(kind, x, n_rows, cols, all, s);
        else if (n_rows <= 2) launch<2>(kind, x, n_rows, cols, all, s);
        else if (n_rows <= 4) launch<4>(kind, x, n_rows, cols, all, s);
        else launch<8>(kind, x, n_rows, cols, all, s);
    }
}

} // namespace quire::cuda
