// quire.decode.decoder: a step's results → tokens and outputs: greedy and sampled answers, n and best_of, beam search, built from
// the scheduler's fork, append and free (the paper, section 5.2). **Owns** the sampler and the outputs that are not complete yet.
export module quire.decode.decoder;

import quire.core.base;
import quire.core.polymorphic;
import quire.core.std;
import quire.core.thread_pool;
import quire.decode.beam_search;
import quire.decode.mask_makers;
import quire.decode.pooling;
import quire.decode.sampler;
import quire.decode.step_rows;
import quire.schedule.request;
import quire.schedule.scheduler;
import quire.schedule.token_filter;
import quire.step.plan;

export namespace quire {

class Decoder {
public:
    // `end_tokens`: generation ends with one of these. Where a constraint allows only one continuation, its tokens are appended without being
    // sampled, while at most `force_up_to` requests run. `clock`: measures the time limits of masks; none: the machine's.
    Decoder(Scheduler& scheduler, std::vector<Token> end_tokens, int vocab_size, Pooler pooler, int force_up_to = 0,
            std::function<std::chrono::steady_clock::time_point()> clock = {});
    Decoder(const Decoder&)            = delete;
    Decoder& operator=(const Decoder&) = delete;

    // Before the step: fills in the plan's sampling tasks for a device that samples; deliver() samples the rows beyond the device's limits.
    // Makes the masks of the step's sequences: a sequence whose mask takes too long is put off.
    void plan_sampling(std::span<const Scheduled> items, const SamplingLimits& limits, StepPlan& plan);
    // The step has run and is committed: `items` are its scheduled sequences, `results` its results. Appends outputs; requests that are
    // over leave the scheduler, so that their blocks serve the next step.
    void deliver(std::span<const Scheduled> items, const StepResults& results, std::vector<Output>& out);
    // Before the step: the sequences whose masks were made beside the steps go on; appends outputs. waits(): whether a sequence still
    // waits for its mask.
    void resume(std::vector<Output>& out);
    bool waits() const { return !late_.empty(); }
    // Waits until one of these masks is made, at most `seconds`.
    void wait(double seconds) { mask_makers_.wait(seconds); }
    // Ends a request, whatever its state; its outputs have `reason`. Does nothing when no such request exists (any more).
    void finish(RequestId id, FinishReason reason, const std::string& message, std::vector<Output>& out);
    // Ends one of several answers, whether it has begun or not; the others go on. With the last one its request ends.
    void cancel_answer(RequestId id, int index, std::vector<Output>& out);

private:
    // The next token of an answer.
    struct NextToken {
        Token            token   = 0; // -1: there is none
        double           logprob = 0; // only where answers are ranked by log-probability
        double           mu      = 0; // mirostat's state behind the token
        PositionLogprobs logprobs{};  // only where the request wants log-probabilities
    };
    NextToken next_token(SequenceGroup& group, const Scheduled& item, int stream, int draw);
    bool      add_prompt_logprobs(const Scheduled& item);
    bool      add_hidden(const Scheduled& item);
    bool      fail(const Scheduled& item, int i, std::string_view what);
    void      fail_without_token(const Scheduled& item);
    bool      constrain(std::span<const Scheduled> items, std::size_t first);
    bool      is_end(Token token) const { return std::ranges::find(end_tokens_, token) != end_tokens_.end(); }
    std::span<const Token> banned(const SequenceGroup& group, const Sequence& sequence);
    bool    add_drawing(const Scheduled& item, std::span<const Token> never, SamplingTask& task, SamplingPlan& plan);
    void    end_prompt(const Scheduled& item, std::vector<Output>& out);
    void    sample(std::span<const Scheduled> items, std::vector<Output>& out);
    void    append(SequenceGroup& group, Sequence& sequence, NextToken next, std::vector<Output>& out,
                   bool forced = false);
    void    fast_forward(SequenceGroup& group, Sequence& sequence, std::vector<Output>& out);
    void    force(SequenceGroup& group, Sequence& sequence, std::vector<Output>& out);
    void    make_masks(std::span<const Scheduled> items, const SamplingLimits& limits, SamplingPlan& plan);
    void    make_beside(const SequenceGroup& group, Sequence& sequence, bool forced);
    bool    can_fast_forward(const SequenceGroup& group, const Sequence& sequence) const;
    void    remove_done(std::vector<Output>& out, std::size_t first);
    void    output_embedding(SequenceGroup& group, std::vector<Output>& out);
    void    output_prompt(SequenceGroup& group, std::vector<Output>& out);
    void    output_best(SequenceGroup& group, std::vector<Output>& out);
    void    attach_prompt(Output& output);
    Output  output_of(const SequenceGroup& group, int index);
    Output& partial_of(RequestId id);

    std::chrono::steady_clock::time_point now() const { return clock_ ? clock_() : std::chrono::steady_clock::now(); }

    Scheduler&                                             scheduler_;
    std::function<std::chrono::steady_clock::time_point()> clock_;
    int                                                    force_up_to_;
    std::vector<Token>                                     end_tokens_;
    Sampler                                                sampler_;
    BeamSearch                                             beam_search_;
    StepRows                                               rows_;
    Pooler                                                 pooler_;
    std::vector<Output>    partial_; // results of prompts that are not computed completely
    std::vector<Sequence*> answers_; // scratch
    std::vector<NextToken> next_;
    std::vector<Token>     banned_;
    std::vector<Ended>     failed_; // by this step
    // Of each item of the step.
    struct ItemMask {
        int         at    = -1; // where the mask begins in masks_; -1: the item has no mask
        int         in    = -1; // where the mask begins in the plan's masks
        int         slow  = 0;  // 1: the mask was not made in time, and is made beside the steps
        std::string error = {}; // why there is no mask
    };
    // A sequence that waits for its mask.
    struct Late {
        RequestId                id       = 0;
        Sequence*                sequence = nullptr;
        std::shared_ptr<MaskJob> job;
    };
    std::size_t                           mask_words_;
    std::vector<std::uint64_t>            masks_; // of the step, bits
    std::vector<ItemMask>                 item_masks_;
    std::vector<std::vector<int>>         mask_parts_; // items whose masks one thread makes
    std::optional<ThreadPool>             mask_pool_;  // from the first step on that has masks of several constraints
    MaskMakers                            mask_makers_;
    std::vector<Late>                     late_;
    std::chrono::steady_clock::time_point forced_until_{}; // in this step
};

} // namespace quire

module :private;

namespace quire {

// Answers that are compared with one another are given when all are complete.
bool withheld(const Request& request) { return request.beam_width > 0 || request.best_of > request.n; }

bool is_cancelled(const SequenceGroup& group, int answer) {
    return std::ranges::find(group.cancelled, answer) != group.cancelled.end();
}

// The answers that are not over.
std::vector<int> open_answers(const SequenceGroup& group) {
    std::vector<int> open;
    if (group.prompt_done && group.request.generates() && !withheld(group.request)) {
        for (const auto& s : group.sequences) open.push_back(s->index);
        return open;
    }
    for (int i = 0; i < group.request.n; i++) // a sequence is no answer yet
        if (!is_cancelled(group, i)) open.push_back(i);
    return open;
}

// The most likely token, without log-probabilities.
bool takes_best(const Request& r) {
    return is_plain_greedy(r.sampling) && r.sampling.logprobs < 0 && !withheld(r) && !r.constraint;
}

// The token that has to come, unless the constraint's mask `bits` forbids it (empty: no mask).
std::optional<Token> forced(const Sequence& s, std::span<const std::uint64_t> bits) {
    const std::optional<Token> token = s.reasoning ? s.reasoning->forced() : std::nullopt;
    if (!token || bits.empty() || (bits[std::size_t(*token) / 64] >> (*token % 64) & 1) != 0) return token;
    return std::nullopt;
}

// `bits` has a word for each 64 tokens of the model, which may have more or fewer than its tokenizer.
Result<bool> make_mask(TokenFilter& constraint, std::span<std::uint64_t> bits, const Effort& effort) {
    std::ranges::fill(bits, 0);
    if (constraint.words() <= bits.size()) return constraint.mask(bits.first(constraint.words()), effort);
    std::vector<std::uint64_t> whole(constraint.words());
    Result<bool>               made = constraint.mask(whole, effort);
    std::copy_n(whole.begin(), bits.size(), bits.begin());
    return made;
}

Decoder::Decoder(Scheduler& scheduler, std::vector<Token> end_tokens, int vocab_size, Pooler pooler, int force_up_to,
                 std::function<std::chrono::steady_clock::time_point()> clock)
    : scheduler_(scheduler), clock_(std::move(clock)), force_up_to_(force_up_to), end_tokens_(std::move(end_tokens)),
      sampler_(vocab_size), beam_search_(scheduler, sampler_), rows_(vocab_size), pooler_(std::move(pooler)),
      mask_words_((std::size_t(vocab_size) + 63) / 64) {
    std::erase_if(end_tokens_, [&](Token id) { return id >= vocab_size; });
}

// Whether the item's last row gives a token.
bool is_sampled(const Scheduled& item) {
    const Request& r = item.group->request;
    return item.samples && r.generates() && (item.group->prompt_done || !r.return_logits);
}

void Decoder::plan_sampling(std::span<const Scheduled> items, const SamplingLimits& limits, StepPlan& plan) {
    rows_.clear_tasks(limits.tasks > 0 ? plan.logit_rows.size() : 0);
    SamplingPlan& sampling = plan.sampling;
    make_masks(items, limits, sampling);
    if (limits.tasks == 0) return;
    int n_results = 0;
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
        const std::span<const Token> never = banned(group, sequence);
        if (takes_best(r) && never.empty() && !forced(sequence, {})) continue;
        SamplingTask task = task_of(item.first_logit_row + item.n_logit_rows - 1);
        task.first_mask   = item_masks_[i].in;
        if (sequence.constraint && task.first_mask < 0)
            continue; // the host samples, or the mask's error ends the request
        task.n_top    = std::max(p.logprobs, r.beam_width > 0 ? 2 * r.beam_width : 0);
        task.logprobs = p.logprobs >= 0 || withheld(r);
        if (r.beam_width == 0 && !add_drawing(item, never, task, sampling)) continue;
        add(task);
    }
}

// Time limits of the engine's thread: for all masks of a step `step_time_limit`, and `mask_time_limit` more for each sequence; for all
// forced tokens of a step `step_time_limit`.
constexpr auto step_time_limit = std::chrono::microseconds(1500), mask_time_limit = std::chrono::microseconds(30);
// Time limits of masks that are made beside the steps: of one mask, and of all masks of one sequence.
constexpr double late_seconds = 30, all_late_seconds = 15;

// Makes the masks of a step; masks of different constraints are made at the same time. If one mask of a group is not made in time, the
// group is put off.
void Decoder::make_masks(std::span<const Scheduled> items, const SamplingLimits& limits, SamplingPlan& plan) {
    masks_.clear();
    item_masks_.assign(items.size(), {});
    for (auto& part : mask_parts_) part.clear();
    int  n_parts = 0;
    auto until   = now() + step_time_limit;
    for (int i = 0; i < int(items.size()); i++) {
        const Scheduled&                item = items[std::size_t(i)];
        const Polymorphic<TokenFilter>& own  = item.sequence->constraint;
        if (!own || !is_sampled(item)) continue;
        until += mask_time_limit;
        ItemMask& mask = item_masks_[std::size_t(i)];
        mask.at        = int(masks_.size());
        masks_.resize(masks_.size() + mask_words_);
        if (int(plan.masks.size() + mask_words_) <= limits.mask_words) {
            mask.in = int(plan.masks.size());
            plan.masks.resize(plan.masks.size() + mask_words_);
        }
        const auto same = [&](const std::vector<int>& part) {
            return part.empty() || own->shared() == items[std::size_t(part[0])].sequence->constraint->shared();
        };
        auto part = std::ranges::find_if(mask_parts_, same);
        if (part == mask_parts_.end()) part = mask_parts_.insert(part, std::vector<int>());
        n_parts += part->empty();
        part->push_back(i);
    }
    const auto make = [&](int n, int) {
        for (int i : mask_parts_[std::size_t(n)]) {
            ItemMask&  mask = item_masks_[std::size_t(i)];
            const auto bits = std::span(masks_).subspan(std::size_t(mask.at), mask_words_);
            const auto made = make_mask(*items[std::size_t(i)].sequence->constraint, bits, {.until = until});
            if (!made) mask.error = made.error().message;
            else if (!*made) mask.slow = 1;
            if (!made || !*made) mask.in = -1;
            else if (mask.in >= 0) std::ranges::copy(bits, plan.masks.begin() + mask.in);
        }
    };
    if (n_parts == 0) return;
    if (n_parts == 1) make(0, 0);
    else {
        if (!mask_pool_) mask_pool_.emplace(std::min(physical_cores(), 8));
        mask_pool_->run(n_parts, make);
    }
    for (std::size_t i = 0; i < items.size(); i++) {
        if (item_masks_[i].slow == 0) continue;
        make_beside(*items[i].group, *items[i].sequence, false);
        scheduler_.put_off(*items[i].group);
    }
}

// From now on the sequence waits.
void Decoder::make_beside(const SequenceGroup& group, Sequence& s, bool forced) {
    auto job = std::make_shared<MaskJob>(s.constraint, forced, s.mask_seconds, now());
    s.waits  = true;
    late_.push_back({group.id, &s, job});
    mask_makers_.add(std::move(job));
}

void Decoder::resume(std::vector<Output>& out) {
    const std::size_t first_output = out.size();
    forced_until_                  = now() + step_time_limit;
    std::vector<Late> late         = std::exchange(late_, {});
    for (Late& l : late) {
        SequenceGroup* group = scheduler_.find(l.id);
        const bool     there =
            group && std::ranges::any_of(group->sequences, [&](const auto& s) { return s.get() == l.sequence; });
        if (!there) { // the sequence has ended meanwhile
            l.job->stop = true;
            continue;
        }
        Sequence&  s    = *l.sequence;
        const bool done = mask_makers_.is_done(*l.job);
        if (!done && now() - l.job->since > std::chrono::duration<double>(late_seconds))
            failed_.push_back({l.id, FinishReason::unmet,
                               cat("the constraint's next mask was not there after ", late_seconds, " seconds")});
        if (!done || group->status != GroupStatus::running) {
            late_.push_back(std::move(l));
            continue;
        }
        s.waits        = false;
        s.constraint   = std::move(l.job->state);
        s.slow_masks   = l.job->slow;
        s.mask_seconds = l.job->seconds;
        if (s.mask_seconds > all_late_seconds)
            failed_.push_back({l.id, FinishReason::unmet,
                               cat("the constraint's masks have taken more than ", all_late_seconds, " seconds")});
        if (!l.job->forced) continue;
        const std::size_t n_tokens = s.tokens.size();
        force(*group, s, out);
        if (s.slow_masks && s.finish == FinishReason::none && !s.waits && s.tokens.size() > n_tokens)
            make_beside(*group, s, false);
    }
    remove_done(out, first_output);
    for (const Ended& e : failed_) finish(e.id, e.finish, e.message, out);
    failed_.clear();
}

// The draw from the last row of an item: the task's parameters, edits and random numbers. False: the host has to draw.
bool Decoder::add_drawing(const Scheduled& item, std::span<const Token> never, SamplingTask& task, SamplingPlan& plan) {
    const SequenceGroup&  group    = *item.group;
    const SamplingParams& p        = group.request.sampling;
    const Sequence&       sequence = *item.sequence;
    const bool            first    = group.n_generated(sequence) == 0;
    task.n_uniforms                = first ? group.request.width() : 1;
    const auto seed                = [&](int i) { return p.seed + std::uint64_t(first ? i : sequence.index); };
    const auto position            = std::uint64_t(group.length(sequence));
    for (int i = 0; i < task.n_uniforms; i++) plan.uniforms.push_back(random_at(seed(i), position));
    const auto mask =
        std::span(plan.masks).subspan(std::size_t(std::max(task.first_mask, 0)), task.first_mask < 0 ? 0 : mask_words_);
    if (const auto token = forced(sequence, mask)) {
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

Output& Decoder::partial_of(RequestId id) {
    auto at = std::ranges::find_if(partial_, [&](const Output& o) { return o.id == id; });
    if (at != partial_.end()) return *at;
    partial_.emplace_back().id = id;
    return partial_.back();
}

Output Decoder::output_of(const SequenceGroup& group, int index) {
    Output output;
    output.id            = group.id;
    output.index         = index;
    output.prompt_tokens = group.n_prompt();
    output.cached_tokens = group.n_cached;
    output.n_preempted   = group.n_preempted;
    output.first_run     = group.first_run;
    return output;
}

void Decoder::deliver(std::span<const Scheduled> items, const StepResults& results, std::vector<Output>& out) {
    rows_.begin(results);
    const std::size_t first_output = out.size();
    forced_until_                  = now() + step_time_limit;
    for (std::size_t i = 0, n = 0; i < items.size(); i += n) {
        SequenceGroup& group = *items[i].group;
        for (n = 1; i + n < items.size() && items[i + n].group == &group;) n++;
        const std::span<const Scheduled> own = items.subspan(i, n);
        if (!group.prompt_done && group.request.prompt_logprobs >= 0 && !add_prompt_logprobs(own[0])) continue;
        if (!group.prompt_done && group.request.embed && !add_hidden(own[0])) continue;
        if (!group.prompt_done && group.request.return_progress) {
            out.push_back(output_of(group, open_answers(group).front())); // the first may have been cancelled
            out.back().computed_tokens = std::min(own[0].first + own[0].n_tokens, group.n_prompt());
        }
        if (!own[0].samples) continue;
        if (!group.prompt_done) end_prompt(own[0], out);
        if (!group.request.generates()) continue;
        if (group.request.constraint && !constrain(own, i)) continue;
        if (group.request.beam_width == 0) {
            sample(own, out);
            continue;
        }
        const BeamSearch::Outcome beams = beam_search_.step(own, end_tokens_, rows_);
        if (beams.unusable) fail(*beams.unusable, beams.unusable->n_logit_rows - 1, "logits");
        else if (beams.over) output_best(group, out);
    }
    remove_done(out, first_output);
    for (const Ended& e : failed_) finish(e.id, e.finish, e.message, out);
    failed_.clear();
}

void Decoder::remove_done(std::vector<Output>& out, std::size_t first) {
    for (std::size_t i = first; i < out.size(); i++)
        if (out[i].done)
            if (auto group = scheduler_.remove_finished(out[i].id)) out[i].sharing = group->sharing;
}

// Row i of an item cannot be used: the item's request ends with this step, other requests go on. Always false.
bool Decoder::fail(const Scheduled& item, int i, std::string_view what) {
    const int position = item.first + item.n_tokens - item.n_logit_rows + i;
    failed_.push_back({item.group->id, FinishReason::failed,
                       cat("the model's ", what, " at position ", position,
                           " are not finite numbers: its file is damaged, or its arithmetic overflows")});
    return false;
}

// Puts the masks on the rows from which the host takes tokens. False: the request failed.
bool Decoder::constrain(std::span<const Scheduled> items, std::size_t first) {
    for (std::size_t i = 0; i < items.size(); i++) {
        const Scheduled& item = items[i];
        const ItemMask&  mask = item_masks_[first + i];
        const int        last = item.n_logit_rows - 1;
        if (!mask.error.empty()) {
            failed_.push_back({item.group->id, FinishReason::unmet, mask.error});
            return false;
        }
        if (!rows_.sampled(item, last).empty()) continue;
        if (!usable(rows_.logits(item, last))) return fail(item, last, "logits");
        rows_.constrain(item, last, std::span(masks_).subspan(std::size_t(mask.at), mask_words_));
    }
    return true;
}

// Each row of a prompt gives the log-probabilities of the token after it. False: the request failed, here and below.
bool Decoder::add_prompt_logprobs(const Scheduled& item) {
    const SequenceGroup& group   = *item.group;
    Output&              partial = partial_of(group.id);
    for (int i = 0; i < item.n_logit_rows; i++) {
        const int next = item.first + i + 1;
        if (next >= group.n_prompt() || int(partial.prompt_logprobs.size()) >= next) continue;
        const int  n_top   = group.request.prompt_logprobs;
        const auto sampled = rows_.sampled(item, i);
        if (sampled.empty() ? !usable(rows_.logits(item, i)) : sampled[0].token < 0) return fail(item, i, "logits");
        if (!sampled.empty()) partial.prompt_logprobs.push_back(logprobs_of(sampled[0], sampled.subspan(1), n_top));
        else
            partial.prompt_logprobs.push_back(
                sampler_.logprobs(rows_.logits(item, i), item.sequence->tokens[std::size_t(next)], n_top));
    }
    return true;
}

// The rows of a preempted prompt come again; each row is added once.
bool Decoder::add_hidden(const Scheduled& item) {
    Output& sum = partial_of(item.group->id);
    for (int i = 0; i < item.n_logit_rows; i++) {
        if (item.first + i != sum.prompt_tokens) continue;
        const std::span<const float> state = rows_.hidden(item, i);
        if (!std::ranges::all_of(state, [](float v) { return std::isfinite(v); }))
            return fail(item, i, "hidden states");
        pooler_.add(state, sum.prompt_tokens, item.group->n_prompt(), sum.embedding);
        sum.prompt_tokens++;
    }
    return true;
}

void Decoder::output_embedding(SequenceGroup& group, std::vector<Output>& out) {
    Output& output   = out.emplace_back(output_of(group, 0));
    output.embedding = std::move(partial_of(group.id).embedding);
    std::erase_if(partial_, [&](const Output& o) { return o.id == group.id; });
    pooler_.finish(output.embedding);
    output.finish = FinishReason::stop;
    output.done   = true;
    scheduler_.free(group, *group.sequences[0], FinishReason::stop);
}

// The prompt is computed: its log-probabilities and logits go out with the first token.
void Decoder::end_prompt(const Scheduled& item, std::vector<Output>& out) {
    SequenceGroup& group = *item.group;
    group.prompt_done    = true;
    if (group.request.return_logits) {
        const std::span<const float> last = rows_.logits(item, item.n_logit_rows - 1);
        partial_of(group.id).prompt_logits.assign(last.begin(), last.end());
    }
    if (group.request.embed) output_embedding(group, out);
    else if (!group.request.pin && !group.request.generates()) output_prompt(group, out);
    if (!group.request.pin) return;
    scheduler_.pin(group);
    Output& output = out.emplace_back(output_of(group, 0));
    output.finish  = FinishReason::stop;
    output.done    = true;
}

// The request generates nothing: the prompt's log-probabilities and logits are the whole output.
void Decoder::output_prompt(SequenceGroup& group, std::vector<Output>& out) {
    const std::vector<int> open = open_answers(group);
    for (int i : open) {
        Output& output = out.emplace_back(output_of(group, i));
        output.finish  = FinishReason::length;
        output.done    = i == open.back();
        attach_prompt(output);
    }
    scheduler_.free(group, *group.sequences[0], FinishReason::length);
}

// The prompt's log-probabilities and logits go out once, with the first answer.
void Decoder::attach_prompt(Output& output) {
    const auto partial = std::ranges::find(partial_, output.id, &Output::id);
    if (partial == partial_.end()) return;
    output.prompt_logprobs = std::move(partial->prompt_logprobs);
    output.prompt_logits   = std::move(partial->prompt_logits);
    partial_.erase(partial);
}

// Appends a token to one answer, and outputs it unless the answers are withheld.
void Decoder::append(SequenceGroup& group, Sequence& s, NextToken next, std::vector<Output>& out, bool forced) {
    const Request& request = group.request;
    const bool     hold    = withheld(request);
    Output         output;
    if (!hold) {
        output = output_of(group, s.index);
        attach_prompt(output);
        output.tokens.push_back(next.token);
    } else {
        s.logprob += next.logprob;
    }
    if (request.sampling.logprobs >= 0) (hold ? s.logprobs : output.logprobs).push_back(std::move(next.logprobs));
    s.mu = next.mu;
    scheduler_.append(s, next.token, forced);
    output.finish = scheduler_.ending(group, s, is_end(next.token));
    if (output.finish != FinishReason::none) {
        scheduler_.free(group, s, output.finish);
        output.done = group.sequences.empty();
    }
    if (!hold) out.push_back(std::move(output));
    else if (group.sequences.empty()) output_best(group, out);
}

// Appends the tokens behind the last one for which the constraint leaves no choice. If the request has other rules for single tokens, or
// wants log-probabilities, these tokens are sampled like all others.
void Decoder::fast_forward(SequenceGroup& group, Sequence& s, std::vector<Output>& out) {
    const bool forces = can_fast_forward(group, s);
    // If the sequence's masks take long, its next mask is made beside the steps from the beginning.
    if (s.constraint && s.finish == FinishReason::none && s.slow_masks) return make_beside(group, s, forces);
    if (forces) force(group, s, out);
}

void Decoder::force(SequenceGroup& group, Sequence& s, std::vector<Output>& out) {
    const auto tokens = s.constraint->forced_tokens({.until = forced_until_});
    if (!tokens) return make_beside(group, s, true);
    for (Token token : *tokens) {
        append(group, s, {.token = token, .mu = s.mu}, out, true);
        if (s.finish != FinishReason::none || !scheduler_.can_force(group, s) || forced(s, {})) return;
    }
}

bool Decoder::can_fast_forward(const SequenceGroup& group, const Sequence& s) const {
    const Request&        r = group.request;
    const SamplingParams& p = r.sampling;
    return s.constraint && scheduler_.n_running() <= force_up_to_ && !withheld(r) && p.logprobs < 0 &&
           p.allowed_tokens.empty() && p.bad_words.empty() && p.logit_bias.empty() && s.finish == FinishReason::none &&
           scheduler_.can_force(group, s) && !forced(s, {});
}

// The tokens that are forbidden now: end tokens, while the answer has fewer than min_tokens.
std::span<const Token> Decoder::banned(const SequenceGroup& group, const Sequence& sequence) {
    const Request& r = group.request;
    if (group.n_generated(sequence) >= r.min_tokens) return {};
    banned_ = end_tokens_;
    banned_.insert(banned_.end(), r.stop_tokens.begin(), r.stop_tokens.end());
    return banned_;
}

// The next token of one answer: the device's best token, a token that the device sampled, or a token from the row on the host.
Decoder::NextToken Decoder::next_token(SequenceGroup& group, const Scheduled& item, int stream, int draw) {
    const Request&               r    = group.request;
    const int                    last = item.n_logit_rows - 1;
    NextToken                    next;
    const std::span<const Token> never = banned(group, *item.sequence);
    const std::optional<Token>   best  = rows_.best(item, last);
    const Sequence&              s     = *item.sequence;
    next.mu                            = s.mu;
    if (best && takes_best(r) && never.empty() && !forced(s, {})) {
        next.token = *best;
    } else if (const auto sampled = rows_.sampled(item, last); !sampled.empty()) {
        const TokenLogprob own   = sampled[std::size_t(draw)];
        next.token               = own.token;
        next.logprob             = double(own.logprob);
        const SamplingTask& task = rows_.task(item, last);
        if (task.mirostat > 0)
            next.mu =
                next_mu(r.sampling, s.mu, double(sampled[std::size_t(task.n_uniforms + task.n_top + draw)].logprob));
        if (r.sampling.logprobs >= 0)
            next.logprobs = logprobs_of(own, sampled.subspan(std::size_t(task.n_uniforms)), r.sampling.logprobs);
    } else {
        const std::span<const float> logits = rows_.logits(item, last);
        const std::optional<Token>   must   = forced(s, {});
        if (must && std::isfinite(logits[std::size_t(*must)]) && usable(logits)) {
            next.token = *must;
        } else {
            const SamplePoint at{stream, std::uint64_t(group.length(s)), s.mu};
            const Sample      one = sampler_.sample(logits, r.sampling, s.tokens, group.n_generated_left(s), at, never);
            next.token            = one.token;
            next.mu               = one.mu;
        }
        if (next.token < 0) return next;
        if (withheld(r)) next.logprob = sampler_.logprob(logits, next.token);
        if (r.sampling.logprobs >= 0) next.logprobs = sampler_.logprobs(logits, next.token, r.sampling.logprobs);
    }
    // The best tokens do not include tokens that the constraint forbids.
    if (r.constraint)
        std::erase_if(next.logprobs.top,
                      [](const TokenLogprob& t) { return t.logprob == -std::numeric_limits<float>::infinity(); });
    return next;
}

void Decoder::sample(std::span<const Scheduled> items, std::vector<Output>& out) {
    SequenceGroup& group = *items[0].group;
    const int      width = group.request.width();
    Sequence&      first = *items[0].sequence;
    if (group.n_generated(first) == 0 && width > 1) {
        // The first token of every answer is sampled from one row, the last row of the prompt.
        next_.clear();
        for (int i = 0; i < width; i++) next_.push_back(next_token(group, items[0], i, i));
        if (std::ranges::any_of(next_, [](const NextToken& t) { return t.token < 0; })) {
            group.prompt_done = false; // the answers have no sequences yet
            return fail_without_token(items[0]);
        }
        answers_.assign(1, &first);
        while (int(answers_.size()) < width) answers_.push_back(&scheduler_.fork(group, first));
        // Answers that were cancelled meanwhile end first: the last open answer reports that the request is over.
        const auto dropped = [&](int i) { return !withheld(group.request) && is_cancelled(group, i); };
        for (int i = 0; i < width; i++)
            if (dropped(i)) scheduler_.free(group, *answers_[std::size_t(i)], FinishReason::cancelled);
        for (int i = 0; i < width; i++)
            if (!dropped(i)) append(group, *answers_[std::size_t(i)], std::move(next_[std::size_t(i)]), out);
        return;
    }
    for (const Scheduled& item : items) {
        NextToken next = next_token(group, item, item.sequence->index, 0);
        if (next.token < 0) return fail_without_token(item);
        append(group, *item.sequence, std::move(next), out);
        fast_forward(group, *item.sequence, out);
    }
}

// No token can be sampled: the logits are not usable, or the request forbids every token.
void Decoder::fail_without_token(const Scheduled& item) {
    const int last = item.n_logit_rows - 1;
    if (!item.sequence->constraint && !usable(rows_.logits(item, last))) return (void)fail(item, last, "logits");
    failed_.push_back({item.group->id, FinishReason::unmet,
                       cat("no token can follow position ", item.first + item.n_tokens - 1, ": the request's ",
                           item.sequence->constraint ? "constraint, " : "",
                           "allowed tokens, bad words, biases and min_tokens leave none")});
}

// Outputs the n best of all answers, including answers that did not come to an end.
void Decoder::output_best(SequenceGroup& group, std::vector<Output>& out) {
    const Request& r = group.request;
    while (!group.sequences.empty()) scheduler_.free(group, *group.sequences.back(), FinishReason::length);
    std::stable_sort(group.finished.begin(), group.finished.end(), [&](const auto& a, const auto& b) {
        const double sa = score_of(r, a->logprob, group.n_generated(*a)),
                     sb = score_of(r, b->logprob, group.n_generated(*b));
        return sa != sb ? sa > sb : a->index < b->index;
    });
    const std::vector<int> open = open_answers(group);
    for (int i : open) {
        Output& output = out.emplace_back(output_of(group, i));
        output.finish  = FinishReason::length; // there may be fewer beams than answers wanted
        output.done    = i == open.back();
        output.sharing = group.sharing;
        attach_prompt(output);
        if (i >= int(group.finished.size())) continue;
        Sequence& s = *group.finished[std::size_t(i)];
        output.tokens.assign(s.tokens.begin() + group.n_prompt(), s.tokens.end());
        output.logprobs = std::move(s.logprobs);
        output.finish   = s.finish;
        output.logprob  = s.logprob;
        output.score    = score_of(r, s.logprob, group.n_generated(s));
    }
}

void Decoder::cancel_answer(RequestId id, int index, std::vector<Output>& out) {
    SequenceGroup* group = scheduler_.find(id);
    if (!group) return;
    const std::vector<int> open = open_answers(*group);
    if (std::ranges::find(open, index) == open.end()) return; // the answer has ended before
    if (open.size() == 1) return finish(id, FinishReason::cancelled, "", out);
    Output& output = out.emplace_back(output_of(*group, index));
    output.finish  = FinishReason::cancelled;
    const auto at  = std::ranges::find_if(group->sequences, [&](const auto& s) { return s->index == index; });
    if (!group->prompt_done || withheld(group->request)) group->cancelled.push_back(index);
    else scheduler_.free(*group, **at, FinishReason::cancelled);
}

void Decoder::finish(RequestId id, FinishReason reason, const std::string& message, std::vector<Output>& out) {
    std::unique_ptr<SequenceGroup> group = scheduler_.remove(id);
    if (!group) return; // ended before
    const bool was_pinned = group->request.pin && group->prompt_done;
    if (was_pinned) return; // the last output went out when the pin was ready
    if (withheld(group->request) && reason == FinishReason::length && group->prompt_done) {
        // The request outgrew the pool: its answers go out as far as they came.
        for (auto& s : group->sequences) {
            s->finish = reason;
            group->finished.push_back(std::move(s));
        }
        group->sequences.clear();
        output_best(*group, out);
        return;
    }
    std::erase_if(partial_, [&](const Output& o) { return o.id == id; });
    const std::vector<int> open = open_answers(*group);
    for (int i : open) {
        Output& output = out.emplace_back(output_of(*group, i));
        output.finish  = reason;
        output.message = message;
        output.done    = i == open.back();
        output.sharing = group->sharing;
    }
}

} // namespace quire
