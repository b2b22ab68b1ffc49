// quire.serve.openapi: the description of the server's routes for programs (OpenAPI 3.1). Which fields a body may have, their types and their
// ranges are recorded while the route's own parser reads an example; openapi_answers has the answers. Owns nothing.
export module quire.serve.openapi;

import quire.core.base;
import quire.core.version;
import quire.serve.anthropic.request;
import quire.serve.api.json_fields;
import quire.serve.api.limits;
import quire.serve.llama_cpp.adapters_api;
import quire.serve.llama_cpp.api;
import quire.serve.models.models_api;
import quire.serve.ollama.request;
import quire.serve.openai.api;
import quire.serve.openai.embeddings;
import quire.serve.openai.request;
import quire.serve.openai.responses_request;
import quire.serve.openapi_answers;
import quire.serve.status.text_request;

export namespace quire {

struct ApiRoute {
    std::string method, path;     // a segment `*` is any one
    bool        of_model = false; // of one of several models, which its address may name
};

// The text of /openapi.json.
std::string openapi_text(const ApiLimits& limits, std::span<const ApiRoute> routes);

} // namespace quire

module :private;

namespace quire {

using Check = std::optional<ApiError> (*)(std::string_view json, const ApiLimits& limits);

template <class T>
std::optional<ApiError> error_in(const Parsed<T>& parsed) {
    return parsed ? std::nullopt : std::optional(parsed.error());
}

// The purpose of a route; of one with a body, an example and the function that reads it.
struct RouteRow {
    std::string_view path; // without /v1
    std::string_view summary;
    std::string_view example = ""; // "": there is no body
    Check            check   = nullptr;
};

constexpr std::string_view chat_example = R"({"messages":[{"role":"user","content":"Hi"}]})";

const RouteRow route_rows[] = {
    {"/completions", "Continues a prompt.", R"({"prompt":"Hi"})",
     [](std::string_view t, const ApiLimits& l) { return error_in(parse_completion_request(t, l)); }},
    {"/chat/completions", "Answers a chat.", chat_example,
     [](std::string_view t, const ApiLimits& l) { return error_in(parse_chat_request(t, l)); }},
    {"/chat/completions/input_tokens", "Counts the tokens of a chat's prompt.", chat_example,
     [](std::string_view t, const ApiLimits& l) { return error_in(parse_chat_request(t, l)); }},
    {"/chat/completions/control", "Ends the reasoning of a chat's answer that runs.",
     R"({"id":"a","action":"reasoning_end"})",
     [](std::string_view t, const ApiLimits& l) { return error_in(parse_control_request(t, l)); }},
    {"/completion", "Continues a prompt, in llama.cpp's form.", R"({"prompt":"Hi"})",
     [](std::string_view t, const ApiLimits& l) { return error_in(parse_native_request(t, l)); }},
    {"/infill", "Fills in the text between two texts.", R"({"input_prefix":"a","input_suffix":"b"})",
     [](std::string_view t, const ApiLimits& l) { return error_in(parse_infill_request(t, l)); }},
    {"/slots", "Lists the sequences that run."},
    {"/slots/*", "Saves the text of a slot to a file, restores it, or erases it.", R"({"filename":"chat"})",
     [](std::string_view t, const ApiLimits& l) { return error_in(parse_slot_request(t, l)); }},
    {"/responses", "Makes a response.", R"({"input":"Hi"})",
     [](std::string_view t, const ApiLimits& l) { return error_in(parse_responses_request(t, l)); }},
    {"/responses/input_tokens", "Counts the tokens of a response's prompt.", R"({"input":"Hi"})",
     [](std::string_view t, const ApiLimits& l) { return error_in(parse_responses_request(t, l)); }},
    {"/responses/*", "A response that is stored: gives it, or deletes it."},
    {"/responses/*/input_items", "Lists the items before the output of a stored response."},
    {"/messages", "Answers a conversation in Anthropic's form.",
     R"({"max_tokens":8,"messages":[{"role":"user","content":"Hi"}]})",
     [](std::string_view t, const ApiLimits& l) { return error_in(parse_messages_request(t, l, false)); }},
    {"/messages/count_tokens", "Counts the tokens of such a conversation.", chat_example,
     [](std::string_view t, const ApiLimits& l) { return error_in(parse_messages_request(t, l, true)); }},
    {"/api/chat", "Answers a chat in Ollama's form.", R"({"model":"","messages":[{"role":"user","content":"Hi"}]})",
     [](std::string_view t, const ApiLimits& l) { return error_in(parse_ollama_chat(t, l)); }},
    {"/api/generate", "Answers a prompt in Ollama's form.", R"({"model":"","prompt":"Hi"})",
     [](std::string_view t, const ApiLimits& l) { return error_in(parse_ollama_generate(t, l)); }},
    {"/api/embed", "Makes vectors of texts, in Ollama's form.", R"({"input":"Hi"})",
     [](std::string_view t, const ApiLimits& l) { return error_in(parse_ollama_embed(t, "input", l)); }},
    {"/api/embeddings", "Makes a vector of a text, in Ollama's older form.", R"({"prompt":"Hi"})",
     [](std::string_view t, const ApiLimits& l) { return error_in(parse_ollama_embed(t, "prompt", l)); }},
    {"/api/tags", "Lists the model in Ollama's form."},
    {"/api/show", "Describes the model in Ollama's form.", R"({"model":""})",
     [](std::string_view t, const ApiLimits& l) { return error_in(parse_ollama_show(t, l)); }},
    {"/api/ps", "Lists the loaded model in Ollama's form."},
    {"/api/version", "The version in Ollama's form."},
    {"/embeddings", "Makes vectors of texts.", R"({"input":"Hi"})",
     [](std::string_view t, const ApiLimits& l) { return error_in(parse_embedding_request(t, l)); }},
    {"/rerank", "Orders documents by their relevance to a query.", R"({"query":"a","documents":["b"]})",
     [](std::string_view t, const ApiLimits& l) { return error_in(parse_rerank_request(t, l)); }},
    {"/models", "Lists the models."},
    {"/models/*", "One name of a model."},
    {"/models/load", "Loads a model.", R"({"model":"a"})",
     [](std::string_view t, const ApiLimits& l) { return error_in(parse_model_request(t, l)); }},
    {"/models/unload", "Lets a model go when its requests are answered.", R"({"model":"a"})",
     [](std::string_view t, const ApiLimits& l) { return error_in(parse_model_request(t, l)); }},
    {"/models/sse", "Changes of the models' status, as events."},
    {"/health", "Whether the engine works."},
    {"/health/ready", "Whether the engine works."},
    {"/health/live", "Whether the process answers."},
    {"/ping", "Whether the engine works."},
    {"/load", "Counts the requests that wait or run."},
    {"/tokenize", "Turns a text or a chat into tokens.", R"({"content":"Hi"})",
     [](std::string_view t, const ApiLimits& l) { return error_in(parse_text_request(t, l)); }},
    {"/detokenize", "Turns tokens into a text.", R"({"tokens":[]})",
     [](std::string_view t, const ApiLimits& l) { return error_in(parse_detokenize_request(t, l)); }},
    {"/tokenizer_info", "Names the special tokens."},
    {"/apply-template", "Turns a chat into the text of its prompt.", chat_example,
     [](std::string_view t, const ApiLimits& l) { return error_in(parse_text_request(t, l)); }},
    {"/lora-adapters", "The adapters with their scales: gives them, or sets the scales.", R"([{"id":0,"scale":1}])",
     [](std::string_view t, const ApiLimits& l) { return error_in(parse_adapter_uses(t, l)); }},
    {"/metrics", "Metrics for Prometheus."},
    {"/kv_event_sources", "Says where KV events are sent."},
    {"/props", "The server's settings."},
    {"/blocks", "The KV memory now."},
    {"/blocks/events", "The KV memory as a stream of changes."},
    {"/version", "The server's version."},
    {"/pin", "Computes the KV of a prefix and keeps it.", R"({"prompt":"Hi"})",
     [](std::string_view t, const ApiLimits& l) { return error_in(parse_text_request(t, l)); }},
    {"/unpin", "Gives up such a prefix.", R"({"id":"1"})",
     [](std::string_view t, const ApiLimits& l) { return error_in(parse_id_request(t, l)); }},
    {"/pins", "Lists these prefixes."},
    {"/openapi.json", "This description."},
};

// A field's schema with null, which means the default everywhere.
Json with_null(Json recorded) {
    if (recorded.contains("type")) {
        Json types = recorded["type"].is_array() ? recorded["type"] : Json::array({recorded["type"]});
        types.push_back("null");
        recorded["type"] = std::move(types);
    }
    if (recorded.contains("anyOf")) recorded["anyOf"].push_back({{"type", "null"}});
    if (recorded.contains("enum")) recorded["enum"].push_back(nullptr);
    return recorded;
}

// The schema of the bodies that `row` takes. A field without which its example fails is required.
Json body_schema(const RouteRow& row, const ApiLimits& limits) {
    RecordedFields fields;
    next_recorded() = &fields;
    (void)row.check(row.example, limits);
    next_recorded()     = nullptr;
    const Json example  = Json::parse(row.example);
    const bool listed   = example.is_array(); // a list of objects with the fields
    Json       required = Json::array();
    for (auto at = example.begin(); !listed && at != example.end(); ++at) {
        Json without = example;
        without.erase(at.key());
        const std::optional<ApiError> error = row.check(json_dump(without), limits);
        if (error && !error->message.starts_with("one of ")) required.push_back(at.key()); // else another does as well
    }
    Json out{{"type", "object"}}, properties = Json::object();
    for (auto& [name, recorded] : fields.fields)
        properties[name] = std::ranges::find(required, Json(name)) != required.end() ? recorded : with_null(recorded);
    out["properties"] = std::move(properties);
    if (!required.empty()) out["required"] = std::move(required);
    return listed ? Json{{"type", "array"}, {"items", std::move(out)}} : out;
}

Json query_parameters(std::string_view path, bool of_model) {
    const auto one = [](const char* name, Json schema, const char* where = "query") {
        return Json{{"name", name}, {"in", where}, {"required", where == std::string_view("path")}, {"schema", schema}};
    };
    Json out = Json::array();
    if (path.contains("/*")) out.push_back(one("id", {{"type", "string"}}, "path"));
    if (path.ends_with("/input_items")) {
        out.push_back(one("limit", {{"type", "integer"}, {"minimum", 1}, {"maximum", 100}}));
        out.push_back(one("order", {{"enum", {"asc", "desc"}}}));
        out.push_back(one("after", {{"type", "string"}}));
    }
    constexpr std::string_view by_model[] = {"/health", "/load", "/metrics", "/props"};
    if (of_model || std::ranges::find(by_model, path) != std::end(by_model))
        out.push_back(one("model", {{"type", "string"}}));
    if (of_model) out.push_back(one("autoload", {{"enum", {"true", "false"}}}));
    if (path == "/models") out.push_back(one("reload", {{"type", "string"}}));
    if (path == "/slots") out.push_back(one("fail_on_no_slot", {{"type", "string"}}));
    if (path == "/slots/*") out.push_back(one("action", {{"enum", {"save", "restore", "erase"}}}));
    if (path == "/blocks/events") out.push_back(one("changes", {{"type", "string"}}));
    return out;
}

std::string openapi_text(const ApiLimits& limits, std::span<const ApiRoute> routes) {
    Json paths = Json::object();
    for (const ApiRoute& route : routes) {
        const std::string_view bare =
            route.path.starts_with("/v1/") ? std::string_view(route.path).substr(3) : route.path;
        const bool             named = route.method == "GET" && bare.starts_with("/models/") && bare != "/models/sse";
        const std::string_view known = named ? "/models/*" : bare;
        const auto             row   = std::ranges::find(route_rows, known, &RouteRow::path);
        check(row != std::end(route_rows), "a route that /openapi.json does not describe");
        Json       operation{{"summary", row->summary}};
        const Json error{{"application/json", {{"schema", error_schema(route.path)}}}};
        operation["responses"] = {
            {"200",
             {{"description", "The answer."}, {"content", answer_content(route.method, named ? known : route.path)}}},
            {"4XX", {{"description", "Why the request is refused."}, {"content", error}}},
            {"5XX",
             {{"description", "Why there is no answer now (503), or none by this server or model (500, 501)."},
              {"content", error}}}};
        if (Json parameters = query_parameters(known == bare ? bare : route.path, route.of_model); !parameters.empty())
            operation["parameters"] = std::move(parameters);
        if (route.method == "POST" && !row->example.empty())
            operation["requestBody"] = {
                {"required", true},
                {"content",
                 {{"application/json",
                   {{"schema", body_schema(*row, limits)}, {"example", Json::parse(row->example)}}}}}};
        std::string path = route.path;
        if (const std::size_t any = path.find("/*"); any != std::string::npos)
            path.replace(any, path.ends_with("/**") ? 3 : 2, "/{id}");
        paths[path][route.method == "GET" ? "get" : route.method == "POST" ? "post" : "delete"] = std::move(operation);
    }
    Json out{{"openapi", "3.1.0"}, {"info", {{"title", "quire"}, {"version", quire_version}}}};
    out["paths"]      = std::move(paths);
    out["components"] = {{"securitySchemes", {{"key", {{"type", "http"}, {"scheme", "bearer"}}}}}};
    out["security"]   = Json::array({Json::object(), {{"key", Json::array()}}});
    return json_dump(std::move(out));
}

} // namespace quire
