// quire.compute.prepared_weights: makes every tensor of a file ready by a backend, with the matrices that adapters add to it. Owns nothing.
export module quire.compute.prepared_weights;

import quire.compute.backend;
export import quire.compute.prepared_adapters;
import quire.compute.ranks.shards;
import quire.core.base;
import quire.model_file.weights;

export namespace quire {

using PreparedLinear = LinearOf<WeightHandle>;
using PreparedLayer  = LayerTensorsOf<WeightHandle>;
using PreparedModel  = ModelTensorsOf<WeightHandle>;
using PreparedLeaves = LayerLeavesOf<WeightHandle>;

// Makes handles of tensors. After an error every handle is empty.
class WeightPreparer {
public:
    // `adapters` must outlive the preparer.
    WeightPreparer(Prepare prepare, PreparedAdapters& adapters) : prepare_(std::move(prepare)), adapters_(adapters) {}

    // An empty tensor has an empty handle. `n`: matrices of a stack.
    WeightHandle                operator()(const TensorView& tensor, WeightUse use = WeightUse::plain, int n = 1);
    PreparedLinear              operator()(const Linear& l);
    std::vector<PreparedLinear> operator()(const std::vector<Linear>& all);
    PreparedLeaves              operator()(const LayerLeaves& l, const ModelConfig& c);
    PreparedLayer               operator()(const LayerTensors& l, const ModelConfig& c);
    // `model`: whose embedding and output a draft may share.
    EagleTensorsOf<WeightHandle> operator()(const EagleTensors& t, const PreparedModel& model);

    const std::optional<Error>& error() const { return error_; } // the first one

private:
    // members(t): pointers to the same members of both.
    template <class From, class To, class Members>
    void each(const From& from, To& to, const Members& members);
    void stacks(const ExpertTensors& e, ExpertTensorsOf<WeightHandle>& to, int n);

    Prepare              prepare_;
    PreparedAdapters&    adapters_;
    std::optional<Error> error_;
};

// All tensors outside the layers. The output that is tied to the embedding is the embedding's handle.
PreparedModel prepare_ends(const ModelTensors& m, WeightPreparer& prepare);

} // namespace quire

module :private;

namespace quire {

template <class From, class To, class Members>
void WeightPreparer::each(const From& from, To& to, const Members& members) {
    const auto sources = members(from);
    const auto targets = members(to);
    for (std::size_t i = 0; i < sources.size(); i++) *targets[i] = (*this)(*sources[i]);
}

void WeightPreparer::stacks(const ExpertTensors& e, ExpertTensorsOf<WeightHandle>& to, int n) {
    for (auto [from, ready] : {std::pair(&e.gate, &to.gate), std::pair(&e.up, &to.up), std::pair(&e.down, &to.down)}) {
        ready->weight = (*this)(from->weight, WeightUse::stack, n);
        ready->bias   = (*this)(from->bias, WeightUse::f32);
    }
}

WeightHandle WeightPreparer::operator()(const TensorView& tensor, WeightUse use, int n) {
    if (!tensor || error_) return {};
    const Result<WeightHandle> ready = prepare_(tensor, use, n);
    if (!ready) error_ = ready.error();
    else if (use == WeightUse::plain)
        if (auto ok = adapters_.add(tensor, *ready); !ok) error_ = ok.error();
    return ready.value_or(WeightHandle());
}

PreparedLinear WeightPreparer::operator()(const Linear& l) {
    PreparedLinear to;
    to.weight = (*this)(l.weight);
    to.bias   = (*this)(l.bias);
    return to;
}

std::vector<PreparedLinear> WeightPreparer::operator()(const std::vector<Linear>& all) {
    std::vector<PreparedLinear> to;
    for (const Linear& l : all) to.push_back((*this)(l));
    return to;
}

PreparedLeaves WeightPreparer::operator()(const LayerLeaves& l, const ModelConfig& c) {
    PreparedLeaves to;
    each(l, to, [](auto& t) { return std::array{&t.attn_output, &t.ffn_down, &t.shared_down}; });
    for (const ExpertTensors& e : l.experts) stacks(e, to.experts.emplace_back(), c.experts.n);
    return to;
}

PreparedLayer WeightPreparer::operator()(const LayerTensors& l, const ModelConfig& c) {
    PreparedLayer to;
    each(l, to, [](auto& t) {
        return std::array{&t.attn_out_norm, &t.layer_out_norm, &t.attn_norm, &t.attn_q,   &t.attn_k,
                          &t.attn_v,        &t.attn_output,    &t.ffn_norm,  &t.ffn_gate, &t.ffn_up,
                          &t.ffn_down,      &t.input_gate,     &t.input_proj};
    });
    each(l, to, [](auto& t) {
        return std::array{&t.attn_q_norm,    &t.attn_k_norm,       &t.attn_sinks,
                          &t.attn_post_norm, &t.ffn_post_norm,     &t.dense_post_norm,
                          &t.experts_norm,   &t.experts_post_norm, &t.input_post_norm};
    });
    to.output_scale = l.output_scale;
    if (l.experts) {
        const ExpertTensors& e    = *l.experts;
        auto&                mine = to.experts.emplace();
        mine.router.weight        = (*this)(e.router.weight, WeightUse::f32);
        mine.router.bias          = (*this)(e.router.bias);
        stacks(e, mine, c.experts.n);
        each(e, mine, [](auto& t) {
            return std::array{&t.shared_gate, &t.shared_up, &t.shared_down, &t.latent_down, &t.latent_up};
        });
        each(e, mine,
             [](auto& t) { return std::array{&t.choice_bias, &t.shared_weight, &t.router_norm, &t.output_scale}; });
        mine.gate_up = (*this)(e.gate_up, WeightUse::stack, 2 * c.experts.n);
    }
    if (l.recurrent) {
        auto& mine = to.recurrent.emplace();
        each(*l.recurrent, mine,
             [](auto& t) { return std::array{&t.x, &t.factor, &t.gate, &t.x_and_gate, &t.step, &t.write, &t.out}; });
        each(*l.recurrent, mine,
             [](auto& t) { return std::array{&t.conv_bias, &t.step_bias, &t.decay, &t.skip, &t.norm}; });
        mine.conv = (*this)(l.recurrent->conv, WeightUse::f32);
    }
    if (l.latent) {
        auto& mine = to.latent.emplace();
        mine.q_a   = (*this)(l.latent->q_a);
        each(*l.latent, mine, [](auto& t) { return std::array{&t.q_a_norm, &t.kv_a, &t.k_rope, &t.kv_a_norm}; });
        mine.k_b = (*this)(l.latent->k_b, WeightUse::stack, c.n_heads);
        mine.v_b = (*this)(l.latent->v_b, WeightUse::stack, c.n_heads);
    }
    return to;
}

EagleTensorsOf<WeightHandle> WeightPreparer::operator()(const EagleTensors& t, const PreparedModel& model) {
    EagleTensorsOf<WeightHandle> to;
    each(t, to, [](auto& e) {
        return std::array{&e.join,        &e.attn_q,   &e.attn_k, &e.attn_v,
                          &e.attn_output, &e.ffn_gate, &e.ffn_up, &e.ffn_down};
    });
    each(t, to, [](auto& e) {
        return std::array{&e.states_norm, &e.embedding_norm, &e.state_norm, &e.ffn_norm, &e.output_norm};
    });
    to.token_embd = t.token_embd ? (*this)(t.token_embd, WeightUse::lookup) : model.token_embd;
    to.output     = t.output ? (*this)(t.output) : model.output;
    to.rope_freqs = t.rope_freqs, to.tokens = t.tokens;
    return to;
}

PreparedModel prepare_ends(const ModelTensors& m, WeightPreparer& prepare) {
    PreparedModel to;
    const bool    tied = m.output.weight.data == m.token_embd.data;
    to.token_embd      = prepare(m.token_embd, tied ? WeightUse::plain : WeightUse::lookup);
    to.position_embd   = prepare(m.position_embd, WeightUse::lookup);
    to.token_types     = prepare(m.token_types, WeightUse::lookup);
    to.embd_norm       = prepare(m.embd_norm);
    to.layer_embd      = prepare(m.layer_embd, WeightUse::lookup);
    to.layer_proj      = prepare(m.layer_proj);
    to.layer_proj_norm = prepare(m.layer_proj_norm);
    to.output_norm     = prepare(m.output_norm);
    to.output.weight   = tied ? to.token_embd : prepare(m.output.weight);
    to.output.bias     = prepare(m.output.bias);
    if (m.mtp) {
        MtpTensorsOf<WeightHandle>& mtp = to.mtp.emplace();
        mtp.enorm                       = prepare(m.mtp->enorm);
        mtp.hnorm                       = prepare(m.mtp->hnorm);
        mtp.join                        = prepare(m.mtp->join);
        mtp.head_norm                   = prepare(m.mtp->head_norm);
        mtp.token_embd                  = prepare(m.mtp->token_embd, WeightUse::lookup);
        mtp.output                      = prepare(m.mtp->output);
    }
    if (m.eagle) to.eagle = prepare(*m.eagle, to);
    to.rope_freqs = m.rope_freqs, to.rope_long = m.rope_long, to.rope_short = m.rope_short;
    return to;
}

} // namespace quire
