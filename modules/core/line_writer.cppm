// quire.core.line_writer: lines for a file descriptor that may have no reader: add() never waits for a reader. **Owns** the lines
// that are not written yet, and the thread that writes them.
module;

#include <poll.h>
#include <unistd.h>
#include <cerrno>

export module quire.core.line_writer;

import quire.core.std;

export namespace quire {

class LineWriter {
public:
    // Of the lines that were dropped: what to write in their place, without its line break. Short.
    using Notice = std::function<std::string(std::uint64_t dropped)>;

    // `fd` stays the caller's. Keeps at most `most_bytes` of lines; the newest that do not fit are dropped.
    LineWriter(int fd, Notice notice, std::size_t most_bytes = std::size_t(256) << 10);
    LineWriter(const LineWriter&)            = delete;
    LineWriter& operator=(const LineWriter&) = delete;
    ~LineWriter(); // as flush() does

    // Any thread; never waits for the descriptor. `line` is without its line break.
    void write(std::string_view line);
    // Waits until everything is written, but not longer than `seconds` without a byte of it being taken. Returns whether all was.
    bool flush(double seconds = 1);

    std::uint64_t dropped() const; // lines, since the beginning

private:
    struct State;
    static void run(const std::shared_ptr<State>& state);

    std::shared_ptr<State> state_; // the thread's too: one that never comes back from a write outlives this object
};

} // namespace quire

module :private;

namespace quire {

struct LineWriter::State {
    int         fd = -1;
    Notice      notice;
    std::size_t most = 0;

    std::mutex              mutex;
    std::condition_variable changed;
    std::string             waiting; // lines with their breaks
    bool                    writing = false, ending = false;
    std::uint64_t           taken   = 0; // bytes
    std::uint64_t           dropped = 0, unsaid = 0;

    // Drops the line if there is no room.
    void add(std::string_view line) {
        if (waiting.size() + line.size() + 1 > most) {
            dropped++;
            unsaid++;
            return;
        }
        waiting += line;
        waiting += '\n';
    }
};

LineWriter::LineWriter(int fd, Notice notice, std::size_t most_bytes) : state_(std::make_shared<State>()) {
    state_->fd     = fd;
    state_->notice = std::move(notice);
    state_->most   = most_bytes;
    state_->waiting.reserve(most_bytes + 256); // nothing is allocated later
    std::thread([state = state_] { run(state); }).detach();
}

LineWriter::~LineWriter() {
    flush();
    const std::scoped_lock lock(state_->mutex);
    state_->ending = true;
    state_->changed.notify_all();
}

void LineWriter::write(std::string_view line) {
    const std::scoped_lock lock(state_->mutex);
    state_->add(line);
    state_->changed.notify_all();
}

bool LineWriter::flush(double seconds) {
    std::unique_lock lock(state_->mutex);
    State&           s = *state_;
    while (s.writing || !s.waiting.empty()) {
        const std::uint64_t before = s.taken;
        const auto          end    = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
        while ((s.writing || !s.waiting.empty()) && s.taken == before)
            if (s.changed.wait_until(lock, end) == std::cv_status::timeout) break;
        if ((s.writing || !s.waiting.empty()) && s.taken == before) return false;
    }
    return true;
}

std::uint64_t LineWriter::dropped() const {
    const std::scoped_lock lock(state_->mutex);
    return state_->dropped;
}

// Takes all lines at once, so that there is room for as many. Writes piece by piece, each only when the descriptor says that it takes one: then a pipe has room for 4 KiB.
void LineWriter::run(const std::shared_ptr<State>& state) {
    constexpr std::size_t most_at_once = 4096;
    State&                s            = *state;
    std::string           lines;
    lines.reserve(s.most + 256);
    std::unique_lock lock(s.mutex);
    while (true) {
        s.changed.wait(lock, [&] { return !s.waiting.empty() || s.ending; });
        if (s.waiting.empty()) return;
        lines.clear();
        std::swap(lines, s.waiting);
        if (s.unsaid > 0) (lines += s.notice(std::exchange(s.unsaid, 0))) += '\n'; // dropped behind these
        s.writing = true;
        for (std::string_view rest = lines; !rest.empty();) {
            lock.unlock();
            pollfd        ready{s.fd, POLLOUT, 0};
            const int     n    = poll(&ready, 1, 200);
            const ssize_t took = n <= 0 ? 0 : ::write(s.fd, rest.data(), std::min(rest.size(), most_at_once));
            const bool lost = took < 0 && errno != EINTR && errno != EAGAIN; // the reader is gone, or the disk is full
            lock.lock();
            if (lost) s.dropped += std::uint64_t(std::ranges::count_if(rest, [](char c) { return c == '\n'; }));
            rest.remove_prefix(lost ? rest.size() : std::size_t(std::max<ssize_t>(took, 0)));
            if (took != 0) s.taken++;
            if (took != 0) s.changed.notify_all();
            if (took == 0 && s.ending) return;
        }
        s.writing = false;
        s.changed.notify_all();
    }
}

} // namespace quire
