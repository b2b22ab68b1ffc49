// quire.serve.models.model_pool: which of a server's models are loaded, for whom one is loaded, which one leaves. One thread loads and lets go;
// requests wait for it. **Owns** the entries of the models, and that thread.
export module quire.serve.models.model_pool;

import quire.core.base;
export import quire.serve.models.entries;
import quire.compute.memory;
import quire.engine.load_estimate;
import quire.serve.memory_reserve;
import quire.serve.models.file_stamp;
import quire.serve.models.leaving;
import quire.serve.models.load_host;
import quire.serve.models.memory_share;
import quire.serve.models.relisting;

export namespace quire {

struct PoolOptions {
    bool        many     = false; // requests choose a model by name; false: there is one, which answers to any name
    bool        strict   = false; // of one model: its own names only
    int         most     = 4;     // models loaded at once; 0: any number
    bool        autoload = true;  // a request loads the model that it names
    std::size_t bytes    = 0;     // of memory for all loaded models; 0: what the device has
    double      sleep_seconds =
        -1;                 // a model that did not answer for so long leaves memory until the next request; < 0: never
    int max_waiting = 1024; // requests that wait for models
    Say say         = [](const std::string&, bool) {}; // to the log
    // Describes a model before it sleeps: ModelView::asleep.
    std::function<std::string(const ApiContext& api)> describe = [](const ApiContext&) { return std::string(); };
    // Lists the models again, where `many`. Called on any thread, by one at a time.
    std::function<Result<std::vector<ModelSetup>>()> list = [] { return std::vector<ModelSetup>(); };
};

// A request for a model.
struct ModelWanted {
    std::string name;                  // as the client wrote it; "": none
    bool        autoload       = true; // false: only a model that is loaded, or sleeps
    bool        wakes          = true; // false: only a model that is loaded, not one that sleeps
    bool        answers        = true; // false: the request only looks at the model, which counts as idle and may leave
    std::function<bool()> gone = [] { return false; }; // the client has hung up
    HttpPeer* peer = nullptr; // the client, which outlives the lease: one that looks for too long is cut off
};

// Any thread, where nothing else is said.
class ModelPool {
    using Entry = ModelEntry;

public:
    // `setups`: at least one, with different names.
    ModelPool(std::vector<ModelSetup> setups, PoolOptions options, SharedContext& shared);
    // Of one model that is loaded already; for tests.
    ModelPool(std::unique_ptr<ModelHost> host, SharedContext& shared);
    ~ModelPool(); // every lease is gone
    ModelPool(const ModelPool&)            = delete;
    ModelPool& operator=(const ModelPool&) = delete;

    // A loaded model in use: it stays until the lease is gone.
    class Lease {
    public:
        Lease(ModelPool& pool, std::shared_ptr<Entry> entry, bool answers, HttpPeer* peer = nullptr);
        Lease(Lease&& other) noexcept;
        Lease& operator=(Lease&&) = delete;
        ~Lease();
        ModelHost&         host() const { return *host_; }
        const std::string& id() const { return host_->setup().id; }
        // From now on the model sleeps after so many seconds without a request, in place of PoolOptions::sleep_seconds; < 0: never.
        void keep(double seconds) const;

    private:
        ModelPool*             pool_;
        std::shared_ptr<Entry> entry_;
        ModelHost*             host_;
        bool                   answers_;
        HttpPeer*              peer_; // of one that looks; null: it never waits for its client
    };

    // Before start(): loads the first model, in this thread.
    Result<void> load_first(const Progress& progress);
    void         start();

    // Waits until the model is loaded. Error: there is no such model; it is not loaded and must not be loaded; it cannot be loaded; too many
    // wait; the client has gone.
    Parsed<Lease> acquire(const ModelWanted& wanted);
    // A lease of each loaded model, to read its state.
    std::vector<Lease> loaded();

    // Begins to load a model, or to let it go when its requests are answered. Error: no such model, or it is (not) loaded already.
    std::optional<ApiError> load(const std::string& name);
    std::optional<ApiError> unload(const std::string& name);
    // Lists the models again: new ones are there from now on; one that is not listed any more, or whose file or flags have changed, leaves when
    // its requests are answered. `gone`: the client has hung up. Error: the list cannot be made; nothing has changed.
    std::optional<ApiError> reload(const std::function<bool()>& gone);

    bool               many() const { return options_.many; }
    const PoolOptions& options() const { return options_; }
    SharedContext&     shared() { return shared_; }
    // See ModelEntries.
    std::vector<std::string>         names() const { return entries_.names(); }
    std::vector<ModelView>           views() const { return entries_.views(); }
    std::optional<ModelView>         view(const std::string& name) const { return entries_.view(name); }
    bool                             is_loaded(const std::string& name) const { return entries_.is_loaded(name); }
    ApiError                         unknown(const std::string& name) const { return entries_.unknown(name); }
    std::shared_ptr<const ModelCard> card(const std::string& id) { return entries_.card(id); }

    ModelEvents& events() { return events_; } // until the pool is drained

    // No request is accepted any more.
    void        drain();
    bool        draining() const;
    int         in_flight() const;
    void        cancel_all();
    std::string failure() const; // of the engine of the one model

private:
    using Lock = ModelEntries::Lock;

    bool                  has_place(const Entry& e) const;
    void                  run();
    void                  load(Lock& lock, Entry& e);
    Parsed<void>          make_room(Lock& lock, Entry& e, const ModelSetup& setup, EngineOptions& engine);
    std::optional<Error>  check_file(Entry& e, ModelSetup& setup);
    Parsed<void>          load_now(Lock& lock, Entry& e, const Progress& progress);
    void                  let_go(Lock& lock, Entry& e);
    std::size_t           parked_bytes() const;
    bool                  drop_parked(Lock& lock, const Entry* but);
    void                  make_host_room(Lock& lock, const Entry& e, const MemoryNeeds& needs, bool last);
    void                  set_status(Entry& e, ModelStatus status);
    void                  add_event(const Entry& e, Json data);
    void                  engine_failed(Entry& e);
    std::optional<double> seconds_to_sleep(TimePoint now);

    const PoolOptions options_;
    SharedContext&    shared_;
    ModelEvents       events_;
    Relisting         relisting_;

    ModelEntries entries_;

    // With the mutex of the entries.
    std::condition_variable changed_, work_;
    std::uint64_t           last_use_ = 0, last_load_order_ = 0;
    int                     n_waiting_ = 0;
    bool                    draining_ = false, stopping_ = false;

    std::thread thread_;
};

} // namespace quire

module :private;

namespace quire {

constexpr auto look_time = std::chrono::seconds(1); // for clients that look at a model which leaves

// An id in a sentence of the log: in quotes where it could end the line or be taken for other words.
std::string log_name(const std::string& id) {
    const bool plain =
        std::ranges::all_of(id, [](unsigned char c) { return c > ' ' && c != 0x7f && c != '"' && c != '\''; });
    return plain ? id : quote(id, 256);
}

// Ends a load from inside.
struct LoadCancelled : std::runtime_error {
    LoadCancelled() : std::runtime_error("the load was cancelled") {}
};

// -- leases

ModelPool::Lease::Lease(ModelPool& pool, std::shared_ptr<Entry> entry, bool answers, HttpPeer* peer)
    : pool_(&pool), entry_(std::move(entry)), host_(entry_->host.get()), answers_(answers),
      peer_(answers ? nullptr : peer) {
    if (peer_) entry_->watching.push_back(peer_);
    (answers ? entry_->users : entry_->lookers)++;
}

ModelPool::Lease::Lease(Lease&& other) noexcept
    : pool_(std::exchange(other.pool_, nullptr)), entry_(std::move(other.entry_)), host_(other.host_),
      answers_(other.answers_), peer_(other.peer_) {}

ModelPool::Lease::~Lease() {
    if (!pool_) return;
    const Lock lock = pool_->entries_.lock();
    (answers_ ? entry_->users : entry_->lookers)--;
    if (peer_) entry_->watching.erase(std::ranges::find(entry_->watching, peer_));
    if (answers_) {
        entry_->last_use   = ++pool_->last_use_;
        entry_->idle_since = std::chrono::steady_clock::now();
    }
    if (entry_->users > 0) return;
    pool_->work_.notify_all();
}

void ModelPool::Lease::keep(double seconds) const {
    const Lock lock = pool_->entries_.lock();
    entry_->keep    = seconds;
    pool_->work_.notify_all();
}

// -- the pool

ModelPool::ModelPool(std::vector<ModelSetup> setups, PoolOptions options, SharedContext& shared)
    : options_(std::move(options)), shared_(shared),
      relisting_(options_.list,
                 [this](std::vector<ModelSetup>&& list) {
                     entries_.take_list(std::move(list));
                     changed_.notify_all(); // requests that wait for a model look for its name again
                     work_.notify_all();    // the loading thread drops models that are gone
                 }),
      entries_(options_.many, options_.strict, events_, [this](Entry& e) { engine_failed(e); }) {
    for (ModelSetup& setup : setups) {
        Entry& e = entries_.add(std::move(setup));
        if (options_.many && e.setup.load_at_start) e.load_order = ++last_load_order_;
    }
}

ModelPool::ModelPool(std::unique_ptr<ModelHost> host, SharedContext& shared)
    : shared_(shared), relisting_({}, {}), entries_(false, false, events_, {}) {
    Entry& e = entries_.add(host->setup());
    e.host   = std::move(host);
    e.status = ModelStatus::loaded;
    e.card   = std::make_shared<ModelCard>(card_of(e.host->api()));
}

ModelPool::~ModelPool() {
    {
        const Lock lock = entries_.lock();
        stopping_       = true;
        work_.notify_all();
        changed_.notify_all();
        events_.end();
    }
    if (thread_.joinable()) thread_.join();
    for (const auto& e : entries_.all()) { // while an engine that fails may still say so
        Lock                             lock = entries_.lock();
        const std::unique_ptr<ModelHost> host = std::move(e->host);
        lock.unlock();
    }
}

void ModelPool::start() {
    thread_ = std::thread([this] { run(); });
}

Parsed<ModelPool::Lease> ModelPool::acquire(const ModelWanted& wanted) {
    Lock                        lock = entries_.lock();
    std::shared_ptr<Entry>      found;
    std::uint64_t               failures = 0;
    bool                        counted  = false;
    std::shared_ptr<Entry>      awaited; // has this request among its waiting ones
    const std::shared_ptr<void> count(nullptr, [&](void*) {
        n_waiting_ -= counted;
        if (awaited && --awaited->waiting == 0) work_.notify_all(); // it may sleep now
    });
    while (true) {
        if (!found || found->removed) { // perhaps another file has its name now
            found = entries_.find(wanted.name);
            if (!found) return std::unexpected(unknown(wanted.name));
            failures = found->failures;
        }
        Entry& e = *found;
        if (e.host && !e.leaving && e.status == ModelStatus::loaded)
            return Lease(*this, found, wanted.answers, wanted.peer);
        if (draining_ || stopping_)
            return std::unexpected(ApiError{503, "the server is shutting down", "", "shutting_down"});
        if (e.failures != failures)
            return std::unexpected(e.failure.value_or(ApiError{
                503, cat("the model ", quote(e.setup.id), " could not be loaded"), "model", "model_not_loaded"}));
        if (!counted && n_waiting_ >= options_.max_waiting)
            return std::unexpected(
                ApiError{429, cat("the queue is full: ", n_waiting_, " requests wait for models"), "", "queue_full"});
        const bool may_load = e.status == ModelStatus::sleeping || e.to_sleep ? wanted.wakes : wanted.autoload;
        if (e.load_order == 0 && (e.status != ModelStatus::loading || e.cancelled)) {
            if (!may_load)
                return std::unexpected(
                    ApiError{400, cat("the model ", quote(e.setup.id), " is not loaded"), "model", "model_not_loaded"});
            if (e.failure && e.unusable && *e.unusable == stamp_of(e.setup.path)) return std::unexpected(*e.failure);
            e.load_order = ++last_load_order_;
            work_.notify_all();
        }
        n_waiting_ += !std::exchange(counted, true);
        if (awaited != found) {
            if (awaited) awaited->waiting--;
            awaited = found;
            awaited->waiting++;
        }
        changed_.wait_for(lock, std::chrono::milliseconds(100)); // nothing wakes this thread when the client has gone
        lock.unlock();
        const bool gone = wanted.gone();
        lock.lock();
        if (gone) return std::unexpected(ApiError{499, "the client has gone", "", ""});
    }
}

std::vector<ModelPool::Lease> ModelPool::loaded() {
    std::vector<Lease> out;
    const Lock         lock = entries_.lock();
    out.reserve(entries_.all().size());
    for (const auto& e : entries_.all())
        if (e->host && !e->leaving) out.emplace_back(*this, e, false);
    return out;
}

std::optional<ApiError> ModelPool::load(const std::string& name) {
    const Lock                   lock = entries_.lock();
    const std::shared_ptr<Entry> e    = entries_.find(name);
    if (!e) return unknown(name);
    if (e->load_order != 0 || (e->status == ModelStatus::loading && !e->cancelled) ||
        (e->status == ModelStatus::loaded && !e->leaving))
        return ApiError{400, cat("the model ", quote(e->setup.id), " is loaded already, or loading"), "model", ""};
    e->load_order = ++last_load_order_;
    work_.notify_all();
    return std::nullopt;
}

std::optional<ApiError> ModelPool::unload(const std::string& name) {
    const Lock                   lock = entries_.lock();
    const std::shared_ptr<Entry> e    = entries_.find(name);
    if (!e) return unknown(name);
    if (e->status == ModelStatus::unloaded && e->load_order == 0)
        return ApiError{400, cat("the model ", quote(e->setup.id), " is not loaded"), "model", "model_not_loaded"};
    if (e->status == ModelStatus::sleeping) set_status(*e, ModelStatus::unloaded);
    if (e->load_order != 0 || e->status == ModelStatus::loading) {
        e->cancelled  = e->status == ModelStatus::loading;
        e->load_order = 0;
        e->failure = ApiError{503, cat("the model ", quote(e->setup.id), " was unloaded"), "model", "model_not_loaded"};
        e->unusable.reset();
        e->failures++; // for requests that wait; later ones wait for another load
        changed_.notify_all();
    }
    if (e->host) e->leaving = true, e->to_sleep = false;
    work_.notify_all();
    return std::nullopt;
}

// -- the list

std::optional<ApiError> ModelPool::reload(const std::function<bool()>& gone) {
    const Result<void> done = relisting_.wait(gone);
    if (done) return std::nullopt;
    options_.say(cat("the models cannot be listed again: ", done.error().message), true);
    // Clients are not told where the files are.
    return ApiError{500, "the models cannot be listed again, and stay as they were; the server's log says why", "",
                    "reload_failed"};
}

// Whether no removed model of its name is there: both would have the same files of KV.
bool ModelPool::has_place(const Entry& e) const {
    return !std::ranges::any_of(
        entries_.all(), [&](const auto& one) { return one->removed && one->setup.id == e.setup.id && one->host; });
}

// -- the loading thread

void ModelPool::run() {
    Lock lock = entries_.lock();
    while (!stopping_) {
        entries_.drop_removed();
        const auto at =
            std::ranges::find_if(entries_.all(), [](const auto& e) { return e->leaving && e->host && e->users == 0; });
        if (at != entries_.all().end()) {
            const std::shared_ptr<Entry> leaver = *at; // the list may change meanwhile
            let_go(lock, *leaver);
            continue;
        }
        std::shared_ptr<Entry> next;
        for (const auto& e : entries_.all())
            if (e->load_order != 0 && !e->host && (!next || e->load_order < next->load_order) && has_place(*e))
                next = e;
        if (next) {
            load(lock, *next);
            continue;
        }
        const std::optional<double> seconds = seconds_to_sleep(std::chrono::steady_clock::now());
        if (!seconds) continue; // one goes
        work_.wait_for(lock, std::chrono::duration<double>(*seconds));
    }
}

// Marks the models that have been idle for long enough. The seconds until the next one may be; nothing: one is marked.
std::optional<double> ModelPool::seconds_to_sleep(TimePoint now) {
    double next = 3600;
    bool   any  = false;
    for (const auto& e : entries_.all()) {
        if (!e->host || e->leaving || e->users > 0 || e->waiting > 0) continue;
        const std::optional<double> left = e->left_awake(now);
        if (left && *left <= 0) any = e->leaving = e->to_sleep = true;
        else if (left) next = std::min(next, *left + 0.001);
    }
    return any ? std::nullopt : std::optional(next);
}

void ModelPool::load(Lock& lock, Entry& e) {
    int          shown = -1;
    Parsed<void> done  = load_now(lock, e, [&](double fraction) {
        const Lock inner = entries_.lock();
        if (stopping_ || e.cancelled) throw LoadCancelled();
        if (const int tenths = int(fraction * 10); tenths > shown) {
            shown = tenths;
            add_event(e, {{"status", "loading"},
                          {"progress",
                           {{"stages", Json::array({"text_model"})}, {"current", "text_model"}, {"value", fraction}}}});
        }
    });
    if (done) return;
    options_.say(cat("model ", log_name(e.setup.id), ": ", done.error().message), true);
}

// Lets models go until there is room for the one of `setup`, and shares out the memory in `engine`.
Parsed<void> ModelPool::make_room(Lock& lock, Entry& e, const ModelSetup& setup, EngineOptions& engine) {
    lock.unlock();
    Result<LoadEstimate> estimate = estimate_load(setup.path, engine);
    lock.lock();
    if (!estimate) return {}; // the load will say why
    const MemoryNeeds needs  = needs_of(*estimate, engine);
    const std::size_t parked = parked_bytes();
    make_host_room(lock, e, needs, false);
    if (needs.on_host) estimate->memory += parked - std::min(parked, parked_bytes());
    if (e.cancelled || stopping_)
        return std::unexpected(ApiError{503, "the load was cancelled", "model", "model_not_loaded"});
    std::vector<std::shared_ptr<Entry>> there;
    std::vector<Resident>               residents;
    std::size_t used = 0, host = 0; // bytes of all loaded models; of their pools, whose pages may not be there yet
    for (const auto& one : entries_.all()) {
        if (!one->host) continue;
        there.push_back(one);
        residents.push_back({one->host->bytes(), one->last_use, one->users > 0});
        used += one->host->bytes();
        host += one->host->host_bytes();
    }
    RoomAsked asked{needs.all(), estimate->memory, options_.most};
    if (needs.on_host) asked.free -= std::min(asked.free, host);
    if (options_.bytes > 0) asked.free = std::min(asked.free, options_.bytes - std::min(options_.bytes, used));
    const auto leave = choose_leaving(residents, asked);
    const auto mib   = [](std::size_t bytes) { return cat(bytes >> 20, " MiB"); };
    if (!leave)
        return std::unexpected(ApiError{
            503,
            cat("there is no room for the model ", quote(e.setup.id), ": ",
                leave.error() == NoRoom::answering
                    ? "the models that would have to leave are answering"
                    : cat("it needs ", mib(asked.bytes), ", and all models together have ", mib(asked.free + used))),
            "model", "no_room"});
    for (std::size_t i : *leave) there[i]->leaving = true;
    for (std::size_t i : *leave) {
        host -= std::min(host, there[i]->host->host_bytes());
        options_.say(cat("model ", log_name(there[i]->setup.id), " leaves for ", log_name(e.setup.id)), false);
        let_go(lock, *there[i]);
    }
    make_host_room(lock, e, needs, true); // of what these have parked, too
    // The models that are loaded later have to find room, too.
    const int all = int(entries_.all().size()), n = options_.most > 0 ? std::min(options_.most, all) : all;
    const int left = std::max(n - int(there.size() - leave->size()), 1);
    share_memory(engine, needs, {options_.bytes, n, left, host});
    return {};
}

// Reads what `setup` takes from its file, and finds the faults of the file that are known without its weights. Without the lock.
std::optional<Error> ModelPool::check_file(Entry& e, ModelSetup& setup) {
    const FileStamp stamp = stamp_of(setup.path);
    Result<void>    ok    = setup.read_file();
    if (ok) ok = setup.check_file();
    const Lock lock = entries_.lock();
    e.unusable.reset();
    if (ok) return std::nullopt;
    // A fault of another file goes when that does.
    const std::string& said  = ok.error().message;
    bool               other = !setup.engine.kv_key.empty() && said.contains(setup.engine.kv_key);
    for (const AdapterOption& adapter : setup.engine.adapters) other = other || said.contains(adapter.path);
    if (!other && lasts(ok.error(), setup.path)) e.unusable = stamp;
    return ok.error();
}

Parsed<void> ModelPool::load_now(Lock& lock, Entry& e, const Progress& progress) {
    ModelSetup setup = e.setup;
    e.cancelled      = false;
    e.failure.reset();
    set_status(e, ModelStatus::loading);
    const auto say = [this, id = log_name(setup.id)](const std::string& text, bool warning) { // the model keeps it
        options_.say(options_.many ? cat("model ", id, ": ", text) : text, warning);
    };
    const bool at_start = !options_.many && !thread_.joinable(); // the error goes to the log alone
    const auto fault    = [&](const Error& error) {
        return at_start ? ApiError{500, error.message, "", ""} : load_fault(setup, error);
    };
    Parsed<void>                                 done;
    std::unique_ptr<ModelHost>                   host;
    std::shared_ptr<const ParkedCache>           parked;
    const std::optional<std::vector<AdapterUse>> scales = e.scales;
    lock.unlock();
    try {
        if (options_.many) { // no model leaves for a file that cannot be used
            if (const auto error = check_file(e, setup)) done = std::unexpected(fault(*error));
            lock.lock();
            if (done) done = make_room(lock, e, setup, setup.engine);
            lock.unlock();
        }
        if (done) {
            lock.lock();
            parked = e.parked;
            lock.unlock();
            Result<LoadedHost> loaded = load_host(setup, shared_, progress, say, parked.get(), scales);
            if (loaded) {
                host = std::move(loaded->host);
                lock.lock();
                e.card = std::move(loaded->card);
                e.parked.reset();
                lock.unlock();
                parked.reset(); // without the lock: to give back much memory takes a while
            } else {
                done = std::unexpected(fault(loaded.error()));
            }
        }
    } catch (const std::bad_alloc&) {
        done = std::unexpected(fault({ErrorKind::limit, "there is not enough memory"}));
    } catch (const std::exception& error) { // no more threads
        done = std::unexpected(fault({ErrorKind::system, error.what()}));
    }
    if (!lock.owns_lock()) lock.lock();
    if (e.cancelled || !done) {
        // Requests that came since the load was cancelled wait for another one.
        if (!e.cancelled) e.load_order = 0, e.failure = done.error(), e.failures++;
        if (host) {
            lock.unlock();
            host.reset();
            lock.lock();
        }
        if (!e.failure) e.failure = ApiError{503, "the load was cancelled", "model", "model_not_loaded"};
        set_status(e, ModelStatus::unloaded);
        return std::unexpected(*e.failure);
    }
    e.load_order = 0;
    e.host       = std::move(host);
    e.keep       = options_.sleep_seconds;
    e.leaving = e.to_sleep = false;
    e.last_use             = ++last_use_;
    e.idle_since           = std::chrono::steady_clock::now();
    if (draining_) e.host->service().drain();
    if (options_.many && !e.host->service().failure().empty()) e.leaving = true; // it failed before it was here
    set_status(e, ModelStatus::loaded);
    return {};
}

Result<void> ModelPool::load_first(const Progress& progress) {
    Lock         lock = entries_.lock();
    Entry&       e    = *entries_.all()[0];
    Parsed<void> done = load_now(lock, e, progress);
    if (!done) return fail_with(ErrorKind::system, done.error().message);
    return {};
}

// The model has no users and gets none. Those that look at it notice that it takes no requests any more; a client that reads too slowly to
// let them is cut off, since this thread waits for them.
void ModelPool::let_go(Lock& lock, Entry& e) {
    e.host->service().drain();
    const TimePoint cut = std::chrono::steady_clock::now() + look_time;
    while (e.lookers > 0 && !stopping_) {
        work_.wait_for(lock, std::chrono::milliseconds(20));
        if (std::chrono::steady_clock::now() < cut) continue;
        for (HttpPeer* peer : e.watching) peer->cut();
    }
    if (e.lookers > 0) return; // the destructor does it
    std::unique_ptr<ModelHost> host    = std::move(e.host);
    const bool                 returns = !e.removed && host->service().failure().empty();
    lock.unlock();
    std::string                        asleep = options_.describe(host->api());
    auto                               scales = changed_scales(host->service());
    std::size_t                        most   = std::size_t(host->service().engine_options().kv_host_bytes);
    std::shared_ptr<const ParkedCache> parked = returns ? host->park() : nullptr;
    host.reset();
    lock.lock();
    e.asleep     = std::move(asleep);
    e.parked     = std::move(parked);
    e.scales     = std::move(scales);
    e.host_bytes = most;
    // All models together have as much as the one with the largest host tier.
    for (const auto& one : entries_.all()) most = std::max(most, one->host_bytes);
    while (e.parked && parked_bytes() > most && drop_parked(lock, &e)) {}
    const ModelStatus status = e.to_sleep ? ModelStatus::sleeping : ModelStatus::unloaded;
    e.leaving = e.to_sleep = false;
    set_status(e, status);
    options_.say(
        cat("model ", log_name(e.setup.id), status == ModelStatus::sleeping ? " sleeps" : " is unloaded",
            e.parked ? cat("; ", e.parked->bytes() >> 10, " KiB of its prefix cache stay in host memory") : ""),
        false);
}

std::size_t ModelPool::parked_bytes() const {
    std::size_t sum = 0;
    for (const auto& one : entries_.all())
        if (one->parked) sum += one->parked->bytes();
    return sum;
}

// Forgets the parked cache of the model that was used least recently, but not that of `but`. False: there is none. Without the lock while memory is given
// back.
bool ModelPool::drop_parked(Lock& lock, const Entry* but) {
    Entry* oldest = nullptr;
    for (const auto& one : entries_.all())
        if (one->parked && one.get() != but && (!oldest || one->last_use < oldest->last_use)) oldest = one.get();
    if (!oldest) return false;
    std::shared_ptr<const ParkedCache> parked = std::move(oldest->parked);
    lock.unlock();
    parked.reset();
    lock.lock();
    return true;
}

// Parked caches go before a model does. `last`: the model's own, too.
void ModelPool::make_host_room(Lock& lock, const Entry& e, const MemoryNeeds& needs, bool last) {
    const std::size_t wanted = needs.on_host ? needs.all() : needs.other;
    while (wanted > available_memory() && drop_parked(lock, &e)) {}
    if (last && wanted > available_memory()) drop_parked(lock, nullptr);
}

// On the engine's thread: it has given every request an error, and takes no step any more.
void ModelPool::engine_failed(Entry& e) {
    const Lock lock = entries_.lock();
    if (!e.host) return;
    e.leaving = true;
    e.failure = ApiError{503, cat("the engine has failed: ", e.host->service().failure()), "", "engine_failed"};
    work_.notify_all();
}

// -- what is shown

void ModelPool::set_status(Entry& e, ModelStatus status) {
    e.status = status;
    Json data{{"status", name_of(status)}};
    if (status == ModelStatus::unloaded && e.failure) data["failed"] = true, data["error"] = e.failure->message;
    add_event(e, std::move(data));
    changed_.notify_all();
}

void ModelPool::add_event(const Entry& e, Json data) {
    events_.add(Json{{"model", e.setup.id}, {"event", "model_status"}, {"data", std::move(data)}});
}

// -- the end

void ModelPool::drain() {
    const Lock lock = entries_.lock();
    draining_       = true;
    for (const auto& e : entries_.all())
        if (e->host) e->host->service().drain();
    changed_.notify_all();
    events_.end();
}

bool ModelPool::draining() const {
    const Lock lock = entries_.lock();
    return draining_;
}

int ModelPool::in_flight() const {
    const Lock lock = entries_.lock();
    int        n    = 0;
    for (const auto& e : entries_.all())
        if (e->host) n += e->host->service().in_flight();
    return n;
}

void ModelPool::cancel_all() {
    const Lock lock = entries_.lock();
    for (const auto& e : entries_.all())
        if (e->host) e->host->service().cancel_all();
}

std::string ModelPool::failure() const {
    const Lock lock = entries_.lock();
    return !options_.many && entries_.all()[0]->host ? entries_.all()[0]->host->service().failure() : "";
}

} // namespace quire
