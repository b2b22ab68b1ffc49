// Shared by the tests of the scheduler: small options, requests, steps with a model that always answers 7.
// Include after the imports of quire.core.base, quire.core.std, quire.paging.block, quire.schedule.scheduler and quire.step.plan.
#pragma once

namespace quire::testing {

SchedulerOptions small(int n_blocks = 64);
Request          request(int n_prompt, int max_tokens, Token first = 0);

// No row of a step writes where a sequence may read early.
void check_readable(const StepPlan& plan, int block_size);

// A step is done, and `token` says what comes out of a row, 0 being an end; finished sequences leave. Returns the ids of the requests that
// are over.
std::vector<RequestId> take_tokens(Scheduler& s, std::span<const Scheduled> items,
                                   const std::function<Token(const Scheduled&)>& token);

// One step with a model that always answers 7. Returns the ids of the requests that are over.
std::vector<RequestId> run_step(Scheduler& s, StepPlan& plan);

// Steps until all requests are over; their ids in the order of their ends.
std::vector<RequestId> run_all(Scheduler& s, int most_steps = 200);

// As run_step(), but `token` chooses what comes out, and the next step is prepared before. Says whether the step had been prepared.
bool run_prepared(Scheduler& s, StepPlan& plan, StepPlan& next, bool prepares,
                  const std::function<Token(const Scheduled&)>& token, bool& prepared);

// The steps until the request has its first token.
int steps_to_first_token(Scheduler& s, RequestId id, StepPlan& plan);

} // namespace quire::testing
