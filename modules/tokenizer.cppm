// quire.tokenizer: text ↔ token ids, from the vocabulary in a GGUF file. **Owns** the vocabulary.
export module quire.tokenizer;

import quire.base;
import quire.gguf;
import quire.std;

export namespace quire {

enum class TokenType : std::uint8_t { normal = 1, unknown = 2, control = 3, user_defined = 4, unused = 5, byte = 6 };

struct EncodeOptions {
    bool add_special = true;    // BOS and EOS as the file's add_bos_token / add_eos_token say
    bool parse_special = true;  // text that spells a special token becomes that token
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
    std::string model() const;          // "llama" (SPM) or "gpt2" (byte-level BPE)
    Token       bos() const;            // -1 when the file names none; likewise below
    Token       eos() const;
    bool        adds_bos() const;
    bool        is_end(Token id) const;  // EOS, EOT, EOM and the like: generation stops here
    TokenType   type(Token id) const;
    Token       find(std::string_view piece) const;  // the token spelled exactly so in the file, or -1
    std::string_view piece(Token id) const;          // as spelled in the file

    // Time linear in the text for all practical purposes; bytes that are not UTF-8 are encoded too.
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
    std::string finish();  // what was held back, U+FFFD in place of an incomplete character

private:
    const Tokenizer* tokenizer_;
    bool             first_, special_;
    std::string      held_;
};

} // namespace quire
