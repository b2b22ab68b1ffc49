// The description of the server's routes, compared with the answers of the server.
#include <catch2/catch_test_macros.hpp>

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
std::string misfit(const Json& schema, const Json& value, const std::string& where) {
    if (schema.contains("type") && !is_of(value, schema["type"])) return where + " is no " + schema["type"].dump();
    for (const Json& name : schema.value("required", Json::array()))
        if (!value.contains(name.get<std::string>())) return where + " has no " + name.dump();
    if (schema.contains("properties"))
        for (const auto& [name, of] : schema["properties"].items())
            if (value.contains(name))
                if (std::string fault = misfit(of, value[name], where + "." + name); !fault.empty()) return fault;
    if (schema.contains("items"))
        for (const Json& item : value)
            if (std::string fault = misfit(schema["items"], item, where + "[]"); !fault.empty()) return fault;
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
