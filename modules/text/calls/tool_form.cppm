// quire.text.calls.tool_form: how a chat template writes the call of a tool, found by rendering a call and looking at the text between the
// question and the tool's result. Owns nothing.
export module quire.text.calls.tool_form;

import quire.core.base;
export import quire.text.calls.call_marks;
import quire.text.calls.reasoning_form;
export import quire.text.templates.chat_template;

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
    json,        // {"name": …, "arguments": {…}}
    marked,      // between marks of the template's own
    other,       // a call that looks like none of these
};

std::string_view name_of(ToolForm form);
// The form of that name, if there is one that needs no template.
std::optional<ToolForm> tool_form_of(std::string_view name);

// How a model writes calls.
struct CallForm {
    CallForm(ToolForm k = ToolForm::none) : kind(k) {}
    explicit CallForm(CallMarks m) : kind(ToolForm::marked), marks(std::make_shared<const CallMarks>(std::move(m))) {}

    bool operator==(ToolForm k) const { return kind == k; }

    ToolForm                         kind;
    std::shared_ptr<const CallMarks> marks;         // of `marked`
    bool                             spaced = true; // white space between text and calls is none of the text
    std::optional<ElementMarks>      element; // of an answer's text, or its header; the marks are no part of the text
};

// Renders conversations with calls of tools. A template that shows tools and writes no calls may say in words how they are written.
CallForm call_form(const ChatTemplate& chat_template);

// A call as the form writes it, for people; "": it writes none.
std::string example_of(const CallForm& form);

} // namespace quire

module :private;

namespace quire {

constexpr std::array<std::pair<ToolForm, std::string_view>, 13> names{{{ToolForm::none, "none"},
                                                                       {ToolForm::hermes, "hermes"},
                                                                       {ToolForm::llama3, "llama3"},
                                                                       {ToolForm::mistral, "mistral"},
                                                                       {ToolForm::qwen3_coder, "qwen3-coder"},
                                                                       {ToolForm::glm, "glm"},
                                                                       {ToolForm::deepseek, "deepseek"},
                                                                       {ToolForm::functionary, "functionary"},
                                                                       {ToolForm::pythonic, "pythonic"},
                                                                       {ToolForm::harmony, "harmony"},
                                                                       {ToolForm::json, "json"},
                                                                       {ToolForm::marked, "marked"},
                                                                       {ToolForm::other, "other"}}};

// The conversation that is rendered.
struct Asked {
    enum class Answer : std::uint8_t { nothing, text, call, two_calls, two_keys, marked_value };
    Answer answer            = Answer::call;
    bool   arguments_as_text = false;
    bool   null_content      = false;
    bool   with_result       = false;
    bool   with_tools        = true;
    bool   with_text         = false; // before the call
    bool   with_prompt       = false; // for an answer, at the end
};

Json definition_of(std::string_view name) {
    const Json looked_for{{"type", "string"}, {"description", "What to look for."}};
    const Json parameters{{"type", "object"},
                          {"properties",
                           {{std::string(probe::key), looked_for},
                            {std::string(probe::number_key), {{"type", "integer"}, {"description", "How many."}}}}},
                          {"required", Json::array({std::string(probe::key)})}};
    return Json{{"type", "function"},
                {"function",
                 {{"name", std::string(name)}, {"description", "Looks something up."}, {"parameters", parameters}}}};
}

// Templates differ in their input: arguments as an object or as its text, an empty content or none, a result at the end or not.
std::optional<std::string> rendered(const ChatTemplate& t, const Asked& asked) {
    const auto value = asked.answer == Asked::Answer::marked_value ? probe::marked_value : probe::value;
    Json       arguments{{std::string(probe::key), std::string(value)}};
    if (asked.answer == Asked::Answer::two_keys) arguments[std::string(probe::number_key)] = probe::number;
    const auto call = [&](std::string_view name, std::string_view id) {
        return Json{{"id", std::string(id)},
                    {"type", "function"},
                    {"function",
                     {{"name", std::string(name)},
                      {"arguments", asked.arguments_as_text ? Json(json_dump(arguments)) : arguments}}}};
    };
    ChatInput input;
    if (asked.with_tools) input.tools = Json::array({definition_of(probe::tool), definition_of(probe::other_tool)});
    input.add_generation_prompt = asked.with_prompt;
    input.messages.push_back(Json{{"role", "user"}, {"content", std::string(probe::question)}});
    Json answer{{"role", "assistant"},
                {"content", asked.answer == Asked::Answer::text || asked.with_text ? Json(std::string(probe::text))
                            : asked.null_content                                   ? Json()
                                                                                   : Json("")}};
    if (asked.answer > Asked::Answer::text) answer["tool_calls"] = Json::array({call(probe::tool, probe::id)});
    if (asked.answer == Asked::Answer::two_calls)
        answer["tool_calls"].push_back(call(probe::other_tool, probe::other_id));
    if (asked.answer != Asked::Answer::nothing) input.messages.push_back(std::move(answer));
    if (asked.with_result)
        input.messages.push_back(Json{{"role", "tool"},
                                      {"content", std::string(probe::result)},
                                      {"tool_call_id", std::string(probe::id)},
                                      {"name", std::string(probe::tool)}});
    Result<MarkedText> text = t.render(input, {.bos_token = "<s>", .eos_token = "</s>"});
    if (!text) return std::nullopt;
    return std::move(text->bytes);
}

// The form of the text between a question and the result of the call.
ToolForm form_of(std::string_view call) {
    const auto has     = [&](std::string_view part) { return call.contains(part); };
    const auto has_key = [&](std::string_view name) { return has(cat('"', name, '"')) || has(cat('\'', name, '\'')); };
    const auto tool    = probe::tool;
    if (!has(tool) || !has(probe::value)) return ToolForm::none; // a result may name its tool, too
    if (has("<|channel|>") && has(cat("functions.", tool))) return ToolForm::harmony;
    if (has("<｜tool▁call")) return ToolForm::deepseek;
    if (has("[TOOL_CALLS]")) return ToolForm::mistral;
    if (has(cat("<function=", tool, '>')))
        return has(cat("<parameter=", probe::key, '>')) ? ToolForm::qwen3_coder : ToolForm::functionary;
    if (has("<arg_key>")) return ToolForm::glm;
    if (has(cat(tool, '(', probe::key, '='))) return ToolForm::pythonic;
    if (!has_key("name")) return ToolForm::other;
    if (has_key("parameters")) return ToolForm::llama3;
    if (!has_key("arguments")) return ToolForm::other;
    return has("<tool_call>") ? ToolForm::hermes : ToolForm::json;
}

// Whether calls with these marks have the named form.
bool is_of_form(ToolForm form, const CallMarks& m) {
    const std::string begin  = cat(m.section_open, m.call_open);
    const auto        starts = [&](std::string_view text) { return begin.starts_with(text); };
    const auto spaced = [&](std::string_view close) { return m.text.open.ends_with('\n') && m.text.close == close; };
    switch (form) {
        case ToolForm::hermes:
            return starts("<tool_call>") && m.call_close.ends_with("</tool_call>") && m.section_open.empty();
        case ToolForm::llama3:
        case ToolForm::json:
            return m.section_open.empty() && starts("{\"name\"") && m.call_close == "}" &&
                   m.separator.find_first_not_of("; ") == std::string::npos;
        case ToolForm::mistral:
            return starts("[TOOL_CALLS]") && m.section_close.find_first_not_of(" ]") == std::string::npos;
        case ToolForm::qwen3_coder:
            return (starts("<tool_call>") || starts("<function=")) && m.parameter_open == "<parameter=" &&
                   m.text.open == ">\n" && spaced("\n</parameter>") && m.section_open.empty();
        case ToolForm::glm:
            return starts("<tool_call>") && m.text.open == "</arg_key>\n<arg_value>" && m.text.close == "</arg_value>";
        case ToolForm::deepseek: return starts("<｜tool▁calls▁begin｜>");
        case ToolForm::functionary:
            return begin == "<function=" && m.name_close == ">" && m.call_close.starts_with("</function>");
        case ToolForm::pythonic: return begin == "[" && cat(m.call_close, m.section_close) == ")]";
        default: return false;
    }
}

// The form that the instructions of a template describe which shows tools, but writes no calls.
CallForm described(const ChatTemplate& t) {
    const std::optional<std::string> with    = rendered(t, {.answer = Asked::Answer::nothing}),
                                     without = rendered(t, {.answer = Asked::Answer::nothing, .with_tools = false});
    if (!with || !with->contains(probe::tool)) return {};
    const std::string_view said = differing_part(*with, without ? *without : std::string());
    // A mark that is named after calls, and whether one closes them.
    for (std::size_t at = 0; (at = said.find('<', at)) != std::string_view::npos; at++) {
        const std::string_view mark = said.substr(at, said.find('>', at) + 1 - at);
        if (mark.size() > 64 || !mark.contains("tool_call") || mark.starts_with("</")) continue;
        const std::string close = cat("</", mark.substr(1));
        if (mark == "<tool_call>" && said.contains(close) && said.contains("\"arguments\"")) return ToolForm::hermes;
        const bool list = !said.contains(close) && said.substr(at).contains("list");
        CallMarks  m{.section_open  = list ? cat(mark, "[") : "",
                     .call_open     = list ? "{\"name\": \"" : cat(mark, "{\"name\": \""),
                     .name_close    = "\", \"arguments\": ",
                     .call_close    = list || !said.contains(close) ? "}" : cat("}", close),
                     .separator     = list ? ", " : "",
                     .section_close = list ? "]" : "",
                     .several       = true};
        m.trigger = trigger_of(m, "");
        return CallForm(std::move(m));
    }
    if (said.contains("<|tool_list_start|>")) // the marks of calls are named likewise
        return CallForm(CallMarks{.arguments     = CallMarks::Arguments::python,
                                  .section_open  = "<|tool_call_start|>[",
                                  .name_close    = "(",
                                  .call_close    = ")",
                                  .separator     = ", ",
                                  .section_close = "]<|tool_call_end|>",
                                  .several       = true,
                                  .trigger       = "<|tool_call_start|>"});
    return {};
}

std::string_view name_of(ToolForm form) {
    const auto at = std::ranges::find(names, form, &std::pair<ToolForm, std::string_view>::first);
    return at == names.end() ? "other" : at->second;
}

std::optional<ToolForm> tool_form_of(std::string_view name) {
    for (const auto& [form, own] : names)
        if (own == name && form != ToolForm::marked && form != ToolForm::other) return form;
    return std::nullopt;
}

// The marks of calls behind the element with an answer's text, which is empty before calls, and ends with marks like those of calls.
CallMarks within(const ElementMarks& element, CallMarks marks, std::string_view other) {
    if (const std::string end = element.end_mark(); marks.section_open.starts_with(end))
        marks.section_open.erase(0, end.size());
    if (marks.section_close.ends_with('>') || marks.section_close.empty()) return marks;
    marks.section_close += element.end;
    marks.trigger = trigger_of(marks, other);
    return marks;
}

// Whether the template writes white space between the text of an answer and its calls, or no text at all there.
bool writes_space(const ChatTemplate& chat_template) {
    for (const bool arguments_as_text : {false, true}) {
        const std::optional<std::string> text =
            rendered(chat_template, {.arguments_as_text = arguments_as_text, .with_text = true});
        const std::size_t at = text ? text->rfind(probe::text) + probe::text.size() : std::string::npos;
        if (!text || !text->contains(probe::text)) continue;
        return at < text->size() && white_space.contains((*text)[at]);
    }
    return true;
}

CallForm form_of_calls(const ChatTemplate& chat_template) {
    using Answer   = Asked::Answer;
    ToolForm named = ToolForm::none;
    Asked    asked;
    for (const bool with_result : {true, false})
        for (const bool null_content : {false, true})
            for (const bool arguments_as_text : {false, true}) {
                if (named != ToolForm::none) continue;
                asked = {
                    .arguments_as_text = arguments_as_text, .null_content = null_content, .with_result = with_result};
                const std::optional<std::string> text = rendered(chat_template, asked);
                if (!text) continue;
                const std::size_t question = text->rfind(probe::question);
                const std::size_t begin    = question == std::string::npos ? 0 : question + probe::question.size();
                const std::size_t end      = std::min(text->rfind(probe::result), text->size());
                if (begin < end) named = form_of(std::string_view(*text).substr(begin, end - begin));
            }
    if (named == ToolForm::none) return described(chat_template);
    if (named == ToolForm::harmony) return named;
    const auto render = [&](Answer answer, bool as_text) {
        Asked one             = asked;
        one.answer            = answer;
        one.arguments_as_text = as_text;
        one.with_result       = false;
        return rendered(chat_template, one);
    };
    const std::optional<std::string> content   = render(Answer::text, false);
    const ReasoningForm              reasoning = reasoning_form(chat_template);
    for (const bool as_text : {asked.arguments_as_text, !asked.arguments_as_text}) {
        const std::optional<std::string> call = render(Answer::call, as_text);
        if (!content || !call) continue;
        std::optional<CallMarks> marks =
            find_call_marks({*content, *call, render(Answer::two_calls, as_text), render(Answer::two_keys, as_text),
                             reasoning.begin, reasoning.end, render(Answer::marked_value, as_text)});
        if (!marks) continue;
        if (is_of_form(named, *marks)) return named;
        return CallForm(std::move(*marks));
    }
    return named;
}

// The header of an answer that the template leaves to the model: behind the prompt, before the text or the call.
std::optional<ElementMarks> find_header(const ChatTemplate& chat_template) {
    using Answer = Asked::Answer;
    for (const bool arguments_as_text : {false, true}) {
        const auto prompt = rendered(chat_template, {.answer = Answer::nothing, .with_prompt = true});
        const auto answer = rendered(chat_template, {.answer = Answer::text});
        const auto call   = rendered(chat_template, {.arguments_as_text = arguments_as_text});
        if (!prompt || !answer || !call || !answer->starts_with(*prompt) || !call->starts_with(*prompt)) continue;
        const auto        behind = std::string_view(*answer).substr(prompt->size());
        const std::size_t text   = behind.find(probe::text);
        if (text == std::string_view::npos) continue;
        if (auto header = header_of(behind.substr(0, text), std::string_view(*call).substr(prompt->size())))
            return header;
    }
    return std::nullopt;
}

CallForm call_form(const ChatTemplate& chat_template) {
    CallForm form          = form_of_calls(chat_template);
    form.spaced            = writes_space(chat_template);
    const auto        text = rendered(chat_template, {.answer = Asked::Answer::text, .with_tools = false});
    const std::size_t at   = text ? text->find(probe::text) : std::string::npos;
    if (at == std::string::npos) return form;
    form.element =
        element_between(std::string_view(*text).substr(0, at), std::string_view(*text).substr(at + probe::text.size()));
    if (!form.element) form.element = find_header(chat_template);
    else if (form.marks) form.marks = std::make_shared<const CallMarks>(within(*form.element, *form.marks, *text));
    return form;
}

std::string example_of(const CallForm& form) {
    const auto plain = [](std::string_view text) {
        std::string out;
        for (const char c : text)
            out += c == id_mark ? "ID" : c == index_mark ? "0" : c == key_mark ? "KEY" : std::string(1, c);
        return out;
    };
    switch (form.kind) {
        case ToolForm::none:
        case ToolForm::other: return "";
        case ToolForm::hermes: return "<tool_call>{\"name\": \"NAME\", \"arguments\": {…}}</tool_call>";
        case ToolForm::llama3: return "{\"name\": \"NAME\", \"parameters\": {…}}";
        case ToolForm::mistral: return "[TOOL_CALLS] [{\"name\": \"NAME\", \"arguments\": {…}}]";
        case ToolForm::qwen3_coder:
            return "<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>";
        case ToolForm::glm: return "<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>";
        case ToolForm::deepseek:
            return "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜><"
                   "｜tool▁calls▁end｜>";
        case ToolForm::functionary: return "<function=NAME>{…}</function>";
        case ToolForm::pythonic: return "[NAME(KEY=VALUE)]";
        case ToolForm::harmony: return "<|channel|>commentary to=functions.NAME<|message|>{…}<|call|>";
        case ToolForm::json: return "{\"name\": \"NAME\", \"arguments\": {…}}";
        case ToolForm::marked: break;
    }
    const CallMarks&  m    = *form.marks;
    const std::string head = plain(cat(m.section_open, m.call_open)) + "NAME" + plain(m.name_close);
    const std::string tail = plain(cat(m.call_close, m.section_close));
    switch (m.arguments) {
        case CallMarks::Arguments::json: return head + "{…}" + tail;
        case CallMarks::Arguments::python: return head + "KEY=VALUE" + tail;
        case CallMarks::Arguments::tagged: break;
    }
    return head + plain(cat(m.parameter_open, key_mark, m.text.open)) + "VALUE" + plain(m.text.close) + tail;
}

} // namespace quire
