// quire.serve.openai.response: the bodies of responses, generated tokens → JSON text, with the field names of OpenAI, vLLM and llama.cpp.
// Uses no sockets, no engine and no tokenizer. Owns nothing.
export module quire.serve.openai.response;

import quire.core.base;
import quire.core.unicode;
import quire.core.version;
import quire.schedule.request;
import quire.serve.api.answer;
import quire.serve.http.exchange;

export namespace quire {

std::string render_response(const ResponseHead& head, std::span<const Choice> choices, const Usage& usage);
// Chunks of a stream, as JSON. An answer of a chat begins with render_first_chunk().
std::string render_first_chunk(const ResponseHead& head, const Choice& choice, const Usage& usage);
std::string render_chunk(const ResponseHead& head, const Choice& choice, const Usage& usage);
std::string render_usage_chunk(const ResponseHead& head, const Usage& usage,
                               const std::optional<Timings>& timings = {});
// The renderer of completions and chats.
std::unique_ptr<AnswerRenderer> openai_renderer(ResponseHead head);

} // namespace quire

module :private;

namespace quire {

const std::string fingerprint = cat("quire-", quire_version);

// A token as a key or a word of JSON. Parts of characters as OpenAI spells them: bytes:\xe2\x80.
std::string spell(const SpelledLogprob& t, bool as_ids) {
    if (as_ids) return cat("token_id:", t.token);
    if (utf8_valid(t.bytes)) return t.bytes;
    std::string out = "bytes:";
    for (char c : t.bytes) {
        char hex[5];
        std::snprintf(hex, sizeof hex, "\\x%02x", unsigned(static_cast<unsigned char>(c)));
        out += hex;
    }
    return out;
}

// The shape of /v1/completions.
Json legacy_logprobs(const ResponseHead& head, std::span<const SpelledPosition> positions) {
    Json tokens = Json::array(), logprobs = Json::array(), tops = Json::array(), offsets = Json::array();
    for (const SpelledPosition& p : positions) {
        offsets.push_back(p.offset);
        tokens.push_back(spell(p.chosen ? *p.chosen : p.token, head.tokens_as_ids));
        if (!p.chosen) {
            logprobs.push_back(nullptr);
            tops.push_back(nullptr);
            continue;
        }
        logprobs.push_back(finite_logprob(p.chosen->logprob));
        Json top = Json::object();
        for (const SpelledLogprob& t : p.top) top.emplace(spell(t, head.tokens_as_ids), finite_logprob(t.logprob));
        top.emplace(spell(*p.chosen, head.tokens_as_ids), finite_logprob(p.chosen->logprob));
        tops.push_back(std::move(top));
    }
    return {{"text_offset", offsets}, {"token_logprobs", logprobs}, {"tokens", tokens}, {"top_logprobs", tops}};
}

// The shape of /v1/chat/completions.
Json chat_logprobs(const ResponseHead& head, std::span<const SpelledPosition> positions) {
    const auto one = [&](const SpelledLogprob& t) {
        Json json{{"token", head.tokens_as_ids ? spell(t, true) : t.bytes}};
        add_logprob(json, t, head.after_samplers);
        json["bytes"] = bytes_json(t.bytes);
        return json;
    };
    return {{"content", logprobs_json(positions, one, head.after_samplers)}, {"refusal", nullptr}};
}

// vLLM's shape: of each position the log-probabilities by token id.
Json prompt_logprobs(std::span<const SpelledPosition> positions) {
    Json list = Json::array();
    for (const SpelledPosition& p : positions) {
        if (!p.chosen) {
            list.push_back(nullptr);
            continue;
        }
        Json       item = Json::object();
        int        rank = 0;
        const auto add  = [&](const SpelledLogprob& t, Json r) {
            item.emplace(
                cat(t.token),
                Json{{"logprob", finite_logprob(t.logprob)}, {"rank", std::move(r)}, {"decoded_token", t.bytes}});
        };
        for (const SpelledLogprob& t : p.top) add(t, ++rank);
        add(*p.chosen, nullptr); // its rank is unknown if it is not among the best
        list.push_back(std::move(item));
    }
    return list;
}

Json usage_json(const Usage& u) {
    Json usage{{"prompt_tokens", u.prompt_tokens},
               {"completion_tokens", u.completion_tokens},
               {"total_tokens", u.prompt_tokens + u.completion_tokens},
               {"prompt_tokens_details", {{"cached_tokens", u.cached_tokens}}}};
    add_tiers(usage["prompt_tokens_details"], u);
    if (u.reasoning_tokens > 0) usage["completion_tokens_details"] = {{"reasoning_tokens", u.reasoning_tokens}};
    return usage;
}

Json frame(const ResponseHead& head, const char* object) {
    return {{"id", head.id},
            {"object", object},
            {"created", head.created},
            {"model", head.model},
            {"system_fingerprint", fingerprint}};
}

Json stop_reason(const Choice& c) {
    if (!c.stop_string.empty()) return c.stop_string;
    if (c.stop_token >= 0) return c.stop_token;
    return nullptr;
}

Json logprobs_json(const ResponseHead& head, const Choice& c, bool in_chunk) {
    if (!head.logprobs || (in_chunk && c.logprobs.empty())) return nullptr;
    return head.chat ? chat_logprobs(head, c.logprobs) : legacy_logprobs(head, c.logprobs);
}

// `timings`: as far as they are known.
void close_chunk(const ResponseHead& head, Json& chunk, const Usage& usage,
                 const std::optional<Timings>& timings = {}) {
    if (timings) chunk["timings"] = timings_json(*timings);
    if (head.continuous_usage) chunk["usage"] = usage_json(usage);
    else if (head.include_usage) chunk["usage"] = nullptr;
}

// The tokens of all prompts and answers, and the time of the longest answer. `answers`: by their index.
std::optional<Timings> all_timings(const std::map<int, Timings>& answers, const Usage& usage) {
    if (answers.empty()) return std::nullopt;
    Timings all{.prompt_tokens   = usage.prompt_tokens,
                .cached_tokens   = usage.cached_tokens,
                .draft_tokens    = usage.draft_tokens,
                .accepted_tokens = usage.accepted_tokens};
    for (const auto& [index, one] : answers) {
        all.generated_tokens += one.generated_tokens;
        all.prompt_ms    = std::max(all.prompt_ms, one.prompt_ms);
        all.generated_ms = std::max(all.generated_ms, one.generated_ms);
    }
    return all;
}

Json message_json(const ResponseHead& head, const Choice& c) {
    Json message{{"role", "assistant"}, {"content", text_of(c.parts)}, {"refusal", nullptr}};
    if (std::string text = text_of(c.parts, AnswerPart::Kind::reasoning); !text.empty())
        message["reasoning_content"] = std::move(text);
    const std::vector<ToolCall> calls = calls_of(c.parts);
    if (calls.empty()) return message;
    if (message["content"] == "") message["content"] = nullptr;
    Json& list = message["tool_calls"] = Json::array();
    for (const ToolCall& call : calls)
        list.push_back({{"id", call_id(head, c.index, int(list.size()))},
                        {"type", "function"},
                        {"function", {{"name", call.name}, {"arguments", call.arguments}}}});
    return message;
}

std::string render_response(const ResponseHead& head, std::span<const Choice> choices, const Usage& usage) {
    Json body = frame(head, head.chat ? "chat.completion" : "text_completion");
    Json list = Json::array();

    std::map<int, Timings> timings;
    for (const Choice& c : choices) {
        if (c.timings) timings.insert_or_assign(c.index, *c.timings);
        Json choice{{"index", c.index}};
        if (head.chat) choice["message"] = message_json(head, c);
        else choice["text"] = text_of(c.parts);
        choice["logprobs"]      = logprobs_json(head, c, false);
        choice["finish_reason"] = or_null(c.finish_reason);
        choice["stop_reason"]   = stop_reason(c);
        if (head.token_ids) choice["token_ids"] = c.token_ids;
        if (!head.chat && head.token_ids) choice["prompt_token_ids"] = c.prompt_token_ids;
        if (!head.chat && head.prompt_logprobs) choice["prompt_logprobs"] = prompt_logprobs(c.prompt_logprobs);
        list.push_back(std::move(choice));
    }
    body["choices"] = std::move(list);
    body["usage"]   = usage_json(usage);
    if (const auto all = all_timings(timings, usage)) body["timings"] = timings_json(*all);
    if (!head.verbose.is_null()) body["__verbose"] = head.verbose;
    if (head.chat && !choices.empty()) {
        if (head.token_ids) body["prompt_token_ids"] = choices[0].prompt_token_ids;
        if (head.prompt_logprobs) body["prompt_logprobs"] = prompt_logprobs(choices[0].prompt_logprobs);
    }
    return json_dump(std::move(body));
}

std::string render_first_chunk(const ResponseHead& head, const Choice& c, const Usage& usage) {
    Json chunk       = frame(head, "chat.completion.chunk");
    chunk["choices"] = Json::array({Json{{"index", c.index},
                                         {"delta", {{"role", "assistant"}, {"content", nullptr}}},
                                         {"logprobs", nullptr},
                                         {"finish_reason", nullptr}}});
    if (head.token_ids) chunk["prompt_token_ids"] = c.prompt_token_ids;
    if (!head.verbose.is_null()) chunk["__verbose"] = head.verbose;
    close_chunk(head, chunk, usage);
    return json_dump(std::move(chunk));
}

std::string render_chunk(const ResponseHead& head, const Choice& c, const Usage& usage) {
    Json chunk = frame(head, head.chat ? "chat.completion.chunk" : "text_completion");
    Json choice{{"index", c.index}};
    if (head.chat) {
        Json& delta = choice["delta"] = Json::object();
        if (std::string text = text_of(c.parts); !text.empty()) delta["content"] = std::move(text);
        if (std::string text = text_of(c.parts, AnswerPart::Kind::reasoning); !text.empty())
            delta["reasoning_content"] = std::move(text);
    } else choice["text"] = text_of(c.parts);
    choice["logprobs"]      = logprobs_json(head, c, true);
    choice["finish_reason"] = or_null(c.finish_reason);
    if (!c.finish_reason.empty()) choice["stop_reason"] = stop_reason(c);
    if (head.token_ids) choice["token_ids"] = c.token_ids;
    if (head.token_ids && !head.chat && !c.prompt_token_ids.empty()) choice["prompt_token_ids"] = c.prompt_token_ids;
    chunk["choices"] = Json::array({std::move(choice)});
    close_chunk(head, chunk, usage, c.timings);
    return json_dump(std::move(chunk));
}

std::string call_chunk(const ResponseHead& head, const Choice& c, Json delta, const Usage& usage) {
    Json out       = frame(head, "chat.completion.chunk");
    out["choices"] = Json::array({Json{{"index", c.index},
                                       {"delta", {{"tool_calls", Json::array({std::move(delta)})}}},
                                       {"logprobs", nullptr},
                                       {"finish_reason", nullptr}}});
    close_chunk(head, out, usage);
    return json_dump(std::move(out));
}

// Chunks of the answer's call of this index: its id, type and name; a piece of its arguments.
std::string render_call_begin(const ResponseHead& head, const Choice& c, int index, const ToolCall& call,
                              const Usage& usage) {
    return call_chunk(head, c,
                      {{"index", index},
                       {"id", call_id(head, c.index, index)},
                       {"type", "function"},
                       {"function", {{"name", call.name}, {"arguments", ""}}}},
                      usage);
}

std::string render_arguments(const ResponseHead& head, const Choice& c, int index, const ToolCall& call,
                             const Usage& usage) {
    return call_chunk(head, c, {{"index", index}, {"function", {{"arguments", call.arguments}}}}, usage);
}

std::string render_usage_chunk(const ResponseHead& head, const Usage& usage, const std::optional<Timings>& timings) {
    Json chunk       = frame(head, head.chat ? "chat.completion.chunk" : "text_completion");
    chunk["choices"] = Json::array();
    chunk["usage"]   = usage_json(usage);
    if (timings) chunk["timings"] = timings_json(*timings);
    return json_dump(std::move(chunk));
}

// The bytes of usage_json() for chunk after chunk. The details of the prompt are rendered anew only where they change.
class UsageText {
public:
    std::string text(const Usage& u) {
        const std::array prompt{u.cached_tokens, u.loaded_tokens, u.disk_tokens};
        if (details_.empty() || prompt != prompt_) {
            prompt_  = prompt;
            details_ = json_dump(usage_json(u)["prompt_tokens_details"]);
        }
        std::string out =
            cat(R"({"prompt_tokens":)", u.prompt_tokens, R"(,"completion_tokens":)", u.completion_tokens,
                R"(,"total_tokens":)", u.prompt_tokens + u.completion_tokens, R"(,"prompt_tokens_details":)", details_);
        if (u.reasoning_tokens > 0)
            out += cat(R"(,"completion_tokens_details":{"reasoning_tokens":)", u.reasoning_tokens, "}");
        return out += "}";
    }

private:
    std::array<int, 3> prompt_{};
    std::string        details_;
};

// A chunk that was rendered once, around its numbers and its text: nothing but text, or a piece of the arguments of a call.
class TextChunk {
public:
    TextChunk(const ResponseHead& head, AnswerPart::Kind kind) {
        const bool is_call = kind == AnswerPart::Kind::call;
        Choice     c;
        c.index = mark;
        ToolCall call;
        if (is_call) call.arguments = "x";
        else append(c.parts, kind, "x");
        // In strings of JSON quotes have a backslash, so that the marks are nowhere else.
        const std::string any = event(is_call ? render_arguments(head, c, mark, call, {}) : render_chunk(head, c, {}));
        const std::string index = cat("\"index\":", mark);
        std::size_t       at    = 0;
        for (std::string_view place : {std::string_view(index), std::string_view(index), std::string_view("\"x\"")}) {
            if (!is_call && pieces_.size() == 1 && place == index) continue; // a text has one index
            const std::size_t found = any.find(place, at);
            pieces_.push_back(any.substr(at, found - at));
            at = found + place.size();
        }
        behind_ = any.substr(at);
        if (!head.continuous_usage) return;
        const std::size_t usage = behind_.find(usage_key) + usage_key.size(); // the chunk's last key
        end_                    = behind_.substr(usage + json_dump(usage_json({})).size());
        behind_.resize(usage);
    }
    // `usage`: its bytes, where each chunk has it.
    std::string chunk(int index, std::string_view text, std::string_view usage) const {
        return cat(pieces_[0], "\"index\":", index, pieces_[1], json_quoted(text), behind_, usage, end_);
    }
    std::string arguments(int index, int call, std::string_view text, std::string_view usage) const {
        return cat(pieces_[0], "\"index\":", index, pieces_[1], "\"index\":", call, pieces_[2], json_quoted(text),
                   behind_, usage, end_);
    }

private:
    static constexpr int              mark      = -101;
    static constexpr std::string_view usage_key = "\"usage\":";
    std::vector<std::string>          pieces_;       // in front of each number and of the text
    std::string                       behind_, end_; // the text; the usage
};

class OpenAiRenderer : public AnswerRenderer {
public:
    explicit OpenAiRenderer(ResponseHead head) : head_(std::move(head)) {
        head_.id = cat(head_.chat ? "chatcmpl-" : "cmpl-", head_.id);
    }

    std::string response(std::vector<Choice> choices, const Usage& usage) override {
        return render_response(head_, choices, usage);
    }

    std::string piece(Choice c, const Usage& usage) override {
        std::string out;
        if (c.timings) timings_.insert_or_assign(c.index, *c.timings);
        if (c.progress) out += event(render_progress(c, usage));
        if (c.first && head_.chat) out += event(render_first_chunk(head_, c, usage));
        // A call comes behind the text before it, and before the end.
        const auto is_call = [](const AnswerPart& part) { return part.kind == AnswerPart::Kind::call; };
        if (std::ranges::any_of(c.parts, is_call)) {
            Choice                  before;
            std::vector<AnswerPart> calls;
            before.index = c.index;
            for (AnswerPart& part : std::exchange(c.parts, {}))
                (is_call(part) ? calls : before.parts).push_back(std::move(part));
            if (!before.parts.empty()) out += chunk(before, usage);
            int index = c.first_call - 1;
            for (const AnswerPart& part : calls) {
                if (!part.call.more) out += event(render_call_begin(head_, c, ++index, part.call, usage));
                if (!part.call.arguments.empty()) out += arguments(c, index, part.call, usage);
            }
        }
        if (!c.parts.empty() || !c.logprobs.empty() || !c.token_ids.empty() || !c.finish_reason.empty())
            out += chunk(c, usage);
        return out;
    }

    std::string end(const Usage& usage) override {
        return head_.include_usage
                   ? event(render_usage_chunk(head_, usage, all_timings(timings_, usage))) + event("[DONE]")
                   : event("[DONE]");
    }

    std::string failure(const ApiError& error) override { return event(error_body(error)) + event("[DONE]"); }

    std::string_view out_of_memory() const override {
        return "data: {\"error\":{\"message\":\"there is no memory for this request now\","
               "\"type\":\"unavailable_error\",\"param\":null,\"code\":null}}\n\ndata: [DONE]\n\n";
    }

private:
    // A chunk without text: how far the prompt is.
    std::string render_progress(const Choice& c, const Usage& usage) const {
        Json chunk = frame(head_, head_.chat ? "chat.completion.chunk" : "text_completion");
        Json choice{{"index", c.index}};
        if (head_.chat) choice["delta"] = Json::object();
        else choice["text"] = "";
        choice["logprobs"]       = nullptr;
        choice["finish_reason"]  = nullptr;
        chunk["choices"]         = Json::array({std::move(choice)});
        chunk["prompt_progress"] = progress_json(*c.progress);
        close_chunk(head_, chunk, usage);
        return json_dump(std::move(chunk));
    }

    // A text alone is put into a chunk that was rendered before.
    std::string chunk(const Choice& c, const Usage& usage) {
        const bool plain = c.parts.size() == 1 && c.finish_reason.empty() && c.logprobs.empty() &&
                           c.token_ids.empty() && c.prompt_token_ids.empty() && !c.timings;
        if (!plain) return event(render_chunk(head_, c, usage));
        auto& text = c.parts[0].kind == AnswerPart::Kind::reasoning ? reasoning_ : content_;
        if (!text) text.emplace(head_, c.parts[0].kind);
        return text->chunk(c.index, c.parts[0].text, bytes_of(usage));
    }

    std::string arguments(const Choice& c, int index, const ToolCall& call, const Usage& usage) {
        if (!arguments_) arguments_.emplace(head_, AnswerPart::Kind::call);
        return arguments_->arguments(c.index, index, call.arguments, bytes_of(usage));
    }

    std::string bytes_of(const Usage& usage) { return head_.continuous_usage ? usage_.text(usage) : ""; }

    ResponseHead             head_;
    std::optional<TextChunk> content_, reasoning_, arguments_;
    UsageText                usage_;
    std::map<int, Timings>   timings_; // of each answer, the last ones
};

std::unique_ptr<AnswerRenderer> openai_renderer(ResponseHead head) {
    return std::make_unique<OpenAiRenderer>(std::move(head));
}

} // namespace quire
