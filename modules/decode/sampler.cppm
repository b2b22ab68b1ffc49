// quire.decode.sampler: one row of logits and the request's parameters → the next token: logits processors, then greedy or random
// sampling. Owns scratch memory only: random numbers come from (seed, position), so a result does not depend on other requests.
// docs/sampling.md has the order of the steps.
export module quire.decode.sampler;

import quire.core.base;
import quire.decode.candidates;
import quire.decode.repetitions;
import quire.schedule.request;
export import quire.step.plan;

export namespace quire {

// Uniform in [0, 1), a pure function of its arguments.
double random_at(std::uint64_t seed, std::uint64_t position);

// The place in its request at which a token is sampled.
struct SamplePoint {
    int           stream   = 0; // number of the answer, which samples like a request of one answer with seed + stream
    std::uint64_t position = 0; // of the token in its answer's whole text
    double        mu       = 0; // mirostat's state
};

struct Sample {
    Token  token = -1;
    double mu    = 0; // mirostat's state for the next token
};

// Mirostat's state after a token with this surprise.
double next_mu(const SamplingParams& params, double mu, double surprise);

class Sampler {
public:
    explicit Sampler(int vocab_size);

    // The next token after `history` (the prompt, then n_generated generated tokens). First the logits processors: repetition penalty,
    // presence and frequency penalty, DRY, logit bias, forbidden tokens (allowed_tokens, bad_words, `banned`). Then greedy, or a
    // draw from the candidates that the samplers leave.
    // Token -1: the row is not usable(), or every token is forbidden.
    Sample sample(std::span<const float> logits, const SamplingParams& params, std::span<const Token> history,
                  int n_generated, const SamplePoint& at, std::span<const Token> banned = {});
    // The next token at the end of `history`, in the answer `stream`; mirostat is at its first token.
    Token sample(std::span<const float> logits, const SamplingParams& params, std::span<const Token> history,
                 int n_generated, int stream = 0, std::span<const Token> banned = {});

    // The logits processors as a list of edits, each token once; appended to `edits`. With allowed_tokens the list has just these tokens,
    // and no other token can be sampled.
    void list_edits(const SamplingParams& params, std::span<const Token> history, int n_generated,
                    std::span<const Token> banned, std::vector<LogitEdit>& edits);

    // Of the last sample(), which gave `token`: ln of the probabilities among the tokens that it could draw, of `token` and of the n_top best
    // ones, best first. Where there was no choice, `token` has all.
    PositionLogprobs drawn_logprobs(Token token, int n_top);

    // The functions below take logits that are usable().

    // ln softmax of the raw logits: of `token`, and of the `n_top` best ones, best first (ties: lower id first).
    PositionLogprobs logprobs(std::span<const float> logits, Token token, int n_top);
    // ln softmax of the raw logits, of `token`; allocates no memory.
    double logprob(std::span<const float> logits, Token token);

private:
    std::span<const Repetition> repetitions(const DryParams& dry, std::span<const Token> history);

    std::vector<float>          row_;  // [vocab] logits after penalties and bias
    std::vector<std::int32_t>   seen_; // [vocab] place of a token in a list of edits, from 1; zero between calls
    std::vector<LogitEdit>      edits_;
    Candidates                  candidates_;
    bool                        drew_ = false; // the last sample() drew from the candidates
    Repetitions                 repetitions_;
    std::vector<CandidateToken> best_; // of logprobs()
};

// Of a token without an alternative.
PositionLogprobs certain(Token token, int n_top);

// Greedy, on the logits as they are.
bool is_plain_greedy(const SamplingParams& params);

// The lowest id among the largest values; NaN is never the largest.
Token argmax(std::span<const float> logits);

// ln Σ exp(logits); the logits are usable().
double log_sum_exp(std::span<const float> logits);

// Whether the logits have a softmax: no NaN, no +infinity, and not only -infinity.
bool usable(std::span<const float> logits);

} // namespace quire

module :private;

namespace quire {

// splitmix64's finaliser, twice: every bit of seed and position reaches every bit of the result.
double random_at(std::uint64_t seed, std::uint64_t position) {
    auto mix = [](std::uint64_t z) {
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        return z ^ (z >> 31);
    };
    std::uint64_t bits = mix(mix(seed + 0x9e3779b97f4a7c15ull) + position * 0x9e3779b97f4a7c15ull);
    return double(bits >> 11) * 0x1p-53;
}

Token argmax(std::span<const float> logits) {
    Token best  = 0;
    float value = -std::numeric_limits<float>::infinity();
    for (std::size_t i = 0; i < logits.size(); i++)
        if (logits[i] > value) {
            value = logits[i];
            best  = Token(i);
        }
    return best;
}

// Without a branch, so that the compiler takes many at once.
bool usable(std::span<const float> logits) {
    constexpr float most    = std::numeric_limits<float>::max();
    unsigned        too_big = 0, finite = 0;
    for (float v : logits) {
        too_big |= unsigned(!(v <= most)); // NaN is not
        finite |= unsigned(v >= -most);
    }
    return too_big == 0 && finite != 0;
}

bool is_plain_greedy(const SamplingParams& params) {
    return params.temperature <= 0 && params.repetition_penalty == 1 && params.presence_penalty == 0 &&
           params.frequency_penalty == 0 && params.logit_bias.empty() && params.allowed_tokens.empty() &&
           params.bad_words.empty() && !params.dry.on();
}

Sampler::Sampler(int vocab_size)
    : row_(std::size_t(vocab_size)), seen_(std::size_t(vocab_size)), candidates_(vocab_size) {}

// The repetitions that DRY penalises: of at least allowed_length tokens.
std::span<const Repetition> Sampler::repetitions(const DryParams& dry, std::span<const Token> history) {
    const std::size_t n = dry.last_n < 0 ? history.size() : std::min(history.size(), std::size_t(dry.last_n));
    const std::span<const Token> recent = history.last(n);
    const auto                   most   = int(dry.breakers ? dry.breakers->since(recent) : recent.size());
    if (most < dry.allowed_length) return {};
    return repetitions_.find(recent, std::max(dry.allowed_length, 1), most);
}

// The exponent is cut where the power would be infinite.
float dry_penalty(const DryParams& dry, int length) {
    constexpr double most  = 88; // ln of a large float
    const double     power = double(length - dry.allowed_length) * std::log(double(dry.base));
    return float(double(dry.multiplier) * std::exp(std::min(power, most)));
}

void Sampler::list_edits(const SamplingParams& params, std::span<const Token> history, int n_generated,
                         std::span<const Token> banned, std::vector<LogitEdit>& edits) {
    const std::size_t first = edits.size();
    const auto        edit  = [&](Token token) -> LogitEdit& {
        std::int32_t& at = seen_[std::size_t(token)];
        if (at == 0) {
            edits.push_back({token});
            at = std::int32_t(edits.size() - first);
        }
        return edits[first + std::size_t(at) - 1];
    };
    for (Token t : params.allowed_tokens) edit(t);
    const std::size_t n_allowed = edits.size() - first;
    const std::size_t window =
        params.repeat_last_n < 0 ? history.size() : std::min(history.size(), std::size_t(params.repeat_last_n));
    const std::span<const Token> recent = history.last(window);
    if (params.repetition_penalty != 1) // once per token, however often it occurs
        for (Token t : recent) edit(t).divide = params.repetition_penalty;
    if (params.presence_penalty != 0 || params.frequency_penalty != 0)
        for (Token t : recent.last(std::min(window, std::size_t(n_generated)))) edit(t).times++;
    if (params.dry.on()) // if a token would continue several repetitions, the longest counts
        for (auto [token, length] : repetitions(params.dry, history)) {
            if (params.dry.breakers && params.dry.breakers->breaks(token)) continue;
            int& longest = edit(token).repeats;
            longest      = std::max(longest, length);
        }
    for (auto [token, bias] : params.logit_bias) edit(token).add += bias;
    constexpr float never = -std::numeric_limits<float>::infinity();
    for (Token t : banned) edit(t).add = never;
    const std::span<const Token> generated = history.last(std::size_t(n_generated));
    for (const std::vector<Token>& word : params.bad_words) {
        const std::span<const Token> start = std::span(word).first(word.size() - 1);
        if (start.size() <= generated.size() && std::ranges::equal(start, generated.last(start.size())))
            edit(word.back()).add = never;
    }
    for (LogitEdit& e : std::span(edits).subspan(first)) {
        if (e.times > 0) e.subtract = params.frequency_penalty * float(e.times) + params.presence_penalty;
        if (e.repeats > 0) e.subtract += dry_penalty(params.dry, e.repeats);
        seen_[std::size_t(e.token)] = 0;
    }
    if (n_allowed > 0) edits.resize(first + n_allowed);
}

Token Sampler::sample(std::span<const float> logits, const SamplingParams& params, std::span<const Token> history,
                      int n_generated, int stream, std::span<const Token> banned) {
    const SamplePoint at{stream, std::uint64_t(history.size()), params.first_mu()};
    return sample(logits, params, history, n_generated, at, banned).token;
}

Sample Sampler::sample(std::span<const float> logits, const SamplingParams& params, std::span<const Token> history,
                       int n_generated, const SamplePoint& at, std::span<const Token> banned) {
    check(logits.size() == row_.size(), "a row of logits of another vocabulary");
    drew_ = false;
    if (!usable(logits)) return {-1, at.mu};
    if (is_plain_greedy(params) && banned.empty()) return {argmax(logits), at.mu};

    if (params.allowed_tokens.empty()) std::ranges::copy(logits, row_.begin());
    else std::ranges::fill(row_, -std::numeric_limits<float>::infinity());
    edits_.clear();
    list_edits(params, history, n_generated, banned, edits_);
    for (const LogitEdit& e : edits_) {
        const float logit          = logits[std::size_t(e.token)];
        row_[std::size_t(e.token)] = (logit > 0 ? logit / e.divide : logit * e.divide) - e.subtract + e.add;
    }
    const Token best  = argmax(row_);
    const float limit = row_[std::size_t(best)];
    if (limit == -std::numeric_limits<float>::infinity()) return {-1, at.mu};
    if (params.temperature <= 0 || !std::isfinite(limit)) return {best, at.mu};

    const std::uint64_t seed = params.seed + std::uint64_t(at.stream);
    drew_                    = true;
    const Drawn drawn =
        candidates_.draw(row_, params, random_at(seed, at.position), random_at(seed, ~at.position), at.mu);
    if (params.mirostat == 0) return {drawn.token, at.mu};
    return {drawn.token, next_mu(params, at.mu, drawn.surprise)};
}

PositionLogprobs certain(Token token, int n_top) {
    PositionLogprobs result;
    result.chosen = {token, 0};
    if (n_top > 0) result.top.push_back(result.chosen);
    return result;
}

PositionLogprobs Sampler::drawn_logprobs(Token token, int n_top) {
    return drew_ ? candidates_.logprobs(token, n_top) : certain(token, n_top);
}

double next_mu(const SamplingParams& params, double mu, double surprise) {
    return mu - double(params.mirostat_eta) * (surprise - double(params.mirostat_tau));
}

double log_sum_exp(std::span<const float> logits) {
    const double limit = double(logits[std::size_t(argmax(logits))]);
    double       total = 0;
    for (float v : logits) total += std::exp(double(v) - limit);
    return limit + std::log(total);
}

double Sampler::logprob(std::span<const float> logits, Token token) {
    return double(logits[std::size_t(token)]) - log_sum_exp(logits);
}

PositionLogprobs Sampler::logprobs(std::span<const float> logits, Token token, int n_top) {
    const double     log_total = log_sum_exp(logits);
    PositionLogprobs result;
    auto logprob = [&](Token t) { return TokenLogprob{t, float(double(logits[std::size_t(t)]) - log_total)}; };
    if (token >= 0) result.chosen = logprob(token);
    const auto n = std::min(std::size_t(std::max(n_top, 0)), logits.size());
    if (n == 0) return result;
    // A heap of the n best tokens so far, with the worst on top: one pass, and most tokens cost one comparison.
    best_.resize(n);
    const std::span<CandidateToken> heap(best_);
    std::size_t                     filled = 0;
    for (std::size_t i = 0; i < logits.size(); i++) {
        const CandidateToken c{logits[i], 0, Token(i)};
        if (filled < n) {
            heap[filled++] = c;
            std::push_heap(heap.begin(), heap.begin() + std::ptrdiff_t(filled), is_better);
        } else if (is_better(c, heap[0])) {
            std::pop_heap(heap.begin(), heap.end(), is_better);
            heap.back() = c;
            std::push_heap(heap.begin(), heap.end(), is_better);
        }
    }
    std::sort(heap.begin(), heap.end(), is_better);
    for (const CandidateToken& c : heap) result.top.push_back(logprob(c.token));
    return result;
}

} // namespace quire
