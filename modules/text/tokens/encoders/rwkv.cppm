// quire.text.tokens.encoders.rwkv: text to tokens as RWKV does it (tokenizer.ggml.model rwkv): the longest token at each place.
// **Owns** the search tree and the bytes of each token.
export module quire.text.tokens.encoders.rwkv;

import quire.core.base;
import quire.text.tokens.byte_trie;
import quire.text.tokens.vocabulary;

export namespace quire {

class RwkvEncoder {
public:
    // The vocabulary of each call below is this one.
    explicit RwkvEncoder(const Vocabulary& vocabulary);

    void encode(const Vocabulary& vocabulary, std::string_view text, std::vector<Token>& out) const;
    // The bytes of a token; id must be in the vocabulary.
    std::string bytes(Token id) const { return texts_[std::size_t(id)]; }

private:
    std::vector<std::string> texts_;
    ByteTrie                 tokens_;
};

} // namespace quire

module :private;

namespace quire {

// Tokens are spelled with escapes: \t, \n, \r, \xHH, and a backslash before any other character.
std::string without_escapes(std::string_view piece) {
    std::string out;
    for (std::size_t i = 0; i < piece.size(); i++) {
        if (piece[i] != '\\' || i + 1 == piece.size()) {
            out += piece[i];
            continue;
        }
        const char c    = piece[++i];
        const auto byte = to_number<unsigned>(piece.substr(i + 1, 2), 16);
        if (c == 'x' && i + 2 < piece.size() && byte) {
            out += char(*byte);
            i += 2;
        } else out += c == 't' ? '\t' : c == 'n' ? '\n' : c == 'r' ? '\r' : c;
    }
    return out;
}

RwkvEncoder::RwkvEncoder(const Vocabulary& vocabulary) {
    std::vector<std::pair<std::string_view, Token>> texts;
    texts_.reserve(vocabulary.tokens.size());
    for (const std::string& piece : vocabulary.tokens) texts_.push_back(without_escapes(piece));
    for (std::size_t i = 0; i < texts_.size(); i++)
        if (vocabulary.types[i] == TokenType::normal) texts.emplace_back(texts_[i], Token(i));
    tokens_ = ByteTrie(std::move(texts));
}

void RwkvEncoder::encode(const Vocabulary& vocabulary, std::string_view text, std::vector<Token>& out) const {
    for (std::size_t at = 0; at < text.size();) {
        const auto [id, bytes] = tokens_.longest(text, at);
        if (id >= 0 || vocabulary.unknown >= 0) out.push_back(id >= 0 ? id : vocabulary.unknown);
        at += id >= 0 ? bytes : 1;
    }
}

} // namespace quire
