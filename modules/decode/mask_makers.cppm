// quire.decode.mask_makers: makes the masks that take long, beside the engine's thread. **Owns** the threads and the jobs that wait for one.
// (The C headers set a thread's own priority, which std cannot.)
module;

#include <sys/resource.h>
#include <unistd.h>

export module quire.decode.mask_makers;

import quire.core.base;
import quire.core.polymorphic;
import quire.core.thread_pool;
import quire.schedule.token_filter;

export namespace quire {

// A filter whose mask is prepared (TokenFilter::prepare). The owner sets `stop` when no sequence waits for it any more.
struct MaskJob {
    MaskJob(Polymorphic<TokenFilter> s, bool also_forced, double before, std::chrono::steady_clock::time_point begun)
        : state(std::move(s)), forced(also_forced), seconds(before), since(begun) {}

    Polymorphic<TokenFilter>                    state; // used by the makers alone until `done`
    const bool                                  forced;
    double                                      seconds;      // that earlier jobs of this request have taken
    bool                                        slow = false; // this job took longer than a step can wait
    bool                                        done = false; // read by MaskMakers::is_done()
    std::atomic<bool>                           stop = false;
    const std::chrono::steady_clock::time_point since; // when the job was begun
};

// One thread calls the functions of a MaskMakers.
class MaskMakers {
public:
    // No thread runs before the first job.
    MaskMakers() = default;
    ~MaskMakers(); // stops all jobs
    MaskMakers(const MaskMakers&)            = delete;
    MaskMakers& operator=(const MaskMakers&) = delete;

    // Of the waiting jobs, the job whose request has taken the least time runs next.
    void add(std::shared_ptr<MaskJob> job);
    bool is_done(const MaskJob& job);
    // Waits until a job is done that was not done at the last call, at most `seconds`.
    void wait(double seconds);

private:
    void work();

    std::mutex                            mutex_; // guards the members below, and MaskJob::done
    std::condition_variable               added_, finished_;
    std::vector<std::shared_ptr<MaskJob>> waiting_, running_;
    int                                   n_finished_ = 0, n_seen_ = 0;
    bool                                  stopping_ = false;
    std::vector<std::thread>              threads_;
};

} // namespace quire

module :private;

namespace quire {

// If a mask takes longer than this, the sequence's next mask is made here from the beginning.
constexpr double long_seconds = 0.001;

MaskMakers::~MaskMakers() {
    {
        std::scoped_lock lock(mutex_);
        stopping_ = true;
        for (const auto& job : running_) job->stop = true;
        added_.notify_all();
    }
    for (std::thread& t : threads_) t.join();
}

void MaskMakers::add(std::shared_ptr<MaskJob> job) {
    std::scoped_lock lock(mutex_);
    waiting_.push_back(std::move(job));
    // Few threads: the steps need the processors.
    const std::size_t most = physical_cores() > 2 ? 2 : 1;
    if (threads_.size() < std::min(most, waiting_.size() + running_.size())) threads_.emplace_back([this] { work(); });
    added_.notify_one();
}

bool MaskMakers::is_done(const MaskJob& job) {
    std::scoped_lock lock(mutex_);
    return job.done;
}

void MaskMakers::wait(double seconds) {
    std::unique_lock lock(mutex_);
    finished_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return n_finished_ != n_seen_; });
    n_seen_ = n_finished_;
}

void MaskMakers::work() {
    (void)setpriority(PRIO_PROCESS, id_t(gettid()), 10); // of this thread alone
    std::unique_lock lock(mutex_);
    while (true) {
        added_.wait(lock, [&] { return !waiting_.empty() || stopping_; });
        if (stopping_) return;
        const auto next = std::ranges::min_element(waiting_, {}, [](const auto& job) { return job->seconds; });
        const std::shared_ptr<MaskJob> job = std::move(*next);
        waiting_.erase(next);
        running_.push_back(job);
        lock.unlock();
        const Stopwatch watch;
        try {
            if (!job->stop) (void)job->state->prepare(job->forced, {.stop = &job->stop});
        } catch (const std::bad_alloc&) { // the sequence asks for the mask again
        }
        const double took = watch.seconds();
        lock.lock();
        job->slow = took > long_seconds;
        job->seconds += took;
        job->done = true;
        std::erase_if(running_, [&](const auto& other) { return other == job; });
        n_finished_++;
        finished_.notify_all();
    }
}

} // namespace quire
