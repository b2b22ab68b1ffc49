// quire.serve.models.model_events: the changes of the models' status, numbered, as JSON for the clients that listen. **Owns** the recent ones.
export module quire.serve.models.model_events;

import quire.core.base;
import quire.core.json;

export namespace quire {

// Any thread.
class ModelEvents {
public:
    void add(Json event);
    // Waits for events with numbers above `serial`, which is set to the number of the last one. None: none came in time, or no more come.
    std::vector<std::string> next(std::uint64_t& serial, double seconds);
    std::uint64_t            last() const; // the number of the last one
    // A client begins to wait in next() again and again, until unlisten(). False: too many do.
    bool listen();
    void unlisten();
    void end(); // no more come

private:
    mutable std::mutex      mutex_; // of all below
    std::condition_variable changed_;
    std::deque<std::string> events_;
    std::uint64_t           last_      = 0;
    int                     listeners_ = 0;
    bool                    ended_     = false;
};

} // namespace quire

module :private;

namespace quire {

constexpr std::size_t most_events    = 1024;
constexpr int         most_listeners = 16; // each takes a thread

void ModelEvents::add(Json event) {
    std::string            text = json_dump(std::move(event));
    const std::scoped_lock lock(mutex_);
    events_.push_back(std::move(text));
    if (events_.size() > most_events) events_.pop_front();
    last_++;
    changed_.notify_all();
}

std::vector<std::string> ModelEvents::next(std::uint64_t& serial, double seconds) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return last_ > serial || ended_; });
    const std::uint64_t      first = last_ - events_.size(); // the number before the first one
    std::vector<std::string> out;
    for (std::uint64_t i = std::max(serial, first); i < last_; i++) out.push_back(events_[std::size_t(i - first)]);
    serial = last_;
    return out;
}

std::uint64_t ModelEvents::last() const {
    const std::scoped_lock lock(mutex_);
    return last_;
}

bool ModelEvents::listen() {
    const std::scoped_lock lock(mutex_);
    if (listeners_ >= most_listeners) return false;
    listeners_++;
    return true;
}

void ModelEvents::unlisten() {
    const std::scoped_lock lock(mutex_);
    listeners_--;
}

void ModelEvents::end() {
    const std::scoped_lock lock(mutex_);
    ended_ = true;
    changed_.notify_all();
}

} // namespace quire
