// Vectors of 16 lanes: reductions in a fixed order, exp, a 16 × 4 transpose of 32-bit words, conversion of a row to floats.

// The 16 lanes added pairwise, always in this order.
INLINE float sum_lanes(const float* lane) {
    float s8[8], s4[4];
    for (int i = 0; i < 8; i++) s8[i] = lane[i] + lane[i + 8];
    for (int i = 0; i < 4; i++) s4[i] = s8[i] + s8[i + 4];
    return (s4[0] + s4[2]) + (s4[1] + s4[3]);
}

// (The compiler's own reduction handles NaN lane by lane.)
INLINE float largest_lane(const f32x16& lanes) {
#define ROTATED(v, ...) __builtin_shufflevector(v, v, __VA_ARGS__)
    f32x16 v = lanes, other;
    other    = ROTATED(v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    v        = v > other ? v : other;
    other    = ROTATED(v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    v        = v > other ? v : other;
    other    = ROTATED(v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    v        = v > other ? v : other;
    return v[0] > v[1] ? v[0] : v[1];
#undef ROTATED
}

template <bool Fma>
INLINE float multiply_add(float a, float b, float c) {
    if constexpr (Fma) return __builtin_fmaf(a, b, c);
    else return float(double(a) * double(b) + double(c));
}

// out[i] = exp(in[i]) for 16 values; relative error below 2e-7. in may be out.
// exp(x) = 2^n · exp(r), n = round(x / ln 2), r in [-0.347, 0.347]: Taylor to the 7th power. NaN stays NaN.
template <bool Fma>
INLINE void exp16(const float* in, float* out) {
    f32x16 x;
    LOAD16(x, in);
    const i32x16 a_number = x == x;
    const f32x16 low = f32x16{} - 87.0f, high = f32x16{} + 88.0f;
    x        = __builtin_elementwise_min(__builtin_elementwise_max(x, low), high);
    f32x16 n = __builtin_elementwise_roundeven(x * 1.44269504f);
    f32x16 r = x - n * 0.693359375f; // ln 2 in two parts: the first is exact times n
    r        = r - n * -2.12194440e-4f;
    f32x16 p = f32x16{} + 1.0f / 5040;
    for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
        f32x16 term = f32x16{} + c;
        VECTOR_FMA(p, p, r, term);
    }
    i32x16 power = (__builtin_convertvector(n, i32x16) + 127) << 23;
    f32x16 scale;
    __builtin_memcpy(&scale, &power, sizeof scale);
    p *= scale;
    p = (f32x16)((i32x16)p | ~a_number); // all bits set: a NaN
    STORE16(out, p);
}

// Transposes 16 rows of 16 bytes: d[j], lane r = the j-th 4 bytes at p + r · stride.
INLINE void transpose(const std::byte* p, std::size_t stride, i32x16* d) {
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

// out[0 .. cols) = one row of any type as floats
template <bool Wide>
INLINE void widen_row(DType type, const std::byte* row, float* out, std::int64_t cols) {
    std::int64_t k = 0;
    if (Wide && type == DType::F16) { // there is an instruction for this
        for (; k + 16 <= cols; k += 16) {
            f16x16 h;
            LOAD16(h, row + 2 * k);
            f32x16 f = __builtin_convertvector(h, f32x16);
            STORE16(out + k, f);
        }
        row += 2 * k;
    }
    dequantize_inline(type, row, out + k, cols - k);
}

// Likewise a row of K or V; of codes with its scale.
template <bool Wide>
INLINE void widen_kv(DType type, const std::byte* row, const std::byte* scale_at, float* out, std::int64_t n) {
    if (!scale_at) return widen_row<Wide>(type, row, out, n);
    // e4m3 → fp16: the bits of a number that is 256 times smaller.
    float factor;
    __builtin_memcpy(&factor, scale_at, sizeof factor);
    if (type == DType::F8) factor *= 256;
    const auto numbers = [&](const u8x16& codes, f32x16* v) __attribute__((always_inline)) {
        if (type == DType::I8) {
            *v = __builtin_convertvector((i8x16)codes, f32x16);
        } else if constexpr (Wide) {
            const u16x16 wide = __builtin_convertvector(codes, u16x16);
            *v                = __builtin_convertvector((f16x16)((wide & 0x80) << 8 | (wide & 0x7f) << 7), f32x16);
        } else {
            const u32x16 wide = __builtin_convertvector(codes, u32x16);
            *v                = (f32x16)((wide & 0x80) << 24 | (wide & 0x7f) << 20) * 0x1p112f;
        }
        *v *= factor;
    };
    std::int64_t i = 0;
    u8x16        codes{};
    f32x16       v;
    for (; i + 16 <= n; i += 16) {
        LOAD16(codes, row + i);
        numbers(codes, &v);
        STORE16(out + i, v);
    }
    if (i == n) return;
    codes = u8x16{};
    __builtin_memcpy(&codes, row + i, std::size_t(n - i));
    numbers(codes, &v);
    __builtin_memcpy(out + i, &v, std::size_t(n - i) * sizeof(float));
}
