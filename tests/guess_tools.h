// Shared by the tests of layers that guess tokens behind a model. Include after the imports of quire.core.base, quire.core.std,
// quire.engine.eagle_draft, quire.engine.engine, quire.engine.local_executor, quire.model_file.weights and quire.schedule.scheduler, and after
// nlohmann/json.hpp and engine_tools.h.
#pragma once

namespace quire::testing {

nlohmann::json read_json(const std::string& path);

// One text on a model with a layer that guesses, without an engine: its MTP layer, or the draft of EAGLE-3 in the file `draft`.
class GuessedText {
public:
    // `how`: the device, and whether it is deterministic.
    explicit GuessedText(const std::string& path, const std::string& draft = "",
                         const EngineOptions& how = {.device = "cpu", .kv_type = DType::F32});
    GuessedText(const GuessedText&)            = delete;
    GuessedText& operator=(const GuessedText&) = delete;
    ~GuessedText();

    // Computes all tokens but the last one, in steps of these sizes.
    void begin(const std::vector<Token>& tokens, const std::vector<int>& steps);
    // The layer's logits for what follows the token at `position`, a row of the last step or the one behind it.
    std::vector<float> guess(int position);
    // Likewise, for the token behind the one that was guessed last.
    std::vector<float> guess_next(Token guessed);
    // The program, and the kernels that run it.
    std::string explain() const;

private:
    std::vector<float> guess_from(int position);
    std::vector<float> run(std::span<Scheduled> items, std::vector<std::int32_t> carried, bool guesses = false);

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

Token best(std::span<const float> row);

// Compares a layer's logits with those that an independent computation has recorded in a file, in one step and in two; `most_error`: of a logit.
// The file's likeliest token is -1 where two are about as likely. Returns the largest error.
float check_recorded(GuessedText& text, const std::string& path, float most_error = 1e-3f);

} // namespace quire::testing
