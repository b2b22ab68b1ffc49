// Constraints in the engine: every answer satisfies its own, however it is decoded and whatever happens to its blocks.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include "reference.h"

import quire.constraint.compile;
import quire.core.base;
import quire.core.json;
import quire.core.std;
import quire.engine.engine;
import quire.schedule.preemption;
import quire.schedule.request;
import quire.text.tokens.tokenizer;

using namespace quire;
using namespace quire::testing;

namespace {

Engine load(bool pipeline, int blocks = 128, EngineOptions options = {}) {
    options.threads       = 1;
    options.device        = "cpu";
    options.block_size    = 4;
    options.kv_blocks     = blocks;
    options.max_sequences = 6;
    options.pipeline      = pipeline;
    Result<Engine> engine = Engine::load(reference("models/llama3-gqa-Q8_0.gguf"), options);
    REQUIRE(engine.has_value());
    return std::move(*engine);
}

std::shared_ptr<Constraint> array_of_numbers() {
    ConstraintSpec spec{.kind = ConstraintSpec::Kind::json_schema};
    spec.schema = *json_parse(
        R"({"type":"object","properties":{"a":{"type":"array","items":{"type":"integer","maximum":99,"minimum":0},"maxItems":6},"b":{"enum":["x","y"]}},"required":["a","b"],"additionalProperties":false})");
    return *compile_constraint(spec);
}

Request request(Engine& engine, const std::shared_ptr<Constraint>& constraint, int max_tokens = 60) {
    Request r;
    r.prompt               = {5, 6, 7, 8, 9, 10, 11, 12, 13};
    r.sampling.temperature = 0;
    r.max_tokens           = max_tokens;
    r.constraint           = ConstraintState(constraint, engine.token_trie());
    return r;
}

struct Ended {
    std::vector<Token> tokens;
    FinishReason       finish = FinishReason::none;
    std::string        message;
    int                n_preempted = 0;
};

std::map<std::pair<RequestId, int>, Ended> run(Engine& engine, const std::vector<Request>& requests) {
    for (const Request& r : requests) {
        const auto id = engine.submit(r);
        INFO((id ? std::string() : id.error().message));
        REQUIRE(id.has_value());
    }
    std::map<std::pair<RequestId, int>, Ended> answers;
    std::vector<Output>                        out;
    while (engine.step(out)) engine.check_invariants();
    for (const Output& o : out) {
        Ended& a = answers[{o.id, o.index}];
        a.tokens.insert(a.tokens.end(), o.tokens.begin(), o.tokens.end());
        a.finish      = o.finish;
        a.message     = o.message;
        a.n_preempted = o.n_preempted;
    }
    return answers;
}

// The text is a beginning of what the constraint asks for, or, where it came to its end, all of it.
void check_text(Engine& engine, const std::shared_ptr<Constraint>& constraint, const Ended& answer) {
    ConstraintState state(constraint, engine.token_trie());
    for (Token t : answer.tokens) REQUIRE(state.accept(t));
    INFO(engine.tokenizer().decode(answer.tokens));
    CHECK(answer.message == "");
    CHECK((answer.finish == FinishReason::stop || answer.finish == FinishReason::length));
    if (answer.finish == FinishReason::stop) CHECK(json_parse(engine.tokenizer().decode(answer.tokens)).has_value());
}

} // namespace

TEST_CASE("answers satisfy their constraint: greedy, sampled, several, beams", "[engine]") {
    Engine     engine     = load(GENERATE(false, true));
    const auto constraint = array_of_numbers();
    int        complete   = 0;
    for (int kind = 0; kind < 8; kind++) {
        Request r = request(engine, constraint);
        if (kind > 0) r.sampling.temperature = 1, r.sampling.seed = std::uint64_t(kind);
        if (kind == 2) r.n = 3;
        if (kind == 3) r.n = 2, r.best_of = 4;
        if (kind == 4) r.sampling.top_k = 20, r.sampling.repetition_penalty = 1.2f;
        if (kind == 5) r.n = r.beam_width = 3, r.sampling = {};
        if (kind == 6) r.sampling.logprobs = 5;
        if (kind == 7) r.sampling.logit_bias = {{20, 50.0f}};
        const auto answers = run(engine, {r});
        CHECK(answers.size() == std::size_t(r.n));
        for (const auto& [id, answer] : answers) {
            CAPTURE(kind, id.second);
            check_text(engine, constraint, answer);
            complete += answer.finish == FinishReason::stop;
        }
    }
    CHECK(complete > 0);
}

TEST_CASE("a constraint goes on as it was after a preemption", "[engine]") {
    const bool           pipeline   = GENERATE(false, true);
    const auto           constraint = array_of_numbers();
    Engine               roomy = load(pipeline), tight = load(pipeline, 16);
    std::vector<Request> requests;
    for (int i = 0; i < 3; i++) {
        requests.push_back(request(roomy, constraint, 40));
        requests.back().sampling.temperature = 1;
        requests.back().sampling.seed        = std::uint64_t(i);
        requests.back().prompt[0]            = Token(i);
    }
    const auto want = run(roomy, requests);
    for (Request& r : requests) r.constraint = ConstraintState(constraint, tight.token_trie());
    const auto got         = run(tight, requests);
    int        n_preempted = 0;
    for (const auto& [id, answer] : want) {
        CHECK(got.at(id).tokens == answer.tokens);
        n_preempted += got.at(id).n_preempted;
    }
    CHECK(n_preempted > 0);
}

TEST_CASE("what a constraint leaves no choice about is not sampled", "[engine]") {
    const bool    pipeline = GENERATE(false, true);
    EngineOptions one_by_one_only;
    one_by_one_only.fast_forward = 0, one_by_one_only.drafts.forced = false;
    Engine            fast = load(pipeline), plain = load(pipeline, 128, one_by_one_only);
    const std::string text = "The answer to all of the questions is forty-two, and nothing else.";
    ConstraintSpec    spec{.kind = ConstraintSpec::Kind::choice};
    spec.choices          = {text};
    const auto constraint = *compile_constraint(spec);
    const auto n_steps    = [&](Engine& engine, std::vector<Token>& tokens) {
        const auto before = engine.stats().steps;
        for (const auto& [id, answer] : run(engine, {request(engine, constraint)})) {
            CHECK(answer.finish == FinishReason::stop);
            tokens = answer.tokens;
        }
        tokens.pop_back(); // the end
        return int(engine.stats().steps - before);
    };
    std::vector<Token> forced, sampled;
    CHECK(n_steps(fast, forced) <= 4); // the first token, what is forced, and the end
    CHECK(n_steps(plain, sampled) == int(sampled.size()) + 1);
    CHECK(fast.tokenizer().decode(forced) == text);
    CHECK(plain.tokenizer().decode(sampled) == text);
    const std::string begun = fast.tokenizer().decode(std::vector{forced[0]});
    CHECK(std::vector(forced.begin() + 1, forced.end()) == encode_inside(fast.tokenizer(), text.substr(begun.size())));

    Request r    = request(fast, constraint, 5); // no token more than asked for
    auto    five = run(fast, {r});
    CHECK(five.begin()->second.tokens.size() == 5);
    CHECK(five.begin()->second.finish == FinishReason::length);
    r                             = request(fast, constraint); // what was asked for about single tokens holds
    r.sampling.logprobs           = 0;
    std::vector<Token> one_by_one = run(fast, {r}).begin()->second.tokens;
    one_by_one.pop_back();
    CHECK(one_by_one == sampled);
}

TEST_CASE("no stop token is forced before min_tokens are generated", "[engine]") {
    Engine            engine = load(GENERATE(false, true));
    const std::string text   = "The answer to all of the questions is forty-two, and nothing else.";
    ConstraintSpec    spec{.kind = ConstraintSpec::Kind::choice};
    spec.choices                 = {text};
    const std::vector<Token> all = encode_inside(engine.tokenizer(), " all");
    REQUIRE(all.size() == 1);
    Request r           = request(engine, *compile_constraint(spec));
    r.stop_tokens       = all;
    const Ended stopped = run(engine, {r}).begin()->second;
    CHECK(engine.tokenizer().decode(stopped.tokens) == "The answer to all");
    r.min_tokens       = int(stopped.tokens.size()) + 4; // sampled one by one, the text has more tokens
    const Ended answer = run(engine, {r}).begin()->second;
    CHECK(answer.finish == FinishReason::stop);
    REQUIRE(int(answer.tokens.size()) > r.min_tokens);
    CHECK(std::ranges::find(answer.tokens, all[0]) == answer.tokens.end());
    CHECK(engine.tokenizer().decode(std::span(answer.tokens).first(answer.tokens.size() - 1)) == text);
}

TEST_CASE("forced tokens are computed in whatever steps, with the same bits", "[engine]") {
    const bool           pipeline   = GENERATE(false, true);
    const auto           constraint = array_of_numbers();
    Engine               roomy      = load(pipeline);
    std::vector<Request> requests;
    for (int i = 0; i < 6; i++) {
        requests.push_back(request(roomy, constraint, 50));
        requests.back().sampling.temperature = 1;
        requests.back().sampling.seed        = std::uint64_t(i);
        requests.back().prompt[0]            = Token(i);
    }
    const auto want = run(roomy, requests);
    for (EngineOptions o :
         {EngineOptions{.max_batch_tokens = 7}, EngineOptions{.preemption_mode = PreemptionMode::swap},
          EngineOptions{.preemption_mode = PreemptionMode::recompute}}) {
        Engine other = load(pipeline, o.max_batch_tokens > 0 ? 128 : 20, o);
        for (Request& r : requests) r.constraint = ConstraintState(constraint, other.token_trie());
        int n_preempted = 0;
        for (const auto& [id, answer] : run(other, requests)) {
            CHECK(want.at(id).tokens == answer.tokens);
            check_text(other, constraint, answer);
            n_preempted += answer.n_preempted;
        }
        CHECK((n_preempted > 0) == (o.max_batch_tokens == 0));
    }
}

TEST_CASE("log-probabilities are those of the allowed tokens", "[engine]") {
    Engine         engine = load(false);
    ConstraintSpec spec{.kind = ConstraintSpec::Kind::choice};
    spec.choices        = {"a", "b"};
    Request r           = request(engine, *compile_constraint(spec));
    r.sampling.logprobs = 20;
    const auto id       = engine.submit(r);
    REQUIRE(id.has_value());
    std::vector<Output> out;
    while (engine.step(out)) {}
    std::vector<PositionLogprobs> all;
    for (const Output& o : out) all.insert(all.end(), o.logprobs.begin(), o.logprobs.end());
    REQUIRE(all.size() >= 2);
    double sum = 0;
    for (const TokenLogprob& t : all[0].top) sum += std::exp(double(t.logprob));
    CHECK(std::abs(sum - 1) < 1e-3);
    CHECK(all[0].top.size() < 20);
}

TEST_CASE("a constraint that nothing can follow ends the request with a sentence", "[engine]") {
    Engine         engine = load(GENERATE(false, true));
    ConstraintSpec spec{.kind = ConstraintSpec::Kind::choice};
    spec.choices       = {"a"};
    Request r          = request(engine, *compile_constraint(spec));
    r.min_tokens       = 10; // it would end before
    const auto answers = run(engine, {r});
    for (const auto& [id, answer] : answers) {
        CHECK(answer.finish == FinishReason::unmet);
        CHECK(answer.message.find("constraint") != answer.message.npos);
    }
}
