// quire.serve.models.entries: the models that a server offers, loaded or not: finds them by name, lists and shows them. **Owns** the list, what is
// known of each model, and the mutex of both.
export module quire.serve.models.entries;

import quire.core.base;
import quire.core.json;
import quire.serve.models.file_stamp;
export import quire.serve.models.model_events;
export import quire.serve.models.model_host;
export import quire.serve.models.model_view;

export namespace quire {

// A model of the list. All but `setup` is read and written with the mutex of the list.
struct ModelEntry {
    ModelSetup                         setup;           // never changes
    bool                               removed = false; // not listed any more
    ModelStatus                        status  = ModelStatus::unloaded;
    std::unique_ptr<ModelHost>         host;
    std::shared_ptr<const ParkedCache> parked;         // of its last host
    std::size_t                        host_bytes = 0; // of the host tier that this had
    std::shared_ptr<const ModelCard>   card;
    std::string                        asleep;
    int                                users = 0, lookers = 0; // leases
    int                      waiting    = 0; // requests that wait for a lease: it does not sleep before they have one
    bool                     leaving    = false;         // no new lease; goes when there is none
    bool                     to_sleep   = false;         // and then sleeps
    bool                     cancelled  = false;         // its load is to end
    std::uint64_t            load_order = 0;             // to be loaded, the smallest first; 0: not
    std::uint64_t            last_use = 0, failures = 0; // the number of its last use; failed loads so far
    TimePoint                idle_since{};
    std::optional<ApiError>  failure;              // of the last load, or of the engine
    std::optional<FileStamp> unusable, unreadable; // the file that could not be loaded; that has no card
    std::vector<HttpPeer*>   watching;             // the clients of the lookers
    double                   keep = -1;            // seconds that it stays awake without a request; < 0: for ever
    // The scales that POST /lora-adapters has set for its last host; nothing: the scales are those of the flags.
    std::optional<std::vector<AdapterUse>> scales;

    // The seconds until it sleeps, if no request asks it from now on. Nothing: it never sleeps.
    std::optional<double> left_awake(TimePoint now) const;
};

class ModelEntries {
public:
    using Lock = std::unique_lock<std::mutex>;

    // `many`: requests choose a model by name; else there is one, which answers to any name, or if it is `strict` to its own ones. `events`: gets the
    // changes of the list, and outlives it. `engine_failed`: called on the thread of an engine of `many` that has failed, without the mutex.
    ModelEntries(bool many, bool strict, ModelEvents& events, std::function<void(ModelEntry&)> engine_failed)
        : many_(many), strict_(strict), events_(events), engine_failed_(std::move(engine_failed)) {}

    // Takes the mutex.
    [[nodiscard]] Lock lock() const { return Lock(mutex_); }

    // -- with the mutex

    // Removed entries stand behind the others until they have left.
    const std::vector<std::shared_ptr<ModelEntry>>& all() const { return entries_; }
    // The entry that answers to the name; null: none does.
    std::shared_ptr<ModelEntry> find(const std::string& name) const;
    ModelEntry&                 add(ModelSetup setup);
    // Of the loading thread, which alone drops an entry that has a host or loads: forgets removed entries that have left.
    void drop_removed();

    // -- any thread, without the mutex

    // Takes another list: an entry stays where name, path, file and flags are as they were, others leave.
    void                     take_list(std::vector<ModelSetup>&& setups);
    std::vector<std::string> names() const; // of all models
    std::vector<ModelView>   views() const;
    // Nothing: there is no such model.
    std::optional<ModelView> view(const std::string& name) const;
    bool                     is_loaded(const std::string& name) const;
    // The error for a name that no model has.
    ApiError unknown(const std::string& name) const;
    // Facts about a model, loaded or not; read once from its file, as long as that does not change. Null: the file cannot be read.
    std::shared_ptr<const ModelCard> card(const std::string& id);

private:
    std::shared_ptr<ModelEntry> entry_of(ModelSetup setup) const;

    const bool                               many_, strict_;
    ModelEvents&                             events_;
    const std::function<void(ModelEntry&)>   engine_failed_;
    mutable std::mutex                       mutex_; // of the list, and of the entries
    std::vector<std::shared_ptr<ModelEntry>> entries_;
};

} // namespace quire

module :private;

namespace quire {

std::optional<double> ModelEntry::left_awake(TimePoint now) const {
    if (keep < 0) return std::nullopt;
    return keep - (users > 0 ? 0 : std::chrono::duration<double>(now - idle_since).count());
}

// -- the list

std::shared_ptr<ModelEntry> ModelEntries::entry_of(ModelSetup setup) const {
    auto e   = std::make_shared<ModelEntry>();
    e->setup = std::move(setup);
    if (many_) e->setup.service.failed = [this, e = e.get()] { engine_failed_(*e); };
    return e;
}

ModelEntry& ModelEntries::add(ModelSetup setup) { return *entries_.emplace_back(entry_of(std::move(setup))); }

std::shared_ptr<ModelEntry> ModelEntries::find(const std::string& name) const {
    if (!many_ && (!strict_ || name.empty())) return entries_[0];
    const std::string bare = without_latest(name);
    for (const std::string* wanted : {&name, &bare})
        for (const auto& e : entries_)
            if (!e->removed && e->setup.answers_to(*wanted)) return e;
    return nullptr;
}

ApiError ModelEntries::unknown(const std::string& name) const {
    if (many_ && name.empty())
        return {400, "the request names no model; GET /models lists the models", "model", "model_missing"};
    return {404,
            cat("the model ", quote(name), " does not exist; ",
                many_ ? std::string("GET /models lists the models")
                      : cat("the one here is ", quote(entries_[0]->setup.id))),
            "model", "model_not_found"};
}

// The requests that wait for it look for its name again.
void remove(ModelEntry& e) {
    e.removed    = true;
    e.load_order = 0;
    e.cancelled  = e.status == ModelStatus::loading;
    if (e.host) e.leaving = true, e.to_sleep = false;
}

void ModelEntries::take_list(std::vector<ModelSetup>&& setups) {
    std::map<std::string, std::shared_ptr<ModelEntry>> made; // by path and name
    const auto key = [](const ModelSetup& setup) { return cat(setup.path, '\0', setup.id); };
    std::vector<std::shared_ptr<ModelEntry>> listed, gone;
    for (ModelSetup& setup : setups) listed.push_back(entry_of(std::move(setup))); // outside the lock
    const Lock lock(mutex_);
    for (const auto& e : entries_)
        if (!e->removed) made.emplace(key(e->setup), e);
    for (auto& e : listed)
        if (const auto old = made.find(key(e->setup));
            old != made.end() && old->second->setup.version == e->setup.version) {
            e = old->second;
            made.erase(old);
        }
    for (const auto& [path, e] : made) {
        remove(*e);
        const std::string& id = e->setup.id;
        if (!std::ranges::any_of(listed, [&](const auto& one) { return one->setup.id == id; }))
            events_.add(Json{{"model", id}, {"event", "model_remove"}});
    }
    for (const auto& e : entries_)
        if (e->removed) gone.push_back(e);
    entries_ = std::move(listed);
    entries_.insert(entries_.end(), gone.begin(), gone.end());
    events_.add(Json{{"model", "*"}, {"event", "models_reload"}});
}

void ModelEntries::drop_removed() {
    std::erase_if(entries_, [](const auto& e) { return e->removed && !e->host && e->status != ModelStatus::loading; });
}

// -- what is shown

ModelView view_of(const ModelEntry& e) {
    ModelView view;
    view.id    = e.setup.id;
    view.names = e.setup.names();
    for (const AdapterOption& adapter : e.setup.engine.adapters)
        if (!e.setup.has_alias(adapter.name)) view.adapters.emplace(adapter.name, adapter.path);
    view.status = e.status;
    view.file   = std::filesystem::path(e.setup.path).filename().string();
    view.card   = e.card;
    if (e.failure) view.failure = e.failure->message;
    if (e.status == ModelStatus::sleeping) view.asleep = e.asleep;
    if (e.host) {
        view.in_flight = e.host->service().in_flight();
        view.device    = e.host->service().engine_options().device;
        view.sleeps_in = e.left_awake(std::chrono::steady_clock::now());
    }
    return view;
}

std::vector<ModelView> ModelEntries::views() const {
    const Lock             lock(mutex_);
    std::vector<ModelView> out;
    for (const auto& e : entries_)
        if (!e->removed) out.push_back(view_of(*e));
    return out;
}

std::optional<ModelView> ModelEntries::view(const std::string& name) const {
    const Lock                        lock(mutex_);
    const std::shared_ptr<ModelEntry> e = find(name);
    if (!e) return std::nullopt;
    return view_of(*e);
}

bool ModelEntries::is_loaded(const std::string& name) const {
    const Lock                        lock(mutex_);
    const std::shared_ptr<ModelEntry> e = find(name);
    return e && e->host && !e->leaving && e->status == ModelStatus::loaded;
}

std::vector<std::string> ModelEntries::names() const {
    const Lock               lock(mutex_);
    std::vector<std::string> out;
    for (const auto& e : entries_)
        for (std::string& name : e->removed ? std::vector<std::string>() : e->setup.names())
            out.push_back(std::move(name));
    return out;
}

std::shared_ptr<const ModelCard> ModelEntries::card(const std::string& id) {
    std::shared_ptr<ModelEntry> e;
    std::optional<FileStamp>    unreadable;
    {
        const Lock lock(mutex_);
        e = find(id);
        if (!e) return nullptr;
        if (e->card) return e->card;
        unreadable = e->unreadable;
    }
    const ModelSetup& setup = e->setup;
    const FileStamp   stamp = stamp_of(setup.path);
    if (unreadable && *unreadable == stamp) return nullptr;
    Result<ModelCard> read = read_card(setup.path, setup.engine.context, setup.endpoints.limits.samplers, setup.given);
    std::shared_ptr<const ModelCard> card;
    if (read) card = std::make_shared<const ModelCard>(std::move(*read));
    const Lock lock(mutex_);
    if (!read && lasts(read.error(), setup.path)) e->unreadable = stamp;
    if (!e->card) e->card = std::move(card);
    return e->card;
}

} // namespace quire
