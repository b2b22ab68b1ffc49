// Formats: how each quantised type is unpacked to int16 tiles and scales, from repacked weights or from a row in the file's order.

#define LOW_16(v) __builtin_convertvector((u32x16)(v) & 0xffff, u16x16)
#define HIGH_16(v) __builtin_convertvector((u32x16)(v) >> 16, u16x16)

// -- unpacking: w[2j] holds columns 4j and 4j + 2 of a tile, w[2j + 1] columns 4j + 1 and 4j + 3, because that is how four bytes
// split into even and odd bytes. Nibbles are shifted as int16, 32 lanes: 16 rows × 2.

using Tile = i16x32*;

// q: 16 bytes of each row, a nibble for each of 32 columns
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
INLINE void nibbles_at(const i32x16* q, int shift, Tile w) {
    for (int j = 0; j < 8; j++) {
        const auto v = (u16x32)q[j];
        w[2 * j]     = (i16x32)(v >> shift & 15);
        w[2 * j + 1] = (i16x32)(v >> (8 + shift) & 15);
    }
}

// q: 32 signed bytes of each row, in vectors of 4 columns
INLINE void signed_bytes(const i32x16* q, Tile w) {
    for (int j = 0; j < 8; j++) {
        w[2 * j]     = (i16x32)q[j] << 8 >> 8;
        w[2 * j + 1] = (i16x32)q[j] >> 8;
    }
}

// The fifth bits of Q5_0 and Q5_1: bit k of h belongs to column k. First bits k and k + 2, which share 32 bits of the tile, are put 16
// bits apart, so that one shift brings both to their places.
INLINE void fifth_bits(const i32x16& h, Tile w) {
    const auto   all     = (u32x16)h;
    const u16x32 half[2] = {(u16x32)((all & 0xffff) | (all << 14 & 0xffff0000)),
                            (u16x32)(all >> 16 | (all >> 2 & 0xffff0000))};
    UNROLLED for (int j = 0; j < 8; j++) UNROLLED for (int i = 0; i < 2; i++) {
        const int    at = j % 4 * 4 + i; // of the column in its half
        const u16x32 v  = at < 4 ? half[j / 4] << (4 - at) : half[j / 4] >> (at - 4);
        w[2 * j + i] |= (i16x32)(v & 0x10);
    }
}

// Software prefetching of the cache lines from p on, 8 KB ahead of their use: with the processor's own prefetching alone only half
// of the memory's bandwidth is reached.
constexpr std::int64_t prefetch_ahead = 8192;
INLINE void            prefetch_lines(const std::byte* p, std::int64_t bytes, Prefetch into) {
    if (into == Prefetch::l2)
        for (std::int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
    else
        for (std::int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i);
}

// Each format: `items` and `bytes` of a block, and its pieces; header() for the repacked block at p, then tile() for each of its
// tiles, in order. A weight is scale · w, or scale · w - second. With two_scales there is an integer scale for each half of a tile,
// which is multiplied into w; the sum over a half fits 32 bits, that over both nearly always does (add_halves).
//
// Formats that the GEMV reads in the file's order also have, for 16 tiles of one row at p: row_sums(), the dot products of the
// tiles (of their halves with two_scales) with x in the order of split_activations(); row_values(), these as floats; and
// row_scales(), the scales of the tiles, unless all tiles of a block have the same (two_scales). Weights may be unsigned there
// (w + 128, w + 32); zeros() makes tiles of zeros, whose row_sums() are subtracted again.

// n vectors of 4 bytes of each row, from byte `offset` of the block.
INLINE void load(const std::byte* p, int offset, int n, i32x16* q) {
    __builtin_memcpy(q, p + 16 * offset, std::size_t(n) * sizeof(i32x16));
}
INLINE void load_fp16(const std::byte* p, int offset, f32x16& out) {
    u16x16 h;
    LOAD16(h, p + 16 * offset);
    FROM_FP16(out, h);
}
INLINE void gather_fp16(const std::byte* p, std::size_t stride, u16x16& h) {
    for (std::size_t r = 0; r < 16; r++) {
        std::uint16_t one;
        __builtin_memcpy(&one, p + r * stride, 2);
        h[r] = one;
    }
}
// 32 bytes from each of two addresses
INLINE void load_two(const std::byte* a, const std::byte* b, u8x64& out) {
    __builtin_memcpy(&out, a, 32);
    __builtin_memcpy(reinterpret_cast<std::byte*>(&out) + 32, b, 32);
}

// Reduces each group of four lanes of v[i] to lane i of that group.
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
// Reduces lanes 0-7 of v[i], i < 8, to lane 2i and the others to lane 2i + 1: sums, or maxima.
#define FIRST(x, y) __builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
#define SECOND(x, y) __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)
#define SORTED(v) __builtin_shufflevector(v, v, 0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15)
INLINE void sums_of_tiles(const i32x16* v, i32x16& dot) {
    i32x16 a[4];
    UNROLLED for (int i = 0; i < 4; i++) a[i] = FIRST(v[i], v[i + 4]) + SECOND(v[i], v[i + 4]);
    sums_of_fours(a, dot);
    dot = SORTED(dot);
}
INLINE void largest_of_tiles(const i32x16* v, i32x16& out) {
    i32x16 a[4];
    UNROLLED for (int i = 0; i < 4; i++) a[i] =
        __builtin_elementwise_max(FIRST(v[i], v[i + 4]), SECOND(v[i], v[i + 4]));
    largest_of_fours(a, out);
    out = SORTED(out);
}
#undef FIRST
#undef SECOND
#undef SORTED

// 16 rows × 32 columns
struct UnpackedTile {
    i16x32 w[16];
    f32x16 scale, second;
};

// value = the sum of both halves, rounded once, even where it does not fit 32 bits (when the scales and all elements of a tile
// are about as large as they can be).
INLINE void add_halves(const i32x16* half, f32x16& value) {
    const i32x16 a = half[0], b = half[1], sum = a + b, wrong = (a ^ sum) & (b ^ sum);
    value = __builtin_convertvector(sum, f32x16);
    if (ANY_NEGATIVE(wrong))
        [[unlikely]] { // half the sum; its lowest bit is set if a bit was lost, so that it is rounded correctly
        const i32x16 by_2 = ((a >> 1) + (b >> 1) + (a & b & 1)) | ((a ^ b) & 1);
        value             = wrong < 0 ? 2 * __builtin_convertvector(by_2, f32x16) : value;
    }
}

// Blocks of 32 columns with one scale.
template <int Bytes, bool HasMin = false>
struct FormatOf32 {
    static constexpr int  items = 32, bytes = Bytes;
    static constexpr bool has_min = HasMin, two_scales = false;

    INLINE void header(const std::byte*) {}
};

// d and the minimum of Q4_1 and Q5_1
INLINE void scale_and_min(const std::byte* p, UnpackedTile& to) {
    load_fp16(p, 0, to.scale);
    load_fp16(p, 2, to.second);
    to.second = -to.second;
}

struct FormatQ8_0 : FormatOf32<34> {
    static constexpr Pieces pieces = {2, 2, {{{0, 2}}}};

    INLINE void tile(const std::byte* p, int, UnpackedTile& to) {
        i32x16 q[8];
        load(p, 2, 8, q);
        signed_bytes(q, to.w);
        load_fp16(p, 0, to.scale);
    }

    INLINE void row_sums(const std::byte* p, const std::byte* x, i32x16* dot) {
        i32x16 v[8];
        UNROLLED for (int i = 0; i < 8; i++, p += 2 * bytes, x += 128) two_tiles(p + 2, x, v[i]);
        sums_of_tiles(v, *dot);
    }
    // Tile 2i goes to lanes 0-7, tile 2i + 1 to the others.
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
            i16x32 v_x;
            LOAD16(w, p + t * bytes);
            LOAD16(v_x, x + 64 * t);
            DOT(sum[t], __builtin_convertvector(w, i16x32), v_x);
        }
        v = __builtin_shufflevector(sum[0], sum[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
            __builtin_shufflevector(sum[0], sum[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
#endif
    }
    INLINE void row_values(const std::byte*, const i32x16* dot, f32x16& value) {
        value = __builtin_convertvector(*dot, f32x16);
    }
    INLINE void row_scales(const std::byte* p, f32x16& scale) {
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
            gather_fp16(p, bytes, h);
        }
        FROM_FP16(scale, h);
    }
    // 16 tiles whose weights are zero
    INLINE void zeros(std::byte* p) { std::memset(p, 0, 16 * bytes); }
};

struct FormatQ4_0 : FormatOf32<18> {
    static constexpr Pieces pieces = {2, 1, {{{0, 2}}}};

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
        load_fp16(p, 0, to.scale);
    }
};

struct FormatQ4_1 : FormatOf32<20, true> {
    static constexpr Pieces pieces = {4, 1, {{{0, 2}, {2, 2}}}};

    INLINE void tile(const std::byte* p, int, UnpackedTile& to) {
        i32x16 q[4];
        load(p, 4, 4, q);
        nibbles(q, to.w);
        scale_and_min(p, to);
    }
};

struct FormatQ5_0 : FormatOf32<22> {
    static constexpr Pieces pieces = {6, 1, {{{0, 2}, {2, 4}}}};

    INLINE void tile(const std::byte* p, int, UnpackedTile& to) {
        i32x16 q[4], fifth;
        load(p, 2, 1, &fifth);
        load(p, 6, 4, q);
        nibbles(q, to.w);
        fifth_bits(fifth, to.w);
        for (int i = 0; i < 16; i++) to.w[i] -= 16;
        load_fp16(p, 0, to.scale);
    }
};

struct FormatQ5_1 : FormatOf32<24, true> {
    static constexpr Pieces pieces = {8, 1, {{{0, 2}, {2, 2}, {4, 4}}}};

    INLINE void tile(const std::byte* p, int, UnpackedTile& to) {
        i32x16 q[4], fifth;
        load(p, 4, 1, &fifth);
        load(p, 8, 4, q);
        nibbles(q, to.w);
        fifth_bits(fifth, to.w);
        scale_and_min(p, to);
    }
};

// Common to Q4_K and Q5_K: d, dmin and 12 bytes with 8 scales and 8 minima of 6 bits.
struct ScalesK {
    i32x16 s[3];
    f32x16 d, dmin;

    INLINE void read(const std::byte* p) {
        i32x16 both;
        load(p, 0, 1, &both);
        FROM_FP16(d, LOW_16(both));
        FROM_FP16(dmin, HIGH_16(both));
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

struct FormatQ4_K {
    static constexpr int    items = 256, bytes = 144;
    static constexpr bool   has_min = true, two_scales = false;
    static constexpr Pieces pieces = {0, 9};
    ScalesK                 scales;

    INLINE void header(const std::byte* p) { scales.read(p); }
    INLINE void tile(const std::byte* p, int j, UnpackedTile& to) {
        i32x16 q[8];
        load(p, 16 + j / 2 * 32, 8, q); // two tiles share their bytes
        nibbles_at(q, j % 2 * 4, to.w);
        scales.at(j, to.scale, to.second);
    }

    // GEMV: the dot products of tiles j and j + 1 with one token. Nibbles are not shifted down, so that they count 256 or 16 times;
    // a sum of 16 columns still fits. Only the topmost is shifted, as it would be a sign. The loop is not unrolled, as in
    // dot_tiles().
    template <Prefetch Into>
    INLINE void two_sums(const std::byte* p, int j, const std::int16_t* x, i32x16* dot) {
        i32x16 a{}, b{}, c{}, d{};
#pragma clang loop unroll(disable)
        for (int i = 0; i < 8; i++) {
            u16x32           v;
            const std::byte* q = p + 16 * (16 + j / 2 * 32) + 64 * i;
            LOAD16(v, q);
            prefetch_lines(q + prefetch_ahead, 64, Into);
            DOT(a, (i16x32)(v & 0x000f), PAIR(x + 4 * i));
            DOT(b, (i16x32)(v & 0x0f00), PAIR(x + 4 * i + 2));
            DOT(c, (i16x32)(v & 0x00f0), PAIR(x + 4 * i + 32));
            DOT(d, (i16x32)(v >> 12), PAIR(x + 4 * i + 34));
        }
        dot[0] = a + (b >> 8);
        dot[1] = (c >> 4) + d;
    }
    // The dot products of tile j with N neighbouring tokens, multiplied as it is unpacked. The loop is not unrolled, as in dot_tiles().
    template <int N>
    INLINE void few_sums(const std::byte* p, int j, const std::int16_t* x, i32x16* dot) {
        const int shift    = j % 2 * 4;
        i32x16    chain[N] = {};
#pragma clang loop unroll(disable)
        for (int i = 0; i < 8; i++) {
            u16x32 v;
            LOAD16(v, p + 16 * (16 + j / 2 * 32) + 64 * i);
            const auto even = (i16x32)(v >> shift & 15), odd = (i16x32)(v >> (8 + shift) & 15);
            for (int t = 0; t < N; t++) DOT(chain[t], even, PAIR(x + 32 * t + 4 * i));
            for (int t = 0; t < N; t++) DOT(chain[t], odd, PAIR(x + 32 * t + 4 * i + 2));
        }
        for (int t = 0; t < N; t++) dot[t] = chain[t];
    }
    INLINE void tile_scales(int j, UnpackedTile& to) { scales.at(j, to.scale, to.second); }
};

struct FormatQ5_K {
    static constexpr int    items = 256, bytes = 176;
    static constexpr bool   has_min = true, two_scales = false;
    static constexpr Pieces pieces = {0, 11};
    ScalesK                 scales;

    INLINE void header(const std::byte* p) { scales.read(p); }
    INLINE void tile(const std::byte* p, int j, UnpackedTile& to) {
        i32x16 q[8], high[8];
        load(p, 48 + j / 2 * 32, 8, q);
        load(p, 16, 8, high);
        nibbles_at(q, j % 2 * 4, to.w);
        UNROLLED for (int i = 0; i < 8; i++) {
            const auto h = (u16x32)high[i] >> j;
            to.w[2 * i] |= (i16x32)(h << 4 & 16);
            to.w[2 * i + 1] |= (i16x32)(h >> 4 & 16);
        }
        scales.at(j, to.scale, to.second);
    }
};

// For each 16 columns a scale of one byte, times the block's scale. w · byte fits 14 bits.
struct FormatQ6_K {
    static constexpr int    items = 256, bytes = 210, scale_at = 208;
    static constexpr bool   has_min = false, two_scales = true;
    static constexpr Pieces pieces{0, 13, {{{208, 2}}}};
    f32x16                  d;

    INLINE void header(const std::byte* p) { load_fp16(p, 208, d); }
    INLINE void tile(const std::byte* p, int j, UnpackedTile& to) {
        const int half = j / 4, quarter = j % 4;
        i32x16    low[8], high[8], scales;
        load(p, half * 64 + quarter % 2 * 32, 8, low);
        load(p, 128 + half * 32, 8, high);
        load(p, 192 + j / 2 * 4, 1, &scales); // two of the four are this tile's
        nibbles_at(low, quarter / 2 * 4, to.w);
        UNROLLED for (int i = 0; i < 8; i++) {
            const auto h = (u16x32)high[i] >> (2 * quarter);
            to.w[2 * i] |= (i16x32)(h << 4 & 0x30);
            to.w[2 * i + 1] |= (i16x32)(h >> 4 & 0x30);
        }
        UNROLLED for (int half = 0; half < 2; half++) {
            const i32x16 byte = scales << (24 - (j % 2 * 2 + half) * 8) >> 24;
            const auto   both = (i16x32)((byte & 0xffff) | byte << 16);
            for (int i = 8 * half; i < 8 * half + 8; i++) to.w[i] = (to.w[i] - 32) * both;
        }
        to.scale = d;
    }

    // Of two blocks: lane 4k + i holds the sum over the 16 columns of scale k + {0, 8, 4, 12}[i]. Bytes are brought together before
    // they are unpacked, which takes fewer shuffles: `part` 0 and 1 hold the first and the last 8 of all 16 columns
    // (split_activations), so that the sums of both parts share their lanes. In the second half of the lanes the high bits are two bits further up.
    INLINE void row_sums(const std::byte* p, const std::byte* x, i32x16* dot) {
        for (int block = 0; block < 2; block++, p += bytes, x += 512, dot++) {
            u64x8 q[2], h;
            u8x64 w[2][2]; // [scales 0-3 and 8-11, or 4-7 and 12-15][part]
            LOAD16(q, p);
            LOAD16(h, p + 128);
            const u64x8 low[2]  = {__builtin_shufflevector(q[0], q[1], 0, 8, 2, 10, 4, 12, 6, 14),
                                   __builtin_shufflevector(q[0], q[1], 1, 9, 3, 11, 5, 13, 7, 15)},
                        high[2] = {__builtin_shufflevector(h, h, 0, 4, 2, 6, 0, 4, 2, 6),
                                   __builtin_shufflevector(h, h, 1, 5, 3, 7, 1, 5, 3, 7)};
            for (int part = 0; part < 2; part++) {
                w[0][part] = ((u8x64)low[part] & 15) | (u8x64)TWO_BITS(high[part], 0);
                w[1][part] = ((u8x64)((u16x32)low[part] >> 4) & 15) | (u8x64)TWO_BITS(high[part], 4);
            }
            i32x16 sum[2] = {};
            for (int i = 0; i < 2; i++) {
                u8x64 first[2], second[2]; // of x: low and high bytes, or even and odd columns
                for (int part = 0; part < 2; part++) {
                    LOAD16(first[part], x + 256 * i + 128 * part);
                    LOAD16(second[part], x + 256 * i + 128 * part + 64);
                }
                if constexpr (SPLIT_BYTES) {
                    for (int part = 0; part < 2; part++) BYTE_DOT(sum[i], w[i][part], second[part]);
                    sum[i] <<= 8;
                    // zeros() is subtracted, so w may stay 32 too large
                    for (int part = 0; part < 2; part++) BYTE_DOT(sum[i], first[part], w[i][part]);
                } else {
                    for (int part = 0; part < 2; part++) {
                        DOT(sum[i], (i16x32)((u16x32)w[i][part] & 255), (i16x32)first[part]);
                        DOT(sum[i], (i16x32)((u16x32)w[i][part] >> 8), (i16x32)second[part]);
                    }
                }
            }
            *dot = __builtin_shufflevector(sum[0], sum[1], 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
                   __builtin_shufflevector(sum[0], sum[1], 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
        }
    }
    INLINE void row_values(const std::byte* p, const i32x16* dot, f32x16& value) {
        i32x16 v[2];
        for (int block = 0; block < 2; block++, p += bytes) {
            i8x16 s;
            LOAD16(s, p + 192);
            s        = __builtin_shufflevector(s, s, 0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15);
            v[block] = dot[block] * __builtin_convertvector(s, i32x16);
        }
        const i32x16 half[2] = {
            __builtin_shufflevector(v[0], v[1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
            __builtin_shufflevector(v[0], v[1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)};
        f32x16 tiles; // 0, 4, 2, 6, 1, 5, 3, 7 of each block
        add_halves(half, tiles);
        value = __builtin_shufflevector(tiles, tiles, 0, 4, 2, 6, 1, 5, 3, 7, 8, 12, 10, 14, 9, 13, 11, 15);
    }
    INLINE void zeros(std::byte* p) {
        for (int block = 0; block < 2; block++, p += bytes) {
            std::memset(p, 0, 128);
            std::memset(p + 128, 0xaa, 64);
        }
    }
};

// -- types whose elements are numbers of a table: unpacked to signed bytes first

// q: 16 bytes of each row, a nibble for each of 32 columns: an index of a table of 16 signed bytes
INLINE void nibbles_of(const i32x16* q, const std::int8_t* table, Tile w) {
    i32x16 bytes[8];
    for (int j = 0; j < 4; j++) {
        LOOK_UP(bytes[j], table, q[j] & 0x0f0f0f0f);
        LOOK_UP(bytes[j + 4], table, (i32x16)((u32x16)q[j] >> 4) & 0x0f0f0f0f);
    }
    signed_bytes(bytes, w);
}

struct FormatIQ4_NL : FormatOf32<18> {
    static constexpr Pieces pieces = {2, 1, {{{0, 2}}}};

    INLINE void tile(const std::byte* p, int, UnpackedTile& to) {
        i32x16 q[4];
        load(p, 2, 4, q);
        nibbles_of(q, iq4_bytes.data(), to.w);
        load_fp16(p, 0, to.scale);
    }
};

struct FormatIQ4_XS {
    static constexpr int    items = 256, bytes = 136;
    static constexpr bool   has_min = false, two_scales = false;
    static constexpr Pieces pieces = {8, 8, {{{0, 4}, {4, 4}}}};
    i32x16                  both, low; // d and the high bits of the scales; their low bits

    INLINE void header(const std::byte* p) {
        load(p, 0, 1, &both);
        load(p, 4, 1, &low);
    }
    INLINE void tile(const std::byte* p, int j, UnpackedTile& to) {
        i32x16 q[4];
        f32x16 d;
        load(p, 8 + 16 * j, 4, q);
        nibbles_of(q, iq4_bytes.data(), to.w);
        const i32x16 s = (low >> (4 * j) & 15) | (both >> (16 + 2 * j) & 3) << 4;
        FROM_FP16(d, LOW_16(both));
        to.scale = d * __builtin_convertvector(s - 32, f32x16);
    }
};

struct FormatMXFP4 : FormatOf32<17> {
    static constexpr Pieces pieces = {1, 1, {{{0, 1}}}};

    INLINE void tile(const std::byte* p, int, UnpackedTile& to) {
        i32x16 q[4];
        u8x16  exponents;
        load(p, 1, 4, q);
        nibbles_of(q, e2m1_bytes.data(), to.w);
        LOAD16(exponents, p);
        const i32x16 e     = __builtin_convertvector(exponents, i32x16); // see half_e8m0()
        const i32x16 large = (e - 1) << 23, small = (e + 1) << 21;       // of 0 and 1
        to.scale = (f32x16)(e < 2 ? small : large);
    }
};

// q = the entries of a table of 4 bytes at the indices, one of each row
INLINE void gather(const std::uint32_t* table, const i32x16& index, i32x16& q) {
    UNROLLED for (int r = 0; r < 16; r++) q[r] = int(table[index[r]]);
}

// Negates the bytes of q, the vectors of 4 of 8 columns, where `signs` has a bit: 7 bits, the eighth makes their number even.
INLINE void negate(const i32x16& seven, i32x16* q) {
    i32x16 parity = seven ^ seven >> 4;
    parity ^= parity >> 2;
    parity ^= parity >> 1;
    const i32x16 signs = seven | (parity & 1) << 7;
    for (int half = 0; half < 2; half++) {
        i32x16 mask;
        gather(sign_masks.data(), signs >> (4 * half) & 15, mask);
        q[half] = (i32x16)(((i8x64)q[half] ^ (i8x64)mask) - (i8x64)mask);
    }
}

struct FormatIQ3_XXS {
    static constexpr int    items = 256, bytes = 98;
    static constexpr bool   has_min = false, two_scales = false;
    static constexpr Pieces pieces = {2, 6, {{{0, 2}}}};
    f32x16                  d;

    INLINE void header(const std::byte* p) { load_fp16(p, 0, d); }
    INLINE void tile(const std::byte* p, int j, UnpackedTile& to) {
        i32x16 points[2], rest, q[8];
        load(p, 2 + 8 * j, 2, points);
        load(p, 66 + 4 * j, 1, &rest);
        UNROLLED for (int i = 0; i < 8; i++) gather(iq3_xxs_table.data(), points[i / 4] >> (i % 4 * 8) & 255, q[i]);
        UNROLLED for (int i = 0; i < 4; i++) negate(rest >> (7 * i) & 127, q + 2 * i);
        signed_bytes(q, to.w);
        to.scale = d * (__builtin_convertvector(rest >> 28 & 15, f32x16) + 0.5f) * 0.5f;
    }
};

// For each 16 columns a scale (2 · s + 1) / 8, s of 4 bits; w · (2 · s + 1) fits 12 bits.
struct FormatIQ2_XS {
    static constexpr int    items = 256, bytes = 74;
    static constexpr bool   has_min = false, two_scales = true;
    static constexpr Pieces pieces = {2, 4, {{{0, 2}, {66, 4}, {70, 4}}}};
    f32x16                  d;

    INLINE void header(const std::byte* p) { load_fp16(p, 0, d); }
    INLINE void tile(const std::byte* p, int j, UnpackedTile& to) {
        i32x16 points[2], scales, q[8];
        load(p, 2 + 8 * j, 2, points);
        load(p, 66 + j / 4 * 4, 1, &scales);
        UNROLLED for (int i = 0; i < 4; i++) {
            const i32x16 both = (i32x16)((u32x16)points[i / 2] >> (i % 2 * 16));
            gather(iq2_xs_table.data(), (both & 511) * 2, q[2 * i]);
            gather(iq2_xs_table.data() + 1, (both & 511) * 2, q[2 * i + 1]);
            negate(both >> 9 & 127, q + 2 * i);
        }
        signed_bytes(q, to.w);
        for (int half = 0; half < 2; half++) {
            const i32x16 s    = (scales >> (j % 4 * 8 + 4 * half) & 15) * 2 + 1;
            const auto   both = (i16x32)(s | s << 16);
            for (int i = 8 * half; i < 8 * half + 8; i++) to.w[i] *= both;
        }
        to.scale = d * 0.125f;
    }
};
