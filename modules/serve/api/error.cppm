// quire.serve.api.error: why a request is refused, in the forms of OpenAI, Anthropic and Ollama. Owns nothing.
export module quire.serve.api.error;

import quire.core.base;
import quire.core.json;

export namespace quire {

// Why a request is refused.
struct ApiError {
    int         status = 400;
    std::string message;
    std::string param; // the field that is wrong; "": null
    std::string code;  // "": null
    // Of a prompt that does not fit the context, in tokens; 0: the error is another one.
    std::int64_t prompt_tokens = 0, context = 0;
};

template <class T>
using Parsed = std::expected<T, ApiError>;

enum class ErrorForm : std::uint8_t {
    openai,    // {"error": {message, type, param, code}}
    anthropic, // {"type": "error", "error": {type, message}}
    ollama,    // {"error": message}
};
// The form of the API that has this path.
ErrorForm error_form(std::string_view path);

std::string error_body(const ApiError& error, ErrorForm form = ErrorForm::openai);
// A text as JSON; null for "".
Json or_null(const std::string& text);

// The error of a prompt that does not fit, in OpenAI's words, which clients recognise, and with its code in them, since langchain looks for
// that in the message. `param`: the field of the prompt. `at_least`: the
// prompt's tokens were not counted.
ApiError context_overflow(std::int64_t context, std::int64_t prompt_tokens, std::int64_t completion_tokens,
                          const std::string& param, bool at_least = false);

// The error of a request that ends, or cannot begin, because no step runs any more: another server may take the request.
ApiError engine_failed(std::string message);
// The error of a request whose answers take more memory than there is for all requests.
ApiError answers_too_large();
// The error of a request that the model's numbers ended.
ApiError model_failed(std::string message);

} // namespace quire

module :private;

namespace quire {

constexpr std::string_view overflow_code = "context_length_exceeded";

std::string_view error_type(int status) {
    switch (status) {
        case 401: return "authentication_error";
        case 403: return "permission_error";
        case 404: return "not_found_error";
        case 429: return "rate_limit_error";
        case 501: return "not_supported_error";
        case 503: return "unavailable_error";
        case 505: return "invalid_request_error";
        default: return status >= 500 ? "server_error" : "invalid_request_error";
    }
}

std::string_view anthropic_type(int status) {
    switch (status) {
        case 401: return "authentication_error";
        case 403: return "permission_error";
        case 404: return "not_found_error";
        case 413: return "request_too_large";
        case 429: return "rate_limit_error";
        case 503: return "overloaded_error";
        case 505: return "invalid_request_error";
        default: return status >= 500 ? "api_error" : "invalid_request_error";
    }
}

Json or_null(const std::string& text) { return text.empty() ? Json() : Json(text); }

ApiError engine_failed(std::string message) { return {503, std::move(message), "", "engine_failed"}; }
ApiError answers_too_large() {
    return {
        503,
        "the answers and their log-probabilities take more memory than --max-buffered leaves: ask for fewer at once",
        "", "no_room"};
}
ApiError model_failed(std::string message) { return {500, std::move(message), "", "model_failed"}; }

ApiError context_overflow(std::int64_t context, std::int64_t prompt_tokens, std::int64_t completion_tokens,
                          const std::string& param, bool at_least) {
    return {400,
            cat("This model's maximum context length is ", context, " tokens. However, you requested ",
                prompt_tokens + completion_tokens, " tokens (", prompt_tokens, " in the ", param, ", ",
                completion_tokens, " in the completion). Please reduce the length of the ", param,
                completion_tokens > 0 ? " or completion." : ".",
                at_least ? " (At least: a text this long is not split into tokens.)" : "", " (", overflow_code, ')'),
            param,
            std::string(overflow_code),
            prompt_tokens,
            context};
}

ErrorForm error_form(std::string_view path) {
    if (path.starts_with("/api/")) return ErrorForm::ollama;
    return path == "/v1/messages" || path.starts_with("/v1/messages/") ? ErrorForm::anthropic : ErrorForm::openai;
}

std::string error_body(const ApiError& error, ErrorForm form) {
    if (form == ErrorForm::ollama) return json_dump(Json{{"error", error.message}});
    if (form == ErrorForm::anthropic) {
        // With these words of Anthropic's, Claude Code shortens its conversation.
        const std::string message = cat(error.code == overflow_code ? "prompt is too long: " : "", error.message);
        return json_dump(
            Json{{"type", "error"}, {"error", {{"type", anthropic_type(error.status)}, {"message", message}}}});
    }
    Json out{{"message", error.message},
             {"type", error_type(error.status)},
             {"param", or_null(error.param)},
             {"code", or_null(error.code)}};
    if (error.context > 0)
        out["n_prompt_tokens"] = error.prompt_tokens, out["n_ctx"] = error.context; // llama.cpp's names
    return json_dump(Json{{"error", std::move(out)}});
}

} // namespace quire
