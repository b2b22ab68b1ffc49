// quire.compute.cuda.lowering: a program's operations with device addresses in place of its values. Owns nothing.
module;

#include "../../../cuda/guesses.h"
#include "../../../cuda/kernels.h"
#include "../../../cuda/ranks/ranks.h"

export module quire.compute.cuda.lowering;

import quire.compute.backend;
import quire.compute.cuda.experts;
import quire.compute.cuda.fusion;
import quire.compute.cuda.weights;
import quire.core.base;

export namespace quire {

// Attention of layers whose steps are cut alike.
struct AttentionKind {
    int  window = 0, head_dim = 0, value_dim = 0, n_kv_heads = 0;
    int  group                                  = 0; // of the cache
    bool chunked                                = false;
    bool operator==(const AttentionKind&) const = default;
};
AttentionKind attention_of(const quire::Attention& op, std::span<const KvLayer> layers);
// Of a program: quire.compute.cuda.step_upload has lists for so many.
inline constexpr int most_attentions = 4;
// The different ones of a program, as they come.
std::vector<AttentionKind> attentions_of(const Program& program, std::span<const KvLayer> layers);

// The block tables and slots of a step, one of each for each part of each cache group.
struct StepTables {
    std::vector<int> first;                             // of each group, among all parts
    int              tables_apart = 0, slots_apart = 0; // int32s from those of a part to those of the next one
};

// One for each operation, in order. RoPE's frequencies go to `memory`; a step has a list of split-KV items for each of `attentions`.
std::vector<LoweredOperation> lower(const Program& program, const Activations& values, std::span<const KvLayer> layers,
                                    std::span<const AttentionKind> attentions, const StepTables& tables,
                                    const DeviceWeights& weights, DeviceMemory& memory, cuda::Context& gpu);

} // namespace quire

module :private;

namespace quire {

// quire::Activation and cuda::Activation list the same activations in one order.
cuda::Activation activation_of(Activation a) { return cuda::Activation(int(a)); }

LoweredOperation of_one_row(bool known = true) {
    LoweredOperation to;
    to.device.rows = 1;
    to.known       = known;
    return to;
}

class Lowering {
public:
    Lowering(const Program& program, const Activations& values, std::span<const KvLayer> layers,
             std::span<const AttentionKind> attentions, const StepTables& tables, const DeviceWeights& weights,
             DeviceMemory& memory, cuda::Context& gpu)
        : program_(program), values_(values), layers_(layers), attentions_(attentions), tables_(tables),
          weights_(weights), memory_(memory), gpu_(gpu) {}

    LoweredOperation lower(const Embed& op) {
        LoweredOperation to = of_one_row();
        to.device.weight    = weights_.of(op.table);
        to.device.residual  = static_cast<float*>(device_of(op.out));
        to.known            = !op.positions && op.scale == 1;
        if (op.positions) to.positions = &weights_.of(op.positions);
        return to;
    }

    LoweredOperation lower(const Norm& op) {
        const Value&     x = program_[op.x];
        LoweredOperation to;
        check(!program_[op.out].f32, "norm: the result is for a GEMM");
        to.device.kind        = cuda::Operation::norm;
        to.device.x           = device_of(op.x);
        to.device.x_is_float  = x.f32;
        to.device.residual    = op.residual != none ? static_cast<float*>(device_of(op.residual)) : nullptr;
        to.device.norm_weight = weights_.vector(op.weight);
        to.device.eps         = op.eps;
        to.device.out         = device_of(op.out);
        to.device.rows        = x.cols / op.group; // of one row: its heads
        to.device.cols        = op.group;
        to.logit_rows         = x.logit_rows;
        to.norm_bias          = weights_.vector(op.bias);
        to.norm_weights       = op.weight ? int(op.weight.cols / op.group) : 1;
        to.known              = op.kind == NormKind::rms && to.norm_weights == 1 && op.weight;
        to.fusible            = to.known && op.group == x.cols && !x.logit_rows && op.out != op.x;
        return to;
    }

    LoweredOperation lower(const Gemm& op) {
        const Value&     x  = program_[op.x];
        LoweredOperation to = of_one_row();
        to.device.kind      = cuda::Operation::gemm;
        to.device.x         = device_of(op.x);
        to.device.cols      = x.cols;
        check(op.projections.size() <= cuda::max_projections, "gemm: more projections than the kernels take");
        for (const Projection& p : op.projections) to.device.projection[to.device.n_projections++] = lower(p, op.scale);
        to.logit_rows = x.logit_rows;
        to.fusible    = !x.logit_rows;
        return to;
    }

    LoweredOperation lower(const GatedGemm& op) {
        LoweredOperation to     = of_one_row();
        to.device.activation    = activation_of(op.activation);
        to.device.kind          = cuda::Operation::gated_gemm;
        to.device.x             = device_of(op.x);
        to.device.cols          = program_[op.x].cols;
        to.device.projection[0] = lower(op.gate);
        to.device.projection[1] = lower(op.up);
        to.device.n_projections = 2;
        to.fusible              = true;
        return to;
    }

    LoweredOperation lower(const quire::Gate& op) {
        LoweredOperation to  = of_one_row(false);
        to.device.x          = device_of(op.x);
        to.device.x_is_float = program_[op.x].f32;
        to.device.out        = device_of(op.gate);
        to.device.cols       = program_[op.gate].cols;
        to.device.activation = activation_of(op.activation);
        return to;
    }

    LoweredOperation lower(const quire::CausalConv& op) {
        check(op.weight.cols <= cuda::max_conv_taps, "causal_conv: more taps than the kernels take");
        LoweredOperation  to   = of_one_row(false);
        cuda::CausalConv& args = to.conv;
        args.x                 = static_cast<const Half*>(device_of(op.x));
        args.factor            = static_cast<const Half*>(device_or_null(op.factor));
        args.gate              = static_cast<const Half*>(device_or_null(op.gate));
        args.out               = static_cast<Half*>(device_of(op.out));
        args.weight            = weights_.vector(op.weight);
        args.bias              = weights_.vector(op.bias);
        args.taps              = int(op.weight.cols);
        args.columns           = int(op.weight.rows);
        return to;
    }

    LoweredOperation lower(const quire::Recurrence& op) {
        check(op.key_dim <= cuda::max_key_dim, "recurrence: longer keys than the kernels take");
        LoweredOperation  to   = of_one_row(false);
        cuda::Recurrence& args = to.recurrence;
        args.x                 = static_cast<const Half*>(device_of(op.x));
        args.step              = static_cast<const float*>(device_of(op.step));
        args.write             = static_cast<const float*>(device_or_null(op.write));
        args.out               = static_cast<float*>(device_of(op.out));
        args.step_bias         = weights_.vector(op.step_bias);
        args.decay             = weights_.vector(op.decay);
        args.skip              = weights_.vector(op.skip);
        args.n_heads           = op.n_heads;
        args.n_groups          = op.n_groups;
        args.key_dim           = op.key_dim;
        args.value_dim         = op.value_dim;
        args.state_at          = op.state_at;
        args.delta             = op.delta;
        args.grouped           = op.grouped;
        return to;
    }

    LoweredOperation lower(const Activate& op) {
        LoweredOperation to  = of_one_row(false);
        to.device.x          = device_of(op.x);
        to.device.cols       = program_[op.x].cols;
        to.device.activation = activation_of(op.activation);
        if (op.times != none) to.times = static_cast<const float*>(device_of(op.times)) + op.first;
        return to;
    }

    LoweredOperation lower(const PositionScale& op) {
        LoweredOperation to = of_one_row(false);
        to.device.x         = device_of(op.x);
        to.device.cols      = program_[op.x].cols;
        return to;
    }

    LoweredOperation lower(const RopeAndStore& op) {
        const Rope& rope        = op.rope;
        float*&     frequencies = frequencies_[rope.inv_freq.data()];
        if (frequencies == nullptr && !rope.inv_freq.empty()) {
            frequencies = static_cast<float*>(memory_.take(rope.inv_freq.size_bytes()));
            check(frequencies != nullptr, "no memory for the frequencies of RoPE");
            cuda::upload(frequencies, rope.inv_freq.data(), rope.inv_freq.size_bytes(), gpu_);
        }
        const KvLayer&   cache  = layers_[std::size_t(op.layer)];
        const bool       stores = op.k != none;
        const bool       coded  = cache.k_scales || cache.v_scales;
        const bool       whole  = stores && op.q != none;
        LoweredOperation to     = of_one_row(whole);
        to.tables               = tables_of(cache);
        cuda::RopeStore& args   = to.device.rope;
        args.q                  = static_cast<Half*>(device_or_null(op.q));
        args.k                  = stores ? static_cast<Half*>(device_of(op.k)) : nullptr;
        args.v                  = stores ? static_cast<Half*>(device_of(op.v)) : nullptr;
        args.cache_k            = static_cast<Half*>(cache.k);
        args.cache_v            = static_cast<Half*>(cache.v);
        args.inv_freq           = frequencies;
        args.n_pairs            = int(rope.inv_freq.size());
        args.n_heads            = op.q != none ? int(program_[op.q].cols / op.q_dim) : 0;
        args.q_dim              = op.q_dim;
        args.q_first            = op.q_first;
        args.value_dim          = cache.value_dim;
        args.n_kv_heads         = stores ? cache.n_kv_heads : 0;
        args.head_dim           = cache.head_dim;
        args.block_size         = cache.block_size;
        args.block_rows         = int(cache.stride / row_bytes(cache.type, cache.head_dim));
        args.v_slots            = (cache.v_part - cache.part) * tables_.slots_apart;
        args.scale              = rope.scale;
        args.neox               = rope.neox;
        args.coded              = coded;
        args.k_array            = k_array(cache);
        args.v_array            = v_array(cache);
        args.rotation           = cache.k_scales ? cache.rotation() : 1;
        to.device.kind          = cuda::Operation::rope_and_store;
        to.fusible              = whole && !coded;
        return to;
    }

    LoweredOperation lower(const quire::Attention& op) {
        const KvLayer&   cache = layers_[std::size_t(op.layer)];
        LoweredOperation to    = of_one_row();
        cuda::Attention& args  = to.device.attend;
        args.q                 = static_cast<const Half*>(device_of(op.q));
        args.out               = static_cast<Half*>(device_of(op.out));
        args.cache_k           = static_cast<const Half*>(cache.k);
        args.cache_v           = static_cast<const Half*>(cache.v);
        args.n_heads           = op.n_heads;
        args.n_kv_heads        = cache.n_kv_heads;
        args.head_dim          = cache.head_dim;
        args.block_size        = cache.block_size;
        args.block_rows        = int(cache.stride / row_bytes(cache.type, cache.head_dim));
        args.v_tables          = (cache.v_part - cache.part) * tables_.tables_apart;
        args.scale             = op.scale;
        args.window            = op.chunked ? 0 : op.window;
        args.chunk             = op.chunked ? op.window : 0;
        args.softcap           = op.softcap;
        args.sinks             = weights_.vector(op.sinks);
        args.value_dim         = cache.value_dim;
        args.coded             = cache.k_scales || cache.v_scales;
        args.k_array           = k_array(cache);
        args.v_array           = v_array(cache);
        to.items               = int(std::ranges::find(attentions_, attention_of(op, layers_)) - attentions_.begin());
        to.tables              = tables_of(cache);
        to.device.kind         = cuda::Operation::attention;
        return to;
    }

    LoweredOperation lower(const Add& op) {
        LoweredOperation to = of_one_row(op.scale == 1 && program_[op.residual].f32);
        to.device.kind      = cuda::Operation::add;
        to.device.residual  = static_cast<float*>(device_of(op.residual));
        to.f32              = program_[op.residual].f32;
        to.device.x         = device_of(op.x);
        to.device.cols      = program_[op.x].cols;
        return to;
    }

    LoweredOperation lower(const SelectRows& op) {
        LoweredOperation to = of_one_row();
        to.device.kind      = cuda::Operation::select_rows;
        to.device.x         = device_of(op.x);
        to.device.residual  = static_cast<float*>(device_of(op.out));
        to.device.cols      = program_[op.x].cols;
        to.logit_rows       = true;
        return to;
    }

    LoweredOperation lower(const Argmax& op) {
        LoweredOperation to = of_one_row(false);
        to.device.x         = device_of(op.logits);
        to.device.cols      = program_[op.logits].cols;
        to.logit_rows       = true;
        return to;
    }

    LoweredOperation lower(const HeadGemm& op) {
        LoweredOperation to = of_one_row(false);
        to.heads.x          = static_cast<const Half*>(device_of(op.x));
        to.heads.out        = static_cast<Half*>(device_of(op.out));
        to.heads.weight     = weights_.of(op.weight);
        to.heads.n_heads    = op.n_heads;
        to.heads.x_dim      = int(program_[op.x].cols / op.n_heads);
        return to;
    }

    LoweredOperation lower(const SoftCap& op) {
        LoweredOperation to = of_one_row(false);
        to.device.x         = device_of(op.x);
        to.device.cols      = program_[op.x].cols;
        to.logit_rows       = program_[op.x].logit_rows;
        return to;
    }

    cuda::Projection lower(const Projection& p, float scale = 1) const {
        return {weights_.of(p.weight), weights_.vector(p.bias), device_of(p.out), program_[p.out].f32, scale};
    }

    LoweredOperation lower(const quire::Route& op) {
        LoweredOperation to = of_one_row(false);
        to.route            = lower_route(op, weights_, [&](ValueId id) { return device_of(id); });
        return to;
    }

    LoweredOperation lower(const ExpertGatedGemm& op) { return lower_gemm(op); }
    LoweredOperation lower(const ExpertCombineGemm& op) { return lower_gemm(op); }
    LoweredOperation lower(const GateRows& op) {
        LoweredOperation to   = of_one_row(false);
        to.device.x           = device_of(op.gate);
        to.device.out         = device_of(op.x);
        to.device.norm_weight = weights_.vector(op.weight);
        return to;
    }

    LoweredOperation lower(const AllReduce& op) {
        LoweredOperation to = of_one_row(false);
        check(op.parts.size() <= std::size_t(cuda::max_parts), "all_reduce: more parts than the kernels take");
        for (ValueId id : op.parts) {
            if (id != none) to.parts.is_float = program_[id].f32;
            to.parts.of[to.parts.n++] = id != none ? device_of(id) : nullptr;
        }
        to.reduce.x_is_float   = to.parts.is_float;
        to.reduce.out_is_float = program_[op.out].f32;
        to.device.x            = to.parts.of[0];
        to.device.out          = device_of(op.out);
        to.device.cols         = program_[op.out].cols;
        return to;
    }

    LoweredOperation lower(const AllGather& op) {
        LoweredOperation to = of_one_row(false);
        to.device.x         = device_of(op.x);
        to.device.out       = device_of(op.out);
        to.device.cols      = program_[op.x].cols;
        to.f32              = program_[op.x].f32;
        to.logit_rows       = program_[op.x].logit_rows;
        return to;
    }

    LoweredOperation lower(const quire::Carry& op) {
        LoweredOperation to  = of_one_row(false);
        const Value&     out = program_[op.out];
        for (ValueId id : access_of(op).reads) check(program_[id].f32 == out.f32, "carry: rows of one type");
        to.carry = {device_or_null(op.x), device_of(op.steps), device_of(op.guesses),
                    device_of(op.memory), device_of(op.out),   out.cols * (out.f32 ? 4 : 2)};
        return to;
    }

    LoweredOperation lower(const PutColumns& op) {
        const Value &    x = program_[op.x], &out = program_[op.out];
        LoweredOperation to  = of_one_row(x.f32 && !out.f32 && !out.logit_rows);
        to.device.kind       = cuda::Operation::put_columns;
        to.device.x          = device_of(op.x);
        to.device.x_is_float = x.f32;
        to.device.out        = static_cast<std::byte*>(device_of(op.out)) + op.first * (out.f32 ? 4 : 2);
        to.device.cols       = x.cols;
        to.f32               = out.f32;
        return to;
    }

    LoweredOperation lower(const ScatterColumns& op) {
        std::vector<std::int32_t> columns(std::size_t(program_[op.out].cols), -1);
        for (std::size_t i = 0; i < op.columns.size(); i++) {
            check(op.columns[i] >= 0 && std::size_t(op.columns[i]) < columns.size(),
                  "scatter: a column that there is not");
            columns[std::size_t(op.columns[i])] = std::int32_t(i);
        }
        auto* const there = static_cast<std::int32_t*>(memory_.take(columns.size() * 4));
        check(there != nullptr, "no memory for the tokens of a draft");
        cuda::upload(there, columns.data(), columns.size() * 4, gpu_);
        LoweredOperation to = of_one_row(false);
        to.device.x         = device_of(op.x);
        to.device.residual  = static_cast<float*>(device_of(op.out));
        to.device.cols      = program_[op.x].cols;
        to.columns_of       = there;
        to.logit_rows       = true;
        return to;
    }

    LoweredOperation lower(const TakeColumns& op) {
        LoweredOperation to = of_one_row(false);
        to.device.x         = device_of(op.x);
        to.device.out       = device_of(op.out);
        to.device.cols      = program_[op.out].cols;
        to.f32              = program_[op.x].f32;
        return to;
    }

    LoweredOperation lower(const LoraAdd& op) {
        LoweredOperation to = of_one_row(false);
        to.logit_rows       = program_[op.out].logit_rows;
        return to;
    }

private:
    using Half = cuda::Half;
    void*                device_of(ValueId id) const { return values_.at(id, {}).data; }
    void*                device_or_null(ValueId id) const { return id == none ? nullptr : device_of(id); }
    static cuda::KvArray array_of(const KvLayer& cache, void* rows, DType type, std::byte* scales) {
        const int         parts = cache.latent() ? 2 : 1;
        const std::size_t row = row_bytes(type, cache.head_dim), row_scales = std::size_t(parts) * sizeof(float);
        check(scales == nullptr || (cache.stride % row == 0 && cache.stride % row_scales == 0),
              "KV codes: the stride of blocks is no multiple of a row");
        return {rows,
                reinterpret_cast<float*>(scales),
                type == DType::I8   ? cuda::KvType::i8
                : type == DType::F8 ? cuda::KvType::e4m3
                                    : cuda::KvType::f16,
                int(cache.stride / row),
                int(cache.stride / row_scales),
                parts};
    }
    static cuda::KvArray k_array(const KvLayer& c) { return array_of(c, c.k, c.type, c.k_scales); }
    static cuda::KvArray v_array(const KvLayer& c) { return array_of(c, c.v, c.v_type, c.v_scales); }
    int tables_of(const KvLayer& cache) const { return tables_.first[std::size_t(cache.group)] + cache.part; }
    template <class Op>
    LoweredOperation lower_gemm(const Op& op) { // of experts
        LoweredOperation to = of_one_row(false);
        to.experts          = lower_experts(op, weights_, [&](ValueId id) { return device_of(id); });
        return to;
    }

    const Program&                 program_;
    const Activations&             values_;
    std::span<const KvLayer>       layers_;
    std::span<const AttentionKind> attentions_;
    const StepTables&              tables_;
    const DeviceWeights&           weights_;
    DeviceMemory&                  memory_;
    cuda::Context&                 gpu_;
    std::map<const float*, float*> frequencies_; // on the device, by those of the program
};

std::vector<LoweredOperation> lower(const Program& program, const Activations& values, std::span<const KvLayer> layers,
                                    std::span<const AttentionKind> attentions, const StepTables& tables,
                                    const DeviceWeights& weights, DeviceMemory& memory, cuda::Context& gpu) {
    Lowering                      lowering(program, values, layers, attentions, tables, weights, memory, gpu);
    std::vector<LoweredOperation> lowered;
    lowered.reserve(program.operations.size());
    for (const Operation& operation : program.operations)
        lowered.push_back(std::visit([&](const auto& op) { return lowering.lower(op); }, operation));
    return lowered;
}

AttentionKind attention_of(const quire::Attention& op, std::span<const KvLayer> layers) {
    const KvLayer& cache = layers[std::size_t(op.layer)];
    return {op.window, cache.head_dim, cache.value_dim, cache.n_kv_heads, cache.group, op.chunked};
}

std::vector<AttentionKind> attentions_of(const Program& program, std::span<const KvLayer> layers) {
    std::vector<AttentionKind> kinds;
    for (const Operation& operation : program.operations)
        if (const auto* op = std::get_if<quire::Attention>(&operation);
            op && std::ranges::find(kinds, attention_of(*op, layers)) == kinds.end())
            kinds.push_back(attention_of(*op, layers));
    return kinds;
}

} // namespace quire
