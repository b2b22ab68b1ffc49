// Integer GEMM: quantised weights × int16-quantised activations. A group of 16 weight rows is unpacked tile by tile along K, and
// each tile is multiplied with all tokens of the pass (the microkernel: 16 rows × DOT_TOKENS tokens × 32 columns). Sums over a tile
// are exact integers; the floats made of them are added with ascending k, so that no result depends on the number of tokens.

// -- microkernels

// One token: sum[lane] = w · x over a tile, or over its first and its second half.
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

// N neighbouring tokens, with the tile in memory. The loop is not unrolled: the compiler would reorder it until the sums no longer
// fit the registers.
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

// Adds a tile's integer sum to the total: value · w.scale · x_scale, for formats with a minimum - w.second · x_sum.
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

// A tile of x, from some token on. Pointers are advanced by additions: a multiplication between two tiles would not be hidden.
struct Tokens {
    const std::int16_t* integers;
    const float *       scales, *sums;
    const std::int32_t* products;

    INLINE void move(std::int64_t n) {
        integers += 32 * n;
        scales += n, sums += n, products += n;
    }
};

// Whether the sum over a tile fits 32 bits for any x.
template <class Format>
INLINE bool sum_fits(const UnpackedTile& w) {
    if constexpr (!Format::two_scales) return true;
    constexpr std::int32_t most = std::numeric_limits<std::int32_t>::max() / max_activation(true);
    i32x16                 sum{};
    UNROLLED for (const i16x32& v : w.w) DOT(sum, __builtin_elementwise_abs(v), i16x32{} + 1);
    return !ANY_NEGATIVE(most - sum);
}

// Adds one tile's part to the sums of n tokens, N tokens at a time, by whole tiles or by halves.
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

// With two scales: sum_fits() costs as much as one or two tokens, and one sum in place of two saves a tenth of each token.
template <class Format, int N>
INLINE_PARTS void add_tile(const UnpackedTile& w, Tokens x, std::int64_t n, f32x16* total) {
    if constexpr (Format::two_scales) {
        if (n >= 16 && sum_fits<Format>(w)) add_tokens<Format, false, N>(w, x, n, total);
        else add_tokens<Format, true, N>(w, x, n, total);
    } else {
        add_tokens<Format, false, N>(w, x, n, total);
    }
}

// Winograd's inner product, with half the products (S. Winograd, A New Algorithm for Inner Product, 1968), for two groups of 16 rows:
//   w0 · x0 + w1 · x1 = (w1 + x0) · (w0 + x1) - w0 · w1 - x0 · x1
// The last two terms depend only on the row or only on the token, and are computed once. Integer sums are the same even though they
// may overflow on the way; max_activation() leaves room for w + x. Both groups share the loads of x.
constexpr int winograd_tokens = 4;

template <class Format>
INLINE void add_winograd(const UnpackedTile* w, Tokens x, std::int64_t n, f32x16 (*total)[max_tokens_per_pass]) {
    constexpr int T          = winograd_tokens;
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
INLINE_PARTS void add_two_groups(const UnpackedTile* w, Tokens x, std::int64_t n,
                                 f32x16 (*total)[max_tokens_per_pass]) {
    std::int64_t paired = 0;
    if (sum_fits<Format>(w[0]) && sum_fits<Format>(w[1])) {
        paired = n / winograd_tokens * winograd_tokens;
        add_winograd<Format>(w, x, paired, total);
    }
    x.move(paired);
    UNROLLED for (int r = 0; r < 2; r++) add_tile<Format, 1>(w[r], x, n - paired, total[r] + paired);
}

// -- K loop

// A group of 16 rows, of which `here` exist, repacked or in the file's order.
struct RowGroup {
    const std::byte* p;
    std::size_t      stride; // of a row in the file
    std::int64_t     here;
    Prefetch         prefetch;
};

// GEMV over 16 repacked rows, two tiles at a time, with software prefetching as in k_loop().
template <class Format, Prefetch Into>
[[gnu::noinline]] void gemv_repacked(const std::byte* p, const QuantisedRows& x, f32x16& total) {
    constexpr int tiles = Format::items / 32, bytes = 16 * Format::bytes;
    f32x16        sum{};
    Format        format;
    for (std::int64_t tile = 0; tile < x.k / 32; tile += tiles, p += bytes) {
        format.header(p);
        UNROLLED for (int j = 0; j < tiles; j += 2) {
            i32x16 dot[2];
            format.template two_sums<Into>(p, j, x.integers + (tile + j) * 32, dot);
            prefetch_lines(p + prefetch_ahead + 32 * j, 64, Into); // the scales
            for (int k = 0; k < 2; k++) {
                UnpackedTile w;
                format.tile_scales(j + k, w);
                add_token<Format, false>(dot + k, w, x.scales[tile + j + k], x.sums[tile + j + k], sum);
            }
        }
    }
    total = sum;
}

// Few tokens, N from `first` on, over 16 repacked rows. Where a tile does not fit the registers, writing it to memory and reading it again costs as
// much as two or three tokens: so it is multiplied as it is unpacked, which is done once for N tokens.
template <class Format, int N>
[[gnu::noinline]] void few_repacked(const std::byte* p, const QuantisedRows& x, std::int64_t first, Prefetch prefetch,
                                    f32x16* total) {
    constexpr int tiles = Format::items / 32, bytes = 16 * Format::bytes;
    f32x16        sum[N] = {};
    Format        format;
    Tokens        at{x.integers, x.scales, x.sums, x.products};
    at.move(first);
    for (std::int64_t block = 0; block < x.k / Format::items; block++, p += bytes) {
        format.header(p);
        UNROLLED for (int j = 0; j < tiles; j++) {
            i32x16       dot[N];
            UnpackedTile w;
            format.template few_sums<N>(p, j, at.integers, dot);
            prefetch_lines(p + prefetch_ahead + bytes / tiles * j, bytes / tiles, prefetch);
            format.tile_scales(j, w);
            for (int t = 0; t < N; t++) add_token<Format, false>(dot + t, w, at.scales[t], at.sums[t], sum[t]);
            at.move(x.m);
        }
    }
    for (int t = 0; t < N; t++) total[t] = sum[t];
}

constexpr std::int64_t few_at_once = 5, few_repacked_tokens = 8; // of one pass over the weights; of all

template <class Format>
void few_repacked(const std::byte* p, const QuantisedRows& x, std::int64_t first, std::int64_t n, Prefetch prefetch,
                  f32x16* total) {
    const std::int64_t half = n > few_at_once ? (n + 1) / 2 : n;
    for (std::int64_t done = 0; done < n; done += half) {
        const std::int64_t at = first + done;
        switch (std::min(half, n - done)) {
            case 1: few_repacked<Format, 1>(p, x, at, prefetch, total + done); break;
            case 2: few_repacked<Format, 2>(p, x, at, prefetch, total + done); break;
            case 3: few_repacked<Format, 3>(p, x, at, prefetch, total + done); break;
            case 4: few_repacked<Format, 4>(p, x, at, prefetch, total + done); break;
            default: few_repacked<Format, 5>(p, x, at, prefetch, total + done); break;
        }
    }
}

// Calls use(w) with the tiles of 32 columns of R groups of 16 rows, unpacked, with ascending k.
template <class Format, bool Repacked, int R, class Use>
INLINE void each_tile(const RowGroup* group, std::int64_t k, const Use& use) {
    constexpr int         tiles = Format::items / 32, bytes = 16 * Format::bytes; // of a block of 16 rows
    constexpr int         at_once = Repacked ? 1 : 8 / tiles; // blocks repacked together, a panel of 256 columns
    Format                format[R];
    alignas(64) std::byte panel[R][Repacked ? 1 : at_once * bytes];
    const std::int64_t    blocks = k / Format::items;
    if constexpr (Repacked) {
        for (std::int64_t block = 0; block < blocks; block++) {
            const std::int64_t rest  = blocks * bytes; // then the other group follows
            const std::int64_t ahead = prefetch_ahead + (block * bytes + prefetch_ahead < rest ? 0 : (R - 1) * rest);
            for (int r = 0; r < R; r++) format[r].header(group[r].p + block * bytes);
            UNROLLED for (int j = 0; j < tiles; j++) {
                UnpackedTile w[R];
                UNROLLED for (int r = 0; r < R; r++) {
                    const std::byte* p = group[r].p + block * bytes;
                    format[r].tile(p, j, w[r]);
                    prefetch_lines(p + ahead + bytes / tiles * j, bytes / tiles, group[r].prefetch);
                }
                use(w);
            }
        }
        return;
    }
    for (std::int64_t begin = 0; begin < blocks; begin += at_once) {
        const std::int64_t here = std::min<std::int64_t>(at_once, blocks - begin);
        for (int r = 0; r < R; r++)
            repack_blocks<Format>(group[r].p, group[r].stride, group[r].here, begin, here, panel[r]);
        for (std::int64_t block = begin; block < begin + here; block++) {
            const std::int64_t done = (block - begin) * bytes;
            for (int r = 0; r < R; r++) format[r].header(panel[r] + done);
            UNROLLED for (int j = 0; j < tiles; j++) {
                UnpackedTile w[R];
                for (int r = 0; r < R; r++) {
                    const std::size_t stride = group[r].stride;
                    const std::byte*  later  = group[r].p + 16 * R * stride + begin * bytes + done;
                    format[r].tile(panel[r] + done, j, w[r]);
                    prefetch_lines(later + bytes / tiles * j, bytes / tiles, Prefetch::l2);
                    // and two rows of the next panel, from the L2 to the L1
                    const std::byte* next = group[r].p + std::size_t(2 * ((block - begin) * tiles + j)) * stride +
                                            (begin + at_once) * Format::bytes;
                    for (int i = 0; i < at_once * Format::bytes + 63; i += 64) {
                        __builtin_prefetch(next + i);
                        __builtin_prefetch(next + stride + i);
                    }
                }
                use(w);
            }
        }
    }
}

// R groups of 16 rows × tokens first .. first + n - 1; total [R][n]. One: a single token, whose sums stay in registers.
template <class Format, bool Repacked, int N, int R, bool One>
[[gnu::noinline]] void k_loop(const RowGroup* group, const QuantisedRows& x, std::int64_t first, std::int64_t n,
                              f32x16 (*total)[max_tokens_per_pass]) {
    static_assert(!One || R == 1);
    f32x16 sum{};
    if constexpr (!One)
        for (int r = 0; r < R; r++)
            for (std::int64_t t = 0; t < n; t++) total[r][t] = f32x16{};
    const std::int64_t all = x.m;
    Tokens             at{x.integers, x.scales, x.sums, x.products};
    at.move(first);
    each_tile<Format, Repacked, R>(group, x.k, [&](const UnpackedTile* w) __attribute__((always_inline)) {
        if constexpr (R == 2) add_two_groups<Format>(w, at, n, total);
        else if constexpr (One) add_tile<Format, 1>(w[0], at, 1, &sum);
        else add_tile<Format, N>(w[0], at, n, total[0]);
        at.move(all);
    });
    if constexpr (One) total[0][0] = sum;
}

INLINE void integer_epilogue(const GemmTask& task, std::int64_t row, std::int64_t first, std::int64_t n,
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

// -- GEMV over rows in the file's order, one row after the other, so that memory is read as one stream: for one token, repacking
// would take longer than multiplying. Integer sums are exact in any order: the sums of 16 tiles of a row are collected in the lanes
// of one vector; the scales are applied at the end of 16 rows, in the same order as in the K loop.

// x in pairs of tiles of 32 columns: with SPLIT_BYTES as 64 low bytes (unsigned) and 64 high bytes (signed), else as int16: in column
// order for weights of one byte, for other weights the even columns of both tiles first. Zeros up to a multiple of 16 tiles.
// With two_scales the columns of a block of 256 are in the order of FormatQ6_K::row_sums(): pair 2i + `part` has 8 columns, the first
// or the last, of each 16 of tiles 2i and 2i + 4 alternately, then of tiles 2i + 1 and 2i + 5.
template <class Format>
INLINE void split_activations(const QuantisedRows& x, std::int64_t groups, std::byte* out) {
    for (std::int64_t k = 0; k < groups * 512; k += 64, out += 128) {
        i16x32 v[2] = {};
        for (int t = 0; t < 2; t++)
            if constexpr (Format::two_scales) {
                const std::int64_t first   = k / 256 * 256 + k % 256 / 128 * 64 + 32 * t;
                i32x16             from[2] = {};
                for (int i = 0; i < 2; i++)
                    if (first + 128 * i < x.k) LOAD16(from[i], x.integers + first + 128 * i);
#define EIGHTS(at) at, at + 1, at + 2, at + 3, at + 16, at + 17, at + 18, at + 19
                v[t] = (i16x32)(k % 128 == 0 ? __builtin_shufflevector(from[0], from[1], EIGHTS(0), EIGHTS(8))
                                             : __builtin_shufflevector(from[0], from[1], EIGHTS(4), EIGHTS(12)));
#undef EIGHTS
            } else if (k + 32 * t < x.k) {
                LOAD16(v[t], x.integers + k + 32 * t);
            }
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
        for (int t = 0; t < 2; t++) v[t] = SWAP_MIDDLE(v[t]);
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

// Floats of scratch memory: x; for each 16 tiles the sums of zero weights (two vectors); for each of 16 rows the values and scales
// of its tiles, or the scale of each of its blocks, as it is in the file.
INLINE std::size_t gemv_scratch(std::int64_t cols) {
    return std::size_t((cols + 511) / 512) * (256 + 2 * 16 + 2 * 16 * 16 + 16);
}

template <class Format, Prefetch Into>
[[gnu::noinline]] void gemv_rows(const GemmTask& task) {
    constexpr std::int64_t bytes  = 512 / Format::items * Format::bytes;
    constexpr int          sums   = Format::two_scales ? 2 : 1;
    const TensorView&      w      = *task.weight;
    const QuantisedRows&   x      = *task.quantised;
    const std::size_t      stride = row_bytes(w.type, w.cols);
    const std::int64_t     groups = (x.k + 511) / 512, whole = x.k / 512, tiles = x.k / 32;
    auto*                  split = reinterpret_cast<std::byte*>(task.scratch);
    auto*                  over  = reinterpret_cast<i32x16*>(split + groups * 1024);
    auto *                 value = reinterpret_cast<f32x16*>(over + groups * 2), *scale = value + groups * 16;
    f32x16*                x_scale = scale + groups * 16;
    Format                 format;
    split_activations<Format>(x, groups, split);
    for (std::int64_t g = 0; g < groups; g++) {
        std::byte zeros[bytes];
        format.zeros(zeros);
        format.row_sums(zeros, split + g * 1024, over + sums * g);
    }
    std::memcpy(x_scale, x.scales, std::size_t(tiles) * sizeof(float));
    auto* block_scale = reinterpret_cast<std::uint16_t*>(scale); // [block][16 rows]

    const auto row_group = [&](const std::byte* p, std::int64_t g, std::int64_t r) __attribute__((always_inline)) {
        i32x16 dot[2];
        format.row_sums(p, split + g * 1024, dot);
        for (int i = 0; i < sums; i++) dot[i] -= over[sums * g + i];
        f32x16 values, scales;
        format.row_values(p, dot, values);
        value[r * groups + g] = values;
        if constexpr (Format::two_scales) {
            for (int i = 0; i < 2; i++)
                __builtin_memcpy(block_scale + (2 * g + i) * 16 + r, p + i * Format::bytes + Format::scale_at, 2);
        } else {
            format.row_scales(p, scales);
            scale[r * groups + g] = scales * x_scale[g];
        }
    };
    const std::byte* p = static_cast<const std::byte*>(w.data) + std::size_t(task.first) * stride;
    for (std::int64_t row = task.first; row < task.last; row += 16) {
        for (std::int64_t r = 0; r < std::min<std::int64_t>(16, task.last - row); r++, p += stride) {
            for (std::int64_t g = 0; g < whole; g++) {
                prefetch_lines(p + g * bytes + prefetch_ahead, bytes, Into);
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
            transpose(reinterpret_cast<const std::byte*>(value) + at, apart, v);
            if constexpr (Format::two_scales) {
                u16x16 h;
                f32x16 d;
                LOAD16(h, block_scale + t / 8 * 16);
                FROM_FP16(d, h);
                for (std::int64_t i = 0; i < 4; i++) s[i] = (i32x16)(d * x.scales[t + i]);
            } else {
                transpose(reinterpret_cast<const std::byte*>(scale) + at, apart, s);
            }
            for (std::int64_t i = 0; i < here; i++) total = FMA((f32x16)v[i], (f32x16)s[i], total);
        };
        for (std::int64_t t = 0; t < tiles / 4 * 4; t += 4) add_four(t, 4); // a constant
        if (tiles % 4 > 0) add_four(tiles / 4 * 4, tiles % 4);
        integer_epilogue(task, row, 0, 1, &total);
    }
}

template <int N, int R, bool One>
INLINE void k_loop_of(DType type, const RowGroup* group, const QuantisedRows& x, std::int64_t first, std::int64_t n,
                      f32x16 (*total)[max_tokens_per_pass]) {
    switch (type) {
#define K_LOOP(T) \
    case DType::T: return k_loop<Format##T, repacked_at_load(DType::T), N, R, One>(group, x, first, n, total);
        EACH_INTEGER_FORMAT(K_LOOP)
#undef K_LOOP
        default: return;
    }
}

constexpr std::int64_t never = std::numeric_limits<std::int64_t>::max();

// Passes of at most `most` tokens, so few that their x stays in the L2 while the rows of the task change. In each multiply(groups, n_groups,
// first, n, total) for one group of 16 rows after the other, or for two where n is at least `pairs_from`, × n tokens from `first` on.
template <class Multiply>
INLINE void in_passes(const GemmTask& task, std::int64_t most, std::int64_t pairs_from, const Multiply& multiply) {
    const TensorView&  w       = *task.weight;
    const std::size_t  stride  = row_bytes(w.type, w.cols);
    const std::int64_t m       = task.quantised->m;
    const std::int64_t passes  = (m + most - 1) / most;
    const std::int64_t at_once = (m + passes - 1) / passes;
    for (std::int64_t first = 0; first < m; first += at_once) {
        const std::int64_t n = std::min(at_once, m - first);
        for (std::int64_t row = task.first, groups; row < task.last; row += 16 * groups) {
            const auto group = [&](std::int64_t at) {
                return RowGroup{static_cast<const std::byte*>(w.data) + std::size_t(at) * stride, stride,
                                std::min<std::int64_t>(16, w.rows - at), task.prefetch};
            };
            const RowGroup two[2] = {group(row), group(row + 16)};
            f32x16         total[2][max_tokens_per_pass];
            groups = n >= pairs_from && row + 16 < task.last ? 2 : 1;
            multiply(two, groups, first, n, total);
            for (std::int64_t r = 0; r < groups; r++) integer_epilogue(task, row + 16 * r, first, n, total[r]);
        }
    }
}

template <bool Pairs>
void integer_gemm(const GemmTask& task) {
    const TensorView&    w = *task.weight;
    const QuantisedRows& x = *task.quantised;
    if (x.m == 1 && !repacked_at_load(w.type) && gemv_scratch(x.k) <= gemm_scratch) {
        const bool l1 = task.prefetch == Prefetch::l1;
        if (w.type == DType::Q8_0)
            return l1 ? gemv_rows<FormatQ8_0, Prefetch::l1>(task) : gemv_rows<FormatQ8_0, Prefetch::l2>(task);
        return l1 ? gemv_rows<FormatQ6_K, Prefetch::l1>(task) : gemv_rows<FormatQ6_K, Prefetch::l2>(task);
    }
    // With fewer tokens Winograd loses: unpacking, otherwise hidden behind products, now uses the same units.
    const std::int64_t winograd_from = !Pairs ? never : w.type == DType::Q6_K ? 64 : 24;
    in_passes(task, max_tokens_per_pass / (Pairs ? 1 : 2), winograd_from,
              [&](const RowGroup* group, std::int64_t groups, std::int64_t first, std::int64_t n,
                  f32x16(*total)[max_tokens_per_pass]) __attribute__((always_inline)) {
                  if (Pairs && groups == 2) k_loop_of<1, Pairs ? 2 : 1, false>(w.type, group, x, first, n, total);
                  else if (x.m == 1 && w.type == DType::Q4_K)
                      (task.prefetch == Prefetch::l1
                           ? gemv_repacked<FormatQ4_K, Prefetch::l1>
                           : gemv_repacked<FormatQ4_K, Prefetch::l2>)(group->p, x, total[0][0]);
                  else if (DOT_TOKENS > 1 && w.type == DType::Q4_K && n > 1 && n <= few_repacked_tokens)
                      few_repacked<FormatQ4_K>(group->p, x, first, n, task.prefetch, total[0]);
                  else if (n > 1) k_loop_of<DOT_TOKENS, 1, false>(w.type, group, x, first, n, total);
                  else k_loop_of<1, 1, true>(w.type, group, x, first, 1, total);
              });
}
