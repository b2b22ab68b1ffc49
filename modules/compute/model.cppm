// quire.compute.model: the transformer as a program, in the order of the papers: operations are emitted once at load.
// **Owns** the program and the memory of its values. It knows no requests and no scheduling.
export module quire.compute.model;

import quire.compute.backend;
import quire.compute.eagle;
import quire.compute.prepared_adapters;
import quire.compute.prepared_weights;
import quire.compute.ranks.shards;
import quire.compute.rope_frequencies;
import quire.core.base;
export import quire.model_file.adapter;
import quire.model_file.quants;
import quire.model_file.weights;

export namespace quire {

// The operations of a model, or of one of several ranks with its part of the weights. The weights have shapes only, for a program that is read,
// not run. `leaves` [layers]: the matrices that are split by columns. `context`: the longest sequence; it decides between the two sets of
// frequencies of a model with rope_long.
Program build_program(const ModelConfig& config, const ModelTensors& weights, int context);
Program build_program(const RankShape& shape, const ModelTensors& weights, std::span<const LayerLeaves> leaves,
                      int context);

// Error: one sentence about a tensor that an adapter changes and that no operation of the program adapts. `shape`: of a model that is whole.
Result<void> check_adapters(const RankShape& shape, const ModelTensors& weights, std::span<const Adapter> adapters,
                            int context);

class Model {
public:
    // Prepares every weight of the rank and allocates memory for steps of up to max_tokens tokens and max_logit_rows rows of
    // logits. `tensors`: of the whole model. `progress` is called with the fraction of the bytes that are ready. `adapters`: that
    // check_adapters() accepted; they outlive the model.
    static Result<Model> create(Backend& backend, const RankShape& shape, const ModelTensors& tensors, int context,
                                int max_tokens, int max_logit_rows, const std::function<void(double)>& progress,
                                std::span<const Adapter> adapters = {});

    const Program&     program() const { return program_; }
    const Activations& values() const { return values_; }

    // The hidden state behind the last norm, of one row of the program's `selected`, computed on the host: no device keeps this state in a
    // form that the host can read. [hidden], valid until the next call.
    std::span<const float> hidden_state(std::span<const float> selected);

private:
    Program            program_;
    SliceMemory        slices_; // of weights that the backend reads where they are
    Activations        values_;
    float              norm_eps_ = 0;
    NormKind           norm_     = NormKind::rms;
    std::vector<float> output_norm_, output_norm_bias_, hidden_row_;
};

} // namespace quire

module :private;

namespace quire {

// Emits the operations of a model, layer by layer.
class ProgramBuilder {
public:
    ProgramBuilder(const RankShape& shape, const PreparedModel& weights, std::span<const PreparedLeaves> leaves,
                   int context, PreparedAdapters& adapters)
        : shape_(shape), c_(shape.config), w_(weights), leaves_(leaves), adapters_(adapters) {
        const std::int64_t heads = c_.n_heads, hidden = c_.hidden_size;
        x_     = value("x", hidden, {.f32 = true});
        h_     = value("h", hidden);
        delta_ = value("delta", hidden);
        if (c_.latent) {
            q_ = value("q", heads * (c_.latent->nope_dim + c_.rope_dim));
            if (c_.latent->q_rank > 0) q_rank_ = value("q_rank", c_.latent->q_rank);
            k_        = value("k_rope", c_.rope_dim);
            v_        = value("latent", c_.latent->kv_rank);
            q_latent_ = value("q_latent", heads * c_.head_dim);
            latent_   = value("latents", heads * c_.latent->kv_rank);
            attended_ = value("attended", heads * c_.latent->value_dim);
        } else if (const auto first = std::ranges::find_if(c_.layers, &LayerConfig::attends); first != c_.layers.end())
            use_heads_of(*first);
        if (c_.family->attention_gate) {
            q_gate_            = value("q_and_gate", 2 * heads * c_.head_dim);
            gate_of_attention_ = value("attention_gate", heads * c_.head_dim);
        }
        if (c_.recurrent.taps > 0) add_recurrent(c_.recurrent);
        const ExpertConfig& e        = c_.experts;
        const auto          is_dense = [&](const LayerConfig& l) {
            return l.feed_forward && (!l.experts || c_.family->dense_beside);
        };
        if (const auto first = std::ranges::find_if(c_.layers, is_dense); first != c_.layers.end())
            use_width_of(*first);
        if (c_.input_size > 0) {
            inputs_     = value("inputs", std::int64_t(c_.n_layers) * c_.input_size, {.f32 = true});
            projected_  = value("projected", std::int64_t(c_.n_layers) * c_.input_size);
            input_gate_ = value("input_gate", c_.input_size);
        }
        if (e.shared_ff_size > 0) {
            shared_gate_ = value("shared_gate", e.shared_ff_size);
            shared_up_   = value("shared_up", e.shared_ff_size);
        }
        if (e.n > 0) {
            routes_ = value("routes", std::int64_t(2) * e.used, {.f32 = true});
            if (e.latent_size > 0) {
                latent_in_  = value("expert_in", e.latent_size);
                latent_out_ = value("expert_out", e.latent_size);
            }
            if (!shape_.exact) {
                expert_gate_ = value("expert_gate", std::int64_t(e.used) * e.ff_size);
                expert_up_   = value("expert_up", std::int64_t(e.used) * e.ff_size);
            }
        }
        if (shape_.exact)
            for (int i = 0; i < exact_leaves / shape_.n; i++) {
                parts_.push_back(value("part", hidden, {.f32 = true}));
                if (e.n > 0) expert_parts_.push_back(value("expert_part", e.latent_size > 0 ? e.latent_size : hidden));
            }
        if (c_.mtp) {
            mtp_x_  = value("mtp_x", hidden, {.f32 = true});
            before_ = value("state_before", hidden);
            joined_ = value("embedding_and_state", 2 * hidden);
            memory_ = value("states", mtp_states * hidden, {.logit_rows = true});
            last_   = value("last", hidden, {.logit_rows = true});
            guess_  = value("guess", hidden, {.logit_rows = true});
        }
        if (c_.family->residual == Residual::parallel || c_.family->may_be_parallel || e.shared_ff_size > 0 ||
            (e.n > 0 && c_.family->dense_beside))
            other_ = value("other", hidden);

        const TensorView& factors = !w_.rope_long                 ? w_.rope_freqs
                                    : uses_long_rope(c_, context) ? w_.rope_long
                                                                  : w_.rope_short;
        if (c_.family->rope != RopePairs::none) rope_ = add_rope(c_, false, factors);
        if (std::ranges::any_of(c_.layers, &LayerConfig::local_rope)) local_rope_ = add_rope(c_, true, {});
        if (c_.draft)
            eagle_.emplace(p_, *c_.draft, *w_.eagle, int(c_.layers.size()) - 1,
                           add_rope(*c_.draft, false, w_.eagle->rope_freqs));
    }

    Program build() && {
        emit(Embed{w_.token_embd, w_.position_embd, x_, c_.embedding_scale, c_.position_offset, w_.token_types,
                   c_.separator, Token(shape_.vocab.first), shape_.n > 1});
        add_adapters(none, x_, adapters_.take_embedding(c_.embedding_scale));
        if (shape_.n > 1) emit(AllReduce{{x_}, x_});
        if (w_.embd_norm) norm_sum(x_, none, w_.embd_norm);
        if (w_.layer_embd) layer_inputs();
        for (int i = 0; i < c_.n_layers; i++) {
            p_.layers.push_back(p_.operations.size());
            layer(i);
        }
        head();
        p_.guesses = p_.operations.size();
        if (w_.mtp) guesses();
        if (eagle_) eagle_->guesses(p_.logits);
        return std::move(p_);
    }

private:
    Rope add_rope(const ModelConfig& config, bool local, const TensorView& factors) {
        std::span<const float> divisors;
        if (factors) divisors = {static_cast<const float*>(factors.data), std::size_t(factors.cols)};
        Rope rope;
        p_.frequencies.push_back(rope_frequencies(config, local, divisors, rope.scale));
        rope.inv_freq = p_.frequencies.back();
        rope.neox     = config.family->rope == RopePairs::neox;
        return rope;
    }

    // The values of layers that keep a state.
    void add_recurrent(const RecurrentConfig& r) {
        conv_in_    = value("conv_in", r.channels);
        conv_out_   = value("conv_out", r.channels);
        state_gate_ = value("state_gate", r.width);
        if (c_.family->recurrent == Mixer::short_conv) factor_ = value("factor", r.channels);
        if (r.n_heads == 0) return;
        const bool delta = c_.family->recurrent == Mixer::delta_rule;
        step_            = value("step", std::int64_t(r.n_heads) * (c_.family->grouped_heads ? 2 : 1), {.f32 = true});
        if (delta && !c_.family->grouped_heads) write_ = value("write", r.n_heads, {.f32 = true});
        if (std::ranges::any_of(w_.layers,
                                [](const PreparedLayer& l) { return l.recurrent && l.recurrent->x_and_gate; })) {
            joined_x_     = value("x_and_gate", std::int64_t(r.channels) + r.width);
            joined_key_   = value("keys_of_groups", std::int64_t(r.n_groups) * r.key_dim);
            joined_value_ = value("values_of_groups", r.width);
        }
        recalled_ = value("recalled", r.width, {.f32 = true});
        if (delta) normed_ = value("normed", r.width);
    }

    struct Form {
        bool logit_rows = false, f32 = false;
    };
    ValueId value(std::string_view name, std::int64_t cols) { return value(name, cols, {}); }
    ValueId value(std::string_view name, std::int64_t cols, Form form) {
        return p_.value({name, cols, form.logit_rows, form.f32});
    }
    void emit(Operation operation) { p_.operations.push_back(std::move(operation)); }
    void emit(Gemm gemm) {
        p_.operations.push_back(gemm);
        for (const Projection& p : gemm.projections) add_adapters(gemm.x, p.out, adapters_.take(p.weight, gemm.scale));
    }
    // With adapters, in parts: they add to both products, before the activation.
    void emit(GatedGemm gated) {
        if (!adapters_.has(gated.gate.weight) && !adapters_.has(gated.up.weight))
            return emit(Operation(std::move(gated)));
        emit(Gemm{gated.x, {gated.gate, gated.up}});
        emit(Gate{gated.up.out, gated.gate.out, gated.activation});
    }
    void add_adapters(ValueId x, ValueId out, std::vector<LoraPair> pairs) {
        if (!pairs.empty()) emit(LoraAdd{x, out, std::move(pairs)});
    }

    // out = norm(in); in place or not, without the residual.
    void norm(ValueId in, ValueId out, const WeightHandle& weight) {
        emit(Norm{in, none, out, weight, {}, c_.norm_eps, weight.cols, NormKind::rms});
    }
    // out = the norm of each head, without weights.
    void bare_norm(ValueId in, ValueId out, std::int64_t head_dim) {
        emit(Norm{in, none, out, {}, {}, c_.norm_eps, head_dim, NormKind::rms});
    }
    // h = norm of the residual, to which a waiting part is added first. An empty norm: h = the residual.
    void norm_residual(const PreparedLinear& weight) {
        const ValueId waiting = std::exchange(waiting_, none);
        emit(Norm{waiting != none ? waiting : x_, waiting != none ? x_ : none, h_, weight.weight, weight.bias,
                  c_.norm_eps, c_.hidden_size, weight ? c_.family->norm : NormKind::none});
    }
    // The next norm adds `part`, the result of attention or feed-forward, to the residual.
    void add(ValueId part) {
        if (waiting_ != none) emit(Add{x_, waiting_});
        waiting_ = part;
    }

    // x = norm(residual + part), or norm(part) without a residual.
    void norm_sum(ValueId part, ValueId residual, const PreparedLinear& weight) {
        emit(Norm{part, residual, x_, weight.weight, weight.bias, c_.norm_eps, c_.hidden_size, c_.family->norm});
    }

    // out = x · weightᵀ + bias of the whole model. This rank has the columns `ranges` of x and of the weight.
    void row_parallel(ValueId x, const PreparedLinear& whole, const std::vector<PreparedLinear>& leaves,
                      const std::vector<Range>& ranges, ValueId out) {
        if (shape_.whole()) return emit(Gemm{x, {{whole.weight, whole.bias, out}}, c_.residual_scale});
        std::vector<ValueId> parts;
        for (std::size_t i = 0; i < leaves.size(); i++) {
            if (!leaves[i]) {
                parts.push_back(none);
                continue;
            }
            ValueId from = x;
            if (leaves.size() > 1) {
                from = of_width(leaf_x_, "leaf", ranges[i].n);
                emit(TakeColumns{x, from, ranges[i].first - ranges[0].first});
            }
            parts.push_back(shape_.exact ? parts_[i] : out);
            emit(Gemm{from, {{leaves[i].weight, leaves[i].bias, parts.back()}}, c_.residual_scale});
        }
        emit(AllReduce{std::move(parts), out});
    }
    // One value for all leaves of a width.
    ValueId of_width(std::map<std::int64_t, ValueId>& values, std::string_view name, std::int64_t width) {
        const auto [at, is_new] = values.try_emplace(width, none);
        if (is_new) at->second = value(name, width);
        return at->second;
    }
    // q, k, v and the result of attention have the sizes of this layer from now on. Layers with the same sizes share the values.
    void use_heads_of(const LayerConfig& layer) {
        if (!layer.attends()) return;
        q_        = of_width(q_values_, "q", std::int64_t(c_.n_heads) * layer.head_dim);
        k_        = of_width(k_values_, "k", std::int64_t(layer.n_kv_heads) * layer.head_dim);
        v_        = of_width(v_values_, "v", std::int64_t(layer.n_kv_heads) * layer.value_dim);
        attended_ = of_width(attended_values_, "attended", std::int64_t(c_.n_heads) * layer.value_dim);
    }
    void use_width_of(const LayerConfig& layer) {
        const std::int64_t width = shape_.whole() ? layer.ff_size : c_.ff_size; // split layers are all alike
        gate_                    = of_width(gate_values_, "gate", width);
        up_                      = of_width(up_values_, "up", width);
    }
    // A norm of all heads of the model together; x has the heads `mine`, of `dim` columns each.
    void norm_heads(ValueId x, const WeightHandle& weight, Range mine, std::int64_t dim) {
        if (weight.cols == dim || shape_.n == 1) return norm(x, x, weight);
        const ValueId all = of_width(all_heads_, "all_heads", weight.cols);
        emit(AllGather{x, all, mine.first * dim});
        norm(all, all, weight);
        emit(TakeColumns{all, x, mine.first * dim});
    }
    const PreparedLeaves& leaves_of(const PreparedLayer& l) const {
        static const PreparedLeaves none_;
        return leaves_.empty() ? none_ : leaves_[std::size_t(&l - w_.layers.data())];
    }

    void layer(int i) {
        const PreparedLayer& l = w_.layers[std::size_t(i)];
        if (l.attn_out_norm) {
            norm_residual({});
            attention(i, l);
            norm_sum(delta_, x_, l.attn_out_norm);
            norm_residual({});
            dense(i, l, delta_);
            norm_sum(delta_, x_, l.layer_out_norm);
            return;
        }
        const bool parallel = c_.family->residual == Residual::parallel || (c_.family->may_be_parallel && !l.ffn_norm);
        const LayerConfig& layer = c_.layers[std::size_t(i)];
        if (layer.mixer != Mixer::none) {
            norm_residual(l.attn_norm);
            if (eagle_) eagle_->read_target(i, x_); // the norm has added all that comes before
            if (l.recurrent) recurrent(i, *l.recurrent);
            else if (l.latent) latent_attention(i, l);
            else attention(i, l);
            if (l.attn_post_norm) norm(delta_, delta_, l.attn_post_norm);
            add(delta_);
        }
        if (!layer.feed_forward) return;
        if (!parallel) norm_residual(l.ffn_norm);
        if (eagle_ && layer.mixer == Mixer::none) eagle_->read_target(i, x_);
        const ValueId out = parallel ? other_ : delta_;
        if (l.experts && l.ffn_up) dense_and_experts(i, l);
        else if (l.experts) experts(l, out);
        else dense(i, l, out);
        if (l.ffn_post_norm) norm(out, out, l.ffn_post_norm);
        add(out);
        if (l.input_gate) add_input(i, l);
        if (l.output_scale != 1) emit(Add{x_, std::exchange(waiting_, none), l.output_scale});
    }

    // Gemma 4: delta = norm(dense network) + norm(experts), each behind a norm of its own.
    void dense_and_experts(int i, const PreparedLayer& l) {
        dense(i, l, delta_);
        norm(delta_, delta_, l.dense_post_norm);
        norm(x_, h_, l.experts->router_norm);
        route(*l.experts, 1 / std::sqrt(float(c_.hidden_size)));
        norm(x_, h_, l.experts_norm);
        run_experts(l, other_);
        norm(other_, other_, l.experts_post_norm);
        emit(Add{delta_, other_});
    }

    // Gemma 3n, Gemma 4: numbers of each token for each layer, from a table and from the embedding. Their sum is to be divided by √2, which
    // add_input() does.
    void layer_inputs() {
        emit(Embed{w_.layer_embd, {}, inputs_, std::sqrt(float(c_.input_size))});
        norm_residual({});
        emit(Gemm{h_, {{w_.layer_proj.weight, w_.layer_proj.bias, projected_}}, 1 / std::sqrt(float(c_.hidden_size))});
        norm(projected_, projected_, w_.layer_proj_norm);
        emit(Add{inputs_, projected_});
    }
    void add_input(int i, const PreparedLayer& l) {
        norm_residual({});
        emit(Gemm{h_, {{l.input_gate.weight, l.input_gate.bias, input_gate_}}});
        emit(Activate{input_gate_, c_.family->activation, inputs_, std::int64_t(i) * c_.input_size});
        emit(Gemm{input_gate_, {{l.input_proj.weight, l.input_proj.bias, delta_}}, std::sqrt(0.5f)});
        norm(delta_, delta_, l.input_post_norm);
        add(delta_);
    }

    Rope rope_of(const LayerConfig& layer) const {
        return !layer.rope ? Rope() : layer.local_rope ? local_rope_ : rope_;
    }

    // `keys`: K and V go to the cache, and that is all.
    void attention(int i, const PreparedLayer& l, bool keys = false) {
        const LayerConfig& layer = c_.layers[std::size_t(i)];
        use_heads_of(layer);
        const bool              gated = c_.family->attention_gate && !keys;
        const int               own = layer.kv_source < 0 ? i : layer.kv_source; // the layer whose cache this one reads
        const ValueId           q   = keys ? none : q_;
        std::vector<Projection> projections;
        if (!keys) projections.push_back({l.attn_q.weight, l.attn_q.bias, gated ? q_gate_ : q_});
        if (l.attn_k) projections.push_back({l.attn_k.weight, l.attn_k.bias, k_});
        if (l.attn_v) projections.push_back({l.attn_v.weight, l.attn_v.bias, v_});
        emit(Gemm{h_, std::move(projections)});
        if (gated) {
            emit(TakeColumns{q_gate_, q_, 0, c_.n_heads});
            emit(TakeColumns{q_gate_, gate_of_attention_, c_.head_dim, c_.n_heads});
        }
        if (c_.family->v_norm && l.attn_k) bare_norm(l.attn_v ? v_ : k_, v_, layer.value_dim);
        const bool rope_first = c_.family->norm_after_rope && layer.rope;
        for (ValueId x : {q, k_})
            if (rope_first && x != none) emit(RopeAndStore{x, none, none, rope_of(layer), i, layer.head_dim, 0});
        if (l.attn_q_norm && !keys) norm_heads(q_, l.attn_q_norm, shape_.heads, layer.head_dim);
        if (l.attn_k_norm) norm_heads(k_, l.attn_k_norm, shape_.kv_heads_of(i), layer.head_dim);
        for (ValueId x : {q, k_})
            if (layer.bare_norm && x != none) bare_norm(x, x, layer.head_dim);
        if (l.attn_k) emit(RopeAndStore{q, k_, v_, rope_first ? Rope() : rope_of(layer), i, layer.head_dim, 0});
        else if (layer.rope) emit(RopeAndStore{q_, none, none, rope_of(layer), own, layer.head_dim, 0});
        if (keys) return;
        if (layer.temperature.scale != 0) emit(PositionScale{q_, layer.temperature});
        emit(Attention{q_, attended_, own, c_.n_heads, c_.attention_scale, c_.attention_softcap, layer.window,
                       l.attn_sinks, !c_.family->encoder, layer.chunked, first_of(i)});
        if (gated) emit(Gate{attended_, gate_of_attention_, Activation::sigmoid});
        row_parallel(gated ? gate_of_attention_ : attended_, l.attn_output, leaves_of(l).attn_output, shape_.attention,
                     delta_);
    }

    // A layer that keeps a state. Delta rule: the result of each head is normed, then gated; Mamba-2: gated, then normed by groups.
    void recurrent(int i, const RecurrentTensorsOf<WeightHandle>& t) {
        const RecurrentConfig& r = c_.recurrent;
        const auto       one = [](const PreparedLinear& l, ValueId out) { return Projection{l.weight, l.bias, out}; };
        const auto       project_out = [&](ValueId from) { emit(Gemm{from, {one(t.out, delta_)}, c_.residual_scale}); };
        const CausalConv conv{conv_in_, t.factor ? factor_ : none, none, conv_out_, t.conv, t.conv_bias, i};
        if (t.factor) {
            emit(Gemm{h_, {one(t.factor, factor_), one(t.gate, state_gate_), one(t.x, conv_in_)}});
            emit(CausalConv{conv.x, conv.factor, state_gate_, conv.out, conv.weight, conv.bias, i});
            return project_out(conv_out_);
        }
        const bool delta = c_.family->recurrent == Mixer::delta_rule;
        if (delta) {
            if (t.x_and_gate) x_and_gate(t.x_and_gate);
            else emit(Gemm{h_, {one(t.x, conv_in_), one(t.gate, state_gate_)}});
            if (t.write) emit(Gemm{h_, {one(t.write, write_), one(t.step, step_)}});
            else emit(Gemm{h_, {one(t.step, step_)}});
        } else emit(Gemm{h_, {one(t.gate, state_gate_), one(t.x, conv_in_), one(t.step, step_)}});
        emit(conv);
        emit(Recurrence{conv_out_, step_, write_, recalled_, t.step_bias, t.decay, t.skip, i, r.n_heads, r.n_groups,
                        r.key_dim, r.value_dim, c_.layers[std::size_t(i)].state.conv_floats(), delta,
                        !delta || c_.family->grouped_heads});
        if (delta) norm(recalled_, normed_, t.norm);
        emit(Gate{delta ? normed_ : recalled_, state_gate_, Activation::silu});
        if (!delta)
            emit(Norm{state_gate_, none, state_gate_, t.norm, {}, c_.norm_eps, r.width / r.n_groups, NormKind::rms});
        project_out(state_gate_);
    }

    // q, k and v of all groups, one behind the other, and the gate, from a matrix that has all four of a group together.
    void x_and_gate(const PreparedLinear& joined) {
        const RecurrentConfig& r     = c_.recurrent;
        const std::int64_t     width = r.width / r.n_groups, keys = std::int64_t(r.n_groups) * r.key_dim;
        emit(Gemm{h_, {{joined.weight, joined.bias, joined_x_}}});
        const auto put = [&](std::int64_t first, ValueId part, std::int64_t at) {
            emit(TakeColumns{joined_x_, part, first, r.n_groups});
            emit(PutColumns{part, conv_in_, at});
        };
        put(0, joined_key_, 0);
        put(r.key_dim, joined_key_, keys);
        put(std::int64_t(2) * r.key_dim, joined_value_, 2 * keys);
        emit(TakeColumns{joined_x_, state_gate_, 2 * r.key_dim + width, r.n_groups});
    }

    // DeepSeek-V2 (section 2.1), with the key's and the value's projection moved to the query and to the output: attention then reads
    // the latent rows themselves. `keys`: these rows go to the cache, and that is all.
    void latent_attention(int i, const PreparedLayer& l, bool keys = false) {
        const LayerConfig&      layer = c_.layers[std::size_t(i)];
        const auto&             t     = *l.latent;
        ValueId                 q_in  = h_;
        std::vector<Projection> first{{t.kv_a, {}, v_}, {t.k_rope, {}, k_}};
        if (t.q_a && !keys) first.push_back({t.q_a.weight, t.q_a.bias, q_rank_});
        else if (!keys) first.push_back({l.attn_q.weight, l.attn_q.bias, q_});
        emit(Gemm{h_, std::move(first)});
        if (t.q_a && !keys) {
            norm(q_rank_, q_rank_, t.q_a_norm);
            q_in = q_rank_;
            emit(Gemm{q_in, {{l.attn_q.weight, l.attn_q.bias, q_}}});
        }
        norm(v_, v_, t.kv_a_norm);
        emit(RopeAndStore{keys ? none : q_, k_, v_, rope_of(layer), i, c_.latent->nope_dim + c_.rope_dim,
                          c_.latent->nope_dim});
        if (keys) return;
        if (layer.temperature.scale != 0) emit(PositionScale{q_, layer.temperature});
        emit(HeadGemm{q_, q_latent_, t.k_b, c_.n_heads});
        emit(Attention{q_latent_, latent_, i, c_.n_heads, c_.attention_scale, c_.attention_softcap, layer.window,
                       l.attn_sinks, true, false, first_of(i)});
        emit(HeadGemm{latent_, attended_, t.v_b, c_.n_heads});
        row_parallel(attended_, l.attn_output, leaves_of(l).attn_output, shape_.attention, delta_);
    }

    void dense(int i, const PreparedLayer& l, ValueId out) {
        use_width_of(c_.layers[std::size_t(i)]);
        feed_forward(l.ffn_gate, l.ffn_up, l.ffn_down, leaves_of(l).ffn_down, shape_.ff, gate_, up_, out);
    }

    void feed_forward(const PreparedLinear& gate, const PreparedLinear& up, const PreparedLinear& down,
                      const std::vector<PreparedLinear>& leaves, const std::vector<Range>& ranges, ValueId gated,
                      ValueId inner, ValueId out) {
        if (gate) {
            emit(GatedGemm{h_, {gate.weight, gate.bias, gated}, {up.weight, up.bias, inner}, c_.family->activation});
            inner = gated;
        } else {
            emit(Gemm{h_, {{up.weight, up.bias, inner}}});
            emit(Activate{inner, c_.family->activation});
        }
        row_parallel(inner, down, leaves, ranges, out);
    }

    void route(const ExpertTensorsOf<WeightHandle>& t, float score_scale) {
        const ExpertConfig& e = c_.experts;
        emit(Route{h_, routes_, t.router.weight, t.router.bias, t.choice_bias, e.used, e.gating, e.normalised, e.scale,
                   e.n_groups, e.n_groups_used, score_scale, t.output_scale,
                   // The sum of two came with the bias of DeepSeek-V3.
                   e.gating == Gating::softmax && !t.choice_bias});
    }

    // out = the sum of the experts that route() has chosen; they may read and write a latent space (Nemotron 3 Super).
    void run_experts(const PreparedLayer& l, ValueId out) {
        const LinearOf<WeightHandle>& down = l.experts->latent_down;
        const LinearOf<WeightHandle>& up   = l.experts->latent_up;
        if (!down) return run_experts(l, h_, c_.residual_scale, out);
        emit(Gemm{h_, {{down.weight, down.bias, latent_in_}}});
        run_experts(l, latent_in_, 1, latent_out_);
        emit(Gemm{latent_out_, {{up.weight, up.bias, out}}, c_.residual_scale});
    }
    void run_experts(const PreparedLayer& l, ValueId x, float scale, ValueId out) {
        const ExpertConfig& e   = c_.experts;
        const auto          run = [&](const ExpertTensorsOf<WeightHandle>& w, ValueId gate, ValueId up, ValueId to) {
            const bool  joined = bool(w.gate_up);
            const auto& first  = w.gate ? w.gate : w.up; // where there is no gate, `up` is activated
            const auto& second = w.gate ? w.up : LinearOf<WeightHandle>();
            emit(ExpertGatedGemm{x,
                                 routes_,
                                          {joined ? w.gate_up : first.weight, first.bias, gate},
                                          {joined ? w.gate_up : second.weight, second.bias, up},
                                 e.n,
                                 e.used,
                                 c_.family->activation,
                                 joined,
                                 c_.family->weighs_input});
            emit(ExpertCombineGemm{
                gate, routes_, {w.down.weight, w.down.bias, to}, e.n, e.used, scale, !c_.family->weighs_input});
        };
        if (shape_.whole()) {
            run(*l.experts, expert_gate_, expert_up_, out);
        } else {
            const std::vector<ExpertTensorsOf<WeightHandle>>& leaves = leaves_of(l).experts;
            std::vector<ValueId>                              parts;
            for (std::size_t i = 0; i < leaves.size(); i++) {
                parts.push_back(!leaves[i].down ? none : shape_.exact ? expert_parts_[i] : out);
                if (parts.back() == none) continue;
                const std::int64_t width = e.used * shape_.expert_ff[i].n;
                run(leaves[i], shape_.exact ? of_width(leaf_gate_, "expert_gate", width) : expert_gate_,
                    shape_.exact ? of_width(leaf_up_, "expert_up", width) : expert_up_, parts.back());
            }
            emit(AllReduce{std::move(parts), out});
        }
    }

    void experts(const PreparedLayer& l, ValueId out) {
        const ExpertTensorsOf<WeightHandle>& t = *l.experts;
        route(t, 1);
        run_experts(l, out);
        if (!t.shared_up) return;
        feed_forward(t.shared_gate, t.shared_up, t.shared_down, leaves_of(l).shared_down, shape_.shared_ff,
                     shared_gate_, shared_up_, other_);
        if (t.shared_weight) emit(GateRows{other_, h_, t.shared_weight});
        add(other_);
    }

    void head() {
        const ValueId selected = value("selected", c_.hidden_size, {.logit_rows = true, .f32 = true});
        p_.selected            = selected;
        if (w_.mtp) mtp_keys();
        p_.keys = p_.operations.size();
        if (eagle_) eagle_keys();
        p_.head = p_.operations.size();
        if (waiting_ != none) emit(Add{x_, std::exchange(waiting_, none)});
        emit(SelectRows{x_, selected});
        if (c_.family->encoder) return; // an encoder's result is its hidden states
        if (last_ == none) last_ = value("last", c_.hidden_size, {.logit_rows = true});
        p_.logits = value("logits", c_.vocab_size, {.logit_rows = true, .f32 = true});
        emit(Norm{selected, none, last_, w_.output_norm.weight, w_.output_norm.bias, c_.norm_eps, c_.hidden_size,
                  c_.family->norm});
        logits_of(last_, w_.output);
        if (eagle_) eagle_->keep_states();
    }

    void logits_of(ValueId x, const PreparedLinear& output) {
        if (shape_.n == 1) {
            emit(Gemm{x, {{output.weight, output.bias, p_.logits}}, c_.logit_scale});
        } else {
            const ValueId mine = value("logits_part", shape_.vocab.n, {.logit_rows = true, .f32 = true});
            emit(Gemm{x, {{output.weight, output.bias, mine}}, c_.logit_scale});
            emit(AllGather{mine, p_.logits, shape_.vocab.first});
        }
        if (c_.logit_softcap > 0) emit(SoftCap{p_.logits, c_.logit_softcap});
        emit(Argmax{p_.logits});
    }

    // -- the layer for multi-token prediction (DeepSeek-V3, section 2.2)

    // The first position that a layer sees: the MTP layer has no true row of position 0, for no hidden state comes before it.
    int first_of(int layer) const { return layer == c_.n_layers ? 1 : 0; }

    // mtp_x = join · [norm(embedding); norm(hidden state before)] of each token. `states`: the hidden states of the step's tokens, or none.
    void mtp_input(ValueId states) {
        const MtpTensorsOf<WeightHandle>& t = *w_.mtp;
        emit(Carry{states, last_, guess_, memory_, before_});
        norm(before_, before_, t.hnorm);
        emit(PutColumns{before_, joined_, c_.hidden_size});
        emit(Embed{t.token_embd ? t.token_embd : w_.token_embd, {}, mtp_x_, c_.embedding_scale});
        norm(mtp_x_, h_, t.enorm);
        emit(PutColumns{h_, joined_, 0});
        emit(Gemm{joined_, {{t.join.weight, t.join.bias, mtp_x_}}});
    }

    // K and V of the MTP layer for the tokens of a step.
    void mtp_keys() {
        p_.layers.push_back(p_.operations.size());
        if (waiting_ != none) emit(Add{x_, std::exchange(waiting_, none)});
        norm(x_, h_, w_.output_norm.weight);
        mtp_input(h_);
        const PreparedLayer& l = w_.layers.back();
        const ValueId        x = std::exchange(x_, mtp_x_);
        norm_residual(l.attn_norm);
        if (l.latent) latent_attention(c_.n_layers, l, true);
        else attention(c_.n_layers, l, true);
        x_ = x;
    }

    void eagle_keys() {
        p_.layers.push_back(p_.operations.size());
        if (waiting_ != none) emit(Add{x_, std::exchange(waiting_, none)});
        eagle_->read_target(c_.n_layers, x_);
        p_.keys = p_.operations.size();
        eagle_->keys();
    }

    // The whole layer on the tokens of a plan with `guesses`, and the logits of the tokens behind them.
    void guesses() {
        const MtpTensorsOf<WeightHandle>& t = *w_.mtp;
        mtp_input(none);
        x_ = mtp_x_;
        layer(c_.n_layers);
        if (waiting_ != none) emit(Add{x_, std::exchange(waiting_, none)});
        emit(SelectRows{x_, p_.selected});
        norm(p_.selected, guess_, t.head_norm ? t.head_norm : w_.output_norm.weight);
        logits_of(guess_, t.output ? t.output : w_.output);
    }

    const RankShape&                shape_;
    const ModelConfig&              c_;
    const PreparedModel&            w_;
    std::span<const PreparedLeaves> leaves_;
    PreparedAdapters&               adapters_;
    Program                         p_;
    Rope                            rope_, local_rope_;
    std::optional<EagleProgram>     eagle_;
    ValueId                         waiting_ = none; // to be added to the residual
    ValueId x_ = none, h_ = none, q_ = none, q_rank_ = none, k_ = none, v_ = none, q_latent_ = none, latent_ = none,
            q_gate_ = none, gate_of_attention_ = none, conv_in_ = none, conv_out_ = none, factor_ = none,
            state_gate_ = none, step_ = none, write_ = none, recalled_ = none, normed_ = none, attended_ = none,
            delta_ = none, other_ = none, gate_ = none, up_ = none, shared_gate_ = none, shared_up_ = none,
            routes_ = none, expert_gate_ = none, expert_up_ = none, inputs_ = none, projected_ = none,
            input_gate_ = none, mtp_x_ = none, before_ = none, joined_ = none, memory_ = none, last_ = none,
            guess_ = none, latent_in_ = none, latent_out_ = none, joined_x_ = none, joined_key_ = none,
            joined_value_ = none;
    std::vector<ValueId>            parts_, expert_parts_;                     // of leaves, with `exact`
    std::map<std::int64_t, ValueId> leaf_x_, leaf_gate_, leaf_up_, all_heads_; // by width
    std::map<std::int64_t, ValueId> gate_values_, up_values_, q_values_, k_values_, v_values_, attended_values_;
};

Program build_program(const ModelConfig& c, const ModelTensors& w, int context) {
    RankShape whole;
    whole.config = c;
    return build_program(whole, w, {}, context);
}

// A program to read: the handles are only numbered.
static Program shapes_only(const RankShape& shape, const ModelTensors& w, std::span<const LayerLeaves> leaves,
                           int context, PreparedAdapters& adapters) {
    WeightPreparer prepare(
        [n = 0](const TensorView& t, WeightUse, int) mutable { return WeightHandle{t.type, t.rows, t.cols, n++}; },
        adapters);
    PreparedModel weights = prepare_ends(w, prepare);
    for (const LayerTensors& l : w.layers) weights.layers.push_back(prepare(l, shape.config));
    std::vector<PreparedLeaves> ready;
    for (const LayerLeaves& l : leaves) ready.push_back(prepare(l, shape.config));
    (void)adapters.add_embedding();
    return ProgramBuilder(shape, weights, ready, context, adapters).build();
}

Program build_program(const RankShape& shape, const ModelTensors& w, std::span<const LayerLeaves> leaves, int context) {
    PreparedAdapters no_adapters({}, {});
    return shapes_only(shape, w, leaves, context, no_adapters);
}

Result<void> check_adapters(const RankShape& shape, const ModelTensors& w, std::span<const Adapter> adapters,
                            int context) {
    PreparedAdapters prepared(
        adapters, [](const TensorView& t, WeightUse, int) { return WeightHandle{t.type, t.rows, t.cols, 0}; });
    (void)shapes_only(shape, w, {}, context, prepared);
    return prepared.check_taken();
}

Result<Model> Model::create(Backend& backend, const RankShape& shape, const ModelTensors& tensors, int context,
                            int max_tokens, int max_logit_rows, const std::function<void(double)>& progress,
                            std::span<const Adapter> adapters) {
    const ModelConfig& config = shape.config;
    Model              model;
    ModelTensors       ends = tensors;
    // Bytes of tensors. All of them: of a rank about its part of the layers.
    const auto    bytes_of = [](const TensorView& t) { return double(t.rows) * double(row_bytes(t.type, t.cols)); };
    double        all = 0, done = 0;
    const Prepare by_backend = [&](const TensorView& t, WeightUse use, int n) {
        Result<WeightHandle> ready = backend.prepare(t, use, n);
        done += bytes_of(t);
        if (ready && progress && all > 0) progress(std::min(1.0, done / all));
        return ready;
    };
    PreparedAdapters adapted(adapters, by_backend);
    WeightPreparer   prepare(by_backend, adapted);
    check(adapters.empty() || shape.whole(), "adapters of a model that is split");
    rank_ends(shape, ends, model.slices_);
    PreparedAdapters none({}, {});
    WeightPreparer   count(
        [&](const TensorView& t, WeightUse, int) {
            all += bytes_of(t);
            return WeightHandle{t.type, t.rows, t.cols, 0};
        },
        none);
    for (const LayerTensors& layer : tensors.layers) (void)count(layer, config);
    all /= shape.n;
    (void)prepare_ends(ends, count);
    PreparedModel               weights = prepare_ends(ends, prepare);
    std::vector<PreparedLeaves> leaves;
    for (std::size_t i = 0; i < tensors.layers.size() && !prepare.error(); i++) {
        LayerTensors layer = tensors.layers[i];
        if (!shape.whole()) {
            LayerLeaves split;
            layer = rank_layer(shape, int(i), layer, split, model.slices_);
            leaves.push_back(prepare(split, config));
        }
        weights.layers.push_back(prepare(layer, config));
        if (backend.copies_weights()) model.slices_.clear();
    }
    if (prepare.error()) return std::unexpected(*prepare.error());
    if (progress) progress(1);
    if (auto ok = adapted.add_embedding(); !ok) return std::unexpected(ok.error());
    backend.end_weights();

    const auto on_host = [](const TensorView& w, std::vector<float>& out) {
        if (!w) return;
        out.resize(std::size_t(w.rows * w.cols));
        dequantize(w.type, w.data, out.data(), w.rows * w.cols);
    };
    on_host(tensors.output_norm.weight, model.output_norm_);
    on_host(tensors.output_norm.bias, model.output_norm_bias_);
    model.norm_eps_ = config.norm_eps;
    model.norm_     = tensors.output_norm ? config.family->norm : NormKind::none;
    model.program_  = ProgramBuilder(shape, weights, leaves, context, adapted).build();
    // Some devices read rows in groups of 8.
    Result<Activations> values =
        Activations::create(backend, model.program_, std::max(max_tokens, 8), std::max(max_logit_rows, 8));
    if (!values) return std::unexpected(values.error());
    model.values_ = std::move(*values);
    return model;
}

std::span<const float> Model::hidden_state(std::span<const float> x) {
    if (norm_ == NormKind::none) return x;
    const bool bias = !output_norm_bias_.empty();
    double     mean = 0, squares = 0;
    for (float v : x) mean += double(v);
    mean = norm_ == NormKind::layer ? mean / double(x.size()) : 0;
    for (float v : x) squares += (double(v) - mean) * (double(v) - mean);
    const double scale = 1 / std::sqrt(squares / double(x.size()) + double(norm_eps_));
    hidden_row_.resize(x.size());
    for (std::size_t i = 0; i < x.size(); i++)
        hidden_row_[i] = float((double(x[i]) - mean) * scale) * output_norm_[i] + (bias ? output_norm_bias_[i] : 0.0f);
    return hidden_row_;
}

} // namespace quire
