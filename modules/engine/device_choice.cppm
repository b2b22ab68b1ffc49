// quire.engine.device_choice: the devices of an engine: the GPU or the CPU, for each rank of this process. Owns nothing.
export module quire.engine.device_choice;

import quire.compute.cpu.backend;
import quire.compute.cuda.backend;
import quire.compute.kv_cache;
import quire.compute.ranks.rank_group;
import quire.core.base;
import quire.core.thread_pool;
import quire.engine.options;
import quire.model_file.config;

export namespace quire {

struct Devices {
    std::shared_ptr<RankGroup>            group;    // of all ranks
    std::vector<std::unique_ptr<Backend>> backends; // one for each rank of this process
};

// Sets options.device to "cpu" or "cuda". `path` names the model in errors; `processes` have the rest of the ranks; or null. Error: there is
// no such device, or not all processes have one.
Result<Devices> choose_devices(const std::string& path, EngineOptions& options, const ModelConfig& config,
                               const std::shared_ptr<ProcessGroup>& processes);

// Sequences at once where the options do not say: 64; on a GPU up to 1024, by its memory and the bytes of a sequence's state.
int usual_sequences(const EngineOptions& options, const ModelConfig& config);
// Rows of logits in a step, of `max_sequences` sequences: one for each, and 64 for the log-probabilities of prompts. On a GPU, where more rows
// cost little, also for draft tokens: up to 512, by its memory.
int usual_logit_rows(const EngineOptions& options);

} // namespace quire

module :private;

namespace quire {

// Whether these options run on a GPU, if there is one.
bool wants_gpu(const EngineOptions& o) {
    return o.device == "cuda" || (o.device == "auto" && gpu_has(o.kv_type) && o.isa.empty());
}

// Processes of one host take the GPUs in turn; where each process sees its own GPU alone, all have the number 0.
int gpu_of(const EngineOptions& o, int rank) {
    const int n = std::max(n_cuda_devices(), 1), n_local = o.tensor_parallel / o.processes.n;
    return o.processes.n > 1 ? (o.processes.local * n_local + rank) % n : rank / o.ranks_per_gpu;
}

constexpr std::size_t bytes_of_row = std::size_t(64) << 20; // of the GPU's memory: a sequence and its row of a step

std::size_t memory_of(const EngineOptions& o) {
    if (o.tensor_parallel > 1) announce_cuda_ranks();
    return std::size_t(double(cuda_memory(gpu_of(o, 0))) * o.gpu_memory_utilization);
}

int usual_sequences(const EngineOptions& o, const ModelConfig& config) {
    constexpr int least = 64;
    const int     room  = o.max_batch_tokens > 0 ? o.max_batch_tokens : 1 << 20; // a step has a token of each
    if (config.family->encoder || !wants_gpu(o)) return std::min(least, room);
    const std::size_t memory = memory_of(o);
    const std::size_t states = KvCache::state_bytes(config) / std::size_t(o.tensor_parallel) * (o.drafts.on ? 2 : 1);
    // A deterministic step keeps partial sums of each token.
    const int most = std::min(o.deterministic ? 256 : 1024, room);
    int       n    = std::min(least, most);
    while (2 * n <= most && std::size_t(2 * n) * std::max(bytes_of_row, 4 * states) <= memory) n *= 2;
    return n;
}

int usual_logit_rows(const EngineOptions& o) {
    constexpr std::int64_t least = 64, most = 512;
    std::int64_t           drafts = 0;
    if (o.drafts.on && wants_gpu(o))
        drafts = std::min({most, o.max_sequences * std::int64_t(1 + o.drafts.most),
                           std::int64_t(memory_of(o) / bytes_of_row),
                           std::int64_t(o.max_batch_tokens > 0 ? o.max_batch_tokens : most)});
    return int(std::max({std::int64_t(o.max_sequences), least, drafts}));
}

using Backends = std::vector<std::unique_ptr<Backend>>;

// A GPU for each of n ranks. None: there is no GPU, and the options do not ask for one.
Result<Backends> gpu_backends(const EngineOptions& o, int n) {
    if (o.tensor_parallel > 1) announce_cuda_ranks();
    Backends gpus;
    for (int r = 0; r < n; r++) {
        Result<std::unique_ptr<Backend>> gpu =
            make_cuda_backend({gpu_of(o, r), o.gpu_memory_utilization, o.deterministic, o.fusion, o.ranks_per_gpu > 1,
                               o.fp8_rows, o.tune});
        if (!gpu && o.device != "cuda" && r == 0) break;
        if (!gpu) return std::unexpected(gpu.error());
        gpus.push_back(std::move(*gpu));
    }
    return gpus;
}

// A part of the CPU's threads for each rank of a group.
Result<Backends> cpu_backends(const EngineOptions& o, const std::shared_ptr<RankGroup>& group) {
    Backends  cpus;
    const int threads = o.threads > 0 ? o.threads : physical_cores();
    for (int r = 0; r < group->n_local(); r++) {
        Result<std::unique_ptr<Backend>> cpu =
            make_cpu_backend(std::max(1, threads / group->n_local()), o.isa, o.tune && o.tensor_parallel == 1,
                             o.tensor_parallel > 1 ? group : nullptr, group->first() + r);
        if (!cpu) return std::unexpected(cpu.error());
        cpus.push_back(std::move(*cpu));
    }
    return cpus;
}

Result<Devices> choose_devices(const std::string& path, EngineOptions& o, const ModelConfig& config,
                               const std::shared_ptr<ProcessGroup>& processes) {
    if (config.family->encoder && o.device == "cuda")
        return fail(path, ": the family ", config.family->name, " runs on the CPU only");
    if (config.family->encoder) o.device = "cpu";
    if (o.device != "auto" && o.device != "cpu" && o.device != "cuda")
        return fail("device ", quote(o.device), " is not one of auto, cpu, cuda");
    // F32 is asked for to compare; BF16 for speed, which the CPU in a GPU's place would not give.
    const bool refused = !gpu_has(o.kv_type) && (o.device == "cuda" || (o.device == "auto" && o.kv_type != DType::F32 &&
                                                                        o.isa.empty() && n_cuda_devices() > 0));
    if (refused)
        return fail("on a GPU the KV cache is f16, q8_0 or fp8; the type ", name_of(o.kv_type),
                    " needs the CPU: --device cpu");
    if (o.fp8_rows > 0 && (o.deterministic || !o.fusion))
        return fail("prompts in fp8 depend on the size of a step: --prompt-precision fp8 goes without ",
                    o.deterministic ? "--deterministic" : "--no-fusion");
    const int        n_local  = o.tensor_parallel / o.processes.n;
    Result<Backends> backends = wants_gpu(o) ? gpu_backends(o, n_local) : Backends();
    if (!backends) return std::unexpected(backends.error());
    o.device = backends->empty() ? "cpu" : "cuda";
    if (o.device == "cuda" && o.kv_type != DType::F16 && o.block_size % 4 != 0)
        return fail("on a GPU a KV cache of the type ", name_of(o.kv_type),
                    " needs a --block-size that is a multiple of 4, not ", o.block_size);
    if (o.fp8_rows > 0 && o.device == "cpu")
        return fail("prompts in fp8 need a GPU: --prompt-precision f16 without one");
    const double usual = o.device == "cpu" ? 60 : processes ? 20 : 10;
    const auto   group = std::make_shared<RankGroup>(o.tensor_parallel, o.rank_seconds > 0 ? o.rank_seconds : usual,
                                                     o.processes.rank * n_local, n_local, processes);
    if (o.device == "cpu") backends = cpu_backends(o, group);
    if (!backends) return std::unexpected(backends.error());
    if (processes) {
        const std::uint64_t         on_gpus = o.device == "cuda" ? 1 : 0;
        const Result<std::uint64_t> least   = processes->all_reduce_min(on_gpus),
                                    most    = processes->all_reduce_min(1 - on_gpus);
        if (!least || !most) return std::unexpected((least ? most : least).error());
        if (*least != on_gpus || *most != 1 - on_gpus)
            return fail("some processes have a GPU, others have none: start all of them with --device cpu");
    }
    return Devices{group, std::move(*backends)};
}

} // namespace quire
