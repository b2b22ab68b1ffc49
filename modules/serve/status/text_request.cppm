// quire.serve.status.text_request: the bodies of the routes that take a text, tokens or the name of a pin. Owns nothing.
export module quire.serve.status.text_request;

import quire.core.base;
import quire.serve.api.prompt_encoder;
import quire.serve.api.request_fields;
import quire.serve.openai.conversation_fields;

export namespace quire {

// /tokenize, /apply-template, /pin: a text or a conversation.
struct TextRequest {
    std::optional<std::string>  text;
    const char*                 field = "prompt"; // that has the text
    std::optional<Conversation> conversation;
    bool                        add_special = true, parse_special = true, with_pieces = false, token_strings = false;
    std::string                 cache_salt;
};
Parsed<TextRequest> parse_text_request(std::string_view json, const ApiLimits& limits);
// The tokens of its text or conversation.
Parsed<std::vector<Token>> encode(const PromptEncoder& encoder, const TextRequest& request);

// /detokenize.
Parsed<std::vector<Token>> parse_detokenize_request(std::string_view json, const ApiLimits& limits);
// {"id": "…"} of /unpin.
Parsed<std::string> parse_id_request(std::string_view json, const ApiLimits& limits);

} // namespace quire

module :private;

namespace quire {

Parsed<TextRequest> parse_text_request(std::string_view text, const ApiLimits& limits) {
    Parsed<JsonDocument> json = parse_object(text, limits);
    if (!json) return std::unexpected(json.error());
    JsonFields  f(*json);
    TextRequest out;
    parse_model(f, limits);
    const int given = int(f.has("prompt")) + int(f.has("content")) + int(f.has("messages"));
    if (given != 1) f.fail(given == 0 ? "prompt" : "messages", "one of prompt, content and messages is needed");
    const bool by_content = f.has("content");
    for (const char* name : {"prompt", "content"}) f.describe(name, R"({"type":"string"})");
    if (f.has("messages")) out.conversation = parse_conversation(f, limits);
    else {
        out.field = by_content ? "content" : "prompt";
        out.text  = f.text(out.field, limits.json.bytes);
    }
    // vLLM's names and defaults, or llama.cpp's.
    out.add_special   = f.boolean("add_special", !by_content && !out.conversation);
    out.add_special   = f.boolean("add_special_tokens", out.add_special);
    out.parse_special = f.boolean("parse_special", true);
    out.with_pieces   = f.boolean("with_pieces", false);
    out.token_strings = f.boolean("return_token_strs", false);
    out.cache_salt    = f.text("cache_salt", 1024);
    if (!out.conversation && f.has("chat_template")) f.fail("chat_template", "chat_template needs messages");
    if (f.failed()) return f.error();
    return out;
}

Parsed<std::vector<Token>> encode(const PromptEncoder& encoder, const TextRequest& request) {
    if (!request.conversation) {
        const std::string_view text = request.text ? std::string_view(*request.text) : std::string_view();
        if (auto ok = encoder.check_split(text.size(), request.field); !ok) return std::unexpected(ok.error());
        return encoder.encode_text(text, request.add_special, request.parse_special);
    }
    Parsed<MarkedText> text = encoder.render(*request.conversation);
    if (!text) return std::unexpected(text.error());
    if (auto ok = encoder.check_split(text->bytes.size(), "messages"); !ok) return std::unexpected(ok.error());
    return encoder.encode_rendered(*text, request.add_special);
}

Parsed<std::vector<Token>> parse_detokenize_request(std::string_view text, const ApiLimits& limits) {
    Parsed<JsonDocument> json = parse_object(text, limits);
    if (!json) return std::unexpected(json.error());
    JsonFields f(*json);
    parse_model(f, limits);
    const Json* v = f.find("tokens");
    if (f.recording())
        f.describe("tokens", cat(R"({"type":"array","items":{"type":"integer","minimum":0,"maximum":)",
                                 limits.vocab_size - 1, "}}"));
    if (!v || !v->is_array()) f.fail("tokens", "tokens has to be a list of token ids");
    std::vector<Token> ids;
    if (v && v->is_array())
        for (const Json& item : *v) {
            const std::optional<Token> id = JsonFields::token_of(item, limits.vocab_size);
            if (!id) {
                f.fail("tokens",
                       cat("tokens: ", JsonFields::shown(item), " is no token id in 0..", limits.vocab_size - 1));
                break;
            }
            ids.push_back(*id);
        }
    if (f.failed()) return f.error();
    return ids;
}

Parsed<std::string> parse_id_request(std::string_view text, const ApiLimits& limits) {
    Parsed<JsonDocument> json = parse_object(text, limits);
    if (!json) return std::unexpected(json.error());
    JsonFields  f(*json);
    std::string id = f.text("id", 128);
    if (id.empty()) f.fail("id", "id is missing");
    if (f.failed()) return f.error();
    return id;
}

} // namespace quire
