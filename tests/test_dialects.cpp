// The other APIs of the server: Anthropic's messages, OpenAI's responses, llama.cpp's own. Their requests become those of chats, and
// their streams add up to their whole answers.
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

using namespace quire;
using namespace quire::testing;
using Plain = nlohmann::json;

namespace {

ApiLimits limits() {
    ApiLimits l;
    l.models     = {"tiny"};
    l.vocab_size = 100;
    l.context    = 64;
    return l;
}

Json json_of(const std::string& text) {
    Result<Json> json = json_parse(text);
    INFO(text);
    REQUIRE(json.has_value());
    return *json;
}

struct Event {
    std::string name;
    Json        data;
};
std::vector<Event> events_of(const std::string& body) {
    std::vector<Event> out;
    for (std::size_t at = 0; at < body.size();) {
        const std::size_t end = body.find("\n\n", at);
        REQUIRE(end != std::string::npos);
        std::string text = body.substr(at, end - at);
        at               = end + 2;
        if (text.starts_with(":")) continue;
        Event& e = out.emplace_back();
        if (text.starts_with("event: ")) {
            const std::size_t line = text.find('\n');
            e.name                 = text.substr(7, line - 7);
            text.erase(0, line + 1);
        }
        REQUIRE(text.starts_with("data: "));
        e.data = json_of(text.substr(6));
    }
    return out;
}

Choice piece_of(std::vector<AnswerPart> parts, const std::string& finish = "") {
    Choice c;
    c.parts         = std::move(parts);
    c.finish_reason = finish;
    return c;
}
AnswerPart text_part(const std::string& text) { return {AnswerPart::Kind::content, text, {}}; }
AnswerPart thought(const std::string& text) { return {AnswerPart::Kind::reasoning, text, {}}; }
AnswerPart call(const std::string& name, const std::string& arguments) {
    return {AnswerPart::Kind::call, "", {name, arguments}};
}
AnswerPart more(const std::string& arguments) { // of the call before
    AnswerPart part = call("", arguments);
    part.call.more  = true;
    return part;
}

// The stream of an answer whose parts come in these pieces, and the same parts as a whole answer.
struct Both {
    std::vector<Event> events;
    Json               whole;
};
Both both(const std::function<std::unique_ptr<AnswerRenderer>()>& make, std::vector<Choice> pieces,
          const Usage& usage) {
    Both        out;
    Choice      all;
    const auto  stream = make();
    std::string text   = stream->begin(usage);
    for (Choice& c : pieces) {
        append(all, c);
        text += stream->piece(std::move(c), usage);
    }
    text += stream->end(usage);
    out.events = events_of(text);
    out.whole  = json_of(make()->response({all}, usage));
    return out;
}

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

Server& dialect_server() {
    static Server server({"--tool-format", "hermes"});
    return server;
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
    says(ask + R"(,"tools":[{"type":"web_search_20250305","name":"w"}])", "tools.0: a tool of type");
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

namespace {

Parsed<ResponsesRequest> responses(const std::string& fields) {
    return parse_responses_request("{" + fields + "}", limits());
}

// Adds up a stream as OpenAI's clients do, and checks that its events come in order. The last event has the whole response.
Json accumulate_response(const std::vector<Event>& events) {
    Json output = Json::array(), last;
    for (std::size_t i = 0; i < events.size(); i++) {
        const auto& [name, data] = events[i];
        CHECK(data["type"] == name);
        CHECK(data["sequence_number"] == int(i));
        if (i == 0) CHECK(name == "response.created");
        else if (i == 1) CHECK(name == "response.in_progress");
        else if (name == "response.output_item.added") {
            CHECK(data["output_index"] == int(output.size()));
            CHECK(data["item"]["status"] == "in_progress");
            output.push_back(data["item"]);
        } else if (name == "response.output_item.done") {
            CHECK(data["item"]["id"] == output.back()["id"]);
            for (const char* member : {"content", "arguments", "input"})
                if (output.back().contains(member)) CHECK(data["item"][member] == output.back()[member]);
            output.back()["status"] = data["item"]["status"];
        } else if (i + 1 == events.size()) last = data["response"];
        else {
            CHECK(data["item_id"] == output.back()["id"]);
            CHECK(data["output_index"] == int(output.size()) - 1);
            Json& item = output.back();
            if (name == "response.content_part.added") item["content"].push_back(data["part"]);
            else if (name == "response.output_text.delta" || name == "response.reasoning_text.delta") {
                Json& part   = item["content"][0];
                part["text"] = part["text"].get<std::string>() + data["delta"].get<std::string>();
                if (data.contains("logprobs"))
                    for (const Json& one : data["logprobs"]) part["logprobs"].push_back(one);
            } else if (name == "response.function_call_arguments.delta")
                item["arguments"] = item["arguments"].get<std::string>() + data["delta"].get<std::string>();
            else if (name == "response.function_call_arguments.done") CHECK(item["arguments"] == data["arguments"]);
            else if (name == "response.custom_tool_call_input.delta")
                item["input"] = item["input"].get<std::string>() + data["delta"].get<std::string>();
            else if (name == "response.custom_tool_call_input.done") CHECK(item["input"] == data["input"]);
            else if (name == "response.content_part.done") CHECK(data["part"] == item["content"][0]);
            else CHECK(data["text"] == item["content"][0]["text"]);
        }
    }
    CHECK(last["output"] == output);
    return last;
}

} // namespace

TEST_CASE("responses become a chat", "[dialects]") {
    const auto r = responses(
        R"("instructions":"be kind","input":[{"role":"user","content":[{"type":"input_text","text":"a"}]},
             {"type":"reasoning","id":"rs_1","summary":[],"content":[{"type":"reasoning_text","text":"hm"}]},
             {"type":"message","role":"assistant","content":[{"type":"output_text","text":"b","annotations":[]}]},
             {"type":"function_call","call_id":"c1","name":"f","arguments":"{\"x\":1}","id":"fc_1","status":"completed"},
             {"type":"function_call","call_id":"c2","name":"g","arguments":"{}"},
             {"type":"function_call_output","call_id":"c2","output":"two"},
             {"type":"function_call_output","call_id":"c1","output":[{"type":"input_text","text":"one"}]},
             {"role":"developer","content":"go on"}],
           "tools":[{"type":"function","name":"f","description":"d","parameters":{"type":"object"}},
             {"type":"function","name":"g","parameters":{"type":"object"}}],
           "tool_choice":{"type":"allowed_tools","mode":"auto","tools":[{"type":"function","name":"g"}]},
           "text":{"format":{"type":"json_schema","name":"n","schema":{"type":"object"}}},"max_output_tokens":9,
           "temperature":0.5,"parallel_tool_calls":false,"store":true,"truncation":"auto","metadata":{"k":"v"},
           "include":["message.output_text.logprobs"],"top_logprobs":2,"reasoning":{"effort":"none"},"seed":5)");
    INFO((r ? "" : r.error().message));
    REQUIRE(r.has_value());
    const auto& g = r->generation;
    const auto& m = g.conversation.input.messages;
    REQUIRE(m.size() == 6);
    CHECK(m[0] == json_of(R"({"role":"system","content":"be kind"})"));
    CHECK(m[1] == json_of(R"({"role":"user","content":"a"})"));
    CHECK(m[2]["content"] == "b");
    CHECK(m[2]["reasoning_content"] == "hm");
    CHECK(m[2]["tool_calls"].size() == 2);
    CHECK(m[2]["tool_calls"][0]["function"] == json_of(R"({"name":"f","arguments":{"x":1}})"));
    CHECK(m[3] == json_of(R"({"role":"tool","tool_call_id":"c2","name":"g","content":"two"})"));
    CHECK(m[5] == json_of(R"({"role":"developer","content":"go on"})"));
    CHECK(g.tool_use.tools.size() == 1);
    CHECK(!g.tool_use.parallel);
    CHECK(g.constraint.has_value());
    CHECK(g.max_tokens == 9);
    CHECK(g.trim);
    CHECK(g.logprobs);
    CHECK(g.request.sampling.logprobs == 2);
    CHECK(g.request.sampling.seed == 5);
    CHECK(g.conversation.input.variables["enable_thinking"] == false);
    CHECK(g.unknown.empty());
    CHECK(r->echo["instructions"] == "be kind");
    CHECK(r->echo["metadata"] == json_of(R"({"k":"v"})"));
    CHECK(r->echo["store"] == false);
    const auto text = responses(R"("input":"Hello")");
    REQUIRE(text.has_value());
    CHECK(text->generation.conversation.input.messages[0]["content"] == "Hello");
    // What the assistant said last is not continued.
    CHECK(!responses(R"("input":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}])")
               ->generation.conversation.continue_final);
}

TEST_CASE("responses that are malformed are refused with their place", "[dialects]") {
    const auto says = [](const std::string& fields, const std::string& param, const std::string& part) {
        const auto r = responses(fields);
        INFO(fields << ": " << (r ? "fine" : r.error().message));
        REQUIRE(!r.has_value());
        CHECK(r.error().status == 400);
        CHECK(r.error().param == param);
        CHECK(r.error().message.find(part) != std::string::npos);
    };
    const std::string ask = R"("input":"a")";
    says("", "input", "input is missing");
    says(R"("input":3)", "input", "input is an integer");
    says(R"("input":[])", "input", "input is empty");
    says(R"("input":["a"])", "input", "input[0] is a string");
    says(R"("input":[{"role":"robot","content":"a"}])", "input", "input[0].role");
    says(R"("input":[{"role":"user"}])", "input", "input[0] has no content");
    says(R"("input":[{"role":"user","content":[{"type":"input_image","image_url":"x"}]}])", "input", "'input_image'");
    says(R"("input":[{"type":"web_search_call"}])", "input", "'web_search_call'");
    says(R"("input":[{"type":"item_reference","id":"x"}])", "input", "nothing is stored here");
    says(R"("input":[{"type":"function_call_output","call_id":"x","output":"1"}])", "input",
         "No tool call found for function call output with call_id x.");
    says(R"("input":[{"type":"function_call","call_id":"x","name":"f","arguments":"{}"}])", "input",
         "No tool output found for function call x.");
    says(R"("input":[{"type":"function_call","call_id":"x","name":"f","arguments":"[]"}])", "input", "arguments");
    says(ask + R"(,"previous_response_id":"resp_1")", "previous_response_id", "nothing is stored here");
    says(ask + R"(,"conversation":"c")", "conversation", "nothing is stored here");
    says(ask + R"(,"background":true)", "background", "nothing is stored here");
    says(ask + R"(,"store":"yes")", "store", "store is a string");
    says(ask + R"(,"tools":[{}])", "tools[0].type", "tools[0].type");
    says(ask + R"(,"tools":[{"type":"custom"}])", "tools[0].name", "tools[0].name");
    says(ask + R"(,"tools":[{"type":"namespace","name":"n"}])", "tools[0].tools", "has to be a list");
    says(ask + R"(,"tools":[{"type":"namespace","name":"n","tools":[3]}])", "tools[0].tools[0]", "an object");
    says(ask + R"(,"tools":[{"type":"web_search"}],"tool_choice":"required")", "tool_choice", "'tools' are specified");
    says(R"("input":[{"type":"custom_tool_call","call_id":"x","name":"f"}])", "input", "input[0].input");
    says(ask + R"(,"tools":[{"type":"function"}])", "tools[0].name", "tools[0].name");
    says(ask + R"(,"tool_choice":{"type":"allowed_tools","tools":[]})", "tool_choice", "allows none");
    says(ask + R"(,"text":{"format":{"type":"json_schema"}})", "text.format", "with a schema");
    says(ask + R"(,"reasoning":{"effort":3})", "reasoning.effort", "has to be a string");
    says(ask + R"(,"max_output_tokens":0)", "max_output_tokens", "in 1..");
    says(ask + R"(,"truncation":"some")", "truncation", "auto or disabled");
    says(ask + R"(,"metadata":{"a":1})", "metadata", "object of at most 16 strings");
    says(ask + R"(,"include":"all")", "include", "list of strings");
    says(ask + R"(,"messages":[])", "messages", "belongs to /v1/chat/completions");
    says(ask + R"(,"temperature":"hot")", "temperature", "temperature is a string");
}

TEST_CASE("custom tools and namespaces of responses are functions of the chat", "[dialects]") {
    const auto r = responses(
        R"("input":[{"role":"user","content":"a"},
             {"type":"custom_tool_call","call_id":"c1","name":"apply_patch","input":"a \"b\""},
             {"type":"function_call","call_id":"c2","namespace":"mcp__maps","name":"find","arguments":"{}"},
             {"type":"custom_tool_call_output","call_id":"c1","output":"done"},
             {"type":"function_call_output","call_id":"c2","output":"Ulm"}],
           "tools":[{"type":"web_search"},{"type":"function","name":"f","parameters":{"type":"object"}},
             {"type":"custom","name":"apply_patch","description":"Edits.","format":
               {"type":"grammar","syntax":"lark","definition":"start: X"}},
             {"type":"custom","name":"digits","format":{"type":"grammar","syntax":"regex","definition":"[0-9]|x"}},
             {"type":"namespace","name":"mcp__maps","description":"d","tools":
               [{"type":"function","name":"find","parameters":{"type":"object"}},{"type":"image_generation"}]}],
           "tool_choice":{"type":"custom","name":"digits"})");
    INFO((r ? "" : r.error().message));
    REQUIRE(r.has_value());
    const auto& m = r->generation.conversation.input.messages;
    REQUIRE(m.size() == 4);
    CHECK(m[1]["tool_calls"][0]["function"] == json_of(R"({"name":"apply_patch","arguments":{"input":"a \"b\""}})"));
    CHECK(m[1]["tool_calls"][1]["function"]["name"] == "mcp__maps__find");
    CHECK(m[2] == json_of(R"({"role":"tool","tool_call_id":"c1","name":"apply_patch","content":"done"})"));
    const Json& tools = r->generation.conversation.input.tools;
    REQUIRE(tools.size() == 4);
    CHECK(tools[1]["function"]["description"] == "Edits.\nThe input follows this lark:\nstart: X");
    CHECK(tools[2]["function"]["parameters"] ==
          json_of(R"({"type":"object","properties":{"input":{"type":"string","pattern":"^(?:[0-9]|x)$"}},
                      "required":["input"],"additionalProperties":false})"));
    CHECK(tools[3]["function"]["name"] == "mcp__maps__find");
    CHECK(r->generation.tool_use.tools.size() == 1);
    CHECK(r->generation.tool_use.required);
    REQUIRE(r->echo["warnings"].size() == 1);
    CHECK(r->echo["warnings"][0] ==
          "the model is not told of tools of these types, which run at OpenAI: image_generation web_search");
    CHECK(!responses(R"("input":"a")")->echo.contains("warnings"));

    ResponseHead head;
    head.id         = "1";
    const auto make = [&] { return responses_renderer(head, json_of("{}"), r->tools); };
    const Both b =
        both(make,
             {piece_of({call("apply_patch", R"({"input": "say )"), more(R"(\"hi\""})")}),
              piece_of({call("mcp__maps__find", R"({"at":1})"), call("f", "{}")}), piece_of({}, "tool_calls")},
             {});
    CHECK(accumulate_response(b.events) == b.whole);
    const Json& output = b.whole["output"];
    REQUIRE(output.size() == 3);
    CHECK(output[0]["type"] == "custom_tool_call");
    CHECK(output[0]["input"] == "say \"hi\"");
    CHECK(!output[0].contains("arguments"));
    CHECK(output[1]["namespace"] == "mcp__maps");
    CHECK(output[1]["name"] == "find");
    CHECK(output[1]["arguments"] == R"({"at":1})");
    CHECK(!output[2].contains("namespace"));

    CHECK(custom_input(R"({"input": "cut o)") == "cut o");
    CHECK(custom_input(R"({"input": "whole")") == "whole");
    CHECK(custom_input(R"({"other": 1})") == R"({"other": 1})");
    CHECK(custom_input("{\"in").empty());
}

TEST_CASE("a stream of a response adds up to the whole response", "[dialects]") {
    ResponseHead head;
    head.id          = "1";
    head.model       = "tiny";
    head.chat        = true;
    head.logprobs    = true;
    const auto  make = [&] { return responses_renderer(head, json_of(R"({"store":false,"tools":[]})")); };
    const Usage usage{10, 5, 4, 2};

    Choice first = piece_of({thought("I ")});
    Choice said  = piece_of({text_part("It "), text_part("is"), call("weather", R"({"city":"Ulm"})"), text_part("\n")});
    Both   b     = both(
        make, {first, piece_of({thought("see")}), said, piece_of({call("weather", "{}")}), piece_of({}, "tool_calls")},
        usage);
    CHECK(accumulate_response(b.events) == b.whole);
    CHECK(b.events.back().name == "response.completed");
    const Json& output = b.whole["output"];
    REQUIRE(output.size() == 4);
    CHECK(output[0]["content"] == json_of(R"([{"type":"reasoning_text","text":"I see"}])"));
    CHECK(output[1]["content"][0]["text"] == "It is");
    CHECK(output[2]["arguments"] == R"({"city":"Ulm"})");
    CHECK(output[2]["call_id"] != output[3]["call_id"]);
    CHECK(b.whole["status"] == "completed");
    CHECK(b.whole["usage"] ==
          json_of(R"({"input_tokens":10,"input_tokens_details":{"cached_tokens":4,"cache_write_tokens":0},
                      "output_tokens":5,"output_tokens_details":{"reasoning_tokens":2},"total_tokens":15})"));

    Choice cut                         = piece_of({text_part("ab")}, "length");
    cut.logprobs.emplace_back().chosen = SpelledLogprob{3, "ab", -0.5f};
    b                                  = both(make, {cut}, usage);
    CHECK(b.events.back().name == "response.incomplete");
    CHECK(b.whole["incomplete_details"]["reason"] == "max_output_tokens");
    CHECK(b.whole["output"][0]["status"] == "incomplete");
    const Json streamed = accumulate_response(b.events);
    CHECK(streamed["output"][0]["content"][0]["logprobs"][0]["token"] == "ab");

    const auto stream = make();
    const auto failed = events_of(stream->begin(usage) + stream->failure({500, "why", "", ""}));
    CHECK(failed.back().name == "response.failed");
    CHECK(failed.back().data["response"]["status"] == "failed");
    CHECK(failed.back().data["response"]["error"]["message"] == "why");
    CHECK(events_of(std::string(stream->out_of_memory()))[0].name == "error");
}

TEST_CASE("/v1/responses answers as the chat does", "[server][dialects]") {
    const Server& s = dialect_server();
    const Plain   chat =
        s.ask("/v1/chat/completions", {{"messages", user("Hello")}, {"max_tokens", 12}, {"temperature", 0}});
    const Plain body{{"input", "Hello"}, {"max_output_tokens", 12}, {"temperature", 0}};
    const Plain whole = s.ask("/v1/responses", body);
    CHECK(whole["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]);
    CHECK(whole["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]);
    CHECK(whole["usage"]["output_tokens"] == chat["usage"]["completion_tokens"]);
    Plain streamed      = body;
    streamed["stream"]  = true;
    streamed["include"] = {"message.output_text.logprobs"};
    const Reply r       = s.post("/v1/responses", streamed);
    const Json  added   = accumulate_response(events_of(r.body));
    CHECK(added["output"][0]["content"][0]["text"].get<std::string>() ==
          whole["output"][0]["content"][0]["text"].get<std::string>());
    // The end token has no text.
    CHECK(int(added["output"][0]["content"][0]["logprobs"].size()) + (whole["status"] == "completed" ? 1 : 0) ==
          whole["usage"]["output_tokens"].get<int>());

    // An object by a schema.
    const Plain schema{{"type", "object"},
                       {"properties", {{"a", {{"type", "boolean"}}}}},
                       {"required", {"a"}},
                       {"additionalProperties", false}};
    const Plain made =
        s.ask("/v1/responses",
              {{"input", "Hello"},
               {"max_output_tokens", 40},
               {"text", {{"format", {{"type", "json_schema"}, {"name", "n"}, {"strict", true}, {"schema", schema}}}}}});
    CHECK(made["status"] == "completed");
    CHECK(Plain::parse(made["output"][0]["content"][0]["text"].get<std::string>())["a"].is_boolean());
    CHECK(made["text"]["format"]["name"] == "n");

    const Reply bad = s.post("/v1/responses", {{"input", 3}});
    CHECK(bad.status == 400);
    CHECK(Plain::parse(bad.body)["error"]["param"] == "input");
    CHECK(s.post("/responses", body).status == 200);
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
            progress = true;
            CHECK(e.data["prompt_progress"]["total"] == e.data["tokens_evaluated"]);
            CHECK(e.data["prompt_progress"]["processed"] == e.data["tokens_evaluated"]);
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
