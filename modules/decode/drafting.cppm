// quire.decode.drafting: chooses the draft tokens of each step: guesses of the next tokens, which run together with the last known token of their
// sequence. The decoder draws the tokens as ever, and a draft token saves a step where it is the token drawn. **Owns** what steps have cost.
export module quire.decode.drafting;

import quire.core.base;
import quire.decode.ngram_guesser;
import quire.decode.sampler;
export import quire.schedule.batch; // most_drafts
import quire.schedule.scheduler;

export namespace quire {

struct DraftOptions {
    bool on     = false;
    int  most   = 7;     // draft tokens of a sequence in a step, 1..most_drafts
    int  least  = 1;     // fewer do not run
    bool always = false; // as many as there are, whether they pay or not: for tests
    // Tokens that a request's constraint or its budget of reasoning forces are guesses, even where `on` is false.
    bool forced = true;
    // The device samples. It draws the token behind a draft token before the draft token is checked. So a request runs without draft tokens if a
    // state of it changes with each token: a constraint, a forced end of reasoning, mirostat.
    bool device_samples = false;
    // Guesses come from the sequence's own text: what followed the last tokens where they occurred before. So many tokens have to be alike.
    NgramRange ngram = {};
    // Or from a smaller model with the same vocabulary: a GGUF file (quire.engine.draft_model).
    bool        by_model = false;
    std::string model    = {};
    // Likewise, but the file has to be a draft of EAGLE-3, which reads the model's hidden states. An engine's options() say which one it is.
    bool by_eagle = false;
    // Or from the layer for multi-token prediction of the model itself (quire.engine.mtp_guesses).
    bool by_mtp = false;
    // Makes the guesser of a request in place of this; for tests and measurements.
    std::function<Polymorphic<TokenGuesser>(const Request&)> guesser = {};
};

inline constexpr int most_ngram = 8;
inline constexpr int least_rest = 128; // steps without a guess of a model that does not pay

// The fault in the options, in one sentence; "": none.
std::string fault_of(const DraftOptions& options);

// Appends to `guess` at most n tokens that have to come next in a sequence.
using ForcedTokens =
    std::function<void(const SequenceGroup& group, Sequence& sequence, int n, std::vector<Token>& guess)>;

// A text whose next tokens are wanted.
struct WantedGuess {
    const SequenceGroup* group    = nullptr;
    Sequence*            sequence = nullptr;
    int                  n        = 0; // at most so many tokens; 0: none this time
    double               hits     = 0; // the chance that one comes true
};

// Guesses the next tokens of several texts at once. A wrong guess costs time and changes nothing.
class BatchGuesser {
public:
    virtual ~BatchGuesser() = default;

    // Appends to the guess of each sequence. The guesser may forget texts that are not in `wanted`.
    virtual void guess(std::span<const WantedGuess> wanted) = 0;
    // The seconds that a guess of one token for each of n texts takes; 0: not known.
    virtual double seconds(int n_texts) const = 0;
};

// The cost of a step by the number of its rows, in seconds; between measured numbers on a straight line.
class StepCost {
public:
    void add_trial(int n_rows, double seconds); // on an empty pool; the fastest of several counts
    // A step of n_rows rows has taken so long, n_drafts of them draft tokens. Single slow steps are forgiven. Steps without draft tokens show
    // by how much the texts of the day lengthen a step, whatever its rows: their K and V are read once. Steps with draft tokens show what more
    // rows cost.
    void   add(int n_rows, int n_drafts, double seconds);
    double of(int n_rows) const; // 0: nothing is known

private:
    struct Point {
        int    n_rows  = 0;
        double seconds = 0; // without texts_
    };
    std::vector<Point> points_;    // ascending
    double             texts_ = 0; // seconds
    bool               tried_ = false;
};

class Drafting {
public:
    // `model`: makes the guesses, and outlives this; null: each sequence has a guesser of its own. `forced`: knows the forced tokens; empty: there
    // are none.
    explicit Drafting(DraftOptions options, BatchGuesser* model = nullptr, ForcedTokens forced = {})
        : options_(std::move(options)), model_(model), forced_(std::move(forced)) {}

    bool on() const { return options_.on; }
    // Before a step: sets the guesses of all running sequences, and how many of them are to run. `context`: the longest sequence; `most_rows`:
    // the rows of logits that a step has at most, which draft tokens share with the sequences. False: no draft token is to run.
    bool choose(std::span<const std::unique_ptr<SequenceGroup>> running, int context, int most_rows);
    // A step that had no prompts has taken so long.
    StepCost& cost() { return cost_; }

private:
    // Of many sequences those with the best hits run, and hits measured with few guesses would mostly be too high for these. So the hits of
    // each are drawn to the mean of all, by the part of their variance that so few guesses explain (Efron and Morris 1975).
    struct Shrinkage {
        double mean = 0, own = 1;
        double of(double hits) const { return mean + own * (hits - mean); }
    };
    // A draft token that could run.
    struct Choice {
        Sequence* sequence = nullptr;
        int       number   = 0; // of its sequence, from 1
        double    chance   = 0; // that it and those before it are right
    };
    static Shrinkage shrinkage_of(std::span<const std::unique_ptr<SequenceGroup>> running);
    int              most_for(const SequenceGroup& group, const Sequence& sequence, int context) const;
    int              least_for(const Request& request) const; // fewer tokens do not run
    // The chance that token number i of the guesses of all sequences of a group comes true.
    double hits_of(const SequenceGroup& group, int i = most_drafts) const;
    void   guess(const SequenceGroup& group, Sequence& sequence, int most);
    bool   guess_forced(const SequenceGroup& group, Sequence& sequence, int most) const;
    void   guess_by_model(int n_rows);
    void   want_paying(int n_rows);
    void   choose_paying(int n_rows);
    // Draft tokens of a step with so many other rows.
    int room(int n_rows) const { return std::max(most_rows_ - n_rows, 0); }

    DraftOptions             options_;
    BatchGuesser*            model_;
    ForcedTokens             forced_;
    StepCost                 cost_;
    Shrinkage                shrinkage_;
    std::vector<Choice>      choices_;     // scratch
    std::vector<WantedGuess> wanted_;      // likewise, for the model
    double                   usual_ = 0.6; // hits of a sequence that the model has not guessed for
    int n_idle_ = 0, rest_ = least_rest;   // steps since the model guessed last; and till it tries again
    int most_rows_   = 0;
    int n_unguessed_ = 0; // steps that come without a guess, since none of many sequences paid
};

// After a step: compares a sequence's guess with the tokens that follow the first n_known, whether it ran or not.
void judge_guess(Sequence& sequence, std::size_t n_known);

} // namespace quire

module :private;

namespace quire {

constexpr double usual_hits = 0.6; // of a sequence whose guesses were never judged
constexpr double settled    = 0.1; // the weight of a guess in the hits of a sequence that had many
constexpr int    many       = 16;  // sequences
constexpr double gain = 1.02; // so much faster a step with drafts has to be, because costs and chances are estimates

std::string fault_of(const DraftOptions& o) {
    if (o.most < 1 || o.most > most_drafts) return cat(o.most, " draft tokens in a step are not in 1..", most_drafts);
    if (o.least < 1 || o.least > o.most)
        return cat("at least ", o.least, " draft tokens are not in 1..", o.most, ", which is the most of a step");
    const bool by_file = o.by_model || o.by_eagle;
    if (by_file && o.by_mtp) return "guesses come from a draft model or from the model's MTP layer, not from both";
    if (by_file && o.model.empty()) return "guesses of a draft model need its file: --spec-draft-model";
    if (o.on && !by_file && !o.model.empty())
        return cat("--spec-draft-model needs --spec draft or eagle3: other guesses do not read ", o.model);
    if (o.ngram.least < 1 || o.ngram.least > o.ngram.most || o.ngram.most > most_ngram)
        return cat("n-grams of ", o.ngram.least, " to ", o.ngram.most, " tokens are not in 1..", most_ngram);
    return "";
}

void StepCost::add(int n_rows, int n_drafts, double seconds) {
    constexpr double least = 1e-9; // a step costs something
    auto             at    = std::ranges::lower_bound(points_, n_rows, {}, &Point::n_rows);
    if (at == points_.end() || at->n_rows != n_rows)
        at = points_.insert(at, {n_rows, std::max((tried_ ? of(n_rows) : seconds) - texts_, least)});
    const double known = of(n_rows), more = 0.1 * std::clamp(seconds - known, -0.5 * known, 0.5 * known);
    if (n_drafts > 0) at->seconds = std::max(at->seconds + more, least);
    else texts_ = std::max(texts_ + more, -0.5 * points_[0].seconds); // trials may be longer than steps
}

void StepCost::add_trial(int n_rows, double seconds) {
    tried_ = true;
    if (!points_.empty() && points_.back().n_rows == n_rows)
        points_.back().seconds = std::min(points_.back().seconds, seconds);
    else points_.push_back({n_rows, seconds});
}

double StepCost::of(int n_rows) const {
    if (points_.empty()) return 0;
    auto above = std::ranges::lower_bound(points_, n_rows, {}, &Point::n_rows);
    if (above == points_.begin()) return texts_ + above->seconds;
    if (above == points_.end()) {
        if (points_.size() == 1) return texts_ + points_[0].seconds;
        above--; // beyond: as between the last two
    }
    const Point& below = above[-1];
    return texts_ + below.seconds +
           (above->seconds - below.seconds) * (n_rows - below.n_rows) / (above->n_rows - below.n_rows);
}

void judge_guess(Sequence& s, std::size_t n_known) {
    for (std::size_t i = 0; i < s.guess.size() && n_known + i < s.tokens.size(); i++) {
        const bool hit    = s.guess[i] == s.tokens[n_known + i];
        const bool forced = int(i) < s.n_forced;
        double&    hits   = forced ? s.forced_hits : s.hits;
        // The mean of a first assumption and of all guesses, later of the last ones: a sequence whose guesses are wrong stops after one or two.
        const double weight = forced ? settled : std::max(settled, 1.0 / (2 + s.n_judged++));
        hits                = (1 - weight) * (hits < 0 ? usual_hits : hits) + weight * hit;
        if (!hit) break;
    }
    s.guess.clear();
}

// How many tokens may be guessed. The tokens of a step end where the answer or the context does: behind that a sequence has ended or forgotten
// tokens. The sequences of a group exist from the first token on.
int Drafting::most_for(const SequenceGroup& group, const Sequence& s, int context) const {
    const Request& r = group.request;
    if (!group.prompt_done || !r.generates() || r.beam_width > 0 || group.waits()) return 0;
    // Several answers have no sequences before their first token. No device samples for their drafts.
    if (r.width() > 1 && (options_.device_samples || group.n_generated(s) == 0)) return 0;
    const SamplingParams& p = r.sampling;
    if (options_.device_samples && (r.constraint || (p.mirostat > 0 && p.temperature > 0))) return 0;
    int most = r.most_drafts < 0 ? options_.most : std::min(options_.most, r.most_drafts);
    most     = std::min({most, r.max_tokens - group.n_generated(s) - 1, context - int(s.tokens.size()) - 1});
    // A device draws behind a draft what is free there.
    if (options_.device_samples && s.reasoning) most = std::min(most, s.reasoning->free_tokens());
    return most < least_for(r) ? 0 : most;
}

int Drafting::least_for(const Request& r) const {
    return r.least_drafts < 0 ? options_.least : std::clamp(r.least_drafts, 1, options_.most);
}

void Drafting::guess(const SequenceGroup& group, Sequence& s, int most) {
    if (!s.guesser) s.guesser = options_.guesser ? options_.guesser(group.request) : NgramGuesser(options_.ngram);
    s.guesser->guess(s.tokens, most, s.guess);
}

// False: no token has to come, so that others may be guessed.
bool Drafting::guess_forced(const SequenceGroup& group, Sequence& s, int most) const {
    if (options_.forced && forced_) forced_(group, s, most, s.guess);
    s.n_forced = int(s.guess.size());
    return s.n_forced > 0;
}

double Drafting::hits_of(const SequenceGroup& group, int i) const {
    double hits = 1;
    for (const auto& s : group.sequences)
        hits *= i < s->n_forced ? s->forced_hits : s->hits < 0 ? usual_hits : shrinkage_.of(s->hits);
    return hits;
}

Drafting::Shrinkage Drafting::shrinkage_of(std::span<const std::unique_ptr<SequenceGroup>> running) {
    double n = 0, sum = 0, squares = 0, weights = 0;
    for (const auto& group : running)
        for (const auto& s : group->sequences)
            if (s->hits >= 0)
                n++, sum += s->hits, squares += s->hits * s->hits,
                    weights += std::max(settled / (2 - settled), 1.0 / (2 + s->n_judged));
    if (n < many) return {};
    const double mean = sum / n, variance = squares / n - mean * mean, by_chance = mean * (1 - mean) * weights / n;
    return {mean, variance > by_chance ? 1 - by_chance / variance : 0};
}

bool Drafting::choose(std::span<const std::unique_ptr<SequenceGroup>> running, int context, int most_rows) {
    if (!on() && (!options_.forced || options_.device_samples)) return false;
    most_rows_ = most_rows;
    shrinkage_ = shrinkage_of(running);
    choices_.clear();
    wanted_.clear();
    int n_rows = 0;
    for (const auto& group : running)
        if (group->prompt_done) n_rows += int(group->sequences.size());
    // The device waits for the guesses of many sequences. Where none pays, one step in eight learns whether that changes. The first guess of a
    // sequence is compared with its tokens and does not run: many wrong ones would cost more than a step.
    constexpr int unguessed = 7;
    const bool    skips     = n_unguessed_ > 0 && n_rows >= many;
    bool          asks = false, learns = false;
    for (const auto& group : running)
        for (const auto& s : group->sequences) {
            s->guess.clear();
            s->n_drafts = s->n_forced = 0;
            int most                  = most_for(*group, *s, context);
            if (most > 0 && guess_forced(*group, *s, most)) most = 0;
            if (skips) continue;
            asks = asks || (most > 0 && on());
            if (model_) wanted_.push_back({group.get(), s.get(), most});
            else if (most > 0 && on()) guess(*group, *s, most);
        }
    if (skips) n_unguessed_--, n_idle_ += model_ && n_idle_ < rest_; // the model's next try is not skipped
    else if (model_) guess_by_model(n_rows);
    for (const auto& group : running) {
        // The sequences of a group have one length: all go on, or none.
        auto n = std::size_t(most_drafts);
        for (const auto& s : group->sequences) n = std::min(n, s->guess.size());
        if (int(n) < least_for(group->request)) n = 0;
        bool judged = true;
        for (const auto& s : group->sequences) judged = judged && (s->hits >= 0 || s->n_forced > 0);
        const bool runs = judged || n_rows < many;
        learns          = learns || (n > 0 && !runs);
        for (const auto& s : group->sequences) {
            s->guess.resize(n);
            if (options_.always) s->n_drafts = int(n);
            double chance = 1;
            for (int i = 1; runs && i <= int(n); i++)
                choices_.push_back({s.get(), i, chance *= hits_of(*group, i - 1)});
        }
    }
    if (!options_.always) choose_paying(n_rows);
    bool any = false;
    for (const auto& group : running) {
        int n = most_drafts;
        for (const auto& s : group->sequences) n = std::min(n, s->n_drafts);
        if (n < least_for(group->request)) n = 0; // of its guess fewer pay
        for (const auto& s : group->sequences) s->n_drafts = n, any = any || n > 0;
    }
    const bool tries = n_idle_ > rest_; // the model, for a few steps
    if (!skips) n_unguessed_ = asks && !any && !options_.always && !tries && !learns ? unguessed : 0;
    return any;
}

// Unlike guesses of the text itself, those of a model cost time: it makes as many as pay.
void Drafting::guess_by_model(int n_rows) {
    double hits = 0;
    int    n    = 0;
    for (const WantedGuess& w : wanted_)
        if (w.sequence->hits >= 0) hits += w.sequence->hits, n++;
    if (n > 0) usual_ += 0.1 * (hits / n - usual_);
    for (const WantedGuess& w : wanted_)
        if (w.n > 0 && w.sequence->hits < 0) w.sequence->hits = usual_, w.sequence->n_judged = int(1 / settled);
    for (WantedGuess& w : wanted_) w.hits = hits_of(*w.group);
    if (!options_.always) want_paying(n_rows);
    if (std::ranges::any_of(wanted_, [](const WantedGuess& w) { return w.n > 0; })) model_->guess(wanted_);
}

// Of the sequences with the best hits so many, and of each so many tokens, as bring the most tokens a second. Where none do, the model tries
// again later, for a few steps.
void Drafting::want_paying(int n_rows) {
    constexpr int n_tried = 8; // steps
    std::ranges::sort(wanted_, {}, [](const WantedGuess& w) {
        return std::tuple(w.n == 0, -w.hits, w.group->id, w.sequence->index);
    });
    const int n = int(std::ranges::find(wanted_, 0, &WantedGuess::n) - wanted_.begin());
    if (n == 0 || cost_.of(n_rows) <= 0) return;
    double best   = gain * n_rows / cost_.of(n_rows);
    int    n_best = 0, k_best = 0;
    for (int k = options_.least; k <= options_.most; k++) {
        double tokens = n_rows;
        for (int i = 1; i <= n && i * k <= room(n_rows); i++) {
            double chance = 1;
            for (int j = 0; j < k; j++) tokens += chance *= wanted_[std::size_t(i - 1)].hits;
            const double rate = tokens / (cost_.of(n_rows + i * k) + k * model_->seconds(i));
            if (rate > best) best = rate, n_best = i, k_best = k;
        }
    }
    if (n_best > 0) n_idle_ = 0, rest_ = least_rest;
    else if (++n_idle_ > rest_ && room(n_rows) > 0)
        n_best = 1, k_best = std::max(least_for(wanted_[0].group->request), 1);
    if (n_idle_ >= rest_ + n_tried) n_idle_ = 0, rest_ = std::min(2 * rest_, 1024);
    while (n_best > 0 && n_best < n && wanted_[std::size_t(n_best)].group == wanted_[std::size_t(n_best - 1)].group)
        n_best++; // no group in part
    for (int i = 0; i < n; i++) {
        WantedGuess& w = wanted_[std::size_t(i)];
        w.n            = i < n_best ? std::min(w.n, k_best) : 0;
        if (w.n < least_for(w.group->request)) w.n = 0; // such a guess would cost time and not run
    }
}

// The drafts with the best chances, as many as make the step bring the most tokens a second.
void Drafting::choose_paying(int n_rows) {
    if (choices_.empty() || cost_.of(n_rows) <= 0) return;
    if (room(n_rows) == 0) return;
    // Mostly none pays, not even if all of them cost no more than one.
    double possible = n_rows;
    for (const Choice& c : choices_) possible += c.chance;
    if (possible / cost_.of(n_rows + 1) <= gain * n_rows / cost_.of(n_rows)) return;
    std::ranges::sort(choices_, [](const Choice& a, const Choice& b) {
        return std::tuple(-a.chance, a.number) < std::tuple(-b.chance, b.number);
    });
    double      tokens = n_rows, best = gain * tokens / cost_.of(n_rows);
    std::size_t n_best = 0;
    for (std::size_t i = 0; i < std::min(choices_.size(), std::size_t(room(n_rows))); i++) {
        tokens += choices_[i].chance;
        const double rate = tokens / cost_.of(n_rows + int(i) + 1);
        if (rate > best) best = rate, n_best = i + 1;
    }
    for (const Choice& c : std::span(choices_).first(n_best))
        c.sequence->n_drafts = std::max(c.sequence->n_drafts, c.number);
}

} // namespace quire
