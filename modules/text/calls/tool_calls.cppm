// quire.text.calls.tool_calls: the text of an answer, in pieces → content, reasoning and calls of tools. **Owns** the text of the call that is
// not complete yet. A call is returned when it is complete and valid; a text that only looks like a call comes out as content.
export module quire.text.calls.tool_calls;

import quire.core.base;
export import quire.core.json;
export import quire.text.calls.call_readers;
import quire.text.calls.reasoning_form;
import quire.text.calls.tool_form;

export namespace quire {

struct AnswerPart {
    enum class Kind : std::uint8_t { content, reasoning, call };
    Kind        kind = Kind::content;
    std::string text; // of content and reasoning
    ToolCall    call;
};
// Appends text, to the last part if that part is of this kind.
void append(std::vector<AnswerPart>& parts, AnswerPart::Kind kind, std::string_view text);
// Appends parts in this way, and pieces of a call's arguments to the call.
void append(std::vector<AnswerPart>& parts, std::vector<AnswerPart> more);
// All text of the one kind.
std::string text_of(std::span<const AnswerPart> parts, AnswerPart::Kind kind = AnswerPart::Kind::content);
// All calls, the pieces of each put together.
std::vector<ToolCall> calls_of(std::span<const AnswerPart> parts);

struct AnswerFormat {
    CallForm      form;                 // none: no calls are looked for
    Json          tools;                // of the request, as in OpenAI's field: a call of any other is content
    bool          one_call     = false; // text and calls after the first call are dropped
    bool          reasoning    = false; // text between the marks of reasoning, at the beginning, is reasoning
    bool          in_reasoning = false; // the prompt ends with the first mark
    ReasoningForm marks{std::string(think_begin), std::string(think_end)};
    // The text follows the grammar of answers (quire.constraint.formats.answer_grammar), so that a text that begins as a call is a call: its
    // arguments come in pieces, without white space, where they are JSON in the text.
    bool in_pieces = false;
};

class AnswerParser {
public:
    explicit AnswerParser(AnswerFormat format);

    // Appends text, cut anywhere, even in a character. Returns the parts that no later text can change.
    std::vector<AnswerPart> push(std::string_view text);
    // No more will come.
    std::vector<AnswerPart> finish();

    bool called() const { return n_calls_ > 0; }
    // Whether the answer ended within a call.
    bool cut() const { return cut_; }
    // Whether text that came now would be reasoning.
    bool in_reasoning() const { return state_ == State::reasoning || (state_ == State::text && to_reason_); }
    // Bytes from which calls were read, each as often as it was.
    std::size_t n_read() const { return n_read_; }

private:
    using Parts = std::vector<AnswerPart>;
    enum class State : std::uint8_t { begin, reasoning, text };

    void        run(Parts& out, bool end);
    bool        run_reasoning(Parts& out, bool end);
    bool        run_text(Parts& out, bool end);
    void        emit(Parts& out, std::size_t n);
    void        run_arguments(Parts& out);
    std::size_t find_mark(bool end, bool& found) const;

    AnswerFormat format_;
    Marks        marks_;
    std::string  ends_ = "})]>"; // the characters with which calls can end
    std::string  text_;          // not handed out yet
    State        state_;
    bool         blank_     = true; // only white space so far, or since the last call
    bool         cut_       = false;
    bool         waiting_   = false; // for the rest of a call
    bool         may_end_   = false; // with a character that came since
    std::size_t  n_tried_   = 0;     // bytes of the text when the call was read last
    std::size_t  n_read_    = 0;
    bool         to_reason_ = false; // harmony: in a message of the analysis channel
    int          n_calls_   = 0;
    // Of a call whose arguments are returned in pieces: where the next piece begins, how deep in objects and lists that is, and whether it
    // is in a string, behind a backslash.
    bool        begun_ = false, in_string_ = false, escaped_ = false;
    std::size_t at_    = 0;
    int         depth_ = 0;
};

} // namespace quire

module :private;

namespace quire {

constexpr std::size_t longest_call = std::size_t(1) << 20; // bytes; a longer one is content

// Bytes at the end of `text` with which `mark` begins.
std::size_t overlap(std::string_view text, std::string_view mark) {
    for (std::size_t n = std::min(text.size(), mark.size() - 1); n > 0; n--)
        if (text.ends_with(mark.substr(0, n))) return n;
    return 0;
}

void append(std::vector<AnswerPart>& parts, AnswerPart::Kind kind, std::string_view text) {
    if (text.empty()) return;
    if (parts.empty() || parts.back().kind != kind) parts.push_back({kind, "", {}});
    parts.back().text += text;
}

void append(std::vector<AnswerPart>& parts, std::vector<AnswerPart> more) {
    for (AnswerPart& part : more)
        if (part.kind == AnswerPart::Kind::call && part.call.more && !parts.empty())
            parts.back().call.arguments += part.call.arguments;
        else if (part.kind == AnswerPart::Kind::call) parts.push_back(std::move(part));
        else if (part.text.empty()) continue;
        else if (parts.empty() || parts.back().kind != part.kind) parts.push_back(std::move(part));
        else parts.back().text += part.text;
}

std::string text_of(std::span<const AnswerPart> parts, AnswerPart::Kind kind) {
    std::string text;
    for (const AnswerPart& part : parts)
        if (part.kind == kind) text += part.text;
    return text;
}

std::vector<ToolCall> calls_of(std::span<const AnswerPart> parts) {
    std::vector<ToolCall> calls;
    for (const AnswerPart& part : parts)
        if (part.kind != AnswerPart::Kind::call) continue;
        else if (part.call.more && !calls.empty()) calls.back().arguments += part.call.arguments;
        else calls.push_back(part.call);
    return calls;
}

AnswerParser::AnswerParser(AnswerFormat format)
    : format_(std::move(format)), marks_(marks_of(format_.form, format_.tools)),
      state_(format_.in_reasoning ? State::reasoning
             : format_.reasoning  ? State::begin
                                  : State::text) {
    if (const auto& marks = format_.form.marks)
        for (const std::string* close : {&marks->call_close, &marks->section_close})
            if (!close->empty()) ends_ += close->back();
}

std::vector<AnswerPart> AnswerParser::push(std::string_view text) {
    std::vector<AnswerPart> out;
    text_ += text;
    // Every call ends with one of these: before, reading it again finds nothing new, except of a short one that it is none. And a long one
    // is read again only after it has grown by a part of its length, so that a value with many such characters costs a multiple of its
    // length, not the square.
    const bool ends = text_.size() < 64 || text.find_first_of(ends_) != std::string_view::npos;
    may_end_        = (waiting_ && may_end_) || ends;
    if (waiting_ && text_.size() <= longest_call && (!may_end_ || text_.size() - n_tried_ < n_tried_ / 64)) {
        if (format_.in_pieces) run_arguments(out);
        return out;
    }
    run(out, false);
    return out;
}

std::vector<AnswerPart> AnswerParser::finish() {
    std::vector<AnswerPart> out;
    run(out, true);
    return out;
}

void AnswerParser::run(Parts& out, bool end) {
    while (!text_.empty()) {
        if (state_ == State::begin) {
            const std::size_t  at   = std::min(text_.find_first_not_of(white_space), text_.size());
            const auto         rest = std::string_view(text_).substr(at);
            const std::string &open = format_.marks.begin, &close = format_.marks.end;
            const auto         may_become = [&](const std::string& mark) {
                return !end && rest.size() < mark.size() && mark.starts_with(rest);
            };
            if (may_become(open) || may_become(close)) return;
            state_ = rest.starts_with(open) ? State::reasoning : State::text;
            if (state_ == State::reasoning) text_.erase(0, at + open.size());
            else if (rest.starts_with(close)) { // so a model says that it does not reason
                text_.erase(0, at + close.size());
                format_.in_reasoning = true; // white space behind it is dropped, too
            }
        } else if (state_ == State::reasoning ? !run_reasoning(out, end) : !run_text(out, end)) return;
    }
}

// White space around the reasoning is no part of it.
bool AnswerParser::run_reasoning(Parts& out, bool end) {
    const std::string& close = format_.marks.end;
    if (blank_) text_.erase(0, text_.find_first_not_of(white_space));
    const std::size_t at   = text_.find(close);
    std::size_t       n    = at != std::string::npos ? at : text_.size() - (end ? 0 : overlap(text_, close));
    const std::size_t last = std::string_view(text_).substr(0, n).find_last_not_of(white_space);
    const std::size_t kept = last == std::string::npos ? 0 : last + 1;
    append(out, AnswerPart::Kind::reasoning, std::string_view(text_).substr(0, kept));
    if (kept > 0) blank_ = false;
    if (at == std::string::npos && !end) {
        text_.erase(0, kept);
        return false;
    }
    text_.erase(0, at == std::string::npos ? text_.size() : at + close.size());
    state_ = State::text;
    blank_ = true;
    // White space behind the mark is dropped, too, once more text has come.
    format_.in_reasoning = true;
    return !text_.empty();
}

// Hands out the first n bytes.
void AnswerParser::emit(Parts& out, std::size_t n) {
    std::string_view part = std::string_view(text_).substr(0, n);
    const bool       behind_call =
        n_calls_ > 0 && (format_.form.spaced || part.find_first_not_of(white_space) == std::string_view::npos);
    if (blank_ && (behind_call || format_.in_reasoning))
        part.remove_prefix(std::min(part.find_first_not_of(white_space), part.size()));
    if (part.find_first_not_of(white_space) != std::string_view::npos) blank_ = false;
    if (!(format_.one_call && n_calls_ > 0))
        append(out, to_reason_ ? AnswerPart::Kind::reasoning : AnswerPart::Kind::content, part);
    text_.erase(0, n);
}

// Where the next mark begins, or a text that may become a mark when more text comes.
std::size_t AnswerParser::find_mark(bool end, bool& found) const {
    std::size_t at = std::string::npos;
    for (const std::string& mark : marks_.anywhere) at = std::min(at, text_.find(mark));
    if (blank_ && !marks_.first.empty()) {
        const std::size_t begin = text_.find_first_not_of(white_space);
        if (begin != std::string::npos && marks_.first.contains(text_[begin])) at = std::min(at, begin);
    }
    found = at != std::string::npos;
    if (found) return at;
    std::size_t held = 0;
    for (const std::string& mark : marks_.anywhere) held = std::max(held, overlap(text_, mark));
    return text_.size() - (end ? 0 : held);
}

// Hands out what there is of the arguments of the call at the beginning of the text.
void AnswerParser::run_arguments(Parts& out) {
    if (!begun_) {
        if (format_.one_call && n_calls_ > 0) return;
        std::optional<CallHead> head = read_head(format_.form, format_.tools, text_);
        if (!head) return;
        begun_ = true, in_string_ = escaped_ = false;
        at_ = head->arguments, depth_ = 0;
        n_calls_++;
        out.push_back({AnswerPart::Kind::call, "", {std::move(head->name), "", false}});
    }
    std::string piece;
    for (; at_ < text_.size() && (depth_ > 0 || (depth_ == 0 && text_[at_] == '{')); at_++) {
        const char c = text_[at_];
        if (in_string_) {
            if (c == '"' && !escaped_) in_string_ = false;
            escaped_ = c == '\\' && !escaped_;
        } else if (white_space.contains(c)) continue;
        else if (c == '"') in_string_ = true;
        else if (c == '{' || c == '[') depth_++;
        else if (c == '}' || c == ']') depth_--;
        piece += c;
        if (depth_ == 0) {
            at_++;
            depth_ = -1; // whole
            break;
        }
    }
    if (!piece.empty()) out.push_back({AnswerPart::Kind::call, "", {"", std::move(piece), true}});
}

bool AnswerParser::run_text(Parts& out, bool end) {
    bool              found = false;
    const std::size_t at    = find_mark(end, found);
    // White space before a call may be none of the text.
    std::size_t text    = at;
    const bool  blank   = blank_ && text_.find_first_not_of(white_space) >= at;
    const bool  dropped = format_.tools.empty() ? format_.form.element && blank : format_.form.spaced || blank;
    if ((found || !end) && dropped) text = std::string_view(text_).substr(0, at).find_last_not_of(white_space) + 1;
    emit(out, text);
    if (!found) return false;
    std::size_t white = at - text;
    if (blank_ || format_.in_pieces) text_.erase(0, std::exchange(white, 0));
    waiting_         = false;
    CallsRead  read  = read_calls(format_.form, format_.tools, std::string_view(text_).substr(white), end);
    const bool long_ = text_.size() > longest_call;
    n_read_ += text_.size();
    if (format_.in_pieces) run_arguments(out);
    if (read.state == CallsRead::State::more && !end && (begun_ || !long_)) {
        waiting_ = true;
        may_end_ = false;
        n_tried_ = text_.size();
        return false;
    }
    const bool begun = std::exchange(begun_, false);
    if (begun && read.state != CallsRead::State::whole) { // cut off
        text_.erase(0, end ? text_.size() : at_);
        cut_ = end && depth_ != -1; // else only the mark behind it is missing
        return true;
    }
    // A mark begins a call: this one was cut off.
    const std::string_view call = std::string_view(text_).substr(white);
    cut_                        = end && read.state == CallsRead::State::more &&
           std::ranges::any_of(marks_.anywhere, [&](const std::string& mark) { return call.starts_with(mark); });
    if (read.state != CallsRead::State::whole && !cut_) {
        blank_ = false; // also where the byte is dropped: the mark was no call
        emit(out, read.state == CallsRead::State::more ? text_.size() : white + 1);
        return true;
    }
    for (std::size_t i = begun ? 1 : 0; i < read.calls.size(); i++) {
        if (format_.one_call && n_calls_ > 0) break;
        n_calls_++;
        out.push_back({AnswerPart::Kind::call, "", std::move(read.calls[i])});
    }
    if (read.channel) to_reason_ = *read.channel == Channel::reasoning;
    text_.erase(0, cut_ ? text_.size() : white + read.size);
    blank_ = true;
    return true;
}

} // namespace quire
