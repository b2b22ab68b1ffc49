// The weight pipeline of the decode megakernel: a multistage shared-memory pipeline whose producer warp reads the program, and
// loads the weights of the coming GEMVs by TMA bulk copies, some instructions ahead; the dynamic scheduler of long gated GEMVs.
#pragma once

#include "../gemm/gemv.cuh"
#include "../ptx/tma.cuh"
#include "../warp.cuh"
#include "megakernel_program.cuh"

namespace quire::cuda::megakernel {

#if __CUDA_ARCH__ >= 900

namespace {

constexpr int sync_warp  = 14; // of the consumers: signals to the other CTAs, and waits for them
constexpr int producer   = 15; // the warp that loads weights
constexpr int max_stages = 16; // in the pipeline
constexpr int slots      = 8;  // instructions that a CTA holds at once

using Team = FirstThreads<warps * 32>; // the consumers: all but the producer's

// The rows of a GEMV that this CTA computes: consecutive pairs, about as many as any other CTA's. begin .. end are the rows of projection
// `which`: of gate and of up the same rows, of other projections the part of the CTA's range that falls to `which`.
struct Rows {
    const Projection* projection;
    std::int64_t      first;      // of the projection
    int               begin, end; // among the CTA's

    __device__ Rows(const Instruction& op, int which) : projection(&op.all.projection[which]) {
        if (op.gated) {
            first = op.first_pair, begin = which * op.pairs, end = begin + op.pairs;
            if (which == 2) begin = end = 0;
            return;
        }
        const int from = op.first_pair * 2, low = max(op.all.first_row[which], from),
                  high = min(op.all.first_row[which + 1], from + op.pairs * 2);
        first = low - op.all.first_row[which], begin = low - from, end = max(high, low) - from;
    }
};

// The stages have different sizes and lie one after another in a circular buffer; one that does not fit before the end is at
// the beginning. The producer and every consumer warp keep a state of their own.
struct WeightPipeline {
    unsigned char* memory;
    int            bytes;
    std::uint64_t *full, *empty; // [max_stages]
    int            at    = 0;
    unsigned       index = 0, parity = 0; // of the next stage among the barriers; the phase

    // Waits until the next stage is full.
    __device__ void wait() const { mbarrier_wait(full + index, parity); }
    // Releases it.
    __device__ void release() const { mbarrier_arrive(empty + index); }
    // Where the next stage begins.
    __device__ int  begin(int n_bytes) const { return at + n_bytes > bytes ? 0 : at; }
    __device__ void advance(int n_bytes) {
        at = begin(n_bytes) + n_bytes;
        if (++index == max_stages) index = 0, parity ^= 1;
    }
};

// The instructions that the producer has read: each has a slot until all consumers are done with it.
struct InstructionSlots {
    Instruction*   ops;
    std::uint64_t *known, *done; // [slots]

    __device__ const Instruction& wait(int op) const {
        mbarrier_wait(known + op % slots, unsigned(op / slots) & 1);
        return ops[op % slots];
    }
};

// The producer warp. Reads all instructions, resolves their addresses, and loads their weights. `exchange`, `cleared`: offsets
// of the exchange buffers of this step and of the next. before(op): other prefetches.
template <class Before>
__device__ void produce_weights(const Instruction* program, int n_ops, const InstructionSlots& all,
                                WeightPipeline pipeline, std::int64_t exchange, std::int64_t cleared, bool odd,
                                const Before& before) {
    constexpr int words = int(sizeof(Instruction) / 4), each = (words + 31) / 32;
    const int     lane   = int(threadIdx.x % 32);
    const auto    policy = l2_evict_first();
    unsigned      next[each];
    const auto    read = [&](int op) {
#pragma unroll
        for (int w = 0; w < each; w++)
            if (op < n_ops && lane + 32 * w < words)
                next[w] = reinterpret_cast<const unsigned*>(program + op)[lane + 32 * w];
    };
    read(0);
    // Positions in the circular buffer count up without wrapping; gaps at the buffer's end count, too. `head`: where the next stage
    // begins. `start`: in lane n, where stage n begins. `in_use`: how many stages are not yet released, from `oldest` on.
    int      head = 0, start = 0, oldest = 0, in_use = 0;
    unsigned oldest_parity = 0;
    for (int op = 0; op < n_ops; op++) {
        if (op >= slots) mbarrier_wait(all.done + op % slots, unsigned(op / slots - 1) & 1);
#pragma unroll
        for (int w = 0; w < each; w++)
            if (lane + 32 * w < words) reinterpret_cast<unsigned*>(all.ops + op % slots)[lane + 32 * w] = next[w];
        __syncwarp();
        Instruction& from = all.ops[op % slots];
        if (lane == 0) {
            const auto find = [&](auto& p) {
                if (p) p += exchange;
            };
            find(from.add), find(from.x), find(from.q), find(from.k), find(from.v), find(from.attended);
            for (int k = 0; k < from.all.n; k++)
                if (Projection& to = from.all.projection[k]; to.out && !to.out_is_float)
                    to.out = static_cast<Half*>(to.out) + exchange;
            from.cleared += cleared / 8;
            from.next_chunk_of_next_step = from.next_chunk + int(!odd);
            from.next_chunk += int(odd);
        }
        if (lane == 0 && !from.is_attention) {
            const auto until      = [&](unsigned ctas) { return int(unsigned(from.n_pairs) * ctas / gridDim.x); };
            const bool is_dynamic = from.n_dynamic > 0;
            from.pairs            = is_dynamic ? from.n_static * from.rows : until(blockIdx.x + 1) - until(blockIdx.x);
            from.first_pair       = is_dynamic ? int(blockIdx.x) * from.pairs : until(blockIdx.x);
            from.stages           = (2 * from.pairs + from.rows - 1) / from.rows;
        }
        __syncwarp();
        mbarrier_arrive(all.known + op % slots);
        read(op + 1);
        before(from);
        if (from.is_attention) continue;
        // A lane copies one part (data, scales or minima) of one projection's rows.
        const int part = lane % 3, n_bytes = from.rows * from.row_bytes, bytes = from.part_bytes[part],
                  part_at = from.rows * (part == 0   ? 0
                                         : part == 1 ? from.part_bytes[0]
                                                     : from.row_bytes - bytes);
        const Rows    rows_here(from, min(lane / 3, 2));
        const bool    copies  = lane < 9 && part < from.n_parts && lane / 3 < from.all.n;
        const Weight& w       = rows_here.projection->weight;
        const auto*   data    = static_cast<const unsigned char*>(part == 0 ? w.data : part == 1 ? w.scales : w.mins);
        const auto    acquire = [&](int stage_bytes) {
            const int skipped = pipeline.begin(stage_bytes) != pipeline.at ? pipeline.bytes - pipeline.at : 0;
            while (in_use > 0 && (in_use == max_stages ||
                                  head + skipped + stage_bytes - __shfl_sync(~0u, start, oldest) > pipeline.bytes)) {
                mbarrier_wait(pipeline.empty + oldest, oldest_parity);
                in_use--;
                if (++oldest == max_stages) oldest = 0, oldest_parity ^= 1;
            }
        };
        // Loads a stage; this lane copies n rows of it, from row `first` of its projection on.
        const auto load_stage = [&](int stage_bytes, int rows, int to, std::int64_t first, int n) {
            const int at = pipeline.begin(stage_bytes);
            acquire(stage_bytes);
            if (at != pipeline.at) head += pipeline.bytes - pipeline.at;
            if (lane == 0) mbarrier_arrive_expect_tx(pipeline.full + pipeline.index, unsigned(rows * from.row_bytes));
            __syncwarp();
            if (copies && n > 0)
                tma_copy_bulk(pipeline.memory + at + part_at + to * bytes, data + first * bytes, unsigned(n * bytes),
                              pipeline.full + pipeline.index, policy);
            if (lane == int(pipeline.index)) start = head;
            head += stage_bytes, in_use++;
            pipeline.advance(stage_bytes);
        };
        for (int stage = 0, done = 0; stage < from.stages; stage++, done += from.rows) {
            const int rows = min(from.rows, 2 * from.pairs - done), low = max(done, rows_here.begin),
                      high = min(done + rows, rows_here.end);
            load_stage(n_bytes, rows, low - done, rows_here.first + low - rows_here.begin, high - low);
        }
        for (int n = 0; from.n_dynamic > 0; n++) {
            int chunk = from.n_dynamic;
            acquire(n_bytes); // only with room for it: a chunk taken too early is taken from a faster CTA
            if (lane == 0 && n < max_dynamic_chunks) chunk = int(atomicAdd(from.next_chunk, 1u));
            chunk               = __shfl_sync(~0u, chunk, 0);
            const bool is_there = chunk < from.n_dynamic;
            const int  first    = (from.n_static * int(gridDim.x) + chunk) * from.rows,
                      rows      = min(from.rows, from.n_pairs - first);
            if (lane == 0) from.taken[n] = is_there ? first : -1, from.n_taken = n;
            if (!is_there) { // an empty stage: there are no more
                load_stage(0, 0, 0, 0, 0);
                break;
            }
            for (int which = 0; which < 2; which++) load_stage(n_bytes, rows, 0, first, lane / 3 == which ? rows : 0);
        }
    }
}

} // namespace

#endif

} // namespace quire::cuda::megakernel
