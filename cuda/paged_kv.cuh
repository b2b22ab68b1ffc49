// The paged KV cache of a layer: where the K and V of a position are. All kernels take addresses from here.
//
// K and V are arrays [block][kv_head][offset][head_dim] of fp16, so what a KV head has in a block is contiguous: a tile of block_size rows. A
// row is the head_dim values of one position of one KV head. From one block of a layer to the next there are `block_rows` rows: those of the KV
// heads, and more where other arrays stand in the block as well, which need not be whole tiles. A slot is the place of a token in the cache:
// block * block_size + offset; -1 for the tokens that only fill up a step to the size of its graph.
#pragma once

#include <cstdint>

namespace quire::cuda {

// The row of a position: `offset` in `block`. Index: 64 bits; 32 where rows, not bytes, are counted and a kernel needs no more.
template <class Index = std::int64_t>
__device__ inline Index kv_row(int block, int kv_head, int offset, int block_rows, int block_size) {
    return Index(block) * block_rows + (kv_head * block_size + offset);
}

// The row of a position that is in block `nth` of its sequence, which is `block` of the cache.
__device__ inline std::int64_t kv_row_of_position(int position, int nth, int block, int kv_head, int block_rows,
                                                  int block_size) {
    return kv_row(block, kv_head - nth, position, block_rows, block_size);
}

// The row of the token in a slot.
__device__ inline std::int64_t kv_row_of_slot(int slot, int kv_head, int block_rows, int block_size) {
    return kv_row(slot / block_size, kv_head, slot % block_size, block_rows, block_size);
}

// The rows of one KV head in an array whose blocks are `block_rows` rows apart, by products of 32 bits, where kv_row() takes two of 64: a
// block of all layers has less than 4 GiB.
struct HeadRows {
    const unsigned char* first;
    unsigned             block_bytes, row_bytes; // from a block to the next, from a row to the next

    __device__ HeadRows(const void* array, int kv_head, int block_rows, int block_size, int row_bytes)
        : first(static_cast<const unsigned char*>(array) + std::int64_t(kv_head) * block_size * row_bytes),
          block_bytes(unsigned(block_rows) * unsigned(row_bytes)), row_bytes(unsigned(row_bytes)) {}
    __device__ const unsigned char* at(int block, int offset) const {
        return first + std::uint64_t(unsigned(block)) * block_bytes + unsigned(offset) * row_bytes;
    }
};

// Rows from one KV head of a block to the next.
__device__ inline int kv_head_stride(int block_size) { return block_size; }

// Which block of its sequence a position is in. A shift where the block size turns out to be a power of two: a division is
// slow.
struct BlockOf {
    int  block_size, shift;
    bool power;

    __device__ explicit BlockOf(int size) {
        block_size = size;
        shift      = 31 - __clz(size);
        power      = (size & (size - 1)) == 0;
    }
    __device__ int operator()(int position) const { return power ? position >> shift : position / block_size; }
    __device__ int offset(int position) const { return power ? position & (block_size - 1) : position % block_size; }
};

} // namespace quire::cuda
