// Pressure: which request gives way, how it comes back, and what priorities change.
#include <catch2/catch_test_macros.hpp>

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

TEST_CASE("while one that was preempted waits nothing new starts, and it comes back first") {
    for (PreemptionMode mode : {PreemptionMode::swap, PreemptionMode::recompute}) {
        SchedulerOptions o = small(6);
        o.preemption_mode  = mode;
        o.n_swap           = 6;
        o.prefix_cache     = false;
        Scheduler s(o);
        StepPlan  plan;
        s.add(1, request(8, 9));
        s.add(2, request(8, 9, 100));
        int step = 0;
        while (s.stats().preemptions == 0 && step++ < 20) run_step(s, plan);
        REQUIRE(s.stats().preemptions == 1);
        s.add(3, request(1, 1, 200)); // one block would do
        bool back = false, started = false;
        for (int i = 0; i < 100 && !s.idle(); i++) {
            run_step(s, plan);
            for (Token t : plan.tokens) {
                back    = back || (t >= 100 && t < 200) || plan.n_seqs() > 1;
                started = started || t == 200;
            }
            if (started) CHECK(back);
        }
        CHECK(started);
        CHECK(s.idle());
    }
}

TEST_CASE("pressure does not make requests lose and recompute their blocks over and over") {
    // Twelve requests where four fit when they are long: each is preempted rarely, and most of the work is new work.
    SchedulerOptions o = small(40);
    o.max_sequences    = 12;
    o.max_logit_rows   = 12;
    o.max_batch_tokens = 64;
    o.preemption_mode  = PreemptionMode::recompute;
    o.prefix_cache     = false;
    o.watermark        = 0.03;
    Scheduler s(o);
    StepPlan  plan;
    for (RequestId id = 1; id <= 12; id++) s.add(id, request(8, 32, Token(100 * id)));
    int work = 0, steps = 0;
    for (; !s.idle() && steps < 1000; steps++) {
        run_step(s, plan);
        work += plan.n_tokens();
    }
    CHECK(s.idle());
    CHECK(work < 2 * 12 * 40);
    CHECK(s.stats().preemptions < 36);
}

TEST_CASE("the watermark cuts preemptions") {
    std::uint64_t preemptions[2];
    for (int i = 0; i < 2; i++) {
        SchedulerOptions o = small(100);
        o.max_sequences = o.max_logit_rows = 32;
        o.max_batch_tokens                 = 128;
        o.watermark                        = i * 0.05;
        Scheduler s(o);
        StepPlan  plan;
        for (RequestId id = 1; id <= 60; id++) s.add(id, request(8, 16 + int(id * 7 % 16), Token(100 * id)));
        for (int step = 0; !s.idle() && step < 5000; step++) run_step(s, plan);
        CHECK(s.idle());
        preemptions[i] = s.stats().preemptions;
    }
    CHECK(preemptions[0] > 0);
    CHECK(preemptions[1] < preemptions[0]);
}

TEST_CASE("what is cheaper decides between swapping and computing again") {
    for (const bool cheap_copies : {true, false}) {
        SchedulerOptions o = small(6);
        o.n_swap           = 6;
        Scheduler s(o);
        s.set_costs({cheap_copies ? 1e-6 : 1.0, 1e-3});
        s.add(1, request(8, 9));
        s.add(2, request(8, 9, 100));
        run_all(s);
        CHECK((s.stats().swaps_out > 0) == cheap_copies);
        CHECK((s.stats().recomputations > 0) == !cheap_copies);
    }
}

TEST_CASE("a request of low urgency that has waited long enough runs before new urgent ones") {
    SchedulerOptions o = small(64);
    o.max_sequences    = 1;
    o.aging_steps      = 10;
    Scheduler s(o);
    StepPlan  plan;
    Request   low = request(4, 2, 100);
    low.priority  = 1;
    s.add(1, request(4, 2));
    s.add(2, low);
    std::vector<RequestId> done;
    for (RequestId id = 3; std::ranges::find(done, RequestId(2)) == done.end() && id < 100; id++) {
        s.add(id, request(4, 2, Token(id * 10)));
        for (RequestId d : run_step(s, plan)) done.push_back(d);
    }
    CHECK(done.size() > 2);
    CHECK(done.size() < 15); // the requests that came within its ten steps, and the queue that they made
}

TEST_CASE("priority preemption: only by strictly more urgent requests, and not for ever") {
    SchedulerOptions o = small(64);
    o.max_sequences    = 1;
    Scheduler s(o);
    StepPlan  plan;
    Request   low = request(4, 30, 100);
    low.priority  = 5;
    s.add(1, low);
    run_step(s, plan);
    s.add(2, low); // its like
    run_step(s, plan);
    CHECK(s.stats().priority_preemptions == 0);
    for (RequestId id = 3; id < 9; id++) {
        s.add(id, request(4, 2, Token(id * 10)));
        for (int i = 0; i < 4; i++) run_step(s, plan);
    }
    CHECK(s.stats().priority_preemptions == 3); // the fourth has to wait
}

TEST_CASE("nobody gives way to an urgent request that does not fit even then") {
    SchedulerOptions o = small(10);
    o.max_batch_tokens = 64;
    const auto urgent  = [](int n_prompt, int priority, Token first) {
        Request r  = request(n_prompt, 8, first);
        r.priority = priority;
        return r;
    };
    // How many requests give way to `third`, which comes when the other two run.
    StepPlan   plan;
    const auto give_way = [&](const Request& first, const Request& second, const Request& third) {
        Scheduler s(o);
        s.add(1, first);
        s.add(2, second);
        run_step(s, plan);
        s.add(3, third);
        run_step(s, plan);
        CHECK(s.n_running() == 2);
        return s.stats().priority_preemptions;
    };
    SECTION("because of the watermark") {
        o.watermark = 0.2; // two blocks
        // Four blocks and three; six: those of the second request and the free ones.
        CHECK(give_way(urgent(13, 0, 100), urgent(9, 5, 200), urgent(23, 0, 300)) == 0);
    }
    SECTION("because the blocks are shared") {
        o.watermark = 0;
        Scheduler s(o);
        StepPlan  plan;
        s.add(1, urgent(13, 0, 100));
        run_step(s, plan);
        s.add(2, urgent(14, 5, 100)); // three of its blocks are those of 1
        run_step(s, plan);
        CHECK(s.blocks().n_free() == 5);
        s.add(3, urgent(27, 0, 300)); // seven
        run_step(s, plan);
        CHECK(s.stats().priority_preemptions == 0);
        CHECK(s.n_running() == 2);
    }
    SECTION("because the step takes some of them") {
        o.watermark = 0;
        // Four blocks, and one for the token of the next step; three; six.
        CHECK(give_way(urgent(16, 0, 100), urgent(9, 5, 200), urgent(23, 0, 300)) == 0);
    }
    SECTION("but where it fits then, it runs in the same step") {
        o.watermark = 0;
        CHECK(give_way(urgent(13, 0, 100), urgent(9, 5, 200), urgent(23, 0, 300)) == 1);
        CHECK(std::ranges::find(plan.tokens, Token(300)) != plan.tokens.end());
    }
}

TEST_CASE("a group is admitted, preempted and resumed as one") {
    for (PreemptionMode mode : {PreemptionMode::swap, PreemptionMode::recompute}) {
        SchedulerOptions o = small(12);
        o.preemption_mode  = mode;
        o.n_swap           = 12;
        Scheduler s(o);
        StepPlan  plan;
        Request   three = request(6, 20, 100);
        three.n         = 3;
        s.add(1, request(6, 20));
        s.add(2, three);
        bool forked = false, was_out = false;
        for (int step = 0; !s.idle() && step < 200; step++) {
            auto items = s.schedule(plan);
            s.commit();
            const auto of_two =
                std::count_if(items.begin(), items.end(), [](const auto& i) { return i.group->id == 2 && i.samples; });
            CHECK((of_two == 0 || of_two == (forked ? 3 : 1)));
            std::vector<RequestId> done;
            for (const Scheduled& item : items) {
                SequenceGroup& group = *item.group;
                if (!item.samples) continue;
                if (group.id == 2 && !group.prompt_done) {
                    for (int i = 0; i < 2; i++) s.append(s.fork(group, *item.sequence), Token(1 + i));
                    forked = true;
                }
                group.prompt_done = true;
                s.append(*item.sequence, 7);
                if (const FinishReason why = s.ending(group, *item.sequence, false); why != FinishReason::none)
                    s.free(group, *item.sequence, why);
                if (group.sequences.empty()) done.push_back(group.id);
            }
            was_out = was_out || (forked && s.n_waiting() == 1);
            for (const Ended& e : s.take_ended()) done.push_back(e.id);
            for (RequestId id : done) s.remove(id);
            s.check_invariants();
        }
        CHECK(s.idle());
        CHECK(was_out);
    }
}

namespace {

// A request whose prompt is computed and which has gone on with as many sequences as it may have, each with a token of its own.
void fork_all(Scheduler& s, StepPlan& plan, RequestId id) {
    std::span<const Scheduled> items = s.schedule(plan);
    s.commit();
    for (const Scheduled& item : items) {
        if (!item.samples || item.group->id != id) continue;
        SequenceGroup& group = *item.group;
        group.prompt_done    = true;
        while (int(group.sequences.size()) < group.request.width()) s.fork(group, *item.sequence);
        for (auto& sequence : group.sequences) s.append(*sequence, 10 + sequence->index);
    }
    s.check_invariants();
}

} // namespace

TEST_CASE("answers that are computed again get on where a step has a token for each of them and no more") {
    SchedulerOptions o = small();
    o.max_batch_tokens = o.max_sequences = 3;
    o.preemption_mode                    = PreemptionMode::recompute;
    o.prefix_cache                       = false;
    Scheduler s(o);
    StepPlan  plan;
    Request   three = request(3, 4);
    three.n         = 3;
    s.add(1, three);
    fork_all(s, plan, 1);
    Request urgent  = request(1, 1, 50);
    urgent.priority = -1;
    s.add(2, urgent);
    CHECK(run_all(s) == std::vector<RequestId>{2, 1});
}

TEST_CASE("answers that come back without blocks to part in wait for these") {
    SchedulerOptions o = small(3);
    o.n_swap           = 3;
    o.preemption_mode  = PreemptionMode::swap;
    Scheduler s(o);
    StepPlan  plan;
    Request   pinned = request(4, 1, 80);
    pinned.pin       = true;
    Request three    = request(1, 4);
    three.n          = 3;
    s.add(1, three);
    fork_all(s, plan, 1);
    pinned.priority = -1;
    s.add(2, pinned);
    s.schedule(plan);
    REQUIRE(plan.moves.swap_out.size() == 1);
    s.commit();
    s.pin(*s.find(2)); // two blocks are left for three sequences
    for (int i = 0; i < 10 && s.find(1); i++) {
        run_step(s, plan);
        const std::vector<std::int32_t>& all = plan.groups[0].parts[0].slots;
        CHECK(std::set<std::int32_t>(all.begin(), all.end()).size() == all.size());
    }
    CHECK(s.find(1) == nullptr); // it outgrew the pool
    s.remove(2);
    CHECK(s.blocks().n_used() == 0);
}

TEST_CASE("a full sequence that gives way to an urgent request forgets tokens before it comes back") {
    SchedulerOptions o = small();
    o.context          = 8;
    o.max_sequences    = 1;
    Scheduler s(o);
    StepPlan  plan;
    Request   shifts     = request(5, 20);
    shifts.context_shift = true;
    s.add(1, shifts);
    while (s.tokens(1, 0).size() < 8) run_step(s, plan);
    Request urgent  = request(2, 1, 50);
    urgent.priority = -1;
    s.add(2, urgent);
    CHECK(run_step(s, plan) == std::vector<RequestId>{2});
    run_step(s, plan);
    CHECK(plan.context_lens == std::vector<std::int32_t>{4}); // half of the eight
}
