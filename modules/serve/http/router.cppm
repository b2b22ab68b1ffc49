// quire.serve.http.router: finds the handler of a path, runs it, and writes its response by cpp-httplib, which nothing else here sees.
// **Owns** the table of routes.
// (No `import quire.core.base` here: httplib.h includes the standard library's headers.)
module;

#include <httplib.h>
#include <poll.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

export module quire.serve.http.router;

import quire.core.result;
import quire.serve.http.connection;

export namespace quire {

constexpr const char* no_memory_message = "there is no memory for this request now";

// The body of a response that no handler made. `path`: as far as it is known.
using RefusalBody = std::function<std::string(std::string_view path, int status, const std::string& message)>;

class HttpRouter {
public:
    HttpRouter(const HttpLimits& limits, RefusalBody refusal);
    ~HttpRouter();

    // A path stands for itself, but for a segment `*`, which is any one, and `**` at the end, which is one or more; HEAD goes where GET goes.
    // `wants`: none: the handler needs the body.
    void route(const std::string& method, const std::string& path, HttpHandler handler, WantsBody wants);
    // Whether a handler needs the body of this request, of which only the head is known. Any thread.
    bool wants_body(HttpExchange& e) const;
    // From now on, until open(), `handler` answers every request. Before warm_up().
    void hold(HttpHandler handler);
    // The routes answer from now on; none is added later. Any thread.
    void open();
    // cpp-httplib makes its tables at the first request: makes them now, while there is one thread.
    void warm_up();
    // Runs the handler of `exchange` and writes its response to `connection`, counting its bytes in `written`. `keep`: the
    // connection may go on. Returns whether it can.
    bool respond(Connection& connection, HttpExchange& exchange, bool keep, std::size_t& written);

private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

} // namespace quire

module :private;

namespace quire {

// The stream that cpp-httplib reads and writes: it reads a minimal head that is made here, and writes to the connection.
class Pipe : public httplib::Stream {
public:
    // Counts the bytes in `written`.
    Pipe(Connection& connection, std::string head, double write_seconds, std::size_t& written)
        : connection_(connection), head_(std::move(head)), write_seconds_(write_seconds), written_(written) {}

    bool    is_readable() const override { return at_ < head_.size(); }
    bool    is_writable() const override { return !broken_; }
    ssize_t read(char* to, std::size_t n) override {
        n = std::min(n, head_.size() - at_);
        std::memcpy(to, head_.data() + at_, n);
        at_ += n;
        return ssize_t(n);
    }
    ssize_t write(const char* from, std::size_t n) override {
        // The first write has the whole head. cpp-httplib has no phrase for this status of nginx.
        const std::string_view text(from, n);
        if (std::exchange(begun_, true) || !text.starts_with("HTTP/1.1 499 ")) return send(from, n);
        const std::string head = cat("HTTP/1.1 499 Client Closed Request", text.substr(std::min(text.find('\r'), n)));
        return send(head.data(), head.size()) < 0 ? -1 : ssize_t(n);
    }
    void get_remote_ip_and_port(std::string& ip, int& port) const override {
        ip   = connection_.remote;
        port = 0;
    }
    void     get_local_ip_and_port(std::string& ip, int& port) const override { ip.clear(), port = 0; }
    socket_t socket() const override { return connection_.fd; }

    bool broken() const { return broken_; }

private:
    ssize_t send(const char* from, std::size_t n) {
        for (std::size_t sent = 0; sent < n;) {
            if (broken_) return -1;
            const auto [io, some] = connection_.transmit(from + sent, n - sent);
            sent += some;
            written_ += some;
            if (io == Connection::Io::done) continue;
            if (io == Connection::Io::end || !wait(io == Connection::Io::again ? POLLIN : POLLOUT)) {
                broken_ = true;
                connection_.hang_up();
                return -1;
            }
        }
        return ssize_t(n);
    }
    bool wait(short events) const {
        pollfd                  p{connection_.fd, events, 0};
        const Clock::time_point start = Clock::now();
        while (true) {
            const double left = write_seconds_ - seconds_since(start);
            const int    n    = left > 0 ? poll(&p, 1, int(left * 1000) + 1) : 0;
            if (n >= 0 || errno != EINTR) return n > 0;
        }
    }

    Connection&  connection_;
    std::string  head_;
    double       write_seconds_;
    std::size_t  at_    = 0;
    bool         begun_ = false, broken_ = false;
    std::size_t& written_;
};

// cpp-httplib's server without its sockets. Of a request it sees the method, the target and whether to keep the connection.
class Router : public httplib::Server {
public:
    Router() {
        svr_sock_ = 0; // else it believes it is stopped
    }
    using httplib::Server::process_request;
};

// Debian 12's cpp-httplib takes four arguments, later ones the addresses as well.
template <class R>
bool process(R& router, httplib::Stream& stream, bool close, bool& closed) {
    const std::function<void(httplib::Request&)> nothing = [](httplib::Request&) {};
    if constexpr (requires { router.process_request(stream, close, closed, nothing); })
        return router.process_request(stream, close, closed, nothing);
    else return router.process_request(stream, std::string(), 0, std::string(), 0, close, closed, nothing);
}

// The exchange that this thread is answering, for the handlers that process_request() calls.
static thread_local HttpExchange* current_exchange = nullptr; // static: see memory_reserve.cppm

void warm_up_of(Router& router) {
    Connection   nobody;
    HttpExchange exchange;
    std::size_t  written = 0;
    Pipe         pipe(nobody, "GET / HTTP/1.1\r\n\r\n", 0, written);
    bool         closed = false;
    current_exchange    = &exchange;
    process(router, pipe, true, closed);
    current_exchange = nullptr;
}

// Whether `path` is one that the route `pattern` stands for. Reads each segment once: a regular expression would recurse for each character.
bool stands_for(std::string_view pattern, std::string_view path) {
    while (true) {
        const std::size_t      end = pattern.find('/'), at = path.find('/');
        const std::string_view wanted = pattern.substr(0, end), segment = path.substr(0, at);
        if (wanted == "**") return !path.empty();
        if (wanted == "*" ? segment.empty() : wanted != segment) return false;
        if (end == pattern.npos || at == path.npos) return end == at;
        pattern.remove_prefix(end + 1);
        path.remove_prefix(at + 1);
    }
}

// The handlers of the paths.
class RouteTable {
public:
    using Handler = httplib::Server::Handler;

    struct Method {
        std::string name;
        Handler     handler;
        WantsBody   wants;
    };

    void add(const std::string& path, Method method) {
        if (path.find("/*") == path.npos) literals_[path].push_back(std::move(method));
        else patterns_.emplace_back(path, std::move(method));
    }
    // A literal path counts before a pattern, an earlier pattern before a later one. Null: the path has no such method.
    const Method* find(std::string_view method, std::string_view path) const {
        const Method* found = nullptr;
        each(path, [&](const Method& one) {
            if (!found && one.name == (method == "HEAD" ? "GET" : method)) found = &one;
        });
        return found;
    }
    // The methods of `path`, for an Allow header; "": there is no such path.
    std::string methods(std::string_view path) const {
        std::string names;
        each(path, [&](const Method& one) { names += (names.empty() ? "" : ", ") + one.name; });
        return names;
    }

private:
    template <class F>
    void each(std::string_view path, const F& use) const {
        if (const auto at = literals_.find(path); at != literals_.end())
            for (const Method& one : at->second) use(one);
        for (const auto& [pattern, one] : patterns_)
            if (stands_for(pattern, path)) use(one);
    }

    std::map<std::string, std::vector<Method>, std::less<>> literals_;
    std::vector<std::pair<std::string, Method>>             patterns_; // with `*` or `**` as a segment
};

struct HttpRouter::Impl {
    HttpLimits        limits;
    RefusalBody       refusal;
    RouteTable        routes;
    Router            router, waiting; // `waiting`: of hold()
    std::atomic<bool> held = false;

    void                     prepare(Router& router) const;
    httplib::Server::Handler serving(HttpHandler handler);
    Router&                  now() { return held.load(std::memory_order_acquire) ? waiting : router; }
};

HttpRouter::~HttpRouter() = default;

HttpRouter::HttpRouter(const HttpLimits& limits, RefusalBody refusal) : impl_(std::make_unique<Impl>()) {
    Impl& s   = *impl_;
    s.limits  = limits;
    s.refusal = std::move(refusal);
    s.prepare(s.router);
    // cpp-httplib has no routes of its own, which would be regular expressions.
    s.router.set_pre_routing_handler([&s](const httplib::Request& req, httplib::Response& res) {
        const RouteTable::Method* route = s.routes.find(req.method, req.path);
        if (!route) return httplib::Server::HandlerResponse::Unhandled;
        route->handler(req, res);
        return httplib::Server::HandlerResponse::Handled;
    });
    // For a path or a method without a handler.
    s.router.set_error_handler([&s](const httplib::Request& req, httplib::Response& res) {
        if (!res.body.empty()) return;
        HttpExchange& exchange = *current_exchange;
        if (res.status == 404 || res.status == 400) {
            // cpp-httplib does not read the path behind a method that it does not know.
            const std::string allow = s.routes.methods(req.path.empty() ? exchange.request.path : req.path);
            res.status              = allow.empty() ? 404 : 405;
            if (!allow.empty()) res.set_header("Allow", allow);
        }
        exchange.response.status = res.status;
        res.set_header("X-Request-Id", exchange.request.id);
        res.set_content(
            s.refusal(exchange.request.path, res.status,
                      res.status == 404   ? cat("there is no ", quote(exchange.request.path))
                      : res.status == 405 ? cat(quote(exchange.request.method), " is not a method of this path")
                                          : std::string("the request could not be served")),
            "application/json");
    });
}

void HttpRouter::Impl::prepare(Router& router) const {
    router.set_keep_alive_timeout(time_t(limits.idle_seconds)); // for the responses' Keep-Alive header
    router.set_keep_alive_max_count(1'000'000);
    router.set_exception_handler([](const httplib::Request&, httplib::Response&, std::exception_ptr error) { // NOLINT
        std::rethrow_exception(std::move(error)); // to answer()
    });
    // cpp-httplib adds it to answers to HEAD; ranges are ignored here.
    router.set_post_routing_handler(
        [](const httplib::Request&, httplib::Response& res) { res.headers.erase("Accept-Ranges"); });
}

void HttpRouter::hold(HttpHandler handler) {
    Impl& s = *impl_;
    s.prepare(s.waiting);
    s.waiting.set_pre_routing_handler(
        [serve = s.serving(std::move(handler))](const httplib::Request& req, httplib::Response& res) {
            serve(req, res);
            return httplib::Server::HandlerResponse::Handled;
        });
    s.held = true;
}

void HttpRouter::open() {
    warm_up_of(impl_->router);
    impl_->held.store(false, std::memory_order_release);
}

// The handler as cpp-httplib calls it.
httplib::Server::Handler HttpRouter::Impl::serving(HttpHandler handler) {
    Impl& s = *this;
    return [&s, handler = std::move(handler)](const httplib::Request& req, httplib::Response& res) {
        HttpExchange& e = *current_exchange;
        e.request.path  = req.path; // decoded, as the routes have it
        for (const auto& [key, value] : req.params) e.request.query.emplace_back(key, value);
        try {
            handler(e);
        } catch (const std::bad_alloc&) {
            e.request.body    = {};
            e.response        = {};
            e.response.status = 503;
            e.response.body   = s.refusal(e.request.path, 503, no_memory_message);
            e.response.headers.emplace_back("Retry-After", "1");
        } catch (const std::exception& error) {
            e.response        = {};
            e.response.status = 500;
            e.response.body   = s.refusal(e.request.path, 500, "an internal error");
            e.notes.emplace_back("exception", error.what());
        }
        e.held.reset();
        HttpResponse& out = e.response;
        if (e.peer && !out.stream) e.peer->count_memory(out.body.size());
        res.status = out.status;
        for (const auto& [key, value] : out.headers) res.set_header(key, value);
        res.set_header("X-Request-Id", e.request.id);
        if (!out.stream) {
            res.set_content(std::string(), out.type);
            res.body = std::move(out.body); // not copied
            return;
        }
        const auto feed = [&e](std::size_t, httplib::DataSink& sink) {
            bool open = true;
            try {
                e.response.stream([&](std::string_view piece) {
                    if (!piece.empty()) open = open && sink.write(piece.data(), piece.size()) && sink.is_writable();
                    return open;
                });
            } catch (const std::exception& error) {
                e.notes.emplace_back("exception", error.what());
                return false; // an unfinished stream: the connection is closed
            }
            if (open) sink.done();
            return open;
        };
        if (req.version == "HTTP/1.0") res.set_content_provider(out.type, feed);
        else res.set_chunked_content_provider(out.type, feed);
    };
}

void HttpRouter::route(const std::string& method, const std::string& path, HttpHandler handler, WantsBody wants) {
    impl_->routes.add(path, {method, impl_->serving(std::move(handler)), std::move(wants)});
}

// A path with its %XX as bytes.
std::string decoded(std::string_view path) {
    std::string out;
    for (std::size_t i = 0; i < path.size(); i++) {
        unsigned    byte = 0;
        const char* end  = path.data() + std::min(i + 3, path.size());
        if (path[i] == '%' && end - (path.data() + i) == 3 &&
            std::from_chars(path.data() + i + 1, end, byte, 16).ptr == end) {
            out += char(byte);
            i += 2;
        } else out += path[i];
    }
    return out;
}

bool HttpRouter::wants_body(HttpExchange& e) const {
    if (impl_->held.load(std::memory_order_acquire)) return false;
    const RouteTable::Method* route = impl_->routes.find(e.request.method, decoded(e.request.path));
    return route && (!route->wants || route->wants(e));
}

void HttpRouter::warm_up() { warm_up_of(impl_->now()); }

bool HttpRouter::respond(Connection& c, HttpExchange& exchange, bool keep, std::size_t& written) {
    Pipe pipe(c,
              cat(exchange.request.method, ' ', c.head.target, " HTTP/1.", c.head.minor,
                  "\r\nHost: quire\r\nContent-Length: 0\r\n",
                  keep ? "Connection: keep-alive\r\n\r\n" : "Connection: close\r\n\r\n"),
              c.probe ? 0 : impl_->limits.write_seconds, written); // threads of probes wait for no reader
    // Reset on every way out: the handlers' thread goes on to other exchanges.
    struct Current {
        explicit Current(HttpExchange* e) { current_exchange = e; }
        ~Current() { current_exchange = nullptr; }
    } current(&exchange);
    bool       closed = false;
    const bool ok     = process(impl_->now(), pipe, !keep, closed);
    // A stream without chunks, as HTTP/1.0 has it, ends with the connection.
    const bool go_on = ok && keep && !closed && !pipe.broken() && !(exchange.response.stream && c.head.minor == 0);
    if (c.ssl && !go_on && !pipe.broken()) c.close_tls();
    return go_on;
}

} // namespace quire
