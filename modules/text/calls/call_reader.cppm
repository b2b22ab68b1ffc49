// quire.text.calls.call_reader: a text with calls of tools in it, and how far it is read: what the readers of all forms share. Owns nothing.
export module quire.text.calls.call_reader;

import quire.core.base;
import quire.text.calls.call_marks;
import quire.text.calls.tool_parameter;

export namespace quire {

struct ToolCall {
    std::string name;
    std::string arguments;    // a JSON object
    bool        more = false; // more of the last call's arguments; `name` is empty
};

// The kind of the text that follows, in the harmony form.
enum class Channel : std::uint8_t { content, reasoning };

struct CallsRead {
    enum class State : std::uint8_t { whole, more, wrong }; // more: the text ends before the call does
    State                  state = State::wrong;
    std::size_t            size  = 0; // bytes read
    std::vector<ToolCall>  calls;     // may be none, where only a mark of the harmony form was read
    std::optional<Channel> channel;
};

std::string_view without_white_begin(std::string_view text) {
    return text.substr(std::min(text.find_first_not_of(white_space), text.size()));
}

constexpr JsonLimits call_limits{.bytes = std::size_t(1) << 20};

// The text that is read, and how far. The reader of a form ends with wrong(), more() or whole(), which say so in `read`, and returns
// whether calls were read.
class CallReader {
public:
    CallReader(std::string_view text, bool end, const Json& tools) : text_(text), end_(end), tools_(tools) {}

    bool        end() const { return end_; }
    std::size_t at() const { return at_; }
    bool        at_end() const { return at_ == text_.size(); }

    bool wrong() { return read.state = CallsRead::State::wrong, false; }
    bool more() { return read.state = CallsRead::State::more, false; }
    bool whole() {
        read.state = CallsRead::State::whole;
        read.size  = at_;
        return true;
    }

    void skip_white() { at_ = std::min(text_.find_first_not_of(white_space, at_), text_.size()); }
    bool next_is(std::string_view mark) const { return text_.substr(at_).starts_with(mark); }
    bool may_become(std::string_view mark) const {
        const std::string_view rest = text_.substr(at_);
        return !end_ && rest.size() < mark.size() && mark.starts_with(rest);
    }
    bool take(std::string_view mark) {
        if (next_is(mark)) return at_ += mark.size(), true;
        return may_become(mark) || at_end() ? more() : wrong();
    }
    bool skip(std::string_view mark) {
        if (!next_is(mark)) return false;
        at_ += mark.size();
        return true;
    }
    // The text up to `mark`, and behind it.
    std::optional<std::string_view> until(std::string_view mark) {
        const std::size_t to = text_.find(mark, at_);
        if (to == std::string_view::npos) return more(), std::nullopt;
        const std::string_view part = text_.substr(at_, to - at_);
        at_                         = to + mark.size();
        return part;
    }
    // Finds the first `mark` with one of `next` behind it; white space may stand between. Returns the text before the mark, and goes behind the
    // mark. A mark without such a follower is text. Nothing: there is no such mark so far.
    std::optional<std::string_view> before(std::string_view mark, std::span<const std::string> next) {
        for (std::size_t to = at_; (to = text_.find(mark, to)) != std::string_view::npos; to++) {
            const std::string_view rest = without_white_begin(text_.substr(to + mark.size()));
            const auto             here = [&](std::string_view n) { return rest.starts_with(n); };
            if (!std::ranges::any_of(next, here) && !(end_ && rest.empty())) continue;
            const std::string_view part = text_.substr(at_, to - at_);
            at_                         = to + mark.size();
            return part;
        }
        return std::nullopt;
    }
    // As before(). If the text ends without such a mark, the first mark counts.
    std::optional<std::string_view> until(std::string_view mark, std::span<const std::string> next) {
        if (const auto part = before(mark, next)) return part;
        return end_ ? until(mark) : (more(), std::nullopt);
    }
    // A JSON object or list; `open` is its first character.
    std::optional<Json> json(char open) {
        if (at_end()) return more(), std::nullopt;
        if (text_[at_] != open) return wrong(), std::nullopt;
        int  depth     = 0;
        bool in_string = false;
        for (std::size_t i = at_; i < text_.size(); i++) {
            const char c = text_[i];
            if (in_string) {
                if (c == '\\') i++;
                else if (c == '"') in_string = false;
            } else if (c == '"') in_string = true;
            else if (c == '{' || c == '[') depth++;
            else if ((c == '}' || c == ']') && --depth == 0) {
                Result<Json> value = json_parse(text_.substr(at_, i + 1 - at_), call_limits);
                if (!value) return wrong(), std::nullopt;
                at_ = i + 1;
                return std::move(*value);
            }
        }
        return more(), std::nullopt;
    }
    std::string_view rest() const { return text_.substr(at_); }
    void             advance(std::size_t n) { at_ += n; }
    void             back_to(std::size_t at) { at_ = at; }

    // The definition of a tool; nothing: the request has none of this name.
    const Json* tool(std::string_view name) const {
        for (const Json& t : tools_)
            if (t["function"]["name"].get_ref<const std::string&>() == name) return &t["function"];
        return nullptr;
    }
    bool add(std::string_view name, const Json& arguments) {
        if (!arguments.is_object() || !tool(name)) return wrong();
        read.calls.push_back({std::string(name), json_dump(arguments)});
        return true;
    }
    // {"name": …, "arguments": {…}}, where the arguments may be named parameters, and may be an object as text.
    bool add(const Json& call) {
        if (!call.is_object() || !call.contains("name") || !call["name"].is_string()) return wrong();
        const char* key = call.contains("arguments") ? "arguments" : "parameters";
        if (!call.contains(key)) return wrong();
        const auto& name = call["name"].get_ref<const std::string&>();
        if (!call[key].is_string()) return add(name, call[key]);
        const Result<Json> inner = json_parse(call[key].get_ref<const std::string&>(), call_limits);
        return inner ? add(name, *inner) : wrong();
    }

    // {"name": "NAME", "KEY":
    std::optional<std::string> object_head(std::string_view key) {
        const auto word = [&](std::string_view one) { return skip_white(), skip(one); };
        if (!word("{") || !word("\"name\"") || !word(":") || !word("\"")) return std::nullopt;
        const auto name = until("\"");
        if (!name || !word(",") || !word(cat('"', key, '"')) || !word(":")) return std::nullopt;
        skip_white();
        return std::string(*name);
    }

    // The name of a tool, as long as it can be.
    std::optional<std::string> name() {
        const std::size_t at = std::min(text_.find_first_not_of(name_characters, at_), text_.size());
        if (at == text_.size()) return more(), std::nullopt;
        const std::string_view found = text_.substr(at_, at - at_);
        at_                          = at;
        return std::string(found);
    }
    // Matches the text around calls, `pattern` of CallMarks: white space may differ where JSON allows it, and before marks. Nothing: the pattern stands there so
    // far, and the text ends.
    std::optional<bool> try_match(std::string_view pattern) {
        std::size_t at = at_;
        for (std::size_t i = 0; i < pattern.size(); i++) {
            const char c = pattern[i];
            if (white_space.contains(c) || c == '<' || loose_before(pattern, i))
                at = std::min(text_.find_first_not_of(white_space, at), text_.size());
            if (white_space.contains(c)) continue;
            if (at == text_.size()) return std::nullopt;
            if (c == id_mark || c == index_mark) {
                const auto        part = c == id_mark ? id_characters : std::string_view("0123456789");
                const std::size_t to   = std::min(text_.find_first_not_of(part, at), text_.size());
                if (to == at) return false;
                at = to;
            } else if (text_[at++] != c) return false;
        }
        at_ = at;
        return true;
    }
    bool match(std::string_view pattern) {
        const std::optional<bool> there = try_match(pattern);
        return !there ? more() : *there || wrong();
    }

    CallsRead read;

private:
    static constexpr std::string_view name_characters =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.";
    static constexpr std::string_view id_characters = name_characters;

    std::string_view text_;
    std::size_t      at_ = 0;
    bool             end_;
    const Json&      tools_;
};

// A parameter's text as the tool's schema types it: a string as it stands, all else as JSON if it is JSON, or as Python writes it.
Json typed_parameter(const Json* tool, std::string_view key, std::string_view text) {
    const Json* schema = tool ? parameter_schema(*tool, key) : nullptr;
    if (!schema) return std::string(text);
    const JsonKinds kinds = kinds_of((*tool)["parameters"], *schema);
    Result<Json>    value = json_parse(text == "True"    ? "true"
                                       : text == "False" ? "false"
                                       : text == "None"  ? "null"
                                                         : text,
                                    call_limits);
    if (value && !value->is_string() && kinds.has(*value)) return std::move(*value);
    return std::string(text);
}

} // namespace quire
