// Every block format against the values that gguf-py computed from the same bytes, bit for bit.
#include <catch2/catch_test_macros.hpp>

#include "process.h"
#include "reference.h"

import quire.core.base;
import quire.model_file.quants;
import quire.core.std;
import quire.core.tensor;

using namespace quire;
using namespace quire::testing;

TEST_CASE("dequantised blocks have the reference's bits", "[quants]") {
    int n_types = 0;
    for (const DTypeInfo& info : dtype_table) {
        CAPTURE(info.name);
        const std::string base = reference("quants") + "/" + info.name;
        if (info.type == DType::F32) continue; // stands for itself
        n_types++;
        const std::string blocks = slurp(base + ".bin"), npy = slurp(base + ".f32.npy");
        REQUIRE(npy.size() > 10);
        const std::size_t header = 10 + std::size_t(static_cast<unsigned char>(npy[8])) +
                                   256 * std::size_t(static_cast<unsigned char>(npy[9]));
        const std::size_t  n = (npy.size() - header) / sizeof(float);
        std::vector<float> want(n), got(n);
        std::memcpy(want.data(), npy.data() + header, n * sizeof(float));
        REQUIRE(blocks.size() == row_bytes(info.type, std::int64_t(n)));
        dequantize(info.type, blocks.data(), got.data(), std::int64_t(n));
        std::size_t differ = 0;
        for (std::size_t i = 0; i < n; i++)
            differ += std::bit_cast<std::uint32_t>(got[i]) != std::bit_cast<std::uint32_t>(want[i]);
        CHECK(differ == 0);
    }
    CHECK(n_types == 14);
}

TEST_CASE("halves and bfloat16 widen exactly, subnormals, infinities and zeros of both signs", "[quants]") {
    for (unsigned h = 0; h < 65536; h++) {
        const auto half = std::uint16_t(h);
        float      f    = 0;
        dequantize(DType::F16, &half, &f, 1);
        if (std::isnan(f)) REQUIRE(std::isnan(f16_to_f32(half)));
        else REQUIRE(std::bit_cast<std::uint32_t>(f) == std::bit_cast<std::uint32_t>(f16_to_f32(half)));
        dequantize(DType::BF16, &half, &f, 1);
        REQUIRE(std::bit_cast<std::uint32_t>(f) == std::uint32_t(h) << 16);
    }
}
