// Runs one of the project's programs as a user would: with arguments and standard input; returns its output.
#pragma once

#include <sys/wait.h>
#include <unistd.h>
#include <csignal>
#include <cstdio>
#include <string>
#include <vector>

namespace quire::testing {

struct Finished {
    int         code = -1; // exit code, or 128 + the signal that ended it
    std::string out, err;
};

std::string slurp(const std::string& path);

// A path for a temporary file, which is removed when the process ends, if it is still there.
std::string temporary();

Finished run_program(const std::string& name, std::vector<std::string> arguments, const std::string& input = "",
                     const std::string& folder = QUIRE_BIN);

// Whether `body` stops the process with a broken invariant, as check() does. Runs it in a child.
template <class Body>
bool stops(Body body) {
    std::fflush(nullptr);
    const pid_t child = fork();
    if (child == 0) {
        // A handler of the test framework would report the signal as its own failure.
        std::signal(SIGABRT, SIG_DFL);
        if (!std::freopen("/dev/null", "w", stderr)) _exit(3);
        body();
        _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

} // namespace quire::testing
