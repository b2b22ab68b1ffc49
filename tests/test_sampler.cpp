#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>

import quire.core.base;
import quire.core.std;
import quire.decode.sampler;
import quire.schedule.request;
import quire.step.plan;

using namespace quire;

namespace {

// How often each token comes out under many seeds.
std::vector<int> histogram(std::span<const float> logits, SamplingParams params, int n = 20'000) {
    Sampler            sampler(int(logits.size()));
    std::vector<int>   count(logits.size());
    std::vector<Token> history{0};
    for (int i = 0; i < n; i++) {
        params.seed = std::uint64_t(i);
        count[std::size_t(sampler.sample(logits, params, history, 0))]++;
    }
    return count;
}

SamplingParams greedy() {
    SamplingParams p;
    p.temperature = 0;
    return p;
}

} // namespace

TEST_CASE("greedy takes the largest logit, the lowest id on a tie") {
    Sampler            sampler(4);
    std::vector<Token> history{0};
    CHECK(sampler.sample(std::vector<float>{1, 3, 3, 2}, greedy(), history, 0) == 1);
    const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
    CHECK(sampler.sample(std::vector<float>{-inf, 1, -inf, 2}, greedy(), history, 0) == 3);
    for (const SamplingParams& how : {greedy(), SamplingParams{}})
        for (const std::vector<float>& bad : {std::vector<float>{nan, 1, 2, 3},
                                              {0, 1, 2, nan},
                                              {nan, nan, nan, nan},
                                              {0, inf, 1, 2},
                                              {-inf, -inf, -inf, -inf}})
            CHECK(sampler.sample(bad, how, history, 0) == -1);
}

TEST_CASE("no token is drawn where the request leaves none") {
    Sampler                  sampler(4);
    const std::vector<float> logits{1, 2, 3, 4};
    for (float temperature : {0.0f, 1.0f}) {
        SamplingParams params;
        params.temperature    = temperature;
        params.allowed_tokens = {2};
        CHECK(sampler.sample(logits, params, std::vector<Token>{0}, 0) == 2);
        params.bad_words = {{2}};
        CHECK(sampler.sample(logits, params, std::vector<Token>{0}, 0) == -1);
    }
}

TEST_CASE("draws follow the softmax at the temperature") {
    const std::vector<float> logits{0, std::log(2.0f), std::log(5.0f)};
    SamplingParams           params;
    auto                     count = histogram(logits, params);
    CHECK(count[0] == Catch::Approx(2500).margin(200));
    CHECK(count[1] == Catch::Approx(5000).margin(250));
    params.temperature = 0.5f; // 1 : 4 : 25
    CHECK(histogram(logits, params)[2] == Catch::Approx(20'000 * 25 / 30).margin(300));
}

TEST_CASE("top-k, top-p and min-p cut the tail") {
    const std::vector<float> logits{std::log(1.0f), std::log(2.0f), std::log(3.0f), std::log(4.0f)}; // 0.1 0.2 0.3 0.4
    SamplingParams           params;
    params.top_k = 2;
    auto count   = histogram(logits, params);
    CHECK(count[0] + count[1] == 0);
    CHECK(count[3] == Catch::Approx(20'000 * 4 / 7).margin(300));
    params       = {};
    params.top_p = 0.65f; // 0.4 + 0.3 reach it
    count        = histogram(logits, params);
    CHECK(count[0] + count[1] == 0);
    CHECK(count[2] > 0);
    params.top_p = 0.01f; // at least the best one
    CHECK(histogram(logits, params)[3] == 20'000);
    params       = {};
    params.min_p = 0.45f; // of the best one's 0.4: 0.18
    count        = histogram(logits, params);
    CHECK(count[0] == 0);
    CHECK(count[1] > 0);
}

TEST_CASE("the same seed and position draw the same number, others another one") {
    CHECK(random_at(1, 2) == random_at(1, 2));
    CHECK(random_at(1, 2) != random_at(1, 3));
    CHECK(random_at(1, 2) != random_at(2, 2));
    double sum = 0;
    for (std::uint64_t i = 0; i < 10'000; i++) {
        double u = random_at(42, i);
        REQUIRE((u >= 0 && u < 1));
        sum += u;
    }
    CHECK(sum / 10'000 == Catch::Approx(0.5).margin(0.02));
}

TEST_CASE("penalties count prompt and generated tokens as their definitions say") {
    Sampler                  sampler(4);
    const std::vector<float> logits{2.0f, 1.9f, -1.0f, -1.1f};
    const std::vector<Token> history{0, 0, 2}; // with n_generated 1: the prompt 0 0, then 2
    SamplingParams           params = greedy();
    params.repetition_penalty       = 1.5f; // once, not per occurrence: 2.0 / 1.5
    CHECK(sampler.sample(logits, params, history, 1) == 1);
    params                  = greedy();
    params.presence_penalty = 10; // of generated tokens only
    CHECK(sampler.sample(logits, params, history, 1) == 0);
    CHECK(sampler.sample(logits, params, history, 3) == 1);
    params                   = greedy();
    params.frequency_penalty = 0.06f; // 2.0 - 2 · 0.06 < 1.9
    CHECK(sampler.sample(logits, params, history, 3) == 1);
    params.repeat_last_n = 1; // looks at the 2 alone
    CHECK(sampler.sample(logits, params, history, 3) == 0);
    params.logit_bias = {{3, 100.0f}};
    CHECK(sampler.sample(logits, params, history, 3) == 3);
    CHECK(sampler.sample(logits, greedy(), history, 3) == 0); // nothing of it is remembered
}

TEST_CASE("log-probabilities are those of the whole softmax, best first") {
    Sampler sampler(5);
    auto    lp =
        sampler.logprobs(std::vector<float>{0, std::log(2.0f), std::log(3.0f), std::log(2.0f), std::log(2.0f)}, 1, 3);
    CHECK(lp.chosen.logprob == Catch::Approx(std::log(0.2f)));
    REQUIRE(lp.top.size() == 3);
    CHECK(lp.top[0].token == 2);
    CHECK(lp.top[0].logprob == Catch::Approx(std::log(0.3f)));
    CHECK(lp.top[1].token == 1);
    CHECK(lp.top[2].token == 3);
    CHECK(sampler.logprobs(std::vector<float>{0, 0, 0, 0, 0}, -1, 50).top.size() == 5);
}

TEST_CASE("the probabilities after the samplers are those of the draw, of the tokens that they left") {
    const std::vector<float> logits{0, std::log(2.0f), std::log(3.0f), std::log(2.0f), std::log(2.0f)};
    Sampler                  sampler(5);
    SamplingParams           params;
    const auto               draw = [&](std::uint64_t seed = 0) {
        params.seed = seed;
        return sampler.sample(logits, params, std::vector<Token>{0}, 0);
    };
    const auto probs = [&](int n_top) {
        std::vector<std::pair<Token, double>> out;
        for (const TokenLogprob& t : sampler.drawn_logprobs(draw(), n_top).top)
            out.emplace_back(t.token, std::exp(double(t.logprob)));
        return out;
    };
    const auto equal = [](const std::vector<std::pair<Token, double>>& got,
                          std::vector<std::pair<Token, double>>        want) {
        return std::ranges::equal(got, want, [](const auto& a, const auto& b) {
            return a.first == b.first && a.second == Catch::Approx(b.second);
        });
    };
    CHECK(equal(probs(9), {{2, 0.3}, {1, 0.2}, {3, 0.2}, {4, 0.2}, {0, 0.1}})); // no sampler is at work
    params.top_k = 3;
    CHECK(equal(probs(9), {{2, 3 / 7.0}, {1, 2 / 7.0}, {3, 2 / 7.0}}));
    CHECK(equal(probs(2), {{2, 3 / 7.0}, {1, 2 / 7.0}}));
    CHECK(probs(0).empty());
    for (std::uint64_t seed = 0; seed < 20; seed++) {
        const Token token = draw(seed);
        CHECK(sampler.drawn_logprobs(token, 0).chosen.token == token);
        CHECK(sampler.drawn_logprobs(token, 0).chosen.logprob ==
              Catch::Approx(std::log(token == 2 ? 3 / 7.0 : 2 / 7.0)));
    }
    params.temperature = 0.5f; // squares
    CHECK(equal(probs(9), {{2, 9 / 17.0}, {1, 4 / 17.0}, {3, 4 / 17.0}}));
    params.logit_bias = {{0, std::log(5.0f)}, {2, -100.0f}};
    CHECK(equal(probs(9), {{0, 25 / 33.0}, {1, 4 / 33.0}, {3, 4 / 33.0}}));
    params            = {};
    params.mirostat   = 2;
    const double mu   = 3;
    const Sample next = sampler.sample(logits, params, std::vector<Token>{0}, 0, {.mu = mu});
    const double own  = double(sampler.drawn_logprobs(next.token, 0).chosen.logprob);
    CHECK(next.mu == Catch::Approx(next_mu(params, mu, -own / std::log(2.0))));
    params                = {};
    params.dynatemp_range = params.temperature = 0.5f;
    params.top_k                               = 1;
    CHECK(equal(probs(9), {{2, 1}}));
    for (float penalty : {1.0f, 2.0f}) {
        params                    = greedy();
        params.repetition_penalty = penalty;
        CHECK(equal(probs(9), {{2, 1}}));
    }
}

TEST_CASE("allowed tokens are those that a bias leaves, with all else that is asked for") {
    constexpr int vocab = 50;
    Sampler       sampler(vocab);
    std::mt19937  random(5);
    for (int round = 0; round < 200; round++) {
        std::vector<float> logits(vocab);
        for (float& x : logits) x = float(random() % 1000) / 100 - 5;
        std::vector<Token> history;
        for (int i = 0; i < 20; i++) history.push_back(Token(random() % vocab));
        SamplingParams p;
        p.temperature         = round % 5 == 0 ? 0.0f : 1.5f;
        p.top_k               = round % 3 == 0 ? 4 : 0;
        p.repetition_penalty  = 1.2f;
        p.presence_penalty    = 0.3f;
        p.seed                = random();
        SamplingParams biased = p;
        for (int i = 0; i < 6; i++) p.allowed_tokens.push_back(Token(random() % vocab));
        p.logit_bias = biased.logit_bias = {{p.allowed_tokens[0], -2.0f}, {7, 1.0f}};
        for (Token t = 0; t < vocab; t++)
            if (std::ranges::find(p.allowed_tokens, t) == p.allowed_tokens.end())
                biased.logit_bias.emplace_back(t, -std::numeric_limits<float>::infinity());
        const std::vector<Token> never{p.allowed_tokens[1], 9};
        CHECK(sampler.sample(logits, p, history, 10, 0, never) ==
              sampler.sample(logits, biased, history, 10, 0, never));
        std::vector<LogitEdit> edits(1);
        sampler.list_edits(p, history, 10, never, edits);
        for (const LogitEdit& e : std::span(edits).subspan(1))
            CHECK(std::ranges::find(p.allowed_tokens, e.token) != p.allowed_tokens.end());
    }
}
