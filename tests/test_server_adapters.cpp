// The server's LoRA adapters: flags, names in place of the model's, the field `lora`, /lora-adapters.
#include <catch2/catch_test_macros.hpp>

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "http_client.h"
#include "process.h"
#include "reference.h"
#include "server_process.h"

using namespace quire::testing;
using Json = nlohmann::json;

namespace {

std::string adapter(const std::string& name) { return reference("adapters/llama3-gqa." + name + ".gguf"); }

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
