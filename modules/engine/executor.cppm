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
import quire.compute.ranks.rank_group;
import quire.compute.ranks.shards;
import quire.core.base;
import quire.core.std;
import quire.core.tensor;
import quire.core.thread_pool;
import quire.engine.options;
import quire.engine.ranks.process_group;
import quire.engine.ranks.rank_threads;
import quire.model_file.config;
import quire.model_file.family;
import quire.model_file.weights;
import quire.paging.block;
import quire.paging.cache_layout;
import quire.schedule.scheduler;
import quire.step.plan;

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

    // Starts block moves, which run after those before them, when no step runs. The ticket says when they are done: launch() of a plan
    // that has it runs after them, and wait_for_moves() returns then.
    virtual MoveTicket move_blocks(const BlockMoves& moves) = 0;
    virtual void       wait_for_moves(MoveTicket ticket)    = 0;
    // Starts the model on the plan's tokens, after the moves of its ticket.
    virtual void launch(const StepPlan& plan) = 0;
    // What sample() supports in one step; zeros: the host reads the logits.
    virtual SamplingLimits sampling_limits() const = 0;
    // Starts the plan's sampling tasks on the logits of the step. They are the part of the plan that depends on the last tokens, so
    // they come while the model runs.
    virtual void sample(const StepPlan& plan) = 0;
    // Waits for the step. Valid until the next one.
    virtual StepResults results() = 0;
    // For when no step runs: throws std::runtime_error if one of several processes is gone. Does not wait.
    virtual void check_peers() {}

    virtual ExecutorMemory memory() const     = 0;
    virtual std::string    tuning() const     = 0; // what was chosen by measuring on this machine; empty if nothing was
    virtual double         weight_bandwidth() = 0; // see Backend::weight_bandwidth(); 0 for several ranks
    virtual std::string    describe() const   = 0; // one line: device, instruction set, threads
    virtual std::string    explain() const    = 0; // the program, and how it runs: see Backend::explain()
};

// Makes another executor in place of the local one, for tests. Decides what `options` leaves open, as make_local_executor() does; may
// change the windows of the config's layers.
using MakeExecutor = std::function<Result<std::unique_ptr<Executor>>(EngineOptions& options, ModelConfig& config)>;

// The device of this process, or its ranks: as many devices as options.tensor_parallel, each with its part of the model and of every
// KV block. All of them run every plan as it is. Decides what `options` leaves open (device, context, blocks of both pools, tokens in
// a step), loads the weights, allocates all memory. `path` names the model in errors; `processes`: others have the rest of the ranks;
// or null. Error: no such device; or how much memory was needed and how much there is, before anything is allocated. A step throws
// std::runtime_error when a rank is lost.
Result<std::unique_ptr<Executor>> make_local_executor(const std::string& path, EngineOptions& options,
                                                      const ModelConfig& config, const ModelTensors& tensors,
                                                      int max_logit_rows, const std::function<void(double)>& progress,
                                                      const std::shared_ptr<ProcessGroup>& processes = {});

} // namespace quire

module :private;

namespace quire {

// What one rank has. **Owns** its device, its part of the model and of the KV cache.
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
        for (Rank& r : ranks_) r.backend->compile(r.model.program(), r.model.values(), r.cache.layers());
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
    try { // it writes to memory that goes now
        if (running_) threads_.run([&](int r) { (void)ranks_[std::size_t(r)].backend->results(); });
    } catch (const std::exception&) {}                                    // the one who ran the step was told
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

constexpr int most_positions = std::numeric_limits<std::int32_t>::max(); // of all blocks: a slot is an int

// One for each rank of this process.
Result<std::vector<Rank>> make_backends(EngineOptions& o, const std::shared_ptr<RankGroup>& group) {
    if (o.device != "auto" && o.device != "cpu" && o.device != "cuda")
        return fail("device ", quote(o.device), " is not one of auto, cpu, cuda");
    if (o.device == "cuda" && o.kv_type == KvType::f32) return fail("on a GPU the KV cache is F16; F32 needs the CPU");
    std::vector<Rank> ranks(std::size_t(group->n_local()));
    if (o.device == "cuda" || (o.device == "auto" && o.kv_type == KvType::f16 && o.isa.empty())) {
        if (o.tensor_parallel > 1) announce_cuda_ranks();
        // Processes of one host take them in turn; where each sees its own alone, they are numbered alike.
        const int n_gpus = std::max(n_cuda_devices(), 1), before = o.processes.local * int(ranks.size());
        for (std::size_t r = 0; r < ranks.size(); r++) {
            const int index = o.processes.n > 1 ? (before + int(r)) % n_gpus : int(r) / o.ranks_per_gpu;
            Result<std::unique_ptr<Backend>> gpu =
                make_cuda_backend({index, o.gpu_memory_utilization, o.deterministic, o.fusion, o.ranks_per_gpu > 1});
            if (gpu) {
                ranks[r].backend = std::move(*gpu);
                continue;
            }
            if (o.device == "cuda" || r > 0) return std::unexpected(gpu.error());
            break;
        }
        if (ranks[0].backend) {
            o.device = "cuda";
            return ranks;
        }
    }
    o.device          = "cpu";
    const int threads = o.threads > 0 ? o.threads : physical_cores();
    for (int r = 0; r < group->n_local(); r++) {
        Result<std::unique_ptr<Backend>> cpu =
            make_cpu_backend(std::max(1, threads / group->n_local()), o.isa, o.tune && o.tensor_parallel == 1,
                             o.tensor_parallel > 1 ? group : nullptr, group->first() + r);
        if (!cpu) return std::unexpected(cpu.error());
        ranks[std::size_t(r)].backend = std::move(*cpu);
    }
    return ranks;
}

// body(rank) for all of them at once, each in its own thread; the first error. For what takes long: no rank is taken for lost.
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

std::string in_gib(std::size_t bytes) {
    char       text[32];
    const bool small = bytes < std::size_t(1) << 30;
    std::snprintf(text, sizeof text, "%.1f %s", double(bytes) / double(small ? 1 << 20 : 1 << 30),
                  small ? "MiB" : "GiB");
    return text;
}

// Whether so many blocks can be had, in the pool on the device and in the swap pool, with what the host notes about each.
// block_bytes: of one rank's part of a block.
Result<void> check_room(const Backend& backend, const EngineOptions& o, std::size_t kv_blocks, std::size_t swap_blocks,
                        std::size_t block_bytes) {
    if (kv_blocks > std::size_t(most_positions / o.block_size))
        return fail_with(ErrorKind::limit, kv_blocks, " KV blocks of ", o.block_size, " tokens hold more than ",
                         most_positions, " tokens, the most there can be");
    const bool        on_host = o.device == "cpu";
    const std::size_t notes   = (kv_blocks + swap_blocks) * (512 + 8 * std::size_t(o.block_size));
    const std::size_t ranks   = std::size_t(o.tensor_parallel / o.processes.n); // of this process
    const std::size_t pool = kv_blocks * block_bytes * (on_host ? ranks : 1), swap = swap_blocks * block_bytes * ranks;
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

// Most tokens of a step where nobody says. On a GPU more tokens make better use of the weights that are read, but those that decode
// wait longer for a prompt: a step of 4,096 takes a tenth of a second on an H200 with eight billion weights.
int tokens_of_step(const EngineOptions& o, const ModelConfig& c, const Backend& backend) {
    if (o.device != "cuda") return 256;
    if (o.deterministic) return 512; // it keeps partial sums of each token
    const double ff =
        c.experts.n > 0 ? double(c.experts.used) * c.experts.ff_size + c.experts.shared_ff_size : c.ff_size;
    const double attention = double(c.head_dim + c.value_dim) * (c.n_heads + c.n_kv_heads);
    const double weights   = c.n_layers * (attention + 3 * ff) * c.hidden_size; // that a token is multiplied with
    const bool   room = backend.memory_available() >= std::size_t(40) << 30; // the activations of 8B take 0.5 GiB more
    return room && weights / o.tensor_parallel < 9e9 ? 4096 : 2048;
}

Result<std::unique_ptr<Executor>> make_local_executor(const std::string& path, EngineOptions& o,
                                                      const ModelConfig& config, const ModelTensors& tensors,
                                                      int max_logit_rows, const std::function<void(double)>& progress,
                                                      const std::shared_ptr<ProcessGroup>& processes) {
    if (config.family->encoder && o.device == "cuda")
        return fail(path, ": the family ", config.family->name, " runs on the CPU only");
    if (config.family->encoder) o.device = "cpu";
    if (o.tensor_parallel < 1) return fail("a model runs on at least 1 rank, not on ", o.tensor_parallel);
    Result<std::vector<RankShape>> shapes = split_model(path, config, tensors, o.tensor_parallel, o.deterministic);
    if (!shapes) return std::unexpected(shapes.error());
    const bool gpus       = o.device == "cuda" || (o.device == "auto" && o.kv_type == KvType::f16 && o.isa.empty());
    const auto make_group = [&](double seconds) {
        const int n_local = o.tensor_parallel / o.processes.n;
        return std::make_shared<RankGroup>(o.tensor_parallel, seconds, o.processes.rank * n_local, n_local, processes);
    };
    auto                      group = make_group(o.rank_seconds > 0 ? o.rank_seconds : gpus ? processes ? 20 : 10 : 60);
    Result<std::vector<Rank>> made  = make_backends(o, group);
    if (!made) return std::unexpected(made.error());
    std::vector<Rank>& ranks = *made;
    if (o.device == "cpu" && gpus) group = make_group(60);
    if (processes) {
        const std::uint64_t         on_gpus = o.device == "cuda" ? 1 : 0;
        const Result<std::uint64_t> least   = processes->all_reduce_min(on_gpus),
                                    most    = processes->all_reduce_min(1 - on_gpus);
        if (!least || !most) return std::unexpected((least ? most : least).error());
        if (*least != on_gpus || *most != 1 - on_gpus)
            return fail("some processes have a GPU, others have none: start all of them with --device cpu");
    }
    if (o.max_batch_tokens == 0)
        o.max_batch_tokens = std::max(o.max_sequences, tokens_of_step(o, config, *ranks[0].backend));
    // How long a sequence may be and how many blocks there are, the one from the other where only one is given.
    const DType kv_dtype = o.kv_type == KvType::f16 ? DType::F16 : DType::F32;
    // Systems that reserve contiguous memory give nothing back: as if no window were shorter than the context.
    const int longest             = o.context > 0 ? o.context : config.context_length;
    o.layout                      = cache_layout(config, kv_dtype, o.reservations ? 1 : longest);
    const auto        per_entry   = std::size_t(o.layout.blocks_per_entry());
    const std::size_t block_bytes = KvCache::block_bytes((*shapes)[0].config, kv_dtype, o.layout, o.block_size);
    const auto        entries_for = [&](int tokens) {
        return (std::size_t(tokens) + std::size_t(o.block_size) - 1) / std::size_t(o.block_size);
    };
    const auto blocks_for      = [&](int tokens) { return std::size_t(o.layout.blocks_at_once(tokens, o.block_size)); };
    const std::size_t kv_asked = std::size_t(o.kv_blocks) * per_entry;
    const std::size_t swap_asked = std::size_t(std::max(o.swap_blocks, 0)) * per_entry;
    if (auto ok =
            check_room(*ranks[0].backend, o, kv_asked > 0 ? kv_asked : blocks_for(o.context), swap_asked, block_bytes);
        !ok)
        return std::unexpected(ok.error());
    if (swap_asked > std::size_t(most_positions))
        return fail_with(ErrorKind::limit, swap_asked, " swap blocks are more than there can be");
    o.kv_blocks = int(kv_asked);
    if (o.swap_blocks > 0) o.swap_blocks = int(swap_asked);

    const auto shape_of = [&](std::size_t local) -> const RankShape& {
        return (*shapes)[std::size_t(group->first()) + local];
    };
    const auto load = [&](std::size_t r) -> Result<void> {
        Rank&         rank = ranks[r];
        Result<Model> model =
            Model::create(*rank.backend, shape_of(r), tensors, o.context > 0 ? o.context : config.context_length,
                          o.max_batch_tokens, max_logit_rows, r == 0 ? progress : std::function<void(double)>());
        if (!model) return std::unexpected(model.error());
        rank.model        = std::move(*model);
        rank.weight_bytes = rank.backend->memory_taken() - rank.model.values().bytes();
        return {};
    };
    if (auto ok = on_all(ranks, load); !ok) return std::unexpected(ok.error());

    const auto affordable_blocks = [&] {
        std::size_t n = std::size_t(most_positions / o.block_size);
        for (const Rank& rank : ranks) n = std::min(n, rank.backend->memory_for_cache() / block_bytes);
        n /= o.device == "cpu" ? ranks.size() : std::size_t(o.ranks_per_gpu); // they share it
        return std::max(n, std::size_t(1));
    };
    const auto context_with = [&](std::size_t blocks) { // where none is asked for
        return o.context > 0 ? o.context
                             : std::max(o.layout.longest(std::int64_t(blocks), o.block_size, config.context_length), 1);
    };
    // The workspaces come first, so that the pool is made of what is really left.
    const int     most_context = context_with(o.kv_blocks > 0 ? std::size_t(o.kv_blocks) : affordable_blocks());
    std::set<int> windows;
    for (const LayerConfig& layer : config.layers) windows.insert(layer.window);
    const auto prepare = [&](std::size_t r) -> Result<void> {
        const ModelConfig& mine = shape_of(r).config;
        StepLimits         limits;
        limits.max_tokens              = o.max_batch_tokens;
        limits.max_logit_rows          = max_logit_rows;
        limits.max_sequences           = o.max_sequences;
        limits.max_blocks_per_sequence = int(entries_for(most_context));
        limits.parts                   = o.layout.parts();
        limits.context                 = most_context;
        limits.n_layers                = mine.n_layers;
        limits.n_heads                 = mine.n_heads;
        limits.n_kv_heads              = mine.n_kv_heads;
        limits.head_dim                = mine.head_dim;
        limits.value_dim               = mine.value_dim;
        limits.vocab_size              = mine.vocab_size;
        limits.n_windows               = int(windows.size());
        limits.n_experts               = mine.experts.n;
        limits.experts_used            = mine.experts.used;
        limits.hidden_size             = mine.hidden_size;
        limits.n_ranks                 = o.tensor_parallel;
        limits.rank_vocab              = int(shape_of(r).n > 1 ? shape_of(r).vocab.n : mine.vocab_size);
        return ranks[r].backend->prepare_steps(limits);
    };
    if (auto ok = on_all(ranks, prepare); !ok) return std::unexpected(ok.error());

    std::size_t affordable = affordable_blocks();
    if (processes) {
        const Result<std::uint64_t> least = processes->all_reduce_min(affordable);
        if (!least) return std::unexpected(least.error());
        affordable = std::size_t(*least);
    }
    o.context = context_with(o.kv_blocks > 0 ? std::size_t(o.kv_blocks) : affordable);
    if (o.kv_blocks == 0) {
        const std::size_t all = entries_for(o.context) * per_entry * std::size_t(o.max_sequences);
        o.kv_blocks           = int(std::max(blocks_for(o.context), std::min(affordable, all)));
    }

    if (config.family->learned_positions && o.context > config.context_length)
        return fail(path, ": the model has vectors for ", config.context_length, " positions, not for a context of ",
                    o.context);
    // As many as blocks on the device (the paper, section 4.5), but no more than a few GiB of pinned memory.
    constexpr std::size_t most_pinned = std::size_t(4) << 30;
    if (o.swap_blocks < 0) {
        const std::size_t all   = block_bytes * ranks.size(); // of a block
        const std::size_t there = available_memory(), pool = std::size_t(o.kv_blocks) * all;
        const std::size_t most =
            o.device == "cuda" ? std::min(most_pinned, there / 2) : (there - std::min(there, pool)) / 2;
        o.swap_blocks = int(std::min(std::size_t(o.kv_blocks), most / all));
        if (processes) {
            const Result<std::uint64_t> least = processes->all_reduce_min(std::uint64_t(o.swap_blocks));
            if (!least) return std::unexpected(least.error());
            o.swap_blocks = int(*least);
        }
    }
    // Once more, now that the weights are there.
    if (auto ok = check_room(*ranks[0].backend, o, std::size_t(o.kv_blocks), swap_asked, block_bytes); !ok)
        return std::unexpected(ok.error());

    const auto create_cache = [&](std::size_t r) -> Result<void> {
        Result<KvCache> cache = KvCache::create(*ranks[r].backend, shape_of(r).config, kv_dtype, o.kv_blocks,
                                                o.block_size, o.swap_blocks, o.layout);
        if (!cache) return std::unexpected(cache.error());
        ranks[r].cache = std::move(*cache);
        return {};
    };
    if (auto ok = on_all(ranks, create_cache); !ok) return std::unexpected(ok.error());

    const bool            gpu_ranks = o.device == "cuda" && o.tensor_parallel > 1;
    const int             spin = o.device == "cuda" ? 1'000'000 : 2000; // a GPU must not wait for a thread that sleeps
    std::vector<Backend*> gpu_backends;
    gpu_backends.reserve(ranks.size());
    for (const Rank& rank : ranks) gpu_backends.push_back(rank.backend.get());
    auto executor = std::make_unique<LocalExecutor>(std::move(ranks), group, spin);
    if (gpu_ranks)
        if (auto ok = processes ? connect_cuda_processes(gpu_backends, group)
                                : connect_cuda_ranks(gpu_backends, group->seconds());
            !ok)
            return std::unexpected(ok.error());
    return executor;
}

} // namespace quire
