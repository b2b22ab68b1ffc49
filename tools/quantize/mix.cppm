// quire.tools.quantize.mix: which type each tensor of a file gets: llama.cpp's mixes, by its names. Owns nothing.
//
// A name such as Q4_K_M stands for a main type and for rules that give some tensors more bits: the ones whose errors do most harm (output,
// attn_v, ffn_down of the first and last layers). The rules are llama-quantize's, so that files of one name have one mix of types,
// whichever program wrote them.
export module quire.tools.quantize.mix;

import quire.core.base;
import quire.core.tensor;

export namespace quire {

struct Mix {
    std::string_view name;
    DType            type;      // of most matrices
    std::uint32_t    file_type; // general.file_type
    std::string_view note;
};

std::span<const Mix> mixes();
// By name, in any case; "Q4_K" is Q4_K_M, as for llama-quantize. Null: there is none.
const Mix* find_mix(std::string_view name);

// The facts that the rules use.
struct MixTensor {
    std::string_view            name;
    DType                       type; // in the input
    std::array<std::int64_t, 4> dims{1, 1, 1, 1};
};
struct MixModel {
    std::string  architecture;
    std::int64_t layers = 0, experts = 0, heads = 0, kv_heads = 0;
    bool         has_imatrix = false;
};

// The type of each tensor, in the order given. Error: a tensor that the rules have no type for.
Result<std::vector<DType>> types_of(const Mix& mix, const MixModel& model, std::span<const MixTensor> tensors);

// Whether llama-quantize insists on an importance matrix for this tensor: without one it would be of no use.
bool needs_imatrix(const Mix& mix, std::string_view name, DType type);

} // namespace quire

module :private;

namespace quire {

using enum DType;

constexpr std::array<Mix, 24> all_mixes{{
    {"F32", F32, 0, "32-bit floats"},
    {"F16", F16, 1, "16-bit floats"},
    {"BF16", BF16, 32, "16-bit floats with the range of 32-bit ones"},
    {"Q8_0", Q8_0, 7, "8 bits, a scale for each 32"},
    {"Q4_0", Q4_0, 2, "4 bits, a scale for each 32"},
    {"Q4_1", Q4_1, 3, "4 bits, a scale and a minimum for each 32"},
    {"Q5_0", Q5_0, 8, "5 bits, a scale for each 32"},
    {"Q5_1", Q5_1, 9, "5 bits, a scale and a minimum for each 32"},
    {"Q2_K", Q2_K, 10, "2 bits; 3 for attn_v, attn_output and ffn_down"},
    {"Q2_K_S", Q2_K, 21, "2 bits; with --imatrix only"},
    {"Q3_K_S", Q3_K, 11, "3 bits"},
    {"Q3_K_M", Q3_K, 12, "3 bits; 4 or 5 for attn_v, attn_output and ffn_down"},
    {"Q3_K_L", Q3_K, 13, "3 bits; 5 for attn_v, attn_output and ffn_down"},
    {"Q4_K_S", Q4_K, 14, "4 bits; 5 for attn_v and ffn_down of some layers"},
    {"Q4_K_M", Q4_K, 15, "4 bits; 6 for attn_v and ffn_down of half of the layers"},
    {"Q5_K_S", Q5_K, 16, "5 bits"},
    {"Q5_K_M", Q5_K, 17, "5 bits; 6 for attn_v and ffn_down of half of the layers"},
    {"Q6_K", Q6_K, 18, "6 bits"},
    {"IQ4_NL", IQ4_NL, 25, "4 bits, 16 levels denser around 0, a scale for each 32"},
    {"IQ4_XS", IQ4_XS, 30, "the same levels, smaller scales"},
    {"MXFP4", MXFP4, 38, "4-bit floats, a power of two for each 32; output and embeddings Q8_0"},
    {"MXFP4_MOE", MXFP4, 38, "experts MXFP4, the rest Q8_0"},
    {"TQ1_0", TQ1_0, 36, "-1, 0 or 1, for models trained so"},
    {"TQ2_0", TQ2_0, 37, "the same, larger and faster"},
}};

bool is(const Mix& mix, std::initializer_list<std::string_view> names) {
    return std::ranges::find(names, mix.name) != names.end();
}

// Embeddings of positions, routers, norms and convolutions stay as they are: small, and sensitive.
bool stays(const MixTensor& t) {
    if (t.dims[1] == 1 && t.dims[2] == 1 && t.dims[3] == 1) return true;
    if (!t.name.ends_with("weight")) return true;
    if (t.name == "position_embd.weight" || t.name == "token_types.weight") return true;
    static const std::vector<std::string_view> parts = split(
        "_norm.weight ffn_gate_inp.weight altup laurel per_layer_model_proj ssm_conv1d shortconv.conv.weight "
        "time_mix_first.weight time_mix_w0.weight time_mix_w1.weight time_mix_w2.weight time_mix_v0.weight "
        "time_mix_v1.weight time_mix_v2.weight time_mix_a0.weight time_mix_a1.weight time_mix_a2.weight "
        "time_mix_g1.weight time_mix_g2.weight time_mix_decay_w1.weight time_mix_decay_w2.weight "
        "time_mix_lerp_fused.weight attn_rel_b.weight .position_embd sam. .rel_pos .patch_embd .patch_merger");
    return std::ranges::any_of(parts, [&](std::string_view part) { return t.name.contains(part); });
}

// Of the tensors with a rule of their own.
enum class Role { output, embedding, qkv, kv_b, v, k, q, attention_output, down, other };

Role role_of(std::string_view name) {
    if (name == "output.weight") return Role::output;
    if (name == "token_embd.weight" || name == "per_layer_token_embd.weight") return Role::embedding;
    constexpr std::array<std::pair<std::string_view, Role>, 7> parts{{{"attn_qkv.weight", Role::qkv},
                                                                      {"attn_kv_b.weight", Role::kv_b},
                                                                      {"attn_v.weight", Role::v},
                                                                      {"attn_k.weight", Role::k},
                                                                      {"attn_q.weight", Role::q},
                                                                      {"attn_output.weight", Role::attention_output},
                                                                      {"ffn_down", Role::down}}};
    for (const auto& [part, role] : parts)
        if (name.contains(part)) return role;
    return Role::other;
}

// The number in "blk.N.", or -1.
std::int64_t layer_of(std::string_view name) {
    if (!name.starts_with("blk.")) return -1;
    int                          layer = -1;
    const std::from_chars_result end   = std::from_chars(name.data() + 4, name.data() + name.size(), layer);
    return end.ec == std::errc() && end.ptr != name.data() + name.size() && *end.ptr == '.' ? layer : -1;
}

// The first eighth of the layers, the last, and every third between.
bool more_bits(std::int64_t layer, std::int64_t layers) {
    return layer < layers / 8 || layer >= 7 * layers / 8 || (layer - layers / 8) % 3 == 2;
}

// A type for rows that do not fill the blocks of `type`.
DType fallback(DType type, std::int64_t cols) {
    if (cols % dtype_info(type).items == 0) return type;
    DType small = F16;
    switch (type) {
        case IQ4_XS: small = IQ4_NL; break;
        case Q2_K:
        case Q3_K:
        case TQ1_0:
        case TQ2_0: small = Q4_0; break;
        case Q4_K: small = Q5_0; break;
        case Q5_K: small = Q5_1; break;
        case Q6_K: small = Q8_0; break;
        default: break;
    }
    return cols % dtype_info(small).items == 0 ? small : F16;
}

// The state of the rules: how many of some tensors were met before.
struct Rules {
    const Mix&      mix;
    const MixModel& model;
    bool            tied  = true; // no output.weight: the embeddings are the output too
    std::int64_t    n_v   = 0;    // tensors like attn_v
    std::int64_t    v     = 0;    // met so far
    std::int64_t    downs = 0;

    bool grouped() const { return model.kv_heads > 0 && model.heads / model.kv_heads >= 4; }
    // A llama 2 70B and models made from it: eight query heads share a small attn_v.
    bool is_70b() const {
        const std::string& a = model.architecture;
        if (a == "llama") return model.layers == 80 && model.heads != model.kv_heads;
        return (model.layers == 80 && (a == "qwen2" || a == "deci" || a == "olmo")) ||
               (model.layers == 68 && a == "jais2");
    }

    DType output(const MixTensor& t) const {
        if (mix.type == MXFP4 || mix.type == Q8_0 || t.dims[0] % dtype_info(mix.type).items != 0) return Q8_0;
        return Q6_K;
    }

    DType like_v() {
        const std::int64_t turn = v++;
        DType              type = mix.type;
        if (is(mix, {"Q2_K"})) type = grouped() ? Q4_K : Q3_K;
        else if (is(mix, {"Q2_K_S"}) && grouped()) type = Q4_K;
        else if (is(mix, {"Q3_K_M"})) type = turn < 2 ? Q5_K : Q4_K;
        else if (is(mix, {"Q3_K_L"})) type = Q5_K;
        else if (is(mix, {"IQ4_NL", "IQ4_XS"}) && grouped()) type = Q5_K;
        else if (is(mix, {"Q4_K_M", "Q5_K_M"}) && more_bits(turn, n_v)) type = Q6_K;
        else if (is(mix, {"Q4_K_S"}) && turn < 4) type = Q5_K;
        if (is_70b() && (type == Q3_K || type == Q4_K)) type = Q5_K;
        return model.experts == 8 ? Q8_0 : type;
    }

    Result<DType> down(const MixTensor& t) {
        std::int64_t       layer = downs++;
        const std::int64_t n     = model.layers;
        if (model.experts > 1) {
            layer = layer_of(t.name);
            if (layer < 0 || layer >= n)
                return fail("tensor ", quote(t.name), " is of no layer from 0 to ", n - 1, ", as block_count says");
        }
        const bool early = layer < n / 8;
        if (is(mix, {"Q2_K"})) return Q3_K;
        if (is(mix, {"Q2_K_S"}) && early) return Q4_K;
        if (is(mix, {"Q3_K_M"})) return layer < n / 16 ? Q5_K : Q4_K;
        if (is(mix, {"Q3_K_L"})) return Q5_K;
        if (is(mix, {"Q4_K_M", "Q5_K_M"}) && more_bits(layer, n)) return Q6_K;
        if (is(mix, {"IQ4_NL", "IQ4_XS"}) && early && !model.has_imatrix) return Q5_K;
        if (is(mix, {"Q4_K_S"}) && early) return Q5_K;
        if (is(mix, {"Q4_0"}) && early && model.has_imatrix) return Q4_1;
        if (is(mix, {"Q5_0"}) && early && model.has_imatrix) return Q5_1;
        return mix.type;
    }

    DType attention_output() const {
        if (model.experts == 8)
            return is(mix, {"Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M", "IQ4_NL", "IQ4_XS"}) ? Q5_K : mix.type;
        if (is(mix, {"Q2_K"})) return Q3_K;
        if (is(mix, {"Q3_K_M"})) return Q4_K;
        if (is(mix, {"Q3_K_L"})) return Q5_K;
        return mix.type;
    }

    Result<DType> of(const MixTensor& t) {
        const Role role = role_of(t.name);
        if (role == Role::output || (tied && role == Role::embedding)) return output(t);
        if (is(mix, {"MXFP4_MOE"})) return t.dims[2] > 1 ? MXFP4 : Q8_0;
        switch (role) {
            case Role::embedding:
                if (mix.type == MXFP4) return Q8_0;
                return is(mix, {"TQ1_0", "TQ2_0"}) ? Q4_K : mix.type;
            case Role::qkv:
            case Role::kv_b:
            case Role::v: return like_v();
            case Role::k: return model.experts == 8 ? Q8_0 : mix.type;
            case Role::down: return down(t);
            case Role::attention_output: return attention_output();
            default: return mix.type;
        }
    }
};

std::span<const Mix> mixes() { return all_mixes; }

const Mix* find_mix(std::string_view name) {
    std::string upper(name);
    for (char& c : upper)
        if (c >= 'a' && c <= 'z') c = char(c - 'a' + 'A');
    if (upper == "Q3_K" || upper == "Q4_K" || upper == "Q5_K") upper += "_M";
    for (const Mix& mix : mixes())
        if (mix.name == upper) return &mix;
    return nullptr;
}

Result<std::vector<DType>> types_of(const Mix& mix, const MixModel& model, std::span<const MixTensor> tensors) {
    Rules rules{mix, model};
    for (const MixTensor& t : tensors) {
        const Role role = role_of(t.name);
        rules.n_v += role == Role::qkv || role == Role::kv_b || role == Role::v;
        if (role == Role::output) rules.tied = false;
    }
    // the rules count tensors layer by layer, wherever they stand in the file
    std::vector<std::size_t> order(tensors.size());
    std::iota(order.begin(), order.end(), std::size_t(0));
    std::ranges::sort(order, [&](std::size_t a, std::size_t b) {
        return std::pair(layer_of(tensors[a].name), tensors[a].name) <
               std::pair(layer_of(tensors[b].name), tensors[b].name);
    });
    std::vector<DType> types(tensors.size());
    for (std::size_t i : order) {
        const MixTensor& t = tensors[i];
        types[i]           = t.type;
        if (stays(t)) continue;
        types[i] = mix.type;
        if (dtype_info(mix.type).items == 1) continue; // floats: all alike
        Result<DType> type = rules.of(t);
        if (!type) return std::unexpected(type.error());
        types[i] = fallback(*type, t.dims[0]);
    }
    return types;
}

bool needs_imatrix(const Mix& mix, std::string_view name, DType type) {
    const Role role = role_of(name);
    return is(mix, {"Q2_K_S"}) && type == Q2_K && role != Role::output && role != Role::embedding;
}

} // namespace quire
