// Drafts of EAGLE-3: their logits against those of an independent reference; which files are refused, and what a draft costs.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include <nlohmann/json.hpp>

import quire.compute.kv_cache;
import quire.core.base;
import quire.core.std;
import quire.engine.eagle_draft;
import quire.engine.engine;
import quire.engine.executor;
import quire.engine.load_estimate;
import quire.engine.local_executor;
import quire.model_file.config;
import quire.model_file.gguf_writer;
import quire.model_file.weights;
import quire.schedule.scheduler;

#include "engine_tools.h"
#include "guess_tools.h"
#include "process.h"
#include "schedule_tools.h"

using namespace quire;
using namespace quire::testing;

namespace {

const std::string folder = QUIRE_ROOT "/tests/data/eagle/", target = folder + "tiny-target-F16.gguf";

std::string draft(const char* kind) { return folder + "tiny-eagle-" + kind + "-F16.gguf"; }

std::string error_of(const std::string& path, EngineOptions o) {
    o.context = 32;
    if (o.device == "auto") o.device = "cpu";
    auto engine = Engine::load(path, o);
    return engine ? std::string() : engine.error().message;
}

} // namespace

TEST_CASE("an EAGLE-3 draft's logits are those of the reference, also of guesses behind guesses") {
    const char* const kind = GENERATE("small", "wide", "shared");
    INFO(kind);
    GuessedText text(target, draft(kind));
    check_recorded(text, folder + "tiny-eagle-" + kind + ".json");
}

namespace {

// A copy of the small draft with other values and tensors. A tensor whose replacement has no bytes is left out.
std::string changed(const std::function<void(GgufWriter&)>& change, const std::string& without = "") {
    const Gguf file = value_of(Gguf::open(draft("small")));
    GgufWriter writer;
    for (const GgufPair& pair : file.pairs())
        if (pair.key != "general.alignment")
            writer.set_bytes(std::string(pair.key), pair.type, {pair.value.begin(), pair.value.end()});
    for (const GgufTensor& t : file.tensors())
        if (t.name != without)
            writer.add_tensor(t.name, t.type, {t.dims.begin(), t.dims.begin() + t.n_dims}, {t.data, t.bytes});
    change(writer);
    const std::string path = temporary();
    REQUIRE(writer.write(path).has_value());
    return path;
}

} // namespace

TEST_CASE("an EAGLE-3 draft is for one model, and the file says for which") {
    const auto refused = [](const std::string& file, const std::string& path = target, int ranks = 1) {
        EngineOptions o;
        o.tensor_parallel = ranks;
        o.drafts          = {.on = true, .by_model = true, .model = file};
        return error_of(path, o);
    };
    const auto with = [](const char* key, const auto& value) {
        return changed([&](GgufWriter& w) { w.set(std::string("eagle3.") + key, value); });
    };
    const std::string other    = QUIRE_ROOT "/tests/data/models/llama3-gqa-Q8_0.gguf",
                      deepseek = QUIRE_ROOT "/tests/data/models/deepseek2-Q8_0.gguf";
    CHECK(refused(draft("small")).empty());
    CHECK(refused(draft("small"), other).contains("a model with a hidden size (target_hidden_size) of 32, not of"));
    CHECK(refused(with("target_layers", std::vector<std::int32_t>{1, 2, 5})).contains("reads layer 5 of its model"));
    CHECK(refused(with("target_layers", std::vector<std::int32_t>{1, 2})).contains("eagle3.target_layers"));
    CHECK(refused(with("target_layers", std::vector<std::int32_t>{1, 2, -3})).contains("eagle3.target_layers has -3"));
    CHECK(refused(with("target_hidden_size", 0)).contains("eagle3.target_hidden_size is 0"));
    CHECK(refused(with("block_count", 2)).contains("a draft of EAGLE-3 has 1 layer"));
    CHECK(refused(with("embedding_length", 64)).contains("tensor fc.weight is [32 × 96], the model needs [64 × 96]"));
    const int hidden = value_of(read_config(value_of(Gguf::open(deepseek)))).hidden_size;
    CHECK(refused(with("target_hidden_size", hidden), deepseek).contains("latent attention"));
    CHECK(refused(draft("small"), target, 2).contains("runs on one rank"));

    const auto none = [](GgufWriter&) {};
    CHECK(refused(changed(none, "fc.weight")).contains("tensor fc.weight is missing"));
    CHECK(refused(changed(none, "output.weight")).contains("tensor d2t"));
    CHECK(refused(changed([](GgufWriter& w) {
              std::vector<std::string> tokens(640, "a");
              w.set("tokenizer.ggml.tokens", tokens);
          })).contains("a draft model needs the vocabulary of the model; its token 0"));
    for (const std::int64_t token : {std::int64_t(-1), std::int64_t(640), std::numeric_limits<std::int64_t>::max()}) {
        const std::vector<std::int64_t> tokens(420, token);
        CHECK(refused(
                  changed(
                      [&](GgufWriter& w) { w.add_tensor("d2t", DType::I64, {420}, std::as_bytes(std::span(tokens))); },
                      "d2t"))
                  .contains(cat("tensor d2t has the token ", token)));
    }
    CHECK(refused(changed(
                      [](GgufWriter& w) {
                          const std::vector<float> tokens(420);
                          w.add_tensor("d2t", DType::F32, {420}, std::as_bytes(std::span(tokens)));
                      },
                      "d2t"))
              .contains("tensor d2t has type F32, not I64"));

    EngineOptions o;
    CHECK(error_of(draft("small"), o).contains("it is a draft of EAGLE-3, no model"));
    o.drafts = {.on = true, .model = other, .by_eagle = true};
    CHECK(error_of(target, o).contains("it is no draft of EAGLE-3"));
    o.drafts.model = "";
    CHECK(error_of(target, o) == "guesses of a draft model need its file: --spec-draft-model");
}

TEST_CASE("an EAGLE-3 draft has blocks in the model's pool, and is counted in the estimate") {
    EngineOptions o{.device = "cpu"};
    const auto    alone = value_of(estimate_load(target, o));
    o.drafts            = {.on = true, .by_model = true, .model = draft("wide")};
    const auto both     = value_of(estimate_load(target, o));
    CHECK(both.draft_bytes > 0);
    CHECK(both.kv_bytes_per_token == alone.kv_bytes_per_token / 4 * 5); // four layers and one alike
    o.context           = 64;
    o.kv_blocks         = 8;
    const Engine plain  = load(target, {.device = "cpu", .context = 64, .kv_blocks = 8});
    const Engine engine = load(target, o);
    CHECK(engine.options().drafts.by_eagle);
    CHECK_FALSE(engine.options().drafts.by_model);
    CHECK(engine.block_bytes() > plain.block_bytes());
    CHECK(engine.explain().contains("scatter") == false); // its output is the whole vocabulary
    CHECK(engine.describe().contains("tiny-eagle-wide"));
}

TEST_CASE("bench make-model writes a draft of EAGLE-3, whose guesses come true where the model counts") {
    const std::string shape = GENERATE("tiny", "tiny-hybrid"), path = temporary(), guesser = temporary();
    for (const bool eagle : {false, true}) {
        std::vector<std::string> words{"make-model", "--shape", shape, "--type", "q8_0", "-o", eagle ? guesser : path};
        words.emplace_back(eagle ? "--eagle3" : "--counting");
        REQUIRE(run_program("bench", words).code == 0);
    }
    EngineOptions o      = small_blocks(false, 200, 4);
    o.drafts             = {.on = true, .most = 3, .always = true, .model = guesser, .by_eagle = true};
    Engine        engine = load(path, o);
    const Answers answer = run_one(engine, greedy({40, 41}, 25));
    CHECK(answer.by_index.at(0).tokens.front() == 42);
    CHECK(answer.by_index.at(0).tokens.back() == 66);
    const auto stats = engine.stats().memory;
    // 25 tokens in steps of 4 behind the first one; some steps end where a state is kept.
    CHECK((shape == "tiny" ? stats.draft_tokens == 18 : stats.draft_tokens > 12));
    CHECK(stats.draft_tokens == stats.accepted_tokens);
}

TEST_CASE("the flags of llama.cpp and of vLLM name a draft of EAGLE-3") {
    const std::string model = QUIRE_ROOT "/tests/data/models/llama3-gqa-Q8_0.gguf";
    const auto        run   = [&](std::vector<std::string> words) {
        words.insert(words.begin(), {"-m", target, "--device", "cpu"});
        return run_program("server", words);
    };
    const std::string vllm = R"({"method": "eagle3", "num_speculative_tokens": 3)";
    for (const std::vector<std::string>& words :
         std::vector<std::vector<std::string>>{{"--spec-type", "draft-eagle3", "-md", model},
                                               {"-md", model, "--spec", "eagle3"},
                                               {"--speculative-config", vllm + R"(, "model": ")" + model + R"("})"}}) {
        const Finished f = run(words);
        INFO(f.err);
        CHECK(f.code == 1);
        CHECK(f.err.contains("it is no draft of EAGLE-3"));
    }
    const Finished f = run({"--speculative-config", vllm + "}"});
    CHECK(f.code == 2);
    CHECK(f.err.contains("the method \"eagle3\" needs a \"model\""));
}
