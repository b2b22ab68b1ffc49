// LoRA adapters: their logits against what `peft` computes (tests/adapters/make.py), the same bits in any batch, and files that are refused.
#include <catch2/catch_test_macros.hpp>

#include <unistd.h>

#include <nlohmann/json.hpp>

#include "reference.h"

import quire.core.base;
import quire.core.std;
import quire.engine.engine;
import quire.model_file.gguf_types;
import quire.model_file.gguf_writer;
import quire.schedule.preemption;
import quire.schedule.request;

#include "engine_tools.h"
#include "npy.h"

using namespace quire;
using namespace quire::testing;

namespace {

// As in tests/adapters/make.py.
const std::vector<std::vector<AdapterUse>> uses{{{0, 1}}, {{1, 1}}, {{0, 1}, {1, 0.5f}}, {{0, -0.75f}}};

struct Prompts {
    std::vector<std::vector<Token>> all;
    explicit Prompts(const std::string& model) {
        std::ifstream file(reference("adapters/" + model + ".json"));
        all = nlohmann::json::parse(file)["prompts"].get<std::vector<std::vector<Token>>>();
    }
};

// Neither adapter is applied to requests that do not say.
EngineOptions with_adapters(const std::string& model, EngineOptions o = {}) {
    for (const char* name : {"one", "two"})
        o.adapters.push_back({reference(cat("adapters/", model, ".", name, ".gguf")), name, 1, false});
    return o;
}

Request request(std::vector<Token> prompt, int n, std::vector<AdapterUse> adapters) {
    Request r  = greedy(std::move(prompt), n);
    r.adapters = std::move(adapters);
    return r;
}

const std::string llama = "models/llama3-gqa-F16.gguf";

// The error of Engine::load() for a model with this file as an adapter.
std::string refusal(const std::string& path, const std::string& model = llama) {
    EngineOptions o;
    o.device                    = "cpu";
    o.adapters                  = {{path, "a"}};
    const Result<Engine> engine = Engine::load(reference(model), o);
    return engine ? "" : engine.error().message;
}

} // namespace

TEST_CASE("the logits of models with adapters are those of peft", "[adapters]") {
    for (const char* file : {"llama3-gqa-F16", "gpt2-F32"}) {
        const std::string model     = std::string(file).substr(0, std::string_view(file).rfind('-'));
        EngineOptions     o         = with_adapters(model);
        o.kv_type                   = DType::F32;
        Engine               engine = load(reference(cat("models/", file, ".gguf")), o);
        const Prompts        prompts(model);
        std::vector<Request> requests;
        for (const auto& use : uses)
            for (const auto& prompt : prompts.all) requests.push_back(request(prompt, 1, use));
        const std::vector<Answer> answers = run(engine, requests);
        const std::vector<float>  wanted  = read_npy(reference(cat("adapters/", model, ".npy")));
        const std::size_t         vocab   = answers[0].prompt_logits.size();
        REQUIRE(wanted.size() == vocab * answers.size());
        for (std::size_t i = 0; i < answers.size(); i++) {
            CAPTURE(file, i / prompts.all.size(), i % prompts.all.size());
            double worst = 0, largest = 0;
            for (std::size_t t = 0; t < vocab; t++) {
                const auto want = double(wanted[i * vocab + t]);
                worst           = std::max(worst, std::abs(double(answers[i].prompt_logits[t]) - want));
                largest         = std::max(largest, std::abs(want));
            }
            CHECK(worst <= 1e-3 * largest);
        }
    }
}

TEST_CASE("adapters have the same bits in any batch, chunk and preemption", "[adapters]") {
    const Prompts        prompts("llama3-gqa");
    std::vector<Request> requests;
    for (const auto& use : {uses[0], uses[2], std::vector<AdapterUse>(), uses[1], uses[0]})
        requests.push_back(request(prompts.all[1], 24, use));
    std::vector<Answer> alone;
    for (const Request& r : requests) {
        Engine engine = load(reference(llama), with_adapters("llama3-gqa", small_blocks(false, 64, 1)));
        alone.push_back(run(engine, {r})[0]);
    }
    CHECK(alone[0].tokens != alone[2].tokens);
    CHECK(identical(alone[0], alone[4]));
    {
        Engine engine = load(reference(llama), small_blocks(false, 64, 1)); // without adapters
        CHECK(identical(run(engine, {greedy(prompts.all[1], 24)})[0], alone[2]));
    }
    const auto same = [&](Engine& engine, const std::vector<int>& at = {}) {
        const std::vector<Answer> answers = run(engine, requests, at);
        for (std::size_t i = 0; i < answers.size(); i++) {
            CAPTURE(i);
            CHECK(identical(answers[i], alone[i]));
        }
    };
    for (bool pipeline : {false, true}) {
        EngineOptions o      = with_adapters("llama3-gqa", small_blocks(pipeline, 128, 8));
        Engine        engine = load(reference(llama), o);
        same(engine);                  // in one batch, which is one chunk
        same(engine, {0, 2, 3, 3, 9}); // cached, beside decoding
    }
    for (PreemptionMode mode : {PreemptionMode::swap, PreemptionMode::recompute}) {
        EngineOptions o    = with_adapters("llama3-gqa", small_blocks(false, 22, 8));
        o.max_batch_tokens = 9; // chunks
        o.preemption_mode  = mode;
        o.swap_blocks      = 64;
        Engine engine      = load(reference(llama), o);
        same(engine);
        CHECK(engine.stats().preemptions > 0);
    }
    EngineOptions o = with_adapters("llama3-gqa", small_blocks(false, 128, 8));
    o.deterministic = true;
    {
        Engine engine = load(reference(llama), o);
        same(engine);
    }
    o.drafts.on = o.drafts.always = true;
    Engine engine                 = load(reference(llama), o);
    same(engine);
}

TEST_CASE("a request whose adapter makes its numbers infinite hears of the adapter", "[adapters][nan]") {
    Engine engine = load(reference(llama), with_adapters("llama3-gqa", small_blocks(false, 64, 1)));
    REQUIRE(engine.submit(request({5, 6, 7}, 4, {{0, 3e38f}})).has_value());
    std::vector<Output> out;
    while (engine.step(out)) {}
    REQUIRE(!out.empty());
    CHECK(out.back().message.contains("its file or that of an adapter in use is damaged"));
}

TEST_CASE("the prefix cache keeps adapters and their scales apart", "[adapters]") {
    const Prompts prompts("llama3-gqa");
    Engine        engine = load(reference(llama), with_adapters("llama3-gqa", small_blocks(false, 256, 4)));
    const auto    cached = [&](const std::vector<AdapterUse>& use, const char* salt = "") {
        Request r    = request(prompts.all[1], 1, use);
        r.cache_salt = salt;
        return run(engine, {r})[0].cached_tokens;
    };
    const std::vector<std::vector<AdapterUse>> all{{}, {{0, 1}}, {{0, 0.5f}}, {{1, 1}}, {{0, 1}, {1, 1}}};
    for (const auto& use : all) CHECK(cached(use) == 0);
    for (const auto& use : all) CHECK(cached(use) == 32);
    CHECK(cached({{1, 1}, {0, 1}}) == 32); // the order does not count,
    CHECK(cached({{0, 1}, {1, 0}}) == 32); // nor does a scale of 0
    CHECK(cached({{0, 1}}, "salt") == 0);
    CHECK(cached({{0, 1}}, "salt") == 32);
    CHECK(cached({}, "salt") == 0);
}

TEST_CASE("requests that name no adapter have those that the engine applies", "[adapters]") {
    const Prompts prompts("llama3-gqa");
    EngineOptions o     = with_adapters("llama3-gqa", small_blocks(false, 64, 4));
    o.adapters[1].usual = true;
    Engine     engine   = load(reference(llama), o);
    const auto usual    = [&] { return run(engine, {greedy(prompts.all[0], 4)})[0]; };
    const auto with = [&](std::vector<AdapterUse> use) { return run(engine, {request(prompts.all[0], 4, use)})[0]; };
    CHECK(engine.adapters()[0].scale == 0);
    CHECK(engine.adapters()[1].scale == 1);
    CHECK(identical(usual(), with({{1, 1}})));
    REQUIRE(engine.set_adapters(std::vector<AdapterUse>{{0, 0.5f}}));
    CHECK(engine.adapters()[0].scale == 0.5f);
    CHECK(engine.adapters()[1].scale == 0);
    CHECK(identical(usual(), with({{0, 0.5f}})));
    REQUIRE(engine.set_adapters({}));
    CHECK(identical(usual(), with({})));

    const auto says = [&](std::vector<AdapterUse> use) {
        const auto of_request = engine.submit(request(prompts.all[0], 1, use));
        const auto of_all     = engine.set_adapters(use);
        REQUIRE(!of_request);
        REQUIRE(!of_all);
        CHECK(of_request.error().message == of_all.error().message);
        return of_request.error().message;
    };
    CHECK(says({{2, 1}}) == "there is no adapter 2; they are 0 to 1");
    CHECK(says({{-1, 1}}) == "there is no adapter -1; they are 0 to 1");
    CHECK(says({{1, 1}, {1, 2}}) == "adapter 1 is named twice");
    CHECK(says({{1, std::numeric_limits<float>::infinity()}}) == "the scale of adapter 1 is not a finite number");
}

TEST_CASE("a file that is no adapter of the model is refused in one sentence", "[adapters]") {
    CHECK(refusal("/none.gguf").starts_with("cannot open /none.gguf: "));
    CHECK(refusal(reference(llama)).contains("it is a model, not an adapter (general.type is "));
    CHECK(refusal(reference("adapters/gpt2.one.gguf"))
              .ends_with("it is an adapter for models of the architecture 'gpt2', not 'llama'"));

    struct Half {
        std::string               name;
        std::vector<std::int64_t> dims;
    };
    struct Made {
        std::vector<Half> halves;
        std::string       architecture = "llama", kind = "lora", model = llama;
        float             alpha = 8;
        bool              alora = false;
    };
    const std::string path = cat("/tmp/quire_adapter_", getpid(), ".gguf");
    const auto        says = [&](const Made& made) {
        GgufWriter w;
        w.set("general.architecture", made.architecture);
        w.set("general.type", "adapter");
        w.set("adapter.type", made.kind);
        w.set("adapter.lora.alpha", made.alpha);
        if (made.alora) w.set("adapter.alora.invocation_tokens", std::vector<std::uint32_t>{1});
        for (const Half& half : made.halves) {
            std::size_t n = sizeof(float);
            for (std::int64_t d : half.dims) n *= std::size_t(d);
            w.add_tensor(half.name, DType::F32, half.dims, std::vector<std::byte>(n));
        }
        REQUIRE(w.write(path));
        std::string said = refusal(path, made.model);
        std::filesystem::remove(path);
        REQUIRE(said.starts_with(path + ": "));
        return said.substr(path.size() + 2);
    };
    const std::string q = "blk.0.attn_q.weight";
    const Half        a{q + ".lora_a", {128, 4}}, b{q + ".lora_b", {4, 128}};
    CHECK(says({.halves = {a, b}, .kind = "ia3"}) ==
          "it is an adapter of another kind than LoRA (adapter.type is 'ia3')");
    CHECK(says({.halves = {a, b}, .alora = true}) ==
          "it works from a phrase in the text on (aLoRA), which quire does not do");
    CHECK(says({.halves = {a, b}, .alpha = std::numeric_limits<float>::infinity()}) ==
          "adapter.lora.alpha is inf, not a number that can be used");
    CHECK(says({}) == "the adapter has no tensors");
    CHECK(says({.halves = {a}}) == "tensor blk.0.attn_q.weight.lora_b is missing");
    CHECK(says({.halves = {b}}) == "tensor blk.0.attn_q.weight.lora_a is missing");
    CHECK(says({.halves = {a, b, {"output_norm.weight", {128}}}}) ==
          "tensor output_norm.weight is no half of a LoRA pair (NAME.lora_a, NAME.lora_b)");
    CHECK(says({.halves = {{"blk.9.attn_q.weight.lora_a", {128, 4}}, {"blk.9.attn_q.weight.lora_b", {4, 128}}}}) ==
          "the model has no tensor blk.9.attn_q.weight, which the adapter changes");
    const std::string shape =
        "blk.0.attn_q.weight.lora_a is [4 × 96] and blk.0.attn_q.weight.lora_b is [128 × 4], which do not "
        "fit the model's tensor of [128 × 128]";
    CHECK(says({.halves = {{a.name, {96, 4}}, b}}) == shape);
    CHECK(says({.halves = {{a.name, {128, 5}}, b}}).ends_with("which do not fit the model's tensor of [128 × 128]"));
    CHECK(says({.halves = {{a.name, {128, 5000}}, {b.name, {5000, 128}}}}) ==
          "blk.0.attn_q.weight.lora_a has the rank 5000; at most 4096 is possible");

    // Of a mixture of experts: the stacks, and the router.
    const std::string moe = "models/qwen3moe-Q8_0.gguf", experts = "blk.0.ffn_up_exps.weight",
                      router = "blk.0.ffn_gate_inp.weight";
    const Result<Gguf> file  = Gguf::open(reference(moe));
    REQUIRE(file);
    const auto pair = [&](const std::string& name) {
        const GgufTensor* t = file->tensor(name);
        REQUIRE(t);
        std::vector<Half> halves{{name + ".lora_a", {t->dims[0], 4}}, {name + ".lora_b", {4, t->dims[1]}}};
        if (t->n_dims == 3)
            for (Half& half : halves) half.dims.push_back(t->dims[2]);
        return halves;
    };
    CHECK(says({.halves = pair(experts), .architecture = "qwen3moe", .model = moe}) ==
          "it changes tensor " + experts +
              ", which is a stack of matrices (of experts, or of heads); quire adapts single matrices");
    CHECK(says({.halves = pair(router), .architecture = "qwen3moe", .model = moe}) ==
          "it changes tensor " + router +
              ", which quire cannot adapt: adapters change dense matrices, the embedding and the output");
}
