// quire.json: nlohmann's JSON values behind limits: input from outside is bounded in size and depth before it is parsed.
// (No `import quire.std` here: libstdc++'s shared_ptr, which nlohmann instantiates, cannot befriend names of another module.)
module;

#include <algorithm>
#include <cstddef>
#include <expected>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

export module quire.json;

import quire.base;

export namespace quire {

using Json = nlohmann::ordered_json; // objects keep the order of their keys

struct JsonLimits {
    std::size_t bytes = std::size_t(16) << 20;
    int         depth = 64; // of arrays and objects in one another
};

// Error: where the text stops being JSON, or which limit it breaks.
Result<Json> json_parse(std::string_view text, const JsonLimits& limits = {});

// On one line; bytes that are not UTF-8 come out as U+FFFD.
std::string json_dump(const Json& value);

} // namespace quire

module :private;

namespace quire {

// The deepest nesting of brackets outside strings; wrong JSON may count wrong, and is refused by the parser.
int nesting(std::string_view text) {
    int  depth = 0, deepest = 0;
    bool in_string = false;
    for (std::size_t i = 0; i < text.size(); i++) {
        const char c = text[i];
        if (in_string) {
            if (c == '\\') i++;
            else if (c == '"') in_string = false;
        } else if (c == '"') {
            in_string = true;
        } else if (c == '[' || c == '{') {
            deepest = std::max(deepest, ++depth);
        } else if (c == ']' || c == '}') {
            depth--;
        }
    }
    return deepest;
}

Result<Json> json_parse(std::string_view text, const JsonLimits& limits) {
    if (text.size() > limits.bytes) return fail_with(ErrorKind::limit, "the JSON text has ", text.size(), " bytes; ", limits.bytes, " are allowed");
    if (int depth = nesting(text); depth > limits.depth)
        return fail_with(ErrorKind::limit, "the JSON text is nested ", depth, " deep; ", limits.depth, " is allowed");
    try {
        return Json::parse(text);
    } catch (const nlohmann::json::exception& e) {
        return fail("not valid JSON: ", e.what());
    }
}

std::string json_dump(const Json& value) { return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace); }

} // namespace quire
