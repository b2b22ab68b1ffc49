// The engine on a GPU against the engine on the CPU. Without a GPU these tests print that and pass.
#include <catch2/catch_test_macros.hpp>

#include "../cuda/kernels.h"
#include "process.h"
#include "reference.h"

import quire.core.base;
import quire.core.std;
import quire.core.tensor;
import quire.engine.engine;
import quire.model_file.config;
import quire.model_file.gguf_writer;
import quire.model_file.quants;
import quire.paging.cache_layout;
import quire.paging.snapshot;
import quire.schedule.request;
import quire.schedule.scheduler;
import quire.tools.bench.random_model;

#include "cuda_tools.h"
#include "engine_tools.h"
#include "odd_model.h"

using namespace quire;
using namespace quire::testing;

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
    for (const char* name : {"llama3-gqa-F16.gguf",  "llama3-gqa-Q8_0.gguf",    "mistral-swa-Q8_0.gguf",
                             "qwen2-Q4_0.gguf",      "gpt2-F32.gguf",           "command-r-F16.gguf",
                             "gemma2-Q8_0.gguf",     "gemma3-F16.gguf",         "glm4-F16.gguf",
                             "granite-F16.gguf",     "granite-Q8_0.gguf",       "olmo2-F16.gguf",
                             "opt-F16.gguf",         "phi2-F16.gguf",           "phi3-Q8_0.gguf",
                             "smollm3-F16.gguf",     "stablelm-F16.gguf",       "starcoder2-F16.gguf",
                             "mistral3-F16.gguf",    "mistral3-Q8_0.gguf",      "seed_oss-F16.gguf",
                             "ernie4_5-F16.gguf",    "hunyuan-dense-F16.gguf",  "exaone4-F16.gguf",
                             "exaone4-swa-F16.gguf", "cohere2-F16.gguf",        "gemma4-F16.gguf",
                             "gemma4-Q8_0.gguf",     "gemma4-moe-F16.gguf",     "deepseek3-F16.gguf",
                             "glm4moe-F16.gguf",     "llama4-F16.gguf",         "ernie4_5-moe-F16.gguf",
                             "hunyuan-moe-F16.gguf", "minimax-m2-F16.gguf",     "lfm2-F16.gguf",
                             "lfm2-Q8_0.gguf",       "qwen35-F16.gguf",         "qwen35-k-Q4_K_M.gguf",
                             "qwen35-128-F16.gguf",  "qwen35-mtp-F16.gguf",     "granitehybrid-dense-F16.gguf",
                             "nemotron_h-F16.gguf",  "nemotron_h-128-F16.gguf", "nemotron_h-Q8_0.gguf",
                             "mamba2-F16.gguf"}) {
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
        // With experts rounding to fp16 can turn the choice between two whose scores are almost equal.
        int may_turn = cpu.config().experts.n > 0 ? 2 : 0;
        for (std::size_t i = 0; i < requests.size(); i++) {
            double squares = 0;
            for (std::size_t t = 0; t < want[i].prompt_logits.size(); t++)
                squares += std::pow(double(got[i].prompt_logits[t]) - double(want[i].prompt_logits[t]), 2);
            const double miss = std::sqrt(squares / double(want[i].prompt_logits.size()));
            if (miss >= 0.05 && may_turn-- > 0) continue;
            CHECK(miss < 0.05);
            // Equal tokens wherever the choice is not close.
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
    struct Types {
        DType weights, kv;
    };
    const std::string   path = temporary();
    std::optional<bool> has; // whether this GPU has the megakernel, for all types
    for (const ModelShape& shape : shapes)
        for (const auto& [type, kv] : {Types{DType::F16, DType::F16},
                                       {DType::F16, DType::I8},
                                       {DType::F16, DType::F8},
                                       {DType::Q8_0, DType::F16},
                                       {DType::Q8_0, DType::I8},
                                       {DType::Q4_0, DType::F16},
                                       {DType::Q4_K, DType::F16},
                                       {DType::Q4_K, DType::F8},
                                       {DType::Q5_K, DType::F16},
                                       {DType::Q6_K, DType::F16}}) {
            CAPTURE(shape.name, dtype_info(type).name, int(kv));
            REQUIRE(write_random_model(path, shape, type));
            EngineOptions o;
            o.device         = "cpu";
            o.kv_type        = kv;
            Engine cpu       = load(path, o);
            o.device         = "cuda";
            o.kv_blocks      = 512;
            Engine     gpu   = load(path, o);
            const bool fused = gpu.explain().contains("decode megakernel");
            CHECK(fused == has.value_or(fused));
            has = fused;
            // A last bit can turn a code into the next one.
            const float  most = kv == DType::F16 ? 0.05f : kv == DType::I8 ? 0.1f : 0.3f;
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
                        CHECK(top[0].logprob - top[1].logprob < 2 * most);
                        break;
                    }
                    CHECK(std::abs(got.logprobs[k].chosen.logprob - want.logprobs[k].chosen.logprob) < most);
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

TEST_CASE("GPU: KV caches of codes answer as on the CPU, at all head sizes", "[cuda]") {
    if (no_gpu()) return;
    const std::string        path = temporary();
    std::vector<std::string> files;
    for (int D : {10, 16, 32, 40, 64, 80, 96, 112, 128, 160, 192, 256, 512}) files.push_back(cat(D));
    for (const char* name : {"models/gemma2-Q8_0.gguf", "models/gemma4-F16.gguf", "models/deepseek2-Q8_0.gguf",
                             "models/gpt-oss-MXFP4.gguf", "models/qwen35-F16.gguf", "models/gpt2-F32.gguf"})
        files.emplace_back(name);
    const std::array<KvTypes, 4> types{{DType::I8, DType::F8, {DType::I8, DType::F16}, {DType::F16, DType::F8}}};
    for (const std::string& name : files) {
        const bool own = name.find('/') == std::string::npos;
        if (own)
            write_odd_model(path, {"codes", DType::F16, 128, 4, 2, std::stoi(name), std::stoi(name) / 2 * 2, 96, 389});
        else if (!has_reference(name)) continue;
        EngineOptions plain;
        plain.context            = 500;
        plain.swap_blocks        = 8;
        plain.device             = "cpu";
        Engine               f16 = load(own ? path : reference(name), plain);
        std::mt19937         random(3);
        std::vector<Request> requests;
        for (int n : {1, 7, 40, 130, 480, 33}) {
            std::vector<Token> prompt;
            for (int i = 0; i < n; i++) prompt.push_back(int(random() % unsigned(f16.config().vocab_size)));
            requests.push_back(greedy(prompt, 8));
        }
        requests.back().n = 2; // blocks are copied when the answers part
        const auto exact  = run(f16, requests);
        for (const KvTypes& kv : types) {
            CAPTURE(name, int(kv.k), int(kv.v));
            EngineOptions o = plain;
            o.kv_type       = kv;
            o.block_size    = kv == types[1] ? 4 : 16;
            Engine cpu      = load(own ? path : reference(name), o);
            o.device        = "cuda";
            Engine     gpu  = load(own ? path : reference(name), o);
            const auto want = run(cpu, requests), got = run(gpu, requests), alone = run(gpu, {requests[4]});
            int        may_turn = f16.config().experts.n > 0 ? 2 : 0; // between two experts of almost equal scores
            for (std::size_t i = 0; i < requests.size(); i++) {
                CAPTURE(i);
                const auto in_doubles = [](const std::vector<float>& x) {
                    return std::vector<double>(x.begin(), x.end());
                };
                // A last bit can turn a code into the next one: both are as far from the exact logits, in any direction.
                const auto   codes = in_doubles(want[i].prompt_logits);
                const double bound = std::max(0.05, 2 * relative_error(exact[i].prompt_logits, codes)),
                             miss  = relative_error(got[i].prompt_logits, codes);
                if (miss >= bound && may_turn-- > 0) continue;
                CHECK(miss < bound);
                if (i == 4) CHECK(relative_error(alone[0].prompt_logits, codes) < bound);
            }
        }
    }
    unlink(path.c_str());
}

namespace {

// As run(), without assertions: they are for one thread only. Empty where a request is refused.
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
TEST_CASE("GPU: prompts in fp8 are predicted nearly as in 16 bits", "[cuda]") {
    if (no_gpu()) return;
    if (!cuda::has_fp8_gemm(Gpu())) return;
    EngineOptions o;
    o.device                    = "cuda";
    o.kv_blocks                 = 512;
    const std::string file      = QUIRE_ROOT "/models/quire-14m-q8_0.gguf";
    Engine            exact     = load(file, o);
    o.fp8_rows                  = 2; // a decode step of one token stays in 16 bits
    Engine               engine = load(file, o);
    std::vector<Request> requests;
    for (const char* text :
         {"Hello! How are you today?", "What is the KV cache of a language model, and why is it paged?",
          "Once upon a time there was a small block of memory that nobody wanted to have."}) {
        Request r;
        r.prompt               = engine.tokenizer().encode(text);
        r.max_tokens           = 4;
        r.ignore_end           = true;
        r.prompt_logprobs      = 0;
        r.sampling.temperature = 0;
        requests.push_back(std::move(r));
    }
    const auto want = run(exact, requests), got = run(engine, requests);
    // The differences beside the variance of what was expected.
    std::vector<double> expected, seen;
    for (std::size_t i = 0; i < requests.size(); i++)
        for (std::size_t k = 0; k < want[i].prompt_logprobs.size(); k++) {
            expected.push_back(double(want[i].prompt_logprobs[k].chosen.logprob));
            seen.push_back(double(got[i].prompt_logprobs.at(k).chosen.logprob));
        }
    const auto n    = double(expected.size());
    double     mean = 0, all = 0, differences = 0;
    for (double one : expected) mean += one / n;
    for (std::size_t k = 0; k < expected.size(); k++) {
        all += (expected[k] - mean) * (expected[k] - mean);
        differences += (seen[k] - expected[k]) * (seen[k] - expected[k]);
    }
    INFO(differences << " of " << all << ", of " << n << " tokens");
    CHECK(n > 30);
    CHECK(differences > 1e-6 * all); // else nothing ran in fp8
    CHECK(differences < 0.1 * all);
}

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
