// quire.serve.http.workers: threads that answer complete requests, as many as there are requests at once, up to a limit.
// **Owns** the threads, and the connections that wait for one.
module;

#include <pthread.h>
#include <new>

export module quire.serve.http.workers;

import quire.core.base;
import quire.serve.http.connection;
import quire.serve.memory_reserve;

export namespace quire {

// Any thread. A worker holds a reference, so that this outlives the last worker.
class HttpWorkers : public std::enable_shared_from_this<HttpWorkers> {
public:
    // `answer` runs on a worker and throws nothing. `answered` runs after it, when take_answered() has the connection.
    HttpWorkers(int most, std::function<void(Connection&)> answer, std::function<void()> answered)
        : most_(most), answer_(std::move(answer)), answered_(std::move(answered)) {}

    void           push(const ConnectionPtr& c); // its request is complete
    ConnectionList take_answered();
    // Starts a worker if requests wait and no worker is idle: its start may have failed when the request came.
    void try_again();
    void stop(); // no request is begun any more
    void join(); // behind stop(): returns when all workers have ended
    int  n_threads() const;

private:
    void add();
    void work();

    const int                              most_;
    const std::function<void(Connection&)> answer_;
    const std::function<void()>            answered_;

    mutable std::mutex      mutex_; // of all below
    std::condition_variable changed_;
    ConnectionList          ready_, returned_;
    int                     n_threads_ = 0, n_idle_ = 0;
    bool                    stopping_ = false;
};

} // namespace quire

module :private;

namespace quire {

void HttpWorkers::push(const ConnectionPtr& c) {
    std::scoped_lock lock(mutex_);
    ready_.push(c);
    if (n_idle_ >= ready_.size()) changed_.notify_one();
    else add();
}

ConnectionList HttpWorkers::take_answered() {
    std::scoped_lock lock(mutex_);
    return std::exchange(returned_, {});
}

void HttpWorkers::try_again() {
    std::scoped_lock lock(mutex_);
    if (!ready_.empty() && n_idle_ == 0) add();
}

void HttpWorkers::stop() {
    std::scoped_lock lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
}

void HttpWorkers::join() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return n_threads_ == 0; });
    ready_    = {};
    returned_ = {};
}

int HttpWorkers::n_threads() const {
    std::scoped_lock lock(mutex_);
    return n_threads_;
}

// The lock is held. A stack has 1 MiB: WorkBudget ends a recursion of a constraint at 256 KiB; JSON and templates have limits of their own.
void HttpWorkers::add() {
    if (n_threads_ >= most_) return; // the next idle worker takes the request
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, std::size_t(1) << 20);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    using Self = std::shared_ptr<HttpWorkers>;
    pthread_t  thread;
    const auto body = [](void* self) -> void* {
        const std::unique_ptr<Self> held(static_cast<Self*>(self));
        (*held)->work();
        return nullptr;
    };
    std::unique_ptr<Self> self(new (std::nothrow) Self(shared_from_this()));
    if (self && pthread_create(&thread, &attributes, body, self.get()) == 0) {
        (void)self.release(); // NOLINT: the thread owns it now
        n_threads_++;
    }
    pthread_attr_destroy(&attributes);
}

void HttpWorkers::work() {
    const MayFail    may_fail(true);
    std::unique_lock lock(mutex_);
    while (true) {
        n_idle_++;
        const bool any = changed_.wait_for(lock, std::chrono::seconds(5), [&] { return !ready_.empty() || stopping_; });
        n_idle_--;
        if (stopping_ || (!any && n_threads_ > 4)) break;
        if (ready_.empty()) continue;
        const ConnectionPtr c = ready_.pop();
        lock.unlock();
        answer_(*c);
        lock.lock();
        returned_.push(c);
        lock.unlock();
        answered_();
        lock.lock();
    }
    n_threads_--;
    changed_.notify_all();
}

} // namespace quire
