// quire.compute.routing: the choice of experts for one token. The CPU uses it, and tests compare the GPU's choice with it. Owns nothing.
export module quire.compute.routing;

import quire.compute.program;
import quire.core.base;

export namespace quire {

// One row of Route, from its scores [experts], which become the gated scores. choice_bias, expert_scale: [experts], or null. `experts`,
// `weights`: [n_used].
void route(const Route& op, const float* choice_bias, float* scores, std::int32_t* experts, float* weights,
           const float* expert_scale = nullptr);

} // namespace quire

module :private;

namespace quire {

static void softmax(std::span<float> scores) {
    const float best = *std::ranges::max_element(scores);
    float       sum  = 0;
    for (float& s : scores) sum += s = std::exp(s - best);
    for (float& s : scores) s /= sum;
}

// The groups of which experts are chosen, a bit for each. rank(e): the value by which an expert is chosen.
template <class Rank>
static std::uint64_t best_groups(const Route& op, std::size_t group_size, const Rank& rank) {
    constexpr float least = -std::numeric_limits<float>::infinity();
    std::uint64_t   kept  = 0;
    const auto      value = [&](int group) {
        float first = least, second = least;
        for (std::size_t e = std::size_t(group) * group_size; e < std::size_t(group + 1) * group_size; e++) {
            const float r = rank(e);
            second        = std::max(second, std::min(first, r));
            first         = std::max(first, r);
        }
        return group_size > 1 && !op.best_alone ? first + second : first;
    };
    std::array<float, 64> values{};
    for (int g = 0; g < op.n_groups; g++) values[std::size_t(g)] = value(g);
    for (int i = 0; i < op.n_groups_used; i++) {
        int best = -1; // the lowest of equal ones
        for (int g = 0; g < op.n_groups; g++)
            if ((kept >> g & 1) == 0 && (best < 0 || values[std::size_t(g)] > values[std::size_t(best)])) best = g;
        kept |= std::uint64_t(1) << best;
    }
    return kept;
}

void route(const Route& op, const float* choice_bias, float* scores, std::int32_t* experts, float* weights,
           const float* expert_scale) {
    const auto n = std::size_t(op.weight.rows), k = std::size_t(op.n_used);
    if (op.gating == Gating::softmax) softmax({scores, n});
    if (op.gating == Gating::sigmoid)
        for (std::size_t e = 0; e < n; e++) scores[e] = 1 / (1 + std::exp(-scores[e]));
    // The best k in order, by insertion: of equal scores the lowest index comes first. A NaN is never chosen over a number; if only NaN are
    // left, the chosen indices are still valid experts.
    const auto rank = [&](std::size_t e) {
        const float s = scores[e] + (choice_bias ? choice_bias[e] : 0.0f);
        return std::isnan(s) ? -std::numeric_limits<float>::infinity() : s;
    };
    const std::size_t   group_size = n / std::size_t(op.n_groups);
    const std::uint64_t groups     = op.n_groups > 1 ? best_groups(op, group_size, rank) : 1;
    std::size_t         taken      = 0;
    for (std::size_t e = 0; e < n; e++) {
        if ((groups >> (e / group_size) & 1) == 0) continue;
        const float mine = rank(e);
        std::size_t at   = taken;
        while (at > 0 && rank(std::size_t(experts[at - 1])) < mine) at--;
        if (at == k) continue;
        taken = std::min(taken + 1, k);
        for (std::size_t i = taken - 1; i > at; i--) experts[i] = experts[i - 1];
        experts[at] = std::int32_t(e);
    }
    for (std::size_t i = 0; i < k; i++) weights[i] = scores[experts[i]];
    if (op.gating == Gating::softmax_chosen) softmax({weights, k});
    if (op.normalised) {
        float sum = 0;
        for (std::size_t i = 0; i < k; i++) sum += weights[i];
        for (std::size_t i = 0; i < k; i++)
            weights[i] /= std::max(sum, 6.103515625e-5f); // the smallest normal half, as peers do
    }
    for (std::size_t i = 0; i < k; i++) weights[i] *= op.scale * (expert_scale ? expert_scale[experts[i]] : 1.0f);
}

} // namespace quire
