// Files that the programs write: whole, or not at all, and a sentence that says so.
#include <catch2/catch_test_macros.hpp>

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <filesystem>

#include "process.h"
#include "reference.h"

import quire.core.base;
import quire.core.output_file;
import quire.core.std;

using namespace quire;
using namespace quire::testing;

namespace {

Finished shell(const std::string& command) { return run_program("sh", {"-c", command}, "", "/bin"); }

const std::string shipped = QUIRE_ROOT "/models/quire-14m-q8_0.gguf";

} // namespace

TEST_CASE("a disk that is full leaves nothing behind", "[output]") {
    const std::string folder = temporary() + ".d", path = folder + "/out";
    std::filesystem::create_directory(folder);
    const std::string tiny = reference("models/llama3-gqa-Q8_0.gguf");
    for (const std::string& command : {"bench make-model --shape tiny --type f32 -o " + path,
                                       "inspect logits " + tiny + " --ids 1,2,3 --device cpu -t 1 --raw " + path,
                                       "block-viz -m " + shipped + " -p Hello -n 40 -t 1 --record " + path,
                                       "block-viz -m " + shipped + " -p Hello -n 40 -t 1 --html " + path}) {
        const std::string program = QUIRE_BIN "/" + command;
        for (const std::string& before : {std::string(), std::string("what was there")}) {
            if (!before.empty()) std::ofstream(path) << before;
            const Finished f = shell("ulimit -f 1; exec " + program + " > /dev/null"); // 512 bytes, or 1024
            CAPTURE(command, f.err);
            CHECK(f.code == 1);
            CHECK(f.err.find("cannot write " + path + ": File too large") != std::string::npos);
            CHECK(slurp(path) == before);
            std::filesystem::remove(path);
            CHECK(std::filesystem::is_empty(folder));
        }
        CHECK(shell(program + " > /dev/null").code == 0);
        CHECK(std::filesystem::file_size(path) > 1024);
        std::filesystem::remove(path);
    }
    const Finished nowhere = shell(QUIRE_BIN "/bench make-model --shape tiny -o /nonexistent/x.gguf");
    CHECK(nowhere.code == 1);
    CHECK(nowhere.err.find("cannot write /nonexistent/x.gguf: No such file") != std::string::npos);
    std::filesystem::remove_all(folder);
}

TEST_CASE("a process that is killed leaves nothing behind", "[output]") {
    const std::string folder = temporary() + ".d", path = folder + "/out";
    std::filesystem::create_directory(folder);
    const int  nameless = open(folder.c_str(), O_TMPFILE | O_WRONLY, 0600); // not every file system can do that
    const bool leaves   = nameless < 0;
    if (!leaves) close(nameless);
    const pid_t child = fork();
    if (child == 0) {
        OutputFile        file(path);
        const std::string text(100000, 'x');
        file.write(std::as_bytes(std::span(text)));
        _exit(file.good() ? 0 : 1); // without finish(), and without its destructor
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(status == 0);
    CHECK(!std::filesystem::exists(path));
    CHECK(std::filesystem::is_empty(folder) != leaves); // else what came so far, under a name of its own
    std::ofstream(path) << "what was there";
    CHECK(write_file(path, "new").has_value());
    CHECK(slurp(path) == "new");
    std::filesystem::remove_all(folder);
}

TEST_CASE("standard output that cannot be written is no success", "[output]") {
    for (const std::string& command :
         {"inspect show " + shipped, std::string("bench blocks --json"), std::string("block-viz --demo fig6"),
          "block-viz -m " + shipped + " -p Hello -n 4 -t 1 --html -", "chat -m " + shipped + " -t 1 -st -p Hello"}) {
        const Finished f = shell(QUIRE_BIN "/" + command + " > /dev/full");
        CAPTURE(command, f.err);
        CHECK(f.code == 1);
        CHECK(f.err.find("cannot write to standard output") != std::string::npos);
    }
}

TEST_CASE("links and modes stay when a file is written", "[output]") {
    const std::string folder = temporary() + ".d", link = folder + "/link", path = folder + "/below/file";
    std::filesystem::create_directories(folder + "/below");
    std::filesystem::create_symlink("below/second", link);
    std::filesystem::create_symlink("file", folder + "/below/second"); // which is not there yet
    for (const std::string& text : {"first", "second"}) {
        CHECK(write_file(link, text).has_value());
        CHECK(std::filesystem::is_symlink(link));
        CHECK(std::filesystem::is_symlink(folder + "/below/second"));
        CHECK(slurp(path) == text);
        std::filesystem::permissions(path, std::filesystem::perms(0666)); // more than the umask leaves
    }
    CHECK(write_file(path, "third").has_value());
    CHECK(std::filesystem::status(path).permissions() == std::filesystem::perms(0666));
    std::filesystem::create_symlink("loop", folder + "/loop");
    CHECK(write_file(folder + "/loop", "text").error().message.ends_with("Too many levels of symbolic links"));
    CHECK(std::filesystem::is_symlink(folder + "/loop"));
    std::filesystem::remove_all(folder);
}

TEST_CASE("what is no regular file is written as it is", "[output]") {
    CHECK(write_file("/dev/null", "text").has_value());
    CHECK(write_file("/dev/full", "text").error().message == "cannot write /dev/full: No space left on device");
    CHECK(write_file("/tmp", "text").error().message == "cannot write /tmp: Is a directory");
}

TEST_CASE("no program writes over the file that it reads", "[output]") {
    const std::string folder = temporary() + ".d", model = folder + "/m.gguf", link = folder + "/link";
    std::filesystem::create_directory(folder);
    std::filesystem::copy_file(shipped, model);
    std::filesystem::create_symlink("m.gguf", link);
    const std::string was = slurp(model);
    for (const std::string& command : {"inspect logits " + model + " --ids 1,2,3 --device cpu -t 1 --raw " + link,
                                       "block-viz -m " + model + " -p Hello -n 1 -t 1 --record " + link,
                                       "block-viz -m " + model + " -p Hello -n 1 -t 1 --html " + link,
                                       "block-viz -m " + model + " --demo --html " + link,
                                       "bench make-model --shape tiny --vocabulary " + model + " -o " + link,
                                       "bench replicas -m " + model + " --json " + link}) {
        const Finished f = shell(QUIRE_BIN "/" + command);
        CAPTURE(command, f.err);
        CHECK(f.code == 1);
        CHECK(f.out.empty());
        CHECK(f.err.find("the output " + link + " is also an input (" + model + "), so nothing was written") !=
              std::string::npos);
        CHECK(slurp(model) == was);
    }
    std::filesystem::remove_all(folder);
}
