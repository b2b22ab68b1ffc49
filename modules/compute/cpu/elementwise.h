// RMSNorm with residual, activations, addition, float → fp16.

template <bool Fma>
INLINE void norm_body(const float* x, float* residual, const float* weight, float eps, float* out, std::int64_t n) {
    if (residual) {
        for (std::int64_t i = 0; i < n; i++) residual[i] += x[i];
        x = residual;
    }
    f32x16       sum{};
    std::int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        f32x16 v;
        LOAD16(v, x + i);
        VECTOR_FMA(sum, v, v, sum);
    }
    float lane[16];
    STORE16(lane, sum);
    float total = sum_lanes(lane);
    for (; i < n; i++) total = multiply_add<Fma>(x[i], x[i], total);
    const float scale = 1 / std::sqrt(total / float(n) + eps);
    if (weight)
        for (i = 0; i < n; i++) out[i] = x[i] * scale * weight[i];
    else
        for (i = 0; i < n; i++) out[i] = x[i] * scale;
}

// 16 values of a vector's function of one or two vectors, over n of them. `f(g, u)` changes g.
template <class Function>
INLINE void for_each_16(float* gate, const float* up, std::int64_t n, const Function& f) {
    for (std::int64_t i = 0; i < n; i += 16) {
        const auto bytes = std::size_t(std::min<std::int64_t>(16, n - i)) * sizeof(float);
        f32x16     g{}, u = f32x16{} + 1.0f;
        if (bytes == sizeof g) { // of a size the compiler knows
            LOAD16(g, gate + i);
            if (up) LOAD16(u, up + i);
        } else {
            __builtin_memcpy(&g, gate + i, bytes);
            if (up) __builtin_memcpy(&u, up + i, bytes);
        }
        f(&g, &u);
        if (bytes == sizeof g) STORE16(gate + i, g);
        else __builtin_memcpy(gate + i, &g, bytes);
    }
}

// *g = *g · sigmoid(*x)
template <bool Fma>
INLINE void times_sigmoid(f32x16* g, const f32x16* x) {
    float        negative[16];
    const f32x16 n = -*x;
    f32x16       e;
    STORE16(negative, n);
    exp16<Fma>(negative, negative);
    LOAD16(e, negative);
    *g = *g / (1 + e);
}

template <bool Fma>
INLINE void activate_body(Activation activation, float* gate, const float* up, std::int64_t n) {
    switch (activation) {
        case Activation::silu:
            for_each_16(gate, up, n, [](f32x16* g, const f32x16* u) __attribute__((always_inline)) {
                const f32x16 x = *g;
                times_sigmoid<Fma>(g, &x);
                *g *= *u;
            });
            break;
        case Activation::gelu_tanh: // (1 + tanh(y)) / 2 = sigmoid(2y)
            for_each_16(gate, up, n, [](f32x16* g, const f32x16* u) __attribute__((always_inline)) {
                const f32x16 x = *g, y = 2 * 0.7978845608028654f * (x + 0.044715f * x * x * x);
                times_sigmoid<Fma>(g, &y);
                *g *= *u;
            });
            break;
        case Activation::gelu_erf:
            for (std::int64_t i = 0; i < n; i++) {
                const float x = gate[i];
                gate[i]       = 0.5f * x * (1 + std::erf(x * 0.70710678118654752f)) * (up ? up[i] : 1.0f);
            }
            break;
        case Activation::relu:
            for (std::int64_t i = 0; i < n; i++) // a NaN stays one
                gate[i] = (gate[i] < 0 ? 0.0f : gate[i]) * (up ? up[i] : 1.0f);
            break;
        case Activation::relu_squared:
            for (std::int64_t i = 0; i < n; i++) {
                const float x = gate[i] < 0 ? 0.0f : gate[i];
                gate[i]       = x * x * (up ? up[i] : 1.0f);
            }
            break;
        case Activation::sigmoid:
            for_each_16(gate, up, n, [](f32x16* g, const f32x16* u) __attribute__((always_inline)) {
                const f32x16 x = *g;
                *g             = *u;
                times_sigmoid<Fma>(g, &x);
            });
            break;
        case Activation::clamped_swiglu:
            for_each_16(gate, up, n, [](f32x16* g, const f32x16* u) __attribute__((always_inline)) {
                const f32x16 limit = f32x16{} + 7.0f;
                f32x16       x = *g, y = *u;
                x              = x > limit ? limit : x; // not min(): a NaN stays one
                y              = y > limit ? limit : y;
                y              = y < -limit ? -limit : y;
                const f32x16 z = 1.702f * x;
                times_sigmoid<Fma>(&x, &z);
                *g = x * (y + 1);
            });
            break;
    }
}

// cap · tanh(x / cap), with tanh(y) = 1 - 2 / (exp(2y) + 1)
template <bool Fma>
INLINE void softcap16(f32x16* x, float cap) {
    float        twice[16];
    const f32x16 y = *x * (2 / cap);
    f32x16       e;
    STORE16(twice, y);
    exp16<Fma>(twice, twice);
    LOAD16(e, twice);
    *x = cap * (1 - 2 / (e + 1));
}

template <bool Fma>
INLINE void softcap_body(float* x, float cap, std::int64_t n) {
    for_each_16(x, nullptr, n,
                [cap](f32x16* v, const f32x16*) __attribute__((always_inline)) { softcap16<Fma>(v, cap); });
}

INLINE void add_body(float* x, const float* y, std::int64_t n) {
    for (std::int64_t i = 0; i < n; i++) x[i] += y[i];
}

template <bool Wide>
INLINE void store_f16_body(const float* x, std::byte* out, std::int64_t n) {
    std::int64_t i = 0;
    for (; Wide && i + 16 <= n; i += 16) {
        f32x16 f;
        LOAD16(f, x + i);
        f16x16 h = __builtin_convertvector(f, f16x16);
        STORE16(out + 2 * i, h);
    }
    for (; i < n; i++) {
        const std::uint16_t h = f32_to_f16(x[i]);
        __builtin_memcpy(out + 2 * i, &h, sizeof h);
    }
}

// 16 numbers up to 448 → e4m3, rounded to nearest, ties to even: sign, 4 bits of exponent (bias 7), 3 of mantissa. Below 2^-6 the code counts
// 512ths.
INLINE void round_to_e4m3(const f32x16* x, u8x16* codes) {
    const u32x16 bits = (u32x16)*x, magnitude = bits & 0x7fffffff;
    const u32x16 normal = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - ((127 - 7) << 3);
    const f32x16 small  = __builtin_elementwise_roundeven((f32x16)magnitude * 512.0f);
    const u32x16 few    = (u32x16) __builtin_convertvector(__builtin_elementwise_min(small, f32x16{} + 8.0f), i32x16);
    const u32x16 is_few = (u32x16)((i32x16)magnitude < 0x3c800000); // 2^-6
    const u32x16 all    = (is_few & few) | (~is_few & normal) | (bits >> 24 & 0x80);
    *codes              = __builtin_convertvector(all, u8x16);
}

// The largest magnitude becomes the largest code: 127, or 448 as e4m3.
INLINE void store_codes(const float* x, DType type, std::byte* out, std::byte* scale_out, std::int64_t n) {
    std::int32_t largest = 0; // as bits, which are ordered like the magnitudes, NaN above infinity
    for (std::int64_t i = 0; i < n; i++) largest = std::max(largest, std::bit_cast<std::int32_t>(x[i]) & 0x7fffffff);
    const float most = std::bit_cast<float>(largest), top = type == DType::I8 ? 127.0f : 448.0f;
    const bool  usual = largest < 0x7f800000 && most >= 1e-30f;
    const float scale = usual ? most / top : most < 1e-30f ? 0.0f : std::numeric_limits<float>::quiet_NaN();
    __builtin_memcpy(scale_out, &scale, sizeof scale);
    if (!usual) {
        std::memset(out, 0, std::size_t(n));
        return;
    }
    const float inverse = top / most;
    for (std::int64_t i = 0; i < n; i += 16) {
        const auto count = std::size_t(std::min<std::int64_t>(16, n - i));
        f32x16     v{};
        u8x16      codes;
        if (count == 16) LOAD16(v, x + i);
        else __builtin_memcpy(&v, x + i, count * sizeof(float));
        v *= inverse;
        if (type == DType::I8) {
            const i32x16 whole = __builtin_convertvector(__builtin_elementwise_roundeven(v), i32x16);
            codes              = (u8x16) __builtin_convertvector(whole, i8x16);
        } else {
            round_to_e4m3(&v, &codes);
        }
        if (count == 16) STORE16(out + i, codes);
        else __builtin_memcpy(out + i, &codes, count);
    }
}

template <bool Wide>
INLINE void store_kv_body(const float* x, DType type, std::byte* out, std::byte* scale_out, std::int64_t n) {
    switch (type) {
        case DType::F16: store_f16_body<Wide>(x, out, n); break;
        case DType::BF16:
            for (std::int64_t i = 0; i < n; i++) {
                const std::uint16_t b = f32_to_bf16(x[i]);
                __builtin_memcpy(out + 2 * i, &b, sizeof b);
            }
            break;
        case DType::I8:
        case DType::F8: store_codes(x, type, out, scale_out, n); break;
        default: std::memcpy(out, x, std::size_t(n) * sizeof(float));
    }
}

// log2(size) steps of sums and differences of numbers that are 1, 2, 4 ... apart.
INLINE void rotate_body(float* x, std::int64_t n, int size) {
    if (size == 1) return;
    const float factor = 1 / std::sqrt(float(size));
    for_each_16(x, nullptr, n, [&](f32x16* v, const f32x16*) __attribute__((always_inline)) {
        const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#define SUMS(apart, ...)                                                                         \
    if (size > (apart)) {                                                                        \
        const f32x16 other = __builtin_shufflevector(*v, *v, __VA_ARGS__);                       \
        const i32x16 minus = ((lane & (apart)) != 0) & std::numeric_limits<std::int32_t>::min(); \
        *v                 = other + (f32x16)((i32x16) * v ^ minus);                             \
    }
        SUMS(1, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14)
        SUMS(2, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)
        SUMS(4, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)
        SUMS(8, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)
#undef SUMS
        *v *= factor;
    });
    for (int apart = 16; apart < size; apart *= 2)
        for (std::int64_t i = 0; i < n; i += 16) {
            if (i & apart) continue;
            f32x16 a, b;
            LOAD16(a, x + i);
            LOAD16(b, x + i + apart);
            const f32x16 sum = a + b, difference = a - b;
            STORE16(x + i, sum);
            STORE16(x + i + apart, difference);
        }
}
