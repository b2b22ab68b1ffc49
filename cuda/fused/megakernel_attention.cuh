// The decode megakernel's attention.
#pragma once

#include "../attention/decode.cuh"
#include "../gemm/gemv_tma.cuh"
#include "../paged_kv.cuh"
#include "../rope.cuh"
#include "megakernel_exchange.cuh"
#include "megakernel_pipeline.cuh"

namespace quire::cuda::megakernel {

#if __CUDA_ARCH__ >= 900

namespace {

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
               kv_row(block, kv_head, position & (a.block_size - 1), a.n_kv_heads, PowerOfTwo{shift}) * D;
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
    float  tops[warps][max_heads], sums[warps][max_heads];
    __half q[max_heads][D], k[D], v[D];
    float  values[1]; // [attending warps][n_heads][D]
};

// What falls to this block of the step's attention, one unit after another: an item for some heads of a kv head.
struct Unit {
    Share share;
    int   kv_head, head0, n_heads;
    bool  is_first; // of those of its kv head

    Unit() = default;
    __device__ Unit(const Attention& a, int unit) {
        const int group_size = a.n_heads / a.n_kv_heads, per_kv = (group_size + max_heads - 1) / max_heads;
        share.n_slots = a.n_kv_heads * per_kv;
        share.item    = unit / share.n_slots;
        share.slot    = unit - share.item * share.n_slots;
        kv_head       = share.slot / per_kv;
        is_first      = share.slot == kv_head * per_kv;
        head0         = kv_head * group_size + (share.slot - kv_head * per_kv) * max_heads;
        n_heads       = min(max_heads, kv_head * group_size + group_size - head0);
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
            float sine, cosine;
            rope_angle(float(plan.positions[0]), shape.rope.inv_freq[pair], sine, cosine);
            turns[pair] = {sine * shape.rope.scale, cosine * shape.rope.scale};
        }
    }
};

// Rotates the heads of the newest token, stores its K and V, and attends.
// wait(): for what q, k and v come from.
template <int D, class Wait>
__device__ void attend(const Op& op, const Shape& shape, const Plan& plan, const SplitKvItem* items, int n_items,
                       float* partial, std::int32_t* arrivals, unsigned char* memory, const Known<D>& step,
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
            const float x        = __half2float(complete_half(x_bits, source + one)),
                        y        = __half2float(complete_half(y_bits, source + other));
            const float2 by      = turn ? step.turns[pair] : float2{0, 1};
            const float2 rotated = rotate_pair(x, y, by.x, by.y);
            to[one] = __float2half(rotated.x), to[other] = __float2half(rotated.y);
        }
        if (const int d = int(threadIdx.x) - (Team::size() - D); is_last && d >= 0) {
            const Half* source = op.v + unit.kv_head * D + d;
            s.v[d]             = complete_half(shared_half(source), source);
        }
        Team::sync();
        if (is_last && unit.is_first && threadIdx.x < D) {
            const int          slot = step.slot, d = int(threadIdx.x);
            const std::int64_t at = kv_row_of_slot(slot, unit.kv_head, a.n_kv_heads, a.block_size) * D + d;
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
            combine<D, max_heads, Team>(a, item, unit.share, unit.head0, unit.n_heads, n_parts, &s.tops[0][0],
                                        &s.sums[0][0], s.values, unit.n_heads * D, partial, arrivals);
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

} // namespace

#endif

} // namespace quire::cuda::megakernel
