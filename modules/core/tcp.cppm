// quire.core.tcp: TCP sockets: listening, calling, whole messages with a time limit. Owns nothing: the caller closes what it gets.
module;

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>
#include <cerrno>

export module quire.core.tcp;

import quire.core.base;

export namespace quire {

struct Listener {
    int fd   = -1;
    int port = 0; // the one that was found where 0 was asked for
};

// Error: the address, and why it cannot be had. The socket does not block.
Result<Listener> listen_tcp(const std::string& host, int port);
// Takes the address alone, so that no other program gets it: connections are refused until listen_on().
// `own`: sockets that the caller has taken already. Where one of them is reached at the address, too, the returned socket is -1: nothing is
// left to take. The system would say only later, in listen_on(), that the address is in use.
Result<Listener> bind_tcp(const std::string& host, int port, std::span<const int> own = {});
Result<void>     listen_on(int fd);
// The next caller, within `seconds`: a socket that send_all() and receive_all() take. Error: no caller came.
Result<int> accept_tcp(const Listener& listener, double seconds);
// Calls again and again until a program listens there, for at most `seconds`.
Result<int> connect_tcp(const std::string& host, int port, double seconds);

// All of it within `seconds` (0: however long it takes). Error: what happened: the time is over, or the other end has gone.
Result<void> send_all(int fd, std::span<const std::byte> bytes, double seconds);
Result<void> receive_all(int fd, std::span<std::byte> bytes, double seconds);
// Reads the bytes that are there now, at most bytes.size(); 0: nothing yet. Error: the other end has gone.
Result<std::size_t> receive_some(int fd, std::span<std::byte> bytes);
// Waits until one of them has something to read, or its other end has gone: the places of these in `fds`. Empty: none within `seconds`.
std::vector<std::size_t> readable_of(std::span<const int> fds, double seconds);
void                     close_tcp(int fd); // -1: nothing happens
// The other side has closed the connection, or is gone; what it sent before may still be there.
bool has_hung_up(int fd);

} // namespace quire

module :private;

namespace quire {

using Clock = std::chrono::steady_clock;

double since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

Result<Listener> listen_tcp(const std::string& host, int port) {
    Result<Listener> bound = bind_tcp(host, port);
    if (!bound) return bound;
    if (auto ok = listen_on(bound->fd); !ok) {
        close(bound->fd);
        return fail_with(ErrorKind::system, "cannot listen on ", quote(host), " port ", port, ": ", ok.error().message);
    }
    return bound;
}

Result<void> listen_on(int fd) {
    if (::listen(fd, 4096) == 0) return {};
    return fail_with(ErrorKind::system, std::strerror(errno));
}

// Whether a caller of the address reaches the socket: it is bound to the address, or to all addresses of this machine.
bool reaches(const sockaddr* address, int fd) {
    sockaddr_storage bound{};
    socklen_t        size = sizeof bound;
    if (getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &size) != 0) return false;
    const auto* four = reinterpret_cast<const sockaddr_in*>(address);
    const auto* six  = reinterpret_cast<const sockaddr_in6*>(address);
    if (bound.ss_family == AF_INET && address->sa_family == AF_INET) {
        const auto* has = reinterpret_cast<const sockaddr_in*>(&bound);
        return has->sin_port == four->sin_port &&
               (has->sin_addr.s_addr == htonl(INADDR_ANY) || has->sin_addr.s_addr == four->sin_addr.s_addr);
    }
    if (bound.ss_family != AF_INET6) return false;
    const auto* has = reinterpret_cast<const sockaddr_in6*>(&bound);
    const bool  all = std::memcmp(&has->sin6_addr, &in6addr_any, sizeof in6addr_any) == 0;
    if (address->sa_family == AF_INET6)
        return has->sin6_port == six->sin6_port &&
               (all || (has->sin6_scope_id == six->sin6_scope_id &&
                        std::memcmp(&has->sin6_addr, &six->sin6_addr, sizeof six->sin6_addr) == 0));
    int       only  = 1; // the socket takes no callers of IPv4
    socklen_t width = sizeof only;
    return address->sa_family == AF_INET && all && has->sin6_port == four->sin_port &&
           getsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &only, &width) == 0 && only == 0;
}

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

// The addresses that a name has. "localhost" is this machine also where no file says so (RFC 6761, section 6.3): a minimal
// container has no /etc/hosts.
Result<Addresses> addresses_of(const std::string& host, int port, int flags) {
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags    = flags;
    int why           = getaddrinfo(host.c_str(), cat(port).c_str(), &hints, &found);
    if (why != 0 && host == "localhost") {
        hints.ai_flags &= ~AI_PASSIVE; // no name and not passive: the loopback addresses
        why = getaddrinfo(nullptr, cat(port).c_str(), &hints, &found);
    }
    if (why != 0) return fail_with(ErrorKind::system, gai_strerror(why));
    return Addresses(found, freeaddrinfo);
}

Result<Listener> bind_tcp(const std::string& host, int port, std::span<const int> own) {
    const Result<Addresses> found = addresses_of(host, port, AI_PASSIVE);
    if (!found) return fail_with(ErrorKind::system, "no address ", quote(host), ": ", found.error().message);
    std::string last = "no such address";
    for (const addrinfo* at = found->get(); at; at = at->ai_next) {
        for (const int fd : own)
            if (reaches(at->ai_addr, fd)) return Listener{-1, port};
        const int fd = socket(at->ai_family, at->ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, at->ai_protocol);
        if (fd < 0) continue;
        const int on = 1;
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        if (bind(fd, at->ai_addr, at->ai_addrlen) == 0) {
            sockaddr_storage bound{};
            socklen_t        size = sizeof bound;
            getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &size);
            const int bound_port =
                ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port
                                                  : reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
            return Listener{fd, bound_port};
        }
        last = std::strerror(errno);
        close(fd);
    }
    return fail_with(ErrorKind::system, "cannot listen on ", quote(host), " port ", port, ": ", last);
}

// Messages are small and waited for; a host that is gone without a word is noticed after half a minute.
int prepared(int fd) {
    const int on = 1, idle = 10, interval = 5, count = 4;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
    return fd;
}

// Until the socket can be read or written; error: not within what is left of `seconds`.
Result<void> wait_for(int fd, short what, Clock::time_point begin, double seconds) {
    for (;;) {
        const double left = seconds - since(begin);
        if (seconds > 0 && left <= 0) return fail_with(ErrorKind::system, "no answer within ", seconds, " seconds");
        pollfd    one{fd, what, 0};
        const int n = poll(&one, 1, seconds > 0 ? int(left * 1000) + 1 : -1);
        if (n > 0) return {};
        if (n < 0 && errno != EINTR) return fail_with(ErrorKind::system, std::strerror(errno));
    }
}

bool has_hung_up(int fd) {
    pollfd one{fd, POLLRDHUP, 0};
    return poll(&one, 1, 0) > 0 && (one.revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL)) != 0;
}

Result<int> accept_tcp(const Listener& listener, double seconds) {
    const auto begin = Clock::now();
    for (;;) {
        if (auto ok = wait_for(listener.fd, POLLIN, begin, seconds); !ok) return std::unexpected(ok.error());
        const int fd = accept4(listener.fd, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd >= 0) return prepared(fd);
        if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED)
            return fail_with(ErrorKind::system, std::strerror(errno));
    }
}

Result<int> connect_tcp(const std::string& host, int port, double seconds) {
    const auto  begin = Clock::now();
    std::string last;
    for (;;) {
        const Result<Addresses> found = addresses_of(host, port, 0);
        if (!found) last = found.error().message;
        for (const addrinfo* at = found ? found->get() : nullptr; at; at = at->ai_next) {
            const int fd = socket(at->ai_family, at->ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, at->ai_protocol);
            if (fd < 0) continue;
            int       error = connect(fd, at->ai_addr, at->ai_addrlen) == 0 ? 0 : errno;
            socklen_t size  = sizeof error;
            if (error == EINPROGRESS && wait_for(fd, POLLOUT, begin, seconds))
                getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
            if (error == 0) return prepared(fd);
            last = std::strerror(error);
            close(fd);
        }
        if (since(begin) > seconds)
            return fail_with(ErrorKind::system, "nobody answers at ", quote(host), " port ", port, ": ", last);
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
}

void close_tcp(int fd) {
    if (fd >= 0) close(fd);
}

Result<void> send_all(int fd, std::span<const std::byte> bytes, double seconds) {
    const auto begin = Clock::now();
    while (!bytes.empty()) {
        const ssize_t n = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
        if (n >= 0) {
            bytes = bytes.subspan(std::size_t(n));
        } else if (errno == EAGAIN) {
            if (auto ok = wait_for(fd, POLLOUT, begin, seconds); !ok) return ok;
        } else if (errno != EINTR) {
            return fail_with(ErrorKind::system, "its process is gone (", std::strerror(errno), ")");
        }
    }
    return {};
}

Result<std::size_t> receive_some(int fd, std::span<std::byte> bytes) {
    for (;;) {
        const ssize_t n = recv(fd, bytes.data(), bytes.size(), 0);
        if (n > 0) return std::size_t(n);
        if (n == 0) return fail_with(ErrorKind::system, "its process is gone");
        if (errno == EAGAIN) return 0;
        if (errno != EINTR) return fail_with(ErrorKind::system, "its process is gone (", std::strerror(errno), ")");
    }
}

Result<void> receive_all(int fd, std::span<std::byte> bytes, double seconds) {
    const auto begin = Clock::now();
    while (!bytes.empty()) {
        const Result<std::size_t> n = receive_some(fd, bytes);
        if (!n) return std::unexpected(n.error());
        bytes = bytes.subspan(*n);
        if (*n > 0) continue;
        if (auto ok = wait_for(fd, POLLIN, begin, seconds); !ok) return ok;
    }
    return {};
}

std::vector<std::size_t> readable_of(std::span<const int> fds, double seconds) {
    std::vector<pollfd> all;
    all.reserve(fds.size());
    for (int fd : fds) all.push_back({fd, POLLIN, 0});
    std::vector<std::size_t> ready;
    if (poll(all.data(), all.size(), int(seconds * 1000) + 1) > 0)
        for (std::size_t i = 0; i < all.size(); i++)
            if (all[i].revents != 0) ready.push_back(i);
    return ready;
}

} // namespace quire
