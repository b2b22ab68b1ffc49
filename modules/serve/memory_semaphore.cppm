// quire.serve.memory_semaphore: a counting semaphore for an amount (of memory). An amount that is free passes one that waits for more, for some
// seconds. **Owns** the amount that is free.
export module quire.serve.memory_semaphore;

import quire.core.std;

export namespace quire {

class MemorySemaphore {
public:
    explicit MemorySemaphore(std::size_t most) : most_(most), free_(most) {}

    // An amount that was granted; its destructor gives it back.
    class Pass {
    public:
        Pass(MemorySemaphore* semaphore, std::size_t amount) : semaphore_(semaphore), amount_(amount) {}
        Pass(Pass&& other) noexcept : semaphore_(std::exchange(other.semaphore_, nullptr)), amount_(other.amount_) {}
        Pass& operator=(Pass&&) = delete;
        ~Pass() {
            if (semaphore_) semaphore_->give_back(amount_);
        }

    private:
        MemorySemaphore* semaphore_;
        std::size_t      amount_;
    };

    // Waits for `amount`, or for the whole if `amount` is more. When the first in the line has waited `passing_seconds`, nobody passes it.
    // Nothing: `seconds` have passed, or `gone` is true.
    std::optional<Pass> enter(std::size_t amount, double seconds, const std::function<bool()>& gone);

    static constexpr double passing_seconds = 2;

private:
    friend class Pass;
    using Clock = std::chrono::steady_clock;
    void give_back(std::size_t amount);

    std::size_t                  most_, free_;
    std::list<Clock::time_point> line_; // when each came
    std::mutex                   mutex_;
    std::condition_variable      changed_;
};

} // namespace quire

module :private;

namespace quire {

std::optional<MemorySemaphore::Pass> MemorySemaphore::enter(std::size_t amount, double seconds,
                                                            const std::function<bool()>& gone) {
    amount         = std::min(amount, most_);
    const auto now = Clock::now(),
               end = now + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    std::unique_lock lock(mutex_);
    const auto       me      = line_.insert(line_.end(), now);
    const auto       granted = [&] {
        const std::chrono::duration<double> waited = Clock::now() - line_.front();
        return free_ >= amount && (me == line_.begin() || waited.count() < passing_seconds);
    };
    // `gone` is polled: nothing wakes this thread for it.
    while (!granted() && !gone() && Clock::now() < end)
        changed_.wait_for(lock, std::chrono::milliseconds(100), granted);
    const bool in = granted();
    line_.erase(me);
    if (in) free_ -= amount;
    changed_.notify_all();
    if (!in) return std::nullopt;
    return Pass(this, amount);
}

void MemorySemaphore::give_back(std::size_t amount) {
    const std::scoped_lock lock(mutex_);
    free_ += amount;
    changed_.notify_all();
}

} // namespace quire
