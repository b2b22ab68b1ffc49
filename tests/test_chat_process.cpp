// The program `chat` as a process without a terminal: conversations, commands, timings, wrong usage.
#include <catch2/catch_test_macros.hpp>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <regex>
#include <string>
#include <vector>

#include "process.h"
#include "pty.h"
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
    const Finished f = chat({"-p", "Hello", "-st"}, " \n\n");
    INFO(f.err);
    CHECK(f.code == 0);
    CHECK(f.err.empty());
    CHECK(f.out.size() > 1);
    CHECK(f.out.back() == '\n');
    CHECK(chat({"-p", "Hello", "-st"}).out == f.out);                       // same seed, same text
    CHECK(chat({"-p", "Hello", "-st", "-s", "2", "-s", "1"}).out == f.out); // the last of a flag counts
    CHECK(chat({"-p", "Hello", "-st", "-s", "2", "--temp", "5", "--min-p", "0"}).out !=
          chat({"-p", "Hello", "-st", "--temp", "5", "--min-p", "0"}).out);
    CHECK(chat({"-st"}, "Hello\n").out == f.out);
    CHECK(chat({"-p", "Hello"}).out == f.out);
    CHECK(chat({"-p", "Hello", "-st", "--no-prefix-cache", "--kv-blocks", "64"}).out == f.out);
    CHECK(chat({"-p", "Hello", "-st", "-sys", "Be brief."}).out != f.out);

    const std::string file = temporary();
    std::ofstream(file) << "Hello\n";
    CHECK(chat({"-f", file, "-st"}).out == f.out);
    unlink(file.c_str());
}

TEST_CASE("a second turn prefills only what is new", "[chat]") {
    for (const char* form :
         {"llama-3", "chatml", "llama-2", "mistral", "zephyr", "gemma", "phi-3", "command-r", "plain"}) {
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
    // A script sees that a line has no answer.
    const Finished missed = chat({"-c", "100"}, "Hello\n" + std::string(4000, 'x') + "\nHello\n");
    INFO(missed.err);
    CHECK(missed.code == 1);
    CHECK(std::ranges::count(missed.out, '\n') >= 2);
}

TEST_CASE("Ctrl-C ends a run that is no conversation", "[chat]") {
    const std::string endless = "timeout --preserve-status -s INT 2 " QUIRE_BIN "/chat -m " QUIRE_ROOT
                                "/models/quire-14m-q8_0.gguf --ignore-eos --context-shift -n 10000000 ",
                      text = QUIRE_ROOT "/README.md > /dev/null 2>&1";
    for (const std::string& rest :
         {std::string("-st -p Tell > /dev/null 2>&1"), "< " + text, "-st -c 16384 < " + text}) {
        CAPTURE(rest);
        const int status = std::system((endless + rest).c_str());
        CHECK(WEXITSTATUS(status) == 130);
    }
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
    const std::vector<std::string> arguments{"-m", model(), "-c", "40", "--ignore-eos", "-s", "1", "--no-trim-chats"};
    const std::string              full = "The context of 40 tokens is full; /clear starts a new conversation.\n";
    const std::string              back = "The message is taken back: with it the conversation has ",
                      fit               = " tokens, and 39 fit into the context; /clear starts a new one.\n";
    const Finished f                    = run_program("chat", arguments, "Hello\nmore\n/clear\nHello\n");
    CHECK(f.code == 1); // a message has no answer
    CHECK(f.err.starts_with(full + back));
    CHECK(f.err.ends_with(fit + "A new conversation.\n" + full));
    CHECK(lines(f.err) == 4);
    CHECK(lines(f.out) >= 2);
    Finished longer =
        run_program("chat", {"-m", model(), "-c", "8", "-st", "-p", "a question of more than eight tokens, surely"});
    CHECK(longer.code == 1);
    int n = 0;
    REQUIRE(std::sscanf(longer.err.c_str(), "The message is too long and is taken back: it has %d tokens", &n) == 1);
    CHECK(n > 8);
    CHECK(has(longer.err, " tokens with the chat template, and 7 fit into the context.\n"));
    CHECK(lines(longer.err) == 1);
    // A script sees it without -st, too: no input, a piped text that -p asks about, a file.
    const std::string eight = temporary();
    std::ofstream(eight) << "a question of more than eight tokens, surely";
    for (const auto& [more, input] : std::vector<std::pair<std::vector<std::string>, std::string>>{
             {{"-p", "a question of more than eight tokens, surely"}, ""},
             {{"-p", "Hi"}, "a question of more than eight tokens, surely\n"},
             {{"-f", eight}, ""}}) {
        std::vector<std::string> small{"-m", model(), "-c", "8"};
        small.insert(small.end(), more.begin(), more.end());
        const Finished taken_back = run_program("chat", small, input);
        CHECK(taken_back.code == 1);
        CHECK(taken_back.out.empty());
        CHECK(taken_back.err.starts_with("The message is too long and is taken back: it has "));
        CHECK(lines(taken_back.err) == 1);
    }
    unlink(eight.c_str());
    CHECK(run_program("chat", {"-m", model(), "-c", "40", "-n", "1", "-p", "Hi"}, "").code == 0);
    longer =
        run_program("chat", {"-m", model(), "-c", "40", "-n", "1"},
                    "Hi\na question of more than forty tokens, surely, since it goes on and on and on and on and on, "
                    "and on and on, and does not end before it has had all of its forty tokens, or more than that\n");
    CHECK(has(longer.err, "The message is too long and is taken back: it has "));
    CHECK(has(longer.err, " tokens with the chat template, and 39 fit into the context.\n"));
}

TEST_CASE("a message that does not fit is taken back, with what /read put before it", "[chat]") {
    const std::string folder = temporary() + ".d", large = folder + "/large", half = folder + "/half";
    std::filesystem::create_directory(folder);
    std::string words;
    for (int i = 0; i < 60; i++) words += "word ";
    std::ofstream(half) << words.substr(0, 100);
    std::ofstream(large) << words << words << words;
    const auto talk = [&](const std::string& input, bool trims = true) {
        return run_program("chat",
                           {"-m", model(), "-c", "128", "-n", "4", "-s", "1", "-t", "1", "--ignore-eos",
                            "--show-timings", trims ? "--trim-chats" : "--no-trim-chats"},
                           input);
    };
    const Finished plain = talk("Hello\nAnd now?\n");
    const auto     want  = timings(plain.err);
    REQUIRE(want.size() == 2);
    REQUIRE(!has(plain.err, "longer than the context"));
    const auto as_before = [&](const Finished& f, int code = 0) {
        CAPTURE(f.err);
        CHECK(f.code == code);
        CHECK(f.out == plain.out);
        const auto got = timings(f.err);
        REQUIRE(got.size() == 2);
        CHECK(got[1].fresh + got[1].cached == want[1].fresh + want[1].cached);
        CHECK(!has(f.err, "longer than the context"));
    };
    SECTION("a file that is too long is not read") {
        const Finished f = talk("Hello\n/read " + large + "\nAnd now?\n");
        as_before(f);
        int               n = 0, most = 0;
        const std::size_t at = f.err.find(" is not put before the next message: it has ");
        REQUIRE(at != std::string::npos);
        CHECK(std::sscanf(f.err.c_str() + at,
                          " is not put before the next message: it has %d tokens with the chat template, and %d fit",
                          &n, &most) == 2);
        CHECK(n > 180);
        CHECK(most == 127);
    }
    SECTION("nor a second one that is too long together with the first") {
        const Finished f =
            talk("/read " + half + "\n/read " + half + "\n/read " + half + "\n/clear\nHello\nAnd now?\n");
        as_before(f);
        CHECK(has(f.err, "together with what /read put there, it has "));
    }
    SECTION("a message that is too long, by itself or with a file, leaves the old turns") {
        for (const bool trims : {true, false}) {
            const Finished f = talk("Hello\n/read " + half + "\n" + words + words + "\nAnd now?\n", trims);
            as_before(f, 1);
            CHECK(has(f.err, "The message is too long and is taken back: it has "));
            CHECK(has(f.err, "What /read put before it is gone, too.\n"));
        }
    }
    std::filesystem::remove_all(folder);
}

TEST_CASE("a long conversation goes on without its oldest messages", "[chat]") {
    const std::vector<std::string> arguments{"-m", model(), "-c", "64", "-n", "12", "--ignore-eos", "-s", "1"};
    std::string                    long_one;
    for (int i = 0; i < 8; i++) long_one += "Hello\n";
    const Finished f = run_program("chat", arguments, long_one);
    CHECK(f.code == 0);
    CHECK(f.err ==
          "The conversation is longer than the context of 64 tokens: from here on its oldest messages are left out.\n");
    CHECK(lines(f.out) >= 8);
    // An answer can go on, too.
    const Finished cut = run_program(
        "chat", {"-m", model(), "-c", "40", "-n", "100", "--ignore-eos", "-st", "-p", "Hello", "--show-timings"});
    CHECK(has(cut.err, "is full"));
    const Finished whole = run_program("chat", {"-m", model(), "-c", "40", "-n", "100", "--ignore-eos", "-st", "-p",
                                                "Hello", "--show-timings", "--context-shift"});
    CHECK(whole.code == 0);
    CHECK(has(whole.err, "answer 100 tokens"));
    const Finished unbounded =
        run_program("chat", {"-m", model(), "-c", "40", "--ignore-eos", "-st", "-p", "Hello", "--context-shift"});
    CHECK(unbounded.err == "The answer ends after 40 tokens, as many as the context has; -n N allows more.\n");
}

TEST_CASE("a template from a file is rendered, or refused with its line and column", "[chat]") {
    const std::string file = temporary();
    std::ofstream(file) << "{%- for m in messages -%}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor "
                           "-%}<|im_start|>assistant{{ '\\n' }}";
    const Finished f = chat({"-p", "Hello", "-st", "--chat-template-file", file});
    CHECK(f.code == 0);
    CHECK(f.err == "");
    CHECK(f.out == chat({"-p", "Hello", "-st", "--chat-template", "chatml"}).out);
    std::ofstream(file) << "{% if tools %}\n{{ }}";
    const Finished wrong = chat({"-p", "Hello", "-st", "--chat-template-file", file});
    CHECK(wrong.code == 1);
    CHECK(lines(wrong.err) == 1);
    CHECK(has(wrong.err, "line 2, column 4"));
    unlink(file.c_str());
    CHECK(chat({"--chat-template-file", file}).code == 1);
    const Finished unknown = chat({"--chat-template", "alpaca"});
    CHECK(unknown.code == 2);
    CHECK(unknown.err.contains("there is no chat template 'alpaca': chatml, llama-2"));
}

TEST_CASE("a fault of a grammar or schema names its file", "[chat]") {
    const std::string file = temporary();
    std::ofstream(file) << "root ::= \"a\"\nx ::= (\n";
    for (const char* program : {"chat", "inspect"}) {
        std::vector<std::string> words{"--grammar", file};
        if (program == std::string("inspect")) words.insert(words.begin(), {"constrain", model()});
        const Finished f = run_program(program, words);
        CHECK(f.code == 1);
        CHECK(f.err == std::string(program) + ": '" + file + "': the grammar's line 3, column 1: '(' without ')'\n");
    }
    std::ofstream(file) << R"({"type":"text"})";
    CHECK(has(chat({"--schema", file}).err, "chat: '" + file + "': at '#': type: "));
    unlink(file.c_str());
}

TEST_CASE("wrong usage and unusable files", "[chat]") {
    for (const std::vector<std::string>& arguments : std::vector<std::vector<std::string>>{{"--bogus"},
                                                                                           {"stray"},
                                                                                           {"-n", "0"},
                                                                                           {"-n", "x"},
                                                                                           {"-n"},
                                                                                           {"-c", "-1"},
                                                                                           {"-t", "-2"},
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

TEST_CASE("the list of models names only folders that there are", "[chat]") {
    const Finished f = run_program(
        "sh", {"-c", "cp " QUIRE_BIN "/chat $0.chat && env -i $0.chat --models; rm $0.chat", temporary()}, "", "/bin");
    CHECK(f.code == 0);
    CHECK(f.out.starts_with("There is no model in "));
    CHECK(f.out.ends_with("/models; chat -hf USER/MODEL fetches one.\n"));
    const Finished g =
        run_program("sh",
                    {"-c", "d=$(mktemp -d) && mkdir $d/models && printf no >$d/models/short.gguf && cp " QUIRE_BIN
                           "/chat $d && env -i $d/chat --models; rm -r $d"},
                    "", "/bin");
    CHECK(g.out.starts_with("There is no model in ")); // a file that is no GGUF file is none
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
    CHECK(WEXITSTATUS(status) == 130);
    close(to[1]);
    close(from[0]);
}

namespace {

// `chat` in a terminal of its own. A bare chroot has none: then nothing can be tested.
struct Conversation : Pty {
    explicit Conversation(std::vector<std::string> more = {}, int columns = 80, const std::string& state = "")
        : Pty(program(state), arguments(std::move(more)), columns) {
        if (child < 0) WARN("no terminal to test with: " << std::strerror(errno));
    }
    static std::string program(const std::string& state) {
        setenv("XDG_STATE_HOME", state.empty() ? "/dev/null" : state.c_str(), 1);
        return std::string(QUIRE_BIN) + "/chat";
    }
    static std::vector<std::string> arguments(std::vector<std::string> more) {
        std::vector<std::string> all{"-m", model(), "-n", "4", "--temp", "0", "-t", "1", "--block-size", "4"};
        all.insert(all.end(), more.begin(), more.end());
        return all;
    }
    void expect(const std::string& mark) {
        const bool came = until(mark);
        INFO(seen);
        REQUIRE(came);
    }
    // A prompt, and the keys are the program's.
    void expect_prompt() { expect("\x1b[J> \r\x1b[2C"); }
};

// A prompt long enough to be read in many chunks, in a context that has room for it.
std::string long_text(int words) {
    std::string text;
    for (int i = 0; i < words; i++) text += " word";
    return text;
}

} // namespace

TEST_CASE("a terminal has editing, history and a prompt", "[chat]") {
    const std::string state = temporary();
    unlink(state.c_str());
    Conversation c({}, 80, state);
    if (c.child < 0) return;
    c.expect_prompt();
    CHECK(has(c.all, "chat template: the file's"));
    c.type("/whät\x7f\x7f\x7fxy\n"); // the character of two bytes goes as one
    c.expect("Commands: ");
    c.expect_prompt();
    c.type("Hello\n");
    c.expect(" from cache");
    c.expect_prompt();
    c.type("\x1b[A there\n"); // arrow up
    c.expect("Hello there");
    c.expect(" from cache");
    c.expect_prompt();
    c.type("/exit\n");
    CHECK(c.end() == 0);
    const std::string history = slurp(state + "/quire/history");
    CHECK(history.starts_with("_HiStOrY_V2_\n"));
    CHECK(has(history, "/wxy\n"));
    CHECK(has(history, "Hello\\040there\n"));
    Conversation again({}, 80, state);
    again.expect_prompt();
    again.type("\x10\x10\x10"); // /exit, then what came before
    again.expect("> Hello");
    again.type("\x0e\x0e\x0e\x12the"); // back again, then Ctrl-R
    again.expect("(search: the) Hello there");
    std::filesystem::remove_all(state);
}

TEST_CASE("no line is wider than a narrow terminal", "[chat]") {
    Conversation c({}, 40);
    if (c.child < 0) return;
    c.expect_prompt();
    for (const char* typed : {"/help", "/nothing", "/read /nonexistent/a/file", "/clear"}) {
        c.type(std::string(typed) + "\n");
        c.expect_prompt();
    }
    c.type("Hello\n");
    c.expect("t/s ]");
    c.expect_prompt();
    c.type("/exit\n");
    CHECK(c.end() == 0);
    CHECK(wide_line(c.all, 40).empty());
    for (const std::vector<std::string>& words : {std::vector<std::string>{"--models"},
                                                  {"--nonsense-that-is-no-flag-at-all"},
                                                  {"-m", "/nonexistent/model.gguf", "-ngl", "99", "--no-mmap"},
                                                  {"/nonexistent/model.gguf"},
                                                  {"--port", "x", "--kv-type", "none"}}) {
        Pty said(QUIRE_BIN "/chat", words, 40);
        said.end();
        CAPTURE(words);
        CHECK(said.all.size() > 40);
        CHECK(wide_line(said.all, 40).empty());
    }
}

TEST_CASE("Ctrl-C clears a half-typed line, twice it leaves", "[chat]") {
    Conversation c;
    if (c.child < 0) return;
    c.expect_prompt();
    c.type("half a line");
    c.expect("half a line");
    c.type("\x03");
    c.expect("Ctrl-C once more leaves");
    c.expect_prompt();
    c.type("a\x7f\x03"); // any other key begins to count anew
    c.expect("Ctrl-C once more leaves");
    c.expect_prompt();
    c.type("/what\n");
    c.expect("Commands: ");
    c.expect_prompt();
    SECTION("one after the other") {
        c.type("\x03");
        c.expect("Ctrl-C once more leaves");
        c.type("\x03");
    }
    SECTION("at once") { c.type("\x03\x03"); }
    SECTION("with a half-typed line") { c.type("half\x03\x03"); }
    SECTION("Ctrl-D") { c.type("\x04"); }
    CHECK(c.end() == 0);
    CHECK(!has(c.all, " from cache")); // nothing was sent
    CHECK(c.echoes());
    CHECK(c.all.rfind("\x1b[?2004l") > c.all.rfind("\x1b[?2004h"));
}

TEST_CASE("keys typed during an answer are the next line", "[chat]") {
    Conversation c({"-n", "60", "--ignore-eos"});
    if (c.child < 0) return;
    c.expect_prompt();
    c.type("Hello\n");
    c.expect("> Hello");
    CHECK(!c.echoes());
    c.type("typedahead");
    c.expect(" from cache");
    CHECK(!has(c.seen, "typedahead"));
    c.expect("> typedahead");
    c.type("\x15/read\n");
    c.expect("Commands: ");
}

TEST_CASE("a pasted text of several lines is one message", "[chat]") {
    Conversation c;
    if (c.child < 0) return;
    c.expect("\x1b[?2004h");
    c.expect_prompt();
    c.type("\x1b[200~first\rsecond\n/exit\x1b[201~ and more");
    c.expect("> first\r\r\nsecond\r\r\n/exit and more");
    c.type("\n");
    c.expect("[ prompt");
    c.expect_prompt();
    CHECK(!has(c.seen, "[ prompt"));
    c.type("\x1b[200~never ended\x03\x1b[A"); // Ctrl-C gets out
    c.expect("> first\r\r\nsecond\r\r\n/exit and more");
}

TEST_CASE("a new size while a line is typed", "[chat]") {
    const std::string text = "a line that is longer than forty columns and so it wraps, here or there";
    for (const bool reflow : {false, true}) {
        Conversation c({}, 60);
        if (c.child < 0) return;
        c.expect_prompt();
        c.type(text);
        c.expect("there");
        Screen     screen(60);
        const auto rows = [&](int columns) {
            std::vector<std::string> lines;
            for (std::string rest = "> " + text; !rest.empty(); rest.erase(0, std::size_t(columns))) {
                std::string line = rest.substr(0, std::size_t(columns));
                lines.push_back(line.substr(0, line.find_last_not_of(' ') + 1));
            }
            return lines;
        };
        const auto before = [&] {
            std::vector<std::string> shown = screen.rows();
            return std::vector(shown.begin(), shown.begin() + 1);
        };
        // All lines that begin with a prompt, and whatever is below the first of them.
        const auto below_prompt = [&] {
            std::vector<std::string> shown = screen.rows();
            auto at = std::ranges::find_if(shown, [](const std::string& row) { return row.starts_with("> "); });
            return std::vector(at, shown.end());
        };
        screen.feed(c.all.substr(c.all.find("quire  ")));
        CHECK(below_prompt() == rows(60));
        std::string top = before()[0];
        for (int columns : {40, 100, 33}) {
            CAPTURE(columns, reflow);
            c.resize(columns);
            c.expect("\x1b[6n"); // where is the cursor?
            screen.feed(c.seen);
            screen.resize(columns, reflow);
            // A terminal that wraps anew says where the cursor is now; another one need not answer.
            if (reflow) c.type("\x1b[9;" + std::to_string(screen.column() + 1) + "R");
            c.expect("\x1b[J");
            screen.feed(c.seen);
            c.expect("there");
            screen.feed(c.seen);
            CHECK(below_prompt() == rows(columns));
            CHECK(before()[0].starts_with(top.substr(0, 20)));
        }
    }
}

TEST_CASE("Ctrl-Z stops, fg brings the line back", "[chat]") {
    Pty shell("/bin/bash", {"--norc", "--noprofile", "--noediting", "-i"});
    if (shell.child < 0) return;
    shell.type("PS1='re''ady> '\n");
    REQUIRE(shell.until("ready> "));
    shell.type(std::string(QUIRE_BIN) + "/chat -n 4 -t 1 --temp 0 -m " + model() + "\n");
    REQUIRE(shell.until("\x1b[J> \r\x1b[2C"));
    shell.type("half");
    REQUIRE(shell.until("half"));
    shell.type("\x1a");
    REQUIRE(shell.until("Stopped"));
    REQUIRE(shell.until("ready> "));
    shell.type("fg\n");
    REQUIRE(shell.until("> half"));
    CHECK(!shell.echoes());
    shell.type("way");
    REQUIRE(shell.until("> halfway")); // once
    shell.type("\x15/what\n");
    REQUIRE(shell.until("Commands: "));
    REQUIRE(shell.until("\x1b[J> \r\x1b[2C"));
    CHECK(!has(shell.seen, "halfway"));
    shell.type("\x04");
    REQUIRE(shell.until("ready> "));
    shell.type("stty -a\n");
    REQUIRE(shell.until(" echo "));
}

TEST_CASE("a signal that ends the process puts the terminal right", "[chat]") {
    Conversation c;
    if (c.child < 0) return;
    c.expect_prompt();
    CHECK(!c.echoes());
    kill(c.child, SIGTERM);
    CHECK(c.end() == 128 + SIGTERM);
    CHECK(c.echoes());
    CHECK(c.all.rfind("\x1b[?2004l") > c.all.rfind("\x1b[?2004h"));
}

TEST_CASE("Ctrl-C while a prompt is read", "[chat]") {
    const std::string big = temporary();
    REQUIRE(run_program("bench", {"make-model", "--shape", "llama-1b", "--layers", "2", "--type", "q4_k", "-o", big})
                .code == 0);
    Conversation c({"-m", big, "-c", "4000", "--chat-template", "chatml"});
    if (c.child < 0) return;
    c.expect_prompt();
    c.type("\x1b[200~" + long_text(300) + "\x1b[201~\n");
    c.expect("\rreading ");
    c.expect(" tokens");
    c.type("\x03");
    c.type("\x03");
    c.type("\x03");
    c.expect("[ prompt ");
    c.expect("Stopped when ");
    c.expect(". /regen goes on from there.");
    int read = 0, all = 0;
    REQUIRE(std::sscanf(c.seen.c_str(), "%d of %d tokens", &read, &all) == 2);
    const std::vector<Timing> stopped = timings(c.all.substr(0, c.all.rfind("Stopped when")));
    REQUIRE(stopped.size() == 1);
    CHECK(stopped[0].fresh == read);
    CHECK(read > 0);
    CHECK(read < all);
    c.type("and now?\n");
    c.expect("> and now?");
    c.expect(" from cache");
    c.expect(" answer ");
    c.expect(" tokens");
    const std::vector<Timing> t = timings(c.all + " answer 0 tokens");
    CHECK(t.back().cached == read / 4 * 4);
    unlink(big.c_str());
}

TEST_CASE("Tab completes commands and files", "[chat]") {
    const std::string folder = temporary();
    unlink(folder.c_str());
    std::filesystem::create_directories(folder + "/inner directory");
    std::ofstream(folder + "/inner directory/some file.txt") << "text";
    std::ofstream(folder + "/inner directory/some more.txt") << "text";
    setenv("HOME", folder.c_str(), 1);
    Conversation c({}, 200);
    if (c.child < 0) return;
    c.expect_prompt();
    c.type("/rea\tx\x7f~/inn\tso\t");
    c.expect("/read ~/inner directory/some ");
    c.type("\t\t");
    c.expect("some more.txt");
    c.type("f\t\n");
    c.expect("begin with 4 bytes of '~/inner directory/some file.txt'");
    c.expect_prompt();
    c.type("/read ~\n");
    c.expect("it is a directory");
    std::filesystem::remove_all(folder);
}

TEST_CASE("what llama.cpp's users type", "[chat]") {
    const Finished plain = chat({"-p", "Hello", "-st"});
    const Finished f     = chat({"-p",   "Hello", "-st",     "-ngl", "99",        "-fa",           "on",
                                 "-cnv", "-i",    "--jinja", "-mli", "--no-mmap", "--mlock",       "-b",
                                 "512",  "-ub",   "512",     "-fa",  "--color",   "--cache-reuse", "0",
                                 "-t",   "-1",    "-ctk",    "f16",  "-n12",      "--temperature", "0.8"});
    CHECK(f.code == 0);
    CHECK(f.err ==
          "chat: not needed here, and ignored: -ngl, -fa, -cnv, -i, --jinja, -mli, --no-mmap, --mlock, -b, "
          "-ub, -fa, --cache-reuse\n");
    CHECK(f.out == plain.out);
    CHECK(chat({"-p", "Hel\\x", "-st", "-e"}).code == 0);
    CHECK(chat({"-p", "Hel\\tlo", "-st", "-e"}).out == chat({"-p", "Hel\tlo", "-st"}).out);
    CHECK(has(chat({"--color", "-p", "Hello", "-st", "--show-timings"}).err, "\x1b[2m"));
    CHECK(has(chat({"-p", "Hello", "-st", "--show-timings", "--color"}).err, "\x1b[2m"));
    CHECK(chat({"-p", "-nothing", "-st"}).code == 0); // a text that begins with a dash
    for (const std::vector<std::string>& refused : std::vector<std::vector<std::string>>{{"-dr", "x/y"},
                                                                                         {"-no-cnv"},
                                                                                         {"--adaptive-target", "0.5"},
                                                                                         {"--kv-cache-dtype", "q4"},
                                                                                         {"-ngx", "3"},
                                                                                         {"-nglx"},
                                                                                         {"-hf"},
                                                                                         {"--json-schema", "{}"},
                                                                                         {"--mmproj=x"},
                                                                                         {"-nxt"}}) {
        const Finished    r    = chat(refused);
        const std::string name = refused[0].substr(0, refused[0].find('='));
        CAPTURE(name, r.err);
        CHECK(r.code == 2);
        CHECK(lines(r.err) == 1);
        CHECK(has(r.err, name));
    }
}

TEST_CASE("a piped text is one message with -st, // begins one with a slash", "[chat]") {
    const std::string file = temporary();
    std::ofstream(file) << "Hello\n\nand more\n";
    const Finished f = chat({"-st", "--show-timings"}, "Hello\n\nand more\n"), whole = chat({"-st", "-f", file});
    CHECK(f.code == 0);
    CHECK(f.out == whole.out);
    CHECK(timings(f.err).size() == 1);
    std::ofstream(file) << "/exit now";
    CHECK(chat({}, "//exit now\n").out == chat({"-st", "-f", file}).out);
    CHECK(chat({"-st"}, "/exit now\n").out == chat({"-st", "-f", file}).out);
    CHECK(chat({"-st"}, "\n \n").out.empty());
    // -p or -f asks about it
    std::ofstream(file) << "What colour is the cat?\n\nThe cat is black.\n\nSo it is.\n";
    const Finished both = chat({"-st", "-f", file});
    for (const std::vector<std::string>& more : std::vector<std::vector<std::string>>{{"-st"}, {}}) {
        std::vector<std::string> arguments{"-p", "What colour is the cat?", "--show-timings"};
        arguments.insert(arguments.end(), more.begin(), more.end());
        const Finished asked = chat(arguments, "The cat is black.\n\nSo it is.\n");
        CHECK(asked.code == 0);
        CHECK(asked.out == both.out);
        CHECK(timings(asked.err).size() == 1);
    }
    std::ofstream(file) << "What colour is the cat?";
    CHECK(chat({"-f", file, "-st"}, "The cat is black.\n\nSo it is.\n").out == both.out);
    unlink(file.c_str());
    CHECK(has(chat({}, "/read /tmp\n").err, "'/tmp': it is a directory\n"));
    CHECK(has(chat({}, "/help\n").err, "Ctrl-R"));
}

TEST_CASE("README shows what chat prints", "[chat]") {
    const std::string readme = slurp(QUIRE_ROOT "/README.md");
    const std::size_t begin = readme.find("    $ ./chat\n"), end = readme.find("\n(", begin);
    REQUIRE(begin != std::string::npos);
    REQUIRE(end != std::string::npos);
    // A text without what depends on the machine, and with one blank where there are several, or the end of a line.
    const auto plain = [](std::string text) {
        for (const auto& [what, with] : {std::pair("cpu, [^;]*;", "cpu;"),
                                         {"[0-9.]+ tok/s", "N tok/s"},
                                         {"[0-9.]+ [kMG]B/s", "N GB/s"},
                                         {"[0-9.]+ t/s", "N t/s"},
                                         {"workspaces [0-9]+ MiB", "workspaces N MiB"},
                                         {"[ \n]+", " "}})
            text = std::regex_replace(text, std::regex(what), with);
        return text;
    };
    const std::string        shown = readme.substr(begin + 13, end - begin - 13);
    std::vector<std::string> questions;
    for (std::size_t at = 0; (at = shown.find("\n    > ", at)) != std::string::npos; at++)
        questions.push_back(shown.substr(at + 7, shown.find('\n', at + 1) - at - 7));
    REQUIRE(questions.size() == 2);

    constexpr int columns = 500;
    setenv("XDG_STATE_HOME", "/dev/null", 1);
    Pty c(QUIRE_BIN "/chat", {"--device", "cpu", "-m", QUIRE_ROOT "/models/quire-14m-q8_0.gguf"}, columns);
    if (c.child < 0) return;
    for (const std::string& question : questions) {
        REQUIRE(c.until("\x1b[J> \r\x1b[2C"));
        c.type(question + "\n");
        REQUIRE(c.until("[ prompt"));
    }
    REQUIRE(c.until("\x1b[J> \r\x1b[2C"));
    Screen screen(columns);
    screen.feed(std::regex_replace(c.all, std::regex("█|░"), "#")); // it counts bytes
    std::string printed;
    for (const std::string& row : screen.rows()) printed += row + "\n";
    CHECK(plain(printed) == plain(shown.substr(shown.find_first_not_of(' ')) + "\n> "));
}
