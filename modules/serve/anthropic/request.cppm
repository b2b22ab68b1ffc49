// quire.serve.anthropic.request: the bodies of Anthropic's /v1/messages and /v1/messages/count_tokens → the request that a chat with the
// same content makes (https://docs.anthropic.com/en/api/messages). Owns nothing.
export module quire.serve.anthropic.request;

import quire.core.base;
import quire.serve.api.request_fields;
import quire.serve.openai.request;
import quire.serve.openai.translated_fields;

export namespace quire {

// `count`: the tokens are to be counted only, so that max_tokens may be missing.
Parsed<GenerationRequest> parse_messages_request(std::string_view json, const ApiLimits& limits, bool count);

} // namespace quire

module :private;

namespace quire {

constexpr int most_tools = 1024, most_blocks = 4096;

// Whether a tool of this type, such as web_search_20250305, is one that the client does not run.
bool runs_at_anthropic(std::string_view type) {
    constexpr std::string_view theirs[] = {"web_search_", "web_fetch_", "code_execution_"};
    return std::ranges::any_of(theirs, [&](std::string_view one) { return type.starts_with(one); });
}

class MessagesReader {
public:
    MessagesReader(const Json& body, const ApiLimits& limits, bool count)
        : body_(body), limits_(limits), f_(body), count_(count) {}

    Parsed<GenerationRequest> read() {
        read_system();
        read_messages();
        read_tools();
        read_tool_choice();
        read_length();
        read_thinking();
        read_output();
        refuse_others();
        pass_on(f_, body_, chat_);
        if (f_.failed()) return f_.error();
        chat_["messages"] = std::move(messages_);
        if (const Json* model = f_.find("model")) chat_["model"] = *model;
        return read_chat_request(chat_, limits_);
    }

private:
    void fail(const std::string& where, const std::string& message) {
        f_.fail(where.substr(0, where.find('.')), cat(where, ": ", message));
    }

    // The text of a content that may hold nothing else: a string or blocks of text.
    std::string text_of(const Json& content, const std::string& where) {
        if (content.is_string()) return content.get<std::string>();
        if (!content.is_array())
            return fail(where, cat("it is ", type_name(content), "; it has to be a string or a list of blocks")), "";
        std::string text;
        for (std::size_t i = 0; i < content.size(); i++) {
            const Json&       block = content[i];
            const std::string at    = cat(where, '.', i);
            if (!block.is_object()) return fail(at, cat("it is ", type_name(block), "; it has to be a block")), "";
            if (!is_text(block, at)) return "";
            text += block["text"].get_ref<const std::string&>();
        }
        return text;
    }

    bool is_text(const Json& block, const std::string& where) {
        const std::string type = text_in(block, "type");
        if (type.empty()) fail(where, "the block has no type");
        else if (type != "text")
            fail(where, cat("a block of type ", quote(type), " cannot stand here, or is not supported"));
        else if (!block.contains("text") || !block["text"].is_string()) fail(where + ".text", "it has to be a string");
        return !f_.failed();
    }

    void read_system() {
        const Json* system = f_.find("system");
        f_.describe("system", R"({"type":["string","array"]})");
        if (!system) return;
        std::string text = text_of(*system, "system");
        if (!text.empty()) messages_.push_back({{"role", "system"}, {"content", std::move(text)}});
    }

    // Successive messages of one role become one message.
    void read_messages() {
        f_.describe(
            "messages",
            R"({"type":"array","minItems":1,"items":{"type":"object","required":["role","content"],"properties":{
                        "role":{"enum":["user","assistant","system"]},"content":{"type":["string","array"]}}}})");
        if (!f_.has("messages")) return f_.fail("messages", "messages: Field required");
        const Json& list = objects_of(f_, "messages", limits_.messages);
        if (f_.failed()) return;
        if (list.empty()) return fail("messages", "at least one message is required");
        std::string role;
        for (std::size_t i = 0; i < list.size() && !f_.failed(); i++) {
            const Json&       m     = list[i];
            const std::string where = cat("messages.", i), next = text_in(m, "role");
            if (next != "user" && next != "assistant" && next != "system")
                return fail(where + ".role", "it has to be user, assistant or system");
            if (next != role) flush(role);
            role               = next;
            const auto content = m.find("content");
            if (content == m.end() || content->is_null()) return fail(where + ".content", "Field required");
            if (role == "system") {
                text_ += text_of(*content, where + ".content");
                continue;
            }
            if (content->is_string()) {
                add_text(content->get<std::string>());
                continue;
            }
            if (!content->is_array() || content->size() > std::size_t(most_blocks))
                return fail(where + ".content",
                            cat("it has to be a string or a list of at most ", most_blocks, " blocks"));
            for (std::size_t k = 0; k < content->size() && !f_.failed(); k++)
                read_block((*content)[k], role == "user", cat(where, ".content.", k));
        }
        flush(role);
        if (!f_.failed()) finish_results("messages");
    }

    void add_text(std::string text) {
        n_texts_++;
        parts_.push_back({{"type", "text"}, {"text", text}});
        text_ += text;
    }

    void read_block(const Json& block, bool user, const std::string& where) {
        if (!block.is_object()) return fail(where, cat("it is ", type_name(block), "; it has to be a block"));
        const std::string type = text_in(block, "type");
        if (user && type == "tool_result") return read_result(block, where);
        if (!user && type == "tool_use") return read_use(block, where);
        if (!user && type == "thinking") {
            if (!block.contains("thinking") || !block["thinking"].is_string())
                return fail(where + ".thinking", "it has to be a string");
            reasoning_ += block["thinking"].get_ref<const std::string&>();
            return;
        }
        if (!user && type == "redacted_thinking") return void(redacted_ = true); // encrypted: no text for the template
        if (is_text(block, where)) add_text(block["text"].get<std::string>());
    }

    void read_use(const Json& block, const std::string& where) {
        const std::string id = text_in(block, "id"), name = text_in(block, "name");
        if (id.empty()) return fail(where + ".id", "Field required");
        if (name.empty()) return fail(where + ".name", "Field required");
        const auto input = block.find("input");
        // The text of a call that was cut off is no object yet.
        if (input == block.end() || (!input->is_object() && !input->is_string()))
            return fail(where + ".input", "it has to be an object");
        const std::string arguments = input->is_string() ? input->get<std::string>() : json_dump(*input);
        calls_.push_back({{"id", id}, {"type", "function"}, {"function", {{"name", name}, {"arguments", arguments}}}});
        open_.push_back({id, name, input->is_object()});
    }

    void read_result(const Json& block, const std::string& where) {
        const std::string id = text_in(block, "tool_use_id");
        if (id.empty()) return fail(where + ".tool_use_id", "Field required");
        const auto at = std::ranges::find(open_, id, &Use::id);
        if (at == open_.end())
            return fail(where, cat("the tool_result answers ", quote(id),
                                   ", which no tool_use block of the message before has as its id"));
        std::string text;
        if (const auto content = block.find("content"); content != block.end() && !content->is_null())
            text = text_of(*content, where + ".content");
        messages_.push_back({{"role", "tool"}, {"tool_call_id", id}, {"name", at->name}, {"content", std::move(text)}});
        open_.erase(at);
    }

    void finish_results(const std::string& where) {
        std::string ids;
        for (const Use& use : std::exchange(open_, {}))
            if (use.whole && ids.size() < 256) ids += cat(ids.empty() ? "" : ", ", cut_short(use.id));
        if (!ids.empty()) fail(where, cat("tool_use ids without a tool_result in the next message: ", ids));
    }

    // Adds the message of the blocks that were read. Results of tools were added already: they stand before the text.
    void flush(const std::string& role) {
        if (role.empty() || f_.failed()) return;
        if (role == "user") finish_results("messages");
        const bool empty = n_texts_ == 0 && text_.empty();
        if (role == "assistant") {
            Json m{{"role", "assistant"}, {"content", text_}};
            if (empty && calls_.empty() && reasoning_.empty() && !redacted_)
                return fail("messages", "a message of the assistant is empty");
            if (!calls_.empty()) m["tool_calls"] = std::move(calls_);
            if (m.contains("tool_calls") && text_.empty()) m["content"] = nullptr;
            if (!reasoning_.empty()) m["reasoning_content"] = reasoning_;
            messages_.push_back(std::move(m));
        } else if (!empty) {
            Json content = role == "user" && n_texts_ > 1 ? std::move(parts_) : Json(text_);
            messages_.push_back({{"role", role}, {"content", std::move(content)}});
        } else if (messages_.empty() || messages_.back()["role"] != "tool")
            return fail("messages", cat("a message of the ", role, " is empty"));
        calls_ = Json::array();
        parts_ = Json::array();
        text_.clear();
        reasoning_.clear();
        n_texts_  = 0;
        redacted_ = false;
    }

    void read_tools() {
        const Json& tools = objects_of(f_, "tools", most_tools);
        if (tools.empty() || f_.failed()) return;
        Json list = Json::array();
        for (std::size_t i = 0; i < tools.size(); i++) {
            const Json&       tool  = tools[i];
            const std::string where = cat("tools.", i), type = text_in(tool, "type");
            if (runs_at_anthropic(type)) continue; // the model is not told of it
            if (!type.empty() && type != "custom")
                return fail(where, cat("a tool of type ", quote(type), " is not supported; only custom ones are"));
            const auto schema = tool.find("input_schema");
            if (schema == tool.end() || !schema->is_object())
                return fail(where + ".input_schema", "it has to be an object");
            if (text_in(tool, "name").empty()) return fail(where + ".name", "Field required");
            // In the order of the other APIs: templates print the object.
            Json       function{{"name", tool["name"]}};
            const auto take = [&](const char* name) {
                if (const auto at = tool.find(name); at != tool.end() && !at->is_null()) function[name] = *at;
            };
            take("description");
            function["parameters"] = *schema;
            take("strict");
            list.push_back({{"type", "function"}, {"function", std::move(function)}});
        }
        chat_["tools"] = std::move(list);
    }

    void read_tool_choice() {
        const Json* choice = f_.find("tool_choice");
        f_.describe(
            "tool_choice",
            R"({"type":"object","required":["type"],"properties":{"type":{"enum":["auto","any","none","tool"]}}})");
        if (!choice) return;
        if (!choice->is_object())
            return fail("tool_choice", cat("it is ", type_name(*choice), "; it has to be an object"));
        const std::string type = text_in(*choice, "type"), name = text_in(*choice, "name");
        if (type == "auto" || type == "none") chat_["tool_choice"] = type;
        else if (type == "any") chat_["tool_choice"] = "required";
        else if (type == "tool" && !name.empty())
            chat_["tool_choice"] = {{"type", "function"}, {"function", {{"name", name}}}};
        else return fail("tool_choice", "its type has to be auto, any, none, or tool with a name");
        JsonFields fields(*choice);
        if (fields.boolean("disable_parallel_tool_use", false)) chat_["parallel_tool_calls"] = false;
        if (fields.failed()) fail("tool_choice", fields.error().error().message);
    }

    void read_length() {
        if (const auto n = f_.integer("max_tokens", 0, std::numeric_limits<int>::max())) chat_["max_tokens"] = *n;
        else if (!count_ && !f_.failed()) f_.fail("max_tokens", "max_tokens: Field required");
        if (const auto stops = f_.texts("stop_sequences", limits_.stops, limits_.stop_bytes); !stops.empty())
            chat_["stop"] = stops;
    }

    void read_thinking() {
        const Json* thinking = f_.find("thinking");
        f_.describe("thinking", R"({"type":"object","required":["type"],"properties":{
            "type":{"enum":["enabled","disabled","adaptive"]}}})");
        if (!thinking) return;
        if (!thinking->is_object())
            return fail("thinking", cat("it is ", type_name(*thinking), "; it has to be an object"));
        const std::string type = text_in(*thinking, "type");
        if (type != "enabled" && type != "disabled" && type != "adaptive")
            return fail("thinking.type", "it has to be enabled, disabled or adaptive");
        chat_["enable_thinking"] = type != "disabled";
        if (type != "enabled") return;
        JsonFields fields(*thinking);
        const int  budget = fields.integer("budget_tokens", 1, std::numeric_limits<int>::max(), -1);
        if (fields.failed()) return fail("thinking", fields.error().error().message);
        if (budget < 0) return fail("thinking.budget_tokens", "Field required");
        if (const auto most = chat_.find("max_tokens"); most != chat_.end() && budget >= most->get<std::int64_t>())
            return fail("thinking.budget_tokens", "it has to be less than max_tokens");
        chat_["reasoning_budget"] = budget;
    }

    // output_config: a JSON Schema for the text, and the effort.
    void read_output() {
        const Json* output = f_.find("output_config");
        f_.describe("output_config", R"({"type":"object"})");
        if (!output) return;
        if (!output->is_object())
            return fail("output_config", cat("it is ", type_name(*output), "; it has to be an object"));
        if (const auto format = output->find("format"); format != output->end() && !format->is_null()) {
            if (!format->is_object() || text_in(*format, "type") != "json_schema" || !format->contains("schema"))
                return fail("output_config.format", "it has to have the type json_schema and a schema");
            chat_["response_format"] = {{"type", "json_schema"},
                                        {"json_schema", {{"name", "output"}, {"schema", (*format)["schema"]}}}};
        }
        if (const std::string effort = text_in(*output, "effort"); !effort.empty() && limits_.reasoning_effort)
            chat_["reasoning_effort"] = effort;
    }

    void refuse_others() {
        for (const char* name : {"container", "mcp_servers"})
            if (const Json* v = f_.find(name); v && !v->empty()) f_.fail(name, cat(name, ": it is not supported"));
        f_.describe("speed", R"({"enum":["standard"]})");
        if (const Json* v = f_.find("speed"); v && *v != "standard")
            f_.fail("speed", "speed: only standard is supported");
        // Without an effect here: fields about the user, about billing, caching and placement at Anthropic, and edits of the
        // conversation that save tokens there.
        for (const char* name : {"metadata", "service_tier", "cache_control", "inference_geo", "diagnostics",
                                 "user_profile_id", "workspace_id", "betas", "context_management"})
            (void)f_.find(name);
    }

    const Json&      body_;
    const ApiLimits& limits_;
    JsonFields       f_;
    bool             count_;
    Json             chat_     = Json::object();
    Json             messages_ = Json::array();
    // of the message that is read
    std::string text_, reasoning_;
    Json        parts_ = Json::array(), calls_ = Json::array();
    int         n_texts_  = 0;
    bool        redacted_ = false; // it has a block of type redacted_thinking
    struct Use {
        std::string id, name;
        bool        whole = true; // its input was not cut off: it has to have a result
    };
    std::vector<Use> open_; // without a result so far
};

Parsed<GenerationRequest> parse_messages_request(std::string_view text, const ApiLimits& limits, bool count) {
    Parsed<JsonDocument> body = parse_object(text, limits);
    if (!body) return std::unexpected(body.error());
    return MessagesReader(*body, limits, count).read();
}

} // namespace quire
