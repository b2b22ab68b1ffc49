// quire.decode.decoder: turns a step's logits into tokens: greedy and sampled answers, n and best_of, beam search, built from the
// scheduler's fork, append and free (the paper, section 5.2). **Owns** the sampler and the events that are not complete yet.
export module quire.decode.decoder;

import quire.core.base;
import quire.schedule.request;
import quire.schedule.step_plan;
import quire.decode.sampler;
import quire.schedule.scheduler;
import quire.core.std;
import quire.text.tokenizer;

export namespace quire {

class Decoder {
public:
    Decoder(Scheduler& scheduler, const Tokenizer& tokenizer, int vocab_size);

    // Before the step: the sampling tasks of a device that samples. What exceeds its limits is left to deliver().
    void plan_sampling(std::span<const Scheduled> items, const SamplingLimits& limits, StepPlan& plan);
    // The step has run and is committed: `items` are what it scheduled, `results` what it brought. Appends events;
    // requests that are over leave the scheduler, so that their blocks serve the next step.
    void deliver(std::span<const Scheduled> items, const StepResults& results, std::vector<Output>& out);
    // Ends a request in whatever state it is; its events say `reason`. Nothing happens when it is not there (any more).
    void finish(RequestId id, FinishReason reason, const std::string& message, std::vector<Output>& out);
    // Ends one of several answers, whether it has begun or not; the others go on. The last one takes its request along.
    void cancel_answer(RequestId id, int index, std::vector<Output>& out);

private:
    // A token for an answer, with what is said about it.
    struct Choice {
        Token            token   = 0;
        double           logprob = 0; // where answers are ranked by it
        PositionLogprobs logprobs;    // where it was asked for
    };
    std::span<const float>        row(const Scheduled& item, int i);
    std::span<const TokenLogprob> answer(const Scheduled& item, int i) const; // the device's for that row, or nothing
    Choice                        choose(SequenceGroup& group, const Scheduled& item, int stream, int draw);
    bool                          prompt_rows(const Scheduled& item);
    bool                          add_hidden(const Scheduled& item);
    bool                          fail(const Scheduled& item, int i, std::string_view what);
    void                          give_embedding(SequenceGroup& group, std::vector<Output>& out);
    void                          no_token(const Scheduled& item);
    std::span<const Token>        banned(const SequenceGroup& group, const Sequence& sequence);
    void                          begin(const Scheduled& item, std::vector<Output>& out);
    void                          sample(std::span<const Scheduled> items, std::vector<Output>& out);
    void                          search(std::span<const Scheduled> items, std::vector<Output>& out);
    bool                          search_is_over(const SequenceGroup& group) const;
    void                          give_best(SequenceGroup& group, std::vector<Output>& out);
    void                          give_prompt(SequenceGroup& group, std::vector<Output>& out);
    void    give(SequenceGroup& group, Sequence& sequence, Choice choice, std::vector<Output>& out);
    void    tell_prompt(Output& event);
    Output  event_of(const SequenceGroup& group, int index);
    Output& partial_of(RequestId id);

    Scheduler&                 scheduler_;
    const Tokenizer&           tokenizer_;
    Sampler                    sampler_;
    std::size_t                vocab_;
    const StepResults*         step_ = nullptr;
    std::span<const float>     logits_;     // of the step, once a row was wanted
    std::vector<SamplingTask>  tasks_;      // of the step, by logit row; row -1: none
    std::vector<Output>        partial_;    // prompt log-probabilities of requests whose prompt is not through
    std::vector<BeamCandidate> candidates_; // scratch
    std::vector<Sequence*>     parents_, survivors_;
    std::vector<int>           children_;
    std::vector<Choice>        choices_;
    std::vector<Token>         banned_;
    std::vector<Token>         ends_;   // every end token of the vocabulary
    std::vector<Ended>         failed_; // by this step
};

// What answers are ranked by. Of beams: the summed log-probability over a power of their length, as in `transformers`;
// of samples: the mean log-probability, as in OpenAI's best_of. Lengths count generated tokens, an end token included.
double score_of(const Request& request, double logprob, int n_generated);

} // namespace quire

module :private;

namespace quire {

double score_of(const Request& request, double logprob, int n_generated) {
    const double length = std::max(n_generated, 1);
    return logprob / (request.beam_width > 0 ? std::pow(length, double(request.length_penalty)) : length);
}

// Answers that are compared with one another are given when all are there.
bool withheld(const Request& request) { return request.beam_width > 0 || request.best_of > request.n; }

bool is_cancelled(const SequenceGroup& group, int answer) {
    return std::ranges::find(group.cancelled, answer) != group.cancelled.end();
}

// The answers that are not over.
std::vector<int> open_results(const SequenceGroup& group) {
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
bool takes_best(const Request& r) { return is_plain_greedy(r.sampling) && r.sampling.logprobs < 0 && !withheld(r); }

// The chosen token and the best ones, from a device's answer.
PositionLogprobs logprobs_of(TokenLogprob chosen, std::span<const TokenLogprob> top, int n_top) {
    PositionLogprobs result;
    result.chosen = chosen;
    const auto n  = std::min(top.size(), std::size_t(std::max(n_top, 0)));
    result.top.assign(top.begin(), top.begin() + std::ptrdiff_t(n));
    return result;
}

Decoder::Decoder(Scheduler& scheduler, const Tokenizer& tokenizer, int vocab_size)
    : scheduler_(scheduler), tokenizer_(tokenizer), sampler_(vocab_size), vocab_(std::size_t(vocab_size)) {
    for (Token id = 0; id < std::min(vocab_size, tokenizer.vocab_size()); id++)
        if (tokenizer.is_end(id)) ends_.push_back(id);
}

std::span<const float> Decoder::row(const Scheduled& item, int i) {
    if (logits_.empty()) logits_ = step_->rows();
    return logits_.subspan(std::size_t(item.first_logit_row + i) * vocab_, vocab_);
}

std::span<const TokenLogprob> Decoder::answer(const Scheduled& item, int i) const {
    const auto at = std::size_t(item.first_logit_row) + std::size_t(i);
    if (step_->sampled.empty() || at >= tasks_.size() || tasks_[at].row < 0) return {};
    return step_->sampled.subspan(std::size_t(tasks_[at].first_result), std::size_t(tasks_[at].n_results()));
}

void Decoder::plan_sampling(std::span<const Scheduled> items, const SamplingLimits& limits, StepPlan& plan) {
    tasks_.clear();
    if (limits.tasks == 0) return;
    tasks_.resize(plan.logit_rows.size(), SamplingTask{.row = -1});
    SamplingPlan& sampling  = plan.sampling;
    int           n_results = 0;
    // A task that the device has no room for is not asked for.
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
        tasks_[std::size_t(task.row)] = task;
    };
    const auto task_of = [&](int row) {
        return SamplingTask{
            .row = row, .first_edit = int(sampling.edits.size()), .first_uniform = int(sampling.uniforms.size())};
    };
    for (const Scheduled& item : items) {
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
        if (!item.samples || !r.generates() || (!group.prompt_done && r.return_logits)) continue;
        const std::span<const Token> never = banned(group, sequence);
        if (takes_best(r) && never.empty()) continue;
        SamplingTask task = task_of(item.first_logit_row + item.n_logit_rows - 1);
        task.n_top        = std::max(p.logprobs, r.beam_width > 0 ? 2 * r.beam_width : 0);
        task.logprobs     = p.logprobs >= 0 || withheld(r);
        if (r.beam_width == 0) {
            const bool first = group.n_generated(sequence) == 0;
            task.n_uniforms  = first ? r.width() : 1;
            task.temperature = p.temperature;
            task.top_k       = p.top_k;
            task.top_p       = p.top_p;
            task.min_p       = p.min_p;
            task.only_edited = !p.allowed_tokens.empty();
            sampler_.list_edits(p, sequence.tokens, group.n_generated(sequence), never, sampling.edits);
            for (int i = 0; i < task.n_uniforms; i++)
                sampling.uniforms.push_back(
                    random_at(p.seed + std::uint64_t(first ? i : sequence.index), sequence.tokens.size()));
        }
        add(task);
    }
}

Output& Decoder::partial_of(RequestId id) {
    auto at = std::ranges::find_if(partial_, [&](const Output& o) { return o.id == id; });
    if (at != partial_.end()) return *at;
    partial_.emplace_back().id = id;
    return partial_.back();
}

Output Decoder::event_of(const SequenceGroup& group, int index) {
    Output event;
    event.id            = group.id;
    event.index         = index;
    event.prompt_tokens = group.n_prompt();
    event.cached_tokens = group.n_cached;
    event.n_preempted   = group.n_preempted;
    event.first_run     = group.first_run;
    return event;
}

void Decoder::deliver(std::span<const Scheduled> items, const StepResults& results, std::vector<Output>& out) {
    step_                         = &results;
    logits_                       = {};
    const std::size_t first_event = out.size();
    for (std::size_t i = 0, n = 0; i < items.size(); i += n) {
        SequenceGroup& group = *items[i].group;
        for (n = 1; i + n < items.size() && items[i + n].group == &group;) n++;
        const std::span<const Scheduled> own = items.subspan(i, n);
        if (!group.prompt_done && group.request.prompt_logprobs >= 0 && !prompt_rows(own[0])) continue;
        if (!group.prompt_done && group.request.embed && !add_hidden(own[0])) continue;
        if (!own[0].samples) continue;
        if (!group.prompt_done) begin(own[0], out);
        if (!group.request.generates()) continue;
        if (group.request.beam_width > 0) search(own, out);
        else sample(own, out);
    }
    for (std::size_t i = first_event; i < out.size(); i++)
        if (out[i].done)
            if (auto group = scheduler_.remove_finished(out[i].id)) out[i].sharing = group->sharing;
    for (const Ended& e : failed_) finish(e.id, e.finish, e.message, out);
    failed_.clear();
}

// Row i of an item cannot be used: its request ends with this step, the others go on. Always false.
bool Decoder::fail(const Scheduled& item, int i, std::string_view what) {
    const int position = item.first + item.n_tokens - item.n_logit_rows + i;
    failed_.push_back({item.group->id, FinishReason::failed,
                       cat("the model's ", what, " at position ", position,
                           " are not finite numbers: its file is damaged, or its arithmetic overflows")});
    return false;
}

// The rows of a prompt speak about the tokens after them. False: the request failed, here and below.
bool Decoder::prompt_rows(const Scheduled& item) {
    const SequenceGroup& group = *item.group;
    Output&              event = partial_of(group.id);
    for (int i = 0; i < item.n_logit_rows; i++) {
        const int next = item.first + i + 1;
        if (next >= group.n_prompt() || int(event.prompt_logprobs.size()) >= next) continue;
        const int  n_top = group.request.prompt_logprobs;
        const auto told  = answer(item, i);
        if (told.empty() ? !usable(row(item, i)) : told[0].token < 0) return fail(item, i, "logits");
        if (!told.empty()) event.prompt_logprobs.push_back(logprobs_of(told[0], told.subspan(1), n_top));
        else
            event.prompt_logprobs.push_back(
                sampler_.logprobs(row(item, i), item.sequence->tokens[std::size_t(next)], n_top));
    }
    return true;
}

// Rows of a prompt that was preempted come again; each is added once.
bool Decoder::add_hidden(const Scheduled& item) {
    Output& sum = partial_of(item.group->id);
    for (int i = 0; i < item.n_logit_rows; i++) {
        if (item.first + i != sum.prompt_tokens) continue;
        const std::span<const float> state = step_->hidden(item.first_logit_row + i);
        if (!std::ranges::all_of(state, [](float v) { return std::isfinite(v); }))
            return fail(item, i, "hidden states");
        sum.embedding.resize(state.size());
        for (std::size_t j = 0; j < state.size(); j++) sum.embedding[j] += state[j];
        sum.prompt_tokens++;
    }
    return true;
}

// The mean has the direction of the sum, and only that counts.
void Decoder::give_embedding(SequenceGroup& group, std::vector<Output>& out) {
    Output& event   = out.emplace_back(event_of(group, 0));
    event.embedding = std::move(partial_of(group.id).embedding);
    std::erase_if(partial_, [&](const Output& o) { return o.id == group.id; });
    double squares = 0;
    for (float v : event.embedding) squares += double(v) * double(v);
    const double length = std::sqrt(squares);
    if (length > 0)
        for (float& v : event.embedding) v = float(double(v) / length);
    event.finish = FinishReason::stop;
    event.done   = true;
    scheduler_.free(group, *group.sequences[0], FinishReason::stop);
}

// The prompt is through: what was asked for about it goes out with the first token.
void Decoder::begin(const Scheduled& item, std::vector<Output>& out) {
    SequenceGroup& group = *item.group;
    group.prompt_done    = true;
    if (group.request.return_logits) {
        const std::span<const float> last = row(item, item.n_logit_rows - 1);
        partial_of(group.id).prompt_logits.assign(last.begin(), last.end());
    }
    if (group.request.embed) give_embedding(group, out);
    else if (!group.request.pin && !group.request.generates()) give_prompt(group, out);
    if (!group.request.pin) return;
    scheduler_.pin(group);
    Output& event = out.emplace_back(event_of(group, 0));
    event.finish  = FinishReason::stop;
    event.done    = true;
}

// Nothing is to be generated: what was asked for about the prompt is all.
void Decoder::give_prompt(SequenceGroup& group, std::vector<Output>& out) {
    const std::vector<int> open = open_results(group);
    for (int i : open) {
        Output& event = out.emplace_back(event_of(group, i));
        event.finish  = FinishReason::length;
        event.done    = i == open.back();
        tell_prompt(event);
    }
    scheduler_.free(group, *group.sequences[0], FinishReason::length);
}

// What was asked for about the prompt goes out once, with the first answer.
void Decoder::tell_prompt(Output& event) {
    const auto partial = std::ranges::find(partial_, event.id, &Output::id);
    if (partial == partial_.end()) return;
    event.prompt_logprobs = std::move(partial->prompt_logprobs);
    event.prompt_logits   = std::move(partial->prompt_logits);
    partial_.erase(partial);
}

// Appends a token to one answer, and tells so unless the answers are withheld.
void Decoder::give(SequenceGroup& group, Sequence& s, Choice choice, std::vector<Output>& out) {
    const Request& request = group.request;
    const bool     hold    = withheld(request);
    Output         event;
    if (!hold) {
        event = event_of(group, s.index);
        tell_prompt(event);
        event.tokens.push_back(choice.token);
    } else {
        s.logprob += choice.logprob;
    }
    if (request.sampling.logprobs >= 0) (hold ? s.logprobs : event.logprobs).push_back(std::move(choice.logprobs));
    scheduler_.append(s, choice.token);
    event.finish = scheduler_.ending(group, s, tokenizer_.is_end(choice.token));
    if (event.finish != FinishReason::none) {
        scheduler_.free(group, s, event.finish);
        event.done = group.sequences.empty();
    }
    if (!hold) out.push_back(std::move(event));
    else if (group.sequences.empty()) give_best(group, out);
}

// What cannot come yet: the ends of an answer that has fewer than min_tokens.
std::span<const Token> Decoder::banned(const SequenceGroup& group, const Sequence& sequence) {
    const Request& r = group.request;
    if (group.n_generated(sequence) >= r.min_tokens) return {};
    banned_ = ends_;
    banned_.insert(banned_.end(), r.stop_tokens.begin(), r.stop_tokens.end());
    return banned_;
}

// The next token of one answer: by the device's choice, its draw, or from the row. -1: there is none.
Decoder::Choice Decoder::choose(SequenceGroup& group, const Scheduled& item, int stream, int draw) {
    const Request&               r    = group.request;
    const int                    last = item.n_logit_rows - 1;
    Choice                       choice;
    const std::span<const Token> never = banned(group, *item.sequence);
    if (!step_->best.empty() && takes_best(r) && never.empty()) {
        choice.token = step_->best[std::size_t(item.first_logit_row) + std::size_t(last)];
    } else if (const auto told = answer(item, last); !told.empty()) {
        const int n_uniforms = tasks_[std::size_t(item.first_logit_row) + std::size_t(last)].n_uniforms;
        choice.token         = told[std::size_t(draw)].token;
        choice.logprob       = double(told[std::size_t(draw)].logprob);
        if (r.sampling.logprobs >= 0)
            choice.logprobs =
                logprobs_of(told[std::size_t(draw)], told.subspan(std::size_t(n_uniforms)), r.sampling.logprobs);
    } else {
        const std::span<const float> logits = row(item, last);
        const Sequence&              s      = *item.sequence;
        choice.token = sampler_.sample(logits, r.sampling, s.tokens, group.n_generated(s), stream, never);
        if (choice.token < 0) return choice;
        if (withheld(r)) choice.logprob = sampler_.logprob(logits, choice.token);
        if (r.sampling.logprobs >= 0) choice.logprobs = sampler_.logprobs(logits, choice.token, r.sampling.logprobs);
    }
    return choice;
}

void Decoder::sample(std::span<const Scheduled> items, std::vector<Output>& out) {
    SequenceGroup& group = *items[0].group;
    const int      width = group.request.width();
    Sequence&      first = *items[0].sequence;
    if (group.n_generated(first) == 0 && width > 1) {
        // One row, the prompt's last: every answer draws its first token from it and goes its own way.
        choices_.clear();
        for (int i = 0; i < width; i++) choices_.push_back(choose(group, items[0], i, i));
        if (std::ranges::any_of(choices_, [](const Choice& c) { return c.token < 0; })) {
            group.prompt_done = false; // there is no sequence for each answer
            return no_token(items[0]);
        }
        parents_.assign(1, &first);
        while (int(parents_.size()) < width) parents_.push_back(&scheduler_.fork(group, first));
        // What was cancelled meanwhile ends first: who is last says that the request is over.
        const auto dropped = [&](int i) { return !withheld(group.request) && is_cancelled(group, i); };
        for (int i = 0; i < width; i++)
            if (dropped(i)) scheduler_.free(group, *parents_[std::size_t(i)], FinishReason::cancelled);
        for (int i = 0; i < width; i++)
            if (!dropped(i)) give(group, *parents_[std::size_t(i)], std::move(choices_[std::size_t(i)]), out);
        return;
    }
    for (const Scheduled& item : items) {
        Choice choice = choose(group, item, item.sequence->index, 0);
        if (choice.token < 0) return no_token(item);
        give(group, *item.sequence, std::move(choice), out);
    }
}

// Nothing can be drawn: for the model's fault, or the request's.
void Decoder::no_token(const Scheduled& item) {
    const int last = item.n_logit_rows - 1;
    if (!usable(row(item, last))) return (void)fail(item, last, "logits");
    failed_.push_back({item.group->id, FinishReason::failed,
                       cat("no token can follow position ", item.first + item.n_tokens - 1,
                           ": the request's allowed tokens, bad words, biases and min_tokens leave none")});
}

// One step of beam search: of all extensions of all beams by all tokens the best go on. Twice as many are looked at, for
// those that end; an end among the first beam_width becomes an answer, a worse one is dropped.
void Decoder::search(std::span<const Scheduled> items, std::vector<Output>& out) {
    SequenceGroup& group = *items[0].group;
    const Request& r     = group.request;
    const auto     width = std::size_t(r.beam_width);
    const auto     last  = [&](int beam) {
        return row(items[std::size_t(beam)], items[std::size_t(beam)].n_logit_rows - 1);
    };
    const auto best_of = [&](int beam) { // a device's answer, the most likely tokens
        return answer(items[std::size_t(beam)], items[std::size_t(beam)].n_logit_rows - 1);
    };
    const auto extend = [&](Sequence& s, const BeamCandidate& c) {
        if (const auto told = best_of(c.beam); r.sampling.logprobs >= 0 && !told.empty()) {
            const auto own = std::ranges::find(told, c.token, &TokenLogprob::token);
            s.logprobs.push_back(logprobs_of(*own, told, r.sampling.logprobs));
        } else if (r.sampling.logprobs >= 0) {
            s.logprobs.push_back(sampler_.logprobs(last(c.beam), c.token, r.sampling.logprobs));
        }
        s.logprob = c.logprob;
        scheduler_.append(s, c.token);
    };
    for (std::size_t i = 0; i < items.size(); i++)
        if (const auto told = best_of(int(i)); told.empty() ? !usable(last(int(i))) : told[0].token < 0)
            return (void)fail(items[i], items[i].n_logit_rows - 1, "logits");
    parents_.clear();
    candidates_.clear();
    for (std::size_t i = 0; i < items.size(); i++) {
        parents_.push_back(items[i].sequence);
        const double so_far = items[i].sequence->logprob;
        if (const auto told = best_of(int(i)); !told.empty())
            for (const TokenLogprob& t : told.first(std::min(told.size(), 2 * width)))
                offer(candidates_, 2 * r.beam_width, {so_far + double(t.logprob), int(i), t.token});
        else sampler_.extend_beam(last(int(i)), int(i), so_far, 2 * r.beam_width, candidates_);
    }
    std::sort_heap(candidates_.begin(), candidates_.end());

    // Ends first, while their parents are there; then the candidates that go on.
    std::size_t kept = 0;
    for (std::size_t rank = 0; rank < candidates_.size() && kept < width; rank++) {
        const BeamCandidate c   = candidates_[rank];
        const bool          end = (tokenizer_.is_end(c.token) && !r.ignore_end) ||
                         std::ranges::find(r.stop_tokens, c.token) != r.stop_tokens.end();
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

    // Beams without a child give their blocks back before any other takes new ones; of those with several, the first child
    // goes on in the parent's place and the others fork it.
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
    // The order of the beams is that of their scores; ties of the next step are decided by it.
    for (std::size_t i = 0; i < survivors_.size(); i++) {
        auto at = std::find_if(group.sequences.begin(), group.sequences.end(),
                               [&](const auto& s) { return s.get() == survivors_[i]; });
        std::swap(*at, group.sequences[i]);
        survivors_[i]->index = int(i);
    }
    const bool full =
        group.sequences.empty() || scheduler_.ending(group, *group.sequences[0], false) == FinishReason::length;
    if (full || search_is_over(group)) give_best(group, out);
}

// Whether no beam that goes on can still get among the best: the rules of `transformers` for early_stopping.
bool Decoder::search_is_over(const SequenceGroup& group) const {
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

// The n best of all answers, those that did not come to an end included.
void Decoder::give_best(SequenceGroup& group, std::vector<Output>& out) {
    const Request& r = group.request;
    while (!group.sequences.empty()) scheduler_.free(group, *group.sequences.back(), FinishReason::length);
    std::stable_sort(group.finished.begin(), group.finished.end(), [&](const auto& a, const auto& b) {
        const double sa = score_of(r, a->logprob, group.n_generated(*a)),
                     sb = score_of(r, b->logprob, group.n_generated(*b));
        return sa != sb ? sa > sb : a->index < b->index;
    });
    const std::vector<int> open = open_results(group);
    for (int i : open) {
        Output& event = out.emplace_back(event_of(group, i));
        event.finish  = FinishReason::length; // there may be fewer beams than answers wanted
        event.done    = i == open.back();
        event.sharing = group.sharing;
        tell_prompt(event);
        if (i >= int(group.finished.size())) continue;
        Sequence& s = *group.finished[std::size_t(i)];
        event.tokens.assign(s.tokens.begin() + group.n_prompt(), s.tokens.end());
        event.logprobs = std::move(s.logprobs);
        event.finish   = s.finish;
        event.logprob  = s.logprob;
        event.score    = score_of(r, s.logprob, group.n_generated(s));
    }
}

void Decoder::cancel_answer(RequestId id, int index, std::vector<Output>& out) {
    SequenceGroup* group = scheduler_.find(id);
    if (!group) return;
    const std::vector<int> open = open_results(*group);
    if (std::ranges::find(open, index) == open.end()) return; // ended before: nobody goes along with it
    if (open.size() == 1) return finish(id, FinishReason::cancelled, "", out);
    Output& event = out.emplace_back(event_of(*group, index));
    event.finish  = FinishReason::cancelled;
    const auto at = std::ranges::find_if(group->sequences, [&](const auto& s) { return s->index == index; });
    if (!group->prompt_done || withheld(group->request)) group->cancelled.push_back(index);
    else scheduler_.free(*group, **at, FinishReason::cancelled);
}

void Decoder::finish(RequestId id, FinishReason reason, const std::string& message, std::vector<Output>& out) {
    std::unique_ptr<SequenceGroup> group = scheduler_.remove(id);
    if (!group) return; // ended before
    const bool was_pinned = group->request.pin && group->prompt_done;
    if (was_pinned) return; // its last event went out when it was ready
    if (withheld(group->request) && reason == FinishReason::length && group->prompt_done) {
        // It outgrew the pool: its answers as far as they came.
        for (auto& s : group->sequences) {
            s->finish = reason;
            group->finished.push_back(std::move(s));
        }
        group->sequences.clear();
        give_best(*group, out);
        return;
    }
    std::erase_if(partial_, [&](const Output& o) { return o.id == id; });
    const std::vector<int> open = open_results(*group);
    for (int i : open) {
        Output& event = out.emplace_back(event_of(*group, i));
        event.finish  = reason;
        event.message = message;
        event.done    = i == open.back();
        event.sharing = group->sharing;
    }
}

} // namespace quire
