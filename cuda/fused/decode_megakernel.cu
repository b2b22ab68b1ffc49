// A step with one token as a single persistent kernel: it executes a recorded list (tape) of operations, GEMVs and attention, and a
// CTA waits for the values that others write for it, half by half. Meanwhile the weights of the next GEMVs are already being
// loaded into a ring buffer in shared memory, which knows nothing of operations but which rows come next. So the memory is busy even
// if the GEMVs are short, and there is no launch cost per operation.
//
// The warps of a CTA: one, the producer, reads the tape and fills the ring; all others prepare x, multiply, compute attention and add
// up. One of these, the herald, also signals the progress of this CTA to the others and waits for theirs. A stage of the ring
// consists of some whole rows, and all warps work on it at once: each lane multiplies the same columns of every stage and keeps their x
// in registers. So x is read from shared memory once and not once per row, and a GEMV ends soon after its last row has arrived.
// Every CTA keeps the residual, and adds up and normalises it itself, which is faster than to receive it. Some rows of gate and up
// are not assigned: faster CTAs take more of them.
//
// Limits: Hopper; RMS norms, gated feed-forward or GEMVs alone; head_dim 64 or 128; hidden up to 8192, columns of other GEMVs
// up to 30720. All CTAs are on the GPU at once (one per SM, a cooperative launch).
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <map>
#include <type_traits>
#include <vector>

#include "../attention/decode.cuh"
#include "../gemm/gemv.cuh"
#include "../gemm/gemv_tma.cuh"
#include "../kernels.h"
#include "../ptx/tma.cuh"
#include "../warp.cuh"

namespace quire::cuda {

namespace {

constexpr int  warps        = 15; // of the team that does everything but filling the ring
constexpr int  threads      = 16 * 32;
constexpr int  most_hidden  = 8192;
constexpr int  most_claims  = 16; // chunks of a product
constexpr int  most_shared  = 215 * 1024;
constexpr Half cleared_half = 0xffff; // a not-a-number that conversions do not make

// An operation of the tape: products of x, or attention.
struct Op {
    bool         attends = false;
    bool         waits   = false; // for what the one before wrote
    bool         gated   = false;
    Kind         kind    = kind_f16;
    int          cols = 0, n_pairs = 0; // of x; of rows
    const float* norm     = nullptr;    // x is the residual's norm, or
    float        eps      = 0;
    const Half*  add      = nullptr; // .. after this was added to the residual
    float*       residual = nullptr; // .. which is written there
    const Half*  x        = nullptr; // x
    Projections  all{};
    // Data, scales and minima lie in a stage one after another, each of all its rows.
    int part_bytes[3] = {}, n_parts = 0, row_bytes = 0;
    // How the warps share a stage of some rows: a row has `tasks`, and a warp takes `span` of them in one go, or in each of two
    // passes.
    int      rows = 0, passes = 0, tasks = 0, span = 0, most_sums = 0; // .. sums of a row at most
    unsigned tasks_inverse = 0, rows_inverse = 0;
    int      batch = 0; // stages whose sums a warp adds up together
    // This block's part, filled in by the producer: pairs, stages.
    int first_pair = 0, pairs = 0, stages = 0;
    // Processors do not get the same share of a busy memory. So of long gated products a block has only `own` chunks, of `rows`
    // pairs each (two stages: of gate, of up), and claims more of what is left as it has room for them.
    int       own = 0, n_claimable = 0;
    unsigned* claims                   = nullptr; // how many have been claimed in this step
    unsigned* next_claims              = nullptr; // .. and in the next one
    int       claimed[most_claims + 1] = {};      // first pairs, and then -1; filled in by the producer
    int       n_claimed                = 0;
    // Of attention, and what blocks tell one another.
    const Half *q = nullptr, *k = nullptr, *v = nullptr;
    Half *      cache_k = nullptr, *cache_v = nullptr, *attended = nullptr;
    uint4*      cleared   = nullptr;           // by this step for the next one: where results will be, so many words
    int         n_cleared = 0, n_attended = 0; // .. halves
};
static_assert(sizeof(Op) % 4 == 0 && std::is_trivially_copyable_v<Op>);

// Columns of a lane's task.
constexpr __host__ __device__ int task_cols(Kind k) { return k == kind_f16 ? 8 : k == kind_q4_k ? 64 : 32; }

// What all operations have in common.
struct Shape {
    Weight       embedding;
    int          hidden = 0, n_ops = 0, x_room = 0, ring_bytes = 0; // .. bytes, bytes
    int          attending = 0;                                     // warps
    std::int64_t exchanged = 0;                                     // halves that blocks tell one another in a step
    RopeStore    rope;
    Attention    attend;
};

#if __CUDA_ARCH__ >= 900

constexpr int herald      = 14; // the warp that speaks with the other blocks
constexpr int producer    = 15; // the warp that fills the ring
constexpr int most_stages = 16; // in the ring
constexpr int slots       = 8;  // operations that a block knows

// The threads that take part in the operations: all but the producer's.
struct Team {
    static __device__ void          sync() { asm volatile("bar.sync 1, %0;" ::"n"(warps * 32) : "memory"); }
    static __device__ constexpr int size() { return warps * 32; }
};

// The products that a block computes: pairs of rows, about the same number each. What it takes of a product are neighbouring
// rows: of gate and of up the same ones, of others those of its range that are there.
struct Rows {
    const Projection* product;
    std::int64_t      first;      // of the product
    int               begin, end; // among the block's

    __device__ Rows(const Op& op, int which) : product(&op.all.projection[which]) {
        if (op.gated) {
            first = op.first_pair, begin = which * op.pairs, end = begin + op.pairs;
            if (which == 2) begin = end = 0;
            return;
        }
        const int from = op.first_pair * 2, low = max(op.all.first_row[which], from),
                  high = min(op.all.first_row[which + 1], from + op.pairs * 2);
        first = low - op.all.first_row[which], begin = low - from, end = max(high, low) - from;
    }
};

// Stages lie one after another in a ring of bytes, each in one piece: one that does not fit before the end is at the beginning. All
// warps count them for themselves.
struct Ring {
    unsigned char* memory;
    int            bytes;
    std::uint64_t *full, *empty; // [most_stages]
    int            at    = 0;
    unsigned       place = 0, parity = 0; // among the stages; of its round

    // The next stage has come.
    __device__ void wait() const { barrier_wait(full + place, parity); }
    // This thread is done with it.
    __device__ void release() const { barrier_arrive(empty + place); }
    // The next stage's beginning.
    __device__ int  begin(int n_bytes) const { return at + n_bytes > bytes ? 0 : at; }
    __device__ void pass(int n_bytes) {
        at = begin(n_bytes) + n_bytes;
        if (++place == most_stages) place = 0, parity ^= 1;
    }
};

// The operations that the producer has read: each has a slot until all are done with it.
struct Slots {
    Op*            ops;
    std::uint64_t *known, *done; // [slots]

    __device__ const Op& wait(int op) const {
        barrier_wait(known + op % slots, unsigned(op / slots) & 1);
        return ops[op % slots];
    }
};

// Fills the ring with the weights of all operations, by one warp. `exchanged`, `cleared`: where halves for other blocks are in this
// step and in the next, from where the tape says. before(op): what else there is to be asked for.
template <class Before>
__device__ void produce(const Op* tape, int n_ops, const Slots& all, Ring ring, std::int64_t exchanged,
                        std::int64_t cleared, bool odd, const Before& before) {
    constexpr int words = int(sizeof(Op) / 4), each = (words + 31) / 32;
    const int     lane   = int(threadIdx.x % 32);
    const auto    policy = read_once();
    unsigned      next[each];
    const auto    read = [&](int op) {
#pragma unroll
        for (int w = 0; w < each; w++)
            if (op < n_ops && lane + 32 * w < words)
                next[w] = reinterpret_cast<const unsigned*>(tape + op)[lane + 32 * w];
    };
    read(0);
    // Bytes are numbered through, rounds of the ring and gaps at its end included: where the ring's next stage begins, and, of lane
    // n, where the stage at place n does. `in_use`: how many may still be used, from place `oldest` on.
    int      head = 0, start = 0, oldest = 0, in_use = 0;
    unsigned oldest_parity = 0;
    for (int op = 0; op < n_ops; op++) {
        if (op >= slots) barrier_wait(all.done + op % slots, unsigned(op / slots - 1) & 1);
#pragma unroll
        for (int w = 0; w < each; w++)
            if (lane + 32 * w < words) reinterpret_cast<unsigned*>(all.ops + op % slots)[lane + 32 * w] = next[w];
        __syncwarp();
        Op& from = all.ops[op % slots];
        if (lane == 0) {
            const auto find = [&](auto& p) {
                if (p) p += exchanged;
            };
            find(from.add), find(from.x), find(from.q), find(from.k), find(from.v), find(from.attended);
            for (int k = 0; k < from.all.n; k++)
                if (Projection& to = from.all.projection[k]; to.out && !to.out_is_float)
                    to.out = static_cast<Half*>(to.out) + exchanged;
            from.cleared += cleared / 8;
            from.next_claims = from.claims + int(!odd);
            from.claims += int(odd);
        }
        if (lane == 0 && !from.attends) {
            const auto until  = [&](unsigned blocks) { return int(unsigned(from.n_pairs) * blocks / gridDim.x); };
            const bool claims = from.n_claimable > 0;
            from.pairs        = claims ? from.own * from.rows : until(blockIdx.x + 1) - until(blockIdx.x);
            from.first_pair   = claims ? int(blockIdx.x) * from.pairs : until(blockIdx.x);
            from.stages       = (2 * from.pairs + from.rows - 1) / from.rows;
        }
        __syncwarp();
        barrier_arrive(all.known + op % slots);
        read(op + 1);
        before(from);
        if (from.attends) continue;
        // A lane copies one part of one product's rows.
        const int part = lane % 3, n_bytes = from.rows * from.row_bytes, bytes = from.part_bytes[part],
                  part_at = from.rows * (part == 0   ? 0
                                         : part == 1 ? from.part_bytes[0]
                                                     : from.row_bytes - bytes);
        const Rows    mine(from, min(lane / 3, 2));
        const bool    copies    = lane < 9 && part < from.n_parts && lane / 3 < from.all.n;
        const Weight& w         = mine.product->weight;
        const auto*   data      = static_cast<const unsigned char*>(part == 0 ? w.data : part == 1 ? w.scales : w.mins);
        const auto    have_room = [&](int stage_bytes) {
            const int skipped = ring.begin(stage_bytes) != ring.at ? ring.bytes - ring.at : 0;
            while (in_use > 0 && (in_use == most_stages ||
                                  head + skipped + stage_bytes - __shfl_sync(~0u, start, oldest) > ring.bytes)) {
                barrier_wait(ring.empty + oldest, oldest_parity);
                in_use--;
                if (++oldest == most_stages) oldest = 0, oldest_parity ^= 1;
            }
        };
        // A stage of some rows, of which this lane brings n from row `first` of its product on.
        const auto bring = [&](int stage_bytes, int rows, int to, std::int64_t first, int n) {
            const int at = ring.begin(stage_bytes);
            have_room(stage_bytes);
            if (at != ring.at) head += ring.bytes - ring.at;
            if (lane == 0) barrier_expect(ring.full + ring.place, unsigned(rows * from.row_bytes));
            __syncwarp();
            if (copies && n > 0)
                copy_bulk(ring.memory + at + part_at + to * bytes, data + first * bytes, unsigned(n * bytes),
                          ring.full + ring.place, policy);
            if (lane == int(ring.place)) start = head;
            head += stage_bytes, in_use++;
            ring.pass(stage_bytes);
        };
        for (int stage = 0, done = 0; stage < from.stages; stage++, done += from.rows) {
            const int rows = min(from.rows, 2 * from.pairs - done), low = max(done, mine.begin),
                      high = min(done + rows, mine.end);
            bring(n_bytes, rows, low - done, mine.first + low - mine.begin, high - low);
        }
        for (int n = 0; from.n_claimable > 0; n++) {
            int chunk = from.n_claimable;
            have_room(n_bytes); // who claims early takes it from somebody quicker
            if (lane == 0 && n < most_claims) chunk = int(atomicAdd(from.claims, 1u));
            chunk            = __shfl_sync(~0u, chunk, 0);
            const bool there = chunk < from.n_claimable;
            const int  first = (from.own * int(gridDim.x) + chunk) * from.rows,
                      rows   = min(from.rows, from.n_pairs - first);
            if (lane == 0) from.claimed[n] = there ? first : -1, from.n_claimed = n;
            if (!there) { // a stage of nothing says so
                bring(0, 0, 0, 0, 0);
                break;
            }
            for (int which = 0; which < 2; which++) bring(n_bytes, rows, 0, first, lane / 3 == which ? rows : 0);
        }
    }
}

// -- x of the products, in shared memory: halves, or whole numbers of 16 bits, whose groups have a scale each. Word k of all
// tasks, eight numbers, lies before word k + 1 of any, so that neighbouring lanes read neighbouring words.

struct Numbers {
    uint4* words;
    float* scale; // [tasks]
    int*   total; // [cols / 32]: Σ of 32 neighbours
    int    tasks;

    __device__ Numbers(unsigned char* memory, Kind kind, int cols) : tasks(cols / task_cols(kind)) {
        words = reinterpret_cast<uint4*>(memory);
        scale = reinterpret_cast<float*>(memory + 2 * cols);
        total = reinterpret_cast<int*>(scale + tasks);
    }
};

// Values 8·g .. 8·g + 7, by whole warps with neighbouring g.
template <Kind K>
__device__ void put_x(int g, const float (&f)[8], unsigned char* xs, int cols) {
    if constexpr (K == kind_f16) {
        std::uint32_t h[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const __half2 pair = __floats2half2_rn(f[2 * k], f[2 * k + 1]);
            h[k]               = *reinterpret_cast<const std::uint32_t*>(&pair);
        }
        reinterpret_cast<uint4*>(xs)[g] = make_uint4(h[0], h[1], h[2], h[3]);
    } else {
        constexpr int lanes = task_cols(K) / 8; // that share a scale
        const Numbers to(xs, K, cols);
        float         most = 0;
#pragma unroll
        for (int k = 0; k < 8; k++) most = max_or_nan(most, fabsf(f[k]));
#pragma unroll
        for (int step = 1; step < lanes; step *= 2) most = max_or_nan(most, __shfl_xor_sync(~0u, most, step));
        const float inverse = most > 0 ? __fdividef(32767.0f, most) : 0.0f;
        // Rounded by adding a number so large that the fraction falls off: what is left stands in the low 16 bits.
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

// sum and Σ of 16 products: 16 weights' bytes by two words of x.
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

// A lane's task: what it keeps of x, and the products with its weights in a stage.
template <Kind K>
struct Task {
    uint4 x[4];
    float scale;
    int   total, words, scales, mins; // .. where its weights are in a stage
    bool  swapped;                    // which of its two words is first: so that lanes meet no bank twice

    __device__ void take(const Op& op, unsigned char* xs, int row, int task) {
        const Numbers from(xs, K, op.cols);
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

    __device__ void take(const Op& op, unsigned char* xs, int row, int task) {
        const Numbers from(xs, kind_q4_k, op.cols);
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
        // A word's two bytes here: of the even and the odd sub-block. The last four of each have 4 bits in one word, 2 in another.
        const bool          late = upper != 0;
        const std::uint32_t sc   = ((late ? head.w : head.y) >> shift & lower) | (head.y >> (shift + 2) & upper),
                            mi   = ((late ? head.w : head.z) >> min_shift & lower) | (head.z >> (shift + 2) & upper);
        const float2 d           = as_float2(head.x);
        const int i = even * int(sc & 255) + odd * int(sc >> 8), m = total.x * int(mi & 255) + total.y * int(mi >> 8);
        return scale * (d.x * float(i) - d.y * float(m));
    }
};

// Four sums of a warp at once: the first lane of each segment, which is of neighbouring lanes in whole fours, gets them. Lane l has
// sum l % 4; `end`: the lane after its segment.
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

// use(beginning) for the next n_stages, as they come; each is free again after that.
template <int N, class Use>
__device__ void use_stages(Ring& ring, int n_bytes, int n_stages, const Use& use) {
#pragma unroll
    for (int n = 0; n < N; n++) {
        if (n >= n_stages) break;
        const int at = ring.begin(n_bytes);
        ring.wait();
        use(n, ring.memory + at);
        ring.release();
        ring.pass(n_bytes);
    }
}

// How many stages come after the block's own: two of a chunk that it has claimed.
__device__ int claimed_stages(const Op& op, Ring& ring, int nth) {
    if (op.n_claimable == 0) return 0;
    ring.wait();
    if (op.claimed[nth] >= 0) return 2;
    ring.release();
    ring.pass(0);
    return 0;
}

// The products of a block's rows with x, for weights that are whole numbers. A warp's sums of a row go to `sums`, op.most_sums to
// a row. P: passes.
template <Kind K, int P>
__device__ void multiply_numbers(const Op& op, Ring& ring, unsigned char* xs, float* sums) {
    constexpr int at_once = 4 / P; // stages
    const int     rows = op.rows, tasks = op.tasks, n_bytes = rows * op.row_bytes, lane = int(threadIdx.x % 32),
              most_sums = op.most_sums;
    const auto row_of   = [&](int seen) { return int(unsigned(seen) * op.tasks_inverse >> 22); };
    Task<K>    x[P];
#pragma unroll
    for (int p = 0; p < P; p++) {
        const int  seen = int(threadIdx.x) + p * Team::size(), row = row_of(seen);
        const bool used = row < rows;
        x[p].take(op, xs, used ? row : 0, used ? seen - row * tasks : 0);
    }
    Team::sync(); // x is not needed any more, and sums come to its place
    // Of the sums that this lane gets to see. A row has as many as any row: where a warp less has some, zero.
    const int seen = int(threadIdx.x) + lane % P * Team::size(), row = row_of(seen), first = row * tasks,
              end = min(first + tasks - (seen - lane), 32), stage = lane % 4 / P, nth = seen / 32 - first / 32;
    const bool writes = row < rows && (lane < 4 || seen - first < 4),
               pads   = nth == most_sums - 2 && first + tasks - (seen - lane) <= 32;
    float* to         = sums + (stage * rows + row) * most_sums + nth;
#pragma unroll 1
    for (int n_stages = op.stages, chunk = 0;; n_stages -= at_once) {
        if (n_stages <= 0 && (n_stages = claimed_stages(op, ring, chunk++)) == 0) break;
        float v[4] = {};
        use_stages<at_once>(ring, n_bytes, n_stages, [&](int n, const unsigned char* from) {
#pragma unroll
            for (int p = 0; p < P; p++) v[n * P + p] = x[p].times(from);
        });
        const float sum = four_sums(v, end);
        if (writes && stage < n_stages) {
            *to = sum;
            if (pads) to[1] = 0;
        }
        to += at_once * rows * most_sums;
    }
}

// The same for halves: P units of 32 words of eight, one after another, to a warp, of one row or two.
template <int P>
__device__ void multiply_halves(const Op& op, Ring& ring, const unsigned char* xs, float* sums) {
    const int rows = op.rows, units = op.tasks, n_bytes = rows * op.row_bytes, words = op.cols / 8,
              lane = int(threadIdx.x % 32), warp = int(threadIdx.x / 32), most_sums = op.most_sums;
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
    Team::sync(); // x is not needed any more, and sums come to its place
    const int  stage = lane % 4 / 2, mine = row + lane % 2, nth = warp - mine * units / P;
    const bool writes = lane < 4 && mine < rows && (lane % 2 == 0 || second < P),
               pads   = nth == most_sums - 2 && (mine + 1) * units <= (warp + 1) * P;
    float* to         = sums + (stage * rows + mine) * most_sums + nth;
#pragma unroll 1
    for (int n_stages = op.stages, chunk = 0;; n_stages -= 2) {
        if (n_stages <= 0 && (n_stages = claimed_stages(op, ring, chunk++)) == 0) break;
        float v[4] = {};
        use_stages<2>(ring, n_bytes, n_stages, [&](int n, const unsigned char* from) {
#pragma unroll
            for (int p = 0; p < P; p++) {
                const uint4  w = word_at(from + at[p]);
                const float2 a = as_float2(w.x), b = as_float2(w.y), c = as_float2(w.z), d = as_float2(w.w),
                             e = as_float2(x[p].x), f = as_float2(x[p].y), g = as_float2(x[p].z), h = as_float2(x[p].w);
                float sum =
                    a.x * e.x + a.y * e.y + b.x * f.x + b.y * f.y + c.x * g.x + c.y * g.y + d.x * h.x + d.y * h.y;
                // Beyond the rows of x there are zeros, but here there may be anything.
                if (p < second) v[2 * n] += sum;
                else v[2 * n + 1] += sum;
            }
        });
        const float sum = four_sums(v, 32);
        if (writes && stage < n_stages) {
            *to = sum;
            if (pads) to[1] = 0;
        }
        to += 2 * rows * most_sums;
    }
}

__device__ void multiply_rows(const Op& op, Ring& ring, unsigned char* xs, float* sums) {
    const auto numbers = [&](auto kind) {
        if (op.passes == 1) multiply_numbers<decltype(kind)::value, 1>(op, ring, xs, sums);
        else multiply_numbers<decltype(kind)::value, 2>(op, ring, xs, sums);
    };
    switch (op.kind) {
        case kind_f16:
            if (op.span == 3) multiply_halves<3>(op, ring, xs, sums);
            else if (op.span == 4) multiply_halves<4>(op, ring, xs, sums);
            else if (op.span == 8) multiply_halves<8>(op, ring, xs, sums);
            else multiply_halves<1>(op, ring, xs, sums);
            break;
        case kind_i8: numbers(std::integral_constant<Kind, kind_i8>{}); break;
        case kind_i8_float: numbers(std::integral_constant<Kind, kind_i8_float>{}); break;
        case kind_i8_float_min: numbers(std::integral_constant<Kind, kind_i8_float_min>{}); break;
        case kind_q4_k: multiply_numbers<kind_q4_k, 1>(op, ring, xs, sums); break;
    }
}

// What blocks tell one another in this kernel are halves, each at an address of its own for each operation and for every other
// step. A step clears those of the next to what no result is; so who reads a half sees whether it is there yet, and nobody needs
// to wait until all that was written before the blocks' counter can be seen, too. The counter only says when to look.
__device__ bool  is_missing(std::uint32_t pair) { return (~pair - 0x00010001u) & pair & 0x80008000u; }
__device__ uint4 shared_word(const void* p) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}
// v, which was read from there, once it is complete.
__device__ uint4 complete(uint4 v, const void* p) {
    while (is_missing(v.x) || is_missing(v.y) || is_missing(v.z) || is_missing(v.w)) v = shared_word(p);
    return v;
}
__device__ Half shared_half(const Half* p) {
    Half v;
    asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
    return v;
}
__device__ __half complete_half(Half v, const Half* p) {
    while (v == cleared_half) v = shared_half(p);
    return __ushort_as_half(v);
}
__device__ void put_half(void* halves, int at, float v) {
    asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(static_cast<__half*>(halves) + at),
                 "h"(__half_as_ushort(__float2half(v)))
                 : "memory");
}

// The last four warps write the results: they tell which of these a thread has first, and how many threads there are.
constexpr int    finishing = 4 * 32;
__device__ int   first_result() { return Team::size() - 1 - int(threadIdx.x); }
__device__ float scale_of(const Op& op, const float* squares, int hidden) { // the norm's, where x was made without
    if (!op.norm || op.kind == kind_f16) return 1;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < warps; w++) sum += squares[w];
    return rsqrtf(__fdividef(sum, float(hidden)) + op.eps);
}
// The block's results from the sums of its warps; few are the herald's alone.
__device__ void finish_products(const Op& op, const float* sums, float scale) {
    const int n = (op.gated ? op.pairs : 2 * op.pairs) + op.n_claimed * op.rows, nth = first_result();
    if (nth >= finishing || (n <= 32 && nth >= 32)) return;
    const int  own_batches = op.batch == 4 ? (op.stages + 3) / 4 : (op.stages + 1) / 2;
    const auto row_sum     = [&](int row) {
        const float* from = sums + row * op.most_sums;
        float        v    = 0;
        for (int s = 0; s < op.most_sums; s++) v += from[s];
        return v * scale;
    };
    for (int r = nth; r < n; r += finishing) {
        if (op.gated) {
            int pair = op.first_pair + r, gate = r, up = r + op.pairs;
            if (const int more = r - op.pairs; more >= 0) { // of the chunks that were claimed, each a batch of its own
                const int chunk = int(unsigned(more) * op.rows_inverse >> 20), batches = own_batches + chunk;
                pair = op.claimed[chunk] + more - chunk * op.rows;
                gate = batches * op.batch * op.rows + more - chunk * op.rows;
                up   = gate + op.rows;
                if (pair >= op.n_pairs) continue;
            }
            const float v = row_sum(gate);
            put_half(op.all.projection[0].out, pair, __fdividef(v, 1 + __expf(-v)) * row_sum(up));
            continue;
        }
        float             v       = row_sum(r);
        int               row     = op.first_pair * 2 + r;
        const int         which   = op.all.which(row);
        const Projection& product = op.all.projection[which];
        row -= op.all.first_row[which];
        if (product.bias) v += product.bias[row];
        if (product.out_is_float) static_cast<float*>(product.out)[row] = v;
        else put_half(product.out, row, v);
    }
}

// One kv head of the paged cache, as an item sees it. Position `newest` is not there yet: it comes from shared memory.
template <int D>
struct Cache {
    const Op&           op;
    const Attention&    a;
    const std::int32_t* table; // of the sequence
    const SplitKvItem&  item;
    int                 kv_head, newest;

    __device__ bool          seen(int position) const { return position >= item.begin && position < item.end; }
    __device__ const __half* place(const Half* cache, int position) const {
        const int shift = 31 - __clz(a.block_size), block = table[position >> shift]; // block_size: a power of two
        return reinterpret_cast<const __half*>(cache) +
               (((std::int64_t(block) * a.n_kv_heads + kv_head) << shift) + (position & (a.block_size - 1))) * D;
    }
    __device__ void load_k(int from, uint4 (&k)[2][Heads<D>::k_words]) const {
        const int i = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int     position = from + i + 8 * h;
            const __half* at       = seen(position) && position != newest ? place(op.cache_k, position) : nullptr;
#pragma unroll
            for (int w = 0; w < Heads<D>::k_words; w++)
                k[h][w] = at ? word_at(at + (j + 4 * w) * 8) : make_uint4(0, 0, 0, 0);
        }
    }
    __device__ void put_k(int from, const __half* new_k, uint4 (&k)[2][Heads<D>::k_words]) const {
        const int i = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
#pragma unroll
        for (int h = 0; h < 2; h++)
            if (from + i + 8 * h == newest)
#pragma unroll
                for (int w = 0; w < Heads<D>::k_words; w++) k[h][w] = word_at(new_k + (j + 4 * w) * 8);
    }
    __device__ void load_v(int from, uint4 (&v)[4][Heads<D>::v_words]) const {
        const int i = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
#pragma unroll
        for (int h = 0; h < 4; h++) {
            const int     position = from + 2 * j + h % 2 + h / 2 * 8;
            const __half* at =
                seen(position) && position != newest ? place(op.cache_v, position) + i * (D / 8) : nullptr;
#pragma unroll
            for (int w = 0; w < Heads<D>::v_words; w++) v[h][w] = at ? word_at(at + w * 8) : make_uint4(0, 0, 0, 0);
        }
    }
    __device__ void put_v(int from, const __half* new_v, uint4 (&v)[4][Heads<D>::v_words]) const {
        const int i = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
#pragma unroll
        for (int h = 0; h < 4; h++)
            if (from + 2 * j + h % 2 + h / 2 * 8 == newest)
#pragma unroll
                for (int w = 0; w < Heads<D>::v_words; w++) v[h][w] = word_at(new_v + i * (D / 8) + w * 8);
    }
};

// Shared memory of attention.
template <int D>
struct Attending {
    float  tops[warps][most_heads], sums[warps][most_heads];
    __half q[most_heads][D], k[D], v[D];
    float  values[1]; // [attending warps][n_heads][D]
};

// What falls to this block of the step's attention, one unit after another: an item for some heads of a kv head.
struct Unit {
    Share share;
    int   kv_head, head0, n_heads;
    bool  is_first; // of those of its kv head

    Unit() = default;
    __device__ Unit(const Attention& a, int unit) {
        const int group_size = a.n_heads / a.n_kv_heads, per_kv = (group_size + most_heads - 1) / most_heads;
        share.n_slots = a.n_kv_heads * per_kv;
        share.item    = unit / share.n_slots;
        share.slot    = unit - share.item * share.n_slots;
        kv_head       = share.slot / per_kv;
        is_first      = share.slot == kv_head * per_kv;
        head0         = kv_head * group_size + (share.slot - kv_head * per_kv) * most_heads;
        n_heads       = min(most_heads, kv_head * group_size + group_size - head0);
    }
};

// The sums of a sequence's only chunk from its parts.
template <int D>
__device__ void combine_parts(const Attention& a, const Unit& unit, int n_parts, const Attending<D>& s) {
    Team::sync();
    const int  part = int(threadIdx.x % 32);
    const bool has  = part < n_parts;
    for (int t = int(threadIdx.x); t < unit.n_heads * D; t += Team::size()) { // a warp is at one head
        const int   g = t / D, d = t % D;
        const float top = has ? s.tops[part][g] : -INFINITY, weight = weight_of(top, warp_max(top)),
                    total = warp_sum(has ? weight * s.sums[part][g] : 0.0f);
        float v           = 0;
#pragma unroll
        for (int p = 0; p < warps; p++)
            v += __shfl_sync(~0u, weight, p) * (p < n_parts ? s.values[(p * unit.n_heads + g) * D + d] : 0.0f);
        put_half(a.out, (unit.head0 + g) * D + d, total == 0 ? 0.0f : __fdividef(v, total));
    }
}

// What all layers' attention needs to know of the step, in shared memory.
constexpr int known_blocks = 256;
template <int D>
struct Known {
    int          newest, slot; // position, and place in the cache
    Unit         unit;         // this block's first,
    SplitKvItem  item;         // and its item
    bool         has_second;   // unit
    int          first_block;  // of that item's range, and the blocks' ids as far as there is room
    std::int32_t blocks[known_blocks];
    float2       turns[D / 2]; // sine and cosine of each pair

    __device__ const std::int32_t* table(const Plan& plan) const { // of the first item's sequence
        return first_block >= 0 ? blocks - first_block : plan.block_tables + item.table;
    }
    // By all threads.
    __device__ void learn(const Shape& shape, const Plan& plan, const SplitKvItem* items, int n_items) {
        const Attention& a = shape.attend;
        const Unit       unit(a, int(blockIdx.x));
        SplitKvItem      first;
        if (unit.share.item < n_items) first = items[unit.share.item];
        const int  shift = 31 - __clz(a.block_size), low = first.begin >> shift, high = max(first.end - 1, 0) >> shift;
        const bool fits = first.row >= 0 && high - low < known_blocks;
        for (int b = low + int(threadIdx.x); fits && b <= high; b += int(blockDim.x))
            blocks[b - low] = plan.block_tables[first.table + b];
        if (threadIdx.x == 0) {
            this->unit  = unit;
            newest      = plan.positions[0];
            slot        = plan.slots[0];
            item        = first;
            first_block = fits ? low : -1;
            const Unit second(a, int(blockIdx.x + gridDim.x));
            has_second = second.share.item < n_items && items[second.share.item].row >= 0;
        }
        for (int pair = int(threadIdx.x); pair < shape.rope.n_pairs; pair += int(blockDim.x)) {
            // The angle within a turn, by 2π in two parts; then the fast functions are good to 2^-21.
            const float angle = float(plan.positions[0]) * shape.rope.inv_freq[pair],
                        turn  = rintf(angle * 0.15915494309f);
            const float rest  = fmaf(-turn, -1.7484556e-7f, fmaf(-turn, 6.2831855f, angle));
            turns[pair]       = {__sinf(rest) * shape.rope.scale, __cosf(rest) * shape.rope.scale};
        }
    }
};

// Rotates the heads of the newest token, stores its K and V, and attends.
// wait(): for what q, k and v come from.
template <int D, class Wait>
__device__ void attend(const Op& op, const Shape& shape, const Plan& plan, const SplitKvItem* items, int n_items,
                       float* partial, std::int32_t* tickets, unsigned char* memory, const Known<D>& step,
                       const Wait& wait) {
    Attention a    = shape.attend;
    a.out          = op.attended;
    a.softcap      = 0; // no model with one has a tape
    auto&     s    = *reinterpret_cast<Attending<D>*>(memory);
    const int warp = int(threadIdx.x / 32), i = int(threadIdx.x % 32) / 4, newest = step.newest;
    bool      waited = false;
    for (int n = int(blockIdx.x);; n += int(gridDim.x)) {
        const bool known = n == int(blockIdx.x);
        // All would wait for this block while it looked up that it has no more.
        if (!known && (!step.has_second || n >= n_items * step.unit.share.n_slots)) break;
        const Unit unit = known ? step.unit : Unit(a, n);
        if (unit.share.item >= n_items) break;
        const SplitKvItem item = known ? step.item : items[unit.share.item];
        if (item.row < 0) break; // no more
        const Cache<D> cache{op,           a,     known ? step.table(plan) : plan.block_tables + item.table, item,
                             unit.kv_head, newest};
        int            from    = item.begin / 16 * 16;
        const int      n_parts = min(shape.attending, (item.end - from + 15) / 16); // warps that have something
        from += warp * 16;
        uint4 k[2][Heads<D>::k_words];
        if (warp >= n_parts) from = item.end;
        uint4 v[4][Heads<D>::v_words];
        cache.load_k(from, k); // depends on nobody
        cache.load_v(from, v);
        if (waited) Team::sync(); // the one before is done with the shared memory
        else wait();
        waited = true;

        const bool       is_last = item.end == newest + 1;
        const RopeStore& rope    = shape.rope;
        for (int t = int(threadIdx.x); t < (unit.n_heads + int(is_last)) * (D / 2); t += Team::size()) {
            const int   h = t / (D / 2), pair = t % (D / 2);
            const Half* source = h < unit.n_heads ? op.q + (unit.head0 + h) * D : op.k + unit.kv_head * D;
            __half*     to     = h < unit.n_heads ? s.q[h] : s.k;
            const bool  turn   = pair < rope.n_pairs; // pairs beyond are those dimensions that do not turn
            const int   one    = turn && rope.neox ? pair : 2 * pair,
                      other    = turn && rope.neox ? pair + rope.n_pairs : 2 * pair + 1;
            const Half  x_bits = shared_half(source + one), y_bits = shared_half(source + other);
            const float x   = __half2float(complete_half(x_bits, source + one)),
                        y   = __half2float(complete_half(y_bits, source + other));
            const float2 by = turn ? step.turns[pair] : float2{0, 1};
            to[one]         = __float2half(x * by.y - y * by.x);
            to[other]       = __float2half(x * by.x + y * by.y);
        }
        if (const int d = int(threadIdx.x) - (Team::size() - D); is_last && d >= 0) {
            const Half* source = op.v + unit.kv_head * D + d;
            s.v[d]             = complete_half(shared_half(source), source);
        }
        Team::sync();
        if (is_last && unit.is_first && threadIdx.x < D) {
            const int          slot = step.slot, d = int(threadIdx.x);
            const std::int64_t at = ((std::int64_t(slot / a.block_size) * a.n_kv_heads + unit.kv_head) * a.block_size +
                                     slot % a.block_size) *
                                        D +
                                    d;
            reinterpret_cast<__half*>(op.cache_k)[at] = s.k[d];
            reinterpret_cast<__half*>(op.cache_v)[at] = s.v[d];
        }
        if (warp < n_parts) {
            std::uint32_t q[D / 8];
            Heads<D>::load_q(s.q[0], unit.n_heads, q);
            Heads<D>      heads;
            std::uint32_t weights[2];
            if (is_last) cache.put_k(from, s.k, k), cache.put_v(from, s.v, v);
            heads.weigh(a, q, k, cache.seen(from + i), cache.seen(from + i + 8), weights);
            heads.add_values(weights, v);
            while ((from += shape.attending * 16) < item.end) {
                cache.load_k(from, k);
                if (is_last) cache.put_k(from, s.k, k);
                heads.weigh(a, q, k, cache.seen(from + i), cache.seen(from + i + 8), weights);
                cache.load_v(from, v);
                if (is_last) cache.put_v(from, s.v, v);
                heads.add_values(weights, v);
            }
            heads.store(unit.n_heads, s.tops[warp], s.sums[warp], s.values + warp * unit.n_heads * D);
        }
        if (item.n_splits == 1) combine_parts<D>(a, unit, n_parts, s);
        else
            combine<D, most_heads, Team>(a, item, unit.share, unit.head0, unit.n_heads, n_parts, &s.tops[0][0],
                                         &s.sums[0][0], s.values, unit.n_heads * D, partial, tickets);
    }
    if (!waited) wait();
}

// By one warp.
__device__ void ask(const void* memory, int bytes) {
    for (int line = int(threadIdx.x % 32) * 128; line < bytes; line += 32 * 128)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(memory) + line));
}
// Asks for the K and V that this block will attend to first.
template <int D>
__device__ void ask_for_cache(const Op& op, const Attention& a, const Plan& plan, const Known<D>& step) {
    if (step.item.row < 0) return;
    const Unit     unit = step.unit;
    const Cache<D> cache{op, a, step.table(plan), step.item, unit.kv_head, -1};
    for (int position = step.item.begin + int(threadIdx.x % 32); position < step.item.end; position += 32)
        for (const Half* of : {op.cache_k, op.cache_v})
            for (int line = 0; line < D * 2; line += 128)
                asm volatile(
                    "prefetch.global.L2 [%0];" ::"l"(reinterpret_cast<const char*>(cache.place(of, position)) + line));
}

// -- what the products multiply

// As it is.
template <Kind K, class Wait>
__device__ void take_x(const Op& op, unsigned char* xs, const Wait& wait) {
    wait();
    const auto* x = reinterpret_cast<const uint4*>(op.x);
    each_word<Team>([&](int g) { return shared_word(x + g); }, op.cols / 8,
                    [&](int g, const uint4& read) {
                        const uint4  v = complete(read, x + g);
                        const float2 a = as_float2(v.x), b = as_float2(v.y), c = as_float2(v.z), d = as_float2(v.w);
                        const float  f[8] = {a.x, a.y, b.x, b.y, c.x, c.y, d.x, d.y};
                        put_x<K>(g, f, xs, op.cols);
                    });
}

// The norm of the residual: each block adds what is new, and norms for itself. Whole numbers are made before the sum of squares is
// known: it goes to `squares`, by warps, and the results are scaled.
template <Kind K, class Wait>
__device__ void norm_residual(const Op& op, int hidden, float4* residual, unsigned char* xs, float* squares,
                              const Wait& wait) {
    constexpr int most = (most_hidden / 8 + Team::size() - 1) / Team::size(); // words of eight that a thread has
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
            more[n]     = g < hidden / 8 ? shared_word(reinterpret_cast<const uint4*>(op.add) + g) : uint4{};
        }
#pragma unroll
        for (int n = 0; n < most; n++) {
            if (const int g = int(threadIdx.x) + n * Team::size(); g < hidden / 8)
                more[n] = complete(more[n], reinterpret_cast<const uint4*>(op.add) + g);
            const float2 a = as_float2(more[n].x), b = as_float2(more[n].y), c = as_float2(more[n].z),
                         d = as_float2(more[n].w);
            f[n][0].x += a.x, f[n][0].y += a.y, f[n][0].z += b.x, f[n][0].w += b.y;
            f[n][1].x += c.x, f[n][1].y += c.y, f[n][1].z += d.x, f[n][1].w += d.y;
        }
    }
    const auto put = [&](int g, const float4& a, const float4& b, const float4& p, const float4& q, float scale) {
        const float v[8] = {a.x * p.x * scale, a.y * p.y * scale, a.z * p.z * scale, a.w * p.w * scale,
                            b.x * q.x * scale, b.y * q.y * scale, b.z * q.z * scale, b.w * q.w * scale};
        put_x<K>(g, v, xs, op.cols);
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
        }
    if constexpr (K != kind_f16) {
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = sum;
    } else {
        const float scale = rsqrtf(__fdividef(block_sum<Team>(sum, squares), float(hidden)) + op.eps);
#pragma unroll
        for (int n = 0; n < most; n++)
            if (const int g = int(threadIdx.x) + n * Team::size(); g < hidden / 8)
                put(g, f[n][0], f[n][1], by[n][0], by[n][1], scale);
    }
}

template <Kind K, class Wait>
__device__ void make_x(const Op& op, int hidden, float* residual, unsigned char* xs, float* squares, const Wait& wait) {
    if (op.norm) norm_residual<K>(op, hidden, reinterpret_cast<float4*>(residual), xs, squares, wait);
    else take_x<K>(op, xs, wait);
    Team::sync();
}

#endif

template <int D>
__global__ void __launch_bounds__(threads, 1)
    tape_kernel(const Op* tape, const __grid_constant__ Shape shape, const __grid_constant__ Plan plan,
                const SplitKvItem* items, int n_items, float* partial, std::int32_t* tickets, unsigned* counter,
                unsigned start, bool odd) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ std::uint64_t full[most_stages], empty[most_stages], known[slots], done[slots];
    __shared__ __align__(16) unsigned char slot_memory[slots * sizeof(Op)];
    __shared__ float                       squares[32];
    __shared__ __align__(16) unsigned char step_memory[sizeof(Known<D>)];
    auto&                                  step     = *reinterpret_cast<Known<D>*>(step_memory);
    float*                                 residual = reinterpret_cast<float*>(memory);
    unsigned char*                         xs       = memory + shape.hidden * 4;
    float*                                 sums     = reinterpret_cast<float*>(xs);
    const Slots                            ops{reinterpret_cast<Op*>(slot_memory), known, done};
    Ring                                   ring{xs + shape.x_room, shape.ring_bytes, full, empty};

    if (threadIdx.x == 0) {
        for (int s = 0; s < most_stages; s++) barrier_init(&full[s], 1), barrier_init(&empty[s], warps * 32);
        for (int s = 0; s < slots; s++) barrier_init(&known[s], 32), barrier_init(&done[s], warps * 32);
        barriers_ready();
    }
    step.learn(shape, plan, items, n_items);
    __syncthreads();
    if (threadIdx.x / 32 == producer) {
        produce(tape, shape.n_ops, ops, ring, odd ? shape.exchanged : 0, odd ? 0 : shape.exchanged, odd,
                [&](const Op& op) {
                    if (op.attends) ask_for_cache<D>(op, shape.attend, plan, step);
                    if (op.norm) ask(op.norm, shape.hidden * 4);
                });
        return;
    }
    for (int c = int(threadIdx.x); c < shape.hidden; c += Team::size())
        residual[c] = weight_at(shape.embedding, plan.tokens[0], c);
    Team::sync();

    const bool tells = threadIdx.x == herald * 32;
    for (int at = 0; at < shape.n_ops; at++) {
        const Op& op = ops.wait(at);
        if (const int g = int(blockIdx.x + threadIdx.x * gridDim.x); g < op.n_cleared)
            op.cleared[g] = make_uint4(~0u, ~0u, ~0u, ~0u);
        if (op.n_claimable > 0 && blockIdx.x == 0 && threadIdx.x == 0) *op.next_claims = 0;
        const auto wait = [&] { // until what the operation before wrote is there or about to be
            if (op.waits && tells) {
                // Most blocks are enough: what is missing is seen to be, and asked for again.
                const unsigned wanted = start + unsigned(at) * gridDim.x - gridDim.x / 8;
                unsigned       count;
                do asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
                while (int(count - wanted) < 0);
            }
            Team::sync();
            if (at > 0) barrier_arrive(done + (at - 1) % slots); // nobody is at it now
        };
        if (op.attends) {
            attend<D>(op, shape, plan, items, n_items, partial, tickets, xs, step, wait);
            Team::sync();
        } else {
            if (op.kind == kind_f16) make_x<kind_f16>(op, shape.hidden, residual, xs, squares, wait);
            else if (op.kind == kind_q4_k) make_x<kind_q4_k>(op, shape.hidden, residual, xs, squares, wait);
            else make_x<kind_i8>(op, shape.hidden, residual, xs, squares, wait);
            multiply_rows(op, ring, xs, sums);
            const float scale = first_result() < finishing ? scale_of(op, squares, shape.hidden) : 1;
            Team::sync();
            finish_products(op, sums, scale);
        }
        if (tells) asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
    }
#endif
}

struct Tape {
    Shape     shape;
    int       head_dim = 0;
    int       shared   = 0; // bytes
    Op*       ops      = nullptr;
    unsigned* counter  = nullptr; // .. and what is claimed, behind it
    unsigned  done     = 0;       // what the counter is at
    Half*     exchange = nullptr; // what blocks tell one another
    bool      odd      = false;   // the next step
};

// How the warps share an operation's rows: those numbers of rows and passes for which most lanes have something to do, in stages
// that are not too large. False: its rows are too long.
bool share(Op& op) {
    const int  tasks    = op.cols / task_cols(op.kind);
    double     best     = 0;
    const auto consider = [&](int passes, int span, int tasks_of_row, int room) {
        const int rows = room / tasks_of_row;
        if (rows < 1 || (rows > 1 && rows * op.row_bytes > 24 * 1024)) return;
        const double used = double(rows * tasks_of_row) / room;
        if (used > best) best = used, op.passes = passes, op.span = span, op.tasks = tasks_of_row, op.rows = rows;
    };
    if (op.kind == kind_f16) {
        const int units = (tasks + 31) / 32; // of a warp
        for (int span : {8, 4, 3, 1})
            if (span <= units) consider(1, span, units, warps * span);
    } else {
        consider(1, 32, tasks, warps * 32);
        if (best == 0 && op.kind != kind_q4_k) consider(2, 32, tasks, 2 * warps * 32);
    }
    op.batch = op.kind == kind_f16 ? 2 : 4 / std::max(op.passes, 1);
    if (best > 0) op.rows_inverse = (1u << 20) / unsigned(op.rows) + 1;
    if (best > 0) op.tasks_inverse = ((1u << 22) + unsigned(op.tasks) - 1) / unsigned(op.tasks);
    for (int r = 0; r < op.rows; r++) {
        const int first = r * op.tasks, last = first + op.tasks - 1;
        op.most_sums = std::max(op.most_sums, last / op.span - first / op.span + 1);
    }
    return best > 0;
}

// Gives all halves that blocks tell one another places of their own in `memory`, or null to count them only. False: an operation
// reads what none writes.
bool exchange(std::vector<Op>& ops, Half* memory, std::int64_t& n) {
    std::map<const void*, std::int64_t> places; // of what was told to be there
    n                = 0;
    const auto write = [&](Half* out, std::int64_t halves) {
        const std::int64_t at = places[out] = n;
        n += (halves + 7) / 8 * 8;
        return memory ? memory + at : out;
    };
    bool       known = true;
    const auto read  = [&](const Half*& p) {
        const auto found = places.find(p);
        if (p && found == places.end()) known = false;
        else if (p && memory) p = memory + found->second;
    };
    for (Op& op : ops) {
        read(op.add), read(op.x), read(op.q), read(op.k), read(op.v);
        const std::int64_t first = n;
        if (op.attends) op.attended = write(op.attended, op.n_attended);
        for (int k = 0; k < (op.gated ? 1 : op.all.n); k++)
            if (Projection& to = op.all.projection[k]; !to.out_is_float)
                to.out = write(static_cast<Half*>(to.out), to.weight.rows);
        if (memory) op.cleared = reinterpret_cast<uint4*>(memory + first);
        op.n_cleared = int((n - first) / 8);
    }
    return known;
}

// Reads what was told into operations of the tape. False: something else than a model that it knows.
bool understand(const Operation* told, int n, Shape& shape, std::vector<Op>& ops) {
    const void*      residual = nullptr; // the name by which it goes, and after select
    const void*      selected = nullptr;
    const Operation *norm = nullptr, *rope = nullptr; // the latest
    const Half*      pending = nullptr;               // to be added at the next norm
    bool             fresh   = false;                 // that norm has not been used yet
    const auto       halves  = [](const void* p) { return static_cast<const Half*>(p); };
    for (int t = 0; t < n; t++) {
        const Operation& op = told[t];
        switch (op.kind) {
            case Operation::embed:
                if (residual || op.weight.cols > most_hidden || op.weight.cols % 32 != 0) return false;
                residual        = op.residual;
                shape.embedding = op.weight;
                shape.hidden    = int(op.weight.cols);
                break;
            case Operation::add:
                if (op.residual != residual || pending) return false;
                pending = halves(op.x);
                break;
            case Operation::select_rows:
                if (op.x != residual) return false;
                selected = op.residual;
                break;
            case Operation::norm:
                if (op.cols != shape.hidden) return false;
                if (op.residual) {
                    if (op.residual != residual || pending) return false;
                    pending = halves(op.x);
                } else if (op.x != residual && op.x != selected) {
                    return false;
                }
                norm  = &op;
                fresh = true;
                break;
            case Operation::rope_and_store:
                if (rope && (rope->rope.n_pairs != op.rope.n_pairs || rope->rope.inv_freq != op.rope.inv_freq))
                    return false;
                rope       = &op;
                shape.rope = op.rope;
                break;
            case Operation::attention: {
                if (!rope || rope->rope.q != op.attend.q) return false;
                shape.attend = op.attend;
                Op to;
                to.attends    = true;
                to.waits      = true;
                to.q          = rope->rope.q;
                to.k          = rope->rope.k;
                to.v          = rope->rope.v;
                to.cache_k    = rope->rope.cache_k;
                to.cache_v    = rope->rope.cache_v;
                to.attended   = op.attend.out;
                to.n_attended = op.attend.n_heads * op.attend.head_dim;
                ops.push_back(to);
                break;
            }
            case Operation::gemm:
            case Operation::gated_gemm: {
                const bool normed = norm && norm->out == op.x;
                for (int first = 0; first < op.n_projections;) {
                    Op to;
                    first += gather(op.projection + first, op.n_projections - first, to.all);
                    to.gated = op.kind == Operation::gated_gemm;
                    if (to.gated && to.all.n != 2) return false;
                    to.kind  = kind_of(to.all.projection[0].weight);
                    to.cols  = int(op.cols);
                    to.waits = !normed || fresh;
                    if (normed) {
                        to.norm = norm->norm_weight;
                        to.eps  = norm->eps;
                        if (fresh) {
                            to.add  = pending;
                            pending = nullptr;
                            fresh   = false;
                        }
                        if (norm->x == selected && selected)
                            to.residual = static_cast<float*>(const_cast<void*>(selected));
                    } else {
                        to.x = halves(op.x);
                    }
                    if (to.cols % (to.kind == kind_f16 ? 8 : 256) != 0) return false;
                    for (int k = 0; k < to.all.n; k++)
                        if (to.all.projection[k].weight.rows % 2 != 0) return false;
                    to.n_pairs = to.all.first_row[to.all.n] / 2;
                    if (to.gated) {
                        if (to.all.projection[0].weight.rows != to.all.projection[1].weight.rows) return false;
                        to.n_pairs = int(to.all.projection[0].weight.rows);
                    }
                    ops.push_back(to);
                }
                break;
            }
        }
    }
    return !ops.empty() && rope && std::has_single_bit(unsigned(shape.attend.block_size)) &&
           shape.attend.softcap == 0 && (shape.attend.head_dim == 64 || shape.attend.head_dim == 128);
}

using Kernel = void (*)(const Op*, Shape, Plan, const SplitKvItem*, int, float*, std::int32_t*, unsigned*, unsigned,
                        bool);
Kernel kernel_of(const Tape& tape) { return tape.head_dim == 64 ? tape_kernel<64> : tape_kernel<128>; }

} // namespace

void destroy_decode_megakernel(void* tape) {
    if (tape == nullptr) return;
    auto* t = static_cast<Tape*>(tape);
    release(t->ops);
    release(t->counter);
    release(t->exchange);
    delete t;
}

void* make_decode_megakernel(const Operation* told, int n, Context& gpu) {
    Shape           shape;
    std::vector<Op> ops;
    if (!gpu.sm90 || !gpu.cooperative || !understand(told, n, shape, ops)) return nullptr;
    auto* tape     = new Tape;
    tape->head_dim = shape.attend.head_dim;
    // Shared memory: the residual, x in its widest form (or the sums, or what attention needs), the ring.
    const int group  = std::min(most_heads, shape.attend.n_heads / shape.attend.n_kv_heads);
    const int values = group * tape->head_dim * 4,
              beside = 2 * warps * most_heads * 4 + (most_heads + 2) * tape->head_dim * 2;
    int  room = beside + 4 * values, largest = 0; // .. stage
    bool fits = true;
    for (Op& op : ops) {
        if (op.attends) continue;
        for (const auto bytes : {data_bytes, scale_bytes, min_bytes}) {
            if (bytes(op.kind, 256) == 0) break;
            op.row_bytes += op.part_bytes[op.n_parts++] = bytes(op.kind, op.cols);
        }
        if (!share(op)) {
            fits = false;
            break;
        }
        const int blocks = gpu.n_sms, chunks = (op.n_pairs + op.rows - 1) / op.rows, each = chunks / blocks;
        int       batches = ((op.n_pairs / blocks + 1) * 2 + op.rows * op.batch - 1) / (op.rows * op.batch);
        if (op.gated && each >= most_claims / 2) {
            op.own         = std::max(each * 3 / 4, (chunks + blocks - 1) / blocks - most_claims / 2);
            op.n_claimable = chunks - op.own * blocks;
            batches += most_claims;
        }
        largest = std::max(largest, op.rows * op.row_bytes);
        room    = std::max({room, x_bytes(op.kind, op.cols), batches * op.batch * op.rows * op.most_sums * 4});
    }
    shape.x_room     = (room + 127) / 128 * 128;
    shape.attending  = std::min(warps, (shape.x_room - beside) / values);
    shape.n_ops      = int(ops.size());
    shape.ring_bytes = (most_shared - shape.hidden * 4 - shape.x_room) / 128 * 128;
    tape->shared     = shape.hidden * 4 + shape.x_room + shape.ring_bytes;
    fits             = fits && shape.ring_bytes >= 3 * largest;
    fits             = fits && exchange(ops, nullptr, shape.exchanged);
    if (fits) {
        const std::vector<Half> cleared(std::size_t(shape.exchanged) * 2, cleared_half);
        tape->exchange = static_cast<Half*>(allocate(gpu, cleared.size() * sizeof(Half)));
        fits           = tape->exchange != nullptr;
        if (fits) upload(tape->exchange, cleared.data(), cleared.size() * sizeof(Half), gpu);
        if (fits) exchange(ops, tape->exchange, shape.exchanged);
    }
    tape->shape   = shape;
    tape->ops     = static_cast<Op*>(fits ? allocate(gpu, ops.size() * sizeof(Op)) : nullptr);
    tape->counter = static_cast<unsigned*>(fits ? allocate(gpu, (1 + 2 * ops.size()) * sizeof(unsigned)) : nullptr);
    for (std::size_t op = 0; tape->counter && op < ops.size(); op++) ops[op].claims = tape->counter + 1 + 2 * op;
    // As much as any tape: what a kernel may have is the device's, and two engines' tapes share the kernel.
    if (!tape->ops || !tape->counter || prepare_kernel(gpu, kernel_of(*tape), threads, most_shared) < 1) {
        destroy_decode_megakernel(tape);
        return nullptr;
    }
    upload(tape->ops, ops.data(), ops.size() * sizeof(Op), gpu);
    return tape;
}

bool run_decode_megakernel(void* tape, const Plan& plan, float* partial, std::int32_t* tickets, Context& gpu) {
    auto& t = *static_cast<Tape*>(tape);
    if (launch_kernel(Launch::together, kernel_of(t), dim3(unsigned(gpu.n_sms)), unsigned(threads),
                      std::size_t(t.shared), gpu, static_cast<const Op*>(t.ops), t.shape, plan, plan.items.list,
                      plan.items.n, partial, tickets, t.counter, t.done, t.odd) != cudaSuccess) {
        cudaGetLastError(); // it has been dealt with
        return false;
    }
    t.done += unsigned(t.shape.n_ops) * unsigned(gpu.n_sms);
    t.odd = !t.odd;
    return true;
}

} // namespace quire::cuda
