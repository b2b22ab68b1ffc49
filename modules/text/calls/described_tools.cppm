// quire.text.calls.described_tools: a conversation with tools for a chat template that knows none: the tools, their calls and their results
// become texts of ordinary messages. Models then write calls as Hermes does (ToolForm::hermes). Owns nothing.
export module quire.text.calls.described_tools;

import quire.core.base;
import quire.text.templates.chat_template;

export namespace quire {

// The tools are described in the system message, or, where there is none, in the first message of the user's: some templates refuse a system
// message.
ChatInput with_described_tools(ChatInput input);

} // namespace quire

module :private;

namespace quire {

std::string description_of(const Json& tools) {
    std::string text = "You may call one or more of these functions. Each is a line of JSON:\n";
    for (const Json& tool : tools)
        if (tool.is_object()) text += json_dump(tool.contains("function") ? tool["function"] : tool) + "\n";
    return text +
           "To call a function, write its name and its arguments in this form, and nothing behind the last call:\n"
           "<tool_call>{\"name\": \"NAME\", \"arguments\": {…}}</tool_call>";
}

std::string text_of(const Json& message) {
    const auto content = message.find("content");
    if (content == message.end()) return "";
    if (content->is_string()) return content->get<std::string>();
    std::string text;
    if (content->is_array())
        for (const Json& part : *content)
            if (part.is_object() && part.contains("text") && part["text"].is_string())
                text += part["text"].get_ref<const std::string&>();
    return text;
}

// Puts a text before or behind the content, which may be a list of parts.
void add_text(Json& message, const std::string& text, bool before) {
    Json& content = message["content"];
    if (content.is_array()) {
        content.insert(before ? content.begin() : content.end(), Json{{"type", "text"}, {"text", text}});
        return;
    }
    const std::string own = content.is_string() ? content.get<std::string>() : "";
    const std::string gap = own.empty() ? "" : "\n\n";
    content               = before ? text + gap + own : own + gap + text;
}

// The calls of an answer, as the model writes them. The arguments of a call that was cut off are a text.
std::string calls_of(const Json& message) {
    std::string text;
    for (const Json& call : message["tool_calls"]) {
        if (!call.is_object() || !call.contains("function") || !call["function"].is_object()) continue;
        const Json&       function  = call["function"];
        const Json        name      = function.contains("name") ? function["name"] : Json("");
        const Json        arguments = function.contains("arguments") ? function["arguments"] : Json::object();
        const std::string object    = arguments.is_string() ? arguments.get<std::string>() : json_dump(arguments);
        text += cat(text.empty() ? "" : "\n", "<tool_call>{\"name\": ", json_dump(name), ", \"arguments\": ", object,
                    "}</tool_call>");
    }
    return text;
}

ChatInput with_described_tools(ChatInput input) {
    std::vector<Json> messages;
    bool              after_result = false;
    for (Json& m : input.messages) {
        const bool is_result = m.contains("role") && m["role"] == "tool";
        if (is_result) { // results in a row are one message: templates want the roles in turns
            const std::string text = cat("<tool_response>\n", text_of(m), "\n</tool_response>");
            if (after_result) add_text(messages.back(), text, false);
            else messages.push_back(Json{{"role", "user"}, {"content", text}});
        } else {
            if (const auto calls = m.find("tool_calls"); calls != m.end()) {
                const std::string text = calls->is_array() ? calls_of(m) : "";
                if (!text.empty()) add_text(m, text, false);
                m.erase("tool_calls");
            }
            messages.push_back(std::move(m));
        }
        after_result = is_result;
    }
    input.messages = std::move(messages);
    if (!input.tools.is_array() || input.tools.empty()) return input;
    const std::string description = description_of(input.tools);
    input.tools                   = nullptr;
    const auto has_role           = [&](const char* role) {
        return [role](const Json& m) { return m.contains("role") && m["role"] == role; };
    };
    for (const char* role : {"system", "developer"})
        if (const auto at = std::ranges::find_if(input.messages, has_role(role)); at != input.messages.end())
            return add_text(*at, description, false), input;
    if (const auto at = std::ranges::find_if(input.messages, has_role("user")); at != input.messages.end())
        add_text(*at, description, true);
    return input;
}

} // namespace quire
