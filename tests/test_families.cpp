// Models of families whose logits can be had in another way: from a plain formula in float64, or from another file that says the same.
#include <catch2/catch_test_macros.hpp>

#include "reference.h"

import quire.core.base;
import quire.core.std;
import quire.core.tensor;
import quire.engine.engine;
import quire.model_file.config;
import quire.model_file.gguf;
import quire.model_file.gguf_writer;
import quire.model_file.quants;
import quire.schedule.request;

#include "byte_tokenizer.h"
#include "edited_model.h"
#include "engine_tools.h"

using namespace quire;
using namespace quire::testing;

namespace {

// The logits behind the last of n tokens, from float32 K and V.
std::vector<float> logits_of(const std::string& path, const std::vector<Token>& tokens) {
    EngineOptions o;
    o.kv_type     = DType::F32;
    o.context     = 128;
    Engine engine = load(path, o);
    return run(engine, {greedy(tokens, 1)})[0].prompt_logits;
}

std::vector<Token> some_tokens(int n, int vocab, unsigned seed) {
    std::mt19937       random(seed);
    std::vector<Token> tokens;
    for (int i = 0; i < n; i++) tokens.push_back(Token(random() % unsigned(vocab)));
    return tokens;
}

// The largest difference, relative to the largest number.
template <class T>
double distance(const std::vector<float>& got, const std::vector<T>& want) {
    REQUIRE(got.size() == want.size());
    double worst = 0, largest = 0;
    for (std::size_t i = 0; i < got.size(); i++) {
        worst   = std::max(worst, std::abs(double(got[i]) - double(want[i])));
        largest = std::max(largest, std::abs(double(want[i])));
    }
    return worst / largest;
}

using Row = std::vector<double>;

// A transformer with RMS norms before attention and before its networks, as in LLaMA.
struct PlainShape {
    int    layers = 4, hidden = 32, heads = 4, kv_heads = 2, head_dim = 8, ff = 24, vocab = 270;
    int    experts = 0, used = 0, shared_ff = 0; // no experts: a dense network
    bool   neox = false, whole_norms = false;    // norms of all heads of q together, and of k
    bool   bare_norms = false, normalised = false;
    double embedding_scale = 1, residual_scale = 1, attention_scale = 0,
           logit_divisor = 1; // 0: 1 / sqrt of the head's size
};

// Writes such a model with random weights.
std::string write_plain(const std::string& architecture, const PlainShape& s,
                        const std::function<void(GgufWriter&, const std::string& prefix)>& keys) {
    GgufWriter        w;
    std::mt19937      random(7);
    const std::string prefix = architecture + ".";
    const auto        number = [&](const char* key, int value) { w.set(prefix + key, std::uint32_t(value)); };
    w.set("general.architecture", architecture);
    number("context_length", 512);
    number("embedding_length", s.hidden);
    number("block_count", s.layers);
    number("feed_forward_length", s.ff);
    number("attention.head_count", s.heads);
    number("attention.head_count_kv", s.kv_heads);
    w.set(prefix + "attention.layer_norm_rms_epsilon", 1e-5f);
    w.set(prefix + "rope.freq_base", 10000.0f);
    if (s.experts > 0) {
        number("expert_count", s.experts);
        number("expert_used_count", s.used);
    }
    keys(w, prefix);
    set_byte_tokenizer(w, s.vocab);

    const auto add = [&](const std::string& name, std::vector<std::int64_t> dims, float mean, float deviation) {
        std::normal_distribution<float> normal(mean, deviation);
        std::int64_t                    n = 1;
        for (std::int64_t d : dims) n *= d;
        std::vector<float> values(std::size_t(n), 0.0f);
        for (float& v : values) v = normal(random);
        add_floats(w, name, dims, values);
    };
    const auto matrix = [&](const std::string& name, int cols, int rows, int n = 1) {
        std::vector<std::int64_t> dims{cols, rows};
        if (n > 1) dims.push_back(n);
        add(name + ".weight", dims, 0, 1.5f / std::sqrt(float(cols)));
    };
    const auto vector = [&](const std::string& name, int n) { add(name + ".weight", {n}, 1, 0.3f); };
    add("token_embd.weight", {s.hidden, s.vocab}, 0, 1);
    vector("output_norm", s.hidden);
    matrix("output", s.hidden, s.vocab);
    const int q = s.heads * s.head_dim, kv = s.kv_heads * s.head_dim;
    for (int i = 0; i < s.layers; i++) {
        const auto name = [&](const char* part) { return cat("blk.", i, ".", part); };
        vector(name("attn_norm"), s.hidden);
        matrix(name("attn_q"), s.hidden, q);
        matrix(name("attn_k"), s.hidden, kv);
        matrix(name("attn_v"), s.hidden, kv);
        if (s.whole_norms) vector(name("attn_q_norm"), q), vector(name("attn_k_norm"), kv);
        matrix(name("attn_output"), q, s.hidden);
        vector(name("ffn_norm"), s.hidden);
        if (s.experts == 0) {
            matrix(name("ffn_gate"), s.hidden, s.ff);
            matrix(name("ffn_up"), s.hidden, s.ff);
            matrix(name("ffn_down"), s.ff, s.hidden);
            continue;
        }
        matrix(name("ffn_gate_inp"), s.hidden, s.experts);
        matrix(name("ffn_gate_exps"), s.hidden, s.ff, s.experts);
        matrix(name("ffn_up_exps"), s.hidden, s.ff, s.experts);
        matrix(name("ffn_down_exps"), s.ff, s.hidden, s.experts);
        if (s.shared_ff == 0) continue;
        matrix(name("ffn_gate_shexp"), s.hidden, s.shared_ff);
        matrix(name("ffn_up_shexp"), s.hidden, s.shared_ff);
        matrix(name("ffn_down_shexp"), s.shared_ff, s.hidden);
    }
    std::string path = temporary();
    REQUIRE(w.write(path));
    return path;
}

// The transformer in float64, one token after the other.
class Plain {
public:
    Plain(const std::string& path, const PlainShape& shape) : file_(value_of(Gguf::open(path))), s_(shape) {}

    Row logits(const std::vector<Token>& tokens) {
        Row x;
        k_.assign(std::size_t(s_.layers), {}), v_.assign(std::size_t(s_.layers), {});
        for (std::size_t position = 0; position < tokens.size(); position++) {
            x = times(row("token_embd.weight", tokens[position], s_.hidden), s_.embedding_scale);
            for (int i = 0; i < s_.layers; i++) {
                layer_ = cat("blk.", i, ".");
                add(x, attention(norm(x, layer_ + "attn_norm"), std::size_t(i), int(position)));
                add(x, network(norm(x, layer_ + "ffn_norm")));
            }
        }
        return times(product("output", norm(x, "output_norm"), s_.vocab), 1 / s_.logit_divisor);
    }

private:
    const std::vector<float>& numbers(const std::string& name) {
        const auto [at, is_new] = numbers_.try_emplace(name);
        if (is_new) at->second = numbers_of(file_, name);
        return at->second;
    }
    Row row(const std::string& name, std::int64_t i, int cols) {
        const auto from = numbers(name).begin() + std::ptrdiff_t(i) * cols;
        return {from, from + cols};
    }
    static Row times(Row x, double factor) {
        for (double& v : x) v *= factor;
        return x;
    }
    void add(Row& x, const Row& part) const {
        for (std::size_t i = 0; i < x.size(); i++) x[i] += s_.residual_scale * part[i];
    }
    static Row bare_norm(Row x) {
        double squares = 0;
        for (double v : x) squares += v * v;
        const double factor = 1 / std::sqrt(squares / double(x.size()) + double(1e-5f));
        return times(std::move(x), factor);
    }
    Row norm(const Row& x, const std::string& name) {
        Row                       out = bare_norm(x);
        const std::vector<float>& w   = numbers(name + ".weight");
        for (std::size_t i = 0; i < out.size(); i++) out[i] *= double(w[i]);
        return out;
    }
    // With matrix `at` of a stack.
    Row product(const std::string& name, const Row& x, int rows, int at = 0) {
        const std::vector<float>& w = numbers(name + ".weight");
        Row                       out(std::size_t(rows), 0.0);
        for (std::size_t r = 0; r < out.size(); r++)
            for (std::size_t c = 0; c < x.size(); c++)
                out[r] += double(w[(std::size_t(at) * out.size() + r) * x.size() + c]) * x[c];
        return out;
    }
    Row heads(Row x, int position) const {
        const auto dim = std::size_t(s_.head_dim), half = dim / 2;
        for (std::size_t first = 0; first < x.size(); first += dim) {
            for (std::size_t i = 0; i < half; i++) {
                const double angle  = position * std::pow(10000.0, -2.0 * double(i) / double(dim));
                double&      a      = x[first + (s_.neox ? i : 2 * i)];
                double&      b      = x[first + (s_.neox ? i + half : 2 * i + 1)];
                const double turned = a * std::cos(angle) - b * std::sin(angle);
                b                   = a * std::sin(angle) + b * std::cos(angle);
                a                   = turned;
            }
            if (!s_.bare_norms) continue;
            const auto from   = x.begin() + std::ptrdiff_t(first);
            const Row  normed = bare_norm(Row(from, from + std::ptrdiff_t(dim)));
            std::ranges::copy(normed, from);
        }
        return x;
    }
    Row attention(const Row& h, std::size_t layer, int position) {
        const int q_size = s_.heads * s_.head_dim, kv_size = s_.kv_heads * s_.head_dim;
        Row       q = product(layer_ + "attn_q", h, q_size), k = product(layer_ + "attn_k", h, kv_size);
        if (s_.whole_norms) q = norm(q, layer_ + "attn_q_norm"), k = norm(k, layer_ + "attn_k_norm");
        q = heads(q, position);
        k_[layer].push_back(heads(k, position));
        v_[layer].push_back(product(layer_ + "attn_v", h, kv_size));
        const double scale = s_.attention_scale > 0 ? s_.attention_scale : 1 / std::sqrt(double(s_.head_dim));
        Row          out(std::size_t(q_size), 0.0);
        for (int head = 0; head < s_.heads; head++) {
            const auto mine  = std::size_t(head * s_.head_dim),
                       other = std::size_t(head / (s_.heads / s_.kv_heads) * s_.head_dim);
            Row    weights;
            double sum = 0;
            for (const Row& key : k_[layer]) {
                double score = 0;
                for (std::size_t d = 0; d < std::size_t(s_.head_dim); d++) score += q[mine + d] * key[other + d];
                weights.push_back(std::exp(scale * score));
                sum += weights.back();
            }
            for (std::size_t t = 0; t < weights.size(); t++)
                for (std::size_t d = 0; d < std::size_t(s_.head_dim); d++)
                    out[mine + d] += weights[t] / sum * v_[layer][t][other + d];
        }
        return product(layer_ + "attn_output", out, s_.hidden);
    }
    Row gated(const std::string& suffix, const Row& h, int ff, int at = 0) {
        Row       gate = product(layer_ + "ffn_gate" + suffix, h, ff, at);
        const Row up   = product(layer_ + "ffn_up" + suffix, h, ff, at);
        for (std::size_t i = 0; i < gate.size(); i++) gate[i] *= up[i] / (1 + std::exp(-gate[i]));
        return product(layer_ + "ffn_down" + suffix, gate, s_.hidden, at);
    }
    Row network(const Row& h) {
        if (s_.experts == 0) return gated("", h, s_.ff);
        Row    scores = product(layer_ + "ffn_gate_inp", h, s_.experts);
        double all = 0, chosen = 0;
        for (double& v : scores) v = std::exp(v), all += v;
        std::vector<std::size_t> order(scores.size());
        std::iota(order.begin(), order.end(), std::size_t(0));
        std::ranges::sort(order, std::greater(), [&](std::size_t e) { return scores[e]; });
        order.resize(std::size_t(s_.used));
        for (std::size_t e : order) chosen += scores[e];
        Row out(std::size_t(s_.hidden), 0.0);
        for (std::size_t e : order) {
            const Row part = gated("_exps", h, s_.ff, int(e));
            for (std::size_t i = 0; i < out.size(); i++) out[i] += scores[e] / (s_.normalised ? chosen : all) * part[i];
        }
        if (s_.shared_ff == 0) return out;
        const Row part = gated("_shexp", h, s_.shared_ff);
        for (std::size_t i = 0; i < out.size(); i++) out[i] += part[i];
        return out;
    }

    Gguf                                      file_;
    PlainShape                                s_;
    std::string                               layer_; // the beginning of its tensors' names
    std::map<std::string, std::vector<float>> numbers_;
    std::vector<std::vector<Row>>             k_, v_; // by layer and token
};

constexpr auto no_keys = [](GgufWriter&, const std::string&) {};

// The logits of quire and of the plain formula.
double miss(const std::string& path, const PlainShape& shape) {
    const std::vector<Token> tokens = some_tokens(23, shape.vocab, 3);
    return distance(logits_of(path, tokens), Plain(path, shape).logits(tokens));
}

} // namespace

TEST_CASE("OLMoE: norms over all heads of q and k, and weights of the chosen experts as they are", "[families]") {
    PlainShape        shape{.experts = 6, .used = 2, .neox = true, .whole_norms = true};
    const std::string path = write_plain("olmoe", shape, no_keys);
    CHECK(miss(path, shape) < 1e-4);
    shape.normalised = true; // the test can see what it is for
    CHECK(miss(path, shape) > 1e-2);
}

TEST_CASE("Granite with experts: four scales, and weights of the chosen experts that sum up to 1", "[families]") {
    PlainShape        shape{.experts         = 5,
                            .used            = 3,
                            .shared_ff       = 20,
                            .normalised      = true,
                            .embedding_scale = 3,
                            .residual_scale  = 0.5,
                            .attention_scale = 0.25,
                            .logit_divisor   = 4};
    const std::string path = write_plain("granitemoe", shape, [](GgufWriter& w, const std::string& prefix) {
        w.set(prefix + "embedding_scale", 3.0f);
        w.set(prefix + "residual_scale", 0.5f);
        w.set(prefix + "attention.scale", 0.25f);
        w.set(prefix + "logit_scale", 4.0f);
        w.set(prefix + "expert_shared_feed_forward_length", 20u);
    });
    CHECK(miss(path, shape) < 1e-4);
    shape.neox = true;
    CHECK(miss(path, shape) > 1e-2);
}

TEST_CASE("a Llama 4 whose sliding window is 0 has RoPE in all layers, and no chunks", "[families]") {
    const PlainShape shape{.bare_norms = true};
    const auto       no_window = [](GgufWriter& w, const std::string& p) { w.set(p + "attention.sliding_window", 0u); };
    const std::string path     = write_plain("llama4", shape, no_window);
    const ModelConfig config   = value_of(read_config(value_of(Gguf::open(path))));
    for (const LayerConfig& l : config.layers) {
        CHECK(l.rope);
        CHECK(l.bare_norm);
        CHECK_FALSE(l.chunked);
        CHECK(l.window == 0);
        CHECK(l.temperature.scale == 0);
    }
    CHECK(miss(path, shape) < 1e-4);
    CHECK(miss(write_plain("llama4", shape, no_keys), shape) > 1e-2); // the fourth layer has no RoPE

    // Other files have it in three of four layers, whatever size of a window they name.
    for (bool named : {false, true}) {
        const std::string chunked = write_plain("llama4", shape, [&](GgufWriter& w, const std::string& p) {
            if (named) w.set(p + "attention.sliding_window", 8192u);
        });
        const ModelConfig c       = value_of(read_config(value_of(Gguf::open(chunked))));
        for (std::size_t i = 0; i < c.layers.size(); i++) {
            const bool full = i == 3;
            CHECK(c.layers[i].rope == !full);
            CHECK(c.layers[i].chunked == !full);
            CHECK(c.layers[i].window == (full ? 0 : 8192));
            CHECK((c.layers[i].temperature.scale > 0) == full);
        }
    }
}

// In a model of one layer K and V do not depend on q. So a factor of the last token's q is a factor of attention.scale for its logits.
TEST_CASE("queries of latent attention grow with their position", "[families]") {
    const std::string file      = reference("models/deepseek2-Q8_0.gguf");
    const auto        one_layer = [&](const std::function<void(GgufWriter&, const std::string&)>& keys) {
        return edited(
            file,
            {.keys =
                 [&](GgufWriter& w, const std::string& prefix) {
                     w.set(prefix + "block_count", 1u);
                     keys(w, prefix);
                 },
                    .drops = [](const std::string& name) { return name.starts_with("blk.") && !name.starts_with("blk.0."); }});
    };
    const float   scale  = 0.7f;
    constexpr int period = 9, n = 3 * period + 1; // the last token is the first of period 3
    const auto    grows = [=](GgufWriter& w, const std::string& prefix) {
        w.set(prefix + "attention.temperature_scale", scale);
        w.set(prefix + "attention.temperature_length", std::uint32_t(period));
    };
    const std::vector<Token> tokens = some_tokens(n, 600, 5), early(tokens.begin(), tokens.begin() + period);
    const double             before = 1 / std::sqrt(48.0), factor = 1 + double(scale) * std::log(4.0);
    const std::string        plain = one_layer(no_keys), grown = one_layer(grows),
                      scaled = one_layer([&](GgufWriter& w, const std::string& prefix) {
                          w.set(prefix + "attention.scale", float(before * factor));
                      });
    CHECK(distance(logits_of(grown, tokens), logits_of(scaled, tokens)) < 1e-3);
    CHECK(distance(logits_of(grown, tokens), logits_of(plain, tokens)) > 1e-2);
    CHECK(logits_of(grown, early) == logits_of(plain, early)); // within the first period nothing grows

    // Without a length of its own the period is the original context.
    const auto config = [&](const std::string& path) { return value_of(read_config(value_of(Gguf::open(path)))); };
    for (const LayerConfig& l : config(edited(file, {.keys = grows})).layers) CHECK(l.temperature.period == period);
    const ModelConfig other = config(edited(file, {.keys = [=](GgufWriter& w, const std::string& prefix) {
                                                w.set(prefix + "attention.temperature_scale", scale);
                                            }}));
    for (const LayerConfig& l : other.layers) CHECK(l.temperature.period == 128);
}

TEST_CASE("Qwen3-Next: q, k, v and gate of a group in one matrix are those of two matrices", "[families]") {
    constexpr int groups = 2, key = 64, heads = 4, value = 64, hidden = 256; // of the file
    // Rows of a tensor, in another order.
    const auto rows_of = [](const Gguf& file, std::string_view name, int first, int n) {
        const GgufTensor* t   = file.tensor(name);
        const std::size_t row = row_bytes(t->type, t->dims[0]);
        return std::span(t->data + std::size_t(first) * row, std::size_t(n) * row);
    };
    const auto next = [&](bool joined) {
        const auto tensors = [&](GgufWriter& w, const Gguf& file) {
            std::vector<std::byte> step, all;
            const auto             put = [&](std::vector<std::byte>& to, std::string_view name, int first, int n) {
                const auto rows = rows_of(file, name, first, n);
                to.insert(to.end(), rows.begin(), rows.end());
            };
            constexpr int of_group = heads / groups, values = of_group * value;
            for (int g = 0; g < groups; g++) {
                put(step, "blk.0.ssm_beta.weight", g * of_group, of_group);
                put(step, "blk.0.ssm_alpha.weight", g * of_group, of_group);
                put(all, "blk.0.attn_qkv.weight", g * key, key);
                put(all, "blk.0.attn_qkv.weight", (groups + g) * key, key);
                put(all, "blk.0.attn_qkv.weight", 2 * groups * key + g * values, values);
                put(all, "blk.0.attn_gate.weight", g * values, values);
            }
            w.add_tensor("blk.0.ssm_ba.weight", DType::Q4_K, {hidden, 2 * heads}, step);
            if (joined)
                w.add_tensor("blk.0.ssm_in.weight", DType::Q4_K, {hidden, 2 * (groups * key + heads * value)}, all);
        };
        std::set<std::string> without{"blk.0.ssm_beta.weight", "blk.0.ssm_alpha.weight"};
        if (joined) without.insert({"blk.0.attn_qkv.weight", "blk.0.attn_gate.weight"});
        return edited(reference("models/qwen35-k-Q4_K_M.gguf"),
                      {.architecture = "qwen3next", .without = without, .tensors = tensors});
    };
    const std::vector<Token> tokens = some_tokens(40, 600, 9);
    const std::vector<float> apart  = logits_of(next(false), tokens);
    CHECK(apart == logits_of(next(true), tokens));
    CHECK(apart != logits_of(reference("models/qwen35-k-Q4_K_M.gguf"), tokens)); // whose heads lie in another order
}

// Experts behind a projection to fewer numbers, and before one back, are experts of the products of the matrices.
TEST_CASE("Nemotron 3: experts in a latent space, and lists of what a layer's experts are", "[families]") {
    constexpr int hidden = 128, latent = 24, ff = 192, n = 5; // hidden and ff: of the file
    const auto    model = [&](bool folded, std::vector<std::int32_t> used) {
        const auto keys = [&](GgufWriter& w, const std::string& prefix) {
            w.set(prefix + "expert_count", std::uint32_t(n));
            w.set(prefix + "expert_used_count", used);
            w.set(prefix + "expert_feed_forward_length", std::vector<std::int32_t>{0, ff, 0, 0, ff, 0, ff});
            if (!folded) w.set(prefix + "moe_latent_size", std::uint32_t(latent));
        };
        const auto tensors = [&](GgufWriter& w, const Gguf&) {
            std::mt19937 random(11);
            const auto   matrix = [&](int rows, int cols) {
                std::normal_distribution<float> normal(0, 1 / std::sqrt(float(cols)));
                std::vector<float>              m(std::size_t(rows) * std::size_t(cols));
                for (float& v : m) v = normal(random);
                return m;
            };
            // of n matrices a with one b, or of one a with n matrices b
            const auto product = [](std::span<const float> a, std::span<const float> b, int rows, int inner, int cols) {
                std::vector<float> out;
                for (int r = 0; r < rows; r++)
                    for (int c = 0; c < cols; c++) {
                        double sum = 0;
                        for (int i = 0; i < inner; i++)
                            sum += double(a[std::size_t(r * inner + i)]) * double(b[std::size_t(i * cols + c)]);
                        out.push_back(float(sum));
                    }
                return out;
            };
            for (int layer : {1, 4, 6}) {
                const auto name = [&](const char* part) { return cat("blk.", layer, ".", part, ".weight"); };
                add_floats(w, name("ffn_gate_inp"), {hidden, n}, matrix(n, hidden));
                const auto into = matrix(latent, hidden), back = matrix(hidden, latent), up = matrix(n * ff, latent),
                           down = matrix(n * latent, ff);
                if (!folded) {
                    add_floats(w, name("ffn_latent_down"), {hidden, latent}, into);
                    add_floats(w, name("ffn_latent_up"), {latent, hidden}, back);
                    add_floats(w, name("ffn_up_exps"), {latent, ff, n}, up);
                    add_floats(w, name("ffn_down_exps"), {ff, latent, n}, down);
                    continue;
                }
                add_floats(w, name("ffn_up_exps"), {hidden, ff, n}, product(up, into, n * ff, latent, hidden));
                std::vector<float> downs;
                for (int e = 0; e < n; e++) {
                    const auto part =
                        product(back, std::span(down).subspan(std::size_t(e * latent * ff)), hidden, latent, ff);
                    downs.insert(downs.end(), part.begin(), part.end());
                }
                add_floats(w, name("ffn_down_exps"), {ff, hidden, n}, downs);
            }
        };
        return edited(
            reference("models/nemotron_h-Q8_0.gguf"),
            {.architecture = "nemotron_h_moe", .keys = keys, .tensors = tensors, .drops = [](const std::string& t) {
                 return t.contains(".ffn_up.") || t.contains(".ffn_down.");
             }});
    };
    const std::vector<std::int32_t> used{0, 2, 0, 0, 2, 0, 2};
    const std::vector<Token>        tokens = some_tokens(30, 600, 13);
    CHECK(distance(logits_of(model(false, used), tokens), logits_of(model(true, used), tokens)) < 1e-3);

    const auto refused = [&](std::vector<std::int32_t> list) {
        const Result<ModelConfig> config = read_config(value_of(Gguf::open(model(false, std::move(list)))));
        return config ? std::string() : config.error().message;
    };
    CHECK(refused({0, 2, 0, 0, 3, 0, 2})
              .contains("nemotron_h_moe.expert_used_count has 2 and 3; quire runs only equal numbers"));
    CHECK(refused({0, 0, 0, 0, 0, 0, 0}).contains("nemotron_h_moe.expert_used_count has no number from 1 on"));
    CHECK(refused({0, 2}).contains("is an array of 2, not of an integer for each of 7 layers"));
}
