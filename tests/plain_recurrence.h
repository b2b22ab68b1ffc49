// The recurrences and the convolution of layers that keep a state, in double precision, token by token: what kernels are compared with. To be
// included last, below the imports.
#pragma once

import quire.core.std;

namespace quire::testing {

// Sizes of a recurrence, and how its heads share keys.
struct PlainRecurrence {
    int  n_heads, n_groups, key_dim, value_dim;
    bool delta, grouped;

    int keys() const { return n_groups * key_dim; }
    int columns() const { return 2 * keys() + n_heads * value_dim; }

    // The rows [tokens × n_heads·value_dim] of the result; `state` [n_heads][key_dim][value_dim] is changed. x: rows of q, k, v (delta), or of
    // v, k, q. step, write, step_bias, decay, skip: by head.
    std::vector<double> run(int n_tokens, const std::vector<float>& x, const std::vector<float>& step,
                            const std::vector<float>& write, const std::vector<float>& step_bias,
                            const std::vector<float>& decay, const std::vector<float>& skip,
                            std::vector<double>& state) const {
        const int           N = key_dim, d = value_dim, H = n_heads;
        std::vector<double> out;
        for (int t = 0; t < n_tokens; t++)
            for (int h = 0; h < H; h++) {
                const int    group = grouped ? h / (H / n_groups) : h % n_groups;
                const float* row   = x.data() + t * columns();
                const float *q     = row + (delta ? 0 : H * d + keys()) + group * N,
                            *k     = row + (delta ? keys() : H * d) + group * N,
                            *v     = row + (delta ? 2 * keys() : 0) + h * d;
                const auto length  = [&](const float* a) {
                    double sum = 0;
                    for (int n = 0; n < N; n++) sum += double(a[n]) * double(a[n]);
                    return delta ? std::sqrt(sum + 1e-6) : 1.0;
                };
                const double q_length = length(q) * (delta ? std::sqrt(double(N)) : 1), k_length = length(k);
                const auto   at       = std::size_t(t * H + h);
                const double size     = std::log1p(std::exp(double(step[at]) + double(step_bias[std::size_t(h)])));
                const double g        = std::exp(double(decay[std::size_t(h)]) * size);
                const double strength = delta ? 1 / (1 + std::exp(-double(write[at]))) : size;
                double*      S        = state.data() + h * N * d;
                for (int j = 0; j < d; j++) {
                    double known = 0, result = 0;
                    for (int n = 0; n < N; n++) known += g * S[n * d + j] * double(k[n]) / k_length;
                    const double u = strength * (double(v[j]) - (delta ? known : 0));
                    for (int n = 0; n < N; n++) {
                        S[n * d + j] = g * S[n * d + j] + double(k[n]) / k_length * u;
                        result += S[n * d + j] * double(q[n]) / q_length;
                    }
                    out.push_back(result + (delta ? 0 : double(skip[std::size_t(h)]) * double(v[j])));
                }
            }
        return out;
    }
};

} // namespace quire::testing
