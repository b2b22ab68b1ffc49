// The amount of memory, and pools that do not fit into it: they are refused with the sum before anything is allocated.
#include <catch2/catch_test_macros.hpp>

#include <sys/resource.h>
#include <sys/wait.h>
#include <filesystem>

#include "process.h"

import quire.compute.memory;
import quire.core.std;

using namespace quire;
using namespace quire::testing;

namespace {

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED 1 // has an address space of its own, which no limit fits
#endif
#endif

const std::string shipped = QUIRE_ROOT "/models/quire-14m-q8_0.gguf";

// One of the programs with at most so many bytes of addresses.
[[maybe_unused]] Finished limited(const std::string& program, const std::string& arguments, std::size_t bytes) {
    return run_program(
        "sh", {"-c", "ulimit -v " + std::to_string(bytes >> 10) + "; exec " QUIRE_BIN "/" + program + " " + arguments},
        "", "/bin");
}

[[maybe_unused]] bool has(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
}

} // namespace

TEST_CASE("what the machine, its control groups and the limits leave", "[memory]") {
    const std::string root = temporary() + ".d";
    const auto        file = [&](const std::string& path, const std::string& text) {
        std::filesystem::create_directories(std::filesystem::path(root + path).parent_path());
        std::ofstream(root + path) << text;
    };
    file("/proc/meminfo", "MemTotal:        9000 kB\nMemFree:         10 kB\nMemAvailable:    1000 kB\n");
    CHECK(available_memory(root) == 1'024'000);

    file("/proc/self/cgroup", "0::/a/b\n");
    file("/sys/fs/cgroup/a/b/memory.max", "max\n"); // no limit here, one above
    file("/sys/fs/cgroup/a/b/memory.current", "400\n");
    file("/sys/fs/cgroup/a/memory.max", "500000\n");
    file("/sys/fs/cgroup/a/memory.current", "400000\n");
    CHECK(available_memory(root) == 100'000);
    file("/sys/fs/cgroup/a/memory.stat", "anon 250000\ninactive_file 100000\nactive_file 50000\n");
    CHECK(available_memory(root) == 250'000);
    file("/sys/fs/cgroup/a/memory.max", "1000\n"); // less than is taken
    CHECK(available_memory(root) == 0);
    file("/sys/fs/cgroup/a/memory.max", "max\n");
    CHECK(available_memory(root) == 1'024'000);
    file("/proc/self/cgroup", "0::/\n"); // a container's own
    file("/sys/fs/cgroup/memory.max", "70000\n");
    file("/sys/fs/cgroup/memory.current", "10000\n");
    CHECK(available_memory(root) == 60'000);

    file("/proc/self/cgroup", "5:cpu:/x\n4:memory:/y/z\n");
    file("/sys/fs/cgroup/memory/y/z/memory.limit_in_bytes", "600000\n");
    file("/sys/fs/cgroup/memory/y/z/memory.usage_in_bytes", "500000\n");
    file("/sys/fs/cgroup/memory/y/z/memory.stat", "inactive_file 7\ntotal_inactive_file 1000\ntotal_active_file 0\n");
    CHECK(available_memory(root) == 101'000);

    file("/proc/self/status", "Name:\tx\nVmSize:\t    3000 kB\nVmData:\t    2000 kB\n");
    std::fflush(nullptr);
    const pid_t child = fork(); // the limit stays there
    if (child == 0) {
        rlimit limit{};
        getrlimit(RLIMIT_DATA, &limit);
        limit.rlim_cur = 2000 * 1024 + 5000;
        setrlimit(RLIMIT_DATA, &limit);
        _exit(available_memory(root) == 5000 ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(status == 0);
    std::filesystem::remove_all(root);
    CHECK(available_memory() > 0);
}

#ifndef SANITIZED
TEST_CASE("contexts and pools that memory cannot hold are refused with the sum", "[memory]") {
    const std::size_t room = std::size_t(2) << 30;
    const std::string on   = " --device cpu -t 1 -m " + shipped;
    struct Case {
        std::string program, arguments, sum;
    };
    for (const Case& c : {Case{"chat", "-c 16777216 -st -p Hello" + on,
                               "1048576 KV blocks of 16 tokens for a context of 16777216: 56.0 GiB at 3584 bytes a "
                               "token; with bookkeeping 56.6 GiB"},
                          {"chat", "--kv-blocks 1000000 -st -p Hello" + on, "1000000 KV blocks of 16 tokens: 53.4 GiB"},
                          {"chat", "--kv-blocks 16777216 --block-size 256 -st -p Hello" + on, "the most there can be"},
                          {"server", "-c 16777216 --port 0" + on, ": 56.0 GiB"},
                          {"server", "--swap-blocks 1000000 --port 0" + on, "1000000 swap blocks: 53.4 GiB"},
                          {"bench", "throughput --kv-blocks 1000000 --device cpu -t 1 -m " + shipped, ": 53.4 GiB"},
                          {"block-viz", "--kv-blocks 1000000 -p Hello -t 1 -m " + shipped, ": 53.4 GiB"}}) {
        const Finished f = limited(c.program, c.arguments, room);
        CAPTURE(c.program, c.arguments, f.err, f.out);
        CHECK(f.code == 1);
        CHECK(f.out.empty());
        CHECK(std::count(f.err.begin(), f.err.end(), '\n') == 1);
        CHECK(has(f.err, c.sum));
        if (c.sum != "the most there can be") CHECK(has(f.err, "GiB, and the machine has "));
    }
}

TEST_CASE("pools that nobody asked for fit into what there is", "[memory]") {
    for (const std::string& program :
         {std::string("chat -st -p Hello -m "), std::string("inspect generate --ids 5,6 ")}) {
        const Finished f = limited(program + shipped, "--device cpu -t 1", std::size_t(1) << 30);
        CAPTURE(program, f.err);
        CHECK(f.code == 0);
        CHECK(!f.out.empty());
    }
    // Too little for anything: one sentence, and no signal.
    const Finished f = limited("chat", "-st -p Hello --device cpu -t 1 -m " + shipped, std::size_t(120) << 20);
    CAPTURE(f.err);
    CHECK((f.code == 0 || f.code == 1));
    if (f.code == 1) CHECK(std::count(f.err.begin(), f.err.end(), '\n') == 1);
}
#endif

TEST_CASE("a context beyond the model's is warned of in one line", "[memory][chat]") {
    const auto said = [](const std::string& context) {
        const Finished f = run_program(
            "chat", {"-m", shipped, "-c", context, "-st", "-p", "Hello", "-n", "4", "--device", "cpu", "-t", "1"});
        CHECK(f.code == 0);
        return f.err;
    };
    CHECK(said("1024") == "");
    CHECK(said("2048") ==
          "chat: a context of 2048 tokens is longer than the 1024 that the model was trained for; beyond "
          "these its answers may make no sense\n");
}
