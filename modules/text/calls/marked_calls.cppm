// quire.text.calls.marked_calls: reads calls between the marks that a template was found to write around them (CallMarks). Owns nothing.
export module quire.text.calls.marked_calls;

import quire.core.base;
import quire.core.json;
import quire.text.calls.call_marks;
import quire.text.calls.call_reader;
import quire.text.calls.python_call;

export namespace quire {

// Returns whether the calls were read; `r` says why not.
bool read_marked(CallReader& r, const CallMarks& m);

// The text of a value up to `close`, and behind that. A value ends where another parameter follows, else with the last end of a call in the
// text, or with one that another call follows: marks before that are text. `close` may be missing before the end of the call.
std::optional<std::string_view> tagged_value(CallReader& r, const CallMarks& m, std::string_view close);

} // namespace quire

module :private;

namespace quire {

// Where a JSON string ends that the text begins with.
std::size_t end_of_string(std::string_view text) {
    for (std::size_t i = 1; i < text.size(); i++)
        if (text[i] == '\\') i++;
        else if (text[i] == '"') return i + 1;
    return std::string_view::npos;
}

// A value between whose parts stands JSON's punctuation, but whose strings stand in `quote`, and whose keys perhaps in none: at most 64 objects
// and lists in one another.
std::optional<Json> quoted_value(CallReader& r, std::string_view quote, int depth = 0) {
    r.skip_white();
    const auto string = [&]() -> std::optional<Json> {
        const auto text = r.until(quote);
        return text ? std::optional<Json>(std::string(*text)) : std::nullopt;
    };
    if (r.skip(quote)) return string();
    if (r.at_end() || r.may_become(quote)) return r.more(), std::nullopt;
    const bool object = r.next_is("{");
    if (!object && !r.next_is("[")) {
        const std::size_t end = r.rest().find_first_of(",}] \t\r\n<");
        if (end == std::string_view::npos) return r.more(), std::nullopt;
        Result<Json> value = json_parse(r.rest().substr(0, end), call_limits);
        if (!value) return r.wrong(), std::nullopt;
        r.advance(end);
        return std::move(*value);
    }
    if (depth == 64) return r.wrong(), std::nullopt;
    const std::string_view close = object ? "}" : "]";
    Json                   out   = object ? Json::object() : Json::array();
    r.advance(1);
    for (bool first = true;; first = false) {
        r.skip_white();
        if (r.skip(close)) return out;
        if (!first && !r.take(",")) return std::nullopt;
        r.skip_white();
        std::string key;
        if (object) {
            const auto name = r.skip(quote) ? r.until(quote) : r.until(":");
            if (!name) return std::nullopt;
            key = std::string(*name);
            r.skip(":");
        }
        std::optional<Json> value = quoted_value(r, quote, depth + 1);
        if (!value) return std::nullopt;
        if (object) out[key] = std::move(*value);
        else out.push_back(std::move(*value));
    }
}

// Each of these: whether it stands here. Nothing: the text ends before that is known.
std::optional<bool> call_begins(CallReader r, const CallMarks& m, std::string_view opening) {
    if (const auto opened = r.try_match(opening); opened != true) return opened;
    const std::optional<std::string> name = r.name();
    if (!name) return std::nullopt;
    const auto closed = name->empty() ? false : r.try_match(m.name_close);
    if (closed != true) return closed;
    const auto parameter = r.try_match(m.parameter_open), end = r.try_match(m.call_close);
    if (parameter == true || end == true) return true;
    return parameter && end ? std::optional(false) : std::nullopt;
}

// The next one of a section, or the first one of another.
std::optional<bool> call_begins(const CallReader& r, const CallMarks& m) {
    const auto next = call_begins(r, m, cat(m.separator, m.call_open));
    return next == true ? next : call_begins(r, m, cat(m.section_open, m.call_open));
}

std::optional<bool> parameter_begins(CallReader r, const CallMarks& m) {
    constexpr std::size_t longest_key = 256;
    const auto            opened      = r.try_match(cat(m.parameter_separator, m.parameter_open));
    if (opened != true || m.text.open != m.other.open) return opened;
    const std::string_view behind = without_white_begin(m.text.open);
    const std::size_t      key    = behind.empty() ? 0 : r.rest().find(behind[0]);
    if (std::min(key, r.rest().size()) > longest_key) return false;
    if (key == std::string_view::npos) return std::nullopt;
    r.advance(key);
    return r.try_match(behind);
}

std::optional<bool> call_ends(CallReader r, const CallMarks& m) {
    if (const auto closed = r.try_match(m.call_close); closed != true) return closed;
    const auto next = call_begins(r, m), section = r.try_match(m.section_close);
    if (next == true || section == true) return true;
    return next && section ? std::optional(false) : std::nullopt;
}

std::optional<std::string_view> tagged_value(CallReader& r, const CallMarks& m, std::string_view close) {
    const std::string      opening = cat(m.section_open, m.call_open);
    const std::string_view first = without_white_begin(opening), last = without_white_begin(m.call_close);
    if (m.parameter_open.empty() || last.empty() || first.empty()) {
        const std::string separator = m.parameter_separator.empty() ? m.parameter_open : m.parameter_separator;
        const std::array<std::string, 2> next{
            std::string(without_white_begin(separator.empty() ? m.call_close : separator)), std::string(last)};
        return r.until(close, next);
    }
    const std::string          begins{close[0], last[0], first[0]};
    const std::size_t          begin = r.at();
    const std::string_view     rest  = r.rest();
    std::optional<std::size_t> closed, unclosed; // the last end of a call, behind `close` and without that
    const auto                 take = [&](std::size_t at, std::size_t mark) {
        r.back_to(begin + at + mark);
        return rest.substr(0, at);
    };
    for (std::size_t at = 0; (at = rest.find_first_of(begins, at)) != std::string_view::npos; at++) {
        CallReader behind = r;
        behind.back_to(begin + at);
        if (closed && call_begins(behind, m) == true) return take(*closed, close.size());
        if (behind.skip(close)) {
            if (parameter_begins(behind, m) == true) return take(at, close.size());
            if (call_ends(behind, m).value_or(r.end())) closed = at;
        } else if (!closed && behind.try_match(m.call_close) == true) {
            if (call_begins(behind, m) == true) return take(at, 0);
            unclosed = at;
            at       = behind.at() - begin - 1;
        }
    }
    if (!r.end()) return r.more(), std::nullopt;
    if (closed) return take(*closed, close.size());
    if (const auto mark = rest.find(close); mark != std::string_view::npos) return take(mark, close.size());
    if (unclosed) return take(*unclosed, 0);
    return r.more(), std::nullopt;
}

// Where the text of a mark stands first, perhaps with white space between its tags, and how long it is.
struct FoundMark {
    std::size_t at = std::string_view::npos, size = 0;
};
FoundMark find_mark(std::string_view text, std::string_view mark) {
    if (mark.empty()) return {0, 0};
    for (std::size_t at = 0; (at = text.find(mark[0], at)) != std::string_view::npos; at++) {
        std::size_t to = at + 1, i = 1;
        for (; i < mark.size(); i++, to++) {
            if (mark[i] == '<') to = std::min(text.find_first_not_of(white_space, to), text.size());
            if (to == text.size() || text[to] != mark[i]) break;
        }
        if (i == mark.size()) return {at, to - at};
    }
    return {};
}

// KEY, how it is closed, and the value; the arguments get it.
bool read_parameter(CallReader& r, const CallMarks& m, const Json* tool, Json& arguments) {
    // Where the two differ in a word, as in type="string", any other word is of the other kind.
    const std::string_view a = m.text.open, b = m.other.open;
    const auto             letter = [](char c) { return c >= 'a' && c <= 'z'; };
    std::size_t            same   = 0;
    while (same < a.size() && same < b.size() && a[same] == b[same]) same++;
    while (same > 0 && letter(a[same - 1])) same--;
    std::size_t word = same;
    while (word < a.size() && letter(a[word])) word++;
    const bool typed = same > 0 && word > same && word < a.size() && a != b && b.ends_with(a.substr(word));

    const CallMarks::Value* kind = nullptr;
    std::size_t             at = std::string_view::npos, value = 0;
    if (typed) {
        at = r.rest().find(a.substr(0, same));
        if (at == std::string_view::npos) return r.rest().size() > 4096 ? r.wrong() : r.more();
        const std::string_view type = r.rest().substr(at + same);
        const std::size_t      end  = type.find(a.substr(word));
        if (end == std::string_view::npos) return type.size() > 256 ? r.wrong() : r.more();
        kind  = type.substr(0, end) == a.substr(same, word - same) ? &m.text : &m.other;
        value = at + same + end + a.size() - word;
    } else {
        // Whichever stands first behind the key; of two there, the longer one.
        for (const CallMarks::Value* one : {&m.text, &m.other}) {
            const FoundMark found = find_mark(r.rest(), one->open);
            if (found.at == std::string_view::npos) continue;
            if (kind && (found.at > at || (found.at == at && one->open.size() <= kind->open.size()))) continue;
            kind  = one;
            at    = found.at;
            value = at + found.size;
        }
        if (!kind) return r.rest().size() > 4096 ? r.wrong() : r.more();
        // The longer one may still come.
        if (m.text.open != kind->open && m.text.open.starts_with(kind->open)) {
            CallReader longer = r;
            longer.advance(at);
            if (longer.may_become(m.text.open)) return r.more();
        }
    }
    const std::string key(r.rest().substr(0, at));
    r.advance(value);
    std::string close = for_key(kind->close, key);
    if (close.empty()) { // JSON says itself where it ends
        if (m.text.open == cat(m.other.open, m.text.close)) {
            std::optional<Json> value = quoted_value(r, m.text.close);
            if (!value) return false;
            arguments[key] = std::move(*value);
            return true;
        }
        r.skip_white();
        if (r.at_end()) return r.more();
        if (r.next_is("{") || r.next_is("[")) {
            std::optional<Json> value = r.json(r.rest()[0]);
            if (!value) return false;
            arguments[key] = std::move(*value);
            return true;
        }
        const bool        quoted = r.next_is("\"");
        const std::size_t end    = quoted ? end_of_string(r.rest()) : r.rest().find_first_of(",}])> \t\r\n<");
        if (end == std::string_view::npos) return r.more();
        Result<Json> value = json_parse(r.rest().substr(0, end), call_limits);
        if (!value) return r.wrong();
        arguments[key] = std::move(*value);
        r.advance(end);
        return true;
    }
    if (kind == &m.text && !m.wrap.open.empty()) {
        if (r.may_become(m.wrap.open)) return r.more();
        if (r.skip(m.wrap.open)) close = m.wrap.close + close;
    }
    const auto text = tagged_value(r, m, close);
    if (!text) return false;
    Result<Json> json = json_parse(*text, call_limits);
    if (a == b) arguments[key] = typed_parameter(tool, key, *text);
    else if (kind == &m.text || !json) arguments[key] = std::string(*text);
    else arguments[key] = std::move(*json);
    return true;
}

// Behind a name, up to the end of the arguments.
bool read_marked_arguments(CallReader& r, const CallMarks& m, const std::string& name) {
    if (m.arguments == CallMarks::Arguments::json) {
        r.skip_white();
        const std::optional<Json> arguments = r.json('{');
        return arguments && r.add(name, *arguments);
    }
    const Json* tool = r.tool(name);
    if (!tool) return r.wrong();
    Json arguments = Json::object();
    for (bool first = true;; first = false) {
        CallReader ahead  = r;
        const auto closed = ahead.try_match(m.call_close);
        if (closed == true) break; // the caller reads it
        r.skip_white();
        if (!first && !m.parameter_separator.empty()) {
            const auto there = r.try_match(m.parameter_separator);
            if (there != true) return !there || !closed ? r.more() : r.wrong();
            r.skip_white();
        }
        const auto opened =
            m.parameter_open.empty() ? std::optional<bool>(closed.has_value()) : r.try_match(m.parameter_open);
        if (opened != true) return !opened || !closed ? r.more() : r.wrong();
        if (!read_parameter(r, m, tool, arguments)) return false;
    }
    return r.add(name, arguments);
}

// A list of calls, or one, behind the mark that begins it.
bool read_marked_python(CallReader& r, const CallMarks& m) {
    const std::string tail = cat(m.call_close, m.section_close).substr(1); // behind the last call's parenthesis
    PythonCalls       read;
    if (tail.starts_with(']')) read = read_python_calls(cat('[', r.rest()));
    else {
        read.unfinished = true;
        int tried       = 0;
        for (std::size_t at = 0; (at = r.rest().find(')', at)) != std::string_view::npos && tried < 64; at++, tried++)
            if (read = read_python_calls(cat('[', r.rest().substr(0, at + 1), ']')); read.size > 0) break;
        if (tried == 64) return r.wrong();
        if (read.size == 0) return r.more();
    }
    if (read.size == 0) return read.unfinished ? r.more() : r.wrong();
    for (const auto& [name, arguments] : read.calls)
        if (!r.add(name, arguments)) return false;
    r.advance(read.size - 2); // without the brackets
    const auto closed = r.try_match(tail);
    if (!closed && r.end()) r.advance(r.rest().size());
    return closed == true || (!closed && r.end()) ? r.whole() : closed ? r.wrong() : r.more();
}

bool read_marked(CallReader& r, const CallMarks& m) {
    if (!m.section_open.empty() && !m.section_close.empty()) {
        const auto empty = r.try_match(cat(m.section_open, m.section_close)); // a section without calls
        if (empty == true) return r.whole();
        if (!empty && !r.end()) return r.more();
    }
    if (!r.match(cat(m.section_open, m.call_open))) return false;
    const std::string next     = cat(m.separator, m.call_open);
    const bool        sections = !m.section_open.empty() || !m.section_close.empty() ||
                          m.separator.find_first_not_of(white_space) != std::string::npos;
    if (m.arguments == CallMarks::Arguments::python) return read_marked_python(r, m);
    while (true) {
        const std::optional<std::string> name = r.name();
        if (!name) return false;
        if (!r.tool(*name)) return r.wrong();
        if (!r.match(m.name_close) || !read_marked_arguments(r, m, *name)) return false;
        if (const auto closed = r.try_match(m.call_close); closed != true) {
            r.skip_white();
            if (!closed && r.end()) return r.advance(r.rest().size()), r.whole(); // the mark behind it may be missing
            return closed ? r.wrong() : r.more();
        }
        if (!sections) return r.whole();
        const auto more = r.try_match(next);
        if (more == true) continue;
        if (!more && !r.end()) return r.more();
        const auto section = r.try_match(m.section_close);
        if (section == true || (section && more && m.section_open.empty())) return r.whole();
        if (r.end() && (!section || !more)) return r.advance(r.rest().size()), r.whole();
        return section && more ? r.wrong() : r.more();
    }
}

} // namespace quire
