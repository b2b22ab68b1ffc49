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

namespace {

std::vector<RequestId> run_all(Scheduler& s, int most_steps = 200) {
    StepPlan               plan;
    std::vector<RequestId> done;
    for (int i = 0; i < most_steps && !s.idle(); i++)
        for (RequestId id : run_step(s, plan)) done.push_back(id);
    CHECK(s.idle());
    CHECK(s.blocks().n_used() == 0);
    return done;
}

} // namespace

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

// -- what went wrong in others

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
    CHECK(done.size() < 15); // those that came within its ten steps, and the queue that they made
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

// As run_step(), but what comes out is chosen by `token`, 0 being an end, and the next step is prepared before.
// Says whether the step had been prepared.
bool run_prepared(Scheduler& s, StepPlan& plan, StepPlan& next, bool prepares,
                  const std::function<Token(const Scheduled&)>& token, bool& prepared) {
    std::span<const Scheduled> items;
    if (std::exchange(prepared, false)) items = s.adopt(next);
    const bool adopted = !items.empty();
    if (adopted) std::swap(plan, next);
    else items = s.schedule(plan);
    if (!items.empty()) check_readable(plan, s.blocks().block_size());
    prepared = prepares && s.prepare(next);
    s.commit();
    std::vector<RequestId> done;
    for (const Scheduled& item : items) {
        if (!item.samples) continue;
        item.group->prompt_done = true;
        const Token t           = token(item);
        s.append(*item.sequence, t);
        if (const FinishReason why = s.ending(*item.group, *item.sequence, t == 0); why != FinishReason::none)
            s.free(*item.group, *item.sequence, why);
        if (item.group->sequences.empty()) done.push_back(item.group->id);
    }
    for (const Ended& e : s.take_ended()) done.push_back(e.id);
    for (RequestId id : done) s.remove(id);
    s.check_invariants();
    return adopted;
}

} // namespace

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
        // What a sequence says is a matter of its own, so that both schedulers see the same.
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

// -- several prompts in a step

namespace {

// The steps until the request has its first token.
int steps_to_first_token(Scheduler& s, RequestId id, StepPlan& plan) {
    for (int n = 1; n < 1000; n++) {
        run_step(s, plan);
        const SequenceGroup* group = s.find(id);
        if (!group || group->prompt_done) return n;
    }
    return 1000;
}

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
    CHECK(s.stats().checkpoints == first / interval + 1); // and the end of the prompt
    text.insert(text.end(), answer, 7);                   // as the model answers
    for (int i = 0; i < more; i++) text.push_back(Token(20'000 + i));
    Request next = request(1, 5);
    next.prompt  = text;
    s.add(2, next);
    const int computed = tokens_computed(s);
    CHECK(computed >= more + 4);
    CHECK(computed <= more + 4 + interval);
    CHECK(computed == int(text.size()) - first + 4); // from the end of the first prompt
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
        const int last = (n - 1) / 4 * 4; // the last token is computed in any case
        CHECK(tokens_computed(s) == n + 1 - (last >= 32 ? 32 : n / 4 * 4 <= n - 1 ? n / 4 * 4 : 16));
        CHECK(s.blocks().n_used() == 0);
    }
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
