// quire.decode.step_rows: the logit rows of a step: the results that the device sampled from a row, or the row itself on the host. Views,
// valid until the next step. **Owns** its tasks and the rows that a mask has changed.
export module quire.decode.step_rows;

import quire.core.base;
import quire.schedule.batch;
import quire.schedule.request;
export import quire.step.plan;

export namespace quire {

class StepRows {
public:
    explicit StepRows(int vocab_size) : vocab_(std::size_t(vocab_size)) {}

    // Before the step: its sampling tasks, one for a row at most.
    void clear_tasks(std::size_t n_rows) { tasks_.assign(n_rows, SamplingTask{.row = -1}); }
    void add_task(const SamplingTask& task) { tasks_[std::size_t(task.row)] = task; }
    // After the step. `results` stays valid until the next step.
    void begin(const StepResults& results);

    // From now on the logits of row i of an item are -infinity for all tokens whose bit is 0.
    void constrain(const Scheduled& item, int i, std::span<const std::uint64_t> bits);

    // Of row i of an item's rows: the logits, copied to the host at the first call; the results of its sampling task, and the task, if
    // the row has one; the most likely token, if the device gives it; the hidden state.
    std::span<const float>        logits(const Scheduled& item, int i);
    std::span<const TokenLogprob> sampled(const Scheduled& item, int i) const;
    const SamplingTask&           task(const Scheduled& item, int i) const { return tasks_[at(item, i)]; }
    std::optional<Token>          best(const Scheduled& item, int i) const;
    std::span<const float>        hidden(const Scheduled& item, int i) const {
        return results_->hidden(item.first_logit_row + i);
    }

private:
    static std::size_t at(const Scheduled& item, int i) { return std::size_t(item.first_logit_row) + std::size_t(i); }

    std::size_t                               vocab_;
    const StepResults*                        results_ = nullptr;
    std::span<const float>                    logits_;      // of all rows, after the first use of one
    std::vector<SamplingTask>                 tasks_;       // by logit row; row -1: none
    std::map<std::size_t, std::vector<float>> constrained_; // rows of this step
};

// The chosen token and the best ones, from a device's results.
PositionLogprobs logprobs_of(TokenLogprob chosen, std::span<const TokenLogprob> top, int n_top);

} // namespace quire

module :private;

namespace quire {

void StepRows::begin(const StepResults& results) {
    results_ = &results;
    logits_  = {};
    constrained_.clear();
}

void StepRows::constrain(const Scheduled& item, int i, std::span<const std::uint64_t> bits) {
    const std::span<const float> row = logits(item, i);
    std::vector<float>           own(row.begin(), row.end());
    for (std::size_t t = 0; t < own.size(); t++)
        if ((bits[t / 64] >> (t % 64) & 1) == 0) own[t] = -std::numeric_limits<float>::infinity();
    constrained_[at(item, i)] = std::move(own);
}

std::span<const float> StepRows::logits(const Scheduled& item, int i) {
    if (const auto own = constrained_.find(at(item, i)); own != constrained_.end()) return own->second;
    if (logits_.empty()) logits_ = results_->rows();
    return logits_.subspan(at(item, i) * vocab_, vocab_);
}

std::span<const TokenLogprob> StepRows::sampled(const Scheduled& item, int i) const {
    if (results_->sampled.empty() || at(item, i) >= tasks_.size() || tasks_[at(item, i)].row < 0) return {};
    const SamplingTask& task = tasks_[at(item, i)];
    return results_->sampled.subspan(std::size_t(task.first_result), std::size_t(task.n_results()));
}

std::optional<Token> StepRows::best(const Scheduled& item, int i) const {
    return results_->best.empty() ? std::nullopt : std::optional(results_->best[at(item, i)]);
}

PositionLogprobs logprobs_of(TokenLogprob chosen, std::span<const TokenLogprob> top, int n_top) {
    PositionLogprobs result;
    result.chosen = chosen;
    const auto n  = std::min(top.size(), std::size_t(std::max(n_top, 0)));
    result.top.assign(top.begin(), top.begin() + std::ptrdiff_t(n));
    return result;
}

} // namespace quire
