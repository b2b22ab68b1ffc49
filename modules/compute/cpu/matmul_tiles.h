// The GEMM loops of quire.compute.cpu.kernels. This file is included once for each instruction set, in its own namespace and with its own
// target attribute. The includer defines
//   DOT(sum, w, x)  sum[lane] += w[2·lane] · x[2·lane] + w[2·lane + 1] · x[2·lane + 1], of int16
//   BYTE_DOT(sum, u, s)  the same with four bytes per lane: u unsigned, s signed
//   ANY_NEGATIVE(v) whether any lane of int32 is negative
//   SPLIT_BYTES     whether BYTE_DOT is one instruction, so that 8 bits times the bytes of 16 bits is faster than 16 bits times 16
//   PAIRED_PLACES   whether additions are so much cheaper than products that half the products are replaced (add_pairs)
//   DOT_TOKENS      tokens multiplied together with a tile of integers; more than one where the tile's 16 vectors are in memory
//   FMA(a, b, c)    a · b + c, fused if the target can
//   FUSED           whether it is fused
//   FEW, MANY       rows, tokens and columns of a FloatTile for few and for many tokens
//   Lanes           the vector of floats that fits into a register: 16, or 8 of them
//   FROM_HALVES(out, h)  out = 16 half floats, given as u16x16, as floats
//
// Integer products need 16 consecutive rows interleaved: for each piece of their blocks (a scale, 16 bytes of elements) the pieces of
// all 16 rows are stored together, so that a vector holds one column of 16 rows and sums never cross lanes. The bytes are those of
// the file in another order. Some types are interleaved when a model is loaded, others at each use, a few columns at a time
// (interleaved_at_load). A tile is 16 rows × 32 columns, unpacked to int16 in 16 registers; all tokens use it, which spreads
// the cost of interleaving and unpacking.
//
// Float weights stay in the order of the file: a vector holds 16 columns of one row.

#define LOW_HALF(v) __builtin_convertvector((u32x16)(v) & 0xffff, u16x16)
#define HIGH_HALF(v) __builtin_convertvector((u32x16)(v) >> 16, u16x16)

// -- unpacking: w[2j] and w[2j + 1] become places 4j, 4j + 2 and 4j + 1, 4j + 3 of a tile, which is how bytes fall apart
// into int16. Vectors of nibbles are shifted as int16, 32 lanes: 16 rows × 2.

using Tile = i16x32*;

// q: 16 bytes of each row, a nibble for each of 32 places
INLINE void nibbles(const i32x16* q, Tile w) {
    for (int j = 0; j < 4; j++) {
        const auto v = (u16x32)q[j];
        w[2 * j]     = (i16x32)(v & 15);
        w[2 * j + 1] = (i16x32)(v >> 8 & 15);
        w[2 * j + 8] = (i16x32)(v >> 4 & 15);
        w[2 * j + 9] = (i16x32)(v >> 12);
    }
}

// q: 32 bytes of each row; of each byte the nibble at `shift`
INLINE void half_bytes(const i32x16* q, int shift, Tile w) {
    for (int j = 0; j < 8; j++) {
        const auto v = (u16x32)q[j];
        w[2 * j]     = (i16x32)(v >> shift & 15);
        w[2 * j + 1] = (i16x32)(v >> (8 + shift) & 15);
    }
}

// The fifth bits of Q5_0 and Q5_1: bit k of h is place k's
INLINE void fifth_bits(const i32x16& h, Tile w) {
    for (int j = 0; j < 8; j++) {
        const auto t = (u32x16)h >> (4 * j);
        w[2 * j] |= (i16x32)((t << 4 & 0x10) | (t << 18 & 0x100000));
        w[2 * j + 1] |= (i16x32)((t << 3 & 0x10) | (t << 17 & 0x100000));
    }
}

// Each format: `items` and `bytes` of a block, and its pieces; header() for the block at p, then tile() for each of its tiles,
// in order. The value of a place is scale · w, or scale · w - second. With two_scales, one for each half of a tile, they are whole
// numbers and part of w; the sum over a half fits 32 bits, that of both nearly always (add_halves).
//
// Those read as they stand in the file also have, for 16 tiles of one row at p: row_sums(), of their products with x as
// split_x() has it, or of their halves with two_scales; row_values(), what these become and their scales.
// Bytes without a sign stand for weights with one (w + 128, w + 32), which makes the sums too large by what zeros() gives.

// n vectors of 4 bytes of each row, which stood at byte `offset` of the block.
INLINE void load(const std::byte* p, int offset, int n, i32x16* q) {
    __builtin_memcpy(q, p + 16 * offset, std::size_t(n) * sizeof(i32x16));
}
INLINE void load_halves(const std::byte* p, int offset, f32x16& out) {
    u16x16 h;
    LOAD16(h, p + 16 * offset);
    FROM_HALVES(out, h);
}
INLINE void halves_apart(const std::byte* p, std::size_t stride, u16x16& h) {
    for (std::size_t r = 0; r < 16; r++) {
        std::uint16_t one;
        __builtin_memcpy(&one, p + r * stride, 2);
        h[r] = one;
    }
}
// 32 bytes from each of two places
INLINE void load_two(const std::byte* a, const std::byte* b, u8x64& out) {
    __builtin_memcpy(&out, a, 32);
    __builtin_memcpy(reinterpret_cast<std::byte*>(&out) + 32, b, 32);
}

// Four lanes of v[i] each → lane i of these four.
#define LOW(x, y) __builtin_shufflevector(x, y, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
#define HIGH(x, y) __builtin_shufflevector(x, y, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31)
INLINE void sums_of_fours(const i32x16* v, i32x16& dot) {
    const i32x16 a = LOW(v[0], v[2]) + HIGH(v[0], v[2]), b = LOW(v[1], v[3]) + HIGH(v[1], v[3]);
    dot = LOW(a, b) + HIGH(a, b);
}
INLINE void largest_of_fours(const i32x16* v, i32x16& out) {
    const i32x16 a = __builtin_elementwise_max(LOW(v[0], v[2]), HIGH(v[0], v[2])),
                 b = __builtin_elementwise_max(LOW(v[1], v[3]), HIGH(v[1], v[3]));
    out            = __builtin_elementwise_max(LOW(a, b), HIGH(a, b));
}
#undef LOW
#undef HIGH
// Lanes 0-7 of v[i], i < 8, → lane 2i, the others → lane 2i + 1: the sums, or the largest.
#define FIRST(x, y) __builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
#define SECOND(x, y) __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)
#define SORTED(v) __builtin_shufflevector(v, v, 0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15)
INLINE void sums_of_tiles(const i32x16* v, i32x16& dot) {
    i32x16 a[4];
    for (int i = 0; i < 4; i++) a[i] = FIRST(v[i], v[i + 4]) + SECOND(v[i], v[i + 4]);
    sums_of_fours(a, dot);
    dot = SORTED(dot);
}
INLINE void largest_of_tiles(const i32x16* v, i32x16& out) {
    i32x16 a[4];
    for (int i = 0; i < 4; i++) a[i] = __builtin_elementwise_max(FIRST(v[i], v[i + 4]), SECOND(v[i], v[i + 4]));
    largest_of_fours(a, out);
    out = SORTED(out);
}
#undef FIRST
#undef SECOND
#undef SORTED

// 16 rows × 32 places
struct UnpackedTile {
    i16x32 w[16];
    f32x16 scale, second;
};

// value = the sum of both halves, rounded once, even where it does not fit 32 bits (the scales of a tile as large as they can be,
// and all its places, too).
INLINE void add_halves(const i32x16* half, f32x16& value) {
    const i32x16 a = half[0], b = half[1], sum = a + b, wrong = (a ^ sum) & (b ^ sum);
    value = __builtin_convertvector(sum, f32x16);
    if (ANY_NEGATIVE(wrong))
        [[unlikely]] { // half the sum, odd if anything was lost: so far down it does not matter what
        const i32x16 by_2 = ((a >> 1) + (b >> 1) + (a & b & 1)) | ((a ^ b) & 1);
        value             = wrong < 0 ? 2 * __builtin_convertvector(by_2, f32x16) : value;
    }
}

struct OfQ8_0 {
    static constexpr int    items = 32, bytes = 34;
    static constexpr bool   has_min = false, two_scales = false;
    static constexpr Pieces pieces = {2, 2, {{{0, 2}}}};

    INLINE void header(const std::byte*) {}
    INLINE void tile(const std::byte* p, int, UnpackedTile& to) {
        i32x16 q[8];
        load(p, 2, 8, q);
        for (int i = 0; i < 8; i++) {
            to.w[2 * i]     = (i16x32)q[i] << 8 >> 8;
            to.w[2 * i + 1] = (i16x32)q[i] >> 8;
        }
        load_halves(p, 0, to.scale);
    }

    INLINE void row_sums(const std::byte* p, const std::byte* x, i32x16* dot) {
        i32x16 v[8];
        for (int i = 0; i < 8; i++, p += 2 * bytes, x += 128) two_tiles(p + 2, x, v[i]);
        sums_of_tiles(v, *dot);
    }
    // Tile 2i to lanes 0-7, the next one to the others.
    INLINE void two_tiles(const std::byte* p, const std::byte* x, i32x16& v) {
        v = i32x16{};
#if SPLIT_BYTES
        u8x64 w, low, high;
        load_two(p, p + bytes, w);
        LOAD16(low, x);
        LOAD16(high, x + 64);
        BYTE_DOT(v, w ^ 128, high);
        v <<= 8;
        BYTE_DOT(v, low, w);
#else
        i32x16 sum[2] = {};
        for (int t = 0; t < 2; t++) {
            i8x32  w;
            i16x32 places;
            LOAD16(w, p + t * bytes);
            LOAD16(places, x + 64 * t);
            DOT(sum[t], __builtin_convertvector(w, i16x32), places);
        }
        v = __builtin_shufflevector(sum[0], sum[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
            __builtin_shufflevector(sum[0], sum[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
#endif
    }
    INLINE void row_values(const std::byte* p, const i32x16* dot, f32x16& value, f32x16& scale) {
        u16x16 h;
        if constexpr (sizeof(Lanes) == sizeof(f32x16)) {
            u16x32 v[8];
            __builtin_memcpy(v, p, sizeof v);
#define FOUR(i) __builtin_shufflevector(v[i], v[i + 1], 2 * i, 2 * i + 17, 2 * i + 34, 2 * i + 51)
            h = __builtin_shufflevector(__builtin_shufflevector(FOUR(0), FOUR(2), 0, 1, 2, 3, 4, 5, 6, 7),
                                        __builtin_shufflevector(FOUR(4), FOUR(6), 0, 1, 2, 3, 4, 5, 6, 7), 0, 1, 2, 3,
                                        4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#undef FOUR
        } else {
            halves_apart(p, bytes, h);
        }
        FROM_HALVES(scale, h);
        value = __builtin_convertvector(*dot, f32x16);
    }
    // 16 tiles whose weights are zero
    INLINE void zeros(std::byte* p) { std::memset(p, 0, 16 * bytes); }
};

struct OfQ4_0 {
    static constexpr int    items = 32, bytes = 18;
    static constexpr bool   has_min = false, two_scales = false;
    static constexpr Pieces pieces = {2, 1, {{{0, 2}}}};

    INLINE void header(const std::byte*) {}
    INLINE void tile(const std::byte* p, int, UnpackedTile& to) {
        i32x16 q[4];
        load(p, 2, 4, q);
        for (int i = 0; i < 4; i++) { // q - 8, as a nibble with a sign
            const auto v    = (i16x32)(q[i] ^ int(0x88888888));
            to.w[2 * i]     = v << 12 >> 12;
            to.w[2 * i + 1] = v << 4 >> 12;
            to.w[2 * i + 8] = v << 8 >> 12;
            to.w[2 * i + 9] = v >> 12;
        }
        load_halves(p, 0, to.scale);
    }
};

struct OfQ4_1 {
    static constexpr int    items = 32, bytes = 20;
    static constexpr bool   has_min = true, two_scales = false;
    static constexpr Pieces pieces = {4, 1, {{{0, 2}, {2, 2}}}};

    INLINE void header(const std::byte*) {}
    INLINE void tile(const std::byte* p, int, UnpackedTile& to) {
        i32x16 q[4];
        load(p, 4, 4, q);
        nibbles(q, to.w);
        load_halves(p, 0, to.scale);
        load_halves(p, 2, to.second);
        to.second = -to.second;
    }
};

struct OfQ5_0 {
    static constexpr int    items = 32, bytes = 22;
    static constexpr bool   has_min = false, two_scales = false;
    static constexpr Pieces pieces = {6, 1, {{{0, 2}, {2, 4}}}};

    INLINE void header(const std::byte*) {}
    INLINE void tile(const std::byte* p, int, UnpackedTile& to) {
        i32x16 q[4], fifth;
        load(p, 2, 1, &fifth);
        load(p, 6, 4, q);
        nibbles(q, to.w);
        fifth_bits(fifth, to.w);
        for (int i = 0; i < 16; i++) to.w[i] -= 16;
        load_halves(p, 0, to.scale);
    }
};

struct OfQ5_1 {
    static constexpr int    items = 32, bytes = 24;
    static constexpr bool   has_min = true, two_scales = false;
    static constexpr Pieces pieces = {8, 1, {{{0, 2}, {2, 2}, {4, 4}}}};

    INLINE void header(const std::byte*) {}
    INLINE void tile(const std::byte* p, int, UnpackedTile& to) {
        i32x16 q[4], fifth;
        load(p, 4, 1, &fifth);
        load(p, 8, 4, q);
        nibbles(q, to.w);
        fifth_bits(fifth, to.w);
        load_halves(p, 0, to.scale);
        load_halves(p, 2, to.second);
        to.second = -to.second;
    }
};

// What Q4_K and Q5_K have in common: d, dmin and 12 bytes with 8 scales and 8 minima of 6 bits.
struct ScalesK {
    i32x16 s[3];
    f32x16 d, dmin;

    INLINE void read(const std::byte* p) {
        i32x16 both;
        load(p, 0, 1, &both);
        FROM_HALVES(d, LOW_HALF(both));
        FROM_HALVES(dmin, HIGH_HALF(both));
        load(p, 4, 3, s);
    }
    INLINE void at(int j, f32x16& scale, f32x16& min) const {
        const int i = 8 * (j & 3);
        i32x16    sc, m;
        if (j < 4) {
            sc = s[0] >> i & 63;
            m  = s[1] >> i & 63;
        } else {
            const auto low = (u32x16)s[2] >> i;
            sc             = (i32x16)((low & 15) | ((u32x16)s[0] >> (i + 6) & 3) << 4);
            m              = (i32x16)((low >> 4 & 15) | ((u32x16)s[1] >> (i + 6) & 3) << 4);
        }
        scale = d * __builtin_convertvector(sc, f32x16);
        min   = dmin * __builtin_convertvector(m, f32x16);
    }
};

struct OfQ4_K {
    static constexpr int    items = 256, bytes = 144;
    static constexpr bool   has_min = true, two_scales = false;
    static constexpr Pieces pieces = {0, 9};
    ScalesK                 scales;

    INLINE void header(const std::byte* p) { scales.read(p); }
    INLINE void tile(const std::byte* p, int j, UnpackedTile& to) {
        i32x16 q[8];
        load(p, 16 + j / 2 * 32, 8, q); // two tiles share their bytes
        half_bytes(q, j % 2 * 4, to.w);
        scales.at(j, to.scale, to.second);
    }

    // The sums of tiles j and j + 1 and one token. The nibbles stay where they are in their 16 bits, so that they count 256 and 16
    // times, but for the last, which would be a sign: a sum of 16 places still fits. A loop that stays one, as in dot_tiles().
    // What comes later is asked for into the second-level cache where a vector is a line, else into the first: the other way round
    // both lose 5 %.
    static constexpr int early = sizeof(Lanes) == sizeof(f32x16) ? 2 : 3;
    INLINE void          two_sums(const std::byte* p, int j, const std::int16_t* x, i32x16* dot) {
        i32x16 a{}, b{}, c{}, d{};
#pragma clang loop unroll(disable)
        for (int i = 0; i < 8; i++) {
            u16x32           v;
            const std::byte* q = p + 16 * (16 + j / 2 * 32) + 64 * i;
            LOAD16(v, q);
            __builtin_prefetch(q + 8192, 0, early);
            DOT(a, (i16x32)(v & 0x000f), PAIR(x + 4 * i));
            DOT(b, (i16x32)(v & 0x0f00), PAIR(x + 4 * i + 2));
            DOT(c, (i16x32)(v & 0x00f0), PAIR(x + 4 * i + 32));
            DOT(d, (i16x32)(v >> 12), PAIR(x + 4 * i + 34));
        }
        dot[0] = a + (b >> 8);
        dot[1] = (c >> 4) + d;
    }
    INLINE void tile_scales(int j, UnpackedTile& to) { scales.at(j, to.scale, to.second); }
};

struct OfQ5_K {
    static constexpr int    items = 256, bytes = 176;
    static constexpr bool   has_min = true, two_scales = false;
    static constexpr Pieces pieces = {0, 11};
    ScalesK                 scales;

    INLINE void header(const std::byte* p) { scales.read(p); }
    INLINE void tile(const std::byte* p, int j, UnpackedTile& to) {
        i32x16 q[8], high[8];
        load(p, 48 + j / 2 * 32, 8, q);
        load(p, 16, 8, high);
        half_bytes(q, j % 2 * 4, to.w);
        for (int i = 0; i < 8; i++) {
            const auto h = (u16x32)high[i] >> j;
            to.w[2 * i] |= (i16x32)(h << 4 & 16);
            to.w[2 * i + 1] |= (i16x32)(h >> 4 & 16);
        }
        scales.at(j, to.scale, to.second);
    }
};

// A scale for each 16 places, a byte, times that of the block. w · byte fits 14 bits.
struct OfQ6_K {
    static constexpr int    items = 256, bytes = 210;
    static constexpr bool   has_min = false, two_scales = true;
    static constexpr Pieces pieces{0, 13, {{{208, 2}}}};
    f32x16                  d;

    INLINE void header(const std::byte* p) { load_halves(p, 208, d); }
    INLINE void tile(const std::byte* p, int j, UnpackedTile& to) {
        const int half = j / 4, quarter = j % 4;
        i32x16    low[8], high[8], scales;
        load(p, half * 64 + quarter % 2 * 32, 8, low);
        load(p, 128 + half * 32, 8, high);
        load(p, 192 + j / 2 * 4, 1, &scales); // two of the four are this tile's
        half_bytes(low, quarter / 2 * 4, to.w);
        for (int i = 0; i < 8; i++) {
            const auto h = (u16x32)high[i] >> (2 * quarter);
            to.w[2 * i] |= (i16x32)(h << 4 & 0x30);
            to.w[2 * i + 1] |= (i16x32)(h >> 4 & 0x30);
        }
        for (int half = 0; half < 2; half++) {
            const i32x16 byte = scales << (24 - (j % 2 * 2 + half) * 8) >> 24;
            const auto   both = (i16x32)((byte & 0xffff) | byte << 16);
            for (int i = 8 * half; i < 8 * half + 8; i++) to.w[i] = (to.w[i] - 32) * both;
        }
        to.scale = d;
    }

    static constexpr u16x32 second_half_by_2 = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                                                2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2};
    // Of two blocks, each four times 64 places: half h of these i in lane 4h + i. The second 32 bytes have their high bits two
    // further up.
    INLINE void row_sums(const std::byte* p, const std::byte* x, i32x16* dot) {
        for (int block = 0; block < 2; block++, p += bytes, dot++) {
            i32x16 v[4];
            for (int i = 0; i < 4; i++, x += 128) {
                u8x64 q, h, first, second; // of x: low and high bytes, or even and odd places
                LOAD16(q, p + i / 2 * 64);
                load_two(p + 128 + i / 2 * 32, p + 128 + i / 2 * 32, h);
                LOAD16(first, x);
                LOAD16(second, x + 64);
                const u16x32 bits = i % 2 ? (u16x32)h >> second_half_by_2 : (u16x32)h << (4 - second_half_by_2);
                const u8x64  w    = (i % 2 ? (u8x64)((u16x32)q >> 4) & 15 : q & 15) | ((u8x64)bits & 0x30);
                i32x16       sum{};
                if constexpr (SPLIT_BYTES) {
                    BYTE_DOT(sum, w, second);
                    sum <<= 8;
                    BYTE_DOT(sum, first, w - 32);
                } else {
                    DOT(sum, (i16x32)((u16x32)w & 255), (i16x32)first);
                    DOT(sum, (i16x32)((u16x32)w >> 8), (i16x32)second);
                }
                v[i] = sum;
            }
            sums_of_fours(v, *dot);
        }
    }
    INLINE void row_values(const std::byte* p, const i32x16* dot, f32x16& value, f32x16& scale) {
        i32x16 v[2];
        u16x16 h[2];
        for (int block = 0; block < 2; block++, p += bytes) {
            i8x16         s;
            std::uint16_t d;
            LOAD16(s, p + 192);
            LOAD16(d, p + 208);
            s        = __builtin_shufflevector(s, s, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            v[block] = dot[block] * __builtin_convertvector(s, i32x16);
            h[block] = u16x16{} + d;
        }
        FROM_HALVES(scale, __builtin_shufflevector(h[0], h[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23));
        const i32x16 half[2] = {
            __builtin_shufflevector(v[0], v[1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
            __builtin_shufflevector(v[0], v[1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)};
        f32x16 tiles; // 0, 2, 4, 6, 1, 3, 5, 7 of each block
        add_halves(half, tiles);
        value = __builtin_shufflevector(tiles, tiles, 0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    }
    INLINE void zeros(std::byte* p) {
        for (int block = 0; block < 2; block++, p += bytes) {
            std::memset(p, 0, 128);
            std::memset(p + 128, 0xaa, 64);
        }
    }
};

// -- products of integers

// sum[lane] = w · x over a tile, or over its first and its second half
template <bool Halves>
INLINE void dot_tile(const i16x32* w, const std::int16_t* x, i32x16* sum) {
    i32x16 a{}, b{}, c{}, d{};
    for (int i = 0; i < 8; i += 2) {
        DOT(a, w[i], PAIR(x + 2 * i));
        DOT(b, w[i + 1], PAIR(x + 2 * i + 2));
        DOT(c, w[i + 8], PAIR(x + 2 * i + 16));
        DOT(d, w[i + 9], PAIR(x + 2 * i + 18));
    }
    sum[0] = a + b;
    if constexpr (Halves) sum[1] = c + d;
    else sum[0] += c + d;
}

// The same of N neighbouring tokens, which take the tile from memory, in a loop that stays one: unrolled, it is reordered until
// the sums no longer fit the registers.
template <bool Halves, int N>
INLINE void dot_tiles(const i16x32* w, const std::int16_t* x, i32x16 (*sum)[2]) {
    constexpr int parts = Halves ? 2 : 1, length = 16 / parts;
    for (int part = 0; part < parts; part++, w += length, x += 2 * length) {
        i32x16 chain[N] = {};
#pragma clang loop unroll(disable)
        for (int i = 0; i < length; i++)
            for (int t = 0; t < N; t++) DOT(chain[t], w[i], PAIR(x + 32 * t + 2 * i));
        for (int t = 0; t < N; t++) sum[t][part] = chain[t];
    }
}

// A tile's sum, times the scale of x and what there is of a scale, onto the total. The sums of integers are exact; the floats
// made of them are added tile by tile, so that nothing depends on the number of tokens.
template <class Format>
INLINE void add_value(const f32x16& value, const UnpackedTile& w, float x_scale, float x_sum, f32x16& total) {
    f32x16 sum = FMA(value, w.scale * x_scale, total);
    if constexpr (Format::has_min) sum = FMA(-w.second, ALL(x_sum), sum);
    total = sum;
}

template <class Format, bool Halves>
INLINE void add_token(const i32x16* dot, const UnpackedTile& w, float x_scale, float x_sum, f32x16& total) {
    f32x16 value;
    if constexpr (Halves) add_halves(dot, value);
    else value = __builtin_convertvector(dot[0], f32x16);
    add_value<Format>(value, w, x_scale, x_sum, total);
}

// A tile of x, from some token on. Moved by additions alone: a row's tiles follow each other too quickly for more.
struct Tokens {
    const std::int16_t* integers;
    const float *       scales, *sums;
    const std::int32_t* products;

    INLINE void move(std::int64_t n) {
        integers += 32 * n;
        scales += n, sums += n, products += n;
    }
};

// Whether the sum over a tile fits 32 bits whatever x is.
template <class Format>
INLINE bool sum_fits(const UnpackedTile& w) {
    if constexpr (!Format::two_scales) return true;
    constexpr std::int32_t most = std::numeric_limits<std::int32_t>::max() / largest_integer(true);
    i32x16                 sum{};
    for (const i16x32& v : w.w) DOT(sum, __builtin_elementwise_abs(v), i16x32{} + 1);
    return !ANY_NEGATIVE(most - sum);
}

// One tile's part of n tokens' sums, of N tokens together, of whole tiles or of halves.
template <class Format, bool Halves, int N>
INLINE void add_tokens(const UnpackedTile& w, Tokens x, std::int64_t n, f32x16* total) {
    if constexpr (N > 1)
        for (; n >= N; n -= N, x.move(N), total += N) {
            i32x16 dots[N][2];
            dot_tiles<Halves, N>(w.w, x.integers, dots);
            for (int t = 0; t < N; t++) add_token<Format, Halves>(dots[t], w, x.scales[t], x.sums[t], total[t]);
        }
    for (std::int64_t t = 0; t < n; t++) {
        i32x16 dot[2];
        dot_tile<Halves>(w.w, x.integers + 32 * t, dot);
        add_token<Format, Halves>(dot, w, x.scales[t], x.sums[t], total[t]);
    }
}

// To know that a tile is one sum costs as much as one or two tokens, and saves a tenth of each.
template <class Format, int N>
INLINE_PARTS void add_tile(const UnpackedTile& w, Tokens x, std::int64_t n, f32x16* total) {
    if constexpr (Format::two_scales) {
        if (n >= 16 && sum_fits<Format>(w)) add_tokens<Format, false, N>(w, x, n, total);
        else add_tokens<Format, true, N>(w, x, n, total);
    } else {
        add_tokens<Format, false, N>(w, x, n, total);
    }
}

// The same of two groups of 16 rows with half the products (S. Winograd, A New Algorithm for Inner Product, 1968):
//   w0 · x0 + w1 · x1 = (w1 + x0) · (w0 + x1) - w0 · w1 - x0 · x1
// What is taken off belongs to the row or to the token, and is worked out once for all that it meets. Whole numbers: the sums
// are the same, though they overflow on the way (largest_integer() leaves room for w + x). Both groups share what is loaded of x.
constexpr int paired_tokens = 4;

template <class Format>
INLINE void add_pairs(const UnpackedTile* w, Tokens x, std::int64_t n, f32x16 (*total)[tokens_at_once]) {
    constexpr int T          = paired_tokens;
    i32x16        weights[2] = {}; // Σ w0 · w1
    for (int r = 0; r < 2; r++)
        for (int i = 0; i < 16; i += 2) DOT(weights[r], w[r].w[i], w[r].w[i + 1]);
    for (std::int64_t first = 0; first < n; first += T, x.move(T)) {
        i32x16 sum[2][T];
        for (int t = 0; t < T; t++)
            for (int r = 0; r < 2; r++) sum[r][t] = x.products[t] - weights[r];
#pragma clang loop unroll(disable)
        for (int i = 0; i < 16; i += 2)
            for (int t = 0; t < T; t++) {
                const i16x32 x0 = PAIR(x.integers + 32 * t + 2 * i), x1 = PAIR(x.integers + 32 * t + 2 * i + 2);
                for (int r = 0; r < 2; r++) DOT(sum[r][t], w[r].w[i + 1] + x0, w[r].w[i] + x1);
            }
        for (int t = 0; t < T; t++)
            for (int r = 0; r < 2; r++)
                add_value<Format>(__builtin_convertvector(sum[r][t], f32x16), w[r], x.scales[t], x.sums[t],
                                  total[r][first + t]);
    }
}

template <class Format>
INLINE_PARTS void add_two(const UnpackedTile* w, Tokens x, std::int64_t n, f32x16 (*total)[tokens_at_once]) {
    std::int64_t paired = 0;
    if (sum_fits<Format>(w[0]) && sum_fits<Format>(w[1])) {
        paired = n / paired_tokens * paired_tokens;
        add_pairs<Format>(w, x, paired, total);
    }
    x.move(paired);
    for (int r = 0; r < 2; r++) add_tile<Format, 1>(w[r], x, n - paired, total[r] + paired);
}

// One block of 16 rows that are `stride` apart, from p to `to`: a piece at byte o of the block comes to stand at 16 · o.
template <class Format>
INLINE void interleave_block(const std::byte* p, std::size_t stride, std::byte* to) {
    constexpr Pieces pieces = Format::pieces;
#pragma clang loop unroll(full)
    for (std::size_t i = 0; i < pieces.sixteens; i++) {
        i32x16 d[4];
        turn(p + pieces.at + 16 * i, stride, d);
        __builtin_memcpy(to + 16 * (pieces.at + 16 * i), d, sizeof d);
    }
#pragma clang loop unroll(full)
    for (const Piece piece : pieces.small)
        for (std::size_t r = 0; r < 16; r++)
            __builtin_memcpy(to + 16 * piece.offset + r * piece.bytes, p + piece.offset + r * stride, piece.bytes);
}

// Blocks first .. first + n - 1 of 16 rows, of which `here` are there: the others are zeros.
template <class Format>
INLINE void interleave_blocks(const std::byte* rows, std::size_t stride, std::int64_t here, std::int64_t first,
                              std::int64_t n, std::byte* to) {
    constexpr std::size_t bytes = Format::bytes;
    const std::byte*      p     = rows + std::size_t(first) * bytes;
    for (std::int64_t block = 0; block < n; block++, p += bytes, to += 16 * bytes) {
        if (here == 16) {
            interleave_block<Format>(p, stride, to);
            continue;
        }
        std::byte some[16 * bytes] = {};
        for (std::int64_t r = 0; r < here; r++)
            __builtin_memcpy(some + r * Format::bytes, p + std::size_t(r) * stride, bytes);
        interleave_block<Format>(some, bytes, to);
    }
}

// Groups of 16 rows first .. last-1, whole.
template <class Format>
INLINE_PARTS void interleave_rows(const TensorView& w, std::byte* out, std::int64_t first, std::int64_t last) {
    const std::size_t stride = row_bytes(w.type, w.cols);
    for (std::int64_t row = first * 16; row < last * 16; row += 16)
        interleave_blocks<Format>(static_cast<const std::byte*>(w.data) + std::size_t(row) * stride, stride,
                                  std::min<std::int64_t>(16, w.rows - row), 0, w.cols / Format::items,
                                  out + std::size_t(row) * stride);
}

// A group of 16 rows, `here` of which are there, interleaved or (`turned` false) as in the file.
struct RowGroup {
    const std::byte* p;
    std::size_t      stride; // of a row in the file
    std::int64_t     here;
};

// One token and 16 interleaved rows whose tiles are multiplied two at a time. What comes later is asked for early, as below.
template <class Format>
INLINE void one_token_by_two(const std::byte* p, const RoundedRows& x, f32x16& total) {
    constexpr int tiles = Format::items / 32, bytes = 16 * Format::bytes;
    f32x16        sum{};
    Format        format;
    for (std::int64_t tile = 0; tile < x.cols / 32; tile += tiles, p += bytes) {
        format.header(p);
#pragma clang loop unroll(full)
        for (int j = 0; j < tiles; j += 2) {
            i32x16 dot[2];
            format.two_sums(p, j, x.integers + (tile + j) * 32, dot);
            __builtin_prefetch(p + 8192 + 32 * j, 0, Format::early); // the scales
            for (int k = 0; k < 2; k++) {
                UnpackedTile w;
                format.tile_scales(j + k, w);
                add_token<Format, false>(dot + k, w, x.scales[tile + j + k], x.sums[tile + j + k], sum);
            }
        }
    }
    total = sum;
}

// R groups of 16 rows times tokens first .. first + n - 1; total [R][n]. What comes later is asked for early: the processor's
// own prefetching reaches half of this machine's bandwidth.
template <class Format, bool Turned, int N, int R>
INLINE_PARTS void integer_rows(const RowGroup* group, const RoundedRows& x, std::int64_t first, std::int64_t n,
                               f32x16 (*total)[tokens_at_once]) {
    constexpr int tiles = Format::items / 32, bytes = 16 * Format::bytes; // of a block of 16 rows
    constexpr int at_once = Turned ? 1 : 8 / tiles;                       // blocks turned together: 256 places
    for (int r = 0; r < R; r++)
        for (std::int64_t t = 0; t < n; t++) total[r][t] = f32x16{};
    const std::int64_t all = x.n;
    Tokens             at{x.integers, x.scales, x.sums, x.products};
    at.move(first);
    const auto add = [&](const UnpackedTile* w) __attribute__((always_inline)) {
        if constexpr (R == 2) add_two<Format>(w, at, n, total);
        else add_tile<Format, N>(w[0], at, n, total[0]);
        at.move(all);
    };
    Format                format[R];
    alignas(64) std::byte panel[R][Turned ? 1 : at_once * bytes];
    const std::int64_t    blocks = x.cols / Format::items;
    if constexpr (Turned) {
        for (std::int64_t block = 0; block < blocks; block++) {
            const std::int64_t later = block * bytes + 8192, rest = blocks * bytes; // then comes the other group
            const std::int64_t ahead = later < rest ? 8192 : 8192 + (R - 1) * rest;
            for (int r = 0; r < R; r++) format[r].header(group[r].p + block * bytes);
#pragma clang loop unroll(full)
            for (int j = 0; j < tiles; j++) {
                UnpackedTile w[R];
                for (int r = 0; r < R; r++) {
                    const std::byte* p = group[r].p + block * bytes;
                    format[r].tile(p, j, w[r]);
                    for (int i = bytes / tiles * j; i < bytes / tiles * (j + 1); i += 64)
                        __builtin_prefetch(p + ahead + i);
                }
                add(w);
            }
        }
        return;
    }
    for (std::int64_t begin = 0; begin < blocks; begin += at_once) {
        const std::int64_t here = std::min<std::int64_t>(at_once, blocks - begin);
        for (int r = 0; r < R; r++)
            interleave_blocks<Format>(group[r].p, group[r].stride, group[r].here, begin, here, panel[r]);
        for (std::int64_t block = begin; block < begin + here; block++) {
            const std::int64_t done = (block - begin) * bytes;
            for (int r = 0; r < R; r++) format[r].header(panel[r] + done);
#pragma clang loop unroll(full)
            for (int j = 0; j < tiles; j++) {
                UnpackedTile w[R];
                for (int r = 0; r < R; r++) {
                    const std::size_t stride = group[r].stride;
                    const std::byte*  later  = group[r].p + 16 * R * stride + begin * bytes + done;
                    format[r].tile(panel[r] + done, j, w[r]);
                    for (int i = bytes / tiles * j; i < bytes / tiles * (j + 1); i += 64)
                        __builtin_prefetch(later + i, 0, 2);
                    // and two rows of the next panel, from the second-level cache to the first
                    const std::byte* next = group[r].p + std::size_t(2 * ((block - begin) * tiles + j)) * stride +
                                            (begin + at_once) * Format::bytes;
                    for (int i = 0; i < at_once * Format::bytes + 63; i += 64) {
                        __builtin_prefetch(next + i);
                        __builtin_prefetch(next + stride + i);
                    }
                }
                add(w);
            }
        }
    }
}

INLINE void store_sums(const MatmulTask& task, std::int64_t row, std::int64_t first, std::int64_t n,
                       const f32x16* total) {
    const std::int64_t rows = task.weight->rows, here = std::min<std::int64_t>(16, rows - row);
    f32x16             bias{};
    if (task.bias) std::memcpy(&bias, task.bias + row, std::size_t(here) * sizeof(float));
    for (std::int64_t t = 0; t < n; t++) {
        const f32x16 sum = task.bias ? total[t] + bias : total[t];
        float*       out = task.out + (first + t) * rows + row;
        if (here == 16) STORE16(out, sum);
        else std::memcpy(out, &sum, std::size_t(here) * sizeof(float));
    }
}

// -- products of integers with one token and rows as they stand in the file, one row after the other, so that they come from
// memory in one stream: to turn them would take longer than to multiply. What the lanes hold is exact in any order; a row's
// tiles are brought together 16 at a time, and multiplied by their scales at the end, 16 rows at a time.

// x in tiles of 32 places, two after another: with SPLIT_BYTES as 64 low bytes without and 64 high bytes with a sign, else as int16,
// for weights that are bytes of their own in their order, for others the even ones of both tiles first; zeros up to a whole number of
// 16 tiles.
template <class Format>
INLINE void split_x(const RoundedRows& x, std::int64_t groups, std::byte* out) {
    for (std::int64_t k = 0; k < groups * 512; k += 64, out += 128) {
        i16x32 v[2] = {};
        for (int t = 0; t < 2; t++)
            if (k + 32 * t < x.cols) LOAD16(v[t], x.integers + k + 32 * t);
        if constexpr (!SPLIT_BYTES && Format::two_scales) {
#define PAIRS(x, from)                                                                                                 \
    __builtin_shufflevector(x[0], x[1], from, from + 2, from + 4, from + 6, from + 8, from + 10, from + 12, from + 14, \
                            from + 16, from + 18, from + 20, from + 22, from + 24, from + 26, from + 28, from + 30)
            const i32x16 both[2] = {(i32x16)v[0], (i32x16)v[1]}, even = PAIRS(both, 0), odd = PAIRS(both, 1);
#undef PAIRS
            STORE16(out, even);
            STORE16(out + 64, odd);
            continue;
        }
#define FOUR(at) at, at + 2, at + 1, at + 3
        for (int t = 0; t < 2; t++)
            v[t] = __builtin_shufflevector(v[t], v[t], FOUR(0), FOUR(4), FOUR(8), FOUR(12), FOUR(16), FOUR(20),
                                           FOUR(24), FOUR(28));
#undef FOUR
        if constexpr (SPLIT_BYTES) {
            for (int t = 0; t < 2; t++) {
                const auto low  = __builtin_convertvector(v[t] & 255, u8x32),
                           high = __builtin_convertvector(v[t] >> 8, u8x32);
                STORE16(out + 32 * t, low);
                STORE16(out + 64 + 32 * t, high);
            }
        } else {
            STORE16(out, v);
        }
    }
}

// Floats of scratch memory: x; for each 16 tiles what the sums are too large by (two vectors); for each of 16 rows their
// tiles' values and scales.
INLINE std::size_t one_token_scratch(std::int64_t cols) {
    return std::size_t((cols + 511) / 512) * (256 + 2 * 16 + 2 * 16 * 16 + 16);
}

template <class Format>
INLINE_PARTS void one_token(const MatmulTask& task) {
    constexpr std::int64_t bytes  = 512 / Format::items * Format::bytes;
    constexpr int          sums   = Format::two_scales ? 2 : 1;
    const TensorView&      w      = *task.weight;
    const RoundedRows&     x      = *task.rounded;
    const std::size_t      stride = row_bytes(w.type, w.cols);
    const std::int64_t     groups = (x.cols + 511) / 512, whole = x.cols / 512, tiles = x.cols / 32;
    auto*                  split = reinterpret_cast<std::byte*>(task.scratch);
    auto*                  over  = reinterpret_cast<i32x16*>(split + groups * 1024);
    auto *                 value = reinterpret_cast<f32x16*>(over + groups * 2), *scale = value + groups * 16;
    f32x16*                x_scale = scale + groups * 16;
    Format                 format;
    split_x<Format>(x, groups, split);
    for (std::int64_t g = 0; g < groups; g++) {
        std::byte zeros[bytes];
        format.zeros(zeros);
        format.row_sums(zeros, split + g * 1024, over + sums * g);
    }
    std::memcpy(x_scale, x.scales, std::size_t(tiles) * sizeof(float));

    const auto row_group = [&](const std::byte* p, std::int64_t g, std::int64_t r) __attribute__((always_inline)) {
        i32x16 dot[2];
        format.row_sums(p, split + g * 1024, dot);
        for (int i = 0; i < sums; i++) dot[i] -= over[sums * g + i];
        f32x16 values, scales;
        format.row_values(p, dot, values, scales);
        value[r * groups + g] = values;
        scale[r * groups + g] = scales * x_scale[g];
    };
    const std::byte* p = static_cast<const std::byte*>(w.data) + std::size_t(task.first) * stride;
    for (std::int64_t row = task.first; row < task.last; row += 16) {
        for (std::int64_t r = 0; r < std::min<std::int64_t>(16, task.last - row); r++, p += stride) {
            for (std::int64_t g = 0; g < whole; g++) {
                for (std::int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + g * bytes + i + 8192);
                row_group(p + g * bytes, g, r);
            }
            if (whole < groups) {
                std::byte rest[bytes] = {};
                std::memcpy(rest, p + whole * bytes, stride - std::size_t(whole * bytes));
                row_group(rest, whole, r);
            }
        }
        f32x16     total{};
        const auto add_four = [&](std::int64_t t, std::int64_t here) __attribute__((always_inline)) {
            const std::size_t at = std::size_t(t) * sizeof(float), apart = std::size_t(groups) * sizeof(f32x16);
            i32x16            v[4], s[4];
            turn(reinterpret_cast<const std::byte*>(value) + at, apart, v);
            turn(reinterpret_cast<const std::byte*>(scale) + at, apart, s);
            for (std::int64_t i = 0; i < here; i++) total = FMA((f32x16)v[i], (f32x16)s[i], total);
        };
        for (std::int64_t t = 0; t < tiles / 4 * 4; t += 4) add_four(t, 4); // a number known
        if (tiles % 4 > 0) add_four(tiles / 4 * 4, tiles % 4);
        store_sums(task, row, 0, 1, &total);
    }
}

#define EACH_INTEGER_FORMAT(DO) DO(Q4_0) DO(Q4_1) DO(Q5_0) DO(Q5_1) DO(Q8_0) DO(Q4_K) DO(Q5_K) DO(Q6_K)

template <int N, int R>
INLINE void rows_times(DType type, const RowGroup* group, const RoundedRows& x, std::int64_t first, std::int64_t n,
                       f32x16 (*total)[tokens_at_once]) {
    switch (type) {
#define ROWS_OF(T) \
    case DType::T: return integer_rows<Of##T, interleaved_at_load(DType::T), N, R>(group, x, first, n, total);
        EACH_INTEGER_FORMAT(ROWS_OF)
#undef ROWS_OF
        default: return;
    }
}

INLINE void interleave_body(const TensorView& w, std::byte* out, std::int64_t first, std::int64_t last) {
    switch (w.type) {
#define INTERLEAVE(T) \
    case DType::T: return interleave_rows<Of##T>(w, out, first, last);
        EACH_INTEGER_FORMAT(INTERLEAVE)
#undef INTERLEAVE
        default: return;
    }
}

// Tokens pass over 16 or 32 rows in numbers whose x stays in the second-level cache while the rows of the task change.
INLINE void integer_matmul(const MatmulTask& task) {
    const TensorView&  w      = *task.weight;
    const RoundedRows& x      = *task.rounded;
    const std::size_t  stride = row_bytes(w.type, w.cols);
    if (x.n == 1 && !interleaved_at_load(w.type) && one_token_scratch(x.cols) <= matmul_scratch) {
        if (w.type == DType::Q8_0) return one_token<OfQ8_0>(task);
        return one_token<OfQ6_K>(task);
    }
    // Fewer tokens do not pay for the unpacking, which no longer finds units idle.
    const std::int64_t paired_from = w.type == DType::Q6_K ? 64 : 24;
    const std::int64_t most = tokens_at_once / (PAIRED_PLACES ? 1 : 2), goes = (x.n + most - 1) / most;
    const std::int64_t at_once = (x.n + goes - 1) / goes;
    for (std::int64_t first = 0; first < x.n; first += at_once) {
        const std::int64_t n = std::min(at_once, x.n - first);
        for (std::int64_t row = task.first, groups; row < task.last; row += 16 * groups) {
            const auto group = [&](std::int64_t at) {
                return RowGroup{static_cast<const std::byte*>(w.data) + std::size_t(at) * stride, stride,
                                std::min<std::int64_t>(16, w.rows - at)};
            };
            const RowGroup two[2] = {group(row), group(row + 16)};
            f32x16         total[2][tokens_at_once];
            groups = PAIRED_PLACES && n >= paired_from && row + 16 < task.last ? 2 : 1;
            if (PAIRED_PLACES && groups == 2) rows_times<1, 2>(w.type, two, x, first, n, total);
            else if (x.n == 1 && w.type == DType::Q4_K) one_token_by_two<OfQ4_K>(two[0].p, x, total[0][0]);
            else if (n > 1) rows_times<DOT_TOKENS, 1>(w.type, two, x, first, n, total);
            else rows_times<1, 1>(w.type, two, x, first, 1, total); // multiplied as it is unpacked
            for (std::int64_t r = 0; r < groups; r++) store_sums(task, row + 16 * r, first, n, total[r]);
        }
    }
}

constexpr int rounded_together = 8; // tokens

// A tile of `here` neighbouring tokens whose places stand at x, `cols` apart.
INLINE void round_tiles(const float* x, std::int64_t cols, const RoundedRows& to, std::int64_t tile,
                        std::int64_t here) {
    const auto most_of_x              = float(largest_integer(to.for_large));
    i32x16     most[rounded_together] = {}, sum[rounded_together] = {}, product[rounded_together] = {}, lanes;
    for (std::int64_t t = 0; t < here; t++) { // of floats without a sign the bits compare as the values do
        i32x16 a, b;
        LOAD16(a, x + t * cols);
        LOAD16(b, x + t * cols + 16);
        most[t] = __builtin_elementwise_max(a & 0x7fffffff, b & 0x7fffffff);
    }
    largest_of_tiles(most, lanes);
    const i32x16 other   = __builtin_shufflevector(lanes, lanes, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    const auto   largest = (f32x16)__builtin_elementwise_max(lanes, other);
    const f32x16 inverse = largest > 0 ? most_of_x / largest : f32x16{};
    for (std::int64_t t = 0; t < here; t++) {
        i16x16 natural[2];
        for (int half = 0; half < 2; half++) {
            f32x16 v;
            LOAD16(v, x + t * cols + 16 * half);
            // adding 1.5 · 2^23 rounds to an integer, the low bits of the sum
            natural[half] = __builtin_convertvector((i32x16)(v * inverse[2 * t] + 12582912.0f) - 0x4b400000, i16x16);
        }
#define JOIN(a, b)                                                                                                  \
    __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, \
                            23, 24, 25, 26, 27, 28, 29, 30, 31)
#define FOUR(at) at, at + 2, at + 1, at + 3
        const i16x32 v = JOIN(natural[0], natural[1]);
        const i16x32 turned =
            __builtin_shufflevector(v, v, FOUR(0), FOUR(4), FOUR(8), FOUR(12), FOUR(16), FOUR(20), FOUR(24), FOUR(28));
#undef FOUR
#undef JOIN
        STORE16(to.integers + (tile + t) * 32, turned);
        DOT(sum[t], v, i16x32{} + 1);
        if constexpr (PAIRED_PLACES) DOT(product[t], v, (i16x32)((u32x16)v >> 16));
    }
#define EVEN(v) __builtin_shufflevector(v, v, 0, 2, 4, 6, 8, 10, 12, 14)
#define ODD(v) __builtin_shufflevector(v, v, 1, 3, 5, 7, 9, 11, 13, 15)
    const auto  bytes = std::size_t(here) * sizeof(float);
    const f32x8 scale = EVEN(largest) / most_of_x;
    sums_of_tiles(sum, lanes);
    const f32x8 sums = __builtin_convertvector(EVEN(lanes) + ODD(lanes), f32x8) * scale;
    std::memcpy(to.scales + tile, &scale, bytes);
    std::memcpy(to.sums + tile, &sums, bytes);
    if constexpr (PAIRED_PLACES) {
        sums_of_tiles(product, lanes);
        const i32x8 products = -(EVEN(lanes) + ODD(lanes));
        std::memcpy(to.products + tile, &products, bytes);
    }
#undef EVEN
#undef ODD
}

INLINE void round_rows_body(const float* x, const RoundedRows& to, std::int64_t first, std::int64_t last) {
    for (std::int64_t t = first; t < last; t += rounded_together) {
        const std::int64_t here = std::min<std::int64_t>(rounded_together, last - t);
        for (std::int64_t k = 0; k < to.cols; k += 32) {
            const float*       at   = x + t * to.cols + k;
            const std::int64_t tile = k / 32 * to.n + t;
            if (here == rounded_together) round_tiles(at, to.cols, to, tile, rounded_together); // of a number known
            else round_tiles(at, to.cols, to, tile, here);
        }
    }
}

// -- products of floats: 16 lanes of places, k ascending, then the lanes pairwise, then what is left of the row

// 16 places of a row of floats, wherever they come from
template <DType T, class Vector>
INLINE void load_places(const std::byte* p, Vector& out) {
    if constexpr (T == DType::F32) {
        LOAD16(out, p);
    } else {
        u16x16 h;
        LOAD16(h, p);
        if constexpr (T == DType::F16) FROM_HALVES(out, h);
        else out = (f32x16)(__builtin_convertvector(h, u32x16) << 16);
    }
}

// What is left of a row behind the last 16 places, one by one.
INLINE float finish(float sum, const float* w, const float* x, std::int64_t rest) {
    for (std::int64_t i = 0; i < rest; i++) sum = multiply_add<FUSED>(w[i], x[i], sum);
    return sum;
}

// out[i] = the lanes of sums[i], added as sum_lanes() does, 16 sums at a time.
INLINE void sum_lanes_of_16(const f32x16* v, float* out) {
#define EACH(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
    f32x16 a[8], b[4], c[2];
    for (int i = 0; i < 8; i++)
        a[i] = EACH(v[i], v[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               EACH(v[i], v[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    for (int i = 0; i < 4; i++)
        b[i] = EACH(a[i], a[i + 4], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
               EACH(a[i], a[i + 4], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    for (int i = 0; i < 2; i++)
        c[i] = EACH(b[i], b[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               EACH(b[i], b[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    const f32x16 d = EACH(c[0], c[1], 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
                     EACH(c[0], c[1], 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
    const f32x16 e =
        EACH(d, d, 0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15); // until here 0 2 1 3 of 0, 8, 4, 12
    STORE16(out, e);
#undef EACH
}

// One token: a row as it streams by. (Several at once collide in the first-level cache where a row is 4 KB.)
template <DType T>
INLINE void float_vectors(const MatmulTask& task) {
    constexpr std::size_t size = T == DType::F32 ? 4 : 2;
    const std::int64_t    cols = task.weight->cols, whole = cols / 16 * 16;
    const auto*           p = static_cast<const std::byte*>(task.weight->data) + std::size_t(task.first * cols) * size;
    for (std::int64_t row = task.first; row < task.last; row++, p += std::size_t(cols) * size) {
        f32x16 sum{};
        for (std::int64_t k = 0; k < whole; k += 16) {
            f32x16 x, w;
            LOAD16(x, task.x + k);
            load_places<T>(p + std::size_t(k) * size, w);
            __builtin_prefetch(p + std::size_t(k) * size + 4096);
            sum = FMA(w, x, sum);
        }
        float rest[16];
        dequantize_inline(T, p + std::size_t(whole) * size, rest, cols - whole);
        float lane[16];
        STORE16(lane, sum);
        const float total = finish(sum_lanes(lane), rest, task.x + whole, cols - whole);
        task.out[row]     = task.bias ? total + task.bias[row] : total;
    }
}

// Rows × tokens, as many sums as the registers hold (float_block is a multiple of the rows), and the places of a panel, of
// which a tile of x stays in the first-level cache.
struct FloatTile {
    std::int64_t rows, tokens, width;
};
constexpr FloatTile few = {FEW}, many = {MANY};

// The tokens go in tiles of about the same size.
INLINE std::int64_t tiles_of(std::int64_t n, const FloatTile& tile) { return (n + tile.tokens - 1) / tile.tokens; }
INLINE std::int64_t float_tiles_body(std::int64_t n) { return tiles_of(n, n > few_tokens ? many : few); }
INLINE std::int64_t tile_begin(std::int64_t tile, std::int64_t n) { return tile * n / float_tiles_body(n); }

// Tiles first .. last-1 of x [n × cols] in the order in which they are read: panel by panel, tile by tile, of each 16
// places all tokens of the tile. What is left of the rows is left out.
INLINE void pack_rows_body(const float* x, std::int64_t n, std::int64_t cols, float* out, std::int64_t first,
                           std::int64_t last) {
    const std::int64_t whole = cols / 16 * 16, width = n > few_tokens ? many.width : few.width;
    for (std::int64_t panel = 0; panel < whole; panel += width) {
        const std::int64_t length = std::min(width, whole - panel);
        for (std::int64_t tile = first; tile < last; tile++) {
            const std::int64_t begin = tile_begin(tile, n), end = tile_begin(tile + 1, n);
            float*             to = out + panel * n + begin * length;
            for (std::int64_t k = panel; k < panel + length; k += 16)
                for (std::int64_t t = begin; t < end; t++, to += 16) std::memcpy(to, x + t * cols + k, 64);
        }
    }
}

// As many places of a row as a vector has.
template <DType T, class Vector>
INLINE void load_lanes(const std::byte* p, Vector& out) {
    if constexpr (sizeof(Vector) == sizeof(f32x16) || T == DType::F32) {
        load_places<T>(p, out);
    } else {
        u16x8 h;
        LOAD16(h, p);
        if constexpr (T == DType::F16) out = __builtin_convertvector((f16x8)h, Vector);
        else out = (Vector)(__builtin_convertvector(h, u32x8) << 16);
    }
}

// R rows, from the block's `row` on, times a tile of N tokens, over `length` places, onto sums [N × float_block] that begin at
// zero with the row. What is `ahead` bytes later is asked for early, and of many tokens a part of the next tile's x. Narrow
// registers take one half of the lanes after the other.
template <DType T, FloatTile Tile, int N>
INLINE void float_tile(const std::byte* const* rows, const float* x, std::int64_t length, std::int64_t row,
                       std::size_t ahead, bool begin, f32x16* sums) {
    constexpr int          R     = int(Tile.rows);
    constexpr std::size_t  size  = T == DType::F32 ? 4 : 2;
    constexpr std::int64_t lanes = sizeof(Lanes) / sizeof(float), part = (16 * R * N + float_block - 1) / float_block;
    const float*           next = x + N * length + row / R * length / 16 * part;
    for (std::int64_t half = 0; half < 16; half += lanes) {
        const auto lanes_of = [&](int r, int t) { return reinterpret_cast<float*>(sums + t * float_block + r) + half; };
        Lanes      sum[R][N];
        for (int r = 0; r < R; r++)
            for (int t = 0; t < N; t++) {
                sum[r][t] = Lanes{};
                if (!begin) LOAD16(sum[r][t], lanes_of(r, t));
            }
        const float* at = x + half;
        for (std::int64_t k = half; k < length; k += 16, at += 16 * N, next += part) {
            if (half == 0 && Tile.width == many.width) __builtin_prefetch(next);
            Lanes w[R];
            for (int r = 0; r < R; r++) {
                load_lanes<T>(rows[r] + std::size_t(k) * size, w[r]);
                if (half == 0) __builtin_prefetch(rows[r] + std::size_t(k) * size + ahead);
            }
            for (int t = 0; t < N; t++) {
                Lanes a;
                LOAD16(a, at + 16 * t);
                for (int r = 0; r < R; r++) sum[r][t] = FMA(w[r], a, sum[r][t]);
            }
        }
        for (int r = 0; r < R; r++)
            for (int t = 0; t < N; t++) STORE16(lanes_of(r, t), sum[r][t]);
    }
}

template <DType T, FloatTile Tile, int N>
INLINE void float_tile_of(std::int64_t n, const std::byte* const* rows, const float* x, std::int64_t length,
                          std::int64_t row, std::size_t ahead, bool begin, f32x16* sums) {
    if (n >= N) return float_tile<T, Tile, N>(rows, x, length, row, ahead, begin, sums);
    if constexpr (N > 1) float_tile_of<T, Tile, N - 1>(n, rows, x, length, row, ahead, begin, sums);
}

// A panel of a block of rows, places k .. k + length - 1, at p, times tiles first .. last-1.
template <DType T, FloatTile Tile>
INLINE_PARTS void float_panel(const MatmulTask& task, const std::byte* p, std::size_t stride, std::int64_t rows,
                              std::int64_t k, std::int64_t length, std::int64_t first, std::int64_t last,
                              f32x16* sums) {
    const std::int64_t begin = tile_begin(first, task.n);
    for (std::int64_t tile = first; tile < last; tile++) {
        const std::int64_t t = tile_begin(tile, task.n), n = tile_begin(tile + 1, task.n) - t;
        for (std::int64_t row = 0; row < rows; row += Tile.rows) {
            const std::byte* at[Tile.rows]; // rows that are not there: the last one once more
            for (std::int64_t r = 0; r < Tile.rows; r++) at[r] = p + std::size_t(std::min(row + r, rows - 1)) * stride;
            float_tile_of<T, Tile, Tile.tokens>(n, at, task.packed + k * task.n + t * length, length, row,
                                                tile == 0 ? 9 * stride : 0, k == 0,
                                                sums + (t - begin) * float_block + row);
        }
    }
}

// The lanes of the sums, what is left of the rows, and the bias: 16 rows at a time.
INLINE void store_block(const MatmulTask& task, const f32x16* sums, std::int64_t row, std::int64_t rows,
                        std::int64_t first, std::int64_t last) {
    const TensorView&  w     = *task.weight;
    const std::int64_t whole = w.cols / 16 * 16, rest = w.cols - whole;
    for (std::int64_t t = first; t < last; t++, sums += float_block)
        for (std::int64_t i = 0; i < rows; i += 16) {
            const std::int64_t here = std::min<std::int64_t>(16, rows - i);
            float              total[16], left[16];
            sum_lanes_of_16(sums + i, total);
            for (std::int64_t r = 0; rest > 0 && r < here; r++) {
                const std::size_t at = std::size_t((row + i + r) * w.cols + whole); // only floats have a rest
                dequantize_inline(w.type, static_cast<const std::byte*>(w.data) + row_bytes(w.type, std::int64_t(at)),
                                  left, rest);
                total[r] = finish(total[r], left, task.x + t * w.cols + whole, rest);
            }
            for (std::int64_t r = 0; task.bias && r < here; r++) total[r] += task.bias[row + i + r];
            float* out = task.out + t * w.rows + row + i;
            if (here == 16) std::memcpy(out, total, sizeof total);
            else std::memcpy(out, total, std::size_t(here) * sizeof(float));
        }
}

// Blocks of rows whose panels stay in the caches while all tokens pass, which come from further away one by one.
template <FloatTile Tile>
INLINE void float_blocks(const MatmulTask& task) {
    const TensorView&      w       = *task.weight;
    constexpr std::int64_t at_once = float_tokens / Tile.tokens;
    const std::int64_t     tiles = tiles_of(task.n, Tile), whole = w.cols / 16 * 16;
    const std::size_t      stride = row_bytes(w.type, w.cols);
    auto*                  sums   = reinterpret_cast<f32x16*>(task.scratch);
    float*                 panel  = task.scratch + float_tokens * float_block * 16;
    for (std::int64_t row = task.first; row < task.last; row += float_block)
        for (std::int64_t first = 0; first < tiles; first += at_once) {
            const std::int64_t rows = std::min(float_block, task.last - row), last = std::min(tiles, first + at_once);
            std::int64_t       k = 0;
            do { // a row shorter than 16 has its rest only
                const std::int64_t length = std::min(Tile.width, whole - k);
                const std::byte*   p =
                    static_cast<const std::byte*>(w.data) + std::size_t(row) * stride + row_bytes(w.type, k);
                switch (w.type) {
                    case DType::F16:
                        float_panel<DType::F16, Tile>(task, p, stride, rows, k, length, first, last, sums);
                        break;
                    case DType::BF16:
                        float_panel<DType::BF16, Tile>(task, p, stride, rows, k, length, first, last, sums);
                        break;
                    default:
                        if (w.type == DType::F32) {
                            float_panel<DType::F32, Tile>(task, p, stride, rows, k, length, first, last, sums);
                            break;
                        }
                        for (std::int64_t r = 0; r < rows; r++)
                            widen_row<FUSED>(w.type, p + std::size_t(r) * stride, panel + r * Tile.width, length);
                        float_panel<DType::F32, Tile>(task, reinterpret_cast<const std::byte*>(panel),
                                                      Tile.width * sizeof(float), rows, k, length, first, last, sums);
                }
                k += Tile.width;
            } while (k < whole);
            store_block(task, sums, row, rows, tile_begin(first, task.n), tile_begin(last, task.n));
        }
}

INLINE void float_matmul(const MatmulTask& task) {
    const DType type = task.weight->type;
    if (task.n == 1 && type == DType::F16) return float_vectors<DType::F16>(task);
    if (task.n == 1 && type == DType::BF16) return float_vectors<DType::BF16>(task);
    if (task.n == 1 && type == DType::F32) return float_vectors<DType::F32>(task);
    if (task.n > few_tokens) float_blocks<many>(task);
    else float_blocks<few>(task);
}
