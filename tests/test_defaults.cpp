// How the server and chat sample where a request does not say: by a flag, the model's file, or llama.cpp's defaults.
#include <catch2/catch_test_macros.hpp>

#include <nlohmann/json.hpp>

#include "server_process.h"

import quire.core.base;
import quire.core.std;
import quire.model_file.gguf;
import quire.model_file.gguf_writer;
import quire.schedule.request;
import quire.engine.sampling_defaults;

using namespace quire;
using namespace quire::testing;
using Plain = nlohmann::json;

namespace {

// The model that ships, with these of general.sampling.* in its file.
std::string model_that_says(const std::function<void(GgufWriter&)>& add) {
    const Result<Gguf> file = Gguf::open(shipped);
    REQUIRE(file.has_value());
    GgufWriter w;
    for (const GgufPair& p : file->pairs()) w.set_bytes(std::string(p.key), p.type, {p.value.begin(), p.value.end()});
    for (const GgufTensor& t : file->tensors())
        w.add_tensor(std::string(t.name), t.type, {t.dims.begin(), t.dims.begin() + t.n_dims},
                     std::span(t.data, t.bytes));
    add(w);
    const std::string path = temporary();
    REQUIRE(w.write(path).has_value());
    return path;
}

Plain defaults_of(const Server& s) { return s.ask_get("/props")["default_generation_settings"]["params"]; }

// Of a request that names nothing.
Plain settings_of(const Server& s, const Plain& more = Plain::object()) {
    Plain body{{"prompt", "Hello"}, {"n_predict", 1}};
    body.update(more);
    return s.ask("/completion", body)["generation_settings"];
}

} // namespace

TEST_CASE("the file says how to sample, a flag says it louder", "[defaults]") {
    GgufWriter w;
    w.set("general.architecture", "llama");
    w.set("general.sampling.temp", 0.6f);
    w.set("general.sampling.top_k", std::int32_t(-1)); // all, as llama.cpp has it
    w.set("general.sampling.top_p", 0.9f);
    w.set("general.sampling.min_p", 2.0f);      // impossible
    w.set("general.sampling.mirostat", "much"); // not even a number
    w.set("general.sampling.penalty_last_n", std::int32_t(-1));
    w.set("general.sampling.penalty_repeat", 1.1f);
    w.set("general.sampling.xtc_probability", 0.25f);
    w.set("general.sampling.mirostat_tau", 4.0f);
    w.set("general.sampling.sequence", "kpt");
    const std::string path = temporary();
    REQUIRE(w.write(path).has_value());
    const Result<Gguf> file = Gguf::open(path);
    REQUIRE(file.has_value());
    SamplerChoice choice;
    choice.params.top_p = 0.5f; // typed
    const FileSampling taken =
        take_file_sampling(*file, [](const std::string& flag) { return flag == "--top-p"; }, choice);
    const SamplingParams& p = choice.params;
    CHECK((p.temperature == 0.6f && p.top_k == 0 && p.top_p == 0.5f && p.min_p == 0.05f && p.mirostat == 0));
    CHECK((p.repeat_last_n == -1 && p.repetition_penalty == 1.1f && p.xtc_probability == 0.25f && p.mirostat_tau == 4));
    CHECK(taken.said ==
          "temp 0.6, top_k -1, xtc_probability 0.25, penalty_last_n -1, penalty_repeat 1.1, mirostat_tau 4");
    CHECK(taken.refused == "general.sampling.min_p = 2, general.sampling.mirostat");
    CHECK(describe_sampling(p) == "temperature 0.6, top_p 0.5, min_p 0.05, xtc_probability 0.25, repeat_penalty 1.1");
    CHECK(describe_sampling(usual_sampling()) == "temperature 0.8, top_k 40, top_p 0.95, min_p 0.05");
}

TEST_CASE("requests that say nothing are sampled as in chat and llama.cpp", "[server][defaults]") {
    const Server s({}, QUIRE_ROOT "/tests/data/models/llama3-gqa-Q8_0.gguf");
    for (const Plain& p : {defaults_of(s), settings_of(s)}) {
        INFO(p.dump());
        CHECK((p["temperature"] == 0.8 && p["top_k"] == 40 && p["top_p"] == 0.95 && p["min_p"] == 0.05));
        CHECK((p["repeat_last_n"] == 64 && p["repeat_penalty"] == 1 && p["presence_penalty"] == 0));
    }
    CHECK(has(s.errors(), "sampled with temperature 0.8, top_k 40, top_p 0.95, min_p 0.05\n"));
    // The values of the request count, each by itself.
    const Plain own = settings_of(s, {{"temperature", 1}, {"top_k", 0}});
    CHECK((own["temperature"] == 1 && own["top_k"] == 0 && own["top_p"] == 0.95));
    CHECK(s.ask("/v1/responses", {{"input", "a"}, {"max_output_tokens", 1}})["temperature"] == 0.8);
    // Beams take the model's own probabilities.
    CHECK(s.post("/v1/completions", {{"prompt", "a"}, {"use_beam_search", true}, {"n", 2}, {"max_tokens", 2}}).status ==
          200);

    const Server flags({"--temp", "0.3", "--top-k", "7", "--repeat-penalty", "1.2", "--presence-penalty", "0.5"});
    const Plain  p = defaults_of(flags);
    CHECK((p["temperature"] == 0.3 && p["top_k"] == 7 && p["min_p"] == 0.05));
    CHECK((p["repeat_penalty"] == 1.2 && p["presence_penalty"] == 0.5));
    CHECK(flags.post("/v1/completions", {{"prompt", "a"}, {"use_beam_search", true}, {"n", 2}, {"max_tokens", 2}})
              .status == 200);
}

TEST_CASE("the toy model is sampled with temperature 0, named or found", "[server][defaults]") {
    const Server named;
    CHECK(defaults_of(named)["temperature"] == 0);
    CHECK(has(named.errors(), "the file says temp 0\n"));
    const auto chat = [](std::vector<std::string> words) {
        words.insert(words.end(), {"--device", "cpu", "-st", "-n", "12", "--ignore-eos", "-p", "Hello"});
        return run_program("chat", words).out;
    };
    const std::string greedy = chat({"-m", shipped, "--temp", "0"});
    CHECK(chat({"-m", shipped, "-s", "1"}) == greedy);
    CHECK(chat({"-s", "2"}) == greedy);
    // Another file that a program finds beside itself is sampled as any other.
    const std::filesystem::path folder = temporary();
    std::filesystem::remove(folder);
    std::filesystem::create_directories(folder / "models");
    std::filesystem::copy_file(QUIRE_BIN "/chat", folder / "chat");
    std::filesystem::copy_file(QUIRE_ROOT "/tests/data/models/llama3-gqa-Q8_0.gguf", folder / "models" / "a.gguf");
    const auto found = [&](const char* seed) {
        return run_program("chat", {"--device", "cpu", "-st", "-n", "12", "--ignore-eos", "-p", "Hello", "-s", seed},
                           "", folder.string())
            .out;
    };
    CHECK(found("1") != found("2"));
    std::filesystem::remove_all(folder);
}

TEST_CASE("the file's own defaults reach every request, and chat", "[server][defaults]") {
    // Greedy by the file: two answers of a request are the same, and as those of temperature 0.
    const std::string path = model_that_says([](GgufWriter& w) {
        w.set("general.sampling.temp", 0.0f);
        w.set("general.sampling.top_k", std::int32_t(20));
    });
    {
        const Server s({}, path);
        CHECK(has(s.errors(), "the file says temp 0, top_k 20\n"));
        CHECK((defaults_of(s)["temperature"] == 0 && defaults_of(s)["top_k"] == 20));
        const Plain body{{"prompt", "Once upon"}, {"max_tokens", 12}, {"ignore_eos", true}};
        Plain       greedy    = body;
        greedy["temperature"] = 0;
        const Plain text      = s.ask("/v1/completions", body)["choices"][0]["text"];
        CHECK(text == s.ask("/v1/completions", greedy)["choices"][0]["text"]);
        CHECK(text == s.ask("/v1/completions", body)["choices"][0]["text"]);
        const Server typed({"--temp", "0.7"}, path);
        CHECK((defaults_of(typed)["temperature"] == 0.7 && defaults_of(typed)["top_k"] == 20));
    }
    const auto chat = [&](const std::string& model, std::vector<std::string> more) {
        std::vector<std::string> all{"-m", model, "--device", "cpu", "-st", "-n", "12", "--ignore-eos", "-p", "Hello"};
        all.insert(all.end(), more.begin(), more.end());
        const Finished f = run_program("chat", all);
        INFO(f.err);
        CHECK(f.code == 0);
        return f.out;
    };
    CHECK(chat(path, {"-s", "1"}) == chat(shipped, {"--temp", "0", "-s", "2"}));
    CHECK(chat(path, {"-s", "1", "--temp", "0.9"}) == chat(shipped, {"-s", "1", "--temp", "0.9", "--top-k", "20"}));
    unlink(path.c_str());
}
