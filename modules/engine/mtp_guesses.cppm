// quire.engine.mtp_guesses: a layer behind the model, which reads its hidden states, guesses the next tokens of the running sequences: the
// model's own layer for multi-token prediction (MTP), or a draft of EAGLE-3. Its K and V lie in the model's own blocks. **Owns** the list of
// the hidden states that the device keeps for the sequences.
export module quire.engine.mtp_guesses;

import quire.core.base;
import quire.decode.drafting;
import quire.decode.sampler;
import quire.engine.executor;
import quire.paging.block_manager;
import quire.schedule.scheduler;

export namespace quire {

class MtpGuesses final : public BatchGuesser {
public:
    // The executor's model has such a layer (ModelConfig::mtp or draft), and steps of up to max_logit_rows logit rows. Both references outlive this.
    MtpGuesses(Executor& executor, BlockManager& blocks, int vocab_size, int max_logit_rows)
        : executor_(executor), blocks_(blocks), sampler_(vocab_size), vocab_size_(vocab_size),
          n_places_(max_logit_rows) {}

    // The calls of a step, in this order. follow(): keeps the hidden states that the sequences go on with.
    void follow(std::span<const std::unique_ptr<SequenceGroup>> running);
    // Before the scheduler: as many zeros as tokens are to be guessed, for those sequences whose last state is known.
    void guess(std::span<const WantedGuess> wanted) override;
    // Behind it, before the launch: the guesses of the items whose drafts run, in their sequences and in the plan.
    void fill(std::span<const Scheduled> items, StepPlan& plan);
    // When the step has run, before its results are used.
    void ran(std::span<const Scheduled> items);

    double seconds(int n_texts) const override { return cost_.of(n_texts); }
    // Before any guess: takes the times for seconds(), of up to so many sequences.
    void measure(int most);

private:
    using Name = std::pair<RequestId, int>; // of a sequence: its request, and which answer it is
    // A sequence has the rows n_rows · place and so on of the memory: of the layer's last guess, and of the states of two positions; -1: of none.
    static constexpr int n_rows = mtp_states;
    struct Kept {
        int                             place     = 0;
        std::array<int, mtp_states - 1> positions = {-1, -1};
        bool                            runs      = false;
    };
    // The logit rows of a sequence in the last step: those of positions first .. first + n - 1 begin with `row`.
    struct Rows {
        int first = 0, n = 0, row = 0;
    };

    const Rows* rows_of(const Name& name) const; // null: the last step had no logit rows of it
    void        keep(Kept& kept, std::size_t which, int position, const Rows* rows);
    int         memory_row(const SequenceGroup& group, const Sequence& sequence, int position) const;
    int         memory_row(const Scheduled& item, int position) const {
        return memory_row(*item.group, *item.sequence, position);
    }
    int own_row(const Scheduled& item) const { return n_rows * kept_.at({item.group->id, item.sequence->index}).place; }
    void  guess_next(std::span<const Scheduled> texts, int number, MoveTicket after);
    Token next_token(std::span<const float> row, const Scheduled& item);

    Executor&                          executor_;
    BlockManager&                      blocks_;
    Sampler                            sampler_;
    int                                vocab_size_, n_places_;
    StepCost                           cost_;
    std::map<Name, Kept>               kept_;    // of the running sequences
    std::vector<int>                   free_;    // places
    std::vector<std::pair<Name, Rows>> last_;    // of the sequences of the last step, sorted by name
    std::vector<StepPlan::KeptRow>     to_keep_; // by the next launch
    StepPlan                           plan_;    // scratch, like what follows
    std::vector<Scheduled>             items_, texts_;
    std::vector<float>                 row_;
};

} // namespace quire

module :private;

namespace quire {

const MtpGuesses::Rows* MtpGuesses::rows_of(const Name& name) const {
    const auto at = std::ranges::lower_bound(last_, name, {}, &std::pair<Name, Rows>::first);
    return at != last_.end() && at->first == name ? &at->second : nullptr;
}

// The state of a position, from a row of the last step, or where it is already.
void MtpGuesses::keep(Kept& kept, std::size_t which, int position, const Rows* rows) {
    int& at = kept.positions[which];
    if (rows && position >= rows->first && position < rows->first + rows->n) {
        to_keep_.push_back({rows->row + position - rows->first, n_rows * kept.place + 1 + int(which)});
        at = position;
    } else if (at != position) at = -1;
}

void MtpGuesses::follow(std::span<const std::unique_ptr<SequenceGroup>> running) {
    for (auto& [name, kept] : kept_) kept.runs = false;
    for (const auto& group : running)
        for (const auto& s : group->sequences)
            if (const auto at = kept_.find({group->id, s->index}); at != kept_.end()) at->second.runs = true;
    std::erase_if(kept_, [&](const auto& one) {
        if (!one.second.runs) free_.push_back(one.second.place);
        return !one.second.runs;
    });
    for (const auto& group : running)
        for (const auto& s : group->sequences) {
            auto at = kept_.find({group->id, s->index});
            if (at == kept_.end()) {
                if (free_.empty() && int(kept_.size()) == n_places_) continue; // no more sequences run
                const int place = free_.empty() ? int(kept_.size()) : free_.back();
                if (!free_.empty()) free_.pop_back();
                at = kept_.emplace(Name(group->id, s->index), Kept{.place = place}).first;
            }
            const Rows* mine = rows_of({group->id, s->index});
            if (!mine) mine = rows_of({group->id, 0}); // a fork of the first answer
            keep(at->second, 0, s->n_computed - 1, mine);
            keep(at->second, 1, int(s->tokens.size()) - 2, mine);
        }
    last_.clear();
}

// Where the state of a position is; -1: nowhere.
int MtpGuesses::memory_row(const SequenceGroup& group, const Sequence& s, int position) const {
    const auto at = kept_.find({group.id, s.index});
    if (at == kept_.end() || position < 0) return -1;
    const auto& positions = at->second.positions;
    const auto  row       = std::ranges::find(positions, position) - positions.begin();
    return row < std::ssize(positions) ? n_rows * at->second.place + 1 + int(row) : -1;
}

void MtpGuesses::guess(std::span<const WantedGuess> wanted) {
    for (const WantedGuess& w : wanted)
        if (w.n > 0 && memory_row(*w.group, *w.sequence, int(w.sequence->tokens.size()) - 2) >= 0)
            w.sequence->guess.assign(std::size_t(w.n), 0);
}

// The text's next token, drawn as the model's with the same random number: where the layer is right, so is the guess.
Token MtpGuesses::next_token(std::span<const float> row, const Scheduled& item) {
    const SequenceGroup&  group = *item.group;
    const SamplingParams& how   = group.request.sampling;
    Sequence&             s     = *item.sequence;
    row_.assign(row.begin(), row.end());
    if (!usable(row_)) return 0; // a wrong guess
    if (is_plain_greedy(how)) return argmax(row_);
    const std::size_t n = s.tokens.size();
    s.tokens.insert(s.tokens.end(), s.guess.begin(), s.guess.end());
    const Token next =
        sampler_.sample(row_, how, s.tokens, group.n_generated_left(s), {s.index, std::uint64_t(group.length(s)), s.mu})
            .token;
    s.tokens.resize(n);
    return std::max(next, 0);
}

// One more token for each of the texts. `number`: of the token, from 0.
void MtpGuesses::guess_next(std::span<const Scheduled> texts, int number, MoveTicket after) {
    const auto start = std::chrono::steady_clock::now();
    items_.clear();
    plan_.clear();
    for (const Scheduled& text : texts)
        items_.push_back(
            {text.group, text.sequence, int(text.sequence->tokens.size()) - 1 + number, 1, 0, 1, false, false, number});
    plan_items(items_, blocks_, plan_);
    plan_.guesses = true;
    plan_.after   = after;
    plan_.kept.swap(to_keep_);
    for (const Scheduled& item : items_) {
        const int row = number == 0 ? memory_row(item, int(item.sequence->tokens.size()) - 2) : own_row(item);
        plan_.carried.push_back(row);
    }
    executor_.launch(plan_);
    const StepResults results = executor_.results();
    const auto        greedy  = [](const Scheduled& t) { return is_plain_greedy(t.group->request.sampling); };
    const bool best = !results.best.empty() && std::ranges::all_of(items_, greedy); // the device knows the tokens
    std::span<const float> rows;
    if (!best) rows = results.rows();
    for (std::size_t i = 0; i < items_.size(); i++) {
        const auto size = std::size_t(vocab_size_);
        items_[i].sequence->guess.push_back(best ? std::max(results.best[i], 0)
                                                 : next_token(rows.subspan(i * size, size), items_[i]));
        to_keep_.push_back({std::int32_t(i), own_row(items_[i]), true});
    }
    const int n = int(items_.size());
    cost_.add(n, n, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
}

void MtpGuesses::fill(std::span<const Scheduled> items, StepPlan& plan) {
    texts_.clear();
    for (const Scheduled& item : items) {
        if (item.sequence->n_forced > 0) continue; // its guess is known
        item.sequence->guess.clear();
        if (item.n_drafts > 0) texts_.push_back(item);
    }
    for (int n = 0; !texts_.empty(); n++) {
        guess_next(texts_, n, plan.after);
        std::erase_if(texts_, [&](const Scheduled& text) { return text.n_drafts == n + 1; });
    }
    for (std::size_t i = 0; i < items.size(); i++) {
        const Scheduled& item = items[i];
        plan.carried.push_back(memory_row(item, item.first - 1));
        const auto first = plan.tokens.begin() + plan.token_start[i + 1] - item.n_drafts;
        std::ranges::copy(std::span(item.sequence->guess).first(std::size_t(item.n_drafts)), first);
    }
    std::erase_if(to_keep_, &StepPlan::KeptRow::guessed);
    plan.kept.swap(to_keep_);
}

void MtpGuesses::ran(std::span<const Scheduled> items) {
    last_.clear();
    for (const Scheduled& item : items)
        if (item.n_logit_rows > 0)
            last_.push_back(
                {{item.group->id, item.sequence->index},
                 {item.first + item.n_tokens - item.n_logit_rows, item.n_logit_rows, item.first_logit_row}});
    std::ranges::sort(last_, {}, &std::pair<Name, Rows>::first);
}

void MtpGuesses::measure(int most) {
    std::vector<Sequence> texts(std::size_t(std::min(most, n_places_)));
    items_.clear();
    for (Sequence& s : texts) {
        s.tokens = {0, 0};
        s.table  = blocks_.open_table();
        if (blocks_.allocate(s.table, s.tokens, 0, false) && blocks_.allocate_slots(s.table, 0, 2))
            items_.push_back({nullptr, &s, 1, 1, 0, 1});
    }
    const std::vector<Scheduled> all = items_;
    for (int n = 1; n <= int(all.size()); n = n == int(all.size()) ? n + 1 : std::min(2 * n, int(all.size()))) {
        items_.assign(all.begin(), all.begin() + n);
        plan_.clear();
        plan_items(items_, blocks_, plan_);
        plan_.guesses = true;
        for (int i = n == 1 ? -1 : 0; i < 3; i++) { // the first time also brings the weights
            const auto start = std::chrono::steady_clock::now();
            executor_.launch(plan_);
            executor_.results();
            if (i >= 0)
                cost_.add_trial(n, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
        }
    }
    for (Sequence& s : texts) blocks_.close_table(s.table, true);
}

} // namespace quire
