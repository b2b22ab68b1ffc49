// quire.serve.openai.responses_api: OpenAI's route /v1/responses, and the form of its responses and streams
// (https://platform.openai.com/docs/api-reference/responses-streaming). Owns nothing.
export module quire.serve.openai.responses_api;

import quire.core.base;
import quire.serve.api.access;
import quire.serve.api.answer_blocks;
import quire.serve.api.context;
import quire.serve.api.generate;
import quire.serve.api.json_fields;
import quire.serve.openai.api;
import quire.serve.openai.responses_request;
export import quire.serve.openai.responses_tools;

export namespace quire {

void answer_responses(ApiContext& api, HttpExchange& e);
// /responses/input_tokens: how many tokens the prompt of that response has.
void answer_responses_tokens(ApiContext& api, HttpExchange& e);
// /responses/ID with GET and DELETE, and /responses/ID/input_items.
void answer_stored_response(SharedContext& shared, HttpExchange& e);
void answer_stored_items(SharedContext& shared, HttpExchange& e);
void delete_stored_response(SharedContext& shared, HttpExchange& e);

// `echo`: the members that repeat the request. `tools`: what the functions that are called stand for; others are themselves. `done`: gets the
// response at its end. `now`: the time, in seconds since 1970.
std::unique_ptr<AnswerRenderer> responses_renderer(ResponseHead head, Json echo, ResponsesTools tools = {},
                                                   std::function<void(const Json&)> done = {},
                                                   std::int64_t (*now)()                 = unix_seconds);

} // namespace quire

module :private;

namespace quire {

// Makes the items of the output one after the other, and an event of every change; whole responses do without the events.
class ResponsesRenderer : public AnswerRenderer {
public:
    ResponsesRenderer(ResponseHead head, Json echo, ResponsesTools tools, std::function<void(const Json&)> done,
                      std::int64_t (*now)())
        : head_(std::move(head)), echo_(std::move(echo)), tools_(std::move(tools)), done_(std::move(done)), now_(now) {}

    std::string response(std::vector<Choice> choices, const Usage& usage) override {
        piece(std::move(choices[0]), usage);
        Json out = body(state(), &usage);
        if (done_) done_(out);
        add_timings(out);
        return json_dump(std::move(out));
    }

    std::string begin(const Usage&) override {
        send("response.created", {{"response", body("in_progress", nullptr)}});
        send("response.in_progress", {{"response", body("in_progress", nullptr)}});
        return std::exchange(events_, "");
    }

    std::string piece(Choice c, const Usage&) override {
        cut_ = c.finish_reason == "length";
        if (c.timings) timings_ = c.timings;
        if (c.progress) {
            Json data{{"response", body("in_progress", nullptr)}, {"prompt_progress", progress_json(*c.progress)}};
            add_timings(data);
            send("response.in_progress", std::move(data));
        }
        if (head_.logprobs) add_logprobs(c.logprobs);
        make(blocks_.push(std::move(c.parts)), "completed");
        if (!c.finish_reason.empty()) make(blocks_.finish(), state()); // the item that was open at the end
        return std::exchange(events_, "");
    }

    std::string end(const Usage& usage) override {
        Json data{{"response", body(state(), &usage)}};
        if (done_) done_(data["response"]);
        add_timings(data);
        send(cat("response.", state()), std::move(data));
        return std::exchange(events_, "");
    }

    std::string failure(const ApiError& error) override {
        Json failed     = body("failed", nullptr);
        failed["error"] = {{"code", "server_error"}, {"message", error.message}};
        send("response.failed", {{"response", std::move(failed)}});
        return std::exchange(events_, "");
    }

    bool logprobs_of_text() const override { return true; }

    std::string_view out_of_memory() const override {
        return "event: error\ndata: {\"type\":\"error\",\"code\":\"server_error\","
               "\"message\":\"there is no memory for this request now\",\"param\":null,\"sequence_number\":0}\n\n";
    }

private:
    const char* state() const { return cut_ ? "incomplete" : "completed"; }

    // llama.cpp's, where the request asks for them.
    void add_timings(Json& data) const {
        if (head_.timings_per_token && timings_) data["timings"] = timings_json(*timings_);
    }

    void send(const std::string& type, Json data) {
        Json out{{"type", type}};
        out.update(data);
        out["sequence_number"] = sequence_++;
        events_ += event(type, json_dump(std::move(out)));
    }

    // An event about the item that is made.
    void send_item(const std::string& type, Json data) {
        Json out{{"item_id", items_.back()["id"]}, {"output_index", items_.size() - 1}};
        out.update(data);
        send(type, std::move(out));
    }

    // `status`: of the items that end.
    void make(const std::vector<BlockEvent>& events, const char* status) {
        for (const BlockEvent& b : events) {
            const bool is_call = b.kind == AnswerPart::Kind::call;
            if (b.what == BlockEvent::What::begin) is_call ? begin_call(b) : begin_item(b.kind);
            else if (b.what == BlockEvent::What::text) is_call ? add_arguments(b.text) : add_text(b);
            else is_call ? end_call(status) : end_item(b.kind, status);
        }
    }

    std::string item_id(const char* prefix) const { return cat(prefix, head_.id, '_', items_.size()); }

    void begin_item(AnswerPart::Kind kind) {
        if (kind == AnswerPart::Kind::content) {
            items_.push_back({{"type", "message"},
                              {"id", item_id("msg_")},
                              {"status", "in_progress"},
                              {"role", "assistant"},
                              {"content", Json::array()}});
            part_ = {
                {"type", "output_text"}, {"text", ""}, {"annotations", Json::array()}, {"logprobs", Json::array()}};
        } else {
            items_.push_back({{"type", "reasoning"},
                              {"id", item_id("rs_")},
                              {"status", "in_progress"},
                              {"summary", Json::array()},
                              {"content", Json::array()}});
            part_ = {{"type", "reasoning_text"}, {"text", ""}};
        }
        send("response.output_item.added", {{"output_index", items_.size() - 1}, {"item", items_.back()}});
        send_item("response.content_part.added", {{"content_index", 0}, {"part", part_}});
    }

    void add_text(const BlockEvent& b) {
        auto& text = part_["text"].get_ref<std::string&>();
        text += b.text;
        const bool        is_content = b.kind == AnswerPart::Kind::content;
        const std::string type       = is_content ? "response.output_text.delta" : "response.reasoning_text.delta";
        std::string       logprobs; // and timings
        if (is_content) {
            for (const Json& one : logprobs_) part_["logprobs"].push_back(one);
            logprobs = R"(,"logprobs":)" + json_dump(std::exchange(logprobs_, Json::array()));
        }
        if (head_.timings_per_token && timings_) logprobs += cat(R"(,"timings":)", json_dump(timings_json(*timings_)));
        events_ += event(type, cat(R"({"type":")", type, R"(","item_id":)", json_dump(items_.back()["id"]),
                                   R"(,"output_index":)", items_.size() - 1, R"(,"content_index":0,"delta":)",
                                   json_quoted(b.text), logprobs, R"(,"sequence_number":)", sequence_++, '}'));
    }

    void end_item(AnswerPart::Kind kind, const char* status) {
        Json done{{"content_index", 0}, {"text", part_["text"]}};
        if (kind == AnswerPart::Kind::content) {
            for (const Json& one : std::exchange(logprobs_, Json::array())) part_["logprobs"].push_back(one);
            done["logprobs"] = part_["logprobs"];
        }
        send_item(kind == AnswerPart::Kind::content ? "response.output_text.done" : "response.reasoning_text.done",
                  std::move(done));
        send_item("response.content_part.done", {{"content_index", 0}, {"part", part_}});
        items_.back()["status"] = status;
        items_.back()["content"].push_back(std::move(part_));
        send("response.output_item.done", {{"output_index", items_.size() - 1}, {"item", items_.back()}});
    }

    void begin_call(const BlockEvent& b) {
        logprobs_                = Json::array(); // of a text that was none
        const auto          at   = tools_.find(b.call.name);
        const ResponsesTool tool = at != tools_.end() ? at->second : ResponsesTool{"", b.call.name};
        custom_                  = tool.custom;
        Json item{{"type", custom_ ? "custom_tool_call" : "function_call"},
                  {"id", item_id(custom_ ? "ctc_" : "fc_")},
                  {"status", "in_progress"},
                  {"call_id", call_id(head_, 0, n_calls_++)},
                  {"name", tool.name},
                  {custom_ ? "input" : "arguments", ""}};
        if (!tool.name_space.empty()) item["namespace"] = tool.name_space;
        items_.push_back(std::move(item));
        send("response.output_item.added", {{"output_index", items_.size() - 1}, {"item", items_.back()}});
        arguments_.clear();
        add_arguments(b.call.arguments);
    }

    // The input of a custom tool is a string within the arguments: it is sent when the string has ended.
    void add_arguments(const std::string& piece) {
        if (piece.empty()) return;
        arguments_ += piece;
        constexpr std::string_view type = "response.function_call_arguments.delta";
        if (!custom_)
            events_ += event(type, cat(R"({"type":")", type, R"(","item_id":)", json_dump(items_.back()["id"]),
                                       R"(,"output_index":)", items_.size() - 1, R"(,"delta":)", json_quoted(piece),
                                       R"(,"sequence_number":)", sequence_++, '}'));
    }

    void end_call(const char* status) {
        Json& call = items_.back();
        if (custom_) {
            const std::string input = custom_input(arguments_);
            if (!input.empty()) send_item("response.custom_tool_call_input.delta", {{"delta", input}});
            send_item("response.custom_tool_call_input.done", {{"input", input}});
            call["input"] = input;
        } else {
            send_item("response.function_call_arguments.done", {{"name", call["name"]}, {"arguments", arguments_}});
            call["arguments"] = arguments_;
        }
        call["status"] = status;
        send("response.output_item.done", {{"output_index", items_.size() - 1}, {"item", call}});
    }

    // The log-probabilities go to the text that comes next.
    void add_logprobs(std::span<const SpelledPosition> positions) {
        const auto one = [](const SpelledLogprob& t) {
            return Json{{"token", t.bytes}, {"logprob", finite_logprob(t.logprob)}, {"bytes", bytes_json(t.bytes)}};
        };
        for (Json& item : logprobs_json(positions, one)) logprobs_.push_back(std::move(item));
    }

    // `usage`: of a response that is complete.
    Json body(const std::string& status, const Usage* usage) const {
        Json out{{"id", "resp_" + head_.id}, {"object", "response"}, {"created_at", head_.created},
                 {"status", status},         {"error", nullptr},     {"incomplete_details", nullptr},
                 {"model", head_.model},     {"output", items_},     {"completed_at", nullptr}};
        if (status == "completed") out["completed_at"] = now_();
        if (status == "incomplete") out["incomplete_details"] = {{"reason", "max_output_tokens"}};
        out.update(echo_);
        out["usage"] = nullptr;
        if (usage) {
            Json input{{"cached_tokens", usage->cached_tokens}, {"cache_write_tokens", 0}};
            add_tiers(input, *usage);
            out["usage"] = {{"input_tokens", usage->prompt_tokens},
                            {"input_tokens_details", std::move(input)},
                            {"output_tokens", usage->completion_tokens},
                            {"output_tokens_details", {{"reasoning_tokens", usage->reasoning_tokens}}},
                            {"total_tokens", usage->prompt_tokens + usage->completion_tokens}};
        }
        return out;
    }

    ResponseHead                     head_;
    Json                             echo_;
    ResponsesTools                   tools_;
    std::function<void(const Json&)> done_;
    std::int64_t (*now_)();
    AnswerBlocks           blocks_;
    Json                   items_    = Json::array();  // the output so far
    Json                   part_     = Json::object(); // the content of the last item, while it is made
    Json                   logprobs_ = Json::array();  // of tokens whose text is still to come
    std::string            arguments_;                 // of the last item, a call, while it is made
    bool                   custom_ = false;            // that call is of a custom tool
    std::string            events_;
    std::optional<Timings> timings_; // the last ones
    int                    sequence_ = 0, n_calls_ = 0;
    bool                   cut_ = false;
};

std::unique_ptr<AnswerRenderer> responses_renderer(ResponseHead head, Json echo, ResponsesTools tools,
                                                   std::function<void(const Json&)> done, std::int64_t (*now)()) {
    return std::make_unique<ResponsesRenderer>(std::move(head), std::move(echo), std::move(tools), std::move(done),
                                               now);
}

// -- stored responses

ApiError no_response(const std::string& id, const std::string& param, int status) {
    return {status, cat("there is no response ", quote(cut_short(id)), ", or no longer"), param,
            param.empty() ? "" : "previous_response_not_found"};
}

Parsed<ResponsesRequest> parse(ApiContext& api, const HttpExchange& e) {
    const FindItems find = [&](const std::string& id) -> Parsed<Json> {
        const auto stored = api.shared.stored.find(std::string(given_key(e.request)), id);
        if (!stored) return std::unexpected(no_response(id, "previous_response_id", 400));
        // As values texts take many times their bytes.
        if (!e.peer->count_memory((stored->input.size() + stored->response.size()) * 20))
            return std::unexpected(ApiError{503, "too many large requests at once", "", "no_room"});
        Json       items    = Json::parse(stored->input);
        const Json response = Json::parse(stored->response);
        for (const Json& item : response["output"]) items.push_back(item);
        return items;
    };
    return parse_responses_request(e.request.body, api.options.limits, api.shared.stored.on() ? find : FindItems());
}

// The id in a path …/responses/ID.
std::string id_in(const HttpExchange& e) {
    constexpr std::string_view before = "/responses/";
    const std::string_view     path   = e.request.path;
    const std::string_view     rest   = path.substr(path.find(before) + before.size());
    return std::string(rest.substr(0, rest.find('/')));
}

std::shared_ptr<const StoredResponse> find_stored(SharedContext& shared, HttpExchange& e) {
    auto stored = shared.stored.find(std::string(given_key(e.request)), id_in(e));
    if (!stored) refuse(e, no_response(id_in(e), "", 404));
    return stored;
}

void answer_stored_response(SharedContext& shared, HttpExchange& e) {
    for (const auto& [name, value] : e.request.query)
        if (name == "stream" && value != "false")
            return refuse(e, ApiError{400, "a stored response is no stream: its events are not kept", "stream", ""});
    if (const auto stored = find_stored(shared, e)) e.response.body = stored->response;
}

void delete_stored_response(SharedContext& shared, HttpExchange& e) {
    const std::string id = id_in(e);
    if (!shared.stored.erase(std::string(given_key(e.request)), id)) return refuse(e, no_response(id, "", 404));
    answer_json(e, Json{{"id", id}, {"object", "response"}, {"deleted", true}});
}

// A page of the list: `limit` items in `order` from the one behind `after` on.
void answer_stored_items(SharedContext& shared, HttpExchange& e) {
    const auto stored = find_stored(shared, e);
    if (!stored) return;
    std::string after, order = "desc";
    int         limit = 20;
    for (const auto& [name, value] : e.request.query) {
        if (name == "after") after = value;
        if (name == "order") order = value;
        if (name != "limit") continue;
        const char* end = value.data() + value.size();
        if (std::from_chars(value.data(), end, limit).ptr != end || value.empty()) limit = 0;
    }
    if (limit < 1 || limit > 100) return refuse(e, ApiError{400, "limit has to be an integer in 1..100", "limit", ""});
    if (order != "asc" && order != "desc") return refuse(e, ApiError{400, "order has to be asc or desc", "order", ""});
    if (!count_memory(e, stored->input.size() * 20)) return;
    const Json        list = Json::parse(stored->input);
    const std::size_t n    = list.size();
    const auto        item = [&](std::size_t i) -> const Json& { return list[order == "asc" ? i : n - 1 - i]; };
    std::size_t       i    = 0;
    if (!after.empty()) {
        while (i < n && item(i)["id"] != after) i++;
        if (i++ == n) return refuse(e, ApiError{400, "after names no item", "after", ""});
    }
    Json page = Json::array();
    for (; i < n && page.size() < std::size_t(limit); i++) page.push_back(item(i));
    Json out{{"object", "list"},
             {"first_id", page.empty() ? Json() : page.front()["id"]},
             {"last_id", page.empty() ? Json() : page.back()["id"]},
             {"has_more", i < n}};
    out["data"] = std::move(page);
    answer_json(e, std::move(out));
}

void answer_responses_tokens(ApiContext& api, HttpExchange& e) {
    Parsed<ResponsesRequest> parsed = parse(api, e);
    if (!parsed) return api.refuse(e, parsed.error());
    answer_input_tokens(api, e, std::move(parsed->generation), "input");
}

// 32 hexadecimal digits that no other response has: a response that is stored under a client's X-Request-Id would replace another.
std::string made_up_id() {
    std::string id;
    for (int i = 0; i < 4; i++) {
        char digits[16];
        std::snprintf(digits, sizeof digits, "%08x", std::random_device{}());
        id += digits;
    }
    return id;
}

void answer_responses(ApiContext& api, HttpExchange& e) {
    Parsed<ResponsesRequest> parsed = parse(api, e);
    if (!parsed) return api.refuse(e, parsed.error());
    generate(api, e, std::move(parsed->generation), "input",
             [&](ResponseHead head, const GenerationRequest&, const std::vector<std::string>&) {
                 head.id = made_up_id();
                 std::function<void(const Json&)> store;
                 if (parsed->store) {
                     for (std::size_t i = 0; i < parsed->items.size(); i++)
                         if (Json& item = parsed->items[i]; text_in(item, "id").empty())
                             item["id"] = cat("item_", head.id, '_', i);
                     store = [&stored = api.shared.stored, owner = std::string(given_key(e.request)),
                              input = json_dump(std::move(parsed->items))](const Json& response) {
                         stored.put(owner, response["id"].get<std::string>(), {json_dump(response), input});
                     };
                 }
                 return responses_renderer(head, std::move(parsed->echo), std::move(parsed->tools), std::move(store));
             });
}

} // namespace quire
