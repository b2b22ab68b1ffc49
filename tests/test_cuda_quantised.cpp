// The layer kernel with quantised weights against itself with the same weights in fp16. Without a GPU these tests print that and pass.
#include <catch2/catch_test_macros.hpp>

#include "../cuda/kernels.h"
#include "process.h"
#include "reference.h"

import quire.compute.cuda.weights;
import quire.core.base;
import quire.core.std;
import quire.core.tensor;
import quire.model_file.gguf_writer;
import quire.model_file.quants;

#include "cuda_tools.h"
#include "odd_model.h"

using namespace quire;
using namespace quire::testing;

namespace {

// The widths of a layer: of what attention gives, hidden, feed-forward, q, k and v; and head_dim.
struct Widths {
    int from, hidden, ff, q, kv, D;
};

// A layer between two attentions.
class Layer {
public:
    enum { o, gate, up, down, q, k, v, n_weights };
    static constexpr int last_layer = 3; // a mode: after the feed-forward network comes no norm, and no q, k and v

    Layer(const Gpu& gpu, const Widths& widths, int n, int mode, std::mt19937& random)
        : gpu_(gpu), w_(widths), n_(n), mode_(mode), x_(gpu, random_fp16(std::size_t(n * w_.from), random)),
          bias_(gpu, floats_of(random_fp16(std::size_t(w_.hidden), random))),
          norm_(gpu, floats_of(random_fp16(std::size_t(w_.hidden), random))),
          residual_(floats_of(random_fp16(std::size_t(n * w_.hidden), random))) {
        for (int t = 0; t < n; t++) { // the last of several has no slot
            positions_.push_back(37 * t);
            slots_.push_back(t > 0 && t + 1 == n ? -1 : 3 + 2 * t);
        }
        for (int i = 0; i < w_.D / 2; i++) frequencies_.push_back(float(std::pow(10000.0, -2.0 * i / w_.D)));
    }

    // All that the layer leaves in memory, with `each` tokens a launch. Empty: this GPU does not have the kernel.
    std::vector<std::vector<float>> run(std::span<const cuda::Weight> weights, int each) const {
        const auto fp16 = [&](int width) {
            return OnDevice<std::uint16_t>(gpu_, std::vector<std::uint16_t>(std::size_t(n_ * width), fp16_nan));
        };
        const OnDevice<std::uint16_t> delta = fp16(w_.hidden), a = fp16(w_.hidden), g = fp16(w_.ff), u = fp16(w_.ff),
                                      b = fp16(w_.hidden), q_out = fp16(w_.q), k_out = fp16(w_.kv), v_out = fp16(w_.kv);
        const std::vector<std::uint16_t> cache(std::size_t(160) * 4 * std::size_t(w_.kv), fp16_nan);
        const OnDevice<std::uint16_t>    cache_k(gpu_, cache), cache_v(gpu_, cache);
        const OnDevice<float>            residual(gpu_, residual_), frequencies(gpu_, frequencies_);
        const OnDevice<std::int32_t>     positions(gpu_, positions_), slots(gpu_, slots_);
        const auto launch = [&](int first) { // tokens from `first` on; how many operations ran of how many
            const int                    n = std::min(each, n_ - first);
            std::vector<cuda::Operation> ops(6);
            const auto                   at = [&](const OnDevice<std::uint16_t>& values) {
                return values.data + values.n / std::size_t(n_) * std::size_t(first);
            };
            const auto gemm = [&](cuda::Operation& op, const void* x, std::initializer_list<cuda::Projection> list) {
                op.kind = cuda::Operation::gemm, op.x = x, op.rows = n, op.cols = list.begin()->weight.cols;
                for (const cuda::Projection& p : list) op.projection[op.n_projections++] = p;
            };
            const auto norm = [&](cuda::Operation& op, void* out) {
                op.kind = cuda::Operation::norm, op.x = at(delta), op.residual = residual.data + first * w_.hidden;
                op.norm_weight = norm_.data, op.eps = 1e-5f, op.out = out, op.rows = n, op.cols = w_.hidden;
            };
            gemm(ops[0], at(x_), {{weights[o], bias_.data, at(delta), false, n_ % 4 < 2 ? 1.0f : 0.25f}});
            norm(ops[1], at(a));
            gemm(ops[2], at(a), {{weights[gate], nullptr, at(g)}, {weights[up], nullptr, at(u)}});
            ops[2].kind       = cuda::Operation::gated_gemm;
            ops[2].activation = n_ % 2 != 0 ? cuda::Activation::silu : cuda::Activation::gelu_tanh;
            gemm(ops[3], at(g), {{weights[down], nullptr, at(delta)}});
            norm(ops[4], at(b));
            gemm(
                ops[5], at(b),
                {{weights[q], nullptr, at(q_out)}, {weights[k], nullptr, at(k_out)}, {weights[v], nullptr, at(v_out)}});
            cuda::Plan plan;
            plan.positions = positions.data + first, plan.slots = slots.data + first;
            if (mode_ == last_layer) ops.resize(4);
            else if (mode_ > 0) {
                cuda::RopeStore& rope = ops.emplace_back().rope;
                ops.back().kind       = cuda::Operation::rope_and_store;
                rope.q = at(q_out), rope.k = at(k_out), rope.v = at(v_out);
                rope.cache_k = cache_k.data, rope.cache_v = cache_v.data, rope.inv_freq = frequencies.data;
                rope.n_pairs = w_.D / 2, rope.n_heads = w_.q / w_.D, rope.n_kv_heads = w_.kv / w_.D;
                rope.head_dim = rope.q_dim = rope.value_dim = w_.D;
                rope.block_rows                             = rope.n_kv_heads * 4;
                rope.block_size = 4, rope.neox = mode_ == 2;
            }
            return std::pair(cuda::run_layer_kernel(ops.data(), int(ops.size()), n, plan, gpu_), int(ops.size()));
        };
        static_cast<void>(cuda::begin_launches(gpu_)); // alone on the device, as passes have to be
        for (int round = 0; round < 2; round++) {      // the counters are ready for the next launch
            cuda::upload(residual.data, residual_.data(), residual_.size() * sizeof(float), gpu_);
            for (int first = 0; first < n_; first += each) {
                const auto [done, all] = launch(first);
                if (done == 0) {
                    cuda::end_launches(gpu_);
                    return {};
                }
                CHECK(done == all);
            }
            cuda::synchronize(gpu_);
        }
        cuda::end_launches(gpu_);
        std::vector<std::vector<float>> out{residual.back(gpu_)};
        for (const OnDevice<std::uint16_t>* values : {&delta, &a, &g, &b, &q_out})
            out.push_back(floats_of(values->back(gpu_)));
        const bool stores = mode_ == 1 || mode_ == 2;
        for (const OnDevice<std::uint16_t>* values : {stores ? &cache_k : &k_out, stores ? &cache_v : &v_out})
            out.push_back(floats_of(values->back(gpu_)));
        return out;
    }

private:
    const Gpu& gpu_;
    Widths     w_;
    int n_, mode_; // what becomes of q, k and v: nothing, RoPE with interleaved pairs, with NeoX pairs; or last_layer
    const OnDevice<std::uint16_t> x_;
    const OnDevice<float>         bias_, norm_;
    std::vector<float>            residual_, frequencies_;
    std::vector<std::int32_t>     positions_, slots_;
};

// Equal where neither is NaN, and NaN at the same places.
double difference(const std::vector<float>& got, const std::vector<float>& want) {
    std::vector<float>  some;
    std::vector<double> wanted;
    for (std::size_t i = 0; i < want.size(); i++) {
        if (std::isnan(got[i]) && std::isnan(want[i])) continue;
        some.push_back(got[i]), wanted.push_back(double(want[i]));
    }
    return relative_error(some, wanted);
}

} // namespace

TEST_CASE("GPU: the layer kernel with quantised weights equals itself with the same weights in fp16", "[cuda]") {
    if (no_gpu()) return;
    const Gpu    gpu;
    std::mt19937 random(11);
    cuda::prepare_layer_kernel(gpu);
    constexpr DType types[] = {DType::Q8_0, DType::Q4_0, DType::Q5_0,   DType::Q4_K,  DType::Q5_K,
                               DType::Q6_K, DType::Q3_K, DType::IQ4_XS, DType::MXFP4, DType::IQ4_NL};
    int             mode    = 0;
    // One type, or one for each weight; widths that are no multiple of a stage; and GEMMs whose tiles few CTAs share, one after another,
    // each time other ones.
    constexpr int n_types = int(std::size(types));
    for (int pass = 0; pass < n_types + 6; pass++)
        for (int n : {1, 2, 8, 9, 16, 31, 33, 64, 65, 128, 129, 192, 200, 256, 300}) {
            const bool   mixed = pass >= n_types, odd = pass == n_types + 3, narrow = pass > n_types + 3;
            const Widths widths = odd      ? Widths{384, 640, 896, 128, 64, 64}
                                  : narrow ? Widths{1024, 1024, 512, 1024, 64, 64}
                                           : Widths{512, 768, 1280, 512, 256, 128};
            mode                = pass == n_types + 5 ? Layer::last_layer : (mode + 1) % 3;
            const Layer layer(gpu, widths, n, mode, random);
            CAPTURE(pass, n, mode);
            const int rows[] = {widths.hidden, widths.ff, widths.ff, widths.hidden, widths.q, widths.kv, widths.kv},
                      cols[] = {widths.from,   widths.hidden, widths.hidden, widths.ff,
                                widths.hidden, widths.hidden, widths.hidden};
            const std::size_t         first = odd ? 0 : random();
            DeviceMemory              memory(gpu);
            DeviceWeights             on_device(gpu, memory, std::size_t(1) << 30);
            std::vector<cuda::Weight> weights, in_fp16;
            std::size_t               n_values = 0;
            for (int i = 0; i < Layer::n_weights; i++) {
                const std::size_t kind   = odd     ? 0
                                           : mixed ? first + std::size_t(i == Layer::up ? Layer::gate : i)
                                                   : std::size_t(pass);
                const DType       type   = types[kind % std::size(types)];
                const auto        blocks = random_rows(type, rows[i], cols[i], random);
                const auto        view   = on_device.prepare({type, rows[i], cols[i], blocks.data()});
                REQUIRE(view);
                weights.push_back(on_device.of(*view));
                n_values += std::size_t(rows[i] * cols[i]);
            }
            const OnDevice<std::uint16_t> values(gpu, std::vector<std::uint16_t>(n_values, fp16_nan));
            n_values = 0;
            for (const cuda::Weight& w : weights) {
                cuda::dequantize(w, values.data + n_values, gpu);
                cuda::Weight& made = in_fp16.emplace_back();
                made.rows = w.rows, made.cols = w.cols, made.data = values.data + n_values;
                n_values += std::size_t(w.rows * w.cols);
            }
            const auto want = layer.run(in_fp16, 64);
            if (want.empty()) {
                WARN("not tested: only Hopper has this kernel");
                return;
            }
            for (const bool quantised : {true, false}) {
                if (!quantised && n > cuda::max_layer_kernel_rows) continue;
                const auto got = layer.run(quantised ? weights : in_fp16, n);
                REQUIRE(got.size() == want.size()); // no kernel but this one
                for (std::size_t i = 0; i < want.size(); i++) {
                    CAPTURE(quantised, i);
                    CHECK(difference(got[i], want[i]) < 3e-3);
                }
            }
        }
}

TEST_CASE("GPU: the layer kernel runs a quantised GEMM that stands alone", "[cuda]") {
    if (no_gpu()) return;
    const Gpu    gpu;
    std::mt19937 random(12);
    if (cuda::prepare_layer_kernel(gpu) == 0) {
        WARN("not tested: only Hopper has this kernel");
        return;
    }
    struct Matrix {
        DType            type;
        std::int64_t     rows, cols;
        std::vector<int> n; // tokens
    };
    const std::vector<int> all{2, 9, 64, 100, 129, 200, 300};
    // Rows that are no multiple of a tile, and the output matrix of a large vocabulary.
    for (const auto& [type, rows, cols, tokens] :
         {Matrix{DType::Q8_0, 1040, 512, all}, Matrix{DType::Q4_K, 1040, 512, all}, Matrix{DType::Q6_K, 1040, 512, all},
          Matrix{DType::Q8_0, 262144, 128, {66}}}) {
        const auto    blocks = random_rows(type, rows, cols, random);
        DeviceMemory  memory(gpu);
        DeviceWeights on_device(gpu, memory, std::size_t(1) << 30);
        const auto    view = on_device.prepare({type, rows, cols, blocks.data()});
        REQUIRE(view);
        cuda::Projection p{on_device.of(*view)};
        REQUIRE(cuda::can_layer_gemm(gpu, p.weight));
        const OnDevice<std::uint16_t> values(gpu, std::vector<std::uint16_t>(std::size_t(rows * cols), fp16_nan));
        cuda::dequantize(p.weight, values.data, gpu);
        const std::vector<float> w       = floats_of(values.back(gpu)),
                                 bias_of = floats_of(random_fp16(std::size_t(rows), random));
        const OnDevice<float> bias(gpu, bias_of);
        for (const int n : tokens) {
            CAPTURE(type, rows, n);
            const auto                    x_of = random_fp16(std::size_t(n * cols), random);
            const std::vector<float>      x    = floats_of(x_of);
            const OnDevice<std::uint16_t> there(gpu, x_of);
            const OnDevice<float>         out(gpu, std::vector<float>(std::size_t(n * rows)));
            p.bias = bias.data, p.out = out.data, p.out_is_float = true, p.scale = 0.5f;
            cuda::Operation op;
            op.kind = cuda::Operation::gemm, op.x = there.data, op.rows = n, op.cols = cols;
            op.projection[0] = p, op.n_projections = 1;
            static_cast<void>(cuda::begin_launches(gpu)); // alone on the device, as passes have to be
            CHECK(cuda::run_layer_kernel(&op, 1, n, {}, gpu) == 1);
            cuda::end_launches(gpu);
            CHECK(cuda::match_layer_kernel(&op, 1, n, gpu) == 0); // other kernels are as good within a layer
            std::vector<double> want;
            for (int t = 0; t < n; t++)
                for (std::int64_t r = 0; r < rows; r++) {
                    double sum = double(bias_of[std::size_t(r)]);
                    for (std::int64_t c = 0; c < cols; c++)
                        sum += double(x[std::size_t(t * cols + c)]) * double(w[std::size_t(r * cols + c)]);
                    want.push_back(sum / 2);
                }
            CHECK(relative_error(out.back(gpu), want) < 1e-3);
        }
    }
}
