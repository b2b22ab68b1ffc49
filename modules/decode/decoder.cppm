// quire.decode.decoder: a step's results → tokens and outputs: greedy and sampled answers, n and best_of, beam search, built from
// the scheduler's fork, append and free (the paper, section 5.2). **Owns** the sampler, the masks of the step and the outputs that are not
// complete yet.
export module quire.decode.decoder;

import quire.core.base;
import quire.decode.beam_search;
import quire.decode.drafting;
import quire.decode.outputs;
import quire.decode.pooling;
import quire.decode.sampler;
import quire.decode.step_masks;
import quire.decode.step_rows;
import quire.decode.step_sampling;
import quire.schedule.scheduler;

export namespace quire {

class Decoder {
public:
    // `end_tokens`: generation ends with one of these. Where a constraint allows only one continuation, its tokens are appended without being
    // sampled, while at most `force_up_to` requests run. `clock`: measures the time limits of masks; none: the machine's.
    Decoder(Scheduler& scheduler, std::vector<Token> end_tokens, int vocab_size, Pooler pooler, int force_up_to = 0,
            StepMasks::Clock clock = {});
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
    bool waits() const { return masks_.waits(); }
    // Waits until one of these masks is made, at most `seconds`.
    void wait(double seconds) { masks_.wait(seconds); }
    // Appends to `guess` at most n tokens that have to come next in the text of a sequence, but would be sampled as all others are.
    void guess_forced(const SequenceGroup& group, Sequence& sequence, int n, std::vector<Token>& guess) const;
    // Ends a request, whatever its state; its outputs have `reason`. Does nothing if the request does not exist (any more).
    void finish(RequestId id, FinishReason reason, const std::string& message, std::vector<Output>& out);
    // Ends one of several answers, whether it has begun or not; the others go on. With the last one its request ends.
    void cancel_answer(RequestId id, int index, std::vector<Output>& out);

private:
    bool fail(const Scheduled& item, int i, std::string_view what);
    void fail_without_token(const Scheduled& item, int row);
    bool constrain(const Scheduled& item, int row);
    void sample_next(std::span<const Scheduled> items, std::vector<Output>& out);
    void end_failed(std::vector<Output>& out);
    bool constrain(std::span<const Scheduled> items, std::size_t first);
    bool is_end(Token token) const { return std::ranges::find(end_tokens_, token) != end_tokens_.end(); }
    bool add_prompt(const Scheduled& item, std::vector<Output>& out);
    void end_prompt(const Scheduled& item, std::vector<Output>& out);
    void sample(std::span<const Scheduled> items, std::vector<Output>& out);
    void append(SequenceGroup& group, Sequence& sequence, NextToken next, std::vector<Output>& out,
                bool forced = false);
    void fast_forward(SequenceGroup& group, Sequence& sequence, std::vector<Output>& out);
    void force(SequenceGroup& group, Sequence& sequence, std::vector<Output>& out);
    bool can_fast_forward(const SequenceGroup& group, const Sequence& sequence) const;
    void remove_done(std::vector<Output>& out, std::size_t first);

    Scheduler&                    scheduler_;
    int                           force_up_to_;
    std::vector<Token>            end_tokens_;
    Sampler                       sampler_;
    BeamSearch                    beam_search_;
    StepRows                      rows_;
    StepMasks                     masks_;
    StepSampling                  sampling_;
    Outputs                       outputs_;
    std::vector<Sequence*>        answers_; // scratch, and the next two
    std::vector<NextToken>        next_;
    std::vector<StepMasks::Ready> ready_;
    std::vector<Ended>            failed_; // by this step
};

} // namespace quire

module :private;

namespace quire {

// The tokens of a vocabulary.
std::vector<Token> known(std::vector<Token> tokens, int vocab_size) {
    std::erase_if(tokens, [&](Token id) { return id >= vocab_size; });
    return tokens;
}

Decoder::Decoder(Scheduler& scheduler, std::vector<Token> end_tokens, int vocab_size, Pooler pooler, int force_up_to,
                 StepMasks::Clock clock)
    : scheduler_(scheduler), force_up_to_(force_up_to), end_tokens_(known(std::move(end_tokens), vocab_size)),
      sampler_(vocab_size), beam_search_(scheduler, sampler_), rows_(vocab_size),
      masks_(scheduler, vocab_size, std::move(clock)), sampling_(sampler_, rows_, end_tokens_),
      outputs_(scheduler, sampler_, rows_, std::move(pooler)) {}

void Decoder::plan_sampling(std::span<const Scheduled> items, const SamplingLimits& limits, StepPlan& plan) {
    rows_.clear_tasks(limits.tasks > 0 ? plan.logit_rows.size() : 0);
    masks_.make(items, limits, plan.sampling);
    sampling_.plan(items, limits, masks_, plan.sampling);
}

void Decoder::resume(std::vector<Output>& out) {
    const std::size_t first_output = out.size();
    masks_.begin_forcing();
    ready_.clear();
    masks_.resume(ready_, failed_);
    for (auto [group, sequence] : ready_) {
        Sequence&         s        = *sequence;
        const std::size_t n_tokens = s.tokens.size();
        force(*group, s, out);
        if (s.slow_masks && s.finish == FinishReason::none && !s.waits && s.tokens.size() > n_tokens)
            masks_.make_beside(*group, s, false);
    }
    remove_done(out, first_output);
    end_failed(out);
}

void Decoder::end_failed(std::vector<Output>& out) {
    for (const Ended& e : failed_) finish(e.id, e.finish, e.message, out);
    failed_.clear();
}

void Decoder::deliver(std::span<const Scheduled> items, const StepResults& results, std::vector<Output>& out) {
    rows_.begin(results);
    const std::size_t first_output = out.size();
    masks_.begin_forcing();
    for (std::size_t i = 0, n = 0; i < items.size(); i += n) {
        SequenceGroup& group = *items[i].group;
        for (n = 1; i + n < items.size() && items[i + n].group == &group;) n++;
        const std::span<const Scheduled> own = items.subspan(i, n);
        if (!group.prompt_done && !add_prompt(own[0], out)) continue;
        if (!own[0].samples) continue;
        if (!group.prompt_done) end_prompt(own[0], out);
        if (!group.request.generates()) continue;
        if (group.request.constraint && !constrain(own, i)) {
            if (group.n_generated(*own[0].sequence) == 0)
                group.prompt_done = false; // the answers have no sequences yet
            continue;
        }
        if (group.request.beam_width == 0) {
            sample(own, out);
            continue;
        }
        const BeamSearch::Outcome beams = beam_search_.step(own, end_tokens_, rows_);
        if (beams.unusable) fail(*beams.unusable, beams.unusable->n_logit_rows - 1, "logits");
        else if (beams.over) outputs_.best(group, out);
    }
    remove_done(out, first_output);
    end_failed(out);
}

void Decoder::remove_done(std::vector<Output>& out, std::size_t first) {
    for (std::size_t i = first; i < out.size(); i++)
        if (out[i].done)
            if (auto group = scheduler_.remove_finished(out[i].id)) out[i].sharing = group->sharing;
}

// Row i of an item cannot be used: the item's request ends with this step, other requests go on. Always false.
bool Decoder::fail(const Scheduled& item, int i, std::string_view what) {
    const int position = item.first + item.n_tokens - item.n_logit_rows + i;
    failed_.push_back(
        {item.group->id, FinishReason::failed,
         cat("the model's ", what, " at position ", position, " are not finite numbers: its file",
             item.group->request.adapters.value_or(std::vector<AdapterUse>()).empty() ? ""
                                                                                      : " or that of an adapter in use",
             " is damaged, or its arithmetic overflows")});
    return false;
}

// Puts the masks on the rows from which the host takes tokens. False: the request failed.
bool Decoder::constrain(std::span<const Scheduled> items, std::size_t first) {
    for (std::size_t i = 0; i < items.size(); i++) {
        const Scheduled&   item  = items[i];
        const std::string& error = masks_.error(first + i);
        const int          row   = item.next_row();
        if (!error.empty()) {
            failed_.push_back({item.group->id, FinishReason::unmet, error});
            return false;
        }
        if (!rows_.sampled(item, row).empty()) continue;
        if (!usable(rows_.logits(item, row))) return fail(item, row, "logits");
        rows_.constrain(item, row, masks_.bits(first + i));
    }
    return true;
}

// Puts the mask on the row behind a draft token that was right. False: the row gives no token, because its mask takes long and the sequence waits
// for it, or because the request failed.
bool Decoder::constrain(const Scheduled& item, int row) {
    Sequence& s = *item.sequence;
    if (!usable(rows_.logits(item, row))) return fail(item, row, "logits");
    const Result<std::span<const std::uint64_t>> bits = masks_.next_bits(s);
    if (!bits) failed_.push_back({item.group->id, FinishReason::unmet, bits.error().message});
    else if (bits->empty()) masks_.make_beside(*item.group, s, false);
    else rows_.constrain(item, row, *bits);
    return bits && !bits->empty();
}

// Adds the results of a prompt from the rows of an item. False: the request failed.
bool Decoder::add_prompt(const Scheduled& item, std::vector<Output>& out) {
    const Request& r = item.group->request;
    if (r.prompt_logprobs >= 0)
        if (const auto row = outputs_.add_logprobs(item)) return fail(item, *row, "logits");
    if (r.embed)
        if (const auto row = outputs_.add_hidden(item)) return fail(item, *row, "hidden states");
    if (r.return_progress) outputs_.progress(item, out);
    return true;
}

// The prompt is computed: its log-probabilities and logits go out with the first token.
void Decoder::end_prompt(const Scheduled& item, std::vector<Output>& out) {
    SequenceGroup& group = *item.group;
    group.prompt_done    = true;
    if (group.request.return_logits) outputs_.add_logits(item);
    if (group.request.embed) return outputs_.embedding(group, out);
    if (!group.request.pin && !group.request.generates()) return outputs_.prompt(group, out);
    if (!group.request.pin) return;
    scheduler_.pin(group);
    outputs_.pinned(group, out);
}

// Appends a token to one answer, and outputs it unless the answers are withheld.
void Decoder::append(SequenceGroup& group, Sequence& s, NextToken next, std::vector<Output>& out, bool forced) {
    const Request& request = group.request;
    const bool     later   = withheld(request);
    Output         output;
    if (!later) {
        output = outputs_.next(group, s.index);
        output.tokens.push_back(next.token);
    } else {
        s.logprob += next.logprob;
    }
    if (request.sampling.logprobs >= 0) (later ? s.logprobs : output.logprobs).push_back(std::move(next.logprobs));
    s.mu = next.mu;
    scheduler_.append(s, next.token, forced);
    output.finish = scheduler_.ending(group, s, is_end(next.token));
    if (output.finish != FinishReason::none) {
        scheduler_.free(group, s, output.finish);
        output.done = group.sequences.empty();
    }
    if (!later) out.push_back(std::move(output));
    else if (group.sequences.empty()) outputs_.best(group, out);
}

// Appends the tokens behind the last one for which the constraint leaves no choice. If the request has other rules for single tokens, or
// wants log-probabilities, these tokens are sampled like all others; likewise while some are forbidden because of its min_tokens.
void Decoder::fast_forward(SequenceGroup& group, Sequence& s, std::vector<Output>& out) {
    const bool forces = can_fast_forward(group, s);
    // If the sequence's masks take long, its next mask is made beside the steps from the beginning.
    if (s.constraint && s.finish == FinishReason::none && s.slow_masks) return masks_.make_beside(group, s, forces);
    if (forces) force(group, s, out);
}

void Decoder::force(SequenceGroup& group, Sequence& s, std::vector<Output>& out) {
    const auto tokens = masks_.forced_tokens(s);
    if (!tokens) return masks_.make_beside(group, s, true);
    for (Token token : *tokens) {
        append(group, s, {.token = token, .mu = s.mu}, out, true);
        if (s.finish != FinishReason::none || !scheduler_.can_force(group, s) || forced_token(s)) return;
    }
}

bool Decoder::can_fast_forward(const SequenceGroup& group, const Sequence& s) const {
    const Request&        r = group.request;
    const SamplingParams& p = r.sampling;
    return s.constraint && scheduler_.n_running() <= force_up_to_ && !withheld(r) && p.logprobs < 0 &&
           p.allowed_tokens.empty() && p.bad_words.empty() && p.logit_bias.empty() &&
           group.n_generated(s) >= r.min_tokens && s.finish == FinishReason::none && scheduler_.can_force(group, s) &&
           !forced_token(s);
}

void Decoder::guess_forced(const SequenceGroup& group, Sequence& s, int n, std::vector<Token>& guess) const {
    if (s.reasoning) s.reasoning->forced_tokens(n, guess);
    if (!guess.empty() || !s.constraint || s.slow_masks || can_fast_forward(group, s)) return;
    if (const auto tokens = masks_.forced_tokens(s))
        guess.assign(tokens->begin(), tokens->begin() + std::min(std::ssize(*tokens), std::ptrdiff_t(n)));
}

void Decoder::sample(std::span<const Scheduled> items, std::vector<Output>& out) {
    SequenceGroup& group = *items[0].group;
    const int      width = group.request.width();
    Sequence&      first = *items[0].sequence;
    if (group.n_generated(first) == 0 && width > 1) {
        // The first token of every answer is sampled from one row, the last row of the prompt.
        next_.clear();
        for (int i = 0; i < width; i++) next_.push_back(sampling_.next(items[0], items[0].next_row(), i, i));
        if (std::ranges::any_of(next_, [](const NextToken& t) { return t.token < 0; })) {
            group.prompt_done = false; // the answers have no sequences yet
            return fail_without_token(items[0], items[0].next_row());
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
    sample_next(items, out);
}

// Takes the next token of each sequence of a group from the row of its last token. Where this token, and those that are forced behind it, are the
// draft tokens that ran, the row of the last of them is there, too: it gives the token after them, just as a step of its own would. The
// sequences keep one length: they go on until a draft token of one of them is wrong.
void Decoder::sample_next(std::span<const Scheduled> items, std::vector<Output>& out) {
    SequenceGroup& group   = *items[0].group;
    const auto     has_end = [](const Scheduled& item) { return item.sequence->finish != FinishReason::none; };
    const auto known   = [](const Scheduled& item) { return std::size_t(item.first + item.n_tokens - item.n_drafts); };
    bool       goes_on = true;
    for (int right = 0; goes_on;) {
        for (const Scheduled& item : items)
            if (const int row = item.next_row() + right; right > 0 && !has_end(item))
                goes_on =
                    goes_on && sampling_.has_result(item, row) && (!item.sequence->constraint || constrain(item, row));
        if (!goes_on) break;
        int n_right = most_drafts;
        for (const Scheduled& item : items) {
            if (has_end(item)) continue;
            Sequence& s   = *item.sequence;
            const int row = item.next_row() + right;
            if (right > 0) scheduler_.accept(item, right);
            NextToken next = sampling_.next(item, row, s.index, 0);
            if (next.token < 0) return fail_without_token(item, row);
            append(group, s, std::move(next), out);
            fast_forward(group, s, out);
            if (has_end(item)) continue;
            const auto answer = std::span<const Token>(s.tokens).subspan(known(item));
            const bool hit    = !s.waits && int(answer.size()) <= item.n_drafts &&
                             std::ranges::equal(answer, std::span<const Token>(s.guess).first(answer.size()));
            n_right = hit ? std::min(n_right, int(answer.size())) : 0;
        }
        goes_on = n_right > 0 && !std::ranges::all_of(items, has_end);
        right   = n_right;
    }
    for (const Scheduled& item : items) {
        judge_guess(*item.sequence, known(item));
        if (item.n_drafts > 0) scheduler_.end_drafts(item);
    }
}

// No token can be sampled: the logits are not usable, or the request forbids every token.
void Decoder::fail_without_token(const Scheduled& item, int row) {
    if (!item.sequence->constraint && !usable(rows_.logits(item, row))) return (void)fail(item, row, "logits");
    failed_.push_back({item.group->id, FinishReason::unmet,
                       cat("no token can follow position ", item.sequence->tokens.size() - 1, ": the request's ",
                           item.sequence->constraint ? "constraint, " : "",
                           "allowed tokens, bad words, biases and min_tokens leave none")});
}

void Decoder::cancel_answer(RequestId id, int index, std::vector<Output>& out) {
    SequenceGroup* group = scheduler_.find(id);
    if (!group) return;
    const std::vector<int> open = open_answers(*group);
    if (std::ranges::find(open, index) == open.end()) return; // the answer has ended before
    if (open.size() == 1) return finish(id, FinishReason::cancelled, "", out);
    outputs_.cancelled(*group, index, out);
    const auto at = std::ranges::find_if(group->sequences, [&](const auto& s) { return s->index == index; });
    if (!group->prompt_done || withheld(group->request)) group->cancelled.push_back(index);
    else scheduler_.free(*group, **at, FinishReason::cancelled);
}

void Decoder::finish(RequestId id, FinishReason reason, const std::string& message, std::vector<Output>& out) {
    std::unique_ptr<SequenceGroup> group = scheduler_.remove(id);
    if (!group) return; // ended before
    const bool was_pinned = group->request.pin && group->prompt_done;
    if (was_pinned) return; // the last output went out when the pin was ready
    outputs_.end(*group, reason, message, out);
}

} // namespace quire
