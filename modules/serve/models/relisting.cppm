// quire.serve.models.relisting: lists the models again when clients ask for it: one listing at a time, with pauses between them. **Owns** the
// count of listings.
export module quire.serve.models.relisting;

import quire.core.base;
export import quire.serve.models.model_host;

export namespace quire {

// Any thread.
class Relisting {
public:
    using List = std::function<Result<std::vector<ModelSetup>>()>;
    using Take = std::function<void(std::vector<ModelSetup>&& setups)>;

    // `list`: lists all models; no two calls at once. `take`: gets the lists, in their order.
    Relisting(List list, Take take) : list_(std::move(list)), take_(std::move(take)) {}

    // Returns behind a listing that began after the call: several callers have one in common. Between two listings lie 0.1 seconds, and four
    // times as long as the last one took, so that callers take a fifth of a core at most. `gone`: the caller wants no list any more.
    // Error: that of the listing.
    Result<void> wait(const std::function<bool()>& gone);

private:
    const List              list_;
    const Take              take_;
    std::mutex              mutex_; // of all below
    std::condition_variable changed_;
    std::uint64_t           begun_ = 0, done_ = 0; // listings
    TimePoint               next_{};               // no listing begins before
    Result<void>            last_;                 // of the last listing
};

} // namespace quire

module :private;

namespace quire {

Result<void> Relisting::wait(const std::function<bool()>& gone) {
    constexpr auto      look = std::chrono::milliseconds(100); // at the caller
    std::unique_lock    lock(mutex_);
    const std::uint64_t before = begun_;
    while (done_ <= before) {
        const TimePoint now = std::chrono::steady_clock::now();
        if (begun_ > done_ || now < next_) {
            changed_.wait_until(lock, begun_ > done_ ? now + look : std::min(next_, now + look));
            lock.unlock();
            const bool left = gone();
            lock.lock();
            if (left) return fail("the client has gone");
            continue;
        }
        begun_++;
        lock.unlock();
        Result<std::vector<ModelSetup>> setups = fail("");
        try {
            setups = list_();
            if (setups) take_(std::move(*setups));
        } catch (const std::bad_alloc&) {
            setups = fail("there is not enough memory");
        } catch (const std::exception& error) { // else no later listing would begin
            setups = fail(error.what());
        }
        const TimePoint end = std::chrono::steady_clock::now();
        lock.lock();
        last_ = {};
        if (!setups) last_ = std::unexpected(setups.error());
        next_ = end + std::chrono::milliseconds(100) + 4 * (end - now);
        done_ = begun_;
        changed_.notify_all();
    }
    return last_;
}

} // namespace quire
