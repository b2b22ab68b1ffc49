// quire.engine.local_executor: an executor on the devices of this process: loads the model, allocates its memory, runs its steps. **Owns** the
// ranks of this process: of each the device, its part of the model and of the KV cache.
export module quire.engine.local_executor;

import quire.compute.cuda.backend;
import quire.compute.kv_cache;
import quire.compute.model;
import quire.compute.ranks.rank_group;
import quire.compute.ranks.shards;
import quire.core.base;
import quire.engine.device_choice;
import quire.engine.executor;
import quire.engine.memory_plan;
import quire.engine.options;
import quire.engine.ranks.rank_threads;
import quire.model_file.weights;
import quire.paging.cache_layout;

export namespace quire {

// The device of this process, or its ranks: options.tensor_parallel devices, each with its part of the model and of every KV block. Every
// rank runs every plan as it is. Fills in the options that are left open (device, context, blocks of both pools, tokens of a step), loads
// the weights, allocates all memory. `path` names the model in errors; `processes` have the rest of the ranks; or null. Error: there is no
// such device; or how much memory would be needed and how much there is, before anything is allocated. A step throws std::runtime_error
// when a rank is lost. `adapters` outlive the executor.
Result<std::unique_ptr<Executor>> make_local_executor(const std::string& path, EngineOptions& options,
                                                      const ModelConfig& config, const ModelTensors& tensors,
                                                      int max_logit_rows, const std::function<void(double)>& progress,
                                                      const std::shared_ptr<ProcessGroup>& processes = {},
                                                      std::span<const Adapter>             adapters  = {});

} // namespace quire

module :private;

namespace quire {

// A rank. **Owns** its device, its part of the model and of the KV cache.
struct Rank {
    std::unique_ptr<Backend> backend;
    Model                    model;
    KvCache                  cache;
    std::size_t              weight_bytes = 0;
};

// **Owns** the ranks.
class LocalExecutor final : public Executor {
public:
    LocalExecutor(std::vector<Rank> ranks, std::shared_ptr<RankGroup> group, int spin)
        : ranks_(std::move(ranks)), threads_(std::move(group), spin) {
        for (Rank& r : ranks_)
            r.backend->compile(r.model.program(), r.model.values(), r.cache.layers(), r.cache.states());
    }
    LocalExecutor(const LocalExecutor&)            = delete;
    LocalExecutor& operator=(const LocalExecutor&) = delete;
    ~LocalExecutor() override;

    MoveTicket move_blocks(const BlockMoves& moves) override {
        threads_.run([&](int r) { ranks_[std::size_t(r)].cache.move_blocks(*ranks_[std::size_t(r)].backend, moves); });
        return ++last_ticket_;
    }
    void wait_for_moves(MoveTicket ticket) override {
        check(ticket <= last_ticket_, "a ticket of moves that were not started");
        threads_.run([&](int r) { ranks_[std::size_t(r)].backend->finish_copies(); });
    }
    void launch(const StepPlan& plan) override {
        check(plan.after <= last_ticket_, "a step after moves that were not started"); // a device does all in order
        n_logit_rows_ = plan.logit_rows.size();
        running_      = true;
        threads_.run([&](int r) { ranks_[std::size_t(r)].backend->run(plan); });
    }
    SamplingLimits sampling_limits() const override { return first().backend->sampling_limits(); }
    // The first rank samples: it has the logits of the whole vocabulary.
    void sample(const StepPlan& plan) override {
        if (n_logit_rows_ > 0 && !plan.sampling.tasks.empty()) first().backend->sample(plan);
    }
    StepResults results() override;

    std::vector<std::span<std::byte>> host_block(BlockId block) const override {
        std::vector<std::span<std::byte>> pieces;
        for (const Rank& r : ranks_) r.cache.append_host_block(block, pieces);
        return pieces;
    }

    ExecutorMemory memory() const override {
        ExecutorMemory sum;
        for (const Rank& r : ranks_) {
            sum.weights += r.weight_bytes;
            sum.workspaces += r.backend->memory_taken() - r.weight_bytes - r.cache.bytes();
            sum.kv += r.cache.bytes();
        }
        return sum;
    }
    std::string describe() const override {
        const std::string one = first().backend->describe();
        return ranks_.size() > 1 ? cat(ranks_.size(), " ranks of ", one) : one;
    }
    std::string numerics() const override { return first().backend->numerics(); }
    std::string explain() const override { return first().backend->explain(); }
    std::string tuning() const override { return first().backend->tuning(); }
    double      weight_bandwidth() override { return ranks_.size() > 1 ? 0 : first().backend->weight_bandwidth(); }

private:
    const Rank& first() const { return ranks_.front(); }
    Rank&       first() { return ranks_.front(); }
    Tensor      value(ValueId id) const { return first().model.values().at(id, {0, int(n_logit_rows_)}); }

    std::vector<Rank> ranks_;
    RankThreads       threads_;
    MoveTicket        last_ticket_  = 0;
    std::size_t       n_logit_rows_ = 0;
    bool              running_      = false;
};

LocalExecutor::~LocalExecutor() {
    try { // a running step writes to memory that goes now
        if (running_) threads_.run([&](int r) { (void)ranks_[std::size_t(r)].backend->results(); });
    } catch (const std::exception&) {}                                    // the caller of the step has met it
    if (threads_.hangs()) (void)new std::vector<Rank>(std::move(ranks_)); // the rank that hangs still uses it
}

StepResults LocalExecutor::results() {
    StepResults device;
    threads_.run([&](int r) {
        const StepResults mine = ranks_[std::size_t(r)].backend->results();
        if (r == 0) device = mine;
    });
    running_ = false;
    if (n_logit_rows_ == 0) return {};
    return {device.best.first(std::min(n_logit_rows_, device.best.size())), device.sampled,
            [this] { return first().backend->to_host(value(first().model.program().logits)); },
            [this](int row) {
                check(row >= 0 && std::size_t(row) < n_logit_rows_, "a hidden state of a row that did not run");
                Tensor x = value(first().model.program().selected);
                x.data   = static_cast<float*>(x.data) + row * x.cols;
                x.rows   = 1;
                return first().model.hidden_state(first().backend->to_host(x));
            }};
}

// Calls body(rank) for all ranks at once, each in its own thread; returns the first error. For work that takes long: no rank is taken for
// lost.
Result<void> on_all(std::vector<Rank>& ranks, const std::function<Result<void>(std::size_t rank)>& body) {
    std::vector<Result<void>> results(ranks.size());
    const auto                one = [&](std::size_t r) {
        try {
            results[r] = body(r);
        } catch (const std::bad_alloc&) {
            results[r] = fail_with(ErrorKind::system, "there is not enough memory to load the model");
        }
    };
    {
        std::vector<std::jthread> threads;
        for (std::size_t r = 1; r < ranks.size(); r++) threads.emplace_back([&, r] { one(r); });
        one(0);
    }
    for (Result<void>& result : results)
        if (!result) return result;
    return {};
}

// The largest steps of a rank, for which it needs workspaces.
StepLimits limits_of(const EngineOptions& o, const ModelConfig& config, const RankShape& shape, int max_logit_rows,
                     int context) {
    std::set<std::array<int, 4>> attentions;
    for (const LayerConfig& l : config.layers)
        if (l.attends()) attentions.insert({l.window, l.n_kv_heads, l.head_dim, l.value_dim});
    const ModelConfig& mine = shape.config;
    StepLimits         limits;
    for (const LayerConfig& l : mine.layers)
        if (l.keeps_kv() && !mine.latent && (has_scales(o.kv_type.k) || has_scales(o.kv_type.v)))
            limits.coded_cols = std::max(limits.coded_cols, l.n_kv_heads * l.head_dim);
    limits.block_size              = o.block_size;
    limits.max_tokens              = o.max_batch_tokens;
    limits.max_logit_rows          = max_logit_rows;
    limits.max_sequences           = o.max_sequences;
    limits.max_blocks_per_sequence = (context + o.block_size - 1) / o.block_size;
    limits.parts                   = o.layout.parts();
    limits.context                 = context;
    limits.n_layers                = mine.n_layers;
    limits.n_heads                 = mine.n_heads;
    limits.n_kv_heads              = mine.n_kv_heads;
    limits.value_dim               = mine.value_dim;
    if (config.draft) {
        limits.n_heads   = std::max(limits.n_heads, config.draft->n_heads);
        limits.value_dim = std::max(limits.value_dim, config.draft->layers[0].value_dim);
    }
    limits.vocab_size       = mine.vocab_size;
    limits.n_attentions     = int(attentions.size());
    limits.unit             = o.layout.blocks_per_unit();
    limits.n_experts        = mine.experts.n;
    limits.experts_used     = mine.experts.used;
    limits.hidden_size      = mine.hidden_size;
    limits.recurrent_heads  = mine.recurrent.n_heads;
    limits.recurrent_groups = mine.recurrent.n_groups;
    limits.key_dim          = mine.recurrent.key_dim;
    limits.n_ranks          = o.tensor_parallel;
    limits.rank_vocab       = int(shape.n > 1 ? shape.vocab.n : mine.vocab_size);
    return limits;
}

Result<std::unique_ptr<Executor>> make_local_executor(const std::string& path, EngineOptions& o,
                                                      const ModelConfig& config, const ModelTensors& tensors,
                                                      int max_logit_rows, const std::function<void(double)>& progress,
                                                      const std::shared_ptr<ProcessGroup>& processes,
                                                      std::span<const Adapter>             adapters) {
    if (o.tensor_parallel < 1) return fail("a model runs on at least 1 rank, not on ", o.tensor_parallel);
    // Adapters run on one rank, so their model has no bits to share with more ranks.
    const bool                     exact  = o.deterministic && adapters.empty();
    Result<std::vector<RankShape>> shapes = split_model(path, config, tensors, o.tensor_parallel, exact);
    // Nor has a model that more ranks cannot have.
    if (!shapes && exact && o.tensor_parallel == 1) shapes = split_model(path, config, tensors, 1, false);
    if (!shapes) return std::unexpected(shapes.error());
    Result<Devices> devices = choose_devices(path, o, config, processes);
    if (!devices) return std::unexpected(devices.error());
    if (!adapters.empty()) {
        if (o.tensor_parallel > 1)
            return fail(adapters[0].file.path(), ": adapters are for a model that runs on one rank");
        const int context = o.context > 0 ? o.context : config.context_length;
        if (auto ok = check_adapters((*shapes)[0], tensors, adapters, context); !ok) return std::unexpected(ok.error());
    }
    if (config.mtp && o.tensor_parallel > 1) return fail(path, ": --spec mtp is for a model that runs on one rank");
    if (config.draft && o.tensor_parallel > 1)
        return fail(o.drafts.model, ": a draft of EAGLE-3 is for a model that runs on one rank");
    const std::shared_ptr<RankGroup> group = devices->group;
    std::vector<Rank>                ranks(devices->backends.size());
    std::vector<Backend*>            backends;
    for (std::size_t r = 0; r < ranks.size(); r++) {
        ranks[r].backend = std::move(devices->backends[r]);
        backends.push_back(ranks[r].backend.get());
    }
    if (auto ok = check_cache_shapes(path, config); !ok) return std::unexpected(ok.error());
    MemoryPlan memory(o, config, (*shapes)[0].config, backends, processes);
    if (o.layout.keeps_state() && (processes || o.reservations))
        return fail(path, ": a model with recurrent states runs in one process, with blocks on demand");
    if (auto ok = memory.check_asked(); !ok) return std::unexpected(ok.error());

    const auto shape_of = [&](std::size_t local) -> const RankShape& {
        return (*shapes)[std::size_t(group->first()) + local];
    };
    const auto load = [&](std::size_t r) -> Result<void> {
        Rank&         rank  = ranks[r];
        Result<Model> model = Model::create(
            *rank.backend, shape_of(r), tensors, o.context > 0 ? o.context : config.context_length, o.max_batch_tokens,
            max_logit_rows, r == 0 ? progress : std::function<void(double)>(), adapters);
        if (!model) return std::unexpected(model.error());
        rank.model        = std::move(*model);
        rank.weight_bytes = rank.backend->memory_taken() - rank.model.values().bytes();
        return {};
    };
    if (auto ok = on_all(ranks, load); !ok) return std::unexpected(ok.error());

    const int  most_context = memory.most_context();
    const auto prepare      = [&](std::size_t r) {
        return ranks[r].backend->prepare_steps(limits_of(o, config, shape_of(r), max_logit_rows, most_context));
    };
    if (auto ok = on_all(ranks, prepare); !ok) return std::unexpected(ok.error());
    if (auto ok = memory.decide(); !ok) return std::unexpected(ok.error());
    if (config.family->learned_positions && o.context > config.context_length)
        return fail(path, ": the model has vectors for ", config.context_length, " positions, not for a context of ",
                    o.context);
    const auto create_cache = [&](std::size_t r) -> Result<void> {
        Result<KvCache> cache = KvCache::create(*ranks[r].backend, shape_of(r).config, o.kv_type, o.kv_blocks,
                                                o.block_size, o.host_blocks(), o.layout);
        if (!cache) return std::unexpected(cache.error());
        ranks[r].cache = std::move(*cache);
        return {};
    };
    if (auto ok = on_all(ranks, create_cache); !ok) return std::unexpected(ok.error());

    const int spin     = o.device == "cuda" ? 1'000'000 : 2000; // a GPU must not wait for a thread that sleeps
    auto      executor = std::make_unique<LocalExecutor>(std::move(ranks), group, spin);
    if (o.device == "cuda" && o.tensor_parallel > 1)
        if (auto ok =
                processes ? connect_cuda_processes(backends, group) : connect_cuda_ranks(backends, group->seconds());
            !ok)
            return std::unexpected(ok.error());
    return executor;
}

} // namespace quire
