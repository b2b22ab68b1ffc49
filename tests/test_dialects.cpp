// Anthropic's messages and llama.cpp's own API. Their requests become those of chats, and their streams add up to their whole answers.
#include <catch2/catch_test_macros.hpp>

#include <nlohmann/json.hpp>

#include "server_process.h"

import quire.core.base;
import quire.core.json;
import quire.core.std;
import quire.serve.anthropic.api;
import quire.serve.anthropic.request;
import quire.serve.api.answer;
import quire.serve.api.error;
import quire.serve.api.generation_request;
import quire.serve.api.limits;
import quire.serve.openai.request;
import quire.serve.openai.responses_api;
import quire.serve.openai.responses_request;
import quire.text.calls.described_tools;
import quire.text.calls.tool_calls;
import quire.text.templates.chat_template;

#include "dialect_tools.h"

using namespace quire;
using namespace quire::testing;
using Plain = nlohmann::json;

namespace {

// Adds up a stream as Anthropic's clients do.
Json accumulate_message(const std::vector<Event>& events) {
    Json                     message;
    std::vector<std::string> inputs;
    int                      open = -1;
    for (const Event& e : events) {
        CHECK(e.data["type"] == e.name);
        if (e.name == "message_start") {
            CHECK(message.is_null());
            message = e.data["message"];
        } else if (e.name == "content_block_start") {
            CHECK(open == -1);
            open = e.data["index"];
            CHECK(open == int(message["content"].size()));
            message["content"].push_back(e.data["content_block"]);
            inputs.emplace_back();
        } else if (e.name == "content_block_delta") {
            CHECK(e.data["index"] == open);
            const Json& d    = e.data["delta"];
            Json&       last = message["content"].back();
            if (d["type"] == "text_delta")
                last["text"] = last["text"].get<std::string>() + d["text"].get<std::string>();
            else if (d["type"] == "thinking_delta")
                last["thinking"] = last["thinking"].get<std::string>() + d["thinking"].get<std::string>();
            else {
                CHECK(d["type"] == "input_json_delta");
                inputs.back() += d["partial_json"].get<std::string>();
                last["input"] = json_of(inputs.back());
            }
        } else if (e.name == "content_block_stop") {
            CHECK(e.data["index"] == open);
            open = -1;
        } else if (e.name == "message_delta") {
            CHECK(open == -1);
            message.update(e.data["delta"]);
            message["usage"].update(e.data["usage"]);
        } else CHECK((e.name == "message_stop" || e.name == "ping"));
    }
    REQUIRE(!events.empty());
    CHECK(events.back().name == "message_stop");
    return message;
}

const char* weather_tool =
    R"({"name":"weather","description":"d","input_schema":{"type":"object","properties":{"city":{"type":"string"}}}})";

Parsed<GenerationRequest> messages(const std::string& fields, bool count = false) {
    return parse_messages_request("{\"max_tokens\":8," + fields + "}", limits(), count);
}

} // namespace

TEST_CASE("messages become a chat", "[dialects]") {
    const auto r = messages(
        R"("system":[{"type":"text","text":"be "},{"type":"text","text":"kind","cache_control":{"type":"ephemeral"}}],
           "messages":[{"role":"user","content":"a"},{"role":"user","content":[{"type":"text","text":"b"}]},
             {"role":"assistant","content":[{"type":"thinking","thinking":"hm","signature":""},{"type":"text","text":"c"},
               {"type":"tool_use","id":"t1","name":"weather","input":{"city":"Ulm"}}]},
             {"role":"user","content":[{"type":"tool_result","tool_use_id":"t1","content":[{"type":"text","text":"sun"}]},
               {"type":"text","text":"and?"}]}],
           "tools":[)" +
        std::string(weather_tool) + R"(],"tool_choice":{"type":"auto","disable_parallel_tool_use":true},
           "stop_sequences":["X"],"temperature":0.5,"top_p":0.9,"top_k":7,"min_p":0.1,"metadata":{"user_id":"u"},
           "thinking":{"type":"enabled","budget_tokens":4})");
    INFO((r ? "" : r.error().message));
    REQUIRE(r.has_value());
    const auto& m = r->conversation.input.messages;
    REQUIRE(m.size() == 5);
    CHECK(m[0] == json_of(R"({"role":"system","content":"be kind"})"));
    CHECK(m[1] == json_of(R"({"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]})"));
    CHECK(m[2]["reasoning_content"] == "hm");
    CHECK(m[2]["content"] == "c");
    CHECK(m[2]["tool_calls"][0]["function"] == json_of(R"({"name":"weather","arguments":{"city":"Ulm"}})"));
    CHECK(m[3] == json_of(R"({"role":"tool","tool_call_id":"t1","name":"weather","content":"sun"})"));
    CHECK(m[4] == json_of(R"({"role":"user","content":"and?"})"));
    CHECK(r->tool_use.tools[0]["function"]["parameters"]["type"] == "object");
    // Templates print a tool in the order of its members.
    CHECK(
        json_dump(r->conversation.input.tools[0])
            .starts_with(
                R"({"type":"function","function":{"name":"weather","description":"d","parameters":{"type":"object",)"));
    CHECK(!r->tool_use.parallel);
    CHECK(r->stop == std::vector<std::string>{"X"});
    CHECK(r->max_tokens == 8);
    CHECK(r->request.sampling.temperature == 0.5f);
    CHECK(r->request.sampling.top_k == 7);
    CHECK(r->request.sampling.min_p == 0.1f);
    CHECK(r->conversation.input.variables["enable_thinking"] == true);
    CHECK(r->reasoning_budget == 4);
    CHECK(r->unknown.empty());

    // As Claude Code sends them.
    const auto agent = messages(
        R"("messages":[{"role":"user","content":"a"},{"role":"assistant","content":[{"type":"redacted_thinking","data":"x"},
             {"type":"text","text":"b"}]},{"role":"user","content":"c"},
             {"role":"assistant","content":[{"type":"redacted_thinking","data":"x"}]},{"role":"user","content":"d"}],
           "context_management":{"edits":[{"type":"clear_thinking_20251015","keep":"all"}]})");
    INFO((agent ? "" : agent.error().message));
    REQUIRE(agent.has_value());
    CHECK(agent->conversation.input.messages[1] == json_of(R"({"role":"assistant","content":"b"})"));
    CHECK(agent->conversation.input.messages[3] == json_of(R"({"role":"assistant","content":""})"));
    CHECK(agent->unknown.empty());

    const auto theirs = messages(R"("messages":[{"role":"user","content":"a"}],"tools":[
        {"type":"web_search_20250305","name":"web_search"},{"name":"weather","input_schema":{"type":"object"}}])");
    REQUIRE(theirs.has_value());
    REQUIRE(theirs->tool_use.tools.size() == 1);
    CHECK(theirs->tool_use.tools[0]["function"]["name"] == "weather");

    const auto prefill = messages(R"("messages":[{"role":"user","content":"a"},{"role":"assistant","content":"The"}])");
    REQUIRE(prefill.has_value());
    CHECK(prefill->conversation.continue_final);
    CHECK(parse_messages_request(R"({"messages":[{"role":"user","content":"a"}]})", limits(), true).has_value());
    CHECK(messages(R"("messages":[{"role":"user","content":"a"}],"odd":1)")->unknown ==
          std::vector<std::string>{"odd"});
}

TEST_CASE("messages that are malformed are refused with their place", "[dialects]") {
    const std::string ask = R"("messages":[{"role":"user","content":"a"}])";
    const auto        why = [](const std::string& fields) {
        const auto r = messages(fields);
        return r ? "fine" : r.error().message;
    };
    const auto says = [&](const std::string& fields, const std::string& part) {
        const std::string said = why(fields);
        INFO(fields << ": " << said);
        CHECK(said.find(part) != std::string::npos);
    };
    CHECK(parse_messages_request("{" + ask + "}", limits(), false).error().message == "max_tokens: Field required");
    says("\"system\":\"a\"", "messages: Field required");
    says(R"("messages":[])", "at least one message");
    says(R"("messages":{})", "messages is an object");
    says(R"("messages":[3])", "messages[0] is an integer");
    says(R"("messages":[{"role":"tool","content":"a"}])", "messages.0.role");
    says(R"("messages":[{"role":"user"}])", "messages.0.content: Field required");
    says(R"("messages":[{"role":"user","content":[]}])", "is empty");
    says(R"("messages":[{"role":"user","content":[3]}])", "messages.0.content.0");
    says(R"("messages":[{"role":"user","content":[{"type":"image","source":{}}]}])",
         "messages.0.content.0: a block of type 'image'");
    says(R"("messages":[{"role":"user","content":[{"type":"text","text":3}]}])", "messages.0.content.0.text");
    says(R"("messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"x","content":"1"}]}])", "'x'");
    says(
        R"("messages":[{"role":"user","content":"a"},{"role":"assistant","content":[{"type":"tool_use","id":"t","name":"n","input":{}}]}])",
        "without a tool_result in the next message: t");
    says(R"("messages":[{"role":"assistant","content":[{"type":"tool_use","id":"t","name":"n","input":3}]}])",
         "messages.0.content.0.input");
    says(R"("system":3,)" + ask, "system: it is an integer");
    says(ask + R"(,"tools":[{"type":"bash_20250124","name":"bash"}])", "tools.0: a tool of type");
    says(ask + R"(,"tools":[{"name":"w"}])", "tools.0.input_schema");
    says(ask + R"(,"tool_choice":"auto")", "tool_choice: it is a string");
    says(ask + R"(,"tool_choice":{"type":"tool"})", "tool_choice: its type");
    says(ask + R"(,"stop_sequences":[""])", "stop_sequences has an empty string");
    says(ask + R"(,"thinking":{"type":"enabled"})", "thinking.budget_tokens: Field required");
    says(ask + R"(,"thinking":{"type":"enabled","budget_tokens":8})", "less than max_tokens");
    says(ask + R"(,"n":2)", "n belongs to /v1/chat/completions");
    says(ask + R"(,"mcp_servers":[{}])", "mcp_servers: it is not supported");
    says(R"("messages":[{"role":"user","content":[{"type":"redacted_thinking","data":"x"}]}])",
         "a block of type 'redacted_thinking' cannot stand here");
    says(ask + R"(,"temperature":"hot")", "temperature is a string");
    CHECK(messages(R"("max_tokens":-1,)" + ask).error().param == "max_tokens");
}

TEST_CASE("a stream of messages adds up to the whole message", "[dialects]") {
    ResponseHead head;
    head.id          = "1";
    head.model       = "tiny";
    head.chat        = true;
    const auto  make = [&] { return messages_renderer(head); };
    const Usage usage{10, 5, 4};

    Both b = both(make,
                  {piece_of({thought("I ")}), piece_of({thought("see"), text_part("\n\n")}),
                   piece_of({text_part("It "), text_part("is"), call("weather", R"({"city":"Ulm"})"), text_part("\n")}),
                   piece_of({call("weather", "{}"), text_part("done")}), piece_of({}, "tool_calls")},
                  usage);
    CHECK(accumulate_message(b.events) == b.whole);
    const Json& content = b.whole["content"];
    REQUIRE(content.size() == 5);
    CHECK(content[0] == json_of(R"({"type":"thinking","thinking":"I see","signature":""})"));
    CHECK(content[1] == json_of(R"({"type":"text","text":"\n\nIt is"})"));
    CHECK(content[2]["input"] == json_of(R"({"city":"Ulm"})"));
    CHECK(content[2]["id"] != content[3]["id"]);
    CHECK(content[4]["text"] == "done");
    CHECK(b.whole["stop_reason"] == "tool_use");
    CHECK(b.whole["stop_sequence"].is_null());
    CHECK(b.whole["usage"]["input_tokens"] == 6);
    CHECK(b.whole["usage"]["cache_read_input_tokens"] == 4);
    CHECK(b.whole["usage"]["output_tokens"] == 5);

    Choice stopped      = piece_of({text_part("a")}, "stop");
    stopped.stop_string = "END";
    b                   = both(make, {stopped}, usage);
    CHECK(accumulate_message(b.events) == b.whole);
    CHECK(b.whole["stop_reason"] == "stop_sequence");
    CHECK(b.whole["stop_sequence"] == "END");
    b = both(make, {piece_of({}, "length")}, usage);
    CHECK(accumulate_message(b.events) == b.whole);
    CHECK(b.whole["content"] == json_of(R"([{"type":"text","text":""}])"));
    CHECK(b.whole["stop_reason"] == "max_tokens");

    const auto failed = events_of(make()->failure({500, "why", "", ""}));
    REQUIRE(failed.size() == 1);
    CHECK(failed[0].name == "error");
    CHECK(failed[0].data["error"] == json_of(R"({"type":"api_error","message":"why"})"));
    CHECK(events_of(std::string(make()->out_of_memory()))[0].data["type"] == "error");
    CHECK(events_of(make()->ping())[0].data["type"] == "ping");
}

TEST_CASE("errors under /v1/messages have Anthropic's form, whoever finds them", "[server][dialects]") {
    const Server& s     = dialect_server();
    const auto    check = [](const Reply& r, int status, std::string_view type) {
        INFO(r.body);
        CHECK(r.status == status);
        const Json error = Json::parse(r.body);
        CHECK(error["type"] == "error");
        CHECK(error["error"]["type"] == type);
        CHECK(error["error"]["message"].is_string());
    };
    check(s.get("/v1/messages"), 405, "invalid_request_error");
    check(s.get("/v1/messages/nothing"), 404, "not_found_error");
    check(s.client().post("/v1/messages", "{"), 400, "invalid_request_error");
    check(s.client().post("/v1/messages?beta=true", std::string(17 << 20, ' ')), 413, "request_too_large");
    CHECK(Json::parse(s.get("/v1/nothing").body)["error"]["type"] == "not_found_error"); // OpenAI's elsewhere
    CHECK(!Json::parse(s.get("/v1/nothing").body).contains("type"));
}

TEST_CASE("/v1/messages answers as the chat does", "[server][dialects]") {
    const Server& s = dialect_server();
    const Plain   chat =
        s.ask("/v1/chat/completions", {{"messages", user("Hello")}, {"max_tokens", 12}, {"temperature", 0}});
    const Plain body{{"model", ""}, {"messages", user("Hello")}, {"max_tokens", 12}, {"temperature", 0}};
    Plain       whole = s.ask("/v1/messages", body);
    CHECK(whole["type"] == "message");
    CHECK(whole["content"][0]["text"] == chat["choices"][0]["message"]["content"]);
    CHECK(whole["usage"]["output_tokens"] == chat["usage"]["completion_tokens"]);
    CHECK(whole["usage"]["input_tokens"].get<int>() + whole["usage"]["cache_read_input_tokens"].get<int>() ==
          chat["usage"]["prompt_tokens"].get<int>());
    CHECK(s.ask("/v1/messages/count_tokens", {{"messages", user("Hello")}})["input_tokens"] ==
          chat["usage"]["prompt_tokens"]);

    Plain streamed     = body;
    streamed["stream"] = true;
    const Reply r      = s.post("/v1/messages", streamed);
    CHECK(r.headers.at("content-type") == "text/event-stream");
    Json added = accumulate_message(events_of(r.body));
    CHECK(Plain::parse(added["content"].dump()) == whole["content"]);
    CHECK(added["stop_reason"].dump() == whole["stop_reason"].dump());

    // A stop sequence out of the middle of the answer.
    const std::string text = whole["content"][0]["text"];
    Plain             cut  = body;
    cut["stop_sequences"]  = Plain::array({text.substr(text.size() / 2, 3)});
    const Plain stopped    = s.ask("/v1/messages", cut);
    CHECK(stopped["stop_reason"] == "stop_sequence");
    CHECK(stopped["stop_sequence"] == cut["stop_sequences"][0]);
}

TEST_CASE("/v1/messages has Anthropic's errors and keys", "[server][dialects]") {
    const Server& s   = dialect_server();
    const Reply   bad = s.post("/v1/messages", {{"messages", user("a")}});
    CHECK(bad.status == 400);
    CHECK(Plain::parse(bad.body) ==
          Plain::parse(
              R"({"type":"error","error":{"type":"invalid_request_error","message":"max_tokens: Field required"}})"));
    CHECK(s.client().post("/v1/messages", "{").status == 400);
    std::string longest;
    for (int i = 0; i < 4000; i++) longest += "word ";
    const Reply big = s.post("/v1/messages", {{"max_tokens", 1}, {"messages", user(longest)}});
    CHECK(big.status == 400);
    CHECK(has(Plain::parse(big.body)["error"]["message"], "prompt is too long: This model's maximum context length"));
    CHECK(s.ask("/v1/messages", {{"max_tokens", 1}, {"messages", user("a")}})["usage"]["output_tokens"] == 1);

    const Server locked({"--api-key", "secret"});
    const Plain  ask{{"max_tokens", 1}, {"messages", user("a")}};
    const Reply  refused = locked.post("/v1/messages", ask);
    CHECK(refused.status == 401);
    CHECK(Plain::parse(refused.body)["error"]["type"] == "authentication_error");
    CHECK(locked.post("/v1/messages", ask, "x-api-key: secret\r\nanthropic-version: 2023-06-01\r\n").status == 200);
}

TEST_CASE("an answer that only calls tools may have no content under any template", "[server][dialects]") {
    const Server& s = dialect_server();
    const Plain   call{{"id", "c1"}, {"type", "function"}, {"function", {{"name", "f"}, {"arguments", "{}"}}}};
    const Plain   history = Plain::array({{{"role", "user"}, {"content", "a"}},
                                          {{"role", "assistant"}, {"content", nullptr}, {"tool_calls", {call}}},
                                          {{"role", "tool"}, {"tool_call_id", "c1"}, {"content", "1"}}});
    CHECK(s.post("/v1/chat/completions", {{"messages", history}, {"max_tokens", 1}}).status == 200);
    const Server chatml({"--chat-template", "chatml"});
    CHECK(chatml.post("/v1/chat/completions", {{"messages", history}, {"max_tokens", 1}}).status == 200);
}

TEST_CASE("tools under a template that knows none are described in its messages", "[server][dialects]") {
    ChatInput input;
    input.tools    = json_of(R"([{"type":"function","function":{"name":"f"}}])");
    input.messages = {
        json_of(R"({"role":"user","content":[{"type":"text","text":"a"}]})"),
        json_of(R"({"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":
                                 {"name":"f","arguments":{"x":1}}},{"id":"2","type":"function","function":
                                 {"name":"f","arguments":"{\"x"}}]})"),
        json_of(R"({"role":"tool","tool_call_id":"1","content":"one"})"),
        json_of(R"({"role":"tool","tool_call_id":"2","content":"two"})")};
    const ChatInput told = with_described_tools(input);
    CHECK(told.tools.is_null());
    REQUIRE(told.messages.size() == 3);
    CHECK(has(told.messages[0]["content"][0]["text"], "\n{\"name\":\"f\"}\n"));
    CHECK(told.messages[0]["content"][1]["text"] == "a");
    CHECK(told.messages[1] == json_of(R"({"role":"assistant","content":
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"x\":1}}</tool_call>\n<tool_call>{\"name\": \"f\", \"arguments\": {\"x}</tool_call>"})"));
    CHECK(
        told.messages[2] ==
        json_of(
            R"({"role":"user","content":"<tool_response>\none\n</tool_response>\n\n<tool_response>\ntwo\n</tool_response>"})"));
    input.messages.insert(input.messages.begin(), json_of(R"({"role":"system","content":"s"})"));
    const ChatInput system = with_described_tools(input);
    CHECK(system.messages[0]["content"].get<std::string>().starts_with("s\n\nYou may call"));
    CHECK(system.messages[1] == input.messages[1]);

    const Plain tool{{"type", "function"},
                     {"function",
                      {{"name", "weather"},
                       {"parameters",
                        {{"type", "object"},
                         {"properties", {{"city", {{"enum", {"Ulm", "Bonn"}}}}}},
                         {"required", {"city"}},
                         {"additionalProperties", false}}}}}};
    Plain       ask{{"messages", user("The weather?")},
                    {"tools", {tool}},
                    {"tool_choice", "required"},
                    {"parallel_tool_calls", false},
                    {"seed", 1}};
    const Plain said = common().ask("/v1/chat/completions", ask)["choices"][0];
    CHECK(said["finish_reason"] == "tool_calls");
    const Plain call = said["message"]["tool_calls"][0];
    CHECK(call["function"]["name"] == "weather");
    CHECK(Plain::parse(call["function"]["arguments"].get<std::string>()).contains("city"));
    ask["messages"].push_back(said["message"]);
    ask["messages"].push_back({{"role", "tool"}, {"tool_call_id", call["id"]}, {"content", "sun"}});
    const std::string prompt = common().ask("/apply-template", ask)["prompt"];
    CHECK(has(prompt, "<tool_response>\nsun\n</tool_response>"));
    CHECK(has(prompt, "\"weather\""));
}

TEST_CASE("the tokens of a prompt are counted", "[server][dialects]") {
    const Plain chat{{"messages", user("Hello")}, {"max_tokens", 1}};
    const int   n = common().ask("/v1/chat/completions", chat)["usage"]["prompt_tokens"];
    CHECK(common().ask("/v1/chat/completions/input_tokens", chat) ==
          Plain{{"object", "response.input_tokens"}, {"input_tokens", n}});
    CHECK(common().ask("/v1/responses/input_tokens", {{"input", "Hello"}})["input_tokens"] == n);
    CHECK(common().post("/v1/responses/input_tokens", Plain::object()).status == 400);
}

TEST_CASE("/completions is llama.cpp's where its fields are used", "[server][dialects]") {
    const Server& s = common();
    CHECK(s.ask("/completions", {{"prompt", "a"}, {"n_predict", 2}})["tokens_predicted"] == 2);
    CHECK(s.ask("/completions", {{"prompt", "a"}, {"max_tokens", 2}, {"id_slot", 0}}).contains("content"));
    CHECK(s.ask("/completions", {{"prompt", "\"n_predict\""}, {"max_tokens", 2}})["object"] == "text_completion");
    CHECK(s.ask("/completions", {{"prompt", "a"}, {"max_tokens", 2}, {"metadata", {{"n_predict", 1}}}})["object"] ==
          "text_completion");
    CHECK(s.ask("/v1/completions", {{"prompt", "a"}, {"n_predict", 2}})["object"] == "text_completion");
    CHECK(s.post("/completions", {{"n_predict", 2}}).status == 400);
}

TEST_CASE("ping, load and any name for the model", "[server][dialects]") {
    const Server& s = common();
    CHECK(s.get("/ping").status == 200);
    CHECK(s.client().post("/ping", "").status == 200);
    CHECK(Plain::parse(s.get("/load").body) == Plain{{"server_load", 0}});
    CHECK(s.ask("/v1/chat/completions", {{"model", "gpt-x"}, {"messages", user("a")}, {"max_tokens", 1}})["model"] ==
          "gpt-x");
    CHECK(s.ask("/v1/completions", {{"model", "b/c"}, {"prompt", "a"}, {"max_tokens", 1}})["model"] == "b/c");
    CHECK(s.ask("/v1/messages", {{"model", "claude"}, {"messages", user("a")}, {"max_tokens", 1}})["model"] ==
          "claude");
    CHECK(s.ask("/v1/embeddings", {{"model", "e"}, {"input", "a"}})["model"] == "e");
    CHECK(s.post("/v1/completions", {{"model", std::string(300, 'a')}, {"prompt", "a"}}).status == 400);
    CHECK(s.post("/v1/completions", {{"model", 3}, {"prompt", "a"}}).status == 400);

    const Server strict({"--strict-model-name", "-a", "tiny,small"});
    const Plain  ask{{"messages", user("a")}, {"max_tokens", 1}};
    const auto   status = [&](const std::string& path, const std::string& model) {
        Plain body    = ask;
        body["model"] = model;
        return strict.post(path, body).status;
    };
    for (const char* path : {"/v1/chat/completions", "/v1/messages"}) {
        CHECK(status(path, "small") == 200);
        CHECK(status(path, "") == 200);
        CHECK(status(path, "gpt-x") == 404);
    }
    CHECK(strict.ask("/v1/chat/completions", ask)["model"] == "tiny");
}

TEST_CASE("llama.cpp's /completion", "[server][dialects]") {
    const Server&     s      = dialect_server();
    const Plain       openai = s.ask("/v1/completions",
                                     {{"prompt", "Once upon"}, {"max_tokens", 8}, {"temperature", 0}, {"ignore_eos", true}});
    const std::string text   = openai["choices"][0]["text"];
    const Plain       body{{"prompt", "Once upon"}, {"n_predict", 8}, {"temperature", 0}, {"ignore_eos", true}};
    const Plain       whole = s.ask("/completion", body);
    CHECK(whole["content"] == text);
    CHECK(whole["stop"] == true);
    CHECK(whole["stop_type"] == "limit");
    CHECK(whole["truncated"] == false);
    CHECK(whole["prompt"] == "Once upon");
    CHECK(whole["tokens"] == Plain::array());
    CHECK(whole["tokens_predicted"] == 8);
    CHECK(whole["tokens_evaluated"] == openai["usage"]["prompt_tokens"]);
    CHECK(whole["generation_settings"]["n_predict"] == 8);
    CHECK(whole["timings"]["predicted_n"] == 8);
    CHECK(whole["timings"]["cache_n"].get<int>() + whole["timings"]["prompt_n"].get<int>() ==
          whole["tokens_evaluated"].get<int>());
    CHECK(openai["timings"]["predicted_n"] == 8);

    Plain with            = body;
    with["n_probs"]       = 2;
    with["return_tokens"] = true;
    const Plain more      = s.ask("/completion", with);
    REQUIRE(more["tokens"].size() == 8);
    REQUIRE(more["completion_probabilities"].size() == 8);
    CHECK(more["completion_probabilities"][0]["id"] == more["tokens"][0]);
    CHECK(more["completion_probabilities"][0]["top_logprobs"].size() == 2);
    with["post_sampling_probs"] = true; // greedy: one token has all
    const Plain sure            = s.ask("/completion", with);
    CHECK(sure["generation_settings"]["post_sampling_probs"] == true);
    REQUIRE(sure["completion_probabilities"].size() == 8);
    for (const Plain& one : sure["completion_probabilities"]) {
        CHECK(one["prob"] == 1);
        CHECK(!one.contains("logprob"));
        CHECK(!one.contains("top_logprobs"));
        REQUIRE(one["top_probs"].size() == 1);
        CHECK(one["top_probs"][0]["id"] == one["id"]);
        CHECK(one["top_probs"][0]["prob"] == 1);
    }
    with["temperature"] = 1;
    with["top_k"]       = 3;
    with["top_p"]       = 1;
    with["min_p"]       = 0;
    with["n_probs"]     = 9;
    with["seed"]        = 4;
    const Plain drawn   = s.ask("/completion", with)["completion_probabilities"];
    with["stream"]      = true;
    Plain in_pieces     = Plain::array();
    for (const Event& piece : events_of(s.post("/completion", with).body))
        if (piece.data.contains("completion_probabilities"))
            for (const auto& one : piece.data["completion_probabilities"])
                in_pieces.push_back(Plain::parse(one.dump()));
    CHECK(in_pieces == drawn);
    for (const Plain& one : drawn) {
        double sum = 0;
        bool   own = false;
        for (const Plain& t : one["top_probs"]) {
            sum += t["prob"].get<double>();
            own =
                own ||
                t == Plain{{"id", one["id"]}, {"token", one["token"]}, {"bytes", one["bytes"]}, {"prob", one["prob"]}};
        }
        CHECK(one["top_probs"].size() == 3);
        CHECK(own);
        CHECK(std::abs(sum - 1) < 1e-5);
    }
    const Plain chat =
        s.ask("/v1/chat/completions", {{"messages", {{{"role", "user"}, {"content", "Hi"}}}},
                                       {"max_tokens", 2},
                                       {"temperature", 0},
                                       {"ignore_eos", true},
                                       {"logprobs", true},
                                       {"top_logprobs", 2},
                                       {"post_sampling_probs", true}})["choices"][0]["logprobs"]["content"];
    REQUIRE(chat.size() == 2);
    CHECK(chat[0]["prob"] == 1);
    CHECK(chat[0]["top_probs"].size() == 1);

    Plain streamed                = body;
    streamed["stream"]            = true;
    streamed["return_progress"]   = true;
    streamed["timings_per_token"] = true;
    std::string      added;
    std::vector<int> tokens;
    bool             progress = false;
    const auto       events   = events_of(s.post("/completion", streamed).body);
    for (const Event& e : events) {
        added += e.data["content"].get<std::string>();
        for (const Json& t : e.data["tokens"]) tokens.push_back(t);
        CHECK(e.data["stop"] == (&e == &events.back()));
        if (e.data.contains("prompt_progress")) {
            const Json& now = e.data["prompt_progress"];
            CHECK(now["total"] == e.data["tokens_evaluated"]);
            CHECK(now["processed"] == (progress ? now["total"] : now["cache"])); // first what the cache had
            progress = true;
        }
        if (!e.data["content"].get<std::string>().empty()) CHECK(e.data.contains("timings"));
    }
    CHECK(progress);
    CHECK(added == text);
    CHECK(Plain(tokens) == more["tokens"]);
    CHECK(events.back().data["stop_type"] == "limit");

    Plain stopped   = body;
    stopped["stop"] = {text.substr(4, 3)};
    const Plain cut = s.ask("/completion", stopped);
    CHECK(cut["stop_type"] == "word");
    CHECK(cut["stopping_word"] == stopped["stop"][0]);
    CHECK(cut["content"] == text.substr(0, 4));
    const Plain two = s.ask("/completion", {{"prompt", {"a", "b"}}, {"n_predict", 1}});
    REQUIRE(two.is_array());
    CHECK(two[1]["prompt"] == "b");
    CHECK(s.ask("/completion", {{"prompt", {1, "b"}}, {"n_predict", 0}})["tokens_predicted"] == 0);

    const auto param = [&](const Plain& wrong) {
        const Reply r = s.post("/completion", wrong);
        CHECK(r.status == 400);
        return Plain::parse(r.body)["error"]["param"].get<std::string>();
    };
    CHECK(param({{"n_predict", 1}}) == "prompt");
    CHECK(param({{"prompt", "a"}, {"n_predict", "many"}}) == "n_predict");
    CHECK(param({{"prompt", "a"}, {"n_probs", -1}}) == "n_probs");
    CHECK(param({{"prompt", "a"}, {"echo", true}}) == "echo");
    CHECK(param({{"prompt", "a"}, {"timings_per_token", 1}}) == "timings_per_token");
}

TEST_CASE("a chat's stream shows the progress of its prompt, and the timings", "[server][dialects]") {
    const Server s({"-b", "16"});
    std::string  text;
    for (int i = 0; i < 60; i++) text += " word" + std::to_string(i);
    const Reply r = s.post("/v1/chat/completions", {{"messages", user(text)},
                                                    {"max_tokens", 2},
                                                    {"stream", true},
                                                    {"return_progress", true},
                                                    {"stream_options", {{"include_usage", true}}}});
    REQUIRE(r.status == 200);
    std::vector<int> processed;
    int              total = 0, timings = 0;
    Plain            last;
    for (std::size_t at = 0; (at = r.body.find("data: {", at)) != std::string::npos; at++) {
        const Plain chunk = Plain::parse(r.body.substr(at + 6, r.body.find("\n\n", at) - at - 6));
        timings += chunk.contains("timings");
        last = chunk;
        if (!chunk.contains("prompt_progress")) continue;
        total = chunk["prompt_progress"]["total"];
        processed.push_back(chunk["prompt_progress"]["processed"]);
    }
    REQUIRE(processed.size() > 1);
    CHECK(std::ranges::is_sorted(processed));
    CHECK(processed.back() == total);
    CHECK(total == last["usage"]["prompt_tokens"].get<int>());
    CHECK(last["timings"]["predicted_n"] == 2);
    CHECK(timings == 2); // of the last piece, and of the usage
}

// A copy of the shipped model with more keys in its file.
std::string with_keys(const std::vector<std::pair<std::string, std::uint32_t>>& keys) {
    std::string more;
    const auto  put = [&](auto value) { more.append(reinterpret_cast<const char*>(&value), sizeof value); };
    for (const auto& [key, value] : keys) {
        put(std::uint64_t(key.size()));
        more += key;
        put(std::uint32_t(4)); // its type
        put(value);
    }
    // Tensors stay where they are modulo their alignment: a last key fills up.
    put(std::uint64_t(1));
    more += "x";
    put(std::uint32_t(8));
    const std::size_t rest = (32 - (more.size() + 8) % 32) % 32;
    put(std::uint64_t(rest));
    more.append(rest, ' ');
    std::string   file = slurp(shipped);
    std::uint64_t n    = 0;
    std::memcpy(&n, file.data() + 16, sizeof n);
    n += keys.size() + 1;
    std::memcpy(file.data() + 16, &n, sizeof n);
    const std::string path = temporary();
    std::ofstream(path, std::ios::binary) << file.substr(0, 24) << more << file.substr(24);
    return path;
}

TEST_CASE("text between two texts", "[server][dialects]") {
    const std::string model = with_keys({{"tokenizer.ggml.fim_pre_token_id", 300},
                                         {"tokenizer.ggml.fim_suf_token_id", 301},
                                         {"tokenizer.ggml.fim_mid_token_id", 302}});
    {
        const Server s({"-c", "64"}, model);
        const Plain  asked{{"input_prefix", "Once "},
                           {"prompt", "upon a"},
                           {"input_suffix", " there was"},
                           {"n_predict", 4},
                           {"temperature", 0}};
        const Plain  one = s.ask("/infill", asked);
        const Plain  two = s.ask("/v1/completions", {{"prompt", "Once upon a"},
                                                     {"suffix", " there was"},
                                                     {"max_tokens", 4},
                                                     {"temperature", 0},
                                                     {"return_token_ids", true}});
        const Plain  ids = two["choices"][0]["prompt_token_ids"];
        CHECK(ids.front() == 300);
        CHECK(ids.back() == 302);
        CHECK(one["tokens_evaluated"] == ids.size());
        CHECK(one["content"] == two["choices"][0]["text"]);
        CHECK(s.ask("/completion", {{"prompt", ids}, {"n_predict", 4}, {"temperature", 0}})["content"] ==
              one["content"]);
        // Text that does not fit is left out of /infill, and refused elsewhere.
        Plain long_one           = asked;
        long_one["input_prefix"] = std::string(1000, 'a') + "Once ";
        CHECK(s.ask("/infill", long_one)["tokens_evaluated"] == 60);
        Plain longer           = asked;
        longer["input_prefix"] = std::string(2'000'000, 'a');
        const Reply no_room    = s.post("/infill", longer);
        CHECK(no_room.status == 400);
        CHECK(Plain::parse(no_room.body)["error"]["param"] == "input_prefix");
        CHECK(s.post("/v1/completions", {{"prompt", long_one["input_prefix"]}, {"suffix", "b"}}).status == 400);
        for (const Plain& wrong :
             {Plain{{"input_suffix", "a"}}, Plain{{"input_prefix", "a"}},
              Plain{{"input_extra", Plain::array({{{"filename", 1}, {"text", "a"}}})}},
              Plain{{"input_extra", Plain::array({{{"filename", "a"}}})}}, Plain{{"prompt", Plain::array({"a"})}}}) {
            Plain body = wrong.contains("input_suffix") || wrong.contains("input_prefix") ? Plain::object() : asked;
            body.update(wrong);
            CHECK(s.post("/infill", body).status == 400);
        }
    }
    unlink(model.c_str());
    const Server plain; // without the marks
    CHECK(plain.post("/infill", {{"input_prefix", "a"}, {"input_suffix", "b"}}).status == 501);
    const Reply r = plain.post("/v1/completions", {{"prompt", "a"}, {"suffix", "b"}});
    CHECK(r.status == 400);
    CHECK(Plain::parse(r.body)["error"]["param"] == "suffix");
}

TEST_CASE("llama.cpp's forms of prompts and responses", "[server][dialects]") {
    const Server s;
    const Plain  part =
        s.ask("/completion", {{"prompt", {{"prompt_string", "Hello"}}},
                              {"n_predict", 4},
                              {"response_fields", {"content", "generation_settings/n_predict", "none/such"}}});
    CHECK(part.size() == 2);
    CHECK(part["generation_settings/n_predict"] == 4);
    CHECK(s.ask("/completion", {{"prompt", {"a", {{"prompt_string", "b"}}, {1, 2}}}, {"n_predict", 1}}).size() == 3);
    CHECK(s.post("/completion", {{"prompt", {{"prompt_string", "a"}, {"multimodal_data", {"b"}}}}}).status == 400);
    CHECK(s.post("/completion", {{"prompt", {{"text", "a"}}}}).status == 400);
    Plain chat{{"messages", {{{"role", "user"}, {"content", "Hi"}}}}, {"max_tokens", 1}, {"seed", 5}};
    CHECK(!s.ask("/v1/chat/completions", chat).contains("__verbose"));
    chat["verbose"]     = true;
    const Plain verbose = s.ask("/v1/chat/completions", chat)["__verbose"];
    CHECK(verbose["prompt"] == s.ask("/apply-template", {{"messages", chat["messages"]}})["prompt"]);
    CHECK(verbose["generation_settings"]["seed"] == 5);
    const Server closed({"--no-slots", "--seed", "7"});
    CHECK(closed.get("/slots").status == 501);
    CHECK(closed.ask_get("/props")["default_generation_settings"]["params"]["seed"] == 7);
}

TEST_CASE("responses are stored for their owner, until their memory is used up", "[server][dialects]") {
    const Server      s({"--api-key", "one,two", "--response-store", "80000"});
    const std::string one = "Authorization: Bearer one\r\n", two = "X-Api-Key: two\r\n";
    const auto        ask = [&](Plain body, int status = 200) {
        body.update({{"max_output_tokens", 4}, {"temperature", 0}});
        const Reply r = s.post("/v1/responses", body, one);
        INFO(body.dump() << ' ' << r.body);
        REQUIRE(r.status == status);
        return Plain::parse(r.body);
    };
    const Plain       first = ask({{"input", "Hello"}, {"instructions", "Be brief."}});
    const std::string path  = "/v1/responses/" + first["id"].get<std::string>();
    CHECK(first["store"] == true);
    CHECK(Plain::parse(s.get(path, one).body) == first);
    CHECK(s.get(path, two).status == 404);
    CHECK(s.get(path + "/input_items", two).status == 404);

    // The second one continues what the first one said, without its instructions.
    const Plain next  = ask({{"input", "And then?"}, {"previous_response_id", first["id"]}});
    Plain       whole = Plain::array({{{"role", "user"}, {"content", "Hello"}}});
    for (const Plain& item : first["output"]) whole.push_back(item);
    whole.push_back({{"role", "user"}, {"content", "And then?"}});
    const Plain same = ask({{"input", whole}, {"store", false}});
    CHECK(next["previous_response_id"] == first["id"]);
    CHECK(next["usage"]["input_tokens"] == same["usage"]["input_tokens"]);
    CHECK(next["output"][0]["content"][0]["text"] == same["output"][0]["content"][0]["text"]);
    CHECK(s.get("/v1/responses/" + same["id"].get<std::string>(), one).status == 404);

    const std::string items = "/v1/responses/" + next["id"].get<std::string>() + "/input_items";
    const Plain       all   = Plain::parse(s.get(items + "?order=asc", one).body),
                last        = Plain::parse(s.get(items + "?limit=1", one).body);
    REQUIRE(all["data"].size() == whole.size());
    CHECK(all["has_more"] == false);
    CHECK(all["data"][0]["content"][0]["text"] == "Hello");
    CHECK(last["data"][0] == all["data"].back());
    CHECK(last["has_more"] == true);
    const std::string behind = "&after=" + last["last_id"].get<std::string>();
    CHECK(Plain::parse(s.get(items + "?limit=1" + behind, one).body)["data"][0] == all["data"][all["data"].size() - 2]);
    for (const char* wrong : {"?limit=0", "?limit=a", "?order=up", "?after=x"})
        CHECK(s.get(items + wrong, one).status == 400);

    // An item of a stored response may be named by its id.
    Plain named = whole;
    named[1]    = {{"type", "item_reference"}, {"id", first["output"][0]["id"]}};
    CHECK(ask({{"input", named}, {"store", false}})["usage"]["input_tokens"] == same["usage"]["input_tokens"]);
    CHECK(Plain::parse(s.post("/v1/responses", {{"input", named}}, two).body)["error"]["message"] ==
          "Item with id " + named[1]["id"].get<std::string>() +
              " not found: it is in no stored response, or no longer.");
    for (const char* id : {"", "_", "msg", "msg_", "msg_1_0", "item_0_0_0"})
        ask({{"input", Plain::array({{{"type", "item_reference"}, {"id", id}}})}}, 400);
    named.push_back(named[1]);
    CHECK(has(ask({{"input", named}}, 400)["error"]["message"], "Duplicate item found"));

    // A stream is stored as well.
    const auto events =
        events_of(s.post("/v1/responses", {{"input", "a"}, {"stream", true}, {"max_output_tokens", 2}}, one).body);
    const Json& end = events.back().data["response"];
    CHECK(Plain::parse(s.get("/v1/responses/" + end["id"].get<std::string>(), one).body)["status"] ==
          end["status"].get<std::string>());

    Client client = s.client();
    client.send("DELETE " + path + " HTTP/1.1\r\nHost: localhost\r\n" + one + "\r\n");
    CHECK(Plain::parse(client.reply().body) == Plain{{"id", first["id"]}, {"object", "response"}, {"deleted", true}});
    CHECK(s.get(path, one).status == 404);
    const Plain gone = ask({{"input", "a"}, {"previous_response_id", first["id"]}}, 400);
    CHECK(gone["error"]["code"] == "previous_response_not_found");
    CHECK(gone["error"]["param"] == "previous_response_id");
    // The oldest go; one that is too large is not stored.
    for (int i = 0; i < 40; i++) ask({{"input", std::string(1000, 'a')}});
    CHECK(s.get("/v1/responses/" + next["id"].get<std::string>(), one).status == 404);
}

TEST_CASE("a response's stream has llama.cpp's times and progress where asked", "[server][dialects]") {
    const Server s;
    const Plain  body{{"input", "Tell me about the sea."},
                      {"stream", true},
                      {"max_output_tokens", 4},
                      {"timings_per_token", true},
                      {"return_progress", true}};
    bool         progress = false, times = false;
    for (const Event& e : events_of(s.post("/v1/responses", body).body)) {
        if (e.data.contains("prompt_progress") && !progress) {
            progress = true;
            CHECK(e.name == "response.in_progress");
            CHECK(e.data["prompt_progress"]["processed"] == e.data["prompt_progress"]["cache"]);
            CHECK(e.data["timings"]["prompt_n"] == 0);
        }
        times = times || (e.name == "response.output_text.delta" && e.data.contains("timings"));
    }
    CHECK(progress);
    CHECK(times);
}

TEST_CASE("timings of several prompts are sums, in a stream as in a whole answer", "[server][dialects]") {
    const Server& s = dialect_server();
    Plain         body{{"prompt", {"Once upon a time there was a cat", "The sea", "Hello"}},
                       {"n", 2},
                       {"max_tokens", 3},
                       {"temperature", 0},
                       {"ignore_eos", true}};
    const auto    check = [](const Plain& answer) {
        INFO(answer.dump());
        const Plain &t = answer["timings"], &usage = answer["usage"];
        CHECK(t["prompt_n"].get<int>() + t["cache_n"].get<int>() == usage["prompt_tokens"].get<int>());
        CHECK(t["cache_n"] == usage["prompt_tokens_details"]["cached_tokens"]);
        CHECK(t["predicted_n"] == usage["completion_tokens"]);
        CHECK(t["predicted_n"] == 18);
    };
    check(s.ask("/v1/completions", body));
    body.update({{"stream", true}, {"stream_options", {{"include_usage", true}}}});
    const std::string text = s.post("/v1/completions", body).body;
    const std::size_t at   = text.rfind("data: {");
    REQUIRE(at != std::string::npos);
    check(Plain::parse(text.substr(at + 6, text.find("\n\n", at) - at - 6)));
}

TEST_CASE("where a call is required, an answer that is cut has no content", "[server][dialects]") {
    const Server& s = dialect_server();
    for (int n = 1; n < 7; n++) {
        Plain       body{{"messages", user("Hello")},
                         {"max_tokens", n},
                         {"tool_choice", "required"},
                         {"tools", Plain::parse(R"([{"type":"function","function":{"name":"f"}}])")}};
        const Plain whole = s.ask("/v1/chat/completions", body)["choices"][0];
        INFO(whole.dump());
        CHECK((whole["message"]["content"].is_null() || whole["message"]["content"] == ""));
        CHECK(whole["finish_reason"] == "length");
        body["stream"]           = true;
        const std::string stream = s.post("/v1/chat/completions", body).body;
        CHECK(!has(stream, R"("content":")"));
    }
}

TEST_CASE("/slots lists what runs", "[server][dialects]") {
    const Server s({"-np", "2"});
    Plain        slots = Plain::parse(s.get("/slots").body);
    REQUIRE(slots.size() == 2);
    CHECK(slots[0]["is_processing"] == false);
    CHECK(slots[1]["id"] == 1);
    CHECK(s.get("/slots?fail_on_no_slot=1").status == 200);

    Client client = s.client();
    client.send(Client::request(
        "/completion", R"({"prompt":"a","n_predict":-1,"ignore_eos":true,"n":2,"temperature":0.25,"stream":true})"));
    CHECK(client.head().status == 200);
    for (int i = 0; i < 1000 && slots[1]["is_processing"] == false; i++) slots = Plain::parse(s.get("/slots").body);
    REQUIRE(slots[1]["is_processing"] == true);
    CHECK(slots[0]["params"]["temperature"] == 0.25);
    CHECK(slots[0]["next_token"][0]["n_remain"] == -1);
    CHECK(slots[0]["n_prompt_tokens"].get<int>() > 0);
    CHECK(slots[0]["id_task"] == slots[1]["id_task"]);
    CHECK(s.get("/slots?fail_on_no_slot=1").status == 503);
    client.hang_up();
    s.until_idle();
    CHECK(Plain::parse(s.get("/slots").body)[0]["is_processing"] == false);
}

TEST_CASE("a required call that ends within its mark has no content", "[server][dialects]") {
    const Server s({"--tool-format", "deepseek", "--temp", "0"});
    const Json   none{{"type", "object"}, {"properties", Json::object()}};
    const Json   tool{{"type", "function"}, {"function", {{"name", "f"}, {"description", "d"}, {"parameters", none}}}};
    Json         body{{"messages", user("Hi")}, {"tool_choice", "required"}, {"tools", Json::array({tool})}};
    int          cut = 0;
    for (int n = 1; n <= 60; n++) { // in the middle of a character, too
        body["max_tokens"] = n;
        const Json answer  = s.ask("/v1/chat/completions", body)["choices"][0];
        INFO(answer.dump());
        const Json& content = answer["message"]["content"];
        CHECK((content.is_null() || content == ""));
        cut += answer["finish_reason"] == "length";
    }
    CHECK(cut > 20);
}
