// Integer GEMM for several tokens by AMX: one instruction multiplies a tile of up to 16 tokens × 64 bytes with one of 64 bytes × 16 rows. An int16
// activation is two signed bytes, high · 256 + low, and so is a weight of a type with wide_integers(); other weights are one byte. The sums of
// products of bytes are shifted and added, so that sums over a tile of 32 columns, and with them all bits of the results, are those of
// gemm_integer.h.
//
// (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.) Tile registers: 0-2 sums, 3 tokens, 4-7 weights.

// Whether so many tokens are multiplied by AMX. Fewer are as in gemm_integer.h, which reads x as int16.
INLINE bool by_amx(const QuantisedRows& x) { return x.m >= (x.for_wide ? 32 : 12); }

// x for AMX, in place of QuantisedRows::integers: for each tile of 32 columns and each token 32 low bytes, then 32 high bytes.
INLINE void split_bytes(const QuantisedRows& x, std::int64_t first, std::int64_t last) {
    for (std::int64_t tile = 0; tile < x.k / 32; tile++)
        for (std::int64_t t = first; t < last; t++) {
            std::int16_t* at = x.integers + 32 * (tile * x.m + t);
            i16x32        v;
            LOAD16(v, at);
            v                = SWAP_MIDDLE(v);
            const i8x32 low  = __builtin_convertvector(v, i8x32),
                        high = __builtin_convertvector((v + 128) >> 8, i8x32); // max_activation() leaves room
            STORE16(at, low);
            STORE16(at + 16, high);
        }
}
// Back to int16, in the order of QuantisedRows.
INLINE void joined_bytes(const std::int16_t* bytes, std::int16_t* out) {
    i8x32 low, high;
    LOAD16(low, bytes);
    LOAD16(high, bytes + 16);
    i16x32 v = __builtin_convertvector(low, i16x32) + (__builtin_convertvector(high, i16x32) << 8);
    v        = SWAP_MIDDLE(v);
    STORE16(out, v);
}

void quantise_rows_amx(const float* x, const QuantisedRows& to, std::int64_t first, std::int64_t last) {
    for (std::int64_t t = first; t < last; t += quantised_together) { // while they are in a cache
        const std::int64_t end = std::min(last, t + quantised_together);
        quantise_rows<false>(x, to, t, end);
        if (by_amx(to)) split_bytes(to, t, end);
    }
}

// The shapes of the tile registers, as LDTILECFG reads them.
struct TileShapes {
    std::uint8_t  palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t  rows[16]      = {};
};
INLINE void shape_tiles(int tokens) {
    TileShapes shapes;
    for (int i = 0; i < 8; i++) shapes.rows[i] = std::uint8_t(i < 4 ? tokens : 16);
    __builtin_ia32_tile_loadconfig(&shapes);
}

// 16 rows × 32 columns as bytes: vector i has columns 4i .. 4i + 3 of each row. Zeros stand before and behind them: a tile that takes 8 vectors of
// zeros multiplies one half of each token's bytes by zero. Wide: 8 vectors of zeros, of high bytes, of low bytes, of zeros.
struct alignas(64) WeightBytes {
    i32x16 row[32] = {};
};
template <bool Wide>
INLINE void weight_bytes(const UnpackedTile& w, WeightBytes& out) {
    for (int i = 0; i < 8; i++) {
        i16x32 even = w.w[2 * i], odd = w.w[2 * i + 1];
        if constexpr (Wide) {
            out.row[16 + i] = (i32x16)((even & 255) | odd << 8);
            even            = (even + 128) >> 8;
            odd             = (odd + 128) >> 8;
        }
        out.row[8 + i] = (i32x16)((even & 255) | odd << 8);
    }
}

// The integer sums of a tile of tokens: of low bytes, high bytes and, if weights are wide, their mixed products.
struct alignas(64) TileSums {
    i32x16 low[16], high[16], mixed[16];
};

// The tile of tokens × that of weights in register `Weights`.
template <int Sum, int Weights>
INLINE void multiply_tile() {
    __builtin_ia32_tilezero(Sum);
    __builtin_ia32_tdpbssd(Sum, 3, Weights);
}
template <int R, bool Wide>
INLINE void multiply_tiles(const std::int16_t* bytes, TileSums* out) {
    __builtin_ia32_tileloadd64(3, bytes, 64);
    multiply_tile<0, 4>();
    multiply_tile<1, 5>();
    if constexpr (Wide) multiply_tile<2, 6>();
    __builtin_ia32_tilestored64(0, out[0].low, 64);
    __builtin_ia32_tilestored64(1, Wide ? out[0].mixed : out[0].high, 64);
    if constexpr (Wide) __builtin_ia32_tilestored64(2, out[0].high, 64);
    if constexpr (R == 2) {
        multiply_tile<0, 6>();
        multiply_tile<1, 7>();
        __builtin_ia32_tilestored64(0, out[1].low, 64);
        __builtin_ia32_tilestored64(1, out[1].high, 64);
    }
}

// R groups of 16 rows × n tokens from `first` on, in tiles of the same number of tokens.
template <class Format, bool Repacked, int R>
[[gnu::noinline]] void k_loop_amx(const RowGroup* group, const QuantisedRows& x, std::int64_t first, std::int64_t n,
                                  f32x16 (*total)[max_tokens_per_pass]) {
    constexpr bool wide = Format::two_scales;
    static_assert(R == 1 || !wide);
    const std::int64_t n_tiles = (n + 15) / 16, tokens = (n + n_tiles - 1) / n_tiles;
    shape_tiles(int(tokens));
    for (int r = 0; r < R; r++)
        for (std::int64_t t = 0; t < n; t++) total[r][t] = f32x16{};
    Tokens at{x.integers, x.scales, x.sums, x.products};
    at.move(first);
    WeightBytes weights[R];
    TileSums    sums[2][R]; // one is added while the other is computed
    each_tile<Format, Repacked, R>(group, x.k, [&](const UnpackedTile* w) __attribute__((always_inline)) {
        if (!sum_fits<Format>(w[0])) {
            for (std::int64_t t = 0; t < n; t++) {
                alignas(64) std::int16_t integers[32];
                joined_bytes(at.integers + 32 * t, integers);
                add_tokens<Format, true, 1>(w[0], {integers, at.scales + t, at.sums + t, nullptr}, 1, total[0] + t);
            }
            at.move(x.m);
            return;
        }
        for (int r = 0; r < R; r++) weight_bytes<wide>(w[r], weights[r]);
        if constexpr (wide) {
            __builtin_ia32_tileloadd64(4, weights[0].row + 16, 64);
            __builtin_ia32_tileloadd64(5, weights[0].row + 8, 64);
            __builtin_ia32_tileloadd64(6, weights[0].row, 64);
        } else {
            __builtin_ia32_tileloadd64(4, weights[0].row + 8, 64);
            __builtin_ia32_tileloadd64(5, weights[0].row, 64);
            if constexpr (R == 2) {
                __builtin_ia32_tileloadd64(6, weights[1].row + 8, 64);
                __builtin_ia32_tileloadd64(7, weights[1].row, 64);
            }
        }
        // The last tile may have tokens of the one before it.
        const auto multiply = [&](std::int64_t done, TileSums* to) __attribute__((always_inline)) {
            multiply_tiles<R, wide>(at.integers + 32 * std::min(done, n - tokens), to);
        };
        const auto add = [&](std::int64_t done, const TileSums* from) __attribute__((always_inline)) {
            const std::int64_t begin = std::min(done, n - tokens);
            for (std::int64_t t = done; t < begin + tokens; t++) {
                // All are read before one is written: their addresses are equal but for a multiple of 4096.
                f32x16 sum[R];
                for (int r = 0; r < R; r++) {
                    i32x16 products = from[r].low[t - begin];
                    if constexpr (wide) products += (from[r].mixed[t - begin] << 8) + (from[r].high[t - begin] << 16);
                    else products += from[r].high[t - begin] << 8;
                    sum[r] = total[r][t];
                    add_value<Format>(__builtin_convertvector(products, f32x16), w[r], at.scales[t], at.sums[t],
                                      sum[r]);
                }
                for (int r = 0; r < R; r++) total[r][t] = sum[r];
            }
        };
        multiply(0, sums[0]);
        std::int64_t done = 0, i = 1;
        for (; done + tokens < n; done += tokens, i ^= 1) {
            multiply(done + tokens, sums[i]);
            add(done, sums[i ^ 1]);
        }
        add(done, sums[i ^ 1]);
        at.move(x.m);
    });
}

void integer_gemm_amx(const GemmTask& task) {
    const DType          type = task.weight->type;
    const QuantisedRows& x    = *task.quantised;
    if (!by_amx(x)) return integer_gemm<false>(task);
    in_passes(task, max_tokens_per_pass / 2, wide_integers(type) ? never : 0,
              [&](const RowGroup* group, std::int64_t groups, std::int64_t first, std::int64_t n,
                  f32x16(*total)[max_tokens_per_pass]) __attribute__((always_inline)) {
                  switch (type) {
#define K_LOOP(T)                                                                                                \
    case DType::T:                                                                                               \
        return groups == 1 ? k_loop_amx<Format##T, repacked_at_load(DType::T), 1>(group, x, first, n, total)     \
                           : k_loop_amx<Format##T, repacked_at_load(DType::T), wide_integers(DType::T) ? 1 : 2>( \
                                 group, x, first, n, total);
                      EACH_INTEGER_FORMAT(K_LOOP)
#undef K_LOOP
                      default: return;
                  }
              });
    __builtin_ia32_tilerelease();
}
