// quire.serve.openapi_answers: what the routes answer, for their description: an example of each answer, and the schema that it stands for.
// tests/test_openapi.cpp compares them with the answers of a server. Owns nothing.
export module quire.serve.openapi_answers;

import quire.core.base;
import quire.core.json;
import quire.serve.api.error;
import quire.serve.openapi_events;

export namespace quire {

// The content of the answer with status 200, by media type: a schema of each. `path`: of the route, as it is served, with `*` for any segment.
Json answer_content(std::string_view method, std::string_view path);
// The schema of an error's body in the form of the API that has this path.
Json error_schema(std::string_view path);

} // namespace quire

module :private;

namespace quire {

enum class Form : std::uint8_t {
    json,
    json_or_events, // events where the request has "stream": true
    json_or_lines,  // lines of JSON unless the request has "stream": false
    events,
    text,
};

// An answer in JSON, as schema_like() reads it.
struct AnswerRow {
    std::string_view method, path; // without /v1, where a row with the served path is not there
    Form             form    = Form::json;
    std::string_view example = "null";
};

constexpr AnswerRow answer_rows[] = {
    {"POST", "/v1/completions", Form::json_or_events,
     R"({"id":"cmpl-1","object":"text_completion","created":1795719310,"model":"a","system_fingerprint":"quire-0.1",
     "choices":[{"index":0,"text":"Hi","logprobs":null,"finish_reason":"stop","stop_reason":null}],
     "usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2,"prompt_tokens_details":{"cached_tokens":0}},
     "timings?":{}})"},
    {"POST", "/completions", Form::json_or_events},          // of either kind
    {"POST", "/completion", Form::json_or_events, "native"}, // an object, or a list for several answers
    {"POST", "/infill", Form::json_or_events, "native"},
    {"POST", "/chat/completions", Form::json_or_events,
     R"({"id":"chatcmpl-1","object":"chat.completion","created":1795719310,"model":"a","system_fingerprint":"quire-0.1",
     "choices":[{"index":0,"message":{"role":"assistant","content":null,"refusal":null,"reasoning_content?":"",
     "tool_calls?":[{"id":"call_1","type":"function","function":{"name":"f","arguments":"{}"}}]},
     "logprobs":null,"finish_reason":"stop","stop_reason":null}],
     "usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2,"prompt_tokens_details":{"cached_tokens":0}},
     "timings?":{}})"},
    {"POST", "/chat/completions/input_tokens", Form::json, R"({"object":"response.input_tokens","input_tokens":9})"},
    {"POST", "/chat/completions/control", Form::json, R"({"success":false,"message?":""})"},
    {"GET", "/slots", Form::json,
     R"([{"id":0,"n_ctx":1024,"speculative":false,"is_processing":false,"id_task?":1,"n_prompt_tokens?":9,
     "n_prompt_tokens_processed?":9,"params?":{},"next_token?":[]}])"},
    {"POST", "/slots/*", Form::json,
     R"({"id_slot":0,"filename?":"a","n_saved?":9,"n_written?":1,"n_restored?":9,"n_read?":1,"n_erased?":9,
     "timings?":{}})"},
    {"POST", "/responses", Form::json_or_events, "response"},
    {"GET", "/responses/*", Form::json, "response"},
    {"DELETE", "/responses/*", Form::json, R"({"id":"resp_1","object":"response","deleted":true})"},
    {"GET", "/responses/*/input_items", Form::json,
     R"({"object":"list","first_id":null,"last_id":null,"has_more":false,"data":[{"type":"message","id":"item_1"}]})"},
    {"POST", "/responses/input_tokens", Form::json, R"({"object":"response.input_tokens","input_tokens":9})"},
    {"POST", "/messages", Form::json_or_events,
     R"({"id":"msg_1","type":"message","role":"assistant","model":"a","content":[{"type":"text"}],
     "stop_reason":"end_turn","stop_sequence":null,"usage":{"input_tokens":1,"cache_creation_input_tokens":0,
     "cache_read_input_tokens":8,"output_tokens":8}})"},
    {"POST", "/messages/count_tokens", Form::json, R"({"input_tokens":9})"},
    {"POST", "/api/chat", Form::json_or_lines,
     R"({"model":"a","created_at":"2026-11-26T18:55:11.619245Z","message":{"role":"assistant","content":"Hi",
     "thinking?":"","tool_calls?":[{"function":{"name":"f","arguments":{}}}]},"done":true,"done_reason":"stop",
     "total_duration?":1,"load_duration?":0,"prompt_eval_count?":9,"prompt_eval_duration?":1,"eval_count?":9,
     "eval_duration?":1})"},
    {"POST", "/api/generate", Form::json_or_lines,
     R"({"model":"a","created_at":"2026-11-26T18:55:11.619245Z","response":"Hi","thinking?":"","done":true,
     "done_reason":"stop","total_duration?":1,"load_duration?":0,"prompt_eval_count?":9,"prompt_eval_duration?":1,
     "eval_count?":9,"eval_duration?":1})"},
    {"POST", "/api/embed", Form::json,
     R"({"model":"a","embeddings":[[0.5]],"total_duration":1,"load_duration":0,"prompt_eval_count":1})"},
    {"POST", "/api/embeddings", Form::json, R"({"embedding":[0.5]})"},
    {"GET", "/api/tags", Form::json,
     R"({"models":[{"name":"a:latest","model":"a:latest","modified_at":"2026-11-26T18:55:09.000000Z","size":15063552,
     "digest":"00","details":{"parent_model":"","format":"gguf","family":"llama","families":["llama"],
     "parameter_size":"14.16M","quantization_level":"Q8_0"}}]})"},
    {"GET", "/api/ps", Form::json,
     R"({"models":[{"name":"a:latest","model":"a:latest","modified_at":"2026-11-26T18:55:09.000000Z","size":15063552,
     "digest":"00","details":{},"expires_at":"2999-12-31T00:00:00Z","size_vram":0,"context_length":1024}]})"},
    {"POST", "/api/show", Form::json,
     R"({"modelfile":"","parameters":"","template":"","license":"","details":{"parent_model":"","format":"gguf",
     "family":"llama","families":["llama"],"parameter_size":"14.16M","quantization_level":"Q8_0"},"model_info":{},
     "capabilities":["completion"],"modified_at":"2026-11-26T18:55:09.000000Z"})"},
    {"GET", "/api/version", Form::json, R"({"version":"0.12.11"})"},
    {"POST", "/embeddings", Form::json,
     R"({"object":"list","data":[{"object":"embedding","index":0,"embedding":null}],"model":"a",
     "usage":{"prompt_tokens":1,"total_tokens":1}})"},
    {"POST", "/rerank", Form::json,
     R"({"object":"list","model":"a","results":[{"index":0,"relevance_score":0.5,"document?":{"text":"a"}}],
     "usage":{"prompt_tokens":1,"total_tokens":1}})"},
    {"GET", "/models", Form::json,
     R"({"object":"list","has_more":false,"data":[{"id":"a","object":"model","created":1795719309,"owned_by":"quire",
     "root":"a","parent":null,"max_model_len":null,"type":"model","display_name":"a",
     "created_at":"2026-11-26T20:15:09.000000Z","permission":[],"status":{"value":"loaded"},"aliases?":["b"],"path?":"a.gguf",
     "architecture?":{"input_modalities":["text"],"output_modalities":["text"]},"meta?":{}}]})"},
    {"GET", "/models/*", Form::json,
     R"({"id":"a","object":"model","created":1795719309,"owned_by":"quire","root":"a","parent":null,
     "max_model_len":null,"type":"model","display_name":"a","created_at":"2026-11-26T20:15:09.000000Z",
     "status":{"value":"loaded"}})"},
    {"POST", "/models/load", Form::json, R"({"success":true})"},
    {"POST", "/models/unload", Form::json, R"({"success":true})"},
    {"GET", "/models/sse", Form::events},
    {"GET", "/lora-adapters", Form::json,
     R"([{"id":0,"path":"a.gguf","scale":0.5,"name":"a","task_name":"","prompt_prefix":""}])"},
    {"POST", "/lora-adapters", Form::json, R"({"success":true})"},
    {"GET", "/health", Form::json, R"({"status":"ok"})"},
    {"GET", "/health/ready", Form::json, R"({"status":"ok"})"},
    {"GET", "/health/live", Form::json, R"({"status":"ok"})"},
    {"GET", "/ping", Form::json, R"({"status":"ok"})"},
    {"POST", "/ping", Form::json, R"({"status":"ok"})"},
    {"GET", "/load", Form::json, R"({"server_load":0})"},
    {"POST", "/tokenize", Form::json, R"({"count":1,"max_model_len":1024,"tokens":[],"token_strs?":["a"]})"},
    {"POST", "/detokenize", Form::json, R"({"prompt":"a","content":"a"})"},
    {"GET", "/tokenizer_info", Form::json,
     R"({"tokenizer_class":"quire","bos_token":null,"eos_token":null,"chat_template":"","model_max_length":1024,
     "vocab_size":8192})"},
    {"POST", "/apply-template", Form::json, R"({"prompt":"a"})"},
    {"GET", "/metrics", Form::text},
    {"GET", "/kv_event_sources", Form::json, R"({"0?":{"publisher":"zmq","endpoint":""}})"},
    {"GET", "/props", Form::json,
     R"({"default_generation_settings":{"n_ctx":1024,"params":{}},"model_alias":"a","model_path":"a.gguf",
     "build_info":"quire 0.1","total_slots?":64,"role?":"router","chat_template?":"","is_sleeping?":false,
     "modalities?":{"vision":false,"audio":false},"engine?":{}})"},
    {"GET", "/blocks", Form::json, "memory"},
    {"GET", "/blocks/events", Form::events},
    {"GET", "/version", Form::json, R"({"version":"0.1"})"},
    {"POST", "/pin", Form::json, R"({"id":"pin-1","object":"pin","tokens":1,"blocks":1})"},
    {"POST", "/unpin", Form::json, R"({"id":"pin-1","object":"pin","deleted":true})"},
    {"GET", "/pins", Form::json, R"({"object":"list","data":[{"id":"pin-1","object":"pin","tokens":1,"blocks":1}]})"},
    {"GET", "/openapi.json", Form::json, R"({"openapi":"3.1.0","info":{"title":"quire","version":"0.1"},"paths":{}})"},
};

// OpenAI's response, with the members that Open Responses asks for.
constexpr std::string_view response_example =
    R"({"id":"resp_1","object":"response","created_at":1795719311,"status":"completed","error":null,
    "completed_at":null,"incomplete_details":null,"model":"a","output":[{"type":"message","id":"msg_1","status?":"completed",
    "role?":"assistant","content?":[],"summary?":[],"call_id?":"","name?":"f","arguments?":"{}","input?":""}],"background":false,
    "instructions":null,"max_output_tokens":null,"max_tool_calls":null,"metadata":{},"parallel_tool_calls":true,
    "previous_response_id":null,"prompt_cache_key":null,"safety_identifier":null,"presence_penalty":0.5,
    "frequency_penalty":0.5,"reasoning":null,"service_tier":"default","store":true,"temperature":0.5,
    "text":{"format":{"type":"text"}},"tool_choice":null,"tools":[],"top_logprobs":0,"top_p":0.5,
    "truncation":"disabled","user":null,"usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":8},
    "output_tokens":9,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":18}})";

Json answer_content(std::string_view method, std::string_view path) {
    const auto find = [&](std::string_view known) {
        return std::ranges::find_if(answer_rows,
                                    [&](const AnswerRow& r) { return r.method == method && r.path == known; });
    };
    auto row = find(path);
    if (row == std::end(answer_rows) && path.starts_with("/v1/")) row = find(path.substr(3));
    check(row != std::end(answer_rows), "a route whose answer /openapi.json does not describe");
    const Json response = schema_like(Json::parse(response_example));
    const Json text{{"schema", {{"type", "string"}}}};
    Json       out = Json::object();
    if (row->form == Form::events || row->form == Form::json_or_events)
        out["text/event-stream"] = {{"schema", sse_schema(row->path, response)}};
    if (row->form == Form::json_or_lines) out["application/x-ndjson"] = {{"schema", event_schema(row->path, response)}};
    if (row->form == Form::text) out["text/plain"] = text;
    if (row->form == Form::events || row->form == Form::text) return out;
    Json& schema = out["application/json"]["schema"];
    if (row->example == "response") schema = response;
    else if (row->example == "memory") schema = memory_schema(false);
    else if (row->example == "native")
        schema = {{"anyOf", {native_schema(), {{"type", "array"}, {"items", native_schema()}}}}};
    else schema = schema_like(Json::parse(row->example));
    return out;
}

Json error_schema(std::string_view path) {
    switch (error_form(path)) {
        case ErrorForm::ollama: return schema_like(Json{{"error", "why"}});
        case ErrorForm::anthropic:
            return schema_like(
                Json{{"type", "error"}, {"error", {{"type", "invalid_request_error"}, {"message", "why"}}}});
        default:
            return schema_like(
                Json{{"error",
                      {{"message", "why"}, {"type", "invalid_request_error"}, {"param", nullptr}, {"code", nullptr}}}});
    }
}

} // namespace quire
