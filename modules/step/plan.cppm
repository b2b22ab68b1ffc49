// quire.step.plan: the interface between scheduling and compute: StepPlan is everything that runs in one step, with the sampling plan;
// StepResults are its results. Plain values, owns nothing.
export module quire.step.plan;

import quire.core.base;
export import quire.paging.block;
export import quire.step.adapters;
import quire.step.logprobs;

export namespace quire {

// The change of one logit x before sampling, by the logits processors (penalties, DRY, logit bias, allowed tokens, bad words, min_tokens):
// x becomes x / divide (x · divide where x is negative) - subtract + add.
struct LogitEdit {
    Token token  = 0;
    float divide = 1, subtract = 0, add = 0;
    int   times   = 0; // the token was generated
    int   repeats = 0; // tokens of the longest repetition that it would continue
};

// The work of a device that samples on one row of logits, so that the row can stay there. The results: for each uniform (or for `chosen`) a
// token with its log-probability in the raw row, to which the mask belongs; then the n_top most likely tokens, best first; with mirostat at
// last each sampled token again, with its surprise in bits among the tokens that were left.
struct SamplingTask {
    int   row        = 0;  // of the logit rows; no two tasks share one
    Token chosen     = -1; // nothing is sampled: the log-probability of this token is wanted
    int   first_edit = 0, n_edits = 0;
    int   first_uniform = 0, n_uniforms = 0; // one token is sampled for each
    int   n_top        = 0;
    bool  logprobs     = false; // false: the log-probabilities of the results are not valid
    bool  only_edited  = false; // only tokens with an edit can be sampled (allowed tokens)
    int   first_mask   = -1;    // where the mask begins in `masks`: only its tokens can be sampled; -1: all can
    int   first_result = 0;
    // See SamplingParams. xtc_threshold: above 0.5 where XTC leaves out nothing this time.
    int   top_k       = 0;
    float temperature = 1, top_p = 1, min_p = 0, top_n_sigma = 0, typical_p = 1, xtc_threshold = 1;
    float dynatemp_range = 0, dynatemp_exponent = 1;
    int   mirostat = 0;
    float mu       = 0; // mirostat's limit for the surprise

    int n_results() const { return (chosen >= 0 ? 1 : n_uniforms) + n_top + (mirostat > 0 ? n_uniforms : 0); }
};

// The sampling tasks of a step, with the edits and random numbers that they refer to.
struct SamplingPlan {
    std::vector<SamplingTask>  tasks;
    std::vector<LogitEdit>     edits;
    std::vector<double>        uniforms; // random numbers in [0, 1)
    std::vector<std::uint64_t> masks;    // a bit for each token of the vocabulary, from the lowest bit of a word on

    void clear();
};

// How much of a SamplingPlan a device can do in one step; zeros: nothing, the host reads the rows of logits.
struct SamplingLimits {
    int tasks = 0, edits = 0, uniforms = 0, results = 0, top = 0;
    int mask_words = 0;
};

// The block tables of one cache group (quire.paging.cache_layout) in a step. An entry of its tables is one block in each part: the
// layers of a group are spread over the parts in order. A group of recurrent states has no tables and no parts, but state units.
struct GroupPlan {
    std::vector<std::int32_t> table_start; // [S+1] where each sequence's table begins in `tables`
    // [S] the entry of the sequence that its table begins with. Earlier entries lie behind the group's window. So do some of the first
    // entries of the table: they are released_block, for kernels that take whole tiles of positions.
    std::vector<std::int32_t> first_entry;
    struct Part {
        std::vector<BlockId>      tables; // the sequences' tables one after another
        std::vector<std::int32_t> slots;  // [T] where K and V of each token go: block * block_size + offset
    };
    std::vector<Part> parts = std::vector<Part>(1);
    // Recurrent states. [S][unit] the blocks of the state before the sequence's first token of this step, and of the state after its last
    // one. Both can be the same blocks; else the step reads the old ones and writes the new ones, and what others share stays as it is. A
    // sequence without a state begins with zeros: its first block of state_from is -1.
    std::vector<BlockId> state_from = {}, state_to = {};
    int                  unit = 0; // blocks of a state; 0: the group keeps K and V

    bool keeps_state() const { return unit > 0; }
    // The blocks of one sequence.
    std::span<const BlockId> from(std::size_t sequence) const { return unit_of(state_from, sequence); }
    std::span<const BlockId> to(std::size_t sequence) const { return unit_of(state_to, sequence); }

    // Where entry 0 of a sequence would stand in `tables`; it can be negative.
    std::int32_t origin(std::size_t sequence) const { return table_start[sequence] - first_entry[sequence]; }
    void         clear();

private:
    std::span<const BlockId> unit_of(const std::vector<BlockId>& units, std::size_t sequence) const {
        return std::span(units).subspan(sequence * std::size_t(unit), std::size_t(unit));
    }
};

// Rows of Carry's memory for each logit row of a step.
inline constexpr int mtp_states = 3;

// One step of the whole batch: everything that the model needs to know, in this process or another one.
// T tokens of S sequences; the tokens of a sequence are adjacent and in order. Plain numbers, no pointers.
struct StepPlan {
    std::vector<Token>        tokens;       // [T]
    std::vector<std::int32_t> positions;    // [T] position of each token in its sequence
    std::vector<std::int32_t> token_start;  // [S+1] rows of sequence s: token_start[s] .. token_start[s+1]
    std::vector<std::int32_t> context_lens; // [S] tokens with KV after this step
    // [S] leading positions whose K and V were surely written before this step. A kernel of this step may write the other positions, for this
    // sequence or for another one that shares the block. A kernel that begins early reads only the leading positions (cuda/warp.cuh). One number
    // holds for all groups: n_readable() reads the states of the first lane, and a step writes the entries of all lanes together.
    std::vector<std::int32_t> readable;
    std::vector<GroupPlan>    groups = std::vector<GroupPlan>(1); // of the cache layout
    std::vector<std::int32_t> logit_rows; // [L] rows of `tokens` whose logits are wanted, ascending
    // The adapters of each sequence, in ascending order: adapters[adapter_start[s]] .. adapters[adapter_start[s + 1]]. Both are empty where no
    // sequence has one.
    std::vector<std::int32_t> adapter_start; // [S+1]
    std::vector<AdapterUse>   adapters;
    BlockMoves                moves; // run before the tokens
    MoveTicket   after = 0;          // the executor's ticket of the moves that have to be done before the tokens run
    SamplingPlan sampling;           // for a device that samples
    // For models with a guessing layer (ModelConfig::mtp, draft), in one process. `guesses`: the plan runs this layer alone, one token of each
    // sequence, each with a logit row. `kept`: the hidden states to keep before the plan runs, in rows of Carry's memory, which has mtp_states
    // rows for each logit row that a step can have. `guessed`: a state comes from the last guesses, else from the last step.
    struct KeptRow {
        std::int32_t row = 0, to = 0;
        bool         guessed = false;
    };
    bool                 guesses = false;
    std::vector<KeptRow> kept;
    std::vector<std::int32_t>
        carried; // [S] the row of memory with the state before the sequence's first token; -1: unknown. Empty: all are

    int  n_tokens() const { return int(tokens.size()); }
    int  n_seqs() const { return int(context_lens.size()); }
    void clear();
};

// The results of a step: of its logit rows the best tokens and the results of the sampling tasks. The rows stay on the device; most
// steps need none of them.
// A row that is not usable() (quire.decode.sampler: NaN or +infinity in it, or nothing but -infinity) has -1 as its best token, and
// as the first token of its task's results. A sampled token is -1, too, where the edits leave no token. The rest of such results
// means nothing; quire.decode.decoder ends the request.
struct StepResults {
    std::span<const Token>        best;    // the most likely token of each row (the lowest id of several); or empty
    std::span<const TokenLogprob> sampled; // the results of the plan's tasks, from their first_result on
    std::function<std::span<const float>()>
        rows; // copies them to the host: [logit rows × vocab], valid until the next step
    // The hidden state of one of these rows, after the last norm: [hidden], valid until the next call.
    std::function<std::span<const float>(int row)> hidden;
};

} // namespace quire

module :private;

namespace quire {

void SamplingPlan::clear() {
    tasks.clear();
    edits.clear();
    uniforms.clear();
    masks.clear();
}

void GroupPlan::clear() {
    for (auto* v : {&table_start, &first_entry, &state_from, &state_to}) v->clear();
    for (Part& part : parts) {
        part.tables.clear();
        part.slots.clear();
    }
}

void StepPlan::clear() {
    for (auto* v : {&tokens, &positions, &token_start, &context_lens, &readable, &logit_rows, &adapter_start, &carried})
        v->clear();
    adapters.clear();
    kept.clear();
    guesses = false;
    for (GroupPlan& group : groups) group.clear();
    moves.clear();
    after = 0;
    sampling.clear();
}

} // namespace quire
