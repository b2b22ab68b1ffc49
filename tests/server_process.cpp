// The functions of server_process.h, compiled once for all tests.
#include "server_process.h"

#include <catch2/catch_test_macros.hpp>

#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

namespace quire::testing {

void nap() { std::this_thread::sleep_for(std::chrono::milliseconds(5)); }

Server::Server(std::vector<std::string> arguments, const std::string& model) : log_(temporary()), err_(temporary()) {
    const std::string        program = QUIRE_BIN "/server";
    std::vector<std::string> all{program, "--port", "0"};
    if (!model.empty()) all.insert(all.end(), {"-m", model});
    if (std::ranges::find(arguments, "--device") == arguments.end()) all.insert(all.end(), {"--device", "cpu"});
    all.insert(all.end(), arguments.begin(), arguments.end());
    std::vector<char*> argv;
    for (std::string& a : all) argv.push_back(a.data());
    argv.push_back(nullptr);
    std::fflush(nullptr);
    child_ = fork();
    if (child_ == 0) {
        if (std::freopen("/dev/null", "r", stdin) && std::freopen(log_.c_str(), "w", stdout) &&
            std::freopen(err_.c_str(), "w", stderr))
            execv(program.c_str(), argv.data());
        _exit(127);
    }
    while (running()) {
        const std::string text = slurp(err_);
        const auto        at   = text.find("listening on ");
        if (at != std::string::npos && text.find('\n', at) != std::string::npos) {
            if (const auto colon = text.find("127.0.0.1:", at); colon != std::string::npos)
                port_ = std::atoi(text.c_str() + colon + 10);
            break;
        }
        nap();
    }
    INFO(slurp(err_));
    REQUIRE(running());
}
Server::~Server() {
    if (running()) {
        kill(child_, SIGKILL);
        waitpid(child_, nullptr, 0);
    }
    if (const std::string said = errors(); has(said, "Sanitizer") || has(said, "runtime error")) {
        std::fprintf(stderr, "%s\n", said.c_str());
        std::abort();
    }
    unlink(log_.c_str());
    unlink(err_.c_str());
}
bool Server::running() {
    if (code_) return false;
    int status = 0;
    if (waitpid(child_, &status, WNOHANG) == 0) return true;
    code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return false;
}
int Server::wait() {
    while (running()) nap();
    return *code_;
}
Reply Server::post(const std::string& path, const nlohmann::json& body, const std::string& headers) const {
    return client().post(path, body.dump(), headers);
}
nlohmann::json Server::ask_get(const std::string& path) const {
    const Reply r = get(path);
    REQUIRE(r.status == 200);
    return nlohmann::json::parse(r.body);
}
nlohmann::json Server::ask(const std::string& path, const nlohmann::json& body) const {
    const Reply r = post(path, body);
    INFO(path << ' ' << body.dump() << ": " << r.body);
    REQUIRE(r.status == 200);
    return nlohmann::json::parse(r.body);
}
double Server::metric(const std::string& name) const {
    const std::string text = get("/metrics").body;
    const auto        at   = text.find("\n" + name + "{");
    REQUIRE(at != std::string::npos);
    return std::strtod(text.c_str() + text.find("} ", at) + 2, nullptr);
}
void Server::until_idle() const {
    while (metric("vllm:num_requests_running") + metric("vllm:num_requests_waiting") + metric("quire:kv_blocks_used") >
           0)
        nap();
}

Server& common() {
    static Server server;
    return server;
}

nlohmann::json user(const std::string& text) { return nlohmann::json::array({{{"role", "user"}, {"content", text}}}); }

const nlohmann::json endless{
    {"prompt", "Hello"}, {"max_tokens", 1'000'000}, {"ignore_eos", true}, {"temperature", 0}, {"stream", true}};
const nlohmann::json long_one{{"prompt", "Hello"}, {"max_tokens", 900}, {"ignore_eos", true}, {"temperature", 0}};

} // namespace quire::testing
