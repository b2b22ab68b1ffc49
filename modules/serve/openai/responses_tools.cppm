// quire.serve.openai.responses_tools: the tools of OpenAI's /v1/responses → the functions of a chat that stand for them, and calls of these
// functions back. Owns nothing.
export module quire.serve.openai.responses_tools;

import quire.core.base;
import quire.serve.api.json_fields;
import quire.serve.openai.translated_fields;

export namespace quire {

// The item that a function of the chat stands for.
struct ResponsesTool {
    std::string name_space; // of the tool; "": none
    std::string name;
    bool        custom = false; // its input is a text, not an object
};
using ResponsesTools = std::map<std::string, ResponsesTool>; // by the function's name

struct TranslatedTools {
    Json           functions = Json::array(); // the chat's `tools`
    ResponsesTools tools;
    std::string    left_out; // a sentence on the tools that no client can be asked to run; "": there are none
};
// Reads the field `tools`.
TranslatedTools translate_tools(JsonFields& f);

// The name of the function that stands for a tool.
std::string function_name(const std::string& name_space, const std::string& name);
// The arguments of the function that stands for a custom tool, as a text, and the tool's input in such arguments, which may be cut off.
std::string custom_arguments(const std::string& input);
std::string custom_input(const std::string& arguments);

} // namespace quire

module :private;

namespace quire {

constexpr int most_tools = 1024;

std::string function_name(const std::string& name_space, const std::string& name) {
    if (name_space.empty()) return name;
    return cat(name_space, name_space.ends_with("__") ? "" : "__", name);
}

std::string custom_arguments(const std::string& input) { return json_dump(Json{{"input", input}}); }

std::string custom_input(const std::string& arguments) {
    for (const char* rest : {"", "}", "\"}"})
        if (const Result<Json> whole = json_parse(arguments + rest); whole && whole->is_object()) {
            const auto input = whole->find("input");
            // Without a schema that holds, a model may have written any object.
            return input != whole->end() && input->is_string() ? input->get<std::string>() : arguments;
        }
    return "";
}

class ToolTranslator {
public:
    explicit ToolTranslator(JsonFields& f) : f_(f) {}

    TranslatedTools translate() {
        f_.describe("tools", R"({"type":"array","items":{"type":"object","required":["type"],"properties":{
            "type":{"type":"string","minLength":1}}}})");
        const Json& tools = objects_of(f_, "tools", most_tools);
        for (std::size_t i = 0; i < tools.size() && !f_.failed(); i++) add(tools[i], cat("tools[", i, "]"), "");
        if (!left_out_.empty()) out_.left_out = "the model is not told of tools of these types, which run at OpenAI:";
        for (const std::string& type : left_out_) out_.left_out += " " + type;
        return std::move(out_);
    }

private:
    void add(const Json& tool, const std::string& where, const std::string& name_space) {
        const std::string type = text_in(tool, "type");
        if (type.empty()) return f_.fail(where + ".type", cat("Missing required parameter: '", where, ".type'."));
        if (type == "namespace" && name_space.empty()) return add_all(tool, where);
        if (type != "function" && type != "custom") {
            if (left_out_.size() < 16) left_out_.insert(cut_short(type));
            return;
        }
        const std::string name = text_in(tool, "name");
        if (name.empty()) return f_.fail(where + ".name", cat("Missing required parameter: '", where, ".name'."));
        if (out_.functions.size() >= std::size_t(most_tools))
            return f_.fail("tools", cat("tools has more than ", most_tools, " of them"));
        const bool custom = type == "custom";
        Json       function{{"name", function_name(name_space, name)}};
        if (custom) describe_custom(tool, function);
        else
            for (const char* member : {"description", "parameters", "strict"})
                if (const auto at = tool.find(member); at != tool.end() && !at->is_null()) function[member] = *at;
        out_.tools[text_in(function, "name")] = {name_space, name, custom};
        out_.functions.push_back({{"type", "function"}, {"function", std::move(function)}});
    }

    void add_all(const Json& name_space, const std::string& where) {
        const std::string name  = text_in(name_space, "name");
        const auto        tools = name_space.find("tools");
        if (name.empty()) return f_.fail(where + ".name", cat("Missing required parameter: '", where, ".name'."));
        if (tools == name_space.end() || !tools->is_array())
            return f_.fail(where + ".tools", cat(where, ".tools has to be a list"));
        for (std::size_t i = 0; i < tools->size() && !f_.failed(); i++) {
            const std::string one = cat(where, ".tools[", i, "]");
            if (!(*tools)[i].is_object()) return f_.fail(one, cat(one, " has to be an object"));
            add((*tools)[i], one, name);
        }
    }

    // The function of a custom tool has one argument, a text. A regular expression is a pattern of that text; a grammar is described only.
    static void describe_custom(const Json& tool, Json& function) {
        std::string description = text_in(tool, "description");
        Json        input{{"type", "string"}};
        if (const auto format = tool.find("format"); format != tool.end() && format->is_object())
            if (const std::string definition = text_in(*format, "definition"); !definition.empty()) {
                const std::string syntax = text_in(*format, "syntax");
                if (syntax == "regex") input["pattern"] = cat("^(?:", definition, ")$");
                description +=
                    cat(description.empty() ? "" : "\n", "The input follows this ", syntax, ":\n", definition);
            }
        if (!description.empty()) function["description"] = std::move(description);
        function["parameters"] = {{"type", "object"},
                                  {"properties", {{"input", std::move(input)}}},
                                  {"required", Json::array({"input"})},
                                  {"additionalProperties", false}};
    }

    JsonFields&           f_;
    TranslatedTools       out_;
    std::set<std::string> left_out_; // types
};

TranslatedTools translate_tools(JsonFields& f) { return ToolTranslator(f).translate(); }

} // namespace quire
