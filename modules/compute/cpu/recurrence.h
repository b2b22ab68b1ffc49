// The causal convolution, and the recurrence of a head's matrix. Token by token in the order of the sequence, and each sum in one order: the
// bits do not depend on where a prompt was cut into steps.

template <bool Fma>
INLINE void convolve_body(const ConvTask& task) {
    const int taps = task.taps, past = taps - 1;
    float     window[max_taps][conv_columns] = {}, weight[max_taps][conv_columns] = {}, bias[conv_columns] = {};
    for (int c = 0; c < task.columns; c++) {
        for (int j = 0; j < taps; j++) weight[j][c] = task.weight[c * taps + j];
        if (task.bias) bias[c] = task.bias[c];
    }
    // The last `taps` inputs, in a ring: the input of token t is row (past + t) % taps.
    for (int j = 0; j < past; j++) __builtin_memcpy(window[j], task.past + j * conv_columns, sizeof window[j]);
    int newest = past;
    for (int t = 0; t < task.n_tokens; t++, newest = newest + 1 < taps ? newest + 1 : 0) {
        const float *x = task.x + t * task.stride, *factor = task.factor ? task.factor + t * task.stride : nullptr;
        for (int c = 0; c < task.columns; c++) window[newest][c] = factor ? x[c] * factor[c] : x[c];
        float sums[conv_columns];
        for (int c = 0; c < conv_columns; c += 16) {
            f32x16 sum;
            LOAD16(sum, bias + c);
            for (int j = 0, row = newest; j < taps; j++) { // the oldest first
                row = row + 1 < taps ? row + 1 : 0;
                f32x16 y, w;
                LOAD16(y, window[row] + c);
                LOAD16(w, weight[j] + c);
                VECTOR_FMA(sum, y, w, sum);
            }
            STORE16(sums + c, sum);
        }
        float* out = task.out + t * task.stride;
        if (const float* gate = task.gate ? task.gate + t * task.stride : nullptr)
            for (int c = 0; c < task.columns; c++) out[c] = sums[c] * gate[c];
        else {
            activate_body<Fma>(Activation::silu, sums, nullptr, task.columns);
            __builtin_memcpy(out, sums, std::size_t(task.columns) * sizeof(float));
        }
    }
    for (int j = 0; j < past; j++)
        __builtin_memcpy(task.past + j * conv_columns, window[(newest + 1 + j) % taps], sizeof window[j]);
}

// *sum += a · b of two vectors
template <bool Fma>
INLINE void add_product(f32x16* sum, const f32x16* a, float b) {
    const f32x16 all = ALL(b);
    VECTOR_FMA(*sum, *a, all, *sum);
}

// Rows of the matrix two by two, each with sums of its own, which hides the time of an addition.
template <bool Fma>
INLINE void recur_body(const RecurrenceTask& task) {
    constexpr int width = recurrence_columns;
    static_assert(width == 32);
    const int pairs = task.key_dim / 2 * 2;
    for (int t = 0; t < task.n_tokens; t++) {
        const float *q = task.q + t * task.stride, *k = task.k + t * task.stride;
        float        v[width] = {}, out[width];
        __builtin_memcpy(v, task.v + t * task.stride, std::size_t(task.columns) * sizeof(float));
        f32x16 u[2], even[2]{}, odd[2]{}, decay = ALL(task.decay[t]);
        LOAD16(u[0], v);
        LOAD16(u[1], v + 16);
        if (task.delta) { // what the matrix has for k already
            const auto add_row = [&](int n, f32x16* sum) __attribute__((always_inline)) {
                for (int c = 0; c < 2; c++) {
                    f32x16 s;
                    LOAD16(s, task.state + n * width + c * 16);
                    add_product<Fma>(sum + c, &s, k[n]);
                }
            };
            for (int n = 0; n < pairs; n += 2) {
                add_row(n, even);
                add_row(n + 1, odd);
            }
            if (pairs < task.key_dim) add_row(pairs, even);
            for (int c = 0; c < 2; c++) {
                u[c] -= decay * (even[c] + odd[c]);
                even[c] = odd[c] = f32x16{};
            }
        }
        for (int c = 0; c < 2; c++) u[c] *= task.write[t];
        const auto renew_row = [&](int n, f32x16* sum) __attribute__((always_inline)) {
            for (int c = 0; c < 2; c++) {
                f32x16 s;
                LOAD16(s, task.state + n * width + c * 16);
                s *= decay;
                add_product<Fma>(&s, u + c, k[n]);
                STORE16(task.state + n * width + c * 16, s);
                add_product<Fma>(sum + c, &s, q[n]);
            }
        };
        for (int n = 0; n < pairs; n += 2) {
            renew_row(n, even);
            renew_row(n + 1, odd);
        }
        if (pairs < task.key_dim) renew_row(pairs, even);
        for (int c = 0; c < 2; c++) {
            f32x16 sum = even[c] + odd[c], x;
            LOAD16(x, v + 16 * c);
            add_product<Fma>(&sum, &x, task.skip);
            STORE16(out + 16 * c, sum);
        }
        __builtin_memcpy(task.out + t * task.out_stride, out, std::size_t(task.columns) * sizeof(float));
    }
}
