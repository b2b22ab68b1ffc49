// Layers for multi-token prediction: their logits against those of an independent reference; what they need, and what they cost.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include <nlohmann/json.hpp>

#include "reference.h"

import quire.compute.kv_cache;
import quire.core.base;
import quire.core.std;
import quire.engine.eagle_draft;
import quire.engine.engine;
import quire.engine.executor;
import quire.engine.load_estimate;
import quire.engine.local_executor;
import quire.model_file.config;
import quire.model_file.weights;
import quire.schedule.scheduler;

#include "engine_tools.h"
#include "guess_tools.h"
#include "npy.h"
#include "process.h"
#include "schedule_tools.h"

using namespace quire;
using namespace quire::testing;

namespace {

const std::string tiny = QUIRE_ROOT "/tests/data/mtp/tiny-mtp-F16.gguf";

} // namespace

TEST_CASE("an MTP layer's logits are those of the reference, also of guesses behind guesses") {
    const std::string name =
        QUIRE_ROOT "/tests/data/mtp/tiny-mtp" + GENERATE(as<std::string>(), "", "-glm4moe", "-deepseek2");
    CAPTURE(name);
    GuessedText text(name + "-F16.gguf");
    check_recorded(text, name + ".json");
}

// `make test-families` runs this test on each of its models, and nothing else does.
TEST_CASE("an MTP layer's logits are those of transformers' parts", "[.families]") {
    const char* folder = std::getenv("QUIRE_MTP_FOLDER");
    if (!folder) SKIP("QUIRE_MTP_FOLDER names no folder");
    GuessedText text(std::string(folder) + "/model.gguf");
    std::ofstream(std::string(folder) + "/difference") << check_recorded(text, std::string(folder) + "/mtp.json");
}

TEST_CASE("an MTP layer's logits are those of the full reference") {
    if (!has_reference("models/qwen35-mtp-F16.gguf")) return;
    GuessedText text(reference("models/qwen35-mtp-F16.gguf"));
    const auto  logits    = read_npy(reference("logits/qwen35-mtp/mtp_logits.npy"));
    const auto  all       = read_json(reference("logits/qwen35-mtp/mtp.json"))["prompts"];
    const auto  prompts   = read_json(reference("logits/qwen35-mtp/expected.json"))["prompts"];
    std::size_t n_checked = 0;
    for (std::size_t i = 0; i < all.size(); i++) {
        std::vector<Token> tokens = prompts[i]["tokens"];
        const int          n      = int(tokens.size());
        tokens.push_back(prompts[i]["greedy"][0]);
        CAPTURE(n);
        text.begin(tokens, {n});
        for (int p = 1; p <= n; p++) {
            const std::vector<float> row = text.guess(p);
            const auto               at  = std::size_t(p) - 1;
            if (all[i]["mtp_margin"][at].get<double>() > 0.01) {
                CHECK(best(row) == all[i]["mtp_top1"][at].get<Token>());
                n_checked++;
            }
            if (p < n) continue;
            float most = 0;
            for (std::size_t j = 0; j < row.size(); j++)
                most = std::max(most, std::abs(row[j] - logits[i * row.size() + j]));
            CHECK(most < 1e-3f);
        }
    }
    CHECK(n_checked > 500);
}

TEST_CASE("an MTP layer is paid for where it is wanted, and refused where it cannot run") {
    const auto error_of = [](const std::string& path, EngineOptions o) {
        o.context   = 32;
        o.drafts    = {.on = true, .by_mtp = true};
        auto engine = Engine::load(path, o);
        return engine ? std::string() : engine.error().message;
    };
    const std::string other = QUIRE_ROOT "/tests/data/models/llama3-gqa-Q8_0.gguf";
    CHECK(error_of(other, {.device = "cpu"}).contains("no layer for multi-token prediction"));

    const Gguf        file  = value_of(Gguf::open(tiny));
    const ModelConfig plain = value_of(read_config(file)), with = value_of(read_config(file, true));
    CHECK(plain.n_layers == with.n_layers);
    CHECK(KvCache::bytes_per_token(with, DType::F16) == 2 * KvCache::bytes_per_token(plain, DType::F16));
    CHECK(KvCache::state_bytes(with) == KvCache::state_bytes(plain));
    EngineOptions o{.device = "cpu"};
    const auto    without = value_of(estimate_load(tiny, o));
    o.drafts.by_mtp       = true;
    const auto all        = value_of(estimate_load(tiny, o));
    CHECK(without.weight_bytes < all.weight_bytes);
    CHECK(without.kv_bytes_per_token < all.kv_bytes_per_token);
}

TEST_CASE("bench make-model writes MTP layers, whose guesses come true where the model counts") {
    const std::string path = temporary();
    REQUIRE(run_program("bench", {"make-model", "--shape", "tiny-hybrid", "--layers", "2", "--type", "q8_0", "--mtp",
                                  "1", "--counting", "-o", path})
                .code == 0);
    EngineOptions o      = small_blocks(false, 200, 4);
    o.drafts             = {.on = true, .most = 3, .always = true, .by_mtp = true};
    Engine        engine = load(path, o);
    const Answers answer = run_one(engine, greedy({40, 41}, 25));
    CHECK(answer.by_index.at(0).tokens.front() == 42);
    CHECK(answer.by_index.at(0).tokens.back() == 66);
    const auto stats = engine.stats().memory;
    CHECK(stats.draft_tokens > 12); // up to 4 tokens a step behind the first one, which end where a state is kept
    CHECK(stats.draft_tokens == stats.accepted_tokens);
}
