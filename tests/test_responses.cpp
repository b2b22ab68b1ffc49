// OpenAI's responses. Their requests become those of chats, and their streams add up to their whole answers.
#include <catch2/catch_test_macros.hpp>

#include <fstream>

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

Parsed<ResponsesRequest> responses(const std::string& fields) {
    return parse_responses_request("{" + fields + "}", limits());
}

std::int64_t noon() { return 43200; }

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
    // The last message of the assistant is not continued.
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
    says(R"("input":[{"type":"reasoning","summary":[]}])", "input", "input has no message");
    says(R"("input":[{"type":"item_reference","id":"x"}])", "input", "nothing is stored here");
    says(R"("input":[{"type":"function_call_output","call_id":"x","output":"1"}])", "input",
         "No tool call found for function call output with call_id x.");
    says(R"("input":[{"type":"function_call","call_id":"x","name":"f","arguments":"{}"}])", "input",
         "No tool output found for function call x.");
    says(R"("input":[{"type":"function_call","call_id":"x","name":"f","arguments":"{}"},{"role":"user","content":"a"},
             {"type":"function_call_output","call_id":"x","output":"1"}])",
         "input", "Outputs have to follow their calls directly");
    says(R"("input":[{"type":"function_call","call_id":"x","name":"f","arguments":"[]"}])", "input", "arguments");
    says(ask + R"(,"previous_response_id":"resp_1")", "previous_response_id", "nothing is stored here");
    says(ask + R"(,"conversation":"c")", "conversation", "conversation is not supported");
    says(ask + R"(,"background":true)", "background", "background is not supported");
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
    const auto make = [&] { return responses_renderer(head, json_of("{}"), r->tools, {}, noon); };
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
    const auto  make = [&] { return responses_renderer(head, json_of(R"({"store":false,"tools":[]})"), {}, {}, noon); };
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
    CHECK(b.whole["completed_at"] == noon());
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

    // The calls before the one that is cut are whole.
    b = both(make, {piece_of({text_part("a"), call("weather", "{}")}), piece_of({call("weather", "{\"ci")}, "length")},
             usage);
    CHECK(accumulate_response(b.events) == b.whole);
    CHECK(b.whole["status"] == "incomplete");
    CHECK(b.whole["output"][0]["status"] == "completed");
    CHECK(b.whole["output"][1]["status"] == "completed");
    CHECK(b.whole["output"][2]["status"] == "incomplete");

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

    // A client that repeats its X-Request-Id loses no response.
    const auto named = [&] {
        const Reply one = s.post("/v1/responses", body, "X-Request-Id: mine\r\n");
        CHECK(one.headers.at("x-request-id") == "mine");
        return Plain::parse(one.body);
    };
    const Plain first = named(), second = named();
    CHECK(first["id"] != second["id"]);
    for (const Plain& one : {first, second})
        CHECK(s.ask_get("/v1/responses/" + one["id"].get<std::string>())["output"] == one["output"]);
    CHECK(s.get("/v1/responses/" + first["id"].get<std::string>() + "?stream=true").status == 400);
    const Plain bogus{{"format", {{"type", "json_schema"}, {"name", "x"}, {"schema", {{"type", "bogus"}}}}}};
    const Reply refused = s.post("/v1/responses", {{"input", "x"}, {"text", bogus}});
    CHECK(refused.status == 400);
    CHECK(Plain::parse(refused.body)["error"]["param"] == "text.format");

    const Reply bad = s.post("/v1/responses", {{"input", 3}});
    CHECK(bad.status == 400);
    CHECK(Plain::parse(bad.body)["error"]["param"] == "input");
    CHECK(s.post("/responses", body).status == 200);
}

TEST_CASE("log-probabilities of a response are those of its message's text", "[server][dialects]") {
    const std::string file = temporary();
    std::ofstream(file) << "{% for m in messages %}{{ m.content }}\n{% endfor %}<think>\n";
    const Server s({"--chat-template-file", file, "--reasoning-budget", "3"});
    Plain        body{{"input", "Once upon a time"},
                      {"max_output_tokens", 24},
                      {"temperature", 0},
                      {"include", {"message.output_text.logprobs"}}};
    const auto   check = [](const Plain& response) {
        INFO(response.dump());
        REQUIRE(response["output"].size() == 2);
        CHECK(response["output"][0]["type"] == "reasoning");
        const Plain& part = response["output"][1]["content"][0];
        REQUIRE(!part["logprobs"].empty());
        std::string spelled;
        for (const Plain& one : part["logprobs"])
            for (const Plain& byte : one["bytes"]) spelled += char(byte.get<int>());
        // White space in front of the text is none of it.
        CHECK(spelled.ends_with(part["text"].get<std::string>()));
        CHECK(spelled.find_first_not_of(" \n") == spelled.size() - part["text"].get<std::string>().size());
        CHECK(int(part["logprobs"].size()) < response["usage"]["output_tokens"].get<int>());
    };
    const Plain whole = s.ask("/v1/responses", body);
    check(whole);
    body["stream"]       = true;
    const Json  streamed = accumulate_response(events_of(s.post("/v1/responses", body).body));
    const Plain added    = Plain::parse(json_dump(streamed));
    check(added);
    CHECK(added["output"][1]["content"] == whole["output"][1]["content"]);
}
