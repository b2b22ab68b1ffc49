// quire.serve.openai.embeddings: /v1/embeddings and /v1/rerank as values: JSON → request, vectors and scores → JSON. Owns nothing.
export module quire.serve.openai.embeddings;

import quire.core.base;
import quire.serve.api.request_fields;

export namespace quire {

struct EmbeddingRequest {
    std::vector<Prompt>      inputs;
    bool                     base64             = false;
    bool                     add_special_tokens = true;
    std::string              cache_salt;
    std::optional<int>       dimensions;
    bool                     truncate = false; // an input that is too long loses its end
    std::string              model;            // as in GenerationRequest
    std::vector<std::string> unknown;
};
Parsed<EmbeddingRequest> parse_embedding_request(std::string_view json, const ApiLimits& limits);

// /rerank, /v1/rerank: Jina's and Cohere's fields.
struct RerankRequest {
    std::string              query;
    std::vector<std::string> documents;
    int                      top_n            = 0; // 0: all
    bool                     return_documents = false;
    std::string              model; // as in GenerationRequest
    std::vector<std::string> unknown;
};
Parsed<RerankRequest> parse_rerank_request(std::string_view json, const ApiLimits& limits);

std::string render_embeddings(const std::string& model, std::span<const std::vector<float>> vectors, bool base64,
                              int n_tokens);
// The documents with the best scores first, at most top_n of them (0: all).
std::string render_rerank(const std::string& model, std::span<const float> scores,
                          std::span<const std::string> documents, int top_n, bool return_documents, int n_tokens);

} // namespace quire

module :private;

namespace quire {

Parsed<EmbeddingRequest> parse_embedding_request(std::string_view text, const ApiLimits& limits) {
    Parsed<JsonDocument> json = parse_object(text, limits);
    if (!json) return std::unexpected(json.error());
    JsonFields       f(*json);
    EmbeddingRequest out;
    parse_model(f, limits, &out.model);
    out.inputs             = parse_prompts(f, f.has("input") || !f.has("content") ? "input" : "content", limits);
    out.add_special_tokens = f.boolean("add_special_tokens", true);
    out.cache_salt         = f.text("cache_salt", 1024);
    out.base64             = f.choice("encoding_format", {"float", "base64"}, "float") == "base64";
    if (const auto n = f.integer("dimensions", 1, std::numeric_limits<int>::max())) out.dimensions = int(*n);
    (void)f.find("user");
    out.unknown = f.unknown();
    if (f.failed()) return f.error();
    return out;
}

Parsed<RerankRequest> parse_rerank_request(std::string_view text, const ApiLimits& limits) {
    Parsed<JsonDocument> json = parse_object(text, limits);
    if (!json) return std::unexpected(json.error());
    JsonFields    f(*json);
    RerankRequest out;
    parse_model(f, limits, &out.model);
    if (!f.has("query")) f.fail("query", "query is missing");
    out.query        = f.text("query", limits.json.bytes);
    const Json* list = f.find("documents");
    f.describe("documents", R"({"type":"array","minItems":1,"items":{"anyOf":[{"type":"string"},{
        "type":"object","required":["text"],"properties":{"text":{"type":"string"}}}]}})");
    if (!list || !list->is_array() || list->empty()) f.fail("documents", "documents has to be a list of texts");
    else if (list->size() > std::size_t(limits.prompts))
        f.fail("documents", cat("documents has ", list->size(), " texts; ", limits.prompts, " are allowed"));
    else
        for (const Json& item : *list) {
            const Json* one = item.is_object() && item.contains("text") ? &item["text"] : &item;
            if (one->is_string()) out.documents.push_back(one->get<std::string>());
            else
                f.fail("documents",
                       cat("documents[", out.documents.size(), "] is ", type_name(*one), "; it has to be a text"));
            if (f.failed()) break;
        }
    out.top_n            = int(f.integer("top_n", 1, std::numeric_limits<int>::max()).value_or(0));
    out.return_documents = f.boolean("return_documents", false);
    (void)f.find("user");
    out.unknown = f.unknown();
    if (f.failed()) return f.error();
    return out;
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
