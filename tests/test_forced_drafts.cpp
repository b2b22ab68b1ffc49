// Forced tokens as draft tokens: where a constraint or a budget of reasoning leaves no choice, they run before they are sampled, and every
// token, log-probability and finish reason stays.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

import quire.constraint.compile;
import quire.constraint.reasoning_budget;
import quire.core.base;
import quire.core.json;
import quire.core.std;
import quire.decode.candidates;
import quire.decode.sampler;
import quire.engine.engine;
import quire.engine.executor;
import quire.engine.local_executor;
import quire.model_file.weights;
import quire.schedule.request;

#include "engine_tools.h"
#include "sampling_executor.h"
#include "schedule_tools.h"

using namespace quire;
using namespace quire::testing;

namespace {

std::string model(const char* name) { return std::string(QUIRE_ROOT "/tests/data/models/") + name; }

// Objects with long names, which have to come, and values with few choices.
Json random_schema(std::mt19937& random, int depth) {
    const auto below = [&](int n) { return int(random() % unsigned(n)); };
    const auto word  = [&] {
        std::string text;
        for (int n = 4 + below(12); n > 0; n--) text += char('a' + below(26));
        return text;
    };
    if (depth > 0 && below(3) > 0) {
        Json properties = Json::object(), required = Json::array();
        for (int n = 1 + below(3); n > 0; n--) {
            const std::string name = word();
            properties[name]       = random_schema(random, depth - 1);
            required.push_back(name);
        }
        return {
            {"type", "object"}, {"properties", properties}, {"required", required}, {"additionalProperties", false}};
    }
    switch (below(3)) {
        case 0: return {{"enum", Json::array({word(), word()})}};
        case 1: return {{"const", word()}};
        default: return {{"type", "boolean"}};
    }
}

std::shared_ptr<Constraint> constraint_of(std::uint32_t seed) {
    std::mt19937   random(seed);
    ConstraintSpec spec{.kind = ConstraintSpec::Kind::json_schema};
    spec.schema = {{"type", "array"}, {"items", random_schema(random, 3)}, {"minItems", 2}, {"maxItems", 3}};
    return *compile_constraint(spec);
}

// Each with a rule or a wish that keeps its forced tokens from being appended unsampled.
std::vector<Task> constrained_requests(const Engine& engine, const std::vector<std::shared_ptr<Constraint>>& of) {
    std::vector<Task> tasks;
    for (int i = 0; i < int(of.size()); i++) {
        Request r              = i % 2 == 0 ? greedy(prompt_of(9 + i, i), 60) : sampled(prompt_of(9 + i, i), 60, 7);
        r.constraint           = ConstraintState(of[std::size_t(i)], engine.token_trie());
        r.ignore_end           = false;
        r.return_logits        = false;
        r.sampling.temperature = i % 2 == 0 ? 0 : 0.9f;
        switch (i % 4) {
            case 0: break; // log-probabilities
            case 1: r.sampling.logit_bias = {{70, 3.f}}, r.sampling.repetition_penalty = 1.2f; break;
            case 2: r.n = 2, r.sampling.bad_words = {{71, 72}}; break;
            default: r.best_of = 2, r.sampling.logprobs = -1; break;
        }
        tasks.push_back({.request = std::move(r), .submit_at = i / 2});
    }
    return tasks;
}

EngineOptions roomy_options() {
    EngineOptions o;
    o.threads       = 1;
    o.block_size    = 4;
    o.kv_blocks     = 400;
    o.context       = 96;
    o.drafts.forced = false;
    return o;
}

// Ends the reasoning itself just before token number `at` is appended, as a request does that comes while a step runs.
class EndedReasoning final : public TokenForcer {
public:
    EndedReasoning(std::shared_ptr<const ReasoningMarks> marks, int budget, int at)
        : at_(at), stop_(std::make_shared<std::atomic<bool>>(false)), budget_(std::move(marks), budget, true, stop_) {}

    void accept(Token token) override {
        if (n_++ == at_) *stop_ = true;
        budget_.accept(token);
    }
    std::optional<Token> forced() const override { return budget_.forced(); }
    void forced_tokens(int n, std::vector<Token>& tokens) const override { budget_.forced_tokens(n, tokens); }
    int  free_tokens() const override { return budget_.free_tokens(); }

private:
    int                                at_ = 0, n_ = 0;
    std::shared_ptr<std::atomic<bool>> stop_;
    ReasoningBudget                    budget_;
};

// The rest of a text that is known.
class TextGuesser final : public TokenGuesser {
public:
    explicit TextGuesser(std::vector<Token> text) : text_(std::move(text)) {}
    void guess(std::span<const Token> text, int n, std::vector<Token>& guess) override {
        for (std::size_t i = text.size(); i < text_.size() && int(guess.size()) < n; i++) guess.push_back(text_[i]);
    }

private:
    std::vector<Token> text_;
};

} // namespace

TEST_CASE("forced tokens as draft tokens change no token, no log-probability and no finish reason") {
    const char*                              file = GENERATE("llama3-gqa-Q8_0.gguf", "qwen35-k-Q4_K_M.gguf");
    std::vector<std::shared_ptr<Constraint>> constraints;
    for (std::uint32_t seed = 0; seed < 16; seed++) constraints.push_back(constraint_of(seed));
    std::vector<Answers> expected;
    EngineOptions        o           = roomy_options();
    std::uint64_t        plain_steps = 0;
    {
        Engine plain = load(model(file), o);
        expected     = run_all(plain, constrained_requests(plain, constraints));
        plain_steps  = plain.stats().steps;
        CHECK(plain.stats().memory.draft_tokens == 0);
    }
    o.drafts.forced    = true;
    const bool guesses = GENERATE(false, true); // n-grams, too, whether they pay or not
    o.drafts.on = o.drafts.always = guesses;
    const bool crowded            = GENERATE(false, true);
    if (crowded) o.kv_blocks = 90, o.swap_blocks = 40, o.max_batch_tokens = 20, o.pipeline = true;
    INFO(file << (guesses ? ", n-grams" : "") << (crowded ? ", crowded" : ""));
    Engine engine = load(model(file), o);
    for (int round = 0; round < 2; round++) { // the second one finds the first one's blocks
        const auto                 tasks = constrained_requests(engine, constraints);
        const std::vector<Answers> got   = run_all(engine, tasks);
        for (std::size_t i = 0; i < tasks.size(); i++) {
            INFO("round " << round << ", request " << i << ": " << got[i].message);
            CHECK(identical(got[i], expected[i]));
        }
        if (round == 0 && !crowded && !guesses) CHECK(engine.stats().steps < plain_steps);
    }
    const auto stats = engine.stats().memory;
    CHECK(stats.accepted_tokens > 0);
}

TEST_CASE("the tokens that end reasoning are draft tokens") {
    EngineOptions o   = roomy_options();
    const auto    ask = [&](bool forced) {
        o.drafts.forced   = forced;
        Engine     engine = load(model("llama3-gqa-Q8_0.gguf"), o);
        const auto marks =
            std::make_shared<const ReasoningMarks>("<think>", "That is all I thought.</think>", engine.tokenizer());
        Request r       = greedy(prompt_of(12), 40);
        r.reasoning     = ReasoningBudget(marks, 5, true);
        const Answers a = run_one(engine, r);
        return std::pair(a, engine.stats());
    };
    const auto [plain, before] = ask(false);
    const auto [drafts, after] = ask(true);
    CHECK(identical(plain, drafts));
    CHECK(before.memory.draft_tokens == 0);
    CHECK(after.memory.accepted_tokens == after.memory.draft_tokens);
    CHECK(after.memory.accepted_tokens >= 5);
    CHECK(after.steps < before.steps);
}

TEST_CASE("where a device samples, answers whose reasoning can be ended run with draft tokens, and end it at once") {
    constexpr int never = 1000, n_tokens = 24;
    const bool    samples = GENERATE(false, true);
    EngineOptions o       = roomy_options();
    const auto    answer  = [&](int budget, int stop_at, std::vector<Token> text, EngineStats* stats = nullptr) {
        o.drafts = {.on = !text.empty(), .most = 5, .always = true, .forced = false};
        if (o.drafts.on) o.drafts.guesser = [&](const Request&) { return TextGuesser(text); };
        Engine     engine = load_sampling(model("llama3-gqa-Q8_0.gguf"), o);
        const auto marks  = std::make_shared<const ReasoningMarks>("<think>", "Enough.</think>", engine.tokenizer());
        Request    r      = samples ? sampled(prompt_of(12), n_tokens, 5) : greedy(prompt_of(12), n_tokens);
        r.return_logits   = false;
        r.sampling.logprobs    = -1;
        r.reasoning            = EndedReasoning(marks, budget, stop_at);
        std::vector<Token> out = run_one(engine, r).by_index.at(0).tokens;
        if (stats) *stats = engine.stats();
        return out;
    };
    const auto text_of = [&](const std::vector<Token>& tokens) {
        std::vector<Token> text = prompt_of(12);
        text.insert(text.end(), tokens.begin(), tokens.end());
        return text;
    };
    const std::vector<Token> free = answer(never, never, {});
    REQUIRE(free.size() == n_tokens);
    EngineStats stats;
    CHECK(answer(never, never, text_of(free), &stats) == free);
    CHECK(stats.memory.accepted_tokens > n_tokens / 2);
    for (auto [budget, stop_at] : {std::pair(never, 3), {never, 4}, {never, 6}, {9, never}, {9, 5}, {3, never}}) {
        CAPTURE(samples, budget, stop_at);
        const std::vector<Token> plain = answer(budget, stop_at, {});
        CHECK(plain != free);
        CHECK(answer(budget, stop_at, text_of(free), &stats) == plain); // the guess goes on to reason
        CHECK(answer(budget, stop_at, text_of(plain)) == plain);        // the guess knows of the end
        CHECK(stats.memory.draft_tokens > 0);
    }
}
