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
import quire.compute.memory;
import quire.compute.program;
import quire.core.base;
import quire.core.std;
import quire.core.tensor;
import quire.core.thread_pool;
import quire.model_file.quants;
import quire.paging.block;
import quire.schedule.step_plan;

export namespace quire {

// threads 0: the physical cores. isa "": the widest there is; "plain", "avx2", "avxvnni", "avx512": that one, or an error.
Result<std::unique_ptr<Backend>> make_cpu_backend(int threads, std::string_view isa = "");

} // namespace quire

module :private;

namespace quire {

// Addresses of a file's pages.
struct MappedPages {
    std::uintptr_t begin = 0, end = 0;
};

class CpuBackend final : public Backend {
public:
    CpuBackend(int threads, const CpuKernels& kernels) : kernels_(kernels), pool_(threads) {
        scratch_.resize(std::size_t(pool_.n_threads()));
    }

    std::string describe() const override {
        return cat("cpu, ", kernels_.name, ", ", pool_.n_threads(), pool_.n_threads() == 1 ? " thread" : " threads");
    }

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
    DType        activation_type() const override { return DType::F32; }
    Result<void> prepare_steps(const StepLimits&) override {
        copies_.settle();
        return {};
    }
    Result<TensorView>     prepare(const TensorView& weight) override;
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

    struct QueryTile {
        int sequence, first_row, n_rows;
    };
    // Neighbours in tiles_, worked on together: their sequences begin with the same blocks.
    struct TileGroup {
        int first, n, shared_blocks;
    };
    static constexpr int group_size = 16; // tiles whose sums stay in the caches

    void begin_step(const StepPlan& plan);
    void group_tiles();

    // The operations (quire.compute.program), with their values in this step.
    Tensor at(ValueId id) const { return values_->at(id, shape_); }
    void   execute(const Embed& op);
    void   execute(const Norm& op);
    void   execute(const Gemm& op);
    void   execute(const GatedGemm& op);
    void   execute(const Activate& op);
    void   execute(const RopeAndStore& op);
    void   execute(const Attention& op);
    void   execute(const Add& op);
    void   execute(const SelectRows& op);
    void   execute(const Argmax&) {} // the host reads the logits

    struct Output { // of one of several GEMMs with the same input
        const Projection* projection;
        Tensor            out;
    };
    void gemm(Tensor x, std::span<const Output> outputs);
    void silu_mul(Tensor gate, Tensor up);

    static float* floats(const Tensor& t) { return static_cast<float*>(t.data); }
    static float* grown(std::vector<float>& memory, std::size_t n);
    float*        scratch(int thread, std::size_t n) { return grown(scratch_[std::size_t(thread)], n); }

    QuantisedRows quantise(const Tensor& x, bool for_wide);
    const float*  pack(const Tensor& x);

    // body(first, last) over pieces of [0, n) of about `grain`, in parallel
    template <class Body>
    void split(std::int64_t n, std::int64_t grain, const Body& body) {
        const int items = int((n + grain - 1) / grain);
        pool_.run(items, [&](int item, int) { body(item * grain, std::min(n, (item + 1) * grain)); });
    }

    const CpuKernels&               kernels_;
    ThreadPool                      pool_;
    std::size_t                     taken_ = 0;
    std::vector<std::vector<float>> scratch_;   // per thread; grows to its largest use in the first steps
    std::vector<float>              quantised_; // the activations of the current GEMM: int16-quantised
    std::vector<float>              packed_;    // and as packed panels
    std::vector<std::vector<float>> vectors_;   // copies of the weights that are vectors
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

Result<std::unique_ptr<Backend>> make_cpu_backend(int threads, std::string_view isa) {
    const CpuKernels* kernels = cpu_kernels(isa);
    if (!kernels)
        return fail("instruction set ", quote(isa),
                    " is not one of plain, avx2, avxvnni, avx512, or this machine lacks it");
    return std::make_unique<CpuBackend>(threads > 0 ? threads : physical_cores(), *kernels);
}

Result<Buffer> CpuBackend::allocate(std::size_t bytes) {
    Result<Buffer> buffer = fresh_memory(bytes);
    if (buffer) taken_ += buffer->bytes();
    return buffer;
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
        const auto s = std::size_t(tile.sequence);
        return std::span(plan_->block_tables)
            .subspan(std::size_t(plan_->table_start[s]),
                     std::size_t(plan_->table_start[s + 1] - plan_->table_start[s]));
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
    if (positions && position.size() < std::size_t(out.cols)) position.resize(std::size_t(out.cols));
    for (std::int64_t t = 0; t < out.rows; t++) {
        float* to = floats(out) + t * out.cols;
        dequantize(weight.type, row(weight, plan_->tokens[std::size_t(t)]), to, weight.cols);
        if (!positions) continue;
        dequantize(positions.type, row(positions, plan_->positions[std::size_t(t)]), position.data(), positions.cols);
        kernels_.add(to, position.data(), out.cols);
    }
    if (const auto pages = lookups_.find(weight.data); pages != lookups_.end() && out.rows > few_rows)
        give_back(pages->second, weight.data, std::size_t(weight.rows) * row_bytes(weight.type, weight.cols));
}

// Rare enough (GPT-2) to be plain: sums in double, so that their order does not show.
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
    for (std::int64_t i = 0; i < n; i++) out[i] = float((double(x[i]) - mean) * scale) * weight[i] + bias[i];
}

void CpuBackend::execute(const Norm& op) {
    Tensor x = at(op.x), out = at(op.out);
    check(op.weight.cols == op.group && op.weight.type == DType::F32 && x.cols % op.group == 0, "norm: shapes");
    float* residual = op.residual != none ? floats(at(op.residual)) : nullptr;
    x               = {x.data, x.rows * (x.cols / op.group), op.group, x.type}; // a row may be one head
    const auto* w   = static_cast<const float*>(op.weight.data);
    split(x.rows, std::max<std::int64_t>(1, 8192 / x.cols), [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t r = first; r < last; r++) {
            float* sum = residual ? residual + r * x.cols : nullptr;
            if (op.bias)
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
    if (!repacked_at_load(weight.type) || repacked_.contains(weight.data)) return weight;
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

Result<TensorView> CpuBackend::prepare_lookup(const TensorView& weight) {
    lookups_.emplace(weight.data, pages_around(weight.data));
    return weight;
}

QuantisedRows CpuBackend::quantise(const Tensor& x, bool for_wide) {
    const auto        n = std::size_t(x.rows), cols = std::size_t(x.cols);
    const std::size_t tiles = cols / 32;
    QuantisedRows     to;
    to.m = x.rows, to.k = x.cols, to.for_wide = for_wide;
    to.integers = reinterpret_cast<std::int16_t*>(grown(quantised_, n * (cols / 2 + 3 * tiles)));
    to.scales   = reinterpret_cast<float*>(to.integers + n * cols);
    to.sums     = to.scales + n * tiles;
    to.products = reinterpret_cast<std::int32_t*>(to.sums + n * tiles);
    split(x.rows, x.rows > few_rows ? 8 : std::max<std::int64_t>(1, 16384 / x.cols), // eight share lines of memory
          [&](std::int64_t first, std::int64_t last) { kernels_.quantise_rows(floats(x), to, first, last); });
    return to;
}

const float* CpuBackend::pack(const Tensor& x) {
    float* to = grown(packed_, std::size_t(x.rows * x.cols));
    split(kernels_.token_tiles(x.rows), 4, [&](std::int64_t first, std::int64_t last) {
        kernels_.pack_panels(floats(x), x.rows, x.cols, to, first, last);
    });
    return to;
}

void CpuBackend::execute(const Gemm& op) {
    std::array<Output, max_projections> outputs;
    check(op.projections.size() <= outputs.size(), "gemm: more projections than any model has");
    for (std::size_t i = 0; i < op.projections.size(); i++)
        outputs[i] = {&op.projections[i], at(op.projections[i].out)};
    gemm(at(op.x), std::span(outputs).first(op.projections.size()));
}

void CpuBackend::gemm(Tensor x, std::span<const Output> outputs) {
    QuantisedRows quantised;
    const bool    for_wide =
        std::ranges::any_of(outputs, [](const Output& o) { return wide_integers(o.projection->weight.type); });
    const float*                                  packed = nullptr;
    std::array<TensorView, max_projections>       weight;
    std::array<std::int64_t, max_projections + 1> begin{}; // of the groups of 16 rows of each, in one list of them all
    for (std::size_t i = 0; i < outputs.size(); i++) {
        const auto& [projection, out] = outputs[i];
        const TensorView& w           = projection->weight;
        weight[i]                     = w;
        check(x.cols == w.cols && out.cols == w.rows && out.rows == x.rows, "gemm: shapes");
        begin[i + 1] = begin[i] + (w.rows + 15) / 16;
        if (!uses_integer_gemm(w.type)) {
            if (!packed) packed = pack(x);
            continue;
        }
        if (repacked_at_load(w.type)) {
            const auto copy = repacked_.find(w.data);
            check(copy != repacked_.end(), "gemm: a weight that was not prepared");
            weight[i].data = copy->second;
        }
        if (quantised.m == 0) quantised = quantise(x, for_wide);
    }
    const std::int64_t all = begin[outputs.size()], threads = pool_.n_threads();
    const bool         alone = x.rows * all * 16 * x.cols < worth_threads;
    // Many tokens pass over a piece in several goes: it should still be in a cache then.
    const std::int64_t most  = packed              ? 9
                               : x.rows > few_rows ? 8
                                                   : 64;    // 9 · 16 rows are three row blocks of the float GEMM
    const std::int64_t even  = all / (8 * threads) / 2 * 2; // two groups at once cost less than each alone
    const std::int64_t piece = alone ? all : std::clamp<std::int64_t>(even, 1, most);
    pool_.run(int((all + piece - 1) / piece), [&](int item, int thread) {
        const std::int64_t first = item * piece, last = std::min(all, first + piece);
        for (std::size_t i = 0; i < outputs.size(); i++) {
            if (first >= begin[i + 1] || last <= begin[i]) continue;
            const auto& [projection, out] = outputs[i];
            const auto* bias              = static_cast<const float*>(projection->bias.data);
            GemmTask    task{&weight[i], bias, floats(x), &quantised, packed, floats(out), x.rows};
            task.first   = (std::max(first, begin[i]) - begin[i]) * 16;
            task.last    = std::min((std::min(last, begin[i + 1]) - begin[i]) * 16, projection->weight.rows);
            task.scratch = scratch(thread, gemm_scratch);
            kernels_.gemm(task);
        }
    });
}

// A few hundred rows at a time, so that `up` takes no more memory than these.
void CpuBackend::execute(const GatedGemm& op) {
    check(op.activation == Activation::silu, "gated_gemm: an activation this backend does not have");
    constexpr std::int64_t at_once = 256;
    const Tensor           x = at(op.x), gate = at(op.gate.out), up = at(op.up.out);
    for (std::int64_t first = 0; first < x.rows; first += at_once) {
        const std::int64_t n = std::min(at_once, x.rows - first);
        const auto   rows    = [&](const Tensor& t) { return Tensor{floats(t) + first * t.cols, n, t.cols, t.type}; };
        const Tensor out     = rows(gate), other{up.data, n, up.cols, up.type};
        gemm(rows(x), std::array{Output{&op.gate, out}, Output{&op.up, other}});
        silu_mul(out, other);
    }
}

void CpuBackend::execute(const RopeAndStore& op) {
    const Tensor   q = at(op.q), k = at(op.k), v = at(op.v);
    const Rope&    rope  = op.rope;
    const KvLayer& cache = layers_[std::size_t(op.layer)];
    const int      half = int(rope.inv_freq.size()), D = cache.head_dim, K = cache.n_kv_heads;
    const int      i_step = rope.neox ? 1 : 2, partner = rope.neox ? half : 1;
    const auto     T = q.rows;
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
            for (const Tensor* x : {&q, &k})
                for (float *head = floats(*x) + t * x->cols, *end = head + x->cols; head < end; head += D)
                    for (int i = 0; i < half; i++) {
                        const float c = angles[2 * i], s = angles[2 * i + 1];
                        float &     a = head[i * i_step], &b = head[i * i_step + partner];
                        const float rotated = a * c - b * s;
                        b                   = a * s + b * c;
                        a                   = rotated;
                    }
            const int         slot     = plan_->slots[std::size_t(t)];
            const std::size_t row      = row_bytes(cache.type, D);
            const std::size_t in_block = std::size_t(slot % cache.block_size);
            for (int h = 0; h < K; h++) {
                const std::size_t at = std::size_t(slot / cache.block_size) * cache.block_bytes() +
                                       (std::size_t(h) * std::size_t(cache.block_size) + in_block) * row;
                for (auto [tensor, array] : {std::pair(&k, cache.k), std::pair(&v, cache.v)}) {
                    const float* from = floats(*tensor) + t * tensor->cols + h * D;
                    std::byte*   to   = static_cast<std::byte*>(array) + at;
                    if (cache.type == DType::F16) kernels_.store_f16(from, reinterpret_cast<std::uint16_t*>(to), D);
                    else std::memcpy(to, from, row);
                }
            }
        }
    });
}

void CpuBackend::execute(const Attention& params) {
    check(params.softcap == 0, "attention: a soft-cap this backend does not have");
    const Tensor      q = at(params.q), out = at(params.out);
    const KvLayer&    cache = layers_[std::size_t(params.layer)];
    const int         K = cache.n_kv_heads, group = params.n_heads / K, D = cache.head_dim;
    const std::size_t head_bytes = std::size_t(cache.block_size) * row_bytes(cache.type, D);
    std::int64_t      work       = 0; // multiply-adds of q·k and of the weighted sum
    for (std::int32_t length : plan_->context_lens) work += 2 * std::int64_t(length) * params.n_heads * D;
    auto one_head = [&](int item, int thread) {
        const TileGroup&                      tiles = groups_[std::size_t(item / K)];
        const int                             h     = item % K;
        std::array<AttentionPart, group_size> parts;
        int                                   n_queries = 0, shared = tiles.shared_blocks * cache.block_size;
        for (int i = 0; i < tiles.n; i++) {
            const QueryTile& tile  = tiles_[std::size_t(tiles.first) + std::size_t(i)];
            AttentionPart&   part  = parts[std::size_t(i)];
            const auto       place = tile.first_row * q.cols + std::int64_t(h) * group * D;
            part = {floats(q) + place, floats(out) + place, tile.n_rows, plan_->positions[std::size_t(tile.first_row)],
                    plan_->block_tables.data() + plan_->table_start[std::size_t(tile.sequence)]};
            n_queries += tile.n_rows * group;
            shared = std::min(shared, part.first_position + 1);
        }
        AttentionTask task;
        task.parts        = std::span(parts).first(std::size_t(tiles.n));
        task.shared       = params.window > 0 ? 0 : shared / attention_chunk * attention_chunk;
        task.row_stride   = q.cols;
        task.n_heads      = group;
        task.head_dim     = D;
        task.window       = params.window;
        task.scale        = params.scale;
        task.k            = static_cast<const std::byte*>(cache.k) + std::size_t(h) * head_bytes;
        task.v            = static_cast<const std::byte*>(cache.v) + std::size_t(h) * head_bytes;
        task.block_stride = cache.block_bytes();
        task.block_size   = cache.block_size;
        task.kv_type      = cache.type;
        task.scratch      = scratch(thread, attention_scratch(n_queries, D));
        kernels_.attention(task);
    };
    const int items = int(groups_.size()) * K;
    if (work < worth_threads && int(tiles_.size()) == plan_->n_seqs()) {
        for (int item = 0; item < items; item++) one_head(item, 0);
    } else {
        pool_.run(items, one_head);
    }
}

void CpuBackend::silu_mul(Tensor gate, Tensor up) {
    split(gate.rows * gate.cols, 8192, [&](std::int64_t first, std::int64_t last) {
        kernels_.silu_mul(floats(gate) + first, floats(up) + first, last - first);
    });
}

void CpuBackend::execute(const Activate& op) {
    check(op.activation == Activation::gelu_tanh, "activate: an activation this backend does not have");
    const Tensor x = at(op.x);
    split(x.rows * x.cols, 8192, [&](std::int64_t first, std::int64_t last) {
        for (float *v = floats(x) + first, *end = floats(x) + last; v < end; v++)
            *v = 0.5f * *v * (1 + std::tanh(0.7978845608028654f * (*v + 0.044715f * *v * *v * *v)));
    });
}

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

void CpuBackend::copy_blocks(std::span<const BlockCopy> copies, std::span<const KvLayer> from,
                             std::span<const KvLayer> to) {
    if (copies.empty()) return;
    check(from.size() == to.size(), "copy_blocks: pools of different models");
    pool_.run(int(from.size()), [&](int item, int) {
        const KvLayer &   source = from[std::size_t(item)], &target = to[std::size_t(item)];
        const std::size_t bytes = source.block_bytes();
        for (auto [read, write] : {std::pair(source.k, target.k), std::pair(source.v, target.v)})
            for (const BlockCopy& copy : copies)
                std::memcpy(static_cast<std::byte*>(write) + std::size_t(copy.to) * bytes,
                            static_cast<std::byte*>(read) + std::size_t(copy.from) * bytes, bytes);
    });
}

} // namespace quire
