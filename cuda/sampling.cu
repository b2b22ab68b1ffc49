// Sampling: one CTA per task reads one row of logits, [vocab] float32, and writes a few words: the tokens drawn,
// log-probabilities, the best tokens (for log-probabilities and beams). All sums are sums of integers (a probability is counted
// in units of 2^-40 of the best token's), so a result does not depend on any order or on other rows.
//
// Tokens are ranked by one 64-bit key: the logit, converted to a comparable integer, above the complement of the id; of equal
// logits the lower id comes first. What top-k, top-p and min-p keep is then "all keys from this one on", and a draw is the key
// at which the probabilities, added from the best one on, exceed a random share of their sum. Both are found three bits at a
// time.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cfloat>

#include "kernels.h"
#include "warp.cuh"

namespace quire::cuda {

namespace {

using Rank = unsigned long long;
using Mass = unsigned long long;

constexpr int threads  = 512;
constexpr int digits   = 7;    // pivots of a pass: three bits
constexpr int max_near = 4096; // tokens near the best one that are kept in shared memory

// NaN, which edits may make of infinities, counts as minus infinity, and both zeros are one.
__device__ std::uint32_t ordered(float x) {
    const std::uint32_t bits = __float_as_uint(isnan(x) ? -INFINITY : x + 0.0f);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}
__device__ float logit_of(Rank rank) {
    const auto key = std::uint32_t(rank >> 32);
    return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu));
}
__device__ Rank rank_of(float logit, int id) { return Rank(ordered(logit)) << 32 | ~std::uint32_t(id); }
__device__ std::int32_t id_of(Rank rank) { return std::int32_t(~std::uint32_t(rank)); }

struct Shared {
    Mass          sums[threads / 32][digits];
    Mass          totals[digits];
    Rank          near[max_near];
    std::int32_t  n_near;
    Rank          top[max_top];
    std::int32_t  n_top;
    std::uint32_t word;
};

// The sums over the block, for all threads.
template <int N>
__device__ void block_sums(Mass (&v)[N], Shared& s) {
#pragma unroll
    for (int i = 0; i < N; i++)
        for (int step = 16; step > 0; step /= 2) v[i] += __shfl_xor_sync(~0u, v[i], step);
    __syncthreads();
    if (threadIdx.x % 32 == 0)
#pragma unroll
        for (int i = 0; i < N; i++) s.sums[threadIdx.x / 32][i] = v[i];
    __syncthreads();
    if (int(threadIdx.x) < N) {
        Mass total = 0;
        for (int w = 0; w < threads / 32; w++) total += s.sums[w][threadIdx.x];
        s.totals[threadIdx.x] = total;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = s.totals[i];
}

__device__ Rank block_max(Rank v, Shared& s) {
    for (int step = 16; step > 0; step /= 2) v = max(v, Rank(__shfl_xor_sync(~0u, v, step)));
    __syncthreads();
    if (threadIdx.x % 32 == 0) s.sums[threadIdx.x / 32][0] = v;
    __syncthreads();
    for (int w = 0; w < threads / 32; w++) v = max(v, Rank(s.sums[w][0]));
    return v;
}

// Where the tokens of a row come from: the row itself, or the ones near the best that are in shared memory.
struct Tokens {
    const float*    row;
    const Rank*     near;
    int             n;
    __device__ Rank operator[](int i) const { return near ? near[i] : rank_of(row[i], i); }
};

struct Softmax {
    float           limit, inverse; // exp((x - limit) · inverse)
    __device__ Mass mass(Rank rank) const {
        const float e = expf((logit_of(rank) - limit) * inverse);
        return __float2ull_rn(e * 0x1p40f);
    }
};

template <class Measure>
__device__ Mass sum_from(const Tokens& tokens, Rank first, Measure measure, Shared& s) {
    Mass sum[1] = {};
    for (int i = threadIdx.x; i < tokens.n; i += threads)
        if (const Rank rank = tokens[i]; rank >= first) sum[0] += measure(rank);
    block_sums(sum, s);
    return sum[0];
}

// The largest rank such that `measure`, summed over the tokens from it on and at least `lowest`, reaches `target` (at least
// 1, at most the sum over all): the rank of a token.
template <class Measure>
__device__ Rank reach(const Tokens& tokens, Rank lowest, Mass target, Measure measure, Shared& s) {
    Rank known = 0;
    for (int shift = 63; shift >= 0; shift -= 3) { // the first digit has one bit
        const int n           = shift == 63 ? 1 : digits;
        Mass      sum[digits] = {};
        for (int i = threadIdx.x; i < tokens.n; i += threads) {
            const Rank rank = tokens[i];
            if (rank < lowest || rank < known) continue;
            const Mass m = measure(rank);
#pragma unroll
            for (int d = 0; d < digits; d++)
                if (d < n && rank >= (known | Rank(d + 1) << shift)) sum[d] += m;
        }
        block_sums(sum, s);
        int digit = 0;
        for (int d = 0; d < n; d++)
            if (sum[d] >= target) digit = d + 1;
        known |= Rank(digit) << shift;
        // All but the id is settled, and mostly one token is left.
        if (shift == 33 || shift == 30) {
            Rank       last[1]   = {};
            Mass       n_left[1] = {};
            const Rank end       = known + (Rank(1) << shift);
            for (int i = threadIdx.x; i < tokens.n; i += threads)
                if (const Rank rank = tokens[i]; rank >= known && rank < end) n_left[0]++, last[0] = max(last[0], rank);
            block_sums(n_left, s);
            if (n_left[0] == 1) return block_max(last[0], s);
        }
    }
    return known;
}

// Copies those near the best token into shared memory, as many as have room by a few distances. False: too many.
__device__ bool gather_near(const Tokens& all, const Softmax& softmax, Shared& s) {
    constexpr float distances[digits] = {24, 16, 12, 8, 6, 4, 2};
    Mass            counts[digits]    = {};
    const auto      distance          = [&](Rank rank) { return (softmax.limit - logit_of(rank)) * softmax.inverse; };
    for (int i = threadIdx.x; i < all.n; i += threads) {
        const float d = distance(all[i]);
#pragma unroll
        for (int k = 0; k < digits; k++) counts[k] += d <= distances[k];
    }
    block_sums(counts, s);
    float within = -1;
#pragma unroll
    for (int k = digits - 1; k >= 0; k--)
        if (counts[k] <= max_near) within = distances[k];
    if (threadIdx.x == 0) s.n_near = 0;
    __syncthreads();
    if (within < 0) return false;
    for (int i = threadIdx.x; i < all.n; i += threads)
        if (const Rank rank = all[i]; distance(rank) <= within) s.near[atomicAdd(&s.n_near, 1)] = rank;
    __syncthreads();
    return true;
}

__device__ Rank best_of(const Tokens& tokens, Shared& s) {
    Rank best = 0;
    for (int i = threadIdx.x; i < tokens.n; i += threads) best = max(best, tokens[i]);
    return block_max(best, s);
}

// The best token of a row of logits as the model left them; 0: it has NaN or +infinity in it, or nothing but -infinity.
__device__ Rank best_of_usable(const Tokens& tokens, Shared& s) {
    Rank best = 0;
    bool bad  = false;
    for (int i = threadIdx.x; i < tokens.n; i += threads) {
        bad |= !(tokens.row[i] <= FLT_MAX); // NaN is not
        best = max(best, tokens[i]);
    }
    best = block_max(best, s);
    return __syncthreads_or(bad) || logit_of(best) == -INFINITY ? 0 : best;
}

__global__ void __launch_bounds__(threads) sample_kernel(float* logits, int vocab, const SampleTask* tasks,
                                                         LogitEdit* edits, const double* uniforms,
                                                         const std::uint32_t* masks, std::int32_t* out) {
    wait_for_inputs();
    __shared__ Shared s;
    const SampleTask  task = tasks[blockIdx.x];
    float*            row  = logits + std::int64_t(task.row) * vocab;
    const Tokens      all{row, nullptr, vocab};
    const auto        one = [](Rank) { return Mass(1); };
    std::int32_t*     to  = out + task.first_out;

    // What the mask forbids is not part of the distribution.
    if (task.first_mask >= 0) {
        const std::uint32_t* allowed = masks + task.first_mask;
        for (int i = threadIdx.x; i < vocab; i += threads)
            if ((allowed[i / 32] >> (i % 32) & 1) == 0) row[i] = -INFINITY;
        __syncthreads();
    }

    // The raw distribution: ln Σ exp, and the best tokens.
    float      log_total = 0;
    const Rank raw_best  = best_of_usable(all, s);
    if (raw_best == 0) {
        for (int i = threadIdx.x; i < task.n_draws + task.n_top; i += threads) to[2 * i] = -1, to[2 * i + 1] = 0;
        return;
    }
    if (task.wants_logprobs) {
        const Softmax raw{logit_of(raw_best), 1};
        const Mass    total = sum_from(all, 0, [&](Rank r) { return raw.mass(r); }, s);
        log_total           = raw.limit + float(log(double(total) * 0x1p-40));
        const int n         = min(task.n_top, vocab);
        if (n > 0) {
            const bool   few = gather_near(all, raw, s) && s.n_near >= n;
            const Tokens from{row, few ? s.near : nullptr, few ? s.n_near : vocab};
            const Rank   last = reach(from, 0, Mass(n), one, s);
            if (threadIdx.x == 0) s.n_top = 0;
            __syncthreads();
            for (int i = threadIdx.x; i < from.n; i += threads)
                if (const Rank rank = from[i]; rank >= last) s.top[atomicAdd(&s.n_top, 1)] = rank;
            __syncthreads();
            for (int i = threadIdx.x; i < n; i += threads) {
                int place = 0;
                for (int k = 0; k < n; k++) place += s.top[k] > s.top[i];
                to[2 * (task.n_draws + place)]     = id_of(s.top[i]);
                to[2 * (task.n_draws + place) + 1] = __float_as_int(logit_of(s.top[i]) - log_total);
            }
        }
    }
    const auto answer = [&](int i, std::int32_t token, float raw) {
        to[2 * i]     = token;
        to[2 * i + 1] = __float_as_int(raw - log_total);
    };
    if (task.chosen >= 0) {
        if (threadIdx.x == 0) answer(0, task.chosen, row[task.chosen]);
        return;
    }
    if (task.n_draws == 0) return;

    // Penalties and biases, each token once; what was there is kept for the log-probability.
    LogitEdit*  own       = edits + task.first_edit;
    const float raw_first = row[0]; // of the token that comes where none can
    __syncthreads();
    for (int i = threadIdx.x; i < task.n_edits; i += threads) own[i].raw = row[own[i].token];
    if (task.only_edited) {
        __syncthreads();
        for (int i = threadIdx.x; i < vocab; i += threads) row[i] = -INFINITY;
        __syncthreads();
    }
    for (int i = threadIdx.x; i < task.n_edits; i += threads) {
        float x           = own[i].raw;
        x                 = x > 0 ? x / own[i].divide : x * own[i].divide;
        row[own[i].token] = x - own[i].subtract + own[i].add;
    }
    __syncthreads();
    const Rank best     = task.n_edits > 0 ? best_of(all, s) : raw_best;
    const auto finished = [&](int i, Rank rank) { // all threads
        const std::int32_t token = id_of(rank);
        const float        raw   = task.only_edited ? raw_first : logit_of(rank); // unless it was edited
        if (threadIdx.x == 0) s.word = __float_as_uint(raw);
        __syncthreads();
        for (int k = threadIdx.x; k < task.n_edits; k += threads)
            if (own[k].token == token) s.word = __float_as_uint(own[k].raw);
        __syncthreads();
        if (threadIdx.x == 0) answer(i, token, __uint_as_float(s.word));
        __syncthreads();
    };
    if (logit_of(best) == -INFINITY) { // no token can come
        for (int i = threadIdx.x; i < task.n_draws; i += threads) to[2 * i] = -1, to[2 * i + 1] = 0;
        return;
    }
    if (task.temperature <= 0 || !isfinite(logit_of(best))) {
        for (int i = 0; i < task.n_draws; i++) finished(i, best);
        return;
    }

    const Softmax softmax{logit_of(best), 1 / task.temperature};
    const auto    mass      = [&](Rank r) { return softmax.mass(r); };
    const bool    truncates = (task.top_k > 0 && task.top_k < vocab) || task.top_p < 1 || task.min_p > 0;
    Tokens        from      = all;
    Rank          first     = 0; // of what is kept: all from here on
    if (truncates) {
        const bool few = gather_near(all, softmax, s);
        const auto use = [&](bool enough) { from = few && enough ? Tokens{row, s.near, s.n_near} : all; };
        if (task.top_k > 0 && task.top_k < vocab) {
            use(s.n_near >= task.top_k);
            first = reach(from, 0, Mass(task.top_k), one, s);
        }
        if (task.top_p < 1) {
            const Mass total  = sum_from(from, first, mass, s);
            const auto target = max(Mass(double(total) * double(task.top_p)), Mass(1));
            if (from.near == nullptr && few) {
                const Tokens near{row, s.near, s.n_near};
                if (sum_from(near, 0, mass, s) >= target) from = near;
            }
            first = max(first, reach(from, first, target, mass, s));
        }
        if (task.min_p > 0) {
            // Monotonous in the rank: count those that stay, of which the last one is the border.
            const auto stays = [&](Rank r) {
                return Mass(r >= first && expf((logit_of(r) - softmax.limit) * softmax.inverse) >= task.min_p);
            };
            const Mass n = sum_from(from, first, stays, s);
            if (from.near == nullptr && few) {
                const Tokens near{row, s.near, s.n_near};
                if (sum_from(near, 0, stays, s) == n) from = near;
            }
            if (n > 0) first = max(first, reach(from, 0, n, stays, s));
        }
    }
    const Mass total = sum_from(from, first, mass, s);
    for (int i = 0; i < task.n_draws; i++) {
        const Mass target = min(Mass(uniforms[task.first_draw + i] * double(total)) + 1, total);
        if (truncates) {
            finished(i, reach(from, first, target, mass, s));
            continue;
        }
        // Nothing is left out: by id, as on a CPU, which then need not sort. The same search over other numbers.
        std::uint32_t known = 0; // tokens before this id hold less than the target
        for (int shift = 27; shift >= 0; shift -= 3) {
            if ((known | std::uint32_t(1) << shift) >= std::uint32_t(vocab)) continue; // no id is that large
            Mass sum[digits] = {};
            for (int k = threadIdx.x; k < vocab; k += threads) {
                const Mass m = mass(all[k]);
#pragma unroll
                for (int d = 0; d < digits; d++)
                    if (std::uint32_t(k) < (known | std::uint32_t(d + 1) << shift)) sum[d] += m;
            }
            block_sums(sum, s);
            int digit = 0;
            for (int d = 0; d < digits; d++)
                if (sum[d] < target) digit = d + 1;
            known |= std::uint32_t(digit) << shift;
        }
        finished(i, all[min(int(known), vocab - 1)]);
    }
}

} // namespace

void sample(float* logits, std::int64_t vocab, const SampleTask* tasks, int n_tasks, LogitEdit* edits,
            const double* uniforms, const std::uint32_t* masks, std::int32_t* out, Context& gpu) {
    if (n_tasks > 0)
        run_kernel(sample_kernel, dim3(unsigned(n_tasks)), unsigned(threads), 0, gpu, logits, int(vocab), tasks, edits,
                   uniforms, masks, out);
}

} // namespace quire::cuda
