// The functions of process.h, compiled once for all tests.
#include "process.h"

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <mutex>

namespace quire::testing {

std::string slurp(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::string temporary() {
    static struct Made {
        pid_t                    process = getpid(); // not a child that was forked
        std::vector<std::string> names;
        ~Made() {
            if (getpid() == process)
                for (const std::string& name : names) unlink(name.c_str());
        }
    } made;
    static std::mutex mutex;
    std::string       name = "/tmp/quire-test-XXXXXX";
    close(mkstemp(name.data()));
    std::scoped_lock lock(mutex);
    return made.names.emplace_back(name);
}

Finished run_program(const std::string& name, std::vector<std::string> arguments, const std::string& input,
                     const std::string& folder) {
    const std::string program = folder + "/" + name, in = temporary(), out = temporary(), err = temporary();
    std::ofstream(in, std::ios::binary) << input;
    std::vector<char*> argv{const_cast<char*>(program.c_str())};
    for (std::string& a : arguments) argv.push_back(a.data());
    argv.push_back(nullptr);
    std::fflush(nullptr); // or the child would write it again
    const pid_t child = fork();
    if (child == 0) {
        if (std::freopen(in.c_str(), "r", stdin) && std::freopen(out.c_str(), "w", stdout) &&
            std::freopen(err.c_str(), "w", stderr))
            execv(program.c_str(), argv.data());
        _exit(127);
    }
    int status = 0;
    waitpid(child, &status, 0);
    Finished result{WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), slurp(out), slurp(err)};
    for (const std::string& path : {in, out, err}) unlink(path.c_str());
    return result;
}

} // namespace quire::testing
