// The parts of `bench serve`: arrival times, bodies, parsing of answers, the table; and all of it against an HTTP
// server and against the program `server`.
#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>

#include <atomic>
#include <chrono>
#include <limits>
#include <memory>
#include <span>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "process.h"

import quire.core.base;
import quire.core.json;
import quire.serve.http.exchange;
import quire.serve.http.parser;
import quire.serve.http.server;
import quire.tools.bench.load_client;
import quire.tools.bench.load_report;
import quire.tools.bench.stream_reader;

using namespace quire;
using namespace quire::testing;
using Catch::Approx;

namespace {

const std::string head_of_stream =
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";

std::string chunk(const std::string& text) {
    char size[16];
    std::snprintf(size, sizeof size, "%zx\r\n", text.size());
    return size + text + "\r\n";
}

LoadResult read(const std::string& answer, std::size_t piece, bool closes = false, bool* reusable = nullptr) {
    StreamReader reader;
    LoadResult   result;
    bool         more = true;
    for (std::size_t at = 0; at < answer.size() && more; at += piece)
        more = reader.feed(std::string_view(answer).substr(at, piece), double(at), result);
    CHECK((!more || closes));
    if (closes) reader.close(1e6, result);
    if (reusable) *reusable = reader.reusable();
    return result;
}

// Answers with the number in the request's body, in three pieces; fails where the request asks for it.
struct Target {
    std::unique_ptr<HttpServer> server;
    LoadTarget                  target;
    std::atomic<int>            now = 0, most = 0, n_requests = 0;

    Target() {
        server = std::move(*HttpServer::create({}));
        server->route("POST", "/v1/completions", [this](HttpExchange& e) {
            const Json body = *json_parse(e.request.body);
            n_requests++;
            if (body.contains("refuse")) {
                e.response.status = 429;
                e.response.body   = R"({"error":{"message":"too many"}})";
                return;
            }
            const int running = ++now;
            for (int seen = most; running > seen && !most.compare_exchange_weak(seen, running);) {}
            e.response.type   = "text/event-stream";
            e.response.stream = [this, body](const HttpWrite& write) {
                const std::string word = body["prompt"];
                std::this_thread::sleep_for(std::chrono::milliseconds(5));
                for (int i = 0; i < 3; i++)
                    write("data: " + json_dump({{"choices", {{{"index", 0}, {"text", word + " "}}}}}) + "\n\n");
                if (body.contains("fail")) write("data: {\"error\":{\"message\":\"it broke\"}}\n\n");
                if (!body.contains("cut"))
                    write(
                        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":2,\"completion_tokens\":3}}\n\n"
                        "data: [DONE]\n\n");
                now--;
            };
        });
        const auto port = server->listen("127.0.0.1", 0);
        REQUIRE(port.has_value());
        server->start();
        target = *load_target(cat("http://127.0.0.1:", *port), "/v1/completions", "");
    }
};

} // namespace

TEST_CASE("arrivals", "[load]") {
    for (double burstiness : {0.2, 1.0, 50.0}) {
        const std::vector<double> times = arrival_times(4000, 20, burstiness, 3);
        CHECK(times.back() == Approx(200)); // 4000 at 20 a second
        double square = 0;
        for (std::size_t i = 1; i < times.size(); i++) {
            const double gap = times[i] - times[i - 1];
            CHECK(gap >= 0);
            square += (gap - 0.05) * (gap - 0.05);
        }
        // The variance of a gamma distribution is mean² / shape.
        CHECK(square / 4000 == Approx(0.05 * 0.05 / burstiness).epsilon(0.2));
    }
    CHECK(arrival_times(3, std::numeric_limits<double>::infinity(), 1, 0) == std::vector<double>(3, 0.0));
    CHECK(arrival_times(9, 5, 1, 7) == arrival_times(9, 5, 1, 7));
    CHECK(arrival_times(9, 5, 1, 7) != arrival_times(9, 5, 1, 8));
}

TEST_CASE("prompts and bodies", "[load]") {
    const auto random = random_prompts(50, 100, 20, 0.5, 1);
    for (const LoadPrompt& p : random) {
        CHECK((p.n_prompt >= 50 && p.n_prompt <= 150));
        CHECK((p.n_output >= 10 && p.n_output <= 30));
    }
    WorkloadOptions o;
    o.model        = "m";
    o.prefix       = 7;
    o.extra        = Json{{"top_k", 3}};
    o.ignore_eos   = true;
    const auto all = request_bodies(random, o);
    const Json a = *json_parse(all[0]), b = *json_parse(all[1]);
    CHECK(int(a["prompt"].size()) == 7 + random[0].n_prompt);
    for (std::size_t i = 0; i < 7; i++) CHECK(a["prompt"][i] == b["prompt"][i]);
    CHECK(a["prompt"] != b["prompt"]);
    CHECK(a["max_tokens"] == random[0].n_output);
    CHECK(a["top_k"] == 3);
    CHECK(a["stream_options"]["include_usage"] == true);
    CHECK(all == request_bodies(random, o));

    std::istringstream lines(
        "{\"prompt\":\"a\",\"output_tokens\":4}\n\n{\"prompt\":[1,2]}\n{\"prompt\":9,\"output\":2}\n"
        "{\"messages\":[{\"role\":\"user\",\"content\":\"b\"}]}\n");
    const auto read = read_prompts(lines, "f", 6, 11);
    REQUIRE(read.has_value());
    REQUIRE(read->size() == 6);
    CHECK((*read)[0].n_output == 4);
    CHECK((*read)[1].n_output == 11);
    CHECK((*read)[2].n_prompt == 9);
    CHECK((*read)[4].text == "a");
    o.chat          = true;
    const Json chat = *json_parse(request_bodies(*read, o)[3]);
    CHECK(chat["messages"][0]["content"] == "b");
    CHECK(chat["max_completion_tokens"] == 11);
    for (const char* wrong : {"", "\n", "x", "[]", "{}", "{\"prompt\":0}", "{\"prompt\":\"a\",\"output\":0}",
                              "{\"prompt\":true}", "{\"prompt\":99999999999}"}) {
        std::istringstream in(wrong);
        CHECK(!read_prompts(in, "f", 1, 1).has_value());
    }
}

TEST_CASE("targets and goodput", "[load]") {
    const auto t = load_target("https://host.example/prefix/v1/", "/v1/chat/completions", "k");
    REQUIRE(t.has_value());
    CHECK((t->tls && t->host == "host.example" && t->port == 443 && t->path == "/prefix/v1/chat/completions"));
    CHECK(load_target("http://[::1]:81", "/x", "")->host == "::1");
    for (const char* wrong : {"", "host", "ftp://host", "http://", "http://:80", "http://a:0", "http://a:70000",
                              "http://a:b", "http://a b", "http://a\r\nb"})
        CHECK(!load_target(wrong, "/x", "").has_value());
    CHECK(!load_target("http://a", "x", "").has_value());
    CHECK(!load_target("http://a", "/x", "a\r\nb").has_value());

    const std::vector<std::string> pairs{"ttft:500", "e2el:20.5"};
    const auto                     g = parse_goodput(pairs);
    REQUIRE(g.has_value());
    CHECK((g->ttft.value_or(0) == 500 && g->e2el.value_or(0) == 20.5 && !g->tpot));
    for (const char* wrong : {"", "ttft", "ttft:", "ttft:x", "itl:3", "tpot:-1", "tpot:1s"}) {
        const std::vector<std::string> one{wrong};
        CHECK(!parse_goodput(one).has_value());
    }
}

TEST_CASE("answers come in any pieces", "[load]") {
    const std::string body =
        ":\n\ndata: {\"choices\":[{\"index\":0,\"text\":\"ab\"}],\"usage\":null}\n\n"
        "data:{\"choices\":[{\"index\":0,\"text\":\"\",\"finish_reason\":\"length\"}]}\r\n\r\n"
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":2}}\n\n"
        "data: [DONE]\n\n";
    const std::string whole = head_of_stream + chunk(body.substr(0, 31)) + chunk(body.substr(31)) + "0\r\n\r\n";
    for (std::size_t piece : {1, 2, 7, 10000}) {
        bool             reusable = false;
        const LoadResult r        = read(whole, piece, false, &reusable);
        CHECK(r.error.empty());
        CHECK(r.text == "ab");
        CHECK(r.times.size() == 1); // a piece without text is none
        CHECK((r.prompt_tokens == 5 && r.output_tokens == 2));
        CHECK(reusable);
    }
    const std::string chat =
        "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n"
        "data: {\"choices\":[{\"delta\":{\"content\":\"hi\"}}]}\n\ndata: [DONE]\n\n";
    const LoadResult r = read("HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + chat, 3, true);
    CHECK(r.error.empty());
    CHECK(r.text == "hi");
    CHECK(r.times.size() == 1);

    const auto fault = [](const std::string& answer) { return read(answer, 5, true).error; };
    CHECK(fault(whole.substr(0, 150)) == "the connection ended before the answer did");
    CHECK(fault("") == "the connection ended before the answer did");
    CHECK(fault(head_of_stream + chunk("data: {}\n\n") + "0\r\n\r\n") == "the stream ended without [DONE]");
    CHECK(fault(head_of_stream + chunk("data: {\"error\":{\"message\":\"m\"}}\n\ndata: [DONE]\n\n") + "0\r\n\r\n") ==
          "m");
    CHECK(fault("HTTP/1.1 429 No\r\nContent-Length: 29\r\n\r\n{\"error\":{\"message\":\"later\"}}") ==
          "status 429: later");
    CHECK(fault("SSH-2.0\r\n\r\n") == "the answer is not HTTP/1.1");
    CHECK(!fault(head_of_stream + "-2\r\n").empty());
    CHECK(!fault(head_of_stream + chunk("data: nonsense\n\n") + "0\r\n\r\n").empty());
}

TEST_CASE("the table is vLLM's", "[load]") {
    std::vector<LoadResult> results(3);
    results[0].sent = 0, results[0].end = 2, results[0].times = {0.5, 1, 1.5, 2};
    results[1].sent = 1, results[1].end = 4, results[1].times = {2, 4};
    results[2].sent = 1, results[2].end = 1.5, results[2].error = "status 429: later";
    results[0].prompt_tokens = results[1].prompt_tokens = 10;
    results[0].output_tokens                            = 4;
    results[1].output_tokens                            = 2;
    ReportOptions o;
    o.max_concurrency  = 8;
    o.request_rate     = 2;
    o.percentiles      = {90, 99.9};
    o.goodput.ttft     = 600;
    const LoadReport r = load_report(results, o);
    CHECK(r.ttft.mean == Approx(750));
    CHECK(r.tpot.mean == Approx(1250)); // 0.5 s and 2 s a token after the first
    CHECK(r.itl.median == Approx(500)); // of 0.5, 0.5, 0.5, 2
    CHECK(r.itl.deviation == Approx(649.519));
    CHECK(r.e2el.percentiles[0] == Approx(2900));
    CHECK(r.peak_concurrent == 2);
    CHECK(r.good == 1);
    CHECK(r.errors == std::vector<std::string>{"status 429: later"});
    const std::string table = render_table(r, o);
    CHECK(
        table.starts_with("============ Serving Benchmark Result ============\n"
                          "Successful requests:                     2         \n"
                          "Failed requests:                         1         \n"
                          "Maximum request concurrency:             8         \n"
                          "Request rate configured (RPS):           2.00      \n"
                          "Benchmark duration (s):                  4.00      \n"
                          "Total input tokens:                      20        \n"
                          "Total generated tokens:                  6         \n"
                          "Request throughput (req/s):              0.50      \n"
                          "Request goodput (req/s):                 0.25      \n"
                          "Output token throughput (tok/s):         1.50      \n"));
    for (const char* line : {"\n---------------Time to First Token----------------\n",
                             "\n-----Time per Output Token (excl. 1st token)------\n",
                             "\n---------------Inter-token Latency----------------\n",
                             "\n----------------End-to-end Latency----------------\n",
                             "\nP99.9 E2EL (ms):                         2999.00   \n"})
        CHECK(table.find(line) != std::string::npos);
    const Json json = render_json(r, o, results);
    CHECK(json["p90_e2el_ms"].get<double>() == Approx(2900));
    CHECK(json["itls"][0].size() == 3);
    const std::string empty = render_table(load_report({}, o), o);
    CHECK(empty.find("nan") == std::string::npos);
}

TEST_CASE("many streams from one thread", "[load]") {
    Target                   there;
    std::vector<std::string> bodies;
    for (int i = 0; i < 300; i++) bodies.push_back(json_dump({{"prompt", cat("word ", i)}}));
    std::vector<LoadRequest> requests;
    for (const std::string& body : bodies) requests.push_back({body, 0});
    LoadOptions options;
    options.max_concurrency = 20;
    int n_done              = 0;
    options.done            = [&](std::size_t, const LoadResult&) { n_done++; };
    const auto results      = run_load(there.target, requests, options);
    REQUIRE(results.has_value());
    for (std::size_t i = 0; i < 300; i++) {
        const std::string word = cat("word ", i, " ");
        CHECK((*results)[i].error.empty());
        CHECK((*results)[i].text == word + word + word);
        CHECK((*results)[i].output_tokens == 3);
        CHECK((*results)[i].sent <= (*results)[i].times.at(0));
    }
    CHECK(n_done == 300);
    CHECK(there.n_requests == 300);
    CHECK((there.most > 1 && there.most <= 20));

    const auto one = [&](const char* body) {
        const LoadRequest request{body, 0};
        return run_load(there.target, std::span(&request, 1), {})->at(0).error;
    };
    CHECK(one(R"({"prompt":"a","refuse":1})") == "status 429: too many");
    CHECK(one(R"({"prompt":"a","fail":1})") == "it broke");
    CHECK(one(R"({"prompt":"a","cut":1})") == "the stream ended without [DONE]");
    CHECK(fetch(there.target, R"({"prompt":"a","refuse":1})").error().message == "status 429: too many");
    there.server->stop();
    CHECK(one(R"({"prompt":"a"})").starts_with("cannot connect"));
}

TEST_CASE("bench serve says in one line what is wrong", "[load]") {
    for (const auto& [arguments, code] :
         std::vector<std::pair<std::vector<std::string>, int>>{{{"--base-url", "nowhere"}, 1},
                                                               {{"--base-url", "http://127.0.0.1:1"}, 1},
                                                               {{"--model", "m", "--goodput", "ttft"}, 1},
                                                               {{"--model", "m", "--dataset-path", "/nonexistent"}, 1},
                                                               {{"--model", "m", "--extra-body", "[]"}, 1},
                                                               {{"--request-rate", "0"}, 2},
                                                               {{"--burstiness", "0"}, 2},
                                                               {{"--num-prompts", "0"}, 2}}) {
        std::vector<std::string> all{"serve"};
        all.insert(all.end(), arguments.begin(), arguments.end());
        const Finished f = run_program("bench", all);
        INFO(f.err);
        CHECK(f.code == code);
        CHECK(!f.err.empty());
        CHECK(f.out.empty());
    }
}
