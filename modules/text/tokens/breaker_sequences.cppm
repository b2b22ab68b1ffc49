// quire.text.tokens.breaker_sequences: texts at which a repetition is not counted any further back (the sampler DRY) → the sequences of tokens
// that can spell them. Owns nothing.
export module quire.text.tokens.breaker_sequences;

import quire.core.base;
import quire.text.tokens.tokenizer;

export namespace quire {

// For SequenceBreakers: each token that has a text in it, and each token that ends with the beginning of one together with the tokens of
// the rest.
std::vector<std::vector<Token>> breaker_sequences(std::span<const std::string> texts, const Tokenizer& tokenizer);

} // namespace quire

module :private;

namespace quire {

std::vector<std::vector<Token>> breaker_sequences(std::span<const std::string> texts, const Tokenizer& tokenizer) {
    std::vector<std::vector<Token>> found;
    const auto                      add = [&](Token head, const std::vector<Token>& tail) {
        found.emplace_back(1, head).insert(found.back().end(), tail.begin(), tail.end());
    };
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
    return found;
}

} // namespace quire
