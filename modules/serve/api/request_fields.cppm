// quire.serve.api.request_fields: the fields that requests of several routes have: the body as an object, model, prompts. Owns nothing.
export module quire.serve.api.request_fields;

import quire.core.base;
export import quire.core.json;
export import quire.serve.api.error;
export import quire.serve.api.generation_request;
export import quire.serve.api.json_fields;
export import quire.serve.api.limits;

export namespace quire {

// A body as an object.
Parsed<JsonDocument> parse_object(std::string_view text, const ApiLimits& limits);
// Fails where the field `model` is no name, or, with --strict-model-name, none of the server's. `asked`: gets the name.
void parse_model(JsonFields& f, const ApiLimits& limits, std::string* asked = nullptr);
// The adapters of a list of objects with an `id` and a `scale`. `what`: the list's name in errors.
Parsed<std::vector<AdapterUse>> adapter_uses(const Json& list, const std::string& what);
// The prompts of the field `param`: a text, a list of token ids, texts and ids in one list, llama.cpp's object with a `prompt_string` or with a `content` of text parts, or a list
// of all these.
std::vector<Prompt> parse_prompts(JsonFields& f, const std::string& param, const ApiLimits& limits);

} // namespace quire

module :private;

namespace quire {

Parsed<JsonDocument> parse_object(std::string_view text, const ApiLimits& limits) {
    const auto refuse         = [](std::string why) { return std::unexpected(ApiError{400, std::move(why), "", ""}); };
    Result<JsonDocument> json = json_document(text, limits.json);
    if (!json) return refuse(cat("the body cannot be used: ", json.error().message));
    if (!(*json)->is_object()) return refuse(cat("the body is ", type_name(*json), "; it has to be a JSON object"));
    return std::move(*json);
}

void parse_model(JsonFields& f, const ApiLimits& limits, std::string* asked) {
    constexpr std::size_t longest = 256;
    const Json*           v       = f.find("model");
    f.describe("model", R"({"type":"string"})");
    if (!v) return;
    if (!v->is_string()) return f.fail("model", cat("model is ", type_name(*v), "; it has to be a string"));
    const auto& name  = v->get_ref<const std::string&>();
    const bool  known = name.empty() || std::ranges::find(limits.models, name) != limits.models.end();
    if (!known && !limits.strict_model && name.size() > longest)
        return f.fail("model", cat("model has more than ", longest, " bytes"));
    if (asked) *asked = name;
    if (known || !limits.strict_model) return;
    f.fail(ApiError{404, cat("the model ", quote(name), " does not exist; the one here is ", quote(limits.models[0])),
                    "model", "model_not_found"});
}

Parsed<std::vector<AdapterUse>> adapter_uses(const Json& list, const std::string& what) {
    constexpr std::size_t most   = 1024;
    const auto            refuse = [&](std::string_view why) {
        return std::unexpected(ApiError{400, cat(what, why), what.contains(' ') ? "" : what, ""});
    };
    if (!list.is_array()) return refuse(" has to be a list of adapters, each with its id and its scale");
    if (list.size() > most) return refuse(cat(" has ", list.size(), " adapters; ", most, " are allowed"));
    std::vector<AdapterUse> uses;
    for (const Json& item : list) {
        if (!item.is_object()) return refuse(" has a member that is no object with an id and a scale");
        JsonFields f(item);
        const auto id    = f.integer("id", 0, 1 << 20);
        const auto scale = float(f.number("scale", -1e6, 1e6, 0));
        if (!id) f.fail("id", "id is missing");
        if (f.failed()) return refuse(cat(": ", f.error().error().message));
        uses.push_back({int(*id), scale});
    }
    return uses;
}

// Text and ids in one list, as in llama.cpp.
bool parse_mixed(JsonFields& f, const std::string& param, const Json& list, const ApiLimits& limits, Prompt& out) {
    for (const Json& item : list) {
        if (item.is_string()) {
            out.emplace_back(item.get<std::string>());
            continue;
        }
        const std::optional<Token> id = JsonFields::token_of(item, limits.vocab_size);
        if (!id) {
            f.fail(param, cat(param, ": ", JsonFields::shown(item), " is neither a text nor a token id in 0..",
                              limits.vocab_size - 1));
            return false;
        }
        if (out.empty() || !std::holds_alternative<std::vector<Token>>(out.back()))
            out.emplace_back(std::vector<Token>());
        std::get<std::vector<Token>>(out.back()).push_back(*id);
    }
    return true;
}

// llama.cpp's object of a text and its pictures, of which the text alone is supported.
bool parse_prompt_object(JsonFields& f, const std::string& param, const Json& object, Prompt& out) {
    const auto data = object.find("multimodal_data");
    if (data != object.end() && !data->empty())
        f.fail(param, cat(param, " has multimodal_data, which is not supported"));
    if (const auto parts = object.find("content"); parts != object.end() && parts->is_array()) {
        std::string joined;
        for (const Json& part : *parts) {
            if (!part.is_object() || text_in(part, "type") != "text")
                return f.fail(param, cat(param, " has a content with a part that is not text")), false;
            joined += text_in(part, "text");
        }
        out.emplace_back(std::move(joined));
        return true;
    }
    const auto text = object.find("prompt_string");
    if (text == object.end() || !text->is_string())
        f.fail(param, cat(param, " is an object without a text prompt_string"));
    if (f.failed()) return false;
    out.emplace_back(text->get<std::string>());
    return true;
}

std::vector<Prompt> parse_prompts(JsonFields& f, const std::string& param, const ApiLimits& limits) {
    std::vector<Prompt> prompts;
    const Json*         v = f.find(param);
    f.describe(param, R"({"type":["string","array","object"],"minItems":1})");
    if (!v) {
        f.fail(param, cat(param, " is missing"));
        return prompts;
    }
    if (v->is_string()) {
        prompts.push_back({v->get<std::string>()});
        return prompts;
    }
    if (v->is_object()) {
        if (Prompt one; parse_prompt_object(f, param, *v, one)) prompts.push_back(std::move(one));
        return prompts;
    }
    if (!v->is_array() || v->empty()) {
        f.fail(param, v->is_array() ? cat(param, " is empty")
                                    : cat(param, " is ", type_name(*v), "; it has to be a string or a list"));
        return prompts;
    }
    const bool nested = std::ranges::any_of(*v, [](const Json& item) { return item.is_structured(); });
    const bool texts  = std::ranges::all_of(*v, [](const Json& item) { return item.is_string(); });
    if (!nested && !texts) {
        if (Prompt one; parse_mixed(f, param, *v, limits, one)) prompts.push_back(std::move(one));
        return prompts;
    }
    if (v->size() > std::size_t(limits.prompts)) {
        f.fail(param, cat(param, " has ", v->size(), " prompts; ", limits.prompts, " are allowed"));
        return prompts;
    }
    for (const Json& item : *v) {
        Prompt one;
        if (item.is_string()) one.emplace_back(item.get<std::string>());
        else if (item.is_object()) {
            if (!parse_prompt_object(f, param, item, one)) break;
        } else if (!item.is_array() || item.empty()) {
            f.fail(param, cat(param, " is a list with ", item.is_array() ? "an empty list" : type_name(item),
                              " among its prompts"));
            break;
        } else if (!parse_mixed(f, param, item, limits, one)) break;
        prompts.push_back(std::move(one));
    }
    return prompts;
}

} // namespace quire
