// The simulator itself (docs/simulation.md): which part of a seed failed, and the smallest scenario that fails.
#include <catch2/catch_test_macros.hpp>
#include <csignal>

#include "simulation/apart.h"

using namespace quire;
using namespace quire::simulation;

TEST_CASE("a crash of a part of a seed is found, and which part it was") {
    const auto parts = [](std::uint64_t seed) {
        std::vector<Part> all{Part::engine};
        if (seed % 4 == 0) all.push_back(Part::server);
        return all;
    };
    const Seeds   seeds{.first = 1, .n = 20, .jobs = 2};
    const Finding none = run_seeds(seeds, parts, [](std::uint64_t, Part part) {
        return Verdict{"", {{part == Part::server ? "served" : "alone", 1}}};
    });
    CHECK_FALSE(none.seed);
    CHECK(none.ran == 20);
    CHECK(none.reached == Reached{{"alone", 20}, {"served", 5}});
    for (const Part crashes : {Part::engine, Part::server}) {
        const Finding found = run_seeds(seeds, parts, [&](std::uint64_t seed, Part part) {
            if (seed >= 6 && part == crashes) (void)std::raise(SIGKILL);
            return Verdict{};
        });
        REQUIRE(found.seed);
        CHECK(*found.seed == (crashes == Part::engine ? 6 : 8));
        CHECK(found.part == crashes);
        CHECK(found.wrong == "ended by signal 9");
    }
}

TEST_CASE("the smallest scenario that fails keeps the numbers of a request whose answer another one follows") {
    std::uint64_t seed = 1;
    std::size_t   next = 0, first = 0; // the request that follows, and the other one
    for (; next == 0 && seed < 200; seed++) {
        const Scenario s = make_scenario(seed);
        for (std::size_t i = 1; i < s.tasks.size() && next == 0; i++)
            if (s.tasks[i].follows >= 0 && s.tasks[std::size_t(s.tasks[i].follows)].n_prompt > 4)
                next = i, first = std::size_t(s.tasks[i].follows);
    }
    REQUIRE(next > 0);
    const Scenario scenario = make_scenario(seed - 1);
    // The prompt of `next` begins with that of `first`, which has to be short where `first` itself does not come.
    const auto fails = [&](const Scenario& s) {
        const Task& t     = s.tasks[next];
        const bool  wrong = t.on && t.follows == int(first) && (s.tasks[first].on || s.tasks[first].n_prompt == 1);
        return std::string(wrong ? "wrong" : "");
    };
    Scenario small = scenario;
    for (const std::string& how : shrink(scenario, fails)) REQUIRE(change(small, how));
    CHECK_FALSE(small.tasks[first].on);
    CHECK(fails(small) == "wrong");
}
