// quire.text.tokens.encoders.byte_pair: text to tokens by byte pair encoding (tokenizer.ggml.model gpt2, gemma4, whitespace; Sennrich et al. 2016):
// words are split by the pre-tokenizer, then merged in the order of the file's merges. **Owns** the merges.
export module quire.text.tokens.encoders.byte_pair;

import quire.core.base;
import quire.core.unicode;
import quire.core.unicode_data;
import quire.text.tokens.merging;
import quire.text.tokens.pretokenizer;
import quire.text.tokens.vocabulary;

export namespace quire {

// An open-addressing map from pairs of ids to their merges: a vocabulary has a quarter million of them.
class MergeTable {
public:
    struct Merge {
        std::int32_t rank = -1; // smaller merges first; -1: none
        Token        id   = -1;
    };
    void reserve(std::size_t n) {
        keys_.assign(std::bit_ceil(n * 2 + 2), ~0ull);
        merges_.resize(keys_.size());
    }
    void insert(Token left, Token right, Merge merge) {
        const std::size_t i = slot(left, right);
        if (keys_[i] != ~0ull) return; // the first of two equal merges counts
        keys_[i]   = key(left, right);
        merges_[i] = merge;
    }
    Merge find(Token left, Token right) const {
        if (keys_.empty() || left < 0 || right < 0) return {};
        const std::size_t i = slot(left, right);
        return keys_[i] == ~0ull ? Merge{} : merges_[i];
    }

private:
    static std::uint64_t key(Token left, Token right) {
        return std::uint64_t(std::uint32_t(left)) << 32 | std::uint32_t(right);
    }
    std::size_t slot(Token left, Token right) const {
        const std::uint64_t k = key(left, right);
        std::size_t         i = std::size_t((k * 0x9e3779b97f4a7c15ull) >> 20) & (keys_.size() - 1);
        while (keys_[i] != ~0ull && keys_[i] != k) i = (i + 1) & (keys_.size() - 1);
        return i;
    }
    std::vector<std::uint64_t> keys_;
    std::vector<Merge>         merges_;
};

class BytePairEncoder {
public:
    // Error: the key that is missing or inconsistent. The vocabulary of each call below is `file`'s.
    static Result<BytePairEncoder> load(const Gguf& file, const Vocabulary& vocabulary, PreTokenizer pre);

    void encode(const Vocabulary& vocabulary, std::string_view text, std::vector<Token>& out) const;
    // The bytes that a normal token stands for.
    std::string bytes(std::string_view piece) const;

private:
    void word(const Vocabulary& vocabulary, std::string_view word, Merging& merging, std::vector<Token>& out) const;
    void text_word(const Vocabulary& vocabulary, std::string_view word, Merging& merging,
                   std::vector<Token>& out) const;

    PreTokenizer                               pre_;
    bool                                       lower_case_ = false;
    MergeTable                                 merges_;
    std::array<Token, 256>                     byte_ids_{}; // the token of one byte, or -1
    std::array<std::string, 256>               byte_texts_; // how a byte is spelled in a token
    std::unordered_map<char32_t, std::uint8_t> text_bytes_; // and back
};

} // namespace quire

module :private;

namespace quire {

// GPT-2 spells the bytes that are printable in Latin-1 as themselves and the others as the characters from U+0100 on.
void spell_bytes(std::array<std::string, 256>& texts, std::unordered_map<char32_t, std::uint8_t>& back) {
    char32_t next = 256;
    for (unsigned b = 0; b < 256; b++) {
        const bool     printable = (b >= 33 && b <= 126) || (b >= 161 && b != 173);
        const char32_t c         = printable ? char32_t(b) : next++;
        texts[b]                 = utf8_encode(c);
        back[c]                  = std::uint8_t(b);
    }
}

Result<BytePairEncoder> BytePairEncoder::load(const Gguf& file, const Vocabulary& vocabulary, PreTokenizer pre) {
    BytePairEncoder e;
    e.pre_ = std::move(pre);
    if (e.pre_.spelling == Spelling::words) {
        Result<bool> lower = file.boolean("tokenizer.ggml.normalizer.lowercase", false);
        if (!lower) return std::unexpected(lower.error());
        e.lower_case_ = *lower;
    }
    spell_bytes(e.byte_texts_, e.text_bytes_);
    for (std::size_t b = 0; b < 256; b++)
        e.byte_ids_[b] =
            e.pre_.spelling == Spelling::bytes ? vocabulary.find(e.byte_texts_[b]) : vocabulary.byte_ids[b];
    Result<const GgufArray*> merges = array_of(file, "tokenizer.ggml.merges", 0);
    if (!merges) return std::unexpected(merges.error());
    const std::size_t n = *merges ? (*merges)->strings.size() : 0;
    if (!*merges) return fail(file.path(), ": tokenizer.ggml.merges is missing, byte pair encoding needs it");
    if (n != (*merges)->size()) return fail(file.path(), ": tokenizer.ggml.merges is not an array of strings");
    e.merges_.reserve(n);
    std::string whole;
    for (std::size_t i = 0; i < n; i++) {
        const std::string_view merge = (*merges)->strings[i];
        const std::size_t      space = merge.find(' ', 1);
        if (space == std::string_view::npos)
            return fail(file.path(), ": tokenizer.ggml.merges[", i, "] is ", quote(merge),
                        ", not two parts with a space between");
        const std::string_view left = merge.substr(0, space), right = merge.substr(space + 1);
        whole.assign(left).append(right);
        const Token a = vocabulary.find(left), b = vocabulary.find(right), c = vocabulary.find(whole);
        if (a >= 0 && b >= 0 && c >= 0) e.merges_.insert(a, b, {std::int32_t(i), c});
    }
    return e;
}

void BytePairEncoder::encode(const Vocabulary& vocabulary, std::string_view text, std::vector<Token>& out) const {
    constexpr std::size_t least_window = std::size_t(1) << 16, most_window = longest_run * 4;
    Merging               merging;
    std::string           lower;
    for (std::size_t at = 0; lower_case_ && at < text.size();) {
        const CodePoint c = utf8_next(text, at);
        if (c.value == U'\u0130') lower += "i\u0307"; // the one character that two stand for
        else lower += c.valid ? utf8_encode(lower_case(c.value)) : std::string(text.substr(at, std::size_t(c.bytes)));
        at += std::size_t(c.bytes);
    }
    if (lower_case_) text = lower;
    for (std::size_t window = least_window; !text.empty();) {
        std::vector<std::size_t> ends = pre_.split_begin(text, window);
        if (ends.empty() && window < most_window) {
            window *= 4; // long words
            continue;
        }
        if (ends.empty()) ends = {longest_run};
        std::size_t begin = 0;
        for (std::size_t end : ends)
            for (std::size_t bytes; begin < end; begin += bytes) {
                bytes = std::min(end - begin, longest_run);
                if (pre_.spelling == Spelling::bytes) word(vocabulary, text.substr(begin, bytes), merging, out);
                else text_word(vocabulary, text.substr(begin, bytes), merging, out);
            }
        text.remove_prefix(begin);
        window = least_window;
    }
}

// One symbol per byte, merged in the order of the merges' ranks.
void BytePairEncoder::word(const Vocabulary& vocabulary, std::string_view word, Merging& merging,
                           std::vector<Token>& out) const {
    if (pre_.whole_words_first && word.size() <= vocabulary.longest) {
        std::string& spelled = merging.text;
        spelled.clear();
        for (char c : word) spelled += byte_texts_[static_cast<unsigned char>(c)];
        if (const Token id = vocabulary.find(spelled); id >= 0) return out.push_back(id);
    }
    std::vector<Symbol>& symbols = merging.symbols;
    symbols.clear();
    for (std::size_t i = 0; i < word.size(); i++)
        symbols.push_back({std::uint32_t(i), 1, 0, 0, byte_ids_[static_cast<unsigned char>(word[i])]});
    merge_all(merging, [&](const Symbol& a, const Symbol& b) -> std::pair<double, Token> {
        const MergeTable::Merge m = merges_.find(a.id, b.id);
        return {double(m.rank), m.id};
    });
    for (const Symbol& s : symbols)
        if (s.bytes > 0 && (s.id >= 0 || vocabulary.unknown >= 0)) out.push_back(s.id >= 0 ? s.id : vocabulary.unknown);
}

// Merges a word with one symbol per character, ▁ for a space; a symbol that is no token in the end becomes its bytes.
void BytePairEncoder::text_word(const Vocabulary& vocabulary, std::string_view word, Merging& merging,
                                std::vector<Token>& out) const {
    if (pre_.spelling == Spelling::words && is_white_space(utf8_next(word, 0).value)) return;
    std::string& spelled = merging.text;
    spelled.clear();
    const bool begun =
        pre_.spelling == Spelling::text_begun && word[0] != '\n' && word[0] != ' ' && !word.starts_with(space_mark);
    if (begun) spelled = space_mark;
    for (char c : word) {
        if (c == ' ') spelled += space_mark;
        else spelled += c;
    }
    // a run of line breaks is one token where there is one, whatever the merges say
    if (word[0] == '\n')
        if (const Token id = vocabulary.find(spelled); id >= 0) return out.push_back(id);
    std::vector<Symbol>& symbols = merging.symbols;
    symbols.clear();
    for (std::size_t at = 0; at < spelled.size();) {
        const auto n = std::size_t(utf8_next(spelled, at).bytes);
        symbols.push_back(
            {std::uint32_t(at), std::uint32_t(n), 0, 0, vocabulary.find(std::string_view(spelled).substr(at, n))});
        at += n;
    }
    merge_all(merging, [&](const Symbol& a, const Symbol& b) -> std::pair<double, Token> {
        const MergeTable::Merge m = merges_.find(a.id, b.id);
        return {double(m.rank), m.id};
    });
    for (const Symbol& s : symbols) {
        if (s.bytes > 0 && s.id >= 0) out.push_back(s.id);
        if (s.bytes == 0 || s.id >= 0) continue;
        for (char c : std::string_view(spelled).substr(s.start, s.bytes)) {
            const Token id = byte_ids_[static_cast<unsigned char>(c)];
            if (id >= 0 || vocabulary.unknown >= 0) out.push_back(id >= 0 ? id : vocabulary.unknown);
        }
    }
}

std::string BytePairEncoder::bytes(std::string_view piece) const {
    std::string out;
    for (std::size_t at = 0; at < piece.size();) {
        const CodePoint        c    = utf8_next(piece, at);
        const std::string_view text = piece.substr(at, std::size_t(c.bytes));
        if (pre_.spelling != Spelling::bytes) out += text == space_mark ? " " : text;
        else if (auto byte = text_bytes_.find(c.value); c.valid && byte != text_bytes_.end()) out += char(byte->second);
        else out += text;
        at += std::size_t(c.bytes);
    }
    return out;
}

} // namespace quire
