// quire.tools.inspect.tool_calls: reads recorded answers as the server reads those of a model: content, reasoning and calls, as a stream and as a
// whole. Owns nothing.
export module quire.tools.inspect.tool_calls;

import quire.core.base;
import quire.text.calls.reasoning_form;
import quire.text.calls.tool_calls;
import quire.text.calls.tool_form;
export import quire.text.templates.chat_template;
export import quire.text.tokens.tokenizer;

export namespace quire {

struct RecordedAnswers {
    CallForm         form;
    ReasoningForm    reasoning;
    const Tokenizer* tokenizer = nullptr; // for tokens that are ids; null: all tokens are texts
};

// A line {"tools": [definitions, as in OpenAI's API], "tokens": [[id or text, …] of each delta, …], "prompt": "the prompt's end"} →
// {"whole": {"content", "reasoning_content", "tool_calls": [{"name", "arguments"}]}, "deltas": [of each, and of the end, such an object]}.
// In a delta a call has its `index`, and arguments are a piece. Members without text or calls are left out. The whole is read at once.
// Error: a line that is not so.
Result<Json> read_recorded(const RecordedAnswers& how, const Json& line);

} // namespace quire

module :private;

namespace quire {

// The text that a token adds. `text`: of tokens that are ids.
Result<std::string> text_of_token(const Tokenizer* tokenizer, std::optional<Detokenizer>& text, const Json& token) {
    if (token.is_string()) return token.get<std::string>();
    if (!token.is_number_integer()) return fail("a token is an id or a text");
    if (!tokenizer) return fail("tokens that are ids need a MODEL");
    const auto id = token.get<std::int64_t>();
    if (id < 0 || id >= tokenizer->vocab_size())
        return fail("token ", id, " is outside the vocabulary of ", tokenizer->vocab_size());
    return text->push(Token(id));
}

Json parts_json(std::span<const AnswerPart> parts, int* n_calls) {
    Json out = Json::object(), calls = Json::array();
    if (std::string text = text_of(parts); !text.empty()) out["content"] = std::move(text);
    if (std::string text = text_of(parts, AnswerPart::Kind::reasoning); !text.empty())
        out["reasoning_content"] = std::move(text);
    for (const AnswerPart& part : parts) {
        if (part.kind != AnswerPart::Kind::call) continue;
        Json call = Json::object();
        if (!part.call.more) call["name"] = part.call.name, ++*n_calls;
        call["index"]     = *n_calls - 1;
        call["arguments"] = part.call.arguments;
        calls.push_back(std::move(call));
    }
    if (!calls.empty()) out["tool_calls"] = std::move(calls);
    return out;
}

Result<Json> read_recorded(const RecordedAnswers& how, const Json& line) {
    const auto member = [&](const char* name) {
        const auto at = line.is_object() ? line.find(name) : line.end();
        return line.is_object() && at != line.end() ? *at : Json();
    };
    const Json tokens = member("tokens"), tools = member("tools"), prompt = member("prompt");
    if (!tokens.is_array()) return fail("\"tokens\" is no list");
    if (!tools.is_null() && !tools.is_array()) return fail("\"tools\" is no list");
    if (!prompt.is_null() && !prompt.is_string()) return fail("\"prompt\" is no text");
    for (const Json& tool : tools) {
        const bool named = tool.is_object() && tool.contains("function") && tool["function"].is_object() &&
                           tool["function"].contains("name") && tool["function"]["name"].is_string();
        if (!named) return fail(R"("tools" has an entry that is not {"function": {"name": …}})");
    }
    AnswerFormat format;
    if (!tools.empty() || how.form == ToolForm::harmony || how.form.element) format.form = how.form;
    format.tools     = tools.is_null() ? Json::array() : tools;
    format.marks     = how.reasoning;
    format.reasoning = bool(how.reasoning);
    format.in_reasoning =
        format.reasoning && prompt.is_string() &&
        prompt_reasoning(how.reasoning, prompt.get_ref<const std::string&>()) == PromptReasoning::open;

    std::optional<Detokenizer> text;
    if (how.tokenizer) text.emplace(*how.tokenizer, false, true);
    AnswerParser streamed(format), whole(format);
    std::string  all;
    Json         deltas  = Json::array();
    int          n_calls = 0;
    for (const Json& delta : tokens) {
        if (!delta.is_array()) return fail("an entry of \"tokens\" is no list");
        std::string fresh;
        for (const Json& token : delta) {
            Result<std::string> added = text_of_token(how.tokenizer, text, token);
            if (!added) return std::unexpected(added.error());
            fresh += *added;
        }
        all += fresh;
        deltas.push_back(parts_json(streamed.push(fresh), &n_calls));
    }
    const std::string       rest = text ? text->finish() : "";
    std::vector<AnswerPart> end  = streamed.push(rest);
    append(end, streamed.finish());
    deltas.push_back(parts_json(end, &n_calls));

    std::vector<AnswerPart> parts = whole.push(all + rest);
    append(parts, whole.finish());
    n_calls = 0;
    return Json{{"whole", parts_json(parts, &n_calls)}, {"deltas", std::move(deltas)}};
}

} // namespace quire
