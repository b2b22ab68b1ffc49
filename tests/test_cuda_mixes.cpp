// Whole engines on the GPU in random mixes, at the head sizes of real models: every request as the same request alone. What kernels
// read before their inputs are complete (cuda/warp.cuh) shows here. Without a GPU these tests print that and pass.
#include <catch2/catch_test_macros.hpp>

#include "../cuda/kernels.h"
#include "process.h"
#include "reference.h"

import quire.core.base;
import quire.core.std;
import quire.core.tensor;
import quire.engine.engine;
import quire.model_file.gguf_writer;
import quire.model_file.quants;
import quire.paging.cache_layout;
import quire.schedule.request;
import quire.schedule.scheduler;

#include "cuda_tools.h"
#include "engine_tools.h"
#include "odd_model.h"

using namespace quire;
using namespace quire::testing;

namespace {

// A model of random weights with heads of that size, or a reference file.
struct MixModel {
    const char* name;
    int         heads = 0, kv_heads = 0, head_dim = 0;
    DType       type   = DType::F16;
    const char* file   = nullptr;
    int         layers = 4, window = 0, period = 0;
    KvTypes     kv         = DType::F16;
    int         pool_times = 1; // so many times the blocks of a pool, for the states of its sequences
};
const MixModel mix_models[] = {
    {"heads of 64", 9, 3, 64},
    {"heads of 96", 8, 4, 96},
    {"heads of 128", 8, 2, 128},
    {"heads of 256", 4, 1, 256},
    {"heads of 64, Q8_0", 8, 8, 64, DType::Q8_0},
    {"heads of 64, a window", 9, 3, 64, DType::F16, nullptr, 4, 50},
    {"heads of 128, windows in half", 8, 2, 128, DType::F16, nullptr, 4, 100, 2},
    {"heads of 256, windows in 5 of 6", 4, 1, 256, DType::F16, nullptr, 6, 40, 6},
    {.name = "windows and caps", .file = "models/gemma2-Q8_0.gguf"},
    {.name = "experts", .file = "models/qwen3moe-Q8_0.gguf"},
    {.name = "latent attention and experts", .file = "models/deepseek2-Q8_0.gguf"},
    {"heads of 64, KV q8_0", 9, 3, 64, DType::F16, nullptr, 4, 0, 0, DType::I8},
    {"heads of 96, KV fp8", 8, 4, 96, DType::F16, nullptr, 4, 0, 0, DType::F8},
    {"heads of 128, K fp8 and V q8_0", 8, 2, 128, DType::F16, nullptr, 4, 0, 0, {DType::F8, DType::I8}},
    {"heads of 256, windows, KV q8_0", 4, 1, 256, DType::F16, nullptr, 6, 40, 6, DType::I8},
    {"heads of 128, K q8_0 and V f16", 8, 2, 128, DType::F16, nullptr, 4, 0, 0, {DType::I8, DType::F16}},
    {.name = "latent attention, KV fp8", .file = "models/deepseek2-Q8_0.gguf", .kv = DType::F8},
    {.name = "heads by layer, layers without KV", .file = "models/gemma4-Q8_0.gguf"},
    {.name = "short convolutions", .file = "models/lfm2-Q8_0.gguf"},
    {.name = "delta rules", .file = "models/qwen35-k-Q4_K_M.gguf", .pool_times = 4},
    {.name = "selective scans", .file = "models/nemotron_h-Q8_0.gguf", .pool_times = 6}};

// The file of a model, as long as this lives.
class ModelFile {
public:
    explicit ModelFile(const MixModel& m) : path(m.file ? reference(m.file) : temporary()), is_own_(m.file == nullptr) {
        if (is_own_)
            write_odd_model(path, {m.name, m.type, 1024, m.heads, m.kv_heads, m.head_dim, m.head_dim, 2048, 512,
                                   m.layers, m.window, m.period});
    }
    ModelFile(const ModelFile&)            = delete;
    ModelFile& operator=(const ModelFile&) = delete;
    ~ModelFile() {
        if (is_own_) unlink(path.c_str());
    }
    const std::string path;

private:
    bool is_own_;
};

// Of each answer (by request, then index) what it said. Requests come and go at the steps that the mix says.
struct Mix {
    std::vector<Request> requests;
    std::vector<int>     submit_at, cancel_at; // steps; never: -1
};
std::vector<std::map<int, Answer>> run_mix(Engine& engine, const Mix& mix) {
    std::map<RequestId, std::size_t>   index;
    std::vector<RequestId>             ids(mix.requests.size(), 0);
    std::vector<std::map<int, Answer>> answers(mix.requests.size());
    std::vector<Output>                events;
    std::size_t                        submitted = 0;
    for (int step = 0; submitted < mix.requests.size() || !index.empty(); step++) {
        for (std::size_t i = 0; i < mix.requests.size(); i++) {
            if (mix.submit_at[i] == step) {
                Result<RequestId> id = engine.submit(mix.requests[i]);
                INFO((id ? "" : id.error().message));
                REQUIRE(id.has_value());
                index[ids[i] = *id] = i;
                submitted++;
            }
            if (mix.cancel_at[i] == step && index.contains(ids[i])) engine.cancel(ids[i]);
        }
        engine.step(events);
        for (Output& e : events) {
            Answer& a = answers[index.at(e.id)][e.index];
            a.tokens.insert(a.tokens.end(), e.tokens.begin(), e.tokens.end());
            a.logprobs.insert(a.logprobs.end(), e.logprobs.begin(), e.logprobs.end());
            if (!e.prompt_logits.empty()) a.prompt_logits = std::move(e.prompt_logits);
            if (e.finish != FinishReason::none) a.finish = e.finish;
            if (e.done) index.erase(e.id);
        }
        events.clear();
        engine.check_invariants();
        REQUIRE(step < 100'000);
    }
    return answers;
}

Mix alone(const Request& request) { return {{request}, {0}, {-1}}; }

// Equal prompts in the same step (of whole blocks and a token more, so that the second runs one row), beginnings that are shared,
// several answers, beams, cancels.
Mix random_mix(std::mt19937& random, int vocab, bool deterministic) {
    const auto below = [&](int n) { return int(random() % unsigned(n)); };
    const auto text  = [&](int n) {
        std::vector<Token> t(std::size_t(n), 0);
        for (Token& x : t) x = 3 + below(vocab - 3);
        return t;
    };
    Mix        mix;
    const auto add = [&](Request r, int step, int cancel = -1) {
        mix.requests.push_back(std::move(r));
        mix.submit_at.push_back(step);
        mix.cancel_at.push_back(cancel);
    };
    std::vector<Token> common = text(160);
    for (int group = 0; group < 8; group++) {
        const int          step = below(12);
        std::vector<Token> prompt(common.begin(), common.begin() + 16 * below(8));
        for (Token t : text(16 * below(10) + 1 + (below(4) == 0 ? below(15) : 0))) prompt.push_back(t);
        const int copies = 1 + below(4);
        for (int copy = 0; copy < copies; copy++) {
            Request r = greedy(prompt, 2 + below(12));
            r.n       = below(4) == 0 ? 2 + below(2) : 1;
            if (deterministic && below(3) == 0) r.sampling.temperature = 1, r.sampling.seed = random();
            if (below(8) == 0) r.n = 1, r.beam_width = 2 + below(2);
            r.priority =
                int(mix.requests.size() % 3); // urgent requests take the place of others, also where windows leave room
            add(std::move(r), step + (below(5) == 0 ? 1 : 0), below(10) == 0 ? step + 1 + below(6) : -1);
        }
    }
    return mix;
}

EngineOptions random_options(const EngineOptions& plain, std::mt19937& random, int round, const MixModel& model) {
    const auto    below = [&](int n) { return int(random() % unsigned(n)); };
    EngineOptions o     = plain;
    o.block_size        = std::array{16, 16, 8, 32}[std::size_t(round % 4)];
    o.preemption_mode   = round % 2 ? PreemptionMode::swap : PreemptionMode::recompute;
    o.max_sequences     = 4 + below(12);
    o.max_batch_tokens  = o.max_sequences + (round % 3 == 0 ? 1000 : below(250));
    o.kv_blocks         = (round % 2 ? 420 : 1600) / o.block_size * 3 / (model.window > 0 ? 4 : 2) *
                  model.pool_times; // some rounds must preempt; sequences with windows hold fewer blocks
    return o;
}

// Greedy answers agree wherever the choice is not close.
void check_close(const Answer& got, const Answer& want, KvTypes kv) {
    const float most = kv == DType::F16 ? 0.03f : 0.1f; // a last bit can turn a code into the next one
    REQUIRE(got.logprobs.size() == want.logprobs.size());
    for (std::size_t k = 0; k < want.tokens.size(); k++) {
        const auto& top = want.logprobs[k].top;
        CAPTURE(k);
        if (want.tokens[k] != got.tokens[k]) {
            CHECK(top[0].logprob - top[1].logprob < 0.05f);
            return;
        }
        CHECK(std::abs(got.logprobs[k].chosen.logprob - want.logprobs[k].chosen.logprob) < most);
    }
}

} // namespace

TEST_CASE("GPU: every request of a random mix answers as alone, at the head sizes of real models", "[cuda][mixes]") {
    if (no_gpu()) return;
    for (const MixModel& model : mix_models)
        for (const bool deterministic : {true, false}) {
            CAPTURE(model.name, deterministic);
            const ModelFile file(model);
            std::mt19937    random(7);
            EngineOptions   plain;
            plain.device              = "cuda";
            plain.deterministic       = deterministic;
            plain.kv_type             = model.kv;
            plain.context             = 400;
            plain.kv_blocks           = 64 * model.pool_times;
            plain.swap_blocks         = 200;
            EngineOptions o           = plain;
            o.prefix_cache            = false;
            Engine        single      = load(file.path, o);
            std::uint64_t preemptions = 0;
            int           compared    = 0;
            for (int round = 0; round < 8; round++) {
                const Mix mix    = random_mix(random, single.config().vocab_size, deterministic);
                Engine    engine = load(file.path, random_options(plain, random, round, model));
                CAPTURE(round);
                const auto got = run_mix(engine, mix);
                for (std::size_t i = 0; i < mix.requests.size(); i++) {
                    const Request& r = mix.requests[i];
                    if (mix.cancel_at[i] >= 0) continue;
                    if (!deterministic && (r.beam_width > 0 || model.file))
                        continue; // close beams and experts change places
                    const auto want = run_mix(single, alone(r))[0];
                    REQUIRE(got[i].size() == want.size());
                    for (const auto& [index, answer] : want) {
                        CAPTURE(i, r.prompt.size(), r.n, r.beam_width, index);
                        compared++;
                        if (deterministic) CHECK(identical(got[i].at(index), answer));
                        else check_close(got[i].at(index), answer, model.kv);
                    }
                }
                preemptions += engine.stats().preemptions;
            }
            CHECK(preemptions > 0);
            CHECK((compared > 60 || (model.file && !deterministic)));
        }
}

TEST_CASE("GPU: two equal prompts that come together answer as one from the cache", "[cuda][mixes]") {
    if (no_gpu()) return;
    for (const MixModel& model : mix_models)
        for (const bool deterministic : {true, false}) {
            CAPTURE(model.name, deterministic);
            const ModelFile file(model);
            EngineOptions   o;
            o.device            = "cuda";
            o.deterministic     = deterministic;
            o.kv_type           = model.kv;
            o.context           = 450;
            o.kv_blocks         = 400;
            Engine       engine = load(file.path, o);
            std::mt19937 random(11);
            for (int pair = 0; pair < 60; pair++) {
                std::vector<Token> prompt(std::size_t(16 * (2 + random() % 23) + 1), 0);
                for (Token& t : prompt) t = 3 + int(random() % unsigned(engine.config().vocab_size - 3));
                const Request r        = greedy(prompt, 4);
                const auto    together = run_mix(engine, {{r, r}, {0, 0}, {-1, -1}});
                const Answer  again    = run_mix(engine, alone(r))[0].at(0);
                CAPTURE(pair, prompt.size());
                for (const auto& one : together)
                    if (deterministic) CHECK(identical(one.at(0), again));
                    else if (!model.file) check_close(one.at(0), again, model.kv);
            }
        }
}

TEST_CASE("GPU: the workspace of attention does not grow with contexts times sequences, and long contexts are right",
          "[cuda][mixes]") {
    if (no_gpu()) return;
    for (const MixModel& model : {mix_models[0], mix_models[1], mix_models[3]}) {
        CAPTURE(model.name);
        const ModelFile file(model);
        EngineOptions   o;
        o.device        = "cuda";
        o.context       = 131'072;
        o.max_sequences = 512;
        o.kv_blocks     = 3 * 8192;
        o.swap_blocks   = 0;
        Engine engine   = load(file.path, o);
        // "workspaces N MiB": every sequence at its longest had asked for gigabytes.
        const std::string use = engine.memory_use();
        const auto        at  = use.find("workspaces ");
        REQUIRE(at != std::string::npos);
        INFO(use);
        CHECK(use.find(" MiB", at) < use.find(",", at));
        CHECK(std::atoi(use.c_str() + at + 11) < 1000);
        o.deterministic          = true;
        o.max_sequences          = 4;
        Engine             fixed = load(file.path, o);
        std::mt19937       random(3);
        std::vector<Token> prompt(30'000, 0);
        for (Token& t : prompt) t = 3 + int(random() % 500);
        std::vector<Request> requests;
        for (int n : {30'000, 29'990, 12'345, 700, 30, 1})
            requests.push_back(greedy({prompt.begin(), prompt.begin() + n}, 6));
        const auto got = run(engine, requests), again = run(engine, requests); // from the cache, in the step of others
        for (std::size_t i = 2; i < requests.size(); i++) { // the longest take minutes in fixed splits
            const auto want = run(fixed, {requests[i]});
            CAPTURE(requests[i].prompt.size());
            check_close(got[i], want[0], model.kv);
        }
        for (std::size_t i = 0; i < requests.size(); i++) check_close(again[i], got[i], model.kv);
    }
}

// Prints digests of bits, to compare processes and builds (docs/cuda-notes.md, "Early reads"). Steps have at most 64 rows, so that most
// kernels are quire's own; nothing is chosen by timing.
TEST_CASE("GPU: a digest of the bits of random mixes", "[cuda][mixes][digest]") {
    if (no_gpu()) return;
    for (const MixModel& model : mix_models)
        for (const bool deterministic : {true, false}) {
            const ModelFile file(model);
            std::mt19937    random(21);
            std::uint64_t   digest = 0xcbf29ce484222325ull;
            const auto      add    = [&](std::uint64_t v) { digest = (digest ^ v) * 0x100000001b3ull; };
            for (int round = 0; round < 3; round++) {
                EngineOptions plain;
                plain.device        = "cuda";
                plain.deterministic = deterministic;
                plain.kv_type       = model.kv;
                plain.tune          = false;
                plain.context       = 400;
                plain.swap_blocks   = 200;
                EngineOptions o     = random_options(plain, random, round, model);
                o.max_batch_tokens  = std::min(o.max_batch_tokens, 64);
                Engine engine       = load(file.path, o);
                Mix    mix          = random_mix(random, engine.config().vocab_size, true);
                std::ranges::fill(mix.cancel_at, -1);
                for (const auto& request : run_mix(engine, mix))
                    for (const auto& [index, answer] : request) {
                        for (Token t : answer.tokens) add(std::uint64_t(t));
                        for (const PositionLogprobs& p : answer.logprobs)
                            add(std::bit_cast<std::uint32_t>(p.chosen.logprob));
                    }
            }
            std::printf("digest: %s%s: %016llx\n", model.name, deterministic ? ", deterministic" : "",
                        static_cast<unsigned long long>(digest));
        }
    SUCCEED();
}
