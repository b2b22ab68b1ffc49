// Which clients the server answers: API keys, pages of other sites, its own pages.
#include <catch2/catch_test_macros.hpp>

#include <unistd.h>
#include <fstream>
#include <string>

#include <nlohmann/json.hpp>

#include "http_client.h"
#include "process.h"
#include "server_process.h"

using namespace quire::testing;
using Json = nlohmann::json;

TEST_CASE("keys", "[server]") {
    const std::string file = temporary();
    std::ofstream(file) << "key-from-file\n\nanother%20key\n";
    const Server s({"--api-key", "secret-one,secret-two", "--api-key-file", file});
    unlink(file.c_str());
    const auto status = [&](const std::string& headers, const std::string& path = "/v1/models") {
        return s.get(path, headers).status;
    };
    CHECK(status("") == 401);
    for (const char* wrong :
         {"Authorization: Bearer wrong\r\n", "Authorization: Bearer \r\n", "Authorization: secret-one\r\n",
          "Authorization: Bearer secret-on\r\n", "Authorization: Bearer secret-onee\r\n", "X-Api-Key: \r\n",
          "Authorization: Bearer another key\r\n", "Authorization: Basic secret-one\r\n"})
        CHECK(status(wrong) == 401);
    for (const char* right : {"Authorization: Bearer secret-one\r\n", "Authorization: Bearer secret-two\r\n",
                              "X-Api-Key: key-from-file\r\n", "Authorization: Bearer another%20key\r\n"})
        CHECK(status(right) == 200);
    for (const char* path : {"/metrics", "/props", "/blocks", "/blocks/events", "/pins"})
        CHECK(status("", path) == 401);
    CHECK(status("", "/health") == 200);
    for (const char* line : {"POST /v1/completions", "POST /v1/nothing", "POST /ping", "GET /", "GET /v1/models"}) {
        Client c = s.client(); // without a key nobody uploads anything
        c.send(std::string(line) + " HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n\r\n{");
        CHECK(c.reply().headers.at("connection") == "close");
    }
    const Json e = Json::parse(s.post("/v1/completions", {{"prompt", "a"}}).body)["error"];
    CHECK(e["code"] == "invalid_api_key");
    for (const char* key : {"secret-one", "secret-two", "key-from-file", "secret-onee", "wrong"})
        CHECK(!has(s.log() + s.errors(), key));
    const Finished f = run_program("server", {"--api-key", ""});
    CHECK(f.code == 1); // an empty key is no key, not an open door
}

TEST_CASE("without a key, a server for its own machine answers browsers under its own names only", "[server]") {
    const auto status = [](const std::string& host) {
        return common()
            .client()
            .call("GET /v1/models HTTP/1.1\r\nHost: " + host + "\r\nUser-Agent: Mozilla/5.0\r\n\r\n")
            .status;
    };
    for (const char* own : {"localhost", "localhost:8080", "127.0.0.1:1", "[::1]:8080", "a.localhost", ""})
        CHECK(status(own) == 200);
    for (const char* other : {"evil.example", "127.evil.example:8080", "localhost.evil.example", "[::2]"})
        CHECK(status(other) == 403);
    CHECK(common().client().call("GET /v1/models HTTP/1.1\r\nHost: a\r\nOrigin: http://evil.example\r\n\r\n").status ==
          403);
    CHECK(common().client().call("GET /v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n").status == 200); // no browser
    const Server keyed({"--api-key", "k"}); // a key is enough
    CHECK(keyed.client().call("GET /v1/models HTTP/1.1\r\nHost: box.example\r\nX-Api-Key: k\r\n\r\n").status == 200);
}

TEST_CASE("without a key, pages of other origins cannot do anything", "[server]") {
    const auto post = [](const std::string& path, const std::string& headers, const Server& s = common()) {
        const std::string body =
            R"({"prompt":"a page's words","max_tokens":1,"messages":[{"role":"user","content":"a"}]})";
        return s.client()
            .call("POST " + path + " HTTP/1.1\r\nHost: 127.0.0.1:8080\r\n" + headers +
                  "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body)
            .status;
    };
    const std::string json = "Content-Type: application/json\r\n", text = "Content-Type: text/plain;charset=UTF-8\r\n",
                      form = "Content-Type: application/x-www-form-urlencoded\r\n";
    for (const char* path : {"/v1/completions", "/completions", "/v1/chat/completions", "/pin", "/unpin", "/tokenize",
                             "/v1/tokenize", "/detokenize", "/v1/embeddings", "/apply-template"}) {
        INFO(path);
        for (const std::string& type : {json, text, form, std::string()}) {
            CHECK(post(path, type + "Origin: http://evil.example\r\n") == 403);
            CHECK(post(path, type + "Origin: null\r\n") == 403);
            CHECK(post(path, type + "Origin: http://127.0.0.1:9090\r\n") == 403); // another port
            CHECK(post(path, type + "Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: no-cors\r\n") == 403);
        }
        // Were there a browser that sends no Origin: what a page can send without asking is not JSON.
        CHECK(post(path, text) == 415);
        CHECK(post(path, "Content-Type: multipart/form-data; boundary=x\r\n") == 415);
        CHECK(post(path, form + "User-Agent: Mozilla/5.0\r\n") == 415);
        CHECK(post(path, "User-Agent: Mozilla/5.0\r\n") == 415);
    }
    CHECK(Json::parse(common().get("/pins").body)["data"].empty());
    // Its own pages, and programs as they are: curl -d, urllib, requests.
    CHECK(post("/tokenize", json + "Origin: http://127.0.0.1:8080\r\nSec-Fetch-Site: same-origin\r\n") ==
          400);                                                                        // two texts
    CHECK(post("/v1/completions", json + "Origin: http://127.0.0.1:8080\r\n") == 400); // likewise
    CHECK(post("/v1/embeddings", json) == 400);                                        // no input
    for (const std::string& type :
         {json, form, std::string(), std::string("Content-Type: application/vnd.api+json\r\n")})
        CHECK(common()
                  .client()
                  .call("POST /tokenize HTTP/1.1\r\nHost: localhost\r\n" + type +
                        "Content-Length: 14\r\n\r\n{\"prompt\":\"a\"}")
                  .status == 200);
    // A link is followed, a picture or a script is not.
    const auto get = [](const std::string& headers) { return common().get("/metrics", headers).status; };
    CHECK(get("Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: navigate\r\nSec-Fetch-Dest: document\r\n") ==
          403); // Host: x
    const auto local = [](const std::string& headers) {
        return common().client().call("GET /metrics HTTP/1.1\r\nHost: localhost\r\n" + headers + "\r\n").status;
    };
    CHECK(local("Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: navigate\r\nSec-Fetch-Dest: document\r\n") == 200);
    CHECK(local("Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: navigate\r\nSec-Fetch-Dest: iframe\r\n") == 403);
    CHECK(local("Sec-Fetch-Site: same-site\r\nSec-Fetch-Mode: no-cors\r\n") == 403);
    CHECK(local("Sec-Fetch-Site: same-origin\r\nSec-Fetch-Mode: cors\r\n") == 200);
    // The host of the target counts, not that of the header.
    CHECK(common()
              .client()
              .call("GET http://evil.example/v1/models HTTP/1.1\r\nHost: localhost\r\nUser-Agent: Mozilla/5.0\r\n\r\n")
              .status == 403);
    // Behind a proxy: what browsers see is named, or sent by the proxy.
    const Server named({"--cors-origins", "https://chat.example/"});
    const auto   through = [&](const std::string& headers) {
        return named.client().call("GET /v1/models HTTP/1.1\r\n" + headers + "User-Agent: Mozilla/5.0\r\n\r\n").status;
    };
    CHECK(through("Host: chat.example\r\nOrigin: https://chat.example\r\n") == 200);
    CHECK(through("Host: chat.example\r\n") == 200);
    CHECK(through("Host: 127.0.0.1:8080\r\nOrigin: https://chat.example\r\n") == 200);
    CHECK(through("Host: evil.example\r\n") == 403);
    CHECK(post("/tokenize", json + "Origin: https://other.example\r\nX-Forwarded-Host: other.example, inner\r\n") ==
          400);
    CHECK(post("/tokenize", json + "Origin: https://evil.example\r\nX-Forwarded-Host: other.example\r\n") == 403);
    CHECK(post("/tokenize", json + "Origin: https://anybody.example\r\n", Server({"--cors-origins", "*"})) == 400);
}

TEST_CASE("no route minds how long a name in its path is, with and without a key", "[server]") {
    const Server s({"--api-key", "secret"});
    const Json   paths = Json::parse(s.get("/openapi.json", "X-Api-Key: secret\r\n").body)["paths"];
    for (std::string path : {"/v1/responses/{id}", "/responses/{id}/input_items", "/slots/{id}"})
        CHECK(paths.contains(path));
    for (const auto& [path, methods] : paths.items()) {
        const std::size_t at     = path.find("{id}");
        std::string       target = at == std::string::npos ? path + "/" : path.substr(0, at) + path.substr(at + 4);
        target.insert(std::min(at, target.size()), 4096 - target.size(), 'a');
        for (const std::string method : {"GET", "HEAD", "POST", "DELETE", "PUT"})
            for (const char* key : {"", "X-Api-Key: secret\r\n"}) {
                Client c = s.client();
                c.send(method + " " + target + " HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n" + key + "\r\n");
                const int status = c.reply(method != "HEAD").status;
                INFO(method << ' ' << path << ' ' << key);
                CHECK((status == 401 || status == 404 || status == 405 || (status == 501 && *key != 0)));
            }
    }
    CHECK(s.get("/v1/responses/" + std::string(8000, 'a')).status == 414);
    for (const char* line :
         {"PUT /v1/responses/x", "POST /responses/x", "GET /slots/0", "DELETE /responses/x/input_items"})
        CHECK(s.client().call(std::string(line) + " HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n").status == 405);
    CHECK(s.get("/health").status == 200);
}

TEST_CASE("CORS is off unless asked for", "[server]") {
    CHECK(!common().get("/health", "Origin: http://evil\r\n").headers.contains("access-control-allow-origin"));
    CHECK(common().client().call("OPTIONS /v1/completions HTTP/1.1\r\nHost: x\r\nOrigin: http://evil\r\n\r\n").status ==
          405);
    const Server s({"--cors-origins", "http://good,http://better", "--api-key", "k"});
    CHECK(s.get("/health", "Origin: http://good\r\n").headers.at("access-control-allow-origin") == "http://good");
    CHECK(!s.get("/health", "Origin: http://evil\r\n").headers.contains("access-control-allow-origin"));
    const Reply r =
        s.client().call("OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: x\r\nOrigin: http://better\r\n\r\n");
    CHECK(r.status == 204);
    for (const char* name : {"Authorization", "X-Api-Key", "X-Stainless-OS", "X-Stainless-Retry-Count", "Content-Type"})
        CHECK(has(r.headers.at("access-control-allow-headers"), name));
    // Every route, and whatever a listed page asks for.
    for (const char* path : {"/pin", "/v1/tokenize", "/v1/models", "/pins"}) {
        const Reply asked = s.client().call("OPTIONS " + std::string(path) +
                                            " HTTP/1.1\r\nHost: x\r\nOrigin: http://good\r\n"
                                            "Access-Control-Request-Headers: x-of-tomorrow,x-other\r\n\r\n");
        CHECK(asked.status == 204);
        CHECK(asked.headers.at("access-control-allow-origin") == "http://good");
        CHECK(has(asked.headers.at("access-control-allow-headers"), "x-of-tomorrow,x-other"));
        CHECK(s.client()
                  .call("OPTIONS " + std::string(path) + " HTTP/1.1\r\nHost: x\r\nOrigin: http://evil\r\n\r\n")
                  .status == 403);
    }
    CHECK(has(s.get("/v1/models", "Origin: http://good\r\n").headers.at("access-control-expose-headers"),
              "X-Request-Id"));
}

TEST_CASE("origins are a list with commas or vLLM's JSON list", "[server]") {
    const auto allowed = [](const Server& s, const std::string& origin) {
        return s.get("/health", "Origin: " + origin + "\r\n").headers.contains("access-control-allow-origin");
    };
    const Server all({"--allowed-origins", R"(["*"])"});
    CHECK(allowed(all, "http://anybody"));
    const Server two({"--cors-origins", R"( ["http://good", "http://better/"])"});
    CHECK(allowed(two, "http://good"));
    CHECK(allowed(two, "http://better"));
    CHECK(!allowed(two, "http://evil"));
    for (const char* wrong : {R"(["*)", "[*]", "[1]", R"(["a"], "b")", R"([["*"]])"}) {
        const Finished f = run_program("server", {"--allowed-origins", wrong});
        INFO(wrong << ": " << f.err);
        CHECK(f.code == 2);
        CHECK(f.err.ends_with("Z error server: --cors-origins: '" + std::string(wrong) +
                              "' is not a JSON list of strings, such as [\"https://chat.example\"]\n"));
    }
}

TEST_CASE("the pages are whole, open to all, and fetch from nobody else", "[server]") {
    const Server s({"--api-key", "secret"});
    for (const char* path : {"/", "/blocks.html", "/?utm=1"}) {
        const Reply page = s.get(path);
        INFO(path);
        CHECK(page.status == 200); // without the key
        CHECK(page.headers.at("content-type") == "text/html; charset=utf-8");
        CHECK(page.headers.at("content-length") == std::to_string(page.body.size()));
        CHECK(page.headers.at("x-content-type-options") == "nosniff");
        CHECK(page.body.starts_with("<!doctype html>"));
        CHECK(page.body.ends_with("</html>\n"));
        const std::string& policy = page.headers.at("content-security-policy");
        CHECK(has(policy, "default-src 'none'; script-src 'sha256-"));
        CHECK(has(policy, "; connect-src 'self';"));
        CHECK(!has(policy, "unsafe"));
        // One script and one style, named in the policy by their hashes; no handler or style that it would refuse. What the
        // chat's libraries are is named, too.
        std::string own = page.body;
        if (const std::size_t at = own.find("<script src=\"/libraries.js?"); at != std::string::npos) {
            const std::size_t begin = own.find("integrity=\"", at) + 11, end = own.find("\"></script>\n", begin);
            CHECK(has(policy, "'" + own.substr(begin, end - begin) + "'"));
            own.erase(at, end + 12 - at);
        }
        for (const char* tag : {"<script", "<style"}) CHECK(own.find(tag) == own.rfind(std::string(tag) + ">"));
        for (const char* part : {" style=\"", " onclick=\"", " onload=\"", "innerHTML =", ".js@", ".css@", "@ICON@",
                                 "@LIBRARIES@", "@import"})
            CHECK(!has(page.body, part));
        // The one address is SVG's name; what begins one is compared with, not fetched.
        for (std::size_t at = 0; (at = page.body.find("://", at)) != std::string::npos; at++) {
            const std::string address = page.body.substr(at - 5, 32);
            INFO(address);
            CHECK((has(address, "://www.w3.org/2000/svg") || has(address, "http://\"") || has(address, "https://\"")));
        }
        const std::string head = s.client().call("HEAD " + std::string(path) + " HTTP/1.0\r\n\r\n").body;
        CHECK(head.empty());
    }
    for (const auto& [path, type] :
         {std::pair{"/libraries.js?x", "text/javascript; charset=utf-8"}, std::pair{"/icon.svg", "image/svg+xml"},
          std::pair{"/manifest.webmanifest", "application/manifest+json"}}) {
        const Reply part = s.get(path);
        CHECK(part.status == 200);
        CHECK(part.headers.at("content-type") == type);
        CHECK(part.headers.at("content-security-policy") == "default-src 'none'");
    }
    CHECK(s.get("/props").status == 401);
    CHECK(s.get("/blocks/events?changes=1").status == 401);
    CHECK(s.client().post("/v1/chat/completions", "{}").status == 401);
    const Server bare({"--no-pages"});
    CHECK(bare.get("/").status == 404);
    CHECK(bare.get("/blocks.html").status == 404);
    CHECK(bare.get("/blocks").status == 200);
}
