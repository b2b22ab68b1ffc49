// NCCL, loaded where it is installed: what sums large messages if it is faster than two_shot_kernel.
#pragma once

#include "rank.cuh"

namespace quire::cuda {

// False: there is no communicator, or the message is better sent otherwise.
bool nccl_all_reduce(const AllReduce& args, std::int64_t n, Rank& rank, Context& gpu);
void leave_nccl(Rank& rank);

// Whether there are kernels for n ranks.
bool can_reduce(int n);

} // namespace quire::cuda
