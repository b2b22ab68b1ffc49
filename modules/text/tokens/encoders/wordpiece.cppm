// quire.text.tokens.encoders.wordpiece: text to tokens as BERT does it (tokenizer.ggml.model bert; Devlin et al. 2019, BertNormalizer and
// WordPiece of the tokenizers library): clean, split at spaces and punctuation, then the longest token at each place of a word.
// In a GGUF file the tokens at the beginning of a word begin with ▁; tokens within a word have lost their ##. **Owns** the search tree.
export module quire.text.tokens.encoders.wordpiece;

import quire.core.base;
import quire.core.unicode;
import quire.core.unicode_data;
import quire.text.tokens.byte_trie;
import quire.text.tokens.vocabulary;

export namespace quire {

class WordPieceEncoder {
public:
    // Error: the key that is inconsistent. The vocabulary of each call below is `file`'s.
    static Result<WordPieceEncoder> load(const Gguf& file, const Vocabulary& vocabulary);

    void encode(const Vocabulary& vocabulary, std::string_view text, std::vector<Token>& out) const;

private:
    void word(const Vocabulary& vocabulary, std::u32string_view word, std::vector<Token>& out) const;

    ByteTrie tokens_;
    bool     lower_case_ = true, strip_accents_ = true;
};

// A decoded text without the spaces that stand before punctuation and contractions only because these are tokens of their own
// (clean_up_tokenization_spaces).
std::string clean_spaces(std::string_view text);

} // namespace quire

module :private;

namespace quire {

constexpr std::size_t longest_word = 100; // characters; a longer one is unknown

Result<WordPieceEncoder> WordPieceEncoder::load(const Gguf& file, const Vocabulary& vocabulary) {
    WordPieceEncoder e;
    if (vocabulary.unknown < 0)
        return fail(file.path(), ": tokenizer.ggml.unknown_token_id is missing, a vocabulary of word pieces needs it");
    Result<bool> lower = file.boolean("tokenizer.ggml.normalizer.lowercase", true);
    if (!lower) return std::unexpected(lower.error());
    Result<bool> strip = file.boolean("tokenizer.ggml.normalizer.strip_accents", *lower);
    if (!strip) return std::unexpected(strip.error());
    e.lower_case_    = *lower;
    e.strip_accents_ = *strip;
    std::vector<std::pair<std::string_view, Token>> texts;
    for (std::size_t i = 0; i < vocabulary.tokens.size(); i++)
        if (vocabulary.types[i] == TokenType::normal) texts.emplace_back(vocabulary.tokens[i], Token(i));
    e.tokens_ = ByteTrie(std::move(texts));
    return e;
}

bool is_chinese(char32_t c) {
    return (c >= 0x4e00 && c <= 0x9fff) || (c >= 0x3400 && c <= 0x4dbf) || (c >= 0x20000 && c <= 0x2a6df) ||
           (c >= 0x2a700 && c <= 0x2b73f) || (c >= 0x2b740 && c <= 0x2b81f) || (c >= 0x2b920 && c <= 0x2ceaf) ||
           (c >= 0xf900 && c <= 0xfaff) || (c >= 0x2f800 && c <= 0x2fa1f);
}

// Characters that are neither seen nor spaces.
bool is_dropped(char32_t c) {
    static const Categories other = categories_named("C");
    return c == 0 || c == 0xfffd || (is_in(other, c) && c != '\t' && c != '\n' && c != '\r');
}

bool is_split_off(char32_t c) {
    static const Categories punctuation = categories_named("P");
    return (c < 128 && c > 32 && !(c >= '0' && c <= '9') && !(c >= 'A' && c <= 'Z') && !(c >= 'a' && c <= 'z') &&
            c != 127) ||
           is_in(punctuation, c);
}

void WordPieceEncoder::encode(const Vocabulary& vocabulary, std::string_view text, std::vector<Token>& out) const {
    std::u32string word, parts;
    bool           long_word = false;
    auto           flush     = [&] {
        if (long_word) out.push_back(vocabulary.unknown);
        else if (!word.empty()) this->word(vocabulary, word, out);
        word.clear();
        long_word = false;
    };
    auto add = [&](char32_t c) {
        if (is_white_space(c)) return flush();
        if (lower_case_) c = lower_case(c);
        if (is_split_off(c)) {
            flush();
            word = c;
            return flush();
        }
        if (word.size() >= longest_word) long_word = true;
        else word += c;
    };
    static const Categories marks = categories_named("Mn");
    for (std::size_t at = 0; at < text.size();) {
        const CodePoint next = utf8_next(text, at);
        const char32_t  c    = next.value;
        at += std::size_t(next.bytes);
        if (is_dropped(c)) continue;
        const bool alone = is_chinese(c); // a word of its own
        if (alone) flush();
        if (strip_accents_) {
            parts.clear();
            append_decomposed(c, parts);
            for (char32_t part : parts)
                if (!is_in(marks, part)) add(part);
        } else add(c);
        if (alone) flush();
    }
    flush();
}

void WordPieceEncoder::word(const Vocabulary& vocabulary, std::u32string_view word, std::vector<Token>& out) const {
    std::string text(space_mark);
    for (char32_t c : word) text += utf8_encode(c);
    const std::size_t before = out.size();
    for (std::size_t at = 0; at < text.size();) {
        const auto [id, bytes] = tokens_.longest(text, at);
        if (id < 0 || (at == 0 && bytes <= space_mark.size())) { // the mark alone is no beginning of a word
            out.resize(before);
            return out.push_back(vocabulary.unknown);
        }
        out.push_back(id);
        at += bytes;
    }
}

std::string clean_spaces(std::string_view text) {
    std::string out;
    for (std::size_t at = 0; at < text.size(); at++) {
        if (text[at] != ' ') {
            out += text[at];
            continue;
        }
        const std::string_view rest = text.substr(at + 1);
        bool                   drop = false;
        for (std::string_view mark : {".", "?", "!", ",", "n't", "'m", "'s", "'ve", "'re"})
            drop = drop || rest.starts_with(mark);
        if (rest.starts_with("' ")) {
            out += '\'';
            at += 2;
        } else if (!drop) out += ' ';
    }
    return out;
}

} // namespace quire
