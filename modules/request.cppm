// quire.request: the plain values that flow through the engine: Request, StepPlan, Output. Owns nothing.
export module quire.request;

import quire.base;
import quire.std;

export namespace quire {

using RequestId = std::uint64_t;
using BlockId   = std::int32_t;

// How the next token is chosen. The defaults of the tools are theirs; these are "plain sampling from the model".
struct SamplingParams {
    float temperature        = 1;  // 0: greedy, the lowest id on a tie
    int   top_k              = 0;  // 0: all
    float top_p              = 1;  // 1: all
    float min_p              = 0;  // of the best token's probability; 0: all
    float repetition_penalty = 1;  // divides positive and multiplies negative logits of tokens seen
    float presence_penalty   = 0;  // subtracted once from a token that was generated
    float frequency_penalty  = 0;  // subtracted for each time it was generated
    int   repeat_last_n      = -1; // tokens the penalties look back over; -1: all
    std::vector<std::pair<Token, float>> logit_bias;
    std::uint64_t                        seed = 0;
    int logprobs                              = -1; // log-probabilities of that many best tokens per position; -1: none
};

struct Request {
    std::vector<Token> prompt; // at least one
    SamplingParams     sampling;
    int                max_tokens = 16; // at least 1
    bool               ignore_end = false;
    std::vector<Token> stop_tokens;             // beside the model's own end tokens
    int                prompt_logprobs = -1;    // as logprobs, for every prompt token; such a request reads no cache
    bool               return_logits   = false; // the raw logits of the last prompt position
};

struct TokenLogprob {
    Token token   = -1;
    float logprob = 0;
};

// The log-probability of one token and those of the best ones at its position, best first.
struct PositionLogprobs {
    TokenLogprob              chosen;
    std::vector<TokenLogprob> top;
};

enum class FinishReason : std::uint8_t {
    none,      // still running
    stop,      // an end token or a stop token
    length,    // max_tokens, the model's context or the whole pool is used up
    cancelled, // by whoever asked
    refused,   // could never run: see the message
};

// One event of one request. After an event with a finish reason no more follow.
struct Output {
    RequestId                     id = 0;
    std::vector<Token>            tokens;          // new since the last event; an end token is among them
    std::vector<PositionLogprobs> logprobs;        // one per token when asked for
    std::vector<PositionLogprobs> prompt_logprobs; // with the first token: prompt[1..], one each
    std::vector<float>            prompt_logits;   // with the first token when asked for: [vocab]
    int                           prompt_tokens = 0;
    int                           cached_tokens = 0; // prompt tokens whose KV came from the prefix cache
    FinishReason                  finish        = FinishReason::none;
    std::string                   message; // why it was refused
};

// -- the seam between scheduling and compute ------------------------------------------------------------

// Whole-block copies inside the device pool (copy-on-write) or between the pools (swap).
struct BlockCopy {
    BlockId from = 0, to = 0;
};

// One step of the whole batch: all that a model runner, in this process or another, has to know.
// T tokens of S sequences, the tokens of one sequence neighbours and in order. Plain integers, no pointers.
// A step that preempted, forked or shared a block first runs `swap_out`, then `swap_in`, then `copies`.
struct StepPlan {
    std::vector<Token>        tokens;       // [T]
    std::vector<std::int32_t> positions;    // [T] of each token in its sequence
    std::vector<std::int32_t> slots;        // [T] where its K and V go: block * block_size + offset
    std::vector<std::int32_t> token_start;  // [S+1] rows of sequence s: token_start[s] .. token_start[s+1]
    std::vector<std::int32_t> context_lens; // [S] tokens with a KV once this step is done
    std::vector<BlockId>      block_tables; // the sequences' tables one after another
    std::vector<std::int32_t> table_start;  // [S+1] into block_tables
    std::vector<std::int32_t> logit_rows;   // [L] rows of `tokens` whose logits are wanted, ascending
    std::vector<BlockCopy>    swap_out, swap_in, copies;

    int  n_tokens() const { return int(tokens.size()); }
    int  n_seqs() const { return int(context_lens.size()); }
    void clear();
};

} // namespace quire

module :private;

namespace quire {

void StepPlan::clear() {
    for (auto* v : {&tokens, &positions, &slots, &token_start, &context_lens, &block_tables, &table_start, &logit_rows})
        v->clear();
    for (auto* v : {&swap_out, &swap_in, &copies}) v->clear();
}

} // namespace quire
