// quire.json: nlohmann's JSON values with limits: the size and depth of input is checked before it is parsed.
// (No `import quire.std` here: libstdc++'s shared_ptr, which nlohmann instantiates, cannot befriend names of another module.)
module;

#include <algorithm>
#include <cstddef>
#include <expected>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

export module quire.json;

import quire.base;

export namespace quire {

using Json = nlohmann::ordered_json; // objects keep the order of their keys

struct JsonLimits {
    std::size_t bytes = std::size_t(16) << 20;
    int         depth = 64; // of arrays and objects in one another
    // Of one object. An ordered_json looks for every new key among those before it, so time grows with the square.
    int members = 4096;
    // Values in all: each takes some twenty times the room of its text.
    std::size_t values = std::numeric_limits<std::size_t>::max();
};

// Error: where the text stops being JSON, or which limit it breaks.
Result<Json> json_parse(std::string_view text, const JsonLimits& limits = {});

// On one line; bytes that are not UTF-8 come out as U+FFFD.
std::string json_dump(const Json& value);

} // namespace quire

module :private;

namespace quire {

struct Extent {
    int         depth = 0, members = 0;
    std::size_t values = 1;
};

// The deepest nesting of brackets and the longest object, seen without parsing: colons outside strings, counted per
// level down to `max_depth`. Wrong JSON may count wrong, and is refused by the parser.
Extent extent(std::string_view text, int max_depth) {
    Extent           widest;
    std::vector<int> members(std::size_t(std::max(max_depth, 0)) + 1);
    int              depth     = 0;
    bool             in_string = false;
    for (std::size_t i = 0; i < text.size(); i++) {
        const char c = text[i];
        if (in_string) {
            if (c == '\\') i++;
            else if (c == '"') in_string = false;
        } else if (c == '"') {
            in_string = true;
        } else if (c == ',') {
            widest.values++;
        } else if (c == '[' || c == '{') {
            widest.values++;
            widest.depth = std::max(widest.depth, ++depth);
            if (depth > 0 && depth <= max_depth) members[std::size_t(depth)] = 0;
        } else if (c == ']' || c == '}') {
            depth--;
        } else if (c == ':' && depth > 0 && depth <= max_depth) {
            widest.members = std::max(widest.members, ++members[std::size_t(depth)]);
        }
    }
    return widest;
}

Result<Json> json_parse(std::string_view text, const JsonLimits& limits) {
    if (text.size() > limits.bytes)
        return fail_with(ErrorKind::limit, "the JSON text has ", text.size(), " bytes; ", limits.bytes, " are allowed");
    const Extent found = extent(text, limits.depth);
    if (found.depth > limits.depth)
        return fail_with(ErrorKind::limit, "the JSON text is nested ", found.depth, " deep; ", limits.depth,
                         " is allowed");
    if (found.members > limits.members)
        return fail_with(ErrorKind::limit, "an object of the JSON text has ", found.members, " members; ",
                         limits.members, " are allowed");
    if (found.values > limits.values)
        return fail_with(ErrorKind::limit, "the JSON text has ", found.values, " values; ", limits.values,
                         " are allowed");
    try {
        return Json::parse(text);
    } catch (const nlohmann::json::exception& e) {
        return fail("not valid JSON: ", e.what());
    }
}

std::string json_dump(const Json& value) {
    return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

} // namespace quire
