// quire.compute.cuda.backend: the NVIDIA GPU backend, on top of cuda/kernels.h: lowers a program to device addresses, compiles it
// to kernels for each kind of step, runs it. **Owns** the stream, device memory, the weights in device layout, the decode
// megakernel, and the captured CUDA graphs of decode steps.
module;

#include "../../../cuda/kernels.h"
#include "../../../cuda/ranks/ranks.h"

export module quire.compute.cuda.backend;

import quire.compute.backend;
import quire.compute.cuda.attention_plan;
import quire.compute.cuda.experts;
import quire.compute.cuda.fusion;
import quire.compute.cuda.gemm_dispatch;
import quire.compute.cuda.lowering;
import quire.compute.cuda.weights;
import quire.compute.memory;
import quire.compute.program;
import quire.compute.ranks.rank_group;
import quire.core.base;
import quire.core.recent;
import quire.core.std;
import quire.core.tensor;
import quire.model_file.family;
import quire.model_file.quants;
import quire.paging.block;
import quire.step.logprobs;
import quire.step.plan;

export namespace quire {

struct CudaOptions {
    int    device             = 0;
    double memory_utilization = 0.92;  // of the device's memory, for weights, workspaces and KV together
    bool   deterministic      = false; // the same bits in any batch and with any chunking, at the price of slow prompts
    bool   fusion             = true;  // false: every operation runs in its plain kernel, for comparison
    bool   shares_device      = false; // with other ranks of the model
};

// Error: no such device, and why.
Result<std::unique_ptr<Backend>> make_cuda_backend(const CudaOptions& options);

// Before anything else is asked of a GPU, where several will run a model together.
void announce_cuda_ranks();
// Makes these backends ranks that run a model together: after compile(), before the first step. Each has a GPU of its own, or they
// were made with shares_device. `seconds`: how long a rank waits for the others. Error: the GPUs cannot reach each other's memory.
Result<void> connect_cuda_ranks(std::span<Backend* const> backends, double seconds);
// The same for the GPUs of one of several processes, the local ranks of `group`: all that they say goes by NCCL. Error: it is not
// installed, or the processes do not find each other.
Result<void> connect_cuda_processes(std::span<Backend* const> backends, const std::shared_ptr<RankGroup>& group);
int          n_cuda_devices();

} // namespace quire

module :private;

namespace quire {

// Rows of a decoding step, rounded up: each size is captured once.
static int rounded_rows(int n) {
    for (int size : {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128})
        if (n <= size) return size;
    return (n + 31) / 32 * 32;
}

// Of the buffer that sampling sends up: random numbers, then tasks, then edits; behind them come masks.
static std::size_t sampling_bytes(std::size_t n_tasks, std::size_t n_uniforms, std::size_t n_edits) {
    return n_tasks * sizeof(cuda::SampleTask) + n_uniforms * sizeof(double) + n_edits * sizeof(cuda::LogitEdit);
}

// Steps that are kept captured, and what one takes of the device for each layer, about (measured on an H100).
constexpr std::size_t most_graphs = 128, graph_bytes_of_layer = std::size_t(64) << 10;

static cuda::NormKind norm_kind(NormKind kind) {
    return kind == NormKind::rms     ? cuda::NormKind::rms
           : kind == NormKind::layer ? cuda::NormKind::layer
                                     : cuda::NormKind::none;
}

// An operation in which ranks meet: the k-th of one rank belongs to the k-th of every other. Other operations need not be the same,
// as not every rank has a part of every weight. Processes send it to each other as it is.
struct Collective {
    std::int64_t at      = 0; // in the rank's program
    std::int64_t gathers = 0; // else it sums
    std::int64_t first = 0, cols = 0;
    std::int64_t of_floats = 0; // what is summed, as far as this rank knows
};

class CudaBackend final : public Backend {
public:
    CudaBackend(const CudaOptions& options, const cuda::DeviceInfo& info, cuda::Context* gpu)
        : options_(options), info_(info), gpu_(gpu), memory_(*gpu), weights_(*gpu, memory_, info.total),
          gemm_(*gpu, options.deterministic), experts_(*gpu, options.deterministic) {}
    ~CudaBackend() override {
        cuda::use(*gpu_);
        cuda::synchronize(*gpu_);
        graphs_.each(forget_graph);
        cuda::destroy_decode_megakernel(megakernel_);
        for (void* memory : owned_host_) cuda::release_host(memory);
    }
    CudaBackend(const CudaBackend&)            = delete;
    CudaBackend& operator=(const CudaBackend&) = delete;

    std::string describe() const override {
        return cat(info_.name, ", compute ", info_.major, ".", info_.minor, ", ", info_.total >> 30, " GiB",
                   options_.deterministic ? ", deterministic" : "");
    }

    Result<Buffer>         allocate(std::size_t bytes) override;
    Result<Buffer>         allocate_host(std::size_t bytes) override;
    std::size_t            memory_available() const override;
    std::size_t            memory_for_cache() const override;
    std::size_t            memory_taken() const override { return memory_.taken() + cuda::bytes_of(*gpu_); }
    double                 read_bandwidth() override;
    DType                  activation_type() const override { return DType::F16; }
    Result<TensorView>     prepare(const TensorView& weight) override;
    Result<TensorView>     prepare_lookup(const TensorView& weight) override;
    Result<TensorView>     prepare_stack(const TensorView& weights, int n) override;
    Result<TensorView>     prepare_f32(const TensorView& weight) override;
    void                   end_weights() override { weights_.end(); }
    bool                   copies_weights() const override { return true; }
    Result<void>           prepare_steps(const StepLimits& limits) override;
    std::span<const float> to_host(const Tensor& tensor) override;

    void           compile(const Program& program, const Activations& values, std::span<const KvLayer> layers) override;
    std::string    explain() const override;
    void           run(const StepPlan& plan) override;
    SamplingLimits sampling_limits() const override { return sampling_limits_; }
    void           sample(const StepPlan& plan) override;
    StepResults    results() override;
    void           finish_copies() override;
    void           copy_blocks(std::span<const BlockCopy> copies, std::span<const KvLayer> from,
                               std::span<const KvLayer> to) override;

private:
    using Half = cuda::Half;
    static float* floats(const Tensor& t) { return static_cast<float*>(t.data); }
    void          check_device(std::string_view what) {
        if (const char* error = cuda::last_error(*gpu_)) throw std::runtime_error(cat("CUDA, ", what, ": ", error));
        if (rank_ && cuda::lost_a_rank(*rank_)) throw std::runtime_error("another rank does not answer");
    }
    friend Result<void> connect_cuda_ranks(std::span<Backend* const> backends, double seconds);
    friend Result<void> connect_cuda_processes(std::span<Backend* const>         backends,
                                               const std::shared_ptr<RankGroup>& group);
    void                wait_for_device();

    CudaOptions      options_;
    cuda::DeviceInfo info_;
    struct DestroyContext {
        void operator()(cuda::Context* gpu) const { cuda::destroy_context(gpu); }
    };
    std::unique_ptr<cuda::Context, DestroyContext> gpu_;
    struct DestroyRank {
        void operator()(cuda::Rank* rank) const { cuda::destroy_rank(rank); }
    };
    std::unique_ptr<cuda::Rank, DestroyRank> rank_;  // null: it runs alone
    std::shared_ptr<RankGroup>               group_; // null: all ranks are of this process
    DeviceMemory                             memory_;
    DeviceWeights                            weights_;
    GemmDispatch                             gemm_;
    ExpertDispatch                           experts_;
    std::size_t                              n_stacks_         = 0;
    bool                                     has_layer_kernel_ = false;
    std::vector<void*>                       owned_host_; // pinned

    // The step: one pinned buffer, sent up in one copy. Regions stand at fixed places, so that graphs can name them.
    StepLimits    limits_;
    std::int32_t *host_ = nullptr, *device_ = nullptr;
    std::size_t   at_positions_ = 0, at_slots_ = 0, at_rows_ = 0, at_starts_ = 0, at_items_ = 0, at_tiles_ = 0,
                at_tables_ = 0, plan_ints_ = 0;
    std::size_t             table_ints_ = 0;                   // room for the block tables of one part
    std::vector<int>        first_tables_;                     // of each cache group, among the parts of all
    std::vector<cuda::Plan> plans_;                            // for the layers of each part
    cuda::Plan&             on_device_() { return plans_[0]; } // for what reads no block tables
    // A list of split-KV items for each of the program's windows, and the cache group that its layers are in.
    std::vector<int>                windows_, groups_of_windows_;
    std::size_t                     list_ints_ = 0;
    std::array<AttentionWork, 2>    work_;
    AttentionRoom                   room_;
    std::array<std::vector<int>, 2> launches_; // of deterministic steps: see launches_of()
    StepShape                       shape_;
    bool                            alone_ = false;              // on the device, in this step
    using GraphKey                         = std::array<int, 8>; // rows, alone, and of each list its SplitKvItems
    GraphKey graph_key() const {
        const auto &a = work_[0], &b = work_[1];
        return {shape_.tokens, alone_, a.n_items, a.n_short, a.one_warp, b.n_items, b.n_short, b.one_warp};
    }
    static void forget_graph(void*& graph) {
        if (graph != nullptr) cuda::destroy_graph(graph);
    }
    Recent<GraphKey, void*> graphs_{most_graphs}; // executable; null: the shape came once, and ran as it was

    // The program: its operations lowered, and their groups for the kinds of step that have fused kernels.
    const Program*                program_ = nullptr;
    const Activations*            values_  = nullptr;
    std::vector<LoweredOperation> lowered_;
    std::vector<cuda::Operation>  operations_; // the same, side by side as kernels read them
    std::vector<FusionGroup>      plain_, few_rows_, many_rows_;
    void*                         megakernel_ = nullptr; // one token; null: the GPU or the program has none
    cuda::SplitKvItems            items_of(std::size_t list) const {
        return {reinterpret_cast<const cuda::SplitKvItem*>(device_ + at_items_ + list * list_ints_),
                           work_[list].n_items, work_[list].n_short, work_[list].one_warp};
    }
    std::vector<Collective> collectives() const;
    // Takes from the collectives of all ranks what this one must know. Error: they are not the same.
    Result<void> join(const std::vector<std::vector<Collective>>& of);
    // What this rank sends in an AllReduce: a part alone as it is, several as their sum, none as zeros.
    void* sent(const LoweredOperation& op) const {
        return op.parts.n == 1 && op.parts.of[0] != nullptr ? const_cast<void*>(op.parts.of[0]) : sum_of_parts_;
    }
    AttentionShape attention_shape(int window, bool rounded) const {
        return {limits_.head_dim, limits_.value_dim, limits_.n_kv_heads, window, options_.deterministic, rounded};
    }
    bool begin_step(const StepPlan& plan);
    void run_operations();
    void run_group(const FusionGroup& group);
    // For a fused kernel: that of its RopeAndStore. No group has several, because attention stands between them.
    const cuda::Plan& plan_of(const FusionGroup& group) const {
        int tables = 0;
        for (int i = group.first; i < group.first + group.n; i++)
            tables = std::max(tables, lowered_[std::size_t(i)].tables);
        return plans_[std::size_t(tables)];
    }
    void                            run_gemm_and_next(std::size_t first);
    StepKind                        kind_of_step() const;
    const std::vector<FusionGroup>& groups_of(StepKind kind) const;
    // An operation in its plain kernel.
    void execute(const Embed& embed, const LoweredOperation& op);
    void execute(const Norm& norm, const LoweredOperation& op);
    void execute(const Gemm&, const LoweredOperation& op) { gemm_.run(op.device); }
    void execute(const GatedGemm&, const LoweredOperation& op) { gemm_.run(op.device); }
    void execute(const Activate&, const LoweredOperation& op);
    void execute(const SoftCap& cap, const LoweredOperation& op);
    void execute(const HeadGemm&, const LoweredOperation& op) { gemm_.run(op.heads, op.device.rows); }
    void execute(const RopeAndStore&, const LoweredOperation& op);
    void execute(const quire::Attention&, const LoweredOperation& op);
    void execute(const Route&, const LoweredOperation& op) { experts_.route(op, op.device.rows, on_device_().slots); }
    void execute(const ExpertGatedGemm&, const LoweredOperation& op) { experts_.gated(op, op.device.rows); }
    void execute(const ExpertCombineGemm&, const LoweredOperation& op) { experts_.combine(op, op.device.rows); }
    void execute(const GateRows& gate, const LoweredOperation& op);
    void execute(const Add&, const LoweredOperation& op);
    void execute(const SelectRows&, const LoweredOperation& op);
    void execute(const Argmax& argmax, const LoweredOperation& op);
    void execute(const AllReduce&, const LoweredOperation& op);
    void execute(const AllGather& gather, const LoweredOperation& op);
    void execute(const TakeColumns& take, const LoweredOperation& op);

    float*        sum_of_parts_ = nullptr; // of this rank, where AllReduce has several
    float*        partial_      = nullptr; // of split-KV attention
    std::int32_t* arrivals_     = nullptr;
    std::int32_t* best_         = nullptr; // of each logit row; pinned, so that kernels write it there themselves
    float*        logits_       = nullptr; // pinned
    std::size_t   logits_size_  = 0;
    // Sampling: tasks, draws and edits go up in one copy, answers come back with the best tokens.
    SamplingLimits sampling_limits_;
    std::byte *    host_sampling_ = nullptr, *sampling_ = nullptr;
    TokenLogprob * host_answers_ = nullptr, *answers_ = nullptr;
    std::size_t    n_answers_ = 0;
    // Block moves
    std::int32_t *host_pairs_ = nullptr, *pairs_ = nullptr;
    const void**  pool_pointers_[2] = {nullptr, nullptr}; // device arrays of K and V bases: device pool, swap pool
    bool          pools_sent_[2]    = {false, false};
    std::size_t   n_pairs_ = 0, n_pairs_used_ = 0; // by copies that may not be done
};

Result<std::unique_ptr<Backend>> make_cuda_backend(const CudaOptions& options) {
    cuda::DeviceInfo info;
    const char*      why = cuda::open_device(options.device, info);
    cuda::Context*   gpu = why == nullptr ? cuda::create_context(options.device, why) : nullptr;
    if (gpu == nullptr) return fail_with(ErrorKind::system, "no GPU to run on: ", why);
    return std::make_unique<CudaBackend>(options, info, gpu);
}

// -- memory

Result<Buffer> CudaBackend::allocate(std::size_t bytes) {
    cuda::use(*gpu_);
    void* data = cuda::allocate(*gpu_, bytes);
    if (data == nullptr) return fail_with(ErrorKind::system, "the GPU has no ", bytes >> 20, " MiB of memory left");
    memory_.count(bytes);
    return Buffer(data, bytes, [](void* p, std::size_t) { cuda::release(p); });
}

// A kernel that reads two arrays and writes one, a few times.
double CudaBackend::read_bandwidth() {
    cuda::use(*gpu_);
    constexpr std::int64_t n       = std::int64_t(64) << 20;
    auto* const            x       = static_cast<float*>(cuda::allocate(*gpu_, std::size_t(n) * 4));
    auto* const            y       = static_cast<Half*>(cuda::allocate(*gpu_, std::size_t(n) * 2));
    double                 seconds = 0;
    if (x != nullptr && y != nullptr) {
        void *const first = cuda::create_event(), *const last = cuda::create_event();
        cuda::add(x, y, n, *gpu_);
        cuda::record_event(first, *gpu_);
        for (int i = 0; i < 4; i++) cuda::add(x, y, n, *gpu_);
        cuda::record_event(last, *gpu_);
        seconds = cuda::seconds_between(first, last);
        cuda::destroy_event(first);
        cuda::destroy_event(last);
    }
    cuda::release(x);
    cuda::release(y);
    return seconds > 0 ? 4 * double(n) * 10 / seconds : 0;
}

Result<Buffer> CudaBackend::allocate_host(std::size_t bytes) {
    void* data = cuda::allocate_host(bytes);
    if (data == nullptr) return fail_with(ErrorKind::system, "cannot pin ", bytes >> 20, " MiB of memory");
    return Buffer(data, bytes, [](void* p, std::size_t) { cuda::release_host(p); });
}

std::size_t CudaBackend::memory_available() const {
    cuda::DeviceInfo now;
    return cuda::open_device(options_.device, now) == nullptr ? now.free : 0;
}

std::size_t CudaBackend::memory_for_cache() const {
    const std::size_t left = memory_available();
    const std::size_t layers =
        (std::size_t(gemm_.n_weights()) + n_stacks_) / 6 + 1; // at most: each has six matrices, or seven
    const auto reserve = std::size_t(double(info_.total) * (1 - options_.memory_utilization)) +
                         most_graphs * graph_bytes_of_layer * layers;
    return left > reserve ? left - reserve : 0;
}

Result<TensorView> CudaBackend::prepare(const TensorView& view) {
    const Result<TensorView> ready = prepare_lookup(view);
    if (!ready) return ready;
    gemm_.add(weight_of(*ready));
    return ready;
}

Result<TensorView> CudaBackend::prepare_lookup(const TensorView& view) {
    cuda::use(*gpu_);
    return weights_.prepare(view);
}

// Not for GEMMs of the whole stack.
Result<TensorView> CudaBackend::prepare_stack(const TensorView& weights, int) {
    n_stacks_++;
    return prepare_lookup(weights);
}

Result<TensorView> CudaBackend::prepare_f32(const TensorView& weight) {
    cuda::use(*gpu_);
    return weights_.prepare_f32(weight);
}

Result<void> CudaBackend::prepare_steps(const StepLimits& l) {
    limits_ = l;
    cuda::use(*gpu_);
    if (l.n_heads > 65535) return fail_with(ErrorKind::input, "the GPU's kernels know 65535 heads, not ", l.n_heads);
    // Where ranks share a GPU, one that waits for another may hold the room that a kernel on all SMs needs.
    has_layer_kernel_ =
        !options_.deterministic && options_.fusion && !options_.shares_device && cuda::prepare_layer_kernel(*gpu_) > 0;
    limits_.max_tokens = std::max(l.max_tokens, 8);
    const auto T = std::size_t(limits_.max_tokens), S = std::size_t(l.max_sequences) + 1,
               L = std::size_t(l.max_logit_rows);
    check(l.n_windows <= int(work_.size()), "more sliding windows than a step has lists for");
    room_ = attention_room(attention_shape(0, true), *gpu_, limits_.max_tokens, l.max_sequences, l.context);
    for (int n = 0; int parts : l.parts) {
        first_tables_.push_back(n);
        n += parts;
        plans_.resize(std::size_t(n));
    }
    table_ints_   = S * (std::size_t(l.max_blocks_per_sequence) + 1);
    at_positions_ = T;
    at_slots_     = 2 * T;
    at_rows_      = at_slots_ + plans_.size() * T;
    at_starts_    = at_rows_ + std::max(L, T);
    at_items_     = at_starts_ + l.parts.size() * S;
    list_ints_    = std::size_t(room_.list) * sizeof(cuda::SplitKvItem) / 4;
    at_tiles_     = at_items_ + std::size_t(l.n_windows) * list_ints_;
    at_tables_    = at_tiles_ + T * 3;
    plan_ints_    = at_tables_ + plans_.size() * table_ints_;
    host_         = static_cast<std::int32_t*>(cuda::allocate_host(plan_ints_ * 4));
    device_       = static_cast<std::int32_t*>(memory_.take(plan_ints_ * 4));
    partial_      = static_cast<float*>(
        memory_.take(std::size_t(room_.launch) * std::size_t(l.n_heads) * std::size_t(l.value_dim + 2) * 4));
    arrivals_        = static_cast<std::int32_t*>(memory_.take(T * std::size_t(l.n_heads) * 4));
    logits_size_     = std::max(L, std::size_t(rounded_rows(int(L)))) * std::size_t(l.vocab_size);
    logits_          = static_cast<float*>(cuda::allocate_host(logits_size_ * 4));
    best_            = static_cast<std::int32_t*>(cuda::allocate_host((std::max(L, T) + 64) * 4));
    const int rows   = int(std::max(L, T));
    sampling_limits_ = {
        rows, 65536, 16 * rows, 128 * rows, std::min(cuda::max_top, l.vocab_size), rows * ((l.vocab_size + 63) / 64)};
    const std::size_t request =
        sampling_bytes(std::size_t(rows), std::size_t(sampling_limits_.uniforms), std::size_t(sampling_limits_.edits)) +
        std::size_t(sampling_limits_.mask_words) * 8;
    const std::size_t reply = std::size_t(sampling_limits_.results) * sizeof(TokenLogprob);
    host_sampling_          = static_cast<std::byte*>(cuda::allocate_host(request));
    sampling_               = static_cast<std::byte*>(memory_.take(request));
    host_answers_           = static_cast<TokenLogprob*>(cuda::allocate_host(reply));
    answers_                = static_cast<TokenLogprob*>(memory_.take(reply));
    n_pairs_                = 4096;
    host_pairs_             = static_cast<std::int32_t*>(cuda::allocate_host(n_pairs_ * 8));
    pairs_                  = static_cast<std::int32_t*>(memory_.take(n_pairs_ * 8));
    for (auto& pointers : pool_pointers_)
        pointers = static_cast<const void**>(memory_.take(std::size_t(l.n_layers) * 2 * sizeof(void*)));
    void* const workspace = gemm_.workspace_bytes() > 0 ? memory_.take(gemm_.workspace_bytes()) : nullptr;
    gemm_.set_workspace(workspace);
    for (void* memory :
         {static_cast<void*>(host_), static_cast<void*>(logits_), static_cast<void*>(host_pairs_),
          static_cast<void*>(best_), static_cast<void*>(host_sampling_), static_cast<void*>(host_answers_)})
        if (memory != nullptr) owned_host_.push_back(memory);
    if (!host_ || !device_ || !partial_ || !arrivals_ || !logits_ || !host_pairs_ || !best_ || !pairs_ ||
        !host_sampling_ || !sampling_ || !host_answers_ || !answers_ || !pool_pointers_[1] ||
        (gemm_.workspace_bytes() > 0 && !workspace))
        return fail_with(ErrorKind::system, "the GPU has no memory left for the workspaces of a step");
    for (std::size_t g = 0; g < l.parts.size(); g++)
        for (int part = 0; part < l.parts[g]; part++) {
            const auto  i     = std::size_t(first_tables_[g] + part);
            cuda::Plan& plan  = plans_[i];
            plan.tokens       = device_;
            plan.positions    = device_ + at_positions_;
            plan.logit_rows   = device_ + at_rows_;
            plan.slots        = device_ + at_slots_ + i * T;
            plan.table_start  = device_ + at_starts_ + g * S;
            plan.block_tables = device_ + at_tables_ + i * table_ints_;
        }
    if (auto ok = experts_.prepare(limits_, memory_); !ok) return ok;
    // Between ranks attn_output stands alone, and its GEMM is the library's.
    gemm_.tune(limits_.max_tokens, limits_.max_logit_rows, limits_.rank_vocab, has_layer_kernel_ && l.n_ranks == 1);
    if (const char* error = cuda::last_error(*gpu_)) return fail_with(ErrorKind::system, "CUDA: ", error);
    return {};
}

std::span<const float> CudaBackend::to_host(const Tensor& t) {
    const auto n = std::size_t(t.rows * t.cols);
    check(t.type == DType::F32 && n <= logits_size_, "to_host: not the logits");
    cuda::copy_to_host(logits_, t.data, n * 4, *gpu_);
    wait_for_device();
    check_device("a step");
    return {logits_, n};
}

// -- the step

// Sends the plan up. Whether the step only decodes, in the shape of other steps, so that a graph can replay it.
bool CudaBackend::begin_step(const StepPlan& plan) {
    alone_             = cuda::begin_launches(*gpu_);
    const int T        = plan.n_tokens();
    bool      decoding = !options_.deterministic && T == plan.n_seqs() && plan.logit_rows.size() == plan.tokens.size();
    shape_             = {T, int(plan.logit_rows.size())};
    if (decoding && rounded_rows(T) <= limits_.max_tokens && rounded_rows(T) <= limits_.max_logit_rows)
        shape_.tokens = shape_.logit_rows = rounded_rows(T);
    else decoding = false;
    check(shape_.tokens <= limits_.max_tokens && plan.n_seqs() <= limits_.max_sequences,
          "a step larger than announced");
    check(plan.groups.size() == first_tables_.size(), "a plan for other cache groups");

    const auto put = [&](std::size_t at, const std::vector<std::int32_t>& values) {
        std::copy(values.begin(), values.end(), host_ + at);
    };
    put(0, plan.tokens);
    put(at_positions_, plan.positions);
    put(at_rows_, plan.logit_rows);
    for (int t = T; t < shape_.tokens; t++) host_[t] = host_[at_positions_ + std::size_t(t)] = 0;
    const auto room = std::size_t(limits_.max_tokens);
    for (std::size_t g = 0; g < plan.groups.size(); g++) {
        const GroupPlan& group = plan.groups[g];
        for (int s = 0; s < plan.n_seqs(); s++)
            host_[at_starts_ + g * (std::size_t(limits_.max_sequences) + 1) + std::size_t(s)] =
                group.origin(std::size_t(s));
        for (std::size_t part = 0; part < group.parts.size(); part++) {
            const std::size_t i         = std::size_t(first_tables_[g]) + part;
            const auto& [tables, slots] = group.parts[part];
            check(tables.size() <= table_ints_, "more block tables than announced");
            put(at_tables_ + i * table_ints_, tables);
            put(at_slots_ + i * room, slots);
            for (int t = T; t < shape_.tokens; t++) host_[at_slots_ + i * room + std::size_t(t)] = -1;
        }
    }
    for (int l = int(plan.logit_rows.size()); l < shape_.logit_rows; l++) host_[at_rows_ + std::size_t(l)] = 0;

    for (std::size_t i = 0; i < windows_.size(); i++) {
        std::int32_t* const list = host_ + at_items_ + i * list_ints_;
        work_[i]                 = plan_attention(plan, plan.groups[std::size_t(groups_of_windows_[i])],
                                                  attention_shape(windows_[i], decoding), *gpu_, list, host_ + at_tiles_);
        check(work_[i].n_items + work_[i].n_short <= room_.list, "more splits than announced");
        if (options_.deterministic)
            launches_of({reinterpret_cast<const cuda::SplitKvItem*>(list), std::size_t(work_[i].n_items)}, room_.launch,
                        launches_[i]);
    }
    plans_[0].items = items_of(0);
    // The first tables stand behind all else; each further part has a place of its own.
    cuda::copy_to_device(device_, host_, (at_tables_ + plan.groups[0].parts[0].tables.size()) * 4, *gpu_);
    for (std::size_t g = 0, i = 0; g < plan.groups.size(); g++)
        for (const GroupPlan::Part& part : plan.groups[g].parts)
            if (const std::size_t at = at_tables_ + i++ * table_ints_; i > 1)
                cuda::copy_to_device(device_ + at, host_ + at, part.tables.size() * 4, *gpu_);
    return decoding && work_[0].n_tiles == 0;
}

// Sequences longer than this are better served by kernels that have the whole shared memory for attention.
constexpr int max_megakernel_items = 512;

void CudaBackend::run(const StepPlan& plan) {
    cuda::use(*gpu_);
    // NCCL across processes is not captured; and a graph that is made waits for the device, hence for ranks that share it.
    const bool decoding = begin_step(plan) && !group_ && !options_.shares_device;
    if (!decoding) {
        run_operations();
    } else if (shape_.tokens == 1 && megakernel_ != nullptr &&
               work_[0].n_items * limits_.n_kv_heads <= max_megakernel_items &&
               cuda::run_decode_megakernel(megakernel_, on_device_(), partial_, arrivals_, *gpu_)) {
        run_group({FusedKernel::none, int(lowered_.size()) - 1}); // Argmax
    } else if (void** const graph = graphs_.find(graph_key()); graph == nullptr) {
        graphs_.add(graph_key(), nullptr, forget_graph); // kernels are loaded the first time; the second is captured
        run_operations();
    } else {
        if (*graph == nullptr) {
            cuda::begin_capture(*gpu_);
            run_operations();
            *graph = cuda::end_capture(*gpu_);
            if (*graph == nullptr) check_device("a step that is captured");
        }
        cuda::launch_graph(*graph, *gpu_);
    }
    cuda::end_launches(*gpu_);
}

StepKind CudaBackend::kind_of_step() const {
    if (shape_.tokens == 1) return StepKind::one_token;
    if (shape_.tokens <= cuda::max_layer_kernel_rows) return StepKind::few_rows;
    return shape_.tokens < min_prefill_rows ? StepKind::some_rows : StepKind::many_rows;
}

const std::vector<FusionGroup>& CudaBackend::groups_of(StepKind kind) const {
    return kind == StepKind::few_rows ? few_rows_ : kind == StepKind::many_rows ? many_rows_ : plain_;
}

void CudaBackend::run_operations() {
    const int end = shape_.logit_rows > 0 ? int(lowered_.size()) : int(program_->head);
    for (const FusionGroup& group : groups_of(kind_of_step()))
        if (group.first < end) run_group(group);
}

void CudaBackend::run_group(const FusionGroup& group) {
    const auto first = std::size_t(group.first), n = std::size_t(group.n);
    for (std::size_t i = first; i < first + n; i++) {
        const LoweredOperation& op = lowered_[i];
        operations_[i].rows        = op.device.rows * (op.logit_rows ? shape_.logit_rows : shape_.tokens);
    }
    const std::span ops = std::span(operations_).subspan(first, n);
    if (group.kernel == FusedKernel::layer_kernel) {
        const int ran = cuda::run_layer_kernel(ops.data(), group.n, shape_.tokens, plan_of(group), *gpu_);
        check(ran == 0 || ran == group.n, "a layer kernel that ran other operations than it matched");
        if (ran > 0) return;
    }
    if (group.kernel == FusedKernel::prefill_gemm && gemm_.run_prefill(ops, plan_of(group))) return;
    if (group.kernel == FusedKernel::bias_in_next) return run_gemm_and_next(first);
    for (std::size_t i = first; i < first + n; i++) {
        LoweredOperation op = lowered_[i];
        op.device.rows      = operations_[i].rows;
        std::visit([&](const auto& what) { execute(what, op); }, program_->operations[i]);
    }
}

// A GEMM, and the operation that reads its results: that one adds the biases, where the GEMM's kernel has left them.
void CudaBackend::run_gemm_and_next(std::size_t first) {
    LoweredOperation gemm = lowered_[first], next = lowered_[first + 1];
    gemm.device.rows = operations_[first].rows, next.device.rows = operations_[first + 1].rows;
    if (gemm_.run_without_biases(gemm.device)) {
        const cuda::Projection* p = gemm.device.projection;
        next.x_bias               = {p[0].bias, p[0].scale};
        cuda::RopeStore& store    = next.device.rope;
        store.q_bias = p[0].bias, store.k_bias = p[1].bias, store.v_bias = p[2].bias;
    }
    std::visit([&](const auto& what) { execute(what, next); }, program_->operations[first + 1]);
}

void CudaBackend::compile(const Program& program, const Activations& values, std::span<const KvLayer> layers) {
    cuda::use(*gpu_);
    program_ = &program;
    values_  = &values;
    windows_ = windows_of(program);
    check(int(windows_.size()) <= limits_.n_windows, "more sliding windows than announced");
    groups_of_windows_.assign(windows_.size(), -1);
    for (const Operation& operation : program.operations)
        if (const auto* op = std::get_if<quire::Attention>(&operation)) {
            int& group    = groups_of_windows_[std::size_t(std::ranges::find(windows_, op->window) - windows_.begin())];
            const int own = layers[std::size_t(op->layer)].group;
            check(group < 0 || group == own, "a window in two cache groups");
            group = own;
        }
    lowered_ = lower(program, values, layers, windows_, first_tables_, memory_, *gpu_);
    experts_.compile(lowered_);
    for (const LoweredOperation& op : lowered_) operations_.push_back(op.device);
    const int n = int(operations_.size());
    for (int i = 0; i < n; i++) plain_.push_back({FusedKernel::none, i});
    few_rows_ = many_rows_ = plain_;
    for (std::size_t i = 0; i < lowered_.size(); i++) {
        const cuda::Parts& parts = lowered_[i].parts;
        if (parts.n == 0 || sent(lowered_[i]) != nullptr) continue;
        sum_of_parts_ = static_cast<float*>(
            memory_.take(std::size_t(limits_.max_tokens) * std::size_t(lowered_[i].device.cols) * sizeof(float)));
        check(sum_of_parts_ != nullptr, "the GPU has no memory left for the sums of a rank's parts");
    }
    if (options_.deterministic || !options_.fusion) return;
    if (has_layer_kernel_)
        few_rows_ = fuse(lowered_, FusedKernel::layer_kernel, [&](std::span<const cuda::Operation> ops) {
            return cuda::match_layer_kernel(ops.data(), int(ops.size()), *gpu_);
        });
    many_rows_ = fuse(lowered_, FusedKernel::prefill_gemm, [&](std::span<const cuda::Operation> ops) {
        return cuda::match_prefill_gemm(ops.data(), int(std::min<std::size_t>(ops.size(), 2)), *gpu_);
    });
    for (std::vector<FusionGroup>* groups : {&plain_, &few_rows_, &many_rows_})
        pass_biases_on(*groups, program, lowered_);
    // Argmax comes after the megakernel; what only plain kernels know it cannot run.
    if (plans_.size() == 1 &&
        std::ranges::all_of(lowered_.begin(), lowered_.end() - 1, [](const LoweredOperation& op) { return op.known; }))
        megakernel_ = cuda::make_decode_megakernel(operations_.data(), n - 1, *gpu_);
}

void announce_cuda_ranks() { cuda::announce_ranks(); }

Result<void> connect_cuda_ranks(std::span<Backend* const> backends, double seconds) {
    const int                   n = int(backends.size());
    std::vector<CudaBackend*>   ranks;
    std::vector<cuda::Context*> gpus;
    for (Backend* backend : backends) {
        ranks.push_back(static_cast<CudaBackend*>(backend));
        gpus.push_back(ranks.back()->gpu_.get());
    }
    if (n > cuda::max_ranks) return fail("a model runs on up to ", cuda::max_ranks, " GPUs, not on ", n);
    // Larger messages take two shots: with more ranks sooner, as each of them gets everybody's.
    const std::size_t one_shot = (std::size_t(2) << 20) / std::size_t(n * n / 4 > 0 ? n * n / 4 : 1);
    std::array<cuda::Rank*, cuda::max_ranks> made{};
    const char*                              why = nullptr;
    if (!cuda::connect_ranks(gpus.data(), n, one_shot, seconds, made.data(), why))
        return fail_with(ErrorKind::system, "the GPUs cannot work together: ", why);
    std::vector<std::jthread> joining; // all at once: a rank that joins waits for the others
    for (int r = 0; r < n; r++) {
        CudaBackend& rank = *ranks[std::size_t(r)];
        rank.rank_.reset(made[std::size_t(r)]);
        if (!rank.options_.deterministic)
            joining.emplace_back([&rank] {
                cuda::use(*rank.gpu_);
                cuda::join_nccl(*rank.rank_, *rank.gpu_);
            });
    }
    joining.clear();
    std::vector<std::vector<Collective>> of;
    for (const CudaBackend* rank : ranks) of.push_back(rank->collectives());
    for (std::size_t r = 0; r < ranks.size(); r++) {
        if (auto ok = ranks[r]->join(of); !ok) return ok;
        for (std::size_t k = 0; k < of[r].size(); k++) {
            LoweredOperation& op = ranks[r]->lowered_[std::size_t(of[r][k].at)];
            for (std::size_t p = 0; p < ranks.size(); p++) {
                const LoweredOperation& its = ranks[p]->lowered_[std::size_t(of[p][k].at)];
                op.reduce.x.of[p]           = ranks[p]->sent(its);
                op.reduce.out.of[p]         = its.device.out;
            }
        }
    }
    return {};
}

std::vector<Collective> CudaBackend::collectives() const {
    std::vector<Collective> out;
    for (std::size_t i = 0; i < lowered_.size(); i++) {
        const LoweredOperation& op     = lowered_[i];
        const auto*             gather = std::get_if<AllGather>(&program_->operations[i]);
        if (gather) out.push_back({std::int64_t(i), 1, gather->first, op.device.cols, 0});
        else if (std::holds_alternative<AllReduce>(program_->operations[i]))
            out.push_back({std::int64_t(i), 0, 0, op.device.cols, op.parts.n > 1 || op.parts.is_float});
    }
    return out;
}

Result<void> CudaBackend::join(const std::vector<std::vector<Collective>>& of) {
    const std::vector<Collective> mine = collectives();
    for (std::size_t k = 0; k < mine.size(); k++) {
        LoweredOperation& op = lowered_[std::size_t(mine[k].at)];
        op.reduce.exact      = options_.deterministic;
        for (std::size_t p = 0; p < of.size(); p++) {
            if (of[p].size() != mine.size() || of[p][k].gathers != mine[k].gathers)
                return fail("ranks that run different programs");
            if (of[p][k].of_floats) op.reduce.x_is_float = true; // a rank without a part does not know
            op.columns.first[p] = of[p][k].first, op.columns.n[p] = of[p][k].cols;
        }
    }
    return {};
}

int n_cuda_devices() { return cuda::n_devices(); }

Result<void> connect_cuda_processes(std::span<Backend* const> backends, const std::shared_ptr<RankGroup>& group) try {
    const auto                  n_local = backends.size(), n = std::size_t(group->n());
    std::vector<CudaBackend*>   ranks;
    std::vector<cuda::Context*> gpus;
    for (Backend* backend : backends) {
        ranks.push_back(static_cast<CudaBackend*>(backend));
        gpus.push_back(ranks.back()->gpu_.get());
    }
    if (n > cuda::max_ranks) return fail("a model runs on up to ", cuda::max_ranks, " GPUs, not on ", n);
    cuda::NcclId id;
    if (group->first() == 0 && !cuda::make_nccl_id(id))
        return fail_with(
            ErrorKind::system,
            "GPUs of several processes need NCCL (libnccl.so.2): it is not installed, or finds no network");
    // NCCL's id, of which rank 0's counts, then the collectives of these ranks.
    std::vector<Collective> mine;
    for (const CudaBackend* rank : ranks) std::ranges::copy(rank->collectives(), std::back_inserter(mine));
    const std::size_t      each = mine.size() / n_local;
    std::vector<std::byte> message(sizeof id + mine.size() * sizeof mine[0]);
    std::memcpy(message.data(), &id, sizeof id);
    std::memcpy(message.data() + sizeof id, mine.data(), message.size() - sizeof id);
    std::vector<std::vector<std::byte>> said    = group->exchange(message);
    said[std::size_t(group->first()) / n_local] = message;
    for (const std::vector<std::byte>& theirs : said)
        if (theirs.size() != message.size()) return fail("ranks that run different programs");
    std::memcpy(&id, said[0].data(), sizeof id);

    std::array<cuda::Rank*, cuda::max_ranks> made{};
    const char*                              why = nullptr;
    if (!cuda::connect_ranks_by_nccl(gpus.data(), int(n_local), group->first(), int(n), id, 60, made.data(), why))
        return fail_with(ErrorKind::system, "the GPUs of ", n / n_local, " processes cannot work together: ", why);
    std::vector<std::vector<Collective>> of(n, std::vector<Collective>(each));
    for (std::size_t p = 0; p < n && each > 0; p++)
        std::memcpy(of[p].data(), said[p / n_local].data() + sizeof id + p % n_local * each * sizeof mine[0],
                    each * sizeof mine[0]);
    for (std::size_t r = 0; r < n_local; r++) {
        CudaBackend& rank = *ranks[r];
        rank.rank_.reset(made[r]);
        rank.group_ = group;
        if (auto ok = rank.join(of); !ok) return ok;
        const std::size_t me = std::size_t(group->first()) + r;
        for (const Collective& c : of[me]) {
            LoweredOperation& op = rank.lowered_[std::size_t(c.at)];
            op.reduce.x.of[me]   = rank.sent(op);
            op.reduce.out.of[me] = op.device.out;
        }
    }
    return {};
} catch (const std::runtime_error& e) { // a process is gone
    return fail_with(ErrorKind::system, e.what());
}

// Waits until all that was launched has run. A kernel of NCCL waits for ever for a process that is gone: then it is ended.
void CudaBackend::wait_for_device() {
    if (!group_) return cuda::synchronize(*gpu_);
    constexpr double soon = 1e-3, look = 5e-3,
                     grace     = 1; // seconds; a process that has ended may have sent all that it had to
    double                next = look;
    std::optional<double> lost;
    for (const Stopwatch watch; !cuda::is_idle(*gpu_);) {
        const double seconds = watch.seconds();
        if (seconds > soon) std::this_thread::sleep_for(std::chrono::microseconds(20));
        if (seconds < next) continue;
        next              = seconds + look;
        const char* error = cuda::nccl_failure(*rank_);
        if (!lost && (error != nullptr || group_->has_lost_a_process())) lost = seconds;
        if (seconds > group_->seconds())
            group_->fail(group_->first(),
                         cat("no answer of the other processes within ", group_->seconds(), " seconds"));
        else if (!lost || seconds < *lost + grace) continue;
        if (!group_->has_lost_a_process()) group_->fail(group_->first(), cat("NCCL: ", error ? error : "no answer"));
        cuda::leave_nccl(*rank_);
        cuda::synchronize(*gpu_);
        throw std::runtime_error(*group_->failure());
    }
}

std::string CudaBackend::explain() const {
    struct Kind {
        StepKind    kind;
        int         least, most; // rows
        const char* title;
    };
    std::string text;
    for (const Kind& kind :
         {Kind{StepKind::one_token, 1, 1, "one token"},
          Kind{StepKind::few_rows, 2, cuda::max_layer_kernel_rows, "2 to 128 rows"},
          Kind{StepKind::some_rows, cuda::max_layer_kernel_rows + 1, min_prefill_rows - 1, "129 to 1535 rows"},
          Kind{StepKind::many_rows, min_prefill_rows, limits_.max_tokens, "1536 rows and more"}}) {
        std::vector<std::string> labels(lowered_.size());
        for (const FusionGroup& group : groups_of(kind.kind))
            for (int i = group.first; i < group.first + group.n; i++) {
                const LoweredOperation& op = lowered_[std::size_t(i)];
                const bool              gemm =
                    op.device.kind == cuda::Operation::gemm || op.device.kind == cuda::Operation::gated_gemm;
                const bool expert      = op.route.x != nullptr || op.experts.x != nullptr;
                labels[std::size_t(i)] = expert ? experts_.explain(op, kind.least, kind.most)
                                         : group.kernel != FusedKernel::none
                                             ? cat(i == group.first ? "" : "+ ", name_of(group.kernel))
                                         : gemm && op.known ? gemm_.explain(op.device, kind.least, kind.most)
                                                            : std::string("plain");
            }
        if (kind.kind == StepKind::one_token && megakernel_ != nullptr)
            for (std::size_t i = 0; i + 1 < labels.size(); i++)
                labels[i] = cat(i == 0 ? "" : "+ ", name_of(FusedKernel::decode_megakernel));
        std::size_t width = 0;
        for (const std::string& label : labels) width = std::max(width, label.size());
        text += cat(kind.title, ":\n", list(*program_, [&](std::size_t i) {
                        return labels[i] + std::string(width + 2 - labels[i].size(), ' ');
                    }));
    }
    return text;
}

// -- sampling

void CudaBackend::sample(const StepPlan& plan) {
    const SamplingPlan& sampling = plan.sampling;
    const Tensor        logits   = values_->at(program_->logits, shape_);
    check(int(sampling.tasks.size()) <= sampling_limits_.tasks &&
              int(sampling.edits.size()) <= sampling_limits_.edits &&
              int(sampling.uniforms.size()) <= sampling_limits_.uniforms &&
              int(sampling.masks.size()) <= sampling_limits_.mask_words,
          "more to sample than announced");
    const std::size_t at_tasks = sampling.uniforms.size() * sizeof(double),
                      at_edits = sampling_bytes(sampling.tasks.size(), sampling.uniforms.size(), 0);
    std::memcpy(host_sampling_, sampling.uniforms.data(), at_tasks);
    auto* tasks = reinterpret_cast<cuda::SampleTask*>(host_sampling_ + at_tasks);
    n_answers_  = 0;
    for (const SamplingTask& t : sampling.tasks) {
        *tasks++   = {.row               = t.row,
                      .chosen            = t.chosen,
                      .first_edit        = t.first_edit,
                      .n_edits           = t.n_edits,
                      .first_draw        = t.first_uniform,
                      .n_draws           = t.chosen >= 0 ? 1 : t.n_uniforms,
                      .n_top             = t.n_top,
                      .first_out         = 2 * t.first_result,
                      .wants_logprobs    = t.logprobs,
                      .only_edited       = t.only_edited,
                      .first_mask        = t.first_mask < 0 ? -1 : 2 * t.first_mask, // words of 32 bits
                      .top_n_sigma       = t.top_n_sigma,
                      .top_k             = t.top_k,
                      .typical_p         = t.typical_p,
                      .top_p             = t.top_p,
                      .min_p             = t.min_p,
                      .xtc_threshold     = t.xtc_threshold,
                      .temperature       = t.temperature,
                      .dynatemp_range    = t.dynatemp_range,
                      .dynatemp_exponent = t.dynatemp_exponent,
                      .mirostat          = t.mirostat,
                      .mu                = t.mu};
        n_answers_ = std::max(n_answers_, std::size_t(t.first_result + t.n_results()));
    }
    auto* edits = reinterpret_cast<cuda::LogitEdit*>(host_sampling_ + at_edits);
    for (const LogitEdit& e : sampling.edits) *edits++ = {e.token, e.divide, e.subtract, e.add};
    const std::size_t at_masks = at_edits + sampling.edits.size() * sizeof(cuda::LogitEdit);
    cuda::copy_to_device(sampling_, host_sampling_, at_masks, *gpu_);
    if (const std::size_t bytes = sampling.masks.size() * 8; bytes > 0) { // 16 KiB a sequence: while the model runs
        std::memcpy(host_sampling_ + at_masks, sampling.masks.data(), bytes);
        cuda::copy_to_device_beside(sampling_ + at_masks, host_sampling_ + at_masks, bytes, *gpu_);
    }
    cuda::sample(floats(logits), logits.cols, reinterpret_cast<const cuda::SampleTask*>(sampling_ + at_tasks),
                 int(sampling.tasks.size()), reinterpret_cast<cuda::LogitEdit*>(sampling_ + at_edits),
                 reinterpret_cast<const double*>(sampling_),
                 reinterpret_cast<const std::uint32_t*>(sampling_ + at_masks),
                 reinterpret_cast<std::int32_t*>(answers_), *gpu_);
}

StepResults CudaBackend::results() {
    const auto n = std::size_t(shape_.logit_rows);
    if (n_answers_ > 0) cuda::copy_to_host(host_answers_, answers_, n_answers_ * sizeof(TokenLogprob), *gpu_);
    wait_for_device();
    check_device("a step");
    n_pairs_used_ = 0;
    return {{best_, n}, {host_answers_, std::exchange(n_answers_, 0)}, {}, {}};
}

// -- the operations

void CudaBackend::execute(const Embed& embed, const LoweredOperation& op) {
    if (embed.part) {
        cuda::embed_part(op.device.weight, embed.first, op.positions, embed.scale, embed.offset, on_device_(),
                         op.device.residual, op.device.rows, *gpu_);
        return;
    }
    cuda::embed(op.device.weight, op.positions, embed.scale, embed.offset, on_device_(), op.device.residual,
                op.device.rows, *gpu_);
}

void CudaBackend::execute(const Norm& norm, const LoweredOperation& op) {
    const cuda::Operation& o = op.device;
    cuda::norm(o.x, o.x_is_float, op.x_bias, norm_kind(norm.kind), o.norm_weight, op.norm_bias, o.eps, o.residual,
               static_cast<Half*>(o.out), o.rows, o.cols, *gpu_);
}

void CudaBackend::execute(const Activate&, const LoweredOperation& op) {
    const cuda::Operation& o = op.device;
    auto* const            x = static_cast<Half*>(const_cast<void*>(o.x));
    if (op.x_bias.values) cuda::activate_biased(o.activation, x, op.x_bias, o.rows, o.cols, *gpu_);
    else cuda::activate(o.activation, x, nullptr, o.rows * o.cols, *gpu_);
}

void CudaBackend::execute(const SoftCap& cap, const LoweredOperation& op) {
    cuda::soft_cap(static_cast<float*>(const_cast<void*>(op.device.x)), cap.cap, op.device.rows * op.device.cols,
                   *gpu_);
}

void CudaBackend::execute(const RopeAndStore&, const LoweredOperation& op) {
    cuda::rope_and_store(op.device.rope, plans_[std::size_t(op.tables)], op.device.rows, *gpu_);
}

void CudaBackend::execute(const quire::Attention&, const LoweredOperation& op) {
    cuda::Plan plan = plans_[std::size_t(op.tables)];
    const auto list = std::size_t(op.items);
    plan.items      = items_of(list);
    if (options_.deterministic) {
        const cuda::SplitKvItem* const all = plan.items.list;
        for (std::size_t k = 0; k + 1 < launches_[list].size();
             k++) { // in order, so that they share the memory of their splits
            plan.items.list = all + launches_[list][k], plan.items.n = launches_[list][k + 1] - launches_[list][k];
            cuda::attention_decode(op.device.attend, plan, partial_, arrivals_, *gpu_);
        }
    } else {
        cuda::attention_decode(op.device.attend, plan, partial_, arrivals_, *gpu_);
    }
    cuda::attention_prefill(op.device.attend, plan, reinterpret_cast<const cuda::PrefillTile*>(device_ + at_tiles_),
                            work_[0].n_tiles, *gpu_);
}

void CudaBackend::execute(const GateRows& gate, const LoweredOperation& op) {
    const cuda::Operation& o = op.device;
    cuda::gate_rows(static_cast<Half*>(o.out), o.rows, (*program_)[gate.x].cols, static_cast<const Half*>(o.x),
                    (*program_)[gate.gate].cols, o.norm_weight, *gpu_);
}

void CudaBackend::execute(const Add&, const LoweredOperation& op) {
    cuda::add(op.device.residual, static_cast<const Half*>(op.device.x), op.device.rows * op.device.cols, *gpu_);
}

void CudaBackend::execute(const SelectRows&, const LoweredOperation& op) {
    cuda::select_rows(static_cast<const float*>(op.device.x), on_device_().logit_rows, op.device.residual,
                      op.device.rows, op.device.cols, *gpu_);
}

void CudaBackend::execute(const Argmax&, const LoweredOperation& op) {
    cuda::argmax(static_cast<const float*>(op.device.x), best_, op.device.rows, op.device.cols, *gpu_);
}

void CudaBackend::execute(const AllReduce&, const LoweredOperation& lowered) {
    const cuda::Operation& o = lowered.device;
    if (!rank_) { // alone: the parts' sum
        cuda::sum_parts(lowered.parts, o.out, lowered.reduce.out_is_float, o.rows * o.cols, *gpu_);
        return;
    }
    if (sent(lowered) == sum_of_parts_) cuda::sum_parts(lowered.parts, sum_of_parts_, true, o.rows * o.cols, *gpu_);
    cuda::all_reduce(lowered.reduce, o.rows, o.cols, *rank_, *gpu_);
}

void CudaBackend::execute(const AllGather& gather, const LoweredOperation& op) {
    check(rank_ != nullptr, "all_gather: one rank");
    cuda::all_gather(op.device.x, op.columns, op.reduce.out, (*program_)[gather.out].cols, op.device.rows,
                     op.f32 ? 4 : 2, *rank_, *gpu_);
}

void CudaBackend::execute(const TakeColumns& take, const LoweredOperation& op) {
    cuda::take_columns(op.device.x, (*program_)[take.x].cols, take.first, op.device.out, op.device.cols, op.device.rows,
                       op.f32 ? 4 : 2, *gpu_);
}

// The kernels of the copies are not waited for on the host: the upload of the next step's plan stands in the stream between them and the
// step, and no kernel begins early across an upload. So K and V that a plan calls readable are there.
void CudaBackend::copy_blocks(std::span<const BlockCopy> copies, std::span<const KvLayer> from,
                              std::span<const KvLayer> to) {
    if (copies.empty()) return;
    cuda::use(*gpu_);
    const auto pointers = [&](std::span<const KvLayer> layers) { // the bases of a pool's arrays, sent up once
        const void** there = pool_pointers_[layers[0].on_host];
        auto&        sent  = pools_sent_[layers[0].on_host];
        if (!sent) {
            std::vector<const void*> bases;
            for (const KvLayer& layer : layers) {
                bases.push_back(layer.k);
                if (!layer.latent()) bases.push_back(layer.v);
            }
            cuda::upload(static_cast<void*>(there), static_cast<const void*>(bases.data()),
                         bases.size() * sizeof(void*), *gpu_);
            sent = true;
        }
        return there;
    };
    cuda::BlockPools pools;
    pools.from        = pointers(from);
    pools.to          = const_cast<void* const*>(pointers(to));
    pools.n_arrays    = int(from.size()) * (from[0].latent() ? 1 : 2);
    pools.block_bytes = from[0].block_bytes();
    // A launch runs its copies in no order: a list in which a target was a source before is cut there.
    for (std::size_t done = 0; done < copies.size();) {
        if (n_pairs_used_ == n_pairs_) finish_copies();
        std::int32_t* const host = host_pairs_ + 2 * n_pairs_used_;
        std::size_t         n    = 0;
        for (; done + n < copies.size() && n_pairs_used_ + n < n_pairs_; n++) {
            const BlockCopy& next  = copies[done + n];
            const auto       other = [&](const BlockCopy& earlier) {
                return earlier.from == next.to || earlier.to == next.from || earlier.to == next.to;
            };
            if (from.data() == to.data() && std::ranges::any_of(copies.subspan(done, n), other)) break;
            host[2 * n]     = next.from;
            host[2 * n + 1] = next.to;
        }
        std::int32_t* const pairs = pairs_ + 2 * n_pairs_used_;
        cuda::copy_to_device(pairs, host, n * 8, *gpu_);
        cuda::copy_blocks(pools, pairs, int(n), *gpu_);
        n_pairs_used_ += n;
        done += n;
    }
}

void CudaBackend::finish_copies() {
    cuda::use(*gpu_);
    cuda::synchronize(*gpu_);
    check_device("block moves");
    n_pairs_used_ = 0;
}

} // namespace quire
