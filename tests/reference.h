// Finds reference data: the full set next to the project if it exists, else the part in tests/data
// (archives in it are unpacked into the build folder).
#pragma once

#include <filesystem>
#include <stdexcept>
#include <string>
#include <string_view>

namespace quire::testing {

// The path of a reference file or folder, e.g. "models/qwen2-Q4_0.gguf". Throws when neither place has it.
inline std::string reference(std::string_view relative) {
    for (const char* root : {QUIRE_ROOT "/../shared/reference/", QUIRE_ROOT "/tests/data/", QUIRE_UNPACKED "/"})
        if (std::string path = std::string(root).append(relative); std::filesystem::exists(path)) return path;
    throw std::runtime_error("no reference data " + std::string(relative));
}

inline bool has_reference(std::string_view relative) {
    try {
        return !reference(relative).empty();
    } catch (const std::runtime_error&) {
        return false;
    }
}

} // namespace quire::testing
