// quire.core.json: nlohmann's JSON values with limits: the size and depth of input is checked before it is parsed. Owns nothing.
// (No `import quire.core.base` here: libstdc++'s shared_ptr, which nlohmann instantiates, cannot befriend names of another module.)
module;

#include <algorithm>
#include <cstddef>
#include <expected>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "json_value.h"

export module quire.core.json;

import quire.core.may_fail;
import quire.core.result;
import quire.core.unicode;

export namespace quire {

using Json = JsonValue;

struct JsonLimits {
    std::size_t bytes = std::size_t(16) << 20;
    int         depth = 64; // of arrays and objects in one another
    // Of one object. An object looks for every new key among those before it, so time grows with the square.
    int members = 4096;
    // Values in all: each takes some twenty times the room of its text.
    std::size_t values = std::numeric_limits<std::size_t>::max();
};

// A parsed text. To let go of nlohmann's arrays and objects takes memory, which is waited for (json_value.h): this takes them apart without.
class JsonDocument {
public:
    explicit JsonDocument(Json value) : value_(std::move(value)) {}
    JsonDocument(JsonDocument&&)            = default;
    JsonDocument& operator=(JsonDocument&&) = delete;
    ~JsonDocument();

    operator const Json&() const { return value_; } // NOLINT: it is one
    const Json* operator->() const { return &value_; }
    Json        take() && { return std::move(value_); }

private:
    Json value_;
};

// Error: where the text stops being JSON, or which limit it breaks; at most one character of the text stands in it. Throws std::bad_alloc where there is no memory.
Result<JsonDocument> json_document(std::string_view text, const JsonLimits& limits = {});
Result<Json>         json_parse(std::string_view text, const JsonLimits& limits = {});

// On one line; bytes that are not UTF-8 come out as U+FFFD. The second lets go of the value as a JsonDocument does.
std::string json_dump(const Json& value);
std::string json_dump(Json&& value);
// json_dump() of a text, without a value.
std::string json_quoted(std::string_view text);
// As MessagePack (https://msgpack.org).
std::string json_msgpack(const Json& value);

} // namespace quire

module :private;

namespace quire {

extern "C++" void* memory_to_destroy(std::size_t bytes) {
    const MayFail waits(false);
    return ::operator new(bytes);
}

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

// No deeper than the limit of a text's nesting.
void dismantle(Json& value) {
    if (value.is_array())
        for (auto& list = value.get_ref<Json::array_t&>(); !list.empty(); list.pop_back()) dismantle(list.back());
    else if (value.is_object())
        for (auto& members = value.get_ref<Json::object_t&>(); !members.empty(); members.pop_back())
            dismantle(members.back().second);
}

JsonDocument::~JsonDocument() { dismantle(value_); }

// Why the text is no JSON: nlohmann's own words repeat whole strings of it. `read`: bytes up to the place, more than all at the end.
std::string fault_of(std::string_view text, std::size_t read, bool out_of_range) {
    const bool        at_end = read > text.size();
    std::string_view  before = text.substr(0, std::min(read, text.size()));
    const std::size_t line   = std::size_t(std::ranges::count(before, '\n')) + (before.ends_with('\n') ? 0u : 1u);
    const std::size_t begin  = before.substr(0, before.empty() ? 0 : before.size() - 1).rfind('\n') + 1;
    const char        last   = before.empty() ? ' ' : before.back();
    const std::string where  = cat("line ", line, ", column ", std::max<std::size_t>(before.size() - begin, 1), ": ");
    before.remove_suffix(std::size_t(utf8_incomplete(before)));
    if (!utf8_valid(before)) return cat(where, "a byte there is not UTF-8");
    if (at_end) return cat(where, "the text ends there");
    if (out_of_range) return cat(where, "the number there is too large");
    return cat(where, quote({&last, 1}), " cannot stand there");
}

// Builds the value in place, so that the caller can drop a half-built one.
class Builder : public nlohmann::json_sax<Json> {
public:
    Builder(Json& root, std::string_view text) : root_(root), text_(text) {}
    std::string fault;

    bool null() override { return put(nullptr); }
    bool boolean(bool v) override { return put(v); }
    bool number_integer(Json::number_integer_t v) override { return put(v); }
    bool number_unsigned(Json::number_unsigned_t v) override { return put(v); }
    bool number_float(Json::number_float_t v, const std::string&) override { return put(v); }
    bool string(std::string& v) override { return put(std::move(v)); }
    bool binary(Json::binary_t&) override { return false; }
    bool start_array(std::size_t) override { return put(Json::array()), open(); }
    bool start_object(std::size_t) override { return put(Json::object()), open(); }
    bool end_array() override { return open_.pop_back(), true; }
    bool end_object() override { return open_.pop_back(), true; }
    bool key(std::string& v) override {
        last_ = &open_.back()->get_ref<Json::object_t&>()[v];
        return true;
    }
    bool parse_error(std::size_t read, const std::string&, const nlohmann::json::exception& e) override {
        fault = fault_of(text_, read, e.id == 406);
        return false;
    }

private:
    bool put(Json value) {
        if (open_.empty()) last_ = &root_;
        else if (open_.back()->is_array()) last_ = &open_.back()->get_ref<Json::array_t&>().emplace_back();
        *last_ = std::move(value);
        return true;
    }
    bool open() {
        open_.push_back(last_);
        return true;
    }
    Json&              root_;
    std::string_view   text_;
    Json*              last_ = nullptr;
    std::vector<Json*> open_; // from the outside in
};

Result<Json> json_parse(std::string_view text, const JsonLimits& limits) {
    Result<JsonDocument> document = json_document(text, limits);
    if (!document) return std::unexpected(document.error());
    return std::move(*document).take();
}

Result<JsonDocument> json_document(std::string_view text, const JsonLimits& limits) {
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
    Json    value;
    Builder builder(value, text);
    try {
        if (Json::sax_parse(text, &builder)) return JsonDocument(std::move(value));
    } catch (...) {
        dismantle(value);
        throw;
    }
    dismantle(value);
    return fail("not valid JSON: ", builder.fault);
}

std::string json_dump(Json&& value) {
    const JsonDocument document(std::move(value));
    return json_dump(static_cast<const Json&>(document));
}

std::string json_dump(const Json& value) {
    return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string json_quoted(std::string_view text) {
    const auto stays = [](char c) { return static_cast<unsigned char>(c) >= 0x20 && c != '"' && c != '\\'; };
    return std::ranges::all_of(text, stays) && utf8_valid(text) ? cat('"', text, '"') : json_dump(Json(text));
}

std::string json_msgpack(const Json& value) {
    std::string out;
    Json::to_msgpack(value, out);
    return out;
}

} // namespace quire
