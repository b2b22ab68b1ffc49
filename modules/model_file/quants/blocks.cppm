// quire.model_file.quants.blocks: the quantised types of GGUF whose elements are small integers of their own: how a block of each is
// laid out, and what floats it stands for. Owns nothing.
//
// Sources: the GGUF format document and the block structures of ggml; MXFP4: Open Compute Project, Microscaling Formats (MX) 1.0.
export module quire.model_file.quants.blocks;

import quire.core.std;

export namespace quire {

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

// E2M1, the 4-bit float of MXFP4 and NVFP4: sign, two bits of exponent, one of mantissa. The values are doubled, to be integers;
// the scales are halved.
inline constexpr std::array<float, 16> e2m1_values{0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Half of the power of two that an E8M0 exponent stands for, 2^(e - 128).
[[gnu::always_inline]] inline float half_e8m0(unsigned e) {
    return std::bit_cast<float>(e < 2 ? 0x00200000u << e : (e - 1) << 23);
}

// MXFP4: an E8M0 scale, nibbles as Q4_0; x = half scale · value[q]
[[gnu::always_inline]] inline void block_mxfp4(Bits b, float* __restrict y) {
    const float d = half_e8m0(b[0]);
    for (int i = 0; i < 16; i++) {
        y[i]      = d * e2m1_values[b[1 + i] & 15];
        y[i + 16] = d * e2m1_values[b[1 + i] >> 4];
    }
}

// Half of an E4M3 number whose sign is not looked at: four bits of exponent (bias 7), three of mantissa; 0x7f is no number and
// counts as 0, as in ggml.
[[gnu::always_inline]] inline float half_e4m3(unsigned v) {
    if (v == 0x7f) return 0;
    const unsigned exponent = v >> 3 & 15, mantissa = v & 7;
    if (exponent == 0) return float(mantissa) * 0x1p-10f;
    return std::bit_cast<float>((exponent - 8 + 127) << 23 | mantissa << 20);
}

// NVFP4: four E4M3 scales, then for each 8 bytes: byte i = [element i+8: 4 bits | element i: 4 bits]
[[gnu::always_inline]] inline void block_nvfp4(Bits b, float* __restrict y) {
    for (int part = 0; part < 4; part++) {
        const float d = half_e4m3(b[part]);
        const Bits  q = b + 4 + part * 8;
        for (int i = 0; i < 8; i++) {
            y[part * 16 + i]     = d * e2m1_values[q[i] & 15];
            y[part * 16 + i + 8] = d * e2m1_values[q[i] >> 4];
        }
    }
}

// TQ2_0: 64 bytes laid out as those of Q2_K, d; x = d · (q - 1)
[[gnu::always_inline]] inline void block_tq2_0(Bits b, float* __restrict y) {
    const float d = fp16_at(b + 64);
    for (int part = 0; part < 8; part++) // 32 elements of one shift
        for (int l = 0; l < 32; l++) y[part * 32 + l] = d * float(int(b[part / 4 * 32 + l] >> (part % 4 * 2) & 3) - 1);
}

// TQ1_0: five digits to the base 3 in a byte, as the fraction byte / 256, the first digit the topmost: multiplying by 3^k moves
// digit k to the units. 32 bytes hold elements l, l+32, … l+128; 16 bytes elements 160+l, 176+l, …; 4 bytes the last
// 16, four in each; then d. x = d · (digit - 1)
[[gnu::always_inline]] inline void block_tq1_0(Bits b, float* __restrict y) {
    const float   d        = fp16_at(b + 52);
    constexpr int powers[] = {1, 3, 9, 27, 81};
    const auto    digit    = [&](int byte, int k) { return float(int(std::uint8_t(byte * powers[k]) * 3u >> 8) - 1); };
    for (int k = 0; k < 5; k++)
        for (int l = 0; l < 32; l++) y[k * 32 + l] = d * digit(b[l], k);
    for (int k = 0; k < 5; k++)
        for (int l = 0; l < 16; l++) y[160 + k * 16 + l] = d * digit(b[32 + l], k);
    for (int k = 0; k < 4; k++)
        for (int l = 0; l < 4; l++) y[240 + k * 4 + l] = d * digit(b[48 + l], k);
}

// Q1_0: d, 16 bytes, a bit for each element, lowest first; x = d or -d
[[gnu::always_inline]] inline void block_q1_0(Bits b, float* __restrict y) {
    const float d = fp16_at(b);
    for (int i = 0; i < 128; i++) y[i] = b[2 + i / 8] >> (i % 8) & 1 ? d : -d;
}

// Q2_0: d, 16 bytes, two bits for each element, lowest first; x = d · (q - 1)
[[gnu::always_inline]] inline void block_q2_0(Bits b, float* __restrict y) {
    const float d = fp16_at(b);
    for (int i = 0; i < 64; i++) y[i] = float(int(b[2 + i / 4] >> (i % 4 * 2) & 3) - 1) * d;
}

// Q8_K: d (float), 256 signed bytes, their sums by 16 (int16), which are not needed here; x = d · q
[[gnu::always_inline]] inline void block_q8_k(Bits b, float* __restrict y) {
    const float d = std::bit_cast<float>(std::uint32_t(b[0]) | std::uint32_t(b[1]) << 8 | std::uint32_t(b[2]) << 16 |
                                         std::uint32_t(b[3]) << 24);
    for (int i = 0; i < 256; i++) y[i] = d * float(std::int8_t(b[4 + i]));
}

} // namespace quire
