// quire.weights: tensor names of a file → the matrices of each layer, every shape checked against the config.
export module quire.weights;

import quire.base;
import quire.config;
import quire.gguf;
import quire.std;
import quire.tensor;

export namespace quire {

// Views into the file's mapping; an empty view is a tensor this architecture does not have.
// A matrix of shape out × in has rows = out, cols = in. Vectors are F32.
struct LayerTensors {
    TensorView attn_norm;                     // [hidden]
    TensorView attn_q, attn_k, attn_v;        // [heads*head_dim × hidden], [kv_heads*head_dim × hidden] twice
    TensorView attn_q_bias, attn_k_bias, attn_v_bias;
    TensorView attn_q_norm, attn_k_norm;      // [head_dim], qwen3
    TensorView attn_output;                   // [hidden × heads*head_dim]
    TensorView ffn_norm;                      // [hidden]
    TensorView ffn_gate, ffn_up;              // [ff × hidden]
    TensorView ffn_down;                      // [hidden × ff]
};

struct ModelTensors {
    TensorView                token_embd;   // [vocab × hidden]
    TensorView                output_norm;  // [hidden]
    TensorView                output;       // [vocab × hidden]; the embedding again when tied
    TensorView                rope_freqs;   // [rope_dim/2] divisors of the frequencies, or empty
    std::vector<LayerTensors> layers;
};

// Error: the first tensor that is missing or of another shape, with both shapes.
Result<ModelTensors> bind_tensors(const Gguf& file, const ModelConfig& config);

} // namespace quire
