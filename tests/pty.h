// A program in a pseudo-terminal, and the screen that a person would see of it.
#pragma once

#include <sys/types.h>
#include <string>
#include <vector>

namespace quire::testing {

// The screen that a program's bytes leave: letters, newlines, wrapping, and the few sequences that move the cursor
// or clear. As some terminals do, resize() cuts rows, or, with `reflow`, wraps them anew.
class Screen {
public:
    explicit Screen(int columns) : columns_(columns), rows_(1) {}

    void feed(const std::string& bytes);

    void resize(int columns, bool reflow);

    // Rows from the top, without blanks at their ends.
    std::vector<std::string> rows() const;
    int                      row() const { return row_; }
    int                      column() const { return column_; }

private:
    struct Row {
        std::string text;
        bool        wrapped = false;
    };

    void down();
    void put(char c);
    void sequence();

    int              columns_, row_ = 0, column_ = 0;
    std::vector<Row> rows_;
    std::string      escape_;
};

// Of what a program wrote on a terminal, the first line that is wider than `columns` and has a blank to be broken at; "": there is none.
std::string wide_line(const std::string& bytes, int columns);

// A child process with a terminal of its own. Nothing is there (child < 0) where the system has no pseudo-terminals.
class Pty {
public:
    Pty(const std::string& program, std::vector<std::string> arguments, int columns = 80, int rows = 24);
    ~Pty();
    Pty(const Pty&)            = delete;
    Pty& operator=(const Pty&) = delete;

    // The text since the last call, up to and with `mark`; false after a minute without any, or at the end.
    bool until(const std::string& mark);
    bool type(const std::string& keys) const;
    void resize(int columns, int rows = 24) const;
    bool echoes() const;
    // Reads what is left until the process has ended: its exit code, or 128 + the signal that ended it.
    int end();

    pid_t       child    = -1;
    int         terminal = -1, status = -1;
    std::string seen, all;

private:
    // Appends to `all` what the terminal has, waiting up to `milliseconds`; false where nothing came.
    bool read_some(int milliseconds);
};

} // namespace quire::testing
