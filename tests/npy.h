// Reads NumPy's .npy files. To be included last, below the imports.
#pragma once

import quire.core.std;

namespace quire::testing {

// A little-endian float32 array in NumPy's .npy format, version 1: the shape is known to whoever asks.
std::vector<float> read_npy(const std::string& path);

} // namespace quire::testing
