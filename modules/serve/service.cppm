// quire.serve.service: shares one engine among many callers: a bounded queue of requests, and an output queue for each caller. **Owns**
// the engine, its thread, the output queues and the pinned prefixes.
export module quire.serve.service;

import quire.core.base;
import quire.core.metrics;
export import quire.engine.engine;
export import quire.model_file.config;
export import quire.paging.snapshot;
export import quire.schedule.request;
import quire.serve.memory_reserve;
export import quire.text.tokens.tokenizer;

export namespace quire {

using TimePoint = std::chrono::steady_clock::time_point;

struct ServiceOptions {
    int                   max_queue        = 1024;                  // prompts that wait, beside the running ones
    std::size_t           max_behind       = std::size_t(64) << 20; // bytes of output that callers have not taken
    double                watchdog_seconds = 60;                    // without a step: not healthy any more
    int                   max_pinned       = 0;     // blocks in pinned prefixes; 0: a quarter of the pool
    int                   max_listeners    = 16;    // of the block events
    bool                  show_text        = false; // snapshots have the texts of the blocks
    std::function<void()> failed           = {};    // the engine cannot go on; its requests have got an error
    std::function<void()> disk_full        = {};    // files have refused a record for the first time
    // Called by the engine's thread after each step that changed the prefix cache, with the blocks that entered or left it.
    std::function<void(std::vector<CacheChange>)> cache_changed = {};
};

enum class Refused : std::uint8_t { invalid, full, draining, broken };
struct Refusal {
    Refused     why = Refused::invalid;
    Error       error;
    std::size_t n_tokens = 0; // of the prompt, where `why` is `invalid`
};

// A queue from the engine's thread, which appends, to a caller's thread, which takes all deltas at once.
struct OutputQueue {
    std::mutex              mutex;
    std::condition_variable changed;
    std::vector<Output>     outputs;   // of each answer at most one, which grows with its tokens, up to max_tokens
    int                     open  = 0; // prompts that are not over
    std::size_t             bytes = 0; // of the outputs
    bool                    gone  = false;
    bool                    cut   = false; // the caller is too far behind, and gets an error in place of its outputs
};

class Service;

// A caller's requests, one for each of its prompts. The destructor cancels the requests that are still running.
class RequestHandle {
public:
    ~RequestHandle();
    // Waits until there is output, all requests have ended, the caller is gone, or the time has passed; moves the output to
    // `out`. False: there will be no more.
    bool wait(double seconds, std::vector<Output>& out);
    bool gone() const;
    // Any thread: the client of these answers has disconnected.
    std::function<void()> when_gone() const;
    // Cancels one answer.
    void      cancel(RequestId id, int index);
    TimePoint submitted() const { return submitted_; }
    // The id of each prompt's request, ascending.
    const std::vector<RequestId>& ids() const { return ids_; }
    std::size_t                   prompt_of(const Output& output) const {
        return std::size_t(std::ranges::lower_bound(ids_, output.id) - ids_.begin());
    }

private:
    friend class Service;
    RequestHandle()                       = default;
    Service*                     service_ = nullptr;
    std::shared_ptr<OutputQueue> queue_   = std::make_shared<OutputQueue>();
    std::vector<RequestId>       ids_;
    TimePoint                    submitted_ = std::chrono::steady_clock::now();
};

struct Pin {
    std::string id;
    RequestId   request  = 0;
    int         n_tokens = 0, n_blocks = 0;
};

// The server's counters, in addition to the engine's.
struct ServiceMetrics {
    Histogram first_token{first_token_buckets()}, between_tokens{token_buckets()}, per_token{token_buckets()};
    Histogram whole{request_buckets()}, queued{request_buckets()}, inference{request_buckets()},
        prefill{request_buckets()}, decode{request_buckets()};
    Histogram prompt_tokens, generation_tokens, max_generation_tokens, max_tokens, computed_prompt_tokens;
    Histogram n{{1, 2, 5, 10, 20}}, step_tokens{{1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384}};
    std::atomic<std::uint64_t> prompt = 0, cached = 0, generated = 0;
    std::atomic<int>           longest = 0;                                   // tokens of a prompt and its answer
    std::atomic<std::uint64_t> stopped = 0, cut = 0, aborted = 0, failed = 0; // answers, by reason
    std::atomic<std::uint64_t> refused_full = 0, refused_draining = 0, refused_invalid = 0;
    explicit ServiceMetrics(int context)
        : prompt_tokens(size_buckets(context)), generation_tokens(size_buckets(context)),
          max_generation_tokens(size_buckets(context)), max_tokens(size_buckets(context)),
          computed_prompt_tokens(size_buckets(context)) {}
};

class Service {
public:
    Service(Engine engine, const ServiceOptions& options);
    ~Service(); // cancels all and stops the engine; every RequestHandle must be gone

    const Tokenizer&     tokenizer() const { return engine_.tokenizer(); }
    const ModelConfig&   config() const { return engine_.config(); }
    const EngineOptions& engine_options() const { return engine_options_; }
    const Engine&        engine() const { return engine_; }

    // Any thread. Accepts all of the requests or none.
    std::expected<std::unique_ptr<RequestHandle>, Refusal> submit(std::vector<Request> requests);

    // Any thread. See Engine::set_adapters().
    Result<void> set_adapters(std::span<const AdapterUse> uses) { return engine_.set_adapters(uses); }

    // Pins a prefix. Blocks until it is computed.
    std::expected<Pin, Refusal> pin(std::vector<Token> prompt, std::string cache_salt);
    bool                        unpin(const std::string& id);
    std::vector<Pin>            pins() const;

    // Whether the engine's last step was less than watchdog_seconds ago.
    bool        healthy() const;
    bool        draining() const { return draining_; }
    std::string failure() const; // why the engine has failed; empty: it has not
    EngineStats stats() const;
    int         in_flight() const;

    // The KV memory between two steps, up to a tenth of a second from now; null when the engine does not answer in time.
    std::shared_ptr<const Snapshot> snapshot(double seconds = 5);
    // The first snapshot after the one with the number `serial`, which is set to its number. Null: none came in time. The caller has called
    // listen().
    std::shared_ptr<const Snapshot> next_snapshot(std::uint64_t& serial, double seconds);
    bool                            listen(); // false: there are too many listeners
    void                            unlisten();

    // From now on no requests are accepted.
    void drain() { draining_ = true; }
    // True: all requests have ended. False: not within that time.
    bool wait_until_idle(double seconds);
    void cancel_all();

    // Ends the service, of which no RequestHandle is left. Returns Engine::park() of so many bytes; null if the engine has failed.
    std::shared_ptr<const ParkedCache> park(std::size_t most_bytes);

    ServiceMetrics metrics;

private:
    friend class RequestHandle;
    void      run();
    void      stop();
    void      deliver(std::vector<Output>& events);
    void      publish();
    TimePoint next_snapshot_at() const;
    void      fail_all(const std::string& why);
    void      wake();
    void      cancel(RequestId id, int index = -1);
    int       places(int open) const;
    void      cut_off(OutputQueue& queue, const Output& last);

    Engine         engine_;
    ServiceOptions options_;
    EngineOptions  engine_options_;

    mutable std::mutex                                          mutex_; // of all below
    std::condition_variable                                     wake_cv_, idle_cv_, snapshot_cv_;
    std::map<std::string, Pin>                                  pins_;
    std::unordered_map<RequestId, std::shared_ptr<OutputQueue>> queues_;
    std::uint64_t                                               n_pins_ = 0;
    int                                                         pinned_ = 0; // blocks
    int                                                         queued_ = 0; // places that requests take; see places()
    bool                                                        woken_ = false, stopping_ = false;
    std::size_t                        park_bytes_ = 0; // > 0: the engine's thread parks the cache at its end
    std::shared_ptr<const ParkedCache> parked_;
    std::string                        failure_; // see failure()
    EngineStats                        stats_;
    bool                               wanted_ = false; // a thread waits for a snapshot
    std::shared_ptr<const Snapshot>    snapshot_;
    std::uint64_t                      serial_    = 0;
    int                                listeners_ = 0;

    std::atomic<std::size_t>  behind_   = 0; // bytes of all output queues
    std::atomic<bool>         draining_ = false;
    std::atomic<std::int64_t> heartbeat_{0}; // nanoseconds of the steady clock
    // The engine thread's.
    bool        logging_ = false, moved_ = false;
    TimePoint   last_snapshot_{};
    double      snapshot_seconds_ = 0; // that the last snapshot took
    std::thread thread_;
};

} // namespace quire

module :private;

namespace quire {

std::int64_t nanoseconds_now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

std::chrono::duration<double> in_seconds(double seconds) { return std::chrono::duration<double>(seconds); }

// -- request handles

RequestHandle::~RequestHandle() {
    if (!service_) return;
    {
        std::scoped_lock lock(queue_->mutex);
        queue_->gone = true;
        queue_->outputs.clear();
        service_->behind_ -= std::exchange(queue_->bytes, 0);
        if (queue_->open == 0) return;
    }
    for (RequestId id : ids_) service_->cancel(id);
}

bool RequestHandle::wait(double seconds, std::vector<Output>& out) {
    std::unique_lock lock(queue_->mutex);
    queue_->changed.wait_for(lock, in_seconds(seconds),
                             [&] { return !queue_->outputs.empty() || queue_->open == 0 || queue_->gone; });
    out = std::exchange(queue_->outputs, {});
    service_->behind_ -= std::exchange(queue_->bytes, 0);
    return (queue_->open > 0 || !out.empty()) && !queue_->gone;
}

bool RequestHandle::gone() const {
    std::scoped_lock lock(queue_->mutex);
    return queue_->gone;
}

std::function<void()> RequestHandle::when_gone() const {
    return [queue = queue_] {
        std::scoped_lock lock(queue->mutex);
        queue->gone = true;
        queue->changed.notify_all();
    };
}

void RequestHandle::cancel(RequestId id, int index) { service_->cancel(id, index); }

// -- the engine's thread

Service::Service(Engine engine, const ServiceOptions& options)
    : metrics(engine.options().context), engine_(std::move(engine)), options_(options),
      engine_options_(engine_.options()) {
    if (options_.max_pinned == 0) options_.max_pinned = engine_options_.kv_blocks / 4;
    heartbeat_ = nanoseconds_now();
    thread_    = std::thread([this] { run(); });
}

Service::~Service() { stop(); }

void Service::stop() {
    {
        std::scoped_lock lock(mutex_);
        stopping_ = true;
        wake_cv_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
}

std::shared_ptr<const ParkedCache> Service::park(std::size_t most_bytes) {
    {
        const std::scoped_lock lock(mutex_);
        park_bytes_ = most_bytes;
    }
    stop();
    return std::move(parked_);
}

void Service::wake() {
    woken_ = true;
    wake_cv_.notify_one();
}

constexpr double flush_seconds = 30; // that the files of the prefix cache have when the service ends

void Service::run() {
    std::vector<Output> events;
    bool                busy = false;
    if (options_.cache_changed) engine_.log_cache(true);
    while (true) {
        heartbeat_ = nanoseconds_now();
        {
            std::unique_lock lock(mutex_);
            if (!busy) {
                const TimePoint later = std::chrono::steady_clock::now() + std::chrono::milliseconds(200);
                wake_cv_.wait_until(lock, wanted_ ? std::min(later, next_snapshot_at()) : later,
                                    [&] { return woken_ || stopping_; });
            }
            woken_ = false;
            if (stopping_) break;
            if (const bool log = listeners_ > 0; log != logging_) engine_.log_events(logging_ = log);
        }
        events.clear();
        try {
            busy = engine_.step(events);
        } catch (const std::exception& e) {
            fail_all(e.what());
            if (options_.failed) options_.failed();
            return;
        }
        if (options_.cache_changed)
            if (std::vector<CacheChange> changes = engine_.take_cache_changes(); !changes.empty())
                options_.cache_changed(std::move(changes));
        publish(); // first: when a caller has the answer, the statistics have it, too
        deliver(events);
    }
    try {
        engine_.flush(flush_seconds);
        const std::size_t most = [&] {
            const std::scoped_lock lock(mutex_);
            return park_bytes_;
        }();
        if (most > 0) parked_ = engine_.park(most);
    } catch (const std::exception&) { // the device is lost, and nobody waits for an answer
    }
}

// Appends a later output of the same answer.
static void append(Output& to, Output& more) {
    to.tokens.insert(to.tokens.end(), more.tokens.begin(), more.tokens.end());
    std::move(more.logprobs.begin(), more.logprobs.end(), std::back_inserter(to.logprobs));
    if (!more.prompt_logprobs.empty()) to.prompt_logprobs = std::move(more.prompt_logprobs);
    if (!more.embedding.empty()) to.embedding = std::move(more.embedding);
    to.prompt_tokens = more.prompt_tokens;
    to.cached_tokens = more.cached_tokens;
    to.loaded_tokens = more.loaded_tokens;
    to.disk_tokens   = more.disk_tokens;
    if (more.computed_tokens > 0) to.computed_tokens = more.computed_tokens;
    to.n_preempted     = more.n_preempted;
    to.draft_tokens    = more.draft_tokens;
    to.accepted_tokens = more.accepted_tokens;
    to.first_run       = more.first_run;
    to.done            = more.done;
    if (more.finish == FinishReason::none) return;
    to.finish  = more.finish;
    to.message = std::move(more.message);
}

// The bytes of an output's tokens and log-probabilities.
static std::size_t bytes_of(const Output& output) {
    std::size_t sum = output.tokens.size() * (sizeof(Token) + sizeof(TimePoint));
    for (const auto* positions : {&output.logprobs, &output.prompt_logprobs})
        for (const PositionLogprobs& p : *positions) sum += sizeof p + p.top.size() * sizeof(TokenLogprob);
    return sum;
}

// The places in the queue that a request with so many open prompts takes: at most half of all.
int Service::places(int open) const { return std::min(open, std::max(options_.max_queue / 2, 1)); }

// The queue's lock is held.
void Service::cut_off(OutputQueue& queue, const Output& last) {
    Output error;
    error.id      = last.id;
    error.index   = last.index;
    error.finish  = FinishReason::refused;
    error.message = "the client reads too slowly: too much output waits for it";
    queue.outputs.clear();
    queue.outputs.push_back(std::move(error));
    queue.cut = true;
    behind_ -= std::exchange(queue.bytes, 0);
}

// Moves each event into its output queue.
void Service::deliver(std::vector<Output>& events) {
    if (events.empty()) return;
    const TimePoint  now = std::chrono::steady_clock::now();
    std::unique_lock lock(mutex_);
    for (Output& e : events) {
        const auto found = queues_.find(e.id);
        if (found == queues_.end()) continue;
        const std::shared_ptr<OutputQueue> kept  = found->second;
        OutputQueue&                       queue = *kept;
        if (e.done) queues_.erase(found);
        std::scoped_lock queue_lock(queue.mutex);
        if (e.done) {
            queued_ -= places(queue.open) - places(queue.open - 1);
            queue.open--;
        }
        if (queue.gone) continue;
        if (queue.cut) {
            if (!e.done) engine_.cancel(e.id);
            continue;
        }
        const std::size_t bytes = bytes_of(e);
        // An error stands behind the tokens that came before it: they are still delivered.
        const bool error =
            e.finish == FinishReason::unmet || e.finish == FinishReason::failed || e.finish == FinishReason::refused;
        auto at = error ? queue.outputs.end() : std::ranges::find_if(queue.outputs, [&](const Output& o) {
            return o.id == e.id && o.index == e.index;
        });
        if (at == queue.outputs.end()) at = queue.outputs.insert(at, std::move(e));
        else append(*at, e);
        at->times.resize(at->tokens.size(), now);
        queue.bytes += bytes;
        // A caller that keeps up has next to nothing here.
        constexpr std::size_t slow = std::size_t(64) << 10;
        if ((behind_ += bytes) > options_.max_behind && queue.bytes > slow) cut_off(queue, *at);
        queue.changed.notify_all();
    }
    if (queues_.empty()) idle_cv_.notify_all();
}

// A snapshot looks at every block of the pool. So all callers share one snapshot, the engine takes at most ten a second, and they take
// at most a twentieth of its time.
TimePoint Service::next_snapshot_at() const {
    constexpr double least_apart = 0.1; // seconds
    return last_snapshot_ +
           std::chrono::duration_cast<TimePoint::duration>(in_seconds(std::max(least_apart, 20 * snapshot_seconds_)));
}

void Service::publish() {
    EngineStats stats = engine_.stats();
    if (stats.step_tokens > 0) metrics.step_tokens.observe(stats.step_tokens);
    bool wanted = false, refused = false;
    {
        std::scoped_lock lock(mutex_);
        refused = stats.disk.refused > 0 && stats_.disk.refused == 0;
        moved_ |= stats.steps != stats_.steps || stats.running != stats_.running;
        stats_ = stats;
        wanted = (wanted_ || (listeners_ > 0 && moved_)) && std::chrono::steady_clock::now() >= next_snapshot_at();
    }
    if (refused && options_.disk_full) options_.disk_full();
    if (!wanted) return;
    Stopwatch watch;
    auto      snapshot = std::make_shared<const Snapshot>(engine_.snapshot(options_.show_text));
    snapshot_seconds_  = watch.seconds();
    last_snapshot_     = std::chrono::steady_clock::now();
    moved_             = false;
    std::scoped_lock lock(mutex_);
    snapshot_ = std::move(snapshot);
    wanted_   = false;
    serial_++;
    snapshot_cv_.notify_all();
}

// The engine cannot go on: ends all requests with an error.
void Service::fail_all(const std::string& why) {
    std::scoped_lock lock(mutex_);
    failure_ = why.empty() ? "unknown" : why;
    for (auto& [id, queue] : queues_) {
        std::scoped_lock queue_lock(queue->mutex);
        Output&          output = queue->outputs.emplace_back();
        output.id               = id;
        output.finish           = FinishReason::failed;
        output.message          = cat("the engine has failed: ", failure_);
        queue->open             = 0;
        queue->changed.notify_all();
    }
    queues_.clear();
    queued_ = 0;
    idle_cv_.notify_all();
}

// -- callers

// A change of the shared state is complete or does not happen: its small allocations use the reserve when memory runs out.

std::expected<std::unique_ptr<RequestHandle>, Refusal> Service::submit(std::vector<Request> requests) {
    const MayFail    small(false);
    std::scoped_lock lock(mutex_);
    if (!failure_.empty())
        return std::unexpected(
            Refusal{Refused::broken, {ErrorKind::system, cat("the engine has failed: ", failure_)}, 0});
    if (draining_) {
        metrics.refused_draining++;
        return std::unexpected(Refusal{Refused::draining, {ErrorKind::system, "the server is shutting down"}, 0});
    }
    // Running requests do not count as waiting. When none waits, as many as the engine allows may run.
    const int running = stats_.waiting > 0 ? stats_.running : engine_options_.max_sequences;
    // Requests of several prompts leave a quarter of the queue to those of one.
    const int n = int(requests.size()), most = running + options_.max_queue - (n > 1 ? options_.max_queue / 4 : 0);
    if (n > running + options_.max_queue || queued_ + places(n) > most) {
        metrics.refused_full++;
        return std::unexpected(
            Refusal{Refused::full,
                    {ErrorKind::limit, cat("the queue is full: ", queues_.size(), " prompts run or wait, and ", n,
                                           n == 1 ? " more is" : " more are", " too many")},
                    0});
    }
    std::unique_ptr<RequestHandle> handle(new RequestHandle());
    int                            width = 0;
    for (std::size_t i = 0; i < requests.size(); i++) {
        const std::size_t n_tokens = requests[i].prompt.size();
        // The first prompts may take a quarter of the sequences. The more prompts there are before one, the more requests of other callers
        // run before it.
        width += requests[i].width();
        const unsigned quarters = unsigned((width - 1) / std::max(engine_options_.max_sequences / 4, 1));
        if (i > 0) requests[i].priority = std::min(requests[i].priority, 1'000'000) + int(std::bit_width(quarters));
        Result<RequestId> id = engine_.submit(std::move(requests[i]));
        if (!id) {
            for (RequestId other : handle->ids_) engine_.cancel(other), queues_.erase(other);
            metrics.refused_invalid++;
            return std::unexpected(Refusal{Refused::invalid, id.error(), n_tokens});
        }
        handle->ids_.push_back(*id);
        queues_[*id] = handle->queue_;
    }
    handle->queue_->open = n;
    handle->service_     = this;
    queued_ += places(n);
    wake();
    return handle;
}

void Service::cancel(RequestId id, int index) {
    const MayFail small(false);
    if (index < 0) engine_.cancel(id);
    else engine_.cancel(id, index);
    std::scoped_lock lock(mutex_);
    wake();
}

std::expected<Pin, Refusal> Service::pin(std::vector<Token> prompt, std::string cache_salt) {
    Pin pin;
    pin.n_tokens = int(prompt.size());
    pin.n_blocks = engine_options_.layout.blocks_at_once(pin.n_tokens, engine_options_.block_size, true);
    {
        std::scoped_lock lock(mutex_);
        if (pinned_ + pin.n_blocks > options_.max_pinned)
            return std::unexpected(
                Refusal{Refused::invalid,
                        {ErrorKind::limit, cat("the prefix needs ", pin.n_blocks, " blocks; ",
                                               options_.max_pinned - pinned_, " more can be pinned")},
                        0});
        pinned_ += pin.n_blocks;
    }
    const auto give_back = [&] {
        std::scoped_lock lock(mutex_);
        pinned_ -= pin.n_blocks;
    };
    Request request;
    request.prompt     = std::move(prompt);
    request.cache_salt = std::move(cache_salt);
    request.pin        = true;
    auto handle        = submit({std::move(request)});
    if (!handle) {
        give_back();
        return std::unexpected(handle.error());
    }
    std::vector<Output> outputs;
    FinishReason        finish = FinishReason::none;
    std::string         message;
    while ((*handle)->wait(1, outputs))
        for (const Output& o : outputs)
            if (o.finish != FinishReason::none) finish = o.finish, message = o.message;
    if (finish != FinishReason::stop) {
        give_back();
        return std::unexpected(
            Refusal{Refused::invalid, {ErrorKind::limit, message.empty() ? "cancelled" : message}, 0});
    }
    const MayFail    small(false);
    std::scoped_lock lock(mutex_);
    pin.request   = (*handle)->ids_[0];
    pin.id        = cat("pin-", ++n_pins_);
    pins_[pin.id] = pin;
    return pin;
}

bool Service::unpin(const std::string& id) {
    const MayFail    small(false);
    std::scoped_lock lock(mutex_);
    const auto       found = pins_.find(id);
    if (found == pins_.end()) return false;
    engine_.cancel(found->second.request);
    pinned_ -= found->second.n_blocks;
    pins_.erase(found);
    wake();
    return true;
}

std::vector<Pin> Service::pins() const {
    std::scoped_lock lock(mutex_);
    std::vector<Pin> out;
    out.reserve(pins_.size());
    for (const auto& [id, pin] : pins_) out.push_back(pin);
    return out;
}

bool Service::healthy() const {
    std::scoped_lock lock(mutex_);
    return failure_.empty() && double(nanoseconds_now() - heartbeat_) * 1e-9 < options_.watchdog_seconds;
}

std::string Service::failure() const {
    std::scoped_lock lock(mutex_);
    return failure_;
}

EngineStats Service::stats() const {
    std::scoped_lock lock(mutex_);
    return stats_;
}

int Service::in_flight() const {
    std::scoped_lock lock(mutex_);
    return int(queues_.size());
}

std::shared_ptr<const Snapshot> Service::snapshot(double seconds) {
    std::unique_lock lock(mutex_);
    wanted_                    = true;
    const std::uint64_t before = serial_;
    wake();
    if (!snapshot_cv_.wait_for(lock, in_seconds(seconds), [&] { return serial_ > before; })) return nullptr;
    return snapshot_;
}

std::shared_ptr<const Snapshot> Service::next_snapshot(std::uint64_t& serial, double seconds) {
    std::unique_lock lock(mutex_);
    if (!snapshot_cv_.wait_for(lock, in_seconds(seconds), [&] { return serial_ > serial; })) return nullptr;
    serial = serial_;
    return snapshot_;
}

bool Service::listen() {
    std::scoped_lock lock(mutex_);
    if (listeners_ >= options_.max_listeners) return false;
    listeners_++;
    wanted_ = true;
    wake();
    return true;
}

void Service::unlisten() {
    std::scoped_lock lock(mutex_);
    listeners_--;
}

bool Service::wait_until_idle(double seconds) {
    std::unique_lock lock(mutex_);
    return idle_cv_.wait_for(lock, in_seconds(seconds), [&] { return queues_.empty(); });
}

void Service::cancel_all() {
    std::scoped_lock lock(mutex_);
    for (const auto& [id, queue] : queues_) engine_.cancel(id);
    wake();
}

} // namespace quire
