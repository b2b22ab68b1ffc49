// quire.text.tokens.encoders.unigram: text to tokens by a unigram language model (tokenizer.ggml.model t5; Kudo 2018, sentencepiece): the
// text is normalised by the file's character map, then split so that the sum of the tokens' scores is the highest.
// **Owns** the search tree of the tokens and the character map.
export module quire.text.tokens.encoders.unigram;

import quire.core.base;
import quire.core.unicode;
import quire.text.tokens.byte_trie;
import quire.text.tokens.merging;
import quire.text.tokens.vocabulary;

export namespace quire {

// sentencepiece's precompiled_charsmap: a double array (Aoe 1989) in 32-bit units that leads from the bytes of a text to a place
// in the replacements, which end with a zero byte each.
class CharacterMap {
public:
    // Error: the fault of the bytes, without the key; a replacement that is longer than longest_replacement. No bytes: nothing is replaced.
    static Result<CharacterMap> load(std::span<const std::uint8_t> bytes);

    // The longest replacement for a beginning of text.substr(at): it, and how many bytes it replaces; 0: none.
    std::pair<std::string_view, std::size_t> replace(std::string_view text, std::size_t at) const;

    // The longest one in use, by NFKC, has 33 bytes. A text's tokens are searched in memory for the replaced text.
    static constexpr std::size_t longest_replacement = 64;

private:
    std::vector<std::uint32_t> units_;
    std::string                replacements_;
};

class UnigramEncoder {
public:
    // Error: the key that is missing or inconsistent. The vocabulary of each call below is `file`'s.
    static Result<UnigramEncoder> load(const Gguf& file, const Vocabulary& vocabulary);

    void encode(const Vocabulary& vocabulary, std::string_view text, std::vector<Token>& out) const;

private:
    std::string normalize(const Vocabulary& vocabulary, std::string_view text) const;

    ByteTrie     tokens_, user_defined_;
    CharacterMap map_;
    bool         merge_spaces_ = false, byte_fallback_ = false;
    double       unknown_score_ = 0;
};

} // namespace quire

module :private;

namespace quire {

Result<CharacterMap> CharacterMap::load(std::span<const std::uint8_t> bytes) {
    CharacterMap map;
    if (bytes.empty()) return map;
    std::uint32_t size = 0;
    if (bytes.size() >= 4) std::memcpy(&size, bytes.data(), 4);
    if (bytes.size() < 4 || size % 4 != 0 || size > bytes.size() - 4)
        return fail("has ", bytes.size(), " bytes, too few for the ", size, " of its table");
    map.units_.resize(size / 4);
    if (size > 0) std::memcpy(map.units_.data(), bytes.data() + 4, size);
    map.replacements_.assign(reinterpret_cast<const char*>(bytes.data()) + 4 + size, bytes.size() - 4 - size);
    if (map.replacements_.empty() || map.replacements_.back() != 0) return fail("does not end with a zero byte");
    for (std::size_t at = 0, end; at < map.replacements_.size(); at = end + 1) {
        end = map.replacements_.find('\0', at);
        if (end - at > longest_replacement)
            return fail("has a replacement of ", end - at, " bytes; at most ", longest_replacement, " are taken");
    }
    return map;
}

std::pair<std::string_view, std::size_t> CharacterMap::replace(std::string_view text, std::size_t at) const {
    const auto offset = [](std::uint32_t unit) { return std::size_t(unit >> 10) << ((unit & 1u << 9) >> 6); };
    std::pair<std::string_view, std::size_t> best{};
    if (units_.empty()) return best;
    std::size_t node = offset(units_[0]);
    for (std::size_t i = at; i < text.size(); i++) { // one step per byte, whatever the table says
        const auto c = static_cast<unsigned char>(text[i]);
        node ^= c;
        if (c == 0 || node >= units_.size()) break;
        const std::uint32_t unit = units_[node];
        if ((unit & (1u << 31 | 0xff)) != c) break;
        node ^= offset(unit);
        if ((unit >> 8 & 1) == 0) continue;
        if (node >= units_.size()) break;
        const std::size_t place = units_[node] & ~(1u << 31);
        if (place < replacements_.size()) best = {replacements_.c_str() + place, i + 1 - at};
    }
    return best;
}

Result<UnigramEncoder> UnigramEncoder::load(const Gguf& file, const Vocabulary& vocabulary) {
    UnigramEncoder e;
    if (vocabulary.unknown < 0)
        return fail(file.path(), ": tokenizer.ggml.unknown_token_id is missing, a unigram vocabulary needs it");
    if (!file.find("tokenizer.ggml.scores"))
        return fail(file.path(), ": tokenizer.ggml.scores is missing, a unigram vocabulary needs it");
    constexpr std::string_view key   = "tokenizer.ggml.precompiled_charsmap";
    Result<const GgufArray*>   array = array_of(file, key, 0);
    if (!array) return std::unexpected(array.error());
    std::vector<std::uint8_t> bytes;
    if (*array) {
        if ((*array)->ints.size() + (*array)->uints.size() != (*array)->size())
            return fail(file.path(), ": ", key, " is not an array of bytes");
        for (std::int64_t b : (*array)->ints) bytes.push_back(std::uint8_t(b));
        for (std::uint64_t b : (*array)->uints) bytes.push_back(std::uint8_t(b));
    }
    Result<CharacterMap> map = CharacterMap::load(bytes);
    if (!map) return fail(file.path(), ": ", key, " ", map.error().message);
    e.map_             = std::move(*map);
    Result<bool> merge = file.boolean("tokenizer.ggml.remove_extra_whitespaces", false);
    if (!merge) return std::unexpected(merge.error());
    e.merge_spaces_  = *merge;
    e.byte_fallback_ = vocabulary.has_all_bytes();

    std::vector<std::pair<std::string_view, Token>> texts, user_defined;
    double                                          least = std::numeric_limits<double>::infinity();
    for (std::size_t i = 0; i < vocabulary.tokens.size(); i++) {
        const TokenType type = vocabulary.types[i];
        if (type == TokenType::normal) {
            if (!std::isfinite(vocabulary.scores[i]))
                return fail(file.path(), ": tokenizer.ggml.scores[", i, "] is not a finite number");
            least = std::min(least, double(vocabulary.scores[i]));
        }
        if (type == TokenType::normal || type == TokenType::user_defined)
            texts.emplace_back(vocabulary.tokens[i], Token(i));
        if (type == TokenType::user_defined) user_defined.emplace_back(vocabulary.tokens[i], Token(i));
    }
    e.unknown_score_ = (std::isfinite(least) ? least : 0) - 10; // sentencepiece's kUnkPenalty
    e.tokens_        = ByteTrie(std::move(texts));
    e.user_defined_  = ByteTrie(std::move(user_defined));
    return e;
}

// As sentencepiece's Normalizer: replaced characters, no extra spaces, ▁ for a space and one before the text.
std::string UnigramEncoder::normalize(const Vocabulary& vocabulary, std::string_view text) const {
    std::string out;
    out.reserve(text.size() + text.size() / 4);
    bool after_space = merge_spaces_, begun = false;
    for (std::size_t at = 0; at < text.size();) {
        std::string_view part;
        std::size_t      bytes = user_defined_.longest(text, at).second;
        if (bytes > 0) part = text.substr(at, bytes);
        else std::tie(part, bytes) = map_.replace(text, at);
        if (bytes == 0) {
            const CodePoint c = utf8_next(text, at);
            bytes             = std::size_t(c.bytes);
            part              = c.valid ? text.substr(at, bytes) : std::string_view("\xef\xbf\xbd");
        }
        at += bytes;
        for (char c : part) {
            if (c == ' ' && merge_spaces_ && after_space) continue;
            if (!begun && vocabulary.add_space_prefix) out += space_mark;
            begun       = true;
            after_space = c == ' ';
            if (c == ' ') out += space_mark;
            else out += c;
        }
    }
    while (merge_spaces_ && out.ends_with(space_mark)) out.resize(out.size() - space_mark.size());
    return out;
}

// The best way to each place of the text, from left to right (Viterbi 1967). Where no token reaches over a place, the tokens before it
// are settled, so that a long text needs no more memory than a part of it.
void UnigramEncoder::encode(const Vocabulary& vocabulary, std::string_view raw, std::vector<Token>& out) const {
    constexpr std::size_t least_part = std::size_t(1) << 16;
    const std::string     normalized = normalize(vocabulary, raw);
    struct Best {
        double      score = -std::numeric_limits<double>::infinity();
        std::size_t begin = 0; // of the last token, from the part's begin
        Token       id    = -1;
    };
    std::vector<Best>                          best;
    std::vector<std::pair<Token, std::size_t>> path; // tokens and where they begin, the last one first
    bool                                       after_unknown = false;
    for (std::string_view rest = normalized; !rest.empty();) {
        best.assign(1, Best{0, 0, -1});
        std::size_t at = 0;
        while (at < rest.size()) {
            if ((at >= least_part && best.size() == at + 1) || at >= longest_run) break; // nothing reaches over it
            const std::size_t one   = std::min(std::size_t(utf8_next(rest, at).bytes), rest.size() - at);
            const double      score = best[at].score;
            const auto        offer = [&](std::size_t end, double sum, Token id) {
                if (best.size() <= end) best.resize(end + 1);
                if (sum > best[end].score) best[end] = {sum, at, id};
            };
            bool           whole = false; // a token for just this character
            ByteTrie::Node node  = ByteTrie::root;
            for (std::size_t i = at; i < rest.size() && (node = tokens_.child(node, rest[i])) != ByteTrie::none; i++) {
                const Token id = tokens_.id(node);
                if (id < 0) continue;
                whole                   = whole || i + 1 - at == one;
                const bool user_defined = vocabulary.types[std::size_t(id)] == TokenType::user_defined;
                offer(i + 1, score + (user_defined ? 0.0 : double(vocabulary.scores[std::size_t(id)])), id);
            }
            if (!whole) offer(at + one, score + unknown_score_, vocabulary.unknown);
            at += one;
        }
        path.clear();
        for (std::size_t end = at; end > 0; end = best[end].begin) path.emplace_back(best[end].id, best[end].begin);
        std::size_t end = 0;
        for (std::size_t i = path.size(); i-- > 0;) {
            const auto [id, begin] = path[i];
            end                    = i > 0 ? path[i - 1].second : at;
            const bool unknown     = id == vocabulary.unknown;
            if (unknown && byte_fallback_) {
                for (char c : rest.substr(begin, end - begin))
                    out.push_back(vocabulary.byte_ids[static_cast<unsigned char>(c)]);
            } else if (!unknown || !after_unknown) out.push_back(id); // unknown ones side by side are one
            after_unknown = unknown;
        }
        rest.remove_prefix(at);
    }
}

} // namespace quire
