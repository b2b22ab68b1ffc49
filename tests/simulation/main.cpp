// simulate: runs the engine through random scenarios, one for each seed, and says what went wrong and how often what was reached.
// docs/simulation.md has more.
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "apart.h"

using namespace quire;
using namespace quire::simulation;

namespace {

constexpr const char* usage =
    "simulate [--seeds N] [--from SEED] [--jobs N]   runs N seeds, at least 1, and counts what they reach\n"
    "simulate --seed SEED [--trace]                  runs one\n"
    "both: [--drafts] [--served] [--set NAME=VALUE]... [--no-shrink]\n"
    "--drafts: all seeds have draft tokens, of each kind by turns\n"
    "--served: all seeds run behind the server, and only there\n"
    "--set: changes a number of every scenario, such as cache=0; of one seed also a number of a request, such as "
    "3.n=1\n"
    "Seeds are numbers from 0 to 18446744073709551615; the last 257 of them can only be run one by one.\n";

// The features that a run of many seeds has to reach, each of them.
const std::vector<std::string> features{"requests",
                                        "complete answers",
                                        "cache hits",
                                        "copied blocks",
                                        "forks",
                                        "slots shared in a step",
                                        "beam searches",
                                        "best of several",
                                        "constraints",
                                        "pins",
                                        "preemptions",
                                        "priority preemptions",
                                        "recomputations",
                                        "swaps out",
                                        "swaps in",
                                        "blocks released behind windows",
                                        "context shifts",
                                        "draft tokens that were right",
                                        "draft tokens that were wrong",
                                        "draft tokens behind a state",
                                        "steps planned ahead",
                                        "states kept",
                                        "states not written in place",
                                        "tokens found behind a kept state",
                                        "tokens found in host memory",
                                        "tokens found in host memory behind a kept state",
                                        "tokens found in files",
                                        "tokens found in files behind a kept state",
                                        "units in files that were damaged",
                                        "units that the disk did not take",
                                        "segments given up",
                                        "segments of another directory",
                                        "units written once more",
                                        "restarts",
                                        "models that left and came back",
                                        "blocks of a model that came back",
                                        "blocks moved to host memory",
                                        "blocks moved back from host memory",
                                        "blocks that host memory had no room for",
                                        "cancelled",
                                        "cancelled when over",
                                        "answers cancelled",
                                        "refused at once",
                                        "refused later",
                                        "outgrew the pool",
                                        "rows that are not finite",
                                        "moves failed",
                                        "moves torn",
                                        "moves made before they were awaited",
                                        "restarts after a failure",
                                        "texts saved to files",
                                        "texts loaded from files",
                                        "texts that files did not take",
                                        "launches failed",
                                        "results failed",
                                        "served requests",
                                        "served answers",
                                        "served errors",
                                        "served preemptions",
                                        "served by an engine that failed",
                                        "clients that hung up",
                                        "layouts of 1 groups",
                                        "layouts of 2 groups",
                                        "layouts of 3 groups",
                                        "layouts of 4 groups"};
constexpr std::uint64_t        many_seeds = 2000, served_one_in = 20;

unsigned long long number(std::uint64_t v) { return v; }

// A whole word, or nothing.
std::optional<std::uint64_t> number_of(std::string_view word) {
    std::uint64_t     value = 0;
    const char* const last  = word.data() + word.size();
    const auto [end, error] = std::from_chars(word.data(), last, value);
    if (error != std::errc() || end != last) return {};
    return value;
}

// How all scenarios of a run differ from those of their seeds.
struct Changes {
    bool                     drafts = false, served = false;
    std::vector<std::string> numbers; // as change() takes them

    // Null: there is no such number, which `unknown` then names.
    std::optional<Scenario> scenario(std::uint64_t seed, std::string& unknown) const {
        Scenario s = drafts ? make_drafted(seed) : make_scenario(seed);
        for (const std::string& how : numbers)
            if (!change(s, how)) return unknown = how, std::nullopt;
        return s;
    }
    std::string text() const {
        std::string out = drafts ? " --drafts" : "";
        for (const std::string& how : numbers) out += cat(" --set ", how);
        return out;
    }
};

// `seen`: how the scenario failed among many, which it may not do again where that depends on when threads run. Empty: it is the first time.
int one(const Scenario& scenario, const std::string& changes, bool served, bool shrinks, bool trace,
        const std::string& seen = {}) {
    std::printf("%s", describe(scenario).c_str());
    std::fflush(nullptr);
    const auto go    = served ? serve : run;
    const auto fails = [go](const Scenario& s) { return in_process([&] { return go(s, false).wrong; }); };
    if (trace) {
        const Verdict v = go(scenario, true);
        std::printf("%s\n", v.wrong.empty() ? "nothing is wrong" : v.wrong.c_str());
        return v.wrong.empty() ? 0 : 1;
    }
    std::string       command = cat("simulate --seed ", scenario.seed, served ? " --served" : "", changes);
    const std::string wrong   = fails(scenario);
    if (wrong.empty()) {
        std::printf("nothing is wrong%s\n", seen.empty() ? "" : " the second time");
        if (!seen.empty()) std::printf("\nrepeat it with: %s\n", command.c_str());
        return seen.empty() ? 0 : 1;
    }
    std::printf("\n%s\n\nrepeat it with: %s\n", wrong.c_str(), command.c_str());
    if (!shrinks) return 1;
    Scenario small = scenario;
    std::fflush(nullptr);
    for (const std::string& how : shrink(scenario, fails)) {
        (void)change(small, how);
        command += cat(" --set ", how);
    }
    const std::string still = fails(small);
    std::printf("\nthe smallest that fails:\n%s\n%s\n\nrepeat it with: %s\n", describe(small).c_str(),
                still.empty() ? "nothing is wrong this time" : still.c_str(), command.c_str());
    return 1;
}

int many(const Seeds& seeds, const Changes& changes, bool shrinks) {
    const auto make = [&](std::uint64_t seed) {
        std::string unknown;
        auto        scenario = changes.scenario(seed, unknown);
        if (!scenario) throw std::runtime_error("no such change: " + unknown);
        return *scenario;
    };
    const auto parts = [&](std::uint64_t seed) {
        std::vector<Part> all;
        if (!changes.served) all.push_back(Part::engine);
        if (changes.served || seed % served_one_in == 0) all.push_back(Part::server);
        return all;
    };
    const Finding found = run_seeds(seeds, parts, [&](std::uint64_t seed, Part part) {
        return part == Part::server ? serve(make(seed)) : run(make(seed));
    });
    if (found.seed) {
        const bool served = found.part == Part::server;
        std::printf("seed %llu fails%s, after %llu that passed: %s\n", number(*found.seed),
                    served ? " behind the server" : "", number(found.ran), found.wrong.c_str());
        std::fflush(nullptr);
        return one(make(*found.seed), changes.text(), served, shrinks, false, found.wrong);
    }
    int        missing   = 0;
    const bool wants_all = seeds.n >= many_seeds && !changes.served && changes.numbers.empty();
    for (const auto& [name, count] : found.reached) std::printf("%10llu %s\n", number(count), name.c_str());
    for (const std::string& name : features) {
        if (const auto at = found.reached.find(name); !wants_all || (at != found.reached.end() && at->second > 0))
            continue;
        std::printf("never reached: %s\n", name.c_str());
        missing++;
    }
    if (found.ran != seeds.n) {
        std::printf("only %llu of %llu seeds ran\n", number(found.ran), number(seeds.n));
        return 1;
    }
    std::printf("%llu seeds ran, nothing is wrong\n", number(found.ran));
    return missing > 0 ? 1 : 0;
}

} // namespace

int main(int argc, char** argv) {
    Seeds                        seeds{.jobs = int(std::max(1u, std::thread::hardware_concurrency()))};
    std::optional<std::uint64_t> seed;
    Changes                      changes;
    bool                         trace = false, shrinks = true, ranged = false;
    for (int i = 1; i < argc; i++) {
        const std::string flag = argv[i];
        if (flag == "--trace") trace = true;
        else if (flag == "--no-shrink") shrinks = false;
        else if (flag == "--served") changes.served = true;
        else if (flag == "--drafts") changes.drafts = true;
        else if (i + 1 == argc) return std::fputs(usage, stderr), 2;
        else if (flag == "--set") changes.numbers.emplace_back(argv[++i]);
        else {
            const std::optional<std::uint64_t> value = number_of(argv[++i]);
            if (!value) return std::fputs(usage, stderr), 2;
            ranged = ranged || flag != "--seed";
            if (flag == "--seed") seed = *value;
            else if (flag == "--seeds") seeds.n = *value;
            else if (flag == "--from") seeds.first = *value;
            else if (flag == "--jobs" && *value >= 1 && *value <= Seeds::most_jobs) seeds.jobs = int(*value);
            else return std::fputs(usage, stderr), 2;
        }
    }
    if (seed ? ranged : trace || seeds.n == 0 || !seeds.fit()) return std::fputs(usage, stderr), 2;
    for (const std::string& how : changes.numbers) // other seeds have other requests
        if (!seed && (how.starts_with("only=") || how.substr(0, how.find('=')).find('.') != std::string::npos))
            return std::fputs(usage, stderr), 2;
    std::string unknown;
    const auto  scenario = changes.scenario(seed.value_or(seeds.first), unknown);
    if (!scenario) return std::fprintf(stderr, "no such change: %s\n", unknown.c_str()), 2;
    return seed ? one(*scenario, changes.text(), changes.served, shrinks, trace) : many(seeds, changes, shrinks);
}
