// quire.step.logprobs: log-probabilities of tokens. Plain values, owns nothing.
export module quire.step.logprobs;

import quire.core.base;

export namespace quire {

struct TokenLogprob {
    Token token   = -1;
    float logprob = 0;
};

// The log-probability of a token, and those of the most likely tokens at its position, best first.
struct PositionLogprobs {
    TokenLogprob              chosen;
    std::vector<TokenLogprob> top;
};

} // namespace quire
