// A multistage shared-memory pipeline: a producer warp fills the stages by TMA, ahead of the consumer warps that read them.
// Each stage has two mbarriers: full, when its bytes have arrived, and empty, when all consumers have read it.
#pragma once

#include <cstdint>

#include "ptx/mbarrier.cuh"

namespace quire::cuda {

#if __CUDA_ARCH__ >= 900

// A stage, and how often the pipeline has been around, as a parity. Every producer and consumer keeps its own.
template <int Stages>
struct PipelineState {
    int      stage = 0;
    unsigned phase = 0;

    __device__ void advance() {
        if (++stage == Stages) stage = 0, phase ^= 1;
    }
};

template <int Stages>
struct Pipeline {
    unsigned char* memory;
    std::uint64_t *full, *empty; // [Stages]

    using State = PipelineState<Stages>;
    // The producer begins with the other phase: the first time round no stage waits for consumers.
    static __device__ State producer_start() { return {0, 1}; }

    // By one thread, before a CTA barrier.
    __device__ void init(unsigned n_producers, unsigned n_consumers) const {
        for (int s = 0; s < Stages; s++) mbarrier_init(full + s, n_producers), mbarrier_init(empty + s, n_consumers);
    }
    // Waits until all consumers have released the stage.
    __device__ void producer_acquire(const State& at) const { mbarrier_wait(empty + at.stage, at.phase); }
    __device__ void consumer_wait(const State& at) const { mbarrier_wait(full + at.stage, at.phase); }
    // By one thread of a warp or warpgroup, when all of it has passed consumer_wait(): behind a wgmma, or a barrier.
    __device__ void consumer_release(int stage) const { mbarrier_arrive(empty + stage); }
};

#endif

} // namespace quire::cuda
