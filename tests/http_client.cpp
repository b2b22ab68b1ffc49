// The functions of http_client.h, compiled once for all tests.
#include "http_client.h"

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace quire::testing {

Client::Client(int port) {
    fd_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family      = AF_INET;
    address.sin_port        = htons(static_cast<unsigned short>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected_              = fd_ >= 0 && connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
}
Client::Client(const std::string& path) {
    fd_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, path.c_str(), sizeof address.sun_path - 1);
    connected_ = fd_ >= 0 && connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
}
void Client::hang_up() {
    if (fd_ >= 0) close(std::exchange(fd_, -1));
}
bool Client::send(std::string_view text) {
    while (!text.empty()) {
        const ssize_t n = ::send(fd_, text.data(), text.size(), MSG_NOSIGNAL);
        if (n <= 0) return false;
        text.remove_prefix(std::size_t(n));
    }
    return true;
}
bool Client::more(double seconds) {
    pollfd p{fd_, POLLIN, 0};
    if (poll(&p, 1, int(seconds * 1000)) <= 0) return false;
    char          buffer[65536];
    const ssize_t n = recv(fd_, buffer, sizeof buffer, 0);
    if (n <= 0) return false;
    in_.append(buffer, std::size_t(n));
    return true;
}
std::string Client::until(std::string_view text) {
    std::size_t at = 0;
    while ((at = in_.find(text)) == std::string::npos)
        if (!more()) return {};
    std::string out = in_.substr(0, at + text.size());
    in_.erase(0, at + text.size());
    return out;
}
std::string Client::bytes(std::size_t n) {
    while (in_.size() < n)
        if (!more()) return {};
    std::string out = in_.substr(0, n);
    in_.erase(0, n);
    return out;
}
std::string Client::rest() {
    while (more()) {}
    return std::exchange(in_, {});
}
Reply Client::head() {
    Reply       reply;
    std::string text = until("\r\n\r\n");
    if (text.empty() || std::sscanf(text.c_str(), "HTTP/1.%*d %d", &reply.status) != 1) return reply;
    for (std::size_t at = text.find("\r\n") + 2; at + 2 < text.size();) {
        const std::size_t end = text.find("\r\n", at), colon = text.find(": ", at);
        std::string       name = text.substr(at, colon - at);
        std::ranges::transform(name, name.begin(), [](unsigned char c) { return char(std::tolower(c)); });
        reply.headers[name] = text.substr(colon + 2, end - colon - 2);
        at                  = end + 2;
    }
    return reply;
}
std::string Client::chunk() {
    const std::string line = until("\r\n");
    if (line.empty()) return {};
    const auto        n     = std::size_t(std::strtoul(line.c_str(), nullptr, 16));
    const std::string piece = bytes(n + 2);
    return piece.substr(0, n);
}
std::string Client::event() {
    std::string piece = chunk();
    while (piece.starts_with(':')) piece = chunk();
    return piece.starts_with("data: ") ? piece.substr(6) : piece;
}
Reply Client::reply(bool has_body) {
    Reply r = head();
    if (r.status == 0 || !has_body) return r;
    if (r.headers.contains("transfer-encoding"))
        for (std::string piece = chunk(); !piece.empty(); piece = chunk()) r.body += piece;
    else if (r.headers.contains("content-length")) r.body = bytes(std::size_t(std::stoul(r.headers["content-length"])));
    else r.body = rest();
    return r;
}
Reply Client::call(std::string_view text) {
    send(text);
    return reply();
}
Reply Client::get(const std::string& path, const std::string& headers) {
    return call("GET " + path + " HTTP/1.1\r\nHost: x\r\n" + headers + "\r\n");
}
Reply Client::post(const std::string& path, const std::string& body, const std::string& headers) {
    return call(request(path, body, headers));
}
std::string Client::request(const std::string& path, const std::string& body, const std::string& headers) {
    return "POST " + path +
           " HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: " + std::to_string(body.size()) +
           "\r\n" + headers + "\r\n" + body;
}
} // namespace quire::testing
