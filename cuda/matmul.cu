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

// Each function adds to sum[r][t] the products of row + r, r < R, and row t of x. Lanes take neighbouring words; R rows
// share what is read and converted of x. Columns fit an int: no wider arithmetic in the loops.

template <int NT, int R>
__device__ void dot_f16(const Weight& w, std::int64_t row, const __half* x, int cols, float (&sum)[R][NT]) {
    const int     lane  = threadIdx.x % 32;
    const auto*   from  = static_cast<const __half*>(w.data) + row * cols;
    constexpr int ahead = NT <= 2 ? 4 : 2;
    for (int base = lane * 8; base < cols; base += 256 * ahead) {
        uint4 v[R][ahead];
#pragma unroll
        for (int u = 0; u < ahead; u++)
#pragma unroll
            for (int r = 0; r < R; r++)
                if (base + u * 256 < cols) v[r][u] = load_once(from + r * cols + base + u * 256);
#pragma unroll
        for (int u = 0; u < ahead; u++) {
            const int c = base + u * 256;
            if (c >= cols) break;
#pragma unroll
            for (int t = 0; t < NT; t++) {
                const uint4  xs = *reinterpret_cast<const uint4*>(x + t * cols + c);
                const float2 p = as_float2(xs.x), q = as_float2(xs.y), m = as_float2(xs.z), n = as_float2(xs.w);
#pragma unroll
                for (int r = 0; r < R; r++) {
                    const float2 a = as_float2(v[r][u].x), b = as_float2(v[r][u].y), d = as_float2(v[r][u].z),
                                 e = as_float2(v[r][u].w);
                    sum[r][t] +=
                        a.x * p.x + a.y * p.y + b.x * q.x + b.y * q.y + d.x * m.x + d.y * m.y + e.x * n.x + e.y * n.y;
                }
            }
        }
    }
}

template <int NT, int R, int Group, bool FloatScales, bool Mins>
__device__ void dot_i8(const Weight& w, std::int64_t row, const __half* x, int cols, float (&sum)[R][NT]) {
    const int          lane   = threadIdx.x % 32;
    const auto*        from   = static_cast<const std::int8_t*>(w.data) + row * cols;
    const int          groups = cols / Group;
    const std::int64_t g0     = row * groups;
    constexpr int      ahead  = NT <= 2 ? 4 / R : 1;
    for (int base = lane * 16; base < cols; base += 512 * ahead) {
        uint4 v[R][ahead];
        float scale[R][ahead], min[R][ahead];
#pragma unroll
        for (int u = 0; u < ahead; u++)
#pragma unroll
            for (int r = 0; r < R; r++) {
                const int c = base + u * 512;
                if (c >= cols) break;
                v[r][u]              = load_once(from + r * cols + c);
                const std::int64_t g = g0 + r * groups + c / Group;
                scale[r][u]          = FloatScales ? static_cast<const float*>(w.scales)[g]
                                                   : __half2float(static_cast<const __half*>(w.scales)[g]);
                min[r][u]            = Mins ? static_cast<const float*>(w.mins)[g] : 0.0f;
            }
#pragma unroll
        for (int u = 0; u < ahead; u++) {
            const int c = base + u * 512;
            if (c >= cols) break;
#pragma unroll
            for (int t = 0; t < NT; t++) {
                const uint4*        at = reinterpret_cast<const uint4*>(x + t * cols + c);
                const uint4         xa = at[0], xb = at[1];
                const std::uint32_t words[8] = {xa.x, xa.y, xa.z, xa.w, xb.x, xb.y, xb.z, xb.w};
                float               xs[16], all = 0;
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const float2 p = as_float2(words[i]);
                    xs[2 * i] = p.x, xs[2 * i + 1] = p.y;
                    if (Mins) all += p.x + p.y;
                }
#pragma unroll
                for (int r = 0; r < R; r++) {
                    const std::uint32_t qs[4] = {v[r][u].x, v[r][u].y, v[r][u].z, v[r][u].w};
                    float               part  = 0;
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float q[4];
                        as_floats(qs[i], q);
                        part += q[0] * xs[4 * i] + q[1] * xs[4 * i + 1] + q[2] * xs[4 * i + 2] + q[3] * xs[4 * i + 3];
                    }
                    sum[r][t] += scale[r][u] * part - (Mins ? min[r][u] * all : 0.0f);
                }
            }
        }
    }
}

// Eight lanes share a superblock; lane i of them has 16 bytes: 16 weights of an even sub-block in the low nibbles, 16 of the
// odd one after it in the high ones.
template <int NT, int R>
__device__ void dot_q4_k(const Weight& w, std::int64_t row, const __half* x, int cols, float (&sum)[R][NT]) {
    const int     lane = threadIdx.x % 32, part = lane % 8, chunk = part / 2, n = cols / 256, row_bytes = n * 144;
    const auto*   from  = static_cast<const unsigned char*>(w.data) + row * row_bytes;
    constexpr int ahead = NT <= 1 ? 4 / R : 1;
    const __half2 magic = __half2(__ushort_as_half(0x6400), __ushort_as_half(0x6400)); // 1024
    for (int base = lane / 8; base < n; base += 4 * ahead) {
        uint4 head[R][ahead], v[R][ahead];
#pragma unroll
        for (int u = 0; u < ahead; u++)
#pragma unroll
            for (int r = 0; r < R; r++) {
                const int s = base + u * 4;
                if (s >= n) break;
                v[r][u]    = load_once(from + r * row_bytes + s * 144 + 16 + part * 16);
                head[r][u] = *reinterpret_cast<const uint4*>(from + r * row_bytes + s * 144);
            }
#pragma unroll
        for (int u = 0; u < ahead; u++) {
            const int s = base + u * 4;
            if (s >= n) break;
            float scale[R][2], min[R][2];
#pragma unroll
            for (int r = 0; r < R; r++) {
                const float2        d = as_float2(head[r][u].x);                          // d, dmin
                const std::uint32_t a = head[r][u].y, b = head[r][u].z, c = head[r][u].w; // scales 0..3, 4..7, 8..11
                const int           at = 8 * (2 * chunk % 4); // of the even sub-block in a word
                int                 s0, s1, m0, m1;
                if (chunk < 2) {
                    s0 = a >> at & 63, s1 = a >> (at + 8) & 63;
                    m0 = b >> at & 63, m1 = b >> (at + 8) & 63;
                } else {
                    s0 = (c >> at & 15) | (a >> (at + 6) & 3) << 4;
                    s1 = (c >> (at + 8) & 15) | (a >> (at + 14) & 3) << 4;
                    m0 = (c >> (at + 4) & 15) | (b >> (at + 6) & 3) << 4;
                    m1 = (c >> (at + 12) & 15) | (b >> (at + 14) & 3) << 4;
                }
                scale[r][0] = d.x * float(s0), scale[r][1] = d.x * float(s1);
                min[r][0] = d.y * float(m0), min[r][1] = d.y * float(m1);
            }
            const int c0 = s * 256 + chunk * 64 + part % 2 * 16;
#pragma unroll
            for (int t = 0; t < NT; t++) {
#pragma unroll
                for (int high = 0; high < 2; high++) {
                    const uint4*        at = reinterpret_cast<const uint4*>(x + t * cols + c0 + high * 32);
                    const uint4         xa = at[0], xb = at[1];
                    const std::uint32_t xs[8] = {xa.x, xa.y, xa.z, xa.w, xb.x, xb.y, xb.z, xb.w};
                    // Nibbles of bytes 0 and 2, then of 1 and 3, as halves 1024 + q: x is paired the same way.
                    __half2 pairs[8], all = __half2(__ushort_as_half(0), __ushort_as_half(0));
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const std::uint32_t x0 = __byte_perm(xs[2 * i], xs[2 * i + 1], 0x5410),
                                            x1 = __byte_perm(xs[2 * i], xs[2 * i + 1], 0x7632);
                        pairs[2 * i]           = *reinterpret_cast<const __half2*>(&x0);
                        pairs[2 * i + 1]       = *reinterpret_cast<const __half2*>(&x1);
                        all                    = __hadd2(all, __hadd2(pairs[2 * i], pairs[2 * i + 1]));
                    }
                    const float2 a = __half22float2(all);
#pragma unroll
                    for (int r = 0; r < R; r++) {
                        const std::uint32_t qs[4]    = {v[r][u].x, v[r][u].y, v[r][u].z, v[r][u].w};
                        __half2             products = __half2(__ushort_as_half(0), __ushort_as_half(0));
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                            const std::uint32_t q  = qs[i] >> (high * 4);
                            std::uint32_t       q0 = (q & 0x000f000fu) | 0x64006400u,
                                          q1       = (q >> 8 & 0x000f000fu) | 0x64006400u;
                            products =
                                __hfma2(__hsub2(*reinterpret_cast<__half2*>(&q0), magic), pairs[2 * i], products);
                            products =
                                __hfma2(__hsub2(*reinterpret_cast<__half2*>(&q1), magic), pairs[2 * i + 1], products);
                        }
                        const float2 p = __half22float2(products);
                        sum[r][t] += scale[r][high] * (p.x + p.y) - min[r][high] * (a.x + a.y);
                    }
                }
            }
        }
    }
}

enum Kind { kind_f16, kind_i8, kind_i8_float, kind_i8_float_min, kind_q4_k };

// R neighbouring rows a warp; products have a multiple of R rows.
template <int NT, Kind K, int R>
__global__ void __launch_bounds__(warps * 32, NT == 1 ? (K == kind_f16 ? 6 : 4) : 2)
    vector_kernel(const __half* x, int n_rows, int cols, Products all) {
    const int row = (int(blockIdx.x) * warps + int(threadIdx.x) / 32) * R;
    if (row >= all.first_row[all.n]) {
        wait_for_inputs(); // every block takes part in the order of launches
        return;
    }
    int which = 0;
    while (row >= all.first_row[which + 1]) which++;
    const Product&     p          = all.product[which];
    const std::int64_t r0         = row - all.first_row[which];
    float              sum[R][NT] = {};
    wait_for_inputs();
    if constexpr (K == kind_f16) dot_f16<NT, R>(p.weight, r0, x, cols, sum);
    if constexpr (K == kind_i8) dot_i8<NT, R, 32, false, false>(p.weight, r0, x, cols, sum);
    if constexpr (K == kind_i8_float) dot_i8<NT, R, 16, true, false>(p.weight, r0, x, cols, sum);
    if constexpr (K == kind_i8_float_min) dot_i8<NT, R, 32, true, true>(p.weight, r0, x, cols, sum);
    if constexpr (K == kind_q4_k) dot_q4_k<NT, R>(p.weight, r0, x, cols, sum);
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int t = 0; t < NT; t++) {
            const float total = warp_sum(sum[r][t]) + (p.bias ? p.bias[r0 + r] : 0.0f);
            if (threadIdx.x % 32 != 0 || t >= n_rows) continue;
            const std::int64_t at = t * p.weight.rows + r0 + r;
            if (p.out_is_float) static_cast<float*>(p.out)[at] = total;
            else static_cast<__half*>(p.out)[at] = __float2half(total);
        }
}

// The first words of a warp's rows, while the kernel before is still busy: weights depend on nobody.
// (Where a warp has one pair of rows and no more, as in the kernel above, it was slower.)
__device__ void prefetch_q4_k(const Weight& w, std::int64_t row, int cols) {
    const int   bytes = cols / 256 * 144;
    const auto* from  = static_cast<const char*>(w.data) + row * bytes;
    for (int at = threadIdx.x % 32 * 128; at < min(2 * bytes, 4096); at += 4096)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(from + at));
}

// -- one row of x and Q4_K weights, in whole numbers

// x as 16-bit integers with a scale for each 32 of them, split into a signed high and an unsigned low byte: dp4a then
// multiplies four weights at once, exactly, and what is lost of x is less than of a half. Blocks stay and take one pair of
// rows after another, so x is made ready once a block.
__global__ void __launch_bounds__(warps * 32, 3) integer_kernel(const __half* x, int cols, Products all) {
    extern __shared__ __align__(16) unsigned char memory[];
    auto*     high  = reinterpret_cast<std::uint32_t*>(memory); // [cols / 4] four bytes each
    auto*     low   = high + cols / 4;                          // [cols / 4]
    auto*     scale = reinterpret_cast<float*>(low + cols / 4); // [cols / 32]
    auto*     total = scale + cols / 32;                        // [cols / 32 · 2]: Σ x of each 16
    const int lane = threadIdx.x % 32, n_rows = all.first_row[all.n], n_warps = int(gridDim.x) * warps;
    const int first = (int(blockIdx.x) * warps + int(threadIdx.x) / 32) * 2;
    if (first < n_rows) {
        const Product& p = all.product[first < all.first_row[1] ? 0 : first < all.first_row[2] ? 1 : 2];
        prefetch_q4_k(p.weight, first - all.first_row[&p - all.product], cols);
    }
    wait_for_inputs();
    for (int g = threadIdx.x; g < cols / 8; g += warps * 32) { // 8 values a thread, four threads a group of 32
        const uint4         v        = *reinterpret_cast<const uint4*>(x + g * 8);
        const std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
        float               f[8], most = 0, sum = 0;
        for (int k = 0; k < 4; k++) {
            const float2 pair = as_float2(words[k]);
            f[2 * k] = pair.x, f[2 * k + 1] = pair.y;
            most = fmaxf(most, fmaxf(fabsf(pair.x), fabsf(pair.y)));
            sum += pair.x + pair.y;
        }
        const unsigned four = 0xfu << (lane & 28);
        most                = fmaxf(most, __shfl_xor_sync(four, most, 1));
        most                = fmaxf(most, __shfl_xor_sync(four, most, 2));
        sum += __shfl_xor_sync(four, sum, 1);
        const float   inverse = most > 0 ? 32512.0f / most : 0.0f; // so that the high byte stays below 128
        std::uint32_t h[2] = {}, l[2] = {};
        for (int k = 0; k < 8; k++) {
            const int n = __float2int_rn(f[k] * inverse);
            h[k / 4] |= std::uint32_t(n >> 8 & 255) << (8 * (k % 4));
            l[k / 4] |= std::uint32_t(n & 255) << (8 * (k % 4));
        }
        high[2 * g] = h[0], high[2 * g + 1] = h[1];
        low[2 * g] = l[0], low[2 * g + 1] = l[1];
        if (g % 4 == 0) scale[g / 4] = most / 32512.0f;
        if (g % 2 == 0) total[g / 2] = sum;
    }
    __syncthreads();
    for (int row = first; row < n_rows; row += n_warps * 2) {
        int which = 0;
        while (row >= all.first_row[which + 1]) which++;
        const Product&     p      = all.product[which];
        const std::int64_t r0     = row - all.first_row[which];
        float              sum[2] = {};
        {
            const int n = cols / 256, row_bytes = n * 144, part = lane % 8, chunk = part / 2, at = 8 * (2 * chunk % 4);
            const auto* from = static_cast<const unsigned char*>(p.weight.data) + r0 * row_bytes;
            for (int base = lane / 8; base < n; base += 8) {
                uint4 v[2][2], head[2][2];
#pragma unroll
                for (int u = 0; u < 2; u++)
#pragma unroll
                    for (int r = 0; r < 2; r++)
                        if (base + 4 * u < n) {
                            v[u][r]    = load_once(from + r * row_bytes + (base + 4 * u) * 144 + 16 + part * 16);
                            head[u][r] = *reinterpret_cast<const uint4*>(from + r * row_bytes + (base + 4 * u) * 144);
                        }
#pragma unroll
                for (int u = 0; u < 2; u++) {
                    const int s = base + 4 * u;
                    if (s >= n) break;
                    const int   c = s * 256 + chunk * 64 + part % 2 * 16; // of the even sub-block; the odd one is 32 on
                    const uint4 h0 = *reinterpret_cast<const uint4*>(high + c / 4),
                                h1 = *reinterpret_cast<const uint4*>(high + c / 4 + 8);
                    const uint4 l0 = *reinterpret_cast<const uint4*>(low + c / 4),
                                l1 = *reinterpret_cast<const uint4*>(low + c / 4 + 8);
                    const float x0 = scale[c / 32], x1 = scale[c / 32 + 1], t0 = total[c / 16], t1 = total[c / 16 + 2];
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        const float2        d = as_float2(head[u][r].x);
                        const std::uint32_t a = head[u][r].y, b = head[u][r].z, e = head[u][r].w;
                        // Of a word's two bytes here: scales and minima of the even and the odd sub-block.
                        const std::uint32_t sc =
                            chunk < 2 ? a >> at & 0x3f3f : (e >> at & 0x0f0f) | (a >> (at + 2) & 0x3030);
                        const std::uint32_t mi =
                            chunk < 2 ? b >> at & 0x3f3f : (e >> (at + 4) & 0x0f0f) | (b >> (at + 2) & 0x3030);
                        const uint4         w     = v[u][r];
                        const std::uint32_t n0[4] = {w.x & 0x0f0f0f0fu, w.y & 0x0f0f0f0fu, w.z & 0x0f0f0f0fu,
                                                     w.w & 0x0f0f0f0fu};
                        const std::uint32_t n1[4] = {w.x >> 4 & 0x0f0f0f0fu, w.y >> 4 & 0x0f0f0f0fu,
                                                     w.z >> 4 & 0x0f0f0f0fu, w.w >> 4 & 0x0f0f0f0fu};
                        const int           i0    = __dp4a(int(n0[3]), int(h0.w),
                                                           __dp4a(int(n0[2]), int(h0.z),
                                                                  __dp4a(int(n0[1]), int(h0.y), __dp4a(int(n0[0]), int(h0.x), 0))));
                        const int           i1    = __dp4a(int(n1[3]), int(h1.w),
                                                           __dp4a(int(n1[2]), int(h1.z),
                                                                  __dp4a(int(n1[1]), int(h1.y), __dp4a(int(n1[0]), int(h1.x), 0))));
                        const unsigned      j0 =
                            __dp4a(n0[3], l0.w, __dp4a(n0[2], l0.z, __dp4a(n0[1], l0.y, __dp4a(n0[0], l0.x, 0u))));
                        const unsigned j1 =
                            __dp4a(n1[3], l1.w, __dp4a(n1[2], l1.z, __dp4a(n1[1], l1.y, __dp4a(n1[0], l1.x, 0u))));
                        const float f0 = x0 * float(i0 * 256 + int(j0)) * float(sc & 255),
                                    f1 = x1 * float(i1 * 256 + int(j1)) * float(sc >> 8);
                        sum[r] += d.x * (f0 + f1) - d.y * (t0 * float(mi & 255) + t1 * float(mi >> 8));
                    }
                }
            }
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float value = warp_sum(sum[r]) + (p.bias ? p.bias[r0 + r] : 0.0f);
            if (lane != 0) continue;
            if (p.out_is_float) static_cast<float*>(p.out)[r0 + r] = value;
            else static_cast<__half*>(p.out)[r0 + r] = __float2half(value);
        }
    }
}

void launch_integer(const __half* x, int cols, const Products& all, cudaStream_t stream) {
    static const int processors = [] {
        int device = 0, n = 0;
        cudaGetDevice(&device);
        cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, device);
        cudaFuncSetAttribute(integer_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 100 * 1024);
        return n;
    }();
    const std::size_t shared = std::size_t(cols) * 2 + std::size_t(cols / 32) * 12;
    const int         most = processors * 3, wanted = (all.first_row[all.n] / 2 + warps - 1) / warps;
    // Whole rounds: every block gets as many pairs of rows as any other, give or take one.
    const int rounds = (wanted + most - 1) / most;
    run_kernel(integer_kernel, dim3(unsigned((wanted + rounds - 1) / rounds)), warps * 32, shared, stream, x, cols,
               all);
}

Kind kind_of(const Weight& w) {
    if (w.form == WeightForm::f16) return kind_f16;
    if (w.form == WeightForm::q4_k) return kind_q4_k;
    return !w.float_scales ? kind_i8 : w.mins ? kind_i8_float_min : kind_i8_float;
}

template <int NT, int R>
void launch(Kind kind, const __half* x, int n_rows, int cols, const Products& all, cudaStream_t stream) {
    const unsigned blocks = unsigned((all.first_row[all.n] / R + warps - 1) / warps);
    const auto     run    = [&](auto kernel) {
        run_kernel(kernel, dim3(blocks), warps * 32, 0, stream, x, n_rows, cols, all);
    };
    switch (kind) {
        case kind_f16: run(vector_kernel<NT, kind_f16, R>); break;
        case kind_i8: run(vector_kernel<NT, kind_i8, R>); break;
        case kind_i8_float: run(vector_kernel<NT, kind_i8_float, R>); break;
        case kind_i8_float_min: run(vector_kernel<NT, kind_i8_float_min, R>); break;
        case kind_q4_k: run(vector_kernel<NT, kind_q4_k, R>); break;
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
        auto      s    = static_cast<cudaStream_t>(stream);
        const int c    = int(cols);
        bool      even = kind != kind_f16; // two rows a warp share the conversions of x
        for (int k = 0; k < all.n; k++) even = even && all.product[k].weight.rows % 2 == 0;
        for (int k = all.n + 1; k <= most_products; k++) all.first_row[k] = all.first_row[all.n];
        if (n_rows <= 1 && even && c <= 32768 && kind == kind_q4_k) launch_integer(x, c, all, s);
        else if (n_rows <= 1)
            even ? launch<1, 2>(kind, x, n_rows, c, all, s) : launch<1, 1>(kind, x, n_rows, c, all, s);
        else if (n_rows <= 2)
            even ? launch<2, 2>(kind, x, n_rows, c, all, s) : launch<2, 1>(kind, x, n_rows, c, all, s);
        else if (n_rows <= 4)
            even ? launch<4, 2>(kind, x, n_rows, c, all, s) : launch<4, 1>(kind, x, n_rows, c, all, s);
        else even ? launch<8, 2>(kind, x, n_rows, c, all, s) : launch<8, 1>(kind, x, n_rows, c, all, s);
    }
}

} // namespace quire::cuda
