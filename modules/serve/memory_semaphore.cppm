// quire.serve.memory_semaphore: a counting semaphore for an amount (of memory), first come, first served. **Owns** the amount that is free.
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

    // Waits for `amount`, or for the whole if `amount` is more, in the order of arrival. Nothing: `seconds` have passed, or `gone` is true.
    std::optional<Pass> enter(std::size_t amount, double seconds, const std::function<bool()>& gone);

private:
    friend class Pass;
    void give_back(std::size_t amount);

    std::size_t             most_, free_;
    std::list<int>          line_;
    std::mutex              mutex_;
    std::condition_variable changed_;
};

} // namespace quire

module :private;

namespace quire {

std::optional<MemorySemaphore::Pass> MemorySemaphore::enter(std::size_t amount, double seconds,
                                                            const std::function<bool()>& gone) {
    amount               = std::min(amount, most_);
    const auto       end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    std::unique_lock lock(mutex_);
    const auto       me      = line_.insert(line_.end(), 0);
    const auto       granted = [&] { return me == line_.begin() && free_ >= amount; };
    // `gone` is polled: nothing wakes this thread for it.
    while (!granted() && !gone() && std::chrono::steady_clock::now() < end)
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
