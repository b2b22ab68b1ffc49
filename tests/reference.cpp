// The functions of reference.h, compiled once for all tests.
#include "reference.h"

#include <filesystem>
#include <stdexcept>

namespace quire::testing {

std::string reference(std::string_view relative) {
    for (const char* root : {QUIRE_ROOT "/../shared/reference/", QUIRE_ROOT "/tests/data/", QUIRE_UNPACKED "/"})
        if (std::string path = std::string(root).append(relative); std::filesystem::exists(path)) return path;
    throw std::runtime_error("no reference data " + std::string(relative));
}

bool has_reference(std::string_view relative) {
    try {
        return !reference(relative).empty();
    } catch (const std::runtime_error&) {
        return false;
    }
}

} // namespace quire::testing
