// quire.schedule.block_supply: gives groups their blocks: when they are admitted, and for the tokens of each step. Owns scratch memory only.
export module quire.schedule.block_supply;

import quire.core.base;
import quire.schedule.block_demand;
import quire.schedule.preemption;
import quire.schedule.reservation;
import quire.schedule.sequence;

export namespace quire {

class BlockSupply {
public:
    // `reservations`: null: blocks on demand.
    BlockSupply(BlockManager& blocks, BlockDemand& demand, const Reservations* reservations)
        : blocks_(blocks), demand_(demand), reservations_(reservations) {}

    // Gives a waiting or preempted group its blocks, all or none (false), so that keep_free blocks stay free. `alone`: no group runs.
    bool admit(SequenceGroup& group, int keep_free, bool alone, PreemptionStats& stats);
    // A waiting group begins in the chunk that is reserved for it.
    void place(SequenceGroup& group);
    // Slots for the next token of each sequence, for all of a group or none. A prompt has its slots since admission, but a block
    // that is shared may have to be copied now.
    bool allocate_slots(SequenceGroup& group);
    // Then slots for the draft tokens of each sequence, so that keep_free blocks stay free; where that cannot be, no draft token runs.
    void allocate_drafts(SequenceGroup& group, int keep_free);

private:
    // The progress of one grow_once().
    struct Growth {
        bool runs = false; // a sequence has tokens to compute
        bool more = false; // tables have grown
    };

    bool   grow(SequenceGroup& group);
    Growth grow_once(SequenceGroup& group);

    BlockManager&       blocks_;
    BlockDemand&        demand_;
    const Reservations* reservations_;
    std::vector<Write>  writes_; // scratch
};

} // namespace quire

module :private;

namespace quire {

bool BlockSupply::admit(SequenceGroup& group, int keep_free, bool alone, PreemptionStats& stats) {
    if (group.status == GroupStatus::swapped) {
        const int n_blocks = blocks_.blocks_to_swap_in(group.block_tables());
        if (!blocks_.swap_in(group.block_tables(), keep_free)) return false;
        stats.swaps_in++;
        stats.swapped_blocks += std::uint64_t(n_blocks);
        return true;
    }
    // Sequences that were forks share a beginning, whose states, and blocks behind windows, the cache may lack: grow() computes it once for all.
    const bool forks =
        group.sequences.size() > 1 && !group.request.pin && (demand_.window() > 0 || blocks_.blocks_per_unit() > 0);
    if (keep_free > blocks_.n_free() && !(alone && forks))
        return false; // known without a look for its prompt in the cache
    const int need = demand_.to_admit(group, {}, alone);
    if (need + keep_free > blocks_.n_free() && !(alone && forks)) return false;
    if (forks || demand_.in_pieces(group) ||
        (alone && demand_.window() > 0 && demand_.to_admit(group) > blocks_.n_free())) { // grow() gives the blocks
        for (auto& s : group.sequences) s->table = blocks_.open_table(group.space), s->n_new = 1;
        return true;
    }
    int left = need; // blocks for this sequence and the next ones
    for (std::size_t i = 0; i < group.sequences.size(); i++) {
        Sequence& s = *group.sequences[i];
        if (group.sequences.size() > 1) {
            const std::span<const Token> text = s.tokens;
            left = std::max(left - blocks_.blocks_to_allocate(group.space, std::array{text}, {}, group.request.pin), 0);
        } else {
            left = 0;
        }
        s.table = blocks_.open_table(group.space);
        s.n_new = 1;
        if (blocks_.allocate(s.table, s.tokens, keep_free + left, !group.computes_all(), group.request.pin)) {
            if (group.n_preempted == 0) group.n_loaded = blocks_.n_loaded(s.table) * blocks_.block_size();
            continue;
        }
        for (std::size_t j = i + 1; j-- > 0;) blocks_.close_table(std::exchange(group.sequences[j]->table, -1));
        return false;
    }
    return true;
}

void BlockSupply::place(SequenceGroup& group) {
    Sequence& s = *group.sequences[0];
    s.table     = blocks_.open_table(group.space);
    reservations_->place_first(group, blocks_);
    check(blocks_.allocate(s.table, s.tokens, 0, false), "a chunk was reserved that is not free");
}

bool BlockSupply::allocate_slots(SequenceGroup& group) {
    if (reservations_ && group.sequences.size() > 1) reservations_->place_forks(group, blocks_);
    const auto whole = [&](const auto& s) { return demand_.is_whole(*s); };
    if (!std::ranges::all_of(group.sequences, whole) && !grow(group)) return false;
    const bool states   = blocks_.blocks_per_unit() > 0;
    const auto allocate = [&] {
        writes_.clear();
        for (const auto& s : group.sequences) {
            const int  n       = int(s->tokens.size());
            const int  n_slots = whole(s) && !blocks_.must_wait(s->table, n) ? s->n_new : 0; // others have them already
            const bool runs    = whole(s) || s->growing;
            if (states && runs) writes_.push_back({s->table, n - n_slots, n_slots, s->may_repeat()});
            else if (n_slots > 0) writes_.push_back({s->table, n - n_slots, n_slots});
        }
        return blocks_.allocate_slots(writes_);
    };
    if (allocate()) return true;
    bool drafts = false; // each keeps the state before it
    for (const auto& s : group.sequences) drafts |= states && std::exchange(s->n_drafts, 0) > 0;
    return drafts && allocate();
}

void BlockSupply::allocate_drafts(SequenceGroup& group, int keep_free) {
    for (const auto& s : group.sequences) {
        if (s->n_drafts == 0) continue;
        const int        n = int(s->tokens.size());
        const std::array write{Write{s->table, n, s->n_drafts, blocks_.blocks_per_unit() > 0}};
        const bool fits = blocks_.n_entries(s->table) >= blocks_.entries_for(n) && !blocks_.must_wait(s->table, n) &&
                          blocks_.blocks_to_write(write) + keep_free <= blocks_.n_free();
        if (!fits || !blocks_.allocate_slots(write)) s->n_drafts = 0;
    }
}

// Of the sequences before sequence i of a group, the one with which it has the most whole blocks in common, and so many tokens of these
// blocks. That one is computed for both. The last token of either does not count.
std::pair<const Sequence*, int> common_beginning(const SequenceGroup& group, std::size_t i, int block_size) {
    const std::vector<Token>& tokens = group.sequences[i]->tokens;
    const Sequence*           with   = nullptr;
    int                       most   = 0;
    for (std::size_t j = 0; j < i; j++) {
        const std::vector<Token>& other = group.sequences[j]->tokens;
        const auto                least = std::size_t(most + block_size); // tokens in common, to be better than that
        if (std::min(tokens.size(), other.size()) <= least || tokens[least - 1] != other[least - 1]) continue;
        const auto same =
            std::mismatch(tokens.begin(), tokens.end(), other.begin(), other.end()).first - tokens.begin();
        const int n = std::min(int(same), int(std::min(tokens.size(), other.size())) - 1) / block_size * block_size;
        if (n > most) with = group.sequences[j].get(), most = n;
    }
    return {with, most};
}

// Gives blocks for the next tokens to a group whose sequences are computed in pieces. False: no sequence can go on.
bool BlockSupply::grow(SequenceGroup& group) {
    for (Growth did{false, true}; did.more;) { // what others wait for may have been found in the cache
        did = grow_once(group);
        if (did.runs) return true;
    }
    return std::ranges::all_of(group.sequences, [&](const auto& s) { return demand_.is_whole(*s); });
}

// The sequences go on side by side, a block at a time, so that a block that they share is there for all of them. Their common beginning is
// computed once, then forked.
BlockSupply::Growth BlockSupply::grow_once(SequenceGroup& group) {
    const int n = int(group.sequences[0]->tokens.size()), size = blocks_.block_size(),
              chunk = demand_.in_pieces(group) ? demand_.tokens_at_once(group) - demand_.window() : n;
    int    end = n, computed = n;
    Growth did;
    for (std::size_t i = 0; i < group.sequences.size(); i++) {
        Sequence& s = *group.sequences[i];
        s.growing   = true;
        if (i > 0 && s.n_computed == 0 && blocks_.n_entries(s.table) == 0) {
            const auto [other, common] = common_beginning(group, i, size);
            if (other && other->n_computed == common) {
                blocks_.close_table(s.table);
                s.table      = blocks_.fork_table(other->table);
                s.n_computed = common;
                did.more     = true;
            } else if (other && other->n_computed < common) {
                if (other->growing) end = std::min(end, common);
                s.growing = false;
                continue;
            } // or the other one is past that, because the sequence that this one was to follow has ended
        }
        computed = std::min(computed, s.n_computed);
    }
    const int step = std::max(size, chunk / size * size);
    bool      more = true;
    for (int to = (computed / size + 1) * size; more; to += size) {
        to   = std::min(to, end);
        more = to < end;
        for (auto& s : group.sequences) {
            if (!s->growing) continue;
            const int had  = blocks_.n_entries(s->table);
            const int from = blocks_.grow(s->table, s->tokens, s->n_computed, to, !group.computes_all());
            const int have = blocks_.n_entries(s->table) * size;
            if (!group.prompt_done && group.n_preempted == 0) {
                group.n_cached += from - s->n_computed;
                group.n_loaded = blocks_.n_loaded(s->table) * size;
            }
            did.more      = did.more || have > had * size || from > s->n_computed;
            s->n_computed = from;
            did.runs      = did.runs || std::min(have, n - 1) > from;
            more          = more && have >= to && to < from + step;
        }
    }
    return did;
}

} // namespace quire
