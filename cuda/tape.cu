// A step of one token as a single kernel that stays on all processors: it goes through a tape of operations, and all wait for
// one another between two of them. Meanwhile the weights of the products to come are already on their way: each warp has a
// ring in shared memory (stream.cuh) that knows nothing of operations but which stretch of which rows is next, so that the
// memory is busy however short the products are. What a launch for each operation costs is not there either.
//
// Every block keeps the residual and adds up and norms it by itself: that is quicker than to be told.
//
// Limits: Hopper; RMS norms, gated feed-forward or products alone; head_dim 64 or 128; hidden up to 8192. All blocks are on
// the GPU at once (one a processor, a cooperative launch).
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <new>
#include <vector>

#include "attention_decode.cuh"
#include "bulk.cuh"
#include "kernels.h"
#include "matmul.cuh"
#include "stream.cuh"
#include "warp.cuh"

namespace quire::cuda {

namespace {

constexpr int stages          = 4;
constexpr int slots           = 8;   // operations that blocks know at a time
constexpr int attending_warps = 8;   // of a block
constexpr int most_hidden     = 8192;

// An operation of the tape: products of x, or attention.
struct Op {
    bool         attends  = false;
    bool         waits    = false; // for what the one before wrote
    bool         gated    = false;
    Kind         kind     = kind_f16;
    int          cols     = 0, slice = 0;   // of x; those of a stage
    int          n_pairs  = 0;              // of rows
    const float* norm     = nullptr;        // x is the residual's norm, or
    float        eps      = 0;
    const Half*  add      = nullptr;        // .. after this was added to the residual
    float*       residual = nullptr;        // .. which is written there
    const Half*  x        = nullptr;        // x
    Products     all{};
    const Half * q = nullptr, *k = nullptr, *v = nullptr;
    Half *       cache_k = nullptr, *cache_v = nullptr, *attended = nullptr;
};
static_assert(sizeof(Op) % 4 == 0 && std::is_trivially_copyable_v<Op>);

// What all operations have in common.
struct Shape {
    Weight    embedding;
    int       hidden = 0, n_ops = 0, stage_bytes = 0, x_room = 0; // bytes
    RopeStore rope;
    Attention attend;
};

#if __CUDA_ARCH__ >= 900

__device__ unsigned arrived(const unsigned* counter) {
    unsigned v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(counter) : "memory");
    return v;
}

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

// A warp's ring, and what it will bring next. All lanes know it, the first one acts.
template <int W>
struct Stream1 {
    const Op*      ops; // slots
    unsigned char* ring;
    std::uint64_t* ready;
    int            stage_bytes, n_ops;
    int            op = -1, pair = 0, end = 0, base = 0; // next
    int            brought = 0, used = 0;

    // The pairs of an operation that a block takes: the same number each, give or take one.
    static __device__ int begin_of(const Op& op, unsigned block) { return int(unsigned(op.n_pairs) * block / gridDim.x); }

    // Fills the ring from operations before `known`.
    __device__ void fill(int known) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        while (brought < used + stages) {
            while (pair >= end) {
                if (op + 1 >= known) return;
                const Op& next = ops[++op % slots];
                if (next.attends) continue;
                pair = begin_of(next, blockIdx.x) + warp;
                end  = begin_of(next, blockIdx.x + 1);
                base = 0;
            }
            const Op& from = ops[op % slots];
            if (lane == 0) {
                switch (from.kind) {
                    case kind_f16: bring<kind_f16>(from); break;
                    case kind_i8: bring<kind_i8>(from); break;
                    case kind_i8_float: bring<kind_i8_float>(from); break;
                    case kind_i8_float_min: bring<kind_i8_float_min>(from); break;
                    case kind_q4_k: bring<kind_q4_k>(from); break;
                }
            }
            brought++;
            base += from.slice;
            if (base >= from.cols) base = 0, pair += W;
        }
    }

    template <Kind K>
    __device__ void bring(const Op& from) {
        const int      n  = min(from.slice, from.cols - base);
        unsigned char* to = ring + brought % stages * stage_bytes;
        std::uint64_t* b  = ready + brought % stages;
        barrier_expect(b, unsigned(2 * row_bytes(K, n)));
        const Place of[2] = {place_of(from, pair, 0), place_of(from, pair, 1)};
        const auto  copy  = [&](const void* const Weight::* part, int (*bytes)(Kind, int)) {
            if (bytes(K, 256) == 0) return;
            for (int r = 0; r < 2; r++, to += bytes(K, from.slice))
                copy_bulk(to,
                           static_cast<const unsigned char*>(of[r].product.weight.*part) +
                               of[r].row * bytes(K, from.cols) + bytes(K, base),
                           unsigned(bytes(K, n)), b);
        };
        copy(&Weight::data, data_bytes);
        copy(&Weight::scales, scale_bytes);
        copy(&Weight::mins, min_bytes);
    }
};

// The products of this block's rows with x.
template <Kind K, int W>
__device__ void multiply_rows(const Op& op, unsigned char* xs, Stream1<W>& stream, int known) {
    const int  warp = threadIdx.x / 32, lane = threadIdx.x % 32, end = Stream1<W>::begin_of(op, blockIdx.x + 1);
    const auto integers = integers_in(xs, K, op.cols);
    for (int pair = Stream1<W>::begin_of(op, blockIdx.x) + warp; pair < end; pair += W) {
        float sum[2] = {};
        for (int base = 0; base < op.cols; base += op.slice) {
            const int stage = stream.used % stages;
            barrier_wait(stream.ready + stage, unsigned(stream.used / stages) & 1);
            add_stage<K>(stream.ring + stage * stream.stage_bytes, op.slice, xs, integers, base,
                         min(op.slice, op.cols - base), sum);
            __syncwarp(); // all have read it
            stream.used++;
            stream.fill(known);
        }
        float value[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const Place at = place_of(op, pair, r);
            value[r]       = warp_sum(sum[r]) + (at.product.bias ? at.product.bias[at.row] : 0.0f);
            if (op.gated || lane != 0) continue;
            if (at.product.out_is_float) static_cast<float*>(at.product.out)[at.row] = value[r];
            else static_cast<__half*>(at.product.out)[at.row] = __float2half(value[r]);
        }
        if (op.gated && lane == 0)
            static_cast<__half*>(op.all.product[0].out)[pair] =
                __float2half(__fdividef(value[0], 1 + __expf(-value[0])) * value[1]);
    }
}

// What other blocks wrote in this kernel is not looked for in the first-level cache.
__device__ uint4 shared_word(const void* p) { return __ldcg(static_cast<const uint4*>(p)); }
__device__ float shared_half(const Half* p) {
    const unsigned short bits = __ldcg(p);
    return __half2float(__ushort_as_half(bits));
}

// A tile of 16 positions of one kv head in the registers of a warp, and the paged cache it comes from.
template <int D>
struct Tile {
    uint4 k[2][Heads<D>::k_words], v[4][Heads<D>::v_words];

    // Position `newest` is not read: its words come from shared memory later.
    __device__ void load(const Op& op, const Attention& a, const std::int32_t* table, const DecodeItem& item, int kv_head,
                         int from, int newest) {
        const int   i = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
        const uint4 zero  = make_uint4(0, 0, 0, 0);
        const auto  place = [&](const Half* cache, int position) {
            const int block = position / a.block_size;
            return reinterpret_cast<const __half*>(cache) +
                   ((std::int64_t(table[item.table + block]) * a.n_kv_heads + kv_head) * a.block_size + position -
                    block * a.block_size) *
                       D;
        };
        const auto seen = [&](int position) {
            return position >= item.begin && position < item.end && position != newest;
        };
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int     position = from + i + 8 * h;
            const __half* at       = seen(position) ? place(op.cache_k, position) : nullptr;
#pragma unroll
            for (int w = 0; w < Heads<D>::k_words; w++)
                k[h][w] = at ? *reinterpret_cast<const uint4*>(at + (j + 4 * w) * 8) : zero;
        }
#pragma unroll
        for (int h = 0; h < 4; h++) {
            const int     position = from + 2 * j + h % 2 + h / 2 * 8;
            const __half* at       = seen(position) ? place(op.cache_v, position) + i * (D / 8) : nullptr;
#pragma unroll
            for (int w = 0; w < Heads<D>::v_words; w++) v[h][w] = at ? *reinterpret_cast<const uint4*>(at + w * 8) : zero;
        }
    }
    __device__ void put_newest(const __half* new_k, const __half* new_v, int from, int newest) {
        const int i = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
#pragma unroll
        for (int h = 0; h < 2; h++)
            if (from + i + 8 * h == newest)
#pragma unroll
                for (int w = 0; w < Heads<D>::k_words; w++) k[h][w] = word_at(new_k + (j + 4 * w) * 8);
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
    float  tops[attending_warps][most_heads], sums[attending_warps][most_heads];
    __half q[most_heads][D], k[D], v[D];
    float  values[1]; // [attending_warps][n_heads][D]
};

// Rotates the heads of the newest token, stores its K and V, and attends, for the items and kv heads that fall to this block.
// ready(): what q, k and v come from is there.
template <int D, class Ready>
__device__ void attend(const Op& op, const Shape& shape, const Plan& plan, const DecodeItem* items, int n_items,
                       float* partial, std::int32_t* tickets, unsigned char* memory, const Ready& ready) {
    Attention a = shape.attend;
    a.out       = op.attended;
    auto&     s = *reinterpret_cast<Attending<D>*>(memory);
    const int group_size = a.n_heads / a.n_kv_heads, per_kv = (group_size + most_heads - 1) / most_heads,
              n_slots = a.n_kv_heads * per_kv, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int slot = plan.slots[0], newest = plan.positions[0];
    bool      is_ready = false;
    for (int unit = blockIdx.x; unit < n_items * n_slots; unit += gridDim.x) {
        const Share      share{unit / n_slots, unit % n_slots, n_slots};
        const DecodeItem item = items[share.item];
        if (item.row < 0) continue;
        const int kv_head = share.slot / per_kv, head0 = kv_head * group_size + share.slot % per_kv * most_heads,
                  n_heads = min(most_heads, kv_head * group_size + group_size - head0);
        int       from    = item.begin / 16 * 16 + warp * 16;
        Tile<D>   tile;
        if (warp < attending_warps && from < item.end)
            tile.load(op, a, plan.block_tables, item, kv_head, from, newest); // depends on nobody
        if (!is_ready) ready(), is_ready = true;
        else __syncthreads(); // the one before is done with the shared memory

        // q's heads and, where it is needed, k's: a thread for each pair.
        const bool       is_last = item.end == newest + 1, stores = is_last && share.slot % per_kv == 0;
        const RopeStore& rope    = shape.rope;
        for (int n = threadIdx.x; n < (n_heads + int(is_last)) * (D / 2); n += blockDim.x) {
            const int     h = n / (D / 2), pair = n % (D / 2);
            const Half*   source = h < n_heads ? op.q + (head0 + h) * D : op.k + kv_head * D;
            __half*       to     = h < n_heads ? s.q[h] : s.k;
            const bool    turns  = pair < rope.half; // pairs beyond are those dimensions that do not turn
            const int     one    = !turns ? 2 * pair : rope.halves ? pair : 2 * pair,
                          other  = !turns ? 2 * pair + 1 : rope.halves ? pair + rope.half : 2 * pair + 1;
            const float   x = shared_half(source + one), y = shared_half(source + other);
            float         sine = 0, cosine = 1;
            if (turns) {
                const float angle = float(newest) * rope.inv_freq[pair], turn = rintf(angle * 0.15915494309f);
                const float rest  = fmaf(-turn, -1.7484556e-7f, fmaf(-turn, 6.2831855f, angle));
                sine = __sinf(rest) * rope.scale, cosine = __cosf(rest) * rope.scale;
            }
            to[one]   = __float2half(x * cosine - y * sine);
            to[other] = __float2half(x * sine + y * cosine);
        }
        if (is_last)
            for (int d = threadIdx.x; d < D; d += blockDim.x)
                s.v[d] = __float2half(shared_half(op.v + kv_head * D + d));
        __syncthreads();
        if (stores) {
            const std::int64_t at =
                ((std::int64_t(slot / a.block_size) * a.n_kv_heads + kv_head) * a.block_size + slot % a.block_size) * D;
            for (int d = threadIdx.x; d < D; d += blockDim.x) {
                reinterpret_cast<__half*>(op.cache_k)[at + d] = s.k[d];
                reinterpret_cast<__half*>(op.cache_v)[at + d] = s.v[d];
            }
        }
        if (warp < attending_warps) {
            const int     i = lane / 4;
            std::uint32_t q[D / 8];
            Heads<D>::load_q(s.q[0], n_heads, q);
            Heads<D> heads;
            while (from < item.end) {
                const auto seen = [&](int position) { return position >= item.begin && position < item.end; };
                if (is_last) tile.put_newest(s.k, s.v, from, newest);
                heads.add(a, q, tile.k, tile.v, seen(from + i), seen(from + i + 8));
                from += attending_warps * 16;
                if (from < item.end) tile.load(op, a, plan.block_tables, item, kv_head, from, newest);
            }
            heads.store(n_heads, s.tops[warp], s.sums[warp], s.values + warp * n_heads * D);
        }
        combine<D, most_heads, attending_warps>(a, item, share, head0, n_heads, &s.tops[0][0], &s.sums[0][0], s.values,
                                                n_heads * D, partial, tickets);
    }
    if (!is_ready) ready();
}

#endif

template <int D, int W>
__global__ void __launch_bounds__(W * 32, 1)
    tape_kernel(const Op* tape, Shape shape, Plan plan, const DecodeItem* items, int n_items, float* partial,
                std::int32_t* tickets, unsigned* counter, unsigned start) {
#if __CUDA_ARCH__ >= 900
    constexpr int threads = W * 32, most = most_hidden / 2 / threads; // pairs of the residual a thread has
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ std::uint64_t              ready[W][stages];
    __shared__ __align__(16) unsigned char slot_memory[slots * sizeof(Op)];
    __shared__ float                      sums[32];
    Op*            ops      = reinterpret_cast<Op*>(slot_memory);
    float2*        residual = reinterpret_cast<float2*>(memory);
    unsigned char* xs       = memory + shape.hidden * 4;
    const int      warp = threadIdx.x / 32, lane = threadIdx.x % 32, pairs = shape.hidden / 2;

    Stream1<W> stream{ops, xs + shape.x_room + warp * stages * shape.stage_bytes, ready[warp], shape.stage_bytes,
                      shape.n_ops};
    if (lane == 0) {
        for (int s = 0; s < stages; s++) barrier_init(&ready[warp][s], 1);
        barriers_ready();
    }
    const auto learn = [&](int first, int n) { // operations from the tape
        constexpr int words = int(sizeof(Op) / 4);
        for (int w = threadIdx.x; w < n * words; w += threads)
            if (const int op = first + w / words; op < shape.n_ops)
                reinterpret_cast<unsigned*>(ops + op % slots)[w % words] =
                    reinterpret_cast<const unsigned*>(tape + op)[w % words];
    };
    learn(0, slots);
    __syncthreads();
    stream.fill(min(shape.n_ops, slots - 1));
    for (int c = threadIdx.x; c < pairs; c += threads)
        residual[c] = {weight_at(shape.embedding, plan.tokens[0], 2 * c),
                       weight_at(shape.embedding, plan.tokens[0], 2 * c + 1)};

    for (int at = 0; at < shape.n_ops; at++) {
        const Op& op    = ops[at % slots];
        const int known = min(shape.n_ops, at + slots - 1);
        if (at > 0) learn(at + slots - 1, 1); // in the place of the one before
        const auto wait = [&] {
            if (op.waits && threadIdx.x == 0) {
                const unsigned wanted = start + unsigned(at) * gridDim.x;
                while (int(arrived(counter) - wanted) < 0) {}
            }
            __syncthreads();
            stream.fill(known);
        };
        if (op.attends) {
            attend<D>(op, shape, plan, items, n_items, partial, tickets, xs, wait);
        } else {
            float2 w[most];
            if (op.norm)
#pragma unroll
                for (int i = 0; i < most; i++)
                    if (const int c = int(threadIdx.x) + i * threads; c < pairs)
                        w[i] = reinterpret_cast<const float2*>(op.norm)[c];
            wait();
            const __half* x = reinterpret_cast<const __half*>(xs); // halves, in shared memory
            if (op.norm) {
                const bool to_integers = op.kind != kind_f16;
                auto*      out = reinterpret_cast<__half2*>(
                    to_integers ? xs + 2 * op.cols + (op.kind == kind_q4_k ? op.cols / 64 : op.cols / 32) * 4 + op.cols / 4
                                     : xs);
                std::uint32_t delta[most];
                if (op.add)
#pragma unroll
                    for (int i = 0; i < most; i++)
                        if (const int c = int(threadIdx.x) + i * threads; c < pairs)
                            delta[i] = __ldcg(reinterpret_cast<const unsigned*>(op.add) + c);
                float squares = 0;
#pragma unroll
                for (int i = 0; i < most; i++)
                    if (const int c = int(threadIdx.x) + i * threads; c < pairs) {
                        float2 v = residual[c];
                        if (op.add) {
                            const float2 more = as_float2(delta[i]);
                            v.x += more.x, v.y += more.y;
                            residual[c] = v;
                        }
                        if (op.residual && blockIdx.x == 0) reinterpret_cast<float2*>(op.residual)[c] = v;
                        squares += v.x * v.x + v.y * v.y;
                    }
                const float scale = rsqrtf(block_sum(squares, sums) / float(shape.hidden) + op.eps);
#pragma unroll
                for (int i = 0; i < most; i++)
                    if (const int c = int(threadIdx.x) + i * threads; c < pairs) {
                        const float2 v = residual[c];
                        out[c]         = __floats2half2_rn(v.x * scale * w[i].x, v.y * scale * w[i].y);
                    }
                x = reinterpret_cast<const __half*>(out);
                __syncthreads();
            }
            const auto read = [&](int g) {
                return op.norm ? word_at(x + g * 8) : shared_word(reinterpret_cast<const uint4*>(op.x) + g);
            };
            const Integers integers = integers_in(xs, op.kind, op.cols);
            switch (op.kind) {
                case kind_f16:
                    if (!op.norm)
                        each_word(read, op.cols / 8, [&](int g, const uint4& v) { reinterpret_cast<uint4*>(xs)[g] = v; });
                    break;
                case kind_q4_k: prepare_integers<kind_q4_k>(read, op.cols, integers); break;
                default: prepare_integers<kind_i8>(read, op.cols, integers);
            }
            __syncthreads();
            switch (op.kind) {
                case kind_f16: multiply_rows<kind_f16>(op, xs, stream, known); break;
                case kind_i8: multiply_rows<kind_i8>(op, xs, stream, known); break;
                case kind_i8_float: multiply_rows<kind_i8_float>(op, xs, stream, known); break;
                case kind_i8_float_min: multiply_rows<kind_i8_float_min>(op, xs, stream, known); break;
                case kind_q4_k: multiply_rows<kind_q4_k>(op, xs, stream, known); break;
            }
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence();
            asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
        }
    }
#endif
}

struct Tape {
    Shape    shape;
    int      warps  = 8, head_dim = 0;
    int      shared = 0; // bytes
    Op*      ops    = nullptr;
    unsigned* counter = nullptr;
    unsigned  done    = 0; // what the counter is at
};

// Reads what was told into operations of the tape. False: something else than a model that it knows.
bool understand(const TapeOp* told, int n, Shape& shape, std::vector<Op>& ops) {
    const void*  residual = nullptr;                // the name by which it goes, and after select
    const void*  selected = nullptr;
    const TapeOp *norm = nullptr, *rope = nullptr;  // the latest
    const Half*  pending  = nullptr;                // to be added at the next norm
    bool         fresh    = false;                  // that norm has not been used yet
    const auto   halves   = [](const void* p) { return static_cast<const Half*>(p); };
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
                    to.kind = kind_of(to.all.product[0].weight);
                    to.cols = int(op.cols);
                    to.waits = !normed || fresh;
                    if (normed) {
                        to.norm = norm->norm_weight;
                        to.eps  = norm->eps;
                        if (fresh) {
                            to.add   = pending;
                            pending  = nullptr;
                            fresh    = false;
                        }
                        if (norm->x == selected && selected) to.residual = static_cast<float*>(const_cast<void*>(selected));
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
    return !ops.empty() && rope && (shape.attend.head_dim == 64 || shape.attend.head_dim == 128);
}

using Kernel = void (*)(const Op*, Shape, Plan, const DecodeItem*, int, float*, std::int32_t*, unsigned*, unsigned);
Kernel kernel_of(const Tape& tape) {
    if (tape.head_dim == 64) return tape.warps == 8 ? tape_kernel<64, 8> : tape_kernel<64, 16>;
    return tape.warps == 8 ? tape_kernel<128, 8> : tape_kernel<128, 16>;
}

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
    // Q4_K's products are bound by instructions: more warps.
    const auto is_q4 = [](const Op& op) { return !op.attends && op.kind == kind_q4_k; };
    tape->warps      = std::ranges::count_if(ops, is_q4) * 2 > std::ssize(ops) ? 16 : 8;
    // Shared memory: the residual, x in its widest form (or what attention needs), rings.
    const int group = std::min(most_heads, shape.attend.n_heads / shape.attend.n_kv_heads);
    int       room  = int(2 * attending_warps * most_heads * 4 + (most_heads + 2) * tape->head_dim * 2 +
                   attending_warps * group * tape->head_dim * 4 + 16);
    for (const Op& op : ops)
        if (!op.attends)
            room = std::max(room, x_bytes(op.kind, op.cols) + (op.norm && op.kind != kind_f16 ? 2 * op.cols : 0));
    shape.x_room      = (room + 127) / 128 * 128;
    shape.n_ops       = int(ops.size());
    const int fixed   = shape.hidden * 4 + shape.x_room;
    constexpr int all = 220 * 1024;
    shape.stage_bytes = fixed < all ? (all - fixed) / (tape->warps * stages) / 128 * 128 : 0;
    tape->shared      = fixed + shape.stage_bytes * tape->warps * stages;
    bool fits         = true;
    for (Op& op : ops) {
        if (op.attends) continue;
        const int unit = unit_cols(op.kind), most = shape.stage_bytes / (2 * row_bytes(op.kind, unit)) * unit;
        if (most == 0) {
            fits = false;
            break;
        }
        const int n_slices = (op.cols + most - 1) / most;
        op.slice           = ((op.cols + n_slices - 1) / n_slices + unit - 1) / unit * unit;
    }
    tape->shape   = shape;
    tape->ops     = static_cast<Op*>(fits ? allocate(ops.size() * sizeof(Op)) : nullptr);
    tape->counter = static_cast<unsigned*>(fits ? allocate(256) : nullptr);
    if (!tape->ops || !tape->counter ||
        cudaFuncSetAttribute(kernel_of(*tape), cudaFuncAttributeMaxDynamicSharedMemorySize, tape->shared) != cudaSuccess) {
        destroy_tape(tape);
        return nullptr;
    }
    upload(tape->ops, ops.data(), ops.size() * sizeof(Op));
    return tape;
}

void run_tape(void* tape, const Plan& plan, const DecodeItem* items, int n_items, float* partial, std::int32_t* tickets,
              Stream stream) {
    auto&               t = *static_cast<Tape*>(tape);
    cudaLaunchAttribute together{};
    together.id              = cudaLaunchAttributeCooperative;
    together.val.cooperative = 1;
    cudaLaunchConfig_t config{};
    config.gridDim          = dim3(unsigned(n_processors()));
    config.blockDim         = dim3(unsigned(t.warps * 32));
    config.dynamicSmemBytes = std::size_t(t.shared);
    config.stream           = static_cast<cudaStream_t>(stream);
    config.attrs            = &together;
    config.numAttrs         = 1;
    cudaLaunchKernelEx(&config, kernel_of(t), static_cast<const Op*>(t.ops), t.shape, plan, items, n_items, partial, tickets, t.counter, t.done);
    t.done += unsigned(t.shape.n_ops) * unsigned(n_processors());
}

} // namespace quire::cuda
