// quire.serve.http.tls: the server's side of TLS: reads the certificate, and begins the sessions of clients. **Owns** the certificate with its key.
module;

#include <openssl/ssl.h>

export module quire.serve.http.tls;

import quire.core.base;
export import quire.serve.http.connection;

export namespace quire {

// Any thread.
class ServerTls {
public:
    ServerTls() = default;
    ~ServerTls();
    ServerTls(const ServerTls&)            = delete;
    ServerTls& operator=(const ServerTls&) = delete;

    // Reads two PEM files, for the connections to come. Without both names the server does not speak TLS. Error: they cannot be used, and the old
    // ones stay.
    Result<void> read(const std::string& cert, const std::string& key);
    // Where the server speaks TLS, the connection does. False: there is no memory for it.
    bool begin(Connection& c);

private:
    std::mutex mutex_; // guards `context_`
    SSL_CTX*   context_ = nullptr;
};

} // namespace quire

module :private;

namespace quire {

ServerTls::~ServerTls() {
    if (context_) SSL_CTX_free(context_);
}

// Of two PEM files. The caller frees it.
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

Result<void> ServerTls::read(const std::string& cert, const std::string& key) {
    if (cert.empty() && key.empty()) return {};
    if (cert.empty() || key.empty()) return fail("TLS takes both a certificate and a key");
    const Result<SSL_CTX*> context = tls_context(cert, key);
    if (!context) return std::unexpected(context.error());
    const std::scoped_lock lock(mutex_);
    if (context_) SSL_CTX_free(context_); // connections keep theirs
    context_ = *context;
    return {};
}

bool ServerTls::begin(Connection& c) {
    const std::scoped_lock lock(mutex_);
    if (!context_) return true;
    c.ssl = SSL_new(context_);
    if (!c.ssl) return false;
    SSL_set_fd(c.ssl, c.fd);
    SSL_set_accept_state(c.ssl);
    return true;
}

} // namespace quire
