// Random schedules of requests of every kind, on a real model of each kind, in pools that are too small for them. QUIRE_LONG=1 runs twenty
// thousand, QUIRE_SEED chooses others.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <cstdlib>

#include "folder.h"
#include "process.h"
#include "reference.h"

import quire.core.base;
import quire.core.json;
import quire.core.std;
import quire.engine.engine;
import quire.model_file.config;
import quire.paging.snapshot;
import quire.schedule.request;
import quire.schedule.request_check;
import quire.schedule.scheduler;

#include "engine_tools.h"
#include "schedule_tools.h"

using namespace quire;
using namespace quire::testing;

// Dense, with sliding windows in all layers and in some, with experts, with latent attention; and with recurrent states: of convolutions, of
// the gated delta rule, of selective scans.
static constexpr std::array  kinds{"llama3-gqa-Q8_0.gguf", "mistral-swa-Q8_0.gguf", "gemma2-Q8_0.gguf",
                                  "qwen3moe-Q8_0.gguf",   "deepseek2-Q8_0.gguf",   "lfm2-Q8_0.gguf",
                                  "qwen35-k-Q4_K_M.gguf", "nemotron_h-Q8_0.gguf"};
static constexpr std::size_t first_with_states = 5;
// Types of K and V with and without scales.
static const std::array<KvTypes, 4> kv_choices{DType::F16, DType::I8, DType::F8, KvTypes(DType::I8, DType::BF16)};

TEST_CASE("random schedules: every request answers as it does alone, bit for bit") {
    const bool     all    = std::getenv("QUIRE_LONG") != nullptr;
    const char*    chosen = std::getenv("QUIRE_SEED");
    const unsigned seed   = chosen ? unsigned(std::atoi(chosen)) : 20261121u;
    CAPTURE(seed);
    const std::size_t kind   = std::size_t(GENERATE(0, 1, 2, 3, 4, 5, 6, 7));
    const bool        states = kind >= first_with_states;
    const std::string model  = reference(cat("models/", kinds[kind]));
    const KvTypes     types  = states ? kv_choices[0] : kv_choices[std::size_t(GENERATE(0, 1, 2, 3))]; // states are F32
    CAPTURE(model, name_of(types));
    std::mt19937 random(seed);
    auto         below = [&](int n) { return int(random() % unsigned(n)); };

    // The requests, with what each answers when it has an engine to itself.
    EngineOptions plain;
    plain.threads            = 1;
    plain.prefix_cache       = false;
    plain.context            = 160;
    plain.kv_type            = types;
    Engine             alone = load(model, plain);
    const int          vocab = alone.config().vocab_size;
    std::vector<Token> common(60);
    for (Token& t : common) t = below(vocab);
    std::vector<Request> requests;
    for (int i = 0; i < 48; i++) {
        std::vector<Token> prompt(common.begin(), common.begin() + (i % 3 ? below(60) : 0));
        for (int n = 1 + below(40); n > 0; n--) prompt.push_back(below(vocab));
        const int length = 1 + below(40);
        Request   r      = i % 2 ? sampled(prompt, length, random()) : greedy(prompt, length);
        if (i % 8 == 3) r.n = 2 + below(3);
        if (i % 8 == 5) r.best_of = 3;
        if (i % 8 == 6) r = beam(prompt, length, 2 + below(3));
        if (i % 16 == 8) r.prompt_logprobs = 1;
        if (i % 4 == 0) r.stop_tokens = {below(vocab), below(vocab), below(vocab)};
        requests.push_back(std::move(r));
    }
    std::vector<Answers> expected;
    for (const Request& r : requests) expected.push_back(run_one(alone, r));

    SchedulerStats sum;
    Folder         folder;                     // an engine may find what an earlier one has written
    std::uint64_t  cached = 0, from_files = 0; // tokens; records
    int            compared = 0;
    const int      n        = all ? 20'000 : types != DType::F16 ? 60 : kind == 0 ? 400 : 150;
    for (int schedule = 0; schedule < n; schedule++) {
        EngineOptions o;
        o.threads         = 1 + schedule % 2;
        o.block_size      = std::array{1, 8, 16, 32}[std::size_t(schedule % 4)];
        o.preemption_mode = std::array{PreemptionMode::automatic, PreemptionMode::swap,
                                       PreemptionMode::recompute}[std::size_t(schedule / 4 % 3)];
        o.prefix_cache    = schedule / 12 % 2 == 0;
        if (states) o.checkpoint_interval = 16; // prompts are short
        o.max_sequences = 4 + below(6);
        const int room  = below(60); // for tokens of prompts
        o.context       = 160;
        o.kv_type       = types;
        o.pipeline      = schedule / 24 % 2 == 1;
        std::vector<Task>        tasks;
        std::vector<std::size_t> which;
        int                      need = 1; // blocks that the largest of them takes alone
        for (int i = 0; i < 7; i++) {
            which.push_back(std::size_t(below(int(requests.size()))));
            Task t{requests[which.back()], below(20), below(6) == 0 ? below(60) : -1};
            t.request.priority = below(3) - 1;
            const int tokens   = int(t.request.prompt.size()) + t.request.max_tokens;
            need               = std::max(need, t.request.width() * ((tokens + o.block_size - 1) / o.block_size));
            // The pool has a state for each of max_sequences beside kv_blocks.
            if (states) o.max_sequences = std::max(o.max_sequences, states_needed(t.request));
            tasks.push_back(std::move(t));
        }
        o.max_batch_tokens = o.max_sequences + room;
        o.kv_blocks        = need + below(2 + need / 4);
        o.swap_blocks      = below(4) ? -1 : below(need);
        o.watermark        = below(2) * 0.05;
        // Room in host memory for what leaves the prefix cache, in three schedules of five.
        if (schedule % 5 > 1) o.kv_host_bytes = std::int64_t(1) << (14 + schedule % 5 * 2);
        // In one of these three also files, which need the prefix cache: with a thread, or in steps.
        if (schedule % 5 == 3 && o.prefix_cache) {
            o.kv_dir        = folder.path;
            o.kv_disk_bytes = std::int64_t(8) << 20;
            if (schedule % 2 == 0) o.kv_files.jobs = [] { return 2; };
        }
        CAPTURE(schedule, *o.pipeline, o.block_size, o.kv_blocks, o.swap_blocks, o.max_sequences, o.max_batch_tokens,
                int(o.preemption_mode), o.prefix_cache, o.kv_host_bytes, o.kv_dir);
        Engine     engine = load(model, o);
        const auto got    = run_all(engine, tasks);
        for (std::size_t i = 0; i < tasks.size(); i++) {
            cached += std::uint64_t(got[i].cached_tokens);
            if (got[i].finish == FinishReason::cancelled) continue;
            CAPTURE(i, which[i]);
            REQUIRE(identical(got[i], expected[which[i]]));
            compared++;
        }
        CHECK(totals(engine.snapshot()).used == 0);
        from_files += engine.stats().disk.read;
        const SchedulerStats& s = engine.stats().memory;
        sum.preemptions += s.preemptions;
        sum.swaps_in += s.swaps_in;
        sum.recomputations += s.recomputations;
        sum.priority_preemptions += s.priority_preemptions;
        sum.copied_blocks += s.copied_blocks;
        sum.forks += s.forks;
    }
    // Or the test tried too little.
    CHECK(sum.preemptions > 50);
    CHECK(sum.swaps_in > 10);
    CHECK(sum.recomputations > 10);
    CHECK(sum.priority_preemptions > 3);
    CHECK(sum.copied_blocks > 100);
    CHECK(sum.forks > 100);
    CHECK(cached > 5u * unsigned(n));
    CHECK(from_files > 0);
    CHECK(compared > 200);
}
