// quire.schedule.scheduler: decides in each step which tokens of which sequences run: continuous batching with admission, chunked
// prefill and preemption (the paper, section 4.5). **Owns** the requests' sequences, their queues and the block manager. Handles
// no tensors and no text.
export module quire.schedule.scheduler;

import quire.core.base;
import quire.core.std;
import quire.paging.block;
import quire.paging.block_hash;
import quire.paging.block_manager;
export import quire.paging.cache_layout; // CacheLayout
import quire.paging.snapshot;
export import quire.schedule.batch; // Scheduled
import quire.schedule.chunks;
import quire.schedule.context_shift;
export import quire.schedule.preemption; // PreemptionMode
import quire.schedule.request;
import quire.schedule.request_check;
export import quire.schedule.reservation; // MakeReservations, MemoryUse
export import quire.schedule.sequence;    // Sequence, SequenceGroup
import quire.step.plan;

export namespace quire {

struct SchedulerOptions {
    int            n_blocks         = 0;
    int            block_size       = 16;
    int            context          = 0;   // longest sequence in tokens
    int            max_batch_tokens = 512; // in one step, including chunks of prompts
    int            max_sequences    = 16;  // running at once
    int            max_logit_rows   = 64;  // in one step; at least max_sequences
    bool           prefix_cache     = true;
    int            n_swap           = 0; // blocks of the swap pool
    PreemptionMode preemption_mode  = PreemptionMode::automatic;
    bool           whole_prompts    = false; // a prompt runs in one step: its tokens see those after them
    double         watermark = 0.04; // fraction of the blocks kept free when a request is admitted while others run
    // A request that is computed again uses those of its blocks that nobody took meanwhile.
    bool             keep_preempted = true;
    MakeReservations reservations = {}; // of contiguous memory, without swap and prefix cache; empty: blocks on demand
    int aging_steps = 1000; // after waiting so many steps a request counts as one priority level more urgent
    std::vector<BlockId> free_order = {}; // as BlockManagerOptions has it
    CacheLayout          layout     = {}; // n_blocks and n_swap are blocks of it
};

// A request that the scheduler itself ended.
struct Ended {
    RequestId    id     = 0;
    FinishReason finish = FinishReason::length; // it outgrew the whole pool while alone; or refused
    std::string  message;
};

struct SchedulerStats : PreemptionStats {
    std::uint64_t copied_blocks   = 0; // copy-on-write
    std::uint64_t forks           = 0;
    std::uint64_t released_blocks = 0; // behind the sliding windows of their layers
    std::uint64_t context_shifts  = 0; // sequences that forgot tokens
    SharingStats  sharing;             // of all requests together, each step
};

class Scheduler {
public:
    explicit Scheduler(const SchedulerOptions& options);
    ~Scheduler();

    // Error: why the request can never run, with the numbers.
    Result<void> check_request(const Request& request) const;
    // Puts a request that check_request() accepted into the queue.
    void add(RequestId id, Request request);
    // Removes a request in any state and frees its blocks at once. Null if it does not exist (any more).
    std::unique_ptr<SequenceGroup> remove(RequestId id);
    // Like remove(), for a request whose sequences have all been freed; null for a pinned prefix, which stays.
    std::unique_ptr<SequenceGroup> remove_finished(RequestId id);

    // Fills `plan` with the next step; the returned list is valid until the next call. If nothing can run, both are empty
    // except for the plan's block moves. The caller must run the plan and then call commit().
    std::span<const Scheduled> schedule(StepPlan& plan);
    void                       commit();

    // While that step runs, before its commit(): plans the next one, assuming that every sequence gets a token, none of them an
    // end token, and no request comes or goes; the token ids stay open. False: the step needs more, use schedule().
    bool prepare(StepPlan& plan);
    // Instead of schedule(): the step that prepare() planned, now with its token ids; empty if an assumption was wrong.
    std::span<const Scheduled> adopt(StepPlan& plan);

    // While a step runs: its sequences of this group get no token from it. Their last tokens run again when none of them waits.
    void put_off(const SequenceGroup& group);

    // -- decoding methods use these three (the paper, section 5.2), between commit() and the next schedule()

    // Another sequence with the same tokens and blocks.
    Sequence& fork(SequenceGroup& group, const Sequence& parent);
    // `forced`: the token was not sampled; it runs in one step with the sampled one before it. Only where a group has one sequence.
    void append(Sequence& sequence, Token token, bool forced = false) {
        sequence.tokens.push_back(token);
        sequence.n_new = forced ? sequence.n_new + 1 : 1;
        if (sequence.constraint) sequence.constraint->push(token);
        if (sequence.reasoning) sequence.reasoning->accept(token);
    }
    // Ends one sequence of a group and frees its blocks; its tokens move to group.finished.
    void free(SequenceGroup& group, Sequence& sequence, FinishReason reason);
    // Why a sequence ends with its last token, or `none`; `is_end`: the last token is an end token.
    FinishReason ending(const SequenceGroup& group, const Sequence& sequence, bool is_end) const;
    // Whether a token can be appended that is not sampled: the group has one sequence, far from the end of the context.
    bool can_force(const SequenceGroup& group, const Sequence& sequence) const {
        return group.request.width() == 1 && int(sequence.tokens.size()) + 1 < options_.context;
    }
    // Pins the prompt's blocks, of a request with `pin`, until remove().
    void pin(SequenceGroup& group);

    // Null if it does not exist (any more).
    SequenceGroup*     find(RequestId id) const;
    std::vector<Ended> take_ended();
    void               set_costs(const PreemptionCosts& costs) { costs_ = costs; }
    // The most tokens of a step from now on, up to max_batch_tokens; a step has one for each sequence in any case.
    void limit_step(int n_tokens);

    bool idle() const { return running_.empty() && queue_.empty(); }
    // In the order of their keys.
    std::span<const std::unique_ptr<SequenceGroup>> running() const { return running_; }
    MemoryUse                                       memory_use() const; // what the slots hold
    int                                             n_running() const { return int(running_.size()); }
    bool                                            generates() const;     // whether some request is past its prompt
    int                   n_waiting() const { return int(queue_.size()); } // including preempted ones
    int                   n_swapped() const;                               // of these
    const SchedulerStats& stats() const { return stats_; }
    const BlockManager&   blocks() const { return blocks_; }
    // Blocks, sequences and the events since the last call, for display.
    void                     view(Snapshot& snapshot);
    void                     log_events(bool on); // for view(); off at first
    void                     log_cache(bool on) { blocks_.log_cache(on); }
    std::vector<CacheChange> take_cache_changes() { return blocks_.take_cache_changes(); }
    // The tokens of one sequence; empty if it does not exist.
    std::span<const Token> tokens(RequestId id, int index) const;
    void                   check_invariants() const;

private:
    using Group = std::unique_ptr<SequenceGroup>;

    void preempt_for_priority();
    bool fits(SequenceGroup& group, std::size_t n_staying);
    int  blocks_to_admit(SequenceGroup& group, std::span<const TableId> closing = {}, bool alone = false);
    int  blocks_for_step(std::size_t n_groups);
    int  tokens_at_once(const SequenceGroup& group) const;
    int  blocks_at_once(const SequenceGroup& group, int more_entries = 0) const;
    bool is_whole(const Sequence& sequence) const;
    bool grow(SequenceGroup& group);
    // The widest window of what gives blocks back; 0: nothing does.
    int                window() const { return window_; }
    const CacheLayout& layout() const { return blocks_.layout(); }
    bool               admit(SequenceGroup& group, int keep_free);
    bool               may_admit() const;
    bool               admit_next();
    void               claim(SequenceGroup& group);
    void               run_shares();
    void               preempt_last();
    void               shift_full();
    void               shift(std::size_t i);
    void               to_queue(std::size_t i);
    bool               allocate_slots(SequenceGroup& group);
    bool               ends_by_length(const SequenceGroup& group, const Sequence& sequence, int n_more) const;
    bool               must_shift(const SequenceGroup& group, int n_tokens) const;
    bool               queue_waits() const;
    void               end(SequenceGroup& group, FinishReason reason, std::string message = {});
    void               measure_sharing(SequenceGroup& group);
    void               log(MemoryEventKind kind, const SequenceGroup& group, int index = 0);
    int                blocks_to_keep_free(const SequenceGroup& group, std::size_t n_running) const;
    int                watermark() const { return int(double(blocks_.n_blocks()) * options_.watermark); }
    RequestBounds      bounds() const;

    SchedulerOptions                              options_;
    BlockManager                                  blocks_;
    int                                           window_ = 0;
    std::unique_ptr<Reservations>                 reservations_; // null: blocks on demand
    std::map<QueueKey, Group>                     queue_;        // waiting and preempted, by key
    std::vector<Group>                            running_;      // by key
    std::vector<Group>                            pinned_;
    std::unordered_map<RequestId, SequenceGroup*> index_;
    std::vector<Scheduled>                        scheduled_;
    std::vector<Scheduled>                        next_;   // prepared
    std::vector<Write>                            writes_; // scratch, and these two
    std::vector<TableId>                          closing_;
    std::vector<std::span<const Token>>           texts_;
    std::vector<Claim>                            claims_;              // of the step at hand
    int                claimed_ = 0, claimed_rows_ = 0, n_prompts_ = 0; // together; of these, prompts
    std::vector<Ended> ended_;
    PreemptionCosts    costs_;
    SchedulerStats     stats_;
    std::uint64_t      step_ = 0, n_arrived_ = 0;
    int                most_step_tokens_ = 0; // as limit_step() says
    int                step_tokens_      = 0; // that the step at hand may have
    int                n_sequences_      = 0; // that running groups can have at once
    // The first of the queue if it could not be admitted, and what was free then.
    std::optional<RequestId> blocked_;
    int                      blocked_n_free_ = 0, blocked_n_sequences_ = 0;
    bool                     logging_ = false;
    std::vector<MemoryEvent> events_;
};

} // namespace quire

module :private;

namespace quire {

// Where prompts run whole, or memory is reserved for the longest text, no window gives anything back.
CacheLayout layout_of(const SchedulerOptions& options) {
    CacheLayout layout = options.layout;
    if (options.whole_prompts || options.reservations)
        for (CacheGroup& group : layout.groups) group.window = 0;
    return layout;
}

// Entries without memory: of what runs, forks among it, and of what the pool can still hold of other texts.
int markers_of(const SchedulerOptions& o) {
    return 2 * o.max_sequences * ((o.context + o.block_size - 1) / o.block_size + 1) + 2 * o.n_blocks;
}

Scheduler::Scheduler(const SchedulerOptions& options)
    : options_(options), blocks_({options.n_blocks, options.block_size, options.n_swap, options.free_order, chain_hash,
                                  layout_of(options), markers_of(options)}) {
    window_ = layout().widest_window();
    if (options.reservations) {
        options_.prefix_cache = false;
        reservations_         = options.reservations(options.n_blocks, options.block_size, options.context);
    }
    check(options.max_logit_rows >= options.max_sequences, "fewer rows of logits than running sequences");
    check(options.max_batch_tokens >= options.max_sequences, "a step has to hold a token of each running sequence");
    for (auto* items : {&scheduled_, &next_}) items->reserve(std::size_t(options.max_sequences));
    claims_.reserve(std::size_t(options.max_sequences));
    writes_.reserve(std::size_t(options.max_sequences));
    running_.reserve(std::size_t(options.max_sequences));
    limit_step(options.max_batch_tokens);
}

bool Scheduler::generates() const {
    return std::ranges::any_of(running_, [](const Group& g) { return g->prompt_done && g->request.generates(); });
}

void Scheduler::limit_step(int n_tokens) { most_step_tokens_ = std::clamp(n_tokens, 1, options_.max_batch_tokens); }

Scheduler::~Scheduler() = default;

// -- requests come and go

RequestBounds Scheduler::bounds() const {
    return {options_.context, options_.max_sequences, blocks_.n_blocks(), options_.block_size, layout()};
}

Result<void> Scheduler::check_request(const Request& request) const {
    if (auto ok = quire::check_request(request, bounds()); !ok) return ok;
    if (reservations_) return reservations_->check_request(request);
    return {};
}

void Scheduler::add(RequestId id, Request request) {
    auto group       = std::make_unique<SequenceGroup>();
    group->id        = id;
    group->request   = std::move(request);
    const Request& r = group->request;
    group->key       = {
        std::int64_t(step_) + std::int64_t(std::clamp(r.priority, -1'000'000, 1'000'000)) * options_.aging_steps,
        n_arrived_++};
    // Without a cache each request still finds its own blocks again: its sequences share them after a preemption.
    group->space = options_.prefix_cache ? cache_namespace(r.cache_salt) : CacheNamespace{id, ~std::uint64_t(0)};
    group->sequences.push_back(std::make_unique<Sequence>());
    group->sequences[0]->tokens     = r.prompt;
    group->sequences[0]->constraint = r.constraint;
    group->sequences[0]->reasoning  = r.reasoning;
    group->sequences[0]->mu         = r.sampling.first_mu();
    index_.emplace(id, group.get());
    queue_.emplace(group->key, std::move(group));
}

std::unique_ptr<SequenceGroup> Scheduler::remove(RequestId id) {
    const auto found = index_.find(id);
    if (found == index_.end()) return nullptr;
    SequenceGroup& group = *found->second;
    index_.erase(found);
    log(MemoryEventKind::free, group);
    Group owned;
    if (auto at = queue_.find(group.key); at != queue_.end()) {
        owned = std::move(at->second);
        queue_.erase(at);
    } else {
        for (std::vector<Group>* list : {&running_, &pinned_}) {
            auto in = std::find_if(list->begin(), list->end(), [&](const Group& g) { return g.get() == &group; });
            if (in == list->end()) continue;
            owned = std::move(*in);
            list->erase(in);
            if (list == &running_) n_sequences_ -= group.request.width();
            break;
        }
    }
    for (auto& sequence : group.sequences)
        if (sequence->table >= 0) blocks_.close_table(std::exchange(sequence->table, -1), !options_.prefix_cache);
    if (reservations_) reservations_->release(group);
    group.status = GroupStatus::finished;
    std::erase_if(scheduled_, [&](const Scheduled& item) { return item.group == &group; });
    return owned;
}

std::unique_ptr<SequenceGroup> Scheduler::remove_finished(RequestId id) {
    const auto found = index_.find(id);
    if (found == index_.end() || !found->second->sequences.empty()) return nullptr;
    return remove(id);
}

void Scheduler::end(SequenceGroup& group, FinishReason reason, std::string message) {
    ended_.push_back({group.id, reason, std::move(message)});
}

std::vector<Ended> Scheduler::take_ended() { return std::exchange(ended_, {}); }

SequenceGroup* Scheduler::find(RequestId id) const {
    const auto found = index_.find(id);
    return found == index_.end() ? nullptr : found->second;
}

int Scheduler::n_swapped() const {
    return int(std::ranges::count_if(
        queue_, [](const auto& waiting) { return waiting.second->status == GroupStatus::swapped; }));
}

// -- fork, append, free

Sequence& Scheduler::fork(SequenceGroup& group, const Sequence& parent) {
    check(int(group.sequences.size()) < 2 * group.request.width(), "more sequences than the request may have");
    if (group.spare.empty()) group.spare.push_back(std::make_unique<Sequence>());
    group.sequences.push_back(std::move(group.spare.back()));
    group.spare.pop_back();
    Sequence& child    = *group.sequences.back();
    child.tokens       = parent.tokens;
    child.n_computed   = parent.n_computed;
    child.n_new        = parent.n_new;
    child.logprob      = parent.logprob;
    child.logprobs     = parent.logprobs;
    child.finish       = FinishReason::none;
    child.constraint   = parent.constraint;
    child.waits        = false;
    child.slow_masks   = parent.slow_masks;
    child.mask_seconds = parent.mask_seconds;
    child.reasoning    = parent.reasoning;
    child.mu           = parent.mu;
    child.n_dropped    = parent.n_dropped;
    child.n_kept       = parent.n_kept;
    child.index        = int(group.sequences.size() + group.finished.size()) - 1;
    child.table        = blocks_.fork_table(parent.table);
    stats_.forks++;
    log(MemoryEventKind::fork, group, child.index);
    return child;
}

void Scheduler::free(SequenceGroup& group, Sequence& sequence, FinishReason reason) {
    auto at = std::find_if(group.sequences.begin(), group.sequences.end(),
                           [&](const auto& s) { return s.get() == &sequence; });
    check(at != group.sequences.end(), "a sequence that its group does not have was freed");
    log(MemoryEventKind::finish, group, sequence.index);
    if (sequence.table >= 0) blocks_.close_table(std::exchange(sequence.table, -1), !options_.prefix_cache);
    sequence.finish = reason;
    // Sequences whose result is not needed, such as dropped beams, are reused by the next fork.
    (reason == FinishReason::none ? group.spare : group.finished).push_back(std::move(*at));
    group.sequences.erase(at);
}

FinishReason Scheduler::ending(const SequenceGroup& group, const Sequence& sequence, bool is_end) const {
    const Request& r = group.request;
    if ((is_end && !r.ignore_end) || std::ranges::find(r.stop_tokens, sequence.tokens.back()) != r.stop_tokens.end())
        return FinishReason::stop;
    return ends_by_length(group, sequence, 0) ? FinishReason::length : FinishReason::none;
}

// With so many more tokens.
bool Scheduler::ends_by_length(const SequenceGroup& group, const Sequence& sequence, int n_more) const {
    const int n_tokens = int(sequence.tokens.size()) + n_more;
    return group.n_generated(sequence) + n_more >= group.request.max_tokens ||
           (n_tokens >= options_.context && !must_shift(group, n_tokens));
}

void Scheduler::pin(SequenceGroup& group) {
    auto at = std::find_if(running_.begin(), running_.end(), [&](const Group& g) { return g.get() == &group; });
    check(at != running_.end(), "a request that does not run was pinned");
    blocks_.pin_table(group.sequences[0]->table, group.request.prompt);
    log(MemoryEventKind::pin, group);
    n_sequences_ -= group.request.width();
    pinned_.push_back(std::move(*at));
    running_.erase(at);
}

// -- preemption: all blocks of the request that is last in the order, or none

void Scheduler::preempt_last() {
    SequenceGroup& victim = *running_.back();
    preempt(victim, blocks_, options_.preemption_mode, costs_, options_.keep_preempted, stats_);
    to_queue(running_.size() - 1);
}

// A running group that was preempted waits from now on.
void Scheduler::to_queue(std::size_t i) {
    Group group = std::move(running_[i]);
    running_.erase(running_.begin() + std::ptrdiff_t(i));
    n_sequences_ -= group->request.width();
    log(group->status == GroupStatus::swapped ? MemoryEventKind::swap_out : MemoryEventKind::recompute, *group);
    const QueueKey key = group->key;
    queue_.emplace(key, std::move(group));
}

// -- context shift: a preemption after which there are fewer tokens to compute again

bool Scheduler::must_shift(const SequenceGroup& group, int n_tokens) const {
    return n_tokens >= options_.context && !reservations_ && n_discarded(group.request, n_tokens, options_.context) > 0;
}

void Scheduler::shift(std::size_t i) {
    SequenceGroup& group = *running_[i];
    stats_.context_shifts += group.sequences.size();
    preempt(group, blocks_, PreemptionMode::recompute, costs_, options_.keep_preempted, stats_);
    forget_tokens(group, options_.context);
    to_queue(i);
}

// All sequences of a group have the same length.
void Scheduler::shift_full() {
    for (std::size_t i = running_.size(); i-- > 0;)
        if (const auto& s = running_[i]->sequences; !s.empty() && must_shift(*running_[i], int(s[0]->tokens.size())))
            shift(i);
}

// Priority preemption: the first of the queue takes the place of later requests that it can preempt, if that is enough to let it
// run. A request that has waited for long has a key that comes first, whatever its priority.
void Scheduler::preempt_for_priority() {
    if (queue_.empty() || running_.empty() || reservations_) return;
    SequenceGroup& head = *queue_.begin()->second;
    if (!can_preempt(head, *running_.back()) || fits(head, running_.size())) return;
    std::size_t first = running_.size();
    while (first > 0 && can_preempt(head, *running_[first - 1])) first--;
    if (!fits(head, first)) return; // nobody gives way for nothing
    while (running_.size() > first && !fits(head, running_.size())) {
        running_.back()->n_priority_preempted++;
        stats_.priority_preemptions++;
        preempt_last();
    }
}

// Where every row of the prompt is wanted, all of it is computed.
bool reads_cache(const SequenceGroup& group) { return !group.request.wants_all_rows() || group.prompt_done; }

// Blocks that an admission beside the first running groups must leave free: the watermark, one for the next token of each sequence of
// the group, and what the others will take until they have got as far as their windows.
int Scheduler::blocks_to_keep_free(const SequenceGroup& group, std::size_t n_running) const {
    const int sequences = group.prompt_done ? int(group.sequences.size()) : group.request.width() - 1;
    int       n         = watermark() + sequences * layout().blocks_per_entry();
    for (std::size_t i = 0; i < n_running && window() > 0; i++)
        for (const auto& s : running_[i]->sequences)
            if (!is_whole(*s)) n += std::max(blocks_at_once(*running_[i], 1) - blocks_.n_held(s->table), 0);
    return n;
}

// Whether a group that waits can be admitted in this step, once the running ones behind the first n_staying have given up theirs.
bool Scheduler::fits(SequenceGroup& group, std::size_t n_staying) {
    int width = group.request.width();
    for (std::size_t i = 0; i < n_staying; i++) width += running_[i]->request.width();
    if (width > options_.max_sequences) return false;
    closing_.clear();
    for (std::size_t i = n_staying; i < running_.size(); i++)
        for (TableId table : running_[i]->block_tables()) closing_.push_back(table);
    const int keep = n_staying == 0 ? 0 : blocks_to_keep_free(group, n_staying) + blocks_for_step(n_staying);
    return blocks_to_admit(group, closing_, n_staying == 0) + keep <= blocks_.n_free(closing_);
}

// The blocks that admit() takes from the free list, or that the group's sequences will need later. A group that runs alone needs fewer.
int Scheduler::blocks_to_admit(SequenceGroup& group, std::span<const TableId> closing, bool alone) {
    if (group.status == GroupStatus::swapped) return blocks_.blocks_to_swap_in(group.block_tables(), closing);
    const int  n = int(group.sequences[0]->tokens.size()), most = tokens_at_once(group);
    const bool whole = group.request.pin, pieces = alone && !whole && window() > 0;
    const int  least = pieces ? layout().blocks_at_once(n, options_.block_size) : std::numeric_limits<int>::max();
    const bool reads = reads_cache(group);
    texts_.clear();
    for (const auto& s : group.sequences) texts_.push_back(s->tokens);
    if (most < n) {
        const int more = int(group.sequences.size()) * layout().blocks_per_entry();
        int       all  = blocks_at_once(group);
        if (layout().keeps_all() && reads) // what is found needs no blocks
            all = blocks_.blocks_to_allocate(group.space, texts_, closing, false, blocks_.entries_for(most));
        return std::min({all + more, blocks_.n_blocks(), least});
    }
    if (!reads) return std::min(blocks_.blocks_for(n), least);
    const int all = blocks_.blocks_to_allocate(group.space, texts_, closing, whole);
    return window() > 0 && n > window() ? std::min(all, least) : all;
}

// Blocks that a sequence of a group holds while it is computed in pieces, with some more entries of what has a window.
int Scheduler::blocks_at_once(const SequenceGroup& group, int more_entries) const {
    const int all = blocks_.entries_for(int(group.sequences[0]->tokens.size())),
              n   = std::min(blocks_.entries_for(tokens_at_once(group)) + more_entries, all);
    int sum       = 0;
    for (const CacheGroup& g : layout().groups) sum += (g.window > 0 ? n : all) * g.blocks;
    return sum;
}

// What the first running groups take for their next tokens, before anybody is admitted.
int Scheduler::blocks_for_step(std::size_t n_groups) {
    writes_.clear();
    for (std::size_t i = 0; i < n_groups; i++)
        for (const auto& s : running_[i]->sequences)
            if (is_whole(*s)) writes_.push_back({s->table, int(s->tokens.size()) - s->n_new, s->n_new});
    return blocks_.blocks_to_write(writes_);
}

// -- windows: a sequence that is much longer than the window of all layers is computed with no more blocks than it needs at any one
// time. It gets those of its next tokens in each step, and gives back what lies behind the window after it.

// How many tokens of each of its sequences have blocks at once while they are computed.
int Scheduler::tokens_at_once(const SequenceGroup& group) const {
    const int n = int(group.sequences[0]->tokens.size());
    if (window() == 0 || group.request.pin) return n;
    const int chunk =
        layout().keeps_all() ? options_.max_batch_tokens : std::min(options_.max_batch_tokens, std::max(window(), 256));
    return n - window() > chunk ? window() + chunk : n;
}

// Whether a sequence has blocks for all tokens, or all but those that were just appended are computed. (While older ones are not, the
// window does not give back yet what the new ones need.)
bool Scheduler::is_whole(const Sequence& s) const {
    const int n = int(s.tokens.size()), held = blocks_.n_entries(s.table);
    return held >= blocks_.entries_for(n) ||
           (held >= blocks_.entries_for(n - s.n_new) && (window() == 0 || s.n_computed >= n - s.n_new));
}

// Whole blocks that a sequence of a group has in common with one before it, the one with which it has most; so far that one is computed
// for both. Not the last token.
std::pair<const Sequence*, int> common_beginning(const SequenceGroup& group, std::size_t i, int block_size) {
    const std::vector<Token>& tokens = group.sequences[i]->tokens;
    const Sequence*           with   = nullptr;
    int                       most   = 0;
    for (std::size_t j = 0; j < i; j++) {
        const std::vector<Token>& other = group.sequences[j]->tokens;
        const auto                same =
            std::mismatch(tokens.begin(), tokens.end(), other.begin(), other.end()).first - tokens.begin();
        const int n = std::min(int(same), int(std::min(tokens.size(), other.size())) - 1) / block_size * block_size;
        if (n > most) with = group.sequences[j].get(), most = n;
    }
    return {with, most};
}

// Blocks for the next tokens of a group whose sequences do not have all; false: there is none for any of them. The sequences go on
// side by side, a block at a time, so that what they share is there for all; what they have in common is computed once, then forked.
bool Scheduler::grow(SequenceGroup& group) {
    const int size = options_.block_size, chunk = tokens_at_once(group) - window(),
              n = int(group.sequences[0]->tokens.size());
    int end = n, computed = n;
    for (std::size_t i = 0; i < group.sequences.size(); i++) {
        Sequence& s = *group.sequences[i];
        s.growing   = true;
        if (i > 0 && s.n_computed == 0 && blocks_.n_entries(s.table) == 0) {
            const auto [other, common] = common_beginning(group, i, size);
            if (other && other->n_computed == common) {
                blocks_.close_table(s.table);
                s.table      = blocks_.fork_table(other->table);
                s.n_computed = common;
            } else if (other && other->n_computed < common) {
                if (other->growing) end = std::min(end, common);
                s.growing = false;
                continue;
            } // or it is past that, because the one that this was to follow has ended
        }
        computed = std::min(computed, s.n_computed);
    }
    const int step = std::max(size, chunk / size * size);
    bool      more = true, runs = false;
    for (int to = (computed / size + 1) * size; more; to += size) {
        to   = std::min(to, end);
        more = to < end;
        for (auto& s : group.sequences) {
            if (!s->growing) continue;
            const int from = blocks_.grow(s->table, s->tokens, s->n_computed, to, reads_cache(group));
            const int have = blocks_.n_entries(s->table) * size;
            if (!group.prompt_done && group.n_preempted == 0) group.n_cached += from - s->n_computed;
            s->n_computed = from;
            runs          = runs || std::min(have, n - 1) > from;
            more          = more && have >= to && to < from + step;
        }
    }
    return runs || std::ranges::all_of(group.sequences, [&](const auto& s) { return is_whole(*s); });
}

// -- admission

// Gives a waiting or preempted request its blocks, all or none.
bool Scheduler::admit(SequenceGroup& group, int keep_free) {
    if (reservations_) {
        if (!reservations_->reserve(group)) return false;
        Sequence& s = *group.sequences[0];
        s.table     = blocks_.open_table(group.space);
        reservations_->place_first(group, blocks_);
        check(blocks_.allocate(s.table, s.tokens, 0, false), "a chunk was reserved that is not free");
        log(MemoryEventKind::admit, group);
        return true;
    }
    if (group.status == GroupStatus::swapped) {
        const int n_blocks = blocks_.blocks_to_swap_in(group.block_tables());
        if (!blocks_.swap_in(group.block_tables(), keep_free)) return false;
        stats_.swaps_in++;
        stats_.swapped_blocks += std::uint64_t(n_blocks);
        log(MemoryEventKind::swap_in, group);
        return true;
    }
    const bool alone = running_.empty();
    const int  need  = blocks_to_admit(group, {}, alone);
    if (need + keep_free > blocks_.n_free()) return false;
    if (tokens_at_once(group) < int(group.sequences[0]->tokens.size()) ||
        (alone && window() > 0 && blocks_to_admit(group) > blocks_.n_free())) {
        for (auto& s : group.sequences) s->table = blocks_.open_table(group.space), s->n_new = 1;
        log(MemoryEventKind::admit, group);
        return true;
    }
    int left = need; // what the sequences take together
    for (std::size_t i = 0; i < group.sequences.size(); i++) {
        Sequence& s = *group.sequences[i];
        if (group.sequences.size() > 1) {
            const std::span<const Token> text = s.tokens;
            left = std::max(left - blocks_.blocks_to_allocate(group.space, std::array{text}, {}, group.request.pin), 0);
        } else {
            left = 0;
        }
        s.table = blocks_.open_table(group.space);
        s.n_new = 1;
        if (blocks_.allocate(s.table, s.tokens, keep_free + left, reads_cache(group), group.request.pin)) continue;
        for (std::size_t j = i + 1; j-- > 0;) blocks_.close_table(std::exchange(group.sequences[j]->table, -1));
        return false;
    }
    log(MemoryEventKind::admit, group);
    return true;
}

void Scheduler::claim(SequenceGroup& group) {
    group.ready     = true;
    Claim&     c    = claims_.emplace_back(claim_of(group, blocks_));
    const bool rows = group.request.wants_all_rows() && !group.prompt_done;
    if (rows && !options_.whole_prompts) c.tokens = std::min(c.tokens, options_.max_logit_rows);
    claimed_ += c.tokens;
    claimed_rows_ += rows ? c.tokens : int(group.sequences.size());
    n_prompts_ += c.prompt;
}

// Whether the step has tokens for another request: those that run leave some, or few prompts share it, whose blocks are taken
// before they are computed.
bool Scheduler::may_admit() const {
    constexpr int most_prompts = 4;
    return !queue_.empty() && claimed_rows_ < options_.max_logit_rows &&
           (claimed_ < step_tokens_ || (n_prompts_ > 0 && n_prompts_ < most_prompts && !options_.whole_prompts));
}

// Admits the first of the queue, if it can run now; no request overtakes it. So a preempted request resumes before any new one
// of its priority starts.
bool Scheduler::admit_next() {
    SequenceGroup& head = *queue_.begin()->second;
    if (n_sequences_ + head.request.width() > options_.max_sequences) return false;
    const bool alone = running_.empty();
    if (!admit(head, alone ? 0 : blocks_to_keep_free(head, running_.size()))) {
        if (alone) {
            // No block will ever become free: pins keep them, or it outgrew the pool before it was preempted.
            const bool fresh = head.n_preempted == 0;
            end(head, fresh ? FinishReason::refused : FinishReason::length,
                fresh ? too_large(head.request, bounds(), blocks_.n_blocks() - blocks_.n_pinned()) : "");
        }
        return false;
    }
    if (head.status == GroupStatus::waiting) {
        // Memory for all it may generate, so that the step loop allocates none for a token.
        const std::size_t most =
            std::min(std::size_t(options_.context),
                     head.request.prompt.size() + std::size_t(std::max(head.request.max_tokens, 0)));
        while (int(head.spare.size()) + 1 < head.request.width()) head.spare.push_back(std::make_unique<Sequence>());
        for (auto* list : {&head.sequences, &head.spare})
            for (auto& s : *list) s->tokens.reserve(most);
        head.sequences.reserve(std::size_t(head.request.width()));
        head.tables.reserve(std::size_t(head.request.width()));
    }
    head.status = GroupStatus::running;
    head.ready  = false; // as it may have been left by the step before its preemption
    n_sequences_ += head.request.width();
    Group group = std::move(queue_.begin()->second);
    queue_.erase(queue_.begin());
    const auto at = std::find_if(running_.begin(), running_.end(), [&](const Group& g) { return head.key < g->key; });
    running_.insert(at, std::move(group));
    if (!head.waits() && allocate_slots(head)) claim(head);
    return true;
}

// -- one step

// Slots for the next token of each sequence, for all of a group or none. A prompt has its slots since admission, but a block
// that is shared may have to be copied now.
bool Scheduler::allocate_slots(SequenceGroup& group) {
    if (reservations_ && group.sequences.size() > 1) reservations_->place_forks(group, blocks_);
    const auto whole = [&](const auto& s) { return is_whole(*s); };
    if (!std::ranges::all_of(group.sequences, whole) && !grow(group)) return false;
    writes_.clear();
    for (const auto& s : group.sequences) {
        const int n = int(s->tokens.size());
        if (whole(s) && !blocks_.must_wait(s->table, n)) writes_.push_back({s->table, n - s->n_new, s->n_new});
    }
    return blocks_.allocate_slots(writes_);
}

// Every group that has its slots runs its share, in the order of their keys.
void Scheduler::run_shares() {
    share_step(claims_, step_tokens_);
    StepBudget budget{step_tokens_, options_.max_logit_rows, 0, 0};
    for (const Group& g : running_)
        if (g->ready && !options_.whole_prompts)
            budget.others += g->share, budget.other_rows += int(g->sequences.size());
    for (const Group& g : running_) {
        if (!g->ready) continue;
        if (!options_.whole_prompts) budget.others -= g->share, budget.other_rows -= int(g->sequences.size());
        schedule_chunks(*g, blocks_, options_.whole_prompts, budget, scheduled_);
    }
}

std::span<const Scheduled> Scheduler::schedule(StepPlan& plan) {
    plan.clear();
    scheduled_.clear();
    blocked_.reset();
    step_++;
    const std::optional<RequestId> head = queue_.empty() ? std::nullopt : std::optional(queue_.begin()->second->id);
    // At least a token for each sequence.
    step_tokens_ = std::max(most_step_tokens_, std::min(n_sequences_ + 1, options_.max_batch_tokens));
    shift_full(); // first: in the queue a full sequence would keep all of its tokens
    preempt_for_priority();

    claims_.clear();
    claimed_ = claimed_rows_ = n_prompts_ = 0;
    for (const Group& g : running_) g->ready = false;
    bool preempted = false;
    for (std::size_t i = 0; i < running_.size();) {
        SequenceGroup& group = *running_[i];
        if (group.waits()) {
            i++;
            continue;
        }
        if (allocate_slots(group)) {
            claim(group);
            i++;
            continue;
        }
        if (running_.size() == 1) { // alone, and the whole pool is too small, unless a preemption has just freed blocks
            // An answer that goes on with half of its tokens may have room.
            const bool shifts =
                !reservations_ && group.prompt_done &&
                n_discarded(group.request, int(group.sequences[0]->tokens.size()), options_.context) > 0;
            if (!preempted && shifts) shift(i);
            else if (!preempted) end(group, FinishReason::length);
            preempted = true;
            break;
        }
        preempted = true;
        preempt_last();
    }
    const bool open  = !preempted && (!reservations_ || reservations_->joins() || running_.empty());
    bool       tried = false;
    while (open && may_admit()) {
        tried = true;
        if (!admit_next()) break;
    }
    if (tried && !queue_.empty() && queue_.begin()->second->id == head) { // blocks or sequences were missing
        blocked_             = head;
        blocked_n_free_      = blocks_.n_free();
        blocked_n_sequences_ = n_sequences_;
    }
    run_shares();

    plan_items(scheduled_, blocks_, plan);
    blocks_.take_moves(plan.moves);
    stats_.copied_blocks += plan.moves.copies.size();
    if (logging_) {
        for (auto [from, to] : plan.moves.copies) events_.push_back({MemoryEventKind::copy, 0, 0, from, to});
        for (auto [from, to] : plan.moves.swap_out) events_.push_back({MemoryEventKind::swap_out, 0, 0, from, to});
        for (auto [from, to] : plan.moves.swap_in) events_.push_back({MemoryEventKind::swap_in, 0, 0, from, to});
    }
    return scheduled_;
}

// Nobody waits, or the first one could not be admitted and no more blocks and sequences are free now than were then.
bool Scheduler::queue_waits() const {
    return queue_.empty() || (blocked_ == queue_.begin()->second->id && blocks_.n_free() <= blocked_n_free_ &&
                              n_sequences_ >= blocked_n_sequences_);
}

bool Scheduler::prepare(StepPlan& plan) {
    next_.clear();
    plan.clear();
    writes_.clear();
    if (!queue_waits() || !std::ranges::all_of(scheduled_, &Scheduled::samples)) return false;
    std::size_t n_running = 0;
    for (const Group& group : running_) {
        const Request& r = group->request;
        // Beams fork, and so do several answers after their prompt; a prompt that generates nothing ends.
        if (r.beam_width > 0 || !r.generates() || (!group->prompt_done && r.width() > 1)) return false;
        for (const auto& s : group->sequences) {
            n_running++;
            const int position = int(s->tokens.size()); // of the token that this step gives it
            if (ends_by_length(*group, *s, 1)) continue;
            if (must_shift(*group, position + 1)) {
                next_.clear();
                return false;
            }
            next_.push_back({group.get(), s.get(), position, 1, 0, 1, true});
            writes_.push_back({s->table, position, 1});
        }
    }
    // Every sequence is in this step, and each gets a slot in the next, without a copy: whose source would not be free until the
    // step after this one, whatever ends in between.
    if (n_running != scheduled_.size() || !blocks_.allocate_slots(writes_, false)) {
        next_.clear();
        return false;
    }
    plan_items(next_, blocks_, plan);
    return !next_.empty();
}

std::span<const Scheduled> Scheduler::adopt(StepPlan& plan) {
    scheduled_.clear();
    std::swap(scheduled_, next_);
    std::size_t n    = 0;
    bool        same = queue_waits();
    for (const Group& group : running_)
        for (const auto& s : group->sequences) {
            same = same && n < scheduled_.size() && scheduled_[n].sequence == s.get() && !s->waits &&
                   scheduled_[n].first + 1 == int(s->tokens.size());
            if (same) plan.tokens[n++] = s->tokens.back();
        }
    if (!same || n != scheduled_.size()) scheduled_.clear();
    step_ += !scheduled_.empty();
    return scheduled_;
}

void Scheduler::put_off(const SequenceGroup& group) {
    for (Scheduled& item : scheduled_)
        if (item.group == &group && std::exchange(item.samples, false)) item.again = true;
}

void Scheduler::commit() {
    blocks_.commit();
    for (const Scheduled& item : scheduled_) {
        Sequence& s  = *item.sequence;
        s.n_computed = item.first + item.n_tokens - int(item.again);
        s.n_new      = std::clamp(int(s.tokens.size()) - s.n_computed, 1, s.n_new);
        blocks_.publish(s.table, s.tokens, s.n_computed);
        // The next query stands at n_computed. A pinned prefix is kept whole.
        if (window() > 0 && !item.group->request.pin)
            stats_.released_blocks += std::uint64_t(blocks_.release_behind(s.table, s.n_computed));
    }
    std::uint64_t entries = 0;
    for (const Group& group : running_) {
        for (const auto& s : group->sequences) entries += std::uint64_t(blocks_.n_held(s->table));
        // Sharing changes only when blocks fill up, and counting costs time: a sample of the steps is enough.
        if (group->sequences.size() > 1 && (step_ % 8 == 0 || group->sharing.without == 0)) measure_sharing(*group);
    }
    stats_.sharing.without += entries;
    stats_.sharing.with += std::min(entries, std::uint64_t(blocks_.n_used()));
}

void Scheduler::measure_sharing(SequenceGroup& group) {
    for (const auto& s : group.sequences) group.sharing.without += std::uint64_t(blocks_.n_held(s->table));
    group.sharing.with += std::uint64_t(blocks_.distinct_blocks(group.block_tables()));
}

MemoryUse Scheduler::memory_use() const {
    return reservations_ ? reservations_->memory_use(running_) : quire::memory_use(running_, pinned_, blocks_);
}

// -- for display

void Scheduler::log(MemoryEventKind kind, const SequenceGroup& group, int index) {
    if (logging_) events_.push_back({kind, group.id, index, -1, -1});
}

void Scheduler::log_events(bool on) {
    logging_ = on;
    events_.clear();
    blocks_.log_to(on ? &events_ : nullptr);
}

void Scheduler::view(Snapshot& snapshot) {
    snapshot.step = step_;
    blocks_.view(snapshot);
    snapshot.sequences.clear();
    snapshot.events = std::exchange(events_, {});
    for (const Group& group : pinned_) quire::view(*group, ViewStatus::pinned, blocks_, snapshot);
    for (const Group& group : running_) quire::view(*group, ViewStatus::running, blocks_, snapshot);
    for (const auto& [key, group] : queue_)
        quire::view(*group,
                    group->status == GroupStatus::swapped     ? ViewStatus::swapped
                    : group->status == GroupStatus::preempted ? ViewStatus::preempted
                                                              : ViewStatus::waiting,
                    blocks_, snapshot);
}

std::span<const Token> Scheduler::tokens(RequestId id, int index) const {
    if (const auto found = index_.find(id); found != index_.end())
        for (const auto& s : found->second->sequences)
            if (s->index == index) return s->tokens;
    return {};
}

void Scheduler::check_invariants() const {
    blocks_.check_invariants();
    int         sequences = 0;
    std::size_t groups    = queue_.size() + running_.size() + pinned_.size();
    check(groups == index_.size(), "a request is lost, or in two places");
    for (std::size_t i = 0; i < running_.size(); i++) {
        const SequenceGroup& group = *running_[i];
        sequences += group.request.width();
        check(group.status == GroupStatus::running, "a request among the running ones does not run");
        check(i == 0 || running_[i - 1]->key < group.key, "running requests are not in the order of their keys");
        for (const auto& s : group.sequences) {
            const int have = blocks_.n_entries(s->table);
            check(have >= blocks_.entries_for(s->n_computed), "a sequence has fewer blocks than its tokens need");
            check(have <= blocks_.entries_for(int(s->tokens.size())),
                  "a sequence has more blocks than its tokens need");
            check(!blocks_.is_swapped(s->table), "a running sequence is swapped out");
        }
    }
    check(sequences == n_sequences_ && sequences <= options_.max_sequences, "more sequences run than may");
    for (const auto& [key, group] : queue_)
        for (const auto& s : group->sequences) {
            const bool swapped = group->status == GroupStatus::swapped;
            check((s->table >= 0) == swapped, "swapped: all sequences of a request, or none");
            check(!swapped || blocks_.is_swapped(s->table), "a swapped sequence has blocks on the device");
        }
}

} // namespace quire
