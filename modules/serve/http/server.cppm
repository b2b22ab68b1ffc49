// quire.serve.http.server: HTTP/1.1 over TCP, TLS and Unix sockets, for handlers that may block. One thread receives and parses the
// requests of all connections (epoll); a complete request goes to a worker thread, which runs its handler and writes the
// response. **Owns** the sockets, the epoll thread, the table of routes and the workers.
module;

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>
#include <cerrno>
#include <csignal>
#include <new>

export module quire.serve.http.server;

import quire.core.base;
import quire.serve.http.connection;
export import quire.serve.http.exchange;
import quire.serve.http.listener;
import quire.serve.http.request_reader;
import quire.serve.http.router;
import quire.serve.http.tls;
import quire.serve.http.workers;
import quire.serve.memory_reserve;

export namespace quire {

struct HttpOptions {
    HttpLimits  limits;
    std::string tls_cert, tls_key; // PEM files; both or none
    RefusalBody refusal;
    // After each response: the exchange, the seconds it took, the bytes written.
    std::function<void(const HttpExchange&, double seconds, std::size_t bytes)> log;
    // Whether a GET of this path is a probe of the server's health. Its handler does not wait, and the response is short: threads and
    // connections of their own answer probes where requests have taken all others.
    std::function<bool(std::string_view path)> is_probe = [](std::string_view) { return false; };
};

class HttpServer {
public:
    // Error: a certificate or key that cannot be used.
    static Result<std::unique_ptr<HttpServer>> create(HttpOptions options);
    ~HttpServer(); // stop()

    // Before start(). A path stands for itself; HEAD goes where GET goes. `wants`: none: the handler needs the body.
    void route(const std::string& method, const std::string& path, HttpHandler handler, WantsBody wants = {});
    // Before start(): until open(), `handler` answers every request, and route() may still be called.
    void hold(HttpHandler handler);
    void open(); // the routes answer from now on
    // Returns the port; where `port` is 0, the system chooses it. Error: the address, and why it cannot be had.
    Result<int>  listen(const std::string& host, int port);
    Result<void> listen_unix(const std::string& path);
    // listen() in two steps: bind() takes the address, so that no other program does, and refuses connections; listen() accepts them. An
    // address that an earlier bind() took is not taken again.
    Result<int>  bind(const std::string& host, int port);
    Result<void> listen();

    // Reads the certificate and its key again, for the connections to come. Error: they cannot be used, and the old ones stay. Any thread.
    Result<void> reload_tls();

    void start(); // starts the threads; SIGPIPE is ignored from now on
    // Closes all connections and returns when all handlers have returned.
    void stop();

    int n_connections() const;
    int n_threads() const;
    int n_answering() const; // complete requests whose responses are not written yet

private:
    HttpServer();
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

} // namespace quire

module :private;

namespace quire {

std::string_view reason_of(int status) {
    switch (status) {
        case 400: return "Bad Request";
        case 408: return "Request Timeout";
        case 413: return "Payload Too Large";
        case 414: return "URI Too Long";
        case 415: return "Unsupported Media Type";
        case 417: return "Expectation Failed";
        case 431: return "Request Header Fields Too Large";
        case 501: return "Not Implemented";
        case 503: return "Service Unavailable";
        case 507: return "Insufficient Storage";
        case 505: return "HTTP Version Not Supported";
        default: return "Error";
    }
}

// 16 random hexadecimal digits.
std::string random_id() {
    std::array<unsigned char, 8> bytes{};
    if (getrandom(bytes.data(), bytes.size(), 0) != ssize_t(bytes.size())) bytes.fill(0);
    std::string text;
    for (unsigned char b : bytes) {
        text += "0123456789abcdef"[b >> 4];
        text += "0123456789abcdef"[b & 15];
    }
    return text;
}

// -- the server

constexpr const char* full_message    = "too many connections";
constexpr const char* crowded_message = "too many large requests at once";

struct HttpServer::Impl {
    HttpOptions                 options;
    std::unique_ptr<HttpRouter> router;
    ServerTls                   tls;
    std::atomic<bool>           stopping = false;

    // Of the epoll thread.
    int                                              epoll = -1, wake = -1;
    std::vector<int>                                 listeners;
    std::vector<std::pair<int, std::string>>         bound; // sockets before listen(), and their addresses
    std::vector<std::string>                         unix_paths;
    std::unordered_map<std::uint64_t, ConnectionPtr> connections;
    std::uint64_t                                    next_key = first_key;
    std::optional<Clock::time_point> paused_since; // when the listeners were paused: no descriptors were left
    Clock::time_point                swept = Clock::now();
    std::thread                      epoll_thread;
    std::atomic<int>                 n_connections = 0, n_answering = 0;
    std::atomic<std::size_t>         buffered = 0; // bytes that requests hold
    std::string                      no_memory;    // a complete response, made in advance
    std::shared_ptr<HttpWorkers>     workers, probe_workers;
    int                              n_spare = 0; // of the epoll thread

    static constexpr std::uint64_t first_key  = 1 << 16; // below: the listeners, and `wake`
    static constexpr std::uint64_t wake_key   = first_key - 1;
    static constexpr int           most_spare = 16; // connections beyond the most

    ~Impl() {
        if (epoll >= 0) close(epoll);
        if (wake >= 0) close(wake);
    }

    void add_listener(int fd);
    void run();
    void accept_all(int listener);
    void pause_listeners();
    bool evict(bool spare = false);
    void watch(Connection& c, std::uint32_t events);
    void receive(const ConnectionPtr& c);
    void advance(const ConnectionPtr& c);
    void out_of_memory(const ConnectionPtr& c);
    bool make_room(const Connection& c);
    bool wants_body(Connection& c) const;
    void dispatch(const ConnectionPtr& c);
    void dispatch_early(const ConnectionPtr& c);
    void resume(const ConnectionPtr& c, bool go_on);
    void resume_answered();
    void serve(const ConnectionPtr& c, const auto& act);
    void refuse(const ConnectionPtr& c, const HttpError& why);
    bool is_probe(const Connection& c) const;
    void drain(const ConnectionPtr& c);
    void drop(const ConnectionPtr& c);
    void sweep();
    void answer(Connection& c);
    bool respond(Connection& c, HttpExchange& exchange, std::size_t& written);
    void notify() const {
        const std::uint64_t one = 1;
        (void)!::write(wake, &one, sizeof one);
    }
    std::string refusal(std::string_view path, int status, const std::string& message) const {
        return options.refusal ? options.refusal(path, status, message) : message + "\n";
    }
};

void HttpServer::Impl::add_listener(int fd) {
    epoll_event event{};
    event.events   = EPOLLIN;
    event.data.u64 = listeners.size();
    epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event);
    listeners.push_back(fd);
}

void HttpServer::Impl::watch(Connection& c, std::uint32_t events) {
    epoll_event event{};
    event.events   = events;
    event.data.u64 = c.key;
    epoll_ctl(epoll, EPOLL_CTL_MOD, c.fd, &event);
}

// If there is no memory for one connection, only that connection fails.
void HttpServer::Impl::serve(const ConnectionPtr& c, const auto& act) {
    try {
        act();
    } catch (const std::bad_alloc&) {
        out_of_memory(c);
    }
}

void HttpServer::Impl::run() {
    const MayFail                may_fail(true);
    std::array<epoll_event, 256> events{};
    while (!stopping) {
        const int n = epoll_wait(epoll, events.data(), int(events.size()), 100);
        for (int i = 0; i < n; i++) {
            const std::uint64_t key = events[std::size_t(i)].data.u64;
            if (key == wake_key) {
                std::uint64_t count = 0;
                (void)!::read(wake, &count, sizeof count);
                continue;
            }
            if (key < first_key) {
                try {
                    accept_all(listeners[key]);
                } catch (const std::bad_alloc&) {
                    pause_listeners();
                }
                continue;
            }
            const auto found = connections.find(key);
            if (found == connections.end()) continue; // dropped since
            const ConnectionPtr c = found->second;
            if (c->phase == Phase::answering) c->hang_up();
            else serve(c, [&] { receive(c); });
        }
        resume_answered();
        if (seconds_since(swept) <= 0.1) continue;
        refill_reserve();
        try {
            sweep();
        } catch (const std::bad_alloc&) { // the next sweep
        }
    }
}

void HttpServer::Impl::resume_answered() {
    for (HttpWorkers* from : {workers.get(), probe_workers.get()})
        for (ConnectionList back = from->take_answered(); !back.empty();) {
            const ConnectionPtr c = back.pop();
            serve(c, [&] { resume(c, c->go_on); });
        }
}

void HttpServer::Impl::accept_all(int listener) {
    for (int i = 0; i < 64; i++) {
        auto             c = std::make_shared<Connection>();
        sockaddr_storage address{};
        socklen_t        size = sizeof address;
        const int fd = accept4(listener, reinterpret_cast<sockaddr*>(&address), &size, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) {
            if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
                if (evict()) continue;
                pause_listeners();
            }
            return;
        }
        c->fd     = fd;
        c->key    = next_key++;
        c->sum    = &buffered;
        c->limit  = options.limits.buffered_bytes;
        c->remote = "unix";
        if (address.ss_family == AF_INET || address.ss_family == AF_INET6) {
            const int on = 1;
            setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
            char host[64] = "", port[16] = "";
            getnameinfo(reinterpret_cast<sockaddr*>(&address), size, host, sizeof host, port, sizeof port,
                        NI_NUMERICHOST | NI_NUMERICSERV);
            c->remote = cat(host, ':', port);
            if (!tls.begin(*c)) continue;
        }
        const auto at_limit = [&] { return int(connections.size()) - n_spare >= options.limits.connections; };
        if (at_limit()) resume_answered(); // one of them may be idle now
        const bool full = at_limit() && !evict();
        c->spare        = full && (n_spare < most_spare || evict(true));
        epoll_event event{};
        event.events   = EPOLLIN | EPOLLRDHUP;
        event.data.u64 = c->key;
        if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) < 0) continue;
        connections.emplace(c->key, c);
        n_connections = int(connections.size());
        if (c->spare) n_spare++;
        else if (full) refuse(c, {503, full_message});
    }
}

// Without descriptors a listener would report one waiting client for ever: pauses all listeners for a moment.
void HttpServer::Impl::pause_listeners() {
    paused_since = Clock::now();
    for (std::size_t l = 0; l < listeners.size(); l++) epoll_ctl(epoll, EPOLL_CTL_DEL, listeners[l], nullptr);
}

// Closes a connection that no worker has, among the `spare` ones or among the others. Of the others goes first the one whose head has been
// incomplete longest, for a second at least, then the one that has been idle longest, then the one whose body has been incomplete longest, for
// five seconds at least. Of the spare ones the oldest goes. False: there is none.
bool HttpServer::Impl::evict(bool spare) {
    const Clock::time_point now = Clock::now();
    ConnectionPtr           chosen;
    int                     chosen_rank = 0;
    for (const auto& [key, c] : connections) {
        if (c->spare != spare || c->phase == Phase::answering) continue;
        const bool   body  = c->phase == Phase::body || c->phase == Phase::chunks;
        const bool   idle  = c->phase == Phase::head && !c->begun;
        const double least = spare || idle ? 0.0 : c->phase == Phase::draining ? 0.2 : body ? 5.0 : 1.0;
        if (std::chrono::duration<double>(now - c->since).count() < least) continue;
        const int rank = spare ? 0 : body ? 2 : idle ? 1 : 0;
        if (chosen && (rank > chosen_rank || (rank == chosen_rank && c->since >= chosen->since))) continue;
        chosen      = c;
        chosen_rank = rank;
    }
    if (chosen) drop(chosen);
    return chosen != nullptr;
}

void HttpServer::Impl::drop(const ConnectionPtr& c) {
    c->count(0);
    n_spare -= int(std::exchange(c->spare, false));
    epoll_ctl(epoll, EPOLL_CTL_DEL, c->fd, nullptr);
    connections.erase(c->key);
    n_connections = int(connections.size());
}

void HttpServer::Impl::receive(const ConnectionPtr& c) {
    std::array<char, 65536> buffer; // NOLINT: filled by receive()
    for (int i = 0; i < 4; i++) {   // then other connections are served
        const auto [io, n] = c->receive(buffer.data(), buffer.size());
        if (io == Connection::Io::end) {
            // The client closes the connection, or only its sending side; both count as closed. A complete request is still answered.
            if (c->phase == Phase::body || c->phase == Phase::chunks) advance(c);
            return c->phase == Phase::answering ? c->hang_up() : drop(c);
        }
        if (io != Connection::Io::done) {
            if (c->ssl) // it may have to write before it can read
                watch(*c, io == Connection::Io::again ? EPOLLIN | EPOLLRDHUP : EPOLLIN | EPOLLOUT | EPOLLRDHUP);
            break;
        }
        if (c->phase == Phase::draining) {
            c->drained += n;
            c->heard = Clock::now();
            if (c->drained > options.limits.body_bytes + options.limits.head_bytes)
                return drop(c); // no honest request has more
            continue;
        }
        append_received(*c, buffer.data(), n);
        if (c->phase != Phase::head && c->in.size() < buffer.size()) continue; // more of a body at once
        advance(c);
        if (c->phase == Phase::answering || c->phase == Phase::draining) return;
    }
    if (c->phase == Phase::body || c->phase == Phase::chunks || c->phase == Phase::head) advance(c);
}

void HttpServer::Impl::advance(const ConnectionPtr& c) {
    const std::expected<bool, HttpError> whole = read_request(*c, options.limits);
    if (!whole) return refuse(c, whole.error());
    if (!c->count_memory(c->in.capacity() + c->body.capacity()) && !make_room(*c))
        return refuse(c, {503, crowded_message});
    if (c->phase == Phase::head) return;
    c->probe = is_probe(*c);
    if (c->spare && !c->probe) {
        n_spare -= int(std::exchange(c->spare, false));
        return refuse(c, {503, full_message});
    }
    if (*whole) return dispatch(c);
    const bool asks = c->head.expects_continue || c->head.length > small_body || c->body.size() > small_body;
    if (c->admitted || !asks) return;
    c->admitted = true;
    if (wants_body(*c)) say_continue(*c);
    else dispatch_early(c);
}

// Refuses incomplete requests that are longer than that of `c`, the longest first, until all together hold no more than they may. False:
// they still do.
bool HttpServer::Impl::make_room(const Connection& c) {
    const auto length = [](const Connection& one) { return one.head.chunked ? one.counted : one.head.length; };
    while (buffered > options.limits.buffered_bytes) {
        ConnectionPtr longest;
        for (const auto& [key, other] : connections)
            if ((other->phase == Phase::body || other->phase == Phase::chunks) &&
                length(*other) > length(longest ? *longest : c))
                longest = other;
        if (!longest) return false;
        refuse(longest, {503, crowded_message});
    }
    return true;
}

// Of a request without its body: whether there is a handler that would read it.
bool HttpServer::Impl::wants_body(Connection& c) const {
    HttpExchange e;
    e.peer            = &c;
    e.request.method  = c.head.method;
    e.request.path    = c.head.target.substr(0, c.head.target.find('?'));
    e.request.remote  = c.remote;
    e.request.headers = std::move(c.head.headers);
    const bool wanted = router->wants_body(e);
    c.head.headers    = std::move(e.request.headers);
    return wanted;
}

// Answers the request without its body, and closes the connection.
void HttpServer::Impl::dispatch_early(const ConnectionPtr& c) {
    c->early           = true;
    c->head.keep_alive = false;
    c->in              = {};
    c->body            = {};
    c->count(0);
    dispatch(c);
}

// A probe has no body, so that nothing of it waits for memory.
bool HttpServer::Impl::is_probe(const Connection& c) const {
    const HttpHead& head = c.head;
    return (head.method == "GET" || head.method == "HEAD") && head.length == 0 && !head.chunked &&
           options.is_probe(std::string_view(head.target).substr(0, head.target.find('?')));
}

// Closes the sending side and discards the bytes that are still received, so that the client can read the response.
void HttpServer::Impl::drain(const ConnectionPtr& c) {
    shutdown(c->fd, SHUT_WR);
    c->phase = Phase::draining;
    c->since = c->heard = Clock::now();
    c->in               = {};
    c->body             = {};
    c->count(0);
    watch(*c, EPOLLIN | EPOLLRDHUP);
}

// Like refuse(), without allocating.
void HttpServer::Impl::out_of_memory(const ConnectionPtr& c) {
    if (c->phase == Phase::answering || c->phase == Phase::draining) return; // not because of this request
    (void)c->transmit(no_memory.data(), no_memory.size());
    drain(c);
}

// The path in "METHOD TARGET ...", which may be anything; "": there is none.
static std::string_view path_of(std::string_view line) {
    line                 = line.substr(0, line.find('\r'));
    const std::size_t at = line.find(' ');
    if (at == line.npos) return {};
    line.remove_prefix(at + 1);
    return line.substr(0, line.find_first_of(" ?"));
}

void HttpServer::Impl::refuse(const ConnectionPtr& c, const HttpError& why) {
    const std::string id   = random_id();
    const std::string line = c->phase == Phase::head ? c->in.substr(0, 1024) : " " + c->head.target;
    const std::string body = refusal(path_of(line), why.status, why.message);
    const std::string text =
        cat("HTTP/1.1 ", why.status, ' ', reason_of(why.status),
            "\r\nContent-Type: application/json\r\nX-Request-Id: ", id, "\r\nContent-Length: ", body.size(),
            why.status == 503 ? "\r\nRetry-After: 1" : "", "\r\nConnection: close\r\n\r\n", body);
    (void)c->transmit(text.data(), text.size());
    drain(c);
    if (!options.log) return;
    HttpExchange exchange;
    exchange.request.id      = id;
    exchange.request.method  = c->head.method;
    exchange.request.remote  = c->remote;
    exchange.response.status = why.status;
    exchange.notes           = {{"refused", why.message}};
    options.log(exchange, 0, text.size());
}

void HttpServer::Impl::dispatch(const ConnectionPtr& c) {
    c->phase = Phase::answering;
    n_answering++;
    if (c->in.empty()) c->in = {}; // gives its memory back
    watch(*c, EPOLLRDHUP | EPOLLONESHOT);
    (c->probe ? probe_workers : workers)->push(c);
}

// A worker has written the response.
void HttpServer::Impl::resume(const ConnectionPtr& c, bool go_on) {
    if (c->early && !c->gone()) return drain(c);
    if (!go_on || c->gone()) return drop(c);
    c->phase    = Phase::head;
    c->since    = Clock::now();
    c->begun    = false;
    c->admitted = false;
    c->blank    = 0;
    c->searched = 0;
    c->count(c->in.capacity());
    watch(*c, EPOLLIN | EPOLLRDHUP);
    if (c->has_decrypted()) return receive(c);
    if (!c->in.empty()) advance(c);
}

void HttpServer::Impl::sweep() {
    swept                            = Clock::now();
    const HttpLimits&          limit = options.limits;
    std::vector<ConnectionPtr> late;
    for (const auto& [key, c] : connections) {
        const double seconds = seconds_since(c->since);
        if (c->phase == Phase::answering) continue;
        // A client that still sends its body reads the response behind it; not for long.
        if (c->phase == Phase::draining && seconds_since(c->heard) <= 2 && seconds <= 10) continue;
        const bool short_ = c->phase == Phase::draining || c->spare;
        if (seconds > (short_ ? 2.0 : c->begun ? limit.request_seconds : limit.idle_seconds)) late.push_back(c);
    }
    for (const ConnectionPtr& c : late) {
        if (c->begun && c->phase != Phase::draining)
            refuse(c, {408, cat("the request was not complete after ", limit.request_seconds, " seconds")});
        else drop(c);
    }
    workers->try_again();
    probe_workers->try_again();
    if (paused_since && seconds_since(*paused_since) > 0.5) {
        paused_since.reset();
        for (std::size_t i = 0; i < listeners.size(); i++) {
            epoll_event event{};
            event.events   = EPOLLIN;
            event.data.u64 = i;
            epoll_ctl(epoll, EPOLL_CTL_ADD, listeners[i], &event);
        }
    }
}

// -- on a worker

void HttpServer::Impl::answer(Connection& c) {
    const Clock::time_point start   = Clock::now();
    std::size_t             written = 0;
    HttpExchange            exchange;
    try {
        c.go_on = respond(c, exchange, written);
    } catch (const std::exception&) { // no memory, not even for a response
        c.go_on                  = false;
        exchange.response        = {};
        exchange.response.status = 503;
        if (written == 0) (void)c.transmit(no_memory.data(), no_memory.size());
    }
    c.when_gone({});
    try {
        if (options.log) options.log(exchange, seconds_since(start), written);
    } catch (const std::exception&) { // then without a line in the log
    }
}

// Returns whether the connection goes on.
bool HttpServer::Impl::respond(Connection& c, HttpExchange& exchange, std::size_t& written) {
    HttpRequest& r = exchange.request;
    exchange.peer  = &c;
    r.method       = std::move(c.head.method);
    r.path         = c.head.target.substr(0, c.head.target.find('?'));
    r.remote       = c.remote;
    r.headers      = std::move(c.head.headers);
    r.body         = std::move(c.body);
    c.body         = {};

    const std::string_view id = r.header("x-request-id");
    r.id                      = is_plain_word(id) ? std::string(id) : random_id();
    return router->respond(c, exchange, c.head.keep_alive && !c.spare && !stopping, written);
}

// -- the interface

HttpServer::HttpServer() : impl_(std::make_unique<Impl>()) {}

Result<std::unique_ptr<HttpServer>> HttpServer::create(HttpOptions options) {
    std::unique_ptr<HttpServer> server(new HttpServer());
    Impl&                       s = *server->impl_;
    s.options                     = std::move(options);
    s.router                      = std::make_unique<HttpRouter>(s.options.limits,
                                                                 [&s](std::string_view path, int status, const std::string& message) {
                                                return s.refusal(path, status, message);
                                            });
    const auto answer             = [&s](Connection& c) { s.answer(c); };
    const auto answered           = [&s] {
        s.n_answering--;
        s.notify();
    };
    s.workers               = std::make_shared<HttpWorkers>(s.options.limits.threads, answer, answered);
    s.probe_workers         = std::make_shared<HttpWorkers>(2, answer, answered);
    const std::string sorry = s.refusal("", 503, no_memory_message);
    s.no_memory =
        cat("HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nContent-Length: ",
            sorry.size(), "\r\nConnection: close\r\n\r\n", sorry);
    s.epoll = epoll_create1(EPOLL_CLOEXEC);
    s.wake  = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (s.epoll < 0 || s.wake < 0) return fail_with(ErrorKind::system, "no epoll: ", std::strerror(errno));
    epoll_event event{};
    event.events   = EPOLLIN;
    event.data.u64 = Impl::wake_key;
    epoll_ctl(s.epoll, EPOLL_CTL_ADD, s.wake, &event);

    if (auto ok = server->reload_tls(); !ok) return std::unexpected(ok.error());
    return server;
}

Result<void> HttpServer::reload_tls() { return impl_->tls.read(impl_->options.tls_cert, impl_->options.tls_key); }

void HttpServer::hold(HttpHandler handler) { impl_->router->hold(std::move(handler)); }

void HttpServer::open() { impl_->router->open(); }

void HttpServer::route(const std::string& method, const std::string& path, HttpHandler handler, WantsBody wants) {
    impl_->router->route(method, path, std::move(handler), std::move(wants));
}

Result<int> HttpServer::listen(const std::string& host, int port) {
    const Result<Listener> listener = listen_tcp(host, port);
    if (!listener) return std::unexpected(listener.error());
    impl_->add_listener(listener->fd);
    return listener->port;
}

Result<int> HttpServer::bind(const std::string& host, int port) {
    std::vector<int> own;
    for (const auto& [fd, where] : impl_->bound) own.push_back(fd);
    const Result<Listener> bound = bind_tcp(host, port, own);
    if (!bound) return std::unexpected(bound.error());
    if (bound->fd >= 0) // else an earlier name led to this address
        impl_->bound.emplace_back(bound->fd, cat(quote(host), " port ", bound->port));
    return bound->port;
}

Result<void> HttpServer::listen() {
    for (const auto& [fd, where] : std::exchange(impl_->bound, {})) {
        impl_->add_listener(fd); // closed with the others
        if (auto ok = listen_on(fd); !ok)
            return fail_with(ErrorKind::system, "cannot listen on ", where, ": ", ok.error().message);
    }
    return {};
}

Result<void> HttpServer::listen_unix(const std::string& path) {
    const Result<Listener> listener = quire::listen_unix(path);
    if (!listener) return std::unexpected(listener.error());
    impl_->add_listener(listener->fd);
    impl_->unix_paths.push_back(path);
    return {};
}

void HttpServer::start() {
    std::signal(SIGPIPE, SIG_IGN); // OpenSSL writes without MSG_NOSIGNAL
    impl_->router->warm_up();
    impl_->epoll_thread = std::thread([this] { impl_->run(); });
}

void HttpServer::stop() {
    Impl& s = *impl_;
    if (s.stopping.exchange(true)) return;
    s.workers->stop();
    s.probe_workers->stop();
    s.notify();
    if (s.epoll_thread.joinable()) s.epoll_thread.join();
    for (const auto& [key, c] : s.connections) {
        shutdown(c->fd, SHUT_RDWR); // a worker that writes to it gives up
        c->hang_up();
    }
    s.workers->join();
    s.probe_workers->join();
    s.connections.clear();
    for (int fd : s.listeners) close(fd);
    for (const auto& [fd, where] : s.bound) close(fd);
    for (const std::string& path : s.unix_paths) unlink(path.c_str());
}

HttpServer::~HttpServer() { stop(); }

int HttpServer::n_connections() const { return impl_->n_connections; }

int HttpServer::n_answering() const { return impl_->n_answering; }

int HttpServer::n_threads() const { return impl_->workers->n_threads() + impl_->probe_workers->n_threads(); }

} // namespace quire
