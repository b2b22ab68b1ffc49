// quire.compute.rope_frequencies: how fast RoPE turns each pair of a head. Owns nothing.
export module quire.compute.rope_frequencies;

import quire.core.base;
export import quire.model_file.config;

export namespace quire {

// The RoPE frequencies of a config, with its scaling (linear; YaRN: Peng et al. 2023, section 3), divided by `divisors` if there are
// any. `local`: the frequencies of LayerConfig::local_rope. Cosine and sine are multiplied by `scale`.
std::vector<float> rope_frequencies(const ModelConfig& config, bool local, std::span<const float> divisors,
                                    float& scale);

} // namespace quire

module :private;

namespace quire {

std::vector<float> rope_frequencies(const ModelConfig& config, bool local, std::span<const float> divisors,
                                    float& scale) {
    const int          dim = local ? config.rope_dim_local : config.rope_dim, half = dim / 2;
    std::vector<float> freq(static_cast<std::size_t>(half));
    const auto         base    = double(local ? config.rope_base_local : config.rope_base);
    const RopeScaling  scaling = local ? RopeScaling::none : config.rope_scaling;
    double             low = 0, high = 0;
    scale = local ? 1.0f : config.rope_attn_factor;
    if (scaling == RopeScaling::yarn) {
        // The index of the pair that makes `rotations` full rotations over the original context.
        auto pair_of = [&](double rotations) {
            return config.rope_dim * std::log(config.rope_original_context / (rotations * 2 * 3.14159265358979323846)) /
                   (2 * std::log(base));
        };
        low  = pair_of(double(config.yarn_beta_fast));
        high = pair_of(double(config.yarn_beta_slow));
        if (config.yarn_rounds) {
            low  = std::floor(low);
            high = std::ceil(high);
        }
        low  = std::max(low, 0.0);
        high = std::min(high, double(config.rope_dim - 1));
        if (high <= low) high = low + 0.001;
        if (config.yarn_attn_factor > 0) scale *= config.yarn_attn_factor;
        else if (config.yarn_scales_rope && config.rope_factor > 1)
            scale = float((0.1 * std::log(double(config.rope_factor)) + 1.0) * double(config.rope_attn_factor));
    }
    for (int i = 0; i < half; i++) {
        double f = std::pow(base, -2.0 * i / dim);
        if (scaling == RopeScaling::linear) f /= double(config.rope_factor);
        if (scaling == RopeScaling::yarn) {
            double slow = std::clamp((i - low) / (high - low), 0.0, 1.0); // 1: interpolate, 0: leave
            f           = f / double(config.rope_factor) * slow + f * (1 - slow);
        }
        if (!divisors.empty()) f /= double(divisors[std::size_t(i)]);
        freq[std::size_t(i)] = float(f);
    }
    return freq;
}

} // namespace quire
