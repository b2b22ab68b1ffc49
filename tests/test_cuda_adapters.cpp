// LoRA adapters on a GPU: the kernels against plain sums, and the engine against `peft` and against itself in other batches. Without a GPU
// these tests print that and pass.
#include <catch2/catch_test_macros.hpp>

#include <nlohmann/json.hpp>

#include "../cuda/adapters.h"
#include "reference.h"

import quire.core.base;
import quire.core.std;
import quire.engine.engine;
import quire.schedule.request;

#include "cuda_tools.h"
#include "engine_tools.h"
#include "npy.h"

using namespace quire;
using namespace quire::testing;

namespace {

std::vector<float> normal(std::size_t n, std::mt19937& random, float scale) {
    return floats_of(random_fp16(n, random, scale));
}

struct Shape {
    int              in, cols;
    std::vector<int> ranks; // of the adapters
    bool             is_float, embedding;
};

} // namespace

TEST_CASE("GPU: adapters add the plain sums to the rows that run with them, with the same bits in any batch",
          "[cuda]") {
    if (no_gpu()) return;
    const Gpu    gpu;
    std::mt19937 random(45);
    for (const Shape& shape : {Shape{5, 3, {1}, true, false}, Shape{64, 257, {8, 70}, false, false},
                               Shape{130, 1000, {3, 16, 64}, true, false}, Shape{4096, 512, {16}, false, false},
                               Shape{50, 320, {4, 9}, true, true}})
        for (int rows : {1, 7, 8, 33}) {
            CAPTURE(shape.in, shape.cols, rows, shape.embedding);
            const auto n = shape.ranks.size(), R = std::size_t(rows), in = std::size_t(shape.in),
                       cols                  = std::size_t(shape.cols);
            const auto                x      = random_fp16(R * in, random);
            const auto                before = normal(R * cols, random, 1);
            std::vector<std::int32_t> tokens, sequences;
            for (int t = 0; t < rows; t++)
                tokens.push_back(std::int32_t(random() % in)), sequences.push_back(std::int32_t(random() % 4));
            std::vector<float> factors; // of 4 sequences, the last of which runs without
            for (std::size_t i = 0; i < 4 * n; i++)
                factors.push_back(i < 3 * n && random() % 3 ? float(random() % 7) / 4 - 0.5f : 0.0f);
            std::vector<std::vector<float>> as, bs;
            for (int rank : shape.ranks) {
                as.push_back(normal(in * std::size_t(rank), random, 0.2f));
                bs.push_back(normal(cols * std::size_t(rank), random, 0.2f));
            }
            std::vector<double> want(before.begin(), before.end());
            for (std::size_t t = 0; t < R; t++)
                for (std::size_t p = 0; p < n; p++) {
                    const auto rank = std::size_t(shape.ranks[p]);
                    for (std::size_t r = 0; r < rank; r++) {
                        double low = 0;
                        for (std::size_t k = 0; k < in && !shape.embedding; k++)
                            low += double(f16_to_f32(x[t * in + k])) * double(as[p][r * in + k]);
                        if (shape.embedding) low = double(as[p][std::size_t(tokens[t]) * rank + r]);
                        for (std::size_t c = 0; c < cols; c++)
                            want[t * cols + c] += double(factors[std::size_t(sequences[t]) * n + p]) * 0.5 *
                                                  double(p + 1) * low * double(bs[p][c * rank + r]);
                    }
                }

            std::deque<OnDevice<float>> matrices;
            std::vector<cuda::LoraPair> pairs;
            int                         ranks = 0;
            for (std::size_t p = 0; p < n; p++) {
                const float* const a = matrices.emplace_back(gpu, as[p]).data;
                const float* const b = matrices.emplace_back(gpu, bs[p]).data;
                pairs.push_back({a, b, shape.ranks[p], int(p), 0.5f * float(p + 1), ranks});
                ranks += shape.ranks[p];
            }
            const OnDevice<cuda::LoraPair> pairs_there(gpu, pairs);
            const OnDevice<float>          factors_there(gpu, factors);
            // Rows first .. first + count of the step, by themselves.
            const auto add = [&](int first, int count) {
                const auto                    at = std::size_t(first), some = std::size_t(count);
                const OnDevice<std::uint16_t> rows_there(gpu, {x.begin() + std::ptrdiff_t(at * in), x.end()});
                const OnDevice<std::int32_t>  ids(gpu, {tokens.begin() + first, tokens.end()}),
                    of(gpu, {sequences.begin() + first, sequences.end()});
                const OnDevice<float>      low(gpu, std::vector<float>(some * std::size_t(ranks), std::nanf("")));
                std::vector<float>         values(before.begin() + std::ptrdiff_t(at * cols),
                                                  before.begin() + std::ptrdiff_t((at + some) * cols));
                std::vector<std::uint16_t> halves;
                for (float v : values) halves.push_back(f32_to_f16(v));
                const OnDevice<float>         out(gpu, values);
                const OnDevice<std::uint16_t> half_out(gpu, halves);
                cuda::LoraAdd                 op;
                op.pairs = pairs_there.data, op.n_pairs = int(n), op.ranks = ranks;
                op.x      = shape.embedding ? nullptr : rows_there.data;
                op.tokens = ids.data, op.in = shape.in, op.cols = shape.cols, op.low = low.data;
                op.out          = shape.is_float ? static_cast<void*>(out.data) : half_out.data;
                op.out_is_float = shape.is_float;
                cuda::lora_add(op, {factors_there.data, of.data, int(n)}, count, gpu);
                return shape.is_float ? out.back(gpu) : floats_of(half_out.back(gpu));
            };
            const std::vector<float> got = add(0, rows);
            CHECK(relative_error(got, want) < (shape.is_float ? 1e-5 : 1e-3));
            for (std::size_t t = 0; t < R; t++)
                if (sequences[t] == 3)
                    CHECK(std::equal(got.begin() + std::ptrdiff_t(t * cols),
                                     got.begin() + std::ptrdiff_t((t + 1) * cols),
                                     before.begin() + std::ptrdiff_t(t * cols)));
            for (int t = 0; t < rows; t += 3) {
                const std::vector<float> alone = add(t, 1);
                CHECK(std::equal(alone.begin(), alone.end(), got.begin() + std::ptrdiff_t(std::size_t(t) * cols)));
            }
        }
}

TEST_CASE("GPU: models with adapters have peft's logits, and with --deterministic the same bits in any batch",
          "[cuda]") {
    if (no_gpu()) return;
    // As in tests/adapters/make.py.
    const std::vector<std::vector<AdapterUse>> uses{{{0, 1}}, {{1, 1}}, {{0, 1}, {1, 0.5f}}, {{0, -0.75f}}};
    for (const char* file : {"llama3-gqa-F16", "gpt2-F32"})
        for (bool deterministic : {false, true}) {
            const std::string model = std::string(file).substr(0, std::string_view(file).rfind('-'));
            EngineOptions     o;
            o.device        = "cuda";
            o.deterministic = deterministic;
            o.kv_blocks     = 512;
            o.max_sequences = 32;
            for (const char* name : {"one", "two"})
                o.adapters.push_back({reference(cat("adapters/", model, ".", name, ".gguf")), name, 1, false});
            const std::string path    = reference(cat("models/", file, ".gguf"));
            const auto        prompts = [&] {
                std::ifstream in(reference("adapters/" + model + ".json"));
                return nlohmann::json::parse(in)["prompts"].get<std::vector<std::vector<Token>>>();
            }();
            // Each prompt with each set of adapters, and without any.
            std::vector<Request> requests;
            for (int n : {1, 12})
                for (std::size_t u = 0; u <= uses.size(); u++)
                    for (const auto& prompt : prompts) {
                        Request r  = greedy(prompt, n);
                        r.adapters = u < uses.size() ? uses[u] : std::vector<AdapterUse>{};
                        requests.push_back(std::move(r));
                    }
            Engine                    engine  = load(path, o);
            const std::vector<Answer> answers = run(engine, requests);
            const std::vector<float>  wanted  = read_npy(reference(cat("adapters/", model, ".npy")));
            const std::size_t         vocab   = answers[0].prompt_logits.size();
            for (std::size_t i = 0; i < uses.size() * prompts.size(); i++) {
                CAPTURE(file, deterministic, i / prompts.size(), i % prompts.size());
                const std::vector<double> want(wanted.begin() + std::ptrdiff_t(i * vocab),
                                               wanted.begin() + std::ptrdiff_t((i + 1) * vocab));
                CHECK(relative_error(answers[i].prompt_logits, want) < 0.01);
            }
            CHECK(answers[0].prompt_logits != answers[uses.size() * prompts.size()].prompt_logits);
            if (!deterministic) continue;
            for (std::size_t i = 0; i < requests.size(); i += 3) {
                Engine alone = load(path, o);
                CAPTURE(file, i);
                CHECK(identical(run(alone, {requests[i]})[0], answers[i]));
            }
        }
}
