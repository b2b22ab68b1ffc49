// quire.engine.device_choice: the devices of an engine: the GPU or the CPU, for each rank of this process. Owns nothing.
export module quire.engine.device_choice;

import quire.compute.backend;
import quire.compute.cpu.backend;
import quire.compute.cuda.backend;
import quire.compute.ranks.rank_group;
import quire.core.base;
import quire.core.std;
import quire.core.thread_pool;
import quire.engine.options;
import quire.engine.ranks.process_group;
import quire.model_file.config;
import quire.model_file.family;

export namespace quire {

struct Devices {
    std::shared_ptr<RankGroup>            group;    // of all ranks
    std::vector<std::unique_ptr<Backend>> backends; // one for each rank of this process
};

// Sets options.device to "cpu" or "cuda". `path` names the model in errors; `processes` have the rest of the ranks; or null. Error: there is
// no such device, or not all processes have one.
Result<Devices> choose_devices(const std::string& path, EngineOptions& options, const ModelConfig& config,
                               const std::shared_ptr<ProcessGroup>& processes);

} // namespace quire

module :private;

namespace quire {

// Whether these options run on a GPU, if there is one.
bool wants_gpu(const EngineOptions& o) {
    return o.device == "cuda" || (o.device == "auto" && o.kv_type == KvType::f16 && o.isa.empty());
}

// One for each rank of this process.
Result<std::vector<std::unique_ptr<Backend>>> make_backends(EngineOptions& o, const std::shared_ptr<RankGroup>& group) {
    if (o.device != "auto" && o.device != "cpu" && o.device != "cuda")
        return fail("device ", quote(o.device), " is not one of auto, cpu, cuda");
    if (o.device == "cuda" && o.kv_type == KvType::f32) return fail("on a GPU the KV cache is F16; F32 needs the CPU");
    std::vector<std::unique_ptr<Backend>> ranks(std::size_t(group->n_local()));
    if (wants_gpu(o)) {
        if (o.tensor_parallel > 1) announce_cuda_ranks();
        // Processes of one host take them in turn; where each sees its own alone, they are numbered alike.
        const int n_gpus = std::max(n_cuda_devices(), 1), before = o.processes.local * int(ranks.size());
        for (std::size_t r = 0; r < ranks.size(); r++) {
            const int index = o.processes.n > 1 ? (before + int(r)) % n_gpus : int(r) / o.ranks_per_gpu;
            Result<std::unique_ptr<Backend>> gpu =
                make_cuda_backend({index, o.gpu_memory_utilization, o.deterministic, o.fusion, o.ranks_per_gpu > 1});
            if (gpu) {
                ranks[r] = std::move(*gpu);
                continue;
            }
            if (o.device == "cuda" || r > 0) return std::unexpected(gpu.error());
            break;
        }
        if (ranks[0]) {
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
        ranks[std::size_t(r)] = std::move(*cpu);
    }
    return ranks;
}

Result<Devices> choose_devices(const std::string& path, EngineOptions& o, const ModelConfig& config,
                               const std::shared_ptr<ProcessGroup>& processes) {
    if (config.family->encoder && o.device == "cuda")
        return fail(path, ": the family ", config.family->name, " runs on the CPU only");
    if (config.family->encoder) o.device = "cpu";
    const bool gpus       = wants_gpu(o);
    const auto make_group = [&](double seconds) {
        const int n_local = o.tensor_parallel / o.processes.n;
        return std::make_shared<RankGroup>(o.tensor_parallel, seconds, o.processes.rank * n_local, n_local, processes);
    };
    auto group    = make_group(o.rank_seconds > 0 ? o.rank_seconds : gpus ? processes ? 20 : 10 : 60);
    auto backends = make_backends(o, group);
    if (!backends) return std::unexpected(backends.error());
    if (o.device == "cpu" && gpus) group = make_group(60);
    if (processes) {
        const std::uint64_t         on_gpus = o.device == "cuda" ? 1 : 0;
        const Result<std::uint64_t> least   = processes->all_reduce_min(on_gpus),
                                    most    = processes->all_reduce_min(1 - on_gpus);
        if (!least || !most) return std::unexpected((least ? most : least).error());
        if (*least != on_gpus || *most != 1 - on_gpus)
            return fail("some processes have a GPU, others have none: start all of them with --device cpu");
    }
    return Devices{std::move(group), std::move(*backends)};
}

} // namespace quire
