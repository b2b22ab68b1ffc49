// quire.tools.common.terminal: the person at the other end: lines with editing and history, Ctrl-C and Ctrl-Z, colours, progress.
// Where standard input or output is no terminal, nothing but plain text goes in and out. **Owns** the terminal's mode.
module;

#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <ctime>

export module quire.tools.common.terminal;

import quire.core.base;
import quire.core.unicode;
import quire.tools.common.line_editor;
import quire.tools.common.word_wrap;

export namespace quire {

struct TerminalFacts {
    bool in = false, out = false, err = false; // is a terminal
    bool dumb = false;                         // TERM says that escape codes do not work
};
TerminalFacts terminal_facts();
int           screen_columns(); // of the terminal; 80 where it does not say
// A line on standard error: the program's name and a sentence. In a terminal it is broken at words.
void say_error(std::string_view program, std::string_view sentence);
// From now on say_error() calls `write` instead: a program with a log has one form for all its lines. {}: it writes the line itself again.
void write_errors_by(std::function<void(std::string_view sentence)> write);

// -- Ctrl-C: one asks, and the program looks with interrupted(). Only when it has not looked for ten seconds another one
// ends the process, with code 130.

enum class OnInterrupt { ask, leave }; // leave: the first one ends the process already, with code 130
void on_interrupt(OnInterrupt what);
bool interrupted(); // since the last call; the request is taken by asking
// The text without control characters other than newline and tab: a model's text must not steer the terminal.
std::string printable(std::string_view text);

// How a line came to its end.
enum class LineEnd {
    enter,
    abandoned, // Ctrl-C: the text is given up
    end,       // of the input, Ctrl-D, or Ctrl-C once more
};

struct Line {
    LineEnd     end = LineEnd::end;
    std::string text;
};

// One per process. In a terminal it takes the keyboard for as long as it lives: keys that are typed between two lines are not
// shown and belong to the next line. Ctrl-Z and signals that end the process put the terminal right first.
class LineReader {
public:
    // With line editing and a history where input and output are a terminal that can show it. The history is kept in
    // `history_file` ("": nowhere) as far as that can be written.
    LineReader(const TerminalFacts& facts, std::string history_file, LineEditor::Completer completer = {});
    LineReader(const LineReader&)            = delete;
    LineReader& operator=(const LineReader&) = delete;
    ~LineReader();

    // The next line without its end. `prompt` is shown in a terminal. A pasted text of several lines is one.
    Line read(const std::string& prompt);
    // All that is left of an input that is no terminal. Error: more than 16 MiB.
    Result<std::string> read_all();
    void                remember(const std::string& line); // into the history

private:
    Line        read_plain(const std::string& prompt);
    Line        read_edited(const std::string& prompt);
    void        load_history();
    std::size_t fill();

    bool        edit_, prompts_;
    std::string history_file_, pending_;
    LineEditor  editor_;
    int         n_interrupts_ = 0; // Ctrl-C, and no other key since
    bool        at_end_       = false;
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
    int         row_   = 0;  // its columns there, at most
};

// A line of text on standard error that is redrawn, and gone at the end. Silent unless `shown`.
class StatusLine {
public:
    explicit StatusLine(bool shown) : shown_(shown) {}
    StatusLine(const StatusLine&)            = delete;
    StatusLine& operator=(const StatusLine&) = delete;
    ~StatusLine() { clear(); }
    void show(const std::string& text); // ASCII, shorter than the terminal's row
    void clear();

private:
    bool        shown_;
    std::string drawn_;
};

} // namespace quire

module :private;

namespace quire {

TerminalFacts terminal_facts() {
    const char* term = std::getenv("TERM");
    return {isatty(STDIN_FILENO) == 1, isatty(STDOUT_FILENO) == 1, isatty(STDERR_FILENO) == 1,
            term == nullptr || std::string_view(term).empty() || std::string_view(term) == "dumb"};
}

// -- signals and the terminal's mode --------------------------------------------------------------------

// All that the handlers touch.
volatile std::sig_atomic_t interrupts = 0, leave_at_once = 0, stopped_and_back = 0, resized = 0, keyboard_taken = 0;
volatile std::time_t       asked_since = 0; // the first Ctrl-C that interrupted() has not returned
termios                    mode_before, mode_typing, mode_listening;
const termios* volatile mode_now = &mode_typing;

constexpr char paste_on[] = "\x1b[?2004h", paste_off[] = "\x1b[?2004l", colours_off[] = "\x1b[0m";

void write_all(int file, std::string_view bytes) {
    while (!bytes.empty()) {
        const ssize_t n = ::write(file, bytes.data(), bytes.size());
        if (n <= 0 && errno != EINTR) return; // nothing left to do about it
        if (n > 0) bytes.remove_prefix(std::size_t(n));
    }
}

// A process in the background has to leave the terminal as it is.
bool in_foreground() { return tcgetpgrp(STDIN_FILENO) == getpgrp(); }

void give_keyboard_back() {
    if (keyboard_taken == 0 || !in_foreground()) return;
    write_all(STDOUT_FILENO, std::string_view(colours_off, sizeof colours_off - 1));
    write_all(STDOUT_FILENO, std::string_view(paste_off, sizeof paste_off - 1));
    tcsetattr(STDIN_FILENO, TCSANOW, &mode_before);
}

void take_keyboard() {
    if (keyboard_taken == 0 || !in_foreground()) return;
    tcsetattr(STDIN_FILENO, TCSANOW, mode_now);
    write_all(STDOUT_FILENO, std::string_view(paste_on, sizeof paste_on - 1));
}

void set_handler(int which, void (*handler)(int)) {
    struct sigaction action{};
    action.sa_handler = handler; // without SA_RESTART: a read that waits must return
    sigemptyset(&action.sa_mask);
    sigaction(which, &action, nullptr);
}

// The default action of the signal. After SIGTSTP the process goes on here.
void default_action(int which) {
    set_handler(which, SIG_DFL);
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, which);
    raise(which);
    pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
}

extern "C" void quire_on_sigint(int) {
    constexpr std::time_t timeout = 10;
    const int             error   = errno;
    timespec              now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (leave_at_once != 0 || (interrupts != 0 && now.tv_sec - asked_since >= timeout)) {
        give_keyboard_back();
        if (tcgetattr(STDOUT_FILENO, &mode_typing) == 0)
            write_all(STDOUT_FILENO, "\n"); // a terminal, in a line's middle
        _exit(130);
    }
    if (interrupts == 0) asked_since = now.tv_sec;
    interrupts = 1;
    errno      = error;
}

extern "C" void quire_on_stop(int which) {
    const int error = errno;
    give_keyboard_back();
    default_action(which);
    set_handler(which, quire_on_stop);
    take_keyboard();
    stopped_and_back = 1;
    errno            = error;
}

extern "C" void quire_on_continue(int) {
    const int error = errno;
    take_keyboard();
    stopped_and_back = 1;
    errno            = error;
}

extern "C" void quire_on_resize(int) { resized = 1; }

extern "C" void quire_on_end(int which) {
    give_keyboard_back();
    default_action(which);
}

void on_interrupt(OnInterrupt what) {
    leave_at_once = what == OnInterrupt::leave;
    set_handler(SIGINT, quire_on_sigint);
}

std::chrono::steady_clock::time_point stopped_at; // when interrupted() last said yes

bool interrupted() {
    if (interrupts == 0) return false;
    interrupts = 0;
    stopped_at = std::chrono::steady_clock::now();
    return true;
}

// While a line is typed Ctrl-C and Ctrl-Z are keys; else they are signals, which leave the keys that were typed ahead alone.
void prepare_modes() {
    tcgetattr(STDIN_FILENO, &mode_before);
    mode_listening = mode_before;
    mode_listening.c_lflag &= ~tcflag_t(ICANON | ECHO | IEXTEN);
    mode_listening.c_lflag |= ISIG | NOFLSH;
    mode_listening.c_cc[VMIN]  = 1;
    mode_listening.c_cc[VTIME] = 0;
    mode_typing                = mode_listening;
    mode_typing.c_cc[VINTR] = mode_typing.c_cc[VSUSP] = _POSIX_VDISABLE;
}

void set_mode(const termios& mode) {
    mode_now = &mode;
    if (in_foreground()) tcsetattr(STDIN_FILENO, TCSANOW, &mode);
}

ScreenSize screen_size() {
    winsize size{};
    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0 || size.ws_row == 0) return {};
    return {size.ws_col, size.ws_row};
}

int screen_columns() { return screen_size().columns; }

std::function<void(std::string_view)>& error_writer() {
    static std::function<void(std::string_view)> writer;
    return writer;
}

void write_errors_by(std::function<void(std::string_view)> write) { error_writer() = std::move(write); }

void say_error(std::string_view program, std::string_view sentence) {
    if (error_writer()) return error_writer()(sentence);
    const std::string line = cat(program, ": ", sentence);
    std::fprintf(stderr, "%s\n", (terminal_facts().err ? wrapped(line, screen_columns()) : line).c_str());
}

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

constexpr std::size_t most_input = std::size_t(16) << 20;

LineReader::LineReader(const TerminalFacts& facts, std::string history_file, LineEditor::Completer completer)
    : edit_(facts.in && facts.out && !facts.dumb), prompts_(facts.in && facts.out),
      history_file_(std::move(history_file)) {
    if (!edit_) return;
    editor_.set_completer(std::move(completer));
    load_history();
    prepare_modes();
    mode_now       = &mode_listening;
    keyboard_taken = 1;
    set_handler(SIGTSTP, quire_on_stop);
    set_handler(SIGCONT, quire_on_continue);
    set_handler(SIGWINCH, quire_on_resize);
    for (int which : {SIGTERM, SIGHUP, SIGQUIT, SIGABRT}) set_handler(which, quire_on_end);
    take_keyboard();
}

LineReader::~LineReader() {
    if (!edit_) return;
    give_keyboard_back();
    keyboard_taken = 0;
    for (int which : {SIGTSTP, SIGCONT, SIGWINCH, SIGTERM, SIGHUP, SIGQUIT, SIGABRT}) set_handler(which, SIG_DFL);
}

Line LineReader::read(const std::string& prompt) {
    if (!edit_) return read_plain(prompt);
    set_mode(mode_typing);
    Line line = read_edited(prompt);
    set_mode(mode_listening);
    return line;
}

// Takes the bytes that the input has now, or its end. Returns without any after a signal or a tenth of a second: a signal may come to
// another thread, or just before the wait.
std::size_t LineReader::fill() {
    pollfd input{STDIN_FILENO, POLLIN, 0};
    if (poll(&input, 1, 100) <= 0) return 0;
    const std::size_t before = pending_.size();
    do { // a pasted text comes in many pieces, and is drawn once
        char          buffer[4096];
        const ssize_t n = ::read(STDIN_FILENO, buffer, sizeof buffer);
        if (n > 0) pending_.append(buffer, std::size_t(n));
        else if (n == 0 || errno != EINTR) at_end_ = true;
    } while (!at_end_ && interrupts == 0 && pending_.size() < most_input && poll(&input, 1, 0) > 0);
    return pending_.size() - before;
}

Line LineReader::read_plain(const std::string& prompt) {
    if (prompts_) write_all(STDOUT_FILENO, prompt);
    std::size_t searched = 0;
    while (true) {
        const std::size_t end = pending_.find('\n', searched);
        if (end != std::string::npos || (at_end_ && !pending_.empty()) || pending_.size() > most_input) {
            std::string line = pending_.substr(0, end);
            pending_.erase(0, end == std::string::npos ? end : end + 1);
            if (line.ends_with('\r')) line.pop_back();
            return {LineEnd::enter, std::move(line)};
        }
        if (at_end_ || interrupts != 0) return {};
        searched = pending_.size();
        fill();
    }
}

Result<std::string> LineReader::read_all() {
    while (!at_end_ && interrupts == 0) {
        fill();
        if (pending_.size() > most_input)
            return fail_with(ErrorKind::limit, "the input has more than ", most_input >> 20, " MiB");
    }
    return std::exchange(pending_, "");
}

Line LineReader::read_edited(const std::string& prompt) {
    using Clock = std::chrono::steady_clock;
    // After a change of its size the terminal is asked for its cursor's place; without an answer within this time the cursor has not moved.
    constexpr auto                   timeout = std::chrono::milliseconds(150);
    std::optional<Clock::time_point> asked;
    const auto                       show = [&](const std::string& bytes) { write_all(STDOUT_FILENO, bytes); };
    const auto                       ask  = [&] {
        show("\x1b[6n");
        asked = Clock::now();
    };
    const auto abandon = [&]() -> Line {
        show(editor_.erase());
        if (++n_interrupts_ > 1) return {};
        show("(Ctrl-C once more leaves)\n");
        return {LineEnd::abandoned, ""};
    };
    // Read only where the line is drawn anew: rows drawn before a change of the size and after it must not mix.
    ScreenSize size = screen_size();
    editor_.begin(prompt);
    editor_.forget_screen();
    stopped_and_back = 0;
    resized          = 0;
    if (pending_.empty()) show(editor_.draw(size));
    while (true) {
        for (std::size_t i = 0; i < pending_.size();) {
            const KeyRequest request = editor_.key(pending_[i++]);
            if (request == KeyRequest::none) {
                n_interrupts_ = 0;
                continue;
            }
            if (request == KeyRequest::report) {
                if (std::exchange(asked, std::nullopt)) {
                    size = screen_size();
                    show(editor_.draw_resized(size, editor_.reported_column()));
                }
                continue;
            }
            if (request == KeyRequest::interrupt) {
                // Typed for an answer that had just been stopped, it must not end the conversation.
                if (editor_.text().empty() && Clock::now() - stopped_at < std::chrono::seconds(1)) continue;
                pending_.erase(0, i);
                return abandon();
            }
            n_interrupts_ = 0;
            if (request == KeyRequest::clear) {
                editor_.forget_screen();
                show("\x1b[H\x1b[2J");
                continue;
            }
            show(editor_.leave(size));
            if (request == KeyRequest::suspend) {
                raise(SIGTSTP);
                continue;
            }
            pending_.erase(0, i);
            if (request == KeyRequest::end) return {};
            return {LineEnd::enter, editor_.text()};
        }
        pending_.clear();
        if (at_end_) return {};
        if (std::string names = editor_.take_listing(); !names.empty()) {
            show(editor_.leave(size));
            show(printable(names));
        }
        if (interrupted()) return abandon();
        if (stopped_and_back != 0) {
            stopped_and_back = 0;
            size             = screen_size();
            editor_.forget_screen();
        }
        if (resized != 0) {
            resized = 0;
            ask();
        }
        if (asked && Clock::now() - *asked > timeout) {
            asked.reset();
            size = screen_size();
            show(editor_.draw_resized(size, std::nullopt));
        }
        if (!asked) show(editor_.draw(size));
        while (fill() == 0 && !at_end_ && interrupts == 0 && stopped_and_back == 0 && resized == 0 && !asked) {}
    }
}

// -- the history: a file as libedit writes it, blanks as \040

std::string to_history(std::string_view line) {
    std::string out;
    for (char c : line) {
        if (c == ' ' || c == '\t' || c == '\n' || c == '\\') {
            char code[8];
            std::snprintf(code, sizeof code, "\\%03o", unsigned(c));
            out += code;
        } else {
            out += c;
        }
    }
    return out;
}

std::string from_history(std::string_view line) {
    std::string out;
    const auto  octal = [](char c) { return c >= '0' && c <= '7'; };
    for (std::size_t i = 0; i < line.size(); i++) {
        if (line[i] != '\\') {
            out += line[i];
        } else if (i + 3 < line.size() && octal(line[i + 1]) && octal(line[i + 2]) && octal(line[i + 3])) {
            out += char((line[i + 1] - '0') * 64 + (line[i + 2] - '0') * 8 + (line[i + 3] - '0'));
            i += 3;
        } else if (i + 1 < line.size()) {
            out += line[++i];
        }
    }
    return utf8_repair(out);
}

constexpr std::string_view history_head = "_HiStOrY_V2_";

void LineReader::load_history() {
    constexpr std::size_t    most = 1000;
    std::ifstream            file(history_file_);
    std::vector<std::string> lines;
    for (std::string line; std::getline(file, line);)
        if (!line.empty() && line != history_head) lines.push_back(printable(from_history(line)));
    if (lines.size() > most) {
        lines.erase(lines.begin(), lines.end() - most);
        std::string text = cat(history_head, '\n');
        for (const std::string& line : lines) text += to_history(line) + '\n';
        std::ofstream(history_file_, std::ios::binary).write(text.data(), std::ptrdiff_t(text.size()));
    }
    editor_.set_history(std::move(lines));
}

void LineReader::remember(const std::string& line) {
    if (!edit_ || (!editor_.history().empty() && editor_.history().back() == line)) return;
    editor_.remember(line);
    if (history_file_.empty()) return;
    std::error_code ignored; // no message if the history cannot be kept
    std::filesystem::create_directories(std::filesystem::path(history_file_).parent_path(), ignored);
    const int file = open(history_file_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (file < 0) return;
    struct stat about{};
    std::string text = fstat(file, &about) == 0 && about.st_size == 0 ? cat(history_head, '\n') : std::string();
    write_all(file, text + to_history(line) + '\n');
    close(file);
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
    drawn_                    = percent;
    const int         columns = screen_size().columns;
    const std::string label   = cut_short(label_, std::size_t(std::max(columns - 8, 1)));
    const int         width   = std::clamp(columns - int(label.size()) - 8, 0, 30);
    std::string       bar;
    for (int i = 0; i < width; i++) bar += i * 100 < percent * width ? "█" : "░";
    row_ = int(label.size()) + width + 7;
    std::fprintf(stderr, "\r%s %s %3d %%", label.c_str(), bar.c_str(), percent);
    std::fflush(stderr);
}

void ProgressBar::clear() {
    if (!shown_ || drawn_ < 0) return;
    std::fprintf(stderr, "\r%*s\r", row_, "");
    std::fflush(stderr);
    drawn_ = -1;
}

void StatusLine::show(const std::string& text) {
    if (!shown_ || text == drawn_) return;
    std::fprintf(stderr, "\r%-*s", int(drawn_.size()), text.c_str());
    std::fflush(stderr);
    drawn_ = text;
}

void StatusLine::clear() {
    if (drawn_.empty()) return;
    std::fprintf(stderr, "\r%*s\r", int(drawn_.size()), "");
    std::fflush(stderr);
    drawn_.clear();
}

} // namespace quire
