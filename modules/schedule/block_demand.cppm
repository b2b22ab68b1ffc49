// quire.schedule.block_demand: how many blocks a group takes when it is admitted, and later. Owns scratch memory only.
//
// Windows: a sequence that is much longer than the window of all layers is computed in pieces, with no more blocks than it needs at any
// one time. In each step it gets the blocks of its next tokens; after the step it gives back the blocks behind the window.
export module quire.schedule.block_demand;

import quire.core.base;
import quire.paging.cache_layout;
import quire.schedule.checkpoints;
import quire.schedule.request_check;
import quire.schedule.sequence;

export namespace quire {

class BlockDemand {
public:
    using Groups = std::span<const std::unique_ptr<SequenceGroup>>;

    // `checkpoints` outlives the demand. `max_batch_tokens`: of a step. `watermark`: blocks that an admission leaves free while other requests
    // run.
    BlockDemand(const BlockManager& blocks, const Checkpoints& checkpoints, int max_batch_tokens, int watermark)
        : blocks_(blocks), checkpoints_(checkpoints), max_batch_tokens_(max_batch_tokens), watermark_(watermark),
          window_(blocks.layout().widest_window()) {}

    // The widest window of the layers that give blocks back; 0: none of them does.
    int window() const { return window_; }
    // How many tokens of each sequence of a group have blocks at once while they are computed.
    int  tokens_at_once(const SequenceGroup& group) const;
    bool in_pieces(const SequenceGroup& group) const {
        return tokens_at_once(group) < int(group.sequences[0]->tokens.size());
    }
    // Whether the sequence needs no more grow(): it has blocks for all tokens, or only the last n_new tokens lack blocks and, where layers have a
    // window, all others are computed. (While older tokens are not computed, the window does not give back the blocks that the new tokens need.)
    bool is_whole(const Sequence& s) const;
    // Blocks of the recurrent states that a group's sequences hold at once, beyond one state for each sequence that there is: with the state that
    // becomes a checkpoint when the answer ends.
    int more_states(const SequenceGroup& group) const {
        return (states_needed(group.request) - 1 + int(checkpoints_.has_end(group.request))) *
               blocks_.blocks_per_unit();
    }

    // Whether the answers of a group, with more_tokens tokens more each, exceed the pool even if nothing else had blocks. They count as if they
    // shared the full blocks of the prompt alone, as answers do that were never preempted: so the token at which they end or shift does not
    // depend on other requests. Layers with windows or states, beams and pinned prompts: always false, the pool itself decides.
    bool outgrows(const SequenceGroup& group, int more_tokens = 0) const;

    // The blocks that an admission takes from the free list, or that the group's sequences will need later. A group that runs alone needs
    // fewer. `closing`: tables that are closed before.
    int to_admit(SequenceGroup& group, std::span<const TableId> closing = {}, bool alone = false);
    // Blocks that an admission beside `running` must leave free: the watermark, one for the next token of each sequence of the group,
    // and the blocks that the running groups will take until their windows give some back.
    int to_keep_free(const SequenceGroup& group, Groups running) const;
    // Whether a waiting group finds blocks in this step, once the running groups behind the first n_staying have given up theirs.
    bool fits(SequenceGroup& group, Groups running, std::size_t n_staying);

private:
    int at_once(const SequenceGroup& group, int more_entries = 0) const;
    int for_step(Groups running);

    const BlockManager&                 blocks_;
    const Checkpoints&                  checkpoints_;
    int                                 max_batch_tokens_, watermark_, window_;
    std::vector<std::span<const Token>> texts_; // scratch, and the next two
    std::vector<TableId>                closing_;
    std::vector<Write>                  writes_;
};

} // namespace quire

module :private;

namespace quire {

int BlockDemand::tokens_at_once(const SequenceGroup& group) const {
    const int n = int(group.sequences[0]->tokens.size());
    if (window_ == 0 || group.request.pin) return n;
    const int chunk =
        blocks_.layout().keeps_all() ? max_batch_tokens_ : std::min(max_batch_tokens_, std::max(window_, 256));
    return n - window_ > chunk ? window_ + chunk : n;
}

bool BlockDemand::is_whole(const Sequence& s) const {
    const int n = int(s.tokens.size()), held = blocks_.n_entries(s.table);
    return held >= blocks_.entries_for(n) ||
           (held >= blocks_.entries_for(n - s.n_new) && (window_ == 0 || s.n_computed >= n - s.n_new));
}

bool BlockDemand::outgrows(const SequenceGroup& group, int more_tokens) const {
    const Request& r = group.request;
    const int      k = int(group.sequences.size());
    if (k < 2 || !group.prompt_done || r.beam_width > 0 || r.pin || window_ > 0 || blocks_.blocks_per_unit() > 0)
        return false;
    const std::int64_t shared = int(r.prompt.size()) / blocks_.block_size(),
                       each   = blocks_.entries_for(int(group.sequences[0]->tokens.size()) + more_tokens);
    return (shared + k * (each - shared)) * blocks_.layout().blocks_per_entry() >
           blocks_.n_blocks() - blocks_.n_pinned();
}

int BlockDemand::to_keep_free(const SequenceGroup& group, Groups running) const {
    const int sequences = group.prompt_done ? int(group.sequences.size()) : group.request.width() - 1;
    int       n         = watermark_ + sequences * blocks_.layout().blocks_per_entry() + more_states(group);
    if (window_ == 0) return n;
    for (const auto& other : running)
        for (const auto& s : other->sequences)
            if (!is_whole(*s)) n += std::max(at_once(*other, 1) - blocks_.n_held(s->table), 0);
    return n;
}

bool BlockDemand::fits(SequenceGroup& group, Groups running, std::size_t n_staying) {
    closing_.clear();
    for (const auto& leaving : running.subspan(n_staying))
        for (TableId table : leaving->block_tables()) closing_.push_back(table);
    const Groups staying = running.first(n_staying);
    const int    keep    = staying.empty() ? 0 : to_keep_free(group, staying) + for_step(staying);
    const int    n_free  = blocks_.n_free(closing_);
    return keep <= n_free && to_admit(group, closing_, staying.empty()) + keep <= n_free;
}

int BlockDemand::to_admit(SequenceGroup& group, std::span<const TableId> closing, bool alone) {
    if (group.status == GroupStatus::swapped) return blocks_.blocks_to_swap_in(group.block_tables(), closing);
    const CacheLayout& layout = blocks_.layout();
    const int          n = int(group.sequences[0]->tokens.size()), most = tokens_at_once(group);
    const bool         whole = group.request.pin, pieces = alone && !whole && window_ > 0;
    const int least = pieces ? layout.blocks_at_once(n, blocks_.block_size()) : std::numeric_limits<int>::max();
    texts_.clear();
    for (const auto& s : group.sequences) texts_.push_back(s->tokens);
    if (most < n) {
        const int more = int(group.sequences.size()) * layout.blocks_per_entry();
        int       all  = at_once(group);
        if (layout.keeps_all() && !group.computes_all()) // blocks that are found need not be taken
            all = blocks_.blocks_to_allocate(group.space, texts_, closing, false, blocks_.entries_for(most));
        return std::min({all + more, blocks_.n_blocks(), least});
    }
    if (group.computes_all()) return std::min(blocks_.blocks_for(n) + blocks_.blocks_per_unit(), least);
    const int all = blocks_.blocks_to_allocate(group.space, texts_, closing, whole);
    return window_ > 0 && n > window_ ? std::min(all, least) : all;
}

// Blocks that a sequence of a group holds while it is computed in pieces, with more_entries more of each cache group with a window.
int BlockDemand::at_once(const SequenceGroup& group, int more_entries) const {
    const int all = blocks_.entries_for(int(group.sequences[0]->tokens.size())),
              n   = std::min(blocks_.entries_for(tokens_at_once(group)) + more_entries, all);
    int sum       = blocks_.blocks_per_unit();
    for (const CacheGroup& g : blocks_.layout().tables()) sum += (g.window > 0 ? n : all) * g.blocks;
    return sum;
}

// Blocks that running groups take for their next tokens.
int BlockDemand::for_step(Groups running) {
    writes_.clear();
    for (const auto& group : running)
        for (const auto& s : group->sequences)
            if (is_whole(*s))
                writes_.push_back({s->table, int(s->tokens.size()) - s->n_new, s->n_new, s->may_repeat()});
    return blocks_.blocks_to_write(writes_);
}

} // namespace quire
