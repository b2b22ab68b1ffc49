// quire.serve.http.listener: opens the Unix socket on which a server waits for clients. Owns nothing.
module;

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include <cerrno>

export module quire.serve.http.listener;

import quire.core.base;
export import quire.core.tcp; // Listener, listen_tcp

export namespace quire {

// Error: the address, and why it cannot be had.
Result<Listener> listen_unix(const std::string& path);
// The error of listen_unix(), as far as it can be seen without taking the path.
Result<void> can_listen_unix(const std::string& path);

} // namespace quire

module :private;

namespace quire {

Result<sockaddr_un> unix_address(const std::string& path) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (path.empty() || path.size() >= sizeof address.sun_path)
        return fail("a socket's path has 1 to ", sizeof address.sun_path - 1, " bytes, not ", path.size());
    std::memcpy(address.sun_path, path.data(), path.size());
    return address;
}

enum class Found : std::uint8_t { nothing, left_behind, in_use };

// Whether something stands at the path, and whether it is a socket that no server listens to any more.
Result<Found> look_at(const std::string& path, const sockaddr_un& address) {
    struct stat existing{};
    if (lstat(path.c_str(), &existing) != 0) return Found::nothing;
    if (!S_ISSOCK(existing.st_mode)) return Found::in_use;
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) return fail_with(ErrorKind::system, "no Unix sockets: ", std::strerror(errno));
    const bool nobody =
        connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) < 0 && errno == ECONNREFUSED;
    close(fd);
    return nobody ? Found::left_behind : Found::in_use;
}

Result<void> can_listen_unix(const std::string& path) {
    const Result<sockaddr_un> address = unix_address(path);
    if (!address) return std::unexpected(address.error());
    const Result<Found> found = look_at(path, *address);
    if (!found) return std::unexpected(found.error());
    if (*found == Found::in_use)
        return fail_with(ErrorKind::system, "cannot listen on ", quote(path), ": ", std::strerror(EADDRINUSE));
    return {};
}

Result<Listener> listen_unix(const std::string& path) {
    const Result<sockaddr_un> known = unix_address(path);
    if (!known) return std::unexpected(known.error());
    const sockaddr_un   address = *known;
    const Result<Found> found   = look_at(path, address);
    if (!found) return std::unexpected(found.error());
    if (*found == Found::left_behind) unlink(path.c_str());
    const int fresh = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fresh < 0 || bind(fresh, reinterpret_cast<const sockaddr*>(&address), sizeof address) < 0 ||
        ::listen(fresh, 4096) < 0) {
        const std::string why = std::strerror(errno);
        if (fresh >= 0) close(fresh);
        return fail_with(ErrorKind::system, "cannot listen on ", quote(path), ": ", why);
    }
    return Listener{fresh, 0};
}

} // namespace quire
