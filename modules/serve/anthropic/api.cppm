// quire.serve.anthropic.api: Anthropic's routes /v1/messages and /v1/messages/count_tokens, and the form of their responses and streams
// (https://docs.anthropic.com/en/api/messages-streaming). Owns nothing.
export module quire.serve.anthropic.api;

import quire.core.base;
import quire.serve.anthropic.request;
import quire.serve.api.answer_blocks;
import quire.serve.api.generate;

export namespace quire {

void answer_messages(ApiContext& api, HttpExchange& e);
void answer_count_tokens(ApiContext& api, HttpExchange& e);

std::unique_ptr<AnswerRenderer> messages_renderer(ResponseHead head);

} // namespace quire

module :private;

namespace quire {

// Anthropic does not count tokens from the cache among the input tokens.
Json usage_json(const Usage& u) {
    return {{"input_tokens", u.prompt_tokens - u.cached_tokens},
            {"cache_creation_input_tokens", 0},
            {"cache_read_input_tokens", u.cached_tokens},
            {"output_tokens", u.completion_tokens}};
}

class MessagesRenderer : public AnswerRenderer {
public:
    explicit MessagesRenderer(ResponseHead head) : head_(std::move(head)) {}

    std::string response(std::vector<Choice> choices, const Usage& usage) override {
        Choice&    c       = choices[0];
        Json       content = Json::array();
        const auto take    = [&](const std::vector<BlockEvent>& events) {
            for (const BlockEvent& b : events)
                if (b.what == BlockEvent::What::begin) content.push_back(block(b, true));
                else if (b.what == BlockEvent::What::text) {
                    auto& text = content.back()[text_name(b.kind)].get_ref<std::string&>();
                    text += b.text;
                }
        };
        take(blocks_.push(std::move(c.parts)));
        take(blocks_.finish());
        Json body             = message(std::move(content), usage);
        auto [why, end]       = stop(c);
        body["stop_reason"]   = std::move(why);
        body["stop_sequence"] = std::move(end);
        return json_dump(std::move(body));
    }

    std::string begin(const Usage& usage) override {
        return send("message_start", {{"message", message(Json::array(), usage)}});
    }

    std::string piece(Choice c, const Usage&) override {
        std::string out = send(blocks_.push(std::move(c.parts)));
        if (c.finish_reason.empty()) return out;
        last_ = std::move(c);
        return out + send(blocks_.finish());
    }

    std::string end(const Usage& usage) override {
        auto [why, end] = stop(last_);
        return send("message_delta", {{"delta", {{"stop_reason", std::move(why)}, {"stop_sequence", std::move(end)}}},
                                      {"usage", usage_json(usage)}}) +
               send("message_stop", Json::object());
    }

    std::string failure(const ApiError& error) override {
        return event("error", error_body(error, ErrorForm::anthropic));
    }

    std::string_view out_of_memory() const override {
        return "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\","
               "\"message\":\"there is no memory for this request now\"}}\n\n";
    }

    std::string ping() override { return send("ping", Json::object()); }

private:
    static const char* text_name(AnswerPart::Kind kind) {
        return kind == AnswerPart::Kind::reasoning ? "thinking" : "text";
    }

    static std::string send(const char* type, Json data) {
        Json out{{"type", type}};
        out.update(data);
        return event(type, json_dump(std::move(out)));
    }

    // `whole`: with the input of a call.
    Json block(const BlockEvent& b, bool whole) {
        switch (b.kind) {
            case AnswerPart::Kind::content: return {{"type", "text"}, {"text", ""}};
            case AnswerPart::Kind::reasoning: return {{"type", "thinking"}, {"thinking", ""}, {"signature", ""}};
            case AnswerPart::Kind::call: break;
        }
        Json input = Json::object();
        if (whole)
            if (Result<Json> read = json_parse(b.call.arguments); read && read->is_object()) input = std::move(*read);
        return {{"type", "tool_use"},
                {"id", call_id(head_, 0, n_calls_++, "toolu_")},
                {"name", b.call.name},
                {"input", std::move(input)}};
    }

    std::string send_arguments(const std::string& piece) const {
        if (piece.empty()) return "";
        return event("content_block_delta",
                     cat(R"({"type":"content_block_delta","index":)", index_,
                         R"(,"delta":{"type":"input_json_delta","partial_json":)", json_quoted(piece), "}}"));
    }

    std::string send(const std::vector<BlockEvent>& events) {
        std::string out;
        for (const BlockEvent& b : events) {
            if (b.what == BlockEvent::What::begin) {
                out += send("content_block_start", {{"index", ++index_}, {"content_block", block(b, false)}});
                if (b.kind == AnswerPart::Kind::call) out += send_arguments(b.call.arguments);
            } else if (b.what == BlockEvent::What::text && b.kind == AnswerPart::Kind::call) {
                out += send_arguments(b.text);
            } else if (b.what == BlockEvent::What::text) {
                const std::string name = text_name(b.kind);
                out += event("content_block_delta",
                             cat(R"({"type":"content_block_delta","index":)", index_, R"(,"delta":{"type":")", name,
                                 R"(_delta",")", name, R"(":)", json_quoted(b.text), "}}"));
            } else out += send("content_block_stop", {{"index", index_}});
        }
        return out;
    }

    Json message(Json content, const Usage& usage) const {
        return {{"id", "msg_" + head_.id},       {"type", "message"},
                {"role", "assistant"},           {"model", head_.model},
                {"content", std::move(content)}, {"stop_reason", nullptr},
                {"stop_sequence", nullptr},      {"usage", usage_json(usage)}};
    }

    // stop_reason and stop_sequence.
    static std::pair<Json, Json> stop(const Choice& c) {
        if (c.finish_reason == "tool_calls") return {"tool_use", nullptr};
        if (c.finish_reason == "length") return {"max_tokens", nullptr};
        if (!c.stop_string.empty()) return {"stop_sequence", c.stop_string};
        return {"end_turn", nullptr};
    }

    ResponseHead head_;
    AnswerBlocks blocks_;
    int          index_ = -1, n_calls_ = 0;
    Choice       last_; // the piece that ended the answer
};

std::unique_ptr<AnswerRenderer> messages_renderer(ResponseHead head) {
    return std::make_unique<MessagesRenderer>(std::move(head));
}

void answer_messages(ApiContext& api, HttpExchange& e) {
    e.response.headers.emplace_back("request-id", e.request.id);
    generate(api, e, parse_messages_request(e.request.body, api.options.limits, false), "messages",
             [](const ResponseHead& head, const GenerationRequest&, const std::vector<std::string>&) {
                 return messages_renderer(head);
             });
}

void answer_count_tokens(ApiContext& api, HttpExchange& e) {
    Parsed<GenerationRequest> parsed = parse_messages_request(e.request.body, api.options.limits, true);
    if (!parsed) return api.refuse(e, parsed.error());
    const Parsed<EncodedPrompts> encoded = encode_prompts(api, *parsed, "messages", 0);
    if (!encoded) return api.refuse(e, encoded.error());
    answer_json(e, Json{{"input_tokens", encoded->tokens[0].size()}});
}

} // namespace quire
