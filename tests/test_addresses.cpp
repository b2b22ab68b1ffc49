// Which address the server takes, and when: before it reads the model, without letting anybody in.
#include <catch2/catch_test_macros.hpp>

#include "server_process.h"

import quire.core.base;
import quire.core.std;
import quire.core.tcp;
import quire.serve.http.server;

using namespace quire;
using namespace quire::testing;

TEST_CASE("a busy address is said before the model is read", "[server][addresses]") {
    const Result<Listener> taken = listen_tcp("127.0.0.1", 0);
    REQUIRE(taken.has_value());
    const Finished f = run_program("server", {"-m", shipped, "--device", "cpu", "--port", cat(taken->port)});
    CHECK(f.code == 1);
    CHECK(f.err.ends_with(
        cat(" error server: cannot listen on '127.0.0.1' port ", taken->port, ": Address already in use\n")));
    close_tcp(taken->fd);

    const std::string path = temporary();
    unlink(path.c_str());
    const Server   s({"--unix", path, "--port", "0"});
    const Finished other = run_program("server", {"-m", shipped, "--device", "cpu", "--unix", path});
    CHECK(other.code == 1);
    CHECK(other.err.ends_with(cat(" error server: cannot listen on '", path, "': Address already in use\n")));
    CHECK(Client(path).get("/health").status == 200); // it was left alone
}

TEST_CASE("an address that is taken, and not listened to, turns callers away", "[http][addresses]") {
    const auto create = [] {
        auto server = HttpServer::create({});
        REQUIRE(server.has_value());
        return std::move(*server);
    };
    auto              server = create();
    const Result<int> port   = server->bind("127.0.0.1", 0);
    REQUIRE(port.has_value());
    CHECK_FALSE(Client(*port).connected());
    REQUIRE(server->listen().has_value());
    server->start();
    CHECK(Client(*port).get("/nothing").status == 404);
    CHECK_FALSE(create()->bind("127.0.0.1", *port).has_value());
    server->stop();
    auto next = create();
    CHECK(next->bind("127.0.0.1", *port).has_value());
    next.reset(); // never listened
    // Names that lead to an address which the server has. ("localhost" also where no /etc/hosts knows it.)
    auto twice  = create();
    int  wanted = 0;
    for (const char* name : {"127.0.0.1", "localhost", "127.0.0.1"}) {
        INFO(name);
        const Result<int> found = twice->bind(name, wanted);
        REQUIRE(found.has_value());
        CHECK((wanted == 0 || *found == wanted));
        wanted = *found;
    }
    CHECK(twice->listen().has_value());
    twice->start();
    CHECK(Client(wanted).get("/nothing").status == 404);
    twice->stop();
    auto              all  = create(); // all addresses, and one of them
    const Result<int> wide = all->bind("0.0.0.0", 0);
    REQUIRE(wide.has_value());
    CHECK(all->bind("127.0.0.1", *wide).value_or(0) == *wide);
    CHECK(all->listen().has_value());
}

TEST_CASE("all addresses of the machine and one of them, in either order", "[server][addresses]") {
    const Server s({"--host", "127.0.0.1,0.0.0.0"});
    CHECK(Client(s.port()).get("/health").status == 200);
}
