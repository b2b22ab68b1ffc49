// quire.text.chat_template: turns a conversation into the prompt text that the model was trained on, by the Jinja template of its file.
// **Owns** the parsed templates.
export module quire.text.chat_template;

import quire.core.base;
import quire.core.json;
import quire.core.std;
import quire.model_file.gguf;
import quire.text.jinja.jinja_template;
import quire.text.marked_text;

export namespace quire {

// What a template is given.
struct ChatInput {
    std::vector<Json> messages;         // objects with role, content and what else the client sent
    Json              tools, documents; // null: none
    Json              variables             = Json::object(); // more of them, by name: chat_template_kwargs
    bool              add_generation_prompt = true;
};

// Beside the conversation.
struct ChatSurroundings {
    std::string_view bos_token, eos_token; // as text
    std::int64_t     now = 0;              // of strftime_now, from local_seconds()
};

// Immutable, so any number of threads may use one.
class ChatTemplate {
public:
    // chatml, what a file without a template gets.
    ChatTemplate();
    // Our own templates by name, llama-2 as llama2 too: the source, or nothing.
    static std::optional<std::string_view> built_in(std::string_view name);
    static std::string                     built_in_names();

    // A Jinja template. Error: line, column and what is wrong there.
    static Result<ChatTemplate> parse(std::string_view source, std::string name);
    // `name`: of a built-in template, or ""; `source`: a template in place of the file's, or "". Else the file's: the default one, and
    // the one named tool_use for conversations with tools; chatml when it has none. Error: a template that does not parse, and what to do.
    static Result<ChatTemplate> choose(const Gguf& file, const std::string& name, const std::string& source);

    // Error: what the template itself refuses, in its words; what it does that cannot be done.
    Result<MarkedText> render(const ChatInput& input, const ChatSurroundings& around) const;

    const std::string& name() const { return name_; }            // built-in name, or whose it is
    bool               is_fallback() const { return fallback_; } // the file has none
    const std::string& source() const { return main_.source(); }

private:
    explicit ChatTemplate(JinjaTemplate main, std::string name);
    JinjaTemplate                main_;
    std::optional<JinjaTemplate> with_tools_;
    std::string                  name_;
    bool                         fallback_    = false;
    bool                         takes_parts_ = true; // content may be a list of parts
};

} // namespace quire

module :private;

namespace quire {

struct BuiltIn {
    std::string_view name, jinja;
};

constexpr std::array<BuiltIn, 8> built_ins{{
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

ChatTemplate::ChatTemplate() : ChatTemplate(*JinjaTemplate::parse(built_ins[0].jinja), "chatml") { fallback_ = true; }

ChatTemplate::ChatTemplate(JinjaTemplate main, std::string name) : main_(std::move(main)), name_(std::move(name)) {
    // Found by trying: a template that cannot deal with parts fails, or writes the list as it is.
    ChatInput input;
    input.messages.push_back(
        Json{{"role", "user"}, {"content", Json::array({Json{{"type", "text"}, {"text", "a9z"}}})}});
    const Result<MarkedText> text = render(input, {});
    takes_parts_ =
        text && text->bytes.contains("a9z") && !text->bytes.contains("'type'") && !text->bytes.contains("\"type\"");
}

Result<ChatTemplate> ChatTemplate::parse(std::string_view source, std::string name) {
    Result<JinjaTemplate> parsed = JinjaTemplate::parse(source);
    if (!parsed) return fail("the chat template (", name, ") cannot be used: ", parsed.error().message);
    return ChatTemplate(std::move(*parsed), std::move(name));
}

Result<ChatTemplate> ChatTemplate::choose(const Gguf& file, const std::string& name, const std::string& source) {
    if (const auto built = built_in(name)) return parse(*built, name);
    if (!source.empty()) return parse(source, "of --chat-template-file");
    const auto advise = [](Result<ChatTemplate> t) {
        if (!t) t.error().message += "; --chat-template names another";
        return t;
    };
    Result<std::string_view> main  = file.text("tokenizer.chat_template", ""),
                             tools = file.text("tokenizer.chat_template.tool_use", "");
    if (!main) return std::unexpected(main.error());
    if (!tools) return std::unexpected(tools.error());
    if (main->empty()) main = file.text("tokenizer.chat_template.default", "");
    if (!main) return std::unexpected(main.error());
    if (main->empty()) return ChatTemplate();
    Result<ChatTemplate> out = advise(parse(*main, "the file's"));
    if (!out || tools->empty()) return out;
    Result<JinjaTemplate> with_tools = JinjaTemplate::parse(*tools);
    if (!with_tools) return advise(fail("the chat template tool_use cannot be used: ", with_tools.error().message));
    out->with_tools_ = std::move(*with_tools);
    return out;
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
    const bool           has_tools       = input.tools.is_array() && !input.tools.empty();
    const JinjaTemplate& jinja           = has_tools && with_tools_ ? *with_tools_ : main_;
    Json                 variables       = input.variables.is_object() ? input.variables : Json::object();
    Json                 messages        = Json::array();
    const bool           knows_developer = jinja.source().contains("developer");
    for (const Json& message : input.messages) {
        Json m = message;
        if (m.contains("role") && m["role"] == "developer" && !knows_developer)
            m["role"] = "system"; // OpenAI's newer name
        if (!takes_parts_ && m.contains("content") && m["content"].is_array()) {
            std::string text;
            for (const Json& part : m["content"])
                if (part.is_object() && part.contains("text") && part["text"].is_string())
                    text += part["text"].get_ref<const std::string&>();
            m["content"] = std::move(text);
        }
        messages.push_back(std::move(m));
    }
    variables["messages"]  = std::move(messages);
    variables["tools"]     = has_tools ? input.tools : Json();
    variables["documents"] = input.documents.is_array() && !input.documents.empty() ? input.documents : Json();
    variables["add_generation_prompt"] = input.add_generation_prompt;
    variables["bos_token"]             = std::string(around.bos_token);
    variables["eos_token"]             = std::string(around.eos_token);
    constexpr std::array<std::string_view, 2> trusted{"bos_token", "eos_token"};
    return jinja.render(variables, {.trusted = trusted, .now = around.now, .bytes = size_of(variables)});
}

} // namespace quire
