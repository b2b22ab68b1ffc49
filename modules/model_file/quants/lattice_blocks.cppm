// quire.model_file.quants.lattice_blocks: IQ1, IQ2 and IQ3: blocks whose elements come in vectors of four or eight, each the index of a
// point of a lattice, with signs and scales. Owns nothing.
//
// All hold 256 elements and, but for IQ1_M, begin with d (fp16). 32 elements belong together: a part. Source: ggml.
export module quire.model_file.quants.lattice_blocks;

import quire.core.base;
import quire.core.tensor;
import quire.model_file.quants.blocks;
import quire.model_file.quants.lattices;

export namespace quire {

// dst[0 .. n) = the elements stored at b; n is a multiple of 256.
void dequantize_lattice(DType type, Bits b, float* dst, std::int64_t n);

// The eight signs (bit i: element i is negative) of a number of seven bits: the eighth makes their number even.
constexpr unsigned even_signs(unsigned seven) { return seven | (unsigned(std::popcount(seven)) & 1) << 7; }

} // namespace quire

module :private;

namespace quire {

unsigned      two_bytes(Bits b) { return unsigned(b[0]) | unsigned(b[1]) << 8; }
std::uint32_t four_bytes(Bits b) { return two_bytes(b) | std::uint32_t(two_bytes(b + 2)) << 16; }

// y = scale · point, negative where `signs` has a bit. Length is that of the point.
template <std::size_t Length>
void put(float* y, const std::array<std::int8_t, Length>& point, float scale, unsigned signs) {
    for (std::size_t i = 0; i < Length; i++) {
        const float v = scale * float(point[i]);
        y[i]          = signs >> i & 1 ? -v : v;
    }
}

// IQ2_XXS: d; for each part 4 bytes, the points of its four eights, and a number of 32 bits: four times 7 bits of signs, above them a
// scale of 4 bits. x = d · (scale + 1/2) / 4 · point
void block_iq2_xxs(Bits b, float* y) {
    const float d = fp16_at(b);
    for (int part = 0; part < 8; part++) {
        const Bits          q     = b + 2 + 8 * part;
        const std::uint32_t rest  = four_bytes(q + 4);
        const float         scale = d * (0.5f + float(rest >> 28)) * 0.25f;
        for (int i = 0; i < 4; i++)
            put(y + 32 * part + 8 * i, iq2_xxs_lattice[q[i]], scale, even_signs(rest >> (7 * i) & 127));
    }
}

// IQ2_XS: d; for each eight 16 bits: 9 of the point, 7 of signs; then 8 bytes of scales, a nibble for each 16 elements.
// x = d · (scale + 1/2) / 4 · point
void block_iq2_xs(Bits b, float* y) {
    const float d = fp16_at(b);
    for (int i = 0; i < 32; i++) { // eights
        const unsigned q     = two_bytes(b + 2 + 2 * i);
        const float    scale = d * (0.5f + float(b[66 + i / 4] >> (i / 2 % 2 * 4) & 15)) * 0.25f;
        put(y + 8 * i, iq2_xs_lattice[q & 511], scale, even_signs(q >> 9));
    }
}

// IQ2_S: d; for each eight the low 8 bits of the point (32 bytes), its signs (32 bytes), the high 2 bits (8 bytes, lowest first); scales
// as IQ2_XS. x = d · (scale + 1/2) / 4 · point
void block_iq2_s(Bits b, float* y) {
    const float d = fp16_at(b);
    for (int i = 0; i < 32; i++) {
        const unsigned point = b[2 + i] | (b[66 + i / 4] >> (i % 4 * 2) & 3u) << 8;
        const float    scale = d * (0.5f + float(b[74 + i / 4] >> (i / 2 % 2 * 4) & 15)) * 0.25f;
        put(y + 8 * i, iq2_s_lattice[point], scale, b[34 + i]);
    }
}

// IQ3_XXS: d; the points of 64 fours (a byte each); for each part a number of 32 bits as in IQ2_XXS.
// x = d · (scale + 1/2) / 2 · point
void block_iq3_xxs(Bits b, float* y) {
    const float d = fp16_at(b);
    for (int part = 0; part < 8; part++) {
        const std::uint32_t rest  = four_bytes(b + 66 + 4 * part);
        const float         scale = d * (0.5f + float(rest >> 28)) * 0.5f;
        for (int i = 0; i < 8; i++) // fours: two share 8 signs
            put(y + 32 * part + 4 * i, iq3_xxs_lattice[b[2 + 8 * part + i]], scale,
                even_signs(rest >> (i / 2 * 7) & 127) >> (i % 2 * 4));
    }
}

// IQ3_S: d; for each four the low 8 bits of the point (64 bytes), the ninth (8 bytes), 4 signs (32 bytes); 4 bytes of scales, a nibble
// for each part. x = d · (2 · scale + 1) · point
void block_iq3_s(Bits b, float* y) {
    const float d = fp16_at(b);
    for (int i = 0; i < 64; i++) { // fours
        const unsigned point = b[2 + i] | (b[66 + i / 8] >> (i % 8) & 1u) << 8;
        const float    scale = d * float(1 + 2 * (b[106 + i / 16] >> (i / 8 % 2 * 4) & 15));
        put(y + 4 * i, iq3_s_lattice[point], scale, b[74 + i / 2] >> (i % 2 * 4));
    }
}

// y = scale · (point + shift)
void put_shifted(float* y, unsigned point, float scale, bool down) {
    for (std::size_t i = 0; i < 8; i++) y[i] = scale * (float(iq1_lattice[point][i]) + (down ? -0.125f : 0.125f));
}

// IQ1_S: d; for each eight the low 8 bits of the point (32 bytes); for each part 16 bits: four times the high 3 bits, a scale of 3
// bits, the sign of the shift. x = d · (2 · scale + 1) · (point ± 1/8)
void block_iq1_s(Bits b, float* y) {
    const float d = fp16_at(b);
    for (int part = 0; part < 8; part++) {
        const unsigned high  = two_bytes(b + 34 + 2 * part);
        const float    scale = d * float(2 * (high >> 12 & 7) + 1);
        for (int i = 0; i < 4; i++)
            put_shifted(y + 32 * part + 8 * i, b[2 + 4 * part + i] | (high >> (3 * i) & 7) << 8, scale, high >> 15);
    }
}

// IQ1_M: for each eight the low 8 bits of the point (32 bytes) and a nibble (16 bytes): the high 3 bits and the sign of the shift; four
// times 16 bits: four scales of 3 bits, one for each 16 elements, and a nibble of d, the lowest first.
// x = d · (2 · scale + 1) · (point ± 1/8)
void block_iq1_m(Bits b, float* y) {
    unsigned half = 0;
    for (int i = 0; i < 4; i++) half |= two_bytes(b + 48 + 2 * i) >> 12 << (4 * i);
    const std::uint8_t bytes[2] = {std::uint8_t(half & 255), std::uint8_t(half >> 8)};
    const float        d        = fp16_at(bytes);
    for (int i = 0; i < 32; i++) { // eights
        const unsigned nibble = b[32 + i / 2] >> (i % 2 * 4) & 15u;
        const unsigned s      = two_bytes(b + 48 + i / 8 * 2) >> (i / 2 % 4 * 3) & 7;
        put_shifted(y + 8 * i, b[i] | (nibble & 7) << 8, d * float(2 * s + 1), nibble >> 3);
    }
}

void each_block(Bits b, float* dst, std::int64_t n, std::int64_t bytes, void (*block)(Bits, float*)) {
    for (; n > 0; n -= 256, b += bytes, dst += 256) block(b, dst);
}

void dequantize_lattice(DType type, Bits b, float* dst, std::int64_t n) {
    const std::int64_t bytes = dtype_info(type).bytes;
    switch (type) {
        case DType::IQ1_S: return each_block(b, dst, n, bytes, block_iq1_s);
        case DType::IQ1_M: return each_block(b, dst, n, bytes, block_iq1_m);
        case DType::IQ2_XXS: return each_block(b, dst, n, bytes, block_iq2_xxs);
        case DType::IQ2_XS: return each_block(b, dst, n, bytes, block_iq2_xs);
        case DType::IQ2_S: return each_block(b, dst, n, bytes, block_iq2_s);
        case DType::IQ3_XXS: return each_block(b, dst, n, bytes, block_iq3_xxs);
        case DType::IQ3_S: return each_block(b, dst, n, bytes, block_iq3_s);
        default: check(false, "a type without a lattice");
    }
}

} // namespace quire
