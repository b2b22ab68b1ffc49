// quire.serve.status.text_api: the routes that turn texts and conversations into tokens and back. Owns nothing.
export module quire.serve.status.text_api;

import quire.core.base;
import quire.serve.api.context;
import quire.serve.status.text_request;

export namespace quire {

void answer_tokenize(ApiContext& api, HttpExchange& e);
void answer_detokenize(ApiContext& api, HttpExchange& e);
void answer_tokenizer_info(ApiContext& api, HttpExchange& e);
void answer_apply_template(ApiContext& api, HttpExchange& e);

} // namespace quire

module :private;

namespace quire {

void answer_tokenize(ApiContext& api, HttpExchange& e) {
    Parsed<TextRequest> parsed = parse_text_request(e.request.body, api.options.limits);
    if (!parsed) return api.refuse(e, parsed.error());
    Parsed<std::vector<Token>> ids = encode(api.encoder, *parsed);
    if (!ids) return api.refuse(e, ids.error());
    // Written directly: as JSON values the tokens of a long text would take many times the memory.
    const auto list = [&](std::string_view name, const auto& write) {
        std::string& out = e.response.body;
        out += cat(",\"", name, "\":[");
        for (std::size_t i = 0; i < ids->size(); i++) {
            if (i > 0) out += ',';
            write(out, (*ids)[i]);
        }
        out += ']';
    };
    e.response.body = cat("{\"count\":", ids->size(), ",\"max_model_len\":", api.options.limits.context);
    if (parsed->with_pieces)
        list("tokens", [&](std::string& out, Token id) {
            const std::string piece = api.service.tokenizer().bytes(id, true);
            Detokenizer       whole(api.service.tokenizer(), false, true);
            const std::string text  = whole.push(id);
            Json              shown = text == piece ? Json(piece) : Json::array();
            if (text != piece)
                for (char c : piece) shown.push_back(int(static_cast<unsigned char>(c)));
            out += json_dump(Json{{"id", id}, {"piece", std::move(shown)}});
        });
    else list("tokens", [](std::string& out, Token id) { out += cat(id); });
    if (parsed->token_strings)
        list("token_strs", [&](std::string& out, Token id) {
            out += json_dump(Json(std::string(api.service.tokenizer().piece(id))));
        });
    e.response.body += '}';
}

void answer_detokenize(ApiContext& api, HttpExchange& e) {
    Parsed<std::vector<Token>> ids = parse_detokenize_request(e.request.body, api.options.limits);
    if (!ids) return api.refuse(e, ids.error());
    const auto most = std::max(std::size_t(1) << 16, std::size_t(api.options.limits.context));
    if (ids->size() > most)
        return api.refuse(
            e, ApiError{400, cat("tokens has ", ids->size(), " ids; ", most, " are turned into text at once"), "tokens",
                        "context_length_exceeded"});
    const std::string text = json_dump(Json(api.service.tokenizer().decode(*ids, true)));
    e.response.body        = cat("{\"prompt\":", text, ",\"content\":", text, '}');
}

void answer_apply_template(ApiContext& api, HttpExchange& e) {
    Parsed<TextRequest> parsed = parse_text_request(e.request.body, api.options.limits);
    if (!parsed) return api.refuse(e, parsed.error());
    const auto& conversation = parsed->conversation;
    if (!conversation) return api.refuse(e, ApiError{400, "messages is missing", "messages", ""});
    Parsed<MarkedText> text = api.encoder.render(*conversation);
    if (!text) return api.refuse(e, text.error());
    answer_json(e, Json{{"prompt", text->bytes}});
}

// The facts that a client needs to tokenize by /tokenize, as in vLLM.
void answer_tokenizer_info(ApiContext& api, HttpExchange& e) {
    const Tokenizer& t     = api.service.tokenizer();
    const auto       piece = [&](Token id) { return id >= 0 ? Json(std::string(t.piece(id))) : Json(); };
    answer_json(e, Json{{"tokenizer_class", "quire"},
                        {"bos_token", piece(t.bos())},
                        {"eos_token", piece(t.eos())},
                        {"chat_template", api.options.chat_template.source()},
                        {"model_max_length", api.service.engine_options().context},
                        {"vocab_size", t.vocab_size()}});
}

} // namespace quire
