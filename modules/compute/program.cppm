// quire.compute.program: the transformer as a list of operations, emitted once at load and compiled by a backend. Plain values;
// owns the RoPE frequencies and the tokens of drafts.
export module quire.compute.program;

import quire.core.base;
export import quire.core.tensor;
export import quire.model_file.family;

export namespace quire {

// A matrix that one operation writes and others read, one row per token or per logit row of the step: its place in Program::values.
using ValueId                 = int;
inline constexpr ValueId none = -1;

struct Value {
    std::string_view name;
    std::int64_t     cols       = 0;
    bool             logit_rows = false; // one row per logit row of the step, else one per token
    bool             f32        = false; // float32 (residual, logits), else the backend's activation type
};

// A backend's own form of a tensor of the file. The shape and the type are the tensor's; the number means something to that backend alone.
struct WeightHandle {
    DType        type = DType::F32;
    std::int64_t rows = 0, cols = 0;
    int          number = -1;

    explicit operator bool() const { return number >= 0; }
};

// out = x · weightᵀ + bias
struct Projection {
    WeightHandle weight; // [out × in]
    WeightHandle bias;   // [out], or empty
    ValueId      out = none;
};
inline constexpr int max_projections = 3; // of one Gemm

// RoPE: pair i of a head is rotated by position * inv_freq[i]; cosine and sine are multiplied by `scale`.
struct Rope {
    std::span<const float> inv_freq; // [rope_dim / 2]; dimensions from rope_dim on are left alone
    float                  scale = 1;
    bool                   neox  = false; // pairs (i, i + rope_dim/2); else interleaved: (2i, 2i + 1)
};

// -- the operations; `out` is never an input unless said

// out [float32] = scale · row tokens[t] of `table`, plus row positions[t] + offset of `positions` and row 0 of `types` if they are given.
// A table that is `part` of the vocabulary begins with token `first`; a token outside the table gets zeros.
struct Embed {
    WeightHandle table, positions;
    ValueId      out    = none;
    float        scale  = 1;
    int          offset = 0;
    // Rows that are added: row 0, and row 1, if there is one, behind the first `separator` of a sequence.
    WeightHandle types     = {};
    Token        separator = -1;
    Token        first     = 0;
    bool         part      = false;
};

// out = norm(x) · weight + bias. With `residual` (float32): residual += x first, and the norm is that of the sum. Each run of
// `group` columns is normed alone: the whole row, or one head. `out` may be x. An RMSNorm without a weight has ones. NormKind::none: out
// is the sum, or x. A weight that is longer than a group belongs to several of them, one after the other.
struct Norm {
    ValueId      x = none, residual = none, out = none;
    WeightHandle weight, bias; // [group], or the weight of all groups [x's width]
    float        eps   = 0;
    std::int64_t group = 0;
    NormKind     kind  = NormKind::rms;
};

// Up to max_projections GEMMs with one input, M = rows, N = weight.rows, K = x's width; each output times `scale`.
struct Gemm {
    ValueId                 x = none;
    std::vector<Projection> projections;
    float                   scale = 1;
};

// The matrices of one adapter for one weight, or for a part of its rows.
struct LoraPair {
    WeightHandle a, b;        // [rank × in], [out × rank]; for the embedding a has a row for each token, [vocab × rank]
    int          adapter = 0; // as AdapterUse counts them
    float        scale   = 1; // of b · a
};

// Adapters add to the result of a GEMM: out += Σ over the adapters of the row's sequence, in ascending order, of
// AdapterUse::scale · scale · (x · aᵀ) · bᵀ. Without x, for the embedding: a's row of the token in place of x · aᵀ.
struct LoraAdd {
    ValueId               x = none, out = none;
    std::vector<LoraPair> pairs; // in the order of their adapters
};

// gate.out = activation(x · gateᵀ) · (x · upᵀ); up.out is scratch memory.
struct GatedGemm {
    ValueId    x = none;
    Projection gate, up;
    Activation activation = Activation::silu;
};

// gate = activation(gate) · x
struct Gate {
    ValueId    x = none, gate = none;
    Activation activation = Activation::silu;
};

// x = activation(x), times columns first .. of `times` if there is one.
struct Activate {
    ValueId      x          = none;
    Activation   activation = Activation::gelu_tanh;
    ValueId      times      = none; // float32
    std::int64_t first      = 0;
};

// A GEMM for each of n_heads heads: of x's head the first `in` columns · weight_headᵀ, then the head's other columns as they are.
// weight: the matrices of all heads, one after the other, [n_heads·rows × in].
struct HeadGemm {
    ValueId      x = none, out = none;
    WeightHandle weight;
    int          n_heads = 0;
};

// RoPE on q [heads · q_dim] in place, dimensions q_first .. of each head; k [kv_heads · head_dim], with RoPE, and v go to the step's
// slots of the layer's cache. In a latent cache (KvLayer::latent()) the row of a token is v, then k. Without k and v nothing is stored;
// without q nothing is rotated in place.
struct RopeAndStore {
    ValueId q = none, k = none, v = none;
    Rope    rope; // no frequencies: q and k are left as they are
    int     layer = 0, q_dim = 0, q_first = 0;
};

// out: each query over the cached positions of its sequence up to its own. Prefill and decode alike.
struct Attention {
    ValueId      q = none, out = none;
    int          layer = 0, n_heads = 0;
    float        scale   = 1;   // of q·k, before the soft-cap
    float        softcap = 0;   // scores are softcap · tanh(score / softcap); 0: as they are
    int          window  = 0;   // position i sees i-window+1 .. i; 0: all before it
    WeightHandle sinks;         // [n_heads] a score that takes part in the softmax and has no value, or empty (gpt-oss)
    bool         causal = true; // false: each token sees all of its sequence, which runs in one step
    bool chunked = false; // position i sees i / window · window .. i instead; window is a multiple of 256 (Llama 4)
    int  first =
        0; // > 0: no token sees the positions before this one; then a plan has one token of each sequence, and no window
};

// x of each token grows with the token's position.
struct PositionScale {
    ValueId     x = none;
    Temperature temperature;
};

// A causal convolution of each column over the tokens of its sequence: with y = x · factor, or x alone,
// out[t] = Σ over j < taps of weight[column][j] · y[t - taps + 1 + j], plus bias, times gate[t]; without a gate silu of that.
// The layer's state has the last taps - 1 rows of y (RecurrentConfig); before a sequence's first token y is 0.
struct CausalConv {
    ValueId      x = none, factor = none, gate = none, out = none;
    WeightHandle weight, bias; // [columns × taps], [columns] or empty; float32
    int          layer = 0;
};

// The recurrence of a layer over the tokens of each sequence. A head keeps a matrix S [key_dim × value_dim] in the layer's state, 0 at first.
// With a decay g, a key k, a value v and a query q, each token makes of it, and gives, in this order:
//   the gated delta rule:  S = g·S;  S += k ⊗ β·(v - Sᵀk);  out = Sᵀq         k, q of length 1, q / √key_dim, β = sigmoid(write)
//   a selective scan:      S = g·S + k ⊗ Δ·v;  out = Sᵀq + skip·v             Δ = softplus(step + step_bias)
// g = exp(decay · softplus(step + step_bias)). A row of x is q, k, v (delta rule) or v, k, q (Mamba-2's x, B, C); each has q and k for
// n_groups groups of heads.
struct Recurrence {
    ValueId      x = none, step = none, write = none, out = none; // step and write: float32 [heads]
    WeightHandle step_bias, decay, skip;                          // [heads], float32; skip: or empty
    int          layer = 0, n_heads = 0, n_groups = 0, key_dim = 0, value_dim = 0;
    std::int64_t state_at = 0; // where the matrices begin in the layer's state, in floats (RecurrentConfig)
    bool         delta    = false;
    // Head h belongs to group h / (n_heads / n_groups), and `step` is `write` too: of each group what its heads write, then their steps.
    // Else the delta rule's head h belongs to group h mod n_groups.
    bool grouped = false;
};

// A mixture of experts in three operations. Route: scores = score_scale · (x · weightᵀ) + bias in float32; the n_used experts with the
// highest gated score + choice_bias, the lowest index of equal ones; their weights by `gating`, `normalised` to the sum 1, times `scale`
// and the expert's `expert_scale`. The experts stand in n_groups groups of equal size: only those of the n_groups_used groups are chosen
// whose two highest sums of gated score and choice_bias are the most (DeepSeek-V3, section 2.1.2).
// out [float32, 2 · n_used]: the experts' indices as int32, best first, then their weights.
struct Route {
    ValueId      x = none, out = none;
    WeightHandle weight, bias, choice_bias; // [experts × hidden] and [experts], float32
    int          n_used     = 0;
    Gating       gating     = Gating::softmax;
    bool         normalised = false;
    float        scale      = 1;
    int          n_groups = 1, n_groups_used = 1; // up to 64
    float        score_scale  = 1;
    WeightHandle expert_scale = {};    // [experts], float32, or empty
    bool         best_alone   = false; // of groups: the highest sum counts alone (DeepSeek-V2)
};

// out [n_used · ff]: activation(x · gateᵀ) · (x · upᵀ) of each expert that a row chose. The order of rows and columns in `out` is the
// backend's. gate.out is `out`, up.out scratch memory of the same size; stacks of weights and biases as in ExpertTensors. Without `up`:
// activation(x · gateᵀ).
struct ExpertGatedGemm {
    ValueId    x = none, routes = none;
    Projection gate, up;
    int        n_experts = 0, n_used = 0;
    Activation activation  = Activation::silu;
    bool       alternating = false; // both weights are one stack: each expert's gate, then its up; no biases
    bool       weighs_x    = false; // x of an expert is weight · x, and ExpertCombineGemm takes no weights (Llama 4)
};

// down.out = Σ over the chosen experts, best first, of weight · (x · downᵀ + bias), x as ExpertGatedGemm left it; times `scale`.
struct ExpertCombineGemm {
    ValueId    x = none, routes = none;
    Projection down;
    int        n_experts = 0, n_used = 0;
    float      scale    = 1;
    bool       weighted = true; // false: every weight is 1
};

// x = x · sigmoid(gate · weight), a factor for each row
struct GateRows {
    ValueId      x = none, gate = none;
    WeightHandle weight; // [gate's width], float32
};

// x = cap · tanh(x / cap)
struct SoftCap {
    ValueId x   = none;
    float   cap = 0;
};

// residual = scale · (residual + x); residual is float32, or of x's type
struct Add {
    ValueId residual = none, x = none;
    float   scale = 1;
};

// out[i] = x[logit_rows[i]], both float32
struct SelectRows {
    ValueId x = none, out = none;
};

// The most likely token of each row of logits, the lowest id of several; -1 for a row that is not usable (StepResults).
struct Argmax {
    ValueId logits = none;
};

// -- collective operations of the ranks (quire.compute.ranks.shards); every rank's program has these operations in one order

// out = Σ over the ranks, in float32 and rounded once, of the sum of each rank's `parts`, which have out's shape; `none`: nothing.
// Both sums are trees in the order of the ranks and of the parts: the sum of n summands is the sum of the first half, rounded up, plus
// the sum of the other half. `out` may be one of the parts, which are scratch memory afterwards.
struct AllReduce {
    std::vector<ValueId> parts;
    ValueId              out = none;
};

// Copies x of each rank into `out` of all ranks; `first`: the column of `out` where this rank's x begins.
struct AllGather {
    ValueId      x = none, out = none;
    std::int64_t first = 0;
};

// out = columns first .. of x, as many as out has. With `groups`: as many columns of each of so many equal parts of x.
struct TakeColumns {
    ValueId      x = none, out = none;
    std::int64_t first  = 0;
    std::int64_t groups = 1;
};

// The hidden state before each token, for an MTP layer or a draft of EAGLE-3. First the rows that the plan keeps go from `steps`, or from
// `guesses`, to `memory`, both with out's width: `memory` is several times as wide, and a row of it holds several. Then out[t] = x[t - 1] if
// that is a row of t's sequence; for a sequence's first token, and for all without x, the row of memory that the plan names, or zeros.
// `memory` outlives the step.
struct Carry {
    ValueId x = none, steps = none, guesses = none, memory = none, out = none;
};

// Columns first .. of out = x; the others stay.
struct PutColumns {
    ValueId      x = none, out = none;
    std::int64_t first = 0;
};

// out = -infinity, but column columns[i] = x's column i; both float32.
struct ScatterColumns {
    ValueId                x = none, out = none;
    std::span<const Token> columns; // as many as x has
};

using Operation =
    std::variant<Embed, Norm, Gemm, GatedGemm, Gate, Activate, HeadGemm, RopeAndStore, PositionScale, Attention,
                 CausalConv, Recurrence, Route, ExpertGatedGemm, ExpertCombineGemm, GateRows, SoftCap, Add, SelectRows,
                 Argmax, AllReduce, AllGather, TakeColumns, Carry, PutColumns, ScatterColumns, LoraAdd>;

struct Program {
    Program()                              = default;
    Program(Program&&) noexcept            = default; // not copied: operations point to the frequencies
    Program& operator=(Program&&) noexcept = default;
    Program(const Program&)                = delete;
    Program& operator=(const Program&)     = delete;

    std::vector<Value>       values;
    std::vector<Operation>   operations;
    std::vector<std::size_t> layers;       // the first operation of each
    std::size_t              keys     = 0; // from here to `head`: for the cache of a layer behind the model alone
    std::size_t              head     = 0; // operations from here on run only in steps that want logits
    std::size_t              guesses  = 0; // operations from here on run in place of a step, where the plan says so
    ValueId                  selected = none, logits = none; // the residual of the logit rows; their logits, if any
    std::vector<std::vector<float>> frequencies;             // Rope::inv_freq points there
    std::vector<std::vector<Token>> tokens;                  // ScatterColumns::columns likewise

    ValueId value(const Value& v) {
        values.push_back(v);
        return ValueId(values.size()) - 1;
    }
    const Value& operator[](ValueId id) const { return values[std::size_t(id)]; }
};

// The values that an operation reads and writes. A value that is both input and output stands in both lists.
struct ValueAccess {
    std::vector<ValueId> reads, writes;
};
ValueAccess access_of(const Operation& operation);

// "norm", "gemm" ...
std::string_view kind_of(const Operation& operation);

// One line: kind, inputs → outputs, shapes and attributes.
std::string describe(const Program& program, const Operation& operation);

// A line for each operation, behind the text of `label`; a layer with the same lines as the layer before is only counted.
std::string list(const Program& program, const std::function<std::string(std::size_t operation)>& label);

} // namespace quire

module :private;

namespace quire {

struct AccessOf {
    ValueAccess operator()(const Embed& o) const { return {{}, {o.out}}; }
    ValueAccess operator()(const Norm& o) const {
        return o.residual == none ? ValueAccess{{o.x}, {o.out}} : ValueAccess{{o.x, o.residual}, {o.residual, o.out}};
    }
    ValueAccess operator()(const Gemm& o) const {
        ValueAccess a{{o.x}, {}};
        for (const Projection& p : o.projections) a.writes.push_back(p.out);
        return a;
    }
    ValueAccess operator()(const GatedGemm& o) const { return {{o.x}, {o.gate.out}}; }
    ValueAccess operator()(const Gate& o) const { return {{o.x, o.gate}, {o.gate}}; }
    ValueAccess operator()(const CausalConv& o) const { return {given({o.x, o.factor, o.gate}), {o.out}}; }
    ValueAccess operator()(const Recurrence& o) const { return {given({o.x, o.step, o.write}), {o.x, o.out}}; }
    ValueAccess operator()(const Activate& o) const {
        return o.times == none ? ValueAccess{{o.x}, {o.x}} : ValueAccess{{o.x, o.times}, {o.x}};
    }
    ValueAccess operator()(const HeadGemm& o) const { return {{o.x}, {o.out}}; }
    ValueAccess operator()(const Route& o) const { return {{o.x}, {o.out}}; }
    ValueAccess operator()(const ExpertGatedGemm& o) const { return {{o.x, o.routes}, {o.gate.out}}; }
    ValueAccess operator()(const ExpertCombineGemm& o) const { return {{o.x, o.routes}, {o.down.out}}; }
    ValueAccess operator()(const GateRows& o) const { return {{o.x, o.gate}, {o.x}}; }
    ValueAccess operator()(const SoftCap& o) const { return {{o.x}, {o.x}}; }
    ValueAccess operator()(const RopeAndStore& o) const { return {given({o.q, o.k, o.v}), given({o.q})}; }
    ValueAccess operator()(const PositionScale& o) const { return {{o.x}, {o.x}}; }
    ValueAccess operator()(const Attention& o) const { return {{o.q}, {o.out}}; }
    ValueAccess operator()(const Add& o) const { return {{o.residual, o.x}, {o.residual}}; }
    ValueAccess operator()(const SelectRows& o) const { return {{o.x}, {o.out}}; }
    ValueAccess operator()(const Argmax& o) const { return {{o.logits}, {}}; }
    ValueAccess operator()(const AllReduce& o) const {
        ValueAccess a{{}, {o.out}};
        for (ValueId id : o.parts)
            if (id != none) a.reads.push_back(id);
        return a;
    }
    ValueAccess operator()(const AllGather& o) const { return {{o.x}, {o.out}}; }
    ValueAccess operator()(const TakeColumns& o) const { return {{o.x}, {o.out}}; }
    ValueAccess operator()(const LoraAdd& o) const { return {given({o.x, o.out}), {o.out}}; }
    ValueAccess operator()(const Carry& o) const {
        return {given({o.x, o.steps, o.guesses, o.memory}), {o.memory, o.out}};
    }
    ValueAccess operator()(const PutColumns& o) const { return {{o.x, o.out}, {o.out}}; }
    ValueAccess operator()(const ScatterColumns& o) const { return {{o.x}, {o.out}}; }

private:
    static std::vector<ValueId> given(std::initializer_list<ValueId> ids) {
        std::vector<ValueId> some;
        for (ValueId id : ids)
            if (id != none) some.push_back(id);
        return some;
    }
};

ValueAccess access_of(const Operation& operation) { return std::visit(AccessOf{}, operation); }

template <class... Cases>
struct Match : Cases... {
    using Cases::operator()...;
};

std::string_view kind_of(const Operation& operation) {
    constexpr std::array<std::string_view, std::variant_size_v<Operation>> names{
        "embed",          "norm",           "gemm",      "gated_gemm",  "gate",        "activate", "head_gemm",
        "rope_and_store", "position_scale", "attention", "causal_conv", "recurrence",  "route",    "expert_gated",
        "expert_combine", "gate_rows",      "soft_cap",  "add",         "select_rows", "argmax",   "all_reduce",
        "all_gather",     "take_columns",   "carry",     "put_columns", "scatter",     "lora_add"};
    return names[operation.index()];
}

std::string describe(const Program& program, const Operation& operation) {
    const auto name  = [&](ValueId id) { return program[id].name; };
    const auto shape = [](const WeightHandle& w) { return cat(dtype_info(w.type).name, " ", w.rows, " × ", w.cols); };
    const auto act   = [](Activation a) {
        constexpr std::array<std::string_view, 7> names{"silu",           "gelu",  "gelu (erf)", "relu",
                                                        "clamped swiglu", "relu²", "sigmoid"};
        return names[std::size_t(a)];
    };
    const auto times = [](float factor) { return factor == 1 ? std::string() : cat(", × ", factor); };
    const auto text  = std::visit(
        Match{
            [&](const Embed& o) {
                return cat("tokens", o.positions ? ", positions" : "", " → ", name(o.out), "  (", shape(o.table),
                            times(o.scale), ")");
            },
            [&](const Norm& o) {
                const std::string sum =
                    cat(o.residual != none ? cat(name(o.residual), " += ", name(o.x)) : std::string(name(o.x)), " → ",
                        name(o.out));
                if (o.kind == NormKind::none) return sum;
                return cat(sum, o.kind == NormKind::layer ? "  (LayerNorm" : "  (RMSNorm",
                           o.group != program[o.x].cols ? cat(" of ", o.group, ")") : std::string(")"));
            },
            [&](const Gemm& o) {
                std::string outs, shapes;
                for (const Projection& p : o.projections) {
                    outs += cat(outs.empty() ? "" : ", ", name(p.out));
                    shapes += cat(shapes.empty() ? "" : ", ", shape(p.weight), p.bias ? " + bias" : "");
                }
                return cat(name(o.x), " → ", outs, "  (", shapes, times(o.scale), ")");
            },
            [&](const GatedGemm& o) {
                return cat(name(o.x), " → ", name(o.gate.out), "  (", act(o.activation), ", ", shape(o.gate.weight),
                            ", ", shape(o.up.weight), ")");
            },
            [&](const Gate& o) { return cat(name(o.gate), " → ", act(o.activation), " of it · ", name(o.x)); },
            [&](const CausalConv& o) {
                return cat(name(o.x), o.factor != none ? cat(" · ", name(o.factor)) : std::string(), ", state → ",
                            name(o.out), "  (", o.weight.cols, " taps, ",
                           o.gate != none ? cat("times ", name(o.gate)) : std::string("silu"), ")");
            },
            [&](const Recurrence& o) {
                return cat(name(o.x), ", ", o.write != none ? cat(name(o.write), ", ") : std::string(), name(o.step),
                            ", state → ", name(o.out), "  (", o.delta ? "delta rule" : "selective scan", ", ", o.n_heads,
                            " heads of ", o.key_dim, " × ", o.value_dim, ", ", o.n_groups, " groups)");
            },
            [&](const Activate& o) {
                return cat(name(o.x), "  (", act(o.activation),
                           o.times == none ? std::string() : cat(", × ", name(o.times), " from column ", o.first), ")");
            },
            [&](const PositionScale& o) {
                return cat(name(o.x), "  (× 1 + ", o.temperature.scale, " · ln(1 + position / ", o.temperature.period,
                            "))");
            },
            [&](const HeadGemm& o) {
                return cat(name(o.x), " → ", name(o.out), "  (", o.n_heads, " heads of ",
                            dtype_info(o.weight.type).name, " ", o.weight.rows / o.n_heads, " × ", o.weight.cols, ")");
            },
            [&](const RopeAndStore& o) {
                return cat(o.q == none ? "" : name(o.q), o.q == none || o.k == none ? "" : ", ",
                           o.k == none ? std::string() : cat(name(o.k), ", ", name(o.v), " → KV cache"),
                           o.rope.inv_freq.empty() ? std::string("  (no RoPE)")
                                                    : cat("  (RoPE of ", 2 * o.rope.inv_freq.size(),
                                                         o.rope.neox ? ", NeoX pairs)" : ", interleaved pairs)"));
            },
            [&](const Attention& o) {
                return cat(name(o.q), ", KV cache → ", name(o.out), "  (", o.n_heads, " heads",
                           o.window > 0 ? cat(o.chunked ? ", chunks of " : ", window ", o.window) : std::string(),
                           o.softcap > 0 ? cat(", soft-cap ", o.softcap) : std::string(), o.sinks ? ", sinks" : "",
                           ")");
            },
            [&](const Route& o) {
                return cat(name(o.x), " → ", name(o.out), "  (", o.n_used, " of ", o.weight.rows, " experts)");
            },
            [&](const ExpertGatedGemm& o) {
                return cat(name(o.x), ", ", name(o.routes), " → ", name(o.gate.out), "  (", act(o.activation), ", ",
                            o.n_experts, " × ", dtype_info(o.gate.weight.type).name, " ",
                            o.gate.weight.rows / o.n_experts, " × ", o.gate.weight.cols, o.up.weight ? " twice)" : ")");
            },
            [&](const ExpertCombineGemm& o) {
                return cat(name(o.x), ", ", name(o.routes), " → ", name(o.down.out), "  (", o.n_experts, " × ",
                            dtype_info(o.down.weight.type).name, " ", o.down.weight.rows / o.n_experts, " × ",
                            o.down.weight.cols, times(o.scale), ")");
            },
            [&](const GateRows& o) { return cat(name(o.x), " *= sigmoid of ", name(o.gate)); },
            [&](const SoftCap& o) { return cat(name(o.x), "  (soft-cap ", o.cap, ")"); },
            [&](const Add& o) {
                return o.scale == 1
                            ? cat(name(o.residual), " += ", name(o.x))
                            : cat(name(o.residual), " = (", name(o.residual), " + ", name(o.x), ") × ", o.scale);
            },
            [&](const SelectRows& o) { return cat(name(o.x), " → ", name(o.out)); },
            [&](const Argmax& o) { return cat(name(o.logits), " → tokens"); },
            [&](const AllReduce& o) {
                std::string parts;
                for (ValueId id : o.parts)
                    if (id != none) parts += cat(parts.empty() ? "" : " + ", name(id));
                return cat(parts, " of all ranks → ", name(o.out));
            },
            [&](const AllGather& o) {
                return cat(name(o.x), " of all ranks → ", name(o.out), "  (from column ", o.first, " on)");
            },
            [&](const TakeColumns& o) {
                return cat(name(o.x), " → ", name(o.out), "  (", program[o.out].cols, " columns from ", o.first, " on",
                           o.groups > 1 ? cat(" of each of ", o.groups, " parts)") : std::string(")"));
            },
            [&](const LoraAdd& o) {
                std::string ranks;
                for (const LoraPair& p : o.pairs) ranks += cat(ranks.empty() ? "" : ", ", p.b.cols);
                return cat(name(o.out), " += ", o.x == none ? std::string_view("tokens") : name(o.x),
                            " through adapters  (ranks ", ranks, ")");
            },
            [&](const Carry& o) {
                return cat(o.x != none ? cat(name(o.x), ", ") : std::string(), name(o.memory), " → ", name(o.out),
                           "  (the row before)");
            },
            [&](const PutColumns& o) {
                return cat(name(o.x), " → ", name(o.out), "  (columns from ", o.first, " on)");
            },
            [&](const ScatterColumns& o) {
                return cat(name(o.x), " → ", name(o.out), "  (", o.columns.size(), " of ", program[o.out].cols,
                            " columns)");
            }},
        operation);
    std::string kind(kind_of(operation));
    kind.resize(15, ' ');
    return kind + text;
}

std::string list(const Program& program, const std::function<std::string(std::size_t operation)>& label) {
    const auto lines = [&](std::size_t first, std::size_t last) {
        std::string text;
        for (std::size_t i = first; i < last; i++)
            text += cat("  ", label(i), describe(program, program.operations[i]), "\n");
        return text;
    };
    std::string text = lines(0, program.layers[0]), before;
    for (std::size_t layer = 0, like = 0; layer < program.layers.size(); layer++) {
        const std::size_t end = layer + 1 < program.layers.size() ? program.layers[layer + 1] : program.head;
        std::string       now = lines(program.layers[layer], end);
        if (now == before) like++;
        const bool last = layer + 1 == program.layers.size();
        if (like > 0 && (last || now != before))
            text += cat("  and the same ", like, like == 1 ? " time" : " times", " more\n");
        if (now != before) text += cat("  -- layer ", layer, "\n", now), like = 0;
        before = std::move(now);
    }
    text += "  -- head\n" + lines(program.head, program.guesses);
    return program.guesses < program.operations.size()
               ? text + "  -- guesses\n" + lines(program.guesses, program.operations.size())
               : text;
}

} // namespace quire
