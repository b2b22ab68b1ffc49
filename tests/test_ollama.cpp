// Ollama's API: its requests become those of chats, and its lines of JSON add up to its whole answers.
#include <catch2/catch_test_macros.hpp>

#include <nlohmann/json.hpp>

#include "server_process.h"

import quire.core.base;
import quire.core.json;
import quire.core.std;
import quire.serve.api.answer;
import quire.serve.api.error;
import quire.serve.api.generation_request;
import quire.serve.api.limits;
import quire.serve.ollama.api;
import quire.serve.ollama.request;
import quire.text.calls.tool_calls;

#include "dialect_tools.h"

using namespace quire;
using namespace quire::testing;
using Plain = nlohmann::json;

namespace {

Parsed<OllamaRequest> chat(const std::string& fields) {
    return parse_ollama_chat(R"({"model":"tiny:latest","messages":[{"role":"user","content":"a"}])" +
                                 (fields.empty() ? "" : "," + fields) + "}",
                             limits(true));
}
Parsed<OllamaRequest> generate(const std::string& fields) {
    return parse_ollama_generate(R"({"model":"tiny")" + (fields.empty() ? "" : "," + fields) + "}", limits(true));
}

std::vector<Plain> lines_of(const std::string& body) {
    std::vector<Plain> lines;
    std::stringstream  text(body);
    for (std::string line; std::getline(text, line);) lines.push_back(Plain::parse(line));
    return lines;
}

} // namespace

TEST_CASE("Ollama's requests become chats", "[ollama]") {
    const auto r = parse_ollama_chat(
        R"({"model":"tiny:latest","stream":false,"think":true,"keep_alive":"5m","format":{"type":"object"},"odd":1,
            "messages":[{"role":"system","content":"s"},{"role":"user","content":"a","images":null},
              {"role":"assistant","content":"","thinking":"hm","tool_calls":[{"function":{"name":"f","arguments":{"x":1}}},
                {"type":"function","function":{"name":"g","arguments":{}}}]},
              {"role":"tool","tool_name":"g","content":"2"},{"role":"tool","content":"1"}],
            "tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}],
            "options":{"num_predict":7,"temperature":0.5,"top_k":3,"seed":9,"num_ctx":4096,"stop":["x"],"luck":1,
              "repeat_penalty":null,"mirostat":0}})",
        limits(true));
    INFO((r ? "" : r.error().message));
    REQUIRE(r.has_value());
    const GenerationRequest& g = r->generation;
    const auto&              m = g.conversation.input.messages;
    REQUIRE(m.size() == 5);
    CHECK(m[2]["reasoning_content"] == "hm");
    CHECK(m[2]["tool_calls"][0]["function"] == json_of(R"({"name":"f","arguments":{"x":1}})"));
    CHECK(m[3]["tool_call_id"] == m[2]["tool_calls"][1]["id"]);
    CHECK(m[4]["tool_call_id"] == m[2]["tool_calls"][0]["id"]);
    CHECK(g.conversation.input.variables["enable_thinking"] == true);
    CHECK(g.tool_use.tools.size() == 1);
    CHECK(g.constraint.has_value());
    CHECK(g.max_tokens == 7);
    CHECK((g.request.sampling.temperature == 0.5f && g.request.sampling.top_k == 3 && g.request.sampling.seed == 9));
    CHECK(g.stop == std::vector<std::string>{"x"});
    CHECK(g.trim);
    CHECK(!g.stream);
    CHECK(g.unknown == std::vector<std::string>{"options.luck", "odd"});
    CHECK(r->model == "tiny:latest");

    CHECK(chat("")->generation.stream); // unless the request says no
    CHECK(chat(R"("options":{"num_predict":-1})")->generation.max_tokens == std::nullopt);
    CHECK(!chat(R"("truncate":false)")->generation.trim);
    CHECK(chat(R"("format":"","think":null,"tools":[])").has_value());
    CHECK(parse_ollama_chat(R"({"model":"tiny"})", limits(true))->empty);

    const auto asked = generate(R"("prompt":"p","system":"s","context":[1,2])");
    REQUIRE(asked.has_value());
    CHECK(asked->generation.conversation.input.messages[0] == json_of(R"({"role":"system","content":"s"})"));
    CHECK(asked->generation.max_tokens == std::nullopt);
    const auto raw = generate(R"("prompt":"p","raw":true,"logprobs":true,"top_logprobs":2)");
    REQUIRE(raw.has_value());
    CHECK(!raw->generation.chat);
    CHECK(raw->generation.prompts == std::vector<Prompt>{{"p"}});
    CHECK(raw->generation.max_tokens == std::nullopt);
    CHECK(raw->generation.request.sampling.logprobs == 2);
    CHECK(generate("")->empty);
}

TEST_CASE("Ollama's requests that cannot be answered are refused by name", "[ollama]") {
    const auto wrong = [](const auto& r) { return r ? std::string("fine") : r.error().param; };
    CHECK(parse_ollama_chat(R"({"model":"other","messages":[]})", limits(true)).error().status == 404);
    CHECK(wrong(chat(R"("options":3)")) == "options");
    CHECK(wrong(chat(R"("options":{"num_predict":-3})")) == "options.num_predict");
    CHECK(wrong(chat(R"("options":{"temperature":"hot"})")) == "temperature");
    CHECK(wrong(chat(R"("format":"xml")")) == "format");
    CHECK(wrong(chat(R"("think":3)")) == "think");
    CHECK(wrong(chat(R"("stream":3)")) == "stream");
    CHECK(wrong(generate(R"("prompt":3)")) == "prompt");
    CHECK(wrong(generate(R"("prompt":"a","suffix":"b")")) == "suffix");
    CHECK(wrong(generate(R"("prompt":"a","template":"b")")) == "template");
    CHECK(wrong(generate(R"("prompt":"a","images":["x"])")) == "images");
    for (const char* bad :
         {R"({"messages":{}})", R"({"messages":[3]})", R"({"messages":[{"role":"tool","content":"1"}]})",
          R"({"messages":[{"role":"user","content":"a","tool_calls":[{}]}]})",
          R"({"messages":[{"role":"x","content":"a"}]})"}) {
        INFO(bad);
        CHECK(wrong(parse_ollama_chat(bad, limits(true))) == "messages");
    }
    for (const auto& [first, second] : {std::pair{1025, 0}, {1000, 25}}) { // in one message, or in two
        const auto calls = [](int n) {
            std::string text;
            for (int i = 0; i < n; i++) text += cat(i ? "," : "", R"({"function":{"name":"f"}})");
            return cat(R"({"role":"assistant","tool_calls":[)", text, "]}");
        };
        const auto r = parse_ollama_chat(cat(R"({"messages":[)", calls(first), ",", calls(second), "]}"), limits(true));
        REQUIRE(!r);
        CHECK(r.error().message.contains("1025 calls of tools without a result; 1024 are allowed"));
    }
    CHECK(wrong(parse_ollama_chat(R"({"messages":[{"role":"user","content":"a","images":["x"]}]})", limits(true))) ==
          "messages[0].images");
    for (const char* bad : {"", "[", "[]", "3"}) {
        CHECK(!parse_ollama_chat(bad, limits(true)).has_value());
        CHECK(!parse_ollama_generate(bad, limits(true)).has_value());
    }
    CHECK(error_body({404, "why", "model", ""}, error_form("/api/chat")) == R"({"error":"why"})");
}

TEST_CASE("Ollama's lines add up to the whole answer", "[ollama]") {
    ResponseHead head;
    head.id    = "1";
    head.model = "tiny";
    const Usage usage{10, 5, 4};
    Choice      thoughts, text, more, last, whole;
    thoughts.parts     = {thought("I see")};
    text.parts         = {text_part("It "), text_part("is"), call("f", R"({"city":)")};
    more.parts         = {quire::testing::more(R"("Ulm"})"), call("g", R"({"cut)")};
    last.finish_reason = "tool_calls";
    last.timings =
        Timings{.prompt_tokens = 10, .cached_tokens = 4, .generated_tokens = 5, .prompt_ms = 2, .generated_ms = 3};
    for (const Choice& c : {thoughts, text, more, last}) append(whole, c);
    const auto  stream = ollama_renderer(head, true);
    std::string sent   = stream->begin(usage);
    for (const Choice& c : {thoughts, text, more, last}) sent += stream->piece(c, usage);
    sent += stream->end(usage);
    CHECK(stream->type() == "application/x-ndjson");
    CHECK(stream->ping().empty());
    const std::vector<Plain> lines = lines_of(sent);
    Plain added{{"role", "assistant"}, {"content", ""}, {"thinking", ""}, {"tool_calls", Plain::array()}};
    for (const Plain& line : lines) {
        CHECK(line["done"] == (&line == &lines.back()));
        const Plain& m   = line["message"];
        added["content"] = added["content"].get<std::string>() + m["content"].get<std::string>();
        if (m.contains("thinking"))
            added["thinking"] = added["thinking"].get<std::string>() + m["thinking"].get<std::string>();
        if (m.contains("tool_calls"))
            for (const Plain& one : m["tool_calls"]) added["tool_calls"].push_back(one);
    }
    const Plain all = Plain::parse(ollama_renderer(head, true)->response({whole}, usage));
    CHECK(all["message"] == added);
    CHECK(added["content"] == "It is");
    CHECK(added["thinking"] == "I see");
    REQUIRE(added["tool_calls"].size() == 2);
    CHECK(added["tool_calls"][0]["function"]["arguments"]["city"] == "Ulm");
    CHECK(added["tool_calls"][1]["function"]["arguments"] == Plain::object()); // it was cut off
    for (const Plain& end : {lines.back(), all}) {
        CHECK(end["done_reason"] == "stop");
        CHECK(end["prompt_eval_count"] == 10);
        CHECK(end["eval_count"] == 5);
        CHECK(end["prompt_eval_duration"] == 2'000'000);
        CHECK(end["eval_duration"] == 3'000'000);
    }
    CHECK(lines_of(stream->failure({500, "why", "", ""}))[0]["error"] == "why");
    CHECK(lines_of(std::string(stream->out_of_memory()))[0].contains("error"));
    last.finish_reason = "length";
    CHECK(Plain::parse(ollama_renderer(head, false)->response({last}, usage))["done_reason"] == "length");
}

TEST_CASE("Ollama's routes answer as the chat does", "[server][ollama]") {
    const Server& s = common();
    const Plain   chat =
        s.ask("/v1/chat/completions", {{"messages", user("Hello")}, {"max_tokens", 12}, {"temperature", 0}});
    const std::string text = chat["choices"][0]["message"]["content"];
    const Plain       options{{"temperature", 0}, {"num_predict", 12}};
    const Plain       whole =
        s.ask("/api/chat", {{"model", "x"}, {"messages", user("Hello")}, {"stream", false}, {"options", options}});
    CHECK(whole["message"]["content"] == text);
    CHECK(whole["model"] == "x");
    CHECK(whole["eval_count"] == chat["usage"]["completion_tokens"]);
    const Reply r = s.post("/api/chat", {{"model", "x"}, {"messages", user("Hello")}, {"options", options}});
    CHECK(r.headers.at("content-type") == "application/x-ndjson");
    std::string streamed;
    for (const Plain& line : lines_of(r.body)) streamed += line["message"]["content"].get<std::string>();
    CHECK(streamed == text);
    const Plain answer =
        s.ask("/api/generate", {{"model", "x"}, {"prompt", "Hello"}, {"stream", false}, {"options", options}});
    CHECK(answer["response"] == text);
    CHECK(s.ask("/api/generate", {{"model", "x"}})["done_reason"] == "load");

    const Plain model = s.ask_get("/api/tags")["models"][0];
    CHECK(model["name"] == "quire-14m-q8_0:latest");
    CHECK(model["details"]["quantization_level"] == "Q8_0");
    CHECK(model["details"]["parameter_size"] == "14.16M");
    CHECK(s.ask_get("/api/ps")["models"][0]["context_length"] == 1024);
    CHECK(s.ask_get("/api/version").contains("version"));
    const Plain shown = s.ask("/api/show", {{"model", model["name"]}});
    CHECK(shown["model_info"]["general.architecture"] == "llama");
    CHECK(shown["capabilities"][0] == "completion");
    const Reply other = s.post("/api/show", {{"model", "llama3"}});
    CHECK(other.status == 404);
    CHECK(Plain::parse(other.body)["error"].is_string());
    const Plain vectors = s.ask("/api/embed", {{"model", "x"}, {"input", {"a", std::string(20000, 'b')}}});
    CHECK(vectors["embeddings"].size() == 2);
    CHECK(s.ask("/api/embeddings", {{"model", "x"}, {"prompt", "a"}})["embedding"] == vectors["embeddings"][0]);
    CHECK(s.post("/api/embed", {{"model", "x"}, {"input", std::string(20000, 'b')}, {"truncate", false}}).status ==
          400);
    const Reply wrong = s.post("/api/chat", {{"model", "x"}, {"messages", 3}});
    CHECK(wrong.status == 400);
    CHECK(Plain::parse(wrong.body)["error"].is_string());
    CHECK(Plain::parse(s.get("/api/nothing").body)["error"].is_string());
}
