// The program of operations that a model becomes, and the fusion pass that groups them into kernels.
#include <catch2/catch_test_macros.hpp>

#include <unistd.h>
#include <filesystem>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "../cuda/kernels.h"
#include "process.h"
#include "reference.h"

import quire.compute.cuda.fusion;
import quire.compute.model;
import quire.compute.program;
import quire.core.base;
import quire.core.std;
import quire.core.tensor;
import quire.engine.engine;
import quire.model_file.config;
import quire.model_file.family;
import quire.model_file.gguf;
import quire.model_file.weights;
import quire.paging.block;
import quire.schedule.request;
import quire.step.plan;
import quire.tools.bench.random_model;

#include "engine_tools.h"

using namespace quire;
using namespace quire::testing;

namespace {

struct Loaded {
    Gguf         file;
    ModelConfig  config;
    ModelTensors tensors;
};

std::optional<Loaded> load_tensors(const std::string& path) {
    Result<Gguf> file = Gguf::open(path);
    if (!file) return {};
    Result<ModelConfig> config = read_config(*file);
    if (!config) return {};
    Result<ModelTensors> tensors = bind_tensors(*file, *config);
    if (!tensors) return {};
    return Loaded{std::move(*file), std::move(*config), std::move(*tensors)};
}

std::string kinds(const Program& p, std::size_t first, std::size_t last) {
    std::string text;
    for (std::size_t i = first; i < last; i++) text += cat(text.empty() ? "" : " ", kind_of(p.operations[i]));
    return text;
}

LoweredOperation lowered(cuda::Operation::Kind kind, bool fusible) {
    LoweredOperation to;
    to.device.kind = kind;
    to.fusible     = fusible;
    return to;
}

} // namespace

TEST_CASE("a program reads nothing that it has not written, and its shapes fit, for every reference model",
          "[program]") {
    int n = 0;
    for (const auto& entry : std::filesystem::directory_iterator(reference("models"))) {
        const std::optional<Loaded> model = load_tensors(entry.path().string());
        if (!model) continue; // of a family that quire does not run
        CAPTURE(entry.path().string());
        n++;
        const Program     p = build_program(model->config, model->tensors, 512);
        std::set<ValueId> written;
        for (const Operation& operation : p.operations) {
            CAPTURE(describe(p, operation));
            const ValueAccess access = access_of(operation);
            for (ValueId id : access.reads) CHECK(written.contains(id));
            written.insert(access.writes.begin(), access.writes.end());
            if (const auto* gemm = std::get_if<Gemm>(&operation))
                for (const Projection& to : gemm->projections) {
                    CHECK(to.weight.cols == p[gemm->x].cols);
                    CHECK(to.weight.rows == p[to.out].cols);
                    CHECK(p[to.out].logit_rows == p[gemm->x].logit_rows);
                }
            if (const auto* norm = std::get_if<Norm>(&operation)) CHECK(p[norm->x].cols % norm->group == 0);
        }
        CHECK(p.layers.size() == std::size_t(model->config.n_layers));
        // The last sum waits for the head, unless the file scales it.
        CHECK(std::holds_alternative<Add>(p.operations[p.head]) == (model->tensors.layers.back().output_scale == 1));
        CHECK(std::holds_alternative<Argmax>(p.operations.back()));
        const std::string_view family = model->config.family->name;
        const bool             gpt2 = family == "gpt2", qk = family == "qwen3";
        if (!gpt2 && !qk && family != "llama" && family != "qwen2") continue; // others differ in more
        if (model->config.experts.n > 0) continue;
        CHECK(kinds(p, p.layers[0], p.layers.size() > 1 ? p.layers[1] : p.head) ==
              cat("norm gemm ", qk ? "norm norm " : "", "rope_and_store attention gemm norm ",
                  gpt2 ? "gemm activate gemm" : "gated_gemm gemm"));
    }
    CHECK(n >= 4);
}

TEST_CASE("the fusion pass keeps the order, groups what a kernel matches, and leaves the rest alone", "[program]") {
    using Kind = cuda::Operation;
    const std::vector<LoweredOperation> ops{lowered(Kind::embed, false),     lowered(Kind::norm, true),
                                            lowered(Kind::gemm, true),       lowered(Kind::rope_and_store, true),
                                            lowered(Kind::attention, false), lowered(Kind::gemm, true),
                                            lowered(Kind::norm, true),       lowered(Kind::gated_gemm, true),
                                            lowered(Kind::gemm, true),       lowered(Kind::add, false)};
    const auto                          text = [&](const std::vector<FusionGroup>& groups) {
        std::string out;
        int         next = 0;
        for (const FusionGroup& g : groups) {
            CHECK(g.first == next);
            next += g.n;
            out += cat(out.empty() ? "" : " ", g.kernel != FusedKernel::none ? "*" : "", g.n);
        }
        CHECK(next == int(ops.size()));
        return out;
    };
    // All of a run but the norm that it begins with.
    CHECK(text(fuse(ops, FusedKernel::layer_kernel,
                    [](std::span<const cuda::Operation> some) { return int(some.size()); })) == "1 1 *2 1 *4 1");
    CHECK(text(fuse(ops, FusedKernel::layer_kernel, [](auto) { return 0; })) == "1 1 1 1 1 1 1 1 1 1");
    // The first three of a run; what is left runs alone.
    CHECK(text(fuse(ops, FusedKernel::layer_kernel, [](std::span<const cuda::Operation> some) {
              return some.size() > 3 ? 3 : 0;
          })) == "1 1 1 1 1 *3 1 1");
    // Each GEMM, with what follows where it matches.
    CHECK(text(fuse(ops, FusedKernel::prefill_gemm, [](std::span<const cuda::Operation> some) {
              if (some[0].kind == Kind::gated_gemm) return 1;
              if (some[0].kind != Kind::gemm) return 0;
              return some.size() > 1 && some[1].kind == Kind::rope_and_store ? 2 : 1;
          })) == "1 1 *2 1 *1 1 *1 *1 1");
}

TEST_CASE("biases go to the operation that alone reads a GEMM's results", "[program]") {
    const auto groups_of = [](const std::string& path) {
        const std::optional<Loaded> model = load_tensors(reference("models/" + path));
        REQUIRE(model);
        const Program                 p = build_program(model->config, model->tensors, 512);
        std::vector<LoweredOperation> ops(p.operations.size());
        std::vector<FusionGroup>      groups;
        for (std::size_t i = 0; i < ops.size(); i++) {
            groups.push_back({FusedKernel::none, int(i)});
            const auto* store = std::get_if<RopeAndStore>(&p.operations[i]);
            if (store == nullptr) continue;
            cuda::RopeStore& to = ops[i].device.rope;
            to.n_pairs          = int(store->rope.inv_freq.size());
            to.head_dim = to.q_dim = store->q_dim;
            to.cache_v             = reinterpret_cast<cuda::Half*>(&ops); // not latent
        }
        pass_biases_on(groups, p, ops);
        std::string text;
        for (const FusionGroup& g : groups) {
            if (g.first < int(p.layers[0]) || g.first >= int(p.layers[1])) continue;
            const std::string all = kinds(p, std::size_t(g.first), std::size_t(g.first + g.n));
            text += cat(text.empty() ? "" : " ", g.kernel == FusedKernel::bias_in_next ? cat("(", all, ")") : all);
        }
        return text;
    };
    // Its last GEMM's bias goes to the first norm of the next layer.
    CHECK(groups_of("gpt2-F32.gguf") == "norm (gemm rope_and_store) attention (gemm norm) (gemm activate) (gemm norm)");
    // RoPE's kernel adds no biases, and the other GEMMs have none.
    CHECK(groups_of("qwen2-Q4_0.gguf") == "norm gemm rope_and_store attention gemm norm gated_gemm gemm");
}

TEST_CASE("GEMVs of one input are joined, and norms with what stands before and after them", "[program]") {
    const auto groups_of = [](const std::string& path, std::size_t layer) {
        const std::optional<Loaded> model = load_tensors(reference("models/" + path));
        REQUIRE(model);
        const Program                 p = build_program(model->config, model->tensors, 512);
        std::vector<LoweredOperation> ops(p.operations.size());
        std::vector<FusionGroup>      groups;
        for (std::size_t i = 0; i < ops.size(); i++) groups.push_back({FusedKernel::none, int(i)});
        join_beside_norms(groups, p);
        join_gemvs(groups, p, ops);
        std::string text;
        int         next = 0;
        for (const FusionGroup& g : groups) {
            CHECK(g.first == next);
            next += g.n;
            CHECK((std::size_t(g.first + g.n) <= p.head || std::size_t(g.first) >= p.head));
            if (g.first < int(p.layers[layer]) || g.first >= int(p.layers[layer + 1])) continue;
            const std::string all = kinds(p, std::size_t(g.first), std::size_t(g.first + g.n));
            text += cat(text.empty() ? "" : " ", g.n > 1 ? cat("(", all, ")") : all);
        }
        CHECK(next == int(ops.size()));
        return text;
    };
    CHECK(groups_of("qwen35-k-Q4_K_M.gguf", 0) ==
          "norm (gemm gemm) causal_conv recurrence (norm gate) gemm norm gated_gemm gemm");
    CHECK(groups_of("gemma2-Q8_0.gguf", 1) ==
          "gemm rope_and_store attention gemm (norm norm) gated_gemm gemm (norm norm)");
    CHECK(groups_of("deepseek2-Q8_0.gguf", 1) ==
          "norm gemm norm rope_and_store head_gemm attention head_gemm gemm norm "
          "route expert_gated expert_combine gated_gemm gemm (add norm)");
    CHECK(groups_of("qwen2-Q4_0.gguf", 0) == "norm gemm rope_and_store attention gemm norm gated_gemm gemm");
}

TEST_CASE("the CPU says that it runs the program operation by operation", "[program]") {
    Engine            engine = load(reference("models/qwen2-Q4_0.gguf"), {});
    const std::string text   = engine.explain();
    CAPTURE(text);
    CHECK(text.starts_with("every step, operation by operation:\n"));
    for (const char* line :
         {"embed          tokens → x", "norm           x += delta → h  (RMSNorm)", "gemm           h → q, k, v",
          "rope_and_store q, k, v → KV cache  (RoPE of 32, NeoX pairs)", "attention      q, KV cache → attended",
          "gated_gemm     h → gate  (silu", "argmax         logits → tokens", "-- layer 0", "-- head"})
        CHECK(text.contains(line));
}

// Logits and tokens of the same requests with fused kernels and with a plain kernel for each operation.
static void compare_fused(const std::string& path, bool has_all) {
    EngineOptions o;
    o.device           = "cuda";
    o.kv_blocks        = 512;
    o.max_batch_tokens = 2048;
    o.max_sequences    = 12;
    Engine fused       = load(path, o);
    o.fusion           = false;
    Engine plain       = load(path, o);
    if (has_all)
        for (const char* kernel : {"decode megakernel", "layer kernel", "prefill GEMM"}) {
            CAPTURE(kernel, fused.explain());
            CHECK(fused.explain().contains(kernel));
            CHECK(!plain.explain().contains(kernel));
        }
    std::mt19937 random(6);
    const int    longest = std::min(1700, fused.options().context - 20);
    const auto   prompt  = [&](int n) {
        std::vector<Token> tokens;
        for (int i = 0; i < n; i++) tokens.push_back(int(random() % unsigned(fused.config().vocab_size)));
        return tokens;
    };
    // One sequence alone; twelve that decode together; a prompt that fills a step.
    std::vector<std::vector<Request>> batches(3);
    batches[0] = {greedy(prompt(std::min(20, longest)), 8)};
    for (int i = 0; i < 12; i++) batches[1].push_back(greedy(prompt(1 + i % 5), 8));
    batches[2] = {greedy(prompt(longest), 4)};
    // With experts rounding to fp16 can turn the choice between two whose scores are almost equal.
    int may_turn = fused.config().experts.n > 0 ? 2 : 0;
    for (const std::vector<Request>& batch : batches) {
        const auto want = run(plain, batch), got = run(fused, batch);
        for (std::size_t i = 0; i < batch.size(); i++) {
            CAPTURE(batch.size(), i);
            double squares = 0;
            for (std::size_t t = 0; t < want[i].prompt_logits.size(); t++)
                squares += std::pow(double(got[i].prompt_logits[t]) - double(want[i].prompt_logits[t]), 2);
            const double miss = std::sqrt(squares / double(want[i].prompt_logits.size()));
            if (miss >= 0.03 && may_turn-- > 0) continue;
            CHECK(miss < 0.03);
            for (std::size_t k = 0; k < want[i].tokens.size(); k++) {
                const auto& top = want[i].logprobs[k].top;
                if (want[i].tokens[k] != got[i].tokens[k]) { // only where the choice is close
                    CHECK(top[0].logprob - top[1].logprob < 0.1f);
                    break;
                }
                const float off = std::abs(got[i].logprobs[k].chosen.logprob - want[i].logprobs[k].chosen.logprob);
                if (off >= 0.05f && may_turn-- > 0) break;
                CHECK(off < 0.05f);
            }
        }
    }
}

TEST_CASE("GPU: fused kernels answer as the unfused program, for every reference model and shape", "[cuda]") {
    cuda::DeviceInfo info;
    if (cuda::open_device(0, info) != nullptr) return;
    for (const auto& entry : std::filesystem::directory_iterator(reference("models"))) {
        CAPTURE(entry.path().string());
        if (load_tensors(entry.path().string())) compare_fused(entry.path().string(), false);
    }
    constexpr ModelShape shapes[] = {{"heads of 64", 3, 512, 8, 2, 1280, 2048, 2048},
                                     {"heads of 128", 2, 1024, 8, 8, 2816, 2048, 2048}};
    const std::string    path     = temporary();
    for (const ModelShape& shape : shapes)
        for (DType type : {DType::F16, DType::Q8_0, DType::Q4_K}) {
            CAPTURE(shape.name, dtype_info(type).name);
            REQUIRE(write_random_model(path, shape, type));
            compare_fused(path, type == DType::F16 && info.major >= 9);
        }
    unlink(path.c_str());
}
