// quire.engine.ranks.process_group: the processes that run one model together, on one host or several: how they find each other, and their
// messages. Rank 0 leads; the other processes talk to rank 0 alone. **Owns** the connections.
//
// A message: length (4 bytes), kind (1 byte), content. Numbers are little-endian: all hosts are x86-64.
//
// Heartbeats: a process does not know how long another one loads, or how long rank 0 has no step. So every process sends heartbeats:
// rank 0 always, another process until its first receive_command(). A process that has sent nothing for `seconds` is lost, even if its
// connection is open. Within a step only the message that is due ends a wait.
export module quire.engine.ranks.process_group;

import quire.compute.ranks.rank_group;
import quire.core.base;
import quire.core.tcp;

export namespace quire {

// This process and rank 0's address, from the variables that torchrun and other launchers set.
struct ProcessSpec {
    int rank = 0, n = 1; // RANK, WORLD_SIZE
    int local = 0;       // LOCAL_RANK: the process' number on its host; it takes the GPUs after those of lower numbers
    std::string address = "127.0.0.1"; // MASTER_ADDR: where rank 0 listens
    int         port    = 29500;       // MASTER_PORT
};

class ProcessGroup final : public RankLink {
public:
    // Rank 0 waits for all other processes; these call rank 0. Both take at most `timeout` seconds. `model`: the model and the options
    // that must be equal in all processes, one a line. `seconds`: the longest wait for a message of a step. Error: how many processes
    // are missing, or which process has another line.
    static Result<std::unique_ptr<ProcessGroup>> rendezvous(const ProcessSpec& spec, const std::string& model,
                                                            double timeout, double seconds);
    ~ProcessGroup() override;
    ProcessGroup(const ProcessGroup&)            = delete;
    ProcessGroup& operator=(const ProcessGroup&) = delete;

    int rank() const { return spec_.rank; }
    int n() const { return spec_.n; }

    enum class Kind : std::uint8_t {
        hello     = 'H',
        refusal   = 'F',
        least     = 'L',
        part      = 'P',
        step      = 'S',
        moves     = 'M',
        heartbeat = 'A',
        end       = 'E'
    };
    struct Message {
        Kind                       kind = Kind::end;
        std::span<const std::byte> content; // until the next call
    };

    // The smallest `mine` of all processes. A process may load before it calls this: the wait lasts while its heartbeats come.
    Result<std::uint64_t> all_reduce_min(std::uint64_t mine);
    // Rank 0: sends a message to all other processes.
    Result<void> tell(Kind kind, std::span<const std::byte> content);
    // The other processes: the next message of rank 0. The wait lasts while rank 0's heartbeats come.
    Result<Message> receive_command();

    // Rank 0: tells the other processes to end, and waits at most 2 s until they have run all earlier messages. Another process: answers
    // that it has.
    void end();

    std::optional<Failure> exchange(std::span<const std::byte>           mine,
                                    std::vector<std::vector<std::byte>>& of_all) override;
    std::optional<Failure> lost_peer() override;

private:
    // A connection to rank 0 whose first message is not complete.
    struct Caller {
        int                    socket = -1;
        Stopwatch              since;
        std::vector<std::byte> said;
    };
    // Of a wait: for the whole wait, or from the last heartbeat on.
    enum class Timeout : std::uint8_t { of_all, renewed_by_heartbeat };

    ProcessGroup(ProcessSpec spec, double seconds)
        : spec_(std::move(spec)), seconds_(seconds), sockets_(std::size_t(spec_.n), -1) {}

    Result<void> wait_for_all(const std::string& model, double timeout);
    Result<bool> read_hello(Caller& caller, const std::string& model);
    Result<bool> admit(int socket, std::string_view hello, const std::string& model);
    Result<void> call(const std::string& model, double timeout);
    Result<void> send(int to, Kind kind, std::span<const std::byte> content);
    Result<Kind> receive(int from, std::vector<std::byte>& content, double seconds, Timeout timeout);
    Result<void> expect(int from, Kind kind, std::vector<std::byte>& content, Timeout timeout);
    void         start_heartbeat();
    void         stop_heartbeat();

    ProcessSpec                 spec_;
    double                      seconds_;
    std::vector<int>            sockets_; // to each process; -1: none
    std::vector<std::byte>      outgoing_, heard_;
    std::mutex                  sending_; // guards sending, and sockets_ until all processes are connected
    std::condition_variable_any heartbeat_stops_;
    std::jthread                heartbeat_;
};

} // namespace quire

module :private;

namespace quire {

constexpr std::size_t most_hello = 8192, most_message = std::size_t(1) << 30, head_bytes = 5;

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

// The lines of a process' model and options that rank 0 does not have, each beside rank 0's.
std::string difference(std::string_view theirs, std::string_view ours) {
    const auto next_line = [](std::string_view& all) {
        const std::string_view line = all.substr(0, all.find('\n'));
        all.remove_prefix(std::min(all.size(), line.size() + 1));
        return line;
    };
    std::string text;
    while (!theirs.empty() || !ours.empty()) {
        const std::string_view their = next_line(theirs), our = next_line(ours);
        if (their != our) text += cat(text.empty() ? "" : "; ", their, ", and rank 0 ", our);
    }
    return text;
}

Result<void> send_message(int socket, ProcessGroup::Kind kind, std::span<const std::byte> content, double seconds) {
    std::array<std::byte, head_bytes> head{};
    const auto                        size = std::uint32_t(content.size());
    std::memcpy(head.data(), &size, sizeof size);
    head[4] = std::byte(kind);
    if (content.size() < 4096) { // in one packet
        std::vector<std::byte> whole(head.begin(), head.end());
        whole.insert(whole.end(), content.begin(), content.end());
        return send_all(socket, whole, seconds);
    }
    if (auto ok = send_all(socket, head, seconds); !ok) return ok;
    return send_all(socket, content, seconds);
}

Result<ProcessGroup::Kind> receive_message(int socket, std::vector<std::byte>& content, double seconds,
                                           std::size_t most) {
    std::array<std::byte, head_bytes> head{};
    if (auto ok = receive_all(socket, head, seconds); !ok) return std::unexpected(ok.error());
    std::uint32_t size = 0;
    std::memcpy(&size, head.data(), sizeof size);
    if (size > most) return fail("it does not speak as quire does");
    content.resize(size);
    if (auto ok = receive_all(socket, content, seconds); !ok) return std::unexpected(ok.error());
    return ProcessGroup::Kind(head[4]);
}

Result<std::unique_ptr<ProcessGroup>> ProcessGroup::rendezvous(const ProcessSpec& spec, const std::string& model,
                                                               double timeout, double seconds) {
    std::unique_ptr<ProcessGroup> group(new ProcessGroup(spec, seconds));
    if (spec.rank == 0) group->start_heartbeat();
    const Result<void> ok = spec.rank == 0 ? group->wait_for_all(model, timeout) : group->call(model, timeout);
    if (!ok) return std::unexpected(ok.error());
    if (spec.rank > 0) group->start_heartbeat();
    return group;
}

ProcessGroup::~ProcessGroup() {
    stop_heartbeat();
    for (int socket : sockets_) close_tcp(socket);
}

void ProcessGroup::start_heartbeat() {
    heartbeat_ = std::jthread([this](const std::stop_token& stop) {
        const auto       period = std::chrono::duration<double>(std::min(seconds_ / 4, 1.0));
        std::unique_lock lock(sending_);
        while (!heartbeat_stops_.wait_for(lock, stop, period, [&] { return stop.stop_requested(); }))
            for (int socket : sockets_)
                if (socket >= 0)
                    (void)send_message(socket, Kind::heartbeat, {}, seconds_); // a failure is noticed by receive()
    });
}

void ProcessGroup::stop_heartbeat() {
    heartbeat_.request_stop();
    if (heartbeat_.joinable()) heartbeat_.join();
}

Result<void> ProcessGroup::wait_for_all(const std::string& model, double timeout) {
    constexpr double      seconds_to_speak = 5;
    constexpr std::size_t most_callers     = 256;
    Result<Listener>      listener         = listen_tcp(spec_.address, spec_.port);
    if (!listener) return std::unexpected(listener.error());
    const Stopwatch     watch;
    std::vector<Caller> callers; // all are read at once: a silent caller does not delay the others
    Result<void>        result;
    for (int here = 1; here < spec_.n && result;) {
        if (watch.seconds() > timeout) {
            result = fail_with(ErrorKind::system, "of ", spec_.n, " processes (WORLD_SIZE) ", here, " came to ",
                               spec_.address, " port ", listener->port, " within ", timeout, " seconds");
            break;
        }
        std::vector<int> sockets{listener->fd};
        for (const Caller& caller : callers) sockets.push_back(caller.socket);
        for (std::size_t i : readable_of(sockets, std::clamp(timeout - watch.seconds(), 0.01, 1.0))) {
            if (i == 0) {
                if (const Result<int> socket = accept_tcp(*listener, 0.01)) callers.push_back({*socket, {}, {}});
                continue;
            }
            Caller&            caller   = callers[i - 1];
            const Result<bool> admitted = read_hello(caller, model);
            if (!admitted && result) result = std::unexpected(admitted.error());
            if (admitted && *admitted) here++, caller.socket = -1;
        }
        std::size_t too_many = callers.size() - std::min(callers.size(), most_callers);
        std::erase_if(callers, [&](Caller& caller) { // the oldest are first
            if (caller.socket >= 0 && too_many == 0 && caller.since.seconds() < seconds_to_speak) return false;
            if (too_many > 0) too_many--;
            close_tcp(caller.socket);
            return true;
        });
    }
    for (const Caller& caller : callers) close_tcp(caller.socket);
    close_tcp(listener->fd);
    return result;
}

// Reads a part of a caller's first message. True: the caller is a process of this model, and its socket is in sockets_. False: the message
// is not complete, or the caller is a stranger and was disconnected. Error: a process that cannot join.
Result<bool> ProcessGroup::read_hello(Caller& caller, const std::string& model) {
    const auto let_go = [&] {
        close_tcp(std::exchange(caller.socket, -1));
        return false;
    };
    for (;;) {
        std::uint32_t size = 0;
        if (caller.said.size() >= head_bytes) {
            std::memcpy(&size, caller.said.data(), sizeof size);
            if (size > most_hello || Kind(caller.said[4]) != Kind::hello) return let_go();
        }
        const std::size_t all = head_bytes + size, before = caller.said.size();
        if (before >= head_bytes && before == all) {
            const auto* text = reinterpret_cast<const char*>(caller.said.data()) + head_bytes;
            const auto  ok   = admit(caller.socket, {text, size}, model);
            if (ok && !*ok) return let_go();
            return ok;
        }
        caller.said.resize(all);
        const Result<std::size_t> n = receive_some(caller.socket, std::span(caller.said).subspan(before));
        if (!n) return let_go();
        caller.said.resize(before + *n);
        if (*n == 0) return false;
    }
}

// `hello`: a caller's first message. False: the caller is a stranger. Error: a process that cannot join.
Result<bool> ProcessGroup::admit(int socket, std::string_view hello, const std::string& model) {
    const auto        line = hello.find('\n');
    const std::string words(hello.substr(0, line)), theirs(line == hello.npos ? "" : hello.substr(line + 1));
    int               rank = -1, n = 0;
    if (std::sscanf(words.c_str(), "quire ranks 1: %d of %d", &rank, &n) != 2) return false;
    std::scoped_lock lock(sending_);
    std::string      why;
    if (n != spec_.n) why = cat("WORLD_SIZE is ", n, " for rank ", rank, ", and ", spec_.n, " for rank 0");
    else if (rank < 1 || rank >= n) why = cat("RANK ", rank, " is not in 1..", n - 1);
    else if (sockets_[std::size_t(rank)] >= 0) why = cat("two processes say that they are rank ", rank);
    else if (theirs != model) why = cat("rank ", rank, " ", difference(theirs, model));
    const auto sent = send_message(socket, why.empty() ? Kind::hello : Kind::refusal, bytes_of(why), 5);
    if (!why.empty()) return fail(why);
    if (!sent) return false;
    sockets_[std::size_t(rank)] = socket;
    return true;
}

Result<void> ProcessGroup::call(const std::string& model, double timeout) {
    const Result<int> socket = connect_tcp(spec_.address, spec_.port, timeout);
    if (!socket) return fail_with(ErrorKind::system, "rank 0: ", socket.error().message);
    sockets_[0] = *socket;
    if (auto ok = send(0, Kind::hello, bytes_of(cat("quire ranks 1: ", spec_.rank, " of ", spec_.n, "\n", model))); !ok)
        return ok;
    const Result<Kind> kind = receive(0, heard_, 10, Timeout::of_all);
    if (!kind) return std::unexpected(kind.error());
    if (*kind == Kind::refusal) return fail(std::string(reinterpret_cast<const char*>(heard_.data()), heard_.size()));
    if (*kind != Kind::hello) return fail("rank 0: it does not speak as quire does");
    return {};
}

Result<void> ProcessGroup::send(int to, Kind kind, std::span<const std::byte> content) {
    std::scoped_lock lock(sending_);
    if (auto ok = send_message(sockets_[std::size_t(to)], kind, content, seconds_); !ok)
        return fail_with(ErrorKind::system, "rank ", to, ": ", ok.error().message);
    return {};
}

Result<ProcessGroup::Kind> ProcessGroup::receive(int from, std::vector<std::byte>& content, double seconds,
                                                 Timeout timeout) {
    Stopwatch watch;
    for (;;) {
        const double left = std::max(seconds - watch.seconds(), 0.001);
        Result<Kind> kind = receive_message(sockets_[std::size_t(from)], content, left, most_message);
        if (kind && *kind == Kind::heartbeat) {
            if (timeout == Timeout::renewed_by_heartbeat) watch.restart();
            continue;
        }
        if (kind) return kind;
        return fail_with(
            ErrorKind::system, "rank ", from, ": ",
            watch.seconds() < seconds ? kind.error().message : cat("no answer within ", seconds, " seconds"));
    }
}

Result<void> ProcessGroup::expect(int from, Kind kind, std::vector<std::byte>& content, Timeout timeout) {
    const Result<Kind> got = receive(from, content, seconds_, timeout);
    if (!got) return std::unexpected(got.error());
    if (*got != kind) return fail_with(ErrorKind::system, "rank ", from, ": it has stopped, or is out of step");
    return {};
}

Result<std::uint64_t> ProcessGroup::all_reduce_min(std::uint64_t mine) {
    const auto all  = std::as_bytes(std::span(&mine, 1));
    const auto hear = [&](int from) -> Result<std::uint64_t> {
        if (auto ok = expect(from, Kind::least, heard_, Timeout::renewed_by_heartbeat); !ok)
            return std::unexpected(ok.error());
        std::uint64_t value = 0;
        if (heard_.size() != sizeof value) return fail("rank ", from, ": it is out of step");
        std::memcpy(&value, heard_.data(), sizeof value);
        return value;
    };
    if (spec_.rank > 0) {
        if (auto ok = send(0, Kind::least, all); !ok) return std::unexpected(ok.error());
        return hear(0);
    }
    for (int p = 1; p < spec_.n; p++) {
        const Result<std::uint64_t> theirs = hear(p);
        if (!theirs) return theirs;
        mine = std::min(mine, *theirs);
    }
    for (int p = 1; p < spec_.n; p++)
        if (auto ok = send(p, Kind::least, all); !ok) return std::unexpected(ok.error());
    return mine;
}

Result<void> ProcessGroup::tell(Kind kind, std::span<const std::byte> content) {
    for (int p = 1; p < spec_.n; p++)
        if (auto ok = send(p, kind, content); !ok) return ok;
    return {};
}

void ProcessGroup::end() {
    stop_heartbeat();
    constexpr double timeout = 2;
    std::vector<int> told;
    for (int p = 0; p < spec_.n; p++) // a process without a connection has ended
        if (p != spec_.rank && sockets_[std::size_t(p)] >= 0 && send(p, Kind::end, {})) told.push_back(p);
    if (spec_.rank > 0) return;
    const Stopwatch watch;
    for (int p : told) {
        const Result<Kind> done = receive(p, heard_, std::max(timeout - watch.seconds(), 0.01), Timeout::of_all);
        if (!done) continue;
    }
}

std::optional<RankLink::Failure> ProcessGroup::lost_peer() {
    for (int p = 0; p < spec_.n; p++)
        if (sockets_[std::size_t(p)] >= 0 && has_hung_up(sockets_[std::size_t(p)]))
            return Failure{p, "its process is gone"};
    return {};
}

Result<ProcessGroup::Message> ProcessGroup::receive_command() {
    stop_heartbeat(); // rank 0 reads no heartbeats from now on
    const Result<Kind> kind = receive(0, heard_, seconds_, Timeout::renewed_by_heartbeat);
    if (!kind) return std::unexpected(kind.error());
    return Message{*kind, heard_};
}

// By way of rank 0: rank 0 receives all parts, then sends each process the parts of the others.
std::optional<RankLink::Failure> ProcessGroup::exchange(std::span<const std::byte>           mine,
                                                        std::vector<std::vector<std::byte>>& of_all) {
    const auto failure = [](int p, const Error& error) {
        const std::string prefix = cat("rank ", p, ": "); // RankGroup::fail() adds the rank
        return Failure{p, error.message.starts_with(prefix) ? error.message.substr(prefix.size()) : error.message};
    };
    of_all.resize(std::size_t(spec_.n));
    if (spec_.rank == 0) {
        for (int p = 1; p < spec_.n; p++)
            if (auto ok = expect(p, Kind::part, of_all[std::size_t(p)], Timeout::of_all); !ok)
                return failure(p, ok.error());
        for (int p = 1; p < spec_.n; p++) {
            outgoing_.clear();
            for (int q = 0; q < spec_.n; q++) {
                if (q == p) continue;
                const auto part = q == 0 ? mine : std::span<const std::byte>(of_all[std::size_t(q)]);
                const auto size = std::uint64_t(part.size());
                const auto head = std::as_bytes(std::span(&size, 1));
                outgoing_.insert(outgoing_.end(), head.begin(), head.end());
                outgoing_.insert(outgoing_.end(), part.begin(), part.end());
            }
            if (auto ok = send(p, Kind::part, outgoing_); !ok) return failure(p, ok.error());
        }
        return {};
    }
    if (auto ok = send(0, Kind::part, mine); !ok) return failure(0, ok.error());
    if (auto ok = expect(0, Kind::part, heard_, Timeout::of_all); !ok) return failure(0, ok.error());
    std::span<const std::byte> left = heard_;
    for (int q = 0; q < spec_.n; q++) {
        if (q == spec_.rank) continue;
        std::uint64_t size = 0;
        if (left.size() >= sizeof size) std::memcpy(&size, left.data(), sizeof size);
        if (left.size() < sizeof size || size > left.size() - sizeof size) return Failure{q, "what it sent is cut off"};
        const auto part = left.subspan(sizeof size, size);
        of_all[std::size_t(q)].assign(part.begin(), part.end());
        left = left.subspan(sizeof size + size);
    }
    return {};
}

} // namespace quire
