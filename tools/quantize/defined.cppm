// quire.tools.quantize.defined: the types whose quantisation a reference defines to the bit: float types, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1,
// MXFP4, TQ1_0, TQ2_0. Owns nothing.
//
// Each block on its own, in one pass: the scale comes from its largest value, or its range, and every element is rounded. Same bits as
// gguf-py's quants.py and as libggml's reference functions.
export module quire.tools.quantize.defined;

import quire.core.base;
import quire.model_file.quants;

export namespace quire {

// out = x[0 .. n) as `type`, one of the above; n is a multiple of its block. x is finite.
void quantize_defined(DType type, const float* x, std::byte* out, std::int64_t n);

// Whether quantize_defined() knows it.
bool has_defined_quantisation(DType type);

} // namespace quire

module :private;

namespace quire {

using Out = std::uint8_t*;

void put_half(Out out, float v) {
    const std::uint16_t h = f32_to_f16(v);
    std::memcpy(out, &h, 2);
}

// 1 / d, or 0 for 0.
float inverse(float d) { return d != 0 ? 1 / d : 0; }

// v without its fraction, in 0 .. most; not a number counts as 0 (the inverse of the smallest scales is infinite).
unsigned truncated(float v, float most) { return v >= 0 ? unsigned(std::min(v, most)) : 0; }

// The first of the values with the largest magnitude, with its sign.
float largest(const float* x, int n) {
    float best = 0;
    for (int i = 0; i < n; i++)
        if (std::abs(x[i]) > std::abs(best)) best = x[i];
    return best;
}

// q[i] in 0 .. 2^bits - 1, as nibbles and, of Q5, fifth bits before them: the second half of the 32 in the high nibbles.
void put_32(Out out, const unsigned* q, bool fifth) {
    std::uint32_t high = 0;
    for (int i = 0; i < 32; i++) high |= (q[i] >> 4 & 1) << i;
    if (fifth) {
        std::memcpy(out, &high, 4);
        out += 4;
    }
    for (int i = 0; i < 16; i++) out[i] = std::uint8_t((q[i] & 15) | (q[i + 16] & 15) << 4);
}

// Q4_0, Q5_0: the largest value becomes the lowest level.
void block_symmetric(const float* x, Out out, int levels) {
    const float d = largest(x, 32) / float(-levels / 2), id = inverse(d);
    unsigned    q[32];
    for (int i = 0; i < 32; i++) q[i] = truncated(x[i] * id + (float(levels / 2) + 0.5f), float(levels - 1));
    put_half(out, d);
    put_32(out + 2, q, levels == 32);
}

// Q4_1, Q5_1: the levels divide the range.
void block_range(const float* x, Out out, int levels) {
    const float low = *std::min_element(x, x + 32), high = *std::max_element(x, x + 32);
    const float d = (high - low) / float(levels - 1), id = inverse(d);
    unsigned    q[32];
    for (int i = 0; i < 32; i++) q[i] = truncated((x[i] - low) * id + 0.5f, float(levels - 1));
    put_half(out, d);
    put_half(out + 2, low);
    put_32(out + 4, q, levels == 32);
}

void block_q8_0(const float* x, Out out) {
    const float d = std::abs(largest(x, 32)) / 127, id = inverse(d);
    put_half(out, d);
    for (int i = 0; i < 32; i++) {
        const float v = x[i] * id;
        // rounds halves away from 0
        out[2 + i] = std::uint8_t(std::int8_t(std::isfinite(v) ? std::clamp(std::round(v), -127.0f, 127.0f) : 0));
    }
}

// The exponent is two below the largest value's, so that the scaled magnitude of this value is 4 to 8 (6 is the largest level).
void block_mxfp4(const float* x, Out out) {
    const float most = std::abs(largest(x, 32));
    const float e    = most > 0 ? std::floor(std::log2(most)) - 2 + 127 : 0;
    out[0]           = std::uint8_t(std::clamp(e, 0.0f, 254.0f));
    const float d    = half_e8m0(out[0]);
    unsigned    q[32];
    for (int i = 0; i < 32; i++) {
        q[i]       = 0;
        float miss = std::abs(x[i]); // of level 0
        for (unsigned level = 1; level < 16; level++) {
            const float other = std::abs(d * e2m1_values[level] - x[i]);
            if (other < miss) q[i] = level, miss = other;
        }
    }
    put_32(out + 1, q, false);
}

// x as -1, 0 or 1 times the largest magnitude, plus 1
float block_ternary(const float* x, unsigned* q) {
    const float d = std::abs(largest(x, 256)), id = inverse(d);
    for (int i = 0; i < 256; i++) {
        const float v = x[i] * id;
        q[i]          = std::isfinite(v) ? unsigned(int(std::clamp(std::round(v), -1.0f, 1.0f)) + 1) : 1;
    }
    return d;
}

// n bytes of `digits` digits to the base 3 each, the first of each byte the topmost; digit k of byte l is q[k · n + l].
void put_digits(Out out, const unsigned* q, int n, int digits) {
    for (int l = 0; l < n; l++) {
        unsigned v = 0;
        for (int k = 0; k < 5; k++) v = v * 3 + (k < digits ? q[k * n + l] : 0);
        out[l] = std::uint8_t((v * 256 + 242) / 243); // v / 243 as a fraction of 256, rounded up
    }
}

void block_tq1_0(const float* x, Out out) {
    unsigned    q[256];
    const float d = block_ternary(x, q);
    put_digits(out, q, 32, 5);
    put_digits(out + 32, q + 160, 16, 5);
    put_digits(out + 48, q + 240, 4, 4);
    put_half(out + 52, d);
}

void block_tq2_0(const float* x, Out out) {
    unsigned    q[256];
    const float d = block_ternary(x, q);
    for (int byte = 0; byte < 64; byte++) {
        const unsigned* at = q + byte / 32 * 128 + byte % 32;
        out[byte]          = std::uint8_t(at[0] | at[32] << 2 | at[64] << 4 | at[96] << 6);
    }
    put_half(out + 64, d);
}

bool has_defined_quantisation(DType type) {
    switch (type) {
        case DType::F32:
        case DType::F16:
        case DType::BF16:
        case DType::Q4_0:
        case DType::Q4_1:
        case DType::Q5_0:
        case DType::Q5_1:
        case DType::Q8_0:
        case DType::MXFP4:
        case DType::TQ1_0:
        case DType::TQ2_0: return true;
        default: return false;
    }
}

void quantize_defined(DType type, const float* x, std::byte* to, std::int64_t n) {
    const DTypeInfo& info = dtype_info(type);
    Out              out  = reinterpret_cast<Out>(to);
    if (type == DType::F32) std::memcpy(out, x, std::size_t(n) * sizeof(float));
    else
        for (; n > 0; n -= info.items, x += info.items, out += info.bytes) switch (type) {
                case DType::F16: put_half(out, *x); break;
                case DType::BF16: {
                    const std::uint16_t h = f32_to_bf16(*x);
                    std::memcpy(out, &h, 2);
                    break;
                }
                case DType::Q4_0: block_symmetric(x, out, 16); break;
                case DType::Q4_1: block_range(x, out, 16); break;
                case DType::Q5_0: block_symmetric(x, out, 32); break;
                case DType::Q5_1: block_range(x, out, 32); break;
                case DType::Q8_0: block_q8_0(x, out); break;
                case DType::MXFP4: block_mxfp4(x, out); break;
                case DType::TQ1_0: block_tq1_0(x, out); break;
                case DType::TQ2_0: block_tq2_0(x, out); break;
                default: check(false, "a type whose quantisation is not defined");
            }
}

} // namespace quire
