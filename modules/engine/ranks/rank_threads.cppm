// quire.engine.ranks.rank_threads: runs one function on all ranks of this process at once. **Owns** a thread for each rank but the first; the
// first rank runs on the caller's thread.
export module quire.engine.ranks.rank_threads;

import quire.compute.ranks.rank_group;
import quire.core.base;

export namespace quire {

class RankThreads {
public:
    // `spin`: how often a thread looks for work before it sleeps; larger where a rank must not be late.
    RankThreads(std::shared_ptr<RankGroup> group, int spin);
    RankThreads(const RankThreads&)            = delete;
    RankThreads& operator=(const RankThreads&) = delete;
    ~RankThreads(); // leaves a thread that hangs behind

    // Calls body(i) for every rank i of this process, and returns when all calls have returned. Throws std::runtime_error with a rank's
    // message when this rank has thrown, or has not returned within the group's seconds after the first rank. After that no rank runs any
    // more. `body`: a lambda that captures references only; a rank that hangs keeps a copy.
    template <class Body>
    void run(const Body& body);
    // A rank did not return: the memory that this rank uses must not be freed.
    bool hangs() const { return hangs_; }

private:
    using Call = void (*)(const void* body, int rank);
    struct alignas(64) Rank {
        std::atomic<std::uint32_t> asked{0}, done{0};
    };
    struct Shared { // shared with the threads, which may outlive the RankThreads
        std::shared_ptr<RankGroup> group;
        std::vector<Rank>          ranks;
        alignas(16) std::array<std::byte, 64> body{};
        Call call     = nullptr;
        bool stopping = false;
        int  spin     = 0;
    };
    void        dispatch(Call call);
    static void attempt(Shared& shared, int rank);
    static void work(const std::shared_ptr<Shared>& shared, int rank);

    std::shared_ptr<Shared>  shared_;
    std::vector<std::thread> threads_;
    bool                     hangs_ = false;
};

template <class Body>
void RankThreads::run(const Body& body) {
    static_assert(sizeof(Body) <= sizeof(Shared::body) && std::is_trivially_copyable_v<Body>);
    if (shared_->group->n() == 1) return body(0); // an exception goes to the caller
    if (!hangs_) std::memcpy(shared_->body.data(), &body, sizeof body);
    dispatch([](const void* b, int rank) { (*static_cast<const Body*>(b))(rank); });
}

} // namespace quire

module :private;

namespace quire {

RankThreads::RankThreads(std::shared_ptr<RankGroup> group, int spin) : shared_(std::make_shared<Shared>()) {
    const int n    = group->n_local();
    shared_->group = std::move(group);
    shared_->spin  = spin;
    shared_->ranks = std::vector<Rank>(std::size_t(n));
    for (int r = 1; r < n; r++) threads_.emplace_back([shared = shared_, r] { work(shared, r); });
}

RankThreads::~RankThreads() {
    if (hangs_) {
        for (std::thread& t : threads_) t.detach();
        return;
    }
    shared_->stopping = true;
    for (Rank& r : shared_->ranks) {
        r.asked.fetch_add(1, std::memory_order_release);
        r.asked.notify_one();
    }
    for (std::thread& t : threads_) t.join();
}

void RankThreads::attempt(Shared& shared, int rank) {
    try {
        shared.call(shared.body.data(), rank);
    } catch (const std::bad_alloc&) {
        shared.group->fail(shared.group->first() + rank, "there is not enough memory");
    } catch (const std::exception& e) {
        shared.group->fail(shared.group->first() + rank, e.what());
    } catch (...) {
        shared.group->fail(shared.group->first() + rank, "it stopped");
    }
}

void RankThreads::work(const std::shared_ptr<Shared>& shared, int rank) {
    Rank& mine = shared->ranks[std::size_t(rank)];
    for (std::uint32_t seen = 0;; seen++) {
        for (int spin = 0; mine.asked.load(std::memory_order_acquire) == seen; spin++) {
            if (spin < shared->spin) __builtin_ia32_pause();
            else mine.asked.wait(seen, std::memory_order_acquire);
        }
        if (shared->stopping) return;
        attempt(*shared, rank);
        mine.done.store(seen + 1, std::memory_order_release);
    }
}

void RankThreads::dispatch(Call call) {
    if (const auto why = shared_->group->failure()) throw std::runtime_error(*why);
    shared_->call = call;
    for (std::size_t r = 1; r < shared_->ranks.size(); r++) {
        shared_->ranks[r].asked.fetch_add(1, std::memory_order_release);
        shared_->ranks[r].asked.notify_one();
    }
    attempt(*shared_, 0);
    std::optional<Stopwatch> waited;
    for (std::size_t r = 1; r < shared_->ranks.size(); r++) {
        Rank& rank = shared_->ranks[r];
        for (int spin = 0; rank.done.load(std::memory_order_acquire) != rank.asked.load(std::memory_order_relaxed);
             spin++) {
            if (spin < 2000) {
                __builtin_ia32_pause();
                continue;
            }
            if (spin < 4000) {
                std::this_thread::yield();
                continue;
            }
            if (!waited) waited.emplace();
            if (waited->seconds() >
                shared_->group->seconds() + 1) { // one second more, for the ranks whose barrier() throws
                shared_->group->fail(shared_->group->first() + int(r),
                                     cat("no answer within ", shared_->group->seconds(), " seconds"));
                hangs_ = true;
                break;
            }
            std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
    }
    if (const auto why = shared_->group->failure()) throw std::runtime_error(*why);
}

} // namespace quire
