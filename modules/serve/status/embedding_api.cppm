// quire.serve.status.embedding_api: the routes that compute vectors and scores, /v1/embeddings and /v1/rerank. Owns nothing.
export module quire.serve.status.embedding_api;

import quire.core.base;
import quire.serve.api.context;
import quire.serve.openai.embeddings;

export namespace quire {

struct Embedded {
    std::vector<std::vector<float>> vectors; // one for each input
    int                             n_tokens = 0;
};
// The vectors of the request's inputs, which come from the field `param`. False: the request was refused.
bool embed_inputs(ApiContext& api, HttpExchange& e, const EmbeddingRequest& request, const std::string& param,
                  Embedded& out);

void answer_embeddings(ApiContext& api, HttpExchange& e);
void answer_rerank(ApiContext& api, HttpExchange& e);

} // namespace quire

module :private;

namespace quire {

// Runs the requests, whose prompts come from the field `param`, and gives their vectors in order. False: it was refused.
bool embed(ApiContext& api, HttpExchange& e, std::vector<Request> requests, const std::string& param, int n_tokens,
           std::vector<std::vector<float>>& vectors) {
    constexpr std::size_t number = 40; // bytes of one: as a value, as JSON and as its text
    if (!api.count_memory(
            e, std::size_t(n_tokens) * 16 + requests.size() * std::size_t(api.service.config().hidden_size) * number))
        return false;
    vectors.resize(requests.size());
    auto handle = api.service.submit(std::move(requests));
    if (!handle) return api.refuse(e, handle.error(), param), false;
    e.peer->when_gone((*handle)->when_gone());
    e.held.reset();
    std::vector<Output> outputs;
    while ((*handle)->wait(1, outputs))
        for (Output& o : outputs) {
            if (o.finish == FinishReason::failed)
                return api.refuse(e,
                                  api.service.failure().empty() ? model_failed(o.message) : engine_failed(o.message)),
                       false;
            if (o.finish != FinishReason::stop)
                return api.refuse(e,
                                  ApiError{503, o.message.empty() ? "the server is shutting down" : o.message, "", ""}),
                       false;
            vectors[(*handle)->prompt_of(o)] = std::move(o.embedding);
        }
    if ((*handle)->gone()) return api.refuse(e, ApiError{499, "the client has gone", "", ""}), false;
    api.service.metrics.prompt += std::uint64_t(n_tokens);
    e.notes.emplace_back("prompt_tokens", cat(n_tokens));
    return true;
}

bool embed_inputs(ApiContext& api, HttpExchange& e, const EmbeddingRequest& request, const std::string& param,
                  Embedded& out) {
    const auto refuse = [&](const ApiError& error) {
        api.refuse(e, error);
        return false;
    };
    if (api.service.config().pooling == Pooling::rank)
        return refuse(ApiError{400, "this model is a reranker: POST /v1/rerank", "model", ""});
    const int hidden = api.service.config().hidden_size;
    if (const int wanted = request.dimensions.value_or(hidden); wanted != hidden)
        return refuse(ApiError{400, cat("dimensions is ", wanted, "; the embeddings of this model have ", hidden),
                               "dimensions", ""});
    std::vector<Request> requests;
    for (const Prompt& input : request.inputs) {
        const auto ok = request.truncate ? api.encoder.check_split(text_bytes(input), param)
                                         : api.encoder.check_size(text_bytes(input), 0, param);
        if (!ok) return refuse(ok.error());
        Parsed<std::vector<Token>> ids = api.encoder.encode(input, request.add_special_tokens, param);
        if (!ids) return refuse(ids.error());
        const auto context = std::size_t(api.options.limits.context);
        if (request.truncate && ids->size() > context) ids->resize(context);
        out.n_tokens += int(ids->size());
        Request& q   = requests.emplace_back();
        q.prompt     = std::move(*ids);
        q.embed      = true;
        q.cache_salt = request.cache_salt;
        q.adapters   = api.adapters_of(request.model);
    }
    return embed(api, e, std::move(requests), param, out.n_tokens, out.vectors);
}

void answer_embeddings(ApiContext& api, HttpExchange& e) {
    Parsed<EmbeddingRequest> parsed = parse_embedding_request(e.request.body, api.options.limits);
    e.request.body                  = {};
    if (!parsed) return api.refuse(e, parsed.error());
    Embedded embedded;
    if (!embed_inputs(api, e, *parsed, "input", embedded)) return;
    e.response.body =
        render_embeddings(api.model_name(parsed->model), embedded.vectors, parsed->base64, embedded.n_tokens);
}

// A query and a document stand in one text, as the reranker was trained.
void answer_rerank(ApiContext& api, HttpExchange& e) {
    Parsed<RerankRequest> parsed = parse_rerank_request(e.request.body, api.options.limits);
    e.request.body               = {};
    if (!parsed) return api.refuse(e, parsed.error());
    if (api.service.config().pooling != Pooling::rank)
        return api.refuse(e, ApiError{400, "this model is no reranker: its file says no pooling_type 4", "model", ""});
    if (auto ok = api.encoder.check_size(parsed->query.size(), 0, "query"); !ok) return api.refuse(e, ok.error());
    std::vector<Request> requests;
    int                  n_tokens = 0;
    for (const std::string& document : parsed->documents) {
        if (auto ok = api.encoder.check_size(document.size(), 0, "documents"); !ok) return api.refuse(e, ok.error());
        Parsed<std::vector<Token>> ids =
            api.encoder.encode_ranked(parsed->query, document, !api.service.config().family->encoder);
        if (!ids) return api.refuse(e, ids.error());
        Request& q = requests.emplace_back();
        q.prompt   = std::move(*ids);
        q.embed    = true;
        q.adapters = api.adapters_of(parsed->model);
        n_tokens += int(q.prompt.size());
    }
    std::vector<std::vector<float>> vectors;
    if (!embed(api, e, std::move(requests), "documents", n_tokens, vectors)) return;
    std::vector<float> scores;
    for (const std::vector<float>& v : vectors) scores.push_back(v.empty() ? 0.0f : v[0]);
    e.response.body = render_rerank(api.model_name(parsed->model), scores, parsed->documents, parsed->top_n,
                                    parsed->return_documents, n_tokens);
}

} // namespace quire
