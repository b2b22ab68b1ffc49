// read_config() and bind_tensors() on files made here that are valid except for one thing.
#include <catch2/catch_test_macros.hpp>

#include <sys/resource.h>
#include <sys/wait.h>
#include <nlohmann/json.hpp>

#include "process.h"
#include "reference.h"

import quire.compute.kv_cache;
import quire.core.base;
import quire.model_file.config;
import quire.model_file.family;
import quire.model_file.gguf;
import quire.model_file.gguf_writer;
import quire.core.std;
import quire.core.tensor;
import quire.model_file.weights;

using namespace quire;
using namespace quire::testing;

namespace {

using Edit = std::function<void(GgufWriter&)>;

// Leaves a key out of what tiny() writes, or a tensor; gives a tensor another shape or type.
struct Changes {
    Edit                                             keys    = [](GgufWriter&) {};
    std::set<std::string>                            without = {};
    std::map<std::string, std::vector<std::int64_t>> dims    = {};
    std::map<std::string, DType>                     types   = {};
    std::vector<std::string>                         more    = {}; // vectors of one element each
};

// One block, hidden 32, 4 heads of 8, 2 kv heads, feed-forward 64, 40 tokens.
GgufWriter tiny(const std::string& architecture, const Changes& changes) {
    GgufWriter w;
    auto       key = [&](const std::string& name, auto value) {
        if (!changes.without.contains(name)) w.set(architecture + "." + name, value);
    };
    w.set("general.architecture", architecture);
    key("context_length", 128u);
    key("embedding_length", 32u);
    key("block_count", 1u);
    key("feed_forward_length", 64u);
    key("attention.head_count", 4u);
    key("attention.head_count_kv", 2u);
    key("attention.layer_norm_rms_epsilon", 1e-6f);
    changes.keys(w);
    auto tensor = [&](const std::string& name, std::vector<std::int64_t> dims) {
        if (changes.without.contains(name)) return;
        if (changes.dims.contains(name)) dims = changes.dims.at(name);
        const DType  type = changes.types.contains(name) ? changes.types.at(name) : DType::F32;
        std::int64_t rows = 1;
        for (std::size_t i = 1; i < dims.size(); i++) rows *= dims[i];
        w.add_tensor(name, type, dims,
                     std::vector<std::byte>(row_bytes(type, dims[0]) * std::size_t(rows), std::byte(0x3c)));
    };
    tensor("token_embd.weight", {32, 40});
    tensor("output_norm.weight", {32});
    tensor("output.weight", {32, 40});
    tensor("blk.0.attn_norm.weight", {32});
    tensor("blk.0.attn_q.weight", {32, 32});
    tensor("blk.0.attn_k.weight", {32, 16});
    tensor("blk.0.attn_v.weight", {32, 16});
    if (architecture == "qwen2") {
        tensor("blk.0.attn_q.bias", {32});
        tensor("blk.0.attn_k.bias", {16});
        tensor("blk.0.attn_v.bias", {16});
    }
    if (architecture == "qwen3") {
        tensor("blk.0.attn_q_norm.weight", {8});
        tensor("blk.0.attn_k_norm.weight", {8});
    }
    tensor("blk.0.attn_output.weight", {32, 32});
    tensor("blk.0.ffn_norm.weight", {32});
    tensor("blk.0.ffn_gate.weight", {32, 64});
    tensor("blk.0.ffn_up.weight", {32, 64});
    tensor("blk.0.ffn_down.weight", {64, 32});
    for (const std::string& name : changes.more) tensor(name, {1});
    return w;
}

struct Loaded {
    Result<ModelConfig> config;
    std::string         error; // of the first step that failed
    bool                output_is_embedding = false, has_q_bias = false;
};

Loaded load(const std::string& path) {
    const Result<Gguf> file = Gguf::open(path);
    if (!file) return {std::unexpected(file.error()), file.error().message};
    Loaded out{read_config(*file), {}};
    if (!out.config) out.error = out.config.error().message;
    else if (const Result<ModelTensors> m = bind_tensors(*file, *out.config); !m) out.error = m.error().message;
    else {
        out.output_is_embedding = m->output.weight.data == m->token_embd.data;
        out.has_q_bias          = bool(m->layers[0].attn_q.bias);
    }
    return out;
}

Loaded load(const std::string& architecture, const Changes& changes) {
    const std::string path = temporary();
    REQUIRE(tiny(architecture, changes).write(path));
    Loaded out = load(path);
    if (!out.error.empty()) {
        CHECK(out.error.starts_with(path + ": "));
        CHECK(out.error.find('\n') == std::string::npos);
    }
    unlink(path.c_str());
    return out;
}

// `why` is in the message when this key has this value.
template <class T>
void refused(const std::string& name, T value, const std::string& why, const Edit& more = [](GgufWriter&) {}) {
    CAPTURE(name, why);
    const Loaded got = load("llama", {.keys = [&](GgufWriter& w) {
                                more(w);
                                w.set(name, value);
                            }});
    CHECK_FALSE(got.config);
    CAPTURE(got.error);
    CHECK(got.error.find(why) != std::string::npos);
}

constexpr float no_number = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();

} // namespace

TEST_CASE("the three architectures are read, and what a file leaves out has its default", "[config]") {
    for (const std::string architecture : {"llama", "qwen2", "qwen3"}) {
        CAPTURE(architecture);
        const Loaded got =
            load(architecture, {.without = {"context_length", "attention.head_count_kv", "blk.0.attn_k.weight"}});
        REQUIRE(got.config);
        const ModelConfig& c = *got.config;
        CHECK(c.architecture_name == architecture);
        CHECK(c.name.starts_with("quire-test-")); // the file's
        CHECK(c.context_length == 2048);
        CHECK(c.hidden_size == 32);
        CHECK(c.n_kv_heads == 4);
        CHECK(c.head_dim == 8);
        CHECK(c.rope_dim == 8);
        CHECK(c.rope_base == 10000);
        CHECK(c.rope_scaling == RopeScaling::none);
        CHECK((c.family->rope == RopePairs::neox) == (architecture != "llama"));
        CHECK(c.sliding_window == 0);
        CHECK(c.vocab_size == 40);
        CHECK(got.error.find("tensor blk.0.attn_k.weight is missing") != std::string::npos);
        CHECK(load(architecture, {}).error == "");
    }
}

TEST_CASE("the reference models say what they are known to be", "[config]") {
    const Loaded mistral = load(reference("models/mistral-swa-Q8_0.gguf")),
                 qwen    = load(reference("models/qwen2-Q4_0.gguf"));
    REQUIRE(mistral.error == "");
    CHECK(mistral.config->family->name == "llama");
    CHECK(mistral.config->sliding_window == 32);
    CHECK(mistral.config->n_layers == 3);
    REQUIRE(qwen.error == "");
    CHECK(qwen.config->rope_base == 1000000);
    CHECK(qwen.has_q_bias);
    CHECK(load(reference("models/llama3-gqa-Q8_0.gguf")).error == "");
    const Loaded tied = load(reference("models/llama-zoo-Q2_K.gguf"));
    CHECK(tied.error == "");
}

TEST_CASE("layers have heads, widths, windows and caches of their own", "[config]") {
    const Loaded got = load(reference("models/gemma4-Q8_0.gguf"));
    REQUIRE(got.error == "");
    const ModelConfig& c = *got.config;
    CHECK(c.head_dim == 64);
    CHECK(c.ff_size == 256);
    CHECK(c.input_size == 16);
    CHECK(c.attention_scale == 1);
    for (std::size_t i = 0; i < c.layers.size(); i++) {
        CAPTURE(i);
        const LayerConfig& l      = c.layers[i];
        const bool         window = i != 2 && i != 4 && i != 7;
        CHECK(l.window == (window ? 32 : 0));
        CHECK(l.head_dim == (window ? 32 : 64));
        CHECK(l.local_rope == window);
        CHECK(l.ff_size == (i < 5 ? 128 : 256));
        CHECK(l.kv_source == (i < 5 ? -1 : window ? 3 : 4)); // the last of its kind that has K and V
    }
    // Layers that see all have K and V in two blocks: so engines are tested with that, too.
    const CacheLayout layout = cache_layout(c, DType::F16, 512);
    CHECK(layout.parts() == std::vector<int>{4, 3});
    CHECK(layout.groups[0].halves);
    CHECK(layout.waste() == 0);
}

TEST_CASE("hyper-parameters that make no sense are refused by name and value", "[config]") {
    for (const char* key :
         {"embedding_length", "block_count", "feed_forward_length", "attention.head_count", "context_length",
          "attention.head_count_kv", "attention.key_length", "rope.dimension_count", "vocab_size"}) {
        const std::string name = std::string("llama.") + key;
        refused(name, 0u, name + " is 0");
        refused(name, -4, name + " is -4");
        refused(name, std::uint64_t(1) << 63, name + " is 9223372036854775808");
        refused(name, 0xffffffffu, name + " is 4294967295");
        refused(name, "4", name + " is a string");
        refused(name, std::vector<std::int32_t>{4, 4}, name + " is an array");
    }
    for (const char* key : {"attention.layer_norm_rms_epsilon", "rope.freq_base"})
        for (float value : {no_number, inf, -inf, 0.f, -1.f}) refused(std::string("llama.") + key, value, key);
    refused("llama.attention.head_count", 3u, "not a multiple of attention.head_count");
    refused("llama.attention.head_count", 5u, "5 is not a multiple of attention.head_count_kv 2");
    refused("llama.attention.head_count_kv", 3u, "head_count_kv 3");
    refused("llama.attention.head_count_kv", 8u, "not in 1..4");
    refused("llama.attention.value_length", 16u, "value_length 16 differs from attention.key_length 8");
    refused("llama.rope.dimension_count", 10u, "not in 2..8");
    refused("llama.rope.dimension_count", 5u, "5, an odd number");
    refused("llama.rope.dimension_count", 2u, "2, more than the 1 of a head", [](GgufWriter& w) {
        w.set("llama.attention.key_length", 1u);
        w.set("llama.attention.value_length", 1u);
    });
    refused("llama.block_count", 0x80000000u, "block_count is 2147483648, not in 1..12");
    refused("llama.expert_count", 8u, "llama.expert_used_count is missing");
    refused("llama.attention.head_count_kv", std::vector<std::int32_t>{3},
            "not a multiple of attention.head_count_kv 3");
    refused("llama.attention.head_count_kv", std::vector<std::int32_t>{-1},
            "attention.head_count_kv has -1, not in 1..4");
    refused("llama.feed_forward_length", std::vector<std::int32_t>{0}, "feed_forward_length has 0, not in 1..");
    refused("llama.attention.shared_kv_layers", 1u, "attention.shared_kv_layers is 1, not in 0..0");
    refused("llama.attention.key_length_swa", 4u, "value_length_swa differs",
            [](GgufWriter& w) { w.set("llama.attention.value_length_swa", 2u); });
    refused("llama.attention.key_length_swa", 4u, "RoPE rotates more dimensions than the 4 of a head in layer 0",
            [](GgufWriter& w) { w.set("llama.attention.sliding_window", 16u); });
    const auto eight_experts = [](GgufWriter& w) {
        w.set("llama.expert_count", 8u);
        w.set("llama.expert_used_count", 3u);
    };
    refused("llama.expert_group_count", 3u, "expert_count 8 is not a multiple of expert_group_count 3", eight_experts);
    refused("llama.expert_group_count", 65u, "expert_group_count is 65, not in 0..64", eight_experts);
    refused("llama.expert_group_used_count", 1u, "expert_used_count is 3, more than 1 groups of 2 experts have",
            [&](GgufWriter& w) {
                eight_experts(w);
                w.set("llama.expert_group_count", 4u);
            });
    refused("llama.nextn_predict_layers", 1u, "nextn_predict_layers is 1, not in 0..0");
    refused("llama.attention.clamp_kqv", 8.f, "llama.attention.clamp_kqv is one that quire does not compute with");
    refused("llama.attention.causal", false,
            "llama.attention.causal is false, which quire does not support in the family llama");
    refused("llama.attention.sliding_window_pattern", std::vector<bool>{true, false, true},
            "a list of 3, not of a true or false for each of 1 layers");
    refused("llama.attention.sliding_window", -1, "sliding_window is -1");
    refused("general.architecture", "nosuch",
            "'nosuch', not one that quire runs (bert, cohere2, command-r, deepseek2, ern");
    refused("general.architecture", 5u, "general.architecture is an unsigned integer");
    refused("general.name", 5u, "general.name is an unsigned integer");
    for (const char* key : {"embedding_length", "block_count", "feed_forward_length", "attention.head_count",
                            "attention.layer_norm_rms_epsilon"})
        CHECK(load("llama", {.without = {key}}).error.find(std::string("llama.") + key + " is missing") !=
              std::string::npos);
    CHECK(load("llama", {.keys = [](GgufWriter& w) { w.set("llama.expert_count", 0u); }}).error == "");
}

TEST_CASE("numbers and flags of layers may be lists", "[config]") {
    const auto config = [](const std::string& architecture, const Edit& keys) {
        const Loaded got = load(architecture, {.keys = keys});
        CAPTURE(got.error);
        REQUIRE(got.config);
        return *got.config;
    };
    CHECK(config("llama", [](GgufWriter& w) {
              w.set("llama.attention.head_count", std::vector<std::int32_t>{4});
          }).n_heads == 4);
    for (std::uint32_t flag : {0u, 1u})
        CHECK(config("llama",
                     [&](GgufWriter& w) {
                         w.set("llama.attention.sliding_window", 16u);
                         w.set("llama.attention.sliding_window_pattern", std::vector<std::uint32_t>{flag});
                     })
                  .layers[0]
                  .window == int(16 * flag));
    refused("llama.attention.sliding_window_pattern", std::vector<std::int32_t>{2},
            "a list of 1, not of a true or false for each of 1 layers");
    const auto lfm2 = [&](const Edit& keys) {
        return config("lfm2", [&](GgufWriter& w) {
            w.set("lfm2.shortconv.l_cache", 3u);
            keys(w);
        });
    };
    const Loaded number = load("lfm2", {.keys = [](GgufWriter& w) {
                                   w.set("lfm2.shortconv.l_cache", 3u);
                                   w.set("lfm2.attention.recurrent_layers", 1u);
                               }});
    CHECK(number.error.find("lfm2.attention.recurrent_layers is no list of true or false") != std::string::npos);
    // Layers that recur have no heads.
    for (int recurs : {0, 1}) {
        const std::vector<std::int32_t> flags{recurs}, heads{recurs ? 0 : 4, 4};
        CHECK(lfm2([&](GgufWriter& w) { w.set("lfm2.attention.recurrent_layers", flags); }).layers[0].recurs() ==
              bool(recurs));
        const ModelConfig two = lfm2([&](GgufWriter& w) {
            w.set("lfm2.block_count", 2u);
            w.set("lfm2.attention.head_count", heads);
        });
        CHECK(two.layers[0].recurs() == bool(recurs));
        CHECK(two.layers[0].n_kv_heads == (recurs ? 0 : 2));
        CHECK(two.layers[1].n_kv_heads == 2);
    }
    refused("llama.attention.head_count", std::vector<std::int32_t>{0}, "attention.head_count has 0, not in 1..");
    const std::vector<std::int32_t> unlike{2, 4};
    refused("llama.attention.head_count", unlike, "attention.head_count has 2 and 4; quire runs only layers",
            [](GgufWriter& w) {
                w.set("llama.block_count", 2u);
                w.set("llama.attention.head_count_kv", 2u);
            });
}

TEST_CASE("Granite has RoPE unless its file says that it has none", "[config]") {
    for (const std::string family : {"granite", "granitehybrid"})
        for (std::optional<bool> key : {std::optional<bool>(), std::optional(false), std::optional(true)}) {
            const Loaded got = load(family, {.keys = [&](GgufWriter& w) {
                                        if (key) w.set(family + ".rope.scaling.finetuned", *key);
                                    }});
            CAPTURE(family, got.error);
            REQUIRE(got.config);
            CHECK(got.config->layers[0].rope == key.value_or(true));
        }
}

TEST_CASE("rope scaling is none, linear or yarn, with a factor that can be divided by", "[config]") {
    auto scaled = [](
                      const char* type, const Edit& more = [](GgufWriter&) {}) {
        return [=](GgufWriter& w) {
            w.set("llama.rope.scaling.type", type);
            w.set("llama.rope.scaling.factor", 4.f);
            more(w);
        };
    };
    CHECK(load("llama", {.keys = scaled("none")}).config->rope_factor == 1);
    const Loaded linear = load("llama", {.keys = scaled("linear")}),
                 yarn   = load("llama", {.keys = scaled("yarn", [](GgufWriter& w) {
                                           w.set("llama.rope.scaling.original_context_length", 32u);
                                           w.set("llama.rope.scaling.attn_factor", 0.5f);
                                           w.set("llama.rope.scaling.yarn_beta_fast", 16.f);
                                           w.set("llama.rope.scaling.yarn_beta_slow", 2.f);
                                           w.set("llama.rope.scaling.yarn_attn_factor", 1.5f);
                                       })});
    REQUIRE(linear.config);
    CHECK(linear.config->rope_scaling == RopeScaling::linear);
    CHECK(linear.config->rope_factor == 4);
    REQUIRE(yarn.config);
    CHECK(yarn.config->rope_scaling == RopeScaling::yarn);
    CHECK(yarn.config->rope_original_context == 32);
    CHECK(yarn.config->rope_attn_factor == 0.5f);
    CHECK(yarn.config->yarn_rounds);
    CHECK(yarn.config->yarn_beta_fast == 16);
    CHECK(yarn.config->yarn_beta_slow == 2);
    CHECK(yarn.config->yarn_attn_factor == 1.5f);
    CHECK(load("llama", {.keys = scaled("yarn")}).config->rope_original_context ==
          128); // the context it was trained with

    const Loaded exact = load("gpt-oss", {.keys = [](GgufWriter& w) {
                                  w.set("gpt-oss.rope.scaling.type", "yarn");
                                  w.set("gpt-oss.rope.scaling.factor", 32.f);
                              }});
    REQUIRE(exact.config);
    CHECK_FALSE(exact.config->yarn_rounds);

    const Loaded old = load("llama", {.keys = [](GgufWriter& w) { w.set("llama.rope.scale_linear", 2.f); }});
    REQUIRE(old.config);
    CHECK(old.config->rope_scaling == RopeScaling::linear);
    CHECK(old.config->rope_factor == 2);

    for (const char* type : {"linear", "yarn"})
        for (float factor : {0.f, no_number, inf, -2.f})
            refused("llama.rope.scaling.factor", factor, "rope.scaling.factor is", scaled(type));
    refused("llama.rope.scale_linear", 0.f, "rope.scale_linear is 0");
    refused("llama.rope.scaling.type", "dynamic", "'dynamic' is not one of none, linear, yarn, longrope");
    CHECK(load("llama", {.keys = [](GgufWriter& w) { w.set("llama.rope.scaling.type", "longrope"); }})
              .error.find("longrope, but tensor rope_factors_long.weight is missing") != std::string::npos);
    refused("llama.rope.scaling.type", 1u, "rope.scaling.type is an unsigned integer");
    refused("llama.rope.scaling.original_context_length", 0u, "original_context_length is 0", scaled("yarn"));
    refused("llama.rope.scaling.yarn_attn_factor", 0.f, "yarn_attn_factor is 0", scaled("yarn"));
    refused("llama.rope.scaling.yarn_beta_slow", 40.f, "yarn_beta_fast 32 is not above yarn_beta_slow 40",
            scaled("yarn"));
}

TEST_CASE("the vocabulary has at most as many tokens as the embedding has rows", "[config]") {
    auto tokens = [](std::size_t n) {
        return [=](GgufWriter& w) { w.set("tokenizer.ggml.tokens", std::vector<std::string>(n, "x")); };
    };
    CHECK(load("llama", {.keys = tokens(40)}).error == "");
    CHECK(load("llama", {.keys = tokens(39)}).config->vocab_size == 40); // padded
    CHECK(load("llama", {.keys = tokens(41)}).error.find("41 tokens, token_embd.weight only 40 rows") !=
          std::string::npos);
    refused("llama.vocab_size", 41u, "vocab_size is 41, not in 1..40");
    const std::string path = temporary();
    GgufWriter        w;
    w.set("general.architecture", "llama");
    REQUIRE(w.write(path)); // a vocabulary without a model
    CHECK(load(path).error.find("no tensors") != std::string::npos);
    unlink(path.c_str());
}

TEST_CASE("a tensor that is missing or of another shape is refused with both shapes", "[weights]") {
    CHECK(load("llama", {.without = {"output.weight"}}).output_is_embedding);
    CHECK_FALSE(load("llama", {}).output_is_embedding);
    for (const char* name :
         {"token_embd.weight", "output_norm.weight", "blk.0.attn_norm.weight", "blk.0.attn_q.weight",
          "blk.0.attn_k.weight", "blk.0.attn_v.weight", "blk.0.attn_output.weight", "blk.0.ffn_norm.weight",
          "blk.0.ffn_gate.weight", "blk.0.ffn_up.weight", "blk.0.ffn_down.weight"}) {
        CAPTURE(name);
        CHECK(load("llama", {.without = {name}}).error.find(cat("tensor ", name, " is missing")) != std::string::npos);
        CHECK(load("llama", {.dims = {{name, {16, 7}}}})
                  .error.find(cat("tensor ", name, " is [7 × 16], the model needs [")) != std::string::npos);
    }
    for (const char* name : {"blk.0.attn_q.bias", "blk.0.attn_k.bias", "blk.0.attn_v.bias"})
        CHECK(load("qwen2", {.without = {name}}).error.find(cat("tensor ", name, " is missing")) != std::string::npos);
    for (const char* name : {"blk.0.attn_q_norm.weight", "blk.0.attn_k_norm.weight"})
        CHECK(load("qwen3", {.without = {name}}).error.find(cat("tensor ", name, " is missing")) != std::string::npos);
    CHECK(load("llama", {.dims = {{"blk.0.attn_q.weight", {32, 16, 2}}}}).error.find("attn_q.weight is") !=
          std::string::npos); // 3-D
    CHECK(load("llama", {.types = {{"blk.0.attn_q.weight", DType::Q8_0}}}).error == "");
    CHECK(load("llama", {.types = {{"blk.0.attn_norm.weight", DType::F16}}})
              .error.find("has type F16; a vector has to be F32") != std::string::npos);
    CHECK(load("llama", {.more = {"rope_freqs.weight"}}).error.find("rope_freqs.weight is [1], the model needs [4]") !=
          std::string::npos);
    CHECK(load("llama", {.dims = {{"rope_freqs.weight", {4}}}, .more = {"rope_freqs.weight"}}).error == "");
    CHECK(load("llama", {.more = {"blk.0.attn_q.bias"}}).error.find("attn_q.bias is [1], the model needs [32]") !=
          std::string::npos);
    CHECK(load("llama", {.more = {"blk.0.ffn_down.bias"}}).error.find("ffn_down.bias is [1], the model needs [32]") !=
          std::string::npos);
    CHECK(load("llama", {.more = {"something.else"}})
              .error.find("something.else is one that quire does not compute with (in the family llama)") !=
          std::string::npos);
}

TEST_CASE("malformed files are refused in no time and without the memory that they claim", "[config]") {
    // The fault in these is the vocabulary, which is read elsewhere.
    const std::set<std::string> vocabulary{"missing_tokenizer_ggml_tokens.gguf",
                                           "type_tokens_scalar.gguf",
                                           "scores_too_short.gguf",
                                           "tokens_empty.gguf",
                                           "bos_out_of_range.gguf",
                                           "tokenizer_model_unknown.gguf",
                                           "merges_without_space.gguf"};
    const std::string           folder = reference("bad");
    std::ifstream               index(folder + "/index.json");
    int                         n = 0;
    for (const auto& entry : nlohmann::json::parse(index)) {
        const std::string name = entry["file"], path = folder + "/" + name;
        const bool        reject = entry["verdict"] == "reject" && !vocabulary.contains(name);
        CAPTURE(name);
        const Loaded got = load(path);
        if (reject) CHECK(got.error.find(name) != std::string::npos);
        if (vocabulary.contains(name)) CHECK(got.error == "");
        CHECK(std::count(got.error.begin(), got.error.end(), '\n') == 0);
        // again, in a child that may take 16 MB and a second of a processor
        const pid_t child = fork();
        if (child == 0) {
            std::ifstream statm("/proc/self/statm");
            rlim_t        pages = 0;
            statm >> pages;
            const rlimit limit{pages * 4096 + (16 << 20), pages * 4096 + (16 << 20)};
            const rlimit second{1, 1};
            if (setrlimit(RLIMIT_AS, &limit) != 0 || setrlimit(RLIMIT_CPU, &second) != 0) _exit(2);
            _exit(load(path).error == got.error ? 0 : 1);
        }
        int status = -1;
        waitpid(child, &status, 0);
        CHECK(status == 0);
        n++;
    }
    CHECK(n == 90);
    CHECK(load(folder + "/good.gguf").error == "");
    CHECK(load(folder + "/good-bpe.gguf").error == "");
}
