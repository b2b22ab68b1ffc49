// GEMMs with 5 to 64 rows of x (decode of several sequences): still limited by reading the weights, but with too many
// multiplications for CUDA cores. Tensor cores (mma.m16n8k16: 16 rows of weights, 8 rows of x); the weights go from memory
// straight into registers: a lane loads 16 bytes of a row of weights, and the same columns of x. In which order an
// instruction takes the columns does not matter, as long as both operands agree.
//
// Limits: cols is a multiple of unit_cols(); x has room for n_rows rounded up to 8, 16, 32 or 64.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "../kernels.h"
#include "../ptx/cp_async.cuh"
#include "../ptx/mma.cuh"
#include "../warp.cuh"
#include "stream_k.cuh"

namespace quire::cuda {

namespace {

constexpr __host__ __device__ int unit_cols(Kind kind) { return kind == kind_q4_k ? 256 : 128; }

__device__ __half2 as_half2(std::uint32_t v) { return *reinterpret_cast<const __half2*>(&v); }
__device__ std::uint32_t as_word(__half2 v) { return *reinterpret_cast<const std::uint32_t*>(&v); }
__device__ std::uint32_t word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// What a lane holds of one unit: of rows lane / 4 and lane / 4 + 8 of the warp's 16. steps(): pairs of instructions; for each
// the column of x at which the lane's 8 values begin, and the words for either row.
template <Kind K>
struct Fragment;

template <>
struct Fragment<kind_f16> {
    static constexpr int steps = 4;
    uint4                v[2][4];
    __device__ void      load(const Weight& w, std::int64_t row0, std::int64_t row1, int col, int lane) {
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int g = 0; g < 4; g++)
                v[r][g] = load_once(static_cast<const __half*>(w.data) + (r ? row1 : row0) * w.cols + col + g * 32 +
                                    lane % 4 * 8);
    }
    static __device__ int column(int step, int lane) { return step * 32 + lane % 4 * 8; }
    __device__ void       words(int r, int step, std::uint32_t (&out)[4]) const {
        const uint4& q = v[r][step];
        out[0] = q.x, out[1] = q.y, out[2] = q.z, out[3] = q.w;
    }
};

// Four bytes below 1024 apart → two pairs of halves, scaled.
__device__ void scaled(std::uint32_t bytes, __half2 offset, __half2 scale, __half2 shift, std::uint32_t& a,
                       std::uint32_t& b) {
    a = as_word(__hfma2(__hsub2(as_half2(__byte_perm(bytes, 0x64646464u, 0x4140)), offset), scale, shift));
    b = as_word(__hfma2(__hsub2(as_half2(__byte_perm(bytes, 0x64646464u, 0x4342)), offset), scale, shift));
}

template <int Group, bool FloatScales, bool Mins>
struct FragmentI8 {
    static constexpr int steps = 4;
    uint4                v[2][2];
    __half               scale[2][2], shift[2][2];
    __device__ void      load(const Weight& w, std::int64_t row0, std::int64_t row1, int col, int lane) {
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int g = 0; g < 2; g++) {
                const std::int64_t at = (r ? row1 : row0) * w.cols + col + g * 64 + lane % 4 * 16;
                v[r][g]               = load_once(static_cast<const std::int8_t*>(w.data) + at);
                scale[r][g]           = FloatScales ? __float2half(static_cast<const float*>(w.scales)[at / Group])
                                                    : static_cast<const __half*>(w.scales)[at / Group];
                shift[r][g] = Mins ? __float2half(-static_cast<const float*>(w.mins)[at / Group]) : __ushort_as_half(0);
            }
    }
    static __device__ int column(int step, int lane) { return step / 2 * 64 + lane % 4 * 16 + step % 2 * 8; }
    __device__ void       words(int r, int step, std::uint32_t (&out)[4]) const {
        const __half2 offset = as_half2(0x64806480u); // 1024 + 128
        const __half2 by = __half2half2(scale[r][step / 2]), plus = __half2half2(shift[r][step / 2]);
        scaled(word_of(v[r][step / 2], step % 2 * 2) ^ 0x80808080u, offset, by, plus, out[0], out[1]);
        scaled(word_of(v[r][step / 2], step % 2 * 2 + 1) ^ 0x80808080u, offset, by, plus, out[2], out[3]);
    }
};
template <>
struct Fragment<kind_i8> : FragmentI8<32, false, false> {};
template <>
struct Fragment<kind_i8_float> : FragmentI8<16, true, false> {};
template <>
struct Fragment<kind_i8_float_min> : FragmentI8<32, true, true> {};

// A lane has 64 neighbouring weights of a superblock: 32 bytes, low nibbles the first 32, high ones the others.
template <>
struct Fragment<kind_q4_k> {
    static constexpr int steps = 8;
    uint4                v[2][2], head[2];
    __device__ void      load(const Weight& w, std::int64_t row0, std::int64_t row1, int col, int lane) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const auto* block =
                static_cast<const unsigned char*>(w.data) + ((r ? row1 : row0) * (w.cols / 256) + col / 256) * 144;
            head[r] = *reinterpret_cast<const uint4*>(block);
#pragma unroll
            for (int h = 0; h < 2; h++) v[r][h] = load_once(block + 16 + lane % 4 * 32 + h * 16);
        }
    }
    // step: sub-block, half of it, half of that
    static __device__ int column(int step, int lane) { return lane % 4 * 64 + step * 8; }
    __device__ void       words(int r, int step, std::uint32_t (&out)[4]) const {
        const int           high = step / 4, h = step / 2 % 2, lane = threadIdx.x % 32, sub = lane % 4 * 2 + high;
        const float2        d = __half22float2(as_half2(head[r].x));
        const std::uint32_t a = head[r].y, b = head[r].z, c = head[r].w; // scales 0..3, 4..7, 8..11
        const int           at    = 8 * (sub % 4);
        const int           scale = sub < 4 ? a >> at & 63 : (c >> at & 15) | (a >> (at + 6) & 3) << 4,
                  min             = sub < 4 ? b >> at & 63 : (c >> (at + 4) & 15) | (b >> (at + 6) & 3) << 4;
        const __half2 offset = as_half2(0x64006400u), by = __float2half2_rn(d.x * float(scale)),
                      plus = __float2half2_rn(-d.y * float(min));
        const auto nibbles = [&](int i) { return word_of(v[r][h], i) >> (4 * high) & 0x0f0f0f0fu; };
        scaled(nibbles(step % 2 * 2), offset, by, plus, out[0], out[1]);
        scaled(nibbles(step % 2 * 2 + 1), offset, by, plus, out[2], out[3]);
    }
};

// Where column c of a row of x stands in shared memory, in halves, so that the lanes of a load meet no bank twice.
template <Kind K>
__device__ int place(int c) {
    return K == kind_q4_k ? c + c / 64 * 8 : c;
}
constexpr __host__ __device__ int row_halves(Kind kind) {
    return kind == kind_f16 ? 128 + 32 : kind == kind_q4_k ? 256 + 4 * 8 : 128 + 8;
}

// NT: groups of 8 rows of x.
template <Kind K, int NT>
__global__ void __launch_bounds__(warps * 32, 2)
    batch_kernel(const __half* x, int n_rows, int cols, Blocks all, float4* partial, std::int32_t* arrivals) {
    constexpr int     stride = row_halves(K), width = unit_cols(K);
    extern __shared__ __align__(16) __half tiles[]; // three of [NT · 8][stride]
    __shared__ bool                        is_last;
    const int                              warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int                              per_block = cols / width, total = all.first_block[all.n] * per_block;
    const Share                            share{int(blockIdx.x), int(gridDim.x), total, per_block};
    const int                              begin = share.begin_of(share.self), end = share.begin_of(share.self + 1);
    Fragment<K>                            weights[2]; // of this unit and the next: loaded two units ahead

    const auto fetch = [&](Fragment<K>& to, int unit) { // weights, into registers
        if (unit >= end) return;
        const int block = unit / per_block;
        int       which = 0;
        while (block >= all.first_block[which + 1]) which++;
        const Weight& w    = all.projection[which].weight;
        const int     row  = (block - all.first_block[which]) * unit_rows + warp * 16 + lane / 4;
        const int     most = int(w.rows) - 1;
        to.load(w, min(row, most), min(row + 8, most), unit % per_block * width, lane);
    };
    const auto bring = [&](int unit) { // x, into shared memory
        constexpr int words = width / 8;
        if (unit < end) {
            __half*       to   = tiles + unit % 3 * NT * 8 * stride;
            const __half* from = x + unit % per_block * width;
#pragma unroll
            for (int i = threadIdx.x; i < NT * 8 * words; i += warps * 32) {
                const int t = i / words, c = i % words * 8;
                cp_async(to + t * stride + place<K>(c), from + std::int64_t(t) * cols + c);
            }
        }
        cp_async_commit();
    };
    fetch(weights[0], begin); // weights depend on nobody
    fetch(weights[1], begin + 1);
    wait_for_inputs();
    if (begin >= end) return;
    bring(begin);
    bring(begin + 1);

    float      acc[NT][4] = {};
    int        first      = begin; // unit of the row block at hand that this block of threads began with
    const auto work       = [&](Fragment<K>& now, int unit) {
        cp_async_wait<1>();
        __syncthreads(); // this unit's x is there, and everybody is done with the one before
        bring(unit + 2);
        const __half* tile = tiles + unit % 3 * NT * 8 * stride + lane / 4 * stride;
#pragma unroll
        for (int step = 0; step < Fragment<K>::steps; step++) {
            std::uint32_t lower[4], upper[4];
            now.words(0, step, lower);
            now.words(1, step, upper);
            const __half* at = tile + place<K>(Fragment<K>::column(step, lane));
#pragma unroll
            for (int t = 0; t < NT; t++) {
                const uint4 b = *reinterpret_cast<const uint4*>(at + t * 8 * stride);
                mma_m16n8k16(acc[t], lower[0], upper[0], lower[1], upper[1], b.x, b.y);
                mma_m16n8k16(acc[t], lower[2], upper[2], lower[3], upper[3], b.z, b.w);
            }
        }
        fetch(now, unit + 2);
        const int block = unit / per_block;
        if (unit + 1 < end && (unit + 1) / per_block == block) return;

        finish<NT>(acc, share, first, unit + 1, all, n_rows, partial, arrivals, is_last, [] { __syncthreads(); });
        first = unit + 1;
    };
    for (int unit = begin; unit < end; unit += 2) {
        work(weights[0], unit);
        if (unit + 1 < end) work(weights[1], unit + 1);
    }
}

template <Kind K, int NT>
void launch(const __half* x, int n_rows, int cols, const Blocks& all, Context& gpu) {
    constexpr int shared = 3 * NT * 8 * row_halves(K) * 2;
    const int at_once    = std::clamp(prepare_kernel(gpu, batch_kernel<K, NT>, warps * 32, shared), 1, max_ctas_per_sm);
    const int units      = all.first_block[all.n] * (cols / unit_cols(K));
    const int grid       = std::min(gpu.n_sms * at_once, units);
    // Not early, as other kernels are: what is on its way to registers is held in the L1, and a processor that still runs a
    // kernel with much shared memory has little of it. Decoding with 8 sequences took a quarter longer.
    run_in_order(batch_kernel<K, NT>, dim3(unsigned(grid)), warps * 32, shared, gpu, x, n_rows, cols, all,
                 gpu.tile_partial, gpu.tile_arrivals);
}

template <int NT>
void launch_kind(Kind kind, const __half* x, int n_rows, int cols, const Blocks& all, Context& gpu) {
    switch (kind) {
        case kind_f16: launch<kind_f16, NT>(x, n_rows, cols, all, gpu); break;
        case kind_i8: launch<kind_i8, NT>(x, n_rows, cols, all, gpu); break;
        case kind_i8_float: launch<kind_i8_float, NT>(x, n_rows, cols, all, gpu); break;
        case kind_i8_float_min: launch<kind_i8_float_min, NT>(x, n_rows, cols, all, gpu); break;
        case kind_q4_k: launch<kind_q4_k, NT>(x, n_rows, cols, all, gpu); break;
    }
}

} // namespace

bool can_skinny_gemm(const Context& gpu, const Weight& weight) {
    return weight.form != WeightForm::f32 && weight.cols % unit_cols(kind_of(weight)) == 0 &&
           weight.rows <= std::int64_t(max_stream_k_tiles) * unit_rows / max_projections &&
           weight.rows / unit_rows * (weight.cols / 64) * max_projections * gpu.n_sms * max_ctas_per_sm <
               std::int64_t(1) << 32;
}

void skinny_gemm(const Half* x_, int n_rows, std::int64_t cols, const Projection* products, int n_projections,
                 Context& gpu) {
    const auto* x = reinterpret_cast<const __half*>(x_);
    for (int i = 0; i < n_projections;) {
        Blocks     all{};
        const Kind kind = kind_of(products[i].weight);
        for (; i < n_projections && all.n < max_projections && kind_of(products[i].weight) == kind; i++) {
            all.projection[all.n] = products[i];
            all.first_block[all.n + 1] =
                all.first_block[all.n] + int((products[i].weight.rows + unit_rows - 1) / unit_rows);
            all.n++;
        }
        for (int k = all.n + 1; k <= max_projections; k++) all.first_block[k] = all.first_block[all.n];
        const int c = int(cols);
        if (kind == kind_f16 && skinny_gemm_sm90(x, n_rows, c, all, gpu)) continue;
        if (n_rows <= 8) launch_kind<1>(kind, x, n_rows, c, all, gpu);
        else if (n_rows <= 16) launch_kind<2>(kind, x, n_rows, c, all, gpu);
        else if (n_rows <= 32) launch_kind<4>(kind, x, n_rows, c, all, gpu);
        else launch_kind<8>(kind, x, n_rows, c, all, gpu);
    }
}

} // namespace quire::cuda
