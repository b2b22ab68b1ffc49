// quire.serve.gate: a sum that many threads share: who wants more of it than is left waits in line. Owns nothing but the sum.
export module quire.serve.gate;

import quire.core.std;

export namespace quire {

class Gate {
public:
    explicit Gate(std::size_t most) : most_(most), left_(most) {}

    // What was let in; given back when it goes.
    class Pass {
    public:
        Pass(Gate* gate, std::size_t amount) : gate_(gate), amount_(amount) {}
        Pass(Pass&& other) noexcept : gate_(std::exchange(other.gate_, nullptr)), amount_(other.amount_) {}
        Pass& operator=(Pass&&) = delete;
        ~Pass() {
            if (gate_) gate_->give_back(amount_);
        }

    private:
        Gate*       gate_;
        std::size_t amount_;
    };

    // Waits in line for `amount`, or all there is if that is less, up to so many seconds and until `gone`. None: it did not come.
    std::optional<Pass> enter(std::size_t amount, double seconds, const std::function<bool()>& gone);

private:
    friend class Pass;
    void give_back(std::size_t amount);

    std::size_t             most_, left_;
    std::list<int>          line_;
    std::mutex              mutex_;
    std::condition_variable moved_;
};

} // namespace quire

module :private;

namespace quire {

std::optional<Gate::Pass> Gate::enter(std::size_t amount, double seconds, const std::function<bool()>& gone) {
    amount               = std::min(amount, most_);
    const auto       end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    std::unique_lock lock(mutex_);
    const auto       me      = line_.insert(line_.end(), 0);
    const auto       my_turn = [&] { return me == line_.begin() && left_ >= amount; };
    // `gone` is looked at now and then: nobody has to tell this thread.
    while (!my_turn() && !gone() && std::chrono::steady_clock::now() < end)
        moved_.wait_for(lock, std::chrono::milliseconds(100), my_turn);
    const bool in = my_turn();
    line_.erase(me);
    if (in) left_ -= amount;
    moved_.notify_all();
    if (!in) return std::nullopt;
    return Pass(this, amount);
}

void Gate::give_back(std::size_t amount) {
    const std::scoped_lock lock(mutex_);
    left_ += amount;
    moved_.notify_all();
}

} // namespace quire
