// quire.model_file.weights: tensor names of a file → the matrices of each layer, with every shape checked against the config.
export module quire.model_file.weights;

import quire.core.base;
import quire.model_file.config;
import quire.model_file.gguf;
import quire.core.std;
import quire.core.tensor;

export namespace quire {

// Views into the file's mapping; an empty view is a tensor this architecture does not have.
// A matrix of shape out × in has rows = out, cols = in. Vectors are F32.
struct LayerTensors {
    TensorView attn_norm;                     // [hidden]
    TensorView attn_norm_bias, ffn_norm_bias; // [hidden], GPT-2's LayerNorm
    TensorView attn_q, attn_k, attn_v;        // [heads*head_dim × hidden], [kv_heads*head_dim × hidden] twice
    TensorView attn_q_bias, attn_k_bias, attn_v_bias;
    TensorView attn_q_norm, attn_k_norm;                     // [head_dim], qwen3
    TensorView attn_output;                                  // [hidden × heads*head_dim]
    TensorView attn_output_bias, ffn_up_bias, ffn_down_bias; // GPT-2
    TensorView ffn_norm;                                     // [hidden]
    TensorView ffn_gate, ffn_up;                             // [ff × hidden]; no gate in GPT-2
    TensorView ffn_down;                                     // [hidden × ff]
};

struct ModelTensors {
    TensorView                token_embd;    // [vocab × hidden]
    TensorView                position_embd; // [context × hidden] in GPT-2, or empty
    TensorView                output_norm;   // [hidden]
    TensorView                output_norm_bias;
    TensorView                output;     // [vocab × hidden]; the embedding again when tied
    TensorView                rope_freqs; // [rope_dim/2] divisors of the frequencies, or empty
    std::vector<LayerTensors> layers;
};

// Error: the first tensor that is missing or of another shape, with both shapes.
Result<ModelTensors> bind_tensors(const Gguf& file, const ModelConfig& config);

} // namespace quire

module :private;

namespace quire {

std::string shape_of(std::int64_t rows, std::int64_t cols) {
    return rows == 1 ? cat("[", cols, "]") : cat("[", rows, " × ", cols, "]");
}

// Looks tensors up and remembers the first that is missing or has another shape.
class Binder {
public:
    explicit Binder(const Gguf& file) : file_(file) {}

    TensorView matrix(const std::string& name, std::int64_t rows, std::int64_t cols, bool required = true) {
        const GgufTensor* t = file_.tensor(name);
        if (!t) {
            if (required) refuse(cat("tensor ", name, " is missing"));
            return {};
        }
        const TensorView view = t->view();
        if (t->dims[2] != 1 || t->dims[3] != 1 || view.rows != rows || view.cols != cols)
            refuse(cat("tensor ", name, " is ", shape_of(view.rows, view.cols), ", the model needs ",
                       shape_of(rows, cols)));
        return view;
    }
    TensorView vector(const std::string& name, std::int64_t cols, bool required = true) {
        const TensorView view = matrix(name, 1, cols, required);
        if (view && view.type != DType::F32)
            refuse(cat("tensor ", name, " has type ", dtype_info(view.type).name, "; a vector has to be F32"));
        if (view && reinterpret_cast<std::uintptr_t>(view.data) % alignof(float) != 0)
            refuse(cat("tensor ", name, " is not aligned to its 4-byte floats"));
        return view;
    }
    void refuse(const std::string& why) {
        if (!error_) error_ = Error{ErrorKind::input, cat(file_.path(), ": ", why)};
    }
    const std::optional<Error>& error() const { return error_; }

private:
    const Gguf&          file_;
    std::optional<Error> error_;
};

// Rows first .. first + rows - 1 of a matrix, or that many elements of a vector.
TensorView part_of(const TensorView& whole, std::int64_t first, std::int64_t n) {
    if (!whole) return {};
    TensorView part = whole;
    const auto skip =
        whole.rows == 1 ? row_bytes(whole.type, first) : std::size_t(first) * row_bytes(whole.type, whole.cols);
    part.data                                 = static_cast<const std::byte*>(whole.data) + skip;
    (whole.rows == 1 ? part.cols : part.rows) = n;
    return part;
}

// GPT-2: q, k and v in one matrix, a bias everywhere.
void bind_gpt2_layer(Binder& bind, LayerTensors& l, const std::function<std::string(const char*)>& name,
                     const ModelConfig& c) {
    const std::int64_t h = c.hidden_size, q = std::int64_t(c.n_heads) * c.head_dim,
                       kv = std::int64_t(c.n_kv_heads) * c.head_dim;
    l.attn_norm           = bind.vector(name("attn_norm.weight"), h);
    l.attn_norm_bias      = bind.vector(name("attn_norm.bias"), h);
    const TensorView qkv  = bind.matrix(name("attn_qkv.weight"), q + 2 * kv, h),
                     bias = bind.vector(name("attn_qkv.bias"), q + 2 * kv);
    if (bind.error()) return;
    l.attn_q           = part_of(qkv, 0, q);
    l.attn_k           = part_of(qkv, q, kv);
    l.attn_v           = part_of(qkv, q + kv, kv);
    l.attn_q_bias      = part_of(bias, 0, q);
    l.attn_k_bias      = part_of(bias, q, kv);
    l.attn_v_bias      = part_of(bias, q + kv, kv);
    l.attn_output      = bind.matrix(name("attn_output.weight"), h, q);
    l.attn_output_bias = bind.vector(name("attn_output.bias"), h);
    l.ffn_norm         = bind.vector(name("ffn_norm.weight"), h);
    l.ffn_norm_bias    = bind.vector(name("ffn_norm.bias"), h);
    l.ffn_up           = bind.matrix(name("ffn_up.weight"), c.ff_size, h);
    l.ffn_up_bias      = bind.vector(name("ffn_up.bias"), c.ff_size);
    l.ffn_down         = bind.matrix(name("ffn_down.weight"), h, c.ff_size);
    l.ffn_down_bias    = bind.vector(name("ffn_down.bias"), h);
}

Result<ModelTensors> bind_tensors(const Gguf& file, const ModelConfig& c) {
    Binder             bind(file);
    ModelTensors       m;
    const std::int64_t q = std::int64_t(c.n_heads) * c.head_dim, kv = std::int64_t(c.n_kv_heads) * c.head_dim;
    const bool qkv_bias = c.architecture == Architecture::qwen2, qk_norm = c.architecture == Architecture::qwen3;
    m.token_embd  = bind.matrix("token_embd.weight", c.vocab_size, c.hidden_size);
    m.output_norm = bind.vector("output_norm.weight", c.hidden_size);
    m.output      = bind.matrix("output.weight", c.vocab_size, c.hidden_size, false);
    if (!m.output) m.output = m.token_embd; // tied
    if (c.learned_positions) {
        m.position_embd    = bind.matrix("position_embd.weight", c.context_length, c.hidden_size);
        m.output_norm_bias = bind.vector("output_norm.bias", c.hidden_size);
    }
    m.rope_freqs = bind.vector("rope_freqs.weight", c.rope_dim / 2, false);
    for (std::int64_t i = 0; i < m.rope_freqs.cols && !bind.error(); i++)
        if (const float f = static_cast<const float*>(m.rope_freqs.data)[i]; !(f > 0) || !std::isfinite(f))
            bind.refuse(cat("tensor rope_freqs.weight divides by ", f));
    for (int i = 0; i < c.n_layers && !bind.error(); i++) {
        auto          name = [&](const char* part) { return cat("blk.", i, ".", part); };
        LayerTensors& l    = m.layers.emplace_back();
        if (c.architecture == Architecture::gpt2) {
            bind_gpt2_layer(bind, l, name, c);
            continue;
        }
        l.attn_norm   = bind.vector(name("attn_norm.weight"), c.hidden_size);
        l.attn_q      = bind.matrix(name("attn_q.weight"), q, c.hidden_size);
        l.attn_k      = bind.matrix(name("attn_k.weight"), kv, c.hidden_size);
        l.attn_v      = bind.matrix(name("attn_v.weight"), kv, c.hidden_size);
        l.attn_q_bias = bind.vector(name("attn_q.bias"), q, qkv_bias);
        l.attn_k_bias = bind.vector(name("attn_k.bias"), kv, qkv_bias);
        l.attn_v_bias = bind.vector(name("attn_v.bias"), kv, qkv_bias);
        l.attn_q_norm = bind.vector(name("attn_q_norm.weight"), c.head_dim, qk_norm);
        l.attn_k_norm = bind.vector(name("attn_k_norm.weight"), c.head_dim, qk_norm);
        l.attn_output = bind.matrix(name("attn_output.weight"), c.hidden_size, q);
        l.ffn_norm    = bind.vector(name("ffn_norm.weight"), c.hidden_size);
        l.ffn_gate    = bind.matrix(name("ffn_gate.weight"), c.ff_size, c.hidden_size);
        l.ffn_up      = bind.matrix(name("ffn_up.weight"), c.ff_size, c.hidden_size);
        l.ffn_down    = bind.matrix(name("ffn_down.weight"), c.hidden_size, c.ff_size);
        for (const char* part : {"attn_output.bias", "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"})
            if (file.tensor(name(part)))
                bind.refuse(cat("tensor ", name(part), " is one that quire does not compute with"));
    }
    if (std::optional<Error> error = bind.error()) return std::unexpected(*error);
    return m;
}

} // namespace quire
