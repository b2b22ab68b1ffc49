// The pipelined order: step n + 1 starts before the events of step n are delivered, and is planned while step n runs. On a CPU a
// step is finished when its start returns. The tests show that whatever happens in between, the answers are bit-identical to
// those of the plain order.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <cstdlib>
#include <new>

#include "reference.h"

import quire.core.base;
import quire.model_file.config;
import quire.engine.engine;
import quire.schedule.request;
import quire.decode.sampler;
import quire.schedule.scheduler;
import quire.paging.snapshot;
import quire.core.std;

#include "engine_tools.h"

using namespace quire;
using namespace quire::testing;

// Counts what this thread takes from the heap.
namespace {
thread_local std::size_t n_allocations = 0;
} // namespace

#if defined(__has_feature) && __has_feature(thread_sanitizer)
constexpr bool counted = false; // ThreadSanitizer has operators of its own
#else
constexpr bool counted = true;
void*          operator new(std::size_t n) {
    n_allocations++;
    if (void* memory = std::malloc(n > 0 ? n : 1)) return memory;
    throw std::bad_alloc();
}
void* operator new(std::size_t n, const std::nothrow_t&) noexcept {
    n_allocations++;
    return std::malloc(n > 0 ? n : 1);
}
void operator delete(void* memory) noexcept { std::free(memory); }
// NOLINTNEXTLINE(clang-analyzer-cplusplus.NewDelete): the analyzer takes what it frees for freed by the caller
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
#endif

namespace {

EngineOptions ordered(bool pipelined) {
    EngineOptions o = small_blocks(pipelined, 128, 4);
    o.context       = 128;
    return o;
}

std::string model() { return reference("models/llama3-gqa-Q8_0.gguf"); }

std::vector<Token> prompt_of(int n, int first) {
    std::vector<Token> tokens;
    for (int i = 0; i < n; i++) tokens.push_back(5 + (first + i * 37) % 600);
    return tokens;
}

struct Told {
    std::map<std::pair<RequestId, int>, std::vector<Token>> tokens; // by request and answer
    std::map<std::pair<RequestId, int>, FinishReason>       finish;
    std::map<RequestId, int>                                cached;
    std::set<RequestId>                                     done;
    bool                                                    operator==(const Told&) const = default;

    void take(std::vector<Output>& events) {
        for (const Output& e : events) {
            CHECK_FALSE(done.contains(e.id)); // nothing comes after the end
            const std::pair key{e.id, e.index};
            tokens[key].insert(tokens[key].end(), e.tokens.begin(), e.tokens.end());
            finish[key]  = e.finish;
            cached[e.id] = e.cached_tokens;
            if (e.done) done.insert(e.id);
        }
        events.clear();
    }
};

// `between` is called after each step with the number of the step whose events are there, from 0.
Told told_by(Engine& engine, const std::vector<Request>& requests,
             const std::function<void(int, Told&)>& between = {}) {
    Told                told;
    std::vector<Output> events;
    for (const Request& r : requests) REQUIRE(engine.submit(r));
    const bool pipelined = *engine.options().pipeline;
    for (int step = pipelined ? -1 : 0; engine.step(events); step++) {
        told.take(events);
        if (between && step >= 0) between(step, told);
        engine.check_invariants();
        REQUIRE(step < 10'000);
    }
    told.take(events);
    return told;
}

} // namespace

TEST_CASE("pipelined: the events of a step come while the next one is under way", "[engine]") {
    Engine engine = load(model(), ordered(true));
    REQUIRE(engine.submit(greedy(prompt_of(6, 1), 5)));
    std::vector<Output> events;
    CHECK(engine.step(events));
    CHECK(events.empty()); // the prompt runs
    for (int i = 0; i < 5; i++) {
        CHECK(engine.step(events));
        REQUIRE(events.size() == std::size_t(i + 1));
        CHECK(engine.stats().steps == std::uint64_t(i + 1));
        CHECK(engine.stats().blocks_used == (i < 4 ? (6 + i + 1 + 3) / 4 : 0)); // a place for the last token
        engine.check_invariants();
        if (i == 4) continue;
        const Snapshot now = engine.snapshot(true);
        REQUIRE(now.sequences.size() == 1);
        CHECK(now.sequences[0].n_tokens == 6 + i + 1);
        CHECK(now.sequences[0].n_computed == 6 + i);
    }
    CHECK(events.back().done);
    CHECK_FALSE(engine.step(events));
    CHECK(engine.stats().planned_ahead == 4); // all but the prompt's
}

TEST_CASE("pipelined: sequences that end in the middle of a batch", "[engine]") {
    Engine               plain = load(model(), ordered(false));
    std::vector<Request> requests;
    for (int i = 0; i < 9; i++) {
        Request r = greedy(prompt_of(5 + 3 * i, 40 * i), 12 + 2 * i);
        if (i % 3 == 1) r.sampling.temperature = 1, r.sampling.seed = std::uint64_t(i);
        if (i % 2 == 0) { // a stop token that comes
            const std::vector<Token> alone = told_by(plain, {r}).tokens.begin()->second;
            r.stop_tokens                  = {alone[std::size_t(3 + i)]};
        }
        requests.push_back(std::move(r));
    }
    Engine     first = load(model(), ordered(false)), second = load(model(), ordered(true));
    const Told want = told_by(first, requests), got = told_by(second, requests);
    CHECK(got == want);
    int stopped = 0;
    for (const auto& [key, finish] : want.finish) stopped += finish == FinishReason::stop;
    CHECK(stopped == 5);
    CHECK(second.stats().planned_ahead > second.stats().steps / 3);
    CHECK(second.stats().steps == first.stats().steps);
    CHECK(second.stats().blocks_used == 0);
    CHECK(first.stats().planned_ahead == 0);
}

TEST_CASE("pipelined: the end of generation itself", "[engine]") {
    Told told[2];
    for (bool pipelined : {false, true}) {
        Engine               engine = load(model(), ordered(pipelined));
        std::vector<Request> requests;
        for (int i = 0; i < 6; i++) {
            Request r              = greedy(prompt_of(7, 11 * i), 30);
            r.ignore_end           = false;
            r.sampling.temperature = 1.5f;
            r.sampling.seed        = std::uint64_t(i);
            for (Token t = 0; t < engine.config().vocab_size; t++)
                if (engine.tokenizer().is_end(t)) r.sampling.logit_bias.emplace_back(t, 8.0f);
            requests.push_back(std::move(r));
        }
        told[pipelined] = told_by(engine, requests);
    }
    CHECK(told[0] == told[1]);
    int stopped = 0;
    for (const auto& [key, finish] : told[0].finish) stopped += finish == FinishReason::stop;
    CHECK(stopped >= 3);
}

TEST_CASE("pipelined: cancelled and handed in while a step is under way", "[engine]") {
    for (int when = 0; when < 10; when++) {
        Told told[2];
        for (bool pipelined : {false, true}) {
            EngineOptions o             = ordered(pipelined);
            o.max_batch_tokens          = 24;
            Engine               engine = load(model(), o);
            std::vector<Request> requests;
            for (int i = 0; i < 3; i++) requests.push_back(greedy(prompt_of(10 + 8 * i, 50 * i), 20));
            requests[2].n                    = 2;
            requests[2].sampling.temperature = 1;
            told[pipelined]                  = told_by(engine, requests, [&](int step, Told&) {
                if (step == when) engine.cancel(2);
                if (step == when + 4) engine.cancel(3, 1);
                if (step == when + 2) REQUIRE(engine.submit(greedy(prompt_of(9, 7), 6)));
            });
            CHECK(engine.stats().blocks_used == 0);
        }
        CAPTURE(when);
        // The ones that nobody cancelled are whole; of the others comes a part, at most a step more or less.
        for (RequestId id : {1, 4}) {
            CHECK(told[0].tokens[{id, 0}] == told[1].tokens[{id, 0}]);
            CHECK(told[1].finish[{id, 0}] == FinishReason::length);
        }
        CHECK(told[0].tokens[{3, 0}] == told[1].tokens[{3, 0}]);
        CHECK(told[1].finish[{2, 0}] == FinishReason::cancelled);
        const auto size = [&](bool pipelined, RequestId id, int index) {
            return int(told[pipelined].tokens[{id, index}].size());
        };
        CHECK(std::abs(size(true, 2, 0) - size(false, 2, 0)) <= 1);
    }
}

TEST_CASE("pipelined: whoever waits starts as soon as there is room", "[engine]") {
    // More than may run, too few blocks for all, some more urgent: the same steps run the same tokens.
    for (int blocks : {128, 24}) {
        Told          told[2];
        std::uint64_t steps[2], planned = 0;
        for (bool pipelined : {false, true}) {
            EngineOptions o             = ordered(pipelined);
            o.kv_blocks                 = blocks;
            o.context                   = 64;
            Engine               engine = load(model(), o);
            std::vector<Request> requests;
            for (int i = 0; i < 10; i++) {
                Request r  = greedy(prompt_of(6 + i, 17 * i), 8 + 5 * (i % 4));
                r.priority = i % 3 == 2 ? -1 : 0;
                requests.push_back(std::move(r));
            }
            told[pipelined]  = told_by(engine, requests);
            steps[pipelined] = engine.stats().steps;
            if (pipelined) planned = engine.stats().planned_ahead;
        }
        CAPTURE(blocks);
        CHECK(told[0] == told[1]);
        CHECK(steps[1] == steps[0]);
        CHECK(planned > 0);
    }
}

TEST_CASE("pipelined: a decoding method of the caller's own, from one step to the next", "[engine]") {
    const auto likeliest = [](Scheduler& scheduler, std::span<const Scheduled> items, std::span<const float> logits,
                              std::vector<Output>& out) {
        const std::size_t vocab = items.empty() ? 0 : logits.size() / std::size_t(items.back().first_logit_row + 1);
        for (const Scheduled& item : items) {
            if (!item.samples) continue;
            item.group->prompt_done = true;
            const Token token       = argmax(logits.subspan(std::size_t(item.first_logit_row) * vocab, vocab));
            scheduler.append(*item.sequence, token);
            Output& event = out.emplace_back();
            event.id      = item.group->id;
            event.tokens  = {token};
            event.finish  = scheduler.ending(*item.group, *item.sequence, false);
            event.done    = event.finish != FinishReason::none;
            if (event.done) scheduler.free(*item.group, *item.sequence, event.finish);
            if (event.done) scheduler.remove_finished(event.id);
        }
    };
    Request request                = greedy(prompt_of(9, 3), 20);
    request.sampling.logprobs      = -1;
    request.return_logits          = false;
    Engine                   plain = load(model(), ordered(false));
    const std::vector<Token> want  = told_by(plain, {request}).tokens.begin()->second;
    for (int on : {0, 3, 7})
        for (int off : {8, 100}) {
            Engine engine = load(model(), ordered(true));
            if (on == 0) engine.decode_with(likeliest);
            const Told told = told_by(engine, {request}, [&](int step, Told&) {
                if (step == on) engine.decode_with(likeliest);
                if (step == off) engine.decode_with({});
            });
            CHECK(told.tokens.begin()->second == want);
            CHECK(told.done.size() == 1);
            CHECK(engine.stats().planned_ahead < 20);
        }
}

TEST_CASE("pipelined: an engine that goes while a step is under way", "[engine]") {
    std::optional<Engine> engine = load(model(), ordered(true));
    std::vector<Output>   events;
    for (int steps = 1; steps < 4; steps++) {
        for (int i = 0; i < 3; i++) REQUIRE(engine->submit(greedy(prompt_of(9 + i, i), 20)));
        for (int i = 0; i < steps; i++) CHECK(engine->step(events));
        engine = load(model(), ordered(true)); // the old one goes
    }
    CHECK_FALSE(engine->step(events));
}

TEST_CASE("a step takes memory for nothing but its events", "[engine]") {
    // Answers that are ranked come at the end: until then there is nothing to hand out.
    const bool pipelined         = GENERATE(false, true);
    Engine     engine            = load(model(), ordered(pipelined));
    Request    request           = greedy(prompt_of(9, 3), 60);
    request.return_logits        = false;
    request.sampling.logprobs    = -1;
    request.sampling.temperature = 1;
    request.best_of              = 2;
    const auto run               = [&](int seed) { // what the steps of decoding took
        std::size_t         taken = 0;
        std::vector<Output> events;
        events.reserve(16);
        for (int i = 0; i < 2; i++) {
            request.sampling.seed = std::uint64_t(seed + i);
            REQUIRE(engine.submit(request));
        }
        for (int step = 0;; step++) {
            const std::size_t before = n_allocations;
            if (!engine.step(events)) break;
            if (step > 3 && events.empty()) taken += n_allocations - before;
        }
        CHECK(events.size() == 2);
        return taken;
    };
    run(1); // lists find their sizes
    CHECK((n_allocations > 0 || !counted));
    CHECK(run(10) == 0);
    CHECK((engine.stats().planned_ahead > 100) == pipelined);
}
