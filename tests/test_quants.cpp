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
        if (!std::filesystem::exists(base + ".bin"))
            continue; // F32 stands for itself; gguf-py knows no Q1_0, Q2_0, Q8_K
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
    CHECK(n_types >= 14);
}

TEST_CASE("blocks of one, two and eight bits stand for what the format says", "[quants]") {
    const std::uint16_t half = f32_to_f16(-0.5f);
    {
        std::array<std::uint8_t, 18> block{};
        std::memcpy(block.data(), &half, 2);
        block[2] = 0b101, block[17] = 0x80;
        std::array<float, 128> y;
        dequantize(DType::Q1_0, block.data(), y.data(), 128);
        for (int i = 0; i < 128; i++) CHECK(y[std::size_t(i)] == (i == 0 || i == 2 || i == 127 ? -0.5f : 0.5f));
    }
    {
        std::array<std::uint8_t, 18> block{};
        std::memcpy(block.data(), &half, 2);
        block[2] = 0b11100100;
        std::array<float, 64> y;
        dequantize(DType::Q2_0, block.data(), y.data(), 64);
        CHECK(std::vector(y.begin(), y.begin() + 5) == std::vector{0.5f, 0.0f, -0.5f, -1.0f, 0.5f});
    }
    {
        std::array<std::uint8_t, 292> block{};
        const float                   d = 0.25f;
        std::memcpy(block.data(), &d, 4);
        block[4] = 0x80, block[259] = 127, block[260] = 1; // a sum, which is not looked at
        std::array<float, 256> y;
        dequantize(DType::Q8_K, block.data(), y.data(), 256);
        CHECK(y[0] == -32.0f);
        CHECK(y[1] == 0.0f);
        CHECK(y[255] == 31.75f);
    }
}

TEST_CASE("a type that holds no weights is refused by its name", "[quants]") {
    CHECK(dtype_refusal(31) == "31 (Q4_0_4_4), which GGUF has dropped: convert the model again");
    CHECK(dtype_refusal(26) == "26 (I32), in which no model stores weights");
    CHECK(dtype_refusal(43) == "43, which quire does not know");
    CHECK(dtype_refusal(0xffffffff) == "-1, which quire does not know");
    for (std::uint32_t id = 0; id < 43; id++) {
        CAPTURE(id); // of the ids that were ever given, each is known or refused by its name
        CHECK((dtype_find(id) != nullptr || !dtype_refusal(id).ends_with("does not know")));
    }
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
