// quire.schedule.request: the plain values that flow through the engine: Request, StepPlan, Output. Owns nothing.
export module quire.schedule.request;

import quire.core.base;
import quire.core.std;

export namespace quire {

using RequestId = std::uint64_t;
using BlockId   = std::int32_t;

// How the next token is chosen. The defaults here are plain sampling from the model; the tools have their own.
struct SamplingParams {
    float temperature        = 1;  // 0: greedy, the lowest id on a tie
    int   top_k              = 0;  // 0: all
    float top_p              = 1;  // 1: all
    float min_p              = 0;  // fraction of the best token's probability; 0: all
    float repetition_penalty = 1;  // divides positive and multiplies negative logits of tokens that occurred
    float presence_penalty   = 0;  // subtracted once from a token that was generated
    float frequency_penalty  = 0;  // subtracted for each time it was generated
    int   repeat_last_n      = -1; // tokens the penalties look back over; -1: all
    std::vector<std::pair<Token, float>> logit_bias;
    std::vector<Token>                   allowed_tokens; // no others can be chosen; empty: all can
    std::vector<std::vector<Token>>      bad_words;      // sequences whose last token cannot follow the others
    std::uint64_t                        seed = 0;
    int logprobs                              = -1; // log-probabilities of that many best tokens per position; -1: none
};

// When a beam search ends before max_tokens (the names and rules of `transformers`).
enum class EarlyStopping : std::uint8_t {
    no,    // when no running beam, with the length it has, beats the worst of beam_width finished ones
    yes,   // as soon as beam_width candidates have finished
    never, // when no running beam can beat them at any length up to max_tokens
};

struct Request {
    std::vector<Token> prompt; // at least one
    SamplingParams     sampling;
    int                n       = 1; // number of answers
    int                best_of = 0; // answers to sample; the n with the best mean log-probability are returned; 0: n
    // > 0: beam search over the raw distribution; sampling parameters but `logprobs` do not apply. At least n.
    int           beam_width     = 0;
    float         length_penalty = 1; // score = summed log-probability / generated tokens ^ length_penalty
    EarlyStopping early_stopping = EarlyStopping::no;
    int           priority       = 0; // lower runs first, as in vLLM
    std::string   cache_salt;         // KV is shared only with requests of the same salt
    // Pins the prompt: it is computed once and not evicted until cancel(); nothing is generated.
    bool pin = false;
    // Computes Output::embedding and generates nothing. Such a request does not read the cache.
    bool embed      = false;
    int  max_tokens = 16; // 0: nothing is generated; the prompt is computed, with prompt_logprobs if asked for
    int  min_tokens = 0;  // until so many are generated, end and stop tokens are forbidden
    bool ignore_end = false;
    std::vector<Token> stop_tokens; // in addition to the model's end tokens
    int  prompt_logprobs = -1;      // like logprobs, for every prompt token; such a request does not read the cache
    bool return_logits   = false;   // the raw logits of the last prompt position

    // Most sequences that it can have at once.
    int width() const { return !generates() ? 1 : beam_width > 0 ? beam_width : std::max({n, best_of, 1}); }
    // Whether the logits of all prompt tokens are needed, so that all of them must be computed.
    bool wants_all_rows() const { return prompt_logprobs >= 0 || embed; }
    bool generates() const { return !pin && !embed && max_tokens > 0; }
};

struct TokenLogprob {
    Token token   = -1;
    float logprob = 0;
};

// The log-probability of a token, and those of the most likely tokens at its position, best first.
struct PositionLogprobs {
    TokenLogprob              chosen;
    std::vector<TokenLogprob> top;
};

enum class FinishReason : std::uint8_t {
    none,      // still running
    stop,      // an end token or a stop token; a pinned prefix that is ready
    length,    // max_tokens, the model's context or the whole pool is used up
    cancelled, // by the caller
    refused,   // can never run: see the message
    failed,    // the model's numbers are not finite, or no token can come: see the message
};

// The blocks of a request, summed over (a sample of) its steps; the paper, section 6.3.
struct SharingStats {
    std::uint64_t without = 0; // blocks its sequences would have needed without sharing
    std::uint64_t with    = 0; // blocks they held
    double        saved() const { return without > 0 ? 1 - double(with) / double(without) : 0; }
};

// One event of one answer of a request. An event with a finish reason is the last one of its `index`, an event with `done` the
// last one of the request. Answers of best_of and beam search come complete at the end, best first.
struct Output {
    RequestId                     id    = 0;
    int                           index = 0;       // which of the n answers
    std::vector<Token>            tokens;          // new since the last event; an end token is among them
    std::vector<PositionLogprobs> logprobs;        // one per token when asked for
    std::vector<PositionLogprobs> prompt_logprobs; // with the first event: prompt[1..], one each
    std::vector<float>            prompt_logits;   // with the first event when asked for: [vocab]
    std::vector<float>            embedding;       // with `done`, of `embed`: [hidden], the mean of the prompt's final
                                                   // hidden states (behind the last norm), of length 1
    int                                   prompt_tokens = 0;
    int                                   cached_tokens = 0; // prompt tokens found in the cache
    FinishReason                          finish        = FinishReason::none;
    bool                                  done          = false; // the request is over
    double                                logprob       = 0;     // best_of and beams: sum over the answer
    double                                score         = 0;     // the value they were ranked by
    int                                   n_preempted   = 0;     // times it was preempted
    SharingStats                          sharing;               // with `done`
    std::string                           message;               // why it was refused, or failed
    std::chrono::steady_clock::time_point first_run{};           // when its prompt was scheduled for the first time
};

// -- the interface between scheduling and compute -------------------------------------------------------

// Whole-block copies inside the device pool (copy-on-write) or between the pools (swap).
struct BlockCopy {
    BlockId from = 0, to = 0;
};

// What a device that samples does with one row of logits, so that the row can stay there. The answer: a token with its
// log-probability in the raw row for each draw (or for `chosen`), then the n_top best ones, best first.
struct RowTask {
    int   row        = 0;  // of the logit rows; no two tasks share one
    Token chosen     = -1; // instead of drawing: return this token's log-probability
    int   first_edit = 0, n_edits = 0;
    int   first_draw = 0, n_draws = 0;
    int   n_top       = 0;
    bool  logprobs    = false; // false: the log-probabilities of the answer are not valid
    bool  only_edited = false; // only tokens with an edit can be drawn
    int   top_k       = 0;
    float temperature = 1, top_p = 1, min_p = 0;
    int   first_answer = 0;

    int n_answers() const { return (chosen >= 0 ? 1 : n_draws) + n_top; }
};

// A logit before sampling: x / divide (x · divide where x is negative) - subtract + add.
struct LogitEdit {
    Token token  = 0;
    float divide = 1, subtract = 0, add = 0;
    int   times = 0; // it was generated
};

// How much of that a device can do in one step; zeros: nothing, the host reads the rows.
struct SamplingLimits {
    int tasks = 0, edits = 0, draws = 0, answers = 0, top = 0;
};

// One step of the whole batch: everything that the model, in this process or another, needs to know.
// T tokens of S sequences; the tokens of a sequence are adjacent and in order. Plain integers, no pointers.
// Before the tokens run: `swap_out` (device → swap pool), then `swap_in` (swap pool → device), then `copies`, each list in
// order: a block can be the target of a copy after it was the source of an earlier one.
struct StepPlan {
    std::vector<Token>        tokens;       // [T]
    std::vector<std::int32_t> positions;    // [T] position of each token in its sequence
    std::vector<std::int32_t> slots;        // [T] where its K and V go: block * block_size + offset
    std::vector<std::int32_t> token_start;  // [S+1] rows of sequence s: token_start[s] .. token_start[s+1]
    std::vector<std::int32_t> context_lens; // [S] tokens with KV after this step
    std::vector<BlockId>      block_tables; // the sequences' tables one after another
    std::vector<std::int32_t> table_start;  // [S+1] into block_tables
    std::vector<std::int32_t> logit_rows;   // [L] rows of `tokens` whose logits are wanted, ascending
    std::vector<BlockCopy>    swap_out, swap_in, copies;
    std::vector<RowTask>      tasks; // for a device that samples, with their edits and random numbers in [0, 1)
    std::vector<LogitEdit>    edits;
    std::vector<double>       draws;

    int  n_tokens() const { return int(tokens.size()); }
    int  n_seqs() const { return int(context_lens.size()); }
    void clear();
    bool moves_blocks() const { return !swap_out.empty() || !swap_in.empty() || !copies.empty(); }
};

// The logits of a step's logit rows, on the device. Most steps need only the best token of each row.
// A row that is not usable() (quire.decode.sampler: NaN or +infinity in it, or nothing but -infinity) has -1 as its best token, and
// as the token that its answer begins with: a draw, `chosen`, or the first of the best ones. So has a draw where the edits
// leave no token. The rest of such an answer means nothing; quire.decode.decoder ends the request.
struct StepLogits {
    std::span<const Token>        best;    // the most likely token of each row (the lowest id of several); or empty
    std::span<const TokenLogprob> answers; // the answers of the plan's tasks, from their first_answer on
    std::function<std::span<const float>()>
        rows; // copies them to the host: [logit rows × vocab], valid until the next step
    // The hidden state of one of these rows, after the last norm: [hidden], valid until the next call.
    std::function<std::span<const float>(int row)> hidden;
};

} // namespace quire

module :private;

namespace quire {

void StepPlan::clear() {
    for (auto* v : {&tokens, &positions, &slots, &token_start, &context_lens, &block_tables, &table_start, &logit_rows})
        v->clear();
    for (auto* v : {&swap_out, &swap_in, &copies}) v->clear();
    tasks.clear();
    edits.clear();
    draws.clear();
}

} // namespace quire
