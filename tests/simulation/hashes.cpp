// The simulator's model: hidden states and logits from hashes.
#include "hashes.h"

namespace quire::simulation {

void logits_of(std::uint64_t state, std::span<const Token> ends, std::span<float> logits) {
    constexpr std::size_t           n_noise = 1024;
    static const std::vector<float> noise   = [] {
        std::vector<float> all(n_noise);
        for (std::size_t i = 0; i < n_noise; i++) all[i] = float(mix(i + 77) >> 40) * 0x1p-24f;
        return all;
    }();
    const std::size_t vocab = logits.size();
    for (std::size_t done = 0, at = state % n_noise; done < vocab; at = 0) {
        const std::size_t n = std::min(n_noise - at, vocab - done);
        std::copy_n(noise.begin() + std::ptrdiff_t(at), n, logits.begin() + std::ptrdiff_t(done));
        done += n;
    }
    constexpr int n_likely = 5;
    for (int k = n_likely - 1; k >= 0; k--) {
        const std::uint64_t h = mix(state + std::uint64_t(k) * 0x9e3779b97f4a7c15ull);
        logits[h % vocab]     = 12 - 0.5f * float(k) - 0.25f * float(h >> 40) * 0x1p-24f;
    }
    if (const std::uint64_t h = mix(state ^ 0x5bf03635); h % 20 == 0 && !ends.empty())
        logits[std::size_t(ends[0])] = h % 40 == 0 ? 12.5f : 11.6f;
}

void Text::append(Token token) {
    const int p = n_++;
    state_      = embed(token, p);
    for (std::size_t r = 0; r < n_rounds; r++) {
        std::uint64_t next = state_;
        for (std::size_t l = 0; l < lanes_.size(); l++) {
            std::vector<std::uint64_t>& values = values_[l][r];
            const std::uint64_t         value  = stored(state_, int(l), int(r));
            if (lanes_[l].state) values.assign(1, recur(values.empty() ? 0 : values[0], value));
            else values.push_back(value);
            std::uint64_t sum = lanes_[l].state ? values[0] : 0;
            for (int q = lanes_[l].state ? p + 1 : first_seen(lanes_[l], p); q <= p; q++)
                sum += seen(values[std::size_t(q)], q);
            next = attend(next, sum);
        }
        state_ = next;
    }
}

} // namespace quire::simulation
