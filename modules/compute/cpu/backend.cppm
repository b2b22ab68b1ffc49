// quire.compute.cpu.backend: the CPU backend: runs a program operation by operation. **Owns** the worker threads, their scratch
// memory and repacked weights. Threads divide rows, heads and tokens, never a sum: the result does not depend on the number of threads.
module;

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

export module quire.compute.cpu.backend;

import quire.compute.backend;
import quire.compute.cpu.kernels;
import quire.compute.cpu.tuning;
import quire.compute.memory;
import quire.compute.program;
import quire.compute.ranks.rank_group;
import quire.compute.routing;
import quire.core.base;
import quire.core.std;
import quire.core.tensor;
import quire.core.thread_pool;
import quire.model_file.family;
import quire.model_file.quants;
import quire.paging.block;
import quire.step.plan;

export namespace quire {

// threads 0: the physical cores. isa "": the widest there is; "plain", "avx2", "avxvnni", "avx512": that one, or an error.
// tune: prepare_steps() measures how weights are best prefetched (quire.compute.cpu.tuning). ranks: those that run the model together
// with this one, which is number `rank`; null: it runs alone.
Result<std::unique_ptr<Backend>> make_cpu_backend(int threads, std::string_view isa = "", bool tune = false,
                                                  std::shared_ptr<RankGroup> ranks = {}, int rank = 0);

} // namespace quire

module :private;

namespace quire {

// Addresses of a file's pages.
struct MappedPages {
    std::uintptr_t begin = 0, end = 0;
};

class CpuBackend final : public Backend {
public:
    CpuBackend(int threads, const CpuKernels& kernels, bool tune, std::shared_ptr<RankGroup> ranks, int rank)
        : kernels_(kernels), pool_(threads), ranks_(std::move(ranks)), rank_(rank), tune_(tune) {
        scratch_.resize(std::size_t(pool_.n_threads()));
    }

    std::string describe() const override {
        return cat("cpu, ", kernels_.name, ", ", pool_.n_threads(), pool_.n_threads() == 1 ? " thread" : " threads");
    }

    std::string tuning() const override;

    Result<Buffer> allocate(std::size_t bytes) override;
    Result<Buffer> allocate_host(std::size_t bytes) override {
        const std::size_t before = taken_; // the swap pool is not the device's
        Result<Buffer>    buffer = allocate(bytes);
        taken_                   = before;
        return buffer;
    }
    std::size_t memory_available() const override { return available_memory(); }
    // A quarter of the machine's memory, or a third of what is free: the swap pool takes as much.
    std::size_t memory_for_cache() const override {
        const auto machine = std::size_t(sysconf(_SC_PHYS_PAGES)) * std::size_t(sysconf(_SC_PAGE_SIZE));
        return std::min(machine / 4, available_memory() / 3);
    }
    std::size_t  memory_taken() const override { return taken_; }
    double       read_bandwidth() override;
    double       weight_bandwidth() override;
    DType        activation_type() const override { return DType::F32; }
    Result<void> prepare_steps(const StepLimits&) override {
        copies_.settle();
        if (tune_) choose_prefetching();
        return {};
    }
    Result<TensorView>     prepare(const TensorView& weight) override;
    Result<TensorView>     prepare_stack(const TensorView& weights, int n) override;
    Result<TensorView>     prepare_lookup(const TensorView& weight) override;
    std::span<const float> to_host(const Tensor& t) override { return {floats(t), std::size_t(t.rows * t.cols)}; }

    void        compile(const Program& program, const Activations& values, std::span<const KvLayer> layers) override;
    std::string explain() const override;
    void        run(const StepPlan& plan) override;
    void        copy_blocks(std::span<const BlockCopy> copies, std::span<const KvLayer> from,
                            std::span<const KvLayer> to) override;

private:
    static constexpr int          query_tile = 16; // tokens of one sequence that share a pass over their K and V
    static constexpr std::int64_t few_rows   = 32; // of a step that decodes
    // Multiply-adds below which waking the other threads costs more than they save.
    static constexpr std::int64_t worth_threads = 200'000;
    static constexpr std::int64_t worth_split   = 1'000'000; // likewise of one kv head, for three passes

    struct QueryTile {
        int sequence, first_row, n_rows;
    };
    // Neighbours in tiles_, worked on together: their sequences begin with the same blocks.
    struct TileGroup {
        int first, n, shared_blocks;
    };
    static constexpr int group_size = 16; // tiles whose sums stay in the caches

    // Where GEMMs read a weight.
    const void* copy_of(const TensorView& weight) const {
        const auto copy = repacked_.find(weight.data);
        return copy != repacked_.end() ? copy->second : weight.data;
    }
    void choose_prefetching();
    void begin_step(const StepPlan& plan);
    void group_tiles();

    // The operations (quire.compute.program), with their values in this step.
    Tensor at(ValueId id) const { return values_->at(id, shape_); }
    void   execute(const Embed& op);
    void   execute(const Norm& op);
    void   execute(const Gemm& op);
    void   execute(const GatedGemm& op);
    void   execute(const Activate& op);
    void   execute(const HeadGemm& op);
    void   execute(const RopeAndStore& op);
    void   execute(const Attention& op);
    void   execute(const Route& op);
    void   execute(const ExpertGatedGemm& op);
    void   execute(const ExpertCombineGemm& op);
    void   execute(const GateRows& op);
    void   execute(const SoftCap& op);
    void   execute(const Add& op);
    void   execute(const SelectRows& op);
    void   execute(const Argmax&) {} // the host reads the logits
    void   execute(const AllReduce& op);
    void   execute(const AllGather& op);
    void   execute(const TakeColumns& op);
    template <class Source>
    void sum_tree(const Source& source, int n_sources, float* to, std::int64_t n);

    struct Output { // of one of several GEMMs with the same input
        const Projection* projection;
        Tensor            out;
    };
    // One GEMM, or several with the same input. Several such groups are computed at once.
    struct GemmGroup {
        Tensor                              x;
        std::array<Output, max_projections> outputs;
        std::size_t                         n_outputs = 0;
        QuantisedRows                       quantised; // the rest is gemm()'s
        const float*                        packed = nullptr;
        std::array<std::int64_t, max_projections + 1>
                     begin{}; // of the groups of 16 rows of each, in one list of them all
        std::int64_t first_item = 0;
    };
    void gemm(Tensor x, std::span<const Output> outputs);
    void gemm(std::span<GemmGroup> groups);
    void activate(Activation activation, Tensor gate, const float* up);
    void multiply(const Tensor& x, float factor);
    void group_by_expert(const Tensor& routes, int n_experts, int n_used);

    static float* floats(const Tensor& t) { return static_cast<float*>(t.data); }
    static float* grown(std::vector<float>& memory, std::size_t n);
    float*        scratch(int thread, std::size_t n) { return grown(scratch_[std::size_t(thread)], n); }

    // body(first, last) over pieces of [0, n) of about `grain`, in parallel
    template <class Body>
    void split(std::int64_t n, std::int64_t grain, const Body& body) {
        const int items = int((n + grain - 1) / grain);
        pool_.run(items, [&](int item, int) { body(item * grain, std::min(n, (item + 1) * grain)); });
    }

    const CpuKernels&               kernels_;
    ThreadPool                      pool_;
    std::shared_ptr<RankGroup>      ranks_; // null: alone
    int                             rank_ = 0;
    bool                            tune_ = false;
    std::vector<PrefetchChoice>     prefetch_; // of the types that are read from memory
    std::vector<TensorView>         weights_;  // that GEMMs read, as they were in the file
    std::size_t                     taken_ = 0;
    std::vector<std::vector<float>> scratch_;   // per thread; grows to its largest use in the first steps
    std::vector<float>              quantised_; // the activations of the current GEMMs: int16-quantised
    std::vector<float>              packed_;    // and as packed panels
    std::vector<GemmGroup>          gemms_;
    std::vector<Projection>         projections_; // of these
    // A step's rows in the order of the experts that they chose: begin of each expert's rows; the token of each row; where
    // each (token, slot) is. And their inputs and outputs.
    std::vector<std::int32_t>       expert_begin_, row_token_, slot_row_;
    std::vector<float>              scores_, gathered_, expert_out_;
    std::vector<float>              split_;   // of attention in passes
    std::vector<std::vector<float>> vectors_; // copies of the weights that are vectors
    // Repacked copies of weights, by their address in the file.
    std::unordered_map<const void*, const std::byte*> repacked_;
    LargePages                                        copies_;  // their memory
    std::unordered_map<const void*, MappedPages>      lookups_; // tables that embed() alone reads
    const Program*                                    program_ = nullptr;
    const Activations*                                values_  = nullptr;
    std::span<const KvLayer>                          layers_;
    const StepPlan*                                   plan_ = nullptr;
    StepShape                                         shape_;
    std::vector<QueryTile>                            tiles_;
    std::vector<TileGroup>                            groups_;
    // RoPE's [T × rope_dim/2 × (cos, sin)] for this step's positions, by the frequencies and scale they were computed with.
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

Result<Buffer> CpuBackend::allocate(std::size_t bytes) {
    Result<Buffer> buffer = fresh_memory(bytes);
    if (buffer) taken_ += buffer->bytes();
    return buffer;
}

// All threads sum the same memory, larger than the caches, twice: the first time brings its pages.
double CpuBackend::read_bandwidth() {
    constexpr std::int64_t n      = std::int64_t(96) << 18; // floats
    Result<Buffer>         buffer = fresh_memory(std::size_t(n) * sizeof(float));
    if (!buffer) return 0;
    auto* const memory = static_cast<float*>(buffer->data());
    std::fill_n(memory, n, 1.0f);
    std::vector<float> sums(scratch_.size() * 16);
    double             seconds = 0;
    for (int round = 0; round < 3; round++) {
        const auto start = std::chrono::steady_clock::now();
        pool_.run(pool_.n_threads() * 4, [&](int item, int thread) {
            const std::int64_t first = n * item / (pool_.n_threads() * 4),
                               last  = n * (item + 1) / (pool_.n_threads() * 4);
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

double CpuBackend::weight_bandwidth() {
    std::vector<TensorView> weights = weights_;
    for (TensorView& w : weights) w.data = copy_of(w);
    return sum_rate(pool_, weights);
}

// At least n floats, on a line of 64 bytes.
float* CpuBackend::grown(std::vector<float>& memory, std::size_t n) {
    if (memory.size() < n + 16) memory.resize(n + 16);
    const auto beyond = reinterpret_cast<std::uintptr_t>(memory.data()) % 64;
    return memory.data() + (beyond > 0 ? (64 - beyond) / sizeof(float) : 0);
}

void CpuBackend::compile(const Program& program, const Activations& values, std::span<const KvLayer> layers) {
    program_ = &program;
    values_  = &values;
    layers_  = layers;
}

std::string CpuBackend::explain() const {
    return "every step, operation by operation:\n" + list(*program_, [](std::size_t) { return std::string(); });
}

void CpuBackend::run(const StepPlan& plan) {
    begin_step(plan);
    const auto      all  = std::span(program_->operations);
    const StepShape most = values_->most();
    check(shape_.tokens <= most.tokens && shape_.logit_rows <= most.logit_rows,
          "a step larger than the memory taken for it");
    for (const Operation& operation : shape_.logit_rows > 0 ? all : all.first(program_->head))
        std::visit([this](const auto& op) { execute(op); }, operation);
}

void CpuBackend::begin_step(const StepPlan& plan) {
    plan_      = &plan;
    shape_     = {plan.n_tokens(), int(plan.logit_rows.size())};
    angles_of_ = nullptr;
    tiles_.clear();
    for (int s = 0; s < plan.n_seqs(); s++)
        for (int row = plan.token_start[std::size_t(s)], end = plan.token_start[std::size_t(s) + 1]; row < end;
             row += query_tile)
            tiles_.push_back({s, row, std::min(query_tile, end - row)});
    group_tiles();
}

// Tiles of one row, in the order of their block tables: those that begin alike are neighbours then, and form groups, not
// so large that threads would have nothing to do.
void CpuBackend::group_tiles() {
    const auto table = [&](const QueryTile& tile) {
        const auto       s    = std::size_t(tile.sequence);
        const GroupPlan& plan = plan_->groups[0]; // the one that keeps all positions, if one does
        return std::span(plan.parts[0].tables)
            .subspan(std::size_t(plan.table_start[s]), std::size_t(plan.table_start[s + 1] - plan.table_start[s]));
    };
    std::sort(tiles_.begin(), tiles_.end(), [&](const QueryTile& a, const QueryTile& b) {
        if (a.n_rows > 1 || b.n_rows > 1) return a.n_rows != b.n_rows ? a.n_rows > b.n_rows : a.first_row < b.first_row;
        const auto ours = table(a), theirs = table(b);
        const auto [x, y] = std::mismatch(ours.begin(), ours.end(), theirs.begin(), theirs.end());
        return y != theirs.end() && (x == ours.end() || *x < *y);
    });
    const auto single = std::count_if(tiles_.begin(), tiles_.end(), [](const QueryTile& t) { return t.n_rows == 1; });
    const int  most   = std::clamp(int(single) / pool_.n_threads(), 1, group_size);
    groups_.clear();
    for (int i = 0; i < int(tiles_.size()); i++) {
        const auto blocks = table(tiles_[std::size_t(i)]);
        if (!groups_.empty() && tiles_[std::size_t(i)].n_rows == 1) {
            TileGroup&       group  = groups_.back();
            const QueryTile& leader = tiles_[std::size_t(group.first)];
            const auto       first  = table(leader);
            const auto       common =
                std::mismatch(first.begin(), first.end(), blocks.begin(), blocks.end()).first - first.begin();
            if (leader.n_rows == 1 && group.n < most && common > 0 && common >= group.shared_blocks / 2) {
                group.shared_blocks = group.n == 1 ? int(common) : std::min(group.shared_blocks, int(common));
                group.n++;
                continue;
            }
        }
        groups_.push_back({i, 1, 0});
    }
}

// Where the pages of a read-only mapping of a file, which can be read again, begin and end around `data`; zeros for all else.
static MappedPages pages_around(const void* data) {
    std::ifstream maps("/proc/self/maps");
    const auto    at = reinterpret_cast<std::uintptr_t>(data);
    for (std::string line;
         std::getline(maps, line);) { // begin-end access offset device inode, numbers in hex but the last
        char*      rest  = nullptr;
        const auto begin = strtoull(line.c_str(), &rest, 16), end = strtoull(rest + 1, &rest, 16);
        if (at < begin || at >= end) continue;
        const std::string access(rest + 1, 4);
        strtoull(rest + 6, &rest, 16);             // the offset
        const char* inode = strchr(rest + 1, ' '); // beyond the device
        if (access.starts_with("r-") && inode && strtoull(inode, nullptr, 10) != 0) return {begin, end};
        break;
    }
    return {};
}

// The process keeps no pages of these bytes, nor of what shares a large page with them.
static void give_back(const MappedPages& pages, const void* data, std::size_t bytes) {
    const auto           at    = reinterpret_cast<std::uintptr_t>(data);
    const std::uintptr_t begin = std::max(pages.begin, at / large_page * large_page),
                         end   = std::min(pages.end, (at + bytes + large_page - 1) / large_page * large_page);
    if (begin < end)
        madvise(static_cast<std::byte*>(const_cast<void*>(data)) + std::ptrdiff_t(begin - at), end - begin,
                MADV_DONTNEED);
}

void CpuBackend::execute(const Embed& op) {
    const TensorView &weight = op.table, &positions = op.positions;
    const Tensor      out = at(op.out);
    const auto        row = [](const TensorView& matrix, std::int64_t i) {
        check(i >= 0 && i < matrix.rows, "a token outside the vocabulary, or a position outside the context");
        return static_cast<const std::byte*>(matrix.data) + std::size_t(i) * row_bytes(matrix.type, matrix.cols);
    };
    std::vector<float>& position = scratch_[0];
    if ((positions || op.types) && position.size() < std::size_t(out.cols)) position.resize(std::size_t(out.cols));
    std::int64_t type = 0; // of the tokens that come
    for (std::int64_t t = 0; t < out.rows; t++) {
        float*             to    = floats(out) + t * out.cols;
        const std::int64_t token = plan_->tokens[std::size_t(t)] - op.first;
        if (op.part && (token < 0 || token >= weight.rows)) {
            std::fill_n(to, out.cols, 0.0f);
            continue;
        }
        dequantize(weight.type, row(weight, token), to, weight.cols);
        for (std::int64_t i = 0; op.scale != 1 && i < weight.cols; i++) to[i] *= op.scale;
        if (op.types) {
            if (plan_->positions[std::size_t(t)] == 0) type = 0;
            dequantize(op.types.type, row(op.types, type), position.data(), op.types.cols);
            kernels_.add(to, position.data(), out.cols);
            if (plan_->tokens[std::size_t(t)] == op.separator) type = std::min<std::int64_t>(op.types.rows - 1, 1);
        }
        if (!positions) continue;
        dequantize(positions.type, row(positions, plan_->positions[std::size_t(t)] + op.offset), position.data(),
                   positions.cols);
        kernels_.add(to, position.data(), out.cols);
    }
    if (const auto pages = lookups_.find(weight.data); pages != lookups_.end() && out.rows > few_rows)
        give_back(pages->second, weight.data, std::size_t(weight.rows) * row_bytes(weight.type, weight.cols));
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
        split(x.rows * x.cols, 65536, [&](std::int64_t first, std::int64_t last) {
            if (residual) kernels_.add(residual + first, floats(x) + first, last - first);
            std::memcpy(floats(out) + first, (residual ? residual : floats(x)) + first,
                        std::size_t(last - first) * sizeof(float));
        });
        return;
    }
    check(op.weight.cols == op.group && op.weight.type == DType::F32 && x.cols % op.group == 0, "norm: shapes");
    x             = {x.data, x.rows * (x.cols / op.group), op.group, x.type}; // a row may be one head
    const auto* w = static_cast<const float*>(op.weight.data);
    split(x.rows, std::max<std::int64_t>(1, 8192 / x.cols), [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t r = first; r < last; r++) {
            float* sum = residual ? residual + r * x.cols : nullptr;
            if (op.kind == NormKind::layer)
                layer_norm(floats(x) + r * x.cols, sum, w, static_cast<const float*>(op.bias.data), op.eps,
                           floats(out) + r * x.cols, x.cols);
            else kernels_.norm(floats(x) + r * x.cols, sum, w, op.eps, floats(out) + r * x.cols, x.cols);
        }
    });
}

// Types that are repacked at load are copied, and the pages of the file given back: embed() may ask for a
// row of them again. Vectors are copied, too: each would keep a large page of the file. All else stays where it is.
Result<TensorView> CpuBackend::prepare(const TensorView& weight) {
    if (weight.rows == 1 && weight.type == DType::F32) {
        const auto*        from = static_cast<const float*>(weight.data);
        std::vector<float> copy(from, from + weight.cols);
        give_back(pages_around(weight.data), weight.data, std::size_t(weight.cols) * sizeof(float));
        return TensorView{weight.type, 1, weight.cols, vectors_.emplace_back(std::move(copy)).data()};
    }
    if (repacked_.contains(weight.data)) return weight;
    weights_.push_back(weight);
    if (!repacked_at_load(weight.type)) return weight;
    const std::size_t  stride = row_bytes(weight.type, weight.cols);
    const std::int64_t groups = (weight.rows + 15) / 16;
    const std::size_t  bytes  = std::size_t(groups) * 16 * stride;
    Result<std::byte*> memory = copies_.take(bytes);
    if (!memory) return std::unexpected(memory.error());
    taken_ += bytes;
    std::byte*        to    = *memory;
    const MappedPages pages = pages_around(weight.data);
    split(groups, std::max<std::int64_t>(1, std::int64_t((std::size_t(4) << 20) / (16 * stride))),
          [&](std::int64_t first, std::int64_t last) {
              copies_.touch(to + std::size_t(first) * 16 * stride, std::size_t(last - first) * 16 * stride);
              kernels_.repack(weight, to, first, last);
              give_back(pages, static_cast<const std::byte*>(weight.data) + std::size_t(first) * 16 * stride,
                        std::size_t(std::min(last * 16, weight.rows) - first * 16) * stride);
          });
    repacked_.emplace(weight.data, to);
    return weight;
}

// Chosen anew for each type, unless it was on this machine before.
void CpuBackend::choose_prefetching() {
    prefetch_.clear();
    std::map<DType, std::vector<TensorView>> by_type;
    for (TensorView w : weights_) {
        w.data = copy_of(w);
        by_type[w.type].push_back(w);
    }
    for (const auto& [type, weights] : by_type) {
        std::optional<PrefetchChoice> choice = remembered_prefetch(kernels_, pool_.n_threads(), type);
        if (!choice) {
            choice = choose_prefetch(kernels_, pool_, weights);
            if (choice) remember_prefetch(kernels_, pool_.n_threads(), *choice);
        }
        if (choice) prefetch_.push_back(*choice);
    }
}

std::string CpuBackend::tuning() const {
    if (!tune_) return "prefetch: into the L2 (not measured)";
    std::string text;
    for (const PrefetchChoice& c : prefetch_) {
        char rates[64] = " (remembered)";
        if (c.l1 > 0)
            std::snprintf(rates, sizeof rates, " (measured: L1 %.1f GB/s, L2 %.1f GB/s)", c.l1 / 1e9, c.l2 / 1e9);
        text += cat(text.empty() ? "prefetch: " : ", ", dtype_info(c.type).name, " into the ",
                    c.into == Prefetch::l1 ? "L1" : "L2", rates);
    }
    return text;
}

Result<TensorView> CpuBackend::prepare_lookup(const TensorView& weight) {
    lookups_.emplace(weight.data, pages_around(weight.data));
    return weight;
}

// The same memory repacked as one matrix if no group of 16 rows lies in two of them.
Result<TensorView> CpuBackend::prepare_stack(const TensorView& weights, int n) {
    const std::int64_t rows  = weights.rows / n;
    const std::size_t  bytes = std::size_t(rows) * row_bytes(weights.type, weights.cols);
    const auto         part  = [&](int i) {
        return TensorView{weights.type, rows, weights.cols,
                          static_cast<const std::byte*>(weights.data) + std::size_t(i) * bytes};
    };
    if (!repacked_at_load(weights.type)) return prepare(weights);
    if (rows % 16 == 0) {
        if (auto all = prepare(weights); !all) return all;
        const std::byte* copy = repacked_.at(weights.data);
        for (int i = 1; i < n; i++) repacked_.emplace(part(i).data, copy + std::size_t(i) * bytes);
        return weights;
    }
    for (int i = 0; i < n; i++)
        if (auto one = prepare(part(i)); !one) return one;
    return weights;
}

void CpuBackend::execute(const Gemm& op) {
    std::array<Output, max_projections> outputs;
    check(op.projections.size() <= outputs.size(), "gemm: more projections than any model has");
    for (std::size_t i = 0; i < op.projections.size(); i++)
        outputs[i] = {&op.projections[i], at(op.projections[i].out)};
    gemm(at(op.x), std::span(outputs).first(op.projections.size()));
    if (op.scale != 1)
        for (std::size_t i = 0; i < op.projections.size(); i++) multiply(outputs[i].out, op.scale);
}

void CpuBackend::multiply(const Tensor& x, float factor) {
    split(x.rows * x.cols, 65536, [&](std::int64_t first, std::int64_t last) {
        for (float *v = floats(x) + first, *end = floats(x) + last; v < end; v++) *v *= factor;
    });
}

void CpuBackend::gemm(Tensor x, std::span<const Output> outputs) {
    GemmGroup group;
    group.x         = x;
    group.n_outputs = outputs.size();
    std::ranges::copy(outputs, group.outputs.begin());
    gemm(std::span(&group, 1));
}

void CpuBackend::gemm(std::span<GemmGroup> groups) {
    // What each needs of its input: int16-quantised, packed, or both. Their memory is one piece.
    constexpr auto on_line   = [](std::size_t n) { return (n + 15) / 16 * 16; };
    std::size_t    quantised = 0, packed = 0;
    std::int64_t   all = 0, most_rows = 0;
    bool           any_packed = false;
    double         work       = 0;
    for (GemmGroup& g : groups) {
        bool integer = false, floating = false;
        g.quantised = {};
        g.packed    = nullptr;
        for (std::size_t i = 0; i < g.n_outputs; i++) {
            const TensorView& w = g.outputs[i].projection->weight;
            check(g.x.cols == w.cols && g.outputs[i].out.cols == w.rows && g.outputs[i].out.rows == g.x.rows,
                  "gemm: shapes");
            g.begin[i + 1]                                   = g.begin[i] + (w.rows + 15) / 16;
            (uses_integer_gemm(w.type) ? integer : floating) = true;
            g.quantised.for_wide |= wide_integers(w.type);
        }
        const auto n = std::size_t(g.x.rows), cols = std::size_t(g.x.cols);
        if (integer) {
            g.quantised.m = g.x.rows, g.quantised.k = g.x.cols;
            quantised += on_line(n * (cols / 2 + 3 * (cols / 32)));
        }
        if (floating) packed += on_line(n * cols), any_packed = true;
        all += g.begin[g.n_outputs];
        most_rows = std::max(most_rows, g.x.rows);
        work += double(g.x.rows) * double(g.begin[g.n_outputs]) * 16 * double(g.x.cols);
    }
    float *to_quantised = quantised > 0 ? grown(quantised_, quantised) : nullptr,
          *to_packed    = packed > 0 ? grown(packed_, packed) : nullptr;
    for (GemmGroup& g : groups) {
        const auto n = std::size_t(g.x.rows), cols = std::size_t(g.x.cols), tiles = cols / 32;
        bool       floating = false;
        for (std::size_t i = 0; i < g.n_outputs; i++)
            floating |= !uses_integer_gemm(g.outputs[i].projection->weight.type);
        if (QuantisedRows& q = g.quantised; q.m > 0) {
            q.integers = reinterpret_cast<std::int16_t*>(to_quantised);
            q.scales   = reinterpret_cast<float*>(q.integers + n * cols);
            q.sums     = q.scales + n * tiles;
            q.products = reinterpret_cast<std::int32_t*>(q.sums + n * tiles);
            to_quantised += on_line(n * (cols / 2 + 3 * tiles));
        }
        if (floating) {
            g.packed = to_packed;
            to_packed += on_line(n * cols);
        }
    }
    // Pieces of a single group are shared among the threads; groups are, if there are several.
    const auto prepare_rows = [&](GemmGroup& g, auto&& over) {
        if (g.quantised.m > 0)
            over(g.x.rows, g.x.rows > few_rows ? 8 : std::max<std::int64_t>(1, 16384 / g.x.cols), // eight share lines
                 [&](std::int64_t first, std::int64_t last) {
                     kernels_.quantise_rows(floats(g.x), g.quantised, first, last);
                 });
        if (g.packed)
            over(kernels_.token_tiles(g.x.rows), 4, [&](std::int64_t first, std::int64_t last) {
                kernels_.pack_panels(floats(g.x), g.x.rows, g.x.cols, const_cast<float*>(g.packed), first, last);
            });
    };
    if (groups.size() == 1) {
        prepare_rows(groups[0], [&](std::int64_t n, std::int64_t grain, auto&& body) { split(n, grain, body); });
    } else {
        split(std::int64_t(groups.size()), 1, [&](std::int64_t first, std::int64_t last) {
            for (std::int64_t i = first; i < last; i++)
                prepare_rows(groups[std::size_t(i)], [](std::int64_t n, std::int64_t, auto&& body) { body(0, n); });
        });
    }

    const std::int64_t threads = pool_.n_threads();
    const bool         alone   = work < double(worth_threads);
    // Many tokens pass over a piece in several goes: it should still be in a cache then.
    const std::int64_t most  = any_packed             ? 9
                               : most_rows > few_rows ? 8
                                                      : 64; // 9 · 16 rows are three row blocks of the float GEMM
    const std::int64_t even  = all / (8 * threads) / 2 * 2; // two groups at once cost less than each alone
    const std::int64_t piece = alone ? all : std::clamp<std::int64_t>(even, 1, most);
    std::int64_t       items = 0;
    for (GemmGroup& g : groups) {
        g.first_item = items;
        items += (g.begin[g.n_outputs] + piece - 1) / piece;
    }
    const auto run = [&](int item, int thread) {
        const auto         after = std::upper_bound(groups.begin(), groups.end(), std::int64_t(item),
                                                    [](std::int64_t i, const GemmGroup& g) { return i < g.first_item; });
        const GemmGroup&   g     = *(after - 1);
        const std::int64_t first = (item - g.first_item) * piece, last = std::min(g.begin[g.n_outputs], first + piece);
        for (std::size_t i = 0; i < g.n_outputs; i++) {
            if (first >= g.begin[i + 1] || last <= g.begin[i]) continue;
            const auto& [projection, out] = g.outputs[i];
            TensorView weight             = projection->weight;
            if (repacked_at_load(weight.type)) {
                const auto copy = repacked_.find(weight.data);
                check(copy != repacked_.end(), "gemm: a weight that was not prepared");
                weight.data = copy->second;
            }
            const auto* bias = static_cast<const float*>(projection->bias.data);
            GemmTask    task{&weight, bias, floats(g.x), &g.quantised, g.packed, floats(out), Prefetch::l2, g.x.rows};
            task.first   = (std::max(first, g.begin[i]) - g.begin[i]) * 16;
            task.last    = std::min((std::min(last, g.begin[i + 1]) - g.begin[i]) * 16, weight.rows);
            task.scratch = scratch(thread, gemm_scratch);
            for (const PrefetchChoice& choice : prefetch_)
                if (choice.type == weight.type) task.prefetch = choice.into;
            kernels_.gemm(task);
        }
    };
    if (alone)
        for (std::int64_t i = 0; i < items; i++) run(int(i), 0);
    else pool_.run(int(items), run);
}

// `n` matrices in one: matrix i of it.
static TensorView in_stack(const TensorView& stack, std::int64_t n, std::int64_t i) {
    const std::int64_t rows = stack.rows / n;
    return {stack.type, rows, stack.cols,
            static_cast<const std::byte*>(stack.data) + std::size_t(i * rows) * row_bytes(stack.type, stack.cols)};
}

void CpuBackend::execute(const HeadGemm& op) {
    const Tensor       x = at(op.x), out = at(op.out);
    const std::int64_t n = op.n_heads, T = x.rows, in = op.weight.cols, rows = op.weight.rows / n, x_dim = x.cols / n,
                       out_dim = out.cols / n;
    check(out_dim - rows == x_dim - in, "head_gemm: shapes");
    float* inputs  = grown(gathered_, std::size_t(T * n * in));
    float* outputs = grown(expert_out_, std::size_t(T * n * rows));
    gemms_.resize(std::size_t(n));
    projections_.resize(std::size_t(n));
    split(n, 1, [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t h = first; h < last; h++)
            for (std::int64_t t = 0; t < T; t++)
                std::memcpy(inputs + (h * T + t) * in, floats(x) + t * x.cols + h * x_dim,
                            std::size_t(in) * sizeof(float));
    });
    for (std::int64_t h = 0; h < n; h++) {
        projections_[std::size_t(h)] = {in_stack(op.weight, n, h), {}, none};
        GemmGroup& g                 = gemms_[std::size_t(h)];
        g.x                          = {inputs + h * T * in, T, in, DType::F32};
        g.outputs[0]                 = {&projections_[std::size_t(h)], {outputs + h * T * rows, T, rows, DType::F32}};
        g.n_outputs                  = 1;
    }
    gemm(gemms_);
    split(n, 1, [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t h = first; h < last; h++)
            for (std::int64_t t = 0; t < T; t++) {
                float* to = floats(out) + t * out.cols + h * out_dim;
                std::memcpy(to, outputs + (h * T + t) * rows, std::size_t(rows) * sizeof(float));
                std::memcpy(to + rows, floats(x) + t * x.cols + h * x_dim + in,
                            std::size_t(x_dim - in) * sizeof(float));
            }
    });
}

// -- experts

void CpuBackend::execute(const Route& op) {
    const Tensor       x = at(op.x), out = at(op.out);
    const std::int64_t n = op.weight.rows, k = op.n_used;
    const Tensor       scores{grown(scores_, std::size_t(x.rows * n)), x.rows, n, DType::F32};
    const Projection   router{op.weight, op.bias, none};
    gemm(x, std::array{Output{&router, scores}});
    split(x.rows, 16, [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t t = first; t < last; t++)
            route(op, floats(scores) + t * n, reinterpret_cast<std::int32_t*>(floats(out) + t * 2 * k),
                  floats(out) + t * 2 * k + k);
    });
}

// The rows of a step in the order of the experts that they chose, and within one in their own.
void CpuBackend::group_by_expert(const Tensor& routes, int n_experts, int n_used) {
    const std::int64_t n    = routes.rows * n_used;
    const auto         each = [&](auto&& body) { // (token, slot) by (token, slot)
        for (std::int64_t i = 0; i < n; i++)
            body(i, reinterpret_cast<const std::int32_t*>(floats(routes) + i / n_used * 2 * n_used)[i % n_used]);
    };
    expert_begin_.assign(std::size_t(n_experts) + 1, 0);
    row_token_.resize(std::size_t(n));
    slot_row_.resize(std::size_t(n));
    each([&](std::int64_t, std::int32_t expert) { expert_begin_[std::size_t(expert) + 1]++; });
    for (std::size_t e = 0; e < std::size_t(n_experts); e++) expert_begin_[e + 1] += expert_begin_[e];
    each([&](std::int64_t i, std::int32_t expert) {
        const std::int32_t row       = expert_begin_[std::size_t(expert)]++;
        row_token_[std::size_t(row)] = std::int32_t(i / n_used);
        slot_row_[std::size_t(i)]    = row;
    });
    for (auto e = std::size_t(n_experts); e > 0; e--)
        expert_begin_[e] = expert_begin_[e - 1]; // the loop moved each to the next
    expert_begin_[0] = 0;
}

void CpuBackend::execute(const ExpertGatedGemm& op) {
    const Tensor       x = at(op.x), gate = at(op.gate.out), up = at(op.up.out);
    const std::int64_t hidden = x.cols, ff = op.gate.weight.rows / op.n_experts;
    group_by_expert(at(op.routes), op.n_experts, op.n_used);
    const auto rows   = std::int64_t(row_token_.size());
    float*     inputs = grown(gathered_, std::size_t(rows * hidden));
    split(rows, 16, [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t r = first; r < last; r++)
            std::memcpy(inputs + r * hidden, floats(x) + row_token_[std::size_t(r)] * hidden,
                        std::size_t(hidden) * sizeof(float));
    });
    gemms_.clear();
    projections_.resize(std::size_t(op.n_experts) * 2);
    for (int e = 0; e < op.n_experts; e++) {
        const std::int64_t first = expert_begin_[std::size_t(e)], n = expert_begin_[std::size_t(e) + 1] - first;
        if (n == 0) continue;
        GemmGroup& g = gemms_.emplace_back();
        g.x          = {inputs + first * hidden, n, hidden, DType::F32};
        g.n_outputs  = 2;
        for (std::size_t i = 0; i < 2; i++) {
            const Projection& p    = i == 0 ? op.gate : op.up;
            Projection&       mine = projections_[std::size_t(e) * 2 + i];
            mine = {in_stack(p.weight, op.n_experts, e), p.bias ? in_stack(p.bias, op.n_experts, e) : TensorView(),
                    none};
            g.outputs[i] = {&mine, {floats(i == 0 ? gate : up) + first * ff, n, ff, DType::F32}};
        }
    }
    gemm(gemms_);
    activate(op.activation, {gate.data, rows, ff, DType::F32}, floats(up));
}

void CpuBackend::execute(const ExpertCombineGemm& op) {
    const Tensor       x = at(op.x), routes = at(op.routes), out = at(op.down.out);
    const std::int64_t hidden = out.cols, ff = op.down.weight.cols, k = op.n_used;
    float*             parts = grown(expert_out_, std::size_t(out.rows * k * hidden));
    gemms_.clear();
    projections_.resize(std::size_t(op.n_experts));
    for (int e = 0; e < op.n_experts; e++) {
        const std::int64_t first = expert_begin_[std::size_t(e)], n = expert_begin_[std::size_t(e) + 1] - first;
        if (n == 0) continue;
        Projection& mine = projections_[std::size_t(e)];
        mine             = {in_stack(op.down.weight, op.n_experts, e),
                op.down.bias ? in_stack(op.down.bias, op.n_experts, e) : TensorView(), none};
        GemmGroup& g     = gemms_.emplace_back();
        g.x              = {floats(x) + first * ff, n, ff, DType::F32};
        g.outputs[0]     = {&mine, {parts + first * hidden, n, hidden, DType::F32}};
        g.n_outputs      = 1;
    }
    gemm(gemms_);
    split(out.rows, std::max<std::int64_t>(1, 8192 / (hidden * k)), [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t t = first; t < last; t++) {
            const float* weights = floats(routes) + t * 2 * k + k;
            float*       to      = floats(out) + t * hidden;
            for (std::int64_t s = 0; s < k; s++) {
                const float* part = parts + slot_row_[std::size_t(t * k + s)] * hidden;
                for (std::int64_t i = 0; i < hidden; i++) {
                    const float term = weights[s] * part[i];
                    to[i]            = s == 0 ? term : to[i] + term;
                }
            }
        }
    });
    if (op.scale != 1) multiply(out, op.scale);
}

void CpuBackend::execute(const GateRows& op) {
    const Tensor x = at(op.x), gate = at(op.gate);
    const auto*  w = static_cast<const float*>(op.weight.data);
    split(x.rows, 16, [&](std::int64_t first, std::int64_t last) {
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
    split(x.rows * x.cols, 8192,
          [&](std::int64_t first, std::int64_t last) { kernels_.softcap(floats(x) + first, op.cap, last - first); });
}

// A few hundred rows at a time, so that `up` takes no more memory than these.
void CpuBackend::execute(const GatedGemm& op) {
    constexpr std::int64_t at_once = 256;
    const Tensor           x = at(op.x), gate = at(op.gate.out), up = at(op.up.out);
    for (std::int64_t first = 0; first < x.rows; first += at_once) {
        const std::int64_t n = std::min(at_once, x.rows - first);
        const auto   rows    = [&](const Tensor& t) { return Tensor{floats(t) + first * t.cols, n, t.cols, t.type}; };
        const Tensor out     = rows(gate), other{up.data, n, up.cols, up.type};
        gemm(rows(x), std::array{Output{&op.gate, out}, Output{&op.up, other}});
        activate(op.activation, out, floats(other));
    }
}

void CpuBackend::execute(const RopeAndStore& op) {
    const Tensor   q = at(op.q), k = at(op.k), v = at(op.v);
    const Rope&    rope  = op.rope;
    const KvLayer& cache = layers_[std::size_t(op.layer)];
    const auto&    slots = plan_->groups[std::size_t(cache.group)].parts[std::size_t(cache.part)].slots;
    const int      half = int(rope.inv_freq.size()), D = cache.head_dim, K = cache.n_kv_heads;
    const auto     k_dim = int(k.cols / K), v_dim = int(v.cols / K);
    check(cache.latent() ? K == 1 && v_dim + k_dim == D : k_dim == D && v_dim == D, "rope_and_store: shapes");
    const int  i_step = rope.neox ? 1 : 2, partner = rope.neox ? half : 1;
    const auto T = q.rows;
    if (angles_of_ != rope.inv_freq.data() ||
        angles_scale_ != rope.scale) { // layers with the same frequencies share them
        angles_of_    = rope.inv_freq.data();
        angles_scale_ = rope.scale;
        angles_.resize(std::size_t(T) * std::size_t(half) * 2);
        split(T, 16, [&](std::int64_t first, std::int64_t last) {
            for (std::int64_t t = first; t < last; t++)
                for (int i = 0; i < half; i++) {
                    const float angle = float(plan_->positions[std::size_t(t)]) * rope.inv_freq[std::size_t(i)];
                    float*      pair  = angles_.data() + (t * half + i) * 2;
                    pair[0]           = std::cos(angle) * rope.scale;
                    pair[1]           = std::sin(angle) * rope.scale;
                }
        });
    }
    split(T, std::max<std::int64_t>(1, 4096 / q.cols), [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t t = first; t < last; t++) {
            const float* angles = angles_.data() + t * half * 2;
            for (const auto& [x, dim, start] : {std::tuple(&q, op.q_dim, op.q_first), std::tuple(&k, k_dim, 0)})
                for (float *head = floats(*x) + t * x->cols + start, *end = floats(*x) + (t + 1) * x->cols; head < end;
                     head += dim)
                    for (int i = 0; i < half; i++) {
                        const float c = angles[2 * i], s = angles[2 * i + 1];
                        float &     a = head[i * i_step], &b = head[i * i_step + partner];
                        const float rotated = a * c - b * s;
                        b                   = a * s + b * c;
                        a                   = rotated;
                    }
            const int         slot     = slots[std::size_t(t)];
            const std::size_t row      = row_bytes(cache.type, D);
            const std::size_t in_block = std::size_t(slot % cache.block_size);
            const auto        store    = [&](const Tensor& from, int h, int dim, void* array, int first) {
                std::byte* to =
                    static_cast<std::byte*>(array) + std::size_t(slot / cache.block_size) * cache.block_bytes() +
                    (std::size_t(h) * std::size_t(cache.block_size) + in_block) * row + row_bytes(cache.type, first);
                const float* x = floats(from) + t * from.cols + h * dim;
                if (cache.type == DType::F16) kernels_.store_f16(x, reinterpret_cast<std::uint16_t*>(to), dim);
                else std::memcpy(to, x, row_bytes(cache.type, dim));
            };
            for (int h = 0; h < K; h++) {
                store(k, h, k_dim, cache.k, cache.latent() ? v_dim : 0);
                store(v, h, v_dim, cache.latent() ? cache.k : cache.v, 0);
            }
        }
    });
}

void CpuBackend::execute(const Attention& params) {
    const Tensor      q = at(params.q), out = at(params.out);
    const KvLayer&    cache = layers_[std::size_t(params.layer)];
    const int         K = cache.n_kv_heads, group = params.n_heads / K, D = cache.head_dim, Dv = cache.value_dim;
    const GroupPlan&  tables     = plan_->groups[std::size_t(cache.group)];
    const std::size_t head_bytes = std::size_t(cache.block_size) * row_bytes(cache.type, D);
    std::int64_t      work       = 0; // multiply-adds of q·k and of the weighted sum
    for (std::int32_t length : plan_->context_lens) work += 2 * std::int64_t(length) * params.n_heads * D;
    const auto task_of = [&](int item, std::array<AttentionPart, group_size>& parts) {
        const TileGroup& tiles  = groups_[std::size_t(item / K)];
        const int        h      = item % K;
        int              shared = tiles.shared_blocks * cache.block_size;
        for (int i = 0; i < tiles.n; i++) {
            const QueryTile& tile = tiles_[std::size_t(tiles.first) + std::size_t(i)];
            AttentionPart&   part = parts[std::size_t(i)];
            part                  = {floats(q) + tile.first_row * q.cols + std::int64_t(h) * group * D,
                                     floats(out) + tile.first_row * out.cols + std::int64_t(h) * group * Dv,
                                     tile.n_rows,
                                     plan_->positions[std::size_t(tile.first_row)],
                                     tables.parts[std::size_t(cache.part)].tables.data() + tables.origin(std::size_t(tile.sequence)),
                    params.causal ? -1 : plan_->context_lens[std::size_t(tile.sequence)] - 1};
            shared                = std::min(shared, part.first_position + 1);
        }
        AttentionTask task;
        task.parts      = std::span(parts).first(std::size_t(tiles.n));
        task.shared     = params.window > 0 || cache.group > 0 ? 0 : shared / attention_chunk * attention_chunk;
        task.q_stride   = q.cols;
        task.out_stride = out.cols;
        task.n_heads    = group;
        task.head_dim   = D;
        task.value_dim  = Dv;
        task.window     = params.window;
        task.scale      = params.scale;
        task.softcap    = params.softcap;
        task.sinks      = params.sinks ? static_cast<const float*>(params.sinks.data) + h * group : nullptr;
        task.k          = static_cast<const std::byte*>(cache.k) + std::size_t(h) * head_bytes;
        task.v = cache.latent() ? task.k : static_cast<const std::byte*>(cache.v) + std::size_t(h) * head_bytes;
        task.block_stride = cache.block_bytes();
        task.block_size   = cache.block_size;
        task.kv_type      = cache.type;
        return task;
    };
    const auto one_head = [&](int item, int thread) {
        std::array<AttentionPart, group_size> parts;
        AttentionTask                         task      = task_of(item, parts);
        int                                   n_queries = 0;
        for (const AttentionPart& part : task.parts) n_queries += part.n_tokens * group;
        task.scratch = scratch(thread, attention_scratch(n_queries, D));
        kernels_.attention(task);
    };
    // All threads work on one kv head of a token: on its chunks, then on the columns of V.
    const auto split_head = [&](int item) {
        constexpr int                         columns = 32;
        std::array<AttentionPart, group_size> parts;
        const AttentionTask                   task = task_of(item, parts);
        SplitAttention                        pass;
        pass.n_chunks       = attention_chunks(parts[0].first_position, params.window);
        const std::size_t n = std::size_t(group) * std::size_t(pass.n_chunks);
        pass.scores         = grown(split_, split_attention_floats(group, pass.n_chunks));
        pass.highest        = pass.scores + n * attention_chunk;
        pass.sums           = pass.highest + n;
        pass.rescale        = pass.sums + n;
        const int  grain    = std::max((pass.n_chunks + 4 * pool_.n_threads() - 1) / (4 * pool_.n_threads()), 1);
        const auto passes   = [&](auto kernel, int size, int piece) {
            pool_.run((size + piece - 1) / piece, [&](int i, int thread) {
                AttentionTask own = task;
                own.scratch       = scratch(thread, attention_scratch(group, D));
                kernel(own, pass, i * piece, std::min((i + 1) * piece, size));
            });
        };
        passes(kernels_.attention_scores, pass.n_chunks, grain);
        passes(kernels_.attention_weights, pass.n_chunks, grain);
        passes(kernels_.attention_values, Dv, Dv >= columns * pool_.n_threads() ? columns : 16);
    };
    const int  items = int(groups_.size()) * K;
    const bool splits =
        items < pool_.n_threads() && params.causal && work >= worth_split * items &&
        std::ranges::all_of(
            groups_, [&](const TileGroup& g) { return g.n == 1 && tiles_[std::size_t(g.first)].n_rows == 1; });
    if (splits) {
        for (int item = 0; item < items; item++) split_head(item);
    } else if (work < worth_threads && int(tiles_.size()) == plan_->n_seqs()) {
        for (int item = 0; item < items; item++) one_head(item, 0);
    } else {
        pool_.run(items, one_head);
    }
}

void CpuBackend::activate(Activation activation, Tensor gate, const float* up) {
    split(gate.rows * gate.cols, 8192, [&](std::int64_t first, std::int64_t last) {
        kernels_.activate(activation, floats(gate) + first, up ? up + first : nullptr, last - first);
    });
}

void CpuBackend::execute(const Activate& op) { activate(op.activation, at(op.x), nullptr); }

void CpuBackend::execute(const Add& op) {
    const Tensor x = at(op.residual), y = at(op.x);
    split(x.rows * x.cols, 65536, [&](std::int64_t first, std::int64_t last) {
        kernels_.add(floats(x) + first, floats(y) + first, last - first);
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
    split((n + chunk - 1) / chunk, 16, [&](std::int64_t first, std::int64_t last) {
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
    const Tensor x = at(op.x), out = at(op.out);
    check(op.first + out.cols <= x.cols, "take_columns: shapes");
    split(x.rows, std::max<std::int64_t>(1, 65536 / out.cols), [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t t = first; t < last; t++)
            std::memcpy(floats(out) + t * out.cols, floats(x) + t * x.cols + op.first,
                        std::size_t(out.cols) * sizeof(float));
    });
}

void CpuBackend::copy_blocks(std::span<const BlockCopy> copies, std::span<const KvLayer> from,
                             std::span<const KvLayer> to) {
    if (copies.empty()) return;
    check(from.size() == to.size(), "copy_blocks: pools of different models");
    pool_.run(int(from.size()), [&](int item, int) {
        const KvLayer &   source = from[std::size_t(item)], &target = to[std::size_t(item)];
        const std::size_t bytes = source.block_bytes();
        for (auto [read, write] : {std::pair(source.k, target.k), std::pair(source.v, target.v)})
            for (const BlockCopy& copy : write ? copies : copies.first(0))
                std::memcpy(static_cast<std::byte*>(write) + std::size_t(copy.to) * bytes,
                            static_cast<std::byte*>(read) + std::size_t(copy.from) * bytes, bytes);
    });
}

} // namespace quire
