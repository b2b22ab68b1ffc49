// Attention of the decode megakernel: RoPE of the new token's q and k, KV store, then split-KV attention on tensor cores
// (attention/decode.cuh); a sequence's only split is reduced without a detour through memory.
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

// One KV head of the paged cache, as a split sees it. Position `newest` is not in it yet: its K and V come from shared memory.
template <int D>
struct PagedHead {
    const Instruction&  op;
    const Attention&    a;
    const std::int32_t* table; // of the sequence
    const SplitKvItem&  item;
    int                 kv_head, newest;

    __device__ bool          visible(int position) const { return position >= item.begin && position < item.end; }
    __device__ const __half* row_at(const Half* cache, int position) const {
        const int shift = 31 - __clz(a.block_size), block = table[position >> shift]; // block_size is a power of two
        return reinterpret_cast<const __half*>(cache) +
               kv_row(block, kv_head, position & (a.block_size - 1), a.block_stride, PowerOfTwo{shift}) * D;
    }
    __device__ void load_k(int from, uint4 (&k)[2][MmaHeads<D>::k_words]) const {
        const int i = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int     position = from + i + 8 * h;
            const __half* at       = visible(position) && position != newest ? row_at(op.cache_k, position) : nullptr;
#pragma unroll
            for (int w = 0; w < MmaHeads<D>::k_words; w++)
                k[h][w] = at ? word_at(at + (j + 4 * w) * 8) : make_uint4(0, 0, 0, 0);
        }
    }
    __device__ void put_k(int from, const __half* new_k, uint4 (&k)[2][MmaHeads<D>::k_words]) const {
        const int i = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
#pragma unroll
        for (int h = 0; h < 2; h++)
            if (from + i + 8 * h == newest)
#pragma unroll
                for (int w = 0; w < MmaHeads<D>::k_words; w++) k[h][w] = word_at(new_k + (j + 4 * w) * 8);
    }
    __device__ void load_v(int from, uint4 (&v)[4][MmaHeads<D>::v_words]) const {
        const int i = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
#pragma unroll
        for (int h = 0; h < 4; h++) {
            const int     position = from + 2 * j + h % 2 + h / 2 * 8;
            const __half* at =
                visible(position) && position != newest ? row_at(op.cache_v, position) + i * (D / 8) : nullptr;
#pragma unroll
            for (int w = 0; w < MmaHeads<D>::v_words; w++) v[h][w] = at ? word_at(at + w * 8) : make_uint4(0, 0, 0, 0);
        }
    }
    __device__ void put_v(int from, const __half* new_v, uint4 (&v)[4][MmaHeads<D>::v_words]) const {
        const int i = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
#pragma unroll
        for (int h = 0; h < 4; h++)
            if (from + 2 * j + h % 2 + h / 2 * 8 == newest)
#pragma unroll
                for (int w = 0; w < MmaHeads<D>::v_words; w++) v[h][w] = word_at(new_v + i * (D / 8) + w * 8);
    }
};

// Shared memory of attention.
template <int D>
struct AttentionShared {
    float  row_maxes[warps][max_heads], sums[warps][max_heads];
    __half q[max_heads][D], k[D], v[D];
    float  values[1]; // [attention_warps][n_heads][D]
};

// A unit of work: a split-KV item for some query heads of one KV head. A CTA takes every gridDim-th.
struct AttentionUnit {
    CtaWork work;
    int     kv_head, head0, n_heads;
    bool    is_first; // of its KV head's units

    AttentionUnit() = default;
    __device__ AttentionUnit(const Attention& a, int unit) {
        const int group_size = a.n_heads / a.n_kv_heads, per_kv = (group_size + max_heads - 1) / max_heads;
        work.n_slots = a.n_kv_heads * per_kv;
        work.item    = unit / work.n_slots;
        work.slot    = unit - work.item * work.n_slots;
        kv_head      = work.slot / per_kv;
        is_first     = work.slot == kv_head * per_kv;
        head0        = kv_head * group_size + (work.slot - kv_head * per_kv) * max_heads;
        n_heads      = min(max_heads, kv_head * group_size + group_size - head0);
    }
};

// Reduces the partial results of the warps where a sequence has only one split.
template <int D>
__device__ void reduce_parts(const Attention& a, const AttentionUnit& unit, int n_parts, const AttentionShared<D>& s) {
    Team::sync();
    const int  part = int(threadIdx.x % 32);
    const bool has  = part < n_parts;
    for (int t = int(threadIdx.x); t < unit.n_heads * D; t += Team::size()) { // a warp has one head
        const int   g = t / D, d = t % D;
        const float top = has ? s.row_maxes[part][g] : -INFINITY, weight = rescale_of(top, warp_max(top)),
                    total = warp_sum(has ? weight * s.sums[part][g] : 0.0f);
        float v           = 0;
#pragma unroll
        for (int p = 0; p < warps; p++)
            v += __shfl_sync(~0u, weight, p) * (p < n_parts ? s.values[(p * unit.n_heads + g) * D + d] : 0.0f);
        store_relaxed_fp16(a.out, (unit.head0 + g) * D + d, total == 0 ? 0.0f : __fdividef(v, total));
    }
}

// Values that the attention of all layers shares in a step, in shared memory.
constexpr int max_block_ids = 256;
template <int D>
struct StepState {
    int           newest, slot; // the new token's position and slot
    AttentionUnit unit;         // this CTA's first unit,
    SplitKvItem   item;         // and that unit's item
    bool          has_second;   // unit
    int           first_block;  // first KV block of that item, and the ids from there on; -1: no room for them
    std::int32_t  blocks[max_block_ids];
    float2        angles[D / 2]; // sine and cosine of each pair

    __device__ const std::int32_t* table(const Plan& plan) const { // of the first item's sequence
        return first_block >= 0 ? blocks - first_block : plan.block_tables + item.table;
    }
    // By all threads.
    __device__ void init(const Program& program, const Plan& plan, const SplitKvItem* items, int n_items) {
        const Attention&    a = program.attend;
        const AttentionUnit unit(a, int(blockIdx.x));
        SplitKvItem         first;
        if (unit.work.item < n_items) first = items[unit.work.item];
        const int  shift = 31 - __clz(a.block_size), low = first.begin >> shift, high = max(first.end - 1, 0) >> shift;
        const bool fits = first.row >= 0 && high - low < max_block_ids;
        for (int b = low + int(threadIdx.x); fits && b <= high; b += int(blockDim.x))
            blocks[b - low] = plan.block_tables[first.table + b];
        if (threadIdx.x == 0) {
            this->unit  = unit;
            newest      = plan.positions[0];
            slot        = plan.slots[0];
            item        = first;
            first_block = fits ? low : -1;
            const AttentionUnit second(a, int(blockIdx.x + gridDim.x));
            has_second = second.work.item < n_items && items[second.work.item].row >= 0;
        }
        for (int pair = int(threadIdx.x); pair < program.rope.n_pairs; pair += int(blockDim.x)) {
            float sine, cosine;
            rope_angle(float(plan.positions[0]), program.rope.inv_freq[pair], sine, cosine);
            angles[pair] = {sine * program.rope.scale, cosine * program.rope.scale};
        }
    }
};

// One attention instruction. wait(): until q, k and v are there.
template <int D, class Wait>
__device__ void attend(const Instruction& op, const Program& program, const Plan& plan, const SplitKvItem* items,
                       int n_items, float* partial, std::int32_t* arrivals, unsigned char* memory,
                       const StepState<D>& step, const Wait& wait) {
    Attention a    = program.attend;
    a.out          = op.attended;
    a.softcap      = 0; // compile() refuses models with one
    auto&     s    = *reinterpret_cast<AttentionShared<D>*>(memory);
    const int warp = int(threadIdx.x / 32), i = int(threadIdx.x % 32) / 4, newest = step.newest;
    bool      waited = false;
    for (int n = int(blockIdx.x);; n += int(gridDim.x)) {
        const bool known = n == int(blockIdx.x);
        // known at the start of the step: looking it up here would delay all CTAs
        if (!known && (!step.has_second || n >= n_items * step.unit.work.n_slots)) break;
        const AttentionUnit unit = known ? step.unit : AttentionUnit(a, n);
        if (unit.work.item >= n_items) break;
        const SplitKvItem item = known ? step.item : items[unit.work.item];
        if (item.row < 0) break; // no more
        const PagedHead<D> cache{op,           a,     known ? step.table(plan) : plan.block_tables + item.table, item,
                                 unit.kv_head, newest};
        int                from = item.begin / 16 * 16;
        const int n_parts = min(program.attention_warps, (item.end - from + 15) / 16); // warps that have positions
        from += warp * 16;
        uint4 k[2][MmaHeads<D>::k_words];
        if (warp >= n_parts) from = item.end;
        uint4 v[4][MmaHeads<D>::v_words];
        cache.load_k(from, k); // independent of this step
        cache.load_v(from, v);
        if (waited) Team::sync(); // the previous unit is done with shared memory
        else wait();
        waited = true;

        const bool       has_newest = item.end == newest + 1;
        const RopeStore& rope       = program.rope;
        for (int t = int(threadIdx.x); t < (unit.n_heads + int(has_newest)) * (D / 2); t += Team::size()) {
            const int   h = t / (D / 2), pair = t % (D / 2);
            const Half* source  = h < unit.n_heads ? op.q + (unit.head0 + h) * D : op.k + unit.kv_head * D;
            __half*     to      = h < unit.n_heads ? s.q[h] : s.k;
            const bool  rotates = pair < rope.n_pairs; // beyond n_pairs are the dimensions that RoPE leaves alone
            const int   one     = rotates && rope.neox ? pair : 2 * pair,
                      other     = rotates && rope.neox ? pair + rope.n_pairs : 2 * pair + 1;
            const Half  x_bits = load_relaxed_fp16(source + one), y_bits = load_relaxed_fp16(source + other);
            const float x        = __half2float(poll_fp16(x_bits, source + one)),
                        y        = __half2float(poll_fp16(y_bits, source + other));
            const float2 by      = rotates ? step.angles[pair] : float2{0, 1};
            const float2 rotated = rotate_pair(x, y, by.x, by.y);
            to[one] = __float2half(rotated.x), to[other] = __float2half(rotated.y);
        }
        if (const int d = int(threadIdx.x) - (Team::size() - D); has_newest && d >= 0) {
            const Half* source = op.v + unit.kv_head * D + d;
            s.v[d]             = poll_fp16(load_relaxed_fp16(source), source);
        }
        Team::sync();
        if (has_newest && unit.is_first && threadIdx.x < D) {
            const int          slot = step.slot, d = int(threadIdx.x);
            const std::int64_t at = kv_row_of_slot(slot, unit.kv_head, a.block_stride, a.block_size) * D + d;
            reinterpret_cast<__half*>(op.cache_k)[at] = s.k[d];
            reinterpret_cast<__half*>(op.cache_v)[at] = s.v[d];
        }
        if (warp < n_parts) {
            std::uint32_t q[D / 8];
            MmaHeads<D>::template load_q<false>(s.q[0], unit.n_heads, q);
            MmaHeads<D>   heads;
            std::uint32_t weights[2];
            if (has_newest) cache.put_k(from, s.k, k), cache.put_v(from, s.v, v);
            heads.softmax(a, q, k, cache.visible(from + i), cache.visible(from + i + 8), weights);
            heads.accumulate_values(weights, v);
            while ((from += program.attention_warps * 16) < item.end) {
                cache.load_k(from, k);
                if (has_newest) cache.put_k(from, s.k, k);
                heads.softmax(a, q, k, cache.visible(from + i), cache.visible(from + i + 8), weights);
                cache.load_v(from, v);
                if (has_newest) cache.put_v(from, s.v, v);
                heads.accumulate_values(weights, v);
            }
            heads.store(unit.n_heads, s.row_maxes[warp], s.sums[warp], s.values + warp * unit.n_heads * D);
        }
        if (item.n_splits == 1) reduce_parts<D>(a, unit, n_parts, s);
        else
            reduce_splits<D, max_heads, Team>(a, item, unit.work, unit.head0, unit.n_heads, n_parts, &s.row_maxes[0][0],
                                              &s.sums[0][0], s.values, unit.n_heads * D, partial, arrivals);
    }
    if (!waited) wait();
}

// Into L2, by one warp.
__device__ void prefetch_l2(const void* memory, int bytes) {
    for (int line = int(threadIdx.x % 32) * 128; line < bytes; line += 32 * 128)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(memory) + line));
}
// Prefetches the K and V of this CTA's first unit into L2, by one warp.
template <int D>
__device__ void prefetch_cache_l2(const Instruction& op, const Attention& a, const Plan& plan,
                                  const StepState<D>& step) {
    if (step.item.row < 0) return;
    const AttentionUnit unit = step.unit;
    const PagedHead<D>  cache{op, a, step.table(plan), step.item, unit.kv_head, -1};
    for (int position = step.item.begin + int(threadIdx.x % 32); position < step.item.end; position += 32)
        for (const Half* of : {op.cache_k, op.cache_v})
            for (int line = 0; line < D * 2; line += 128)
                asm volatile(
                    "prefetch.global.L2 [%0];" ::"l"(reinterpret_cast<const char*>(cache.row_at(of, position)) + line));
}

} // namespace

#endif

} // namespace quire::cuda::megakernel
