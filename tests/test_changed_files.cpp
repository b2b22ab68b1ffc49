// Files that are written in place while an engine has them loaded: that engine fails, with a sentence, and no other one.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <catch2/catch_test_macros.hpp>
#include <cstdio>

#include "reference.h"

import quire.core.base;
import quire.engine.engine;
import quire.schedule.request;
import quire.core.std;

#include "engine_tools.h"
#include "schedule_tools.h"

using namespace quire;
using namespace quire::testing;

TEST_CASE("a file that is written in place fails its engine alone, with a sentence") {
    namespace fs             = std::filesystem;
    const fs::path    folder = cat("/tmp/quire-changed-", getpid());
    const fs::path    file = folder / "model.gguf", lora = folder / "lora.gguf";
    const std::string original = reference("models/llama3-gqa-F16.gguf"), other = reference("models/gemma2-Q8_0.gguf");
    const std::string failed = "'model.gguf' was changed in place while it was loaded";
    EngineOptions     o{.threads = 1, .context = 256, .kv_blocks = 40};
    fs::create_directory(folder);
    // Another content in the same inode.
    const auto write = [&](const std::string& from, const fs::path& to) {
        std::ifstream in(from, std::ios::binary);
        std::ofstream out(to, std::ios::binary | std::ios::trunc);
        out << in.rdbuf();
    };
    const auto set_times = [](const fs::path& of) {
        const struct timespec later[2]{{2'000'000'000, 0}, {2'000'000'000, 0}};
        REQUIRE(utimensat(AT_FDCWD, of.c_str(), later, 0) == 0);
    };
    const auto why_it_fails = [](Engine& engine) -> std::string {
        try {
            (void)run_one(engine, greedy(prompt_of(20, 1), 4));
        } catch (const std::runtime_error& error) {
            return error.what();
        }
        return "";
    };
    write(original, file);
    Engine       neighbour = load(original, o), same = load(file.string(), o);
    const Answer before = run_one(same, greedy(prompt_of(20, 1), 4)).by_index.at(0);
    set_times(file); // alone
    CHECK(why_it_fails(same).empty());
    { // a weight that no sample has
        std::fstream      in_place(file, std::ios::binary | std::ios::in | std::ios::out);
        const std::size_t at = fs::file_size(file) - 1000;
        in_place.seekg(std::streamoff(at));
        const int byte = in_place.get();
        in_place.seekp(std::streamoff(at));
        in_place.put(char(byte ^ 1));
    }
    CHECK(why_it_fails(same) == failed);
    write(original, file);
    Engine again = load(file.string(), o);
    set_times(file);
    CHECK(why_it_fails(again).empty());
    write(other, file);
    set_times(file); // those that it had
    CHECK(why_it_fails(again) == failed);
    write(original, file);
    Engine shorter = load(file.string(), o);
    fs::resize_file(file, fs::file_size(file) - 100); // within its last page, while no request is there
    CHECK(why_it_fails(shorter) == failed);
    write(original, file);
    for (const bool truncated : {true, false}) { // while it answers
        CAPTURE(truncated);
        Engine              busy = load(file.string(), o);
        std::vector<Output> out;
        REQUIRE(busy.submit(greedy(prompt_of(20, 1), 100)));
        for (int i = 0; i < 5; i++) busy.step(out);
        if (truncated) fs::resize_file(file, 0);
        else write(other, file);
        CHECK_THROWS_AS(
            [&] {
                while (busy.step(out)) {}
            }(),
            std::runtime_error);
        CHECK_FALSE(std::ranges::any_of(
            out, [](const Output& event) { return event.done && event.finish == FinishReason::length; }));
        CHECK_THROWS_AS(busy.park(std::size_t(1) << 20), std::runtime_error);
        write(original, file);
    }
    Engine renamed = load(file.string(), o); // the usual way: the loaded file stays as it is
    REQUIRE(std::rename(file.c_str(), (folder / "old.gguf").c_str()) == 0);
    fs::copy_file(other, file);
    CHECK(identical(run_one(renamed, greedy(prompt_of(20, 1), 4)).by_index.at(0), before));
    write(other, folder / "old.gguf"); // whatever its name is now
    CHECK(why_it_fails(renamed) == failed);
    write(original, file);

    write(reference("adapters/llama3-gqa.one.gguf"), lora);
    o.adapters.push_back({.path = lora.string(), .name = "lora"});
    Engine adapted = load(file.string(), o);
    CHECK(why_it_fails(adapted).empty());
    write(reference("adapters/llama3-gqa.two.gguf"), lora);
    CHECK(why_it_fails(adapted) == "'lora.gguf' was changed in place while it was loaded");
    CHECK(identical(run_one(neighbour, greedy(prompt_of(20, 1), 4)).by_index.at(0), before));
    fs::remove_all(folder);
}
