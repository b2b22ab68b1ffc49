// quire.model_file.config: the hyper-parameters of a model file, validated, with defaults filled in. Plain values, owns nothing.
export module quire.model_file.config;

import quire.core.base;
export import quire.model_file.family;
export import quire.model_file.gguf;
import quire.model_file.keys;

export namespace quire {

enum class RopeScaling { none, linear, yarn, longrope };

// A mixture of experts: of `n` networks, each token runs `used`.
struct ExpertConfig {
    int    n = 0, used = 0; // 0: the model has none
    int    ff_size     = 0;
    int    latent_size = 0; // of the projections that the experts read and write; 0: they read and write hidden states
    int    shared_ff_size = 0; // of the network that every token runs in addition; 0: none
    Gating gating         = Gating::softmax;
    bool   normalised     = false; // weights are divided by their sum
    float  scale          = 1;     // factor of the weights, after the division
    // The experts stand in groups of equal size; a token chooses experts of its n_groups_used best groups. One group: all are.
    int n_groups = 1, n_groups_used = 1;
};

// Multi-head latent attention (DeepSeek-V2, section 2.1): the cache holds one row of kv_rank + rope_dim numbers for a token.
struct LatentConfig {
    int q_rank = 0, kv_rank = 0; // q_rank 0: q is projected directly
    int nope_dim  = 0;           // of a query's head: the part without RoPE, before the rope_dim with it
    int value_dim = 0;           // of a head of the output
};

// The layers that keep a state for a sequence (Family::recurrent); all of a model have one shape.
struct RecurrentConfig {
    int taps     = 0; // 0: no layer recurs. Tokens that the causal convolution sees, with the current one
    int channels = 0; // that it runs over
    int width    = 0; // of the result, before the last projection
    int n_heads  = 0,
        n_groups = 0; // of the recurrence: heads of a group share q and k; 0: there is only the convolution
    int key_dim = 0, value_dim = 0; // of a head's matrix
};

// How the hidden states of a text become one vector: the mean of all, or the state of the first or of the last token. `rank`: a score, from the
// state of one token.
enum class Pooling : std::uint8_t { mean, first, last, rank };

// The recurrent state of a layer for one sequence, in float32: the last inputs of a causal convolution, [conv_steps][conv_channels], then
// a matrix for each head, [heads][rows][cols], on a line of 256 bytes: of the gated delta rule (Yang et al. 2024) [v head][k dim][v dim], of
// Mamba-2 (Dao and Gu 2024) [head][state size][head dim].
struct StateShape {
    int conv_steps = 0, conv_channels = 0; // a kernel of K taps keeps K - 1 inputs
    int heads = 0, rows = 0, cols = 0;

    std::int64_t conv_floats() const { return (std::int64_t(conv_steps) * conv_channels + 63) / 64 * 64; }
    std::int64_t floats() const { return conv_floats() + std::int64_t(heads) * rows * cols; } // 0: there is none
    std::size_t  bytes() const { return std::size_t(floats()) * sizeof(float); }
    bool         operator==(const StateShape&) const = default;
};

struct LayerConfig {
    int         window       = 0;     // position i sees i-window+1..i; 0 = all
    bool        chunked      = false; // position i sees only the positions of its own chunk, each of `window`
    bool        rope         = true;
    bool        local_rope   = false; // base rope_base_local and no scaling
    bool        bare_norm    = false; // q and k are normed without weights
    bool        experts      = false;
    Temperature temperature  = {};
    Mixer       mixer        = Mixer::attention;
    bool        feed_forward = true; // or experts
    // The KV heads of the layer, and the dimensions of their K (as of the heads of Q) and V; no KV heads: the layer does not attend.
    int        n_kv_heads = 0, head_dim = 0, value_dim = 0;
    int        ff_size   = 0;  // without experts, or beside them
    int        kv_source = -1; // the layer whose K and V it reads, and which comes before it; -1: its own
    StateShape state     = {};

    bool attends() const { return n_kv_heads > 0; }
    bool keeps_kv() const { return attends() && kv_source < 0; }
    bool recurs() const { return mixer != Mixer::attention && mixer != Mixer::none; }
    bool keeps_state() const { return state.floats() > 0; }
};

// The inputs of an EAGLE-3 draft (Li et al. 2025) from another model, its target: the residual before three of its layers.
struct EagleConfig {
    std::array<int, 3> target_layers{}; // the number of the target's layers: the residual behind the last one
    int                target_hidden_size   = 0;
    bool               norm_before_fc       = false; // the three are normed together before they are projected
    bool               norm_before_residual = false; // the layer's residual begins with the normed state
};

// One transformer's hyper-parameters, from `<architecture>.*` keys. Every number here is safe to compute with.
struct ModelConfig {
    const Family* family = nullptr;
    std::string   architecture_name;
    std::string   name; // general.name, or the file's name
    int           vocab_size      = 0;
    int           context_length  = 0; // trained length in tokens
    int           hidden_size     = 0;
    int           n_layers        = 0;
    int           n_extra_layers  = 0;     // of the file behind these: they predict further tokens
    bool          mtp             = false; // the first of them is read, and stands behind the n_layers in `layers`
    int           n_heads         = 0;
    int           n_kv_heads      = 0; // this, head_dim and value_dim: the largest of the layers
    int           head_dim        = 0; // of Q and of K in the cache
    int           value_dim       = 0; // of V
    int           ff_size         = 0; // of layers without experts, the largest
    int           input_size      = 0; // numbers of a token that each layer has for itself; 0: it has none
    float         norm_eps        = 0;
    int           rope_dim        = 0; // rotated dimensions of a head, even
    int           rope_dim_local  = 0; // likewise, with LayerConfig::local_rope
    float         rope_base       = 10000;
    float         rope_base_local = 10000; // LayerConfig::local_rope
    RopeScaling   rope_scaling    = RopeScaling::none;
    float         rope_factor     = 1;
    int           rope_original_context = 0; // yarn, longrope
    float         rope_attn_factor      = 1; // multiplies cosine and sine, in addition to YaRN's own factor
    bool          yarn_scales_rope      = true;
    bool          yarn_rounds           = true; // the bounds of YaRN's ramp are whole pairs
    float         yarn_beta_fast = 32, yarn_beta_slow = 1;
    float         yarn_attn_factor  = 0; // in place of YaRN's own factor; 0: none
    int           position_offset   = 0; // row of position 0 in the learned vectors
    float         embedding_scale   = 1;
    float         attention_scale   = 1;                    // of q·k
    float         attention_softcap = 0, logit_softcap = 0; // x → cap · tanh(x / cap); 0: not at all
    float         residual_scale = 1;                       // of the outputs of attention and feed-forward
    float         logit_scale    = 1;
    int           sliding_window = 0; // of the layers that have one; 0: none has
    Pooling       pooling        = Pooling::mean;
    int           classes        = 1; // that a reranker tells apart: one score, or yes and no
    Token         separator = -1; // ends a reranker's first text, where the tokens of the second are of another type
    ExpertConfig  experts;
    std::optional<LatentConfig> latent;
    RecurrentConfig             recurrent; // of the layers that recur
    std::vector<LayerConfig>    layers;
    std::optional<EagleConfig>  eagle; // of a draft
    // The draft of EAGLE-3 that guesses for this model; its layer stands behind the n_layers in `layers`. Null: none.
    std::shared_ptr<const ModelConfig> draft;
};

// True for an architecture that the format knows and quire cannot run: such a file can still be looked at.
bool is_foreign_architecture(std::string_view name);

// `mtp`: with the layer for multi-token prediction. Error: the first key that is missing, of the wrong type, or makes no sense, with its
// value; or that the file has no such layer.
Result<ModelConfig> read_config(const Gguf& file, bool mtp = false);
// Of two sets of RoPE factors (longrope): whether a context takes those of long ones. Its last token is never read, so that one more token than
// the original context does not.
bool uses_long_rope(const ModelConfig& config, int context) { return context - 1 > config.rope_original_context; }

// True for a draft of EAGLE-3 (general.architecture "eagle3"), which is no model of its own.
bool is_eagle_draft(const Gguf& file);
// The config of such a draft, with `eagle` and without a vocabulary, which is its target's. Error: as of read_config().
Result<ModelConfig> read_eagle_config(const Gguf& file);

} // namespace quire

module :private;

namespace quire {

// Names of the GGUF format document that quire cannot run.
constexpr std::array<std::string_view, 8> other_names{"falcon",  "starcoder", "mpt",  "bloom",
                                                      "gptneox", "mamba",     "rwkv", "bert"};

bool is_foreign_architecture(std::string_view name) {
    return std::ranges::find(other_names, name) != other_names.end() || name == eagle3_family().name;
}

void read_rope(Keys& keys, ModelConfig& c, int longest) {
    c.rope_dim = keys.integer("rope.dimension_count", longest, 2, std::max(longest, 2));
    // YaRN divides by the logarithm of the base, and a base of 1 or less would turn every pair alike
    c.rope_base = keys.number("rope.freq_base", 10000.0, 1);
    if (c.rope_dim % 2 != 0) keys.refuse(cat("rope.dimension_count is ", c.rope_dim, ", an odd number"));
    if (c.rope_dim > longest)
        keys.refuse(cat("rope.dimension_count is ", c.rope_dim, ", more than the ", longest, " of a head"));
    const float local   = c.family->local_rope_base > 0 ? c.family->local_rope_base : c.rope_base;
    c.rope_base_local   = keys.number("rope.freq_base_swa", double(local), 1);
    const int in_window = keys.integer("attention.key_length_swa", longest, 1, 512);
    c.rope_dim_local =
        keys.integer("rope.dimension_count_swa", std::min(c.rope_dim, in_window), 2, std::max(in_window, 2));
    if (c.rope_dim_local % 2 != 0)
        keys.refuse(cat("rope.dimension_count_swa is ", c.rope_dim_local, ", an odd number"));
    if (!c.family->local_rope && c.rope_base_local != c.rope_base)
        keys.refuse(
            cat("rope.freq_base_swa is ", c.rope_base_local, ", which the family ", c.family->name, " has no use for"));

    // Files from the time when there was one type have "rope.scale_linear".
    const bool        old  = keys.has("rope.scale_linear") && !keys.has("rope.scaling.type");
    const std::string type = keys.text("rope.scaling.type", old ? "linear" : "none");
    if (type == "linear") c.rope_scaling = RopeScaling::linear;
    else if (type == "yarn") c.rope_scaling = RopeScaling::yarn;
    else if (type == "longrope") c.rope_scaling = RopeScaling::longrope;
    else if (type != "none")
        keys.refuse(cat("rope.scaling.type ", quote(type), " is not one of none, linear, yarn, longrope"));
    // Files with tensors rope_factors_long and rope_factors_short need not name the type.
    c.rope_original_context = keys.integer("rope.scaling.original_context_length", c.context_length, 1, 1 << 30);
    c.rope_attn_factor      = keys.number("rope.scaling.attn_factor", 1.0, 0);
    if (c.rope_scaling == RopeScaling::none || c.rope_scaling == RopeScaling::longrope) return;
    c.rope_factor =
        keys.number(old ? "rope.scale_linear" : "rope.scaling.factor", old ? std::nullopt : std::optional(1.0), 0);
    if (c.rope_scaling != RopeScaling::yarn) return;
    c.yarn_rounds    = c.family->yarn_rounds;
    c.yarn_beta_fast = keys.number("rope.scaling.yarn_beta_fast", 32.0, 0);
    c.yarn_beta_slow = keys.number("rope.scaling.yarn_beta_slow", 1.0, 0);
    if (keys.has("rope.scaling.yarn_attn_factor"))
        c.yarn_attn_factor = keys.number("rope.scaling.yarn_attn_factor", {}, 0);
    if (c.yarn_beta_fast <= c.yarn_beta_slow)
        keys.refuse(
            cat("rope.scaling.yarn_beta_fast ", c.yarn_beta_fast, " is not above yarn_beta_slow ", c.yarn_beta_slow));
}

// The layers without attention: by counts of KV heads, where 0 means none, or by a list, or each but the last of a period. Where a layer is one
// part, it is a feed-forward network if it has a width of one.
std::vector<Mixer> read_mixers(Keys& keys, const ModelConfig& c, const std::vector<int>& ff_sizes,
                               const std::vector<int>& kv_heads) {
    const Family&      f = *c.family;
    std::vector<Mixer> mixers(std::size_t(c.n_layers), c.n_heads > 0 ? Mixer::attention : f.recurrent);
    if (f.recurrent == Mixer::attention) return mixers;
    const std::vector<bool> list   = keys.flags("attention.recurrent_layers", c.n_layers + c.n_extra_layers);
    const int               period = keys.integer("full_attention_interval", f.attention_period, 0, 1 << 20);
    for (int i = 0; i < c.n_layers && !keys.error(); i++) {
        const auto at    = std::size_t(i);
        const bool other = !list.empty() ? bool(list[at]) : period > 0 ? (i + 1) % period != 0 : kv_heads[at] == 0;
        if (other) mixers[at] = f.recurrent;
        else if (kv_heads[at] == 0)
            keys.refuse(cat(keys.full("attention.head_count_kv"), " or attention.head_count is 0 in layer ", i,
                            ", which has attention"));
        if (f.one_part && ff_sizes[at] > 0) mixers[at] = Mixer::none;
    }
    return mixers;
}

// The limits of the kernels.
constexpr int most_taps = 16, most_key_dim = 256, most_value_dim = 512;

void read_recurrence(Keys& keys, RecurrentConfig& r) {
    r.taps     = keys.integer("ssm.conv_kernel", {}, 2, most_taps);
    r.key_dim  = keys.integer("ssm.state_size", {}, 1, most_key_dim);
    r.n_heads  = keys.integer("ssm.time_step_rank", {}, 1, 1 << 12);
    r.n_groups = keys.integer("ssm.group_count", {}, 1, 1 << 12);
    r.width    = keys.integer("ssm.inner_size", {}, 1, 1 << 20);
    if (keys.error()) return;
    r.value_dim = r.width / r.n_heads;
    if (r.width % r.n_heads != 0 || r.value_dim > most_value_dim)
        keys.refuse(cat("ssm.inner_size ", r.width, " is not a multiple, of up to ", most_value_dim,
                        ", of ssm.time_step_rank ", r.n_heads));
    if (r.n_heads % r.n_groups != 0 || r.width % r.n_groups != 0)
        keys.refuse(cat("ssm.time_step_rank ", r.n_heads, " is not a multiple of ssm.group_count ", r.n_groups));
    r.channels = 2 * r.n_groups * r.key_dim + r.width;
}

// The shape of the states.
void read_recurrent(Keys& keys, ModelConfig& c) {
    if (!std::ranges::any_of(c.layers, &LayerConfig::recurs)) return;
    RecurrentConfig& r = c.recurrent;
    if (c.family->recurrent == Mixer::short_conv) {
        r.taps     = keys.integer("shortconv.l_cache", {}, 2, most_taps);
        r.channels = r.width = c.hidden_size;
    } else read_recurrence(keys, r);
    for (LayerConfig& l : c.layers)
        if (l.recurs()) l.state = {r.taps - 1, r.channels, r.n_heads, r.key_dim, r.value_dim};
}

// The last layers may have no K and V: they read those of the last layer before them whose window is theirs.
void share_kv(Keys& keys, ModelConfig& c) {
    const int own = c.n_layers - keys.integer("attention.shared_kv_layers", 0, 0, c.n_layers - 1);
    for (int i = own; i < c.n_layers && !keys.error(); i++) {
        LayerConfig& l = c.layers[std::size_t(i)];
        for (int j = 0; j < own; j++)
            if (c.layers[std::size_t(j)].window == l.window) l.kv_source = j;
        if (l.kv_source < 0 || c.layers[std::size_t(l.kv_source)].n_kv_heads != l.n_kv_heads)
            keys.refuse(
                cat(keys.full("attention.shared_kv_layers"), " leaves no layer whose K and V layer ", i, " can read"));
    }
}

// Which layers have a window, RoPE and experts, and their sizes.
void read_layers(Keys& keys, ModelConfig& c, const std::vector<int>& ff_sizes, const std::vector<int>& kv_heads) {
    const Family&      f      = *c.family;
    std::vector<Mixer> mixers = read_mixers(keys, c, ff_sizes, kv_heads);
    const int          n      = c.n_layers + int(c.mtp);
    mixers.resize(std::size_t(n), Mixer::attention);
    c.sliding_window = keys.integer("attention.sliding_window", 0, 0, 1 << 30);
    const std::vector<bool> listed =
        keys.flags("attention.sliding_window_pattern", c.n_layers + c.n_extra_layers, true);
    const int period =
        listed.empty() ? keys.integer("attention.sliding_window_pattern", f.window_period, 0, 1 << 20) : 0;
    const int dense = keys.integer("leading_dense_block_count", 0, 0, std::max(c.n_layers, 1));
    const int step = keys.integer("interleave_moe_layer_step", 1, 0, 1 << 20); // of so many layers the last has experts
    Temperature temperature = f.temperature;
    if (keys.has("attention.temperature_scale")) {
        temperature = {keys.number("attention.temperature_scale", {}, -1),
                       keys.integer("attention.temperature_length", std::max(c.rope_original_context, 1), 1, 1 << 30),
                       0};
        if (f.temperature.scale > 0)
            keys.refuse("attention.temperature_scale is of a family whose temperature is fixed");
    }
    const bool chunks = f.chunk > 0 && (c.sliding_window > 0 || !keys.has("attention.sliding_window"));
    if (f.chunk > 0 && !chunks) temperature = {};
    const int no_rope_period = f.chunk > 0 && !chunks ? 0 : f.no_rope_period;
    const int window_dim = keys.integer("attention.key_length_swa", c.head_dim, c.n_heads > 0, c.latent ? 4096 : 512);
    if (keys.integer("attention.value_length_swa", window_dim, c.n_heads > 0, 4096) != window_dim)
        keys.refuse("attention.value_length_swa differs from attention.key_length_swa, which quire does not support");
    if (keys.error()) return;
    for (int i = 0; i < n; i++) {
        LayerConfig& l   = c.layers.emplace_back();
        const bool   all = !listed.empty() ? !listed[std::size_t(i)] : period > 0 && (i + 1) % period == 0;
        l.window         = all || f.chunk > 0 ? 0 : c.sliding_window;
        l.rope           = f.rope != RopePairs::none && (no_rope_period == 0 || (i + 1) % no_rope_period != 0) &&
                 (!f.window_rope || c.sliding_window == 0 || l.window > 0) &&
                 mixers[std::size_t(i)] == Mixer::attention &&
                 (!f.rope_by_key || keys.flag("rope.scaling.finetuned", true));
        l.mixer        = mixers[std::size_t(i)];
        l.feed_forward = !f.one_part || l.mixer == Mixer::none;
        l.local_rope   = f.local_rope && l.window > 0;
        l.experts      = l.feed_forward && c.experts.n > 0 && i >= dense && step > 0 && (i + 1) % step == 0;
        l.bare_norm    = f.bare_qk_norm && l.rope && c.experts.n != f.no_norm_experts;
        l.chunked      = chunks && l.rope;
        if (l.chunked) l.window = f.chunk;
        if (f.temperature.scale == 0 || !l.rope) l.temperature = temperature;
        l.ff_size = l.feed_forward ? ff_sizes[std::size_t(i)] : 0;
        if (l.mixer != Mixer::attention) continue;
        l.n_kv_heads = kv_heads[std::size_t(i)];
        l.head_dim   = l.window > 0 ? window_dim : c.head_dim;
        l.value_dim  = l.window > 0 && !c.latent ? window_dim : c.value_dim;
        if (l.rope && !c.latent && (l.local_rope ? c.rope_dim_local : c.rope_dim) > l.head_dim)
            keys.refuse(cat("RoPE rotates more dimensions than the ", l.head_dim, " of a head in layer ", i));
    }
    if (const LayerConfig& l = c.layers.back(); c.mtp && (l.window > 0 || l.n_kv_heads == 0))
        keys.refuse(cat("quire does not run a layer for multi-token prediction ",
                        l.window > 0 ? "that has a window" : "without KV heads"));
    c.head_dim  = std::ranges::max_element(c.layers, {}, &LayerConfig::head_dim)->head_dim;
    c.value_dim = std::ranges::max_element(c.layers, {}, &LayerConfig::value_dim)->value_dim;
    share_kv(keys, c);
    read_recurrent(keys, c);
}

static bool has_choice_bias(const GgufTensor& t) { return t.name.ends_with(".exp_probs_b.bias"); }

void read_experts(const Gguf& file, Keys& keys, ModelConfig& c) {
    ExpertConfig& e = c.experts;
    e.n             = keys.integer("expert_count", 0, 0, 1 << 12);
    if (e.n == 0) return;
    const int n_layers = c.n_layers + c.n_extra_layers;
    e.used             = keys.for_layers("expert_used_count", {}, 1, std::min(e.n, 64), n_layers);
    e.ff_size          = keys.for_layers("expert_feed_forward_length", c.ff_size, 1, 1 << 24, n_layers);
    e.latent_size      = keys.integer("moe_latent_size", 0, 0, 1 << 20);
    e.normalised       = keys.flag("expert_weights_norm", c.family->experts_normalised);
    e.scale            = keys.number("expert_weights_scale", 1.0, -1e30);
    if (e.scale == 0) e.scale = 1; // converters write 0 for no scale
    const int shared_count = keys.integer("expert_shared_count", c.family->shared_expert, 0, 1 << 10);
    e.shared_ff_size =
        keys.integer("expert_shared_feed_forward_length", std::int64_t(shared_count) * e.ff_size, 0, 1 << 24);
    switch (keys.integer("expert_gating_func", 0, 0, 3)) {
        case 1: e.gating = Gating::softmax; break;
        case 2: e.gating = Gating::sigmoid; break;
        case 3: e.gating = Gating::softmax_chosen; break;
        default: // DeepSeek-V3 came without the key at first; it and not V2 has biases of the choice
            e.gating = c.family->latent && std::ranges::any_of(file.tensors(), has_choice_bias) ? Gating::sigmoid
                                                                                                : c.family->gating;
    }
    e.n_groups      = std::max(keys.integer("expert_group_count", 1, 0, 64), 1);
    e.n_groups_used = std::max(keys.integer("expert_group_used_count", e.n_groups, 0, e.n_groups), 1);
    if (keys.error() || e.n_groups == 1) return;
    if (e.n % e.n_groups != 0)
        keys.refuse(cat("expert_count ", e.n, " is not a multiple of expert_group_count ", e.n_groups));
    else if (e.used > e.n / e.n_groups * e.n_groups_used)
        keys.refuse(cat("expert_used_count is ", e.used, ", more than ", e.n_groups_used, " groups of ",
                        e.n / e.n_groups, " experts have"));
}

// The sizes of heads.
void read_heads(Keys& keys, ModelConfig& c, std::vector<int>& kv_heads) {
    const int least    = c.family->recurrent == Mixer::attention; // else some layers, or all, have no attention
    const int n_layers = c.n_layers + c.n_extra_layers;
    const std::vector<int> heads = keys.by_layer("attention.head_count", {}, least, 1 << 16, n_layers);
    c.n_heads                    = heads.empty() ? 0 : *std::ranges::max_element(heads);
    kv_heads                     = keys.by_layer("attention.head_count_kv", c.n_heads, least, c.n_heads, n_layers);
    if (c.n_heads == 0) return;
    if (keys.error()) return;
    for (std::size_t i = 0; i < heads.size(); i++) {
        if (heads[i] == 0) kv_heads[i] = 0;
        else if (heads[i] != c.n_heads)
            keys.refuse(cat(keys.full("attention.head_count"), " has ", heads[i], " and ", c.n_heads,
                            "; quire runs only layers that have the same number of heads"));
    }
    c.n_kv_heads = *std::ranges::max_element(kv_heads);
    for (int n : kv_heads)
        if (n > 0 && c.n_heads % n != 0)
            keys.refuse(cat("attention.head_count ", c.n_heads, " is not a multiple of attention.head_count_kv ", n));
    if (!keys.has("attention.key_length") && c.hidden_size % c.n_heads != 0)
        keys.refuse(cat("embedding_length ", c.hidden_size, " is not a multiple of attention.head_count ", c.n_heads));
    const int most = c.family->latent ? 4096 : 512;
    c.head_dim     = keys.integer("attention.key_length", c.hidden_size / c.n_heads, 1, most);
    c.value_dim    = keys.integer("attention.value_length", c.head_dim, 1, most);
    if (!c.family->latent) {
        if (!keys.error() && c.value_dim != c.head_dim)
            keys.refuse(cat("attention.value_length ", c.value_dim, " differs from attention.key_length ", c.head_dim,
                            ", which quire does not support"));
        return;
    }
    LatentConfig l;
    l.kv_rank     = keys.integer("attention.kv_lora_rank", {}, 1, 4096);
    l.q_rank      = keys.integer("attention.q_lora_rank", 0, 0, 1 << 16);
    c.rope_dim    = keys.integer("rope.dimension_count", {}, 2, 512);
    l.value_dim   = keys.integer("attention.value_length_mla", {}, 1, 512);
    const int key = keys.integer("attention.key_length_mla", {}, 1, 1024);
    if (keys.error()) return;
    if (c.n_kv_heads != 1)
        keys.refuse(cat("attention.head_count_kv is ", c.n_kv_heads,
                        ", a file from before latent attention kept one row a token; convert the model again"));
    if (c.head_dim != l.kv_rank + c.rope_dim)
        keys.refuse(cat("attention.key_length ", c.head_dim, " is not attention.kv_lora_rank ", l.kv_rank,
                        " + rope.dimension_count ", c.rope_dim));
    if (c.value_dim != l.kv_rank)
        keys.refuse(cat("attention.value_length ", c.value_dim, " is not attention.kv_lora_rank ", l.kv_rank));
    if (key <= c.rope_dim)
        keys.refuse(cat("attention.key_length_mla ", key, " is not above rope.dimension_count ", c.rope_dim));
    l.nope_dim = key - c.rope_dim;
    c.latent   = l;
}

// Factors and soft-caps. `scored`: the dimensions of the dot product that attention scales.
void read_scales(Keys& keys, ModelConfig& c, int scored) {
    const Family& f   = *c.family;
    c.embedding_scale = keys.number("embedding_scale", f.embedding_sqrt ? std::sqrt(double(c.hidden_size)) : 1.0, 0);
    c.residual_scale  = keys.number("residual_scale", 1.0, 0);
    c.logit_scale     = keys.number("logit_scale", 1.0, 0);
    if (f.logits_divided) c.logit_scale = 1 / c.logit_scale;
    const bool   wide  = f.wide_scale_layers > 0 && c.n_layers == f.wide_scale_layers;
    const double scale = 1 / std::sqrt(wide ? double(c.hidden_size) / double(c.n_heads) : double(std::max(scored, 1)));
    if (f.attention_scale == 0 && !keys.has("attention.scale") &&
        std::ranges::any_of(c.layers, [&](const LayerConfig& l) { return l.attends() && l.head_dim != c.head_dim; }))
        keys.refuse("attention.key_length_swa gives heads a second size, and no attention.scale is for both");
    c.attention_scale = keys.number("attention.scale", f.attention_scale > 0 ? double(f.attention_scale) : scale, 0);
    if (f.softcaps) {
        c.attention_softcap = keys.number("attn_logit_softcapping", double(f.attention_softcap), -1);
        c.logit_softcap     = keys.number("final_logit_softcapping", double(f.logit_softcap), -1);
        for (float* cap : {&c.attention_softcap, &c.logit_softcap})
            if (*cap < 1e-30f) *cap = 0; // none
    }
    if (c.rope_scaling == RopeScaling::yarn && keys.has("rope.scaling.yarn_log_multiplier")) {
        const float m      = keys.number("rope.scaling.yarn_log_multiplier", {}, -1) * (c.latent ? 1 : 0.1f);
        const float mscale = 1 + m * std::log(std::max(c.rope_factor, 1.0f));
        if (c.latent) { // YaRN's factor then belongs to the scores, not to cosine and sine (DeepSeek-V2, section 3.1.4)
            c.attention_scale *= mscale * mscale;
            c.yarn_scales_rope = false;
        } else if (c.yarn_attn_factor == 0) c.rope_attn_factor /= mscale;
    }
}

// Keys that change the computation in a way that no family here knows, each with the value that changes nothing.
void refuse_unknown(Keys& keys, const ModelConfig& c) {
    for (const char* key :
         {"attention.max_alibi_bias", "attention.clamp_kqv", "attention.layer_indices", "router_logit_softcapping",
          "rope.scaling.alpha", "swin_norm", "attention.indexer.head_count", "expert_group_scale"})
        if (keys.has(key) && !keys.is_zero(key))
            keys.refuse(cat(keys.full(key), " is one that quire does not compute with"));
    const bool causal = keys.flag("attention.causal", !c.family->encoder);
    if (causal == c.family->encoder)
        keys.refuse(cat(keys.full("attention.causal"), causal ? " is true" : " is false",
                        ", which quire does not support in the family ", c.family->name));
}

// The family whose name differs least: by the fewest letters to insert, remove or replace.
std::string_view nearest_family(std::string_view name) {
    const auto distance = [&](const Family& f) {
        std::vector<std::size_t> row(name.size() + 1);
        std::iota(row.begin(), row.end(), std::size_t(0));
        for (std::size_t i = 0; i < f.name.size(); i++) {
            std::size_t diagonal = std::exchange(row[0], i + 1);
            for (std::size_t j = 0; j < name.size(); j++) {
                const std::size_t replaced = diagonal + (f.name[i] != name[j]);
                diagonal                   = row[j + 1];
                row[j + 1]                 = std::min({replaced, row[j] + 1, row[j + 1] + 1});
            }
        }
        return row.back();
    };
    return std::ranges::min_element(families(), {}, distance)->name;
}

// The layer for multi-token prediction has to be built as the model's layers are.
void check_mtp(Keys& keys, const ModelConfig& c) {
    const Family& f = *c.family;
    if (c.n_extra_layers == 0)
        keys.refuse("it has no layer for multi-token prediction (nextn_predict_layers), which --spec mtp needs");
    else if (f.one_part || f.encoder || c.input_size > 0 || f.norm != NormKind::rms || f.residual == Residual::normed)
        keys.refuse(cat("quire does not run the layer for multi-token prediction of the family ", f.name));
}

// All but the vocabulary, of a config whose family is known.
Result<void> read_keys(const Gguf& file, Keys& keys, ModelConfig& c) {
    Result<std::string_view> title = file.text("general.name", "");
    if (!title) return std::unexpected(title.error());
    c.name = title->empty() ? std::filesystem::path(file.path()).stem().string() : std::string(*title);

    // The bounds are generous: a larger number would overflow a product further down.
    c.context_length = keys.integer("context_length", 2048, 1, 1 << 30);
    c.hidden_size    = keys.integer("embedding_length", {}, 1, 1 << 20);
    c.n_layers       = keys.integer("block_count", {}, 1, std::int64_t(file.tensors().size()));
    c.n_extra_layers = keys.integer("nextn_predict_layers", 0, 0, std::max(c.n_layers - 1, 0));
    c.n_layers -= c.n_extra_layers;
    const bool             experts_alone = keys.has("expert_feed_forward_length") && keys.has("expert_count");
    const int              least         = !c.family->one_part; // 0: the layer has no such network
    const std::vector<int> ff_sizes =
        keys.by_layer("feed_forward_length", experts_alone ? std::optional<std::int64_t>(1) : std::nullopt, least,
                      1 << 24, c.n_layers + c.n_extra_layers);
    c.input_size = keys.integer("embedding_length_per_layer_input", 0, 0, 1 << 16);
    if (c.mtp) check_mtp(keys, c);
    // Some files keep the epsilon of RMS norms under the name of the other norm's.
    const bool other_name = c.family->norm == NormKind::layer ||
                            (!keys.has("attention.layer_norm_rms_epsilon") && keys.has("attention.layer_norm_epsilon"));
    c.norm_eps = keys.number(other_name ? "attention.layer_norm_epsilon" : "attention.layer_norm_rms_epsilon", {}, 0);
    if (keys.error()) return std::unexpected(*keys.error());
    c.ff_size = std::max(*std::ranges::max_element(ff_sizes), 1);
    std::vector<int> kv_heads;
    read_heads(keys, c, kv_heads);
    read_experts(file, keys, c);
    if (!keys.error() && c.family->rope != RopePairs::none && c.n_heads > 0)
        read_rope(keys, c, c.latent ? c.rope_dim : c.head_dim);
    if (!keys.error()) read_layers(keys, c, ff_sizes, kv_heads);
    if (!keys.error()) read_scales(keys, c, c.latent ? c.latent->nope_dim + c.rope_dim : c.head_dim);
    if (c.family->learned_positions)
        c.position_offset = keys.integer("position_offset", c.family->position_offset, 0, 1 << 20);
    if (!keys.flag("do_layer_norm_before", true))
        keys.refuse(cat(keys.full("do_layer_norm_before"), " is false; only norms before attention are supported"));
    refuse_unknown(keys, c);
    constexpr std::array poolings{Pooling::mean, Pooling::mean, Pooling::first, Pooling::last, Pooling::rank};
    c.pooling = poolings[std::size_t(std::clamp(keys.integer("pooling_type", 0, 0, 4), 0, 4))];
    if (c.pooling == Pooling::rank && !c.family->encoder) c.classes = 2; // as Qwen3-Reranker
    if (c.pooling == Pooling::rank && c.family->encoder) {
        const Result<std::int64_t> separator = file.integer("tokenizer.ggml.seperator_token_id", -1); // spelled so
        if (!separator) return std::unexpected(separator.error());
        c.separator = Token(std::clamp<std::int64_t>(*separator, -1, 1 << 30));
    }
    const GgufValue* labels = file.find(keys.full("classifier.output_labels"));
    const auto*      named  = labels ? std::get_if<GgufArray>(labels) : nullptr;
    if (c.pooling == Pooling::rank && named && int(std::min<std::size_t>(named->size(), 1 << 20)) != c.classes)
        keys.refuse(cat(keys.full("classifier.output_labels"), " has ", named->size(),
                        " labels; a reranker of this family has ", c.classes));
    return keys.error() ? Result<void>(std::unexpected(*keys.error())) : Result<void>();
}

Result<ModelConfig> read_config(const Gguf& file, bool mtp) {
    ModelConfig              c;
    Result<std::string_view> name = file.text("general.architecture");
    if (!name) return std::unexpected(name.error());
    if (is_eagle_draft(file))
        return fail(file.path(),
                    ": it is a draft of EAGLE-3, no model: it guesses tokens for one (--spec-draft-model)");
    c.family = find_family(*name);
    if (!c.family) {
        std::string list;
        for (const Family& f : families()) list += cat(list.empty() ? "" : ", ", f.name);
        return fail(file.path(), ": general.architecture is ", quote(*name), ", not one that quire runs (", list,
                    "); the nearest is ", nearest_family(*name));
    }
    if (file.tensors().empty())
        return fail(file.path(), ": it has a vocabulary at most, no tensors to run a model with");
    c.architecture_name = *name;
    c.mtp               = mtp;
    Keys keys(file, c.architecture_name + ".");
    if (auto ok = read_keys(file, keys, c); !ok) return std::unexpected(ok.error());

    // The rows of the embedding are the vocabulary; a file may pad them beyond its token list.
    const GgufTensor* embedding = file.tensor("token_embd.weight");
    if (!embedding) return fail(file.path(), ": tensor token_embd.weight is missing");
    const std::int64_t rows = embedding->view().rows;
    if (rows > 1 << 28) return fail(file.path(), ": token_embd.weight has ", rows, " rows, more than any vocabulary");
    c.vocab_size = int(rows);
    keys.integer("vocab_size", rows, 1, rows);
    if (std::optional<Error> error = keys.error()) return std::unexpected(*error);
    const GgufValue* tokens = file.find("tokenizer.ggml.tokens");
    const auto*      list   = tokens ? std::get_if<GgufArray>(tokens) : nullptr;
    if (list && list->size() > std::size_t(rows))
        return fail(file.path(), ": the vocabulary has ", list->size(), " tokens, token_embd.weight only ", rows,
                    " rows");
    return c;
}

bool is_eagle_draft(const Gguf& file) {
    const Result<std::string_view> name = file.text("general.architecture");
    return name && *name == eagle3_family().name;
}

Result<ModelConfig> read_eagle_config(const Gguf& file) {
    ModelConfig c;
    c.family            = &eagle3_family();
    c.architecture_name = c.family->name;
    if (file.tensors().empty()) return fail(file.path(), ": it has no tensors");
    Keys keys(file, c.architecture_name + ".");
    if (auto ok = read_keys(file, keys, c); !ok) return std::unexpected(ok.error());
    EagleConfig& e = c.eagle.emplace();
    if (c.n_layers != 1 || c.n_extra_layers > 0)
        keys.refuse(
            cat(keys.full("block_count"), " is ", c.n_layers + c.n_extra_layers, "; a draft of EAGLE-3 has 1 layer"));
    else if (c.experts.n > 0 || c.layers[0].window > 0 || c.layers[0].n_kv_heads == 0 || c.input_size > 0)
        keys.refuse("quire runs a draft of EAGLE-3 with attention over all tokens and one feed-forward network only");
    const std::vector<int> layers = keys.by_layer("target_layers", {}, 0, 1 << 20, int(e.target_layers.size()));
    if (layers.size() == e.target_layers.size()) std::ranges::copy(layers, e.target_layers.begin());
    e.target_hidden_size   = keys.integer("target_hidden_size", {}, 1, 1 << 20);
    e.norm_before_fc       = keys.flag("norm_before_fc", false);
    e.norm_before_residual = keys.flag("norm_before_residual", false);
    if (std::optional<Error> error = keys.error()) return std::unexpected(*error);
    return c;
}

} // namespace quire
