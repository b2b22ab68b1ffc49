// Attention of the decode megakernel: RoPE of the new token's q and k, KV store, then split-KV attention on tensor cores
// (attention/decode.cuh); a sequence's only split is reduced without a detour through memory.
#pragma once

#include <type_traits>

#include "../attention/codes.cuh"
#include "../attention/decode.cuh"
#include "../gemm/gemv_tma.cuh"
#include "../paged_kv.cuh"
#include "../rope.cuh"
#include "megakernel_exchange.cuh"
#include "megakernel_pipeline.cuh"

namespace quire::cuda::megakernel {

#if __CUDA_ARCH__ >= 900

namespace {

// K and V of 16 positions, as a lane has them for MmaHeads: fp16, or codes with their scales.
template <int D, KvType Type>
struct KvOfLane {
    static constexpr bool coded   = Type != KvType::f16;
    static constexpr int  k_words = MmaHeads<D, Type>::k_words, v_words = MmaHeads<D, Type>::v_words;
    using VWord = std::conditional_t<coded, uint2, uint4>;

    uint4    k[2][k_words];
    VWord    v[4][v_words];
    KvScales scales;

    __device__ void load_k(int h, const unsigned char* row) { // of position i + 8 h; null: zeros
        const int j = threadIdx.x % 4;
#pragma unroll
        for (int w = 0; w < k_words; w++) k[h][w] = row ? word_at(row + (j + 4 * w) * 16) : make_uint4(0, 0, 0, 0);
    }
    __device__ void load_v(int h, const unsigned char* row) { // of position 2j, 2j + 1, 2j + 8 or 2j + 9; null: zeros
        const int  i    = threadIdx.x % 32 / 4;
        const auto from = row + i * v_words * int(sizeof(VWord));
#pragma unroll
        for (int w = 0; w < v_words; w++)
            v[h][w] = row ? *reinterpret_cast<const VWord*>(from + w * sizeof(VWord)) : VWord{};
    }
    __device__ void load_scales(int h, const float* of_k, const float* of_v) { // of position i + 8 h; null: 0
        if constexpr (coded) scales.k[h] = of_k ? *of_k : 0, scales.v[h] = of_v ? *of_v * top_code(Type) : 0;
    }
    // Scores, and a step of the online softmax: p gets the weights of the positions.
    __device__ void softmax(const Attention& a, MmaHeads<D, Type>& heads, const QueryHeads<D, Type>& q, bool visible0,
                            bool visible8, std::uint32_t (&p)[1][2]) const {
        float score[1][4];
        q.scores(k, score[0]);
        heads.template softmax<1>(a, score, {{visible0, visible8}}, p, {scales});
    }
    __device__ void accumulate(MmaHeads<D, Type>& heads, const std::uint32_t (&p)[1][2]) const {
        if constexpr (coded) heads.accumulate_codes(p[0], v);
        else heads.accumulate_values(p[0], v);
    }
};

// Shared memory of attention. The newest position's K and V stand here as they will in the cache.
template <int D, KvType Type>
struct AttentionShared {
    static constexpr int row_bytes = Type == KvType::f16 ? 2 * D : D;

    float  row_maxes[warps][max_heads], sums[warps][max_heads];
    __half q[max_heads][D];
    alignas(16) unsigned char k[row_bytes], v[row_bytes];
    float k_scale, v_scale;
    alignas(16) float values[1]; // [attention_warps][n_heads][D]; before, a row of each warp
};

// One KV head of the paged cache, as a split sees it. Position `newest` is not in it yet: its K and V come from shared memory.
template <int D, KvType Type>
struct PagedHead {
    using Shared = AttentionShared<D, Type>;

    const Instruction&  op;
    const Attention&    a;
    const std::int32_t* table; // of the sequence
    const SplitKvItem&  item;
    int                 kv_head, newest;

    __device__ bool visible(int position) const { return position >= item.begin && position < item.end; }
    __device__ bool cached(int position) const { return visible(position) && position != newest; }
    __device__ std::int64_t index(int position, int block_rows) const {
        const int shift = 31 - __clz(a.block_size), block = table[position >> shift]; // block_size is a power of two
        return kv_row(block, kv_head, position & (a.block_size - 1), block_rows, a.block_size);
    }
    __device__ const unsigned char* row_at(const CacheArray& array, int position) const {
        return array.rows + index(position, a.k_array.block_rows) * Shared::row_bytes;
    }
    __device__ const float* scale_at(const CacheArray& array, int position) const {
        return array.scales + index(position, a.k_array.block_scales);
    }
    // From the cache: K of positions from .. from + 15, and the scales of K and V; V.
    __device__ void load_k(int from, KvOfLane<D, Type>& to) const {
        const int i = threadIdx.x % 32 / 4;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int  position = from + i + 8 * h;
            const bool there    = cached(position);
            to.load_k(h, there ? row_at(op.cache_k, position) : nullptr);
            if constexpr (Type != KvType::f16)
                to.load_scales(h, there ? scale_at(op.cache_k, position) : nullptr,
                               there ? scale_at(op.cache_v, position) : nullptr);
        }
    }
    __device__ void load_v(int from, KvOfLane<D, Type>& to) const {
        const int j = threadIdx.x % 4;
#pragma unroll
        for (int h = 0; h < 4; h++) {
            const int position = from + 2 * j + h % 2 + h / 2 * 8;
            to.load_v(h, cached(position) ? row_at(op.cache_v, position) : nullptr);
        }
    }
    // The newest position's, where it is among them.
    __device__ void put_k(int from, const Shared& s, KvOfLane<D, Type>& to) const {
        const int i = threadIdx.x % 32 / 4;
#pragma unroll
        for (int h = 0; h < 2; h++)
            if (from + i + 8 * h == newest) to.load_k(h, s.k), to.load_scales(h, &s.k_scale, &s.v_scale);
    }
    __device__ void put_v(int from, const Shared& s, KvOfLane<D, Type>& to) const {
        const int j = threadIdx.x % 4;
#pragma unroll
        for (int h = 0; h < 4; h++)
            if (from + 2 * j + h % 2 + h / 2 * 8 == newest) to.load_v(h, s.v);
    }
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
template <int D, class Shared>
__device__ void reduce_parts(const Attention& a, const AttentionUnit& unit, int n_parts, const Shared& s) {
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
constexpr int max_block_ids = 512;
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

// The query heads of a unit, and with `has_newest` K and V of the new token: rotated by its position, in shared memory; the first unit of a
// KV head stores K and V in the cache, too. By all threads, which are behind a barrier at the end.
template <int D, class Shared>
__device__ void rotate_and_store(const Instruction& op, const Program& program, const StepState<D>& step,
                                 const AttentionUnit& unit, bool has_newest, Shared& s) {
    auto *const k = reinterpret_cast<__half*>(s.k), *const v = reinterpret_cast<__half*>(s.v);
    const RopeStore& rope = program.rope;
    for (int t = int(threadIdx.x); t < (unit.n_heads + int(has_newest)) * (D / 2); t += Team::size()) {
        const int   h = t / (D / 2), pair = t % (D / 2);
        const Half* source  = h < unit.n_heads ? op.q + (unit.head0 + h) * D : op.k + unit.kv_head * D;
        __half*     to      = h < unit.n_heads ? s.q[h] : k;
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
        v[d]               = poll_fp16(load_relaxed_fp16(source), source);
    }
    Team::sync();
    if (has_newest && unit.is_first && threadIdx.x < D) {
        const int        d  = int(threadIdx.x);
        const Attention& a  = program.attend;
        const auto       at = kv_row_of_slot(step.slot, unit.kv_head, a.k_array.block_rows, a.block_size) * D + d;
        reinterpret_cast<__half*>(op.cache_k.rows)[at] = k[d];
        reinterpret_cast<__half*>(op.cache_v.rows)[at] = v[d];
    }
}

// As rotate_and_store(), K and V as codes, but without a barrier at the end: a warp has a head of q, or K, or V, and of it in each lane
// every 32nd number.
template <int D, KvType Type>
__device__ void rotate_and_encode(const Instruction& op, const Program& program, const StepState<D>& step,
                                  const AttentionUnit& unit, bool has_newest, AttentionShared<D, Type>& s) {
    constexpr int each = D / 32;
    const int     warp = int(threadIdx.x / 32), lane = int(threadIdx.x % 32), n = unit.n_heads;
    if (warp >= n + (has_newest ? 2 : 0)) return;
    const bool       is_q = warp < n, is_v = warp == n + 1;
    const RopeStore& rope   = program.rope;
    const Half*      source = is_q ? op.q + (unit.head0 + warp) * D : (is_v ? op.v : op.k) + unit.kv_head * D;
    float* const     row    = s.values + warp * D;
    float            x[each];
    Half             bits[each];
#pragma unroll
    for (int r = 0; r < each; r++) bits[r] = load_relaxed_fp16(source + lane + 32 * r);
#pragma unroll
    for (int r = 0; r < each; r++) x[r] = __half2float(poll_fp16(bits[r], source + lane + 32 * r));
    if (!is_v) {
#pragma unroll
        for (int r = 0; r < each; r++) row[lane + 32 * r] = x[r];
        __syncwarp();
        for (int pair = lane; pair < rope.n_pairs; pair += 32) {
            float &one = row[rope.neox ? pair : 2 * pair], &other = row[rope.neox ? pair + rope.n_pairs : 2 * pair + 1];
            const float2 by = step.angles[pair], rotated = rotate_pair(one, other, by.x, by.y);
            one = rotated.x, other = rotated.y;
        }
        __syncwarp();
#pragma unroll
        for (int r = 0; r < each; r++) x[r] = row[lane + 32 * r];
        spread_lanes(x, rope.rotation, lane);
    }
    if (is_q) {
#pragma unroll
        for (int r = 0; r < each; r++) s.q[warp][lane + 32 * r] = to_finite(x[r]);
        return;
    }
    float most = 0;
#pragma unroll
    for (int r = 0; r < each; r++) most = max_or_nan(most, fabsf(x[r]));
    const RowCode        code(warp_max_or_nan(most), Type);
    unsigned char* const to = is_v ? s.v : s.k;
#pragma unroll
    for (int r = 0; r < each; r++) to[lane + 32 * r] = code.of(x[r]);
    if (lane == 0) (is_v ? s.v_scale : s.k_scale) = code.scale;
    if (!unit.is_first) return;
    const CacheArray&    cache  = is_v ? op.cache_v : op.cache_k;
    const Attention&     a      = program.attend;
    const auto           row_of = [&](int rows) { return kv_row_of_slot(step.slot, unit.kv_head, rows, a.block_size); };
    unsigned char* const at     = cache.rows + row_of(a.k_array.block_rows) * D;
#pragma unroll
    for (int r = 0; r < each; r++) at[lane + 32 * r] = code.of(x[r]);
    if (lane == 0) cache.scales[row_of(a.k_array.block_scales)] = code.scale;
}

// One attention instruction. wait(): until q, k and v are there.
template <int D, KvType Type, class Wait>
__device__ void attend(const Instruction& op, const Program& program, const Plan& plan, const SplitKvItem* items,
                       int n_items, float* partial, std::int32_t* arrivals, unsigned char* memory,
                       const StepState<D>& step, const Wait& wait) {
    Attention a    = program.attend;
    a.out          = op.attended;
    a.softcap      = 0; // compile() refuses models with one
    auto&     s    = *reinterpret_cast<AttentionShared<D, Type>*>(memory);
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
        const PagedHead<D, Type> cache{
            op, a, known ? step.table(plan) : plan.block_tables + item.table, item, unit.kv_head, newest};
        int       from    = item.begin / 16 * 16;
        const int n_parts = min(program.attention_warps, (item.end - from + 15) / 16); // warps that have positions
        from += warp * 16;
        if (warp >= n_parts) from = item.end;
        KvOfLane<D, Type> kv;
        cache.load_k(from, kv); // independent of this step
        cache.load_v(from, kv);
        if (waited) Team::sync(); // the previous unit is done with shared memory
        else wait();
        waited = true;

        const bool has_newest = item.end == newest + 1;
        if constexpr (Type == KvType::f16) rotate_and_store(op, program, step, unit, has_newest, s);
        else rotate_and_encode(op, program, step, unit, has_newest, s), Team::sync();
        if (warp < n_parts) {
            std::uint32_t       weights[1][2];
            QueryHeads<D, Type> q;
            MmaHeads<D, Type>   heads;
            q.load(s.q[0], unit.n_heads);
            const int  step_size = program.attention_warps * 16;
            const auto weigh     = [&] {
                if (has_newest) cache.put_k(from, s, kv);
                kv.softmax(a, heads, q, cache.visible(from + i), cache.visible(from + i + 8), weights);
            };
            const auto accumulate = [&] {
                if (has_newest) cache.put_v(from, s, kv);
                kv.accumulate(heads, weights);
            };
            if constexpr (Type == KvType::f16) { // once there are sums, registers do not hold K and V at a time
                if (has_newest) cache.put_v(from, s, kv);
                weigh(), kv.accumulate(heads, weights);
                while ((from += step_size) < item.end) {
                    cache.load_k(from, kv), weigh();
                    cache.load_v(from, kv), accumulate();
                }
            } else {
                while (true) { // K of the next positions is on its way while V of these is accumulated
                    weigh();
                    const int next = from + step_size;
                    if (next < item.end) cache.load_k(next, kv);
                    accumulate();
                    if (next >= item.end) break;
                    cache.load_v(next, kv);
                    from = next;
                }
            }
            heads.store(unit.n_heads, s.row_maxes[warp], s.sums[warp], s.values + warp * unit.n_heads * D);
        }
        if (item.n_splits == 1) reduce_parts<D>(a, unit, n_parts, s);
        else
            reduce_splits<D, max_heads, Team, 8>(a, item, unit.work, unit.head0, unit.n_heads, n_parts,
                                                 &s.row_maxes[0][0], &s.sums[0][0], s.values, unit.n_heads * D, partial,
                                                 arrivals);
    }
    if (!waited) wait();
}

// Into L2, by one warp.
__device__ void prefetch_l2(const void* memory, int bytes) {
    for (int line = int(threadIdx.x % 32) * 128; line < bytes; line += 32 * 128)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(memory) + line));
}
// Prefetches the K and V of this CTA's first unit into L2, by one warp: no more than L2 keeps until they are read.
template <int D, KvType Type>
__device__ void prefetch_cache_l2(const Instruction& op, const Attention& a, const Plan& plan,
                                  const StepState<D>& step) {
    if (step.item.row < 0) return;
    const PagedHead<D, Type> cache{op, a, step.table(plan), step.item, step.unit.kv_head, -1};
    constexpr int            bytes = AttentionShared<D, Type>::row_bytes, most = (176 << 10) / (2 * bytes);
    const int                end = min(step.item.end, step.item.begin + most);
    for (int position = step.item.begin + int(threadIdx.x % 32); position < end; position += 32)
        for (const CacheArray* of : {&op.cache_k, &op.cache_v})
            for (int line = 0; line < bytes; line += 128)
                asm volatile("prefetch.global.L2 [%0];" ::"l"(cache.row_at(*of, position) + line));
}

} // namespace

#endif

} // namespace quire::cuda::megakernel
