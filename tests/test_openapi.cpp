// The description of the server's routes, compared with the answers of the server.
#include <catch2/catch_test_macros.hpp>

#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "http_client.h"
#include "process.h"
#include "server_process.h"

using namespace quire::testing;
using Json = nlohmann::json;

namespace {

bool is_of(const Json& value, const std::string& type) {
    if (type == "integer") return value.is_number_integer();
    if (type == "number") return value.is_number();
    if (type == "null") return value.is_null();
    if (type == "boolean") return value.is_boolean();
    if (type == "string") return value.is_string();
    return type == "array" ? value.is_array() : value.is_object();
}

// The first place where `value` does not fit the schema, of the keywords that answers have; "": it fits.
// `strict`: where a schema names members, a value has no others.
std::string misfit(const Json& schema, const Json& value, const std::string& where, bool strict = false) {
    if (schema.contains("const") && value != schema["const"]) return where + " is not " + schema["const"].dump();
    if (schema.contains("anyOf")) {
        std::string faults;
        for (const Json& one : schema["anyOf"]) {
            const std::string fault = misfit(one, value, where, strict);
            if (fault.empty()) return "";
            if (fault.find(" is not ") == std::string::npos) faults += fault + "; ";
        }
        return where + " fits none: " + faults;
    }
    if (schema.contains("type") && !is_of(value, schema["type"])) return where + " is no " + schema["type"].dump();
    for (const Json& name : schema.value("required", Json::array()))
        if (!value.contains(name.get<std::string>())) return where + " has no " + name.dump();
    if (schema.contains("properties"))
        for (const auto& [name, of] : schema["properties"].items())
            if (value.contains(name))
                if (std::string fault = misfit(of, value[name], where + "." + name, strict); !fault.empty())
                    return fault;
    if (strict && schema.contains("properties"))
        for (const auto& [name, of] : value.items())
            if (!schema["properties"].contains(name)) return where + " has " + name;
    if (schema.contains("items"))
        for (const Json& item : value)
            if (std::string fault = misfit(schema["items"], item, where + "[]", strict); !fault.empty()) return fault;
    return "";
}

Json description() {
    static const Json d = common().ask_get("/openapi.json");
    return d;
}

Json body_of(const std::string& path) {
    return description()["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"];
}

// As many segments may be anything: a request that finds something.
std::string address(const Server& s, std::string path, const std::string& method) {
    const auto any = path.find("{id}");
    if (any == std::string::npos) return path;
    const bool slots = path.starts_with("/slots");
    path.replace(
        any, 4,
        slots ? "0" : s.ask("/v1/responses", {{"input", "Hi"}, {"max_output_tokens", 1}})["id"].get<std::string>());
    return slots && method == "post" ? path + "?action=erase" : path;
}

} // namespace

TEST_CASE("every answer is as /openapi.json describes it", "[server][openapi]") {
    char folder[] = "/tmp/quire-slots-XXXXXX";
    REQUIRE(mkdtemp(folder));
    const Server s({"--slot-save-path", folder, "--kv-host-bytes", "64M"});
    const Json   all = s.ask_get("/openapi.json");
    // Answers that are streams, and requests that this model refuses.
    const std::vector<std::string> streams{"/blocks/events"},
        refused{"/infill", "/rerank", "/v1/rerank", "/lora-adapters post"};
    int n = 0;
    for (const auto& [path, methods] : all["paths"].items())
        for (const auto& [method, operation] : methods.items()) {
            if (std::ranges::find(streams, path) != streams.end()) continue;
            const std::string at      = address(s, path, method);
            const Json&       content = operation["responses"]["200"]["content"];
            std::string       example = "{}";
            if (operation.contains("requestBody")) {
                Json body = operation["requestBody"]["content"]["application/json"]["example"];
                if (content.contains("application/x-ndjson")) body["stream"] = false;
                if (content.contains("text/event-stream")) body["max_tokens"] = 2;
                if (path.ends_with("/responses")) body.erase("max_tokens");
                if (path == "/unpin") body["id"] = s.ask("/pin", {{"prompt", "Hello"}})["id"];
                example = body.dump();
            }
            Client client = s.client();
            if (method == "delete") CHECK(client.send("DELETE " + at + " HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"));
            const Reply r = method == "get"    ? s.get(at)
                            : method == "post" ? s.client().post(at, example)
                                               : client.reply();
            INFO(method << ' ' << at << ' ' << example << ": " << r.status << ' ' << r.body.substr(0, 500));
            const bool refuses = std::ranges::find(refused, path) != refused.end() ||
                                 std::ranges::find(refused, path + " " + method) != refused.end();
            const Json& answer = operation["responses"][refuses ? r.status < 500 ? "4XX" : "5XX" : "200"]["content"];
            CHECK((r.status != 200) == refuses);
            if (answer.contains("application/json"))
                CHECK(misfit(answer["application/json"]["schema"], Json::parse(r.body), "the answer") == "");
            else CHECK(answer.contains("text/plain"));
            n++;
        }
    CHECK(n > 60);
    CHECK(std::system(("rm -r " + std::string(folder)).c_str()) == 0);
}

TEST_CASE("every event of a stream is as /openapi.json describes it", "[server][openapi]") {
    const Server s({"--chat-template-file", QUIRE_ROOT "/tests/data/templates/qwen3.jinja"});
    const Json   all = s.ask_get("/openapi.json")["paths"];
    // Its prompts begin to reason.
    const std::string file = temporary();
    std::ofstream(file) << "{% for m in messages %}{{ m.content }}\n{% endfor %}<think>\n";
    const Server t({"--chat-template-file", file, "--reasoning-budget", "3"});
    const Json   args{{"type", "object"},
                      {"properties", {{"a", {{"enum", {"x"}}}}}},
                      {"required", {"a"}},
                      {"additionalProperties", false}};
    const Json   chat{{"messages", {{{"role", "user"}, {"content", "Hi"}}}}};
    const Json   by_tool{{"tools", {{{"type", "function"}, {"function", {{"name", "f"}, {"parameters", args}}}}}},
                         {"tool_choice", "required"},
                         {"enable_thinking", false}};
    std::set<std::string> seen; // kinds of events
    const auto            stream = [&](const std::string& path, Json body, const Json& more = Json::object(),
                            const Server* other = nullptr) {
        body.update(more);
        const bool lines = path.starts_with("/api/");
        body.update(Json{{"stream", true}, {"temperature", 0}});
        const Json& content = all[path]["post"]["responses"]["200"]["content"];
        const Json& schema  = content[lines ? "application/x-ndjson" : "text/event-stream"]["schema"];
        const Reply r       = (other ? *other : s).post(path, body);
        INFO(path << ' ' << body.dump() << ": " << r.body.substr(0, 300));
        CHECK(r.status == 200);
        std::stringstream text(r.body);
        int               n = 0;
        for (std::string line; std::getline(text, line);) {
            if (!lines && !line.starts_with("data: ")) continue;
            if (!lines) line = line.substr(6);
            const Json text_of = schema.value("properties", Json::object()).value("data", Json::object());
            if (line == "[DONE]") {
                CHECK(text_of["anyOf"][1] == Json{{"const", line}});
                continue;
            }
            const Json data = Json::parse(line);
            const Json of   = lines                       ? schema
                                         : text_of.contains("anyOf") ? text_of["anyOf"][0]["contentSchema"]
                                                                     : text_of["contentSchema"];
            CHECK(of["anyOf"].size() > 1);
            INFO(line.substr(0, 600));
            CHECK(misfit(of, data, "the event", true) == "");
            if (data.is_object() && data.contains("type")) seen.insert(data["type"].get<std::string>());
            n++;
        }
        CHECK(n > 0); // a slow client gets several tokens in one event
    };
    const Json wishes{{"return_progress", true},
                      {"timings_per_token", true},
                      {"stream_options", {{"include_usage", true}}},
                      {"return_token_ids", true}};
    for (const char* path : {"/v1/chat/completions", "/chat/completions"}) {
        stream(path, chat, {{"max_tokens", 2}});
        stream(path, chat, by_tool);
        stream(path, chat, {{"max_tokens", 20}}, &t);
        Json with = wishes;
        with.update(Json{{"max_tokens", 2}, {"logprobs", true}, {"top_logprobs", 2}, {"verbose", true}});
        stream(path, chat, with);
    }
    stream("/v1/completions", {{"prompt", "Hi"}, {"max_tokens", 2}});
    stream("/v1/completions", {{"prompt", "Hi"}, {"max_tokens", 2}, {"logprobs", 1}, {"verbose", true}}, wishes);
    stream("/completions", {{"prompt", "Hi"}, {"max_tokens", 2}});
    for (const char* path : {"/completions", "/completion"})
        stream(path, {{"prompt", "Hi"}, {"n_predict", 2}, {"n_probs", 2}}, wishes);
    const Json said{{"input", "Hi"}, {"max_output_tokens", 60}};
    const Json function{{"type", "function"}, {"name", "f"}, {"parameters", args}};
    stream("/v1/responses", said,
           {{"max_output_tokens", 2}, {"include", {"message.output_text.logprobs"}}, {"top_logprobs", 1}});
    stream("/v1/responses", said, {{"tools", {function}}, {"tool_choice", "required"}, {"enable_thinking", false}});
    stream("/v1/responses", said, {{"max_output_tokens", 20}}, &t);
    stream("/v1/messages", chat, {{"max_tokens", 2}});
    stream("/v1/messages", chat, {{"max_tokens", 20}}, &t);
    stream("/api/chat", chat, {{"options", {{"num_predict", 20}}}}, &t);
    stream("/v1/messages", chat,
           {{"max_tokens", 60},
            {"thinking", {{"type", "disabled"}}},
            {"tools", {{{"name", "f"}, {"input_schema", args}}}},
            {"tool_choice", {{"type", "any"}}}});
    stream("/api/chat", chat, {{"options", {{"num_predict", 2}}}});
    stream("/api/generate", {{"prompt", "Hi"}, {"options", {{"num_predict", 2}}}});
    for (const char* kind : {"response.created",
                             "response.in_progress",
                             "response.output_item.added",
                             "response.content_part.added",
                             "response.output_text.delta",
                             "response.output_text.done",
                             "response.reasoning_text.delta",
                             "response.reasoning_text.done",
                             "response.content_part.done",
                             "response.function_call_arguments.delta",
                             "response.function_call_arguments.done",
                             "response.output_item.done",
                             "response.completed",
                             "response.incomplete",
                             "message_start",
                             "content_block_start",
                             "content_block_delta",
                             "content_block_stop",
                             "message_delta",
                             "message_stop"}) {
        INFO(kind);
        CHECK(seen.contains(kind));
    }
    unlink(file.c_str());
    Json both = long_one; // seen by the watcher in any case
    both["n"] = 2;
    for (const char* path : {"/blocks/events", "/blocks/events?changes=1"}) {
        const Json& of = all["/blocks/events"]["get"]["responses"]["200"]["content"]["text/event-stream"]["schema"];
        Client      watcher = s.client(), busy = s.client();
        watcher.send(std::string("GET ") + path + " HTTP/1.1\r\nHost: x\r\n\r\n");
        CHECK(watcher.head().status == 200);
        bool used = false;
        for (int n = 0; n < 3 || !used; n++) {
            const Json event = Json::parse(watcher.event());
            INFO(path << ' ' << event.dump().substr(0, 600));
            CHECK(misfit(of["properties"]["data"]["contentSchema"], event, "the event", true) == "");
            used = used || !event["sequences"].empty();
            if (n == 0) busy.send(Client::request("/v1/completions", both.dump()));
        }
        busy.hang_up();
    }
    // The whole answer of llama.cpp's form has no member that is not described.
    const Json& content = all["/completion"]["post"]["responses"]["200"]["content"];
    for (const Json& more :
         {Json::object(), Json{{"n_probs", 2}}, Json{{"n_probs", 2}, {"post_sampling_probs", true}}, Json{{"n", 2}}}) {
        Json body{{"prompt", "Hi"}, {"n_predict", 2}, {"return_tokens", true}};
        body.update(more);
        CHECK(misfit(content["application/json"]["schema"], s.ask("/completion", body), "the answer", true) == "");
    }
}

TEST_CASE("the description's types are those that the parsers ask for", "[server][openapi]") {
    const Server& s     = common();
    int           n     = 0;
    const Json    all   = description();
    const Json    odd[] = {Json::array({Json::array()}), Json{{"a", Json::object()}}, true, "?", -2.5};
    for (const auto& [path, methods] : all["paths"].items()) {
        if (!methods.contains("post") || !methods["post"].contains("requestBody") || path.starts_with("/slots"))
            continue;
        if (!path.starts_with("/v1/") && all["paths"].contains("/v1" + path)) continue;
        const Json body = methods["post"]["requestBody"]["content"]["application/json"];
        if (body["schema"]["type"] == "array") continue;
        for (const auto& [name, schema] : body["schema"]["properties"].items()) {
            if (!schema.contains("type")) continue;
            const Json& types = schema["type"];
            for (const Json& value : odd) {
                bool fits = false;
                for (const Json& type : types.is_array() ? types : Json::array({types}))
                    fits = fits || is_of(value, type);
                if (fits) continue;
                Json request  = body["example"];
                request[name] = value;
                const Reply r = s.post(path, request);
                INFO(path << ' ' << request.dump() << ": " << r.body.substr(0, 200));
                CHECK(r.status == 400);
                n++;
                break;
            }
        }
    }
    CHECK(n > 500);
}

TEST_CASE("the description lists no value that its route refuses", "[server][openapi]") {
    const Server& s   = common();
    int           n   = 0;
    const Json    all = description();
    for (const auto& [path, methods] : all["paths"].items()) {
        if (!methods.contains("post") || !methods["post"].contains("requestBody") || path.starts_with("/slots"))
            continue;
        const Json body = methods["post"]["requestBody"]["content"]["application/json"];
        for (const auto& [name, schema] : body["schema"].value("properties", Json::object()).items()) {
            if (!schema.contains("enum") || name == "early_stopping") continue; // which needs use_beam_search
            for (const Json& value : schema["enum"]) {
                Json request  = body["example"];
                request[name] = value;
                for (const char* most : {"max_tokens", "max_output_tokens", "n_predict"})
                    if (body["schema"]["properties"].contains(most)) request[most] = 1;
                const Reply r = s.post(path, request);
                INFO(path << ' ' << request.dump() << ": " << r.body.substr(0, 200));
                CHECK((r.status == 200 || r.status == 501)); // 501: not by this model
                n++;
            }
        }
    }
    CHECK(n > 500);
}

TEST_CASE("bodies: required fields, those that are passed on, values by name", "[server][openapi]") {
    CHECK(body_of("/v1/chat/completions")["required"] == Json::array({"messages"}));
    CHECK(body_of("/v1/embeddings")["properties"]["encoding_format"]["enum"] ==
          Json::array({"float", "base64", nullptr}));
    // A field of quire's own has one meaning in every API; one whose result only a chat shows is in chats alone.
    for (const char* path : {"/v1/responses", "/v1/messages", "/infill"}) {
        INFO(path);
        CHECK(body_of(path)["properties"]["top_k"] == body_of("/v1/chat/completions")["properties"]["top_k"]);
        CHECK(body_of(path)["properties"].contains("best_of") == (std::string(path) == "/infill"));
    }
    CHECK(!body_of("/v1/responses")["properties"].contains("messages"));
}
