// quire.serve.openai.responses_request: the bodies of OpenAI's /v1/responses → the request that a chat with the same content makes
// (https://platform.openai.com/docs/api-reference/responses). Owns nothing.
export module quire.serve.openai.responses_request;

import quire.core.base;
import quire.serve.api.generation_settings;
import quire.serve.api.request_fields;
import quire.serve.openai.request;
export import quire.serve.openai.responses_tools;
import quire.serve.openai.translated_fields;

export namespace quire {

struct ResponsesRequest {
    GenerationRequest generation;
    Json              echo;          // the members of the response that repeat the request, and its `warnings`
    ResponsesTools    tools;         // what the functions of the generation stand for
    Json              items;         // the input, that of earlier responses first; each has an `id` or is to get one
    bool              store = false; // later requests may continue the response
};

// The items of an earlier response with this id, those of its output last. Error: there is none.
using FindItems = std::function<Parsed<Json>(const std::string& id)>;

// `find_items`: none: nothing is stored.
Parsed<ResponsesRequest> parse_responses_request(std::string_view json, const ApiLimits& limits,
                                                 const FindItems& find_items = {});

} // namespace quire

module :private;

namespace quire {

constexpr int most_parts = 4096;

class ResponsesReader {
public:
    ResponsesReader(const Json& body, const ApiLimits& limits, const FindItems& find_items)
        : body_(body), limits_(limits), find_items_(find_items), f_(body) {}

    Parsed<ResponsesRequest> read() {
        refuse_stored();
        if (const std::string text = f_.text("instructions", limits_.json.bytes); !text.empty())
            messages_.push_back({{"role", "system"}, {"content", text}});
        read_input();
        read_tools();
        read_tool_choice();
        read_text();
        read_reasoning();
        read_rest();
        pass_on(f_, body_, chat_);
        if (messages_.empty()) f_.fail("input", "input has no message");
        if (f_.failed()) return f_.error();
        chat_["messages"] = std::move(messages_);
        // A message of the assistant at the end is not continued, unless the request says so.
        if (!chat_.contains("continue_final_message") && !chat_.contains("add_generation_prompt"))
            chat_["add_generation_prompt"] = true;
        Parsed<GenerationRequest> generation = read_chat_request(chat_, limits_);
        if (!generation) return std::unexpected(generation.error());
        if (generation->constraint && generation->constraint->param == "response_format")
            generation->constraint->param = "text.format"; // as this API calls it
        return ResponsesRequest{std::move(*generation), echo(), std::move(tools_.tools), std::move(items_), store_};
    }

private:
    void refuse_stored() {
        for (const char* name : {"conversation", "prompt"})
            if (f_.has(name)) f_.fail(name, cat(name, " is not supported; send the whole input"));
        if (f_.boolean("background", false)) f_.fail("background", "background is not supported");
        store_    = f_.boolean("store", true) && find_items_;
        previous_ = f_.text("previous_response_id", 1024);
        if (previous_.empty()) return;
        if (!find_items_)
            return f_.fail("previous_response_id",
                           "previous_response_id is not supported: nothing is stored here; send the whole input");
        Parsed<Json> items = find_items_(previous_);
        if (!items) return f_.fail(items.error());
        items_ = std::move(*items);
    }

    // The text of a content: a string, or parts that are text.
    std::string text_of(const Json& content, const std::string& where) {
        if (content.is_string()) return content.get<std::string>();
        if (!content.is_array() || content.size() > std::size_t(most_parts))
            return f_.fail("input", cat(where, " has to be a string or a list of at most ", most_parts, " parts")), "";
        std::string text;
        for (std::size_t i = 0; i < content.size(); i++) {
            const Json&       part = content[i];
            const std::string type = part.is_object() ? text_in(part, "type") : "";
            const char*       name = type == "refusal" ? "refusal" : "text";
            if (type != "input_text" && type != "output_text" && type != "text" && type != "refusal")
                return f_.fail("input",
                               cat(where, "[", i, "] is a part of type ", quote(type), ", which is not supported")),
                       "";
            if (!part.contains(name) || !part[name].is_string())
                return f_.fail("input", cat(where, "[", i, "].", name, " has to be a string")), "";
            text += part[name].get_ref<const std::string&>();
        }
        return text;
    }

    void read_input() {
        const Json* input = f_.find("input");
        f_.describe("input", R"({"type":["string","array"],"minItems":1,"items":{"type":"object"}})");
        if (!input) return f_.fail("input", "input is missing");
        const std::size_t n_earlier = items_.size();
        if (input->is_string())
            items_.push_back({{"type", "message"},
                              {"role", "user"},
                              {"content", Json::array({{{"type", "input_text"}, {"text", *input}}})}});
        else
            for (const Json& item : objects_of(f_, "input", limits_.messages))
                items_.push_back(text_in(item, "type") == "item_reference" ? referenced(item) : item);
        if (f_.failed()) return;
        if (items_.size() == n_earlier) return f_.fail("input", "input is empty");
        if (items_.size() > std::size_t(limits_.messages))
            return f_.fail("input", cat("input and the earlier items are ", items_.size(), "; ", limits_.messages,
                                        " are allowed"));
        for (std::size_t i = 0; i < items_.size() && !f_.failed(); i++)
            read_item(items_[i], i < n_earlier ? cat("earlier item ", i) : cat("input[", i - n_earlier, "]"));
        flush();
        if (!f_.failed()) finish_outputs();
    }

    // The item of a stored response that an item_reference names. The id of an item has that of its response: msg_ID_0 is of resp_ID.
    Json referenced(const Json& reference) {
        const std::string id    = text_in(reference, "id");
        const std::size_t begin = id.find('_') + 1, end = id.rfind('_');
        if (!find_items_) f_.fail("input", "an item_reference is not supported: nothing is stored here");
        else if (id.empty()) f_.fail("input", "the id of an item_reference is missing");
        else if (!referenced_.insert(id).second)
            f_.fail("input", cat("Duplicate item found with id ", cut_short(id), "."));
        if (f_.failed()) return {};
        Parsed<Json> items = Json::array();
        if (end != id.npos && begin < end) items = find_items_(cat("resp_", id.substr(begin, end - begin)));
        if (!items && items.error().status != 400) f_.fail(items.error());
        if (items)
            for (Json& item : *items)
                if (text_in(item, "id") == id) return std::move(item);
        f_.fail("input", cat("Item with id ", cut_short(id), " not found: it is in no stored response, or no longer."));
        return {};
    }

    void read_item(const Json& item, const std::string& where) {
        const std::string type = text_in(item, "type");
        if (type == "message" || (type.empty() && item.contains("role"))) return read_message(item, where);
        if (type == "function_call" || type == "custom_tool_call") return read_call(item, where);
        if (type == "function_call_output" || type == "custom_tool_call_output") return read_output(item, where);
        if (type == "reasoning") return read_thoughts(item, where);
        f_.fail("input", type.empty() ? where + " has no type"
                                      : cat(where, " is an item of type ", quote(type), ", which is not supported"));
    }

    void read_message(const Json& item, const std::string& where) {
        const std::string role = text_in(item, "role");
        if (role != "user" && role != "assistant" && role != "system" && role != "developer")
            return f_.fail("input", where + ".role has to be user, assistant, system or developer");
        const auto content = item.find("content");
        if (content == item.end()) return f_.fail("input", where + " has no content");
        std::string text = text_of(*content, where + ".content");
        if (f_.failed()) return;
        if (role == "assistant") {
            if (answer_.contains("content") || answer_.contains("tool_calls")) flush();
            answer_["content"] = std::move(text);
            return;
        }
        flush();
        finish_outputs();
        messages_.push_back({{"role", role}, {"content", std::move(text)}});
    }

    void read_call(const Json& item, const std::string& where) {
        const std::string id = text_in(item, "call_id"), name = text_in(item, "name");
        if (id.empty()) return f_.fail("input", where + ".call_id is missing");
        if (name.empty()) return f_.fail("input", where + ".name is missing");
        const bool  custom = text_in(item, "type") == "custom_tool_call";
        const char* given  = custom ? "input" : "arguments";
        if (!item.contains(given) || !item[given].is_string())
            return f_.fail("input", cat(where, ".", given, " has to be a string"));
        const std::string  text      = custom ? custom_arguments(text_in(item, given)) : text_in(item, given);
        const Result<Json> arguments = json_parse(text);
        if (arguments && !arguments->is_object())
            return f_.fail("input", where + ".arguments has to be the text of a JSON object");
        const std::string function = function_name(text_in(item, "namespace"), name);
        answer_["tool_calls"].push_back(
            {{"id", id}, {"type", "function"}, {"function", {{"name", function}, {"arguments", text}}}});
        called_.push_back({id, function, text.empty() || (arguments && arguments->is_object())});
    }

    void read_output(const Json& item, const std::string& where) {
        flush();
        const std::string id = text_in(item, "call_id");
        if (id.empty()) return f_.fail("input", where + ".call_id is missing");
        const auto at = std::ranges::find(open_, id, &Call::id);
        if (at == open_.end())
            return f_.fail("input",
                           cat("No tool call found for function call output with call_id ", cut_short(id), "."));
        const auto output = item.find("output");
        if (output == item.end()) return f_.fail("input", where + ".output is missing");
        messages_.push_back({{"role", "tool"},
                             {"tool_call_id", id},
                             {"name", at->name},
                             {"content", text_of(*output, where + ".output")}});
        open_.erase(at);
    }

    void read_thoughts(const Json& item, const std::string& where) {
        if (answer_.contains("content") || answer_.contains("tool_calls")) flush();
        std::string text;
        for (const char* name : {"content", "summary"}) {
            const auto list = item.find(name);
            if (list == item.end() || list->is_null() || !text.empty()) continue;
            if (!list->is_array()) return f_.fail("input", cat(where, ".", name, " has to be a list"));
            for (const Json& part : *list)
                if (part.is_object()) text += text_in(part, "text");
        }
        if (!text.empty()) answer_["reasoning_content"] = std::move(text);
    }

    // Ends the message of the assistant that the last items made.
    void flush() {
        if (answer_.empty() || f_.failed()) return;
        finish_outputs();
        Json m{{"role", "assistant"}, {"content", answer_.contains("content") ? answer_["content"] : Json()}};
        for (const char* name : {"tool_calls", "reasoning_content"})
            if (answer_.contains(name)) m[name] = std::move(answer_[name]);
        if (m["content"].is_null() && !m.contains("tool_calls")) m["content"] = "";
        messages_.push_back(std::move(m));
        open_   = std::exchange(called_, {});
        answer_ = Json::object();
    }

    void finish_outputs() {
        const auto at = std::ranges::find(open_, true, &Call::whole);
        if (at != open_.end() && !f_.failed())
            f_.fail("input", cat("No tool output found for function call ", cut_short(at->id),
                                 ". Outputs have to follow their calls directly, before any other message."));
        open_.clear();
    }

    void read_tools() {
        tools_ = translate_tools(f_);
        if (!tools_.functions.empty()) chat_["tools"] = tools_.functions;
    }

    // The function that an object of the choice names.
    static std::string named(const Json& tool) {
        return function_name(text_in(tool, "namespace"), text_in(tool, "name"));
    }

    void read_tool_choice() {
        const Json* choice = f_.find("tool_choice");
        f_.describe("tool_choice", R"({"anyOf":[{"enum":["none","auto","required"]},{"type":"object"}]})");
        if (!choice) return;
        if (!choice->is_object()) return void(chat_["tool_choice"] = *choice);
        const std::string type = text_in(*choice, "type");
        if (type == "function" || type == "custom")
            return void(chat_["tool_choice"] = {{"type", "function"}, {"function", {{"name", named(*choice)}}}});
        if (type != "allowed_tools" || !choice->contains("tools") || !(*choice)["tools"].is_array())
            return f_.fail("tool_choice",
                           "tool_choice has to be none, auto, required, or of type function or allowed_tools");
        Json allowed = Json::array();
        if (chat_.contains("tools"))
            for (const Json& tool : chat_["tools"])
                for (const Json& one : (*choice)["tools"])
                    if (one.is_object() && named(one) == text_in(tool["function"], "name")) {
                        allowed.push_back(tool);
                        break;
                    }
        if (allowed.empty()) return f_.fail("tool_choice", "tool_choice allows none of the tools");
        chat_["tools"]       = std::move(allowed);
        chat_["tool_choice"] = text_in(*choice, "mode") == "required" ? "required" : "auto";
    }

    void read_text() {
        const Json* text = f_.object("text");
        if (!text) return;
        if (const auto verbosity = text->find("verbosity"); verbosity != text->end()) chat_["verbosity"] = *verbosity;
        const auto format = text->find("format");
        if (format == text->end() || format->is_null()) return;
        const std::string type = format->is_object() ? text_in(*format, "type") : "";
        if (type == "text") return;
        if (type == "json_object") return void(chat_["response_format"] = {{"type", "json_object"}});
        if (type != "json_schema" || !format->contains("schema"))
            return f_.fail("text.format",
                           "text.format has to have the type text, json_object, or json_schema with a schema");
        chat_["response_format"] = {
            {"type", "json_schema"},
            {"json_schema", {{"name", text_in(*format, "name")}, {"schema", (*format)["schema"]}}}};
    }

    void read_reasoning() {
        const Json* reasoning = f_.object("reasoning");
        if (!reasoning) return;
        const auto effort = reasoning->find("effort");
        if (effort == reasoning->end() || effort->is_null()) return;
        if (!effort->is_string()) return f_.fail("reasoning.effort", "reasoning.effort has to be a string");
        if (*effort == "none") chat_["enable_thinking"] = false;
        else if (limits_.reasoning_effort) chat_["reasoning_effort"] = *effort;
    }

    // The response repeats it, so that it is no longer than OpenAI allows.
    void read_metadata() {
        constexpr std::size_t most = 16, longest = 512;
        const Json*           metadata = f_.find("metadata");
        f_.describe("metadata", R"({"type":"object","maxProperties":16,"additionalProperties":{"type":"string"}})");
        if (!metadata) return;
        bool good = metadata->is_object() && metadata->size() <= most;
        if (good)
            for (auto at = metadata->begin(); at != metadata->end(); ++at)
                good = good && at->is_string() && at->get_ref<const std::string&>().size() <= longest &&
                       at.key().size() <= longest;
        if (!good)
            f_.fail("metadata",
                    cat("metadata has to be an object of at most ", most, " strings of at most ", longest, " bytes"));
    }

    void read_rest() {
        read_metadata();
        for (const char* name : {"user", "safety_identifier", "prompt_cache_key"}) (void)f_.text(name, 512); // repeated
        for (const char* name : {"timings_per_token", "return_progress"}) // llama.cpp's
            if (const Json* asked = f_.find(name)) chat_[name] = *asked;
        f_.describe("model", R"({"type":"string"})");
        if (const Json* model = f_.find("model")) chat_["model"] = *model;
        if (const auto n = f_.integer("max_output_tokens", 1, std::numeric_limits<int>::max()))
            chat_["max_tokens"] = *n;
        (void)f_.integer("max_tool_calls", 0, std::numeric_limits<int>::max());
        bool logprobs = false;
        f_.describe("include", R"({"type":"array","items":{"type":"string"}})");
        if (const Json* include = f_.find("include")) {
            if (!include->is_array() || !std::ranges::all_of(*include, [](const Json& s) { return s.is_string(); }))
                return f_.fail("include", "include has to be a list of strings");
            logprobs = std::ranges::find(*include, "message.output_text.logprobs") != include->end();
        }
        const int top = f_.integer("top_logprobs", 0, limits_.logprobs, 0);
        if (logprobs || top > 0) chat_["logprobs"] = true, chat_["top_logprobs"] = top;
        if (const std::string cut = f_.choice("truncation", {"auto", "disabled"}, ""); !cut.empty())
            chat_["truncation"] = cut;
    }

    // Members that clients look for, as null where they are not there.
    static void add_members(Json& object, std::initializer_list<const char*> names) {
        for (const char* name : names)
            if (!object.contains(name)) object[name] = nullptr;
    }

    Json echo() {
        const auto given = [&](const char* name, Json otherwise) {
            const Json* v = f_.find(name);
            return v ? *v : std::move(otherwise);
        };
        Json reasoning = given("reasoning", Json::object()), text = given("text", Json::object());
        for (const char* name : {"effort", "summary"})
            if (!reasoning.contains(name)) reasoning[name] = nullptr;
        if (!text.contains("format") || text["format"].is_null()) text["format"] = {{"type", "text"}};
        if (text["format"]["type"] == "json_schema") add_members(text["format"], {"description", "strict"});
        Json tools = given("tools", Json::array());
        for (Json& tool : tools)
            if (text_in(tool, "type") == "function") add_members(tool, {"description", "parameters", "strict"});
        const SamplingParams& usual = limits_.samplers.params;
        Json                  out{{"background", false},
                                  {"frequency_penalty", given("frequency_penalty", decimal(usual.frequency_penalty))},
                                  {"instructions", given("instructions", nullptr)},
                                  {"max_output_tokens", given("max_output_tokens", nullptr)},
                                  {"max_tool_calls", given("max_tool_calls", nullptr)},
                                  {"metadata", given("metadata", Json::object())},
                                  {"parallel_tool_calls", given("parallel_tool_calls", true)},
                                  {"presence_penalty", given("presence_penalty", decimal(usual.presence_penalty))},
                                  {"previous_response_id", or_null(previous_)},
                                  {"prompt_cache_key", given("prompt_cache_key", nullptr)},
                                  {"reasoning", std::move(reasoning)},
                                  {"safety_identifier", given("safety_identifier", nullptr)},
                                  {"service_tier", "default"},
                                  {"store", store_},
                                  {"temperature", given("temperature", decimal(usual.temperature))},
                                  {"text", std::move(text)},
                                  {"tool_choice", given("tool_choice", "auto")},
                                  {"tools", std::move(tools)},
                                  {"top_logprobs", given("top_logprobs", 0)},
                                  {"top_p", given("top_p", decimal(usual.top_p))},
                                  {"truncation", given("truncation", "disabled")},
                                  {"user", given("user", nullptr)}};
        if (!tools_.left_out.empty()) out["warnings"] = Json::array({tools_.left_out});
        return out;
    }

    const Json&           body_;
    const ApiLimits&      limits_;
    const FindItems&      find_items_;
    JsonFields            f_;
    std::string           previous_; // the id of the response that this one continues; "": none
    bool                  store_ = false;
    Json                  items_ = Json::array();
    std::set<std::string> referenced_; // ids of item references
    Json                  chat_     = Json::object();
    Json                  messages_ = Json::array();
    TranslatedTools       tools_;
    Json answer_ = Json::object(); // the message of the assistant that is read: content, reasoning_content, tool_calls
    struct Call {
        std::string id, name;
        bool        whole = true; // its arguments were not cut off: it has to have an output
    };
    std::vector<Call> called_, open_; // of that message; without an output so far
};

Parsed<ResponsesRequest> parse_responses_request(std::string_view text, const ApiLimits& limits,
                                                 const FindItems& find_items) {
    Parsed<JsonDocument> body = parse_object(text, limits);
    if (!body) return std::unexpected(body.error());
    return ResponsesReader(*body, limits, find_items).read();
}

} // namespace quire
