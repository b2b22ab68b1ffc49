// quire.chat_template: a conversation → the prompt text a model was trained on.
export module quire.chat_template;

import quire.base;
import quire.std;

export namespace quire {

struct ChatMessage {
    std::string role;     // "system", "user" or "assistant"
    std::string content;
};

// The forms that are recognised by the marks in a template's text. `plain` needs no special tokens.
enum class ChatForm { chatml, llama2, llama3, mistral, zephyr, gemma, phi3, plain };

std::optional<ChatForm> chat_form_named(std::string_view name);
std::string_view        chat_form_name(ChatForm form);
// The form of a Jinja template by its tell-tale marks; nothing when it is none of ours.
std::optional<ChatForm> chat_form_detect(std::string_view jinja);

struct ChatVariables {
    bool        add_generation_prompt = true;
    std::string bos_token, eos_token;  // as text
};

// What `inspect template` does: the JSON object's `messages`, `add_generation_prompt`, `bos_token`, `eos_token` in a
// recognised form. Error: no recognised form, or an input that it cannot express (`tools`).
Result<std::string> render_template(std::string_view jinja, std::string_view json_input);

// The text of the whole conversation. Error: roles in an order that the form refuses, with the message's number.
Result<std::string> chat_render(ChatForm form, std::span<const ChatMessage> messages, const ChatVariables& variables);

} // namespace quire
