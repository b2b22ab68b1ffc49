// quire.text.chat_template: turns a conversation into the prompt text that the model was trained on.
export module quire.text.chat_template;

import quire.core.base;
import quire.core.json;
import quire.core.std;

export namespace quire {

struct ChatMessage {
    std::string role; // "system", "user" or "assistant"
    std::string content;
};

// The template formats that quire can render. `plain` needs no special tokens.
enum class ChatForm { chatml, llama2, llama3, mistral, zephyr, gemma, phi3, plain };

std::optional<ChatForm> chat_form_named(std::string_view name);
std::string_view        chat_form_name(ChatForm form);
// The form that renders every conversation exactly as this Jinja template does, or nothing. Differences in spelling (blanks,
// quotes, whitespace control) are ignored; an additional branch or a default system text is a different template.
std::optional<ChatForm> chat_form_detect(std::string_view jinja);
// The fallback for other templates: the form whose special tokens occur in the template, or `plain` if none do.
ChatForm chat_form_nearest(std::string_view jinja);
// Whether the form supports a system message; the others refuse or drop it, as their templates do.
bool chat_form_has_system(ChatForm form);

struct ChatVariables {
    bool        add_generation_prompt = true;
    std::string bos_token, eos_token; // as text
};

// For `inspect template`: renders the JSON object's `messages`, `add_generation_prompt`, `bos_token`, `eos_token` in a
// recognised form. None of the forms uses `tools`, so they are ignored. Error: no recognised form, a
// message whose content is not a text, or roles that the form refuses.
Result<std::string> render_template(std::string_view jinja, std::string_view json_input);

// Renders the whole conversation. Error: an order of roles that the form refuses, with the message's number.
Result<std::string> chat_render(ChatForm form, std::span<const ChatMessage> messages, const ChatVariables& variables);

} // namespace quire

module :private;

namespace quire {

struct NamedForm {
    ChatForm         form;
    std::string_view name;
    std::string_view jinja; // the template whose rendering the form repeats
};

constexpr std::array<NamedForm, 8> forms{{
    {ChatForm::chatml, "chatml",
     R"({% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %})"
     R"({% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %})"},
    {ChatForm::llama2, "llama-2",
     R"({% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %})"
     R"({% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% for message in loop_messages %})"
     R"({% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %})"
     R"({{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %})"
     R"({% if loop.index0 == 0 and system_message != false %})"
     R"({% set content = '<<SYS>>\n' + system_message + '\n<</SYS>>\n\n' + message['content'] %})"
     R"({% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %})"
     R"({{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %})"
     R"({{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %})"},
    {ChatForm::llama3, "llama-3",
     R"({% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + )"
     R"(message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %})"
     R"({% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %})"
     R"({% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %})"},
    {ChatForm::mistral, "mistral",
     R"({{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %})"
     R"({{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %})"
     R"({% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }})"
     R"({% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }})"
     R"({% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %})"},
    {ChatForm::zephyr, "zephyr",
     R"({% for message in messages %}{% if message['role'] == 'user' %}{{ '<|user|>\n' + message['content'] + eos_token + '\n' }})"
     R"({% elif message['role'] == 'system' %}{{ '<|system|>\n' + message['content'] + eos_token + '\n' }})"
     R"({% elif message['role'] == 'assistant' %}{{ '<|assistant|>\n' + message['content'] + eos_token + '\n' }}{% endif %})"
     R"({% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %})"},
    {ChatForm::gemma, "gemma",
     R"({{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %})"
     R"({% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %})"
     R"({{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %})"
     R"({% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %})"
     R"({{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %})"
     R"({% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %})"},
    {ChatForm::phi3, "phi-3",
     R"({{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %})"
     R"({{ '<|user|>\n' + message['content'] + '<|end|>\n<|assistant|>\n' }}{% elif message['role'] == 'assistant' %})"
     R"({{ message['content'] + '<|end|>\n' }}{% endif %}{% endfor %})"},
    {ChatForm::plain, "plain", ""}, // quire's own, for models without special tokens
}};

std::optional<ChatForm> chat_form_named(std::string_view name) {
    auto bare = [](std::string_view text) { // llama-2 is llama2
        std::string out;
        for (char c : text)
            if (c != '-' && c != '_') out += c;
        return out;
    };
    for (const NamedForm& f : forms)
        if (bare(f.name) == bare(name)) return f.form;
    return std::nullopt;
}

std::string_view chat_form_name(ChatForm form) { return forms[std::size_t(form)].name; }

bool chat_form_has_system(ChatForm form) {
    return form != ChatForm::mistral && form != ChatForm::gemma && form != ChatForm::phi3;
}

// -- two spellings of one template ----------------------------------------------------------------------

// String literals stand between these in a canonical text; a template that contains them is nobody's form.
constexpr char open_mark = '\x01', close_mark = '\x02';

bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }
bool is_word(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_'; }

void replace_all(std::string& text, std::string_view from, std::string_view to) {
    for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
        text.replace(at, from.size(), to);
}

std::string literal(std::string_view text) { return cat(open_mark, text, close_mark); }

// 'a' + 'b' becomes 'ab', where neither is the operand of anything but the sum.
void join_literals(std::string& expression) {
    constexpr std::string_view joint = "\x02+\x01";
    for (std::size_t at = 0; (at = expression.find(joint, at)) != std::string::npos;) {
        const std::size_t first = expression.rfind(open_mark, at),
                          last  = expression.find(close_mark, at + joint.size());
        const bool free_before  = first == 0 || expression[first - 1] == '+' || expression[first - 1] == '=';
        const bool free_after   = last + 1 == expression.size() || expression[last + 1] == '+';
        if (free_before && free_after) expression.erase(at, joint.size());
        else at += joint.size();
    }
}

// The inside of a tag with blanks dropped, literals unescaped, message.role as message['role'].
std::string canonical_expression(std::string_view in) {
    std::string out;
    for (std::size_t i = 0; i < in.size();) {
        const char c = in[i];
        if (c == '\'' || c == '"') {
            std::string text;
            for (i++; i < in.size() && in[i] != c; i++) {
                if (in[i] == '\\' && i + 1 < in.size()) {
                    i++;
                    text += in[i] == 'n' ? '\n' : in[i] == 't' ? '\t' : in[i] == 'r' ? '\r' : in[i];
                } else {
                    text += in[i];
                }
            }
            i++;
            out += literal(text);
        } else if (is_blank(c)) {
            while (i < in.size() && is_blank(in[i])) i++;
            if (!out.empty() && i < in.size() && is_word(out.back()) && is_word(in[i])) out += ' ';
        } else if (c == '.' && !out.empty()) {
            std::size_t end = i + 1;
            while (end < in.size() && is_word(in[end])) end++;
            const std::string_view name = in.substr(i + 1, end - i - 1);
            if (name == "role" || name == "content") out += cat('[', literal(name), ']');
            else out += in.substr(i, end - i);
            i = end;
        } else {
            out += c;
            i++;
        }
    }
    join_literals(out);
    for (std::string_view word : {"if(", "elif("}) { // brackets around a whole condition
        if (!out.starts_with(word) || !out.ends_with(')')) continue;
        int  depth = 0;
        bool whole = true;
        for (std::size_t i = word.size() - 1; i < out.size(); i++) {
            depth += out[i] == '(' ? 1 : out[i] == ')' ? -1 : 0;
            if (depth == 0 && i + 1 < out.size()) whole = false;
        }
        if (whole)
            out = cat(word.substr(0, word.size() - 1), ' ', out.substr(word.size(), out.size() - word.size() - 1));
    }
    return out;
}

// The end of a tag's inside that starts at `at`: where `close` stands outside literals.
std::size_t tag_end(std::string_view text, std::size_t at, std::string_view close) {
    char quoted = 0;
    for (; at < text.size(); at++) {
        if (quoted) {
            if (text[at] == '\\') at++;
            else if (text[at] == quoted) quoted = 0;
        } else if (close != "#}" && (text[at] == '\'' || text[at] == '"')) {
            quoted = text[at];
        } else if (text.substr(at).starts_with(close)) {
            return at;
        }
    }
    return std::string_view::npos;
}

// Tags and texts in one spelling: neighbouring outputs as one sum, whitespace control carried out as the model
// libraries set it up (trim_blocks, lstrip_blocks). "" when the text is no template.
std::string canonical(std::string_view jinja) {
    if (jinja.contains(open_mark) || jinja.contains(close_mark)) return "";
    if (jinja.ends_with('\n')) jinja.remove_suffix(1);
    std::string out, sum; // sum: outputs not yet written to out
    auto        emit  = [&](const std::string& expression) { sum += (sum.empty() ? "" : "+") + expression; };
    auto        flush = [&] {
        if (sum.empty()) return;
        join_literals(sum);
        out += cat("{{", sum, "}}");
        sum.clear();
    };
    bool        strip_next = false, drop_newline = false;
    std::size_t at = 0;
    while (at < jinja.size()) {
        std::size_t open = at;
        while (open < jinja.size() &&
               !(jinja[open] == '{' && open + 1 < jinja.size() && std::string_view("{%#").contains(jinja[open + 1])))
            open++;
        std::string_view text   = jinja.substr(at, open - at);
        const bool       is_tag = open < jinja.size();
        const char       kind   = is_tag ? jinja[open + 1] : 0;
        const char       sign   = is_tag && open + 2 < jinja.size() ? jinja[open + 2] : 0;
        if (strip_next)
            while (!text.empty() && is_blank(text.front())) text.remove_prefix(1);
        else if (drop_newline && text.starts_with('\n')) text.remove_prefix(1);
        if (sign == '-') {
            while (!text.empty() && is_blank(text.back())) text.remove_suffix(1);
        } else if (kind == '%' || kind == '#') {
            std::string_view rest = text;
            while (!rest.empty() && (rest.back() == ' ' || rest.back() == '\t')) rest.remove_suffix(1);
            const bool line_start =
                rest.empty() ? at == 0 || jinja[open - text.size() - 1] == '\n' : rest.back() == '\n';
            if (line_start && sign != '+') text = rest;
        }
        if (!text.empty()) emit(literal(text));
        if (!is_tag) break;

        const std::size_t inside = open + 2 + (sign == '-' || sign == '+' ? 1 : 0);
        const std::size_t close  = tag_end(jinja, inside, kind == '{' ? "}}" : kind == '%' ? "%}" : "#}");
        if (close == std::string_view::npos) return "";
        std::string_view body = jinja.substr(inside, close - inside);
        strip_next            = body.ends_with('-');
        if (strip_next) body.remove_suffix(1);
        drop_newline = kind != '{';
        if (kind == '{') {
            emit(canonical_expression(body));
        } else if (kind == '%') {
            flush();
            out += cat("{%", canonical_expression(body), "%}");
        }
        at = close + 2;
    }
    flush();
    // Absent counts as false everywhere below, so saying so changes nothing.
    replace_all(out, "{%if not add_generation_prompt is defined%}{%set add_generation_prompt=false%}{%endif%}", "");
    return out;
}

std::optional<ChatForm> chat_form_detect(std::string_view jinja) {
    if (jinja.size() > 1 << 14) return std::nullopt; // no form is near as long
    const std::string wanted = canonical(jinja);
    for (const NamedForm& f : forms)
        if (!f.jinja.empty() && canonical(f.jinja) == wanted) return f.form;
    return std::nullopt;
}

ChatForm chat_form_nearest(std::string_view jinja) {
    if (auto exact = chat_form_detect(jinja)) return *exact;
    if (jinja.contains("<|im_start|>")) return ChatForm::chatml;
    if (jinja.contains("<|start_header_id|>")) return ChatForm::llama3;
    if (jinja.contains("<start_of_turn>")) return ChatForm::gemma;
    if (jinja.contains("<|user|>")) return jinja.contains("<|end|>") ? ChatForm::phi3 : ChatForm::zephyr;
    if (jinja.contains("[INST]")) return jinja.contains("<<SYS>>") ? ChatForm::llama2 : ChatForm::mistral;
    return ChatForm::plain;
}

// -- rendering ------------------------------------------------------------------------------------------

// The length of the blank character at the start of the text, by Python's str.strip(); 0 when it is none.
std::size_t blank_at_start(std::string_view text) {
    if (text.empty()) return 0;
    const auto c = static_cast<unsigned char>(text[0]);
    if ((c >= 9 && c <= 13) || (c >= 28 && c <= 32)) return 1;
    if (text.starts_with("\xc2\x85") || text.starts_with("\xc2\xa0")) return 2;
    for (std::string_view blank :
         {"\xe1\x9a\x80", "\xe2\x80\xa8", "\xe2\x80\xa9", "\xe2\x80\xaf", "\xe2\x81\x9f", "\xe3\x80\x80"})
        if (text.starts_with(blank)) return 3;
    if (text.size() >= 3 && text.starts_with("\xe2\x80") && static_cast<unsigned char>(text[2]) >= 0x80 &&
        static_cast<unsigned char>(text[2]) <= 0x8a)
        return 3;
    return 0;
}

std::string_view strip(std::string_view text) {
    while (std::size_t n = blank_at_start(text)) text.remove_prefix(n);
    for (bool again = true; again;) {
        again = false;
        for (std::size_t n = 1; n <= 3 && n <= text.size(); n++)
            if (blank_at_start(text.substr(text.size() - n)) == n) {
                text.remove_suffix(n);
                again = true;
                break;
            }
    }
    return text;
}

Result<std::string> chat_render(ChatForm form, std::span<const ChatMessage> messages, const ChatVariables& v) {
    std::string out;
    const bool  alternates = form == ChatForm::llama2 || form == ChatForm::mistral || form == ChatForm::gemma;
    if (messages.empty() && (form == ChatForm::llama2 || form == ChatForm::gemma))
        return fail("the conversation has no messages");

    std::string_view system; // llama-2 writes it into the first message after it
    std::size_t      first = 0;
    if (form == ChatForm::llama2 && messages[0].role == "system") {
        system = messages[0].content;
        first  = 1;
    }
    if (form == ChatForm::gemma && messages[0].role == "system") return fail("message 1: System role not supported");
    if (form == ChatForm::mistral || form == ChatForm::gemma || form == ChatForm::phi3) out += v.bos_token;

    for (std::size_t i = first; i < messages.size(); i++) {
        const auto& [role, content] = messages[i];
        const bool user = role == "user", assistant = role == "assistant";
        if (alternates && user != ((i - first) % 2 == 0))
            return fail("message ", i + 1, ": Conversation roles must alternate user/assistant/user/assistant/...");
        switch (form) {
            case ChatForm::chatml: out += cat("<|im_start|>", role, '\n', content, "<|im_end|>\n"); break;
            case ChatForm::llama2:
                if (user) {
                    std::string text =
                        i == 1 && first == 1 ? cat("<<SYS>>\n", system, "\n<</SYS>>\n\n", content) : content;
                    out += cat(v.bos_token, "[INST] ", strip(text), " [/INST]");
                } else if (assistant) {
                    out += cat(' ', strip(content), ' ', v.eos_token);
                }
                break;
            case ChatForm::llama3:
                out += cat(i == 0 ? v.bos_token : "", "<|start_header_id|>", role, "<|end_header_id|>\n\n",
                           strip(content), "<|eot_id|>");
                break;
            case ChatForm::mistral:
                if (!user && !assistant)
                    return fail("message ", i + 1, ": Only user and assistant roles are supported!");
                out += user ? cat("[INST] ", content, " [/INST]") : cat(content, v.eos_token);
                break;
            case ChatForm::zephyr:
                if (user || assistant || role == "system") out += cat("<|", role, "|>\n", content, v.eos_token, '\n');
                break;
            case ChatForm::gemma:
                out += cat("<start_of_turn>", assistant ? "model" : role, '\n', strip(content), "<end_of_turn>\n");
                break;
            case ChatForm::phi3:
                if (user) out += cat("<|user|>\n", content, "<|end|>\n<|assistant|>\n");
                else if (assistant) out += cat(content, "<|end|>\n");
                break;
            case ChatForm::plain:
                if (user) out += cat("User: ", content, '\n');
                else if (assistant) out += cat("Assistant: ", strip(content), '\n');
                else out += cat(content, "\n\n");
                break;
        }
    }
    if (!v.add_generation_prompt) return out;
    switch (form) {
        case ChatForm::chatml: out += "<|im_start|>assistant\n"; break;
        case ChatForm::llama3: out += "<|start_header_id|>assistant<|end_header_id|>\n\n"; break;
        case ChatForm::zephyr: out += messages.empty() ? "" : "<|assistant|>\n"; break;
        case ChatForm::gemma: out += "<start_of_turn>model\n"; break;
        case ChatForm::plain: out += "Assistant:"; break;
        case ChatForm::llama2:
        case ChatForm::mistral:
        case ChatForm::phi3: break;
    }
    return out;
}

Result<std::string> text_of(const Json& object, const char* key, bool required) {
    auto at = object.find(key);
    if (at == object.end() && !required) return "";
    if (at == object.end() || !at->is_string()) return fail('\'', key, "' must be a text");
    return at->get<std::string>();
}

Result<std::string> render_template(std::string_view jinja, std::string_view json_input) {
    Result<Json> input = json_parse(json_input);
    if (!input) return std::unexpected(input.error());
    std::optional<ChatForm> form = chat_form_detect(jinja);
    if (!form) return fail("the chat template is not one of the recognised forms");
    if (!input->is_object() || !input->contains("messages") || !(*input)["messages"].is_array())
        return fail("the input has no list 'messages'");

    std::vector<ChatMessage> messages;
    for (const Json& m : (*input)["messages"]) {
        const std::size_t number = messages.size() + 1;
        if (!m.is_object()) return fail("message ", number, " is not an object");
        Result<std::string> role = text_of(m, "role", true), content = text_of(m, "content", true);
        if (!role) return fail("message ", number, ": ", role.error().message);
        if (!content) return fail("message ", number, ": ", content.error().message);
        messages.push_back({*role, *content});
    }
    ChatVariables variables;
    auto          add               = input->find("add_generation_prompt");
    variables.add_generation_prompt = add != input->end() && add->is_boolean() && add->get<bool>();
    Result<std::string> bos = text_of(*input, "bos_token", false), eos = text_of(*input, "eos_token", false);
    if (!bos) return std::unexpected(bos.error());
    if (!eos) return std::unexpected(eos.error());
    variables.bos_token = *bos;
    variables.eos_token = *eos;
    return chat_render(*form, messages, variables);
}

} // namespace quire
