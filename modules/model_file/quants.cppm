// quire.model_file.quants: the quantisation formats of GGUF, each with its bit layout, and dequantisation to floats.
//
// A row is a sequence of blocks. A block holds 32 or 256 consecutive elements as small integers, with the scales to dequantise
// them. The loops are always-inline, so each caller compiles them for its own instruction set. The arithmetic is the same
// everywhere and gives the same bits as gguf-py and libggml.
export module quire.model_file.quants;

import quire.core.base;
import quire.core.std;
import quire.core.tensor;

export namespace quire {

// dst[0 .. n) = the n elements stored at src; n is a multiple of the type's block. Any type of dtype_table.
void dequantize(DType type, const void* src, float* dst, std::int64_t n);

// The same, to be inlined into the caller.
[[gnu::always_inline]] inline void dequantize_inline(DType type, const std::byte* src, float* dst, std::int64_t n);

// -- one block each: `b` points to its first byte. [a: 4 bits | b: 4 bits] is one byte, high bits first.

using Bits = const std::uint8_t* __restrict; // blocks never overlap the floats they become

// fp16 → float without a branch: move exponent and mantissa into place, correct the bias by a multiplication (which
// normalises subnormals too), restore infinities and NaN.
[[gnu::always_inline]] inline float fp16_at(Bits b) {
    const std::uint32_t h         = std::uint32_t(b[0]) | std::uint32_t(b[1]) << 8;
    const std::uint32_t magnitude = (h & 0x7fff) << 13;
    std::uint32_t       bits      = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
    bits |= magnitude >= 0x0f800000 ? 0x7f800000u : 0u;
    return std::bit_cast<float>(bits | (h & 0x8000) << 16);
}

// Q4_0: scale d (fp16), then 16 bytes: byte i = [element i+16: 4 bits | element i: 4 bits]; x = d · (q - 8)
[[gnu::always_inline]] inline void block_q4_0(Bits b, float* __restrict y) {
    const float d = fp16_at(b);
    for (int i = 0; i < 16; i++) {
        y[i]      = float(int(b[2 + i] & 15) - 8) * d;
        y[i + 16] = float(int(b[2 + i] >> 4) - 8) * d;
    }
}

// Q4_1: d, m (fp16), nibbles as Q4_0; x = d · q + m
[[gnu::always_inline]] inline void block_q4_1(Bits b, float* __restrict y) {
    const float d = fp16_at(b), m = fp16_at(b + 2);
    for (int i = 0; i < 16; i++) {
        y[i]      = float(int(b[4 + i] & 15)) * d + m;
        y[i + 16] = float(int(b[4 + i] >> 4)) * d + m;
    }
}

// Q5_0: d, 32 bits with the fifth bit of each element, nibbles as Q4_0; x = d · (q - 16)
[[gnu::always_inline]] inline void block_q5_0(Bits b, float* __restrict y) {
    const float         d = fp16_at(b);
    const std::uint32_t high =
        std::uint32_t(b[2]) | std::uint32_t(b[3]) << 8 | std::uint32_t(b[4]) << 16 | std::uint32_t(b[5]) << 24;
    for (int i = 0; i < 16; i++) {
        y[i]      = float(int((b[6 + i] & 15u) | (high >> i & 1) << 4) - 16) * d;
        y[i + 16] = float(int((b[6 + i] >> 4) | (high >> (i + 16) & 1) << 4) - 16) * d;
    }
}

// Q5_1: d, m, fifth bits and nibbles as Q5_0; x = d · q + m
[[gnu::always_inline]] inline void block_q5_1(Bits b, float* __restrict y) {
    const float         d = fp16_at(b), m = fp16_at(b + 2);
    const std::uint32_t high =
        std::uint32_t(b[4]) | std::uint32_t(b[5]) << 8 | std::uint32_t(b[6]) << 16 | std::uint32_t(b[7]) << 24;
    for (int i = 0; i < 16; i++) {
        y[i]      = float(int((b[8 + i] & 15u) | (high >> i & 1) << 4)) * d + m;
        y[i + 16] = float(int((b[8 + i] >> 4) | (high >> (i + 16) & 1) << 4)) * d + m;
    }
}

// Q8_0: d (fp16), 32 signed bytes; x = d · q
[[gnu::always_inline]] inline void block_q8_0(Bits b, float* __restrict y) {
    const float d = fp16_at(b);
    for (int i = 0; i < 32; i++) y[i] = float(std::int8_t(b[2 + i])) * d;
}

// Q2_K: 16 bytes [min: 4 bits | scale: 4 bits], one per 16 elements; 64 bytes of 2-bit elements; d, dmin (fp16).
// Byte l of each 32 holds elements l, l+32, l+64, l+96 of its 128, lowest bits first. x = d · scale · q - dmin · min
[[gnu::always_inline]] inline void block_q2_k(Bits b, float* __restrict y) {
    const float d = fp16_at(b + 80), dmin = fp16_at(b + 82);
    for (int part = 0; part < 16; part++) { // 16 elements of one scale
        const int   half = part / 8, shift = part % 8 / 2 * 2;
        const Bits  q     = b + 16 + half * 32 + part % 2 * 16;
        const float scale = d * float(b[part] & 15), min = dmin * float(b[part] >> 4);
        for (int l = 0; l < 16; l++) y[part * 16 + l] = scale * float(q[l] >> shift & 3) - min;
    }
}

// Q3_K: 32 bytes of third bits (bit k of byte l: element l + 32k; 0 means - 4), 64 bytes of low bits laid out as Q2_K,
// 16 scales of 6 bits in 12 bytes, d. Scale j: the low 4 bits are nibble j/8 of byte j%8, the high 2 bits are bits
// 2·(j/4) of byte 8 + j%4; x = d · (scale - 32) · q
[[gnu::always_inline]] inline void block_q3_k(Bits b, float* __restrict y) {
    const float d      = fp16_at(b + 108);
    const Bits  scales = b + 96;
    for (int part = 0; part < 16; part++) {
        const int   half = part / 8, shift = part % 8 / 2 * 2, bit = half * 4 + part % 8 / 2;
        const Bits  q = b + 32 + half * 32 + part % 2 * 16, high = b + part % 2 * 16;
        const int   s = (scales[part % 8] >> (part / 8 * 4) & 15) | (scales[8 + part % 4] >> (part / 4 * 2) & 3) << 4;
        const float scale = d * float(s - 32);
        for (int l = 0; l < 16; l++)
            y[part * 16 + l] = scale * float((q[l] >> shift & 3) - ((high[l] >> bit & 1) ? 0 : 4));
    }
}

// Scales and minima of Q4_K and Q5_K: 8 of each, 6 bits, in 12 bytes.
//   bytes 0..3: [scale j+4: top 2 bits | scale j: 6 bits]   bytes 4..7: the same of the minima
//   bytes 8..11: [min j+4: low 4 bits | scale j+4: low 4 bits]
struct ScaleMin {
    int scale, min;
};
[[gnu::always_inline]] inline ScaleMin scale_min_k(Bits s, int j) {
    if (j < 4) return {s[j] & 63, s[j + 4] & 63};
    return {(s[j + 4] & 15) | (s[j - 4] >> 6) << 4, (s[j + 4] >> 4) | (s[j] >> 6) << 4};
}

// Q4_K: d, dmin, scales and minima, 128 bytes: byte l of each 32 holds elements l (low nibble) and l+32 of its 64;
// x = d · scale · q - dmin · min
[[gnu::always_inline]] inline void block_q4_k(Bits b, float* __restrict y) {
    const float d = fp16_at(b), dmin = fp16_at(b + 2);
    for (int part = 0; part < 8; part++) { // 32 elements of one scale
        const auto  s     = scale_min_k(b + 4, part);
        const float scale = d * float(s.scale), min = dmin * float(s.min);
        const Bits  q     = b + 16 + part / 2 * 32;
        const int   shift = part % 2 * 4;
        for (int l = 0; l < 32; l++) y[part * 32 + l] = scale * float(q[l] >> shift & 15) - min;
    }
}

// Q5_K: as Q4_K, with 32 bytes of fifth bits between scales and nibbles: bit k of byte l is element l + 32k's
[[gnu::always_inline]] inline void block_q5_k(Bits b, float* __restrict y) {
    const float d = fp16_at(b), dmin = fp16_at(b + 2);
    for (int part = 0; part < 8; part++) {
        const auto  s     = scale_min_k(b + 4, part);
        const float scale = d * float(s.scale), min = dmin * float(s.min);
        const Bits  q = b + 48 + part / 2 * 32, high = b + 16;
        const int   shift = part % 2 * 4;
        for (int l = 0; l < 32; l++)
            y[part * 32 + l] = scale * float((q[l] >> shift & 15) + (high[l] >> part & 1) * 16) - min;
    }
}

// Q6_K: 128 bytes of low nibbles, 64 bytes of high bits, 16 signed scales, d. In each half of 128 elements, byte l of
// 32 high bytes holds the top 2 bits of elements l, l+32, l+64, l+96; low nibbles of l and l+64 share a byte, as do
// l+32 and l+96; x = d · scale · (q - 32)
[[gnu::always_inline]] inline void block_q6_k(Bits b, float* __restrict y) {
    const float d = fp16_at(b + 208);
    for (int part = 0; part < 16; part++) {
        const int   half = part / 8, quarter = part % 8 / 2, at = part % 2 * 16;
        const Bits  low = b + half * 64 + quarter % 2 * 32 + at, high = b + 128 + half * 32 + at;
        const int   low_shift = quarter / 2 * 4, high_shift = quarter * 2;
        const float scale = d * float(std::int8_t(b[192 + part]));
        for (int l = 0; l < 16; l++)
            y[part * 16 + l] = scale * float(((low[l] >> low_shift & 15) | (high[l] >> high_shift & 3) << 4) - 32);
    }
}

// The 16 values of the non-linear 4-bit types.
inline constexpr std::array<float, 16> iq4_values{-127, -104, -83, -65, -49, -35, -22, -10,
                                                  1,    13,   25,  38,  53,  69,  89,  113};

// IQ4_NL: d, nibbles as Q4_0; x = d · value[q]
[[gnu::always_inline]] inline void block_iq4_nl(Bits b, float* __restrict y) {
    const float d = fp16_at(b);
    for (int i = 0; i < 16; i++) {
        y[i]      = d * iq4_values[b[2 + i] & 15];
        y[i + 16] = d * iq4_values[b[2 + i] >> 4];
    }
}

// IQ4_XS: d, 8 scales of 6 bits: the top 2 bits of each in a uint16, the low 4 in nibbles of 4 bytes; then 8 runs of
// 16 bytes laid out as IQ4_NL; x = d · (scale - 32) · value[q]
[[gnu::always_inline]] inline void block_iq4_xs(Bits b, float* __restrict y) {
    const float    d    = fp16_at(b);
    const unsigned high = unsigned(b[2]) | unsigned(b[3]) << 8;
    for (int part = 0; part < 8; part++) {
        const int   s     = int((b[4 + part / 2] >> (part % 2 * 4) & 15u) | (high >> (2 * part) & 3) << 4);
        const float scale = d * float(s - 32);
        const Bits  q     = b + 8 + part * 16;
        for (int i = 0; i < 16; i++) {
            y[part * 32 + i]      = scale * iq4_values[q[i] & 15];
            y[part * 32 + i + 16] = scale * iq4_values[q[i] >> 4];
        }
    }
}

[[gnu::always_inline]] inline void dequantize_inline(DType type, const std::byte* src, float* dst, std::int64_t n) {
    Bits b = reinterpret_cast<Bits>(src);
    switch (type) {
        case DType::F32: std::memcpy(dst, src, std::size_t(n) * sizeof(float)); break;
        case DType::F16:
            for (std::int64_t i = 0; i < n; i++) dst[i] = fp16_at(b + 2 * i);
            break;
        case DType::BF16:
            for (std::int64_t i = 0; i < n; i++)
                dst[i] = std::bit_cast<float>((std::uint32_t(b[2 * i]) | std::uint32_t(b[2 * i + 1]) << 8) << 16);
            break;
        case DType::Q4_0:
            for (; n > 0; n -= 32, b += 18, dst += 32) block_q4_0(b, dst);
            break;
        case DType::Q4_1:
            for (; n > 0; n -= 32, b += 20, dst += 32) block_q4_1(b, dst);
            break;
        case DType::Q5_0:
            for (; n > 0; n -= 32, b += 22, dst += 32) block_q5_0(b, dst);
            break;
        case DType::Q5_1:
            for (; n > 0; n -= 32, b += 24, dst += 32) block_q5_1(b, dst);
            break;
        case DType::Q8_0:
            for (; n > 0; n -= 32, b += 34, dst += 32) block_q8_0(b, dst);
            break;
        case DType::Q2_K:
            for (; n > 0; n -= 256, b += 84, dst += 256) block_q2_k(b, dst);
            break;
        case DType::Q3_K:
            for (; n > 0; n -= 256, b += 110, dst += 256) block_q3_k(b, dst);
            break;
        case DType::Q4_K:
            for (; n > 0; n -= 256, b += 144, dst += 256) block_q4_k(b, dst);
            break;
        case DType::Q5_K:
            for (; n > 0; n -= 256, b += 176, dst += 256) block_q5_k(b, dst);
            break;
        case DType::Q6_K:
            for (; n > 0; n -= 256, b += 210, dst += 256) block_q6_k(b, dst);
            break;
        case DType::IQ4_NL:
            for (; n > 0; n -= 32, b += 18, dst += 32) block_iq4_nl(b, dst);
            break;
        case DType::IQ4_XS:
            for (; n > 0; n -= 256, b += 136, dst += 256) block_iq4_xs(b, dst);
            break;
    }
}

} // namespace quire

module :private;

namespace quire {

void dequantize(DType type, const void* src, float* dst, std::int64_t n) {
    dequantize_inline(type, static_cast<const std::byte*>(src), dst, n);
}

} // namespace quire
