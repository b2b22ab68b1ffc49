// Runs each program of examples/ and checks that it prints what its documentation says.
#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <set>
#include <sstream>

#include "process.h"

using namespace quire::testing;

namespace {

std::string output_of(const std::string& name) {
    const Finished f = run_program(name, {QUIRE_ROOT "/models/quire-14m-q8_0.gguf"}, "", QUIRE_EXAMPLES);
    INFO(f.err);
    REQUIRE(f.code == 0);
    CHECK(f.err.empty());
    return f.out;
}

bool says(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

} // namespace

TEST_CASE("example: the lesson's pool") {
    const std::string out = output_of("lesson_pool");
    CHECK(says(out, "4444................…   4 used"));
    CHECK(says(out, "44441111............…   8 used"));
    CHECK(says(out, "without sharing the four would hold 20 blocks: 60 % saved"));
    CHECK(says(out, "copy on write: block 7 → block 8"));
    CHECK(says(out, "writes in place: 0 copies"));
    CHECK(says(out, "all released"));
}

TEST_CASE("example: miniVLLM's life cycle") {
    const std::string out = output_of("minivllm_life_cycle");
    CHECK(says(out, "table 0 1  free 6"));
    CHECK(says(out, "table 0# 1  free 6"));
    CHECK(says(out, "table 0# 1# 2  free 5"));
    CHECK(says(out, "finds 6 of its 8 tokens"));
    CHECK(says(out, "8 of 8 blocks free"));
}

TEST_CASE("example: token by token") {
    const std::string out = output_of("token_by_token");
    CHECK(says(out, " 7 tokens cached"));
    CHECK(says(out, "0[4] 1[3]"));
    CHECK(says(out, "0[4] 1[4] 2[1]"));
}

TEST_CASE("example: parallel sampling") {
    const std::string out = output_of("parallel_sampling");
    CHECK(says(out, "3 forks"));
    std::set<std::string> answers;
    std::istringstream    lines(out);
    for (std::string line; std::getline(lines, line);)
        if (line.starts_with("–")) answers.insert(line);
    CHECK(answers.size() == 4); // no two alike
}

TEST_CASE("example: beam search") {
    const std::string out = output_of("beam_search");
    CHECK(says(out, "saved by sharing"));
    CHECK(says(out, "*"));
}

TEST_CASE("example: a shared prefix") {
    const std::string out = output_of("shared_prefix");
    CHECK(says(out, "copies on write: 3"));
    CHECK(says(out, "released: 0 blocks pinned"));
}
