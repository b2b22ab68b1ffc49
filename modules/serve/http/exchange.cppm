// quire.serve.http.exchange: an HTTP request and its response as values, and the handler that turns one into the other. Owns nothing.
export module quire.serve.http.exchange;

import quire.core.base;

export namespace quire {

using HttpFields = std::vector<std::pair<std::string, std::string>>;

// The longest body of a small request. Small requests have memory of their own: large ones never keep them waiting.
constexpr std::size_t small_body = std::size_t(64) << 10;

struct HttpRequest {
    std::string method, path, remote; // `path`: a handler gets it decoded; `remote`: address and port, or "unix"
    HttpFields  headers;              // names in lower case
    HttpFields  query;                // decoded
    std::string body;
    std::string id; // the client's x-request-id if it is a plain word, else one made up; also in the response

    // The first header of that name, in lower case; "" when there is none.
    std::string_view header(std::string_view name) const;
};

// The other end of the connection of a request that is being answered.
class HttpPeer {
public:
    virtual ~HttpPeer()       = default;
    virtual bool gone() const = 0; // it has hung up, or reads no more
    virtual void cut()        = 0; // ends the connection: a write that waits for the peer fails. Any thread
    // `notice` runs once when the peer is gone, on another thread; at once if the peer is gone already. An empty `notice` removes the last
    // one, which is not running any more when when_gone() returns.
    virtual void when_gone(std::function<void()> notice) = 0;
    // Counts `bytes` of memory for the request until it is answered, in place of the size of its body. False: all requests
    // together hold too much, and this one holds more than a small one.
    virtual bool count_memory(std::size_t bytes) = 0;
};

// Writes one piece of a streamed response; false when the client has gone.
using HttpWrite = std::function<bool(std::string_view)>;

struct HttpResponse {
    int         status = 200;
    std::string type   = "application/json";
    std::string body;
    HttpFields  headers;
    // In place of `body`: called once, on the same thread, after the head went out.
    std::function<void(const HttpWrite&)> stream;
};

struct HttpExchange {
    std::shared_ptr<void> model; // is in use by this exchange; let go last
    // How many seconds without a request that model stays loaded, < 0: for ever. Empty: requests do not decide that.
    std::function<void(double)> keep_model;
    HttpRequest                 request;
    HttpResponse                response;
    HttpPeer*                   peer = nullptr;
    HttpFields                  notes; // of the handlers, for the log
    // An object that lives until the handler returns; the handler may release it earlier.
    std::shared_ptr<void> held;
};

using HttpHandler = std::function<void(HttpExchange&)>;
// Whether a handler needs the body, by the head alone; where it does not, a long body is not received, and the request is answered at once.
using WantsBody = std::function<bool(HttpExchange&)>;

// The first value of that name, in lower case; "" when there is none.
std::string_view find_field(const HttpFields& fields, std::string_view name);
// With ASCII's letters in lower case.
std::string lower(std::string_view text);

// One event of a stream.
std::string event(std::string_view data);
std::string event(std::string_view name, std::string_view data);
// A comment, which clients skip: the connection lives.
constexpr std::string_view comment_event = ":\n\n";

} // namespace quire

module :private;

namespace quire {

std::string_view find_field(const HttpFields& fields, std::string_view name) {
    for (const auto& [key, value] : fields)
        if (key == name) return value;
    return {};
}

std::string lower(std::string_view text) {
    std::string out(text);
    for (char& c : out)
        if (c >= 'A' && c <= 'Z') c = char(c - 'A' + 'a');
    return out;
}

std::string_view HttpRequest::header(std::string_view name) const { return find_field(headers, name); }

std::string event(std::string_view data) { return cat("data: ", data, "\n\n"); }
std::string event(std::string_view name, std::string_view data) {
    return cat("event: ", name, "\ndata: ", data, "\n\n");
}

} // namespace quire
