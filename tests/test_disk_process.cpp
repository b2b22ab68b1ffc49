// The program `server` with files behind its prefix cache, killed again and again.
#include <catch2/catch_test_macros.hpp>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <nlohmann/json.hpp>

#include "http_client.h"
#include "process.h"
#include "server_process.h"

using namespace quire::testing;
using Json   = nlohmann::json;
namespace fs = std::filesystem;

namespace {

// Prompts that begin alike, of some hundred tokens.
Json question(int i) {
    std::string text = "Once upon a time there was a small house at the edge of a forest. ";
    for (int k = 0; k < 20; k++) text += "In room " + std::to_string(i % 3 * 20 + k) + " somebody read a book. ";
    return {{"prompt", text + "And then " + std::to_string(i)}, {"max_tokens", 8}, {"temperature", 0}};
}

int on_disk(const Json& answer) {
    return answer["usage"]["prompt_tokens_details"].value("cached_tokens_by_tier", Json::object()).value("disk", 0);
}

} // namespace

TEST_CASE("a server that is killed finds what it had, and answers as before", "[server]") {
    const fs::path                 folder = temporary();
    const std::vector<std::string> flags{
        "--kv-dir", (folder / "kv").string(), "--kv-host-bytes", "64M", "--kv-disk-bytes", "64M", "-c", "1024"};
    fs::remove(folder);
    fs::create_directory(folder);
    std::map<int, Json> answers; // by question
    for (const Server plain({"-c", "1024"}); int(answers.size()) < 6;)
        answers[int(answers.size())] = plain.ask("/v1/completions", question(int(answers.size())))["choices"];
    std::mt19937 random(4);
    int          from_disk = 0;
    for (int round = 0; round < 5; round++) {
        Server server(flags);
        CAPTURE(round);
        for (int i = 0; i < 6; i++) {
            const Json answer = server.ask("/v1/completions", question(i));
            CHECK(answer["choices"] == answers[i]);
            from_disk += on_disk(answer);
        }
        std::thread asks([&] { // killed in the middle of a question
            try {
                (void)server.post("/v1/completions", question(100 + round));
            } catch (const std::exception&) {}
        });
        std::this_thread::sleep_for(std::chrono::milliseconds(random() % 60));
        server.signal(SIGKILL);
        server.wait();
        asks.join();
        if (round % 2 == 0) continue;
        for (const auto& entry : fs::directory_iterator(folder / "kv")) { // and damaged
            if (entry.path().extension() != ".kv" || random() % 2) continue;
            const auto size = fs::file_size(entry.path());
            if (random() % 2) fs::resize_file(entry.path(), random() % size);
            std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
            file.seekp(std::streamoff(random() % size));
            file.put(char(random()));
        }
    }
    CHECK(from_disk > 0);
    {
        Server first(flags);
        CHECK(first.ask("/v1/completions", question(0))["choices"] == answers[0]);
        const Finished second = run_program(
            "server", {"-m", shipped, "--port", "0", "--device", "cpu", "--kv-dir", (folder / "kv").string()});
        CHECK(second.code == 1);
        CHECK(has(second.err, "is in use by another process"));
        CHECK(first.metric("quire:kv_disk_bytes") > 0);
    }
    fs::remove_all(folder);
}
