// The GPU's GEMMs, and the layer kernel made of them, against plain sums. Without a GPU these tests print that and pass.
#include <catch2/catch_test_macros.hpp>

#include "../cuda/kernels.h"

import quire.core.base;
import quire.core.std;
import quire.core.tensor;
import quire.model_file.gguf_writer;
import quire.model_file.quants.lattices;
import quire.model_file.quants;

#include "cuda_tools.h"
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

// A code of e4m3: a sign, four bits of exponent, three of fraction; the exponent 0 is that of subnormal numbers.
static float value_of_e4m3(std::uint8_t code) {
    const int   exponent = code >> 3 & 15, fraction = code & 7;
    const float size = exponent == 0 ? std::ldexp(float(fraction), -9) : std::ldexp(float(8 + fraction), exponent - 10);
    return (code & 127) == 127 ? std::numeric_limits<float>::quiet_NaN() : code < 128 ? size : -size;
}

// The numbers of a matrix of `cols` columns, with a scale for each block, or for each row.
static std::vector<float> values_of(const std::vector<std::uint8_t>& codes, const std::vector<float>& scales, int cols,
                                    bool blocks) {
    std::vector<float> out(codes.size());
    const std::size_t  n = std::size_t(cols), edge = cuda::fp8_block, wide = (n + edge - 1) / edge;
    for (std::size_t i = 0; i < codes.size(); i++)
        out[i] = value_of_e4m3(codes[i]) * scales[blocks ? i / n / edge * wide + i % n / edge : i / n];
    return out;
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
    for (const bool fp8 : {false, true})
        // Fewer tiles than SMs and more, whole ones and strips of a half and a quarter.
        for (const auto& [n, cols, rows, others] :
             {Shape{1, 8, 8, 0}, Shape{7, 64, 264, 8}, Shape{64, 72, 256, 128}, Shape{129, 200, 520, 136},
              Shape{129, 200, 512, 256}, Shape{256, 1024, 128, 0}, Shape{257, 136, 5000, 0}, Shape{513, 320, 384, 1024},
              Shape{70, 64, 19456, 0}, Shape{40, 136, 34048, 256}, Shape{300, 64, 10000, 0}, Shape{300, 208, 520, 264},
              Shape{129, 144, 512, 256}})
            for (Epilogue then : {write, scaled, swiglu, geglu, rope_interleaved, rope_neox}) {
                const bool gated = then == swiglu || then == geglu, with_rope = then > geglu;
                const auto activation = then == geglu ? cuda::Activation::gelu_tanh : cuda::Activation::silu;
                const int  D = n % 2 != 0 ? 128 : 64, block_size = 4;
                if (with_rope && (others == 0 || rows % D != 0 || others % D != 0)) continue;
                if (fp8 && (!cuda::has_fp8_gemm(gpu) || !cuda::can_be_fp8(rows, cols))) continue;
                CAPTURE(fp8, n, cols, rows, others, then, D);
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
                    weights.push_back(
                        random_fp16(std::size_t(r) * std::size_t(cols), random, 1 / std::sqrt(float(cols))));
                    biases.push_back(floats_of(random_fp16(std::size_t(r), random)));
                    cuda::Projection& p = ops[0].projection[ops[0].n_projections++];
                    p.weight.rows = r, p.weight.cols = cols;
                    p.weight.data = there_weights.emplace_back(gpu, weights.back()).data;
                    if (!gated) p.bias = there_biases.emplace_back(gpu, biases.back()).data;
                    if (then == scaled) p.scale = 0.25f;
                    p.out = out.emplace_back(gpu,
                                             std::vector<std::uint16_t>(std::size_t(n) * std::size_t(r) + 64, fp16_nan))
                                .data;
                }
                // Positions and slots; the last token has none where there are several.
                std::vector<std::int32_t> positions, slots;
                for (int t = 0; t < n; t++)
                    positions.push_back(37 * t), slots.push_back(t > 0 && t + 1 == n ? -1 : 3 + 2 * t);
                slots                      = with_v_slots(slots);
                const int          v_slots = n % 2 * n; // K and V in other blocks, or not
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
                    rope.block_rows = rope.n_kv_heads * block_size;
                    rope.block_size = block_size, rope.scale = 1.25f, rope.neox = then == rope_neox;
                    rope.q_dim = rope.value_dim = D, rope.v_slots = v_slots;
                }
                if (cuda::match_prefill_gemm(ops, 1, gpu) == 0) break;
                // In fp8: what the codes say is multiplied, and the codes are near the values.
                std::vector<float>              xs = floats_of(x);
                std::vector<std::vector<float>> ws;
                for (const auto& w : weights) ws.push_back(floats_of(w));
                std::deque<OnDevice<std::uint8_t>> codes;
                std::deque<OnDevice<float>>        scales;
                const auto                         room = [&](int of, bool blocks) {
                    const auto edge = [](int size) {
                        return std::size_t(size + cuda::fp8_block - 1) / cuda::fp8_block;
                    };
                    codes.emplace_back(gpu, std::vector<std::uint8_t>(std::size_t(of) * std::size_t(cols), 0x7f));
                    scales.emplace_back(gpu, std::vector<float>(blocks ? edge(of) * edge(cols) : std::size_t(of),
                                                                                        std::numeric_limits<float>::quiet_NaN()));
                    return cuda::Fp8Matrix{codes.back().data, scales.back().data};
                };
                const auto replace = [&](std::vector<float>& values, bool blocks) {
                    const std::vector<float> rounded =
                        values_of(codes.back().back(gpu), scales.back().back(gpu), cols, blocks);
                    CHECK(relative_error(rounded, std::vector<double>(values.begin(), values.end())) < 0.04);
                    values = rounded;
                };
                cuda::Fp8Matrix x8;
                if (fp8) {
                    for (std::size_t k = 0; k < weights.size(); k++) {
                        cuda::Weight& w = ops[0].projection[k].weight;
                        w.fp8           = room(all_rows[k], true);
                        cuda::weight_to_fp8(static_cast<const cuda::Half*>(w.data), all_rows[k], cols, w.fp8, gpu);
                        replace(ws[k], true);
                    }
                    x8 = room(n, false);
                    cuda::rows_to_fp8(there_x.data, n, cols, x8, gpu);
                    replace(xs, false);
                }
                const auto run = [&](int n_ops) {
                    return fp8 ? cuda::run_fp8_gemm(ops, n_ops, x8, plan, gpu)
                               : cuda::run_prefill_gemm(ops, n_ops, plan, gpu);
                };
                const double bound = fp8 ? 2e-3 : 1e-3;
                REQUIRE(run(with_rope ? 2 : 1) == (with_rope ? 2 : 1));

                const auto product = [&](std::size_t k) {
                    const std::vector<float>& w = ws[k];
                    std::vector<double>       sums;
                    for (int t = 0; t < n; t++)
                        for (int r = 0; r < all_rows[k]; r++) {
                            double       sum = gated ? 0 : double(biases[k][std::size_t(r)]);
                            const float *a   = xs.data() + std::ptrdiff_t(t) * cols,
                                        *b   = w.data() + std::ptrdiff_t(r) * cols;
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
                                const int slot = slots[std::size_t(k == 1 ? t : t + v_slots)];
                                const int at =
                                    ((slot / block_size * (others / D) + r / D) * block_size + slot % block_size) * D +
                                    r % D;
                                if (slot < 0) want[std::size_t(t * others + r)] = 0;
                                rows_of.push_back(slot < 0 ? 0 : cache[std::size_t(at)]);
                                n_written += slot >= 0;
                            }
                        CHECK(std::ranges::count_if(cache, [](std::uint16_t h) { return h != fp16_nan; }) ==
                              std::ptrdiff_t(n_written));
                        CHECK(relative_error(floats_of(rows_of), want) < bound);
                        continue;
                    }
                    CHECK(std::ranges::all_of(std::span(got).subspan(want.size()),
                                              [](std::uint16_t h) { return h == fp16_nan; }));
                    got.resize(want.size());
                    CHECK(relative_error(floats_of(got), want) < bound);
                    if (n > 1 && !with_rope) { // the first rows alone have the same bits
                        const auto poison = std::vector<std::uint16_t>(out[k].n, fp16_nan);
                        cuda::upload(out[k].data, poison.data(), poison.size() * 2, gpu);
                        ops[0].rows = n / 2;
                        REQUIRE(run(1) == 1);
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
        for (int n : {1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 50, 64, 65, 100, 128}) {
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
            // The result of the parts of a layer, rounded where they hand fp16 on.
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
            slots                      = with_v_slots(slots);
            const int          v_slots = n % 2 * n; // K and V in other blocks, or not
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
                rope.block_rows = rope.n_kv_heads * 4;
                rope.block_size = 4, rope.neox = mode == 2, rope.q_dim = rope.value_dim = D, rope.v_slots = v_slots;
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
                        const int slot = slots[std::size_t(t + which * v_slots)];
                        wanted.push_back(want[std::size_t(t * kv + c)]);
                        stored.push_back(
                            got[which][std::size_t(((slot / 4 * (kv / D) + c / D) * 4 + slot % 4) * D + c % D)]);
                    }
                CHECK(relative_error(stored, wanted) < 8e-3);
                CHECK(total == std::ptrdiff_t(wanted.size()));
            }
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
