// quire.model_file.family: the differences between the families of models, as one table. Plain values, owns nothing.
//
// A family is a row of this table. What a file can say itself (numbers in its metadata, tensors that are there or not) is not
// repeated here: see quire.model_file.config and quire.model_file.weights.
export module quire.model_file.family;

import quire.core.std;

export namespace quire {

enum class NormKind : std::uint8_t {
    rms,   // RMSNorm
    layer, // LayerNorm, with or without a bias
    none   // the values themselves
};

// Which dimensions of a head RoPE rotates together: neighbours (2i, 2i + 1), or (i, i + rope_dim / 2) as in GPT-NeoX.
enum class RopePairs : std::uint8_t { none, interleaved, neox };

// How attention and feed-forward join the residual stream x.
enum class Residual : std::uint8_t {
    pre_norm,  // x += attention(norm(x)), x += ffn(norm(x))
    parallel,  // x += attention(h) + ffn(h) with one h = norm(x)
    sandwich,  // x += norm(attention(norm(x))), x += norm(ffn(norm(x)))
    post_norm, // x += norm(attention(x)), x += norm(ffn(x))
    normed,    // x = norm(x + attention(x)), x = norm(x + ffn(x)): BERT
};

// Of the feed-forward network; gated: activation(gate) · up.
enum class Activation : std::uint8_t {
    silu,
    gelu_tanh, // the approximation with tanh
    gelu_erf,  // exact
    relu,
    clamped_swiglu, // gpt-oss: g = min(gate, 7), u = clamp(up, -7, 7); g · sigmoid(1.702 g) · (u + 1)
    relu_squared,
    sigmoid,
};

// The operation that mixes the tokens of a sequence in a layer. All but attention keep a state of fixed size for a sequence.
enum class Mixer : std::uint8_t {
    attention,
    short_conv, // a causal convolution over a few tokens (LFM2)
    delta_rule, // the gated delta rule (Yang et al. 2024), behind such a convolution
    mamba2,     // a selective scan (Dao and Gu 2024, section 7), behind such a convolution
    none        // nothing: the layer is a feed-forward network
};

// How a router's scores become the weights of the experts it chose.
enum class Gating : std::uint8_t {
    softmax,       // over all experts
    sigmoid,       // of each
    softmax_chosen // over the chosen ones
};

// Queries grow with their position: q times 1 + scale · ln(1 + n), n the whole periods in position + offset. scale 0: they do not.
struct Temperature {
    float scale  = 0;
    int   period = 1, offset = 0; // tokens
};

// The biases that a file must have; it may have more.
enum class Biases : std::uint8_t { any, qkv, all };

struct Family {
    std::string_view name; // general.architecture
    RopePairs        rope       = RopePairs::neox;
    NormKind         norm       = NormKind::rms;
    Residual         residual   = Residual::pre_norm;
    Activation       activation = Activation::silu;
    bool             gated      = true; // the feed-forward network has a gate
    Biases           biases     = Biases::any;

    bool learned_positions = false; // vectors added to the embedding
    int  position_offset   = 0;     // row of position 0 among them, unless the file says
    bool qk_norm           = false; // a file must have norms of q and k; without this it may have them
    bool v_norm = false; // each head of V is normed without weights; without attn_v V is K as it is before its norm
    bool norm_after_rope = false; // these norms follow RoPE; else they come before it
    bool embedding_sqrt  = false; // embeddings are multiplied by sqrt(hidden)
    bool logits_divided  = false; // logit_scale divides; else it multiplies
    // Of each `window_period` layers the last sees every position, the others only the sliding window. 0: all have the window.
    int   window_period     = 0;
    float attention_softcap = 0, logit_softcap = 0; // where the file says nothing
    bool  softcaps       = false;                   // a file's keys of soft-caps count
    int   no_rope_period = 0;                       // the last of so many layers has no RoPE
    bool  yarn_rounds    = true;                    // the bounds of YaRN's ramp are whole pairs; no key says so
    bool  window_rope    = false;                   // in a file with a window only the layers that have it have RoPE
    // Layers with RoPE see only their own chunk of so many positions. A file whose sliding window is 0 has no chunks, no temperature, and RoPE
    // in all layers.
    int         chunk           = 0;
    bool        bare_qk_norm    = false; // layers with RoPE norm q and k without weights,
    int         no_norm_experts = 0;     // but not in a model with so many experts
    Temperature temperature     = {};    // of layers without RoPE
    // Layers with the window have a RoPE of their own: no scaling, this base unless the file says (0: as the other layers).
    bool  local_rope        = false;
    float local_rope_base   = 0;
    float attention_scale   = 0; // of q·k; 0: 1 / sqrt of the head's size
    int   wide_scale_layers = 0; // with so many layers q·k is scaled by sqrt(heads / hidden), not by the head's size
    bool  may_be_parallel   = false; // a file without ffn_norm is `parallel`

    Gating gating           = Gating::softmax;
    bool experts_normalised = false; // the weights of the chosen experts are divided by their sum, unless the file says
    bool weighs_input       = false; // an expert's weight multiplies its input, not its output
    bool dense_beside       = false; // a dense network runs beside the experts, with norms around both
    bool shared_expert      = false; // an expert runs for every token, where the file says nothing
    bool latent             = false; // multi-head latent attention
    bool sinks              = false; // attention has sinks
    bool encoder            = false; // every token sees all others; it embeds texts and generates none

    // The layers that are no attention. Which these are the file says, by its counts of KV heads or by a list; with an `attention_period` the
    // last of so many layers is attention where it does not.
    Mixer recurrent        = Mixer::attention;
    int   attention_period = 0;
    bool  grouped_heads = false; // neighbouring heads of the delta rule share a key; else heads that are n_groups apart
    bool  attention_gate =
        false; // attn_q makes a query and a gate for each head; sigmoid(gate) multiplies the head's result
    bool one_part    = false; // a layer is either a mixer or a feed-forward network
    bool rope_by_key = false; // no RoPE where the key rope.scaling.finetuned is false
};

// Alphabetical.
std::span<const Family> families();
const Family*           find_family(std::string_view name); // or nullptr
// Of a draft of EAGLE-3: a layer of Llama's kind, which runs beside another model only. families() does not have it.
const Family& eagle3_family();

} // namespace quire

module :private;

namespace quire {

using enum NormKind;
using enum Residual;
using enum Activation;
constexpr RopePairs interleaved = RopePairs::interleaved;

// clang-format off
constexpr std::array table{
    Family{.name = "bert", .rope = RopePairs::none, .norm = layer, .residual = normed, .activation = gelu_erf, .gated = false,
           .learned_positions = true, .encoder = true},
    Family{.name = "cohere2", .rope = interleaved, .norm = layer, .residual = parallel, .window_period = 4,
           .window_rope = true},
    Family{.name = "command-r", .rope = interleaved, .norm = layer, .residual = parallel},
    Family{.name = "deepseek2", .rope = interleaved, .latent = true},
    Family{.name = "ernie4_5", .rope = interleaved},
    Family{.name = "ernie4_5-moe", .rope = interleaved, .experts_normalised = true},
    Family{.name = "exaone4", .residual = post_norm, .qk_norm = true, .window_period = 4, .window_rope = true},
    Family{.name = "gemma", .activation = gelu_tanh, .embedding_sqrt = true},
    Family{.name = "gemma2", .residual = sandwich, .activation = gelu_tanh, .embedding_sqrt = true, .window_period = 2,
           .attention_softcap = 50, .logit_softcap = 30, .softcaps = true, .wide_scale_layers = 46},
    Family{.name = "gemma3", .residual = sandwich, .activation = gelu_tanh, .qk_norm = true, .embedding_sqrt = true,
           .window_period = 6, .softcaps = true, .local_rope = true, .local_rope_base = 10000,
           .wide_scale_layers = 62},
    Family{.name = "gemma4", .residual = sandwich, .activation = gelu_tanh, .qk_norm = true, .v_norm = true,
           .embedding_sqrt = true, .softcaps = true, .local_rope = true, .attention_scale = 1,
           .experts_normalised = true, .dense_beside = true},
    Family{.name = "glm4", .rope = interleaved, .residual = sandwich},
    Family{.name = "glm4moe", .gating = Gating::sigmoid},
    Family{.name = "gpt-oss", .activation = clamped_swiglu, .biases = Biases::all, .window_period = 2,
           .yarn_rounds = false, .gating = Gating::softmax_chosen, .sinks = true},
    Family{.name = "gpt2", .rope = RopePairs::none, .norm = layer, .activation = gelu_tanh, .gated = false,
           .biases = Biases::all, .learned_positions = true},
    Family{.name = "granite", .rope = interleaved, .logits_divided = true, .rope_by_key = true},
    Family{.name = "granitehybrid", .rope = interleaved, .logits_divided = true, .experts_normalised = true,
           .recurrent = Mixer::mamba2, .rope_by_key = true},
    Family{.name = "granitemoe", .rope = interleaved, .logits_divided = true, .experts_normalised = true,
           .rope_by_key = true},
    Family{.name = "hunyuan-dense", .qk_norm = true, .norm_after_rope = true},
    Family{.name = "hunyuan-moe", .qk_norm = true, .norm_after_rope = true, .experts_normalised = true},
    Family{.name = "lfm2", .qk_norm = true, .recurrent = Mixer::short_conv},
    Family{.name = "lfm2moe", .qk_norm = true, .gating = Gating::sigmoid, .experts_normalised = true,
           .recurrent = Mixer::short_conv},
    Family{.name = "llama", .rope = interleaved, .experts_normalised = true}, // and Mistral, Mixtral
    Family{.name = "llama4", .rope = interleaved, .no_rope_period = 4, .chunk = 8192, .bare_qk_norm = true,
           .no_norm_experts = 128, .temperature = {.scale = 0.1f, .period = 8192, .offset = 1},
           .gating = Gating::sigmoid, .weighs_input = true, .shared_expert = true},
    Family{.name = "mamba2", .rope = RopePairs::none, .recurrent = Mixer::mamba2, .one_part = true},
    Family{.name = "minimax-m2", .qk_norm = true, .experts_normalised = true},
    Family{.name = "mistral3", .rope = interleaved, .experts_normalised = true},
    Family{.name = "nemotron_h", .rope = RopePairs::none, .activation = relu_squared, .gated = false,
           .recurrent = Mixer::mamba2, .one_part = true},
    Family{.name = "nemotron_h_moe", .rope = RopePairs::none, .activation = relu_squared, .gated = false,
           .gating = Gating::sigmoid, .experts_normalised = true, .recurrent = Mixer::mamba2, .one_part = true},
    Family{.name = "nomic-bert", .norm = layer, .residual = normed, .encoder = true},
    Family{.name = "olmo2", .residual = post_norm, .qk_norm = true, .window_period = 4, .local_rope = true},
    Family{.name = "olmoe", .qk_norm = true},
    Family{.name = "opt", .rope = RopePairs::none, .norm = layer, .activation = relu, .gated = false,
           .biases = Biases::all, .learned_positions = true, .position_offset = 2},
    Family{.name = "phi2", .norm = layer, .residual = parallel, .activation = gelu_tanh, .gated = false,
           .biases = Biases::all},
    Family{.name = "phi3"},
    Family{.name = "qwen2", .biases = Biases::qkv},
    Family{.name = "qwen2moe", .biases = Biases::qkv},
    Family{.name = "qwen3", .qk_norm = true},
    Family{.name = "qwen35", .qk_norm = true, .recurrent = Mixer::delta_rule, .attention_period = 4,
           .attention_gate = true},
    Family{.name = "qwen35moe", .qk_norm = true, .experts_normalised = true, .recurrent = Mixer::delta_rule,
           .attention_period = 4, .attention_gate = true},
    Family{.name = "qwen3moe", .qk_norm = true, .experts_normalised = true},
    Family{.name = "qwen3next", .qk_norm = true, .experts_normalised = true, .recurrent = Mixer::delta_rule,
           .attention_period = 4, .grouped_heads = true, .attention_gate = true},
    Family{.name = "seed_oss", .biases = Biases::qkv},
    Family{.name = "smollm3", .rope = interleaved, .no_rope_period = 4},
    Family{.name = "stablelm", .norm = layer, .may_be_parallel = true},
    Family{.name = "starcoder2", .norm = layer, .activation = gelu_tanh, .gated = false, .biases = Biases::all},
};
// clang-format on

constexpr Family eagle3{.name = "eagle3", .rope = interleaved};

std::span<const Family> families() { return table; }

const Family& eagle3_family() { return eagle3; }

const Family* find_family(std::string_view name) {
    const auto found = std::ranges::find(table, name, &Family::name);
    return found == table.end() ? nullptr : &*found;
}

} // namespace quire
