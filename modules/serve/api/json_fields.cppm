// quire.serve.api.json_fields: reads the members of a JSON object by name, type and range, and keeps the first error. What is read of a request can
// be recorded: so its description cannot differ from the checks. Owns nothing.
export module quire.serve.api.json_fields;

import quire.core.base;
export import quire.core.json;
export import quire.serve.api.error;

export namespace quire {

std::string_view type_name(const Json& value) {
    if (value.is_null()) return "null";
    if (value.is_boolean()) return "a boolean";
    if (value.is_string()) return "a string";
    if (value.is_number_integer()) return "an integer";
    if (value.is_number()) return "a number";
    return value.is_array() ? "an array" : "an object";
}

// The text of a member; "" where it is none.
std::string text_in(const Json& object, const char* name) {
    const auto at = object.find(name);
    return at != object.end() && at->is_string() ? at->get<std::string>() : std::string();
}

struct RecordedFields {
    std::map<std::string, Json> fields; // what each may be, as JSON Schema; an empty object: anything
    std::set<std::string>       closed; // names that are recorded no more
};
// Where the next JsonFields of this thread records what it is asked for; null: nowhere.
RecordedFields*& next_recorded();

// The members of a request's object. The first error is kept, so that a reader of many members checks once, at the end.
class JsonFields {
public:
    explicit JsonFields(const Json& object) : object_(object), recorded_(std::exchange(next_recorded(), nullptr)) {}

    // Null counts as absent.
    const Json* find(const std::string& name) {
        seen_.insert(name);
        if (recorded_ && !recorded_->closed.contains(name)) recorded_->fields.try_emplace(name, Json::object());
        const auto at = object_.find(name);
        return at == object_.end() || at->is_null() ? nullptr : &*at;
    }
    bool has(const std::string& name) { return find(name) != nullptr; }

    void fail(const std::string& param, const std::string& message) {
        if (!error_) error_ = ApiError{400, message, param, ""};
    }
    void fail(ApiError error) {
        if (!error_) error_ = std::move(error);
    }

    // A member that has to be a list; null where there is none.
    const Json* list(const std::string& name) {
        const Json* v = find(name);
        describe(name, R"({"type":"array"})");
        if (!v || v->is_array()) return v;
        return fail(name, cat(name, " is ", type_name(*v), "; it has to be a list")), nullptr;
    }
    // A member that has to be an object; null where there is none.
    const Json* object(const std::string& name) {
        const Json* v = find(name);
        describe(name, R"({"type":"object"})");
        if (!v || v->is_object()) return v;
        return fail(name, cat(name, " is ", type_name(*v), "; it has to be an object")), nullptr;
    }
    // A member that has to be one of `values`.
    std::string choice(const std::string& name, const std::vector<std::string>& values, const std::string& otherwise) {
        constexpr std::size_t longest = 64;
        if (recorded_) record(name, {{"enum", values}});
        const std::string value = text(name, longest, otherwise);
        if (!has(name) || failed() || std::ranges::find(values, value) != values.end()) return value;
        std::string known;
        for (const std::string& one : values) known += cat(known.empty() ? "" : " or ", one);
        return fail(name, cat(name, " is ", quote(value), "; it has to be ", known)), otherwise;
    }
    // Says what a member may be that its reader checks itself. `schema`: the text of a JSON Schema.
    void describe(const std::string& name, std::string_view schema) {
        if (recorded_) record(name, Json::parse(schema));
    }
    bool recording() const { return recorded_ != nullptr; }
    // The next JsonFields records where this one does: its object has the members that this one was not asked for, without `hidden`.
    void pass_recording(std::span<const std::string_view> hidden) {
        if (!recorded_) return;
        recorded_->closed.insert(hidden.begin(), hidden.end());
        recorded_->closed.insert(seen_.begin(), seen_.end());
        next_recorded() = recorded_;
    }
    bool boolean(const std::string& name, bool otherwise) {
        const Json* v = find(name);
        if (recorded_) record(name, {{"type", "boolean"}});
        if (!v) return otherwise;
        if (!v->is_boolean())
            return fail(name, cat(name, " is ", type_name(*v), "; it has to be true or false")), false;
        return v->get<bool>();
    }
    std::optional<std::int64_t> integer(const std::string& name, std::int64_t least, std::int64_t most) {
        const Json* v = find(name);
        if (recorded_) record(name, {{"type", "integer"}, {"minimum", least}, {"maximum", most}});
        if (!v) return std::nullopt;
        const std::optional<std::int64_t> n = integer_of(*v);
        if (!n && v->is_number()) return fail(name, cat(name, " is not an integer of 64 bits")), std::nullopt;
        if (!n) return fail(name, cat(name, " is ", type_name(*v), "; it has to be an integer")), std::nullopt;
        if (*n < least || *n > most)
            return fail(name, cat(name, " is ", *n, "; it has to be in ", least, "..", most)), std::nullopt;
        return n;
    }
    int integer(const std::string& name, int least, int most, int otherwise) {
        return int(integer(name, std::int64_t(least), std::int64_t(most)).value_or(otherwise));
    }
    double number(const std::string& name, double least, double most, double otherwise, bool above = false) {
        const Json* v = find(name);
        if (recorded_)
            record(name, {{"type", "number"}, {above ? "exclusiveMinimum" : "minimum", least}, {"maximum", most}});
        if (!v) return otherwise;
        if (!v->is_number()) return fail(name, cat(name, " is ", type_name(*v), "; it has to be a number")), otherwise;
        const double x = v->get<double>();
        if (!(x >= least && x <= most) || (above && x == least))
            return fail(name, cat(name, " is ", x, "; it has to be ", above ? "above " : "at least ", least,
                                  " and at most ", most)),
                   otherwise;
        return x;
    }
    std::string text(const std::string& name, std::size_t most, const std::string& otherwise = "") {
        const Json* v = find(name);
        if (recorded_) record(name, {{"type", "string"}, {"maxLength", most}});
        if (!v) return otherwise;
        if (!v->is_string()) return fail(name, cat(name, " is ", type_name(*v), "; it has to be a string")), otherwise;
        const auto& s = v->get_ref<const std::string&>();
        if (s.size() > most) return fail(name, cat(name, " has more than ", most, " bytes")), otherwise;
        return s;
    }
    // A string or a list of them, none of them empty.
    std::vector<std::string> texts(const std::string& name, int most, int most_bytes) {
        const Json*              v = find(name);
        std::vector<std::string> out;
        if (recorded_) {
            const Json one{{"type", "string"}, {"minLength", 1}, {"maxLength", most_bytes}};
            record(name, {{"anyOf", {one, {{"type", "array"}, {"items", one}, {"maxItems", most}}}}});
        }
        if (!v) return out;
        const auto add = [&](const Json& item) {
            if (!item.is_string()) return fail(name, cat(name, " has to be a string or a list of strings"));
            const auto& s = item.get_ref<const std::string&>();
            if (s.empty()) return fail(name, cat(name, " has an empty string in it"));
            if (s.size() > std::size_t(most_bytes))
                return fail(name, cat("a string of ", name, " has more than ", most_bytes, " bytes"));
            out.push_back(s);
        };
        if (!v->is_array()) add(*v);
        else if (v->size() > std::size_t(most))
            fail(name, cat(name, " has ", v->size(), " strings; ", most, " are allowed"));
        else
            for (const Json& item : *v) add(item);
        return out;
    }
    std::vector<Token> tokens(const std::string& name, int vocab_size) {
        const Json*        v = find(name);
        std::vector<Token> out;
        if (recorded_)
            record(name,
                   {{"type", "array"}, {"items", {{"type", "integer"}, {"minimum", 0}, {"maximum", vocab_size - 1}}}});
        if (!v) return out;
        if (!v->is_array())
            return fail(name, cat(name, " is ", type_name(*v), "; it has to be a list of token ids")), out;
        if (v->size() > std::size_t(vocab_size)) return fail(name, cat(name, " names more tokens than there are")), out;
        for (const Json& item : *v) {
            const std::optional<Token> id = token_of(item, vocab_size);
            if (!id) return fail(name, cat(name, ": ", shown(item), " is no token id in 0..", vocab_size - 1)), out;
            out.push_back(*id);
        }
        return out;
    }

    static std::optional<std::int64_t> integer_of(const Json& v) {
        if (v.is_number_unsigned() && v.get<std::uint64_t>() > std::uint64_t(std::numeric_limits<std::int64_t>::max()))
            return std::nullopt;
        if (v.is_number_integer()) return v.get<std::int64_t>();
        if (!v.is_number_float()) return std::nullopt;
        const double x = v.get<double>();
        if (std::trunc(x) != x || std::abs(x) > 9e15) return std::nullopt;
        return std::int64_t(x);
    }
    static std::optional<Token> token_of(const Json& v, int vocab_size) {
        const std::optional<std::int64_t> n = integer_of(v);
        if (!n || *n < 0 || *n >= vocab_size) return std::nullopt;
        return Token(*n);
    }
    static std::string shown(const Json& v) {
        if (v.is_number()) return json_dump(v);
        return std::string(type_name(v));
    }

    // The names that were asked for.
    const std::set<std::string>& seen() const { return seen_; }

    std::vector<std::string> unknown() const {
        std::vector<std::string> names;
        for (auto at = object_.begin(); at != object_.end(); ++at)
            if (!seen_.contains(at.key()) && names.size() < 16) names.push_back(cut_short(at.key()));
        return names;
    }
    bool                      failed() const { return error_.has_value(); }
    std::unexpected<ApiError> error() const { return std::unexpected(error_.value_or(ApiError{})); }

private:
    void record(const std::string& name, Json schema) {
        if (recorded_->closed.contains(name)) return;
        if (Json& known = recorded_->fields[name]; known.empty()) known = std::move(schema);
    }

    const Json&             object_;
    RecordedFields*         recorded_;
    std::set<std::string>   seen_;
    std::optional<ApiError> error_;
};

} // namespace quire

module :private;

namespace quire {

RecordedFields*& next_recorded() {
    thread_local RecordedFields* next = nullptr;
    return next;
}

} // namespace quire
