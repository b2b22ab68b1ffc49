// quire.engine.executor: the seam between engine and compute: run this plan, give its results. Behind it is a device of this
// process, or a set of ranks that run the same plan.
export module quire.engine.executor;

import quire.compute.backend;
import quire.compute.cpu.backend;
import quire.compute.cuda.backend;
import quire.compute.kv_cache;
import quire.compute.memory;
import quire.compute.model;
import quire.compute.program;
import quire.core.base;
import quire.core.std;
import quire.core.tensor;
import quire.engine.options;
import quire.model_file.config;
import quire.model_file.family;
import quire.model_file.weights;
import quire.paging.block;
import quire.schedule.step_plan;

export namespace quire {

// Bytes on the device.
struct ExecutorMemory {
    std::size_t weights = 0, workspaces = 0, kv = 0;
};

// One step is launch(plan), sample(plan), results(). launch() and sample() return before the device is done; results() is the one
// wait, and comes before the next launch().
class Executor {
public:
    virtual ~Executor() = default;

    // Runs the plan's block moves. Returns when they are done.
    virtual void move_blocks(const BlockMoves& moves) = 0;
    // Starts the model on the plan's tokens, after its block moves.
    virtual void launch(const StepPlan& plan) = 0;
    // What sample() supports in one step; zeros: the host reads the logits.
    virtual SamplingLimits sampling_limits() const = 0;
    // Starts the plan's sampling tasks on the logits of the step. They are the part of the plan that depends on the last tokens, so
    // they come while the model runs.
    virtual void sample(const StepPlan& plan) = 0;
    // Waits for the step. Valid until the next one.
    virtual StepResults results() = 0;

    virtual ExecutorMemory memory() const   = 0;
    virtual std::string    tuning() const   = 0; // what was chosen by measuring on this machine; empty if nothing was
    virtual std::string    describe() const = 0; // one line: device, instruction set, threads
    virtual std::string    explain() const  = 0; // the program, and how it runs: see Backend::explain()
};

// A device of this process. Decides what `options` leaves open (device, context, blocks of both pools, tokens in a step), loads the
// weights, allocates all memory. `path` names the model in errors. Error: no such device; or how much memory was needed and how
// much there is, before anything is allocated.
Result<std::unique_ptr<Executor>> make_local_executor(const std::string& path, EngineOptions& options,
                                                      const ModelConfig& config, const ModelTensors& tensors,
                                                      int max_logit_rows, const std::function<void(double)>& progress);

} // namespace quire

module :private;

namespace quire {

// **Owns** the device, the model and the KV cache.
class LocalExecutor final : public Executor {
public:
    LocalExecutor(std::unique_ptr<Backend> backend, Model model, KvCache cache, std::size_t weight_bytes)
        : backend_(std::move(backend)), model_(std::move(model)), cache_(std::move(cache)),
          weight_bytes_(weight_bytes) {
        backend_->compile(model_.program(), model_.values(), cache_.layers());
    }
    LocalExecutor(const LocalExecutor&)            = delete;
    LocalExecutor& operator=(const LocalExecutor&) = delete;
    ~LocalExecutor() override {
        if (running_) (void)backend_->results(); // it writes to memory that goes now
    }

    void move_blocks(const BlockMoves& moves) override { cache_.move_blocks(*backend_, moves); }
    void launch(const StepPlan& plan) override {
        n_logit_rows_ = plan.logit_rows.size();
        running_      = true;
        backend_->run(plan);
    }
    SamplingLimits sampling_limits() const override { return backend_->sampling_limits(); }
    void           sample(const StepPlan& plan) override {
        if (n_logit_rows_ > 0 && !plan.sampling.tasks.empty()) backend_->sample(plan);
    }
    StepResults results() override;

    ExecutorMemory memory() const override {
        return {weight_bytes_, backend_->memory_taken() - weight_bytes_ - cache_.bytes(), cache_.bytes()};
    }
    std::string describe() const override { return backend_->describe(); }
    std::string tuning() const override { return backend_->tuning(); }
    std::string explain() const override { return backend_->explain(); }

private:
    Tensor value(ValueId id) const { return model_.values().at(id, {0, int(n_logit_rows_)}); }

    std::unique_ptr<Backend> backend_;
    Model                    model_;
    KvCache                  cache_;
    std::size_t              weight_bytes_ = 0, n_logit_rows_ = 0;
    bool                     running_ = false;
};

StepResults LocalExecutor::results() {
    const StepResults device = backend_->results();
    running_                 = false;
    if (n_logit_rows_ == 0) return {};
    return {device.best.first(std::min(n_logit_rows_, device.best.size())), device.sampled,
            [this] { return backend_->to_host(value(model_.program().logits)); },
            [this](int row) {
                check(row >= 0 && std::size_t(row) < n_logit_rows_, "a hidden state of a row that did not run");
                Tensor x = value(model_.program().selected);
                x.data   = static_cast<float*>(x.data) + row * x.cols;
                x.rows   = 1;
                return model_.hidden_state(backend_->to_host(x));
            }};
}

constexpr int most_positions = std::numeric_limits<std::int32_t>::max(); // of all blocks: a slot is an int

Result<std::unique_ptr<Backend>> make_backend(EngineOptions& o) {
    if (o.device != "auto" && o.device != "cpu" && o.device != "cuda")
        return fail("device ", quote(o.device), " is not one of auto, cpu, cuda");
    if (o.device == "cuda" && o.kv_type == KvType::f32) return fail("on a GPU the KV cache is F16; F32 needs the CPU");
    if (o.device == "cuda" || (o.device == "auto" && o.kv_type == KvType::f16 && o.isa.empty())) {
        Result<std::unique_ptr<Backend>> gpu =
            make_cuda_backend({0, o.gpu_memory_utilization, o.deterministic, o.fusion});
        if (gpu || o.device == "cuda") {
            o.device = "cuda";
            return gpu;
        }
    }
    o.device = "cpu";
    return make_cpu_backend(o.threads, o.isa, o.tune);
}

std::string in_gib(std::size_t bytes) {
    char       text[32];
    const bool small = bytes < std::size_t(1) << 30;
    std::snprintf(text, sizeof text, "%.1f %s", double(bytes) / double(small ? 1 << 20 : 1 << 30),
                  small ? "MiB" : "GiB");
    return text;
}

// Whether so many blocks can be had, in the pool on the device and in the swap pool, with what the host notes about each.
Result<void> check_room(const Backend& backend, const EngineOptions& o, std::size_t kv_blocks, std::size_t swap_blocks,
                        std::size_t block_bytes) {
    if (kv_blocks > std::size_t(most_positions / o.block_size))
        return fail_with(ErrorKind::limit, kv_blocks, " KV blocks of ", o.block_size, " tokens hold more than ",
                         most_positions, " tokens, the most there can be");
    const bool        on_host = o.device == "cpu";
    const std::size_t notes   = (kv_blocks + swap_blocks) * (512 + 8 * std::size_t(o.block_size));
    const std::size_t pool = kv_blocks * block_bytes, swap = swap_blocks * block_bytes;
    const std::size_t host   = (on_host ? pool : 0) + swap + notes;
    const auto        refuse = [&](std::size_t wanted, std::size_t left, std::string_view whose) {
        const std::string context = o.context > 0 ? cat(" for a context of ", o.context) : "";
        return fail_with(ErrorKind::limit,
                         pool > 0
                                    ? cat(kv_blocks, " KV blocks of ", o.block_size, " tokens", context, ": ", in_gib(pool),
                                          " at ", block_bytes / std::size_t(o.block_size), " bytes a token; ")
                                    : "",
                         swap > 0 ? cat(swap_blocks, " swap blocks: ", in_gib(swap), "; ") : "", "with bookkeeping ",
                                in_gib(wanted), ", and ", whose, " has ", in_gib(left), " left");
    };
    if (const std::size_t left = backend.memory_available(); !on_host && pool > left)
        return refuse(pool, left, "the GPU");
    if (const std::size_t left = available_memory(); host > left) return refuse(host, left, "the machine");
    return {};
}

Result<std::unique_ptr<Executor>> make_local_executor(const std::string& path, EngineOptions& o,
                                                      const ModelConfig& config, const ModelTensors& tensors,
                                                      int max_logit_rows, const std::function<void(double)>& progress) {
    if (config.family->encoder && o.device == "cuda")
        return fail(path, ": the family ", config.family->name, " runs on the CPU only");
    if (config.family->encoder) o.device = "cpu";
    Result<std::unique_ptr<Backend>> backend = make_backend(o);
    if (!backend) return std::unexpected(backend.error());
    if (o.max_batch_tokens == 0) // a deterministic GPU keeps partial sums of each token
        o.max_batch_tokens = std::max(o.max_sequences, o.device != "cuda" ? 256 : o.deterministic ? 512 : 2048);
    // How long a sequence may be and how many blocks there are, the one from the other where only one is given.
    const DType       kv_dtype    = o.kv_type == KvType::f16 ? DType::F16 : DType::F32;
    const std::size_t block_bytes = KvCache::bytes_per_token(config, kv_dtype) * std::size_t(o.block_size);
    const auto        blocks_for  = [&](int tokens) {
        return (std::size_t(tokens) + std::size_t(o.block_size) - 1) / std::size_t(o.block_size);
    };
    const std::size_t swap_asked = std::size_t(std::max(o.swap_blocks, 0));
    if (auto ok = check_room(**backend, o, o.kv_blocks > 0 ? std::size_t(o.kv_blocks) : blocks_for(o.context),
                             swap_asked, block_bytes);
        !ok)
        return std::unexpected(ok.error());

    Result<Model> model = Model::create(**backend, config, tensors, o.context > 0 ? o.context : config.context_length,
                                        o.max_batch_tokens, max_logit_rows, progress);
    if (!model) return std::unexpected(model.error());

    const std::size_t weight_bytes = (*backend)->memory_taken() - model->values().bytes();

    const std::size_t affordable = std::clamp((*backend)->memory_for_cache() / block_bytes, std::size_t(1),
                                              std::size_t(most_positions / o.block_size));
    if (o.context == 0) {
        const std::size_t pool = (o.kv_blocks > 0 ? std::size_t(o.kv_blocks) : affordable) * std::size_t(o.block_size);
        o.context              = int(std::min(std::size_t(config.context_length), pool));
    }
    if (o.kv_blocks == 0) {
        const std::size_t one = blocks_for(o.context);
        o.kv_blocks           = int(std::max(one, std::min(affordable, one * std::size_t(o.max_sequences))));
    }

    if (config.family->learned_positions && o.context > config.context_length)
        return fail(path, ": the model has vectors for ", config.context_length, " positions, not for a context of ",
                    o.context);
    // As many as blocks on the device (the paper, section 4.5), but no more than a few GiB of pinned memory.
    constexpr std::size_t most_pinned = std::size_t(4) << 30;
    if (o.swap_blocks < 0) {
        const std::size_t there = available_memory(), pool = std::size_t(o.kv_blocks) * block_bytes;
        const std::size_t most =
            o.device == "cuda" ? std::min(most_pinned, there / 2) : (there - std::min(there, pool)) / 2;
        o.swap_blocks = int(std::min(std::size_t(o.kv_blocks), most / block_bytes));
    }
    // Once more, now that the weights are there.
    if (auto ok = check_room(**backend, o, std::size_t(o.kv_blocks), swap_asked, block_bytes); !ok)
        return std::unexpected(ok.error());
    Result<KvCache> cache = KvCache::create(**backend, config, kv_dtype, o.kv_blocks, o.block_size, o.swap_blocks);
    if (!cache) return std::unexpected(cache.error());

    StepLimits limits;
    limits.max_tokens              = o.max_batch_tokens;
    limits.max_logit_rows          = max_logit_rows;
    limits.max_sequences           = o.max_sequences;
    limits.max_blocks_per_sequence = int(blocks_for(o.context));
    limits.context                 = o.context;
    limits.n_layers                = config.n_layers;
    limits.n_heads                 = config.n_heads;
    limits.n_kv_heads              = config.n_kv_heads;
    limits.head_dim                = config.head_dim;
    limits.value_dim               = config.value_dim;
    limits.vocab_size              = config.vocab_size;
    std::set<int> windows;
    for (const LayerConfig& layer : config.layers) windows.insert(layer.window);
    limits.n_windows    = int(windows.size());
    limits.n_experts    = config.experts.n;
    limits.experts_used = config.experts.used;
    limits.hidden_size  = config.hidden_size;
    if (auto ok = (*backend)->prepare_steps(limits); !ok) return std::unexpected(ok.error());

    return std::make_unique<LocalExecutor>(std::move(*backend), std::move(*model), std::move(*cache), weight_bytes);
}

} // namespace quire
