// quire.text.templates.chat_template: turns a conversation into the prompt text that the model was trained on, by the Jinja template of its file.
// **Owns** the parsed templates.
export module quire.text.templates.chat_template;

import quire.core.base;
export import quire.core.json;
export import quire.model_file.gguf;
export import quire.text.marked_text;
export import quire.text.templates.jinja.jinja_template;

export namespace quire {

// The arguments of a call that was cut off are an object with this one member, in a template that takes no text as arguments.
constexpr std::string_view cut_arguments = "arguments";

// The input of a template.
struct ChatInput {
    std::string
        template_name; // of the file's named templates; "": tool_use if it is there and tools are given, else default
    std::vector<Json> messages; // objects with role, content and the client's other members; the arguments of a
                                // call that was cut off are a text
    Json tools, documents;      // null: none
    Json variables             = Json::object(); // more of them, by name: chat_template_kwargs
    bool add_generation_prompt = true;
};

// Beside the conversation.
struct ChatSurroundings {
    std::string_view bos_token, eos_token; // as text
    std::int64_t     now = 0;              // of strftime_now, from local_seconds()
    bool llama_cpp = false; // llama.cpp's variables are there: date_string, datetime, and functions, the tools as text
};

// Immutable, so any number of threads may use one.
class ChatTemplate {
public:
    // chatml, the template of files without one.
    ChatTemplate();
    // Our own templates by name, llama-2 as llama2 too: the source, or nothing.
    static std::optional<std::string_view> built_in(std::string_view name);
    static std::string                     built_in_names();

    // A Jinja template. Error: the fault, with line and column.
    static Result<ChatTemplate> parse(std::string_view source, std::string name);
    // `name`: of a template in the file or of a built-in one, or ""; `source`: a template in place of the file's, or "". Without both: all
    // templates of the file, or chatml if the file has none. Error: an unknown name; a template that does not parse, and what to do.
    static Result<ChatTemplate> choose(const Gguf& file, const std::string& name, const std::string& source);

    // Variables where a conversation sets none: a JSON object, or "". Error: another text.
    Result<void> set_defaults(std::string_view json);

    // Error: a refusal by the template, in its own words; an operation of the template that is not possible.
    Result<MarkedText> render(const ChatInput& input, const ChatSurroundings& around) const;

    bool               uses(std::string_view variable) const; // whether a template names it anywhere
    Json               variable(const ChatInput& input, const std::string& name) const; // null: not set
    const std::string& name() const { return name_; }            // of a built-in template, or of the template's origin
    bool               is_fallback() const { return fallback_; } // the file has none
    const std::string& source() const { return forms_[0].source; }
    std::optional<std::string_view> source(std::string_view name) const; // of the file's template of that name
    std::vector<std::string>        names() const; // that ChatInput can choose from, `default` first

private:
    // One template, and its properties.
    struct Form {
        std::string   name, source; // as in the file
        JinjaTemplate jinja;
        bool          takes_parts = true; // content may be a list of parts
        bool          takes_null  = true; // content may be null, in an answer that only calls tools
        bool          wants_null =
            false; // content has to be null there: with an empty content the template leaves out the calls
        bool wants_text      = false; // the arguments of calls have to be the text of their object
        bool takes_text      = false; // the arguments may be a text, and any text
        bool knows_developer = false; // OpenAI's newer name for the role system
    };
    static Form form(JinjaTemplate jinja, std::string_view source, std::string name);

    ChatTemplate(JinjaTemplate main, std::string_view source, std::string name);
    const Form*       find(std::string_view name) const;
    std::vector<Form> forms_; // the first one is the default
    std::string       name_;
    Json              defaults_ = Json::object();
    bool              fallback_ = false;
};

} // namespace quire

module :private;

namespace quire {

struct BuiltIn {
    std::string_view name, jinja;
};

constexpr std::array<BuiltIn, 9> built_ins{{
    {"chatml", R"({% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %})"
               R"({% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %})"},
    {"llama-2", R"({% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %})"
                R"({% set ns.system = '<<SYS>>\n' + m.content + '\n<</SYS>>\n\n' %}{% elif m.role == 'user' %})"
                R"({{ bos_token + '[INST] ' + (ns.system + m.content).strip() + ' [/INST]' }}{% set ns.system = '' %})"
                R"({% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %})"},
    {"llama-3",
     R"({{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content.strip() )"
     R"(+ '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %})"},
    {"mistral",
     R"({{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %})"
     R"({% set ns.system = m.content + '\n\n' %}{% elif m.role == 'user' %}{{ '[INST] ' + ns.system + m.content + ' [/INST]' }})"
     R"({% set ns.system = '' %}{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %})"},
    {"zephyr", R"({% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %})"
               R"({% if messages and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %})"},
    {"gemma",
     R"({{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %})"
     R"({% set ns.system = m.content + '\n\n' %}{% else %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) )"
     R"(+ '\n' + (ns.system + m.content).strip() + '<end_of_turn>\n' }}{% set ns.system = '' %}{% endif %}{% endfor %})"
     R"({% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %})"},
    {"phi-3",
     R"({{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %})"
     R"({% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %})"},
    {"command-r",
     R"({% for m in messages %}{{ '<|START_OF_TURN_TOKEN|>' + ('<|SYSTEM_TOKEN|>' if m.role == 'system' else )"
     R"('<|CHATBOT_TOKEN|>' if m.role == 'assistant' else '<|USER_TOKEN|>') + m.content.strip() + '<|END_OF_TURN_TOKEN|>' }}{% endfor %})"
     R"({% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %})"},
    {"plain",
     R"({% for m in messages %}{% if m.role == 'user' %}{{ 'User: ' + m.content + '\n' }}{% elif m.role == 'assistant' %})"
     R"({{ 'Assistant: ' + m.content.strip() + '\n' }}{% else %}{{ m.content + '\n\n' }}{% endif %}{% endfor %})"
     R"({% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %})"}, // for models without special tokens
}};

std::optional<std::string_view> ChatTemplate::built_in(std::string_view name) {
    auto bare = [](std::string_view text) {
        std::string out;
        for (char c : text)
            if (c != '-' && c != '_') out += c;
        return out;
    };
    for (const BuiltIn& b : built_ins)
        if (bare(b.name) == bare(name)) return b.jinja;
    return std::nullopt;
}

std::string ChatTemplate::built_in_names() {
    std::string out;
    for (const BuiltIn& b : built_ins) out += cat(out.empty() ? "" : ", ", b.name);
    return out;
}

ChatTemplate::ChatTemplate() : ChatTemplate(*JinjaTemplate::parse(built_ins[0].jinja), built_ins[0].jinja, "chatml") {
    fallback_ = true;
}

ChatTemplate::ChatTemplate(JinjaTemplate main, std::string_view source, std::string name) : name_(std::move(name)) {
    forms_.push_back(form(std::move(main), source, "default"));
}

ChatTemplate::Form ChatTemplate::form(JinjaTemplate jinja, std::string_view source, std::string name) {
    Form out{.name = std::move(name), .source = std::string(source), .jinja = std::move(jinja)};
    out.knows_developer = out.jinja.source().contains("developer");
    // Found by trying: a template that cannot deal with parts fails, or writes the list as it is.
    const Json               parts = Json::array({Json{{"type", "text"}, {"text", "a9z"}}});
    Json                     variables{{"messages", Json::array({Json{{"role", "user"}, {"content", parts}}})},
                                       {"tools", Json()},
                                       {"documents", Json()},
                                       {"add_generation_prompt", true},
                                       {"bos_token", ""},
                                       {"eos_token", ""}};
    const Result<MarkedText> text = out.jinja.render(variables, {});
    out.takes_parts =
        text && text->bytes.contains("a9z") && !text->bytes.contains("'type'") && !text->bytes.contains("\"type\"");
    // Likewise: one that joins the content of every message to other text needs a text.
    const auto calls = [&](Json content, Json arguments = Json{{"q9z", "v9z"}}) -> std::optional<std::string> {
        Json with        = variables;
        with["messages"] = Json::array(
            {Json{{"role", "user"}, {"content", "a"}},
             Json{{"role", "assistant"},
                  {"content", std::move(content)},
                  {"tool_calls",
                   Json::array({Json{{"id", "call00000"},
                                     {"type", "function"},
                                     {"function", {{"name", "a"}, {"arguments", std::move(arguments)}}}}})}}});
        Result<MarkedText> text = out.jinja.render(with, {});
        if (!text) return std::nullopt;
        return std::move(text->bytes);
    };
    const std::string argument = R"({"q9z": "v9z"})";
    using Text                 = std::optional<std::string>;
    Text       empty, null, as_text, null_as_text;
    const auto try_all = [&] {
        empty = calls(""), null = calls(nullptr), as_text = calls("", argument),
        null_as_text = calls(nullptr, argument);
        return empty || null || as_text || null_as_text;
    };
    // There are templates that render nothing without tools.
    if (!try_all()) {
        variables["tools"] = Json::array({Json{{"type", "function"},
                                               {"function",
                                                {{"name", "a"},
                                                 {"description", "a"},
                                                 {"parameters",
                                                  {{"type", "object"},
                                                   {"properties", {{"q9z", {{"type", "string"}}}}},
                                                   {"required", Json::array({"q9z"})}}}}}}});
        try_all();
    }
    const auto shows = [](const std::optional<std::string>& s) { return s && s->contains("v9z"); };
    out.takes_null   = null || null_as_text || (!empty && !as_text);
    out.wants_null   = !shows(empty) && !shows(as_text) && (shows(null) || shows(null_as_text));
    // An object that a template joins to text fails, or is written as Python does.
    const auto& object = out.wants_null ? null : empty;
    out.wants_text     = (!object || object->contains("'q9z'")) && shows(out.wants_null ? null_as_text : as_text);
    out.takes_text     = shows(calls(out.wants_null ? Json() : Json(""), argument.substr(0, argument.size() - 2)));
    return out;
}

const ChatTemplate::Form* ChatTemplate::find(std::string_view name) const {
    const auto at = std::ranges::find(forms_, name, &Form::name);
    return at == forms_.end() ? nullptr : &*at;
}

std::optional<std::string_view> ChatTemplate::source(std::string_view name) const {
    const Form* form = find(name);
    return form ? std::optional<std::string_view>(form->source) : std::nullopt;
}

std::vector<std::string> ChatTemplate::names() const {
    std::vector<std::string> out;
    out.reserve(forms_.size());
    for (const Form& f : forms_) out.push_back(f.name);
    return out;
}

Result<ChatTemplate> ChatTemplate::parse(std::string_view source, std::string name) {
    Result<JinjaTemplate> parsed = JinjaTemplate::parse(source);
    if (!parsed) return fail("the chat template (", name, ") cannot be used: ", parsed.error().message);
    return ChatTemplate(std::move(*parsed), source, std::move(name));
}

// The templates of a file, by name: `default`, which is tokenizer.chat_template itself where that is there, then the others.
Result<std::vector<std::pair<std::string, std::string_view>>> templates_of(const Gguf& file) {
    constexpr std::string_view key = "tokenizer.chat_template", prefix = "tokenizer.chat_template.";
    std::vector<std::pair<std::string, std::string_view>> out;
    Result<std::string_view>                              main = file.text(key, "");
    if (main && main->empty()) main = file.text(cat(prefix, "default"), "");
    if (!main) return std::unexpected(main.error());
    if (!main->empty()) out.emplace_back("default", *main);
    for (const auto& [name, value] : file.metadata()) {
        if (!name.starts_with(prefix) || name == cat(prefix, "default")) continue;
        const Result<std::string_view> text = file.text(name, "");
        if (!text) return std::unexpected(text.error());
        if (!text->empty()) out.emplace_back(name.substr(prefix.size()), *text);
    }
    return out;
}

Result<ChatTemplate> ChatTemplate::choose(const Gguf& file, const std::string& name, const std::string& source) {
    if (!source.empty()) return parse(source, "of --chat-template-file");
    const auto found = templates_of(file);
    if (!found) return std::unexpected(found.error());
    std::string known;
    for (const auto& [own, text] : *found) {
        if (!name.empty() && own == name) return parse(text, cat("the file's, ", name));
        known += cat(known.empty() ? "" : ", ", own);
    }
    if (const auto built = built_in(name)) return parse(*built, name);
    if (!name.empty())
        return fail("there is no chat template ", quote(name), ": ", built_in_names(), " are built in, ",
                    known.empty() ? cat(file.path(), " has none") : cat(file.path(), " has ", known));
    std::optional<ChatTemplate> out;
    for (const auto& [own, text] : *found) {
        Result<JinjaTemplate> jinja = JinjaTemplate::parse(text);
        if (!jinja)
            return fail("the chat template (the file's", own == "default" ? "" : ", " + own,
                        ") cannot be used: ", jinja.error().message, "; --chat-template names another");
        if (!out) out.emplace(ChatTemplate(std::move(*jinja), text, "the file's"));
        else out->forms_.push_back(form(std::move(*jinja), text, own));
        if (out->forms_.size() == 1) out->forms_[0].name = own;
    }
    if (!out) return ChatTemplate();
    return std::move(*out);
}

Result<void> ChatTemplate::set_defaults(std::string_view json) {
    if (json.empty()) return {};
    Result<Json> parsed = json_parse(json);
    if (!parsed || !parsed->is_object())
        return fail("the template's variables ", quote(json),
                    " are not a JSON object, such as {\"enable_thinking\": false}");
    defaults_ = std::move(*parsed);
    return {};
}

bool ChatTemplate::uses(std::string_view variable) const {
    return std::ranges::any_of(forms_, [&](const Form& f) { return f.jinja.names(variable); });
}

Json ChatTemplate::variable(const ChatInput& input, const std::string& name) const {
    if (input.variables.is_object() && input.variables.contains(name)) return input.variables[name];
    const auto at = defaults_.find(name);
    return at == defaults_.end() ? Json() : *at;
}

std::size_t size_of(const Json& value) {
    if (value.is_string()) return value.get_ref<const std::string&>().size() + 8;
    std::size_t n = 8;
    if (value.is_array())
        for (const Json& item : value) n += size_of(item);
    else if (value.is_object())
        for (const auto& [key, item] : value.get_ref<const Json::object_t&>()) n += size_of(item) + key.size();
    return n;
}

Result<MarkedText> ChatTemplate::render(const ChatInput& input, const ChatSurroundings& around) const {
    const bool  has_tools = input.tools.is_array() && !input.tools.empty();
    const Form* chosen    = find(!input.template_name.empty() ? std::string_view(input.template_name)
                                 : has_tools                  ? "tool_use"
                                                              : "default");
    if (!chosen && !input.template_name.empty())
        return fail("the model has no chat template ", quote(input.template_name));
    if (!chosen) chosen = &forms_[0];
    Json variables = defaults_;
    if (input.variables.is_object()) variables.update(input.variables);
    Json messages = Json::array();
    for (const Json& message : input.messages) {
        Json m = message;
        if (m.contains("role") && m["role"] == "developer" && !chosen->knows_developer) m["role"] = "system";
        if (!chosen->takes_parts && m.contains("content") && m["content"].is_array()) {
            std::string text;
            for (const Json& part : m["content"])
                if (part.is_object() && part.contains("text") && part["text"].is_string())
                    text += part["text"].get_ref<const std::string&>();
            m["content"] = std::move(text);
        }
        if (const auto calls = m.find("tool_calls"); calls != m.end() && calls->is_array() && !calls->empty()) {
            if (const auto content = m.find("content");
                chosen->wants_null && content != m.end() && *content == Json(""))
                *content = nullptr;
            for (Json& call : *calls) {
                if (!call.is_object() || !call.contains("function") || !call["function"].is_object()) continue;
                const auto arguments = call["function"].find("arguments");
                if (arguments == call["function"].end()) continue;
                if (chosen->wants_text && arguments->is_object()) *arguments = json_dump(*arguments);
                else if (!chosen->takes_text && arguments->is_string()) // of a call that was cut off
                    *arguments = Json{{std::string(cut_arguments), std::move(*arguments)}};
            }
        }
        if (!chosen->takes_null && (!m.contains("content") || m["content"].is_null())) m["content"] = "";
        messages.push_back(std::move(m));
    }
    if (around.llama_cpp) {
        const auto add = [&](const char* name, const auto& value) {
            if (chosen->jinja.names(name) && !variables.contains(name)) variables[name] = value();
        };
        add("date_string", [&] { return date_text(around.now, "%d %b %Y"); });           // 26 Jul 2024
        add("datetime", [&] { return date_text(around.now, "%b %d %Y %H:%M:%S GMT"); }); // Jul 26 2024 10:00:00 GMT
        add("functions", [&] { return has_tools ? json_dump(input.tools) : std::string(); });
    }
    variables["messages"]  = std::move(messages);
    variables["tools"]     = has_tools ? input.tools : Json();
    variables["documents"] = input.documents.is_array() && !input.documents.empty() ? input.documents : Json();
    variables["add_generation_prompt"] = input.add_generation_prompt;
    variables["bos_token"]             = std::string(around.bos_token);
    variables["eos_token"]             = std::string(around.eos_token);
    constexpr std::array<std::string_view, 2> trusted{"bos_token", "eos_token"};
    return chosen->jinja.render(variables, {.trusted = trusted, .now = around.now, .bytes = size_of(variables)});
}

} // namespace quire
