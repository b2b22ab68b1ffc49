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

// KEY, how it is closed, and the value; the arguments get it.
bool read_parameter(CallReader& r, const CallMarks& m, const Json* tool, Json& arguments) {
    // Whichever stands first behind the key; of two there, the longer one.
    const CallMarks::Value* kind = nullptr;
    std::size_t             at   = std::string_view::npos;
    for (const CallMarks::Value* one : {&m.text, &m.other}) {
        const std::size_t found = r.rest().find(one->open);
        if (found == std::string_view::npos) continue;
        if (!kind || found < at || (found == at && one->open.size() > kind->open.size())) kind = one, at = found;
    }
    if (!kind) return r.rest().size() > 4096 ? r.wrong() : r.more();
    const std::string key(r.rest().substr(0, at));
    // The longer one may still come.
    if (m.text.open != kind->open && m.text.open.starts_with(kind->open)) {
        CallReader longer = r;
        longer.advance(at);
        if (longer.may_become(m.text.open)) return r.more();
    }
    r.advance(at + kind->open.size());
    const std::string close = for_key(kind->close, key);
    if (close.empty()) { // JSON says itself where it ends
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
    const auto value = r.until(close);
    if (!value) return false;
    if (kind == &m.text && m.text.open != m.other.open) arguments[key] = std::string(*value);
    else arguments[key] = typed_parameter(tool, key, *value);
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
        if (section == true) return r.whole();
        if (r.end() && (!section || !more)) return r.advance(r.rest().size()), r.whole();
        return section && more ? r.wrong() : r.more();
    }
}

} // namespace quire
