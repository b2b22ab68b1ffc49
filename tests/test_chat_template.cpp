// The chat formats against the texts that the models' libraries render from the same templates.
#include "reference.h"

#include <catch2/catch_test_macros.hpp>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

import quire.core.base;
import quire.text.chat_template;
import quire.core.json;

using namespace quire;

namespace {

std::string slurp(const std::filesystem::path& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}

const std::string chatml =
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + "
    "'<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

} // namespace

TEST_CASE("every reference template is rendered exactly or not recognised") {
    std::set<std::string> recognised;
    for (const auto& entry : std::filesystem::directory_iterator(quire::testing::reference("templates"))) {
        if (entry.path().extension() != ".jinja") continue;
        const std::string name  = entry.path().stem().string();
        const std::string jinja = slurp(entry.path());
        if (!chat_form_detect(jinja)) continue;
        recognised.insert(name);
        Result<Json> reference = json_parse(slurp(std::filesystem::path(entry.path()).replace_extension(".json")));
        REQUIRE(reference);
        REQUIRE((*reference)["cases"].size() == 18);
        for (const Json& example : (*reference)["cases"]) {
            INFO(name << ' ' << json_dump(example));
            Result<std::string> text = render_template(jinja, json_dump(example["input"]));
            if (example.contains("expected")) {
                REQUIRE(text);
                CHECK(*text == example["expected"].get<std::string>());
            } else {
                REQUIRE(!text);
                CHECK(text.error().message.find(example["expected_error"]["message"].get<std::string>()) !=
                      std::string::npos);
            }
        }
    }
    CHECK(recognised ==
          std::set<std::string>{"chatml", "llama-2", "llama-3", "mistral-v1", "zephyr", "gemma-2", "phi-3"});
}

TEST_CASE("the spelling of a template does not matter, its branches do") {
    CHECK(chat_form_detect(chatml) == ChatForm::chatml);
    CHECK(chat_form_detect(
              "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}" +
              chatml) == ChatForm::chatml);
    CHECK(chat_form_detect("{%- for message in messages -%}\n  {{- \"<|im_start|>\" + message.role }}{{ '\\n' + "
                           "message.content + '<|im_end|>\\n' -}}\n"
                           "{%- endfor -%}\n{# asks for an answer #}{%- if (add_generation_prompt) -%}\n  {{- "
                           "'<|im_start|>assistant\n' -}}\n{%- endif -%}\n") == ChatForm::chatml);
    CHECK(!chat_form_detect(""));
    CHECK(!chat_form_detect("{{"));
    CHECK(!chat_form_detect("{% if tools %}{{ tools }}{% endif %}" + chatml));
    CHECK(!chat_form_detect(chatml + "!"));
    std::string trimmed = chatml;
    trimmed.replace(trimmed.find("message['content']"), 18, "message['content'] | trim");
    CHECK(!chat_form_detect(trimmed));
    // A newline in the text of a line, not in a literal, is output too.
    CHECK(
        !chat_form_detect("{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] "
                          "+ '<|im_end|>' + '\n'}}\n"
                          "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"));
}

TEST_CASE("a template that is no form has a nearest one") {
    CHECK(chat_form_nearest("{{ strftime_now() }}<|start_header_id|>") == ChatForm::llama3);
    CHECK(chat_form_nearest("'<|im_start|>system\\nYou are …'") == ChatForm::chatml);
    CHECK(chat_form_nearest("[INST]<<SYS>>") == ChatForm::llama2);
    CHECK(chat_form_nearest("[INST]") == ChatForm::mistral);
    CHECK(chat_form_nearest("{{ messages }}") == ChatForm::plain);
}

TEST_CASE("names of forms") {
    for (auto form : {ChatForm::chatml, ChatForm::llama2, ChatForm::llama3, ChatForm::mistral, ChatForm::zephyr,
                      ChatForm::gemma, ChatForm::phi3, ChatForm::plain})
        CHECK(chat_form_named(chat_form_name(form)) == form);
    CHECK(chat_form_named("llama2") == ChatForm::llama2);
    CHECK(!chat_form_named("alpaca"));
}

TEST_CASE("the plain form, blanks of all kinds, inputs that are refused") {
    std::vector<ChatMessage> messages{
        {"system", "Be brief."}, {"user", "Hi"}, {"assistant", " Hello"}, {"user", "Bye"}};
    CHECK(*chat_render(ChatForm::plain, messages, {}) ==
          "Be brief.\n\nUser: Hi\nAssistant: Hello\nUser: Bye\nAssistant:");
    std::vector<ChatMessage> blanks{{"user", "\u3000\u00a0\t hi\u2003\u0085\x1f"}};
    CHECK(*chat_render(ChatForm::gemma, blanks, {.add_generation_prompt = false, .bos_token = "", .eos_token = ""}) ==
          "<start_of_turn>user\nhi<end_of_turn>\n");
    CHECK(!chat_render(ChatForm::llama2, {}, {}));

    CHECK(!render_template("{{ x }}", "{}"));
    for (const char* input :
         {"", "[]", "{}", "{\"messages\":1}", "{\"messages\":[1]}", "{\"messages\":[{\"role\":\"user\"}]}",
          "{\"messages\":[{\"role\":\"user\",\"content\":null}]}",
          "{\"messages\":[{\"role\":\"user\",\"content\":[]}]}", "{\"messages\":[],\"bos_token\":1}"}) {
        INFO(input);
        Result<std::string> text = render_template(chatml, input);
        REQUIRE(!text);
        CHECK(!text.error().message.empty());
    }
}
