// quire.text.tokens.encoders.spm: text to tokens as sentencepiece's BPE models do it (tokenizer.ggml.model llama): characters are merged
// by the highest score of the whole. **Owns** the data to cut a long text into runs.
export module quire.text.tokens.encoders.spm;

import quire.core.base;
import quire.core.unicode;
import quire.text.tokens.merging;
import quire.text.tokens.vocabulary;

export namespace quire {

// Pairs of neighbouring characters that some token has in it: between any other two a token ends.
class PairSet {
public:
    void insert(std::string_view text) {
        for (std::size_t at = 0, next; at < text.size(); at = next) {
            const CodePoint left = utf8_next(text, at);
            next                 = at + std::size_t(left.bytes);
            if (next < text.size()) pairs_.push_back(key(left.value, utf8_next(text, next).value));
        }
    }
    // After the last insert().
    void finish() {
        std::ranges::sort(pairs_);
        pairs_.erase(std::unique(pairs_.begin(), pairs_.end()), pairs_.end());
        slots_.assign(std::bit_ceil(pairs_.size() * 2 + 2), 0);
        for (const std::uint64_t pair : pairs_) slots_[slot(pair)] = pair;
        pairs_ = {};
    }
    bool contains(char32_t left, char32_t right) const { return slots_[slot(key(left, right))] != 0; }

private:
    static std::uint64_t key(char32_t left, char32_t right) { return (std::uint64_t(left) << 32 | right) + 1; }
    std::size_t          slot(std::uint64_t key) const {
        std::size_t i = std::size_t((key * 0x9e3779b97f4a7c15ull) >> 20) & (slots_.size() - 1);
        while (slots_[i] != 0 && slots_[i] != key) i = (i + 1) & (slots_.size() - 1);
        return i;
    }
    std::vector<std::uint64_t> pairs_, slots_; // 0: free
};

class SpmEncoder {
public:
    // The vocabulary of each call below is this one.
    explicit SpmEncoder(const Vocabulary& vocabulary) {
        for (const std::string& token : vocabulary.tokens) pairs_.insert(token);
        pairs_.finish();
    }
    // In runs: a run ends between two characters that no token has side by side.
    void encode(const Vocabulary& vocabulary, std::string_view text, std::vector<Token>& out) const;

private:
    PairSet pairs_;
};

} // namespace quire

module :private;

namespace quire {

// One symbol per character; a symbol that is no token in the end becomes its bytes.
void merge_run(const Vocabulary& v, std::string_view text, Merging& merging, std::vector<Token>& out) {
    std::vector<Symbol>& symbols = merging.symbols;
    symbols.clear();
    for (std::size_t at = 0; at < text.size();) {
        const auto n = std::size_t(utf8_next(text, at).bytes);
        symbols.push_back({std::uint32_t(at), std::uint32_t(n), 0, 0, v.find(text.substr(at, n))});
        at += n;
    }
    merge_all(merging, [&](const Symbol& a, const Symbol& b) -> std::pair<double, Token> {
        if (a.bytes + b.bytes > v.longest) return {0, -1};
        const Token id = v.find(text.substr(a.start, a.bytes + b.bytes));
        return {id >= 0 ? -double(v.scores[std::size_t(id)]) : 0, id};
    });
    for (const Symbol& s : symbols) {
        if (s.bytes == 0) continue;
        if (s.id >= 0) {
            out.push_back(s.id);
            continue;
        }
        for (char c : text.substr(s.start, s.bytes)) {
            const Token id = v.byte_ids[static_cast<unsigned char>(c)];
            if (id >= 0 || v.unknown >= 0) out.push_back(id >= 0 ? id : v.unknown);
        }
    }
}

void SpmEncoder::encode(const Vocabulary& vocabulary, std::string_view raw, std::vector<Token>& out) const {
    Merging     merging;
    std::string run  = vocabulary.add_space_prefix ? std::string(space_mark) : std::string();
    char32_t    last = utf8_next(space_mark, 0).value;
    for (std::size_t at = 0; at < raw.size();) {
        const CodePoint        c    = utf8_next(raw, at);
        const std::string_view text = raw[at] == ' ' ? space_mark : raw.substr(at, std::size_t(c.bytes));
        const char32_t         next = utf8_next(text, 0).value;
        if (!run.empty() && (run.size() >= longest_run || !pairs_.contains(last, next))) {
            merge_run(vocabulary, run, merging, out);
            run.clear();
        }
        run += text;
        last = next;
        at += std::size_t(c.bytes);
    }
    if (!run.empty()) merge_run(vocabulary, run, merging, out);
}

} // namespace quire
