// The tokenizer of a test's model: three marks, all bytes, and words of no meaning.
// Include after the imports of quire.core.base, quire.core.std and quire.model_file.gguf_writer.
#pragma once

namespace quire::testing {

// Puts `vocab` tokens into the file, at least 259.
inline void set_byte_tokenizer(GgufWriter& w, int vocab) {
    std::vector<std::string>  tokens{"<unk>", "<s>", "</s>"};
    std::vector<float>        scores;
    std::vector<std::int32_t> types{2, 3, 3};
    for (int byte = 0; byte < 256; byte++) {
        char text[8];
        std::snprintf(text, sizeof text, "<0x%02X>", unsigned(byte));
        tokens.emplace_back(text), types.push_back(6);
    }
    while (int(tokens.size()) < vocab) tokens.push_back(cat("w", tokens.size())), types.push_back(1);
    for (int i = 0; i < vocab; i++) scores.push_back(float(-i));
    w.set("tokenizer.ggml.model", "llama");
    w.set("tokenizer.ggml.tokens", tokens);
    w.set("tokenizer.ggml.scores", scores);
    w.set("tokenizer.ggml.token_type", types);
    w.set("tokenizer.ggml.bos_token_id", std::uint32_t(1));
    w.set("tokenizer.ggml.eos_token_id", std::uint32_t(2));
    w.set("tokenizer.ggml.unknown_token_id", std::uint32_t(0));
}

} // namespace quire::testing
