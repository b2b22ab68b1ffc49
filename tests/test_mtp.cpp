// Layers for multi-token prediction: their logits against those of an independent reference; what they need, and what they cost.
#include <catch2/catch_test_macros.hpp>

#include <nlohmann/json.hpp>

#include "reference.h"

import quire.compute.kv_cache;
import quire.core.base;
import quire.core.std;
import quire.engine.engine;
import quire.engine.executor;
import quire.engine.load_estimate;
import quire.engine.local_executor;
import quire.model_file.config;
import quire.model_file.weights;
import quire.schedule.scheduler;

#include "engine_tools.h"
#include "npy.h"
#include "process.h"
#include "schedule_tools.h"

using namespace quire;
using namespace quire::testing;

namespace {

const std::string tiny = QUIRE_ROOT "/tests/data/mtp/tiny-mtp-F16.gguf";

nlohmann::json read_json(const std::string& path) {
    std::ifstream file(path);
    REQUIRE(file);
    return nlohmann::json::parse(file);
}

// One text on a model with its MTP layer, without an engine.
class Text {
public:
    explicit Text(const std::string& path)
        : file_(value_of(Gguf::open(path))), config_(value_of(read_config(file_, true))),
          tensors_(value_of(bind_tensors(file_, config_))) {
        options_.device           = "cpu";
        options_.threads          = 1;
        options_.kv_type          = DType::F32;
        options_.context          = 400;
        options_.kv_blocks        = 60;
        options_.max_batch_tokens = 400;
        executor_                 = value_of(make_local_executor(path, options_, config_, tensors_, 400, {}));
        blocks_.emplace(BlockManagerOptions{.n_blocks   = options_.kv_blocks,
                                            .block_size = options_.block_size,
                                            .layout     = options_.layout,
                                            .n_markers  = 200});
    }

    // Computes all tokens but the last one, in steps of these sizes.
    void begin(const std::vector<Token>& tokens, const std::vector<int>& steps) {
        if (text_.table >= 0) blocks_->close_table(text_.table, true);
        text_.tokens     = tokens;
        text_.n_computed = 0;
        text_.table      = blocks_->open_table();
        REQUIRE(blocks_->allocate(text_.table, tokens, 0, false));
        REQUIRE(blocks_->allocate_slots(text_.table, 0, int(tokens.size()) - 1));
        for (int n : steps) {
            Scheduled item{nullptr, &text_, text_.n_computed, n, 0, n};
            run(std::span(&item, 1), text_.n_computed > 0 ? std::vector{1} : std::vector<std::int32_t>());
            text_.n_computed += n;
            if (blocks_->blocks_per_unit() > 0) blocks_->advance(text_.table, text_.n_computed);
            to_keep_ = {{n - 1, 1}}; // the last state, for the next step
            first_   = text_.n_computed - n;
        }
        REQUIRE(text_.n_computed == int(tokens.size()) - 1);
        REQUIRE(blocks_->allocate_slots(text_.table, text_.n_computed, 4));
    }
    // The layer's logits for what follows the token at `position`, a row of the last step or the one behind it.
    std::vector<float> guess(int position) {
        to_keep_ = {{position - 1 - first_, 0}};
        return guess_from(position);
    }
    // Likewise, for the token behind the one that was guessed last.
    std::vector<float> guess_next(Token guessed) {
        text_.tokens.push_back(guessed);
        to_keep_ = {{0, 0, true}};
        return guess_from(int(text_.tokens.size()) - 1);
    }

private:
    std::vector<float> guess_from(int position) {
        Scheduled item{nullptr, &text_, position, 1, 0, 1};
        return run(std::span(&item, 1), {0}, true);
    }
    std::vector<float> run(std::span<Scheduled> items, std::vector<std::int32_t> carried, bool guesses = false) {
        StepPlan plan;
        plan_items(items, *blocks_, plan);
        plan.carried = std::move(carried);
        plan.kept    = std::exchange(to_keep_, {});
        plan.guesses = guesses;
        executor_->launch(plan);
        const std::span<const float> rows = executor_->results().rows();
        return {rows.begin(), rows.end()};
    }

    Gguf                           file_;
    ModelConfig                    config_;
    ModelTensors                   tensors_;
    EngineOptions                  options_;
    std::unique_ptr<Executor>      executor_;
    std::optional<BlockManager>    blocks_;
    Sequence                       text_;
    std::vector<StepPlan::KeptRow> to_keep_;
    int                            first_ = 0; // of the last step
};

Token best(std::span<const float> row) { return Token(std::ranges::max_element(row) - row.begin()); }

} // namespace

TEST_CASE("an MTP layer's logits are those of the reference, also of guesses behind guesses") {
    Text text(tiny);
    for (const auto& c : read_json(QUIRE_ROOT "/tests/data/mtp/tiny-mtp.json")) {
        const auto tokens   = c["tokens"].get<std::vector<Token>>();
        const auto expected = c["logits"].get<std::vector<std::vector<float>>>();
        const int  n        = int(tokens.size()) - 1;
        const auto tops     = c["top"].get<std::vector<Token>>();
        for (const std::vector<int>& steps : {std::vector{n}, std::vector{n - n / 3, n / 3}}) {
            if (steps.back() == 0) continue;
            CAPTURE(n, steps.size());
            text.begin(tokens, steps);
            for (int p = n - steps.back() + 1; p <= n; p++) CHECK(best(text.guess(p)) == tops[std::size_t(p) - 1]);
            std::vector<float> row = text.guess(n);
            for (std::size_t i = 0;; i++) {
                float most = 0;
                for (std::size_t j = 0; j < row.size(); j++) most = std::max(most, std::abs(row[j] - expected[i][j]));
                CHECK(most < 1e-3f);
                if (i + 1 == expected.size()) break;
                row = text.guess_next(best(row));
            }
        }
    }
}

TEST_CASE("an MTP layer's logits are those of the full reference") {
    if (!has_reference("models/qwen35-mtp-F16.gguf")) return;
    Text        text(reference("models/qwen35-mtp-F16.gguf"));
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
