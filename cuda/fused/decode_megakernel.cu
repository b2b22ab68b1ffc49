// A step with one token as a single persistent kernel: it executes a recorded list (tape) of operations, GEMVs and attention, and a
// CTA waits for the values that others write for it, half by half. Meanwhile the weights of the next GEMVs are already being
// loaded into a ring buffer in shared memory, which knows nothing of operations but which rows come next. So the memory is busy even
// if the GEMVs are short, and there is no launch cost per operation.
//
// The warps of a CTA: one, the producer, reads the tape and fills the ring; all others prepare x, multiply, compute attention and add
// up. One of these, the herald, also signals the progress of this CTA to the others and waits for theirs. A stage of the ring
// consists of some whole rows, and all warps work on it at once: each lane multiplies the same columns of every stage and keeps their x
// in registers. So x is read from shared memory once and not once per row, and a GEMV ends soon after its last row has arrived.
// Every CTA keeps the residual, and adds up and normalises it itself, which is faster than to receive it. Some rows of gate and up
// are not assigned: faster CTAs take more of them.
//
// Limits: Hopper; RMS norms, gated feed-forward or GEMVs alone; head_dim 64 or 128; hidden up to 8192, columns of other GEMVs
// up to 30720. All CTAs are on the GPU at once (one per SM, a cooperative launch).
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <vector>

#include "../context.cuh"
#include "megakernel_attention.cuh"
#include "megakernel_gemv.cuh"
#include "megakernel_input.cuh"
#include "megakernel_pipeline.cuh"
#include "megakernel_program.cuh"

namespace quire::cuda::megakernel {

namespace {

template <int D>
__global__ void __launch_bounds__(threads, 1)
    tape_kernel(const Op* tape, const __grid_constant__ Shape shape, const __grid_constant__ Plan plan,
                const SplitKvItem* items, int n_items, float* partial, std::int32_t* arrivals, unsigned* counter,
                unsigned start, bool odd) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ std::uint64_t full[most_stages], empty[most_stages], known[slots], done[slots];
    __shared__ __align__(16) unsigned char slot_memory[slots * sizeof(Op)];
    __shared__ float                       squares[32];
    __shared__ __align__(16) unsigned char step_memory[sizeof(Known<D>)];
    auto&                                  step     = *reinterpret_cast<Known<D>*>(step_memory);
    float*                                 residual = reinterpret_cast<float*>(memory);
    unsigned char*                         xs       = memory + shape.hidden * 4;
    float*                                 sums     = reinterpret_cast<float*>(xs);
    const Slots                            ops{reinterpret_cast<Op*>(slot_memory), known, done};
    Ring                                   ring{xs + shape.x_room, shape.ring_bytes, full, empty};

    if (threadIdx.x == 0) {
        for (int s = 0; s < most_stages; s++) mbarrier_init(&full[s], 1), mbarrier_init(&empty[s], warps * 32);
        for (int s = 0; s < slots; s++) mbarrier_init(&known[s], 32), mbarrier_init(&done[s], warps * 32);
        mbarrier_init_fence();
    }
    step.learn(shape, plan, items, n_items);
    __syncthreads();
    if (threadIdx.x / 32 == producer) {
        produce(tape, shape.n_ops, ops, ring, odd ? shape.exchanged : 0, odd ? 0 : shape.exchanged, odd,
                [&](const Op& op) {
                    if (op.attends) ask_for_cache<D>(op, shape.attend, plan, step);
                    if (op.norm) ask(op.norm, shape.hidden * 4);
                });
        return;
    }
    for (int c = int(threadIdx.x); c < shape.hidden; c += Team::size())
        residual[c] = weight_at(shape.embedding, plan.tokens[0], c);
    Team::sync();

    const bool tells = threadIdx.x == herald * 32;
    for (int at = 0; at < shape.n_ops; at++) {
        const Op& op = ops.wait(at);
        if (const int g = int(blockIdx.x + threadIdx.x * gridDim.x); g < op.n_cleared)
            op.cleared[g] = make_uint4(~0u, ~0u, ~0u, ~0u);
        if (op.n_claimable > 0 && blockIdx.x == 0 && threadIdx.x == 0) *op.next_claims = 0;
        const auto wait = [&] { // until what the operation before wrote is there or about to be
            if (op.waits && tells) {
                // Most blocks are enough: what is missing is seen to be, and asked for again.
                const unsigned wanted = start + unsigned(at) * gridDim.x - gridDim.x / 8;
                unsigned       count;
                do asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
                while (int(count - wanted) < 0);
            }
            Team::sync();
            if (at > 0) mbarrier_arrive(done + (at - 1) % slots); // nobody is at it now
        };
        if (op.attends) {
            attend<D>(op, shape, plan, items, n_items, partial, arrivals, xs, step, wait);
            Team::sync();
        } else {
            if (op.kind == kind_f16) make_x<kind_f16>(op, shape.hidden, residual, xs, squares, wait);
            else if (op.kind == kind_q4_k) make_x<kind_q4_k>(op, shape.hidden, residual, xs, squares, wait);
            else make_x<kind_i8>(op, shape.hidden, residual, xs, squares, wait);
            multiply_rows(op, ring, xs, sums);
            const float scale = first_result() < finishing ? scale_of(op, squares, shape.hidden) : 1;
            Team::sync();
            finish_products(op, sums, scale);
        }
        if (tells) asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
    }
#endif
}

struct Tape {
    Shape     shape;
    int       head_dim = 0;
    int       shared   = 0; // bytes
    Op*       ops      = nullptr;
    unsigned* counter  = nullptr; // .. and what is claimed, behind it
    unsigned  done     = 0;       // what the counter is at
    Half*     exchange = nullptr; // what blocks tell one another
    bool      odd      = false;   // the next step
};

using Kernel = void (*)(const Op*, Shape, Plan, const SplitKvItem*, int, float*, std::int32_t*, unsigned*, unsigned,
                        bool);
Kernel kernel_of(const Tape& tape) { return tape.head_dim == 64 ? tape_kernel<64> : tape_kernel<128>; }

} // namespace

} // namespace quire::cuda::megakernel

namespace quire::cuda {

using namespace megakernel;

void destroy_decode_megakernel(void* tape) {
    if (tape == nullptr) return;
    auto* t = static_cast<Tape*>(tape);
    release(t->ops);
    release(t->counter);
    release(t->exchange);
    delete t;
}

void* make_decode_megakernel(const Operation* told, int n, Context& gpu) {
    Shape           shape;
    std::vector<Op> ops;
    if (!gpu.sm90 || !gpu.cooperative || !understand(told, n, shape, ops)) return nullptr;
    auto* tape     = new Tape;
    tape->head_dim = shape.attend.head_dim;
    // Shared memory: the residual, x in its widest form (or the sums, or what attention needs), the ring.
    const int group  = std::min(max_heads, shape.attend.n_heads / shape.attend.n_kv_heads);
    const int values = group * tape->head_dim * 4,
              beside = 2 * warps * max_heads * 4 + (max_heads + 2) * tape->head_dim * 2;
    int  room = beside + 4 * values, largest = 0; // .. stage
    bool fits = true;
    for (Op& op : ops) {
        if (op.attends) continue;
        for (const auto bytes : {data_bytes, scale_bytes, min_bytes}) {
            if (bytes(op.kind, 256) == 0) break;
            op.row_bytes += op.part_bytes[op.n_parts++] = bytes(op.kind, op.cols);
        }
        if (!share(op)) {
            fits = false;
            break;
        }
        const int blocks = gpu.n_sms, chunks = (op.n_pairs + op.rows - 1) / op.rows, each = chunks / blocks;
        int       batches = ((op.n_pairs / blocks + 1) * 2 + op.rows * op.batch - 1) / (op.rows * op.batch);
        if (op.gated && each >= most_claims / 2) {
            op.own         = std::max(each * 3 / 4, (chunks + blocks - 1) / blocks - most_claims / 2);
            op.n_claimable = chunks - op.own * blocks;
            batches += most_claims;
        }
        largest = std::max(largest, op.rows * op.row_bytes);
        room    = std::max({room, x_bytes(op.kind, op.cols), batches * op.batch * op.rows * op.most_sums * 4});
    }
    shape.x_room     = (room + 127) / 128 * 128;
    shape.attending  = std::min(warps, (shape.x_room - beside) / values);
    shape.n_ops      = int(ops.size());
    shape.ring_bytes = (most_shared - shape.hidden * 4 - shape.x_room) / 128 * 128;
    tape->shared     = shape.hidden * 4 + shape.x_room + shape.ring_bytes;
    fits             = fits && shape.ring_bytes >= 3 * largest;
    fits             = fits && exchange(ops, nullptr, shape.exchanged);
    if (fits) {
        const std::vector<Half> cleared(std::size_t(shape.exchanged) * 2, cleared_half);
        tape->exchange = static_cast<Half*>(allocate(gpu, cleared.size() * sizeof(Half)));
        fits           = tape->exchange != nullptr;
        if (fits) upload(tape->exchange, cleared.data(), cleared.size() * sizeof(Half), gpu);
        if (fits) exchange(ops, tape->exchange, shape.exchanged);
    }
    tape->shape   = shape;
    tape->ops     = static_cast<Op*>(fits ? allocate(gpu, ops.size() * sizeof(Op)) : nullptr);
    tape->counter = static_cast<unsigned*>(fits ? allocate(gpu, (1 + 2 * ops.size()) * sizeof(unsigned)) : nullptr);
    for (std::size_t op = 0; tape->counter && op < ops.size(); op++) ops[op].claims = tape->counter + 1 + 2 * op;
    // As much as any tape: what a kernel may have is the device's, and two engines' tapes share the kernel.
    if (!tape->ops || !tape->counter || prepare_kernel(gpu, kernel_of(*tape), threads, most_shared) < 1) {
        destroy_decode_megakernel(tape);
        return nullptr;
    }
    upload(tape->ops, ops.data(), ops.size() * sizeof(Op), gpu);
    return tape;
}

bool run_decode_megakernel(void* tape, const Plan& plan, float* partial, std::int32_t* arrivals, Context& gpu) {
    auto& t = *static_cast<Tape*>(tape);
    if (launch_kernel(Launch::cooperative, kernel_of(t), dim3(unsigned(gpu.n_sms)), unsigned(threads),
                      std::size_t(t.shared), gpu, static_cast<const Op*>(t.ops), t.shape, plan, plan.items.list,
                      plan.items.n, partial, arrivals, t.counter, t.done, t.odd) != cudaSuccess) {
        cudaGetLastError(); // it has been dealt with
        return false;
    }
    t.done += unsigned(t.shape.n_ops) * unsigned(gpu.n_sms);
    t.odd = !t.odd;
    return true;
}

} // namespace quire::cuda
