// quire.quants: the block formats of GGUF, each drawn bit by bit, and the reference that turns them into floats.
export module quire.quants;

import quire.base;
import quire.std;
import quire.tensor;

export namespace quire {

// dst[0 .. n) = the n elements stored at src; n is a multiple of the type's block. Any type of dtype_table.
// Bit-identical to the reference implementation of the format (gguf-py, libggml).
void dequantize(DType type, const void* src, float* dst, std::int64_t n);

} // namespace quire
