// quire.engine.step_pace: how many tokens a step may have, so that it takes about as long as it should. **Owns** that number.
export module quire.engine.step_pace;

import quire.core.base;

export namespace quire {

class StepPace {
public:
    // `most`: tokens of a step.
    explicit StepPace(int most) : most_(most), tokens_(std::min(least, most)) {}

    // How long the next steps should take, in seconds; 0: no limit.
    void set(double seconds) { wanted_ = seconds; }
    // A step of n_tokens tokens has taken so long.
    void ran(int n_tokens, double seconds);
    // The most tokens of the next step.
    int tokens() const { return wanted_ > 0 ? tokens_ : most_; }

private:
    static constexpr int least = 8; // fewer would read the weights too often

    int    most_, tokens_; // tokens_: with a limit
    double wanted_ = 0;
};

} // namespace quire

module :private;

namespace quire {

// The time of a full step decides the size of the next one: at most twice as many tokens, since the time of a larger step is not known; in whole
// tiles of the products.
void StepPace::ran(int n_tokens, double seconds) {
    if (wanted_ <= 0 || n_tokens < tokens_) return;
    const double fits = tokens_ * std::clamp(wanted_ / std::max(seconds, 1e-9), 0.0, 2.0);
    tokens_           = std::max(least, std::min(int(fits), most_) / 8 * 8);
}

} // namespace quire
