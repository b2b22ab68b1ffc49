// The searches of quire.tools.quantize.search. This file is included once for each instruction set, in a namespace and with a target
// attribute of its own.

INLINE float sum(const F8& v) { return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7])); }

// N elements and their weights.
template <int N>
struct Cells {
    static constexpr int n = N / 8;
    F8                   x[n], w[n];
};

template <int N>
INLINE void load(const float* x, const float* weights, Cells<N>& to) {
    for (int i = 0; i < Cells<N>::n; i++) {
        __builtin_memcpy(&to.x[i], x + 8 * i, 32);
        if (weights) __builtin_memcpy(&to.w[i], weights + 8 * i, 32);
        else to.w[i] = F8{} + 1;
    }
    if (!weights) return;
    F8 all{};
    for (int i = 0; i < Cells<N>::n; i++) all += to.w[i];
    if (sum(all) > 0) return;
    for (int i = 0; i < Cells<N>::n; i++) to.w[i] = F8{} + 1; // nothing is known about them
}

template <int N>
INLINE void range(const Cells<N>& c, float& low, float& high) {
    F8 a = c.x[0], b = c.x[0];
    for (int i = 1; i < Cells<N>::n; i++)
        a = __builtin_elementwise_min(a, c.x[i]), b = __builtin_elementwise_max(b, c.x[i]);
    low = a[0], high = b[0];
    for (int k = 1; k < 8; k++) low = std::min(low, a[k]), high = std::max(high, b[k]);
}

// -- the levels of elements: nearest(v) is the level nearest to v

// The integers from low to high. Adding 1.5 · 2^23 rounds to an integer.
struct Integers {
    float low, high;

    INLINE void nearest(const F8& v, F8& level) const {
        const F8 clamped = __builtin_elementwise_min(__builtin_elementwise_max(v, F8{} + low), F8{} + high);
        level            = (clamped + 12582912.0f) - 12582912.0f;
    }
};

// The 16 values of IQ4: from the lowest up, a step for each middle between two values that v is above of.
struct Iq4Values {
    static constexpr float low = iq4_values.front(), high = iq4_values.back();

    INLINE void nearest(const F8& v, F8& level) const {
        level = F8{} + low;
        for (std::size_t i = 1; i < 16; i++) {
            const I8 above = v > (iq4_values[i - 1] + iq4_values[i]) / 2;
            level += (F8)(above & (I8)(F8{} + (iq4_values[i] - iq4_values[i - 1])));
        }
    }
};

// -- x = scale · level

// Σ w x q and Σ w q², for the levels q nearest to x · inverse.
struct Fit {
    float xq = 0, qq = 0;
};
template <int N, class Levels>
INLINE void fit(const Cells<N>& c, const Levels& levels, float inverse, Fit& to) {
    F8 xq{}, qq{};
    for (int i = 0; i < Cells<N>::n; i++) {
        F8 q;
        levels.nearest(c.x[i] * inverse, q);
        const F8 wq = c.w[i] * q;
        xq += wq * c.x[i];
        qq += wq * q;
    }
    to = {sum(xq), sum(qq)};
}

// Σ w (x - scale · q)², for the nearest levels.
template <int N, class Levels>
INLINE float miss(const Cells<N>& c, const Levels& levels, float scale) {
    const float inverse = scale != 0 ? 1 / scale : 0;
    F8          all{};
    for (int i = 0; i < Cells<N>::n; i++) {
        F8 q;
        levels.nearest(c.x[i] * inverse, q);
        const F8 d = c.x[i] - q * scale;
        all += c.w[i] * d * d;
    }
    return sum(all);
}

// The best scale found; 0 for zeros. The sum of squares that a fit explains is xq² / qq.
template <int N, class Levels>
INLINE float best_scale(const Cells<N>& c, const Levels& levels) {
    float low = 0, high = 0;
    range(c, low, high);
    const float most = -low > high ? low : high;
    if (std::abs(most) < 1e-30f) return 0;
    float      best = 0, explained = 0;
    const auto attempt = [&](float inverse) __attribute__((always_inline)) {
        Fit f;
        fit(c, levels, inverse, f);
        if (f.qq <= 0 || f.xq * f.xq <= explained * f.qq * 1.000001f) return false; // of equals the first
        explained = f.xq * f.xq / f.qq;
        best      = f.xq / f.qq;
        return true;
    };
    // the largest value becomes about the lowest or about the highest level
    const float step = levels.high - levels.low > 100 ? 1.3f : 0.1f;
    for (int i = 0; i < 24; i++) {
        const float by = step * float(i % 2 ? -(i / 2 + 1) : i / 2); // in turns to both sides, outwards
        attempt((levels.low + by) / most);
        attempt((levels.high - by) / most);
    }
    for (int i = 0; i < 4 && best != 0; i++)
        if (!attempt(1 / best)) break;
    return best;
}

float to_half(float v) { return f16_to_f32(f32_to_f16(v)); }

// -- x = scale · level - min, level 0 … most

struct Affine {
    float scale = 0, min = 0;
};

template <int N>
INLINE float miss(const Cells<N>& c, float most, const Affine& a) {
    const float inverse = a.scale != 0 ? 1 / a.scale : 0;
    F8          all{};
    for (int i = 0; i < Cells<N>::n; i++) {
        F8 q;
        Integers{0, most}.nearest((c.x[i] + a.min) * inverse, q);
        const F8 d = c.x[i] - (q * a.scale - a.min);
        all += c.w[i] * d * d;
    }
    return sum(all);
}

// Least squares for the levels nearest under `a`. The minimum is not negative unless any_min.
template <int N>
INLINE bool refit(const Cells<N>& c, float most, bool any_min, const Affine& a, Affine& to) {
    const float inverse = 1 / a.scale;
    F8          w{}, x{}, q{}, xq{}, qq{};
    for (int i = 0; i < Cells<N>::n; i++) {
        F8 level;
        Integers{0, most}.nearest((c.x[i] + a.min) * inverse, level);
        const F8 wq = c.w[i] * level;
        w += c.w[i];
        x += c.w[i] * c.x[i];
        q += wq;
        xq += wq * c.x[i];
        qq += wq * level;
    }
    const float W = sum(w), X = sum(x), Q = sum(q), XQ = sum(xq), QQ = sum(qq), det = W * QQ - Q * Q;
    if (det <= 0) return false;
    to = {(W * XQ - Q * X) / det, (Q * XQ - QQ * X) / det};
    if (to.min < 0 && !any_min) to = {QQ > 0 ? XQ / QQ : 0, 0};
    return to.scale > 0 && std::isfinite(to.scale);
}

template <int N>
INLINE Affine best_affine(const Cells<N>& c, float most, bool any_min) {
    float low = 0, high = 0;
    range(c, low, high);
    if (!any_min) low = std::min(low, 0.0f);
    if (high - low < 1e-30f) return {0, -low};
    Affine     best{(high - low) / most, -low};
    float      error   = miss(c, most, best);
    const auto attempt = [&](const Affine& from) __attribute__((always_inline)) {
        Affine a;
        if (!refit(c, most, any_min, from, a)) return false;
        const float e = miss(c, most, a);
        if (!(e < error)) return false;
        error = e;
        best  = a;
        return true;
    };
    // narrower ranges cut off the outermost values: at one end, or at both alike
    const float width = high - low;
    for (int i = -4; i <= 10; i++) {
        const float scale = width / (most + 0.1f * float(i));
        attempt({scale, -low});
        attempt({scale, (scale * most - low - high) / 2});
        if (i > 0 || any_min) attempt({scale, scale * most - high});
    }
    for (int i = 1; i <= 6 && most <= 3; i++) { // few levels: much is cut off
        const float cut = width * 0.05f * float(i);
        attempt({(width - 2 * cut) / most, -(low + cut)});
        attempt({(width - cut) / most, -low});
    }
    for (int i = 0; i < 4; i++)
        if (!attempt(best)) break;
    return best;
}

// -- superblocks of 256

// For each of 256 / N parts a scale of `d` times an integer from low to high.
template <int N>
struct ScaledParts {
    static constexpr int n = 256 / N;
    float                d = 0;
    int                  scale[n]{};
};

template <int N, class Levels>
INLINE void best_parts(const Cells<N>* parts, const Levels& levels, int low, int high, ScaledParts<N>& best) {
    constexpr int n = ScaledParts<N>::n;
    float         alone[n], most = 0;
    for (int p = 0; p < n; p++) {
        alone[p] = best_scale(parts[p], levels);
        if (std::abs(alone[p]) > std::abs(most)) most = alone[p];
    }
    best = {};
    if (most == 0) return;
    float least = std::numeric_limits<float>::infinity();
    for (int start = 0; start < 3; start++) {
        float d = to_half(most / (float(low) + 0.5f * float(start)));
        for (int turn = 0; turn < 3 && d != 0 && std::isfinite(d); turn++) {
            ScaledParts<N> now;
            now.d       = d;
            float error = 0, xq = 0, qq = 0;
            for (int p = 0; p < n; p++) {
                if (alone[p] == 0) continue; // zeros
                const int near = int(std::clamp(std::nearbyint(alone[p] / d), float(low), float(high)));
                float     part = std::numeric_limits<float>::infinity();
                for (int s = std::max(near - 1, low); s <= std::min(near + 1, high); s++)
                    if (const float e = miss(parts[p], levels, d * float(s)); e < part) part = e, now.scale[p] = s;
                error += part;
                if (now.scale[p] == 0) continue;
                Fit         f;
                const float s = float(now.scale[p]);
                fit(parts[p], levels, 1 / (d * s), f);
                xq += s * f.xq;
                qq += s * s * f.qq;
            }
            if (error < least) least = error, best = now;
            const float next = qq > 0 ? to_half(xq / qq) : d;
            if (next == d) break;
            d = next;
        }
    }
}

// For each of 256 / N parts a scale and a minimum: integers 0 … most times d and dmin.
template <int N>
struct AffineParts {
    static constexpr int n = 256 / N;
    float                d = 0, dmin = 0;
    int                  scale[n]{}, min[n]{};

    INLINE Affine at(int p) const { return {d * float(scale[p]), dmin * float(min[p])}; }
};

template <int N>
INLINE void best_parts(const Cells<N>* parts, float levels, int most, AffineParts<N>& best) {
    constexpr int n = AffineParts<N>::n;
    Affine        alone[n];
    float         top_scale = 0, top_min = 0;
    for (int p = 0; p < n; p++) {
        alone[p]  = best_affine(parts[p], levels, false);
        top_scale = std::max(top_scale, alone[p].scale);
        top_min   = std::max(top_min, alone[p].min);
    }
    best        = {};
    float least = std::numeric_limits<float>::infinity();
    for (int start = 0; start < 2; start++) {
        float d = to_half(top_scale / (float(most) + 0.4f * float(start)));
        float m = to_half(top_min / (float(most) + 0.4f * float(start)));
        for (int turn = 0; turn < 3; turn++) {
            AffineParts<N> now;
            now.d = d, now.dmin = m;
            float error = 0, aa = 0, ab = 0, bb = 0, xa = 0, xb = 0;
            for (int p = 0; p < n; p++) {
                const auto near = [&](float v, float unit) {
                    return unit > 0 ? int(std::min(std::nearbyint(v / unit), float(most))) : 0;
                };
                const int s0   = near(alone[p].scale, d);
                float     part = std::numeric_limits<float>::infinity();
                for (int s = std::max(s0 - 1, 0); s <= std::min(s0 + 1, most); s++) {
                    const int m0 = near(alone[p].min, m);
                    for (int k = std::max(m0 - 1, 0); k <= std::min(m0 + 1, most); k++)
                        if (const float e = miss(parts[p], levels, {d * float(s), m * float(k)}); e < part)
                            part = e, now.scale[p] = s, now.min[p] = k;
                }
                error += part;
                // x ≈ d · A - m · B with A = scale · level, B = min
                const Affine a       = now.at(p);
                const float  inverse = a.scale != 0 ? 1 / a.scale : 0, s = float(now.scale[p]), k = float(now.min[p]);
                F8           w{}, x{}, q{}, xq{}, qq{};
                for (int i = 0; i < Cells<N>::n; i++) {
                    F8 level;
                    Integers{0, levels}.nearest((parts[p].x[i] + a.min) * inverse, level);
                    const F8 wq = parts[p].w[i] * level;
                    w += parts[p].w[i];
                    x += parts[p].w[i] * parts[p].x[i];
                    q += wq;
                    xq += wq * parts[p].x[i];
                    qq += wq * level;
                }
                aa += s * s * sum(qq);
                ab += s * k * sum(q);
                bb += k * k * sum(w);
                xa += s * sum(xq);
                xb += k * sum(x);
            }
            if (error < least) least = error, best = now;
            const float det = aa * bb - ab * ab;
            float       d2 = d, m2 = m;
            if (det > 0) d2 = (bb * xa - ab * xb) / det, m2 = (ab * xa - aa * xb) / det;
            else if (aa > 0) d2 = xa / aa;
            if (!(d2 > 0) || !(m2 >= 0)) break;
            d2 = to_half(d2), m2 = to_half(m2);
            if ((d2 == d && m2 == m) || !std::isfinite(d2) || !std::isfinite(m2)) break;
            d = d2, m = m2;
        }
    }
}

// The levels of a part, as integers.
template <int N, class Levels>
INLINE void levels_of(const Cells<N>& c, const Levels& levels, const Affine& a, int* q) {
    const float inverse = a.scale != 0 ? 1 / a.scale : 0;
    for (int i = 0; i < Cells<N>::n; i++) {
        F8 level;
        levels.nearest((c.x[i] + a.min) * inverse, level);
        for (int k = 0; k < 8; k++) q[8 * i + k] = int(level[k]);
    }
}

// -- the blocks; their layouts: quire.model_file.quants.blocks

void put_half(Out out, float v) {
    const std::uint16_t h = f32_to_f16(v);
    std::memcpy(out, &h, 2);
}

int iq4_index(int value) {
    int i = 0;
    while (int(iq4_values[std::size_t(i)]) != value) i++;
    return i;
}

// 32 levels 0 … 31 as nibbles, and the fifth bits before them.
void put_32(Out out, const int* q, bool fifth) {
    std::uint32_t high = 0;
    for (int i = 0; i < 32; i++) high |= (unsigned(q[i]) >> 4 & 1) << i;
    if (fifth) {
        std::memcpy(out, &high, 4);
        out += 4;
    }
    for (int i = 0; i < 16; i++) out[i] = std::uint8_t((q[i] & 15) | (q[i + 16] & 15) << 4);
}

// Q4_0, Q5_0: levels -half … half - 1. IQ4_NL.
template <class Levels>
INLINE void one_scale(const float* x, const float* w, const Levels& levels, float& scale, int* q) {
    Cells<32> c;
    load(x, w, c);
    scale = to_half(best_scale(c, levels));
    levels_of(c, levels, {scale, 0}, q);
}

void rows_symmetric(const float* x, const float* w, Out out, std::int64_t n, int half) {
    for (std::int64_t i = 0; i < n; i += 32, out += half == 16 ? 22 : 18) {
        float scale;
        int   q[32];
        one_scale(x + i, w ? w + i : nullptr, Integers{float(-half), float(half - 1)}, scale, q);
        for (int& v : q) v += half;
        put_half(out, scale);
        put_32(out + 2, q, half == 16);
    }
}

void rows_iq4_nl(const float* x, const float* w, Out out, std::int64_t n) {
    for (std::int64_t i = 0; i < n; i += 32, out += 18) {
        float scale;
        int   q[32];
        one_scale(x + i, w ? w + i : nullptr, Iq4Values{}, scale, q);
        for (int& v : q) v = iq4_index(v);
        put_half(out, scale);
        put_32(out + 2, q, false);
    }
}

// Q4_1, Q5_1
void rows_range(const float* x, const float* w, Out out, std::int64_t n, int most) {
    for (std::int64_t i = 0; i < n; i += 32, out += most == 31 ? 24 : 20) {
        Cells<32> c;
        load(x + i, w ? w + i : nullptr, c);
        const Affine exact = best_affine(c, float(most), true);
        Affine       a{to_half(exact.scale), to_half(exact.min)};
        float        error   = miss(c, float(most), a);
        const auto   attempt = [&](float scale, float min) __attribute__((always_inline)) {
            const Affine other{to_half(scale), to_half(min)};
            const float  e = miss(c, float(most), other);
            if (e < error) error = e, a = other;
        };
        for (int up = -1; up <= 1; up++) // the other number may mend the error that rounding to fp16 makes in one
            for (int k = -1; k <= 1; k++)
                attempt(exact.scale * (1 + 0x1p-11f * float(k)), exact.min * (1 + 0x1p-11f * float(up)));
        attempt(-exact.min / float(most), 0); // equal values
        int q[32];
        levels_of(c, Integers{0, float(most)}, a, q);
        put_half(out, a.scale);
        put_half(out + 2, -a.min);
        put_32(out + 4, q, most == 31);
    }
}

template <int N>
INLINE void load_parts(const float* x, const float* w, Cells<N>* parts) {
    for (int p = 0; p < 256 / N; p++) load(x + p * N, w ? w + p * N : nullptr, parts[p]);
}

// Two bits of each element, as in Q2_K and Q3_K.
void put_twos(Out out, const int* q) {
    for (int byte = 0; byte < 64; byte++) {
        const int* at = q + byte / 32 * 128 + byte % 32;
        out[byte]     = std::uint8_t((at[0] & 3) | (at[32] & 3) << 2 | (at[64] & 3) << 4 | (at[96] & 3) << 6);
    }
}

void rows_q2_k(const float* x, const float* w, Out out, std::int64_t n) {
    for (std::int64_t i = 0; i < n; i += 256, out += 84) {
        Cells<16>       c[16];
        AffineParts<16> best;
        load_parts(x + i, w ? w + i : nullptr, c);
        best_parts(c, 3, 15, best);
        int q[256];
        for (int p = 0; p < 16; p++) {
            levels_of(c[p], Integers{0, 3}, best.at(p), q + 16 * p);
            out[p] = std::uint8_t(best.scale[p] | best.min[p] << 4);
        }
        put_twos(out + 16, q);
        put_half(out + 80, best.d);
        put_half(out + 82, best.dmin);
    }
}

void rows_q3_k(const float* x, const float* w, Out out, std::int64_t n) {
    for (std::int64_t i = 0; i < n; i += 256, out += 110) {
        Cells<16>       c[16];
        ScaledParts<16> best;
        load_parts(x + i, w ? w + i : nullptr, c);
        best_parts(c, Integers{-4, 3}, -32, 31, best);
        int q[256];
        std::memset(out, 0, 110);
        for (int p = 0; p < 16; p++) {
            levels_of(c[p], Integers{-4, 3}, {best.d * float(best.scale[p]), 0}, q + 16 * p);
            const int s = best.scale[p] + 32;
            out[96 + p % 8] |= std::uint8_t((s & 15) << (p / 8 * 4));
            out[104 + p % 4] |= std::uint8_t(s >> 4 << (p / 4 * 2));
        }
        for (int k = 0; k < 256; k++) {
            q[k] += 4;
            out[k % 32] |= std::uint8_t(q[k] >> 2 << (k / 32));
        }
        put_twos(out + 32, q);
        put_half(out + 108, best.d);
    }
}

// Q4_K, and with fifth bits Q5_K
void rows_q45_k(const float* x, const float* w, Out out, std::int64_t n, bool fifth) {
    for (std::int64_t i = 0; i < n; i += 256, out += fifth ? 176 : 144) {
        Cells<32>       c[8];
        AffineParts<32> best;
        const float     most = fifth ? 31 : 15;
        load_parts(x + i, w ? w + i : nullptr, c);
        best_parts(c, most, 63, best);
        int q[256];
        std::memset(out, 0, 16 + 32);
        put_half(out, best.d);
        put_half(out + 2, best.dmin);
        for (int p = 0; p < 8; p++) {
            levels_of(c[p], Integers{0, most}, best.at(p), q + 32 * p);
            const int s = best.scale[p], m = best.min[p];
            if (p < 4) {
                out[4 + p] |= std::uint8_t(s);
                out[8 + p] |= std::uint8_t(m);
            } else {
                out[8 + p] = std::uint8_t((s & 15) | (m & 15) << 4);
                out[p] |= std::uint8_t(s >> 4 << 6);
                out[4 + p] |= std::uint8_t(m >> 4 << 6);
            }
        }
        if (fifth)
            for (int k = 0; k < 256; k++) out[16 + k % 32] |= std::uint8_t((q[k] >> 4) << (k / 32));
        Out low = out + (fifth ? 48 : 16);
        for (int byte = 0; byte < 128; byte++) {
            const int* at = q + byte / 32 * 64 + byte % 32;
            low[byte]     = std::uint8_t((at[0] & 15) | (at[32] & 15) << 4);
        }
    }
}

void rows_q6_k(const float* x, const float* w, Out out, std::int64_t n) {
    for (std::int64_t i = 0; i < n; i += 256, out += 210) {
        Cells<16>       c[16];
        ScaledParts<16> best;
        load_parts(x + i, w ? w + i : nullptr, c);
        best_parts(c, Integers{-32, 31}, -128, 127, best);
        int q[256];
        for (int p = 0; p < 16; p++) {
            levels_of(c[p], Integers{-32, 31}, {best.d * float(best.scale[p]), 0}, q + 16 * p);
            out[192 + p] = std::uint8_t(best.scale[p]);
        }
        for (int& v : q) v += 32;
        for (int half = 0; half < 2; half++) {
            const int* at = q + half * 128;
            for (int l = 0; l < 32; l++) {
                out[half * 64 + l]      = std::uint8_t((at[l] & 15) | (at[l + 64] & 15) << 4);
                out[half * 64 + 32 + l] = std::uint8_t((at[l + 32] & 15) | (at[l + 96] & 15) << 4);
                out[128 + half * 32 + l] =
                    std::uint8_t(at[l] >> 4 | at[l + 32] >> 4 << 2 | at[l + 64] >> 4 << 4 | at[l + 96] >> 4 << 6);
            }
        }
        put_half(out + 208, best.d);
    }
}

void rows_iq4_xs(const float* x, const float* w, Out out, std::int64_t n) {
    for (std::int64_t i = 0; i < n; i += 256, out += 136) {
        Cells<32>       c[8];
        ScaledParts<32> best;
        load_parts(x + i, w ? w + i : nullptr, c);
        best_parts(c, Iq4Values{}, -32, 31, best);
        std::memset(out, 0, 8);
        put_half(out, best.d);
        for (int p = 0; p < 8; p++) {
            int q[32];
            levels_of(c[p], Iq4Values{}, {best.d * float(best.scale[p]), 0}, q);
            for (int& v : q) v = iq4_index(v);
            put_32(out + 8 + 16 * p, q, false);
            const int s = best.scale[p] + 32;
            out[4 + p / 2] |= std::uint8_t((s & 15) << (p % 2 * 4));
            out[2 + p / 4] |= std::uint8_t(s >> 4 << (p % 4 * 2));
        }
    }
}

void quantize_rows(DType type, const float* x, const float* w, std::byte* to, std::int64_t n) {
    Out out = reinterpret_cast<Out>(to);
    switch (type) {
        case DType::Q4_0: return rows_symmetric(x, w, out, n, 8);
        case DType::Q5_0: return rows_symmetric(x, w, out, n, 16);
        case DType::Q4_1: return rows_range(x, w, out, n, 15);
        case DType::Q5_1: return rows_range(x, w, out, n, 31);
        case DType::Q2_K: return rows_q2_k(x, w, out, n);
        case DType::Q3_K: return rows_q3_k(x, w, out, n);
        case DType::Q4_K: return rows_q45_k(x, w, out, n, false);
        case DType::Q5_K: return rows_q45_k(x, w, out, n, true);
        case DType::Q6_K: return rows_q6_k(x, w, out, n);
        case DType::IQ4_NL: return rows_iq4_nl(x, w, out, n);
        case DType::IQ4_XS: return rows_iq4_xs(x, w, out, n);
        default: check(false, "a type without a search");
    }
}
