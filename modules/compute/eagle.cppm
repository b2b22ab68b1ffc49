// quire.compute.eagle: the operations of a draft of EAGLE-3 (Li et al. 2025) in the program of its target, the model that it guesses for: its
// state of each position from three residuals of the target, and one layer that reads states and embeddings. Owns nothing.
export module quire.compute.eagle;

export import quire.compute.program;
import quire.core.base;
export import quire.model_file.weights;
import quire.step.plan; // mtp_states

export namespace quire {

class EagleProgram {
public:
    // Emits into `program`. `draft`: the draft's config; `layer`: the place of its K and V in the cache; `rope`: of its layer. token_embd and
    // output of the tensors are not empty. All references outlive this.
    EagleProgram(Program& program, const ModelConfig& draft, const EagleTensorsOf<WeightHandle>& weights, int layer,
                 const Rope& rope);

    // In this order. x: the target's residual before its layer `layer`; behind the last one `layer` is the number of layers.
    void read_target(int layer, ValueId x);
    // Behind the target's layers: the states of the step's tokens, and K and V of the draft's layer.
    void keys();
    // Where the logit rows of the step are computed: keeps their states for the next step.
    void keep_states();
    // In a plan with `guesses`: the whole layer, and the logits of the tokens behind the plan's, for the target's vocabulary.
    void guesses(ValueId logits);

private:
    ValueId value(std::string_view name, std::int64_t cols, bool logit_rows = false, bool f32 = false) {
        return p_.value({name, cols, logit_rows, f32});
    }
    void emit(Operation operation) { p_.operations.push_back(std::move(operation)); }
    void norm(ValueId in, ValueId out, const WeightHandle& weight) {
        emit(Norm{in, none, out, weight, {}, c_.norm_eps, weight.cols, NormKind::rms});
    }
    void input(ValueId states);
    void attention(bool keys_alone);

    Program&                            p_;
    const ModelConfig&                  c_;
    const EagleTensorsOf<WeightHandle>& w_;
    int                                 layer_;
    Rope                                rope_;
    // The three residuals; the state of each token, of the token before it, and normed; the layer's input of both norms.
    ValueId targets_, states_, before_, normed_, embedding_, h_, joined_;
    ValueId q_, k_, v_, attended_, delta_, gate_, up_;
    // Of logit rows: the states of a step, and of a guess; the states that are kept; what the output reads; logits of the draft's vocabulary.
    ValueId kept_, guessed_, memory_, last_, logits_ = none;
};

} // namespace quire

module :private;

namespace quire {

EagleProgram::EagleProgram(Program& program, const ModelConfig& draft, const EagleTensorsOf<WeightHandle>& weights,
                           int layer, const Rope& rope)
    : p_(program), c_(draft), w_(weights), layer_(layer), rope_(rope) {
    const LayerConfig& l = c_.layers[0];
    const std::int64_t h = c_.hidden_size, heads = std::int64_t(c_.n_heads) * l.head_dim,
                       kv_heads = std::int64_t(l.n_kv_heads) * l.head_dim;
    targets_                    = value("residuals", w_.join.weight.cols);
    states_                     = value("draft_states", h, false, true);
    before_                     = value("draft_x", h, false, true);
    normed_                     = value("draft_normed", h);
    embedding_                  = value("draft_embedding", h, false, true);
    h_                          = value("draft_h", h);
    joined_                     = value("embedding_and_state", 2 * h);
    q_                          = value("draft_q", heads);
    k_                          = value("draft_k", kv_heads);
    v_                          = value("draft_v", kv_heads);
    attended_                   = value("draft_attended", heads);
    delta_                      = value("draft_delta", h);
    gate_                       = value("draft_gate", l.ff_size);
    up_                         = value("draft_up", l.ff_size);
    kept_                       = value("step_states", h, true, true);
    guessed_                    = value("guess_states", h, true, true);
    memory_                     = value("states", mtp_states * h, true, true);
    last_                       = value("draft_last", h, true);
    if (w_.tokens) logits_ = value("draft_logits", w_.output.weight.rows, true, true);
}

void EagleProgram::read_target(int layer, ValueId x) {
    const auto& layers = c_.eagle->target_layers;
    for (std::size_t i = 0; i < layers.size(); i++)
        if (layers[i] == layer) emit(PutColumns{x, targets_, std::int64_t(i) * c_.eagle->target_hidden_size});
}

// Of each token: both norms, of its embedding and of the state before it. That state stays in before_.
void EagleProgram::input(ValueId states) {
    emit(Carry{states, kept_, guessed_, memory_, before_});
    norm(before_, normed_, w_.state_norm);
    emit(PutColumns{normed_, joined_, c_.hidden_size});
    emit(Embed{w_.token_embd, {}, embedding_});
    norm(embedding_, h_, w_.embedding_norm);
    emit(PutColumns{h_, joined_, 0});
}

void EagleProgram::attention(bool keys_alone) {
    std::vector<Projection> projections{{w_.attn_k.weight, w_.attn_k.bias, k_}, {w_.attn_v.weight, w_.attn_v.bias, v_}};
    if (!keys_alone) projections.push_back({w_.attn_q.weight, w_.attn_q.bias, q_});
    emit(Gemm{joined_, std::move(projections)});
    const LayerConfig& l = c_.layers[0];
    emit(RopeAndStore{keys_alone ? none : q_, k_, v_, rope_, layer_, l.head_dim, 0});
    if (keys_alone) return;
    constexpr int first = 1; // the layer has no true row of position 0: no state comes before it
    emit(Attention{q_, attended_, layer_, c_.n_heads, c_.attention_scale, 0, 0, {}, true, false, first});
    emit(Gemm{attended_, {{w_.attn_output.weight, w_.attn_output.bias, delta_}}});
}

void EagleProgram::keys() {
    if (w_.states_norm) norm(targets_, targets_, w_.states_norm);
    emit(Gemm{targets_, {{w_.join.weight, w_.join.bias, states_}}});
    input(states_);
    attention(true);
}

void EagleProgram::keep_states() { emit(SelectRows{states_, kept_}); }

void EagleProgram::guesses(ValueId logits) {
    input(none);
    attention(false);
    if (c_.eagle->norm_before_residual) emit(PutColumns{normed_, before_, 0}); // the residual
    emit(Norm{delta_, before_, h_, w_.ffn_norm, {}, c_.norm_eps, c_.hidden_size, NormKind::rms});
    emit(GatedGemm{
        h_, {w_.ffn_gate.weight, w_.ffn_gate.bias, gate_}, {w_.ffn_up.weight, w_.ffn_up.bias, up_}, Activation::silu});
    emit(Gemm{gate_, {{w_.ffn_down.weight, w_.ffn_down.bias, delta_}}});
    emit(Add{before_, delta_});
    emit(SelectRows{before_, guessed_});
    norm(guessed_, last_, w_.output_norm);
    emit(Gemm{last_, {{w_.output.weight, w_.output.bias, w_.tokens ? logits_ : logits}}});
    if (w_.tokens) {
        std::vector<Token>& tokens = p_.tokens.emplace_back();
        for (std::int64_t i = 0; i < w_.tokens.cols; i++) {
            std::int64_t token = 0;
            std::memcpy(&token, static_cast<const std::byte*>(w_.tokens.data) + std::size_t(i) * sizeof token,
                        sizeof token);
            tokens.push_back(Token(token));
        }
        emit(ScatterColumns{logits_, logits, tokens});
    }
    emit(Argmax{logits});
}

} // namespace quire
