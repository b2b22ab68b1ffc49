// quire.serve.status.memory_api: the routes about the KV memory: the block pool, pinned prefixes, and where KV events are sent. Owns nothing.
export module quire.serve.status.memory_api;

import quire.core.base;
import quire.serve.api.context;
import quire.serve.kv_events.log;
import quire.serve.status.snapshot_json;
import quire.serve.status.text_request;

export namespace quire {

void answer_blocks(ApiContext& api, HttpExchange& e);
void answer_block_events(ApiContext& api, HttpExchange& e);
void answer_pin(ApiContext& api, HttpExchange& e);
void answer_unpin(ApiContext& api, HttpExchange& e);
void answer_pins(ApiContext& api, HttpExchange& e);
void answer_kv_event_sources(ApiContext& api, HttpExchange& e);

} // namespace quire

module :private;

namespace quire {

void answer_blocks(ApiContext& api, HttpExchange& e) {
    const std::shared_ptr<const Snapshot> s = api.service.snapshot();
    if (!s) return api.refuse(e, ApiError{503, "the engine takes no steps", "", ""});
    answer_json(e, to_json(*s));
}

// With ?changes=1 an event after the first holds only the blocks that changed, which are few in a large pool.
void answer_block_events(ApiContext& api, HttpExchange& e) {
    const bool changes = std::ranges::find(e.request.query, std::pair<std::string, std::string>("changes", "1")) !=
                         e.request.query.end();
    if (!api.service.listen()) return api.refuse(e, ApiError{503, "too many listen to the block events", "", ""});
    const std::shared_ptr<void> listening(nullptr, [&api](void*) { api.service.unlisten(); });
    e.response.type = "text/event-stream";
    e.response.headers.emplace_back("Cache-Control", "no-cache");
    e.response.stream = [&api, &e, listening, changes](const HttpWrite& write) {
        std::shared_ptr<const Snapshot> before;
        std::uint64_t                   serial = 0;
        double                          silent = 0;
        for (bool open = true; open && !e.peer->gone() && !api.service.draining();) {
            const std::shared_ptr<const Snapshot> s = api.service.next_snapshot(serial, 0.5);
            silent                                  = s ? 0 : silent + 0.5;
            if (s) open = write(event(json_dump(before ? changes_to_json(*before, *s) : to_json(*s))));
            else if (silent >= api.options.ping_seconds) open = write(":\n\n"), silent = 0;
            if (s && changes) before = s;
        }
    };
}

void answer_pin(ApiContext& api, HttpExchange& e) {
    Parsed<TextRequest> parsed = parse_text_request(e.request.body, api.options.limits);
    if (!parsed) return api.refuse(e, parsed.error());
    if (auto& conversation = parsed->conversation) conversation->input.add_generation_prompt = false;
    Parsed<std::vector<Token>> ids = encode(api.encoder, *parsed);
    if (!ids) return api.refuse(e, ids.error());
    const std::string param = parsed->conversation ? "messages" : "prompt";
    if (!api.count_memory(e, ids->size() * 16)) return;
    parsed->text = {};
    e.held.reset();
    const auto pin = api.service.pin(std::move(*ids), parsed->cache_salt);
    if (!pin) return api.refuse(e, pin.error(), param);
    answer_json(e, Json{{"id", pin->id}, {"object", "pin"}, {"tokens", pin->n_tokens}, {"blocks", pin->n_blocks}});
}

void answer_unpin(ApiContext& api, HttpExchange& e) {
    Parsed<std::string> id = parse_id_request(e.request.body, api.options.limits);
    if (!id) return api.refuse(e, id.error());
    if (!api.service.unpin(*id)) return api.refuse(e, ApiError{404, cat("there is no pin ", quote(*id)), "id", ""});
    answer_json(e, Json{{"id", *id}, {"object", "pin"}, {"deleted", true}});
}

void answer_pins(ApiContext& api, HttpExchange& e) {
    Json data = Json::array();
    for (const Pin& p : api.service.pins())
        data.push_back({{"id", p.id}, {"object", "pin"}, {"tokens", p.n_tokens}, {"blocks", p.n_blocks}});
    answer_json(e, Json{{"object", "list"}, {"data", std::move(data)}});
}

// As vLLM has it: a source for each engine, here one.
void answer_kv_event_sources(ApiContext& api, HttpExchange& e) {
    Json sources = Json::object();
    if (!api.options.kv_events.empty()) {
        Json replay  = api.options.kv_replay.empty() ? Json(nullptr) : Json(api.options.kv_replay);
        sources["0"] = {{"enable_kv_cache_events", true},    {"publisher", "zmq"},
                        {"endpoint", api.options.kv_events}, {"replay_endpoint", replay},
                        {"buffer_steps", most_kv_batches},   {"hwm", most_kv_batches},
                        {"max_queue_size", 100'000},         {"topic", ""}};
    }
    answer_json(e, std::move(sources));
}

} // namespace quire
