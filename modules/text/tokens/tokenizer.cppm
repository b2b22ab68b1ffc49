// quire.text.tokens.tokenizer: text ↔ token ids, from the vocabulary in a GGUF file: special tokens, and between them the encoder that
// tokenizer.ggml.model names. **Owns** the vocabulary and its encoder.
export module quire.text.tokens.tokenizer;

import quire.core.base;
import quire.core.unicode;
export import quire.model_file.gguf;
export import quire.text.marked_text;
import quire.text.tokens.byte_trie;
import quire.text.tokens.encoders.byte_pair;
import quire.text.tokens.encoders.rwkv;
import quire.text.tokens.encoders.spm;
import quire.text.tokens.encoders.unigram;
import quire.text.tokens.encoders.wordpiece;
import quire.text.tokens.pretokenizer;
export import quire.text.tokens.vocabulary;

export namespace quire {

struct EncodeOptions {
    bool add_special   = true; // BOS and EOS as the file says; for BERT [CLS] and [SEP]
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
    std::string model() const; // tokenizer.ggml.model
    Token       bos() const;   // -1 when the file names none; likewise below
    Token       eos() const;
    Token       sep() const;
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
    // The exact bytes of a whole text; the leading space that encode() added is dropped. Of word pieces (BERT) the words with spaces
    // between: how they were written is not in the tokens.
    std::string decode(std::span<const Token> ids, bool special = false) const;

private:
    struct Impl;
    explicit Tokenizer(std::unique_ptr<Impl> impl);
    std::unique_ptr<Impl> impl_;
};

// A text in the middle of another. Some vocabularies put a space before the first word of a text: a newline stands there instead, and its
// tokens are removed.
std::vector<Token> encode_inside(const Tokenizer& tokenizer, std::string_view text);

// Turns one stream of tokens into text, holding back bytes that are not yet a whole UTF-8 character.
// The text is always valid UTF-8: bytes that can never become valid come out as U+FFFD.
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

struct Tokenizer::Impl {
    using Encoder = std::variant<BytePairEncoder, SpmEncoder, WordPieceEncoder, UnigramEncoder, RwkvEncoder>;

    std::string            model;
    Vocabulary             vocabulary;
    std::optional<Encoder> encoder;
    ByteTrie               all_special, user_defined;

    bool is(std::string_view name) const { return model == name; }
};

Tokenizer::Tokenizer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept            = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer()                               = default;

int         Tokenizer::vocab_size() const { return int(impl_->vocabulary.tokens.size()); }
std::string Tokenizer::model() const { return impl_->model; }
Token       Tokenizer::bos() const { return impl_->vocabulary.bos; }
Token       Tokenizer::eos() const { return impl_->vocabulary.eos; }
Token       Tokenizer::sep() const { return impl_->vocabulary.sep; }
bool        Tokenizer::adds_bos() const { return impl_->vocabulary.add_bos && impl_->vocabulary.bos >= 0; }
bool        Tokenizer::is_end(Token id) const {
    return id >= 0 && id < vocab_size() && impl_->vocabulary.ends[std::size_t(id)];
}
std::vector<Token> Tokenizer::end_tokens() const {
    std::vector<Token> tokens;
    for (Token id = 0; id < vocab_size(); id++)
        if (is_end(id)) tokens.push_back(id);
    return tokens;
}
Token     Tokenizer::find(std::string_view piece) const { return impl_->vocabulary.find(piece); }
TokenType Tokenizer::type(Token id) const {
    return id >= 0 && id < vocab_size() ? impl_->vocabulary.types[std::size_t(id)] : TokenType::unused;
}
std::string_view Tokenizer::piece(Token id) const {
    return id >= 0 && id < vocab_size() ? std::string_view(impl_->vocabulary.tokens[std::size_t(id)]) : "";
}

// -- loading

// Each tokenizer model's defaults for keys that the file lacks; other models are refused.
struct ModelRow {
    std::string_view   name;
    VocabularyDefaults defaults;
};
constexpr std::array tokenizer_models{
    ModelRow{"llama",
             {.add_bos = true, .add_space_prefix = true, .bos = "<s>", .eos = "</s>", .unknown = "<unk>", .sep = {}}},
    ModelRow{"gpt2", {}},
    ModelRow{"whitespace", {}},
    ModelRow{"gemma4", {}},
    ModelRow{"bert", {.add_bos = true, .add_sep = true, .bos = "[CLS]", .eos = {}, .unknown = "[UNK]", .sep = "[SEP]"}},
    ModelRow{"t5", {.add_eos = true, .bos = {}, .eos = "</s>", .unknown = "<unk>", .sep = {}}},
    ModelRow{"rwkv", {}},
};

// The special tokens to look for in a text.
// `any`: normal tokens are looked for at each byte, too. So a long one would cost its length at each byte of a text of its letters.
Result<void> find_special(const Gguf& file, const Vocabulary& v, bool any, ByteTrie& all_special,
                          ByteTrie& user_defined) {
    constexpr std::size_t                           most_bytes = (std::size_t(1) << 24) - 1; // of all together
    constexpr std::size_t                           longest    = 1024;
    std::vector<std::pair<std::string_view, Token>> special, defined;
    std::size_t                                     bytes = 0;
    for (std::size_t i = 0; i < v.tokens.size(); i++) {
        const TokenType type = v.types[i];
        if (type == TokenType::user_defined) defined.emplace_back(v.tokens[i], Token(i));
        if (type == TokenType::user_defined || type == TokenType::control || type == TokenType::unknown) {
            special.emplace_back(v.tokens[i], Token(i));
            bytes += v.tokens[i].size();
        }
        if (v.tokens[i].size() > longest && (any || type != TokenType::normal))
            return fail(file.path(), ": token ", i, " has ", v.tokens[i].size(),
                        " bytes; one that is looked for at each place has at most ", longest);
    }
    if (bytes > most_bytes)
        return fail(file.path(), ": the special tokens have ", bytes, " bytes together, more than ", most_bytes);
    all_special  = ByteTrie(std::move(special));
    user_defined = ByteTrie(std::move(defined));
    return {};
}

Result<Tokenizer> Tokenizer::load(const Gguf& file) {
    auto  impl = std::make_unique<Impl>();
    Impl& t    = *impl;

    Result<std::string_view> model = file.text("tokenizer.ggml.model");
    if (!model) return std::unexpected(model.error());
    const auto* row = std::ranges::find_if(tokenizer_models, [&](const ModelRow& r) { return r.name == *model; });
    if (row == tokenizer_models.end()) {
        std::string known;
        for (const ModelRow& r : tokenizer_models) known += cat(known.empty() ? "" : ", ", r.name);
        return fail(file.path(), ": tokenizer.ggml.model is ", quote(*model), ", not one of ", known);
    }
    t.model                     = *model;
    VocabularyDefaults defaults = row->defaults;

    std::optional<PreTokenizer> pre;
    if (t.is("gpt2") || t.is("gemma4") || t.is("whitespace")) {
        Result<std::string_view> name = std::string_view(t.model); // the others have one only
        if (t.is("gpt2")) name = file.text("tokenizer.ggml.pre", "default");
        if (!name) return std::unexpected(name.error());
        Result<PreTokenizer> found = PreTokenizer::named(*name);
        if (!found) return fail(file.path(), ": ", found.error().message);
        pre              = std::move(*found);
        defaults.add_bos = pre->adds_bos;
    }
    Result<Vocabulary> vocabulary = Vocabulary::load(file, defaults);
    if (!vocabulary) return std::unexpected(vocabulary.error());
    t.vocabulary = std::move(*vocabulary);
    if (t.is("gemma4")) t.vocabulary.add_bos = true; // the files say no, but the model needs it

    const auto take = [&](auto loaded) -> Result<void> {
        if (!loaded) return std::unexpected(loaded.error());
        t.encoder = std::move(*loaded);
        return {};
    };
    Result<void> loaded;
    if (pre) loaded = take(BytePairEncoder::load(file, t.vocabulary, std::move(*pre)));
    else if (t.is("bert")) loaded = take(WordPieceEncoder::load(file, t.vocabulary));
    else if (t.is("t5")) loaded = take(UnigramEncoder::load(file, t.vocabulary));
    else if (t.is("rwkv")) t.encoder = RwkvEncoder(t.vocabulary);
    else t.encoder = SpmEncoder(t.vocabulary);
    if (!loaded) return std::unexpected(loaded.error());
    if (Result<void> found =
            find_special(file, t.vocabulary, t.is("t5") || t.is("rwkv"), t.all_special, t.user_defined);
        !found)
        return std::unexpected(found.error());
    return Tokenizer(std::move(impl));
}

// -- text to ids

bool is_ascii_space(char c) { return c == ' ' || (c >= 9 && c <= 13); }

std::vector<Token> Tokenizer::encode(std::string_view text, EncodeOptions options) const {
    const Impl&        t = *impl_;
    const Vocabulary&  v = t.vocabulary;
    std::vector<Token> out;
    if (options.add_special && adds_bos()) out.push_back(v.bos);
    const ByteTrie& special = options.parse_special ? t.all_special : t.user_defined;
    std::size_t     begin   = 0; // of the plain text since the last special token
    auto            plain   = [&](std::size_t end) {
        constexpr std::size_t most = std::size_t(1)
                                     << 28; // places in a piece, three bytes to a blank, fit into 31 bits
        for (std::size_t n = 0; begin < end; begin += n) {
            n = std::min(end - begin, most);
            std::visit([&](const auto& encoder) { encoder.encode(v, text.substr(begin, n), out); }, *t.encoder);
        }
    };
    auto refused = options.no_special.begin(); // the first that ends after `at`
    for (std::size_t at = 0; at < text.size();) {
        while (refused != options.no_special.end() && refused->end <= at) ++refused;
        auto [id, length] = special.longest(text, at);
        if (id >= 0 && refused != options.no_special.end() && refused->begin < at + std::size_t(length)) {
            // The longest one that ends before the refused part. Tokens that the vocabulary's maker defined, such as runs of
            // blanks, stay whole, unless they end a turn or are spelled like an end token.
            auto defined = t.user_defined.longest(text, at);
            if (defined.first >= 0) {
                const std::string_view spelled = text.substr(at, defined.second);
                if (v.ends[std::size_t(defined.first)] || (spelled.starts_with("<|") && spelled.ends_with("|>")))
                    defined = {-1, 0};
            }
            std::tie(id, length) = refused->begin > at ? special.longest(text.substr(0, refused->begin), at) : defined;
            if (defined.first >= 0 && (id < 0 || defined.second > length)) std::tie(id, length) = defined;
        }
        if (id < 0) {
            at++;
            continue;
        }
        const std::uint8_t strips = v.strips[std::size_t(id)];
        std::size_t        end    = at;
        while ((strips & Vocabulary::strip_left) && end > begin && is_ascii_space(text[end - 1])) end--;
        plain(end);
        out.push_back(id);
        at += length;
        while ((strips & Vocabulary::strip_right) && at < text.size() && is_ascii_space(text[at])) at++;
        begin = at;
    }
    plain(text.size());
    if (options.add_special && v.add_eos && v.eos >= 0) out.push_back(v.eos);
    if (options.add_special && t.is("bert") && v.add_sep && v.sep >= 0) out.push_back(v.sep);
    return out;
}

// -- ids to text

std::string Tokenizer::bytes(Token id, bool special) const {
    if (id < 0 || id >= vocab_size()) return {};
    const Impl&            t     = *impl_;
    const std::string_view piece = t.vocabulary.tokens[std::size_t(id)];
    switch (t.vocabulary.types[std::size_t(id)]) {
        case TokenType::control:
        case TokenType::unknown:
        case TokenType::unused: return special ? std::string(piece) : std::string();
        case TokenType::user_defined: return std::string(piece);
        case TokenType::byte:
            if (const int b = byte_of(piece); b >= 0) return std::string(1, char(b));
            break;
        case TokenType::normal: break;
    }
    if (const auto* encoder = std::get_if<BytePairEncoder>(&*t.encoder)) return encoder->bytes(piece);
    if (const auto* encoder = std::get_if<RwkvEncoder>(&*t.encoder)) return encoder->bytes(id);
    std::string out;
    for (std::size_t at = 0; at < piece.size();) {
        if (piece.substr(at).starts_with(space_mark)) {
            out += ' ';
            at += space_mark.size();
        } else out += piece[at++];
    }
    return out;
}

std::string Tokenizer::decode(std::span<const Token> ids, bool special) const {
    const bool  words = impl_->is("bert");
    std::string out;
    for (Token id : ids) {
        const bool apart =
            words && type(id) != TokenType::normal && !out.empty(); // a special token is a word of its own
        const std::string text = bytes(id, special);
        if (apart && !text.empty()) out += ' ';
        out += text;
    }
    if ((words || (!std::holds_alternative<BytePairEncoder>(*impl_->encoder) && impl_->vocabulary.add_space_prefix)) &&
        out.starts_with(' '))
        out.erase(0, 1);
    return words ? clean_spaces(out) : out;
}

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
