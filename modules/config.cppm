// quire.config: what a model file says about its model, checked and with the defaults filled in.
export module quire.config;

import quire.base;
import quire.gguf;
import quire.std;

export namespace quire {

enum class Architecture { llama, qwen2, qwen3 };
enum class RopeScaling { none, linear, yarn };

// One transformer's hyper-parameters, from `<architecture>.*` keys. Every number here is safe to compute with.
struct ModelConfig {
    Architecture architecture = Architecture::llama;
    std::string  architecture_name;
    std::string  name;                  // general.name, or the file's name
    int          vocab_size = 0;
    int          context_length = 0;    // trained length in tokens
    int          hidden_size = 0;
    int          n_layers = 0;
    int          n_heads = 0;
    int          n_kv_heads = 0;
    int          head_dim = 0;          // of K, V and Q alike
    int          ff_size = 0;
    float        norm_eps = 0;
    int          rope_dim = 0;          // rotated leading dimensions of a head, even
    float        rope_base = 10000;
    RopeScaling  rope_scaling = RopeScaling::none;
    float        rope_factor = 1;
    int          rope_original_context = 0;  // yarn
    float        yarn_attn_factor = 1;       // multiplies the mscale that the factor implies
    float        yarn_beta_fast = 32, yarn_beta_slow = 1;
    bool         rope_halves = false;   // rotate (i, i + d/2) pairs; else neighbouring (2i, 2i + 1)
    int          sliding_window = 0;    // position i sees i-W+1..i; 0 = all
};

// Every architecture name that ModelConfig::read() can serve.
std::span<const std::string_view> supported_architectures();

// Error: the first key that is missing, of the wrong type, or makes no sense, with its value.
Result<ModelConfig> read_config(const Gguf& file);

} // namespace quire
