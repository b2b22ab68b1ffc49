// Every kernel of every instruction set that this machine has, against plain sums in double precision.
#include <stdlib.h>
#include <unistd.h>
#include <catch2/catch_test_macros.hpp>

import quire.compute.program;
import quire.compute.routing;
import quire.core.base;
import quire.compute.cpu.kernels;
import quire.compute.cpu.tuning;
import quire.model_file.quants;
import quire.core.std;
import quire.core.tensor;
import quire.paging.cache_layout;
import quire.model_file.family;
import quire.model_file.gguf_writer;

#include "odd_model.h"

using namespace quire;
using namespace quire::testing;

namespace {

std::vector<const CpuKernels*> all_kernels() {
    std::vector<const CpuKernels*> found;
    for (const char* name : {"plain", "avx2", "avxvnni", "avx512", "avx512vnni", "avx512gfni", "avx512pairs", "amx"})
        if (const CpuKernels* k = cpu_kernels(name)) found.push_back(k);
    return found;
}

std::vector<float> noise(std::size_t n, unsigned seed) {
    std::mt19937                    random(seed);
    std::normal_distribution<float> normal;
    std::vector<float>              v(n);
    for (float& x : v) x = normal(random);
    return v;
}

// Root of the mean squared error over that of the reference.
double error(std::span<const float> got, std::span<const double> want) {
    double difference = 0, size = 0;
    REQUIRE(got.size() == want.size());
    for (std::size_t i = 0; i < got.size(); i++) {
        difference += (double(got[i]) - want[i]) * (double(got[i]) - want[i]);
        size += want[i] * want[i];
    }
    return std::sqrt(difference / std::max(size, 1e-30));
}

// The number of an e4m3 code.
float e4m3(int code) {
    const int   exponent = code >> 3 & 15, mantissa = code & 7;
    const float x = exponent > 0 ? std::ldexp(1 + float(mantissa) / 8, exponent - 7) : std::ldexp(float(mantissa), -9);
    return code & 128 ? -x : x;
}

// A row of K or V as the cache keeps it, by the definition of its type. Sets x to the numbers that it stands for.
struct PlainRow {
    std::vector<std::byte> bytes;
    float                  scale = 0;
};
PlainRow plain_row(DType type, std::span<float> x) {
    PlainRow row;
    float    most = 0;
    for (float v : x) most = std::max(most, std::abs(v));
    const auto add = [&](const auto& element) {
        const auto bytes = std::as_bytes(std::span(&element, 1));
        row.bytes.insert(row.bytes.end(), bytes.begin(), bytes.end());
    };
    if (has_scales(type)) row.scale = most / (type == DType::I8 ? 127.0f : 448.0f);
    for (float& v : x) {
        if (type == DType::F32) add(v);
        if (type == DType::F16) add(f32_to_f16(v)), v = f16_to_f32(f32_to_f16(v));
        if (type == DType::BF16) add(f32_to_bf16(v)), v = bf16_to_f32(f32_to_bf16(v));
        if (type == DType::I8) {
            const auto code = most > 0 ? std::int8_t(std::nearbyint(v * (127.0f / most))) : std::int8_t(0);
            add(code), v = float(code) * row.scale;
        }
        if (type == DType::F8) {
            const float y = most > 0 ? v * (448.0f / most) : 0.0f;
            // The nearest code, of two the even one: `code` is the last one that is not above y.
            static const auto numbers = [] {
                std::array<float, 127> all;
                for (int c = 0; c < 127; c++) all[std::size_t(c)] = e4m3(c);
                return all;
            }();
            int code = int(std::upper_bound(numbers.begin(), numbers.end(), std::abs(y)) - numbers.begin()) - 1;
            if (code < 126) {
                const float below = std::abs(y) - e4m3(code), above = e4m3(code + 1) - std::abs(y);
                if (above < below || (above == below && code % 2 == 1)) code++;
            }
            code |= std::signbit(y) ? 128 : 0;
            add(std::uint8_t(code)), v = e4m3(code) * row.scale;
        }
    }
    return row;
}

// K and V of one head in contiguous blocks: rows of K, of V, scales of K, of V.
class TestCache {
public:
    TestCache(DType k, DType v, int n_blocks, int block_size, int head_dim)
        : types_{k, v}, block_size_(block_size), head_dim_(head_dim) {
        const auto rows = std::size_t(block_size);
        at_             = {0, rows * row_bytes(k, head_dim)};
        at_[2]          = at_[1] + rows * row_bytes(v, head_dim);
        at_[3]          = at_[2] + rows * sizeof(float);
        stride_         = at_[3] + rows * sizeof(float);
        memory_.resize(std::size_t(n_blocks) * stride_);
    }
    // Sets x to the numbers that the row stands for. which: 0 K, 1 V
    void store(std::size_t which, int slot, std::span<float> x) {
        const PlainRow    row   = plain_row(types_[which], x);
        std::byte* const  block = memory_.data() + std::size_t(slot / block_size_) * stride_;
        const std::size_t in    = std::size_t(slot % block_size_);
        std::ranges::copy(row.bytes, block + at_[which] + in * row.bytes.size());
        std::memcpy(block + at_[which + 2] + in * sizeof(float), &row.scale, sizeof(float));
    }
    void give(AttentionTask& task) const {
        const auto rows = [&](std::size_t which) {
            const std::byte* scales = has_scales(types_[which]) ? memory_.data() + at_[which + 2] : nullptr;
            return KvRows{memory_.data() + at_[which], types_[which], scales};
        };
        task.k = rows(0), task.v = rows(1);
        task.block_stride = stride_, task.block_size = block_size_;
        task.head_dim = task.value_dim = head_dim_;
    }

private:
    std::array<DType, 2>       types_;
    int                        block_size_, head_dim_;
    std::array<std::size_t, 4> at_; // of K, V and their scales in a block
    std::size_t                stride_;
    std::vector<std::byte>     memory_;
};

constexpr std::array<std::pair<DType, DType>, 7> kv_types{{{DType::F32, DType::F32},
                                                           {DType::F16, DType::F16},
                                                           {DType::BF16, DType::BF16},
                                                           {DType::I8, DType::I8},
                                                           {DType::F8, DType::F8},
                                                           {DType::I8, DType::F16},
                                                           {DType::F32, DType::F8}}};

// out = x · wᵀ + bias by this kernel, rows first .. last-1 (0: all).
void gemm(const CpuKernels* k, TensorView w, const float* bias, const float* x, float* out, std::int64_t n,
          std::int64_t first = 0, std::int64_t last = 0) {
    const auto                size   = std::size_t(n * w.cols);
    const std::int64_t        groups = (w.rows + 15) / 16;
    std::vector<std::byte>    repacked(std::size_t(groups) * 16 * row_bytes(w.type, w.cols));
    std::vector<float>        scales(size), sums(size), scratch(gemm_scratch + 16);
    std::vector<std::int16_t> values(size);
    std::vector<std::int32_t> products(size);
    QuantisedRows             quantised{n,           w.cols,          values.data(),        scales.data(),
                            sums.data(), products.data(), wide_integers(w.type)};
    if (uses_integer_gemm(w.type)) k->quantise_rows(x, quantised, 0, n);
    if (repacked_at_load(w.type)) {
        k->repack(w, repacked.data(), 0, groups);
        w.data = repacked.data();
    }
    std::vector<float> packed(size);
    const std::int64_t tiles = k->token_tiles(n);
    k->pack_panels(x, n, w.cols, packed.data(), 0, tiles / 2); // in two calls
    k->pack_panels(x, n, w.cols, packed.data(), tiles / 2, tiles);
    const auto beyond = reinterpret_cast<std::uintptr_t>(scratch.data()) % 64;
    k->gemm({&w, bias, x, &quantised, packed.data(), out, w.rows % 2 == 0 ? Prefetch::l1 : Prefetch::l2, n, first,
             last > 0 ? last : w.rows, scratch.data() + (64 - beyond) % 64 / sizeof(float)});
}

} // namespace

TEST_CASE("the plain kernels exist everywhere and an unknown name has none") {
    CHECK(cpu_kernels("plain") != nullptr);
    CHECK(cpu_kernels("") != nullptr);
    CHECK(cpu_kernels("sse9") == nullptr);
}

TEST_CASE("GEMM over odd shapes") {
    for (const CpuKernels* k : all_kernels())
        for (int cols : {8, 16, 33, 96, 256})
            for (int rows : {1, 3, 4, 7, 16, 32, 45})
                for (int n : {1, 2, 3, 4, 5, 6, 9}) {
                    CAPTURE(k->name, cols, rows, n);
                    const auto w = noise(std::size_t(rows * cols), 1), x = noise(std::size_t(n * cols), 2),
                               bias = noise(std::size_t(rows), 3);
                    std::vector<float>  out(std::size_t(n * rows), 1e9f);
                    std::vector<double> want;
                    for (int t = 0; t < n; t++)
                        for (int r = 0; r < rows; r++) {
                            double sum = double(bias[std::size_t(r)]);
                            for (int i = 0; i < cols; i++)
                                sum += double(w[std::size_t(r * cols + i)]) * double(x[std::size_t(t * cols + i)]);
                            want.push_back(sum);
                        }
                    gemm(k, {DType::F32, rows, cols, w.data()}, bias.data(), x.data(), out.data(), n);
                    CHECK(error(out, want) < 1e-5);
                }
}

TEST_CASE("GEMM with every type equals the product with its dequantised rows") {
    std::mt19937 random(20);
    for (const DTypeInfo& info : dtype_table)
        for (int cols : {256, 768, 96})
            for (int n : {1, 7, 130}) {
                if (cols % info.items != 0) continue;
                constexpr int                rows   = 37;
                const std::size_t            stride = row_bytes(info.type, cols);
                const std::vector<std::byte> blocks = random_rows(info.type, rows, cols, random);
                std::vector<float>           wide(std::size_t(rows * cols));
                for (std::size_t r = 0; r < rows; r++)
                    dequantize(info.type, blocks.data() + r * stride, wide.data() + r * cols, cols);
                const auto          x = noise(std::size_t(n * cols), 21);
                std::vector<double> want;
                for (int t = 0; t < n; t++)
                    for (int r = 0; r < rows; r++) {
                        double sum = 0;
                        for (int i = 0; i < cols; i++)
                            sum += double(wide[std::size_t(r * cols + i)]) * double(x[std::size_t(t * cols + i)]);
                        want.push_back(sum);
                    }
                for (const CpuKernels* k : all_kernels()) {
                    CAPTURE(k->name, info.name, cols, n);
                    std::vector<float> out(want.size(), 1e9f);
                    gemm(k, {info.type, rows, cols, blocks.data()}, nullptr, x.data(), out.data(), n);
                    CHECK(error(out, want) < (uses_integer_gemm(info.type) ? 2e-4 : 1e-5));
                }
            }
}

TEST_CASE("a row of a GEMM has the same bits whatever is computed beside it") {
    std::mt19937 random(22);
    for (const CpuKernels* k : all_kernels())
        for (DType type : {DType::F16, DType::BF16, DType::F32, DType::Q2_K, DType::Q8_0, DType::Q4_0, DType::Q4_K,
                           DType::Q5_1, DType::Q6_K, DType::IQ4_NL, DType::IQ4_XS, DType::MXFP4, DType::IQ3_XXS,
                           DType::IQ2_XS, DType::IQ2_S, DType::NVFP4})
            for (int n : {2, 3, 5, 6, 8, 27, 133}) {
                const int              cols = 256 * 3, rows = 43;
                const auto             x      = noise(std::size_t(n * cols), 5);
                const std::size_t      stride = row_bytes(type, cols);
                std::vector<std::byte> blocks(stride * rows);
                for (std::byte& b : blocks) b = std::byte(random() >> 9) & std::byte(0x3b); // no infinities
                TensorView         weight{type, rows, cols, blocks.data()};
                std::vector<float> together(std::size_t(n * rows)), alone(std::size_t(n * rows));
                gemm(k, weight, nullptr, x.data(), together.data(), n);
                for (int t = 0; t < n; t++)
                    for (int row = 0; row < rows; row += 16)
                        gemm(k, weight, nullptr, x.data() + t * cols, alone.data() + t * rows, 1, row,
                             std::min(row + 16, rows));
                CAPTURE(k->name, dtype_info(type).name, n);
                CHECK(together == alone);
            }
}

// Not "plain", which rounds a product and a sum twice.
TEST_CASE("one token has the same bits with every instruction set") {
    std::mt19937 random(23);
    for (const DTypeInfo& info : dtype_table) {
        if (!uses_integer_gemm(info.type)) continue;
        for (int cols : {256, 512, 1280}) {
            const std::vector<std::byte> blocks = random_rows(info.type, 37, cols, random);
            const auto                   x      = noise(std::size_t(cols), 24);
            std::vector<float>           want(37);
            const CpuKernels*            first = nullptr;
            for (const CpuKernels* k : all_kernels()) {
                if (k == cpu_kernels("plain")) continue;
                std::vector<float> out(37);
                gemm(k, {info.type, 37, cols, blocks.data()}, nullptr, x.data(), out.data(), 1);
                if (!first) first = k, want = out;
                CAPTURE(first->name, k->name, info.name, cols);
                CHECK(out == want);
            }
        }
    }
}

TEST_CASE("the largest integer sums fit 32 bits") {
    for (const CpuKernels* k : all_kernels())
        for (DType type : {DType::Q6_K, DType::Q8_0, DType::Q4_K})
            for (int n : {1, 2, 20, 70})
                for (float sign : {1.0f, -1.0f}) {
                    constexpr int          rows = 32, cols = 256;
                    const std::size_t      stride = row_bytes(type, cols);
                    std::vector<std::byte> blocks(stride * rows); // Q6_K: -32 times -128
                    for (std::size_t b = 0; b < blocks.size(); b += std::size_t(dtype_info(type).bytes)) {
                        const std::uint16_t one = f32_to_f16(1);
                        if (type == DType::Q6_K) {
                            std::fill_n(blocks.data() + b + 192, 16, std::byte(0x80));
                            std::memcpy(blocks.data() + b + 208, &one, 2);
                        } else if (type == DType::Q4_K) { // 63 times 15, no minimum
                            std::memcpy(blocks.data() + b, &one, 2);
                            std::fill_n(blocks.data() + b + 4, 4, std::byte(0xff));
                            std::fill_n(blocks.data() + b + 12, 4, std::byte(0x0f));
                            std::fill_n(blocks.data() + b + 16, 128, std::byte(0xff));
                        } else {
                            std::memcpy(blocks.data() + b, &one, 2);
                            std::fill_n(blocks.data() + b + 2, 32, std::byte(0x80));
                        }
                    }
                    const std::vector<float> x(std::size_t(n * cols), sign);
                    std::vector<float>       out(std::size_t(n * rows));
                    gemm(k, {type, rows, cols, blocks.data()}, nullptr, x.data(), out.data(), n);
                    const double largest = type == DType::Q6_K ? 4096 : type == DType::Q4_K ? 945 : -128;
                    const double want    = double(sign) * cols * largest;
                    CAPTURE(k->name, dtype_info(type).name, n);
                    CHECK(error(out, std::vector<double>(out.size(), want)) < 1e-6);
                }
}

TEST_CASE("what is not a number stays so") {
    for (const CpuKernels* k : all_kernels())
        for (float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
            std::vector<std::byte> blocks(34 * 16, std::byte(1));
            std::vector<float>     x(64, 1.0f), out(32);
            x[5] = bad;
            gemm(k, {DType::Q8_0, 16, 32, blocks.data()}, nullptr, x.data(), out.data(), 2);
            CHECK_FALSE(std::isfinite(out[0]));
            CHECK(std::isfinite(out[16]));
        }
}

TEST_CASE("attention over paged blocks equals the plain formula") {
    std::mt19937 random(6);
    for (int D : {8, 32, 64, 80, 128})
        for (int block_size : {1, 5, 16})
            for (const auto& [k_type, v_type] : kv_types)
                for (auto [first, n] : {std::pair(0, 1), std::pair(0, 16), std::pair(63, 3), std::pair(130, 1)}) {
                    const int heads = 3, context = first + n, n_blocks = (context + block_size - 1) / block_size + 2;
                    const std::size_t  floats_per = std::size_t(n_blocks * block_size * D);
                    std::vector<float> kf = noise(floats_per, 7), vf = noise(floats_per, 8),
                                       q = noise(std::size_t(n * heads * D), 9);
                    std::vector<std::int32_t> table(static_cast<std::size_t>(n_blocks));
                    std::iota(table.begin(), table.end(), 0);
                    std::shuffle(table.begin(), table.end(), random);
                    TestCache cache(k_type, v_type, n_blocks, block_size, D);
                    for (int p = 0; p < context; p++) {
                        const int slot = table[std::size_t(p / block_size)] * block_size + p % block_size;
                        cache.store(0, slot, std::span(kf).subspan(std::size_t(p * D), std::size_t(D)));
                        cache.store(1, slot, std::span(vf).subspan(std::size_t(p * D), std::size_t(D)));
                    }
                    for (int window : {0, 7, 100, -50}) { // below 0: chunks
                        std::vector<double> want(q.size());
                        for (int t = 0; t < n; t++)
                            for (int h = 0; h < heads; h++) {
                                std::vector<double> weight;
                                double              sum = 0;
                                const int           lo  = window < 0   ? (first + t) / -window * -window
                                                          : window > 0 ? std::max(0, first + t - window + 1)
                                                                       : 0;
                                for (int p = lo; p <= first + t; p++) {
                                    double s = 0;
                                    for (int d = 0; d < D; d++)
                                        s += double(q[std::size_t((t * heads + h) * D + d)]) *
                                             double(kf[std::size_t(p * D + d)]);
                                    weight.push_back(std::exp(s * 0.2));
                                    sum += weight.back();
                                }
                                for (int p = lo; p <= first + t; p++)
                                    for (int d = 0; d < D; d++)
                                        want[std::size_t((t * heads + h) * D + d)] +=
                                            weight[std::size_t(p - lo)] / sum * double(vf[std::size_t(p * D + d)]);
                            }
                        for (const CpuKernels* k : all_kernels()) {
                            CAPTURE(k->name, D, block_size, window, int(k_type), int(v_type), first, n);
                            std::vector<float>  out(q.size(), 1e9f), scratch(attention_scratch(n * heads, D));
                            const AttentionPart part{q.data(), out.data(), n, first, table.data(), table.data()};
                            AttentionTask       task;
                            task.parts = std::span(&part, 1), task.q_stride = task.out_stride = heads * D;
                            task.n_heads = heads;
                            task.window = std::abs(window), task.chunked = window < 0, task.scale = 0.2f;
                            cache.give(task), task.scratch = scratch.data();
                            k->attention(task);
                            REQUIRE(error(out, want) < 2e-6);
                        }
                    }
                }
}

TEST_CASE("attention of one token in passes has the same bits, in pieces of any size") {
    std::mt19937 random(7);
    for (int D : {8, 64, 80, 128})
        for (const auto& [k_type, v_type] : std::span(kv_types).subspan(1, 5)) // from F16 on
            for (int first : {0, 63, 64, 130, 517}) {
                const int                 block_size = 16, n_blocks = first / block_size + 2;
                const int                 n_slots = n_blocks * block_size;
                std::vector<std::int32_t> table(static_cast<std::size_t>(n_blocks));
                std::iota(table.begin(), table.end(), 0);
                std::shuffle(table.begin(), table.end(), random);
                TestCache cache(k_type, v_type, n_blocks, block_size, D);
                for (std::size_t which : {0, 1}) {
                    auto values = noise(std::size_t(n_slots * D), unsigned(7 + which));
                    for (float& x : values) x *= 3;
                    for (int slot = 0; slot < n_slots; slot++)
                        cache.store(which, slot, std::span(values).subspan(std::size_t(slot * D), std::size_t(D)));
                }
                for (int heads : {1, 3, 8})
                    for (int window : {0, 100, -100}) // below 0: chunks
                        for (const CpuKernels* k : all_kernels()) {
                            CAPTURE(k->name, D, heads, window, int(k_type), int(v_type), first);
                            const auto q = noise(std::size_t(heads * D), 9), sinks = noise(std::size_t(heads), 10);
                            std::vector<float>  out(q.size(), 1e9f), again(out), scratch(attention_scratch(heads, D));
                            const AttentionPart part{q.data(), out.data(), 1, first, table.data(), table.data()};
                            AttentionPart       other = part;
                            other.out                 = again.data();
                            AttentionTask task;
                            task.parts = std::span(&part, 1), task.q_stride = task.out_stride = heads * D;
                            task.n_heads = heads;
                            task.window = std::abs(window), task.chunked = window < 0, task.scale = 0.4f,
                            task.softcap = D == 80 ? 5.0f : 0.0f;
                            task.sinks   = D == 64 ? sinks.data() : nullptr;
                            cache.give(task), task.scratch = scratch.data();
                            k->attention(task);
                            SplitAttention split;
                            split.n_chunks = attention_chunks(task, first);
                            std::vector<float> memory(split_attention_floats(heads, split.n_chunks));
                            const auto         each = memory.size() / std::size_t(attention_chunk + 3);
                            split.scores = memory.data(), split.highest = split.scores + each * attention_chunk;
                            split.sums = split.highest + each, split.rescale = split.sums + each;
                            task.parts           = std::span(&other, 1);
                            const auto in_pieces = [&](auto kernel, int size, int piece) { // the last one first
                                for (int at = (size - 1) / piece * piece; at >= 0; at -= piece)
                                    kernel(task, split, at, std::min(at + piece, size));
                            };
                            in_pieces(k->attention_scores, split.n_chunks, 1 + first % 3);
                            in_pieces(k->attention_weights, split.n_chunks, 1 + first % 2);
                            in_pieces(k->attention_values, D, first % 2 ? 16 : 32);
                            REQUIRE(std::memcmp(out.data(), again.data(), out.size() * sizeof(float)) == 0);
                        }
            }
}

// A latent row of codes has two scales. Attention over codes is attention over the numbers that they stand for, bit for bit.
TEST_CASE("attention over a latent cache of codes has the bits of attention over its numbers") {
    constexpr int heads = 5, D = 40, Dv = 24, block_size = 4, context = 70, n_blocks = 18;
    for (const CpuKernels* k : all_kernels())
        for (DType type : {DType::I8, DType::F8}) {
            CAPTURE(k->name, int(type));
            std::vector<float> numbers = noise(n_blocks * block_size * D, 20);
            // Of a block its codes, then its scales.
            constexpr std::size_t  stride = block_size * (D + 8);
            std::vector<std::byte> memory(n_blocks * stride);
            for (int slot = 0; slot < n_blocks * block_size; slot++) {
                const std::span<float> row   = std::span(numbers).subspan(std::size_t(slot * D), D);
                const PlainRow         value = plain_row(type, row.first(Dv)), rest = plain_row(type, row.subspan(Dv));
                std::byte* const       block = memory.data() + std::size_t(slot / block_size) * stride;
                const int              in    = slot % block_size;
                std::ranges::copy(value.bytes, block + in * D);
                std::ranges::copy(rest.bytes, block + in * D + Dv);
                std::memcpy(block + block_size * D + in * 8, &value.scale, 4);
                std::memcpy(block + block_size * D + in * 8 + 4, &rest.scale, 4);
            }
            std::vector<std::int32_t> table(n_blocks);
            std::iota(table.rbegin(), table.rend(), 0);
            const auto         q = noise(2 * heads * D, 21);
            std::vector<float> out(2 * heads * Dv), want(out.size()), scratch(attention_scratch(2 * heads, D));
            AttentionPart      part{q.data(), out.data(), 2, context - 2, table.data(), table.data()};
            AttentionTask      task;
            task.parts = std::span(&part, 1), task.q_stride = heads * D, task.out_stride = heads * Dv;
            task.n_heads = heads, task.head_dim = D, task.value_dim = Dv, task.scale = 0.3f, task.latent = true;
            task.block_size = block_size, task.scratch = scratch.data();
            task.k = task.v = {memory.data(), type, memory.data() + block_size * D}, task.block_stride = stride;
            k->attention(task);
            part.out = want.data();
            task.k = task.v   = {std::as_bytes(std::span(numbers)).data(), DType::F32};
            task.block_stride = block_size * D * sizeof(float);
            k->attention(task);
            CHECK(out == want);
        }
}

TEST_CASE("rows of K and V are stored as their types say, of any length") {
    for (const CpuKernels* k : all_kernels())
        for (DType type : {DType::F32, DType::F16, DType::BF16, DType::I8, DType::F8})
            for (int n : {1, 7, 16, 31, 64, 200})
                for (float size : {0.0f, 1e-25f, 1.0f, 3000.0f}) {
                    CAPTURE(k->name, int(type), n, size);
                    auto x = noise(std::size_t(n), 10);
                    for (float& v : x) v *= size * v * v; // some of a row are much smaller than others
                    std::vector<std::byte> bytes(row_bytes(type, n));
                    float                  scale = 0;
                    k->store_kv(x.data(), type, bytes.data(), reinterpret_cast<std::byte*>(&scale), n);
                    const PlainRow want = plain_row(type, x);
                    CHECK(bytes == want.bytes);
                    CHECK(scale == want.scale);
                }
    for (const CpuKernels* k : all_kernels())
        for (DType type : {DType::I8, DType::F8})
            for (float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
                std::vector<float> x(20, 1.0f);
                x[3] = bad;
                std::vector<std::byte> bytes(20);
                float                  scale = 0;
                k->store_kv(x.data(), type, bytes.data(), reinterpret_cast<std::byte*>(&scale), 20);
                CHECK(std::isnan(scale));
            }
}

TEST_CASE("a rotation is the product with a Hadamard matrix, and its own inverse") {
    for (const CpuKernels* k : all_kernels())
        for (auto [n, size] : {std::pair(7, 1), std::pair(6, 2), std::pair(24, 8), std::pair(80, 16),
                               std::pair(192, 64), std::pair(256, 256)}) {
            CAPTURE(k->name, n, size);
            const auto          x   = noise(std::size_t(n), 13);
            std::vector<float>  out = x;
            std::vector<double> want(x.size()), same(x.begin(), x.end());
            for (int i = 0; i < n; i++)
                for (int j = i / size * size; j < i / size * size + size; j++)
                    want[std::size_t(i)] += (std::popcount(unsigned(i % size & j % size)) % 2 ? -1 : 1) *
                                            double(x[std::size_t(j)]) / std::sqrt(double(size));
            k->rotate(out.data(), n, size);
            CHECK(error(out, want) < 5e-7);
            std::vector<float> plain = x;
            cpu_kernels("plain")->rotate(plain.data(), n, size);
            CHECK(plain == out);
            k->rotate(out.data(), n, size);
            CHECK(error(out, same) < 1e-6);
        }
}

TEST_CASE("norm, SwiGLU and the fp16 store over odd lengths") {
    for (const CpuKernels* k : all_kernels())
        for (int n : {1, 7, 16, 31, 200}) {
            CAPTURE(k->name, n);
            const auto x = noise(std::size_t(n), 10), w = noise(std::size_t(n), 11), old = noise(std::size_t(n), 12);
            std::vector<float>  residual = old, out(static_cast<std::size_t>(n)), gate = x;
            std::vector<double> want, swiglu;
            double              squares = 0;
            for (std::size_t i = 0; i < x.size(); i++)
                squares += (double(x[i]) + double(old[i])) * (double(x[i]) + double(old[i]));
            for (std::size_t i = 0; i < x.size(); i++) {
                want.push_back((double(x[i]) + double(old[i])) / std::sqrt(squares / n + 1e-5) * double(w[i]));
                swiglu.push_back(double(x[i]) / (1 + std::exp(-double(x[i]))) * double(w[i]));
            }
            k->norm(x.data(), residual.data(), w.data(), 1e-5f, out.data(), n);
            CHECK(error(out, want) < 1e-6);
            CHECK(residual[0] == x[0] + old[0]);
            k->activate(Activation::silu, gate.data(), w.data(), n);
            CHECK(error(gate, swiglu) < 1e-6);
            std::vector<std::uint16_t> half(static_cast<std::size_t>(n));
            k->store_kv(x.data(), DType::F16, reinterpret_cast<std::byte*>(half.data()), nullptr, n);
            for (std::size_t i = 0; i < half.size(); i++) CHECK(half[i] == f32_to_f16(x[i]));
        }
}

TEST_CASE("experts are chosen from the best groups, and weighed by themselves") {
    Route op;
    op.weight.rows = 8, op.n_used = 3, op.gating = Gating::sigmoid, op.n_groups = 4, op.n_groups_used = 2;
    op.scale = 2;
    // Groups (0.9, 0.1) (0.6, 0.55) (0.8, 0.15) (0.5, 0.52): by the sum of two the second and the last are the best.
    const std::array            chances{0.9f, 0.1f, 0.6f, 0.55f, 0.8f, 0.15f, 0.5f, 0.52f};
    std::array<float, 8>        scores{}, scales{1, 1, 1, 1, 1, 1, 1, 3};
    std::array<std::int32_t, 3> experts{};
    std::array<float, 3>        weights{};
    const auto                  choose = [&](const float* bias, const float* scale) {
        for (std::size_t e = 0; e < 8; e++) scores[e] = std::log(chances[e] / (1 - chances[e]));
        route(op, bias, scores.data(), experts.data(), weights.data(), scale);
    };
    choose(nullptr, nullptr);
    CHECK(experts == std::array<std::int32_t, 3>{2, 3, 7});
    op.best_alone = true; // the first and the third
    choose(nullptr, nullptr);
    CHECK(experts == std::array<std::int32_t, 3>{0, 4, 5});
    op.best_alone = false;
    choose(nullptr, nullptr);
    for (std::size_t i = 0; i < 3; i++) CHECK(std::abs(weights[i] - 2 * chances[std::size_t(experts[i])]) < 1e-6f);
    op.normalised = true;
    const std::array bias{0.0f, 0.0f, 0.0f, 0.0f, 0.3f, 0.0f, 0.0f, 0.0f}; // the third group instead of the last
    choose(bias.data(), scales.data());
    CHECK(experts == std::array<std::int32_t, 3>{4, 2, 3});
    CHECK(std::abs(weights[0] - 2 * 0.8f / 1.95f) < 1e-6f);
    op.n_groups_used = 4;
    choose(nullptr, scales.data());
    CHECK(experts == std::array<std::int32_t, 3>{0, 4, 2});
    const float nan = std::numeric_limits<float>::quiet_NaN();
    scores.fill(nan);
    op.n_groups_used = 2;
    route(op, nullptr, scores.data(), experts.data(), weights.data());
    CHECK(experts == std::array<std::int32_t, 3>{0, 1, 2}); // still experts
}

TEST_CASE("every fp16 number converts as the format says") {
    for (unsigned h = 0; h < 65536; h++) {
        const float f = f16_to_f32(std::uint16_t(h));
        if (std::isnan(f)) continue;
        REQUIRE(f32_to_f16(f) == h);
        // halfway to the next one rounds to even
        const float next = f16_to_f32(std::uint16_t(h + 1));
        if ((h & 0x7fff) < 0x7bff) REQUIRE(f32_to_f16((f + next) / 2) == h + (h & 1));
    }
}

TEST_CASE("a choice of prefetching is remembered, whatever the cache file held before") {
    const auto        folder = std::filesystem::temp_directory_path() / cat("quire-prefetch-", getpid());
    const char*       before = std::getenv("XDG_CACHE_HOME");
    const std::string restore(before ? before : "");
    setenv("XDG_CACHE_HOME", folder.c_str(), 1);
    std::filesystem::create_directories(folder / "quire");
    const CpuKernels& k    = *cpu_kernels("plain");
    const auto        into = [&](int threads, DType type) {
        const auto choice = remembered_prefetch(k, threads, type);
        return choice ? choice->into == Prefetch::l1 ? 1 : 2 : 0;
    };
    for (const std::string& text : {std::string(), std::string("\0\xff; l1 no end", 13), std::string(1 << 20, 'x'),
                                    std::string("AMD; l3\n; l1\n\n")}) {
        CAPTURE(text.substr(0, 20));
        std::ofstream(folder / "quire" / "prefetch", std::ios::binary) << text;
        CHECK(into(2, DType::Q8_0) == 0);
        remember_prefetch(k, 2, {.type = DType::Q8_0, .into = Prefetch::l1});
        remember_prefetch(k, 1, {.type = DType::Q8_0, .into = Prefetch::l2});
        remember_prefetch(k, 2, {.type = DType::Q4_0, .into = Prefetch::l2});
        CHECK(into(2, DType::Q8_0) == 1);
        CHECK(into(1, DType::Q8_0) == 2);
        CHECK(into(2, DType::Q4_0) == 2);
        CHECK(into(1, DType::Q4_0) == 0);
        remember_prefetch(k, 2, {.type = DType::Q8_0, .into = Prefetch::l2});
        CHECK(into(2, DType::Q8_0) == 2);
    }
    for (int threads = 1; threads < 1000; threads++) remember_prefetch(k, threads, {.type = DType::F16});
    CHECK(into(999, DType::F16) == 2); // of any number of lines those are read that were written last
    std::filesystem::remove_all(folder);
    std::ofstream(folder) << "not a folder";
    remember_prefetch(k, 2, {.type = DType::Q8_0, .into = Prefetch::l1});
    CHECK(into(2, DType::Q8_0) == 0);
    std::filesystem::remove(folder);
    if (before) setenv("XDG_CACHE_HOME", restore.c_str(), 1);
    else unsetenv("XDG_CACHE_HOME");
}

TEST_CASE("convolutions and recurrences of odd shapes equal plain sums, in one call or several") {
    for (const CpuKernels* k : all_kernels())
        for (auto [taps, columns, gated] :
             {std::tuple(2, 1, false), std::tuple(3, 64, true), std::tuple(4, 33, false), std::tuple(16, 17, true)}) {
            CAPTURE(k->name, taps, columns, gated);
            constexpr int n = 23, stride = 70;
            const auto    x = noise(n * stride, 1), factor = noise(n * stride, 2), gate = noise(n * stride, 3),
                       weight = noise(std::size_t(columns * taps), 4), bias = noise(std::size_t(columns), 5);
            const auto          before = noise(std::size_t((taps - 1) * conv_columns), 6);
            std::vector<double> want;
            for (int t = 0; t < n; t++)
                for (int c = 0; c < columns; c++) {
                    double sum = double(bias[std::size_t(c)]);
                    for (int j = 0; j < taps; j++) {
                        const int  row = t - taps + 1 + j;
                        const auto at  = std::size_t(row * stride + c);
                        sum += double(weight[std::size_t(c * taps + j)]) *
                               (row < 0 ? double(before[std::size_t((row + taps - 1) * conv_columns + c)])
                                        : double(x[at]) * (gated ? double(factor[at]) : 1));
                    }
                    want.push_back(gated ? sum * double(gate[std::size_t(t * stride + c)])
                                         : sum / (1 + std::exp(-sum)));
                }
            std::vector<float> first;
            for (int piece : {n, 1, 5}) {
                std::vector<float> out(n * stride), past = before, got;
                for (int t = 0; t < n; t += piece) {
                    ConvTask task;
                    task.x = x.data() + t * stride, task.factor = gated ? factor.data() + t * stride : nullptr;
                    task.gate = gated ? gate.data() + t * stride : nullptr, task.out = out.data() + t * stride;
                    task.stride = stride, task.weight = weight.data(), task.bias = bias.data(), task.past = past.data();
                    task.n_tokens = std::min(piece, n - t), task.taps = taps, task.columns = columns;
                    k->convolve(task);
                }
                for (int t = 0; t < n; t++)
                    got.insert(got.end(), out.begin() + t * stride, out.begin() + t * stride + columns);
                CHECK(error(got, want) < 1e-5);
                if (first.empty()) first = got;
                CHECK(got == first);
            }
        }
    for (const CpuKernels* k : all_kernels())
        for (auto [key_dim, columns, delta] :
             {std::tuple(1, 1, true), std::tuple(7, 32, false), std::tuple(128, 32, true), std::tuple(80, 17, true),
              std::tuple(64, 16, false)}) {
            CAPTURE(k->name, key_dim, columns, delta);
            constexpr int n = 19, stride = 300;
            auto          x = noise(n * stride, 1);
            for (float& v : x) v /= std::sqrt(float(key_dim));
            std::vector<float> decay(n), write(n), start(std::size_t(key_dim * recurrence_columns));
            for (int t = 0; t < n; t++)
                decay[std::size_t(t)] = 1 / (1 + 0.1f * float(t)), write[std::size_t(t)] = 0.1f * float(t);
            const auto values = noise(start.size(), 7);
            for (std::size_t i = 0; i < start.size(); i++)
                if (int(i % recurrence_columns) < columns) start[i] = values[i];
            std::vector<double> S(start.begin(), start.end()), want;
            for (int t = 0; t < n; t++) {
                const float *q = x.data() + t * stride, *key = q + 130;
                for (int c = 0; c < columns; c++) {
                    const double g = double(decay[std::size_t(t)]), v = double(q[260 + c]);
                    double       known = 0, result = 0;
                    for (int i = 0; i < key_dim; i++)
                        known += g * S[std::size_t(i * recurrence_columns + c)] * double(key[i]);
                    for (int i = 0; i < key_dim; i++) {
                        double& s = S[std::size_t(i * recurrence_columns + c)];
                        s         = g * s + double(key[i]) * double(write[std::size_t(t)]) * (v - (delta ? known : 0));
                        result += s * double(q[i]);
                    }
                    want.push_back(result + 0.5 * v);
                }
            }
            std::vector<float> first;
            for (int piece : {n, 1, 4}) {
                std::vector<float> state = start, got(std::size_t(n * columns));
                for (int t = 0; t < n; t += piece) {
                    RecurrenceTask task;
                    task.q = x.data() + t * stride, task.k = task.q + 130, task.v = task.q + 260, task.stride = stride;
                    task.decay = decay.data() + t, task.write = write.data() + t;
                    task.out = got.data() + t * columns, task.out_stride = columns, task.state = state.data();
                    task.skip = 0.5f, task.n_tokens = std::min(piece, n - t), task.key_dim = key_dim;
                    task.columns = columns, task.delta = delta;
                    k->recur(task);
                }
                CHECK(error(got, want) < 1e-5);
                CHECK(error(state, S) < 1e-5);
                if (first.empty()) first = got;
                CHECK(got == first);
            }
        }
}
