// quire.text.tokens.vocabulary: the tokens of a GGUF file, which of them are special, and the file's rules for their use.
// **Owns** the tokens.
export module quire.text.tokens.vocabulary;

import quire.core.base;
import quire.core.unicode;
export import quire.model_file.gguf;

export namespace quire {

enum class TokenType : std::uint8_t { normal = 1, unknown = 2, control = 3, user_defined = 4, unused = 5, byte = 6 };

inline constexpr std::string_view space_mark =
    "\xe2\x96\x81"; // ▁ U+2581: a space, in the vocabularies of sentencepiece

// The settings of a tokenizer for which the file has no key.
struct VocabularyDefaults {
    bool             add_bos = false, add_eos = false, add_sep = false, add_space_prefix = false;
    std::string_view bos, eos, unknown, sep; // spellings of these tokens, each taken only where it is there and special
};

// Immutable after load.
struct Vocabulary {
    Vocabulary()                        = default;
    Vocabulary(Vocabulary&&)            = default; // no copies: `ids` looks into `tokens`
    Vocabulary& operator=(Vocabulary&&) = default;

    std::vector<std::string>                    tokens; // as in the file
    std::vector<float>                          scores; // 0 where the file has none, -infinity for NaN
    std::vector<TokenType>                      types;
    std::vector<bool>                           ends;        // generation ends here
    std::vector<std::uint8_t>                   strips;      // strip_left, strip_right
    std::unordered_map<std::string_view, Token> ids;         // of two equal ones the first
    std::array<Token, 256>                      byte_ids{};  // of tokens such as <0x41>, or -1
    std::size_t                                 longest = 0; // bytes of the longest token
    Token                                       bos = -1, eos = -1, unknown = -1, sep = -1;
    bool add_bos = false, add_eos = false, add_sep = false, add_space_prefix = false;

    // Blanks before or behind this special token belong to it.
    static constexpr std::uint8_t strip_left = 1, strip_right = 2;

    // Error: the key that is missing or inconsistent.
    static Result<Vocabulary> load(const Gguf& file, const VocabularyDefaults& defaults);

    Token find(std::string_view piece) const {
        auto at = ids.find(piece);
        return at == ids.end() ? -1 : at->second;
    }
    bool has_all_bytes() const; // any text can be spelled with byte tokens
};

// "<0x41>" → 65, anything else → -1
int byte_of(std::string_view piece);

// An array under `key` with as many elements as there are tokens (0: any number), or null if there is none.
Result<const GgufArray*> array_of(const Gguf& file, std::string_view key, std::size_t n);

} // namespace quire

module :private;

namespace quire {

int byte_of(std::string_view piece) {
    if (piece.size() != 6 || !piece.starts_with("<0x") || piece[5] != '>') return -1;
    return to_number<int>(piece.substr(3, 2), 16).value_or(-1);
}

Result<const GgufArray*> array_of(const Gguf& file, std::string_view key, std::size_t n) {
    const GgufValue* value = file.find(key);
    if (!value) return nullptr;
    const auto* array = std::get_if<GgufArray>(value);
    if (!array) return fail(file.path(), ": ", key, " is not an array");
    if (n > 0 && array->size() != n)
        return fail(file.path(), ": ", key, " has ", array->size(), " elements for ", n, " tokens");
    return array;
}

bool Vocabulary::has_all_bytes() const {
    for (Token id : byte_ids)
        if (id < 0) return false;
    return true;
}

Result<Token> special_id(const Gguf& file, std::string_view key, std::size_t n) {
    Result<std::int64_t> id = file.integer(key, -1);
    if (!id) return std::unexpected(id.error());
    if (*id == -1 || *id == 0xffffffff) return -1; // none, written as either
    if (*id < 0 || *id >= std::int64_t(n))
        return fail(file.path(), ": ", key, " is ", *id, ", the vocabulary has ", n, " tokens");
    return Token(*id);
}

// The tokens, their scores and types.
Result<void> load_tokens(const Gguf& file, Vocabulary& v) {
    Result<const GgufArray*> tokens = array_of(file, "tokenizer.ggml.tokens", 0);
    if (!tokens) return std::unexpected(tokens.error());
    if (!*tokens || (*tokens)->strings.empty())
        return fail(file.path(), ": tokenizer.ggml.tokens is ",
                    *tokens ? "empty or not an array of strings" : "missing");
    const std::size_t n = (*tokens)->strings.size();
    if (n > 1 << 28) return fail(file.path(), ": tokenizer.ggml.tokens has ", n, " tokens, more than any vocabulary");
    v.tokens.assign((*tokens)->strings.begin(), (*tokens)->strings.end());
    v.ids.reserve(n);
    for (std::size_t i = 0; i < n; i++) {
        v.ids.emplace(v.tokens[i], Token(i));
        v.longest = std::max(v.longest, v.tokens[i].size());
    }

    Result<const GgufArray*> scores = array_of(file, "tokenizer.ggml.scores", n);
    if (!scores) return std::unexpected(scores.error());
    v.scores.assign(n, 0.0f);
    if (*scores && (*scores)->floats.size() + (*scores)->ints.size() != n)
        return fail(file.path(), ": tokenizer.ggml.scores is not an array of numbers");
    for (std::size_t i = 0; *scores && i < n; i++) {
        const auto score = float((*scores)->ints.empty() ? (*scores)->floats[i] : double((*scores)->ints[i]));
        v.scores[i]      = std::isnan(score) ? -std::numeric_limits<float>::infinity() : score; // an order needs no NaN
    }

    Result<const GgufArray*> types = array_of(file, "tokenizer.ggml.token_type", n);
    if (!types) return std::unexpected(types.error());
    if (*types && (*types)->ints.size() + (*types)->uints.size() != n)
        return fail(file.path(), ": tokenizer.ggml.token_type is not an array of integers");
    v.types.assign(n, TokenType::normal);
    for (std::size_t i = 0; *types && i < n; i++) {
        const std::int64_t type = (*types)->ints.empty() ? std::int64_t((*types)->uints[i]) : (*types)->ints[i];
        if (type >= 1 && type <= 6) v.types[i] = TokenType(type);
    }
    v.byte_ids.fill(-1);
    for (std::size_t i = 0; i < n; i++)
        if (const int b = byte_of(v.tokens[i]); b >= 0 && v.types[i] == TokenType::byte)
            v.byte_ids[std::size_t(b)] = Token(i);
    return {};
}

Result<void> load_special_ids(const Gguf& file, const VocabularyDefaults& defaults, Vocabulary& v) {
    struct Special {
        const char*      key;
        Token*           id;
        std::string_view fallback;
    };
    for (const Special& s : {Special{"tokenizer.ggml.bos_token_id", &v.bos, defaults.bos},
                             Special{"tokenizer.ggml.eos_token_id", &v.eos, defaults.eos},
                             Special{"tokenizer.ggml.unknown_token_id", &v.unknown, defaults.unknown},
                             Special{"tokenizer.ggml.seperator_token_id", &v.sep, defaults.sep}}) { // spelled so
        Result<Token> found = special_id(file, s.key, v.tokens.size());
        if (!found) return std::unexpected(found.error());
        *s.id = *found;
        if (file.find(s.key) || s.fallback.empty()) continue;
        const Token id = v.find(s.fallback);
        if (id >= 0 && v.types[std::size_t(id)] != TokenType::normal) *s.id = id;
    }
    struct Flag {
        const char* key;
        bool*       value;
        bool        fallback;
    };
    for (const Flag& flag : {Flag{"tokenizer.ggml.add_bos_token", &v.add_bos, defaults.add_bos},
                             Flag{"tokenizer.ggml.add_eos_token", &v.add_eos, defaults.add_eos},
                             Flag{"tokenizer.ggml.add_sep_token", &v.add_sep, defaults.add_sep},
                             Flag{"tokenizer.ggml.add_space_prefix", &v.add_space_prefix, defaults.add_space_prefix}}) {
        Result<bool> value = file.boolean(flag.key, flag.fallback);
        if (!value) return std::unexpected(value.error());
        *flag.value = *value;
    }
    return {};
}

// Tokens at which generation ends: the tokens that the file's keys name, and tokens with a spelling that is used for no other purpose.
// The latter are control tokens whatever type they have in the file.
Result<void> find_ends(const Gguf& file, Vocabulary& v) {
    static const std::vector<std::string_view> end_texts = split(
        "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> "
        "<|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> "
        "<｜end▁of▁sentence｜> [e~[");
    // ends of a file or of a repository, in models that complete code
    static const std::vector<std::string_view> code_texts = split(
        "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> "
        "<|file_sep|>");
    const auto mark = [&](std::string_view text) {
        if (const Token id = v.find(text); id >= 0) {
            v.ends[std::size_t(id)]  = true;
            v.types[std::size_t(id)] = TokenType::control;
        }
    };
    v.ends.assign(v.tokens.size(), false);
    for (std::string_view text : end_texts) mark(text);
    for (std::string_view text : code_texts) mark(text);
    // parts of a message in the harmony format, which are shown
    for (std::string_view text : {"<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"})
        if (const Token id = v.find(text); id >= 0) v.types[std::size_t(id)] = TokenType::user_defined;
    for (std::string_view key :
         {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id",
          "tokenizer.ggml.fim_pad_token_id", "tokenizer.ggml.fim_rep_token_id", "tokenizer.ggml.fim_sep_token_id"}) {
        Result<Token> id = special_id(file, key, v.tokens.size());
        if (!id) return std::unexpected(id.error());
        if (*id >= 0) v.ends[std::size_t(*id)] = true;
    }
    if (v.eos >= 0) v.ends[std::size_t(v.eos)] = true;

    // Where other tokens end the answer, these two end only a part of it, or are plain text.
    const auto ends_at = [&](std::string_view text) {
        const Token id = v.find(text);
        return id >= 0 && v.ends[std::size_t(id)];
    };
    const auto unmark = [&](std::string_view text, TokenType type) {
        if (const Token id = v.find(text); id >= 0) {
            v.ends[std::size_t(id)]  = false;
            v.types[std::size_t(id)] = type;
        }
    };
    const bool calls = ends_at("<|call|>") || ends_at("<|calls|>");
    if ((ends_at("<|return|>") && calls) || (calls && ends_at("<|flush|>"))) unmark("<|end|>", TokenType::user_defined);
    if ((ends_at("<|tool_response>") || ends_at("<|plamo:eos|>")) && ends_at("</s>")) unmark("</s>", TokenType::normal);
    return {};
}

// GGUF has no place for them, so they follow from the names of the tokenizer, the architecture and the model.
void find_strips(const Gguf& file, Vocabulary& v) {
    const auto text = [&](std::string_view key) {
        const Result<std::string_view> value = file.text(key, "");
        std::string                    lower = value ? std::string(*value) : std::string();
        for (char& c : lower)
            if (c >= 'A' && c <= 'Z') c = char(c + 32);
        return lower;
    };
    const auto contains = [](const std::string& all, std::initializer_list<std::string_view> parts) {
        for (std::string_view part : parts)
            if (all.find(part) != std::string::npos) return true;
        return false;
    };
    const auto strip = [&](std::string_view piece, std::uint8_t how) {
        if (const Token id = v.find(piece); id >= 0) v.strips[std::size_t(id)] = how;
    };
    v.strips.assign(v.tokens.size(), 0);
    const std::string name = text("general.name");
    if (contains(text("tokenizer.ggml.pre"), {"jina-v2-de", "jina-v2-es", "jina-v2-code", "mmbert"}) ||
        contains(text("general.architecture"), {"nomic-bert-moe", "jina-bert-v3"})) {
        strip("<mask>", Vocabulary::strip_left);
    } else if (contains(name, {"phi-3", "phi3"})) {
        for (std::size_t i = 0; i < v.types.size(); i++)
            if (v.types[i] == TokenType::control || v.types[i] == TokenType::user_defined ||
                v.types[i] == TokenType::unknown)
                v.strips[i] = Vocabulary::strip_right;
        for (std::string_view piece : {"<unk>", "<s>", "<|endoftext|>"}) strip(piece, 0);
    } else if (contains(name, {"modern-bert"})) strip("[MASK]", Vocabulary::strip_left);
}

Result<Vocabulary> Vocabulary::load(const Gguf& file, const VocabularyDefaults& defaults) {
    Vocabulary v;
    if (Result<void> r = load_tokens(file, v); !r) return std::unexpected(r.error());
    if (Result<void> r = load_special_ids(file, defaults, v); !r) return std::unexpected(r.error());
    if (Result<void> r = find_ends(file, v); !r) return std::unexpected(r.error());
    find_strips(file, v);
    return v;
}

} // namespace quire
