// The systems that the paper compares with: buddy allocator, chunks, admission, what the slots are used for; worked by hand.
#include <catch2/catch_test_macros.hpp>

#include "reference.h"

import quire.baseline.buddy_allocator;
import quire.baseline.systems;
import quire.core.base;
import quire.core.std;
import quire.engine.engine;
import quire.paging.block;
import quire.paging.block_manager;
import quire.schedule.request;
import quire.schedule.scheduler;
import quire.step.plan;

#include "engine_tools.h"
#include "scheduler_tools.h"

using namespace quire;
using namespace quire::testing;

namespace {

SchedulerOptions options_of(System system, int n_blocks) {
    SchedulerOptions o = small(n_blocks);
    o.reservations     = reservations_of(system);
    o.max_batch_tokens = 256;
    o.max_sequences    = 8;
    return o;
}

std::vector<BlockId> table_of(const StepPlan& plan, std::size_t sequence) {
    return {plan.groups[0].parts[0].tables.begin() + plan.groups[0].table_start[sequence],
            plan.groups[0].parts[0].tables.begin() + plan.groups[0].table_start[sequence + 1]};
}

} // namespace

TEST_CASE("buddy allocator: the shortest run is split, and joined again") {
    BuddyAllocator buddy(13); // 0..7, 8..11, 12
    CHECK(buddy.n_free() == 13);
    CHECK(buddy.take(3) == BlockRun{8, 2});
    CHECK(buddy.take(3) == BlockRun{0, 2}); // half of the eight
    CHECK(buddy.take(2) == BlockRun{4, 1});
    CHECK(buddy.take(1) == BlockRun{12, 0});
    CHECK(buddy.n_free() == 2);
    CHECK(!buddy.take(3));
    CHECK(buddy.take(1) == BlockRun{6, 0});
    CHECK(!buddy.take(2)); // one block is free
    buddy.give_back({4, 1});
    CHECK(buddy.take(2) == BlockRun{4, 1});
    buddy.give_back({4, 1});
    buddy.give_back({6, 0}); // with 7, then with 4 and 5
    CHECK(buddy.take(4) == BlockRun{4, 2});
    buddy.give_back({4, 2});
    buddy.give_back({0, 2});
    CHECK(buddy.take(8) == BlockRun{0, 3});
    buddy.give_back({0, 3});
    buddy.give_back({8, 2});
    buddy.give_back({12, 0});
    CHECK(buddy.n_free() == 13);
    CHECK(!buddy.take(9)); // there never were sixteen
}

TEST_CASE("buddy allocator: the paper's pool holds seven longest sequences") {
    BuddyAllocator buddy(15728 / 16); // 512 + 256 + 128 + 64 + 16 + 4 + 2 + 1 blocks
    CHECK(buddy.most_runs(128) == 7);
    for (int i = 0; i < 7; i++) CHECK(buddy.take(128).has_value());
    CHECK(!buddy.take(128));
    CHECK(buddy.n_free() == 87); // 8.85 % of the slots: Fig. 2's external fragmentation of Orca (Max)
}

TEST_CASE("buddy allocator: a random walk never hands out a block twice") {
    BuddyAllocator        buddy(983);
    std::vector<BlockRun> taken;
    std::vector<int>      owner(983, 0);
    std::mt19937          random(7);
    for (int i = 0; i < 20'000; i++) {
        if (random() % 2 && !taken.empty()) {
            std::swap(taken[random() % taken.size()], taken.back());
            for (int k = 0; k < taken.back().size(); k++) owner[std::size_t(taken.back().first + k)]--;
            buddy.give_back(taken.back());
            taken.pop_back();
        } else if (const auto run = buddy.take(1 + int(random() % 130))) {
            REQUIRE(run->first + run->size() <= 983);
            for (int k = 0; k < run->size(); k++) REQUIRE(owner[std::size_t(run->first + k)]++ == 0);
            taken.push_back(*run);
        }
        REQUIRE(buddy.n_free() == int(std::ranges::count_if(owner, [](int n) { return n == 0; })));
    }
    for (const BlockRun& run : taken) buddy.give_back(run);
    CHECK(buddy.take(512) == BlockRun{0, 9});
    CHECK(buddy.take(256) == BlockRun{512, 8});
}

TEST_CASE("what each system reserves") {
    CHECK(slots_wanted(System::orca_max, 7, 25, 2048) == 2048);
    CHECK(slots_wanted(System::faster_transformer, 7, 25, 2048) == 2048);
    CHECK(slots_wanted(System::orca_pow2, 7, 25, 2048) == 7 + 32); // the paper's example of 25 and 32
    CHECK(slots_wanted(System::orca_pow2, 7, 32, 2048) == 7 + 32);
    CHECK(slots_wanted(System::orca_pow2, 1024, 1000, 2048) == 2048);
    CHECK(slots_wanted(System::orca_pow2, 1500, 600, 2048) == 2048);
    CHECK(slots_wanted(System::orca_oracle, 7, 25, 2048) == 32);
    for (System system : systems) CHECK(find_system(name_of(system)) == system);
    CHECK(!find_system("orca"));
}

TEST_CASE("Fig. 3: two requests of 2048 and 512 slots") {
    for (auto [context, prompt, output, reserved, internal] :
         {std::array{2048, 7, 3, 2, 2038}, std::array{512, 3, 2, 1, 507}}) {
        SchedulerOptions o = options_of(System::orca_max, 128);
        o.block_size       = 16;
        o.context          = context;
        Scheduler s(o);
        StepPlan  plan;
        s.add(1, request(prompt, output));
        run_step(s, plan);
        const MemoryUse use = s.memory_use();
        CHECK(use.tokens == prompt + 1); // and one generated
        CHECK(use.reservation == reserved);
        CHECK(use.internal == internal);
        CHECK(use.other == 2048 - context);
    }
}

TEST_CASE("orca-max: so many requests as longest sequences fit, the others wait in order") {
    Scheduler s(options_of(System::orca_max, 40)); // 32 + 8 blocks, two chunks of 16
    StepPlan  plan;
    s.add(1, request(5, 3));
    s.add(2, request(9, 4));
    s.add(3, request(1, 2));
    run_step(s, plan);
    REQUIRE(plan.n_seqs() == 2);
    CHECK(table_of(plan, 0) == std::vector<BlockId>{0, 1});
    CHECK(table_of(plan, 1) == std::vector<BlockId>{16, 17, 18});
    const MemoryUse use = s.memory_use(); // known: 6 and 10 tokens; at last 8 and 13; asked for 64 each; 160 slots
    CHECK(use.tokens == 16);
    CHECK(use.reservation == 5);
    CHECK(use.internal == 107);
    CHECK(use.other == 32);
    CHECK(run_step(s, plan).empty());
    CHECK(run_step(s, plan) == std::vector<RequestId>{1});
    CHECK(plan.n_seqs() == 2);
    CHECK(run_step(s, plan) == std::vector<RequestId>{2});
    CHECK(plan.context_lens == std::vector<std::int32_t>{12, 1}); // the third took the chunk of the first
    CHECK(table_of(plan, 0) == std::vector<BlockId>{16, 17, 18});
    CHECK(table_of(plan, 1) == std::vector<BlockId>{0});
    CHECK(run_step(s, plan) == std::vector<RequestId>{3});
    CHECK(s.blocks().n_used() == 0);
}

TEST_CASE("orca-oracle: chunks are rounded up, and nobody overtakes") {
    Scheduler s(options_of(System::orca_oracle, 16));
    StepPlan  plan;
    s.add(1, request(14, 6));  // 20 slots: 5 blocks, a chunk of 8
    s.add(2, request(30, 10)); // 40 slots: a chunk of 16
    s.add(3, request(2, 2));   // 1 block, which would be free
    run_step(s, plan);
    CHECK(plan.n_seqs() == 1);
    CHECK(s.n_waiting() == 2);
    const MemoryUse use = s.memory_use();
    CHECK(use.tokens == 15);
    CHECK(use.reservation == 5);
    CHECK(use.internal == 0);
    CHECK(use.other == 44); // rounding, and the half that nobody got
    for (int i = 0; i < 4; i++) CHECK(run_step(s, plan).empty());
    CHECK(run_step(s, plan) == std::vector<RequestId>{1});
    run_step(s, plan);
    CHECK(plan.context_lens == std::vector<std::int32_t>{30}); // the second has all of the pool
    CHECK(s.n_waiting() == 1);
}

TEST_CASE("orca-pow2: the output is rounded up, then the whole chunk") {
    Scheduler s(options_of(System::orca_pow2, 24)); // 16 + 8 blocks
    StepPlan  plan;
    s.add(1, request(5, 9));  // 5 + 16 slots: 6 blocks, a chunk of 8
    s.add(2, request(4, 16)); // 4 + 16 slots: 5 blocks, half of the sixteen
    s.add(3, request(5, 17)); // 5 + 32 slots: 10 blocks, a chunk of 16
    run_step(s, plan);
    REQUIRE(plan.n_seqs() == 2);
    CHECK(table_of(plan, 0) == std::vector<BlockId>{16, 17});
    CHECK(table_of(plan, 1) == std::vector<BlockId>{0});
    CHECK(s.n_waiting() == 1);
    const MemoryUse use = s.memory_use(); // known: 6 and 5 tokens; at last 14 and 20; asked for 21 and 20; 96 slots
    CHECK(use.tokens == 11);
    CHECK(use.reservation == 23);
    CHECK(use.internal == 7);
    CHECK(use.other == 55);
    for (int i = 0; i < 7; i++) CHECK(run_step(s, plan).empty());
    CHECK(run_step(s, plan) == std::vector<RequestId>{1}); // 16 blocks are free, but not in one piece
    for (int i = 0; i < 6; i++) CHECK(run_step(s, plan).empty());
    CHECK(s.n_waiting() == 1);
    CHECK(run_step(s, plan) == std::vector<RequestId>{2});
    run_step(s, plan);
    CHECK(table_of(plan, 0) == std::vector<BlockId>{0, 1});
    CHECK(s.n_waiting() == 0);
}

TEST_CASE("orca: every sample and every beam of a request has a chunk of its own") {
    for (const bool beams : {false, true}) {
        CAPTURE(beams);
        Scheduler s(options_of(System::orca_oracle, 16));
        StepPlan  plan;
        Request   r                  = request(7, 5); // 12 slots: 3 blocks, a chunk of 4
        (beams ? r.beam_width : r.n) = 3;
        s.add(1, r);
        s.add(2, request(7, 9)); // 4 blocks, the last chunk
        s.add(3, request(1, 1));
        const auto items = s.schedule(plan);
        REQUIRE(plan.n_seqs() == 2); // three chunks before there are three sequences
        CHECK(table_of(plan, 1) == std::vector<BlockId>{12, 13});
        CHECK(s.n_waiting() == 1);
        MemoryUse use = s.memory_use(); // known: 7 and 7 tokens; at last 3 * 12 and 16; 64 slots
        CHECK(use.tokens == 14);
        CHECK(use.reservation == 38);
        CHECK(use.internal == 0);
        CHECK(use.other == 12);
        s.commit();
        SequenceGroup& group = *items[0].group;
        group.prompt_done = items[1].group->prompt_done = true;
        Sequence& first                                 = *group.sequences[0];
        for (Sequence* sequence : {&first, &s.fork(group, first), &s.fork(group, first)}) s.append(*sequence, 7);
        s.append(*items[1].sequence, 7);
        s.schedule(plan);
        REQUIRE(plan.n_seqs() == 4);
        CHECK(table_of(plan, 0) == std::vector<BlockId>{0, 1});
        CHECK(table_of(plan, 1) == std::vector<BlockId>{4, 5});
        CHECK(table_of(plan, 2) == std::vector<BlockId>{8, 9});
        CHECK(plan.moves.copies.size() == 4); // two blocks for two forks: nothing is shared
        use = s.memory_use();                 // 3 * 8 and 8
        CHECK(use.tokens == 32);
        CHECK(use.reservation == 20);
        CHECK(use.other == 12);
        s.commit();
        s.remove(1);
        s.remove(2);
        s.check_invariants();
    }
}

TEST_CASE("quire: what is not a token is in the last block of a sequence or free; what is shared counts once") {
    SchedulerOptions o = options_of(System::quire, 16); // 64 slots
    Scheduler        s(o);
    StepPlan         plan;
    Request          r = request(6, 5);
    r.n                = 3;
    s.add(1, r);
    const auto items = s.schedule(plan);
    CHECK(s.memory_use().tokens == 6);
    CHECK(s.memory_use().other == 58);
    s.commit();
    SequenceGroup& group = *items[0].group;
    group.prompt_done    = true;
    Sequence& first      = *group.sequences[0];
    for (Sequence* sequence : {&first, &s.fork(group, first), &s.fork(group, first)}) s.append(*sequence, 7);
    CHECK(s.memory_use().tokens == 7); // two blocks, which all three share
    s.schedule(plan);
    CHECK(plan.moves.copies.size() == 2);
    CHECK(s.memory_use().tokens == 4 + 3 * 3); // one full block, three with three tokens
    CHECK(s.memory_use().reservation == 0);
    CHECK(s.memory_use().internal == 0);
    CHECK(s.memory_use().other == 51);
    s.commit();
    s.remove(1);
    CHECK(s.memory_use().tokens == 0);
    // A pinned prefix of 6 tokens, and a request that begins with it.
    Request pin = request(6, 1);
    pin.pin     = true;
    s.add(2, pin);
    const auto pinned = s.schedule(plan);
    s.commit();
    s.pin(*pinned[0].group);
    CHECK(s.memory_use().tokens == 6);
    s.add(3, request(7, 5));
    s.schedule(plan);
    CHECK(s.memory_use().tokens == 6 + 3); // the full block is shared, the other one copied
    s.commit();
    s.check_invariants();
}

TEST_CASE("faster-transformer: nobody joins a batch") {
    Scheduler s(options_of(System::faster_transformer, 48)); // three chunks
    StepPlan  plan;
    s.add(1, request(4, 2));
    s.add(2, request(4, 4));
    run_step(s, plan);
    CHECK(plan.n_seqs() == 2);
    s.add(3, request(4, 1)); // a chunk is free
    CHECK(run_step(s, plan) == std::vector<RequestId>{1});
    CHECK(plan.n_seqs() == 2);
    CHECK(run_step(s, plan).empty());
    CHECK(plan.n_seqs() == 1);
    CHECK(run_step(s, plan) == std::vector<RequestId>{2});
    CHECK(s.n_waiting() == 1);
    CHECK(run_step(s, plan) == std::vector<RequestId>{3});
}

TEST_CASE("a request that asks for too much is refused with the numbers") {
    Scheduler     s(options_of(System::orca_oracle, 24)); // 16 + 8 blocks
    const Request fits = request(40, 24), several = [] {
        Request r = request(20, 20); // 40 slots: a chunk of 16
        r.n       = 2;
        return r;
    }();
    CHECK(s.check_request(fits));
    const auto refused = s.check_request(several);
    REQUIRE(!refused);
    CHECK(refused.error().message ==
          "orca-oracle reserves 2 chunks of 40 slots for the request; the whole pool has 1 of that size");
    Request pin = request(4, 1);
    pin.pin     = true;
    CHECK(!s.check_request(pin));
}

TEST_CASE("forks get a chunk and a copy of the KV") {
    Scheduler s(options_of(System::orca_oracle, 32));
    StepPlan  plan;
    Request   r = request(6, 2); // 8 slots, two blocks a chunk
    r.n         = 3;
    s.add(1, r);
    const auto items = s.schedule(plan);
    s.commit();
    SequenceGroup& group = *items[0].group;
    CHECK(table_of(plan, 0) == std::vector<BlockId>{0, 1});
    group.prompt_done = true;
    Sequence& first   = *group.sequences[0];
    Sequence* forks[] = {&s.fork(group, first), &s.fork(group, first)};
    for (Sequence* sequence : {&first, forks[0], forks[1]}) s.append(*sequence, 7);
    // The first one ends before the others have a chunk: one of them stays in its place.
    s.free(group, first, FinishReason::cancelled);
    s.schedule(plan);
    REQUIRE(plan.n_seqs() == 2);
    CHECK(table_of(plan, 0) == std::vector<BlockId>{0, 1});
    CHECK(table_of(plan, 1) == std::vector<BlockId>{2, 3});
    REQUIRE(plan.moves.copies.size() == 2);
    CHECK(plan.moves.copies[0].from == 0);
    CHECK(plan.moves.copies[0].to == 2);
    CHECK(plan.moves.copies[1].from == 1);
    CHECK(plan.moves.copies[1].to == 3);
    s.commit();
    s.remove(1);
    s.check_invariants();
    CHECK(s.blocks().n_used() == 0);
}

TEST_CASE("the tokens of every system are those of a request alone") {
    const std::string path = reference("models/llama3-gqa-Q8_0.gguf");
    EngineOptions     one;
    one.threads                = 1;
    one.max_sequences          = 4;
    one.prefix_cache           = false;
    Engine               alone = load(path, one);
    std::mt19937         random(20261123);
    const auto           below = [&](int n) { return int(random() % unsigned(n)); };
    std::vector<Request> requests;
    for (int i = 0; i < 9; i++) {
        std::vector<Token> prompt;
        for (int n = 1 + below(60); n > 0; n--) prompt.push_back(below(alone.config().vocab_size));
        Request r              = greedy(std::move(prompt), 1 + below(40));
        r.return_logits        = false;
        r.sampling.temperature = i % 3 == 1 ? 1.0f : 0.0f;
        r.sampling.seed        = std::uint64_t(i);
        if (i % 3 == 1) r.n = 3;
        if (i % 3 == 2) r.beam_width = 4, r.n = 2;
        requests.push_back(r);
    }
    const auto tokens = [](Engine& engine, const std::vector<Request>& of) {
        std::map<std::pair<RequestId, int>, std::vector<Token>> out;
        for (const Request& r : of) REQUIRE(engine.submit(r));
        std::vector<Output> events;
        for (bool more = true; more;) {
            more = engine.step(events);
            engine.check_invariants();
        }
        for (const Output& e : events) {
            auto& got = out[{e.id, e.index}];
            got.insert(got.end(), e.tokens.begin(), e.tokens.end());
        }
        return out;
    };
    std::map<std::pair<RequestId, int>, std::vector<Token>> expected;
    for (const Request& r : requests) expected.merge(tokens(alone, {r}));
    REQUIRE(expected.size() == 3 + 9 + 6);
    for (System system : systems)
        for (bool pipeline : {false, true})
            for (int block_size : {1, 16}) {
                EngineOptions o;
                o.threads       = 1;
                o.reservations  = reservations_of(system);
                o.pipeline      = pipeline;
                o.block_size    = block_size;
                o.context       = 128;
                o.max_sequences = 9;
                o.kv_blocks     = 700 / block_size; // five longest sequences
                CAPTURE(name_of(system), pipeline, block_size);
                Engine engine = load(path, o);
                CHECK(tokens(engine, requests) == expected);
                CHECK(engine.stats().blocks_used == 0);
            }
}
