// quire.serve.openai.tool_request: the fields of a chat that deal with tools, checked: tools, tool_choice, parallel_tool_calls, and the calls
// and results among the messages. Owns nothing.
export module quire.serve.openai.tool_request;

import quire.core.base;
import quire.serve.api.generation_request;
import quire.serve.api.json_fields;

export namespace quire {

// The field `tools` as a JSON Schema.
constexpr std::string_view schema_of_tools = R"({"type":"array","items":{
    "type":"object","required":["type","function"],"properties":{
        "type":{"enum":["function"]},
        "function":{"type":"object","required":["name"],"properties":{
            "name":{"type":"string","pattern":"^[A-Za-z0-9_.-]{1,256}$"},
            "parameters":{"type":["object","null"]},
            "strict":{"type":["boolean","null"]}}}}}})";

// Fails where a definition is malformed. A choice that names a tool leaves only that one.
ToolUse parse_tool_use(JsonFields& f);

// Checks the calls and the results of all messages, which are objects with a role, and makes the arguments of the calls objects, as
// templates take them. Arguments that are no JSON, as in an answer that was cut off, stay a text, and need no result.
void check_tool_messages(JsonFields& f, std::vector<Json>& messages);
// Calls of one message, and calls that wait for their results.
constexpr std::size_t most_calls = 1024;

} // namespace quire

module :private;

namespace quire {

constexpr std::size_t most_tools = 1024, longest_name = 256;

bool is_name(std::string_view name) {
    return !name.empty() && name.size() <= longest_name && std::all_of(name.begin(), name.end(), [](char c) {
        return is_alphanumeric(c) || c == '_' || c == '-' || c == '.';
    });
}

// False: the tool is malformed, and `f` has the error.
bool check_tool(JsonFields& f, const Json& tool, std::size_t i) {
    const std::string param = cat("tools[", i, "]");
    const auto        wrong = [&](const std::string& what, const std::string& message) {
        f.fail(param + what, message);
        return false;
    };
    if (!tool.is_object()) return wrong("", cat("tools[", i, "] is ", type_name(tool), "; it has to be an object"));
    if (text_in(tool, "type") != "function")
        return wrong(".type", cat("Invalid value for '", param, ".type'. Supported values are: 'function'."));
    const auto at = tool.find("function");
    if (at == tool.end()) return wrong(".function", cat("Missing required parameter: '", param, ".function'."));
    if (!at->is_object())
        return wrong(".function", cat(param, ".function is ", type_name(*at), "; it has to be an object"));
    if (!at->contains("name"))
        return wrong(".function.name", cat("Missing required parameter: '", param, ".function.name'."));
    if (!is_name(text_in(*at, "name")))
        return wrong(".function.name",
                     cat("Invalid '", param,
                         ".function.name': it has to be of letters, digits, _, - and dots, at most ", longest_name));
    if (const auto p = at->find("parameters"); p != at->end() && !p->is_null() && !p->is_object())
        return wrong(".function.parameters",
                     cat(param, ".function.parameters is ", type_name(*p), "; it has to be an object"));
    // Arguments are an object, whatever else the schema would allow.
    if (const auto p = at->find("parameters"); p != at->end() && p->is_object())
        if (const auto type = p->find("type");
            type != p->end() && *type != "object" &&
            !(type->is_array() && std::ranges::find(*type, Json("object")) != type->end()))
            return wrong(".function.parameters",
                         cat("Invalid schema for function '", cut_short(text_in(*at, "name")),
                             "': schema must be a JSON Schema of 'type: \"object\"', got 'type: ",
                             cut_short(json_dump(*type)), "'."));
    if (const auto s = at->find("strict"); s != at->end() && !s->is_null() && !s->is_boolean())
        return wrong(".function.strict", cat(param, ".function.strict has to be true or false"));
    return true;
}

struct OpenCall {
    std::string id;
    bool        whole = true; // not cut off: it has to have a result
};

// The calls of one message; their arguments become objects. Nothing: a call is malformed, and `f` has the error.
std::optional<std::vector<OpenCall>> check_calls(JsonFields& f, Json& calls, const std::string& where) {
    const auto wrong = [&](std::size_t i, const std::string& message) {
        f.fail("messages", cat(message, ": '", where, ".tool_calls[", i, "]'."));
        return std::nullopt;
    };
    if (!calls.is_array())
        return f.fail("messages", cat(where, ".tool_calls is ", type_name(calls), "; it has to be a list")),
               std::nullopt;
    if (calls.size() > most_calls)
        return f.fail("messages", cat(where, " has ", calls.size(), " tool_calls; ", most_calls, " are allowed")),
               std::nullopt;
    std::vector<OpenCall> open;
    for (std::size_t i = 0; i < calls.size(); i++) {
        Json& call = calls[i];
        if (!call.is_object()) return wrong(i, "Invalid type: expected an object");
        if (text_in(call, "id").empty()) return wrong(i, "Missing required parameter 'id'");
        if (text_in(call, "type") != "function")
            return wrong(i, "Invalid value for 'type', which has to be 'function'");
        if (!call.contains("function") || !call["function"].is_object())
            return wrong(i, "Missing required parameter 'function'");
        Json& function = call["function"];
        if (text_in(function, "name").empty()) return wrong(i, "Missing required parameter 'function.name'");
        if (!function.contains("arguments")) return wrong(i, "Missing required parameter 'function.arguments'");
        if (!function["arguments"].is_string())
            return wrong(i, "Invalid type for 'function.arguments', which has to be a string");
        const std::string text  = function["arguments"].get<std::string>();
        Result<Json>      value = text.empty() ? Result<Json>(Json::object()) : json_parse(text);
        const bool        whole = value && value->is_object();
        if (value && !whole) return wrong(i, "Invalid 'function.arguments', which are no JSON object");
        if (whole) function["arguments"] = std::move(*value);
        open.push_back({text_in(call, "id"), whole});
    }
    return open;
}

// {"type": "function", "function": {"name": …}}: puts the tool of that name into `named`.
void name_tool(JsonFields& f, const Json& choice, const Json& tools, Json& named) {
    const auto function = choice.find("function");
    if (text_in(choice, "type") != "function" || function == choice.end() || !function->is_object() ||
        text_in(*function, "name").empty())
        return f.fail(
            "tool_choice",
            "a tool_choice that is an object has to be {\"type\": \"function\", \"function\": {\"name\": …}}");
    const std::string name = text_in(*function, "name");
    for (const Json& tool : tools)
        if (text_in(tool["function"], "name") == name) return named.push_back(tool);
    f.fail("tool_choice", cat("tool_choice names the tool ", quote(name), ", which is not among the tools"));
}

// {"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}: puts the named tools into `allowed`. Returns the mode.
std::string allow_tools(JsonFields& f, const Json& choice, const Json& tools, Json& allowed) {
    const auto list = choice.find("allowed_tools");
    if (list == choice.end() || !list->is_object() || !list->contains("tools") || !(*list)["tools"].is_array())
        return f.fail("tool_choice", "tool_choice.allowed_tools has to have a mode and a list of tools"), "";
    const std::string mode = text_in(*list, "mode");
    if (mode != "auto" && mode != "required")
        return f.fail("tool_choice", "tool_choice.allowed_tools.mode has to be auto or required"), "";
    for (const Json& one : (*list)["tools"]) {
        const std::size_t before = allowed.size();
        if (one.is_object()) name_tool(f, one, tools, allowed);
        if (allowed.size() == before)
            return f.fail("tool_choice", "tool_choice.allowed_tools.tools has to name some of the tools"), "";
    }
    if (allowed.empty()) f.fail("tool_choice", "tool_choice allows none of the tools");
    return mode;
}

ToolUse parse_tool_use(JsonFields& f) {
    ToolUse out;
    f.describe("tools", schema_of_tools);
    f.describe("tool_choice", R"({"anyOf":[{"enum":["none","auto","required"]},{"type":"object"}]})");
    const Json* tools = f.list("tools");
    if (f.failed()) return out;
    if (tools && tools->size() > most_tools)
        return f.fail("tools", cat("tools has ", tools->size(), " of them; ", most_tools, " are allowed")), out;
    for (std::size_t i = 0; tools && i < tools->size(); i++)
        if (!check_tool(f, (*tools)[i], i)) return out;
    const bool given = tools && !tools->empty();
    out.parallel     = f.boolean("parallel_tool_calls", true);
    if (const Json* choice = f.find("tool_choice")) {
        if (*choice == "none" || (*choice == "auto" && !given)) return out;
        const bool named = choice->is_object();
        if (!named && *choice != "auto" && *choice != "required")
            return f.fail("tool_choice", "tool_choice has to be none, auto, required or an object that names a tool"),
                   out;
        if (!given) return f.fail("tool_choice", "'tool_choice' is only allowed when 'tools' are specified."), out;
        if (named && text_in(*choice, "type") == "allowed_tools") {
            out.required = allow_tools(f, *choice, *tools, out.tools) == "required";
            return out;
        }
        out.required = named || *choice == "required";
        if (named) {
            out.parallel = false;
            return name_tool(f, *choice, *tools, out.tools), out;
        }
    }
    if (given) out.tools = *tools;
    return out;
}

void check_tool_messages(JsonFields& f, std::vector<Json>& messages) {
    std::vector<OpenCall> open; // calls without a result so far
    const auto            unanswered = [&] {
        std::string ids;
        for (const OpenCall& call : open)
            if (call.whole && ids.size() < 256) ids += cat(ids.empty() ? "" : ", ", cut_short(call.id));
        if (ids.empty()) return false;
        f.fail("messages",
                          "An assistant message with 'tool_calls' must be followed by tool messages responding to each "
                                     "'tool_call_id'. The following tool_call_ids did not have response messages: " +
                              ids);
        return true;
    };
    bool after_calls = false;
    for (std::size_t i = 0; i < messages.size(); i++) {
        Json&             m     = messages[i];
        const std::string where = cat("messages[", i, "]"), role = text_in(m, "role");
        if (role == "tool") {
            const std::string id = text_in(m, "tool_call_id");
            if (id.empty()) return f.fail("messages", cat("Missing required parameter: '", where, ".tool_call_id'."));
            const auto at = std::ranges::find(open, id, &OpenCall::id);
            if (!after_calls || at == open.end())
                return f.fail("messages", cat("Invalid parameter: messages with role 'tool' must be a response to a "
                                              "preceding message with 'tool_calls': '",
                                              where, "'."));
            open.erase(at);
            continue;
        }
        if (unanswered()) return;
        open.clear();
        after_calls   = false;
        const auto at = m.find("tool_calls");
        if (at == m.end() || at->is_null() || (at->is_array() && at->empty())) continue;
        if (role != "assistant")
            return f.fail("messages",
                          cat("'tool_calls' are only allowed in messages with role 'assistant': '", where, "'."));
        auto calls = check_calls(f, *at, where);
        if (!calls) return;
        open        = std::move(*calls);
        after_calls = true;
    }
    (void)unanswered();
}

} // namespace quire
