// The server's LoRA adapters: flags, names in place of the model's, the field `lora`, /lora-adapters.
#include <catch2/catch_test_macros.hpp>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
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

std::string adapter(const std::string& name) { return reference("adapters/llama3-gqa." + name + ".gguf"); }

const Json scale_of_first = Json::array({{{"id", 0}, {"scale", 0.5}}});

Json vector_of(const Server& s, const std::string& model) {
    return s.ask("/v1/embeddings", {{"input", "The"}, {"model", model}})["data"][0]["embedding"];
}

// A directory with the models base and other, and a file of presets.
class Folder {
public:
    Folder() : path_(temporary()) {
        setenv("HF_HUB_CACHE", "/nonexistent", 1); // no test sees the models that the user has fetched
        fs::remove(path_);
        fs::create_directories(path_);
        fs::create_symlink(fs::absolute(reference("models/llama3-gqa-F16.gguf")), path_ / "base.gguf");
        fs::create_symlink(fs::absolute(reference("models/qwen2-Q4_0.gguf")), path_ / "other.gguf");
    }
    Folder(const Folder&)            = delete;
    Folder& operator=(const Folder&) = delete;
    ~Folder() { fs::remove_all(path_); }

    const fs::path&          path() const { return path_; }
    void                     preset(const std::string& text) const { std::ofstream(path_ / "presets.ini") << text; }
    std::vector<std::string> flags() const {
        return {"--models-dir", path_.string(), "--models-preset", (path_ / "presets.ini").string()};
    }

private:
    fs::path path_;
};

} // namespace

TEST_CASE("a server with adapters", "[server][adapters]") {
    const Server s({"-a", "base", "--lora-scaled", adapter("one") + ":0.5", "--lora-modules",
                    Json{{"name", "second"}, {"path", adapter("two")}, {"base_model_name", nullptr}}.dump()},
                   reference("models/llama3-gqa-F16.gguf"));
    const auto   text = [&](Json body) {
        body["prompt"]      = "The";
        body["max_tokens"]  = 12;
        body["ignore_eos"]  = true;
        body["temperature"] = 0;
        return s.ask("/v1/completions", body)["choices"][0]["text"].get<std::string>();
    };
    const auto lora = [](const std::vector<Json>& list) { return Json{{"lora", list}}; };
    const Json off{{"id", 0}, {"scale", 0}}, half{{"id", 0}, {"scale", 0.5}}, whole{{"id", 0}, {"scale", 1}},
        second{{"id", 1}, {"scale", 1}};

    Json listed = s.ask_get("/lora-adapters");
    CHECK(listed == Json::array({{{"id", 0},
                                  {"path", adapter("one")},
                                  {"scale", 0.5},
                                  {"name", "llama3-gqa.one"},
                                  {"task_name", ""},
                                  {"prompt_prefix", ""}},
                                 {{"id", 1},
                                  {"path", adapter("two")},
                                  {"scale", 0.0},
                                  {"name", "second"},
                                  {"task_name", ""},
                                  {"prompt_prefix", ""}}}));
    const Json models = s.ask_get("/v1/models")["data"];
    REQUIRE(models.size() == 3);
    CHECK(models[0]["parent"] == nullptr);
    CHECK(models[2]["id"] == "second");
    CHECK(models[2]["parent"] == "base");
    CHECK(models[2]["root"] == adapter("two").substr(adapter("two").rfind('/') + 1)); // no path
    CHECK(s.ask_get("/v1/models/second")["parent"] == "base");

    const std::string plain = text(lora({off})), at_half = text(lora({half}));
    CHECK(plain != at_half);
    CHECK(text({}) == at_half);
    CHECK(text(lora({})) == at_half);
    CHECK(text({{"model", "base"}}) == at_half);
    CHECK(text({{"model", "second"}}) == text(lora({second})));
    CHECK(text({{"model", "second"}}) != at_half);
    CHECK(text({{"model", "llama3-gqa.one"}}) == at_half);
    CHECK(s.ask("/v1/completions", {{"prompt", "a"}, {"max_tokens", 1}, {"model", "second"}})["model"] == "second");
    const auto vector = [&](const char* model) {
        return s.ask("/v1/embeddings", {{"input", "The"}, {"model", model}})["data"][0]["embedding"];
    };
    CHECK(vector("base") != vector("second"));

    CHECK(s.post("/lora-adapters", Json::array({whole})).body == R"({"success":true})");
    CHECK(text({}) == text(lora({whole})));
    CHECK(text({}) != at_half);
    CHECK(s.ask_get("/lora-adapters")[0]["scale"] == 1.0);
    CHECK(s.post("/lora-adapters", Json::array()).status == 200);
    CHECK(text({}) == plain);

    const auto says = [&](const std::string& path, const Json& body) {
        const Reply r = s.post(path, body);
        CHECK(r.status == 400);
        const Json error = Json::parse(r.body)["error"];
        if (body.contains("lora")) CHECK(error["param"] == "lora");
        return error["message"].get<std::string>();
    };
    CHECK(says("/lora-adapters", Json::object()) ==
          "the body has to be a list of adapters, each with its id and its scale");
    CHECK(says("/lora-adapters", Json::array({{{"id", 7}, {"scale", 1}}})) == "there is no adapter 7; they are 0 to 1");
    CHECK(says("/v1/completions", {{"prompt", "a"}, {"lora", Json::array({{{"scale", 1}}})}}) == "lora: id is missing");
    CHECK(says("/v1/completions", {{"prompt", "a"}, {"lora", "one"}}) ==
          "lora has to be a list of adapters, each with its id and its scale");
    CHECK(says("/v1/completions", {{"prompt", "a"}, {"lora", Json::array({{{"id", 2}, {"scale", 1}}})}}) ==
          "there is no adapter 2; they are 0 to 1");
}

TEST_CASE("adapters that no program can use", "[server][adapters]") {
    CHECK(common().ask_get("/lora-adapters") == Json::array());
    CHECK(has(common().post("/lora-adapters", Json::array({{{"id", 0}, {"scale", 1}}})).body,
              "there is no adapter 0; the server has none"));
    for (const char* program : {"server", "chat"}) {
        CAPTURE(program);
        const auto ends = [&](const std::vector<std::string>& flags, int code, const std::string& said) {
            std::vector<std::string> all{"-m", reference("models/llama3-gqa-F16.gguf"), "--device", "cpu"};
            all.insert(all.end(), flags.begin(), flags.end());
            const Finished f = run_program(program, all);
            CAPTURE(f.err);
            CHECK(f.code == code);
            CHECK(has(f.err, said));
        };
        ends({"--lora", "/none.gguf"}, 1, "cannot open /none.gguf: ");
        ends({"--lora-scaled", "f"}, 2, "--lora-scaled: 'f' is not FILE:SCALE with a number as the scale");
        for (const char* large : {"f:1e9", "f:-1000001"})
            ends({"--lora-scaled", large}, 2,
                 "--lora-scaled: '" + std::string(large) + "' has a scale that is not between -1000000 and 1000000");
        ends({"--lora-modules", "f"}, 2, "--lora-modules: 'f' is not NAME=FILE");
        ends({"--lora-modules", "two=" + adapter("one"), "two=" + adapter("two")}, 1,
             "another adapter has the name 'two', too");
        ends({"--lora-modules", R"({"name": "n"})"}, 2, R"(--lora-modules: '{"name": "n"}' lacks a name or a path)");
        ends({"--lora-modules", R"({"name": 1})"}, 2, "--lora-modules: name is not a text");
        ends({"--lora-modules", R"({"file": "f"})"}, 2,
             "--lora-modules: 'file' is not one of name, path, base_model_name");
        ends({"--lora", adapter("one"), "--tensor-parallel", "2"}, 1, "adapters are for a model that runs on one rank");
    }
}

TEST_CASE("a server of several models has adapters", "[server][adapters][models]") {
    const Folder folder;
    fs::create_symlink(fs::absolute(adapter("one")), folder.path() / "sql.gguf"); // no model of the directory
    const std::string flags = "[base]\nalias = plain\nlora-modules = sql=" + (folder.path() / "sql.gguf").string() +
                              "  tone=" + adapter("two");
    folder.preset(flags + "\n");
    const Server s(folder.flags(), "");
    for (const char* status : {"unloaded", "loaded"}) {
        const Json               models = s.ask_get("/v1/models")["data"];
        std::vector<std::string> ids;
        for (const Json& one : models) ids.push_back(one["id"].get<std::string>());
        REQUIRE(ids == std::vector<std::string>{"base", "sql", "tone", "other"});
        CHECK(models[0]["aliases"] == Json::array({"plain"}));
        CHECK(models[0]["parent"] == nullptr);
        CHECK(models[0]["status"]["value"] == status);
        CHECK(models[1]["aliases"] == Json::array());
        CHECK(models[1]["parent"] == "base");
        CHECK(models[1]["root"] == "sql.gguf");
        CHECK(models[1]["status"]["value"] == status);
        for (const char* path : {"/v1/models/tone", "/v1/models/tone:latest"})
            CHECK(s.ask_get(path)["root"] == "llama3-gqa.two.gguf");
        CHECK(vector_of(s, "sql").is_array()); // this loads it
    }

    // Ollama's tag may follow an adapter's name, too.
    const Json plain = vector_of(s, "base"), sql = vector_of(s, "sql");
    CHECK(sql != plain);
    CHECK(vector_of(s, "sql:latest") == sql);
    CHECK(vector_of(s, "base:latest") == plain);
    const auto text = [&](const std::string& model, const Json& lora) {
        return s.ask("/v1/completions", {{"model", model},
                                         {"prompt", "The"},
                                         {"max_tokens", 12},
                                         {"ignore_eos", true},
                                         {"temperature", 0},
                                         {"lora", lora}})["choices"][0]["text"];
    };
    for (const char* name : {"sql", "sql:latest"})
        CHECK(text(name, Json::array()) == text("base", Json::array({{{"id", 0}, {"scale", 1}}})));

    // The scales stay while the model is away, as long as its flags do.
    const auto scale = [&] { return s.ask_get("/lora-adapters?model=base")[0]["scale"]; };
    const auto leave = [&] {
        s.ask("/models/unload", {{"model", "base"}});
        while (s.ask_get("/v1/models/base")["status"]["value"] != "unloaded") nap();
    };
    leave();
    CHECK(scale() == 0.0);
    CHECK(s.post("/lora-adapters?model=base", scale_of_first).status == 200);
    const Json half = vector_of(s, "base");
    CHECK(half != plain);
    for (int i = 0; i < 2; i++) {
        leave();
        CHECK(vector_of(s, "base") == half);
        CHECK(scale() == 0.5);
    }
    folder.preset(flags + "\nctx-size = 64\n");
    CHECK(s.get("/models?reload=1").status == 200);
    CHECK(vector_of(s, "base") == plain);
    CHECK(scale() == 0.0);
}

TEST_CASE("the scales of adapters stay while the one model sleeps", "[server][adapters]") {
    // An adapter that all requests have may have the model's name.
    const Server s({"--sleep-idle-seconds", "0.05", "-a", "llama3-gqa.one", "--lora", adapter("one")},
                   reference("models/llama3-gqa-F16.gguf"));
    const auto   sleep = [&] {
        while (s.ask_get("/props")["is_sleeping"] != true) nap();
    };
    sleep();
    CHECK(s.ask_get("/lora-adapters")[0]["scale"] == 1.0);
    CHECK(s.post("/lora-adapters", scale_of_first).status == 200);
    for (int i = 0; i < 2; i++) {
        sleep();
        CHECK(s.ask_get("/lora-adapters")[0]["scale"] == 0.5);
    }
}

TEST_CASE("an adapter has no name of a model", "[server][adapters][models]") {
    const Finished own = run_program("server", {"-m", reference("models/llama3-gqa-F16.gguf"), "--device", "cpu", "-a",
                                                "base,small", "--lora-modules", "small=" + adapter("one")});
    CHECK(own.code == 2);
    CHECK(has(own.err, "the adapter " + adapter("one") + " has the name of its model, 'small'"));

    const Folder folder;
    const auto   refused = [&](const std::string& name, const std::string& said) {
        folder.preset("[other]\nalias = another\n[base]\nalias = plain\nlora-modules = " + name + "=" + adapter("one") +
                        "\n");
        std::vector<std::string> flags = folder.flags();
        flags.insert(flags.end(), {"--port", "0"});
        const Finished f = run_program("server", flags);
        CAPTURE(f.err);
        CHECK(f.code == 1);
        CHECK(has(f.err, "[base]: "));
        CHECK(has(f.err, said));
    };
    for (const char* name : {"other", "another"})
        refused(name, "another model has the name '" + std::string(name) + "' too, which is that of the adapter");
    for (const char* name : {"base", "plain"}) refused(name, "has the name of its model, '" + std::string(name) + "'");

    folder.preset("[base]\n");
    const Server s(folder.flags(), "");
    folder.preset("[base]\nlora-modules = other=" + adapter("one") + "\n");
    CHECK(s.get("/models?reload=1").status == 500);
    while (!has(s.errors() + s.log(), "another model has the name 'other' too")) nap();
    CHECK(s.ask_get("/v1/models")["data"].size() == 2);
}

TEST_CASE("adapters stand in a file of flags and in a variable", "[server][adapters]") {
    const Folder      folder;
    const std::string blank = (folder.path() / "with a blank.gguf").string(), file = folder.path() / "flags.conf";
    fs::create_symlink(fs::absolute(adapter("one")), blank);
    const auto check = [&](const std::vector<std::string>& flags) {
        const Server s(flags, reference("models/llama3-gqa-F16.gguf"));
        const Json   adapters = s.ask_get("/lora-adapters");
        REQUIRE(adapters.size() == 2);
        CHECK(adapters[0]["name"] == "a");
        CHECK(adapters[0]["path"] == blank);
        CHECK(adapters[1]["name"] == "b");
        CHECK(adapters[1]["path"] == adapter("two"));
    };
    for (const char* between : {" ", "  ", ",", ", "}) {
        CAPTURE(between);
        std::ofstream(file) << "lora-modules = a=" << blank << between << "b=" << adapter("two") << '\n';
        check({"--config", file});
    }
    setenv("QUIRE_LORA_MODULES", ("a=" + blank + " b=" + adapter("two")).c_str(), 1);
    check({});
    unsetenv("QUIRE_LORA_MODULES");
}
