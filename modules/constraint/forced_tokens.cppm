// quire.constraint.forced_tokens: the tokens that must come next in a text under a constraint. Owns nothing.
export module quire.constraint.forced_tokens;

import quire.constraint.grammar.token_trie;
import quire.core.base;
import quire.text.tokens.tokenizer;

export namespace quire {

// The bytes for which a constraint leaves no choice, as tokens of the trie's tokenizer; nothing if the trie has none. Bytes at the end that a
// longer token could contain are left out, because the model may prefer that token: "a": may go on as "a":[ .
std::vector<Token> tokens_of_forced(std::string_view forced, const TokenTrie& trie);

} // namespace quire

module :private;

namespace quire {

std::vector<Token> tokens_of_forced(std::string_view forced, const TokenTrie& trie) {
    if (forced.empty() || !trie.tokenizer()) return {};
    const Tokenizer&   tokenizer = *trie.tokenizer();
    std::vector<Token> tokens;
    const auto append = [&](const std::vector<Token>& more) { tokens.insert(tokens.end(), more.begin(), more.end()); };
    for (std::size_t at = 0; at < forced.size();) {
        const std::size_t next = std::min(forced.find(control_begins, at), forced.size());
        if (next > at) append(encode_inside(tokenizer, forced.substr(at, next - at)));
        const std::size_t end = std::min(forced.find(control_ends, next), forced.size());
        if (end > next)
            append(tokenizer.encode(forced.substr(next + 1, end - next - 1),
                                    {.add_special = false, .parse_special = true}));
        at = end + 1;
    }
    std::string_view left = forced;
    std::size_t      n    = 0;
    for (; n < tokens.size() && !left.empty() && !trie.has_longer(left); n++) {
        const std::string_view bytes = tokens[n] < trie.vocab_size() ? trie.bytes(tokens[n]) : "";
        if (bytes.empty() || !left.starts_with(bytes)) break;
        left.remove_prefix(bytes.size());
    }
    tokens.resize(n);
    return tokens;
}

} // namespace quire
