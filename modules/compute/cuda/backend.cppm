// quire.compute.cuda.backend: the NVIDIA GPU backend, on top of cuda/kernels.h: lowers a program to device addresses, compiles it
// to kernels for each kind of step, runs it. **Owns** the stream, device memory, the weights in device layout, the decode
// megakernel, and the captured CUDA graphs of decode steps.
module;

#include "../../../cuda/guesses.h"
#include "../../../cuda/kernels.h"
#include "../../../cuda/ranks/ranks.h"

export module quire.compute.cuda.backend;

export import quire.compute.backend;
import quire.compute.cuda.adapters;
import quire.compute.cuda.attention_plan;
import quire.compute.cuda.block_copies;
import quire.compute.cuda.carry;
import quire.compute.cuda.experts;
import quire.compute.cuda.fusion;
import quire.compute.cuda.gemm_dispatch;
import quire.compute.cuda.lowering;
import quire.compute.cuda.pinned_memory;
import quire.compute.cuda.rank;
import quire.compute.cuda.sampling;
import quire.compute.cuda.step_upload;
import quire.compute.cuda.weights;
import quire.compute.ranks.rank_group;
import quire.core.base;
import quire.core.recent;
import quire.model_file.quants;

export namespace quire {

struct CudaOptions {
    int    device             = 0;
    double memory_utilization = 0.92;  // of the device's memory, for weights, workspaces and KV together
    bool   deterministic      = false; // the same bits in any batch and with any chunking, at the price of slow prompts
    bool   fusion             = true;  // false: every operation runs in its plain kernel, for comparison
    bool   shares_device      = false; // with other ranks of the model
    // > 0: the GEMMs of steps with so many tokens and more are in e4m3.
    int fp8_rows = 0;
    // Measure at start which of cuBLASLt's GEMMs are fastest; false: the library's first choice, the same in every process.
    bool tune = true;
};

// Error: no such device, and why.
Result<std::unique_ptr<Backend>> make_cuda_backend(const CudaOptions& options);

// Before anything else is asked of a GPU, where several will run a model together.
void announce_cuda_ranks();
// Makes these backends ranks that run a model together: after compile(), before the first step. Each has a GPU of its own, or they
// were made with shares_device. `seconds`: how long a rank waits for the others. Error: the GPUs cannot reach each other's memory.
Result<void> connect_cuda_ranks(std::span<Backend* const> backends, double seconds);
// Makes the GPUs of this process, the local ranks of `group`, and those of the other processes run a model together, by NCCL. Error: NCCL is
// not installed, or the processes do not find each other.
Result<void> connect_cuda_processes(std::span<Backend* const> backends, const std::shared_ptr<RankGroup>& group);
int          n_cuda_devices();
std::size_t  cuda_memory(int device); // bytes; 0: there is no such device that can run a model

} // namespace quire

module :private;

namespace quire {

// Steps that are kept captured, and the device memory of one for each layer, as measured on an H100.
constexpr std::size_t most_graphs = 128, graph_bytes_of_layer = std::size_t(64) << 10;

static cuda::NormKind norm_kind(NormKind kind) {
    return kind == NormKind::rms     ? cuda::NormKind::rms
           : kind == NormKind::layer ? cuda::NormKind::layer
                                     : cuda::NormKind::none;
}

class CudaBackend final : public Backend {
public:
    CudaBackend(const CudaOptions& options, const cuda::DeviceInfo& info, cuda::Context* gpu)
        : options_(options), info_(info), gpu_(gpu), rank_(*gpu, options.deterministic), memory_(*gpu),
          weights_(*gpu, memory_, info.total), gemm_(*gpu, options.deterministic),
          experts_(*gpu, options.deterministic), step_(*gpu, options.deterministic), adapters_(*gpu), carry_(*gpu),
          sampling_(*gpu), copies_(*gpu) {}
    ~CudaBackend() override {
        cuda::use(*gpu_);
        cuda::synchronize(*gpu_);
        graphs_.each(forget_graph);
        cuda::destroy_decode_megakernel(megakernel_);
    }
    CudaBackend(const CudaBackend&)            = delete;
    CudaBackend& operator=(const CudaBackend&) = delete;

    std::string describe() const override {
        return cat(info_.name, ", compute ", info_.major, ".", info_.minor, ", ", info_.total >> 30, " GiB",
                   options_.deterministic ? ", deterministic" : "", options_.fp8_rows > 0 ? ", prompts in fp8" : "",
                   gemm_.library_error() ? cat(", slow for many rows: ", gemm_.library_error()) : std::string());
    }
    std::string numerics() const override { return describe(); }

    Result<Buffer>         allocate(std::size_t bytes) override;
    Result<Buffer>         allocate_host(std::size_t bytes) override;
    std::size_t            memory_available() const override;
    std::size_t            memory_for_cache() const override;
    std::size_t            memory_taken() const override { return memory_.taken() + cuda::bytes_of(*gpu_); }
    double                 read_bandwidth() override;
    DType                  activation_type() const override { return DType::F16; }
    Result<WeightHandle>   prepare(const TensorView& tensor, WeightUse use, int n) override;
    void                   end_weights() override { weights_.end(); }
    bool                   copies_weights() const override { return true; }
    Result<void>           prepare_steps(const StepLimits& limits) override;
    std::span<const float> to_host(const Tensor& tensor) override;

    void           compile(const Program& program, const Activations& values, std::span<const KvLayer> layers,
                           std::span<const StateLayer> states) override;
    std::string    explain() const override;
    void           run(const StepPlan& plan) override;
    SamplingLimits sampling_limits() const override { return sampling_.limits(); }
    void           sample(const StepPlan& plan) override {
        sampling_.run(plan.sampling, values_->at(program_->logits, step_.shape()));
    }
    StepResults results() override;
    void        finish_copies() override;
    void        copy_blocks(std::span<const BlockCopy> copies, std::span<const BlockArray> from,
                            std::span<const BlockArray> to) override;

private:
    using Half = cuda::Half;
    void check_device(std::string_view what) {
        if (const char* error = cuda::last_error(*gpu_)) throw std::runtime_error(cat("CUDA, ", what, ": ", error));
        if (rank_.has_lost_a_rank()) throw std::runtime_error("another rank does not answer");
    }
    friend std::vector<CudaRank*> ranks_of(std::span<Backend* const> backends);

    CudaOptions      options_;
    cuda::DeviceInfo info_;
    struct DestroyContext {
        void operator()(cuda::Context* gpu) const { cuda::destroy_context(gpu); }
    };
    std::unique_ptr<cuda::Context, DestroyContext> gpu_;
    CudaRank                                       rank_;
    DeviceMemory                                   memory_;
    PinnedMemory                                   pinned_;
    DeviceWeights                                  weights_;
    GemmDispatch                                   gemm_;
    ExpertDispatch                                 experts_;
    std::size_t                                    n_stacks_         = 0;
    bool                                           has_layer_kernel_ = false;
    StepUpload                                     step_;
    DeviceAdapters                                 adapters_;
    DeviceCarry                                    carry_;
    DeviceSampling                                 sampling_;
    BlockCopies                                    copies_;

    StepLimits limits_;
    using GraphKey = std::tuple<StepUpload::Key, bool, bool,
                                bool>; // whether adapters are in use; guesses; this backend is alone on the device
    static void forget_graph(void*& graph) {
        if (graph != nullptr) cuda::destroy_graph(graph);
    }
    Recent<GraphKey, void*> graphs_{most_graphs}; // executable; null: the shape came once, and ran without a graph

    // The program: its operations lowered, and their groups for the kinds of step that have fused kernels.
    const Program*                program_ = nullptr;
    const Activations*            values_  = nullptr;
    std::span<const StateLayer>   states_;
    std::vector<LoweredOperation> lowered_;
    std::vector<cuda::Operation>  operations_; // LoweredOperation::device of each, side by side as kernels read them
    std::vector<FusionGroup>      plain_, few_rows_, some_rows_, many_rows_;
    void*                         megakernel_ = nullptr; // one token; null: the GPU or the program has none
    int                           argmax_     = 0;       // the operation; there is one if there is a megakernel
    void                          make_megakernel();
    void                          run_operations(bool guesses);
    void                          run_groups(int first, int end); // of the operations [first, end)
    void                          run_group(const FusionGroup& group);
    // For a fused kernel: the plan of its RopeAndStore. No group has several, because attention stands between them.
    const cuda::Plan& plan_of(const FusionGroup& group) const {
        int tables = 0;
        for (int i = group.first; i < group.first + group.n; i++)
            tables = std::max(tables, lowered_[std::size_t(i)].tables);
        return step_.plan(tables);
    }
    void     run_gemm_and_next(std::size_t first);
    StepKind kind_of_step() const;
    int      least_prefill_rows() const {
        return options_.fp8_rows > 0 ? std::min(options_.fp8_rows, min_prefill_rows) : min_prefill_rows;
    }
    const std::vector<FusionGroup>& groups_of(StepKind kind) const;
    // An operation in its plain kernel.
    void execute(const Embed& embed, const LoweredOperation& op);
    void execute(const Norm& norm, const LoweredOperation& op) { run_norm(norm, op, op.device.rows, {}); }
    void run_norm(const Norm& norm, const LoweredOperation& op, std::int64_t rows, const cuda::Fp8Matrix& fp8,
                  const cuda::NormBeside& beside = {});
    void execute(const Gemm&, const LoweredOperation& op) { gemm_.run(op.device); }
    void execute(const GatedGemm&, const LoweredOperation& op) { gemm_.run(op.device); }
    void execute(const quire::Gate&, const LoweredOperation& op);
    void execute(const Activate&, const LoweredOperation& op);
    void execute(const quire::CausalConv& conv, const LoweredOperation& op) {
        cuda::causal_conv(op.conv, step_.states(states_[std::size_t(conv.layer)]), *gpu_);
    }
    void execute(const quire::Recurrence& recurrence, const LoweredOperation& op) {
        cuda::recurrence(op.recurrence, step_.states(states_[std::size_t(recurrence.layer)]), *gpu_);
    }
    void execute(const SoftCap& cap, const LoweredOperation& op);
    void execute(const HeadGemm&, const LoweredOperation& op) { gemm_.run(op.heads, op.device.rows); }
    void execute(const RopeAndStore&, const LoweredOperation& op);
    void execute(const quire::Attention&, const LoweredOperation& op);
    void execute(const Route&, const LoweredOperation& op) { experts_.route(op, op.device.rows, step_.plan().slots); }
    void execute(const ExpertGatedGemm&, const LoweredOperation& op) { experts_.gated(op, op.device.rows); }
    void execute(const ExpertCombineGemm&, const LoweredOperation& op) { experts_.combine(op, op.device.rows); }
    void execute(const GateRows& gate, const LoweredOperation& op);
    void execute(const Add&, const LoweredOperation& op);
    void execute(const PositionScale& scale, const LoweredOperation& op);
    void execute(const SelectRows&, const LoweredOperation& op);
    void execute(const Argmax& argmax, const LoweredOperation& op);
    void execute(const AllReduce& reduce, const LoweredOperation& op) { rank_.run(reduce, op); }
    void execute(const AllGather& gather, const LoweredOperation& op) { rank_.run(gather, op); }
    void execute(const TakeColumns& take, const LoweredOperation& op);
    void execute(const LoraAdd&, const LoweredOperation& op) { adapters_.run(op, step_.plan().tokens); }
    void execute(const quire::Carry&, const LoweredOperation& op) { carry_.run(op.carry, op.device.rows); }
    void execute(const PutColumns& put, const LoweredOperation& op);
    void execute(const ScatterColumns& scatter, const LoweredOperation& op);

    float*        partial_    = nullptr; // of split-KV attention
    std::int32_t* arrivals_   = nullptr;
    Half *        unpacked_k_ = nullptr, *unpacked_v_ = nullptr; // blocks of codes as fp16, of one layer
    void*         recurrence_chunks_ = nullptr;                  // of recurrences that run in chunks
    std::int32_t* best_              = nullptr; // of each logit row; pinned, so that kernels write into it
    float*        logits_            = nullptr; // pinned
    std::size_t   logits_size_       = 0;
};

Result<std::unique_ptr<Backend>> make_cuda_backend(const CudaOptions& options) {
    cuda::DeviceInfo info;
    const char*      why = cuda::open_device(options.device, info);
    cuda::Context*   gpu = why == nullptr ? cuda::create_context(options.device, why) : nullptr;
    if (gpu == nullptr) return fail_with(ErrorKind::system, "no GPU to run on: ", why);
    auto backend = std::make_unique<CudaBackend>(options, info, gpu);
    if (options.fp8_rows > 0 && !cuda::has_fp8_gemm(*gpu))
        return fail("prompts in fp8 need a GPU of compute capability 9.0, not ", info.major, ".", info.minor);
    return backend;
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
        cuda::add(x, true, y, 1, n, *gpu_);
        cuda::record_event(first, *gpu_);
        for (int i = 0; i < 4; i++) cuda::add(x, true, y, 1, n, *gpu_);
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

Result<WeightHandle> CudaBackend::prepare(const TensorView& tensor, WeightUse use, int) {
    cuda::use(*gpu_);
    if (use == WeightUse::f32 || use == WeightUse::adapter || use == WeightUse::adapter_rows)
        return weights_.prepare_f32(tensor);
    Result<WeightHandle> ready = weights_.prepare(tensor);
    if (use == WeightUse::stack) n_stacks_++; // no GEMM reads the whole stack
    if (ready && use == WeightUse::plain) gemm_.add(weights_.of(*ready));
    return ready;
}

Result<void> CudaBackend::prepare_steps(const StepLimits& l) {
    limits_ = l;
    cuda::use(*gpu_);
    if (l.n_attentions > most_attentions)
        return fail_with(ErrorKind::input, "the GPU runs layers with ", most_attentions,
                         " kinds of attention (window, KV heads, head size), not with ", l.n_attentions);
    if (l.n_heads > 65535) return fail_with(ErrorKind::input, "the GPU's kernels know 65535 heads, not ", l.n_heads);
    // Where ranks share a GPU, one that waits for another may hold the room that a kernel on all SMs needs.
    has_layer_kernel_ =
        !options_.deterministic && options_.fusion && !options_.shares_device && cuda::prepare_layer_kernel(*gpu_) > 0;
    limits_.max_tokens = std::max(l.max_tokens, 8);
    const auto T = std::size_t(limits_.max_tokens), L = std::size_t(l.max_logit_rows);
    bool       ok = step_.prepare(limits_, memory_, pinned_);
    partial_      = static_cast<float*>(
        memory_.take(std::size_t(step_.most_items()) * std::size_t(l.n_heads) * std::size_t(l.value_dim + 2) * 4));
    const std::size_t unpacked =
        std::size_t(step_.unpacked_blocks()) * std::size_t(l.block_size) * std::size_t(l.coded_cols) * 2;
    if (unpacked > 0) {
        unpacked_k_ = static_cast<Half*>(memory_.take(unpacked));
        unpacked_v_ = static_cast<Half*>(memory_.take(unpacked));
        ok          = ok && unpacked_k_ && unpacked_v_;
    }
    // The sums of chunks depend on where a prompt was cut.
    const std::size_t chunks =
        cuda::recurrence_chunks_bytes(l.recurrent_heads, l.recurrent_groups, l.key_dim, limits_.max_tokens);
    if (chunks > 0 && !options_.deterministic) {
        recurrence_chunks_ = memory_.take(chunks);
        ok                 = ok && recurrence_chunks_;
    }
    arrivals_             = static_cast<std::int32_t*>(memory_.take(T * std::size_t(l.n_heads) * 4));
    logits_size_          = std::max(L, std::size_t(rounded_rows(int(L)))) * std::size_t(l.vocab_size);
    logits_               = static_cast<float*>(pinned_.take(logits_size_ * 4));
    best_                 = static_cast<std::int32_t*>(pinned_.take((std::max(L, T) + 64) * 4));
    ok                    = sampling_.prepare(int(std::max(L, T)), l.vocab_size, memory_, pinned_) && ok;
    ok                    = copies_.prepare(l.n_layers, memory_, pinned_) && ok;
    void* const workspace = gemm_.workspace_bytes() > 0 ? memory_.take(gemm_.workspace_bytes()) : nullptr;
    gemm_.set_workspace(workspace);
    if (!ok || !partial_ || !arrivals_ || !logits_ || !best_ || (gemm_.workspace_bytes() > 0 && !workspace))
        return fail_with(ErrorKind::system, "the GPU has no memory left for the workspaces of a step");
    if (auto ok = experts_.prepare(limits_, memory_); !ok) return ok;
    // Between ranks attn_output stands alone, and its GEMM is the library's.
    if (options_.tune)
        gemm_.tune(limits_.max_tokens, limits_.max_logit_rows, limits_.rank_vocab, has_layer_kernel_ && l.n_ranks == 1);
    if (options_.fp8_rows > 0 && !gemm_.make_fp8(limits_.max_tokens, limits_.rank_vocab, memory_))
        return fail_with(ErrorKind::system, "the GPU has no memory left for the weights in fp8");
    if (const char* error = cuda::last_error(*gpu_)) return fail_with(ErrorKind::system, "CUDA: ", error);
    return {};
}

std::span<const float> CudaBackend::to_host(const Tensor& t) {
    const auto n = std::size_t(t.rows * t.cols);
    check(t.type == DType::F32 && n <= logits_size_, "to_host: not the logits");
    cuda::copy_to_host(logits_, t.data, n * 4, *gpu_);
    rank_.wait_for_device();
    check_device("a step");
    return {logits_, n};
}

// -- the step

// The launches of a step. They end also where the step fails: other contexts of the device wait for that.
struct Launches {
    explicit Launches(cuda::Context& on) : gpu(on), alone(cuda::begin_launches(on)) {}
    ~Launches() { cuda::end_launches(gpu); }
    Launches(const Launches&)            = delete;
    Launches& operator=(const Launches&) = delete;

    cuda::Context& gpu;
    const bool     alone; // on the device
};

void CudaBackend::run(const StepPlan& plan) {
    cuda::use(*gpu_);
    const Launches launches(*gpu_);
    // NCCL across processes is not captured. Making a graph waits for the device, and so for the ranks that share the device.
    const bool decoding = step_.send(plan) && !rank_.spans_processes() && !options_.shares_device;
    adapters_.send(plan, step_.shape());
    carry_.send(plan, step_.shape().tokens);
    const GraphKey key{step_.key(), adapters_.in_use(), plan.guesses, launches.alone};
    if (!decoding) {
        run_operations(plan.guesses);
    } else if (step_.shape().tokens == 1 && !plan.guesses && megakernel_ != nullptr &&
               cuda::run_decode_megakernel(megakernel_, step_.plan(), partial_, arrivals_, *gpu_)) {
        run_groups(int(program_->keys), int(program_->head));
        run_groups(argmax_, int(program_->guesses));
    } else if (void** const graph = graphs_.find(key); graph == nullptr) {
        graphs_.add(key, nullptr, forget_graph); // kernels are loaded the first time; the second is captured
        run_operations(plan.guesses);
    } else {
        if (*graph == nullptr) {
            cuda::begin_capture(*gpu_);
            run_operations(plan.guesses);
            *graph = cuda::end_capture(*gpu_);
            if (*graph == nullptr) check_device("a step that is captured");
        }
        cuda::launch_graph(*graph, *gpu_);
    }
}

StepKind CudaBackend::kind_of_step() const {
    const int rows = step_.shape().tokens;
    if (rows == 1) return StepKind::one_token;
    if (rows >= least_prefill_rows()) return StepKind::many_rows;
    if (rows <= cuda::max_layer_kernel_rows) return StepKind::few_rows;
    if (rows <= cuda::max_quantised_layer_rows) return StepKind::some_rows;
    return StepKind::more_rows;
}

const std::vector<FusionGroup>& CudaBackend::groups_of(StepKind kind) const {
    switch (kind) {
        case StepKind::few_rows: return few_rows_;
        case StepKind::some_rows: return some_rows_;
        case StepKind::many_rows: return many_rows_;
        default: return plain_;
    }
}

void CudaBackend::run_operations(bool guesses) {
    const int first = guesses ? int(program_->guesses) : 0, end = guesses ? int(lowered_.size())
                                                                  : step_.shape().logit_rows > 0
                                                                      ? int(program_->guesses)
                                                                      : int(program_->head);
    run_groups(first, end);
}

void CudaBackend::run_groups(int first, int end) {
    for (const FusionGroup& group : groups_of(kind_of_step()))
        if (group.first >= first && group.first < end) run_group(group);
}

void CudaBackend::run_group(const FusionGroup& group) {
    const auto first = std::size_t(group.first), n = std::size_t(group.n);
    for (std::size_t i = first; i < first + n; i++) {
        const LoweredOperation& op = lowered_[i];
        operations_[i].rows        = op.device.rows * (op.logit_rows ? step_.shape().logit_rows : step_.shape().tokens);
    }
    const std::span ops = std::span(operations_).subspan(first, n);
    if (group.kernel == FusedKernel::layer_kernel) {
        const int ran = cuda::run_layer_kernel(ops.data(), group.n, step_.shape().tokens, plan_of(group), *gpu_);
        check(ran == 0 || ran == group.n, "a layer kernel that ran other operations than it matched");
        if (ran > 0) return;
    }
    if (group.kernel == FusedKernel::prefill_gemm && gemm_.run_prefill(ops, plan_of(group))) return;
    if (group.kernel == FusedKernel::norm_in_fp8) {
        run_norm(std::get<Norm>(program_->operations[first]), lowered_[first], ops[0].rows, gemm_.fp8_x());
        return gemm_.run_fp8(ops.subspan(1), plan_of(group));
    }
    if (group.kernel == FusedKernel::bias_in_next) return run_gemm_and_next(first);
    if (group.kernel == FusedKernel::joined_gemvs && ops[0].rows == 1) return gemm_.run_joined(ops[0], ops[1]);
    if (group.kernel == FusedKernel::norm_beside) {
        const NormCall   call = norm_call(group, *program_, lowered_);
        LoweredOperation op   = lowered_[call.norm];
        op.device.x = call.x, op.device.x_is_float = call.x_is_float, op.device.out = call.out;
        return run_norm(std::get<Norm>(program_->operations[call.norm]), op, operations_[call.norm].rows, {},
                        call.beside);
    }
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

void CudaBackend::compile(const Program& program, const Activations& values, std::span<const KvLayer> layers,
                          std::span<const StateLayer> states) {
    cuda::use(*gpu_);
    states_  = states;
    program_ = &program;
    values_  = &values;
    step_.compile(program, layers);
    lowered_ = lower(program, values, layers, step_.attentions(), step_.tables(), weights_, memory_, *gpu_);
    check(adapters_.compile(program, limits_, weights_, values, lowered_, memory_, pinned_),
          "no memory for the adapters of a step");
    check(carry_.compile(program, limits_, memory_, pinned_), "no memory for the states that a step keeps");
    experts_.compile(lowered_);
    for (LoweredOperation& op : lowered_) op.recurrence.chunks = recurrence_chunks_;
    for (const LoweredOperation& op : lowered_) operations_.push_back(op.device);
    const int n = int(operations_.size());
    for (int i = 0; i < n; i++) plain_.push_back({FusedKernel::none, i});
    few_rows_ = some_rows_ = many_rows_ = plain_;
    rank_.compile(program, lowered_, limits_.max_tokens, memory_);
    if (options_.deterministic || !options_.fusion) return;
    const auto by_layer_kernel = [&](int n_tokens) {
        return fuse(lowered_, FusedKernel::layer_kernel, [&](std::span<const cuda::Operation> ops) {
            return cuda::match_layer_kernel(ops.data(), int(ops.size()), n_tokens, *gpu_);
        });
    };
    if (has_layer_kernel_) {
        few_rows_  = by_layer_kernel(cuda::max_layer_kernel_rows);
        some_rows_ = by_layer_kernel(cuda::max_quantised_layer_rows);
    }
    many_rows_ = fuse(lowered_, FusedKernel::prefill_gemm, [&](std::span<const cuda::Operation> ops) {
        return cuda::match_prefill_gemm(ops.data(), int(std::min<std::size_t>(ops.size(), 2)), *gpu_);
    });
    if (options_.fp8_rows > 0) join_norms(many_rows_, program, lowered_, GemmDispatch::in_fp8);
    for (std::vector<FusionGroup>* groups : {&plain_, &few_rows_, &some_rows_, &many_rows_}) {
        pass_biases_on(*groups, program, lowered_);
        join_beside_norms(*groups, program);
    }
    join_gemvs(plain_, program, lowered_);
    make_megakernel();
}

// The megakernel runs no operation that only plain kernels know: Argmax and the operations behind it come after it, and the keys of a layer that
// guesses.
void CudaBackend::make_megakernel() {
    const auto  is_argmax = [](const Operation& op) { return std::holds_alternative<Argmax>(op); };
    const auto& all       = program_->operations;
    argmax_               = int(std::ranges::find_if(all, is_argmax) - all.begin());
    std::vector<cuda::Operation> operations;
    for (int i = 0; i < argmax_; i++) {
        if (i >= int(program_->keys) && i < int(program_->head)) continue;
        if (!lowered_[std::size_t(i)].known) return;
        operations.push_back(operations_[std::size_t(i)]);
    }
    if (step_.n_tables() > 1 || argmax_ == int(all.size())) return;
    megakernel_ = cuda::make_decode_megakernel(operations.data(), int(operations.size()), *gpu_);
    if (megakernel_ != nullptr) step_.use_megakernel();
}

void announce_cuda_ranks() { cuda::announce_ranks(); }

int n_cuda_devices() { return cuda::n_devices(); }

std::size_t cuda_memory(int device) {
    cuda::DeviceInfo info{};
    return cuda::open_device(device, info) == nullptr ? info.total : 0;
}

std::vector<CudaRank*> ranks_of(std::span<Backend* const> backends) {
    std::vector<CudaRank*> ranks;
    for (Backend* backend : backends) ranks.push_back(&static_cast<CudaBackend*>(backend)->rank_);
    return ranks;
}

Result<void> connect_cuda_ranks(std::span<Backend* const> backends, double seconds) {
    return CudaRank::connect(ranks_of(backends), seconds);
}

Result<void> connect_cuda_processes(std::span<Backend* const> backends, const std::shared_ptr<RankGroup>& group) {
    return CudaRank::connect(ranks_of(backends), group);
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
          Kind{StepKind::some_rows, cuda::max_layer_kernel_rows + 1, cuda::max_quantised_layer_rows, "129 to 768 rows"},
          Kind{StepKind::more_rows, cuda::max_quantised_layer_rows + 1, min_prefill_rows - 1, "769 to 1535 rows"},
          Kind{StepKind::many_rows, min_prefill_rows, limits_.max_tokens, "1536 rows and more"}}) {
        std::vector<std::string> labels(lowered_.size());
        for (const FusionGroup& group : groups_of(kind.kind))
            for (int i = group.first; i < group.first + group.n; i++) {
                const LoweredOperation& op = lowered_[std::size_t(i)];
                const bool              gemm =
                    op.device.kind == cuda::Operation::gemm || op.device.kind == cuda::Operation::gated_gemm;
                const bool expert = op.route.x != nullptr || op.experts.x != nullptr;
                labels[std::size_t(i)] =
                    expert ? experts_.explain(op, kind.least, kind.most)
                    : group.kernel != FusedKernel::none && (group.kernel != FusedKernel::joined_gemvs || kind.most == 1)
                        ? cat(i == group.first ? "" : "+ ", name_of(group.kernel))
                    : gemm && op.known ? gemm_.explain(op.device, kind.least, kind.most)
                                       : std::string("plain");
            }
        if (kind.kind == StepKind::one_token && megakernel_ != nullptr)
            for (std::size_t i = 0; i < std::size_t(argmax_); i++)
                if (i < program_->keys || i >= program_->head)
                    labels[i] = cat(i == 0 ? "" : "+ ", name_of(FusedKernel::decode_megakernel));
        std::size_t width = 0;
        for (const std::string& label : labels) width = std::max(width, label.size());
        text += cat(kind.title, ":\n", list(*program_, [&](std::size_t i) {
                        return labels[i] + std::string(width + 2 - labels[i].size(), ' ');
                    }));
    }
    return text;
}

StepResults CudaBackend::results() {
    sampling_.fetch_answers();
    rank_.wait_for_device();
    check_device("a step");
    copies_.forget();
    return {{best_, std::size_t(step_.shape().logit_rows)}, sampling_.take_answers(), {}, {}};
}

// -- the operations

void CudaBackend::execute(const Embed& embed, const LoweredOperation& op) {
    if (embed.part) {
        cuda::embed_part(op.device.weight, embed.first, op.positions, embed.scale, embed.offset, step_.plan(),
                         op.device.residual, op.device.rows, *gpu_);
        return;
    }
    cuda::embed(op.device.weight, op.positions, embed.scale, embed.offset, step_.plan(), op.device.residual,
                op.device.rows, *gpu_);
}

// fp8: where the result goes in e4m3, or null.
void CudaBackend::run_norm(const Norm& norm, const LoweredOperation& op, std::int64_t rows, const cuda::Fp8Matrix& fp8,
                           const cuda::NormBeside& beside) {
    const cuda::Operation& o = op.device;
    cuda::norm(o.x, o.x_is_float, op.x_bias, norm_kind(norm.kind), o.norm_weight, op.norm_bias, o.eps, o.residual,
               static_cast<Half*>(o.out), rows, o.cols, *gpu_, op.norm_weights, fp8, beside);
}

void CudaBackend::execute(const quire::Gate&, const LoweredOperation& op) {
    const cuda::Operation& o = op.device;
    cuda::gate(o.activation, static_cast<Half*>(o.out), o.x, o.x_is_float, o.rows * o.cols, *gpu_);
}

void CudaBackend::execute(const Activate& activate, const LoweredOperation& op) {
    const cuda::Operation& o = op.device;
    auto* const            x = static_cast<Half*>(const_cast<void*>(o.x));
    if (op.times)
        cuda::activate_times(o.activation, x, o.rows, o.cols, op.times, (*program_)[activate.times].cols, *gpu_);
    else if (op.x_bias.values) cuda::activate_biased(o.activation, x, op.x_bias, o.rows, o.cols, *gpu_);
    else cuda::activate(o.activation, x, nullptr, o.rows * o.cols, *gpu_);
}

void CudaBackend::execute(const SoftCap& cap, const LoweredOperation& op) {
    cuda::soft_cap(static_cast<float*>(const_cast<void*>(op.device.x)), cap.cap, op.device.rows * op.device.cols,
                   *gpu_);
}

void CudaBackend::execute(const RopeAndStore&, const LoweredOperation& op) {
    cuda::rope_and_store(op.device.rope, step_.plan(op.tables), op.device.rows, *gpu_);
}

void CudaBackend::execute(const quire::Attention&, const LoweredOperation& op) {
    cuda::Plan plan = step_.plan(op.tables);
    step_.each_launch(op.items, [&](const cuda::SplitKvItems& items) {
        plan.items = items;
        cuda::attention_decode(op.device.attend, plan, partial_, arrivals_, *gpu_);
    });
    step_.each_prefill(op.items, [&](const cuda::PrefillTile* tiles, int n, const cuda::UnpackedBlocks* unpacks,
                                     const PrefillLaunch& launch) {
        cuda::Attention fp16 = op.device.attend;
        if (!fp16.coded || fp16.latent()) return cuda::attention_prefill(fp16, plan, tiles, n, *gpu_);
        cuda::unpack_codes(fp16, plan, unpacks, launch.n_unpacks, launch.most_entries, unpacked_k_, unpacked_v_, *gpu_);
        fp16.coded   = false;
        fp16.cache_k = unpacked_k_, fp16.cache_v = unpacked_v_, fp16.block_rows = fp16.n_kv_heads * fp16.block_size,
        fp16.v_tables = 0;
        cuda::attention_prefill(fp16, step_.unpacked_plan(op.tables, op.items), tiles, n, *gpu_);
    });
}

void CudaBackend::execute(const GateRows& gate, const LoweredOperation& op) {
    const cuda::Operation& o = op.device;
    cuda::gate_rows(static_cast<Half*>(o.out), o.rows, (*program_)[gate.x].cols, static_cast<const Half*>(o.x),
                    (*program_)[gate.gate].cols, o.norm_weight, *gpu_);
}

void CudaBackend::execute(const PositionScale& scale, const LoweredOperation& op) {
    const Temperature& by = scale.temperature;
    cuda::scale_by_position(static_cast<Half*>(const_cast<void*>(op.device.x)), op.device.rows, op.device.cols,
                            by.scale, by.period, by.offset, step_.plan(), *gpu_);
}

void CudaBackend::execute(const Add& add, const LoweredOperation& op) {
    cuda::add(op.device.residual, op.f32, static_cast<const Half*>(op.device.x), add.scale,
              op.device.rows * op.device.cols, *gpu_);
}

void CudaBackend::execute(const SelectRows&, const LoweredOperation& op) {
    cuda::select_rows(static_cast<const float*>(op.device.x), step_.plan().logit_rows, op.device.residual,
                      op.device.rows, op.device.cols, *gpu_);
}

void CudaBackend::execute(const Argmax&, const LoweredOperation& op) {
    cuda::argmax(static_cast<const float*>(op.device.x), best_, op.device.rows, op.device.cols, *gpu_);
}

void CudaBackend::execute(const TakeColumns& take, const LoweredOperation& op) {
    cuda::take_columns(op.device.x, (*program_)[take.x].cols / take.groups, take.first, op.device.out,
                       op.device.cols / take.groups, op.device.rows * take.groups, op.f32 ? 4 : 2, *gpu_);
}

void CudaBackend::execute(const PutColumns& put, const LoweredOperation& op) {
    const cuda::Operation& o = op.device;
    cuda::put_columns(o.x, o.x_is_float, o.rows, o.cols, o.out, op.f32, (*program_)[put.out].cols, *gpu_);
}

void CudaBackend::execute(const ScatterColumns& scatter, const LoweredOperation& op) {
    const cuda::Operation& o = op.device;
    cuda::gather_columns(static_cast<const float*>(o.x), o.rows, o.cols, op.columns_of, o.residual,
                         (*program_)[scatter.out].cols, *gpu_);
}

void CudaBackend::copy_blocks(std::span<const BlockCopy> copies, std::span<const BlockArray> from,
                              std::span<const BlockArray> to) {
    if (copies.empty()) return;
    cuda::use(*gpu_);
    for (std::size_t done = copies_.run(copies, from, to); done < copies.size();
         done += copies_.run(copies.subspan(done), from, to))
        finish_copies(); // the list was full
}

void CudaBackend::finish_copies() {
    cuda::use(*gpu_);
    cuda::synchronize(*gpu_);
    check_device("block moves");
    copies_.forget();
}

} // namespace quire
