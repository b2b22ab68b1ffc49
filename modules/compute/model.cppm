// quire.compute.model: the transformer as a program, in the order of the papers: weights are prepared by the backend, operations
// emitted once at load.
// **Owns** the program and the memory of its values. Of requests and scheduling it knows nothing.
export module quire.compute.model;

import quire.compute.backend;
import quire.compute.program;
import quire.core.base;
import quire.core.std;
import quire.core.tensor;
import quire.model_file.config;
import quire.model_file.quants;
import quire.model_file.weights;

export namespace quire {

// The operations of a model whose weights are prepared. Shapes are those of `config`.
Program build_program(const ModelConfig& config, const ModelTensors& weights);

class Model {
public:
    // Prepares every weight and allocates memory for steps of up to max_tokens tokens and max_logit_rows rows of logits.
    // `progress` is called with the fraction of the layers that are ready.
    static Result<Model> create(Backend& backend, const ModelConfig& config, const ModelTensors& tensors,
                                int max_tokens, int max_logit_rows, const std::function<void(double)>& progress);

    const Program&     program() const { return program_; }
    const Activations& values() const { return values_; }

    // The last norm on the host: the hidden state behind it, of one row of the program's `selected`. No device keeps it in a form
    // that the host can read. [hidden], valid until the next call.
    std::span<const float> hidden_state(std::span<const float> selected);

private:
    Program            program_;
    Activations        values_;
    float              norm_eps_ = 0;
    std::vector<float> output_norm_, output_norm_bias_, hidden_row_;
};

// The RoPE frequencies of a config, with its scaling (linear; YaRN: Peng et al. 2023, section 3), divided by the file's
// rope_freqs if there are any. Cosine and sine are multiplied by `scale`.
std::vector<float> rope_frequencies(const ModelConfig& config, std::span<const float> divisors, float& scale);

} // namespace quire

module :private;

namespace quire {

std::vector<float> rope_frequencies(const ModelConfig& config, std::span<const float> divisors, float& scale) {
    const int          half = config.rope_dim / 2;
    std::vector<float> freq(static_cast<std::size_t>(half));
    scale      = 1;
    double low = 0, high = 0;
    if (config.rope_scaling == RopeScaling::yarn) {
        // The index of the pair that makes `rotations` full rotations over the original context.
        auto pair_of = [&](double rotations) {
            return config.rope_dim * std::log(config.rope_original_context / (rotations * 2 * 3.14159265358979323846)) /
                   (2 * std::log(double(config.rope_base)));
        };
        low  = std::max(std::floor(pair_of(double(config.yarn_beta_fast))), 0.0);
        high = std::min(std::ceil(pair_of(double(config.yarn_beta_slow))), double(config.rope_dim - 1));
        if (high <= low) high = low + 0.001;
        scale = float((config.rope_factor > 1 ? 0.1 * std::log(double(config.rope_factor)) + 1.0 : 1.0) *
                      double(config.yarn_attn_factor));
    }
    for (int i = 0; i < half; i++) {
        double f = std::pow(double(config.rope_base), -2.0 * i / config.rope_dim);
        if (config.rope_scaling == RopeScaling::linear) f /= double(config.rope_factor);
        if (config.rope_scaling == RopeScaling::yarn) {
            double slow = std::clamp((i - low) / (high - low), 0.0, 1.0); // 1: interpolate, 0: leave
            f           = f / double(config.rope_factor) * slow + f * (1 - slow);
        }
        if (!divisors.empty()) f /= double(divisors[std::size_t(i)]);
        freq[std::size_t(i)] = float(f);
    }
    return freq;
}

Program build_program(const ModelConfig& c, const ModelTensors& w) {
    Program            p;
    const std::int64_t q_cols = std::int64_t(c.n_heads) * c.head_dim, kv_cols = std::int64_t(c.n_kv_heads) * c.head_dim;
    const ValueId      x = p.value({"x", c.hidden_size, false, true}), // the residual
        h                = p.value({"h", c.hidden_size}),              // a norm of it
        q = p.value({"q", q_cols}), k = p.value({"k", kv_cols}), v = p.value({"v", kv_cols}),
                  attended = p.value({"attended", q_cols}),
                  delta    = p.value({"delta", c.hidden_size}), // on its way into the residual
        gate = p.value({"gate", c.ff_size}), up = p.value({"up", c.ff_size}),
                  selected = p.value({"selected", c.hidden_size, true, true}),
                  last = p.value({"last", c.hidden_size, true}), logits = p.value({"logits", c.vocab_size, true, true});
    Rope                   rope;
    std::span<const float> divisors;
    if (w.rope_freqs) divisors = {static_cast<const float*>(w.rope_freqs.data), std::size_t(w.rope_freqs.cols)};
    p.frequencies.push_back(rope_frequencies(c, divisors, rope.scale));
    rope.inv_freq = p.frequencies.back();
    rope.neox     = c.rope_neox;

    const auto emit = [&](Operation operation) { p.operations.push_back(std::move(operation)); };
    const auto norm = [&](ValueId in, ValueId residual, ValueId out, const TensorView& weight, const TensorView& bias) {
        emit(Norm{in, residual, out, weight, bias, c.norm_eps, weight.cols});
    };
    emit(Embed{w.token_embd, w.position_embd, x});
    for (int i = 0; i < c.n_layers; i++) {
        const LayerTensors& l = w.layers[std::size_t(i)];
        p.layers.push_back(p.operations.size());
        // attention; the first norm has nothing to add to the residual yet
        norm(i > 0 ? delta : x, i > 0 ? x : none, h, l.attn_norm, l.attn_norm_bias);
        emit(Gemm{h, {{l.attn_q, l.attn_q_bias, q}, {l.attn_k, l.attn_k_bias, k}, {l.attn_v, l.attn_v_bias, v}}});
        if (l.attn_q_norm) norm(q, none, q, l.attn_q_norm, {});
        if (l.attn_k_norm) norm(k, none, k, l.attn_k_norm, {});
        emit(RopeAndStore{q, k, v, rope, i});
        emit(Attention{q, attended, i, c.n_heads, 1 / std::sqrt(float(c.head_dim)), 0, c.sliding_window});
        emit(Gemm{attended, {{l.attn_output, l.attn_output_bias, delta}}});
        // feed-forward
        norm(delta, x, h, l.ffn_norm, l.ffn_norm_bias);
        if (l.ffn_gate) {
            emit(GatedGemm{h, {l.ffn_gate, {}, gate}, {l.ffn_up, {}, up}, Activation::silu});
            emit(Gemm{gate, {{l.ffn_down, {}, delta}}});
        } else {
            emit(Gemm{h, {{l.ffn_up, l.ffn_up_bias, up}}});
            emit(Activate{up, Activation::gelu_tanh});
            emit(Gemm{up, {{l.ffn_down, l.ffn_down_bias, delta}}});
        }
    }
    p.head     = p.operations.size();
    p.selected = selected;
    p.logits   = logits;
    emit(Add{x, delta});
    emit(SelectRows{x, selected});
    norm(selected, none, last, w.output_norm, w.output_norm_bias);
    emit(Gemm{last, {{w.output, {}, logits}}});
    emit(Argmax{logits});
    return p;
}

Result<Model> Model::create(Backend& backend, const ModelConfig& config, const ModelTensors& tensors, int max_tokens,
                            int max_logit_rows, const std::function<void(double)>& progress) {
    Model        model;
    ModelTensors m       = tensors;
    const auto   prepare = [&](std::initializer_list<TensorView*> weights) -> Result<void> {
        for (TensorView* w : weights) {
            if (!*w) continue;
            Result<TensorView> ready = backend.prepare(*w);
            if (!ready) return std::unexpected(ready.error());
            *w = *ready;
        }
        return {};
    };
    const bool tied = m.output.data == m.token_embd.data;
    for (TensorView* w : {&m.token_embd, &m.position_embd}) {
        if (!*w) continue;
        const bool         lookup = w == &m.position_embd || !tied;
        Result<TensorView> ready  = lookup ? backend.prepare_lookup(*w) : backend.prepare(*w);
        if (!ready) return std::unexpected(ready.error());
        *w = *ready;
    }
    if (auto r = prepare({&m.output_norm, &m.output_norm_bias}); !r) return std::unexpected(r.error());
    if (tied) m.output = m.token_embd;
    else if (auto r = prepare({&m.output}); !r) return std::unexpected(r.error());
    for (std::size_t i = 0; i < m.layers.size(); i++) {
        LayerTensors& l = m.layers[i];
        if (auto r = prepare({&l.attn_norm_bias, &l.ffn_norm_bias, &l.attn_output_bias, &l.ffn_up_bias,
                              &l.ffn_down_bias, &l.attn_norm, &l.attn_q, &l.attn_k, &l.attn_v, &l.attn_q_bias,
                              &l.attn_k_bias, &l.attn_v_bias, &l.attn_q_norm, &l.attn_k_norm, &l.attn_output,
                              &l.ffn_norm, &l.ffn_gate, &l.ffn_up, &l.ffn_down});
            !r)
            return std::unexpected(r.error());
        if (progress) progress(double(i + 1) / double(m.layers.size()));
    }
    backend.end_weights();

    const auto on_host = [](const TensorView& w, std::vector<float>& out) {
        if (!w) return;
        out.resize(std::size_t(w.rows * w.cols));
        dequantize(w.type, w.data, out.data(), w.rows * w.cols);
    };
    on_host(tensors.output_norm, model.output_norm_);
    on_host(tensors.output_norm_bias, model.output_norm_bias_);
    model.norm_eps_ = config.norm_eps;
    model.program_  = build_program(config, m);
    // Some devices read rows in groups of 8.
    Result<Activations> values =
        Activations::create(backend, model.program_, std::max(max_tokens, 8), std::max(max_logit_rows, 8));
    if (!values) return std::unexpected(values.error());
    model.values_ = std::move(*values);
    return model;
}

std::span<const float> Model::hidden_state(std::span<const float> x) {
    const bool bias = !output_norm_bias_.empty();
    double     mean = 0, squares = 0;
    for (float v : x) mean += double(v);
    mean = bias ? mean / double(x.size()) : 0;
    for (float v : x) squares += (double(v) - mean) * (double(v) - mean);
    const double scale = 1 / std::sqrt(squares / double(x.size()) + double(norm_eps_));
    hidden_row_.resize(x.size());
    for (std::size_t i = 0; i < x.size(); i++)
        hidden_row_[i] = float((double(x[i]) - mean) * scale) * output_norm_[i] + (bias ? output_norm_bias_[i] : 0.0f);
    return hidden_row_;
}

} // namespace quire
