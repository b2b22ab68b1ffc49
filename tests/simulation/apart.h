// Runs scenarios in processes of their own, which a broken invariant may end, and finds the smallest one that fails.
#pragma once

#include "run.h"

namespace quire::simulation {

// Which seeds, and in how many processes at once.
struct Seeds {
    std::uint64_t first = 1, n = 100;
    int           jobs = 1;
};

struct Finding {
    std::uint64_t ran = 0; // seeds
    Reached       reached;
    // The lowest seed that failed, and how.
    std::optional<std::uint64_t> seed;
    std::string                  wrong;
};

// Runs a function in another process. Returns what it says is wrong, or what the process died of; empty: nothing.
std::string in_process(const std::function<std::string()>& body);

// All seeds, up to the first that fails. `body` runs one; it may leave its process.
Finding run_seeds(const Seeds& seeds, const std::function<Verdict(std::uint64_t seed)>& body);

// Changes that leave a failing scenario as small as they can; `fails` says what is wrong with one.
std::vector<std::string> shrink(const Scenario& scenario, const std::function<std::string(const Scenario&)>& fails);

} // namespace quire::simulation
