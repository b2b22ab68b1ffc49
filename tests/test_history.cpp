// Calls of tools that an answer was cut off in, sent back as history: every API takes them, and the template shows what there is of them.
#include <catch2/catch_test_macros.hpp>

#include <nlohmann/json.hpp>

#include "server_process.h"

using namespace quire::testing;
using Plain = nlohmann::json;

namespace {

const Plain tool = {{"type", "function"},
                    {"function",
                     {{"name", "find"},
                      {"description", "Finds things."},
                      {"parameters",
                       {{"type", "object"},
                        {"properties", {{"what", {{"type", "string"}, {"minLength", 40}}}}},
                        {"required", {"what"}},
                        {"additionalProperties", false}}}}}};

Plain message(const std::string& role, const Plain& content) { return {{"role", role}, {"content", content}}; }

// A conversation with a call of those arguments.
Plain history(const std::string& arguments) {
    Plain calling = message("assistant", nullptr);
    calling["tool_calls"] =
        Plain::array({{{"id", "call00001"},
                       {"type", "function"},
                       {"function", {{"name", "find"}, {"description", "Finds things."}, {"arguments", arguments}}}}});
    return Plain::array({message("user", "Hello"), calling});
}

const std::string cut = R"({"what": "a b)";

} // namespace

TEST_CASE("a call that was cut off goes back into the conversation", "[server][history]") {
    const Server s({"--tool-format", "hermes"});
    Plain        body{{"messages", Plain::array({message("user", "Hello")})},
                      {"tools", Plain::array({tool})},
                      {"tool_choice", "required"},
                      {"temperature", 0},
                      {"max_tokens", 40}};
    const Plain  answer = s.ask("/v1/chat/completions", body)["choices"][0];
    INFO(answer.dump());
    REQUIRE(answer["finish_reason"] == "length");
    const std::string arguments = answer["message"]["tool_calls"][0]["function"]["arguments"];
    CHECK(Plain::parse(arguments, nullptr, false).is_discarded()); // not whole

    // With a result, with another message instead of one, or with nothing behind it.
    body["max_tokens"]    = 1;
    const std::string  id = answer["message"]["tool_calls"][0]["id"];
    const Plain        result{{"role", "tool"}, {"tool_call_id", id}, {"content", "these are no arguments"}};
    std::vector<Plain> behind{Plain::array({result}), Plain::array({message("user", "Go on.")}),
                              Plain::array({result, message("user", "Go on.")}), Plain::array()};
    for (const Plain& more : behind) {
        body["messages"] = Plain::array({message("user", "Hello"), answer["message"]});
        for (const Plain& m : more) body["messages"].push_back(m);
        const Reply r = s.post("/v1/chat/completions", body);
        INFO(more.dump() << r.body);
        CHECK(r.status == 200);
    }

    const Plain call{{"type", "function_call"}, {"call_id", "c1"}, {"name", "find"}, {"arguments", arguments}};
    const Plain output{{"type", "function_call_output"}, {"call_id", "c1"}, {"output", "no arguments"}};
    for (const Plain& input :
         {Plain::array({message("user", "Hello"), call, output}), Plain::array({message("user", "Hello"), call}),
          Plain::array({message("user", "Hello"), call, message("user", "Go on.")})})
        CHECK(s.post("/v1/responses", {{"input", input}, {"max_output_tokens", 1}}).status == 200);

    for (const Plain& input : {Plain(arguments), Plain::object()}) {
        const Plain use{{"type", "tool_use"}, {"id", "t1"}, {"name", "find"}, {"input", input}};
        const Plain back{{"type", "tool_result"}, {"tool_use_id", "t1"}, {"content", "no arguments"}};
        CHECK(s.post("/v1/messages",
                     {{"max_tokens", 1},
                      {"messages", Plain::array({message("user", "Hello"), message("assistant", Plain::array({use})),
                                                 message("user", Plain::array({back}))})}})
                  .status == 200);
    }

    // Whole arguments still need their result, and have to be an object.
    CHECK(s.post("/v1/chat/completions", {{"messages", history("{}")}, {"max_tokens", 1}}).status == 400);
    CHECK(s.post("/v1/chat/completions", {{"messages", history("[1]")}, {"max_tokens", 1}}).status == 400);
}

TEST_CASE("templates show a cut-off call as the text it is, or as an object with that text", "[server][history]") {
    const auto prompt = [](const std::string& name) {
        const Server s({"--chat-template-file", QUIRE_ROOT "/tests/data/templates/" + name + ".jinja"});
        Plain        messages = history(cut);
        messages.push_back(message("user", "Go on."));
        return s.ask("/apply-template", {{"messages", messages}, {"tools", {tool}}})["prompt"].get<std::string>();
    };
    CHECK(has(prompt("qwen3"), R"("arguments": {"what": "a b})")); // as it came
    CHECK(has(prompt("hermes-2-pro-tool_use"), cut));
    CHECK(has(prompt("qwen2.5"), Plain(cut).dump())); // which writes a text as JSON
    CHECK(has(prompt("qwen3-coder"), "<parameter=arguments>\n" + cut + "\n</parameter>"));
}
