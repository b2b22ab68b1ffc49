// The functions of odd_model.h, compiled once for all tests.
import quire.core.base;
import quire.core.std;
import quire.core.tensor;
import quire.model_file.gguf_writer;
import quire.model_file.quants;

#include "odd_model.h"
#include "byte_tokenizer.h"

namespace quire::testing {

std::vector<std::byte> random_rows(DType type, std::int64_t rows, std::int64_t cols, std::mt19937& random) {
    std::vector<std::byte>          out(row_bytes(type, cols) * std::size_t(rows));
    const float                     deviation = 1 / std::sqrt(float(cols));
    std::normal_distribution<float> normal(0, deviation);
    if (type == DType::F32 || type == DType::F16 || type == DType::BF16) {
        for (std::int64_t i = 0; i < rows * cols; i++) {
            const float         v = normal(random);
            const std::uint16_t h = type == DType::BF16 ? f32_to_bf16(v) : f32_to_f16(v);
            if (type == DType::F32) std::memcpy(out.data() + i * 4, &v, 4);
            else std::memcpy(out.data() + i * 2, &h, 2);
        }
        return out;
    }
    // Where the scales of a block stand, what they are for values of about 1, and in which form.
    enum class Form { half, real, e8m0, e4m3, scattered };
    struct Scale {
        int   at;
        float value;
        Form  form = Form::half;
    };
    std::vector<Scale> scales;
    switch (type) {
        case DType::Q8_0: scales = {{0, 1.0f / 74}}; break;
        case DType::Q4_0: scales = {{0, 1.0f / 4.6f}}; break;
        case DType::Q4_1: scales = {{0, 1.0f / 4.6f}, {2, -7.5f / 4.6f}}; break;
        case DType::Q5_0: scales = {{0, 1.0f / 9.2f}}; break;
        case DType::Q5_1: scales = {{0, 1.0f / 9.2f}, {2, -15.5f / 9.2f}}; break;
        case DType::Q2_K: scales = {{80, 1.0f / 10}, {82, 1.0f / 10}}; break;
        case DType::Q3_K: scales = {{108, 1.0f / 42}}; break;
        case DType::Q4_K: scales = {{0, 1.0f / 150}, {2, 1.0f / 20}}; break;
        case DType::Q5_K: scales = {{0, 1.0f / 300}, {2, 1.0f / 20}}; break;
        case DType::Q6_K: scales = {{208, 1.0f / 1400}}; break;
        case DType::IQ4_NL: scales = {{0, 1.0f / 74}}; break;
        case DType::IQ4_XS: scales = {{0, 1.0f / 1400}}; break;
        case DType::IQ1_S: scales = {{0, 1.0f / 7}}; break;
        case DType::IQ1_M: scales = {{48, 1.0f / 7, Form::scattered}}; break;
        case DType::IQ2_XXS:
        case DType::IQ2_XS:
        case DType::IQ2_S: scales = {{0, 1.0f / 50}}; break;
        case DType::IQ3_XXS: scales = {{0, 1.0f / 150}}; break;
        case DType::IQ3_S: scales = {{0, 1.0f / 150}}; break;
        case DType::TQ1_0: scales = {{52, 1.2f}}; break;
        case DType::TQ2_0: scales = {{64, 1.2f}}; break;
        case DType::Q1_0:
        case DType::Q2_0: scales = {{0, 0.8f}}; break;
        case DType::Q8_K: scales = {{0, 1.0f / 74, Form::real}}; break;
        case DType::MXFP4: scales = {{0, 1.0f / 3, Form::e8m0}}; break;
        case DType::NVFP4:
            for (int i = 0; i < 4; i++) scales.push_back({i, 1.0f / 3, Form::e4m3});
            break;
        default: break;
    }
    for (std::byte& b : out) b = std::byte(random() & 255);
    for (std::size_t at = 0; at < out.size(); at += std::size_t(dtype_info(type).bytes))
        for (auto [place, value, form] : scales) {
            std::byte* const    to    = out.data() + at + place;
            const float         scale = value * deviation;
            const std::uint16_t h     = f32_to_f16(scale);
            const int           power = int(std::lround(std::log2(scale))); // halved below
            if (form == Form::half) std::memcpy(to, &h, 2);
            if (form == Form::real) std::memcpy(to, &scale, 4);
            if (form == Form::e8m0) *to = std::byte(power + 1 + 127);
            if (form == Form::e4m3) *to = std::byte(std::max(power + 1 + 7, 0) << 3 | int(random() & 7));
            for (int i = 0; form == Form::scattered && i < 4; i++)
                to[2 * i + 1] = to[2 * i + 1] & std::byte(15) | std::byte((h >> (4 * i) & 15) << 4);
        }
    return out;
}

void spoil(DType type, std::span<std::byte> rows, std::int64_t cols) {
    const auto row   = rows.first(row_bytes(type, cols));
    const auto bytes = std::size_t(dtype_info(type).bytes);
    for (std::size_t at = 0; at < row.size(); at += bytes) {
        const float         nan   = std::numeric_limits<float>::quiet_NaN();
        const std::uint16_t half  = type == DType::BF16 ? f32_to_bf16(nan) : f32_to_f16(nan);
        const std::size_t   place = type == DType::Q2_K    ? 80
                                    : type == DType::Q3_K  ? 108
                                    : type == DType::Q6_K  ? 208
                                    : type == DType::TQ1_0 ? 52
                                    : type == DType::TQ2_0 ? 64
                                                           : 0; // of the scale
        if (type == DType::F32 || type == DType::Q8_K) std::memcpy(row.data() + at, &nan, 4);
        else std::memcpy(row.data() + at + place, &half, 2);
    }
}

void write_odd_model(const std::string& path, const OddShape& s, const std::string& spoiled) {
    GgufWriter   w;
    std::mt19937 random(20);
    const auto   number = [&](const char* key, int value) { w.set(cat("llama.", key), std::uint32_t(value)); };
    w.set("general.architecture", "llama");
    number("context_length", 512);
    number("embedding_length", s.hidden);
    number("block_count", s.layers);
    number("feed_forward_length", s.ff);
    number("attention.head_count", s.heads);
    number("attention.head_count_kv", s.kv_heads);
    number("attention.key_length", s.head_dim);
    number("attention.value_length", s.head_dim);
    number("rope.dimension_count", s.rope_dim);
    w.set("llama.attention.layer_norm_rms_epsilon", 1e-5f);
    if (s.window > 0) number("attention.sliding_window", s.window);
    if (s.period > 0) number("attention.sliding_window_pattern", s.period);
    set_byte_tokenizer(w, s.vocab);

    const auto matrix = [&](const std::string& name, int rows, int cols) {
        std::vector<std::byte> values = random_rows(s.type, rows, cols, random);
        if (name == spoiled) spoil(s.type, values, cols);
        w.add_tensor(name, s.type, {cols, rows}, values);
    };
    const auto vector = [&](const std::string& name) {
        const std::vector<float> ones(std::size_t(s.hidden), 1.0f);
        w.add_tensor(name, DType::F32, {s.hidden}, std::as_bytes(std::span(ones)));
    };
    const int q = s.heads * s.head_dim, kv = s.kv_heads * s.head_dim;
    matrix("token_embd.weight", s.vocab, s.hidden);
    vector("output_norm.weight");
    for (int i = 0; i < s.layers; i++) {
        const auto name = [&](const char* part) { return cat("blk.", i, ".", part, ".weight"); };
        vector(name("attn_norm"));
        matrix(name("attn_q"), q, s.hidden);
        matrix(name("attn_k"), kv, s.hidden);
        matrix(name("attn_v"), kv, s.hidden);
        matrix(name("attn_output"), s.hidden, q);
        vector(name("ffn_norm"));
        matrix(name("ffn_gate"), s.ff, s.hidden);
        matrix(name("ffn_up"), s.ff, s.hidden);
        matrix(name("ffn_down"), s.hidden, s.ff);
    }
    const Result<void> written = w.write(path);
    if (!written) throw std::runtime_error(written.error().message);
}

} // namespace quire::testing
