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
// The same behind the HTTP server, with a client's connection for each request; what its API does not have is left out.
Verdict serve(const Scenario& scenario, bool trace = false);

} // namespace quire::simulation
