// NCCL, loaded where it is installed. NCCL sums large messages if it is faster than two_shot_kernel, and brings every message to the ranks
// of other processes.
#pragma once

#include "rank.cuh"

namespace quire::cuda {

// False: there is no communicator, or the message is better sent otherwise.
bool nccl_all_reduce(const AllReduce& args, std::int64_t n, Rank& rank, Context& gpu);

// -- ranks of several processes

// Bytes of the largest piece that a rank can hand in below; 0: all ranks are of this process.
std::size_t piece_bytes(const Rank& rank);
// Every rank hands in `bytes` bytes; the bytes of rank p stand at p × bytes of the result, which is valid until the next call.
const void* gather_pieces(const void* mine, std::size_t bytes, Rank& rank, Context& gpu);
// Rank p hands in bytes_of[p] bytes, which stand at p × piece_bytes(rank) of the result.
const void* gather_pieces(const void* mine, const std::size_t* bytes_of, Rank& rank, Context& gpu);

// Whether there are kernels for n ranks.
bool can_reduce(int n);

} // namespace quire::cuda
