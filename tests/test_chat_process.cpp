// The program `chat` as a process without a terminal: conversations, commands, timings, wrong usage.
#include <catch2/catch_test_macros.hpp>

#include <poll.h>
#include <pty.h>
#include <termios.h>
#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "process.h"
#include "reference.h"

using namespace quire::testing;

namespace {

// A model of random weights: what it says means nothing, but it says it.
std::string model() { return reference("models/llama3-gqa-Q8_0.gguf"); }

Finished chat(std::vector<std::string> arguments, const std::string& input = "") {
    std::vector<std::string> all{"-m", model(), "-n", "12", "-s", "1", "-t", "1", "--block-size", "4"};
    all.insert(all.end(), arguments.begin(), arguments.end());
    return run_program("chat", all, input);
}

auto lines(const std::string& text) { return std::count(text.begin(), text.end(), '\n'); }

// The numbers of the timing lines: new prompt tokens, those from the cache, answer tokens.
struct Timing {
    int fresh = 0, cached = 0, answer = 0;
};

std::vector<Timing> timings(const std::string& text) {
    std::vector<Timing> found;
    for (std::size_t at = 0; (at = text.find("[ prompt ", at)) != std::string::npos; at++) {
        Timing t;
        REQUIRE(std::sscanf(text.c_str() + at, "[ prompt %d tokens, %d from cache, %*f t/s | answer %d tokens",
                            &t.fresh, &t.cached, &t.answer) == 3);
        found.push_back(t);
    }
    return found;
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

} // namespace

TEST_CASE("one turn, then it leaves", "[chat]") {
    const Finished f = chat({"-p", "Hello", "-st"}, "not read\n");
    INFO(f.err);
    CHECK(f.code == 0);
    CHECK(f.err.empty());
    CHECK(f.out.size() > 1);
    CHECK(f.out.back() == '\n');
    CHECK(chat({"-p", "Hello", "-st"}).out == f.out);                       // same seed, same text
    CHECK(chat({"-p", "Hello", "-st", "-s", "2", "-s", "1"}).out == f.out); // the last of a flag counts
    CHECK(chat({"-p", "Hello", "-st", "-s", "2", "--temp", "5", "--min-p", "0"}).out !=
          chat({"-p", "Hello", "-st", "--temp", "5", "--min-p", "0"}).out);
    CHECK(chat({"-st"}, "Hello\nnot read\n").out == f.out);
    CHECK(chat({"-p", "Hello"}).out == f.out);
    CHECK(chat({"-p", "Hello", "-st", "--no-prefix-cache", "--kv-blocks", "64"}).out == f.out);
    CHECK(chat({"-p", "Hello", "-st", "-sys", "Be brief."}).out != f.out);

    const std::string file = temporary();
    std::ofstream(file) << "Hello\n";
    CHECK(chat({"-f", file, "-st"}).out == f.out);
    unlink(file.c_str());
}

TEST_CASE("a second turn prefills only what is new", "[chat]") {
    for (const char* form : {"llama-3", "chatml", "llama-2", "mistral", "zephyr", "gemma", "phi-3", "plain"}) {
        const Finished f = chat({"--chat-template", form, "--show-timings", "-sys", "Be brief.", "--ignore-eos"},
                                "Hello, how are you?\nAnd now?\n");
        INFO(form << ' ' << f.err);
        CHECK(f.code == 0);
        const std::vector<Timing> t = timings(f.err);
        REQUIRE(t.size() == 2);
        CHECK(t[0].cached == 0);
        // All of the first prompt and its answer but the last token, in whole blocks. (A plain answer may be cut.)
        if (form != std::string("plain")) CHECK(t[1].cached == (t[0].fresh + t[0].answer - 1) / 4 * 4);
        CHECK(t[1].cached > 0);
    }
    const std::vector<Timing> none = timings(chat({"--show-timings", "--no-prefix-cache"}, "Hello\nAnd now?\n").err);
    REQUIRE(none.size() == 2);
    CHECK(none[1].cached == 0);
}

TEST_CASE("plain text goes through pipes", "[chat]") {
    const Finished f = chat({"--show-timings"}, "Hello\r\n\n  \nlast line without an end");
    INFO(f.err);
    CHECK(f.code == 0);
    CHECK(timings(f.err).size() == 2);
    CHECK(!has(f.out + f.err, "\x1b"));
    CHECK(!has(f.out + f.err, "\r"));
    CHECK(!has(f.out, "> "));
    CHECK(timings(chat({"--show-timings"}, "one \\\ntwo\n").err).size() == 1); // a message of two lines
}

TEST_CASE("commands", "[chat]") {
    SECTION("exit") {
        const Finished f = chat({"--show-timings"}, "Hello\n/exit\nnever\n");
        CHECK(f.code == 0);
        CHECK(timings(f.err).size() == 1);
    }
    SECTION("clear") {
        const Finished f = chat({"--show-timings", "-sys", "Be brief."}, "Hello\n/clear\nHello\n");
        const auto     t = timings(f.err);
        REQUIRE(t.size() == 2);
        CHECK(t[0].fresh == t[1].fresh + t[1].cached); // the system prompt is still there, the first turn is not
    }
    SECTION("regen") {
        const Finished f = chat({"--show-timings", "--temp", "5", "--min-p", "0"}, "/regen\nHello\n/regen\n");
        const auto     t = timings(f.err);
        CHECK(has(f.err, "There is no answer yet."));
        REQUIRE(t.size() == 2);
        CHECK(t[0].fresh == t[1].fresh + t[1].cached);
        const std::string once = chat({"--temp", "5", "--min-p", "0"}, "Hello\n").out;
        CHECK(f.out.starts_with(once));
        CHECK(f.out != once + once);
    }
    SECTION("read") {
        const std::string file = temporary();
        std::ofstream(file) << "a text to read, with more words than the question";
        const Finished with    = chat({"--show-timings"}, "/read " + file + "\nHello\n"),
                       without = chat({"--show-timings"}, "Hello\n");
        CHECK(timings(with.err)[0].fresh > timings(without.err)[0].fresh + 5);
        unlink(file.c_str());
        CHECK(has(chat({}, "/read /nonexistent\n").err, "no such file"));
        CHECK(has(chat({}, "/read\n").err, "/read FILE"));
    }
    SECTION("unknown") {
        const Finished f = chat({}, "/what\n");
        CHECK(f.code == 0);
        CHECK(f.out.empty());
        for (const char* command : {"/exit", "/clear", "/regen", "/read"}) CHECK(has(f.err, command));
    }
}

TEST_CASE("a full context says so", "[chat]") {
    const std::vector<std::string> arguments{"-m", model(), "-c", "40", "--ignore-eos", "-s", "1"};
    const std::string              full = "The context of 40 tokens is full; /clear starts a new conversation.\n";
    const Finished                 f    = run_program("chat", arguments, "Hello\nmore\n/clear\nHello\n");
    CHECK(f.code == 0);
    CHECK(f.err == full + full + "A new conversation.\n" + full);
    CHECK(lines(f.out) >= 2);
    Finished longer =
        run_program("chat", {"-m", model(), "-c", "8", "-st", "-p", "a question of more than eight tokens, surely"});
    CHECK(longer.code == 1);
    CHECK(longer.err == "The context of 8 tokens is full; /clear starts a new conversation.\n");
}

TEST_CASE("templates that are no form fall back to a named one", "[chat]") {
    const std::string file = temporary();
    std::ofstream(file) << "{% if tools %}{% endif %}<|im_start|>";
    const Finished f = chat({"-p", "Hello", "-st", "--chat-template-file", file});
    CHECK(f.code == 0);
    CHECK(lines(f.err) == 1);
    CHECK(has(f.err, "not one of the recognised forms; using 'chatml'"));
    CHECK(f.out == chat({"-p", "Hello", "-st", "--chat-template", "chatml"}).out);
    unlink(file.c_str());
    CHECK(chat({"--chat-template-file", file}).code == 1);
}

TEST_CASE("wrong usage and unusable files", "[chat]") {
    for (const std::vector<std::string>& arguments :
         std::vector<std::vector<std::string>>{{"--bogus"},
                                               {"stray"},
                                               {"-n", "0"},
                                               {"-n", "x"},
                                               {"-n"},
                                               {"-c", "-1"},
                                               {"-t", "-1"},
                                               {"--temp", "-1"},
                                               {"--temp", "nan"},
                                               {"--top-k", "-1"},
                                               {"--top-p", "0"},
                                               {"--top-p", "1.1"},
                                               {"--min-p", "-0.1"},
                                               {"--min-p", "2"},
                                               {"--repeat-penalty", "0"},
                                               {"-s", "-2"},
                                               {"--block-size", "0"},
                                               {"--block-size", "257"},
                                               {"--kv-type", "q4"},
                                               {"--chat-template", "alpaca"},
                                               {"-p", "a", "-f", "b"},
                                               {"--color", "blue"}}) {
        std::vector<std::string> all{"-m", model()};
        all.insert(all.end(), arguments.begin(), arguments.end());
        const Finished f = run_program("chat", all);
        CAPTURE(arguments, f.err);
        CHECK(f.code == 2);
        CHECK(lines(f.err) == 1);
        CHECK(f.out.empty());
    }
    for (const std::vector<std::string>& arguments :
         std::vector<std::vector<std::string>>{{"-m", "/nonexistent.gguf"},
                                               {"-m", "/dev/null"},
                                               {"-m", "/tmp"},
                                               {"-m", model(), "-f", "/nonexistent"},
                                               {"-m", model(), "-f", "/tmp"}}) {
        const Finished f = run_program("chat", arguments);
        CAPTURE(arguments, f.err);
        CHECK(f.code == 1);
        CHECK(lines(f.err) == 1);
        CHECK(has(f.err, arguments.back()));
        CHECK(f.out.empty());
    }
}

TEST_CASE("help lists the flags", "[chat]") {
    const Finished f = run_program("chat", {"-h"});
    CHECK(f.code == 0);
    for (const char* flag : {"-m,",
                             "-p,",
                             "-f,",
                             "-n,",
                             "-c,",
                             "-t,",
                             "-s,",
                             "--seed",
                             "--temp",
                             "--top-k",
                             "--top-p",
                             "--min-p",
                             "--repeat-penalty",
                             "-sys",
                             "--chat-template",
                             "--chat-template-file",
                             "-st",
                             "--block-size",
                             "--no-prefix-cache",
                             "-h,",
                             "--version"})
        CHECK(has(f.out, flag));
    CHECK(run_program("chat", {"--version"}).code == 0);
}

TEST_CASE("Ctrl-C at the prompt leaves", "[chat]") {
    int to[2], from[2];
    REQUIRE(pipe(to) == 0);
    REQUIRE(pipe(from) == 0);
    const std::string program = std::string(QUIRE_BIN) + "/chat", file = model();
    const pid_t       child = fork();
    if (child == 0) {
        dup2(to[0], 0);
        dup2(from[1], 1);
        for (int fd : {to[0], to[1], from[0], from[1]}) close(fd);
        execl(program.c_str(), program.c_str(), "-m", file.c_str(), "-n", "4", "--temp", "0",
              static_cast<char*>(nullptr));
        _exit(127);
    }
    close(to[0]);
    close(from[1]);
    REQUIRE(write(to[1], "Hello\n", 6) == 6);
    std::string answer; // its newline says that the prompt comes next
    char        byte = 0;
    while (!answer.ends_with('\n') && read(from[0], &byte, 1) == 1) answer += byte;
    usleep(200'000);
    kill(child, SIGINT);
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
    close(to[1]);
    close(from[0]);
}

TEST_CASE("a terminal has editing, history and a prompt", "[chat]") {
    const std::string program = std::string(QUIRE_BIN) + "/chat", file = model(), state = temporary();
    unlink(state.c_str());
    int         terminal = -1;
    const pid_t child    = forkpty(&terminal, nullptr, nullptr, nullptr);
    if (child < 0) { // a bare chroot has no pseudo-terminals
        WARN("no terminal to test with: " << std::strerror(errno));
        return;
    }
    if (child == 0) {
        setenv("TERM", "xterm", 1);
        setenv("XDG_STATE_HOME", state.c_str(), 1);
        execl(program.c_str(), program.c_str(), "-m", file.c_str(), "-n", "4", "--temp", "0",
              static_cast<char*>(nullptr));
        _exit(127);
    }
    std::string screen;
    // What came since the last call, up to and with `mark`; fails after a minute without any.
    auto until = [&](const std::string& mark) {
        screen.clear();
        for (pollfd p{terminal, POLLIN, 0}; screen.find(mark) == std::string::npos && poll(&p, 1, 60'000) == 1;) {
            char byte = 0;
            if (read(terminal, &byte, 1) != 1) break;
            screen += byte;
        }
        INFO(screen);
        REQUIRE(has(screen, mark));
    };
    auto type = [&](const std::string& keys) {
        // The prompt shows a moment before the editor takes the keys: what comes earlier the terminal itself would edit.
        termios mode{};
        for (int i = 0; i < 1000 && (tcgetattr(terminal, &mode) != 0 || (mode.c_lflag & ICANON)); i++) usleep(10'000);
        REQUIRE(write(terminal, keys.data(), keys.size()) == ssize_t(keys.size()));
    };
    until("> ");
    CHECK(has(screen, "chat template: llama-3"));
    type("/whät\x7f\x7f\x7fxy\n"); // the character of two bytes goes as one
    until("Commands: ");
    until("> ");
    type("Hello\n");
    until(" from cache");
    until("> ");
    type("\x1b[A there\n"); // arrow up
    until("Hello there");
    until(" from cache");
    until("> ");
    type("\x03"); // Ctrl-C
    int status = 0;
    while (poll(nullptr, 0, 0) == 0 && waitpid(child, &status, WNOHANG) == 0) {
        char rest[256]; // a terminal that nobody reads would hold the program up
        if (pollfd p{terminal, POLLIN, 0}; poll(&p, 1, 100) == 1 && read(terminal, rest, sizeof rest) < 0) usleep(1000);
    }
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
    close(terminal);
    const std::string history = slurp(state + "/quire/history");
    CHECK(has(history, "/wxy\n"));
    CHECK(has(history, "Hello\\040there\n"));
    std::filesystem::remove_all(state);
}
