// Products with one row of x on Hopper: nothing but a stream of weights. Each warp has a ring in shared memory, filled by bulk
// copies that its first lane begins some stages ahead; a stage is the same stretch of columns of two neighbouring rows. The
// rings are full before x is there: what the memory does not read while small kernels run, it never catches up with.
//
// x as it is for halves; for whole numbers as 16-bit integers with a scale, in two bytes, so that dp4a multiplies four weights at
// once: exact, and less of x is lost than by a half.
//
// Limits: rows of every product are even (Gated: alike); cols is a multiple of 8 (halves) or 256; pointers are multiples of 16.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <utility>

#include "bulk.cuh"
#include "kernels.h"
#include "matmul.cuh"
#include "warp.cuh"

namespace quire::cuda {

namespace {

constexpr int stages        = 4;
constexpr int shared_budget = 200 * 1024; // leaves room on a processor for the small kernels beside it

// Columns that a warp takes at a time.
constexpr __host__ __device__ int unit_cols(Kind k) { return k == kind_f16 ? 256 : k == kind_q4_k ? 1024 : 512; }
constexpr __host__ __device__ int warps_of(Kind k) { return k == kind_q4_k ? 16 : 8; }
// Bytes of some columns of a row.
constexpr __host__ __device__ int data_bytes(Kind k, int cols) {
    return k == kind_f16 ? cols * 2 : k == kind_q4_k ? cols / 256 * 144 : cols;
}
constexpr __host__ __device__ int scale_bytes(Kind k, int cols) {
    return k == kind_i8 ? cols / 16 : k == kind_i8_float ? cols / 4 : k == kind_i8_float_min ? cols / 8 : 0;
}
constexpr __host__ __device__ int min_bytes(Kind k, int cols) { return k == kind_i8_float_min ? cols / 8 : 0; }
constexpr __host__ __device__ int row_bytes(Kind k, int cols) {
    return data_bytes(k, cols) + scale_bytes(k, cols) + min_bytes(k, cols);
}
constexpr int x_bytes(Kind k, int cols) { // integers, scales, sums
    return k == kind_f16 ? cols * 2 : cols * 2 + (k == kind_q4_k ? cols / 64 : cols / 32) * 4 + cols / 16 * 4;
}

#if __CUDA_ARCH__ >= 900

struct Integers {
    unsigned char *high, *low; // [cols]
    float*         scale;      // [cols / 32], or of 64 for Q4_K
    int*           total;      // [cols / 16]: Σ of 16 neighbours
};

__device__ Integers integers_in(unsigned char* memory, Kind kind, int cols) {
    Integers to;
    to.high  = memory;
    to.low   = memory + cols;
    to.scale = reinterpret_cast<float*>(memory + 2 * cols);
    to.total = reinterpret_cast<int*>(to.scale + (kind == kind_q4_k ? cols / 64 : cols / 32));
    return to;
}

// use(g, word g of x), by all threads of a block. Some words are asked for at once: one after another they would take as long as
// a product of few rows.
template <class Use>
__device__ void each_word(const __half* x, int n, const Use& use) {
    constexpr int at_once = 4;
    for (int first = threadIdx.x; first < n; first += at_once * int(blockDim.x)) {
        uint4 v[at_once];
#pragma unroll
        for (int k = 0; k < at_once; k++)
            if (const int g = first + k * int(blockDim.x); g < n) v[k] = reinterpret_cast<const uint4*>(x)[g];
#pragma unroll
        for (int k = 0; k < at_once; k++)
            if (const int g = first + k * int(blockDim.x); g < n) use(g, v[k]);
    }
}

// By all threads of a block. For Q4_K the 16 values that lane i of eight multiplies with low nibbles stand at 16·i of a
// superblock's 256, those for the high ones at 128 + 16·i: then lanes meet no bank twice.
template <Kind K>
__device__ void prepare_integers(const __half* x, int cols, const Integers& to) {
    constexpr int lanes = K == kind_q4_k ? 8 : 4; // that share a scale, 8 values each
    each_word(x, cols / 8, [&](int g, const uint4& v) {
        const std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
        float               f[8], most = 0;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float2 pair = as_float2(words[k]);
            f[2 * k] = pair.x, f[2 * k + 1] = pair.y;
            most = fmaxf(most, fmaxf(fabsf(pair.x), fabsf(pair.y)));
        }
#pragma unroll
        for (int step = 1; step < lanes; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
        const float   inverse = most > 0 ? 32512.0f / most : 0.0f; // so that the high byte stays below 128
        std::uint32_t h[2] = {}, l[2] = {};
        int           sum = 0;
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const int n = __float2int_rn(f[k] * inverse);
            sum += n;
            h[k / 4] |= std::uint32_t(n >> 8 & 255) << (8 * (k % 4));
            l[k / 4] |= std::uint32_t(n & 255) << (8 * (k % 4));
        }
        sum += __shfl_xor_sync(~0u, sum, 1);
        int at = g * 8, total = g / 2;
        if (K == kind_q4_k) {
            const int in = at % 256, part = in / 64 * 2 + in % 32 / 16, high = in % 64 / 32;
            at    = at / 256 * 256 + high * 128 + part * 16 + in % 16;
            total = g / 32 * 16 + part * 2 + high;
        }
        *reinterpret_cast<uint2*>(to.high + at) = make_uint2(h[0], h[1]);
        *reinterpret_cast<uint2*>(to.low + at)  = make_uint2(l[0], l[1]);
        if (g % lanes == 0) to.scale[g / lanes] = most / 32512.0f;
        if (g % 2 == 0) to.total[total] = sum;
    });
}

__device__ int dot4(std::uint32_t weights, std::uint32_t x, int sum) { return __dp4a(int(weights), int(x), sum); }
__device__ int dot4_unsigned(std::uint32_t weights, std::uint32_t x, int sum) { // signed weights, unsigned x
    int out;
    asm("dp4a.s32.u32 %0, %1, %2, %3;" : "=r"(out) : "r"(weights), "r"(x), "r"(sum));
    return out;
}
__device__ int dot16(const uint4& w, const uint4& high, const uint4& low) {
    const int h = dot4(w.w, high.w, dot4(w.z, high.z, dot4(w.y, high.y, dot4(w.x, high.x, 0))));
    const int l =
        dot4_unsigned(w.w, low.w, dot4_unsigned(w.z, low.z, dot4_unsigned(w.y, low.y, dot4_unsigned(w.x, low.x, 0))));
    return h * 256 + l;
}
__device__ uint4 low_nibbles(const uint4& v) {
    return make_uint4(v.x & 0x0f0f0f0f, v.y & 0x0f0f0f0f, v.z & 0x0f0f0f0f, v.w & 0x0f0f0f0f);
}
__device__ uint4 high_nibbles(const uint4& v) {
    return make_uint4(v.x >> 4 & 0x0f0f0f0f, v.y >> 4 & 0x0f0f0f0f, v.z >> 4 & 0x0f0f0f0f, v.w >> 4 & 0x0f0f0f0f);
}
__device__ uint4 word_at(const void* p) { return *static_cast<const uint4*>(p); }

// sum[r] += the products of one stage: `from`: data of both rows `data` bytes apart, then scales, then minima;
// columns base .. base + n of x, which is halves or Integers.
template <Kind K>
__device__ void add_stage(const unsigned char* from, int full, const unsigned char* x, const Integers& integers,
                          int base, int n, float (&sum)[2]) {
    const int            lane   = threadIdx.x % 32;
    const int            data   = data_bytes(K, full);
    const unsigned char* scales = from + 2 * data;
    const unsigned char* mins   = scales + 2 * scale_bytes(K, full);
    if constexpr (K == kind_f16) {
#pragma unroll 4
        for (int c = lane * 8; c < n; c += 256) {
            const uint4  xs = word_at(x + (base + c) * 2);
            const float2 p = as_float2(xs.x), q = as_float2(xs.y), s = as_float2(xs.z), t = as_float2(xs.w);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const uint4  w = word_at(from + r * data + c * 2);
                const float2 a = as_float2(w.x), b = as_float2(w.y), d = as_float2(w.z), e = as_float2(w.w);
                sum[r] += a.x * p.x + a.y * p.y + b.x * q.x + b.y * q.y + d.x * s.x + d.y * s.y + e.x * t.x + e.y * t.y;
            }
        }
    } else if constexpr (K == kind_q4_k) {
        const int part = lane % 8, chunk = part / 2, shift = 8 * (2 * chunk % 4);
#pragma unroll 2
        for (int s = lane / 8; s < n / 256; s += 4) {
            const int   at = base + s * 256 + part * 16;
            const uint4 h0 = word_at(integers.high + at), h1 = word_at(integers.high + at + 128),
                        l0 = word_at(integers.low + at), l1 = word_at(integers.low + at + 128);
            const int2  t  = *reinterpret_cast<const int2*>(integers.total + (base / 16 + s * 16) + part * 2);
            const float by = integers.scale[base / 64 + s * 4 + chunk];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const unsigned char* block = from + r * data + s * 144;
                const uint4          head = word_at(block), w = word_at(block + 16 + part * 16);
                const float2         d = as_float2(head.x);
                // Of a word's two bytes here: scales and minima of the even and the odd sub-block.
                const std::uint32_t a = head.y >> shift, b = head.z >> shift, e = head.w >> shift;
                const std::uint32_t sc = chunk < 2 ? a & 0x3f3f : (e & 0x0f0f) | (a >> 2 & 0x3030);
                const std::uint32_t mi = chunk < 2 ? b & 0x3f3f : (e >> 4 & 0x0f0f) | (b >> 2 & 0x3030);
                const int           i  = dot16(low_nibbles(w), h0, l0) * int(sc & 255) +
                              dot16(high_nibbles(w), h1, l1) * int(sc >> 8),
                          m = t.x * int(mi & 255) + t.y * int(mi >> 8);
                sum[r] += by * (d.x * float(i) - d.y * float(m));
            }
        }
    } else {
        constexpr int group = K == kind_i8_float ? 16 : 32;
#pragma unroll 2
        for (int c = lane * 16; c < n; c += 512) {
            const int   at = base + c;
            const uint4 h = word_at(integers.high + at), l = word_at(integers.low + at);
            const float by = integers.scale[at / 32];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const unsigned char* s     = scales + r * scale_bytes(K, full);
                const float          scale = K == kind_i8 ? __half2float(reinterpret_cast<const __half*>(s)[c / group])
                                                          : reinterpret_cast<const float*>(s)[c / group];
                float                value = scale * float(dot16(word_at(from + r * data + c), h, l));
                if (K == kind_i8_float_min)
                    value -= reinterpret_cast<const float*>(mins + r * min_bytes(K, full))[c / group] *
                             float(integers.total[at / 16]);
                sum[r] += by * value;
            }
        }
    }
}

#endif

// `slice`: columns of a stage.
// Gated: a pair is one row of either product, and silu(first) · second its result, in the first one's place.
template <Kind K, bool Gated>
__global__ void __launch_bounds__(warps_of(K) * 32, 1)
    stream_kernel(const __half* x, int cols, int slice, Products all) {
#if __CUDA_ARCH__ >= 900
    constexpr int     warps = warps_of(K);
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ std::uint64_t ready[warps][stages];
    const int                warp = threadIdx.x / 32, lane = threadIdx.x % 32, stage_bytes = 2 * row_bytes(K, slice);
    // Pairs of rows: the same number for each processor, give or take one, and warp by warp of them.
    const int      n_pairs  = all.first_row[all.n] / 2;
    const auto     begin_of = [&](unsigned block) { return int(std::int64_t(n_pairs) * block / gridDim.x); };
    const int      end = begin_of(blockIdx.x + 1), first = begin_of(blockIdx.x) + warp;
    unsigned char* ring = memory + warp * stages * stage_bytes;
    unsigned char* xs   = memory + warps * stages * stage_bytes;
    if (lane == 0) {
        for (int s = 0; s < stages; s++) barrier_init(&ready[warp][s], 1);
        barriers_ready();
    }
    __syncwarp();

    struct Place {
        const Product& product;
        std::int64_t   row;
    };
    const auto place_of = [&](int pair, int r) {
        if (Gated) return Place{all.product[r], pair};
        const int which = all.which(pair * 2);
        return Place{all.product[which], pair * 2 - all.first_row[which] + r};
    };
    // The next stage to be brought; only the first lane does.
    int        next_pair = first, next_base = 0;
    const auto bring = [&](int stage) {
        if (next_pair >= end) return;
        if (lane == 0) {
            const int      n  = min(slice, cols - next_base);
            unsigned char* to = ring + stage * stage_bytes;
            std::uint64_t* b  = &ready[warp][stage];
            barrier_expect(b, unsigned(2 * row_bytes(K, n)));
            const Place of[2] = {place_of(next_pair, 0), place_of(next_pair, 1)};
            const auto  copy  = [&](const void* const Weight::* from, int (*bytes)(Kind, int)) {
                if (bytes(K, 256) == 0) return;
                for (int r = 0; r < 2; r++, to += bytes(K, slice))
                    copy_bulk(to,
                                static_cast<const unsigned char*>(of[r].product.weight.*from) +
                                    of[r].row * bytes(K, cols) + bytes(K, next_base),
                                unsigned(bytes(K, n)), b);
            };
            copy(&Weight::data, data_bytes);
            copy(&Weight::scales, scale_bytes);
            copy(&Weight::mins, min_bytes);
        }
        next_base += slice;
        if (next_base >= cols) next_base = 0, next_pair += warps;
    };
    for (int s = 0; s < stages; s++) bring(s); // weights depend on nobody
    wait_for_inputs();
    Integers integers{};
    if constexpr (K == kind_f16) {
        each_word(x, cols / 8, [&](int g, const uint4& v) { reinterpret_cast<uint4*>(xs)[g] = v; });
    } else {
        integers = integers_in(xs, K, cols);
        prepare_integers<K>(x, cols, integers);
    }
    __syncthreads();

    int      stage  = 0;
    unsigned parity = 0;
    for (int pair = first; pair < end; pair += warps) {
        float sum[2] = {};
        for (int base = 0; base < cols; base += slice) {
            barrier_wait(&ready[warp][stage], parity);
            add_stage<K>(ring + stage * stage_bytes, slice, xs, integers, base, min(slice, cols - base), sum);
            __syncwarp(); // all have read it
            bring(stage);
            if (++stage == stages) stage = 0, parity ^= 1;
        }
        float value[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const Place at = place_of(pair, r);
            value[r]       = warp_sum(sum[r]) + (at.product.bias ? at.product.bias[at.row] : 0.0f);
            if (Gated || lane != 0) continue;
            if (at.product.out_is_float) static_cast<float*>(at.product.out)[at.row] = value[r];
            else static_cast<__half*>(at.product.out)[at.row] = __float2half(value[r]);
        }
        if (Gated && lane == 0)
            static_cast<__half*>(all.product[0].out)[pair] =
                __float2half(__fdividef(value[0], 1 + __expf(-value[0])) * value[1]);
    }
#endif
}

template <Kind K>
bool launch(const __half* x, int cols, const Products& all, bool gated, cudaStream_t stream) {
    const int room = shared_budget - x_bytes(K, cols);
    const int most = room / (warps_of(K) * stages * 2 * row_bytes(K, unit_cols(K))) * unit_cols(K);
    if (most <= 0) return false;
    const int n_slices = (cols + most - 1) / most, unit = unit_cols(K),
              slice      = ((cols + n_slices - 1) / n_slices + unit - 1) / unit * unit,
              bytes      = warps_of(K) * stages * 2 * row_bytes(K, slice) + x_bytes(K, cols);
    const auto  kernel   = gated ? stream_kernel<K, true> : stream_kernel<K, false>;
    static bool ready[2] = {};
    if (!std::exchange(ready[gated], true))
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_budget);
    run_kernel(kernel, dim3(unsigned(std::min(n_processors(), all.first_row[all.n] / 2))), unsigned(warps_of(K) * 32),
               std::size_t(bytes), stream, x, cols, slice, all);
    return true;
}

bool launch_kind(Kind kind, const __half* x, int cols, const Products& all, bool gated, cudaStream_t stream) {
    if (!is_hopper() || cols % (kind == kind_f16 ? 8 : 256) != 0) return false;
    switch (kind) {
        case kind_f16: return launch<kind_f16>(x, cols, all, gated, stream);
        case kind_i8: return launch<kind_i8>(x, cols, all, gated, stream);
        case kind_i8_float: return launch<kind_i8_float>(x, cols, all, gated, stream);
        case kind_i8_float_min: return launch<kind_i8_float_min>(x, cols, all, gated, stream);
        case kind_q4_k: return launch<kind_q4_k>(x, cols, all, gated, stream);
    }
    return false;
}

} // namespace

bool stream_products(Kind kind, const __half* x, int cols, const Products& all, cudaStream_t stream) {
    for (int k = 0; k < all.n; k++)
        if (all.product[k].weight.rows % 2 != 0) return false;
    return launch_kind(kind, x, cols, all, false, stream);
}

bool matmul_gated(const Half* x, const Weight& gate, const Weight& up, Half* out, Stream stream) {
    const Product list[2] = {{gate, nullptr, out, false}, {up, nullptr, nullptr, false}};
    Products      all{};
    return gate.rows == up.rows && gather(list, 2, all) == 2 &&
           launch_kind(kind_of(gate), reinterpret_cast<const __half*>(x), int(gate.cols), all, true,
                       static_cast<cudaStream_t>(stream));
}

} // namespace quire::cuda
