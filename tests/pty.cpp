// The functions of pty.h, compiled once for all tests.
#include "pty.h"

#include <fcntl.h>
#include <poll.h>
#include <pty.h> // NOLINT(readability-duplicate-include): of the system
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>
#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>

namespace quire::testing {

void Screen::feed(const std::string& bytes) {
    for (char c : bytes) {
        if (!escape_.empty()) {
            escape_ += c;
            if (escape_.size() > 2 && c >= 0x40 && c <= 0x7e) sequence();
            else if (escape_.size() == 2 && c != '[') escape_.clear();
        } else if (c == '\x1b') {
            escape_ = c;
        } else if (c == '\r') {
            column_ = 0;
        } else if (c == '\n') {
            down();
        } else if (static_cast<unsigned char>(c) >= 0x20) {
            put(c);
        }
    }
}
void Screen::resize(int columns, bool reflow) {
    columns_ = columns;
    if (!reflow) {
        for (Row& row : rows_) row.text.resize(std::min(row.text.size(), std::size_t(columns)));
        column_ = std::min(column_, columns - 1);
        return;
    }
    std::vector<Row> old = std::move(rows_);
    int              at = 0, row_then = row_, column_then = column_;
    rows_.assign(1, {});
    row_ = column_ = 0;
    for (std::size_t i = 0; i < old.size(); i++) {
        for (std::size_t j = 0; j < old[i].text.size(); j++) {
            if (int(i) == row_then && int(j) == column_then) at = row_ * columns_ + column_;
            put(old[i].text[j]);
        }
        if (int(i) == row_then && column_then >= int(old[i].text.size())) at = row_ * columns_ + column_;
        if (!old[i].wrapped && i + 1 < old.size()) {
            down();
            column_ = 0;
        }
    }
    row_    = at / columns_;
    column_ = at % columns_;
}
std::vector<std::string> Screen::rows() const {
    std::vector<std::string> texts;
    for (const Row& row : rows_) texts.push_back(row.text.substr(0, row.text.find_last_not_of(' ') + 1));
    while (!texts.empty() && texts.back().empty()) texts.pop_back();
    return texts;
}
void Screen::down() {
    row_++;
    if (row_ == int(rows_.size())) rows_.emplace_back();
}
void Screen::put(char c) {
    if (column_ == columns_) {
        rows_[std::size_t(row_)].wrapped = true;
        column_                          = 0;
        down();
    }
    std::string& text = rows_[std::size_t(row_)].text;
    text.resize(std::max(text.size(), std::size_t(column_) + 1), ' ');
    text[std::size_t(column_++)] = c;
}
void Screen::sequence() {
    const int n = std::max(1, std::atoi(escape_.c_str() + 2));
    if (escape_.back() == 'A') row_ = std::max(0, row_ - n);
    if (escape_.back() == 'C') column_ = std::min(columns_ - 1, column_ + n);
    if (escape_.back() == 'J') {
        rows_.resize(std::size_t(row_) + 1);
        rows_.back().text.resize(std::min(rows_.back().text.size(), std::size_t(column_)));
        rows_.back().wrapped = false;
    }
    escape_.clear();
}

std::string wide_line(const std::string& bytes, int columns) {
    std::string line;
    int         width = 0;
    for (std::size_t i = 0; i <= bytes.size(); i++) {
        const char c = i < bytes.size() ? bytes[i] : '\n';
        if (c == '\x1b') { // to the letter that ends the sequence
            while (i + 1 < bytes.size() && (std::isalpha(static_cast<unsigned char>(bytes[i])) == 0)) i++;
        } else if (c == '\n' || c == '\r') {
            if (width > columns && line.find(' ') != std::string::npos) return line;
            line.clear();
            width = 0;
        } else {
            line += c;
            width += (static_cast<unsigned char>(c) & 0xc0) != 0x80; // a character of UTF-8 has one such byte
        }
    }
    return {};
}

Pty::Pty(const std::string& program, std::vector<std::string> arguments, int columns, int rows) {
    winsize size{static_cast<unsigned short>(rows), static_cast<unsigned short>(columns), 0, 0};
    std::fflush(nullptr);
    child = forkpty(&terminal, nullptr, nullptr, &size);
    if (child != 0) return;
    setenv("TERM", "xterm", 1);
    std::vector<char*> argv{const_cast<char*>(program.c_str())};
    for (std::string& a : arguments) argv.push_back(a.data());
    argv.push_back(nullptr);
    execv(program.c_str(), argv.data());
    _exit(127);
}
Pty::~Pty() {
    if (child <= 0) return;
    kill(child, SIGKILL);
    if (status < 0) waitpid(child, &status, 0);
    close(terminal);
}
bool Pty::until(const std::string& mark) {
    seen.clear();
    for (pollfd p{terminal, POLLIN, 0}; seen.find(mark) == std::string::npos;) {
        char byte = 0;
        if (poll(&p, 1, 60'000) != 1 || read(terminal, &byte, 1) != 1) return false;
        seen += byte;
        all += byte;
    }
    return true;
}
bool Pty::type(const std::string& keys) const {
    return write(terminal, keys.data(), keys.size()) == ssize_t(keys.size());
}
void Pty::resize(int columns, int rows) const {
    winsize size{static_cast<unsigned short>(rows), static_cast<unsigned short>(columns), 0, 0};
    ioctl(terminal, TIOCSWINSZ, &size);
}
bool Pty::echoes() const {
    termios mode{};
    return tcgetattr(terminal, &mode) == 0 && (mode.c_lflag & ECHO) != 0;
}
int Pty::end() {
    while (waitpid(child, &status, WNOHANG) == 0) // a terminal that nobody reads would hold the program up
        if (!read_some(100)) usleep(1000);
    while (read_some(0)) {} // the bytes written since the last look
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
bool Pty::read_some(int milliseconds) {
    char   bytes[256];
    pollfd p{terminal, POLLIN, 0};
    if (poll(&p, 1, milliseconds) != 1) return false;
    const ssize_t n = read(terminal, bytes, sizeof bytes);
    if (n > 0) all.append(bytes, std::size_t(n));
    return n > 0;
}
} // namespace quire::testing
