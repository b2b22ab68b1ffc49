// quire.text.tool_form: how a chat template writes the call of a tool, found by rendering a call and looking at what stands between the
// question and the tool's result. Owns nothing.
export module quire.text.tool_form;

import quire.core.base;
import quire.core.json;
import quire.core.std;
import quire.text.chat_template;
import quire.text.marked_text;

export namespace quire {

enum class ToolForm : std::uint8_t {
    none,        // the template writes no calls
    hermes,      // <tool_call>{"name": …, "arguments": {…}}</tool_call>: Hermes, Qwen 2.5, Qwen 3
    llama3,      // {"name": …, "parameters": {…}}
    mistral,     // [TOOL_CALLS] [{"name": …, "arguments": {…}}] or [TOOL_CALLS]NAME[ARGS]{…}
    qwen3_coder, // <function=NAME><parameter=KEY>VALUE</parameter></function>
    glm,         // <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>
    deepseek,    // <｜tool▁calls▁begin｜>…
    functionary, // <function=NAME>{…}</function>
    pythonic,    // [NAME(KEY="VALUE")]
    harmony,     // <|channel|>commentary to=functions.NAME
    json,        // {"name": …, "arguments": {…}} between other marks
    other,       // a call that looks like none of these
};

std::string_view name_of(ToolForm form);
// The form of that name, if there is one.
std::optional<ToolForm> tool_form_of(std::string_view name);

// Renders a conversation with a tool, its call and its result.
ToolForm tool_form(const ChatTemplate& chat_template);

} // namespace quire

module :private;

namespace quire {

std::string_view name_of(ToolForm form) {
    static constexpr std::array<std::string_view, 12> names{"none",        "hermes",  "llama3",   "mistral",
                                                            "qwen3-coder", "glm",     "deepseek", "functionary",
                                                            "pythonic",    "harmony", "json",     "other"};
    static constexpr std::array<ToolForm, 12>         forms{ToolForm::none,     ToolForm::hermes,      ToolForm::llama3,
                                                    ToolForm::mistral,  ToolForm::qwen3_coder, ToolForm::glm,
                                                    ToolForm::deepseek, ToolForm::functionary, ToolForm::pythonic,
                                                    ToolForm::harmony,  ToolForm::json,        ToolForm::other};
    for (std::size_t i = 0; i < forms.size(); i++)
        if (forms[i] == form) return names[i];
    return "other";
}

std::optional<ToolForm> tool_form_of(std::string_view name) {
    for (const ToolForm form :
         {ToolForm::none, ToolForm::hermes, ToolForm::llama3, ToolForm::mistral, ToolForm::qwen3_coder, ToolForm::glm,
          ToolForm::deepseek, ToolForm::functionary, ToolForm::pythonic, ToolForm::harmony, ToolForm::json})
        if (name_of(form) == name) return form;
    return std::nullopt;
}

// Words that no template has.
constexpr std::string_view question = "Zq7question", tool = "zq7tool", key = "zq7key", value = "Zq7value",
                           result = "Zq7result";

// The conversation, rendered. Templates differ in what they take: arguments as an object or as its text, a result at the end or not.
std::optional<std::string> rendered(const ChatTemplate& t, bool arguments_as_text, bool with_result) {
    const Json arguments{{std::string(key), std::string(value)}};
    const Json parameters{
        {"type", "object"},
        {"properties", {{std::string(key), {{"type", "string"}, {"description", "What to look for."}}}}},
        {"required", Json::array({std::string(key)})}};
    const Json definition{
        {"type", "function"},
        {"function",
         {{"name", std::string(tool)}, {"description", "Looks something up."}, {"parameters", parameters}}}};
    const Json call{
        {"id", "call12345"},
        {"type", "function"},
        {"function",
         {{"name", std::string(tool)}, {"arguments", arguments_as_text ? Json(json_dump(arguments)) : arguments}}}};
    ChatInput input;
    input.tools                 = Json::array({definition});
    input.add_generation_prompt = false;
    input.messages.push_back(Json{{"role", "user"}, {"content", std::string(question)}});
    input.messages.push_back(Json{{"role", "assistant"}, {"content", ""}, {"tool_calls", Json::array({call})}});
    if (with_result)
        input.messages.push_back(Json{{"role", "tool"},
                                      {"content", std::string(result)},
                                      {"tool_call_id", "call12345"},
                                      {"name", std::string(tool)}});
    Result<MarkedText> text = t.render(input, {.bos_token = "<s>", .eos_token = "</s>"});
    if (!text) return std::nullopt;
    return std::move(text->bytes);
}

ToolForm form_of(std::string_view call) {
    const auto has     = [&](std::string_view part) { return call.contains(part); };
    const auto has_key = [&](std::string_view name) { return has(cat('"', name, '"')) || has(cat('\'', name, '\'')); };
    if (!has(tool) || !has(value)) return ToolForm::none; // a result may name its tool, too
    if (has("<|channel|>") && has(cat("functions.", tool))) return ToolForm::harmony;
    if (has("<｜tool▁call")) return ToolForm::deepseek;
    if (has("[TOOL_CALLS]")) return ToolForm::mistral;
    if (has(cat("<function=", tool, '>')))
        return has(cat("<parameter=", key, '>')) ? ToolForm::qwen3_coder : ToolForm::functionary;
    if (has("<arg_key>")) return ToolForm::glm;
    if (has(cat(tool, '(', key, '='))) return ToolForm::pythonic;
    if (!has_key("name")) return ToolForm::other;
    if (has_key("parameters")) return ToolForm::llama3;
    if (!has_key("arguments")) return ToolForm::other;
    return has("<tool_call>") ? ToolForm::hermes : ToolForm::json;
}

ToolForm tool_form(const ChatTemplate& chat_template) {
    for (const bool with_result : {true, false})
        for (const bool arguments_as_text : {false, true}) {
            const std::optional<std::string> text = rendered(chat_template, arguments_as_text, with_result);
            if (!text) continue;
            const std::size_t asked = text->rfind(question);
            const std::size_t begin = asked == std::string::npos ? 0 : asked + question.size();
            const std::size_t end   = std::min(text->rfind(result), text->size());
            if (begin >= end) continue;
            const ToolForm form = form_of(std::string_view(*text).substr(begin, end - begin));
            if (form != ToolForm::none) return form;
        }
    return ToolForm::none;
}

} // namespace quire
