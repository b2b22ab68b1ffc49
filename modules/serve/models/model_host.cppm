// quire.serve.models.model_host: one loaded model with all that serves it, and how it is loaded. **Owns** the service with its engine, the
// objects of the routes for this model, and the publisher of its KV events.
export module quire.serve.models.model_host;

import quire.core.base;
export import quire.engine.load_estimate;
export import quire.engine.sampling_defaults;
export import quire.serve.api.context;
import quire.compute.memory;
import quire.engine.adapter_list;
import quire.engine.files.cipher;
import quire.engine.kv_quality;
import quire.model_file.config;
import quire.model_file.weights;
import quire.serve.kv_events.publisher;
import quire.text.calls.reasoning_form;
import quire.text.calls.tool_form;
import quire.text.tokens.tokenizer;

export namespace quire {

// A model as the flags name it.
struct ModelSetup {
    std::string              id, path;  // `id`: the first of endpoints.aliases
    EngineOptions            engine;    //
    EndpointOptions          endpoints; // read_file() fills in what comes from the file
    ServiceOptions           service;
    std::string              template_name, template_source, template_variables; // as ChatTemplate has them
    std::string              tool_form = "auto", reasoning_format = "deepseek";
    std::vector<std::string> pins;                 // texts whose KV is computed at load and kept
    std::string              kv_events, kv_replay; // endpoints of KV events
    bool                     load_at_start = false;
    std::string              version; // of the file and the flags: where it differs, it is another model
    // Whether the user gave the flag: then the file's value does not count.
    std::function<bool(const std::string& flag)> given = [](const std::string&) { return false; };
    FileSampling                                 from_file{};

    // All names that requests may use: the aliases, then the adapters'.
    std::vector<std::string> names() const;
    bool                     has_alias(const std::string& name) const {
        return std::ranges::find(endpoints.aliases, name) != endpoints.aliases.end();
    }
    bool answers_to(const std::string& name) const {
        return has_alias(name) ||
               std::ranges::find(engine.adapters, name, &AdapterOption::name) != engine.adapters.end();
    }
    // The settings that the model's file has: chat template, samplers, marks. Error: a fault of the file or of the template;
    // `wrong_name`: it is the name of the template.
    Result<void> read_file(bool* wrong_name = nullptr);
    // Reads the model's file without its weights, and the other files of the setup. Error: a fault of the options, or of a file's configuration,
    // tensors or vocabulary, as a load would find it.
    Result<void> check_file() const;
};

// Says a sentence to the server's log.
using Say = std::function<void(const std::string& sentence, bool warning)>;

class ModelHost {
public:
    // `engine`: of `setup`, whose read_file() was called; for tests.
    ModelHost(Engine engine, ModelSetup setup, SharedContext& shared);
    // After read_file(): loads the model. `parked`: what park() has returned, or null. Error: as Engine::load(); a prefix that cannot be pinned.
    static Result<std::unique_ptr<ModelHost>> load(ModelSetup setup, SharedContext& shared, const Progress& progress,
                                                   const Say& say, const ParkedCache* parked = nullptr);
    // The engine alone: of a process that another one leads. `facts`: gets those of the file.
    static Result<Engine> load_engine(ModelSetup& setup, const Progress& progress, const Say& say,
                                      const ParkedCache* parked = nullptr);
    // Before it leaves: see Service::park(). Up to as many bytes as the host tier has, and half of what is free.
    std::shared_ptr<const ParkedCache> park();

    Service&           service() { return *service_; }
    ApiContext&        api() { return *api_; }
    const ModelSetup&  setup() const { return setup_; }
    const std::string& description() const { return description_; } // of the engine
    // Bytes of the weights and of all pools of blocks; of them, the pools in the memory of the host.
    std::size_t bytes() const { return bytes_; }
    std::size_t host_bytes() const { return host_bytes_; }

private:
    ModelSetup                   setup_;
    std::string                  description_;
    std::unique_ptr<KvPublisher> publisher_; // outlives the service
    std::unique_ptr<Service>     service_;
    std::unique_ptr<ApiContext>  api_;
    std::size_t                  bytes_ = 0, host_bytes_ = 0;
};

} // namespace quire

module :private;

namespace quire {

std::vector<std::string> ModelSetup::names() const {
    std::vector<std::string> all = endpoints.aliases;
    for (const AdapterOption& adapter : engine.adapters)
        if (!has_alias(adapter.name)) all.push_back(adapter.name);
    return all;
}

Result<void> ModelSetup::read_file(bool* wrong_name) {
    const Result<Gguf> file = Gguf::open(path);
    if (!file) return std::unexpected(file.error());
    from_file                   = take_file_sampling(*file, given, endpoints.limits.samplers);
    Result<ChatTemplate> chosen = ChatTemplate::choose(*file, template_name, template_source);
    if (!chosen) {
        if (wrong_name) *wrong_name = !template_name.empty();
        return std::unexpected(chosen.error());
    }
    if (auto ok = chosen->set_defaults(template_variables); !ok) return std::unexpected(ok.error());
    if (const auto now = local_seconds(endpoints.now); !now) return std::unexpected(now.error());
    endpoints.tool_form =
        tool_form == "auto" ? call_form(*chosen) : CallForm(tool_form_of(tool_form).value_or(ToolForm::none));
    endpoints.reasoning             = quire::reasoning_form(*chosen);
    const Result<MiddleMarks> marks = named_middle_marks(*file);
    if (!marks) return std::unexpected(marks.error());
    endpoints.middle        = *marks;
    endpoints.reasons       = reasoning_format != "none";
    endpoints.chat_template = std::move(*chosen);
    endpoints.model_file    = std::filesystem::path(path).filename().string();
    return {};
}

Result<void> ModelSetup::check_file() const {
    if (auto ok = check_options(engine); !ok) return ok;
    const Result<Gguf> file = Gguf::open(path);
    if (!file) return std::unexpected(file.error());
    const Result<ModelConfig> config = read_config(*file, engine.drafts.by_mtp);
    if (!config) return std::unexpected(config.error());
    if (auto ok = bind_tensors(*file, *config); !ok) return std::unexpected(ok.error());
    if (auto ok = Tokenizer::load(*file); !ok) return std::unexpected(ok.error());
    if (auto ok = read_adapters(engine, *file); !ok) return std::unexpected(ok.error());
    if (engine.kv_key.empty()) return {};
    if (auto key = Cipher::from_file(engine.kv_key); !key) return std::unexpected(key.error());
    return {};
}

Result<Engine> ModelHost::load_engine(ModelSetup& setup, const Progress& progress, const Say& say,
                                      const ParkedCache* parked) {
    if (const std::string said = Cipher::exposed(setup.engine.kv_key); !said.empty()) say(said, true);
    if (const std::string said = choose_kv_type(setup.path, setup.engine); !said.empty()) say(said, false);
    if (const std::string said = prompt_quality(setup.path, setup.engine); !said.empty()) say(said, false);
    // Said once it is clear that there is room, and before the weights are read.
    std::string said;
    if (const Result<LoadEstimate> estimate = estimate_load(setup.path, setup.engine)) {
        said                  = describe(*estimate);
        setup.endpoints.model = {estimate->weight_bytes, std::uint64_t(estimate->parameters),
                                 estimate->types.empty() ? "" : dtype_info(estimate->types[0].first).name};
    }
    const auto loading = [&](double fraction) {
        if (!said.empty()) {
            const std::string text = std::exchange(said, "");
            for (std::string_view line : split(text, '\n')) say(std::string(line), false);
        }
        progress(fraction);
    };
    return Engine::load(setup.path, setup.engine, loading, {}, parked);
}

std::shared_ptr<const ParkedCache> ModelHost::park() {
    const std::int64_t most = service_->engine_options().kv_host_bytes;
    return most > 0 ? service_->park(std::min(std::size_t(most), available_memory() / 2)) : nullptr;
}

ModelHost::ModelHost(Engine engine, ModelSetup setup, SharedContext& shared)
    : setup_(std::move(setup)), description_(engine.describe()) {
    const EngineOptions o     = engine.options();
    const std::size_t   block = engine.block_bytes();
    const std::size_t   draft = engine.draft_kv_bytes();
    host_bytes_ =
        block * std::size_t((o.device == "cpu" ? o.kv_blocks : 0) + o.host_blocks()) + (o.device == "cpu" ? draft : 0);
    bytes_ = setup_.endpoints.model.bytes + block * std::size_t(o.kv_blocks) +
             (o.device == "cpu" ? block * std::size_t(o.host_blocks()) : 0) + draft;
    std::error_code missing;
    if (o.drafts.by_model || o.drafts.by_eagle)
        if (const auto weights = std::filesystem::file_size(o.drafts.model, missing); !missing) bytes_ += weights;
    service_ = std::make_unique<Service>(std::move(engine), setup_.service);
    api_     = std::make_unique<ApiContext>(*service_, setup_.endpoints, shared);
}

Result<std::unique_ptr<ModelHost>> ModelHost::load(ModelSetup setup, SharedContext& shared, const Progress& progress,
                                                   const Say& say, const ParkedCache* parked) {
    Result<Engine> engine = load_engine(setup, progress, say, parked);
    if (!engine) return std::unexpected(engine.error());
    if (const std::string warning = engine->warning(); !warning.empty()) say(warning, true);
    if (const std::string found = engine->files_found(); !found.empty()) say(found, false);
    if (const int n = engine->n_taken(); n > 0)
        say(cat("host memory has kept ", n, " blocks of its prefix cache"), false);
    setup.service.disk_full = [say, directory = engine->options().kv_dir] {
        say(cat("a file in ", directory,
                " could not be written: the disk is full, or refuses; blocks that are not "
                "written are computed again after a restart"),
            true);
    };
    if (setup.endpoints.chat_template.is_fallback())
        say("the model has no chat template; using chatml (--chat-template names another)", true);
    if (!setup.from_file.refused.empty())
        say(cat("not taken from the file, since no such value is possible: ", setup.from_file.refused), true);
    std::unique_ptr<KvPublisher> publisher;
    if (!setup.kv_events.empty()) {
        Result<std::unique_ptr<KvPublisher>> made =
            KvPublisher::create(setup.kv_events, setup.kv_replay, engine->options().block_size);
        if (!made) return std::unexpected(made.error());
        publisher                   = std::move(*made);
        setup.endpoints.kv_events   = publisher->events_endpoint();
        setup.endpoints.kv_replay   = publisher->replay_endpoint();
        setup.service.cache_changed = [&p = *publisher](std::vector<CacheChange> changes) {
            p.publish(std::move(changes));
        };
    }
    auto host        = std::make_unique<ModelHost>(std::move(*engine), std::move(setup), shared);
    host->publisher_ = std::move(publisher);
    Service& service = host->service();
    for (const std::string& text : host->setup_.pins)
        if (const auto pin = service.pin(service.tokenizer().encode(text), ""); !pin)
            return fail("a prefix to pin cannot be kept: ", pin.error().error.message);
    return host;
}

} // namespace quire
