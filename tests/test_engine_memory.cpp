// Decoding methods and preemption on a real model: n, best_of, beams, pins, salts, swap, recomputation and priorities. Each
// request's answer is bit-identical to the one it gets alone.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <cstdlib>

#include "process.h"
#include "reference.h"

import quire.compute.cuda.backend;
import quire.core.base;
import quire.model_file.config;
import quire.engine.engine;
import quire.core.json;
import quire.schedule.request;
import quire.schedule.scheduler;
import quire.paging.snapshot;
import quire.core.std;

#include "engine_tools.h"
#include "schedule_tools.h"

using namespace quire;
using namespace quire::testing;

namespace {

std::string model() { return reference("models/llama3-gqa-Q8_0.gguf"); }

// One of each kind: dense, with sliding windows in all layers and in some, with experts, with latent attention, with heads of two sizes.
constexpr std::array kinds{"llama3-gqa-Q8_0.gguf", "mistral-swa-Q8_0.gguf", "gemma2-Q8_0.gguf",
                           "qwen3moe-Q8_0.gguf",   "deepseek2-Q8_0.gguf",   "gemma4-Q8_0.gguf"};

// Types of K and V with and without scales.
const std::array<KvTypes, 4> kv_choices{DType::F16, DType::I8, DType::F8, KvTypes(DType::I8, DType::BF16)};

bool pipelined = false; // the engines to come: each test runs in both orders

EngineOptions with_blocks(int n_blocks, int block_size = 16) {
    EngineOptions o;
    o.pipeline   = pipelined;
    o.threads    = 1;
    o.block_size = block_size;
    o.kv_blocks  = n_blocks;
    o.context    = 256;
    return o;
}

} // namespace

TEST_CASE("beams are those of transformers") {
    pipelined = GENERATE(false, true);
    for (const auto& [name, type] : {std::pair("llama3-gqa", "F16"), std::pair("gpt2", "F32")}) {
        EngineOptions o     = with_blocks(64);
        o.kv_type           = DType::F32;
        Engine       engine = load(reference(cat("models/", name, "-", type, ".gguf")), o);
        Result<Json> file   = json_parse(slurp(reference(cat("logits/", name, "/beams.json"))));
        REQUIRE(file);
        int n = 0;
        for (const Json& search : (*file)["searches"])
            for (const auto& item : search["k"].items()) {
                const std::string width    = item.key();
                const Json&       expected = item.value();
                Request           r =
                    beam(search["tokens"].get<std::vector<Token>>(), search["steps"].get<int>(), std::stoi(width));
                r.length_penalty = 0;
                CAPTURE(name, search["id"].get<std::string>(), width);
                const Answers got = run_one(engine, r);
                REQUIRE(got.by_index.size() == expected["beams"].size());
                for (std::size_t i = 0; i < expected["beams"].size(); i++) {
                    CHECK(got.by_index.at(int(i)).tokens == expected["beams"][i]["tokens"].get<std::vector<Token>>());
                    CHECK(std::abs(got.scores[i] - expected["beams"][i]["score"].get<double>()) < 1e-3);
                }
                CHECK(got.sharing.saved() > 0);
                n++;
            }
        CHECK(n >= 9);
    }
}

// Beam search by the book, on nothing but next-token distributions of an engine that runs one prompt at a time.
namespace {
struct Hypothesis {
    std::vector<Token> tokens; // generated
    double             logprob = 0, score = 0;
};

std::vector<Hypothesis> naive_beams(Engine& engine, const Request& r, Token end) {
    std::vector<Hypothesis> running(1), finished;
    const auto              width = std::size_t(r.beam_width);
    const auto              score = [&](const Hypothesis& h, int length) {
        return h.logprob / std::pow(double(length), double(r.length_penalty));
    };
    const auto keep_best = [&] {
        std::stable_sort(finished.begin(), finished.end(),
                         [](const auto& a, const auto& b) { return a.score > b.score; });
        if (finished.size() > width) finished.resize(width);
    };
    for (int step = 1; step <= r.max_tokens; step++) {
        struct Candidate {
            double      logprob;
            std::size_t parent;
            Token       token;
        };
        std::vector<Candidate> all;
        for (std::size_t b = 0; b < running.size(); b++) {
            Request next = greedy(r.prompt, 1);
            next.prompt.insert(next.prompt.end(), running[b].tokens.begin(), running[b].tokens.end());
            const Answers a      = run_one(engine, next);
            const auto&   logits = a.by_index.at(0).prompt_logits;
            double        limit = -1e30, total = 0;
            for (float v : logits) limit = std::max(limit, double(v));
            for (float v : logits) total += std::exp(double(v) - limit);
            for (std::size_t t = 0; t < logits.size(); t++)
                all.push_back({running[b].logprob + (double(logits[t]) - (limit + std::log(total))), b, Token(t)});
        }
        std::stable_sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.logprob > b.logprob; });
        std::vector<Hypothesis> next;
        for (std::size_t rank = 0; rank < 2 * width && next.size() < width; rank++) {
            Hypothesis h = running[all[rank].parent];
            h.tokens.push_back(all[rank].token);
            h.logprob = all[rank].logprob;
            if (all[rank].token != end) next.push_back(h);
            else if (rank < width) {
                h.score = score(h, step);
                finished.push_back(h);
            }
        }
        keep_best();
        running = next;
        if (finished.size() == width) {
            const bool   longest = r.early_stopping == EarlyStopping::never && r.length_penalty > 0;
            const double best    = score(running[0], longest ? r.max_tokens : step);
            if (r.early_stopping == EarlyStopping::yes || finished.back().score >= best) break;
        }
    }
    for (Hypothesis& h : running) {
        h.score = score(h, int(h.tokens.size()));
        finished.push_back(h);
    }
    std::stable_sort(finished.begin(), finished.end(), [](const auto& a, const auto& b) { return a.score > b.score; });
    finished.resize(std::min(finished.size(), std::size_t(r.n)));
    return finished;
}
} // namespace

TEST_CASE("beams that end: penalties and early stopping as a search by the book has them") {
    pipelined     = GENERATE(false, true);
    Engine engine = load(model(), with_blocks(64)), alone = load(model(), with_blocks(64));
    int    ended = 0;
    for (int kind = 0; kind < 3; kind++)
        for (float penalty : {0.0f, 1.0f, 2.0f, -0.5f}) {
            Request r        = beam(prompt_of(9 + kind, 40 * kind + 3), 7, 3);
            r.n              = 2;
            r.length_penalty = penalty;
            r.early_stopping =
                std::array{EarlyStopping::no, EarlyStopping::yes, EarlyStopping::never}[std::size_t(kind)];
            // An end token that comes up: the second best first token.
            Request       first = greedy(r.prompt, 2);
            const Answers probe = run_one(alone, first);
            const Token   end   = probe.by_index.at(0).logprobs[1].top[1].token;
            r.stop_tokens       = {end};
            CAPTURE(kind, penalty, end);
            const Answers got  = run_one(engine, r);
            const auto    want = naive_beams(alone, r, end);
            REQUIRE(got.by_index.size() == want.size());
            for (std::size_t i = 0; i < want.size(); i++) {
                CHECK(got.by_index.at(int(i)).tokens == want[i].tokens);
                CHECK(std::abs(got.scores[i] - want[i].score) < 1e-6);
                ended += want[i].tokens.back() == end;
            }
        }
    CHECK(ended > 0);
    CHECK(engine.snapshot().sequences.empty());
}

TEST_CASE("n answers compute the prompt once, and each is the one that its seed gives alone") {
    pipelined      = GENERATE(false, true);
    Engine  engine = load(model(), with_blocks(64)), alone = load(model(), with_blocks(64));
    Request r         = sampled(prompt_of(37), 20, 7);
    r.n               = 4;
    const Answers got = run_one(engine, r);
    CHECK(engine.stats().prefill_tokens == 37);
    CHECK(engine.stats().memory.forks == 3);
    CHECK(engine.stats().memory.copied_blocks == 3); // of the partly filled last block: n - 1
    CHECK(got.sharing.saved() > 0.3);
    REQUIRE(got.by_index.size() == 4);
    for (int i = 0; i < 4; i++) {
        const Answers one = run_one(alone, sampled(prompt_of(37), 20, 7 + std::uint64_t(i)));
        CHECK(quire::testing::identical(got.by_index.at(i), one.by_index.at(0)));
    }
    CHECK(got.by_index.at(0).tokens != got.by_index.at(1).tokens);
}

TEST_CASE("at a block boundary n answers copy nothing") {
    pipelined      = GENERATE(false, true);
    Engine  engine = load(model(), with_blocks(64));
    Request r      = sampled(prompt_of(32), 20, 7);
    r.n            = 4;
    run_one(engine, r);
    CHECK(engine.stats().memory.copied_blocks == 0);
}

TEST_CASE("best_of gives the best by mean log-probability") {
    pipelined      = GENERATE(false, true);
    Engine  engine = load(model(), with_blocks(64)), alone = load(model(), with_blocks(64));
    Request r                                              = sampled(prompt_of(21), 12, 90);
    r.n                                                    = 2;
    r.best_of                                              = 6;
    const Answers                                      got = run_one(engine, r);
    std::vector<std::pair<double, std::vector<Token>>> all;
    for (int i = 0; i < 6; i++) {
        const Answer one = run_one(alone, sampled(r.prompt, 12, 90 + std::uint64_t(i))).by_index.at(0);
        double       sum = 0;
        for (const PositionLogprobs& p : one.logprobs) sum += double(p.chosen.logprob);
        all.emplace_back(-sum / double(one.tokens.size()), one.tokens);
    }
    std::sort(all.begin(), all.end());
    REQUIRE(got.by_index.size() == 2);
    for (int i = 0; i < 2; i++) {
        CHECK(got.by_index.at(i).tokens == all[std::size_t(i)].second);
        CHECK(std::abs(got.scores[std::size_t(i)] + all[std::size_t(i)].first) < 1e-4);
        CHECK(got.by_index.at(i).logprobs.size() == 12);
    }
}

TEST_CASE("two equal prompts that arrive together are computed once") {
    pipelined = GENERATE(false, true);
    for (int n : {40, 48}) {
        Engine     engine = load(model(), with_blocks(64));
        const auto got    = run_all(engine, {{greedy(prompt_of(n), 8)}, {greedy(prompt_of(n), 8)}});
        CHECK(got[1].cached_tokens == (n == 40 ? 32 : 47)); // full blocks at once, or all but one token a step later
        CHECK(engine.stats().prefill_tokens == std::uint64_t(n + n - got[1].cached_tokens));
        CHECK(identical(got[0], got[1]));
    }
}

TEST_CASE("a cached prompt computes one token") {
    pipelined     = GENERATE(false, true);
    Engine engine = load(model(), with_blocks(64));
    run_one(engine, greedy(prompt_of(48), 4));
    const Answers again = run_one(engine, greedy(prompt_of(48), 4));
    CHECK(again.cached_tokens == 47);
    const Answers part = run_one(engine, greedy(prompt_of(43), 4)); // ends in the middle of the third block
    CHECK(part.cached_tokens == 42);
}

TEST_CASE("of a cancelled prompt every full block that was computed is found again") {
    pipelined          = GENERATE(false, true);
    EngineOptions o    = with_blocks(64);
    o.max_batch_tokens = 24;
    for (int steps : {1, 2, 3}) {
        Engine                  engine = load(model(), o);
        const Result<RequestId> id     = engine.submit(greedy(prompt_of(100), 4));
        REQUIRE(id.has_value());
        std::vector<Output> events;
        for (int i = 0; i < steps; i++) engine.step(events);
        engine.cancel(*id);
        while (engine.step(events)) {}
        REQUIRE(events.size() == 1);
        CHECK(events[0].finish == FinishReason::cancelled);
        engine.check_invariants();
        const int computed = int(engine.stats().prefill_tokens);
        CHECK(computed == 24 * steps);
        const Answers next = run_one(engine, greedy(prompt_of(110), 4)); // the same and more
        CHECK(next.cached_tokens >= computed / engine.options().block_size * engine.options().block_size);
        CHECK(int(engine.stats().prefill_tokens) == computed + 110 - next.cached_tokens);
    }
}

TEST_CASE("step_seconds cuts prompts by the time that steps take") {
    pipelined          = false;
    EngineOptions o    = with_blocks(64);
    o.max_sequences    = 1;
    o.max_batch_tokens = 64;
    const auto chunks  = [&](double seconds) {
        o.step_seconds          = seconds;
        Engine           engine = load(model(), o);
        std::vector<int> sizes;
        REQUIRE(engine.submit(greedy(prompt_of(110), 1)).has_value());
        std::vector<Output> events;
        do {
            engine.step(events);
            sizes.push_back(engine.stats().step_tokens);
        } while (events.empty());
        return sizes;
    };
    CHECK(chunks(0) == std::vector{64, 46});
    CHECK(chunks(1e9) == std::vector{8, 16, 32, 54}); // twice as many while there is time
    CHECK(chunks(1e-9) == std::vector{8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 6});
}

TEST_CASE("as many sequences with a state run at once as were asked for, beside the watermark") {
    pipelined                  = false;
    EngineOptions o            = with_blocks(68);
    o.max_sequences            = 64;
    o.max_batch_tokens         = 256;
    o.prefix_cache             = false;
    o.watermark                = 0.04;
    Engine              engine = load(reference("models/lfm2-Q8_0.gguf"), o);
    std::vector<Output> events;
    for (int i = 0; i < 64; i++) REQUIRE(engine.submit(greedy(prompt_of(3), 4)).has_value());
    engine.step(events);
    CHECK(engine.stats().step_tokens == 64 * 3);
}

TEST_CASE("as many sequences run at once as the device has room for, and no more than tokens in a step") {
    EngineOptions o = with_blocks(64);
    o.device        = "cpu";
    o.max_sequences = 0;
    CHECK(load(model(), o).options().max_sequences == 64);
    o.max_batch_tokens = 8;
    CHECK(load(model(), o).options().max_sequences == 8);
    if (n_cuda_devices() == 0) return;
    o.device           = "cuda";
    o.max_batch_tokens = 0;
    const int n        = load(model(), o).options().max_sequences;
    CHECK((n == 64 || n == 128 || n == 256 || n == 512 || n == 1024));
}

TEST_CASE("shared_step_seconds cuts prompts only beside requests that generate") {
    pipelined                  = false;
    EngineOptions o            = with_blocks(64);
    o.max_sequences            = 4;
    o.max_batch_tokens         = 64;
    o.shared_step_seconds      = 1e-9;
    Engine              engine = load(model(), o);
    std::vector<Output> events;
    REQUIRE(engine.submit(greedy(prompt_of(110), 1)).has_value());
    engine.step(events);
    CHECK(engine.stats().step_tokens == 64); // alone
    engine.step(events);
    CHECK(engine.stats().step_tokens == 46);
    REQUIRE(engine.submit(greedy(prompt_of(3), 100)).has_value());
    engine.step(events);
    Request beside    = greedy(prompt_of(120), 1);
    beside.cache_salt = "nothing of it is cached";
    REQUIRE(engine.submit(beside).has_value());
    for (int step = 0; step < 5; step++) {
        engine.step(events);
        CHECK(engine.stats().step_tokens == 8); // a token of the other, 7 of the prompt
    }
}

TEST_CASE("a salt keeps a cache to itself") {
    pipelined            = GENERATE(false, true);
    Engine        engine = load(model(), with_blocks(64));
    Request       r      = greedy(prompt_of(48), 4);
    const Answers plain  = run_one(engine, r);
    r.cache_salt         = "tenant one";
    CHECK(run_one(engine, r).cached_tokens == 0);
    CHECK(run_one(engine, r).cached_tokens == 47);
    r.cache_salt        = "tenant two";
    const Answers other = run_one(engine, r);
    CHECK(other.cached_tokens == 0);
    CHECK(identical(plain, other));
}

TEST_CASE("a pinned prefix outlives any pressure, and is let go on request") {
    pipelined      = GENERATE(false, true);
    Engine  engine = load(model(), with_blocks(20));
    Request pin;
    pin.prompt                 = prompt_of(85);
    pin.pin                    = true;
    const Result<RequestId> id = engine.submit(pin);
    REQUIRE(id);
    std::vector<Output> events;
    while (events.empty()) engine.step(events);
    REQUIRE(events.size() == 1);
    CHECK(events[0].done);
    for (int i = 0; i < 4; i++) run_one(engine, greedy(prompt_of(200, 100 + i), 40)); // fills all that is left
    auto task = prompt_of(85);
    for (Token t : prompt_of(10, 300)) task.push_back(t);
    const Answers hit = run_one(engine, greedy(task, 4));
    CHECK(hit.cached_tokens == 85);
    Snapshot view = engine.snapshot();
    CHECK(totals(view).pinned == 6);
    // 20 blocks less 6 are too few for this one: refused when it is first in the queue, with the sum.
    Request big           = greedy(prompt_of(240, 7), 10);
    big.return_logits     = false;
    const Answers refused = run_one(engine, big);
    CHECK(refused.finish == FinishReason::refused);
    CHECK(refused.message.find("6 of them pinned") != std::string::npos);
    engine.cancel(*id);
    engine.step(events);
    view = engine.snapshot();
    CHECK(totals(view).pinned == 0);
    CHECK(totals(view).used == 0);
    CHECK(run_one(engine, big).finish == FinishReason::length);
}

TEST_CASE("in every preemption mode a preempted request goes on as if nothing had been") {
    pipelined               = GENERATE(false, true);
    const std::string model = reference(cat("models/", kinds[std::size_t(GENERATE(0, 3, 4))]));
    const KvTypes     types = kv_choices[std::size_t(GENERATE(0, 1, 2, 3))];
    CAPTURE(model, name_of(types)); // but those whose windows leave room for both
    // vLLM's output was once incomplete after a recomputation.
    const Request a = greedy(prompt_of(30), 60), b = greedy(prompt_of(30, 200), 60);
    EngineOptions large  = with_blocks(64);
    large.kv_type        = types;
    Engine        roomy  = load(model, large);
    const Answers want_a = run_one(roomy, a), want_b = run_one(roomy, b);
    for (PreemptionMode mode : {PreemptionMode::automatic, PreemptionMode::swap, PreemptionMode::recompute})
        for (int block_size : {1, 8, 16, 32})
            for (bool cache : {true, false}) {
                EngineOptions o   = with_blocks((110 + block_size) / block_size + 1, block_size);
                o.preemption_mode = mode;
                o.prefix_cache    = cache;
                o.kv_type         = types;
                Engine     engine = load(model, o);
                const auto got    = run_all(engine, {{a}, {b}});
                CAPTURE(int(mode), block_size, cache);
                CHECK(identical(got[0], want_a));
                CHECK(identical(got[1], want_b));
                CHECK(got[0].n_preempted == 0);
                CHECK(got[1].n_preempted > 0);
                const SchedulerStats& s = engine.stats().memory;
                if (mode == PreemptionMode::swap) CHECK((s.swaps_out > 0 && s.swaps_in == s.swaps_out));
                if (mode == PreemptionMode::recompute) CHECK((s.swaps_out == 0 && s.recomputations > 0));
            }
}

TEST_CASE("several answers that outgrow the pool end where they end alone, whatever preempted them") {
    pipelined = GENERATE(false, true);
    for (const bool cache : {true, false})
        for (const bool shifts : {false, true}) {
            EngineOptions o    = with_blocks(24);
            o.swap_blocks      = 0;
            o.prefix_cache     = cache;
            Engine  engine     = load(model(), o);
            Request a          = greedy(prompt_of(20), 100); // equal answers: they share blocks after a recomputation
            a.n                = 6;
            a.priority         = 1;
            a.context_shift    = shifts;
            Request b          = greedy(prompt_of(40, 200), 30);
            b.n                = 4;
            const Answers want = run_one(engine, a);
            CHECK(want.by_index.at(0).finish == FinishReason::length);
            CAPTURE(cache, shifts);
            for (const int at : {5, 20, 40}) {
                const auto got = run_all(engine, {{a}, {b, at}});
                CHECK(got[0].n_preempted > 0);
                CHECK(identical(got[0], want));
            }
        }
}

TEST_CASE("blocks behind the window of every layer are given back, and the text stays the same") {
    const std::string path = reference("models/mistral-swa-Q8_0.gguf"); // a window of 32 in all layers
    const Request     r = greedy(prompt_of(40), 360), other = greedy(prompt_of(30, 100), 200);
    EngineOptions     o = with_blocks(64);
    o.context           = 400;
    Engine        roomy = load(path, o);
    const Answers want = run_one(roomy, r), want_other = run_one(roomy, other);
    o.kv_blocks      = 8; // 128 positions for two sequences, one of 400 and one of 230
    Engine     small = load(path, o);
    const auto got   = run_all(small, {{r}, {other}});
    CHECK(identical(got[0], want));
    CHECK(identical(got[1], want_other));
    CHECK(small.stats().preemptions == 0);
    CHECK(small.stats().memory.released_blocks >= 30);
    CHECK(totals(small.snapshot()).used == 0);
    small.check_invariants();
}

TEST_CASE("layers with a window give their blocks back beside layers that see all, and the text stays the same") {
    pipelined              = GENERATE(false, true);
    const std::string path = reference("models/gemma2-Q8_0.gguf"); // a window in every other layer
    const Request     r = greedy(prompt_of(40), 150), other = sampled(prompt_of(30, 100), 120, 3);
    Engine            roomy  = load(path, with_blocks(64));
    const int         window = roomy.config().sliding_window;
    REQUIRE(window < 64);
    const Answers want = run_one(roomy, r), want_other = run_one(roomy, other);
    CHECK(roomy.stats().memory.released_blocks > 0);
    for (int block_size : {4, 16})
        for (const auto mode : {PreemptionMode::swap, PreemptionMode::recompute}) {
            // Together they hold 190 + 150 positions of some layers and a window of the others.
            const int entries = (190 + block_size - 1) / block_size + (150 + block_size - 1) / block_size + 2,
                      seen    = 2 * (window / block_size + 3);
            EngineOptions o   = with_blocks((entries + seen) / 2 + 1, block_size);
            o.preemption_mode = mode;
            o.watermark       = 0;
            Engine     engine = load(path, o);
            const auto got    = run_all(engine, {{r}, {other}});
            CAPTURE(block_size, int(mode));
            CHECK(identical(got[0], want));
            CHECK(identical(got[1], want_other));
            CHECK(engine.stats().preemptions == 0);
            CHECK(totals(engine.snapshot()).used == 0);
            // And with less, where one of them has to wait.
            o.kv_blocks      = ((190 + block_size - 1) / block_size + window / block_size + 11) / 2;
            Engine     small = load(path, o);
            const auto again = run_all(small, {{r}, {other}, {r, 40}});
            CHECK(identical(again[0], want));
            CHECK(identical(again[1], want_other));
            CHECK(identical(again[2], want));
            CHECK(small.stats().preemptions > 0);
            CHECK(totals(small.snapshot()).used == 0);
        }
}

TEST_CASE("answers and beams that share blocks of several groups are those of a large pool") {
    pipelined               = GENERATE(false, true);
    const std::string path  = reference("models/gemma2-Q8_0.gguf");
    Request           many  = sampled(prompt_of(50), 90, 5);
    many.n                  = 3;
    const Request search    = beam(prompt_of(45, 7), 60, 3);
    Engine        roomy     = load(path, with_blocks(200));
    const Answers want_many = run_one(roomy, many), want_search = run_one(roomy, search);
    for (const auto mode : {PreemptionMode::swap, PreemptionMode::recompute})
        for (int block_size : {4, 16}) {
            EngineOptions o   = with_blocks(440 / block_size, block_size);
            o.preemption_mode = mode;
            Engine     engine = load(path, o);
            const auto got    = run_all(engine, {{many}, {search}, {many, 20}});
            CAPTURE(block_size, int(mode));
            CHECK(identical(got[0], want_many));
            CHECK(identical(got[1], want_search));
            CHECK(identical(got[2], want_many));
        }
}

TEST_CASE("a prompt is found again though the first blocks of a window are gone, in every family with windows") {
    pipelined              = GENERATE(false, true);
    const std::string path = reference(GENERATE("models/mistral-swa-Q8_0.gguf", "models/gemma2-Q8_0.gguf"));
    CAPTURE(path);
    EngineOptions o           = with_blocks(30, 8);
    o.watermark               = 0;
    Engine             engine = load(path, o);
    std::vector<Token> text   = prompt_of(150);
    const Request      r      = greedy(text, 30);
    const Answers      want   = run_one(engine, r);
    // Another text takes blocks that were given back first: those at the beginning of the windows.
    run_one(engine, greedy(prompt_of(60, 300), 4));
    const Answers again = run_one(engine, r);
    CHECK(identical(again, want));
    CHECK(again.cached_tokens >= 144); // all whole blocks before its last token
    CHECK(totals(engine.snapshot()).used == 0);
}

TEST_CASE("a text longer than the pool goes on after a preemption where its window fits") {
    pipelined              = GENERATE(false, true);
    const std::string path = reference("models/mistral-swa-Q8_0.gguf"); // a window of 32 in all layers
    const auto        kind =
        std::array{"greedy", "sampled", "two alike", "three", "beams"}[std::size_t(GENERATE(0, 1, 2, 3, 4))];
    Request r = greedy(prompt_of(30), 260);
    if (kind == std::string("sampled")) r = sampled(prompt_of(30), 260, 3);
    if (kind == std::string("two alike")) r.return_logits = false, r.n = 2;
    if (kind == std::string("three")) r = sampled(prompt_of(30), 260, 3), r.n = 3;
    if (kind == std::string("beams")) r.return_logits = false, r.beam_width = 2;
    r.priority          = 5;
    EngineOptions roomy = with_blocks(400);
    roomy.context       = 400;
    Engine        other = load(path, roomy);
    const Answers want  = run_one(other, r);
    for (PreemptionMode mode : {PreemptionMode::swap, PreemptionMode::recompute})
        for (int block_size : {1, 8, 16})
            for (bool cache : {true, false}) {
                EngineOptions o   = with_blocks(r.width() * ((31 + block_size - 1) / block_size + 3), block_size);
                o.context         = 400;
                o.preemption_mode = mode;
                o.prefix_cache    = cache;
                const int pool    = o.kv_blocks * block_size;
                CAPTURE(kind, int(mode), block_size, cache, pool);
                REQUIRE(pool < 290);
                // Two of them, each of which takes the pool for itself; the second while the text is computed again.
                const Request urgent = greedy(prompt_of(pool - 8, 300), 5), next = greedy(prompt_of(pool - 8, 500), 5);
                Engine        engine = load(path, o);
                const auto    got    = run_all(engine, {{r}, {urgent, 200}, {next, 207}});
                CHECK(identical(got[0], want));
                CHECK(got[0].n_preempted == 2);
                CHECK(got[1].by_index.at(0).tokens.size() == 5);
                if (mode == PreemptionMode::recompute) CHECK(engine.stats().memory.recomputations >= 2);
                CHECK(totals(engine.snapshot()).used == 0);
            }
}

TEST_CASE("a prompt longer than the pool gives back what is behind its window") {
    pipelined              = GENERATE(false, true);
    const std::string path = reference("models/mistral-swa-Q8_0.gguf");
    EngineOptions     o    = with_blocks(64);
    o.context              = 600;
    o.max_batch_tokens     = 48;
    Engine  roomy          = load(path, o);
    Request r              = greedy(prompt_of(500), 20);
    if (GENERATE(false, true)) r.prompt_logprobs = 1;
    const Answers want = run_one(roomy, r);
    o.kv_blocks        = 5;
    Engine     small   = load(path, o);
    const auto got     = run_all(small, {{r}, {r}});
    CHECK(identical(got[0], want));
    CHECK(identical(got[1], want));
    CHECK(totals(small.snapshot()).used == 0);
}

TEST_CASE("blocks that were given back are found again by the next prompt that begins like theirs") {
    const std::string path   = reference("models/mistral-swa-Q8_0.gguf");
    Engine            engine = load(path, with_blocks(64));
    const Answers     first  = run_one(engine, greedy(prompt_of(200), 40));
    CHECK(engine.stats().memory.released_blocks > 8);
    std::vector<Token> longer = prompt_of(200);
    longer.insert(longer.end(), first.by_index.at(0).tokens.begin(), first.by_index.at(0).tokens.end());
    const Answers second = run_one(engine, greedy(longer, 4));
    CHECK(second.cached_tokens == 224); // every block that became full
}

TEST_CASE("a full swap pool falls back to recomputation") {
    pipelined       = GENERATE(false, true);
    const Request a = greedy(prompt_of(30), 60), b = greedy(prompt_of(30, 200), 60);
    Engine        roomy  = load(model(), with_blocks(64));
    const Answers want_b = run_one(roomy, b);
    for (int swap_blocks : {0, 1}) {
        EngineOptions o   = with_blocks(9);
        o.preemption_mode = PreemptionMode::swap;
        o.swap_blocks     = swap_blocks;
        Engine     engine = load(model(), o);
        const auto got    = run_all(engine, {{a}, {b}});
        CHECK(identical(got[1], want_b));
        CHECK(engine.stats().memory.recomputations > 0);
        CHECK(engine.stats().memory.swaps_out == 0);
    }
}

TEST_CASE("a request that outgrows the pool alone ends with what it has; the next one runs") {
    pipelined         = GENERATE(false, true);
    Engine     engine = load(model(), with_blocks(4));
    const auto got    = run_all(engine, {{greedy(prompt_of(30), 200)}, {greedy(prompt_of(20, 9), 5)}});
    CHECK(got[0].finish == FinishReason::length);
    CHECK(got[0].by_index.at(0).tokens.size() == 64 - 30 + 1);
    CHECK(got[1].by_index.at(0).tokens.size() == 5);
    Request many      = sampled(prompt_of(20), 200, 3);
    many.n            = 3;
    const Answers all = run_one(engine, many); // three at once, until the pool is full
    CHECK(all.finish == FinishReason::length);
    CHECK(all.by_index.size() == 3);
    for (const auto& [i, a] : all.by_index) CHECK(a.tokens.size() > 3);
    const Answers beams = run_one(engine, beam(prompt_of(20), 200, 3));
    CHECK(beams.finish == FinishReason::length);
    CHECK(beams.by_index.size() == 3);
    CHECK(engine.snapshot().sequences.empty());
    CHECK(totals(engine.snapshot()).used == 0);
}

TEST_CASE("requests that cannot be are refused in one sentence") {
    pipelined     = GENERATE(false, true);
    Engine engine = load(model(), with_blocks(4));
    auto   why    = [&](auto change) {
        Request r = greedy(prompt_of(20), 5);
        change(r);
        Result<RequestId> id = engine.submit(r);
        return id ? std::string() : id.error().message;
    };
    CHECK(why([](Request& r) { r.n = 0; }).find("n is 0") == 0);
    CHECK(why([](Request& r) { r.n = 3, r.best_of = 2; }).find("best_of is 2, less than") == 0);
    CHECK(why([](Request& r) { r.beam_width = 2, r.n = 3; }).find("beam_width is 2") == 0);
    CHECK(why([](Request& r) { r.n = 17; }).find("needs 17 sequences at once; 16") != std::string::npos);
    CHECK(why([](Request& r) { r.n = 4; }).find("needs 5 blocks of 16") != std::string::npos);
    CHECK(why([](Request& r) { r.length_penalty = std::numeric_limits<float>::quiet_NaN(); }).find("length_penalty") ==
          0);
    CHECK(why([](Request&) {}).empty());
}

TEST_CASE("an urgent request takes the place of a later one, never of its like, and nobody starves") {
    pipelined                   = GENERATE(false, true);
    EngineOptions o             = with_blocks(64);
    o.max_sequences             = 2;
    Engine               engine = load(model(), o);
    std::vector<Task>    tasks;
    std::vector<Answers> alone;
    for (int i = 0; i < 8; i++) {
        tasks.push_back({greedy(prompt_of(20 + i, 10 * i), 30), i < 2 ? 0 : 4});
        tasks.back().request.priority = i < 2 ? 5 : i == 7 ? -1 : 0;
    }
    Engine other = load(model(), with_blocks(64));
    for (const Task& t : tasks) alone.push_back(run_one(other, t.request));
    const auto got = run_all(engine, tasks);
    for (std::size_t i = 0; i < tasks.size(); i++) CHECK(identical(got[i], alone[i]));
    CHECK(engine.stats().memory.priority_preemptions >= 2);             // the two of low urgency
    CHECK(engine.stats().memory.priority_preemptions <= 8);             // each at most a few times
    for (std::size_t i = 2; i < 7; i++) CHECK(got[i].n_preempted <= 1); // equals only give way to the urgent one
}

TEST_CASE("cancelled in any state, every block comes back") {
    pipelined = GENERATE(false, true);
    for (int when = 0; when < 40; when++) {
        EngineOptions o          = with_blocks(12);
        o.preemption_mode        = when % 2 ? PreemptionMode::swap : PreemptionMode::recompute;
        o.max_batch_tokens       = 24;
        Engine            engine = load(model(), o);
        std::vector<Task> tasks;
        for (int i = 0; i < 4; i++) {
            Request r = i == 1 ? beam(prompt_of(40, i), 40, 3) : sampled(prompt_of(40, i), 40, 1);
            if (i == 2) r.n = 2;
            tasks.push_back({r, 0, i == 3 ? -1 : when + i});
        }
        const auto got = run_all(engine, tasks);
        CHECK(got[3].by_index.at(0).tokens.size() == 40);
        const MemoryTotals t = totals(engine.snapshot());
        CHECK(t.used == 0);
        CHECK(engine.snapshot().n_swap_used == 0);
    }
}

TEST_CASE("rounds of chats have the same bits with every set of prefix cache, host memory, files and swap space") {
    const std::string name = GENERATE("llama3-gqa-Q8_0.gguf", "mistral-swa-Q8_0.gguf", "gemma2-Q8_0.gguf",
                                      "deepseek2-Q8_0.gguf", "gemma4-Q8_0.gguf", "lfm2-Q8_0.gguf",
                                      "qwen35-k-Q4_K_M.gguf", "nemotron_h-Q8_0.gguf", "mamba2-F16.gguf");
    CAPTURE(name);
    if (name.starts_with("mamba") && !has_reference(cat("models/", name))) return; // in the full set only
    const std::string           model  = reference(cat("models/", name));
    const std::filesystem::path folder = cat("/tmp/quire-chats-", getpid());
    // Four users take turns, with room for the text of one.
    // `leaves`: the model leaves between the rounds, and what host memory has stays.
    const auto run = [&](bool cache, bool host, bool swap, bool files = false, bool leaves = false) {
        EngineOptions o;
        o.threads             = 1;
        o.block_size          = 8;
        o.kv_blocks           = name.starts_with("mamba") ? 3 : 13;
        o.max_sequences       = 2;
        o.swap_blocks         = swap ? 13 : 0;
        o.prefix_cache        = cache;
        o.kv_host_bytes       = host ? std::int64_t(64) << 20 : 0;
        o.context             = 128;
        o.checkpoint_interval = 16;
        if (files) o.kv_dir = folder.string();
        Engine                          engine = load(model, o);
        std::vector<Answers>            answers;
        std::vector<std::vector<Token>> texts;
        for (int user = 0; user < 4; user++) texts.push_back(prompt_of(40, 50 * user));
        for (int round = 0; round < 3; round++) {
            if (leaves && round > 0) {
                const std::shared_ptr<const ParkedCache> parked = engine.park(std::size_t(64) << 20);
                REQUIRE(parked);
                Result<Engine> next = Engine::load(model, o, {}, {}, parked.get());
                REQUIRE(next);
                engine = std::move(*next);
                CHECK(std::size_t(engine.n_taken()) * parked->block_bytes == parked->bytes());
                engine.check_invariants();
            }
            for (std::vector<Token>& text : texts) {
                answers.push_back(run_one(engine, greedy(text, 4)));
                const std::vector<Token>& said = answers.back().by_index.at(0).tokens;
                text.insert(text.end(), said.begin(), said.end());
                for (Token token : prompt_of(9, int(text.size()))) text.push_back(token);
            }
        }
        return std::pair(std::move(answers), engine.stats());
    };
    const auto [expected, alone] = run(false, false, false);
    for (int set = 1; set < 8; set++) {
        const bool cache = set & 1, host = set & 2, swap = set & 4;
        CAPTURE(cache, host, swap);
        const auto [got, stats] = run(cache, host, swap);
        for (std::size_t i = 0; i < got.size(); i++) {
            CAPTURE(i);
            CHECK(identical(got[i], expected[i]));
        }
        CHECK((stats.loaded_tokens > 0) == (cache && host));
        CHECK(stats.loaded_tokens <= stats.cached_tokens);
        if (!cache || !host) continue;
        const auto [without, left] = run(cache, host, swap, false, true);
        for (std::size_t i = 0; i < got.size(); i++) CHECK(identical(without[i], expected[i]));
        CHECK(left.loaded_tokens > 0);           // of the last round alone
        for (const bool again : {false, true}) { // and once more with the files of the first time
            const auto [with_files, more] = run(cache, host, swap, true);
            for (std::size_t i = 0; i < got.size(); i++) CHECK(identical(with_files[i], expected[i]));
            CHECK((more.disk_tokens > 0) == again);
        }
        std::filesystem::remove_all(folder);
    }
}

TEST_CASE("what a model has left in host memory is for the same model and settings, as far as there is room") {
    const std::string model = reference("models/llama3-gqa-Q8_0.gguf");
    EngineOptions     o;
    o.threads         = 1;
    o.kv_blocks       = 40;
    o.swap_blocks     = 0;
    o.kv_host_bytes   = std::int64_t(64) << 20;
    o.context         = 256;
    const auto prompt = prompt_of(200, 3);
    const auto with   = [&](const EngineOptions& options, const ParkedCache* parked) {
        Result<Engine> engine = Engine::load(model, options, {}, {}, parked);
        REQUIRE(engine);
        return std::move(*engine);
    };
    const auto left_by = [&](const EngineOptions& options, std::size_t most) {
        Engine engine = with(options, nullptr);
        (void)run_one(engine, greedy(prompt, 8));
        return engine.park(most);
    };
    const auto parked = left_by(o, std::size_t(64) << 20);
    REQUIRE(parked);
    CHECK(parked->units.size() == 12); // blocks of 16 tokens; the last one is not full
    CHECK(with(o, parked.get()).n_taken() == 12);

    const auto some = left_by(o, 5 * parked->block_bytes + 1);
    REQUIRE(some);
    CHECK(some->bytes() == 5 * parked->block_bytes);
    Engine engine = with(o, some.get());
    CHECK(engine.n_taken() == 5);
    (void)run_one(engine, greedy(prompt, 8));
    CHECK(engine.stats().loaded_tokens == 80); // the beginning
    EngineOptions small = o;
    small.kv_host_bytes = 4 * std::int64_t(parked->block_bytes + 4096);
    Engine    little    = with(small, parked.get());
    const int room      = little.options().tier_blocks;
    CHECK(room < 12);
    CHECK(little.n_taken() == room);

    CHECK_FALSE(left_by(o, 0));
    EngineOptions other = o;
    other.kv_type       = DType::F32;
    CHECK(with(other, parked.get()).n_taken() == 0);
    CHECK(Engine::load(reference("models/qwen2-Q4_0.gguf"), o, {}, {}, parked.get())->n_taken() == 0);
    other               = o;
    other.kv_host_bytes = 0;
    CHECK(with(other, parked.get()).n_taken() == 0);
    CHECK_FALSE(left_by(other, std::size_t(64) << 20));
}

TEST_CASE("the second turn of a chat goes on behind the first answer, with the bits of a whole prompt") {
    for (const char* name : {"lfm2-Q8_0", "nemotron_h-Q8_0", "qwen35-k-Q4_K_M"}) {
        CAPTURE(name);
        const std::string   path = reference(cat("models/", name, ".gguf"));
        const EngineOptions o    = [] {
            EngineOptions options       = small_blocks(true, 400, 2);
            options.context             = 256;
            options.checkpoint_interval = 64;
            return options;
        }();
        std::vector<Token> prompt;
        for (int i = 0; i < 50; i++) prompt.push_back(Token(10 + i * 7 % 300));
        Engine             engine = load(path, o), other = load(path, o);
        const Answer       first = run(engine, {greedy(prompt, 55)})[0];
        std::vector<Token> next  = prompt;
        next.insert(next.end(), first.tokens.begin(), first.tokens.end());
        for (int i = 0; i < 20; i++) next.push_back(Token(400 + i));
        const Answer second = run(engine, {greedy(next, 12)})[0], whole = run(other, {greedy(next, 12)})[0];
        CHECK(second.cached_tokens == (50 + 55 - 1) / 4 * 4);
        CHECK(whole.cached_tokens == 0);
        CHECK(identical(second, whole));
    }
}

TEST_CASE("draft tokens do not change the context that a model with states gets") {
    for (const char* name : {"lfm2-Q8_0.gguf", "nemotron_h-Q8_0.gguf", "llama3-gqa-Q8_0.gguf"}) {
        EngineOptions o{.threads = 1, .kv_blocks = 12, .max_sequences = 3};
        const int     context = load(reference(cat("models/", name)), o).options().context;
        o.drafts.on           = true;
        CHECK(load(reference(cat("models/", name)), o).options().context == context);
    }
}
