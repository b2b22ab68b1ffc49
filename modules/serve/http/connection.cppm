// quire.serve.http.connection: one client's connection and the request that it is sending, over TCP, TLS or a Unix socket.
// **Owns** its socket and its TLS session.
module;

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <sys/socket.h>
#include <unistd.h>
#include <cerrno>

export module quire.serve.http.connection;

import quire.core.base;
export import quire.serve.http.parser;

export namespace quire {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }

enum class Phase : std::uint8_t {
    head,      // waits for, or has the beginning of, a head
    body,      // of known length
    chunks,    // a chunked body
    answering, // a worker has it
    draining,  // refused: received bytes are discarded for a moment, so that the client can read the response
};

struct Connection : HttpPeer {
    std::uint64_t     key = 0;
    int               fd  = -1;
    SSL*              ssl = nullptr;
    std::string       remote;
    Phase             phase = Phase::head;
    Clock::time_point since = Clock::now(); // when it became idle, or the first byte of its request came
    Clock::time_point heard{};              // when the last bytes were discarded
    bool              begun   = false;      // a request has begun
    std::size_t       blank   = 0;          // empty lines before it
    std::size_t       drained = 0;          // bytes discarded
    std::string       in;                   // received and not yet parsed
    std::size_t       searched = 0;         // bytes of it without the end of a head
    HttpHead          head;
    ChunkDecoder      chunks;
    std::string       body;
    std::size_t       counted = 0; // bytes of this connection in `sum`: of `in` and `body`, then of the handler

    std::atomic<std::size_t>* sum   = nullptr; // bytes that all connections hold
    std::size_t               limit = 0;       // of `sum`, in bytes

    std::shared_ptr<Connection> next; // in a ConnectionList
    bool                        go_on    = false;
    bool                        spare    = false; // beyond the most connections: for a probe alone
    bool                        probe    = false; // its request is one
    bool                        admitted = false; // its body is received, however long
    bool                        early    = false; // answered before its body was received

    std::atomic<bool>     hung_up = false;
    std::mutex            mutex; // guards `notice`, held while `notice` runs
    std::function<void()> notice;

    bool gone() const override { return hung_up; }
    void cut() override { shutdown(fd, SHUT_RDWR); } // the thread of the sockets notices, and hangs up
    void when_gone(std::function<void()> f) override {
        std::scoped_lock lock(mutex);
        notice = std::move(f);
        if (notice && hung_up) std::exchange(notice, {})();
    }
    void count(std::size_t bytes) {
        *sum += bytes - counted; // modulo 2^64
        counted = bytes;
    }
    bool count_memory(std::size_t bytes) override {
        constexpr std::size_t always = 2 * small_body; // a small body, its head, and the buffers' growth
        const bool            more   = bytes > counted && bytes > always;
        count(bytes);
        return !more || *sum <= limit;
    }
    void hang_up() {
        hung_up = true;
        std::scoped_lock lock(mutex);
        if (notice) std::exchange(notice, {})();
    }
    ~Connection() override {
        if (ssl) SSL_free(ssl);
        if (fd >= 0) close(fd);
    }

    void close_tls() const { SSL_shutdown(ssl); }
    // Whether TLS has bytes that the socket does not have any more.
    bool has_decrypted() const { return ssl && SSL_pending(ssl) > 0; }

    enum class Io { done, again, again_out, end };
    // At most n bytes, without waiting.
    std::pair<Io, std::size_t> receive(char* to, std::size_t n) {
        if (ssl) return tls_result(SSL_read(ssl, to, int(std::min(n, std::size_t(1) << 20))));
        const ssize_t got = recv(fd, to, n, 0);
        if (got > 0) return {Io::done, std::size_t(got)};
        return {got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) ? Io::again : Io::end, 0};
    }
    std::pair<Io, std::size_t> transmit(const char* from, std::size_t n) {
        if (ssl) {
            auto result = tls_result(SSL_write(ssl, from, int(std::min(n, std::size_t(16384)))));
            return result;
        }
        const ssize_t sent = send(fd, from, n, MSG_NOSIGNAL);
        if (sent >= 0) return {Io::done, std::size_t(sent)};
        return {errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? Io::again_out : Io::end, 0};
    }
    std::pair<Io, std::size_t> tls_result(int result) const {
        if (result > 0) return {Io::done, std::size_t(result)};
        const int why = SSL_get_error(ssl, result);
        ERR_clear_error();
        if (why == SSL_ERROR_WANT_READ) return {Io::again, 0};
        if (why == SSL_ERROR_WANT_WRITE) return {Io::again_out, 0};
        return {Io::end, 0};
    }
};

using ConnectionPtr = std::shared_ptr<Connection>;

// First in, first out. Linked through the connections: pushing one cannot fail.
class ConnectionList {
public:
    bool empty() const { return !first_; }
    int  size() const { return size_; }
    void push(ConnectionPtr c) {
        Connection* const last         = c.get();
        (last_ ? last_->next : first_) = std::move(c);
        last_                          = last;
        size_++;
    }
    ConnectionPtr pop() {
        ConnectionPtr c = std::move(first_);
        first_          = std::move(c->next);
        if (!first_) last_ = nullptr;
        size_--;
        return c;
    }

private:
    ConnectionPtr first_;
    Connection*   last_ = nullptr;
    int           size_ = 0;
};

} // namespace quire
