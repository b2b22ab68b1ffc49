// Runs scenarios in processes of their own, which a broken invariant may end, and finds the smallest one that fails.
#pragma once

#include "run.h"

namespace quire::simulation {

// Which seeds, and in how many processes at once.
struct Seeds {
    static constexpr int most_jobs = 256;

    std::uint64_t first = 1, n = 100;
    int           jobs = 1;

    // Whether no process counts beyond the last number that a seed can have.
    bool fit() const { return n <= ~std::uint64_t(0) - most_jobs && first <= ~std::uint64_t(0) - most_jobs - n; }
};

// The scenario of a seed runs on the engine alone, of some seeds behind the server as well, or only there.
enum class Part : std::uint8_t { engine, server };

struct Finding {
    std::uint64_t ran = 0; // seeds
    Reached       reached;
    // The lowest seed that failed, in which part, and how.
    std::optional<std::uint64_t> seed;
    Part                         part = Part::engine;
    std::string                  wrong;
};

// Runs a function in another process. Returns what it says is wrong, or what the process died of; empty: nothing.
std::string in_process(const std::function<std::string()>& body);

// All seeds, up to the first that fails. `body` runs one part of a seed, of those that `parts` names; it may end its process.
Finding run_seeds(const Seeds& seeds, const std::function<std::vector<Part>(std::uint64_t seed)>& parts,
                  const std::function<Verdict(std::uint64_t seed, Part part)>& body);

// Changes that leave a failing scenario as small as they can; `fails` says what is wrong with one.
std::vector<std::string> shrink(const Scenario& scenario, const std::function<std::string(const Scenario&)>& fails);

} // namespace quire::simulation
