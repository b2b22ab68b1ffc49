// Shared by the tests of layers that guess tokens behind a model. Include after the imports of quire.core.base, quire.core.std,
// quire.engine.eagle_draft, quire.engine.engine, quire.engine.local_executor, quire.model_file.weights and quire.schedule.scheduler, and after
// nlohmann/json.hpp and engine_tools.h.
#pragma once

namespace quire::testing {

inline nlohmann::json read_json(const std::string& path) {
    std::ifstream file(path);
    REQUIRE(file);
    return nlohmann::json::parse(file);
}

// One text on a model with a layer that guesses, without an engine: its MTP layer, or the draft of EAGLE-3 in the file `draft`.
class GuessedText {
public:
    // `how`: the device, and whether it is deterministic.
    explicit GuessedText(const std::string& path, const std::string& draft = "",
                         const EngineOptions& how = {.device = "cpu", .kv_type = DType::F32})
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
    std::optional<Gguf>            draft_;
    ModelConfig                    config_;
    ModelTensors                   tensors_;
    EngineOptions                  options_;
    std::unique_ptr<Executor>      executor_;
    std::optional<BlockManager>    blocks_;
    Sequence                       text_;
    std::vector<StepPlan::KeptRow> to_keep_;
    int                            first_ = 0; // of the last step
};

inline Token best(std::span<const float> row) { return Token(std::ranges::max_element(row) - row.begin()); }

// Compares a layer's logits with those that an independent computation has recorded in a file, in one step and in two; `most_error`: of a logit.
inline void check_recorded(GuessedText& text, const std::string& path, float most_error = 1e-3f) {
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
                if (most_error <= 1e-3f) CHECK(top == tops[std::size_t(p) - 1]); // else two tokens may be too close
            }
            std::vector<float> row = text.guess(n);
            for (std::size_t i = 0;; i++) {
                REQUIRE(row.size() == expected[i].size());
                float most = 0;
                for (std::size_t j = 0; j < row.size(); j++)
                    if (expected[i][j] > -1e29f) most = std::max(most, std::abs(row[j] - expected[i][j]));
                    else CHECK(row[j] == -std::numeric_limits<float>::infinity()); // JSON has no such number
                CHECK(most < most_error);
                if (i + 1 == expected.size()) break;
                row = text.guess_next(best(expected[i]));
            }
        }
    }
}

} // namespace quire::testing
