// quire.compute.ranks: ranks of one process that run a model together: where they meet, what they hand each other on a CPU, and how all
// learn that one of them cannot go on. **Owns** the memory of what is handed in.
export module quire.compute.ranks;

import quire.core.base;
import quire.core.std;

export namespace quire {

class RankGroup {
public:
    // seconds: how long a rank waits for the others before it takes them for lost.
    RankGroup(int n, double seconds) : seconds_(seconds), ranks_(std::size_t(n)) {}

    int    n() const { return int(ranks_.size()); }
    double seconds() const { return seconds_; }

    // Rank `rank` cannot go on, and why: from now on meet() throws. The first one that says so counts.
    void                       fail(int rank, std::string_view why);
    std::optional<std::string> failure() const; // "rank 1: ...", or nothing
    bool                       failed() const { return failed_.load(std::memory_order_acquire); }

    // Returns when every rank has called it as often as this one. Throws std::runtime_error when a rank has failed, or does not come
    // in time.
    void meet(int rank);

    // Memory for n numbers that the others see after the next meet(), with the column where they belong.
    float* hand_in(int rank, std::size_t n, std::int64_t first);
    struct HandedIn {
        std::span<const float> values;
        std::int64_t           first = 0;
    };
    // What rank `of` handed in before the last meet() of rank `rank`; valid until the next one but one.
    HandedIn handed_in(int rank, int of) const;

private:
    struct alignas(64) Rank {
        std::atomic<std::uint64_t>        met{0}; // how often it has come
        std::array<std::vector<float>, 2> memory; // in turn, so that one can be filled while others read the other
        std::array<std::size_t, 2>        size{};
        std::array<std::int64_t, 2>       first{};
    };
    double             seconds_;
    std::vector<Rank>  ranks_;
    std::atomic<bool>  failed_{false};
    mutable std::mutex mutex_;
    std::string        why_;
};

} // namespace quire

module :private;

namespace quire {

void RankGroup::fail(int rank, std::string_view why) {
    std::scoped_lock lock(mutex_);
    if (failed()) return;
    why_ = cat("rank ", rank, ": ", why);
    failed_.store(true, std::memory_order_release);
}

std::optional<std::string> RankGroup::failure() const {
    if (!failed()) return {};
    std::scoped_lock lock(mutex_);
    return why_;
}

void RankGroup::meet(int rank) {
    const std::uint64_t      mine = ranks_[std::size_t(rank)].met.fetch_add(1, std::memory_order_acq_rel) + 1;
    std::optional<Stopwatch> waited;
    for (int r = 0; r < n(); r++)
        for (int spin = 0; ranks_[std::size_t(r)].met.load(std::memory_order_acquire) < mine; spin++) {
            if (failed()) throw std::runtime_error("another rank has failed");
            if (spin < 2000) {
                __builtin_ia32_pause();
            } else if (spin < 4000) {
                std::this_thread::yield();
            } else { // its thread has no core, or has more to do
                if (!waited) waited.emplace();
                if (waited->seconds() > seconds_) {
                    fail(r, cat("no answer within ", seconds_, " seconds"));
                    continue;
                }
                std::this_thread::sleep_for(std::chrono::microseconds(50));
            }
        }
}

float* RankGroup::hand_in(int rank, std::size_t n, std::int64_t first) {
    Rank&      r    = ranks_[std::size_t(rank)];
    const auto turn = std::size_t(r.met.load(std::memory_order_relaxed) % 2);
    if (r.memory[turn].size() < n) r.memory[turn].resize(n);
    r.size[turn]  = n;
    r.first[turn] = first;
    return r.memory[turn].data();
}

RankGroup::HandedIn RankGroup::handed_in(int rank, int of) const {
    const auto  turn = std::size_t((ranks_[std::size_t(rank)].met.load(std::memory_order_relaxed) + 1) % 2);
    const Rank& r    = ranks_[std::size_t(of)];
    return {std::span(r.memory[turn]).first(r.size[turn]), r.first[turn]};
}

} // namespace quire
