// The program `server`: its log and metrics, signals and shutdown, sockets, flags.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "http_client.h"
#include "process.h"
#include "reference.h"
#include "server_process.h"

import quire.core.result;
import quire.core.tcp;

using namespace quire::testing;
using Json = nlohmann::json;

TEST_CASE("the log, the ids and the metrics", "[server]") {
    const Server s({"--log-json"});
    const Reply  r = s.post("/v1/completions", {{"prompt", "Hello"}, {"max_tokens", 5}, {"ignore_eos", true}},
                            "X-Request-Id: abc-1\r\n");
    CHECK(r.headers.at("x-request-id") == "abc-1");
    CHECK(Json::parse(r.body)["id"] == "cmpl-abc-1");
    // Nothing else comes back or stands in the log as it came, whatever becomes of the request.
    for (const char* odd : {"two words", "a\tb", "a/b", "<b>", "a\"b", "\xc3\xa9", "a;b=c", "{}"}) {
        const std::string header = "X-Request-Id: " + std::string(odd) + "\r\n";
        for (const Reply& reply :
             {s.post("/v1/completions", {{"prompt", "a"}, {"max_tokens", 1}}, header), s.get("/health", header),
              s.post("/v1/completions", {{"n", 0}}, header), s.get("/nothing", header),
              s.get("/v1/completions", header), s.get("/metrics", header), s.get("/", header)}) {
            CHECK(reply.headers.at("x-request-id").size() == 16); // made up
            CHECK(reply.headers.at("x-request-id").find_first_not_of("0123456789abcdef") == std::string::npos);
        }
        if (odd[0] == '\xc3') continue; // no text of JSON
        const Reply of_field = s.post("/v1/completions", {{"prompt", "a"}, {"max_tokens", 1}, {"request_id", odd}},
                                      "X-Request-Id: abc-2\r\n");
        CHECK(of_field.status == 200);
        CHECK(Json::parse(of_field.body)["id"] == "cmpl-abc-2");
    }
    CHECK(Json::parse(
              s.post("/v1/chat/completions", {{"messages", user("a")}, {"max_tokens", 1}, {"request_id", "mine.1"}})
                  .body)["id"] == "chatcmpl-mine.1");
    for (const char* path : {"/nothing", "/health", "/v1/completions"})
        CHECK(s.get(path, "X-Request-Id: plain_1.a:b-c\r\n").headers.at("x-request-id") == "plain_1.a:b-c");
    while (!has(s.log(), "\n")) nap();
    const Json line = Json::parse(s.log().substr(0, s.log().find('\n')));
    CHECK(line["id"] == "abc-1");
    CHECK(line["status"] == 200);
    CHECK(line["level"] == "info");
    CHECK(line["tokens"] == 5);
    CHECK(line["tokens"].is_number_integer());
    CHECK(line["prompt_tokens"] == 1);
    CHECK(line["finish"] == "length");
    for (const char* key : {"ttft", "rate", "cached_tokens", "seconds", "method", "path", "remote"})
        CHECK(line.contains(key));

    const Reply m = s.get("/metrics");
    CHECK(m.headers.at("content-type") == "text/plain; version=0.0.4; charset=utf-8");
    CHECK(s.metric("vllm:generation_tokens_total") >= 5);
    CHECK(s.metric("vllm:time_to_first_token_seconds_count") >= 1);
    CHECK(s.metric("vllm:inter_token_latency_seconds_count") == 4);
    const auto plain = [&](const std::string& name) {
        const auto at = m.body.find("\n" + name + " ");
        REQUIRE(at != std::string::npos);
        return std::strtod(m.body.c_str() + at + name.size() + 2, nullptr);
    };
    CHECK(plain("process_resident_memory_bytes") > 1e7);
    CHECK(plain("process_virtual_memory_bytes") > plain("process_resident_memory_bytes"));
    CHECK(plain("process_cpu_seconds_total") > 0);
    CHECK(plain("process_open_fds") > 5);
    CHECK(plain("process_max_fds") >= 1024);
    CHECK(std::abs(plain("process_start_time_seconds") - double(std::time(nullptr))) < 600);
    CHECK(plain("llamacpp:tokens_predicted_total") == s.metric("vllm:generation_tokens_total"));
    CHECK(plain("llamacpp:n_decode_total") > 0);
    CHECK(plain("llamacpp:n_tokens_max") >= 6);
    CHECK(plain("llamacpp:predicted_tokens_seconds") > 0);
    CHECK(s.metric("vllm:cache_config_info") == 1);
    for (const char* label :
         {"block_size=\"16\"", "num_gpu_blocks=\"", "gpu_memory_utilization=\"0.92\"", "cache_dtype=\"float16\""})
        CHECK(has(m.body.substr(m.body.find("\nvllm:cache_config_info{"), 400), label));
    std::set<std::string> typed;
    for (std::size_t at = 0; at < m.body.size();) {
        const std::string row = m.body.substr(at, m.body.find('\n', at) - at);
        at += row.size() + 1;
        if (row.starts_with("# TYPE ")) {
            CHECK(typed.insert(row.substr(7, row.rfind(' ') - 7)).second); // each family once
            CHECK((row.ends_with(" gauge") ? row.find("_total ") : std::string::npos) == std::string::npos);
        } else if (!row.starts_with("#")) {
            CHECK((row.find('{') != std::string::npos || row.starts_with("process_") ||
                   row.starts_with("llamacpp:"))); // as Prometheus's libraries and llama-server have them
            char* end = nullptr;
            (void)std::strtod(row.c_str() + row.rfind(' ') + 1, &end);
            CHECK(*end == '\0');
            CHECK(!has(row, "nan"));
        }
    }
}

TEST_CASE("num_gpu_blocks are blocks of a text, where layers have several kinds of memory", "[server]") {
    const Server      s({"--kv-blocks", "10"}, reference("models/gemma2-Q8_0.gguf"));
    const std::string text = s.get("/metrics").body;
    std::smatch       found;
    REQUIRE(std::regex_search(text, found, std::regex("num_gpu_blocks=\"([0-9]+)\"")));
    const int blocks = std::stoi(found[1]);
    CHECK(blocks == s.ask_get("/v1/models")["data"][0]["max_model_len"].get<int>() / 16);
    CHECK(blocks >= 10);
    CHECK(blocks < s.metric("quire:kv_blocks"));
}

TEST_CASE("a line of the log is one line, and its values are told apart", "[server]") {
    const Server s;
    s.post("/v1/completions",
           {{"prompt", "a"}, {"max_tokens", 1}, {"x status=500\n\x1b[2J\" y", 1}, {"z=\xc2\x9b", 1}});
    while (!has(s.log(), "\n")) nap();
    CHECK(has(s.log(), R"( unknown_field="x status=500??[2J\" y" unknown_field=z=?? )"));
}

TEST_CASE("a signal ends it: what runs goes on, nothing new comes in", "[server]") {
    const int which = GENERATE(SIGTERM, SIGINT);
    Server    server({"--parallel", "2", "--drain-timeout", "600"});
    Client    running = server.client();
    running.send(Client::request("/v1/completions", long_one.dump()));
    while (server.metric("vllm:num_requests_running") < 1) nap();
    server.signal(which);
    while (server.get("/health").status == 200) nap();
    const Reply refused = server.post("/v1/completions", {{"prompt", "Hello"}});
    if (refused.status != 0) CHECK(refused.status == 503); // unless it has ended meanwhile
    const Reply r = running.reply();
    CHECK(r.status == 200);
    CHECK(Json::parse(r.body)["usage"]["completion_tokens"] == 900);
    CHECK(server.wait() == 0);
}

TEST_CASE("under nohup a server outlives its terminal", "[server]") {
    const auto before = std::signal(SIGHUP, SIG_IGN); // its child inherits that
    Server     server({"--drain-timeout", "600"});
    std::signal(SIGHUP, before);
    Client running = server.client();
    running.send(Client::request("/v1/completions", long_one.dump()));
    while (server.metric("vllm:num_requests_running") < 1) nap();
    server.signal(SIGHUP);
    server.signal(SIGTERM); // the first that counts; were it the second, the answer would be cut
    CHECK(Json::parse(running.reply().body)["usage"]["completion_tokens"] == 900);
    CHECK(server.wait() == 0);
}

TEST_CASE("SIGHUP opens the log again and reads the keys again", "[server]") {
    const std::string keys = temporary(), log = temporary(), old_log = log + ".1";
    const auto        write_keys = [&](const char* text) { std::ofstream(keys) << text; };
    write_keys("key-one\n");
    const auto before =
        std::signal(SIGHUP, SIG_DFL); // these tests may run under nohup, and a server under nohup ignores it
    Server server({"--api-key-file", keys, "--log-file", log, "--log-json"});
    std::signal(SIGHUP, before);
    const auto status_with = [&](const std::string& key) {
        return server.get("/v1/models", "Authorization: Bearer " + key + "\r\n").status;
    };
    CHECK(status_with("key-one") == 200);
    while (!has(slurp(log), "/v1/models")) nap();
    CHECK(std::rename(log.c_str(), old_log.c_str()) == 0);
    write_keys("key-two\n");
    server.signal(SIGHUP);
    while (!has(slurp(log), "SIGHUP")) nap();
    CHECK(status_with("key-one") == 401);
    CHECK(status_with("key-two") == 200);
    while (!has(slurp(log), "\"status\":200")) nap();
    CHECK(std::filesystem::remove(keys));
    server.signal(SIGHUP);                                                // no keys to read: the old ones stay
    while (!has(slurp(log), "SIGHUP: the log was opened again\"")) nap(); // and nothing else
    CHECK(has(slurp(log), "no such file"));
    CHECK(status_with("key-two") == 200);
    CHECK(server.get("/health").status == 200);
    server.signal(SIGTERM);
    CHECK(server.wait() == 0);
    std::istringstream lines(slurp(old_log) + slurp(log));
    for (std::string line; std::getline(lines, line);) {
        CAPTURE(line);
        CHECK(Json::parse(line)["time"].get<std::string>().size() == std::string("2026-11-25T12:00:00.000Z").size());
        CHECK_FALSE(has(line, "/health")); // probes are for --log-level debug
    }
    CHECK(has(slurp(old_log), "listening on ")); // the start, too
    CHECK_FALSE(has(slurp(old_log), "key-two"));
    std::filesystem::remove(log);
    std::filesystem::remove(old_log);
}

TEST_CASE("a log can be quiet or tell everything", "[server]") {
    Server all({"-v"});
    CHECK(all.get("/health").status == 200);
    while (!has(all.log(), "GET /health 200")) nap();
    const Finished quiet =
        run_program("server", {"-m", shipped, "--device", "cpu", "--log-level", "error", "--host", "256.1.1.1"});
    CHECK(quiet.code == 1);
    CHECK(std::ranges::count(quiet.err, '\n') == 1);
    const Finished odd = run_program("server", {"--log-level", "loud"});
    CHECK(odd.code == 2);
    CHECK(odd.err.ends_with("Z error server: --log-level: loud not in {error,warning,info,debug}\n"));
    CHECK(has(run_program("server", {"--log-file", "/none/log", "-m", shipped}).err,
              "Z error server: cannot write the log '/none/log': No such file or directory\n"));
}

TEST_CASE("while a model is loaded the port says so", "[server]") {
    const quire::Result<quire::Listener> free = quire::listen_tcp("127.0.0.1", 0);
    REQUIRE(free.has_value());
    quire::close_tcp(free->fd);
    std::vector<std::string> flags{"--port", std::to_string(free->port), "-c", "1024", "--kv-blocks",
                                   "1000",   "--max-pinned-blocks",      "800"};
    for (int i = 0; i < 6; i++) { // which takes a while
        std::string text;
        for (int word = 0; word < 400; word++) text += " " + std::to_string(i * 1000 + word);
        flags.insert(flags.end(), {"--pin", text.substr(0, 900)});
    }
    std::atomic<bool> over = false;
    Reply             live, ready, asked, page, program;
    std::jthread      caller([&] {
        while (!over && ready.status != 503) {
            const Client client(free->port);
            if (client.connected()) ready = Client(free->port).get("/health");
            nap();
        }
        live    = Client(free->port).get("/health/live");
        asked   = Client(free->port).post("/v1/messages", "{}");
        page    = Client(free->port).get("/", "Accept: text/html,*/*\r\n");
        program = Client(free->port).get("/", "Accept: */*\r\n");
    });
    const Server      server(flags);
    over = true;
    caller.join();
    CHECK(ready.status == 503);
    const Json body = Json::parse(ready.body);
    CHECK(has(body["error"]["message"].get<std::string>(), "Loading model"));
    CHECK(body["progress"].get<double>() >= 0);
    CHECK(live.status == 200);
    if (asked.status == 503) CHECK(Json::parse(asked.body)["type"] == "error"); // in Anthropic's form
    if (page.status == 503) { // which a browser shows, and asks for again
        CHECK(has(page.headers.at("content-type"), "text/html"));
        CHECK(has(page.headers.at("content-security-policy"), "default-src 'none'"));
        CHECK(has(page.body, "http-equiv=\"refresh\""));
        CHECK(has(page.body, " %. The page opens by itself."));
    }
    if (program.status == 503) CHECK(Json::parse(program.body)["error"]["code"] == "loading_model");
    CHECK(server.get("/health/ready").status == 200);
    CHECK(server.get("/health/live").status == 200);
}

TEST_CASE("responses that are not streamed say that the server shuts down", "[server]") {
    Server server({"--drain-timeout", "0"});
    Client running = server.client();
    Json   body    = long_one;
    body.update({{"best_of", 3}, {"temperature", 1.5}});
    running.send(Client::request("/v1/completions", body.dump()));
    while (server.metric("vllm:num_requests_running") < 1) nap();
    server.signal(SIGTERM);
    const Reply r = running.reply();
    CHECK(r.status == 503);
    CHECK(Json::parse(r.body)["error"]["code"] == "shutting_down");
    CHECK(server.wait() == 0);
}

TEST_CASE("a drain does not wait for ever, a second signal not at all", "[server]") {
    Server server({"--drain-timeout", "0"});
    Client running = server.client();
    Json   body    = long_one;
    body["stream"] = true;
    running.send(Client::request("/v1/completions", body.dump()));
    CHECK(running.head().status == 200);
    CHECK(!running.chunk().empty());
    SECTION("in time") {
        server.signal(SIGINT);
        CHECK(has(running.rest(), "shutting down")); // an event of its own, behind the tokens
        CHECK(server.wait() == 0);
    }
    SECTION("at once") {
        Server patient({"--drain-timeout", "600"});
        Client long_running = patient.client();
        Json   many         = long_one;
        many["n"]           = 32;
        long_running.send(Client::request("/v1/completions", many.dump()));
        while (patient.metric("vllm:num_requests_running") < 1) nap();
        patient.signal(SIGTERM);
        while (patient.get("/health").status == 200) nap();
        patient.signal(SIGTERM);
        CHECK(patient.wait() == 1);
    }
}

TEST_CASE("a Unix socket, and names of the model", "[server]") {
    const std::string path = temporary() + ".sock";
    {
        Server server({"--unix", path, "--alias", "one,two", "--port", "8080"});
        Client c(path);
        REQUIRE(c.connected());
        CHECK(Json::parse(c.get("/v1/models").body)["data"].size() == 2);
        CHECK(c.post("/v1/completions", R"({"prompt":"a","model":"two","max_tokens":1})").status == 200);
        server.signal(SIGTERM);
        CHECK(server.wait() == 0);
    }
    CHECK(access(path.c_str(), F_OK) != 0); // gone with it
}

TEST_CASE("several hosts, and a seed for requests that name none", "[server]") {
    Server     server({"--host", "127.0.0.1,127.0.0.2", "--seed", "7", "-rea", "off", "-e", "--no-mmproj"});
    const auto port = std::to_string(server.port());
    CHECK(has(server.errors(), "listening on http://127.0.0.1:" + port + " and http://127.0.0.2:" + port));
    CHECK(has(server.errors(), "ignored: -e, --no-mmproj\n"));
    CHECK(!has(server.errors(), "warning"));
    const int   fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family      = AF_INET;
    address.sin_port        = htons(static_cast<unsigned short>(server.port()));
    address.sin_addr.s_addr = htonl(0x7f000002);
    CHECK(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
    close(fd);
    const auto text = [&](const nlohmann::json& more) {
        nlohmann::json body{{"prompt", "Once"}, {"max_tokens", 12}, {"temperature", 2}, {"top_k", 0}};
        body.update(more);
        return server.ask("/v1/completions", body)["choices"][0]["text"];
    };
    const auto once = text({{"n", 1}});
    CHECK(text({{"n", 1}}) == once);
    CHECK(text({{"seed", 7}}) == once);
    CHECK(text({{"seed", 8}}) != once);
    server.signal(SIGTERM);
    CHECK(server.wait() == 0);
    CHECK(run_program("server", {"-m", shipped, "--host", ","}).code == 2);
}

TEST_CASE("metrics of guessed tokens have a sample for each place in a step", "[server]") {
    const Server s({"--spec", "ngram", "--spec-draft-n-max", "3"});
    const Json   sea = s.ask("/tokenize", {{"content", " sea"}})["tokens"];
    s.ask("/v1/completions", {{"prompt", "A sea sea sea sea"}, {"max_tokens", 60}, {"allowed_token_ids", sea}});
    const std::string all = s.get("/metrics").body;
    for (const std::string name :
         {"vllm:spec_decode_num_accepted_tokens", "llamacpp:spec_decode_num_accepted_tokens"}) {
        CAPTURE(name);
        const std::size_t begin    = all.find("\n" + name + "_per_pos_total{");
        const auto        accepted = [&](int place) {
            const std::string label = "position=\"" + std::to_string(place) + "\"} ";
            const std::size_t at    = all.find(label, begin);
            REQUIRE(at != std::string::npos);
            return std::strtod(all.c_str() + at + label.size(), nullptr);
        };
        REQUIRE(begin != std::string::npos);
        CHECK(accepted(0) >= accepted(1));
        CHECK(accepted(1) >= accepted(2));
        const std::size_t total = all.find("\n" + name + "_total");
        CHECK(accepted(0) + accepted(1) + accepted(2) == std::strtod(all.c_str() + all.find(' ', total) + 1, nullptr));
    }
    CHECK(s.metric("vllm:spec_decode_num_accepted_tokens_total") > 0);
    CHECK(!has(all, "position=\"3\""));
    CHECK(has(s.get("/slots").body, "\"speculative\":true"));
}

TEST_CASE("flags of llama.cpp and vLLM are ignored with a line, or refused by name", "[server]") {
    const Finished ignored = run_program(
        "server", {"-m", "/none.gguf", "-ngl", "99", "-fa", "on", "-cb", "--jinja", "--metrics", "-np", "2", "-ctk",
                   "f16", "--mlock", "--enforce-eager", "--enable-chunked-prefill", "--no-webui", "-to", "60"});
    CHECK(ignored.code == 1);
    CHECK(has(
        ignored.err,
        "Z info server: not needed here, and ignored: -ngl, -fa, -cb, --jinja, --metrics, --mlock, " // a line of the log
        "--enforce-eager, --enable-chunked-prefill\n"));
    CHECK(has(ignored.err, "Z error server: "));
    CHECK(std::ranges::count(ignored.err, '\n') == 2);
    for (const std::vector<std::string>& refused : std::vector<std::vector<std::string>>{
             {"-dr", "x/y"}, {"--hf-repo-draft", "m"}, {"--reuse-port"}, {"-nglx"}, {"--mmproj", "f"}}) {
        const Finished f = run_program("server", refused);
        CAPTURE(f.err);
        CHECK(f.code == 2);
        CHECK(std::ranges::count(f.err, '\n') == 1);
        CHECK(f.err.find(refused[0]) != std::string::npos);
    }
    for (const std::vector<std::string>& refused :
         std::vector<std::vector<std::string>>{{"--quantization", "awq"},
                                               {"--pipeline-parallel-size", "2"},
                                               {"--tokenizer", "x"},
                                               {"--speculative-config", "{}"}}) {
        const Finished f = run_program("server", refused);
        CAPTURE(f.err);
        CHECK(f.code == 2);
        CHECK(has(f.err, "Z error server: " + refused[0] + ": "));
    }
    const Finished bench =
        run_program("bench", {"model", "-m", "/none.gguf", "-ngl", "99", "-fa", "1", "-mmp", "0", "-p", "8"});
    CHECK(bench.code == 1);
    CHECK(bench.err.starts_with("bench: not needed here, and ignored: -ngl, -fa, -mmp\n"));
    CHECK(run_program("bench", {"model", "-hf", "x"}).code == 2);
}

TEST_CASE("wrong usage is one line", "[server]") {
    for (const auto& [arguments, code] :
         std::vector<std::pair<std::vector<std::string>, int>>{{{"--nonsense"}, 2},
                                                               {{"--port", "99999"}, 2},
                                                               {{"--parallel", "5000"}, 2},
                                                               {{"-m", shipped, "--chat-template", "none"}, 2},
                                                               {{"-m", "/nonexistent.gguf"}, 1},
                                                               {{"-m", shipped, "--host", "256.1.1.1"}, 1},
                                                               {{"-m", shipped, "--api-key-file", "/nonexistent"}, 1},
                                                               {{"-m", shipped, "--tls-cert", "/nonexistent"}, 1},
                                                               {{"-m", shipped, "--unix", "/nonexistent/x"}, 1}}) {
        const Finished f = run_program("server", arguments);
        INFO(f.err);
        CHECK(f.code == code);
        CHECK(has(f.err, "Z error server: "));
    }
}

TEST_CASE("all lines have one form, those about flags too", "[server]") {
    const std::string config = temporary(), form = "2026-11-25T12:00:00.000Z error server: ";
    const auto        write = [&](const std::string& text) { std::ofstream(config) << text; };
    write("log-json\nport = many\n");
    using Words = std::vector<std::string>;
    for (const Words& words : std::vector<Words>{{"--nonsense"},
                                                 {"--config", "/nonexistent"},
                                                 {"-hf", "no-user"},
                                                 {"-m", "/nonexistent.gguf"},
                                                 {"/nonexistent.gguf"},
                                                 {"-m", shipped, "--host", ""},
                                                 {"-m", shipped, "--host", "256.1.1.1"},
                                                 {"-m", shipped, "--models-dir", "/tmp"}}) {
        const Finished text = run_program("server", words);
        INFO(text.err);
        REQUIRE(text.err.size() > form.size());
        for (std::size_t i = 0; i < form.size(); i++) // the time's digits differ
            CHECK((std::isdigit(static_cast<unsigned char>(form[i]))
                       ? std::isdigit(static_cast<unsigned char>(text.err[i])) != 0
                       : text.err[i] == form[i]));
        CHECK(std::ranges::count(text.err, '\n') == 1);
        Words json = words;
        json.emplace_back("--log-json");
        const Finished f    = run_program("server", json);
        const Json     line = Json::parse(f.err);
        CHECK(f.code == text.code);
        CHECK(line["level"] == "error");
        CHECK(line["time"].get<std::string>().size() == form.find(' '));
        CHECK(line["message"].get<std::string>() + "\n" == text.err.substr(form.size()));
    }
    // The file and the variable say in which form their own faults are written.
    CHECK(has(Json::parse(run_program("server", {"--config", config}).err)["message"].get<std::string>(),
              "line 2: --port: 'many'"));
    write("log-json = off\nport = many\n");
    CHECK(has(run_program("server", {"--config=" + config}).err, "Z error server: "));
    CHECK(has(
        run_program("env", {"QUIRE_LOG_JSON=1", std::string(QUIRE_BIN) + "/server", "--nonsense"}, "", "/usr/bin").err,
        R"("level":"error")"));
    // So have the lines of a server that serves, and of requests.
    CHECK(has(common().errors(), "Z info server: listening on "));
    CHECK(common().get("/version").status == 200);
    while (!has(common().log(), "/version 200")) nap();
    CHECK(has(common().log(), "Z info "));
    std::filesystem::remove(config);
}

TEST_CASE("numbers of the help are plain", "[server]") {
    std::vector<std::pair<std::string, std::vector<std::string>>> all{
        {"server", {"-h"}}, {"chat", {"-h"}}, {"block-viz", {"-h"}}};
    for (const char* command : {"logits", "generate", "show", "tokenize"}) all.push_back({"inspect", {command, "-h"}});
    for (const char* command : {"model", "batched", "serve", "throughput", "make-model", "compare"})
        all.push_back({"bench", {command, "-h"}});
    for (const auto& [tool, arguments] : all) {
        const Finished f = run_program(tool, arguments);
        INFO(tool << ' ' << arguments[0] << f.out);
        CHECK(f.code == 0);
        CHECK(!std::regex_search(f.out, std::regex("[0-9]e[+-]?[0-9]"))); // 1e+06
    }
}
