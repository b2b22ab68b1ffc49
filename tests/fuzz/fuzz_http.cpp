// Any bytes over a socket, as a whole connection or as the target of a request: paths and queries also go through the library's
// parsers. The server answers with a status other than 5xx or disconnects, and still serves the next client.
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <string_view>

import quire.core.base;
import quire.serve.http.exchange;
import quire.serve.http.parser;
import quire.serve.http.server;

using namespace quire;

namespace {

struct Target {
    std::unique_ptr<HttpServer> server;
    sockaddr_un                 address{};

    Target() {
        HttpOptions o;
        o.limits.body_bytes      = 4096;
        o.limits.request_seconds = 0.3;
        o.limits.idle_seconds    = 0.3;
        o.limits.write_seconds   = 0.3;
        server                   = std::move(*HttpServer::create(std::move(o)));
        for (const auto& [method, path] : {std::pair{"GET", "/a/b"}, std::pair{"POST", "/a/b"},
                                           std::pair{"GET", "/a/*/c"}, std::pair{"GET", "/b/**"}})
            server->route(method, path, [](HttpExchange& e) {
                e.response.type = "text/plain";
                for (const auto& [key, value] : e.request.query) e.response.body += key + "=" + value + "\n";
                e.response.body += e.request.body;
            });
        address.sun_family = AF_UNIX;
        std::snprintf(address.sun_path, sizeof address.sun_path, "/tmp/quire-fuzz-%d.sock", int(getpid()));
        check(server->listen_unix(address.sun_path).has_value(), "no socket");
        server->start();
    }

    // The answer to `text`, up to the end of the connection.
    std::string ask(std::string_view text) const {
        const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        check(connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0, "nobody is there");
        while (!text.empty()) {
            const ssize_t n = send(fd, text.data(), text.size(), MSG_NOSIGNAL);
            if (n <= 0) break;
            text.remove_prefix(std::size_t(n));
        }
        std::string out;
        char        buffer[65536];
        for (ssize_t n = 0; (n = recv(fd, buffer, sizeof buffer, 0)) > 0;) out.append(buffer, std::size_t(n));
        close(fd);
        return out;
    }
};

const Target& target() {
    static const Target* made = new Target(); // its threads go with the process
    return *made;
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size == 0) return 0;
    const std::string_view                  text(reinterpret_cast<const char*>(data) + 1, size - 1);
    const std::string                       last   = " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    const std::string                       asked  = data[0] & 1   ? cat("GET /a/b?", text, last)
                                                     : data[0] & 2 ? cat("GET /b/", text, last)
                                                                   : cat(text, "\r\n\r\nGET /a/b", last);
    const std::string                       answer = target().ask(asked);
    static const std::set<std::string_view> fine{"200", "400", "404", "405", "408", "411", "413",
                                                 "414", "415", "417", "431", "501", "505"};
    if (!answer.empty())
        check(answer.starts_with("HTTP/1.") && fine.contains(std::string_view(answer).substr(9, 3)), answer);
    return 0;
}
