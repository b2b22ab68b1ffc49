// quire.compute.cpu.workers: the threads of a CPU backend. **Owns** the threads and the scratch memory of each.
export module quire.compute.cpu.workers;

export import quire.compute.backend;
import quire.core.std;
import quire.core.thread_pool;

export namespace quire {

inline float* floats(const Tensor& t) { return static_cast<float*>(t.data); }

// The beginning of at least n floats in `memory`, on a line of 64 bytes.
float* grown(std::vector<float>& memory, std::size_t n);

// Multiply-adds below which waking the other threads costs more than they save.
inline constexpr std::int64_t worth_threads = 200'000;
inline constexpr std::int64_t few_rows      = 32; // of a step that decodes

class Workers {
public:
    explicit Workers(int n_threads) : pool_(n_threads), scratch_(std::size_t(pool_.n_threads())) {}

    int         n() const { return pool_.n_threads(); }
    ThreadPool& pool() { return pool_; }
    // At least n floats for one thread, until its next call. The memory grows to its largest use in the first steps.
    float* scratch(int thread, std::size_t n) { return grown(scratch_[std::size_t(thread)], n); }

    // body(item, thread) for each of n items, in parallel.
    template <class Body>
    void run(int n_items, const Body& body) {
        pool_.run(n_items, body);
    }
    // body(first, last) over pieces of [0, n) of about `grain`, in parallel.
    template <class Body>
    void split(std::int64_t n, std::int64_t grain, const Body& body) {
        const int items = int((n + grain - 1) / grain);
        pool_.run(items, [&](int item, int) { body(item * grain, std::min(n, (item + 1) * grain)); });
    }

private:
    ThreadPool                      pool_;
    std::vector<std::vector<float>> scratch_;
};

} // namespace quire

module :private;

namespace quire {

float* grown(std::vector<float>& memory, std::size_t n) {
    if (memory.size() < n + 16) memory.resize(n + 16);
    const auto beyond = reinterpret_cast<std::uintptr_t>(memory.data()) % 64;
    return memory.data() + (beyond > 0 ? (64 - beyond) / sizeof(float) : 0);
}

} // namespace quire
