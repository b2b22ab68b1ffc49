// quire.model_file.weights: tensor names of a file → the matrices of each layer, with every shape checked against the config.
// Owns nothing: the matrices lie in the file.
export module quire.model_file.weights;

import quire.core.base;
export import quire.model_file.config;
export import quire.core.tensor;

export namespace quire {

// T is a TensorView of the file, or what stands for the tensor after a backend has prepared it. An empty T is a tensor that the file does not
// have. Vectors of the file are F32.

// A matrix and its bias, if the file has one.
template <class T>
struct LinearOf {
    T        weight; // out × in: rows = out, cols = in
    T        bias;   // [out]
    explicit operator bool() const { return bool(weight); }
};

// A mixture of experts. A stack holds the matrices of all experts, one after the other: rows = n · out.
template <class T>
struct ExpertTensorsOf {
    LinearOf<T> router;         // [n × hidden]
    T           choice_bias;    // [n], added to the scores only to choose
    LinearOf<T> gate, up, down; // stacks of [ff × hidden] and [hidden × ff]; biases [n × out]
    T           gate_up;        // instead of gate and up: each expert's gate, then its up
    T router_norm;  // [hidden]: the router reads the normed residual times this / sqrt(hidden), not the experts' input
    T output_scale; // [n], of the experts' weights
    LinearOf<T> latent_down; // [latent × hidden]: makes the experts' input, or empty (ExpertConfig::latent_size)
    LinearOf<T> latent_up;   // [hidden × latent], of the experts' sum
    LinearOf<T> shared_gate, shared_up, shared_down;
    T           shared_weight; // [hidden]: sigmoid(h · shared_weight) is the shared network's factor
};

// Multi-head latent attention. A stack holds the matrices of all heads, one after the other.
template <class T>
struct LatentTensorsOf {
    LinearOf<T> q_a;       // [q_rank × hidden], or empty
    T           q_a_norm;  // [q_rank]
    T           kv_a;      // [kv_rank × hidden]: makes a token's latent row
    T           k_rope;    // [rope_dim × hidden]: makes the part of the row with RoPE
    T           kv_a_norm; // [kv_rank]
    T           k_b;       // stack of [kv_rank × nope_dim]: a query's head → latent
    T           v_b;       // stack of [value_dim × kv_rank]: a latent row → a head of the output
};

// A layer that keeps a state (RecurrentConfig).
template <class T>
struct RecurrentTensorsOf {
    LinearOf<T> x; // [channels × hidden]: makes the inputs of the convolution. delta rule: q, k, v; Mamba-2: x, B, C
    LinearOf<T> factor;     // [channels × hidden]: they are multiplied by this first (short_conv), or empty
    LinearOf<T> gate;       // [width × hidden]: the gate of the result
    LinearOf<T> x_and_gate; // [(channels + width) × hidden], instead of both: of each group q, k, v and gate
    T           conv;       // [channels × taps], the newest token's tap last
    T           conv_bias;  // [channels], or empty
    // Of the recurrence, or empty. [heads × hidden]: how much a token's step forgets, and how much it writes (delta rule); with
    // Family::grouped_heads `step` is [2·heads × hidden], of each group first what it writes.
    LinearOf<T> step, write;
    T           step_bias, decay, skip; // [heads]: added to the step; -exp(A_log); Mamba-2: of x, added to the result
    T           norm;                   // [value_dim] of each head's result, or [width] of each group's
    LinearOf<T> out;                    // [hidden × width]
};

template <class T>
struct LayerTensorsOf {
    LinearOf<T> attn_out_norm, layer_out_norm; // Residual::normed: of the sums
    LinearOf<T> attn_norm;                     // [hidden], or empty: attention reads the residual
    // [heads*head_dim × hidden], [kv_heads*head_dim × hidden] twice; latent: only q, or q_b. With Family::attention_gate attn_q makes the
    // query and the gate of each head: [heads*2*head_dim × hidden].
    LinearOf<T> attn_q, attn_k, attn_v;
    T           attn_q_norm, attn_k_norm;      // [head_dim], or [heads*head_dim]: a norm of all heads at once
    T           attn_sinks;                    // [heads]
    LinearOf<T> attn_output;                   // [hidden × heads*value_dim]
    T           attn_post_norm, ffn_post_norm; // [hidden], of the outputs of attention and feed-forward
    LinearOf<T> ffn_norm;                      // [hidden]
    LinearOf<T> ffn_gate, ffn_up;              // [ff × hidden]; no gate: the activation is applied to `up`
    LinearOf<T> ffn_down;                      // [hidden × ff]
    std::optional<ExpertTensorsOf<T>> experts; // instead of ffn_*, or beside them:
    // [hidden]: of the dense network's output; of the experts' input and output; ffn_post_norm is then of the sum of both outputs
    T           dense_post_norm, experts_norm, experts_post_norm;
    LinearOf<T> input_gate,
        input_proj; // [input × hidden], [hidden × input]: what the token's numbers for the layer add
    T                                    input_post_norm;  // [hidden]
    float                                output_scale = 1; // of the residual behind the layer
    std::optional<LatentTensorsOf<T>>    latent;
    std::optional<RecurrentTensorsOf<T>> recurrent; // instead of attn_*, except attn_norm
};

// The tensors that the layer for multi-token prediction has besides a layer's tensors.
template <class T>
struct MtpTensorsOf {
    T           enorm, hnorm; // [hidden], of a token's embedding and of the hidden state before it
    LinearOf<T> join;         // [hidden × 2*hidden]: both, one behind the other → what the layer reads
    // [hidden]; [vocab × hidden], both. Empty: the model's output_norm, token_embd and output.
    T           head_norm, token_embd;
    LinearOf<T> output;
};

// A draft of EAGLE-3 (EagleConfig), whose hidden size is not its target's.
template <class T>
struct EagleTensorsOf {
    T           states_norm;                // [3*target hidden], of the target's three residuals together, or empty
    LinearOf<T> join;                       // [hidden × 3*target hidden]: these → the state of a position
    T           embedding_norm, state_norm; // [hidden], of a token's embedding and of the state before it
    LinearOf<T> attn_q, attn_k,
        attn_v;              // [heads*head_dim × 2*hidden] and so on: they read both norms, one behind the other
    LinearOf<T> attn_output; // [hidden × heads*head_dim]
    T           ffn_norm;    // [hidden]
    LinearOf<T> ffn_gate, ffn_up, ffn_down;
    T           output_norm; // [hidden]
    T           token_embd;  // [target's vocab × hidden]; empty: the target's
    LinearOf<T> output;      // [draft's vocab × hidden]; empty: the target's
    // The host reads the others in the file.
    TensorView rope_freqs; // as the model's
    TensorView tokens;     // I64: the target's token for each one of the draft's vocabulary; empty: it is the target's
};

template <class T>
struct ModelTensorsOf {
    T           token_embd;    // [vocab × hidden]
    T           position_embd; // [context × hidden], or empty
    T           token_types;   // [types × hidden], or empty: the type of a token is added to its embedding
    LinearOf<T> embd_norm;     // [hidden], of the embeddings, or empty
    // A token's numbers for each layer: [vocab × layers*input], plus the normed projection [layers*input × hidden] of its embedding.
    T                                layer_embd;
    LinearOf<T>                      layer_proj;
    T                                layer_proj_norm; // [input]
    LinearOf<T>                      output_norm;     // [hidden]
    LinearOf<T>                      output;          // [vocab × hidden]; the embedding again when tied
    std::vector<LayerTensorsOf<T>>   layers;          // with ModelConfig::mtp one more than n_layers
    std::optional<MtpTensorsOf<T>>   mtp;
    std::optional<EagleTensorsOf<T>> eagle; // of the draft that guesses for the model (ModelConfig::draft)
    // The host reads the others in the file.
    // A reranker's head: out · tanh(classifier · state); the first may be missing.
    LinearOf<TensorView> classifier, classifier_out;
    // [rope_dim/2] divisors of the frequencies, or empty. Long and short: for contexts longer than the original one, and others.
    TensorView rope_freqs, rope_long, rope_short;
};

using Linear           = LinearOf<TensorView>;
using ExpertTensors    = ExpertTensorsOf<TensorView>;
using LatentTensors    = LatentTensorsOf<TensorView>;
using RecurrentTensors = RecurrentTensorsOf<TensorView>;
using LayerTensors     = LayerTensorsOf<TensorView>;
using MtpTensors       = MtpTensorsOf<TensorView>;
using EagleTensors     = EagleTensorsOf<TensorView>;
using ModelTensors     = ModelTensorsOf<TensorView>;

// Error: the first tensor that is missing or of another shape, with both shapes; or that nothing here computes with.
Result<ModelTensors> bind_tensors(const Gguf& file, const ModelConfig& config);
// Likewise of a draft of EAGLE-3, for its target; or a token in `tokens` that is none of the target's.
Result<EagleTensors> bind_eagle_tensors(const Gguf& file, const ModelConfig& draft, const ModelConfig& target);

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

    const GgufTensor* find(const std::string& name) const { return file_.tensor(name); }
    bool              has(const std::string& name) const { return find(name) != nullptr; }
    // `n` matrices of rows × cols, as the file's third dimension counts them.
    TensorView stack(const std::string& name, std::int64_t n, std::int64_t rows, std::int64_t cols,
                     bool required = true) {
        const GgufTensor* t = file_.tensor(name);
        if (!t) {
            if (required) refuse(cat("tensor ", name, " is missing"));
            return {};
        }
        bound_.insert(t);
        const TensorView view = t->view();
        // Rows of one dimension more, which is 1, are the same bytes: kernels of a convolution as PyTorch has them.
        const bool apart = t->dims[2] != 1 && t->dims[1] != 1;
        if (n > 1 ? t->dims[0] != cols || t->dims[1] != rows || t->dims[2] != n || t->dims[3] != 1
                  : apart || t->dims[3] != 1 || view.rows != rows || view.cols != cols)
            refuse(cat("tensor ", name, " is ", n > 1 || apart ? sizes_of(*t) : shape_of(view.rows, view.cols),
                       ", the model needs ",
                       n > 1 ? cat("[", n, " × ", rows, " × ", cols, "]") : shape_of(rows, cols)));
        return view;
    }
    TensorView matrix(const std::string& name, std::int64_t rows, std::int64_t cols, bool required = true) {
        return stack(name, 1, rows, cols, required);
    }
    // F32; `rows` vectors one after the other.
    TensorView vectors(const std::string& name, std::int64_t rows, std::int64_t cols, bool required = true) {
        const TensorView view = matrix(name, rows, cols, required);
        if (view && view.type != DType::F32)
            refuse(cat("tensor ", name, " has type ", dtype_info(view.type).name, "; a vector has to be F32"));
        if (view && reinterpret_cast<std::uintptr_t>(view.data) % alignof(float) != 0)
            refuse(cat("tensor ", name, " is not aligned to its 4-byte floats"));
        return view;
    }
    TensorView vector(const std::string& name, std::int64_t cols, bool required = true) {
        return vectors(name, 1, cols, required);
    }
    // F32; n elements in any shape.
    TensorView elements(const std::string& name, std::int64_t n, bool required = true) {
        const GgufTensor* t = file_.tensor(name);
        if (!t || t->view().rows * t->view().cols != n) return vector(name, n, required);
        TensorView view = vectors(name, t->view().rows, t->view().cols);
        view.rows = 1, view.cols = n;
        return view;
    }
    // NAME.weight and, where there is one, NAME.bias.
    Linear linear(const std::string& name, std::int64_t rows, std::int64_t cols, bool biased = false,
                  bool required = true) {
        Linear l{matrix(name + ".weight", rows, cols, required), {}};
        if (l) l.bias = vector(name + ".bias", rows, biased);
        return l;
    }
    // Only a LayerNorm has a bias. The bias of an RMSNorm is left over, and refuse_others() refuses it.
    Linear norm(const std::string& name, std::int64_t cols, const Family& family, bool required = true) {
        Linear l{vector(name + ".weight", cols, required), {}};
        if (l && family.norm == NormKind::layer) l.bias = vector(name + ".bias", cols, family.biases == Biases::all);
        return l;
    }
    // The matrices of `n` experts with their biases.
    Linear experts(const std::string& name, std::int64_t n, std::int64_t rows, std::int64_t cols, bool biased) {
        Linear l{stack(name + ".weight", n, rows, cols), {}};
        if (l) l.bias = vectors(name + ".bias", n, rows, biased);
        return l;
    }
    // Refuses a tensor that nothing has asked for: the maker of the file computes with it. Those of the layers behind the model predict
    // further tokens.
    void refuse_others(const ModelConfig& c) {
        const auto is_extra = [&](const GgufTensor& t) {
            for (int i = c.n_layers; i < c.n_layers + c.n_extra_layers; i++)
                if (t.name.starts_with(cat("blk.", i, "."))) return true;
            return false;
        };
        for (const GgufTensor& t : file_.tensors())
            if (!bound_.contains(&t) && !is_extra(t)) {
                refuse(cat("tensor ", t.name, " is one that quire does not compute with (in the family ",
                           c.family->name, ")"));
                return;
            }
    }
    void refuse(const std::string& why) {
        if (!error_) error_ = Error{ErrorKind::input, cat(file_.path(), ": ", why)};
    }
    const std::optional<Error>& error() const { return error_; }

private:
    static std::string sizes_of(const GgufTensor& t) {
        return cat("[", t.dims[2], " × ", t.dims[1], " × ", t.dims[0], "]");
    }

    const Gguf&                           file_;
    std::unordered_set<const GgufTensor*> bound_;
    std::optional<Error>                  error_;
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

Linear part_of(const Linear& whole, std::int64_t first, std::int64_t n) {
    return {part_of(whole.weight, first, n), part_of(whole.bias, first, n)};
}

using Name = std::function<std::string(const char*)>; // of a layer's tensor

// Some files have q, k and v in one matrix.
void bind_attention(Binder& bind, LayerTensors& l, const Name& name, const ModelConfig& c, const LayerConfig& layer) {
    const std::int64_t h  = c.hidden_size,
                       q  = std::int64_t(c.n_heads) * layer.head_dim * (c.family->attention_gate ? 2 : 1),
                       kv = std::int64_t(layer.n_kv_heads) * layer.head_dim;
    const bool all_biased = c.family->biases == Biases::all, biased = all_biased || c.family->biases == Biases::qkv;
    if (bind.has(name("attn_qkv.weight"))) {
        const Linear qkv = bind.linear(name("attn_qkv"), q + 2 * kv, h, biased);
        if (bind.error()) return;
        l.attn_q = part_of(qkv, 0, q);
        l.attn_k = part_of(qkv, q, kv);
        l.attn_v = part_of(qkv, q + kv, kv);
    } else {
        l.attn_q = bind.linear(name("attn_q"), q, h, biased);
        // Some files keep what a layer with the K and V of another has no use for.
        const bool own = layer.kv_source < 0;
        l.attn_k       = bind.linear(name("attn_k"), kv, h, biased, own);
        l.attn_v       = bind.linear(name("attn_v"), kv, h, biased, own && !c.family->v_norm);
        if (!own) l.attn_k = l.attn_v = {};
    }
    // One norm for each head, or one for all of them together.
    const auto head_norm = [&](const char* part, std::int64_t cols, bool required) {
        const GgufTensor* t = bind.find(name(part));
        return bind.vector(name(part), t && t->dims[0] == cols ? cols : layer.head_dim, required);
    };
    l.attn_q_norm = head_norm("attn_q_norm.weight", q, c.family->qk_norm);
    l.attn_k_norm = head_norm("attn_k_norm.weight", kv, c.family->qk_norm && layer.kv_source < 0);
    l.attn_sinks  = bind.vector(name("attn_sinks.weight"), c.n_heads, c.family->sinks);
    l.attn_output = bind.linear(name("attn_output"), h, std::int64_t(c.n_heads) * layer.value_dim, all_biased);
}

void bind_latent_attention(Binder& bind, LayerTensors& l, const Name& name, const ModelConfig& c) {
    const LatentConfig& s = *c.latent;
    const std::int64_t  h = c.hidden_size, q = std::int64_t(c.n_heads) * (s.nope_dim + c.rope_dim);
    LatentTensors&      t = l.latent.emplace();
    if (s.q_rank > 0) {
        t.q_a      = bind.linear(name("attn_q_a"), s.q_rank, h);
        t.q_a_norm = bind.vector(name("attn_q_a_norm.weight"), s.q_rank);
        l.attn_q   = bind.linear(name("attn_q_b"), q, s.q_rank);
    } else l.attn_q = bind.linear(name("attn_q"), q, h);
    const TensorView kv_a = bind.matrix(name("attn_kv_a_mqa.weight"), s.kv_rank + c.rope_dim, h);
    if (bind.has(name("attn_kv_b.weight")) && !bind.has(name("attn_k_b.weight")))
        bind.refuse(cat("tensor ", name("attn_kv_b.weight"),
                        " joins what newer files keep as attn_k_b and attn_v_b; convert the model again"));
    t.kv_a_norm = bind.vector(name("attn_kv_a_norm.weight"), s.kv_rank);
    t.k_b       = bind.stack(name("attn_k_b.weight"), c.n_heads, s.kv_rank, s.nope_dim);
    t.v_b       = bind.stack(name("attn_v_b.weight"), c.n_heads, s.value_dim, s.kv_rank);
    bind.matrix(name("attn_kv_b.weight"), std::int64_t(c.n_heads) * (s.nope_dim + s.value_dim), s.kv_rank,
                false); // again
    l.attn_output = bind.linear(name("attn_output"), h, std::int64_t(c.n_heads) * s.value_dim);
    if (bind.error()) return;
    t.kv_a   = part_of(kv_a, 0, s.kv_rank);
    t.k_rope = part_of(kv_a, s.kv_rank, c.rope_dim);
}

void bind_recurrent(Binder& bind, LayerTensors& l, const Name& name, const ModelConfig& c) {
    const RecurrentConfig& r = c.recurrent;
    const std::int64_t     h = c.hidden_size;
    RecurrentTensors&      t = l.recurrent.emplace();
    if (c.family->recurrent == Mixer::short_conv) {
        const Linear all = bind.linear(name("shortconv.in_proj"), 3 * h, h);
        t.conv           = bind.vectors(name("shortconv.conv.weight"), h, r.taps);
        t.out            = bind.linear(name("shortconv.out_proj"), h, h);
        if (bind.error()) return;
        t.factor = part_of(all, 0, h);
        t.gate   = part_of(all, h, h);
        t.x      = part_of(all, 2 * h, h);
        return;
    }
    const bool delta = c.family->recurrent == Mixer::delta_rule;
    t.conv           = bind.vectors(name("ssm_conv1d.weight"), r.channels, r.taps);
    t.conv_bias      = bind.vector(name("ssm_conv1d.bias"), r.channels, false);
    t.step_bias      = bind.vector(name("ssm_dt.bias"), r.n_heads);
    t.decay          = bind.elements(name("ssm_a"), r.n_heads);
    t.norm           = bind.elements(name("ssm_norm.weight"), delta ? r.value_dim : r.width);
    t.out            = bind.linear(name("ssm_out"), h, r.width);
    if (!delta) {
        t.skip           = bind.elements(name("ssm_d"), r.n_heads);
        const Linear all = bind.linear(name("ssm_in"), std::int64_t(r.width) + r.channels + r.n_heads, h);
        if (bind.error()) return;
        t.gate = part_of(all, 0, r.width);
        t.x    = part_of(all, r.width, r.channels);
        t.step = part_of(all, std::int64_t(r.width) + r.channels, r.n_heads);
        return;
    }
    if (c.family->grouped_heads && bind.has(name("ssm_in.weight")))
        t.x_and_gate = bind.linear(name("ssm_in"), std::int64_t(r.channels) + r.width, h);
    else {
        t.x    = bind.linear(name("attn_qkv"), r.channels, h);
        t.gate = bind.linear(name("attn_gate"), r.width, h);
    }
    if (c.family->grouped_heads) t.step = bind.linear(name("ssm_ba"), std::int64_t(2) * r.n_heads, h);
    else {
        t.step  = bind.linear(name("ssm_alpha"), r.n_heads, h);
        t.write = bind.linear(name("ssm_beta"), r.n_heads, h);
    }
}

void bind_experts(Binder& bind, LayerTensors& l, const Name& name, const ModelConfig& c) {
    const ExpertConfig& e = c.experts;
    const std::int64_t  h = c.hidden_size, x = e.latent_size > 0 ? e.latent_size : h;
    ExpertTensors&      t = l.experts.emplace();
    if (bind.has(name("ffn_gate.0.weight")))
        bind.refuse(
            cat("tensor ", name("ffn_gate.0.weight"),
                " is of a file with a tensor for each expert; newer files stack them: convert the model again"));
    const bool biased = c.family->biases == Biases::all;
    t.router = {bind.vectors(name("ffn_gate_inp.weight"), e.n, h), bind.vector(name("ffn_gate_inp.bias"), e.n, biased)};
    t.choice_bias = bind.vector(name("exp_probs_b.bias"), e.n, false);
    if (bind.has(name("ffn_gate_up_exps.weight"))) {
        t.gate_up = bind.stack(name("ffn_gate_up_exps.weight"), e.n, 2 * std::int64_t(e.ff_size), x);
    } else {
        if (c.family->gated) t.gate = bind.experts(name("ffn_gate_exps"), e.n, e.ff_size, x, biased);
        t.up = bind.experts(name("ffn_up_exps"), e.n, e.ff_size, x, biased);
    }
    t.down = bind.experts(name("ffn_down_exps"), e.n, x, e.ff_size, biased);
    if (e.latent_size > 0) {
        t.latent_down = bind.linear(name("ffn_latent_down"), x, h);
        t.latent_up   = bind.linear(name("ffn_latent_up"), h, x);
    }
    t.output_scale = bind.vector(name("ffn_down_exps.scale"), e.n, false);
    if (c.family->dense_beside) {
        t.router_norm       = bind.vector(name("ffn_gate_inp.scale"), h);
        l.dense_post_norm   = bind.vector(name("post_ffw_norm_1.weight"), h);
        l.experts_norm      = bind.vector(name("pre_ffw_norm_2.weight"), h);
        l.experts_post_norm = bind.vector(name("post_ffw_norm_2.weight"), h);
    }
    if (e.shared_ff_size == 0) return;
    if (c.family->gated) t.shared_gate = bind.linear(name("ffn_gate_shexp"), e.shared_ff_size, h);
    t.shared_up     = bind.linear(name("ffn_up_shexp"), e.shared_ff_size, h);
    t.shared_down   = bind.linear(name("ffn_down_shexp"), h, e.shared_ff_size);
    t.shared_weight = bind.vector(name("ffn_gate_inp_shexp.weight"), h, false);
}

// A gate may be the first half of `up`.
void bind_feed_forward(Binder& bind, LayerTensors& l, const Name& name, const ModelConfig& c, std::int64_t ff) {
    const std::int64_t h      = c.hidden_size;
    const GgufTensor*  up     = bind.find(name("ffn_up.weight"));
    const bool         biased = c.family->biases == Biases::all;
    if (c.family->gated && up && !bind.has(name("ffn_gate.weight")) && up->dims[1] == 2 * ff) {
        const Linear both = bind.linear(name("ffn_up"), 2 * ff, h, biased);
        if (bind.error()) return;
        l.ffn_gate = part_of(both, 0, ff);
        l.ffn_up   = part_of(both, ff, ff);
    } else {
        if (c.family->gated) l.ffn_gate = bind.linear(name("ffn_gate"), ff, h, biased);
        l.ffn_up = bind.linear(name("ffn_up"), ff, h, biased);
    }
    l.ffn_down = bind.linear(name("ffn_down"), h, ff, biased);
}

void bind_layer(Binder& bind, LayerTensors& l, const Name& name, const ModelConfig& c, const LayerConfig& layer) {
    const Residual residual = c.family->residual;
    const auto     h        = c.hidden_size;
    if (residual == Residual::normed) {
        l.attn_out_norm  = bind.norm(name("attn_output_norm"), h, *c.family);
        l.layer_out_norm = bind.norm(name("layer_output_norm"), h, *c.family);
    } else if (residual != Residual::post_norm && layer.mixer != Mixer::none)
        l.attn_norm = bind.norm(name("attn_norm"), h, *c.family);
    if (layer.recurs()) bind_recurrent(bind, l, name, c);
    else if (layer.mixer == Mixer::none) {
    } else if (c.latent) bind_latent_attention(bind, l, name, c);
    else bind_attention(bind, l, name, c, layer);
    if (!layer.feed_forward) return;
    if (residual == Residual::sandwich || residual == Residual::post_norm) {
        l.attn_post_norm = bind.vector(name("post_attention_norm.weight"), h);
        l.ffn_post_norm  = bind.vector(name("post_ffw_norm.weight"), h);
    }
    if (residual == Residual::pre_norm || residual == Residual::sandwich) {
        // gpt-oss calls it by its place behind attention
        const bool other = residual == Residual::pre_norm && !bind.has(name("ffn_norm.weight")) &&
                           bind.has(name("post_attention_norm.weight"));
        const char* own = layer.mixer == Mixer::none ? "attn_norm" : other ? "post_attention_norm" : "ffn_norm";
        l.ffn_norm      = bind.norm(name(own), h, *c.family, !c.family->may_be_parallel);
    }
    if (layer.experts) bind_experts(bind, l, name, c);
    if (!layer.experts || c.family->dense_beside) bind_feed_forward(bind, l, name, c, layer.ff_size);
    if (c.input_size > 0) {
        l.input_gate      = bind.linear(name("inp_gate"), c.input_size, h);
        l.input_proj      = bind.linear(name("proj"), h, c.input_size);
        l.input_post_norm = bind.vector(name("post_norm.weight"), h);
    }
    if (const TensorView scale = bind.vector(name("layer_output_scale.weight"), 1, false); scale && !bind.error())
        l.output_scale = *static_cast<const float*>(scale.data);
}

// Divisors of the RoPE frequencies.
TensorView bind_divisors(Binder& bind, const std::string& name, const ModelConfig& c) {
    const TensorView view = bind.vector(name, c.rope_dim / 2, false);
    for (std::int64_t i = 0; i < view.cols && !bind.error(); i++)
        if (const float f = static_cast<const float*>(view.data)[i]; !(f > 0) || !std::isfinite(f))
            bind.refuse(cat("tensor ", name, " divides by ", f));
    return view;
}

void bind_mtp(Binder& bind, MtpTensors& t, const Name& name, const ModelConfig& c) {
    const std::int64_t h = c.hidden_size;
    t.enorm              = bind.vector(name("nextn.enorm.weight"), h);
    t.hnorm              = bind.vector(name("nextn.hnorm.weight"), h);
    t.join               = bind.linear(name("nextn.eh_proj"), h, 2 * h);
    t.head_norm          = bind.vector(name("nextn.shared_head_norm.weight"), h, false);
    t.token_embd         = bind.matrix(name("nextn.embed_tokens.weight"), c.vocab_size, h, false);
    t.output             = bind.linear(name("nextn.shared_head_head"), c.vocab_size, h, false, false);
}

Result<ModelTensors> bind_tensors(const Gguf& file, const ModelConfig& c) {
    Binder       bind(file);
    ModelTensors m;
    m.token_embd = bind.matrix("token_embd.weight", c.vocab_size, c.hidden_size);
    if (c.family->encoder) {
        const GgufTensor* types = bind.find("token_types.weight");
        if (types)
            m.token_types =
                bind.matrix("token_types.weight", std::max<std::int64_t>(types->view().rows, 1), c.hidden_size);
        m.embd_norm = bind.norm("token_embd_norm", c.hidden_size, *c.family);
        if (c.pooling == Pooling::rank) {
            m.classifier     = bind.linear("cls", c.hidden_size, c.hidden_size, false, false);
            m.classifier_out = bind.linear("cls.output", 1, c.hidden_size);
        }
    } else {
        const bool other = bind.has("token_embd_norm.weight") && !bind.has("output_norm.weight"); // so LFM2 calls it
        m.output_norm    = bind.norm(other ? "token_embd_norm" : "output_norm", c.hidden_size, *c.family);
        m.output         = bind.linear("output", c.vocab_size, c.hidden_size, false, false);
        if (!m.output) m.output.weight = m.token_embd; // tied
        if (c.pooling == Pooling::rank) m.classifier_out = bind.linear("cls.output", c.classes, c.hidden_size);
    }
    if (c.input_size > 0) {
        const std::int64_t all = std::int64_t(c.n_layers) * c.input_size;
        m.layer_embd           = bind.matrix("per_layer_token_embd.weight", c.vocab_size, all);
        m.layer_proj           = bind.linear("per_layer_model_proj", all, c.hidden_size);
        m.layer_proj_norm      = bind.vector("per_layer_proj_norm.weight", c.input_size);
    }
    if (c.family->learned_positions)
        m.position_embd =
            bind.matrix("position_embd.weight", std::int64_t(c.context_length) + c.position_offset, c.hidden_size);
    m.rope_freqs = bind_divisors(bind, "rope_freqs.weight", c);
    m.rope_long  = bind_divisors(bind, "rope_factors_long.weight", c);
    m.rope_short = bind_divisors(bind, "rope_factors_short.weight", c);
    if (bool(m.rope_long) != bool(m.rope_short))
        bind.refuse("of rope_factors_long.weight and rope_factors_short.weight one is missing");
    if (c.rope_scaling == RopeScaling::longrope && !m.rope_long)
        bind.refuse("rope.scaling.type is longrope, but tensor rope_factors_long.weight is missing");
    for (int i = 0; i < c.n_layers + int(c.mtp) && !bind.error(); i++) {
        const Name name = [i](const char* part) { return cat("blk.", i, ".", part); };
        bind_layer(bind, m.layers.emplace_back(), name, c, c.layers[std::size_t(i)]);
        if (i == c.n_layers) bind_mtp(bind, m.mtp.emplace(), name, c);
    }
    if (!bind.error()) bind.refuse_others(c);
    if (std::optional<Error> error = bind.error()) return std::unexpected(*error);
    return m;
}

// The tokens of a draft's vocabulary.
TensorView bind_tokens(Binder& bind, const ModelConfig& target) {
    const GgufTensor* t = bind.find("d2t");
    if (!t) return {};
    const TensorView view = bind.matrix("d2t", 1, t->view().cols);
    if (view.type != DType::I64) bind.refuse(cat("tensor d2t has type ", dtype_info(view.type).name, ", not I64"));
    for (std::int64_t i = 0; i < view.cols && !bind.error(); i++) {
        std::int64_t token = 0;
        std::memcpy(&token, static_cast<const std::byte*>(view.data) + std::size_t(i) * sizeof token, sizeof token);
        if (token < 0 || token >= target.vocab_size)
            bind.refuse(cat("tensor d2t has the token ", token, ", none of the ", target.vocab_size, " of the model"));
    }
    return view;
}

Result<EagleTensors> bind_eagle_tensors(const Gguf& file, const ModelConfig& c, const ModelConfig& target) {
    Binder             bind(file);
    EagleTensors       t;
    const LayerConfig& layer = c.layers.at(0);
    const std::int64_t h = c.hidden_size, states = std::int64_t(3) * c.eagle->target_hidden_size,
                       q  = std::int64_t(c.n_heads) * layer.head_dim,
                       kv = std::int64_t(layer.n_kv_heads) * layer.head_dim;
    const auto name       = [](const char* part) { return cat("blk.0.", part); };
    if (c.eagle->norm_before_fc) t.states_norm = bind.vector("enc.output_norm.weight", states);
    t.join           = bind.linear("fc", h, states);
    t.embedding_norm = bind.vector(name("attn_norm.weight"), h);
    t.state_norm     = bind.vector(name("attn_norm_2.weight"), h);
    t.attn_q         = bind.linear(name("attn_q"), q, 2 * h);
    t.attn_k         = bind.linear(name("attn_k"), kv, 2 * h);
    t.attn_v         = bind.linear(name("attn_v"), kv, 2 * h);
    t.attn_output    = bind.linear(name("attn_output"), h, q);
    t.ffn_norm       = bind.vector(name("ffn_norm.weight"), h);
    t.ffn_gate       = bind.linear(name("ffn_gate"), layer.ff_size, h);
    t.ffn_up         = bind.linear(name("ffn_up"), layer.ff_size, h);
    t.ffn_down       = bind.linear(name("ffn_down"), h, layer.ff_size);
    t.output_norm    = bind.vector("output_norm.weight", h);
    t.token_embd     = bind.matrix("token_embd.weight", target.vocab_size, h, false);
    t.tokens         = bind_tokens(bind, target);
    t.output         = bind.linear("output", t.tokens ? t.tokens.cols : target.vocab_size, h, false, false);
    t.rope_freqs     = bind_divisors(bind, "rope_freqs.weight", c);
    if (!t.output && t.tokens) bind.refuse("tensor d2t names the tokens of an output that is the model's own");
    if ((!t.token_embd || !t.output) && h != target.hidden_size)
        bind.refuse(cat("tensor ", t.token_embd ? "output.weight" : "token_embd.weight",
                        " is missing, and the model's has ", target.hidden_size, " columns, not ", h));
    if (!bind.error()) bind.refuse_others(c);
    if (std::optional<Error> error = bind.error()) return std::unexpected(*error);
    return t;
}

} // namespace quire
