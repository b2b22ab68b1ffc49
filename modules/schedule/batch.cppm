// quire.schedule.batch: the sequences that the scheduler chose for a step, and the StepPlan made of them. Plain values, owns nothing.
export module quire.schedule.batch;

import quire.core.base;
import quire.core.std;
import quire.paging.block;
import quire.paging.block_manager;
import quire.schedule.sequence;
import quire.schedule.step_plan;

export namespace quire {

// What one sequence does in the current step. Sequences of one group are adjacent.
struct Scheduled {
    SequenceGroup* group    = nullptr;
    Sequence*      sequence = nullptr;
    int            first = 0, n_tokens = 0; // positions that run
    int            first_logit_row = 0, n_logit_rows = 0;
    bool           samples = false; // the last row is that of its last known token: the next token comes from it
    bool           again   = false; // it did: its last token runs once more in a later step
};

// Fills the plan's tokens, positions, slots, block tables and logit rows, and each item's first_logit_row.
void plan_items(std::span<Scheduled> items, const BlockManager& blocks, StepPlan& plan);

} // namespace quire

module :private;

namespace quire {

void plan_item(Scheduled& item, const BlockManager& blocks, StepPlan& plan) {
    const Sequence&          s     = *item.sequence;
    std::span<const BlockId> table = blocks.blocks(s.table);
    const int                size = blocks.block_size(), end = item.first + item.n_tokens;
    item.first_logit_row = int(plan.logit_rows.size());
    for (int position = item.first; position < end; position++) {
        if (position >= end - item.n_logit_rows) plan.logit_rows.push_back(plan.n_tokens());
        const bool known = std::size_t(position) < s.tokens.size(); // or it is about to be sampled
        plan.tokens.push_back(known ? s.tokens[std::size_t(position)] : 0);
        plan.positions.push_back(position);
        plan.slots.push_back(table[std::size_t(position / size)] * size + position % size);
    }
    plan.token_start.push_back(plan.n_tokens());
    plan.context_lens.push_back(end);
    plan.readable.push_back(blocks.n_readable(s.table, item.first));
    table = table.first(std::size_t(blocks.blocks_for(end))); // a prompt has the blocks of its later chunks already
    // No layer reads what was released; whatever touches it nevertheless finds a block of this sequence.
    const auto released = std::min(std::size_t(blocks.n_released(s.table)), table.size());
    plan.block_tables.insert(plan.block_tables.end(), released, released < table.size() ? table[released] : 0);
    plan.block_tables.insert(plan.block_tables.end(), table.begin() + std::ptrdiff_t(released), table.end());
    plan.table_start.push_back(std::int32_t(plan.block_tables.size()));
}

void plan_items(std::span<Scheduled> items, const BlockManager& blocks, StepPlan& plan) {
    plan.token_start.push_back(0);
    plan.table_start.push_back(0);
    for (Scheduled& item : items) plan_item(item, blocks, plan);
}

} // namespace quire
