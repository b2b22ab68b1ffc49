// Operands of the integer GEMM: weights repacked (16 rows interleaved), activations quantised to int16.

// -- repacking

// One block of 16 rows that are `stride` apart, from p to `to`: the pieces at byte o of the blocks go to 16 · o.
template <class Format>
INLINE void repack_block(const std::byte* p, std::size_t stride, std::byte* to) {
    constexpr Pieces pieces = Format::pieces;
    UNROLLED for (std::size_t i = 0; i < pieces.sixteens; i++) {
        i32x16 d[4];
        transpose(p + pieces.at + 16 * i, stride, d);
        __builtin_memcpy(to + 16 * (pieces.at + 16 * i), d, sizeof d);
    }
    UNROLLED for (const Piece piece : pieces.small) for (std::size_t r = 0; r < 16; r++)
        __builtin_memcpy(to + 16 * piece.offset + r * piece.bytes, p + piece.offset + r * stride, piece.bytes);
}

// Blocks first .. first + n - 1 of 16 rows, of which `here` exist; the others become zeros.
template <class Format>
INLINE void repack_blocks(const std::byte* rows, std::size_t stride, std::int64_t here, std::int64_t first,
                          std::int64_t n, std::byte* to) {
    constexpr std::size_t bytes = Format::bytes;
    const std::byte*      p     = rows + std::size_t(first) * bytes;
    for (std::int64_t block = 0; block < n; block++, p += bytes, to += 16 * bytes) {
        if (here == 16) {
            repack_block<Format>(p, stride, to);
            continue;
        }
        std::byte some[16 * bytes] = {};
        for (std::int64_t r = 0; r < here; r++)
            __builtin_memcpy(some + r * Format::bytes, p + std::size_t(r) * stride, bytes);
        repack_block<Format>(some, bytes, to);
    }
}

// Groups of 16 rows first .. last-1, whole.
template <class Format>
[[gnu::noinline]] void repack_rows(const TensorView& w, std::byte* out, std::int64_t first, std::int64_t last) {
    const std::size_t stride = row_bytes(w.type, w.cols);
    for (std::int64_t row = first * 16; row < last * 16; row += 16)
        repack_blocks<Format>(static_cast<const std::byte*>(w.data) + std::size_t(row) * stride, stride,
                              std::min<std::int64_t>(16, w.rows - row), 0, w.cols / Format::items,
                              out + std::size_t(row) * stride);
}

#define EACH_INTEGER_FORMAT(DO) \
    DO(Q4_0)                    \
    DO(Q4_1)                    \
    DO(Q5_0) DO(Q5_1) DO(Q8_0) DO(Q4_K) DO(Q5_K) DO(Q6_K) DO(IQ4_NL) DO(IQ4_XS) DO(MXFP4) DO(IQ3_XXS) DO(IQ2_XS)

INLINE void repack_body(const TensorView& w, std::byte* out, std::int64_t first, std::int64_t last) {
    switch (w.type) {
#define REPACK(T) \
    case DType::T: return repack_rows<Format##T>(w, out, first, last);
        EACH_INTEGER_FORMAT(REPACK)
#undef REPACK
        default: return;
    }
}

// -- int16 quantisation of activations

constexpr int quantised_together = 8; // tokens

// A tile of 32 columns for each of `here` neighbouring tokens, whose columns are at x, `cols` apart.
template <bool Pairs>
INLINE void quantise_tiles(const float* x, std::int64_t cols, const QuantisedRows& to, std::int64_t tile,
                           std::int64_t here) {
    const auto max_x                    = float(max_activation(to.for_wide));
    i32x16     most[quantised_together] = {}, sum[quantised_together] = {}, product[quantised_together] = {}, lanes;
    for (std::int64_t t = 0; t < here; t++) { // without their sign, the bits of floats compare as the floats do
        i32x16 a, b;
        LOAD16(a, x + t * cols);
        LOAD16(b, x + t * cols + 16);
        most[t] = __builtin_elementwise_max(a & 0x7fffffff, b & 0x7fffffff);
    }
    largest_of_tiles(most, lanes);
    const i32x16 other   = __builtin_shufflevector(lanes, lanes, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    const auto   largest = (f32x16)__builtin_elementwise_max(lanes, other);
    const f32x16 inverse = largest > 0 ? max_x / largest : f32x16{};
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
        const i16x32 v         = JOIN(natural[0], natural[1]);
        const i16x32 reordered = SWAP_MIDDLE(v);
#undef JOIN
        STORE16(to.integers + (tile + t) * 32, reordered);
        DOT(sum[t], v, i16x32{} + 1);
        if constexpr (Pairs) DOT(product[t], v, (i16x32)((u32x16)v >> 16));
    }
#define EVEN(v) __builtin_shufflevector(v, v, 0, 2, 4, 6, 8, 10, 12, 14)
#define ODD(v) __builtin_shufflevector(v, v, 1, 3, 5, 7, 9, 11, 13, 15)
    const auto  bytes = std::size_t(here) * sizeof(float);
    const f32x8 scale = EVEN(largest) / max_x;
    sums_of_tiles(sum, lanes);
    const f32x8 sums = __builtin_convertvector(EVEN(lanes) + ODD(lanes), f32x8) * scale;
    std::memcpy(to.scales + tile, &scale, bytes);
    std::memcpy(to.sums + tile, &sums, bytes);
    if constexpr (Pairs) {
        sums_of_tiles(product, lanes);
        const i32x8 products = -(EVEN(lanes) + ODD(lanes));
        std::memcpy(to.products + tile, &products, bytes);
    }
#undef EVEN
#undef ODD
}

template <bool Pairs>
INLINE void quantise_rows_body(const float* x, const QuantisedRows& to, std::int64_t first, std::int64_t last) {
    for (std::int64_t t = first; t < last; t += quantised_together) {
        const std::int64_t here = std::min<std::int64_t>(quantised_together, last - t);
        for (std::int64_t k = 0; k < to.k; k += 32) {
            const float*       at   = x + t * to.k + k;
            const std::int64_t tile = k / 32 * to.m + t;
            if (here == quantised_together) quantise_tiles<Pairs>(at, to.k, to, tile, quantised_together); // a constant
            else quantise_tiles<Pairs>(at, to.k, to, tile, here);
        }
    }
}
