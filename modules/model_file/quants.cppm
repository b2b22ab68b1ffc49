// quire.model_file.quants: from the blocks of any type of GGUF to floats. Owns nothing.
//
// A row is a sequence of blocks. A block holds 32 to 256 consecutive elements as small integers, with the scales to dequantise
// them: quants/blocks.cppm draws each type, quants/lattice_blocks.cppm the types whose integers are indices of points of a lattice. The
// arithmetic is the same everywhere and gives the same bits as gguf-py and libggml.
export module quire.model_file.quants;

import quire.core.base;
export import quire.core.tensor;
export import quire.model_file.quants.blocks;
import quire.model_file.quants.lattice_blocks;

export namespace quire {

// dst[0 .. n) = the n elements stored at src; n is a multiple of the type's block. Any type of dtype_table.
void dequantize(DType type, const void* src, float* dst, std::int64_t n);

// dequantize(), to be inlined into a caller that is compiled for another instruction set. The types of lattices are not inlined: their time
// goes into looking up points.
[[gnu::always_inline]] inline void dequantize_inline(DType type, const std::byte* src, float* dst, std::int64_t n) {
    Bits b = reinterpret_cast<Bits>(src);
    switch (type) {
        case DType::F32: std::memcpy(dst, src, std::size_t(n) * sizeof(float)); break;
        case DType::F16:
            for (std::int64_t i = 0; i < n; i++) dst[i] = fp16_at(b + 2 * i);
            break;
        case DType::BF16:
            for (std::int64_t i = 0; i < n; i++)
                dst[i] = std::bit_cast<float>((std::uint32_t(b[2 * i]) | std::uint32_t(b[2 * i + 1]) << 8) << 16);
            break;
#define BLOCKS(T, items, bytes, block)                                     \
    case DType::T:                                                         \
        for (; n > 0; n -= items, b += bytes, dst += items) block(b, dst); \
        break;
            BLOCKS(Q4_0, 32, 18, block_q4_0)
            BLOCKS(Q4_1, 32, 20, block_q4_1)
            BLOCKS(Q5_0, 32, 22, block_q5_0)
            BLOCKS(Q5_1, 32, 24, block_q5_1)
            BLOCKS(Q8_0, 32, 34, block_q8_0)
            BLOCKS(Q2_K, 256, 84, block_q2_k)
            BLOCKS(Q3_K, 256, 110, block_q3_k)
            BLOCKS(Q4_K, 256, 144, block_q4_k)
            BLOCKS(Q5_K, 256, 176, block_q5_k)
            BLOCKS(Q6_K, 256, 210, block_q6_k)
            BLOCKS(IQ4_NL, 32, 18, block_iq4_nl)
            BLOCKS(IQ4_XS, 256, 136, block_iq4_xs)
            BLOCKS(MXFP4, 32, 17, block_mxfp4)
            BLOCKS(NVFP4, 64, 36, block_nvfp4)
            BLOCKS(TQ1_0, 256, 54, block_tq1_0)
            BLOCKS(TQ2_0, 256, 66, block_tq2_0)
            BLOCKS(Q1_0, 128, 18, block_q1_0)
            BLOCKS(Q2_0, 64, 18, block_q2_0)
            BLOCKS(Q8_K, 256, 292, block_q8_k)
#undef BLOCKS
        default: dequantize_lattice(type, b, dst, n);
    }
}

} // namespace quire

module :private;

namespace quire {

void dequantize(DType type, const void* src, float* dst, std::int64_t n) {
    dequantize_inline(type, static_cast<const std::byte*>(src), dst, n);
}

} // namespace quire
