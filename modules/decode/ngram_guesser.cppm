// quire.decode.ngram_guesser: guesses the next tokens of a text from the text itself: where its last tokens occurred before, what followed them
// there. **Owns** an index of the text. A token costs the same few operations whatever the length of the text.
export module quire.decode.ngram_guesser;

import quire.core.base;
import quire.schedule.token_filter;

export namespace quire {

// How many of the last tokens have to have occurred before; the most are looked for first.
struct NgramRange {
    int least = 2, most = 4; // 1..8
};

class NgramGuesser final : public TokenGuesser {
public:
    explicit NgramGuesser(NgramRange range) : range_(range) {}

    void guess(std::span<const Token> text, int n, std::vector<Token>& guess) override;

private:
    void        add(std::span<const Token> text);
    std::size_t place_of(std::span<const Token> ngram) const;

    NgramRange range_;
    // By a hash of its tokens: where the latest n-gram of each length ends, as the number of tokens before that. Others with the same hash were
    // overwritten, so the tokens have to be compared. The size is a power of two, or 0.
    std::vector<std::int32_t> ends_;
    std::size_t               n_indexed_ = 0; // tokens of the text whose n-grams, but the last, are in the index
};

} // namespace quire

module :private;

namespace quire {

std::size_t NgramGuesser::place_of(std::span<const Token> ngram) const {
    std::uint64_t hash = ngram.size();
    for (Token t : ngram) hash = (hash ^ std::uint64_t(std::uint32_t(t))) * 0x9e3779b97f4a7c15ull;
    return (hash >> 24) & (ends_.size() - 1);
}

// The n-grams at the end of the text stay out: they would be found as themselves.
void NgramGuesser::add(std::span<const Token> text) {
    const auto lengths = std::size_t(range_.most - range_.least + 1);
    if (text.size() < n_indexed_) n_indexed_ = 0;   // it has forgotten tokens
    if (2 * lengths * text.size() > ends_.size()) { // twice as large as the text needs: seldom made anew
        ends_.assign(std::bit_ceil(std::max<std::size_t>(4 * lengths * text.size(), 1024)), 0);
        n_indexed_ = 0;
    }
    for (; n_indexed_ + 1 < text.size(); n_indexed_++)
        for (int n = range_.least; n <= range_.most; n++)
            if (const std::size_t end = n_indexed_ + 1; end >= std::size_t(n))
                ends_[place_of(text.first(end).last(std::size_t(n)))] = std::int32_t(end);
}

void NgramGuesser::guess(std::span<const Token> text, int n, std::vector<Token>& guess) {
    add(text);
    for (int length = range_.most; length >= range_.least; length--) {
        const auto size = std::size_t(length);
        if (text.size() <= size) continue;
        const auto last = text.last(size);
        const auto end  = std::size_t(ends_[place_of(last)]);
        if (end < size || end >= text.size() || !std::ranges::equal(text.first(end).last(size), last)) continue;
        // A text that repeats itself goes on in its own guess.
        for (std::size_t at = end; n > 0; at++, n--)
            guess.push_back(at < text.size() ? text[at] : guess[at - text.size()]);
        return;
    }
}

} // namespace quire
