// quire.schedule.scheduler: decides in each step which tokens of which sequences run: continuous batching with admission, chunked
// prefill and preemption (the paper, section 4.5). **Owns** the lists of requests and the block manager. Handles no tensors and no text.
export module quire.schedule.scheduler;

import quire.core.base;
export import quire.paging.block;
import quire.paging.block_hash;
export import quire.paging.cache_layout; // CacheLayout
export import quire.paging.snapshot;
export import quire.schedule.batch; // Scheduled
import quire.schedule.block_demand;
import quire.schedule.block_supply;
import quire.schedule.checkpoints;
import quire.schedule.chunks;
import quire.schedule.context_limit;
import quire.schedule.group_lists;
export import quire.schedule.preemption; // PreemptionMode
export import quire.schedule.request;
export import quire.schedule.request_check; // FieldFault
export import quire.schedule.reservation;   // MakeReservations, MemoryUse
export import quire.schedule.sequence;      // Sequence, SequenceGroup
import quire.schedule.step_ahead;
export import quire.schedule.step_end; // StepStats
export import quire.step.plan;

export namespace quire {

struct SchedulerOptions {
    int            n_blocks         = 0;
    int            block_size       = 16;
    int            context          = 0;   // longest sequence in tokens
    int            max_batch_tokens = 512; // in one step, including chunks of prompts
    int            max_sequences    = 16;  // running at once
    int            max_logit_rows   = 64;  // in one step; at least max_sequences
    bool           prefix_cache     = true;
    int            n_swap           = 0; // blocks of the host pool, for swapped requests
    int            n_tier           = 0; // more blocks there, for what leaves the prefix cache
    ForFiles       for_files        = ForFiles::none;
    PreemptionMode preemption_mode  = PreemptionMode::automatic;
    bool           whole_prompts    = false; // a prompt runs in one step: its tokens see the tokens after them
    double         watermark = 0.04; // fraction of the blocks kept free when a request is admitted while others run
    // A request that is computed again uses those of its blocks that no other request has taken.
    bool             keep_preempted = true;
    MakeReservations reservations = {}; // of contiguous memory, without swap and prefix cache; empty: blocks on demand
    int aging_steps = 1000; // after waiting so many steps a request counts as one priority level more urgent
    std::vector<BlockId> free_order = {}; // see BlockManagerOptions
    CacheLayout          layout     = {}; // n_blocks, n_swap and n_tier are blocks of it
    int checkpoint_interval = 0; // tokens between two recurrent states that stay in the prefix cache; 0: none does
    int vocab_size          = 0; // see RequestBounds; so are the end tokens
    std::vector<Token> end_tokens = {};
    // Of salts; the same in all processes only where a function says so.
    std::function<CacheNamespace(std::string_view salt)> namespaces = cache_namespace;
    // Of the content of each adapter that a request can name.
    std::vector<std::uint64_t> adapter_hashes = {};
};

// A request that the scheduler itself ended.
struct Ended {
    RequestId    id     = 0;
    FinishReason finish = FinishReason::length; // it outgrew the whole pool while alone; or refused
    std::string  message;
};

struct SchedulerStats : PreemptionStats, StepStats {
    std::uint64_t copied_blocks  = 0; // copy-on-write
    std::uint64_t forks          = 0;
    std::uint64_t context_shifts = 0; // sequences that forgot tokens
    SharingStats  sharing;            // of all requests together, each step
};

class Scheduler {
public:
    explicit Scheduler(const SchedulerOptions& options);
    ~Scheduler();

    // Any thread. Error: why the request can never run, with the numbers. find_fault(): why it cannot run with any prompt.
    Result<void>              check_request(const Request& request) const;
    std::optional<FieldFault> find_fault(const Request& request) const { return quire::find_fault(request, bounds()); }
    // Puts a request that check_request() accepted into the queue.
    void add(RequestId id, Request request);
    // Removes a request in any state and frees its blocks at once. Null: the request does not exist (any more).
    std::unique_ptr<SequenceGroup> remove(RequestId id);
    // Removes a request whose sequences have all been freed. Null: some have not; a pinned prefix stays.
    std::unique_ptr<SequenceGroup> remove_finished(RequestId id);

    // Fills `plan` with the next step, and returns its sequences; the list is valid until the next call. If nothing can run, both are
    // empty except for the plan's block moves. The caller must run the plan and then call commit().
    std::span<const Scheduled> schedule(StepPlan& plan);
    void                       commit();

    // While a step runs, before its commit(): plans the next step. Assumes that every sequence gets a token, that no token is an end
    // token, and that no request comes or goes. The token ids stay open. False: the next step needs more; use schedule().
    bool prepare(StepPlan& plan);
    // Instead of schedule(): the step that prepare() planned, with its token ids; empty if an assumption was wrong.
    std::span<const Scheduled> adopt(StepPlan& plan);

    // Before any request: a step of one sequence of n tokens, with as many rows of logits, to measure. It must run at once, and needs no commit().
    // False: there is no room for it.
    bool plan_trial(int n, StepPlan& plan);
    // While a step runs: the group's sequences get no token from it. Their last tokens run again when none of the sequences waits.
    void put_off(const SequenceGroup& group);
    // After commit(): draft tokens 1 .. n of the item are right. The results of the step for them are valid.
    void accept(const Scheduled& item, int n) { step_end_.accept(item, n); }
    // No more draft tokens of the item are right, or can be checked: what was computed for the others is taken back.
    void end_drafts(const Scheduled& item) { step_end_.end_drafts(item); }

    // -- decoding methods use fork, append and free (the paper, section 5.2), between commit() and the next schedule()

    // Another sequence with the same tokens and blocks.
    Sequence& fork(SequenceGroup& group, const Sequence& parent);
    // `forced`: the token was not sampled; it runs in one step with the sampled token before it. Only where a group has one sequence.
    void append(Sequence& sequence, Token token, bool forced = false) {
        sequence.tokens.push_back(token);
        sequence.n_new = forced ? sequence.n_new + 1 : 1;
        if (sequence.constraint) sequence.constraint->push(token);
        if (sequence.reasoning) sequence.reasoning->accept(token);
    }
    // Ends one sequence of a group and frees its blocks; its tokens move to group.finished.
    void free(SequenceGroup& group, Sequence& sequence, FinishReason reason);
    // Why a sequence ends with its last token, or `none`; `is_end`: the last token is an end token.
    FinishReason ending(const SequenceGroup& group, const Sequence& sequence, bool is_end) const {
        return limit_.ending(group, sequence, is_end);
    }
    // Whether a token can be appended that is not sampled.
    bool can_force(const SequenceGroup& group, const Sequence& sequence) const {
        return limit_.can_force(group, sequence);
    }
    // Pins the prompt's blocks of a request with `pin`, until remove().
    void pin(SequenceGroup& group);

    // Null: the request does not exist (any more).
    SequenceGroup*     find(RequestId id) const { return lists_.find(id); }
    std::vector<Ended> take_ended() { return std::exchange(ended_, {}); }
    void               set_costs(const PreemptionCosts& costs) { costs_ = costs; }
    // From now on a step has at most n_tokens tokens, up to max_batch_tokens; it has a token of each sequence in any case.
    void limit_step(int n_tokens);

    bool idle() const { return lists_.running().empty() && lists_.n_waiting() == 0; }
    // In the order of their keys.
    std::span<const std::unique_ptr<SequenceGroup>> running() const { return lists_.running(); }
    MemoryUse                                       memory_use() const; // what the slots are used for
    int                                             n_running() const { return int(running().size()); }
    bool                                            generates() const;     // whether some request is past its prompt
    int                   n_waiting() const { return lists_.n_waiting(); } // requests, preempted ones among them
    int                   n_swapped() const { return lists_.n_swapped(); } // of the waiting requests
    const SchedulerStats& stats() const { return stats_; }
    const BlockManager&   blocks() const { return blocks_; }
    BlockManager&         blocks() { return blocks_; } // for the tiers behind it
    CacheNamespace        namespace_of(const Request& request) const;
    // Blocks, sequences and the events since the last call, for display.
    void                     view(Snapshot& snapshot);
    void                     log_events(bool on); // for view(); off at first
    void                     log_cache(bool on) { blocks_.log_cache(on); }
    std::vector<CacheChange> take_cache_changes() { return blocks_.take_cache_changes(); }
    // The tokens of one sequence; empty: the sequence does not exist.
    std::span<const Token> tokens(RequestId id, int index) const;
    void                   check_invariants() const;

private:
    using Group = GroupLists::Group;

    void          preempt_for_priority();
    bool          fits(SequenceGroup& group, std::size_t n_staying);
    bool          admit(SequenceGroup& group);
    bool          admit_next();
    void          preempt_last();
    void          shift_full();
    void          shift(std::size_t i);
    void          to_queue(std::size_t i);
    bool          queue_waits() const;
    void          give_back(const SequenceGroup& group, Sequence& sequence);
    void          end(const SequenceGroup& group, FinishReason reason, std::string message = {});
    void          take_moves(BlockMoves& moves);
    void          measure_sharing(SequenceGroup& group);
    void          log(MemoryEventKind kind, const SequenceGroup& group, int index = 0);
    RequestBounds bounds() const;

    SchedulerOptions              options_;
    BlockManager                  blocks_;
    GroupLists                    lists_;
    ContextLimit                  limit_;
    Checkpoints                   checkpoints_;
    std::unique_ptr<Reservations> reservations_; // null: blocks on demand
    BlockDemand                   demand_;
    BlockSupply                   supply_;
    StepShares                    shares_; // of the step at hand
    StepAhead                     ahead_;
    SchedulerStats                stats_;
    StepEnd                       step_end_; // of the step that has run
    std::vector<Scheduled>        scheduled_;
    std::vector<Ended>            ended_;
    PreemptionCosts               costs_;
    std::uint64_t                 step_ = 0, n_arrived_ = 0;
    int                           most_step_tokens_ = 0; // see limit_step()
    // The first request of the queue if it could not be admitted, and how much was free then.
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

// In whole blocks of tokens. Without a cache a request could find its own states after a preemption only: they are not worth their memory.
int checkpoint_interval_of(const SchedulerOptions& o) {
    if (!o.layout.keeps_state() || !o.prefix_cache) return 0;
    return (o.checkpoint_interval + o.block_size - 1) / o.block_size * o.block_size;
}

Scheduler::Scheduler(const SchedulerOptions& options)
    : options_(options),
      blocks_({options.n_blocks, options.block_size, options.n_swap, options.free_order, chain_hash, layout_of(options),
               markers_for(options.n_blocks, options.block_size, options.max_sequences, options.context),
               options.prefix_cache && !options.reservations ? options.n_tier : 0, options.for_files}),
      lists_(options.max_sequences), limit_{.context = options.context, .shifts = !options.reservations},
      checkpoints_{.interval = checkpoint_interval_of(options), .block_size = options.block_size},
      reservations_(options.reservations ? options.reservations(options.n_blocks, options.block_size, options.context)
                                         : nullptr),
      demand_(blocks_, checkpoints_, options.max_batch_tokens, int(double(blocks_.n_blocks()) * options.watermark)),
      supply_(blocks_, demand_, reservations_.get()),
      shares_(options.max_sequences, options.max_logit_rows, options.whole_prompts, checkpoints_),
      ahead_(blocks_, demand_, limit_, checkpoints_, options.max_sequences),
      step_end_(blocks_, checkpoints_, demand_.window(), stats_) {
    if (reservations_) options_.prefix_cache = false;
    check(options.max_logit_rows >= options.max_sequences, "fewer rows of logits than running sequences");
    check(options.max_batch_tokens >= options.max_sequences, "a step has to hold a token of each running sequence");
    scheduled_.reserve(std::size_t(options.max_sequences));
    limit_step(options.max_batch_tokens);
}

bool Scheduler::generates() const {
    return std::ranges::any_of(running(), [](const Group& g) { return g->prompt_done && g->request.generates(); });
}

void Scheduler::limit_step(int n_tokens) { most_step_tokens_ = std::clamp(n_tokens, 1, options_.max_batch_tokens); }

Scheduler::~Scheduler() = default;

CacheNamespace Scheduler::namespace_of(const Request& request) const {
    std::string adapters; // the content and the scale of each
    if (request.adapters)
        for (const AdapterUse& use : *request.adapters) {
            const std::uint64_t hash = options_.adapter_hashes[std::size_t(use.adapter)];
            adapters.append(reinterpret_cast<const char*>(&hash), sizeof hash);
            adapters.append(reinterpret_cast<const char*>(&use.scale), sizeof use.scale);
        }
    return with_adapters(options_.namespaces(request.cache_salt), adapters);
}

// -- requests come and go

RequestBounds Scheduler::bounds() const {
    return {.context       = options_.context,
            .max_sequences = options_.max_sequences,
            .n_blocks      = blocks_.n_blocks(),
            .block_size    = options_.block_size,
            .layout        = blocks_.layout(),
            .vocab_size    = options_.vocab_size,
            .end_tokens    = options_.end_tokens};
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
    group->space = options_.prefix_cache && r.uses_cache ? namespace_of(r) : CacheNamespace::temporary(id);
    group->sequences.push_back(std::make_unique<Sequence>());
    group->sequences[0]->tokens     = r.prompt;
    group->sequences[0]->constraint = r.constraint;
    group->sequences[0]->reasoning  = r.reasoning;
    group->sequences[0]->mu         = r.sampling.first_mu();
    lists_.add(std::move(group));
}

// Closes the block table of a sequence.
void Scheduler::give_back(const SequenceGroup& group, Sequence& sequence) {
    if (sequence.table < 0) return;
    const bool forgets = group.space.is_temporary();
    if (!forgets) stats_.checkpoints += blocks_.keep_last(sequence.table, sequence.tokens);
    blocks_.close_table(std::exchange(sequence.table, -1), forgets);
}

std::unique_ptr<SequenceGroup> Scheduler::remove(RequestId id) {
    SequenceGroup* const group = find(id);
    if (!group) return nullptr;
    log(MemoryEventKind::free, *group);
    Group owned = lists_.remove(*group);
    for (auto& sequence : group->sequences) give_back(*group, *sequence);
    if (reservations_) reservations_->release(*group);
    group->status = GroupStatus::finished;
    std::erase_if(scheduled_, [&](const Scheduled& item) { return item.group == group; });
    return owned;
}

std::unique_ptr<SequenceGroup> Scheduler::remove_finished(RequestId id) {
    const SequenceGroup* group = find(id);
    return group && group->sequences.empty() ? remove(id) : nullptr;
}

void Scheduler::end(const SequenceGroup& group, FinishReason reason, std::string message) {
    ended_.push_back({group.id, reason, std::move(message)});
}

// -- fork, append, free

Sequence& Scheduler::fork(SequenceGroup& group, const Sequence& parent) {
    check(int(group.sequences.size()) < 2 * group.request.width(), "more sequences than the request may have");
    if (group.spare.empty()) group.spare.push_back(std::make_unique<Sequence>());
    group.sequences.push_back(std::move(group.spare.back()));
    group.spare.pop_back();
    Sequence& child = *group.sequences.back();
    child           = parent;
    child.finish    = FinishReason::none;
    child.waits     = false;
    child.index     = int(group.sequences.size() + group.finished.size()) - 1;
    child.table     = blocks_.fork_table(parent.table);
    stats_.forks++;
    log(MemoryEventKind::fork, group, child.index);
    return child;
}

void Scheduler::free(SequenceGroup& group, Sequence& sequence, FinishReason reason) {
    auto at = std::find_if(group.sequences.begin(), group.sequences.end(),
                           [&](const auto& s) { return s.get() == &sequence; });
    check(at != group.sequences.end(), "a sequence that its group does not have was freed");
    log(MemoryEventKind::finish, group, sequence.index);
    give_back(group, sequence);
    sequence.finish = reason;
    // Sequences whose result is not needed, such as dropped beams, are reused by the next fork.
    (reason == FinishReason::none ? group.spare : group.finished).push_back(std::move(*at));
    group.sequences.erase(at);
}

void Scheduler::pin(SequenceGroup& group) {
    blocks_.pin_table(group.sequences[0]->table, group.request.prompt);
    log(MemoryEventKind::pin, group);
    lists_.pin(group);
}

// -- preemption: the last request in the order gives up all its blocks

void Scheduler::preempt_last() {
    SequenceGroup& victim = *running().back();
    preempt(victim, blocks_, options_.preemption_mode, costs_, options_.keep_preempted, stats_);
    to_queue(running().size() - 1);
}

// A running group that was preempted waits from now on.
void Scheduler::to_queue(std::size_t i) {
    const SequenceGroup& group = *running()[i];
    for (const auto& s : group.sequences) s->n_drafts = 0;
    log(group.status == GroupStatus::swapped ? MemoryEventKind::swap_out : MemoryEventKind::recompute, group);
    lists_.to_queue(i);
}

// -- context shift: a preemption after which fewer tokens are computed again

void Scheduler::shift(std::size_t i) {
    SequenceGroup& group = *running()[i];
    stats_.context_shifts += group.sequences.size();
    preempt(group, blocks_, PreemptionMode::recompute, costs_, options_.keep_preempted, stats_);
    limit_.forget_tokens(group);
    to_queue(i);
}

// All sequences of a group have the same length.
void Scheduler::shift_full() {
    for (std::size_t i = running().size(); i-- > 0;) {
        const SequenceGroup& group = *running()[i];
        if (!group.sequences.empty() && limit_.must_shift(group.request, int(group.sequences[0]->tokens.size())))
            shift(i);
    }
}

// -- admission

// Whether a waiting group can be admitted in this step, once the running groups behind the first n_staying have given up their blocks.
bool Scheduler::fits(SequenceGroup& group, std::size_t n_staying) {
    return lists_.has_places(group, n_staying) && demand_.fits(group, running(), n_staying);
}

// Priority preemption: the first request of the queue takes the place of later requests that it can preempt, if it can run then.
// A request that has waited for long has a key that comes first, whatever its priority.
void Scheduler::preempt_for_priority() {
    if (lists_.n_waiting() == 0 || running().empty() || reservations_) return;
    SequenceGroup& head = *lists_.first_waiting();
    if (!can_preempt(head, *running().back()) || fits(head, running().size())) return;
    std::size_t first = running().size();
    while (first > 0 && can_preempt(head, *running()[first - 1])) first--;
    if (!fits(head, first)) return; // no request gives way for nothing
    while (running().size() > first && !fits(head, running().size())) {
        running().back()->n_priority_preempted++;
        stats_.priority_preemptions++;
        preempt_last();
    }
}

// Gives a waiting or preempted request its memory, all or none.
bool Scheduler::admit(SequenceGroup& group) {
    const bool swapped = group.status == GroupStatus::swapped, alone = running().empty();
    if (reservations_) {
        if (!reservations_->reserve(group)) return false;
        supply_.place(group);
    } else if (!supply_.admit(group, alone ? 0 : demand_.to_keep_free(group, running()), alone, stats_)) {
        return false;
    }
    log(swapped ? MemoryEventKind::swap_in : MemoryEventKind::admit, group);
    return true;
}

// Admits the first request of the queue, if it can run now; no request overtakes it. So a preempted request resumes before a new request
// of its priority starts.
bool Scheduler::admit_next() {
    SequenceGroup& head = *lists_.first_waiting();
    if (!lists_.has_places(head, running().size())) return false;
    if (!admit(head)) {
        if (running().empty()) {
            // No block will ever become free: pins keep them, or it outgrew the pool before it was preempted.
            const bool fresh = head.n_preempted == 0;
            end(head, fresh ? FinishReason::refused : FinishReason::length,
                fresh ? too_large(head.request, bounds(), blocks_.n_blocks() - blocks_.n_pinned()) : "");
        }
        return false;
    }
    if (head.status == GroupStatus::waiting) {
        // Memory for all tokens that it may generate, so that the step loop allocates none.
        const std::size_t most =
            std::min(std::size_t(options_.context),
                     head.request.prompt.size() + std::size_t(std::max(head.request.max_tokens, 0)));
        while (int(head.spare.size()) + 1 < head.request.width()) head.spare.push_back(std::make_unique<Sequence>());
        for (auto* list : {&head.sequences, &head.spare})
            for (auto& s : *list) s->tokens.reserve(most);
        head.sequences.reserve(std::size_t(head.request.width()));
        head.tables.reserve(std::size_t(head.request.width()));
    }
    head.ready = false; // as it may have been left by the step before its preemption
    lists_.start_first();
    if (!head.waits() && supply_.allocate_slots(head)) shares_.add(head, blocks_);
    return true;
}

// -- one step

std::span<const Scheduled> Scheduler::schedule(StepPlan& plan) {
    plan.clear();
    scheduled_.clear();
    blocked_.reset();
    step_++;
    const SequenceGroup* const head = lists_.first_waiting();
    // At least a token for each sequence.
    const int n_tokens = std::max(most_step_tokens_, std::min(lists_.n_sequences() + 1, options_.max_batch_tokens));
    shift_full(); // first: in the queue a full sequence would keep all of its tokens
    preempt_for_priority();

    shares_.begin(n_tokens, running());
    bool preempted = false;
    for (std::size_t i = 0; i < running().size();) {
        SequenceGroup& group = *running()[i];
        if (group.waits()) {
            i++;
            continue;
        }
        if (!reservations_ && demand_.outgrows(group)) {
            if (limit_.can_shift(group.request, int(group.sequences[0]->tokens.size()))) {
                shift(i);
            } else {
                end(group, FinishReason::length);
                i++;
            }
            continue;
        }
        if (supply_.allocate_slots(group)) {
            shares_.add(group, blocks_);
            i++;
            continue;
        }
        if (blocks_.drop_last()) continue; // what an answer's end may need gives way to what it needs now
        if (running().size() == 1) {
            // Alone, and the whole pool is too small, unless a preemption has just freed blocks.
            // An answer that goes on with half of its tokens may have room.
            const bool shifts =
                group.prompt_done && limit_.can_shift(group.request, int(group.sequences[0]->tokens.size()));
            if (!preempted && shifts) shift(i);
            else if (!preempted) end(group, FinishReason::length);
            preempted = true;
            break;
        }
        preempted = true;
        preempt_last();
    }
    const bool open  = !preempted && (!reservations_ || reservations_->joins() || running().empty());
    bool       tried = false;
    while (open && lists_.n_waiting() > 0 && shares_.has_room()) {
        tried = true;
        if (!admit_next()) break;
    }
    if (tried && head && lists_.first_waiting() == head) { // blocks or sequences were missing
        blocked_             = head->id;
        blocked_n_free_      = blocks_.n_free();
        blocked_n_sequences_ = lists_.n_sequences();
    }
    const int kept = lists_.n_sequences() * blocks_.layout().blocks_per_entry(); // for the next tokens of all
    for (const Group& group : running())
        if (group->ready) supply_.allocate_drafts(*group, kept);
    shares_.schedule(running(), blocks_, scheduled_);

    plan_items(scheduled_, blocks_, plan);
    take_moves(plan.moves);
    return scheduled_;
}

bool Scheduler::plan_trial(int n, StepPlan& plan) {
    plan.clear();
    SequenceGroup group;
    Sequence&     s = *group.sequences.emplace_back(std::make_unique<Sequence>());
    s.tokens.assign(std::size_t(n), 0);
    s.table = blocks_.open_table();
    std::array item{Scheduled{&group, &s, 0, n, 0, n}};
    const bool fits = blocks_.allocate(s.table, s.tokens, 0, false) && blocks_.allocate_slots(s.table, 0, n);
    if (fits) plan_items(item, blocks_, plan);
    blocks_.close_table(s.table, true);
    return fits;
}

void Scheduler::take_moves(BlockMoves& moves) {
    blocks_.take_moves(moves);
    stats_.copied_blocks += moves.copies.size();
    if (!logging_) return;
    for (auto [from, to] : moves.copies) events_.push_back({MemoryEventKind::copy, 0, 0, from, to});
    for (auto [from, to] : moves.swap_out) events_.push_back({MemoryEventKind::swap_out, 0, 0, from, to});
    for (auto [from, to] : moves.swap_in) events_.push_back({MemoryEventKind::swap_in, 0, 0, from, to});
}

// No request waits, or the first one could not be admitted, and no more blocks and sequences are free now than then.
bool Scheduler::queue_waits() const {
    const SequenceGroup* const head = lists_.first_waiting();
    return !head || (blocked_ == head->id && blocks_.n_free() <= blocked_n_free_ &&
                     lists_.n_sequences() >= blocked_n_sequences_);
}

bool Scheduler::prepare(StepPlan& plan) {
    ahead_.drop();
    const auto gets_one = [](const Scheduled& item) { return item.samples && item.n_drafts == 0; };
    return queue_waits() && std::ranges::all_of(scheduled_, gets_one) &&
           ahead_.prepare(running(), scheduled_.size(), plan);
}

std::span<const Scheduled> Scheduler::adopt(StepPlan& plan) {
    const bool same = queue_waits();
    if (!ahead_.adopt(running(), plan, scheduled_) || !same) scheduled_.clear();
    if (scheduled_.empty()) return scheduled_;
    step_++;
    take_moves(plan.moves); // what the prefix cache has lost to it is moved to host memory
    return scheduled_;
}

void Scheduler::put_off(const SequenceGroup& group) {
    for (Scheduled& item : scheduled_)
        if (item.group == &group && std::exchange(item.samples, false)) item.again = true;
}

void Scheduler::commit() {
    step_end_.commit(scheduled_);
    std::uint64_t entries = 0;
    for (const Group& group : running()) {
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
    return reservations_ ? reservations_->memory_use(running())
                         : quire::memory_use(running(), lists_.pinned(), blocks_);
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
    lists_.view(blocks_, snapshot);
}

std::span<const Token> Scheduler::tokens(RequestId id, int index) const {
    if (const SequenceGroup* group = find(id))
        for (const auto& s : group->sequences)
            if (s->index == index) return s->tokens;
    return {};
}

void Scheduler::check_invariants() const {
    blocks_.check_invariants();
    lists_.check_invariants(blocks_);
}

} // namespace quire
