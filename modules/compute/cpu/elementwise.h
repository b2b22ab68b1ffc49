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
INLINE void store_f16_body(const float* x, std::uint16_t* out, std::int64_t n) {
    std::int64_t i = 0;
    for (; Wide && i + 16 <= n; i += 16) {
        f32x16 f;
        LOAD16(f, x + i);
        f16x16 h = __builtin_convertvector(f, f16x16);
        STORE16(out + i, h);
    }
    for (; i < n; i++) out[i] = f32_to_f16(x[i]);
}
