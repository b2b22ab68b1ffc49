// quire.schedule.request: a caller's request (Request), and the answers to it (Output). Plain values, owns nothing.
export module quire.schedule.request;

import quire.core.base;
export import quire.core.polymorphic;
export import quire.schedule.sampling_params;
export import quire.schedule.token_filter;
export import quire.step.adapters;
export import quire.step.logprobs;

export namespace quire {

// When a beam search ends before max_tokens (the names and rules of `transformers`).
enum class EarlyStopping : std::uint8_t {
    no,    // when no running beam, with the length it has, beats the worst of beam_width finished ones
    yes,   // as soon as beam_width candidates have finished
    never, // when no running beam can beat them at any length up to max_tokens
};

// A request that computes nothing: what memory has of its prompt is written to files, or what files have of it is read into memory.
enum class CacheMove : std::uint8_t { none, save, load };

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
    bool          uses_cache = true;  // false: it finds nothing in the prefix cache, and leaves nothing there
    // In ascending order, without scales of 0: KV is shared only with requests of the same adapters and scales. None: submit()
    // fills in the engine's adapters for requests that name none.
    std::optional<std::vector<AdapterUse>> adapters;
    // Pins the prompt: it is computed once and not evicted until cancel(); nothing is generated.
    bool pin = false;
    // Computes Output::embedding and generates nothing. Such a request does not read the cache.
    bool      embed = false;
    CacheMove cache_move =
        CacheMove::none;  // Output::cached_tokens says how many tokens are there then, in whole blocks
    int  max_tokens = 16; // 0: nothing is generated; the prompt is computed, with prompt_logprobs if asked for
    int  min_tokens = 0;  // until so many are generated, end and stop tokens are forbidden
    bool ignore_end = false;
    std::vector<Token>       stop_tokens; // in addition to the model's end tokens
    Polymorphic<TokenFilter> constraint;  // of the generated text; empty: any token may come next
    Polymorphic<TokenForcer> reasoning;   // of the generated text; empty: no token is given
    int most_drafts  = -1;                // guessed tokens of a step; 0: none; -1: as many as the engine's options say
    int least_drafts = -1;                // fewer do not run; -1: as the engine's options say
    // An answer that fills the context goes on: it forgets tokens behind the first n_keep, and the other tokens are computed again. Not
    // for beams, nor where answers are compared.
    bool context_shift   = false;
    int  n_keep          = 0;     // at most half the context; -1: the prompt
    int  n_discard       = 0;     // tokens that it forgets; 0: half of the tokens behind n_keep
    int  prompt_logprobs = -1;    // like logprobs, for every prompt token; such a request does not read the cache
    bool return_logits   = false; // the raw logits of the last prompt position
    bool return_progress = false; // an Output after each step that computed a part of the prompt

    // The most sequences that the request can have at once.
    int width() const { return !generates() ? 1 : beam_width > 0 ? beam_width : std::max({n, best_of, 1}); }
    // Whether the logits of all prompt tokens are needed, so that all of them must be computed.
    bool wants_all_rows() const { return prompt_logprobs >= 0 || embed; }
    bool generates() const { return !pin && !embed && max_tokens > 0; }
    bool can_shift() const { return context_shift && beam_width == 0 && best_of <= n; }
};

enum class FinishReason : std::uint8_t {
    none,      // still running
    stop,      // an end token or a stop token; a pinned prefix that is ready
    length,    // max_tokens, the model's context or the whole pool is used up
    cancelled, // by the caller
    refused,   // can never run: see the message
    failed,    // the model's numbers are not finite, or files did not take what they were to have: see the message
    unmet,     // its constraints leave no token, or take more work than is allowed: see the message
};

// The blocks of a request, summed over (a sample of) its steps; the paper, section 6.3.
struct SharingStats {
    std::uint64_t without = 0; // blocks its sequences would have needed without sharing
    std::uint64_t with    = 0; // blocks they held
    double        saved() const { return without > 0 ? 1 - double(with) / double(without) : 0; }
};

// The new tokens and values of one answer of a request. An output with a finish reason is the last output of the answer `index`. An output
// with `done` is the last output of the request. Answers of best_of and beam search come complete at the end, best first.
struct Output {
    RequestId                     id    = 0;
    int                           index = 0;       // which of the n answers
    std::vector<Token>            tokens;          // new since the last output; an end token is among them
    std::vector<PositionLogprobs> logprobs;        // one per token when asked for
    std::vector<PositionLogprobs> prompt_logprobs; // with the first output: prompt[1..], one each
    std::vector<float>            prompt_logits;   // with the first output when asked for: [vocab]
    std::vector<float>            embedding;       // with `done`, of `embed`: [hidden], the mean of the prompt's final
                                                   // hidden states (behind the last norm), of length 1
    int                                   prompt_tokens   = 0;
    int                                   cached_tokens   = 0; // prompt tokens found in the cache
    int                                   loaded_tokens   = 0; // of these, tokens that were in host memory
    int                                   disk_tokens     = 0; // of these, tokens that files had
    int                                   computed_tokens = 0; // with return_progress: of the prompt, so far
    int                                   draft_tokens    = 0; // of the request, so far, that ran
    int                                   accepted_tokens = 0; // of these, tokens that were right
    FinishReason                          finish          = FinishReason::none;
    bool                                  done            = false; // the request is over
    double                                logprob         = 0;     // best_of and beams: sum over the answer
    double                                score           = 0;     // the value they were ranked by
    int                                   n_preempted     = 0;     // times it was preempted
    SharingStats                          sharing;                 // with `done`
    std::string                           message;                 // why it was refused, failed or unmet
    std::chrono::steady_clock::time_point first_run{};             // when its prompt was scheduled for the first time
    // When each token came out of the engine. The server's service fills it in.
    std::vector<std::chrono::steady_clock::time_point> times;
};

} // namespace quire
