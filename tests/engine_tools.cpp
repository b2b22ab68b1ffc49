// The functions of engine_tools.h, compiled once for all tests.
#include <catch2/catch_test_macros.hpp>

import quire.core.base;
import quire.core.std;
import quire.engine.engine;
import quire.schedule.request;

#include "engine_tools.h"

namespace quire::testing {

Engine load(const std::string& path, EngineOptions options) {
    if (options.device == "auto") options.device = "cpu";
    Result<Engine> engine = Engine::load(path, options);
    INFO(path << ": " << (engine ? "" : engine.error().message));
    REQUIRE(engine.has_value());
    return std::move(*engine);
}

EngineOptions small_blocks(bool pipeline, int kv_blocks, int max_sequences) {
    EngineOptions o;
    o.threads       = 1;
    o.block_size    = 4;
    o.kv_blocks     = kv_blocks;
    o.max_sequences = max_sequences;
    o.pipeline      = pipeline;
    return o;
}

Request greedy(std::vector<Token> prompt, int n) {
    Request r;
    r.prompt               = std::move(prompt);
    r.max_tokens           = n;
    r.ignore_end           = true;
    r.sampling.temperature = 0;
    r.sampling.logprobs    = 2;
    r.return_logits        = true;
    return r;
}

std::vector<Answer> run(Engine& engine, const std::vector<Request>& requests, const std::vector<int>& submit_at) {
    std::map<RequestId, std::size_t> index;
    std::vector<Answer>              answers(requests.size());
    std::vector<Output>              events;
    std::size_t                      submitted = 0;
    for (int step = 0; submitted < requests.size() || !index.empty(); step++) {
        for (std::size_t i = 0; i < requests.size(); i++)
            if ((submit_at.empty() ? 0 : submit_at[i]) == step) {
                Result<RequestId> id = engine.submit(requests[i]);
                INFO((id ? "" : id.error().message));
                REQUIRE(id.has_value());
                index[*id] = i;
                submitted++;
            }
        engine.step(events);
        for (Output& e : events) {
            Answer& a = answers[index.at(e.id)];
            a.tokens.insert(a.tokens.end(), e.tokens.begin(), e.tokens.end());
            a.logprobs.insert(a.logprobs.end(), e.logprobs.begin(), e.logprobs.end());
            if (!e.prompt_logprobs.empty()) a.prompt_logprobs = std::move(e.prompt_logprobs);
            if (!e.prompt_logits.empty()) a.prompt_logits = std::move(e.prompt_logits);
            a.cached_tokens = e.cached_tokens;
            a.finish        = e.finish;
            if (e.done) index.erase(e.id);
        }
        events.clear();
        engine.check_invariants();
        REQUIRE(step < 100'000);
    }
    return answers;
}

bool identical(const Answer& a, const Answer& b) {
    auto same = [](const std::vector<PositionLogprobs>& x, const std::vector<PositionLogprobs>& y) {
        return std::ranges::equal(x, y, [](const PositionLogprobs& p, const PositionLogprobs& q) {
            auto bits = [](const TokenLogprob& t) {
                return std::pair(t.token, std::bit_cast<std::uint32_t>(t.logprob));
            };
            return bits(p.chosen) == bits(q.chosen) && std::ranges::equal(p.top, q.top, {}, bits, bits);
        });
    };
    const auto float_bits = [](float v) { return std::bit_cast<std::uint32_t>(v); };
    return a.tokens == b.tokens && std::ranges::equal(a.prompt_logits, b.prompt_logits, {}, float_bits, float_bits) &&
           same(a.logprobs, b.logprobs) && same(a.prompt_logprobs, b.prompt_logprobs);
}

} // namespace quire::testing
