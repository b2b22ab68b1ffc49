// Sampling: one CTA per task reads one row of logits, [vocab] float32, and writes a few words: the tokens drawn,
// log-probabilities, the best tokens (for log-probabilities and beams). All sums are sums of integers (a probability is counted
// in units of 2^-40 of the best token's), so a result does not depend on any order or on other rows.
//
// Tokens are ranked by one 64-bit key: the logit, converted to a comparable integer, above the complement of the id; of equal
// logits the lower id comes first. So the samplers always keep all ranks from one border to another, and a draw is the
// rank at which the probabilities, added from the best one on, exceed a random share of their sum. Such a border is found three
// bits at a time. docs/sampling.md has the samplers and their order.
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

// An integer of the same order as x. NaN, which edits may make of infinities, counts as -infinity; +0 and -0 are equal.
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
    Mass          segments[threads / 32], before[threads / 32]; // of a draw by id
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

// The tokens that can still be drawn: the ranks from `first` to `last`, the rank of the best token.
struct Kept {
    Rank            first = 0, last = ~Rank(0);
    __device__ bool has(Rank rank) const { return rank >= first && rank <= last; }
};

template <class Measure>
__device__ Mass sum_of(const Tokens& tokens, const Kept& kept, Measure measure, Shared& s) {
    Mass sum[1] = {};
    for (int i = threadIdx.x; i < tokens.n; i += threads)
        if (const Rank rank = tokens[i]; kept.has(rank)) sum[0] += measure(rank);
    block_sums(sum, s);
    return sum[0];
}

// sum_of() for a measure in float64; the order of the sum is fixed.
template <class Measure>
__device__ double real_sum_of(const Tokens& tokens, const Kept& kept, Measure measure, Shared& s) {
    double sum = 0;
    for (int i = threadIdx.x; i < tokens.n; i += threads)
        if (const Rank rank = tokens[i]; kept.has(rank)) sum += measure(rank);
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    __syncthreads();
    if (threadIdx.x % 32 == 0) s.sums[threadIdx.x / 32][0] = Mass(__double_as_longlong(sum));
    __syncthreads();
    sum = 0;
    for (int w = 0; w < threads / 32; w++) sum += __longlong_as_double((long long)s.sums[w][0]);
    return sum;
}

struct ByRank {
    __device__ Rank operator()(Rank rank) const { return rank; }
};

// A border among the kept tokens: going down from the largest key, the key of the token at which the sum of `measure` reaches `target`
// (1 or more). 0: the sum over all kept tokens is less than `target`.
template <class Key, class Measure>
__device__ Rank reach(const Tokens& tokens, const Kept& kept, Mass target, Key key, Measure measure, Shared& s) {
    Rank known = 0;
    for (int shift = 63; shift >= 0; shift -= 3) { // the first digit has one bit
        const int n           = shift == 63 ? 1 : digits;
        Mass      sum[digits] = {};
        for (int i = threadIdx.x; i < tokens.n; i += threads) {
            const Rank rank = tokens[i], at = key(rank);
            if (!kept.has(rank) || at < known) continue;
            const Mass m = measure(rank);
#pragma unroll
            for (int d = 0; d < digits; d++)
                if (d < n && at >= (known | Rank(d + 1) << shift)) sum[d] += m;
        }
        block_sums(sum, s);
        int digit = 0;
        for (int d = 0; d < n; d++)
            if (sum[d] >= target) digit = d + 1;
        known |= Rank(digit) << shift;
        // Only the id is open now, and mostly one token is left.
        if (shift == 33 || shift == 30) {
            Rank       last[1]   = {};
            Mass       n_left[1] = {};
            const Rank end       = known + (Rank(1) << shift);
            for (int i = threadIdx.x; i < tokens.n; i += threads)
                if (const Rank rank = tokens[i], at = key(rank); kept.has(rank) && at >= known && at < end)
                    n_left[0]++, last[0] = max(last[0], at);
            block_sums(n_left, s);
            if (n_left[0] == 1) return block_max(last[0], s);
        }
    }
    return known;
}

// Copies the tokens near the best one into shared memory: all within the largest of a few distances for which there is room. Returns this
// distance; -1: even the smallest one has too many tokens.
__device__ float gather_near(const Tokens& all, const Softmax& softmax, Shared& s) {
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
    if (within < 0) return within;
    for (int i = threadIdx.x; i < all.n; i += threads)
        if (const Rank rank = all[i]; distance(rank) <= within) s.near[atomicAdd(&s.n_near, 1)] = rank;
    __syncthreads();
    return within;
}

// The n best tokens that are kept, in s.top, best first; n is at most max_top. Returns how many there are.
__device__ int gather_top(const Tokens& tokens, const Kept& kept, int n, Shared& s) {
    const auto one  = [](Rank) { return Mass(1); };
    const Rank last = reach(tokens, kept, Mass(n), ByRank{}, one, s);
    if (threadIdx.x == 0) s.n_top = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < tokens.n; i += threads)
        if (const Rank rank = tokens[i]; kept.has(rank) && rank >= last) s.top[atomicAdd(&s.n_top, 1)] = rank;
    __syncthreads();
    const int  found = s.n_top;
    const Rank own   = int(threadIdx.x) < found ? s.top[threadIdx.x] : 0; // max_top is less than there are threads
    int        place = 0;
    for (int k = 0; k < found; k++) place += s.top[k] > own;
    __syncthreads();
    if (int(threadIdx.x) < found) s.top[place] = own;
    __syncthreads();
    return found;
}

__device__ Rank best_of(const Tokens& tokens, Shared& s) {
    Rank best = 0;
    for (int i = threadIdx.x; i < tokens.n; i += threads) best = max(best, tokens[i]);
    return block_max(best, s);
}

// The best token of a row of logits as the model left them; 0: it has NaN or +infinity in it, or nothing but -infinity.
// `allowed`: a bit for each token that can be drawn, or null. The logits of all other tokens become -infinity, even NaN.
__device__ Rank best_of_usable(float* row, int n, const std::uint32_t* allowed, Shared& s) {
    if (const int words = (n + 31) / 32;
        allowed && words * 4 <= int(sizeof s.near)) { // read at once, not one by one between stores
        auto* const near = reinterpret_cast<std::uint32_t*>(s.near);
        for (int i = threadIdx.x; i < words; i += threads) near[i] = allowed[i];
        __syncthreads();
        allowed = near;
    }
    constexpr int together = 8; // loads under way
    Rank          best     = 0;
    bool          bad      = false;
    for (int begin = threadIdx.x; begin < n; begin += together * threads) {
        float x[together];
#pragma unroll
        for (int k = 0; k < together; k++)
            if (const int i = begin + k * threads; i < n)
                x[k] = allowed == nullptr || (allowed[i / 32] >> (i % 32) & 1) != 0 ? row[i] : -INFINITY;
#pragma unroll
        for (int k = 0; k < together; k++) {
            const int i = begin + k * threads;
            if (i >= n) continue;
            if (allowed && x[k] == -INFINITY) row[i] = x[k];
            bad |= !(x[k] <= FLT_MAX); // NaN is not
            best = max(best, rank_of(x[k], i));
        }
    }
    best = block_max(best, s);
    return __syncthreads_or(bad) || logit_of(best) == -INFINITY ? 0 : best;
}

// The tokens of a row that the samplers keep, and the temperature at which a token is drawn from them.
struct Choice {
    Tokens from; // has all tokens that are kept
    Kept   kept;
    float  temperature = 1;
    bool   truncated   = false; // a sampler was at work: draws go by rank, else by id
};

// Mean and deviation of the logits.
__device__ void keep_by_sigma(const Tokens& all, float n_sigma, Kept& kept, Shared& s) {
    const double n    = double(sum_of(all, kept, [](Rank) { return Mass(1); }, s));
    const double mean = real_sum_of(all, kept, [](Rank r) { return double(logit_of(r)); }, s) / n;
    const double var =
        real_sum_of(all, kept, [&](Rank r) { return (double(logit_of(r)) - mean) * (double(logit_of(r)) - mean); }, s);
    const float least = __double2float_ru(double(logit_of(kept.last)) - double(n_sigma) * sqrt(var / n));
    kept.first        = max(kept.first, Rank(ordered(least)) << 32);
}

// Locally typical sampling: keeps the tokens whose distance below the best token is closest to the mean distance, with a mass of p together.
// Of equal distances all stay. `within`: `near` has all tokens up to this distance; -1: it has none.
__device__ void keep_typical(const Tokens& from, const Tokens& near, float within, float p, Kept& kept, Shared& s) {
    const Softmax softmax{logit_of(kept.last), 1};
    const auto    mass  = [&](Rank r) { return softmax.mass(r); };
    const auto    depth = [&](Rank r) { return softmax.limit - logit_of(r); };
    const Mass    total = sum_of(from, kept, mass, s);
    const Mass    sum =
        sum_of(from, kept, [&](Rank r) { return __float2ull_rn(expf(-depth(r)) * 0x1p40f * depth(r)); }, s);
    const float mean   = float(double(sum) / double(total));
    const auto  key    = [&](Rank r) { return Rank(~ordered(fabsf(depth(r) - mean))) << 32; };
    const Mass  target = max(Mass(double(total) * double(p)), Mass(1));
    Rank        border = 0;
    bool        few    = false;
    if (within >= 0) { // tokens that are not in `near` must be farther from the mean than all kept ones
        border = reach(near, kept, target, key, mass, s);
        few    = border > 0 && mean + logit_of(~border) < within;
    }
    if (!few) border = reach(from, kept, target, key, mass, s);
    Rank best = 0, worst = 0; // worst: as its complement
    for (int i = threadIdx.x; i < from.n; i += threads)
        if (const Rank rank = from[i]; kept.has(rank) && key(rank) >= border)
            best = max(best, rank), worst = max(worst, ~rank);
    best  = block_max(best, s);
    worst = block_max(worst, s);
    kept  = {~worst, best};
}

// XTC: leaves out the tokens that have at least the share `threshold` of the mass, except the least likely of them.
__device__ void leave_out_best(const Tokens& from, float threshold, Kept& kept, Shared& s) {
    const Softmax softmax{logit_of(kept.last), 1};
    const auto    mass  = [&](Rank r) { return softmax.mass(r); };
    const double  least = double(sum_of(from, kept, mass, s)) * double(threshold);
    const Mass    n     = sum_of(from, kept, [&](Rank r) { return Mass(double(mass(r)) >= least); }, s);
    if (n > 1) kept.last = reach(from, kept, n, ByRank{}, [](Rank) { return Mass(1); }, s);
}

// The temperature, from the entropy of the kept tokens.
__device__ float dynamic_temperature(const Tokens& from, const Kept& kept, const SampleTask& task, Shared& s) {
    const Softmax softmax{logit_of(kept.last), 1};
    const auto    depth = [&](Rank r) { return softmax.limit - logit_of(r); };
    const double  n     = double(sum_of(from, kept, [](Rank) { return Mass(1); }, s));
    const double  total = double(sum_of(from, kept, [&](Rank r) { return softmax.mass(r); }, s));
    const double  sum =
        double(sum_of(from, kept, [&](Rank r) { return __float2ull_rn(expf(-depth(r)) * 0x1p40f * depth(r)); }, s));
    if (n < 2) return task.temperature;
    const double entropy = (log(total * 0x1p-40) + sum / total) / log(n);
    const double low     = fmax(0.0, double(task.temperature) - double(task.dynatemp_range));
    const double high    = double(task.temperature) + double(task.dynatemp_range);
    return float(low + (high - low) * pow(fmin(fmax(entropy, 0.0), 1.0), double(task.dynatemp_exponent)));
}

// Mirostat's version 1: how many tokens have a mean surprise of mu, by the exponent of Zipf's law that the best 100 follow.
__device__ Mass mirostat_rank(const Tokens& from, const Kept& kept, int vocab, const SampleTask& task, Shared& s) {
    constexpr int n_top = 100;
    static_assert(n_top <= max_top);
    const int n        = gather_top(from, kept, n_top, s);
    double    products = 0, squares = 0;
    for (int i = 0; i + 1 < n; i++) { // every thread: the sum is short
        const double t = log(double(i + 2) / double(i + 1));
        products += t * double(logit_of(s.top[i]) - logit_of(s.top[i + 1])) / double(task.temperature);
        squares += t * t;
    }
    const double exponent = squares > 0 ? products / squares : 0, epsilon = exponent - 1;
    const double norm = fabs(epsilon) < 1e-9 ? 1 / log(double(vocab)) : epsilon / (1 - pow(double(vocab), -epsilon));
    const double k    = pow(norm * exp2(double(task.mu)), 1 / exponent);
    return Mass(isnan(k) ? double(vocab) : fmin(fmax(k, 1.0), double(vocab)));
}

// A draw where nothing is left out: by id, as on a CPU, which then need not sort. Each warp sums a segment of the row; a draw looks
// into the one that it falls into.
struct ById {
    const Tokens& all;
    int           length; // of a segment

    __device__ explicit ById(const Tokens& tokens)
        : all(tokens), length(((tokens.n + threads - 1) / threads) * 32) {
    } // threads / 32 segments, each whole warps wide

    // The sum over all tokens; the sums of the segments stay in s.segments.
    template <class Measure>
    __device__ Mass sum(const Measure& measure, Shared& s) const {
        const int warp = threadIdx.x / 32, end = min(all.n, (warp + 1) * length);
        Mass      own = 0;
        for (int i = warp * length + int(threadIdx.x % 32); i < end; i += 32) own += measure(all[i]);
        for (int step = 16; step > 0; step /= 2) own += __shfl_xor_sync(~0u, own, step);
        if (threadIdx.x % 32 == 0) s.segments[warp] = own;
        __syncthreads();
        Mass total = 0;
        for (int w = 0; w < threads / 32; w++) total += s.segments[w];
        return total;
    }
    // The token with which the sum in the order of the ids reaches `target`, from 1 to the sum of all.
    template <class Measure>
    __device__ int reach(Mass target, const Measure& measure, Shared& s) const {
        int segment = 0;
        while (target > s.segments[segment]) target -= s.segments[segment++];
        const int first = segment * length, end = min(all.n, first + length), each = (length + threads - 1) / threads;
        const int begin = min(end, first + int(threadIdx.x) * each), stop = min(end, begin + each);
        Mass      own = 0;
        for (int i = begin; i < stop; i++) own += measure(all[i]);
        Mass up_to = own; // of this warp's threads, up to this one
        for (int step = 1; step < 32; step *= 2) {
            const Mass other = __shfl_up_sync(~0u, up_to, step);
            if (int(threadIdx.x % 32) >= step) up_to += other;
        }
        if (threadIdx.x % 32 == 31) s.before[threadIdx.x / 32] = up_to;
        __syncthreads();
        for (int w = 0; w < int(threadIdx.x / 32); w++) up_to += s.before[w];
        if (up_to >= target && up_to - own < target) { // one thread
            Mass sum = up_to - own;
            int  i   = begin;
            while ((sum += measure(all[i])) < target) i++;
            s.word = std::uint32_t(i);
        }
        __syncthreads();
        const int found = int(s.word);
        __syncthreads(); // the word is free again
        return found;
    }
};

__device__ Choice choose(const Tokens& all, Rank best, const SampleTask& task, Shared& s) {
    const auto    one   = [](Rank) { return Mass(1); };
    const int     vocab = all.n;
    const Softmax unit{logit_of(best), 1};
    Choice        c{all, {Rank(ordered(-INFINITY) + 1) << 32, best}, task.temperature, false};
    const bool    top_k = task.mirostat == 0 && task.top_k > 0 && task.top_k < vocab;
    c.truncated         = task.mirostat > 0 || top_k || task.top_n_sigma > 0 || task.typical_p < 1 || task.top_p < 1 ||
                  task.min_p > 0 || task.xtc_threshold <= 0.5f;
    const float  within = c.truncated ? gather_near(all, unit, s) : -1;
    const Tokens near{all.row, s.near, within >= 0 ? s.n_near : 0};
    // The border from which on `measure` sums to `target`; from now on the tokens near the best one are enough if it is there.
    const auto keep_from = [&](Mass target, auto measure) {
        if (c.from.near == nullptr && within >= 0 && sum_of(near, c.kept, measure, s) >= target) c.from = near;
        c.kept.first = max(c.kept.first, reach(c.from, c.kept, target, ByRank{}, measure, s));
    };
    if (task.mirostat > 0) {
        const Softmax tempered{unit.limit, 1 / task.temperature};
        const Mass    total  = sum_of(all, c.kept, [&](Rank r) { return tempered.mass(r); }, s);
        const auto    likely = [&](Rank r) {
            return Mass(log2(double(total) / double(tempered.mass(r))) <= double(task.mu));
        };
        keep_from(task.mirostat == 1 ? mirostat_rank(all, c.kept, vocab, task, s)
                                     : max(sum_of(all, c.kept, likely, s), Mass(1)),
                  one);
        return c;
    }
    if (task.top_n_sigma > 0) keep_by_sigma(all, task.top_n_sigma, c.kept, s);
    if (top_k) keep_from(Mass(task.top_k), one);
    if (task.typical_p < 1) keep_typical(c.from, near, within, task.typical_p, c.kept, s);
    const Softmax softmax{logit_of(c.kept.last), 1};
    const auto    mass = [&](Rank r) { return softmax.mass(r); };
    if (task.top_p < 1) {
        const Mass total = sum_of(c.from, c.kept, mass, s);
        keep_from(max(Mass(double(total) * double(task.top_p)), Mass(1)), mass);
    }
    if (task.min_p > 0) {
        // Monotonous in the rank: the border is the last token that stays.
        const auto stays = [&](Rank r) { return Mass(expf(logit_of(r) - softmax.limit) >= task.min_p); };
        const Mass n     = sum_of(c.from, c.kept, stays, s);
        if (n > 0) keep_from(n, stays);
    }
    if (task.xtc_threshold <= 0.5f) leave_out_best(c.from, task.xtc_threshold, c.kept, s);
    if (task.dynatemp_range > 0) c.temperature = dynamic_temperature(c.from, c.kept, task, s);
    return c;
}

__global__ void __launch_bounds__(threads)
    sample_kernel(float* logits, int vocab, const SampleTask* tasks, LogitEdit* edits, const double* uniforms,
                  const std::uint32_t* masks, std::int32_t* out) {
    wait_for_inputs();
    __shared__ Shared s;
    const SampleTask  task = tasks[blockIdx.x];
    float*            row  = logits + std::int64_t(task.row) * vocab;
    const Tokens      all{row, nullptr, vocab};
    std::int32_t*     to = out + task.first_out;

    // The raw distribution: ln Σ exp, and the best tokens. Tokens that the mask forbids are not part of it.
    float      log_total = 0;
    const Rank raw_best  = best_of_usable(row, vocab, task.first_mask >= 0 ? masks + task.first_mask : nullptr, s);
    if (raw_best == 0) {
        for (int i = threadIdx.x; i < task.n_draws + task.n_top; i += threads) to[2 * i] = -1, to[2 * i + 1] = 0;
        return;
    }
    if (task.wants_logprobs) {
        const Softmax raw{logit_of(raw_best), 1};
        const Mass    total = sum_of(all, Kept{}, [&](Rank r) { return raw.mass(r); }, s);
        log_total           = raw.limit + float(log(double(total) * 0x1p-40));
        const int n         = min(task.n_top, vocab);
        if (n > 0) {
            const bool few = gather_near(all, raw, s) >= 0 && s.n_near >= n;
            (void)gather_top(few ? Tokens{row, s.near, s.n_near} : all, Kept{}, n, s);
            for (int i = threadIdx.x; i < n; i += threads) {
                to[2 * (task.n_draws + i)]     = id_of(s.top[i]);
                to[2 * (task.n_draws + i) + 1] = __float_as_int(logit_of(s.top[i]) - log_total);
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

    // Penalties and biases, each token once; the raw logit is kept for the log-probability.
    LogitEdit*  own       = edits + task.first_edit;
    const float raw_first = row[0]; // of token 0, the best one where all others are -infinity, too
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
    if (logit_of(best) == -INFINITY) { // no token can be drawn
        for (int i = threadIdx.x; i < task.n_draws; i += threads) to[2 * i] = -1, to[2 * i + 1] = 0;
        return;
    }
    if (task.temperature <= 0 || !isfinite(logit_of(best))) {
        for (int i = 0; i < task.n_draws; i++) finished(i, best);
        return;
    }

    Choice        choice = choose(all, best, task, s);
    const Softmax softmax{logit_of(choice.kept.last), 1 / choice.temperature};
    const auto    mass = [&](Rank r) { return softmax.mass(r); };
    const ById    by_id(all);
    const Mass    total = choice.temperature <= 0 ? 0
                          : choice.truncated      ? sum_of(choice.from, choice.kept, mass, s)
                                                  : by_id.sum(mass, s);
    for (int i = 0; i < task.n_draws; i++) {
        if (total == 0) { // the temperature has fallen to 0
            finished(i, choice.kept.last);
            continue;
        }
        const Mass target = min(Mass(uniforms[task.first_draw + i] * double(total)) + 1, total);
        if (choice.truncated) {
            const Rank drawn = reach(choice.from, choice.kept, target, ByRank{}, mass, s);
            finished(i, drawn);
            if (task.mirostat > 0 && threadIdx.x == 0) {
                const int at = 2 * (task.n_draws + task.n_top + i);
                to[at]       = id_of(drawn);
                to[at + 1]   = __float_as_int(float(log2(double(total) / double(mass(drawn)))));
            }
            continue;
        }
        finished(i, all[by_id.reach(target, mass, s)]);
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
