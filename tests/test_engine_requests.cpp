// Options of engine requests beyond sampling: min_tokens, allowed and bad words, embeddings, cancelling one of several
// answers.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include "reference.h"

import quire.core.base;
import quire.core.std;
import quire.engine.engine;
import quire.model_file.config;
import quire.schedule.request;
import quire.text.tokens.tokenizer;

#include "engine_tools.h"

using namespace quire;
using namespace quire::testing;

namespace {

Engine load(bool pipeline, int context = 0, int batch = 0) {
    EngineOptions options    = small_blocks(pipeline, 128, 4);
    options.context          = context;
    options.max_batch_tokens = batch;
    return testing::load(reference("models/llama3-gqa-Q8_0.gguf"), options);
}

Request request(std::vector<Token> prompt, int max_tokens = 12) {
    Request r;
    r.prompt               = std::move(prompt);
    r.sampling.temperature = 0;
    r.max_tokens           = max_tokens;
    return r;
}

std::vector<Output> run(Engine& engine, const Request& r) {
    Result<RequestId> id = engine.submit(r);
    REQUIRE(id.has_value());
    std::vector<Output> out;
    while (engine.step(out)) engine.check_invariants();
    return out;
}

std::vector<Token> tokens_of(const std::vector<Output>& out, int index = 0) {
    std::vector<Token> tokens;
    for (const Output& o : out)
        if (o.index == index) tokens.insert(tokens.end(), o.tokens.begin(), o.tokens.end());
    return tokens;
}

const std::vector<Token> prompt{5, 6, 7, 8, 9, 10, 11, 12, 13};

} // namespace

TEST_CASE("no answer ends before min_tokens", "[engine]") {
    Engine                   engine = load(GENERATE(false, true));
    const std::vector<Token> plain  = tokens_of(run(engine, request(prompt)));
    Request                  r      = request(prompt);
    r.stop_tokens                   = {plain[2]};
    CHECK(tokens_of(run(engine, r)).size() <= 3);
    r.min_tokens                    = 6;
    const std::vector<Token> longer = tokens_of(run(engine, r));
    CHECK(longer.size() >= 6);
    for (std::size_t i = 0; i < 6; i++) CHECK(longer[i] != plain[2]);
    r.min_tokens = 13;
    CHECK(!engine.submit(r)); // more than max_tokens
}

TEST_CASE("allowed tokens and bad words", "[engine]") {
    Engine                   engine = load(GENERATE(false, true));
    const std::vector<Token> plain  = tokens_of(run(engine, request(prompt)));
    Request                  r      = request(prompt);
    r.sampling.allowed_tokens       = {20, 21, 22};
    for (Token t : tokens_of(run(engine, r))) CHECK((t >= 20 && t <= 22));
    r.sampling.temperature = 2;
    for (Token t : tokens_of(run(engine, r))) CHECK((t >= 20 && t <= 22));

    r                    = request(prompt);
    r.sampling.bad_words = {{plain[0]}};
    for (Token t : tokens_of(run(engine, r))) CHECK(t != plain[0]);
    r.sampling.bad_words           = {{plain[0], plain[1]}}; // the second only, and only behind the first
    const std::vector<Token> other = tokens_of(run(engine, r));
    CHECK(other[0] == plain[0]);
    CHECK(other[1] != plain[1]);

    r.sampling.bad_words = {{-1}};
    CHECK(!engine.submit(r));
    r                         = request(prompt);
    r.sampling.allowed_tokens = {engine.config().vocab_size};
    CHECK(!engine.submit(r));
}

TEST_CASE("a request that leaves no token to draw is refused", "[engine]") {
    constexpr float never     = -std::numeric_limits<float>::infinity();
    Engine          engine    = load(false);
    Request         r         = request(prompt);
    r.sampling.allowed_tokens = {20, 21};
    r.sampling.logit_bias     = {{20, never}};
    for (Token t : tokens_of(run(engine, r))) CHECK(t == 21);
    SECTION("by biases") { r.sampling.logit_bias.emplace_back(21, never); }
    SECTION("by bad words") { r.sampling.bad_words = {{21}}; }
    SECTION("by min_tokens, before which no stop token comes") {
        r.stop_tokens = {21};
        r.min_tokens  = 2;
    }
    SECTION("by biases of the whole vocabulary") {
        r.sampling.allowed_tokens.clear();
        for (Token t = 0; t < engine.config().vocab_size; t++) r.sampling.logit_bias.emplace_back(t, never);
    }
    const auto fault = engine.find_fault(r);
    REQUIRE(fault);
    CHECK(fault->field == (r.sampling.allowed_tokens.empty() ? "logit_bias" : "allowed_token_ids"));
    CHECK(!engine.submit(r));
    r.max_tokens = r.min_tokens = 0; // nothing is drawn
    CHECK(engine.submit(r));
}

TEST_CASE("max_tokens 0 rates the prompt and generates nothing", "[engine]") {
    Engine  engine                = load(GENERATE(false, true), 0, 5); // a prompt in pieces
    Request r                     = request(prompt, 1);
    r.prompt_logprobs             = 2;
    r.return_logits               = true;
    const std::vector<Output> one = run(engine, r);
    r.max_tokens                  = 0;
    SECTION("of one answer") {}
    SECTION("of several") { r.n = 3; }
    SECTION("of the best") { r.n = 2, r.best_of = 3; }
    SECTION("of beams") { r.n = 2, r.beam_width = 3; }
    const std::vector<Output> none = run(engine, r);
    REQUIRE(int(none.size()) == r.n);
    for (int i = 0; i < r.n; i++) {
        CHECK(none[std::size_t(i)].index == i);
        CHECK(none[std::size_t(i)].tokens.empty());
        CHECK(none[std::size_t(i)].finish == FinishReason::length);
        CHECK(none[std::size_t(i)].done == (i + 1 == r.n));
    }
    CHECK(none[0].prompt_logits == one[0].prompt_logits);
    REQUIRE(none[0].prompt_logprobs.size() == prompt.size() - 1);
    for (std::size_t i = 0; i + 1 < prompt.size(); i++)
        CHECK(none[0].prompt_logprobs[i].chosen.logprob == one[0].prompt_logprobs[i].chosen.logprob);
    CHECK(engine.stats().blocks_used == 0);
    CHECK(engine.stats().decode_tokens == 0);
    r.prompt_logprobs = -1; // what was computed is found again
    r.return_logits   = false;
    CHECK(run(engine, r)[0].cached_tokens > 0);
}

TEST_CASE("a prompt may fill the context where nothing is generated", "[engine]") {
    Engine  engine = load(GENERATE(false, true), int(prompt.size()));
    Request r      = request(prompt, 0);
    CHECK(run(engine, r).back().finish == FinishReason::length);
    r.embed = true;
    CHECK(int(run(engine, r).back().embedding.size()) == engine.config().hidden_size);
    r.embed               = false;
    r.pin                 = true;
    Result<RequestId> pin = engine.submit(r);
    REQUIRE(pin.has_value());
    std::vector<Output> out;
    while (engine.step(out)) {}
    CHECK(out.back().finish == FinishReason::stop);
    engine.cancel(*pin);
    while (engine.step(out)) {}
    CHECK(engine.stats().blocks_used == 0);
    r = request(prompt, 1);
    CHECK(!engine.submit(r));
    r.max_tokens = 0;
    r.prompt.push_back(5);
    CHECK(!engine.submit(r));
}

TEST_CASE("an embedding is the mean of the prompt's hidden states, however it is computed", "[engine]") {
    const auto embedding = [](int batch, int others) {
        Engine engine = load(false, 0, batch);
        for (int i = 0; i < others; i++) (void)engine.submit(request({Token(30 + i), 31, 32}));
        Request r            = request(prompt);
        r.embed              = true;
        Result<RequestId> id = engine.submit(r);
        REQUIRE(id.has_value());
        std::vector<Output> out;
        while (engine.step(out)) engine.check_invariants();
        std::vector<float> found;
        for (const Output& o : out)
            if (o.id == *id) {
                CHECK(o.done);
                CHECK(o.finish == FinishReason::stop);
                CHECK(o.tokens.empty());
                CHECK(o.prompt_tokens == int(prompt.size()));
                found = o.embedding;
            }
        CHECK(int(found.size()) == engine.config().hidden_size);
        return found;
    };
    const std::vector<float> alone   = embedding(512, 0);
    double                   squares = 0;
    for (float v : alone) squares += double(v) * double(v);
    CHECK(std::abs(squares - 1) < 1e-5);
    CHECK(embedding(4, 0) == alone); // a prompt in three pieces
    CHECK(embedding(512, 3) == alone);
}

TEST_CASE("one answer of several can be cancelled", "[engine]") {
    Engine  engine                  = load(GENERATE(false, true));
    Request r                       = request(prompt, 20);
    r.n                             = 3;
    r.sampling.temperature          = 1;
    r.sampling.seed                 = 1;
    r.ignore_end                    = true;
    const std::vector<Output> whole = run(engine, r);
    Result<RequestId>         id    = engine.submit(r);
    REQUIRE(id.has_value());
    std::vector<Output> out;
    for (int step = 0; engine.step(out); step++) {
        engine.check_invariants();
        if (step == 5) engine.cancel(*id, 1);
        if (step == 6) engine.cancel(*id, 1); // gone already: the others stay
    }
    CHECK(tokens_of(out, 0) == tokens_of(whole, 0));
    CHECK(tokens_of(out, 2) == tokens_of(whole, 2));
    CHECK(tokens_of(out, 1).size() < 20);
    CHECK(engine.stats().blocks_used == 0);
}

TEST_CASE("one answer can be cancelled before its prompt is done", "[engine]") {
    const bool pipeline             = GENERATE(false, true);
    const int  when                 = GENERATE(0, 1); // nothing of the prompt has run, a piece of it has
    const int  which                = GENERATE(0, 1, 2);
    Engine     engine               = load(pipeline, 0, 4);
    Request    r                    = request(prompt, 8);
    r.n                             = 3;
    r.ignore_end                    = true;
    r.sampling.temperature          = 1;
    r.sampling.seed                 = 1;
    const std::vector<Output> whole = run(engine, r);
    r.cache_salt                    = "computed again";
    const Result<RequestId> id      = engine.submit(r);
    REQUIRE(id.has_value());
    std::vector<Output> out;
    for (int step = 0; step < when; step++) engine.step(out);
    CHECK(out.empty());
    engine.cancel(*id, which);
    engine.cancel(*id, which); // gone already
    engine.cancel(*id, 3);     // never there
    while (engine.step(out)) engine.check_invariants();
    for (int i = 0; i < 3; i++) {
        CHECK(tokens_of(out, i) == (i == which ? std::vector<Token>() : tokens_of(whole, i)));
        const auto last = [&](const Output& o) { return o.index == i && o.finish != FinishReason::none; };
        REQUIRE(std::ranges::count_if(out, last) == 1);
        CHECK(std::ranges::find_if(out, last)->finish == (i == which ? FinishReason::cancelled : FinishReason::length));
    }
    CHECK(out.back().done);
    CHECK(std::ranges::count_if(out, &Output::done) == 1);
    CHECK(engine.stats().blocks_used == 0);
}

TEST_CASE("the progress of a prompt is not told by an answer that was cancelled", "[engine]") {
    Engine  engine             = load(false, 0, 4);
    Request r                  = request(prompt, 4);
    r.n                        = 2;
    r.return_progress          = true;
    const Result<RequestId> id = engine.submit(r);
    REQUIRE(id.has_value());
    engine.cancel(*id, 0);
    std::vector<Output> out;
    while (engine.step(out)) {}
    const auto first = [](const Output& o) { return o.index == 0; };
    CHECK(std::ranges::count_if(out, first) == 1);
    CHECK(std::ranges::find_if(out, first)->finish == FinishReason::cancelled);
    CHECK(std::ranges::any_of(out, [](const Output& o) { return o.index == 1 && o.computed_tokens > 0; }));
}

TEST_CASE("with its last answer a request is over", "[engine]") {
    Engine  engine             = load(GENERATE(false, true), 0, 4);
    Request r                  = request(prompt, 8);
    r.n                        = 2;
    r.best_of                  = GENERATE(0, 3);
    const Result<RequestId> id = engine.submit(r);
    REQUIRE(id.has_value());
    for (int i : {1, 0}) engine.cancel(*id, i);
    std::vector<Output> out;
    while (engine.step(out)) engine.check_invariants();
    REQUIRE(out.size() == 2);
    for (const Output& o : out) CHECK(o.finish == FinishReason::cancelled);
    CHECK(out[0].index == 1);
    CHECK(!out[0].done);
    CHECK(out[1].index == 0);
    CHECK(out[1].done);
    CHECK(engine.stats().blocks_used == 0);
}

TEST_CASE("one of the best answers can be cancelled", "[engine]") {
    Engine  engine         = load(GENERATE(false, true));
    Request r              = request(prompt, 8);
    r.n                    = 2;
    r.sampling.temperature = 1;
    r.ignore_end           = true;
    SECTION("of samples") { r.best_of = 4; }
    SECTION("of beams") { r.beam_width = 4; }
    const std::vector<Output> whole = run(engine, r);
    for (int which : {0, 1}) {
        const Result<RequestId> id = engine.submit(r);
        REQUIRE(id.has_value());
        std::vector<Output> out;
        for (int step = 0; step < 4; step++) engine.step(out);
        engine.cancel(*id, which);
        while (engine.step(out)) engine.check_invariants();
        REQUIRE(out.size() == 2);
        CHECK(out[0].index == which);
        CHECK(out[0].finish == FinishReason::cancelled);
        CHECK(out[1].index == 1 - which);
        CHECK(tokens_of(out, 1 - which) == tokens_of(whole, 1 - which));
        CHECK(out[1].done);
    }
}

TEST_CASE("answers that come whole are cancelled by their own numbers, whichever sequences are left", "[engine]") {
    Engine  engine         = load(GENERATE(false, true));
    Request r              = request(prompt, 60);
    r.n                    = 3;
    r.ignore_end           = true;
    r.sampling.temperature = 1.5f;
    // A seed with which the first sequence soon has a token that the others do not have.
    Token only = -1;
    for (; only < 0; r.sampling.seed++) {
        REQUIRE(r.sampling.seed < 100);
        const std::vector<Output> out   = run(engine, r);
        const std::vector<Token>  first = tokens_of(out, 0);
        const auto                in    = [&](int i) {
            const std::vector<Token> tokens = tokens_of(out, i);
            return std::ranges::find(tokens, first[1]) != tokens.end();
        };
        if (first[0] != first[1] && !in(1) && !in(2)) only = first[1];
    }
    r.sampling.seed--;
    r.n                        = 1;
    r.best_of                  = 3;
    r.stop_tokens              = {only};
    const Result<RequestId> id = engine.submit(r);
    REQUIRE(id.has_value());
    std::vector<Output> out;
    for (int step = 0; step < 8; step++) engine.step(out);
    CHECK(out.empty());
    engine.cancel(*id);
    while (engine.step(out)) engine.check_invariants();
    REQUIRE(out.size() == 1);
    CHECK(out[0].index == 0);
    CHECK(out[0].finish == FinishReason::cancelled);
    CHECK(out[0].done);
}
