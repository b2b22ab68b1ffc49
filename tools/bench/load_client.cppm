// quire.tools.bench.load_client: sends many streamed requests at once to any OpenAI-compatible server and records when each piece of text
// arrives. One thread waits for all connections, so thousands of streams need no thousands of threads. **Owns** its connections.
module;

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>
#include <cerrno>
#include <csignal>

export module quire.tools.bench.load_client;

import quire.core.base;
import quire.tools.bench.stream_reader;

export namespace quire {

struct LoadTarget {
    std::string host, path; // the path of the endpoint
    int         port = 80;
    bool        tls  = false;
    std::string api_key; // "": none
};

// Parses a base URL, http://HOST[:PORT][/PREFIX] or https://…, and an endpoint such as /v1/completions. Error: the fault.
Result<LoadTarget> load_target(std::string_view base_url, std::string_view endpoint, std::string api_key);

struct LoadRequest {
    std::string_view body;   // JSON that asks for a stream with usage; must stay valid during the run
    double           at = 0; // when it is sent, in seconds after the start, unless max_concurrency delays it
};

struct LoadOptions {
    int    max_concurrency = 0;   // most requests at once; 0: no limit
    double request_seconds = 600; // after which an answer counts as failed
    double stop_after      = 0;   // seconds after which no more requests are sent; 0: no limit
    // Called for each complete answer, with the index of its request.
    std::function<void(std::size_t, const LoadResult&)> done;
};

// Sends all requests and returns their answers in the order of the requests; requests that were not sent have an error.
// Error: the target cannot be resolved.
Result<std::vector<LoadResult>> run_load(const LoadTarget& target, std::span<const LoadRequest> requests,
                                         const LoadOptions& options);

// One GET, or a POST if there is a body. Returns the response's body. Error: no answer, or a status other than 200.
Result<std::string> fetch(const LoadTarget& target, const std::string& body = "");

} // namespace quire

module :private;

namespace quire {

using Clock = std::chrono::steady_clock;

std::string head_of(const LoadTarget& target, const char* method, const std::string& path, std::size_t body_bytes) {
    const bool  six  = target.host.find(':') != std::string::npos;
    std::string head = cat(method, " ", path, " HTTP/1.1\r\nHost: ", six ? "[" : "", target.host, six ? "]" : "", ":",
                           target.port, "\r\nAccept: */*\r\nUser-Agent: quire-bench\r\n");
    if (!target.api_key.empty()) head += cat("Authorization: Bearer ", target.api_key, "\r\n");
    if (body_bytes > 0) head += cat("Content-Type: application/json\r\nContent-Length: ", body_bytes, "\r\n");
    return head + "\r\n";
}

// -- connections

class Addresses {
public:
    static Result<Addresses> of(const LoadTarget& target) {
        Addresses a;
        addrinfo  hints{};
        hints.ai_socktype = SOCK_STREAM;
        const int code    = getaddrinfo(target.host.c_str(), std::to_string(target.port).c_str(), &hints, &a.list_);
        if (code != 0) return fail_with(ErrorKind::system, quote(target.host), ": ", gai_strerror(code));
        return a;
    }
    Addresses(Addresses&& other) noexcept : list_(std::exchange(other.list_, nullptr)) {}
    Addresses& operator=(Addresses&&) = delete;
    ~Addresses() {
        if (list_) freeaddrinfo(list_);
    }
    const addrinfo* first() const { return list_; }

private:
    Addresses()     = default;
    addrinfo* list_ = nullptr;
};

struct TlsContext {
    SSL_CTX* context = nullptr;

    explicit TlsContext(bool wanted) {
        if (!wanted) return;
        context = SSL_CTX_new(TLS_client_method());
        check(context != nullptr, "no TLS context");
        SSL_CTX_set_default_verify_paths(context);
        SSL_CTX_set_verify(context, SSL_VERIFY_PEER, nullptr);
        SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
    }
    TlsContext(const TlsContext&)            = delete;
    TlsContext& operator=(const TlsContext&) = delete;
    ~TlsContext() { SSL_CTX_free(context); }
};

// As many descriptors as the system lets this process have; shells allow 1024 by default.
void raise_descriptors() {
    rlimit limit{};
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
}

// A connection that never blocks.
class Wire {
public:
    enum class Io { done, again, end };

    Wire(const LoadTarget& target, const addrinfo& address, const TlsContext& tls) {
        fd_ = socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        if (fd_ < 0) return;
        const int one = 1;
        setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        connecting_ = connect(fd_, address.ai_addr, address.ai_addrlen) == 0 || errno == EINPROGRESS;
        if (!tls.context) return;
        ssl_ = SSL_new(tls.context);
        SSL_set_fd(ssl_, fd_);
        SSL_set_tlsext_host_name(ssl_, target.host.c_str());
        SSL_set1_host(ssl_, target.host.c_str());
        SSL_set_connect_state(ssl_);
    }
    Wire(const Wire&)            = delete;
    Wire& operator=(const Wire&) = delete;
    ~Wire() {
        SSL_free(ssl_);
        if (fd_ >= 0) close(fd_);
    }

    int fd() const { return fd_; }
    // Why it cannot be used, right after it could not.
    std::string reason() const {
        const long verified = ssl_ ? SSL_get_verify_result(ssl_) : X509_V_OK;
        if (verified != X509_V_OK) return X509_verify_cert_error_string(verified);
        return ssl_ && errno == 0 ? "no TLS there" : std::strerror(errno);
    }
    bool usable() const { return fd_ >= 0 && connecting_; }

    Io send(std::string_view text, std::size_t& at) {
        while (at < text.size()) {
            if (ssl_) {
                std::size_t n = 0;
                ERR_clear_error();
                if (const int r = SSL_write_ex(ssl_, text.data() + at, text.size() - at, &n); r != 1) return why(r);
                at += n;
                continue;
            }
            const ssize_t n = ::send(fd_, text.data() + at, text.size() - at, MSG_NOSIGNAL);
            if (n < 0) return errno == EAGAIN || errno == ENOTCONN ? Io::again : Io::end;
            at += std::size_t(n);
        }
        return Io::done;
    }
    // Some bytes to the front of `buffer`.
    Io receive(std::span<char> buffer, std::size_t& n) {
        if (ssl_) {
            ERR_clear_error();
            const int r = SSL_read_ex(ssl_, buffer.data(), buffer.size(), &n);
            return r == 1 ? Io::done : why(r);
        }
        const ssize_t got = recv(fd_, buffer.data(), buffer.size(), 0);
        if (got < 0) return errno == EAGAIN ? Io::again : Io::end;
        n = std::size_t(got);
        return got == 0 ? Io::end : Io::done;
    }

private:
    Io why(int r) {
        const int error = SSL_get_error(ssl_, r);
        return error == SSL_ERROR_WANT_READ || error == SSL_ERROR_WANT_WRITE ? Io::again : Io::end;
    }
    int  fd_         = -1;
    SSL* ssl_        = nullptr;
    bool connecting_ = false;
};

// A request under way.
struct Call {
    std::unique_ptr<Wire> wire;
    std::string           out;
    std::size_t           written = 0, index = 0; // of the request
    StreamReader          reader;
    const addrinfo*       address = nullptr;
    bool                  reused  = false;
};

class Load {
public:
    Load(const LoadTarget& target, const addrinfo* address, std::span<const LoadRequest> requests,
         const LoadOptions& options)
        : target_(target), address_(address), requests_(requests), options_(options), tls_(target.tls),
          epoll_(epoll_create1(EPOLL_CLOEXEC)), results_(requests.size()) {}
    Load(const Load&)            = delete;
    Load& operator=(const Load&) = delete;
    ~Load() {
        calls_.clear();
        idle_.clear();
        close(epoll_);
    }

    std::vector<LoadResult> run() {
        std::signal(SIGPIPE, SIG_IGN); // OpenSSL writes without MSG_NOSIGNAL
        start_ = Clock::now();
        std::vector<epoll_event> events(1024);
        while (next_ < requests_.size() || !calls_.empty()) {
            send_what_is_due();
            const int n = epoll_wait(epoll_, events.data(), int(events.size()), timeout());
            for (int i = 0; i < n; i++) advance(events[std::size_t(i)].data.fd);
            give_up_late_ones();
        }
        return std::move(results_);
    }
    // The body of the only answer, whatever it is.
    Result<std::string> fetch_one() {
        std::string body;
        keep_body_   = &body;
        LoadResult r = std::move(run()[0]);
        if (!r.error.empty()) return fail_with(ErrorKind::system, r.error);
        return body;
    }

private:
    double now() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

    bool has_place() const { return options_.max_concurrency == 0 || int(calls_.size()) < options_.max_concurrency; }
    void send_what_is_due() {
        for (const double t = now(); next_ < requests_.size() && has_place() && requests_[next_].at <= t; next_++) {
            if (options_.stop_after > 0 && t >= options_.stop_after) {
                for (; next_ < requests_.size(); next_++) results_[next_].error = "not sent";
                return;
            }
            begin(next_, true);
        }
    }
    // Milliseconds until something is due.
    int timeout() const {
        constexpr double longest = 0.1;
        if (next_ >= requests_.size() || !has_place()) return int(longest * 1000);
        return int(std::clamp(requests_[next_].at - now(), 0.0, longest) * 1000);
    }

    void begin(std::size_t index, bool may_reuse) {
        Call call;
        call.index                  = index;
        call.address                = address_;
        const std::string_view body = requests_[index].body;
        call.out           = cat(head_of(target_, body.empty() ? "GET" : "POST", target_.path, body.size()), body);
        call.reused        = may_reuse && !idle_.empty();
        LoadResult& result = results_[index];
        if (may_reuse) result.sent = now(); // a second try counts from the first
        if (call.reused) {
            call.wire = std::move(idle_.back());
            idle_.pop_back();
        } else {
            call.wire = std::make_unique<Wire>(target_, *address_, tls_);
        }
        const int fd = call.wire->fd();
        if (!call.wire->usable()) return unreachable(std::move(call));
        watch(fd, call.reused ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, EPOLLIN | EPOLLOUT);
        by_age_.emplace_back(fd, index);
        calls_.emplace(fd, std::move(call));
    }
    void watch(int fd, int operation, std::uint32_t what) const {
        epoll_event event{};
        event.events  = what;
        event.data.fd = fd;
        epoll_ctl(epoll_, operation, fd, &event);
    }

    void advance(int fd) {
        const auto found = calls_.find(fd);
        if (found == calls_.end()) { // an idle one that the server closes
            std::erase_if(idle_, [&](const auto& wire) { return wire->fd() == fd; });
            return;
        }
        Call& call = found->second;
        if (call.written < call.out.size()) {
            const Wire::Io sent = call.wire->send(call.out, call.written);
            if (sent == Wire::Io::end) return call.written == 0 && !call.reused ? unreachable(take(fd)) : lost(fd);
            if (sent == Wire::Io::done) watch(fd, EPOLL_CTL_MOD, EPOLLIN);
        }
        std::array<char, 65536> buffer;
        while (true) {
            std::size_t    n  = 0;
            const Wire::Io io = call.wire->receive(buffer, n);
            if (io == Wire::Io::again) return;
            if (io == Wire::Io::end) return lost(fd);
            if (!call.reader.feed(std::string_view(buffer.data(), n), now(), results_[call.index])) break;
        }
        complete(fd);
    }
    Call take(int fd) {
        Call call = std::move(calls_.at(fd));
        calls_.erase(fd);
        return call;
    }
    // A host may have several addresses, of which the server listens on one.
    void unreachable(Call call) {
        const std::string why = cat("cannot connect: ", call.wire->reason());
        if (call.address == address_ && address_->ai_next && !reached_) address_ = address_->ai_next;
        if (call.address != address_) begin(call.index, false);
        else finish(call, why);
    }
    // The server hung up: the end of the answer, a fault, or a connection that had been idle for too long.
    void lost(int fd) {
        Call& call = calls_.at(fd);
        if (call.reused && !call.reader.begun()) {
            const std::size_t index = call.index;
            calls_.erase(fd);
            begin(index, false);
            return;
        }
        call.reader.close(now(), results_[call.index]);
        complete(fd);
    }
    void complete(int fd) {
        Call call = take(fd);
        reached_  = true;
        if (keep_body_) *keep_body_ = call.reader.plain_body();
        if (call.reader.reusable() && call.written == call.out.size()) idle_.push_back(std::move(call.wire));
        finish(call, "");
    }
    void finish(Call& call, const std::string& error) {
        LoadResult& result = results_[call.index];
        if (!error.empty()) result.error = error;
        if (result.end == 0) result.end = now();
        if (options_.done) options_.done(call.index, result);
    }
    void give_up_late_ones() {
        while (!by_age_.empty()) {
            const auto [fd, index] = by_age_.front();
            const auto found       = calls_.find(fd);
            if (found != calls_.end() && found->second.index == index) {
                if (now() - results_[index].sent < options_.request_seconds) return;
                Call call = std::move(found->second);
                calls_.erase(found);
                finish(call, cat("no whole answer in ", options_.request_seconds, " s"));
            }
            by_age_.pop_front();
        }
    }

    const LoadTarget&                       target_;
    const addrinfo*                         address_; // the address of the host that is in use
    std::span<const LoadRequest>            requests_;
    const LoadOptions&                      options_;
    TlsContext                              tls_;
    int                                     epoll_;
    std::vector<LoadResult>                 results_;
    std::unordered_map<int, Call>           calls_; // by descriptor
    std::vector<std::unique_ptr<Wire>>      idle_;
    std::deque<std::pair<int, std::size_t>> by_age_; // descriptor and request, as they were sent
    bool                                    reached_ = false;
    std::size_t                             next_    = 0;
    Clock::time_point                       start_;
    std::string*                            keep_body_ = nullptr;
};

// -- the interface

Result<LoadTarget> load_target(std::string_view base_url, std::string_view endpoint, std::string api_key) {
    LoadTarget       target;
    std::string_view rest = base_url;
    if (rest.starts_with("https://")) target.tls = true;
    else if (!rest.starts_with("http://"))
        return fail("the URL ", quote(base_url), " does not begin with http:// or https://");
    rest.remove_prefix(target.tls ? 8 : 7);
    const std::size_t slash     = std::min(rest.find('/'), rest.size());
    std::string_view  authority = rest.substr(0, slash), prefix = rest.substr(slash);
    while (prefix.ends_with('/')) prefix.remove_suffix(1);
    target.port = target.tls ? 443 : 80;
    if (const std::size_t colon = authority.rfind(':'); colon != std::string_view::npos && !authority.ends_with(']')) {
        target.port = to_number<int>(authority.substr(colon + 1)).value_or(0);
        if (target.port < 1 || target.port > 65535)
            return fail("the URL ", quote(base_url), " has no port in 1..65535");
        authority = authority.substr(0, colon);
    }
    if (authority.starts_with('[') && authority.ends_with(']')) authority = authority.substr(1, authority.size() - 2);
    if (authority.empty()) return fail("the URL ", quote(base_url), " names no host");
    if (!endpoint.starts_with('/')) return fail("the endpoint ", quote(endpoint), " does not begin with /");
    // As the openai client has it, a base URL may end in the /v1 with which the endpoint begins.
    if (prefix.ends_with("/v1") && endpoint.starts_with("/v1/")) prefix.remove_suffix(3);
    target.host    = std::string(authority);
    target.path    = cat(prefix, endpoint);
    target.api_key = std::move(api_key);
    for (const std::string* text : {&target.host, &target.path, &target.api_key})
        for (const char c : *text)
            if (static_cast<unsigned char>(c) <= ' ')
                return fail("the URL or the key has a blank or a control character");
    return target;
}

Result<std::vector<LoadResult>> run_load(const LoadTarget& target, std::span<const LoadRequest> requests,
                                         const LoadOptions& options) {
    Result<Addresses> addresses = Addresses::of(target);
    if (!addresses) return std::unexpected(addresses.error());
    raise_descriptors();
    return Load(target, addresses->first(), requests, options).run();
}

Result<std::string> fetch(const LoadTarget& target, const std::string& body) {
    Result<Addresses> addresses = Addresses::of(target);
    if (!addresses) return std::unexpected(addresses.error());
    const LoadRequest request{body, 0};
    LoadOptions       options;
    options.request_seconds = 30;
    return Load(target, addresses->first(), std::span(&request, 1), options).fetch_one();
}

} // namespace quire
