// quire.model_file.config: the hyper-parameters of a model file, validated, with defaults filled in.
export module quire.model_file.config;

import quire.core.base;
import quire.model_file.gguf;
import quire.core.std;

export namespace quire {

enum class Architecture { llama, qwen2, qwen3, gpt2 };
enum class RopeScaling { none, linear, yarn };

// One transformer's hyper-parameters, from `<architecture>.*` keys. Every number here is safe to compute with.
struct ModelConfig {
    Architecture architecture = Architecture::llama;
    std::string  architecture_name;
    std::string  name; // general.name, or the file's name
    int          vocab_size            = 0;
    int          context_length        = 0; // trained length in tokens
    int          hidden_size           = 0;
    int          n_layers              = 0;
    int          n_heads               = 0;
    int          n_kv_heads            = 0;
    int          head_dim              = 0; // of K, V and Q alike
    int          ff_size               = 0;
    float        norm_eps              = 0;
    int          rope_dim              = 0; // rotated leading dimensions of a head, even
    float        rope_base             = 10000;
    RopeScaling  rope_scaling          = RopeScaling::none;
    float        rope_factor           = 1;
    int          rope_original_context = 0; // yarn
    float        yarn_attn_factor      = 1; // multiplies the mscale that the factor implies
    float        yarn_beta_fast = 32, yarn_beta_slow = 1;
    bool         rope_neox      = false; // rotate (i, i + d/2) pairs; else neighbouring (2i, 2i + 1)
    int          sliding_window = 0;     // position i sees i-W+1..i; 0 = all
    // GPT-2: positions are learned vectors instead of rotations, LayerNorm instead of RMSNorm, a GELU without a gate.
    bool learned_positions = false;
};

// Every architecture name that read_config() accepts.
std::span<const std::string_view> supported_architectures();

// True for an architecture that the format knows and quire cannot run: such a file can still be looked at.
bool is_foreign_architecture(std::string_view name);

// Error: the first key that is missing, of the wrong type, or makes no sense, with its value.
Result<ModelConfig> read_config(const Gguf& file);

} // namespace quire

module :private;

namespace quire {

struct ArchitectureInfo {
    std::string_view name;
    Architecture     architecture;
    bool             rope_neox;
};
constexpr std::array architectures{
    ArchitectureInfo{"llama", Architecture::llama, false}, ArchitectureInfo{"qwen2", Architecture::qwen2, true},
    ArchitectureInfo{"qwen3", Architecture::qwen3, true}, ArchitectureInfo{"gpt2", Architecture::gpt2, false}};
constexpr std::array architecture_names{architectures[0].name, architectures[1].name, architectures[2].name,
                                        architectures[3].name};
// Names of the GGUF format document that quire cannot run.
constexpr std::array other_names{
    std::string_view("opt"),       std::string_view("gemma"),      std::string_view("gemma2"),
    std::string_view("phi2"),      std::string_view("phi3"),       std::string_view("falcon"),
    std::string_view("starcoder"), std::string_view("starcoder2"), std::string_view("mpt"),
    std::string_view("bloom"),     std::string_view("gptneox"),    std::string_view("command-r"),
    std::string_view("qwen2moe"),  std::string_view("qwen3moe")};

std::span<const std::string_view> supported_architectures() { return architecture_names; }

bool is_foreign_architecture(std::string_view name) {
    return std::ranges::find(other_names, name) != other_names.end();
}

// Reads keys until one is wrong; after that every value is its fallback and `error` stands.
class Keys {
public:
    Keys(const Gguf& file, std::string prefix) : file_(file), prefix_(std::move(prefix)) {}

    // An integer in [least, most].
    int integer(std::string_view key, std::optional<std::int64_t> fallback, std::int64_t least, std::int64_t most) {
        const std::string    full  = prefix_ + std::string(key);
        Result<std::int64_t> value = file_.integer(full, fallback);
        if (!value) return set_error(value.error()), 0;
        if (*value < least || *value > most)
            return set_error({ErrorKind::input,
                              cat(file_.path(), ": ", full, " is ", *value, ", not in ", least, "..", most)}),
                   0;
        return int(*value);
    }
    // A finite number above `least`.
    float number(std::string_view key, std::optional<double> fallback, double least) {
        const std::string full  = prefix_ + std::string(key);
        Result<double>    value = file_.number(full, fallback);
        if (!value) return set_error(value.error()), 0;
        if (!(*value > least) || !(*value < 1e30)) // NaN fails both
            return set_error({ErrorKind::input,
                              cat(file_.path(), ": ", full, " is ", *value, ", not a finite number above ", least)}),
                   0;
        return std::max(float(*value), std::numeric_limits<float>::min()); // a double may vanish as a float
    }
    std::string text(std::string_view key, std::string_view fallback) {
        Result<std::string_view> value = file_.text(prefix_ + std::string(key), fallback);
        if (!value) return set_error(value.error()), "";
        return std::string(*value);
    }
    bool has(std::string_view key) const { return file_.find(prefix_ + std::string(key)) != nullptr; }
    void refuse(const std::string& why) { set_error({ErrorKind::input, cat(file_.path(), ": ", why)}); }
    const std::optional<Error>& error() const { return error_; }

private:
    void set_error(Error error) {
        if (!error_) error_ = std::move(error);
    }
    const Gguf&          file_;
    std::string          prefix_;
    std::optional<Error> error_;
};

void read_rope(Keys& keys, ModelConfig& c) {
    c.rope_dim = keys.integer("rope.dimension_count", c.head_dim, 2, std::max(c.head_dim, 2));
    // YaRN divides by the logarithm of the base, and a base of 1 or less would turn every pair alike
    c.rope_base = keys.number("rope.freq_base", 10000.0, 1);
    if (c.rope_dim % 2 != 0) keys.refuse(cat("rope.dimension_count is ", c.rope_dim, ", an odd number"));
    if (c.rope_dim > c.head_dim)
        keys.refuse(cat("rope.dimension_count is ", c.rope_dim, ", more than the ", c.head_dim, " of a head"));

    // "rope.scale_linear" is what files said before there were several types.
    const bool        old  = keys.has("rope.scale_linear") && !keys.has("rope.scaling.type");
    const std::string type = keys.text("rope.scaling.type", old ? "linear" : "none");
    if (type == "linear") c.rope_scaling = RopeScaling::linear;
    else if (type == "yarn") c.rope_scaling = RopeScaling::yarn;
    else if (type != "none") keys.refuse(cat("rope.scaling.type ", quote(type), " is not one of none, linear, yarn"));
    if (c.rope_scaling == RopeScaling::none) return;
    c.rope_factor =
        keys.number(old ? "rope.scale_linear" : "rope.scaling.factor", old ? std::nullopt : std::optional(1.0), 0);
    if (c.rope_scaling != RopeScaling::yarn) return;
    c.rope_original_context = keys.integer("rope.scaling.original_context_length", c.context_length, 1, 1 << 30);
    c.yarn_attn_factor      = keys.number("rope.scaling.attn_factor", 1.0, 0);
    c.yarn_beta_fast        = keys.number("rope.scaling.yarn_beta_fast", 32.0, 0);
    c.yarn_beta_slow        = keys.number("rope.scaling.yarn_beta_slow", 1.0, 0);
    if (c.yarn_beta_fast <= c.yarn_beta_slow)
        keys.refuse(
            cat("rope.scaling.yarn_beta_fast ", c.yarn_beta_fast, " is not above yarn_beta_slow ", c.yarn_beta_slow));
}

Result<ModelConfig> read_config(const Gguf& file) {
    ModelConfig              c;
    Result<std::string_view> name = file.text("general.architecture");
    if (!name) return std::unexpected(name.error());
    const auto known = std::ranges::find(architectures, *name, &ArchitectureInfo::name);
    if (known == architectures.end()) {
        std::string list;
        for (std::string_view n : architecture_names) list += cat(list.empty() ? "" : ", ", n);
        return fail(file.path(), ": general.architecture is ", quote(*name), ", not one that quire runs (", list, ")");
    }
    if (file.tensors().empty())
        return fail(file.path(), ": it has a vocabulary at most, no tensors to run a model with");
    c.architecture      = known->architecture;
    c.architecture_name = known->name;
    c.rope_neox         = known->rope_neox;
    c.learned_positions = c.architecture == Architecture::gpt2;

    Keys                     keys(file, c.architecture_name + ".");
    Result<std::string_view> title = file.text("general.name", "");
    if (!title) return std::unexpected(title.error());
    c.name = title->empty() ? std::filesystem::path(file.path()).stem().string() : std::string(*title);

    // Bounds are generous; what they keep out would overflow a product further down.
    c.context_length = keys.integer("context_length", 2048, 1, 1 << 30);
    c.hidden_size    = keys.integer("embedding_length", {}, 1, 1 << 20);
    c.n_layers       = keys.integer("block_count", {}, 1, std::int64_t(file.tensors().size()));
    c.ff_size        = keys.integer("feed_forward_length", {}, 1, 1 << 24);
    c.n_heads        = keys.integer("attention.head_count", {}, 1, 1 << 16);
    c.n_kv_heads     = keys.integer("attention.head_count_kv", c.n_heads, 1, std::max(c.n_heads, 1));
    c.norm_eps =
        keys.number(c.learned_positions ? "attention.layer_norm_epsilon" : "attention.layer_norm_rms_epsilon", {}, 0);
    c.sliding_window = keys.integer("attention.sliding_window", 0, 0, 1 << 30);
    if (std::optional<Error> error = keys.error()) return std::unexpected(*error);
    if (c.n_heads % c.n_kv_heads != 0)
        keys.refuse(
            cat("attention.head_count ", c.n_heads, " is not a multiple of attention.head_count_kv ", c.n_kv_heads));
    if (!keys.has("attention.key_length") && c.hidden_size % c.n_heads != 0)
        keys.refuse(cat("embedding_length ", c.hidden_size, " is not a multiple of attention.head_count ", c.n_heads));
    c.head_dim = keys.integer("attention.key_length", c.hidden_size / c.n_heads, 1, 512);
    if (const int v = keys.integer("attention.value_length", c.head_dim, 1, 512); !keys.error() && v != c.head_dim)
        keys.refuse(cat("attention.value_length ", v, " differs from attention.key_length ", c.head_dim,
                        ", which quire does not support"));
    if (keys.integer("expert_count", 0, 0, 1 << 16) > 0)
        keys.refuse("expert_count is not 0; mixtures of experts are not supported");
    if (!keys.error() && !c.learned_positions) read_rope(keys, c);

    // The rows of the embedding are the vocabulary; a file may pad them beyond its token list.
    const GgufTensor* embedding = file.tensor("token_embd.weight");
    if (!keys.error() && !embedding) keys.refuse("tensor token_embd.weight is missing");
    if (std::optional<Error> error = keys.error()) return std::unexpected(*error);
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

} // namespace quire
