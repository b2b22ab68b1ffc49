// quire.tools.common.word_wrap: a text that comes in pieces, with a newline in place of a blank where a word would be cut at the edge of the
// screen. **Owns** the word that is not complete yet.
export module quire.tools.common.word_wrap;

import quire.core.base;
import quire.core.unicode;

export namespace quire {

class WordWrap {
public:
    // The part of the text so far that can be shown, whole characters of UTF-8, on a screen of this width. Lines between ``` are left to the terminal.
    std::string push(std::string_view text, int columns);
    // The rest. A new text may follow.
    std::string finish(int columns);

private:
    void character(std::string_view c, int columns, std::string& out);
    void end_word(int columns, std::string& out);
    void end_line();

    std::string blanks_, word_; // behind what was shown
    int         word_width_ = 0;
    bool        goes_on_    = false; // the word is the rest of one that is wider than the screen
    int         column_     = 0;     // of the cursor
    std::string line_;               // the first characters of the line, which may be ```
    bool        fenced_ = false;     // between two lines that begin with ```
};

// A whole text for a screen of this width.
std::string wrapped(std::string_view text, int columns);

} // namespace quire

module :private;

namespace quire {

constexpr std::string_view fence = "```";
constexpr int              tab   = 8;

std::string wrapped(std::string_view text, int columns) {
    WordWrap    wrap;
    std::string out = wrap.push(text, columns);
    return out + wrap.finish(columns);
}

std::string WordWrap::push(std::string_view text, int columns) {
    std::string out;
    for (std::size_t at = 0; at < text.size();) {
        const std::size_t n = std::size_t(std::max(utf8_next(text, at).bytes, 1));
        character(text.substr(at, n), columns, out);
        at += n;
    }
    return out;
}

std::string WordWrap::finish(int columns) {
    std::string out;
    end_word(columns, out);
    out += std::exchange(blanks_, "");
    *this = {};
    return out;
}

void WordWrap::character(std::string_view c, int columns, std::string& out) {
    if (line_.size() < fence.size()) line_ += c;
    if (c == "\n") {
        end_word(columns, out);
        out += std::exchange(blanks_, "") + "\n";
        end_line();
    } else if (fenced_ || line_ == fence) { // also what stands behind the opening marks
        end_word(columns, out);
        out += std::exchange(blanks_, "");
        out += c;
    } else if (c == " " || c == "\t") {
        end_word(columns, out);
        blanks_ += c;
    } else {
        const int width = char_width(utf8_next(c, 0).value);
        // Scripts without blanks have wide characters, and a line may end behind each of them.
        if (width > 1) end_word(columns, out);
        if (word_width_ + width > columns) { // the terminal cuts such a word: no newline becomes a part of an address
            end_word(columns, out);
            goes_on_ = true;
        }
        word_ += c;
        word_width_ += width;
        if (width > 1) end_word(columns, out);
    }
}

void WordWrap::end_word(int columns, std::string& out) {
    if (word_.empty()) return;
    int blanks = 0;
    for (const char c : blanks_) blanks += c == '\t' ? tab - (column_ + blanks) % tab : 1;
    if (column_ > 0 && column_ + blanks + word_width_ > columns && !goes_on_) {
        out += '\n';
        column_ = 0;
    } else {
        out += blanks_;
        column_ += blanks;
    }
    out += word_;
    column_ += word_width_;
    if (goes_on_ && column_ > columns) column_ -= columns;
    goes_on_ = false;
    blanks_.clear();
    word_.clear();
    word_width_ = 0;
}

void WordWrap::end_line() {
    if (line_ == fence) fenced_ = !fenced_;
    line_.clear();
    column_ = 0;
}

} // namespace quire
