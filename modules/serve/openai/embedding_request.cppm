// quire.serve.openai.embedding_request: the bodies of /v1/embeddings and /v1/rerank. Owns nothing.
export module quire.serve.openai.embedding_request;

import quire.core.base;
import quire.core.json;
import quire.core.std;
import quire.serve.api.error;
import quire.serve.api.generation_request;
import quire.serve.api.json_fields;
import quire.serve.api.limits;
import quire.serve.api.request_fields;

export namespace quire {

struct EmbeddingRequest {
    std::vector<Prompt>      inputs;
    bool                     base64             = false;
    bool                     add_special_tokens = true;
    std::string              cache_salt;
    std::optional<int>       dimensions;
    std::string              model; // as in GenerationRequest
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
    const std::string form = f.text("encoding_format", 64, "float");
    if (form != "float" && form != "base64")
        f.fail("encoding_format", cat("encoding_format is ", quote(form), "; it has to be float or base64"));
    out.base64 = form == "base64";
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

} // namespace quire
