// The GPU's convolution and recurrence of layers that keep a state against plain sums, and their bits in any cut of a prompt. Without a GPU
// these tests print that and pass.
#include <catch2/catch_test_macros.hpp>

#include "../cuda/kernels.h"

import quire.core.std;

#include "cuda_tools.h"
#include "plain_recurrence.h"

using namespace quire;
using namespace quire::testing;

namespace {

// States of some sequences in blocks that lie in disorder; two units for each sequence.
struct UnitsOnDevice {
    UnitsOnDevice(const Gpu& gpu, int n_sequences, std::int64_t floats, std::int64_t block_floats)
        : n(n_sequences), unit(int((64 + floats + block_floats - 1) / block_floats)), size(floats), block(block_floats),
          memory(gpu, std::vector<float>(std::size_t(2 * n * unit) * std::size_t(block), 1e9f)) {}

    std::int32_t block_of(int sequence, int which, int b) const {
        return (unit - 1 - b) * 2 * n + sequence * 2 + which;
    }
    std::size_t place(int sequence, int which, std::int64_t i) const {
        const std::int64_t at = 64 + i; // the layer's offset
        return std::size_t(block_of(sequence, which, int(at / block)) * block + at % block);
    }
    // Runs `launch` with the states `from` (-1: zeros) and `to` of all sequences, whose tokens begin at `starts`.
    template <class Launch>
    void run(const Gpu& gpu, const std::vector<std::int32_t>& starts, const std::vector<int>& from, int to,
             const Launch& launch) const {
        std::vector<std::int32_t> before, after;
        for (int s = 0; s < n; s++)
            for (int b = 0; b < unit; b++) {
                before.push_back(from[std::size_t(s)] < 0 ? -1 : block_of(s, from[std::size_t(s)], b));
                after.push_back(block_of(s, to, b));
            }
        const OnDevice<std::int32_t> begin(gpu, starts), reads(gpu, before), writes(gpu, after);
        cuda::States                 states;
        states.memory = memory.data, states.block_floats = block, states.offset = 64, states.unit = unit;
        states.token_start = begin.data, states.from = reads.data, states.to = writes.data;
        states.n_sequences = n;
        for (std::size_t s = 0; s + 1 < starts.size(); s++)
            states.most_tokens = std::max(states.most_tokens, starts[s + 1] - starts[s]);
        launch(states);
        cuda::synchronize(gpu);
    }
    std::vector<float> state(const Gpu& gpu, int sequence, int which) const {
        const std::vector<float> all = memory.back(gpu);
        std::vector<float>       out;
        for (std::int64_t i = 0; i < size; i++) out.push_back(all[place(sequence, which, i)]);
        return out;
    }

    int             n, unit;
    std::int64_t    size, block;
    OnDevice<float> memory;
};

std::vector<float> noise(std::size_t n, std::mt19937& random, float scale = 1) {
    return floats_of(random_fp16(n, random, scale));
}

} // namespace

TEST_CASE("GPU: a causal convolution equals plain sums, however its tokens are cut", "[cuda]") {
    if (no_gpu()) return;
    const Gpu    gpu;
    std::mt19937 random(31);
    for (auto [taps, columns, gated] :
         {std::tuple(3, 1000, true), std::tuple(4, 192, false), std::tuple(2, 5, true), std::tuple(16, 130, false)})
        for (std::int64_t block : {64, 4096}) {
            CAPTURE(taps, columns, gated, block);
            constexpr int n = 150; // of two sequences: 100 and 50 tokens
            const auto    x = random_fp16(std::size_t(n * columns), random), factor = random_fp16(x.size(), random),
                       gate   = random_fp16(x.size(), random);
            const auto weight = noise(std::size_t(columns * taps), random), bias = noise(std::size_t(columns), random);
            const std::vector<float> xs = floats_of(x), factors = floats_of(factor), gates = floats_of(gate);
            std::vector<double>      want;
            for (int t = 0; t < n; t++)
                for (int c = 0; c < columns; c++) {
                    double sum = double(bias[std::size_t(c)]);
                    for (int j = 0; j < taps; j++)
                        if (const int row = t - taps + 1 + j; row >= (t < 100 ? 0 : 100)) {
                            const auto at = std::size_t(row * columns + c);
                            sum += double(weight[std::size_t(c * taps + j)]) * double(xs[at]) *
                                   (gated ? double(factors[at]) : 1);
                        }
                    want.push_back(gated ? sum * double(gates[std::size_t(t * columns + c)])
                                         : sum / (1 + std::exp(-sum)));
                }
            const OnDevice<std::uint16_t> there(gpu, x), by(gpu, factor), times(gpu, gate);
            const OnDevice<float>         w(gpu, weight), b(gpu, bias);
            std::vector<float>            first;
            // Steps: how many tokens each sequence has run before, and after.
            const std::vector<std::vector<std::pair<int, int>>> cuts{
                {{0, 0}, {100, 50}}, {{0, 0}, {1, 1}, {2, 3}, {40, 3}, {100, 50}}, {{0, 0}, {99, 2}, {100, 50}}};
            for (const auto& cut : cuts) {
                const UnitsOnDevice        units(gpu, 2, std::int64_t(taps - 1) * columns, block);
                std::vector<std::uint16_t> all(x.size());
                for (std::size_t i = 0; i + 1 < cut.size(); i++) {
                    const auto [a0, b0] = cut[i];
                    const auto [a1, b1] = cut[i + 1];
                    // The step's rows: those of the first sequence, then those of the second.
                    const auto rows = [&](const std::vector<std::uint16_t>& of) {
                        std::vector<std::uint16_t> out(of.begin() + a0 * columns, of.begin() + a1 * columns);
                        out.insert(out.end(), of.begin() + (100 + b0) * columns, of.begin() + (100 + b1) * columns);
                        return out;
                    };
                    const OnDevice<std::uint16_t> in(gpu, rows(x)), f(gpu, rows(factor)), g(gpu, rows(gate)),
                        out(gpu, std::vector<std::uint16_t>(rows(x).size(), fp16_nan));
                    cuda::CausalConv op;
                    op.x = in.data, op.factor = gated ? f.data : nullptr, op.gate = gated ? g.data : nullptr;
                    op.out = out.data, op.weight = w.data, op.bias = b.data, op.taps = taps, op.columns = columns;
                    const int to   = i % 2 == 0 ? 0 : 1; // the same unit, or the other one
                    const int from = i % 2 == 0 && i > 0 ? 1 : 0;
                    units.run(gpu, {0, a1 - a0, a1 - a0 + b1 - b0},
                              {a0 == 0 ? -1 : from, b0 == 0 && i == 0 ? -1 : from}, to,
                              [&](const cuda::States& states) { cuda::causal_conv(op, states, gpu); });
                    const auto got = out.back(gpu);
                    std::copy_n(got.begin(), (a1 - a0) * columns, all.begin() + a0 * columns);
                    std::copy_n(got.begin() + (a1 - a0) * columns, (b1 - b0) * columns,
                                all.begin() + (100 + b0) * columns);
                    // A sequence without tokens keeps its state where it is; the test moves it along.
                    if (a1 == a0 || b1 == b0) {
                        std::vector<float> memory = units.memory.back(gpu);
                        const int          idle   = a1 == a0 ? 0 : 1;
                        for (std::int64_t k = 0; k < units.size; k++)
                            memory[units.place(idle, to, k)] = memory[units.place(idle, from, k)];
                        cuda::upload(units.memory.data, memory.data(), memory.size() * sizeof(float), gpu);
                    }
                }
                CHECK(relative_error(floats_of(all), want) < 2e-3);
                if (first.empty()) first = floats_of(all);
                CHECK(floats_of(all) == first);
            }
        }
}

TEST_CASE("GPU: the delta rule and the selective scan equal plain sums, however their tokens are cut", "[cuda]") {
    if (no_gpu()) return;
    const Gpu    gpu;
    std::mt19937 random(32);
    for (const PlainRecurrence& r :
         {PlainRecurrence{4, 2, 128, 128, true, false}, PlainRecurrence{4, 2, 32, 32, true, true},
          PlainRecurrence{6, 3, 16, 80, false, true}, PlainRecurrence{2, 1, 256, 24, false, true},
          PlainRecurrence{3, 1, 100, 33, true, false}})
        for (std::int64_t block : {64, 1 << 16}) {
            CAPTURE(r.n_heads, r.n_groups, r.key_dim, r.value_dim, r.delta, r.grouped, block);
            constexpr int n = 70;
            const int     H = r.n_heads, per = H / r.n_groups, columns = r.columns();
            const auto    x    = random_fp16(std::size_t(n * columns), random, r.delta ? 1.0f : 0.3f);
            const auto    step = noise(std::size_t(n * H), random), write = noise(std::size_t(n * H), random),
                       step_bias = noise(std::size_t(H), random), skip = noise(std::size_t(H), random);
            std::vector<float> decay = noise(std::size_t(H), random);
            for (float& a : decay) a = -std::exp(a);
            std::vector<double> S(std::size_t(H * r.key_dim * r.value_dim));
            const auto          want = r.run(n, floats_of(x), step, write, step_bias, decay, skip, S);
            // As the operation has them: with the delta rule and groups, both in one row.
            std::vector<float> both;
            for (int t = 0; t < n && r.delta && r.grouped; t++)
                for (int g = 0; g < r.n_groups; g++)
                    for (const auto* of : {&write, &step})
                        both.insert(both.end(), of->begin() + t * H + g * per, of->begin() + t * H + (g + 1) * per);
            const std::vector<float>& steps        = both.empty() ? step : both;
            const int                 step_columns = int(steps.size()) / n;
            const OnDevice<float>     bias(gpu, step_bias), a(gpu, decay), s(gpu, skip), w(gpu, write), st(gpu, steps);
            const OnDevice<std::uint16_t> rows(gpu, x);
            std::vector<float>            first;
            for (const std::vector<int>& cut :
                 {std::vector{0, n}, std::vector{0, 1, 2, 19, n}, std::vector{0, 33, n}}) {
                const UnitsOnDevice   units(gpu, 1, 128 + std::int64_t(S.size()), block);
                const OnDevice<float> out(gpu,
                                          std::vector<float>(want.size(), std::numeric_limits<float>::quiet_NaN()));
                for (std::size_t i = 0; i + 1 < cut.size(); i++) {
                    const int        t = cut[i];
                    cuda::Recurrence op;
                    op.x = rows.data + t * columns, op.step = st.data + t * step_columns;
                    op.write = r.delta && !r.grouped ? w.data + t * H : nullptr;
                    op.out = out.data + t * H * r.value_dim, op.step_bias = bias.data, op.decay = a.data;
                    op.skip = r.delta ? nullptr : s.data, op.n_heads = H, op.n_groups = r.n_groups;
                    op.key_dim = r.key_dim, op.value_dim = r.value_dim, op.state_at = 128, op.delta = r.delta;
                    op.grouped = r.grouped;
                    units.run(gpu, {0, cut[i + 1] - t}, {t == 0 ? -1 : int(i - 1) % 2}, int(i) % 2,
                              [&](const cuda::States& states) { cuda::recurrence(op, states, gpu); });
                }
                const auto got = out.back(gpu);
                CHECK(relative_error(got, want) < 1e-3);
                std::vector<float> state = units.state(gpu, 0, int(cut.size()) % 2);
                state.erase(state.begin(), state.begin() + 128);
                CHECK(relative_error(state, S) < 1e-3);
                if (first.empty()) first = got;
                CHECK(got == first);
            }
        }
}

TEST_CASE("GPU: recurrences in chunks equal plain sums, for long and short sequences in one step", "[cuda]") {
    if (no_gpu()) return;
    const Gpu    gpu;
    std::mt19937 random(33);
    for (const PlainRecurrence& r :
         {PlainRecurrence{4, 2, 128, 128, true, false}, PlainRecurrence{4, 2, 64, 64, true, true},
          PlainRecurrence{6, 3, 16, 80, false, true}, PlainRecurrence{4, 1, 128, 64, false, true},
          PlainRecurrence{3, 1, 100, 33, true, false}, PlainRecurrence{2, 1, 256, 24, false, true}})
        for (const bool large :
             {false, true}) { // keys and queries whose products are beyond fp16; some steps that forget all
            CAPTURE(r.n_heads, r.n_groups, r.key_dim, r.value_dim, r.delta, r.grouped, large);
            // The tokens of the sequences, and how many of them run in a first step.
            const std::vector<std::pair<int, int>> sequences{{1, 0},  {64, 0},    {40, 31}, {300, 100},
                                                             {33, 1}, {129, 128}, {95, 32}};
            const int                              H = r.n_heads, per = H / r.n_groups, columns = r.columns();
            const std::int64_t                     size = std::int64_t(H) * r.key_dim * r.value_dim;
            const auto         bias = noise(std::size_t(H), random), skip = noise(std::size_t(H), random);
            std::vector<float> decay = noise(std::size_t(H), random);
            for (float& a : decay) a = -std::exp(a - 2);
            const OnDevice<float> biases(gpu, bias), decays(gpu, decay), skips(gpu, skip);
            const std::size_t     bytes = cuda::recurrence_chunks_bytes(H, r.n_groups, r.key_dim, 1024);
            CHECK((bytes > 0) == (r.key_dim <= cuda::max_chunked_keys));
            const OnDevice<std::uint16_t>           room(gpu, std::vector<std::uint16_t>(bytes / 2 + 1, fp16_nan));
            std::vector<std::vector<std::uint16_t>> x;
            std::vector<std::vector<float>>         step, write;
            std::vector<std::vector<double>>        want, S;
            for (auto [n, first] : sequences) {
                x.push_back(random_fp16(std::size_t(n * columns), random, r.delta ? 1.0f : large ? 100.0f : 0.3f));
                step.push_back(noise(std::size_t(n * H), random)), write.push_back(noise(std::size_t(n * H), random));
                for (std::size_t i = 0; large && r.delta && i < step.back().size(); i += 7) step.back()[i] = 1e5f;
                S.emplace_back(std::size_t(size));
                want.push_back(r.run(n, floats_of(x.back()), step.back(), write.back(), bias, decay, skip, S.back()));
            }
            const UnitsOnDevice             units(gpu, int(sequences.size()), 128 + size, 1 << 16);
            std::vector<std::vector<float>> got(sequences.size());
            for (int pass = 0; pass < 2; pass++) {
                std::vector<std::uint16_t> rows;
                std::vector<float>         steps, writes;
                std::vector<std::int32_t>  starts{0};
                std::vector<int>           from;
                for (std::size_t s = 0; s < sequences.size(); s++) {
                    const auto [n, first] = sequences[s];
                    const int begin = pass == 0 ? 0 : first, end = pass == 0 ? first : n;
                    starts.push_back(starts.back() + end - begin);
                    from.push_back(begin == 0 ? -1 : 0);
                    rows.insert(rows.end(), x[s].begin() + begin * columns, x[s].begin() + end * columns);
                    for (int t = begin; t < end; t++) {
                        if (r.delta && r.grouped)
                            for (int g = 0; g < r.n_groups; g++)
                                for (const auto* of : {&write[s], &step[s]})
                                    steps.insert(steps.end(), of->begin() + t * H + g * per,
                                                 of->begin() + t * H + (g + 1) * per);
                        else steps.insert(steps.end(), step[s].begin() + t * H, step[s].begin() + (t + 1) * H);
                        writes.insert(writes.end(), write[s].begin() + t * H, write[s].begin() + (t + 1) * H);
                    }
                }
                const auto                    n_out = std::size_t(starts.back() * H * r.value_dim);
                const OnDevice<std::uint16_t> in(gpu, rows);
                const OnDevice<float>         st(gpu, steps), w(gpu, writes),
                    out(gpu, std::vector<float>(n_out, std::numeric_limits<float>::quiet_NaN()));
                cuda::Recurrence op;
                op.x = in.data, op.step = st.data, op.write = r.delta && !r.grouped ? w.data : nullptr;
                op.out = out.data, op.step_bias = biases.data, op.decay = decays.data;
                op.skip = r.delta ? nullptr : skips.data, op.n_heads = H, op.n_groups = r.n_groups;
                op.key_dim = r.key_dim, op.value_dim = r.value_dim, op.state_at = 128, op.delta = r.delta;
                op.grouped = r.grouped, op.chunks = bytes > 0 ? room.data : nullptr;
                units.run(gpu, starts, from, 0, [&](const cuda::States& states) { cuda::recurrence(op, states, gpu); });
                const auto all = out.back(gpu);
                for (std::size_t s = 0; s < sequences.size(); s++)
                    got[s].insert(got[s].end(), all.begin() + starts[s] * H * r.value_dim,
                                  all.begin() + starts[s + 1] * H * r.value_dim);
            }
            for (std::size_t s = 0; s < sequences.size(); s++) {
                CAPTURE(s);
                CHECK(relative_error(got[s], want[s]) < 2e-3);
                std::vector<float> state = units.state(gpu, int(s), 0);
                state.erase(state.begin(), state.begin() + 128);
                CHECK(relative_error(state, S[s]) < 2e-3);
            }
        }
}
