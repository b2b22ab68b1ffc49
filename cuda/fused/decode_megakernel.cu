// The decode megakernel: a step of one token as one persistent kernel. Every CTA (one per SM) interprets a program of
// instructions, GEMVs and attention; between instructions CTAs exchange vectors through memory, and wait for single values
// instead of a full grid barrier (megakernel_exchange.cuh). Meanwhile a producer warp streams the weights of the coming GEMVs
// into a multistage pipeline in shared memory, across instructions. So memory stays busy even if the GEMVs are short, and no
// operation costs a launch.
//
// Warp specialisation: warp 15 is the producer; the other 15 warps prepare x, multiply, attend and reduce. One of them, the
// sync warp, signals the progress of this CTA and waits for the others'. A stage of the pipeline has some whole rows, and all
// warps work on it at once: a lane multiplies the same columns in every stage and keeps its part of x in registers. So x is
// read from shared memory once and not once per row, and a GEMV ends soon after its last row has arrived. Every CTA has a copy
// of the residual, and adds and normalises it itself, which is faster than to receive it. The last rows of gate and up are
// scheduled dynamically: faster CTAs take more of them.
//
// Limits: Hopper; RMS norms, gated feed-forward or GEMVs alone; head_dim 64 or 128; K and V of one type; hidden size up to 8192, K of other
// GEMVs up to 30720. All CTAs have to run at once: a cooperative launch.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <vector>

#include "../context.cuh"
#include "../signal.cuh"
#include "megakernel_attention.cuh"
#include "megakernel_gemv.cuh"
#include "megakernel_input.cuh"
#include "megakernel_pipeline.cuh"
#include "megakernel_program.cuh"

namespace quire::cuda::megakernel {

namespace {

// Type: of K and V.
template <int D, KvType Type>
__global__ void __launch_bounds__(threads, 1)
    decode_megakernel(const Instruction* instructions, const __grid_constant__ Program program,
                      const __grid_constant__ Plan plan, const SplitKvItem* items, int n_items, float* partial,
                      std::int32_t* arrivals, unsigned* counter, unsigned start, bool odd) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ std::uint64_t full[max_stages], empty[max_stages], known[slots], done[slots];
    __shared__ __align__(16) unsigned char slot_memory[slots * sizeof(Instruction)];
    __shared__ float                       squares[32];
    __shared__ __align__(16) unsigned char step_memory[sizeof(StepState<D>)];
    auto&                                  step     = *reinterpret_cast<StepState<D>*>(step_memory);
    float*                                 residual = reinterpret_cast<float*>(memory);
    unsigned char*                         xs       = memory + program.hidden * 4;
    float*                                 sums     = reinterpret_cast<float*>(xs);
    const InstructionSlots                 ops{reinterpret_cast<Instruction*>(slot_memory), known, done};
    WeightPipeline                         pipeline{xs + program.x_room, program.pipeline_bytes, full, empty};

    if (threadIdx.x == 0) {
        for (int s = 0; s < max_stages; s++) mbarrier_init(&full[s], 1), mbarrier_init(&empty[s], warps * 32);
        for (int s = 0; s < slots; s++) mbarrier_init(&known[s], 32), mbarrier_init(&done[s], warps * 32);
        mbarrier_init_fence();
    }
    step.init(program, plan, items, n_items);
    __syncthreads();
    if (threadIdx.x / 32 == producer) {
        produce_weights(instructions, program.n_ops, ops, pipeline, odd ? program.exchange_size : 0,
                        odd ? 0 : program.exchange_size, odd, [&](const Instruction& op) {
                            if (op.is_attention) prefetch_cache_l2<D, Type>(op, program.attend, plan, step);
                            if (op.norm) prefetch_l2(op.norm, program.hidden * 4);
                        });
        return;
    }
    for (int c = int(threadIdx.x); c < program.hidden; c += Team::size())
        residual[c] = weight_at(program.embedding, plan.tokens[0], c);
    Team::sync();

    const bool signals = threadIdx.x == sync_warp * 32;
    for (int at = 0; at < program.n_ops; at++) {
        const Instruction& op = ops.wait(at);
        if (const int g = int(blockIdx.x + threadIdx.x * gridDim.x); g < op.n_cleared)
            op.cleared[g] = make_uint4(~0u, ~0u, ~0u, ~0u);
        if (op.n_dynamic > 0 && blockIdx.x == 0 && threadIdx.x == 0) *op.next_chunk_of_next_step = 0;
        const auto wait = [&] { // until the previous instruction's results are there, or about to be
            if (op.waits_for_previous && signals) {
                // Most CTAs are enough: readers see which values are missing, and poll for them.
                const unsigned wanted = start + unsigned(at) * gridDim.x - gridDim.x / 8;
                wait_until([&] { return int(read_relaxed(counter) - wanted) >= 0; });
            }
            Team::sync();
            if (at > 0) mbarrier_arrive(done + (at - 1) % slots); // all have finished that instruction
        };
        if (op.is_attention) {
            attend<D, Type>(op, program, plan, items, n_items, partial, arrivals, xs, step, wait);
            Team::sync();
        } else {
            if (op.kind == kind_f16) make_x<kind_f16>(op, program.hidden, residual, xs, squares, wait);
            else if (op.kind == kind_q4_k) make_x<kind_q4_k>(op, program.hidden, residual, xs, squares, wait);
            else make_x<kind_i8>(op, program.hidden, residual, xs, squares, wait);
            gemv(op, pipeline, xs, sums);
            const float scale = epilogue_thread() < epilogue_threads ? scale_of(op, squares, program.hidden) : 1;
            Team::sync();
            gemv_epilogue(op, sums, scale);
        }
        if (signals) asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
    }
#endif
}

struct Megakernel {
    Program      program;
    Instruction* ops      = nullptr;
    unsigned*    counter  = nullptr; // the CTAs' progress; behind it the counters of the dynamic scheduler
    unsigned     done     = 0;       // the progress after the last step
    Half*        exchange = nullptr;
    bool         odd      = false; // the next step: even and odd steps have buffers of their own
};

using Kernel = void (*)(const Instruction*, Program, Plan, const SplitKvItem*, int, float*, std::int32_t*, unsigned*,
                        unsigned, bool);
template <int D>
Kernel kernel_for(KvType type) {
    return type == KvType::f16  ? decode_megakernel<D, KvType::f16>
           : type == KvType::i8 ? decode_megakernel<D, KvType::i8>
                                : decode_megakernel<D, KvType::e4m3>;
}
Kernel kernel_of(const Program& program) {
    const KvType type = program.attend.k_array.type;
    return program.attend.head_dim == 64 ? kernel_for<64>(type) : kernel_for<128>(type);
}

} // namespace

} // namespace quire::cuda::megakernel

namespace quire::cuda {

using namespace megakernel;

void destroy_decode_megakernel(void* megakernel) {
    if (megakernel == nullptr) return;
    auto* m = static_cast<Megakernel*>(megakernel);
    release(m->ops);
    release(m->counter);
    release(m->exchange);
    delete m;
}

void* make_decode_megakernel(const Operation* operations, int n, Context& gpu) {
    Program                  program;
    std::vector<Instruction> ops;
    if (!gpu.sm90 || !gpu.cooperative || !compile(operations, n, gpu.n_sms, program, ops)) return nullptr;
    const std::vector<Half> empty(std::size_t(program.exchange_size) * 2, empty_fp16);
    auto*                   m = new Megakernel;
    m->program                = program;
    m->exchange               = static_cast<Half*>(allocate(gpu, empty.size() * sizeof(Half)));
    m->ops                    = static_cast<Instruction*>(allocate(gpu, ops.size() * sizeof(Instruction)));
    m->counter                = static_cast<unsigned*>(allocate(gpu, (1 + 2 * ops.size()) * sizeof(unsigned)));
    // As much shared memory as any program needs: the limit is the kernel's, which two engines share.
    if (!m->exchange || !m->ops || !m->counter || prepare_kernel(gpu, kernel_of(program), threads, max_shared) < 1) {
        destroy_decode_megakernel(m);
        return nullptr;
    }
    place_exchange(ops, m->exchange, m->program.exchange_size);
    for (std::size_t op = 0; op < ops.size(); op++) ops[op].next_chunk = m->counter + 1 + 2 * op;
    upload(m->exchange, empty.data(), empty.size() * sizeof(Half), gpu);
    upload(m->ops, ops.data(), ops.size() * sizeof(Instruction), gpu);
    return m;
}

int megakernel_splits(const Context& gpu, int n_heads, int n_kv_heads) {
    const int per_kv = (n_heads / n_kv_heads + max_heads - 1) / max_heads;
    return std::max(1, gpu.n_sms / (n_kv_heads * per_kv));
}

bool run_decode_megakernel(void* megakernel, const Plan& plan, float* partial, std::int32_t* arrivals, Context& gpu) {
    auto& m = *static_cast<Megakernel*>(megakernel);
    if (launch_kernel(Launch::cooperative, kernel_of(m.program), dim3(unsigned(gpu.n_sms)), unsigned(threads),
                      std::size_t(m.program.shared), gpu, static_cast<const Instruction*>(m.ops), m.program, plan,
                      plan.items.list, plan.items.n, partial, arrivals, m.counter, m.done, m.odd) != cudaSuccess) {
        cudaGetLastError(); // the caller runs the step in another way
        return false;
    }
    m.done += unsigned(m.program.n_ops) * unsigned(gpu.n_sms);
    m.odd = !m.odd;
    return true;
}

} // namespace quire::cuda
