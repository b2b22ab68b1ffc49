// The HTTP layer: parsing of requests, and raw sockets that behave as no good client would.
#include <catch2/catch_test_macros.hpp>

#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "http_client.h"
#include "process.h"

import quire.core.base;
import quire.serve.http.exchange;
import quire.serve.http.parser;
import quire.serve.http.server;
import quire.serve.memory_semaphore;

using namespace quire;
using namespace quire::testing;

namespace {

int status_of(const std::string& text, HttpLimits limits = {}) {
    const auto head = parse_http_head(text, limits);
    return head ? 200 : head.error().status;
}

struct Chunks {
    int         status = 0; // 0: not at its end
    std::string body;
};

// Fed in pieces of that many bytes.
Chunks dechunk(const std::string& text, std::size_t piece, HttpLimits limits = {}) {
    ChunkDecoder decoder;
    Chunks       out;
    std::string  in;
    for (std::size_t from = 0; from < text.size(); from += piece) {
        in += text.substr(from, piece);
        std::size_t at   = 0;
        const auto  done = decoder.feed(in, at, out.body, limits);
        in.erase(0, at);
        if (!done) out.status = done.error().status;
        else if (*done) out.status = 200;
        if (out.status != 0) break;
    }
    return out;
}

// A server that says what it was asked.
struct Echo {
    std::unique_ptr<HttpServer> server;
    int                         port = 0;
    std::atomic<int>            gone = 0, begun = 0;

    explicit Echo(HttpLimits limits = {}) {
        HttpOptions options;
        options.limits   = limits;
        options.is_probe = [](std::string_view path) { return path == "/health"; };
        auto made        = HttpServer::create(options);
        REQUIRE(made.has_value());
        server = std::move(*made);
        server->route("POST", "/echo", [](HttpExchange& e) {
            e.response.type = "text/plain";
            e.response.body = e.request.body;
        });
        const HttpHandler guarded = [](HttpExchange& e) {
            e.response.status = e.request.header("x-key").empty() ? 401 : 200;
            e.response.body   = cat(e.request.body.size());
        };
        server->route("POST", "/guarded", guarded, [](HttpExchange& e) { return !e.request.header("x-key").empty(); });
        server->route("GET", "/query", [](HttpExchange& e) {
            for (const auto& [key, value] : e.request.query) e.response.body += key + "=" + value + ";";
            e.response.body += std::string(e.request.header("x-test"));
        });
        const HttpHandler says_path = [](HttpExchange& e) { e.response.body = e.request.path; };
        server->route("GET", "/health", says_path);
        server->route("GET", "/items/*", says_path);
        server->route("DELETE", "/items/*", says_path);
        server->route("POST", "/items/first", says_path);
        server->route("GET", "/items/*/parts", says_path);
        server->route("GET", "/all/**", says_path);
        server->route("GET", "/three", [](HttpExchange& e) {
            e.response.type   = "text/plain";
            e.response.stream = [](const HttpWrite& write) {
                for (const char* word : {"one ", "two ", "three"}) write(word);
            };
        });
        server->route("GET", "/gone", [](HttpExchange& e) { e.response.status = 499, e.response.body = "gone"; });
        server->route("GET", "/starves", [](HttpExchange&) { throw std::bad_alloc(); });
        server->route("GET", "/throws", [](HttpExchange&) { throw std::runtime_error("secret"); });
        // Never ends, until the other side goes.
        server->route("GET", "/wait", [this](HttpExchange& e) {
            auto over = std::make_shared<std::atomic<bool>>(false);
            e.peer->when_gone([over] { *over = true; });
            begun++;
            while (!*over) std::this_thread::sleep_for(std::chrono::milliseconds(1));
            gone++;
        });
        // As much as anybody reads.
        server->route("GET", "/flood", [this](HttpExchange& e) {
            e.response.type   = "text/plain";
            e.response.stream = [this](const HttpWrite& write) {
                const std::string piece(65536, 'x');
                begun++;
                while (write(piece)) {}
                gone++;
            };
        });
        Result<int> listening = server->listen("127.0.0.1", 0);
        REQUIRE(listening.has_value());
        port = *listening;
        server->start();
    }
    // Whether somebody still gets answers.
    bool alive() const { return Client(port).post("/echo", "still here").body == "still here"; }
};

void wait_for(const std::atomic<int>& value, int least) {
    while (value < least) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

} // namespace

TEST_CASE("heads that can be read in one way only", "[http]") {
    const std::string get = "GET / HTTP/1.1\r\nHost: x\r\n", post = "POST / HTTP/1.1\r\nHost: x\r\n";
    CHECK(status_of(get + "\r\n") == 200);
    CHECK(status_of("GET / HTTP/1.1\r\n\r\n") == 400); // no Host
    for (const char* host : {"a b", "a/b", "a@b", "<a>", "a\xc3\xa4"})
        CHECK(status_of(std::string("GET / HTTP/1.1\r\nHost: ") + host + "\r\n\r\n") == 400);
    for (const char* host : {"", "a", "a.b-c:80", "[::1]:8080", "127.0.0.1"})
        CHECK(status_of(std::string("GET / HTTP/1.1\r\nHost: ") + host + "\r\n\r\n") == 200);
    CHECK(status_of("GET /a?b=%20 HTTP/1.0\r\n\r\n") == 200);
    for (const char* line :
         {"GET / HTTP/1.1 \r\n", "GET  / HTTP/1.1\r\nHost: x\r\n", "GET /\r\n", " GET / HTTP/1.1\r\nHost: x\r\n",
          "\r\n", "G\x01T / HTTP/1.1\r\n", "GET x HTTP/1.1\r\nHost: x\r\n", "GET http:///a HTTP/1.1\r\nHost: x\r\n",
          "GET http://a@b/ HTTP/1.1\r\nHost: x\r\n", "GET ftp://b/ HTTP/1.1\r\nHost: x\r\n",
          "CONNECT x:1 HTTP/1.1\r\nHost: x\r\n", "GET /\x7f HTTP/1.1\r\nHost: x\r\n",
          "GET /\xc3\xa4 HTTP/1.1\r\nHost: x\r\n", "GET / HTTQ/1.1\r\n", "AVERYLONGMETHODNAME / HTTP/1.1\r\n"}) {
        INFO(line);
        CHECK(status_of(std::string(line) + "\r\n") == 400);
    }
    CHECK(status_of("GET / HTTP/2.0\r\n\r\n") == 505);
    CHECK(status_of("GET /" + std::string(5000, 'a') + " HTTP/1.1\r\n\r\n") == 414);
    for (const char* header : {"Content-Length: 1\r\nContent-Length: 1\r\n",
                               "Content-Length: 1, 1\r\n",
                               "Content-Length: -1\r\n",
                               "Content-Length: +1\r\n",
                               "Content-Length: 0x10\r\n",
                               "Content-Length: 1 \x01\r\n",
                               "Content-Length:\r\n",
                               "Content-Length: 1a\r\n",
                               "Content-Length: 99999999999999999999\r\n",
                               "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
                               "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
                               "Origin: http://x\r\nOrigin: http://y\r\n",
                               "Host: a\r\nHost: b\r\n",
                               "Name : x\r\n",
                               " folded: x\r\n",
                               "A: b\r\n folded\r\n",
                               "no colon\r\n",
                               ": empty\r\n",
                               "A: b\rC: d\r\n",
                               "A: b\x01\r\n",
                               "N\xc3\xa4me: x\r\n"}) {
        INFO(header);
        CHECK(status_of(post + header + "\r\n") == 400);
    }
    CHECK(status_of(post + std::string("A: b\0c\r\n\r\n", 11)) == 400);
    CHECK(status_of("POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n") == 400);
    CHECK(status_of(post + "Transfer-Encoding: gzip, chunked\r\n\r\n") == 501);
    CHECK(status_of(post + "Content-Encoding: gzip\r\n\r\n") == 415);
    CHECK(status_of(post + "Expect: a miracle\r\n\r\n") == 417);
    CHECK(status_of(post + "Content-Length: 99999999999\r\n\r\n") == 413);
    HttpLimits few;
    few.headers = 4;
    CHECK(status_of(get + "A: 1\r\nB: 2\r\nC: 3\r\n\r\n", few) == 200);
    CHECK(status_of(get + "A: 1\r\nB: 2\r\nC: 3\r\nD: 4\r\n\r\n", few) == 431);
    CHECK(status_of(get + "A: " + std::string(40000, 'a') + "\r\n\r\n") == 431);

    const auto head =
        parse_http_head("POST /p HTTP/1.1\r\nHost: x\r\nX-One:  two \t\r\nCONTENT-length: 12\r\n\r\n", {});
    REQUIRE(head.has_value());
    CHECK(head->headers == HttpFields{{"host", "x"}, {"x-one", "two"}, {"content-length", "12"}});
    CHECK(head->length == 12);
    CHECK(head->keep_alive);
    CHECK(!parse_http_head("GET / HTTP/1.1\r\nHost: x\r\nConnection: Close\r\n\r\n", {})->keep_alive);
    CHECK(!parse_http_head("GET / HTTP/1.0\r\n\r\n", {})->keep_alive);
    // As proxies get it: the host of the target is the one that counts.
    for (const auto& [target, path, host] :
         std::vector<std::array<std::string, 3>>{{"http://a:1/p?q=/", "/p?q=/", "a:1"},
                                                 {"HTTPS://[::1]", "/", "[::1]"},
                                                 {"http://a?q", "/?q", "a"},
                                                 {"/http://a/", "/http://a/", "x"}}) {
        const auto absolute = parse_http_head("GET " + target + " HTTP/1.1\r\nHost: x\r\n\r\n", {});
        REQUIRE(absolute.has_value());
        CHECK(absolute->target == path);
        CHECK(absolute->headers == HttpFields{{"host", host}});
    }
}

TEST_CASE("chunked bodies", "[http]") {
    const std::string good = "5\r\nHello\r\n1;name=value\r\n,\r\nB\r\n how are yo\r\n0\r\nTrailer: x\r\n\r\n";
    for (std::size_t piece : {std::size_t(1), std::size_t(2), std::size_t(3), std::size_t(7), good.size()}) {
        const Chunks c = dechunk(good, piece);
        CHECK(c.status == 200);
        CHECK(c.body == "Hello, how are yo");
    }
    for (const char* bad : {"-2\r\nxx\r\n", "-1\r\n", "g\r\n", "\r\n", "0x5\r\nHello\r\n", "+5\r\nHello\r\n",
                            " 5\r\nHello\r\n", "5\r\nHelloo\r\n", "5\r\nHello5\r\nHello\r\n", "5 5\r\n\r\n\r\n",
                            "5;x\n=y\r\nHello\r\n", "5;x\r=y\r\nHello\r\n", "0\r\nTrailer: x\ny: z\r\n\r\n"}) {
        INFO(bad);
        for (std::size_t piece : {std::size_t(1), std::size_t(1000)}) CHECK(dechunk(bad, piece).status == 400);
    }
    for (const char* large : {"FFFFFFFFFFFFFFFF\r\n", "FFFFFFFFFFFFFFFFFFFFFFFF\r\n", "7FFFFFFF\r\n"})
        CHECK(dechunk(large, 1).status == 413);
    HttpLimits small;
    small.body_bytes = 8;
    CHECK(dechunk("5\r\nHello\r\n3\r\nyou\r\n0\r\n\r\n", 4, small).status == 200);
    CHECK(dechunk("5\r\nHello\r\n4\r\nyou!\r\n0\r\n\r\n", 4, small).status == 413);
    CHECK(dechunk("5" + std::string(1000, ' '), 100).status == 400);       // a line without an end
    CHECK(dechunk("0\r\n" + std::string(70000, 'a'), 1000).status == 400); // likewise a trailer
    std::string trailers = "0\r\n";
    for (int i = 0; i < 5000; i++) trailers += "Trailer: x\r\n";
    CHECK(dechunk(trailers, 1000).status == 431);
}

TEST_CASE("requests and responses", "[http]") {
    Echo   echo;
    Client c(echo.port);
    SECTION("one connection, many requests") {
        for (int i = 0; i < 10; i++)
            CHECK(c.post("/echo", "hello " + std::to_string(i)).body == "hello " + std::to_string(i));
        CHECK(echo.server->n_connections() == 1);
    }
    SECTION("several at once on one connection are answered in order") {
        c.send(Client::request("/echo", "one") + Client::request("/echo", "two") +
               "GET /query?a=b HTTP/1.1\r\nHost: x\r\n\r\n");
        CHECK(c.reply().body == "one");
        CHECK(c.reply().body == "two");
        CHECK(c.reply().body == "a=b;");
    }
    SECTION("byte by byte") {
        for (char byte : Client::request("/echo", "slow")) c.send(std::string(1, byte));
        CHECK(c.reply().body == "slow");
    }
    SECTION("chunks") {
        CHECK(
            c.call(
                 "POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")
                .body == "abcde");
        CHECK(c.post("/echo", "the next one").body == "the next one");
    }
    SECTION("expect") {
        c.send("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n");
        CHECK(c.head().status == 100);
        c.send("body");
        CHECK(c.reply().body == "body");
    }
    SECTION("queries and headers") {
        CHECK(c.get("/query?a=%20x&b=y+z", "X-Test: %0d%0aa%20b\r\n").body == "a= x;b=y z;%0d%0aa%20b");
        CHECK(c.get("/query", "Range: bytes=0-0,1-1,2-2\r\nREMOTE_ADDR: 1.2.3.4\r\n").status == 200);
    }
    SECTION("a large body") {
        const std::string large(3 << 20, 'L');
        CHECK(c.post("/echo", large).body == large);
    }
    SECTION("a stream") {
        CHECK(c.get("/three").body == "one two three");
        CHECK(c.get("/query").status == 200); // the connection goes on
        const Reply old = Client(echo.port).call("GET /three HTTP/1.0\r\n\r\n");
        CHECK(!old.headers.contains("transfer-encoding")); // HTTP/1.0 knows no chunks
        CHECK(old.body == "one two three");
    }
    SECTION("ids") {
        CHECK(c.get("/query", "X-Request-Id: my-id.1\r\n").headers["x-request-id"] == "my-id.1");
        const std::string made = c.get("/query", "X-Request-Id: a%0d%0ab\r\n").headers["x-request-id"];
        CHECK(made.size() == 16); // what could not be echoed is replaced
        CHECK(c.get("/query").headers["x-request-id"] != made);
    }
    SECTION("methods and paths") {
        CHECK(c.get("/nothing").status == 404);
        CHECK(c.get("/echo").status == 405);
        CHECK(c.call("FETCH /echo HTTP/1.1\r\nHost: x\r\n\r\n").status == 405);
        c.send("HEAD /query HTTP/1.1\r\nHost: x\r\n\r\n");
        const Reply head = c.reply(false);
        CHECK(head.status == 200);
        CHECK(!head.headers.contains("accept-ranges")); // ranges are ignored
        c.send("GET /gone HTTP/1.1\r\nHost: x\r\n\r\n");
        CHECK(c.until("\r\n") == "HTTP/1.1 499 Client Closed Request\r\n");
        CHECK(c.until("\r\n\r\ngone").find("Content-Length: 4\r\n") != std::string::npos);
        CHECK(c.get("/query").status == 200);
        CHECK(Client(echo.port).get("/" + std::string(3000, 'a')).status == 404);
        CHECK(Client(echo.port).get("/%00%ff/../../etc/passwd").status == 404);
    }
    SECTION("segments that may be any") {
        for (const char* path : {"/items/x", "/items/x/parts", "/all/a", "/all/a/b/c", "/all/a/"})
            CHECK(c.get(path).body == path);
        CHECK(c.get("/items/a%20b").body == "/items/a b"); // a handler gets it decoded
        for (const char* path : {"/items", "/items/", "/items//parts", "/items/x/", "/items/x/y", "/items/x/parts/",
                                 "/items/a%2Fb", "/all", "/all/", "/allx", "/x/items/y"})
            CHECK(c.get(path).status == 404);
        CHECK(c.get("/items/first").status == 200); // a path that has another method alone, and is one of a pattern
        CHECK(c.post("/items/first", "").status == 200);
        const auto refused = [&](const char* method, const char* path) {
            const Reply r = c.call(cat(method, ' ', path, " HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"));
            CHECK(r.status == 405);
            return r.headers.at("allow");
        };
        CHECK(refused("PUT", "/items/x") == "GET, DELETE");
        CHECK(refused("FETCH", "/items/x/parts") == "GET");
        CHECK(refused("PUT", "/items/first") == "POST, GET, DELETE");
        CHECK(refused("POST", "/all/a/b") == "GET");
    }
    SECTION("the text of a handler's exception is not sent") {
        const Reply r = c.get("/throws");
        CHECK(r.status == 500);
        CHECK(r.body.find("secret") == std::string::npos);
        for (const auto& [key, value] : r.headers) CHECK(value.find("secret") == std::string::npos);
    }
    SECTION("close") {
        const Reply r = c.get("/query", "Connection: close\r\n");
        CHECK(r.headers.at("connection") == "close");
        CHECK(c.rest().empty());
    }
}

TEST_CASE("a path may be as long as the limit of a target", "[http]") {
    HttpLimits limits;
    limits.target_bytes = 8192; // as long as cpp-httplib takes it
    Echo echo(limits);
    for (const std::size_t size : {1750u, 4096u, 8000u})
        for (const std::string& path : {"/items/" + std::string(size, 'a'), "/all/" + std::string(size, '/'),
                                        "/items/" + std::string(size, '*') + "/parts"}) {
            CHECK(Client(echo.port).get(path).body == path);
            CHECK(Client(echo.port).get("/x" + path).status == 404);
            CHECK(Client(echo.port).post(path, "").status == 405);
        }
    CHECK(Client(echo.port).get("/items/" + std::string(8192, 'a')).status == 414);
    CHECK(echo.alive());
}

TEST_CASE("refusals reach their client and affect no other", "[http]") {
    HttpLimits limits;
    limits.body_bytes = 1000;
    limits.head_bytes = 2000;
    limits.headers    = 20;
    Echo       echo(limits);
    const auto raw = [&](const std::string& text) { return Client(echo.port).call(text).status; };
    CHECK(raw("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n" + std::string(100000, 'x')) == 413);
    CHECK(raw("POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n-2\r\n") == 400);
    CHECK(raw("POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFF\r\n") == 413);
    std::string many = "POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n";
    for (int i = 0; i < 1001; i++) many += "1\r\nx\r\n";
    CHECK(raw(many) == 413);
    CHECK(raw("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n") ==
          400);
    CHECK(raw("GET /query HTTP/1.1\r\nHost: x\r\nA: " + std::string(3000, 'a')) == 431);
    CHECK(raw("GET /" + std::string(3000, 'a')) == 414);
    std::string flood = "GET /query HTTP/1.1\r\nHost: x\r\n";
    for (int i = 0; i < 21; i++) flood += "A: b\r\n";
    CHECK(raw(flood + "\r\n") == 431);
    CHECK(raw("GET /query HTTP/1.1\nHost: x\n\n") == 400);
    CHECK(raw(std::string("\0\0\0\0\0\0", 6)) == 400);
    CHECK(raw("\x16\x03\x01\x02\x01\x01\xfc\x03\x03\n\n") == 400); // somebody speaks TLS
    CHECK(raw("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") == 505);
    CHECK(echo.alive());
}

TEST_CASE("slow and idle connections are let go", "[http]") {
    HttpLimits limits;
    limits.request_seconds = 0.3;
    limits.idle_seconds    = 0.6;
    Echo   echo(limits);
    Client slow(echo.port), slower(echo.port), idle(echo.port);
    slow.send("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nsome");
    // A byte now and then does not help: the sum counts.
    const std::string head = "GET /query HTTP/1.1\r\nHost: x\r\nA: ";
    slower.send(head);
    for (int i = 0; i < 20; i++) {
        slower.send("a");
        std::this_thread::sleep_for(std::chrono::milliseconds(30));
    }
    CHECK(slow.reply().status == 408);
    CHECK(slower.reply().status == 408);
    CHECK(idle.rest().empty());
    CHECK(echo.alive());
}

TEST_CASE("empty lines before a request are few, and no sign of life", "[http]") {
    HttpLimits limits;
    limits.idle_seconds = 0.3;
    Echo        echo(limits);
    std::string lines;
    for (int i = 0; i < 16; i++) lines += "\r\n";
    Client c(echo.port);
    for (int i = 0; i < 2; i++) {
        c.send("\r");
        c.send("\n");
        CHECK(c.post("/echo", "after a line").body == "after a line");
    }
    CHECK(Client(echo.port).call(lines + Client::request("/echo", "after many")).body == "after many");
    CHECK(Client(echo.port).call(lines + "\r\n" + Client::request("/echo", "too many")).status == 400);
    std::string flood;
    for (int i = 0; i < 1 << 20; i++) flood += "\r\n";
    CHECK(Client(echo.port).call(flood).status == 400);
    Client endless(echo.port);
    int    sent = 0;
    while (sent < 100 && endless.send(flood)) sent++; // 2 MiB each
    CHECK(sent < 100);                                // nobody reads that much
    // Whoever sends nothing else is idle.
    Client dull(echo.port);
    char   byte  = 0;
    bool   ended = false;
    for (int i = 0; i < 12 && !ended; i++) {
        dull.send("\r\n");
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        ended = recv(dull.fd(), &byte, 1, MSG_DONTWAIT) == 0;
    }
    CHECK(ended);
    CHECK(echo.alive());
}

TEST_CASE("a sending side that is closed is a client that has gone, but what came whole is answered", "[http]") {
    Echo echo;
    for (const std::string& body : {std::string("short"), std::string(3 << 20, 'x')}) {
        Client c(echo.port);
        c.send(Client::request("/echo", body));
        shutdown(c.fd(), SHUT_WR);
        CHECK(c.reply().body == body);
        CHECK(c.rest().empty());
    }
    Client chunks(echo.port), waits(echo.port), half(echo.port);
    chunks.send("POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n");
    chunks.send("3\r\nabc\r\n0\r\n\r\n");
    shutdown(chunks.fd(), SHUT_WR);
    CHECK(chunks.reply().body == "abc");
    waits.send("GET /wait HTTP/1.1\r\nHost: x\r\n\r\n");
    shutdown(waits.fd(), SHUT_WR);
    wait_for(echo.gone, 1); // noticed though the other side still reads
    half.send("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nhalf");
    shutdown(half.fd(), SHUT_WR);
    CHECK(half.rest().empty());
    CHECK(echo.alive());
}

TEST_CASE("bytes count until their request is answered", "[http]") {
    HttpLimits limits;
    limits.buffered_bytes = 1'000'000;
    Echo              echo(limits);
    const std::string body(600'000, 'x');
    {
        Client held(echo.port);
        held.send("GET /wait HTTP/1.1\r\nHost: x\r\nContent-Length: 600000\r\n\r\n" + body);
        wait_for(echo.begun, 1);
        CHECK(Client(echo.port).post("/echo", body).status == 503);
        CHECK(Client(echo.port).post("/echo", std::string(65536, 'x')).status ==
              200); // small ones have room of their own
        CHECK(echo.alive());
    }
    wait_for(echo.gone, 1);
    while (echo.server->n_answering() > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    while (Client(echo.port).post("/echo", body).status != 200)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

TEST_CASE("a handler without memory is a 503 for its request alone", "[http]") {
    Echo        echo;
    const Reply r = Client(echo.port).get("/starves");
    CHECK(r.status == 503);
    CHECK(r.headers.at("retry-after") == "1");
    CHECK(echo.alive());
}

TEST_CASE("thousands of idle connections delay no request", "[http]") {
    rlimit limit{};
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    const int           n = int(std::min<rlim_t>(2000, limit.rlim_cur / 2 - 100)); // both ends are in this process
    Echo                echo;
    std::vector<Client> idle;
    for (int i = 0; i < n; i++) {
        idle.emplace_back(echo.port);
        REQUIRE(idle.back().connected());
        if (i % 2 == 0) idle.back().send("GET /query HTTP/1.1\r\nHost: x\r\nA"); // half of them begin to speak
    }
    CHECK(echo.alive());
    CHECK(echo.server->n_threads() <= 4); // none of them has one
    for (int i = 1; i < n; i += 400) CHECK(idle[std::size_t(i)].post("/echo", "awake").body == "awake");
}

TEST_CASE("beyond the most connections an idle one makes room, else 503", "[http]") {
    HttpLimits limits;
    limits.connections = 4;
    Echo                echo(limits);
    std::vector<Client> idle;
    for (int i = 0; i < 4; i++) {
        idle.emplace_back(echo.port);
        CHECK(idle.back().get("/query").status == 200);
    }
    while (echo.server->n_answering() > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    CHECK(echo.alive());
    for (int i = 0; i < 4; i++) { // four that have begun
        idle.emplace_back(echo.port);
        idle.back().send("GET /wait HTTP/1.1\r\nHost: x\r\n\r\n");
        wait_for(echo.begun, i + 1);
    }
    const Reply r = Client(echo.port).get("/query");
    CHECK(r.status == 503);
    CHECK(r.headers.at("retry-after") == "1");
    idle.pop_back();
    wait_for(echo.gone, 1);
    while (echo.server->n_connections() > 3) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    Client late(echo.port);
    late.send("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n");
    CHECK(late.head().status == 100);
    Client refused(echo.port);
    CHECK(refused.get("/query").status == 503);
    late.send("ok");
    CHECK(late.reply().body == "ok");
    while (echo.server->n_answering() > 3) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    CHECK(Client(echo.port).get("/query").status == 200); // the late one makes room, the refused one is still there
    idle.clear();
    wait_for(echo.gone, 4);
    while (echo.server->n_connections() > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    CHECK(echo.alive());
}

TEST_CASE("probes of the health are answered where requests have taken all threads and connections", "[http]") {
    HttpLimits limits;
    limits.connections = 6;
    limits.threads     = 4;
    Echo                echo(limits);
    const std::string   probe = "GET /health HTTP/1.1\r\nHost: x\r\n\r\n";
    std::vector<Client> busy;
    for (int i = 0; i < 6; i++) { // four that are read slowly or wait, and two that wait for a thread
        busy.emplace_back(echo.port);
        busy.back().send(cat("GET ", i % 2 == 0 ? "/flood" : "/wait", " HTTP/1.1\r\nHost: x\r\n\r\n"));
        wait_for(echo.begun, std::min(i + 1, 4));
    }
    while (echo.server->n_answering() < 6) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    for (int i = 0; i < 20; i++) {
        const Reply r = Client(echo.port).call(probe);
        CHECK(r.status == 200);
        CHECK(r.body == "/health");
    }
    CHECK(Client(echo.port).get("/query").status == 503);
    CHECK(Client(echo.port).call("POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n").status == 503);
    std::vector<Client> silent;
    for (int i = 0; i < 16; i++) silent.emplace_back(echo.port); // they keep such a connection for a moment only
    Reply r;
    while (r.status != 200) r = Client(echo.port).call(probe);
    std::string many; // of a client that reads nothing
    for (int i = 0; i < 1000; i++) many += probe;
    Client deaf(echo.port);
    deaf.send(many);
    CHECK(Client(echo.port).call(probe).status == 200);
    busy.clear();
    wait_for(echo.gone, 4);
}

TEST_CASE("too many bytes that wait for the rest of their requests", "[http]") {
    HttpLimits limits;
    limits.buffered_bytes = 1'000'000;
    Echo       echo(limits);
    const auto begin = [](std::size_t length, std::size_t sent) {
        return cat("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: ", length, "\r\n\r\n", std::string(sent, 'x'));
    };
    {
        Client first(echo.port), second(echo.port);
        first.send(begin(900'000, 900'000 - 1));
        for (int i = 0; i < 20; i++) CHECK(echo.alive()); // rounds of the server's loop: the first one's bytes are read
        second.send(begin(900'000, 600'000));
        CHECK(second.reply().status == 503);
        first.send("x");
        CHECK(first.reply().body.size() == 900'000);
    }
    // The longest one gives way to a shorter one.
    Client large(echo.port);
    large.send(begin(900'000, 900'000 - 1));
    for (int i = 0; i < 20; i++) CHECK(echo.alive());
    CHECK(Client(echo.port).post("/echo", std::string(300'000, 'x')).status == 200);
    CHECK(large.reply().status == 503);
}

TEST_CASE("a long body is received only where a handler reads it", "[http]") {
    const Echo        echo;
    const std::string length = "Content-Length: 10000000\r\n";
    const auto        reply  = [&](const std::string& line, const std::string& headers, const std::string& body = "") {
        Client c(echo.port);
        c.send(line + " HTTP/1.1\r\nHost: x\r\n" + headers + "\r\n" + body);
        const Reply r = c.reply(); // though the body has no end
        CHECK(r.headers.at("connection") == "close");
        c.send(std::string(100'000, 'x'));
        CHECK(c.rest().empty());
        return r.status;
    };
    CHECK(reply("POST /nowhere", length) == 404);
    CHECK(reply("DELETE /guarded", length) == 405);
    CHECK(reply("POST /guarded?a=b", length, "{") == 401);
    CHECK(reply("POST /gu%61rded", length) == 401);
    CHECK(reply("POST /guarded", "Content-Length: 5\r\nExpect: 100-continue\r\n") == 401);
    CHECK(reply("POST /guarded", "Transfer-Encoding: chunked\r\n", "30000\r\n" + std::string(150'000, 'x')) == 401);
    Client short_one(echo.port);
    CHECK(short_one.post("/guarded", "short").status == 401);
    CHECK(short_one.post("/echo", "and on").body == "and on");
    CHECK(Client(echo.port).post("/guarded", std::string(300'000, 'x'), "X-Key: k\r\n").body == "300000");
    CHECK(Client(echo.port).post("/gu%61rded", std::string(300'000, 'x'), "X-Key: k\r\n").body == "300000");
}

TEST_CASE("requests that stay incomplete make room for others", "[http]") {
    HttpLimits limits;
    limits.connections = 40;
    Echo                echo(limits);
    const std::string   probe = "GET /health HTTP/1.1\r\nHost: x\r\n\r\n";
    std::vector<Client> slow;
    const auto          begin = [&](int n) {
        for (int i = 0; i < n; i++) {
            slow.emplace_back(echo.port);
            slow.back().send("G");
        }
    };
    begin(40);
    while (echo.server->n_connections() < 40) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    CHECK(Client(echo.port).call(probe).status == 200);
    begin(17); // as many as take the places of the probes
    CHECK(Client(echo.port).call(probe).status == 200);
    std::this_thread::sleep_for(std::chrono::milliseconds(1100));
    CHECK(echo.alive());
    CHECK(Client(echo.port).call(probe).status == 200);
}

TEST_CASE("an amount that is free passes a larger one that waits, but not for ever", "[http]") {
    MemorySemaphore          memory(100);
    std::vector<std::thread> threads;
    std::atomic<int>         n_large = 0;
    const auto               no      = [] { return false; };
    {
        const auto held = memory.enter(60, 1, no);
        REQUIRE(held);
        threads.emplace_back([&] {
            const auto pass = memory.enter(100, 60, no);
            n_large += bool(pass);
        });
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        CHECK(memory.enter(40, 0.5, no).has_value());
        std::this_thread::sleep_for(std::chrono::duration<double>(MemorySemaphore::passing_seconds));
        CHECK(!memory.enter(40, 0.1, no).has_value());
        CHECK(n_large == 0);
    }
    threads[0].join();
    CHECK(n_large == 1);
}

TEST_CASE("a client that hangs up is noticed, one that does not read is disconnected", "[http]") {
    HttpLimits limits;
    limits.write_seconds = 0.3;
    Echo echo(limits);
    {
        Client c(echo.port);
        c.send("GET /wait HTTP/1.1\r\nHost: x\r\n\r\n");
        wait_for(echo.begun, 1);
    }
    wait_for(echo.gone, 1);
    Client deaf(echo.port);
    deaf.send("GET /flood HTTP/1.1\r\nHost: x\r\n\r\n");
    wait_for(echo.gone, 2);
    {
        Client c(echo.port);
        c.send("GET /flood HTTP/1.1\r\nHost: x\r\n\r\n");
        CHECK(c.head().status == 200);
        CHECK(c.chunk().size() == 65536);
    }
    wait_for(echo.gone, 3);
    CHECK(echo.alive());
}

TEST_CASE("a server that stops keeps no client waiting", "[http]") {
    Echo   echo;
    Client waiting(echo.port), idle(echo.port), reading(echo.port);
    waiting.send("GET /wait HTTP/1.1\r\nHost: x\r\n\r\n");
    reading.send("GET /flood HTTP/1.1\r\nHost: x\r\n\r\n");
    wait_for(echo.begun, 2);
    echo.server->stop();
    CHECK(idle.rest().empty());
    CHECK(echo.server->n_threads() == 0);
}

TEST_CASE("Unix sockets", "[http]") {
    const std::string path = temporary() + ".sock";
    HttpOptions       options;
    auto              server = HttpServer::create(options);
    REQUIRE(server.has_value());
    (*server)->route("GET", "/", [](HttpExchange& e) { e.response.body = e.request.remote; });
    REQUIRE((*server)->listen_unix(path));
    (*server)->start();
    CHECK(Client(path).get("/").body == "unix");
    auto other = HttpServer::create(options);
    CHECK(!(*other)->listen_unix(path)); // somebody listens there
    CHECK(!(*other)->listen_unix("/nonexistent/folder/socket"));
    CHECK(!(*other)->listen_unix(std::string(200, 'a')));
    server->reset();
    CHECK((*other)->listen_unix(path)); // nobody does any more
    CHECK(!(*other)->listen("256.1.1.1", 0));
}

TEST_CASE("TLS", "[http]") {
    const std::string cert = temporary(), key = temporary();
    const std::string make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout " + key +
                             " -out " + cert + " 2>/dev/null";
    REQUIRE(std::system(make.c_str()) == 0); // NOLINT: a test's own command
    HttpOptions options;
    options.tls_cert = cert;
    CHECK(!HttpServer::create(options)); // a key is missing
    options.tls_key = cert;
    CHECK(!HttpServer::create(options)); // this is none
    options.tls_key = key;
    auto server     = HttpServer::create(options);
    REQUIRE(server.has_value());
    (*server)->route("POST", "/echo", [](HttpExchange& e) { e.response.body = e.request.body; });
    const Result<int> port = (*server)->listen("127.0.0.1", 0);
    REQUIRE(port.has_value());
    (*server)->start();
    const std::string out = temporary();
    const std::string body(200000, 'b');
    const std::string file = temporary();
    std::ofstream(file) << body;
    // Two requests on one connection, by a client that is not ours.
    const std::string url = "https://127.0.0.1:" + std::to_string(*port) + "/echo";
    const std::string call =
        "(printf 'POST /echo HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: 200000\\r\\n\\r\\n'; cat " + file +
        "; printf 'POST /echo HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: 3\\r\\nConnection: close\\r\\n\\r\\nend') | "
        "openssl s_client -quiet -ign_eof -connect 127.0.0.1:" +
        std::to_string(*port) + " 2>/dev/null > " + out;
    REQUIRE(std::system(call.c_str()) >= 0); // NOLINT
    const std::string answer = slurp(out);
    CHECK(answer.find(body) != std::string::npos);
    CHECK(answer.ends_with("end"));
    CHECK(Client(*port).get("/echo").status == 0); // plain text is not understood
    for (const std::string& path : {cert, key, out, file}) unlink(path.c_str());
}
