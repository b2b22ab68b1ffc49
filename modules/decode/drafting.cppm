// quire.decode.drafting: chooses the draft tokens of each step: guesses of the next tokens, which run together with the last known token of their
// sequence. The decoder draws the tokens as ever, and a draft token saves a step where it is the token drawn. **Owns** what steps have cost.
export module quire.decode.drafting;

import quire.core.base;
import quire.decode.ngram_guesser;
import quire.decode.sampler;
import quire.schedule.scheduler;

export namespace quire {

struct DraftOptions {
    bool on     = false;
    int  most   = 7;     // draft tokens of a sequence in a step, 1..most_drafts
    int  least  = 1;     // fewer do not run
    bool always = false; // as many as there are, whether they pay or not: for tests
    // The device samples: it draws the tokens behind draft tokens before those are known to be right, so requests with a state that moves from
    // token to token run without: constraints, forced ends of reasoning, mirostat.
    bool device_samples = false;
    // Guesses come from the sequence's own text: what followed the last tokens where they occurred before. So many tokens have to be alike.
    NgramRange ngram = {};
    // Makes the guesser of a request in place of this; for tests and measurements.
    std::function<Polymorphic<TokenGuesser>(const Request&)> guesser = {};
};

inline constexpr int most_drafts = 15, most_ngram = 8;

// What is wrong with the options, in one sentence; "": nothing.
std::string fault_of(const DraftOptions& options);

// What a step costs by the number of its rows, in seconds; between measured numbers on a straight line.
class StepCost {
public:
    // A step of n_rows rows has taken so long. Single slow steps are forgiven.
    void   add(int n_rows, double seconds);
    void   add_trial(int n_rows, double seconds); // the fastest of several counts
    double of(int n_rows) const;                  // 0: nothing is known

private:
    struct Point {
        int    n_rows  = 0;
        double seconds = 0;
    };
    std::vector<Point> points_; // ascending
};

class Drafting {
public:
    explicit Drafting(DraftOptions options) : options_(std::move(options)) {}

    bool on() const { return options_.on; }
    // Before a step: sets the guesses of all running sequences, and how many of them are to run. `context`: the longest sequence. False: no
    // draft token is to run.
    bool choose(std::span<const std::unique_ptr<SequenceGroup>> running, int context);
    // A step that had no prompts has taken so long.
    StepCost& cost() { return cost_; }

private:
    // A draft token that could run.
    struct Choice {
        Sequence* sequence = nullptr;
        int       number   = 0; // of its sequence, from 1
        double    chance   = 0; // that it and those before it are right
    };
    void guess(const SequenceGroup& group, Sequence& sequence, int context);
    void choose_paying(int n_rows);

    DraftOptions        options_;
    StepCost            cost_;
    std::vector<Choice> choices_; // scratch
};

// After a step: compares a sequence's guess with the tokens that follow the first n_known, whether it ran or not.
void judge_guess(Sequence& sequence, std::size_t n_known);

} // namespace quire

module :private;

namespace quire {

constexpr double usual_hits = 0.6; // of a sequence whose guesses were never judged
constexpr double gain = 1.02; // so much faster a step with drafts has to be, because costs and chances are estimates

std::string fault_of(const DraftOptions& o) {
    if (o.most < 1 || o.most > most_drafts) return cat(o.most, " draft tokens in a step are not in 1..", most_drafts);
    if (o.least < 1 || o.least > o.most)
        return cat("at least ", o.least, " draft tokens are not in 1..", o.most, ", which is the most of a step");
    if (o.ngram.least < 1 || o.ngram.least > o.ngram.most || o.ngram.most > most_ngram)
        return cat("n-grams of ", o.ngram.least, " to ", o.ngram.most, " tokens are not in 1..", most_ngram);
    return "";
}

void StepCost::add(int n_rows, double seconds) {
    const auto at = std::ranges::lower_bound(points_, n_rows, {}, &Point::n_rows);
    if (at == points_.end() || at->n_rows != n_rows) {
        points_.insert(at, {n_rows, seconds});
        return;
    }
    at->seconds *= 1 + 0.1 * std::clamp(seconds / at->seconds - 1, -0.5, 0.5);
}

void StepCost::add_trial(int n_rows, double seconds) {
    if (!points_.empty() && points_.back().n_rows == n_rows)
        points_.back().seconds = std::min(points_.back().seconds, seconds);
    else points_.push_back({n_rows, seconds});
}

double StepCost::of(int n_rows) const {
    if (points_.empty()) return 0;
    auto above = std::ranges::lower_bound(points_, n_rows, {}, &Point::n_rows);
    if (above == points_.begin()) return above->seconds;
    if (above == points_.end()) {
        if (points_.size() == 1) return points_[0].seconds;
        above--; // beyond: as between the last two
    }
    const Point& below = above[-1];
    return below.seconds + (above->seconds - below.seconds) * (n_rows - below.n_rows) / (above->n_rows - below.n_rows);
}

void judge_guess(Sequence& s, std::size_t n_known) {
    for (std::size_t i = 0; i < s.guess.size() && n_known + i < s.tokens.size(); i++) {
        const bool hit = s.guess[i] == s.tokens[n_known + i];
        s.hits         = 0.9 * (s.hits < 0 ? usual_hits : s.hits) + (hit ? 0.1 : 0);
        if (!hit) break;
    }
    s.guess.clear();
}

// The sequences of a group have one length, so a group with several runs without. The tokens of a step end where the answer or the context does:
// behind that a sequence has ended or forgotten tokens.
void Drafting::guess(const SequenceGroup& group, Sequence& s, int context) {
    const Request& r = group.request;
    s.guess.clear();
    s.n_drafts = 0;
    if (!group.prompt_done || !r.generates() || r.width() > 1 || r.beam_width > 0 || s.waits) return;
    const SamplingParams& p = r.sampling;
    if (options_.device_samples && (r.constraint || s.reasoning || (p.mirostat > 0 && p.temperature > 0))) return;
    const int most =
        std::min({options_.most, r.max_tokens - group.n_generated(s) - 1, context - int(s.tokens.size()) - 1});
    if (most < options_.least || most < 1) return;
    if (!s.guesser) s.guesser = options_.guesser ? options_.guesser(r) : NgramGuesser(options_.ngram);
    s.guesser->guess(s.tokens, most, s.guess);
    if (int(s.guess.size()) < options_.least) s.guess.clear();
}

bool Drafting::choose(std::span<const std::unique_ptr<SequenceGroup>> running, int context) {
    if (!on()) return false;
    choices_.clear();
    int n_rows = 0;
    for (const auto& group : running)
        for (const auto& s : group->sequences) {
            n_rows += group->prompt_done;
            guess(*group, *s, context);
            if (options_.always) s->n_drafts = int(s->guess.size());
            double chance = 1;
            for (int i = 1; i <= int(s->guess.size()); i++)
                choices_.push_back({s.get(), i, chance *= s->hits < 0 ? usual_hits : s->hits});
        }
    if (!options_.always) choose_paying(n_rows);
    return std::ranges::any_of(choices_, [](const Choice& c) { return c.sequence->n_drafts > 0; });
}

// The drafts with the best chances, as many as make the step bring the most tokens a second.
void Drafting::choose_paying(int n_rows) {
    if (choices_.empty() || cost_.of(n_rows) <= 0) return;
    std::ranges::sort(choices_, [](const Choice& a, const Choice& b) {
        return std::tuple(-a.chance, a.number) < std::tuple(-b.chance, b.number);
    });
    double      tokens = n_rows, best = gain * tokens / cost_.of(n_rows);
    std::size_t n_best = 0;
    for (std::size_t i = 0; i < choices_.size(); i++) {
        tokens += choices_[i].chance;
        const double rate = tokens / cost_.of(n_rows + int(i) + 1);
        if (rate > best) best = rate, n_best = i + 1;
    }
    for (const Choice& c : std::span(choices_).first(n_best))
        c.sequence->n_drafts = std::max(c.sequence->n_drafts, c.number);
}

} // namespace quire
