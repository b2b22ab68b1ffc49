// quire.serve.http_listener: opens the sockets on which a server waits for clients, and makes its TLS context. Owns nothing.
// (No `import quire.core.std` here: the system's headers include the standard library's.)
module;

#include <netdb.h>
#include <netinet/in.h>
#include <openssl/ssl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <expected>
#include <memory>
#include <string>

export module quire.serve.http_listener;

import quire.core.base;

export namespace quire {

// The caller closes it.
struct Listener {
    int fd   = -1;
    int port = 0; // the one that was found where 0 was asked for
};

// Error: the address, and why it cannot be had.
Result<Listener> listen_tcp(const std::string& host, int port);
Result<Listener> listen_unix(const std::string& path);

// Of two PEM files. The caller frees it.
Result<SSL_CTX*> tls_context(const std::string& cert, const std::string& key);

} // namespace quire

module :private;

namespace quire {

Result<Listener> listen_tcp(const std::string& host, int port) {
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags    = AI_PASSIVE;
    if (const int why = getaddrinfo(host.c_str(), cat(port).c_str(), &hints, &found); why != 0)
        return fail_with(ErrorKind::system, "no address ", quote(host), ": ", gai_strerror(why));
    const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> guard(found, freeaddrinfo);
    std::string                                              last = "no such address";
    for (const addrinfo* at = found; at; at = at->ai_next) {
        const int fd = socket(at->ai_family, at->ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, at->ai_protocol);
        if (fd < 0) continue;
        const int on = 1;
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        if (bind(fd, at->ai_addr, at->ai_addrlen) == 0 && ::listen(fd, 4096) == 0) {
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

Result<Listener> listen_unix(const std::string& path) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (path.empty() || path.size() >= sizeof address.sun_path)
        return fail("a socket's path has 1 to ", sizeof address.sun_path - 1, " bytes, not ", path.size());
    std::memcpy(address.sun_path, path.data(), path.size());
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) return fail_with(ErrorKind::system, "no Unix sockets: ", std::strerror(errno));
    // Removes a socket that a server left behind: nobody listens to it.
    struct stat existing{};
    if (lstat(path.c_str(), &existing) == 0 && S_ISSOCK(existing.st_mode) &&
        connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) < 0 && errno == ECONNREFUSED)
        unlink(path.c_str());
    close(fd);
    const int fresh = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fresh < 0 || bind(fresh, reinterpret_cast<sockaddr*>(&address), sizeof address) < 0 ||
        ::listen(fresh, 4096) < 0) {
        const std::string why = std::strerror(errno);
        if (fresh >= 0) close(fresh);
        return fail_with(ErrorKind::system, "cannot listen on ", quote(path), ": ", why);
    }
    return Listener{fresh, 0};
}

Result<SSL_CTX*> tls_context(const std::string& cert, const std::string& key) {
    std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)> context(SSL_CTX_new(TLS_server_method()), SSL_CTX_free);
    if (!context) return fail_with(ErrorKind::system, "no TLS in this OpenSSL");
    SSL_CTX_set_min_proto_version(context.get(), TLS1_2_VERSION);
    SSL_CTX_set_options(context.get(), SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION);
    SSL_CTX_set_mode(context.get(),
                     SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER | SSL_MODE_RELEASE_BUFFERS);
    if (SSL_CTX_use_certificate_chain_file(context.get(), cert.c_str()) != 1)
        return fail("cannot use ", quote(cert), " as a TLS certificate (PEM)");
    if (SSL_CTX_use_PrivateKey_file(context.get(), key.c_str(), SSL_FILETYPE_PEM) != 1 ||
        SSL_CTX_check_private_key(context.get()) != 1)
        return fail("cannot use ", quote(key), " as the key (PEM) of ", quote(cert));
    return context.release();
}

} // namespace quire
