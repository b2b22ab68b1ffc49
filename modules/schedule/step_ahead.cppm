// quire.schedule.step_ahead: plans the step after the running one, for sequences that get one token each. **Owns** the planned items.
export module quire.schedule.step_ahead;

import quire.core.base;
import quire.schedule.batch;
import quire.schedule.block_demand;
import quire.schedule.checkpoints;
import quire.schedule.context_limit;
import quire.schedule.sequence;

export namespace quire {

class StepAhead {
public:
    using Groups = std::span<const std::unique_ptr<SequenceGroup>>;

    StepAhead(BlockManager& blocks, const BlockDemand& demand, const ContextLimit& limit,
              const Checkpoints& checkpoints, int max_sequences);

    // While a step runs in which each of n_sequences sequences gets a token. The token ids of the plan stay open. False: the next step needs
    // more than a token of each, or a sequence of `running` is not in the running step.
    bool prepare(Groups running, std::size_t n_sequences, StepPlan& plan);
    // After that step: `items` become the items of the prepared step, and its plan gets the token ids. False: a sequence did not get the
    // token that was assumed, or has gone.
    bool adopt(Groups running, StepPlan& plan, std::vector<Scheduled>& items);
    // Nothing is prepared.
    void drop() { items_.clear(); }

private:
    bool plan_tokens(Groups running, std::size_t n_sequences);

    BlockManager&          blocks_;
    const BlockDemand&     demand_;
    const ContextLimit&    limit_;
    const Checkpoints&     checkpoints_;
    std::vector<Scheduled> items_;
    std::vector<Write>     writes_; // scratch
};

} // namespace quire

module :private;

namespace quire {

StepAhead::StepAhead(BlockManager& blocks, const BlockDemand& demand, const ContextLimit& limit,
                     const Checkpoints& checkpoints, int max_sequences)
    : blocks_(blocks), demand_(demand), limit_(limit), checkpoints_(checkpoints) {
    items_.reserve(std::size_t(max_sequences));
    writes_.reserve(std::size_t(max_sequences));
}

bool StepAhead::prepare(Groups running, std::size_t n_sequences, StepPlan& plan) {
    plan.clear();
    if (!plan_tokens(running, n_sequences)) items_.clear();
    else plan_items(items_, blocks_, plan);
    return !items_.empty();
}

// Lists the sequences that go on, each with a slot.
bool StepAhead::plan_tokens(Groups running, std::size_t n_sequences) {
    items_.clear();
    writes_.clear();
    std::size_t n_running = 0;
    for (const auto& group : running) {
        const Request& r = group->request;
        // Beams fork, and so do several answers after their prompt; a prompt that generates nothing ends.
        if (r.beam_width > 0 || !r.generates() || (!group->prompt_done && r.width() > 1) || demand_.outgrows(*group, 1))
            return false;
        for (const auto& s : group->sequences) {
            n_running++;
            const int position = int(s->tokens.size()); // of the token that this step gives it
            if (limit_.ends_by_length(*group, *s, 1)) continue;
            if (limit_.must_shift(r, position + 1)) return false;
            // The state that the running step writes is kept: the next one needs another state unit.
            if (blocks_.blocks_per_unit() > 0 && (s->may_repeat() || checkpoints_.wanted(position, r))) return false;
            if (blocks_.blocks_per_unit() > 0 && checkpoints_.may_end(position, r) && !blocks_.take_next(s->table))
                return false;
            items_.push_back({group.get(), s.get(), position, 1, 0, 1, true});
            writes_.push_back({s->table, position, 1});
        }
    }
    // Every sequence is in the running step, and gets a slot in the next one without a copy: a copy's source would not be free until the
    // step after that, whatever ends in between.
    return n_running == n_sequences && blocks_.allocate_slots(writes_, false);
}

bool StepAhead::adopt(Groups running, StepPlan& plan, std::vector<Scheduled>& items) {
    items.clear();
    std::swap(items, items_);
    std::size_t n = 0;
    for (const auto& group : running)
        for (const auto& s : group->sequences) {
            if (n == items.size() || items[n].sequence != s.get() || s->waits ||
                items[n].first + 1 != int(s->tokens.size()))
                return false;
            plan.tokens[n++] = s->tokens.back();
        }
    return n == items.size();
}

} // namespace quire
