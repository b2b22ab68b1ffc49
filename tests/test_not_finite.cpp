// A model that computes NaN or infinity: every decoding method ends the request with an error, and no other request is affected.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

import quire.constraint.compile;
import quire.core.base;
import quire.engine.engine;
import quire.model_file.gguf;
import quire.tools.bench.random_model;
import quire.schedule.request;
import quire.core.std;
import quire.core.tensor;

#include "engine_tools.h"
#include "nan_model.h"
#include "process.h"

using namespace quire;
using namespace quire::testing;

namespace {

constexpr Token poison = 7; // its embedding is NaN

EngineOptions options(bool pipeline) { return small_blocks(pipeline, 24, 6); }

// One request by each decoding method.
std::vector<std::pair<std::string, Request>> methods(const std::vector<Token>& prompt) {
    std::vector<std::pair<std::string, Request>> all;
    const auto                                   add = [&](std::string name) -> Request& {
        Request& r             = all.emplace_back(std::move(name), Request{}).second;
        r.prompt               = prompt;
        r.max_tokens           = 8;
        r.ignore_end           = true;
        r.sampling.temperature = 0;
        return r;
    };
    add("greedy");
    add("sampling").sampling.temperature       = 1;
    add("penalty").sampling.repetition_penalty = 1.5f;
    add("logprobs").sampling.logprobs          = 3;
    add("prompt logprobs").prompt_logprobs     = 2;
    add("allowed").sampling.allowed_tokens     = {20, 21};
    add("min_tokens").min_tokens               = 4;
    add("raw logits").return_logits            = true;
    Request& n                                 = add("n");
    n.n = 3, n.sampling.temperature = 1;
    Request& best = add("best_of");
    best.best_of = 3, best.sampling.temperature = 1;
    Request& beams = add("beams");
    beams.n = beams.beam_width = 3;
    Request& told              = add("beams with logprobs");
    told.beam_width = 2, told.sampling.logprobs = 2;
    add("embedding").embed = true;
    return all;
}

// All events of one request.
std::vector<Output> run_one(Engine& engine, const Request& r) {
    REQUIRE(engine.submit(r).has_value());
    std::vector<Output> out;
    for (int step = 0; engine.step(out); step++) {
        engine.check_invariants();
        REQUIRE(step < 1000);
    }
    return out;
}

} // namespace

TEST_CASE("a prompt with a NaN ends in a sentence, by every decoding method", "[engine][nan]") {
    const NanModel model("token_embd.weight", poison);
    Engine         engine      = load(model.path(), options(GENERATE(false, true)));
    auto           all         = methods({5, 6, poison, 8, 9, 10});
    Request        constrained = all[0].second;
    constrained.n              = 2;
    constrained.constraint     = ConstraintState(
        *compile_constraint({.kind = ConstraintSpec::Kind::regex, .text = "(.|\\n)*"}), engine.token_trie());
    all.emplace_back("constraint", constrained);
    for (const auto& [name, request] : all) {
        CAPTURE(name);
        const std::vector<Output> out = run_one(engine, request);
        REQUIRE(int(out.size()) == request.n); // every answer is told
        CHECK(out.back().done);
        for (const Output& o : out) {
            CHECK(o.finish == FinishReason::failed);
            INFO(o.message);
            CHECK(o.message.find("not finite") != std::string::npos);
            CHECK(o.message.find(name == "prompt logprobs" || name == "embedding" ? "position 2" : "position 5") !=
                  std::string::npos);
            CHECK(o.tokens.empty());
            CHECK(o.embedding.empty());
        }
        CHECK(engine.stats().blocks_used == 0);
    }
    for (const auto& [name, request] : methods({5, 6, 8, 9, 10})) { // and it goes on with others
        CAPTURE(name);
        const std::vector<Output> out = run_one(engine, request);
        REQUIRE(!out.empty());
        CHECK(out.back().done);
        CHECK(out.back().finish != FinishReason::failed);
    }
}

TEST_CASE("an answer that runs into a NaN keeps its tokens and ends in a sentence", "[engine][nan]") {
    const NanModel model("token_embd.weight", poison);
    Engine         engine = load(model.path(), options(GENERATE(false, true)));
    for (auto& [name, request] : methods({5, 6, 8})) {
        if (request.embed || request.beam_width > 0) continue; // these do not follow a bias
        CAPTURE(name);
        request.sampling.allowed_tokens = {poison};
        const std::vector<Output> out   = run_one(engine, request);
        CHECK(out.back().done);
        CHECK(out.back().finish == FinishReason::failed);
        CHECK(out.back().message.find("position 3") != std::string::npos);
        std::vector<Token> tokens;
        for (const Output& o : out)
            if (o.index == 0) tokens.insert(tokens.end(), o.tokens.begin(), o.tokens.end());
        CHECK(tokens == (name == "best_of" ? std::vector<Token>{} : std::vector<Token>{poison}));
        CHECK(engine.stats().blocks_used == 0);
    }
}

TEST_CASE("neighbours of a request that fails get the same bits", "[engine][nan]") {
    const NanModel             model("token_embd.weight", poison);
    const bool                 pipeline = GENERATE(false, true);
    const std::vector<Request> good{greedy({5, 6, 8, 9, 10, 11, 12}, 20), greedy({5, 6, 30}, 20)};
    std::vector<Answer>        alone;
    for (const Request& r : good) {
        Engine fresh = load(model.path(), options(pipeline));
        alone.push_back(run(fresh, {r})[0]);
        CHECK(alone.back().finish == FinishReason::length);
    }
    Engine               engine = load(model.path(), options(pipeline));
    std::vector<Request> all    = good;
    std::vector<int>     at     = {0, 2};
    int                  step   = 0;
    for (const auto& [name, request] : methods({5, 6, 8, 9, 10, poison})) {
        all.push_back(request);
        at.push_back(step++);
    }
    all.push_back(good[0]); // in blocks that held NaN
    at.push_back(25);
    const std::vector<Answer> got = run(engine, all, at);
    CHECK(identical(got[0], alone[0]));
    CHECK(identical(got[1], alone[1]));
    CHECK(got.back().tokens == alone[0].tokens);
    for (std::size_t i = 2; i + 1 < all.size(); i++) CHECK(got[i].finish == FinishReason::failed);
}

TEST_CASE("a request that leaves no token to come ends in a sentence", "[engine]") {
    const NanModel model("token_embd.weight", poison);
    Engine         engine         = load(model.path(), options(GENERATE(false, true)));
    Request        r              = methods({5, 6, 8})[0].second;
    r.sampling.allowed_tokens     = {20};
    r.sampling.bad_words          = {{20, 20, 20}};
    const std::vector<Output> out = run_one(engine, r);
    CHECK(out.back().finish == FinishReason::unmet);
    CHECK(out.back().message.find("no token can follow position 4") != std::string::npos);
}

TEST_CASE("chat and inspect leave with an error where the model is broken", "[chat][inspect][nan]") {
    const NanModel model("output_norm.weight", 0);
    const auto     sentence = [](const Finished& f) {
        INFO(f.err);
        CHECK(f.code == 1);
        CHECK(f.err.find("not finite") != std::string::npos);
    };
    const std::string path = model.path();
    sentence(run_program("chat", {"-m", path, "--device", "cpu", "-st", "-p", "Hello"}));
    sentence(run_program("chat", {"-m", path, "--device", "cpu"}, "Hello\nHello again\n"));
    for (const std::vector<std::string>& more :
         {std::vector<std::string>{"generate"}, {"generate", "--beam", "3"}, {"logits"}, {"logits", "--all"}}) {
        std::vector<std::string> arguments{more[0], path, "--ids", "5,6,8", "--device", "cpu"};
        arguments.insert(arguments.end(), more.begin() + 1, more.end());
        const Finished f = run_program("inspect", arguments);
        sentence(f);
        CHECK(f.out.empty());
    }
}

TEST_CASE("a NaN in any weight reaches the answer, of whatever type and instruction set", "[engine][nan]") {
    int n_runs = 0;
    for (const DType type : {DType::F32, DType::F16, DType::Q8_0, DType::Q4_K})
        for (const char* name :
             {"output.weight", "blk.0.attn_norm.weight", "blk.1.ffn_norm.weight", "blk.0.attn_q.weight",
              "blk.0.attn_k.weight", "blk.1.attn_v.weight", "blk.0.attn_output.weight", "blk.0.ffn_gate.weight",
              "blk.1.ffn_up.weight", "blk.0.ffn_down.weight"}) {
            const NanModel model(name, 0, type);
            for (const char* isa : {"plain", "avx2", "avxvnni", "avx512"}) {
                EngineOptions o       = options(false);
                o.device              = "cpu";
                o.isa                 = isa;
                Result<Engine> engine = Engine::load(model.path(), o);
                if (!engine) continue; // this machine lacks it
                CAPTURE(dtype_info(type).name, name, isa);
                const std::vector<Output> out = run_one(*engine, methods({5, 6, 8})[0].second);
                CHECK(out.back().finish == FinishReason::failed);
                n_runs++;
            }
        }
    CHECK(n_runs >= 40);
}
