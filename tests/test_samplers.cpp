// The samplers beyond temperature, top-k, top-p and min-p, by examples that were worked out by hand from docs/sampling.md.
#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>

import quire.core.base;
import quire.core.std;
import quire.decode.candidates;
import quire.decode.repetitions;
import quire.decode.sampler;
import quire.schedule.request;
import quire.schedule.sequence_breakers;
import quire.step.plan;

using namespace quire;

namespace {

// The logits of a distribution.
std::vector<float> logits_of(std::vector<double> probabilities) {
    std::vector<float> logits;
    for (double p : probabilities) logits.push_back(float(std::log(p)));
    return logits;
}

// Share of the random numbers that leads to each token, from a fine grid of them.
std::vector<double> shares(std::span<const float> logits, const SamplingParams& params, double xtc_uniform = 0,
                           double mu = 0) {
    constexpr int       n = 4000;
    Candidates          candidates(int(logits.size()));
    std::vector<double> share(logits.size());
    for (int i = 0; i < n; i++) {
        const Drawn drawn = candidates.draw(logits, params, (i + 0.5) / n, xtc_uniform, mu);
        share[std::size_t(drawn.token)] += 1.0 / n;
    }
    return share;
}

void check_shares(const std::vector<double>& got, const std::vector<double>& want) {
    REQUIRE(got.size() == want.size());
    for (std::size_t i = 0; i < got.size(); i++) {
        CAPTURE(i);
        CHECK(got[i] == Catch::Approx(want[i]).margin(0.001));
    }
}

std::vector<std::pair<Token, int>> repetitions(std::vector<Token> tokens, int least = 1, int most = 1000) {
    Repetitions                        finder;
    std::vector<std::pair<Token, int>> found;
    for (auto [token, length] : finder.find(tokens, least, most)) found.emplace_back(token, length);
    std::ranges::sort(found);
    return found;
}

// The penalty of each token that DRY penalises.
std::map<Token, float> dry_penalties(const std::vector<Token>& history, const DryParams& dry, int vocab = 16) {
    Sampler        sampler(vocab);
    SamplingParams params;
    params.dry = dry;
    std::vector<LogitEdit> edits;
    sampler.list_edits(params, history, 0, {}, edits);
    std::map<Token, float> out;
    for (const LogitEdit& e : edits) out[e.token] = e.subtract;
    return out;
}

} // namespace

TEST_CASE("top-n-sigma keeps what is within so many deviations of the best logit") {
    const std::vector<float> logits{0, 2, 4, 6}; // mean 3, deviation √5 = 2.236
    SamplingParams           params;
    params.top_n_sigma = 1; // from 6 - 2.236 on
    const double e2    = std::exp(-2.0);
    check_shares(shares(logits, params), {0, 0, e2 / (1 + e2), 1 / (1 + e2)});
    params.top_n_sigma = 0.5f;
    check_shares(shares(logits, params), {0, 0, 0, 1});
    params.top_n_sigma = 3; // from -0.7 on
    CHECK(shares(logits, params)[0] > 0);
    const float never  = -std::numeric_limits<float>::infinity(); // is not counted
    params.top_n_sigma = 1;
    check_shares(shares(std::vector<float>{never, 0, 2, 4, 6}, params), {0, 0, 0, e2 / (1 + e2), 1 / (1 + e2)});
}

TEST_CASE("typical sampling keeps the tokens closest to the mean surprise, and can leave out the best") {
    // Entropy 1.2206 nats; surprises 0.511, 1.609, 2.303, 2.303: their distances 0.710, 0.389, 1.082, 1.082.
    const std::vector<float> logits = logits_of({0.6, 0.2, 0.1, 0.1});
    SamplingParams           params;
    params.typical_p = 0.15f;
    check_shares(shares(logits, params), {0, 1, 0, 0});
    params.typical_p = 0.5f;
    check_shares(shares(logits, params), {0.75, 0.25, 0, 0});
    params.typical_p = 0.85f; // of equal distances all stay
    check_shares(shares(logits, params), {0.6, 0.2, 0.1, 0.1});
    params.typical_p = 0.5f;
    params.top_p     = 0.7f; // of the tokens that are left: 0.6 of 0.8 is enough
    check_shares(shares(logits, params), {1, 0, 0, 0});
}

TEST_CASE("XTC leaves out the likeliest tokens but the last one above the threshold") {
    const std::vector<float> logits = logits_of({0.4, 0.3, 0.2, 0.1});
    SamplingParams           params;
    params.xtc_probability = 0.5f;
    params.xtc_threshold   = 0.15f;
    check_shares(shares(logits, params, 0.49), {0, 0, 2.0 / 3, 1.0 / 3});
    check_shares(shares(logits, params, 0.5), {0.4, 0.3, 0.2, 0.1});
    params.xtc_threshold = 0.35f; // one token alone stays
    check_shares(shares(logits, params, 0), {0.4, 0.3, 0.2, 0.1});
    params.xtc_threshold = 0.51f;
    check_shares(shares(logits, params, 0), {0.4, 0.3, 0.2, 0.1});
    params.xtc_threshold = 0.45f; // of what min-p has left: 0.4, 0.3 of 0.7
    params.min_p         = 0.6f;
    check_shares(shares(logits, params, 0), {4.0 / 7, 3.0 / 7, 0, 0});
    params.xtc_threshold = 0.4f;
    check_shares(shares(logits, params, 0), {0, 1, 0, 0});
}

TEST_CASE("the temperature comes last, and follows the entropy within its range") {
    const std::vector<float> logits = logits_of({0.5, 0.25, 0.25});
    SamplingParams           params;
    params.top_p       = 0.6f; // 0.5 + 0.25 of the model's own probabilities, whatever the temperature
    params.temperature = 0.5f;
    check_shares(shares(logits, params), {0.8, 0.2, 0});
    params                   = {};
    params.dynatemp_range    = 0.5f;
    params.dynatemp_exponent = 2;
    // Entropy 1.0397 of at most ln 3 = 1.0986: 0.9464² = 0.8957; the temperature is 0.5 + 1.0 · 0.8957.
    const double t = 0.5 + 0.89566, half = std::pow(0.5, 1 / t);
    check_shares(shares(logits, params), {1 / (1 + 2 * half), half / (1 + 2 * half), half / (1 + 2 * half)});
    params.top_k = 1; // one token has no entropy
    check_shares(shares(logits, params), {1, 0, 0});
    params                = {};
    params.dynatemp_range = 5; // all equally likely: the upper end
    check_shares(shares(logits_of({0.25, 0.25, 0.25, 0.25}), params), {0.25, 0.25, 0.25, 0.25});
}

TEST_CASE("mirostat 2 keeps what is below its limit, and moves the limit by the surprise") {
    const std::vector<float> logits = logits_of({0.5, 0.25, 0.125, 0.125}); // surprises of 1, 2, 3, 3 bits
    SamplingParams           params;
    params.mirostat = 2;
    check_shares(shares(logits, params, 0, 2.5), {2.0 / 3, 1.0 / 3, 0, 0});
    check_shares(shares(logits, params, 0, 0.5), {1, 0, 0, 0}); // at least one
    check_shares(shares(logits, params, 0, 3.5), {0.5, 0.25, 0.125, 0.125});
    params.top_k = 1; // is not used
    check_shares(shares(logits, params, 0, 3.5), {0.5, 0.25, 0.125, 0.125});
    Candidates candidates(4);
    CHECK(candidates.draw(logits, params, 0.9, 0, 2.5).surprise == Catch::Approx(std::log2(3.0)).epsilon(1e-4));
    params.mirostat_tau = 3;
    params.mirostat_eta = 0.5f;
    CHECK(params.first_mu() == 6);
    CHECK(next_mu(params, 6, 1) == 7);
    // The sampler hands on what it was given.
    Sampler                  sampler(4);
    const std::vector<Token> history{1};
    const Sample             one = sampler.sample(logits, params, history, 0, {.position = 1, .mu = 0.5});
    CHECK(one.token == 0);
    CHECK(one.mu == Catch::Approx(0.5 + 0.5 * 3));
}

TEST_CASE("mirostat 1 estimates how many tokens to keep from Zipf's law") {
    // p proportional to 1 / rank²: the exponent is 2, and k = √(2^mu / (1 - 1/N)).
    std::vector<double> p;
    for (int i = 1; i <= 400; i++) p.push_back(1.0 / (i * i));
    SamplingParams params;
    params.mirostat                 = 1;
    const std::vector<double> share = shares(logits_of(p), params, 0, 5); // √(32 / 0.9975) = 5.66
    CHECK(share[4] > 0);
    CHECK(std::accumulate(share.begin() + 5, share.end(), 0.0) == 0);
    CHECK(zipf_rank(2, 5, 400) == Catch::Approx(std::sqrt(32 / 0.9975)));
    CHECK(zipf_rank(1, 5, 400) == Catch::Approx(32 / std::log(400.0))); // the limit
    // All equally likely, each a surprise of log2(400) = 8.6 bits: no token is within the limit, or all are.
    CHECK(zipf_rank(0, 8, 400) == 0);
    CHECK(zipf_rank(0, 9, 400) == std::numeric_limits<double>::infinity());
}

TEST_CASE("repetitions are found with their lengths") {
    using Found = std::vector<std::pair<Token, int>>;
    // a b c c b c y a b c: behind "c" came c and b, behind "bc" y, behind "abc" c.
    CHECK(repetitions({0, 1, 2, 2, 1, 2, 9, 0, 1, 2}) == Found{{1, 1}, {2, 3}, {9, 2}});
    CHECK(repetitions({0, 1, 2, 2, 1, 2, 9, 0, 1, 2}, 2) == Found{{2, 3}, {9, 2}});
    CHECK(repetitions({0, 1, 2, 2, 1, 2, 9, 0, 1, 2}, 1, 2) == Found{{1, 1}, {2, 2}, {9, 2}});
    CHECK(repetitions({5, 5, 5, 5}) == Found{{5, 1}, {5, 2}, {5, 3}});
    CHECK(repetitions({}).empty());
    CHECK(repetitions({1, 2, 3}).empty());
    // As defined, by trying each place.
    std::mt19937 random(3);
    for (int round = 0; round < 200; round++) {
        std::vector<Token> tokens;
        for (int i = int(random() % 40); i >= 0; i--) tokens.push_back(Token(random() % 3));
        Found     want;
        const int n = int(tokens.size());
        for (int k = 1; k < n; k++) {
            int length = 0;
            while (k + length < n && tokens[std::size_t(n - 1 - length)] == tokens[std::size_t(n - 1 - k - length)])
                length++;
            if (length > 0) want.emplace_back(tokens[std::size_t(n - k)], length);
        }
        std::ranges::sort(want);
        CHECK(repetitions(tokens) == want);
    }
}

TEST_CASE("DRY takes more from a token the longer the repetition that it continues") {
    const std::vector<Token> history{0, 1, 2, 2, 1, 2, 9, 0, 1, 2};
    DryParams                dry;
    dry.last_n = -1;
    CHECK(dry_penalties(history, dry).empty());
    dry.multiplier = 0.5f;
    dry.base       = 3;
    CHECK(dry_penalties(history, dry) ==
          std::map<Token, float>{{2, 1.5f}, {9, 0.5f}}); // lengths 3 and 2, 2 are allowed
    dry.allowed_length = 1;
    CHECK(dry_penalties(history, dry).size() == 3);
    dry.last_n = 4; // 9 0 1 2: nothing twice
    CHECK(dry_penalties(history, dry).empty());
    dry.last_n = 0;
    CHECK(dry_penalties(history, dry).empty());
    // A breaker cuts the length, and is not penalised itself.
    dry.last_n                      = -1;
    const std::vector<Token> zero[] = {{0}};
    dry.breakers                    = std::make_shared<const SequenceBreakers>(zero); // two tokens since
    dry.allowed_length              = 2;
    CHECK(dry_penalties(history, dry) == std::map<Token, float>{{2, 0.5f}, {9, 0.5f}});
    const std::vector<Token> two[] = {{1, 2}, {9}}; // none since
    dry.breakers                   = std::make_shared<const SequenceBreakers>(two);
    CHECK(dry_penalties(history, dry).empty());
    const std::vector<Token> nine[] = {{9}};
    dry.breakers                    = std::make_shared<const SequenceBreakers>(nine);
    CHECK(dry_penalties(history, dry) == std::map<Token, float>{{2, 1.5f}});
    // Powers have an end.
    dry            = {};
    dry.multiplier = 1, dry.base = 100, dry.last_n = -1;
    CHECK(std::isfinite(dry_penalties(std::vector<Token>(500, 3), dry).at(3)));
    // DRY is one of the logits processors: greedy sampling has it too.
    Sampler        sampler(16);
    SamplingParams greedy;
    greedy.temperature = 0;
    greedy.dry         = {.multiplier = 1, .base = 2, .allowed_length = 2, .last_n = -1, .breakers = nullptr};
    std::vector<float> logits(16);
    logits[2] = 3, logits[4] = 2;
    CHECK(sampler.sample(logits, greedy, history, 0) == 4); // 3 - 2
}

TEST_CASE("sequence breakers are looked for from the end") {
    const std::vector<Token> three[] = {{1, 2}, {1}, {7, 8, 9}};
    const SequenceBreakers   breakers(three);
    CHECK(breakers.since(std::vector<Token>{0, 5, 6}) == 3);
    CHECK(breakers.since(std::vector<Token>{0, 1, 2, 4}) == 1); // the longer one
    CHECK(breakers.since(std::vector<Token>{0, 1, 3, 4}) == 2);
    CHECK(breakers.since(std::vector<Token>{7, 8, 9}) == 0);
    CHECK(breakers.since(std::vector<Token>{7, 8}) == 2);
    CHECK(breakers.breaks(1));
    CHECK(!breakers.breaks(7));
    CHECK(!breakers.breaks(2));
    CHECK(SequenceBreakers().since(std::vector<Token>{1, 2}) == 2);
}
