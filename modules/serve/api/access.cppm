// quire.serve.api.access: which requests may enter: API keys, and without them the protection against web pages of other sites (CORS,
// DNS rebinding). Owns only its settings.
export module quire.serve.api.access;

import quire.core.base;
import quire.serve.api.error;
import quire.serve.http.exchange;

export namespace quire {

// The API key that a request brings; "": none.
std::string_view given_key(const HttpRequest& request);

class Access {
public:
    // A request needs one of the keys; no keys: every request may enter. `cors_origins`: sites whose pages may use this server; "*": all.
    // `local_only`: see cross_origin(); for a server without keys that only this machine can reach.
    Access(std::vector<std::string> api_keys, std::vector<std::string> cors_origins, bool local_only)
        : api_keys_(std::make_shared<Keys>(std::move(api_keys))), cors_origins_(std::move(cors_origins)),
          local_only_(local_only) {}

    // Replaces the keys, from the next request on. Any thread. An Access without keys gets none: local_only depends on that.
    void set_keys(std::vector<std::string> keys) {
        const std::scoped_lock lock(mutex_);
        api_keys_ = std::make_shared<Keys>(std::move(keys));
    }

    bool has_cors() const { return !cors_origins_.empty(); }
    // Adds the headers by which a browser lets a listed page read the response.
    void allow_origin(HttpExchange& e) const;
    // Answers a browser's question whether a page may send a request (CORS preflight).
    std::optional<ApiError> preflight(HttpExchange& e) const;
    // Why the request may not enter.
    std::optional<ApiError> check(HttpExchange& e) const;

private:
    bool                    is_listed(std::string_view origin) const;
    std::optional<ApiError> cross_origin(const HttpRequest& r) const;

    using Keys = const std::vector<std::string>;
    std::shared_ptr<Keys> keys() const {
        const std::scoped_lock lock(mutex_);
        return api_keys_;
    }

    mutable std::mutex       mutex_; // guards api_keys_
    std::shared_ptr<Keys>    api_keys_;
    std::vector<std::string> cors_origins_;
    // Browsers that use another name than the machine's own are refused: a web page could have made its own name lead to
    // 127.0.0.1 (DNS rebinding).
    bool local_only_;
};

} // namespace quire

module :private;

namespace quire {

// In time that depends on nothing but the key's length.
bool same_key(std::string_view key, std::string_view given) {
    volatile unsigned difference = unsigned(key.size() != given.size());
    for (std::size_t i = 0; i < key.size(); i++)
        difference = difference | unsigned(static_cast<unsigned char>(key[i]) ^
                                           static_cast<unsigned char>(i < given.size() ? given[i] : '\0'));
    return difference == 0;
}

bool Access::is_listed(std::string_view origin) const {
    return std::ranges::any_of(cors_origins_, [&](const std::string& o) { return o == "*" || o == origin; });
}

void Access::allow_origin(HttpExchange& e) const {
    if (cors_origins_.empty()) return;
    HttpFields& headers = e.response.headers;
    headers.emplace_back("Vary", "Origin");
    const std::string_view origin = e.request.header("origin");
    if (origin.empty() || !is_listed(origin)) return;
    headers.emplace_back("Access-Control-Allow-Origin", origin);
    headers.emplace_back("Access-Control-Expose-Headers", "X-Request-Id, Retry-After");
}

std::optional<ApiError> Access::preflight(HttpExchange& e) const {
    allow_origin(e);
    const HttpRequest& r = e.request;
    if (!is_listed(r.header("origin")))
        return ApiError{403, cat("--cors-origins does not name ", quote(r.header("origin"))), "", "forbidden_origin"};
    // The headers of OpenAI's packages, and all others that the page asks for: a listed page may send any header.
    std::string names =
        "Authorization, Content-Type, X-Api-Key, X-Request-Id, Idempotency-Key, OpenAI-Organization, "
        "OpenAI-Project, OpenAI-Beta, X-Stainless-Arch, X-Stainless-Async, X-Stainless-Helper-Method, "
        "X-Stainless-Lang, X-Stainless-OS, X-Stainless-Package-Version, X-Stainless-Retry-Count, "
        "X-Stainless-Runtime, X-Stainless-Runtime-Version, X-Stainless-Timeout";
    const std::string_view asked = r.header("access-control-request-headers");
    const bool             plain = std::ranges::all_of(
        asked, [](char c) { return is_alphanumeric(c) || c == '-' || c == '_' || c == ',' || c == ' '; });
    if (!asked.empty() && plain) names += cat(", ", asked);
    e.response.status = 204;
    e.response.headers.emplace_back("Access-Control-Allow-Methods", "GET, POST, DELETE, OPTIONS");
    e.response.headers.emplace_back("Access-Control-Allow-Headers", names);
    e.response.headers.emplace_back("Access-Control-Max-Age", "600");
    if (r.header("access-control-request-private-network") == "true")
        e.response.headers.emplace_back("Access-Control-Allow-Private-Network", "true");
    return std::nullopt;
}

// A Host header, port and all, that names the machine itself; none, as HTTP/1.0 may have it.
bool is_local_name(std::string_view host) {
    if (host.starts_with('[')) host = host.substr(0, host.find(']') + 1);
    else host = host.substr(0, host.find(':'));
    return host.empty() || host == "localhost" || host.ends_with(".localhost") || host == "[::1]" ||
           (host.starts_with("127.") && host.find_first_not_of("0123456789.") == std::string_view::npos);
}

// Whether `origin` ("https://name", "http://name:8080") is the origin of pages under `host`.
bool is_origin_of(const std::string& origin, std::string host) {
    const bool tls = origin.starts_with("https://");
    if (!tls && !origin.starts_with("http://")) return false;
    std::string name = origin.substr(tls ? 8 : 7);
    for (std::string* text : {&name, &host})
        if (const char* usual = tls ? ":443" : ":80"; text->ends_with(usual))
            text->resize(text->size() - std::strlen(usual));
    return name == host;
}

// Why a request may come from a web page of another site, by the user's browser; none: it does not. Without keys nothing else
// separates it from the user's own. Pages can send a POST without a preflight when its body is text/plain, a form, or has no
// type.
std::optional<ApiError> Access::cross_origin(const HttpRequest& r) const {
    const std::string origin = lower(r.header("origin")), host = lower(r.header("host"));
    const bool        listed  = !cors_origins_.empty() && is_listed(r.header("origin"));
    const bool        browser = !origin.empty() || !r.header("sec-fetch-site").empty() ||
                         !r.header("accept-language").empty() || r.header("user-agent").starts_with("Mozilla/");
    const auto of_listed = [&](const std::string& o) { return o == "*" || is_origin_of(lower(o), host); };
    if (local_only_ && r.remote != "unix" && browser && !is_local_name(host) &&
        !std::ranges::any_of(cors_origins_, of_listed))
        return ApiError{403,
                        cat("this server is for its own machine, not for ", quote(host),
                            "; --cors-origins that names it, or --api-key, opens it to others"),
                        "", "forbidden_host"};
    if (listed) return std::nullopt;
    // The name under which browsers reach a proxy, which sets this header; a page cannot set it without a preflight.
    const std::string_view named = r.header("x-forwarded-host");
    const std::string      front = lower(named.substr(0, named.find(',')));
    if (!origin.empty() && !is_origin_of(origin, host) && !(!front.empty() && is_origin_of(origin, front)))
        return ApiError{403,
                        cat("a page of ", quote(origin), " may not use this server unless --cors-origins names it"), "",
                        "forbidden_origin"};
    const std::string_view site = r.header("sec-fetch-site");
    const bool             link = r.header("sec-fetch-mode") == "navigate" && r.header("sec-fetch-dest") == "document";
    if (origin.empty() && (site == "cross-site" || site == "same-site") && !(link && r.method == "GET"))
        return ApiError{403, "a page of another origin may not use this server; --cors-origins names those that may",
                        "", "forbidden_origin"};
    if (r.method != "POST") return std::nullopt;
    const std::string type = lower(r.header("content-type")), kind = type.substr(0, type.find_first_of("; "));
    if (kind == "application/json" || kind.ends_with("+json")) return std::nullopt;
    // curl -d and Python's urllib send these types by default. A browser's request is checked by its other headers above.
    if (!browser && (kind.empty() || kind == "application/x-www-form-urlencoded")) return std::nullopt;
    return ApiError{415, cat("the Content-Type is ", quote(type), "; it has to be application/json"), "", ""};
}

std::string_view given_key(const HttpRequest& request) {
    const std::string_view bearer = request.header("authorization");
    if (bearer.starts_with("Bearer ") || bearer.starts_with("bearer ")) return bearer.substr(7);
    return request.header("x-api-key");
}

std::optional<ApiError> Access::check(HttpExchange& e) const {
    const std::shared_ptr<Keys> keys = this->keys();
    if (keys->empty()) return cross_origin(e.request);
    const std::string_view given = given_key(e.request);
    bool                   known = false;
    for (const std::string& key : *keys) known |= same_key(key, given); // all of them, always
    if (known) return std::nullopt;
    e.response.headers.emplace_back("WWW-Authenticate", "Bearer");
    return ApiError{401, "a valid API key is needed: Authorization: Bearer KEY", "", "invalid_api_key"};
}

} // namespace quire
