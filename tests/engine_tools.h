// Shared by the tests of the whole engine: loads a model file, runs one batch of requests to its end.
// Include after the imports of quire.core.base, quire.engine.engine, quire.schedule.request and quire.core.std.
#pragma once

namespace quire::testing {

// All events of one request in one.
struct Answer {
    std::vector<Token>            tokens;
    std::vector<PositionLogprobs> logprobs;
    std::vector<PositionLogprobs> prompt_logprobs;
    std::vector<float>            prompt_logits;
    int                           cached_tokens = 0;
    FinishReason                  finish        = FinishReason::none;
};

template <class T>
T value_of(Result<T> result) {
    INFO((result ? "" : result.error().message));
    REQUIRE(result.has_value());
    return std::move(*result);
}

// On the CPU, whatever the machine has, unless the test wants the GPU.
Engine load(const std::string& path, EngineOptions options);

// One thread; a pool of so many blocks of 4 tokens.
EngineOptions small_blocks(bool pipeline, int kv_blocks, int max_sequences);

// Greedy, log-probabilities of the best two at each position, to the length asked for.
Request greedy(std::vector<Token> prompt, int n);

// Runs until everything is done. `submit_at[i]`: the step before which request i is handed in (empty: all at once).
std::vector<Answer> run(Engine& engine, const std::vector<Request>& requests, const std::vector<int>& submit_at = {});

// Equal bits: tokens, logits of the last prompt position, log-probabilities of every step.
bool identical(const Answer& a, const Answer& b);

} // namespace quire::testing
