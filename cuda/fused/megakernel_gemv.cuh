// The GEMV of the decode megakernel: all consumer warps multiply the rows of a stage with x in their registers, integer weights
// with int16-quantised x by dp2a; then the epilogue adds up the warps' partial sums: bias, or SwiGLU.
#pragma once

#include "../epilogue.cuh"
#include "../gemm/gemv_tma.cuh"
#include "megakernel_exchange.cuh"
#include "megakernel_input.cuh"
#include "megakernel_pipeline.cuh"

namespace quire::cuda::megakernel {

#if __CUDA_ARCH__ >= 900

namespace {

// sum += dot product of 16 weights (bytes) with two words of x.
template <bool Signed>
__device__ int dot(const uint4& w, const uint4& x0, const uint4& x1, int sum) {
    const std::uint32_t weights[4] = {w.x, w.y, w.z, w.w}, x[8] = {x0.x, x0.y, x0.z, x0.w, x1.x, x1.y, x1.z, x1.w};
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if constexpr (Signed) {
            asm("dp2a.lo.s32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(x[2 * k]), "r"(weights[k]));
            asm("dp2a.hi.s32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(x[2 * k + 1]), "r"(weights[k]));
        } else {
            asm("dp2a.lo.s32.u32 %0, %1, %2, %0;" : "+r"(sum) : "r"(x[2 * k]), "r"(weights[k]));
            asm("dp2a.hi.s32.u32 %0, %1, %2, %0;" : "+r"(sum) : "r"(x[2 * k + 1]), "r"(weights[k]));
        }
    }
    return sum;
}

// A lane's task: its part of x, kept in registers, and the dot product with its weights in a stage.
template <Kind K>
struct Task {
    uint4 x[4];
    float scale;
    int   total, words, scales, mins; // .. offsets of its weights in a stage
    bool  swapped;                    // its second word is read first: no bank conflicts

    __device__ void take(const Instruction& op, unsigned char* xs, int row, int task) {
        const QuantisedX from(xs, K, op.cols);
        swapped = (task & 4) != 0;
#pragma unroll
        for (int k = 0; k < 4; k++) x[k] = from.words[(k ^ (swapped ? 2 : 0)) * from.tasks + task];
        scale  = from.scale[task];
        total  = from.total[task];
        words  = row * op.part_bytes[0] + task * 32;
        scales = op.rows * op.part_bytes[0] + row * op.part_bytes[1] +
                 task * (K == kind_i8         ? 2
                         : K == kind_i8_float ? 8
                                              : 4);
        mins = op.rows * (op.part_bytes[0] + op.part_bytes[1]) + row * op.part_bytes[2] + task * 4;
    }
    __device__ float times(const unsigned char* stage) const {
        const uint4 w0 = word_at(stage + words + 16 * int(swapped)), w1 = word_at(stage + words + 16 * int(!swapped));
        if constexpr (K == kind_i8_float) { // a scale for each word
            const float2 by = *reinterpret_cast<const float2*>(stage + scales);
            const float  a = float(dot<true>(w0, x[0], x[1], 0)), b = float(dot<true>(w1, x[2], x[3], 0));
            return scale * (a * (swapped ? by.y : by.x) + b * (swapped ? by.x : by.y));
        } else {
            const float v = float(dot<true>(w1, x[2], x[3], dot<true>(w0, x[0], x[1], 0)));
            if constexpr (K == kind_i8)
                return scale * (v * __half2float(*reinterpret_cast<const __half*>(stage + scales)));
            return scale * (v * *reinterpret_cast<const float*>(stage + scales) -
                            float(total) * *reinterpret_cast<const float*>(stage + mins));
        }
    }
};

// 64 columns of a superblock: two of its eight sub-blocks, whose weights are the nibbles of 32 bytes.
template <>
struct Task<kind_q4_k> {
    uint4         x[8];
    float         scale;
    int2          total;
    int           block, words;
    int           shift, min_shift; // of the 6-bit scales and minima in the superblock's head
    std::uint32_t lower, upper;     // .. and which bits are theirs

    __device__ void take(const Instruction& op, unsigned char* xs, int row, int task) {
        const QuantisedX from(xs, kind_q4_k, op.cols);
#pragma unroll
        for (int k = 0; k < 8; k++) x[k] = from.words[k * from.tasks + task];
        scale           = from.scale[task];
        total           = reinterpret_cast<const int2*>(from.total)[task];
        block           = row * op.row_bytes + task / 4 * 144;
        const int chunk = task % 4;
        words           = block + 16 + chunk * 32;
        shift           = chunk % 2 * 16;
        min_shift       = chunk < 2 ? shift : shift + 4;
        lower           = chunk < 2 ? 0x3f3fu : 0x0f0fu;
        upper           = chunk < 2 ? 0u : 0x3030u;
    }
    __device__ float times(const unsigned char* stage) const {
        const uint4 head = word_at(stage + block), w0 = word_at(stage + words), w1 = word_at(stage + words + 16);
        const int   even =
                      dot<false>(masked(w1, 0x0f0f0f0f), x[2], x[3], dot<false>(masked(w0, 0x0f0f0f0f), x[0], x[1], 0)),
                  odd = dot<false>(masked(w1, 0xf0f0f0f0), x[6], x[7],
                                   dot<false>(masked(w0, 0xf0f0f0f0), x[4], x[5], 0)) >>
                        4;
        // Two bytes of a word: of the even and the odd sub-block. The last four of each have 4 bits in one word, 2 in another.
        const bool          late = upper != 0;
        const std::uint32_t sc   = ((late ? head.w : head.y) >> shift & lower) | (head.y >> (shift + 2) & upper),
                            mi   = ((late ? head.w : head.z) >> min_shift & lower) | (head.z >> (shift + 2) & upper);
        const float2 d           = as_float2(head.x);
        const int i = even * int(sc & 255) + odd * int(sc >> 8), m = total.x * int(mi & 255) + total.y * int(mi >> 8);
        return scale * (d.x * float(i) - d.y * float(m));
    }
};

// Reduces four sums at once within segments of a warp's lanes, whose lengths are multiples of four: of the first four lanes of
// a segment, lane l gets sum l % 4. `end`: the lane after the segment.
__device__ float four_sums(const float (&v)[4], int end) {
    const int   lane = int(threadIdx.x % 32);
    const bool  odd = lane & 1, later = lane & 2;
    const float a = (odd ? v[1] : v[0]) + __shfl_xor_sync(~0u, odd ? v[0] : v[1], 1),
                b = (odd ? v[3] : v[2]) + __shfl_xor_sync(~0u, odd ? v[2] : v[3], 1);
    float sum     = (later ? b : a) + __shfl_xor_sync(~0u, later ? a : b, 2);
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
        const float other = __shfl_down_sync(~0u, sum, step);
        if (lane + step < end) sum += other;
    }
    return sum;
}

// use(n, memory) for up to N of the next n_stages, each as soon as it is full; released after that.
template <int N, class Use>
__device__ void use_stages(WeightPipeline& pipeline, int n_bytes, int n_stages, const Use& use) {
#pragma unroll
    for (int n = 0; n < N; n++) {
        if (n >= n_stages) break;
        const int at = pipeline.begin(n_bytes);
        pipeline.wait();
        use(n, pipeline.memory + at);
        pipeline.release();
        pipeline.advance(n_bytes);
    }
}

// How many stages come next by the dynamic scheduler: two of a chunk that the producer has taken, or 0.
__device__ int dynamic_stages(const Instruction& op, WeightPipeline& pipeline, int nth) {
    if (op.n_dynamic == 0) return 0;
    pipeline.wait();
    if (op.taken[nth] >= 0) return 2;
    pipeline.release();
    pipeline.advance(0);
    return 0;
}

// GEMV with integer weights (int8, Q4_K). The warps' partial sums go to `sums`, op.max_sums of each row. P: passes.
template <Kind K, int P>
__device__ void gemv_quantised(const Instruction& op, WeightPipeline& pipeline, unsigned char* xs, float* sums) {
    constexpr int batch = 4 / P; // stages
    const int     rows = op.rows, tasks = op.tasks, n_bytes = rows * op.row_bytes, lane = int(threadIdx.x % 32),
              max_sums = op.max_sums;
    const auto row_of  = [&](int thread) { return int(unsigned(thread) * op.tasks_inverse >> 22); };
    Task<K>    x[P];
#pragma unroll
    for (int p = 0; p < P; p++) {
        const int  thread = int(threadIdx.x) + p * Team::size(), row = row_of(thread);
        const bool used = row < rows;
        x[p].take(op, xs, used ? row : 0, used ? thread - row * tasks : 0);
    }
    Team::sync(); // x is in registers now; the sums overwrite it
    // Where this lane's sums go. Rows that fewer warps contribute to are padded with a zero.
    const int thread = int(threadIdx.x) + lane % P * Team::size(), row = row_of(thread), first = row * tasks,
              end = min(first + tasks - (thread - lane), 32), stage = lane % 4 / P, nth = thread / 32 - first / 32;
    const bool writes = row < rows && (lane < 4 || thread - first < 4),
               pads   = nth == max_sums - 2 && first + tasks - (thread - lane) <= 32;
    float* to         = sums + (stage * rows + row) * max_sums + nth;
#pragma unroll 1
    for (int n_stages = op.stages, chunk = 0;; n_stages -= batch) {
        if (n_stages <= 0 && (n_stages = dynamic_stages(op, pipeline, chunk++)) == 0) break;
        float v[4] = {};
        use_stages<batch>(pipeline, n_bytes, n_stages, [&](int n, const unsigned char* from) {
#pragma unroll
            for (int p = 0; p < P; p++) v[n * P + p] = x[p].times(from);
        });
        const float sum = four_sums(v, end);
        if (writes && stage < n_stages) {
            *to = sum;
            if (pads) to[1] = 0;
        }
        to += batch * rows * max_sums;
    }
}

// GEMV with fp16 weights: a warp has P consecutive units of 32 words of eight columns, of one row or two.
template <int P>
__device__ void gemv_fp16(const Instruction& op, WeightPipeline& pipeline, const unsigned char* xs, float* sums) {
    const int rows = op.rows, units = op.tasks, n_bytes = rows * op.row_bytes, words = op.cols / 8,
              lane = int(threadIdx.x % 32), warp = int(threadIdx.x / 32), max_sums = op.max_sums;
    const int row    = int(unsigned(warp * P) * op.tasks_inverse >> 22),
              second = (row + 1) * units - warp * P; // the first of the next row
    uint4 x[P];
    int   at[P];
#pragma unroll
    for (int p = 0; p < P; p++) {
        const int  of = p < second ? row : row + 1, word = (warp * P + p - of * units) * 32 + lane;
        const bool used = of < rows && word < words;
        x[p]            = used ? word_at(xs + word * 16) : make_uint4(0, 0, 0, 0);
        at[p]           = used ? of * op.row_bytes + word * 16 : 0;
    }
    Team::sync(); // x is in registers now; the sums overwrite it
    const int  stage = lane % 4 / 2, mine = row + lane % 2, nth = warp - mine * units / P;
    const bool writes = lane < 4 && mine < rows && (lane % 2 == 0 || second < P),
               pads   = nth == max_sums - 2 && (mine + 1) * units <= (warp + 1) * P;
    float* to         = sums + (stage * rows + mine) * max_sums + nth;
#pragma unroll 1
    for (int n_stages = op.stages, chunk = 0;; n_stages -= 2) {
        if (n_stages <= 0 && (n_stages = dynamic_stages(op, pipeline, chunk++)) == 0) break;
        float v[4] = {};
        use_stages<2>(pipeline, n_bytes, n_stages, [&](int n, const unsigned char* from) {
#pragma unroll
            for (int p = 0; p < P; p++) {
                const uint4  w = word_at(from + at[p]);
                const float2 a = as_float2(w.x), b = as_float2(w.y), c = as_float2(w.z), d = as_float2(w.w),
                             e = as_float2(x[p].x), f = as_float2(x[p].y), g = as_float2(x[p].z), h = as_float2(x[p].w);
                float sum =
                    a.x * e.x + a.y * e.y + b.x * f.x + b.y * f.y + c.x * g.x + c.y * g.y + d.x * h.x + d.y * h.y;
                // x is zero beyond the last column, but here may be the next row.
                if (p < second) v[2 * n] += sum;
                else v[2 * n + 1] += sum;
            }
        });
        const float sum = four_sums(v, 32);
        if (writes && stage < n_stages) {
            *to = sum;
            if (pads) to[1] = 0;
        }
        to += 2 * rows * max_sums;
    }
}

__device__ void gemv(const Instruction& op, WeightPipeline& pipeline, unsigned char* xs, float* sums) {
    const auto quantised = [&](auto kind) {
        if (op.passes == 1) gemv_quantised<decltype(kind)::value, 1>(op, pipeline, xs, sums);
        else gemv_quantised<decltype(kind)::value, 2>(op, pipeline, xs, sums);
    };
    switch (op.kind) {
        case kind_f16:
            if (op.span == 3) gemv_fp16<3>(op, pipeline, xs, sums);
            else if (op.span == 4) gemv_fp16<4>(op, pipeline, xs, sums);
            else if (op.span == 8) gemv_fp16<8>(op, pipeline, xs, sums);
            else gemv_fp16<1>(op, pipeline, xs, sums);
            break;
        case kind_i8: quantised(std::integral_constant<Kind, kind_i8>{}); break;
        case kind_i8_float: quantised(std::integral_constant<Kind, kind_i8_float>{}); break;
        case kind_i8_float_min: quantised(std::integral_constant<Kind, kind_i8_float_min>{}); break;
        case kind_q4_k: gemv_quantised<kind_q4_k, 1>(op, pipeline, xs, sums); break;
    }
}

// The epilogue is computed by the last four warps, from the last thread backwards.
constexpr int    epilogue_threads = 4 * 32;
__device__ int   epilogue_thread() { return Team::size() - 1 - int(threadIdx.x); }
__device__ float scale_of(const Instruction& op, const float* squares,
                          int hidden) { // of the norm, where x was quantised before it was known
    if (!op.norm || op.kind == kind_f16) return 1;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < warps; w++) sum += squares[w];
    return rsqrtf(__fdividef(sum, float(hidden)) + op.eps);
}
// The epilogue: the CTA's results from the partial sums; few results are the sync warp's alone.
__device__ void gemv_epilogue(const Instruction& op, const float* sums, float scale) {
    const int n = (op.gated ? op.pairs : 2 * op.pairs) + op.n_taken * op.rows, nth = epilogue_thread();
    if (nth >= epilogue_threads || (n <= 32 && nth >= 32)) return;
    const int  own_batches = op.batch == 4 ? (op.stages + 3) / 4 : (op.stages + 1) / 2;
    const auto row_sum     = [&](int row) {
        const float* from = sums + row * op.max_sums;
        float        v    = 0;
        for (int s = 0; s < op.max_sums; s++) v += from[s];
        return v * scale;
    };
    for (int r = nth; r < n; r += epilogue_threads) {
        if (op.gated) {
            int pair = op.first_pair + r, gate = r, up = r + op.pairs;
            if (const int more = r - op.pairs; more >= 0) { // of the dynamic chunks, each in a batch of its own
                const int chunk = int(unsigned(more) * op.rows_inverse >> 20), batches = own_batches + chunk;
                pair = op.taken[chunk] + more - chunk * op.rows;
                gate = batches * op.batch * op.rows + more - chunk * op.rows;
                up   = gate + op.rows;
                if (pair >= op.n_pairs) continue;
            }
            const float v = row_sum(gate);
            store_relaxed_fp16(op.all.projection[0].out, pair, gated(op.activation, v, row_sum(up)));
            continue;
        }
        float             v     = row_sum(r);
        int               row   = op.first_pair * 2 + r;
        const int         which = op.all.which(row);
        const Projection& to    = op.all.projection[which];
        row -= op.all.first_row[which];
        if (to.bias) v += to.bias[row];
        if (to.out_is_float) static_cast<float*>(to.out)[row] = v;
        else store_relaxed_fp16(to.out, row, v);
    }
}

} // namespace

#endif

} // namespace quire::cuda::megakernel
