// quire.serve.models.model_field: the model that a request's body names, found without parsing the body: only then is it known whose limits
// the parser has. Owns nothing.
export module quire.serve.models.model_field;

import quire.core.base;
import quire.core.json;

export namespace quire {

// The string of the member `model` of the object in `json`; of several the last, as the parser takes it. "": there is none. In a text
// that is no JSON it may be any string of the text.
std::string model_field(std::string_view json);

} // namespace quire

module :private;

namespace quire {

// The place behind the string that begins at `at`.
std::size_t end_of_string(std::string_view json, std::size_t at) {
    for (at++; at < json.size() && json[at] != '"'; at++) at += json[at] == '\\';
    return std::min(at + 1, json.size());
}

std::size_t skip_blanks(std::string_view json, std::size_t at) {
    return std::min(json.find_first_not_of(" \t\r\n", at), json.size());
}

std::string model_field(std::string_view json) {
    constexpr std::string_view key = "\"model\"";
    std::string                name;
    int                        depth = 0;
    for (std::size_t at = 0; at < json.size();) {
        const char c = json[at];
        if (c == '{' || c == '[') depth++;
        if (c == '}' || c == ']') depth--;
        if (c != '"') {
            at++;
            continue;
        }
        const std::size_t end = end_of_string(json, at), colon = skip_blanks(json, end);
        const bool        found = depth == 1 && json.substr(at, end - at) == key && json.substr(colon).starts_with(':');
        at                      = end;
        if (!found) continue;
        const std::size_t value = skip_blanks(json, colon + 1);
        if (!json.substr(value).starts_with('"')) continue;
        at = end_of_string(json, value);
        if (const Result<Json> text = json_parse(json.substr(value, at - value)); text && text->is_string())
            name = text->get<std::string>();
    }
    return name;
}

} // namespace quire
