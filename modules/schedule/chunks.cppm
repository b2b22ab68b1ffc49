// quire.schedule.chunks: how the tokens of a step are shared among the requests, and how many tokens of each sequence run. Owns scratch memory
// only.
export module quire.schedule.chunks;

import quire.core.base;
import quire.schedule.batch;
import quire.schedule.checkpoints;
import quire.schedule.sequence;

export namespace quire {

class StepShares {
public:
    using Groups = std::span<const std::unique_ptr<SequenceGroup>>;

    // `max_logit_rows`: of a step. `whole_prompts`: a prompt runs in one step or not at all. `checkpoints` outlives the shares.
    StepShares(int max_groups, int max_logit_rows, bool whole_prompts, const Checkpoints& checkpoints);

    // A step of so many tokens; no group takes part yet.
    void begin(int tokens, Groups running);
    // A group that has its slots takes part.
    void add(SequenceGroup& group, const BlockManager& blocks);
    // Whether the step has tokens for another request: the groups that take part leave some, or few prompts share the step. A request then
    // takes its blocks before it is computed.
    bool has_room() const;
    // Appends what the sequences of the groups that take part do in this step, in the order of `running`.
    void schedule(Groups running, BlockManager& blocks, std::vector<Scheduled>& items);

private:
    // The tokens that a group can run in a step.
    struct Claim {
        SequenceGroup* group  = nullptr;
        int            tokens = 0;     // at least one for each sequence
        bool           prompt = false; // more than the next tokens: a prompt, or tokens that are computed again
    };
    // The rest of a step.
    struct Budget {
        int tokens = 0, logit_rows = 0;
        int others = 0, other_rows = 0; // of these, kept for later groups
    };

    static Claim claim_of(SequenceGroup& group, const BlockManager& blocks);
    int          limit_drafts(const Scheduled& item, BlockManager& blocks, const Budget& budget, int left) const;
    void         share();
    void         schedule_chunks(SequenceGroup& group, BlockManager& blocks, Budget& budget,
                                 std::vector<Scheduled>& items) const;

    int                max_logit_rows_;
    bool               whole_prompts_;
    const Checkpoints& checkpoints_;
    int                tokens_ = 0; // of the step
    std::vector<Claim> claims_;
    // Of all claims: their tokens, the rows that they need at least, and the number of prompts among them.
    int claimed_ = 0, claimed_rows_ = 0, n_prompts_ = 0;
};

} // namespace quire

module :private;

namespace quire {

StepShares::StepShares(int max_groups, int max_logit_rows, bool whole_prompts, const Checkpoints& checkpoints)
    : max_logit_rows_(max_logit_rows), whole_prompts_(whole_prompts), checkpoints_(checkpoints) {
    claims_.reserve(std::size_t(max_groups));
}

void StepShares::begin(int tokens, Groups running) {
    tokens_ = tokens;
    claims_.clear();
    claimed_ = claimed_rows_ = n_prompts_ = 0;
    for (const auto& group : running) group->ready = false;
}

void StepShares::add(SequenceGroup& group, const BlockManager& blocks) {
    group.ready    = true;
    Claim&     c   = claims_.emplace_back(claim_of(group, blocks));
    const bool all = group.computes_all();
    if (all && !whole_prompts_) c.tokens = std::min(c.tokens, max_logit_rows_);
    claimed_ += c.tokens;
    // In chunks a prompt takes the rows that are left, at least one.
    claimed_rows_ += all && whole_prompts_ ? c.tokens : int(group.sequences.size());
    n_prompts_ += c.prompt;
}

bool StepShares::has_room() const {
    constexpr int most_prompts = 4;
    return claimed_rows_ < max_logit_rows_ &&
           (claimed_ < tokens_ || (n_prompts_ > 0 && n_prompts_ < most_prompts && !whole_prompts_));
}

int tokens_with_slots(const Sequence& s, const BlockManager& blocks) {
    return blocks.n_entries(s.table) * blocks.block_size();
}

StepShares::Claim StepShares::claim_of(SequenceGroup& group, const BlockManager& blocks) {
    Claim claim{&group, 0, false};
    for (const auto& s : group.sequences) {
        const int n    = std::min(int(s->tokens.size()), tokens_with_slots(*s, blocks));
        int       from = s->n_computed;
        if (n <= from) continue; // the sequence waits for another one of its group
        // Blocks that were found are written by others, unless these leave.
        if (!group.computes_all())
            from = std::min(
                std::max(blocks.next_unwritten(s->table, from, n), blocks.n_found(s->table) * blocks.block_size()),
                n - 1);
        claim.tokens += n - from;
        claim.prompt = claim.prompt || int(s->tokens.size()) - from > s->n_new;
    }
    return claim;
}

// Sets each group's `share`; together at most the step's tokens. The next tokens of decoding groups come first. Half of the rest goes to
// prompts in the order of their keys, so that the first prompt gets on, whatever comes after it. The other half goes to the most urgent and
// shortest prompts first, so that a short prompt does not wait for a whole long one. Each half takes the tokens that the other one leaves.
void StepShares::share() {
    int        tokens = tokens_;
    const auto give   = [&](Claim& c, int n) {
        n = std::clamp(n, 0, c.tokens);
        c.group->share += n;
        c.tokens -= n;
        tokens -= n;
        return n;
    };
    bool prompts = false;
    for (Claim& c : claims_) c.group->share = 0, prompts = prompts || c.prompt;
    if (prompts)
        std::ranges::sort(claims_, {}, [](const Claim& c) { return c.group->key; }); // some were admitted in this step
    for (Claim& c : claims_)
        if (!c.prompt) give(c, int(c.group->sequences.size())); // the step has a token for each sequence
    for (Claim& c : claims_)
        if (!c.prompt) give(c, tokens); // forced tokens
    if (!prompts) return;
    int half = tokens - tokens / 2;
    for (Claim& c : claims_)
        if (c.prompt) half -= give(c, half);
    if (tokens == 0) return;
    std::ranges::sort(claims_, {},
                      [](const Claim& c) { return std::tuple(c.group->request.priority, c.tokens, c.group->key); });
    for (Claim& c : claims_)
        if (c.prompt) give(c, tokens);
}

// Chunked prefill and decode: each sequence runs as many of its tokens as the budget allows, but not its last token. The last tokens of
// all sequences of a group run in one step, when no other tokens remain, because beams are compared with one another.
void StepShares::schedule_chunks(SequenceGroup& group, BlockManager& blocks, Budget& budget,
                                 std::vector<Scheduled>& items) const {
    const std::size_t first_item = items.size();
    const int         own        = int(group.sequences.size());
    const bool        all_rows   = group.computes_all();
    // Tokens that are left for the last tokens of several sequences, where the step has more.
    const int  kept   = own > 1 && budget.tokens - budget.others > own ? own : 0;
    bool       last   = true;
    const bool states = blocks.blocks_per_unit() > 0;
    for (const auto& s : group.sequences) {
        const int n = int(s->tokens.size()), have = std::min(n, tokens_with_slots(*s, blocks));
        if (!all_rows) {
            const int next = blocks.next_unwritten(s->table, s->n_computed, std::min(n, have + 1));
            if (!group.prompt_done && group.n_preempted == 0) group.n_cached += next - s->n_computed;
            s->n_computed = next;
        }
        int take = std::min(std::min(n - 1, have) - s->n_computed, budget.tokens - budget.others - kept);
        if (all_rows) take = std::min(take, budget.logit_rows - budget.other_rows);
        take = std::max(take, 0);
        if (!all_rows && blocks.is_partly_written(s->table, s->n_computed)) take = 0, last = false; // not twice
        if (whole_prompts_ && (take < n - 1 - s->n_computed || budget.tokens - take - budget.others < 1 ||
                               budget.logit_rows - (all_rows ? take : 0) - budget.other_rows < 1))
            take = 0, last = false;
        if (states) {
            // A step ends where the state is kept; and tokens that may run again run apart from those before them.
            const int stop = checkpoints_.next(s->n_computed, n, group.request);
            if (s->n_computed + take >= stop && take > 0) take = stop - s->n_computed, last = last && stop == n;
            if (s->may_repeat() && n - s->n_computed > s->n_new && take > 0) {
                take = std::min(take, n - s->n_new - s->n_computed), last = false;
            }
        }
        items.push_back({&group, s.get(), s->n_computed, take, 0, all_rows ? take : 0, false});
        blocks.will_write({s->table, s->n_computed, take});
        budget.tokens -= take;
        budget.logit_rows -= all_rows ? take : 0;
        last = last && s->n_computed + take + 1 == n && have == n && !blocks.must_wait(s->table, n);
    }
    last = last && budget.tokens - budget.others >= own && budget.logit_rows - budget.other_rows >= own;
    for (std::size_t i = first_item; i < items.size() && last; i++) {
        Scheduled& item = items[i];
        item.samples    = true;
        item.n_drafts   = limit_drafts(item, blocks, budget, int(items.size() - i) - 1);
        const int n     = 1 + item.n_drafts;
        item.n_tokens += n;
        item.n_logit_rows += n;
        blocks.will_write({item.sequence->table, item.first, item.n_tokens});
        budget.tokens -= n;
        budget.logit_rows -= n;
    }
    if (!last)
        for (const auto& s : group.sequences)
            if (std::exchange(s->n_drafts, 0) > 0) blocks.truncate(s->table, int(s->tokens.size()));
    // Of this group alone: all groups before it have been here.
    for (std::size_t i = items.size(); i-- > first_item;)
        if (items[i].n_tokens == 0) items.erase(items.begin() + std::ptrdiff_t(i));
}

// How many draft tokens of an item run. They need slots, and the tokens and rows that other groups and the `left` later sequences of this group
// do not need. A step ends where a state is kept.
int StepShares::limit_drafts(const Scheduled& item, BlockManager& blocks, const Budget& budget, int left) const {
    Sequence& s = *item.sequence;
    if (s.n_drafts == 0) return 0;
    const int n    = int(s.tokens.size());
    int       most = std::min({s.n_drafts, tokens_with_slots(s, blocks) - n, budget.tokens - budget.others - 1 - left,
                               budget.logit_rows - budget.other_rows - 1 - left});
    if (blocks.blocks_per_unit() > 0) {
        const Request& r = item.group->request;
        most             = checkpoints_.wanted(n, r) ? 0 : std::min(most, checkpoints_.next(n, n + most, r) - n);
    }
    s.n_drafts = std::max(most, 0);
    blocks.truncate(s.table, n + s.n_drafts);
    return s.n_drafts;
}

void StepShares::schedule(Groups running, BlockManager& blocks, std::vector<Scheduled>& items) {
    share();
    Budget budget{tokens_, max_logit_rows_, 0, 0};
    if (!whole_prompts_)
        for (const auto& g : running)
            if (g->ready) budget.others += g->share, budget.other_rows += int(g->sequences.size());
    for (const auto& g : running) {
        if (!g->ready) continue;
        if (!whole_prompts_) budget.others -= g->share, budget.other_rows -= int(g->sequences.size());
        schedule_chunks(*g, blocks, budget, items);
    }
}

} // namespace quire
