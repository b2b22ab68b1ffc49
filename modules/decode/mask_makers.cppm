// quire.decode.mask_makers: makes the masks that take long, beside the engine's thread. **Owns** the threads and the jobs that wait for one.
// (The C header has what std does not: a thread's own priority.)
module;

#include <sys/resource.h>
#include <unistd.h>

export module quire.decode.mask_makers;

import quire.core.base;
import quire.core.std;
import quire.core.thread_pool;
import quire.text.grammar.constraint;

export namespace quire {

// A state of a text that is prepared (ConstraintState::prepare), whose owner sets `stop` when nobody waits for it any more.
struct MaskJob {
    MaskJob(ConstraintState s, bool also_forced, double before)
        : state(std::move(s)), forced(also_forced), seconds(before) {}

    ConstraintState                             state; // the makers' until `done`
    const bool                                  forced;
    double                                      seconds;       // that this request's jobs have taken
    bool                                        slow  = false; // this one took longer than a step can wait
    bool                                        done  = false; // as MaskMakers::is_done() says it
    std::atomic<bool>                           stop  = false;
    const std::chrono::steady_clock::time_point since = std::chrono::steady_clock::now();
};

// One owner calls it.
class MaskMakers {
public:
    // No thread runs before the first job.
    MaskMakers() = default;
    ~MaskMakers(); // stops all jobs
    MaskMakers(const MaskMakers&)            = delete;
    MaskMakers& operator=(const MaskMakers&) = delete;

    // Of those that wait, the one whose request has taken least comes next.
    void add(std::shared_ptr<MaskJob> job);
    bool is_done(const MaskJob& job);
    // Until a job is done that was not at the last call, or the time has passed.
    void wait(double seconds);

private:
    void work();

    std::mutex                            mutex_; // of all below, and of MaskJob::done
    std::condition_variable               added_, finished_;
    std::vector<std::shared_ptr<MaskJob>> waiting_, running_;
    int                                   n_finished_ = 0, n_seen_ = 0;
    bool                                  stopping_ = false;
    std::vector<std::thread>              threads_;
};

} // namespace quire

module :private;

namespace quire {

// Longer than this, and the next one is made here from the beginning.
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
    // Few: they are to leave the processors to the steps.
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
            if (!job->stop) (void)job->state.prepare(job->forced, {.stop = &job->stop});
        } catch (const std::bad_alloc&) { // then it comes again
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
