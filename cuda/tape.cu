// A step of one token as a single kernel that stays on all processors: it goes through a tape of operations, products and
// attention, and all blocks wait for one another between two of them. Meanwhile the weights of the products to come are already on
// their way into a ring in shared memory, which knows nothing of operations but which stretch of which row is next: so the memory
// is busy however short the products are, and what a launch for each operation costs is not there either.
//
// The warps of a block: those that multiply take the ring's stages as they come; all with the herald prepare x, attend, and add
// up; the herald also tells the other blocks how far this one is, and waits for them; the producer plans what fills the ring.
// Every block keeps the residual, and adds up and norms it by itself: that is quicker than to be told.
//
// Limits: Hopper; RMS norms, gated feed-forward or products alone; head_dim 64 or 128; hidden up to 8192. All blocks are on
// the GPU at once (one a processor, a cooperative launch).
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <type_traits>
#include <vector>

#include "attention_decode.cuh"
#include "bulk.cuh"
#include "kernels.h"
#include "matmul.cuh"
#include "stream.cuh"
#include "warp.cuh"

namespace quire::cuda {

namespace {

constexpr int warps       = 14; // that multiply; two more have other jobs
constexpr int threads     = 16 * 32;
constexpr int most_stages = 48; // up to two a lane of the producer
constexpr int most_hidden = 8192;

// An operation of the tape: products of x, or attention.
struct Op {
    bool         attends = false;
    bool         waits   = false; // for what the one before wrote
    bool         gated   = false;
    Kind         kind    = kind_f16;
    int          cols = 0, slice = 0, n_slices = 0; // of x; those of a stage
    int          n_pairs = 0, of_pair = 0;          // of rows; stages of a pair
    const float* norm     = nullptr;                // x is the residual's norm, or
    float        eps      = 0;
    const Half*  add      = nullptr; // .. after this was added to the residual
    float*       residual = nullptr; // .. which is written there
    const Half*  x        = nullptr; // x
    Products     all{};
    // Data, scales and minima of a row, one after another in a stage: bytes of a row, of a full stage's part, of the last one's.
    int         row_bytes[3] = {}, part_bytes[3] = {}, last_bytes[3] = {}, n_parts = 0;
    const Half *q = nullptr, *k = nullptr, *v = nullptr;
    Half *      cache_k = nullptr, *cache_v = nullptr, *attended = nullptr;
};
static_assert(sizeof(Op) % 4 == 0 && std::is_trivially_copyable_v<Op>);

// Rows of a stage: two share x; where whole numbers are wide, or x is halves, one long row needs fewer copies.
constexpr __host__ __device__ int rows_of(Kind k) { return k == kind_q4_k ? 2 : 1; }

// What all operations have in common.
struct Shape {
    Weight embedding;
    int    hidden = 0, n_ops = 0, n_stages = 0, stage_bytes = 0, x_room = 0, most_sums = 0; // .. bytes, bytes, floats
    int    attending = 0;                                                                   // warps
    RopeStore rope;
    Attention attend;
};

#if __CUDA_ARCH__ >= 900

constexpr int herald =
    14; // the warp that speaks with the other blocks, and works with those that multiply when they do not
constexpr int producer = 15; // the warp that plans what the ring is filled with
constexpr int ahead    = 6;  // operations that a block knows beyond the one it is at
constexpr int slots    = 12; // .. and those that were: the producer may still look at one of them

// The threads that take part in the operations: all but the producer's.
struct Team {
    static __device__ void          sync() { asm volatile("bar.sync 1, %0;" ::"n"((herald + 1) * 32) : "memory"); }
    static __device__ constexpr int size() { return (herald + 1) * 32; }
};

// Where a row of a pair is.
struct Place {
    const Product& product;
    std::int64_t   row;
};
__device__ Place place_of(const Op& op, int pair, int r) {
    if (op.gated) return {op.all.product[r], pair};
    const int which = op.all.which(pair * 2);
    return {op.all.product[which], pair * 2 - op.all.first_row[which] + r};
}

// The pairs of rows that a block takes of a product: the same number each, give or take one.
__device__ int first_pair_of(const Op& op, unsigned block) { return int(unsigned(op.n_pairs) * block / gridDim.x); }
__device__ int stages_of(const Op& op) {
    return op.attends ? 0 : (first_pair_of(op, blockIdx.x + 1) - first_pair_of(op, blockIdx.x)) * op.of_pair;
}

// What a place of the ring is to be filled with next. The producer's lanes write them, in parallel, as that is much arithmetic;
// the copies are begun by the warp that used the place last, as one warp alone would be too slow at it.
struct Job {
    const unsigned char* source[2][3];
    int                  bytes[3], apart[3], n_rows, n_parts;

    __device__ Job taken() const { // read in the order in which it is written here
        Job           copy;
        constexpr int words = int(sizeof(Job) / 8);
        const auto*   from  = reinterpret_cast<const volatile unsigned long long*>(this);
        auto*         to    = reinterpret_cast<unsigned long long*>(&copy);
#pragma unroll
        for (int w = 0; w < words; w++) to[w] = from[w];
        return copy;
    }
};
static_assert(sizeof(Job) % 8 == 0);
// Of a place. `unknown`: no job yet. `ready`: there is one. `vacant`: nothing to be used and no job: the producer begins it.
enum State : int { unknown, ready, vacant };

struct Ring {
    unsigned char* memory;
    std::uint64_t* full;
    Job*           jobs;
    int*           states;
    volatile int*  used; // of each place, the last stage that was
    std::uint64_t  policy;

    // Begins the copies of a place's job; by one thread.
    __device__ void begin(int place, int stage_bytes) const {
        const Job      job = jobs[place].taken();
        unsigned char* to  = memory + place * stage_bytes;
        // Before the copies: the stage may have been used, and its place be free again, as soon as they are there.
        *static_cast<volatile int*>(states + place) = unknown;
        barrier_expect(full + place, unsigned((job.bytes[0] + job.bytes[1] + job.bytes[2]) * job.n_rows));
#pragma unroll
        for (int p = 0; p < 3; p++) {
            if (p >= job.n_parts) break;
            copy_bulk(to, job.source[0][p], unsigned(job.bytes[p]), full + place, policy);
            to += job.apart[p];
            if (job.n_rows == 1) continue;
            copy_bulk(to, job.source[1][p], unsigned(job.bytes[p]), full + place, policy);
            to += job.apart[p];
        }
    }
    // A place has been used; by one thread.
    __device__ void free(int place, int stage, int stage_bytes) const {
        used[place] = stage;
        if (atomicCAS(states + place, unknown, vacant) == ready) begin(place, stage_bytes);
    }
};

// A place, as a lane of the producer sees it: the stages of all products are numbered through, and those that fall here come one
// after another.
struct Planner {
    int place, stage; // the next one
    int op = -1, first = 0, end = 0;

    // Goes on if it can, without waiting. False: there is nothing left.
    __device__ bool step(const Op* ops, const volatile int* known, const Shape& shape, const Ring& ring) {
        if (stage >= end) {
            if (op + 1 == shape.n_ops) return false;
            if (op + 1 >= *known) return true;
            __threadfence_block();
            first = end;
            end += stages_of(ops[++op % slots]);
            return true;
        }
        if (*static_cast<volatile int*>(ring.states + place) == ready) return true;
        Job&       job  = ring.jobs[place];
        const Op&  from = ops[op % slots];
        const int  pair = (stage - first) / from.of_pair, in = stage - first - pair * from.of_pair;
        const int  row = in / from.n_slices, slice = in - row * from.n_slices;
        const bool last = slice == from.n_slices - 1, both = from.of_pair == from.n_slices;
        job.n_rows  = both ? 2 : 1;
        job.n_parts = from.n_parts;
        for (int p = 0; p < 3; p++) {
            job.bytes[p] = last ? from.last_bytes[p] : from.part_bytes[p];
            job.apart[p] = from.part_bytes[p];
            for (int r = 0; r < 2; r++) {
                const Place   at = place_of(from, first_pair_of(from, blockIdx.x) + pair, both ? r : row);
                const Weight& w  = at.product.weight;
                job.source[r][p] = static_cast<const unsigned char*>(p == 0   ? w.data
                                                                     : p == 1 ? w.scales
                                                                              : w.mins) +
                                   at.row * from.row_bytes[p] + slice * from.part_bytes[p];
            }
        }
        stage += shape.n_stages;
        __threadfence_block();
        if (atomicCAS(ring.states + place, unknown, ready) == vacant) ring.begin(place, shape.stage_bytes);
        return true;
    }
};

__device__ void produce(const Op* ops, const volatile int* known, const Shape& shape, const Ring& ring) {
    const int lane = int(threadIdx.x % 32);
    Planner   one{lane, lane}, other{lane + 32, lane + 32};
    bool      more = one.place < shape.n_stages, other_more = other.place < shape.n_stages;
    while (more || other_more) {
        if (more) more = one.step(ops, known, shape, ring);
        if (other_more) other_more = other.step(ops, known, shape, ring);
    }
}

// This operation's stages, which begin at `begin`: a warp takes the next one that none has taken. `mine`: the one that it took
// and has not used yet. The sum of each row of a stage goes to `sums`.
template <Kind K>
__device__ void multiply_stages(const Op& op, const Shape& shape, const unsigned char* xs, const Ring& ring,
                                int* next_stage, int& mine, int begin, float* sums) {
    constexpr int R        = rows_of(K);
    const auto    integers = integers_in(const_cast<unsigned char*>(xs), K, op.cols);
    const int     cols = op.cols, slice = op.slice, n_slices = op.n_slices, end = begin + stages_of(op),
              lane = int(threadIdx.x % 32);
    while (mine < end) {
        int next = 0;
        if (lane == 0) next = atomicAdd(next_stage, 1);
        const int round = mine / shape.n_stages, at = mine - round * shape.n_stages, in = mine - begin,
                  base = in % n_slices * slice;
        // A parity tells rounds apart only if the one before is over.
        while (ring.used[at] != mine - shape.n_stages) {}
        barrier_wait(ring.full + at, unsigned(round) & 1);
        float sum[R] = {};
        add_stage<K, R>(ring.memory + at * shape.stage_bytes, slice, xs, integers, base, min(slice, cols - base), sum);
        __syncwarp(); // all have read it
        if (lane == 0) ring.free(at, mine, shape.stage_bytes);
        __syncwarp();
        if constexpr (R == 2) { // half a warp adds up one row, half the other
            const float keep = lane < 16 ? sum[0] : sum[1], give = lane < 16 ? sum[1] : sum[0];
            float       v = keep + __shfl_xor_sync(~0u, give, 16);
#pragma unroll
            for (int step = 8; step > 0; step /= 2) v += __shfl_xor_sync(~0u, v, step);
            if (lane % 16 == 0) sums[in * 2 + lane / 16] = v;
        } else {
            const float v = warp_sum(sum[0]);
            if (lane == 0) sums[in] = v;
        }
        mine = __shfl_sync(~0u, next, 0);
    }
}

// The block's results, from the sums of its stages.
__device__ void finish_products(const Op& op, const float* sums) {
    const int first_pair = first_pair_of(op, blockIdx.x), n_pairs = first_pair_of(op, blockIdx.x + 1) - first_pair;
    // Of a pair: the slices of one row and then of the other, or of both together.
    const int next = op.of_pair == op.n_slices ? 2 : 1, second = op.of_pair == op.n_slices ? 1 : op.n_slices;
    for (int p = int(threadIdx.x); p < n_pairs; p += Team::size()) {
        const float* from = sums + p * 2 * op.n_slices;
        float2       v    = {0, 0};
        for (int s = 0; s < op.n_slices; s++) v.x += from[s * next], v.y += from[s * next + second];
        const int pair = first_pair + p;
        if (op.gated) {
            static_cast<__half*>(op.all.product[0].out)[pair] = __float2half(__fdividef(v.x, 1 + __expf(-v.x)) * v.y);
            continue;
        }
        for (int r = 0; r < 2; r++) {
            const Place at    = place_of(op, pair, r);
            const float value = (r == 0 ? v.x : v.y) + (at.product.bias ? at.product.bias[at.row] : 0.0f);
            if (at.product.out_is_float) static_cast<float*>(at.product.out)[at.row] = value;
            else static_cast<__half*>(at.product.out)[at.row] = __float2half(value);
        }
    }
}

// What other blocks wrote in this kernel is not looked for in the first-level cache.
__device__ uint4 shared_word(const void* p) { return __ldcg(static_cast<const uint4*>(p)); }
__device__ float shared_half(const Half* p) {
    const unsigned short bits = __ldcg(p);
    return __half2float(__ushort_as_half(bits));
}

// One kv head of the paged cache, as an item sees it. Position `newest` is not there yet: it comes from shared memory.
template <int D>
struct Cache {
    const Op&           op;
    const Attention&    a;
    const std::int32_t* table; // of the sequence
    const DecodeItem&   item;
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
    __device__ void load_v(int from, const __half* new_v, uint4 (&v)[4][Heads<D>::v_words]) const {
        const int i = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
#pragma unroll
        for (int h = 0; h < 4; h++) {
            const int     position = from + 2 * j + h % 2 + h / 2 * 8;
            const __half* at =
                !seen(position) ? nullptr : (position == newest ? new_v : place(op.cache_v, position)) + i * (D / 8);
#pragma unroll
            for (int w = 0; w < Heads<D>::v_words; w++) v[h][w] = at ? word_at(at + w * 8) : make_uint4(0, 0, 0, 0);
        }
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

// What all layers' attention needs to know of the step, in shared memory.
constexpr int known_blocks = 256;
template <int D>
struct Known {
    int          newest, slot; // position, and place in the cache
    DecodeItem   item;         // this block's first
    int          first_block;  // of that item's range, and the blocks' ids as far as there is room
    std::int32_t blocks[known_blocks];
    float2       turns[D / 2]; // sine and cosine of each pair

    __device__ const std::int32_t* table(const Plan& plan) const { // of the first item's sequence
        return first_block >= 0 ? blocks - first_block : plan.block_tables + item.table;
    }
    // By all threads.
    __device__ void learn(const Shape& shape, const Plan& plan, const DecodeItem* items, int n_items) {
        const Attention& a = shape.attend;
        const Unit       unit(a, int(blockIdx.x));
        DecodeItem       first;
        if (unit.share.item < n_items) first = items[unit.share.item];
        const int  shift = 31 - __clz(a.block_size), low = first.begin >> shift, high = max(first.end - 1, 0) >> shift;
        const bool fits = first.row >= 0 && high - low < known_blocks;
        for (int b = low + int(threadIdx.x); fits && b <= high; b += int(blockDim.x))
            blocks[b - low] = plan.block_tables[first.table + b];
        if (threadIdx.x == 0) {
            newest      = plan.positions[0];
            slot        = plan.slots[0];
            item        = first;
            first_block = fits ? low : -1;
        }
        for (int pair = int(threadIdx.x); pair < shape.rope.half; pair += int(blockDim.x)) {
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
__device__ void attend(const Op& op, const Shape& shape, const Plan& plan, const DecodeItem* items, int n_items,
                       float* partial, std::int32_t* tickets, unsigned char* memory, const Known<D>& step,
                       const Wait& wait) {
    Attention a    = shape.attend;
    a.out          = op.attended;
    a.softcap      = 0; // no model with one has a tape
    auto&     s    = *reinterpret_cast<Attending<D>*>(memory);
    const int warp = int(threadIdx.x / 32), i = int(threadIdx.x % 32) / 4, newest = step.newest;
    bool      waited = false;
    for (int n = int(blockIdx.x);; n += int(gridDim.x)) {
        const Unit unit(a, n);
        if (unit.share.item >= n_items) break;
        const bool       known = n == int(blockIdx.x);
        const DecodeItem item  = known ? step.item : items[unit.share.item];
        if (item.row < 0) break; // no more
        const Cache<D> cache{op,           a,     known ? step.table(plan) : plan.block_tables + item.table, item,
                             unit.kv_head, newest};
        int            from    = item.begin / 16 * 16;
        const int      n_parts = min(shape.attending, (item.end - from + 15) / 16); // warps that have something
        from += warp * 16;
        uint4 k[2][Heads<D>::k_words];
        if (warp >= n_parts) from = item.end;
        cache.load_k(from, k);    // depends on nobody
        if (waited) Team::sync(); // the one before is done with the shared memory
        else wait();
        waited = true;

        const bool       is_last = item.end == newest + 1;
        const RopeStore& rope    = shape.rope;
        for (int t = int(threadIdx.x); t < (unit.n_heads + int(is_last)) * (D / 2); t += Team::size()) {
            const int   h = t / (D / 2), pair = t % (D / 2);
            const Half* source = h < unit.n_heads ? op.q + (unit.head0 + h) * D : op.k + unit.kv_head * D;
            __half*     to     = h < unit.n_heads ? s.q[h] : s.k;
            const bool  turn   = pair < rope.half; // pairs beyond are those dimensions that do not turn
            const int   one    = turn && rope.halves ? pair : 2 * pair,
                      other    = turn && rope.halves ? pair + rope.half : 2 * pair + 1;
            const float  x = shared_half(source + one), y = shared_half(source + other);
            const float2 by = turn ? step.turns[pair] : float2{0, 1};
            to[one]         = __float2half(x * by.y - y * by.x);
            to[other]       = __float2half(x * by.x + y * by.y);
        }
        if (const int d = int(threadIdx.x) - (Team::size() - D); is_last && d >= 0)
            s.v[d] = __ushort_as_half(__ldcg(op.v + unit.kv_head * D + d));
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
            Heads<D> heads;
            while (from < item.end) {
                std::uint32_t weights[2];
                if (is_last) cache.put_k(from, s.k, k);
                heads.weigh(a, q, k, cache.seen(from + i), cache.seen(from + i + 8), weights);
                uint4 v[4][Heads<D>::v_words];
                cache.load_v(from, s.v, v);
                heads.add_values(weights, v);
                from += shape.attending * 16;
                cache.load_k(from, k);
            }
            heads.store(unit.n_heads, s.tops[warp], s.sums[warp], s.values + warp * unit.n_heads * D);
        }
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
    const Unit     unit(a, int(blockIdx.x));
    const Cache<D> cache{op, a, step.table(plan), step.item, unit.kv_head, -1};
    for (int position = step.item.begin + int(threadIdx.x % 32); position < step.item.end; position += 32)
        for (const Half* of : {op.cache_k, op.cache_v})
            for (int line = 0; line < D * 2; line += 128)
                asm volatile(
                    "prefetch.global.L2 [%0];" ::"l"(reinterpret_cast<const char*>(cache.place(of, position)) + line));
}

// -- x of the products, in shared memory: halves, or integers

template <Kind K>
__device__ void put_x(int g, const uint4& v, unsigned char* xs, int cols) {
    if constexpr (K == kind_f16) reinterpret_cast<uint4*>(xs)[g] = v;
    else put_integers<K>(g, v, integers_in(xs, K, cols));
}

// As it is.
template <Kind K>
__device__ void take_x(const Op& op, unsigned char* xs) {
    each_word<Team>([&](int g) { return shared_word(reinterpret_cast<const uint4*>(op.x) + g); }, op.cols / 8,
                    [&](int g, const uint4& v) { put_x<K>(g, v, xs, op.cols); });
}

// The norm of the residual: each block adds what is new, and norms for itself.
template <Kind K>
__device__ void norm_residual(const Op& op, int hidden, float4* residual, unsigned char* xs, float* scratch) {
    constexpr int most   = (most_hidden / 8 + Team::size() - 1) / Team::size(); // words of eight that a thread has
    const auto    add_to = [](float4& v, std::uint32_t a, std::uint32_t b) {
        const float2 p = as_float2(a), q = as_float2(b);
        v.x += p.x, v.y += p.y, v.z += q.x, v.w += q.y;
    };
    uint4 more[most];
#pragma unroll
    for (int n = 0; n < most; n++) {
        const int g = int(threadIdx.x) + n * Team::size();
        more[n] =
            op.add && g < hidden / 8 ? shared_word(reinterpret_cast<const uint4*>(op.add) + g) : make_uint4(0, 0, 0, 0);
    }
    float squares = 0;
#pragma unroll
    for (int n = 0; n < most; n++)
        if (const int g = int(threadIdx.x) + n * Team::size(); g < hidden / 8) {
            float4 a = residual[2 * g], b = residual[2 * g + 1];
            add_to(a, more[n].x, more[n].y);
            add_to(b, more[n].z, more[n].w);
            residual[2 * g] = a, residual[2 * g + 1] = b;
            squares += a.x * a.x + a.y * a.y + a.z * a.z + a.w * a.w + b.x * b.x + b.y * b.y + b.z * b.z + b.w * b.w;
            if (op.residual && blockIdx.x == 0) {
                reinterpret_cast<float4*>(op.residual)[2 * g]     = a;
                reinterpret_cast<float4*>(op.residual)[2 * g + 1] = b;
            }
        }
    float4 by[most][2];
#pragma unroll
    for (int n = 0; n < most; n++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int g = int(threadIdx.x) + n * Team::size();
            by[n][h]    = g < hidden / 8 ? reinterpret_cast<const float4*>(op.norm)[2 * g + h] : float4{};
        }
    const float scale  = rsqrtf(__fdividef(block_sum<Team>(squares, scratch), float(hidden)) + op.eps);
    const auto  halves = [&](float a, float wa, float b, float wb) {
        const __half2 h = __floats2half2_rn(a * scale * wa, b * scale * wb);
        return *reinterpret_cast<const std::uint32_t*>(&h);
    };
#pragma unroll
    for (int n = 0; n < most; n++)
        if (const int g = int(threadIdx.x) + n * Team::size(); g < hidden / 8) {
            const float4 a = residual[2 * g], b = residual[2 * g + 1], p = by[n][0], q = by[n][1];
            put_x<K>(g,
                     make_uint4(halves(a.x, p.x, a.y, p.y), halves(a.z, p.z, a.w, p.w), halves(b.x, q.x, b.y, q.y),
                                halves(b.z, q.z, b.w, q.w)),
                     xs, op.cols);
        }
}

template <Kind K>
__device__ void make_x(const Op& op, int hidden, float* residual, unsigned char* xs, float* scratch) {
    if (op.norm) norm_residual<K>(op, hidden, reinterpret_cast<float4*>(residual), xs, scratch);
    else take_x<K>(op, xs);
}

#endif

template <int D>
__global__ void __launch_bounds__(threads, 1)
    tape_kernel(const Op* tape, const __grid_constant__ Shape shape, const __grid_constant__ Plan plan,
                const DecodeItem* items, int n_items, float* partial, std::int32_t* tickets, unsigned* counter,
                unsigned start) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ std::uint64_t full[most_stages];
    __shared__ Job           jobs[most_stages];
    __shared__ int           states[most_stages], used[most_stages], next_stage;
    __shared__ __align__(16) unsigned char slot_memory[slots * sizeof(Op)];
    __shared__ float                       scratch[32];
    __shared__ __align__(16) unsigned char step_memory[sizeof(Known<D>)];
    __shared__ int                         known_ops; // how many operations are, or were, in slots
    Op*                                    ops      = reinterpret_cast<Op*>(slot_memory);
    auto&                                  step     = *reinterpret_cast<Known<D>*>(step_memory);
    float*                                 residual = reinterpret_cast<float*>(memory);
    unsigned char*                         xs       = memory + shape.hidden * 4;
    float*                                 sums     = reinterpret_cast<float*>(xs + shape.x_room);
    unsigned char*                         rings    = reinterpret_cast<unsigned char*>(sums + shape.most_sums);
    const int                              warp = int(threadIdx.x / 32), lane = int(threadIdx.x % 32);

    if (threadIdx.x == 0) {
        for (int s = 0; s < shape.n_stages; s++) {
            barrier_init(&full[s], 1);
            used[s]   = s - shape.n_stages;
            states[s] = vacant;
        }
        barriers_ready();
        next_stage = 0;
    }
    const auto learn = [&](int op) { // an operation from the tape; by one warp
        if (op < shape.n_ops)
            for (int w = lane; w < int(sizeof(Op) / 4); w += 32)
                reinterpret_cast<unsigned*>(ops + op % slots)[w] = reinterpret_cast<const unsigned*>(tape + op)[w];
    };
    if (warp <= ahead) learn(warp);
    step.learn(shape, plan, items, n_items);
    if (threadIdx.x == 0) known_ops = min(ahead + 1, shape.n_ops);
    __syncthreads();
    const Ring ring{rings, full, jobs, states, used, read_once()};
    if (warp == producer) {
        produce(ops, &known_ops, shape, ring);
        return;
    }
    for (int c = int(threadIdx.x); c < shape.hidden; c += Team::size())
        residual[c] = weight_at(shape.embedding, plan.tokens[0], c);
    int first_stage = 0, mine = 0; // of the operation; of the warp
    if (warp < warps && lane == 0) mine = atomicAdd(&next_stage, 1);
    mine = __shfl_sync(~0u, mine, 0);

    for (int at = 0; at < shape.n_ops; at++) {
        const Op&  op   = ops[at % slots];
        const auto wait = [&] { // for what the operation before wrote
            if (op.waits && threadIdx.x == herald * 32) {
                const unsigned wanted = start + unsigned(at) * gridDim.x;
                while (int(*static_cast<volatile unsigned*>(counter) - wanted) < 0) {}
                __threadfence();
            }
            Team::sync();
        };
        if (op.attends) {
            attend<D>(op, shape, plan, items, n_items, partial, tickets, xs, step, wait);
        } else {
            wait();
            if (op.kind == kind_f16) make_x<kind_f16>(op, shape.hidden, residual, xs, scratch);
            else if (op.kind == kind_q4_k) make_x<kind_q4_k>(op, shape.hidden, residual, xs, scratch);
            else make_x<kind_i8>(op, shape.hidden, residual, xs, scratch);
            Team::sync();
            if (warp < warps) switch (op.kind) {
                    case kind_f16:
                        multiply_stages<kind_f16>(op, shape, xs, ring, &next_stage, mine, first_stage, sums);
                        break;
                    case kind_i8:
                        multiply_stages<kind_i8>(op, shape, xs, ring, &next_stage, mine, first_stage, sums);
                        break;
                    case kind_i8_float:
                        multiply_stages<kind_i8_float>(op, shape, xs, ring, &next_stage, mine, first_stage, sums);
                        break;
                    case kind_i8_float_min:
                        multiply_stages<kind_i8_float_min>(op, shape, xs, ring, &next_stage, mine, first_stage, sums);
                        break;
                    case kind_q4_k:
                        multiply_stages<kind_q4_k>(op, shape, xs, ring, &next_stage, mine, first_stage, sums);
                        break;
                }
            else if (at + 1 < shape.n_ops) {
                const Op& next = ops[(at + 1) % slots];
                if (next.attends) ask_for_cache<D>(next, shape.attend, plan, step);
                if (next.norm) ask(next.norm, shape.hidden * 4);
            }
            Team::sync();
            finish_products(op, sums);
            first_stage += stages_of(op);
        }
        Team::sync();
        if (warp == herald) {
            if (lane == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
            learn(at + 1 + ahead);
            __threadfence_block();
            __syncwarp();
            if (lane == 0) *static_cast<volatile int*>(&known_ops) = min(at + 2 + ahead, shape.n_ops);
        }
    }
#endif
}

struct Tape {
    Shape     shape;
    int       head_dim = 0;
    int       shared   = 0; // bytes
    Op*       ops      = nullptr;
    unsigned* counter  = nullptr;
    unsigned  done     = 0; // what the counter is at
};

// Reads what was told into operations of the tape. False: something else than a model that it knows.
bool understand(const TapeOp* told, int n, Shape& shape, std::vector<Op>& ops) {
    const void*   residual = nullptr; // the name by which it goes, and after select
    const void*   selected = nullptr;
    const TapeOp *norm = nullptr, *rope = nullptr; // the latest
    const Half*   pending = nullptr;               // to be added at the next norm
    bool          fresh   = false;                 // that norm has not been used yet
    const auto    halves  = [](const void* p) { return static_cast<const Half*>(p); };
    for (int t = 0; t < n; t++) {
        const TapeOp& op = told[t];
        switch (op.kind) {
            case TapeOp::embed:
                if (residual || op.weight.cols > most_hidden || op.weight.cols % 32 != 0) return false;
                residual        = op.residual;
                shape.embedding = op.weight;
                shape.hidden    = int(op.weight.cols);
                break;
            case TapeOp::add:
                if (op.residual != residual || pending) return false;
                pending = halves(op.x);
                break;
            case TapeOp::select:
                if (op.x != residual) return false;
                selected = op.residual;
                break;
            case TapeOp::norm:
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
            case TapeOp::rope_and_store:
                if (rope && (rope->rope.half != op.rope.half || rope->rope.inv_freq != op.rope.inv_freq)) return false;
                rope       = &op;
                shape.rope = op.rope;
                break;
            case TapeOp::attention: {
                if (!rope || rope->rope.q != op.attend.q) return false;
                shape.attend = op.attend;
                Op to;
                to.attends  = true;
                to.waits    = true;
                to.q        = rope->rope.q;
                to.k        = rope->rope.k;
                to.v        = rope->rope.v;
                to.cache_k  = rope->rope.cache_k;
                to.cache_v  = rope->rope.cache_v;
                to.attended = op.attend.out;
                ops.push_back(to);
                break;
            }
            case TapeOp::products:
            case TapeOp::gated: {
                const bool normed = norm && norm->out == op.x;
                for (int first = 0; first < op.n_products;) {
                    Op to;
                    first += gather(op.product + first, op.n_products - first, to.all);
                    to.gated = op.kind == TapeOp::gated;
                    if (to.gated && to.all.n != 2) return false;
                    to.kind  = kind_of(to.all.product[0].weight);
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
                        if (to.all.product[k].weight.rows % 2 != 0) return false;
                    to.n_pairs = to.all.first_row[to.all.n] / 2;
                    if (to.gated) {
                        if (to.all.product[0].weight.rows != to.all.product[1].weight.rows) return false;
                        to.n_pairs = int(to.all.product[0].weight.rows);
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

using Kernel = void (*)(const Op*, Shape, Plan, const DecodeItem*, int, float*, std::int32_t*, unsigned*, unsigned);
Kernel kernel_of(const Tape& tape) { return tape.head_dim == 64 ? tape_kernel<64> : tape_kernel<128>; }

} // namespace

void destroy_tape(void* tape) {
    if (tape == nullptr) return;
    auto* t = static_cast<Tape*>(tape);
    release(t->ops);
    release(t->counter);
    delete t;
}

void* make_tape(const TapeOp* told, int n) {
    Shape           shape;
    std::vector<Op> ops;
    if (!is_hopper() || !understand(told, n, shape, ops)) return nullptr;
    auto* tape     = new Tape;
    tape->head_dim = shape.attend.head_dim;
    // Shared memory: the residual, x in its widest form (or what attention needs), rings.
    const int group  = std::min(most_heads, shape.attend.n_heads / shape.attend.n_kv_heads);
    const int values = group * tape->head_dim * 4,
              beside = 2 * warps * most_heads * 4 + (most_heads + 2) * tape->head_dim * 2;
    int room         = beside + 4 * values;
    for (const Op& op : ops)
        if (!op.attends) {
            room = std::max(room, x_bytes(op.kind, op.cols));
        }
    shape.x_room    = (room + 127) / 128 * 128;
    shape.attending = std::min(warps, (shape.x_room - beside) / values);
    shape.n_ops     = int(ops.size());
    // Stages of the size that holds most on average: what the products' rows can be cut into. Many, so that all warps have some of
    // a short product.
    constexpr int all      = 215 * 1024;
    const auto    slice_of = [](const Op& op, int bytes) { // 0: not even the smallest fits
        const int unit = unit_cols(op.kind), most = bytes / (rows_of(op.kind) * row_bytes(op.kind, unit)) * unit;
        if (most == 0) return 0;
        const int n = (op.cols + most - 1) / most;
        return ((op.cols + n - 1) / n + unit - 1) / unit * unit;
    };
    double    best      = 0;
    const int room_left = all - shape.hidden * 4 - shape.x_room;
    for (int bytes = 6144; bytes >= 4096; bytes -= 128) {
        double held = 0, stages = 0;
        for (const Op& op : ops) {
            if (op.attends) continue;
            const int slice = slice_of(op, bytes);
            if (slice == 0) stages = 1e30;
            held += double(op.n_pairs) * 2 * row_bytes(op.kind, op.cols);
            stages += double(op.n_pairs) * 2 / rows_of(op.kind) * ((op.cols + slice - 1) / std::max(slice, 1));
        }
        if (held / stages > best) best = held / stages, shape.stage_bytes = bytes;
    }
    for (Op& op : ops) {
        if (op.attends || best < 1) continue;
        op.slice        = slice_of(op, shape.stage_bytes);
        op.n_slices     = (op.cols + op.slice - 1) / op.slice;
        op.of_pair      = op.n_slices * 2 / rows_of(op.kind);
        shape.most_sums = std::max(shape.most_sums, (op.n_pairs / n_processors() + 1) * 2 * op.n_slices);
        for (const auto bytes : {data_bytes, scale_bytes, min_bytes}) {
            if (bytes(op.kind, 256) == 0) break;
            op.row_bytes[op.n_parts]  = bytes(op.kind, op.cols);
            op.part_bytes[op.n_parts] = bytes(op.kind, op.slice);
            op.last_bytes[op.n_parts] = bytes(op.kind, op.cols - (op.n_slices - 1) * op.slice);
            op.n_parts++;
        }
    }
    shape.most_sums = (shape.most_sums + 31) / 32 * 32;
    shape.n_stages  = best >= 1 ? std::min(most_stages, (room_left - shape.most_sums * 4) / shape.stage_bytes) : 0;
    tape->shared    = all - room_left + shape.most_sums * 4 + shape.stage_bytes * shape.n_stages;
    const bool fits = shape.n_stages > warps;
    tape->shape     = shape;
    tape->ops       = static_cast<Op*>(fits ? allocate(ops.size() * sizeof(Op)) : nullptr);
    tape->counter   = static_cast<unsigned*>(fits ? allocate(256) : nullptr);
    if (!tape->ops || !tape->counter ||
        cudaFuncSetAttribute(kernel_of(*tape), cudaFuncAttributeMaxDynamicSharedMemorySize, tape->shared) !=
            cudaSuccess) {
        cudaGetLastError(); // it has been dealt with
        destroy_tape(tape);
        return nullptr;
    }
    upload(tape->ops, ops.data(), ops.size() * sizeof(Op));
    return tape;
}

bool run_tape(void* tape, const Plan& plan, const DecodeItem* items, int n_items, float* partial, std::int32_t* tickets,
              Stream stream) {
    auto&               t = *static_cast<Tape*>(tape);
    cudaLaunchAttribute together{};
    together.id              = cudaLaunchAttributeCooperative;
    together.val.cooperative = 1;
    cudaLaunchConfig_t config{};
    config.gridDim          = dim3(unsigned(n_processors()));
    config.blockDim         = dim3(unsigned(threads));
    config.dynamicSmemBytes = std::size_t(t.shared);
    config.stream           = static_cast<cudaStream_t>(stream);
    config.attrs            = &together;
    config.numAttrs         = 1;
    if (cudaLaunchKernelEx(&config, kernel_of(t), static_cast<const Op*>(t.ops), t.shape, plan, items, n_items, partial,
                           tickets, t.counter, t.done) != cudaSuccess) {
        cudaGetLastError(); // it has been dealt with
        return false;
    }
    t.done += unsigned(t.shape.n_ops) * unsigned(n_processors());
    return true;
}

} // namespace quire::cuda
