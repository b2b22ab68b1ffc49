// Conversations to prompts: the built-in templates, contents in parts, a file without a template.
#include <catch2/catch_test_macros.hpp>
#include <string>
#include <string_view>
#include <vector>

import quire.core.base;
import quire.core.json;
import quire.core.std;
import quire.text.chat_template;
import quire.text.marked_text;

using namespace quire;

TEST_CASE("built-in templates, parts of a content, the missing template", "[template]") {
    const auto ask = [](std::string_view name, std::vector<Json> messages) {
        ChatInput input;
        input.messages         = std::move(messages);
        Result<ChatTemplate> t = ChatTemplate::parse(*ChatTemplate::built_in(name), std::string(name));
        REQUIRE(t);
        Result<MarkedText> text = t->render(input, {.bos_token = "<s>", .eos_token = "</s>"});
        REQUIRE(text);
        return text->bytes;
    };
    const Json system{{"role", "system"}, {"content", "Be brief."}}, hi{{"role", "user"}, {"content", "Hi"}},
        hello{{"role", "assistant"}, {"content", " Hello"}};
    CHECK(ask("plain", {system, hi, hello, hi}) == "Be brief.\n\nUser: Hi\nAssistant: Hello\nUser: Hi\nAssistant:");
    CHECK(ask("chatml", {hi}) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
    CHECK(ask("llama2", {system, hi, hello}) == "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Hello </s>");
    CHECK(ask("gemma", {system, hi}) == "<s><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n");
    const Json parts{
        {"role", "user"},
        {"content", Json::array({Json{{"type", "text"}, {"text", "a"}}, Json{{"type", "text"}, {"text", "b"}}})}};
    CHECK(ask("chatml", {parts}) == "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n");
    CHECK(!ChatTemplate::built_in("alpaca"));
    CHECK(ChatTemplate().is_fallback());
}
