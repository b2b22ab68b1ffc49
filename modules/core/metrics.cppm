// quire.core.metrics: counts that many threads update. Owns only numbers.
export module quire.core.metrics;

import quire.core.std;

export namespace quire {

// Counts of observations up to each bound. Any thread.
class Histogram {
public:
    explicit Histogram(std::vector<double> bounds);
    void observe(double value, std::uint64_t times = 1);

    const std::vector<double>& bounds() const { return bounds_; }
    std::vector<std::uint64_t> counts() const; // of each bucket, not cumulative; the last one is beyond all bounds
    double                     sum() const { return sum_.load(std::memory_order_relaxed); }

private:
    std::vector<double>                     bounds_;
    std::vector<std::atomic<std::uint64_t>> counts_;
    std::atomic<double>                     sum_ = 0;
};

// vLLM's buckets: time to the first token, between tokens, of whole requests; and 1, 2, 5, 10, … up to `most`.
std::vector<double> first_token_buckets();
std::vector<double> token_buckets();
std::vector<double> request_buckets();
std::vector<double> size_buckets(double most);

} // namespace quire

module :private;

namespace quire {

Histogram::Histogram(std::vector<double> bounds) : bounds_(std::move(bounds)), counts_(bounds_.size() + 1) {}

void Histogram::observe(double value, std::uint64_t times) {
    if (times == 0 || std::isnan(value)) return;
    const auto at = std::size_t(std::ranges::lower_bound(bounds_, value) - bounds_.begin());
    counts_[at].fetch_add(times, std::memory_order_relaxed);
    sum_.fetch_add(value * double(times), std::memory_order_relaxed);
}

std::vector<std::uint64_t> Histogram::counts() const {
    std::vector<std::uint64_t> out;
    out.reserve(counts_.size());
    for (const auto& c : counts_) out.push_back(c.load(std::memory_order_relaxed));
    return out;
}

std::vector<double> first_token_buckets() {
    return {.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560};
}
std::vector<double> token_buckets() {
    return {.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80};
}
std::vector<double> request_buckets() {
    return {.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680};
}
std::vector<double> size_buckets(double most) {
    std::vector<double> out;
    for (std::int64_t power = 1; double(power) <= most; power *= 10)
        for (int factor : {1, 2, 5})
            if (double(factor * power) <= most) out.push_back(double(factor * power));
    return out;
}

} // namespace quire
