// quire.serve.openai_response: the bodies of responses, generated tokens → JSON text, with the field names of OpenAI, vLLM and llama.cpp.
// Uses no sockets, no engine and no tokenizer. Owns nothing.
export module quire.serve.openai_response;

import quire.core.base;
import quire.core.json;
import quire.schedule.request;
import quire.core.std;
import quire.text.call_readers;

export namespace quire {

struct Usage {
    int prompt_tokens = 0, completion_tokens = 0, cached_tokens = 0;
};

// One token, spelled in bytes, with its log-probability.
struct SpelledLogprob {
    Token       token = -1;
    std::string bytes;
    float       logprob = 0;
};
struct SpelledPosition {
    std::optional<SpelledLogprob> chosen; // none: the first token of an echoed prompt
    SpelledLogprob                token;  // as spelled, where `chosen` is none
    std::vector<SpelledLogprob>   top;
    std::size_t                   offset = 0; // of its text in the whole text, in characters
};

// One answer, or a piece of it, for the client: an OutputDelta as text. It adds stop strings, the offsets of tokens in the text,
// and log-probabilities with their tokens spelled out.
struct Choice {
    int                          index = 0;
    std::string                  text, reasoning; // reasoning: only of chats
    std::vector<ToolCall>        calls;           // only of chats
    int                          first_call = 0;  // index of the first of them
    std::vector<SpelledPosition> logprobs;
    std::vector<Token>           token_ids;
    std::vector<Token>           prompt_token_ids;
    std::vector<SpelledPosition> prompt_logprobs;
    std::string                  finish_reason; // "": not finished
    std::string                  stop_string;   // that ended it
    Token                        stop_token = -1;
};

// What all parts of one response share.
struct ResponseHead {
    std::string  id, model;
    std::int64_t created = 0;
    bool         chat    = false;
    // what was asked for
    bool logprobs = false, token_ids = false, prompt_logprobs = false, tokens_as_ids = false;
    bool include_usage = false, continuous_usage = false;
    bool short_call_ids = false; // 9 letters and digits, as Mistral's templates take them
};

std::string render_response(const ResponseHead& head, std::span<const Choice> choices, const Usage& usage);
// Chunks of a stream, as JSON. The first of each answer of a chat.
std::string render_first_chunk(const ResponseHead& head, const Choice& choice, const Usage& usage);
std::string render_chunk(const ResponseHead& head, const Choice& choice, const Usage& usage);
// Two chunks of a call: its id, type and name; its arguments.
std::array<std::string, 2> render_call_chunks(const ResponseHead& head, const Choice& choice, std::size_t call,
                                              const Usage& usage);
std::string                render_usage_chunk(const ResponseHead& head, const Usage& usage);

std::string render_embeddings(const std::string& model, std::span<const std::vector<float>> vectors, bool base64,
                              int n_tokens);
// The best first; at most top_n of them (0: all).
std::string render_rerank(const std::string& model, std::span<const float> scores,
                          std::span<const std::string> documents, int top_n, bool return_documents, int n_tokens);

// Characters of valid UTF-8.
std::size_t count_characters(std::string_view text);

} // namespace quire

module :private;

namespace quire {

namespace {

constexpr std::string_view fingerprint = "quire-0.1";

Json or_null(const std::string& text) { return text.empty() ? Json() : Json(text); }

bool is_utf8(std::string_view s) {
    for (std::size_t i = 0; i < s.size();) {
        const auto c = static_cast<unsigned char>(s[i]);
        const int  n = c < 0x80                ? 1
                       : c >= 0xc2 && c < 0xe0 ? 2
                       : c >= 0xe0 && c < 0xf0 ? 3
                       : c >= 0xf0 && c < 0xf5 ? 4
                                               : 0;
        if (n == 0 || i + std::size_t(n) > s.size()) return false;
        for (int k = 1; k < n; k++)
            if ((static_cast<unsigned char>(s[i + std::size_t(k)]) & 0xc0) != 0x80) return false;
        i += std::size_t(n);
    }
    return true;
}

double finite(float logprob) { return logprob > -9999 ? double(logprob) : -9999.0; } // NaN and -inf have no JSON

// A token as a key or a word of JSON. Parts of characters as OpenAI spells them: bytes:\xe2\x80.
std::string spell(const SpelledLogprob& t, bool as_ids) {
    if (as_ids) return cat("token_id:", t.token);
    if (is_utf8(t.bytes)) return t.bytes;
    std::string out = "bytes:";
    for (char c : t.bytes) {
        char hex[5];
        std::snprintf(hex, sizeof hex, "\\x%02x", unsigned(static_cast<unsigned char>(c)));
        out += hex;
    }
    return out;
}

Json bytes_of(const std::string& bytes) {
    Json list = Json::array();
    for (char c : bytes) list.push_back(int(static_cast<unsigned char>(c)));
    return list;
}

// The shape of /v1/completions.
Json legacy_logprobs(const ResponseHead& head, std::span<const SpelledPosition> positions) {
    Json tokens = Json::array(), logprobs = Json::array(), tops = Json::array(), offsets = Json::array();
    for (const SpelledPosition& p : positions) {
        offsets.push_back(p.offset);
        tokens.push_back(spell(p.chosen ? *p.chosen : p.token, head.tokens_as_ids));
        if (!p.chosen) {
            logprobs.push_back(nullptr);
            tops.push_back(nullptr);
            continue;
        }
        logprobs.push_back(finite(p.chosen->logprob));
        Json top = Json::object();
        for (const SpelledLogprob& t : p.top) top.emplace(spell(t, head.tokens_as_ids), finite(t.logprob));
        top.emplace(spell(*p.chosen, head.tokens_as_ids), finite(p.chosen->logprob));
        tops.push_back(std::move(top));
    }
    return {{"text_offset", offsets}, {"token_logprobs", logprobs}, {"tokens", tokens}, {"top_logprobs", tops}};
}

// The shape of /v1/chat/completions.
Json chat_logprobs(const ResponseHead& head, std::span<const SpelledPosition> positions) {
    const auto one = [&](const SpelledLogprob& t) {
        return Json{{"token", head.tokens_as_ids ? spell(t, true) : t.bytes},
                    {"logprob", finite(t.logprob)},
                    {"bytes", bytes_of(t.bytes)}};
    };
    Json content = Json::array();
    for (const SpelledPosition& p : positions) {
        if (!p.chosen) continue;
        Json item = one(*p.chosen), top = Json::array();
        for (const SpelledLogprob& t : p.top) top.push_back(one(t));
        item["top_logprobs"] = std::move(top);
        content.push_back(std::move(item));
    }
    return {{"content", std::move(content)}, {"refusal", nullptr}};
}

// vLLM's shape: of each position the log-probabilities by token id.
Json prompt_logprobs(std::span<const SpelledPosition> positions) {
    Json list = Json::array();
    for (const SpelledPosition& p : positions) {
        if (!p.chosen) {
            list.push_back(nullptr);
            continue;
        }
        Json       item = Json::object();
        int        rank = 0;
        const auto add  = [&](const SpelledLogprob& t, Json r) {
            item.emplace(cat(t.token),
                          Json{{"logprob", finite(t.logprob)}, {"rank", std::move(r)}, {"decoded_token", t.bytes}});
        };
        for (const SpelledLogprob& t : p.top) add(t, ++rank);
        add(*p.chosen, nullptr); // its rank is unknown if it is not among the best
        list.push_back(std::move(item));
    }
    return list;
}

Json usage_json(const Usage& u) {
    return {{"prompt_tokens", u.prompt_tokens},
            {"completion_tokens", u.completion_tokens},
            {"total_tokens", u.prompt_tokens + u.completion_tokens},
            {"prompt_tokens_details", {{"cached_tokens", u.cached_tokens}}}};
}

Json frame(const ResponseHead& head, const char* object) {
    return {{"id", head.id},
            {"object", object},
            {"created", head.created},
            {"model", head.model},
            {"system_fingerprint", fingerprint}};
}

Json stop_reason(const Choice& c) {
    if (!c.stop_string.empty()) return c.stop_string;
    if (c.stop_token >= 0) return c.stop_token;
    return nullptr;
}

Json logprobs_json(const ResponseHead& head, const Choice& c, bool in_chunk) {
    if (!head.logprobs || (in_chunk && c.logprobs.empty())) return nullptr;
    return head.chat ? chat_logprobs(head, c.logprobs) : legacy_logprobs(head, c.logprobs);
}

void close_chunk(const ResponseHead& head, Json& chunk, const Usage& usage) {
    if (head.continuous_usage) chunk["usage"] = usage_json(usage);
    else if (head.include_usage) chunk["usage"] = nullptr;
}

} // namespace

std::size_t count_characters(std::string_view text) {
    return std::size_t(
        std::ranges::count_if(text, [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
}

namespace {

// A name for a call, the same in every run of the request's id.
std::string call_id(const ResponseHead& head, int answer, int call) {
    constexpr std::string_view alphabet = "0123456789abcdefghijklmnopqrstuvwxyz";
    std::uint64_t              hash     = 0xcbf29ce484222325; // FNV-1a
    for (char c : cat(head.id, '/', answer, '/', call)) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
    hash ^= hash >> 29;
    std::string id = head.short_call_ids ? "" : "call_";
    for (int i = 0; i < 9; i++, hash /= alphabet.size()) id += alphabet[hash % alphabet.size()];
    return id;
}

Json message_json(const ResponseHead& head, const Choice& c) {
    Json message{{"role", "assistant"}, {"content", c.text}, {"refusal", nullptr}};
    if (!c.reasoning.empty()) message["reasoning_content"] = c.reasoning;
    if (c.calls.empty()) return message;
    if (c.text.empty()) message["content"] = nullptr;
    Json calls = Json::array();
    for (std::size_t i = 0; i < c.calls.size(); i++)
        calls.push_back({{"id", call_id(head, c.index, int(i))},
                         {"type", "function"},
                         {"function", {{"name", c.calls[i].name}, {"arguments", c.calls[i].arguments}}}});
    message["tool_calls"] = std::move(calls);
    return message;
}

} // namespace

std::string render_response(const ResponseHead& head, std::span<const Choice> choices, const Usage& usage) {
    Json body = frame(head, head.chat ? "chat.completion" : "text_completion");
    Json list = Json::array();
    for (const Choice& c : choices) {
        Json choice{{"index", c.index}};
        if (head.chat) choice["message"] = message_json(head, c);
        else choice["text"] = c.text;
        choice["logprobs"]      = logprobs_json(head, c, false);
        choice["finish_reason"] = or_null(c.finish_reason);
        choice["stop_reason"]   = stop_reason(c);
        if (head.token_ids) choice["token_ids"] = c.token_ids;
        if (!head.chat && head.token_ids) choice["prompt_token_ids"] = c.prompt_token_ids;
        if (!head.chat && head.prompt_logprobs) choice["prompt_logprobs"] = prompt_logprobs(c.prompt_logprobs);
        list.push_back(std::move(choice));
    }
    body["choices"] = std::move(list);
    body["usage"]   = usage_json(usage);
    if (head.chat && !choices.empty()) {
        if (head.token_ids) body["prompt_token_ids"] = choices[0].prompt_token_ids;
        if (head.prompt_logprobs) body["prompt_logprobs"] = prompt_logprobs(choices[0].prompt_logprobs);
    }
    return json_dump(std::move(body));
}

std::string render_first_chunk(const ResponseHead& head, const Choice& c, const Usage& usage) {
    Json chunk       = frame(head, "chat.completion.chunk");
    chunk["choices"] = Json::array({Json{{"index", c.index},
                                         {"delta", {{"role", "assistant"}, {"content", ""}}},
                                         {"logprobs", nullptr},
                                         {"finish_reason", nullptr}}});
    if (head.token_ids) chunk["prompt_token_ids"] = c.prompt_token_ids;
    close_chunk(head, chunk, usage);
    return json_dump(std::move(chunk));
}

std::string render_chunk(const ResponseHead& head, const Choice& c, const Usage& usage) {
    Json chunk = frame(head, head.chat ? "chat.completion.chunk" : "text_completion");
    Json choice{{"index", c.index}};
    if (head.chat) {
        choice["delta"] = c.text.empty() ? Json::object() : Json{{"content", c.text}};
        if (!c.reasoning.empty()) choice["delta"]["reasoning_content"] = c.reasoning;
    } else choice["text"] = c.text;
    choice["logprobs"]      = logprobs_json(head, c, true);
    choice["finish_reason"] = or_null(c.finish_reason);
    if (!c.finish_reason.empty()) choice["stop_reason"] = stop_reason(c);
    if (head.token_ids) choice["token_ids"] = c.token_ids;
    if (head.token_ids && !head.chat && !c.prompt_token_ids.empty()) choice["prompt_token_ids"] = c.prompt_token_ids;
    chunk["choices"] = Json::array({std::move(choice)});
    close_chunk(head, chunk, usage);
    return json_dump(std::move(chunk));
}

std::array<std::string, 2> render_call_chunks(const ResponseHead& head, const Choice& c, std::size_t call,
                                              const Usage& usage) {
    const int  index = c.first_call + int(call);
    const auto chunk = [&](Json delta) {
        Json out       = frame(head, "chat.completion.chunk");
        delta["index"] = index;
        out["choices"] = Json::array({Json{{"index", c.index},
                                           {"delta", {{"tool_calls", Json::array({std::move(delta)})}}},
                                           {"logprobs", nullptr},
                                           {"finish_reason", nullptr}}});
        close_chunk(head, out, usage);
        return json_dump(std::move(out));
    };
    return {chunk({{"id", call_id(head, c.index, index)},
                   {"type", "function"},
                   {"function", {{"name", c.calls[call].name}, {"arguments", ""}}}}),
            chunk({{"function", {{"arguments", c.calls[call].arguments}}}})};
}

std::string render_usage_chunk(const ResponseHead& head, const Usage& usage) {
    Json chunk       = frame(head, head.chat ? "chat.completion.chunk" : "text_completion");
    chunk["choices"] = Json::array();
    chunk["usage"]   = usage_json(usage);
    return json_dump(std::move(chunk));
}

std::string render_embeddings(const std::string& model, std::span<const std::vector<float>> vectors, bool base64,
                              int n_tokens) {
    const auto encode = [](const std::vector<float>& v) {
        constexpr std::string_view alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        const auto*                bytes    = reinterpret_cast<const unsigned char*>(v.data());
        const std::size_t          n        = v.size() * sizeof(float);
        std::string                out;
        for (std::size_t i = 0; i < n; i += 3) {
            const auto    at    = [&](std::size_t k) { return k < n ? std::uint32_t(bytes[k]) : 0u; };
            std::uint32_t three = at(i) << 16 | at(i + 1) << 8 | at(i + 2);
            for (std::size_t k = 0; k < 4; k++) out += i + k <= n ? alphabet[three >> (18 - 6 * k) & 63] : '=';
        }
        return out;
    };
    Json data = Json::array();
    for (std::size_t i = 0; i < vectors.size(); i++)
        data.push_back({{"object", "embedding"},
                        {"index", i},
                        {"embedding", base64 ? Json(encode(vectors[i])) : Json(vectors[i])}});
    return json_dump(Json{{"object", "list"},
                          {"data", std::move(data)},
                          {"model", model},
                          {"usage", {{"prompt_tokens", n_tokens}, {"total_tokens", n_tokens}}}});
}

std::string render_rerank(const std::string& model, std::span<const float> scores,
                          std::span<const std::string> documents, int top_n, bool return_documents, int n_tokens) {
    std::vector<std::size_t> order(scores.size());
    std::iota(order.begin(), order.end(), std::size_t(0));
    std::ranges::sort(
        order, [&](std::size_t a, std::size_t b) { return scores[a] != scores[b] ? scores[a] > scores[b] : a < b; });
    if (top_n > 0 && std::size_t(top_n) < order.size()) order.resize(std::size_t(top_n));
    Json results = Json::array();
    for (std::size_t i : order) {
        Json result{{"index", i}, {"relevance_score", scores[i]}};
        if (return_documents) result["document"] = Json{{"text", documents[i]}};
        results.push_back(std::move(result));
    }
    return json_dump(Json{{"object", "list"},
                          {"model", model},
                          {"results", std::move(results)},
                          {"usage", {{"prompt_tokens", n_tokens}, {"total_tokens", n_tokens}}}});
}

} // namespace quire
