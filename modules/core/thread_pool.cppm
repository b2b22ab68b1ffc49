// quire.core.thread_pool: runs one function over many items on a fixed set of threads. **Owns** the worker threads.
export module quire.core.thread_pool;

import quire.core.base;

export namespace quire {

// Physical cores that this process may run on, at least 1.
int physical_cores();

// One owner calls run(). It takes no lock, and idle workers sleep after a short spin. run() does not wait for a worker that has
// not started: if the cores are busy with something else, the caller does the work itself.
class ThreadPool {
public:
    explicit ThreadPool(int n_threads); // the caller is one of them
    ~ThreadPool();

    int n_threads() const { return int(workers_.size()) + 1; }

    // Calls body(item, thread) for every item in [0, n_items), thread in [0, n_threads); returns when all are done.
    template <class Body>
    void run(int n_items, const Body& body);

private:
    using Call = void (*)(const void* body, int item, int thread);
    void dispatch(int n_items, const void* body, Call call);
    void work(int thread);
    void worker(int thread);

    std::vector<std::thread>   workers_;
    const void*                body_    = nullptr;
    Call                       call_    = nullptr;
    int                        n_items_ = 0;
    std::atomic<int>           next_{0};  // the next item that no thread has taken
    std::atomic<std::uint32_t> gate_{0};  // workers inside the round; plus `open` while more may enter
    std::atomic<std::uint32_t> round_{0}; // what sleeping workers watch
    std::atomic<bool>          stopping_{false};

    static constexpr std::uint32_t open = 1u << 31;
};

template <class Body>
void ThreadPool::run(int n_items, const Body& body) {
    if (n_items == 1 || workers_.empty()) {
        for (int i = 0; i < n_items; i++) body(i, 0);
        return;
    }
    dispatch(n_items, &body, [](const void* b, int item, int thread) { (*static_cast<const Body*>(b))(item, thread); });
}

} // namespace quire

module :private;

namespace quire {

// Each core's list of hyper-threads is the same text for all of them, so distinct texts are distinct cores.
int physical_cores() {
    const int             n = std::max(1, int(std::thread::hardware_concurrency())); // respects the affinity mask
    std::set<std::string> cores;
    for (int cpu = 0; cpu < 4096; cpu++) {
        std::ifstream file(cat("/sys/devices/system/cpu/cpu", cpu, "/topology/thread_siblings_list"));
        std::string   siblings;
        if (!std::getline(file, siblings)) break;
        cores.insert(siblings);
    }
    return cores.empty() ? n : std::min(n, int(cores.size()));
}

ThreadPool::ThreadPool(int n_threads) {
    for (int i = 1; i < n_threads; i++) workers_.emplace_back([this, i] { worker(i); });
}

ThreadPool::~ThreadPool() {
    stopping_.store(true);
    round_.fetch_add(1);
    round_.notify_all();
    for (std::thread& t : workers_) t.join();
}

void ThreadPool::work(int thread) {
    for (int i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < n_items_;) call_(body_, i, thread);
}

void ThreadPool::worker(int thread) {
    std::uint32_t seen = 0;
    while (true) {
        for (int spin = 0; round_.load(std::memory_order_acquire) == seen; spin++) {
            if (spin < 4000) __builtin_ia32_pause();
            else round_.wait(seen, std::memory_order_acquire);
        }
        seen = round_.load(std::memory_order_acquire);
        if (stopping_.load()) return;
        // Enter if the round is still open: body and items do not change while a thread is inside.
        std::uint32_t gate = gate_.load(std::memory_order_acquire);
        while ((gate & open) && !gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acquire)) {}
        if (!(gate & open)) continue;
        work(thread);
        gate_.fetch_sub(1, std::memory_order_release);
    }
}

void ThreadPool::dispatch(int n_items, const void* body, Call call) {
    body_    = body;
    call_    = call;
    n_items_ = n_items;
    next_.store(0, std::memory_order_relaxed);
    gate_.store(open, std::memory_order_release);
    round_.fetch_add(1, std::memory_order_release);
    round_.notify_all();
    work(0);
    gate_.fetch_and(~open, std::memory_order_acq_rel);
    for (int spin = 0; gate_.load(std::memory_order_acquire) != 0; spin++) {
        if (spin < 4000) __builtin_ia32_pause();
        else std::this_thread::yield(); // a worker lost its core in the middle of an item: let it run
    }
}

} // namespace quire
