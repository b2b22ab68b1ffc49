// bench kernel: single GPU kernels: bytes or operations over the time of a launch. Weights and caches are larger than the L2.
#include "../../cuda/kernels.h"

import quire.core.base;
import quire.core.std;
import quire.core.tensor;

#include "commands.h"

namespace quire::bench {

namespace {

class Gpu {
public:
    Gpu() {
        const char* why = nullptr;
        context_        = cuda::create_context(0, why);
        check(context_ != nullptr, cat("no GPU to measure on: ", why != nullptr ? why : ""));
        cuda::open_cublaslt(*context_);
        cuda::prepare_layer_kernel(*context_);
        begin_ = cuda::create_event(), end_ = cuda::create_event();
    }
    Gpu(const Gpu&)            = delete;
    Gpu& operator=(const Gpu&) = delete;
    ~Gpu() {
        clear();
        cuda::destroy_event(begin_), cuda::destroy_event(end_);
        cuda::destroy_context(context_);
    }
    cuda::Context& context() { return *context_; }
    // Random fp16 values with a standard deviation of 1/70.
    void* fp16(std::size_t n) {
        static const std::vector<std::uint16_t> pattern = [] {
            std::vector<std::uint16_t>      made((std::size_t(4) << 20) | 1);
            std::mt19937                    random(1);
            std::normal_distribution<float> normal(0, 1.0f / 70);
            for (auto& h : made) h = f32_to_f16(normal(random));
            return made;
        }();
        auto* to = static_cast<std::uint16_t*>(cuda::allocate(*context_, n * 2));
        check(to != nullptr, "the GPU's memory is full");
        for (std::size_t at = 0; at < n; at += pattern.size())
            cuda::upload(to + at, pattern.data(), std::min(pattern.size(), n - at) * 2, *context_);
        return memory_.emplace_back(to);
    }
    void* ints(const std::vector<std::int32_t>& values) {
        void* to = cuda::allocate(*context_, values.size() * 4);
        cuda::upload(to, values.data(), values.size() * 4, *context_);
        return memory_.emplace_back(to);
    }
    void* zeros(std::size_t bytes) { return memory_.emplace_back(cuda::allocate(*context_, bytes)); }
    void  clear() {
        for (void* m : memory_) cuda::release(m);
        memory_.clear();
    }
    // Median seconds of one launch; `launch` gets the number of the repetition.
    double seconds(const std::function<void(int)>& launch, int each = 10) {
        std::vector<double> samples;
        for (int i = 0; i < 3; i++) launch(i);
        for (int round = 0; round < 9; round++) {
            cuda::record_event(begin_, *context_);
            for (int i = 0; i < each; i++) launch(round * each + i);
            cuda::record_event(end_, *context_);
            samples.push_back(cuda::seconds_between(begin_, end_) / each);
        }
        if (const char* error = cuda::last_error(*context_)) std::fprintf(stderr, "bench: CUDA: %s\n", error);
        std::sort(samples.begin(), samples.end());
        return samples[samples.size() / 2];
    }

private:
    cuda::Context*     context_;
    void *             begin_, *end_;
    std::vector<void*> memory_;
};

void kernel_line(const std::string& kernel, const std::string& shape, double seconds, double bytes, double flop,
                 const Arguments& a) {
    const double of = std::max(bytes / seconds / ((a.bandwidth > 0 ? a.bandwidth : 4300) * 1e9),
                               flop / seconds / ((a.tflops > 0 ? a.tflops : 790) * 1e12));
    std::printf("| %-18s | %-28s | %9.1f | %6.2f | %7.1f | %5.0f %% |\n", kernel.c_str(), shape.c_str(), seconds * 1e6,
                bytes / seconds / 1e12, flop / seconds / 1e12, 100 * of);
    std::fflush(stdout);
}

constexpr int D = 128, block = 16; // head_dim, and tokens in a KV block

// Whether --only asks for a kernel of one of these names, or for all.
bool wanted(const Arguments& a, std::initializer_list<std::string_view> names) {
    return std::ranges::any_of(names, [&](std::string_view name) { return name.starts_with(a.only); });
}

// GEMV, skinny GEMM and cuBLASLt on the matrices of the 13 B shape, a few tokens at once.
void small_gemms(Gpu& gpu, const Arguments& a) {
    struct Matrix {
        int rows, cols;
    };
    for (const auto& [form, name, bits] :
         {std::tuple(cuda::WeightForm::f16, "f16", 16.0), std::tuple(cuda::WeightForm::i8, "q8_0", 8.5),
          std::tuple(cuda::WeightForm::q4_k, "q4_k", 4.5)})
        for (auto [rows, cols] :
             {Matrix{5120, 5120}, Matrix{15360, 5120}, Matrix{13824, 5120}, Matrix{5120, 13824}, Matrix{32000, 5120}})
            for (int n : {1, 2, 4, 8, 16, 32, 64}) {
                if (n > 1 && rows != 13824 && (rows != 5120 || n == 2 || n == 4)) continue;
                if (!wanted(a, {"gemv", "skinny GEMM", "cuBLASLt"}) || (a.only == "gemv" && n > cuda::max_gemv_rows))
                    continue;
                const double              bytes  = double(rows) * cols * bits / 8;
                const int                 copies = std::max(1, int(400e6 / bytes)); // more than the L2 holds
                cuda::Weight              w;
                std::vector<cuda::Weight> all;
                for (int i = 0; i < copies; i++) {
                    w.form = form, w.rows = rows, w.cols = cols;
                    w.data = gpu.fp16(std::size_t(bytes / 2) + 64);
                    w.scales =
                        form == cuda::WeightForm::i8 ? gpu.fp16(std::size_t(rows) * std::size_t(cols) / 32) : nullptr;
                    all.push_back(w);
                }
                auto *x         = static_cast<cuda::Half*>(gpu.fp16(std::size_t(64) * std::size_t(cols))),
                     *out       = static_cast<cuda::Half*>(gpu.fp16(std::size_t(64) * std::size_t(rows)));
                const auto line = [&](const char* kernel, const auto& multiply) {
                    if (!std::string_view(kernel).starts_with(a.only)) return;
                    const double s = gpu.seconds([&](int i) { multiply(all[std::size_t(i % copies)]); });
                    kernel_line(cat(kernel, " ", name), cat(n, " × ", cols, " → ", rows), s, bytes,
                                2.0 * n * double(rows) * double(cols), a);
                };
                const auto project = [&](const cuda::Weight& weight, auto multiply) {
                    const cuda::Projection p{weight, nullptr, out, false};
                    multiply(&p);
                };
                if (n <= cuda::max_gemv_rows)
                    line("gemv", [&](const cuda::Weight& weight) {
                        project(weight,
                                [&](const cuda::Projection* p) { cuda::gemv(x, n, cols, p, 1, false, gpu.context()); });
                    });
                if (n > 1)
                    line("skinny GEMM", [&](const cuda::Weight& weight) {
                        project(weight,
                                [&](const cuda::Projection* p) { cuda::skinny_gemm(x, n, cols, p, 1, gpu.context()); });
                    });
                if (n > 4 && form == cuda::WeightForm::f16) {
                    const cuda::CublasltShape shape{rows, cols};
                    const auto                values = [](const cuda::Weight& weight) {
                        return static_cast<const cuda::Half*>(weight.data);
                    };
                    cuda::tune_cublaslt(shape, values(w), n, n, gpu.context());
                    line("cuBLASLt", [&](const cuda::Weight& weight) {
                        cuda::cublaslt_gemm(x, n, values(weight), shape, out, gpu.context());
                    });
                }
                gpu.clear();
            }
}

// Seconds of split-KV attention of S decoding sequences with a context of L, in blocks of `size` tokens.
double decode_seconds(Gpu& gpu, int S, int L, int H, int K, int size) {
    const int                 per = (L + size - 1) / size;
    std::vector<std::int32_t> table, starts, positions, items, short_items;
    std::mt19937              random(3);
    for (int i = 0; i < S * per; i++) table.push_back(i);
    std::shuffle(table.begin(), table.end(), random);
    for (int s = 0; s < S; s++) {
        starts.push_back(s * per);
        positions.push_back(L - 1);
        const auto lengths = cuda::split_lengths(gpu.context(), D, D, std::int64_t(S) * L * K);
        const auto cut     = [&](int most, std::vector<std::int32_t>& to) {
            const auto [splits, length] = cuda::splits_of(L, most);
            for (int c = 0; c < splits; c++)
                to.insert(to.end(), {s, s * per, c * length, std::min(L, (c + 1) * length), splits, c, 0});
        };
        cut(lengths.length, items);
        if (lengths.short_length > 0) cut(lengths.short_length, short_items);
    }
    const int n_items = int(items.size() / 7);
    items.insert(items.end(), short_items.begin(), short_items.end());
    cuda::Plan plan;
    plan.block_tables = static_cast<std::int32_t*>(gpu.ints(table));
    plan.table_start  = static_cast<std::int32_t*>(gpu.ints(starts));
    plan.positions    = static_cast<std::int32_t*>(gpu.ints(positions));
    plan.items        = {static_cast<cuda::SplitKvItem*>(gpu.ints(items)), n_items, int(short_items.size() / 7)};
    const std::size_t            n      = std::size_t(S) * std::size_t(per) * std::size_t(size) * std::size_t(K) * D;
    const int                    copies = std::max(1, int(400e6 / (double(n) * 4)));
    std::vector<cuda::Attention> all;
    for (int i = 0; i < copies; i++) {
        cuda::Attention t;
        t.q       = static_cast<cuda::Half*>(gpu.fp16(std::size_t(S) * std::size_t(H) * D));
        t.out     = static_cast<cuda::Half*>(gpu.zeros(std::size_t(S) * std::size_t(H) * D * 2));
        t.cache_k = static_cast<cuda::Half*>(gpu.fp16(n));
        t.cache_v = static_cast<cuda::Half*>(gpu.fp16(n));
        t.n_heads = H, t.n_kv_heads = K, t.head_dim = t.value_dim = D, t.block_size = size, t.scale = 0.088f;
        all.push_back(t);
    }
    auto*        partial  = static_cast<float*>(gpu.zeros(items.size() / 7 * std::size_t(H) * (D + 2) * 4));
    auto*        counters = static_cast<std::int32_t*>(gpu.zeros(std::size_t(S) * std::size_t(H) * 4));
    const double seconds  = gpu.seconds(
        [&](int i) { cuda::attention_decode(all[std::size_t(i % copies)], plan, partial, counters, gpu.context()); });
    gpu.clear();
    return seconds;
}

// Over a paged cache and over a contiguous one.
void decode_attention(Gpu& gpu, const Arguments& a) {
    struct Shape {
        int sequences, context, heads, kv_heads;
    };
    for (auto [S, L, H, K] :
         {Shape{1, 4096, 40, 40}, Shape{1, 16384, 40, 40}, Shape{8, 1024, 40, 40}, Shape{32, 1024, 40, 40},
          Shape{64, 512, 40, 40}, Shape{128, 1024, 40, 40}, Shape{8, 4096, 32, 8}, Shape{64, 2048, 32, 8},
          Shape{128, 4096, 32, 8}, Shape{256, 1024, 32, 8}})
        for (int size : {block, L}) { // paged; and contiguous, as one block a sequence
            if (!wanted(a, {"decode"})) continue;
            kernel_line(size == block ? "decode paged 16" : "decode contiguous",
                        cat(S, " × ", L, ", heads ", H, "/", K), decode_seconds(gpu, S, L, H, K, size),
                        double(S) * L * K * D * 4, 0, a);
        }
}

// Causal attention of one prompt.
void prefill_attention(Gpu& gpu, const Arguments& a) {
    for (int L : {2048, 8192}) {
        if (!wanted(a, {"prefill attention"})) continue;
        const int                 H = 40;
        std::vector<std::int32_t> table, positions, tiles;
        for (int i = 0; i < L / block; i++) table.push_back(i);
        for (int i = 0; i < L; i++) positions.push_back(i);
        const int tile = cuda::prefill_tile(gpu.context(), D, D);
        for (int row = 0; row < L; row += tile) tiles.insert(tiles.end(), {0, row, std::min(tile, L - row)});
        cuda::Plan plan;
        plan.block_tables      = static_cast<std::int32_t*>(gpu.ints(table));
        plan.table_start       = static_cast<std::int32_t*>(gpu.ints({0}));
        plan.positions         = static_cast<std::int32_t*>(gpu.ints(positions));
        const auto*       list = static_cast<cuda::PrefillTile*>(gpu.ints(tiles));
        const std::size_t n    = std::size_t(L) * H * D;
        cuda::Attention   t;
        t.q = static_cast<cuda::Half*>(gpu.fp16(n)), t.cache_k = static_cast<cuda::Half*>(gpu.fp16(n));
        t.cache_v = static_cast<cuda::Half*>(gpu.fp16(n)), t.out = static_cast<cuda::Half*>(gpu.zeros(n * 2));
        t.n_heads = t.n_kv_heads = H, t.head_dim = t.value_dim = D, t.block_size = block, t.scale = 0.088f;
        const double s =
            gpu.seconds([&](int) { cuda::attention_prefill(t, plan, list, int(tiles.size() / 3), gpu.context()); });
        kernel_line("prefill attention", cat(L, ", heads ", H), s, 0, 2.0 * L * L * H * D, a);
        gpu.clear();
    }
}

// Attention over a latent cache of the shape of DeepSeek-V2 (rows of 576, of which 512 are the value), decoding and of a prompt, and
// the GEMMs of its heads.
void latent_attention(Gpu& gpu, const Arguments& a) {
    constexpr int row = 576, value = 512, L = 4096, most = 64;
    for (int H : {16, 128}) {
        const double flop = 2.0 * H * (row + value); // of a query and a position
        for (int S : {1, 8, most}) {
            if (!wanted(a, {"latent decode"})) continue;
            std::vector<std::int32_t> table, items;
            for (int i = 0; i < S * L / block; i++) table.push_back(i);
            const auto [n, length] =
                cuda::splits_of(L, cuda::split_lengths(gpu.context(), row, value, std::int64_t(S) * L).length);
            for (int s = 0; s < S; s++)
                for (int c = 0; c < n; c++)
                    items.insert(items.end(), {s, s * L / block, c * length, std::min(L, (c + 1) * length), n, c, 0});
            cuda::Plan plan;
            plan.block_tables                   = static_cast<std::int32_t*>(gpu.ints(table));
            plan.items                          = {static_cast<cuda::SplitKvItem*>(gpu.ints(items)), S * n, 0};
            const double                 bytes  = double(S) * L * row * 2;
            const int                    copies = std::max(1, int(200e6 / bytes));
            std::vector<cuda::Attention> all;
            for (int i = 0; i < copies; i++) {
                cuda::Attention t;
                t.q       = static_cast<cuda::Half*>(gpu.fp16(std::size_t(S * H * row)));
                t.out     = static_cast<cuda::Half*>(gpu.zeros(std::size_t(S * H * value) * 2));
                t.cache_k = static_cast<cuda::Half*>(gpu.fp16(std::size_t(S) * L * row));
                t.n_heads = H, t.n_kv_heads = 1, t.head_dim = row, t.value_dim = value, t.block_size = block;
                t.scale = 0.07f;
                all.push_back(t);
            }
            auto*        partial  = static_cast<float*>(gpu.zeros(std::size_t(S * n * H) * (value + 2) * 4));
            auto*        counters = static_cast<std::int32_t*>(gpu.zeros(std::size_t(S * H) * 4));
            const double s        = gpu.seconds([&](int i) {
                cuda::attention_decode(all[std::size_t(i % copies)], plan, partial, counters, gpu.context());
            });
            kernel_line("latent decode", cat(S, " × ", L, ", heads ", H), s, bytes, flop * S * L, a);
            gpu.clear();
        }
        if (wanted(a, {"latent prefill"})) {
            constexpr int             T = 2048;
            std::vector<std::int32_t> table(T / block), positions(T), tiles;
            std::iota(table.begin(), table.end(), 0);
            std::iota(positions.begin(), positions.end(), 0);
            const int tile = std::max(cuda::prefill_tile(gpu.context(), row, value), 1);
            for (int first = 0; first < T; first += tile)
                tiles.insert(tiles.end(), {0, first, std::min(tile, T - first)});
            cuda::Plan plan;
            plan.block_tables    = static_cast<std::int32_t*>(gpu.ints(table));
            plan.table_start     = static_cast<std::int32_t*>(gpu.ints({0}));
            plan.positions       = static_cast<std::int32_t*>(gpu.ints(positions));
            const auto*     list = static_cast<cuda::PrefillTile*>(gpu.ints(tiles));
            cuda::Attention t;
            t.q       = static_cast<cuda::Half*>(gpu.fp16(std::size_t(T) * std::size_t(H * row)));
            t.out     = static_cast<cuda::Half*>(gpu.zeros(std::size_t(T) * std::size_t(H * value) * 2));
            t.cache_k = static_cast<cuda::Half*>(gpu.fp16(std::size_t(T) * row));
            t.n_heads = H, t.n_kv_heads = 1, t.head_dim = row, t.value_dim = value, t.block_size = block,
            t.scale = 0.07f;
            const double s =
                gpu.seconds([&](int) { cuda::attention_prefill(t, plan, list, int(tiles.size() / 3), gpu.context()); });
            kernel_line("latent prefill", cat(T, ", heads ", H), s, 0, flop * T * T / 2, a);
            gpu.clear();
        }
    }
    for (int n : {1, 16, 2048}) {
        if (!wanted(a, {"head GEMM"})) continue;
        constexpr int               heads = 16, rows = 512, cols = 128, copies = 32, x_dim = cols + row - value;
        std::vector<cuda::HeadGemm> all(copies);
        auto*                       x   = static_cast<cuda::Half*>(gpu.fp16(std::size_t(n) * heads * x_dim));
        auto*                       out = static_cast<cuda::Half*>(gpu.zeros(std::size_t(n) * heads * row * 2));
        for (cuda::HeadGemm& op : all) {
            op.x = x, op.out = out, op.n_heads = heads, op.x_dim = x_dim;
            op.weight.rows = heads * rows, op.weight.cols = cols;
            op.weight.data = gpu.fp16(std::size_t(heads) * rows * cols);
        }
        const double weights = double(heads) * rows * cols;
        const double s = gpu.seconds([&](int i) { cuda::head_gemm(all[std::size_t(i % copies)], n, gpu.context()); });
        kernel_line("head GEMM f16", cat(n, " rows, ", heads, " of ", rows, " × ", cols), s,
                    weights * 2 + double(n) * heads * (x_dim + row) * 2, 2 * n * weights, a);
        gpu.clear();
    }
}

// The persistent fused layer kernel: all of a layer of the 13 B shape between two attentions.
void layer_kernels(Gpu& gpu, const Arguments& a) {
    if (!wanted(a, {"layer kernel"})) return;
    constexpr std::int64_t hidden = 5120, ff = 13824, most = cuda::max_layer_kernel_rows;
    const auto             fp16 = [&](std::int64_t n) { return static_cast<cuda::Half*>(gpu.fp16(std::size_t(n))); };
    auto *                 attended = fp16(most * hidden), *delta = fp16(most * hidden), *normed = fp16(most * hidden),
         *gate = fp16(most * ff), *up = fp16(most * ff), *q = fp16(most * hidden), *k = fp16(most * hidden),
         *v        = fp16(most * hidden);
    auto *residual = static_cast<float*>(gpu.zeros(most * hidden * 4)),
         *norm     = static_cast<float*>(gpu.zeros(hidden * 4));
    struct Layer {
        cuda::Projection o, gate, up, down, q, k, v;
    };
    const auto projection = [&](std::int64_t rows, std::int64_t cols, cuda::Half* out) {
        cuda::Projection p;
        p.weight.rows = rows, p.weight.cols = cols, p.weight.data = fp16(rows * cols), p.out = out;
        return p;
    };
    std::vector<Layer> layers;
    for (int i = 0; i < 4; i++)
        layers.push_back({projection(hidden, hidden, delta), projection(ff, hidden, gate), projection(ff, hidden, up),
                          projection(hidden, ff, delta), projection(hidden, hidden, q), projection(hidden, hidden, k),
                          projection(hidden, hidden, v)});
    const double weights = double(4 * hidden * hidden + 3 * hidden * ff);
    for (int n : {4, 8, 16, 32, 64, 128}) {
        const auto run = [&](const Layer& l) {
            cuda::Operation ops[6];
            const auto gemm = [&](cuda::Operation& op, const void* x, std::initializer_list<cuda::Projection> list) {
                op.kind = cuda::Operation::gemm, op.x = x, op.rows = n, op.cols = list.begin()->weight.cols;
                for (const cuda::Projection& p : list) op.projection[op.n_projections++] = p;
            };
            for (cuda::Operation* op : {&ops[1], &ops[4]}) {
                op->kind = cuda::Operation::norm, op->x = delta, op->residual = residual, op->norm_weight = norm;
                op->eps = 1e-5f, op->out = normed, op->rows = n, op->cols = hidden;
            }
            gemm(ops[0], attended, {l.o});
            gemm(ops[2], normed, {l.gate, l.up});
            ops[2].kind = cuda::Operation::gated_gemm;
            gemm(ops[3], gate, {l.down});
            gemm(ops[5], normed, {l.q, l.k, l.v});
            return cuda::run_layer_kernel(ops, 6, n, {}, gpu.context());
        };
        if (run(layers[0]) == 0) break;
        const double s = gpu.seconds([&](int i) { run(layers[std::size_t(i) % layers.size()]); });
        kernel_line("layer kernel f16", cat(n, " rows, a layer of 13 B"), s, weights * 2, 2 * n * weights, a);
    }
    gpu.clear();
}

// The GEMMs of a layer of the 13 B shape for a prompt's tokens, in the sm90 kernel and in cuBLASLt: for some tenths of a second, so
// that the GPU's clock falls to its rate under load.
void prefill_gemms(Gpu& gpu, const Arguments& a) {
    if (!wanted(a, {"prefill GEMM"})) return;
    constexpr std::int64_t hidden = 5120, ff = 13824, most = 2048;
    constexpr int          n_layers = 4;
    const auto             fp16 = [&](std::int64_t n) { return static_cast<cuda::Half*>(gpu.fp16(std::size_t(n))); };
    auto *x = fp16(most * hidden), *wide = fp16(most * ff), *gate = fp16(2 * most * ff), *qkv = fp16(3 * most * hidden),
         *delta = fp16(most * hidden);
    struct Gemm {
        const char*       name;
        std::int64_t      rows, cols;
        int               n;
        bool              gated;
        const cuda::Half* x;
        cuda::Half *      out, *weight[n_layers] = {};
    };
    Gemm all[] = {{"q, k, v", hidden, hidden, 3, false, x, qkv},
                  {"o", hidden, hidden, 1, false, x, delta},
                  {"gate, up, SwiGLU", ff, hidden, 2, true, x, gate},
                  {"down", hidden, ff, 1, false, wide, delta}};
    for (Gemm& p : all)
        for (auto& w : p.weight) w = fp16(p.rows * p.cols * p.n);
    std::set<std::pair<std::int64_t, std::int64_t>> tuned; // N, M
    for (std::int64_t n : {256, 512, 1024, 2048}) {
        const auto ours = [&](const Gemm& p, int layer) {
            cuda::Operation op;
            op.kind = p.gated ? cuda::Operation::gated_gemm : cuda::Operation::gemm;
            op.x = p.x, op.rows = n, op.cols = p.cols, op.n_projections = p.n;
            for (int i = 0; i < p.n; i++) {
                op.projection[i].weight.rows = p.rows, op.projection[i].weight.cols = p.cols;
                op.projection[i].weight.data = p.weight[layer] + i * p.rows * p.cols;
                op.projection[i].out         = p.out + i * n * p.rows;
            }
            return cuda::match_prefill_gemm(&op, 1, gpu.context()) > 0 &&
                   cuda::run_prefill_gemm(&op, 1, {}, gpu.context()) == 1;
        };
        const auto theirs = [&](const Gemm& p, int layer) {
            const cuda::CublasltShape shape{p.rows, p.cols, false, p.n, p.rows * p.cols, n * p.rows};
            if (tuned.insert({p.rows, n}).second) cuda::tune_cublaslt(shape, p.weight[layer], n, n, gpu.context());
            const bool ran = cuda::cublaslt_gemm(p.x, n, p.weight[layer], shape, p.out, gpu.context());
            if (p.gated) cuda::activate(cuda::Activation::silu, p.out, p.out + n * p.rows, n * p.rows, gpu.context());
            return ran;
        };
        const auto line = [&](const char* kernel, const std::string& what, double weights, const auto& multiply) {
            if (!multiply(0)) return;
            const double s = gpu.seconds([&](int i) { multiply(i % n_layers); }, n == most ? 60 : 20);
            kernel_line(cat(kernel, " f16"), cat(n, " rows, ", what), s, weights * 2, 2 * double(n) * weights, a);
        };
        const auto each = [&](const char* kernel, const auto& multiply) {
            double total = 0;
            for (const Gemm& p : all) {
                const double weights = double(p.rows * p.cols * p.n);
                total += weights;
                line(kernel, p.name, weights, [&](int layer) { return multiply(p, layer); });
            }
            line(kernel, "a layer of 13 B", total, [&](int layer) {
                return std::ranges::all_of(all, [&](const Gemm& p) { return multiply(p, layer); });
            });
        };
        each("prefill GEMM", ours);
        each("prefill GEMM, cuBLASLt", theirs);
    }
    gpu.clear();
}

// Kernels limited by memory bandwidth: the activations, blocks and logits of a step. Counted are the bytes they must move.
void memory_kernels(Gpu& gpu, const Arguments& a) {
    const auto fp16   = [&](std::size_t n) { return static_cast<cuda::Half*>(gpu.fp16(n)); };
    const auto floats = [&](std::size_t n) { return static_cast<float*>(gpu.zeros(n * 4)); };
    const auto line   = [&](const char* name, const std::string& shape, double bytes,
                          const std::function<void()>& launch) {
        if (wanted(a, {name})) kernel_line(name, shape, gpu.seconds([&](int) { launch(); }), bytes, 0, a);
        gpu.clear();
    };
    constexpr std::size_t hidden = 5120, ff = 13824, heads = 40, D = 128, vocab = 32000, block = 16;
    for (const std::size_t T : {std::size_t(8), std::size_t(64), std::size_t(2048)}) {
        const auto n = std::int64_t(T);
        if (wanted(a, {"norm"})) {
            auto *x = fp16(T * hidden), *out = fp16(T * hidden);
            auto *residual = floats(T * hidden), *weight = floats(hidden);
            line("norm", cat(T, " × ", hidden), double(T * hidden) * 12, [&] {
                cuda::norm(x, false, {}, cuda::NormKind::rms, weight, nullptr, 1e-5f, residual, out, n,
                           std::int64_t(hidden), gpu.context());
            });
        }
        if (wanted(a, {"swiglu"})) {
            auto *gate = fp16(T * ff), *up = fp16(T * ff);
            line("swiglu", cat(T, " × ", ff), double(T * ff) * 6,
                 [&] { cuda::activate(cuda::Activation::silu, gate, up, std::int64_t(T * ff), gpu.context()); });
        }
        if (wanted(a, {"geglu"})) {
            auto *gate = fp16(T * ff), *up = fp16(T * ff);
            line("geglu", cat(T, " × ", ff), double(T * ff) * 6,
                 [&] { cuda::activate(cuda::Activation::gelu_tanh, gate, up, std::int64_t(T * ff), gpu.context()); });
        }
        if (wanted(a, {"rope + store"})) {
            std::vector<std::int32_t> numbers(T);
            std::iota(numbers.begin(), numbers.end(), 0);
            cuda::Plan plan;
            plan.positions = plan.slots = static_cast<std::int32_t*>(gpu.ints(numbers));
            cuda::RopeStore r;
            r.q = fp16(T * hidden), r.k = fp16(T * hidden), r.v = fp16(T * hidden);
            r.cache_k = fp16((T + block) * hidden), r.cache_v = fp16((T + block) * hidden);
            r.inv_freq = floats(D / 2), r.n_pairs = int(D / 2), r.n_heads = r.n_kv_heads = int(heads);
            r.head_dim = r.q_dim = r.value_dim = int(D), r.block_size = int(block);
            line("rope + store", cat(T, ", heads ", heads), double(T * hidden) * 12,
                 [&] { cuda::rope_and_store(r, plan, n, gpu.context()); });
        }
    }
    if (wanted(a, {"copy blocks"})) { // of 40 layers
        constexpr std::size_t    n_arrays = 80, n_copies = 16, bytes = block * hidden * 2;
        std::vector<const void*> arrays;
        for (std::size_t i = 0; i < n_arrays; i++) arrays.push_back(gpu.zeros(2 * n_copies * bytes));
        void* bases = gpu.zeros(n_arrays * sizeof(void*));
        cuda::upload(bases, static_cast<const void*>(arrays.data()), n_arrays * sizeof(void*), gpu.context());
        std::vector<std::int32_t> pairs;
        for (int i = 0; i < int(n_copies); i++) pairs.insert(pairs.end(), {i, int(n_copies) + i});
        const auto*      list = static_cast<std::int32_t*>(gpu.ints(pairs));
        cuda::BlockPools pools;
        pools.from = static_cast<const void**>(bases), pools.to = static_cast<void**>(bases);
        pools.n_arrays = int(n_arrays), pools.block_bytes = bytes;
        line("copy blocks", cat(n_copies, " of 40 layers"), double(n_copies * n_arrays * bytes) * 2,
             [&] { cuda::copy_blocks(pools, list, int(n_copies), gpu.context()); });
    }
    constexpr std::size_t rows = 64;
    if (wanted(a, {"argmax"})) {
        auto* logits = floats(rows * vocab);
        auto* best   = static_cast<std::int32_t*>(gpu.zeros(rows * 4));
        line("argmax", cat(rows, " × ", vocab), double(rows * vocab) * 4,
             [&] { cuda::argmax(logits, best, std::int64_t(rows), std::int64_t(vocab), gpu.context()); });
    }
    if (wanted(a, {"sample"})) {
        std::mt19937                    random(1);
        std::normal_distribution<float> normal(0, 3);
        std::vector<float>              values(rows * vocab);
        for (float& v : values) v = normal(random);
        auto* logits = floats(rows * vocab);
        cuda::upload(logits, values.data(), values.size() * 4, gpu.context());
        std::vector<cuda::SampleTask> tasks(rows);
        std::vector<double>           draws(rows);
        for (std::size_t i = 0; i < rows; i++) {
            cuda::SampleTask& t = tasks[i];
            t.row = t.first_draw = int(i), t.first_out = int(2 * i), t.n_draws = 1;
            t.temperature = 0.8f, t.top_k = 40, t.top_p = 0.95f;
            draws[i] = double(random()) / 4294967296.0;
        }
        auto* list    = static_cast<cuda::SampleTask*>(gpu.zeros(rows * sizeof(cuda::SampleTask)));
        auto* numbers = static_cast<double*>(gpu.zeros(rows * 8));
        cuda::upload(list, tasks.data(), rows * sizeof(cuda::SampleTask), gpu.context());
        cuda::upload(numbers, draws.data(), rows * 8, gpu.context());
        auto* answers = static_cast<std::int32_t*>(gpu.zeros(rows * 16));
        line("sample", cat(rows, " × ", vocab, ", top_k 40"), double(rows * vocab) * 4, [&] {
            cuda::sample(logits, std::int64_t(vocab), list, int(rows), nullptr, numbers, nullptr, answers,
                         gpu.context());
        });
    }
}

// A mixture of experts of the shape of Qwen3-30B-A3B: the router, both GEMMs and all three. Counted are the weights of the experts that
// some token chose.
void experts(Gpu& gpu, const Arguments& a) {
    if (!wanted(a, {"route", "expert"})) return;
    constexpr int                   n = 128, k = 8, hidden = 2048, ff = 768, steps = 8; // with tokens of their own
    std::mt19937                    random(7);
    std::normal_distribution<float> normal(0, 0.03f);
    std::vector<float>              values(std::size_t(n) * hidden);
    for (float& v : values) v = normal(random);
    for (const auto& [form, name, bits] :
         {std::tuple(cuda::WeightForm::f16, "f16", 16.0), std::tuple(cuda::WeightForm::i8, "q8_0", 8.5),
          std::tuple(cuda::WeightForm::q4_k, "q4_k", 4.5)})
        for (int T : {1, 2, 4, 8, 32, 128, 512, 2048}) {
            const std::size_t pairs = std::size_t(T) * k;
            const auto        stack = [&](int rows, int cols) {
                cuda::Weight w;
                const auto   all = std::size_t(n) * std::size_t(rows) * std::size_t(cols);
                w.form = form, w.rows = std::int64_t(n) * rows, w.cols = cols;
                w.data = gpu.fp16(std::size_t(double(all) * bits / 16) + 64);
                if (form == cuda::WeightForm::i8) w.scales = gpu.fp16(all / 32);
                return w;
            };
            const cuda::Weight gate = stack(ff, hidden), up = stack(ff, hidden), down = stack(hidden, ff);
            auto*              router = static_cast<float*>(gpu.zeros(values.size() * 4));
            cuda::upload(router, values.data(), values.size() * 4, gpu.context());
            auto *inner = static_cast<cuda::Half*>(gpu.zeros(pairs * ff * 2)),
                 *out   = static_cast<cuda::Half*>(gpu.zeros(std::size_t(T) * hidden * 2)),
                 *x     = static_cast<cuda::Half*>(gpu.fp16(std::size_t(steps) * std::size_t(T) * hidden)),
                 *parts = static_cast<cuda::Half*>(gpu.zeros(pairs * hidden * 2));
            struct Step {
                cuda::Route           route;
                cuda::ExpertGemm      gated, combined;
                cuda::ExpertWorkspace work;
            };
            std::vector<Step> all(steps);
            const int         tile   = cuda::expert_tile(T, n, k, form == cuda::WeightForm::f16);
            double            chosen = 0; // experts of a step
            for (int i = 0; i < steps; i++) {
                Step& s   = all[std::size_t(i)];
                s.route.x = s.gated.x = x + std::size_t(i) * std::size_t(T) * hidden;
                s.route.weight = router, s.route.out = static_cast<float*>(gpu.zeros(pairs * 8));
                s.route.n_experts = n, s.route.n_used = k, s.route.cols = hidden, s.route.normalised = true;
                s.gated.routes = s.combined.routes = s.route.out;
                s.gated.gate = {gate, nullptr, inner}, s.gated.up = {up, nullptr, nullptr};
                s.combined.x = inner, s.combined.gate = {down, nullptr, out};
                s.gated.n_experts = s.combined.n_experts = n, s.gated.n_used = s.combined.n_used = k;
                s.work.scores   = static_cast<float*>(gpu.zeros(std::size_t(T) * n * 4));
                s.work.arrivals = static_cast<std::int32_t*>(gpu.zeros(std::size_t(T + 1) * 4));
                s.work.pairs    = static_cast<std::int32_t*>(gpu.zeros(pairs * 4));
                s.work.tiles    = static_cast<std::int32_t*>(
                    gpu.zeros((1 + 3 * std::size_t(cuda::expert_tiles(std::int64_t(pairs), n, 8))) * 4));
                s.work.parts = parts;
                cuda::route(s.route, T, nullptr, tile, s.work, gpu.context());
                std::vector<std::int32_t> routes(2 * pairs);
                cuda::copy_to_host(routes.data(), s.route.out, pairs * 8, gpu.context());
                cuda::synchronize(gpu.context());
                std::set<std::int32_t> distinct;
                for (std::size_t t = 0; t < std::size_t(T); t++)
                    for (std::size_t j = 0; j < k; j++) distinct.insert(routes[2 * t * k + j]);
                chosen += double(distinct.size()) / steps;
            }
            const double matrix = double(ff) * hidden * bits / 8, flop = 2.0 * double(pairs) * ff * hidden,
                         router_bytes = double(n) * hidden * 4;
            const auto line = [&](const std::string& kernel, double bytes, double operations, const auto& run) {
                if (!kernel.starts_with(a.only)) return;
                const double s = gpu.seconds([&](int i) { run(all[std::size_t(i % steps)]); });
                kernel_line(kernel, cat(T, " rows, ", int(chosen + 0.5), " of ", n, " × ", ff, " × ", hidden), s, bytes,
                            operations, a);
            };
            const auto route    = [&](const Step& s) { cuda::route(s.route, T, nullptr, tile, s.work, gpu.context()); };
            const auto gated    = [&](const Step& s) { cuda::expert_gated(s.gated, T, tile, s.work, gpu.context()); };
            const auto combined = [&](const Step& s) {
                cuda::expert_combine(s.combined, T, tile, s.work, gpu.context());
            };
            if (form == cuda::WeightForm::f16) line("route", router_bytes, 2.0 * T * n * hidden, route);
            line(cat("expert gated ", name), chosen * 2 * matrix, 2 * flop, gated);
            line(cat("expert down ", name), chosen * matrix, flop, combined);
            line(cat("experts ", name), chosen * 3 * matrix + router_bytes, 3 * flop, [&](const Step& s) {
                route(s);
                gated(s);
                combined(s);
            });
            gpu.clear();
        }
}

} // namespace

std::vector<PagedOverhead> paged_overhead() {
    cuda::DeviceInfo           info;
    std::vector<PagedOverhead> out;
    if (cuda::open_device(0, info)) return out;
    Gpu gpu;
    for (int sequences : {8, 32})
        for (int context : {64, 128, 256, 1024})
            for (int size : {1, 4, 16, 64})
                out.push_back({sequences, context, size,
                               decode_seconds(gpu, sequences, context, 40, 40, size) /
                                   decode_seconds(gpu, sequences, context, 40, 40, context)});
    return out;
}

int kernels(const Arguments& a) {
    cuda::DeviceInfo info;
    if (const char* why = cuda::open_device(0, info))
        return complain({ErrorKind::system, cat("no GPU to measure: ", why)});
    std::printf(
        "%s\n\n| kernel | shape | µs | TB/s | TFLOP/s | of the limit |\n| --- | --- | ---: | ---: | ---: | ---: |\n",
        info.name);
    Gpu gpu;
    small_gemms(gpu, a);
    decode_attention(gpu, a);
    prefill_attention(gpu, a);
    latent_attention(gpu, a);
    prefill_gemms(gpu, a);
    layer_kernels(gpu, a);
    experts(gpu, a);
    memory_kernels(gpu, a);
    return 0;
}

} // namespace quire::bench
