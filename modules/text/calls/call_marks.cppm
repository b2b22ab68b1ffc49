// quire.text.calls.call_marks: the texts around the name and the arguments of a tool's call, found by comparing a template's renderings of a
// text and of calls. Owns nothing.
export module quire.text.calls.call_marks;

import quire.core.base;

export namespace quire {

// Words that no template has; the compared renderings contain them.
namespace probe {
constexpr std::string_view question = "Zq7question", text = "Zq7text9", result = "Zq7result", tool = "zq7tool",
                           other_tool = "zq7more", key = "zq7key", value = "Zq7value", number_key = "zq7many",
                           marked_value = "Zq7<lines\nand & more9", id = "call12345", other_id = "call67890",
                           thought = "Zq7thought9";
constexpr int number               = 471147;
} // namespace probe

// A call is section_open, call_open NAME name_close ARGUMENTS call_close, perhaps separator and another one, and section_close.
// White space in these texts is as in the template; models may write other.
struct CallMarks {
    enum class Arguments : std::uint8_t {
        json,   // an object
        tagged, // parameter_open KEY open VALUE close, one behind another; strings as they stand, all else as JSON
        python, // KEY=VALUE, with commas
    };
    struct Value {
        std::string open, close;
        bool        operator==(const Value&) const = default;
    };
    Arguments   arguments = Arguments::json;
    std::string section_open{}, call_open{}, name_close{}, call_close{}, separator{}, section_close{};
    bool        several = false; // the template writes more than one call in an answer
    std::string parameter_open{}, parameter_separator{};
    Value       text{}, other{}; // of strings, and of all other values
    Value wrap{}; // within these of strings, perhaps: the template writes it around such as have marks or lines in them

    // The text with which a call begins and no other text should; "": it begins with its name, or with JSON.
    std::string trigger{};
    bool        operator==(const CallMarks&) const = default;
};
// The text with which a call with these marks begins, as far as `other`, an answer without calls, does not have it.
std::string trigger_of(const CallMarks& marks, std::string_view other);

// Characters in the marks for parts that differ from call to call: an id, the number of the call, the name of the parameter.
constexpr char             id_mark = '\x01', index_mark = '\x02', key_mark = '\x03';
constexpr std::string_view white_space = " \t\r\n"; // that JSON allows between its parts
// The text of a mark for the parameter of that name.
std::string for_key(std::string_view mark, std::string_view key);

// Whether white space may stand before this character of a mark though the template writes none: around the punctuation of JSON.
bool loose_before(std::string_view mark, std::size_t at);

// The marks of an element of an answer: OPEN NAME END text CLOSE NAME END, where each mark is <|…|>. Without `close`: OPEN NAME END
// before the answer, a header that says whom it is for; before a call with the tool in place of NAME.
struct ElementMarks {
    std::string open, close, name, end;
    std::string begin_mark() const { return open + name + end; }
    std::string end_mark() const { return close + name + end; }
};
// The marks of an element around a text, between the template's words before and behind that text; nothing: there is no element.
std::optional<ElementMarks> element_between(std::string_view before, std::string_view behind);
// The header of answers that begin so: `answer` before the template's words, `call` before more of the call.
std::optional<ElementMarks> header_of(std::string_view answer, std::string_view call);

// Conversations as a template renders them: a question, then an answer.
struct CallProbes {
    std::string                content;  // the answer is `text`
    std::string                call;     // a call of `tool` with {key: value}
    std::optional<std::string> calls;    // that call, and a call of `other_tool` with the same arguments
    std::optional<std::string> two_keys; // a call of `tool` with {key: value, number_key: number}
    std::string think, think_end;        // marks of reasoning, which may stand before a call with nothing between them
    std::optional<std::string> marked{}; // a call of `tool` with {key: marked_value}
};

// The part of the first text that the second one does not have, between their common ends; marks in angle brackets are not cut.
std::string_view differing_part(std::string_view text, std::string_view plain);

// Nothing: there is no call, or its parts cannot be told from one another.
std::optional<CallMarks> find_call_marks(const CallProbes& probes);

} // namespace quire

module :private;

namespace quire {

std::string for_key(std::string_view mark, std::string_view key) {
    std::string out;
    for (const char c : mark) out += c == key_mark ? std::string(key) : std::string(1, c);
    return out;
}

std::string_view trimmed(std::string_view text) {
    text.remove_prefix(std::min(text.find_first_not_of(white_space), text.size()));
    return text.substr(0, text.find_last_not_of(white_space) + 1);
}

std::string_view without_white_end(std::string_view text) {
    return text.substr(0, text.find_last_not_of(white_space) + 1);
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Where a mark begins that the text does not close.
std::size_t open_mark(std::string_view text) {
    const std::size_t open = text.rfind('<'), close = text.rfind('>');
    return open != std::string_view::npos && (close == std::string_view::npos || close < open) ? open : text.size();
}

// The length of the common beginning of both texts, to the end of a mark.
std::size_t common_begin(std::string_view a, std::string_view b) {
    std::size_t n = 0;
    while (n < a.size() && n < b.size() && a[n] == b[n]) n++;
    if (n == a.size() || n == b.size()) return n;
    return open_mark(a.substr(0, n));
}

// The common end of two texts, from the beginning of a mark on; digits that count calls may differ.
struct CommonEnd {
    std::size_t size = 0;
    std::string text; // with index_mark
};
CommonEnd common_end(std::string_view a, std::string_view b) {
    std::size_t n = 0;
    std::string reversed;
    while (n < a.size() && n < b.size()) {
        const char x = a[a.size() - 1 - n], y = b[b.size() - 1 - n];
        if (x != y && !(is_digit(x) && is_digit(y))) break;
        reversed += x == y ? x : index_mark;
        n++;
    }
    if (n < a.size() && n < b.size()) { // within a mark of the longer texts: behind it
        const std::string_view same = a.substr(a.size() - n);
        const std::size_t      open = same.find('<'), close = same.find('>');
        if (close != std::string_view::npos && (open == std::string_view::npos || close < open) &&
            open_mark(a.substr(0, a.size() - n)) < a.size() - n)
            n -= close + 1;
    }
    reversed.resize(n);
    std::ranges::reverse(reversed);
    return {n, std::move(reversed)};
}

std::string replaced(std::string_view text, std::string_view what, char by) {
    std::string out;
    for (std::size_t at; (at = text.find(what)) != std::string_view::npos; text.remove_prefix(at + what.size()))
        out += cat(text.substr(0, at), by);
    out += text;
    return out;
}

std::string without_ids(std::string_view text) {
    return replaced(replaced(text, probe::id, id_mark), probe::other_id, id_mark);
}

// The parts of the text of one call.
struct Parts {
    std::size_t      name  = 0; // where the name stands
    std::size_t      begin = 0; // of the arguments
    std::size_t      end   = 0; // of the arguments; tagged: of the value
    std::string_view before, behind_name, behind, key_close;
};

std::optional<Parts> parts_of(std::string_view block, std::string_view tool, std::size_t from,
                              CallMarks::Arguments* arguments) {
    Parts             p;
    const std::size_t key = block.find(probe::key, from);
    if (key == std::string_view::npos || key == 0) return std::nullopt;
    p.name = block.rfind(tool, key);
    if (p.name == std::string_view::npos) return std::nullopt;
    const std::size_t name_end = p.name + tool.size(), key_end = key + probe::key.size();
    const std::size_t value = block.find(probe::value, key_end);
    if (value == std::string_view::npos) return std::nullopt;
    p.before    = block.substr(from, p.name - from);
    p.key_close = block.substr(key_end, value - key_end);
    p.begin     = key;
    p.end       = value + probe::value.size();
    std::string compact;
    for (const char c : p.key_close)
        if (!white_space.contains(c)) compact += c;
    const std::size_t open = block.find_last_not_of(white_space, key - 2); // the brace of an object
    if (block[key - 1] == '"' && compact == "\":\"" && key >= 2 && open != std::string_view::npos &&
        block[open] == '{' && open >= name_end) {
        *arguments              = CallMarks::Arguments::json;
        const std::size_t close = block.find_first_not_of(white_space, p.end + 1);
        if (close == std::string_view::npos || block[close] != '}' || block[p.end] != '"') return std::nullopt;
        p.begin = open;
        p.end   = close + 1;
    } else if (std::string_view("\"'\\").contains(block[key - 1]) && compact.contains(':')) {
        return std::nullopt; // an object in some other spelling
    } else if (block.substr(name_end, key - name_end) == "(" && (compact == "='" || compact == "=\"")) {
        *arguments = CallMarks::Arguments::python;
        p.end++;
    } else *arguments = CallMarks::Arguments::tagged;
    p.behind_name = block.substr(name_end, p.begin - name_end);
    p.behind      = block.substr(p.end);
    return p;
}

// Splits the texts around the values of a call with tagged parameters. False: the borders cannot be seen.
bool split_parameters(CallMarks& m, Parts& one, std::string_view block, std::string_view two_keys) {
    if (!two_keys.starts_with(block.substr(0, one.end))) return false;
    const std::size_t key = two_keys.find(probe::number_key, one.end);
    if (key == std::string_view::npos) return false;
    const std::string number  = cat(probe::number);
    const std::size_t key_end = key + probe::number_key.size();
    const std::size_t value   = two_keys.find(number, key_end);
    if (value == std::string_view::npos) return false;
    const std::string_view between = two_keys.substr(one.end, key - one.end);
    const std::string_view close   = without_white_end(between.substr(0, common_begin(between, one.behind)));
    const std::string_view rest    = between.substr(close.size());
    const CommonEnd        open    = common_end(rest, one.behind_name);
    const std::string_view tail    = one.behind.substr(close.size());
    const std::string_view last    = two_keys.substr(value + number.size());
    m.text                         = {std::string(one.key_close), replaced(close, probe::key, key_mark)};
    m.other                        = {std::string(two_keys.substr(key_end, value - key_end)), m.text.close};
    if (last.ends_with(tail))
        m.other.close =
            replaced(without_white_end(last.substr(0, last.size() - tail.size())), probe::number_key, key_mark);
    m.parameter_open      = trimmed(open.text);
    m.parameter_separator = trimmed(rest.substr(0, rest.size() - open.size));
    one.behind_name.remove_suffix(open.size);
    one.behind = tail;
    one.end += close.size();
    return !m.text.close.empty();
}

// Separates the texts around all calls from the texts around each call.
void split_section(CallMarks& m, const Parts& one, std::string_view block, std::string_view calls) {
    m.call_open              = without_ids(one.before);
    m.name_close             = without_ids(one.behind_name);
    m.call_close             = without_ids(one.behind);
    const std::size_t second = calls.find(probe::other_tool, one.end);
    if (!calls.starts_with(block.substr(0, one.end)) || second == std::string_view::npos) return;
    CallMarks::Arguments       kind = m.arguments;
    const std::optional<Parts> two  = parts_of(calls, probe::other_tool, one.end, &kind);
    if (!two || kind != m.arguments) return;
    const std::string between = without_ids(two->before), before = m.call_open, behind = m.call_close;
    const std::size_t close = common_begin(between, behind);
    const auto        rest  = std::string_view(between).substr(close);
    const CommonEnd   open  = common_end(rest, before);
    const auto        name  = two->behind_name.substr(
        0, m.parameter_open.empty() ? std::string_view::npos : two->behind_name.rfind(m.parameter_open));
    const CommonEnd named = common_end(without_ids(name), m.name_close);
    if (rest.substr(0, rest.size() - open.size).contains(probe::other_tool)) return; // a header that names the tool
    m.several       = true;
    m.section_open  = before.substr(0, before.size() - open.size);
    m.call_open     = open.text;
    m.call_close    = behind.substr(0, close);
    m.section_close = behind.substr(close);
    m.separator     = rest.substr(0, rest.size() - open.size);
    if (named.size == m.name_close.size()) m.name_close = named.text;
}

// The text around a value with marks and lines in it, within the texts around every value.
CallMarks::Value wrap_of(const CallMarks& m, std::string_view call) {
    const std::size_t value = call.find(probe::marked_value);
    if (value == std::string_view::npos) return {};
    const std::string_view before = call.substr(0, value), behind = call.substr(value + probe::marked_value.size());
    const std::size_t      open = before.rfind(m.text.open), close = behind.find(for_key(m.text.close, probe::key));
    if (open == std::string_view::npos || close == std::string_view::npos) return {};
    const std::string_view first = before.substr(open + m.text.open.size()), last = behind.substr(0, close);
    if (!before.substr(0, open).ends_with(probe::key) || trimmed(first).empty() || trimmed(last).empty()) return {};
    return {std::string(first), std::string(last)};
}

std::string trigger_of(const CallMarks& marks, std::string_view other) {
    const std::string whole = cat(marks.section_open, marks.call_open);
    const auto        text  = trimmed(whole);
    if (text.empty() || text[0] == '{' ||
        (text[0] == '[' && (text.size() == 1 || std::string_view("{[\" \n").contains(text[1]))))
        return "";
    const std::string_view fixed = text.substr(0, text.find_first_of("\x01\x02")); // the rest differs from call to call
    for (std::size_t close = 0; text[0] == '<' || text[0] == '[';) {
        close = fixed.find(text[0] == '<' ? '>' : ']', close) + 1;
        if (close == 0) break;
        if (!other.contains(fixed.substr(0, close))) return std::string(fixed.substr(0, close));
    }
    // Up to the JSON.
    return std::string(without_white_end(fixed.substr(0, fixed.find('{'))));
}

bool loose_before(std::string_view mark, std::size_t at) {
    if (at == 0) return false;
    const char before = mark[at - 1], c = mark[at];
    return (std::string_view("{[,:").contains(before) && std::string_view("{[\"").contains(c)) ||
           (std::string_view("}]\"").contains(before) && std::string_view("}]:,").contains(c));
}

std::optional<ElementMarks> element_between(std::string_view before, std::string_view behind) {
    constexpr std::string_view begins = "<|", ends = "|>";
    const auto                 mark_behind = [&](std::string_view text) { // at its beginning
        return text.starts_with(begins)
                                   ? text.substr(0, std::min(text.find(ends), text.size() - ends.size()) + ends.size())
                                   : std::string_view();
    };
    const std::size_t end = before.rfind(begins);
    if (!before.ends_with(ends) || end == std::string_view::npos) return std::nullopt;
    const std::string_view head = before.substr(0, end);
    const std::size_t      name = head.rfind(ends), open = head.rfind(begins);
    if (name == std::string_view::npos || open == std::string_view::npos || open > name) return std::nullopt;
    ElementMarks e{std::string(head.substr(open, name + ends.size() - open)), std::string(mark_behind(behind)),
                   std::string(head.substr(name + ends.size())), std::string(before.substr(end))};
    if (e.name.empty() || e.close.empty() || !behind.starts_with(e.end_mark())) return std::nullopt;
    return e;
}

std::optional<ElementMarks> header_of(std::string_view answer, std::string_view call) {
    const std::size_t tool = call.find(probe::tool), end = answer.find("<|");
    if (tool == std::string_view::npos || end == std::string_view::npos) return std::nullopt;
    const std::string_view open = call.substr(0, tool), mark = answer.substr(end);
    if (trimmed(open).empty() || open.contains('<') || !answer.starts_with(open) || !mark.ends_with("|>"))
        return std::nullopt;
    if (open.size() >= end || !call.substr(tool + probe::tool.size()).starts_with(mark)) return std::nullopt;
    return ElementMarks{std::string(trimmed(open)), "", std::string(answer.substr(open.size(), end - open.size())),
                        std::string(mark)};
}

std::string_view differing_part(std::string_view text, std::string_view plain) {
    std::size_t begin = 0;
    while (begin < text.size() && begin < plain.size() && text[begin] == plain[begin]) begin++;
    begin         = std::min(begin, open_mark(text.substr(0, begin)));
    std::size_t n = 0;
    while (n < text.size() - begin && n < plain.size() && text[text.size() - 1 - n] == plain[plain.size() - 1 - n]) n++;
    std::string_view       part = text.substr(begin, text.size() - n - begin);
    const std::string_view rest = text.substr(text.size() - n);
    if (open_mark(part) < part.size() && rest.find('>') < rest.find('<'))
        part = text.substr(begin, part.size() + rest.find('>') + 1);
    return part;
}

std::optional<CallMarks> find_call_marks(const CallProbes& probes) {
    std::string_view block = trimmed(differing_part(probes.call, probes.content));
    if (!probes.think.empty() && block.starts_with(probes.think)) {
        const std::string_view behind = trimmed(block.substr(probes.think.size()));
        if (behind.starts_with(probes.think_end)) block = trimmed(behind.substr(probes.think_end.size()));
    }
    // A header that names the tool, too, is none of the call.
    std::size_t skipped = 0;
    if (const std::size_t key = block.find(probe::key); key != std::string_view::npos) {
        const std::size_t first = block.find(probe::tool), last = block.rfind(probe::tool, key);
        if (first < last && last != std::string_view::npos) {
            const std::size_t mark = block.find('>', first);
            if (mark == std::string_view::npos || mark > last) return std::nullopt;
            skipped = mark + 1;
            block   = trimmed(block.substr(skipped));
        }
    }
    CallMarks            m;
    std::optional<Parts> one = parts_of(block, probe::tool, 0, &m.arguments);
    if (!one) return std::nullopt;
    // The call's part of another rendering.
    const auto same_part = [&](const std::string& text) {
        std::string_view  part = trimmed(differing_part(text, probes.content));
        const std::size_t at   = part.find(block.substr(0, std::min(block.size(), one->end)));
        return at == std::string_view::npos ? std::string_view() : part.substr(at);
    };
    if (m.arguments == CallMarks::Arguments::tagged &&
        (!probes.two_keys || !split_parameters(m, *one, block, same_part(*probes.two_keys))))
        return std::nullopt;
    if (m.arguments == CallMarks::Arguments::tagged && probes.marked) m.wrap = wrap_of(m, *probes.marked);
    split_section(m, *one, block, probes.calls ? same_part(*probes.calls) : std::string_view());
    m.trigger = trigger_of(m, probes.content);
    return m;
}

} // namespace quire
