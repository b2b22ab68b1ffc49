// quire.text.tokens.fill_in_middle: the tokens by which a model writes the text between two texts (fill in the middle). Owns nothing.
export module quire.text.tokens.fill_in_middle;

import quire.core.base;
import quire.model_file.gguf;
import quire.text.tokens.tokenizer;

export namespace quire {

// The marks of a prompt, -1 where the vocabulary lacks one: REPOSITORY name, FILE name and text for each other file, FILE name, then PREFIX
// text SUFFIX text MIDDLE, behind which the model writes (https://arxiv.org/abs/2409.12186, section 3.2).
struct MiddleMarks {
    Token prefix = -1, suffix = -1, middle = -1, repository = -1, file = -1;

    bool usable() const { return prefix >= 0 && suffix >= 0 && middle >= 0; }
};

// The marks that the file's keys name (tokenizer.ggml.fim_pre_token_id, …). Error: a key is no token id.
Result<MiddleMarks> named_middle_marks(const Gguf& file);
// These marks, without ids that the vocabulary lacks; where a key is missing, the token with a usual spelling of the mark.
MiddleMarks complete_middle_marks(MiddleMarks named, const Tokenizer& tokenizer);

} // namespace quire

module :private;

namespace quire {

struct MarkRow {
    Token MiddleMarks::* token;
    std::string_view     keys;      // behind "tokenizer.ggml.", between blanks
    std::string_view     spellings; // likewise
};

// Qwen, StarCoder, Granite, DeepSeek, CodeLlama and GLM, in this order. llama.cpp once wrote keys without "fim_".
constexpr MarkRow mark_rows[] = {
    {&MiddleMarks::prefix, "fim_pre_token_id prefix_token_id",
     "<|fim_prefix|> <fim_prefix> <fim-prefix> <｜fim▁begin｜> ▁<PRE> <PRE> <|code_prefix|>"},
    {&MiddleMarks::suffix, "fim_suf_token_id suffix_token_id",
     "<|fim_suffix|> <fim_suffix> <fim-suffix> <｜fim▁hole｜> ▁<SUF> <SUF> <|code_suffix|>"},
    {&MiddleMarks::middle, "fim_mid_token_id middle_token_id",
     "<|fim_middle|> <fim_middle> <fim-middle> <｜fim▁end｜> ▁<MID> <MID> <|code_middle|>"},
    {&MiddleMarks::repository, "fim_rep_token_id", "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>"},
    {&MiddleMarks::file, "fim_sep_token_id", "<|file_sep|>"},
};

Result<MiddleMarks> named_middle_marks(const Gguf& file) {
    constexpr std::int64_t most = std::numeric_limits<Token>::max();
    MiddleMarks            out;
    for (const MarkRow& row : mark_rows)
        for (std::string_view key : split(row.keys)) {
            const Result<std::int64_t> id = file.integer(cat("tokenizer.ggml.", key), -1);
            if (!id) return std::unexpected(id.error());
            if (out.*row.token < 0 && *id >= 0 && *id <= most) out.*row.token = Token(*id);
        }
    return out;
}

MiddleMarks complete_middle_marks(MiddleMarks marks, const Tokenizer& tokenizer) {
    for (const MarkRow& row : mark_rows) {
        Token& token = marks.*row.token;
        if (token >= tokenizer.vocab_size()) token = -1;
        for (std::string_view text : split(row.spellings))
            if (token < 0) token = tokenizer.find(text);
    }
    return marks;
}

} // namespace quire
