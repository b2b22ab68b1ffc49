// Finds reference data: the full set next to the project if it exists, else the part in tests/data
// (archives in it are unpacked into the build folder).
#pragma once

#include <string>
#include <string_view>

namespace quire::testing {

// The path of a reference file or folder, e.g. "models/qwen2-Q4_0.gguf". Throws when neither place has it.
std::string reference(std::string_view relative);
bool        has_reference(std::string_view relative);

} // namespace quire::testing
