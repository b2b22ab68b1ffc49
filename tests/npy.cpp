// The functions of npy.h, compiled once for all tests.
#include <catch2/catch_test_macros.hpp>

import quire.core.std;

#include "npy.h"

namespace quire::testing {

std::vector<float> read_npy(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::string   bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    REQUIRE(bytes.size() > 10);
    REQUIRE(bytes.find("'<f4'") != std::string::npos);
    const std::size_t start = 10 + std::size_t(static_cast<unsigned char>(bytes[8])) +
                              256 * std::size_t(static_cast<unsigned char>(bytes[9]));
    std::vector<float> values((bytes.size() - start) / sizeof(float));
    std::memcpy(values.data(), bytes.data() + start, values.size() * sizeof(float));
    return values;
}

} // namespace quire::testing
