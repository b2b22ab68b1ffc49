// The log, where nobody reads it, reads it late, or has gone: requests go on, lines that find no room are counted.
#include <catch2/catch_test_macros.hpp>

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "server_process.h"

import quire.core.base;
import quire.core.line_writer;
import quire.core.std;

using namespace quire;
using namespace quire::testing;

namespace {

struct Pipe {
    int read = -1, write = -1;
    Pipe() {
        int ends[2];
        REQUIRE(pipe2(ends, O_CLOEXEC) == 0);
        read = ends[0], write = ends[1];
    }
    ~Pipe() {
        shut(read);
        shut(write);
    }
    static void shut(int& fd) {
        if (fd >= 0) close(std::exchange(fd, -1));
    }
    // All that is there now.
    std::string drain() const {
        fcntl(read, F_SETFL, O_NONBLOCK);
        std::string all;
        char        some[65536];
        for (ssize_t n = 0; (n = ::read(read, some, sizeof some)) > 0;) all.append(some, std::size_t(n));
        return all;
    }
    void fill() const {
        fcntl(write, F_SETFL, O_NONBLOCK);
        const std::string much(65536, '-');
        while (::write(write, much.data(), much.size()) > 0) {}
        while (::write(write, "-", 1) > 0) {}
        fcntl(write, F_SETFL, 0);
    }
};

std::string notice(std::uint64_t n) { return cat("dropped ", n); }

// A server with these ends of pipes as its outputs, on a Unix socket. Ended with the object.
struct Child {
    pid_t pid;
    explicit Child(pid_t p) : pid(p) {}
    Child(const Child&)            = delete;
    Child& operator=(const Child&) = delete;
    ~Child() {
        if (pid <= 0) return;
        kill(pid, SIGKILL);
        waitpid(pid, nullptr, 0);
    }
    // Whether it has ended; then with which status.
    bool ended(int* status, int how) {
        if (waitpid(pid, status, how) == 0) return false;
        pid = -1;
        return true;
    }
};
pid_t start(const std::string& path, int out, int err, const std::vector<std::string>& more) {
    const std::string        program = QUIRE_BIN "/server";
    std::vector<std::string> all{program, "-m", shipped, "--device", "cpu", "--unix", path};
    all.insert(all.end(), more.begin(), more.end());
    std::vector<char*> argv;
    for (std::string& a : all) argv.push_back(a.data());
    argv.push_back(nullptr);
    std::fflush(nullptr);
    const pid_t child = fork();
    if (child == 0) {
        dup2(out, STDOUT_FILENO);
        dup2(err, STDERR_FILENO);
        execv(program.c_str(), argv.data());
        _exit(127);
    }
    return child;
}

Client connected(const std::string& path) {
    while (true) {
        Client c(path);
        if (c.connected() && c.get("/health").status == 200) return c; // 503 while it loads
        nap();
    }
}

} // namespace

TEST_CASE("lines are written in their order, and all of them where there is room", "[log]") {
    Pipe        pipe;
    std::string all, expected;
    {
        LineWriter w(pipe.write, notice, 1 << 20);
        for (int i = 0; i < 3000; i++) { // more than the pipe takes at once
            w.write(cat("line ", i));
            expected += cat("line ", i, "\n");
            if (i % 100 == 0) all += pipe.drain();
        }
        while (!w.flush(0.001)) all += pipe.drain();
        CHECK(w.dropped() == 0);
    }
    CHECK(all + pipe.drain() == expected);
}

TEST_CASE("who writes a line waits for nobody, and what was dropped is said", "[log]") {
    Pipe pipe;
    pipe.fill();
    LineWriter w(pipe.write, notice, 1000);
    for (int i = 0; i < 10'000; i++) w.write("a line of twenty byte"); // returns at all
    CHECK_FALSE(w.flush(0.001));
    const std::uint64_t dropped = w.dropped();
    CHECK(dropped >= 9900);          // two times 1000 bytes are kept at most
    std::string text = pipe.drain(); // some of the lines, perhaps
    REQUIRE(w.flush(60));            // and writes the notice, for which there is room again
    w.write("and on");
    REQUIRE(w.flush(60));
    text += pipe.drain();
    // In one notice, or in two where the first has left before the last line was dropped.
    std::uint64_t said = 0, notices = 0;
    for (auto at = text.find("\ndropped "); at != std::string::npos; at = text.find("\ndropped ", at + 1))
        said += std::strtoull(text.c_str() + at + 9, nullptr, 10), notices++;
    CHECK(said == dropped);
    CHECK(text.ends_with("\nand on\n"));
    CHECK(std::uint64_t(std::ranges::count(text, '\n')) == 10'000 - dropped + notices + 1);
}

TEST_CASE("a reader that has gone stops nobody", "[log]") {
    std::signal(SIGPIPE, SIG_IGN);
    Pipe pipe;
    Pipe::shut(pipe.read);
    LineWriter w(pipe.write, notice);
    for (int i = 0; i < 100; i++) w.write("a line");
    CHECK(w.flush(60));
    CHECK(w.dropped() == 100);
}

TEST_CASE("nobody reads the log, and thousands of requests go on", "[server][log]") {
    for (const bool json : {false, true}) {
        Pipe              out, err;
        const std::string path = temporary();
        unlink(path.c_str());
        err.fill(); // from the first sentence on
        Child       child(start(path, out.write, err.write,
                          json ? std::vector<std::string>{"--log-json"} : std::vector<std::string>{}));
        std::string target = "/nothing/";
        target += std::string(180, 'x');
        constexpr int n = 4000;
        {
            Client c = connected(path); // one that keeps its connection
            for (int i = 0; i < n; i++) REQUIRE(c.get(target).status == 404);
        }
        const std::string text = connected(path).get("/metrics").body;
        const auto        at   = text.find("\nquire:dropped_log_lines_total{");
        REQUIRE(at != std::string::npos);
        CHECK(std::strtod(text.c_str() + text.find("} ", at) + 2, nullptr) > 0);
        // Read at last: the lines that are there, and how many are not.
        std::string log = out.drain();
        for (int i = 0; i < 3; i++) REQUIRE(connected(path).get("/version").status == 200);
        kill(child.pid, SIGTERM);
        int status = 0;
        while (!child.ended(&status, WNOHANG)) {
            log += out.drain();
            nap();
        }
        log += out.drain();
        CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 0)); // though nobody ever read its errors
        int               lines = 0, dropped = 0;
        std::stringstream all(log);
        for (std::string line; std::getline(all, line);)
            if (const auto d = line.find(json ? "\"dropped_lines\":" : "dropped_lines="); d != std::string::npos)
                dropped += std::atoi(line.c_str() + d + (json ? 16 : 14));
            else lines++;
        CHECK(dropped > 0);
        CHECK(lines + dropped == n + 4);
    }
}

TEST_CASE("who has shut the log's pipe stops nothing either", "[server][log]") {
    Pipe              out;
    const std::string path = temporary();
    unlink(path.c_str());
    Child child(start(path, out.write, STDERR_FILENO, {}));
    Pipe::shut(out.write);
    Pipe::shut(out.read);
    Client c = connected(path);
    for (int i = 0; i < 100; i++) REQUIRE(c.get("/health").status == 200);
    kill(child.pid, SIGTERM);
    int status = 0;
    CHECK(child.ended(&status, 0));
    CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 0));
}
