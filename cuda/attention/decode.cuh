// Split-KV decode attention, shared parts: the attention of up to eight query heads of a KV head on tensor cores with online
// softmax (row max, row sum, rescale), and the reduction of the splits of a sequence.
#pragma once

#include <cuda_fp16.h>

#include "../kernels.h"
#include "../ptx/mma.cuh"
#include "../warp.cuh"
#include "codes.cuh"

namespace quire::cuda {

// The block ids of a split, in shared memory: those of `length` positions at a time, which all threads of a CTA read together.
class TableSegment {
public:
    static constexpr int length = fixed_split_length;

    __device__ TableSegment(const std::int32_t* table, int begin, int end, const Attention& a)
        : table_(table), begin_(begin), end_(end), block_size_(a.block_size), v_tables_(a.v_tables) {}
    // By all threads, at multiples of a divisor of `length` from the first position on: loads the ids of `position` and of the positions
    // after it.
    __device__ void move_to(int position) {
        if (position < next_) return;
        if (next_ > 0) __syncthreads(); // all have read the ids before
        next_        = position + length;
        first_block_ = max(position, begin_) / block_size_;
        for (int i = threadIdx.x; i <= (min(next_, end_) - 1) / block_size_ - first_block_; i += blockDim.x)
            ids()[i] = table_[first_block_ + i];
        __syncthreads();
    }
    __device__ std::int32_t operator[](int block) const { return ids()[block - first_block_]; }
    // Of V. Few layers have it in other blocks than K: their ids do not come through shared memory.
    __device__ std::int32_t v(int block) const { return v_tables_ == 0 ? (*this)[block] : table_[block + v_tables_]; }

private:
    static __device__ std::int32_t* ids() {
        __shared__ std::int32_t memory[length + 1];
        return memory;
    }

    const std::int32_t* table_;
    int                 begin_, end_, block_size_, v_tables_, first_block_ = 0, next_ = 0;
};

__device__ inline float rescale_of(float row_max, float new_max) {
    return row_max == -INFINITY ? 0.0f : __expf(row_max - new_max);
}

// A head's sink, a score that takes part in the softmax once, beside the splits' row maxes; -infinity: the head has none.
__device__ inline float sink_of(const Attention& a, int head) { return a.sinks ? a.sinks[head] : -INFINITY; }

// The work of a CTA: `item`, a split-KV item, and `slot`, a group of heads.
struct CtaWork {
    int item, slot, n_slots;
};

// Reduces n splits of some heads: `all` has of the first split, and `apart` floats behind of each further one, [n_heads][D values, row max,
// row sum]. sinks: those of the heads, or null; out: [n_heads × D] of fp16. Each head's row max and row sum of all splits come first, by a
// warp, and the splits' weights, of which the first D go to `weights`, [D][n_heads] in shared memory; then the values, two numbers a thread,
// of Depth splits at a time: each time costs a read from L2.
template <int D, int G, int Depth, class Team>
__device__ void reduce_partial(const float* all, std::int64_t apart, int n, int n_heads, const float* sinks,
                               float* weights, std::uint32_t* out) {
    __shared__ float new_maxes[G], total_sums[G];
    for (int g = threadIdx.x / 32; g < n_heads; g += Team::size() / 32) {
        const int    lane    = threadIdx.x % 32;
        const float* from    = all + g * (D + 2) + D; // row max and row sum
        const auto   of      = [&](int c) { return __ldcg(reinterpret_cast<const float2*>(from + c * apart)); };
        float        new_max = sinks ? sinks[g] : -INFINITY, total_sum = 0;
        const float2 own = lane < n ? of(lane) : float2{-INFINITY, 0}; // few sequences have more than 32 splits
        new_max          = fmaxf(new_max, own.x);
        for (int c = lane + 32; c < n; c += 32) new_max = fmaxf(new_max, of(c).x);
        new_max = warp_max(new_max);
        for (int c = lane; c < n; c += 32) {
            const float2 split  = c == lane ? own : of(c);
            const float  weight = rescale_of(split.x, new_max);
            total_sum += weight * split.y;
            if (c < D) weights[c * n_heads + g] = weight;
        }
        total_sum = warp_sum(total_sum);
        if (sinks) total_sum += rescale_of(sinks[g], new_max);
        if (lane == 0) new_maxes[g] = new_max, total_sums[g] = total_sum;
    }
    Team::sync();
    const auto reduce = [&](const auto& weight) {
        for (int i = threadIdx.x; i < n_heads * (D / 2); i += Team::size()) {
            const int    g = i / (D / 2), d = i % (D / 2) * 2;
            const float* from = all + g * (D + 2) + d;
            float2       sum{};
            for (int c0 = 0; c0 < n; c0 += Depth) {
                float2 v[Depth];
#pragma unroll
                for (int c = 0; c < Depth; c++)
                    v[c] = __ldcg(reinterpret_cast<const float2*>(from + min(c0 + c, n - 1) * apart));
#pragma unroll
                for (int c = 0; c < Depth; c++) {
                    if (c0 + c >= n) break;
                    const float by = weight(c0 + c, g);
                    sum.x += by * v[c].x, sum.y += by * v[c].y;
                }
            }
            const float total    = total_sums[g];
            out[(g * D + d) / 2] = total == 0 ? 0u : pack(__fdividef(sum.x, total), __fdividef(sum.y, total));
        }
    };
    if (n <= D) reduce([&](int c, int g) { return weights[c * n_heads + g]; });
    else reduce([&](int c, int g) { return rescale_of(__ldcg(all + c * apart + g * (D + 2) + D), new_maxes[g]); });
}

// The reduction of split-KV: first the parts of a CTA, in a fixed order; then, by the last CTA of a sequence to arrive, its
// splits, from `partial`; combine_splits() does it where SharedTiles have some of them. row_maxes, row_sums: [parts][G], values:
// [parts][n_heads][D], parts `stride` floats apart, in shared memory; it is written.
template <int D, int G, class Team = WholeCta, int Depth = 16>
__device__ void reduce_splits(const Attention& a, const SplitKvItem& item, const CtaWork& work, int head0, int n_heads,
                              int n_parts, const float* row_maxes, const float* row_sums, float* values, int stride,
                              float* partial, std::int32_t* arrivals) {
    Team::sync();
    const bool only_split = item.n_splits == 1;
    for (int i = threadIdx.x; i < n_heads * D; i += Team::size()) {
        const int g = i / D, d = i % D, head = head0 + g;
        float     new_max = only_split ? sink_of(a, head) : -INFINITY, value = 0;
        float     total_sum = 0;
        for (int part = 0; part < n_parts; part++) new_max = fmaxf(new_max, row_maxes[part * G + g]);
        for (int part = 0; part < n_parts; part++) {
            const float w = rescale_of(row_maxes[part * G + g], new_max);
            total_sum += w * row_sums[part * G + g];
            value += w * values[part * stride + g * D + d];
        }
        if (only_split) {
            if (a.sinks) total_sum += rescale_of(a.sinks[head], new_max);
            reinterpret_cast<__half*>(a.out)[(std::int64_t(item.row) * a.n_heads + head) * D + d] =
                __float2half(total_sum == 0 ? 0.0f : __fdividef(value, total_sum));
            continue;
        }
        float* to = partial + (std::int64_t(work.item + item.moved) * a.n_heads + head) * (D + 2);
        to[d]     = value;
        if (d == 0) to[D] = new_max, to[D + 1] = total_sum;
    }
    if (only_split || item.n_shared > 0) return;
    __shared__ bool is_last;
    Team::sync();
    if (int(threadIdx.x) == Team::size() - 1) { // one thread's fence is enough: the others wrote before the barrier
        __threadfence();
        std::int32_t* counter = arrivals + std::int64_t(item.row) * work.n_slots + work.slot;
        is_last               = atomicAdd(counter, 1) == item.n_splits - 1;
        if (is_last) *counter = 0; // for the next launch
        __threadfence();
    }
    Team::sync();
    if (!is_last) return;
    const std::int64_t first_split = std::int64_t(work.item) + item.moved - item.split;
    reduce_partial<D, G, Depth, Team>(
        partial + (first_split * a.n_heads + head0) * (D + 2), std::int64_t(a.n_heads) * (D + 2), item.n_splits,
        n_heads, a.sinks ? a.sinks + head0 : nullptr, values,
        reinterpret_cast<std::uint32_t*>(a.out) + (std::int64_t(item.row) * a.n_heads + head0) * (D / 2));
}

// Decode attention on tensor cores (mma.m16n8k16), up to 8 query heads of a KV head together: scores are K·Qᵀ (16 positions × 8
// heads), the output is Vᵀ·Pᵀ (dimensions × 8 heads). In which order an mma takes rows and columns does not matter as long as
// both operands agree, so lane (i, j) = (lane / 4, lane % 4) has the rows and columns that it loads in 16-byte words. K: words j, j + 4, ..
// of positions i and i + 8. V: dimensions i·D/8 .. of positions 2j, 2j + 1, 2j + 8, 2j + 9. A lane accumulates heads 2j and 2j
// + 1.
constexpr int max_heads = 8;

// Of positions i and i + 8: what their K and V are multiplied by.
struct KvScales {
    float k[2] = {1, 1}, v[2] = {1, 1};
};

// Up to eight query heads of fp16, as a lane has them: head i, in the order of K's words. A lane has 16 codes of K side by side.
// Type: of K and V.
template <int D, KvType Type>
struct QueryHeads {
    static constexpr bool coded = Type != KvType::f16;
    std::uint32_t         words[D / 8];

    // heads: [n_heads][D].
    __device__ void load(const __half* heads, int n_heads) {
        const int i = threadIdx.x % 32 / 4;
#pragma unroll
        for (int w = 0; w < D / 32; w++) {
            const uint4 v    = i < n_heads ? *reinterpret_cast<const uint4*>(heads + i * D + place(w)) : uint4{};
            words[4 * w]     = v.x;
            words[4 * w + 1] = v.y;
            words[4 * w + 2] = v.z;
            words[4 * w + 3] = v.w;
        }
    }
    // Where a lane's eight numbers w stand in a row.
    static __device__ int place(int w) {
        const int j = threadIdx.x % 4;
        return 8 * (coded ? (j + 4 * (w / 2)) * 2 + w % 2 : j + 4 * w);
    }

    // Scores of positions i and i + 8, [position][head] of heads 2j and 2j + 1, without the scales of K.
    __device__ void scores(const uint4 (&k)[2][D / (coded ? 64 : 32)], float (&score)[4]) const {
#pragma unroll
        for (float& s : score) s = 0;
#pragma unroll
        for (int w = 0; w < D / 32; w++) {
            uint4 a[2];
#pragma unroll
            for (int h = 0; h < 2; h++)
                if constexpr (coded) {
                    const uint4& codes = k[h][w / 2];
                    const uint2  low   = as_fp16<Type>(w % 2 == 0 ? codes.x : codes.z),
                                high   = as_fp16<Type>(w % 2 == 0 ? codes.y : codes.w);
                    a[h]               = {low.x, low.y, high.x, high.y};
                } else {
                    a[h] = k[h][w];
                }
            mma_m16n8k16(score, a[0].x, a[1].x, a[0].y, a[1].y, words[4 * w], words[4 * w + 1]);
            mma_m16n8k16(score, a[0].z, a[1].z, a[0].w, a[1].w, words[4 * w + 2], words[4 * w + 3]);
        }
    }
};

// Beside int8 codes the query is int16 with a scale for each head, as two bytes: codes of K are multiplied as they are stored, and sums are exact.
template <int D>
struct QueryHeads<D, KvType::i8> {
    std::uint32_t high[D / 16], low[D / 16]; // 256 · high + low
    std::int32_t  offset[2];                 // of heads 2j and 2j + 1: stored codes are 128 too large
    float         scale[2];

    __device__ void load(const __half* heads, int n_heads) {
        constexpr float             top = 32512; // its high byte is 127
        QueryHeads<D, KvType::e4m3> fp16;
        float                       most = 0;
        std::int32_t                sum  = 0;
        fp16.load(heads, n_heads);
#pragma unroll
        for (std::uint32_t pair : fp16.words) {
            const float2 f = as_float2(pair);
            most           = max_or_nan(max_or_nan(most, fabsf(f.x)), fabsf(f.y));
        }
#pragma unroll
        for (int step = 1; step < 4; step *= 2) most = max_or_nan(most, __shfl_xor_sync(~0u, most, step));
        const float inverse = most > 0 ? top / most : 0.0f;
#pragma unroll
        for (int w = 0; w < D / 16; w++) {
            high[w] = low[w] = 0;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float2       f = as_float2(fp16.words[2 * w + k / 2]);
                const std::int32_t n = __float2int_rn((k % 2 == 0 ? f.x : f.y) * inverse);
                sum += n;
                high[w] |= std::uint32_t((n + 128) >> 8 & 0xff) << 8 * k;
                low[w] |= std::uint32_t(n & 0xff) << 8 * k; // as int8 it is n - 256 · high
            }
        }
#pragma unroll
        for (int step = 1; step < 4; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int lane = (2 * int(threadIdx.x % 4) + h) * 4; // it has that head
            offset[h]      = -128 * __shfl_sync(~0u, sum, lane);
            scale[h]       = __shfl_sync(~0u, most, lane) * (1 / top); // NaN and infinity: so are the scores
        }
    }
    __device__ void scores(const uint4 (&k)[2][D / 64], float (&score)[4]) const {
        std::int32_t highs[4] = {}, lows[4] = {offset[0], offset[1], offset[0], offset[1]};
#pragma unroll
        for (int w = 0; w < D / 64; w++) {
            const uint4 &a = k[0][w], &b = k[1][w];
            mma_m16n8k32(highs, a.x, b.x, a.y, b.y, high[4 * w], high[4 * w + 1]);
            mma_m16n8k32(lows, a.x, b.x, a.y, b.y, low[4 * w], low[4 * w + 1]);
            mma_m16n8k32(highs, a.z, b.z, a.w, b.w, high[4 * w + 2], high[4 * w + 3]);
            mma_m16n8k32(lows, a.z, b.z, a.w, b.w, low[4 * w + 2], low[4 * w + 3]);
        }
#pragma unroll
        for (int r = 0; r < 4; r++) score[r] = float(highs[r] * 256 + lows[r]) * scale[r % 2];
    }
};

template <int D, KvType Type = KvType::f16>
struct MmaHeads {
    // 16-byte words a lane has of a position of K; of V: of 16 bytes of fp16, or of eight of codes.
    static constexpr int k_words = D / (Type == KvType::f16 ? 32 : 64), v_words = D / 64;
    float                out[D / 16][4] = {}, row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {};
    float                raised[4] = {}; // the part of `out` by which stored int8 codes of V, 128 too large, raise it

    // Attends to 16 more positions of fp16. visible0, visible8: whether positions i and i + 8 are visible; V of others is zeros.
    __device__ void add(const Attention& a, const QueryHeads<D, Type>& q, const uint4 (&k)[2][k_words],
                        const uint4 (&v)[4][v_words], bool visible0, bool visible8) {
        float         score[1][4];
        std::uint32_t p[1][2];
        q.scores(k, score[0]);
        softmax<1>(a, score, {{visible0, visible8}}, p, {KvScales{}});
        accumulate_values(p[0], v);
    }

    // A step of the online softmax with N times 16 positions.
    template <int N>
    __device__ void softmax(const Attention& a, const float (&score)[N][4], const bool (&visible)[N][2],
                            std::uint32_t (&p)[N][2], const KvScales (&scales)[N]) {
        constexpr float log2e = 1.4426950408889634f; // exp2 instead of exp
        float           e[N][4], rescales[2];
        const auto      scale_scores = [&](const auto& scaled) {
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    const float s = scaled(score[n][k] * scales[n].k[k / 2]);
                    e[n][k]       = visible[n][k / 2] ? s : -INFINITY;
                }
        };
        if (a.softcap > 0) scale_scores([&](float s) { return a.softcap * log2e * tanhf(s * a.scale / a.softcap); });
        else scale_scores([scale = a.scale * log2e](float s) { return s * scale; });
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float new_max = row_max[h];
#pragma unroll
            for (int n = 0; n < N; n++) new_max = fmaxf(new_max, fmaxf(e[n][h], e[n][2 + h]));
#pragma unroll
            for (int step = 4; step < 32; step *= 2) new_max = fmaxf(new_max, __shfl_xor_sync(~0u, new_max, step));
            const float base    = new_max == -INFINITY ? 0.0f : new_max;
            const float rescale = exp2f(row_max[h] - base);
            row_max[h]          = new_max;
            float sum           = 0;
#pragma unroll
            for (int n = 0; n < N; n++) {
                e[n][h]     = exp2f(e[n][h] - base);
                e[n][2 + h] = exp2f(e[n][2 + h] - base);
                sum         = n == 0 ? e[n][h] + e[n][2 + h] : sum + (e[n][h] + e[n][2 + h]);
            }
            row_sum[h]  = row_sum[h] * rescale + sum;
            rescales[h] = rescale;
        }
        // The maximum seldom changes.
        if (__any_sync(~0u, rescales[0] != 1 || rescales[1] != 1))
#pragma unroll
            for (int h = 0; h < 2; h++) {
#pragma unroll
                for (int m = 0; m < D / 16; m++) out[m][h] *= rescales[h], out[m][2 + h] *= rescales[h];
                if constexpr (Type == KvType::i8) raised[h] *= rescales[h];
            }
        // Pᵀ has positions in its rows; the mma with V wants heads there.
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int r = 0; r < 2; r++)
                p[n][r] = movmatrix(pack(e[n][2 * r] * scales[n].v[r], e[n][2 * r + 1] * scales[n].v[r]));
    }

    __device__ void accumulate_values(const std::uint32_t (&p)[2], const uint4 (&v)[4][v_words]) {
#pragma unroll
        for (int w = 0; w < v_words; w++) {
            const std::uint32_t words[4][4] = {{v[0][w].x, v[0][w].y, v[0][w].z, v[0][w].w},
                                               {v[1][w].x, v[1][w].y, v[1][w].z, v[1][w].w},
                                               {v[2][w].x, v[2][w].y, v[2][w].z, v[2][w].w},
                                               {v[3][w].x, v[3][w].y, v[3][w].z, v[3][w].w}};
#pragma unroll
            for (int e = 0; e < 4; e++) { // dimensions 2e and 2e + 1 of the word are rows i and i + 8 of a tile
                const std::uint32_t pairs[4] = {
                    __byte_perm(words[0][e], words[1][e], 0x5410), __byte_perm(words[0][e], words[1][e], 0x7632),
                    __byte_perm(words[2][e], words[3][e], 0x5410), __byte_perm(words[2][e], words[3][e], 0x7632)};
                mma_m16n8k16(out[4 * w + e], pairs, p[0], p[1]);
            }
        }
    }

    // accumulate_values() for codes: v has eight codes of a row in a word. Bytes of two rows become neighbours first, and then pairs of fp16. A
    // stored int8 code alone in the low bits is the fp16 code · 2^-24, which is exact: so `out` is 2^24 too small, and store() has the factor.
    __device__ void accumulate_codes(const std::uint32_t (&p)[2], const uint2 (&v)[4][v_words]) {
#pragma unroll
        for (int w = 0; w < v_words; w++)
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int e = 0; e < 2; e++) { // two dimensions of four
                    const auto  of               = [&](int h) { return half == 0 ? v[h][w].x : v[h][w].y; };
                    const int   two              = e == 0 ? 0x5140 : 0x7362;
                    const uint2 first            = tiny_fp16<Type>(__byte_perm(of(0), of(1), two)),
                                last             = tiny_fp16<Type>(__byte_perm(of(2), of(3), two));
                    const std::uint32_t pairs[4] = {first.x, first.y, last.x, last.y};
                    mma_m16n8k16(out[4 * w + 2 * half + e], pairs, p[0], p[1]);
                }
        if constexpr (Type == KvType::i8) {
            constexpr std::uint32_t c = 0x00800080; // 128 · 2^-24, twice
            mma_m16n8k16(raised, c, c, c, c, p[0], p[1]);
        }
    }

    // row_maxes and row_sums: [max_heads], values: [n_heads][D], in shared memory.
    __device__ void store(int n_heads, float* row_maxes, float* row_sums, float* values) {
        constexpr float factor = Type == KvType::f16    ? 1
                                 : Type == KvType::e4m3 ? 1 / top_code(Type)
                                                        : 16777216.0f / top_code(Type);
        const int       i = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int step = 4; step < 32; step *= 2) row_sum[h] += __shfl_xor_sync(~0u, row_sum[h], step);
            if (i == 0) {
                row_maxes[2 * j + h] = row_max[h] * 0.6931471805599453f; // back from exp2's scale
                row_sums[2 * j + h]  = row_sum[h];
            }
            if (2 * j + h >= n_heads) continue;
#pragma unroll
            for (int m = 0; m < D / 16; m++) {
                const float less = Type == KvType::i8 ? raised[h] : 0; // of f16: x - 0 is x
                values[(2 * j + h) * D + i * (D / 8) + 2 * m]     = (out[m][h] - less) * factor;
                values[(2 * j + h) * D + i * (D / 8) + 2 * m + 1] = (out[m][2 + h] - less) * factor;
            }
        }
    }
};

} // namespace quire::cuda
