// The products of quire.cpu_kernels, included once for each instruction set, in a namespace and under a target of its own.
// The includer defines
//   DOT(sum, w, x)  sum[lane] += w[2·lane] · x[0] + w[2·lane + 1] · x[1], x: two int16
//   FMA(a, b, c)    a · b + c, fused where the target can
//   FROM_HALVES(out, h)  out = 16 half floats, given as u16x16, as floats
//
// Weights are read as they stand in the file. 16 neighbouring rows are turned so that a vector holds one place (or two) of
// all 16: a tile is 16 rows × 32 places of int16, or 16 rows × 16 places of floats, in 16 registers. Every token then
// passes over the tile; the cost of unpacking is shared by all of them, and sums never cross lanes.

// -- turning

#define LOW_HALF(v) __builtin_convertvector((u32x16)(v) & 0xffff, u16x16)
#define HIGH_HALF(v) __builtin_convertvector((u32x16)(v) >> 16, u16x16)

// d[j], lane r: the j-th 4 bytes at p + r · stride
INLINE void turn(const std::byte* p, std::size_t stride, i32x16* d) {
    i32x16 v[4];
    for (std::size_t i = 0; i < 4; i++) { // 128-bit lane l holds row 4l + i
        i32x4 a, b, c, e;
        LOAD16(a, p + i * stride);
        LOAD16(b, p + (i + 4) * stride);
        LOAD16(c, p + (i + 8) * stride);
        LOAD16(e, p + (i + 12) * stride);
        const i32x8 low  = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7),
                    high = __builtin_shufflevector(c, e, 0, 1, 2, 3, 4, 5, 6, 7);
        v[i]             = __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    }
#define LOW(x, y) __builtin_shufflevector(x, y, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
#define HIGH(x, y) __builtin_shufflevector(x, y, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31)
#define LOW2(x, y) __builtin_shufflevector(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define HIGH2(x, y) __builtin_shufflevector(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
    const i32x16 ab_low = LOW(v[0], v[1]), ce_low = LOW(v[2], v[3]), ab_high = HIGH(v[0], v[1]),
                 ce_high = HIGH(v[2], v[3]);
    d[0]                 = LOW2(ab_low, ce_low);
    d[1]                 = HIGH2(ab_low, ce_low);
    d[2]                 = LOW2(ab_high, ce_high);
    d[3]                 = HIGH2(ab_high, ce_high);
#undef LOW
#undef HIGH
#undef LOW2
#undef HIGH2
}

INLINE void turn32(const std::byte* p, std::size_t stride, i32x16* d) {
    turn(p, stride, d);
    turn(p + 16, stride, d + 4);
}

// Half floats of 16 rows, as they come in blocks: out[i][r] at p + r · stride + i · step
template <int Most>
INLINE void halves(const std::byte* p, std::size_t stride, std::size_t step, int n, u16x16* out) {
    for (std::size_t r = 0; r < 16; r++, p += stride)
        if (n == Most)
            for (std::size_t i = 0; i < Most; i++) __builtin_memcpy((std::uint16_t*)&out[i] + r, p + i * step, 2);
        else
            for (std::size_t i = 0; i < std::size_t(n); i++)
                __builtin_memcpy((std::uint16_t*)&out[i] + r, p + i * step, 2);
}

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

// Each format: `items` and `bytes` of a block; header() for up to 8 tiles whose first block is at p; then tile() for each.
// x = scale · w - min. Blocks of 32 are tiles, 8 of them share a header; blocks of 256 hold 8.

struct OfQ8_0 {
    static constexpr int  items = 32, bytes = 34;
    static constexpr bool has_min = false, two_scales = false;
    u16x16                d[8];

    INLINE void header(const std::byte* p, std::size_t stride, int n) { halves<8>(p, stride, bytes, n, d); }
    INLINE void tile(const std::byte* p, std::size_t stride, int j, Tile w, f32x16& scale, f32x16&) {
        i32x16 q[8];
        turn32(p + j * bytes + 2, stride, q);
        for (int i = 0; i < 8; i++) {
            w[2 * i]     = (i16x32)q[i] << 8 >> 8;
            w[2 * i + 1] = (i16x32)q[i] >> 8;
        }
        FROM_HALVES(scale, d[j]);
    }
};

struct OfQ4_0 {
    static constexpr int  items = 32, bytes = 18;
    static constexpr bool has_min = false, two_scales = false;
    u16x16                d[8];

    INLINE void header(const std::byte* p, std::size_t stride, int n) { halves<8>(p, stride, bytes, n, d); }
    INLINE void tile(const std::byte* p, std::size_t stride, int j, Tile w, f32x16& scale, f32x16&) {
        i32x16 q[4];
        turn(p + j * bytes + 2, stride, q);
        for (int i = 0; i < 4; i++) { // q - 8, as a nibble with a sign
            const auto v = (i16x32)(q[i] ^ int(0x88888888));
            w[2 * i]     = v << 12 >> 12;
            w[2 * i + 1] = v << 4 >> 12;
            w[2 * i + 8] = v << 8 >> 12;
            w[2 * i + 9] = v >> 12;
        }
        FROM_HALVES(scale, d[j]);
    }
};

struct OfQ4_1 {
    static constexpr int  items = 32, bytes = 20;
    static constexpr bool has_min = true, two_scales = false;
    u16x16                d[8], m[8];

    INLINE void header(const std::byte* p, std::size_t stride, int n) {
        halves<8>(p, stride, bytes, n, d);
        halves<8>(p + 2, stride, bytes, n, m);
    }
    INLINE void tile(const std::byte* p, std::size_t stride, int j, Tile w, f32x16& scale, f32x16& min) {
        i32x16 q[4];
        turn(p + j * bytes + 4, stride, q);
        nibbles(q, w);
        FROM_HALVES(scale, d[j]);
        FROM_HALVES(min, m[j]);
        min = -min;
    }
};

struct OfQ5_0 {
    static constexpr int  items = 32, bytes = 22;
    static constexpr bool has_min = false, two_scales = false;
    u16x16                d[8];

    INLINE void header(const std::byte* p, std::size_t stride, int n) { halves<8>(p, stride, bytes, n, d); }
    INLINE void tile(const std::byte* p, std::size_t stride, int j, Tile w, f32x16& scale, f32x16&) {
        i32x16 q[4], first[4]; // d, fifth bits, nibbles
        p += j * bytes;
        turn(p + 6, stride, q);
        turn(p + 2, stride, first);
        nibbles(q, w);
        fifth_bits(first[0], w);
        for (int i = 0; i < 16; i++) w[i] -= 16;
        FROM_HALVES(scale, d[j]);
    }
};

struct OfQ5_1 {
    static constexpr int  items = 32, bytes = 24;
    static constexpr bool has_min = true, two_scales = false;
    u16x16                d[8], m[8];

    INLINE void header(const std::byte* p, std::size_t stride, int n) {
        halves<8>(p, stride, bytes, n, d);
        halves<8>(p + 2, stride, bytes, n, m);
    }
    INLINE void tile(const std::byte* p, std::size_t stride, int j, Tile w, f32x16& scale, f32x16& min) {
        i32x16 q[4], first[4]; // d and m, fifth bits, nibbles
        p += j * bytes;
        turn(p + 8, stride, q);
        turn(p + 4, stride, first);
        nibbles(q, w);
        fifth_bits(first[0], w);
        FROM_HALVES(scale, d[j]);
        FROM_HALVES(min, m[j]);
        min = -min;
    }
};

// What Q4_K and Q5_K have in common: d, dmin and 12 bytes with 8 scales and 8 minima of 6 bits.
struct ScalesK {
    i32x16 s[3];
    f32x16 d, dmin;

    INLINE void read(const std::byte* p, std::size_t stride) {
        i32x16 h[4];
        turn(p, stride, h);
        FROM_HALVES(d, LOW_HALF(h[0]));
        FROM_HALVES(dmin, HIGH_HALF(h[0]));
        for (int i = 0; i < 3; i++) s[i] = h[i + 1];
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
    static constexpr int  items = 256, bytes = 144;
    static constexpr bool has_min = true, two_scales = false;
    ScalesK               scales;
    i32x16                q[8];

    INLINE void header(const std::byte* p, std::size_t stride, int) { scales.read(p, stride); }
    INLINE void tile(const std::byte* p, std::size_t stride, int j, Tile w, f32x16& scale, f32x16& min) {
        if (j % 2 == 0) turn32(p + 16 + j / 2 * 32, stride, q); // two tiles share their bytes
        half_bytes(q, j % 2 * 4, w);
        scales.at(j, scale, min);
    }
};

struct OfQ5_K {
    static constexpr int  items = 256, bytes = 176;
    static constexpr bool has_min = true, two_scales = false;
    ScalesK               scales;
    i32x16                q[8], high[8];

    INLINE void header(const std::byte* p, std::size_t stride, int) {
        scales.read(p, stride);
        turn32(p + 16, stride, high);
    }
    INLINE void tile(const std::byte* p, std::size_t stride, int j, Tile w, f32x16& scale, f32x16& min) {
        if (j % 2 == 0) turn32(p + 48 + j / 2 * 32, stride, q);
        half_bytes(q, j % 2 * 4, w);
        for (int i = 0; i < 8; i++) {
            const auto h = (u16x32)high[i] >> j;
            w[2 * i] |= (i16x32)(h << 4 & 16);
            w[2 * i + 1] |= (i16x32)(h >> 4 & 16);
        }
        scales.at(j, scale, min);
    }
};

struct OfQ6_K { // a scale for each 16 places
    static constexpr int  items = 256, bytes = 210;
    static constexpr bool has_min = false, two_scales = true;
    u16x16                d[1];
    i32x16                s[4], low[2][8], high[8];

    INLINE void header(const std::byte* p, std::size_t stride, int) {
        halves<1>(p + 208, stride, 0, 1, d);
        turn(p + 192, stride, s);
    }
    INLINE void tile(const std::byte* p, std::size_t stride, int j, Tile w, f32x16& scale, f32x16& second) {
        const int half = j / 4, quarter = j % 4;
        if (quarter == 0) turn32(p + 128 + half * 32, stride, high);
        if (quarter < 2) turn32(p + half * 64 + quarter * 32, stride, low[quarter]);
        half_bytes(low[quarter % 2], quarter / 2 * 4, w);
        for (int i = 0; i < 8; i++) {
            const auto h = (u16x32)high[i] >> (2 * quarter);
            w[2 * i] |= (i16x32)(h << 4 & 0x30);
            w[2 * i + 1] |= (i16x32)(h >> 4 & 0x30);
        }
        for (int i = 0; i < 16; i++) w[i] -= 32;
        FROM_HALVES(scale, d[0]);
        const i32x16 two = s[j / 2] << (j % 2 ? 0 : 16); // the two bytes on top
        second           = scale * __builtin_convertvector(two >> 24, f32x16);
        scale *= __builtin_convertvector(two << 8 >> 24, f32x16);
    }
};

// -- products of integers

// sum[lane] = w · x over the first 16 places of a tile, and over the others
INLINE void dot_tile(const i16x32* w, const std::int16_t* x, i32x16* sum) {
    i32x16 a{}, b{}, c{}, d{};
    for (int i = 0; i < 8; i += 2) {
        DOT(a, w[i], x + 2 * i);
        DOT(b, w[i + 1], x + 2 * i + 2);
        DOT(c, w[i + 8], x + 2 * i + 16);
        DOT(d, w[i + 9], x + 2 * i + 18);
    }
    sum[0] = a + b;
    sum[1] = c + d;
}

// 16 rows that begin at p, times tokens first .. first + n - 1. Integer sums are exact, and the floats made of them are
// added tile by tile: nothing depends on n. total [n].
template <class Format, int N>
INLINE void integer_rows(const std::byte* p, std::size_t stride, const RowsOfX& x, std::int64_t first, std::int64_t n,
                         f32x16* total, const std::byte* next) {
    if constexpr (N > 0) n = N;
    const std::int64_t tiles = x.cols / 32;
    const std::size_t  ahead = stride * 16 / std::size_t(tiles); // bytes of the next rows to ask for at each tile
    for (std::int64_t t = 0; t < n; t++) total[t] = f32x16{};
    Format format;
    for (std::int64_t group = 0; group * 8 < tiles; group++) {
        const int here = int(std::min<std::int64_t>(8, tiles - group * 8));
        format.header(p, stride, here);
        for (int j = 0; j < here; j++) {
            i16x32 w[16];
            f32x16 scale, second;
            format.tile(p, stride, j, w, scale, second);
            if (next)
                for (std::size_t i = 0; i < ahead; i += 64, next += 64) __builtin_prefetch(next, 0, 2);
            const std::int64_t  tile   = (group * 8 + j) * x.n + first;
            const std::int16_t* at     = x.integers + tile * 32;
            const float *       scales = x.scales + tile, *sums = x.sums + tile;
            for (std::int64_t t = 0; t < n; t++, at += 32) {
                i32x16 dot[2];
                dot_tile(w, at, dot);
                f32x16 sum = total[t];
                if constexpr (Format::two_scales) {
                    const f32x16 both = FMA(__builtin_convertvector(dot[1], f32x16), second,
                                            __builtin_convertvector(dot[0], f32x16) * scale);
                    sum               = FMA(both, f32x16{} + scales[t], sum);
                } else {
                    sum = FMA(__builtin_convertvector(dot[0] + dot[1], f32x16), scale * scales[t], sum);
                }
                if constexpr (Format::has_min) sum = FMA(-second, f32x16{} + sums[t], sum);
                total[t] = sum;
            }
        }
        p += Format::items == 32 ? 8 * Format::bytes : Format::bytes;
    }
}

// -- products of floats: tiles of 16 places

// w[k] = place k of 16 rows, from 16 places at p; the type's elements stand alone
template <DType T>
INLINE void float_tile(const std::byte* p, std::size_t stride, f32x16* w) {
    i32x16 d[16];
    if constexpr (T == DType::F32) {
        turn32(p, stride, d);
        turn32(p + 32, stride, d + 8);
        for (int i = 0; i < 16; i++) w[i] = (f32x16)d[i];
    } else {
        turn32(p, stride, d);
        for (int i = 0; i < 8; i++) {
            if constexpr (T == DType::BF16) {
                w[2 * i]     = (f32x16)(d[i] << 16);
                w[2 * i + 1] = (f32x16)(d[i] & int(0xffff0000));
            } else {
                FROM_HALVES(w[2 * i], LOW_HALF(d[i]));
                FROM_HALVES(w[2 * i + 1], HIGH_HALF(d[i]));
            }
        }
    }
}

// One tile's part of every token's sums: four chains of four places, then the sum of chains is added.
INLINE void add_float_tile(const f32x16* w, const float* x, std::int64_t n, f32x16* total) {
    for (std::int64_t t = 0; t < n; t++, x += 16) {
        f32x16 a = w[0] * x[0], b = w[1] * x[1], c = w[2] * x[2], d = w[3] * x[3];
        for (int i = 4; i < 16; i += 4) {
            a = FMA(w[i], f32x16{} + x[i], a);
            b = FMA(w[i + 1], f32x16{} + x[i + 1], b);
            c = FMA(w[i + 2], f32x16{} + x[i + 2], c);
            d = FMA(w[i + 3], f32x16{} + x[i + 3], d);
        }
        total[t] += (a + b) + (c + d);
    }
}

template <DType T, int N>
INLINE void float_rows(const std::byte* p, std::size_t stride, const RowsOfX& x, std::int64_t first, std::int64_t n,
                       f32x16* total, const std::byte* next) {
    if constexpr (N > 0) n = N;
    constexpr std::size_t size  = T == DType::F32 ? 4 : 2;
    const std::int64_t    whole = x.cols / 16, rest = x.cols % 16;
    for (std::int64_t t = 0; t < n; t++) total[t] = f32x16{};
    f32x16 w[16];
    for (std::int64_t tile = 0; tile < whole; tile++, p += 16 * size) {
        float_tile<T>(p, stride, w);
        if (next)
            for (std::size_t i = 0; i < 256 * size; i += 64, next += 64) __builtin_prefetch(next, 0, 2);
        add_float_tile(w, x.floats + (tile * x.n + first) * 16, n, total);
    }
    if (rest == 0) return;
    std::byte last[16][16 * size] = {};
    for (std::size_t r = 0; r < 16; r++) std::memcpy(last[r], p + r * stride, std::size_t(rest) * size);
    float_tile<T>(last[0], 16 * size, w);
    add_float_tile(w, x.floats + (whole * x.n + first) * 16, n, total);
}

// Types that have no tile of their own, 256 places at a time as floats.
template <int N>
INLINE void other_rows(DType type, const std::byte* p, std::size_t stride, const RowsOfX& x, std::int64_t first,
                       std::int64_t n, f32x16* total) {
    if constexpr (N > 0) n = N;
    for (std::int64_t t = 0; t < n; t++) total[t] = f32x16{};
    float             rows[16][256];
    f32x16            w[16];
    const std::size_t step = 256 / std::size_t(dtype_info(type).items) * std::size_t(dtype_info(type).bytes);
    for (std::int64_t k = 0; k < x.cols; k += 256, p += step) {
        const std::int64_t here = std::min<std::int64_t>(256, x.cols - k);
        for (std::size_t r = 0; r < 16; r++) dequantize_inline(type, p + r * stride, rows[r], here);
        for (std::int64_t i = 0; i < here; i += 16) {
            float_tile<DType::F32>(reinterpret_cast<const std::byte*>(rows[0] + i), sizeof rows[0], w);
            add_float_tile(w, x.floats + ((k + i) / 16 * x.n + first) * 16, n, total);
        }
    }
}

// -- the task

template <int N>
INLINE void rows_16(DType type, const std::byte* p, std::size_t stride, const RowsOfX& x, std::int64_t first,
                    std::int64_t n, f32x16* total, const std::byte* next) {
    switch (type) {
        case DType::F32: return float_rows<DType::F32, N>(p, stride, x, first, n, total, next);
        case DType::F16: return float_rows<DType::F16, N>(p, stride, x, first, n, total, next);
        case DType::BF16: return float_rows<DType::BF16, N>(p, stride, x, first, n, total, next);
        case DType::Q4_0: return integer_rows<OfQ4_0, N>(p, stride, x, first, n, total, next);
        case DType::Q4_1: return integer_rows<OfQ4_1, N>(p, stride, x, first, n, total, next);
        case DType::Q5_0: return integer_rows<OfQ5_0, N>(p, stride, x, first, n, total, next);
        case DType::Q5_1: return integer_rows<OfQ5_1, N>(p, stride, x, first, n, total, next);
        case DType::Q8_0: return integer_rows<OfQ8_0, N>(p, stride, x, first, n, total, next);
        case DType::Q4_K: return integer_rows<OfQ4_K, N>(p, stride, x, first, n, total, next);
        case DType::Q5_K: return integer_rows<OfQ5_K, N>(p, stride, x, first, n, total, next);
        case DType::Q6_K: return integer_rows<OfQ6_K, N>(p, stride, x, first, n, total, next);
        default: return other_rows<N>(type, p, stride, x, first, n, total);
    }
}

INLINE void store_rows(const MatmulTask& task, std::int64_t row, std::int64_t first, std::int64_t n,
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

INLINE void matmul_body(const MatmulTask& task) {
    const TensorView& w      = *task.weight;
    const RowsOfX&    x      = *task.x;
    const std::size_t stride = row_bytes(w.type, w.cols);
    auto*             total  = reinterpret_cast<f32x16*>(task.scratch); // [tokens_at_once]
    auto*             padded = reinterpret_cast<std::byte*>(total + tokens_at_once);
    for (std::int64_t first = 0; first < x.n; first += tokens_at_once) {
        const std::int64_t n = std::min(tokens_at_once, x.n - first);
        for (std::int64_t row = task.first_group * 16, last = std::min(task.last_group * 16, w.rows); row < last;
             row += 16) {
            const auto*      p    = static_cast<const std::byte*>(w.data) + std::size_t(row) * stride;
            const std::byte* next = row + 32 <= last ? p + 16 * stride : nullptr;
            if (row + 16 > w.rows) { // the last rows, filled up to 16
                std::memset(padded, 0, 16 * stride);
                std::memcpy(padded, p, std::size_t(w.rows - row) * stride);
                p = padded;
            }
            if (n == 1) {
                f32x16 one;
                rows_16<1>(w.type, p, stride, x, first, n, &one, next);
                store_rows(task, row, first, n, &one);
            } else {
                rows_16<0>(w.type, p, stride, x, first, n, total, next);
                store_rows(task, row, first, n, total);
            }
        }
    }
}

// -- x: tokens first .. last-1, from [n × cols] into tiles

// 16 bits for the largest of 32 places. NaN and infinity come back through the scale.
INLINE void pack_integers_body(const float* x, const RowsOfX& to, std::int64_t first, std::int64_t last) {
    for (std::int64_t t = first; t < last; t++)
        for (std::int64_t k = 0; k < to.cols; k += 32) {
            f32x16 v[2];
            LOAD16(v[0], x + t * to.cols + k);
            LOAD16(v[1], x + t * to.cols + k + 16);
            // of floats without a sign the bits compare as the values do
            const float largest = std::bit_cast<float>(
                __builtin_reduce_max(__builtin_elementwise_max((i32x16)v[0] & 0x7fffffff, (i32x16)v[1] & 0x7fffffff)));
            const float        inverse = largest > 0 ? 32767 / largest : 0;
            const std::int64_t tile    = k / 32 * to.n + t;
            i32x16             sum{};
            for (int half = 0; half < 2; half++) {
                // adding 1.5 · 2^23 rounds to an integer, the low bits of the sum
                const i32x16 q = (i32x16)(v[half] * inverse + 12582912.0f) - 0x4b400000;
                sum += q;
                const i16x16 narrow = __builtin_convertvector(q, i16x16);
                const i16x16 turned =
                    __builtin_shufflevector(narrow, narrow, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
                STORE16(to.integers + tile * 32 + 16 * half, turned);
            }
            to.scales[tile] = largest / 32767;
            to.sums[tile]   = float(__builtin_reduce_add(sum)) * to.scales[tile];
        }
}

INLINE void pack_floats_body(const float* x, const RowsOfX& to, std::int64_t first, std::int64_t last) {
    for (std::int64_t t = first; t < last; t++)
        for (std::int64_t k = 0; k < to.cols; k += 16) {
            float*             tile = to.floats + (k / 16 * to.n + t) * 16;
            const std::int64_t here = std::min<std::int64_t>(16, to.cols - k);
            std::memcpy(tile, x + t * to.cols + k, std::size_t(here) * sizeof(float));
            std::fill(tile + here, tile + 16, 0.0f);
        }
}
