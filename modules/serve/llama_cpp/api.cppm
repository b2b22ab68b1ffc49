// quire.serve.llama_cpp.api: llama.cpp's own routes /completion, /infill and /slots, and the form of their responses and streams (its
// tools/server/README.md). Owns nothing.
export module quire.serve.llama_cpp.api;

import quire.core.base;
import quire.serve.api.generate;
import quire.serve.api.request_fields;
import quire.serve.openai.api;
import quire.serve.openai.request;
import quire.serve.openai.translated_fields;

export namespace quire {

// A body of /completion, and of /infill, as a request of /v1/completions.
Parsed<GenerationRequest> parse_native_request(std::string_view json, const ApiLimits& limits);
Parsed<GenerationRequest> parse_infill_request(std::string_view json, const ApiLimits& limits);

void answer_native_completion(ApiContext& api, HttpExchange& e);
// /completions, which is llama.cpp's where a body has a field that only llama.cpp knows, else OpenAI's.
void answer_either_completion(ApiContext& api, HttpExchange& e);
// The text between `input_prefix` with `prompt` behind it and `input_suffix`, for editors.
void answer_infill(ApiContext& api, HttpExchange& e);
// Sequences that run, as llama.cpp's slots; with ?fail_on_no_slot=1 an error if no more can.
void answer_slots(ApiContext& api, HttpExchange& e);
// /slots/N?action=save, restore or erase: the text of a slot.
Parsed<std::string> parse_slot_request(std::string_view json, const ApiLimits& limits);
void                answer_slot_action(ApiContext& api, HttpExchange& e);

} // namespace quire

module :private;

namespace quire {

class NativeRenderer : public AnswerRenderer {
public:
    // `prompts`: the texts of the prompts of `r`; `settings`: the response's `generation_settings`; `context`: of the model, in
    // tokens.
    NativeRenderer(ResponseHead head, std::vector<std::string> prompts, const GenerationRequest& r, Json settings,
                   int context)
        : head_(std::move(head)), prompts_(std::move(prompts)), n_(r.request.n), fields_(r.response_fields),
          settings_(std::move(settings)), context_(context), new_line_(prompts_.size() * std::size_t(n_)) {}

    std::string response(std::vector<Choice> choices, const Usage&) override {
        Json list = Json::array();
        for (const Choice& c : choices) {
            std::string text = text_of(c.parts);
            Json        body = last(c, text.contains('\n'));
            body["content"]  = std::move(text);
            body["tokens"]   = head_.token_ids ? Json(c.token_ids) : Json::array();
            if (head_.logprobs) body["completion_probabilities"] = probabilities(c);
            list.push_back(chosen(std::move(body)));
        }
        return json_dump(list.size() == 1 ? Json(list[0]) : std::move(list));
    }

    std::string piece(Choice c, const Usage&) override {
        std::string       out;
        const auto        answer = std::size_t(c.index);
        const std::string text   = text_of(c.parts);
        if (text.contains('\n')) new_line_[answer] = true;
        if (!(head_.timings_per_token && c.timings) && !c.progress && !head_.logprobs) {
            if (!text.empty() || !c.token_ids.empty()) out += text_event(c, text);
        } else if (!text.empty() || !c.token_ids.empty() || !c.logprobs.empty() || c.progress) {
            Json part{{"index", c.index},
                      {"content", text},
                      {"tokens", c.token_ids},
                      {"stop", false},
                      {"id_slot", head_.slot},
                      {"tokens_predicted", c.n_tokens},
                      {"tokens_evaluated", c.prompt_tokens}};
            if (head_.timings_per_token && c.timings) part["timings"] = timings_json(*c.timings);
            if (c.progress) part["prompt_progress"] = progress_json(*c.progress);
            if (head_.logprobs) part["completion_probabilities"] = probabilities(c);
            out += event(json_dump(std::move(part)));
        }
        if (!c.finish_reason.empty()) out += event(json_dump(chosen(last(c, new_line_[answer]))));
        return out;
    }

    std::string end(const Usage&) override { return {}; }

    std::string failure(const ApiError& error) override { return event(error_body(error)); }

    std::string_view out_of_memory() const override {
        return "data: {\"error\":{\"message\":\"there is no memory for this request now\","
               "\"type\":\"unavailable_error\",\"param\":null,\"code\":null}}\n\n";
    }

private:
    // The object of a piece with nothing but text and tokens.
    std::string text_event(const Choice& c, std::string_view text) const {
        std::string tokens;
        for (std::int32_t id : c.token_ids) tokens += cat(tokens.empty() ? "" : ",", id);
        return event(cat(R"({"index":)", c.index, R"(,"content":)", json_quoted(text), R"(,"tokens":[)", tokens,
                         R"(],"stop":false,"id_slot":)", head_.slot, R"(,"tokens_predicted":)", c.n_tokens,
                         R"(,"tokens_evaluated":)", c.prompt_tokens, '}'));
    }

    // The last object of an answer, without the answer's content.
    Json last(const Choice& c, bool new_line) const {
        const bool cut = c.finish_reason == "length";
        Json       body{{"index", c.index},
                        {"content", ""},
                        {"tokens", Json::array()},
                        {"id_slot", head_.slot},
                        {"stop", true},
                        {"model", head_.model},
                        {"tokens_predicted", c.n_tokens},
                        {"tokens_evaluated", c.prompt_tokens},
                        {"generation_settings", settings_},
                        {"prompt", prompts_[std::size_t(c.index / n_)]},
                        {"has_new_line", new_line},
                        {"truncated", cut && c.prompt_tokens + c.n_tokens >= context_},
                        {"stop_type", cut                     ? "limit"
                                      : c.stop_string.empty() ? "eos"
                                                              : "word"},
                        {"stopping_word", c.stop_string},
                        {"tokens_cached", c.timings ? c.timings->cached_tokens : 0}};
        if (c.timings) body["timings"] = timings_json(*c.timings);
        return body;
    }

    // The fields that the request asks for, each under its path.
    Json chosen(Json body) const {
        if (fields_.empty()) return body;
        Json out = Json::object();
        for (const std::string& path : fields_) {
            const Json* at = &body;
            for (std::string_view name : split(path, '/')) {
                const auto member = at->find(std::string(name)); // the end where `at` is no object
                at                = member == at->end() ? nullptr : &*member;
                if (!at) break;
            }
            if (at) out[path] = *at;
        }
        return out;
    }

    Json probabilities(const Choice& c) const {
        const auto one = [&](const SpelledLogprob& t) {
            Json json{{"id", t.token}, {"token", t.bytes}, {"bytes", bytes_json(t.bytes)}};
            add_logprob(json, t, head_.after_samplers);
            return json;
        };
        return logprobs_json(c.logprobs, one, head_.after_samplers);
    }

    ResponseHead             head_;
    std::vector<std::string> prompts_;
    int                      n_;
    std::vector<std::string> fields_; // of the response; none: all
    Json                     settings_;
    int                      context_;
    std::vector<bool>        new_line_; // of each answer: whether its text has one so far
};

Parsed<GenerationRequest> read_native_request(Json body, const ApiLimits& limits) {
    const auto given = [&](const char* name) { return body.contains(name) && !body[name].is_null(); };
    // Without a number of tokens an answer may fill the context.
    if (!given("n_predict") && !given("max_tokens") && !given("max_completion_tokens") && limits.default_tokens < 0)
        body["n_predict"] = -1;
    for (const auto& [name, idle] : of_completions) {
        if (!given(name)) continue;
        const Json idles = Json::parse(idle);
        if (std::ranges::find(idles, body[name]) == idles.end())
            return std::unexpected(ApiError{400, cat(name, " belongs to /v1/completions"), name, ""});
    }
    Parsed<GenerationRequest> out = read_completion_request(body, limits, true);
    if (!out) return out;
    JsonFields f(body);
    out->response_fields = f.texts("response_fields", 64, 256);
    if (f.failed()) return f.error();
    out->show_prompt = true;
    out->return_token_ids |= out->stream;
    return out;
}

Parsed<GenerationRequest> parse_native_request(std::string_view text, const ApiLimits& limits) {
    Parsed<JsonDocument> document = parse_object(text, limits);
    return document ? read_native_request(std::move(*document).take(), limits) : std::unexpected(document.error());
}

Parsed<GenerationRequest> parse_infill_request(std::string_view text, const ApiLimits& limits) {
    Parsed<JsonDocument> document = parse_object(text, limits);
    if (!document) return std::unexpected(document.error());
    Json       body = std::move(*document).take();
    JsonFields f(body);
    Infill     infill;
    infill.trim = true;
    for (const char* name : {"input_prefix", "input_suffix"})
        if (!f.has(name)) f.fail(name, cat(name, " is missing"));
    const std::string prefix = f.text("input_prefix", limits.json.bytes);
    infill.suffix            = f.text("input_suffix", limits.json.bytes);
    for (const Json& file : objects_of(f, "input_extra", limits.messages)) {
        const auto name = file.find("filename"), content = file.find("text");
        if (content == file.end() || !content->is_string() || (name != file.end() && !name->is_string())) {
            f.fail("input_extra", "a member of input_extra has to have a string text, and a string filename or none");
            break;
        }
        infill.files.emplace_back(text_in(file, "filename"), content->get<std::string>());
    }
    const Json* prompt = f.find("prompt");
    f.describe("prompt", R"({"type":["string","array"],"items":{"type":"integer"}})");
    Json before = prefix;
    if (prompt && prompt->is_string()) before = prefix + prompt->get<std::string>();
    else if (prompt && prompt->is_array() &&
             std::ranges::all_of(*prompt, [](const Json& id) { return id.is_number_integer(); })) {
        if (!prompt->empty()) {
            before = Json::array({prefix});
            before.insert(before.end(), prompt->begin(), prompt->end());
        }
    } else if (prompt) f.fail("prompt", "prompt has to be a string or a list of token ids");
    if (f.failed()) return f.error();
    f.pass_recording({});
    for (const char* name : {"input_prefix", "input_suffix", "input_extra"}) body.erase(name);
    body["prompt"]                = std::move(before);
    Parsed<GenerationRequest> out = read_native_request(std::move(body), limits);
    if (out) out->infill = std::move(infill);
    return out;
}

// `param`: the field with the prompt.
void answer_native(ApiContext& api, HttpExchange& e, Parsed<GenerationRequest> parsed, const std::string& param) {
    generate(api, e, std::move(parsed), param,
             [&](const ResponseHead& head, const GenerationRequest& r,
                 const std::vector<std::string>& prompts) -> std::unique_ptr<AnswerRenderer> {
                 Json settings     = settings_json(r, api.service.tokenizer().end_tokens());
                 settings["n_ctx"] = api.options.limits.context;
                 settings["model"] = head.model;
                 return std::make_unique<NativeRenderer>(head, prompts, r, std::move(settings),
                                                         api.options.limits.context);
             });
}

void answer_native_completion(ApiContext& api, HttpExchange& e) {
    answer_native(api, e, parse_native_request(e.request.body, api.options.limits), "prompt");
}

void answer_infill(ApiContext& api, HttpExchange& e) {
    answer_native(api, e, parse_infill_request(e.request.body, api.options.limits), "input_prefix");
}

bool has_native_field(std::string_view text, const ApiLimits& limits) {
    constexpr std::string_view native[] = {
        "n_predict", "n_probs", "id_slot", "samplers", "n_keep", "response_fields", "post_sampling_probs"};
    // As a key, a name stands between plain quotes: most bodies are not parsed for this.
    const auto stands = [&](std::string_view name) { return text.contains(cat('"', name, '"')); };
    if (!std::ranges::any_of(native, stands)) return false;
    const Parsed<JsonDocument> body = parse_object(text, limits);
    return body &&
           std::ranges::any_of(native, [&](std::string_view name) { return (*body)->contains(std::string(name)); });
}

void answer_either_completion(ApiContext& api, HttpExchange& e) {
    const bool native = has_native_field(e.request.body, api.options.limits);
    return native ? answer_native_completion(api, e) : answer_completion(api, e);
}

void answer_slots(ApiContext& api, HttpExchange& e) {
    if (!api.options.slots) return api.refuse(e, ApiError{501, "the server was started with --no-slots", "", ""});
    const std::shared_ptr<const Snapshot> snapshot = api.service.snapshot();
    if (!snapshot) return api.refuse(e, ApiError{503, "the engine takes no steps", "", ""});
    const int  n_slots = api.service.engine_options().max_sequences;
    const bool drafts  = api.service.engine_options().drafts.on;
    const auto slot    = [&](std::size_t id, bool busy) {
        return Json{
               {"id", id}, {"n_ctx", api.options.limits.context}, {"speculative", drafts}, {"is_processing", busy}};
    };
    Json slots = Json::array();
    for (const SequenceView& s : snapshot->sequences) {
        if (s.status == ViewStatus::waiting || s.status == ViewStatus::pinned) continue;
        const std::shared_ptr<const Json> settings = api.running.find(s.request);
        const int                         n        = s.n_tokens - s.n_prompt;
        Json                              one      = slot(slots.size(), true);
        one["id_task"]                             = s.request;
        one["n_prompt_tokens"]                     = s.n_prompt;
        one["n_prompt_tokens_processed"]           = std::min(s.n_computed, s.n_prompt);
        one["params"]                              = settings ? *settings : Json::object();
        const int most                             = settings ? (*settings)["n_predict"].get<int>() : -1;
        one["next_token"] =
            Json::array({Json{{"has_next_token", true}, {"n_remain", most < 0 ? -1 : most - n}, {"n_decoded", n}}});
        slots.push_back(std::move(one));
    }
    const bool none_free = int(slots.size()) >= n_slots;
    const bool must = std::ranges::any_of(e.request.query, [](const auto& q) { return q.first == "fail_on_no_slot"; });
    if (none_free && must) return api.refuse(e, ApiError{503, "no slot available", "", ""});
    while (int(slots.size()) < n_slots) slots.push_back(slot(slots.size(), false));
    answer_json(e, std::move(slots));
}

Parsed<std::string> parse_slot_request(std::string_view text, const ApiLimits& limits) {
    Parsed<JsonDocument> json = parse_object(text, limits);
    if (!json) return std::unexpected(json.error());
    JsonFields  f(*json);
    std::string name = f.text("filename", 1024);
    if (name.empty()) f.fail("filename", "filename is missing");
    if (f.failed()) return f.error();
    return name;
}

// Moves the KV of a slot's text between memory and files. Returns the tokens that are there then; nothing: the response is an error.
std::optional<int> move_slot(ApiContext& api, HttpExchange& e, const SlotText& text, CacheMove move) {
    Request request;
    request.prompt     = text.tokens;
    request.cache_salt = text.salt;
    request.cache_move = move;
    auto handle        = api.service.submit({std::move(request)});
    if (!handle) {
        api.refuse(e, handle.error(), "");
        return std::nullopt;
    }
    e.peer->when_gone((*handle)->when_gone());
    int                 n_tokens = 0;
    FinishReason        finish   = FinishReason::none;
    std::string         message;
    std::vector<Output> outputs;
    while ((*handle)->wait(1, outputs))
        for (const Output& o : outputs) n_tokens = o.cached_tokens, finish = o.finish, message = o.message;
    e.peer->when_gone({});
    if (finish == FinishReason::stop) return n_tokens;
    if (finish == FinishReason::failed) {
        api.refuse(e, ApiError{507, cat("the slot was not saved: ", message), "", ""});
        return std::nullopt;
    }
    api.refuse(e, ApiError{503, "the slot was not moved: the server is shutting down, or the client has gone", "", ""});
    return std::nullopt;
}

void answer_slot_action(ApiContext& api, HttpExchange& e) {
    Slots&           slots = api.slots;
    const auto       wrong = [&](const std::string& what) { api.refuse(e, ApiError{400, what, "", ""}); };
    std::string_view id    = e.request.path;
    id.remove_prefix(id.rfind('/') + 1);
    if (!slots.on())
        return api.refuse(e, ApiError{501, "slots are saved only by a server with --slot-save-path", "", ""});
    const std::optional<int> slot = to_number<int>(id);
    if (!slot || *slot < 0 || *slot >= slots.n())
        return wrong(cat("there is no slot ", quote(id), "; they are 0 to ", slots.n() - 1));
    const auto        given = std::ranges::find(e.request.query, "action", &std::pair<std::string, std::string>::first);
    const std::string action = given == e.request.query.end() ? "" : given->second;
    if (action == "erase") {
        const std::size_t n = slots.text(*slot).tokens.size();
        slots.set(*slot, {});
        return answer_json(e, Json{{"id_slot", *slot}, {"n_erased", n}});
    }
    if (action != "save" && action != "restore") return wrong("action has to be save, restore or erase");
    const Parsed<std::string> name = parse_slot_request(e.request.body, api.options.limits);
    if (!name) return api.refuse(e, name.error());
    const Stopwatch watch;
    const auto      answer = [&](const char* tokens, int n, const char* read, std::size_t bytes, const char* ms) {
        bytes += std::size_t(n / api.service.engine_options().block_size) * api.service.engine().block_bytes();
        answer_json(e, Json{{"id_slot", *slot},
                                 {"filename", *name},
                                 {tokens, n},
                                 {read, bytes},
                                 {"timings", {{ms, watch.seconds() * 1e3}}}});
    };
    if (action == "save") {
        const SlotText text = slots.text(*slot);
        if (text.tokens.empty() && !text.has_adapters) return wrong(cat("slot ", *slot, " has no text to save"));
        if (auto ok = slots.check(*name, text); !ok) return wrong(ok.error().message);
        const auto adapters = api.service.engine().adapters();
        if (api.service.engine_options().kv_key.empty() &&
            std::ranges::any_of(adapters, [](const auto& one) { return one.scale != 0; }))
            return wrong("adapters are in use, and texts with adapters are saved only with --kv-key");
        const auto n = move_slot(api, e, text, CacheMove::save);
        if (!n) return;
        const Result<std::size_t> bytes = slots.write(*name, text);
        if (!bytes)
            return api.refuse(
                e, ApiError{bytes.error().kind == ErrorKind::system ? 500 : 400, bytes.error().message, "", ""});
        return answer("n_saved", *n, "n_written", *bytes, "save_ms");
    }
    std::size_t      bytes = 0;
    Result<SlotText> text  = slots.read(*name, bytes);
    if (!text) return wrong(text.error().message);
    const auto n = move_slot(api, e, *text, CacheMove::load);
    if (!n) return;
    slots.set(*slot, std::move(*text));
    answer("n_restored", *n, "n_read", bytes, "restore_ms");
}

} // namespace quire
