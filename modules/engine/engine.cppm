// quire.engine.engine: the loop: schedule a plan, have the executor run it, decode its results, deliver the tokens.
// **Owns** the model file, the executor, the scheduler and the inbox. One thread calls step().
export module quire.engine.engine;

import quire.constraint.compile;
import quire.core.base;
import quire.core.thread_pool;
import quire.decode.decoder;
import quire.decode.drafting;
import quire.decode.pooling;
import quire.engine.files.kv_files;
import quire.engine.fingerprint;
import quire.engine.loading;
import quire.engine.mtp_guesses;
export import quire.engine.options;
export import quire.engine.parked_cache;
import quire.engine.ranks.process_executors;
export import quire.engine.step_counts;
import quire.engine.step_pace;
import quire.engine.trials;
import quire.engine.watched_files;
export import quire.model_file.config;
export import quire.model_file.gguf;
export import quire.paging.block_hash;
export import quire.paging.snapshot;
export import quire.schedule.request;
import quire.schedule.scheduler;
import quire.step.message;
export import quire.text.tokens.tokenizer;

export namespace quire {

// The caller's own decoding method, in place of sampling and beams: it gets the sequences that ran and the requested rows of
// logits, and uses the scheduler's fork, append and free.
using Decoding = std::function<void(Scheduler& scheduler, std::span<const Scheduled> items,
                                    std::span<const float> logits, std::vector<Output>& out)>;

class Engine {
public:
    // Reads and validates a model file and allocates all memory. Error: one sentence naming file and place; or, before anything is
    // allocated, how much memory a context or pool would need and how much there is.
    // `make`: makes the executor, in place of the device that the options name. `parked`: what park() has returned, which the prefix cache begins
    // with if this is the same model; null: nothing.
    static Result<Engine> load(const std::string& path, const EngineOptions& options, const Progress& progress = {},
                               const MakeExecutor& make = {}, const ParkedCache* parked = nullptr);

    Engine(Engine&&) noexcept;
    Engine& operator=(Engine&&) noexcept;
    ~Engine();

    const ModelConfig& config() const;
    const Tokenizer&   tokenizer() const;
    // Any thread. For constraints: made at the first call.
    std::shared_ptr<const TokenTrie> token_trie() const;
    EngineOptions                    options() const;       // with the defaults filled in
    std::string                      chat_template() const; // tokenizer.chat_template, or ""
    std::string                      tuning() const; // the choices made by measuring on this machine; empty: none
    // Bytes a second that the threads of a step read in a plain sum over the weights: the limit of decoding one sequence. 0 if they fit
    // into a cache, on a GPU, or with several ranks. Between steps only.
    double        weight_bandwidth() const;
    std::string   describe() const;       // one line: device, instruction set, threads, and memory_use()
    std::string   memory_use() const;     // weights, workspaces, KV with its blocks and tokens
    std::string   explain() const;        // the program of operations and the kernels chosen for it
    std::string   warning() const;        // one line where the context is longer than the model's; or ""
    std::string   files_found() const;    // one line: what the files of kv_dir had at the start; "": there are none
    std::size_t   block_bytes() const;    // of one KV block
    std::size_t   draft_kv_bytes() const; // of all blocks of the draft model; 0: there is none
    std::uint64_t model_hash() const;     // of the model's file: its metadata, and samples of its weights
    EngineStats   stats() const;

    // Whether another process leads (options().processes): then only follow() can be called, once. follow() runs the messages of rank 0 until
    // rank 0 ends. Error: a process is lost.
    bool         follows() const;
    Result<void> follow();

    // Any thread. The adapters, with the scales for requests that name none; set_adapters() changes these: an adapter that `uses` does not name
    // gets 0. Error: it names an adapter that does not exist, one of them twice, or a scale that is no finite number.
    std::vector<AdapterOption> adapters() const;
    Result<void>               set_adapters(std::span<const AdapterUse> uses);

    // Any thread. Checks the request at once; returns its id, or why it can never run.
    Result<RequestId> submit(Request request);
    // Any thread. Why submit() would refuse the request with any prompt.
    std::optional<FieldFault> find_fault(const Request& request) const;
    // Any thread. The request ends with reason `cancelled`, unless it has ended already.
    void cancel(RequestId id);
    // Like cancel(), for one of its answers.
    void cancel(RequestId id, int index);

    // The owner's thread only. Runs one step; false when nothing is left to do. Appends new events to `out`.
    // With `pipeline` a step still runs when step() returns; the next call brings its events. "Between steps" below then means the state of
    // the events handed out, with blocks for the running step.
    bool step(std::vector<Output>& out);

    // The owner's thread, when no request is left: brings what host memory has for files on its way to them, as long as that takes at most so
    // many seconds.
    void flush(double seconds);

    // The owner's thread, when no request is left, as the last call. Returns a copy of the prefix cache of at most `most_bytes`. Null: there is no
    // host tier, or nothing to copy, or files have the cache.
    std::shared_ptr<const ParkedCache> park(std::size_t most_bytes);
    // Blocks that load() has taken from a parked cache.
    int n_taken() const;

    // The owner's thread, between steps: in all later steps `decoding` chooses the next tokens; empty: quire.decode.decoder does again.
    void decode_with(Decoding decoding);

    // The owner's thread, between steps. The KV memory as it is, with the events since the last call if log_events(true) was called;
    // `with_text`: with the text of each sequence.
    Snapshot snapshot(bool with_text = false);
    void     log_events(bool on);
    // The owner's thread, between steps. The blocks that have entered or left the prefix cache since the last call, if log_cache(true) was
    // called.
    void                     log_cache(bool on);
    std::vector<CacheChange> take_cache_changes();

    // The owner's thread, between steps: how the slots of the KV pool are used.
    MemoryUse slot_use() const;

    // All invariants of sequences, block tables and blocks: stops at a broken one. Between steps, for tests.
    void check_invariants() const;

private:
    struct Impl;
    explicit Engine(std::unique_ptr<Impl> impl);
    std::unique_ptr<Impl> impl_;
};

} // namespace quire

module :private;

namespace quire {

using TimePoint = std::chrono::steady_clock::time_point;

struct Engine::Impl {
    EngineOptions                 options;
    Gguf                          file;
    std::optional<Gguf>           eagle_file;    // of a draft of EAGLE-3
    std::vector<Adapter>          adapter_files; // as options.adapters
    ModelConfig                   config;
    Tokenizer                     tokenizer;
    std::unique_ptr<Executor>     executor;
    std::shared_ptr<ProcessGroup> leader; // null: this process leads, or is alone
    Scheduler                     scheduler;
    std::unique_ptr<DiskRequests> files; // behind the scheduler's prefix cache; null: none
    Decoder                       decoder;
    StepCounts                    counts;
    std::unique_ptr<DraftModel>   draft_model; // null: none
    std::unique_ptr<MtpGuesses>   mtp;         // likewise
    Drafting                      drafting;
    Decoding                      decoding;        // the caller's, if any
    std::optional<Decoding>       new_decoding;    // from the next step on
    StepPlan                      plan, next_plan; // of the step at hand; prepared for the one after it
    // The step that runs (empty: none does), and the time of its launch.
    std::span<const Scheduled> running;
    TimePoint                  since;
    StepPace                   pace;
    int                        rows_of_step = 0;     // of logits, at most
    bool                       prepared     = false; // next_plan is the step after it
    MoveTicket                 moved        = 0;     // of the last moves
    bool                       pipelined    = false; // as the options say
    WatchedFiles               watched;              // that the engine reads while it runs
    std::string                basis;                // of K and V in host memory, where it can be parked; "": it cannot
    int                        n_taken = 0;          // see Engine::n_taken()

    std::mutex                       trie_mutex;
    std::shared_ptr<const TokenTrie> trie;

    // The inbox: requests and cancellations of other threads since the last step.
    std::mutex                                 mutex;
    std::vector<std::pair<RequestId, Request>> submitted;
    std::vector<std::pair<RequestId, int>>     cancelled; // with the answer; -1: all of them
    // The two lists that take_inbox() works on, without the mutex, so that other threads do not wait for it.
    std::vector<std::pair<RequestId, Request>> taken;
    std::vector<std::pair<RequestId, int>>     taken_cancelled;
    RequestId                                  next_id = 1;
    std::vector<AdapterUse>                    usual_adapters; // of requests that name none

    Impl(LoadedModel&& model, const SchedulerOptions& scheduling)
        : options(std::move(model.options)), file(std::move(model.file)), eagle_file(std::move(model.eagle_file)),
          adapter_files(std::move(model.adapters)), config(std::move(model.config)),
          tokenizer(std::move(model.tokenizer)), executor(std::move(model.executor)),
          leader(model.processes && model.processes->rank() > 0 ? std::move(model.processes) : nullptr),
          scheduler(scheduling), decoder(scheduler, tokenizer.end_tokens(), config.vocab_size,
                                         Pooler(config, model.tensors), options.fast_forward, options.clock),
          counts(scheduler), draft_model(std::move(model.draft_model)),
          mtp(config.mtp || config.draft ? std::make_unique<MtpGuesses>(*executor, scheduler.blocks(),
                                                                        config.vocab_size, scheduling.max_logit_rows)
                                         : nullptr),
          drafting(options.drafts, mtp ? static_cast<BatchGuesser*>(mtp.get()) : draft_model.get(),
                   [this](const SequenceGroup& group, Sequence& s, int n, std::vector<Token>& guess) {
                       decoder.guess_forced(group, s, n, guess);
                   }),
          pace(options.max_batch_tokens), rows_of_step(std::min(scheduling.max_logit_rows, options.max_batch_tokens)),
          pipelined(options.pipeline.value_or(false)) {
        for (std::size_t i = 0; i < options.adapters.size(); i++)
            if (options.adapters[i].usual && options.adapters[i].scale != 0)
                usual_adapters.push_back({int(i), options.adapters[i].scale});
    }
    Impl(const Impl&)            = delete;
    Impl& operator=(const Impl&) = delete;

    TimePoint now() const { return options.clock ? options.clock() : std::chrono::steady_clock::now(); }
    double    seconds_since(TimePoint t) const { return std::chrono::duration<double>(now() - t).count(); }

    void         watch_files();
    void         check_files(bool at_once);
    void         begin();
    bool         finish(std::vector<Output>& out);
    void         move_blocks();
    void         take_inbox(std::vector<Output>& out);
    Result<void> open_files(const std::string& path, std::optional<Cipher> cipher, bool long_rope);
    std::string  kv_basis(bool long_rope, const std::function<std::uint64_t(const Gguf&)>& hash) const;
    void         measure();
    void         set_pace();
};

Result<Engine> Engine::load(const std::string& path, const EngineOptions& wanted, const Progress& progress,
                            const MakeExecutor& make, const ParkedCache* parked) try {
    Result<LoadedModel> model = load_model(path, wanted, progress, make);
    if (!model) return std::unexpected(model.error());
    const SchedulerOptions scheduling = scheduling_of(*model);
    std::optional<Cipher>  cipher     = std::move(model->cipher);
    const bool             long_rope  = model->long_rope;
    auto                   impl       = std::make_unique<Impl>(std::move(*model), scheduling);
    const EngineOptions&   o          = impl->options;
    if (!impl->leader) impl->measure();
    impl->watch_files();
    if (const std::string part = impl->watched.torn(); !part.empty())
        return fail(part, ": it was changed in place while it was read");
    if (o.keeps_files()) {
        if (auto ok = impl->open_files(path, std::move(cipher), long_rope); !ok) return std::unexpected(ok.error());
    } else if (o.tier_blocks > 0 && o.processes.n == 1) {
        impl->basis = impl->kv_basis(long_rope, fingerprint_now);
        if (parked) impl->n_taken = take_parked(*parked, impl->basis, impl->scheduler.blocks(), *impl->executor);
    }
    return Engine(std::move(impl));
} catch (const std::bad_alloc&) {
    return fail_with(ErrorKind::system, path, ": there is not enough memory to load it");
} catch (const std::exception& e) { // no more threads
    return fail_with(ErrorKind::system, path, ": cannot be loaded: ", e.what());
}

Engine::Engine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Engine::Engine(Engine&&) noexcept            = default;
Engine& Engine::operator=(Engine&&) noexcept = default;
Engine::~Engine()                            = default;

const ModelConfig& Engine::config() const { return impl_->config; }
const Tokenizer&   Engine::tokenizer() const { return impl_->tokenizer; }

std::shared_ptr<const TokenTrie> Engine::token_trie() const {
    std::scoped_lock lock(impl_->trie_mutex);
    if (!impl_->trie)
        impl_->trie =
            make_token_trie(impl_->tokenizer, std::min(impl_->tokenizer.vocab_size(), impl_->config.vocab_size));
    return impl_->trie;
}

EngineOptions Engine::options() const { return impl_->options; }
EngineStats   Engine::stats() const { return impl_->counts.stats(); }
MemoryUse     Engine::slot_use() const { return impl_->scheduler.memory_use(); }
void          Engine::check_invariants() const {
    impl_->scheduler.check_invariants();
    if (impl_->draft_model) impl_->draft_model->check_invariants();
}
void                     Engine::decode_with(Decoding decoding) { impl_->new_decoding = std::move(decoding); }
void                     Engine::log_events(bool on) { impl_->scheduler.log_events(on); }
void                     Engine::log_cache(bool on) { impl_->scheduler.log_cache(on); }
std::vector<CacheChange> Engine::take_cache_changes() { return impl_->scheduler.take_cache_changes(); }

bool Engine::follows() const { return impl_->leader != nullptr; }

Result<void> Engine::follow() {
    check(follows(), "this process leads");
    const EngineOptions& o = impl_->options;
    return quire::follow(*impl_->executor, *impl_->leader,
                         {.block_size    = o.block_size,
                          .n_blocks      = o.kv_blocks,
                          .n_swap        = o.host_blocks(),
                          .context       = o.context,
                          .max_tokens    = o.max_batch_tokens,
                          .max_sequences = o.max_sequences,
                          .vocab_size    = impl_->config.vocab_size,
                          .parts         = o.layout.parts()});
}

Snapshot Engine::snapshot(bool with_text) {
    Snapshot snapshot;
    impl_->scheduler.view(snapshot);
    snapshot.context = impl_->options.context;
    if (impl_->files) snapshot.n_in_files = int(impl_->files->tier().n_records());
    if (with_text)
        for (SequenceView& s : snapshot.sequences) {
            const std::span<const Token> tokens = impl_->scheduler.tokens(s.request, s.index);
            const auto                   size   = std::size_t(impl_->options.block_size);
            for (std::size_t at = std::size_t(s.n_released) * size;
                 at < std::size_t(s.n_computed) && s.texts.size() < s.blocks.size(); at += size)
                s.texts.push_back(
                    impl_->tokenizer.decode(tokens.subspan(at, std::min(size, std::size_t(s.n_computed) - at))));
        }
    return snapshot;
}

std::string Engine::chat_template() const {
    Result<std::string_view> text = impl_->file.text("tokenizer.chat_template", "");
    return text ? std::string(*text) : std::string();
}

std::string Engine::describe() const {
    return cat(impl_->executor->describe(), "; ", memory_use(), "; context ", impl_->options.context,
               impl_->draft_model  ? "; " + impl_->draft_model->describe()
               : impl_->eagle_file ? "; draft " + impl_->eagle_file->path()
                                   : std::string());
}

std::string Engine::tuning() const { return impl_->executor->tuning(); }
double      Engine::weight_bandwidth() const { return impl_->executor->weight_bandwidth(); }
std::string Engine::explain() const { return impl_->executor->explain(); }

std::string Engine::warning() const {
    const int trained = impl_->config.context_length, context = impl_->options.context;
    if (context <= trained) return {};
    return cat("a context of ", context, " tokens is longer than the ", trained,
               " that the model was trained for; beyond these its answers may make no sense");
}

std::string Engine::memory_use() const {
    const Impl&          e    = *impl_;
    const EngineOptions& o    = e.options;
    const auto           size = [](std::size_t bytes) {
        return bytes >= std::size_t(10) << 30 ? cat(bytes >> 30, " GiB") : cat(bytes >> 20, " MiB");
    };
    const ExecutorMemory memory = e.executor->memory();
    const std::int64_t   tokens = std::int64_t(o.kv_blocks) * o.block_size;
    return cat(memory.weights > 0 ? cat("weights ", size(memory.weights), ", ") : std::string(), "workspaces ",
               size(memory.workspaces), ", KV ", size(memory.kv), ": ", o.kv_blocks, " blocks of ", o.block_size,
               o.block_size == 1 ? " token" : " tokens",
               o.layout.block_bytes > 0     ? cat(" in ", o.layout.block_bytes >> 10, " KiB")
               : o.layout.groups.size() > 1 ? cat(" in ", o.layout.groups[0].layers_per_block, " layers")
                                            : cat(" = ", tokens, " tokens"),
               o.layout.keeps_state() ? cat(", ", o.layout.blocks_per_unit(), " to a recurrent state, one kept every ",
                                            o.checkpoint_interval, " tokens")
                                      : std::string());
}

std::vector<AdapterOption> Engine::adapters() const {
    std::vector<AdapterOption> all = impl_->options.adapters;
    const std::scoped_lock     lock(impl_->mutex);
    for (AdapterOption& one : all) one.scale = 0;
    for (const AdapterUse& use : impl_->usual_adapters) all[std::size_t(use.adapter)].scale = use.scale;
    return all;
}

Result<void> Engine::set_adapters(std::span<const AdapterUse> uses) {
    Result<std::vector<AdapterUse>> all = checked_uses(uses, impl_->adapter_files.size());
    if (!all) return std::unexpected(all.error());
    const std::scoped_lock lock(impl_->mutex);
    impl_->usual_adapters = std::move(*all);
    return {};
}

Result<RequestId> Engine::submit(Request request) {
    if (impl_->config.family->encoder && !request.embed)
        return fail("this model embeds texts (", impl_->config.family->name, "); it generates none");
    if (impl_->config.pooling == Pooling::rank && !request.embed)
        return fail("this model ranks texts; it generates none");
    if (request.cache_move != CacheMove::none) {
        request.max_tokens = 0;
        if (!impl_->files) return fail("a prompt can be moved to files and back only where there are some (--kv-dir)");
    }
    if (auto ok = impl_->scheduler.check_request(request); !ok) return std::unexpected(ok.error());
    if (request.adapters) {
        Result<std::vector<AdapterUse>> all = checked_uses(*request.adapters, impl_->adapter_files.size());
        if (!all) return std::unexpected(all.error());
        request.adapters = std::move(*all);
    }

    std::scoped_lock lock(impl_->mutex);
    if (!request.adapters) request.adapters = impl_->usual_adapters;
    impl_->submitted.emplace_back(impl_->next_id, std::move(request));
    return impl_->next_id++;
}

std::optional<FieldFault> Engine::find_fault(const Request& request) const {
    if (request.adapters)
        if (auto all = checked_uses(*request.adapters, impl_->adapter_files.size()); !all)
            return FieldFault{"lora", std::move(all.error())};
    return impl_->scheduler.find_fault(request);
}

void Engine::cancel(RequestId id) { cancel(id, -1); }

void Engine::cancel(RequestId id, int index) {
    std::scoped_lock lock(impl_->mutex);
    impl_->cancelled.emplace_back(id, index);
}

std::size_t Engine::block_bytes() const { return impl_->executor->memory().kv / std::size_t(impl_->options.kv_blocks); }

std::size_t Engine::draft_kv_bytes() const { return impl_->draft_model ? impl_->draft_model->kv_bytes() : 0; }

std::uint64_t Engine::model_hash() const { return fingerprint(impl_->file); }

// -- files that are written in place while they are loaded

void Engine::Impl::watch_files() {
    watched.add(file);
    if (eagle_file) watched.add(*eagle_file);
    for (Adapter& adapter : adapter_files) watched.add(adapter.file);
}

// On a CPU the weights are the files' present ones; a GPU has a copy.
void Engine::Impl::check_files(bool at_once) {
    if (options.device == "cpu" && !options.clock) watched.check_changed(now(), at_once);
}

void Engine::Impl::take_inbox(std::vector<Output>& out) {
    {
        const std::scoped_lock lock(mutex);
        std::swap(submitted, taken);
        std::swap(cancelled, taken_cancelled);
    }
    if (!taken.empty()) check_files(true);
    for (auto& [id, request] : taken)
        if (!files || !files->take(id, request)) scheduler.add(id, std::move(request));
    taken.clear();
    for (auto [id, index] : taken_cancelled) {
        if (files) files->pass_on(id);
        if (index < 0) decoder.finish(id, FinishReason::cancelled, "", out);
        else decoder.cancel_answer(id, index, out);
    }
    taken_cancelled.clear();
    if (!files) return;
    for (const CacheMoved& moved : files->take_moved()) {
        Output& output       = out.emplace_back();
        output.id            = moved.id;
        output.prompt_tokens = moved.n_prompt;
        output.cached_tokens = moved.n_tokens;
        output.finish        = FinishReason::stop;
        output.done          = true;
        if (moved.n_missed == 0) continue;
        output.finish  = FinishReason::failed;
        output.message = cat("the files have ", moved.n_tokens, " of the ", moved.n_tokens + moved.n_missed,
                             " tokens that the memory has: the disk is full, or --kv-disk-bytes or --kv-host-bytes is "
                             "too small");
    }
}

// -- files

// See basis_of_kv(). `hash`: of the weights of a file.
std::string Engine::Impl::kv_basis(bool long_rope, const std::function<std::uint64_t(const Gguf&)>& hash) const {
    std::string all = basis_of_kv(hash(file), long_rope, options, executor->numerics());
    if (eagle_file) all += cat(", draft ", hash(*eagle_file)); // blocks have its K and V, too
    return all;
}

Result<void> Engine::Impl::open_files(const std::string& path, std::optional<Cipher> cipher, bool long_rope) {
    const auto hash = [&](const Gguf& f) {
        const int           threads = options.device == "cpu" ? options.threads : physical_cores();
        const std::uint64_t all     = full_fingerprint(f, threads, options.kv_dir);
        watched.compare_all(f, all, threads);
        return all;
    };
    Result<std::unique_ptr<DiskRequests>> opened = open_kv_files(
        path, options, std::move(cipher), [&] { return kv_basis(long_rope, hash); }, scheduler, *executor);
    if (!opened) return std::unexpected(opened.error());
    files = std::move(*opened);
    return {};
}

std::string Engine::files_found() const {
    return impl_->files ? text_of(impl_->files->tier().found(), impl_->options.kv_dir) : std::string();
}

// The scheduler chooses by these times how to preempt, and drafting how many tokens to guess.
void Engine::Impl::measure() {
    const auto clock = [this] { return now(); };
    counts.begin(time_moves(*executor, options.kv_blocks, options.host_blocks(), clock));
    if (!drafting.on() || options.drafts.always) return;
    if (draft_model) draft_model->measure();
    if (mtp) mtp->measure(std::min(options.max_sequences, options.max_batch_tokens));
    time_steps(*executor, scheduler, std::min(rows_of_step, options.context), drafting.cost(), clock);
}

// How long the next step is to take. A text that the draft model reads beside it takes half of that.
void Engine::Impl::set_pace() {
    if (options.device != "cpu") return;
    double seconds = options.step_seconds;
    if (options.shared_step_seconds > 0 && scheduler.generates())
        seconds = seconds > 0 ? std::min(seconds, options.shared_step_seconds) : options.shared_step_seconds;
    pace.set(seconds);
    if (draft_model) draft_model->set_pace(seconds / 2);
    scheduler.limit_step(pace.tokens());
}

void Engine::Impl::move_blocks() {
    if (plan.moves.empty()) return;
    const TimePoint start = now();
    moved                 = executor->move_blocks(plan.moves);
    counts.add_moves(plan.moves, seconds_since(start), options.device == "cpu"); // on a GPU they are not done yet
}

// Begins a step, if anything can run. The sampling tasks are listed while the model runs already.
void Engine::Impl::begin() {
    if (new_decoding) decoding = std::move(*new_decoding);
    new_decoding.reset();
    set_pace();
    // A step with draft tokens is not the one that was planned ahead.
    if (mtp) mtp->follow(scheduler.running());
    const bool drafts = !decoding && drafting.choose(scheduler.running(), options.context, rows_of_step);
    if (std::exchange(prepared, false) && !drafts) running = scheduler.adopt(next_plan);
    if (!running.empty()) std::swap(plan, next_plan), counts.add_planned_ahead();
    else running = scheduler.schedule(plan);
    move_blocks();
    if (files) files->moves_taken();
    if (running.empty()) { // moves alone
        if (files) {       // uses the blocks from now on
            executor->wait_for_moves(moved);
            if (files->brings()) check_files(true);
            files->moves_done();
        }
        return scheduler.commit();
    }
    // The moves of this step, or of an earlier one that ran nothing: this step may write where they read.
    plan.after = moved;
    if (mtp) mtp->fill(running, plan);
    since = now();
    for (const Scheduled& item : running)
        if (item.group->first_run == TimePoint{}) item.group->first_run = since;
    executor->launch(plan);
    decoder.plan_sampling(running, decoding ? SamplingLimits{} : executor->sampling_limits(), plan);
    executor->sample(plan);
}

// Prepares the next step, waits for the running one and delivers its results. False: no step runs.
bool Engine::Impl::finish(std::vector<Output>& out) {
    if (running.empty()) return false;
    prepared                  = pipelined && !decoding && scheduler.prepare(next_plan);
    const StepResults results = executor->results();
    watched.check_torn();
    check_files(false);
    const std::span<const Scheduled> ran = std::exchange(running, {});
    if (files && files->brings()) check_files(true); // what is written stays
    if (files) files->moves_done();
    if (mtp) mtp->ran(ran);
    const double seconds = seconds_since(since);
    pace.ran(plan.n_tokens(), seconds);
    int n_drafts = 0;
    for (const Scheduled& item : ran) n_drafts += item.n_drafts;
    if (counts.add_step(ran, plan.n_tokens(), seconds)) drafting.cost().add(plan.n_tokens(), n_drafts, seconds);
    scheduler.commit();
    if (decoding) decoding(scheduler, ran, results.rows ? results.rows() : std::span<const float>(), out);
    else decoder.deliver(ran, results, out);
    if (std::ranges::any_of(out, &Output::done))
        check_files(true); // no answer ends with other weights than it began with
    return true;
}

void Engine::flush(double seconds) {
    Impl&               e     = *impl_;
    const TimePoint     since = e.now();
    std::vector<Output> none;
    const auto          is_late = [&] {
        const HostTier& host = e.scheduler.blocks().host();
        return e.files && (host.has_late() || host.has_saved());
    };
    while (e.running.empty() && e.scheduler.idle() && is_late() && e.seconds_since(since) < seconds) step(none);
}

std::shared_ptr<const ParkedCache> Engine::park(std::size_t most_bytes) {
    Impl&               e     = *impl_;
    const TimePoint     since = e.now();
    std::vector<Output> none;
    const auto          is_idle = [&] { return e.running.empty() && e.scheduler.idle(); };
    // The requests whose clients have gone end with the next steps.
    for (bool busy = true; busy && e.seconds_since(since) < 1;) busy = step(none);
    if (e.basis.empty() || !is_idle()) return nullptr;
    e.check_files(true);
    return park_cache(e.basis, e.scheduler.blocks(), *e.executor, most_bytes);
}

int Engine::n_taken() const { return impl_->n_taken; }

bool Engine::step(std::vector<Output>& out) {
    Impl& e   = *impl_;
    bool  ran = e.finish(out); // pipelined: the step that the last call began
    if (e.files) e.files->update();
    e.take_inbox(out);
    e.decoder.resume(out);
    e.begin();
    // All running sequences wait for masks: only the inbox has to be read now and then.
    if (e.running.empty() && e.decoder.waits()) e.decoder.wait(0.002);
    const bool reads = e.files && e.files->n_waiting() > 0, late = e.files && e.scheduler.blocks().host().has_late();
    if (e.running.empty() && (reads || late) && e.scheduler.idle()) e.files->wait(0.002);
    if (!e.pipelined) ran = e.finish(out);
    for (const Ended& ended : e.scheduler.take_ended()) e.decoder.finish(ended.id, ended.finish, ended.message, out);
    e.counts.sample(e.plan.n_tokens(), e.files.get());
    const bool saves =
        e.files && e.scheduler.blocks().host().has_saved(); // the next step's moves bring it to the files
    const bool busy = ran || !e.scheduler.idle() || reads || saves || late;
    if (!busy) e.executor->check_peers();
    return busy;
}

} // namespace quire
