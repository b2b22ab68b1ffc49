// quire.serve.openai.conversation_fields: the fields of a request that make a conversation: messages, and what its chat template is given.
// Owns nothing.
export module quire.serve.openai.conversation_fields;

import quire.core.base;
import quire.serve.api.generation_request;
import quire.serve.api.json_fields;
import quire.serve.api.limits;
import quire.serve.openai.tool_request;

export namespace quire {

Conversation parse_conversation(JsonFields& f, const ApiLimits& limits);

} // namespace quire

module :private;

namespace quire {

// Checks the content of a message: a string, or parts of type text. An answer that only calls tools has none; one without calls becomes
// empty, since templates would write null as a word.
bool check_content(JsonFields& f, Json& message, const std::string& where) {
    const auto at = message.find("content");
    if (at == message.end() || at->is_null()) {
        const auto calls = message.find("tool_calls");
        if (message["role"] == "assistant") {
            if (calls == message.end() || calls->is_null() || calls->empty()) message["content"] = "";
            return true;
        }
        f.fail("messages", cat(where, " has no content"));
        return false;
    }
    if (at->is_string()) return true;
    if (!at->is_array()) {
        f.fail("messages", cat("the content of ", where, " is ", type_name(*at), "; it has to be a string or parts"));
        return false;
    }
    for (const Json& part : *at) {
        const bool is_text = part.is_object() && part.contains("type") && part["type"] == "text" &&
                             part.contains("text") && part["text"].is_string();
        if (!is_text) {
            f.fail("messages", cat("the content of ", where, " has a part that is not text"));
            return false;
        }
    }
    return true;
}

// The text of a message that an answer may go on from: one by the assistant, without calls. Its parts are separated by an empty line, as in
// llama.cpp.
std::optional<std::string> begun_answer(const Json& message) {
    if (message["role"] != "assistant" || !message.contains("content") ||
        (message.contains("tool_calls") && !message["tool_calls"].empty()))
        return std::nullopt;
    const Json& content = message["content"];
    if (content.is_string()) return content.get<std::string>();
    if (!content.is_array() || content.empty()) return std::nullopt;
    std::string text;
    for (const Json& part : content)
        text += cat(text.empty() ? "" : "\n\n", part["text"].get_ref<const std::string&>());
    return text;
}

Conversation parse_conversation(JsonFields& f, const ApiLimits& limits) {
    Conversation out;
    const Json*  v = f.find("messages");
    f.describe("messages", R"({"type":"array","minItems":1,"items":{"type":"object","required":["role"],"properties":{
        "role":{"enum":["system","developer","user","assistant","tool"]},"content":{"type":["string","array","null"]},
        "tool_calls":{"type":["array","null"]},"tool_call_id":{"type":["string","null"]}}}})");
    if (!v || !v->is_array() || v->empty()) {
        f.fail("messages", !v               ? "messages is missing"
                           : !v->is_array() ? cat("messages is ", type_name(*v), "; it has to be a list")
                                            : std::string("messages is empty"));
        return out;
    }
    if (v->size() > std::size_t(limits.messages)) {
        f.fail("messages", cat("messages has ", v->size(), " of them; ", limits.messages, " are allowed"));
        return out;
    }
    for (std::size_t i = 0; i < v->size(); i++) {
        Json              m     = (*v)[i];
        const std::string where = cat("message ", i);
        if (!m.is_object())
            return f.fail("messages", cat(where, " is ", type_name(m), "; it has to be an object")), out;
        if (!m.contains("role") || !m["role"].is_string()) return f.fail("messages", cat(where, " has no role")), out;
        const std::string role = m["role"].get<std::string>();
        if (role != "system" && role != "developer" && role != "user" && role != "assistant" && role != "tool")
            return f.fail("messages", cat(where, " has the role ", quote(role),
                                          "; system, developer, user, assistant and tool are known")),
                   out;
        for (const char* calls : {"function_call", "audio"})
            if (m.contains(calls) && !m[calls].is_null() && !m[calls].empty())
                return f.fail("messages", cat(where, " has ", calls, ", which are not supported")), out;
        if (!check_content(f, m, where)) return out;
        out.input.messages.push_back(std::move(m));
    }
    check_tool_messages(f, out.input.messages);
    if (f.failed()) return out;
    if (const Json* variables = f.object("chat_template_kwargs")) out.input.variables = *variables;
    if (f.failed()) return out;
    f.describe("chat_template", R"({"type":"string"})");
    if (const Json* name = f.find("chat_template")) {
        const auto& known = limits.templates;
        if (!name->is_string() || std::ranges::find(known, name->get_ref<const std::string&>()) == known.end()) {
            std::string names;
            for (const std::string& one : known) names += cat(names.empty() ? "" : ", ", one);
            return f.fail("chat_template", cat("chat_template has to name a template of the model: ", names,
                                               "; a template's text is not taken from requests")),
                   out;
        }
        out.input.template_name = name->get<std::string>();
    }
    if (const Json* effort = f.find("reasoning_effort"); effort && *effort == "none" && !limits.reasoning_effort)
        out.input.variables["enable_thinking"] = false;
    if (limits.reasoning_effort)
        if (const std::string effort = f.text("reasoning_effort", 64); !effort.empty())
            out.input.variables["reasoning_effort"] = effort;
    const bool thinks = f.boolean("enable_thinking", true);
    if (f.has("enable_thinking")) out.input.variables["enable_thinking"] = thinks;
    for (auto [name, list] : {std::pair("tools", &out.input.tools), std::pair("documents", &out.input.documents)})
        if (const Json* given = f.list(name)) *list = *given;
    if (f.failed()) return out;
    // The last message may be the beginning of the answer: as requested, or because it is by the assistant (as in llama.cpp).
    std::vector<Json>&               messages       = out.input.messages;
    const std::optional<std::string> begun          = begun_answer(messages.back());
    const bool                       last_is_answer = begun.has_value();
    const bool                       add            = f.boolean("add_generation_prompt", true);
    out.continue_final = f.boolean("continue_final_message", last_is_answer && !f.has("add_generation_prompt"));
    if (out.continue_final && begun) messages.back()["content"] = *begun;
    out.input.add_generation_prompt = add;
    if (out.continue_final && f.has("add_generation_prompt") && add)
        f.fail("continue_final_message", "continue_final_message and add_generation_prompt exclude each other");
    if (out.continue_final && !last_is_answer)
        f.fail("continue_final_message", "continue_final_message needs a last message by the assistant");
    if (out.continue_final && messages.size() > 1 && messages[messages.size() - 2]["role"] == "assistant")
        f.fail("messages", "there are two assistant messages at the end");
    return out;
}

} // namespace quire
