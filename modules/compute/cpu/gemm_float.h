// Float GEMM: F32, F16 and BF16 weights, and quantised types that the integer GEMM does not know, converted to floats. A microkernel
// with a register tile of rows × tokens, blocked over K and over rows for the caches, with packed panels of x.

// Order of summation: 16 lanes with ascending k, then the lanes pairwise, then the columns beyond the last multiple of 16.

// 16 columns of a row of any float type, as floats
template <DType T, class Vector>
INLINE void load_columns(const std::byte* p, Vector& out) {
    if constexpr (T == DType::F32) {
        LOAD16(out, p);
    } else {
        u16x16 h;
        LOAD16(h, p);
        if constexpr (T == DType::F16) FROM_FP16(out, h);
        else out = (f32x16)(__builtin_convertvector(h, u32x16) << 16);
    }
}

// The columns beyond the last multiple of 16, one by one.
INLINE float add_rest(float sum, const float* w, const float* x, std::int64_t rest) {
    for (std::int64_t i = 0; i < rest; i++) sum = multiply_add<FUSED>(w[i], x[i], sum);
    return sum;
}

// out[i] = the lanes of sums[i], added as sum_lanes() does, 16 sums at a time.
INLINE void sum_lanes_of_16(const f32x16* v, float* out) {
#define EACH(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
    f32x16 a[8], b[4], c[2];
    UNROLLED for (int i = 0; i < 8; i++) a[i] =
        EACH(v[i], v[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
        EACH(v[i], v[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    UNROLLED for (int i = 0; i < 4; i++) b[i] =
        EACH(a[i], a[i + 4], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
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

// GEMV: one row at a time. (Several rows at once collide in the L1 where a row is 4 KB.)
template <DType T, Prefetch Into>
[[gnu::noinline]] void float_gemv(const GemmTask& task) {
    constexpr std::size_t size = T == DType::F32 ? 4 : 2;
    const std::int64_t    cols = task.weight->cols, whole = cols / 16 * 16;
    const auto*           p = static_cast<const std::byte*>(task.weight->data) + std::size_t(task.first * cols) * size;
    for (std::int64_t row = task.first; row < task.last; row++, p += std::size_t(cols) * size) {
        f32x16 sum{};
        for (std::int64_t k = 0; k < whole; k += 16) {
            f32x16 x, w;
            LOAD16(x, task.x + k);
            load_columns<T>(p + std::size_t(k) * size, w);
            prefetch_lines(p + std::size_t(k) * size + (Into == Prefetch::l2 ? prefetch_ahead : prefetch_ahead / 2),
                           16 * size, Into);
            sum = FMA(w, x, sum);
        }
        float rest[16];
        dequantize_inline(T, p + std::size_t(whole) * size, rest, cols - whole);
        float lane[16];
        STORE16(lane, sum);
        const float total = add_rest(sum_lanes(lane), rest, task.x + whole, cols - whole);
        task.out[row]     = task.bias ? total + task.bias[row] : total;
    }
}

template <DType T>
INLINE void float_gemv_of(const GemmTask& task) {
    (task.prefetch == Prefetch::l1 ? float_gemv<T, Prefetch::l1> : float_gemv<T, Prefetch::l2>)(task);
}

// The register tile, rows × tokens, with as many sums as the registers hold (row_block is a multiple of the rows), and the columns
// of a K block, whose tile of x stays in the L1.
struct RegisterTile {
    std::int64_t rows, tokens, k_block;
};
constexpr RegisterTile few = {FEW}, many = {MANY};

// The tokens are divided into tiles of about the same size.
INLINE std::int64_t tiles_of(std::int64_t n, const RegisterTile& tile) { return (n + tile.tokens - 1) / tile.tokens; }
INLINE std::int64_t token_tiles_body(std::int64_t n) { return tiles_of(n, n > few_tokens ? many : few); }
INLINE std::int64_t tile_begin(std::int64_t tile, std::int64_t n) { return tile * n / token_tiles_body(n); }

// Panel packing: tiles first .. last-1 of x [n × cols] in the order in which the microkernel reads them: by K block, then by tile,
// then by 16 columns, of all tokens of the tile. Columns beyond the last multiple of 16 are left out.
INLINE void pack_panels_body(const float* x, std::int64_t n, std::int64_t cols, float* out, std::int64_t first,
                             std::int64_t last) {
    const std::int64_t whole = cols / 16 * 16, width = n > few_tokens ? many.k_block : few.k_block;
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

// As many columns of a row as a vector has lanes.
template <DType T, class Vector>
INLINE void load_vector(const std::byte* p, Vector& out) {
    if constexpr (sizeof(Vector) == sizeof(f32x16) || T == DType::F32) {
        load_columns<T>(p, out);
    } else {
        u16x8 h;
        LOAD16(h, p);
        if constexpr (T == DType::F16) out = __builtin_convertvector((f16x8)h, Vector);
        else out = (Vector)(__builtin_convertvector(h, u32x8) << 16);
    }
}

// Microkernel: R rows, from `row` of the row block on, × N tokens over `length` columns, added to sums [N × row_block], or to zero if
// this is the row's beginning. Prefetches the weights `ahead` bytes further on, and for many tokens a part of the next tile's x.
// With registers of 8 lanes the two halves of the 16 lanes are computed one after the other.
template <DType T, RegisterTile Tile, int N>
INLINE void microkernel(const std::byte* const* rows, const float* x, std::int64_t length, std::int64_t row,
                        std::size_t ahead, bool begin, f32x16* sums) {
    constexpr int          R     = int(Tile.rows);
    constexpr std::size_t  size  = T == DType::F32 ? 4 : 2;
    constexpr std::int64_t lanes = sizeof(Lanes) / sizeof(float), part = (16 * R * N + row_block - 1) / row_block;
    const float*           next = x + N * length + row / R * length / 16 * part;
    for (std::int64_t half = 0; half < 16; half += lanes) {
        const auto lanes_of = [&](int r, int t) { return reinterpret_cast<float*>(sums + t * row_block + r) + half; };
        Lanes      sum[R][N];
        UNROLLED for (int r = 0; r < R; r++) UNROLLED for (int t = 0; t < N; t++) {
            sum[r][t] = Lanes{};
            if (!begin) LOAD16(sum[r][t], lanes_of(r, t));
        }
        const float* at = x + half;
        for (std::int64_t k = half; k < length; k += 16, at += 16 * N, next += part) {
            if (half == 0 && Tile.k_block == many.k_block) __builtin_prefetch(next);
            Lanes w[R];
            UNROLLED for (int r = 0; r < R; r++) {
                load_vector<T>(rows[r] + std::size_t(k) * size, w[r]);
                if (half == 0) __builtin_prefetch(rows[r] + std::size_t(k) * size + ahead);
            }
            UNROLLED for (int t = 0; t < N; t++) {
                Lanes a;
                LOAD16(a, at + 16 * t);
                UNROLLED for (int r = 0; r < R; r++) sum[r][t] = FMA(w[r], a, sum[r][t]);
            }
        }
        UNROLLED for (int r = 0; r < R; r++) UNROLLED for (int t = 0; t < N; t++) STORE16(lanes_of(r, t), sum[r][t]);
    }
}

template <DType T, RegisterTile Tile, int N>
INLINE void microkernel_of(std::int64_t n, const std::byte* const* rows, const float* x, std::int64_t length,
                           std::int64_t row, std::size_t ahead, bool begin, f32x16* sums) {
    if (n >= N) return microkernel<T, Tile, N>(rows, x, length, row, ahead, begin, sums);
    if constexpr (N > 1) microkernel_of<T, Tile, N - 1>(n, rows, x, length, row, ahead, begin, sums);
}

// A row block at p, columns k .. k + length - 1, × tiles of tokens first .. last-1.
template <DType T, RegisterTile Tile>
INLINE_PARTS void multiply_k_block(const GemmTask& task, const std::byte* p, std::size_t stride, std::int64_t rows,
                                   std::int64_t k, std::int64_t length, std::int64_t first, std::int64_t last,
                                   f32x16* sums) {
    const std::int64_t begin = tile_begin(first, task.m);
    for (std::int64_t tile = first; tile < last; tile++) {
        const std::int64_t t = tile_begin(tile, task.m), n = tile_begin(tile + 1, task.m) - t;
        for (std::int64_t row = 0; row < rows; row += Tile.rows) {
            const std::byte* at[Tile.rows]; // beyond the last row: the last row again
            for (std::int64_t r = 0; r < Tile.rows; r++) at[r] = p + std::size_t(std::min(row + r, rows - 1)) * stride;
            microkernel_of<T, Tile, Tile.tokens>(n, at, task.packed + k * task.m + t * length, length, row,
                                                 tile == 0 ? 9 * stride : 0, k == 0,
                                                 sums + (t - begin) * row_block + row);
        }
    }
}

// Epilogue, 16 rows at a time: adds the lanes, the columns beyond the last multiple of 16, and the bias.
INLINE void float_epilogue(const GemmTask& task, const f32x16* sums, std::int64_t row, std::int64_t rows,
                           std::int64_t first, std::int64_t last) {
    const TensorView&  w     = *task.weight;
    const std::int64_t whole = w.cols / 16 * 16, rest = w.cols - whole;
    for (std::int64_t t = first; t < last; t++, sums += row_block)
        for (std::int64_t i = 0; i < rows; i += 16) {
            const std::int64_t here = std::min<std::int64_t>(16, rows - i);
            float              total[16], last_columns[16];
            sum_lanes_of_16(sums + i, total);
            for (std::int64_t r = 0; rest > 0 && r < here; r++) {
                const std::size_t at =
                    std::size_t((row + i + r) * w.cols + whole); // only float types have such columns
                dequantize_inline(w.type, static_cast<const std::byte*>(w.data) + row_bytes(w.type, std::int64_t(at)),
                                  last_columns, rest);
                total[r] = add_rest(total[r], last_columns, task.x + t * w.cols + whole, rest);
            }
            for (std::int64_t r = 0; task.bias && r < here; r++) total[r] += task.bias[row + i + r];
            float* out = task.out + t * w.rows + row + i;
            if (here == 16) std::memcpy(out, total, sizeof total);
            else std::memcpy(out, total, std::size_t(here) * sizeof(float));
        }
}

// Blocked over rows and K: a panel of weights stays in the caches while the tiles of tokens are read one after the other.
template <RegisterTile Tile>
INLINE void float_gemm_blocks(const GemmTask& task) {
    const TensorView&      w       = *task.weight;
    constexpr std::int64_t at_once = token_block / Tile.tokens;
    const std::int64_t     tiles = tiles_of(task.m, Tile), whole = w.cols / 16 * 16;
    const std::size_t      stride = row_bytes(w.type, w.cols);
    auto*                  sums   = reinterpret_cast<f32x16*>(task.scratch);
    float*                 panel  = task.scratch + token_block * row_block * 16;
    for (std::int64_t row = task.first; row < task.last; row += row_block)
        for (std::int64_t first = 0; first < tiles; first += at_once) {
            const std::int64_t rows = std::min(row_block, task.last - row), last = std::min(tiles, first + at_once);
            std::int64_t       k = 0;
            do { // once even for rows shorter than 16, whose columns the epilogue adds
                const std::int64_t length = std::min(Tile.k_block, whole - k);
                const std::byte*   p =
                    static_cast<const std::byte*>(w.data) + std::size_t(row) * stride + row_bytes(w.type, k);
                switch (w.type) {
                    case DType::F16:
                        multiply_k_block<DType::F16, Tile>(task, p, stride, rows, k, length, first, last, sums);
                        break;
                    case DType::BF16:
                        multiply_k_block<DType::BF16, Tile>(task, p, stride, rows, k, length, first, last, sums);
                        break;
                    default:
                        if (w.type == DType::F32) {
                            multiply_k_block<DType::F32, Tile>(task, p, stride, rows, k, length, first, last, sums);
                            break;
                        }
                        for (std::int64_t r = 0; r < rows; r++)
                            widen_row<FUSED>(w.type, p + std::size_t(r) * stride, panel + r * Tile.k_block, length);
                        multiply_k_block<DType::F32, Tile>(task, reinterpret_cast<const std::byte*>(panel),
                                                           Tile.k_block * sizeof(float), rows, k, length, first, last,
                                                           sums);
                }
                k += Tile.k_block;
            } while (k < whole);
            float_epilogue(task, sums, row, rows, tile_begin(first, task.m), tile_begin(last, task.m));
        }
}

void float_gemm(const GemmTask& task) {
    const DType type = task.weight->type;
    if (task.m == 1 && type == DType::F16) return float_gemv_of<DType::F16>(task);
    if (task.m == 1 && type == DType::BF16) return float_gemv_of<DType::BF16>(task);
    if (task.m == 1 && type == DType::F32) return float_gemv_of<DType::F32>(task);
    if (task.m > few_tokens) float_gemm_blocks<many>(task);
    else float_gemm_blocks<few>(task);
}
