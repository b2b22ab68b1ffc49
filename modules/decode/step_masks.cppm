// quire.decode.step_masks: the masks of the constrained sequences of a step. Masks that take too long are made beside the steps, while their
// sequences wait. **Owns** the masks of the step, the threads that make them, and the list of the sequences that wait.
export module quire.decode.step_masks;

import quire.core.base;
import quire.core.thread_pool;
import quire.decode.mask_makers;
import quire.schedule.scheduler;

export namespace quire {

// Whether the item's last row gives a token.
bool is_sampled(const Scheduled& item);

class StepMasks {
public:
    using Time  = std::chrono::steady_clock::time_point;
    using Clock = std::function<Time()>;

    // `clock`: measures the time limits; none: the machine's.
    StepMasks(Scheduler& scheduler, int vocab_size, Clock clock);

    // Makes the masks of a step; masks of different constraints are made at the same time. If one mask of a group is not made in time, the
    // group is put off, and the mask is made beside the steps.
    void make(std::span<const Scheduled> items, const SamplingLimits& limits, SamplingPlan& plan);
    // Of item i of the step: where its mask begins in the plan's masks; -1: it does not stand there.
    int in_plan(std::size_t i) const { return items_[i].in; }
    // Its mask, which it has; why there is none, or "".
    std::span<const std::uint64_t> bits(std::size_t i) const { return bits_of(items_[i]); }
    const std::string&             error(std::size_t i) const { return items_[i].error; }
    // After the step: the mask behind the tokens that a sequence has now, valid until the next call. Empty: it takes too long. Error: why there is
    // none.
    Result<std::span<const std::uint64_t>> next_bits(Sequence& sequence);

    // A step has a time limit for all its forced tokens, which begins now.
    void begin_forcing() { forced_until_ = now() + step_limit; }
    // The tokens for which a sequence's constraint leaves no choice; none: they take too long.
    std::optional<std::vector<Token>> forced_tokens(Sequence& s) const {
        return s.constraint->forced_tokens({.until = forced_until_});
    }

    // The next mask of a sequence is made beside the steps, with `forced` after its forced tokens. From now on the sequence waits.
    void make_beside(const SequenceGroup& group, Sequence& sequence, bool forced);
    // The sequences whose masks were made beside the steps go on. Appends the sequences with forced tokens to `ready`, and the requests whose
    // masks take too long to `failed`.
    struct Ready {
        SequenceGroup* group    = nullptr;
        Sequence*      sequence = nullptr;
    };
    void resume(std::vector<Ready>& ready, std::vector<Ended>& failed);
    bool waits() const { return !late_.empty(); } // whether a sequence still waits
    // Waits until one of these masks is made, at most `seconds`.
    void wait(double seconds) { makers_.wait(seconds); }

private:
    // Time limits of the engine's thread: for all masks of a step `step_limit`, and `mask_limit` more for each sequence; for all forced
    // tokens of a step `step_limit`.
    static constexpr auto step_limit = std::chrono::microseconds(1500), mask_limit = std::chrono::microseconds(30);

    // Of each item of the step.
    struct ItemMask {
        int         at    = -1; // where the mask begins in masks_; -1: the item has no mask
        int         in    = -1; // where the mask begins in the plan's masks
        int         slow  = 0;  // 1: the mask was not made in time
        std::string error = {}; // why there is no mask
    };
    // A sequence that waits for its mask.
    struct Late {
        RequestId                id       = 0;
        Sequence*                sequence = nullptr;
        std::shared_ptr<MaskJob> job;
    };
    Time                           now() const { return clock_ ? clock_() : std::chrono::steady_clock::now(); }
    std::span<const std::uint64_t> bits_of(const ItemMask& mask) const {
        return std::span(masks_).subspan(std::size_t(mask.at), words_);
    }

    Scheduler&                    scheduler_;
    Clock                         clock_;
    std::size_t                   words_; // of a mask
    std::vector<std::uint64_t>    masks_; // of the step, bits
    std::vector<std::uint64_t>    next_;  // next_bits()
    std::vector<ItemMask>         items_;
    std::vector<std::vector<int>> parts_; // items whose masks one thread makes
    std::optional<ThreadPool>     pool_;  // from the first step on that has masks of several constraints
    MaskMakers                    makers_;
    std::vector<Late>             late_;
    Time                          forced_until_{}; // in this step
};

} // namespace quire

module :private;

namespace quire {

// Time limits of masks that are made beside the steps: of one mask, and of all masks of one sequence.
constexpr double late_seconds = 30, all_late_seconds = 15;

bool is_sampled(const Scheduled& item) {
    const Request& r = item.group->request;
    return item.samples && r.generates() && (item.group->prompt_done || !r.return_logits);
}

StepMasks::StepMasks(Scheduler& scheduler, int vocab_size, Clock clock)
    : scheduler_(scheduler), clock_(std::move(clock)), words_((std::size_t(vocab_size) + 63) / 64) {}

// `bits` has a word for each 64 tokens of the model, which may have more or fewer than its tokenizer.
Result<bool> make_mask(TokenFilter& constraint, std::span<std::uint64_t> bits, const Effort& effort) {
    std::ranges::fill(bits, 0);
    if (constraint.words() <= bits.size()) return constraint.mask(bits.first(constraint.words()), effort);
    std::vector<std::uint64_t> whole(constraint.words());
    Result<bool>               made = constraint.mask(whole, effort);
    std::copy_n(whole.begin(), bits.size(), bits.begin());
    return made;
}

void StepMasks::make(std::span<const Scheduled> items, const SamplingLimits& limits, SamplingPlan& plan) {
    masks_.clear();
    items_.assign(items.size(), {});
    for (auto& part : parts_) part.clear();
    int  n_parts = 0;
    auto until   = now() + step_limit;
    for (int i = 0; i < int(items.size()); i++) {
        const Scheduled&                item = items[std::size_t(i)];
        const Polymorphic<TokenFilter>& own  = item.sequence->constraint;
        if (!own || !is_sampled(item)) continue;
        until += mask_limit;
        ItemMask& mask = items_[std::size_t(i)];
        mask.at        = int(masks_.size());
        masks_.resize(masks_.size() + words_);
        if (int(plan.masks.size() + words_) <= limits.mask_words) {
            mask.in = int(plan.masks.size());
            plan.masks.resize(plan.masks.size() + words_);
        }
        const auto same = [&](const std::vector<int>& part) {
            return part.empty() || own->shared() == items[std::size_t(part[0])].sequence->constraint->shared();
        };
        auto part = std::ranges::find_if(parts_, same);
        if (part == parts_.end()) part = parts_.insert(part, std::vector<int>());
        n_parts += part->empty();
        part->push_back(i);
    }
    const auto make = [&](int n, int) {
        for (int i : parts_[std::size_t(n)]) {
            ItemMask&  mask = items_[std::size_t(i)];
            const auto bits = std::span(masks_).subspan(std::size_t(mask.at), words_);
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
        if (!pool_) pool_.emplace(std::min(physical_cores(), 8));
        pool_->run(n_parts, make);
    }
    for (std::size_t i = 0; i < items.size(); i++) {
        if (items_[i].slow == 0) continue;
        make_beside(*items[i].group, *items[i].sequence, false);
        scheduler_.put_off(*items[i].group);
    }
}

Result<std::span<const std::uint64_t>> StepMasks::next_bits(Sequence& s) {
    next_.resize(words_);
    const Result<bool> made = make_mask(*s.constraint, next_, {.until = forced_until_});
    if (!made) return std::unexpected(made.error());
    return *made ? std::span<const std::uint64_t>(next_) : std::span<const std::uint64_t>();
}

void StepMasks::make_beside(const SequenceGroup& group, Sequence& s, bool forced) {
    auto job = std::make_shared<MaskJob>(s.constraint, forced, s.mask_seconds, now());
    s.waits  = true;
    late_.push_back({group.id, &s, job});
    makers_.add(std::move(job));
}

void StepMasks::resume(std::vector<Ready>& ready, std::vector<Ended>& failed) {
    std::vector<Late> late = std::exchange(late_, {});
    for (Late& l : late) {
        SequenceGroup* group = scheduler_.find(l.id);
        const bool     there =
            group && std::ranges::any_of(group->sequences, [&](const auto& s) { return s.get() == l.sequence; });
        if (!there) { // the sequence has ended meanwhile
            l.job->stop = true;
            continue;
        }
        const auto fail = [&](const std::string& what) {
            failed.push_back({l.id, FinishReason::unmet, cat("the constraint's ", what, " seconds")});
        };
        Sequence&  s    = *l.sequence;
        const bool done = makers_.is_done(*l.job);
        if (!done && now() - l.job->since > std::chrono::duration<double>(late_seconds))
            fail(cat("next mask was not there after ", late_seconds));
        if (!done || group->status != GroupStatus::running) {
            late_.push_back(std::move(l));
            continue;
        }
        s.waits        = false;
        s.constraint   = std::move(l.job->state);
        s.slow_masks   = l.job->slow;
        s.mask_seconds = l.job->seconds;
        if (s.mask_seconds > all_late_seconds) fail(cat("masks have taken more than ", all_late_seconds));
        if (l.job->forced) ready.push_back({group, &s});
    }
}

} // namespace quire
