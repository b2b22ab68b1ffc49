// quire.tools.bench.paper.numpy_random: the random numbers of numpy.random.default_rng(seed), so that a trace can be made again, and
// checked, in a few lines of Python. **Owns** the generator's state.
export module quire.tools.bench.paper.numpy_random;

import quire.core.base;

export namespace quire::paper {

// PCG64 (XSL-RR, 128 bits of state), seeded by numpy's SeedSequence.
class NumpyRandom {
public:
    explicit NumpyRandom(std::uint32_t seed);

    std::uint64_t bits();
    double        uniform() { return double(bits() >> 11) * 0x1p-53; } // random(), in [0, 1)
    std::int64_t  poisson(double mean);                                // poisson(mean)
    std::uint32_t below(std::uint32_t n);                              // integers(0, n), n ≥ 1, as an array has it

private:
    using Wide = unsigned __int128;
    std::uint32_t half();
    void          step();

    Wide                         state_ = 0, increment_ = 0;
    std::optional<std::uint32_t> rest_; // the upper half of the last number whose lower half was used
};

} // namespace quire::paper

module :private;

namespace quire::paper {

// SeedSequence: a pool of four words is mixed from the seed, eight words come out of it (M. O'Neill's seed_seq_fe).
NumpyRandom::NumpyRandom(std::uint32_t seed) {
    std::uint32_t constant = 0x43b0d7e5;
    const auto    hash     = [&](std::uint32_t value) {
        value ^= constant;
        constant *= 0x931e8875;
        value *= constant;
        return value ^ value >> 16;
    };
    const auto mix = [](std::uint32_t x, std::uint32_t y) {
        const std::uint32_t mixed = 0xca01f9dd * x - 0x4973f715 * y;
        return mixed ^ mixed >> 16;
    };
    std::array<std::uint32_t, 4> pool{};
    for (std::size_t i = 0; i < pool.size(); i++) pool[i] = hash(i == 0 ? seed : 0);
    for (std::size_t from = 0; from < pool.size(); from++)
        for (std::size_t to = 0; to < pool.size(); to++)
            if (from != to) pool[to] = mix(pool[to], hash(pool[from]));
    std::array<std::uint64_t, 4> words{};
    constant = 0x8b51f9dd;
    for (std::size_t i = 0; i < 8; i++) {
        std::uint32_t value = pool[i % pool.size()] ^ constant;
        constant *= 0x58f38ded;
        value *= constant;
        words[i / 2] |= std::uint64_t(value ^ value >> 16) << (i % 2 * 32);
    }
    increment_ = ((Wide(words[2]) << 64 | words[3]) << 1) | 1;
    step();
    state_ += Wide(words[0]) << 64 | words[1];
    step();
}

void NumpyRandom::step() { state_ = state_ * (Wide(2549297995355413924u) << 64 | 4865540595714422341u) + increment_; }

std::uint64_t NumpyRandom::bits() {
    step();
    const std::uint64_t folded = std::uint64_t(state_ >> 64) ^ std::uint64_t(state_);
    const auto          turn   = unsigned(state_ >> 122);
    return folded >> turn | folded << ((64 - turn) & 63);
}

std::uint32_t NumpyRandom::half() {
    if (rest_) return *std::exchange(rest_, std::nullopt);
    const std::uint64_t both = bits();
    rest_                    = std::uint32_t(both >> 32);
    return std::uint32_t(both);
}

// Lemire's method.
std::uint32_t NumpyRandom::below(std::uint32_t n) {
    std::uint64_t product = std::uint64_t(half()) * n;
    if (std::uint32_t(product) < n)
        for (const std::uint32_t least = (0u - n) % n; std::uint32_t(product) < least;)
            product = std::uint64_t(half()) * n;
    return std::uint32_t(product >> 32);
}

// The logarithm of (k)!: Stirling's series, exact enough from 10 on.
double log_factorial(std::int64_t k) {
    double shift = 0;
    for (; k < 10; k++) shift += std::log(double(k + 1));
    const double x = double(k) + 1, y = 1 / (x * x);
    return (x - 0.5) * std::log(x) - x + 0.9189385332046727 +
           (1 / 12.0 - y * (1 / 360.0 - y * (1 / 1260.0 - y / 1680.0))) / x - shift;
}

// Knuth's product below 10, Hörmann's PTRS from there on.
std::int64_t NumpyRandom::poisson(double mean) {
    if (mean <= 0) return 0;
    if (mean < 10) {
        std::int64_t k = 0;
        for (double product = uniform(), least = std::exp(-mean); product > least; product *= uniform()) k++;
        return k;
    }
    const double log_mean = std::log(mean), b = 0.931 + 2.53 * std::sqrt(mean), a = -0.059 + 0.02483 * b,
                 inverse_alpha = 1.1239 + 1.1328 / (b - 3.4), accepted = 0.9277 - 3.6224 / (b - 2);
    for (;;) {
        const double u = uniform() - 0.5, v = uniform(), us = 0.5 - std::fabs(u);
        const auto   k = std::int64_t(std::floor((2 * a / us + b) * u + mean + 0.43));
        if (us >= 0.07 && v <= accepted) return k;
        if (k < 0 || (us < 0.013 && v > us)) continue;
        if (std::log(v) + std::log(inverse_alpha) - std::log(a / (us * us) + b) <=
            -mean + double(k) * log_mean - log_factorial(k))
            return k;
    }
}

} // namespace quire::paper
