// quire.text.tokens.encode_inside: a text in the middle of another → tokens. Owns nothing.
export module quire.text.tokens.encode_inside;

import quire.core.base;
import quire.text.tokens.tokenizer;

export namespace quire {

// Some vocabularies put a space before the first word of a text: a newline stands there instead, and its tokens are removed.
std::vector<Token> encode_inside(const Tokenizer& tokenizer, std::string_view text);

} // namespace quire

module :private;

namespace quire {

std::vector<Token> encode_inside(const Tokenizer& tokenizer, std::string_view text) {
    const EncodeOptions      plain{.add_special = false, .parse_special = true};
    const std::string        anchor = "\n";
    const std::vector<Token> before = tokenizer.encode(anchor, plain);
    std::vector<Token>       all    = tokenizer.encode(cat(anchor, text), plain);
    if (all.size() < before.size() || !std::equal(before.begin(), before.end(), all.begin()))
        return tokenizer.encode(text, plain);
    all.erase(all.begin(), all.begin() + std::ptrdiff_t(before.size()));
    return all;
}

} // namespace quire
