// quire.engine.options: the options of an engine. Owns nothing.
export module quire.engine.options;

import quire.core.base;
export import quire.decode.drafting; // DraftOptions
export import quire.engine.files.segment_files;
export import quire.engine.ranks.process_group; // ProcessSpec
export import quire.core.tensor;
export import quire.paging.block;
export import quire.paging.cache_layout;
import quire.schedule.scheduler;

export namespace quire {

// The types of K and V, by llama.cpp's names.
struct KvTypeName {
    std::string_view name;
    DType            type;
};
inline constexpr std::array<KvTypeName, 5> kv_type_names{
    {{"f16", DType::F16}, {"bf16", DType::BF16}, {"f32", DType::F32}, {"q8_0", DType::I8}, {"fp8", DType::F8}}};

constexpr std::string_view name_of(DType kv_type) {
    for (const KvTypeName& one : kv_type_names)
        if (one.type == kv_type) return one.name;
    return {};
}
// "q8_0", or of two types "q8_0 (V: f16)".
std::string name_of(KvTypes types);
// The least tokens of a step that --prompt-precision fp8 computes in e4m3: with fewer, GEMMs in 16 bits take as long.
inline constexpr int usual_fp8_rows = 1024;
// Whether a GPU's kernels have these types. Codes need blocks of a multiple of four tokens there, so that their scales can be copied by 16 bytes.
constexpr bool gpu_has(KvTypes types) {
    const auto has = [](DType type) { return type == DType::F16 || has_scales(type); };
    return has(types.k) && has(types.v);
}

// A LoRA adapter: its file, a name by which a request chooses it, and its scale in requests by that name and in those that name no adapter.
struct AdapterOption {
    std::string path, name;
    float       scale = 1;
    bool        usual = true; // false: only requests that name it have it
};

struct EngineOptions {
    std::string device                 = "auto"; // "cpu", "cuda", or the GPU if there is one
    double      gpu_memory_utilization = 0.92;   // fraction of the GPU's memory for weights and KV together
    // Bit-identical logits on any number of ranks, and on a GPU in any batch, which a CPU has anyway.
    bool        deterministic   = false;
    int         tensor_parallel = 1; // ranks: GPUs that share the model, or parts of the CPU's threads
    int         ranks_per_gpu   = 1; // more: ranks share a GPU, which is slow, to test where there are few
    ProcessSpec processes{};         // that have these ranks, as many each
    double      rank_seconds = 0;    // a rank without an answer for so long is lost; 0: 10 on a GPU, 60 on a CPU
    bool        fusion       = true; // false: on a GPU every operation runs alone
    int         threads      = 0;    // 0: the physical cores
    std::string isa{};               // "": the best this CPU has; or a name that cpu_kernels() knows
    // Measure at start: on a CPU how weights are best prefetched, on a GPU which of cuBLASLt's GEMMs are fastest.
    bool tune       = true;
    int  block_size = 16; // tokens, 1..256
    int  context    = 0;  // longest sequence in tokens; 0: the model's, less if its KV would not fit
    // KV blocks as if all layers kept all positions; 0: a full context for each sequence, at most what the device can spare. An engine's
    // options() say how many blocks the pool has: with several cache groups more, of fewer layers each; and those for a recurrent state of
    // each sequence, where layers have one.
    int kv_blocks   = 0;
    int swap_blocks = -1; // of the host pool for swapped requests, likewise; -1: as many as KV blocks
    // Bytes of host memory, of all ranks of this process, for what leaves the prefix cache on the device, with the bookkeeping of its blocks.
    // 0: that is forgotten. -1: on a GPU, and with kv_dir, an eighth of the memory that is free, at most 8 GiB and 2^18 blocks; else 0, because
    // on a CPU it is the same memory as the cache's.
    std::int64_t kv_host_bytes = 0;
    int          tier_blocks   = 0; // so many: an engine's options() say it
    // A directory with files for what enters the prefix cache, so that it outlives the process; empty: none. They need kv_host_bytes.
    std::string  kv_dir        = {};
    std::int64_t kv_disk_bytes = std::int64_t(10) << 30; // of all files
    // A file with the key that these files are encrypted with; empty: they are not, and requests with a salt are not written.
    std::string kv_key = {};
    struct { // for tests, in place of kv_dir: the engine's thread reads and writes them, so many jobs in each step
        std::function<std::unique_ptr<SegmentFiles>()> make = {};
        std::function<int()>                           jobs = {};
    } kv_files{};
    bool           keeps_files() const { return !kv_dir.empty() || kv_files.make; }
    PreemptionMode preemption_mode = PreemptionMode::automatic; // how preempted requests get their KV back
    double         watermark       = 0.04; // fraction of the blocks kept free when a request starts while others run
    // A request that is computed again uses those of its former blocks that no other request has taken.
    bool keep_preempted = true;
    // Where two models share the device: the part of the memory for blocks that this one's pool takes, and bytes that the other one needs.
    double      pool_share = 1;
    std::size_t set_aside  = 0;
    CacheLayout layout{}; // of the model: an engine's options() say it
    int         host_blocks() const { return swap_blocks + tier_blocks; }
    // Contiguous memory for comparison, without swap and prefix cache; empty: blocks on demand.
    MakeReservations reservations  = {};
    KvTypes          kv_type       = DType::F16; // of K and V; gpu_has() says which a GPU has
    bool             kv_type_auto  = false;      // see quire.engine.kv_quality; with the largest mean KLD, in nats
    bool             k_named       = false;      // the type of K, or of V, is none that kv_type_auto chooses
    bool             v_named       = false;
    double           kv_type_limit = 0.001;
    // > 0: the GEMMs of a step of so many tokens and more are in e4m3: faster prompts, not exact. On a GPU of compute capability 9.0.
    int fp8_rows = 0;
    // Of one step, chunks of prompts included. 0: as many as a device is good at, 4096 on a GPU with much memory for models of up to
    // some 9 billion weights, else 2048; 256 on a CPU, where the activations then take less memory; and one for each sequence.
    int max_batch_tokens = 0;
    // On a CPU, > 0: prompts are cut so that a step takes about so long, judged by the last step. A cancel() is seen between two steps.
    double step_seconds = 0;
    // Seconds of a step beside requests that generate, on a CPU; 0: no bound. A step gives each of them one token.
    double shared_step_seconds = 0;
    int    max_sequences       = 16; // running at once; 0: usual_sequences()
    bool   prefix_cache        = true;
    // Of a model with recurrent states: the tokens between two states that stay in the prefix cache, where a prompt that begins alike can
    // go on; rounded up to whole blocks. 0: chosen by what a state costs in memory.
    int                  checkpoint_interval = 0;
    std::vector<BlockId> free_order          = {}; // the order in which blocks are first allocated
    // True: a step begins before step() returns the outputs of the step before, and is planned while the step before runs. The tokens do
    // not depend on it. Empty: true on a GPU.
    std::optional<bool> pipeline = {};
    // Where a constraint allows only one continuation, its tokens are not sampled while at most so many requests run; 0: all tokens are
    // sampled. A step with such tokens is more than decode alone, which pays on a GPU for few requests. -1: any number on a CPU; on a GPU 4, and
    // with `deterministic` 0, so that no answer depends on how many others run.
    int                        fast_forward = -1;
    DraftOptions               drafts       = {}; // draft tokens; but for rounding, the answers do not depend on them
    std::vector<AdapterOption> adapters     = {};
    // The clock of all that depends on time: costs of moves, sizes of chunks, the time limits of masks. None: the machine's.
    std::function<std::chrono::steady_clock::time_point()> clock = {};
};

// The fraction 0..1 that a loader has done.
using Progress = std::function<void(double)>;

// Error: one sentence about an option, or a pair of options, that no model can run with.
Result<void> check_options(const EngineOptions& options);

} // namespace quire

module :private;

namespace quire {

Result<void> check_options(const EngineOptions& o) {
    if (o.block_size < 1 || o.block_size > 256) return fail("block size ", o.block_size, " is not in 1..256");
    if (o.max_sequences < 0 || o.max_batch_tokens < 0 ||
        (o.max_batch_tokens > 0 && o.max_batch_tokens < o.max_sequences))
        return fail("a step of ", o.max_batch_tokens, " tokens cannot hold one of each of ", o.max_sequences,
                    " sequences");
    if (o.context < 0 || o.kv_blocks < 0 || o.threads < 0)
        return fail("context, KV blocks and threads cannot be negative");
    if (const std::string fault = fault_of(o.drafts); !fault.empty()) return fail(fault);
    if (!(o.watermark >= 0 && o.watermark < 1)) return fail("the watermark ", o.watermark, " is not in [0, 1)");
    if (!o.kv_key.empty() && !o.keeps_files())
        return fail("--kv-key is the key of the files in --kv-dir, which is not given");
    return {};
}

std::string name_of(KvTypes types) {
    std::string text(name_of(types.k));
    if (types.v != types.k) text += " (V: " + std::string(name_of(types.v)) + ")";
    return text;
}

} // namespace quire
