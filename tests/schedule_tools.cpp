// The functions of schedule_tools.h, compiled once for all tests.
#include <catch2/catch_test_macros.hpp>

import quire.core.base;
import quire.core.std;
import quire.engine.engine;
import quire.schedule.request;
import quire.schedule.scheduler;

#include "engine_tools.h"
#include "schedule_tools.h"

namespace quire::testing {

bool identical(const Answers& a, const Answers& b) {
    return a.by_index.size() == b.by_index.size() && a.logprobs == b.logprobs && a.scores == b.scores &&
           std::ranges::equal(a.by_index, b.by_index, [](const auto& x, const auto& y) {
               return x.first == y.first && x.second.finish == y.second.finish &&
                      quire::testing::identical(x.second, y.second);
           });
}

std::vector<Answers> run_all(Engine& engine, const std::vector<Task>& tasks, bool check_each_step) {
    std::map<RequestId, std::size_t> index;
    std::vector<Answers>             answers(tasks.size());
    std::vector<Output>              events;
    std::vector<RequestId>           ids(tasks.size());
    std::size_t                      submitted = 0;
    for (int step = 0; submitted < tasks.size() || !index.empty(); step++) {
        for (std::size_t i = 0; i < tasks.size(); i++) {
            if (tasks[i].submit_at == step) {
                Result<RequestId> id = engine.submit(tasks[i].request);
                INFO((id ? "" : id.error().message));
                REQUIRE(id.has_value());
                index[ids[i] = *id] = i;
                submitted++;
            }
            if (tasks[i].cancel_at == step && ids[i] != 0) engine.cancel(ids[i]);
        }
        engine.step(events);
        for (Output& e : events) {
            if (!index.contains(e.id)) continue; // cancelled a moment before
            Answers& all = answers[index.at(e.id)];
            Answer&  a   = all.by_index[e.index];
            a.tokens.insert(a.tokens.end(), e.tokens.begin(), e.tokens.end());
            a.logprobs.insert(a.logprobs.end(), e.logprobs.begin(), e.logprobs.end());
            if (!e.prompt_logprobs.empty()) a.prompt_logprobs = std::move(e.prompt_logprobs);
            if (!e.prompt_logits.empty()) a.prompt_logits = std::move(e.prompt_logits);
            a.finish = e.finish;
            if (e.score != 0) {
                all.logprobs.push_back(e.logprob);
                all.scores.push_back(e.score);
            }
            all.cached_tokens = e.cached_tokens;
            all.n_preempted   = e.n_preempted;
            if (!e.done) continue;
            all.sharing = e.sharing;
            all.message = e.message;
            all.finish  = e.finish;
            index.erase(e.id);
        }
        events.clear();
        if (check_each_step) engine.check_invariants();
        REQUIRE(step < 100'000);
    }
    return answers;
}

Answers run_one(Engine& engine, const Request& request) { return run_all(engine, {{request}})[0]; }

std::vector<Token> prompt_of(int n, int first) {
    std::vector<Token> tokens;
    for (int i = 0; i < n; i++) tokens.push_back(5 + (first + i * 37) % 600);
    return tokens;
}

Request sampled(std::vector<Token> prompt, int n_tokens, std::uint64_t seed) {
    Request r              = greedy(std::move(prompt), n_tokens);
    r.sampling.temperature = 1.3f;
    r.sampling.top_p       = 0.95f;
    r.sampling.seed        = seed;
    r.return_logits        = false;
    return r;
}

Request beam(std::vector<Token> prompt, int n_tokens, int width) {
    Request r       = greedy(std::move(prompt), n_tokens);
    r.return_logits = false;
    r.n = r.beam_width = width;
    return r;
}

} // namespace quire::testing
