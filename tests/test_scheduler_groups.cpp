// Sequences whose layers remember different things: windows, several cache groups, recurrent states.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

import quire.core.base;
import quire.core.std;
import quire.paging.block;
import quire.paging.block_manager;
import quire.schedule.request;
import quire.schedule.scheduler;
import quire.step.plan;

#include "scheduler_tools.h"

using namespace quire;
using namespace quire::testing;

// -- windows: what no layer sees any more has no block, neither when it is computed again

TEST_CASE(
    "a prompt that is longer than the pool runs in chunks where its window fits, and comes back after a preemption") {
    SchedulerOptions o        = small(7); // 28 tokens
    o.context                 = 256;
    o.layout.groups[0].window = 12;
    o.n_swap                  = 0;
    o.prefix_cache            = GENERATE(true, false);
    Scheduler s(o);
    StepPlan  plan;
    Request   low = request(100, 60, 1000);
    low.priority  = 5;
    REQUIRE(s.check_request(low));
    s.add(1, low);
    CHECK(steps_to_first_token(s, 1, plan) < 30);
    for (int i = 0; i < 20; i++) run_step(s, plan);
    Request high = request(23, 5, 2000); // with its answer the whole pool
    s.add(2, high);
    run_step(s, plan);
    CHECK(s.stats().priority_preemptions == 1);
    CHECK(s.n_running() == 1);
    CHECK(run_all(s) == std::vector<RequestId>{2, 1});
    CHECK(s.stats().recomputations == 1);
    // The window has to fit.
    o.n_blocks = 3;
    CHECK_FALSE(Scheduler(o).check_request(request(100, 60)));
    o.n_blocks = 4;
    CHECK(Scheduler(o).check_request(request(100, 60)));
    Request pin = request(100, 60);
    pin.pin     = true; // is kept whole
    CHECK_FALSE(Scheduler(o).check_request(pin));
}

// -- cache groups

TEST_CASE("a plan has the tables of every group, each from its window on") {
    SchedulerOptions o = small(60);
    o.context          = 256;
    o.layout.groups    = {CacheGroup{0, 1, {}, {}}, CacheGroup{6, 2, {}, {}}};
    Scheduler s(o);
    StepPlan  plan;
    s.add(1, request(20, 20));
    for (int step = 0; step < 10; step++) {
        run_step(s, plan);
        REQUIRE(plan.groups.size() == 2);
        REQUIRE(plan.groups[0].parts.size() == 1);
        REQUIRE(plan.groups[1].parts.size() == 2);
        std::set<BlockId> all;
        for (const GroupPlan& group : plan.groups)
            for (const GroupPlan::Part& part : group.parts)
                for (int row = 0; row < plan.n_tokens(); row++) {
                    const int     position = plan.positions[std::size_t(row)];
                    const BlockId block    = part.tables[std::size_t(group.origin(0) + position / 4)];
                    CHECK(part.slots[std::size_t(row)] == block * 4 + position % 4);
                    all.insert(block);
                }
        CHECK(all.size() >= 3); // no two groups, and no two blocks of an entry, are one
    }
    const int length = plan.context_lens[0];
    CHECK(s.blocks().n_released(s.find(1)->sequences[0]->table, 1) == (length - 6 + 1) / 4);
    CHECK(s.blocks().n_released(s.find(1)->sequences[0]->table, 0) == 0);
    CHECK(s.stats().released_blocks > 0);
    CHECK(run_all(s).size() == 1);
    CHECK(s.blocks().n_used() == 0);
}

TEST_CASE("requests of every kind end, whatever groups a model has") {
    const std::vector<std::vector<CacheGroup>> layouts{
        {{0, 1, {}, {}}, {6, 1, {}, {}}},
        {{0, 2, {}, {}}, {9, 3, {}, {}}},
        {{12, 1, {}, {}}, {5, 2, {}, {}}},
        {{0, 1, {}, {}}, {0, 1, {}, {}}, {8, 1, {}, {}}, {1, 1, {}, {}}}};
    SchedulerStats sum;
    for (unsigned seed = 0; seed < 120; seed++) {
        std::mt19937     random(seed);
        auto             below = [&](int n) { return int(random() % unsigned(n)); };
        SchedulerOptions o     = small(70 + below(40));
        o.layout.groups        = layouts[seed % layouts.size()];
        o.context              = 128;
        o.n_swap               = below(2) * 120;
        o.preemption_mode      = below(2) ? PreemptionMode::swap : PreemptionMode::recompute;
        o.max_batch_tokens     = 8 + below(40);
        Scheduler s(o);
        const int n = 3 + below(5);
        for (int i = 0; i < n; i++) {
            Request r  = request(1 + below(30), 20 + below(60), below(2) ? 0 : Token(100 * i));
            r.n        = 1 + below(2);
            r.priority = below(3);
            if (s.check_request(r)) s.add(RequestId(i) + 1, r);
            else s.add(RequestId(i) + 1, request(3, 3));
        }
        CAPTURE(seed);
        CHECK(run_all(s, 2000).size() == std::size_t(n));
        CHECK(s.blocks().n_used() == 0);
        sum.released_blocks += s.stats().released_blocks;
        sum.swaps_in += s.stats().swaps_in;
        sum.swaps_out += s.stats().swaps_out;
        sum.preemptions += s.stats().preemptions;
        sum.recomputations += s.stats().recomputations;
        sum.copied_blocks += s.stats().copied_blocks;
    }
    CHECK(sum.released_blocks > 100);
    CAPTURE(sum.preemptions, sum.swaps_out);
    CHECK(sum.swaps_in > 0);
    CHECK(sum.recomputations > 0);
    CHECK(sum.copied_blocks > 0);
}

// -- recurrent states

namespace {

// A model with one block to an entry and states of so many blocks.
SchedulerOptions with_states(int n_blocks, int unit, int interval) {
    SchedulerOptions o = small(n_blocks);
    CacheGroup       state;
    state.blocks      = unit;
    state.layer.state = std::size_t(unit) * 256;
    o.layout.groups.push_back(state);
    o.layout.block_bytes  = 256;
    o.checkpoint_interval = interval;
    return o;
}

// Runs all requests; returns how many tokens were computed.
int tokens_computed(Scheduler& s) {
    StepPlan plan;
    int      n = 0;
    while (!s.idle()) run_step(s, plan), n += plan.n_tokens();
    return n;
}

} // namespace

TEST_CASE("the second turn of a chat computes its new tokens and at most a checkpoint interval") {
    constexpr int    interval = 512, first = 8000, answer = 90, more = 37;
    SchedulerOptions o = with_states(9000, 20, interval);
    o.context          = 16000;
    o.max_batch_tokens = 256;
    Scheduler          s(o);
    Request            turn = request(first, answer);
    std::vector<Token> text = turn.prompt;
    s.add(1, turn);
    CHECK(tokens_computed(s) == first + answer - 1);
    CHECK(s.stats().checkpoints == first / interval + 2); // and the ends of the prompt and of the answer
    text.insert(text.end(), answer, 7);                   // as the model answers
    for (int i = 0; i < more; i++) text.push_back(Token(20'000 + i));
    Request next = request(1, 5);
    next.prompt  = text;
    s.add(2, next);
    const int computed = tokens_computed(s);
    CHECK(computed >= more + 4);
    CHECK(computed <= more + 4 + interval);
    CHECK(computed == int(text.size()) - (first + answer - 1) / 4 * 4 + 4); // from the end of the first answer
    // Another prompt that parts within the text goes on from the checkpoint before.
    Request apart = next;
    apart.prompt.resize(6001);
    apart.prompt.push_back(3);
    s.add(3, apart);
    CHECK(tokens_computed(s) == 6002 - 6001 / interval * interval + 4);
    s.check_invariants();
    CHECK(s.blocks().n_used() == 0);
}

TEST_CASE("prompts that end before, at and behind a checkpoint are found as far as it reaches") {
    for (int n = 29; n <= 36; n++) {
        CAPTURE(n);
        Scheduler s(with_states(200, 3, 16)); // checkpoints after 16 and 32 tokens, and at the end of a prompt
        s.add(1, request(n, 2));
        CHECK(tokens_computed(s) == n + 1);
        s.add(2, request(n, 2));
        // The one near the end leaves 8 tokens; the last token is computed in any case.
        CHECK(tokens_computed(s) == n + 1 - (n > 32 ? 32 : (n - 8) / 4 * 4));
        CHECK(s.blocks().n_used() == 0);
    }
}

TEST_CASE("the next turn goes on before the generation prompt that it does not repeat") {
    for (int n = 100; n < 116; n++)
        for (int tail = 0; tail <= 8; tail++) { // tokens at the end of the prompt that are another text's later
            CAPTURE(n, tail);
            SchedulerOptions o = with_states(400, 3, 64);
            o.context          = 256;
            Scheduler s(o);
            s.add(1, request(n, 3));
            (void)tokens_computed(s);
            Request next = request(n - tail, 2);
            for (int i = 0; i < 30; i++) next.prompt.push_back(1000 + i);
            s.add(2, next);
            const int computed = tokens_computed(s);
            const int from     = tail == 0 && n % 4 == 0 ? n : (n - 8) / 4 * 4; // or where the answer began
            CHECK(computed == n - tail + 30 + 1 - from);
        }
}

TEST_CASE("an answer leaves a checkpoint at its last full block, if it is long enough and alone") {
    constexpr int interval = 64, prompt = 40;
    for (int answer : {1, 5, 6, 7, 8, 30, 55, 56, 57, 90})
        for (int n : {1, 2}) {
            CAPTURE(answer, n);
            SchedulerOptions o = with_states(400, 3, interval);
            o.context          = 256;
            Scheduler s(o);
            Request   turn = request(prompt, answer);
            turn.n         = n;
            s.add(1, turn);
            (void)run_all(s);
            Request next = request(prompt, 1);
            next.prompt.insert(next.prompt.end(), std::size_t(answer), 7);
            next.prompt.insert(next.prompt.end(), 10, 8);
            s.add(2, next);
            const int written = prompt + answer - 1, end = written / 4 * 4, before = end >= 64 ? end / 64 * 64 : 32;
            const int from = n == 1 && end - before >= interval / 8 ? end : before;
            CHECK(tokens_computed(s) == int(next.prompt.size()) - from);
            s.check_invariants();
            CHECK(s.blocks().n_used() == 0);
        }
}

TEST_CASE("the state for an answer's end gives way before a request does") {
    // Two answers of 40 tokens, a state is 6 blocks: 2 * (12 + 6) blocks without, 2 * 6 more with the noted states.
    SchedulerOptions o = with_states(40, 6, 64);
    o.watermark        = 0;
    Scheduler s(o);
    s.add(1, request(8, 40));
    s.add(2, request(8, 40, 100));
    CHECK(run_all(s).size() == 2);
    CHECK(s.stats().preemptions == 0);
    s.check_invariants();
}

TEST_CASE("an admission counts the states that a request will hold") {
    // 40 tokens are 10 blocks, a state is 12.
    Request r = request(39, 1);
    CHECK(Scheduler(with_states(22, 12, 0)).check_request(r));
    CHECK_FALSE(Scheduler(with_states(21, 12, 0)).check_request(r));
    r.n = 3; // three states beside the one that they share, and two more last blocks
    CHECK(Scheduler(with_states(10 + 2 + 4 * 12, 12, 0)).check_request(r));
    CHECK_FALSE(Scheduler(with_states(10 + 2 + 4 * 12 - 1, 12, 0)).check_request(r));
    // Of two requests with room for one state the second waits for the first.
    Scheduler s(with_states(26, 12, 0));
    StepPlan  plan;
    s.add(1, request(8, 4));
    s.add(2, request(8, 4, 100));
    run_step(s, plan);
    CHECK(s.n_running() == 1);
    CHECK(run_all(s) == std::vector<RequestId>{1, 2});
}

TEST_CASE("requests of every kind end, with states beside K and V, in pools of every size") {
    for (int n_blocks : {14, 20, 33, 60})
        for (int interval : {0, 4, 12}) {
            CAPTURE(n_blocks, interval);
            SchedulerOptions o = with_states(n_blocks, 3, interval);
            o.n_swap           = n_blocks / 2;
            o.watermark        = 0;
            Scheduler s(o);
            for (RequestId id = 1; id <= 12; id++) {
                Request r  = request(int(3 + id * 5 % 17), int(1 + id * 7 % 9), Token(id % 3 * 100));
                r.n        = id % 4 == 0 ? 2 : 1;
                r.priority = int(id % 3);
                if (s.check_request(r)) s.add(id, r);
            }
            (void)run_all(s);
            CHECK(s.blocks().n_used() == 0);
            s.check_invariants();
        }
}
