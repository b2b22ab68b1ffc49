// quire.decode.outputs: makes the outputs of requests: of a prompt, of one answer, of answers that are complete only together. **Owns** the
// results of prompts that have not gone out yet.
export module quire.decode.outputs;

import quire.core.base;
import quire.decode.beam_search;
import quire.decode.pooling;
import quire.decode.sampler;
import quire.decode.step_rows;
import quire.schedule.scheduler;

export namespace quire {

// Whether the answers are compared with one another: they are given when all are complete.
bool withheld(const Request& request);
// Whether the answer was cancelled before its sequence existed.
bool is_cancelled(const SequenceGroup& group, int answer);
// The answers that are not over.
std::vector<int> open_answers(const SequenceGroup& group);

class Outputs {
public:
    Outputs(Scheduler& scheduler, Sampler& sampler, StepRows& rows, Pooler pooler)
        : scheduler_(scheduler), sampler_(sampler), rows_(rows), pooler_(std::move(pooler)) {}

    // -- results of a prompt, from the rows of an item of the step. Returns a row that is not finite; none: all rows were used.

    // Each row gives the log-probabilities of the token after it.
    std::optional<int> add_logprobs(const Scheduled& item);
    // Each row is a hidden state.
    std::optional<int> add_hidden(const Scheduled& item);
    // The last row is the logits of the prompt.
    void add_logits(const Scheduled& item);

    // -- outputs

    // The next output of an answer. The first one has the prompt's results.
    Output next(const SequenceGroup& group, int index);
    // How far the prompt is computed.
    void progress(const Scheduled& item, std::vector<Output>& out) const;
    // The prompt is computed, and nothing is generated: the embedding, or the prompt's log-probabilities and logits.
    void embedding(SequenceGroup& group, std::vector<Output>& out);
    void prompt(SequenceGroup& group, std::vector<Output>& out);
    // The prompt is pinned.
    void pinned(const SequenceGroup& group, std::vector<Output>& out) const;
    // The n best of all answers, including answers that did not come to an end.
    void best(SequenceGroup& group, std::vector<Output>& out);
    // One of several answers was cancelled.
    void cancelled(const SequenceGroup& group, int index, std::vector<Output>& out) const;
    // The request, which has left the scheduler, is over: all its open answers have `reason`.
    void end(SequenceGroup& group, FinishReason reason, const std::string& message, std::vector<Output>& out);

private:
    // The results of a prompt so far.
    struct PromptResults {
        RequestId                     id = 0;
        std::vector<PositionLogprobs> logprobs; // of prompt[1..]
        std::vector<float>            logits;   // [vocab] of the last position
        std::vector<float>            pooled;   // [hidden] of the first n_pooled positions
        int                           n_pooled = 0;
    };
    PromptResults& results_of(RequestId id);
    void           drop(RequestId id) {
        std::erase_if(prompts_, [&](const PromptResults& p) { return p.id == id; });
    }

    Scheduler&                 scheduler_;
    Sampler&                   sampler_;
    StepRows&                  rows_;
    Pooler                     pooler_;
    std::vector<PromptResults> prompts_;
};

} // namespace quire

module :private;

namespace quire {

bool withheld(const Request& request) { return request.beam_width > 0 || request.best_of > request.n; }

bool is_cancelled(const SequenceGroup& group, int answer) {
    return std::ranges::find(group.cancelled, answer) != group.cancelled.end();
}

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

Output output_of(const SequenceGroup& group, int index, FinishReason finish = FinishReason::none, bool done = false) {
    Output output;
    output.id              = group.id;
    output.index           = index;
    output.prompt_tokens   = group.n_prompt();
    output.cached_tokens   = group.n_cached;
    output.loaded_tokens   = group.n_loaded;
    output.disk_tokens     = std::min(group.n_from_disk, group.n_loaded);
    output.n_preempted     = group.n_preempted;
    output.draft_tokens    = group.n_drafted;
    output.accepted_tokens = group.n_accepted;
    output.first_run       = group.first_run;
    output.finish          = finish;
    output.done            = done;
    return output;
}

Outputs::PromptResults& Outputs::results_of(RequestId id) {
    if (const auto at = std::ranges::find(prompts_, id, &PromptResults::id); at != prompts_.end()) return *at;
    prompts_.emplace_back().id = id;
    return prompts_.back();
}

std::optional<int> Outputs::add_logprobs(const Scheduled& item) {
    const SequenceGroup&           group    = *item.group;
    std::vector<PositionLogprobs>& logprobs = results_of(group.id).logprobs;
    const int                      n_top    = group.request.prompt_logprobs;
    for (int i = 0; i < item.n_logit_rows; i++) {
        const int next = item.first + i + 1;
        if (next >= group.n_prompt() || int(logprobs.size()) >= next) continue;
        const auto sampled = rows_.sampled(item, i);
        if (sampled.empty() ? !usable(rows_.logits(item, i)) : sampled[0].token < 0) return i;
        if (!sampled.empty()) logprobs.push_back(logprobs_of(sampled[0], sampled.subspan(1), n_top));
        else
            logprobs.push_back(
                sampler_.logprobs(rows_.logits(item, i), item.sequence->tokens[std::size_t(next)], n_top));
    }
    return std::nullopt;
}

// The rows of a preempted prompt come again; each row is added once.
std::optional<int> Outputs::add_hidden(const Scheduled& item) {
    PromptResults& prompt = results_of(item.group->id);
    for (int i = 0; i < item.n_logit_rows; i++) {
        if (item.first + i != prompt.n_pooled) continue;
        const std::span<const float> state = rows_.hidden(item, i);
        if (!std::ranges::all_of(state, [](float v) { return std::isfinite(v); })) return i;
        pooler_.add(state, prompt.n_pooled++, item.group->n_prompt(), prompt.pooled);
    }
    return std::nullopt;
}

void Outputs::add_logits(const Scheduled& item) {
    const std::span<const float> last = rows_.logits(item, item.n_logit_rows - 1);
    results_of(item.group->id).logits.assign(last.begin(), last.end());
}

Output Outputs::next(const SequenceGroup& group, int index) {
    Output     output = output_of(group, index);
    const auto prompt = std::ranges::find(prompts_, group.id, &PromptResults::id);
    if (prompt == prompts_.end()) return output;
    output.prompt_logprobs = std::move(prompt->logprobs);
    output.prompt_logits   = std::move(prompt->logits);
    prompts_.erase(prompt);
    return output;
}

void Outputs::progress(const Scheduled& item, std::vector<Output>& out) const {
    out.push_back(output_of(*item.group, open_answers(*item.group).front())); // the first may have been cancelled
    out.back().computed_tokens = std::min(item.first + item.n_tokens, item.group->n_prompt());
}

void Outputs::embedding(SequenceGroup& group, std::vector<Output>& out) {
    Output& output   = out.emplace_back(output_of(group, 0, FinishReason::stop, true));
    output.embedding = std::move(results_of(group.id).pooled);
    drop(group.id);
    pooler_.finish(output.embedding);
    scheduler_.free(group, *group.sequences[0], FinishReason::stop);
}

void Outputs::prompt(SequenceGroup& group, std::vector<Output>& out) {
    const std::vector<int> open = open_answers(group);
    for (int i : open) {
        Output& output = out.emplace_back(next(group, i));
        output.finish  = FinishReason::length;
        output.done    = i == open.back();
    }
    scheduler_.free(group, *group.sequences[0], FinishReason::length);
}

void Outputs::pinned(const SequenceGroup& group, std::vector<Output>& out) const {
    out.push_back(output_of(group, 0, FinishReason::stop, true));
}

void Outputs::best(SequenceGroup& group, std::vector<Output>& out) {
    const Request& r = group.request;
    while (!group.sequences.empty()) scheduler_.free(group, *group.sequences.back(), FinishReason::length);
    const auto score = [&](const Sequence& s) { return score_of(r, s.logprob, group.n_generated(s)); };
    std::stable_sort(group.finished.begin(), group.finished.end(), [&](const auto& a, const auto& b) {
        const double sa = score(*a), sb = score(*b);
        return sa != sb ? sa > sb : a->index < b->index;
    });
    const std::vector<int> open = open_answers(group);
    for (int i : open) {
        Output& output = out.emplace_back(next(group, i));
        output.finish  = FinishReason::length; // there may be fewer beams than answers wanted
        output.done    = i == open.back();
        output.sharing = group.sharing;
        if (i >= int(group.finished.size())) continue;
        Sequence& s = *group.finished[std::size_t(i)];
        output.tokens.assign(s.tokens.begin() + group.n_prompt(), s.tokens.end());
        output.logprobs = std::move(s.logprobs);
        output.finish   = s.finish;
        output.logprob  = s.logprob;
        output.score    = score(s);
    }
}

void Outputs::cancelled(const SequenceGroup& group, int index, std::vector<Output>& out) const {
    out.push_back(output_of(group, index, FinishReason::cancelled));
}

void Outputs::end(SequenceGroup& group, FinishReason reason, const std::string& message, std::vector<Output>& out) {
    if (withheld(group.request) && reason == FinishReason::length && group.prompt_done) {
        // The request outgrew the pool: its answers go out as far as they came.
        for (auto& s : group.sequences) {
            s->finish = reason;
            group.finished.push_back(std::move(s));
        }
        group.sequences.clear();
        return best(group, out);
    }
    drop(group.id);
    const std::vector<int> open = open_answers(group);
    for (int i : open) {
        Output& output = out.emplace_back(output_of(group, i, reason, i == open.back()));
        output.message = message;
        output.sharing = group.sharing;
    }
}

} // namespace quire
