// quire.engine.loading: reads and makes what an engine runs: the options are completed, the files of the model are read, the processes meet, and the
// executor takes its memory. Owns nothing.
export module quire.engine.loading;

import quire.core.base;
export import quire.engine.adapter_list;
import quire.engine.device_choice;
export import quire.engine.draft_model;
import quire.engine.eagle_draft;
export import quire.engine.executor;
export import quire.engine.files.cipher;
import quire.engine.fingerprint;
import quire.engine.local_executor;
export import quire.engine.options;
import quire.engine.ranks.process_executors;
export import quire.model_file.config;
export import quire.model_file.gguf;
export import quire.model_file.weights;
import quire.paging.block_hash;
export import quire.schedule.scheduler;
export import quire.text.tokens.tokenizer;

export namespace quire {

// A model whose weights and memory are there. **Owns** its files and the executor.
struct LoadedModel {
    EngineOptions                 options;    // with the defaults filled in
    std::optional<Cipher>         cipher;     // of the files in options.kv_dir
    Gguf                          file;       // of the model
    std::optional<Gguf>           eagle_file; // of a draft of EAGLE-3
    ModelConfig                   config;
    ModelTensors                  tensors; // views of both files
    Tokenizer                     tokenizer;
    std::vector<Adapter>          adapters;          // as options.adapters
    bool                          long_rope = false; // as basis_of_kv() takes it
    int                           logit_rows;        // of a step, at most
    std::shared_ptr<ProcessGroup> processes;         // that run the model together; null: this one alone
    std::unique_ptr<DraftModel>   draft_model;       // null: none
    std::unique_ptr<Executor>     executor;
};

// Reads and validates the files that `wanted` names, and allocates the memory of their models. `path`: the model's file. `make`: see Engine::load().
// Error: one sentence naming file and place; or, before anything is allocated, how much memory would be needed and how much there is.
Result<LoadedModel> load_model(const std::string& path, const EngineOptions& wanted, const Progress& progress,
                               const MakeExecutor& make);

// The options of the scheduler whose plans the model's executor runs.
SchedulerOptions scheduling_of(const LoadedModel& model);

} // namespace quire

module :private;

namespace quire {

// Switches off what other options leave no use for.
void drop_unused(EngineOptions& o) {
    if (o.reservations) o.prefix_cache = false, o.swap_blocks = 0;
    if (!o.prefix_cache) o.kv_host_bytes = o.tier_blocks = 0;
    if (o.reservations) o.drafts.on = o.drafts.forced = false;
    if (!o.drafts.on) o.drafts.by_model = o.drafts.by_mtp = o.drafts.by_eagle = false;
}

Result<void> check_processes(const EngineOptions& o) {
    const ProcessSpec& p = o.processes;
    if (p.rank < 0 || p.rank >= p.n)
        return fail("RANK ", p.rank, " is not in 0..", p.n - 1, " (WORLD_SIZE is ", p.n, ")");
    if (o.tensor_parallel % p.n != 0)
        return fail(o.tensor_parallel, " ranks (--tensor-parallel) cannot be divided among ", p.n,
                    " processes (WORLD_SIZE)");
    return {};
}

// The properties that must be equal in all processes that run one model together, one a line.
std::string agreement(const Gguf& file, const EngineOptions& o) {
    return cat("has a model file with the fingerprint ", fingerprint(file), "\nhas --tensor-parallel ",
               o.tensor_parallel, "\nhas KV of the type ", name_of(o.kv_type), "\nhas --kv-blocks ", o.kv_blocks,
               "\nhas --swap-blocks ", o.swap_blocks, "\nhas --kv-host-bytes ", o.kv_host_bytes, "\nhas --block-size ",
               o.block_size, "\nhas a context of ", o.context, "\nhas steps of ", o.max_batch_tokens,
               " tokens\nhas steps of ", o.max_sequences, " sequences\n",
               o.deterministic ? "is deterministic" : "is not deterministic");
}

// Meets the other processes of `o`. A step gets the rows that each process has memory for: flags of draft tokens and GPUs may differ.
Result<std::shared_ptr<ProcessGroup>> meet_processes(const EngineOptions& o, const Gguf& file, int& logit_rows) {
    if (auto ok = check_processes(o); !ok) return std::unexpected(ok.error());
    Result<std::unique_ptr<ProcessGroup>> group =
        ProcessGroup::rendezvous(o.processes, agreement(file, o), 300, o.rank_seconds > 0 ? o.rank_seconds : 60);
    if (!group) return std::unexpected(group.error());
    const Result<std::uint64_t> rows = (*group)->all_reduce_min(std::uint64_t(logit_rows));
    if (!rows) return std::unexpected(rows.error());
    logit_rows = int(*rows);
    return std::move(*group);
}

Result<LoadedModel> load_model(const std::string& path, const EngineOptions& wanted, const Progress& progress,
                               const MakeExecutor& make) {
    EngineOptions o = wanted;
    if (auto ok = check_options(o); !ok) return std::unexpected(ok.error());
    drop_unused(o);

    std::optional<Cipher> cipher;
    if (!o.kv_key.empty()) {
        Result<Cipher> key = Cipher::from_file(o.kv_key);
        if (!key) return std::unexpected(key.error());
        cipher = *key;
    }

    Result<Gguf> file = Gguf::open(path);
    if (!file) return std::unexpected(file.error());
    Result<ModelConfig> config = read_config(*file, o.drafts.by_mtp);
    if (!config) return std::unexpected(config.error());
    Result<ModelTensors> tensors = bind_tensors(*file, *config);
    if (!tensors) return std::unexpected(tensors.error());
    Result<Tokenizer> tokenizer = Tokenizer::load(*file);
    if (!tokenizer) return std::unexpected(tokenizer.error());
    Result<std::vector<Adapter>> adapters = read_adapters(o, *file);
    if (!adapters) return std::unexpected(adapters.error());
    Result<std::optional<Gguf>> eagle = open_eagle_draft(o.drafts);
    if (!eagle) return std::unexpected(eagle.error());
    if (*eagle) {
        if (auto ok = add_eagle_draft(**eagle, *tokenizer, *config, *tensors); !ok) return std::unexpected(ok.error());
        (*eagle)->prefetch();
    }
    file->prefetch();

    if (o.max_sequences == 0) o.max_sequences = usual_sequences(o, *config);
    int logit_rows = usual_logit_rows(o);
    if (config->family->encoder) { // a text runs in one step, and each of its rows is wanted
        if (o.context == 0) o.context = std::min(config->context_length, 8192);
        o.max_batch_tokens = std::max(o.max_batch_tokens, std::max(o.context, o.max_sequences));
        o.prefix_cache     = false;
        o.kv_host_bytes    = 0;
        logit_rows         = std::max(logit_rows, o.max_batch_tokens);
    }
    std::shared_ptr<ProcessGroup> processes;
    if (o.processes.n > 1) {
        Result<std::shared_ptr<ProcessGroup>> group = meet_processes(o, *file, logit_rows);
        if (!group) return std::unexpected(group.error());
        processes = std::move(*group);
    }
    std::unique_ptr<DraftModel> draft_model; // its memory first: the model takes what is left
    if (o.drafts.by_model) {
        Result<std::unique_ptr<DraftModel>> loaded = DraftModel::load(o, *file, *config, *tokenizer);
        if (!loaded) return std::unexpected(loaded.error());
        draft_model = std::move(*loaded);
        o.set_aside += draft_model->host_bytes();
    }
    Result<std::unique_ptr<Executor>> executor =
        make ? make(o, *config)
             : make_local_executor(path, o, *config, *tensors, logit_rows, progress, processes, *adapters);
    if (!executor) return std::unexpected(executor.error());
    if (processes && processes->rank() == 0) executor = lead(std::move(*executor), processes, o.block_size);
    o.drafts.device_samples = o.device == "cuda";
    if (!o.pipeline) o.pipeline = o.device == "cuda";
    if (o.fast_forward < 0) // a deterministic request does not depend on how many others there are
        o.fast_forward = o.device == "cpu" ? std::numeric_limits<int>::max() : o.deterministic ? 0 : 4;
    if (!o.free_order.empty() && int(o.free_order.size()) != o.kv_blocks)
        return fail("free_order names ", o.free_order.size(), " of ", o.kv_blocks, " blocks");
    // As the program of the model was made, before a context was chosen that memory is enough for.
    const bool long_rope = bool(tensors->rope_long) &&
                           uses_long_rope(*config, wanted.context > 0 ? wanted.context : config->context_length);
    return LoadedModel{.options     = std::move(o),
                       .cipher      = std::move(cipher),
                       .file        = std::move(*file),
                       .eagle_file  = std::move(*eagle),
                       .config      = std::move(*config),
                       .tensors     = std::move(*tensors),
                       .tokenizer   = std::move(*tokenizer),
                       .adapters    = std::move(*adapters),
                       .long_rope   = long_rope,
                       .logit_rows  = logit_rows,
                       .processes   = std::move(processes),
                       .draft_model = std::move(draft_model),
                       .executor    = std::move(*executor)};
}

SchedulerOptions scheduling_of(const LoadedModel& model) {
    const EngineOptions& o = model.options;
    SchedulerOptions     scheduling;
    scheduling.n_blocks         = o.kv_blocks;
    scheduling.block_size       = o.block_size;
    scheduling.context          = o.context;
    scheduling.max_batch_tokens = o.max_batch_tokens;
    scheduling.max_sequences    = o.max_sequences;
    scheduling.max_logit_rows   = model.logit_rows;
    scheduling.prefix_cache     = o.prefix_cache;
    scheduling.n_swap           = o.swap_blocks;
    scheduling.n_tier           = o.tier_blocks;
    scheduling.for_files        = !o.keeps_files() ? ForFiles::none : model.cipher ? ForFiles::all : ForFiles::shared;
    if (model.cipher)
        scheduling.namespaces = [key = *model.cipher](std::string_view salt) {
            const auto [low, high] = key.name_of("namespace", salt);
            return salt.empty() ? CacheNamespace{} : CacheNamespace{low, high | 1}; // never the shared one
        };
    scheduling.preemption_mode     = o.preemption_mode;
    scheduling.watermark           = o.watermark;
    scheduling.keep_preempted      = o.keep_preempted;
    scheduling.reservations        = o.reservations;
    scheduling.layout              = o.layout;
    scheduling.checkpoint_interval = o.checkpoint_interval;
    scheduling.whole_prompts       = model.config.family->encoder;
    scheduling.free_order          = o.free_order;
    scheduling.vocab_size          = model.config.vocab_size;
    scheduling.end_tokens          = model.tokenizer.end_tokens();
    for (const Adapter& a : model.adapters) scheduling.adapter_hashes.push_back(a.hash);
    return scheduling;
}

} // namespace quire
