// quire.scheduler: decides, step by step, which tokens of which sequences run (iteration-level scheduling, first come
// first served). **Owns** the sequences, their queues and the block manager. Knows no tensors and no text.
export module quire.scheduler;

import quire.base;
import quire.block_manager;
import quire.request;
import quire.std;

export namespace quire {

struct SchedulerOptions {
    int  n_blocks         = 0;
    int  block_size       = 16;
    int  context          = 0;   // longest sequence in tokens
    int  max_batch_tokens = 512; // of one step, the chunks of prompts included
    int  max_sequences    = 16;  // running at once
    int  max_logit_rows   = 64;  // of one step; at least max_sequences
    bool prefix_cache     = true;
};

enum class SequenceStatus : std::uint8_t { waiting, running, finished };

struct Sequence {
    RequestId          id = 0;
    Request            request;
    std::vector<Token> tokens;          // the prompt, then what was generated
    int                n_computed = 0;  // leading tokens whose KV is written
    int                n_cached = 0;    // prompt tokens found in the prefix cache at the first admission
    int                n_preempted = 0;
    SequenceStatus     status = SequenceStatus::waiting;
    TableId            table = -1;      // while running

    int n_prompt() const { return int(request.prompt.size()); }
    int n_generated() const { return int(tokens.size() - request.prompt.size()); }
};

// What one sequence does in the step at hand.
struct Scheduled {
    Sequence* sequence = nullptr;
    int       first = 0, n_tokens = 0;  // positions that run
    int       first_logit_row = 0, n_logit_rows = 0;
    bool      samples = false;          // the last row is that of its last known token: the next token comes from it
};

class Scheduler {
public:
    explicit Scheduler(const SchedulerOptions& options);
    ~Scheduler();

    // Error: the sum that shows why the request can never run.
    Result<void> check_request(const Request& request) const;
    // Puts a request that check_request() accepted at the end of the queue.
    void add(RequestId id, Request request);
    // Takes a sequence out of any state; its blocks come back at once. Null when it is not there (any more).
    std::unique_ptr<Sequence> remove(RequestId id);

    // Fills `plan` with the next step; what it returns is valid until the next call. Both are empty when nothing can run.
    std::span<const Scheduled> schedule(StepPlan& plan);
    // After the step ran: the KV of everything scheduled is written, full blocks can be found by others.
    void commit();
    // Adds a sampled token; the reason if the sequence ends with it. `is_end`: the token is an end of generation.
    FinishReason append(Sequence& sequence, Token token, bool is_end);
    // Sequences that outgrew the whole pool alone since the last call; they end with reason `length`.
    std::vector<RequestId> take_outgrown();

    bool                idle() const { return running_.empty() && waiting_.empty(); }
    int                 n_running() const { return int(running_.size()); }
    int                 n_waiting() const { return int(waiting_.size()); }
    std::uint64_t       n_preemptions() const { return n_preemptions_; }
    const BlockManager& blocks() const { return blocks_; }

private:
    using Queue = std::deque<std::unique_ptr<Sequence>>;

    bool admit(Sequence& sequence);
    void preempt_last();
    void plan_tokens(StepPlan& plan, Scheduled& item);

    SchedulerOptions       options_;
    BlockManager           blocks_;
    Queue                  waiting_;  // arrival order; preempted sequences are the oldest, so they stand in front
    Queue                  running_;  // arrival order
    std::vector<Scheduled> scheduled_;
    std::vector<RequestId> outgrown_;
    std::uint64_t          n_preemptions_ = 0;
};

} // namespace quire

module :private;

namespace quire {

Scheduler::Scheduler(const SchedulerOptions& options)
    : options_(options), blocks_({options.n_blocks, options.block_size, options.prefix_cache, {}}) {
    check(options.max_logit_rows >= options.max_sequences, "fewer rows of logits than running sequences");
    check(options.max_batch_tokens >= options.max_sequences, "a step has to hold a token of each running sequence");
}

Scheduler::~Scheduler() = default;

Result<void> Scheduler::check_request(const Request& request) const {
    const auto n = request.prompt.size();
    if (n == 0) return fail("the prompt has no tokens; at least one is needed");
    if (n >= std::size_t(options_.context))
        return fail_with(ErrorKind::limit, "the prompt has ", n, " tokens; with the one to generate that is more than the context of ",
                         options_.context);
    const int blocks = blocks_.blocks_for(int(n) + 1);
    if (blocks > blocks_.n_blocks())
        return fail_with(ErrorKind::limit, "the prompt has ", n, " tokens and needs ", blocks, " blocks of ", options_.block_size,
                         " with the token to generate; the whole pool has ", blocks_.n_blocks());
    return {};
}

void Scheduler::add(RequestId id, Request request) {
    auto sequence     = std::make_unique<Sequence>();
    sequence->id      = id;
    sequence->request = std::move(request);
    sequence->tokens  = sequence->request.prompt;
    // Room for all it may generate, so that the step loop allocates nothing.
    sequence->tokens.reserve(std::min(std::size_t(options_.context), sequence->tokens.size() + std::size_t(std::max(sequence->request.max_tokens, 0))));
    waiting_.push_back(std::move(sequence));
}

std::unique_ptr<Sequence> Scheduler::remove(RequestId id) {
    for (Queue* queue : {&running_, &waiting_}) {
        auto at = std::find_if(queue->begin(), queue->end(), [&](const auto& s) { return s->id == id; });
        if (at == queue->end()) continue;
        std::unique_ptr<Sequence> sequence = std::move(*at);
        queue->erase(at);
        if (sequence->table >= 0) blocks_.close_table(std::exchange(sequence->table, -1));
        sequence->status = SequenceStatus::finished;
        std::erase_if(scheduled_, [&](const Scheduled& item) { return item.sequence == sequence.get(); });
        return sequence;
    }
    return nullptr;
}

// The latest arrival gives up all its blocks and waits, ahead of everyone, to be computed again (recomputation).
void Scheduler::preempt_last() {
    std::unique_ptr<Sequence> victim = std::move(running_.back());
    running_.pop_back();
    blocks_.close_table(std::exchange(victim->table, -1));
    victim->n_computed = 0;
    victim->n_preempted++;
    victim->status = SequenceStatus::waiting;
    waiting_.push_front(std::move(victim));
    n_preemptions_++;
}

// Maps what the cache has and takes the sequence in, if its known tokens fit into the free blocks.
bool Scheduler::admit(Sequence& sequence) {
    const bool             cached = sequence.request.prompt_logprobs < 0; // every prompt row is wanted: compute all
    BlockManager::Hit      hit    = cached ? blocks_.find_cached(sequence.tokens) : BlockManager::Hit{};
    const int              fresh  = blocks_.blocks_for(int(sequence.tokens.size())) - hit.n_blocks;
    // The blocks that a hit takes off the free list are as gone as the fresh ones.
    if (fresh + hit.from_free > blocks_.n_free()) return false;
    sequence.table      = blocks_.open_table();
    sequence.n_computed = cached ? blocks_.attach_cached(sequence.table, sequence.tokens) : 0;
    if (sequence.n_preempted == 0) sequence.n_cached = sequence.n_computed;
    sequence.status = SequenceStatus::running;
    return true;
}

std::span<const Scheduled> Scheduler::schedule(StepPlan& plan) {
    plan.clear();
    scheduled_.clear();
    int budget = options_.max_batch_tokens, logit_rows = options_.max_logit_rows;

    // Each running sequence can have its next token: chunks of prompts get what the decoding ones leave.
    int reserved = int(running_.size());
    auto take    = [&](const Sequence& s) {
        int n = int(s.tokens.size()) - s.n_computed;
        n     = std::min(n, budget - reserved + 1);
        if (s.request.prompt_logprobs >= 0) n = std::min(n, logit_rows - reserved + 1);
        return n;
    };
    auto schedule_one = [&](Sequence& s, int n) {
        const bool samples = s.n_computed + n == int(s.tokens.size());
        const bool all     = s.request.prompt_logprobs >= 0 && s.n_computed < s.n_prompt();
        scheduled_.push_back({&s, s.n_computed, n, 0, all ? n : int(samples), samples});
        budget -= n;
        logit_rows -= scheduled_.back().n_logit_rows;
    };

    bool preempted = false;
    for (std::size_t i = 0; i < running_.size(); i++, reserved--) {
        Sequence& s = *running_[i];
        const int n = take(s);
        while (!blocks_.reserve(s.table, s.n_computed, n)) {
            preempted = true;
            if (running_.size() == 1) { // alone, and the whole pool is too small
                outgrown_.push_back(s.id);
                break;
            }
            const bool itself = running_.back().get() == &s;
            preempt_last();
            reserved--;
            if (itself) break;
        }
        if (i < running_.size() && outgrown_.empty()) schedule_one(s, n);
    }

    // New and preempted ones, in order of arrival; nobody overtakes one that does not fit yet.
    while (!preempted && !waiting_.empty() && int(running_.size()) < options_.max_sequences && budget > 0 && logit_rows > 0) {
        Sequence& s = *waiting_.front();
        if (!admit(s)) break;
        running_.push_back(std::move(waiting_.front()));
        waiting_.pop_front();
        reserved    = 1;
        const int n = take(s);
        check(blocks_.reserve(s.table, s.n_computed, n), "an admitted sequence found no blocks");
        schedule_one(s, n);
    }

    plan.token_start.push_back(0);
    plan.table_start.push_back(0);
    for (Scheduled& item : scheduled_) plan_tokens(plan, item);
    blocks_.take_copies(plan.copies);
    return scheduled_;
}

void Scheduler::plan_tokens(StepPlan& plan, Scheduled& item) {
    const Sequence& s    = *item.sequence;
    item.first_logit_row = int(plan.logit_rows.size());
    for (int position = item.first; position < item.first + item.n_tokens; position++) {
        if (position >= item.first + item.n_tokens - item.n_logit_rows) plan.logit_rows.push_back(plan.n_tokens());
        plan.tokens.push_back(s.tokens[std::size_t(position)]);
        plan.positions.push_back(position);
        plan.slots.push_back(blocks_.slot(s.table, position));
    }
    plan.token_start.push_back(plan.n_tokens());
    plan.context_lens.push_back(item.first + item.n_tokens);
    std::span<const BlockId> table = blocks_.blocks(s.table);
    plan.block_tables.insert(plan.block_tables.end(), table.begin(), table.end());
    plan.table_start.push_back(std::int32_t(plan.block_tables.size()));
}

void Scheduler::commit() {
    for (const Scheduled& item : scheduled_) {
        Sequence& s  = *item.sequence;
        s.n_computed = item.first + item.n_tokens;
        blocks_.publish(s.table, s.tokens, s.n_computed);
    }
}

FinishReason Scheduler::append(Sequence& sequence, Token token, bool is_end) {
    sequence.tokens.push_back(token);
    const Request& r = sequence.request;
    if ((is_end && !r.ignore_end) || std::ranges::find(r.stop_tokens, token) != r.stop_tokens.end()) return FinishReason::stop;
    if (sequence.n_generated() >= r.max_tokens || int(sequence.tokens.size()) >= options_.context) return FinishReason::length;
    return FinishReason::none;
}

std::vector<RequestId> Scheduler::take_outgrown() { return std::exchange(outgrown_, {}); }

} // namespace quire
