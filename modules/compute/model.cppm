// quire.compute.model: the transformer, in the order of the papers, built from the backend's operations.
// **Owns** the prepared weights and the activations. Of requests and scheduling it knows only the StepPlan.
export module quire.compute.model;

import quire.compute.backend;
import quire.core.base;
import quire.model_file.config;
import quire.compute.kv_cache;
import quire.model_file.quants;
import quire.schedule.step_plan;
import quire.core.std;
import quire.core.tensor;
import quire.model_file.weights;

export namespace quire {

class Model {
public:
    // Prepares every weight and allocates memory for steps of up to max_tokens tokens and max_logit_rows rows of logits.
    // `progress` is called with the fraction of the layers that are ready.
    static Result<Model> create(Backend& backend, const ModelConfig& config, const ModelTensors& tensors,
                                int max_tokens, int max_logit_rows, const std::function<void(double)>& progress);

    // Starts one step and computes the logits of the plan's logit rows; block moves must be done. On a GPU it returns while the
    // step runs, on a CPU when it is finished.
    void forward(const StepPlan& plan, const KvCache& cache);
    // After forward(): starts the plan's sampling tasks on these logits.
    void sample(const StepPlan& plan);
    // Waits for the step. The result is valid until the next one.
    StepResults results();

    // Bytes of the activations.
    std::size_t activation_bytes() const { return memory_.bytes(); }

private:
    Model() = default;

    Backend*           backend_ = nullptr;
    ModelConfig        config_;
    ModelTensors       weights_;
    std::vector<float> inv_freq_;
    Rope               rope_;
    Buffer             memory_;
    // [max_tokens × …] each; the tensors of a step are their first T rows
    Tensor      hidden_, normed_, q_, k_, v_, attended_, projected_, gate_, up_, selected_, last_, logits_;
    Tensor      ran_; // the logits of the step at hand
    std::size_t n_wanted_ = 0;
    // The last norm, for the host; and one hidden state behind it.
    std::vector<float>     output_norm_, output_norm_bias_, hidden_row_;
    std::span<const float> hidden_state(int row);
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
        // The index of the pair that makes `turns` full rotations over the original context.
        auto pair_of = [&](double turns) {
            return config.rope_dim * std::log(config.rope_original_context / (turns * 2 * 3.14159265358979323846)) /
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

Result<Model> Model::create(Backend& backend, const ModelConfig& config, const ModelTensors& tensors, int max_tokens,
                            int max_logit_rows, const std::function<void(double)>& progress) {
    Model model;
    model.backend_ = &backend;
    model.config_  = config;
    model.weights_ = tensors;

    auto prepare = [&](std::initializer_list<TensorView*> weights) -> Result<void> {
        for (TensorView* w : weights) {
            if (!*w) continue;
            Result<TensorView> ready = backend.prepare(*w);
            if (!ready) return std::unexpected(ready.error());
            *w = *ready;
        }
        return {};
    };
    max_tokens         = std::max(max_tokens, 8); // some devices read rows in groups
    max_logit_rows     = std::max(max_logit_rows, 8);
    ModelTensors& m    = model.weights_;
    const bool    tied = m.output.data == m.token_embd.data;
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

    std::span<const float> divisors;
    if (tensors.rope_freqs)
        divisors = {static_cast<const float*>(tensors.rope_freqs.data), std::size_t(tensors.rope_freqs.cols)};
    model.inv_freq_      = rope_frequencies(config, divisors, model.rope_.scale);
    model.rope_.inv_freq = model.inv_freq_;
    model.rope_.halves   = config.rope_halves;

    const std::int64_t q_cols  = std::int64_t(config.n_heads) * config.head_dim,
                       kv_cols = std::int64_t(config.n_kv_heads) * config.head_dim;
    struct Need {
        Tensor*      tensor;
        std::int64_t rows, cols;
        DType        type;
    };
    const DType type    = backend.activation_type();
    const Need  needs[] = {{&model.hidden_, max_tokens, config.hidden_size, DType::F32}, // the residual
                           {&model.normed_, max_tokens, config.hidden_size, type},
                           {&model.q_, max_tokens, q_cols, type},
                           {&model.k_, max_tokens, kv_cols, type},
                           {&model.v_, max_tokens, kv_cols, type},
                           {&model.attended_, max_tokens, q_cols, type},
                           {&model.projected_, max_tokens, config.hidden_size, type},
                           {&model.gate_, max_tokens, config.ff_size, type},
                           {&model.up_, max_tokens, config.ff_size, type},
                           {&model.selected_, max_logit_rows, config.hidden_size, DType::F32},
                           {&model.last_, max_logit_rows, config.hidden_size, type},
                           {&model.logits_, max_logit_rows, config.vocab_size, DType::F32}};
    auto        bytes   = [&](const Need& need) { // each tensor starts on a 256-byte line
        return (std::size_t(need.rows) * row_bytes(need.type, need.cols) + 255) / 256 * 256;
    };
    std::size_t total = 0;
    for (const Need& need : needs) total += bytes(need);
    Result<Buffer> memory = backend.allocate(total);
    if (!memory) return std::unexpected(memory.error());
    model.memory_ = std::move(*memory);
    auto* at      = static_cast<std::byte*>(model.memory_.data());
    for (const Need& need : needs) {
        *need.tensor = {at, need.rows, need.cols, need.type};
        at += bytes(need);
    }
    return model;
}

// The residual of one selected row, normed here: no device keeps that of all rows in a form the host can read.
std::span<const float> Model::hidden_state(int row) {
    check(row >= 0 && std::size_t(row) < n_wanted_, "a hidden state of a row that did not run");
    const std::int64_t           n = selected_.cols;
    const Tensor                 one{static_cast<float*>(selected_.data) + row * n, 1, n, DType::F32};
    const std::span<const float> x    = backend_->to_host(one);
    const bool                   bias = !output_norm_bias_.empty();
    double                       mean = 0, squares = 0;
    for (float v : x) mean += double(v);
    mean = bias ? mean / double(n) : 0;
    for (float v : x) squares += (double(v) - mean) * (double(v) - mean);
    const double scale = 1 / std::sqrt(squares / double(n) + double(config_.norm_eps));
    hidden_row_.resize(x.size());
    for (std::size_t i = 0; i < x.size(); i++)
        hidden_row_[i] = float((double(x[i]) - mean) * scale) * output_norm_[i] + (bias ? output_norm_bias_[i] : 0.0f);
    return hidden_row_;
}

void Model::sample(const StepPlan& plan) {
    if (n_wanted_ > 0 && !plan.sampling.tasks.empty()) backend_->sample(ran_);
}

StepResults Model::results() {
    const StepResults device = backend_->results();
    if (n_wanted_ == 0) return {};
    return {device.best.first(std::min(n_wanted_, device.best.size())), device.sampled,
            [this] { return backend_->to_host(ran_).first(n_wanted_ * std::size_t(ran_.cols)); },
            [this](int row) { return hidden_state(row); }};
}

void Model::forward(const StepPlan& plan, const KvCache& cache) {
    Backend&           b     = *backend_;
    const ModelConfig& c     = config_;
    const StepShape    shape = b.begin_step(plan);
    const int          T     = shape.tokens;
    const auto         L     = std::int64_t(shape.logit_rows);
    check(T <= hidden_.rows && L <= logits_.rows, "a step larger than the memory taken for it");
    auto rows  = [&](const Tensor& t) { return Tensor{t.data, T, t.cols, t.type}; };
    auto heads = [&](const Tensor& t) { return Tensor{t.data, T * (t.cols / c.head_dim), c.head_dim, t.type}; };

    const Tensor logits{logits_.data, L, logits_.cols, logits_.type};
    ran_      = logits;
    n_wanted_ = plan.logit_rows.size(); // of the rows that run
    if (b.replay_step()) return;
    Tensor                x = rows(hidden_), h = rows(normed_), delta = rows(projected_);
    const AttentionParams attention{c.n_heads, 1 / std::sqrt(float(c.head_dim)), c.sliding_window};

    b.embed(weights_.token_embd, weights_.position_embd, x);
    for (std::size_t i = 0; i < weights_.layers.size(); i++) {
        const LayerTensors& w = weights_.layers[i];
        // attention: q, k, v; RoPE and store; attend; output projection. The first norm has no residual to add yet.
        b.norm(i > 0 ? delta : x, w.attn_norm, w.attn_norm_bias, c.norm_eps, i > 0 ? &x : nullptr, h);
        b.matmul(h, std::array{Projection{&w.attn_q, &w.attn_q_bias, rows(q_)},
                               Projection{&w.attn_k, &w.attn_k_bias, rows(k_)},
                               Projection{&w.attn_v, &w.attn_v_bias, rows(v_)}});
        if (w.attn_q_norm) b.norm(heads(q_), w.attn_q_norm, {}, c.norm_eps, nullptr, heads(q_));
        if (w.attn_k_norm) b.norm(heads(k_), w.attn_k_norm, {}, c.norm_eps, nullptr, heads(k_));
        b.rope_and_store(rows(q_), rows(k_), rows(v_), rope_, cache.layers()[i]);
        b.attention(rows(q_), cache.layers()[i], attention, rows(attended_));
        b.matmul(rows(attended_), std::array{Projection{&w.attn_output, &w.attn_output_bias, delta}});
        // feed-forward: up and gate, activation, down
        b.norm(delta, w.ffn_norm, w.ffn_norm_bias, c.norm_eps, &x, h);
        const Tensor up = rows(up_);
        if (w.ffn_gate) {
            Tensor gate = rows(gate_);
            b.gated(h, {&w.ffn_gate, nullptr, gate}, {&w.ffn_up, nullptr, up});
            b.matmul(gate, std::array{Projection{&w.ffn_down, nullptr, delta}});
        } else {
            b.matmul(h, std::array{Projection{&w.ffn_up, &w.ffn_up_bias, up}});
            b.activate(Activation::gelu_tanh, up, nullptr);
            b.matmul(up, std::array{Projection{&w.ffn_down, &w.ffn_down_bias, delta}});
        }
    }
    if (L == 0) {
        b.end_step();
        return;
    }
    b.add(x, delta);
    Tensor selected{selected_.data, L, selected_.cols, selected_.type}, last{last_.data, L, last_.cols, last_.type};
    b.select_logit_rows(x, selected);
    b.norm(selected, weights_.output_norm, weights_.output_norm_bias, c.norm_eps, nullptr, last);
    b.matmul(last, std::array{Projection{&weights_.output, nullptr, logits}});
    b.choose_best(logits);
    b.end_step();
}

} // namespace quire
