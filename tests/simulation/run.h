// One scenario on one engine, step by step, with all checks.
#pragma once

#include "scenario.h"

namespace quire::simulation {

// How often something happened, by name.
using Reached = std::map<std::string, std::uint64_t>;

struct Verdict {
    std::string wrong; // empty: nothing
    Reached     reached;
};

// A broken invariant ends the process.
Verdict run(const Scenario& scenario, bool trace = false);
// Runs a scenario behind the HTTP server, with a connection for each request. Features that the API does not have are left out.
Verdict serve(const Scenario& scenario, bool trace = false);

} // namespace quire::simulation
