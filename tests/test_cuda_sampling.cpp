// The GPU's sampling against its parameters and random numbers, step by step. Without a GPU this test prints that and passes.
#include <catch2/catch_test_macros.hpp>

#include "../cuda/kernels.h"

import quire.core.base;
import quire.core.std;
import quire.core.tensor;
import quire.decode.candidates;
import quire.decode.sampler;
import quire.schedule.sampling_params;
import quire.step.logprobs;
import quire.step.plan;

#include "cuda_tools.h"

using namespace quire;
using namespace quire::testing;

namespace {

// The share of the random numbers that leads to a token, in double precision, step by step as the parameters are explained:
// nothing for a token that is left out.
std::pair<double, double> share_of(Token token, std::span<const float> row, std::span<const cuda::LogitEdit> edits,
                                   const cuda::SampleTask& t) {
    std::vector<double> x(row.begin(), row.end());
    if (t.only_edited) std::ranges::fill(x, -std::numeric_limits<double>::infinity());
    for (const cuda::LogitEdit& e : edits) {
        const double logit = double(row[std::size_t(e.token)]);
        x[std::size_t(e.token)] =
            (logit > 0 ? logit / double(e.divide) : logit * double(e.divide)) - double(e.subtract) + double(e.add);
    }
    std::vector<int> order(x.size());
    std::iota(order.begin(), order.end(), 0);
    for (double& logit : x)
        if (std::isnan(logit)) logit = -std::numeric_limits<double>::infinity();
    const bool top_k     = t.mirostat == 0 && t.top_k > 0 && t.top_k < int(x.size());
    const bool truncates = top_k || t.top_p < 1 || t.min_p > 0 || t.mirostat > 0 || t.top_n_sigma > 0 ||
                           t.typical_p < 1 || t.xtc_threshold <= 0.5f;
    const auto better = [&](int a, int b) { return float(x[std::size_t(a)]) > float(x[std::size_t(b)]); };
    if (truncates) std::stable_sort(order.begin(), order.end(), better);
    const auto finite = [&](int i) { return std::isfinite(x[std::size_t(i)]); };
    std::erase_if(order, [&](int i) { return !finite(i); });
    double     temperature = t.mirostat > 0 ? double(t.temperature) : 1;
    double     limit       = *std::ranges::max_element(x);
    const auto mass        = [&](int i) { return std::exp((x[std::size_t(i)] - limit) / temperature); };
    const auto sum         = [&](auto measure) {
        double all = 0;
        for (int i : order) all += measure(i);
        return all;
    };
    const auto depth = [&](int i) { return limit - x[std::size_t(i)]; };
    if (t.mirostat == 2) {
        const double total = sum(mass);
        while (order.size() > 1 && std::log2(total / mass(order.back())) > double(t.mu)) order.pop_back();
    } else if (t.mirostat == 1) {
        double products = 0, squares = 0;
        for (std::size_t i = 0; i + 1 < std::min(order.size(), std::size_t(100)); i++) {
            const double log = std::log(double(i + 2) / double(i + 1));
            products += log * (depth(order[i + 1]) - depth(order[i])) / temperature;
            squares += log * log;
        }
        const double k = zipf_rank(squares > 0 ? products / squares : 0, double(t.mu), double(x.size()));
        order.resize(std::size_t(std::clamp(k, 1.0, double(order.size()))));
    } else {
        if (t.top_n_sigma > 0) {
            const double n = double(order.size()), mean = sum([&](int i) { return x[std::size_t(i)]; }) / n;
            const double squares = sum([&](int i) { return (x[std::size_t(i)] - mean) * (x[std::size_t(i)] - mean); });
            while (order.size() > 1 && depth(order.back()) > double(t.top_n_sigma) * std::sqrt(squares / n))
                order.pop_back();
        }
        if (top_k) order.resize(std::min(order.size(), std::size_t(t.top_k)));
        if (t.typical_p < 1) {
            const double     total = sum(mass), mean = sum([&](int i) { return mass(i) * depth(i); }) / total;
            const auto       distance = [&](int i) { return double(std::abs(float(depth(i)) - float(mean))); };
            std::vector<int> closest  = order;
            std::stable_sort(closest.begin(), closest.end(), [&](int a, int b) { return distance(a) < distance(b); });
            double      so_far = 0;
            std::size_t n      = 0;
            while (n < closest.size() && (n == 0 || so_far < double(t.typical_p) * total)) so_far += mass(closest[n++]);
            const double most = distance(closest[n - 1]);
            std::erase_if(order, [&](int i) { return distance(i) > most; });
            limit = x[std::size_t(order[0])];
        }
        if (t.top_p < 1) {
            const double total  = sum(mass);
            double       so_far = 0;
            std::size_t  n      = 0;
            while (n < order.size() && (n == 0 || so_far < double(t.top_p) * total)) so_far += mass(order[n++]);
            order.resize(n);
        }
        while (t.min_p > 0 && order.size() > 1 && mass(order.back()) < double(t.min_p)) order.pop_back();
        if (t.xtc_threshold <= 0.5f) {
            const double total = sum(mass);
            std::size_t  n     = 0;
            while (n < order.size() && mass(order[n]) >= double(t.xtc_threshold) * total) n++;
            if (n > 1) order.erase(order.begin(), order.begin() + std::ptrdiff_t(n - 1));
            limit = x[std::size_t(order[0])];
        }
        double shaped = double(t.temperature);
        if (t.dynatemp_range > 0 && order.size() > 1) {
            double lowest = limit;
            for (int i : order) lowest = std::max(lowest, x[std::size_t(i)]);
            limit                = lowest;
            const double total   = sum(mass),
                         entropy = std::log(total) + sum([&](int i) { return mass(i) * depth(i); }) / total;
            const double low     = std::max(0.0, shaped - double(t.dynatemp_range)),
                         high    = shaped + double(t.dynatemp_range);
            shaped = low + (high - low) * std::pow(std::clamp(entropy / std::log(double(order.size())), 0.0, 1.0),
                                                   double(t.dynatemp_exponent));
        }
        temperature = shaped;
    }
    for (int i : order) limit = std::max(limit, x[std::size_t(i)]);
    double total = sum(mass), so_far = 0;
    for (int i : order) {
        if (i == token) return {so_far / total, (so_far + mass(i)) / total};
        so_far += mass(i);
    }
    return {2, 2};
}

} // namespace

TEST_CASE("GPU: sampling draws what its parameters and random numbers say", "[cuda]") {
    if (no_gpu()) return;
    const Gpu    gpu;
    std::mt19937 random(7);
    auto         below = [&](int n) { return int(random() % unsigned(n)); };
    for (int vocab : {1, 5, 257, 4097, 32000, 152064})
        for (int round = 0; round < (vocab > 4097 ? 12 : 40); round++) {
            const int                       n_rows = 1 + below(4);
            std::normal_distribution<float> normal(0, std::array{0.1f, 1.0f, 4.0f, 12.0f}[std::size_t(below(4))]);
            std::vector<float>              logits(std::size_t(n_rows) * std::size_t(vocab));
            for (float& x : logits) x = round % 5 == 4 ? std::round(normal(random)) : normal(random); // ties
            constexpr float infinity = std::numeric_limits<float>::infinity();
            if (round % 7 == 3) { // a first row that nothing can be made of
                logits[std::size_t(vocab) / 2] = round % 3 == 0 ? std::numeric_limits<float>::quiet_NaN() : infinity;
                if (round % 3 == 2) std::fill_n(logits.begin(), vocab, -infinity);
                if (n_rows > 1 && vocab > 5) logits[std::size_t(vocab) + 3] = -infinity;
            }
            std::vector<cuda::SampleTask>   tasks;
            std::vector<cuda::LogitEdit>    edits;
            std::vector<double>             numbers;
            std::vector<std::uint32_t>      masks;
            std::vector<SamplingParams>     all;
            std::vector<std::vector<Token>> histories;
            Sampler                         sampler(vocab);
            int                             words = 0;
            for (int r = 0; r < n_rows; r++) {
                SamplingParams p;
                p.temperature = below(6) == 0 ? 0 : std::array{0.2f, 0.7f, 1.0f, 1.8f}[std::size_t(below(4))];
                p.top_k       = below(2) ? 0 : 1 + below(std::array{3, 50, 6000}[std::size_t(below(3))]);
                p.top_p       = below(2) ? 1 : std::array{0.01f, 0.5f, 0.95f, 0.9999f}[std::size_t(below(4))];
                p.min_p       = below(2) ? 0 : std::array{0.001f, 0.05f, 0.9f}[std::size_t(below(3))];
                if (round % 3 == 2) { // the other samplers
                    if (below(3) == 0) p.top_n_sigma = std::array{0.5f, 1.0f, 2.5f}[std::size_t(below(3))];
                    if (below(3) == 0) p.typical_p = std::array{0.05f, 0.5f, 0.95f}[std::size_t(below(3))];
                    if (below(3) == 0)
                        p.xtc_threshold = std::array{0.01f, 0.1f, 0.4f}[std::size_t(below(3))], p.xtc_probability = 1;
                    if (below(3) == 0)
                        p.dynatemp_range    = 0.5f,
                        p.dynatemp_exponent = std::array{0.5f, 1.0f, 2.0f}[std::size_t(below(3))];
                    if (below(4) == 0) p.mirostat = 1 + below(2);
                }
                if (below(2)) p.repetition_penalty = 1.3f;
                if (below(2)) p.presence_penalty = 0.5f, p.frequency_penalty = -0.25f;
                if (below(3) == 0)
                    p.logit_bias = {{below(vocab), 3.0f}, {below(vocab), -std::numeric_limits<float>::infinity()}};
                if (below(4) == 0) // some twice
                    for (int i = below(60); i >= 0; i--) p.allowed_tokens.push_back(below(vocab));
                p.seed = random();
                std::vector<Token> history;
                for (int i = below(40); i >= 0; i--) history.push_back(below(vocab));
                cuda::SampleTask t;
                t.row            = r;
                t.first_edit     = int(edits.size());
                t.first_draw     = int(numbers.size());
                t.n_draws        = 1 + below(3);
                t.n_top          = std::min({below(40), vocab, cuda::max_top});
                t.first_out      = words;
                t.wants_logprobs = 1;
                t.top_k = p.top_k, t.temperature = p.temperature, t.top_p = p.top_p, t.min_p = p.min_p;
                t.top_n_sigma = p.top_n_sigma, t.typical_p = p.typical_p, t.dynatemp_range = p.dynatemp_range;
                t.dynatemp_exponent = p.dynatemp_exponent;
                if (p.xtc_probability > 0) t.xtc_threshold = p.xtc_threshold;
                if (p.temperature > 0)
                    t.mirostat = p.mirostat, t.mu = std::array{0.5f, 3.0f, 9.0f}[std::size_t(below(3))];
                if (r > 0 && below(4) == 0) t.chosen = below(vocab), t.n_draws = 1;
                std::vector<LogitEdit> own;
                if (t.chosen < 0) sampler.list_edits(p, history, int(history.size()) / 2, {}, own);
                for (const LogitEdit& e : own) edits.push_back({e.token, e.divide, e.subtract, e.add});
                t.n_edits     = int(own.size());
                t.only_edited = t.chosen < 0 && !p.allowed_tokens.empty();
                for (int i = 0; i < t.n_draws; i++)
                    numbers.push_back(random_at(p.seed + std::uint64_t(i), history.size()));
                words += 2 * (t.n_draws * (t.mirostat > 0 ? 2 : 1) + t.n_top);
                if (round % 7 != 3 && vocab > 256 && t.chosen < 0 && below(3) == 0) { // some tokens are not allowed
                    t.first_mask = int(masks.size());
                    for (int i = 0; i < (vocab + 63) / 64 * 2; i++) masks.push_back(std::uint32_t(random() | 1));
                }
                tasks.push_back(t);
                all.push_back(p);
                histories.push_back(history);
            }
            edits.emplace_back(); // never an empty buffer
            masks.emplace_back();
            OnDevice<float> rows(gpu, logits);
            for (const cuda::SampleTask& t : tasks) // what is compared with below
                for (int i = 0; t.first_mask >= 0 && i < vocab; i++)
                    if ((masks[std::size_t(t.first_mask + i / 32)] >> (i % 32) & 1) == 0)
                        logits[std::size_t(t.row) * std::size_t(vocab) + std::size_t(i)] = -infinity;
            OnDevice<cuda::SampleTask> there(gpu, tasks);
            OnDevice<cuda::LogitEdit>  changes(gpu, edits);
            OnDevice<double>           random_numbers(gpu, numbers);
            OnDevice<std::uint32_t>    allowed(gpu, masks);
            OnDevice<std::int32_t>     out(gpu, std::vector<std::int32_t>(std::size_t(words), -7));
            cuda::sample(rows.data, vocab, there.data, n_rows, changes.data, random_numbers.data, allowed.data,
                         out.data, gpu);
            const std::vector<std::int32_t> got = out.back(gpu);
            for (int r = 0; r < n_rows; r++) {
                const cuda::SampleTask&      t = tasks[std::size_t(r)];
                const std::span<const float> row(logits.data() + std::ptrdiff_t(r) * vocab, std::size_t(vocab));
                CAPTURE(vocab, round, r, t.top_k, t.top_p, t.min_p, t.temperature, t.n_edits, t.chosen);
                const auto at = [&](int i) {
                    return TokenLogprob{got[std::size_t(t.first_out + 2 * i)],
                                        std::bit_cast<float>(got[std::size_t(t.first_out + 2 * i + 1)])};
                };
                if (round % 7 == 3 && r == 0) {
                    for (int i = 0; i < t.n_draws + t.n_top; i++) CHECK(at(i).token == -1);
                    continue;
                }
                const PositionLogprobs want = sampler.logprobs(row, t.chosen, t.n_top);
                for (int i = 0; i < t.n_top; i++) {
                    CHECK(at(t.n_draws + i).token == want.top[std::size_t(i)].token);
                    const float lp = want.top[std::size_t(i)].logprob, mine = at(t.n_draws + i).logprob;
                    CHECK((lp == mine || std::abs(lp - mine) < 1e-4f * (1 + std::abs(lp))));
                }
                for (int i = 0; i < t.n_draws; i++) {
                    const auto [token, logprob] = at(i);
                    const std::span<const cuda::LogitEdit> own(edits.data() + t.first_edit, std::size_t(t.n_edits));
                    if (token < 0) { // only where no token can come
                        CHECK(token == -1);
                        CHECK(t.chosen < 0);
                        for (Token other = 0; other < vocab; other++) {
                            const auto edit = std::ranges::find(own, other, &cuda::LogitEdit::token);
                            if (edit == own.end() && !t.only_edited) CHECK(row[std::size_t(other)] == -infinity);
                            if (edit != own.end())
                                CHECK((row[std::size_t(other)] == -infinity || edit->add == -infinity));
                        }
                        continue;
                    }
                    REQUIRE(token < vocab);
                    const double raw = sampler.logprob(row, token);
                    CHECK((raw == double(logprob) || std::abs(raw - double(logprob)) < 1e-4 * (1 + std::abs(raw))));
                    const bool possible = std::ranges::any_of(own, [&](const cuda::LogitEdit& e) {
                        return std::isfinite(row[std::size_t(e.token)]) && std::isfinite(e.add);
                    });
                    if (t.only_edited && possible)
                        CHECK(std::ranges::find(own, token, &cuda::LogitEdit::token) != own.end());
                    if (t.chosen >= 0) CHECK(token == t.chosen);
                    else if (t.temperature <= 0) {
                        CHECK(token == sampler.sample(row, all[std::size_t(r)], histories[std::size_t(r)],
                                                      int(histories[std::size_t(r)].size()) / 2));
                    } else if (std::ranges::any_of(row, [](float x) { return std::isfinite(x); }) && vocab > 1 &&
                               (possible || !t.only_edited)) {
                        const auto [lo, hi] = share_of(token, row, own, t);
                        const double number = numbers[std::size_t(t.first_draw + i)];
                        CAPTURE(token, lo, hi, number);
                        CHECK((number > lo - 2e-5 && number < hi + 2e-5));
                        if (t.mirostat > 0) { // its surprise among those that were left
                            CHECK(at(t.n_draws + t.n_top + i).token == token);
                            CHECK(std::abs(std::exp2(-double(at(t.n_draws + t.n_top + i).logprob)) - (hi - lo)) < 1e-4);
                        }
                    }
                }
            }
        }
}
