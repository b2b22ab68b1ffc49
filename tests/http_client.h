// A client that can misbehave: a socket, bytes sent as given, and parsed responses.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <utility>

namespace quire::testing {

struct Reply {
    int                                status = 0; // 0: the connection ended without one
    std::map<std::string, std::string> headers;    // names in lower case
    std::string                        body;       // chunks put together
};

class Client {
public:
    explicit Client(int port);
    explicit Client(const std::string& path);
    Client(Client&& other) noexcept
        : fd_(std::exchange(other.fd_, -1)), connected_(other.connected_), in_(std::move(other.in_)) {}
    Client& operator=(Client&&) = delete;
    ~Client() { hang_up(); }

    bool connected() const { return connected_; }
    int  fd() const { return fd_; }
    void hang_up();
    bool send(std::string_view text);
    // More bytes, or false at the end or after that many seconds.
    bool more(double seconds = 60);
    // Until `text` has come; what came up to and with it. "": it did not.
    std::string until(std::string_view text);
    std::string bytes(std::size_t n);
    std::string rest();
    Reply       head();
    // One piece of a chunked body; "" at its end.
    std::string chunk();
    // The data of the next server-sent event; comments, which a stream without news sends, are skipped.
    std::string        event();
    Reply              reply(bool has_body = true);
    Reply              call(std::string_view text);
    Reply              get(const std::string& path, const std::string& headers = "");
    Reply              post(const std::string& path, const std::string& body, const std::string& headers = "");
    static std::string request(const std::string& path, const std::string& body, const std::string& headers = "");

private:
    int         fd_        = -1;
    bool        connected_ = false;
    std::string in_;
};

} // namespace quire::testing
