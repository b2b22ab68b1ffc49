// Conversations to prompts: the built-in templates, contents in parts, a file without a template.
#include <catch2/catch_test_macros.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "process.h"

import quire.core.base;
import quire.core.json;
import quire.core.std;
import quire.model_file.gguf;
import quire.model_file.gguf_writer;
import quire.text.calls.tool_form;
import quire.text.marked_text;
import quire.text.templates.chat_template;

using namespace quire;
using namespace quire::testing;

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
    CHECK(ask("command-r", {system, hi, hello}) ==
          "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be brief.<|END_OF_TURN_TOKEN|>"
          "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Hi<|END_OF_TURN_TOKEN|>"
          "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>Hello<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>");
    const Json parts{
        {"role", "user"},
        {"content", Json::array({Json{{"type", "text"}, {"text", "a"}}, Json{{"type", "text"}, {"text", "b"}}})}};
    CHECK(ask("chatml", {parts}) == "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n");
    CHECK(!ChatTemplate::built_in("alpaca"));
    CHECK(ChatTemplate().is_fallback());
}

namespace {

// A file with nothing but chat templates: key behind "tokenizer.chat_template" → source.
Result<ChatTemplate> of_file(const std::vector<std::pair<std::string, std::string>>& templates,
                             const std::string&                                      name = "") {
    GgufWriter w;
    w.set("general.architecture", "llama");
    for (const auto& [key, source] : templates) w.set("tokenizer.chat_template" + key, source);
    const std::string path = temporary();
    REQUIRE(w.write(path));
    const Result<Gguf> file = Gguf::open(path);
    REQUIRE(file);
    Result<ChatTemplate> chosen = ChatTemplate::choose(*file, name, "");
    unlink(path.c_str());
    return chosen;
}

std::string say(const ChatTemplate& t, const std::string& name, bool tools = false) {
    ChatInput input;
    input.template_name = name;
    input.messages.push_back(Json{{"role", "user"}, {"content", "Hi"}});
    if (tools) input.tools = Json::array({Json{{"type", "function"}}});
    const Result<MarkedText> text = t.render(input, {});
    return text ? text->bytes : text.error().message;
}

} // namespace

TEST_CASE("dates are variables where they are asked for, unless the request or the server sets them", "[template]") {
    Result<ChatTemplate> t =
        ChatTemplate::parse("{{ date_string if date_string is defined else 'none' }}, {{ datetime }}", "dates");
    REQUIRE(t);
    ChatInput input;
    input.messages.push_back(Json{{"role", "user"}, {"content", "Hi"}});
    const std::int64_t now   = *local_seconds("2024-07-26T10:00:00");
    const auto         shown = [&](bool dates) {
        const Result<MarkedText> text =
            t->render(input, {.bos_token = "", .eos_token = "", .now = now, .llama_cpp = dates});
        REQUIRE(text);
        return text->bytes;
    };
    CHECK(shown(false) == "none, ");
    CHECK(shown(true) == "26 Jul 2024, Jul 26 2024 10:00:00 GMT");
    REQUIRE(t->set_defaults(R"({"datetime":"noon"})"));
    input.variables["date_string"] = "today";
    CHECK(shown(true) == "today, noon");
}

TEST_CASE("a template that names functions gets the tools as text", "[template]") {
    Result<ChatTemplate> t = ChatTemplate::parse("{{ 'Functions: ' + functions + '.' }}", "functions");
    REQUIRE(t);
    ChatInput  input;
    const auto shown = [&] {
        const Result<MarkedText> text =
            t->render(input, {.bos_token = "", .eos_token = "", .now = 0, .llama_cpp = true});
        REQUIRE(text);
        return text->bytes;
    };
    input.messages.push_back(Json{{"role", "user"}, {"content", "Hi"}});
    CHECK(shown() == "Functions: .");
    input.tools = Json::array({Json{{"type", "function"}}});
    CHECK(shown() == R"(Functions: [{"type":"function"}].)");
    input.variables["functions"] = "none";
    CHECK(shown() == "Functions: none.");
}

TEST_CASE("named templates: default, tool_use for tools, others by request or flag", "[template]") {
    const std::vector<std::pair<std::string, std::string>> all{
        {"", "plain"}, {".tool_use", "tools"}, {".rag", "rag {{ messages[0].content }}"}};
    const Result<ChatTemplate> t = of_file(all);
    REQUIRE(t);
    CHECK_FALSE(t->is_fallback());
    CHECK(t->names() == std::vector<std::string>{"default", "tool_use", "rag"});
    CHECK(say(*t, "") == "plain");
    CHECK(say(*t, "", true) == "tools");
    CHECK(say(*t, "default", true) == "plain");
    CHECK(say(*t, "rag") == "rag Hi");
    CHECK(say(*t, "gone") == "the model has no chat template 'gone'");
    Result<ChatTemplate> thinks = of_file({{"", "{{ enable_thinking }} {{ x }}"}});
    REQUIRE(thinks);
    CHECK(thinks->uses("enable_thinking"));
    CHECK_FALSE(thinks->uses("reasoning_effort"));
    CHECK(thinks->set_defaults(R"({"enable_thinking": false, "x": 1})"));
    CHECK(say(*thinks, "") == "False 1");
    ChatInput own;
    own.messages.push_back(Json{{"role", "user"}, {"content", "Hi"}});
    own.variables = Json{{"x", 2}};
    CHECK(thinks->render(own, {})->bytes == "False 2");
    CHECK_FALSE(thinks->set_defaults("[1]"));
    CHECK_FALSE(thinks->set_defaults("{"));
    const Result<ChatTemplate> rag = of_file(all, "rag");
    REQUIRE(rag);
    CHECK(say(*rag, "", true) == "rag Hi");
    CHECK(of_file({{".rerank", "{query}\n"}})->source("rerank") ==
          "{query}\n"); // whole, though Jinja drops the last line break
    CHECK_FALSE(t->source("gone"));
    CHECK(rag->name() == "the file's, rag");
    CHECK(of_file(all, "chatml")->name() == "chatml");
    CHECK(of_file(all, "gone").error().message.contains("has default, tool_use, rag"));
    CHECK(of_file({}, "gone").error().message.contains("has none"));
    CHECK(of_file({}).value().is_fallback());
    CHECK(say(*of_file({{".default", "d"}, {".rag", "r"}}), "") == "d");
    CHECK(of_file({{"", "x"}, {".rag", "{{"}})
              .error()
              .message.starts_with("the chat template (the file's, rag) cannot be used: "));
}

TEST_CASE("the form of tool calls is what the template writes", "[template]") {
    const auto form = [](const std::string& call) {
        const std::string source =
            "{% for m in messages %}({{ m.role }}) {{ m.content }}{% for c in m.tool_calls or [] %}{% set f = "
            "c.function %}" +
            call + "{% endfor %}{% endfor %}";
        return std::string(name_of(call_form(ChatTemplate::parse(source, "of a test").value()).kind));
    };
    CHECK(form("<tool_call>\n{\"name\": \"{{ f.name }}\", \"arguments\": {{ f.arguments | tojson }}}\n</tool_call>") ==
          "hermes");
    CHECK(form("<tool_call>{\"name\": \"{{ f.name }}\", \"arguments\": {{ '' + f.arguments }}}</tool_call>") ==
          "hermes");
    CHECK(form("{\"name\": \"{{ f.name }}\", \"parameters\": {{ f.arguments | tojson }}}") == "llama3");
    CHECK(form("[TOOL_CALLS] [{\"name\": \"{{ f.name }}\", \"arguments\": {{ f.arguments | tojson }}}]") == "mistral");
    CHECK(form("<function={{ f.name }}>{{ f.arguments | tojson }}</function>") == "functionary");
    CHECK(form("<function={{ f.name }}>{% for k, v in f.arguments | items %}<parameter={{ k }}>\n{{ v "
               "}}\n</parameter>{% endfor %}") == "qwen3-coder");
    CHECK(form("[{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}=\"{{ v }}\"{% endfor %})]") == "pythonic");
    CHECK(form("<|channel|>commentary to=functions.{{ f.name }}<|message|>{{ f.arguments | tojson }}") == "harmony");
    CHECK(form("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}{{ f.arguments | tojson "
               "}}") == "deepseek");
    CHECK(
        form("<tool_call>{{ f.name }}{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v "
             "}}</arg_value>{% endfor %}</tool_call>") == "glm");
    CHECK(form("{\"name\": \"{{ f.name }}\", \"arguments\": {{ f.arguments | tojson }}}") == "json");
    CHECK(form("call {{ f.name }} {{ f.arguments }}") == "marked");
    CHECK(form("call {{ f.name }} '{{ f.arguments | tojson | tojson }}'") == "other");
    CHECK(form("{{ f.name }}") == "none"); // without arguments it is no call
    CHECK(form("{{ raise_exception('no tools') }}") == "none");
    CHECK(call_form(ChatTemplate()) == ToolForm::none);
}
