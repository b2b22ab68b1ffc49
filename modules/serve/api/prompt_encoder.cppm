// quire.serve.api.prompt_encoder: prompts, texts and conversations → token ids. Owns the chat template.
export module quire.serve.api.prompt_encoder;

import quire.core.base;
import quire.engine.engine;
export import quire.serve.api.error;
export import quire.serve.api.generation_request;
import quire.text.calls.described_tools;
export import quire.text.marked_text;
export import quire.text.templates.chat_template;
import quire.text.tokens.tokenizer;

export namespace quire {

// Any thread. The tokenizer and the options must outlive it. **Owns** the chat template.
class PromptEncoder {
public:
    // `describe_tools`: the template knows no tools, so they are described in its messages.
    PromptEncoder(const Tokenizer& tokenizer, const EngineOptions& options, const ChatTemplate& chat_template,
                  std::string now, bool describe_tools);

    // The text of a conversation, by the chat template; `now`: as local_seconds() takes it, "" for the clock.
    Parsed<MarkedText> render(const Conversation& conversation) const;

    // The conversation without its oldest turns (a turn is a message of the user's and the messages up to the next one): as few as leave
    // `reserve` tokens of the context free, at most all but the last turn. The messages before the first turn stay.
    Parsed<Conversation> trim(const Conversation& conversation, bool add_special, int reserve) const;
    // Tokens at the beginning of a conversation's prompt that do not depend on the user's messages: the system message.
    Parsed<int> n_before_turns(const Conversation& conversation, bool add_special) const;

    // `param`: the field of the request that an error names.
    Parsed<std::vector<Token>> encode(const Prompt& prompt, bool add_special, const std::string& param) const;
    std::vector<Token>         encode_text(std::string_view text, bool add_special, bool parse_special = true) const;
    // A text that render() made.
    std::vector<Token> encode_rendered(const MarkedText& text, bool add_special) const;
    // The input of a reranker: both texts in the file's template `rerank`, or, for a model that sees a text as a whole, one behind the
    // other: [CLS] a [SEP] b [SEP], <s> a </s> </s> b </s>.
    Parsed<std::vector<Token>> encode_ranked(std::string_view query, std::string_view document, bool causal) const;
    // The tokens of a text in the middle of another text.
    std::vector<Token> encode_inside(std::string_view text) const;

    // Whether so many bytes can fit the context, however they are split into tokens. `completion`: tokens asked for.
    Parsed<void> check_size(std::size_t bytes, int completion, const std::string& param) const;
    // Whether a text is short enough to be split into tokens at all. It may be longer than the context: it is only looked
    // at, or truncated.
    Parsed<void> check_split(std::size_t bytes, const std::string& param) const;

private:
    const Tokenizer*     tokenizer_;
    const EngineOptions* options_;
    ChatTemplate         template_;
    std::string          now_;
    bool                 describe_tools_;
    std::size_t          longest_token_ = 1; // bytes
};

// The bytes of the prompt's texts.
std::size_t text_bytes(const Prompt& prompt);

} // namespace quire

module :private;

namespace quire {

PromptEncoder::PromptEncoder(const Tokenizer& tokenizer, const EngineOptions& options,
                             const ChatTemplate& chat_template, std::string now, bool describe_tools)
    : tokenizer_(&tokenizer), options_(&options), template_(chat_template), now_(std::move(now)),
      describe_tools_(describe_tools) {
    for (Token id = 0; id < tokenizer.vocab_size(); id++)
        longest_token_ = std::max(longest_token_, tokenizer.bytes(id, true).size());
}

std::size_t text_bytes(const Prompt& prompt) {
    std::size_t bytes = 0;
    for (const PromptPart& part : prompt)
        if (const auto* text = std::get_if<std::string>(&part)) bytes += text->size();
    return bytes;
}

// -- limits

Parsed<void> PromptEncoder::check_size(std::size_t bytes, int completion, const std::string& param) const {
    const int  context = options_->context;
    const auto tokens  = std::int64_t(bytes / longest_token_);
    if (tokens <= context) return {};
    return std::unexpected(context_overflow(context, tokens, completion, param, true));
}

Parsed<void> PromptEncoder::check_split(std::size_t bytes, const std::string& param) const {
    const std::size_t most = std::max(std::size_t(1) << 20, std::size_t(options_->context) * 16);
    if (bytes <= most) return {};
    return std::unexpected(ApiError{400,
                                    cat(param, " has ", bytes, " bytes; for a context of ", options_->context,
                                        " tokens texts of ", most, " are split"),
                                    param, "context_length_exceeded"});
}

// -- text → tokens

std::vector<Token> PromptEncoder::encode_text(std::string_view text, bool add_special, bool parse_special) const {
    return tokenizer_->encode(text, {.add_special = add_special, .parse_special = parse_special});
}

std::vector<Token> PromptEncoder::encode_inside(std::string_view text) const {
    return quire::encode_inside(*tokenizer_, text);
}

Parsed<std::vector<Token>> PromptEncoder::encode_ranked(std::string_view query, std::string_view document,
                                                        bool causal) const {
    if (const std::optional<std::string_view> form = template_.source("rerank")) {
        MarkedText text;
        for (std::string_view rest = *form; !rest.empty();) {
            const std::size_t at = std::min({rest.find("{query}"), rest.find("{document}"), rest.size()});
            text.append(rest.substr(0, at), false);
            rest.remove_prefix(at);
            if (rest.empty()) break;
            const bool is_query = rest.starts_with("{query}");
            text.append(is_query ? query : document, true);
            rest.remove_prefix(std::string_view(is_query ? "{query}" : "{document}").size());
        }
        return encode_rendered(text, false);
    }
    if (causal)
        return std::unexpected(
            ApiError{400, "the model's file has no template rerank, which says how a query and a document are asked",
                     "model", ""});
    std::vector<Token>       both   = encode_text(query, true);
    const std::vector<Token> second = encode_text(document, true);
    const bool               begins = !second.empty() && second[0] == tokenizer_->bos();
    // RoBERTa's vocabularies have </s> where BERT's have one [SEP] for both texts.
    const bool twice = tokenizer_->eos() >= 0 && tokenizer_->piece(tokenizer_->eos()) == "</s>";
    if (begins && twice) both.push_back(tokenizer_->eos());
    both.insert(both.end(), second.begin() + (begins ? 1 : 0), second.end());
    return both;
}

// A template may have written BOS itself; it must be there once.
std::vector<Token> PromptEncoder::encode_rendered(const MarkedText& text, bool add_special) const {
    const Tokenizer&   t = *tokenizer_;
    std::vector<Token> ids =
        t.encode(text.bytes, {.add_special = add_special, .parse_special = true, .no_special = text.input});
    if (t.adds_bos() && t.bos() >= 0 && (ids.empty() || ids[0] != t.bos())) ids.insert(ids.begin(), t.bos());
    return ids;
}

Parsed<std::vector<Token>> PromptEncoder::encode(const Prompt& prompt, bool add_special,
                                                 const std::string& param) const {
    std::vector<Token> ids;
    for (std::size_t i = 0; i < prompt.size(); i++) {
        if (const auto* tokens = std::get_if<std::vector<Token>>(&prompt[i])) {
            ids.insert(ids.end(), tokens->begin(), tokens->end());
            continue;
        }
        const auto&              text  = std::get<std::string>(prompt[i]);
        const std::vector<Token> piece = i == 0 ? encode_text(text, add_special) : encode_inside(text);
        ids.insert(ids.end(), piece.begin(), piece.end());
    }
    if (ids.empty()) return std::unexpected(ApiError{400, cat(param, " has no tokens in it"), param, ""});
    return ids;
}

Parsed<MarkedText> PromptEncoder::render(const Conversation& conversation) const {
    const Tokenizer& t = *tokenizer_;
    ChatSurroundings around;
    if (t.bos() >= 0) around.bos_token = t.piece(t.bos());
    if (t.eos() >= 0) around.eos_token = t.piece(t.eos());
    around.now        = local_seconds(now_).value_or(0);
    around.llama_cpp  = true;
    ChatInput   input = conversation.input;
    std::string begun; // of the answer
    if (conversation.continue_final) {
        begun = input.messages.back()["content"].get<std::string>();
        input.messages.pop_back();
        input.add_generation_prompt = true;
    }
    if (describe_tools_) input = with_described_tools(std::move(input));
    Result<MarkedText> text = template_.render(input, around);
    if (!text) return std::unexpected(ApiError{400, cut_short(text.error().message, 512), "messages", ""});
    text->append(begun, true);
    return std::move(*text);
}

// -- conversations that are too long

// Where the turns begin.
std::vector<std::size_t> turns_of(const std::vector<Json>& messages) {
    std::vector<std::size_t> turns;
    for (std::size_t i = 0; i < messages.size(); i++)
        if (messages[i]["role"] == "user") turns.push_back(i);
    return turns;
}

Parsed<Conversation> PromptEncoder::trim(const Conversation& conversation, bool add_special, int reserve) const {
    const std::vector<Json>&       messages = conversation.input.messages;
    const std::vector<std::size_t> turns    = turns_of(messages);
    if (turns.size() < 2) return conversation;
    const auto without = [&](std::size_t n) {
        Conversation shorter = conversation;
        auto&        rest    = shorter.input.messages;
        const auto   first   = rest.begin() + std::ptrdiff_t(turns[0]);
        rest.erase(first, rest.begin() + std::ptrdiff_t(turns[n]));
        return shorter;
    };
    const auto fits = [&](std::size_t n) -> Parsed<bool> {
        Parsed<MarkedText> text = render(without(n));
        if (!text) return std::unexpected(text.error());
        if (auto ok = check_split(text->bytes.size(), "messages"); !ok) return false;
        return encode_rendered(*text, add_special).size() + std::size_t(reserve) <= std::size_t(options_->context);
    };
    // Fewer turns never make a longer prompt.
    std::size_t least = 0, most = turns.size() - 1;
    while (least < most) {
        const std::size_t  middle = (least + most) / 2;
        const Parsed<bool> enough = fits(middle);
        if (!enough) return std::unexpected(enough.error());
        if (*enough) most = middle;
        else least = middle + 1;
    }
    return without(least);
}

// The common beginning of two prompts that differ from the first turn on.
Parsed<int> PromptEncoder::n_before_turns(const Conversation& conversation, bool add_special) const {
    const std::vector<std::size_t> turns = turns_of(conversation.input.messages);
    if (turns.empty()) return 0;
    std::array<std::vector<Token>, 2> ids;
    for (std::size_t i = 0; i < ids.size(); i++) {
        Conversation one   = conversation;
        one.continue_final = false;
        one.input.messages.resize(turns[0]);
        one.input.messages.push_back(Json{{"role", "user"}, {"content", i == 0 ? "a" : "1"}});
        Parsed<MarkedText> text = render(one);
        if (!text) return std::unexpected(text.error());
        ids[i] = encode_rendered(*text, add_special);
    }
    const auto end = std::mismatch(ids[0].begin(), ids[0].end(), ids[1].begin(), ids[1].end());
    return int(end.first - ids[0].begin());
}

} // namespace quire
