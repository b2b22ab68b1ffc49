// The view that a rank's kernels have of the other ranks, and how they wait for them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../signal.cuh"
#include "ranks.h"

namespace quire::cuda {

// Passed to kernels by value. Pointers marked "of" lead to the memory of every rank.
struct RankView {
    int          index = 0, n = 1;
    std::int64_t room = 0;              // packets of a message in one shot
    uint4*       inbox_of[max_ranks]{}; // [2][n][room]: messages in one shot, of odd and of even numbers, by sender
    unsigned*    flags_of
        [max_ranks]{}; // [start, end][two_shot_ctas][n]: the last message at whose start, end a rank's CTA has arrived
    unsigned*          state   = nullptr; // of this rank: see below
    volatile int*      lost    = nullptr; // pinned: a kernel has waited in vain
    unsigned long long timeout = 0;       // nanoseconds
    int                ctas    = 0;       // of a kernel that sends in two shots, at most two_shot_ctas
};
// Indices of `state`: numbers of the last messages in one shot and in two; CTAs that are done with the present one.
enum : int { one_shots, two_shots, done_ctas, n_state };

// CTAs of a kernel that sends in two shots: all of them run at once. Fewer, where ranks share a GPU.
constexpr int two_shot_ctas = 64, shared_two_shot_ctas = 4;

struct Rank {
    RankView     view;
    int          most_rows = 65535;   // of a message in one shot: each is a CTA that waits
    void*        memory    = nullptr; // inbox, flags and state
    int*         lost      = nullptr; // pinned
    struct Nccl* nccl      = nullptr;
};

__device__ inline unsigned long long nanoseconds() {
    unsigned long long t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

// Waits until ready(). Gives up and sets `lost` when the wait takes longer than the rank's limit, or when `lost` is set already.
template <class Ready>
__device__ inline void wait_for(const RankView& rank, const Ready& ready) {
    unsigned long long since = 0;
    wait_until(ready, [&](int n) {
        if (n % 4096 != 0) return false;
        if (since == 0) since = nanoseconds();
        if (*rank.lost == 0 && nanoseconds() - since <= rank.timeout) return false;
        *rank.lost = 1;
        return true;
    });
}

// A message in one shot travels in packets of two words of data. Beside each word stands the number of the message: the data has arrived
// when both numbers are the message's. (The LL protocol of NCCL; 8 bytes of a store arrive together.)
__device__ inline void send_packet(uint4* to, unsigned a, unsigned b, unsigned number) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %2};" ::"l"(to), "r"(a), "r"(number), "r"(b)
                 : "memory");
}
__device__ inline uint2 receive_packet(const RankView& rank, const uint4* from, unsigned number) {
    uint4 p;
    wait_for(rank, [&] {
        asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(p.x), "=r"(p.y), "=r"(p.z), "=r"(p.w)
                     : "l"(from)
                     : "memory");
        return p.y == number && p.w == number;
    });
    return {p.x, p.z};
}

// A barrier of the CTAs with this CTA's index, one on each rank, at message `number` (`which` 0: at its start, 1: at its end). After the
// barrier each of these CTAs sees the others' earlier writes.
__device__ inline void barrier(const RankView& rank, int which, unsigned number) {
    __syncthreads();
    const int peer = int(threadIdx.x), at = (which * two_shot_ctas + int(blockIdx.x)) * rank.n;
    if (peer < rank.n) {
        asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(rank.flags_of[peer] + at + rank.index), "r"(number)
                     : "memory");
        wait_for(rank, [&] {
            unsigned seen;
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];"
                         : "=r"(seen)
                         : "l"(rank.flags_of[rank.index] + at + peer)
                         : "memory");
            return int(seen - number) >= 0;
        });
    }
    __syncthreads();
}

// At the end of a kernel: the last CTA counts the message.
__device__ inline void count_message(const RankView& rank, int which) {
    __syncthreads();
    if (threadIdx.x != 0) return;
    __threadfence();
    if (atomicAdd(rank.state + done_ctas, 1) != gridDim.x - 1) return;
    rank.state[done_ctas] = 0;
    rank.state[which]++;
}
__device__ inline unsigned next_message(const RankView& rank, int which) {
    return *const_cast<const volatile unsigned*>(rank.state + which) + 1;
}

// The sum of v[0 .. N) with N known, as a tree: the first half, rounded up, plus the others.
template <int N>
__device__ inline float tree_sum(const float* v) {
    if constexpr (N == 1) {
        return v[0];
    } else {
        constexpr int half = (N + 1) / 2;
        return tree_sum<half>(v) + tree_sum<N - half>(v + half);
    }
}

} // namespace quire::cuda
