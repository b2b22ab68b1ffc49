// The GPU's norms, activations, embedding, block copies and uploads against plain sums. Without a GPU these tests print that and pass.
#include <catch2/catch_test_macros.hpp>

#include "../cuda/kernels.h"

import quire.core.std;
import quire.core.tensor;

#include "cuda_tools.h"

using namespace quire;
using namespace quire::testing;

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
    for (int cols : {16, 336, 4096, 32768, 32784}) // in e4m3: as in two steps
        for (const auto kind : {cuda::NormKind::rms, cuda::NormKind::layer, cuda::NormKind::none}) {
            if (!cuda::has_fp8_gemm(gpu)) break;
            CAPTURE(cols, int(kind));
            constexpr int                 rows = 3;
            const auto                    n    = std::size_t(rows * cols);
            const OnDevice<std::uint16_t> there(gpu, random_fp16(n, random)),
                out(gpu, std::vector<std::uint16_t>(n, fp16_nan));
            const OnDevice<float>        w(gpu, floats_of(random_fp16(std::size_t(cols), random)));
            const OnDevice<std::uint8_t> codes(gpu, std::vector<std::uint8_t>(n)),
                fused(gpu, std::vector<std::uint8_t>(n));
            const OnDevice<float> scales(gpu, std::vector<float>(rows)), fused_scales(gpu, std::vector<float>(rows));
            const auto            run = [&](const cuda::Fp8Matrix& fp8) {
                cuda::norm(there.data, false, {}, kind, w.data, nullptr, 1e-5f, nullptr, out.data, rows, cols, gpu, 1,
                                      fp8);
            };
            run({});
            cuda::rows_to_fp8(out.data, rows, cols, {codes.data, scales.data}, gpu);
            run({fused.data, fused_scales.data});
            CHECK(fused.back(gpu) == codes.back(gpu));
            CHECK(fused_scales.back(gpu) == scales.back(gpu));
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
        cuda::BlockPools        pools{bases.data, bases.data, 1, std::size_t(fp16) * 2, std::size_t(fp16) * 2};
        cuda::copy_blocks(pools, pairs.data, 2, gpu);
        for (auto [from, to] : {std::pair(4, 0), std::pair(1, 3)})
            std::copy_n(pool.begin() + from * fp16, fp16, pool.begin() + to * fp16);
        CHECK(there.back(gpu) == pool);
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

TEST_CASE("GPU: RMS norms of many short rows equal plain sums, and the bits of a few rows", "[cuda]") {
    if (no_gpu()) return;
    const Gpu    gpu;
    std::mt19937 random(11);
    for (const int cols : {2, 34, 100, 128, 256})
        for (const bool is_float : {false, true})
            for (const int weights : {0, 1, 3}) {
                CAPTURE(cols, is_float, weights);
                constexpr int            rows = 600;
                const auto               x    = random_fp16(std::size_t(rows * cols), random, 3.0f);
                const std::vector<float> xs   = floats_of(x),
                                         w = floats_of(random_fp16(std::size_t(std::max(weights, 1) * cols), random));
                const OnDevice<std::uint16_t> there(gpu, x), out(gpu, std::vector<std::uint16_t>(x.size(), fp16_nan)),
                    some(gpu, std::vector<std::uint16_t>(x.size(), fp16_nan));
                const OnDevice<float> floats(gpu, xs), by(gpu, w);
                const auto            run = [&](const OnDevice<std::uint16_t>& to, int n) {
                    cuda::norm(is_float ? static_cast<const void*>(floats.data) : there.data, is_float, {},
                               cuda::NormKind::rms, weights > 0 ? by.data : nullptr, nullptr, 1e-5f, nullptr, to.data,
                               n, cols, gpu, std::max(weights, 1));
                };
                run(out, rows), run(some, 300);
                std::vector<double> want;
                for (int r = 0; r < rows; r++) {
                    double squares = 0;
                    for (int c = 0; c < cols; c++) squares += std::pow(double(xs[std::size_t(r * cols + c)]), 2);
                    for (int c = 0; c < cols; c++)
                        want.push_back(double(xs[std::size_t(r * cols + c)]) / std::sqrt(squares / cols + 1e-5) *
                                       (weights > 0 ? double(w[std::size_t(r % weights * cols + c)]) : 1));
                }
                const auto got = out.back(gpu), few = some.back(gpu);
                CHECK(relative_error(floats_of(got), want) < 1e-3);
                CHECK(std::equal(few.begin(), few.begin() + 300 * cols, got.begin()));
            }
}

TEST_CASE("GPU: sums with a scale, norms without weights, activations times columns and scales by position", "[cuda]") {
    if (no_gpu()) return;
    const Gpu     gpu;
    std::mt19937  random(29);
    constexpr int rows = 3, apart = 50, first = 7;
    for (int cols : {37, 256}) {
        CAPTURE(cols);
        const auto                    n = std::size_t(rows * cols);
        const auto                    x = random_fp16(n, random, 3), y = random_fp16(n, random, 3);
        const std::vector<float>      xs = floats_of(x), ys = floats_of(y);
        const auto                    times = floats_of(random_fp16(std::size_t(rows * (cols + apart)), random));
        const OnDevice<std::uint16_t> halves(gpu, x), there_y(gpu, y),
            out(gpu, std::vector<std::uint16_t>(n, fp16_nan));
        const OnDevice<float>        wide(gpu, xs), there_times(gpu, times);
        const OnDevice<std::int32_t> positions(gpu, {0, 8190, 16384});
        std::vector<double>          sum, normed, activated, scaled;
        for (int r = 0; r < rows; r++) {
            double squares = 0;
            for (int c = 0; c < cols; c++) squares += std::pow(double(xs[std::size_t(r * cols + c)]), 2);
            for (int c = 0; c < cols; c++) {
                const double v = double(xs[std::size_t(r * cols + c)]);
                sum.push_back(0.25 * (v + double(ys[std::size_t(r * cols + c)])));
                normed.push_back(v / std::sqrt(squares / cols + 1e-5));
                const double gelu = 0.5 * v * (1 + std::tanh(0.7978845608028654 * (v + 0.044715 * v * v * v)));
                activated.push_back(gelu * double(times[std::size_t(r * (cols + apart) + first + c)]));
                scaled.push_back(v * (1 + 0.1 * std::log(std::array{1.0, 1.0, 3.0}[std::size_t(r)])));
            }
        }
        cuda::add(wide.data, true, there_y.data, 0.25f, std::int64_t(n), gpu);
        CHECK(relative_error(wide.back(gpu), sum) < 1e-6);
        const auto check_halves = [&](const std::vector<double>& want) {
            CHECK(relative_error(floats_of(halves.back(gpu)), want) < 2e-3);
            cuda::upload(halves.data, x.data(), n * 2, gpu);
        };
        cuda::add(halves.data, false, there_y.data, 0.25f, std::int64_t(n), gpu);
        check_halves(sum);
        cuda::norm(halves.data, false, {}, cuda::NormKind::rms, nullptr, nullptr, 1e-5f, nullptr, halves.data, rows,
                   cols, gpu);
        check_halves(normed);
        cuda::activate_times(cuda::Activation::gelu_tanh, halves.data, rows, cols, there_times.data + first,
                             cols + apart, gpu);
        check_halves(activated);
        cuda::Plan plan;
        plan.positions = positions.data;
        cuda::scale_by_position(halves.data, rows, cols, 0.1f, 8192, 1, plan, gpu);
        check_halves(scaled);
    }
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

TEST_CASE("GPU: a norm with the operations before and after it equals plain sums", "[cuda]") {
    if (no_gpu()) return;
    const Gpu    gpu;
    std::mt19937 random(37);
    for (auto [rows, cols] : {std::pair(1, 2048), std::pair(3, 34), std::pair(600, 128), std::pair(2, 8192)})
        for (int mode = 0; mode < 5;
             mode++) { // a norm before; a sum; a gated sum; a norm before and a sum; a gate behind
            CAPTURE(rows, cols, mode);
            const bool first = mode == 0 || mode == 3, more = mode >= 1 && mode <= 3, gated = mode == 2,
                       gates = mode == 4;
            const auto n     = std::size_t(rows) * std::size_t(cols);
            const auto x = random_fp16(n, random), y = random_fp16(n, random), gate = random_fp16(n, random);
            const std::vector<float> xs = floats_of(x), ys = floats_of(y), gs = floats_of(gate),
                                     residual = floats_of(random_fp16(n, random)),
                                     weight   = floats_of(random_fp16(std::size_t(cols), random)),
                                     before   = floats_of(random_fp16(std::size_t(cols), random)),
                                     by       = floats_of(random_fp16(std::size_t(cols), random, 0.1f));
            const OnDevice<std::uint16_t> there(gpu, x), others(gpu, y), gate_there(gpu, gate);
            OnDevice<std::uint16_t>       out(gpu, gates ? gate : std::vector<std::uint16_t>(n, fp16_nan));
            OnDevice<float>               sums(gpu, residual);
            const OnDevice<float>         w(gpu, weight), first_w(gpu, before), gate_w(gpu, by);
            std::vector<double>           want, want_sums;
            for (int r = 0; r < rows; r++) {
                const auto at = [&, r, cols = cols](int c) {
                    return std::size_t(r) * std::size_t(cols) + std::size_t(c);
                };
                double              dot = 0, squares = 0;
                std::vector<double> row;
                for (int c = 0; c < cols; c++) dot += double(gs[at(c)]) * double(by[std::size_t(c)]);
                for (int c = 0; c < cols; c++) squares += double(xs[at(c)]) * double(xs[at(c)]) / cols;
                for (int c = 0; c < cols; c++) {
                    double v = double(xs[at(c)]);
                    if (first) v *= double(before[std::size_t(c)]) / std::sqrt(squares + 1e-3);
                    if (more) v += double(ys[at(c)]) * (gated ? 1 / (1 + std::exp(-dot)) : 1);
                    if (!gates) v += double(residual[at(c)]), want_sums.push_back(v);
                    row.push_back(v);
                }
                squares = 0;
                for (double v : row) squares += v * v / cols;
                for (int c = 0; c < cols; c++) {
                    const double v = row[std::size_t(c)] / std::sqrt(squares + 1e-5) * double(weight[std::size_t(c)]),
                                 g = double(gs[at(c)]);
                    want.push_back(gates ? v * g / (1 + std::exp(-g)) : v);
                }
            }
            cuda::NormBeside beside;
            if (first) beside.first_weight = first_w.data, beside.first_eps = 1e-3f;
            if (more) beside.more = others.data;
            if (gated) beside.gate = gate_there.data, beside.gate_weight = gate_w.data;
            beside.gates = gates;
            cuda::norm(there.data, false, {}, cuda::NormKind::rms, w.data, nullptr, 1e-5f, gates ? nullptr : sums.data,
                       out.data, rows, cols, gpu, 1, {}, beside);
            CHECK(relative_error(floats_of(out.back(gpu)), want) < 2e-3);
            if (!gates) CHECK(relative_error(sums.back(gpu), want_sums) < 1e-5);
        }
}

TEST_CASE("GPU: argmax finds the lowest of the best tokens, in rows of every length, and says where there is none",
          "[cuda]") {
    if (no_gpu()) return;
    const Gpu       gpu;
    std::mt19937    random(29);
    constexpr float infinity = std::numeric_limits<float>::infinity();
    for (auto [rows, cols] : {std::pair(1, 248320), std::pair(3, 128256), std::pair(70, 32001), std::pair(300, 5000),
                              std::pair(2, 1), std::pair(7, 100)}) {
        CAPTURE(rows, cols);
        const auto at = [cols = cols](int r, int c) { return std::size_t(r) * std::size_t(cols) + std::size_t(c); };
        std::vector<float>        logits(std::size_t(rows) * std::size_t(cols));
        std::vector<std::int32_t> want;
        for (float& v : logits) v = float(random() % 1000) / 100; // many are equal
        for (int r = 0; r < rows; r++) {
            const int c = int(random() % unsigned(cols));
            if (r % 5 == 1) logits[at(r, c)] = std::numeric_limits<float>::quiet_NaN();
            if (r % 5 == 2) logits[at(r, c)] = infinity;
            if (r % 5 == 3) std::fill_n(logits.begin() + std::ptrdiff_t(at(r, 0)), cols, -infinity);
            if (r % 5 == 4) logits[at(r, c)] = -infinity;
            const auto row = logits.begin() + std::ptrdiff_t(at(r, 0));
            want.push_back(r % 5 > 0 && r % 5 < 4 ? -1 : int(std::max_element(row, row + cols) - row));
            if (cols == 1 && r % 5 == 4) want.back() = -1;
        }
        const OnDevice<float>        there(gpu, logits);
        const OnDevice<std::int32_t> best(gpu, std::vector<std::int32_t>(std::size_t(rows), -7));
        for (int turn = 0; turn < 2; turn++) {
            cuda::argmax(there.data, best.data, rows, cols, gpu);
            CHECK(best.back(gpu) == want);
        }
    }
}
