// bench kernel: the GEMMs and the kernels made of them: the layer kernel, mixtures of experts.
#include "../../cuda/kernels.h"

import quire.core.base;
import quire.core.tensor;

#include "kernel_gpu.h"

namespace quire::bench {

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

// The persistent fused layer kernel: all of a layer of the 13 B shape between two attentions.
void layer_kernels(Gpu& gpu, const Arguments& a) {
    if (!wanted(a, {"layer kernel"})) return;
    constexpr std::int64_t hidden = 5120, ff = 13824, most = 256;
    const auto             fp16 = [&](std::int64_t n) { return static_cast<cuda::Half*>(gpu.fp16(std::size_t(n))); };
    struct Layer {
        cuda::Projection o, gate, up, down, q, k, v;
    };
    constexpr double n_weights = double(4 * hidden * hidden + 3 * hidden * ff);
    for (const auto& [form, name, bits] :
         {std::tuple(cuda::WeightForm::f16, "f16", 16.0), std::tuple(cuda::WeightForm::i8, "q8_0", 8.5),
          std::tuple(cuda::WeightForm::q4_k, "q4_k", 4.5)}) {
        auto *attended = fp16(most * hidden), *delta = fp16(most * hidden), *normed = fp16(most * hidden),
             *gate = fp16(most * ff), *up = fp16(most * ff), *q = fp16(most * hidden), *k = fp16(most * hidden),
             *v               = fp16(most * hidden);
        auto *residual        = static_cast<float*>(gpu.zeros(most * hidden * 4)),
             *norm            = static_cast<float*>(gpu.zeros(hidden * 4));
        const auto projection = [&](std::int64_t rows, std::int64_t cols, cuda::Half* out) {
            cuda::Projection p;
            p.weight.form = form, p.weight.rows = rows, p.weight.cols = cols, p.out = out;
            p.weight.data = fp16(std::int64_t(double(rows * cols) * bits / 16) + 64);
            if (form == cuda::WeightForm::i8) p.weight.scales = fp16(rows * cols / 32);
            if (form != cuda::WeightForm::f16)
                p.weight.scale_exponent = cuda::scale_exponent_of(p.weight, gpu.context());
            return p;
        };
        std::vector<Layer> layers;
        for (int i = 0; i < 4; i++)
            layers.push_back({projection(hidden, hidden, delta), projection(ff, hidden, gate),
                              projection(ff, hidden, up), projection(hidden, ff, delta), projection(hidden, hidden, q),
                              projection(hidden, hidden, k), projection(hidden, hidden, v)});
        for (int n : {4, 8, 16, 32, 64, 80, 128, 160, 192, 256}) {
            const auto run = [&](const Layer& l) {
                cuda::Operation ops[6];
                const auto      gemm = [&](cuda::Operation& op, const void* x,
                                      std::initializer_list<cuda::Projection> list) {
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
            kernel_line(cat("layer kernel ", name), cat(n, " rows, a layer of 13 B"), s, n_weights * bits / 8,
                        2 * n * n_weights, a);
        }
        gpu.clear();
    }
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
        cuda::Fp8Matrix   fp8[n_layers][3] = {};
    };
    Gemm all[] = {{"q, k, v", hidden, hidden, 3, false, x, qkv},
                  {"o", hidden, hidden, 1, false, x, delta},
                  {"gate, up, SwiGLU", ff, hidden, 2, true, x, gate},
                  {"down", hidden, ff, 1, false, wide, delta}};
    for (Gemm& p : all)
        for (auto& w : p.weight) w = fp16(p.rows * p.cols * p.n);
    const auto bytes  = [&](std::int64_t n) { return static_cast<std::uint8_t*>(gpu.fp16(std::size_t(n) / 2)); };
    const auto floats = [&](std::int64_t n) { return static_cast<float*>(gpu.fp16(std::size_t(n) * 2)); };
    const cuda::Fp8Matrix x8{bytes(most * ff), floats(most)};
    if (cuda::has_fp8_gemm(gpu.context()))
        for (Gemm& p : all)
            for (int layer = 0; layer < n_layers; layer++)
                for (int i = 0; i < p.n; i++) {
                    p.fp8[layer][i] = {bytes(p.rows * p.cols), floats(p.rows * p.cols / (128 * 128))};
                    cuda::weight_to_fp8(p.weight[layer] + i * p.rows * p.cols, p.rows, p.cols, p.fp8[layer][i],
                                        gpu.context());
                }
    std::set<std::pair<std::int64_t, std::int64_t>> tuned; // N, M
    for (std::int64_t n : {256, 512, 1024, 2048}) {
        const auto operation = [&](const Gemm& p, int layer) {
            cuda::Operation op;
            op.kind = p.gated ? cuda::Operation::gated_gemm : cuda::Operation::gemm;
            op.x = p.x, op.rows = n, op.cols = p.cols, op.n_projections = p.n;
            for (int i = 0; i < p.n; i++) {
                op.projection[i].weight.rows = p.rows, op.projection[i].weight.cols = p.cols;
                op.projection[i].weight.data = p.weight[layer] + i * p.rows * p.cols;
                op.projection[i].weight.fp8  = p.fp8[layer][i];
                op.projection[i].out         = p.out + i * n * p.rows;
            }
            return op;
        };
        const auto in_fp8 = [&](const Gemm& p, int layer) { // with the rounding of x
            if (!cuda::has_fp8_gemm(gpu.context())) return false;
            const cuda::Operation op = operation(p, layer);
            cuda::rows_to_fp8(p.x, n, p.cols, x8, gpu.context());
            return cuda::run_fp8_gemm(&op, 1, x8, {}, gpu.context()) == 1;
        };
        const auto ours = [&](const Gemm& p, int layer) {
            const cuda::Operation op = operation(p, layer);
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
        const auto line = [&](std::string_view kernel, const std::string& what, double weights, const auto& multiply) {
            if (!multiply(0)) return;
            const bool   fp8   = kernel.ends_with("fp8"); // which has half the bytes and twice the rate
            const double s     = gpu.seconds([&](int i) { multiply(i % n_layers); }, n == most ? 60 : 20);
            Arguments    limit = a;
            if (fp8) limit.tflops = 2 * (a.tflops > 0 ? a.tflops : 790);
            kernel_line(std::string(kernel), cat(n, " rows, ", what), s, weights * (fp8 ? 1 : 2),
                        2 * double(n) * weights, limit);
        };
        const auto each = [&](std::string_view kernel, const auto& multiply) {
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
        each("prefill GEMM f16", ours);
        each("prefill GEMM fp8", in_fp8);
        each("prefill GEMM, cuBLASLt f16", theirs);
    }
    gpu.clear();
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
            cuda::ExpertGemm  of_both; // what the choice of the kernels asks for
            of_both.gate.weight = gate, of_both.up.weight = up, of_both.n_experts = n;
            const bool on_wgmma = cuda::can_group_sm90(of_both, gpu.context());
            const int  tile     = cuda::expert_tile(T, n, k, form == cuda::WeightForm::f16, on_wgmma);
            double     chosen   = 0; // experts of a step
            for (int i = 0; i < steps; i++) {
                Step& s   = all[std::size_t(i)];
                s.route.x = s.gated.x = x + std::size_t(i) * std::size_t(T) * hidden;
                s.route.weight = router, s.route.out = static_cast<float*>(gpu.zeros(pairs * 8));
                s.route.n_experts = n, s.route.n_used = k, s.route.cols = hidden, s.route.normalised = true;
                s.gated.routes = s.combined.routes = s.route.out;
                s.gated.gate = {gate, nullptr, inner}, s.gated.up = {up, nullptr, nullptr};
                s.combined.x = inner, s.combined.gate = {down, nullptr, out};
                s.gated.n_experts = s.combined.n_experts = n, s.gated.n_used = s.combined.n_used = k;
                s.gated.on_wgmma = s.combined.on_wgmma = on_wgmma;
                s.work.scores                          = static_cast<float*>(gpu.zeros(std::size_t(T) * n * 4));
                s.work.arrivals                        = static_cast<std::int32_t*>(gpu.zeros(std::size_t(T + 1) * 4));
                s.work.pairs                           = static_cast<std::int32_t*>(gpu.zeros(pairs * 4));
                s.work.tiles                           = static_cast<std::int32_t*>(
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

} // namespace quire::bench
