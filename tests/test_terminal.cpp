#include <catch2/catch_test_macros.hpp>

#include <cstdint>
#include <string>
#include <vector>

#include "pty.h"

import quire.core.unicode;
import quire.tools.common.line_editor;
import quire.tools.common.terminal;
import quire.tools.common.word_wrap;

using namespace quire;
using quire::testing::Screen;

namespace {

// The screen after the keys, with the cursor's place marked by '_'.
struct Typing {
    LineEditor editor;
    Screen     screen;
    ScreenSize size;
    KeyRequest last = KeyRequest::none;

    explicit Typing(int columns = 40, int rows = 24) : screen(columns), size{columns, rows} { editor.begin("> "); }

    std::vector<std::string> operator()(const std::string& keys) {
        for (char c : keys) last = editor.key(c);
        screen.feed(editor.draw(size));
        return shown();
    }
    std::vector<std::string> shown() const {
        std::vector<std::string> rows = screen.rows();
        rows.resize(std::max(rows.size(), std::size_t(screen.row()) + 1));
        std::string& row = rows[std::size_t(screen.row())];
        row.resize(std::max(row.size(), std::size_t(screen.column())), ' ');
        row.insert(std::size_t(screen.column()), "_");
        return rows;
    }
};

using Rows = std::vector<std::string>;

} // namespace

TEST_CASE("what a model says cannot steer the terminal", "[terminal]") {
    CHECK(printable("a\tb\nc") == "a\tb\nc");
    CHECK(printable("\x1b[2Jx\r\a\x7f\b") == "[2Jx");
    CHECK(printable("\u009b2J \u00a0é日🙂") == "2J \u00a0é日🙂");
}

TEST_CASE("a text wraps at words, however it comes", "[terminal]") {
    const auto wrapped = [](const std::string& text, int columns) {
        WordWrap          whole;
        const std::string once = whole.push(text, columns) + whole.finish(columns);
        WordWrap          pieces;
        std::string       added;
        for (std::size_t at = 0; at < text.size();) {
            const auto n = std::size_t(utf8_next(text, at).bytes);
            added += pieces.push(text.substr(at, n), columns);
            at += n;
        }
        CHECK(added + pieces.finish(columns) == once);
        return once;
    };
    CHECK(wrapped("one two three", 80) == "one two three");
    CHECK(wrapped("one two three", 8) == "one two\nthree");
    CHECK(wrapped("one two three", 7) == "one two\nthree");
    CHECK(wrapped("one two three", 6) == "one\ntwo\nthree");
    CHECK(wrapped("  one\n\n  two  \n", 5) == "  one\n\n  two  \n");
    CHECK(wrapped("a\tb", 9) == "a\tb");
    CHECK(wrapped("a\tb", 8) == "a\nb");
    CHECK(wrapped("see https://x.example/abc now", 10) == "see\nhttps://x.example/abc now"); // cut by the terminal
    CHECK(wrapped("日本語日本", 6) == "日本語\n日本");
    CHECK(wrapped("```c\nint main(void) { }\n```\nthe end of it", 8) ==
          "```c\nint main(void) { }\n```\nthe end\nof it");
    CHECK(wrapped("a ```b c d", 8) == "a ```b c\nd");
}

TEST_CASE("lines that are too wide are found", "[terminal]") {
    using quire::testing::wide_line;
    CHECK(wide_line("one two\r\nthree\r\n", 7).empty());
    CHECK(wide_line("one two\r\nthree\r\n", 6) == "one two");
    CHECK(wide_line("\x1b[2mone\x1b[0m ü\r\n", 5).empty());
    CHECK(wide_line("/a/word/without/a/blank\r\n", 5).empty());
    CHECK(wide_line("loading 10 %\rloading 20 %", 12).empty()); // on one row
}

TEST_CASE("keys edit the line", "[terminal]") {
    Typing t;
    CHECK(t("abc def") == Rows{"> abc def_"});
    CHECK(t("\x1b[D\x1b[D\x02") == Rows{"> abc _def"});
    CHECK(t("\x7f-") == Rows{"> abc-_def"});
    CHECK(t("\x01"
            "x\x1b[3~\x04") == Rows{"> x_c-def"});
    CHECK(t("\x05\x17") == Rows{"> _"});
    CHECK(t("\x19") == Rows{"> xc-def_"});
    CHECK(t("\x1b[H\x1b[1;5C y") == Rows{"> xc-def y_"});
    CHECK(t("\x1b"
            "b\x0b") == Rows{"> xc-def _"});
    CHECK(t("\x15z\x1b\rq\x1b[A\x01w") == Rows{"> w_z", "q"});
    CHECK(t("\x1b[B!") == Rows{"> wz", "q!_"});
    t("\x15\x7f\x15");
    CHECK(t("e\u0301\x7f") == Rows{"> _"}); // a letter and the accent that joins it go together
    t("\x04");
    CHECK(t.last == KeyRequest::end);
    t("\x1b[5;7R");
    CHECK(t.last == KeyRequest::report);
    CHECK(t.editor.reported_column() == 6);
    t("\x1b[999999999999;1;2;3~\x1b[\x1b\x1bOQ\xff\xc3\x03\x9b"); // nothing of it means anything
    CHECK(t.editor.text().find('\x1b') == std::string::npos);
}

TEST_CASE("a line wraps as the terminal wraps it", "[terminal]") {
    Typing t(10);
    CHECK(t("12345678") == Rows{"> 12345678", "_"});
    CHECK(t("9") == Rows{"> 12345678", "9_"});
    CHECK(t("\x7f\x7f") == Rows{"> 1234567_"});
    CHECK(t("890123456789\x01") == Rows{"> _12345678", "9012345678", "9"});
    CHECK(t("\x1b[200~a\r\nb\x1b[201~") == Rows{"> a", "b_123456789", "0123456789"});
    t.screen.feed(t.editor.leave(t.size));
    CHECK(t.shown() == Rows{"> a", "b123456789", "0123456789", "_"});
}

TEST_CASE("a text higher than the screen shows the rows about the cursor", "[terminal]") {
    Typing t(10, 3);
    t("\x1b[200~1\n2\n3\n4\n5\x1b[201~");
    CHECK(t.shown() == Rows{"3", "4", "5_"});
    CHECK(t("\x1b[A\x1b[A\x1b[A") == Rows{"2_", "3", "4"});
    t.screen.feed(t.editor.leave(t.size));
    CHECK(t.shown() == Rows{"> 1", "2", "3", "4", "5", "_"});
}

TEST_CASE("history and search", "[terminal]") {
    Typing t;
    t.editor.set_history({"first", "second one", "third"});
    t.editor.begin("> ");
    CHECK(t("new\x1b[A\x1b[A") == Rows{"> second one_"});
    CHECK(t("\x1b[B\x1b[B\x1b[B") == Rows{"> new_"});
    CHECK(t("\x12"
            "ir") == Rows{"(search: ir) third_"});
    CHECK(t("\x12") == Rows{"(search: ir) first_"});
    CHECK(t("\x01!") == Rows{"> !_first"});
    t("\x12"
      "f\r");
    CHECK(t.last == KeyRequest::enter);
    CHECK(t.editor.text() == "first");
}

TEST_CASE("Tab completes what all names begin with, and lists them when asked twice", "[terminal]") {
    Typing t;
    t.editor.set_completer([](const std::string& text) {
        std::vector<std::string> found;
        for (const char* name : {"one", "once", "other"})
            if (std::string(name).starts_with(text)) found.emplace_back(name);
        return found;
    });
    CHECK(t("on\t") == Rows{"> on_"});
    CHECK(t.editor.take_listing().empty());
    t("\t");
    CHECK(t.editor.take_listing() == "one\nonce\n");
    CHECK(t("c\t") == Rows{"> once_"});
    CHECK(t("x\t") == Rows{"> oncex_"});
}

TEST_CASE("no keys break the line or its drawing", "[terminal]") {
    std::uint32_t     state = 1;
    const auto        draw = [&](std::uint32_t below) { return (state = state * 1664525 + 1013904223) % 4093 % below; };
    const std::string some = "\x1b[]OABCDHFRm~;0123 \t\n\r\x7f\x12\x17\x19\x10\x0e日e\u0301\xff";
    for (int round = 0; round < 300; round++) {
        LineEditor editor;
        editor.set_history({"first", "日本", "a\nb"});
        editor.begin("> ");
        for (int i = 0; i < 200; i++) {
            editor.key(draw(2) == 0 ? char(draw(256)) : some[draw(std::uint32_t(some.size()))]);
            if (draw(8) == 0) editor.key('\x1b'), editor.key('[');
            (void)editor.draw({int(draw(12)), int(draw(4))});
            if (draw(50) == 0) (void)editor.draw_resized({int(draw(40)), int(draw(9))}, int(draw(40)));
        }
        CHECK(utf8_valid(editor.text()));
        CHECK(editor.text().find('\x1b') == std::string::npos);
        (void)editor.leave({20, 3});
    }
}
