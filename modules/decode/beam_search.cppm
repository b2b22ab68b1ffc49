// quire.decode.beam_search: one step of the beams of a request, built from the scheduler's fork, append and free (the paper, section
// 5.2); ranking and stopping as in `transformers`. Owns nothing but scratch memory.
export module quire.decode.beam_search;

import quire.core.base;
import quire.decode.sampler;
import quire.decode.step_rows;
import quire.schedule.scheduler;

export namespace quire {

// The score that ranks answers. Of beams: the summed log-probability divided by a power of the length, as in `transformers`; of samples:
// the mean log-probability, as in OpenAI's best_of. Lengths count generated tokens, an end token included.
double score_of(const Request& request, double logprob, int n_generated);

// One token after one beam.
struct BeamCandidate {
    double logprob = 0; // summed over the whole answer
    int    beam    = 0;
    Token  token   = 0;
    // Better first: the likelier one; of equals the lower beam, then the lower id.
    bool operator<(const BeamCandidate& other) const {
        if (logprob != other.logprob) return logprob > other.logprob;
        return beam != other.beam ? beam < other.beam : token < other.token;
    }
};

// Keeps the n_best best candidates offered so far, as a heap with the worst on top.
void offer(std::vector<BeamCandidate>& best, int n_best, const BeamCandidate& candidate);

// Offers every extension of one beam, whose summed log-probability is `so_far`. One pass over the vocabulary, nothing is sorted.
// The logits are usable().
void extend_beam(std::span<const float> logits, int beam, double so_far, int n_best, std::vector<BeamCandidate>& best);

class BeamSearch {
public:
    BeamSearch(Scheduler& scheduler, Sampler& sampler) : scheduler_(scheduler), sampler_(sampler) {}

    struct Outcome {
        bool             over     = false;   // no beam goes on, or no beam can still get among the best
        const Scheduled* unusable = nullptr; // the last row of this item is not usable(): nothing has happened
    };
    // `items` are all beams of one request. Finished answers are in group.finished, running beams in group.sequences, best first.
    Outcome step(std::span<const Scheduled> items, std::span<const Token> end_tokens, StepRows& rows);

private:
    bool is_over(const SequenceGroup& group) const;

    Scheduler&                 scheduler_;
    Sampler&                   sampler_;
    std::vector<BeamCandidate> candidates_; // scratch
    std::vector<Sequence*>     parents_, survivors_;
    std::vector<int>           children_;
};

} // namespace quire

module :private;

namespace quire {

double score_of(const Request& request, double logprob, int n_generated) {
    const double length = std::max(n_generated, 1);
    return logprob / (request.beam_width > 0 ? std::pow(length, double(request.length_penalty)) : length);
}

void offer(std::vector<BeamCandidate>& best, int n_best, const BeamCandidate& c) {
    if (int(best.size()) < n_best) {
        best.push_back(c);
        std::push_heap(best.begin(), best.end());
    } else if (c < best.front()) {
        std::pop_heap(best.begin(), best.end());
        best.back() = c;
        std::push_heap(best.begin(), best.end());
    }
}

void extend_beam(std::span<const float> logits, int beam, double so_far, int n_best, std::vector<BeamCandidate>& best) {
    const double log_total = log_sum_exp(logits);
    for (std::size_t i = 0; i < logits.size(); i++)
        if (logits[i] > -std::numeric_limits<float>::infinity())
            offer(best, n_best, {so_far + (double(logits[i]) - log_total), beam, Token(i)});
}

// The best extensions of all beams by all tokens go on. Twice as many candidates are kept, because some end; an end among the first
// beam_width becomes an answer, a worse end is dropped.
BeamSearch::Outcome BeamSearch::step(std::span<const Scheduled> items, std::span<const Token> end_tokens,
                                     StepRows& rows) {
    SequenceGroup& group  = *items[0].group;
    const Request& r      = group.request;
    const auto     width  = std::size_t(r.beam_width);
    const auto     logits = [&](int beam) {
        const Scheduled& item = items[std::size_t(beam)];
        return rows.logits(item, item.n_logit_rows - 1);
    };
    const auto sampled = [&](int beam) { // a device's results: the most likely tokens
        const Scheduled& item = items[std::size_t(beam)];
        return rows.sampled(item, item.n_logit_rows - 1);
    };
    const auto extend = [&](Sequence& s, const BeamCandidate& c) {
        if (const auto top = sampled(c.beam); r.sampling.logprobs >= 0 && !top.empty()) {
            const auto own = std::ranges::find(top, c.token, &TokenLogprob::token);
            s.logprobs.push_back(logprobs_of(*own, top, r.sampling.logprobs));
        } else if (r.sampling.logprobs >= 0) {
            s.logprobs.push_back(sampler_.logprobs(logits(c.beam), c.token, r.sampling.logprobs));
        }
        s.logprob = c.logprob;
        scheduler_.append(s, c.token);
    };
    for (std::size_t i = 0; i < items.size(); i++)
        if (const auto top = sampled(int(i)); top.empty() ? !usable(logits(int(i))) : top[0].token < 0)
            return {.over = false, .unusable = &items[i]};
    parents_.clear();
    candidates_.clear();
    for (std::size_t i = 0; i < items.size(); i++) {
        parents_.push_back(items[i].sequence);
        const double so_far = items[i].sequence->logprob;
        if (const auto top = sampled(int(i)); !top.empty())
            for (const TokenLogprob& t : top.first(std::min(top.size(), 2 * width))) {
                if (t.logprob > -std::numeric_limits<float>::infinity())
                    offer(candidates_, 2 * r.beam_width, {so_far + double(t.logprob), int(i), t.token});
            }
        else extend_beam(logits(int(i)), int(i), so_far, 2 * r.beam_width, candidates_);
    }
    std::sort_heap(candidates_.begin(), candidates_.end());

    // Candidates that end come first, while their parents still exist; then the candidates that go on.
    const auto has = [](std::span<const Token> tokens, Token t) {
        return std::ranges::find(tokens, t) != tokens.end();
    };
    std::size_t kept = 0;
    for (std::size_t rank = 0; rank < candidates_.size() && kept < width; rank++) {
        const BeamCandidate c   = candidates_[rank];
        const bool          end = (has(end_tokens, c.token) && !r.ignore_end) || has(r.stop_tokens, c.token);
        if (!end) candidates_[kept++] = c;
        else if (rank < width) {
            Sequence& ended = scheduler_.fork(group, *parents_[std::size_t(c.beam)]);
            extend(ended, c);
            scheduler_.free(group, ended, FinishReason::stop);
        }
    }
    candidates_.resize(kept);
    auto score = [&](const std::unique_ptr<Sequence>& s) { return score_of(r, s->logprob, group.n_generated(*s)); };
    while (group.finished.size() > width)
        group.finished.erase(std::min_element(group.finished.begin(), group.finished.end(),
                                              [&](const auto& a, const auto& b) { return score(a) < score(b); }));

    // Beams without a child give their blocks back before any other beam takes new ones. Of a beam with several children the first
    // child goes on in the parent's place, and the others fork it.
    children_.assign(parents_.size(), 0);
    for (const BeamCandidate& c : candidates_) children_[std::size_t(c.beam)]++;
    for (std::size_t i = 0; i < parents_.size(); i++)
        if (children_[i] == 0) scheduler_.free(group, *parents_[i], FinishReason::none);
    survivors_.clear();
    for (const BeamCandidate& c : candidates_) {
        Sequence&  parent = *parents_[std::size_t(c.beam)];
        const bool first  = std::ranges::find(survivors_, &parent) == survivors_.end();
        survivors_.push_back(first ? &parent : &scheduler_.fork(group, parent));
    }
    for (std::size_t i = 0; i < candidates_.size(); i++) extend(*survivors_[i], candidates_[i]);
    // The beams stand in the order of their scores; this order decides ties of the next step.
    for (std::size_t i = 0; i < survivors_.size(); i++) {
        auto at = std::find_if(group.sequences.begin(), group.sequences.end(),
                               [&](const auto& s) { return s.get() == survivors_[i]; });
        std::swap(*at, group.sequences[i]);
        survivors_[i]->index = int(i);
    }
    const bool full =
        group.sequences.empty() || scheduler_.ending(group, *group.sequences[0], false) == FinishReason::length;
    return {.over = full || is_over(group), .unusable = nullptr};
}

// Whether no beam that goes on can still get among the best: the rules of `transformers` for early_stopping.
bool BeamSearch::is_over(const SequenceGroup& group) const {
    const Request& r = group.request;
    if (int(group.finished.size()) < r.beam_width) return false;
    if (r.early_stopping == EarlyStopping::yes) return true;
    double worst = std::numeric_limits<double>::infinity();
    for (const auto& s : group.finished) worst = std::min(worst, score_of(r, s->logprob, group.n_generated(*s)));
    // Log-probabilities only fall; with a positive penalty a longer answer divides them by more.
    const bool  longest = r.early_stopping == EarlyStopping::never && r.length_penalty > 0;
    const auto& best    = *group.sequences[0];
    return worst >= score_of(r, best.logprob, longest ? r.max_tokens : group.n_generated(best));
}

} // namespace quire
