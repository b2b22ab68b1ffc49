// The model of the simulator: K, V and logits are hashes of the tokens that a position sees. Text computes them in plain arrays, without
// blocks, tables or steps.
#pragma once

#include "lanes.h"

namespace quire::simulation {

constexpr int n_rounds = 2; // layers, one after the other, of each lane

inline std::uint64_t mix(std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// The hidden state of a token before the first layer.
inline std::uint64_t embed(Token token, int position) {
    return mix((std::uint64_t(std::uint32_t(token)) << 32 | std::uint32_t(position)) + 0x9e3779b97f4a7c15ull);
}
// The value that a layer stores for a position with this hidden state.
inline std::uint64_t stored(std::uint64_t state, int lane, int round) {
    return mix(state + 0x632be59bd9b4e019ull * std::uint64_t(1 + lane * n_rounds + round));
}
// The term of a position in the sum of a later position that sees it.
inline std::uint64_t seen(std::uint64_t value, int position) { return value * (2 * std::uint64_t(position) + 1); }
// A recurrent state of 0 or after the position before, with what the layer would store for a position.
inline std::uint64_t recur(std::uint64_t state, std::uint64_t value) { return mix(state * 5 + value); }
// The hidden state behind a layer, whose lane saw `sum`, or whose state is that; lanes come in their order.
inline std::uint64_t attend(std::uint64_t state, std::uint64_t sum) { return mix(state * 3 + sum); }

inline int first_seen(const Lane& lane, int position) {
    return lane.window > 0 ? std::max(0, position - lane.window + 1) : 0;
}

// The logits of a hidden state: a few likely tokens close to each other, now and then an end token, the others far below.
void logits_of(std::uint64_t state, std::span<const Token> ends, std::span<float> logits);

// One text and all that the layers store for it.
class Text {
public:
    explicit Text(std::vector<Lane> lanes) : lanes_(std::move(lanes)), values_(lanes_.size()) {}

    void          append(Token token);
    std::uint64_t state() const { return state_; } // of the last token, behind the last layer
    int           size() const { return n_; }

private:
    std::vector<Lane>                                             lanes_;
    std::vector<std::array<std::vector<std::uint64_t>, n_rounds>> values_; // [lane][round][position]
    std::uint64_t                                                 state_ = 0;
    int                                                           n_     = 0;
};

} // namespace quire::simulation
