// quire.schedule.sequence: the sequences of a request (its answers or beams) and the group that they form. A group **owns** its
// sequences; the block manager has their block tables.
export module quire.schedule.sequence;

import quire.core.base;
import quire.paging.block_hash;
export import quire.paging.block;
export import quire.paging.block_manager;
import quire.paging.snapshot;
export import quire.schedule.request;

export namespace quire {

enum class GroupStatus : std::uint8_t { waiting, running, preempted, swapped, finished };

// Requests run in ascending order of their keys: the step of arrival plus aging_steps for each level of priority, then the order of
// arrival. So no request waits for ever.
using QueueKey = std::pair<std::int64_t, std::uint64_t>;

// One answer: the prompt and the tokens generated after it.
struct Sequence {
    int                index = 0; // which answer of its request
    std::vector<Token> tokens;
    int                n_computed = 0; // leading tokens whose KV is written
    // Last tokens that may have no slots yet: the sampled token, and the tokens forced behind it. With a recurrent state also the draft
    // tokens that were right beside others that were not: the state has to see them again.
    int                           n_new   = 1;
    TableId                       table   = -1;    // while it has blocks
    bool                          growing = false; // scratch of BlockSupply: gets blocks in this step
    double                        logprob = 0;     // sum over the generated tokens, where answers are ranked by it
    std::vector<PositionLogprobs> logprobs;        // of each generated token, where the answer is given as a whole
    FinishReason                  finish = FinishReason::none;
    Polymorphic<TokenFilter>      constraint;    // after the tokens so far
    bool                          waits = false; // in no step: its next mask is made beside the steps
    // Whether its last tokens may run again: then the recurrent state before them stays.
    bool                     may_repeat() const { return bool(constraint) || n_drafts > 0; }
    bool                     slow_masks   = false; // its last mask was made beside the steps, and took long
    double                   mask_seconds = 0;     // that the masks beside the steps took
    Polymorphic<TokenForcer> reasoning;            // after the tokens so far
    double                   mu        = 0;        // mirostat's state
    int                      n_dropped = 0; // tokens that a full context made it forget; they stood behind n_kept
    int                      n_kept    = 0;
    // The tokens that may follow, as guessed before this step; the first n_drafts of them run in it as draft tokens, each with a row of logits
    // (quire.decode.drafting).
    std::vector<Token>        guess;
    int                       n_drafts = 0;
    int                       n_right  = 0; // of these, as far as the step's results have been read
    Polymorphic<TokenGuesser> guesser;
    double                    hits     = -1; // how many of its guesses come true, 0..1, lately; -1: not known
    int                       n_judged = 0;  // guessed tokens that `hits` knows
    // The first tokens of the guess have to come, if the model writes the forced text in the usual tokens; and how many of these come true.
    int    n_forced    = 0;
    double forced_hits = 1;
};

// One request with all its sequences: admitted, preempted and resumed together (a sequence group).
struct SequenceGroup {
    RequestId                              id = 0;
    Request                                request;
    std::vector<std::unique_ptr<Sequence>> sequences; // still running; one until the prompt is computed
    std::vector<std::unique_ptr<Sequence>> finished;  // without blocks
    GroupStatus                            status               = GroupStatus::waiting;
    int                                    n_cached             = 0;     // prompt tokens found in the cache
    int                                    n_loaded             = 0;     // of these, tokens that were in host memory
    int                                    n_from_disk          = 0;     // of these, tokens that files had
    int                                    n_recomputed         = 0;     // tokens computed again after preemptions
    int                                    n_preempted          = 0;     // preemptions of the request
    int                                    n_priority_preempted = 0;     // of these, for a more urgent request
    int                                    n_drafted            = 0;     // draft tokens that ran
    int                                    n_accepted           = 0;     // of these, tokens that were right
    bool                                   prompt_done          = false; // the prompt is computed, all sequences exist
    std::vector<int>                       cancelled; // answers cancelled before their sequences existed
    SharingStats                           sharing;
    std::chrono::steady_clock::time_point  first_run{}; // when it was scheduled for the first time

    int n_prompt() const { return int(request.prompt.size()); }
    // Tokens of the whole text so far, dropped ones among them; and how many of these were generated.
    int length(const Sequence& s) const { return int(s.tokens.size()) + s.n_dropped; }
    int n_generated(const Sequence& s) const { return length(s) - n_prompt(); }
    // How many of the sequence's last tokens were generated.
    int n_generated_left(const Sequence& s) const { return std::min(n_generated(s), int(s.tokens.size()) - s.n_kept); }

    // -- the scheduler's
    QueueKey                               key;
    CacheNamespace                         space;
    bool                                   ready = false; // has its slots, and takes part in this step
    int                                    share = 0;     // tokens that it may run in this step
    std::vector<std::unique_ptr<Sequence>> spare;         // for forks, so that a fork allocates nothing
    std::vector<TableId>                   tables;        // scratch of block_tables()
    std::vector<BlockRun> runs; // the reserved chunks, one for each sequence (quire.schedule.reservation)

    // Whether every row of the prompt is wanted and not there yet: then all of it is computed, and nothing is read from the cache.
    bool computes_all() const { return request.wants_all_rows() && !prompt_done; }
    // Whether a sequence waits: the sequences of a group run together, or not at all.
    bool waits() const {
        return std::ranges::any_of(sequences, [](const auto& s) { return s->waits; });
    }
    // The tables of all sequences that have blocks, valid until the next call.
    std::span<const TableId> block_tables();
};

// Appends the group's sequences to a snapshot, and notes how far its blocks are filled.
void view(const SequenceGroup& group, ViewStatus status, const BlockManager& blocks, Snapshot& snapshot);

} // namespace quire

module :private;

namespace quire {

std::span<const TableId> SequenceGroup::block_tables() {
    tables.clear();
    for (const auto& s : sequences)
        if (s->table >= 0) tables.push_back(s->table);
    return tables;
}

void view(const SequenceGroup& group, ViewStatus status, const BlockManager& blocks, Snapshot& snapshot) {
    for (const auto& s : group.sequences) {
        SequenceView& v = snapshot.sequences.emplace_back();
        v.request       = group.id;
        v.index         = s->index;
        v.status        = status;
        v.n_prompt      = std::min(group.n_prompt(), int(s->tokens.size()));
        v.n_tokens      = int(s->tokens.size());
        v.n_computed    = s->n_computed;
        if (s->table < 0) continue;
        const int size = blocks.block_size();
        for (BlockId b = blocks.state_from(s->table); b >= 0;
             b         = status == ViewStatus::swapped ? released_block : blocks.next_of(b))
            v.state.push_back(b);
        v.n_in_state = blocks.state_at(s->table);
        for (int g = 0; g < int(blocks.layout().tables().size()); g++) {
            const int  released = blocks.n_released(s->table, g);
            const auto table    = blocks.blocks(s->table, g).subspan(std::size_t(released));
            if (g == 0) {
                v.n_released = released;
                v.blocks.assign(table.begin(), table.end());
            } else {
                v.other_groups.push_back({released, {table.begin(), table.end()}});
            }
            for (std::size_t i = 0; i < table.size() && status != ViewStatus::swapped; i++)
                for (BlockId block = table[i]; block >= 0; block = blocks.next_of(block)) {
                    int& filled = snapshot.blocks[std::size_t(block)].filled;
                    filled      = std::max(filled, std::clamp(v.n_computed - (int(i) + released) * size, 0, size));
                }
        }
    }
}

} // namespace quire
