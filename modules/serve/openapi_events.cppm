// quire.serve.openapi_events: the events of the routes' streams, for their description: an example of each event's data, and the schema that it
// stands for. tests/test_openapi.cpp compares them with the streams of a server. Owns nothing.
export module quire.serve.openapi_events;

import quire.core.base;
import quire.core.json;

export namespace quire {

// The schema of values like the example. They have its members, with its types; but for those whose name ends in `?`, which a value may lack,
// and null, which stands for any value. A list's first element stands for all; an empty list, and an object, may have any.
Json schema_like(const Json& example);
// The schema of an answer in llama.cpp's form.
Json native_schema();
// The schema of the KV memory; `changes`: with the blocks that changed in place of all.
Json memory_schema(bool changes);
// The schema of the JSON in one event of a route's stream, or of one line of it. `path`: of the route, without /v1 where its stream does not
// depend on it. `response`: the schema of OpenAI's response. Empty: any event.
Json event_schema(std::string_view path, const Json& response);
// The schema of such an event, whose `data` is a text (OpenAPI 3.2, "Server-Sent Event Streams").
Json sse_schema(std::string_view path, const Json& response);

} // namespace quire

module :private;

namespace quire {

// An event that the streams of these routes have.
struct EventRow {
    std::string_view paths, example;
};

// Their streams end with an event that is no JSON.
constexpr std::string_view done_routes = "/chat/completions /v1/completions /completions";

constexpr std::string_view openai_routes = "/chat/completions /v1/completions /completions /completion /infill";

constexpr EventRow event_rows[] = {
    {"/chat/completions",
     R"({"id":"chatcmpl-1","object":"chat.completion.chunk","created":1795719310,"model":"a","system_fingerprint":"quire-0.1",
     "choices":[{"index":0,"delta":{"role?":"assistant","content?":null,"reasoning_content?":"",
     "tool_calls?":[{"index":0,"id?":"call_1","type?":"function","function":{"name?":"f","arguments":"{}"}}]},
     "logprobs":null,"finish_reason":null,"stop_reason?":null,"token_ids?":[1]}],
     "prompt_token_ids?":[1],"usage?":null,"timings?":{},"prompt_progress?":{},"__verbose?":{}})"},
    {"/v1/completions /completions",
     R"({"id":"cmpl-1","object":"text_completion","created":1795719310,"model":"a","system_fingerprint":"quire-0.1",
     "choices":[{"index":0,"text":"Hi","logprobs":null,"finish_reason":null,"stop_reason?":null,"token_ids?":[1],
     "prompt_token_ids?":[1]}],"usage?":null,"timings?":{},"prompt_progress?":{},"__verbose?":{}})"},
    {"/completion /infill /completions", // a piece, then the end of an answer
     R"({"index":0,"content":"Hi","tokens":[1],"stop":false,"id_slot":-1,"tokens_predicted":1,"tokens_evaluated":1,
     "timings?":{},"prompt_progress?":{},"completion_probabilities?":[]})"},
    {"/completion /infill /completions", "end"},
    {openai_routes, R"({"error":{"message":"why","type":"unavailable_error","param":null,"code":null}})"},
    {"/responses", R"({"type":"response.created","response":"response","sequence_number":0})"},
    {"/responses", R"({"type":"response.in_progress","response":"response","sequence_number":1})"},
    {"/responses", R"({"type":"response.output_item.added","output_index":0,"item":{},"sequence_number":2})"},
    {"/responses",
     R"({"type":"response.content_part.added","item_id":"a","output_index":0,"content_index":0,"part":{},"sequence_number":3})"},
    {"/responses",
     R"({"type":"response.output_text.delta","item_id":"a","output_index":0,"content_index":0,"delta":"Hi","logprobs?":[],
     "timings?":{},"sequence_number":4})"},
    {"/responses",
     R"({"type":"response.output_text.done","item_id":"a","output_index":0,"content_index":0,"text":"Hi","logprobs?":[],
     "sequence_number":5})"},
    {"/responses",
     R"({"type":"response.reasoning_text.delta","item_id":"a","output_index":0,"content_index":0,"delta":"Hi","logprobs?":[],
     "timings?":{},"sequence_number":4})"},
    {"/responses",
     R"({"type":"response.reasoning_text.done","item_id":"a","output_index":0,"content_index":0,"text":"Hi","sequence_number":5})"},
    {"/responses",
     R"({"type":"response.content_part.done","item_id":"a","output_index":0,"content_index":0,"part":{},"sequence_number":6})"},
    {"/responses",
     R"({"type":"response.function_call_arguments.delta","item_id":"a","output_index":0,"delta":"{","sequence_number":3})"},
    {"/responses",
     R"({"type":"response.function_call_arguments.done","item_id":"a","output_index":0,"name":"f","arguments":"{}",
     "sequence_number":4})"},
    {"/responses",
     R"({"type":"response.custom_tool_call_input.delta","item_id":"a","output_index":0,"delta":"a","sequence_number":3})"},
    {"/responses",
     R"({"type":"response.custom_tool_call_input.done","item_id":"a","output_index":0,"input":"a","sequence_number":4})"},
    {"/responses", R"({"type":"response.output_item.done","output_index":0,"item":{},"sequence_number":7})"},
    {"/responses", R"({"type":"response.completed","response":"response","sequence_number":8,"timings?":{}})"},
    {"/responses", R"({"type":"response.incomplete","response":"response","sequence_number":8,"timings?":{}})"},
    {"/responses", R"({"type":"response.failed","response":"response","sequence_number":8})"},
    {"/messages",
     R"({"type":"message_start","message":{"id":"msg_1","type":"message","role":"assistant","model":"a","content":[],
     "stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":1,"cache_creation_input_tokens":0,
     "cache_read_input_tokens":8,"output_tokens":1}}})"},
    {"/messages",
     R"({"type":"content_block_start","index":0,"content_block":{"type":"text","text?":"","thinking?":"","signature?":"",
     "id?":"toolu_1","name?":"f","input?":{}}})"},
    {"/messages",
     R"({"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text?":"Hi","thinking?":"","signature?":"",
     "partial_json?":"{"}})"},
    {"/messages", R"({"type":"content_block_stop","index":0})"},
    {"/messages",
     R"({"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},"usage":{"input_tokens":1,
     "cache_creation_input_tokens":0,"cache_read_input_tokens":8,"output_tokens":8}})"},
    {"/messages", R"({"type":"message_stop"})"},
    {"/messages", R"({"type":"ping"})"},
    {"/messages", R"({"type":"error","error":{"type":"api_error","message":"why"}})"},
    {"/api/chat",
     R"({"model":"a","created_at":"2026-11-26T18:55:11.619245Z","message":{"role":"assistant","content":"Hi",
     "thinking?":"","tool_calls?":[{"function":{"index?":0,"name":"f","arguments":{}}}]},"logprobs?":[],"done":false,
     "done_reason?":"stop","total_duration?":1,"load_duration?":0,"prompt_eval_count?":9,"prompt_eval_duration?":1,
     "eval_count?":9,"eval_duration?":1})"},
    {"/api/generate",
     R"({"model":"a","created_at":"2026-11-26T18:55:11.619245Z","response":"Hi","thinking?":"","logprobs?":[],"done":false,
     "done_reason?":"stop","context?":[],"total_duration?":1,"load_duration?":0,"prompt_eval_count?":9,
     "prompt_eval_duration?":1,"eval_count?":9,"eval_duration?":1})"},
    {"/api/chat /api/generate", R"({"error":"why"})"},
    {"/models/sse", R"({"model":"a","event":"model_status","data?":{}})"},
    {"/blocks/events", "memory"}, // the first event, and with ?changes=1 the others
    {"/blocks/events", "changes of memory"},
};

// The KV memory (docs/block-viz.md).
constexpr std::string_view memory_example =
    R"({"step":71,"label":"a","block_size":16,"context":1024,"swap_blocks":0,"swap_used":0,"host_cached":0,"in_files":0,
    "totals":{"blocks":4096,"used":1,"cached":1,"free":4094,"pinned":0,"shared":0,"internal_waste":0.5,"saved_by_sharing":0.5},
    "sequences":[{"request":1,"index":0,"status":"running","prompt":5,"tokens":9,"computed":8,"blocks":[1],"released?":1,
    "other_groups?":[{"released":0,"blocks":[1]}],"state?":{"tokens":8,"blocks":[1]},"texts?":["a"],"texts_kept?":1}],
    "events":[{"kind":"allocate","request?":1,"index?":0,"from?":1,"to?":1}],
    "blocks":[{"refs":0,"filled":0,"pinned?":true,"hash?":"00","group?":1,"state?":true,"first?":1}]})";

// The end of an answer in llama.cpp's form, which is also the whole answer; the field `response_fields` may leave out any member.
constexpr std::string_view native_end =
    R"({"index?":0,"content?":"Hi","tokens?":[1],"id_slot?":-1,"stop?":true,"model?":"a","tokens_predicted?":2,
    "tokens_evaluated?":1,"generation_settings?":{},"prompt?":"Hi","has_new_line?":false,"truncated?":false,
    "stop_type?":"limit","stopping_word?":"","tokens_cached?":0,"timings?":{},
    "completion_probabilities?":[{"id":1,"token":"a","bytes":[97],"logprob?":-0.5,"top_logprobs?":[{"id":1,"token":"a",
    "bytes":[97],"logprob":-0.5}],"prob?":0.5,"top_probs?":[{"id":1,"token":"a","bytes":[97],"prob":0.5}]}]})";

Json schema_like(const Json& example) {
    if (example.is_null()) return Json::object();
    if (example.is_boolean()) return {{"type", "boolean"}};
    if (example.is_string()) return {{"type", "string"}};
    if (example.is_number_integer()) return {{"type", "integer"}};
    if (example.is_number()) return {{"type", "number"}};
    if (example.is_array()) {
        Json out{{"type", "array"}};
        if (!example.empty()) out["items"] = schema_like(example[0]);
        return out;
    }
    Json out{{"type", "object"}};
    for (auto at = example.begin(); at != example.end(); ++at) {
        std::string name = at.key();
        if (name.ends_with('?')) name.pop_back();
        else out["required"].push_back(name);
        out["properties"][name] = schema_like(at.value());
    }
    return out;
}

Json native_schema() { return schema_like(Json::parse(native_end)); }

bool has_path(std::string_view paths, std::string_view path) {
    const std::vector<std::string_view> all = split(paths);
    return std::ranges::find(all, path) != all.end();
}

Json memory_schema(bool changes) {
    Json example = Json::parse(memory_example);
    if (changes) {
        example["changed"] = example["blocks"];
        example.erase("blocks");
        example["changed"][0]["id"] = 1;
    }
    return schema_like(example);
}

// Of one row: the member by which events are told apart has the example's value.
Json schema_of(const EventRow& row, const Json& response) {
    if (row.example == "end") return native_schema();
    if (row.example.ends_with("memory")) return memory_schema(row.example != "memory");
    const Json example = Json::parse(row.example);
    Json       out     = schema_like(example);
    for (const char* kind : {"type", "object"})
        if (example.contains(kind)) out["properties"][kind] = {{"const", example[kind]}};
    if (!example.contains("response") || !example.contains("type")) return out;
    Json& own                  = out["properties"]["response"];
    own                        = response;
    own["properties"]["usage"] = Json::object(); // null until the end
    return out;
}

Json event_schema(std::string_view path, const Json& response) {
    Json all = Json::array();
    for (const EventRow& row : event_rows)
        if (has_path(row.paths, path)) all.push_back(schema_of(row, response));
    return all.empty() ? Json::object() : Json{{"anyOf", std::move(all)}};
}

Json sse_schema(std::string_view path, const Json& response) {
    Json content = event_schema(path, response);
    if (content.empty()) return content;
    Json data{{"type", "string"}, {"contentMediaType", "application/json"}, {"contentSchema", std::move(content)}};
    if (has_path(done_routes, path)) data = Json{{"anyOf", Json::array({std::move(data), {{"const", "[DONE]"}}})}};
    return {{"type", "object"}, {"required", Json::array({"data"})}, {"properties", {{"data", std::move(data)}}}};
}

} // namespace quire
