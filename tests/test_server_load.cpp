// The server beside many clients: disconnects, queues, memory, the block pool, models that fail.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include <sys/resource.h>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <regex>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "http_client.h"
#include "process.h"
#include "server_process.h"

import quire.core.base;
import quire.core.std;
import quire.core.tensor;
import quire.model_file.gguf;
import quire.tools.bench.random_model;

#include "nan_model.h"

using namespace quire::testing;
using Json = nlohmann::json;

TEST_CASE("a client that leaves is cancelled, and its blocks are free again", "[server]") {
    const Server server({"--parallel", "2", "-c", "1024", "--context-shift", "--pipeline", GENERATE("off", "on")});
    SECTION("while streaming") {
        Client c = server.client();
        c.send(Client::request("/v1/completions", endless.dump()));
        CHECK(c.head().status == 200);
        CHECK(!c.chunk().empty());
    }
    SECTION("before anything has come, some of them queued") {
        std::vector<Client> clients;
        for (int i = 0; i < 6; i++) {
            clients.push_back(server.client());
            clients.back().send(Client::request("/v1/completions", endless.dump()));
        }
        while (server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting") < 6) nap();
    }
    SECTION("in the middle of its request") {
        Client c = server.client();
        c.send(Client::request("/v1/completions", long_one.dump()).substr(0, 150));
    }
    SECTION("without reading") {
        Client c = server.client();
        Json   b = endless;
        b["n"]   = 2;
        c.send(Client::request("/v1/completions", b.dump()));
    }
    server.until_idle(); // the answers have no end: they were cancelled
    CHECK(server.ask("/v1/completions", {{"prompt", "Hello"}})["choices"].size() == 1);
}

TEST_CASE("a client that does not read is disconnected and delays no other", "[server]") {
    const Server server({"--write-timeout", "0.5", "--parallel", "16"});
    Client       deaf = server.client();
    Json         body = long_one;
    body["stream"]    = true;
    body["n"]         = 8;
    body["logprobs"]  = 20; // more than all buffers on the way hold
    deaf.send(Client::request("/v1/completions", body.dump()));
    for (int i = 0; i < 5; i++)
        CHECK(server.ask(
                  "/v1/completions",
                  {{"prompt", "Hello"}, {"max_tokens", 5}, {"ignore_eos", true}})["usage"]["completion_tokens"] == 5);
    server.until_idle();
    while (server.metric("quire:http_threads") > 4) nap(); // its own has gone on
    const std::string rest = deaf.rest();
    CHECK(!has(rest, "[DONE]"));
}

TEST_CASE("a full queue says so", "[server]") {
    const Server        server({"--parallel", "1", "--max-queue", "2", "--context-shift"});
    std::vector<Client> clients;
    for (int i = 0; i < 3; i++) {
        clients.push_back(server.client());
        clients.back().send(Client::request("/v1/completions", endless.dump()));
        while (server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting") < i + 1) nap();
    }
    const Reply r = server.post("/v1/completions", long_one);
    CHECK(r.status == 429);
    CHECK(std::stoi(r.headers.at("retry-after")) >= 1);
    CHECK(Json::parse(r.body)["error"]["code"] == "queue_full");
    CHECK(server.metric("quire:requests_refused_total") == 1);
    CHECK(server.get("/health").status == 200);
    clients.clear();
    server.until_idle();
    CHECK(server.post("/v1/completions", {{"prompt", "Hello"}}).status == 200);
}

TEST_CASE("a request of many prompts leaves room and turns to others", "[server]") {
    const Server server({"--parallel", "4", "--max-queue", "8", "--context-shift"});
    Json         many = endless;
    many["prompt"]    = Json::array();
    for (int i = 0; i < 12; i++) many["prompt"].push_back("story " + std::to_string(i));
    const auto begin = [&](int n) {
        Client c = server.client();
        c.send(Client::request("/v1/completions", many.dump()));
        while (server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting") < n) nap();
        return c;
    };
    const Client first = begin(12), second = begin(24); // each has half of the places
    CHECK(server.post("/v1/completions", many).status == 429);
    CHECK(server.ask("/v1/completions", {{"prompt", "Hello"}, {"max_tokens", 1}})["choices"].size() == 1);
    CHECK(server.metric("vllm:num_requests_waiting") >= 12); // it did not wait for all of them
}

TEST_CASE("answers that are collected count as memory", "[server]") {
    const Server server({"--max-buffered", "4000000"});
    const auto   refused = [&](const char* path, const Json& body) {
        const Reply r = server.post(path, body);
        INFO(r.body.substr(0, 1000));
        CHECK(r.status == 503);
        CHECK(r.headers.at("retry-after") == "1");
        const Json error = Json::parse(r.body)["error"];
        CHECK(error["code"] == "no_room");
        CHECK(has(error["message"], "log-probabilities take more memory than --max-buffered leaves"));
        server.until_idle();
        CHECK(server.post("/v1/completions", {{"prompt", "Hello"}, {"max_tokens", 1}}).status == 200);
    };
    Json body{{"prompt", "hi"}, {"n", 4}, {"n_predict", 100}, {"n_probs", 100}, {"ignore_eos", true}};
    refused("/completion", body); // at once
    CHECK(server.metric("vllm:generation_tokens_total") <= 1);
    body["stop"] = "no such text";
    refused("/completion", body); // while they are collected
    body["stream"] = true;
    CHECK(server.post("/completion", body).status == 200); // a stream holds a piece at a time
    std::string text;
    for (int i = 0; i < 600; i++) text += "word ";
    refused("/v1/completions", {{"prompt", text}, {"max_tokens", 0}, {"echo", true}, {"logprobs", 20}});
    body["n"]       = 1;
    body["n_probs"] = 10;
    body["stream"]  = false;
    CHECK(server.ask("/completion", body)["completion_probabilities"].size() == 100);
}

TEST_CASE("silence in a stream is broken by comments", "[server]") {
    const Server server({"--parallel", "1", "--sse-ping-interval", "0.05", "--context-shift"});
    Client       first = server.client(), second = server.client();
    first.send(Client::request("/v1/completions", endless.dump()));
    while (server.metric("vllm:num_requests_running") < 1) nap();
    Json body      = long_one;
    body["stream"] = true;
    second.send(Client::request("/v1/completions", body.dump()));
    CHECK(second.head().status == 200);
    CHECK(second.chunk() == ":\n\n");
}

TEST_CASE("texts are split within limits", "[server]") {
    const auto tokenize = [](const char* path, std::size_t bytes) {
        return common().post(path, {{"prompt", std::string(bytes, 'a')}});
    };
    CHECK(tokenize("/tokenize", 1 << 20).status == 200);
    for (const char* path : {"/tokenize", "/pin"}) {
        const Reply r = tokenize(path, (1 << 20) + 1);
        CHECK(r.status == 400);
        CHECK(Json::parse(r.body)["error"]["code"] == "context_length_exceeded");
    }
    const Json shortened{{"prompt", std::string(2 << 20, 'a')}, {"truncate_prompt_tokens", 5}};
    CHECK(Json::parse(common().post("/v1/completions", shortened).body)["error"]["code"] == "context_length_exceeded");
    // Parts that are each short enough.
    const Json parts{{"prompt", {std::string(20000, 'a'), 300, std::string(20000, 'b')}}};
    CHECK(Json::parse(common().post("/v1/completions", parts).body)["error"]["code"] == "context_length_exceeded");
    CHECK(common().post("/v1/embeddings", {{"input", std::string(1 << 20, 'a')}}).status == 400);
    CHECK(common().post("/detokenize", {{"tokens", std::vector<int>(1 << 16, 300)}}).status == 200);
    CHECK(common().post("/detokenize", {{"tokens", std::vector<int>((1 << 16) + 1, 300)}}).status == 400);
    const Json pieces = common().ask(
        "/tokenize", {{"content", "Hi \"é\xf0\x9f\x99\x82"}, {"with_pieces", true}, {"return_token_strs", true}});
    CHECK(pieces["tokens"].size() == pieces["count"]);
    CHECK(pieces["token_strs"].size() == pieces["count"]);
    CHECK(pieces["tokens"][0].contains("piece"));
}

TEST_CASE("a request without memory is a 503 and affects no other", "[server]") {
    Server     server({"-t", "2", "--kv-blocks", "128", "--swap-blocks", "0"});
    const auto kib = [&](const char* name) {
        const std::string status = slurp("/proc/" + std::to_string(server.pid()) + "/status");
        return std::strtoull(status.c_str() + status.find(name) + std::strlen(name), nullptr, 10);
    };
    if (kib("VmSize:") > 1ull << 30) SKIP("a sanitizer takes terabytes of address space");
    const Json neighbour{{"prompt", "Once upon a time"}, {"max_tokens", 60}, {"ignore_eos", true}, {"temperature", 0}};
    const std::string expected = server.ask("/v1/completions", neighbour)["choices"][0]["text"];
    const std::size_t size     = (16 << 20) - 200;
    const std::string many(size / 2, 'a');
    std::string       words, ids = "1";
    while (words.size() < size / 2) words += "so much ";
    for (int i = 0; i < 1'000'000; i++) ids += ",300";
    const std::vector<std::pair<std::string, std::string>> attacks{
        {"/tokenize", Json{{"prompt", many + many}}.dump()},
        {"/tokenize", Json{{"prompt", std::string(1 << 20, 'a')}, {"with_pieces", true}}.dump()},
        {"/v1/completions", Json{{"prompt", words + words}}.dump()},
        {"/v1/completions", "{\"prompt\":[" + ids + "]}"},
        {"/v1/chat/completions", Json{{"messages", {{{"role", "user"}, {"content", words + words}}}}}.dump()},
        {"/detokenize", "{\"tokens\":[" + ids + "]}"},
        {"/v1/embeddings", Json{{"input", words + words}}.dump()},
        {"/apply-template", Json{{"messages", {{{"role", "user"}, {"content", words + words}}}}}.dump()}};
    // As `ulimit -v` would have it: so much beside what it has when nobody asks.
    int refused = 0;
    for (const unsigned room : {160u, 48u}) {
        const rlimit limit{(kib("VmSize:") << 10) + (std::size_t(room) << 20), RLIM_INFINITY};
        REQUIRE(prlimit(server.pid(), RLIMIT_AS, &limit, nullptr) == 0);
        for (const auto& [path, body] : attacks) {
            std::vector<std::thread> threads;
            std::atomic<int>         unavailable = 0, other = 0, odd = 0; // odd: a status that nobody expects
            std::atomic<bool>        over = false;
            std::thread              well([&] {
                do {
                    const Reply r = server.post("/v1/completions", neighbour);
                    if (r.status != 200) odd = r.status, other++;
                    else if (Json::parse(r.body)["choices"][0]["text"] != expected) other++;
                } while (!over);
            });
            for (int i = 0; i < 6; i++)
                threads.emplace_back([&] {
                    const int status = server.client().post(path, body).status;
                    if (status == 503) unavailable++;
                    else if (status != 400 && status != 200) odd = status, other++;
                });
            for (std::thread& t : threads) t.join();
            over = true;
            well.join();
            INFO(path << ' ' << body.size() << ' ' << room << ", status " << odd);
            CHECK(other == 0);
            REQUIRE(server.running());
            refused += unavailable;
        }
    }
    CHECK(refused > 0);
    const rlimit none{RLIM_INFINITY, RLIM_INFINITY};
    REQUIRE(prlimit(server.pid(), RLIMIT_AS, &none, nullptr) == 0);
    CHECK(server.post("/tokenize", {{"prompt", std::string(1 << 20, 'a')}}).status == 200);
    CHECK(kib("VmHWM:") < 600 << 10); // it was 5 GiB
    server.until_idle();
    server.signal(SIGTERM);
    CHECK(server.wait() == 0);
}

TEST_CASE("the KV memory can be watched", "[server]") {
    const Server s({"--parallel", "2"});
    Client       watcher = s.client();
    watcher.send("GET /blocks/events HTTP/1.1\r\nHost: x\r\n\r\n");
    CHECK(watcher.head().headers.at("content-type") == "text/event-stream");
    const Json first = Json::parse(watcher.event());
    CHECK(first["totals"]["used"] == 0);
    Client busy = s.client();
    busy.send(Client::request("/v1/completions", long_one.dump()));
    for (Json at = first; at["totals"]["used"] == 0;) at = Json::parse(watcher.event());
    busy.hang_up();
    for (Json at = Json::parse(watcher.event()); at["totals"]["used"] != 0;) at = Json::parse(watcher.event());
}

TEST_CASE("the changes of the blocks add up to the blocks", "[server]") {
    const Server s({"--kv-blocks", "80", "--swap-blocks", "40"});
    Client       watcher = s.client();
    watcher.send("GET /blocks/events?changes=1 HTTP/1.1\r\nHost: x\r\n\r\n");
    REQUIRE(watcher.head().status == 200);
    const auto next   = [&] { return Json::parse(watcher.event()); };
    Json       blocks = next().at("blocks");
    CHECK(blocks.size() == 80);
    Json many          = long_one;
    many["n"]          = 3;
    many["max_tokens"] = 300;
    int         status = 0;
    std::thread asks([&] { status = s.post("/v1/completions", many).status; }); // only one thread may assert
    bool        used = false;
    for (bool over = false; !over;) {
        const Json e = next();
        CHECK(!e.contains("blocks"));
        for (Json b : e.at("changed")) {
            const std::size_t id = b.at("id");
            b.erase("id");
            CHECK(blocks.at(id) != b); // only what did change
            blocks[id] = b;
        }
        int n = 0;
        for (const Json& b : blocks) n += b["refs"] > 0;
        CHECK(n == e["totals"]["used"]);
        over = used && n == 0;
        used |= n > 0;
    }
    asks.join();
    CHECK(status == 200);
    CHECK(blocks == Json::parse(s.get("/blocks").body)["blocks"]);
}

TEST_CASE("the block pool is looked at ten times a second at most, whoever asks how often", "[server]") {
    const Server s({"--kv-blocks", "80"});
    const auto   start = std::chrono::steady_clock::now();
    for (int i = 0; i < 12; i++) CHECK(s.get("/blocks").status == 200);
    CHECK(std::chrono::steady_clock::now() - start >= std::chrono::seconds(1));
}

TEST_CASE("a model whose numbers are not finite: an error for that request alone", "[server][nan]") {
    const NanModel model("token_embd.weight", 7); // the embedding of token 7
    const Server   s({"-t", "1", "--parallel", "8"}, model.path());
    const auto     is_fault = [](const Json& body) {
        const Json& e = body.at("error");
        CHECK(e["code"] == "model_failed");
        CHECK(e["type"] == "server_error");
        CHECK(has(e["message"], "not finite"));
    };
    Client     neighbour = s.client();
    const Json good{{"prompt", {5, 6, 8}},
                    {"max_tokens", 200},
                    {"ignore_eos", true},
                    {"temperature", 0},
                    {"logit_bias", {{"7", -100}}}};
    neighbour.send(Client::request("/v1/completions", good.dump()));
    for (const Json& how :
         {Json::object(), Json{{"temperature", 0}}, Json{{"n", 3}}, Json{{"n", 1}, {"best_of", 3}},
          Json{{"use_beam_search", true}, {"n", 2}}, Json{{"logprobs", 2}}, Json{{"echo", true}, {"logprobs", 1}}}) {
        Json body{{"prompt", {5, 6, 7}}, {"max_tokens", 4}};
        body.update(how);
        const Reply r = s.post("/v1/completions", body);
        INFO(how.dump() << r.body);
        CHECK(r.status == 500);
        is_fault(Json::parse(r.body));
        if (how.contains("best_of") || how.contains("use_beam_search")) continue; // no streams
        body["stream"] = true;                                                    // nothing has been said yet: a status
        CHECK(s.post("/v1/completions", body).status == 500);
    }
    const Reply embedding = s.post("/v1/embeddings", {{"input", {5, 6, 7}}});
    CHECK(embedding.status == 500);
    is_fault(Json::parse(embedding.body));
    // A stream that has begun ends with an event: with this seed 7 is drawn behind 124 others.
    Json begun{{"prompt", {5, 6}}, {"max_tokens", 240}, {"ignore_eos", true}, {"temperature", 1},
               {"seed", 117},      {"top_k", 0},        {"top_p", 1},         {"min_p", 0}};
    begun["allowed_token_ids"] = Json::array({7});
    for (int token = 20; token < 70; token++) begun["allowed_token_ids"].push_back(token);
    begun["stream"]           = true;
    begun["return_token_ids"] = true;
    for (int i = 0; i < 5; i++) { // whether or not all 124 are there before the first is sent
        const Reply r = s.post("/v1/completions", begun);
        CHECK(r.status == 200);
        CHECK(has(r.body, "\"model_failed\""));
        CHECK(has(r.body, "not finite"));
        CHECK(has(r.body, "data: [DONE]"));
        std::size_t n = 0;
        for (std::size_t at = 0; (at = r.body.find("\"token_ids\":[", at)) != std::string::npos;) {
            at += 13;
            const std::string ids = r.body.substr(at, r.body.find(']', at) - at);
            if (!ids.empty()) n += 1 + std::size_t(std::ranges::count(ids, ','));
        }
        CHECK(n >= 124); // none of them is lost
    }

    const Reply whole = neighbour.reply();
    CHECK(whole.status == 200);
    CHECK(Json::parse(whole.body)["usage"]["completion_tokens"] == 200);
    CHECK(Json::parse(whole.body)["choices"] == s.ask("/v1/completions", good)["choices"]);
}

TEST_CASE("the documents' load runs on the model that ships", "[server]") {
    const std::string page  = slurp(QUIRE_ROOT "/docs/server-load.md");
    const std::size_t start = page.find("    ./bench serve ") + 12;
    REQUIRE(start > 12);
    std::istringstream       line(page.substr(start, page.find('\n', start) - start));
    std::vector<std::string> arguments;
    for (std::string word; line >> word;) {
        const std::string before = arguments.empty() ? "" : arguments.back();
        if (before == "--num-prompts") word = "3";
        arguments.push_back(word);
    }
    arguments.insert(arguments.end(), {"--base-url", "http://127.0.0.1:" + std::to_string(common().port())});
    const Finished f = run_program("bench", arguments);
    INFO(f.err << f.out);
    CHECK(f.code == 0);
    CHECK(std::regex_search(f.out, std::regex("Successful requests: +3 *\n")));
}
