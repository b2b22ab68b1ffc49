// quire.compute.ranks.rank_group: ranks that run a model together, in one process or in several: their barrier, the exchange of data between CPU
// ranks, and how all ranks learn that one rank has failed. **Owns** the memory of the data that ranks hand in.
export module quire.compute.ranks.rank_group;

import quire.core.base;

export namespace quire {

// How the ranks of this process reach the ranks of other processes. Every process has as many ranks.
class RankLink {
public:
    struct Failure {
        int         process = 0;
        std::string why;
    };
    virtual ~RankLink() = default;
    // Sends `mine` to every other process. of_all[p] gets the data that process p sends in its call.
    virtual std::optional<Failure> exchange(std::span<const std::byte>           mine,
                                            std::vector<std::vector<std::byte>>& of_all) = 0;
    // A process that is lost, if one is; does not wait.
    virtual std::optional<Failure> lost_peer() = 0;
};

class RankGroup {
public:
    // `seconds`: how long a rank waits for another rank before the other one counts as lost. With `link` this process has the ranks
    // first .. first + n_local - 1.
    RankGroup(int n, double seconds) : RankGroup(n, seconds, 0, n, nullptr) {}
    RankGroup(int n, double seconds, int first, int n_local, std::shared_ptr<RankLink> link)
        : seconds_(seconds), first_(first), n_local_(n_local), link_(std::move(link)), ranks_(std::size_t(n)) {}

    int    n() const { return int(ranks_.size()); }
    int    first() const { return first_; }
    int    n_local() const { return n_local_; }
    double seconds() const { return seconds_; }

    // Rank `rank` has failed, for the reason `why`: from now on barrier() throws. Only the first failure counts.
    void                       fail(int rank, std::string_view why);
    std::optional<std::string> failure() const; // "rank 1: ...", or nothing
    bool                       failed() const { return failed_.load(std::memory_order_acquire); }

    // A barrier: returns when every rank has called barrier() as often as this rank. Throws std::runtime_error when a rank has failed, or
    // does not call in time.
    void barrier(int rank);

    // Sends `mine` to the other processes, and returns the data of each process: [process]. Called while no rank is in barrier(). Throws as
    // barrier() does.
    std::vector<std::vector<std::byte>> exchange(std::span<const std::byte> mine);
    // Whether a process is lost: then its first rank has failed.
    bool has_lost_a_process();

    // Memory of rank `rank` for n numbers, which the other ranks see after the next barrier(). `first`: the column of the first number.
    float* hand_in(int rank, std::size_t n, std::int64_t first);
    struct HandedIn {
        std::span<const float> values;
        std::int64_t           first = 0;
    };
    // The numbers that rank `of` handed in before the last barrier() of rank `rank`; valid until the barrier() after the next.
    HandedIn handed_in(int rank, int of) const;

private:
    struct alignas(64) Rank {
        std::atomic<std::uint64_t>        met{0}; // its calls of barrier()
        std::array<std::vector<float>, 2> memory; // in turn, so that one can be filled while others read the other
        std::array<std::size_t, 2>        size{};
        std::array<std::int64_t, 2>       first{};
    };
    void wait_for(int rank, std::uint64_t met);
    void exchange_parts(std::uint64_t met);
    void lose(const RankLink::Failure& failure) { fail(failure.process * n_local_, failure.why); }

    double                              seconds_;
    int                                 first_ = 0, n_local_ = 0;
    std::shared_ptr<RankLink>           link_;     // null: all ranks are of this process
    std::vector<std::byte>              outgoing_; // the first rank's
    std::vector<std::vector<std::byte>> incoming_;
    std::vector<Rank>                   ranks_;
    std::atomic<bool>                   failed_{false};
    mutable std::mutex                  mutex_;
    std::string                         why_;
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

void RankGroup::wait_for(int rank, std::uint64_t met) {
    std::optional<Stopwatch> waited;
    for (int spin = 0; ranks_[std::size_t(rank)].met.load(std::memory_order_acquire) < met; spin++) {
        if (failed()) throw std::runtime_error("another rank has failed");
        if (spin < 2000) {
            __builtin_ia32_pause();
        } else if (spin < 4000) {
            std::this_thread::yield();
        } else { // its thread has no core, or has more to do
            if (!waited) waited.emplace();
            if (waited->seconds() > seconds_) {
                fail(rank, cat("no answer within ", seconds_, " seconds"));
                continue;
            }
            std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
    }
}

// Sends the numbers of this process' ranks to the other processes, and takes in theirs.
void RankGroup::exchange_parts(std::uint64_t met) {
    const auto turn = std::size_t((met - 1) % 2);
    struct Head {
        std::uint64_t n;
        std::int64_t  first;
    };
    outgoing_.clear();
    const auto put = [&](const void* data, std::size_t n) {
        const auto* bytes = static_cast<const std::byte*>(data);
        outgoing_.insert(outgoing_.end(), bytes, bytes + n);
    };
    for (int r = first_; r < first_ + n_local_; r++) {
        const Rank& mine = ranks_[std::size_t(r)];
        const Head  head{mine.size[turn], mine.first[turn]};
        put(&head, sizeof head);
        put(mine.memory[turn].data(), head.n * sizeof(float));
    }
    if (const auto failure = link_->exchange(outgoing_, incoming_)) {
        lose(*failure);
        throw std::runtime_error("another rank has failed");
    }
    for (int r = 0; r < n(); r++) {
        if (r >= first_ && r < first_ + n_local_) continue;
        std::span<const std::byte> bytes = incoming_[std::size_t(r / n_local_)];
        for (int i = 0; i <= r % n_local_; i++) { // one message has all ranks of a process
            Head head{};
            if (bytes.size() >= sizeof head) std::memcpy(&head, bytes.data(), sizeof head);
            if (bytes.size() < sizeof head || head.n > (bytes.size() - sizeof head) / sizeof(float)) {
                fail(r, "what it sent is cut off");
                throw std::runtime_error("another rank has failed");
            }
            bytes = bytes.subspan(sizeof head);
            if (i == r % n_local_) {
                std::memcpy(hand_in(r, std::size_t(head.n), head.first), bytes.data(), head.n * sizeof(float));
                ranks_[std::size_t(r)].met.store(met, std::memory_order_release);
            }
            bytes = bytes.subspan(head.n * sizeof(float));
        }
    }
}

void RankGroup::barrier(int rank) {
    const std::uint64_t mine  = ranks_[std::size_t(rank)].met.fetch_add(1, std::memory_order_acq_rel) + 1;
    const bool          leads = link_ && rank == first_;
    if (leads) {
        for (int r = first_; r < first_ + n_local_; r++) wait_for(r, mine);
        exchange_parts(mine);
    }
    for (int r = 0; r < n(); r++) wait_for(r, mine);
}

std::vector<std::vector<std::byte>> RankGroup::exchange(std::span<const std::byte> mine) {
    std::vector<std::vector<std::byte>> of_all;
    if (const auto failure = link_->exchange(mine, of_all)) {
        lose(*failure);
        throw std::runtime_error(*this->failure());
    }
    return of_all;
}

bool RankGroup::has_lost_a_process() {
    if (const auto failure = link_->lost_peer()) lose(*failure);
    return failed();
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
