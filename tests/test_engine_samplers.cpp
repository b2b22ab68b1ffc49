// Samplers with state, reasoning budgets and full contexts in the engine: an answer is the same whatever happens to its blocks.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include "reference.h"

import quire.constraint.compile;
import quire.constraint.reasoning_budget;
import quire.core.base;
import quire.core.std;
import quire.decode.candidates;
import quire.decode.sampler;
import quire.engine.engine;
import quire.engine.executor;
import quire.engine.local_executor;
import quire.model_file.weights;
import quire.schedule.preemption;
import quire.schedule.request;
import quire.schedule.sequence_breakers;
import quire.text.tokens.tokenizer;

#include "engine_tools.h"
#include "sampling_executor.h"

using namespace quire;
using namespace quire::testing;

namespace {

EngineOptions options(bool pipeline, int blocks = 256) { return small_blocks(pipeline, blocks, 8); }

std::string model() { return reference("models/llama3-gqa-Q8_0.gguf"); }

// One request for each sampler, and one for all that go together.
std::vector<Request> one_of_each() {
    std::vector<Request> requests;
    for (int i = 0; i < 8; i++) {
        Request r;
        for (int k = 0; k < 12; k++) r.prompt.push_back(Token(5 + i + k % 4)); // with a repetition in it
        r.max_tokens      = 24;
        r.ignore_end      = true;
        SamplingParams& s = r.sampling;
        s.seed            = std::uint64_t(100 + i);
        if (i == 0) s.mirostat = 1, s.mirostat_tau = 3, s.mirostat_eta = 0.3f;
        if (i == 1) s.mirostat = 2, s.mirostat_tau = 2, s.mirostat_eta = 0.3f;
        if (i == 2 || i == 7)
            s.dry = {.multiplier = 2, .base = 1.5f, .allowed_length = 1, .last_n = -1, .breakers = {}};
        if (i == 3 || i == 7) s.xtc_probability = 0.5f, s.xtc_threshold = 0.001f;
        if (i == 4 || i == 7) s.typical_p = 0.6f;
        if (i == 5 || i == 7) s.dynatemp_range = 0.8f, s.dynatemp_exponent = 2;
        if (i == 6 || i == 7) s.top_n_sigma = 1;
        requests.push_back(std::move(r));
    }
    return requests;
}

bool has(std::span<const Token> tokens, std::span<const Token> part, std::size_t at) {
    return at + part.size() <= tokens.size() && std::ranges::equal(tokens.subspan(at, part.size()), part);
}

} // namespace

TEST_CASE("samplers draw the same alone, among others, and after preemptions", "[engine]") {
    const bool                 pipeline = GENERATE(false, true);
    const std::vector<Request> requests = one_of_each();
    Engine                     roomy    = load(model(), options(pipeline));
    std::vector<Answer>        want;
    for (const Request& r : requests) want.push_back(run(roomy, {r})[0]);
    for (std::size_t i = 0; i < requests.size(); i++) {
        Request plain       = requests[i];
        plain.sampling      = {};
        plain.sampling.seed = requests[i].sampling.seed;
        CAPTURE(i);
        CHECK(run(roomy, {plain})[0].tokens != want[i].tokens);
    }
    for (const PreemptionMode mode : {PreemptionMode::recompute, PreemptionMode::swap}) {
        EngineOptions tight   = options(pipeline, 24);
        tight.preemption_mode = mode;
        tight.swap_blocks     = 64;
        Engine     engine     = load(model(), tight);
        const auto got        = run(engine, requests);
        for (std::size_t i = 0; i < requests.size(); i++) {
            CAPTURE(i);
            CHECK(got[i].tokens == want[i].tokens);
        }
        CHECK(engine.stats().preemptions > 0);
    }
}

TEST_CASE("each of several answers has mirostat's state of its own", "[engine]") {
    Engine engine = load(model(), options(false));
    for (int i : {0, 1, 7}) {
        Request several = one_of_each()[std::size_t(i)];
        several.n       = 3;
        const auto id   = engine.submit(several);
        REQUIRE(id.has_value());
        std::map<int, std::vector<Token>> tokens;
        std::vector<Output>               out;
        while (engine.step(out)) {}
        for (const Output& o : out) tokens[o.index].insert(tokens[o.index].end(), o.tokens.begin(), o.tokens.end());
        for (int k = 0; k < 3; k++) {
            Request one = one_of_each()[std::size_t(i)];
            one.sampling.seed += std::uint64_t(k);
            CAPTURE(i, k);
            CHECK(run(engine, {one})[0].tokens == tokens[k]);
        }
    }
}

TEST_CASE("probabilities after the samplers are those of the draw, whatever device samples", "[engine]") {
    Engine               engine   = load(model(), options(false));
    std::vector<Request> requests = one_of_each();
    for (Request& r : requests) r.sampling.logprobs = 1000, r.sampling.after_samplers = true;
    requests.push_back(requests[0]);
    requests.back().sampling.temperature = 0;
    requests.push_back(requests[1]);
    requests.back().n = 2;
    const auto marks  = std::make_shared<const ReasoningMarks>("<think>", "</think>", engine.tokenizer());
    requests.push_back(requests[5]);
    requests.back().reasoning = ReasoningBudget(marks, 3, true);
    requests.push_back(requests[6]);
    ConstraintSpec two{.kind = ConstraintSpec::Kind::choice};
    two.choices                      = {"yes", "no"};
    requests.back().ignore_end       = false;
    requests.back().constraint       = ConstraintState(*compile_constraint(two), engine.token_trie());
    const std::vector<Answer> on_cpu = run(engine, requests);
    for (const Answer& a : on_cpu) {
        REQUIRE(a.logprobs.size() == a.tokens.size());
        for (std::size_t i = 0; i < a.tokens.size(); i++) {
            const PositionLogprobs& p   = a.logprobs[i];
            double                  sum = 0;
            for (const TokenLogprob& t : p.top) sum += std::exp(double(t.logprob));
            CHECK(std::abs(sum - 1) < 1e-4);
            CHECK(p.chosen.token == a.tokens[i]);
            CHECK(std::ranges::find(p.top, p.chosen.token, &TokenLogprob::token) != p.top.end());
            for (std::size_t k = 1; k < p.top.size(); k++) CHECK(p.top[k - 1].logprob >= p.top[k].logprob);
        }
    }
    for (const PositionLogprobs& p : on_cpu[8].logprobs) CHECK(p.top.size() == 1); // greedy
    Engine                    device    = load_sampling(model(), options(true));
    const std::vector<Answer> on_device = run(device, requests);
    for (std::size_t i = 0; i < requests.size(); i++) CHECK(identical(on_cpu[i], on_device[i]));
}

TEST_CASE("a reasoning budget that is used up closes the reasoning", "[engine]") {
    const bool         pipeline = GENERATE(false, true);
    Engine             engine   = load(model(), options(pipeline));
    const Tokenizer&   t        = engine.tokenizer();
    const auto         marks    = std::make_shared<const ReasoningMarks>("<think>", "</think>", t);
    std::vector<Token> closing; // what is forced
    for (ReasoningBudget b(marks, 0, true); b.forced(); b.accept(closing.back())) closing.push_back(*b.forced());
    REQUIRE(!closing.empty());
    CHECK(t.decode(closing, true) == "</think>");
    for (int kind = 0; kind < 6; kind++) {
        Request r;
        r.prompt               = {5, 6, 7, 8, 9, Token(10 + kind)};
        r.max_tokens           = 30;
        r.ignore_end           = true;
        r.sampling.temperature = kind % 2 == 0 ? 0.0f : 1.0f;
        r.sampling.logprobs    = kind == 4 || kind == 5 ? 2 : -1;
        const auto free        = run(engine, {r})[0].tokens;
        for (int budget : {0, 1, 7}) {
            r.reasoning        = ReasoningBudget(marks, budget, true);
            const auto bounded = run(engine, {r})[0];
            CAPTURE(kind, budget);
            REQUIRE(bounded.tokens.size() == 30);
            CHECK(std::equal(free.begin(), free.begin() + budget, bounded.tokens.begin()));
            // No later than the last character needs.
            std::size_t at = std::size_t(budget);
            while (at < std::size_t(budget) + 4 && !has(bounded.tokens, closing, at)) at++;
            CHECK(has(bounded.tokens, closing, at));
            if (kind >= 4) {
                REQUIRE(bounded.logprobs.size() == 30);
                CHECK(bounded.logprobs[at].chosen.token == closing[0]);
                CHECK(bounded.logprobs[at].chosen.logprob <= bounded.logprobs[at].top[0].logprob);
            }
        }
        // Reasoning has not begun: nothing is forced, unless the model begins it.
        r.reasoning = ReasoningBudget(marks, 0, false);
        CHECK(run(engine, {r})[0].tokens == free);
    }
}

TEST_CASE("the end of reasoning is seen whatever tokens spell it", "[engine]") {
    const Engine     engine = load(model(), options(false));
    const Tokenizer& t      = engine.tokenizer();
    const auto       marks  = std::make_shared<const ReasoningMarks>("<think>", "</think>", t);
    const auto       feed   = [&](ReasoningBudget& b, std::string_view text, bool bytewise) {
        if (!bytewise)
            for (Token id : t.encode(text, {.add_special = false})) b.accept(id);
        for (std::size_t i = 0; i < text.size() && bytewise; i++)
            for (Token id : t.encode(text.substr(i, 1), {.add_special = false})) b.accept(id);
    };
    for (bool bytewise : {false, true}) {
        ReasoningBudget b(marks, 100, true);
        feed(b, "so it is <</think>", bytewise);
        feed(b, std::string(300, 'x'), true);
        CHECK(!b.forced()); // it is over
        feed(b, "<think>", bytewise);
        feed(b, std::string(99, 'x'), true);
        CHECK(!b.forced());
        feed(b, "x", true);
        CHECK(b.forced().has_value());
        // Another token can only come where a constraint forbids the mark.
        feed(b, "x", true);
        CHECK(!b.forced());
    }
}

TEST_CASE("an answer that fills the context goes on without its middle", "[engine]") {
    const bool    pipeline = GENERATE(false, true);
    EngineOptions o        = options(pipeline);
    o.context              = 48;
    Engine  engine         = load(model(), o);
    Request r;
    for (int i = 0; i < 20; i++) r.prompt.push_back(Token(30 + i));
    r.max_tokens           = 100;
    r.ignore_end           = true;
    r.sampling.temperature = 0;
    CHECK(run(engine, {r})[0].tokens.size() == 28);
    for (auto [n_keep, n_discard] : {std::pair(5, 0), {0, 0}, {-1, 0}, {9, 6}, {1000, 1000}}) {
        CAPTURE(n_keep, n_discard);
        Request shifting       = r;
        shifting.context_shift = true;
        shifting.n_keep        = n_keep;
        shifting.n_discard     = n_discard;
        const Answer got       = run(engine, {shifting})[0];
        CHECK(got.finish == FinishReason::length);
        CHECK(got.tokens.size() == 100);
        // By hand: a new request with the tokens that are left.
        const int          kept = std::min({n_keep < 0 ? 20 : n_keep, 20, 24});
        const int          drop = n_discard > 0 ? std::min(n_discard, 48 - kept - 1) : (48 - kept) / 2;
        std::vector<Token> text = r.prompt, want;
        while (want.size() < 100) {
            Request next      = r;
            next.prompt       = text;
            next.max_tokens   = std::min(48 - int(text.size()), 100 - int(want.size()));
            const Answer part = run(engine, {next})[0];
            for (Token token : part.tokens) text.push_back(token), want.push_back(token);
            if (want.size() < 100) text.erase(text.begin() + kept, text.begin() + kept + drop);
        }
        CHECK(got.tokens == want);
    }
    CHECK(engine.stats().memory.context_shifts > 0);
}

TEST_CASE("shifted answers are the same among others and in a small pool", "[engine]") {
    const bool    pipeline     = GENERATE(false, true);
    EngineOptions o            = options(pipeline);
    o.context                  = 48;
    Engine roomy               = load(model(), o);
    o.kv_blocks                = 26;
    Engine               tight = load(model(), o);
    std::vector<Request> requests;
    for (int i = 0; i < 4; i++) {
        Request r;
        for (int k = 0; k < 10 + i; k++) r.prompt.push_back(Token(30 + i + k));
        r.max_tokens    = 90;
        r.ignore_end    = true;
        r.context_shift = true;
        r.n_keep        = 3;
        r.sampling      = {};
        r.sampling.seed = std::uint64_t(i);
        if (i == 1) r.sampling.mirostat = 2;
        if (i == 2) r.sampling.repetition_penalty = 1.2f, r.sampling.presence_penalty = 0.5f;
        if (i == 3) r.sampling.dry.multiplier = 1;
        requests.push_back(std::move(r));
    }
    std::vector<Answer> want;
    for (const Request& r : requests) want.push_back(run(roomy, {r})[0]);
    for (Engine* engine : {&roomy, &tight}) {
        const auto got = run(*engine, requests);
        for (std::size_t i = 0; i < requests.size(); i++) {
            CAPTURE(i);
            CHECK(got[i].tokens.size() == 90);
            CHECK(got[i].tokens == want[i].tokens);
        }
    }
    // The random numbers go on behind a shift: no answer repeats itself because of it.
    CHECK(want[0].tokens[60] != want[0].tokens[36]);
    // Alone in a pool that is smaller than the context, an answer shifts when it has filled the pool.
    o.kv_blocks              = 8;
    Engine  small            = load(model(), o);
    Request one              = requests[0];
    one.sampling.temperature = 0;
    CHECK(run(small, {one})[0].tokens.size() == 90);
    // Several answers of a request shift together.
    one.n         = 3;
    const auto id = roomy.submit(one);
    REQUIRE(id.has_value());
    std::vector<Output> out;
    while (roomy.step(out)) roomy.check_invariants();
    std::map<int, int> n_tokens;
    for (const Output& output : out) n_tokens[output.index] += int(output.tokens.size());
    CHECK(n_tokens == std::map<int, int>{{0, 90}, {1, 90}, {2, 90}});
    // Beams do not.
    one.n          = 1;
    one.beam_width = 2;
    CHECK(run(roomy, {one})[0].tokens.size() == 38);
}
