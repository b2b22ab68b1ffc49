// simulate: runs scenarios made from seeds.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "run.h"

using namespace quire;
using namespace quire::simulation;

int main(int argc, char** argv) {
    std::uint64_t first = 1, n = 100;
    bool          trace = false;
    for (int i = 1; i < argc; i++) {
        const std::string a = argv[i];
        if (a == "--seed") first = std::strtoull(argv[++i], nullptr, 10), n = 1;
        if (a == "--seeds") n = std::strtoull(argv[++i], nullptr, 10);
        if (a == "--trace") trace = true;
    }
    Reached all;
    for (std::uint64_t seed = first; seed < first + n; seed++) {
        const Scenario s = make_scenario(seed);
        if (n == 1) std::printf("%s", describe(s).c_str());
        std::fprintf(stderr, "\r%llu ", (unsigned long long)seed);
        const Verdict v = run(s, trace);
        for (const auto& [name, count] : v.reached) all[name] += count;
        if (v.wrong.empty()) continue;
        std::printf("seed %llu: %s\n%s", (unsigned long long)seed, v.wrong.c_str(), describe(s).c_str());
        return 1;
    }
    for (const auto& [name, count] : all) std::printf("%s: %llu\n", name.c_str(), (unsigned long long)count);
}
