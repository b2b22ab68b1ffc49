// quire.serve.llama_cpp.adapters_api: llama.cpp's route /lora-adapters: the adapters with their scales in requests that name none. Owns nothing.
export module quire.serve.llama_cpp.adapters_api;

import quire.core.base;
import quire.serve.api.context;
import quire.serve.api.request_fields;

export namespace quire {

void answer_adapters(ApiContext& api, HttpExchange& e);
// The body of a request that sets the scales.
Parsed<std::vector<AdapterUse>> parse_adapter_uses(std::string_view json, const ApiLimits& limits);
// Sets these scales: a list of objects with an `id` and a `scale`; an adapter that the list does not have gets 0.
void answer_set_adapters(ApiContext& api, HttpExchange& e);

} // namespace quire

module :private;

namespace quire {

void answer_adapters(ApiContext& api, HttpExchange& e) {
    Json list = Json::array();
    for (const AdapterOption& adapter : api.service.engine().adapters())
        list.push_back({{"id", list.size()},
                        {"path", adapter.path},
                        {"scale", decimal(adapter.scale)},
                        {"name", adapter.name},
                        {"task_name", ""},
                        {"prompt_prefix", ""}});
    answer_json(e, std::move(list));
}

Parsed<std::vector<AdapterUse>> parse_adapter_uses(std::string_view text, const ApiLimits& limits) {
    const Result<JsonDocument> json = json_document(text, limits.json);
    if (!json) return std::unexpected(ApiError{400, cat("the body cannot be used: ", json.error().message), "", ""});
    return adapter_uses(*json, "the body");
}

void answer_set_adapters(ApiContext& api, HttpExchange& e) {
    const Parsed<std::vector<AdapterUse>> uses = parse_adapter_uses(e.request.body, api.options.limits);
    if (!uses) return api.refuse(e, uses.error());
    if (const auto ok = api.service.set_adapters(*uses); !ok)
        return api.refuse(e, ApiError{400, ok.error().message, "", ""});
    answer_json(e, Json{{"success", true}});
}

} // namespace quire
