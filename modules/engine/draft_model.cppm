// quire.engine.draft_model: a second, smaller model that guesses the next tokens of the running sequences. Its K and V are paged as the first
// model's, in a pool of its own. **Owns** its file, its executor, its block tables, and the texts that it follows.
export module quire.engine.draft_model;

import quire.compute.kv_cache;
import quire.core.base;
import quire.decode.drafting;
import quire.decode.sampler;
import quire.engine.executor;
import quire.engine.local_executor;
import quire.engine.options;
import quire.engine.step_pace;
import quire.model_file.config;
import quire.model_file.gguf;
import quire.model_file.weights;
import quire.paging.block_manager;
import quire.schedule.scheduler;
import quire.text.tokens.tokenizer;

export namespace quire {

// Error: the first token in which the vocabulary of a draft, whose file is `path`, is not that of the model that it guesses for.
Result<void> check_vocabulary(const std::string& path, const Tokenizer& mine, const Tokenizer& target);

class DraftModel final : public BatchGuesser {
public:
    // Reads drafts.model of the options, and allocates its memory: before the target model's, of whose part of the memory for blocks it takes
    // what its K and V need for as many tokens. `target`: the model that it guesses for. Error: one sentence.
    static Result<std::unique_ptr<DraftModel>> load(const EngineOptions& options, const Gguf& target,
                                                    const ModelConfig& target_config,
                                                    const Tokenizer&   target_tokenizer);

    void   guess(std::span<const WantedGuess> wanted) override;
    double seconds(int n_texts) const override { return cost_.of(n_texts); }
    // Before any guess: takes the times for seconds().
    void measure();
    // How long guess() may read texts that it does not know yet, in seconds; 0: a step of the most tokens.
    void set_pace(double seconds) { pace_.set(seconds); }

    std::size_t kv_bytes() const { return executor_->memory().kv; } // of its blocks
    // Of these, in the machine's memory, which may not be touched yet.
    std::size_t host_bytes() const { return options_.device == "cpu" ? kv_bytes() : 0; }
    std::string describe() const; // one line: the file, its weights and its blocks
    void        check_invariants() const { blocks_.check_invariants(); }

private:
    // A text that the model follows.
    struct Text {
        Sequence    sequence;      // its tokens, those guessed behind them, and its table
        std::size_t n_known   = 0; // tokens of the text
        int         n_dropped = 0; // as of the sequence that it follows
        bool        wanted    = false;
    };
    // A text in the step at hand.
    struct Run {
        Text*              text = nullptr;
        const WantedGuess* want = nullptr;
    };
    using Name = std::pair<RequestId, int>; // of a sequence: its request, and which answer it is

    DraftModel(Gguf file, EngineOptions options, ModelConfig config, std::unique_ptr<Executor> executor,
               int target_vocab);

    bool   follow(Text& text, const WantedGuess& want);
    bool   reads(const Text& text) const;
    void   give_up(Text& text);
    void   add(const Run& run, int& left);
    double run();
    Token  next_token(std::span<const float> row, const Run& run);

    Gguf                      file_;
    EngineOptions             options_;
    ModelConfig               config_;
    std::unique_ptr<Executor> executor_;
    BlockManager              blocks_;
    int                       target_vocab_, vocab_; // tokens of the target; and the tokens that both models have
    StepCost                  cost_;
    StepPace                  pace_;
    std::map<Name, Text>      texts_;
    Sampler                   sampler_;
    std::vector<float>        row_; // scratch, like what follows
    StepPlan                  plan_;
    std::vector<Scheduled>    items_;
    std::vector<Run>          runs_, next_; // of the step at hand; the runs that go on in the next one
};

} // namespace quire

module :private;

namespace quire {

constexpr int most_unlike = 128; // tokens at the end that fill a vocabulary up, of which a larger model may have more

Result<void> check_vocabulary(const std::string& path, const Tokenizer& mine, const Tokenizer& target) {
    const int n = mine.vocab_size(), wanted = target.vocab_size();
    if (std::abs(n - wanted) > most_unlike)
        return fail(path, ": a draft model needs the vocabulary of the model; it has ", n, " tokens, not ", wanted);
    for (Token t = 0; t < std::min(n, wanted); t++)
        if (mine.piece(t) != target.piece(t))
            return fail(path, ": a draft model needs the vocabulary of the model; its token ", t, " is ",
                        quote(mine.piece(t)), ", not ", quote(target.piece(t)));
    return {};
}

// Of a draft model, from those of the engine.
EngineOptions options_of(const EngineOptions& o, const Gguf& target, const ModelConfig& target_config,
                         const ModelConfig& config) {
    EngineOptions mine   = o;
    mine.context         = std::min(o.context > 0 ? o.context : target_config.context_length, config.context_length);
    mine.tensor_parallel = mine.ranks_per_gpu = 1;
    mine.swap_blocks                          = 0;
    mine.kv_host_bytes                        = 0;
    mine.kv_dir = mine.kv_key = "";
    mine.kv_files             = {};
    mine.reservations         = {};
    mine.free_order           = {};
    mine.drafts               = {};
    mine.adapters             = {};
    const auto bytes          = [&](const ModelConfig& c) { return double(KvCache::bytes_per_token(c, o.kv_type)); };
    mine.pool_share           = o.pool_share * bytes(config) / (bytes(config) + bytes(target_config));
    for (const GgufTensor& t : target.tensors()) mine.set_aside += t.bytes;
    if (o.kv_blocks > 0) mine.set_aside += std::size_t(double(o.kv_blocks) * o.block_size * bytes(target_config));
    return mine;
}

Result<std::unique_ptr<DraftModel>> DraftModel::load(const EngineOptions& o, const Gguf& target,
                                                     const ModelConfig& target_config,
                                                     const Tokenizer&   target_tokenizer) {
    const std::string& path = o.drafts.model;
    if (o.processes.n > 1) return fail(path, ": a draft model is for a model that runs in one process");
    Result<Gguf> file = Gguf::open(path);
    if (!file) return std::unexpected(file.error());
    Result<ModelConfig> config = read_config(*file);
    if (!config) return std::unexpected(config.error());
    Result<ModelTensors> tensors = bind_tensors(*file, *config);
    if (!tensors) return std::unexpected(tensors.error());
    Result<Tokenizer> tokenizer = Tokenizer::load(*file);
    if (!tokenizer) return std::unexpected(tokenizer.error());
    if (config->family->encoder) return fail(path, ": a draft model generates texts; this one embeds them");
    if (std::ranges::any_of(config->layers, [](const LayerConfig& l) { return l.keeps_state(); }))
        return fail(path, ": a draft model has to forget wrong guesses, which a recurrent state cannot");
    if (auto ok = check_vocabulary(path, *tokenizer, target_tokenizer); !ok) return std::unexpected(ok.error());
    file->prefetch();
    EngineOptions                     mine = options_of(o, target, target_config, *config);
    Result<std::unique_ptr<Executor>> executor =
        make_local_executor(path, mine, *config, *tensors, o.max_sequences, {});
    if (!executor) return std::unexpected(executor.error());
    return std::unique_ptr<DraftModel>(new DraftModel(std::move(*file), std::move(mine), std::move(*config),
                                                      std::move(*executor), target_config.vocab_size));
}

DraftModel::DraftModel(Gguf file, EngineOptions options, ModelConfig config, std::unique_ptr<Executor> executor,
                       int target_vocab)
    : file_(std::move(file)), options_(std::move(options)), config_(std::move(config)), executor_(std::move(executor)),
      blocks_({.n_blocks   = options_.kv_blocks,
               .block_size = options_.block_size,
               .layout     = options_.layout,
               .n_markers =
                   markers_for(options_.kv_blocks, options_.block_size, options_.max_sequences, options_.context)}),
      target_vocab_(target_vocab), vocab_(std::min(config_.vocab_size, target_vocab)), pace_(options_.max_batch_tokens),
      sampler_(target_vocab) {}

std::string DraftModel::describe() const {
    const ExecutorMemory memory = executor_->memory();
    return cat("draft model ", file_.path(), ": weights ", memory.weights >> 20, " MiB, KV ", memory.kv >> 20,
               " MiB: ", options_.kv_blocks, " blocks");
}

void DraftModel::measure() {
    const int most = std::min(options_.max_sequences, options_.max_batch_tokens);
    for (int n = 1; n <= most; n = n == most ? most + 1 : std::min(2 * n, most)) {
        std::vector<Sequence> texts;
        texts.resize(std::size_t(n));
        items_.clear();
        for (Sequence& s : texts) {
            s.tokens = {0};
            s.table  = blocks_.open_table();
            if (blocks_.allocate(s.table, s.tokens, 0, false)) items_.push_back({nullptr, &s, 0, 1, 0, 1});
        }
        plan_.clear();
        plan_items(items_, blocks_, plan_);
        for (int i = n == 1 ? -1 : 0; i < 3 && int(items_.size()) == n; i++) { // the first step also brings the weights
            const auto start = std::chrono::steady_clock::now();
            executor_->launch(plan_);
            executor_->results();
            if (i >= 0)
                cost_.add_trial(n, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
        }
        for (Sequence& s : texts) blocks_.close_table(s.table, true);
    }
}

void DraftModel::give_up(Text& text) {
    if (text.sequence.table >= 0) blocks_.close_table(std::exchange(text.sequence.table, -1));
    text.sequence.tokens.clear();
    text.n_known = 0;
}

// Brings a text up to date, with slots for its tokens. Wrong guesses are cut off. False: the text gets no guess now.
bool DraftModel::follow(Text& text, const WantedGuess& want) {
    const std::vector<Token>& tokens = want.sequence->tokens;
    Sequence&                 mine   = text.sequence;
    const int                 n      = int(tokens.size());
    // A full context has made it forget tokens.
    if (text.n_dropped != want.sequence->n_dropped || tokens.size() < text.n_known) give_up(text);
    text.n_dropped   = want.sequence->n_dropped;
    const auto known = std::ptrdiff_t(text.n_known);
    const int  same =
        int(std::mismatch(mine.tokens.begin() + known, mine.tokens.end(), tokens.begin() + known, tokens.end()).first -
            mine.tokens.begin());
    const auto beyond = [&](Token t) { return t >= vocab_; };
    if (n + want.n > options_.context || std::any_of(tokens.begin() + same, tokens.end(), beyond)) return false;
    mine.tokens.resize(std::size_t(same));
    mine.tokens.insert(mine.tokens.end(), tokens.begin() + same, tokens.end());
    text.n_known = tokens.size();
    int n_new    = std::max(n - same, 1); // tokens without slots of their own
    if (mine.table < 0) {
        mine.table      = blocks_.open_table(want.group->space);
        mine.n_computed = 0;
        n_new           = 1;
        if (!blocks_.allocate(mine.table, tokens, 0, true, true)) {
            give_up(text);
            return false;
        }
    } else {
        mine.n_computed = std::min(mine.n_computed, same);
        blocks_.truncate(mine.table, same);
    }
    if (blocks_.must_wait(mine.table, n)) return true;
    const bool slots = blocks_.allocate_slots(mine.table, n - n_new, n_new);
    if (!slots) give_up(text);
    return slots;
}

// Whether more of a text is unknown than the tokens that a step of the target brings.
bool DraftModel::reads(const Text& text) const {
    return int(text.sequence.tokens.size()) - text.sequence.n_computed > most_drafts + 1;
}

// Puts as many of a text's tokens into the step as `left` allows.
void DraftModel::add(const Run& run, int& left) {
    Sequence& s  = run.text->sequence;
    const int n  = int(s.tokens.size());
    s.n_computed = blocks_.next_unwritten(s.table, std::min(s.n_computed, n - 1), n);
    int take     = std::min(n - s.n_computed, left);
    if (blocks_.is_partly_written(s.table, s.n_computed)) take = 0; // not twice
    if (s.n_computed + take == n && blocks_.must_wait(s.table, n)) take--;
    if (take <= 0) return;
    items_.push_back({nullptr, &s, s.n_computed, take, 0, int(s.n_computed + take == n)});
    runs_.push_back(run);
    blocks_.will_write({s.table, s.n_computed, take});
    left -= take;
}

// The text's next token, drawn as the target's with the same random number: where the two models agree, so do the tokens.
Token DraftModel::next_token(std::span<const float> row, const Run& run) {
    const SequenceGroup&  group  = *run.want->group;
    const Sequence&       s      = *run.want->sequence;
    const SamplingParams& how    = group.request.sampling;
    const int             within = int(s.guess.size()); // tokens of the guess so far
    row_.assign(row.begin(), row.begin() + vocab_);
    if (!usable(row_)) return -1;
    if (is_plain_greedy(how)) return argmax(row_);
    row_.resize(std::size_t(target_vocab_), -std::numeric_limits<float>::infinity());
    return sampler_
        .sample(row_, how, run.text->sequence.tokens, group.n_generated_left(s) + within,
                {s.index, std::uint64_t(group.length(s) + within), s.mu})
        .token;
}

// Runs the step, and appends their next tokens to the texts whose last token was in it. Returns the seconds that it took.
double DraftModel::run() {
    const auto start = std::chrono::steady_clock::now();
    plan_.clear();
    plan_items(items_, blocks_, plan_);
    blocks_.take_moves(plan_.moves);
    if (!plan_.moves.empty()) plan_.after = executor_->move_blocks(plan_.moves);
    executor_->launch(plan_);
    const StepResults results = executor_->results();
    const auto        greedy  = [](const Run& r) { return is_plain_greedy(r.want->group->request.sampling); };
    const bool        best = !results.best.empty() && std::ranges::all_of(runs_, greedy); // the device knows the tokens
    std::span<const float> rows;
    if (!best && !plan_.logit_rows.empty()) rows = results.rows();
    blocks_.commit();
    next_.clear();
    for (std::size_t i = 0; i < items_.size(); i++) {
        const Scheduled& item = items_[i];
        Text&            text = *runs_[i].text;
        Sequence&        s    = text.sequence;
        s.n_computed          = item.first + item.n_tokens;
        blocks_.publish(s.table, s.tokens, std::min(s.n_computed, int(text.n_known)));
        if (item.n_logit_rows == 0) continue;
        const auto          row = std::size_t(item.first_logit_row), size = std::size_t(config_.vocab_size);
        const Token         next  = best ? results.best[row] : next_token(rows.subspan(row * size, size), runs_[i]);
        std::vector<Token>& guess = runs_[i].want->sequence->guess;
        if (next < 0 || next >= vocab_) continue;
        guess.push_back(next);
        s.tokens.push_back(next);
        if (int(guess.size()) < runs_[i].want->n && blocks_.allocate_slots(s.table, int(s.tokens.size()) - 1, 1))
            next_.push_back(runs_[i]);
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (plan_.n_tokens() == plan_.n_seqs()) cost_.add(plan_.n_seqs(), plan_.n_seqs(), seconds);
    return seconds;
}

void DraftModel::guess(std::span<const WantedGuess> wanted) {
    for (auto& [name, text] : texts_) text.wanted = false;
    for (const WantedGuess& w : wanted) texts_[{w.group->id, w.sequence->index}].wanted = true;
    for (auto at = texts_.begin(); at != texts_.end();) { // the prefix cache keeps their blocks while there is room
        if (at->second.wanted) {
            ++at;
            continue;
        }
        give_up(at->second);
        at = texts_.erase(at);
    }
    next_.clear();
    for (const WantedGuess& w : wanted) {
        Text& text = texts_[{w.group->id, w.sequence->index}];
        if (w.n > 0 && int(next_.size()) < options_.max_sequences && follow(text, w)) next_.push_back({&text, &w});
    }
    while (!next_.empty()) {
        items_.clear();
        runs_.clear();
        int left = options_.max_batch_tokens;
        // No text that is known but for a few tokens waits for one that is read from its beginning. A text that is read in part gets no guess.
        for (const Run& one : next_)
            if (!reads(*one.text)) add(one, left);
        const int most_read = std::min(left, pace_.tokens());
        left                = most_read;
        for (const Run& one : next_)
            if (reads(*one.text)) add(one, left);
        if (items_.empty()) return;
        const double seconds = run();
        if (left < most_read) pace_.ran(most_read - left, seconds);
    }
}

} // namespace quire
