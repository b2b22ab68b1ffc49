// The GPU against plain C++ and against the CPU engine. Without a GPU these tests print that and pass.
#include <catch2/catch_test_macros.hpp>

#include "../cuda/kernels.h"
#include "process.h"
#include "reference.h"

import quire.compute.cuda.attention_plan;
import quire.core.base;
import quire.core.std;
import quire.core.tensor;
import quire.decode.candidates;
import quire.decode.sampler;
import quire.engine.engine;
import quire.model_file.config;
import quire.model_file.gguf_writer;
import quire.model_file.quants.lattices;
import quire.model_file.quants;
import quire.paging.snapshot;
import quire.schedule.request;
import quire.schedule.scheduler;
import quire.step.plan;
import quire.tools.bench.random_model;

#include "cuda_tools.h"
#include "engine_tools.h"
#include "odd_model.h"

using namespace quire;
using namespace quire::testing;

TEST_CASE("GPU: GEMM with every kind of weight equals plain sums", "[cuda]") {
    if (no_gpu()) return;
    const Gpu                            gpu;
    std::mt19937                         random(1);
    OnDevice<std::array<std::int8_t, 8>> points2(gpu, std::vector(iq2_xs_lattice.begin(), iq2_xs_lattice.end()));
    OnDevice<std::array<std::int8_t, 4>> points3(gpu, std::vector(iq3_xxs_lattice.begin(), iq3_xxs_lattice.end()));
    for (DType type :
         {DType::F16, DType::Q8_0, DType::Q4_0, DType::Q5_0, DType::Q4_K, DType::Q5_K, DType::Q6_K, DType::Q3_K,
          DType::IQ4_NL, DType::IQ4_XS, DType::MXFP4, DType::NVFP4, DType::IQ3_XXS, DType::IQ2_XS})
        for (auto [rows, cols] : {std::pair(1, 256), std::pair(7, 512), std::pair(64, 1280), std::pair(130, 768)})
            for (int n : {1, 2, 3, 5, 8, 9, 17, 31, 64}) {
                CAPTURE(dtype_info(type).name, rows, cols, n);
                const std::vector<std::byte> blocks = random_rows(type, rows, cols, random);
                std::vector<float>           weights(std::size_t(rows) * std::size_t(cols));
                for (int r = 0; r < rows; r++)
                    dequantize(type, blocks.data() + std::size_t(r) * row_bytes(type, cols),
                               weights.data() + std::ptrdiff_t(r) * cols, cols);
                const auto          x = random_fp16(std::size_t(64) * std::size_t(cols), random);
                std::vector<double> want;
                std::vector<float>  bias(std::size_t(rows), 0.0f);
                for (int r = 0; r < rows; r++) bias[std::size_t(r)] = float(r % 5);
                for (int t = 0; t < n; t++)
                    for (int r = 0; r < rows; r++) {
                        double sum = double(bias[std::size_t(r)]);
                        for (int c = 0; c < cols; c++)
                            sum += double(weights[std::size_t(r * cols + c)]) *
                                   double(f16_to_f32(x[std::size_t(t * cols + c)]));
                        want.push_back(sum);
                    }

                cuda::Projection product;
                product.weight.rows = rows, product.weight.cols = cols;
                OnDevice<std::byte>   raw(gpu, blocks);
                OnDevice<std::int8_t> q(gpu, std::vector<std::int8_t>(weights.size()));
                OnDevice<float>       scales(gpu, std::vector<float>(weights.size() / 16)),
                    mins(gpu, std::vector<float>(weights.size() / 16));
                OnDevice<std::uint16_t> there(gpu, x);
                OnDevice<float>         biases(gpu, bias),
                    out(gpu, std::vector<float>(want.size(), std::numeric_limits<float>::quiet_NaN()));
                if (type == DType::F16) product.weight.data = raw.data;
                else if (type == DType::Q4_K) {
                    product.weight.form = cuda::WeightForm::q4_k;
                    product.weight.data = raw.data;
                } else {
                    bool has_mins       = false;
                    product.weight.form = cuda::WeightForm::i8;
                    cuda::i8_layout(std::uint32_t(type), product.weight.group, product.weight.float_scales, has_mins);
                    cuda::to_i8(std::uint32_t(type), raw.data,
                                type == DType::IQ2_XS    ? points2.data->data()
                                : type == DType::IQ3_XXS ? points3.data->data()
                                                         : nullptr,
                                q.data, scales.data, has_mins ? mins.data : nullptr, std::int64_t(weights.size()), gpu);
                    product.weight.data   = q.data;
                    product.weight.scales = scales.data;
                    product.weight.mins   = has_mins ? mins.data : nullptr;
                }
                product.bias         = biases.data;
                product.out          = out.data;
                product.out_is_float = true;
                if (n <= cuda::max_gemv_rows) {
                    cuda::gemv(there.data, n, cols, &product, 1, false, gpu);
                    CHECK(relative_error(out.back(gpu), want) < 4e-3);
                    cuda::gemv(there.data, n, cols, &product, 1, true, gpu);
                    CHECK(relative_error(out.back(gpu), want) < 4e-3); // a single sum may cancel
                }
                if (n == 1) { // of an x so small that no half overflows
                    std::vector<std::uint16_t> small = x;
                    for (std::uint16_t& h : small) h = f32_to_f16(f16_to_f32(h) / 64);
                    OnDevice<std::uint16_t> little(gpu, small),
                        both(gpu, std::vector<std::uint16_t>(std::size_t(rows), fp16_nan));
                    for (const cuda::Activation activation : activations)
                        for (const bool biased : {false, true}) {
                            if (rows == 1) continue; // a small one may cancel
                            CAPTURE(int(activation), biased);
                            cuda::Projection gate{product.weight, biased ? biases.data : nullptr, both.data}, up = gate;
                            if (!cuda::gemv_gated(little.data, gate, up, activation, gpu)) continue;
                            std::vector<double> gated;
                            for (std::size_t r = 0; r < want.size(); r++) {
                                const double v = (want[r] - double(bias[r])) / 64 + (biased ? double(bias[r]) : 0);
                                gated.push_back(activated(activation, v, v));
                            }
                            CHECK(relative_error(floats_of(both.back(gpu)), gated) < 8e-3);
                        }
                }
                REQUIRE(cuda::can_skinny_gemm(gpu, product.weight));
                OnDevice<float> again(gpu, std::vector<float>(want.size(), std::numeric_limits<float>::quiet_NaN()));
                product.out = again.data;
                for (int round = 0; round < 2; round++) // the arrivals are ready for the next launch
                    cuda::skinny_gemm(there.data, n, cols, &product, 1, gpu);
                CHECK(relative_error(again.back(gpu), want) < 4e-3);
            }
}

TEST_CASE("GPU: the prefill GEMM and its epilogues equal plain sums", "[cuda]") {
    if (no_gpu()) return;
    const Gpu    gpu;
    std::mt19937 random(7);
    enum Epilogue { write, scaled, swiglu, geglu, rope_interleaved, rope_neox };
    struct Shape {
        int n, cols, rows;
        int others; // rows of a second and third projection, 0: none
    };
    // Fewer tiles than SMs and more, whole ones and strips of a half and a quarter.
    for (const auto& [n, cols, rows, others] :
         {Shape{1, 8, 8, 0}, Shape{7, 64, 264, 8}, Shape{64, 72, 256, 128}, Shape{129, 200, 520, 136},
          Shape{129, 200, 512, 256}, Shape{256, 1024, 128, 0}, Shape{257, 136, 5000, 0}, Shape{513, 320, 384, 1024},
          Shape{70, 64, 19456, 0}, Shape{40, 136, 34048, 256}, Shape{300, 64, 10000, 0}})
        for (Epilogue then : {write, scaled, swiglu, geglu, rope_interleaved, rope_neox}) {
            const bool gated = then == swiglu || then == geglu, with_rope = then > geglu;
            const auto activation = then == geglu ? cuda::Activation::gelu_tanh : cuda::Activation::silu;
            const int  D = n % 2 != 0 ? 128 : 64, block_size = 4;
            if (with_rope && (others == 0 || rows % D != 0 || others % D != 0)) continue;
            CAPTURE(n, cols, rows, others, then, D);
            cuda::Operation ops[2] = {};
            ops[0].kind            = gated ? cuda::Operation::gated_gemm : cuda::Operation::gemm;
            ops[0].rows = n, ops[0].cols = cols, ops[0].activation = activation;
            std::vector<int> all_rows{rows};
            if (gated) all_rows.push_back(rows);
            else if (others > 0) all_rows.insert(all_rows.end(), {others, others});

            const auto                              x = random_fp16(std::size_t(n) * std::size_t(cols), random);
            const OnDevice<std::uint16_t>           there_x(gpu, x);
            std::vector<std::vector<std::uint16_t>> weights;
            std::vector<std::vector<float>>         biases;
            std::deque<OnDevice<std::uint16_t>>     there_weights, out;
            std::deque<OnDevice<float>>             there_biases;
            ops[0].x = there_x.data;
            for (int r : all_rows) {
                weights.push_back(random_fp16(std::size_t(r) * std::size_t(cols), random, 1 / std::sqrt(float(cols))));
                biases.push_back(floats_of(random_fp16(std::size_t(r), random)));
                cuda::Projection& p = ops[0].projection[ops[0].n_projections++];
                p.weight.rows = r, p.weight.cols = cols;
                p.weight.data = there_weights.emplace_back(gpu, weights.back()).data;
                if (!gated) p.bias = there_biases.emplace_back(gpu, biases.back()).data;
                if (then == scaled) p.scale = 0.25f;
                p.out =
                    out.emplace_back(gpu, std::vector<std::uint16_t>(std::size_t(n) * std::size_t(r) + 64, fp16_nan))
                        .data;
            }
            // Positions and slots; the last token has none where there are several.
            std::vector<std::int32_t> positions, slots;
            for (int t = 0; t < n; t++)
                positions.push_back(37 * t), slots.push_back(t > 0 && t + 1 == n ? -1 : 3 + 2 * t);
            std::vector<float> frequencies;
            for (int i = 0; i < D / 2; i++) frequencies.push_back(float(std::pow(10000.0, -2.0 * i / D)));
            const OnDevice<std::int32_t>  there_positions(gpu, positions), there_slots(gpu, slots);
            const OnDevice<float>         there_frequencies(gpu, frequencies);
            const std::size_t             cache_size = with_rope ? std::size_t(2 * n + 8) * std::size_t(others) : 1;
            const OnDevice<std::uint16_t> cache_k(gpu, std::vector<std::uint16_t>(cache_size, fp16_nan)),
                cache_v(gpu, std::vector<std::uint16_t>(cache_size, fp16_nan));
            cuda::Plan plan;
            plan.positions = there_positions.data, plan.slots = there_slots.data;
            if (with_rope) {
                cuda::RopeStore& rope = ops[1].rope;
                ops[1].kind           = cuda::Operation::rope_and_store;
                rope.q                = static_cast<cuda::Half*>(ops[0].projection[0].out);
                rope.k                = static_cast<cuda::Half*>(ops[0].projection[1].out);
                rope.v                = static_cast<cuda::Half*>(ops[0].projection[2].out);
                rope.cache_k = cache_k.data, rope.cache_v = cache_v.data, rope.inv_freq = there_frequencies.data;
                rope.n_pairs = D / 2, rope.n_heads = rows / D, rope.n_kv_heads = others / D, rope.head_dim = D;
                rope.block_size = block_size, rope.scale = 1.25f, rope.neox = then == rope_neox;
                rope.q_dim = rope.value_dim = D;
            }
            if (cuda::match_prefill_gemm(ops, 1, gpu) == 0) break;
            REQUIRE(cuda::run_prefill_gemm(ops, with_rope ? 2 : 1, plan, gpu) == (with_rope ? 2 : 1));

            const std::vector<float> xs      = floats_of(x);
            const auto               product = [&](std::size_t k) {
                const std::vector<float> w = floats_of(weights[k]);
                std::vector<double>      sums;
                for (int t = 0; t < n; t++)
                    for (int r = 0; r < all_rows[k]; r++) {
                        double       sum = gated ? 0 : double(biases[k][std::size_t(r)]);
                        const float *a = xs.data() + std::ptrdiff_t(t) * cols, *b = w.data() + std::ptrdiff_t(r) * cols;
                        for (int c = 0; c < cols; c++) sum += double(a[c]) * double(b[c]);
                        sums.push_back(then == scaled ? sum / 4 : sum);
                    }
                return sums;
            };
            const auto rotated = [&](std::vector<double> sums) {
                for (std::size_t head = 0; head < sums.size(); head += std::size_t(D))
                    for (int i = 0; i < D / 2; i++) {
                        const bool neox    = then == rope_neox;
                        double &   a       = sums[head + std::size_t(neox ? i : 2 * i)],
                               &b          = sums[head + std::size_t(neox ? i + D / 2 : 2 * i + 1)];
                        const double angle = double(positions[head * std::size_t(n) / sums.size()]) *
                                             double(frequencies[std::size_t(i)]);
                        const double rotated = 1.25 * (a * std::cos(angle) - b * std::sin(angle));
                        b                    = 1.25 * (a * std::sin(angle) + b * std::cos(angle));
                        a                    = rotated;
                    }
                return sums;
            };
            for (std::size_t k = 0; k < (gated ? 1 : all_rows.size()); k++) {
                std::vector<double> want = product(k);
                if (gated) {
                    const std::vector<double> up = product(1);
                    for (std::size_t i = 0; i < want.size(); i++) want[i] = activated(activation, want[i], up[i]);
                }
                if (with_rope && k < 2) want = rotated(want);
                std::vector<std::uint16_t> got = out[k].back(gpu);
                if (with_rope && k > 0) { // in the cache: as rows again
                    CHECK(std::ranges::all_of(got, [](std::uint16_t h) { return h == fp16_nan; }));
                    const auto                 cache = (k == 1 ? cache_k : cache_v).back(gpu);
                    std::vector<std::uint16_t> rows_of;
                    std::size_t                n_written = 0;
                    for (int t = 0; t < n; t++)
                        for (int r = 0; r < others; r++) {
                            const int slot = slots[std::size_t(t)];
                            const int at =
                                ((slot / block_size * (others / D) + r / D) * block_size + slot % block_size) * D +
                                r % D;
                            if (slot < 0) want[std::size_t(t * others + r)] = 0;
                            rows_of.push_back(slot < 0 ? 0 : cache[std::size_t(at)]);
                            n_written += slot >= 0;
                        }
                    CHECK(std::ranges::count_if(cache, [](std::uint16_t h) { return h != fp16_nan; }) ==
                          std::ptrdiff_t(n_written));
                    CHECK(relative_error(floats_of(rows_of), want) < 1e-3);
                    continue;
                }
                CHECK(std::ranges::all_of(std::span(got).subspan(want.size()),
                                          [](std::uint16_t h) { return h == fp16_nan; }));
                got.resize(want.size());
                CHECK(relative_error(floats_of(got), want) < 1e-3);
                if (n > 1 && !with_rope) { // the first rows alone have the same bits
                    const auto poison = std::vector<std::uint16_t>(out[k].n, fp16_nan);
                    cuda::upload(out[k].data, poison.data(), poison.size() * 2, gpu);
                    ops[0].rows = n / 2;
                    REQUIRE(cuda::run_prefill_gemm(ops, 1, plan, gpu) == 1);
                    ops[0].rows           = n;
                    const auto n_first    = std::ptrdiff_t(n / 2) * all_rows[k];
                    const auto first_half = out[k].back(gpu);
                    CHECK(std::equal(got.begin(), got.begin() + n_first, first_half.begin()));
                    CHECK(std::all_of(first_half.begin() + n_first, first_half.end(),
                                      [](std::uint16_t h) { return h == fp16_nan; }));
                }
            }
        }
}

TEST_CASE("GPU: the layer kernel equals plain sums", "[cuda]") {
    if (no_gpu()) return;
    const Gpu    gpu;
    std::mt19937 random(4);
    struct Shape {
        int from, hidden, ff, kv, D; // columns of the first x; of the norms; of SwiGLU; rows of k and v; head_dim
    };
    using Rows         = std::vector<double>;
    const auto rounded = [](Rows rows) { // as fp16
        for (double& v : rows) v = double(f16_to_f32(f32_to_f16(float(v))));
        return rows;
    };
    const auto product = [](const Rows& x, const std::vector<std::uint16_t>& weight, int n, int cols) {
        const std::vector<float> w    = floats_of(weight);
        const int                rows = int(w.size()) / cols;
        Rows                     out;
        for (int t = 0; t < n; t++)
            for (int r = 0; r < rows; r++) {
                double sum = 0;
                for (int c = 0; c < cols; c++)
                    sum += x[std::size_t(t * cols + c)] * double(w[std::size_t(r * cols + c)]);
                out.push_back(sum);
            }
        return out;
    };
    cuda::prepare_layer_kernel(gpu);
    int mode = 0; // what becomes of q, k and v: nothing, RoPE with interleaved pairs, or with NeoX pairs
    for (const auto& [from, hidden, ff, kv, D] : {Shape{64, 64, 128, 16, 16}, Shape{40, 208, 72, 144, 16},
                                                  Shape{512, 384, 1096, 128, 128}, Shape{136, 6400, 24, 64, 64}})
        for (int n : {1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 50, 64, 65, 128}) {
            if (hidden > 1000 && n != 9 && n != 31) continue;
            mode                    = (mode + 1) % 3;
            const auto   activation = n % 2 != 0 ? cuda::Activation::silu : cuda::Activation::gelu_tanh;
            const double by         = n % 4 < 2 ? 1 : 0.25; // of what is added to the residual
            CAPTURE(from, hidden, ff, kv, D, n, mode);
            const int  q_rows = std::min(hidden, 384);
            const auto matrix = [&](int rows, int cols) {
                return random_fp16(std::size_t(rows) * std::size_t(cols), random, 1 / std::sqrt(float(cols)));
            };
            const auto x = random_fp16(std::size_t(n * from), random), o = matrix(hidden, from),
                       gate = matrix(ff, hidden), up = matrix(ff, hidden), down = matrix(hidden, ff),
                       q = matrix(q_rows, hidden), k = matrix(kv, hidden), v = matrix(kv, hidden);
            const std::vector<float> residual = floats_of(random_fp16(std::size_t(n * hidden), random)),
                                     norm_a   = floats_of(random_fp16(std::size_t(hidden), random)),
                                     norm_b   = floats_of(random_fp16(std::size_t(hidden), random)),
                                     bias     = floats_of(random_fp16(std::size_t(hidden), random));
            // What the parts of a layer make of it, rounded where they hand fp16 on.
            Rows       sum(residual.begin(), residual.end());
            const auto normed = [&](const Rows& more, const std::vector<float>& weight) {
                Rows out;
                for (int t = 0; t < n; t++) {
                    double squares = 0;
                    for (int c = 0; c < hidden; c++) {
                        double& s = sum[std::size_t(t * hidden + c)];
                        s += by * more[std::size_t(t * hidden + c)];
                        squares += s * s;
                    }
                    for (int c = 0; c < hidden; c++)
                        out.push_back(sum[std::size_t(t * hidden + c)] / std::sqrt(squares / hidden + 1e-5) *
                                      double(weight[std::size_t(c)]));
                }
                return rounded(out);
            };
            const std::vector<float> x_floats = floats_of(x);
            Rows                     first    = product(Rows(x_floats.begin(), x_floats.end()), o, n, from);
            for (std::size_t i = 0; i < first.size(); i++) first[i] += double(bias[i % std::size_t(hidden)]);
            const Rows a = normed(first, norm_a);
            Rows       g = product(a, gate, n, hidden), u = product(a, up, n, hidden);
            for (std::size_t i = 0; i < g.size(); i++) g[i] = activated(activation, g[i], u[i]);
            g                  = rounded(g);
            const Rows b       = normed(product(g, down, n, ff), norm_b);
            Rows       wants[] = {product(b, q, n, hidden), product(b, k, n, hidden), product(b, v, n, hidden)};
            // Positions and slots; the last token has none where there are several. Blocks of 4, of which there are 70.
            std::vector<std::int32_t> positions, slots;
            for (int t = 0; t < n; t++)
                positions.push_back(37 * t), slots.push_back(t > 0 && t + 1 == n ? -1 : 3 + 2 * t);
            std::vector<float> frequencies;
            for (int i = 0; i < D / 2; i++) frequencies.push_back(float(std::pow(10000.0, -2.0 * i / D)));
            const auto pair_at = [&](int i) {
                return mode == 1 ? std::pair(2 * i, 2 * i + 1) : std::pair(i, i + D / 2);
            };
            if (mode > 0)
                for (Rows* rows : {&wants[0], &wants[1]})
                    for (std::size_t head = 0; head < rows->size(); head += std::size_t(D))
                        for (int i = 0; i < D / 2; i++) {
                            const auto [one, other] = pair_at(i);
                            double &     x = (*rows)[head + std::size_t(one)], &y = (*rows)[head + std::size_t(other)];
                            const double angle = double(positions[head * std::size_t(n) / rows->size()]) *
                                                 double(frequencies[std::size_t(i)]);
                            const double with_rope = x * std::cos(angle) - y * std::sin(angle);
                            y                      = x * std::sin(angle) + y * std::cos(angle);
                            x                      = with_rope;
                        }

            const OnDevice<std::uint16_t> there_x(gpu, x), there_o(gpu, o), there_gate(gpu, gate), there_up(gpu, up),
                there_down(gpu, down), there_q(gpu, q), there_k(gpu, k), there_v(gpu, v),
                not_written(gpu, std::vector<std::uint16_t>(first.size(), fp16_nan)),
                there_a(gpu, std::vector<std::uint16_t>(a.size(), fp16_nan)),
                there_g(gpu, std::vector<std::uint16_t>(g.size(), fp16_nan)),
                there_u(gpu, std::vector<std::uint16_t>(g.size(), fp16_nan)),
                there_b(gpu, std::vector<std::uint16_t>(b.size(), fp16_nan)),
                out_q(gpu, std::vector<std::uint16_t>(wants[0].size(), fp16_nan)),
                out_k(gpu, std::vector<std::uint16_t>(wants[1].size(), fp16_nan)),
                out_vh(gpu, std::vector<std::uint16_t>(wants[2].size(), fp16_nan));
            const OnDevice<float> there_norm_a(gpu, norm_a), there_norm_b(gpu, norm_b), there_bias(gpu, bias),
                out_v(gpu, std::vector<float>(wants[2].size(), std::numeric_limits<float>::quiet_NaN()));
            std::vector<cuda::Operation> ops(6);
            const auto                   weight = [](const OnDevice<std::uint16_t>& data, int rows, int cols) {
                cuda::Weight w;
                w.rows = rows, w.cols = cols, w.data = data.data;
                return w;
            };
            const auto gemm = [&](cuda::Operation& op, const OnDevice<std::uint16_t>& of, int cols,
                                  std::initializer_list<cuda::Projection> list) {
                op.kind = cuda::Operation::gemm, op.x = of.data, op.rows = n, op.cols = cols;
                for (const cuda::Projection& p : list) op.projection[op.n_projections++] = p;
            };
            const OnDevice<float> there_residual(gpu, residual);
            const auto norm = [&](cuda::Operation& op, const OnDevice<std::uint16_t>& out, const OnDevice<float>& w) {
                op.kind = cuda::Operation::norm, op.x = not_written.data, op.residual = there_residual.data;
                op.norm_weight = w.data, op.eps = 1e-5f, op.out = out.data, op.rows = n, op.cols = hidden;
            };
            gemm(ops[0], there_x, from,
                 {{weight(there_o, hidden, from), there_bias.data, not_written.data, false, float(by)}});
            norm(ops[1], there_a, there_norm_a);
            gemm(ops[2], there_a, hidden,
                 {{weight(there_gate, ff, hidden), nullptr, there_g.data, false},
                  {weight(there_up, ff, hidden), nullptr, there_u.data, false}});
            ops[2].kind = cuda::Operation::gated_gemm, ops[2].activation = activation;
            gemm(ops[3], there_g, ff, {{weight(there_down, hidden, ff), nullptr, not_written.data, false, float(by)}});
            norm(ops[4], there_b, there_norm_b);
            gemm(ops[5], there_b, hidden,
                 {{weight(there_q, q_rows, hidden), nullptr, out_q.data, false},
                  {weight(there_k, kv, hidden), nullptr, out_k.data, false},
                  {weight(there_v, kv, hidden), nullptr, mode > 0 ? static_cast<void*>(out_vh.data) : out_v.data,
                   mode == 0}});
            const OnDevice<std::int32_t> there_positions(gpu, positions), there_slots(gpu, slots);
            const OnDevice<float>        there_frequencies(gpu, frequencies);
            const auto cache = std::vector<std::uint16_t>(std::size_t(70) * 4 * std::size_t(kv), fp16_nan);
            const OnDevice<std::uint16_t> cache_k(gpu, cache), cache_v(gpu, cache);
            cuda::Plan                    plan;
            plan.positions = there_positions.data, plan.slots = there_slots.data;
            if (mode > 0) {
                cuda::RopeStore& rope = ops.emplace_back().rope;
                ops.back().kind       = cuda::Operation::rope_and_store;
                rope.q = out_q.data, rope.k = out_k.data, rope.v = out_vh.data;
                rope.cache_k = cache_k.data, rope.cache_v = cache_v.data, rope.inv_freq = there_frequencies.data;
                rope.n_pairs = D / 2, rope.n_heads = q_rows / D, rope.n_kv_heads = kv / D, rope.head_dim = D;
                rope.block_size = 4, rope.neox = mode == 2, rope.q_dim = rope.value_dim = D;
            }
            for (int round = 0; round < 3; round++) { // the counters are ready for the next launch
                cuda::upload(there_residual.data, residual.data(), residual.size() * sizeof(float), gpu);
                const int done = cuda::run_layer_kernel(ops.data(), int(ops.size()), n, plan, gpu);
                if (done == 0) {
                    WARN("not tested: only Hopper has this kernel");
                    return;
                }
                REQUIRE(done == int(ops.size()));
                cuda::synchronize(gpu);
            }
            CHECK(relative_error(floats_of(there_a.back(gpu)), a) < 2e-3);
            CHECK(relative_error(floats_of(there_g.back(gpu)), g) < 4e-3);
            CHECK(relative_error(there_residual.back(gpu), sum) < 4e-3);
            CHECK(relative_error(floats_of(there_b.back(gpu)), b) < 4e-3);
            CHECK(relative_error(floats_of(out_q.back(gpu)), wants[0]) < 8e-3);
            if (mode == 0) {
                CHECK(relative_error(floats_of(out_k.back(gpu)), wants[1]) < 8e-3);
                CHECK(relative_error(out_v.back(gpu), wants[2]) < 8e-3);
                continue;
            }
            // In the cache are the tokens that have slots, and nothing else.
            const std::vector<float> got[] = {floats_of(cache_k.back(gpu)), floats_of(cache_v.back(gpu))};
            for (int which : {0, 1}) {
                const Rows&        want = wants[1 + which];
                Rows               wanted;
                std::vector<float> stored;
                const auto         total = std::ranges::count_if(got[which], [](float x) { return !std::isnan(x); });
                for (int t = 0; t < n; t++)
                    for (int c = 0; c < kv && slots[std::size_t(t)] >= 0; c++) {
                        const int slot = slots[std::size_t(t)];
                        wanted.push_back(want[std::size_t(t * kv + c)]);
                        stored.push_back(
                            got[which][std::size_t(((slot / 4 * (kv / D) + c / D) * 4 + slot % 4) * D + c % D)]);
                    }
                CHECK(relative_error(stored, wanted) < 8e-3);
                CHECK(total == std::ptrdiff_t(wanted.size()));
            }
        }
}

TEST_CASE("GPU: attention over blocks equals plain attention", "[cuda]") {
    if (no_gpu()) return;
    const Gpu    gpu;
    std::mt19937 random(2);
    struct Case {
        int   D, heads, kv_heads, block, context, n_queries, window;
        float softcap;
        bool  decodes   = n_queries == 1; // each query for itself, as those of many sequences
        int   value_dim = 0;              // of a latent cache
    };
    std::vector<Case> cases;
    for (int D : {16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256})
        for (auto [heads, kv] : {std::pair(4, 4), std::pair(4, 2), std::pair(8, 1), std::pair(9, 3)})
            for (auto [context, queries] : {std::pair(1, 1), std::pair(17, 1), std::pair(300, 1), std::pair(513, 1),
                                            std::pair(2100, 1), std::pair(70, 70), std::pair(200, 131)})
                cases.push_back({D, heads, kv, std::array{1, 8, 16, 24, 256}[random() % 5], context, queries,
                                 random() % 3 == 0 ? 33 : 0, random() % 4 == 0 ? 2.5f : 0.0f});
    for (int D : {64, 128}) { // block sizes of all kinds; and more tiles than a GPU has SMs
        for (int block : {1, 4, 8, 12, 16, 32, 40, 64, 128, 256, 384})
            cases.push_back({D, 2, 1, block, 333, 261, block == 32 ? 200 : 0, 0});
        cases.push_back({D, 45, 5, 16, 260, 257, 0, 0});
    }
    for (auto [D, queries] :
         {std::pair(64, 56), std::pair(128, 34), std::pair(256, 12)}) // the last heads' splits are shorter
        for (int window : {0, 500}) cases.push_back({D, 24, 24, 16, 600, queries, window, 0, true});
    // Latent: the shape of DeepSeek-V2, and one of the plain kernel.
    for (auto [D, value] : {std::pair(576, 512), std::pair(80, 64)})
        for (int heads : {1, 16, 17, 40, 128})
            for (auto [context, queries] :
                 {std::pair(1, 1), std::pair(300, 1), std::pair(2100, 1), std::pair(70, 70), std::pair(130, 37)})
                if (heads < 100 || context < 100)
                    cases.push_back({D, heads, 1, std::array{1, 8, 16, 24, 256}[random() % 5], context, queries,
                                     random() % 3 == 0 ? 33 : 0, random() % 4 == 0 ? 2.5f : 0.0f, queries == 1, value});
    for (const Case& c : cases) {
        if (c.D % 16 != 0 && c.n_queries == 1) continue;
        const int  V     = c.value_dim > 0 ? c.value_dim : c.D;
        const bool sinks = random() % 2 == 0;
        CAPTURE(sinks, c.value_dim, c.D, c.heads, c.kv_heads, c.block, c.context, c.n_queries, c.window, c.softcap,
                c.decodes);
        const int                 n_blocks = (c.context + c.block - 1) / c.block + 3;
        std::vector<std::int32_t> ids(std::size_t(n_blocks), 0), positions, items, tiles;
        std::iota(ids.begin(), ids.end(), 0);
        std::shuffle(ids.begin(), ids.end(), random);
        const auto n_cache = std::size_t(n_blocks) * std::size_t(c.block) * std::size_t(c.kv_heads) * std::size_t(c.D);
        auto       k = random_fp16(n_cache, random), v = c.value_dim > 0 ? k : random_fp16(n_cache, random);
        const std::vector<float> sink = floats_of(random_fp16(std::size_t(c.heads), random, 3));
        const auto  q     = random_fp16(std::size_t(c.n_queries) * std::size_t(c.heads) * std::size_t(c.D), random);
        const float scale = 1 / std::sqrt(float(c.D));
        auto        at    = [&](int position, int head, int d) {
            return ((std::size_t(ids[std::size_t(position / c.block)]) * std::size_t(c.kv_heads) + std::size_t(head)) *
                        std::size_t(c.block) +
                    std::size_t(position % c.block)) *
                       std::size_t(c.D) +
                   std::size_t(d);
        };
        for (int position = c.context; position < n_blocks * c.block; position++) // nobody may read what is not written
            for (int head = 0; head < c.kv_heads; head++)
                for (int d = 0; d < c.D; d++) k[at(position, head, d)] = v[at(position, head, d)] = fp16_nan;
        std::vector<double> want;
        for (int t = 0; t < c.n_queries; t++) {
            const int last = c.context - c.n_queries + t, first = c.window > 0 ? std::max(0, last - c.window + 1) : 0;
            positions.push_back(last);
            for (int h = 0; h < c.heads; h++) {
                const int           kv = h / (c.heads / c.kv_heads);
                std::vector<double> p;
                double              limit = sinks ? double(sink[std::size_t(h)]) : -1e30, sum = 0;
                for (int j = first; j <= last; j++) {
                    double s = 0;
                    for (int d = 0; d < c.D; d++)
                        s += double(f16_to_f32(
                                 q[(std::size_t(t) * std::size_t(c.heads) + std::size_t(h)) * std::size_t(c.D) +
                                   std::size_t(d)])) *
                             double(f16_to_f32(k[at(j, kv, d)]));
                    s *= double(scale);
                    p.push_back(c.softcap > 0 ? double(c.softcap) * std::tanh(s / double(c.softcap)) : s);
                    limit = std::max(limit, p.back());
                }
                for (double& s : p) sum += s = std::exp(s - limit);
                if (sinks) sum += std::exp(double(sink[std::size_t(h)]) - limit);
                for (int d = 0; d < V; d++) {
                    double o = 0;
                    for (int j = first; j <= last; j++)
                        o += p[std::size_t(j - first)] * double(f16_to_f32(v[at(j, kv, d)]));
                    want.push_back(o / sum);
                }
            }
        }
        OnDevice<std::uint16_t> dk(gpu, k), dv(gpu, v), dq(gpu, q),
            out(gpu, std::vector<std::uint16_t>(want.size(), fp16_nan));
        OnDevice<std::int32_t> dtable(gpu, ids), dstart(gpu, {0}), dpositions(gpu, positions);
        cuda::Plan             plan;
        plan.block_tables = dtable.data, plan.table_start = dstart.data, plan.positions = dpositions.data;
        cuda::Attention a;
        a.q = dq.data, a.cache_k = dk.data, a.cache_v = dv.data, a.out = out.data;
        a.n_heads = c.heads, a.n_kv_heads = c.kv_heads, a.head_dim = c.D, a.block_size = c.block, a.scale = scale,
        a.window = c.window, a.softcap = c.softcap, a.value_dim = V;
        const OnDevice<float> there_sinks(gpu, sink);
        if (sinks) a.sinks = there_sinks.data;
        if (c.value_dim > 0) a.cache_v = nullptr;
        const int tile = cuda::prefill_tile(gpu, c.D, V);
        if (c.decodes && tile > 0) {
            // Short splits, of the lengths that the device is given, and long ones, as very long contexts have them.
            const int  which = c.n_queries == 1 ? int(random() % 3) : 1;
            const auto lengths =
                which == 0 ? cuda::SplitLengths{}
                : which == 1
                    ? cuda::split_lengths(gpu, c.D, V, std::int64_t(1) << (c.n_queries > 1 ? 24 : 8 + random() % 16))
                    : cuda::SplitLengths{256 * int(2 + random() % 7), 0};
            const auto cut = [&](int chunk) {
                const auto before = items.size();
                for (int t = 0; t < c.n_queries; t++) {
                    const int end          = positions[std::size_t(t)] + 1,
                              begin        = c.window > 0 ? std::max(0, end - c.window) : 0,
                              old          = int(random() % 2) * (end - 1);
                    const auto [n, length] = cuda::splits_of(end - begin, chunk);
                    for (int i = 0; i < n; i++)
                        items.insert(items.end(),
                                     {t, 0, begin + i * length, std::min(end, begin + (i + 1) * length), n, i, old});
                }
                return int(items.size() - before) / 7;
            };
            plan.items.n = cut(lengths.length);
            if (lengths.short_length > 0) plan.items.n_short = cut(lengths.short_length);
            OnDevice<std::int32_t> list(gpu, items),
                arrivals(gpu, std::vector<std::int32_t>(std::size_t(c.heads) * std::size_t(c.n_queries), 0));
            OnDevice<float> partial(gpu,
                                    std::vector<float>(items.size() / 7 * std::size_t(c.heads) * std::size_t(V + 2)));
            plan.items.list = reinterpret_cast<const cuda::SplitKvItem*>(list.data);
            for (int again = 0; again < 2; again++) // the arrivals are ready for the next launch
                cuda::attention_decode(a, plan, partial.data, arrivals.data, gpu);
            CHECK(relative_error(floats_of(out.back(gpu)), want) < 5e-3);
            for (std::size_t at = 4; at < items.size(); at += 7)
                if (items[at] > 1) plan.items.n = 0; // in several splits
            if (plan.items.n == 0) continue;
            plan.items.one_warp = true;
            const std::vector<std::uint16_t> none(want.size(), fp16_nan);
            cuda::upload(out.data, none.data(), none.size() * 2, gpu);
            cuda::attention_decode(a, plan, partial.data, arrivals.data, gpu);
            CHECK(relative_error(floats_of(out.back(gpu)), want) < 5e-3);
        } else {
            const int most = std::max(tile, 16);
            for (int row = 0; row < c.n_queries; row += most)
                tiles.insert(tiles.end(), {0, row, std::min(most, c.n_queries - row)});
            OnDevice<std::int32_t> list(gpu, tiles);
            cuda::attention_prefill(a, plan, reinterpret_cast<const cuda::PrefillTile*>(list.data),
                                    int(tiles.size() / 3), gpu);
            CHECK(relative_error(floats_of(out.back(gpu)), want) < 5e-3);
        }
    }
}

TEST_CASE("a deterministic step whose splits exceed a launch takes several, with whole rows") {
    std::vector<cuda::SplitKvItem> items;
    for (const int n : {3, 1, 4, 4, 2, 1}) // splits of each row
        for (int i = 0; i < n; i++) items.push_back({.n_splits = n, .split = i});
    std::vector<int> begins;
    launches_of(items, 100, begins);
    CHECK(begins == std::vector<int>{0, 15});
    launches_of(items, 5, begins);
    CHECK(begins == std::vector<int>{0, 4, 8, 12, 15});
    launches_of(items, 4, begins);
    CHECK(begins == std::vector<int>{0, 4, 8, 12, 15});
    launches_of({}, 4, begins);
    CHECK(begins == std::vector<int>{0, 0});
}

namespace {

// The share of the random numbers that leads to a token, in double precision, step by step as the parameters are explained:
// nothing for a token that is left out.
std::pair<double, double> share_of(Token token, std::span<const float> row, std::span<const cuda::LogitEdit> edits,
                                   const cuda::SampleTask& t) {
    std::vector<double> x(row.begin(), row.end());
    if (t.only_edited) std::ranges::fill(x, -std::numeric_limits<double>::infinity());
    for (const cuda::LogitEdit& e : edits) {
        const double logit = double(row[std::size_t(e.token)]);
        x[std::size_t(e.token)] =
            (logit > 0 ? logit / double(e.divide) : logit * double(e.divide)) - double(e.subtract) + double(e.add);
    }
    std::vector<int> order(x.size());
    std::iota(order.begin(), order.end(), 0);
    for (double& logit : x)
        if (std::isnan(logit)) logit = -std::numeric_limits<double>::infinity();
    const bool top_k     = t.mirostat == 0 && t.top_k > 0 && t.top_k < int(x.size());
    const bool truncates = top_k || t.top_p < 1 || t.min_p > 0 || t.mirostat > 0 || t.top_n_sigma > 0 ||
                           t.typical_p < 1 || t.xtc_threshold <= 0.5f;
    const auto better = [&](int a, int b) { return float(x[std::size_t(a)]) > float(x[std::size_t(b)]); };
    if (truncates) std::stable_sort(order.begin(), order.end(), better);
    const auto finite = [&](int i) { return std::isfinite(x[std::size_t(i)]); };
    std::erase_if(order, [&](int i) { return !finite(i); });
    double     temperature = t.mirostat > 0 ? double(t.temperature) : 1;
    double     limit       = *std::ranges::max_element(x);
    const auto mass        = [&](int i) { return std::exp((x[std::size_t(i)] - limit) / temperature); };
    const auto sum         = [&](auto measure) {
        double all = 0;
        for (int i : order) all += measure(i);
        return all;
    };
    const auto depth = [&](int i) { return limit - x[std::size_t(i)]; };
    if (t.mirostat == 2) {
        const double total = sum(mass);
        while (order.size() > 1 && std::log2(total / mass(order.back())) > double(t.mu)) order.pop_back();
    } else if (t.mirostat == 1) {
        double products = 0, squares = 0;
        for (std::size_t i = 0; i + 1 < std::min(order.size(), std::size_t(100)); i++) {
            const double log = std::log(double(i + 2) / double(i + 1));
            products += log * (depth(order[i + 1]) - depth(order[i])) / temperature;
            squares += log * log;
        }
        const double k = zipf_rank(squares > 0 ? products / squares : 0, double(t.mu), double(x.size()));
        order.resize(std::size_t(std::clamp(k, 1.0, double(order.size()))));
    } else {
        if (t.top_n_sigma > 0) {
            const double n = double(order.size()), mean = sum([&](int i) { return x[std::size_t(i)]; }) / n;
            const double squares = sum([&](int i) { return (x[std::size_t(i)] - mean) * (x[std::size_t(i)] - mean); });
            while (order.size() > 1 && depth(order.back()) > double(t.top_n_sigma) * std::sqrt(squares / n))
                order.pop_back();
        }
        if (top_k) order.resize(std::min(order.size(), std::size_t(t.top_k)));
        if (t.typical_p < 1) {
            const double     total = sum(mass), mean = sum([&](int i) { return mass(i) * depth(i); }) / total;
            const auto       distance = [&](int i) { return double(std::abs(float(depth(i)) - float(mean))); };
            std::vector<int> closest  = order;
            std::stable_sort(closest.begin(), closest.end(), [&](int a, int b) { return distance(a) < distance(b); });
            double      so_far = 0;
            std::size_t n      = 0;
            while (n < closest.size() && (n == 0 || so_far < double(t.typical_p) * total)) so_far += mass(closest[n++]);
            const double most = distance(closest[n - 1]);
            std::erase_if(order, [&](int i) { return distance(i) > most; });
            limit = x[std::size_t(order[0])];
        }
        if (t.top_p < 1) {
            const double total  = sum(mass);
            double       so_far = 0;
            std::size_t  n      = 0;
            while (n < order.size() && (n == 0 || so_far < double(t.top_p) * total)) so_far += mass(order[n++]);
            order.resize(n);
        }
        while (t.min_p > 0 && order.size() > 1 && mass(order.back()) < double(t.min_p)) order.pop_back();
        if (t.xtc_threshold <= 0.5f) {
            const double total = sum(mass);
            std::size_t  n     = 0;
            while (n < order.size() && mass(order[n]) >= double(t.xtc_threshold) * total) n++;
            if (n > 1) order.erase(order.begin(), order.begin() + std::ptrdiff_t(n - 1));
            limit = x[std::size_t(order[0])];
        }
        double shaped = double(t.temperature);
        if (t.dynatemp_range > 0 && order.size() > 1) {
            double lowest = limit;
            for (int i : order) lowest = std::max(lowest, x[std::size_t(i)]);
            limit                = lowest;
            const double total   = sum(mass),
                         entropy = std::log(total) + sum([&](int i) { return mass(i) * depth(i); }) / total;
            const double low     = std::max(0.0, shaped - double(t.dynatemp_range)),
                         high    = shaped + double(t.dynatemp_range);
            shaped = low + (high - low) * std::pow(std::clamp(entropy / std::log(double(order.size())), 0.0, 1.0),
                                                   double(t.dynatemp_exponent));
        }
        temperature = shaped;
    }
    for (int i : order) limit = std::max(limit, x[std::size_t(i)]);
    double total = sum(mass), so_far = 0;
    for (int i : order) {
        if (i == token) return {so_far / total, (so_far + mass(i)) / total};
        so_far += mass(i);
    }
    return {2, 2};
}

} // namespace

TEST_CASE("GPU: sampling draws what its parameters and random numbers say", "[cuda]") {
    if (no_gpu()) return;
    const Gpu    gpu;
    std::mt19937 random(7);
    auto         below = [&](int n) { return int(random() % unsigned(n)); };
    for (int vocab : {1, 5, 257, 4097, 32000, 152064})
        for (int round = 0; round < (vocab > 4097 ? 12 : 40); round++) {
            const int                       n_rows = 1 + below(4);
            std::normal_distribution<float> normal(0, std::array{0.1f, 1.0f, 4.0f, 12.0f}[std::size_t(below(4))]);
            std::vector<float>              logits(std::size_t(n_rows) * std::size_t(vocab));
            for (float& x : logits) x = round % 5 == 4 ? std::round(normal(random)) : normal(random); // ties
            constexpr float infinity = std::numeric_limits<float>::infinity();
            if (round % 7 == 3) { // a first row that nothing can be made of
                logits[std::size_t(vocab) / 2] = round % 3 == 0 ? std::numeric_limits<float>::quiet_NaN() : infinity;
                if (round % 3 == 2) std::fill_n(logits.begin(), vocab, -infinity);
                if (n_rows > 1 && vocab > 5) logits[std::size_t(vocab) + 3] = -infinity;
            }
            std::vector<cuda::SampleTask>   tasks;
            std::vector<cuda::LogitEdit>    edits;
            std::vector<double>             numbers;
            std::vector<std::uint32_t>      masks;
            std::vector<SamplingParams>     all;
            std::vector<std::vector<Token>> histories;
            Sampler                         sampler(vocab);
            int                             words = 0;
            for (int r = 0; r < n_rows; r++) {
                SamplingParams p;
                p.temperature = below(6) == 0 ? 0 : std::array{0.2f, 0.7f, 1.0f, 1.8f}[std::size_t(below(4))];
                p.top_k       = below(2) ? 0 : 1 + below(std::array{3, 50, 6000}[std::size_t(below(3))]);
                p.top_p       = below(2) ? 1 : std::array{0.01f, 0.5f, 0.95f, 0.9999f}[std::size_t(below(4))];
                p.min_p       = below(2) ? 0 : std::array{0.001f, 0.05f, 0.9f}[std::size_t(below(3))];
                if (round % 3 == 2) { // the other samplers
                    if (below(3) == 0) p.top_n_sigma = std::array{0.5f, 1.0f, 2.5f}[std::size_t(below(3))];
                    if (below(3) == 0) p.typical_p = std::array{0.05f, 0.5f, 0.95f}[std::size_t(below(3))];
                    if (below(3) == 0)
                        p.xtc_threshold = std::array{0.01f, 0.1f, 0.4f}[std::size_t(below(3))], p.xtc_probability = 1;
                    if (below(3) == 0)
                        p.dynatemp_range    = 0.5f,
                        p.dynatemp_exponent = std::array{0.5f, 1.0f, 2.0f}[std::size_t(below(3))];
                    if (below(4) == 0) p.mirostat = 1 + below(2);
                }
                if (below(2)) p.repetition_penalty = 1.3f;
                if (below(2)) p.presence_penalty = 0.5f, p.frequency_penalty = -0.25f;
                if (below(3) == 0)
                    p.logit_bias = {{below(vocab), 3.0f}, {below(vocab), -std::numeric_limits<float>::infinity()}};
                if (below(4) == 0) // some twice
                    for (int i = below(60); i >= 0; i--) p.allowed_tokens.push_back(below(vocab));
                p.seed = random();
                std::vector<Token> history;
                for (int i = below(40); i >= 0; i--) history.push_back(below(vocab));
                cuda::SampleTask t;
                t.row            = r;
                t.first_edit     = int(edits.size());
                t.first_draw     = int(numbers.size());
                t.n_draws        = 1 + below(3);
                t.n_top          = std::min({below(40), vocab, cuda::max_top});
                t.first_out      = words;
                t.wants_logprobs = 1;
                t.top_k = p.top_k, t.temperature = p.temperature, t.top_p = p.top_p, t.min_p = p.min_p;
                t.top_n_sigma = p.top_n_sigma, t.typical_p = p.typical_p, t.dynatemp_range = p.dynatemp_range;
                t.dynatemp_exponent = p.dynatemp_exponent;
                if (p.xtc_probability > 0) t.xtc_threshold = p.xtc_threshold;
                if (p.temperature > 0)
                    t.mirostat = p.mirostat, t.mu = std::array{0.5f, 3.0f, 9.0f}[std::size_t(below(3))];
                if (r > 0 && below(4) == 0) t.chosen = below(vocab), t.n_draws = 1;
                std::vector<LogitEdit> own;
                if (t.chosen < 0) sampler.list_edits(p, history, int(history.size()) / 2, {}, own);
                for (const LogitEdit& e : own) edits.push_back({e.token, e.divide, e.subtract, e.add});
                t.n_edits     = int(own.size());
                t.only_edited = t.chosen < 0 && !p.allowed_tokens.empty();
                for (int i = 0; i < t.n_draws; i++)
                    numbers.push_back(random_at(p.seed + std::uint64_t(i), history.size()));
                words += 2 * (t.n_draws * (t.mirostat > 0 ? 2 : 1) + t.n_top);
                if (round % 7 != 3 && vocab > 256 && t.chosen < 0 && below(3) == 0) { // some tokens are not allowed
                    t.first_mask = int(masks.size());
                    for (int i = 0; i < (vocab + 63) / 64 * 2; i++) masks.push_back(std::uint32_t(random() | 1));
                }
                tasks.push_back(t);
                all.push_back(p);
                histories.push_back(history);
            }
            edits.emplace_back(); // never an empty buffer
            masks.emplace_back();
            OnDevice<float> rows(gpu, logits);
            for (const cuda::SampleTask& t : tasks) // what is compared with below
                for (int i = 0; t.first_mask >= 0 && i < vocab; i++)
                    if ((masks[std::size_t(t.first_mask + i / 32)] >> (i % 32) & 1) == 0)
                        logits[std::size_t(t.row) * std::size_t(vocab) + std::size_t(i)] = -infinity;
            OnDevice<cuda::SampleTask> there(gpu, tasks);
            OnDevice<cuda::LogitEdit>  changes(gpu, edits);
            OnDevice<double>           random_numbers(gpu, numbers);
            OnDevice<std::uint32_t>    allowed(gpu, masks);
            OnDevice<std::int32_t>     out(gpu, std::vector<std::int32_t>(std::size_t(words), -7));
            cuda::sample(rows.data, vocab, there.data, n_rows, changes.data, random_numbers.data, allowed.data,
                         out.data, gpu);
            const std::vector<std::int32_t> got = out.back(gpu);
            for (int r = 0; r < n_rows; r++) {
                const cuda::SampleTask&      t = tasks[std::size_t(r)];
                const std::span<const float> row(logits.data() + std::ptrdiff_t(r) * vocab, std::size_t(vocab));
                CAPTURE(vocab, round, r, t.top_k, t.top_p, t.min_p, t.temperature, t.n_edits, t.chosen);
                const auto at = [&](int i) {
                    return TokenLogprob{got[std::size_t(t.first_out + 2 * i)],
                                        std::bit_cast<float>(got[std::size_t(t.first_out + 2 * i + 1)])};
                };
                if (round % 7 == 3 && r == 0) {
                    for (int i = 0; i < t.n_draws + t.n_top; i++) CHECK(at(i).token == -1);
                    continue;
                }
                const PositionLogprobs want = sampler.logprobs(row, t.chosen, t.n_top);
                for (int i = 0; i < t.n_top; i++) {
                    CHECK(at(t.n_draws + i).token == want.top[std::size_t(i)].token);
                    const float lp = want.top[std::size_t(i)].logprob, mine = at(t.n_draws + i).logprob;
                    CHECK((lp == mine || std::abs(lp - mine) < 1e-4f * (1 + std::abs(lp))));
                }
                for (int i = 0; i < t.n_draws; i++) {
                    const auto [token, logprob] = at(i);
                    const std::span<const cuda::LogitEdit> own(edits.data() + t.first_edit, std::size_t(t.n_edits));
                    if (token < 0) { // only where no token can come
                        CHECK(token == -1);
                        CHECK(t.chosen < 0);
                        for (Token other = 0; other < vocab; other++) {
                            const auto edit = std::ranges::find(own, other, &cuda::LogitEdit::token);
                            if (edit == own.end() && !t.only_edited) CHECK(row[std::size_t(other)] == -infinity);
                            if (edit != own.end())
                                CHECK((row[std::size_t(other)] == -infinity || edit->add == -infinity));
                        }
                        continue;
                    }
                    REQUIRE(token < vocab);
                    const double raw = sampler.logprob(row, token);
                    CHECK((raw == double(logprob) || std::abs(raw - double(logprob)) < 1e-4 * (1 + std::abs(raw))));
                    const bool possible = std::ranges::any_of(own, [&](const cuda::LogitEdit& e) {
                        return std::isfinite(row[std::size_t(e.token)]) && std::isfinite(e.add);
                    });
                    if (t.only_edited && possible)
                        CHECK(std::ranges::find(own, token, &cuda::LogitEdit::token) != own.end());
                    if (t.chosen >= 0) CHECK(token == t.chosen);
                    else if (t.temperature <= 0) {
                        CHECK(token == sampler.sample(row, all[std::size_t(r)], histories[std::size_t(r)],
                                                      int(histories[std::size_t(r)].size()) / 2));
                    } else if (std::ranges::any_of(row, [](float x) { return std::isfinite(x); }) && vocab > 1 &&
                               (possible || !t.only_edited)) {
                        const auto [lo, hi] = share_of(token, row, own, t);
                        const double number = numbers[std::size_t(t.first_draw + i)];
                        CAPTURE(token, lo, hi, number);
                        CHECK((number > lo - 2e-5 && number < hi + 2e-5));
                        if (t.mirostat > 0) { // its surprise among those that were left
                            CHECK(at(t.n_draws + t.n_top + i).token == token);
                            CHECK(std::abs(std::exp2(-double(at(t.n_draws + t.n_top + i).logprob)) - (hi - lo)) < 1e-4);
                        }
                    }
                }
            }
        }
}

TEST_CASE("GPU: requests with sampling, log-probabilities and beams answer as on the CPU", "[cuda]") {
    if (no_gpu()) return;
    EngineOptions o;
    o.device                 = "cpu";
    Engine cpu               = load(reference("models/llama3-gqa-F16.gguf"), o);
    o.device                 = "cuda";
    o.kv_blocks              = 512;
    Engine               gpu = load(reference("models/llama3-gqa-F16.gguf"), o);
    std::mt19937         random(8);
    std::vector<Request> requests;
    for (int i = 0; i < 24; i++) {
        Request r;
        for (int n = 3 + int(random() % 60); n > 0; n--)
            r.prompt.push_back(int(random() % unsigned(cpu.config().vocab_size)));
        r.max_tokens        = 6;
        r.ignore_end        = true;
        r.sampling.seed     = random();
        r.sampling.logprobs = i % 3 == 0 ? -1 : 3;
        if (i % 4 == 1) r.beam_width = 3, r.n = 2;
        if (i % 4 == 2) r.sampling.top_k = 5, r.sampling.repetition_penalty = 1.2f, r.n = 2;
        if (i % 4 == 3) r.prompt_logprobs = 2, r.sampling.temperature = 0;
        if (i % 8 == 0) r.best_of = 3;
        if (i % 6 == 2) r.sampling.allowed_tokens = {20, 21, 22, 300, 301, 400};
        if (i % 12 == 0) r.best_of = 0, r.sampling.mirostat = 2, r.sampling.mirostat_tau = 3;
        if (i % 12 == 8) r.best_of = 0, r.sampling.typical_p = 0.7f, r.sampling.dynatemp_range = 0.5f;
        if (i % 12 == 4)
            r.best_of = 0, r.sampling.xtc_probability = 0.5f, r.sampling.top_n_sigma = 1, r.sampling.dry.multiplier = 1;
        requests.push_back(std::move(r));
    }
    const auto want = run(cpu, requests), got = run(gpu, requests);
    int        tokens = 0, same = 0;
    for (std::size_t i = 0; i < requests.size(); i++) {
        CAPTURE(i);
        REQUIRE(got[i].prompt_logprobs.size() == want[i].prompt_logprobs.size());
        for (std::size_t k = 0; k < want[i].prompt_logprobs.size(); k++) {
            CHECK(got[i].prompt_logprobs[k].chosen.token == want[i].prompt_logprobs[k].chosen.token);
            CHECK(std::abs(got[i].prompt_logprobs[k].chosen.logprob - want[i].prompt_logprobs[k].chosen.logprob) <
                  0.15f);
        }
        REQUIRE(got[i].tokens.size() == want[i].tokens.size());
        REQUIRE(got[i].logprobs.size() == want[i].logprobs.size());
        bool alike = true;
        for (std::size_t k = 0; k < want[i].tokens.size(); k++) {
            alike = alike && got[i].tokens[k] == want[i].tokens[k];
            tokens++;
            same += alike;
            if (alike && !want[i].logprobs.empty())
                CHECK(std::abs(got[i].logprobs[k].chosen.logprob - want[i].logprobs[k].chosen.logprob) < 0.15f);
        }
    }
    CAPTURE(tokens, same); // random weights make close choices: most of the tokens, not all
    CHECK(same * 10 >= tokens * 7);
}

TEST_CASE("GPU: the engine answers as on the CPU", "[cuda]") {
    if (no_gpu()) return;
    for (const char* name :
         {"llama3-gqa-F16.gguf", "llama3-gqa-Q8_0.gguf", "mistral-swa-Q8_0.gguf", "qwen2-Q4_0.gguf", "gpt2-F32.gguf",
          "command-r-F16.gguf", "gemma2-Q8_0.gguf", "gemma3-F16.gguf", "glm4-F16.gguf", "granite-F16.gguf",
          "granite-Q8_0.gguf", "olmo2-F16.gguf", "opt-F16.gguf", "phi2-F16.gguf", "phi3-Q8_0.gguf", "smollm3-F16.gguf",
          "stablelm-F16.gguf", "starcoder2-F16.gguf"}) {
        CAPTURE(name);
        if (!has_reference(cat("models/", name))) continue;
        EngineOptions o;
        o.device                 = "cpu";
        Engine cpu               = load(reference(cat("models/", name)), o);
        o.device                 = "cuda";
        o.kv_blocks              = 512;
        Engine               gpu = load(reference(cat("models/", name)), o);
        std::mt19937         random(3);
        std::vector<Request> requests;
        for (int n : {1, 7, 16, 33, 130, 300}) {
            std::vector<Token> prompt;
            for (int i = 0; i < n; i++) prompt.push_back(int(random() % unsigned(cpu.config().vocab_size)));
            requests.push_back(greedy(prompt, 16));
        }
        const auto want = run(cpu, requests), got = run(gpu, requests);
        for (std::size_t i = 0; i < requests.size(); i++) {
            double squares = 0;
            for (std::size_t t = 0; t < want[i].prompt_logits.size(); t++)
                squares += std::pow(double(got[i].prompt_logits[t]) - double(want[i].prompt_logits[t]), 2);
            CHECK(std::sqrt(squares / double(want[i].prompt_logits.size())) < 0.05);
            // The same token wherever the choice is not close.
            for (std::size_t k = 0; k < want[i].tokens.size(); k++) {
                if (want[i].tokens[k] == got[i].tokens[k]) continue;
                const auto& top = want[i].logprobs[k].top;
                CHECK(top[0].logprob - top[1].logprob < 0.2f);
                break;
            }
        }
    }
}

TEST_CASE("GPU: a sequence alone, by the decode megakernel, answers as on the CPU", "[cuda]") {
    if (no_gpu()) return;
    constexpr ModelShape shapes[] = {{"heads of 64, groups of 4", 3, 512, 8, 2, 1280, 2048, 2048},
                                     {"one kv head for 16", 2, 1024, 16, 1, 512, 2048, 2048},
                                     {"heads of 128, 8 of them", 2, 1024, 8, 8, 2816, 2048, 2048},
                                     {"tiles by the dynamic scheduler", 1, 5120, 40, 8, 6400, 2048, 2048}};
    const std::string    path     = temporary();
    for (const ModelShape& shape : shapes)
        for (DType type : {DType::F16, DType::Q8_0, DType::Q4_0, DType::Q4_K, DType::Q5_K, DType::Q6_K}) {
            CAPTURE(shape.name, dtype_info(type).name);
            REQUIRE(write_random_model(path, shape, type));
            EngineOptions o;
            o.device         = "cpu";
            Engine cpu       = load(path, o);
            o.device         = "cuda";
            o.kv_blocks      = 512;
            Engine       gpu = load(path, o);
            std::mt19937 random(5);
            for (int n : {1, 15, 130, 250, 700, 1900}) { // one chunk of attention, and some; a long prompt
                CAPTURE(n);
                std::vector<Token> prompt;
                for (int i = 0; i < n; i++) prompt.push_back(int(random() % unsigned(shape.vocab_size)));
                const std::vector<Request> one{greedy(prompt, 12)};
                const Answer               want = run(cpu, one)[0], got = run(gpu, one)[0];
                REQUIRE(got.logprobs.size() == want.logprobs.size());
                for (std::size_t k = 0; k < want.tokens.size(); k++) {
                    const auto& top = want.logprobs[k].top;
                    CAPTURE(k);
                    if (want.tokens[k] != got.tokens[k]) { // only where the choice is close
                        CHECK(top[0].logprob - top[1].logprob < 0.1f);
                        break;
                    }
                    CHECK(std::abs(got.logprobs[k].chosen.logprob - want.logprobs[k].chosen.logprob) < 0.05f);
                }
            }
        }
    unlink(path.c_str());
}

TEST_CASE("GPU, deterministic: random mixes give every request the bits it gets alone", "[cuda]") {
    if (no_gpu()) return;
    const std::string path = reference("models/llama3-gqa-Q8_0.gguf");
    std::mt19937      random(4);
    auto              below = [&](int n) { return int(random() % unsigned(n)); };
    EngineOptions     plain;
    plain.device               = "cuda";
    plain.deterministic        = true;
    plain.kv_blocks            = 256;
    plain.context              = 200;
    plain.prefix_cache         = false;
    Engine               alone = load(path, plain);
    std::vector<Request> requests;
    std::vector<Token>   common(60);
    for (Token& t : common) t = below(alone.config().vocab_size);
    for (int i = 0; i < 12; i++) {
        std::vector<Token> prompt(common.begin(), common.begin() + (i % 2 ? below(60) : 0));
        for (int n = 1 + below(60); n > 0; n--) prompt.push_back(below(alone.config().vocab_size));
        requests.push_back(greedy(std::move(prompt), 1 + below(40)));
        if (i % 4 == 1) requests.back().sampling.temperature = 1;
    }
    std::vector<Answer> expected;
    for (const Request& r : requests) expected.push_back(run(alone, {r})[0]);
    std::uint64_t preemptions = 0;
    for (int round = 0; round < 12; round++) {
        EngineOptions o    = plain;
        o.block_size       = std::array{1, 8, 16, 32}[std::size_t(round % 4)];
        o.preemption_mode  = round % 2 ? PreemptionMode::swap : PreemptionMode::recompute;
        o.prefix_cache     = round % 3 != 0;
        o.max_sequences    = 2 + below(8);
        o.max_batch_tokens = o.max_sequences + below(90);
        o.kv_blocks        = (200 + o.block_size - 1) / o.block_size + below(4);
        CAPTURE(round, o.block_size, o.max_sequences, o.max_batch_tokens, o.prefix_cache, o.kv_blocks);
        Engine     engine = load(path, o);
        const auto got    = run(engine, requests);
        for (std::size_t i = 0; i < requests.size(); i++) {
            CAPTURE(i);
            CHECK(identical(got[i], expected[i]));
        }
        preemptions += engine.stats().preemptions;
    }
    CHECK(preemptions > 0);
}

TEST_CASE("GPU: norms, activations, GEMM and block copies of odd shapes equal plain sums", "[cuda]") {
    if (no_gpu()) return;
    const Gpu    gpu;
    std::mt19937 random(11);
    for (int cols : {1, 2, 7, 33, 4095, 32768, 32770, 40001})
        for (int mode = 0; mode < 32; mode++) { // with a residual; each kind; with a bias; in place; a GEMM's bias
            CAPTURE(cols, mode);
            constexpr int            rows = 3;
            const auto               n    = std::size_t(rows * cols);
            const auto               x    = random_fp16(n, random);
            const std::vector<float> xs = floats_of(x), residual = floats_of(random_fp16(n, random)),
                                     weight = floats_of(random_fp16(std::size_t(cols), random)),
                                     bias   = floats_of(random_fp16(std::size_t(cols), random));
            OnDevice<std::uint16_t> there(gpu, x), out(gpu, std::vector<std::uint16_t>(n, fp16_nan));
            OnDevice<float>         sums(gpu, residual), w(gpu, weight), b(gpu, bias);
            const bool              adds = mode % 2 != 0, layer = mode / 2 % 2 != 0, none = mode / 4 % 4 == 2;
            const bool              biased = mode / 4 % 4 == 0, in_place = mode / 4 % 4 == 3, left = mode >= 16;
            const auto kind = none ? cuda::NormKind::none : layer ? cuda::NormKind::layer : cuda::NormKind::rms;
            std::vector<double> want;
            for (int r = 0; r < rows; r++) {
                double              mean = 0, squares = 0;
                std::vector<double> row;
                for (int c = 0; c < cols; c++) {
                    const auto i = std::size_t(r * cols + c);
                    row.push_back(double(xs[i]) + (adds ? double(residual[i]) : 0) +
                                  (left ? 0.5 * double(bias[std::size_t(c)]) : 0));
                    mean += row.back() / cols;
                }
                if (!layer) mean = 0;
                for (double v : row) squares += (v - mean) * (v - mean) / cols;
                for (int c = 0; c < cols; c++)
                    want.push_back(none ? row[std::size_t(c)]
                                        : (row[std::size_t(c)] - mean) / std::sqrt(squares + 1e-5) *
                                                  double(weight[std::size_t(c)]) +
                                              (layer && biased ? double(bias[std::size_t(c)]) : 0));
            }
            std::uint16_t* const to = in_place ? there.data : out.data;
            cuda::norm(there.data, false, {left ? b.data : nullptr, 0.5f}, kind, w.data,
                       layer && biased ? b.data : nullptr, 1e-5f, adds ? sums.data : nullptr, to, rows, cols, gpu);
            CHECK(relative_error(floats_of((in_place ? there : out).back(gpu)), want) < 2e-3);
        }
    for (auto [rows, cols] : {std::pair(1, 8), std::pair(3, 2056), std::pair(70, 24)}) {
        const auto               n    = std::size_t(rows * cols);
        const auto               x    = random_fp16(n, random);
        const std::vector<float> bias = floats_of(random_fp16(std::size_t(cols), random));
        const OnDevice<float>    b(gpu, bias);
        const auto               sum = [&](std::size_t i) {
            return double(f16_to_f32(x[i])) + 0.5 * double(bias[i % std::size_t(cols)]);
        };
        std::vector<double> want;
        for (std::size_t i = 0; i < n; i++) want.push_back(sum(i));
        OnDevice<std::uint16_t> more(gpu, x);
        cuda::add_bias(more.data, false, b.data, 0.5f, rows, cols, gpu);
        CHECK(relative_error(floats_of(more.back(gpu)), want) < 2e-3);
        for (const cuda::Activation activation : activations) {
            if (activation == cuda::Activation::clamped_swiglu) continue;
            CAPTURE(rows, cols, int(activation));
            for (std::size_t i = 0; i < n; i++) want[i] = activated(activation, sum(i), 1);
            OnDevice<std::uint16_t> there(gpu, x);
            cuda::activate_biased(activation, there.data, {b.data, 0.5f}, rows, cols, gpu);
            CHECK(relative_error(floats_of(there.back(gpu)), want) < 2e-3);
        }
    }
    for (int n : {1, 7, 8, 1003, 4096}) {
        const auto              gate = random_fp16(std::size_t(n), random), up = random_fp16(std::size_t(n), random);
        OnDevice<std::uint16_t> other(gpu, up);
        for (const cuda::Activation activation : activations)
            for (const bool gated : {true, false}) {
                if (!gated && activation == cuda::Activation::clamped_swiglu) continue;
                CAPTURE(n, int(activation), gated);
                OnDevice<std::uint16_t> there(gpu, gate);
                std::vector<double>     want;
                for (int i = 0; i < n; i++)
                    want.push_back(activated(activation, double(f16_to_f32(gate[std::size_t(i)])),
                                             gated ? double(f16_to_f32(up[std::size_t(i)])) : 1));
                cuda::activate(activation, there.data, gated ? other.data : nullptr, n, gpu);
                CHECK(relative_error(floats_of(there.back(gpu)), want) < 2e-3);
            }
    }
    for (auto [rows, cols, n] :
         {std::tuple(1, 1, 1), std::tuple(5, 7, 3), std::tuple(130, 33, 19), std::tuple(9, 1001, 70)}) {
        CAPTURE(rows, cols, n);
        const auto x = random_fp16(std::size_t(n * cols), random), w = random_fp16(std::size_t(rows * cols), random);
        const std::vector<float> xs = floats_of(x), ws = floats_of(w),
                                 bias = floats_of(random_fp16(std::size_t(rows), random));
        std::vector<double> want;
        for (int t = 0; t < n; t++)
            for (int r = 0; r < rows; r++) {
                double sum = double(bias[std::size_t(r)]);
                for (int c = 0; c < cols; c++)
                    sum += double(xs[std::size_t(t * cols + c)]) * double(ws[std::size_t(r * cols + c)]);
                want.push_back(sum);
            }
        for (const bool floats : {false, true}) { // of the weights: as a vector of the file stands
            OnDevice<std::uint16_t> there(gpu, x), fp16(gpu, w);
            OnDevice<float>         full(gpu, ws), b(gpu, bias),
                out(gpu, std::vector<float>(want.size(), std::numeric_limits<float>::quiet_NaN()));
            cuda::Projection p;
            p.weight.form = floats ? cuda::WeightForm::f32 : cuda::WeightForm::f16;
            p.weight.rows = rows, p.weight.cols = cols;
            p.weight.data = floats ? static_cast<void*>(full.data) : fp16.data;
            p.bias = b.data, p.out = out.data, p.out_is_float = true;
            CHECK(cuda::is_regular(p.weight) == false);
            cuda::gemm_plain(there.data, n, cols, &p, 1, gpu);
            CHECK(relative_error(out.back(gpu), want) < 1e-3);
        }
    }
    for (auto [n, x] : {std::pair(70000.0f, 65504.0f), std::pair(-1e9f, -65504.0f)}) { // what fp16 cannot hold
        OnDevice<std::uint16_t> there(gpu, {f32_to_f16(n < 0 ? -300.0f : 300.0f), 0, 0, 0}),
            up(gpu, {f32_to_f16(300), 0, 0, 0});
        cuda::activate(cuda::Activation::silu, there.data, up.data, 1, gpu);
        if (n > 0) CHECK(f16_to_f32(there.back(gpu)[0]) == x);
        OnDevice<float>         floats(gpu, {n, n});
        OnDevice<std::uint16_t> out(gpu, {0, 0});
        cuda::norm(floats.data, true, {}, cuda::NormKind::none, nullptr, nullptr, 0, nullptr, out.data, 1, 2, gpu);
        CHECK(f16_to_f32(out.back(gpu)[1]) == x);
    }
    for (int fp16 : {1, 4, 12, 13, 24}) { // of a block
        std::vector<std::uint16_t> pool(std::size_t(5 * fp16));
        std::iota(pool.begin(), pool.end(), std::uint16_t(1));
        OnDevice<std::uint16_t> there(gpu, pool);
        OnDevice<void*>         bases(gpu, {static_cast<void*>(there.data)});
        OnDevice<std::int32_t>  pairs(gpu, {4, 0, 1, 3});
        cuda::BlockPools        pools{bases.data, bases.data, 1, std::size_t(fp16) * 2};
        cuda::copy_blocks(pools, pairs.data, 2, gpu);
        for (auto [from, to] : {std::pair(4, 0), std::pair(1, 3)})
            std::copy_n(pool.begin() + from * fp16, fp16, pool.begin() + to * fp16);
        CHECK(there.back(gpu) == pool);
    }
}

TEST_CASE("GPU: RoPE and KV store of every form equal plain loops", "[cuda]") {
    if (no_gpu()) return;
    const Gpu    gpu;
    std::mt19937 random(21);
    struct Shape {
        int  n, heads, kv_heads, D, n_pairs, q_dim, q_first, value_dim;
        bool neox;
        bool biased = false; // by what a GEMM has left
    };
    for (const Shape& s :
         {Shape{3, 4, 2, 64, 32, 64, 0, 64, true}, Shape{40, 4, 2, 64, 16, 64, 0, 64, true},
          Shape{40, 4, 2, 64, 16, 64, 0, 64, false}, Shape{5, 3, 3, 80, 0, 80, 0, 80, false},
          Shape{40, 6, 2, 80, 0, 80, 0, 80, false, true}, Shape{3, 64, 64, 64, 0, 64, 0, 64, false, true},
          Shape{5, 3, 1, 15, 5, 15, 0, 15, true}, Shape{3, 16, 1, 576, 32, 192, 128, 512, false},
          Shape{40, 5, 1, 576, 32, 192, 128, 512, true}, Shape{7, 4, 1, 80, 8, 48, 32, 64, false},
          Shape{7, 3, 1, 27, 3, 17, 11, 21, false}}) {
        CAPTURE(s.n, s.heads, s.kv_heads, s.D, s.n_pairs, s.q_dim, s.q_first, s.value_dim, s.neox);
        const bool latent = s.value_dim != s.D;
        const int  k_dim = latent ? s.D - s.value_dim : s.D, block = 4;
        const auto q    = random_fp16(std::size_t(s.n * s.heads * s.q_dim), random),
                   k    = random_fp16(std::size_t(s.n * s.kv_heads * k_dim), random),
                   v    = random_fp16(std::size_t(s.n * s.kv_heads * s.value_dim), random);
        const auto bias = [&](int heads) {
            std::vector<float> of = floats_of(random_fp16(std::size_t(heads * s.D), random));
            if (!s.biased) std::ranges::fill(of, 0.0f);
            return of;
        };
        const std::vector<float>  q_bias = bias(s.heads), k_bias = bias(s.kv_heads), v_bias = bias(s.kv_heads);
        const OnDevice<float>     there_q_bias(gpu, q_bias), there_k_bias(gpu, k_bias), there_v_bias(gpu, v_bias);
        std::vector<float>        frequencies;
        std::vector<std::int32_t> positions, slots;
        for (int i = 0; i < s.n_pairs; i++) frequencies.push_back(float(std::pow(10000.0, -2.0 * i / (2 * s.n_pairs))));
        for (int t = 0; t < s.n; t++) positions.push_back(13 * t + 1), slots.push_back(t + 1 == s.n ? -1 : 2 + 2 * t);
        frequencies.push_back(0); // never an empty buffer
        const auto cache = std::vector<std::uint16_t>(std::size_t((2 * s.n + 8) * s.kv_heads * s.D), fp16_nan);
        const OnDevice<std::uint16_t> there_q(gpu, q), there_k(gpu, k), there_v(gpu, v), cache_k(gpu, cache),
            cache_v(gpu, cache);
        const OnDevice<float>        there_frequencies(gpu, frequencies);
        const OnDevice<std::int32_t> there_positions(gpu, positions), there_slots(gpu, slots);
        cuda::Plan                   plan;
        plan.positions = there_positions.data, plan.slots = there_slots.data;
        cuda::RopeStore a;
        a.q = there_q.data, a.k = there_k.data, a.v = there_v.data, a.cache_k = cache_k.data;
        a.cache_v = latent ? nullptr : cache_v.data, a.inv_freq = there_frequencies.data, a.n_pairs = s.n_pairs;
        a.n_heads = s.heads, a.n_kv_heads = s.kv_heads, a.head_dim = s.D, a.block_size = block, a.q_dim = s.q_dim;
        a.q_first = s.q_first, a.value_dim = s.value_dim, a.scale = 1.25f, a.neox = s.neox;
        if (s.biased) {
            REQUIRE(cuda::can_add_biases(a));
            a.q_bias = there_q_bias.data, a.k_bias = there_k_bias.data, a.v_bias = there_v_bias.data;
        }
        cuda::rope_and_store(a, plan, s.n, gpu);
        const auto plus = [&](const std::vector<std::uint16_t>& x, const std::vector<float>& of) {
            std::vector<float> xs = floats_of(x);
            for (std::size_t i = 0; s.biased && i < xs.size(); i++) xs[i] += of[i % of.size()];
            return xs;
        };
        const auto rotated = [&](const std::vector<float>& xs, int heads, int dim, int first) {
            std::vector<double> out(xs.begin(), xs.end());
            for (int head = 0; head < s.n * heads; head++)
                for (int i = 0; i < s.n_pairs; i++) {
                    const int one = s.neox ? i : 2 * i, other = s.neox ? i + s.n_pairs : 2 * i + 1;
                    double &  c = out[std::size_t(head * dim + first + one)],
                           &d   = out[std::size_t(head * dim + first + other)];
                    const double angle =
                        double(positions[std::size_t(head / heads)]) * double(frequencies[std::size_t(i)]);
                    const double turned = 1.25 * (c * std::cos(angle) - d * std::sin(angle));
                    d                   = 1.25 * (c * std::sin(angle) + d * std::cos(angle));
                    c                   = turned;
                }
            return out;
        };
        CHECK(relative_error(floats_of(there_q.back(gpu)), rotated(plus(q, q_bias), s.heads, s.q_dim, s.q_first)) <
              1e-3);
        const std::vector<double> ks = rotated(plus(k, k_bias), s.kv_heads, k_dim, 0);
        const std::vector<float>  vs = plus(v, v_bias);
        const auto stored            = [&](const OnDevice<std::uint16_t>& from, int first, int dim, const auto& want) {
            const std::vector<std::uint16_t> all = from.back(gpu);
            std::vector<float>               got;
            std::vector<double>              wanted;
            for (int t = 0; t + 1 < s.n; t++)
                for (int h = 0; h < s.kv_heads; h++)
                    for (int d = 0; d < dim; d++) {
                        const int slot = slots[std::size_t(t)];
                        got.push_back(f16_to_f32(all[std::size_t(
                            ((slot / block * s.kv_heads + h) * block + slot % block) * s.D + first + d)]));
                        wanted.push_back(double(want[std::size_t((t * s.kv_heads + h) * dim + d)]));
                    }
            CHECK(relative_error(got, wanted) < 1e-3);
            return std::ranges::count_if(all, [](std::uint16_t h) { return h != fp16_nan; });
        };
        const auto all = std::ptrdiff_t((s.n - 1) * s.kv_heads * s.D); // and nothing else
        CHECK(stored(cache_k, latent ? s.value_dim : 0, k_dim, ks) == all);
        CHECK(stored(latent ? cache_k : cache_v, 0, s.value_dim, vs) == all);
    }
}

TEST_CASE("GPU: the GEMMs of latent attention's heads equal plain sums", "[cuda]") {
    if (no_gpu()) return;
    const Gpu    gpu;
    std::mt19937 random(22);
    for (auto [heads, rows, cols, kept] :
         {std::tuple(3, 512, 128, 64), std::tuple(16, 128, 512, 0), std::tuple(5, 70, 40, 8), std::tuple(2, 33, 17, 5),
          std::tuple(4, 64, 96, 0)})
        for (int n : {1, 7, 16, 17, 64, 100})
            for (const bool quantised : {false, true}) {
                if (quantised && cols % 32 != 0) continue;
                CAPTURE(heads, rows, cols, kept, n, quantised);
                const int  x_dim = cols + kept, out_dim = rows + kept;
                const auto x = random_fp16(std::size_t(n * heads * x_dim), random);
                const auto w = random_fp16(std::size_t(heads * rows * cols), random, 1 / std::sqrt(float(cols)));
                std::vector<float>         ws = floats_of(w);
                std::vector<std::int8_t>   q;
                std::vector<std::uint16_t> scales(ws.size() / 32 + 1, f32_to_f16(0.004f));
                for (float& value : ws)
                    if (quantised) {
                        q.push_back(std::int8_t(std::clamp(std::lround(value / 0.004f), -127L, 127L)));
                        value = float(q.back()) * f16_to_f32(scales[0]);
                    }
                q.push_back(0); // never an empty buffer
                const std::vector<float> xs = floats_of(x);
                std::vector<double>      want;
                for (int t = 0; t < n; t++)
                    for (int h = 0; h < heads; h++) {
                        const float* in = xs.data() + std::ptrdiff_t(t * heads + h) * x_dim;
                        for (int r = 0; r < rows; r++) {
                            double sum = 0;
                            for (int c = 0; c < cols; c++)
                                sum += double(in[c]) * double(ws[std::size_t((h * rows + r) * cols + c)]);
                            want.push_back(sum);
                        }
                        for (int c = 0; c < kept; c++) want.push_back(double(in[cols + c]));
                    }
                const OnDevice<std::uint16_t> there(gpu, x), fp16(gpu, w), there_scales(gpu, scales),
                    out(gpu, std::vector<std::uint16_t>(std::size_t(n * heads * out_dim), fp16_nan));
                const OnDevice<std::int8_t> there_q(gpu, q);
                cuda::HeadGemm              op;
                op.x = there.data, op.out = out.data, op.n_heads = heads, op.x_dim = x_dim;
                op.weight.rows = heads * rows, op.weight.cols = cols, op.weight.data = fp16.data;
                if (quantised) {
                    op.weight.form = cuda::WeightForm::i8, op.weight.data = there_q.data;
                    op.weight.scales = there_scales.data;
                }
                cuda::head_gemm(op, n, gpu);
                CHECK(relative_error(floats_of(out.back(gpu)), want) < 2e-3);
            }
}

TEST_CASE("GPU: embedding with a scale and positions, soft-caps and biases equal plain sums", "[cuda]") {
    if (no_gpu()) return;
    const Gpu                     gpu;
    std::mt19937                  random(23);
    constexpr int                 cols = 37, n = 3;
    const auto                    table = random_fp16(5 * cols, random), places = random_fp16(9 * cols, random);
    const OnDevice<std::uint16_t> there(gpu, table), there_places(gpu, places);
    const OnDevice<std::int32_t>  tokens(gpu, {4, 0, 2}), positions(gpu, {6, 0, 3});
    const OnDevice<float>         out(gpu, std::vector<float>(n * cols, std::numeric_limits<float>::quiet_NaN()));
    cuda::Weight                  weight, vectors;
    weight.rows = 5, vectors.rows = 9, weight.cols = vectors.cols = cols;
    weight.data = there.data, vectors.data = there_places.data;
    cuda::Plan plan;
    plan.tokens = tokens.data, plan.positions = positions.data;
    for (const bool placed : {false, true}) {
        cuda::embed(weight, placed ? &vectors : nullptr, 6.5f, 2, plan, out.data, n, gpu);
        std::vector<double> want;
        for (auto [token, position] : {std::pair(4, 6), std::pair(0, 0), std::pair(2, 3)})
            for (int c = 0; c < cols; c++)
                want.push_back(6.5 * double(f16_to_f32(table[std::size_t(token * cols + c)])) +
                               (placed ? double(f16_to_f32(places[std::size_t((position + 2) * cols + c)])) : 0));
        CHECK(relative_error(out.back(gpu), want) < 1e-6);
    }
    const std::vector<float> x    = floats_of(random_fp16(n * cols, random, 20)),
                             bias = floats_of(random_fp16(cols, random));
    const OnDevice<float> values(gpu, x), biases(gpu, bias);
    std::vector<double>   capped, more;
    for (std::size_t i = 0; i < x.size(); i++) {
        capped.push_back(30 * std::tanh(double(x[i]) / 30));
        more.push_back(double(x[i]) + 0.5 * double(bias[i % cols]));
    }
    cuda::add_bias(values.data, true, biases.data, 0.5f, n, cols, gpu);
    CHECK(relative_error(values.back(gpu), more) < 1e-6);
    cuda::upload(values.data, x.data(), x.size() * sizeof(float), gpu);
    cuda::soft_cap(values.data, 30, n * cols, gpu);
    CHECK(relative_error(values.back(gpu), capped) < 1e-6);
    // The scale of a GEMM, of the sums and their bias, in each of its kernels.
    constexpr int                 rows = 128, k = 256;
    const auto                    w = random_fp16(rows * k, random), in = random_fp16(64 * k, random);
    const std::vector<float>      ws = floats_of(w), ins = floats_of(in), b = floats_of(random_fp16(rows, random));
    const OnDevice<std::uint16_t> there_w(gpu, w), there_in(gpu, in);
    const OnDevice<float>         there_b(gpu, b), scaled(gpu, std::vector<float>(64 * rows));
    cuda::Projection              p;
    p.weight.rows = rows, p.weight.cols = k, p.weight.data = there_w.data, p.bias = there_b.data, p.out = scaled.data;
    p.out_is_float = true, p.scale = 0.125f;
    std::vector<double> all;
    for (int t = 0; t < 64; t++)
        for (int r = 0; r < rows; r++) {
            double sum = double(b[std::size_t(r)]);
            for (int c = 0; c < k; c++) sum += double(ws[std::size_t(r * k + c)]) * double(ins[std::size_t(t * k + c)]);
            all.push_back(sum / 8);
        }
    const auto check_first = [&](int m) {
        std::vector<float> got = scaled.back(gpu);
        got.resize(std::size_t(m * rows));
        CHECK(relative_error(got, std::vector<double>(all.begin(), all.begin() + std::ptrdiff_t(m) * rows)) < 2e-3);
        const std::vector<float> none(64 * rows);
        cuda::upload(scaled.data, none.data(), none.size() * sizeof(float), gpu);
    };
    for (const bool invariant : {false, true})
        for (int m : {1, 8}) cuda::gemv(there_in.data, m, k, &p, 1, invariant, gpu), check_first(m);
    for (int m : {8, 64}) cuda::skinny_gemm(there_in.data, m, k, &p, 1, gpu), check_first(m);
    cuda::gemm_plain(there_in.data, 64, k, &p, 1, gpu), check_first(64);
    if (cuda::open_cublaslt(gpu) == nullptr) {
        REQUIRE(
            cuda::cublaslt_gemm(there_in.data, 64, there_w.data, {rows, k, true, 1, 0, 0, 0.125f}, scaled.data, gpu));
        cuda::add_bias(scaled.data, true, there_b.data, 0.125f, 64, rows, gpu);
        check_first(64);
    }
}

TEST_CASE("GPU: models of odd shapes and every type answer as on the CPU", "[cuda]") {
    if (no_gpu()) return;
    std::vector<OddShape> shapes{{"all odd", DType::F16, 75, 5, 1, 15, 14, 77, 389},
                                 {"odd, in floats", DType::F32, 33, 3, 3, 11, 10, 51, 389},
                                 {"multiples of 4", DType::BF16, 100, 5, 1, 20, 20, 52, 390},
                                 {"rows of one", DType::F32, 64, 2, 1, 2, 2, 1, 259},
                                 {"blocks of 4 bytes", DType::F16, 16, 4, 1, 2, 2, 24, 300},
                                 {"heads of 8", DType::F16, 64, 8, 2, 8, 6, 40, 300},
                                 {"heads of 40", DType::Q8_0, 160, 4, 1, 40, 40, 96, 301},
                                 {"heads of 512", DType::F16, 128, 2, 1, 512, 512, 72, 300},
                                 {"heads of 64, a part rotated", DType::F16, 264, 4, 2, 64, 34, 520, 1001},
                                 {"wide", DType::F16, 33000, 1, 1, 64, 64, 16, 300, 1},
                                 {"wide and odd", DType::F16, 32771, 1, 1, 64, 64, 9, 300, 1},
                                 {"a large vocabulary", DType::F16, 40, 2, 1, 20, 20, 64, 300001, 1}};
    for (const DTypeInfo& info : dtype_table) // one kv head, an odd vocabulary
        shapes.push_back({info.name, info.type, 256, 4, 1, 64, 64, 512, 389});
    for (DType type :
         {DType::Q8_0, DType::Q4_0, DType::Q4_1, DType::Q5_0, DType::Q5_1, DType::IQ4_NL}) // half a superblock
        shapes.push_back({"rows of 96", type, 96, 3, 1, 32, 32, 160, 389});
    const std::string path = temporary();
    int               turn = 0;
    for (const OddShape& shape : shapes) {
        write_odd_model(path, shape);
        EngineOptions o;
        o.block_size = std::array{1, 3, 16, 256}[std::size_t(turn++ % 4)];
        CAPTURE(shape.name, dtype_info(shape.type).name, o.block_size);
        o.device                 = "cpu";
        o.context                = 300;
        o.swap_blocks            = 8;
        Engine cpu               = load(path, o);
        o.device                 = "cuda";
        Engine               gpu = load(path, o);
        std::mt19937         random(3);
        std::vector<Request> requests;
        for (int n : {1, 7, 40, 130, 33}) {
            std::vector<Token> prompt;
            for (int i = 0; i < n; i++) prompt.push_back(int(random() % unsigned(shape.vocab)));
            requests.push_back(greedy(prompt, 8));
        }
        requests.back().n = 2;                                          // blocks are copied when the answers part
        for (const auto& some : {requests, std::vector{requests[2]}}) { // together, and one alone
            const auto want = run(cpu, some), got = run(gpu, some);
            for (std::size_t i = 0; i < some.size(); i++) {
                CAPTURE(i, some.size());
                const std::vector<double> logits(want[i].prompt_logits.begin(), want[i].prompt_logits.end());
                REQUIRE(got[i].prompt_logits.size() == logits.size());
                CHECK(relative_error(got[i].prompt_logits, logits) < 0.05);
                if (some[i].n > 1) continue;
                REQUIRE(got[i].tokens.size() == want[i].tokens.size());
                for (std::size_t k = 0; k < want[i].tokens.size(); k++) {
                    const auto& top = want[i].logprobs[k].top;
                    if (want[i].tokens[k] != got[i].tokens[k]) { // only where the choice is close
                        CHECK(top[0].logprob - top[1].logprob < 0.2f);
                        break;
                    }
                    CHECK(std::abs(got[i].logprobs[k].chosen.logprob - want[i].logprobs[k].chosen.logprob) < 0.2f);
                }
            }
        }
    }
    unlink(path.c_str());
}

namespace {

// What run() does, without assertions: they are for one thread only. Empty where a request is refused.
std::vector<std::vector<Token>> tokens_of(Engine& engine, const std::vector<Request>& requests) {
    std::map<RequestId, std::size_t> index;
    std::vector<std::vector<Token>>  tokens(requests.size());
    std::vector<Output>              events;
    for (std::size_t i = 0; i < requests.size(); i++)
        if (Result<RequestId> id = engine.submit(requests[i])) index[*id] = i;
    while (!index.empty() && engine.step(events)) {
        for (const Output& e : events) {
            auto& own = tokens[index.at(e.id)];
            own.insert(own.end(), e.tokens.begin(), e.tokens.end());
            if (e.done) index.erase(e.id);
        }
        events.clear();
    }
    return tokens;
}

} // namespace

// The steps of both, of several tokens and of one, are kernels with grid barriers over all SMs.
TEST_CASE("GPU: two engines side by side, each in a thread, give the tokens that each gives alone", "[cuda]") {
    if (no_gpu()) return;
    constexpr ModelShape shapes[] = {{"one", 3, 512, 8, 2, 1280, 2048, 2048},
                                     {"other", 2, 1024, 8, 8, 2816, 2048, 2048}};
    using Tokens                  = std::vector<std::vector<std::vector<Token>>>;
    for (DType type : {DType::F16, DType::Q8_0}) {
        CAPTURE(dtype_info(type).name);
        std::mt19937                      random(9);
        std::vector<std::vector<Request>> all;
        for (int n : {12, 1, 5, 16, 1, 3}) { // sequences at once
            std::vector<Request>& some = all.emplace_back();
            for (int i = 0; i < n; i++) {
                std::vector<Token> prompt;
                for (int k = 1 + int(random() % 200); k > 0; k--) prompt.push_back(int(random() % 2048));
                some.push_back(greedy(std::move(prompt), 40));
                some.back().sampling.temperature = i % 2 == 0 ? 0.0f : 1.0f;
                some.back().return_logits        = false;
            }
        }
        const auto work = [&](Engine& engine) {
            Tokens tokens;
            for (const auto& some : all) tokens.push_back(tokens_of(engine, some));
            return tokens;
        };
        const auto open = [&](int which) {
            const std::string path = temporary();
            REQUIRE(write_random_model(path, shapes[which], type));
            EngineOptions o;
            o.device       = "cuda";
            o.kv_blocks    = 512;
            o.prefix_cache = false; // so that each round is as the first
            o.pipeline     = which == 0;
            Engine engine  = load(path, o);
            unlink(path.c_str());
            return engine;
        };
        Engine                one   = open(0);
        const Tokens          alone = work(one), again = work(one); // steps that are captured, too
        std::optional<Engine> other;
        Tokens                meanwhile;
        {
            const std::jthread thread([&] { meanwhile = work(one); });
            other.emplace(open(1));
        }
        CHECK((again == alone));
        CHECK((meanwhile == alone));
        const Tokens others = work(*other);
        for (int round = 0; round < 8; round++) {
            CAPTURE(round);
            Tokens beside[2];
            {
                const std::jthread first([&] { beside[0] = work(one); }), second([&] { beside[1] = work(*other); });
            }
            CHECK((beside[0] == alone));
            CHECK((beside[1] == others));
        }
        other.reset();
        CHECK((work(one) == alone));
    }
}

TEST_CASE("the values of M that cuBLASLt is tuned for, and which one serves others") {
    STATIC_CHECK(cuda::cublaslt_bucket(1) == 0);
    for (int at = 0; at < cuda::n_cublaslt_m; at++) {
        const int rows = cuda::cublaslt_m[at];
        CHECK(cuda::cublaslt_bucket(rows) == at);
        CHECK(cuda::cublaslt_bucket(rows + 1) == (rows < 256 ? at + 1 : cuda::n_cublaslt_m));
    }
    CHECK(cuda::cublaslt_bucket(1 << 20) == cuda::n_cublaslt_m);
}

TEST_CASE("GPU: GEMM by cuBLASLt, tuned for its M or not, equals plain sums; a refused one is reported", "[cuda]") {
    if (no_gpu()) return;
    const Gpu gpu;
    if (const char* why = cuda::open_cublaslt(gpu)) {
        WARN("not tested: " << why);
        return;
    }
    std::mt19937 random(12);
    for (const bool floats : {false, true})
        for (int matrices : {1, 3}) {
            constexpr int rows = 136, cols = 264, most = 2500;
            const auto    w                  = random_fp16(std::size_t(matrices * rows * cols), random, 1 / 16.0f),
                       x                     = random_fp16(std::size_t(most * cols), random);
            const std::vector<float>      ws = floats_of(w), xs = floats_of(x);
            const OnDevice<std::uint16_t> weight(gpu, w), there(gpu, x);
            cuda::CublasltShape           shape{rows, cols, floats, matrices, rows * cols, 0};
            REQUIRE(cuda::tune_cublaslt(shape, weight.data, 1, 300, gpu)); // 512 rows at most; others are guessed
            for (int n : {1, 9, 100, 256, 257, 700, 2500}) {
                CAPTURE(floats, matrices, n);
                std::vector<double> want;
                for (int m = 0; m < matrices; m++)
                    for (int t = 0; t < n; t++)
                        for (int r = 0; r < rows; r++) {
                            double sum = 0;
                            for (int c = 0; c < cols; c++)
                                sum += double(ws[std::size_t((m * rows + r) * cols + c)]) *
                                       double(xs[std::size_t(t * cols + c)]);
                            want.push_back(sum);
                        }
                const OnDevice<std::uint16_t> fp16(gpu, std::vector<std::uint16_t>(want.size(), fp16_nan));
                const OnDevice<float>         full(gpu,
                                                   std::vector<float>(want.size(), std::numeric_limits<float>::quiet_NaN()));
                shape.out_stride = std::int64_t(n) * rows;
                REQUIRE(cuda::cublaslt_gemm(there.data, n, weight.data, shape,
                                            floats ? static_cast<void*>(full.data) : fp16.data, gpu));
                CHECK(relative_error(floats ? full.back(gpu) : floats_of(fp16.back(gpu)), want) < 2e-3);
            }
            CHECK(!cuda::cublaslt_gemm(there.data, 0, weight.data, shape, there.data,
                                       gpu)); // no rows: the library refuses
            CHECK(there.back(gpu) == x);
        }
    const Gpu                     without; // no library was opened in it
    const OnDevice<std::uint16_t> some(without, std::vector<std::uint16_t>(64));
    CHECK(!cuda::cublaslt_gemm(some.data, 8, some.data, {8, 8}, some.data, without));
}

TEST_CASE("GPU: an upload tells of an error in any of its threads, and the next one works", "[cuda]") {
    if (no_gpu()) return;
    const Gpu              gpu;
    constexpr std::size_t  n = std::size_t(9) << 20; // the second thread's part begins at 8 MiB
    std::vector<std::byte> values(n);
    std::mt19937           random(13);
    for (std::byte& b : values) b = std::byte(random() & 255);
    OnDevice<std::byte> there(gpu, values);
    CHECK(there.back(gpu) == values);
    // Two pieces, of which the second has no memory to go to: none is behind the last of some allocations.
    std::vector<void*> memory(16);
    for (void*& m : memory) m = cuda::allocate(gpu, std::size_t(8) << 20);
    cuda::upload(*std::ranges::max_element(memory), values.data(), n, gpu);
    for (void* m : memory) cuda::release(m);
    CHECK(cuda::last_error(gpu) != nullptr);
    CHECK(cuda::last_error(gpu) == nullptr);
    cuda::upload(there.data, values.data(), n, gpu);
    CHECK(there.back(gpu) == values);
}

TEST_CASE("GPU: what weights were brought through is given back when they are there", "[cuda]") {
    if (no_gpu()) return;
    const std::string    path  = temporary();
    constexpr ModelShape shape = {"large vocabulary", 1, 512, 8, 8, 512, 65536, 512};
    const auto           free  = [] {
        cuda::DeviceInfo info;
        REQUIRE(cuda::open_device(0, info) == nullptr);
        return std::ptrdiff_t(info.free);
    };
    std::ptrdiff_t used[2]{};
    for (int which : {0, 1})       // the same values there, of which one kind stays as it is
        for (int round : {0, 1}) { // what libraries take once is there the second time
            REQUIRE(write_random_model(path, shape, which == 0 ? DType::F16 : DType::BF16));
            EngineOptions o;
            o.device            = "cuda";
            o.kv_blocks         = 64;
            const auto   before = free();
            const Engine engine = load(path, o);
            used[which]         = before - free();
            CAPTURE(round, used[which]);
            CHECK(used[which] > 0);
        }
    CHECK(std::abs(used[1] - used[0]) < std::ptrdiff_t(16) << 20);
    unlink(path.c_str());
}

TEST_CASE("GPU: a model that makes NaN ends its requests as failed, whatever decodes them", "[cuda]") {
    if (no_gpu()) return;
    const std::string    path = temporary();
    std::vector<Request> requests;
    for (int i = 0; i < 7; i++) {
        Request r;
        for (int k = 0; k < 5 + 3 * i; k++) r.prompt.push_back(3 + k);
        r.max_tokens           = 8;
        r.sampling.temperature = i == 0 || i == 5 ? 0.0f : 1.0f;
        if (i == 2) r.sampling.top_k = 5, r.sampling.logprobs = 3, r.n = 2;
        if (i == 3) r.best_of = 3;
        if (i == 4) r.beam_width = 3;
        if (i == 5) r.prompt_logprobs = 1;
        if (i == 6) r.sampling.allowed_tokens = {20, 21, 22};
        requests.push_back(std::move(r));
    }
    for (DType type : {DType::F16, DType::Q8_0, DType::Q4_K, DType::Q6_K})
        for (const char* spoiled :
             {"token_embd.weight", "blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.1.attn_v.weight",
              "blk.0.attn_output.weight", "blk.1.ffn_gate.weight", "blk.1.ffn_down.weight"})
            for (const int head_dim : {64, 32}) { // with the kernels of one step, and without
                CAPTURE(dtype_info(type).name, spoiled, head_dim);
                write_odd_model(path, {"spoiled", type, 256, 256 / head_dim, 2, head_dim, head_dim, 512, 400}, spoiled);
                EngineOptions o;
                o.device    = "cuda";
                o.kv_blocks = 256;
                Engine gpu  = load(path, o);
                for (const Answer& a : run(gpu, requests)) CHECK(a.finish == FinishReason::failed);
                for (const Request& r : requests) CHECK(run(gpu, {r})[0].finish == FinishReason::failed);
            }
    unlink(path.c_str());
}
