// quire.decode.step_sampling: the next tokens of a step's sequences: before the step, tasks for a device that samples; after the step, a
// token from the results of a task, or from a row of logits on the host. Owns scratch memory only.
export module quire.decode.step_sampling;

import quire.core.base;
import quire.decode.outputs;
import quire.decode.sampler;
import quire.decode.step_masks;
import quire.decode.step_rows;
import quire.schedule.scheduler;

export namespace quire {

// The next token of an answer.
struct NextToken {
    Token            token   = 0; // -1: there is none
    double           logprob = 0; // only where answers are ranked by log-probability
    double           mu      = 0; // mirostat's state behind the token
    PositionLogprobs logprobs{};  // only where the request wants log-probabilities
};

// The token that a sequence's reasoning has to have next, unless the constraint's mask `bits` forbids it (empty: no mask).
std::optional<Token> forced_token(const Sequence& s, std::span<const std::uint64_t> bits = {});

class StepSampling {
public:
    StepSampling(Sampler& sampler, StepRows& rows, std::span<const Token> end_tokens)
        : sampler_(sampler), rows_(rows), end_tokens_(end_tokens) {}

    // Before the step: lists the tasks for a device that samples; with limits of 0 none does. The host samples the rows beyond the device's limits.
    void plan(std::span<const Scheduled> items, const SamplingLimits& limits, const StepMasks& masks,
              SamplingPlan& plan);
    // After the step: whether the row behind a draft token gives what a step of its own would. Not where the device samples and had no room
    // for the row's task: the host's last bits differ. Nor where a request has ended the reasoning since the device drew.
    bool has_result(const Scheduled& item, int row) const;
    // After the step: the next token of the answer `stream`, from row `row` of an item, which belongs to the last token of its sequence; of
    // several draws of its task the one with the number `draw`.
    NextToken next(const Scheduled& item, int row, int stream, int draw);

private:
    bool add_drawing(const Scheduled& item, std::span<const Token> never, std::span<const std::uint64_t> mask,
                     SamplingTask& task, SamplingPlan& plan);
    std::span<const Token> banned(const SequenceGroup& group, const Sequence& sequence);

    Sampler&               sampler_;
    StepRows&              rows_;
    std::span<const Token> end_tokens_;
    bool                   device_samples_ = false; // in this step
    std::vector<Token>     banned_;                 // scratch
};

} // namespace quire

module :private;

namespace quire {

// The most likely token, without log-probabilities.
bool takes_best(const Request& r) {
    return is_plain_greedy(r.sampling) && r.sampling.logprobs < 0 && !withheld(r) && !r.constraint;
}

// No device tells the probabilities after the samplers.
bool is_for_host(const SamplingParams& p) { return p.after_samplers && p.logprobs >= 0; }

std::optional<Token> forced_token(const Sequence& s, std::span<const std::uint64_t> bits) {
    const std::optional<Token> token = s.reasoning ? s.reasoning->forced() : std::nullopt;
    if (!token || bits.empty() || (bits[std::size_t(*token) / 64] >> (*token % 64) & 1) != 0) return token;
    return std::nullopt;
}

// The tokens that are forbidden now: end tokens, while the answer has fewer than min_tokens.
std::span<const Token> StepSampling::banned(const SequenceGroup& group, const Sequence& sequence) {
    const Request& r = group.request;
    if (group.n_generated(sequence) >= r.min_tokens) return {};
    banned_.assign(end_tokens_.begin(), end_tokens_.end());
    banned_.insert(banned_.end(), r.stop_tokens.begin(), r.stop_tokens.end());
    return banned_;
}

void StepSampling::plan(std::span<const Scheduled> items, const SamplingLimits& limits, const StepMasks& masks,
                        SamplingPlan& sampling) {
    int n_results   = 0;
    device_samples_ = limits.tasks > 0;
    if (!device_samples_) return;
    // A task that exceeds the limits is left out.
    const auto add = [&](SamplingTask task) {
        task.first_result = n_results;
        task.n_edits      = int(sampling.edits.size()) - task.first_edit;
        if (task.n_top > limits.top || n_results + task.n_results() > limits.results ||
            int(sampling.tasks.size()) == limits.tasks || int(sampling.edits.size()) > limits.edits ||
            int(sampling.uniforms.size()) > limits.uniforms) {
            sampling.edits.resize(std::size_t(task.first_edit));
            sampling.uniforms.resize(std::size_t(task.first_uniform));
            return;
        }
        n_results += task.n_results();
        sampling.tasks.push_back(task);
        rows_.add_task(task);
    };
    const auto task_of = [&](int row) {
        return SamplingTask{
            .row = row, .first_edit = int(sampling.edits.size()), .first_uniform = int(sampling.uniforms.size())};
    };
    for (std::size_t i = 0; i < items.size(); i++) {
        const Scheduled&      item     = items[i];
        const SequenceGroup&  group    = *item.group;
        const Request&        r        = group.request;
        const SamplingParams& p        = r.sampling;
        const Sequence&       sequence = *item.sequence;
        if (!group.prompt_done && r.prompt_logprobs >= 0)
            for (int i = 0; i < item.n_logit_rows && item.first + i + 1 < group.n_prompt(); i++) {
                SamplingTask task = task_of(item.first_logit_row + i);
                task.chosen       = sequence.tokens[std::size_t(item.first) + std::size_t(i) + 1];
                task.n_top        = r.prompt_logprobs;
                task.logprobs     = true;
                add(task);
            }
        if (!is_sampled(item)) continue;
        // Adds the draw of the next token from the row `right` behind that of the last known token.
        const auto add_row = [&](int right) {
            const std::span<const Token> never = banned(group, sequence);
            if ((takes_best(r) && never.empty() && !forced_token(sequence)) || is_for_host(p)) return;
            SamplingTask task = task_of(item.first_logit_row + item.next_row() + right);
            task.first_mask   = masks.in_plan(i);
            if (sequence.constraint && task.first_mask < 0)
                return; // the host samples, or the mask's error ends the request
            task.n_top    = std::max(p.logprobs, r.beam_width > 0 ? 2 * r.beam_width : 0);
            task.logprobs = p.logprobs >= 0 || withheld(r);
            if (r.beam_width > 0 ||
                add_drawing(item, never, task.first_mask < 0 ? std::span<const std::uint64_t>() : masks.bits(i), task,
                            sampling))
                add(task);
        };
        add_row(0);
        // Behind a draft token: as if it were known. A state that only a known token moves on has no draft tokens (Drafting).
        std::vector<Token>& tokens = item.sequence->tokens;
        for (int right = 1; right <= item.n_drafts; right++) {
            tokens.push_back(sequence.guess[std::size_t(right) - 1]);
            add_row(right);
        }
        tokens.resize(tokens.size() - std::size_t(item.n_drafts));
    }
}

// The draw from the row of an item's last known token: the task's parameters, edits and random numbers. False: the host has to draw.
bool StepSampling::add_drawing(const Scheduled& item, std::span<const Token> never, std::span<const std::uint64_t> mask,
                               SamplingTask& task, SamplingPlan& plan) {
    const SequenceGroup&  group    = *item.group;
    const SamplingParams& p        = group.request.sampling;
    const Sequence&       sequence = *item.sequence;
    const bool            first    = group.n_generated(sequence) == 0;
    task.n_uniforms                = first ? group.request.width() : 1;
    const auto seed                = [&](int i) { return p.seed + std::uint64_t(first ? i : sequence.index); };
    const auto position            = std::uint64_t(group.length(sequence));
    for (int i = 0; i < task.n_uniforms; i++) plan.uniforms.push_back(random_at(seed(i), position));
    if (const auto token = forced_token(sequence, mask)) {
        task.only_edited = true;
        plan.edits.push_back({*token});
        return true;
    }
    task.temperature       = p.temperature;
    task.top_n_sigma       = p.top_n_sigma;
    task.top_k             = p.top_k;
    task.typical_p         = p.typical_p;
    task.top_p             = p.top_p;
    task.min_p             = p.min_p;
    task.dynatemp_range    = p.dynatemp_range;
    task.dynatemp_exponent = p.dynatemp_exponent;
    task.mirostat          = p.temperature > 0 ? p.mirostat : 0;
    task.mu                = float(sequence.mu);
    task.only_edited       = !p.allowed_tokens.empty();
    if (p.xtc_probability > 0) {
        // Each of several answers leaves out tokens of its own; a task has one set of tokens.
        if (task.n_uniforms > 1 && p.xtc_probability < 1) {
            plan.uniforms.resize(std::size_t(task.first_uniform));
            return false;
        }
        if (random_at(seed(0), ~position) < double(p.xtc_probability)) task.xtc_threshold = p.xtc_threshold;
    }
    sampler_.list_edits(p, sequence.tokens, group.n_generated_left(sequence), never, plan.edits);
    return true;
}

bool StepSampling::has_result(const Scheduled& item, int row) const {
    if (!device_samples_) return true;
    return !forced_token(*item.sequence) && (!rows_.sampled(item, row).empty() || takes_best(item.group->request) ||
                                             is_for_host(item.group->request.sampling));
}

// The next token of one answer: the device's best token, a token that the device sampled, or a token from the row on the host.
NextToken StepSampling::next(const Scheduled& item, int row, int stream, int draw) {
    const SequenceGroup&         group = *item.group;
    const Request&               r     = group.request;
    NextToken                    next;
    const std::span<const Token> never = banned(group, *item.sequence);
    const std::optional<Token>   best  = rows_.best(item, row);
    const Sequence&              s     = *item.sequence;
    next.mu                            = s.mu;
    if (best && takes_best(r) && never.empty() && !forced_token(s)) {
        next.token = *best;
    } else if (const auto sampled = rows_.sampled(item, row); !sampled.empty()) {
        const TokenLogprob own   = sampled[std::size_t(draw)];
        next.token               = own.token;
        next.logprob             = double(own.logprob);
        const SamplingTask& task = rows_.task(item, row);
        if (task.mirostat > 0)
            next.mu =
                next_mu(r.sampling, s.mu, double(sampled[std::size_t(task.n_uniforms + task.n_top + draw)].logprob));
        if (r.sampling.logprobs >= 0)
            next.logprobs = logprobs_of(own, sampled.subspan(std::size_t(task.n_uniforms)), r.sampling.logprobs);
    } else {
        const std::span<const float> logits = rows_.logits(item, row);
        const std::optional<Token>   must   = forced_token(s);
        const bool                   forced = must && std::isfinite(logits[std::size_t(*must)]) && usable(logits);
        if (forced) {
            next.token = *must;
        } else {
            const SamplePoint at{stream, std::uint64_t(group.length(s)), s.mu};
            const Sample      one = sampler_.sample(logits, r.sampling, s.tokens, group.n_generated_left(s), at, never);
            next.token            = one.token;
            next.mu               = one.mu;
        }
        if (next.token < 0) return next;
        if (withheld(r)) next.logprob = sampler_.logprob(logits, next.token);
        if (const int n_top = r.sampling.logprobs; n_top >= 0)
            next.logprobs = !is_for_host(r.sampling) ? sampler_.logprobs(logits, next.token, n_top)
                            : forced                 ? certain(next.token, n_top)
                                                     : sampler_.drawn_logprobs(next.token, n_top);
    }
    // The best tokens do not include tokens that the constraint forbids.
    if (r.constraint)
        std::erase_if(next.logprobs.top,
                      [](const TokenLogprob& t) { return t.logprob == -std::numeric_limits<float>::infinity(); });
    return next;
}

} // namespace quire
