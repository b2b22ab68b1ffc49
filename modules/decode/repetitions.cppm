// quire.decode.repetitions: which tokens would continue a repetition in a sequence, and how long it is so far. **Owns** scratch memory.
export module quire.decode.repetitions;

import quire.core.base;

export namespace quire {

struct Repetition {
    Token token  = 0; // the token that came next the last time
    int   length = 0; // so many of the last tokens also stood before that token
};

class Repetitions {
public:
    // All repetitions of at least `least` tokens, their lengths cut at `most`; a token may stand in several. Takes time in proportion to
    // the number of tokens. Valid until the next call.
    std::span<const Repetition> find(std::span<const Token> tokens, int least, int most);

private:
    std::vector<int>        lengths_; // [k]: so many of the last tokens also stand k tokens before the end
    std::vector<Repetition> found_;
};

} // namespace quire

module :private;

namespace quire {

// The Z-algorithm, from the end: within the stretch [at, end) that is known to equal the last tokens, lengths can be copied.
std::span<const Repetition> Repetitions::find(std::span<const Token> tokens, int least, int most) {
    const int  n      = int(tokens.size());
    const auto behind = [&](int k) { return tokens[std::size_t(n - 1 - k)]; };
    found_.clear();
    lengths_.resize(std::max(lengths_.size(), tokens.size()));
    int at = 0, end = 0;
    for (int k = 1; k < n; k++) {
        int length = k < end ? std::min(lengths_[std::size_t(k - at)], end - k) : 0;
        while (k + length < n && behind(length) == behind(k + length)) length++;
        if (k + length > end) at = k, end = k + length;
        lengths_[std::size_t(k)] = length;
        if (std::min(length, most) >= least) found_.push_back({behind(k - 1), std::min(length, most)});
    }
    return found_;
}

} // namespace quire
