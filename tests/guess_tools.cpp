// The functions of guess_tools.h, compiled once for all tests.
#include <catch2/catch_test_macros.hpp>

#include <nlohmann/json.hpp>

import quire.core.base;
import quire.core.std;
import quire.engine.eagle_draft;
import quire.engine.engine;
import quire.engine.executor;
import quire.engine.local_executor;
import quire.model_file.config;
import quire.model_file.weights;
import quire.schedule.scheduler;

#include "engine_tools.h"
#include "guess_tools.h"

namespace quire::testing {

nlohmann::json read_json(const std::string& path) {
    std::ifstream file(path);
    REQUIRE(file);
    return nlohmann::json::parse(file);
}

GuessedText::GuessedText(const std::string& path, const std::string& draft, const EngineOptions& how)
    : file_(value_of(Gguf::open(path))), config_(value_of(read_config(file_, draft.empty()))),
      tensors_(value_of(bind_tensors(file_, config_))), options_(how) {
    if (!draft.empty()) {
        draft_.emplace(value_of(Gguf::open(draft)));
        const auto added = add_eagle_draft(*draft_, value_of(Tokenizer::load(file_)), config_, tensors_);
        INFO((added ? "" : added.error().message));
        REQUIRE(added.has_value());
    }
    options_.threads          = 1;
    options_.context          = 400;
    options_.kv_blocks        = 60;
    options_.max_batch_tokens = 400;
    executor_                 = value_of(make_local_executor(path, options_, config_, tensors_, 400, {}));
    blocks_.emplace(BlockManagerOptions{.n_blocks   = options_.kv_blocks,
                                        .block_size = options_.block_size,
                                        .layout     = options_.layout,
                                        .n_markers  = 200});
}
GuessedText::~GuessedText() = default;

void GuessedText::begin(const std::vector<Token>& tokens, const std::vector<int>& steps) {
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
std::vector<float> GuessedText::guess(int position) {
    to_keep_ = {{position - 1 - first_, 0}};
    return guess_from(position);
}
std::vector<float> GuessedText::guess_next(Token guessed) {
    text_.tokens.push_back(guessed);
    to_keep_ = {{0, 0, true}};
    return guess_from(int(text_.tokens.size()) - 1);
}
std::vector<float> GuessedText::guess_from(int position) {
    Scheduled item{nullptr, &text_, position, 1, 0, 1};
    return run(std::span(&item, 1), {0}, true);
}
std::vector<float> GuessedText::run(std::span<Scheduled> items, std::vector<std::int32_t> carried, bool guesses) {
    StepPlan plan;
    plan_items(items, *blocks_, plan);
    plan.carried = std::move(carried);
    plan.kept    = std::exchange(to_keep_, {});
    plan.guesses = guesses;
    executor_->launch(plan);
    const std::span<const float> rows = executor_->results().rows();
    return {rows.begin(), rows.end()};
}

std::string GuessedText::explain() const { return executor_->explain(); }

Token best(std::span<const float> row) { return Token(std::ranges::max_element(row) - row.begin()); }

float check_recorded(GuessedText& text, const std::string& path, float most_error) {
    float largest = 0;
    for (const auto& c : read_json(path)) {
        const auto tokens   = c["tokens"].get<std::vector<Token>>();
        const auto expected = c["logits"].get<std::vector<std::vector<float>>>();
        const int  n        = int(tokens.size()) - 1;
        const auto tops     = c["top"].get<std::vector<Token>>();
        for (const std::vector<int>& steps : {std::vector{n}, std::vector{n - n / 3, n / 3}}) {
            if (steps.back() == 0) continue;
            CAPTURE(n, steps.size());
            text.begin(tokens, steps);
            for (int p = n - steps.back() + 1; p <= n; p++) {
                const Token top = best(text.guess(p));
                if (const Token expected_top = tops[std::size_t(p) - 1]; expected_top >= 0 && most_error <= 1e-3f)
                    CHECK(top == expected_top); // else two tokens may be too close
            }
            std::vector<float> row = text.guess(n);
            for (std::size_t i = 0;; i++) {
                REQUIRE(row.size() == expected[i].size());
                float most = 0;
                for (std::size_t j = 0; j < row.size(); j++)
                    if (expected[i][j] > -1e29f) most = std::max(most, std::abs(row[j] - expected[i][j]));
                    else CHECK(row[j] == -std::numeric_limits<float>::infinity()); // JSON has no such number
                CHECK(most < most_error);
                largest = std::max(largest, most);
                if (i + 1 == expected.size()) break;
                row = text.guess_next(best(expected[i]));
            }
        }
    }
    return largest;
}

} // namespace quire::testing
