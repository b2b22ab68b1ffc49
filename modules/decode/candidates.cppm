// quire.decode.candidates: the list of tokens that can come next, and the samplers, which leave out tokens, shape the distribution and draw
// one token (docs/sampling.md). **Owns** the list.
export module quire.decode.candidates;

import quire.core.base;
import quire.schedule.sampling_params;
import quire.step.logprobs;

export namespace quire {

struct CandidateToken {
    float logit = 0;
    float mass  = 0; // probability in units of the best token's
    Token token = 0;
};

// The better of two tokens: the one with the higher logit; of equal logits the one with the lower id.
bool is_better(const CandidateToken& a, const CandidateToken& b);

struct Drawn {
    Token  token    = -1; // -1: there is none
    double surprise = 0;  // mirostat: in bits, among the tokens that the samplers left
};

// How many tokens of a vocabulary that follows Zipf's law with this exponent have a mean surprise of mu bits.
double zipf_rank(double exponent, double mu, double vocab);

class Candidates {
public:
    explicit Candidates(int vocab_size);

    // Draws from the logits. At least one logit is finite and none is +infinity; NaN counts as -infinity. The temperature is not 0.
    // `uniform`, `xtc_uniform`: random numbers in [0, 1). `mu`: mirostat's limit in bits.
    Drawn draw(std::span<const float> logits, const SamplingParams& params, double uniform, double xtc_uniform,
               double mu);
    // Of the last draw: ln of the probabilities among the tokens that the samplers left, of `token`, which was drawn, and of the n_top best
    // ones, best first. Allocates nothing but the result.
    PositionLogprobs logprobs(Token token, int n_top);

private:
    void  collect(std::span<const float> logits);
    void  keep_by_sigma(float n_sigma);
    void  keep_best(std::size_t n);
    void  keep_typical(float p);
    void  keep_top(float p);
    void  keep_likely(float min_p);
    void  leave_out_best(float threshold);
    float temperature(const SamplingParams& params) const;
    void  keep_by_surprise(double mu);
    void  keep_by_exponent(double mu, std::size_t vocab, float temperature);
    void  weigh(float temperature = 1);
    Drawn draw_weighed(double uniform);
    void  keep_first(std::size_t n) { kept_ = kept_.first(n); }
    Token best() const;

    std::vector<CandidateToken> all_; // [vocab]
    std::span<CandidateToken>   kept_;
    bool truncated_ = false; // a sampler was at work: draws go from the best token on, else by id
};

} // namespace quire

module :private;

namespace quire {

bool is_better(const CandidateToken& a, const CandidateToken& b) {
    return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
}

Candidates::Candidates(int vocab_size) : all_(std::size_t(vocab_size)) {}

void Candidates::collect(std::span<const float> logits) {
    std::size_t n = 0;
    for (std::size_t i = 0; i < logits.size(); i++)
        if (std::isfinite(logits[i])) all_[n++] = {logits[i], 0, Token(i)};
    kept_ = std::span(all_).first(n);
}

Token Candidates::best() const {
    return std::min_element(kept_.begin(), kept_.end(), is_better)->token; // is_better: "comes before"
}

// Masses are summed in the present order of the tokens: each sampler's order depends on the logits alone.
void Candidates::weigh(float temperature) {
    float limit = -std::numeric_limits<float>::infinity();
    for (const CandidateToken& c : kept_) limit = std::max(limit, c.logit);
    for (CandidateToken& c : kept_) c.mass = std::exp((c.logit - limit) / temperature);
}

double total_mass(std::span<const CandidateToken> candidates) {
    double total = 0;
    for (const CandidateToken& c : candidates) total += double(c.mass);
    return total;
}

// Nguyen et al., "Top-nσ: Not all logits are you need", 2024.
void Candidates::keep_by_sigma(float n_sigma) {
    double sum = 0, squares = 0, limit = -std::numeric_limits<double>::infinity();
    for (const CandidateToken& c : kept_) sum += double(c.logit), limit = std::max(limit, double(c.logit));
    const double mean = sum / double(kept_.size());
    for (const CandidateToken& c : kept_) squares += (double(c.logit) - mean) * (double(c.logit) - mean);
    const double least = limit - double(n_sigma) * std::sqrt(squares / double(kept_.size()));
    const auto   end =
        std::remove_if(kept_.begin(), kept_.end(), [&](const CandidateToken& c) { return double(c.logit) < least; });
    keep_first(std::size_t(end - kept_.begin()));
}

void Candidates::keep_best(std::size_t n) {
    if (n >= kept_.size()) return;
    std::nth_element(kept_.begin(), kept_.begin() + std::ptrdiff_t(n), kept_.end(), is_better);
    keep_first(n);
}

// Meister et al., "Locally Typical Sampling", 2022. A token's surprise less the entropy is the token's distance below the best logit
// less the mean of these distances. Of equal distances all stay.
void Candidates::keep_typical(float p) {
    weigh();
    float limit = -std::numeric_limits<float>::infinity();
    for (const CandidateToken& c : kept_) limit = std::max(limit, c.logit);
    double total = 0, sum = 0;
    for (const CandidateToken& c : kept_) total += double(c.mass), sum += double(c.mass) * double(limit - c.logit);
    const auto mean     = float(sum / total);
    const auto distance = [&](const CandidateToken& c) { return std::abs(limit - c.logit - mean); };
    const auto farther  = [&](const CandidateToken& a, const CandidateToken& b) {
        const float da = distance(a), db = distance(b);
        return da != db ? da > db : is_better(b, a);
    };
    // Taken from a heap until they hold p of the mass: no sort of the whole vocabulary.
    std::size_t rest = kept_.size();
    double      mass = 0;
    float       last = 0;
    std::make_heap(kept_.begin(), kept_.end(), farther);
    while (rest > 0 && (rest == kept_.size() || mass < double(p) * total || distance(kept_[0]) == last)) {
        std::pop_heap(kept_.begin(), kept_.begin() + std::ptrdiff_t(rest), farther);
        last = distance(kept_[--rest]);
        mass += double(kept_[rest].mass);
    }
    kept_ = kept_.subspan(rest);
}

// Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020.
void Candidates::keep_top(float p) {
    weigh();
    const double total = total_mass(kept_);
    const auto   worse = [](const CandidateToken& a, const CandidateToken& b) { return is_better(b, a); };
    std::size_t  rest  = kept_.size();
    double       mass  = 0;
    std::make_heap(kept_.begin(), kept_.end(), worse);
    while (rest > 0 && (rest == kept_.size() || mass < double(p) * total)) {
        std::pop_heap(kept_.begin(), kept_.begin() + std::ptrdiff_t(rest), worse);
        mass += double(kept_[--rest].mass);
    }
    kept_ = kept_.subspan(rest);
}

void Candidates::keep_likely(float min_p) {
    weigh();
    const auto end =
        std::remove_if(kept_.begin(), kept_.end(), [&](const CandidateToken& c) { return c.mass < min_p; });
    keep_first(std::size_t(end - kept_.begin()));
}

// XTC, "exclude top choices" (p-e-w, text-generation-webui, 2024).
void Candidates::leave_out_best(float threshold) {
    weigh();
    const double          least = double(threshold) * total_mass(kept_);
    const CandidateToken* last  = nullptr; // the least likely token above the threshold
    for (const CandidateToken& c : kept_)
        if (double(c.mass) >= least && (last == nullptr || is_better(*last, c))) last = &c;
    if (last == nullptr) return;
    const CandidateToken border = *last;
    const auto           end =
        std::remove_if(kept_.begin(), kept_.end(), [&](const CandidateToken& c) { return is_better(c, border); });
    keep_first(std::size_t(end - kept_.begin()));
}

// The temperature: the lower end of the range where one token has all the probability, the upper end where all tokens are equally
// likely.
float Candidates::temperature(const SamplingParams& params) const {
    if (params.dynatemp_range <= 0 || kept_.size() < 2) return params.temperature;
    double total = 0, sum = 0, limit = -std::numeric_limits<double>::infinity();
    for (const CandidateToken& c : kept_) limit = std::max(limit, double(c.logit));
    for (const CandidateToken& c : kept_) {
        const double depth = limit - double(c.logit), mass = std::exp(-depth);
        total += mass;
        sum += mass * depth;
    }
    const double entropy = (std::log(total) + sum / total) / std::log(double(kept_.size()));
    const double low     = std::max(0.0, double(params.temperature) - double(params.dynatemp_range));
    const double high    = double(params.temperature) + double(params.dynatemp_range);
    return float(low + (high - low) * std::pow(std::clamp(entropy, 0.0, 1.0), double(params.dynatemp_exponent)));
}

// -- mirostat (Basu et al., "Mirostat: A Neural Text Decoding Algorithm that Directly Controls Perplexity", 2021); masses are there

// Version 2: no token whose surprise is above mu.
void Candidates::keep_by_surprise(double mu) {
    const double total = total_mass(kept_);
    const Token  first = best();
    const auto   end   = std::remove_if(kept_.begin(), kept_.end(), [&](const CandidateToken& c) {
        return c.token != first && !(std::log2(total / double(c.mass)) <= mu);
    });
    keep_first(std::size_t(end - kept_.begin()));
}

double zipf_rank(double exponent, double mu, double vocab) {
    const double epsilon = exponent - 1;
    // The limit of the fraction, where numerator and denominator would both be 0.
    const double norm = std::abs(epsilon) < 1e-9 ? 1 / std::log(vocab) : epsilon / (1 - std::pow(vocab, -epsilon));
    const double k    = std::pow(norm * std::exp2(mu), 1 / exponent);
    return std::isnan(k) ? vocab : k;
}

// Version 1: the exponent of Zipf's law is estimated from the best 100 tokens, and from it how many tokens have a mean surprise of mu.
void Candidates::keep_by_exponent(double mu, std::size_t vocab, float temperature) {
    const std::size_t n = std::min(kept_.size(), std::size_t(100));
    if (n < 2) return;
    std::partial_sort(kept_.begin(), kept_.begin() + std::ptrdiff_t(n), kept_.end(), is_better);
    double products = 0, squares = 0;
    for (std::size_t i = 0; i + 1 < n; i++) {
        const double t = std::log(double(i + 2) / double(i + 1));
        products += t * double(kept_[i].logit - kept_[i + 1].logit) / double(temperature);
        squares += t * t;
    }
    const double k = zipf_rank(squares > 0 ? products / squares : 0, mu, double(vocab));
    keep_best(std::size_t(std::clamp(k, 1.0, double(kept_.size()))));
}

// Its mass must not be 0 for all: the best token's is 1.
Drawn Candidates::draw_weighed(double uniform) {
    // The result must not depend on the order in which the samplers put them.
    if (truncated_) std::sort(kept_.begin(), kept_.end(), is_better);
    const double total = total_mass(kept_);
    double       at    = uniform * total;
    for (const CandidateToken& c : kept_)
        if ((at -= double(c.mass)) < 0) return {c.token, std::log2(total / double(c.mass))};
    return {best(), 0};
}

Drawn Candidates::draw(std::span<const float> logits, const SamplingParams& p, double uniform, double xtc_uniform,
                       double mu) {
    collect(logits);
    const bool top_k = p.top_k > 0 && std::size_t(p.top_k) < logits.size();
    const bool xtc   = p.xtc_threshold <= 0.5f && xtc_uniform < double(p.xtc_probability);
    truncated_ = p.mirostat > 0 || top_k || p.top_n_sigma > 0 || p.typical_p < 1 || p.top_p < 1 || p.min_p > 0 || xtc;
    if (p.mirostat > 0) {
        weigh(p.temperature);
        if (p.mirostat == 1) keep_by_exponent(mu, logits.size(), p.temperature);
        else keep_by_surprise(mu);
        return draw_weighed(uniform);
    }
    if (p.top_n_sigma > 0) keep_by_sigma(p.top_n_sigma);
    if (top_k) keep_best(std::size_t(p.top_k));
    if (p.typical_p < 1) keep_typical(p.typical_p);
    if (p.top_p < 1) keep_top(p.top_p);
    if (p.min_p > 0) keep_likely(p.min_p);
    if (xtc) leave_out_best(p.xtc_threshold);
    const float t = temperature(p);
    if (!(t > 0)) {
        keep_best(1);
        kept_[0].mass = 1;
        return {kept_[0].token, 0};
    }
    weigh(t);
    return draw_weighed(uniform);
}

PositionLogprobs Candidates::logprobs(Token token, int n_top) {
    const double     total = total_mass(kept_);
    PositionLogprobs result;
    const auto       n = std::min(kept_.size(), std::size_t(std::max(n_top, 0)));
    std::partial_sort(kept_.begin(), kept_.begin() + std::ptrdiff_t(n), kept_.end(), is_better);
    const auto logprob = [&](const CandidateToken& c) {
        return TokenLogprob{c.token, float(std::log(double(c.mass) / total))};
    };
    for (const CandidateToken& c : kept_) {
        if (c.token == token) result.chosen = logprob(c);
        if (result.top.size() < n && c.mass > 0) result.top.push_back(logprob(c));
    }
    return result;
}

} // namespace quire
