// A server of several models: which one leaves, presets, names; and over HTTP: models that load and leave while others answer.
#include <catch2/catch_test_macros.hpp>

#include <sys/socket.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <nlohmann/json.hpp>

#include "http_client.h"
#include "process.h"
#include "server_process.h"

import quire.core.result;
import quire.serve.models.catalog;
import quire.serve.models.leaving;
import quire.serve.models.model_field;
import quire.tools.hub.hub;
import quire.tools.server.presets;

using namespace quire::testing;
using Json   = nlohmann::json;
namespace fs = std::filesystem;

namespace {

using quire::choose_leaving;
using quire::NoRoom;
using quire::Resident;
using Places = std::vector<std::size_t>;

// No test sees the models that the user has fetched.
const bool no_cache = setenv("HF_HUB_CACHE", "/nonexistent", 1) == 0;

// A directory with small models: chat (the one that ships), llama, qwen, mistral, and bad, which is no model.
class Models {
public:
    Models() : path_(temporary()) {
        fs::remove(path_);
        fs::create_directories(path_ / "deep" / "er");
        fs::create_symlink(shipped, path_ / "chat.gguf");
        const std::string data = QUIRE_ROOT "/tests/data/models/";
        fs::create_symlink(data + "llama3-gqa-Q8_0.gguf", path_ / "llama.gguf");
        fs::create_symlink(data + "qwen2-Q4_0.gguf", path_ / "deep" / "qwen.gguf");
        fs::create_symlink(data + "mistral-swa-Q8_0.gguf", path_ / "deep" / "er" / "mistral.gguf");
        std::ofstream(path_ / "bad.gguf") << "GGUF, but no model";
        std::ofstream(path_ / "short.gguf") << "no"; // in no list
        std::ofstream(path_ / "notes.txt") << "nothing";
    }
    Models(const Models&)            = delete;
    Models& operator=(const Models&) = delete;
    ~Models() { fs::remove_all(path_); }

    std::string path() const { return path_.string(); }
    // A server of them.
    Server serve(std::vector<std::string> flags = {}) const {
        flags.insert(flags.begin(), {"--models-dir", path(), "--temp", "0"});
        return Server(flags, "");
    }

private:
    fs::path path_;
};

Json completion(const std::string& model, int n = 4) {
    return {{"model", model}, {"prompt", "Hello world"}, {"max_tokens", n}, {"ignore_eos", true}, {"temperature", 0}};
}

std::string status_of(const Server& s, const std::string& model) {
    for (const Json& one : s.ask_get("/models")["data"])
        if (one["id"] == model) return one["status"]["value"];
    return "";
}

void until_status(const Server& s, const std::string& model, const std::string& status) {
    while (status_of(s, model) != status) nap();
}

// A stream of `n` tokens that has begun.
Client begin_stream(const Server& s, const std::string& model, int n) {
    Json body      = completion(model, n);
    body["stream"] = true;
    Client client  = s.client();
    client.send(Client::request("/v1/completions", body.dump()));
    REQUIRE(client.head().status == 200);
    REQUIRE(has(client.chunk(), "data: "));
    return client;
}

// Whether the stream ends as it should.
bool ends_well(Client& client) {
    std::string last;
    for (std::string piece = client.chunk(); !piece.empty(); piece = client.chunk()) last += piece;
    return has(last, "\"finish_reason\":\"length\"") && last.ends_with("data: [DONE]\n\n");
}

} // namespace

TEST_CASE("the least recently used models leave, and none that answers", "[models]") {
    const std::vector<Resident> three{{100, 7, false}, {200, 3, false}, {50, 5, false}};
    CHECK(choose_leaving(three, {80, 100, 0}) == Places{}); // there is room
    CHECK(choose_leaving(three, {80, 0, 0}) == Places{1});
    CHECK(choose_leaving(three, {210, 0, 0}) == Places{1, 2});
    CHECK(choose_leaving(three, {350, 0, 0}) == Places{1, 2, 0});
    CHECK(choose_leaving(three, {351, 0, 0}).error() == NoRoom::too_large);
    CHECK(choose_leaving(three, {10, 100, 3}) == Places{1}); // too many models
    CHECK(choose_leaving(three, {10, 100, 4}) == Places{});
    CHECK(choose_leaving(three, {10, 100, 1}) == Places{1, 2, 0});
    // A small one that was used before stays where a later one makes the room alone.
    CHECK(choose_leaving(std::vector<Resident>{{10, 1, false}, {100, 2, false}}, {90, 0, 0}) == Places{1});

    const std::vector<Resident> busy{{100, 1, true}, {100, 2, false}, {100, 3, true}};
    CHECK(choose_leaving(busy, {100, 0, 3}) == Places{1});
    CHECK(choose_leaving(busy, {101, 0, 0}).error() == NoRoom::answering);
    CHECK(choose_leaving(busy, {1, 1, 2}).error() == NoRoom::answering);
    CHECK(choose_leaving(busy, {301, 0, 0}).error() == NoRoom::too_large);
    CHECK(choose_leaving({}, {5, 5, 1}) == Places{});
}

TEST_CASE("a model's id is its file's name, and a split model is one", "[models]") {
    using quire::model_id;
    CHECK(model_id("a.b-Q8_0.gguf") == "a.b-Q8_0");
    CHECK(model_id("big-00001-of-00003.gguf") == "big");
    for (const char* none : {"big-00002-of-00003.gguf", "mmproj-a.gguf", "a.bin", ".gguf", "gguf", "a.gguf.part"})
        CHECK(!model_id(none));
    CHECK(model_id("a-0001-of-0003.gguf") == "a-0001-of-0003"); // not the form of a part

    const fs::path folder = temporary();
    fs::remove(folder);
    fs::create_directories(folder / "x");
    for (const char* name :
         {"a.gguf", "x/a.gguf", "x/b-00001-of-00002.gguf", "x/b-00002-of-00002.gguf", "c.txt", "\xff\xfe.gguf"})
        std::ofstream(folder / name) << "GGUF";
    std::ofstream(folder / "d.gguf") << "GG";
    fs::create_directory_symlink(folder, folder / "x" / "circle");
    const auto found = quire::find_models(folder.string());
    REQUIRE(found);
    std::vector<std::string> ids;
    for (const quire::FoundModel& one : *found) ids.push_back(one.id);
    CHECK(ids == std::vector<std::string>{"a", "x/a", "b"});
    CHECK(has(found->back().path, "b-00001-of-00002.gguf"));
    fs::remove_all(folder);
    // A file further up is named first, and no two have one name.
    fs::create_directories(folder / "a" / "b");
    for (const char* name : {"x.gguf", "a/x.gguf", "a/x-00001-of-00002.gguf", "a/b/x.gguf", "a/b/y.gguf", "a/y.gguf",
                             "y-00001-of-00002.gguf"})
        std::ofstream(folder / name) << "GGUF";
    const auto same = quire::find_models(folder.string());
    REQUIRE(same);
    std::map<std::string, std::string> paths;
    for (const quire::FoundModel& one : *same) paths[one.id] = fs::relative(one.path, folder).string();
    CHECK(paths == std::map<std::string, std::string>{{"a/b/x", "a/b/x.gguf"},
                                                      {"a/b/y", "a/b/y.gguf"},
                                                      {"a/x", "a/x-00001-of-00002.gguf"},
                                                      {"a/x.gguf", "a/x.gguf"},
                                                      {"a/y", "a/y.gguf"},
                                                      {"x", "x.gguf"},
                                                      {"y", "y-00001-of-00002.gguf"}});
    fs::remove_all(folder);
    CHECK(has(quire::find_models(folder.string()).error().message, "cannot read"));

    CHECK(quire::directory_name("a-Q8_0.1") == "a-Q8_0.1");
    for (const char* odd : {"a/b", "..", "", "a b", "\xc3\xa9"}) {
        const std::string name = quire::directory_name(odd);
        CHECK((name.size() > 16 && name[0] == '_' && name.find_first_of("/ ") == std::string::npos));
    }
    CHECK(quire::directory_name("a/b") != quire::directory_name("a_b"));
}

TEST_CASE("the model of a body is found without parsing it", "[models]") {
    using quire::model_field;
    CHECK(model_field(R"({"model":"a"})") == "a");
    CHECK(model_field(R"( { "x" : {"model":"no"}, "y":["model",":","z"], "model" : "a\"\u00e9" } )") == "a\"\xc3\xa9");
    CHECK(model_field(R"({"model":"a","model":"b"})") == "b");
    CHECK(model_field(R"({"text":"\"model\":\"x\"","s":"model"})").empty());
    for (const char* none : {"", "{", "[]", R"(["model","a"])", R"({"model":1})", R"({"model":)", R"({"model")",
                             R"({"model":"a)", "\"model\":\"a\"", "{\"", "{\"\\", "}}\"model\":\"a\""})
        CHECK(model_field(none).empty());
}

TEST_CASE("a file of presets is read in llama.cpp's form", "[models]") {
    const quire::OwnFlag own{[](const std::string& name) -> std::optional<bool> {
        if (name == "--ctx-size" || name == "-c" || name == "--model") return true;
        if (name == "--jinja") return false;
        return std::nullopt;
    }};
    const auto           misplaced = [](const std::string& flag) -> std::string {
        return flag == "--port" ? " belongs to the server" : "";
    };
    quire::Preset all;
    const auto    presets = quire::parse_presets(
        "version = 1\n; text\n[one]\r\nctx-size = 8\njinja = true\nload-on-startup = 1\n"
           "\n[*]\nc = 4\nstop-timeout = 5\n[a/b:Q8]\nmodel = \"/x y.gguf\"\njinja = false\n",
        "p.ini", own, misplaced, all);
    REQUIRE(presets);
    REQUIRE(presets->size() == 2);
    CHECK(all.words == std::vector<std::string>{"-c", "4"});
    CHECK((*presets)[0].name == "one");
    CHECK((*presets)[0].words == std::vector<std::string>{"-c", "4", "--ctx-size=8", "--jinja"});
    CHECK((*presets)[0].load_on_startup);
    CHECK((*presets)[1].name == "a/b:Q8");
    CHECK((*presets)[1].words == std::vector<std::string>{"-c", "4", "--model=/x y.gguf", "--no-jinja"});
    CHECK(!(*presets)[1].load_on_startup);
    for (const char* word : {"yes", "on", "TRUE", "1", "no", "off", "false", "0"}) {
        quire::Preset     none;
        const std::string text =
            std::string("\xef\xbb\xbf[a]\nload-on-startup = ") + word + "\n"; // with the mark of UTF-8
        const auto read = quire::parse_presets(text, "p.ini", own, misplaced, none);
        INFO(word);
        REQUIRE(read);
        CHECK((*read)[0].name == "a");
        CHECK((*read)[0].load_on_startup == (std::string("yesonTRUE1").find(word) != std::string::npos));
    }
    for (const auto& [text, fault] :
         {std::pair{"a = 1\n", "p.ini, line 1: a flag stands in a section: [NAME], or [*] for all models"},
          std::pair{"[a\n", "p.ini, line 1: a section is written [NAME]"},
          std::pair{"[ ]\n", "p.ini, line 1: a section is written"},
          std::pair{"[a]\n[a]\n", "p.ini, line 2: there is a section 'a' already"},
          std::pair{"[a]\n\nnonsense = 1\n", "p.ini, line 3: there is no flag '--nonsense'"},
          std::pair{"[a]\nport: 8\n", "p.ini, line 2: --port belongs to the server"},
          std::pair{"[*]\nport 8\n", "p.ini, line 2: --port belongs to the server"},
          std::pair{"[a]\nctx-size =\n", "p.ini, line 2: --ctx-size needs a value"},
          std::pair{"[*]\nmodel = /x.gguf\n",
                    "p.ini, line 2: the file of a model stands in the section of that model, not in [*]"},
          std::pair{"[a]\nload-on-startup = maybe\n", "p.ini, line 2: load-on-startup is true or false"}}) {
        INFO(text);
        const auto read = quire::parse_presets(text, "p.ini", own, misplaced, all);
        REQUIRE(!read);
        CHECK(has(read.error().message, fault));
    }
}

TEST_CASE("requests choose a model by its name, in every dialect", "[models][server]") {
    const Models          models;
    const Server          s      = models.serve();
    Json                  listed = s.ask_get("/v1/models")["data"];
    std::set<std::string> ids;
    for (const Json& one : listed) {
        ids.insert(one["id"].get<std::string>());
        CHECK(one["status"]["value"] == "unloaded");
    }
    CHECK(ids == std::set<std::string>{"bad", "chat", "llama", "mistral", "qwen"});
    CHECK(s.ask_get("/props")["role"] == "router");

    // Each answers as it does alone.
    for (const char* name : {"llama", "qwen"}) {
        const Json here = s.ask("/v1/completions", completion(name));
        CHECK(here["model"] == name);
        CHECK(status_of(s, name) == "loaded");
        const Server alone({"--temp", "0"},
                           QUIRE_ROOT "/tests/data/models/" +
                               std::string(name == std::string("llama") ? "llama3-gqa-Q8_0.gguf" : "qwen2-Q4_0.gguf"));
        CHECK(alone.ask("/v1/completions", completion(name))["choices"] == here["choices"]);
    }
    CHECK(s.ask("/completion", {{"model", "llama"}, {"prompt", "a"}, {"n_predict", 2}})["model"] == "llama");
    CHECK(s.ask("/v1/chat/completions", {{"model", "chat"}, {"messages", user("Hi")}, {"max_tokens", 2}})["model"] ==
          "chat");
    CHECK(s.ask("/v1/messages", {{"model", "chat"}, {"messages", user("Hi")}, {"max_tokens", 2}})["model"] == "chat");
    CHECK(s.ask("/api/generate", {{"model", "qwen:latest"},
                                  {"prompt", "a"},
                                  {"stream", false},
                                  {"options", {{"num_predict", 2}}}})["done"] == true);
    const Json response = s.ask("/v1/responses", {{"model", "chat"}, {"input", "Hi"}, {"max_output_tokens", 2}});
    CHECK(s.ask_get("/v1/responses/" + response["id"].get<std::string>())["model"] == "chat");
    CHECK(s.ask("/tokenize", {{"model", "llama"}, {"content", "a"}}).contains("tokens"));

    // Routes without a body.
    CHECK(s.ask_get("/props?model=llama")["model_path"] == "llama.gguf");
    CHECK(s.ask_get("/slots?model=qwen").is_array());
    CHECK(s.get("/slots").status == 400);
    CHECK(s.get("/health?model=llama").status == 200);
    CHECK(s.get("/health?model=mistral").status == 503);
    CHECK(s.get("/health?model=nobody").status == 404);
    CHECK(s.get("/health").status == 200);
    for (const char* path : {"/v1/models/llama", "/models/llama", "/v1/models/ll%61ma"}) {
        CHECK(s.ask_get(path)["id"] == "llama");
        CHECK(s.ask_get(path)["status"]["value"] == "loaded");
    }
    const Json paths = s.ask_get("/openapi.json")["paths"];
    for (const char* path :
         {"/slots", "/blocks", "/blocks/events", "/lora-adapters", "/tokenizer_info", "/pins", "/kv_event_sources"}) {
        std::set<std::string> parameters;
        for (const Json& one : paths[path]["get"]["parameters"]) parameters.insert(one["name"].get<std::string>());
        INFO(path);
        CHECK((parameters.contains("model") && parameters.contains("autoload")));
    }
    CHECK(!paths["/version"]["get"].contains("parameters"));
    CHECK(paths.contains("/health/live"));
    const std::string metrics = s.get("/metrics").body;
    for (const char* name : {"llama", "qwen", "chat"})
        CHECK(has(metrics, "vllm:prompt_tokens_total{model_name=\"" + std::string(name) + "\""));
    CHECK(has(metrics, "llamacpp:n_decode_total{model_name=\"qwen\"}"));
    CHECK(metrics.find("# TYPE vllm:prompt_tokens_total") == metrics.rfind("# TYPE vllm:prompt_tokens_total"));
    CHECK(!has(s.get("/metrics?model=qwen").body, "\"llama\""));

    // Ollama's lists: all of them, and those that are loaded.
    CHECK(s.ask_get("/api/tags")["models"].size() == 5);
    CHECK(s.ask_get("/api/ps")["models"].size() == 3);
    CHECK(s.ask("/api/show", {{"model", "mistral"}})["model_info"]["general.architecture"] == "llama");
    CHECK(status_of(s, "mistral") == "unloaded"); // that loads nothing
    CHECK(s.post("/api/show", {{"model", "bad"}}).status == 500);

    // Errors, in the form of the dialect.
    const Reply unknown = s.post("/v1/completions", completion("nobody"));
    CHECK(unknown.status == 404);
    CHECK(Json::parse(unknown.body)["error"]["code"] == "model_not_found");
    CHECK(Json::parse(s.post("/v1/messages", {{"model", "nobody"}, {"messages", user("Hi")}, {"max_tokens", 2}})
                          .body)["error"]["type"] == "not_found_error");
    CHECK(Json::parse(s.post("/api/chat", {{"model", "nobody"}, {"messages", user("Hi")}}).body)["error"].is_string());
    CHECK(s.post("/v1/completions", {{"prompt", "a"}}).status == 400);
    CHECK(has(s.client().post("/v1/completions", "{\"prompt\"").body, "the body cannot be used"));

    // A file that is no model fails for its own requests alone.
    for (int i = 0; i < 2; i++) {
        const Reply bad = s.post("/v1/completions", completion("bad"));
        CHECK(bad.status == 500);
        CHECK(has(bad.body, "cannot be loaded"));
        CHECK(!has(bad.body, models.path()));
    }
    for (const Json& one : s.ask_get("/models")["data"])
        if (one["id"] == "bad") CHECK((one["status"]["value"] == "unloaded" && one["status"]["failed"] == true));
    CHECK(s.post("/v1/completions", completion("llama")).status == 200);
}

TEST_CASE("models are loaded and unloaded by hand, and changes are seen", "[models][server]") {
    const Models models;
    const Server s       = models.serve({"--no-models-autoload"});
    Client       watcher = s.client();
    watcher.send("GET /models/sse HTTP/1.1\r\nHost: x\r\n\r\n");
    CHECK(watcher.head().headers.at("content-type") == "text/event-stream");
    CHECK(watcher.chunk() == ":\n\n");
    const Reply cold = s.post("/v1/completions", completion("llama"));
    CHECK(cold.status == 400);
    CHECK(has(cold.body, "is not loaded"));
    CHECK(s.get("/props?model=llama").status == 400);

    CHECK(s.ask("/models/load", {{"model", "llama"}})["success"] == true);
    until_status(s, "llama", "loaded");
    CHECK(s.post("/models/load", {{"model", "llama"}}).status == 400); // already
    CHECK(s.post("/v1/completions", completion("llama")).status == 200);
    CHECK(s.post("/v1/completions?autoload=true", completion("qwen")).status == 200);

    // A running answer goes on to its end; then the model goes.
    CHECK(s.ask("/models/load", {{"model", "chat"}})["success"] == true);
    until_status(s, "chat", "loaded");
    Client running = begin_stream(s, "chat", 300);
    CHECK(s.ask("/models/unload", {{"model", "chat"}})["success"] == true);
    CHECK(ends_well(running));
    until_status(s, "chat", "unloaded");
    CHECK(s.post("/models/unload", {{"model", "chat"}}).status == 400);
    CHECK(s.post("/v1/completions", completion("llama")).status == 200);

    // A load that fails is an event, too.
    CHECK(s.ask("/models/load", {{"model", "bad"}})["success"] == true);
    std::vector<std::string> seen;
    for (std::string piece = watcher.chunk(); !piece.empty(); piece = watcher.chunk()) {
        if (!piece.starts_with("data: ")) continue;
        const Json event = Json::parse(piece.substr(6));
        CHECK(event["event"] == "model_status");
        if (event["data"].contains("progress")) continue;
        seen.push_back(event["model"].get<std::string>() + " " + event["data"]["status"].get<std::string>());
        if (event["data"].contains("failed")) break;
    }
    CHECK(seen == std::vector<std::string>{"llama loading", "llama loaded", "qwen loading", "qwen loaded",
                                           "chat loading", "chat loaded", "chat unloaded", "bad loading",
                                           "bad unloaded"});

    for (const char* body : {"", "{", "[]", "null", "1", "{}", R"({"model":1})", R"({"model":""})", R"({"model":null})",
                             R"({"model":["llama"]})", "{\"model\":\"\xff\"}", R"({"model":"a","model":{}})"})
        for (const char* path : {"/models/load", "/models/unload"}) {
            INFO(path << ' ' << body);
            CHECK(s.client().post(path, body).status == 400);
        }
    for (const char* name : {"nobody", "../llama", "llama.gguf", "LLAMA"})
        CHECK(s.client().post("/models/load", "{\"model\":\"" + std::string(name) + "\"}").status == 404);
    CHECK(s.client().post("/models/load", "{\"model\":\"" + std::string(4000, 'a') + "\"}").status == 400);
    CHECK(s.get("/models/load").status == 404); // a name, which no model has
    CHECK(s.get("/v1/models/" + std::string(4000, 'a')).status == 404);
    CHECK(s.client().call("PUT /v1/models/llama HTTP/1.1\r\nHost: x\r\n\r\n").status == 405);
    CHECK(s.post("/v1/completions", completion("llama")).status == 200);
}

TEST_CASE("the list of models is made again while models answer", "[models][server]") {
    const Models   models;
    const fs::path folder = models.path(), data = QUIRE_ROOT "/tests/data/models/";
    const fs::path presets = temporary();
    const auto     preset  = [&](const std::string& text) { std::ofstream(presets) << text; };
    const auto     change  = [&](const fs::path& file, const char* name) {
        fs::remove(folder / name);
        if (!file.empty()) fs::create_symlink(file, folder / name);
    };
    preset("[qwen]\nctx-size = 64\n");
    const Server s      = models.serve({"--models-max", "0", "--models-preset", presets.string()});
    const auto   answer = [&](const std::string& model) {
        return s.ask("/v1/completions", completion(model))["choices"];
    };
    const auto reload   = [&] { CHECK(s.get("/models?reload=1").status == 200); };
    const Json of_llama = answer("llama"), of_qwen = answer("qwen"), of_mistral = answer("mistral");
    CHECK(of_llama != of_mistral);
    Client watcher = s.client();
    watcher.send("GET /models/sse HTTP/1.1\r\nHost: x\r\n\r\n");
    CHECK(watcher.head().status == 200);
    CHECK(watcher.chunk() == ":\n\n");

    // A new model, listed when somebody asks for it.
    change(data / "llama3-gqa-Q8_0.gguf", "new.gguf");
    CHECK(s.post("/v1/completions", completion("new")).status == 404);
    const std::string link =
        "Host: 127.0.0.1\r\nSec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: navigate\r\n"
        "Sec-Fetch-Dest: document\r\n\r\n";
    Client foreign = s.client();
    foreign.send("GET /models?reload=1 HTTP/1.1\r\n" + link);
    CHECK(foreign.head().status == 200);
    CHECK(status_of(s, "new").empty());
    reload();
    CHECK(status_of(s, "new") == "unloaded");
    CHECK(s.get("/v1/models/new").status == 200);
    CHECK(answer("new") == of_llama);
    for (const char* same : {"llama", "qwen", "mistral", "new"}) CHECK(status_of(s, same) == "loaded");

    // Removed, and changed, while they answer.
    Client removed = begin_stream(s, "chat", 250);
    change("", "chat.gguf");
    reload();
    CHECK(status_of(s, "chat").empty());
    CHECK(s.get("/v1/models/chat").status == 404);
    CHECK(s.post("/v1/completions", completion("chat")).status == 404);
    change(shipped, "chat.gguf"); // it is back before the one that answers has left
    reload();
    CHECK(status_of(s, "chat") == "unloaded");
    CHECK(ends_well(removed));
    Client changed = begin_stream(s, "chat", 250);
    change(data / "llama3-gqa-Q8_0.gguf", "chat.gguf");
    reload();
    CHECK(answer("chat") == of_llama); // after the answer of the one before it
    CHECK(ends_well(changed));

    // Flags are a change, too. Several clients have one listing in common.
    preset("[qwen]\nctx-size = 32\n[more]\nmodel = " + (data / "mistral-swa-Q8_0.gguf").string() +
           "\nload-on-startup = 1\n");
    std::vector<std::thread> clients;
    std::atomic<int>         good = 0;
    for (int i = 0; i < 6; i++) clients.emplace_back([&] { good += s.get("/models?reload=true").status == 200; });
    for (std::thread& client : clients) client.join();
    CHECK(good == 6);
    until_status(s, "qwen", "unloaded");
    CHECK(status_of(s, "more") == "unloaded");
    CHECK(status_of(s, "llama") == "loaded");
    CHECK(answer("qwen") == of_qwen);
    CHECK(answer("more") == of_mistral);

    // So is another content of a file that a flag names.
    const fs::path file = temporary();
    std::ofstream(file) << "{{ messages[0].content }}";
    const std::string first = "[qwen]\nctx-size = 32\nchat-template-file = " + file.string() + "\n";
    preset(first);
    reload();
    const auto prompt = [&] {
        return s.ask("/apply-template",
                     {{"model", "qwen"}, {"messages", {{{"role", "user"}, {"content", "Hi"}}}}})["prompt"];
    };
    CHECK(prompt() == "Hi");
    std::ofstream(file) << "Say: {{ messages[0].content }}";
    reload();
    CHECK(prompt() == "Say: Hi");
    fs::remove(file);

    // A list that cannot be made changes nothing.
    preset("[qwen]\nno-such-flag = 1\n");
    const Reply broken = s.get("/models?reload=1");
    CHECK(broken.status == 500);
    CHECK(!has(broken.body, presets.string()));
    CHECK(status_of(s, "qwen") == "loaded");

    std::vector<std::string> seen;
    while (seen.empty() || seen.back() != "chat model_remove") {
        const std::string piece = watcher.chunk();
        REQUIRE(!piece.empty());
        if (!piece.starts_with("data: ")) continue;
        const Json        event = Json::parse(piece.substr(6));
        const std::string what  = event["event"] == "model_status" ? event["data"]["status"] : event["event"];
        if (event["event"] != "model_status" || !event["data"].contains("progress"))
            seen.push_back(event["model"].get<std::string>() + " " + what);
    }
    const auto at = [&](const char* what) { return std::ranges::find(seen, what) - seen.begin(); };
    CHECK(at("* models_reload") < at("new loaded"));
    CHECK(at("new loaded") < at("chat loaded"));
    CHECK(at("chat loaded") < at("chat model_remove"));
    fs::remove(presets);
}

TEST_CASE("the models of the hub's cache are models of the server", "[models][server]") {
    const fs::path cache = temporary(), data = QUIRE_ROOT "/tests/data/models/";
    fs::remove(cache);
    const auto add = [&](const std::string& repo, const std::string& branch, const std::string& name,
                         const fs::path& file) {
        const fs::path folder = cache / repo, at = folder / "snapshots" / ("c" + branch) / name;
        fs::create_directories(folder / "refs");
        fs::create_directories(at.parent_path());
        std::ofstream(folder / "refs" / branch) << "c" << branch;
        fs::create_symlink(file, at);
    };
    add("models--user--tiny-GGUF", "main", "tiny-Q8_0.gguf", data / "llama3-gqa-Q8_0.gguf");
    add("models--user--tiny-GGUF", "a-branch", "tiny-Q8_0.gguf", data / "mistral-swa-Q8_0.gguf"); // not main
    add("models--user--tiny-GGUF", "main", "sub/tiny.q4_0.gguf", data / "qwen2-Q4_0.gguf");
    add("models--user--tiny-GGUF", "main", "mmproj-tiny-F16.gguf", data / "qwen2-Q4_0.gguf");
    add("models--user--split-GGUF", "main", "a-F16-00001-of-00002.gguf", data / "qwen2-Q4_0.gguf"); // a part is missing
    add("models--user--plain", "main", "model.gguf", data / "qwen2-Q4_0.gguf");
    std::vector<std::string> named;
    for (const quire::NamedModel& one : quire::named_models(cache.string())) named.push_back(one.name);
    CHECK(named == std::vector<std::string>{"user/plain", "user/tiny-GGUF:Q4_0", "user/tiny-GGUF:Q8_0"});

    const fs::path presets = temporary();
    std::ofstream(presets) << "[user/tiny-GGUF:Q4_0]\nctx-size = 32\n";
    setenv("HF_HUB_CACHE", cache.c_str(), 1);
    {
        const Models models;
        const Server s = models.serve({"--models-preset", presets.string()});
        CHECK(status_of(s, "user/tiny-GGUF:Q8_0") == "unloaded");
        CHECK(status_of(s, "user/plain") == "unloaded");
        CHECK(s.get("/v1/models/user/tiny-GGUF:Q8_0").status == 200);
        CHECK(s.ask_get("/v1/models/user%2Ftiny-GGUF%3AQ8_0")["id"] == "user/tiny-GGUF:Q8_0");
        CHECK(s.ask("/v1/completions", completion("user/tiny-GGUF:Q8_0"))["choices"] ==
              s.ask("/v1/completions", completion("llama"))["choices"]);
        CHECK(s.ask_get("/v1/models/user/tiny-GGUF:Q4_0")["max_model_len"] == 32);
        CHECK(s.ask("/v1/completions", completion("user/tiny-GGUF:Q4_0"))["choices"] ==
              s.ask("/v1/completions", completion("qwen"))["choices"]);
        add("models--user--late", "main", "late-Q4_0.gguf", data / "qwen2-Q4_0.gguf"); // fetched meanwhile
        CHECK(s.get("/models?reload=1").status == 200);
        CHECK(status_of(s, "user/late:Q4_0") == "unloaded");
    }
    // A program without a model beside it; an address that it cannot have ends it.
    const fs::path beside = temporary();
    fs::remove(beside);
    fs::create_directories(beside);
    fs::copy_file(QUIRE_BIN "/server", beside / "server");
    const Finished many = run_program("server", {"--port", "0", "--unix", "/nonexistent/s"}, "", beside.string());
    CHECK(!has(many.err, "no model: name one"));
    CHECK(has(many.err, "/nonexistent/s"));
    setenv("HF_HUB_CACHE", "/nonexistent", 1);
    CHECK(has(run_program("server", {}, "", beside.string()).err, "no model: name one"));
    fs::remove_all(beside);
    fs::remove(presets);
    fs::remove_all(cache);
}

TEST_CASE("a model leaves for another one, but not while it answers", "[models][server]") {
    const Models models;
    const Server s      = models.serve({"--models-max", "2"});
    Client       client = s.client(); // one connection: a model's use ends before the next one begins
    for (const char* name : {"llama", "qwen", "llama", "mistral"})
        CHECK(client.post("/v1/completions", completion(name).dump()).status == 200);
    CHECK(status_of(s, "qwen") == "unloaded"); // the least recently used one
    CHECK(status_of(s, "llama") == "loaded");

    Client first = begin_stream(s, "chat", 200); // llama goes
    CHECK(status_of(s, "llama") == "unloaded");
    const Reply other = s.post("/v1/completions", completion("qwen")); // mistral goes
    CHECK(other.status == 200);
    Client second = begin_stream(s, "chat", 200);
    CHECK(s.post("/v1/completions", completion("llama")).status == 200); // qwen goes
    CHECK(status_of(s, "chat") == "loaded");
    CHECK(ends_well(first));
    CHECK(ends_well(second));
}

TEST_CASE("where all models answer, another one gets a 503", "[models][server]") {
    const Models models;
    const Server s       = models.serve({"--models-max", "1"});
    Client       running = begin_stream(s, "chat", 900);
    const Reply  refused = s.post("/v1/completions", completion("llama"));
    CHECK(refused.status == 503);
    CHECK(has(refused.body, "the models that would have to leave are answering"));
    CHECK(refused.headers.at("retry-after") == "1");
    running.hang_up();
    while (s.post("/v1/completions", completion("llama")).status != 200) nap();
    CHECK(status_of(s, "chat") == "unloaded");
}

TEST_CASE("models change under load, and every answer is its model's", "[models][server]") {
    const Models      models;
    const Server      s       = models.serve({"--models-max", "2"});
    const std::string names[] = {"llama", "qwen", "mistral"};
    std::vector<Json> expected;
    for (const std::string& name : names) expected.push_back(s.ask("/v1/completions", completion(name))["choices"]);
    std::atomic<int>         good = 0, busy = 0, wrong = 0;
    std::vector<std::thread> clients;
    for (int c = 0; c < 6; c++)
        clients.emplace_back([&, c] {
            for (int i = 0; i < 4; i++) {
                const int   which = (c + i * (c % 2 + 1)) % 3;
                const Reply r     = s.post("/v1/completions", completion(names[which]));
                if (r.status == 200 && Json::parse(r.body)["choices"] == expected[std::size_t(which)]) good++;
                else if (r.status == 503) busy++;
                else wrong++;
            }
        });
    for (int i = 0; i < 20; i++) { // somebody unloads beside that
        s.post("/models/unload", {{"model", names[i % 3]}});
        nap();
    }
    for (std::thread& client : clients) client.join();
    CHECK(wrong == 0);
    CHECK(good > 0);
    CHECK(good + busy == 24);
}

TEST_CASE("no model leaves for a file that cannot be used, or a body that is no JSON", "[models][server]") {
    const Models      models;
    const std::string ini = temporary(), broken = temporary();
    std::ofstream(broken) << "{% if %}";
    std::ofstream(ini) << "[qwen]\nchat-template-file = " << broken << "\n";
    const Server s = models.serve({"--models-max", "1", "--models-preset", ini});
    CHECK(s.post("/v1/completions", completion("llama")).status == 200);
    for (const char* name : {"qwen", "bad", "qwen", "bad"}) {
        const Reply r = s.post("/v1/completions", completion(name));
        CHECK(r.status == 500);
        CHECK(has(r.body, "cannot be loaded"));
    }
    CHECK(s.client().post("/v1/completions", R"({"model":"mistral","prompt":5, oops)").status == 400);
    CHECK(status_of(s, "llama") == "loaded");
    CHECK(status_of(s, "mistral") == "unloaded");
    CHECK(!has(s.errors() + s.log(), "leaves for"));

    // Another file in the place of the broken one.
    CHECK(s.ask_get("/v1/models/bad")["max_model_len"].is_null());
    fs::copy_file(QUIRE_ROOT "/tests/data/models/qwen2-Q4_0.gguf", models.path() + "/bad.gguf",
                  fs::copy_options::overwrite_existing);
    CHECK(s.ask_get("/v1/models/bad")["max_model_len"].is_number());
    CHECK(s.post("/v1/completions", completion("bad")).status == 200);
    CHECK(has(s.errors() + s.log(), "model llama leaves for bad"));
    unlink(ini.c_str());
    unlink(broken.c_str());
}

TEST_CASE("a request behind an unload waits for another load", "[models][server]") {
    const Models models;
    const Server s = models.serve();
    for (int i = 0; i < 4; i++) {
        CHECK(s.post("/models/load", {{"model", "chat"}}).status == 200);
        for (int naps = 0; naps < i; naps++) nap();
        CHECK(s.post("/models/unload", {{"model", "chat"}}).status == 200);
        CHECK(s.post("/v1/completions", completion("chat")).status == 200);
        s.post("/models/unload", {{"model", "chat"}});
        until_status(s, "chat", "unloaded");
    }
}

TEST_CASE("few clients can listen to the events of the models", "[models][server]") {
    const Models models;
    const Server s      = models.serve({"--threads-http", "20"});
    const auto   listen = [&] {
        Client c = s.client();
        c.send("GET /models/sse HTTP/1.1\r\nHost: x\r\n\r\n");
        const int status = c.head().status;
        return std::pair(status, std::move(c));
    };
    std::vector<Client> clients;
    for (int i = 0; i < 16; i++) {
        auto [status, c] = listen();
        CHECK(status == 200);
        clients.push_back(std::move(c));
    }
    for (int i = 0; i < 8; i++) CHECK(listen().first == 503);
    CHECK(s.get("/health/live").status == 200);
    clients.pop_back();
    while (listen().first == 503) nap(); // until the server has noticed
}

TEST_CASE("a client that reads slowly keeps no model from leaving", "[models][server]") {
    const Models models;
    const Server s = models.serve({"--write-timeout", "600", "--kv-blocks", "250000", "-c", "64"});
    CHECK(s.post("/v1/completions", completion("llama")).status == 200);
    CHECK(s.get("/blocks?model=llama").body.size() > 5'000'000); // more than the sockets hold
    for (const char* path : {"/blocks", "/blocks/events"}) {
        Client    deaf = s.client();
        const int few  = 4096;
        setsockopt(deaf.fd(), SOL_SOCKET, SO_RCVBUF, &few, sizeof few);
        deaf.send("GET " + std::string(path) + "?model=llama HTTP/1.1\r\nHost: x\r\n\r\n");
        CHECK(deaf.head().status == 200);
        CHECK(s.post("/models/unload", {{"model", "llama"}}).status == 200);
        const auto start = std::chrono::steady_clock::now();
        until_status(s, "llama", "unloaded");
        CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(60));
        CHECK(s.post("/v1/completions", completion("llama")).status == 200);
    }
}

TEST_CASE("memory is planned before a model is loaded", "[models][server]") {
    const Models models;
    const Server s = models.serve({"--models-memory", "600K", "-c", "64", "-np", "1", "--swap-blocks", "0"});
    CHECK(s.post("/v1/completions", completion("qwen")).status == 200); // 280 KiB of weights
    const Reply large = s.post("/v1/completions", completion("chat"));
    CHECK(large.status == 503);
    CHECK(has(large.body, "there is no room for the model"));
    CHECK(Json::parse(large.body)["error"]["code"] == "no_room");
    CHECK(status_of(s, "qwen") == "loaded"); // nobody leaves in vain
}

TEST_CASE("a model finds room for its context beside one that may take much", "[models][server]") {
    const fs::path folder = temporary();
    fs::remove(folder);
    fs::create_directories(folder);
    const std::string data = QUIRE_ROOT "/tests/data/models/";
    fs::create_symlink(data + "nemotron_h-Q8_0.gguf", folder / "large.gguf"); // a context of a million tokens
    fs::create_symlink(data + "llama3-gqa-F16.gguf", folder / "small.gguf");
    const Server s({"--models-dir", folder.string(), "--models-max", "2"}, "");
    for (const char* model : {"large", "small"}) CHECK(s.post("/v1/completions", completion(model)).status == 200);
    CHECK(s.ask_get("/props?model=small")["default_generation_settings"]["n_ctx"] == 512);
    fs::remove_all(folder);
}

TEST_CASE("a preset has the flags of a model", "[models][server]") {
    const Models      models;
    const std::string ini = temporary();
    std::ofstream(ini)
        << "[*]\nctx-size = 96\n[llama]\nctx-size = 64\nalias = tiny, small\nload-on-startup = true\n[other]\nmodel = "
        << QUIRE_ROOT "/tests/data/models/qwen2-Q4_0.gguf\n";
    {
        const Server s = models.serve({"--models-preset", ini});
        until_status(s, "llama", "loaded");
        CHECK(s.ask("/v1/completions", completion("small"))["model"] == "small");
        CHECK(s.ask_get("/props?model=tiny")["default_generation_settings"]["n_ctx"] == 64);
        CHECK(s.ask_get("/props?model=other")["default_generation_settings"]["n_ctx"] == 96);
        CHECK(s.ask_get("/models")["data"].size() == 6);
    }
    const auto refused = [&](const std::string& text, std::vector<std::string> flags = {}) {
        std::ofstream(ini) << text;
        flags.insert(flags.begin(), {"--models-dir", models.path(), "--models-preset", ini, "--port", "0"});
        const Finished f = run_program("server", flags);
        CHECK((f.code == 2 || f.code == 1));
        CHECK(std::ranges::count(f.err, '\n') == 1);
        return f.err;
    };
    CHECK(
        has(refused("[nobody]\n"), "[nobody]: no file of --models-dir and no model of the hub's cache has this name"));
    CHECK(has(refused("[llama]\nport = 8\n"), "line 2: --port belongs to the server, not to a model"));
    CHECK(has(refused("[llama]\nallowed-origins = *\n"), "line 2: --allowed-origins belongs to the server"));
    CHECK(has(refused("[*]\nhf-repo = a/b\n"), "line 2: --hf-repo fetches no model here"));
    CHECK(has(refused("[llama]\ncolour = red\n"), "line 2: there is no flag '--colour'"));
    CHECK(has(refused("[llama]\nctx-size = many\n"), "[llama]: "));
    CHECK(has(refused("[llama]\nalias = qwen\n"), "another model has the name 'qwen' too"));
    CHECK(has(refused("", {"-m", shipped}), "-m is about one model, and --models-dir about many"));
    CHECK(has(refused("", {"--alias", "a"}), "--alias is about one model"));
    unlink(ini.c_str());
    CHECK(has(run_program("server", {"--models-dir", "/nonexistent"}).err, "cannot read '/nonexistent'"));
}

TEST_CASE("a directory without models gets its first one later", "[models][server]") {
    const std::string directory = temporary();
    unlink(directory.c_str());
    std::filesystem::create_directory(directory);
    {
        const Server s({"--models-dir", directory}, "");
        CHECK(has(s.errors(), "has no model yet"));
        CHECK(s.ask_get("/v1/models")["data"].empty());
        CHECK(s.get("/health").status == 200);
        for (const char* path : {"/", "/props", "/metrics", "/blocks", "/slots", "/openapi.json"})
            CHECK(s.get(path).status < 500);
        CHECK(s.post("/v1/completions", completion("first")).status == 404);
        CHECK(s.post("/v1/completions", {{"prompt", "Hi"}}).status == 400);
        std::filesystem::create_symlink(shipped, directory + "/first.gguf");
        CHECK(s.ask_get("/models?reload=1")["data"].size() == 1);
        CHECK(s.ask("/v1/completions", completion("first"))["choices"].size() == 1);
        std::filesystem::remove(directory + "/first.gguf");
        CHECK(s.ask_get("/models?reload=1")["data"].empty());
        CHECK(s.post("/v1/completions", completion("first")).status == 404);
    }
    const std::string out = temporary();
    CHECK(has(run_program("server", {"--models-dir", directory, "--run-batch", QUIRE_ROOT "/README.md", out}).err,
              "has no model"));
    unlink(out.c_str());
    std::filesystem::remove_all(directory);
}

TEST_CASE("a model that sleeps at once answers first", "[models][server]") {
    const Server s({"--sleep-idle-seconds", "0", "--temp", "0"});
    const Json   cold = s.ask("/v1/completions", completion("any"));
    CHECK(s.ask("/v1/completions", completion("any"))["choices"] == cold["choices"]);
    while (s.ask_get("/props")["is_sleeping"] != true) nap();
}

TEST_CASE("an idle model sleeps, and wakes for a request", "[models][server]") {
    const Server s({"--sleep-idle-seconds", "0.05", "--temp", "0"});
    const auto   asleep = [&] { return s.ask_get("/props")["is_sleeping"] == true; };
    while (!asleep()) nap();
    const Json cold = s.ask("/v1/completions", completion("any"));
    while (!asleep()) nap();
    CHECK(s.get("/health").status == 200);
    CHECK(s.ask_get("/v1/models")["data"][0]["status"]["value"] == "sleeping");
    CHECK(s.get("/metrics").status == 200);
    CHECK(asleep()); // none of these wakes it
    CHECK(s.ask("/v1/completions", completion("any"))["choices"] == cold["choices"]);

    const Models models;
    const Server many = models.serve({"--sleep-idle-seconds", "0.05", "--no-models-autoload"});
    many.ask("/models/load", {{"model", "qwen"}});
    until_status(many, "qwen", "sleeping");
    CHECK(many.post("/v1/completions", completion("qwen")).status == 200); // it was loaded by hand
    until_status(many, "qwen", "sleeping");
    CHECK(many.ask("/models/unload", {{"model", "qwen"}})["success"] == true);
    CHECK(many.post("/v1/completions", completion("qwen")).status == 400);
}

TEST_CASE("Ollama's keep_alive says how long one of many models stays", "[models][server]") {
    const Models models;
    const Server s   = models.serve({"--models-max", "3"});
    const auto   ask = [&](const Json& keep, const char* prompt = "The") {
        return s.ask("/api/generate", {{"model", "qwen"},
                                       {"prompt", prompt},
                                       {"stream", false},
                                       {"options", {{"num_predict", 2}}},
                                       {"keep_alive", keep}});
    };
    CHECK(ask("5m", "")["done_reason"] == "load");
    CHECK(s.ask_get("/api/ps")["models"].size() == 1);
    const std::string expires = s.ask_get("/api/ps")["models"][0]["expires_at"].get<std::string>();
    CHECK(expires < "2999");
    CHECK(ask(-1)["done"] == true);
    CHECK(s.ask_get("/api/ps")["models"][0]["expires_at"] == "2999-12-31T00:00:00Z");
    const Json answer = ask(0);
    CHECK(answer["response"] == ask("1h30m")["response"]); // it slept, and has come back
    CHECK(ask(0, "")["done_reason"] == "unload");
    until_status(s, "qwen", "sleeping");
    CHECK(ask(0, "")["done_reason"] == "unload"); // without waking it
    CHECK(s.ask("/api/chat", {{"model", "mistral"}, {"keep_alive", 0}})["done_reason"] == "unload");
    CHECK(status_of(s, "qwen") == "sleeping");
    CHECK(status_of(s, "mistral") == "unloaded");
    CHECK(s.ask_get("/api/ps")["models"].empty());
    for (const Json& odd : {Json("5"), Json("m"), Json("1.2.3s"), Json(true), Json("5 m")}) {
        const Json refused =
            Json::parse(s.post("/api/generate", {{"model", "qwen"}, {"prompt", "The"}, {"keep_alive", odd}}).body);
        CHECK(refused["error"] == R"(keep_alive has to be a number of seconds or a duration such as "5m")");
    }
}

TEST_CASE("a model's prefix cache in files outlives its leaving", "[models][server]") {
    const Models   models;
    const fs::path folder = temporary();
    fs::remove(folder);
    const Server s = models.serve({"--kv-dir", folder.string(), "--kv-host-bytes", "16M"});
    std::string  text;
    for (int i = 0; i < 40; i++) text += "The river runs to the sea. ";
    const Json body{{"model", "chat"}, {"prompt", text}, {"max_tokens", 4}, {"temperature", 0}};
    const Json first = s.ask("/v1/completions", body);
    CHECK(s.post("/v1/completions", completion("llama")).status == 200); // has files of its own
    s.ask("/models/unload", {{"model", "chat"}});
    until_status(s, "chat", "unloaded");
    const Json second = s.ask("/v1/completions", body);
    CHECK(second["choices"] == first["choices"]);
    CHECK(second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0);
    CHECK(fs::is_directory(folder / "chat"));
    CHECK(fs::is_directory(folder / "llama"));
    s.signal(SIGKILL);
    fs::remove_all(folder);
}

TEST_CASE("a model's prefix cache in host memory outlives its leaving", "[models][server]") {
    const Models models;
    const Server s = models.serve({"--kv-host-bytes", "16M", "--models-max", "1"});
    std::string  text;
    for (int i = 0; i < 40; i++) text += "The river runs to the sea. ";
    const Json body{{"model", "chat"}, {"prompt", text}, {"max_tokens", 4}, {"temperature", 0}};
    const auto from_host = [](const Json& answer) {
        return answer["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]["host"].get<int>();
    };
    // A response of /v1/responses has a chat's prompt.
    const Json response_body{{"model", "chat"}, {"input", text}, {"max_output_tokens", 4}, {"temperature", 0}};
    const Json first_response = s.ask("/v1/responses", response_body);
    CHECK(!first_response["usage"]["input_tokens_details"].contains("cached_tokens_by_tier"));
    const Json first = s.ask("/v1/completions", body);
    for (const std::string leaver : {"for another one", "by hand"}) {
        CAPTURE(leaver);
        if (leaver == "by hand") {
            s.ask("/models/unload", {{"model", "chat"}});
            until_status(s, "chat", "unloaded");
        } else {
            CHECK(s.post("/v1/completions", completion("llama")).status == 200);
        }
        const Json again = s.ask("/v1/completions", body);
        CHECK(again["choices"] == first["choices"]);
        CHECK(from_host(again) > 200);
    }
    const Json again_response = s.ask("/v1/responses", response_body);
    CHECK(again_response["output"][0]["content"] == first_response["output"][0]["content"]);
    const Json& details = again_response["usage"]["input_tokens_details"];
    CHECK(details["cached_tokens_by_tier"]["host"] > 200);
    CHECK(details["cached_tokens"] ==
          details["cached_tokens_by_tier"]["device"].get<int>() + details["cached_tokens_by_tier"]["host"].get<int>());
    const Json   asleep_body{{"prompt", text}, {"max_tokens", 4}, {"temperature", 0}};
    const Server one({"--kv-host-bytes", "16M", "--sleep-idle-seconds", "0.05", "--temp", "0"});
    const Json   awake = one.ask("/v1/completions", asleep_body);
    while (one.ask_get("/props")["is_sleeping"] != true) nap();
    const Json woken = one.ask("/v1/completions", asleep_body);
    CHECK(woken["choices"] == awake["choices"]);
    CHECK(from_host(woken) > 200);
}

TEST_CASE("a server of several models ends while one loads and others answer", "[models][server]") {
    const Models models;
    Server       s       = models.serve({"--drain-timeout", "600"});
    Client       running = begin_stream(s, "chat", 200);
    Client       waiting = s.client();
    waiting.send(Client::request("/v1/completions", completion("llama").dump()));
    s.signal(SIGTERM);
    CHECK(ends_well(running));
    CHECK(s.wait() == 0);
}

TEST_CASE("the log counts models, not their names", "[models]") {
    const Models      models;
    const std::string presets = temporary();
    std::ofstream(presets) << "[chat]\nalias = toy, chat, small\n"; // its own name is no clash
    CHECK(has(models.serve({"--models-preset", presets}).errors(), "server: 5 models; GET /models lists them\n"));
}
