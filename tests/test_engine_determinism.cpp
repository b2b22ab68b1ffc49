// A sequence's logits are bit-identical in any batch, with any chunking of its prompt, from the cache, recomputed after a
// preemption, and with any number of threads.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include "reference.h"

import quire.compute.kv_cache;
import quire.core.base;
import quire.model_file.config;
import quire.engine.engine;
import quire.schedule.request;
import quire.core.std;

#include "engine_tools.h"

using namespace quire;
using namespace quire::testing;

TEST_CASE("random mixes give every sequence the bits it gets alone") {
    const KvTypes types = std::array<KvTypes, 4>{DType::F16, DType::I8, DType::F8,
                                                 KvTypes(DType::BF16, DType::I8)}[std::size_t(GENERATE(0, 1, 2, 3))];
    for (const char* name : {"llama3-gqa-Q8_0.gguf", "mistral-swa-Q8_0.gguf", "qwen2-Q4_0.gguf", "gemma2-Q8_0.gguf",
                             "qwen3moe-Q8_0.gguf", "deepseek2-Q8_0.gguf", "gemma4-Q8_0.gguf", "lfm2-Q8_0.gguf",
                             "qwen35-k-Q4_K_M.gguf", "nemotron_h-Q8_0.gguf"}) {
        const std::string path = reference(cat("models/", name));
        const unsigned    seed = 20261121;
        CAPTURE(name, name_of(types), seed);
        std::mt19937 random(seed);
        auto         below = [&](int n) { return int(random() % unsigned(n)); };

        EngineOptions plain;
        plain.threads       = 1;
        plain.max_sequences = 1;
        plain.prefix_cache  = false;
        plain.kv_type       = types;
        Engine alone        = load(path, plain);

        // Prompts of odd lengths; some begin alike, so that the cache has something to find.
        std::vector<Request> requests;
        std::vector<Token>   common(70);
        for (Token& t : common) t = below(alone.config().vocab_size);
        for (int i = 0; i < 10; i++) {
            std::vector<Token> prompt(common.begin(), common.begin() + (i % 2 ? below(70) : 0));
            for (int n = 1 + below(60); n > 0; n--) prompt.push_back(below(alone.config().vocab_size));
            requests.push_back(greedy(std::move(prompt), 1 + below(60)));
            if (i == 3) requests.back().prompt_logprobs = 1;
        }
        std::vector<Answer> expected;
        for (const Request& r : requests) expected.push_back(run(alone, {r})[0]);

        std::uint64_t preempted = 0, cached = 0;
        for (int round = 0; round < 12; round++) {
            EngineOptions o;
            o.threads          = 1 + below(3);
            o.block_size       = std::array{1, 3, 8, 16, 32, 256}[std::size_t(below(6))];
            o.max_sequences    = 2 + below(8);
            o.max_batch_tokens = o.max_sequences + below(90);
            o.prefix_cache     = below(4) != 0;
            o.context          = 200;
            o.kv_type          = types;
            o.pipeline         = round % 2 == 1;
            const int one      = (200 + o.block_size - 1) / o.block_size;
            o.kv_blocks        = one + below(one); // often too few for all that run at once
            CAPTURE(round, *o.pipeline, o.threads, o.block_size, o.max_sequences, o.max_batch_tokens, o.prefix_cache,
                    o.kv_blocks);
            Engine           engine = load(path, o);
            std::vector<int> when(requests.size());
            for (int& step : when) step = below(30);
            const std::vector<Answer> got = run(engine, requests, when);
            for (std::size_t i = 0; i < got.size(); i++) {
                CAPTURE(i);
                CHECK(identical(got[i], expected[i]));
                cached += std::uint64_t(got[i].cached_tokens);
            }
            preempted += engine.stats().preemptions;
        }
        // Or the test tried too little. Where a state takes more memory than a sequence's K and V, states that do not run leave room for all.
        const bool states_leave_room =
            KvCache::state_bytes(alone.config()) > 200 * KvCache::bytes_per_token(alone.config(), types);
        CHECK((preempted > 0 || states_leave_room));
        CHECK((cached > 0 || alone.config().recurrent.taps > 0)); // a state is found only where a checkpoint is
    }
}

TEST_CASE("every instruction set agrees with the plain path within rounding") {
    const std::string path = reference("models/llama3-gqa-Q8_0.gguf");
    EngineOptions     o;
    o.isa                = "plain";
    o.kv_type            = DType::F32;
    Engine       plain   = load(path, o);
    const auto   request = greedy({5, 6, 7, 8, 9, 10, 11, 300, 301, 302, 5, 5, 6}, 8);
    const Answer want    = run(plain, {request})[0];
    for (const char* isa : {"avx2", "avxvnni", "avx512"}) {
        o.isa               = isa;
        o.device            = "cpu";
        Result<Engine> wide = Engine::load(path, o);
        if (!wide) continue; // not on this machine
        const Answer got = run(*wide, {request})[0];
        CHECK(got.tokens == want.tokens);
        float worst = 0;
        for (std::size_t i = 0; i < want.prompt_logits.size(); i++)
            worst = std::max(worst, std::abs(got.prompt_logits[i] - want.prompt_logits[i]));
        CHECK(worst < 1e-3f);
    }
}

TEST_CASE("cancelling at any moment leaves no block behind and no neighbour changed") {
    const std::string path = reference("models/llama3-gqa-Q8_0.gguf");
    EngineOptions     o;
    o.max_batch_tokens  = 24;
    o.max_sequences     = 3;
    o.pipeline          = GENERATE(false, true);
    Engine       engine = load(path, o);
    const auto   kept   = greedy({1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, 24);
    const Answer want   = run(engine, {kept})[0];
    for (int when = 0; when < 12; when++) {
        std::vector<RequestId> others;
        Result<RequestId>      id = engine.submit(kept);
        REQUIRE(id);
        for (int i = 0; i < 4; i++)
            others.push_back(*engine.submit(greedy(std::vector<Token>(std::size_t(40 + i), 7), 50)));
        std::vector<Output> events;
        std::vector<Token>  tokens;
        int                 cancelled = 0;
        for (int step = 0; engine.step(events); step++) {
            if (step == when)
                for (RequestId other : others) engine.cancel(other);
            engine.check_invariants();
        }
        for (const Output& e : events) {
            if (e.id == *id) tokens.insert(tokens.end(), e.tokens.begin(), e.tokens.end());
            cancelled += e.finish == FinishReason::cancelled;
        }
        CHECK(tokens == want.tokens);
        CHECK(cancelled == 4);
        engine.cancel(*id); // long over
        CHECK_FALSE(engine.step(events));
    }
}
