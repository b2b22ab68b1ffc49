// quire.text.calls.call_readers: reads the calls that stand at the beginning of a text, in each of the forms in which models write them.
// Owns nothing. No reader recurses without a bound, and none looks behind the call that it reads.
export module quire.text.calls.call_readers;

import quire.core.base;
export import quire.core.json;
export import quire.text.calls.call_reader; // ToolCall, CallsRead
import quire.text.calls.marked_calls;
import quire.text.calls.python_call;
import quire.text.calls.tool_form;
import quire.text.calls.tool_parameter;

export namespace quire {

// Where a call may begin.
struct Marks {
    std::vector<std::string> anywhere; // no later than at one of these
    std::string              first;    // at one of these characters, if only white space stands before it
};
Marks marks_of(const CallForm& form, const Json& tools);

// `text` begins at a mark. `tools`: the request's; a call of another is wrong. `end`: no more text will come, so that the mark behind
// a call may be missing.
CallsRead read_calls(const CallForm& form, const Json& tools, std::string_view text, bool end);

// The first call at a mark, as soon as its arguments begin: where they are JSON as it stands in the text.
struct CallHead {
    std::string name;
    std::size_t arguments = 0; // where they begin in the text
};
std::optional<CallHead> read_head(const CallForm& form, const Json& tools, std::string_view text);

} // namespace quire

module :private;

namespace quire {

// A mark that ends a call; at the end of the text it may be missing.
bool close(CallReader& r, std::string_view mark) {
    r.skip_white();
    return (r.at_end() && r.end()) || r.take(mark);
}

bool read_hermes(CallReader& r) {
    if (!r.take("<tool_call>")) return false;
    r.skip_white();
    const std::optional<Json> call = r.json('{');
    return call && r.add(*call) && close(r, "</tool_call>") && r.whole();
}

// One object, or several with semicolons between them.
bool read_objects(CallReader& r) {
    r.skip("<|python_tag|>");
    while (true) {
        r.skip_white();
        const std::optional<Json> call = r.json('{');
        if (!call || !r.add(*call)) return false;
        const std::size_t behind = r.at();
        r.skip_white();
        if (!r.skip(";")) {
            if (r.at_end() && !r.end()) return r.more(); // another may follow
            r.whole();
            r.read.size = behind;
            return true;
        }
    }
}

// [TOOL_CALLS] and a list of calls, or a name, perhaps [CALL_ID] and an id, [ARGS] and the arguments.
bool read_mistral(CallReader& r) {
    if (!r.take("[TOOL_CALLS]")) return false;
    r.skip_white();
    if (r.at_end()) return r.more();
    if (r.next_is("[")) {
        const std::optional<Json> calls = r.json('[');
        if (!calls) return false;
        if (calls->empty()) return r.wrong();
        for (const Json& call : *calls)
            if (!r.add(call)) return false;
        return r.whole();
    }
    const std::size_t open = r.rest().find_first_of("[{");
    if (open == std::string_view::npos) return r.rest().size() > 256 ? r.wrong() : r.more();
    const std::string_view name = r.rest().substr(0, open);
    r.advance(open);
    if (r.may_become("[CALL_ID]") || r.may_become("[ARGS]")) return r.more();
    if (r.skip("[CALL_ID]") && !r.until("[ARGS]")) return false;
    r.skip("[ARGS]");
    r.skip_white();
    const std::optional<Json> arguments = r.json('{');
    return arguments && r.add(name.substr(0, name.find_last_not_of(white_space) + 1), *arguments) && r.whole();
}

std::string_view without_line_ends(std::string_view text) {
    if (text.starts_with('\n')) text.remove_prefix(1);
    if (text.ends_with('\n')) text.remove_suffix(1);
    return text;
}

// The rest of a line that begins with the end of a call; nothing, if the line begins with no such end.
std::optional<std::string_view> behind_call(std::string_view line) {
    for (const std::string_view mark : {"</function>", "</tool_call>"}) {
        line = without_white_begin(line);
        if (!line.starts_with(mark)) return std::nullopt;
        line.remove_prefix(mark.size());
    }
    return without_white_begin(line);
}

// Whether `text` has the end of a call at the beginning of a line.
bool ends_later(std::string_view text) {
    for (std::size_t at = 0; (at = text.find("\n</function>", at)) != std::string_view::npos; at++)
        if (behind_call(text.substr(at + 1))) return true;
    return false;
}

// Whether a parameter begins with `mark`, <parameter=KEY>, behind another one that is closed, or at the beginning of the text.
bool begins_parameter(std::string_view text, std::string_view mark) {
    for (std::size_t at = 0; (at = text.find(mark, at)) != std::string_view::npos; at++) {
        const std::size_t last = text.substr(0, at).find_last_not_of(white_space);
        if (last == std::string_view::npos || text.substr(0, last + 1).ends_with("</parameter>")) return true;
    }
    return false;
}

// The value of a parameter, perhaps not closed: then it ends before a line with the next of the tool's parameters, or with the last end of a
// call in the text. An end before the beginning of another call is one in any case; others within a closed value are text. So is a parameter
// within a closed value that stands behind the value, too: a call has each parameter once.
std::optional<std::string_view> qwen3_coder_value(CallReader& r, const Json* tool) {
    constexpr std::string_view            close = "</parameter>", parameter = "<parameter=";
    static const std::vector<std::string> next{std::string(parameter), "</function>"};
    const std::size_t                     begin = r.at();
    const std::string_view                rest  = r.rest();
    const auto                            value = r.before(close, next);
    const std::string_view                text  = value ? *value : rest;
    // The call as far as it can come before it ends: however an answer is cut, no call is read that more of the text would change.
    const std::size_t      last_end = text.rfind(next[1]);
    const std::string_view others   = value ? r.rest().substr(0, r.rest().find(next[1])) : "";
    const auto             has_call = [](std::string_view behind) {
        constexpr std::string_view function = "<function=";
        for (std::size_t at = 0; (at = behind.find(function, at)) != std::string_view::npos;) {
            at += function.size();
            if (const std::size_t end = behind.find_first_of("<>\n", at);
                behind.substr(std::min(end, behind.size())).starts_with('>'))
                return true;
        }
        return false;
    };
    for (std::size_t at = 0; tool && (at = text.find("\n<", at)) != std::string_view::npos; at++) {
        const std::string_view line  = text.substr(at + 1);
        const std::string_view key   = line.starts_with(parameter) ? line.substr(parameter.size()) : "";
        const bool             again = (last_end == text.npos || last_end < at) && key.contains('>') &&
                           begins_parameter(others, line.substr(0, line.find('>') + 1));
        const bool named = key.contains('>') && parameter_schema(*tool, key.substr(0, key.find('>'))) && !again;
        if (!named) {
            const std::optional<std::string_view> behind = behind_call(line);
            if (!behind) continue;
            if (!has_call(*behind) && (value || !r.end() || ends_later(*behind))) continue;
        }
        r.back_to(begin + at + 1);
        return text.substr(0, at + 1);
    }
    if (value) return value;
    return r.end() ? r.until(close) : (r.more(), std::nullopt);
}

bool read_qwen3_coder(CallReader& r) {
    const bool wrapped = r.skip("<tool_call>");
    if (r.may_become("<tool_call>")) return r.more();
    r.skip_white();
    if (!r.take("<function=")) return false;
    const auto name = r.until(">");
    if (!name) return false;
    Json arguments = Json::object();
    while (true) {
        r.skip_white();
        if (r.skip("</function>")) break;
        if (r.may_become("</function>")) return r.more();
        if (!r.take("<parameter=")) return false;
        const auto key   = r.until(">");
        const auto value = key ? qwen3_coder_value(r, r.tool(*name)) : std::nullopt;
        if (!value) return false;
        arguments[std::string(*key)] = typed_parameter(r.tool(*name), *key, without_line_ends(*value));
    }
    if (!r.add(*name, arguments)) return false;
    if (wrapped) return close(r, "</tool_call>") && r.whole();
    const std::size_t behind = r.at(); // the mark may be there though the one before the call is not
    r.skip_white();
    if (r.skip("</tool_call>")) return r.whole();
    if (!r.end() && (r.at_end() || r.may_become("</tool_call>"))) return r.more();
    r.back_to(behind);
    return r.whole();
}

bool read_glm(CallReader& r) {
    static const CallMarks marks{.arguments      = CallMarks::Arguments::tagged,
                                 .call_open      = "<tool_call>\n", // or no line
                                 .call_close     = "</tool_call>",
                                 .parameter_open = "<arg_key>",
                                 .text           = {"</arg_key><arg_value>", "</arg_value>"},
                                 .other          = {"</arg_key><arg_value>", "</arg_value>"}};
    if (!r.take("<tool_call>")) return false;
    const std::size_t open = r.rest().find('<');
    if (open == std::string_view::npos) return r.more();
    std::string_view name = r.rest().substr(0, open);
    name.remove_prefix(std::min(name.find_first_not_of(white_space), name.size()));
    name = name.substr(0, name.find_last_not_of(white_space) + 1);
    r.advance(open);
    Json arguments = Json::object();
    while (true) {
        r.skip_white();
        if (r.skip("</tool_call>")) break;
        if (r.may_become("</tool_call>")) return r.more();
        if (!r.take("<arg_key>")) return false;
        const auto key = r.until("</arg_key>");
        if (!key) return false;
        r.skip_white();
        if (!r.take("<arg_value>")) return false;
        const auto value = tagged_value(r, marks, marks.text.close);
        if (!value) return false;
        arguments[std::string(*key)] = typed_parameter(r.tool(name), *key, *value);
    }
    return r.add(name, arguments) && r.whole();
}

// Of each call the name and the arguments, which are JSON; older models write "function", the name and a block of Markdown.
bool read_deepseek(CallReader& r) {
    if (!r.take("<｜tool▁calls▁begin｜>")) return false;
    while (true) {
        r.skip_white();
        if (!r.read.calls.empty()) {
            if (r.skip("<｜tool▁calls▁end｜>") || (r.at_end() && r.end())) return r.whole();
            if (r.may_become("<｜tool▁calls▁end｜>")) return r.more();
        }
        if (!r.take("<｜tool▁call▁begin｜>")) return false;
        const auto head = r.until("<｜tool▁sep｜>");
        if (!head) return false;
        std::string_view name = *head;
        if (name == "function") {
            const auto line = r.until("\n");
            if (!line) return false;
            name = *line;
            if (!r.take("```json")) return false;
        }
        r.skip_white();
        const std::optional<Json> arguments = r.json('{');
        if (!arguments || !r.add(name, *arguments)) return false;
        r.skip_white();
        if (r.may_become("```")) return r.more();
        r.skip("```");
        if (!close(r, "<｜tool▁call▁end｜>")) return false;
    }
}

bool read_functionary(CallReader& r) {
    if (!r.take("<function=")) return false;
    const auto name = r.until(">");
    if (!name) return false;
    r.skip_white();
    const std::optional<Json> arguments = r.json('{');
    return arguments && r.add(*name, *arguments) && close(r, "</function>") && r.whole();
}

bool read_pythonic(CallReader& r) {
    const PythonCalls calls = read_python_calls(r.rest());
    if (calls.size == 0) return calls.unfinished ? r.more() : r.wrong();
    for (const auto& [name, arguments] : calls.calls)
        if (!r.add(name, arguments)) return false;
    r.advance(calls.size);
    return r.whole();
}

// <|channel|>analysis, final or commentary to=functions.NAME …<|message|>…; the recipient may stand before the channel, too.
bool read_harmony(CallReader& r) {
    for (std::string_view mark : {"<|end|>", "<|return|>", "<|call|>"})
        if (r.skip(mark)) return r.read.channel = Channel::content, r.whole();
        else if (r.may_become(mark)) return r.more();
    constexpr std::string_view message = "<|message|>", role = "to=functions.";
    if (!r.next_is("<|") && !r.next_is(role)) return r.may_become(role) ? r.more() : r.wrong();
    const auto head = r.until(message);
    if (!head) return r.rest().size() > 1024 ? r.wrong() : r.more();
    constexpr std::string_view to = "to=functions.";
    if (const std::size_t at = head->find(to); at != std::string_view::npos) {
        const std::string_view from = head->substr(at + to.size());
        const std::string_view name = from.substr(0, from.find_first_of(" <\n"));
        r.skip_white();
        const std::optional<Json> arguments = r.json('{');
        if (!arguments || !r.add(name, *arguments)) return false;
        r.skip_white();
        if (r.skip("<|end|>")) return r.whole();
        if (r.may_become("<|end|>")) return r.more();
        return close(r, "<|call|>") && r.whole();
    }
    r.read.channel = head->contains("analysis") ? Channel::reasoning : Channel::content;
    return r.whole();
}

// A mark around the text of an answer, or the end of an element around that; or the header of an answer for the user or a tool.
bool read_element(CallReader& r, const ElementMarks& e) {
    r.read.channel = Channel::content;
    if (e.close.empty()) {
        if (!r.take(e.open)) return false;
        const auto name = r.until(e.end);
        if (!name) return r.rest().size() > 256 ? r.wrong() : false;
        return *name == e.name || r.tool(*name) ? r.whole() : r.wrong();
    }
    if (r.skip(e.begin_mark())) return r.whole();
    if (r.may_become(e.begin_mark())) return r.more();
    if (!r.take(e.close)) return false;
    const auto name = r.until(e.end);
    return name ? r.whole() : r.rest().size() > 64 ? r.wrong() : false;
}

Marks marks_of_calls(const CallForm& form, const Json& tools) {
    switch (form.kind) {
        case ToolForm::hermes:
        case ToolForm::glm: return {{"<tool_call>"}, ""};
        case ToolForm::llama3:
        case ToolForm::json: return {{"<|python_tag|>"}, "{"};
        case ToolForm::mistral: return {{"[TOOL_CALLS]"}, ""};
        case ToolForm::qwen3_coder: return {{"<tool_call>", "<function="}, ""};
        case ToolForm::deepseek: return {{"<｜tool▁calls▁begin｜>"}, ""};
        case ToolForm::functionary: return {{"<function="}, ""};
        case ToolForm::pythonic: return {{}, "["};
        case ToolForm::harmony: return {{"<|channel|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>"}, "t"};
        case ToolForm::marked: {
            if (!form.marks->trigger.empty()) return {{form.marks->trigger}, ""};
            Marks             out;
            const std::string begin = cat(form.marks->section_open, form.marks->call_open);
            if (const std::size_t at = begin.find_first_not_of(white_space); at != std::string::npos)
                out.first = begin[at];
            else
                for (const Json& t : tools)
                    out.first += t["function"]["name"].get_ref<const std::string&>().substr(0, 1);
            return out;
        }
        case ToolForm::none:
        case ToolForm::other: return {};
    }
    return {};
}

Marks marks_of(const CallForm& form, const Json& tools) {
    Marks marks = marks_of_calls(form, tools);
    if (form.element && form.element->close.empty()) marks.first += form.element->open[0];
    else if (form.element) {
        marks.anywhere.push_back(form.element->begin_mark());
        marks.anywhere.push_back(form.element->close);
    }
    return marks;
}

std::optional<CallHead> read_head(const CallForm& form, const Json& tools, std::string_view text) {
    CallReader                 r(text, false, tools);
    std::optional<std::string> name;
    const auto                 up_to = [&](std::string_view mark) {
        const auto part = r.until(mark);
        if (part) name = std::string(part->substr(0, part->find_last_not_of(white_space) + 1));
    };
    switch (form.kind) {
        case ToolForm::hermes:
            if (r.skip("<tool_call>")) name = r.object_head("arguments");
            break;
        case ToolForm::llama3:
        case ToolForm::json:
            r.skip("<|python_tag|>");
            name = r.object_head(form.kind == ToolForm::llama3 ? "parameters" : "arguments");
            break;
        case ToolForm::mistral:
            if (!r.skip("[TOOL_CALLS]")) break;
            r.skip_white();
            if (r.skip("[")) name = r.object_head("arguments");
            else up_to("[ARGS]");
            break;
        case ToolForm::deepseek:
            if (!r.skip("<｜tool▁calls▁begin｜>") || !r.skip("<｜tool▁call▁begin｜>")) break;
            up_to("<｜tool▁sep｜>");
            if (name == "function") {
                name.reset();
                up_to("\n```json\n");
            }
            break;
        case ToolForm::functionary:
            if (r.skip("<function=")) up_to(">");
            break;
        case ToolForm::harmony:
            if (const auto head = r.until("<|message|>")) {
                constexpr std::string_view to = "to=functions.";
                const std::size_t          at = head->find(to);
                if (at == std::string_view::npos) break;
                const std::string_view from = head->substr(at + to.size());
                name                        = std::string(from.substr(0, from.find_first_of(" <\n")));
            }
            break;
        case ToolForm::marked:
            if (form.marks->arguments == CallMarks::Arguments::json &&
                r.match(cat(form.marks->section_open, form.marks->call_open)))
                name = r.name();
            if (name && !r.match(form.marks->name_close)) name.reset();
            if (name) r.skip_white();
            break;
        default: break;
    }
    if (!name || !r.next_is("{") || !r.tool(*name)) return std::nullopt;
    return CallHead{std::move(*name), r.at()};
}

CallsRead read_calls(const CallForm& form, const Json& tools, std::string_view text, bool end) {
    if (form.element) {
        CallReader element(text, end, tools);
        read_element(element, *form.element);
        if (element.read.state != CallsRead::State::wrong) return std::move(element.read);
    }
    CallReader r(text, end, tools);
    switch (form.kind) {
        case ToolForm::hermes: read_hermes(r); break;
        case ToolForm::llama3:
        case ToolForm::json: read_objects(r); break;
        case ToolForm::mistral: read_mistral(r); break;
        case ToolForm::qwen3_coder: read_qwen3_coder(r); break;
        case ToolForm::glm: read_glm(r); break;
        case ToolForm::deepseek: read_deepseek(r); break;
        case ToolForm::functionary: read_functionary(r); break;
        case ToolForm::pythonic: read_pythonic(r); break;
        case ToolForm::harmony: read_harmony(r); break;
        case ToolForm::marked: read_marked(r, *form.marks); break;
        case ToolForm::none:
        case ToolForm::other: break;
    }
    // At the end those before the one that was cut off count.
    if (r.read.state != CallsRead::State::whole && !(end && r.read.state == CallsRead::State::more))
        r.read.calls.clear();
    return std::move(r.read);
}

} // namespace quire
