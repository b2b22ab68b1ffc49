// quire.schedule.step_plan: the interface between scheduling and compute: StepPlan, what runs in one step, and StepLogits, what it
// brings. Plain values. Owns nothing.
export module quire.schedule.step_plan;

import quire.core.base;
import quire.core.std;
import quire.paging.block;
import quire.schedule.request;

export namespace quire {

// What a device that samples does with one row of logits, so that the row can stay there. The answer: a token with its
// log-probability in the raw row for each draw (or for `chosen`), then the n_top best ones, best first.
struct RowTask {
    int   row        = 0;  // of the logit rows; no two tasks share one
    Token chosen     = -1; // instead of drawing: return this token's log-probability
    int   first_edit = 0, n_edits = 0;
    int   first_draw = 0, n_draws = 0;
    int   n_top       = 0;
    bool  logprobs    = false; // false: the log-probabilities of the answer are not valid
    bool  only_edited = false; // only tokens with an edit can be drawn
    int   top_k       = 0;
    float temperature = 1, top_p = 1, min_p = 0;
    int   first_answer = 0;

    int n_answers() const { return (chosen >= 0 ? 1 : n_draws) + n_top; }
};

// A logit before sampling: x / divide (x · divide where x is negative) - subtract + add.
struct LogitEdit {
    Token token  = 0;
    float divide = 1, subtract = 0, add = 0;
    int   times = 0; // it was generated
};

// How much of that a device can do in one step; zeros: nothing, the host reads the rows.
struct SamplingLimits {
    int tasks = 0, edits = 0, draws = 0, answers = 0, top = 0;
};

// One step of the whole batch: everything that the model, in this process or another, needs to know.
// T tokens of S sequences; the tokens of a sequence are adjacent and in order. Plain integers, no pointers.
// Before the tokens run: `swap_out` (device → swap pool), then `swap_in` (swap pool → device), then `copies`, each list in
// order: a block can be the target of a copy after it was the source of an earlier one.
struct StepPlan {
    std::vector<Token>        tokens;       // [T]
    std::vector<std::int32_t> positions;    // [T] position of each token in its sequence
    std::vector<std::int32_t> slots;        // [T] where its K and V go: block * block_size + offset
    std::vector<std::int32_t> token_start;  // [S+1] rows of sequence s: token_start[s] .. token_start[s+1]
    std::vector<std::int32_t> context_lens; // [S] tokens with KV after this step
    std::vector<BlockId>      block_tables; // the sequences' tables one after another
    std::vector<std::int32_t> table_start;  // [S+1] into block_tables
    std::vector<std::int32_t> logit_rows;   // [L] rows of `tokens` whose logits are wanted, ascending
    std::vector<BlockCopy>    swap_out, swap_in, copies;
    std::vector<RowTask>      tasks; // for a device that samples, with their edits and random numbers in [0, 1)
    std::vector<LogitEdit>    edits;
    std::vector<double>       draws;

    int  n_tokens() const { return int(tokens.size()); }
    int  n_seqs() const { return int(context_lens.size()); }
    void clear();
    bool moves_blocks() const { return !swap_out.empty() || !swap_in.empty() || !copies.empty(); }
};

// The logits of a step's logit rows, on the device. Most steps need only the best token of each row.
// A row that is not usable() (quire.decode.sampler: NaN or +infinity in it, or nothing but -infinity) has -1 as its best token, and
// as the token that its answer begins with: a draw, `chosen`, or the first of the best ones. So has a draw where the edits
// leave no token. The rest of such an answer means nothing; quire.decode.decoder ends the request.
struct StepLogits {
    std::span<const Token>        best;    // the most likely token of each row (the lowest id of several); or empty
    std::span<const TokenLogprob> answers; // the answers of the plan's tasks, from their first_answer on
    std::function<std::span<const float>()>
        rows; // copies them to the host: [logit rows × vocab], valid until the next step
    // The hidden state of one of these rows, after the last norm: [hidden], valid until the next call.
    std::function<std::span<const float>(int row)> hidden;
};

} // namespace quire

module :private;

namespace quire {

void StepPlan::clear() {
    for (auto* v : {&tokens, &positions, &slots, &token_start, &context_lens, &block_tables, &table_start, &logit_rows})
        v->clear();
    for (auto* v : {&swap_out, &swap_in, &copies}) v->clear();
    tasks.clear();
    edits.clear();
    draws.clear();
}

} // namespace quire
