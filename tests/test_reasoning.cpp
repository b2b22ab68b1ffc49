// Whether an answer begins with reasoning: as its prompt says, whatever the template, and not at all where it is switched off.
#include <catch2/catch_test_macros.hpp>

#include <fstream>

#include <nlohmann/json.hpp>

#include "server_process.h"

import quire.core.base;
import quire.core.std;
import quire.text.calls.reasoning_form;

using namespace quire;
using namespace quire::testing;
using Plain = nlohmann::json;

TEST_CASE("a prompt says how far the reasoning of its answer has come", "[reasoning]") {
    using enum PromptReasoning;
    const ReasoningForm think{std::string(think_begin), std::string(think_end)};
    CHECK(prompt_reasoning(think, "user\nHello\nassistant\n") == unsaid);
    CHECK(prompt_reasoning(think, "assistant\n<think>\n") == open);
    CHECK(prompt_reasoning(think, "assistant\n<think>") == open);
    CHECK(prompt_reasoning(think, "assistant\n<think>\n\n</think>\n\n") == closed);
    CHECK(prompt_reasoning(think, "<|Assistant|></think>") == closed);
    // Marks in earlier turns and in what the user says are no marks of this answer.
    CHECK(prompt_reasoning(think, "<think>a</think>b\nuser\nWhat is </think>?\nassistant\n") == unsaid);
    CHECK(prompt_reasoning({"[THINK]", "[/THINK]"}, "[INST]a[/INST][THINK]") == open);
    CHECK(prompt_reasoning({}, "assistant\n<think>") == unsaid);
    // The beginning of an answer that is continued.
    CHECK(prompt_reasoning(think, "assistant\n", "  ") == unsaid);
    CHECK(prompt_reasoning(think, "assistant\n", "Sure, ") == closed);
    CHECK(prompt_reasoning(think, "assistant\n", "<think>\nOkay, ") == open);
    CHECK(prompt_reasoning(think, "assistant\n<think>\n", "Okay, ") == open);
    CHECK(prompt_reasoning(think, "assistant\n<think>\n", "Okay.</think> Sure, ") == closed);
    CHECK(prompt_reasoning(think, "assistant\n<think></think>", "Sure, ") == closed);
}

namespace {

const Plain one_of_two{{"type", "object"},
                       {"properties", {{"a", {{"enum", {1, 2}}}}}},
                       {"required", {"a"}},
                       {"additionalProperties", false}};
const Plain said   = Plain::array({{{"role", "user"}, {"content", "Hello"}}});
const Plain format = {{"type", "json_schema"}, {"json_schema", {{"name", "n"}, {"schema", one_of_two}}}};
const Plain tool   = {{"type", "function"}, {"function", {{"name", "f"}, {"parameters", one_of_two}}}};

// A chat whose every token rather begins to reason.
Plain chat(Plain more) {
    Plain body{{"messages", said}, {"max_tokens", 60}, {"temperature", 0}, {"logit_bias", {{"<think>", 100}}}};
    body.update(more);
    return body;
}

bool is_choice(const std::string& text) {
    const Plain value = Plain::parse(text, nullptr, false);
    return value == Plain{{"a", 1}} || value == Plain{{"a", 2}};
}

// Each way to switch reasoning off and to ask for a form, over each API.
void check_without_reasoning(const Server& s) {
    for (const Plain& off :
         {Plain{{"enable_thinking", false}}, Plain{{"chat_template_kwargs", {{"enable_thinking", false}}}},
          Plain{{"chat_template_kwargs", {{"thinking", false}}}, {"reasoning_budget", 0}},
          Plain{{"reasoning_effort", "none"}}, Plain{{"reasoning_budget", 0}}, Plain{{"thinking_token_budget", 0}}}) {
        INFO(off.dump());
        Plain body = chat(off);
        {
            Plain asked              = body;
            asked["response_format"] = format;
            const Plain message      = s.ask("/v1/chat/completions", asked)["choices"][0]["message"];
            INFO(message.dump());
            CHECK(!message.contains("reasoning_content"));
            CHECK(is_choice(message["content"]));
        }
        body["tools"]       = Plain::array({tool});
        body["tool_choice"] = "required";
        const Plain called  = s.ask("/v1/chat/completions", body)["choices"][0]["message"];
        INFO(called.dump());
        CHECK(!called.contains("reasoning_content"));
        REQUIRE(called.contains("tool_calls"));
        CHECK(is_choice(called["tool_calls"][0]["function"]["arguments"]));
    }
    const Plain by_output = s.ask(
        "/v1/messages", chat({{"thinking", {{"type", "disabled"}}},
                              {"output_config", {{"format", {{"type", "json_schema"}, {"schema", one_of_two}}}}}}));
    INFO(by_output.dump());
    REQUIRE(by_output["content"].size() == 1);
    CHECK(is_choice(by_output["content"][0].value("text", "")));
    const Plain by_tool = s.ask("/v1/messages", chat({{"thinking", {{"type", "disabled"}}},
                                                      {"tools", {{{"name", "f"}, {"input_schema", one_of_two}}}},
                                                      {"tool_choice", {{"type", "any"}}}}));
    INFO(by_tool.dump());
    CHECK(by_tool["content"][0]["type"] == "tool_use");
    const Plain response = s.ask(
        "/v1/responses", {{"input", "Hello"},
                          {"max_output_tokens", 60},
                          {"temperature", 0},
                          {"logit_bias", {{"<think>", 100}}},
                          {"reasoning", {{"effort", "none"}}},
                          {"text", {{"format", {{"type", "json_schema"}, {"name", "n"}, {"schema", one_of_two}}}}}});
    INFO(response.dump());
    REQUIRE(response["output"].size() == 1);
    CHECK(is_choice(response["output"][0]["content"][0].value("text", "")));
}

std::string template_file(const std::string& generation) {
    const std::string path = temporary();
    std::ofstream(path) << "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>{{ "
                           "m.reasoning_content }}</think>{% endif %}{{ m.content }}{% for c in m.tool_calls or [] "
                           "%}<tool_call>{\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments "
                           "| tojson }}}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
                        << generation;
    return path;
}

} // namespace

TEST_CASE("where the template closes the reasoning in the prompt, a constrained answer has none",
          "[server][reasoning]") {
    const Server s({"--chat-template-file", QUIRE_ROOT "/tests/data/templates/qwen3.jinja"});
    check_without_reasoning(s);
    // Else the answer may reason, and here it does.
    const Plain message = s.ask("/v1/chat/completions", chat({{"response_format", format}}))["choices"][0]["message"];
    INFO(message.dump());
    CHECK(message.contains("reasoning_content"));
    // A text that the request itself constrains to marks is that text.
    const Plain marks =
        s.ask("/v1/chat/completions",
              chat({{"enable_thinking", false}, {"structured_outputs", {{"regex", "<think>a</think>b"}}}}));
    CHECK(marks["choices"][0]["message"]["content"] == "<think>a</think>b");
}

TEST_CASE("the flag --reasoning-format none leaves the reasoning in the content", "[server][reasoning][flags]") {
    const auto answer = [](const char* form) {
        const Server s({"--chat-template-file", template_file("<think>\n"), "--reasoning-format", form});
        CHECK(!has(s.errors(), "ignored"));
        return s.ask(
            "/v1/chat/completions",
            {{"messages", said}, {"max_tokens", 8}, {"temperature", 0}, {"ignore_eos", true}})["choices"][0]["message"];
    };
    const Plain split = answer("auto"), whole = answer("none");
    INFO(split.dump() << whole.dump());
    CHECK(split["content"] == "");
    CHECK(!whole.contains("reasoning_content"));
    CHECK(has(whole["content"], split["reasoning_content"].get<std::string>()));
}

TEST_CASE("another request ends the reasoning of an answer that runs", "[server][reasoning]") {
    const Server s({"--chat-template-file", template_file("<think>\n")});
    const auto   control = [&](const std::string& id) {
        return s.ask("/v1/chat/completions/control", {{"id", id}, {"action", "reasoning_end"}});
    };
    Plain      asked{{"messages", said},
                     {"max_tokens", 350},
                     {"temperature", 0},
                     {"ignore_eos", true},
                     {"logit_bias", {{"</think>", -100}}},
                     {"request_id", "one"}};
    const auto answer = [&](bool armed, bool& stopped) {
        asked["reasoning_control"] = armed;
        Reply       answered;
        std::thread client([&] { answered = s.post("/v1/chat/completions", asked); }); // only one thread may assert
        while (s.metric("vllm:num_requests_running") == 0) nap();
        stopped = control("chatcmpl-one")["success"].get<bool>();
        client.join();
        REQUIRE(answered.status == 200);
        const Plain reply = Plain::parse(answered.body);
        CHECK(reply["id"] == "chatcmpl-one");
        return reply["choices"][0]["message"];
    };
    bool        stopped = false;
    const Plain free    = answer(false, stopped);
    CHECK(!stopped);
    CHECK(free["content"].is_null() | (free["content"] == ""));
    const Plain ended = answer(true, stopped);
    CHECK(stopped);
    CHECK(ended["content"].get<std::string>().size() > 50);
    CHECK(ended["reasoning_content"].get<std::string>().size() < free["reasoning_content"].get<std::string>().size());
    CHECK(free["reasoning_content"].get<std::string>().starts_with(ended["reasoning_content"].get<std::string>()));

    CHECK(control("one") ==
          Plain{{"success", false}, {"message", "no answer with this id runs whose request has reasoning_control"}});
    CHECK(s.post("/v1/chat/completions/control", {{"id", "one"}, {"action", "stop"}}).status == 400);
    CHECK(s.post("/v1/chat/completions/control", {{"action", "reasoning_end"}}).status == 400);
}

TEST_CASE("the reasoning of an answer is ended by its own API key alone", "[server][reasoning]") {
    const Server      s({"--chat-template-file", template_file("<think>\n"), "--api-key", "one,two"});
    const std::string one = "Authorization: Bearer one\r\n", two = "Authorization: Bearer two\r\n";
    const Plain       asked{{"messages", said},
                            {"max_tokens", 350},
                            {"temperature", 0},
                            {"ignore_eos", true},
                            {"logit_bias", {{"</think>", -100}}},
                            {"request_id", "mine"},
                            {"reasoning_control", true}};
    Reply             answered;
    std::thread       client([&] { answered = s.post("/v1/chat/completions", asked, one); });
    const auto        running = [&] {
        const std::string text = s.get("/metrics", one).body;
        const auto        at   = text.find("\nvllm:num_requests_running{");
        return at != std::string::npos && has(text.substr(text.find("} ", at), 3), "} 1");
    };
    for (int i = 0; i < 4000 && !running(); i++) nap();
    const auto control = [&](const std::string& id, const std::string& key) {
        return s.post("/v1/chat/completions/control", {{"id", id}, {"action", "reasoning_end"}}, key);
    };
    // An answer of another key is as one that is not there.
    const Reply other = control("chatcmpl-mine", two), none = control("chatcmpl-none", two);
    const Reply own = control("chatcmpl-mine", one);
    client.join();
    CHECK(other.status == none.status);
    CHECK(other.body == none.body);
    CHECK(Plain::parse(other.body)["success"] == false);
    CHECK(Plain::parse(own.body)["success"] == true);
    REQUIRE(answered.status == 200);
    CHECK(Plain::parse(answered.body)["choices"][0]["message"]["content"].get<std::string>().size() > 50);
}

TEST_CASE("reasoning that is switched off is off under templates that say nothing of it, or always open it",
          "[server][reasoning]") {
    for (const char* generation : {"", "<think>\n", "<think></think>"}) {
        INFO(generation);
        check_without_reasoning(Server({"--chat-template-file", template_file(generation)}));
    }
    // As a default of the server, and of answers that are free.
    const Server s({"--chat-template-file", template_file("<think>\n"), "--chat-template-kwargs",
                    R"({"enable_thinking": false})"});
    const Plain  free = s.ask("/v1/chat/completions", {{"messages", said}, {"max_tokens", 20}, {"temperature", 0}});
    CHECK(!free["choices"][0]["message"].contains("reasoning_content"));
    CHECK(
        s.ask("/v1/chat/completions", {{"messages", said},
                                       {"max_tokens", 20},
                                       {"temperature", 0},
                                       {"chat_template_kwargs", {{"enable_thinking", true}}}})["choices"][0]["message"]
            .contains("reasoning_content"));
}
