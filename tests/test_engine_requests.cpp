// Options of engine requests beyond sampling: min_tokens, allowed and bad words, embeddings, cancelling one of several
// answers.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include "reference.h"

import quire.base;
import quire.config;
import quire.engine;
import quire.request;
import quire.std;
import quire.tokenizer;

using namespace quire;
using namespace quire::testing;

namespace {

Engine load(bool pipeline) {
    EngineOptions options;
    options.threads       = 1;
    options.device        = "cpu";
    options.block_size    = 4;
    options.kv_blocks     = 128;
    options.max_sequences = 4;
    options.pipeline      = pipeline;
    Result<Engine> engine = Engine::load(reference("models/llama3-gqa-Q8_0.gguf"), options);
    REQUIRE(engine.has_value());
    return std::move(*engine);
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

TEST_CASE("an embedding is the mean of the prompt's hidden states, however it is computed", "[engine]") {
    const auto embedding = [](int batch, int others) {
        EngineOptions options;
        options.threads          = 1;
        options.device           = "cpu";
        options.block_size       = 4;
        options.kv_blocks        = 128;
        options.max_sequences    = 4;
        options.max_batch_tokens = batch;
        Result<Engine> engine    = Engine::load(reference("models/llama3-gqa-Q8_0.gguf"), options);
        REQUIRE(engine.has_value());
        for (int i = 0; i < others; i++) (void)engine->submit(request({Token(30 + i), 31, 32}));
        Request r            = request(prompt);
        r.embed              = true;
        Result<RequestId> id = engine->submit(r);
        REQUIRE(id.has_value());
        std::vector<Output> out;
        while (engine->step(out)) engine->check_invariants();
        std::vector<float> found;
        for (const Output& o : out)
            if (o.id == *id) {
                CHECK(o.done);
                CHECK(o.finish == FinishReason::stop);
                CHECK(o.tokens.empty());
                CHECK(o.prompt_tokens == int(prompt.size()));
                found = o.embedding;
            }
        CHECK(int(found.size()) == engine->config().hidden_size);
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
