// Mixtures of experts on the GPU, kernel by kernel, against plain sums. Without a GPU these tests print that and pass.
#include <catch2/catch_test_macros.hpp>

#include "../cuda/kernels.h"

import quire.compute.program;
import quire.compute.routing;
import quire.core.base;
import quire.core.std;
import quire.core.tensor;
import quire.model_file.family;
import quire.model_file.quants;

#include "cuda_tools.h"

using namespace quire;
using namespace quire::testing;

namespace {

enum class Form { f16, q8_0, q6_k, q5_k, q4_k }; // as the device has them

// The matrices of n experts in a device form, with the values that they mean.
struct Stack {
    Stack(cuda::Context& gpu, Form form, int n, int rows, int cols, std::mt19937& random) {
        const std::size_t all = std::size_t(n) * std::size_t(rows) * std::size_t(cols);
        weight.rows = std::int64_t(n) * rows, weight.cols = cols;
        values.resize(all);
        const auto small = [&] { return f32_to_f16(0.002f + 0.004f * float(random() % 1000) / 1000); };
        const auto bytes = [&](std::size_t count) {
            std::vector<std::uint8_t> out(count);
            for (auto& b : out) b = std::uint8_t(random() >> 8);
            return out;
        };
        if (form == Form::f16) {
            const auto h = random_fp16(all, random, 0.3f);
            for (std::size_t i = 0; i < all; i++) values[i] = f16_to_f32(h[i]);
            weight.data = keep(gpu, h);
        } else if (form == Form::q4_k) {
            weight.form = cuda::WeightForm::q4_k;
            auto blocks = bytes(all / 256 * 144);
            for (std::size_t b = 0; b < all / 256; b++) {
                std::uint8_t*       block = blocks.data() + b * 144;
                const std::uint16_t d = f32_to_f16(1e-4f + 1e-7f * float(random() % 1000)), m = f32_to_f16(8e-4f);
                std::memcpy(block, &d, 2), std::memcpy(block + 2, &m, 2);
                for (std::size_t i = 0; i < 256; i++) {
                    const std::size_t   j     = i / 32;
                    const std::uint8_t* s     = block + 4;
                    const int           scale = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6) << 4,
                              min             = j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | (s[j] >> 6) << 4,
                              byte = block[16 + i / 64 * 32 + i % 32], q = j % 2 ? byte >> 4 : byte & 15;
                    values[b * 256 + i] = double(f16_to_f32(d)) * scale * q - double(f16_to_f32(m)) * min;
                }
            }
            weight.data = keep(gpu, blocks);
        } else {
            weight.form              = cuda::WeightForm::i8;
            weight.group             = form == Form::q6_k ? 16 : 32;
            weight.float_scales      = form != Form::q8_0;
            auto              q      = bytes(all);
            const std::size_t groups = all / std::size_t(weight.group);
            if (form == Form::q5_k) // where there are minima, there are no negative numbers
                for (auto& v : q) v &= 31;
            std::vector<std::uint16_t> half(groups);
            std::vector<float>         scales(groups), mins(groups);
            for (std::size_t g = 0; g < groups; g++) {
                half[g] = small(), scales[g] = f16_to_f32(small()),
                mins[g] = form == Form::q5_k ? f16_to_f32(small()) * 30 : 0;
                if (form == Form::q8_0) scales[g] = f16_to_f32(half[g]);
            }
            for (std::size_t i = 0; i < all; i++) {
                const std::size_t g = i / std::size_t(weight.group);
                values[i]           = double(scales[g]) * static_cast<signed char>(q[i]) - double(mins[g]);
            }
            weight.data   = keep(gpu, q);
            weight.scales = form == Form::q8_0 ? static_cast<const void*>(keep(gpu, half)) : keep(gpu, scales);
            if (form == Form::q5_k) weight.mins = keep(gpu, mins);
        }
        if (form != Form::f16) weight.scale_exponent = cuda::scale_exponent_of(weight, gpu);
    }
    ~Stack() {
        for (void* m : memory) cuda::release(m);
    }
    Stack(const Stack&)            = delete;
    Stack& operator=(const Stack&) = delete;
    template <class T>
    T* keep(cuda::Context& gpu, const std::vector<T>& host) {
        auto* to = static_cast<T*>(cuda::allocate(gpu, host.size() * sizeof(T) + 64));
        cuda::upload(to, host.data(), host.size() * sizeof(T), gpu);
        memory.push_back(to);
        return to;
    }
    double dot(std::int64_t row, const float* x) const {
        double sum = 0;
        for (std::int64_t c = 0; c < weight.cols; c++) sum += values[std::size_t(row * weight.cols + c)] * double(x[c]);
        return sum;
    }
    cuda::Weight        weight;
    std::vector<double> values;
    std::vector<void*>  memory;
};

std::vector<float> normal(std::size_t n, std::mt19937& random, float scale) {
    std::normal_distribution<float> of(0, scale);
    std::vector<float>              out(n);
    for (float& v : out) v = of(random);
    return out;
}

} // namespace

TEST_CASE("GPU: mixtures of experts of every form and shape equal plain sums", "[cuda]") {
    if (no_gpu()) return;
    const Gpu    gpu;
    std::mt19937 random(5);
    struct Shape {
        int n, k, hidden, ff;
    };
    int turn = 0;
    for (const auto& [n, k, hidden, ff] :
         {Shape{4, 2, 256, 96}, Shape{6, 1, 96, 64}, Shape{8, 2, 512, 768}, Shape{60, 3, 64, 96},
          Shape{128, 8, 256, 96}, Shape{16, 8, 512, 256}, Shape{5, 2, 90, 33}, Shape{600, 4, 64, 40},
          Shape{8, 4, 2880, 64}, Shape{3, 2, 320, 2880}, Shape{2, 1, 768, 1024}, Shape{4, 2, 256, 704}})
        for (Form form : {Form::f16, Form::q8_0, Form::q6_k, Form::q5_k, Form::q4_k}) {
            const int unit = form == Form::f16 ? 1 : form == Form::q4_k ? 256 : 32;
            if (hidden % unit != 0 || ff % unit != 0) continue;
            const bool  odd         = turn++ % 2 == 1; // biases, skew, the other gatings
            const bool  alternating = turn % 4 == 1, weighs_x = turn % 4 == 2;
            const int   n_groups   = weighs_x && n % 4 == 0 && k <= n / 2 ? 4 : 1;
            const auto  activation = odd ? activations[turn / 2 % 5] : cuda::Activation::silu;
            const Stack gate(gpu, form, alternating ? 2 * n : n, ff, hidden, random),
                up(gpu, form, n, ff, hidden, random), down(gpu, form, n, hidden, ff, random);
            const auto gate_bias = normal(std::size_t(n * ff), random, 1),
                       up_bias   = normal(std::size_t(n * ff), random, 1),
                       down_bias = normal(std::size_t(n * hidden), random, 1);
            auto router          = normal(std::size_t(n * hidden), random, 0.2f);
            std::copy_n(router.begin(), hidden, router.begin() + hidden); // two experts that are always equal
            auto choice = normal(std::size_t(n), random, 0.1f);
            choice[0]   = choice[1];
            choice[std::size_t(n) - 1] += 100; // everybody's first
            const OnDevice d_router(gpu, router), d_gate_bias(gpu, gate_bias), d_up_bias(gpu, up_bias),
                d_down_bias(gpu, down_bias), d_choice(gpu, choice);

            Route op;
            op.n_used      = k;
            op.gating      = odd ? Gating(turn / 2 % 3) : Gating::softmax;
            op.normalised  = turn % 3 != 0;
            op.scale       = odd ? 2.5f : 1.0f;
            op.weight.rows = n;
            op.n_groups = n_groups, op.n_groups_used = (n_groups + 1) / 2;
            op.best_alone         = turn % 3 == 1;
            op.score_scale        = odd ? 1.0f : 0.5f;
            const auto     scales = normal(std::size_t(n), random, 1);
            const OnDevice d_scales(gpu, scales);
            for (int T : {1, 3, 17, 300}) {
                CAPTURE(n, k, hidden, ff, int(form), T, odd);
                const auto                t = std::size_t(T), pairs = t * std::size_t(k);
                const auto                x  = random_fp16(t * std::size_t(hidden), random);
                const auto                xs = floats_of(x);
                std::vector<std::int32_t> slots(t, 7);
                if (T == 17) slots[3] = slots[16] = -1;
                const OnDevice d_x(gpu, x);
                const OnDevice d_slots(gpu, slots);
                OnDevice       scores(gpu, std::vector<float>(t * std::size_t(n))),
                    routes(gpu, std::vector<float>(2 * pairs));
                OnDevice arrivals(gpu, std::vector<std::int32_t>(t + 1)), order(gpu, std::vector<std::int32_t>(pairs)),
                    tiles(gpu, std::vector<std::int32_t>(
                                   1 + 3 * std::size_t(cuda::expert_tiles(std::int64_t(pairs), n, 8))));
                OnDevice parts(gpu, std::vector<std::uint16_t>(pairs * std::size_t(hidden), fp16_nan));
                const cuda::ExpertWorkspace work{scores.data, arrivals.data, order.data, tiles.data, parts.data};
                cuda::Route                 r;
                r.x = d_x.data, r.weight = d_router.data, r.out = routes.data,
                r.choice_bias = odd ? d_choice.data : nullptr;
                r.n_experts = n, r.n_used = k, r.cols = hidden;
                r.gating = cuda::Gating(int(op.gating)), r.normalised = op.normalised, r.scale = op.scale;
                r.n_groups = op.n_groups, r.n_groups_used = op.n_groups_used, r.score_scale = op.score_scale;
                r.expert_scale = odd ? nullptr : d_scales.data;
                r.best_alone   = op.best_alone;

                std::vector<std::uint16_t> of_tiles[2]; // the gated sums, the same for any tile
                for (const auto& [tile, on_wgmma] :
                     {std::pair(0, false), std::pair(8, false), std::pair(16, false), std::pair(32, false),
                      std::pair(64, false), std::pair(64, true), std::pair(256, true)}) {
                    const int n_gates = alternating ? 2 * n : n;
                    if (tile > 0 && !(cuda::can_group(gate.weight, n_gates) && cuda::can_group(down.weight, n)))
                        continue;
                    if (tile == 64 && !on_wgmma && form != Form::f16) continue; // no step asks for it
                    CAPTURE(tile, on_wgmma);
                    OnDevice inner(gpu, std::vector<std::uint16_t>(pairs * std::size_t(ff), fp16_nan)),
                        out(gpu, std::vector<std::uint16_t>(t * std::size_t(hidden), fp16_nan));
                    cuda::ExpertGemm g, d;
                    g.x = d_x.data, g.routes = d.routes = routes.data, g.n_experts = d.n_experts = n,
                    g.n_used = d.n_used = k;
                    g.activation        = activation;
                    g.gate              = {gate.weight, odd ? d_gate_bias.data : nullptr, inner.data};
                    g.up          = {alternating ? gate.weight : up.weight, odd ? d_up_bias.data : nullptr, nullptr};
                    g.alternating = alternating, g.weighs_x = d.weighs_x = weighs_x;
                    d.x = inner.data, d.gate = {down.weight, odd ? d_down_bias.data : nullptr, out.data};
                    d.scale = odd ? 0.5f : 1.0f;
                    if (on_wgmma && !(cuda::can_group_sm90(g, gpu) && cuda::can_group_sm90(d, gpu))) continue;
                    g.on_wgmma = d.on_wgmma = on_wgmma;
                    cuda::route(r, T, d_slots.data, tile, work, gpu);
                    cuda::expert_gated(g, T, tile, work, gpu);
                    cuda::expert_combine(d, T, tile, work, gpu);

                    // The choice, given these scores.
                    auto                                   got_scores = scores.back(gpu);
                    const auto                             got_routes = routes.back(gpu);
                    std::vector<std::vector<std::int32_t>> chosen(t, std::vector<std::int32_t>(std::size_t(k), -1));
                    std::vector<std::vector<float>>        weights(t, std::vector<float>(std::size_t(k)));
                    for (std::size_t i = 0; i < t; i++) {
                        for (std::size_t e = 0; e < std::size_t(n); e += 7) {
                            double sum = 0;
                            for (std::size_t c = 0; c < std::size_t(hidden); c++)
                                sum += double(op.score_scale) * double(router[e * std::size_t(hidden) + c]) *
                                       double(xs[i * std::size_t(hidden) + c]);
                            if (std::abs(double(got_scores[i * std::size_t(n) + e]) - sum) > 1e-4 * (1 + std::abs(sum)))
                                CHECK(double(got_scores[i * std::size_t(n) + e]) == sum);
                        }
                        if (slots[i] >= 0)
                            route(op, odd ? choice.data() : nullptr, got_scores.data() + i * std::size_t(n),
                                  chosen[i].data(), weights[i].data(), odd ? nullptr : scales.data());
                        for (std::size_t s = 0; s < std::size_t(k); s++) {
                            std::int32_t e;
                            std::memcpy(&e, &got_routes[i * 2 * std::size_t(k) + s], 4);
                            const float w = got_routes[i * 2 * std::size_t(k) + std::size_t(k) + s];
                            if (e != chosen[i][s]) CHECK(e == chosen[i][s]);
                            if (std::abs(w - weights[i][s]) > 1e-5f * std::abs(weights[i][s]))
                                CHECK(w == weights[i][s]);
                        }
                    }
                    // Some sums of both GEMMs.
                    auto       got_inner = inner.back(gpu);
                    const auto got_out   = out.back(gpu);
                    if (on_wgmma) { // in the order of the tiles
                        const auto  in_order = got_inner;
                        const auto  pair_of  = order.back(gpu);
                        std::size_t n_chosen = 0;
                        for (const std::int32_t slot : slots) n_chosen += slot >= 0 ? std::size_t(k) : 0;
                        for (std::size_t i = 0; i < n_chosen; i++)
                            std::copy_n(in_order.begin() + std::ptrdiff_t(i) * ff, ff,
                                        got_inner.begin() + std::ptrdiff_t(pair_of[i]) * ff);
                    }
                    const auto          inner_of = floats_of(got_inner), out_of = floats_of(got_out);
                    std::vector<float>  a, b;
                    std::vector<double> want_a, want_b;
                    for (int i = 0; i < 200; i++) {
                        const std::size_t token = i < 40 ? std::size_t(i) % t : random() % t,
                                          slot = random() % std::size_t(k), row = random() % std::size_t(ff),
                                          col = random() % std::size_t(hidden);
                        if (slots[token] < 0) {
                            CHECK(out_of[token * std::size_t(hidden) + col] == 0);
                            continue;
                        }
                        const auto        e = std::int64_t(chosen[token][slot]), at = e * ff + std::int64_t(row);
                        const float*      x_of = xs.data() + token * std::size_t(hidden);
                        const std::size_t pair = token * std::size_t(k) + slot;
                        a.push_back(inner_of[pair * std::size_t(ff) + row]);
                        const double weight = weighs_x ? double(weights[token][slot]) : 1;
                        const double a_sum  = gate.dot(alternating ? at + std::int64_t(e) * ff : at, x_of),
                                     b_sum  = alternating ? gate.dot(at + (std::int64_t(e) + 1) * ff, x_of)
                                                          : up.dot(at, x_of);
                        want_a.push_back(activated(activation,
                                                   weight * a_sum + (odd ? double(gate_bias[std::size_t(at)]) : 0),
                                                   weight * b_sum + (odd ? double(up_bias[std::size_t(at)]) : 0)));
                        double sum = 0;
                        for (std::size_t s = 0; s < std::size_t(k); s++) {
                            const std::int64_t from = std::int64_t(chosen[token][s]) * hidden + std::int64_t(col);
                            sum += (weighs_x ? 1 : double(weights[token][s])) *
                                   (down.dot(from, inner_of.data() + (token * std::size_t(k) + s) * std::size_t(ff)) +
                                    (odd ? double(down_bias[std::size_t(from)]) : 0));
                        }
                        b.push_back(out_of[token * std::size_t(hidden) + col]);
                        want_b.push_back(sum * double(d.scale));
                    }
                    CHECK(relative_error(a, want_a) < 3e-3);
                    CHECK(relative_error(b, want_b) < 3e-3);
                    auto& first = of_tiles[std::size_t(on_wgmma)];
                    if (tile > 0 && first.empty()) first = got_inner;
                    if (tile > 0 && T != 17) CHECK(got_inner == first);
                }
            }
        }
}

TEST_CASE("GPU: rows times the sigmoid of a gate equal plain products", "[cuda]") {
    if (no_gpu()) return;
    const Gpu    gpu;
    std::mt19937 random(6);
    for (auto [rows, cols, gate_cols] : {std::tuple(1, 256, 256), std::tuple(3, 90, 33), std::tuple(70, 2048, 64)}) {
        CAPTURE(rows, cols, gate_cols);
        const auto x          = random_fp16(std::size_t(rows * cols), random),
                   gate       = random_fp16(std::size_t(rows * gate_cols), random);
        const auto     weight = normal(std::size_t(gate_cols), random, 0.3f);
        const OnDevice d_x(gpu, x), d_gate(gpu, gate);
        const OnDevice d_weight(gpu, weight);
        cuda::gate_rows(d_x.data, rows, cols, d_gate.data, gate_cols, d_weight.data, gpu);
        const auto          got = floats_of(d_x.back(gpu)), xs = floats_of(x), gates = floats_of(gate);
        std::vector<double> want(got.size());
        for (std::size_t i = 0; i < want.size(); i++) {
            double            sum = 0;
            const std::size_t row = i / std::size_t(cols);
            for (std::size_t c = 0; c < std::size_t(gate_cols); c++)
                sum += double(gates[row * std::size_t(gate_cols) + c]) * double(weight[c]);
            want[i] = double(xs[i]) / (1 + std::exp(-sum));
        }
        CHECK(relative_error(got, want) < 1e-3);
    }
}
