// Prompts that share a step: equal ones, long beside short, and what a plan calls readable.
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

TEST_CASE("of two equal prompts in a step, the second may not read early what the first writes") {
    Scheduler s(small());
    StepPlan  plan;
    s.add(1, request(9, 8)); // two blocks of 4, and a token
    s.add(2, request(9, 8));
    run_step(s, plan);
    REQUIRE(plan.token_start == std::vector<std::int32_t>{0, 9, 10}); // the second runs its last token only
    CHECK(plan.positions.back() == 8);
    CHECK(plan.readable == std::vector<std::int32_t>{0, 0});
    run_step(s, plan);
    CHECK(plan.readable == std::vector<std::int32_t>{9, 9});
    s.add(3, request(9, 8)); // from the cache
    run_step(s, plan);
    CHECK(plan.positions.back() == 8);
    CHECK(plan.readable == std::vector<std::int32_t>{10, 10, 8});
}

TEST_CASE("equal prompts that share a step write no slot twice in it") {
    SchedulerOptions o = small();
    o.max_batch_tokens = 10; // chunks end within blocks of 4
    Scheduler s(o);
    StepPlan  plan;
    for (RequestId id = 1; id <= 3; id++) s.add(id, request(33, 4));
    int rows = 0;
    for (int step = 0; step < 20; step++) {
        run_step(s, plan);
        std::set<std::int32_t> written;
        for (std::size_t row = 0; row < plan.groups[0].parts[0].slots.size(); row++) {
            CHECK(written.insert(plan.groups[0].parts[0].slots[row]).second);
            rows += plan.positions[row] < 32;
        }
    }
    CHECK(rows >= 32);
    CHECK(rows < 40); // the beginning of a block may be computed again in a later step
    CHECK(s.idle());
}

TEST_CASE("what a plan calls readable is written by no row of its step") {
    int hidden = 0;
    for (unsigned seed = 0; seed < 200; seed++) {
        std::mt19937     random(seed);
        auto             below = [&](int n) { return int(random() % unsigned(n)); };
        SchedulerOptions o     = small(24 + below(30));
        o.n_swap               = below(2) * 60;
        o.preemption_mode      = below(2) ? PreemptionMode::swap : PreemptionMode::recompute;
        o.max_batch_tokens     = 6 + below(30);
        Scheduler s(o);
        StepPlan  plan, next;
        bool      prepared = false;
        for (RequestId id = 1; id < 60; id++) {
            // Beginnings that are shared, of requests that come in the same step.
            for (int more = below(3); more > 0 && id < 60; more--, id++) {
                Request r = request(1 + below(30), 1 + below(12), Token(below(2) * 40));
                if (s.check_request(r)) s.add(id, std::move(r));
            }
            if (below(8) == 0) s.remove(RequestId(1 + below(int(id))));
            CAPTURE(seed, id);
            run_prepared(s, plan, next, true, [&](const Scheduled&) { return Token(below(12)); }, prepared);
            for (std::size_t k = 0; k < plan.readable.size(); k++)
                hidden += plan.readable[k] < plan.positions[std::size_t(plan.token_start[k])];
        }
    }
    CHECK(hidden > 100);
}

// -- several prompts in a step

namespace {

SchedulerOptions long_prompts() {
    SchedulerOptions o = small(4096);
    o.context          = 4096;
    o.max_batch_tokens = 64;
    o.max_sequences    = 8;
    o.watermark        = 0;
    return o;
}

} // namespace

TEST_CASE("a short prompt does not wait for the whole of a long one, which has half of each step") {
    Scheduler s(long_prompts());
    StepPlan  plan;
    s.add(1, request(2048, 4, 10'000));
    run_step(s, plan);
    CHECK(plan.n_tokens() == 64);
    s.add(2, request(20, 4, 20'000));
    CHECK(steps_to_first_token(s, 2, plan) == 1);
    CHECK(plan.n_tokens() == 64); // the rest is the long one's
    CHECK(plan.token_start == std::vector<std::int32_t>{0, 44, 64});
    // While short ones keep coming it has half of each step, and all of what they leave.
    RequestId id = 2;
    int       n  = 0;
    for (; s.find(1) && !s.find(1)->prompt_done; n++) {
        for (int i = 0; i < 2; i++, id++) s.add(id + 1, request(40, 1, Token(30'000 + 100 * id)));
        const int before = s.find(1)->sequences[0]->n_computed;
        run_step(s, plan);
        if (!s.find(1) || s.find(1)->prompt_done) break;
        CHECK(s.find(1)->sequences[0]->n_computed - before >= 28); // but what decodes
        REQUIRE(n < 100);
    }
    CHECK(n < 72);
}

TEST_CASE("of the prompts in a step the oldest has half, the shortest the other half; what one leaves is the others'") {
    Scheduler  s(long_prompts());
    StepPlan   plan;
    const auto computed = [&](RequestId id) { return s.find(id)->sequences[0]->n_computed; };
    s.add(1, request(1000, 1, 10'000));
    s.add(2, request(900, 1, 20'000));
    s.add(3, request(500, 1, 30'000));
    run_step(s, plan);
    CHECK(plan.n_tokens() == 64);
    CHECK(computed(1) == 32);
    CHECK(computed(2) == 0);
    CHECK(computed(3) == 32);
    s.remove(1);
    run_step(s, plan);
    CHECK(plan.n_tokens() == 64);
    CHECK(computed(2) > 30);
    CHECK(computed(3) > 60);
    // The more urgent before the shorter.
    Request urgent  = request(600, 1, 40'000);
    urgent.priority = -1;
    s.add(4, urgent);
    run_step(s, plan);
    CHECK(computed(4) >= 60);
    // One prompt alone has all of a step.
    for (RequestId id : {2, 3}) s.remove(id);
    const int before = computed(4);
    run_step(s, plan);
    CHECK(computed(4) == before + 64);
}

TEST_CASE("few prompts are begun before the one that came first is through") {
    Scheduler s(long_prompts());
    StepPlan  plan;
    for (RequestId id = 1; id <= 8; id++) s.add(id, request(400, 1, Token(1000 * id)));
    run_step(s, plan);
    CHECK(s.n_running() == 4); // their blocks are taken, so there are not more
    CHECK(run_all(s).size() == 8);
}

TEST_CASE("a prompt whose rows are all wanted leaves each later request a row, and takes what is left") {
    SchedulerOptions o = long_prompts();
    o.max_logit_rows   = 16;
    Scheduler s(o);
    StepPlan  plan;
    Request   all       = request(200, 1, 10'000);
    all.prompt_logprobs = 0;
    s.add(1, all);
    run_step(s, plan);
    CHECK(plan.logit_rows.size() == 16);
    s.add(2, request(20, 4, 20'000));
    CHECK(steps_to_first_token(s, 2, plan) == 1);
    CHECK(plan.token_start == std::vector<std::int32_t>{0, 15, 35});
    CHECK(plan.logit_rows.size() == 16);
    CHECK(run_all(s) == std::vector<RequestId>{2, 1});
}

TEST_CASE("no step has more rows than there are, however many prompts want all of theirs") {
    int full = 0;
    for (unsigned seed = 0; seed < 100; seed++) {
        std::mt19937     random(seed);
        auto             below = [&](int n) { return int(random() % unsigned(n)); };
        SchedulerOptions o     = long_prompts();
        o.max_logit_rows       = o.max_sequences + below(3) * below(20);
        Scheduler s(o);
        StepPlan  plan;
        for (RequestId id = 1; id <= 20; id++) {
            Request r         = request(1 + below(100), 1 + below(20), Token(below(20) * 1000));
            r.prompt_logprobs = below(2) - 1;
            r.priority        = below(3);
            s.add(id, std::move(r));
        }
        int n = 0;
        for (; !s.idle() && n < 2000; n++) {
            run_step(s, plan);
            REQUIRE(int(plan.logit_rows.size()) <= o.max_logit_rows);
            full += int(plan.logit_rows.size()) == o.max_logit_rows;
        }
        CAPTURE(seed);
        CHECK(n < 2000);
    }
    CHECK(full > 100);
}
