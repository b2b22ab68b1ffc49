// Requests and steps: which request starts, runs and ends, what is refused, and steps that are planned ahead.
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

TEST_CASE("a step holds decoding tokens and a chunk of a prompt side by side") {
    Scheduler s(small());
    StepPlan  plan;
    s.add(1, request(3, 8));
    run_step(s, plan);
    CHECK(plan.tokens == std::vector<Token>{0, 1, 2});
    CHECK(plan.logit_rows == std::vector<std::int32_t>{2});
    s.add(2, request(40, 8, 100)); // longer than a step
    run_step(s, plan);
    CHECK(plan.n_tokens() == 16); // one of the first, 15 of the second
    CHECK(plan.tokens[0] == 7);
    CHECK(plan.token_start == std::vector<std::int32_t>{0, 1, 16});
    CHECK(plan.context_lens == std::vector<std::int32_t>{4, 15});
    CHECK(plan.logit_rows == std::vector<std::int32_t>{0}); // the prompt is not through
    run_step(s, plan);
    CHECK(plan.context_lens == std::vector<std::int32_t>{5, 30});
    run_step(s, plan);
    CHECK(plan.context_lens == std::vector<std::int32_t>{6, 40});
    CHECK(plan.logit_rows == std::vector<std::int32_t>{0, 10});
}

TEST_CASE("the plan's slots are the table's blocks") {
    Scheduler s(small());
    StepPlan  plan;
    s.add(1, request(6, 4));
    s.add(2, request(5, 4, 50));
    run_step(s, plan);
    REQUIRE(plan.n_seqs() == 2);
    for (std::size_t seq = 0; seq < 2; seq++)
        for (int row = plan.token_start[seq]; row < plan.token_start[seq + 1]; row++) {
            const int     position = plan.positions[std::size_t(row)];
            const BlockId block =
                plan.groups[0].parts[0].tables[std::size_t(plan.groups[0].table_start[seq] + position / 4)];
            CHECK(plan.groups[0].parts[0].slots[std::size_t(row)] == block * 4 + position % 4);
        }
}

TEST_CASE("requests start in order of arrival and nobody overtakes") {
    Scheduler s(small(4)); // 16 tokens
    StepPlan  plan;
    s.add(1, request(9, 4));      // three blocks
    s.add(2, request(9, 4, 100)); // does not fit beside it
    s.add(3, request(2, 4, 200)); // would fit, but came later
    run_step(s, plan);
    CHECK(s.n_running() == 1);
    CHECK(s.n_waiting() == 2);
}

TEST_CASE("a finished request makes room in the next step") {
    Scheduler s(small(4));
    StepPlan  plan;
    s.add(1, request(9, 1));
    s.add(2, request(9, 1, 100));
    CHECK(run_step(s, plan) == std::vector<RequestId>{1});
    CHECK(run_step(s, plan) == std::vector<RequestId>{2});
    CHECK(s.idle());
    CHECK(s.blocks().n_used() == 0);
}

TEST_CASE("when blocks run out the latest waits and comes back with all its tokens") {
    Scheduler s(small(5));
    s.add(1, request(7, 12));
    s.add(2, request(7, 5, 100));
    CHECK(run_all(s) == std::vector<RequestId>{1, 2});
    CHECK(s.stats().preemptions > 0);
}

TEST_CASE("a sequence alone in the pool ends with what fits, and the queue goes on") {
    Scheduler s(small(2)); // 8 tokens
    s.add(1, request(4, 50));
    s.add(2, request(4, 2, 100));
    CHECK(run_all(s) == std::vector<RequestId>{1, 2});
}

TEST_CASE("a request that can never run is refused with the sum that shows why") {
    Scheduler s(small(2));
    auto      r = s.check_request(request(8, 1));
    REQUIRE_FALSE(r);
    CHECK(r.error().message.find("needs 3 blocks of 4") != std::string::npos);
    CHECK_FALSE(s.check_request(request(0, 1)));
    CHECK(s.check_request(request(7, 1)));
    Scheduler roomy(small(64));
    CHECK_FALSE(roomy.check_request(request(64, 1))); // the context
    CHECK(roomy.check_request(request(63, 1)));
}

TEST_CASE("cancelling in any state gives every block back") {
    Scheduler s(small());
    StepPlan  plan;
    for (RequestId id = 1; id <= 6; id++) s.add(id, request(10, 8, Token(100 * id)));
    run_step(s, plan); // some run, one is in the middle of its prompt, some wait
    for (RequestId id = 1; id <= 6; id++) {
        CHECK(s.remove(id) != nullptr);
        s.check_invariants();
    }
    CHECK(s.remove(3) == nullptr);
    CHECK(s.idle());
    CHECK(s.blocks().n_used() == 0);
}

TEST_CASE("a second request with the same beginning computes only the rest") {
    Scheduler s(small());
    StepPlan  plan;
    s.add(1, request(12, 1));
    run_step(s, plan);
    s.add(2, request(14, 1));
    auto items = s.schedule(plan);
    REQUIRE(items.size() == 1);
    CHECK(items[0].first == 12);
    CHECK(items[0].n_tokens == 2);
    CHECK(items[0].group->n_cached == 12);
}

TEST_CASE("prompt log-probabilities ask for a row per position and read no cache") {
    Scheduler s(small());
    StepPlan  plan;
    s.add(1, request(12, 1));
    run_step(s, plan);
    Request all         = request(12, 1);
    all.prompt_logprobs = 0;
    s.add(2, all);
    auto items = s.schedule(plan);
    REQUIRE(items.size() == 1);
    CHECK(items[0].first == 0);
    CHECK(items[0].n_tokens == 8); // max_logit_rows
    CHECK(plan.logit_rows.size() == 8);
}

TEST_CASE("a request whose blocks are all cached still runs a token, after a preemption as well") {
    Scheduler s(small(16));
    StepPlan  plan;
    s.add(1, request(16, 1)); // four full blocks
    run_step(s, plan);
    s.add(2, request(16, 4));
    auto items = s.schedule(plan);
    REQUIRE(items.size() == 1);
    CHECK(items[0].n_tokens == 1);
    CHECK(items[0].samples);
    s.commit();
    s.remove(2);

    SchedulerOptions o = small(6);
    o.preemption_mode  = PreemptionMode::recompute;
    Scheduler tight(o);
    tight.add(1, request(8, 12));
    tight.add(2, request(8, 12)); // shares the first block, and is preempted with its prompt in the cache
    CHECK(run_all(tight) == std::vector<RequestId>{1, 2});
    CHECK(tight.stats().preemptions > 0);
}

TEST_CASE("a step that was planned ahead is the one that would have been scheduled") {
    int adopted = 0, scheduled = 0;
    for (unsigned seed = 0; seed < 300; seed++) {
        std::mt19937     random(seed);
        auto             below = [&](int n) { return int(random() % unsigned(n)); };
        SchedulerOptions o     = small(20 + below(30));
        o.context              = 40;
        o.max_sequences        = 2 + below(3);
        o.n_swap               = 60; // what is computed again depends on which cached blocks went first
        o.preemption_mode      = PreemptionMode::swap;
        Scheduler a(o), b(o); // b plans ahead
        StepPlan  plan_a, plan_b, next;
        bool      prepared = false;
        RequestId id       = 0;
        // The tokens of a sequence are a matter of its own, so that both schedulers see the same.
        const auto token = [&](const Scheduled& item) {
            std::mt19937 own(unsigned(item.group->id * 1000 + item.sequence->tokens.size()) + seed * 100'000);
            return Token(own() % 12); // 0: an end
        };
        for (int step = 0; step < 60; step++) {
            if (below(4) == 0) {
                Request r  = request(1 + below(20), 1 + below(20), Token(1000 * id + 20));
                r.priority = below(3) - 1;
                if (a.check_request(r)) {
                    a.add(++id, r);
                    b.add(id, r);
                }
            }
            if (id > 0 && below(12) == 0) {
                const RequestId gone = 1 + RequestId(below(int(id)));
                a.remove(gone);
                b.remove(gone);
            }
            bool none = false;
            run_prepared(a, plan_a, next, false, token, none);
            const bool ahead = run_prepared(b, plan_b, next, true, token, prepared);
            CAPTURE(seed, step, ahead);
            REQUIRE(plan_b.tokens == plan_a.tokens);
            REQUIRE(plan_b.positions == plan_a.positions);
            REQUIRE(plan_b.token_start == plan_a.token_start);
            REQUIRE(plan_b.context_lens == plan_a.context_lens);
            REQUIRE(plan_b.groups[0].table_start == plan_a.groups[0].table_start);
            REQUIRE(plan_b.logit_rows == plan_a.logit_rows);
            for (int s = 0; s < plan_b.n_seqs(); s++) // other blocks, perhaps, but the slots are theirs
                for (int row = plan_b.token_start[std::size_t(s)]; row < plan_b.token_start[std::size_t(s) + 1];
                     row++) {
                    const int  position = plan_b.positions[std::size_t(row)];
                    const auto table    = std::size_t(plan_b.groups[0].table_start[std::size_t(s)] + position / 4);
                    REQUIRE(plan_b.groups[0].parts[0].slots[std::size_t(row)] ==
                            plan_b.groups[0].parts[0].tables[table] * 4 + position % 4);
                }
            (ahead ? adopted : scheduled)++;
        }
    }
    CAPTURE(adopted, scheduled);
    CHECK(adopted > 2000);
    CHECK(scheduled > 2000);
}

TEST_CASE("nothing is planned ahead where that takes more than a token for each") {
    const auto prepares = [](const Request& r, const SchedulerOptions& o = small()) {
        Scheduler s(o);
        StepPlan  plan, next;
        s.add(1, r);
        s.schedule(plan);
        const int  used    = s.blocks().n_used();
        const bool planned = s.prepare(next);
        if (!planned) CHECK(s.blocks().n_used() == used); // nothing is taken
        s.commit();
        return planned;
    };
    CHECK(prepares(request(4, 8)));
    CHECK_FALSE(prepares(request(4, 1)));  // ends
    CHECK_FALSE(prepares(request(20, 8))); // a prompt that goes on
    Request r = request(4, 8);
    r.n       = 2;
    CHECK_FALSE(prepares(r)); // forks
    r.n          = 1;
    r.beam_width = 2;
    CHECK_FALSE(prepares(r));
    r.beam_width = 0;
    r.pin        = true;
    CHECK_FALSE(prepares(r));
    r.pin                = false;
    SchedulerOptions one = small(1);
    CHECK_FALSE(prepares(request(4, 8), one)); // no block is left
}
