// quire.text.calls.call_readers: reads the calls that stand at the beginning of a text, in each of the forms in which models write them.
// Owns nothing. No reader recurses without a bound, and none looks behind the call that it reads.
export module quire.text.calls.call_readers;

import quire.core.base;
import quire.core.json;
import quire.core.std;
import quire.text.calls.call_marks;
import quire.text.calls.python_call;
import quire.text.calls.tool_form;
import quire.text.calls.tool_parameter;

export namespace quire {

struct ToolCall {
    std::string name;
    std::string arguments;    // a JSON object
    bool        more = false; // more of the last call's arguments; `name` is empty
};

// Where a call may begin.
struct Marks {
    std::vector<std::string> anywhere; // no later than at one of these
    std::string              first;    // at one of these characters, if only white space stands before it
};
Marks marks_of(const CallForm& form, const Json& tools);

// The kind of the text that follows, in the harmony form.
enum class Channel : std::uint8_t { content, reasoning };

struct CallsRead {
    enum class State : std::uint8_t { whole, more, wrong }; // more: the text ends before the call does
    State                  state = State::wrong;
    std::size_t            size  = 0; // bytes read
    std::vector<ToolCall>  calls;     // may be none, where only a mark of the harmony form was read
    std::optional<Channel> channel;
};

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

namespace {

constexpr std::string_view white = " \t\r\n";
constexpr JsonLimits       call_limits{.bytes = std::size_t(1) << 20};

// The text that is read, and how far.
class Reader {
public:
    Reader(std::string_view text, bool end, const Json& tools) : text_(text), end_(end), tools_(tools) {}

    bool        end() const { return end_; }
    std::size_t at() const { return at_; }
    bool        at_end() const { return at_ == text_.size(); }

    bool wrong() { return read.state = CallsRead::State::wrong, false; }
    bool more() { return read.state = CallsRead::State::more, false; }
    bool whole() {
        read.state = CallsRead::State::whole;
        read.size  = at_;
        return true;
    }

    void skip_white() { at_ = std::min(text_.find_first_not_of(white, at_), text_.size()); }
    bool next_is(std::string_view mark) const { return text_.substr(at_).starts_with(mark); }
    bool may_become(std::string_view mark) const {
        const std::string_view rest = text_.substr(at_);
        return !end_ && rest.size() < mark.size() && mark.starts_with(rest);
    }
    bool take(std::string_view mark) {
        if (next_is(mark)) return at_ += mark.size(), true;
        return may_become(mark) || at_end() ? more() : wrong();
    }
    bool skip(std::string_view mark) {
        if (!next_is(mark)) return false;
        at_ += mark.size();
        return true;
    }
    // The text up to `mark`, and behind it.
    std::optional<std::string_view> until(std::string_view mark) {
        const std::size_t to = text_.find(mark, at_);
        if (to == std::string_view::npos) return more(), std::nullopt;
        const std::string_view part = text_.substr(at_, to - at_);
        at_                         = to + mark.size();
        return part;
    }
    // A JSON object or list; `open` is its first character.
    std::optional<Json> json(char open) {
        if (at_end()) return more(), std::nullopt;
        if (text_[at_] != open) return wrong(), std::nullopt;
        int  depth     = 0;
        bool in_string = false;
        for (std::size_t i = at_; i < text_.size(); i++) {
            const char c = text_[i];
            if (in_string) {
                if (c == '\\') i++;
                else if (c == '"') in_string = false;
            } else if (c == '"') in_string = true;
            else if (c == '{' || c == '[') depth++;
            else if ((c == '}' || c == ']') && --depth == 0) {
                Result<Json> value = json_parse(text_.substr(at_, i + 1 - at_), call_limits);
                if (!value) return wrong(), std::nullopt;
                at_ = i + 1;
                return std::move(*value);
            }
        }
        return more(), std::nullopt;
    }
    std::string_view rest() const { return text_.substr(at_); }
    void             advance(std::size_t n) { at_ += n; }

    // The definition of a tool; nothing: the request has none of this name.
    const Json* tool(std::string_view name) const {
        for (const Json& t : tools_)
            if (t["function"]["name"].get_ref<const std::string&>() == name) return &t["function"];
        return nullptr;
    }
    bool add(std::string_view name, const Json& arguments) {
        if (!arguments.is_object() || !tool(name)) return wrong();
        read.calls.push_back({std::string(name), json_dump(arguments)});
        return true;
    }
    // {"name": …, "arguments": {…}}, where the arguments may be named parameters, and may be an object as text.
    bool add(const Json& call) {
        if (!call.is_object() || !call.contains("name") || !call["name"].is_string()) return wrong();
        const char* key = call.contains("arguments") ? "arguments" : "parameters";
        if (!call.contains(key)) return wrong();
        const auto& name = call["name"].get_ref<const std::string&>();
        if (!call[key].is_string()) return add(name, call[key]);
        const Result<Json> inner = json_parse(call[key].get_ref<const std::string&>(), call_limits);
        return inner ? add(name, *inner) : wrong();
    }

    // {"name": "NAME", "KEY":
    std::optional<std::string> object_head(std::string_view key) {
        const auto word = [&](std::string_view one) { return skip_white(), skip(one); };
        if (!word("{") || !word("\"name\"") || !word(":") || !word("\"")) return std::nullopt;
        const auto name = until("\"");
        if (!name || !word(",") || !word(cat('"', key, '"')) || !word(":")) return std::nullopt;
        skip_white();
        return std::string(*name);
    }

    // The name of a tool, as long as it can be.
    std::optional<std::string> name() {
        const std::size_t at = std::min(text_.find_first_not_of(name_characters, at_), text_.size());
        if (at == text_.size()) return more(), std::nullopt;
        const std::string_view found = text_.substr(at_, at - at_);
        at_                          = at;
        return std::string(found);
    }
    // Matches the text around calls, `pattern` of CallMarks: white space may differ where JSON allows it. Nothing: the pattern stands there so
    // far, and the text ends.
    std::optional<bool> try_match(std::string_view pattern) {
        std::size_t at = at_;
        for (std::size_t i = 0; i < pattern.size(); i++) {
            const char c = pattern[i];
            if (white.contains(c) || loose_before(pattern, i))
                at = std::min(text_.find_first_not_of(white, at), text_.size());
            if (white.contains(c)) continue;
            if (at == text_.size()) return std::nullopt;
            if (c == id_mark || c == index_mark) {
                const auto        part = c == id_mark ? id_characters : std::string_view("0123456789");
                const std::size_t to   = std::min(text_.find_first_not_of(part, at), text_.size());
                if (to == at) return false;
                at = to;
            } else if (text_[at++] != c) return false;
        }
        at_ = at;
        return true;
    }
    bool match(std::string_view pattern) {
        const std::optional<bool> there = try_match(pattern);
        return !there ? more() : *there || wrong();
    }

    CallsRead read;

private:
    static constexpr std::string_view name_characters =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.";
    static constexpr std::string_view id_characters = name_characters;

    std::string_view text_;
    std::size_t      at_ = 0;
    bool             end_;
    const Json&      tools_;
};

// Where a JSON string ends that the text begins with.
std::size_t end_of_string(std::string_view text) {
    for (std::size_t i = 1; i < text.size(); i++)
        if (text[i] == '\\') i++;
        else if (text[i] == '"') return i + 1;
    return std::string_view::npos;
}

// A mark that ends a call; at the end of the text it may be missing.
bool close(Reader& r, std::string_view mark) {
    r.skip_white();
    return (r.at_end() && r.end()) || r.take(mark);
}

bool read_hermes(Reader& r) {
    if (!r.take("<tool_call>")) return false;
    r.skip_white();
    const std::optional<Json> call = r.json('{');
    return call && r.add(*call) && close(r, "</tool_call>") && r.whole();
}

// One object, or several with semicolons between them.
bool read_objects(Reader& r) {
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
bool read_mistral(Reader& r) {
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
    return arguments && r.add(name.substr(0, name.find_last_not_of(white) + 1), *arguments) && r.whole();
}

// A parameter's text as the tool's schema types it: a string as it stands, all else as JSON if it is JSON.
Json typed(const Json* tool, std::string_view key, std::string_view text) {
    const Json* schema = tool ? parameter_schema(*tool, key) : nullptr;
    if (!schema) return std::string(text);
    const JsonKinds kinds = kinds_of((*tool)["parameters"], *schema);
    Result<Json>    value = json_parse(text, call_limits);
    if (value && !value->is_string() && kinds.has(*value)) return std::move(*value);
    return std::string(text);
}

std::string_view without_line_ends(std::string_view text) {
    if (text.starts_with('\n')) text.remove_prefix(1);
    if (text.ends_with('\n')) text.remove_suffix(1);
    return text;
}

bool read_qwen3_coder(Reader& r) {
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
        const auto value = key ? r.until("</parameter>") : std::nullopt;
        if (!value) return false;
        arguments[std::string(*key)] = typed(r.tool(*name), *key, without_line_ends(*value));
    }
    return r.add(*name, arguments) && (!wrapped || close(r, "</tool_call>")) && r.whole();
}

bool read_glm(Reader& r) {
    if (!r.take("<tool_call>")) return false;
    const std::size_t open = r.rest().find('<');
    if (open == std::string_view::npos) return r.more();
    std::string_view name = r.rest().substr(0, open);
    name.remove_prefix(std::min(name.find_first_not_of(white), name.size()));
    name = name.substr(0, name.find_last_not_of(white) + 1);
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
        const auto value = r.until("</arg_value>");
        if (!value) return false;
        arguments[std::string(*key)] = typed(r.tool(name), *key, *value);
    }
    return r.add(name, arguments) && r.whole();
}

// Of each call the name and the arguments, which are JSON; older models write "function", the name and a block of Markdown.
bool read_deepseek(Reader& r) {
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

bool read_functionary(Reader& r) {
    if (!r.take("<function=")) return false;
    const auto name = r.until(">");
    if (!name) return false;
    r.skip_white();
    const std::optional<Json> arguments = r.json('{');
    return arguments && r.add(*name, *arguments) && close(r, "</function>") && r.whole();
}

bool read_pythonic(Reader& r) {
    const PythonCalls calls = read_python_calls(r.rest());
    if (calls.size == 0) return calls.unfinished ? r.more() : r.wrong();
    for (const auto& [name, arguments] : calls.calls)
        if (!r.add(name, arguments)) return false;
    r.advance(calls.size);
    return r.whole();
}

// <|channel|>analysis, final or commentary to=functions.NAME …<|message|>…; the recipient may stand before the channel, too.
bool read_harmony(Reader& r) {
    for (std::string_view mark : {"<|end|>", "<|return|>", "<|call|>"})
        if (r.skip(mark)) return r.read.channel = Channel::content, r.whole();
    constexpr std::string_view message = "<|message|>";
    const auto                 head    = r.until(message);
    if (!head) return r.rest().size() > 1024 ? r.wrong() : r.more();
    constexpr std::string_view to = "to=functions.";
    if (const std::size_t at = head->find(to); at != std::string_view::npos) {
        const std::string_view from = head->substr(at + to.size());
        const std::string_view name = from.substr(0, from.find_first_of(" <\n"));
        r.skip_white();
        const std::optional<Json> arguments = r.json('{');
        if (!arguments || !r.add(name, *arguments)) return false;
        if (r.skip("<|end|>")) return r.whole();
        return close(r, "<|call|>") && r.whole();
    }
    r.read.channel = head->contains("analysis") ? Channel::reasoning : Channel::content;
    return r.whole();
}

// The text of a mark for the parameter of that name.
std::string for_key(std::string_view mark, std::string_view key) {
    std::string out;
    for (const char c : mark) out += c == key_mark ? std::string(key) : std::string(1, c);
    return out;
}

// KEY, how it is closed, and the value; the arguments get it.
bool read_parameter(Reader& r, const CallMarks& m, const Json* tool, Json& arguments) {
    // Whichever stands first behind the key; of two there, the longer one.
    const CallMarks::Value* kind = nullptr;
    std::size_t             at   = std::string_view::npos;
    for (const CallMarks::Value* one : {&m.text, &m.other}) {
        const std::size_t found = r.rest().find(one->open);
        if (found == std::string_view::npos) continue;
        if (!kind || found < at || (found == at && one->open.size() > kind->open.size())) kind = one, at = found;
    }
    if (!kind) return r.rest().size() > 4096 ? r.wrong() : r.more();
    const std::string key(r.rest().substr(0, at));
    // The longer one may still come.
    if (m.text.open != kind->open && m.text.open.starts_with(kind->open)) {
        Reader longer = r;
        longer.advance(at);
        if (longer.may_become(m.text.open)) return r.more();
    }
    r.advance(at + kind->open.size());
    const std::string close = for_key(kind->close, key);
    if (close.empty()) { // JSON says itself where it ends
        r.skip_white();
        if (r.at_end()) return r.more();
        if (r.next_is("{") || r.next_is("[")) {
            std::optional<Json> value = r.json(r.rest()[0]);
            if (!value) return false;
            arguments[key] = std::move(*value);
            return true;
        }
        const bool        quoted = r.next_is("\"");
        const std::size_t end    = quoted ? end_of_string(r.rest()) : r.rest().find_first_of(",}])> \t\r\n<");
        if (end == std::string_view::npos) return r.more();
        Result<Json> value = json_parse(r.rest().substr(0, end), call_limits);
        if (!value) return r.wrong();
        arguments[key] = std::move(*value);
        r.advance(end);
        return true;
    }
    const auto value = r.until(close);
    if (!value) return false;
    if (kind == &m.text && m.text.open != m.other.open) arguments[key] = std::string(*value);
    else arguments[key] = typed(tool, key, *value);
    return true;
}

// Behind a name, up to the end of the arguments.
bool read_marked_arguments(Reader& r, const CallMarks& m, const std::string& name) {
    if (m.arguments == CallMarks::Arguments::json) {
        r.skip_white();
        const std::optional<Json> arguments = r.json('{');
        return arguments && r.add(name, *arguments);
    }
    const Json* tool = r.tool(name);
    if (!tool) return r.wrong();
    Json arguments = Json::object();
    for (bool first = true;; first = false) {
        Reader     ahead  = r;
        const auto closed = ahead.try_match(m.call_close);
        if (closed == true) break; // the caller reads it
        r.skip_white();
        if (!first && !m.parameter_separator.empty()) {
            const auto there = r.try_match(m.parameter_separator);
            if (there != true) return !there || !closed ? r.more() : r.wrong();
            r.skip_white();
        }
        const auto opened =
            m.parameter_open.empty() ? std::optional<bool>(closed.has_value()) : r.try_match(m.parameter_open);
        if (opened != true) return !opened || !closed ? r.more() : r.wrong();
        if (!read_parameter(r, m, tool, arguments)) return false;
    }
    return r.add(name, arguments);
}

// A list of calls, or one, behind the mark that begins it.
bool read_marked_python(Reader& r, const CallMarks& m) {
    const std::string tail = cat(m.call_close, m.section_close).substr(1); // behind the last call's parenthesis
    PythonCalls       read;
    if (tail.starts_with(']')) read = read_python_calls(cat('[', r.rest()));
    else {
        read.unfinished = true;
        int tried       = 0;
        for (std::size_t at = 0; (at = r.rest().find(')', at)) != std::string_view::npos && tried < 64; at++, tried++)
            if (read = read_python_calls(cat('[', r.rest().substr(0, at + 1), ']')); read.size > 0) break;
        if (tried == 64) return r.wrong();
        if (read.size == 0) return r.more();
    }
    if (read.size == 0) return read.unfinished ? r.more() : r.wrong();
    for (const auto& [name, arguments] : read.calls)
        if (!r.add(name, arguments)) return false;
    r.advance(read.size - 2); // without the brackets
    const auto closed = r.try_match(tail);
    if (!closed && r.end()) r.advance(r.rest().size());
    return closed == true || (!closed && r.end()) ? r.whole() : closed ? r.wrong() : r.more();
}

bool read_marked(Reader& r, const CallMarks& m) {
    if (!r.match(cat(m.section_open, m.call_open))) return false;
    const std::string next     = cat(m.separator, m.call_open);
    const bool        sections = !m.section_open.empty() || !m.section_close.empty() ||
                          m.separator.find_first_not_of(white) != std::string::npos;
    if (m.arguments == CallMarks::Arguments::python) return read_marked_python(r, m);
    while (true) {
        const std::optional<std::string> name = r.name();
        if (!name) return false;
        if (!r.tool(*name)) return r.wrong();
        if (!r.match(m.name_close) || !read_marked_arguments(r, m, *name)) return false;
        if (const auto closed = r.try_match(m.call_close); closed != true) {
            r.skip_white();
            if (!closed && r.end()) return r.advance(r.rest().size()), r.whole(); // the mark behind it may be missing
            return closed ? r.wrong() : r.more();
        }
        if (!sections) return r.whole();
        const auto more = r.try_match(next);
        if (more == true) continue;
        if (!more && !r.end()) return r.more();
        const auto section = r.try_match(m.section_close);
        if (section == true) return r.whole();
        if (r.end() && (!section || !more)) return r.advance(r.rest().size()), r.whole();
        return section && more ? r.wrong() : r.more();
    }
}

} // namespace

Marks marks_of(const CallForm& form, const Json& tools) {
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
        case ToolForm::harmony: return {{"<|channel|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>"}, ""};
        case ToolForm::marked: {
            if (!form.marks->trigger.empty()) return {{form.marks->trigger}, ""};
            Marks             out;
            const std::string begin = cat(form.marks->section_open, form.marks->call_open);
            if (const std::size_t at = begin.find_first_not_of(white); at != std::string::npos) out.first = begin[at];
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

std::optional<CallHead> read_head(const CallForm& form, const Json& tools, std::string_view text) {
    Reader                     r(text, false, tools);
    std::optional<std::string> name;
    const auto                 up_to = [&](std::string_view mark) {
        const auto part = r.until(mark);
        if (part) name = std::string(part->substr(0, part->find_last_not_of(white) + 1));
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
    Reader r(text, end, tools);
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
    if (r.read.state != CallsRead::State::whole) r.read.calls.clear();
    return std::move(r.read);
}

} // namespace quire
