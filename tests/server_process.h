// The program `server` as a process, for tests.
#pragma once

#include <sys/types.h>
#include <csignal>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "http_client.h"
#include "process.h"

namespace quire::testing {

inline const std::string shipped = QUIRE_ROOT "/models/quire-14m-q8_0.gguf";

inline bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

void nap(); // 5 ms

// A running server; ended with the object.
class Server {
public:
    explicit Server(std::vector<std::string> arguments = {}, const std::string& model = shipped);
    Server(const Server&)            = delete;
    Server& operator=(const Server&) = delete;
    ~Server();

    bool        running();
    void        signal(int which) const { kill(child_, which); }
    int         wait(); // for its exit code
    pid_t       pid() const { return child_; }
    int         port() const { return port_; }
    Client      client() const { return Client(port_); }
    std::string log() const { return slurp(log_); }
    std::string errors() const { return slurp(err_); }

    Reply post(const std::string& path, const nlohmann::json& body, const std::string& headers = "") const;
    Reply get(const std::string& path, const std::string& headers = "") const { return client().get(path, headers); }
    nlohmann::json ask_get(const std::string& path) const;
    nlohmann::json ask(const std::string& path, const nlohmann::json& body) const;
    double         metric(const std::string& name) const; // of the first sample of that name
    void           until_idle() const;

private:
    std::string        log_, err_;
    pid_t              child_ = -1;
    int                port_  = 0;
    std::optional<int> code_;
};

// One for the tests that ask simple things.
Server& common();

// The messages of a chat with one question.
nlohmann::json user(const std::string& text);

// A request that runs for long; and one without an end, for a server with --context-shift: however fast the machine is, it still runs.
extern const nlohmann::json long_one, endless;

} // namespace quire::testing
