// quire.constraint.work: how much work a constraint may take. Nodes, elements and items are counted where they are touched or created; the
// work ends at a bound, at a time, or when it is told to. Owns nothing.
export module quire.constraint.work;

import quire.core.base;
export import quire.schedule.token_filter; // Effort

export namespace quire {

// Thrown where a piece of work ends early. The results until then are kept and stay valid.
struct WorkEnded {
    enum class Why : std::uint8_t {
        work,        // more was touched and created than is allowed
        memory,      // more bytes were taken than are allowed
        depth,       // expressions, rules or schemas are nested too deep for the stack
        interrupted, // by the time, or because it was told to stop
    } why;
};

// The budget of one piece of work, used by the thread that made it.
class WorkBudget {
public:
    // At most so many units: a node, an element of a list, an item. About 5 ns each.
    static constexpr std::size_t endless = ~std::size_t(0);
    // Stack that the work may take below the place where the budget was made: threads of the server have 1 MiB.
    static constexpr std::ptrdiff_t most_stack = 256 << 10;

    // bytes: called now and then; throws where there are too many.
    WorkBudget(std::size_t units, const Effort& effort, std::function<void()> bytes)
        : units_(units), effort_(effort), bytes_(std::move(bytes)),
          stack_(static_cast<const char*>(__builtin_frame_address(0))) {}
    WorkBudget(const WorkBudget&)            = delete;
    WorkBudget& operator=(const WorkBudget&) = delete;

    // Called before `units` of work are done. Throws WorkEnded.
    inline void spend(std::size_t units) {
        spent_ += units;
        if (spent_ >= next_check_) check_limits();
    }
    // At the beginning of a function that calls itself. Throws WorkEnded.
    inline void enter() {
        spend(1);
        if (stack_ - static_cast<const char*>(__builtin_frame_address(0)) > most_stack)
            throw WorkEnded{WorkEnded::Why::depth};
    }
    std::size_t spent() const { return spent_; }
    // More units, for work that does not count.
    void allow(std::size_t units) { units_ += std::min(units, endless - units_); }

private:
    static constexpr std::size_t check_each = 1024;

    void check_limits();

    std::size_t           units_, spent_ = 0, next_check_ = check_each;
    Effort                effort_;
    std::function<void()> bytes_;
    const char*           stack_;
};

} // namespace quire

module :private;

namespace quire {

void WorkBudget::check_limits() {
    using Why = WorkEnded::Why;
    if (spent_ > units_) throw WorkEnded{Why::work};
    if (effort_.stop && effort_.stop->load(std::memory_order_relaxed)) throw WorkEnded{Why::interrupted};
    if (effort_.until && std::chrono::steady_clock::now() > *effort_.until) throw WorkEnded{Why::interrupted};
    if (bytes_) bytes_();
    next_check_ = spent_ + check_each;
}

} // namespace quire
