// quire.text.tokenizer: text ↔ token ids, from the vocabulary in a GGUF file. **Owns** the vocabulary.
export module quire.text.tokenizer;

import quire.core.base;
import quire.model_file.gguf;
import quire.text.marked_text;
import quire.text.pretokenizer;
import quire.core.std;
import quire.core.unicode;

export namespace quire {

enum class TokenType : std::uint8_t { normal = 1, unknown = 2, control = 3, user_defined = 4, unused = 5, byte = 6 };

struct EncodeOptions {
    bool add_special   = true; // BOS and EOS as the file's add_bos_token / add_eos_token say
    bool parse_special = true; // text that spells a special token becomes that token
    // Where no byte belongs to a special token, whatever it spells: ascending, apart from each other.
    std::span<const TextSpan> no_special = {};
};

// Immutable after load, so any number of threads may use one.
class Tokenizer {
public:
    // Error: the key that is missing or inconsistent.
    static Result<Tokenizer> load(const Gguf& file);

    Tokenizer(Tokenizer&&) noexcept;
    Tokenizer& operator=(Tokenizer&&) noexcept;
    ~Tokenizer();

    int         vocab_size() const;
    std::string model() const; // "llama" (SPM) or "gpt2" (byte-level BPE)
    Token       bos() const;   // -1 when the file names none; likewise below
    Token       eos() const;
    bool        adds_bos() const;
    bool        is_end(Token id) const; // EOS, EOT, EOM and similar: generation ends here
    // All of them, ascending.
    std::vector<Token> end_tokens() const;
    TokenType          type(Token id) const;
    Token              find(std::string_view piece) const; // the token spelled exactly so in the file, or -1
    std::string_view   piece(Token id) const;              // as spelled in the file

    // The time is practically linear in the text's length. Bytes that are not UTF-8 are encoded too. Beside its result it takes
    // at most some 100 MiB, whatever the text: more than a MiB in which no token has to end is cut after that MiB.
    std::vector<Token> encode(std::string_view text, EncodeOptions options = {}) const;

    // The exact bytes of one token in the middle of a text; control tokens are empty unless `special`.
    std::string bytes(Token id, bool special = false) const;
    // The exact bytes of a whole text; the leading space that encode() added is dropped.
    std::string decode(std::span<const Token> ids, bool special = false) const;

private:
    struct Impl;
    explicit Tokenizer(std::unique_ptr<Impl> impl);
    std::unique_ptr<Impl> impl_;
};

// Turns one stream of tokens into text, holding back bytes that are not yet a whole UTF-8 character.
// What it returns is always valid UTF-8: bytes that can never become valid come out as U+FFFD.
class Detokenizer {
public:
    // `special`: spell out control tokens. `first`: the stream begins a text (drops SPM's leading space).
    explicit Detokenizer(const Tokenizer& tokenizer, bool first = false, bool special = false);
    std::string push(Token id);
    std::string finish(); // the bytes held back, with U+FFFD for an incomplete character

private:
    const Tokenizer* tokenizer_;
    bool             first_, special_;
    std::string      held_;
};

} // namespace quire

module :private;

namespace quire {

// An open-addressing map from pairs of ids to what their merge gives: a vocabulary has a quarter million of them.
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

// Finds special tokens in a text: a trie over their bytes, the longest match at each place, first place first.
class SpecialTrie {
public:
    static constexpr std::size_t most_bytes = (1u << 24) - 1; // of all texts together: a node for each, and the root

    void insert(std::string_view text, Token id) {
        std::uint32_t node = 0;
        for (char c : text) {
            auto [at, fresh] = children_.emplace(node << 8 | static_cast<unsigned char>(c), std::uint32_t(ids_.size()));
            if (fresh) ids_.push_back(-1);
            node = at->second;
        }
        ids_[node]                                  = id;
        first_[static_cast<unsigned char>(text[0])] = true;
    }
    // The longest special token that starts at text[at]: its id and length, or -1.
    std::pair<Token, std::size_t> match(std::string_view text, std::size_t at) const {
        std::pair<Token, std::size_t> best{-1, 0};
        if (!first_[static_cast<unsigned char>(text[at])]) return best;
        std::uint32_t node = 0;
        for (std::size_t i = at; i < text.size(); i++) {
            auto next = children_.find(node << 8 | static_cast<unsigned char>(text[i]));
            if (next == children_.end()) break;
            node = next->second;
            if (ids_[node] >= 0) best = {ids_[node], i + 1 - at};
        }
        return best;
    }

private:
    std::unordered_map<std::uint32_t, std::uint32_t> children_; // node << 8 | byte → node; nodes stay below 2^24
    std::vector<Token>                               ids_{-1};
    std::array<bool, 256>                            first_{};
};

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

struct Merging;

struct Tokenizer::Impl {
    bool                                        spm               = false;
    PreTokenizer                                pre               = PreTokenizer::standard;
    bool                                        whole_words_first = false; // a word that is a token needs no merges
    bool                                        add_bos = false, add_eos = false, add_space_prefix = false;
    Token                                       bos = -1, eos = -1, unknown = -1;
    std::vector<std::string>                    tokens; // as in the file
    std::vector<float>                          scores;
    std::vector<TokenType>                      types;
    std::vector<bool>                           ends;
    std::unordered_map<std::string_view, Token> ids;
    std::size_t                                 longest = 0; // bytes of the longest token
    MergeTable                                  merges;
    PairSet                                     pairs; // SPM
    SpecialTrie                                 all_special, user_defined;
    std::array<Token, 256>                      byte_ids{}; // the token of one byte, or -1
    std::array<std::string, 256>                byte_texts; // BPE: how a byte is spelled in a token
    std::unordered_map<char32_t, std::uint8_t>  text_bytes; // and back

    void  encode_spm(std::string_view text, std::vector<Token>& out) const;
    void  encode_bpe(std::string_view text, std::vector<Token>& out) const;
    void  merge_run(std::string_view run, Merging& merging, std::vector<Token>& out) const;
    void  merge_word(std::string_view word, Merging& merging, std::vector<Token>& out) const;
    Token find(std::string_view piece) const {
        auto at = ids.find(piece);
        return at == ids.end() ? -1 : at->second;
    }
};

Tokenizer::Tokenizer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept            = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer()                               = default;

int         Tokenizer::vocab_size() const { return int(impl_->tokens.size()); }
std::string Tokenizer::model() const { return impl_->spm ? "llama" : "gpt2"; }
Token       Tokenizer::bos() const { return impl_->bos; }
Token       Tokenizer::eos() const { return impl_->eos; }
bool        Tokenizer::adds_bos() const { return impl_->add_bos && impl_->bos >= 0; }
bool        Tokenizer::is_end(Token id) const { return id >= 0 && id < vocab_size() && impl_->ends[std::size_t(id)]; }
std::vector<Token> Tokenizer::end_tokens() const {
    std::vector<Token> tokens;
    for (Token id = 0; id < vocab_size(); id++)
        if (is_end(id)) tokens.push_back(id);
    return tokens;
}
Token     Tokenizer::find(std::string_view piece) const { return impl_->find(piece); }
TokenType Tokenizer::type(Token id) const {
    return id >= 0 && id < vocab_size() ? impl_->types[std::size_t(id)] : TokenType::unused;
}
std::string_view Tokenizer::piece(Token id) const {
    return id >= 0 && id < vocab_size() ? std::string_view(impl_->tokens[std::size_t(id)]) : "";
}

// -- loading

constexpr std::string_view spm_space = "\xe2\x96\x81"; // ▁ U+2581

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

// "<0x41>" → 65, anything else → -1
int byte_of(std::string_view piece) {
    unsigned value = 0;
    if (piece.size() != 6 || !piece.starts_with("<0x") || piece[5] != '>') return -1;
    auto [end, error] = std::from_chars(piece.data() + 3, piece.data() + 5, value, 16);
    return error == std::errc{} && end == piece.data() + 5 ? int(value) : -1;
}

// An array under `key` with as many elements as there are tokens, or null if there is none.
Result<const GgufArray*> array_of(const Gguf& file, std::string_view key, std::size_t n) {
    const GgufValue* value = file.find(key);
    if (!value) return nullptr;
    const auto* array = std::get_if<GgufArray>(value);
    if (!array) return fail(file.path(), ": ", key, " is not an array");
    if (n > 0 && array->size() != n)
        return fail(file.path(), ": ", key, " has ", array->size(), " elements for ", n, " tokens");
    return array;
}

Result<Token> special_id(const Gguf& file, std::string_view key, std::size_t n) {
    Result<std::int64_t> id = file.integer(key, -1);
    if (!id) return std::unexpected(id.error());
    if (*id == -1 || *id == 0xffffffff) return -1; // none, written as either
    if (*id < 0 || *id >= std::int64_t(n))
        return fail(file.path(), ": ", key, " is ", *id, ", the vocabulary has ", n, " tokens");
    return Token(*id);
}

Result<Tokenizer> Tokenizer::load(const Gguf& file) {
    auto  impl = std::make_unique<Impl>();
    Impl& t    = *impl;

    Result<std::string_view> model = file.text("tokenizer.ggml.model");
    if (!model) return std::unexpected(model.error());
    if (*model != "llama" && *model != "gpt2")
        return fail(file.path(), ": tokenizer.ggml.model is ", quote(*model), ", not one of llama, gpt2");
    t.spm = *model == "llama";

    Result<const GgufArray*> tokens = array_of(file, "tokenizer.ggml.tokens", 0);
    if (!tokens) return std::unexpected(tokens.error());
    if (!*tokens || (*tokens)->strings.empty())
        return fail(file.path(), ": tokenizer.ggml.tokens is ",
                    *tokens ? "empty or not an array of strings" : "missing");
    const std::size_t n = (*tokens)->strings.size();
    if (n > 1 << 28) return fail(file.path(), ": tokenizer.ggml.tokens has ", n, " tokens, more than any vocabulary");
    t.tokens.assign((*tokens)->strings.begin(), (*tokens)->strings.end());
    t.ids.reserve(n);
    for (std::size_t i = 0; i < n; i++) {
        t.ids.emplace(t.tokens[i], Token(i));
        t.longest = std::max(t.longest, t.tokens[i].size());
    }

    Result<const GgufArray*> scores = array_of(file, "tokenizer.ggml.scores", n);
    if (!scores) return std::unexpected(scores.error());
    if (*scores && (*scores)->floats.size() != n)
        return fail(file.path(), ": tokenizer.ggml.scores is not an array of numbers");
    if (*scores) t.scores.assign((*scores)->floats.begin(), (*scores)->floats.end());
    else t.scores.assign(n, 0.0f);
    for (float& s : t.scores)
        if (std::isnan(s)) s = -std::numeric_limits<float>::infinity(); // an order needs no NaN

    Result<const GgufArray*> types = array_of(file, "tokenizer.ggml.token_type", n);
    if (!types) return std::unexpected(types.error());
    if (*types && (*types)->ints.size() + (*types)->uints.size() != n)
        return fail(file.path(), ": tokenizer.ggml.token_type is not an array of integers");
    t.types.assign(n, TokenType::normal);
    for (std::size_t i = 0; *types && i < n; i++) {
        const std::int64_t type = (*types)->ints.empty() ? std::int64_t((*types)->uints[i]) : (*types)->ints[i];
        if (type >= 1 && type <= 6) t.types[i] = TokenType(type);
    }

    for (auto [key, id] :
         {std::pair("tokenizer.ggml.bos_token_id", &t.bos), std::pair("tokenizer.ggml.eos_token_id", &t.eos),
          std::pair("tokenizer.ggml.unknown_token_id", &t.unknown)}) {
        Result<Token> found = special_id(file, key, n);
        if (!found) return std::unexpected(found.error());
        *id = *found;
    }
    t.ends.assign(n, false);
    for (std::string_view key :
         {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"}) {
        Result<Token> id = special_id(file, key, n);
        if (!id) return std::unexpected(id.error());
        if (*id >= 0) t.ends[std::size_t(*id)] = true;
    }
    for (std::string_view piece :
         {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<end_of_turn>", "</s>"})
        if (Token id = t.find(piece); id >= 0 && t.types[std::size_t(id)] == TokenType::control)
            t.ends[std::size_t(id)] = true;

    if (!t.spm) {
        Result<std::string_view> pre = file.text("tokenizer.ggml.pre", "default");
        if (!pre) return std::unexpected(pre.error());
        auto kind = pre_tokenizer_named(*pre);
        if (!kind)
            return fail(file.path(), ": tokenizer.ggml.pre is ", quote(*pre), ", not one of ", pre_tokenizer_names());
        t.pre               = *kind;
        t.whole_words_first = *kind == PreTokenizer::llama3;
    }
    struct Flag {
        const char* key;
        bool*       value;
        bool        fallback;
    };
    for (const Flag& flag : {Flag{"tokenizer.ggml.add_bos_token", &t.add_bos, t.spm || t.pre == PreTokenizer::llama3},
                             Flag{"tokenizer.ggml.add_eos_token", &t.add_eos, false},
                             Flag{"tokenizer.ggml.add_space_prefix", &t.add_space_prefix, t.spm}}) {
        Result<bool> value = file.boolean(flag.key, flag.fallback);
        if (!value) return std::unexpected(value.error());
        *flag.value = *value;
    }

    spell_bytes(t.byte_texts, t.text_bytes);
    t.byte_ids.fill(-1);
    if (t.spm) {
        for (std::size_t i = 0; i < n; i++)
            if (const int b = byte_of(t.tokens[i]); b >= 0 && t.types[i] == TokenType::byte)
                t.byte_ids[std::size_t(b)] = Token(i);
        for (const std::string& token : t.tokens) t.pairs.insert(token);
        t.pairs.finish();
    } else {
        for (std::size_t b = 0; b < 256; b++) t.byte_ids[b] = t.find(t.byte_texts[b]);
        Result<const GgufArray*> merges = array_of(file, "tokenizer.ggml.merges", 0);
        if (!merges) return std::unexpected(merges.error());
        const std::size_t n_merges = *merges ? (*merges)->strings.size() : 0;
        if (*merges && n_merges != (*merges)->size())
            return fail(file.path(), ": tokenizer.ggml.merges is not an array of strings");
        t.merges.reserve(n_merges);
        std::string whole;
        for (std::size_t i = 0; i < n_merges; i++) {
            const std::string_view merge = (*merges)->strings[i];
            const std::size_t      space = merge.find(' ', 1);
            if (space == std::string_view::npos)
                return fail(file.path(), ": tokenizer.ggml.merges[", i, "] is ", quote(merge),
                            ", not two parts with a space between");
            const std::string_view left = merge.substr(0, space), right = merge.substr(space + 1);
            whole.assign(left).append(right);
            const Token a = t.find(left), b = t.find(right), c = t.find(whole);
            if (a >= 0 && b >= 0 && c >= 0) t.merges.insert(a, b, {std::int32_t(i), c});
        }
    }

    const auto is_special = [&](std::size_t i) {
        return t.types[i] == TokenType::user_defined || t.types[i] == TokenType::control ||
               t.types[i] == TokenType::unknown;
    };
    std::size_t special_bytes = 0;
    for (std::size_t i = 0; i < n; i++) special_bytes += is_special(i) ? t.tokens[i].size() : 0;
    if (special_bytes > SpecialTrie::most_bytes)
        return fail(file.path(), ": the special tokens have ", special_bytes, " bytes together, more than ",
                    SpecialTrie::most_bytes);
    for (std::size_t i = 0; i < n; i++) {
        if (t.tokens[i].empty()) continue;
        if (t.types[i] == TokenType::user_defined) t.user_defined.insert(t.tokens[i], Token(i));
        if (is_special(i)) t.all_special.insert(t.tokens[i], Token(i));
    }
    return Tokenizer(std::move(impl));
}

// -- text to ids

std::vector<Token> Tokenizer::encode(std::string_view text, EncodeOptions options) const {
    const Impl&        t = *impl_;
    std::vector<Token> out;
    if (options.add_special && adds_bos()) out.push_back(t.bos);
    const SpecialTrie& special = options.parse_special ? t.all_special : t.user_defined;
    std::size_t        begin   = 0; // of the plain text since the last special token
    auto               plain   = [&](std::size_t end) {
        constexpr std::size_t most = std::size_t(1)
                                     << 28; // places in a piece, three bytes to a blank, fit into 31 bits
        for (std::size_t n = 0; begin < end; begin += n) {
            n = std::min(end - begin, most);
            if (t.spm) t.encode_spm(text.substr(begin, n), out);
            else t.encode_bpe(text.substr(begin, n), out);
        }
    };
    auto refused = options.no_special.begin(); // the first that ends after `at`
    for (std::size_t at = 0; at < text.size();) {
        while (refused != options.no_special.end() && refused->end <= at) ++refused;
        auto [id, length] = special.match(text, at);
        if (id >= 0 && refused != options.no_special.end() && refused->begin < at + std::size_t(length)) {
            // The longest one that ends before the refused part. Tokens that the vocabulary's maker defined, such as runs of
            // blanks, stay whole, unless they end a turn or are spelled like those that do.
            auto defined = t.user_defined.match(text, at);
            if (defined.first >= 0) {
                const std::string_view spelled = text.substr(at, defined.second);
                if (t.ends[std::size_t(defined.first)] || (spelled.starts_with("<|") && spelled.ends_with("|>")))
                    defined = {-1, 0};
            }
            std::tie(id, length) = refused->begin > at ? special.match(text.substr(0, refused->begin), at) : defined;
            if (defined.first >= 0 && (id < 0 || defined.second > length)) std::tie(id, length) = defined;
        }
        if (id < 0) {
            at++;
            continue;
        }
        plain(at);
        out.push_back(id);
        begin = at += length;
    }
    plain(text.size());
    if (options.add_special && t.add_eos && t.eos >= 0) out.push_back(t.eos);
    return out;
}

// A run of bytes on its way to being one token, in a list of its neighbours.
struct Symbol {
    std::uint32_t start, bytes; // bytes 0: merged into the one before it
    std::int32_t  prev, next;
    Token         id;
};

// What may still be merged. Smaller orders first, the leftmost of equals.
struct Candidate {
    double        order; // a score or a rank
    std::int32_t  left, right;
    std::uint32_t bytes; // of both when the entry was made: one of them has changed if they differ now
    Token         id;
};

// The memory of merge_all(), used again for the next word.
struct Merging {
    std::vector<Symbol>    symbols;
    std::vector<Candidate> heap;
    std::string            text;
};

// No token is sought in more bytes than these at once: merging takes some 90 times their room.
constexpr std::size_t longest_run = std::size_t(1) << 20;

// Merges two neighbours as long as a merge is known, the best first and the leftmost of equals: the queue holds one
// entry per pair that ever came to be neighbours, so the work is n log n however long the text is.
// best(left, right) → {order, id}: what the two give; id -1 for no merge.
template <class Best>
void merge_all(Merging& m, const Best& best) {
    auto& [symbols, heap, text] = m;
    for (std::size_t i = 0; i < symbols.size(); i++) {
        symbols[i].prev = std::int32_t(i) - 1;
        symbols[i].next = i + 1 < symbols.size() ? std::int32_t(i) + 1 : -1;
    }
    auto later = [](const Candidate& a, const Candidate& b) {
        return a.order != b.order ? a.order > b.order : a.left > b.left;
    };
    heap.clear();
    auto offer = [&](std::int32_t left, std::int32_t right) {
        if (left < 0 || right < 0) return;
        const Symbol &a = symbols[std::size_t(left)], &b = symbols[std::size_t(right)];
        auto [order, id] = best(a, b);
        if (id < 0) return;
        heap.push_back({order, left, right, a.bytes + b.bytes, id});
        std::push_heap(heap.begin(), heap.end(), later);
    };
    for (std::size_t i = 1; i < symbols.size(); i++) offer(std::int32_t(i) - 1, std::int32_t(i));
    while (!heap.empty()) {
        std::pop_heap(heap.begin(), heap.end(), later);
        const Candidate e = heap.back();
        heap.pop_back();
        Symbol &a = symbols[std::size_t(e.left)], &b = symbols[std::size_t(e.right)];
        if (a.bytes == 0 || b.bytes == 0 || a.next != e.right || a.bytes + b.bytes != e.bytes) continue;
        a.bytes = e.bytes;
        a.id    = e.id;
        a.next  = b.next;
        b.bytes = 0;
        if (a.next >= 0) symbols[std::size_t(a.next)].prev = e.left;
        offer(a.prev, e.left);
        offer(e.left, a.next);
    }
}

// In runs: a run ends between two characters that no token has side by side.
void Tokenizer::Impl::encode_spm(std::string_view raw, std::vector<Token>& out) const {
    Merging     merging;
    std::string run  = add_space_prefix ? std::string(spm_space) : std::string();
    char32_t    last = utf8_next(spm_space, 0).value;
    for (std::size_t at = 0; at < raw.size();) {
        const CodePoint        c    = utf8_next(raw, at);
        const std::string_view text = raw[at] == ' ' ? spm_space : raw.substr(at, std::size_t(c.bytes));
        const char32_t         next = utf8_next(text, 0).value;
        if (!run.empty() && (run.size() >= longest_run || !pairs.contains(last, next))) {
            merge_run(run, merging, out);
            run.clear();
        }
        run += text;
        last = next;
        at += std::size_t(c.bytes);
    }
    if (!run.empty()) merge_run(run, merging, out);
}

// One symbol per character, merged by the highest score of the whole; what is no token in the end becomes its bytes.
void Tokenizer::Impl::merge_run(std::string_view text, Merging& merging, std::vector<Token>& out) const {
    std::vector<Symbol>& symbols = merging.symbols;
    symbols.clear();
    for (std::size_t at = 0; at < text.size();) {
        const auto n = std::size_t(utf8_next(text, at).bytes);
        symbols.push_back({std::uint32_t(at), std::uint32_t(n), 0, 0, find(text.substr(at, n))});
        at += n;
    }
    merge_all(merging, [&](const Symbol& a, const Symbol& b) -> std::pair<double, Token> {
        if (a.bytes + b.bytes > longest) return {0, -1};
        const Token id = find(text.substr(a.start, a.bytes + b.bytes));
        return {id >= 0 ? -double(scores[std::size_t(id)]) : 0, id};
    });
    for (const Symbol& s : symbols) {
        if (s.bytes == 0) continue;
        if (s.id >= 0) {
            out.push_back(s.id);
            continue;
        }
        for (char c : text.substr(s.start, s.bytes)) {
            const Token id = byte_ids[static_cast<unsigned char>(c)];
            if (id >= 0 || unknown >= 0) out.push_back(id >= 0 ? id : unknown);
        }
    }
}

void Tokenizer::Impl::encode_bpe(std::string_view text, std::vector<Token>& out) const {
    constexpr std::size_t least_window = std::size_t(1) << 16, most_window = longest_run * 4;
    Merging               merging;
    for (std::size_t window = least_window; !text.empty();) {
        std::vector<std::size_t> ends = pre_tokenize_begin(pre, text, window);
        if (ends.empty() && window < most_window) {
            window *= 4; // long words
            continue;
        }
        if (ends.empty()) ends = {longest_run};
        std::size_t begin = 0;
        for (std::size_t end : ends)
            for (std::size_t bytes; begin < end; begin += bytes) {
                bytes = std::min(end - begin, longest_run);
                merge_word(text.substr(begin, bytes), merging, out);
            }
        text.remove_prefix(begin);
        window = least_window;
    }
}

// One symbol per byte, merged in the order of the merges' ranks.
void Tokenizer::Impl::merge_word(std::string_view word, Merging& merging, std::vector<Token>& out) const {
    if (whole_words_first && word.size() <= longest) {
        std::string& spelled = merging.text;
        spelled.clear();
        for (char c : word) spelled += byte_texts[static_cast<unsigned char>(c)];
        if (const Token id = find(spelled); id >= 0) return out.push_back(id);
    }
    std::vector<Symbol>& symbols = merging.symbols;
    symbols.clear();
    for (std::size_t i = 0; i < word.size(); i++)
        symbols.push_back({std::uint32_t(i), 1, 0, 0, byte_ids[static_cast<unsigned char>(word[i])]});
    merge_all(merging, [&](const Symbol& a, const Symbol& b) -> std::pair<double, Token> {
        const MergeTable::Merge m = merges.find(a.id, b.id);
        return {double(m.rank), m.id};
    });
    for (const Symbol& s : symbols)
        if (s.bytes > 0 && (s.id >= 0 || unknown >= 0)) out.push_back(s.id >= 0 ? s.id : unknown);
}

// -- ids to text

std::string Tokenizer::bytes(Token id, bool special) const {
    if (id < 0 || id >= vocab_size()) return {};
    const Impl&            t     = *impl_;
    const std::string_view piece = t.tokens[std::size_t(id)];
    std::string            out;
    switch (t.types[std::size_t(id)]) {
        case TokenType::control:
        case TokenType::unknown:
        case TokenType::unused: return special ? std::string(piece) : std::string();
        case TokenType::user_defined: return std::string(piece);
        case TokenType::byte:
            if (const int b = byte_of(piece); b >= 0) return std::string(1, char(b));
            break;
        case TokenType::normal: break;
    }
    for (std::size_t at = 0; at < piece.size();) {
        const CodePoint        c    = utf8_next(piece, at);
        const std::string_view text = piece.substr(at, std::size_t(c.bytes));
        auto                   byte = t.spm ? t.text_bytes.end() : t.text_bytes.find(c.value);
        if (t.spm) out += text == spm_space ? " " : text;
        else if (c.valid && byte != t.text_bytes.end()) out += char(byte->second);
        else out += text;
        at += std::size_t(c.bytes);
    }
    return out;
}

std::string Tokenizer::decode(std::span<const Token> ids, bool special) const {
    std::string out;
    for (Token id : ids) out += bytes(id, special);
    if (impl_->spm && impl_->add_space_prefix && out.starts_with(' ')) out.erase(0, 1);
    return out;
}

Detokenizer::Detokenizer(const Tokenizer& tokenizer, bool first, bool special)
    : tokenizer_(&tokenizer), first_(first), special_(special) {}

std::string Detokenizer::push(Token id) {
    const std::string bytes =
        first_ && held_.empty() ? tokenizer_->decode(std::span(&id, 1), special_) : tokenizer_->bytes(id, special_);
    if (!tokenizer_->bytes(id, special_).empty()) first_ = false;
    held_ += bytes;
    const std::size_t keep = std::size_t(utf8_incomplete(held_));
    std::string       out  = utf8_repair(std::string_view(held_).substr(0, held_.size() - keep));
    held_.erase(0, held_.size() - keep);
    return out;
}

std::string Detokenizer::finish() { return utf8_repair(std::exchange(held_, {})); }

} // namespace quire
