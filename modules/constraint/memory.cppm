// quire.constraint.memory: the memory that all constraints of a process take together, and which constraint gives memory back
// when it becomes too much. **Owns** the count.
export module quire.constraint.memory;

import quire.constraint.work;
import quire.core.base;

export namespace quire {

class ConstraintMemory {
public:
    // An object that takes memory and can give back a part of it: the part that it has learnt. The destructor removes it from the count.
    class Holder {
    public:
        Holder()                         = default;
        Holder(const Holder&)            = delete;
        Holder& operator=(const Holder&) = delete;

        // The bytes that the holder takes now. Called by the holder's own thread.
        void        holds(std::size_t bytes);
        std::size_t held() const { return bytes_.load(std::memory_order_relaxed); }
        // The holder was used now.
        void used();

    protected:
        ~Holder() { holds(0); }
        // join(): the last call in the constructor of a class with give_back(); leave(): the first one in its destructor. give_back() may be
        // called between the two.
        void join();
        void leave();

    private:
        friend class ConstraintMemory;
        // Called by any thread; waits for no other thread. False: the holder is at work.
        virtual bool give_back() { return false; }

        std::atomic<std::size_t>   bytes_{0};
        std::atomic<std::uint64_t> used_{0};
    };

    static ConstraintMemory& all();

    void        limit(std::size_t bytes) { most_ = bytes; }
    std::size_t limit() const { return most_; }
    std::size_t bytes() const { return bytes_; }
    bool        over() const { return bytes_ > most_; }
    // The bytes of one holder when the sum is too large.
    std::size_t share();
    // The holders that were not used for longest give memory back, until the sum is small enough. False: the sum is still too large, and
    // `its_bytes` are more than one holder's share.
    bool make_room(const Holder& for_whom, std::size_t its_bytes);

private:
    std::size_t share_of_one() const { return most_ / (2 * std::max<std::size_t>(holders_.size(), 8)); }

    std::atomic<std::size_t>   most_{std::size_t(256) << 20}, bytes_{0};
    std::atomic<std::uint64_t> now_{0};
    std::mutex                 mutex_;
    std::vector<Holder*>       holders_;
};

} // namespace quire

module :private;

namespace quire {

ConstraintMemory& ConstraintMemory::all() {
    static ConstraintMemory memory;
    return memory;
}

void ConstraintMemory::Holder::join() {
    ConstraintMemory& m = all();
    used();
    std::scoped_lock lock(m.mutex_);
    m.holders_.push_back(this);
}

void ConstraintMemory::Holder::leave() {
    ConstraintMemory& m = all();
    std::scoped_lock  lock(m.mutex_);
    std::erase_if(m.holders_, [&](const Holder* h) { return h == this; });
}

void ConstraintMemory::Holder::used() { used_ = ++all().now_; }

void ConstraintMemory::Holder::holds(std::size_t bytes) {
    all().bytes_ += bytes - bytes_.exchange(bytes); // modulo 2^64
}

std::size_t ConstraintMemory::share() {
    std::scoped_lock lock(mutex_);
    return share_of_one();
}

bool ConstraintMemory::make_room(const Holder& for_whom, std::size_t its_bytes) {
    std::scoped_lock                               lock(mutex_);
    std::vector<std::pair<std::uint64_t, Holder*>> others; // by their last use
    for (Holder* h : holders_)
        if (h != &for_whom) others.emplace_back(h->used_, h);
    std::sort(others.begin(), others.end());
    for (const auto& [used, h] : others) {
        if (!over()) return true;
        (void)h->give_back();
    }
    return !over() || its_bytes <= share_of_one();
}

} // namespace quire
