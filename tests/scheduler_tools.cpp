// The functions of scheduler_tools.h, compiled once for all tests.
#include <catch2/catch_test_macros.hpp>

import quire.core.base;
import quire.core.std;
import quire.paging.block;
import quire.paging.block_manager;
import quire.schedule.request;
import quire.schedule.scheduler;
import quire.step.plan;

#include "scheduler_tools.h"

namespace quire::testing {

SchedulerOptions small(int n_blocks) {
    SchedulerOptions o;
    o.n_blocks         = n_blocks;
    o.block_size       = 4;
    o.context          = 64;
    o.max_batch_tokens = 16;
    o.max_sequences    = 4;
    o.max_logit_rows   = 8;
    return o;
}

Request request(int n_prompt, int max_tokens, Token first) {
    Request r;
    for (int i = 0; i < n_prompt; i++) r.prompt.push_back(first + i);
    r.max_tokens = max_tokens;
    return r;
}

void check_readable(const StepPlan& plan, int block_size) {
    REQUIRE(plan.readable.size() == std::size_t(plan.n_seqs()));
    std::map<BlockId, int> written; // the first offset in a block that a row of this step writes
    for (const GroupPlan& group : plan.groups)
        for (const GroupPlan::Part& part : group.parts)
            for (std::int32_t slot : part.slots) {
                const auto [at, is_new] = written.try_emplace(slot / block_size, slot % block_size);
                at->second              = std::min(at->second, slot % block_size);
            }
    for (std::size_t s = 0; s < plan.readable.size(); s++) {
        const int first = plan.positions[std::size_t(plan.token_start[s])];
        REQUIRE(plan.readable[s] >= 0);
        REQUIRE(plan.readable[s] <= first);
        for (const GroupPlan& group : plan.groups)
            for (const GroupPlan::Part& part : group.parts)
                for (int i = group.first_entry[s]; i * block_size < first; i++) {
                    const BlockId id = part.tables[std::size_t(group.origin(s) + i)];
                    if (const auto at = written.find(id); id >= 0 && at != written.end())
                        REQUIRE(std::min(plan.readable[s], (i + 1) * block_size) <= i * block_size + at->second);
                }
    }
}

std::vector<RequestId> take_tokens(Scheduler& s, std::span<const Scheduled> items,
                                   const std::function<Token(const Scheduled&)>& token) {
    std::vector<RequestId> done;
    s.commit();
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
    return done;
}

std::vector<RequestId> run_step(Scheduler& s, StepPlan& plan) {
    const std::span<const Scheduled> items = s.schedule(plan);
    if (!items.empty()) check_readable(plan, s.blocks().block_size());
    return take_tokens(s, items, [](const Scheduled&) { return Token(7); });
}

std::vector<RequestId> run_all(Scheduler& s, int most_steps) {
    StepPlan               plan;
    std::vector<RequestId> done;
    for (int i = 0; i < most_steps && !s.idle(); i++)
        for (RequestId id : run_step(s, plan)) done.push_back(id);
    CHECK(s.idle());
    CHECK(s.blocks().n_used() == 0);
    return done;
}

bool run_prepared(Scheduler& s, StepPlan& plan, StepPlan& next, bool prepares,
                  const std::function<Token(const Scheduled&)>& token, bool& prepared) {
    std::span<const Scheduled> items;
    if (std::exchange(prepared, false)) items = s.adopt(next);
    const bool adopted = !items.empty();
    if (adopted) std::swap(plan, next);
    else items = s.schedule(plan);
    if (!items.empty()) check_readable(plan, s.blocks().block_size());
    prepared = prepares && s.prepare(next);
    take_tokens(s, items, token);
    return adopted;
}

int steps_to_first_token(Scheduler& s, RequestId id, StepPlan& plan) {
    for (int n = 1; n < 1000; n++) {
        run_step(s, plan);
        const SequenceGroup* group = s.find(id);
        if (!group || group->prompt_done) return n;
    }
    return 1000;
}

} // namespace quire::testing
