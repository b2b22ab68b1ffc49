// quire.schedule.sequence_breakers: sequences of tokens at which a repetition is not counted any further back (the sampler DRY). **Owns** these.
export module quire.schedule.sequence_breakers;

import quire.core.base;

export namespace quire {

class SequenceBreakers {
public:
    SequenceBreakers() = default; // none
    // Breakers that are sequences of tokens; quire.text.tokens.breaker_sequences makes them of texts.
    explicit SequenceBreakers(std::span<const std::vector<Token>> sequences);

    // Tokens behind the last breaker in `tokens`; all of them where there is none.
    std::size_t since(std::span<const Token> tokens) const;
    // The token is a breaker by itself.
    bool breaks(Token token) const;

private:
    void add(Token head, std::vector<Token> tail);

    // For each first token of a breaker: the breaker's other tokens, the longest first.
    std::unordered_map<Token, std::vector<std::vector<Token>>> tails_;
};

} // namespace quire

module :private;

namespace quire {

constexpr std::size_t longest_tail = 20; // tokens that are compared: so that a search takes linear time

void SequenceBreakers::add(Token head, std::vector<Token> tail) {
    tail.resize(std::min(tail.size(), longest_tail));
    std::vector<std::vector<Token>>& known = tails_[head];
    if (std::ranges::find(known, tail) != known.end()) return;
    known.push_back(std::move(tail));
    std::stable_sort(known.begin(), known.end(), [](const auto& a, const auto& b) { return a.size() > b.size(); });
}

SequenceBreakers::SequenceBreakers(std::span<const std::vector<Token>> sequences) {
    for (const std::vector<Token>& s : sequences)
        if (!s.empty()) add(s[0], {s.begin() + 1, s.end()});
}

std::size_t SequenceBreakers::since(std::span<const Token> tokens) const {
    if (tails_.empty()) return tokens.size();
    for (std::size_t behind = 0; behind < tokens.size(); behind++) { // tokens behind the head
        const auto at = tails_.find(tokens[tokens.size() - 1 - behind]);
        if (at == tails_.end()) continue;
        const std::span<const Token> rest = tokens.last(behind);
        for (const std::vector<Token>& tail : at->second)
            if (tail.size() <= behind && std::ranges::equal(tail, rest.first(tail.size()))) return behind - tail.size();
    }
    return tokens.size();
}

bool SequenceBreakers::breaks(Token token) const {
    const auto at = tails_.find(token);
    return at != tails_.end() && at->second.back().empty();
}

} // namespace quire
