// quire.tools.common.line_editor: a line while the user types it: keys in, text and cursor, history, completion; bytes that draw the line out.
// **Owns** the text, and which part of it is on the screen. Does no input or output: terminal.cppm does.
export module quire.tools.common.line_editor;

import quire.core.base;
import quire.core.unicode;

export namespace quire {

struct ScreenSize {
    int columns = 80, rows = 24;
};

// A request by a key that does not edit.
enum class KeyRequest {
    none,
    enter,     // the line is complete
    end,       // Ctrl-D on an empty line
    interrupt, // Ctrl-C
    suspend,   // Ctrl-Z
    clear,     // Ctrl-L: an empty screen
    report,    // the terminal has reported its cursor: reported_column()
};

class LineEditor {
public:
    // The names that `text`, all before the cursor, can be completed to; each in place of all of `text`.
    using Completer = std::function<std::vector<std::string>(const std::string& text)>;

    void                            set_completer(Completer completer) { completer_ = std::move(completer); }
    void                            set_history(std::vector<std::string> lines) { history_ = std::move(lines); }
    const std::vector<std::string>& history() const { return history_; }
    void                            remember(const std::string& line); // but not twice in a row

    void               begin(std::string prompt); // an empty line
    const std::string& text() const { return text_; }
    // Takes one byte of a key, of a pasted text, or of a report.
    KeyRequest key(char byte);
    int        reported_column() const { return reported_column_; } // from 0
    // A text to be shown once below the line: the names that a second Tab lists.
    std::string take_listing() { return std::exchange(listing_, ""); }

    // Bytes that turn the line on the screen into the present line.
    std::string draw(ScreenSize size);
    // As draw(), all of it, with the cursor on the line below; the next draw() begins there.
    std::string leave(ScreenSize size);
    // Takes the line off the screen; the next draw() begins there.
    std::string erase();
    // The size has changed: the cursor is in `column` now if the terminal said so, else the rows are as they were.
    std::string draw_resized(ScreenSize size, std::optional<int> column);
    // Whatever is on the screen is not the line: the next draw() begins where the cursor is.
    void forget_screen() { drawn_row_ = 0; }

private:
    struct Row {
        std::string text;
        bool        full = false; // the next row continues this line: the terminal wraps
    };
    struct Layout {
        std::vector<Row> rows;
        int              row = 0, column = 0; // of the cursor
    };

    Layout      lay_out(int columns, bool cursor_at_end) const;
    std::string draw_rows(const Layout& at, int first, int n) const;
    std::string to_start() const;
    KeyRequest  plain_key(unsigned char byte);
    KeyRequest  escape_key(char byte);
    KeyRequest  control_sequence();
    void        pasted(char byte);
    void        insert(std::string_view text);
    void        remove(std::size_t from, std::size_t to, bool keep);
    void        complete();
    void        up_or_down(bool up);
    void        recall(std::size_t index);
    bool        search_key(unsigned char byte);
    void        search(std::size_t below);
    std::size_t before(std::size_t at) const;
    std::size_t behind(std::size_t at) const;
    std::size_t word_before(std::size_t at) const;
    std::size_t word_behind(std::size_t at) const;
    std::size_t line_begin() const;
    std::size_t line_end() const;

    std::string                prompt_, text_, killed_, draft_, listing_;
    std::size_t                cursor_ = 0; // byte of text_
    std::vector<std::string>   history_;
    std::size_t                recalled_ = 0; // index in history_; its size: the text being typed, draft_
    std::optional<std::string> search_;       // the text that Ctrl-R looks for
    Completer                  completer_;
    bool                       tab_before_ = false;
    std::string                character_;               // bytes of one not yet complete
    std::string                escape_;                  // of a sequence not yet complete, ESC included
    bool                       pasting_         = false; // between ESC [200~ and ESC [201~
    char                       pasted_before_   = 0;
    int                        reported_column_ = 0;
    int                        drawn_row_       = 0; // of the cursor, below the first row on the screen
    int                        drawn_top_       = 0; // the first row on the screen
};

} // namespace quire

module :private;

namespace quire {

constexpr std::size_t most_text = std::size_t(16) << 20; // pasted text beyond it is dropped

void LineEditor::remember(const std::string& line) {
    if (history_.empty() || history_.back() != line) history_.push_back(line);
}

void LineEditor::begin(std::string prompt) {
    prompt_ = std::move(prompt);
    text_.clear();
    draft_.clear();
    search_.reset();
    cursor_     = 0;
    recalled_   = history_.size();
    tab_before_ = false;
}

// -- moving about: a character and the marks that join it are one

std::size_t LineEditor::before(std::size_t at) const {
    while (at > 0) {
        do at--;
        while (at > 0 && (text_[at] & 0xc0) == 0x80);
        if (char_width(utf8_next(text_, at).value) > 0 || text_[at] == '\n' || text_[at] == '\t') break;
    }
    return at;
}

std::size_t LineEditor::behind(std::size_t at) const {
    if (at < text_.size()) at += std::size_t(utf8_next(text_, at).bytes);
    while (at < text_.size() && text_[at] != '\n' && text_[at] != '\t') {
        const CodePoint c = utf8_next(text_, at);
        if (char_width(c.value) > 0) break;
        at += std::size_t(c.bytes);
    }
    return at;
}

bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\n'; }

std::size_t LineEditor::word_before(std::size_t at) const {
    while (at > 0 && is_blank(text_[at - 1])) at--;
    while (at > 0 && !is_blank(text_[at - 1])) at--;
    return at;
}

std::size_t LineEditor::word_behind(std::size_t at) const {
    while (at < text_.size() && is_blank(text_[at])) at++;
    while (at < text_.size() && !is_blank(text_[at])) at++;
    return at;
}

std::size_t LineEditor::line_begin() const {
    const std::size_t newline = cursor_ == 0 ? std::string::npos : text_.rfind('\n', cursor_ - 1);
    return newline == std::string::npos ? 0 : newline + 1;
}

std::size_t LineEditor::line_end() const { return std::min(text_.find('\n', cursor_), text_.size()); }

// -- changing the text

void LineEditor::insert(std::string_view text) {
    if (text_.size() + text.size() > most_text) return;
    text_.insert(cursor_, text);
    cursor_ += text.size();
}

// `keep`: Ctrl-Y brings it back.
void LineEditor::remove(std::size_t from, std::size_t to, bool keep) {
    if (keep && from < to) killed_ = text_.substr(from, to - from);
    text_.erase(from, to - from);
    cursor_ = from;
}

void LineEditor::recall(std::size_t index) {
    if (recalled_ == history_.size()) draft_ = text_;
    recalled_ = index;
    text_     = index == history_.size() ? draft_ : history_[index];
    cursor_   = text_.size();
}

// Within a text of several lines to the one above or below, at its ends into the history.
void LineEditor::up_or_down(bool up) {
    const std::size_t begin = line_begin(), end = line_end(), column = cursor_ - begin;
    if (up && begin > 0) {
        cursor_ = begin - 1;
        cursor_ = std::min(line_begin() + column, begin - 1);
    } else if (!up && end < text_.size()) {
        cursor_ = end + 1;
        cursor_ = std::min(end + 1 + column, line_end());
    } else if (up ? recalled_ > 0 : recalled_ < history_.size()) {
        recall(up ? recalled_ - 1 : recalled_ + 1);
    }
    while (cursor_ < text_.size() && (text_[cursor_] & 0xc0) == 0x80) cursor_++;
}

void LineEditor::complete() {
    if (!completer_) return;
    const std::vector<std::string> names = completer_(text_.substr(0, cursor_));
    if (names.empty()) return;
    std::string common = names[0];
    for (const std::string& name : names) {
        std::size_t n = 0;
        while (n < std::min(common.size(), name.size()) && common[n] == name[n]) n++;
        common.resize(n);
    }
    while (utf8_incomplete(common) > 0) common.pop_back();
    if (common.size() > cursor_) {
        text_.replace(0, cursor_, common);
        cursor_ = common.size();
    } else if (tab_before_ && names.size() > 1) {
        constexpr std::size_t most = 100;
        for (std::size_t i = 0; i < std::min(names.size(), most); i++) listing_ += cat(names[i], '\n');
        if (names.size() > most) listing_ += cat("and ", names.size() - most, " more\n");
    }
    tab_before_ = true;
}

// -- Ctrl-R: the line of the history that has the text typed, latest first

void LineEditor::search(std::size_t below) {
    for (std::size_t i = below; i-- > 0;)
        if (history_[i].find(*search_) != std::string::npos) return recall(i);
}

// False: the key ends the search, and is one like any other.
bool LineEditor::search_key(unsigned char byte) {
    if (byte == 0x12) {
        search(recalled_);
    } else if ((byte == 0x7f || byte == 0x08) && !search_->empty()) {
        while (search_->size() > 1 && (search_->back() & 0xc0) == 0x80) search_->pop_back();
        search_->pop_back();
        search(history_.size());
    } else if (byte >= 0x20 && byte != 0x7f) {
        *search_ += char(byte);
        if (utf8_incomplete(*search_) == 0) search(std::min(recalled_ + 1, history_.size()));
    } else {
        search_.reset();
        return false;
    }
    return true;
}

// -- keys

KeyRequest LineEditor::key(char byte) {
    const bool tab = byte == '\t' && !pasting_;
    if (!escape_.empty()) {
        const KeyRequest request = escape_key(byte);
        if (request != KeyRequest::report) tab_before_ = false;
        return request;
    }
    if (byte == '\x1b') {
        search_.reset();
        escape_ = byte;
        return KeyRequest::none;
    }
    KeyRequest request = KeyRequest::none;
    if (pasting_) pasted(byte);
    else if (!search_ || !search_key(static_cast<unsigned char>(byte)))
        request = plain_key(static_cast<unsigned char>(byte));
    if (!tab) tab_before_ = false;
    return request;
}

// Pasted lines do not end the message; other control characters, which no terminal would show, are left out. Ctrl-C gets
// out of a paste whose end never came.
void LineEditor::pasted(char byte) {
    const auto c = static_cast<unsigned char>(byte);
    if (c == 0x03) pasting_ = false;
    else if (c == '\r' || (c == '\n' && pasted_before_ != '\r')) insert("\n"); // CR LF is one line break
    else if (c == '\t') insert("\t");
    else if (c >= 0x20 && c != 0x7f) plain_key(c);
    pasted_before_ = byte;
}

KeyRequest LineEditor::plain_key(unsigned char byte) {
    if (byte >= 0x80 || !character_.empty()) {
        character_ += char(byte);
        if (utf8_incomplete(character_) > 0) return KeyRequest::none;
        const std::string whole = utf8_repair(std::exchange(character_, ""));
        const char32_t    c     = utf8_next(whole, 0).value;
        if (c < 0x80 || c > 0x9f) insert(whole); // no control characters of eight bits
        return KeyRequest::none;
    }
    switch (byte) {
        case 0x01: cursor_ = line_begin(); break;
        case 0x02: cursor_ = before(cursor_); break;
        case 0x03: return KeyRequest::interrupt;
        case 0x04:
            if (text_.empty()) return KeyRequest::end;
            remove(cursor_, behind(cursor_), false);
            break;
        case 0x05: cursor_ = line_end(); break;
        case 0x06: cursor_ = behind(cursor_); break;
        case 0x08:
        case 0x7f: remove(before(cursor_), cursor_, false); break;
        case '\t': complete(); break;
        case '\n':
        case '\r': return KeyRequest::enter;
        case 0x0b: remove(cursor_, line_end(), true); break;
        case 0x0c: return KeyRequest::clear;
        case 0x0e: up_or_down(false); break;
        case 0x10: up_or_down(true); break;
        case 0x12: search_ = ""; break;
        case 0x15: remove(line_begin(), cursor_, true); break;
        case 0x17: remove(word_before(cursor_), cursor_, true); break;
        case 0x19: insert(killed_); break;
        case 0x1a: return KeyRequest::suspend;
        default:
            if (byte >= 0x20) insert(std::string(1, char(byte)));
    }
    return KeyRequest::none;
}

// ESC and a key, ESC O and a letter, or ESC [ numbers and a letter or ~.
KeyRequest LineEditor::escape_key(char byte) {
    constexpr std::size_t longest = 32;
    if (escape_.size() == 1 && (byte == '[' || byte == 'O')) {
        escape_ += byte;
        return KeyRequest::none;
    }
    if (escape_.size() == 1) {
        escape_.clear();
        if (pasting_) return KeyRequest::none;
        switch (byte) {
            case 'b': cursor_ = word_before(cursor_); break;
            case 'f': cursor_ = word_behind(cursor_); break;
            case 'd': remove(cursor_, word_behind(cursor_), true); break;
            case 0x08:
            case 0x7f: remove(word_before(cursor_), cursor_, true); break;
            case '\r':
            case '\n': insert("\n"); break;
            case 0x1b: escape_ = byte; break;
            default: break;
        }
        return KeyRequest::none;
    }
    escape_ += byte;
    if (byte >= 0x40 && byte <= 0x7e) return control_sequence();
    if (byte < 0x20 || escape_.size() > longest) escape_.clear(); // no such sequence
    return KeyRequest::none;
}

KeyRequest LineEditor::control_sequence() {
    const std::string_view whole      = escape_;
    const char             last       = whole.back();
    int                    numbers[2] = {0, 0}; // rows and columns, or a key and the keys held down with it
    std::size_t            n          = 0;
    for (char c : whole.substr(2, whole.size() - 3)) {
        if (c == ';') n++;
        else if (c >= '0' && c <= '9' && n < 2 && numbers[n] < 100'000) numbers[n] = numbers[n] * 10 + (c - '0');
    }
    escape_.clear();
    if (last == '~' && numbers[0] == 200) {
        pasting_       = true;
        pasted_before_ = 0;
    }
    if (last == '~' && numbers[0] == 201) pasting_ = false;
    if (last == 'R' && n == 1) {
        reported_column_ = std::max(numbers[1] - 1, 0);
        return KeyRequest::report;
    }
    if (pasting_) return KeyRequest::none;
    const bool by_words = numbers[1] > 1; // with Shift, Alt or Ctrl
    const int  key      = last == '~' ? numbers[0] : 0;
    if (last == 'A') up_or_down(true);
    else if (last == 'B') up_or_down(false);
    else if (last == 'C') cursor_ = by_words ? word_behind(cursor_) : behind(cursor_);
    else if (last == 'D') cursor_ = by_words ? word_before(cursor_) : before(cursor_);
    else if (last == 'H' || key == 1 || key == 7) cursor_ = line_begin();
    else if (last == 'F' || key == 4 || key == 8) cursor_ = line_end();
    else if (key == 3) remove(cursor_, behind(cursor_), false);
    return KeyRequest::none;
}

// -- drawing

// Rows as the terminal makes them: it wraps behind the last column, and before a wide character that would stand in it.
LineEditor::Layout LineEditor::lay_out(int columns, bool cursor_at_end) const {
    columns = std::max(columns, 2);
    Layout at;
    at.rows.emplace_back();
    int        column = 0;
    const auto put    = [&](std::string_view cell, int width) {
        if (column + width > columns) {
            at.rows.back().full = true;
            at.rows.emplace_back();
            column = 0;
        }
        at.rows.back().text += cell;
        column += width;
    };
    const std::string lead = search_ ? cat("(search: ", *search_, ") ") : prompt_;
    for (std::size_t i = 0; i < lead.size();) {
        const CodePoint c = utf8_next(lead, i);
        put(std::string_view(lead).substr(i, std::size_t(c.bytes)), char_width(c.value));
        i += std::size_t(c.bytes);
    }
    const std::size_t cursor = cursor_at_end ? text_.size() : cursor_;
    const auto        here   = [&](std::size_t i) {
        if (i != cursor) return;
        if (column == columns) put("", 1), column = 0;
        at.row    = int(at.rows.size()) - 1;
        at.column = column;
    };
    for (std::size_t i = 0; i < text_.size();) {
        here(i);
        const CodePoint c = utf8_next(text_, i);
        if (text_[i] == '\n') {
            at.rows.emplace_back();
            column = 0;
        } else if (text_[i] == '\t') {
            for (int n = 0; n < 4; n++) put(" ", 1);
        } else {
            put(std::string_view(text_).substr(i, std::size_t(c.bytes)), char_width(c.value));
        }
        i += std::size_t(c.bytes);
    }
    here(text_.size());
    return at;
}

std::string LineEditor::to_start() const {
    return cat("\r", drawn_row_ > 0 ? cat("\x1b[", drawn_row_, "A") : std::string(), "\x1b[J");
}

// The rows one below the other, the cursor behind the last one.
std::string LineEditor::draw_rows(const Layout& at, int first, int n) const {
    std::string out;
    for (int i = first; i < first + n; i++) {
        const Row& row = at.rows[std::size_t(i)];
        out += row.text;
        if (i + 1 == first + n) break;
        if (!row.full) out += "\r\n";
        else if (at.rows[std::size_t(i) + 1].text.empty()) out += " \r"; // the terminal wraps when something comes
    }
    return out;
}

std::string LineEditor::draw(ScreenSize size) {
    const Layout at  = lay_out(size.columns, false);
    const int    all = int(at.rows.size()), shown = std::min(all, std::max(size.rows, 1));
    drawn_top_        = std::clamp(drawn_top_, std::max(at.row - shown + 1, 0), at.row);
    drawn_top_        = std::min(drawn_top_, all - shown);
    std::string out   = to_start() + draw_rows(at, drawn_top_, shown);
    const int   below = drawn_top_ + shown - 1 - at.row;
    if (below > 0) out += cat("\x1b[", below, "A");
    out += "\r";
    if (at.column > 0) out += cat("\x1b[", at.column, "C");
    drawn_row_ = at.row - drawn_top_;
    return out;
}

std::string LineEditor::leave(ScreenSize size) {
    search_.reset();
    const Layout at  = lay_out(size.columns, true);
    const int    all = int(at.rows.size());
    std::string  out = to_start() + draw_rows(at, 0, all);
    drawn_row_ = drawn_top_ = 0;
    const bool below = all > 1 && at.rows.back().text.empty() && at.rows[std::size_t(all) - 2].full; // wrapped already
    return below ? out : out + "\r\n";
}

std::string LineEditor::erase() {
    std::string out = to_start();
    drawn_row_ = drawn_top_ = 0;
    return out;
}

// A terminal that wraps its rows anew puts the cursor elsewhere than one that does not.
std::string LineEditor::draw_resized(ScreenSize size, std::optional<int> column) {
    const Layout now = lay_out(size.columns, false);
    if (column && *column == now.column) drawn_row_ = std::max(now.row - drawn_top_, 0);
    return draw(size);
}

} // namespace quire
