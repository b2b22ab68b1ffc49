// quire.schedule.chunks: how many tokens of each sequence of a request run in a step. Owns nothing.
export module quire.schedule.chunks;

import quire.core.base;
import quire.core.std;
import quire.paging.block_manager;
import quire.schedule.batch;
import quire.schedule.sequence;

export namespace quire {

// What is left of a step.
struct StepBudget {
    int tokens = 0, logit_rows = 0;
    int others = 0; // sequences of later groups, each of which needs a token
};

// Appends what the group's sequences do in this step, and takes it out of the budget. `whole_prompts`: a prompt runs in one step or
// not at all.
void schedule_chunks(SequenceGroup& group, BlockManager& blocks, bool whole_prompts, StepBudget& budget,
                     std::vector<Scheduled>& items);

} // namespace quire

module :private;

namespace quire {

// Chunked prefill and decode: each sequence runs as many tokens as the budget allows, except the last one. The last tokens of a
// group run in one step, once only these remain, because beams are compared with one another.
void schedule_chunks(SequenceGroup& group, BlockManager& blocks, bool whole_prompts, StepBudget& budget,
                     std::vector<Scheduled>& items) {
    const std::size_t first_item = items.size();
    const int         own        = int(group.sequences.size());
    const bool        all_rows   = group.request.wants_all_rows() && !group.prompt_done;
    bool              last       = true;
    for (const auto& s : group.sequences) {
        const int n = int(s->tokens.size());
        if (!all_rows) {
            const int next = blocks.next_unwritten(s->table, s->n_computed, n);
            if (!group.prompt_done && group.n_preempted == 0) group.n_cached += next - s->n_computed;
            s->n_computed = next;
        }
        int take = std::min(n - 1 - s->n_computed, budget.tokens - budget.others - (own > 1 ? own : 0));
        if (all_rows) take = std::min(take, budget.logit_rows - budget.others - (own > 1 ? own : 0));
        take = std::max(take, 0);
        if (whole_prompts && (take < n - 1 - s->n_computed || budget.tokens - take - budget.others < 1 ||
                              budget.logit_rows - (all_rows ? take : 0) - budget.others < 1))
            take = 0, last = false;
        items.push_back({&group, s.get(), s->n_computed, take, 0, all_rows ? take : 0, false});
        blocks.will_write({s->table, s->n_computed, take});
        budget.tokens -= take;
        budget.logit_rows -= all_rows ? take : 0;
        last = last && s->n_computed + take + 1 == n && !blocks.must_wait(s->table, n);
    }
    last = last && budget.tokens - budget.others >= own && budget.logit_rows - budget.others >= own;
    for (std::size_t i = first_item; i < items.size() && last; i++) {
        Scheduled& item = items[i];
        item.n_tokens++;
        item.n_logit_rows++;
        item.samples = true;
        blocks.will_write({item.sequence->table, item.first, item.n_tokens});
        budget.tokens--;
        budget.logit_rows--;
    }
    std::erase_if(items, [](const Scheduled& item) { return item.n_tokens == 0; });
}

} // namespace quire
