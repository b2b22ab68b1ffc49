// quire.schedule.batch: the sequences that the scheduler chose for a step, and the StepPlan made of them. Plain values, owns nothing.
export module quire.schedule.batch;

import quire.core.base;
export import quire.paging.block_manager;
import quire.paging.cache_layout;
import quire.schedule.sequence;
export import quire.step.plan;

export namespace quire {

inline constexpr int most_drafts = 15; // draft tokens of a sequence in a step

// The part of one sequence in the current step. Sequences of one group are adjacent.
struct Scheduled {
    SequenceGroup* group    = nullptr;
    Sequence*      sequence = nullptr;
    int            first = 0, n_tokens = 0; // positions that run
    int            first_logit_row = 0, n_logit_rows = 0;
    bool           samples =
        false; // next_row() gives the next token, and each row behind it one more while the draft tokens are right
    bool again    = false; // `samples` was taken back: the last known token runs once more in a later step
    int  n_drafts = 0;     // of the tokens, the last ones: draft tokens, each with a logit row
    // Which of its logit rows belongs to the last known token.
    int next_row() const { return n_logit_rows - 1 - n_drafts; }
};

// Fills the plan's tokens, positions, slots, block tables and logit rows, and each item's first_logit_row.
void plan_items(std::span<Scheduled> items, const BlockManager& blocks, StepPlan& plan);

} // namespace quire

module :private;

namespace quire {

// Kernels read whole tiles of up to so many positions, also where a part of the tile lies behind the window.
constexpr int most_behind_window = 256;

// A group's table of one sequence, from the first entry that a kernel touches, and the slots.
void plan_tables(const Scheduled& item, const BlockManager& blocks, int group, GroupPlan& plan) {
    const TableId id   = item.sequence->table;
    const int     size = blocks.block_size(), end = item.first + item.n_tokens;
    // A prompt has the blocks of its later chunks already.
    const std::span<const BlockId> table    = blocks.blocks(id, group).first(std::size_t(blocks.entries_for(end)));
    const int                      released = std::min(blocks.n_released(id, group), int(table.size()));
    const int                      first    = std::max(released * size - most_behind_window, 0) / size;
    const auto                     live     = table.subspan(std::size_t(released));
    GroupPlan::Part&               one      = plan.parts[0];
    if (released > first) one.tables.insert(one.tables.end(), std::size_t(released - first), released_block);
    one.tables.insert(one.tables.end(), live.begin(), live.end());
    for (std::size_t i = 1; i < plan.parts.size(); i++) { // the next block of each entry
        const std::vector<BlockId>& before = plan.parts[i - 1].tables;
        for (std::size_t at = plan.parts[i].tables.size(); at < before.size(); at++)
            plan.parts[i].tables.push_back(before[at] < 0 ? released_block : blocks.next_of(before[at]));
    }
    for (GroupPlan::Part& part : plan.parts) {
        const BlockId* const entries = part.tables.data() + plan.table_start.back() - first;
        for (int position = item.first; position < end; position++)
            part.slots.push_back(entries[position / size] * size + position % size);
    }
    plan.first_entry.push_back(first);
    plan.table_start.push_back(std::int32_t(one.tables.size()));
}

// A group's states of one sequence, before and after its tokens of this step.
void plan_state(const Scheduled& item, const BlockManager& blocks, GroupPlan& plan) {
    const TableId id    = item.sequence->table;
    const bool    ahead = item.first != blocks.state_at(id); // planned while the step before it runs
    const auto    unit  = [&](std::vector<BlockId>& out, BlockId block) {
        for (int i = 0; i < plan.unit; i++) {
            out.push_back(block);
            if (block >= 0) block = blocks.next_of(block);
        }
    };
    unit(plan.state_from, ahead ? blocks.state_to(id) : blocks.state_from(id));
    unit(plan.state_to, ahead ? blocks.state_after(id) : blocks.state_to(id));
}

void plan_item(Scheduled& item, const BlockManager& blocks, StepPlan& plan) {
    const Sequence& s    = *item.sequence;
    const int       end  = item.first + item.n_tokens;
    item.first_logit_row = int(plan.logit_rows.size());
    for (int position = item.first; position < end; position++) {
        if (position >= end - item.n_logit_rows) plan.logit_rows.push_back(plan.n_tokens());
        const auto at = std::size_t(position), n = s.tokens.size();
        // A token that is neither known nor a draft is about to be sampled.
        plan.tokens.push_back(at < n ? s.tokens[at] : position >= end - item.n_drafts ? s.guess[at - n] : 0);
        plan.positions.push_back(position);
    }
    plan.token_start.push_back(plan.n_tokens());
    plan.context_lens.push_back(end);
    plan.readable.push_back(blocks.n_readable(s.table, item.first));
    if (item.group && item.group->request.adapters) {
        const std::vector<AdapterUse>& uses = *item.group->request.adapters;
        plan.adapters.insert(plan.adapters.end(), uses.begin(), uses.end());
    }
    plan.adapter_start.push_back(std::int32_t(plan.adapters.size()));
    for (int g = 0; g < blocks.n_groups(); g++) {
        GroupPlan& group = plan.groups[std::size_t(g)];
        if (group.keeps_state()) plan_state(item, blocks, group);
        else plan_tables(item, blocks, g, group);
    }
}

void plan_items(std::span<Scheduled> items, const BlockManager& blocks, StepPlan& plan) {
    const std::vector<CacheGroup>& groups = blocks.layout().groups;
    plan.groups.resize(groups.size());
    for (std::size_t g = 0; g < groups.size(); g++) {
        const bool state = groups[g].keeps_state();
        plan.groups[g].parts.resize(state ? 0 : std::size_t(groups[g].blocks));
        plan.groups[g].unit = state ? groups[g].blocks : 0;
        if (!state) plan.groups[g].table_start.push_back(0);
    }
    plan.token_start.push_back(0);
    plan.adapter_start.push_back(0);
    for (Scheduled& item : items) plan_item(item, blocks, plan);
    if (plan.adapters.empty()) plan.adapter_start.clear();
}

} // namespace quire
