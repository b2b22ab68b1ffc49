// quire.schedule.step_end: what a step that has run changes: how far its sequences are computed, which of their blocks others can find, and which
// blocks they give back. Owns nothing.
export module quire.schedule.step_end;

import quire.core.base;
export import quire.paging.block_manager;
export import quire.schedule.batch;
import quire.schedule.checkpoints;
import quire.schedule.sequence;

export namespace quire {

// Counters since the start.
struct StepStats {
    std::uint64_t released_blocks = 0;                   // behind the sliding windows of their layers
    std::uint64_t checkpoints     = 0;                   // recurrent states that were kept
    std::uint64_t drafts          = 0;                   // sequences with draft tokens, summed over the steps
    std::uint64_t draft_tokens = 0, accepted_tokens = 0; // that ran; of these, tokens that were right
    // Of the tokens that were right: how many stood first of their step's draft tokens, second, …
    std::array<std::uint64_t, most_drafts> accepted_at{};
};

class StepEnd {
public:
    // All outlive this object. `window`: the widest one of layers that give blocks back; 0: none does.
    StepEnd(BlockManager& blocks, const Checkpoints& checkpoints, int window, StepStats& stats)
        : blocks_(blocks), checkpoints_(checkpoints), window_(window), stats_(stats) {}

    // The step of these items has run. Its draft tokens count as wrong until accept() says that they are right.
    void commit(std::span<const Scheduled> items);
    // After commit(), for one of its items: see Scheduler::accept() and Scheduler::end_drafts().
    void accept(const Scheduled& item, int n);
    void end_drafts(const Scheduled& item);

private:
    void note_state(const SequenceGroup& group, const Sequence& sequence, int n);

    BlockManager&      blocks_;
    const Checkpoints& checkpoints_;
    int                window_;
    StepStats&         stats_;
};

} // namespace quire

module :private;

namespace quire {

void StepEnd::commit(std::span<const Scheduled> items) {
    blocks_.commit();
    const bool states = blocks_.blocks_per_unit() > 0;
    for (const Scheduled& item : items) {
        Sequence& s = *item.sequence;
        // The state has seen all tokens of the step: these run again together, from the state before them.
        // So do these where draft tokens ran behind them, unless accept() says that all were right.
        const bool stays = states && (item.again || item.n_drafts > 0);
        s.n_computed     = stays ? item.first : item.first + item.n_tokens - item.n_drafts - int(item.again);
        s.n_new          = std::clamp(int(s.tokens.size()) - s.n_computed, 1, s.n_new);
        if (states && !stays) blocks_.advance(s.table, s.n_computed);
        s.n_right = 0;
        item.group->n_drafted += item.n_drafts;
        stats_.drafts += std::uint64_t(item.n_drafts > 0);
        stats_.draft_tokens += std::uint64_t(item.n_drafts);
        if (item.again && item.n_drafts > 0) s.n_drafts = 0, blocks_.truncate(s.table, int(s.tokens.size()));
        blocks_.publish(s.table, s.tokens, s.n_computed);
        if (states && !stays) note_state(*item.group, s, s.n_computed);
        // The next query is at n_computed. A pinned prefix is kept whole.
        if (window_ > 0 && !item.group->request.pin)
            stats_.released_blocks += std::uint64_t(blocks_.release_behind(s.table, s.n_computed));
    }
}

void StepEnd::accept(const Scheduled& item, int n) {
    Sequence& s = *item.sequence;
    for (int i = s.n_right; i < n; i++) stats_.accepted_at[std::size_t(i)]++;
    const int more     = n - std::exchange(s.n_right, n);
    const int computed = item.first + item.n_tokens - item.n_drafts + n;
    item.group->n_accepted += more;
    stats_.accepted_tokens += std::uint64_t(more);
    if (blocks_.blocks_per_unit() > 0) {
        if (n < item.n_drafts) return; // the state has seen the wrong ones, too
        blocks_.advance(s.table, computed);
    }
    s.n_computed = computed;
    blocks_.publish(s.table, s.tokens, computed);
    if (blocks_.blocks_per_unit() > 0) note_state(*item.group, s, computed);
}

// The state of a sequence has seen n tokens, and its blocks are published: others may find it, now or when the answer ends.
void StepEnd::note_state(const SequenceGroup& group, const Sequence& s, int n) {
    if (checkpoints_.wanted(n, group.request) && blocks_.keep_state(s.table, s.tokens)) stats_.checkpoints++;
    else if (checkpoints_.may_end(n, group.request)) blocks_.note_last(s.table);
}

void StepEnd::end_drafts(const Scheduled& item) {
    Sequence& s = *item.sequence;
    s.n_drafts  = 0;
    if (s.table < 0) return; // the sequence has ended
    s.n_new = int(s.tokens.size()) - s.n_computed;
    blocks_.truncate(s.table, int(s.tokens.size()));
}

} // namespace quire
