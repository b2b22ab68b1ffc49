// Requests that come and go at chosen steps, and all that they answer. Included behind the imports of the engine and of engine_tools.h.
#pragma once

namespace quire::testing {

// All that a request answered, by index.
struct Answers {
    std::map<int, Answer> by_index;
    std::vector<double>   logprobs, scores; // of whole answers, where given
    SharingStats          sharing;
    int                   n_preempted = 0, cached_tokens = 0;
    std::string           message;
    FinishReason          finish = FinishReason::none; // of the last event
};

bool identical(const Answers& a, const Answers& b);

struct Task {
    Request request;
    int     submit_at = 0, cancel_at = -1; // steps
};

std::vector<Answers> run_all(Engine& engine, const std::vector<Task>& tasks, bool check_each_step = true);
Answers              run_one(Engine& engine, const Request& request);

std::vector<Token> prompt_of(int n, int first = 5);

Request sampled(std::vector<Token> prompt, int n_tokens, std::uint64_t seed);
Request beam(std::vector<Token> prompt, int n_tokens, int width);

} // namespace quire::testing
