// Logits and greedy tokens of the reference models against what `transformers` computed from the same files.
#include <catch2/catch_test_macros.hpp>

#include <nlohmann/json.hpp>

#include "reference.h"

import quire.core.base;
import quire.model_file.config;
import quire.engine.engine;
import quire.schedule.request;
import quire.core.std;

#include "engine_tools.h"
#include "npy.h"

using namespace quire;
using namespace quire::testing;

namespace {

nlohmann::json read_json(const std::string& path) {
    std::ifstream file(path);
    REQUIRE(file);
    return nlohmann::json::parse(file);
}

// Leading tokens that two lists have in common.
std::size_t agreement(const std::vector<Token>& a, const std::vector<Token>& b) {
    std::size_t i = 0;
    while (i < a.size() && i < b.size() && a[i] == b[i]) i++;
    return i;
}

struct Case {
    std::string model, type, path;
    bool        lossless; // the expectations are those of the very numbers in the file, computed in float32
};

// Whether quire runs what the file is; if not, it says so.
bool is_supported(const std::string& path) {
    const Result<Engine> engine = Engine::load(path, {.device = "cpu", .context = 16});
    const auto           says   = [&](std::string_view text) { return engine.error().message.contains(text); };
    return engine.has_value() || (!says("not one that quire runs") && !says("not supported"));
}

// Every model file of the reference folder that quire runs.
std::vector<Case> all_cases() {
    std::vector<Case> cases;
    for (const auto& entry : std::filesystem::directory_iterator(reference("models"))) {
        const std::string stem = entry.path().stem().string(), path = entry.path().string();
        if (!is_supported(path)) continue;
        const auto        dash  = stem.rfind('-');
        const std::string model = stem.substr(0, dash), type = stem.substr(dash + 1);
        const auto        lossless = read_json(reference(cat("logits/", model, "/expected.json")))["lossless_types"];
        cases.push_back({model, type, path, std::ranges::any_of(lossless, [&](const auto& t) { return t == type; })});
    }
    std::ranges::sort(cases, {}, &Case::path);
    return cases;
}

// Blocks for all requests at once. The checks after each step walk the whole pool, and one for a model's full context would take them longer
// than the model takes to compute.
int blocks_of(const std::vector<Request>& requests, const EngineOptions& o) {
    int blocks = 0;
    for (const Request& r : requests) blocks += (int(r.prompt.size()) + r.max_tokens) / o.block_size + 1;
    return blocks;
}

// Models in which an fp16 cache turns the choice between experts whose scores are almost equal: there single positions miss by up to 4.6,
// and the logits by as much as those of bf16 arithmetic.
constexpr std::array turning{"gemma4-moe", "glm4moe-mtp", "hunyuan-moe"};

} // namespace

TEST_CASE("logits, log-probabilities and greedy tokens equal those of transformers") {
    const auto cases = all_cases();
    REQUIRE(cases.size() >= 4);
    std::pair<float, std::string> farthest; // of all log-probabilities, and whose
    for (const Case& c : cases)
        for (DType kv : {DType::F32, DType::F16}) {
            CAPTURE(c.model, c.type, int(kv));
            const std::string folder   = cat("logits/", c.model, "/");
            const auto        expected = read_json(reference(cat(folder, "expected.json")));
            const auto typed = c.lossless ? expected : read_json(reference(cat(folder, "expected.", c.type, ".json")));
            const auto last  = read_npy(reference(cat(folder, "last_logits", c.lossless ? "" : "." + c.type, ".npy")));

            std::vector<Request> requests;
            for (const auto& p : expected["prompts"]) {
                requests.push_back(greedy(p["tokens"].get<std::vector<Token>>(), 48));
                requests.back().prompt_logprobs = 1;
            }
            EngineOptions o;
            o.kv_type          = kv;
            o.kv_blocks        = blocks_of(requests, o);
            o.max_batch_tokens = 200; // so that the longest prompt is cut
            o.pipeline         = kv == DType::F16;
            Engine     engine  = load(c.path, o);
            const auto answers = run(engine, requests); // all nine in one batch: prompts beside decoding

            const std::size_t vocab = answers[0].prompt_logits.size();
            REQUIRE(last.size() == vocab * answers.size());
            for (std::size_t i = 0; i < answers.size(); i++) {
                const auto& p = typed["prompts"][i];
                CAPTURE(i, p["id"].get<std::string>());
                // the logits after the prompt
                double worst = 0, largest = 0, squares = 0;
                for (std::size_t t = 0; t < vocab; t++) {
                    const double want = double(last[i * vocab + t]), d = double(answers[i].prompt_logits[t]) - want;
                    worst   = std::max(worst, std::abs(d));
                    largest = std::max(largest, std::abs(want));
                    squares += d * d;
                }
                const bool turns = kv == DType::F16 && std::ranges::find(turning, c.model) != turning.end();
                if (kv == DType::F32) CHECK(worst <= 1e-3 * largest);
                else CHECK(std::sqrt(squares / double(vocab)) <= (turns ? 0.23 : 0.03));
                // every prompt token's log-probability; of a very long prompt those of its end
                const auto        logprobs = p["logprobs"].get<std::vector<float>>();
                const std::size_t from     = p.value("from", 0);
                REQUIRE(from + logprobs.size() == answers[i].prompt_logprobs.size());
                // Quantised weights take int16-quantised activations, which can turn the choice between two experts whose
                // scores are almost equal, and whose rounding shows where a state nearly cancels and a norm enlarges the
                // rest: then a position or two is off by more.
                const ModelConfig& config   = engine.config();
                const bool         may_turn = !c.lossless && (config.experts.n > 0 || config.recurrent.taps > 0);
                int                turned   = 0;
                for (std::size_t j = 0; j < logprobs.size(); j++) {
                    const float miss  = std::abs(answers[i].prompt_logprobs[from + j].chosen.logprob - logprobs[j]);
                    const float limit = kv == DType::F32 ? 5e-3f : 0.3f;
                    if (may_turn && miss >= limit && std::size_t(++turned) * 50 <= logprobs.size()) continue;
                    if (turns && miss >= limit && miss < 4.6f && std::size_t(++turned) * 8 <= logprobs.size()) continue;
                    CHECK(miss < limit);
                    if (kv == DType::F32) farthest = std::max(farthest, {miss, cat(c.model, "-", c.type)});
                }
                // the 48 tokens after it
                const auto greedy_ids = p["greedy"].get<std::vector<Token>>();
                const auto robust =
                    kv == DType::F32 && c.lossless ? greedy_ids.size() : p["n_robust"].get<std::size_t>();
                CHECK(agreement(answers[i].tokens, greedy_ids) >= std::min(robust, greedy_ids.size()));
            }
        }
    SUCCEED("log-probabilities miss by at most " << farthest.first << " of 0.005, " << farthest.second); // with -s
}

// To first order the logits miss by as much as K and V do, whatever the type. The error of a row over its norm, as a root of a mean square:
// rounding to 11 bits (F16) gives 0.72 · 2^-11 / √3, the mean over a binade; to 8 bits (BF16) 8 times, to 4 bits (e4m3) 128 times as much.
// The steps of I8 are 1/127 of the row's largest number, which is at most the row's norm: √D / (127 √12). So what F16 misses says what the
// others may miss; the factor 2 is for the direction of the error, in which two roundings differ. Models with experts are left out: where a
// choice between two of them turns, the logits jump.
TEST_CASE("with each type of K and V the logits miss those of F32 by what the type rounds") {
    std::pair<double, std::string> farthest; // of what is expected, and whose
    for (const Case& c : all_cases()) {
        if (!c.lossless || std::ranges::find(turning, c.model) != turning.end()) continue;
        const auto           expected = read_json(reference(cat("logits/", c.model, "/expected.json")));
        std::vector<Request> requests;
        for (const auto& p : expected["prompts"]) requests.push_back(greedy(p["tokens"].get<std::vector<Token>>(), 1));
        int        head_dim = 0;
        bool       experts  = false;
        const auto logits   = [&](DType type) {
            EngineOptions o;
            o.kv_type     = type;
            o.kv_blocks   = blocks_of(requests, o);
            Engine engine = load(c.path, o);
            head_dim      = engine.config().head_dim;
            experts       = engine.config().experts.n > 0;
            std::vector<float> all;
            for (const auto& answer : run(engine, requests))
                all.insert(all.end(), answer.prompt_logits.begin(), answer.prompt_logits.end());
            return all;
        };
        const std::vector<float> exact = logits(DType::F32);
        if (experts) continue;
        const auto miss = [&](DType type) {
            const std::vector<float> got     = logits(type);
            double                   squares = 0;
            REQUIRE(got.size() == exact.size());
            for (std::size_t i = 0; i < got.size(); i++)
                squares += (double(got[i]) - double(exact[i])) * (double(got[i]) - double(exact[i]));
            return std::sqrt(squares / double(got.size()));
        };
        const double f16 = miss(DType::F16), of_f16 = 0.72 * 0x1p-11 / std::sqrt(3.0),
                     of_i8 = std::sqrt(double(head_dim)) / (127 * std::sqrt(12.0));
        for (const auto& [type, times] :
             {std::pair(DType::BF16, 8.0), std::pair(DType::I8, of_i8 / of_f16), std::pair(DType::F8, 128.0)}) {
            CAPTURE(c.model, c.type, name_of(type), f16, times);
            const double got = miss(type);
            CHECK(got <= 2 * times * f16);
            if (f16 > 0) farthest = std::max(farthest, {got / (times * f16), cat(c.model, " ", name_of(type))});
        }
    }
    SUCCEED("logits miss by at most " << farthest.first << " times what is expected, " << farthest.second); // with -s
}
