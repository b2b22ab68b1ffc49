// quire.core.processor: names the processor that the program runs on. Owns nothing.
export module quire.core.processor;

import quire.core.base;

export namespace quire {

// Model name, family and model number, as Linux tells them ("AMD EPYC 9654, family 25, model 17"); "an unknown processor" elsewhere.
std::string processor_name();

// The instruction sets of these that it has, as Linux names them: avx2 fma f16c gfni avx_vnni avx512f ...
std::vector<std::string> vector_extensions();

} // namespace quire

module :private;

namespace quire {

static std::string cpuinfo(std::string_view key) {
    std::ifstream file("/proc/cpuinfo");
    for (std::string line; std::getline(file, line) && !line.empty();) { // up to the second processor
        const std::size_t colon = line.find(':');
        if (colon == std::string::npos || colon + 2 > line.size()) continue;
        const std::string_view name = std::string_view(line).substr(0, line.find_last_not_of(" \t", colon - 1) + 1);
        if (name == key) return line.substr(colon + 2);
    }
    return {};
}

std::string processor_name() {
    const std::string name = cpuinfo("model name");
    if (name.empty()) return "an unknown processor";
    return cat(name, ", family ", cpuinfo("cpu family"), ", model ", cpuinfo("model"));
}

std::vector<std::string> vector_extensions() {
    const std::string        flags = cpuinfo("flags");
    std::vector<std::string> found;
    for (std::string_view flag : split(flags))
        if (flag == "fma" || flag == "f16c" || flag == "gfni" || flag.starts_with("avx") || flag.starts_with("amx"))
            found.emplace_back(flag);
    return found;
}

} // namespace quire
