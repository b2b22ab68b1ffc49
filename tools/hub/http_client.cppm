// quire.tools.hub.http_client: one HTTP request. libcurl speaks it: of the libraries at hand it alone obeys the proxies of the environment,
// keeps a token from other hosts and notices a stall. Owns nothing.
module;

#include <curl/curl.h>

export module quire.tools.hub.http_client;

import quire.core.base;

export namespace quire {

struct WebRequest {
    std::string  url;      // http:// or https://
    std::string  token;    // sent as a bearer's, "": none; to the host of `url` alone, wherever redirects lead
    std::int64_t from = 0; // the first byte wanted
    std::string
        etag; // with `from`: the part is wanted of this version alone; without: the body is not wanted of this version
    double stall_seconds = 10; // a connection that brings nothing for so long is given up
};

struct WebAnswer {
    int                                status = 0;          // of the last response; 0: there was none
    std::map<std::string, std::string> headers;             // of the last response, names in lower case
    std::map<std::string, std::string> first;               // of the first one, before any redirect
    std::string                        fault;               // why the answer is not complete, "": it is
    bool                               passing     = false; // another attempt may have no such fault
    bool                               stopped     = false; // by the caller
    int                                retry_after = -1;    // seconds; -1: the server named none
    std::string                        text;                // the body of a refusal, its first 4 KiB

    // A header of the last response, or of the first one; "": neither has it.
    std::string header(const std::string& name) const;
};

// Gets the bytes of a body with status 200 or 206, piece by piece; false ends the request.
using WebBody = std::function<bool(const WebAnswer& head, std::string_view bytes)>;

// GET. Redirects are followed, ten at most, and never from https to http. `idle` is called some times in a second.
WebAnswer web_get(const WebRequest& request, const WebBody& body, const std::function<void()>& idle = {});

// scheme://host:port of a URL in lower case, the port where it is not the scheme's own.
std::string origin_of(std::string_view url);

} // namespace quire

module :private;

namespace quire {

std::string lower(std::string_view text) {
    std::string out(text);
    for (char& c : out)
        if (c >= 'A' && c <= 'Z') c = char(c - 'A' + 'a');
    return out;
}

std::string WebAnswer::header(const std::string& name) const {
    for (const auto* side : {&headers, &first})
        if (const auto at = side->find(name); at != side->end()) return at->second;
    return "";
}

std::string origin_of(std::string_view url) {
    const std::size_t scheme_end = url.find("://");
    if (scheme_end == std::string_view::npos) return "";
    const std::string scheme = lower(url.substr(0, scheme_end));
    std::string_view  host   = url.substr(scheme_end + 3);
    host                     = host.substr(0, host.find_first_of("/?#\\"));
    if (const std::size_t at = host.rfind('@'); at != std::string_view::npos) host.remove_prefix(at + 1);
    std::string origin = cat(scheme, "://", lower(host));
    for (const auto& [own, port] : {std::pair{"https", ":443"}, std::pair{"http", ":80"}})
        if (scheme == own && origin.ends_with(port)) origin.resize(origin.size() - std::strlen(port));
    return origin;
}

struct Transfer {
    CURL*                        curl;
    const WebBody&               body;
    const std::function<void()>& idle;
    WebAnswer                    answer;
    int                          n_responses = 0;
};

std::size_t take_header(char* bytes, std::size_t, std::size_t n, void* into) {
    Transfer&         t = *static_cast<Transfer*>(into);
    std::string_view  line(bytes, n);
    const std::size_t colon = line.find(':');
    if (line.starts_with("HTTP/")) {
        t.answer.headers.clear();
        t.n_responses++;
    } else if (colon != std::string_view::npos) {
        const std::string name  = lower(line.substr(0, colon));
        std::string_view  value = line.substr(colon + 1);
        const std::size_t first = value.find_first_not_of(" \t"), last = value.find_last_not_of(" \t\r\n");
        value                  = first == std::string_view::npos ? "" : value.substr(first, last - first + 1);
        t.answer.headers[name] = value;
        if (t.n_responses == 1) t.answer.first[name] = value;
    }
    return n;
}

std::size_t take_body(char* bytes, std::size_t, std::size_t n, void* into) {
    Transfer& t      = *static_cast<Transfer*>(into);
    long      status = 0;
    curl_easy_getinfo(t.curl, CURLINFO_RESPONSE_CODE, &status);
    t.answer.status = int(status);
    if (status == 200 || status == 206) {
        if (t.body(t.answer, {bytes, n})) return n;
        t.answer.stopped = true;
        return 0;
    }
    constexpr std::size_t most = 4096;
    t.answer.text.append(bytes, std::min(n, most - std::min(most, t.answer.text.size())));
    return n;
}

int take_idle(void* into, curl_off_t, curl_off_t, curl_off_t, curl_off_t) {
    const Transfer& t = *static_cast<Transfer*>(into);
    if (t.idle) t.idle();
    return 0;
}

// The authorities that are trusted: those of the variables that other clients know, or of the system, wherever it keeps them. Null: where
// libcurl looks.
const char* authorities() {
    for (const char* name : {"SSL_CERT_FILE", "CURL_CA_BUNDLE"})
        if (const char* file = std::getenv(name); file && *file) return file;
    std::error_code ignored;
    for (const char* file : {"/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt",
                             "/etc/ssl/ca-bundle.pem", "/etc/ssl/cert.pem"})
        if (std::filesystem::exists(file, ignored)) return file;
    return nullptr;
}

bool may_pass(CURLcode code) {
    constexpr CURLcode passing[] = {CURLE_OPERATION_TIMEDOUT, CURLE_PARTIAL_FILE, CURLE_RECV_ERROR,   CURLE_SEND_ERROR,
                                    CURLE_GOT_NOTHING,        CURLE_HTTP2,        CURLE_HTTP2_STREAM, CURLE_AGAIN};
    return std::ranges::find(passing, code) != std::end(passing);
}

WebAnswer web_get(const WebRequest& request, const WebBody& body, const std::function<void()>& idle) {
    static const CURLcode                                     started = curl_global_init(CURL_GLOBAL_DEFAULT);
    const std::unique_ptr<CURL, decltype(&curl_easy_cleanup)> owner(started == CURLE_OK ? curl_easy_init() : nullptr,
                                                                    curl_easy_cleanup);
    CURL*    curl = owner.get();
    Transfer t{curl, body, idle, {}, 0};
    if (!curl) {
        t.answer.fault = "libcurl does not start";
        return t.answer;
    }
    char        words[CURL_ERROR_SIZE] = "";
    curl_slist* lines                  = nullptr;
    const auto  add_header             = [&lines](const std::string& line) {
        if (curl_slist* longer = curl_slist_append(lines, line.c_str())) lines = longer;
    };
    const bool is_date = request.etag.ends_with(" GMT");
    if (!request.etag.empty())
        add_header(cat(request.from > 0 ? "If-Range: "
                       : is_date        ? "If-Modified-Since: "
                                        : "If-None-Match: ",
                       request.etag));
    if (request.from > 0) add_header(cat("Range: bytes=", request.from, "-"));
    const std::unique_ptr<curl_slist, decltype(&curl_slist_free_all)> headers(lines, curl_slist_free_all);
    const long                                                        stall = std::max(1L, long(request.stall_seconds));
    curl_easy_setopt(curl, CURLOPT_URL, request.url.c_str());
    curl_easy_setopt(curl, CURLOPT_PROTOCOLS_STR, "http,https");
    curl_easy_setopt(curl, CURLOPT_REDIR_PROTOCOLS_STR,
                     lower(request.url).starts_with("https:") ? "https" : "http,https");
    curl_easy_setopt(curl, CURLOPT_FOLLOWLOCATION, 1L);
    curl_easy_setopt(curl, CURLOPT_MAXREDIRS, 10L);
    curl_easy_setopt(curl, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(curl, CURLOPT_SUPPRESS_CONNECT_HEADERS, 1L);
    curl_easy_setopt(curl, CURLOPT_CONNECTTIMEOUT, stall);
    curl_easy_setopt(curl, CURLOPT_LOW_SPEED_LIMIT, 64L); // bytes in a second
    curl_easy_setopt(curl, CURLOPT_LOW_SPEED_TIME, stall);
    curl_easy_setopt(curl, CURLOPT_USERAGENT, "quire/0.1");
    curl_easy_setopt(curl, CURLOPT_HTTPHEADER, headers.get());
    curl_easy_setopt(curl, CURLOPT_ERRORBUFFER, words);
    curl_easy_setopt(curl, CURLOPT_HEADERFUNCTION, take_header);
    curl_easy_setopt(curl, CURLOPT_HEADERDATA, &t);
    curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, take_body);
    curl_easy_setopt(curl, CURLOPT_WRITEDATA, &t);
    curl_easy_setopt(curl, CURLOPT_XFERINFOFUNCTION, take_idle);
    curl_easy_setopt(curl, CURLOPT_XFERINFODATA, &t);
    curl_easy_setopt(curl, CURLOPT_NOPROGRESS, 0L);
    curl_easy_setopt(curl, CURLOPT_BUFFERSIZE, 256L << 10);
    if (const char* file = authorities()) curl_easy_setopt(curl, CURLOPT_CAINFO, file);
    if (!request.token.empty()) { // in this form libcurl gives it to no other host
        curl_easy_setopt(curl, CURLOPT_HTTPAUTH, CURLAUTH_BEARER);
        curl_easy_setopt(curl, CURLOPT_XOAUTH2_BEARER, request.token.c_str());
    }
    const CURLcode code   = curl_easy_perform(curl);
    long           status = 0;
    curl_off_t     retry  = 0;
    curl_easy_getinfo(curl, CURLINFO_RESPONSE_CODE, &status);
    curl_easy_getinfo(curl, CURLINFO_RETRY_AFTER, &retry);
    t.answer.status      = int(status);
    t.answer.retry_after = retry > 0 ? int(std::min<curl_off_t>(retry, 1 << 20)) : -1;
    if (code != CURLE_OK && !t.answer.stopped) {
        t.answer.fault   = words[0] != 0 ? words : curl_easy_strerror(code);
        t.answer.passing = may_pass(code);
    }
    return std::move(t.answer);
}

} // namespace quire
