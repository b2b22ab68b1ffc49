// quire.compute.cpu.backend: the CPU backend: runs a program operation by operation. **Owns** the parts of the backend (threads, weights,
// GEMMs, attention). Threads divide rows, heads and tokens, never a sum: the result does not depend on the number of threads.
module;

#include <unistd.h>

export module quire.compute.cpu.backend;

import quire.compute.cpu.adapters;
import quire.compute.cpu.attention;
import quire.compute.cpu.gemms;
import quire.compute.cpu.kernels;
import quire.compute.cpu.recurrence;
import quire.compute.cpu.stacked_gemms;
import quire.compute.cpu.tuning;
import quire.compute.cpu.weights;
import quire.compute.ranks.rank_group;
import quire.core.base;
import quire.core.thread_pool;
import quire.model_file.quants;

export namespace quire {

// threads 0: the physical cores. isa "": the widest there is; a name that cpu_kernels() knows: that one, or an error.
// tune: prepare_steps() measures how weights are best prefetched (quire.compute.cpu.tuning). ranks: the ranks that run the model together
// with this one, which is number `rank`; null: this backend runs alone.
Result<std::unique_ptr<Backend>> make_cpu_backend(int threads, std::string_view isa = "", bool tune = false,
                                                  std::shared_ptr<RankGroup> ranks = {}, int rank = 0);

} // namespace quire

module :private;

namespace quire {

class CpuBackend final : public Backend {
public:
    CpuBackend(int threads, const CpuKernels& kernels, bool tune, std::shared_ptr<RankGroup> ranks, int rank)
        : kernels_(kernels), ranks_(std::move(ranks)), rank_(rank), tune_(tune), workers_(threads) {}

    std::string describe() const override {
        return cat(numerics(), ", ", workers_.n(), workers_.n() == 1 ? " thread" : " threads");
    }
    std::string numerics() const override { return cat("cpu, ", kernels_.name); }
    std::string tuning() const override {
        return tune_ ? prefetch_.describe() : "prefetch: into the L2 (not measured)";
    }

    Result<Buffer> allocate(std::size_t bytes) override {
        Result<Buffer> buffer = fresh_memory(bytes);
        if (buffer) taken_ += buffer->bytes();
        return buffer;
    }
    Result<Buffer> allocate_host(std::size_t bytes) override { return fresh_memory(bytes); } // not the device's
    std::size_t    memory_available() const override { return available_memory(); }
    // A quarter of the machine's memory, or a third of what is free: the host pool takes as much.
    std::size_t memory_for_cache() const override {
        const auto machine = std::size_t(sysconf(_SC_PHYS_PAGES)) * std::size_t(sysconf(_SC_PAGE_SIZE));
        return std::min(machine / 4, available_memory() / 3);
    }
    std::size_t  memory_taken() const override { return taken_ + weights_.bytes(); }
    double       read_bandwidth() override;
    double       weight_bandwidth() override { return sum_rate(workers_.pool(), weights_.of_gemms()); }
    DType        activation_type() const override { return DType::F32; }
    Result<void> prepare_steps(const StepLimits&) override {
        weights_.settle();
        if (tune_) prefetch_.choose(kernels_, workers_.pool(), weights_.of_gemms());
        return {};
    }
    Result<WeightHandle> prepare(const TensorView& tensor, WeightUse use, int n) override {
        return weights_.prepare(tensor, use, n);
    }
    std::span<const float> to_host(const Tensor& t) override { return {floats(t), std::size_t(t.rows * t.cols)}; }

    void        compile(const Program& program, const Activations& values, std::span<const KvLayer> layers,
                        std::span<const StateLayer> states) override;
    std::string explain() const override;
    void        run(const StepPlan& plan) override;
    void        copy_blocks(std::span<const BlockCopy> copies, std::span<const BlockArray> from,
                            std::span<const BlockArray> to) override;

private:
    // The operations (quire.compute.program), with their values in this step.
    Tensor at(ValueId id) const { return values_->at(id, shape_); }
    void   execute(const Embed& op);
    void   execute(const Norm& op);
    void   execute(const Gemm& op);
    void   execute(const GatedGemm& op);
    Tensor given(ValueId id) const { return id == none ? Tensor() : at(id); }
    void   execute(const Gate& op) { gemms_.activate(op.activation, at(op.gate), floats(at(op.x))); }
    void   execute(const CausalConv& op) {
        recurrence_.run(op, weights_.vector(op.weight), weights_.vector(op.bias), at(op.x), given(op.factor),
                          given(op.gate), at(op.out), states_[std::size_t(op.layer)]);
    }
    void execute(const Recurrence& op) {
        recurrence_.run(op, {weights_.vector(op.step_bias), weights_.vector(op.decay), weights_.vector(op.skip)},
                        at(op.x), at(op.step), given(op.write), at(op.out), states_[std::size_t(op.layer)]);
    }
    void execute(const Activate& op);
    void execute(const HeadGemm& op) { stacks_.heads(op, at(op.x), at(op.out)); }
    void execute(const RopeAndStore& op);
    void execute(const PositionScale& op);
    void execute(const Attention& op);
    void rotate(const Tensor& x, std::int64_t columns, int size);
    void execute(const Route& op) { stacks_.route(op, at(op.x), at(op.out)); }
    void execute(const ExpertGatedGemm& op) {
        stacks_.gated(op, at(op.x), at(op.routes), at(op.gate.out), at(op.up.out));
    }
    void execute(const ExpertCombineGemm& op) { stacks_.combine(op, at(op.x), at(op.routes), at(op.down.out)); }
    void execute(const GateRows& op);
    void execute(const SoftCap& op);
    void execute(const Add& op);
    void execute(const SelectRows& op);
    void execute(const Argmax&) {} // the host reads the logits
    void execute(const AllReduce& op);
    void execute(const AllGather& op);
    void execute(const TakeColumns& op);
    void execute(const LoraAdd& op) { adapters_.run(op, given(op.x), at(op.out), (*program_)[op.out].logit_rows); }
    void execute(const Carry& op);
    void execute(const PutColumns& op);
    void execute(const ScatterColumns& op);
    template <class Source>
    void sum_tree(const Source& source, int n_sources, float* to, std::int64_t n);

    const CpuKernels&           kernels_;
    std::shared_ptr<RankGroup>  ranks_; // null: alone
    int                         rank_  = 0;
    bool                        tune_  = false;
    std::size_t                 taken_ = 0;
    Workers                     workers_;
    CpuWeights                  weights_{kernels_, workers_};
    Prefetching                 prefetch_;
    Gemms                       gemms_{kernels_, workers_, weights_, prefetch_};
    StackedGemms                stacks_{workers_, weights_, gemms_};
    CpuAdapters                 adapters_{workers_, weights_, gemms_};
    CpuAttention                attention_{kernels_, workers_};
    CpuRecurrence               recurrence_{kernels_, workers_};
    const Program*              program_ = nullptr;
    const Activations*          values_  = nullptr;
    std::span<const KvLayer>    layers_;
    std::span<const StateLayer> states_;
    const StepPlan*             plan_ = nullptr;
    StepShape                   shape_;
    // RoPE's [T × rope_dim/2 × (cos, sin)] for this step's positions, by the frequencies and scale that made them.
    std::vector<float> angles_;
    const float*       angles_of_    = nullptr;
    float              angles_scale_ = 0;
};

Result<std::unique_ptr<Backend>> make_cpu_backend(int threads, std::string_view isa, bool tune,
                                                  std::shared_ptr<RankGroup> ranks, int rank) {
    const CpuKernels* kernels = cpu_kernels(isa);
    if (!kernels)
        return fail("instruction set ", quote(isa),
                    " is not one of plain, avx2, avxvnni, avx512, or this machine lacks it");
    return std::make_unique<CpuBackend>(threads > 0 ? threads : physical_cores(), *kernels, tune, std::move(ranks),
                                        rank);
}

// All threads sum the same memory, larger than the caches, twice: the first time brings its pages.
double CpuBackend::read_bandwidth() {
    constexpr std::int64_t n      = std::int64_t(96) << 18; // floats
    Result<Buffer>         buffer = fresh_memory(std::size_t(n) * sizeof(float));
    if (!buffer) return 0;
    auto* const memory = static_cast<float*>(buffer->data());
    std::fill_n(memory, n, 1.0f);
    std::vector<float> sums(std::size_t(workers_.n()) * 16);
    double             seconds = 0;
    for (int round = 0; round < 3; round++) {
        const auto start = std::chrono::steady_clock::now();
        workers_.run(workers_.n() * 4, [&](int item, int thread) {
            const std::int64_t    first = n * item / (workers_.n() * 4), last = n * (item + 1) / (workers_.n() * 4);
            std::array<float, 64> sum{};
            for (std::int64_t i = first; i + 64 <= last; i += 64)
                for (std::size_t j = 0; j < 64; j++) sum[j] += memory[std::size_t(i) + j];
            sums[std::size_t(thread) * 16] += sum[0] + sum[63];
        });
        const double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        if (round > 0) seconds = round == 1 ? took : std::min(seconds, took);
    }
    return sums[0] > 0 ? double(n) * sizeof(float) / seconds : 0;
}

void CpuBackend::compile(const Program& program, const Activations& values, std::span<const KvLayer> layers,
                         std::span<const StateLayer> states) {
    states_  = states;
    program_ = &program;
    values_  = &values;
    layers_  = layers;
}

std::string CpuBackend::explain() const {
    return "every step, operation by operation:\n" + list(*program_, [](std::size_t) { return std::string(); });
}

void CpuBackend::run(const StepPlan& plan) {
    plan_      = &plan;
    shape_     = {plan.n_tokens(), int(plan.logit_rows.size())};
    angles_of_ = nullptr;
    attention_.begin_step(plan);
    recurrence_.begin_step(plan);
    adapters_.begin_step(plan);
    const auto      all  = std::span(program_->operations);
    const auto      step = all.first(program_->guesses);
    const StepShape most = values_->most();
    check(shape_.tokens <= most.tokens && shape_.logit_rows <= most.logit_rows,
          "a step larger than the memory taken for it");
    for (const Operation& operation : plan.guesses            ? all.subspan(program_->guesses)
                                      : shape_.logit_rows > 0 ? step
                                                              : step.first(program_->head))
        std::visit([this](const auto& op) { execute(op); }, operation);
}

void CpuBackend::execute(const Embed& op) {
    const TensorView& table = weights_.rows(op.table);
    const Tensor      out   = at(op.out);
    const auto        row   = [](const TensorView& matrix, std::int64_t i) {
        check(i >= 0 && i < matrix.rows, "a token outside the vocabulary, or a position outside the context");
        return static_cast<const std::byte*>(matrix.data) + std::size_t(i) * row_bytes(matrix.type, matrix.cols);
    };
    float* const added = workers_.scratch(0, std::size_t(out.cols));
    std::int64_t type  = 0; // of the tokens that come
    for (std::int64_t t = 0; t < out.rows; t++) {
        float*             to    = floats(out) + t * out.cols;
        const std::int64_t token = plan_->tokens[std::size_t(t)] - op.first;
        if (op.part && (token < 0 || token >= table.rows)) {
            std::fill_n(to, out.cols, 0.0f);
            continue;
        }
        dequantize(table.type, row(table, token), to, table.cols);
        for (std::int64_t i = 0; op.scale != 1 && i < table.cols; i++) to[i] *= op.scale;
        if (op.types) {
            if (plan_->positions[std::size_t(t)] == 0) type = 0;
            dequantize(op.types.type, row(weights_.rows(op.types), type), added, op.types.cols);
            kernels_.add(to, added, out.cols);
            if (plan_->tokens[std::size_t(t)] == op.separator) type = std::min<std::int64_t>(op.types.rows - 1, 1);
        }
        if (!op.positions) continue;
        dequantize(op.positions.type, row(weights_.rows(op.positions), plan_->positions[std::size_t(t)] + op.offset),
                   added, op.positions.cols);
        kernels_.add(to, added, out.cols);
    }
    if (out.rows > few_rows) weights_.give_back_lookup(op.table);
}

// Rare enough to be plain: sums in double, so that their order does not show.
static void layer_norm(const float* x, float* residual, const float* weight, const float* bias, float eps, float* out,
                       std::int64_t n) {
    if (residual) {
        for (std::int64_t i = 0; i < n; i++) residual[i] += x[i];
        x = residual;
    }
    double mean = 0, variance = 0;
    for (std::int64_t i = 0; i < n; i++) mean += double(x[i]);
    mean /= double(n);
    for (std::int64_t i = 0; i < n; i++) variance += (double(x[i]) - mean) * (double(x[i]) - mean);
    const double scale = 1 / std::sqrt(variance / double(n) + double(eps));
    for (std::int64_t i = 0; i < n; i++)
        out[i] = float((double(x[i]) - mean) * scale) * weight[i] + (bias ? bias[i] : 0.0f);
}

void CpuBackend::execute(const Norm& op) {
    Tensor x = at(op.x), out = at(op.out);
    float* residual = op.residual != none ? floats(at(op.residual)) : nullptr;
    if (op.kind == NormKind::none) {
        workers_.split(x.rows * x.cols, 65536, [&](std::int64_t first, std::int64_t last) {
            if (residual) kernels_.add(residual + first, floats(x) + first, last - first);
            std::memcpy(floats(out) + first, (residual ? residual : floats(x)) + first,
                        std::size_t(last - first) * sizeof(float));
        });
        return;
    }
    check((!op.weight ||
           (op.weight.cols % op.group == 0 && op.weight.type == DType::F32 && x.cols % op.weight.cols == 0)) &&
              x.cols % op.group == 0 && (op.weight || op.kind == NormKind::rms),
          "norm: shapes");
    x                          = {x.data, x.rows * (x.cols / op.group), op.group, x.type}; // a row may be one head
    const std::int64_t weights = op.weight ? op.weight.cols / op.group : 1;                // of as many rows
    const auto*        all     = weights_.vector(op.weight);
    workers_.split(x.rows, std::max<std::int64_t>(1, 8192 / x.cols), [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t r = first; r < last; r++) {
            float*       sum = residual ? residual + r * x.cols : nullptr;
            const float* w   = all ? all + r % weights * x.cols : nullptr;
            if (op.kind == NormKind::layer)
                layer_norm(floats(x) + r * x.cols, sum, w, weights_.vector(op.bias), op.eps, floats(out) + r * x.cols,
                           x.cols);
            else kernels_.norm(floats(x) + r * x.cols, sum, w, op.eps, floats(out) + r * x.cols, x.cols);
        }
    });
}

void CpuBackend::execute(const Gemm& op) {
    std::array<GemmOutput, max_projections> outputs;
    check(op.projections.size() <= outputs.size(), "gemm: more projections than any model has");
    for (std::size_t i = 0; i < op.projections.size(); i++)
        outputs[i] = gemms_.output(op.projections[i], at(op.projections[i].out));
    gemms_.run(at(op.x), std::span(outputs).first(op.projections.size()));
    if (op.scale != 1)
        for (std::size_t i = 0; i < op.projections.size(); i++) gemms_.multiply(outputs[i].out, op.scale);
}

void CpuBackend::execute(const Activate& op) {
    const Tensor x = at(op.x);
    if (op.times == none) return gemms_.activate(op.activation, x, nullptr);
    const Tensor times = at(op.times);
    check(op.first + x.cols <= times.cols, "activate: shapes");
    workers_.split(x.rows, std::max<std::int64_t>(1, 8192 / x.cols), [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t t = first; t < last; t++)
            kernels_.activate(op.activation, floats(x) + t * x.cols, floats(times) + t * times.cols + op.first, x.cols);
    });
}

void CpuBackend::execute(const PositionScale& op) {
    const Tensor x = at(op.x);
    workers_.split(x.rows, 16, [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t t = first; t < last; t++) {
            const auto  periods = (plan_->positions[std::size_t(t)] + op.temperature.offset) / op.temperature.period;
            const float factor  = 1 + op.temperature.scale * std::log(float(1 + periods));
            for (std::int64_t i = 0; i < x.cols && periods > 0; i++) floats(x)[t * x.cols + i] *= factor;
        }
    });
}

void CpuBackend::execute(const GateRows& op) {
    const Tensor x = at(op.x), gate = at(op.gate);
    const auto*  w = weights_.vector(op.weight);
    workers_.split(x.rows, 16, [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t t = first; t < last; t++) {
            double sum = 0;
            for (std::int64_t i = 0; i < gate.cols; i++) sum += double(floats(gate)[t * gate.cols + i]) * double(w[i]);
            const auto factor = float(1 / (1 + std::exp(-sum)));
            for (std::int64_t i = 0; i < x.cols; i++) floats(x)[t * x.cols + i] *= factor;
        }
    });
}

void CpuBackend::execute(const SoftCap& op) {
    const Tensor x = at(op.x);
    workers_.split(x.rows * x.cols, 8192, [&](std::int64_t first, std::int64_t last) {
        kernels_.softcap(floats(x) + first, op.cap, last - first);
    });
}

// A few hundred rows at a time, so that `up` takes no more memory than these.
void CpuBackend::execute(const GatedGemm& op) {
    constexpr std::int64_t at_once = 256;
    const Tensor           x = at(op.x), gate = at(op.gate.out), up = at(op.up.out);
    for (std::int64_t first = 0; first < x.rows; first += at_once) {
        const std::int64_t n = std::min(at_once, x.rows - first);
        const auto   rows    = [&](const Tensor& t) { return Tensor{floats(t) + first * t.cols, n, t.cols, t.type}; };
        const Tensor out     = rows(gate), other{up.data, n, up.cols, up.type};
        gemms_.run(rows(x), std::array{gemms_.output(op.gate, out), gemms_.output(op.up, other)});
        gemms_.activate(op.activation, out, floats(other));
    }
}

void CpuBackend::execute(const RopeAndStore& op) {
    const bool     stores = op.k != none;
    const Tensor   q = given(op.q), k = given(op.k), v = given(op.v);
    const Rope&    rope  = op.rope;
    const KvLayer& cache = layers_[std::size_t(op.layer)];
    const auto&    entry = plan_->groups[std::size_t(cache.group)].parts;
    const auto &   slots = entry[std::size_t(cache.part)].slots, &v_slots = entry[std::size_t(cache.v_part)].slots;
    const int      half = int(rope.inv_freq.size()), D = cache.head_dim, K = cache.n_kv_heads;
    const auto     k_dim = int(k.cols / K), v_dim = int(v.cols / K);
    check(!stores || (cache.latent() ? K == 1 && v_dim + k_dim == D : k_dim == D && v_dim == D),
          "rope_and_store: shapes");
    const int  i_step = rope.neox ? 1 : 2, partner = rope.neox ? half : 1;
    const auto T = shape_.tokens;
    if (angles_of_ != rope.inv_freq.data() ||
        angles_scale_ != rope.scale) { // layers with the same frequencies share them
        angles_of_    = rope.inv_freq.data();
        angles_scale_ = rope.scale;
        angles_.resize(std::size_t(T) * std::size_t(half) * 2);
        workers_.split(T, 16, [&](std::int64_t first, std::int64_t last) {
            for (std::int64_t t = first; t < last; t++)
                for (int i = 0; i < half; i++) {
                    const float angle = float(plan_->positions[std::size_t(t)]) * rope.inv_freq[std::size_t(i)];
                    float*      pair  = angles_.data() + (t * half + i) * 2;
                    pair[0]           = std::cos(angle) * rope.scale;
                    pair[1]           = std::sin(angle) * rope.scale;
                }
        });
    }
    workers_.split(
        T, std::max<std::int64_t>(1, 4096 / std::max(q.cols, k.cols)), [&](std::int64_t first, std::int64_t last) {
            std::vector<float> turned; // a row of codes before it is quantised
            for (std::int64_t t = first; t < last; t++) {
                const float* angles = angles_.data() + t * half * 2;
                for (const auto& [x, dim, start] : {std::tuple(&q, op.q_dim, op.q_first), std::tuple(&k, k_dim, 0)}) {
                    if (!x->data) continue;
                    for (float *head = floats(*x) + t * x->cols + start, *end = floats(*x) + (t + 1) * x->cols;
                         head < end; head += dim)
                        for (int i = 0; i < half; i++) {
                            const float c = angles[2 * i], s = angles[2 * i + 1];
                            float &     a = head[i * i_step], &b = head[i * i_step + partner];
                            const float rotated = a * c - b * s;
                            b                   = a * s + b * c;
                            a                   = rotated;
                        }
                }
                if (!stores) continue;
                // `first`: where the numbers begin in the row; `part`: the row's scale that is theirs, of `parts`.
                const auto store = [&](const Tensor& from, int h, int dim, bool in_v, int first, int part, int parts) {
                    const DType       type   = in_v ? cache.v_type : cache.type;
                    std::byte* const  scales = in_v ? cache.v_scales : cache.k_scales;
                    const int         slot   = (in_v ? v_slots : slots)[std::size_t(t)];
                    const std::size_t block  = std::size_t(slot / cache.block_size) * cache.stride;
                    const std::size_t at     = std::size_t(h * cache.block_size + slot % cache.block_size);
                    std::byte* const  to     = static_cast<std::byte*>(in_v ? cache.v : cache.k) + block +
                                          at * row_bytes(type, D) + row_bytes(type, first);
                    const float* x = floats(from) + t * from.cols + h * dim;
                    if (!scales) return kernels_.store_kv(x, type, to, nullptr, dim);
                    turned.assign(x, x + dim);
                    if (!in_v) kernels_.rotate(turned.data(), dim, cache.rotation());
                    const std::size_t scale = at * std::size_t(parts) + std::size_t(part);
                    kernels_.store_kv(turned.data(), type, to, scales + block + scale * sizeof(float), dim);
                };
                for (int h = 0; h < K; h++) {
                    if (cache.latent()) {
                        store(v, h, v_dim, false, 0, 0, 2);
                        store(k, h, k_dim, false, v_dim, 1, 2);
                    } else {
                        store(k, h, k_dim, false, 0, 0, 1);
                        store(v, h, v_dim, true, 0, 0, 1);
                    }
                }
            }
        });
}

// The first columns of each row.
void CpuBackend::rotate(const Tensor& x, std::int64_t columns, int size) {
    workers_.split(x.rows, std::max<std::int64_t>(1, 8192 / columns), [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t t = first; t < last; t++) kernels_.rotate(floats(x) + t * x.cols, columns, size);
    });
}

// Where K is rotated, the queries are.
void CpuBackend::execute(const Attention& op) {
    const KvLayer& cache = layers_[std::size_t(op.layer)];
    const Tensor   q = at(op.q), out = at(op.out);
    if (cache.k_scales && !cache.latent()) rotate(q, std::int64_t(op.n_heads) * cache.head_dim, cache.rotation());
    attention_.run(op, weights_.vector(op.sinks), q, out, cache);
}

void CpuBackend::execute(const Add& op) {
    const Tensor x = at(op.residual), y = at(op.x);
    workers_.split(x.rows * x.cols, 65536, [&](std::int64_t first, std::int64_t last) {
        kernels_.add(floats(x) + first, floats(y) + first, last - first);
        for (std::int64_t i = first; i < last && op.scale != 1; i++) floats(x)[i] *= op.scale;
    });
}

void CpuBackend::execute(const SelectRows& op) {
    const Tensor x = at(op.x), out = at(op.out);
    for (std::int64_t i = 0; i < out.rows; i++)
        std::memcpy(floats(out) + i * out.cols, floats(x) + plan_->logit_rows[std::size_t(i)] * x.cols,
                    std::size_t(x.cols) * sizeof(float));
}

// to = the sum of source(0) .. source(n_sources - 1), arrays or null, as AllReduce adds.
template <class Source>
void CpuBackend::sum_tree(const Source& source, int n_sources, float* to, std::int64_t n) {
    constexpr std::int64_t chunk = 1024;
    const auto sum = [&](const auto& self, int first, int count, std::int64_t at, std::int64_t length, float* out) {
        if (count == 1) {
            if (const float* x = source(first)) std::memmove(out, x + at, std::size_t(length) * sizeof(float));
            return source(first) != nullptr;
        }
        const int                half = (count + 1) / 2;
        std::array<float, chunk> other;
        const bool               left = self(self, first, half, at, length, out);
        if (!self(self, first + half, count - half, at, length, left ? other.data() : out)) return left;
        if (left) kernels_.add(out, other.data(), length);
        return true;
    };
    workers_.split((n + chunk - 1) / chunk, 16, [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t i = first; i < last; i++) {
            std::array<float, chunk> total;
            const std::int64_t       length = std::min(chunk, n - i * chunk);
            check(sum(sum, 0, n_sources, i * chunk, length, total.data()), "a sum of nothing");
            std::memcpy(to + i * chunk, total.data(), std::size_t(length) * sizeof(float));
        }
    });
}

void CpuBackend::execute(const AllReduce& op) {
    const Tensor       out  = at(op.out);
    const std::int64_t n    = out.rows * out.cols;
    const auto         part = [&](int i) {
        const ValueId id = op.parts[std::size_t(i)];
        return id == none ? nullptr : floats(at(id));
    };
    sum_tree(part, int(op.parts.size()), ranks_ ? ranks_->hand_in(rank_, std::size_t(n), 0) : floats(out), n);
    if (!ranks_) return;
    ranks_->barrier(rank_);
    sum_tree([&](int r) { return ranks_->handed_in(rank_, r).values.data(); }, ranks_->n(), floats(out), n);
}

void CpuBackend::execute(const AllGather& op) {
    check(ranks_ != nullptr, "all_gather: one rank");
    const Tensor x = at(op.x), out = at(op.out);
    std::memcpy(ranks_->hand_in(rank_, std::size_t(x.rows * x.cols), op.first), x.data,
                std::size_t(x.rows * x.cols) * sizeof(float));
    ranks_->barrier(rank_);
    for (int r = 0; r < ranks_->n(); r++) {
        const auto [values, first] = ranks_->handed_in(rank_, r);
        const std::int64_t cols    = std::int64_t(values.size()) / out.rows;
        check(first + cols <= out.cols, "all_gather: shapes");
        for (std::int64_t t = 0; t < out.rows; t++)
            std::memcpy(floats(out) + t * out.cols + first, values.data() + t * cols,
                        std::size_t(cols) * sizeof(float));
    }
}

void CpuBackend::execute(const TakeColumns& op) {
    const Tensor       x = at(op.x), out = at(op.out);
    const std::int64_t from = x.cols / op.groups, n = out.cols / op.groups;
    check(op.first + n <= from && x.cols % op.groups == 0 && out.cols % op.groups == 0, "take_columns: shapes");
    workers_.split(
        x.rows * op.groups, std::max<std::int64_t>(1, 65536 / n), [&](std::int64_t first, std::int64_t last) {
            for (std::int64_t r = first; r < last; r++)
                std::memcpy(floats(out) + r * n, floats(x) + r * from + op.first, std::size_t(n) * sizeof(float));
        });
}

void CpuBackend::execute(const Carry& op) {
    const Tensor      out   = at(op.out);
    const std::size_t bytes = std::size_t(out.cols) * sizeof(float);
    const StepShape   most  = values_->most();
    const Tensor      kept  = at(op.memory);
    const int         n     = most.logit_rows * int(kept.cols / out.cols);
    const auto        row   = [&](float* rows, std::int64_t i, int of) {
        check(i >= 0 && i < of, "carry: a row that there is not");
        return rows + i * out.cols;
    };
    for (const StepPlan::KeptRow& k : plan_->kept)
        std::memcpy(row(floats(kept), k.to, n),
                    row(floats(at(k.guessed ? op.guesses : op.steps)), k.row, most.logit_rows), bytes);
    for (int s = 0; s < plan_->n_seqs(); s++) {
        const std::int32_t first = plan_->token_start[std::size_t(s)], end = plan_->token_start[std::size_t(s) + 1],
                           from = plan_->carried.empty() ? -1 : plan_->carried[std::size_t(s)];
        for (std::int32_t t = first; t < end; t++) {
            float* const to = floats(out) + t * out.cols;
            if (t > first && op.x != none) std::memcpy(to, floats(at(op.x)) + (t - 1) * out.cols, bytes);
            else if (from >= 0) std::memcpy(to, row(floats(kept), from, n), bytes);
            else std::fill_n(to, out.cols, 0.0f);
        }
    }
}

void CpuBackend::execute(const PutColumns& op) {
    const Tensor x = at(op.x), out = at(op.out);
    check(op.first + x.cols <= out.cols, "put_columns: shapes");
    for (std::int64_t t = 0; t < x.rows; t++)
        std::memcpy(floats(out) + t * out.cols + op.first, floats(x) + t * x.cols, std::size_t(x.cols) * sizeof(float));
}

void CpuBackend::execute(const ScatterColumns& op) {
    const Tensor x = at(op.x), out = at(op.out);
    check(std::int64_t(op.columns.size()) == x.cols && x.rows == out.rows, "scatter: shapes");
    std::fill_n(floats(out), out.rows * out.cols, -std::numeric_limits<float>::infinity());
    for (std::int64_t t = 0; t < x.rows; t++)
        for (std::int64_t i = 0; i < x.cols; i++) {
            const Token column = op.columns[std::size_t(i)];
            check(column >= 0 && column < out.cols, "scatter: a column that there is not");
            floats(out)[t * out.cols + column] = floats(x)[t * x.cols + i];
        }
}

void CpuBackend::copy_blocks(std::span<const BlockCopy> copies, std::span<const BlockArray> from,
                             std::span<const BlockArray> to) {
    if (copies.empty()) return;
    check(from.size() == to.size(), "copy_blocks: pools of different models");
    workers_.run(int(from.size()), [&](int item, int) {
        const BlockArray &source = from[std::size_t(item)], &target = to[std::size_t(item)];
        for (const BlockCopy& copy : copies)
            std::memcpy(target.data + std::size_t(copy.to) * target.stride,
                        source.data + std::size_t(copy.from) * source.stride, source.bytes);
    });
}

} // namespace quire
