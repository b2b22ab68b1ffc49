// Small llamas of random weights of any shape and type, no matter what kernels like.
// Include after the imports of quire.core.std and quire.core.tensor.
#pragma once

namespace quire::testing {

struct OddShape {
    const char* name;
    DType       type;
    int         hidden, heads, kv_heads, head_dim, rope_dim, ff, vocab, layers = 2;
    int         window = 0, period = 0; // of each `period` layers the last sees all; 0: none does
};

// Random rows of `type` whose values are of about 1 / √cols.
std::vector<std::byte> random_rows(DType type, std::int64_t rows, std::int64_t cols, std::mt19937& random);

// A not-a-number in the first row of random_rows(): in its scales, where there are some.
void spoil(DType type, std::span<std::byte> rows, std::int64_t cols);

// Writes a llama of that shape; norms are F32. The same bytes each time. The first row of the matrix `spoiled`, if any, is NaN.
void write_odd_model(const std::string& path, const OddShape& s, const std::string& spoiled = {});

} // namespace quire::testing
