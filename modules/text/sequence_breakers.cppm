// quire.text.sequence_breakers: texts at which a repetition is not counted any further back (the sampler DRY), as the tokens that can
// spell them. **Owns** these.
export module quire.text.sequence_breakers;

import quire.core.base;
import quire.core.std;
import quire.text.encode_inside;
import quire.text.tokenizer;

export namespace quire {

class SequenceBreakers {
public:
    SequenceBreakers() = default; // none
    // Every token that has a text in it is a breaker, and every token that ends with the beginning of one together with the tokens
    // of the rest.
    SequenceBreakers(std::span<const std::string> texts, const Tokenizer& tokenizer);
    // Breakers that are sequences of tokens.
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

SequenceBreakers::SequenceBreakers(std::span<const std::string> texts, const Tokenizer& tokenizer) {
    std::vector<std::vector<std::vector<Token>>> rests(texts.size()); // of each text, from its byte i on
    for (std::size_t k = 0; k < texts.size(); k++)
        for (std::size_t i = 0; i < texts[k].size(); i++)
            rests[k].push_back(i == 0 ? std::vector<Token>()
                                      : encode_inside(tokenizer, std::string_view(texts[k]).substr(i)));
    for (Token t = 0; t < tokenizer.vocab_size(); t++) {
        const std::string bytes = tokenizer.bytes(t, true);
        for (std::size_t k = 0; k < texts.size(); k++) {
            const std::string_view text = texts[k];
            if (text.empty()) continue;
            if (bytes.find(text) != std::string::npos) add(t, {});
            else
                for (std::size_t n = 1; n < std::min(text.size(), bytes.size() + 1); n++)
                    if (bytes.ends_with(text.substr(0, n))) add(t, rests[k][n]);
        }
    }
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
