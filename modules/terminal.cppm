// quire.terminal: the person at the other end: lines with editing and history, Ctrl-C, colours, a progress bar.
// Where standard input or output is no terminal, nothing but plain text goes in and out.
module;

#include <editline/readline.h>
#include <langinfo.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cerrno>
#include <clocale>
#include <csignal>
#include <cstdio>
#include <cstdlib>

export module quire.terminal;

import quire.base;
import quire.std;

export namespace quire {

struct TerminalFacts {
    bool in = false, out = false, err = false; // is a terminal
    bool dumb = false;                         // TERM says that escape codes do not work
};
TerminalFacts terminal_facts();

// -- Ctrl-C: one asks, and the program looks with interrupted(); a second before it looked ends the process at once --

enum class OnInterrupt { ask, leave }; // leave: the first one ends the process already, with code 130
void on_interrupt(OnInterrupt what);
bool interrupted(); // since the last call; the request is taken by asking
// Bytes that put the terminal right before the process ends by a Ctrl-C. A literal: a signal handler writes it.
void set_interrupt_farewell(const char* bytes);

// The text without control characters other than newline and tab: what a model says must not steer the terminal.
std::string printable(std::string_view text);

// One per process.
class LineReader {
public:
    // `edit`: with line editing and a history, kept in `history_file` ("": nowhere) as far as that can be written.
    LineReader(bool edit, std::string history_file);
    LineReader(const LineReader&)            = delete;
    LineReader& operator=(const LineReader&) = delete;

    // The next line without its end; nothing at the end of the input or at Ctrl-C. `prompt` is shown when editing.
    std::optional<std::string> read(const std::string& prompt);
    void                       remember(const std::string& line); // into the history

private:
    std::optional<std::string> read_plain();

    bool        edit_;
    std::string history_file_, pending_;
    bool        at_end_ = false;
};

// $XDG_STATE_HOME/quire/history or ~/.local/state/quire/history; "" when there is no home.
std::string history_path();

// One line on standard error that is redrawn, and gone at the end. Silent unless `shown`.
class ProgressBar {
public:
    ProgressBar(std::string label, bool shown) : label_(std::move(label)), shown_(shown) {}
    ProgressBar(const ProgressBar&)            = delete;
    ProgressBar& operator=(const ProgressBar&) = delete;
    ~ProgressBar() { clear(); }
    void show(double fraction);
    void clear();

private:
    std::string label_;
    bool        shown_;
    int         drawn_ = -1; // per cent on the screen
};

} // namespace quire

module :private;

namespace quire {

TerminalFacts terminal_facts() {
    const char* term = std::getenv("TERM");
    return {isatty(STDIN_FILENO) == 1, isatty(STDOUT_FILENO) == 1, isatty(STDERR_FILENO) == 1,
            term == nullptr || std::string_view(term).empty() || std::string_view(term) == "dumb"};
}

// -- Ctrl-C ---------------------------------------------------------------------------------------------

// All that the handler touches.
volatile std::sig_atomic_t interrupts = 0, leave_at_once = 0;
const char* volatile farewell = "";

extern "C" void quire_on_sigint(int) {
    if (leave_at_once == 0 && interrupts == 0) {
        interrupts = 1;
        return;
    }
    const char* bytes = farewell;
    std::size_t n     = 0;
    while (bytes[n] != 0) n++;
    if (write(STDOUT_FILENO, bytes, n) < 0) {} // nothing left to do about it
    _exit(130);
}

void on_interrupt(OnInterrupt what) {
    leave_at_once = what == OnInterrupt::leave;
    struct sigaction action{};
    action.sa_handler = quire_on_sigint; // without SA_RESTART: a read that waits must return
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, nullptr);
}

bool interrupted() {
    if (interrupts == 0) return false;
    interrupts = 0;
    return true;
}

void set_interrupt_farewell(const char* bytes) { farewell = bytes; }

// -- text -----------------------------------------------------------------------------------------------

std::string printable(std::string_view text) {
    std::string out;
    for (std::size_t i = 0; i < text.size(); i++) {
        const auto c = static_cast<unsigned char>(text[i]);
        if (c == 0xc2 && i + 1 < text.size() && static_cast<unsigned char>(text[i + 1]) < 0xa0) {
            i++; // U+0080..U+009F: control characters of eight bits
        } else if ((c >= 0x20 && c != 0x7f) || c == '\n' || c == '\t') {
            out += char(c);
        }
    }
    return out;
}

// -- lines ----------------------------------------------------------------------------------------------

// Waits until standard input has something, or its end; false when Ctrl-C came first. It looks up ten times a second: a
// signal that arrives just before a read would otherwise be noticed only with the next key.
bool wait_for_input() {
    pollfd input{STDIN_FILENO, POLLIN, 0};
    while (interrupts == 0)
        if (poll(&input, 1, 100) > 0) return true;
    return false;
}

// The next character as a code point, as libedit wants it; -1 at the end and at Ctrl-C, where libedit's own
// function would read on.
int next_character(FILE*) {
    auto next_byte = []() -> int {
        unsigned char byte = 0;
        while (wait_for_input()) {
            const ssize_t n = ::read(STDIN_FILENO, &byte, 1);
            if (n == 1) return byte;
            if (n == 0 || errno != EINTR) return -1;
        }
        return -1;
    };
    const int first = next_byte();
    if (first < 0x80) return first;
    const int more = first >= 0xf0 ? 3 : first >= 0xe0 ? 2 : first >= 0xc0 ? 1 : 0;
    int       code = more == 3 ? first & 0x07 : more == 2 ? first & 0x0f : more == 1 ? first & 0x1f : 0xfffd;
    for (int i = 0; i < more; i++) {
        const int byte = next_byte();
        if (byte < 0) return -1;
        code = code << 6 | (byte & 0x3f);
    }
    return code;
}

LineReader::LineReader(bool edit, std::string history_file) : edit_(edit), history_file_(std::move(history_file)) {
    if (!edit_) return;
    std::setlocale(LC_CTYPE, "");
    if (std::string_view(nl_langinfo(CODESET)) != "UTF-8") std::setlocale(LC_CTYPE, "C.UTF-8");
    rl_catch_signals = 0; // ours
    rl_readline_name = "quire";
    rl_getc_function = next_character;
    rl_initialize();
    using_history();
    stifle_history(1000);
    if (!history_file_.empty()) read_history(history_file_.c_str());
}

std::optional<std::string> LineReader::read(const std::string& prompt) {
    if (!edit_) return read_plain();
    char* line = readline(prompt.c_str());
    if (line == nullptr) return std::nullopt;
    std::string text = line;
    std::free(line);
    return text;
}

std::optional<std::string> LineReader::read_plain() {
    std::size_t searched = 0;
    while (true) {
        if (std::size_t end = pending_.find('\n', searched); end != std::string::npos) {
            std::string line = pending_.substr(0, end);
            pending_.erase(0, end + 1);
            if (line.ends_with('\r')) line.pop_back();
            return line;
        }
        searched = pending_.size();
        if (at_end_) {
            if (pending_.empty()) return std::nullopt;
            return std::exchange(pending_, "");
        }
        char          buffer[4096];
        const ssize_t n = wait_for_input() ? ::read(STDIN_FILENO, buffer, sizeof buffer) : 0;
        if (n > 0) pending_.append(buffer, std::size_t(n));
        else if (n == 0 || errno != EINTR) at_end_ = true;
    }
}

void LineReader::remember(const std::string& line) {
    if (!edit_) return;
    HIST_ENTRY** all = history_list();
    int          n   = 0;
    while (all != nullptr && all[n] != nullptr) n++;
    if (n > 0 && line == all[n - 1]->line) return;
    add_history(line.c_str());
    if (history_file_.empty()) return;
    std::error_code ignored; // a history that cannot be kept is no reason to bother anybody
    std::filesystem::create_directories(std::filesystem::path(history_file_).parent_path(), ignored);
    const mode_t old = umask(077);
    write_history(history_file_.c_str());
    umask(old);
}

std::string history_path() {
    const char *state = std::getenv("XDG_STATE_HOME"), *home = std::getenv("HOME");
    if (state != nullptr && *state != 0) return cat(state, "/quire/history");
    if (home != nullptr && *home != 0) return cat(home, "/.local/state/quire/history");
    return "";
}

// -- progress -------------------------------------------------------------------------------------------

void ProgressBar::show(double fraction) {
    const int percent = int(std::clamp(fraction, 0.0, 1.0) * 100);
    if (!shown_ || percent == drawn_) return;
    drawn_              = percent;
    constexpr int width = 30;
    std::string   bar;
    for (int i = 0; i < width; i++) bar += i * 100 < percent * width ? "█" : "░";
    std::fprintf(stderr, "\r%s %s %3d %%", label_.c_str(), bar.c_str(), percent);
    std::fflush(stderr);
}

void ProgressBar::clear() {
    if (!shown_ || drawn_ < 0) return;
    std::fprintf(stderr, "\r%*s\r", int(label_.size()) + 37, "");
    std::fflush(stderr);
    drawn_ = -1;
}

} // namespace quire
