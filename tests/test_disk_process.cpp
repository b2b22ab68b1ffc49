// The program `server` with files behind its prefix cache, killed again and again.
#include <sys/stat.h>
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
#include "reference.h"
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
        double hits = 0;
        for (const char* tier : {"device", "host", "disk"})
            hits += server.metric(std::string("quire:kv_") + tier + "_hits_total");
        CHECK(hits == server.metric("vllm:prefix_cache_hits_total"));
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

TEST_CASE("a saved slot comes back after a restart", "[server]") {
    const fs::path folder = temporary();
    fs::remove(folder);
    std::vector<std::string> flags{"--slot-save-path", folder.string(), "--kv-host-bytes", "64M", "-np", "2"};
    const auto               native = [](int i, int slot) {
        Json body = question(i);
        body.update({{"n_predict", 8}, {"id_slot", slot}});
        body.erase("max_tokens");
        return body;
    };
    const auto act = [](const Server& s, const std::string& slot, const std::string& action, const std::string& name) {
        return s.post("/slots/" + slot + "?action=" + action, {{"filename", name}});
    };
    Json first;
    {
        const Server s(flags);
        CHECK(act(s, "1", "save", "chat").status == 400); // no text
        first = s.ask("/completion", native(0, 1));
        CHECK(first["id_slot"] == 1);
        CHECK(s.ask("/completion", native(0, -1))["id_slot"] == 1); // the text begins alike
        CHECK(s.ask("/completion", {{"prompt", "x"}, {"n_predict", 2}})["id_slot"] == 0);
        for (const Json& wrong : {Json(2), Json(-2), Json("1"), Json(0.5)}) {
            Json named       = native(0, 0);
            named["id_slot"] = wrong;
            const Reply r    = s.post("/completion", named);
            INFO(r.body);
            CHECK(r.status == 400);
            CHECK(Json::parse(r.body)["error"]["param"] == "id_slot");
        }
        const Reply saved = act(s, "1", "save", "chat-1.bin");
        INFO(saved.body);
        REQUIRE(saved.status == 200);
        const Json body = Json::parse(saved.body);
        CHECK(body["id_slot"] == 1);
        CHECK(body["filename"] == "chat-1.bin");
        const int text = first["tokens_evaluated"].get<int>() + first["tokens_predicted"].get<int>();
        CHECK(body["n_saved"].get<int>() > text - 17); // whole blocks of what is computed
        CHECK(body["n_saved"].get<int>() < text);
        CHECK(body["n_written"].get<int>() > 1000);
        CHECK(body["timings"].contains("save_ms"));
        CHECK((fs::status(folder / "chat-1.bin.slot").permissions() & fs::perms(077)) == fs::perms::none);
        for (const std::string name : {"", ".", "../x", "a/b", ".hidden", "a b", "a\\b", "caf\xc3\xa9"})
            CHECK(act(s, "1", "save", name).status == 400);
        CHECK(act(s, "2", "save", "x").status == 400);
        CHECK(act(s, "one", "save", "x").status == 400);
        CHECK(act(s, "1", "load", "x").status == 400);
        CHECK(act(s, "1", "restore", "nothing").status == 400);
        Json salted          = native(0, 0);
        salted["cache_salt"] = "s";
        s.ask("/completion", salted);
        CHECK(has(act(s, "0", "save", "x").body, "--kv-key"));
        CHECK(Json::parse(act(s, "1", "erase", "x").body)["n_erased"].get<int>() >= text - 1);
        CHECK(act(s, "1", "save", "x").status == 400);
    }
    {
        const Server s(flags);
        const Reply  restored = act(s, "0", "restore", "chat-1.bin");
        INFO(restored.body);
        REQUIRE(restored.status == 200);
        CHECK(Json::parse(restored.body)["n_restored"].get<int>() > 100);
        CHECK(Json::parse(restored.body)["timings"].contains("restore_ms"));
        CHECK(act(s, "0", "save", "copy").status == 200);
        const Json again = s.ask("/completion", native(0, 0));
        CHECK(again["content"] == first["content"]);
        CHECK(again["tokens_cached"].get<int>() > 100);
        std::fstream file(folder / "copy.slot", std::ios::in | std::ios::out | std::ios::binary);
        file.seekp(70);
        file.put(char(99));
        file.close();
        CHECK(has(act(s, "0", "restore", "copy").body, "is damaged"));
        fs::resize_file(folder / "copy.slot", 40);
        CHECK(has(act(s, "0", "restore", "copy").body, "is damaged"));
        CHECK(act(s, "0", "erase", "").status == 200);
    }
    CHECK(Server({}).post("/slots/0?action=save", {{"filename", "x"}}).status == 501);
    const fs::path key = temporary();
    std::ofstream(key) << std::string(40, 'k');
    flags.insert(flags.end(), {"--kv-key", key.string()});
    std::vector<std::string> arguments{"-m", shipped, "--port", "0", "--device", "cpu"};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    const Finished refused = run_program("server", arguments);
    CHECK(refused.code == 1);
    CHECK(has(refused.err, ".slot was saved without a key, so that its text can be read"));
    for (const char* name : {"chat-1.bin.slot", "copy.slot"}) fs::remove(folder / name);
    CHECK(mkfifo((folder / "pipe.slot").c_str(), 0600) == 0); // nobody writes to it
    {
        const Server s(flags);
        CHECK(has(s.errors(), "without encryption deleted"));
        Json salted          = native(1, 0);
        salted["cache_salt"] = "s";
        s.ask("/completion", salted);
        CHECK(act(s, "0", "save", "salted").status == 200);
        CHECK(Json::parse(act(s, "1", "restore", "salted").body)["n_restored"].get<int>() > 100);
    }
    fs::remove_all(folder);
    fs::remove(key);
}

TEST_CASE("a slot whose text has adapters is saved with a key alone, and the answer says why", "[server]") {
    const fs::path folder = temporary(), key = temporary();
    std::ofstream(key) << std::string(40, 'k');
    for (const bool with_key : {false, true}) {
        fs::remove_all(folder);
        std::vector<std::string> flags{"--slot-save-path",
                                       folder.string(),
                                       "--kv-host-bytes",
                                       "64M",
                                       "-np",
                                       "1",
                                       "--lora",
                                       reference("adapters/llama3-gqa.one.gguf")};
        if (with_key) flags.insert(flags.end(), {"--kv-key", key.string()});
        const Server     s(flags, reference("models/llama3-gqa-F16.gguf"));
        std::vector<int> prompt(60);
        for (int i = 0; i < 60; i++) prompt[std::size_t(i)] = 5 + i * 37 % 600;
        s.ask("/completion", {{"prompt", prompt}, {"n_predict", 4}, {"id_slot", 0}});
        const Reply saved = s.post("/slots/0?action=save", {{"filename", "x"}});
        INFO(saved.body);
        CHECK(saved.status == (with_key ? 200 : 400));
        CHECK(has(saved.body, "saved only with --kv-key") == !with_key);
        // A request with adapters of its own leaves no text, and not the text of the request before it.
        const Json own = s.ask("/completion", {{"prompt", prompt},
                                               {"n_predict", 4},
                                               {"id_slot", 0},
                                               {"lora", Json::array({{{"id", 0}, {"scale", 0.5}}})}});
        CHECK(own["id_slot"] == -1);
        const Reply left = s.post("/slots/0?action=save", {{"filename", "y"}});
        INFO(left.body);
        CHECK(left.status == 400);
        CHECK(has(left.body, "named adapters of its own"));
        CHECK_FALSE(fs::exists(folder / "y.slot"));
        s.ask("/completion", {{"prompt", prompt}, {"n_predict", 4}, {"id_slot", 0}});
        CHECK(s.post("/slots/0?action=save", {{"filename", "y"}}).status == (with_key ? 200 : 400));
    }
    fs::remove_all(folder);
    fs::remove(key);
}

TEST_CASE("a slot that the files do not take is not saved, and the log says so", "[server]") {
    const fs::path folder = temporary();
    fs::remove(folder);
    const Server s(
        {"--slot-save-path", folder.string(), "--kv-host-bytes", "64M", "--kv-disk-bytes", "400K", "-np", "1"});
    CHECK(has(s.errors(), "the KV files in " + folder.string()));
    Json body = question(0);
    body.update({{"n_predict", 8}, {"id_slot", 0}});
    body.erase("max_tokens");
    s.ask("/completion", body);
    const Reply saved = s.post("/slots/0?action=save", {{"filename", "x"}});
    CHECK(saved.status == 507);
    CHECK(has(saved.body, "the slot was not saved: the files have "));
    CHECK_FALSE(fs::exists(folder / "x.slot"));
    fs::remove_all(folder);
}
