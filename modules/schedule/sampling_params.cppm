// quire.schedule.sampling_params: how the next token of a text is chosen. Plain values, owns nothing.
export module quire.schedule.sampling_params;

import quire.core.base;
export import quire.schedule.sequence_breakers;

export namespace quire {

// DRY: a token that would continue a repetition loses multiplier · base ^ (length so far - allowed_length) of its logit.
// (p-e-w, "DRY: A modern repetition penalty", text-generation-webui, 2024.)
struct DryParams {
    float                                   multiplier     = 0; // 0: off
    float                                   base           = 1.75f;
    int                                     allowed_length = 2;  // a shorter repetition costs nothing
    int                                     last_n         = 64; // tokens it looks back over; -1: all, 0: off
    std::shared_ptr<const SequenceBreakers> breakers;            // no repetition reaches across one; null: none

    bool on() const { return multiplier != 0 && last_n != 0; }
};

// How the next token is chosen. The defaults here are plain sampling from the model; the tools have their own.
// docs/sampling.md has the order of the steps and a definition of each.
struct SamplingParams {
    float temperature     = 1;    // 0: greedy, the lowest id on a tie; the members below do not apply then
    float top_n_sigma     = 0;    // tokens within so many standard deviations of the best logit; 0 or less: all
    int   top_k           = 0;    // 0: all
    float typical_p       = 1;    // tokens whose surprise is closest to the mean, with this mass together; 1: all
    float top_p           = 1;    // 1: all
    float min_p           = 0;    // fraction of the best token's probability; 0: all
    float xtc_probability = 0;    // how often the likeliest tokens are left out
    float xtc_threshold   = 0.1f; // tokens of at least this probability are left out, but the last one; above 0.5: none
    float dynatemp_range  = 0;    // the temperature lies within so much of `temperature`, by the entropy; 0: fixed
    float dynatemp_exponent  = 1;
    int   mirostat           = 0;    // 1, 2: its versions, in place of all others but the temperature; 0: off
    float mirostat_tau       = 5;    // the surprise it aims at, in bits
    float mirostat_eta       = 0.1f; // how fast it corrects itself
    float repetition_penalty = 1;    // divides positive and multiplies negative logits of tokens that occurred
    float presence_penalty   = 0;    // subtracted once from a token that was generated
    float frequency_penalty  = 0;    // subtracted for each time it was generated
    int   repeat_last_n      = -1;   // tokens the penalties look back over; -1: all
    std::vector<std::pair<Token, float>> logit_bias;
    std::vector<Token>                   allowed_tokens; // no others can be chosen; empty: all can
    std::vector<std::vector<Token>>      bad_words;      // sequences whose last token cannot follow the others
    DryParams                            dry;
    std::uint64_t                        seed = 0;
    int logprobs                              = -1; // log-probabilities of that many best tokens per position; -1: none
    // True: log-probabilities are of the distribution that the samplers leave, in place of the model's. A token that they exclude has none.
    bool after_samplers = false;

    double first_mu() const { return 2 * double(mirostat_tau); } // mirostat's state before the first token
};

} // namespace quire
