// quire.serve.kv_events.publisher: sends the batches of quire.serve.kv_events.log to routers over ZeroMQ, as vLLM does. **Owns** two sockets and
// the thread that uses them. Consumers cannot make its memory grow: a slow reader misses batches, or gets its replay later. A TCP connection
// is closed when it has sent more bytes than consumers send, or when there are too many connections.
//
//   PUB     [topic, empty] [number: 8 bytes, big-endian] [batch]
//   ROUTER  a consumer that lacks batches: [id] [] [number of the first one: 8 bytes] → for each [id] [] [topic] [number] [batch],
//           and at the end [id] [] [] [8 bytes of 0xff] []
module;

#include <fcntl.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>
#include <zmq.h>

export module quire.serve.kv_events.publisher;

import quire.core.base;
import quire.paging.block_hash;
import quire.serve.kv_events.log;

export namespace quire {

class KvPublisher {
public:
    // Binds both; "": no such socket. Error: an endpoint that cannot be bound, and why.
    static Result<std::unique_ptr<KvPublisher>> create(const std::string& events, const std::string& replay,
                                                       int block_size);
    ~KvPublisher();
    KvPublisher(const KvPublisher&)            = delete;
    KvPublisher& operator=(const KvPublisher&) = delete;

    // Any one thread. Returns at once.
    void publish(std::vector<CacheChange> changes);
    // With the port, where "*" or 0 was asked for.
    const std::string& events_endpoint() const { return events_at_; }
    const std::string& replay_endpoint() const { return replay_at_; }

private:
    // A consumer that has asked for batches, and the number of its next batch.
    struct Replay {
        std::string  consumer;
        std::int64_t next = 0;
        Stopwatch    since; // it took a batch
    };
    // A socket: the monitor where libzmq reports its connections; its TCP connections: libzmq's descriptor → our duplicate of it.
    struct Watched {
        void*                        monitor = nullptr;
        int                          port    = 0;
        std::unordered_map<int, int> connections;
    };
    enum class Sent : std::uint8_t { yes, no_room, gone };

    explicit KvPublisher(int block_size);
    void run();
    void send(const KvBatch& batch);
    void hear();
    Sent reply(const std::string& consumer, std::int64_t number, const std::shared_ptr<const KvBatch>& batch);
    bool replayed(Replay& replay);
    void watch(Watched& watched);

    KvEventLog                            log_;
    void *                                context_ = nullptr, *events_ = nullptr, *replay_ = nullptr;
    int                                   wake_ = -1;
    std::string                           events_at_, replay_at_;
    std::vector<Replay>                   replays_;
    std::array<Watched, 2>                watched_; // of the two sockets
    std::mutex                            mutex_;   // of these two
    std::vector<std::vector<CacheChange>> waiting_;
    bool                                  stopping_ = false;
    std::thread                           thread_;
};

} // namespace quire

module :private;

namespace quire {

static double seconds_now() {
    return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

static std::string big_endian(std::int64_t v) {
    std::string bytes;
    for (int i = 7; i >= 0; i--) bytes += char(std::uint64_t(v) >> (8 * i) & 255);
    return bytes;
}

// libzmq takes any number for a port, and its last 16 bits.
static bool can_be_reached(std::string_view endpoint) {
    if (endpoint.starts_with("ipc://")) return true;
    const std::string_view port = endpoint.substr(endpoint.rfind(':') + 1);
    return endpoint.starts_with("tcp://") &&
           (port == "*" || (!port.empty() && port.size() <= 5 && std::ranges::all_of(port, [](char c) {
                return c >= '0' && c <= '9';
            }) && std::stoi(std::string(port)) <= 65535));
}

// Bytes that a connection may send in its life. libzmq keeps every subscription and every part of an incomplete message, without a limit; the
// shortest ones take some 30 times the bytes that were sent. 16 KiB are enough for 1,000 requests; ZeroMQ connects again.
constexpr std::uint64_t most_received    = 16 << 10;
constexpr std::size_t   most_connections = 256; // of each socket
constexpr long          look_again       = 20;  // milliseconds

// Ends a connection at once, whatever the other side or libzmq still wants to send or read; libzmq then closes its descriptor.
static void reset(int connection) {
    sockaddr nowhere{};
    nowhere.sa_family = AF_UNSPEC;
    (void)::connect(connection, &nowhere, sizeof nowhere);
}

KvPublisher::KvPublisher(int block_size) : log_(block_size, seconds_now()) {}

Result<std::unique_ptr<KvPublisher>> KvPublisher::create(const std::string& events, const std::string& replay,
                                                         int block_size) {
    std::unique_ptr<KvPublisher> p(new KvPublisher(block_size));
    p->context_ = zmq_ctx_new();
    p->wake_    = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (!p->context_ || p->wake_ < 0) return fail_with(ErrorKind::system, "KV events: no more sockets");
    // Before they are bound, so that no connection is missed.
    const auto monitor = [&](void* socket, Watched& watched, const char* name) {
        zmq_socket_monitor(socket, name, ZMQ_EVENT_ACCEPTED | ZMQ_EVENT_CLOSED | ZMQ_EVENT_DISCONNECTED);
        watched.monitor = zmq_socket(p->context_, ZMQ_PAIR);
        if (watched.monitor) zmq_connect(watched.monitor, name);
    };
    const auto bind = [&](const std::string& to, int type, void*& socket, std::string& at) -> Result<void> {
        if (to.empty()) return {};
        if (!can_be_reached(to))
            return fail("KV events cannot be sent at ", quote(to), ": an endpoint is tcp://HOST:PORT or ipc://PATH");
        socket         = zmq_socket(p->context_, type);
        const auto set = [&](int option, int value) { zmq_setsockopt(socket, option, &value, sizeof value); };
        if (socket) { // the first option bounds a subscription or request; the next two end connections to lost hosts
            const std::int64_t most_heard = 4096;
            zmq_setsockopt(socket, ZMQ_MAXMSGSIZE, &most_heard, sizeof most_heard);
            set(ZMQ_TCP_KEEPALIVE, 1);
            set(ZMQ_TCP_KEEPALIVE_IDLE, 60);
            set(ZMQ_LINGER, 0);
            set(ZMQ_SNDHWM, type == ZMQ_PUB ? most_kv_batches : 64);
            if (type == ZMQ_ROUTER) set(ZMQ_ROUTER_MANDATORY, 1); // says when a queue is full
        }
        Watched& watched = p->watched_[type == ZMQ_PUB ? 0 : 1];
        if (socket && to.starts_with("tcp://"))
            monitor(socket, watched, type == ZMQ_PUB ? "inproc://events" : "inproc://replay");
        if (!socket || zmq_bind(socket, to.c_str()) != 0)
            return fail("KV events cannot be sent at ", quote(to), ": ", zmq_strerror(zmq_errno()));
        char        name[256] = "";
        std::size_t size      = sizeof name;
        zmq_getsockopt(socket, ZMQ_LAST_ENDPOINT, name, &size);
        at = name;
        if (watched.monitor) watched.port = std::stoi(at.substr(at.rfind(':') + 1));
        return {};
    };
    if (auto ok = bind(events, ZMQ_PUB, p->events_, p->events_at_); !ok) return std::unexpected(ok.error());
    if (auto ok = bind(replay, ZMQ_ROUTER, p->replay_, p->replay_at_); !ok) return std::unexpected(ok.error());
    p->thread_ = std::thread([raw = p.get()] { raw->run(); });
    return p;
}

KvPublisher::~KvPublisher() {
    if (thread_.joinable()) {
        {
            std::scoped_lock lock(mutex_);
            stopping_ = true;
        }
        const std::uint64_t one = 1;
        (void)!write(wake_, &one, sizeof one);
        thread_.join();
    }
    for (Watched& w : watched_) {
        for (const auto& [theirs, ours] : w.connections) close(ours);
        if (w.monitor) zmq_close(w.monitor);
    }
    if (events_) zmq_close(events_);
    if (replay_) zmq_close(replay_);
    if (context_) zmq_ctx_term(context_);
    if (wake_ >= 0) close(wake_);
}

void KvPublisher::publish(std::vector<CacheChange> changes) {
    {
        std::scoped_lock lock(mutex_);
        waiting_.push_back(std::move(changes));
    }
    const std::uint64_t one = 1;
    (void)!write(wake_, &one, sizeof one);
}

void KvPublisher::send(const KvBatch& batch) {
    const std::string number = big_endian(batch.number);
    if (!events_) return;
    zmq_send(events_, "", 0, ZMQ_SNDMORE);
    zmq_send(events_, number.data(), number.size(), ZMQ_SNDMORE);
    zmq_send(events_, batch.bytes.data(), batch.bytes.size(), 0);
}

// Takes the requests of consumers that have arrived; other messages are ignored.
void KvPublisher::hear() {
    constexpr std::size_t most_replays = 256;
    for (int n = 0; n < 1000; n++) {
        std::vector<std::string> frames;
        for (int more = 1; more != 0;) {
            zmq_msg_t message;
            zmq_msg_init(&message);
            if (zmq_msg_recv(&message, replay_, ZMQ_DONTWAIT) < 0) {
                zmq_msg_close(&message);
                return;
            }
            if (frames.size() < 4)
                frames.emplace_back(static_cast<const char*>(zmq_msg_data(&message)), zmq_msg_size(&message));
            more = zmq_msg_more(&message);
            zmq_msg_close(&message);
        }
        if (frames.size() != 3 || !frames[1].empty() || frames[2].size() != 8) continue;
        std::uint64_t first = 0;
        for (char c : frames[2]) first = first << 8 | static_cast<unsigned char>(c);
        std::erase_if(replays_, [&](const Replay& r) { return r.consumer == frames[0]; }); // the consumer begins anew
        if (replays_.size() < most_replays) replays_.push_back({frames[0], std::int64_t(first), {}});
    }
}

// The queues of all consumers share the bytes.
KvPublisher::Sent KvPublisher::reply(const std::string& consumer, std::int64_t number,
                                     const std::shared_ptr<const KvBatch>& batch) {
    if (zmq_send(replay_, consumer.data(), consumer.size(), ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0)
        return zmq_errno() == EAGAIN ? Sent::no_room : Sent::gone;
    const std::string place = big_endian(number);
    zmq_send(replay_, "", 0, ZMQ_SNDMORE);
    zmq_send(replay_, "", 0, ZMQ_SNDMORE); // the topic
    zmq_send(replay_, place.data(), place.size(), ZMQ_SNDMORE);
    using Shared = std::shared_ptr<const KvBatch>;
    zmq_msg_t message;
    zmq_msg_init(&message);
    if (batch)
        zmq_msg_init_data(
            &message, const_cast<char*>(batch->bytes.data()), batch->bytes.size(),
            [](void*, void* owner) { delete static_cast<Shared*>(owner); }, new Shared(batch));
    if (zmq_msg_send(&message, replay_, 0) < 0) zmq_msg_close(&message);
    return Sent::yes;
}

// Sends as many batches as have room. True: all are sent, or the consumer reads no more.
bool KvPublisher::replayed(Replay& r) {
    constexpr double timeout = 60;
    for (;;) {
        const auto batch = log_.next(r.next, seconds_now());
        const Sent sent  = reply(r.consumer, batch ? batch->number : -1, batch);
        if (sent == Sent::no_room) return r.since.seconds() > timeout;
        if (sent == Sent::gone || !batch) return true;
        r.next = batch->number + 1;
        r.since.restart();
    }
}

// Ends the connections that have sent too much. A descriptor of our own cannot become another connection's while we look at it.
void KvPublisher::watch(Watched& w) {
    const auto forget = [&](int theirs) {
        const auto at = w.connections.find(theirs);
        if (at == w.connections.end()) return;
        close(at->second);
        w.connections.erase(at);
    };
    while (w.monitor) {
        zmq_msg_t event, where;
        zmq_msg_init(&event);
        zmq_msg_init(&where);
        bool some = zmq_msg_recv(&event, w.monitor, ZMQ_DONTWAIT) >= 6;
        if (some) {
            std::uint16_t kind;
            std::int32_t  theirs;
            std::memcpy(&kind, zmq_msg_data(&event), sizeof kind);
            std::memcpy(&theirs, static_cast<char*>(zmq_msg_data(&event)) + sizeof kind, sizeof theirs);
            zmq_msg_recv(&where, w.monitor, ZMQ_DONTWAIT);
            forget(theirs);
            if (const int ours = kind == ZMQ_EVENT_ACCEPTED ? fcntl(theirs, F_DUPFD_CLOEXEC, 0) : -1; ours >= 0) {
                sockaddr_storage address{};
                socklen_t        size = sizeof address;
                getsockname(ours, reinterpret_cast<sockaddr*>(&address), &size);
                // The port is at the same place in both kinds of addresses. Another port: libzmq's descriptor was closed already, and is used anew.
                if (ntohs(reinterpret_cast<const sockaddr_in*>(&address)->sin_port) == w.port) {
                    w.connections.emplace(theirs, ours);
                    if (w.connections.size() > most_connections) reset(ours);
                } else {
                    close(ours);
                }
            }
        }
        zmq_msg_close(&event);
        zmq_msg_close(&where);
        if (!some) break;
    }
    for (const auto& [theirs, ours] : w.connections) {
        tcp_info  info{};
        socklen_t size = sizeof info;
        if (getsockopt(ours, IPPROTO_TCP, TCP_INFO, &info, &size) == 0 && info.tcpi_bytes_received > most_received)
            reset(ours);
    }
}

void KvPublisher::run() {
    for (const KvBatch& batch : log_.from(0, seconds_now())) send(batch);
    while (true) {
        zmq_pollitem_t items[4]{};
        int            n = 1;
        items[0].fd      = wake_;
        for (void* socket : {replay_, watched_[0].monitor, watched_[1].monitor})
            if (socket) items[n++].socket = socket;
        for (zmq_pollitem_t& item : items) item.events = ZMQ_POLLIN;
        const long room_again = 5; // milliseconds
        const bool connected  = !watched_[0].connections.empty() || !watched_[1].connections.empty();
        if (zmq_poll(items, n, !replays_.empty() ? room_again : connected ? look_again : -1) < 0) continue; // a signal
        for (Watched& w : watched_) watch(w);
        if (items[0].revents != 0) {
            std::uint64_t woken;
            (void)!read(wake_, &woken, sizeof woken);
            std::vector<std::vector<CacheChange>> waiting;
            {
                std::scoped_lock lock(mutex_);
                if (stopping_) return;
                waiting.swap(waiting_);
            }
            for (const std::vector<CacheChange>& changes : waiting) send(log_.add(changes, seconds_now()));
        }
        if (replay_ && items[1].revents != 0) hear();
        std::erase_if(replays_, [&](Replay& r) { return replayed(r); });
    }
}

} // namespace quire
