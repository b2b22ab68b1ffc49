// RMSNorm with residual, SwiGLU, addition, float → fp16.

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
    for (i = 0; i < n; i++) out[i] = x[i] * scale * weight[i];
}

template <bool Fma>
INLINE void silu_mul_body(float* gate, const float* up, std::int64_t n) {
    for (std::int64_t i = 0; i < n; i += 16) {
        const auto bytes = std::size_t(std::min<std::int64_t>(16, n - i)) * sizeof(float);
        f32x16     g{}, u{}, e;
        if (bytes == sizeof g) { // of a size the compiler knows
            LOAD16(g, gate + i);
            LOAD16(u, up + i);
        } else {
            __builtin_memcpy(&g, gate + i, bytes);
            __builtin_memcpy(&u, up + i, bytes);
        }
        float negative[16];
        e = -g;
        STORE16(negative, e);
        exp16<Fma>(negative, negative);
        LOAD16(e, negative);
        g = g / (1 + e) * u;
        if (bytes == sizeof g) STORE16(gate + i, g);
        else __builtin_memcpy(gate + i, &g, bytes);
    }
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
