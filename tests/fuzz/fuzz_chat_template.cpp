// Any text as a Jinja template: detection ends, and a recognised template can be rendered.
#include <cstddef>
#include <cstdint>

import quire.core.base;
import quire.text.chat_template;
import quire.core.std;

using namespace quire;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string_view  text(reinterpret_cast<const char*>(data), size);
    const ChatMessage       messages[] = {{"user", std::string(text)}};
    std::optional<ChatForm> form       = chat_form_detect(text);
    check(!form || chat_form_nearest(text) == *form, "an exact form is the nearest");
    check(chat_render(form.value_or(ChatForm::gemma), messages, {}).has_value(), "a user's message can be rendered");
    (void)render_template(text, text);
    return 0;
}
