// The GPU against plain C++ and against the CPU engine. Without a GPU these tests print that and pass.
#include <catch2/catch_test_macros.hpp>

#include "../cuda/kernels.h"
#include "process.h"
#include "reference.h"

import quire.base;
import quire.config;
import quire.engine;
import quire.quants;
import quire.random_model;
import quire.request;
import quire.sampler;
import quire.scheduler;
import quire.snapshot;
import quire.std;
import quire.tensor;

#include "engine_tools.h"

using namespace quire;
using namespace quire::testing;

namespace {

bool no_gpu() {
    cuda::DeviceInfo info;
    const char*      why = cuda::open_device(0, info);
    if (why) WARN("not tested: " << why);
    return why != nullptr;
}

// A vector in device memory; outputs begin as NaN, so that what was not written shows.
template <class T>
struct OnDevice {
    explicit OnDevice(const std::vector<T>& values)
        : n(values.size()), data(static_cast<T*>(cuda::allocate(n * sizeof(T)))) {
        cuda::upload(data, values.data(), n * sizeof(T));
    }
    OnDevice(const OnDevice&)            = delete;
    OnDevice& operator=(const OnDevice&) = delete;
    ~OnDevice() { cuda::release(data); }
    std::vector<T> back(cuda::Stream stream) const {
        std::vector<T> out(n);
        cuda::copy_to_host(out.data(), data, n * sizeof(T), stream);
        cuda::synchronize(stream);
        const char* error = cuda::last_error();
        INFO((error ? error : ""));
        REQUIRE(error == nullptr);
        return out;
    }
    std::size_t n;
    T*          data;
};

constexpr std::uint16_t half_nan = 0x7e00;

std::vector<std::uint16_t> random_halves(std::size_t n, std::mt19937& random, float scale = 1) {
    std::normal_distribution<float> normal(0, scale);
    std::vector<std::uint16_t>      out(n);
    for (auto& h : out) h = f32_to_f16(normal(random));
    return out;
}

double relative_error(const std::vector<float>& got, const std::vector<double>& want) {
    double d = 0, all = 0;
    for (std::size_t i = 0; i < want.size(); i++) {
        d += (double(got[i]) - want[i]) * (double(got[i]) - want[i]);
        all += want[i] * want[i];
    }
    return std::isnan(d) ? 1e30 : std::sqrt(d / std::max(all, 1e-30));
}

std::vector<float> floats_of(const std::vector<std::uint16_t>& halves) {
    std::vector<float> out(halves.size());
    for (std::size_t i = 0; i < halves.size(); i++) out[i] = f16_to_f32(halves[i]);
    return out;
}

} // namespace

TEST_CASE("GPU: products with every kind of weight equal plain sums", "[cuda]") {
    if (no_gpu()) return;
    cuda::Stream stream = cuda::create_stream();
    std::mt19937 random(1);
    for (DType type : {DType::F16, DType::Q8_0, DType::Q4_0, DType::Q5_0, DType::Q4_K, DType::Q5_K, DType::Q6_K})
        for (auto [rows, cols] : {std::pair(1, 256), std::pair(7, 512), std::pair(64, 1280), std::pair(130, 768)})
            for (int n : {1, 2, 3, 5, 8, 9, 17, 31, 64}) {
                CAPTURE(dtype_info(type).name, rows, cols, n);
                // Random blocks whose scales are small halves.
                const DTypeInfo&       info = dtype_info(type);
                std::vector<std::byte> blocks(row_bytes(type, cols) * std::size_t(rows));
                for (std::byte& b : blocks) b = std::byte(random() & 255);
                if (type == DType::F16) {
                    const auto h = random_halves(std::size_t(rows) * std::size_t(cols), random);
                    std::memcpy(blocks.data(), h.data(), blocks.size());
                } else {
                    const std::vector<int> places = type == DType::Q6_K                          ? std::vector{208}
                                                    : type == DType::Q4_K || type == DType::Q5_K ? std::vector{0, 2}
                                                                                                 : std::vector{0};
                    for (std::size_t at = 0; at < blocks.size(); at += std::size_t(info.bytes))
                        for (int place : places) {
                            const std::uint16_t h = f32_to_f16(0.001f * float(1 + random() % 16));
                            std::memcpy(blocks.data() + at + std::size_t(place), &h, 2);
                        }
                }
                std::vector<float> weights(std::size_t(rows) * std::size_t(cols));
                for (int r = 0; r < rows; r++)
                    dequantize(type, blocks.data() + std::size_t(r) * row_bytes(type, cols),
                               weights.data() + std::ptrdiff_t(r) * cols, cols);
                const auto          x = random_halves(std::size_t(64) * std::size_t(cols), random);
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

                cuda::Product product;
                product.weight.rows = rows, product.weight.cols = cols;
                OnDevice<std::byte>   raw(blocks);
                OnDevice<std::int8_t> q(std::vector<std::int8_t>(weights.size()));
                OnDevice<float>       scales(std::vector<float>(weights.size() / 16)),
                    mins(std::vector<float>(weights.size() / 16));
                OnDevice<std::uint16_t> there(x);
                OnDevice<float>         biases(bias),
                    out(std::vector<float>(want.size(), std::numeric_limits<float>::quiet_NaN()));
                if (type == DType::F16) product.weight.data = raw.data;
                else if (type == DType::Q4_K) {
                    product.weight.form = cuda::WeightForm::q4_k;
                    product.weight.data = raw.data;
                } else {
                    bool has_mins       = false;
                    product.weight.form = cuda::WeightForm::i8;
                    cuda::i8_layout(std::uint32_t(type), product.weight.group, product.weight.float_scales, has_mins);
                    cuda::to_i8(std::uint32_t(type), raw.data, q.data, scales.data, has_mins ? mins.data : nullptr,
                                std::int64_t(weights.size()), stream);
                    product.weight.data   = q.data;
                    product.weight.scales = scales.data;
                    product.weight.mins   = has_mins ? mins.data : nullptr;
                }
                product.bias         = biases.data;
                product.out          = out.data;
                product.out_is_float = true;
                if (n <= cuda::most_vector_rows) {
                    cuda::matmul_vector(there.data, n, cols, &product, 1, false, stream);
                    CHECK(relative_error(out.back(stream), want) < 4e-3);
                    cuda::matmul_vector(there.data, n, cols, &product, 1, true, stream);
                    CHECK(relative_error(out.back(stream), want) < 4e-3); // a single sum may cancel
                }
                if (n == 1) { // of an x so small that no half overflows
                    std::vector<std::uint16_t> small = x;
                    for (std::uint16_t& h : small) h = f32_to_f16(f16_to_f32(h) / 64);
                    OnDevice<std::uint16_t> little(small),
                        both(std::vector<std::uint16_t>(std::size_t(rows), half_nan));
                    if (cuda::matmul_gated(little.data, product.weight, product.weight, both.data, stream)) {
                        std::vector<double> gated;
                        for (std::size_t r = 0; r < want.size(); r++) {
                            const double v = (want[r] - double(bias[r])) / 64;
                            gated.push_back(v / (1 + std::exp(-v)) * v);
                        }
                        CHECK(relative_error(floats_of(both.back(stream)), gated) < 8e-3);
                    }
                }
                REQUIRE(cuda::can_batch(product.weight));
                OnDevice<float> again(std::vector<float>(want.size(), std::numeric_limits<float>::quiet_NaN()));
                product.out = again.data;
                for (int round = 0; round < 2; round++) // the tickets are ready for the next launch
                    cuda::matmul_batch(there.data, n, cols, &product, 1, stream);
                CHECK(relative_error(again.back(stream), want) < 4e-3);
            }
    cuda::destroy_stream(stream);
}

TEST_CASE("GPU: products with the rows of a prompt, and what follows them, equal plain sums", "[cuda]") {
    if (no_gpu()) return;
    cuda::Stream stream = cuda::create_stream();
    std::mt19937 random(7);
    enum Then { write, swiglu, rotate_neighbours, rotate_halves };
    struct Shape {
        int n, cols, rows;
        int others; // rows of a second and third product, 0: none
    };
    // Fewer tiles than processors and more, whole ones and strips of a half and a quarter.
    for (const auto& [n, cols, rows, others] :
         {Shape{1, 8, 8, 0}, Shape{7, 64, 264, 8}, Shape{64, 72, 256, 128}, Shape{129, 200, 520, 136},
          Shape{129, 200, 512, 256}, Shape{256, 1024, 128, 0}, Shape{257, 136, 5000, 0}, Shape{513, 320, 384, 1024},
          Shape{70, 64, 19456, 0}, Shape{40, 136, 34048, 256}, Shape{300, 64, 10000, 0}})
        for (Then then : {write, swiglu, rotate_neighbours, rotate_halves}) {
            const bool gated = then == swiglu, turned = then > swiglu;
            const int  D = n % 2 != 0 ? 128 : 64, block_size = 4;
            if (turned && (others == 0 || rows % D != 0 || others % D != 0)) continue;
            CAPTURE(n, cols, rows, others, then, D);
            cuda::TapeOp ops[2] = {};
            ops[0].kind         = gated ? cuda::TapeOp::gated : cuda::TapeOp::products;
            ops[0].rows = n, ops[0].cols = cols;
            std::vector<int> all_rows{rows};
            if (gated) all_rows.push_back(rows);
            else if (others > 0) all_rows.insert(all_rows.end(), {others, others});

            const auto                              x = random_halves(std::size_t(n) * std::size_t(cols), random);
            const OnDevice<std::uint16_t>           there_x(x);
            std::vector<std::vector<std::uint16_t>> weights;
            std::vector<std::vector<float>>         biases;
            std::deque<OnDevice<std::uint16_t>>     there_weights, out;
            std::deque<OnDevice<float>>             there_biases;
            ops[0].x = there_x.data;
            for (int r : all_rows) {
                weights.push_back(
                    random_halves(std::size_t(r) * std::size_t(cols), random, 1 / std::sqrt(float(cols))));
                biases.push_back(floats_of(random_halves(std::size_t(r), random)));
                cuda::Product& p = ops[0].product[ops[0].n_products++];
                p.weight.rows = r, p.weight.cols = cols;
                p.weight.data = there_weights.emplace_back(weights.back()).data;
                if (!gated) p.bias = there_biases.emplace_back(biases.back()).data;
                p.out =
                    out.emplace_back(std::vector<std::uint16_t>(std::size_t(n) * std::size_t(r) + 64, half_nan)).data;
            }
            // Positions and slots; the last token has none where there are several.
            std::vector<std::int32_t> positions, slots;
            for (int t = 0; t < n; t++)
                positions.push_back(37 * t), slots.push_back(t > 0 && t + 1 == n ? -1 : 3 + 2 * t);
            std::vector<float> frequencies;
            for (int i = 0; i < D / 2; i++) frequencies.push_back(float(std::pow(10000.0, -2.0 * i / D)));
            const OnDevice<std::int32_t>  there_positions(positions), there_slots(slots);
            const OnDevice<float>         there_frequencies(frequencies);
            const std::size_t             cache_size = turned ? std::size_t(2 * n + 8) * std::size_t(others) : 1;
            const OnDevice<std::uint16_t> cache_k(std::vector<std::uint16_t>(cache_size, half_nan)),
                cache_v(std::vector<std::uint16_t>(cache_size, half_nan));
            cuda::Plan plan;
            plan.positions = there_positions.data, plan.slots = there_slots.data;
            if (turned) {
                cuda::RopeStore& rope = ops[1].rope;
                ops[1].kind           = cuda::TapeOp::rope_and_store;
                rope.q                = static_cast<cuda::Half*>(ops[0].product[0].out);
                rope.k                = static_cast<cuda::Half*>(ops[0].product[1].out);
                rope.v                = static_cast<cuda::Half*>(ops[0].product[2].out);
                rope.cache_k = cache_k.data, rope.cache_v = cache_v.data, rope.inv_freq = there_frequencies.data;
                rope.half = D / 2, rope.n_heads = rows / D, rope.n_kv_heads = others / D, rope.head_dim = D;
                rope.block_size = block_size, rope.scale = 1.25f, rope.halves = then == rotate_halves;
            }
            if (!cuda::can_prompt(ops[0])) break;
            REQUIRE(cuda::run_prompt(ops, turned ? 2 : 1, plan, stream) == (turned ? 2 : 1));

            const std::vector<float> xs      = floats_of(x);
            const auto               product = [&](std::size_t k) {
                const std::vector<float> w = floats_of(weights[k]);
                std::vector<double>      sums;
                for (int t = 0; t < n; t++)
                    for (int r = 0; r < all_rows[k]; r++) {
                        double       sum = gated ? 0 : double(biases[k][std::size_t(r)]);
                        const float *a = xs.data() + std::ptrdiff_t(t) * cols, *b = w.data() + std::ptrdiff_t(r) * cols;
                        for (int c = 0; c < cols; c++) sum += double(a[c]) * double(b[c]);
                        sums.push_back(sum);
                    }
                return sums;
            };
            const auto rotated = [&](std::vector<double> sums) {
                for (std::size_t head = 0; head < sums.size(); head += std::size_t(D))
                    for (int i = 0; i < D / 2; i++) {
                        const bool halves  = then == rotate_halves;
                        double &   a       = sums[head + std::size_t(halves ? i : 2 * i)],
                               &b          = sums[head + std::size_t(halves ? i + D / 2 : 2 * i + 1)];
                        const double angle = double(positions[head * std::size_t(n) / sums.size()]) *
                                             double(frequencies[std::size_t(i)]);
                        const double turn = 1.25 * (a * std::cos(angle) - b * std::sin(angle));
                        b                 = 1.25 * (a * std::sin(angle) + b * std::cos(angle));
                        a                 = turn;
                    }
                return sums;
            };
            for (std::size_t k = 0; k < (gated ? 1 : all_rows.size()); k++) {
                std::vector<double> want = product(k);
                if (gated) {
                    const std::vector<double> up = product(1);
                    for (std::size_t i = 0; i < want.size(); i++) want[i] = want[i] / (1 + std::exp(-want[i])) * up[i];
                }
                if (turned && k < 2) want = rotated(want);
                std::vector<std::uint16_t> got = out[k].back(stream);
                if (turned && k > 0) { // in the cache: as rows again
                    CHECK(std::ranges::all_of(got, [](std::uint16_t h) { return h == half_nan; }));
                    const auto                 cache = (k == 1 ? cache_k : cache_v).back(stream);
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
                    CHECK(std::ranges::count_if(cache, [](std::uint16_t h) { return h != half_nan; }) ==
                          std::ptrdiff_t(n_written));
                    CHECK(relative_error(floats_of(rows_of), want) < 1e-3);
                    continue;
                }
                CHECK(std::ranges::all_of(std::span(got).subspan(want.size()),
                                          [](std::uint16_t h) { return h == half_nan; }));
                got.resize(want.size());
                CHECK(relative_error(floats_of(got), want) < 1e-3);
                if (n > 1 && !turned) { // the first rows alone have the same bits
                    const auto poison = std::vector<std::uint16_t>(out[k].n, half_nan);
                    cuda::upload(out[k].data, poison.data(), poison.size() * 2);
                    ops[0].rows = n / 2;
                    REQUIRE(cuda::run_prompt(ops, 1, plan, stream) == 1);
                    ops[0].rows           = n;
                    const auto n_first    = std::ptrdiff_t(n / 2) * all_rows[k];
                    const auto first_half = out[k].back(stream);
                    CHECK(std::equal(got.begin(), got.begin() + n_first, first_half.begin()));
                    CHECK(std::all_of(first_half.begin() + n_first, first_half.end(),
                                      [](std::uint16_t h) { return h == half_nan; }));
                }
            }
        }
    cuda::destroy_stream(stream);
}

TEST_CASE("GPU: what stands between two attentions, as one kernel, equals plain sums", "[cuda]") {
    if (no_gpu()) return;
    cuda::Stream stream = cuda::create_stream();
    std::mt19937 random(4);
    struct Shape {
        int from, hidden, ff, kv, D; // columns of the first x; of the norms; of SwiGLU; rows of k and v; head_dim
    };
    using Rows         = std::vector<double>;
    const auto rounded = [](Rows rows) { // as halves
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
    int mode = 0; // what becomes of q, k and v: nothing, they are rotated by neighbours, or by halves
    for (const auto& [from, hidden, ff, kv, D] : {Shape{64, 64, 128, 16, 16}, Shape{40, 208, 72, 144, 16},
                                                  Shape{512, 384, 1096, 128, 128}, Shape{136, 6400, 24, 64, 64}})
        for (int n : {1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 50, 64, 65, 128}) {
            if (hidden > 1000 && n != 9 && n != 31) continue;
            mode = (mode + 1) % 3;
            CAPTURE(from, hidden, ff, kv, D, n, mode);
            const int  q_rows = std::min(hidden, 384);
            const auto matrix = [&](int rows, int cols) {
                return random_halves(std::size_t(rows) * std::size_t(cols), random, 1 / std::sqrt(float(cols)));
            };
            const auto x = random_halves(std::size_t(n * from), random), o = matrix(hidden, from),
                       gate = matrix(ff, hidden), up = matrix(ff, hidden), down = matrix(hidden, ff),
                       q = matrix(q_rows, hidden), k = matrix(kv, hidden), v = matrix(kv, hidden);
            const std::vector<float> residual = floats_of(random_halves(std::size_t(n * hidden), random)),
                                     norm_a   = floats_of(random_halves(std::size_t(hidden), random)),
                                     norm_b   = floats_of(random_halves(std::size_t(hidden), random)),
                                     bias     = floats_of(random_halves(std::size_t(hidden), random));
            // What the parts of a layer make of it, rounded where they hand halves on.
            Rows       sum(residual.begin(), residual.end());
            const auto normed = [&](const Rows& more, const std::vector<float>& weight) {
                Rows out;
                for (int t = 0; t < n; t++) {
                    double squares = 0;
                    for (int c = 0; c < hidden; c++) {
                        double& s = sum[std::size_t(t * hidden + c)];
                        s += more[std::size_t(t * hidden + c)];
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
            for (std::size_t i = 0; i < g.size(); i++) g[i] = g[i] / (1 + std::exp(-g[i])) * u[i];
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
                            const double turned = x * std::cos(angle) - y * std::sin(angle);
                            y                   = x * std::sin(angle) + y * std::cos(angle);
                            x                   = turned;
                        }

            const OnDevice<std::uint16_t> there_x(x), there_o(o), there_gate(gate), there_up(up), there_down(down),
                there_q(q), there_k(k), there_v(v), not_written(std::vector<std::uint16_t>(first.size(), half_nan)),
                there_a(std::vector<std::uint16_t>(a.size(), half_nan)),
                there_g(std::vector<std::uint16_t>(g.size(), half_nan)),
                there_u(std::vector<std::uint16_t>(g.size(), half_nan)),
                there_b(std::vector<std::uint16_t>(b.size(), half_nan)),
                out_q(std::vector<std::uint16_t>(wants[0].size(), half_nan)),
                out_k(std::vector<std::uint16_t>(wants[1].size(), half_nan)),
                out_vh(std::vector<std::uint16_t>(wants[2].size(), half_nan));
            const OnDevice<float> there_norm_a(norm_a), there_norm_b(norm_b), there_bias(bias),
                out_v(std::vector<float>(wants[2].size(), std::numeric_limits<float>::quiet_NaN()));
            std::vector<cuda::TapeOp> ops(6);
            const auto                weight = [](const OnDevice<std::uint16_t>& data, int rows, int cols) {
                cuda::Weight w;
                w.rows = rows, w.cols = cols, w.data = data.data;
                return w;
            };
            const auto products = [&](cuda::TapeOp& op, const OnDevice<std::uint16_t>& of, int cols,
                                      std::initializer_list<cuda::Product> list) {
                op.kind = cuda::TapeOp::products, op.x = of.data, op.rows = n, op.cols = cols;
                for (const cuda::Product& p : list) op.product[op.n_products++] = p;
            };
            const OnDevice<float> there_residual(residual);
            const auto norm = [&](cuda::TapeOp& op, const OnDevice<std::uint16_t>& out, const OnDevice<float>& w) {
                op.kind = cuda::TapeOp::norm, op.x = not_written.data, op.residual = there_residual.data;
                op.norm_weight = w.data, op.eps = 1e-5f, op.out = out.data, op.rows = n, op.cols = hidden;
            };
            products(ops[0], there_x, from,
                     {{weight(there_o, hidden, from), there_bias.data, not_written.data, false}});
            norm(ops[1], there_a, there_norm_a);
            products(ops[2], there_a, hidden,
                     {{weight(there_gate, ff, hidden), nullptr, there_g.data, false},
                      {weight(there_up, ff, hidden), nullptr, there_u.data, false}});
            ops[2].kind = cuda::TapeOp::gated;
            products(ops[3], there_g, ff, {{weight(there_down, hidden, ff), nullptr, not_written.data, false}});
            norm(ops[4], there_b, there_norm_b);
            products(ops[5], there_b, hidden,
                     {{weight(there_q, q_rows, hidden), nullptr, out_q.data, false},
                      {weight(there_k, kv, hidden), nullptr, out_k.data, false},
                      {weight(there_v, kv, hidden), nullptr, mode > 0 ? static_cast<void*>(out_vh.data) : out_v.data,
                       mode == 0}});
            const OnDevice<std::int32_t> there_positions(positions), there_slots(slots);
            const OnDevice<float>        there_frequencies(frequencies);
            const auto cache = std::vector<std::uint16_t>(std::size_t(70) * 4 * std::size_t(kv), half_nan);
            const OnDevice<std::uint16_t> cache_k(cache), cache_v(cache);
            cuda::Plan                    plan;
            plan.positions = there_positions.data, plan.slots = there_slots.data;
            if (mode > 0) {
                cuda::RopeStore& rope = ops.emplace_back().rope;
                ops.back().kind       = cuda::TapeOp::rope_and_store;
                rope.q = out_q.data, rope.k = out_k.data, rope.v = out_vh.data;
                rope.cache_k = cache_k.data, rope.cache_v = cache_v.data, rope.inv_freq = there_frequencies.data;
                rope.half = D / 2, rope.n_heads = q_rows / D, rope.n_kv_heads = kv / D, rope.head_dim = D;
                rope.block_size = 4, rope.halves = mode == 2;
            }
            for (int round = 0; round < 3; round++) { // the counters are ready for the next launch
                cuda::upload(there_residual.data, residual.data(), residual.size() * sizeof(float));
                const int done = cuda::run_dense(ops.data(), int(ops.size()), n, plan, stream);
                if (done == 0) {
                    WARN("not tested: only Hopper has this kernel");
                    return;
                }
                REQUIRE(done == int(ops.size()));
                cuda::synchronize(stream);
            }
            CHECK(relative_error(floats_of(there_a.back(stream)), a) < 2e-3);
            CHECK(relative_error(floats_of(there_g.back(stream)), g) < 4e-3);
            CHECK(relative_error(there_residual.back(stream), sum) < 4e-3);
            CHECK(relative_error(floats_of(there_b.back(stream)), b) < 4e-3);
            CHECK(relative_error(floats_of(out_q.back(stream)), wants[0]) < 8e-3);
            if (mode == 0) {
                CHECK(relative_error(floats_of(out_k.back(stream)), wants[1]) < 8e-3);
                CHECK(relative_error(out_v.back(stream), wants[2]) < 8e-3);
                continue;
            }
            // In the cache are the tokens that have slots, and nothing else.
            const std::vector<float> got[] = {floats_of(cache_k.back(stream)), floats_of(cache_v.back(stream))};
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
    cuda::destroy_stream(stream);
}

TEST_CASE("GPU: attention over blocks equals plain attention", "[cuda]") {
    if (no_gpu()) return;
    cuda::Stream stream = cuda::create_stream();
    std::mt19937 random(2);
    struct Case {
        int   D, heads, kv_heads, block, context, n_queries, window;
        float softcap;
        bool  decodes = n_queries == 1; // each query for itself, as those of many sequences
    };
    std::vector<Case> cases;
    for (int D : {16, 32, 48, 64, 80, 96, 128, 256})
        for (auto [heads, kv] : {std::pair(4, 4), std::pair(4, 2), std::pair(8, 1), std::pair(9, 3)})
            for (auto [context, queries] : {std::pair(1, 1), std::pair(17, 1), std::pair(300, 1), std::pair(513, 1),
                                            std::pair(2100, 1), std::pair(70, 70), std::pair(200, 131)})
                cases.push_back({D, heads, kv, std::array{1, 8, 16, 24, 256}[random() % 5], context, queries,
                                 random() % 3 == 0 ? 33 : 0, random() % 4 == 0 ? 2.5f : 0.0f});
    for (int D : {64, 128}) { // block sizes of all kinds; and more tiles than a GPU has processors
        for (int block : {1, 4, 8, 12, 16, 32, 40, 64, 128, 256, 384})
            cases.push_back({D, 2, 1, block, 333, 261, block == 32 ? 200 : 0, 0});
        cases.push_back({D, 45, 5, 16, 260, 257, 0, 0});
    }
    for (auto [D, queries] :
         {std::pair(64, 56), std::pair(128, 34), std::pair(256, 12)}) // the last heads' chunks are shorter
        for (int window : {0, 500}) cases.push_back({D, 24, 24, 16, 600, queries, window, 0, true});
    for (const Case& c : cases) {
        if (c.D % 16 != 0 && c.n_queries == 1) continue;
        CAPTURE(c.D, c.heads, c.kv_heads, c.block, c.context, c.n_queries, c.window, c.softcap, c.decodes);
        const int                 n_blocks = (c.context + c.block - 1) / c.block + 3;
        std::vector<std::int32_t> ids(std::size_t(n_blocks), 0), positions, items, tiles;
        std::iota(ids.begin(), ids.end(), 0);
        std::shuffle(ids.begin(), ids.end(), random);
        const auto  n_cache = std::size_t(n_blocks) * std::size_t(c.block) * std::size_t(c.kv_heads) * std::size_t(c.D);
        auto        k = random_halves(n_cache, random), v = random_halves(n_cache, random);
        const auto  q     = random_halves(std::size_t(c.n_queries) * std::size_t(c.heads) * std::size_t(c.D), random);
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
                for (int d = 0; d < c.D; d++) k[at(position, head, d)] = v[at(position, head, d)] = half_nan;
        std::vector<double> want;
        for (int t = 0; t < c.n_queries; t++) {
            const int last = c.context - c.n_queries + t, first = c.window > 0 ? std::max(0, last - c.window + 1) : 0;
            positions.push_back(last);
            for (int h = 0; h < c.heads; h++) {
                const int           kv = h / (c.heads / c.kv_heads);
                std::vector<double> p;
                double              limit = -1e30, sum = 0;
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
                for (int d = 0; d < c.D; d++) {
                    double o = 0;
                    for (int j = first; j <= last; j++)
                        o += p[std::size_t(j - first)] * double(f16_to_f32(v[at(j, kv, d)]));
                    want.push_back(o / sum);
                }
            }
        }
        OnDevice<std::uint16_t> dk(k), dv(v), dq(q), out(std::vector<std::uint16_t>(want.size(), half_nan));
        OnDevice<std::int32_t>  dtable(ids), dstart({0}), dpositions(positions);
        cuda::Plan              plan;
        plan.block_tables = dtable.data, plan.table_start = dstart.data, plan.positions = dpositions.data;
        cuda::Attention a;
        a.q = dq.data, a.cache_k = dk.data, a.cache_v = dv.data, a.out = out.data;
        a.n_heads = c.heads, a.n_kv_heads = c.kv_heads, a.head_dim = c.D, a.block_size = c.block, a.scale = scale,
        a.window = c.window, a.softcap = c.softcap;
        const int tile = cuda::prefill_tile(c.D);
        if (c.decodes && tile > 0) {
            // Short chunks, and as long as the device likes them.
            const auto lengths =
                random() % 2 == 0 && c.n_queries == 1
                    ? cuda::DecodeChunks{}
                    : cuda::decode_chunks(c.D, std::int64_t(1) << (c.n_queries > 1 ? 24 : 8 + random() % 16));
            const auto cut = [&](int chunk) {
                const auto before = items.size();
                for (int t = 0; t < c.n_queries; t++) {
                    const int end          = positions[std::size_t(t)] + 1,
                              begin        = c.window > 0 ? std::max(0, end - c.window) : 0,
                              old          = int(random() % 2) * (end - 1);
                    const auto [n, length] = cuda::chunks_of(end - begin, chunk);
                    for (int i = 0; i < n; i++)
                        items.insert(items.end(),
                                     {t, 0, begin + i * length, std::min(end, begin + (i + 1) * length), n, i, old});
                }
                return int(items.size() - before) / 7;
            };
            plan.items.n = cut(lengths.length);
            if (lengths.short_length > 0) plan.items.n_short = cut(lengths.short_length);
            OnDevice<std::int32_t> list(items),
                tickets(std::vector<std::int32_t>(std::size_t(c.heads) * std::size_t(c.n_queries), 0));
            OnDevice<float> partial(std::vector<float>(items.size() / 7 * std::size_t(c.heads) * std::size_t(c.D + 2)));
            plan.items.list = reinterpret_cast<const cuda::DecodeItem*>(list.data);
            for (int again = 0; again < 2; again++) // the tickets are ready for the next launch
                cuda::attention_decode(a, plan, partial.data, tickets.data, stream);
            CHECK(relative_error(floats_of(out.back(stream)), want) < 5e-3);
        } else {
            const int most = std::max(tile, 16);
            for (int row = 0; row < c.n_queries; row += most)
                tiles.insert(tiles.end(), {0, row, std::min(most, c.n_queries - row)});
            OnDevice<std::int32_t> list(tiles);
            cuda::attention_prefill(a, plan, reinterpret_cast<const cuda::PrefillTile*>(list.data),
                                    int(tiles.size() / 3), stream);
            CHECK(relative_error(floats_of(out.back(stream)), want) < 5e-3);
        }
    }
    cuda::destroy_stream(stream);
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
    const bool   truncates = (t.top_k > 0 && t.top_k < int(x.size())) || t.top_p < 1 || t.min_p > 0;
    const auto   better    = [&](int a, int b) { return float(x[std::size_t(a)]) > float(x[std::size_t(b)]); };
    const double limit     = *std::ranges::max_element(x);
    if (truncates) std::stable_sort(order.begin(), order.end(), better);
    if (t.top_k > 0 && t.top_k < int(x.size())) order.resize(std::size_t(t.top_k));
    const auto mass  = [&](int i) { return std::exp((x[std::size_t(i)] - limit) / double(t.temperature)); };
    double     total = 0, so_far = 0;
    for (int i : order) total += mass(i);
    std::size_t n = 0;
    while (n < order.size() && (n == 0 || t.top_p >= 1 || so_far < double(t.top_p) * total)) so_far += mass(order[n++]);
    order.resize(n);
    while (t.min_p > 0 && order.size() > 1 && mass(order.back()) < double(t.min_p)) order.pop_back();
    total = so_far = 0;
    for (int i : order) total += mass(i);
    for (int i : order) {
        if (i == token) return {so_far / total, (so_far + mass(i)) / total};
        so_far += mass(i);
    }
    return {2, 2};
}

} // namespace

TEST_CASE("GPU: sampling draws what its parameters and random numbers say", "[cuda]") {
    if (no_gpu()) return;
    cuda::Stream stream = cuda::create_stream();
    std::mt19937 random(7);
    auto         below = [&](int n) { return int(random() % unsigned(n)); };
    for (int vocab : {1, 5, 257, 4097, 32000, 152064})
        for (int round = 0; round < (vocab > 4097 ? 12 : 40); round++) {
            const int                       n_rows = 1 + below(4);
            std::normal_distribution<float> normal(0, std::array{0.1f, 1.0f, 4.0f, 12.0f}[std::size_t(below(4))]);
            std::vector<float>              logits(std::size_t(n_rows) * std::size_t(vocab));
            for (float& x : logits) x = round % 5 == 4 ? std::round(normal(random)) : normal(random); // ties
            if (round % 7 == 3 && vocab > 5)
                logits[2] = std::numeric_limits<float>::quiet_NaN(),
                logits[3] = -std::numeric_limits<float>::infinity();
            std::vector<cuda::SampleTask>   tasks;
            std::vector<cuda::LogitEdit>    edits;
            std::vector<double>             numbers;
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
                t.n_top          = std::min({below(40), vocab, cuda::most_top});
                t.first_out      = words;
                t.wants_logprobs = 1;
                t.top_k = p.top_k, t.temperature = p.temperature, t.top_p = p.top_p, t.min_p = p.min_p;
                if (r > 0 && below(4) == 0) t.chosen = below(vocab), t.n_draws = 1;
                std::vector<LogitEdit> own;
                if (t.chosen < 0) sampler.list_edits(p, history, int(history.size()) / 2, {}, own);
                for (const LogitEdit& e : own) edits.push_back({e.token, e.divide, e.subtract, e.add});
                t.n_edits     = int(own.size());
                t.only_edited = t.chosen < 0 && !p.allowed_tokens.empty();
                for (int i = 0; i < t.n_draws; i++)
                    numbers.push_back(random_at(p.seed + std::uint64_t(i), history.size()));
                words += 2 * (t.n_draws + t.n_top);
                tasks.push_back(t);
                all.push_back(p);
                histories.push_back(history);
            }
            edits.emplace_back(); // never an empty buffer
            OnDevice<float>            rows(logits);
            OnDevice<cuda::SampleTask> there(tasks);
            OnDevice<cuda::LogitEdit>  changes(edits);
            OnDevice<double>           random_numbers(numbers);
            OnDevice<std::int32_t>     out(std::vector<std::int32_t>(std::size_t(words), -7));
            cuda::sample(rows.data, vocab, there.data, n_rows, changes.data, random_numbers.data, out.data, stream);
            const std::vector<std::int32_t> got = out.back(stream);
            for (int r = 0; r < n_rows; r++) {
                const cuda::SampleTask&      t = tasks[std::size_t(r)];
                const std::span<const float> row(logits.data() + std::ptrdiff_t(r) * vocab, std::size_t(vocab));
                CAPTURE(vocab, round, r, t.top_k, t.top_p, t.min_p, t.temperature, t.n_edits, t.chosen);
                const auto at = [&](int i) {
                    return TokenLogprob{got[std::size_t(t.first_out + 2 * i)],
                                        std::bit_cast<float>(got[std::size_t(t.first_out + 2 * i + 1)])};
                };
                const PositionLogprobs want = sampler.logprobs(row, t.chosen, t.n_top);
                for (int i = 0; i < t.n_top; i++) {
                    CHECK(at(t.n_draws + i).token == want.top[std::size_t(i)].token);
                    const float lp = want.top[std::size_t(i)].logprob, mine = at(t.n_draws + i).logprob;
                    CHECK((lp == mine || std::abs(lp - mine) < 1e-4f * (1 + std::abs(lp))));
                }
                for (int i = 0; i < t.n_draws; i++) {
                    const auto [token, logprob] = at(i);
                    REQUIRE((token >= 0 && token < vocab));
                    const double raw = sampler.logprob(row, token);
                    if (!std::isnan(raw))
                        CHECK((raw == double(logprob) || std::abs(raw - double(logprob)) < 1e-4 * (1 + std::abs(raw))));
                    const std::span<const cuda::LogitEdit> own(edits.data() + t.first_edit, std::size_t(t.n_edits));
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
                    }
                }
            }
        }
    cuda::destroy_stream(stream);
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
         {"llama3-gqa-F16.gguf", "llama3-gqa-Q8_0.gguf", "mistral-swa-Q8_0.gguf", "qwen2-Q4_0.gguf", "gpt2-F32.gguf"}) {
        CAPTURE(name);
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

TEST_CASE("GPU: a sequence alone, its steps being one kernel, answers as on the CPU", "[cuda]") {
    if (no_gpu()) return;
    constexpr ModelShape shapes[] = {{"heads of 64, groups of 4", 3, 512, 8, 2, 1280, 2048, 2048},
                                     {"one kv head for 16", 2, 1024, 16, 1, 512, 2048, 2048},
                                     {"heads of 128, 8 of them", 2, 1024, 8, 8, 2816, 2048, 2048},
                                     {"rows that blocks claim", 1, 5120, 40, 8, 6400, 2048, 2048}};
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
        o.recovery         = round % 2 ? Recovery::swap : Recovery::recompute;
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
