// Shared by the tests of the scheduler: small options, requests, a step with a model that always answers 7.
// Include after the imports of quire.core.base, quire.core.std, quire.paging.block, quire.schedule.scheduler and quire.step.plan.
#pragma once

namespace quire::testing {

inline SchedulerOptions small(int n_blocks = 64) {
    SchedulerOptions o;
    o.n_blocks         = n_blocks;
    o.block_size       = 4;
    o.context          = 64;
    o.max_batch_tokens = 16;
    o.max_sequences    = 4;
    o.max_logit_rows   = 8;
    return o;
}

inline Request request(int n_prompt, int max_tokens, Token first = 0) {
    Request r;
    for (int i = 0; i < n_prompt; i++) r.prompt.push_back(first + i);
    r.max_tokens = max_tokens;
    return r;
}

// No row of a step writes where a sequence may read early.
inline void check_readable(const StepPlan& plan, int block_size) {
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

// One step with a model that always answers 7; finished sequences leave. Returns the ids of the requests that are over.
inline std::vector<RequestId> run_step(Scheduler& s, StepPlan& plan) {
    std::vector<RequestId> done;
    auto                   items = s.schedule(plan);
    if (!items.empty()) check_readable(plan, s.blocks().block_size());
    s.commit();
    for (const Scheduled& item : items) {
        if (!item.samples) continue;
        item.group->prompt_done = true;
        s.append(*item.sequence, 7);
        if (const FinishReason why = s.ending(*item.group, *item.sequence, false); why != FinishReason::none)
            s.free(*item.group, *item.sequence, why);
        if (item.group->sequences.empty()) done.push_back(item.group->id);
    }
    for (const Ended& e : s.take_ended()) done.push_back(e.id);
    for (RequestId id : done) s.remove(id);
    s.check_invariants();
    return done;
}

} // namespace quire::testing
